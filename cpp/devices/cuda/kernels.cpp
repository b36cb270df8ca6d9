#include "devices/cuda/kernels.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <set>
#include <thread>

#include "devices/cuda/code_cache.h"
#include "devices/cuda/sources.h"
#include "devices/disk_cache.h"
#include "expertile/error.h"

namespace expertile::cuda {
namespace {

constexpr int kAttributeMaxThreads = 0;

const Entry* find_entry(const std::string& name) {
  static const auto* by_name = [] {
    auto* map = new std::map<std::string, const Entry*>;
    for (const Entry& entry : cuda_entries()) (*map)[entry.name] = &entry;
    return map;
  }();
  const auto found = by_name->find(name);
  return found == by_name->end() ? nullptr : found->second;
}

const Header& file_of(const Entry& entry) {
  for (const Header& file : cuda_files()) {
    if (std::string(entry.file) == file.name) return file;
  }
  throw DeviceError(expected_got("kernel " + std::string(entry.name), "an embedded source", entry.file));
}

}  // namespace

struct Kernels::Job {
  const Entry* entry = nullptr;
  std::string key;
  std::string code;
  bool from_cache = false;
  std::exception_ptr error;
};

Kernels::Kernels(ContextRef context, int threads)
    : context_(std::move(context)),
      threads_(threads > 0 ? threads : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()))),
      options_(compiler_options(context_->major, context_->minor)) {}

Kernels::~Kernels() {
  const Driver& d = driver();
  if (d.context_push(context_->handle) != kSuccess) return;
  for (const auto& [name, kernel] : kernels_) d.module_unload(kernel.module);
  Handle popped = nullptr;
  d.context_pop(&popped);
}

std::string Kernels::key_of(const Entry& entry) const {
  std::vector<std::string> texts = {entry.name, entry.text, file_of(entry).text, compiler_version()};
  for (const Header& header : cuda_shim()) texts.push_back(header.text);
  texts.insert(texts.end(), options_.begin(), options_.end());
  return cache_key(texts);
}

void Kernels::build(Job& job) const {
  job.key = key_of(*job.entry);
  if (const auto stored = cached_code(job.key)) {
    job.code = *stored;
    job.from_cache = true;
    return;
  }
  std::vector<Header> headers = cuda_shim();
  headers.push_back(file_of(*job.entry));
  const std::string source = "#include \"" + std::string(job.entry->file) + "\"\n" + job.entry->text;
  job.code = compile(job.entry->name, source, headers, options_);
  job.from_cache = false;
  cache_code(job.key, job.code);
}

void Kernels::load(const Job& job) {
  const Driver& d = driver();
  const std::string where = "kernel " + std::string(job.entry->name);
  Kernel kernel;
  kernel.threads = job.entry->threads;
  kernel.early = job.entry->early;
  d.check(d.module_load(&kernel.module, job.code.data()), where + ": module");
  int most = 0;
  Result result = d.module_function(&kernel.function, kernel.module, job.entry->name);
  if (result == kSuccess) result = d.function_attribute(&most, kAttributeMaxThreads, kernel.function);
  if (result != kSuccess || most < static_cast<int>(kernel.threads)) {
    d.module_unload(kernel.module);
    d.check(result, where);
    throw DeviceError(expected_got(where, std::to_string(kernel.threads) + " threads a threadgroup", most));
  }
  kernels_[job.entry->name] = kernel;
}

void Kernels::prepare(const std::vector<std::string>& names) {
  std::vector<Job> jobs;
  std::set<std::string> seen;
  for (const std::string& name : names) {
    if (kernels_.contains(name) || !seen.insert(name).second) continue;
    const Entry* entry = find_entry(name);
    if (!entry) throw DeviceError(expected_got("prepare", "a kernel's name", name));
    jobs.push_back({entry, {}, {}, false, {}});
  }
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < jobs.size(); i = next++) {
      try {
        build(jobs[i]);
      } catch (...) {
        jobs[i].error = std::current_exception();
      }
    }
  };
  std::vector<std::thread> helpers;
  const std::size_t most = std::min(jobs.size(), static_cast<std::size_t>(threads_));
  for (std::size_t i = 1; i < most; ++i) helpers.emplace_back(work);
  work();
  for (std::thread& helper : helpers) helper.join();
  const Current current(*context_);
  for (Job& job : jobs) {
    if (job.error) std::rethrow_exception(job.error);
    try {
      load(job);
    } catch (const DeviceError&) {  // whole, but not what this driver takes: once more from the source
      if (!job.from_cache) throw;
      forget_code(job.key);
      build(job);
      load(job);
    }
  }
}

}  // namespace expertile::cuda
