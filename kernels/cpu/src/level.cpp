// The kernels of one instruction level: compiled once for each, with MXQ_LEVEL naming it. All that is
// included here has internal linkage, so that no function compiled for one level is used by another.
#define AVX512_LEVEL 2
#define AVX2_LEVEL 1
#if MXQ_LEVEL == AVX512_LEVEL
#define MXQ_HAS_FOLD
#define MXQ_HAS_BF16
#include "simd_avx512.h"
#elif MXQ_LEVEL == AVX2_LEVEL
#define MXQ_HAS_FOLD
#include "simd_avx2.h"
#else
#include "simd_portable.h"
#endif
MXQ_EXPORT int mxq_scale_values(const mxq::ScaleFormat* f, float* values);
#include "quantize.h"
#include "dequantize.h"
#include "linear.h"
#if MXQ_LEVEL == AVX512_LEVEL
#include "rows_avx512.h"
#elif MXQ_LEVEL == AVX2_LEVEL
#include "rows_avx2.h"
#endif

namespace mxq {
namespace {

int linear_all(const LinearJob* job) {
#if MXQ_LEVEL == AVX512_LEVEL
  if (job->dtype == BF16) return job->m <= kMostDirect ? direct(*job) : panels<Half>(*job);
  if (job->m <= kFewSingles) return direct_singles(*job);
#endif
#if MXQ_LEVEL == AVX2_LEVEL
  if (job->m <= kMaxDirectRows) return few_rows(*job);
#endif
  return panels<Single>(*job);
}

// Products and sums in registers, of the kind that linear has for a dtype; returns how many.
template <class P>
double multiply(int64_t rounds) {
  constexpr int kSums = 12;     // more than a product takes cycles, times what starts in one
  volatile float unknown = 0;  // to the compiler, which would take all sums for one
  alignas(64) typename P::T operand[64];
  for (auto& x : operand) x = static_cast<typename P::T>(unknown);
  F::V sum[kSums];
#pragma GCC unroll 16
  for (auto& s : sum) s = F::set1(unknown);
  const auto w = P::load(operand);
  for (int64_t i = 0; i < rounds; i++) {
#pragma GCC unroll 16
    for (auto& s : sum) s = P::dot(s, operand, w);
  }
  float all = 0;
#pragma GCC unroll 16
  for (auto& s : sum) all += F::sum(s);
  return 2.0 * static_cast<double>(rounds) * kSums * P::STEP + all;  // the sums are zero
}

double multiply_all(int dtype, int64_t rounds) {
#if MXQ_LEVEL == AVX512_LEVEL
  if (dtype == BF16) return multiply<Half>(rounds);
#endif
  return dtype < F32 ? 0 : multiply<Single>(rounds);
}

constexpr Kernels kKernels{quantize_part, dequantize_part, linear_all, multiply_all};

}  // namespace

#if MXQ_LEVEL == AVX512_LEVEL
const Kernels& avx512_kernels() { return kKernels; }
#elif MXQ_LEVEL == AVX2_LEVEL
const Kernels& avx2_kernels() { return kKernels; }
#else
const Kernels& portable_kernels() { return kKernels; }
#endif

}  // namespace mxq
