// driver.h: the part of NVIDIA's driver API that the CUDA device calls, found in libcuda.so.1 at run time.
//
// Own declarations: no CUDA header or library is needed to build. Signatures are those of the versioned symbols named.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace expertile::cuda {

using Result = int;  // 0 = success
using DevicePointer = unsigned long long;
using Handle = void*;  // context, module, function, stream, event, graph, node: all opaque

inline constexpr Result kSuccess = 0;
inline constexpr Result kOutOfMemory = 2;

struct KernelNode {  // CUDA_KERNEL_NODE_PARAMS_v1
  Handle function;
  unsigned grid_x, grid_y, grid_z;
  unsigned block_x, block_y, block_z;
  unsigned shared_bytes;
  void** parameters;
  void** extra;
};

struct GraphEdge {  // CUgraphEdgeData
  unsigned char from_port;
  unsigned char to_port;
  unsigned char type;
  unsigned char reserved[5];
};
inline constexpr GraphEdge kProgrammaticEdge = {1, 0, 1, {}};

// name of the member, symbol, parameters
// clang-format off
#define EXPERTILE_CUDA_DRIVER(call)                                                                          \
  call(init, "cuInit", unsigned)                                                                             \
  call(driver_version, "cuDriverGetVersion", int*)                                                           \
  call(error_string, "cuGetErrorString", Result, const char**)                                               \
  call(device_count, "cuDeviceGetCount", int*)                                                               \
  call(device_get, "cuDeviceGet", int*, int)                                                                 \
  call(device_name, "cuDeviceGetName", char*, int, int)                                                      \
  call(device_attribute, "cuDeviceGetAttribute", int*, int, int)                                             \
  call(context_retain, "cuDevicePrimaryCtxRetain", Handle*, int)                                             \
  call(context_release, "cuDevicePrimaryCtxRelease_v2", int)                                                 \
  call(context_push, "cuCtxPushCurrent_v2", Handle)                                                          \
  call(context_pop, "cuCtxPopCurrent_v2", Handle*)                                                           \
  call(context_device, "cuCtxGetDevice", int*)                                                               \
  call(context_wait, "cuCtxSynchronize")                                                                     \
  call(memory_info, "cuMemGetInfo_v2", std::size_t*, std::size_t*)                                           \
  call(memory_alloc, "cuMemAlloc_v2", DevicePointer*, std::size_t)                                           \
  call(memory_free, "cuMemFree_v2", DevicePointer)                                                           \
  call(pointer_attribute, "cuPointerGetAttribute", void*, int, DevicePointer)                                \
  call(copy_to_device, "cuMemcpyHtoDAsync_v2", DevicePointer, const void*, std::size_t, Handle)              \
  call(copy_to_host, "cuMemcpyDtoHAsync_v2", void*, DevicePointer, std::size_t, Handle)                      \
  call(copy_on_device, "cuMemcpyDtoDAsync_v2", DevicePointer, DevicePointer, std::size_t, Handle)            \
  call(module_load, "cuModuleLoadData", Handle*, const void*)                                                \
  call(module_unload, "cuModuleUnload", Handle)                                                              \
  call(module_function, "cuModuleGetFunction", Handle*, Handle, const char*)                                 \
  call(function_attribute, "cuFuncGetAttribute", int*, int, Handle)                                          \
  call(stream_create, "cuStreamCreate", Handle*, unsigned)                                                   \
  call(stream_context, "cuStreamGetCtx", Handle, Handle*)                                                    \
  call(stream_destroy, "cuStreamDestroy_v2", Handle)                                                         \
  call(stream_wait, "cuStreamSynchronize", Handle)                                                           \
  call(event_create, "cuEventCreate", Handle*, unsigned)                                                     \
  call(event_destroy, "cuEventDestroy_v2", Handle)                                                           \
  call(event_record, "cuEventRecord", Handle, Handle)                                                        \
  call(event_wait, "cuEventSynchronize", Handle)                                                             \
  call(event_elapsed, "cuEventElapsedTime", float*, Handle, Handle)                                          \
  call(graph_create, "cuGraphCreate", Handle*, unsigned)                                                     \
  call(graph_destroy, "cuGraphDestroy", Handle)                                                              \
  call(graph_kernel, "cuGraphAddKernelNode", Handle*, Handle, const Handle*, std::size_t, const KernelNode*) \
  call(graph_empty, "cuGraphAddEmptyNode", Handle*, Handle, const Handle*, std::size_t)                      \
  call(graph_instantiate, "cuGraphInstantiateWithFlags", Handle*, Handle, unsigned long long)                \
  call(graph_upload, "cuGraphUpload", Handle, Handle)                                                        \
  call(graph_launch, "cuGraphLaunch", Handle, Handle)                                                        \
  call(graph_exec_destroy, "cuGraphExecDestroy", Handle)
// clang-format on

struct Driver {
#define EXPERTILE_CUDA_MEMBER(name, symbol, ...) Result (*name)(__VA_ARGS__) = nullptr;
  EXPERTILE_CUDA_DRIVER(EXPERTILE_CUDA_MEMBER)
#undef EXPERTILE_CUDA_MEMBER
  // Edges that let the next kernel's threadgroups start early (drivers from 12.3 on); nullptr where there are none.
  Result (*graph_edges)(Handle, const Handle*, const Handle*, const GraphEdge*, std::size_t) = nullptr;
  std::string absent;  // why the driver cannot be used; "" = it can

  // Throws DeviceError `[where] expected ..., got <the driver's words>` unless the result is success.
  void check(Result result, const std::string& where) const;
  std::string words(Result result) const;
};

// Loaded and initialised on first use, once a process; see `absent`.
const Driver& driver();

}  // namespace expertile::cuda
