// Few rows of x: weights are decoded in registers, 64 at a time, and multiplied with every row of x in
// fp32. Elements are looked up without their scale, as the high 16 bits of fp32; the scale is applied
// to the sum over a block. x is reordered once to the order in which the look-ups leave the weights.
#pragma once
#include "linear.h"

namespace mxq {
namespace {

constexpr int kMaxDirectRows = 4, kSpan = 64;

// Place of weight w (0 to 63) of a span. 128-bit lanes hold weights 0-31 and 32-63, the two halves of a
// lane are unpacked to words apart, and of two neighbouring words each becomes a number of its own.
inline int place_of(int w) {
  const int lane = w / 32, half = w % 32 / 16;
  return (half * 4 + w % 4) * 8 + lane * 4 + w % 16 / 4;
}

struct Reordered {
  static void row(const LinearJob& job, int64_t m, int64_t chunks, float* out) {
    std::memset(out, 0, chunks * kSpan * sizeof(float));
    int place[kSpan];
    for (int w = 0; w < kSpan; w++) place[w] = place_of(w);
    for (int64_t i = 0; i < job.k; i++) out[i / kSpan * kSpan + place[i % kSpan]] = activation(job, m, i);
  }
};

inline __m256 both(uint32_t low, uint32_t high) {
  const __m256i all = _mm256_set1_epi32(static_cast<int>(low)), other = _mm256_set1_epi32(static_cast<int>(high));
  return _mm256_castsi256_ps(_mm256_blend_epi32(all, other, 0xF0));
}

// Adds a span of 64 weights, whose scale codes begin at s, to the sums of M rows.
template <int M, int WIDTH>
inline void add_span(const uint8_t* p, const uint8_t* s, const DecodeTable& t, const float* x, int64_t stride, __m256 (*sum)[2]) {
  const __m256i high_bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40, -128, -65, -65, -65, -64, -64, -64, -64));
  const __m256i low_bytes = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 0, -128, -64, 0, 64, -128, -64, 0, 0, -128, -64, 0, 64, -128, -64));
  const auto scale = [&](int block) { return t.words32[s[block]][2]; };  // element code 2 is 1
  const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), mask = _mm256_set1_epi8(15);
  const __m256i even = _mm256_and_si256(raw, mask), odd = _mm256_and_si256(_mm256_srli_epi16(raw, 4), mask);
  const __m256i even_high = _mm256_shuffle_epi8(high_bytes, even), even_low = _mm256_shuffle_epi8(low_bytes, even);
  const __m256i odd_high = _mm256_shuffle_epi8(high_bytes, odd), odd_low = _mm256_shuffle_epi8(low_bytes, odd);
  const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000));
  const auto first_of_two = [](__m256i words) { return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16)); };
  const auto second_of_two = [&](__m256i words) { return _mm256_castsi256_ps(_mm256_and_si256(words, upper)); };
#pragma GCC unroll 2
  for (int half = 0; half < 2; half++) {
    const __m256i e = half == 0 ? _mm256_unpacklo_epi8(even_low, even_high) : _mm256_unpackhi_epi8(even_low, even_high);
    const __m256i o = half == 0 ? _mm256_unpacklo_epi8(odd_low, odd_high) : _mm256_unpackhi_epi8(odd_low, odd_high);
    const __m256 w[4] = {first_of_two(e), first_of_two(o), second_of_two(e), second_of_two(o)};
    __m256 factor;
    if constexpr (WIDTH == 8) {
      const __m256 even_blocks = both(scale(2 * half), scale(2 * half + 4)), odd_blocks = both(scale(2 * half + 1), scale(2 * half + 5));
      factor = _mm256_shuffle_ps(even_blocks, odd_blocks, 0);
    } else if constexpr (WIDTH == 16) {
      factor = both(scale(half), scale(half + 2));
    } else {
      factor = both(scale(0), scale(WIDTH == 32));
    }
    for (int m = 0; m < M; m++) {
      const float* row = x + m * stride + half * 32;
      const __m256 first = F::fma(w[1], F::load(row + 8), F::mul(w[0], F::load(row)));
      const __m256 second = F::fma(w[3], F::load(row + 24), F::mul(w[2], F::load(row + 16)));
      sum[m][half] = F::fma(F::add(first, second), factor, sum[m][half]);
    }
  }
}

template <int M, int WIDTH>
void dot_rows(const LinearJob& job, const float* x, int64_t stride, int64_t first, int64_t last) {
  constexpr int kColumns = 16;
  const int shift = __builtin_ctz(static_cast<unsigned>(job.block_columns));
  const int64_t spans = job.k / kSpan, row_bytes = (job.k + 1) / 2, blocks = (job.k + job.block_columns - 1) >> shift;
  float sums[M][kColumns];
  for (int64_t row = first; row < last; row++) {
    const uint8_t* p = job.packed + row * row_bytes;
    const uint8_t* s = job.scale + row / job.block_rows * blocks;
    __m256 sum[M][2];
    for (auto& v : sum) v[0] = v[1] = _mm256_setzero_ps();
    for (int64_t i = 0; i < spans; i++) {
      ask_for(p + i * 32 + 3072);
      add_span<M, WIDTH>(p + i * 32, s + (i * kSpan >> shift), *job.table, x + i * kSpan, stride, sum);
    }
    if (job.k % kSpan != 0) {
      uint8_t bytes[32] = {}, scales[8];
      std::memcpy(bytes, p + spans * 32, row_bytes - spans * 32);
      for (int64_t i = 0; i < 8; i++) {
        const int64_t block = (spans * kSpan >> shift) + i;
        scales[i] = s[block < blocks ? block : blocks - 1];
      }
      add_span<M, WIDTH>(bytes, scales, *job.table, x + spans * kSpan, stride, sum);
    }
    const int64_t column = (row - first) % kColumns;
    for (int m = 0; m < M; m++) sums[m][column] = F::sum(F::add(sum[m][0], sum[m][1]));
    if (column == kColumns - 1 || row == last - 1)
      for (int m = 0; m < M; m++) finish(job, m, row - column, sums[m], static_cast<int>(column) + 1);
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
