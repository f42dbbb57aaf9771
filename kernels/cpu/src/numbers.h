// Bits and numbers. Everything is `static inline` so that each instruction level has its own copy.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace mxq {

static inline uint32_t bits_of(float x) {
  uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}

static inline float float_of(uint32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}

// To nearest, ties to even; every NaN becomes the quiet one.
static inline uint16_t to_bf16(float x) {
  const uint32_t b = bits_of(x);
  if ((b & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FC0;
  return static_cast<uint16_t>((b + 0x7FFFu + ((b >> 16) & 1)) >> 16);
}

static inline float from_bf16(uint16_t b) { return float_of(static_cast<uint32_t>(b) << 16); }

static inline float from_f16(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, magnitude = h & 0x7FFFu;
  if (magnitude >= 0x7C00u) return float_of(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
  // The exponent is moved by a multiplication, which makes subnormals right by itself.
  const float x = float_of(magnitude << 13) * 0x1p112f;
  return float_of(bits_of(x) | sign);
}

// To nearest, ties to even.
static inline uint16_t to_f16(float x) {
  const uint32_t b = bits_of(x), sign = b >> 16 & 0x8000u, magnitude = b & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7E00;
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves exactly the bits of the result
    const float y = float_of(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of(y) - 0x3F000000u));
  }
  return static_cast<uint16_t>(sign | (magnitude - 0x38000000u + 0xFFFu + (magnitude >> 13 & 1)) >> 13);
}

constexpr float E2M1[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

}  // namespace mxq
