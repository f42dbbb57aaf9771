// x @ W.T with W packed. Few rows of x: every weight is decoded in a register and used at once (see
// rows_avx512.h, rows_avx2.h). Many: panels of W are decoded into the cache, then multiplied in tiles.
#pragma once
#include <atomic>

#include "dequantize.h"
#include "mxq.h"
#include "numbers.h"
#include "parallel.h"

namespace mxq {
namespace {

// What follows the sums of neighbouring columns: the global scale, the bias, the rounding.
inline void finish(const LinearJob& job, int64_t row, int64_t column, float* sums, int count) {
  if (job.global_scale != nullptr) {
    const float divisor = *job.global_scale;
    for (int i = 0; i < count; i++) sums[i] /= divisor;
  }
  if (job.bias != nullptr) {
    const auto* single = static_cast<const float*>(job.bias) + column;
    const auto* half = static_cast<const uint16_t*>(job.bias) + column;
    if (job.bias_dtype == F32)
      for (int i = 0; i < count; i++) sums[i] += single[i];
    else if (job.bias_dtype == BF16)
      for (int i = 0; i < count; i++) sums[i] += from_bf16(half[i]);
    else
      for (int i = 0; i < count; i++) sums[i] += from_f16(half[i]);
  }
  const int64_t at = row * job.n + column;
  if (job.dtype == F32) return void(std::memcpy(static_cast<float*>(job.y) + at, sums, count * sizeof(float)));
  auto* y = static_cast<uint16_t*>(job.y) + at;
  if (job.dtype == BF16)
    for (int i = 0; i < count; i++) y[i] = to_bf16(sums[i]);
  else
    for (int i = 0; i < count; i++) y[i] = to_f16(sums[i]);
}

inline void find_rows(const LinearJob& job, int64_t first, int64_t last) {
  const int64_t row_bytes = (job.k + 1) / 2, blocks = (job.k + job.block_columns - 1) / job.block_columns;
  find_pages(job.packed + first * row_bytes, (last - first) * row_bytes);
  find_pages(job.scale + first / job.block_rows * blocks, (last - first) * blocks / job.block_rows);
}

// Calls body(first column, last column, what the thread will probably do next) for all columns, `most`
// of them at a time or fewer, in multiples of `unit`.
template <class F>
void share_columns(const LinearJob& job, int64_t most, int64_t unit, F&& body) {
  const int64_t share = job.n / (4 * job.threads) / unit + 1, whole = (most + unit - 1) / unit;  // a few tasks for each thread
  const int64_t size = (share < whole ? share : whole) * unit;
  parallel_for((job.n + size - 1) / size, job.threads, [&](int64_t task) {
    const int64_t first = task * size, last = job.n - first < size ? job.n : first + size;
    const int64_t after = first + size * job.threads, next = after < job.n ? after : 0;
    find_rows(job, first, last);
    find_rows(job, next, job.n - next < size ? job.n : next + size);
    body(first, last, next);
  });
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
constexpr int kPanel = 32;  // rows of W decoded at a time, at most

// ROWS x 4 sums over all of k. Both operands lie as [step][row][STEP], one after the other in memory.
// Without the pragmas GCC keeps the sums in memory before and after the loop.
template <class P, int ROWS>
void tile(const typename P::T* x, const typename P::T* w, int64_t steps, float* sums) {
  F::V sum[ROWS][kTileColumns];
#pragma GCC unroll 8
  for (auto& s : sum)
#pragma GCC unroll 8
    for (auto& v : s) v = F::set1(0);
  for (int64_t k = 0; k < steps; k++) {
    decltype(P::load(w)) weights[kTileColumns];
#pragma GCC unroll 8
    for (int j = 0; j < kTileColumns; j++) weights[j] = P::load(w + (k * kTileColumns + j) * P::STEP);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 8
      for (int j = 0; j < kTileColumns; j++) sum[i][j] = P::dot(sum[i][j], x + (k * kTileRows + i) * P::STEP, weights[j]);
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++) sum4(sum[i][0], sum[i][1], sum[i][2], sum[i][3], sums + i * kPanel);
}

template <class P, int ROWS = kTileRows>
void tile_of(int64_t rows, const typename P::T* x, const typename P::T* w, int64_t steps, float* sums) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return tile_of<P, ROWS - 1>(rows, x, w, steps, sums);
  }
  tile<P, ROWS>(x, w, steps, sums);
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

// Whole steps of a full set of rows, where there is a fast way; returns how many groups of 16 that were.
template <class T>
int64_t decode_steps(const uint8_t* const*, const uint8_t* const*, int64_t, int, const DecodeTable&, T*) {
  return 0;
}

#ifdef MXQ_HAS_BF16
template <bool SHORT>  // blocks of 8
void decode_32(const uint8_t* const* p, const uint8_t* const* s, int64_t steps, int shift, const DecodeTable& t, uint16_t* out) {
  for (int64_t k = 0; k < steps; k++)
    for (int i = 0; i < kTileColumns; i++) {
      __m256i low, high;
      if (SHORT) {
        low = decode_words(p[i] + 16 * k, t, s[i][4 * k], s[i][4 * k + 1]);
        high = decode_words(p[i] + 16 * k + 8, t, s[i][4 * k + 2], s[i][4 * k + 3]);
      } else {
        low = decode_words(p[i] + 16 * k, t, s[i][2 * k >> (shift - 4)]);
        high = decode_words(p[i] + 16 * k + 8, t, s[i][(2 * k + 1) >> (shift - 4)]);
      }
      _mm512_store_si512(out + (k * kTileColumns + i) * 32, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
    }
}

inline int64_t decode_steps(const uint8_t* const* p, const uint8_t* const* s, int64_t groups, int shift, const DecodeTable& t, uint16_t* out) {
  if (shift == 3) decode_32<true>(p, s, groups / 2, shift, t, out);
  else decode_32<false>(p, s, groups / 2, shift, t, out);
  return groups / 2 * 2;
}
#endif

// Rows [row, row + 4) of W, as far as there are so many, as [step][slot][STEP].
template <class P>
void decode_rows(const LinearJob& job, int64_t row, int64_t steps, typename P::T* out) {
  using T = typename P::T;
  const int shift = __builtin_ctz(static_cast<unsigned>(job.block_columns));
  const int64_t blocks = (job.k + job.block_columns - 1) >> shift, groups = job.k / 16;
  const int rows = job.n - row < kTileColumns ? static_cast<int>(job.n - row) : kTileColumns;
  const uint8_t *p[kTileColumns], *scale[kTileColumns];
  for (int i = 0; i < rows; i++) {
    p[i] = job.packed + (row + i) * ((job.k + 1) / 2);
    scale[i] = job.scale + (row + i) / job.block_rows * blocks;
  }
  if (job.k != steps * P::STEP)  // the last steps may be partly or wholly past the end
    for (int64_t s = steps - 1; s >= 0 && (s + 1) * P::STEP > groups * 16; s--)
      std::memset(out + s * kTileColumns * P::STEP, 0, kTileColumns * P::STEP * sizeof(T));
  int64_t g = rows < kTileColumns ? 0 : decode_steps(p, scale, groups, shift, *job.table, out);
  for (; g < groups; g++)
    for (int i = 0; i < rows; i++) put_group<P>(p[i] + 8 * g, scale[i], g, g, shift, *job.table, i, out);
  const int left = static_cast<int>(job.k % 16);
  for (int i = 0; i < rows && left > 0; i++) {
    const Tail tail(p[i] + 8 * groups, scale[i], groups, shift, left);
    put_group<P>(tail.bytes, tail.scale, 0, groups, Tail::shift(shift), *job.table, i, out);
  }
}

template <class P>
int panels(const LinearJob& job) {
  using T = typename P::T;
  const int64_t steps = (job.k + P::STEP - 1) / P::STEP, width = steps * P::STEP;
  const int64_t tiles = (job.m + kTileRows - 1) / kTileRows;
  constexpr int64_t kBytes = 256 << 10;  // of a panel, which should fit the second-level cache beside a part of x
  const int64_t fit = kBytes / (width * static_cast<int64_t>(sizeof(T))) / kTileColumns * kTileColumns;
  const int64_t most = fit > kPanel ? kPanel : fit < 16 ? 16 : fit;
  Scratch x(tiles * kTileRows * width * static_cast<int64_t>(sizeof(T)));
  if (x.as<T>() == nullptr) return NO_MEMORY;
  std::atomic<bool> failed{false};
  const auto rows_at = [&](int64_t row) { return job.m - row < kTileRows ? job.m - row : kTileRows; };
  parallel_for(tiles, job.threads, [&](int64_t i) {
    Scratch line(width * static_cast<int64_t>(sizeof(T)));
    if (line.as<T>() == nullptr) return void(failed = true);
    const int64_t row = i * kTileRows;
    interleave<P>(job, row, rows_at(row), steps, line.as<T>(), x.as<T>() + row * width);
  });
  if (failed) return NO_MEMORY;
  share_columns(job, most, kTileColumns, [&](int64_t start, int64_t end, int64_t) {
    // A tile decodes 16 weights at a time, perhaps past its last step.
    Scratch memory((kPanel * width + 16 * kTileColumns) * static_cast<int64_t>(sizeof(T)));
    T* panel = memory.as<T>();
    if (panel == nullptr) return void(failed = true);
    for (int64_t c = start; c < end; c += kTileColumns) decode_rows<P>(job, c, steps, panel + (c - start) * width);
    for (int64_t row = 0; row < job.m; row += kTileRows) {
      float sums[kTileRows][kPanel];
      for (int64_t c = start; c < end; c += kTileColumns)
        tile_of<P>(rows_at(row), x.as<T>() + row * width, panel + (c - start) * width, steps, sums[0] + (c - start));
      for (int64_t r = 0; r < rows_at(row); r++) finish(job, row + r, start, sums[r], static_cast<int>(end - start));
    }
  });
  return failed ? NO_MEMORY : OK;
}

}  // namespace
}  // namespace mxq
