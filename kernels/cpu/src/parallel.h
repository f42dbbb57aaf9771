// Threads for a range of tasks, floating-point control, and scratch memory.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <type_traits>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace mxq {

// Calls run(context, task) for every task in [0, tasks) on up to `threads` threads. Tasks are taken
// in increasing order by whichever thread is free, so a core that is busy elsewhere holds nothing up.
void parallel_tasks(int64_t tasks, int threads, void (*run)(void*, int64_t), void* context);

template <class F>
void parallel_for(int64_t tasks, int threads, F&& body) {
  using Body = std::remove_reference_t<F>;
  parallel_tasks(tasks, threads, [](void* context, int64_t task) { (*static_cast<Body*>(context))(task); }, &body);
}

// Asks for a cache line that will be needed in a while. The compilers' own builtin would do, but GCC
// takes a call of a function that does no more than prefetch for dead code.
inline void ask_for(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" : : "m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p, 0, 2);
#endif
}

// Has addresses translated that will be needed soon. For a page that was not in use lately that is a walk
// through tables in memory, and whatever asks for an address first waits for it; several at once wait together.
inline void find_pages(const void* start, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 4096) ask_for(static_cast<const char*>(start) + i);
}

// Default rounding and no flushing of subnormals while it lives, whatever torch.set_flush_denormal did.
class FloatControl {
 public:
#if defined(__x86_64__)
  FloatControl() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~FloatControl() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
  FloatControl() {}
#endif
};

// Memory aligned to cache lines. Null if there is none left.
class Scratch {
 public:
  explicit Scratch(int64_t bytes) : data_(std::aligned_alloc(64, (bytes + 127) / 64 * 64)) {}
  ~Scratch() { std::free(data_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_;
};

}  // namespace mxq
