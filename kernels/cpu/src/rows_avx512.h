// bf16 activations, few rows of them. W is never in memory unpacked: 256 weights at a time are looked up
// as plain elements, multiplied with up to eight rows of x, and only the sums over 16 weights (8 where
// blocks are that short) meet their scale. A table of elements fits a register, which makes this cheaper
// than looking up scaled weights; more rows of x take several turns.
//
// Each lane of a vector owns 16 neighbouring weights. Of group g, weight 128 b + 16 i + 8 h + 4 e + j
// (h, e, b < 2) is in lane 2 i + b, word e of it, in vector 4 h + j. x is packed in that order once.
#pragma once
#include "linear.h"

namespace mxq {
namespace {

constexpr int kTurn = 5, kGroup = 256, kColumns = 16, kMostDirect = 24;

// The packed bytes of a group with the weights 16 n to 16 n + 7 (first) and those after them (second).
struct Group {
  __m512i half[2];
  explicit Group(const uint8_t* p) {
    half[0] = _mm512_mask_loadu_epi32(_mm512_loadu_si512(p), 0xAAAA, p + 60);
    half[1] = _mm512_mask_loadu_epi32(_mm512_loadu_si512(p + 64), 0x5555, p + 4);
  }
  // At the end of a row: `bytes` of them, then zeros.
  Group(const uint8_t* p, int64_t bytes) {
    const int64_t low = bytes < 64 ? bytes : 64, high = bytes - low;
    const __m512i a = _mm512_maskz_loadu_epi8(~__mmask64{0} >> (64 - low), p);
    const __m512i b = high == 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi8(~__mmask64{0} >> (64 - high), p + 64);
    half[0] = _mm512_mask_mov_epi32(a, 0xAAAA, _mm512_slli_epi64(b, 32));
    half[1] = _mm512_mask_mov_epi32(b, 0x5555, _mm512_srli_epi64(a, 32));
  }
};

// Byte 3 of each lane: which of a group's scale codes belongs to the lane, for blocks of 2^shift.
struct Picks {
  uint8_t bytes[11][2][64] = {};
  constexpr Picks() {
    for (int shift = 3; shift <= 10; shift++)
      for (int h = 0; h < 2; h++)
        for (int lane = 0; lane < 16; lane++)
          bytes[shift][h][4 * lane + 3] = static_cast<uint8_t>((128 * (lane % 2) + 16 * (lane / 2) + 8 * h) >> shift);
  }
};
constexpr Picks kPicks;

// From the scale codes of a group to a factor for each lane.
class Factors {
 public:
  explicit Factors(const LinearJob& job) : shift_(__builtin_ctz(static_cast<unsigned>(job.block_columns))) {
    const ScaleFormat& f = job.format;
    for (int h = 0; h < 2; h++) pick_[h] = _mm512_loadu_si512(kPicks.bytes[shift_][h]);
    // A code is an fp32 number whose exponent lacks a constant. Subnormal codes are subnormal numbers.
    align_ = _mm512_set1_epi32(f.mantissa_bits == 0 ? 1 : 4);
    smallest_ = _mm512_set1_epi32(f.mantissa_bits == 0 ? 0x00400000 : 0);
    power_ = _mm512_set1_ps(float_of(static_cast<uint32_t>(254 - f.bias) << 23));
    last_ = _mm256_set1_epi8(static_cast<char>(f.mantissa_bits == 3 && f.bias == 15 ? 254 : f.max_code));
  }

  int shift() const { return shift_; }
  // The codes of the first `weights` of a group, as a mask.
  __mmask32 codes(int64_t weights) const { return ~__mmask32{0} >> (31 - ((weights - 1) >> shift_)); }
  bool are_numbers(__m256i codes) const { return _mm256_cmpgt_epu8_mask(codes, last_) == 0; }

  __m512 of(__m256i codes, int h) const {
    const __m512i bits = _mm512_maskz_permutexvar_epi8(0x8888888888888888, pick_[h], _mm512_castsi256_si512(codes));
    return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_max_epu32(_mm512_srlv_epi32(bits, align_), smallest_)), power_);
  }

 private:
  int shift_;
  __m512i pick_[2], align_, smallest_;
  __m512 power_;
  __m256i last_;
};

inline __m512i element_words() {
  const __m256i words = _mm256_setr_epi16(0, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0,  //
                                          -0x8000, -0x4100, -0x4080, -0x4040, -0x4000, -0x3FC0, -0x3F80, -0x3F40);
  return _mm512_broadcast_i64x4(words);  // twice, as look-ups see five bits of a code and its neighbour
}

// Adds a group of two rows of W, times M rows of x, to their sums. SHORT: blocks of 8.
template <int M, bool SHORT>
inline void add_group(const Group* w, const __m256i* codes, const uint16_t* x, const Factors& factors, F::V (*sum)[M]) {
  const __m512i elements = element_words();
  F::V dot[2][M];
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    if (h == 0 || SHORT)
      for (auto& row : dot)
        for (auto& v : row) v = _mm512_setzero_ps();
    for (int j = 0; j < 4; j++) {
      __m512bh weights[2];
      for (int r = 0; r < 2; r++) {
        const __m512i index = j == 0 ? w[r].half[h] : _mm512_srli_epi16(w[r].half[h], 4 * j);
        weights[r] = reinterpret_cast<__m512bh>(_mm512_permutexvar_epi16(index, elements));
      }
      for (int m = 0; m < M; m++) {
        const auto activations = reinterpret_cast<__m512bh>(_mm512_load_si512(x + ((4 * h + j) * M + m) * 32));
        for (int r = 0; r < 2; r++) dot[r][m] = _mm512_dpbf16_ps(dot[r][m], activations, weights[r]);
      }
    }
    if (h == 0 && !SHORT) continue;
    for (int r = 0; r < 2; r++) {
      const F::V scale = factors.of(codes[r], h);
      for (int m = 0; m < M; m++) sum[r][m] = _mm512_fmadd_ps(dot[r][m], scale, sum[r][m]);
    }
  }
}

// Requests for memory that will be needed in a while, a few with each group. They go through it in a
// straight line, which memory likes much better than the two rows side by side of the work itself.
struct Ahead {
  const uint8_t *packed, *scale;
  int64_t scale_step;
  void ask() {
    ask_for(packed), ask_for(packed + 64);
    packed += 128;
  }
  void ask_scales() {
    ask_for(scale);
    scale += scale_step;
  }
};

// Two rows of W.
struct Pair {
  const uint8_t *packed[2], *scale[2];
  Pair(const LinearJob& job, int64_t row, int64_t row_bytes, int64_t blocks) {
    for (int r = 0; r < 2; r++) {
      const int64_t at = row + r < job.n ? row + r : job.n - 1;  // past the end, the last row once more
      packed[r] = job.packed + at * row_bytes;
      scale[r] = job.scale + (job.block_rows == 1 ? at : at / job.block_rows) * blocks;
    }
  }
};

// Adds groups [first, last) of two rows of W, times M rows of packed x, to their sums.
template <int M, bool SHORT>
void add_groups(const LinearJob& job, const Factors& factors, const Pair& rows, const uint16_t* x, int64_t first, int64_t last,
                Ahead& ahead, F::V (*sums)[M]) {
  F::V sum[2][M];
  for (int r = 0; r < 2; r++)
    for (int m = 0; m < M; m++) sum[r][m] = sums[r][m];
  const int64_t whole = job.k / kGroup;
  const __mmask32 all = factors.codes(kGroup);
  const int shift = factors.shift();
  __m256i codes[2], largest[2] = {};
  const auto load_codes = [&](int64_t g, __mmask32 mask) {
    for (int r = 0; r < 2; r++) {
      codes[r] = _mm256_maskz_loadu_epi8(mask, rows.scale[r] + (kGroup * g >> shift));
      largest[r] = _mm256_max_epu8(largest[r], codes[r]);
    }
  };
  for (int64_t g = first; g < (last < whole ? last : whole); g++) {
    ahead.ask();
    load_codes(g, all);
    const Group w[2] = {Group(rows.packed[0] + 128 * g), Group(rows.packed[1] + 128 * g)};
    add_group<M, SHORT>(w, codes, x + g * kGroup * M, factors, sum);
    ahead.ask();
    ahead.ask_scales();
  }
  if (last > whole) {
    const int64_t left = job.k - whole * kGroup, bytes = (left + 1) / 2;
    load_codes(whole, factors.codes(left));
    const Group w[2] = {Group(rows.packed[0] + 128 * whole, bytes), Group(rows.packed[1] + 128 * whole, bytes)};
    add_group<M, SHORT>(w, codes, x + whole * kGroup * M, factors, sum);
  }
  for (int r = 0; r < 2; r++) {
    const bool numbers = factors.are_numbers(largest[r]);  // what a NaN scales is NaN, whatever the activations
    for (int m = 0; m < M; m++) sums[r][m] = numbers ? sum[r][m] : F::set1(NAN);
  }
}

// Columns [first, last) of M rows of the result. `next`: what this thread will probably do then.
template <int M, bool SHORT>
void direct_columns(const LinearJob& job, const uint16_t* x, const Factors& factors, int64_t x_row, int64_t first, int64_t last,
                    int64_t next) {
  constexpr int64_t kChunk = 32 / M;  // groups of x that leave room in the first-level cache
  const int64_t row_bytes = (job.k + 1) / 2, blocks = (job.k + job.block_columns - 1) >> factors.shift();
  const int64_t groups = (job.k + kGroup - 1) / kGroup;
  for (int64_t start = first; start < last; start += kColumns) {
    const int count = static_cast<int>(last - start < kColumns ? last - start : kColumns);
    F::V sums[kColumns][M];
    for (auto& column : sums)
      for (auto& v : column) v = F::set1(0);
    const int64_t then = start + kColumns < last ? start + kColumns : next;
    Ahead ahead{job.packed + then * row_bytes, job.scale + then / job.block_rows * blocks, 2 * kGroup >> factors.shift()};
    for (int64_t g = 0; g < groups; g += kChunk)
      for (int c = 0; c < count; c += 2)
        add_groups<M, SHORT>(job, factors, Pair(job, start + c, row_bytes, blocks), x, g,
                             groups - g < kChunk ? groups : g + kChunk, ahead, sums + c);
    for (int m = 0; m < M; m++) {
      float line[kColumns];
      for (int c = 0; c < count; c += 4) sum4(sums[c][m], sums[c + 1][m], sums[c + 2][m], sums[c + 3][m], line + c);
      finish(job, x_row + m, start, line, count);
    }
  }
}

template <bool SHORT>
void turn(const LinearJob& job, int m, const uint16_t* x, const Factors& f, int64_t x_row, int64_t first, int64_t last, int64_t next) {
  switch (m) {
    case 1: return direct_columns<1, SHORT>(job, x, f, x_row, first, last, next);
    case 2: return direct_columns<2, SHORT>(job, x, f, x_row, first, last, next);
    case 3: return direct_columns<3, SHORT>(job, x, f, x_row, first, last, next);
    case 4: return direct_columns<4, SHORT>(job, x, f, x_row, first, last, next);
    default: return direct_columns<5, SHORT>(job, x, f, x_row, first, last, next);
  }
}

// Where the words of vectors 4 h to 4 h + 3 come from: two stretches of 32, one with b = 0 and one with b = 1.
struct Orders {
  uint16_t words[2][32] = {};
  constexpr Orders() {
    for (int h = 0; h < 2; h++)
      for (int j = 0; j < 4; j++)
        for (int t = 0; t < 8; t++)  // bits of t: i, b, e
          words[h][8 * j + t] = static_cast<uint16_t>(32 * (t / 2 % 2) + 16 * (t / 4) + 8 * h + 4 * (t % 2) + j);
  }
};
constexpr Orders kOrders;

// Rows of x in the order of a group's weights: [group][vector][row][32], with zeros after the end of a row.
inline void pack_rows(const uint16_t* x, int64_t rows, int64_t k, uint16_t* out) {
  const auto load = [&](int64_t m, int64_t i) {
    const int64_t left = k - i;
    if (left >= 32) return _mm512_loadu_si512(x + m * k + i);
    return left <= 0 ? _mm512_setzero_si512() : _mm512_maskz_loadu_epi16(~__mmask32{0} >> (32 - left), x + m * k + i);
  };
  for (int64_t m = 0; m < rows; m++)
    for (int64_t i = 0; i < k; i += kGroup)
      for (int quarter = 0; quarter < 4; quarter++) {
        const __m512i a = load(m, i + 32 * quarter), b = load(m, i + 32 * quarter + 128);
        for (int h = 0; h < 2; h++) {
          uint16_t* to = out + i * rows + (4 * h * rows + m) * 32 + 8 * quarter;
          const __m512i words = _mm512_permutex2var_epi16(a, _mm512_loadu_si512(kOrders.words[h]), b);
          _mm_store_si128(reinterpret_cast<__m128i*>(to), _mm512_castsi512_si128(words));
          _mm_store_si128(reinterpret_cast<__m128i*>(to + rows * 32), _mm512_extracti32x4_epi32(words, 1));
          _mm_store_si128(reinterpret_cast<__m128i*>(to + rows * 64), _mm512_extracti32x4_epi32(words, 2));
          _mm_store_si128(reinterpret_cast<__m128i*>(to + rows * 96), _mm512_extracti32x4_epi32(words, 3));
        }
      }
}

inline int direct(const LinearJob& job) {
  const int64_t turns = (job.m + kTurn - 1) / kTurn, height = (job.m + turns - 1) / turns;
  const int64_t width = (job.k + kGroup - 1) / kGroup * kGroup;
  Scratch memory(turns * height * width * 2);
  auto* x = memory.as<uint16_t>();
  if (x == nullptr) return NO_MEMORY;
  const auto rows_of = [&](int64_t first) { return job.m - first < height ? job.m - first : height; };
  parallel_for(turns, job.m * job.k < (1 << 17) ? 1 : job.threads, [&](int64_t i) {
    const int64_t first = i * height;
    pack_rows(static_cast<const uint16_t*>(job.x) + first * job.k, rows_of(first), job.k, x + first * width);
  });
  const Factors factors(job);
  constexpr int64_t kBytes = 128 << 10;  // of W in one task
  share_columns(job, kBytes / (width / 2) + 1, kColumns, [&](int64_t first, int64_t last, int64_t next) {
    for (int64_t m = 0; m < job.m; m += height) {
      const int rows = static_cast<int>(rows_of(m));
      if (job.block_columns == 8) turn<true>(job, rows, x + m * width, factors, m, first, last, next);
      else turn<false>(job, rows, x + m * width, factors, m, first, last, next);
    }
  });
  return OK;
}

// fp32 activations, few rows: 16 weights are looked up at once.
constexpr int kFewSingles = 4;

template <int M>
void dot_singles(const LinearJob& job, const float* x, int64_t stride, int64_t row) {
  const int shift = __builtin_ctz(static_cast<unsigned>(job.block_columns));
  const int64_t groups = job.k / 16, blocks = (job.k + job.block_columns - 1) >> shift;
  const uint8_t* p = job.packed + row * ((job.k + 1) / 2);
  const uint8_t* s = job.scale + row / job.block_rows * blocks;
  const DecodeTable& t = *job.table;
  constexpr int kUnroll = M == 1 ? 4 : 2;
  F::V sum[kUnroll][M];
  for (auto& u : sum)
    for (auto& v : u) v = F::set1(0);
  const auto add = [&](int u, F::V w, int64_t g) {
    for (int m = 0; m < M; m++) sum[u][m] = F::fma(F::load(x + m * stride + 16 * g), w, sum[u][m]);
  };
  const auto weights = [&](int64_t g) {
    if (shift > 3) return F::lookup(p + 8 * g, t.words32[s[g >> (shift - 4)]]);
    const F::V first = F::lookup(p + 8 * g, t.words32[s[2 * g]]), second = F::lookup(p + 8 * g, t.words32[s[2 * g + 1]]);
    return _mm512_mask_mov_ps(first, 0xFF00, second);
  };
  int64_t g = 0;
  for (; g + kUnroll <= groups; g += kUnroll) {
    _mm_prefetch(reinterpret_cast<const char*>(p + 8 * g + 3072), _MM_HINT_T0);
    for (int u = 0; u < kUnroll; u++) add(u, weights(g + u), g + u);
  }
  for (; g < groups; g++) add(0, weights(g), g);
  if (job.k % 16 != 0) {
    const Tail tail(p + 8 * groups, s, groups, shift, static_cast<int>(job.k % 16));
    float values[16];
    decode_group(tail.bytes, tail.scale, 0, Tail::shift(shift), t, values);
    add(0, F::load(values), groups);
  }
  for (int m = 0; m < M; m++) {
    for (int u = 1; u < kUnroll; u++) sum[0][m] = F::add(sum[0][m], sum[u][m]);
    float total = F::sum(sum[0][m]);
    finish(job, m, row, &total, 1);
  }
}

inline int direct_singles(const LinearJob& job) {
  const int64_t stride = (job.k + 15) / 16 * 16;
  Scratch memory(job.m * stride * 4);
  float* x = memory.as<float>();
  if (x == nullptr) return NO_MEMORY;
  for (int64_t m = 0; m < job.m; m++) {
    Single::load_row(job, m, x + m * stride);
    std::memset(x + m * stride + job.k, 0, (stride - job.k) * 4);
  }
  share_columns(job, (32 << 10) / (stride / 2) + 1, 1, [&](int64_t first, int64_t last, int64_t) {
    for (int64_t row = first; row < last; row++) switch (job.m) {
        case 1: dot_singles<1>(job, x, stride, row); break;
        case 2: dot_singles<2>(job, x, stride, row); break;
        case 3: dot_singles<3>(job, x, stride, row); break;
        default: dot_singles<4>(job, x, stride, row);
      }
  });
  return OK;
}

}  // namespace
}  // namespace mxq
