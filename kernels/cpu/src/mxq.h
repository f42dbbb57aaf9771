// The C interface of the library and the structures that cross it. Mirrored by kernels/cpu/library.py.
//
// Every function returns a status: 0, or one of the codes below. Nothing here keeps state between
// calls but the chosen instruction level.
#pragma once
#include <cstdint>

namespace mxq {

enum Status : int { OK = 0, BAD_ARGUMENT = 1, NOT_FINITE = 2, NO_MEMORY = 3, NO_SUCH_LEVEL = 4 };
enum Level : int { PORTABLE = 0, AVX2 = 1, AVX512 = 2, LEVELS = 3 };
enum Dtype : int { F32 = 0, BF16 = 1, F16 = 2 };
// The first five are for scales with a mantissa, the others for powers of two.
enum Rule : int { ABSMAX = 0, NONZERO = 1, CEIL = 2, FOUR_OVER_SIX = 3, SEARCH = 4, CARRY = 5, RCEIL = 6, P2_SEARCH = 7 };

// An 8-bit unsigned scale format and the global scale that its values are divided by (0: none).
struct ScaleFormat {
  int32_t mantissa_bits;  // 0: a power of two
  int32_t bias;
  int32_t max_code;
  float global_scale;
};

// What quantizing needs to know about each scale code, for one format, global scale and input dtype.
// A magnitude x (its bits as an integer) has element code >= k exactly if x > limit[code][k - 1]; the
// eighth limit is the one above which elements saturate.
struct QuantTables {
  int16_t limit16[256][8];  // in the bits of the input, for 16-bit inputs
  int32_t limit32[256][8];  // in the bits of fp32
  float effective[256];     // value / global scale
  float reciprocal[256];
  float value[256];
};

struct QuantJob {
  const void* x;
  int64_t rows, columns, stride;  // stride: elements from one row to the next
  int32_t dtype, block_rows, block_columns;
  int32_t rule, carry, largest;  // carry and largest code: for powers of two
  ScaleFormat format;
  const QuantTables* tables;
  int32_t stochastic, with_stats, threads;
  int32_t tries;  // of the searches: how many codes, and where they are from the first
  float offsets[16];
  uint64_t key;
  int64_t first_row;  // of x in the whole weight: random bits are counted from there
  uint8_t* packed;    // [rows, (columns + 1) / 2]
  uint8_t* scale;     // [row blocks, column blocks]
  // Results.
  int64_t bad_row;  // first row with something that is not finite, or -1
  int64_t zero_scales, subnormal_scales, saturated;
  double error, signal;
};

// Every element code times every scale, rounded to the output's dtype.
struct DecodeTable {
  uint32_t words32[256][16];
  uint16_t words16[256][16];
  uint8_t low[256][16], high[256][16];  // the bytes of words16
};

struct DequantJob {
  const uint8_t* packed;
  const uint8_t* scale;
  int64_t rows, columns;
  int32_t dtype, bits, block_rows, block_columns;
  ScaleFormat format;
  const DecodeTable* table;  // fp4
  const float* elements;     // fp6 and fp8: value of every code
  void* out;                 // [rows, columns]
  int32_t threads, reserved;
};

struct LinearWeight {
  const uint8_t* packed;
  const uint8_t* scale;
  const DecodeTable* table;   // without the global scale, which the result is divided by
  const void* bias;           // [n] or null
  const float* global_scale;  // one number or null
  int64_t n, k;
  int32_t bias_dtype, block_rows, block_columns, reserved;
  ScaleFormat format;  // its global scale is not looked at
};

// A weight and the activations it is multiplied with.
struct LinearJob : LinearWeight {
  const void* x;  // [m, k], dense
  void* y;        // [m, n]
  int64_t m;
  int32_t dtype, threads;
};

// Entry points of one instruction level; each works on a part of a job.
struct Kernels {
  // Bands of block rows [first, last); results are added to `job`, which is the caller's own copy.
  int (*quantize)(QuantJob* job, int64_t first, int64_t last);
  int (*dequantize)(const DequantJob* job, int64_t first_row, int64_t last_row);
  int (*linear)(const LinearJob* job);
  double (*multiply)(int dtype, int64_t rounds);  // see mxq_multiply
};
const Kernels& portable_kernels();
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();

}  // namespace mxq

#define MXQ_EXPORT extern "C" __attribute__((visibility("default")))
