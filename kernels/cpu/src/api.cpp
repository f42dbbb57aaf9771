// The C interface: checks arguments, picks the instruction level, and shares out the work.
#include <atomic>
#include <mutex>

#include "mxq.h"
#include "parallel.h"

namespace mxq {
namespace {

// What the processor can do, as bits; 1 << level says that the level can be used.
bool can_use(int level) {
  if (level == PORTABLE) return true;
#if defined(MXQ_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (level == AVX2) return avx2;
  if (level == AVX512)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
#endif
  return false;
}

int best_level() {
  int level = AVX512;
  while (!can_use(level)) level--;
  return level;
}

std::atomic<int>& level() {
  static std::atomic<int> value{best_level()};
  return value;
}

const Kernels& kernels() {
#if defined(MXQ_X86)
  if (level() == AVX512) return avx512_kernels();
  if (level() == AVX2) return avx2_kernels();
#endif
  return portable_kernels();
}

bool is_block(int rows, int columns) {
  return rows >= 1 && rows <= 4096 && columns >= 8 && columns <= 1024 && (columns & (columns - 1)) == 0;
}

bool is_dtype(int dtype) { return dtype >= F32 && dtype <= F16; }

// Sizes whose products stay far from overflow.
bool is_size(int64_t n) { return n >= 1 && n <= int64_t{1} << 40; }

bool is_format(const ScaleFormat& f) {
  return (f.mantissa_bits == 0 || f.mantissa_bits == 3) && (f.bias == 7 || f.bias == 15 || f.bias == 127) && f.max_code > 0 &&
         f.max_code < 255 && f.global_scale >= 0;
}

bool is_valid(const QuantJob& j) {
  const bool pointers = j.x != nullptr && j.packed != nullptr && j.scale != nullptr && j.tables != nullptr;
  const bool format = is_format(j.format) && (j.rule >= CARRY) == (j.format.mantissa_bits == 0);
  const bool codes = j.largest >= 0 && j.largest < 255;
  bool tries = j.tries >= 0 && j.tries <= 16;
  for (int i = 0; tries && i < j.tries; i++) tries = j.offsets[i] >= -255 && j.offsets[i] <= 255;
  return pointers && is_size(j.rows) && is_size(j.columns) && j.stride >= 0 && is_dtype(j.dtype) && format && codes && tries &&
         j.rule >= ABSMAX && j.rule <= P2_SEARCH && j.carry >= 0 && j.carry <= 0x7FFFFF && j.first_row >= 0 &&
         j.first_row <= int64_t{1} << 40 && is_block(j.block_rows, j.block_columns);
}

bool is_valid(const DequantJob& j) {
  const bool table = j.bits == 4 ? j.table != nullptr : (j.bits == 6 || j.bits == 8) && j.elements != nullptr;
  return j.packed != nullptr && j.scale != nullptr && j.out != nullptr && table && is_size(j.rows) && is_size(j.columns) &&
         is_dtype(j.dtype) && is_block(j.block_rows, j.block_columns);
}

bool is_valid(const LinearWeight& w) {
  return w.packed != nullptr && w.scale != nullptr && w.table != nullptr && is_size(w.n) && is_size(w.k) && is_dtype(w.bias_dtype) &&
         is_format(w.format) && is_block(w.block_rows, w.block_columns);
}

}  // namespace

MXQ_EXPORT int mxq_sizes(int64_t* sizes) {
  if (sizes == nullptr) return BAD_ARGUMENT;
  sizes[0] = sizeof(QuantJob), sizes[1] = sizeof(DequantJob), sizes[2] = sizeof(LinearWeight);
  sizes[3] = sizeof(QuantTables), sizes[4] = sizeof(DecodeTable), sizes[5] = sizeof(ScaleFormat);
  return OK;
}

MXQ_EXPORT int mxq_level() { return level(); }

MXQ_EXPORT int mxq_best_level() { return best_level(); }

MXQ_EXPORT int mxq_set_level(int wanted) {
  if (wanted < PORTABLE || wanted >= LEVELS || !can_use(wanted)) return NO_SUCH_LEVEL;
  level() = wanted;
  return OK;
}

MXQ_EXPORT int mxq_quantize(QuantJob* job) {
  if (job == nullptr || !is_valid(*job)) return BAD_ARGUMENT;
  const Kernels& k = kernels();
  const int64_t bands = (job->rows + job->block_rows - 1) / job->block_rows;
  constexpr int64_t kElements = 1 << 16;  // in one task
  const int64_t height = kElements / job->columns / job->block_rows + 1, tasks = (bands + height - 1) / height;
  std::atomic<int64_t> bad{job->rows};
  std::atomic<int> status{OK};
  QuantJob total = *job;
  total.zero_scales = total.subnormal_scales = total.saturated = 0;
  total.error = total.signal = 0;
  std::mutex adding;
  parallel_for(tasks, job->threads, [&](int64_t task) {
    QuantJob part = *job;
    part.zero_scales = part.subnormal_scales = part.saturated = 0;
    part.error = part.signal = 0;
    const int64_t first = task * height, last = first + height < bands ? first + height : bands;
    const int result = k.quantize(&part, first, last);
    if (result == NOT_FINITE) {
      int64_t seen = bad;
      while (part.bad_row < seen && !bad.compare_exchange_weak(seen, part.bad_row)) {}
    } else if (result != OK) {
      status = result;
    }
    if (!job->with_stats) return;
    const std::lock_guard<std::mutex> lock(adding);
    total.zero_scales += part.zero_scales;
    total.subnormal_scales += part.subnormal_scales;
    total.saturated += part.saturated;
    total.error += part.error;
    total.signal += part.signal;
  });
  *job = total;
  job->bad_row = bad < job->rows ? bad.load() : -1;
  return status != OK ? status.load() : job->bad_row >= 0 ? NOT_FINITE : OK;
}

MXQ_EXPORT int mxq_dequantize(const DequantJob* job) {
  if (job == nullptr || !is_valid(*job)) return BAD_ARGUMENT;
  const Kernels& k = kernels();
  constexpr int64_t kElements = 1 << 16;
  const int64_t rows = kElements / job->columns + 1, tasks = (job->rows + rows - 1) / rows;
  std::atomic<int> status{OK};
  parallel_for(tasks, job->threads, [&](int64_t task) {
    const int64_t first = task * rows, last = first + rows < job->rows ? first + rows : job->rows;
    const int result = k.dequantize(job, first, last);
    if (result != OK) status = result;
  });
  return status;
}

MXQ_EXPORT int mxq_linear(const LinearWeight* weight, const void* x, void* y, int64_t m, int dtype, int threads) {
  if (weight == nullptr || !is_valid(*weight) || x == nullptr || y == nullptr || !is_size(m) || !is_dtype(dtype)) return BAD_ARGUMENT;
  // Waking a thread costs some microseconds.
  const bool alone = threads < 1 || m * weight->n * weight->k < (int64_t{1} << 17);
  const LinearJob job{*weight, x, y, m, dtype, alone ? 1 : threads};
  FloatControl control;
  return kernels().linear(&job);
}

// Multiplies and adds in registers alone, `rounds` times on each thread; returns the number of operations.
// Its speed is the most that linear can reach.
MXQ_EXPORT double mxq_multiply(int dtype, int64_t rounds, int threads) {
  if (!is_dtype(dtype) || rounds < 1 || threads < 1) return 0;
  std::mutex adding;
  double operations = 0;
  parallel_for(threads, threads, [&](int64_t) {
    const double mine = kernels().multiply(dtype, rounds);
    const std::lock_guard<std::mutex> lock(adding);
    operations += mine;
  });
  return operations;
}

}  // namespace mxq
