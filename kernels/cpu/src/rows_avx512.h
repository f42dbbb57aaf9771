// bf16 activations: every 32 weights are decoded in a register and multiplied with up to eight rows of
// x at once, so that W is never in memory unpacked. Products of whole registers cost no more than of
// half ones, while looking up words costs less in halves: weights are decoded in halves, then joined.
// More rows of x take several turns; decoding W again is hidden behind the products.
#pragma once
#include "linear.h"

namespace mxq {
namespace {

constexpr int kTurn = 8, kStep = 32, kMostDirect = 16;

// Weights [32 g, 32 g + 32) of a row. KIND: 8, 16, or 32 and more elements to a block.
template <int KIND>
inline __m512bh weights_at(const uint8_t* p, const uint8_t* s, int64_t g, int shift, const DecodeTable& t) {
  __m256i low, high;
  if constexpr (KIND == 8) {
    low = decode_words(p + 16 * g, t, s[4 * g], s[4 * g + 1]);
    high = decode_words(p + 16 * g + 8, t, s[4 * g + 2], s[4 * g + 3]);
  } else {
    const uint8_t first = KIND == 16 ? s[2 * g] : s[g >> (shift - 5)], second = KIND == 16 ? s[2 * g + 1] : first;
    low = decode_words(p + 16 * g, t, first);
    high = decode_words(p + 16 * g + 8, t, second);
  }
  return reinterpret_cast<__m512bh>(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
}

inline __m512bh activations_at(const uint16_t* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }

// The end of a row, with zeros after it.
struct LongTail {
  uint8_t bytes[16] = {}, scale[4];
  LongTail(const uint8_t* p, const uint8_t* s, int64_t g, int64_t k, int shift) {
    const int64_t last = (k - 1) >> shift, first = kStep * g >> shift;
    std::memcpy(bytes, p + 16 * g, (k - kStep * g + 1) / 2);
    for (int i = 0; i < 4; i++) scale[i] = s[first + i < last ? first + i : last];
  }
};

// Products of M rows of x, which lie as [step][M][32], and R rows of W from `row` on. UNROLL sums for
// each, to hide how long a product takes.
template <int M, int R, int UNROLL, int KIND>
void dot_rows(const LinearJob& job, const uint16_t* x, int64_t x_row, int64_t row, int shift) {
  const int64_t steps = job.k / kStep, row_bytes = (job.k + 1) / 2, blocks = (job.k + job.block_columns - 1) >> shift;
  const uint8_t *p[R], *s[R];
  for (int r = 0; r < R; r++) {
    p[r] = job.packed + (row + r) * row_bytes;
    s[r] = job.scale + (job.block_rows == 1 ? row + r : (row + r) / job.block_rows) * blocks;
  }
  const DecodeTable& t = *job.table;
  __m512 sum[UNROLL][M][R];
  for (auto& u : sum)
    for (auto& m : u)
      for (auto& v : m) v = _mm512_setzero_ps();
  const auto step = [&](int64_t g, int u) {
    __m512bh w[R];
    for (int r = 0; r < R; r++) w[r] = weights_at<KIND>(p[r], s[r], g, shift, t);
    for (int m = 0; m < M; m++)
      for (int r = 0; r < R; r++) sum[u][m][r] = _mm512_dpbf16_ps(sum[u][m][r], activations_at(x + (g * M + m) * kStep), w[r]);
  };
  // Where these streams go on: the next R rows.
  const int64_t ahead = R * row_bytes > 3072 ? R * row_bytes : 3072;
  int64_t g = 0;
  for (; g + UNROLL <= steps; g += UNROLL) {
    for (int r = 0; r < R; r++) _mm_prefetch(reinterpret_cast<const char*>(p[r] + 16 * g + ahead), _MM_HINT_T0);
    if (R > 1 && g % 16 == 0)
      for (int r = 0; r < R; r++) _mm_prefetch(reinterpret_cast<const char*>(s[r] + (kStep * g >> shift) + R * blocks), _MM_HINT_T0);
    for (int u = 0; u < UNROLL; u++) step(g + u, u);
  }
  for (; g < steps; g++) step(g, 0);
  for (int u = 1; u < UNROLL; u++)
    for (int m = 0; m < M; m++)
      for (int r = 0; r < R; r++) sum[0][m][r] = F::add(sum[0][m][r], sum[u][m][r]);
  if (job.k % kStep != 0)
    for (int r = 0; r < R; r++) {
      const LongTail tail(p[r], s[r], steps, job.k, shift);
      const __m512bh w = weights_at<KIND>(tail.bytes, tail.scale, 0, shift, t);
      for (int m = 0; m < M; m++) sum[0][m][r] = _mm512_dpbf16_ps(sum[0][m][r], activations_at(x + (steps * M + m) * kStep), w);
    }
  for (int m = 0; m < M; m++) {
    float sums[4];
    const auto of = [&](int r) { return sum[0][m][r < R ? r : 0]; };
    if (R == 1) sums[0] = F::sum(of(0));
    else sum4(of(0), of(1), of(2), of(3), sums);
    finish(job, x_row + m, row, sums, R);
  }
}

template <int M, int R, int UNROLL, int KIND>
void all_rows(const LinearJob& job, const uint16_t* x, int64_t x_row, int64_t first, int64_t last) {
  const int shift = __builtin_ctz(static_cast<unsigned>(job.block_columns));
  int64_t row = first;
  for (; row + R <= last; row += R) dot_rows<M, R, UNROLL, KIND>(job, x, x_row, row, shift);
  if constexpr (R > 1)
    for (; row < last; row++) dot_rows<M, 1, 1, KIND>(job, x, x_row, row, shift);
}

template <int KIND>
void turn(const LinearJob& job, int m, const uint16_t* x, int64_t x_row, int64_t first, int64_t last) {
  switch (m) {
    case 1: return all_rows<1, 1, 4, KIND>(job, x, x_row, first, last);
    case 2: return all_rows<2, 1, 4, KIND>(job, x, x_row, first, last);
    case 3: return all_rows<3, 4, 1, KIND>(job, x, x_row, first, last);
    case 4: return all_rows<4, 4, 1, KIND>(job, x, x_row, first, last);
    case 5: return all_rows<5, 4, 1, KIND>(job, x, x_row, first, last);
    case 6: return all_rows<6, 4, 1, KIND>(job, x, x_row, first, last);
    case 7: return all_rows<7, 3, 1, KIND>(job, x, x_row, first, last);
    default: return all_rows<8, 3, 1, KIND>(job, x, x_row, first, last);
  }
}

inline int direct(const LinearJob& job) {
  const int64_t turns = (job.m + kTurn - 1) / kTurn, height = (job.m + turns - 1) / turns;
  const int64_t steps = (job.k + kStep - 1) / kStep, width = steps * kStep;
  const auto* x = static_cast<const uint16_t*>(job.x);
  // Rows of x that lie apart by a power of two would drive one another out of the cache.
  const bool in_place = job.m == 1 && job.k == width;
  Scratch memory(in_place ? 0 : turns * height * width * 2);
  if (!in_place) {
    auto* copy = memory.as<uint16_t>();
    if (copy == nullptr) return NO_MEMORY;
    parallel_for(turns, job.m * job.k < (1 << 17) ? 1 : job.threads, [&](int64_t i) {
      const int64_t first = i * height, rows = job.m - first < height ? job.m - first : height;
      uint16_t* to = copy + first * width;
      for (int64_t m = 0; m < rows; m++)
        for (int64_t s = 0; s < steps; s++) {
          const int64_t left = job.k - s * kStep;
          uint16_t* out = to + (s * rows + m) * kStep;
          std::memcpy(out, x + (first + m) * job.k + s * kStep, (left < kStep ? left : kStep) * 2);
          if (left < kStep) std::memset(out + left, 0, (kStep - left) * 2);
        }
    });
    x = copy;
  }
  const int64_t bytes = job.m <= kTurn ? 32 << 10 : 96 << 10;  // of W in one task
  const int64_t rows = (bytes / (steps * 16) + 11) / 12 * 12;
  parallel_for((job.n + rows - 1) / rows, job.threads, [&](int64_t task) {
    const int64_t first = task * rows, last = job.n - first < rows ? job.n : first + rows;
    for (int64_t m = 0; m < job.m; m += height) {
      const int count = static_cast<int>(job.m - m < height ? job.m - m : height);
      if (job.block_columns == 8) turn<8>(job, count, x + m * width, m, first, last);
      else if (job.block_columns == 16) turn<16>(job, count, x + m * width, m, first, last);
      else turn<32>(job, count, x + m * width, m, first, last);
    }
  });
  return OK;
}

// fp32 activations, few rows: 16 weights are looked up at once.
constexpr int kFewSingles = 4;

template <int M>
void dot_singles(const LinearJob& job, const float* x, int64_t stride, int64_t row) {
  const int shift = __builtin_ctz(static_cast<unsigned>(job.block_columns));
  const int64_t groups = job.k / 16, blocks = (job.k + job.block_columns - 1) >> shift;
  const uint8_t* p = job.packed + row * ((job.k + 1) / 2);
  const uint8_t* s = job.scale + row / job.block_rows * blocks;
  const DecodeTable& t = *job.table;
  constexpr int kUnroll = M == 1 ? 4 : 2;
  F::V sum[kUnroll][M];
  for (auto& u : sum)
    for (auto& v : u) v = F::set1(0);
  const auto add = [&](int u, F::V w, int64_t g) {
    for (int m = 0; m < M; m++) sum[u][m] = F::fma(F::load(x + m * stride + 16 * g), w, sum[u][m]);
  };
  const auto weights = [&](int64_t g) {
    if (shift > 3) return F::lookup(p + 8 * g, t.words32[s[g >> (shift - 4)]]);
    const F::V first = F::lookup(p + 8 * g, t.words32[s[2 * g]]), second = F::lookup(p + 8 * g, t.words32[s[2 * g + 1]]);
    return _mm512_mask_mov_ps(first, 0xFF00, second);
  };
  int64_t g = 0;
  for (; g + kUnroll <= groups; g += kUnroll) {
    _mm_prefetch(reinterpret_cast<const char*>(p + 8 * g + 3072), _MM_HINT_T0);
    for (int u = 0; u < kUnroll; u++) add(u, weights(g + u), g + u);
  }
  for (; g < groups; g++) add(0, weights(g), g);
  if (job.k % 16 != 0) {
    const Tail tail(p + 8 * groups, s, groups, shift, static_cast<int>(job.k % 16));
    float values[16];
    decode_group(tail.bytes, tail.scale, 0, Tail::shift(shift), t, values);
    add(0, F::load(values), groups);
  }
  for (int m = 0; m < M; m++) {
    for (int u = 1; u < kUnroll; u++) sum[0][m] = F::add(sum[0][m], sum[u][m]);
    float total = F::sum(sum[0][m]);
    finish(job, m, row, &total, 1);
  }
}

inline int direct_singles(const LinearJob& job) {
  const int64_t stride = (job.k + 15) / 16 * 16;
  Scratch memory(job.m * stride * 4);
  float* x = memory.as<float>();
  if (x == nullptr) return NO_MEMORY;
  for (int64_t m = 0; m < job.m; m++) {
    Single::load_row(job, m, x + m * stride);
    std::memset(x + m * stride + job.k, 0, (stride - job.k) * 4);
  }
  const int64_t rows = (32 << 10) / (stride / 2) + 1;
  parallel_for((job.n + rows - 1) / rows, job.threads, [&](int64_t task) {
    const int64_t first = task * rows, last = job.n - first < rows ? job.n : first + rows;
    for (int64_t row = first; row < last; row++) switch (job.m) {
        case 1: dot_singles<1>(job, x, stride, row); break;
        case 2: dot_singles<2>(job, x, stride, row); break;
        case 3: dot_singles<3>(job, x, stride, row); break;
        default: dot_singles<4>(job, x, stride, row);
      }
  });
  return OK;
}

}  // namespace
}  // namespace mxq
