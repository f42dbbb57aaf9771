// Dequantizing rows. fp4 elements times a scale come from a table; fp6 and fp8 are multiplied.
#pragma once
#include "mxq.h"
#include "numbers.h"
#include "parallel.h"

namespace mxq {
namespace {

// Group g of 16 fp4 codes at p; `scale`: the row's scale codes.
inline auto decode_group(const uint8_t* p, const uint8_t* scale, int64_t g, int shift, const DecodeTable& t) {
  if (shift == 3) return decode_words(p, t, scale[2 * g], scale[2 * g + 1]);
  return decode_words(p, t, scale[g >> (shift - 4)]);
}

inline void decode_group(const uint8_t* p, const uint8_t* scale, int64_t g, int shift, const DecodeTable& t, float* out) {
  for (int i = 0; i < 16; i += F::N) {
    const int64_t block = (16 * g + i) >> shift;
    F::store(out + i, F::lookup(p + i / 2, t.words32[scale[block]]));
    if (F::N == 16 && shift == 3) {  // the second half has a scale of its own
      float other[16];
      F::store(other, F::lookup(p, t.words32[scale[block + 1]]));
      std::memcpy(out + 8, other + 8, 32);
    }
  }
}

// A group at the end of a row that is not whole, with codes of zero after it. `scale` may lack the
// second of two blocks of 8, so the group gets scales of its own.
struct Tail {
  uint8_t bytes[8] = {}, scale[2];
  Tail(const uint8_t* p, const uint8_t* row_scale, int64_t g, int shift, int left) {
    std::memcpy(bytes, p, (left + 1) / 2);
    scale[0] = row_scale[16 * g >> shift];
    scale[1] = shift == 3 && left > 8 ? row_scale[2 * g + 1] : scale[0];
  }
  // Seen as group 0 of a row with blocks of 8 or 16.
  static int shift(int of_row) { return of_row == 3 ? 3 : 4; }
};

// Outputs beyond the caches are written past them, if they lie on whole vectors.
constexpr int64_t kStreamBytes = 8 << 20;

inline void decode_row(const uint8_t* p, const uint8_t* scale, int64_t n, int shift, const DecodeTable& t, bool stream,
                       uint16_t* out) {
  const int64_t groups = n / 16;
  if (stream) {
    for (int64_t g = 0; g < groups; g++) stream_words(out + 16 * g, decode_group(p + 8 * g, scale, g, shift, t));
  } else {
    for (int64_t g = 0; g < groups; g++) store_words(out + 16 * g, decode_group(p + 8 * g, scale, g, shift, t));
  }
  const int left = static_cast<int>(n % 16);
  if (left == 0) return;
  const Tail tail(p + 8 * groups, scale, groups, shift, left);
  uint16_t words[16];
  store_words(words, decode_group(tail.bytes, tail.scale, 0, Tail::shift(shift), t));
  std::memcpy(out + 16 * groups, words, left * 2);
}

inline void decode_row(const uint8_t* p, const uint8_t* scale, int64_t n, int shift, const DecodeTable& t, bool,
                       float* out) {
  const int64_t groups = n / 16;
  for (int64_t g = 0; g < groups; g++) decode_group(p + 8 * g, scale, g, shift, t, out + 16 * g);
  const int left = static_cast<int>(n % 16);
  if (left == 0) return;
  const Tail tail(p + 8 * groups, scale, groups, shift, left);
  float values[16];
  decode_group(tail.bytes, tail.scale, 0, Tail::shift(shift), t, values);
  std::memcpy(out + 16 * groups, values, left * 4);
}

template <class T>
T round_to(float x, int dtype) {
  if constexpr (sizeof(T) == 4) return x;
  else return dtype == F16 ? to_f16(x) : to_bf16(x);
}

// fp6 and fp8: a stretch of codes, then products, then roundings, each a loop that vectorizes.
template <class T>
void multiply_row(const DequantJob& job, const float* scales, const uint8_t* p, const uint8_t* scale, T* out) {
  constexpr int kStretch = 512;
  const int shift = __builtin_ctz(static_cast<unsigned>(job.block_columns));
  for (int64_t start = 0; start < job.columns; start += kStretch) {
    const int n = static_cast<int>(job.columns - start < kStretch ? job.columns - start : kStretch);
    uint8_t unpacked[kStretch + 4];
    const uint8_t* codes = p + start;
    if (job.bits == 6) {
      codes = unpacked;
      for (int i = 0; i < n; i += 4) {
        const uint8_t* b = p + (start + i) / 4 * 3;
        const uint32_t word = b[0] | b[1] << 8 | b[2] << 16;
        for (int j = 0; j < 4; j++) unpacked[i + j] = word >> 6 * j & 63;
      }
    }
    float values[kStretch];
    for (int i = 0; i < n; i++) values[i] = job.elements[codes[i]] * scales[scale[(start + i) >> shift]];
    for (int i = 0; i < n; i++) out[start + i] = round_to<T>(values[i], job.dtype);
  }
}

template <class T>
int dequantize_rows(const DequantJob& job, int64_t first, int64_t last) {
  const int shift = __builtin_ctz(static_cast<unsigned>(job.block_columns));
  const int64_t blocks = (job.columns + job.block_columns - 1) >> shift;
  const int64_t row_bytes = job.bits == 4 ? (job.columns + 1) / 2 : job.bits == 6 ? (job.columns + 3) / 4 * 3 : job.columns;
  const bool large = job.rows * job.columns * static_cast<int64_t>(sizeof(T)) > kStreamBytes;
  float scales[256];
  if (job.bits != 4) mxq_scale_values(&job.format, scales);
  for (int64_t row = first; row < last; row++) {
    T* out = static_cast<T*>(job.out) + row * job.columns;
    const uint8_t* p = job.packed + row * row_bytes;
    const uint8_t* scale = job.scale + row / job.block_rows * blocks;
    const bool stream = large && reinterpret_cast<uintptr_t>(out) % 32 == 0;
    if (job.bits == 4) decode_row(p, scale, job.columns, shift, *job.table, stream, out);
    else multiply_row(job, scales, p, scale, out);
  }
  if (large) stream_fence();
  return OK;
}

int dequantize_part(const DequantJob* job, int64_t first, int64_t last) {
  return job->dtype == F32 ? dequantize_rows<float>(*job, first, last) : dequantize_rows<uint16_t>(*job, first, last);
}

}  // namespace
}  // namespace mxq
