// One OpenMP runtime only: a second one in the process doubles the threads, and each runtime's idle
// threads spin on the cores that the other needs. So this library links none. It looks for the entry
// point of the runtime that PyTorch has already loaded, `GOMP_parallel`, which libgomp, libomp and
// libiomp5 all have; without one it starts plain threads.
#include "parallel.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <thread>
#include <vector>

namespace mxq {
namespace {

using Fork = void (*)(void (*)(void*), void*, unsigned, unsigned);

struct Range {
  std::atomic<int64_t> next;
  int64_t tasks;
  void (*run)(void*, int64_t);
  void* context;
};

void work(void* data) {
  FloatControl control;
  auto* range = static_cast<Range*>(data);
  for (int64_t task; (task = range->next.fetch_add(1, std::memory_order_relaxed)) < range->tasks;)
    range->run(range->context, task);
}

// Threads do not survive a fork, and an OpenMP runtime that had some would wait for them for ever.
std::atomic<bool> forked{false};

Fork find_runtime() {
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  return reinterpret_cast<Fork>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
}

}  // namespace

void parallel_tasks(int64_t tasks, int threads, void (*run)(void*, int64_t), void* context) {
  static const Fork fork_threads = find_runtime();
  Range range{{0}, tasks, run, context};
  if (threads > tasks) threads = static_cast<int>(tasks);
  if (threads <= 1 || forked) return work(&range);
  if (fork_threads != nullptr) return fork_threads(work, &range, static_cast<unsigned>(threads), 0);
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++) others.emplace_back(work, &range);
  work(&range);
  for (auto& thread : others) thread.join();
}

}  // namespace mxq
