// The same names as simd_avx512.h in plain C++, for processors without vectors that we know.
#pragma once
#include "mxq.h"
#include "numbers.h"

namespace mxq {
namespace {

// Four fp32 numbers; compilers turn the loops into whatever the processor has.
struct F {
  struct V {
    float x[4];
  };
  static constexpr int N = 4;
  template <class Op>
  static V each(Op op) {
    V r;
    for (int i = 0; i < N; i++) r.x[i] = op(i);
    return r;
  }
  static V load(const float* p) {
    return each([=](int i) { return p[i]; });
  }
  static void store(float* p, V v) { std::memcpy(p, v.x, sizeof v.x); }
  static V set1(float x) {
    return each([=](int) { return x; });
  }
  static V add(V a, V b) {
    return each([&](int i) { return a.x[i] + b.x[i]; });
  }
  static V sub(V a, V b) {
    return each([&](int i) { return a.x[i] - b.x[i]; });
  }
  static V mul(V a, V b) {
    return each([&](int i) { return a.x[i] * b.x[i]; });
  }
  static V div(V a, V b) {
    return each([&](int i) { return a.x[i] / b.x[i]; });
  }
  // Rounded twice: used where the product is exact, or where a last bit does not matter.
  static V fma(V a, V b, V c) { return add(mul(a, b), c); }
  static V fnma(V a, V b, V c) { return sub(c, mul(a, b)); }
  static V min(V a, V b) {
    return each([&](int i) { return a.x[i] < b.x[i] ? a.x[i] : b.x[i]; });
  }
  static V max(V a, V b) {
    return each([&](int i) { return a.x[i] > b.x[i] ? a.x[i] : b.x[i]; });
  }
  static V abs(V a) {
    return each([&](int i) { return float_of(bits_of(a.x[i]) & 0x7FFFFFFFu); });
  }
  static V where_less(V a, V b, V yes, V no) {
    return each([&](int i) { return a.x[i] < b.x[i] ? yes.x[i] : no.x[i]; });
  }
  static int count_greater(V a, V b) {
    int n = 0;
    for (int i = 0; i < N; i++) n += a.x[i] > b.x[i];
    return n;
  }
  static bool any_less(V a, V b) { return count_greater(b, a) > 0; }
  static V gather(const float* table, V index) {
    return each([&](int i) { return table[static_cast<int>(index.x[i])]; });
  }
  static float sum(V a) { return (a.x[0] + a.x[2]) + (a.x[1] + a.x[3]); }
  static V binade15(V a) {
    return each([&](int i) { return float_of((bits_of(a.x[i]) & 0x7F800000u) | 0x00400000u); });
  }
  static V from_bf16(const uint16_t* p) {
    return each([=](int i) { return mxq::from_bf16(p[i]); });
  }
  static V from_f16(const uint16_t* p) {
    return each([=](int i) { return mxq::from_f16(p[i]); });
  }
  static V elements(const uint8_t* p) {
    return each([=](int i) {
      const int code = p[i / 2] >> 4 * (i % 2) & 15;
      return code < 8 ? E2M1[code] : -E2M1[code & 7];
    });
  }
  static V lookup(const uint8_t* p, const uint32_t* table) {
    return each([=](int i) { return float_of(table[p[i / 2] >> 4 * (i % 2) & 15]); });
  }
  static void transpose(V* v) {
    for (int i = 0; i < N; i++)
      for (int j = 0; j < i; j++) {
        const float t = v[i].x[j];
        v[i].x[j] = v[j].x[i];
        v[j].x[i] = t;
      }
  }
};

template <class W>
void encode(const W* x, int64_t n, const uint8_t* codes, int shift, const QuantTables& t, uint8_t* out) {
  constexpr W kMagnitude = static_cast<W>(~W(0)) >> 1;
  constexpr int kSign = 8 * sizeof(W) - 4;
  for (int64_t i = 0; i < n; i += 8) {
    uint8_t code[8];
    for (int j = 0; j < 8; j++) {
      const auto c = codes[(i + j) >> shift];
      const int32_t magnitude = x[i + j] & kMagnitude;
      int above = 0;
      for (int k = 0; k < 7; k++) above += magnitude > (sizeof(W) == 2 ? t.limit16[c][k] : t.limit32[c][k]);
      code[j] = static_cast<uint8_t>(above | (x[i + j] >> kSign & 8));
    }
    for (int j = 0; j < 4; j++) out[i / 2 + j] = static_cast<uint8_t>(code[2 * j] | code[2 * j + 1] << 4);
  }
}

struct Words {
  uint16_t x[16];
};

inline Words decode_words(const uint8_t* p, const DecodeTable& t, uint8_t first, uint8_t second) {
  Words w;
  for (int i = 0; i < 16; i++) w.x[i] = t.words16[i < 8 ? first : second][p[i / 2] >> 4 * (i % 2) & 15];
  return w;
}

inline Words decode_words(const uint8_t* p, const DecodeTable& t, uint8_t code) { return decode_words(p, t, code, code); }
inline void store_words(uint16_t* out, const Words& w) { std::memcpy(out, w.x, sizeof w.x); }
inline void stream_words(uint16_t* out, const Words& w) { store_words(out, w); }
inline void stream_fence() {}

inline void sum4(F::V a, F::V b, F::V c, F::V d, float* out) {
  out[0] = F::sum(a), out[1] = F::sum(b), out[2] = F::sum(c), out[3] = F::sum(d);
}

}  // namespace
}  // namespace mxq
