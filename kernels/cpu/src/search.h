// The scale of least squared error among a few, for many blocks at once: a block to a lane, so that
// the sum over a block is a tree of whole vectors, in the order of mxquant.blocks.ordered_sum.
#pragma once
#include "mxq.h"
#include "numbers.h"
#include "scales.h"

namespace mxq {
namespace {

// Magnitudes nearest to q on the grid of E2M1, ties to even, saturating; see numerics.nearest_values.
inline F::V nearest_element(F::V q) {
  const F::V binade = F::min(F::max(F::binade15(q), F::set1(1.5f)), F::set1(6.0f));
  const F::V shift = F::set1(0x1p22f);
  const F::V shifted = F::fma(binade, shift, q);  // the product is exact
  return F::min(F::fnma(binade, shift, shifted), F::set1(6.0f));
}

// Squared distance of x / scale from the grid. EXACT divides; otherwise the quotient comes from the
// reciprocal and one correction, which gives the same number as long as nothing is subnormal or huge.
template <bool EXACT>
inline F::V squared_residual(F::V x, F::V scale, F::V reciprocal) {
  F::V q;
  if (EXACT) {
    q = F::div(x, scale);
  } else {
    q = F::mul(x, reciprocal);
    q = F::fma(F::fnma(q, scale, x), reciprocal, q);
  }
  const F::V residual = F::sub(nearest_element(q), q);
  return F::mul(residual, residual);
}

// Sum over `count` vectors at x: halves are added to one another until one is left.
template <bool EXACT>
F::V ordered_error(const float* x, int count, F::V scale, F::V reciprocal, float* sums) {
  const auto at = [&](int i) { return squared_residual<EXACT>(F::load(x + i * F::N), scale, reciprocal); };
  if (count == 16) {
    F::V s[8];
    for (int i = 0; i < 8; i++) s[i] = F::add(at(i), at(8 + i));
    for (int i = 0; i < 4; i++) s[i] = F::add(s[i], s[4 + i]);
    return F::add(F::add(s[0], s[2]), F::add(s[1], s[3]));
  }
  int half = count / 2, rest = count - half;
  for (int i = 0; i < half; i++) F::store(sums + i * F::N, F::add(at(i), at(rest + i)));
  if (rest > half) F::store(sums + half * F::N, at(half));
  while (rest > 1) {
    half = rest / 2;
    const int next = rest - half;
    for (int i = 0; i < half; i++) F::store(sums + i * F::N, F::add(F::load(sums + i * F::N), F::load(sums + (next + i) * F::N)));
    rest = next;
  }
  return F::load(sums);
}

// Whether the short division is exact: see squared_residual. Zeros are.
inline bool is_tame(const float* x, int count, const float* amax) {
  F::V smallest = F::set1(1.0f);
  const F::V zero = F::set1(0.0f), one = F::set1(1.0f);
  for (int i = 0; i < count; i++) {
    const F::V v = F::load(x + i * F::N);
    smallest = F::min(smallest, F::where_less(zero, v, v, one));
  }
  float s[F::N];
  F::store(s, smallest);
  bool tame = F::N > 4;  // plain C++ has no fused multiply-add that could be relied on
  for (int i = 0; i < F::N; i++) tame = tame && s[i] >= 0x1p-100f && amax[i] <= 0x1p60f;
  return tame;
}

inline bool is_tame_scale(const float* scale) {
  bool tame = true;
  for (int i = 0; i < F::N; i++) tame = tame && scale[i] >= 0x1p-60f && scale[i] <= 0x1p20f;
  return tame;
}

// One group of F::N blocks. x: count vectors of magnitudes; codes: where the rule starts, and the answer.
inline void search_group(const QuantJob& job, const float* x, int count, const float* amax, const uint8_t* four,
                         uint8_t* codes, float* sums) {
  static constexpr int kCodes[] = {0, -1, 1, 3, 4, 5, 6}, kBinades[] = {0, 1, -1, 2}, kNone[] = {0, 0};
  const bool powers = job.rule == P2_SEARCH, two = job.rule == FOUR_OVER_SIX;
  const int* offsets = powers ? kBinades : two ? kNone : kCodes;
  const int tries = powers ? 4 : two ? 2 : 7;
  const int low = powers ? 0 : 1, high = powers ? job.largest : job.format.max_code;
  const bool tame = is_tame(x, count, amax);
  float best[F::N], scale[F::N], reciprocal[F::N], error[F::N];
  uint8_t start[F::N];
  for (int i = 0; i < F::N; i++) start[i] = codes[i], best[i] = INFINITY;
  for (int k = 0; k < tries; k++) {
    uint8_t candidate[F::N];
    for (int i = 0; i < F::N; i++) {
      const int from = two && k == 1 ? four[i] : start[i];
      candidate[i] = static_cast<uint8_t>(clamp(from + offsets[k], low, high));
      const float s = job.tables->effective[candidate[i]];
      scale[i] = s > 0 ? s : INFINITY;
      reciprocal[i] = job.tables->reciprocal[candidate[i]];
    }
    const F::V s = F::load(scale), r = F::load(reciprocal);
    const bool quick = tame && is_tame_scale(scale);
    const F::V sum = quick ? ordered_error<false>(x, count, s, r, sums) : ordered_error<true>(x, count, s, r, sums);
    const F::V ratio = F::div(s, F::load(amax));
    F::store(error, F::mul(sum, F::mul(ratio, ratio)));
    for (int i = 0; i < F::N; i++) {
      const bool better = error[i] < best[i];
      codes[i] = better || k == 0 ? candidate[i] : codes[i];
      best[i] = better ? error[i] : best[i];
    }
  }
}

}  // namespace
}  // namespace mxq
