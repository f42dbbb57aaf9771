// Vectors of AVX-512 (F, BW, DQ, VL, VBMI, BF16). The same names exist in simd_avx2.h and simd_portable.h.
#pragma once
#include <immintrin.h>

#include "mxq.h"
#include "numbers.h"

namespace mxq {
namespace {

// Sixteen fp32 numbers.
struct F {
  using V = __m512;
  static constexpr int N = 16;
  static V load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, V v) { _mm512_storeu_ps(p, v); }
  static V set1(float x) { return _mm512_set1_ps(x); }
  static V add(V a, V b) { return _mm512_add_ps(a, b); }
  static V sub(V a, V b) { return _mm512_sub_ps(a, b); }
  static V mul(V a, V b) { return _mm512_mul_ps(a, b); }
  static V div(V a, V b) { return _mm512_div_ps(a, b); }
  static V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c, rounded once
  static V fnma(V a, V b, V c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
  static V min(V a, V b) { return _mm512_min_ps(a, b); }
  static V max(V a, V b) { return _mm512_max_ps(a, b); }
  static V abs(V a) { return _mm512_abs_ps(a); }
  static V where_less(V a, V b, V yes, V no) { return _mm512_mask_mov_ps(no, _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), yes); }
  static int count_greater(V a, V b) { return __builtin_popcount(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ)); }
  static bool any_less(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ) != 0; }
  static V gather(const float* table, V index) { return _mm512_i32gather_ps(_mm512_cvtps_epi32(index), table, 4); }
  static float sum(V a) { return _mm512_reduce_add_ps(a); }
  // 1.5 * 2^exponent of a positive number.
  static V binade15(V a) {
    const __m512i bits = _mm512_ternarylogic_epi32(_mm512_castps_si512(a), _mm512_set1_epi32(0x7F800000),
                                                   _mm512_set1_epi32(0x00400000), 0xEA);
    return _mm512_castsi512_ps(bits);
  }
  static V from_bf16(const uint16_t* p) {
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    return _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
  }
  static V from_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
  // Values of the 16 codes in 8 packed bytes.
  static V elements(const uint8_t* p) { return _mm512_permutexvar_ps(nibbles(p), element_values()); }
  static V lookup(const uint8_t* p, const uint32_t* table) {
    return _mm512_permutexvar_ps(nibbles(p), _mm512_loadu_ps(reinterpret_cast<const float*>(table)));
  }
  static void transpose(V* v);

 private:
  // Codes in the low 4 bits of 16 double words, others above them: a permutation ignores those.
  static __m512i nibbles(const uint8_t* p) {
    int64_t word;
    std::memcpy(&word, p, 8);
    const __m512i shifts = _mm512_setr_epi64(0x0000000400000000, 0x0000000C00000008, 0x0000001400000010,
                                             0x0000001C00000018, 0x0000002400000020, 0x0000002C00000028,
                                             0x0000003400000030, 0x0000003C00000038);
    return _mm512_multishift_epi64_epi8(shifts, _mm512_set1_epi64(word));
  }
  static V element_values() {
    return _mm512_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f, -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f);
  }
};

inline void F::transpose(V* v) {
  V t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_ps(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_ps(v[i], v[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    for (int j = 0; j < 2; j++) {
      const __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + 2 + j]);
      v[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
      v[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
    }
  }
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_f32x4(v[i], v[4 + i], 0x88);
    t[4 + i] = _mm512_shuffle_f32x4(v[i], v[4 + i], 0xDD);
    t[8 + i] = _mm512_shuffle_f32x4(v[8 + i], v[12 + i], 0x88);
    t[12 + i] = _mm512_shuffle_f32x4(v[8 + i], v[12 + i], 0xDD);
  }
  for (int i = 0; i < 4; i++) {
    v[i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0x88);
    v[8 + i] = _mm512_shuffle_f32x4(t[i], t[8 + i], 0xDD);
    v[4 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0x88);
    v[12 + i] = _mm512_shuffle_f32x4(t[4 + i], t[12 + i], 0xDD);
  }
}

// Magnitudes as integers, for maxima over neighbours: each step takes the halves of what belongs
// together from two vectors and keeps their maxima, so that the last holds one number a granule.
struct Fold {
  using V = __m512i;
  static constexpr int BYTES = 64;
  template <class W>
  static V magnitudes(const W* p) {
    const V v = _mm512_loadu_si512(p);
    return _mm512_and_si512(v, sizeof(W) == 2 ? _mm512_set1_epi16(0x7FFF) : _mm512_set1_epi32(0x7FFFFFFF));
  }
  template <class W>
  static V max(V a, V b) {
    return sizeof(W) == 2 ? _mm512_max_epu16(a, b) : _mm512_max_epu32(a, b);
  }
  template <class W>
  static V lanes(V a, V b) {
    return max<W>(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD));
  }
  template <class W>
  static V quads(V a, V b) {
    return max<W>(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  }
  template <class W>
  static V doubles(V a, V b) {
    const __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    return max<W>(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)), _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xDD)));
  }
  static V words(V a, V b) {
    constexpr __mmask32 odd = 0xAAAAAAAA;
    return _mm512_max_epu16(_mm512_mask_blend_epi16(odd, a, _mm512_slli_epi32(b, 16)),
                            _mm512_mask_blend_epi16(odd, _mm512_srli_epi32(a, 16), b));
  }
  template <class W>
  static void store(W* out, V v, const W* order) {
    const V index = _mm512_loadu_si512(order);
    _mm512_storeu_si512(out, sizeof(W) == 2 ? _mm512_permutexvar_epi16(index, v) : _mm512_permutexvar_epi32(index, v));
  }
};

// Element codes of n magnitudes (a multiple of 64): three steps of binary search in the limits of
// the block's scale, which fit a register. KIND: 8, 16 or 32 and more elements to a block.
template <int KIND>
void encode_words(const uint16_t* x, int64_t n, const uint8_t* codes, int shift, const QuantTables& t, uint8_t* out) {
  const auto limits = [&](int64_t block) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(t.limit16[codes[block]])); };
  const __m512i lane = _mm512_setr_epi64(0, 0, KIND == 8 ? 0x0008000800080008 : 0, KIND == 8 ? 0x0008000800080008 : 0,
                                         KIND == 8 ? 0x0010001000100010 : KIND == 16 ? 0x0008000800080008 : 0,
                                         KIND == 8 ? 0x0010001000100010 : KIND == 16 ? 0x0008000800080008 : 0,
                                         KIND == 8 ? 0x0018001800180018 : KIND == 16 ? 0x0008000800080008 : 0,
                                         KIND == 8 ? 0x0018001800180018 : KIND == 16 ? 0x0008000800080008 : 0);
  const __m512i one = _mm512_set1_epi16(1), two = _mm512_set1_epi16(2), four = _mm512_set1_epi16(4);
  const __m512i middle = _mm512_add_epi16(lane, _mm512_set1_epi16(3));
  for (int64_t i = 0; i < n; i += 32) {
    const __m512i v = _mm512_loadu_si512(x + i), magnitude = _mm512_and_si512(v, _mm512_set1_epi16(0x7FFF));
    __m512i table;
    if constexpr (KIND == 8) {
      const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(limits(i / 8)), limits(i / 8 + 1), 1);
      const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(limits(i / 8 + 2)), limits(i / 8 + 3), 1);
      table = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    } else if constexpr (KIND == 16) {
      table = _mm512_castsi256_si512(_mm256_inserti128_si256(_mm256_castsi128_si256(limits(i / 16)), limits(i / 16 + 1), 1));
    } else {
      table = _mm512_castsi128_si512(limits(i >> shift));
    }
    __mmask32 above = _mm512_cmpgt_epi16_mask(magnitude, _mm512_permutexvar_epi16(middle, table));
    __m512i code = _mm512_mask_add_epi16(lane, above, lane, four);
    above = _mm512_cmpgt_epi16_mask(magnitude, _mm512_permutexvar_epi16(_mm512_add_epi16(code, one), table));
    code = _mm512_mask_add_epi16(code, above, code, two);
    above = _mm512_cmpgt_epi16_mask(magnitude, _mm512_permutexvar_epi16(code, table));
    code = _mm512_mask_add_epi16(code, above, code, one);
    // The sign goes where the lane's number was.
    code = _mm512_ternarylogic_epi32(_mm512_set1_epi16(8), _mm512_srli_epi16(v, 12), code, 0xCA);
    if constexpr (KIND == 8) code = _mm512_and_si512(code, _mm512_set1_epi16(15));
    const __m512i pairs = _mm512_madd_epi16(code, _mm512_set1_epi32(0x00100001));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i / 2), _mm512_cvtepi32_epi8(pairs));
  }
}

inline void encode(const uint16_t* x, int64_t n, const uint8_t* codes, int shift, const QuantTables& t, uint8_t* out) {
  if (shift == 3) return encode_words<8>(x, n, codes, shift, t, out);
  if (shift == 4) return encode_words<16>(x, n, codes, shift, t, out);
  encode_words<32>(x, n, codes, shift, t, out);
}

inline void encode(const uint32_t* x, int64_t n, const uint8_t* codes, int shift, const QuantTables& t, uint8_t* out) {
  const auto limits = [&](int64_t block) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(t.limit32[codes[block]])); };
  const bool short_blocks = shift == 3;
  const __m512i lane = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi32(short_blocks ? 8 : 0), 1);
  const __m512i one = _mm512_set1_epi32(1), two = _mm512_set1_epi32(2), four = _mm512_set1_epi32(4);
  const __m512i middle = _mm512_add_epi32(lane, _mm512_set1_epi32(3));
  for (int64_t i = 0; i < n; i += 16) {
    const __m512i v = _mm512_loadu_si512(x + i), magnitude = _mm512_and_si512(v, _mm512_set1_epi32(0x7FFFFFFF));
    __m512i table = _mm512_castsi256_si512(limits(i >> shift));
    if (short_blocks) table = _mm512_inserti64x4(table, limits((i >> shift) + 1), 1);
    __mmask16 above = _mm512_cmpgt_epi32_mask(magnitude, _mm512_permutexvar_epi32(middle, table));
    __m512i code = _mm512_mask_add_epi32(lane, above, lane, four);
    above = _mm512_cmpgt_epi32_mask(magnitude, _mm512_permutexvar_epi32(_mm512_add_epi32(code, one), table));
    code = _mm512_mask_add_epi32(code, above, code, two);
    above = _mm512_cmpgt_epi32_mask(magnitude, _mm512_permutexvar_epi32(code, table));
    code = _mm512_mask_add_epi32(code, above, code, one);
    code = _mm512_ternarylogic_epi32(_mm512_set1_epi32(8), _mm512_srli_epi32(v, 28), code, 0xCA);
    const __m512i pairs = _mm512_or_si512(code, _mm512_srli_epi64(code, 28));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out + i / 2), _mm512_cvtepi64_epi8(pairs));
  }
}

// Sixteen 16-bit words of a decode table, chosen by the codes in 8 packed bytes.
inline __m256i nibble_words(const uint8_t* p) {
  int64_t word;
  std::memcpy(&word, p, 8);
  const __m256i shifts = _mm256_setr_epi64x(0x000C000800040000, 0x001C001800140010, 0x002C002800240020, 0x003C003800340030);
  return _mm256_multishift_epi64_epi8(shifts, _mm256_set1_epi64x(word));
}

inline __m256i decode_words(const uint8_t* p, const DecodeTable& t, uint8_t code) {
  return _mm256_permutexvar_epi16(nibble_words(p), _mm256_loadu_si256(reinterpret_cast<const __m256i*>(t.words16[code])));
}

// The same with one scale for the first eight and one for the others.
inline __m256i decode_words(const uint8_t* p, const DecodeTable& t, uint8_t first, uint8_t second) {
  const __m256i index = nibble_words(p);
  const __m256i low = _mm256_permutexvar_epi16(index, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(t.words16[first])));
  return _mm256_mask_permutexvar_epi16(low, 0xFF00, index, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(t.words16[second])));
}

inline void store_words(uint16_t* out, __m256i v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), v); }
inline void stream_words(uint16_t* out, __m256i v) { _mm256_stream_si256(reinterpret_cast<__m256i*>(out), v); }
inline void stream_fence() { _mm_sfence(); }

// Sums over all of a, b, c and d.
inline void sum4(F::V a, F::V b, F::V c, F::V d, float* out) {
  const F::V ab = F::add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const F::V cd = F::add(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const F::V all = F::add(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xEE));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

}  // namespace
}  // namespace mxq
