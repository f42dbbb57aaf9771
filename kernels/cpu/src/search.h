// The scale of least squared error among a few, for many blocks at once: a block to a lane, so that
// the sum over a block is a tree of whole vectors, in the order of mxquant.codec.blocks.ordered_sum.
#pragma once
#include "mxq.h"
#include "numbers.h"
#include "scales.h"

namespace mxq {
namespace {

// Squared distance of x / scale from the grid of E2M1, ties to even, saturating: see
// numerics.nearest_values. EXACT divides; otherwise the quotient comes from the reciprocal and one
// correction, which gives the same number as long as nothing is subnormal or huge.
template <bool EXACT>
inline F::V squared_residual(F::V x, F::V scale, F::V reciprocal) {
  F::V q;
  if (EXACT) {
    q = F::div(x, scale);
  } else {
    q = F::mul(x, reciprocal);
    q = F::fma(F::fnma(q, scale, x), reciprocal, q);
  }
  F::V binade = F::max(F::binade15(q), F::set1(1.5f));
  if (EXACT) binade = F::min(binade, F::set1(6.0f));  // elsewhere an overflow to NaN saturates as well
  const F::V shift = F::set1(0x1p22f);
  const F::V shifted = F::fma(binade, shift, q);  // the product is exact
  const F::V nearest = F::min(F::fnma(binade, shift, shifted), F::set1(6.0f));
  const F::V residual = F::sub(nearest, q);
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
inline bool is_tame(const float* x, int count, F::V amax) {
  if (F::N == 4) return false;  // plain C++ has no fused multiply-add that could be relied on
  F::V smallest = F::set1(1.0f);
  const F::V zero = F::set1(0.0f), one = F::set1(1.0f);
  for (int i = 0; i < count; i++) {
    const F::V v = F::load(x + i * F::N);
    smallest = F::min(smallest, F::where_less(zero, v, v, one));
  }
  return !F::any_less(smallest, F::set1(0x1p-100f)) && !F::any_less(F::set1(0x1p60f), amax);
}

inline bool is_tame_scale(F::V scale) {
  return !F::any_less(scale, F::set1(0x1p-60f)) && !F::any_less(F::set1(0x1p20f), scale);
}

// One group of F::N blocks. x: count vectors of magnitudes; codes: where the rule starts, and the
// answer, as numbers; the first of equals wins.
inline F::V search_group(const QuantJob& job, const float* x, int count, F::V amax, F::V start, F::V four, float* sums) {
  const bool powers = job.rule == P2_SEARCH, two = job.rule == FOUR_OVER_SIX;
  const int tries = two ? 2 : job.tries;
  const F::V low = F::set1(powers ? 0 : 1), high = F::set1(static_cast<float>(powers ? job.largest : job.format.max_code));
  const F::V zero = F::set1(0.0f), one = F::set1(1.0f), infinity = F::set1(INFINITY);
  const bool tame = is_tame(x, count, amax);
  F::V best = infinity, answer = zero;
  for (int k = 0; k < tries; k++) {
    const F::V wanted = two ? (k == 0 ? start : four) : F::add(start, F::set1(job.offsets[k]));
    const F::V code = F::min(F::max(wanted, low), high);
    F::V scale = F::gather(job.tables->effective, code);
    scale = F::where_less(zero, scale, scale, infinity);  // a scale of zero would lose the block
    const F::V reciprocal = F::div(one, scale);
    const bool quick = tame && is_tame_scale(scale);
    const F::V sum = quick ? ordered_error<false>(x, count, scale, reciprocal, sums)
                           : ordered_error<true>(x, count, scale, reciprocal, sums);
    const F::V ratio = F::div(scale, amax), error = F::mul(sum, F::mul(ratio, ratio));
    answer = k == 0 ? code : F::where_less(error, best, code, answer);
    best = F::where_less(error, best, error, best);
  }
  return answer;
}

}  // namespace
}  // namespace mxq
