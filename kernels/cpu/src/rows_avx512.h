// Few rows of x, bf16: each 16 weights are decoded in a register and multiplied with every row of x.
#pragma once
#include "linear.h"

namespace mxq {
namespace {

constexpr int kMaxDirectRows = 8;

inline __m256bh words_at(const uint16_t* p) { return reinterpret_cast<__m256bh>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }

// Sums for M rows of x and R rows of W from `row` on; UNROLL sums each, for the latency of the products.
template <int M, int R, int UNROLL, bool SHORT>
void dot_rows(const LinearJob& job, const uint16_t* x, int64_t stride, int64_t row, int shift) {
  const int64_t groups = job.k / 16, row_bytes = (job.k + 1) / 2, blocks = (job.k + job.block_columns - 1) / job.block_columns;
  const uint8_t *p[R], *scale[R];
  for (int r = 0; r < R; r++) {
    p[r] = job.packed + (row + r) * row_bytes;
    scale[r] = job.scale + (row + r) / job.block_rows * blocks;
  }
  const DecodeTable& t = *job.table;
  __m256 sum[UNROLL][M][R];
  for (auto& u : sum)
    for (auto& m : u)
      for (auto& v : m) v = _mm256_setzero_ps();
  const auto step = [&](int64_t g, int u) {
    __m256i w[R];
    for (int r = 0; r < R; r++) {
      if constexpr (SHORT) w[r] = decode_words(p[r] + 8 * g, t, scale[r][2 * g], scale[r][2 * g + 1]);
      else w[r] = decode_words(p[r] + 8 * g, t, scale[r][g >> (shift - 4)]);
    }
    for (int m = 0; m < M; m++)
      for (int r = 0; r < R; r++)
        sum[u][m][r] = _mm256_dpbf16_ps(sum[u][m][r], words_at(x + m * stride + 16 * g), reinterpret_cast<__m256bh>(w[r]));
  };
  int64_t g = 0;
  for (; g + UNROLL <= groups; g += UNROLL) {
    for (int r = 0; r < R; r++) _mm_prefetch(reinterpret_cast<const char*>(p[r] + 8 * g + 3072), _MM_HINT_T0);
    for (int u = 0; u < UNROLL; u++) step(g + u, u);
  }
  for (; g < groups; g++) step(g, 0);
  for (int u = 1; u < UNROLL; u++)
    for (int m = 0; m < M; m++)
      for (int r = 0; r < R; r++) sum[0][m][r] = _mm256_add_ps(sum[0][m][r], sum[u][m][r]);
  const int left = static_cast<int>(job.k % 16);
  for (int r = 0; r < R; r++) {
    if (left > 0) {
      const Tail tail(p[r] + 8 * groups, scale[r], groups, shift, left);
      const __m256i w = decode_group(tail.bytes, tail.scale, 0, Tail::shift(shift), t);
      for (int m = 0; m < M; m++)
        sum[0][m][r] = _mm256_dpbf16_ps(sum[0][m][r], words_at(x + m * stride + 16 * groups), reinterpret_cast<__m256bh>(w));
    }
    for (int m = 0; m < M; m++) finish(job, m, row + r, F::sum(_mm512_zextps256_ps512(sum[0][m][r])));
  }
}

template <int M, int R, int UNROLL>
void direct(const LinearJob& job, const uint16_t* x, int64_t stride, int64_t first, int64_t last) {
  const int shift = __builtin_ctz(static_cast<unsigned>(job.block_columns));
  int64_t row = first;
  for (; row + R <= last; row += R)
    shift == 3 ? dot_rows<M, R, UNROLL, true>(job, x, stride, row, shift) : dot_rows<M, R, UNROLL, false>(job, x, stride, row, shift);
  for (; row < last; row++)
    shift == 3 ? dot_rows<M, 1, 1, true>(job, x, stride, row, shift) : dot_rows<M, 1, 1, false>(job, x, stride, row, shift);
}

inline int few_rows(const LinearJob& job) {
  const int64_t groups = (job.k + 15) / 16, stride = job.k % 16 == 0 ? job.k : groups * 16;
  Scratch padded(stride == job.k ? 0 : job.m * stride * 2);
  const uint16_t* x = static_cast<const uint16_t*>(job.x);
  if (stride != job.k) {
    uint16_t* copy = padded.as<uint16_t>();
    if (copy == nullptr) return NO_MEMORY;
    for (int64_t i = 0; i < job.m; i++) {
      std::memcpy(copy + i * stride, x + i * job.k, job.k * 2);
      std::memset(copy + i * stride + job.k, 0, (stride - job.k) * 2);
    }
    x = copy;
  }
  constexpr int64_t kBytes = 32 << 10;  // of W in one task
  const int64_t rows = (kBytes / groups / 8 + 11) / 12 * 12;
  parallel_for((job.n + rows - 1) / rows, job.threads, [&](int64_t task) {
    const int64_t first = task * rows, last = job.n - first < rows ? job.n : first + rows;
    switch (job.m) {
      case 1: return direct<1, 1, 8>(job, x, stride, first, last);
      case 2: return direct<2, 1, 8>(job, x, stride, first, last);
      case 3: return direct<3, 4, 1>(job, x, stride, first, last);
      case 4: return direct<4, 4, 1>(job, x, stride, first, last);
      case 5: return direct<5, 4, 1>(job, x, stride, first, last);
      case 6: return direct<6, 4, 1>(job, x, stride, first, last);
      case 7: return direct<7, 3, 1>(job, x, stride, first, last);
      default: return direct<8, 3, 1>(job, x, stride, first, last);
    }
  });
  return OK;
}

}  // namespace
}  // namespace mxq
