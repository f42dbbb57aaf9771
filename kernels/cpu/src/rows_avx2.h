// Few rows of x: weights are decoded in registers, 64 at a time, and multiplied with every row of x in
// fp32. Elements are looked up without their scale, as the high 16 bits of fp32; the scale is applied
// to the sum over a block. x is reordered once to the order in which the look-ups leave the weights.
#pragma once
#include "linear.h"

namespace mxq {
namespace {

constexpr int kMaxDirectRows = 4, kSpan = 64;

// Place of weight w (0 to 63) of a chunk. Low nibbles hold even weights and high ones odd weights; the
// unpacking keeps to 128-bit lanes, which hold weights 0-31 and 32-63.
inline int place_of(int w) {
  const int lane = w / 32, quarter = w % 32 / 8, odd = w % 2;
  return (quarter * 2 + odd) * 8 + lane * 4 + w % 8 / 2;
}

struct Reordered {
  static void row(const LinearJob& job, int64_t m, int64_t chunks, float* out) {
    std::memset(out, 0, chunks * kSpan * sizeof(float));
    int place[kSpan];
    for (int w = 0; w < kSpan; w++) place[w] = place_of(w);
    for (int64_t i = 0; i < job.k; i++) out[i / kSpan * kSpan + place[i % kSpan]] = activation(job, m, i);
  }
};

inline __m256 both(float low, float high) { return _mm256_set_m128(_mm_set1_ps(high), _mm_set1_ps(low)); }

// Adds a chunk of 64 weights, whose scale codes begin at s, to the sums of M rows.
template <int M, int WIDTH>
inline void add_chunk(const uint8_t* p, const uint8_t* s, const DecodeTable& t, const float* x, int64_t stride, __m256* sum) {
  const __m256i high_bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, -128, -65, -65, -65, -64, -64, -64, -64));
  const __m256i low_bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64));
  const auto scale = [&](int block) { return float_of(t.words32[s[block]][2]); };  // element code 2 is 1
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), mask = _mm256_set1_epi8(15);
  const __m256i even = _mm256_and_si256(raw, mask), odd = _mm256_and_si256(_mm256_srli_epi16(raw, 4), mask);
  const __m256i even_high = _mm256_shuffle_epi8(high_bytes, even), even_low = _mm256_shuffle_epi8(low_bytes, even);
  const __m256i odd_high = _mm256_shuffle_epi8(high_bytes, odd), odd_low = _mm256_shuffle_epi8(low_bytes, odd);
  const __m256i zero = _mm256_setzero_si256();
  for (int half = 0; half < 2; half++) {
    const __m256i e = half == 0 ? _mm256_unpacklo_epi8(even_low, even_high) : _mm256_unpackhi_epi8(even_low, even_high);
    const __m256i o = half == 0 ? _mm256_unpacklo_epi8(odd_low, odd_high) : _mm256_unpackhi_epi8(odd_low, odd_high);
    const __m256 w[4] = {_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, e)), _mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, o)),
                         _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, e)), _mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, o))};
    for (int m = 0; m < M; m++) {
      const float* row = x + m * stride + half * 32;
      const __m256 first = F::fma(w[1], F::load(row + 8), F::mul(w[0], F::load(row)));
      const __m256 second = F::fma(w[3], F::load(row + 24), F::mul(w[2], F::load(row + 16)));
      if constexpr (WIDTH == 8) {
        sum[m] = F::fma(first, both(scale(2 * half), scale(2 * half + 4)), sum[m]);
        sum[m] = F::fma(second, both(scale(2 * half + 1), scale(2 * half + 5)), sum[m]);
      } else if constexpr (WIDTH == 16) {
        sum[m] = F::fma(F::add(first, second), both(scale(half), scale(half + 2)), sum[m]);
      } else {
        sum[m] = F::fma(F::add(first, second), both(scale(0), scale(WIDTH == 32)), sum[m]);
      }
    }
  }
}

template <int M, int WIDTH>
void dot_rows(const LinearJob& job, const float* x, int64_t stride, int64_t first, int64_t last) {
  const int shift = __builtin_ctz(static_cast<unsigned>(job.block_columns));
  const int64_t chunks = job.k / kSpan, row_bytes = (job.k + 1) / 2, blocks = (job.k + job.block_columns - 1) >> shift;
  for (int64_t row = first; row < last; row++) {
    const uint8_t* p = job.packed + row * row_bytes;
    const uint8_t* s = job.scale + row / job.block_rows * blocks;
    __m256 sum[M];
    for (auto& v : sum) v = _mm256_setzero_ps();
    for (int64_t c = 0; c < chunks; c++) {
      _mm_prefetch(reinterpret_cast<const char*>(p + c * 32 + 3072), _MM_HINT_T0);
      add_chunk<M, WIDTH>(p + c * 32, s + (c * kSpan >> shift), *job.table, x + c * kSpan, stride, sum);
    }
    if (job.k % kSpan != 0) {
      uint8_t bytes[32] = {}, scales[8];
      std::memcpy(bytes, p + chunks * 32, row_bytes - chunks * 32);
      for (int64_t i = 0; i < 8; i++) {
        const int64_t block = (chunks * kSpan >> shift) + i;
        scales[i] = s[block < blocks ? block : blocks - 1];
      }
      add_chunk<M, WIDTH>(bytes, scales, *job.table, x + chunks * kSpan, stride, sum);
    }
    for (int m = 0; m < M; m++) {
      float total = F::sum(sum[m]);
      finish(job, m, row, &total, 1);
    }
  }
}

template <int M>
void direct(const LinearJob& job, const float* x, int64_t stride, int64_t first, int64_t last) {
  if (job.block_columns == 8) return dot_rows<M, 8>(job, x, stride, first, last);
  if (job.block_columns == 16) return dot_rows<M, 16>(job, x, stride, first, last);
  if (job.block_columns == 32) return dot_rows<M, 32>(job, x, stride, first, last);
  dot_rows<M, 64>(job, x, stride, first, last);
}

inline int few_rows(const LinearJob& job) {
  const int64_t spans = (job.k + kSpan - 1) / kSpan, stride = spans * kSpan;
  Scratch memory(job.m * stride * static_cast<int64_t>(sizeof(float)));
  float* x = memory.as<float>();
  if (x == nullptr) return NO_MEMORY;
  for (int64_t m = 0; m < job.m; m++) Reordered::row(job, m, spans, x + m * stride);
  constexpr int64_t kBytes = 32 << 10;  // of W in one task
  share_columns(job, kBytes / (stride / 2) + 1, 1, [&](int64_t first, int64_t last, int64_t) {
    switch (job.m) {
      case 1: return direct<1>(job, x, stride, first, last);
      case 2: return direct<2>(job, x, stride, first, last);
      case 3: return direct<3>(job, x, stride, first, last);
      default: return direct<4>(job, x, stride, first, last);
    }
  });
  return OK;
}

}  // namespace
}  // namespace mxq
