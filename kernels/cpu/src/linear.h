// x @ W.T with W packed. Few rows of x: every weight is decoded in a register and used at once (see
// rows_avx512.h, rows_avx2.h). Many: panels of W are decoded into the cache, then multiplied in tiles.
#pragma once
#include "dequantize.h"
#include "mxq.h"
#include "numbers.h"
#include "parallel.h"

namespace mxq {
namespace {

// What follows the sums of neighbouring columns: the global scale, the bias, the rounding.
inline void finish(const LinearJob& job, int64_t row, int64_t column, float* sums, int count) {
  if (job.global_scale > 0)
    for (int i = 0; i < count; i++) sums[i] /= job.global_scale;
  if (job.bias != nullptr) {
    for (int i = 0; i < count; i++) {
      if (job.bias_dtype == F32) sums[i] += static_cast<const float*>(job.bias)[column + i];
      else if (job.bias_dtype == BF16) sums[i] += from_bf16(static_cast<const uint16_t*>(job.bias)[column + i]);
      else sums[i] += from_f16(static_cast<const uint16_t*>(job.bias)[column + i]);
    }
  }
  const int64_t at = row * job.n + column;
  if (job.dtype == F32) return void(std::memcpy(static_cast<float*>(job.y) + at, sums, count * sizeof(float)));
  auto* y = static_cast<uint16_t*>(job.y) + at;
  for (int i = 0; i < count; i++) y[i] = job.dtype == BF16 ? to_bf16(sums[i]) : to_f16(sums[i]);
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
  const int columns = job.n - column < kTileColumns ? static_cast<int>(job.n - column) : kTileColumns;
  for (int i = 0; i < ROWS; i++) {
    float sums[kTileColumns];
    sum4(sum[i][0], sum[i][1], sum[i][2], sum[i][3], sums);
    finish(job, row + i, column, sums, columns);
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

// Rows [first, first + rows) of x as [step][slot][STEP], with zeros after the end of a row.
template <class P>
void interleave(const LinearJob& job, int64_t first, int64_t rows, int64_t steps, typename P::T* line, typename P::T* out) {
  using T = typename P::T;
  std::memset(line + job.k, 0, (steps * P::STEP - job.k) * sizeof(T));
  for (int64_t slot = 0; slot < rows; slot++) {
    P::load_row(job, first + slot, line);
    for (int64_t s = 0; s < steps; s++)
      std::memcpy(out + (s * kTileRows + slot) * P::STEP, line + s * P::STEP, P::STEP * sizeof(T));
  }
}

// Sixteen decoded weights, group g of a row, into slot `slot` of a tile.
template <class P>
void put_group(const uint8_t* p, const uint8_t* scale, int64_t g, int64_t at, int shift, const DecodeTable& t, int slot, float* out) {
  float values[16];
  decode_group(p, scale, g, shift, t, values);
  for (int i = 0; i < 16; i += P::STEP)
    std::memcpy(out + ((16 * at + i) / P::STEP * kTileColumns + slot) * P::STEP, values + i, P::STEP * sizeof(float));
}

template <class P>
void put_group(const uint8_t* p, const uint8_t* scale, int64_t g, int64_t at, int shift, const DecodeTable& t, int slot, uint16_t* out) {
  store_words(out + (at / 2 * kTileColumns + slot) * 32 + at % 2 * 16, decode_group(p, scale, g, shift, t));
}

template <class P>
void decode_slot(const LinearJob& job, int64_t row, int64_t steps, int slot, typename P::T* out) {
  using T = typename P::T;
  const int shift = __builtin_ctz(static_cast<unsigned>(job.block_columns));
  const int64_t blocks = (job.k + job.block_columns - 1) >> shift, groups = job.k / 16;
  const uint8_t* p = job.packed + row * ((job.k + 1) / 2);
  const uint8_t* scale = job.scale + row / job.block_rows * blocks;
  if (job.k != steps * P::STEP)  // the last steps may be partly or wholly past the end
    for (int64_t s = steps - 1; s >= 0 && (s + 1) * P::STEP > groups * 16; s--)
      std::memset(out + (s * kTileColumns + slot) * P::STEP, 0, P::STEP * sizeof(T));
  for (int64_t g = 0; g < groups; g++) put_group<P>(p + 8 * g, scale, g, g, shift, *job.table, slot, out);
  const int left = static_cast<int>(job.k % 16);
  if (left == 0) return;
  const Tail tail(p + 8 * groups, scale, groups, shift, left);
  put_group<P>(tail.bytes, tail.scale, 0, groups, Tail::shift(shift), *job.table, slot, out);
}

template <class P>
int panels(const LinearJob& job) {
  using T = typename P::T;
  constexpr int kPanel = sizeof(T) == 2 ? 32 : 16;  // rows of W that fit the second-level cache
  const int64_t steps = (job.k + P::STEP - 1) / P::STEP, width = steps * P::STEP;
  const int64_t tiles = (job.m + kTileRows - 1) / kTileRows, count = (job.n + kPanel - 1) / kPanel;
  Scratch x(tiles * kTileRows * width * static_cast<int64_t>(sizeof(T)));
  if (x.as<T>() == nullptr) return NO_MEMORY;
  bool failed = false;
  parallel_for(tiles, job.threads, [&](int64_t i) {
    Scratch line(width * static_cast<int64_t>(sizeof(T)));
    if (line.as<T>() == nullptr) return void(failed = true);
    const int64_t row = i * kTileRows, rows = job.m - row < kTileRows ? job.m - row : kTileRows;
    interleave<P>(job, row, rows, steps, line.as<T>(), x.as<T>() + row * width);
  });
  parallel_for(count, job.threads, [&](int64_t i) {
    // A tile decodes 16 weights at a time, perhaps past its last step.
    Scratch memory((kPanel * width + 16 * kTileColumns) * static_cast<int64_t>(sizeof(T)));
    T* panel = memory.as<T>();
    if (panel == nullptr) return void(failed = true);
    const int64_t start = i * kPanel, end = job.n - start < kPanel ? job.n : start + kPanel;
    for (int64_t c = start; c < end; c++)
      decode_slot<P>(job, c, steps, static_cast<int>((c - start) % kTileColumns), panel + (c - start) / kTileColumns * kTileColumns * width);
    for (int64_t row = 0; row < job.m; row += kTileRows)
      for (int64_t c = start; c < end; c += kTileColumns)
        tile_of<P>(job.m - row < kTileRows ? job.m - row : kTileRows, job, x.as<T>() + row * width,
                   panel + (c - start) * width, steps, row, c);
  });
  return failed ? NO_MEMORY : OK;
}

}  // namespace
}  // namespace mxq
