// Vectors of AVX2 with FMA and F16C; see simd_avx512.h.
#pragma once
#include <immintrin.h>

#include "mxq.h"
#include "numbers.h"

namespace mxq {
namespace {

// Eight fp32 numbers.
struct F {
  using V = __m256;
  static constexpr int N = 8;
  static V load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, V v) { _mm256_storeu_ps(p, v); }
  static V set1(float x) { return _mm256_set1_ps(x); }
  static V add(V a, V b) { return _mm256_add_ps(a, b); }
  static V sub(V a, V b) { return _mm256_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm256_mul_ps(a, b); }
  static V div(V a, V b) { return _mm256_div_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
  static V fnma(V a, V b, V c) { return _mm256_fnmadd_ps(a, b, c); }
  static V min(V a, V b) { return _mm256_min_ps(a, b); }
  static V max(V a, V b) { return _mm256_max_ps(a, b); }
  static V abs(V a) { return _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF))); }
  static V where_less(V a, V b, V yes, V no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }
  static int count_greater(V a, V b) { return __builtin_popcount(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ))); }
  static bool any_less(V a, V b) { return _mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)) != 0; }
  static V gather(const float* table, V index) { return _mm256_i32gather_ps(table, _mm256_cvtps_epi32(index), 4); }
  static float sum(V a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
  }
  static V binade15(V a) {
    const __m256 exponent = _mm256_and_ps(a, _mm256_castsi256_ps(_mm256_set1_epi32(0x7F800000)));
    return _mm256_or_ps(exponent, _mm256_castsi256_ps(_mm256_set1_epi32(0x00400000)));
  }
  static V from_bf16(const uint16_t* p) {
    const __m256i words = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
  }
  static V from_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))); }
  static V elements(const uint8_t* p) {
    return with_sign(p, _mm256_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f));
  }
  // The upper half of the table is the lower half negated.
  static V lookup(const uint8_t* p, const uint32_t* table) {
    return with_sign(p, _mm256_loadu_ps(reinterpret_cast<const float*>(table)));
  }
  static void transpose(V* v);

 private:
  static V with_sign(const uint8_t* p, V magnitudes) {
    int32_t word;
    std::memcpy(&word, p, 4);
    const __m256i codes = _mm256_srlv_epi32(_mm256_set1_epi32(word), _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32(INT32_MIN));
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, codes), _mm256_castsi256_ps(sign));
  }
};

inline void F::transpose(V* v) {
  V t[8];
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    v[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    v[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xEE);
    v[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    v[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xEE);
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x20);
    t[i + 4] = _mm256_permute2f128_ps(v[i], v[i + 4], 0x31);
  }
  for (int i = 0; i < 8; i++) v[i] = t[i];
}

struct Fold {
  using V = __m256i;
  static constexpr int BYTES = 32;
  template <class W>
  static V magnitudes(const W* p) {
    const V v = _mm256_loadu_si256(reinterpret_cast<const V*>(p));
    return _mm256_and_si256(v, sizeof(W) == 2 ? _mm256_set1_epi16(0x7FFF) : _mm256_set1_epi32(0x7FFFFFFF));
  }
  template <class W>
  static V max(V a, V b) {
    return sizeof(W) == 2 ? _mm256_max_epu16(a, b) : _mm256_max_epu32(a, b);
  }
  template <class W>
  static V lanes(V a, V b) {
    return max<W>(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
  }
  template <class W>
  static V quads(V a, V b) {
    return max<W>(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  }
  template <class W>
  static V doubles(V a, V b) {
    const __m256 x = _mm256_castsi256_ps(a), y = _mm256_castsi256_ps(b);
    return max<W>(_mm256_castps_si256(_mm256_shuffle_ps(x, y, 0x88)), _mm256_castps_si256(_mm256_shuffle_ps(x, y, 0xDD)));
  }
  static V words(V a, V b) {
    return _mm256_max_epu16(_mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xAA),
                            _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xAA));
  }
  template <class W>
  static void store(W* out, V v, const W* order) {
    constexpr int count = BYTES / sizeof(W);
    W raw[count];
    _mm256_storeu_si256(reinterpret_cast<V*>(raw), v);
    for (int i = 0; i < count; i++) out[i] = raw[order[i]];
  }
};

// Sixteen codes as words, sign included: the number of limits that each magnitude exceeds.
inline __m256i count_words(__m256i v, __m256i limits) {
  const __m256i magnitude = _mm256_and_si256(v, _mm256_set1_epi16(0x7FFF));
  __m256i code = _mm256_and_si256(_mm256_srli_epi16(v, 12), _mm256_set1_epi16(8));
  for (int k = 0; k < 7; k++) {
    const __m256i limit = _mm256_shuffle_epi8(limits, _mm256_set1_epi16(static_cast<int16_t>(2 * k | (2 * k + 1) << 8)));
    code = _mm256_sub_epi16(code, _mm256_cmpgt_epi16(magnitude, limit));
  }
  return code;
}

inline __m128i limits_of(const QuantTables& t, uint8_t code) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(t.limit16[code]));
}

template <bool SHORT>  // blocks of 8
void encode_words(const uint16_t* x, int64_t n, const uint8_t* codes, int shift, const QuantTables& t, uint8_t* out) {
  const __m256i weights = _mm256_set1_epi32(0x00100001), order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  for (int64_t i = 0; i < n; i += 64) {
    __m256i pairs[4];
    for (int j = 0; j < 4; j++) {
      const int64_t at = i + 16 * j;
      __m256i limits;
      if (SHORT) {
        const __m256i first = _mm256_castsi128_si256(limits_of(t, codes[at / 8]));
        limits = _mm256_inserti128_si256(first, limits_of(t, codes[at / 8 + 1]), 1);
      } else {
        limits = _mm256_broadcastsi128_si256(limits_of(t, codes[at >> shift]));
      }
      const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + at));
      pairs[j] = _mm256_madd_epi16(count_words(v, limits), weights);
    }
    const __m256i low = _mm256_packus_epi32(pairs[0], pairs[1]), high = _mm256_packus_epi32(pairs[2], pairs[3]);
    const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + i / 2), bytes);
  }
}

inline void encode(const uint16_t* x, int64_t n, const uint8_t* codes, int shift, const QuantTables& t, uint8_t* out) {
  if (shift == 3) return encode_words<true>(x, n, codes, shift, t, out);
  encode_words<false>(x, n, codes, shift, t, out);
}

inline __m256i code_doubles(const uint32_t* x, __m256i limits) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  const __m256i magnitude = _mm256_and_si256(v, _mm256_set1_epi32(0x7FFFFFFF));
  const auto step = [&](__m256i index) { return _mm256_cmpgt_epi32(magnitude, _mm256_permutevar8x32_epi32(limits, index)); };
  __m256i code = _mm256_and_si256(step(_mm256_set1_epi32(3)), _mm256_set1_epi32(4));
  code = _mm256_or_si256(code, _mm256_and_si256(step(_mm256_add_epi32(code, _mm256_set1_epi32(1))), _mm256_set1_epi32(2)));
  code = _mm256_sub_epi32(code, step(code));
  return _mm256_or_si256(code, _mm256_and_si256(_mm256_srli_epi32(v, 28), _mm256_set1_epi32(8)));
}

inline void encode(const uint32_t* x, int64_t n, const uint8_t* codes, int shift, const QuantTables& t, uint8_t* out) {
  for (int64_t i = 0; i < n; i += 16) {
    __m256i c[2];
    for (int j = 0; j < 2; j++) {
      const auto* limits = t.limit32[codes[(i + 8 * j) >> shift]];
      c[j] = code_doubles(x + i + 8 * j, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(limits)));
      c[j] = _mm256_or_si256(c[j], _mm256_srli_epi64(c[j], 28));  // a byte in each 64 bits
    }
    const __m256i gather = _mm256_setr_epi8(0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                            0, 8, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    for (int j = 0; j < 2; j++) {
      const __m256i bytes = _mm256_shuffle_epi8(c[j], gather);
      const auto low = static_cast<uint16_t>(_mm256_extract_epi16(bytes, 0));
      const auto high = static_cast<uint16_t>(_mm256_extract_epi16(bytes, 8));
      std::memcpy(out + (i + 8 * j) / 2, &low, 2);
      std::memcpy(out + (i + 8 * j) / 2 + 2, &high, 2);
    }
  }
}

// Sixteen codes in 8 packed bytes, a byte each.
inline __m128i nibble_bytes(const uint8_t* p) {
  const __m128i raw = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), mask = _mm_set1_epi8(15);
  return _mm_unpacklo_epi8(_mm_and_si128(raw, mask), _mm_and_si128(_mm_srli_epi16(raw, 4), mask));
}

inline __m128i table_bytes(const uint8_t* table, __m128i index) {
  return _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)), index);
}

// Sixteen 16-bit words of a decode table: its low and its high bytes are looked up apart.
inline __m256i decode_words(const uint8_t* p, const DecodeTable& t, uint8_t code) {
  const __m128i index = nibble_bytes(p), low = table_bytes(t.low[code], index), high = table_bytes(t.high[code], index);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(low, high)), _mm_unpackhi_epi8(low, high), 1);
}

inline __m256i decode_words(const uint8_t* p, const DecodeTable& t, uint8_t first, uint8_t second) {
  return _mm256_blend_epi32(decode_words(p, t, first), decode_words(p, t, second), 0xF0);
}

inline void store_words(uint16_t* out, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), v); }
inline void stream_words(uint16_t* out, __m256i v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(out), v); }
inline void stream_fence() { _mm_sfence(); }

inline void sum4(F::V a, F::V b, F::V c, F::V d, float* out) {
  const F::V all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
}

}  // namespace
}  // namespace mxq
