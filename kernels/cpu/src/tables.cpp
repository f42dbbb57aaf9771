// Tables that are made once for a scale format and a global scale; see mxq.h for what they mean.
#include <limits>

#include "mxq.h"
#include "numbers.h"
#include "parallel.h"

namespace mxq {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int32_t kNever = 0x7FFFFFFF;
// Halfway between neighbouring elements. At a tie the even code wins: upwards for every other one.
constexpr float kMidpoint[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};

float scale_value(const ScaleFormat& f, int code) {
  if (code > f.max_code && !(f.mantissa_bits == 3 && f.bias == 15 && code < 255)) return kNaN;
  if (f.mantissa_bits == 0) return code == 0 ? float_of(0x00400000u) : float_of(static_cast<uint32_t>(code) << 23);
  const int exponent = code >> f.mantissa_bits, mantissa = code & ((1 << f.mantissa_bits) - 1);
  if (exponent == 0) return std::ldexp(static_cast<float>(mantissa), 1 - f.bias - f.mantissa_bits);
  const int significand = (1 << f.mantissa_bits) + mantissa;
  return std::ldexp(static_cast<float>(significand), exponent - f.bias - f.mantissa_bits);
}

float effective_value(const ScaleFormat& f, int code) {
  const float value = scale_value(f, code);
  return f.global_scale > 0 ? value / f.global_scale : value;
}

// The largest magnitude whose quotient by `scale`, rounded to fp32, is not above `limit` (`strict`:
// not at or above). The product is at most a few steps off, as a quotient is monotonic.
int32_t last_at_most(float limit, bool strict, float scale) {
  const auto above = [=](uint32_t bits) {
    const float q = float_of(bits) / scale;
    return strict ? q >= limit : q > limit;
  };
  const float guess = limit * scale;
  uint32_t bits = guess < std::numeric_limits<float>::max() ? bits_of(guess) : 0x7F7FFFFFu;
  while (bits > 0 && above(bits)) bits--;
  while (bits < 0x7F7FFFFFu && !above(bits + 1)) bits++;
  return bits == 0x7F7FFFFFu ? kNever : static_cast<int32_t>(bits);
}

// The same limit among the magnitudes of a 16-bit format.
int16_t limit_in_16_bits(int32_t limit, int dtype) {
  if (limit == kNever) return 0x7FFF;
  if (dtype == BF16) return static_cast<int16_t>(limit >> 16);
  int low = 0, high = 0x7C00;  // the largest half whose value is at most the limit
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (static_cast<int32_t>(bits_of(from_f16(static_cast<uint16_t>(middle)))) <= limit ? low : high) = middle;
  }
  return static_cast<int16_t>(low);
}

}  // namespace

MXQ_EXPORT int mxq_quant_tables(const ScaleFormat* f, int dtype, QuantTables* t) {
  if (f == nullptr || t == nullptr || dtype < F32 || dtype > F16) return BAD_ARGUMENT;
  FloatControl control;
  for (int code = 0; code < 256; code++) {
    const float effective = effective_value(*f, code);
    t->value[code] = scale_value(*f, code);
    t->effective[code] = effective;
    t->reciprocal[code] = 1.0f / effective;
    for (int k = 0; k < 8; k++) {
      int32_t limit = kNever;
      // A scale of zero (or none at all) loses the block.
      if (effective > 0) limit = k < 7 ? last_at_most(kMidpoint[k], k % 2 == 1, effective) : last_at_most(6.0f, false, effective);
      t->limit32[code][k] = limit;
      t->limit16[code][k] = dtype == F32 ? 0x7FFF : limit_in_16_bits(limit, dtype);
    }
  }
  return OK;
}

MXQ_EXPORT int mxq_decode_table(const ScaleFormat* f, int dtype, DecodeTable* t) {
  if (f == nullptr || t == nullptr || dtype < F32 || dtype > F16) return BAD_ARGUMENT;
  FloatControl control;
  for (int code = 0; code < 256; code++) {
    const float effective = effective_value(*f, code);
    for (int e = 0; e < 16; e++) {
      const float magnitude = E2M1[e & 7] * effective, value = e < 8 ? magnitude : -magnitude;
      const uint16_t word = dtype == F16 ? to_f16(value) : to_bf16(value);
      t->words32[code][e] = bits_of(value);
      t->words16[code][e] = word;
      t->low[code][e] = static_cast<uint8_t>(word);
      t->high[code][e] = static_cast<uint8_t>(word >> 8);
    }
  }
  return OK;
}

MXQ_EXPORT int mxq_scale_values(const ScaleFormat* f, float* values) {
  if (f == nullptr || values == nullptr) return BAD_ARGUMENT;
  FloatControl control;
  for (int code = 0; code < 256; code++) values[code] = effective_value(*f, code);
  return OK;
}

}  // namespace mxq
