// x @ W.T with W packed. Few rows of x: every weight is decoded in a register and used at once (see
// rows_avx512.h, rows_avx2.h). Many: panels of W are decoded into the cache, then multiplied in tiles.
#pragma once
#include "dequantize.h"
#include "mxq.h"
#include "numbers.h"
#include "parallel.h"

namespace mxq {
namespace {

// What follows the sum: the global scale, the bias, the rounding.
inline void finish(const LinearJob& job, int64_t row, int64_t column, float sum) {
  if (job.global_scale > 0) sum /= job.global_scale;
  if (job.bias != nullptr) {
    if (job.bias_dtype == F32) sum += static_cast<const float*>(job.bias)[column];
    else if (job.bias_dtype == BF16) sum += from_bf16(static_cast<const uint16_t*>(job.bias)[column]);
    else sum += from_f16(static_cast<const uint16_t*>(job.bias)[column]);
  }
  const int64_t at = row * job.n + column;
  if (job.dtype == F32) static_cast<float*>(job.y)[at] = sum;
  else static_cast<uint16_t*>(job.y)[at] = job.dtype == BF16 ? to_bf16(sum) : to_f16(sum);
}

inline float activation(const LinearJob& job, int64_t row, int64_t column) {
  const int64_t at = row * job.k + column;
  if (job.dtype == F32) return static_cast<const float*>(job.x)[at];
  const uint16_t bits = static_cast<const uint16_t*>(job.x)[at];
  return job.dtype == BF16 ? from_bf16(bits) : from_f16(bits);
}

// Products of fp32 numbers.
struct Single {
  using T = float;
  static constexpr int STEP = F::N;
  static void load_row(const LinearJob& job, int64_t row, T* out) {
    if (job.dtype == F32) std::memcpy(out, static_cast<const float*>(job.x) + row * job.k, job.k * sizeof(T));
    else
      for (int64_t i = 0; i < job.k; i++) out[i] = activation(job, row, i);
  }
  static F::V dot(F::V sum, const T* x, F::V w) { return F::fma(F::load(x), w, sum); }
  static F::V load(const T* w) { return F::load(w); }
};

#ifdef MXQ_HAS_BF16
// Products of pairs of bf16 numbers.
struct Half {
  using T = uint16_t;
  static constexpr int STEP = 32;
  static void load_row(const LinearJob& job, int64_t row, T* out) {
    std::memcpy(out, static_cast<const uint16_t*>(job.x) + row * job.k, job.k * sizeof(T));
  }
  static F::V dot(F::V sum, const T* x, __m512i w) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(_mm512_loadu_si512(x)), reinterpret_cast<__m512bh>(w));
  }
  static __m512i load(const T* w) { return _mm512_loadu_si512(w); }
};
#endif

constexpr int kTileRows = F::N == 16 ? 6 : 3, kTileColumns = 4;

// ROWS x 4 sums over all of k. Both operands lie as [step][row][STEP], one after the other in memory.
template <class P, int ROWS>
void tile(const LinearJob& job, const typename P::T* x, const typename P::T* w, int64_t steps, int64_t row, int64_t column) {
  F::V sum[ROWS][kTileColumns];
  for (auto& s : sum)
    for (auto& v : s) v = F::set1(0);
  for (int64_t k = 0; k < steps; k++) {
    decltype(P::load(w)) weights[kTileColumns];
    for (int j = 0; j < kTileColumns; j++) weights[j] = P::load(w + (k * kTileColumns + j) * P::STEP);
    for (int i = 0; i < ROWS; i++)
      for (int j = 0; j < kTileColumns; j++) sum[i][j] = P::dot(sum[i][j], x + (k * kTileRows + i) * P::STEP, weights[j]);
  }
  const int64_t columns = job.n - column < kTileColumns ? job.n - column : kTileColumns;
  for (int i = 0; i < ROWS; i++) {
    float sums[kTileColumns];
    sum4(sum[i][0], sum[i][1], sum[i][2], sum[i][3], sums);
    for (int64_t j = 0; j < columns; j++) finish(job, row + i, column + j, sums[j]);
  }
}

template <class P, int ROWS = kTileRows>
void tile_of(int64_t rows, const LinearJob& job, const typename P::T* x, const typename P::T* w, int64_t steps, int64_t row,
             int64_t column) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return tile_of<P, ROWS - 1>(rows, job, x, w, steps, row, column);
  }
  tile<P, ROWS>(job, x, w, steps, row, column);
}

// Rows [first, first + count) of one operand into [step][slot][STEP] for `slots` rows, zeros where there are none.
template <class P, class Load>
void interleave(int64_t first, int64_t count, int slots, int64_t k, int64_t steps, Load load, typename P::T* line, typename P::T* out) {
  using T = typename P::T;
  std::memset(line + k, 0, (steps * P::STEP - k) * sizeof(T));
  for (int slot = 0; slot < slots; slot++) {
    if (slot < count) load(first + slot, line);
    for (int64_t s = 0; s < steps; s++) {
      T* to = out + (s * slots + slot) * P::STEP;
      if (slot < count) std::memcpy(to, line + s * P::STEP, P::STEP * sizeof(T));
      else std::memset(to, 0, P::STEP * sizeof(T));
    }
  }
}

template <class P>
int panels(const LinearJob& job) {
  using T = typename P::T;
  constexpr int kPanel = sizeof(T) == 2 ? 32 : 16;  // rows of W that fit the second-level cache
  const int64_t steps = (job.k + P::STEP - 1) / P::STEP, width = steps * P::STEP;
  const int64_t tiles = (job.m + kTileRows - 1) / kTileRows, count = (job.n + kPanel - 1) / kPanel;
  const int shift = __builtin_ctz(static_cast<unsigned>(job.block_columns));
  const int64_t blocks = (job.k + job.block_columns - 1) >> shift;
  Scratch x(tiles * kTileRows * width * static_cast<int64_t>(sizeof(T)));
  if (x.as<T>() == nullptr) return NO_MEMORY;
  bool failed = false;
  parallel_for(tiles, job.threads, [&](int64_t i) {
    Scratch line(width * static_cast<int64_t>(sizeof(T)));
    if (line.as<T>() == nullptr) return void(failed = true);
    const int64_t row = i * kTileRows, rows = job.m - row < kTileRows ? job.m - row : kTileRows;
    interleave<P>(row, rows, kTileRows, job.k, steps, [&](int64_t r, T* to) { P::load_row(job, r, to); }, line.as<T>(),
                  x.as<T>() + row * width);
  });
  parallel_for(count, job.threads, [&](int64_t i) {
    Scratch memory((kPanel + 1) * width * static_cast<int64_t>(sizeof(T)));
    T *panel = memory.as<T>(), *line = panel + kPanel * width;
    if (panel == nullptr) return void(failed = true);
    const int64_t start = i * kPanel, end = job.n - start < kPanel ? job.n : start + kPanel;
    const auto decode = [&](int64_t r, T* to) {
      decode_row(job.packed + r * ((job.k + 1) / 2), job.scale + r / job.block_rows * blocks, job.k, shift, *job.table, false, to);
    };
    for (int64_t c = start; c < end; c += kTileColumns)
      interleave<P>(c, end - c, kTileColumns, job.k, steps, decode, line, panel + (c - start) * width);
    for (int64_t row = 0; row < job.m; row += kTileRows)
      for (int64_t c = start; c < end; c += kTileColumns)
        tile_of<P>(job.m - row < kTileRows ? job.m - row : kTileRows, job, x.as<T>() + row * width,
                   panel + (c - start) * width, steps, row, c);
  });
  return failed ? NO_MEMORY : OK;
}

}  // namespace
}  // namespace mxq
