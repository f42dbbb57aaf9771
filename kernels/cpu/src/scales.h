// From block maxima to scale codes: the rules of mxquant/codec/scaling.py, in the same fp32 operations.
#pragma once
#include "mxq.h"
#include "numbers.h"

namespace mxq {
namespace {

inline int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

// Codes of magnitudes in a format with a mantissa, to nearest-even or upwards, saturating.
inline void encode_scales(const float* x, int n, const ScaleFormat& f, bool up, uint8_t* codes) {
  const int min_exponent = 1 - f.bias, m = f.mantissa_bits;
  const int max_exponent = f.max_code >> m, max_mantissa = f.max_code & ((1 << m) - 1);
  const float largest = std::ldexp(static_cast<float>((1 << m) + max_mantissa), max_exponent - f.bias - m);
  for (int i = 0; i < n; i++) {
    const float y = x[i] < largest ? x[i] : largest;
    int exponent = static_cast<int>(bits_of(y) >> 23) - 127;
    exponent = exponent > min_exponent ? exponent : min_exponent;
    const float steps = y * float_of(static_cast<uint32_t>(m + 127 - exponent) << 23);
    const int code = ((exponent - min_exponent) << m) + static_cast<int>(up ? std::ceil(steps) : std::rint(steps));
    codes[i] = static_cast<uint8_t>(code < f.max_code ? code : f.max_code);
  }
}

inline void encode_quotients(const float* amax, int n, const ScaleFormat& f, float target, bool up, uint8_t* codes) {
  float x[256];
  for (int i = 0; i < n; i++) x[i] = amax[i] / target;
  if (f.global_scale > 0)
    for (int i = 0; i < n; i++) x[i] = f.global_scale * x[i];
  encode_scales(x, n, f, up, codes);
}

// Powers of two: a constant added to the bits moves to the next binade what the rule wants there.
inline void encode_powers(const float* amax, int n, const ScaleFormat& f, int carry, int largest, uint8_t* codes) {
  const float g = f.global_scale > 0 ? f.global_scale : 1.0f;
  for (int i = 0; i < n; i++) {
    const auto bits = static_cast<int32_t>(bits_of(amax[i] * g));
    codes[i] = static_cast<uint8_t>(clamp(((bits + carry) >> 23) - 2, 0, largest));
  }
}

// The smallest codes that saturate nothing, from a guess at most one code off.
inline void settle_unsaturated(const float* amax, int n, const QuantTables& t, int largest, uint8_t* codes) {
  for (int i = 0; i < n; i++) {
    int code = clamp(codes[i] - 1, 0, largest);
    for (int round = 0; round < 2; round++) {
      const float scale = t.effective[code];
      // Cut in two, a scale times 6 needs no rounding, so neither does the comparison.
      const float high = float_of(bits_of(scale) & ~0xFFFu);
      code += (amax[i] - high * 6.0f > (scale - high) * 6.0f) && code < largest;
    }
    codes[i] = static_cast<uint8_t>(code);
  }
}

// Rules that look at nothing but the maxima; for the two searches, where these start. `four`: the
// codes that map the maxima to 4.
inline void scales_from_amax(const QuantJob& job, const float* amax, int n, uint8_t* codes, uint8_t* four) {
  const ScaleFormat& f = job.format;
  if (job.rule >= CARRY) {
    encode_powers(amax, n, f, job.carry, job.largest, codes);
    if (job.rule == RCEIL) settle_unsaturated(amax, n, *job.tables, job.largest, codes);
    return;
  }
  encode_quotients(amax, n, f, 6.0f, job.rule == CEIL, codes);
  if (job.rule == CEIL) settle_unsaturated(amax, n, *job.tables, f.max_code, codes);
  if (job.rule == FOUR_OVER_SIX) encode_quotients(amax, n, f, 4.0f, false, four);
}

// Rules that never let a block that is not all zero have a scale of zero.
inline void lift_zero_scales(const QuantJob& job, const float* amax, int n, uint8_t* codes) {
  if (job.rule != NONZERO && job.rule != FOUR_OVER_SIX && job.rule != SEARCH) return;
  // As products: GCC 12 fails to compile a masked maximum of bytes.
  for (int i = 0; i < n; i++) codes[i] = static_cast<uint8_t>((codes[i] + (codes[i] == 0)) * (amax[i] > 0));
}

}  // namespace
}  // namespace mxq
