// plants_encoder.cpp: misuses of command buffers and encoders, each one lambda.
#include <vector>

#include "rig.h"

namespace standin {

Plants encoder_plants() {
  return {
      {"nothing",
       [] {
         Rig rig;
         rig.encode();
         rig.dispatch();
         rig.encoder->memoryBarrier(MTL::BarrierScopeBuffers);
         rig.dispatch();
         rig.finish();
         if (*static_cast<int*>(rig.rows->contents()) != -1) fault("mm_clear did not run");
       }},
      {"missing buffer",
       [] {
         Rig rig;
         rig.encode();
         rig.set_args();
         rig.encoder->setBuffer(rig.rows.get(), 0, 1);
         rig.encoder->dispatchThreadgroups(rig.grid, rig.threads);
       }},
      {"missing args",
       [] {
         Rig rig;
         rig.encode()->setBuffer(rig.rows.get(), 0, 1);
         rig.encoder->setBuffer(rig.weights.get(), 0, 2);
         rig.encoder->dispatchThreadgroups(rig.grid, rig.threads);
       }},
      {"args of another size",
       [] {
         Rig rig;
         rig.encode()->setBytes("12345678", 8, 0);
         rig.encoder->setBuffer(rig.rows.get(), 0, 1);
         rig.encoder->setBuffer(rig.weights.get(), 0, 2);
         rig.encoder->dispatchThreadgroups(rig.grid, rig.threads);
       }},
      {"too many args",
       [] {
         Rig rig;
         const std::vector<char> bytes(4097);
         rig.encode()->setBytes(bytes.data(), bytes.size(), 0);
       }},
      {"wrong index",
       [] {
         Rig rig;
         rig.encode();
         rig.bind();
         rig.encoder->setBuffer(rig.weights.get(), 0, 3);
         rig.encoder->dispatchThreadgroups(rig.grid, rig.threads);
       }},
      {"index beyond the last",
       [] {
         Rig rig;
         rig.encode()->setBuffer(rig.rows.get(), 0, 31);
       }},
      {"offset beyond the end",
       [] {
         Rig rig;
         rig.encode()->setBuffer(rig.rows.get(), 1200, 1);
       }},
      {"offset of two bytes",
       [] {
         Rig rig;
         rig.encode()->setBuffer(rig.rows.get(), 2, 1);
       }},
      {"too many threads",
       [] {
         Rig rig;
         rig.encode();
         rig.bind();
         rig.encoder->dispatchThreadgroups(rig.grid, MTL::Size(2048, 1, 1));
       }},
      {"other threads than declared",
       [] {
         Rig rig;
         rig.encode();
         rig.bind();
         rig.encoder->dispatchThreadgroups(rig.grid, MTL::Size(128, 1, 1));
       }},
      {"zero grid",
       [] {
         Rig rig;
         rig.encode();
         rig.bind();
         rig.encoder->dispatchThreadgroups(MTL::Size(0, 1, 1), rig.threads);
       }},
      {"grid beyond 32 bits",
       [] {
         Rig rig;
         rig.encode();
         rig.bind();
         rig.encoder->dispatchThreadgroups(MTL::Size(1ul << 32, 1, 1), rig.threads);
       }},
      {"indirect grid beyond its buffer",
       [] {
         Rig rig;
         rig.encode();
         rig.bind();
         rig.encoder->dispatchThreadgroups(rig.rows.get(), 1192, rig.threads);
       }},
      {"no pipeline",
       [] {
         Rig rig;
         rig.encoder = rig.commands->computeCommandEncoder(MTL::DispatchTypeConcurrent);
         rig.dispatch();
       }},
      {"commit before endEncoding",
       [] {
         Rig rig;
         rig.encode();
         rig.dispatch();
         rig.commands->commit();
       }},
      {"commit twice",
       [] {
         Rig rig;
         rig.encode();
         rig.dispatch();
         rig.finish();
         rig.commands->commit();
       }},
      {"encoder after its end",
       [] {
         Rig rig;
         rig.encode()->endEncoding();
         rig.dispatch();
       }},
      {"endEncoding twice",
       [] {
         Rig rig;
         rig.encode()->endEncoding();
         rig.encoder->endEncoding();
       }},
      {"two encoders at once",
       [] {
         Rig rig;
         rig.encode();
         rig.encode();
       }},
      {"encoder after commit",
       [] {
         Rig rig;
         rig.encode();
         rig.dispatch();
         rig.finish();
         rig.encode();
       }},
      {"wait before commit",
       [] {
         Rig rig;
         rig.commands->waitUntilCompleted();
       }},
      {"GPU time before the end",
       [] {
         Rig rig;
         rig.encode();
         rig.dispatch();
         rig.encoder->endEncoding();
         rig.commands->commit();
         static_cast<void>(rig.commands->GPUStartTime());
       }},
      {"never waited for",
       [] {
         Rig rig;
         rig.encode();
         rig.dispatch();
         rig.encoder->endEncoding();
         rig.commands->commit();
       }},
      {"missing barrier",
       [] {
         Rig rig;
         rig.encode();
         rig.dispatch();
         rig.dispatch();
         rig.finish();
       }},
      {"missing barrier, overlapping ranges",
       [] {
         Rig rig;
         rig.encode();
         rig.dispatch();
         rig.set_args();
         rig.encoder->setBuffer(rig.rows.get(), 600, 1);
         rig.encoder->setBuffer(rig.buffer(1200).get(), 0, 2);
         rig.encoder->dispatchThreadgroups(MTL::Size(1, 1, 1), rig.threads);
         rig.finish();
       }},
      {"barrier of another scope",
       [] {
         Rig rig;
         rig.encode()->memoryBarrier(MTL::BarrierScopeTextures);
       }},
      {"buffer too small for its kernel",
       [] {
         Rig rig;
         rig.rows = rig.buffer(1196);
         rig.encode();
         rig.dispatch();
         rig.finish();
       }},
      {"buffer freed before the GPU ran",
       [] {
         Rig rig;
         rig.encode();
         rig.dispatch();
         rig.rows.reset();
         rig.finish();
       }},
  };
}

}  // namespace standin
