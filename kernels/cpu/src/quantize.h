// Quantizing bands of block rows: maxima, scales, elements, statistics, a stretch of columns at a time.
#pragma once
#include "mxq.h"
#include "numbers.h"
#include "parallel.h"
#include "scales.h"
#include "search.h"

namespace mxq {
namespace {

constexpr int kStretch = 2048;  // columns handled at once; blocks do not straddle it

template <class W>
struct Folding {
  // Maxima of granules of G magnitudes; a node of depth d folds two of depth d - 1.
#ifdef MXQ_HAS_FOLD
  static constexpr int kResults = Fold::BYTES / sizeof(W);
  template <int G>
  struct Tree {
    static constexpr int kVectors = G * static_cast<int>(sizeof(W)) / Fold::BYTES;  // to a granule, if more than 1
    static constexpr int kWide = kVectors > 1 ? kVectors : 1;
    static constexpr int kLanes = G * static_cast<int>(sizeof(W)) / 16 / kWide;
    static constexpr int kLaneSteps = kLanes >= 4 ? 2 : kLanes >= 2 ? 1 : 0;
    static constexpr int kDepth = kLaneSteps + (sizeof(W) == 2 ? 3 : 2);
    template <int D>
    static typename Fold::V node(const W* x) {
      if constexpr (D == 0) {
        auto v = Fold::magnitudes(x);
        for (int i = 1; i < kWide; i++) v = Fold::template max<W>(v, Fold::magnitudes(x + i * kResults));
        return v;
      } else {
        const auto a = node<D - 1>(x), b = node<D - 1>(x + (kResults * kWide << (D - 1)));
        if constexpr (D <= kLaneSteps) {
          return Fold::template lanes<W>(a, b);
        } else if constexpr (D == kLaneSteps + 1) {
          return Fold::template quads<W>(a, b);
        } else if constexpr (D == kLaneSteps + 2) {
          return Fold::template doubles<W>(a, b);
        } else {
          return Fold::words(a, b);
        }
      }
    }
    // Which place of the tree's result each granule lands in: found by folding numbered granules.
    struct Order {
      W place[kResults];
      Order() {
        W numbered[kResults * G], result[kResults], same[kResults];
        for (int i = 0; i < kResults * G; i++) numbered[i] = static_cast<W>(i / G);
        for (int i = 0; i < kResults; i++) same[i] = static_cast<W>(i);
        Fold::store(result, node<kDepth>(numbered), same);
        for (int i = 0; i < kResults; i++) place[result[i]] = static_cast<W>(i);
      }
    };
    static void run(const W* x, int n, W* out) {
      static const Order order;
      int i = 0;
      for (; i + kResults * G <= n; i += kResults * G) Fold::store(out + i / G, node<kDepth>(x + i), order.place);
      if (i == n) return;
      W rest[kResults * G] = {}, maxima[kResults];
      std::memcpy(rest, x + i, (n - i) * sizeof(W));
      Fold::store(maxima, node<kDepth>(rest), order.place);
      std::memcpy(out + i / G, maxima, (n - i) / G * sizeof(W));
    }
  };
#else
  template <int G>
  struct Tree {
    static void run(const W* x, int n, W* out) {
      for (int i = 0; i < n; i += G) {
        W m = 0;
        for (int j = 0; j < G; j++) {
          const W v = x[i + j] & (static_cast<W>(~W(0)) >> 1);
          m = v > m ? v : m;
        }
        out[i / G] = m;
      }
    }
  };
#endif
};

// What one stretch of a band needs: rows of whole blocks, and room for results.
template <class W>
class Band {
 public:
  explicit Band(QuantJob* job)
      : job_(*job),
        shift_(__builtin_ctz(static_cast<unsigned>(job->block_columns))),
        padded_(int64_t{job->block_rows} * kStretch * sizeof(W)),
        transposed_(search_rule() ? int64_t{job->block_rows} * job->block_columns * F::N * 8 : 0) {}

  bool ready() const { return padded_.as<char>() != nullptr && transposed_.as<char>() != nullptr; }

  // False if something is not finite.
  bool run(int64_t band) {
    const int64_t first = band * job_.block_rows;
    const int64_t rows = job_.rows - first < job_.block_rows ? job_.rows - first : job_.block_rows;
    for (int64_t column = 0; column < job_.columns; column += kStretch)
      if (!stretch(band, first, static_cast<int>(rows), column)) return false;
    return true;
  }

 private:
  bool search_rule() const { return job_.rule == SEARCH || job_.rule == FOUR_OVER_SIX || job_.rule == P2_SEARCH; }

  F::V load(const W* p) const {
    if constexpr (sizeof(W) == 4) return F::load(reinterpret_cast<const float*>(p));
    else return job_.dtype == BF16 ? F::from_bf16(p) : F::from_f16(p);
  }

  // Row `row` of the band from `column` on: in place where it is whole, else a copy with zeros after it.
  const W* row_at(int64_t first, int row, int64_t column, int n, int padded) const {
    const W* x = static_cast<const W*>(job_.x) + (first + row) * job_.stride + column;
    if (n == padded) return x;
    W* copy = padded_.as<W>() + int64_t{row} * kStretch;
    std::memcpy(copy, x, n * sizeof(W));
    std::memset(copy + n, 0, (padded - n) * sizeof(W));
    return copy;
  }

  bool stretch(int64_t band, int64_t first, int rows, int64_t column) {
    const int n = static_cast<int>(job_.columns - column < kStretch ? job_.columns - column : kStretch);
    const int unit = job_.block_columns > 64 ? job_.block_columns : 64;
    const int padded = (n + unit - 1) / unit * unit;
    const int count = padded >> shift_, real = (n + job_.block_columns - 1) >> shift_;
    float amax[256];
    uint8_t codes[256], four[256] = {};
    if (!maxima(first, rows, column, n, padded, count, amax)) return false;
    scales_from_amax(job_, amax, count, codes, four);
    if (search_rule()) search(first, rows, column, n, padded, count, amax, four, codes);
    lift_zero_scales(job_, amax, count, codes);
    const int64_t columns = (job_.columns + job_.block_columns - 1) >> shift_;
    std::memcpy(job_.scale + band * columns + (column >> shift_), codes, real);
    for (int row = 0; row < rows; row++) {
      const W* x = row_at(first, row, column, n, padded);
      uint8_t* out = job_.packed + (first + row) * ((job_.columns + 1) / 2) + column / 2;
      uint8_t bytes[kStretch / 2];
      uint8_t* target = n == padded ? out : bytes;
      if (job_.stochastic) stochastic(x, padded, codes, first + row, column, target);
      else encode(x, padded, codes, shift_, *job_.tables, target);
      if (job_.with_stats) element_stats(x, padded, codes, target);
      if (n != padded) std::memcpy(out, bytes, (n + 1) / 2);
    }
    if (job_.with_stats) scale_stats(amax, real, codes);
    return true;
  }

  bool maxima(int64_t first, int rows, int64_t column, int n, int padded, int count, float* amax) {
    W granules[kStretch / 8], total[kStretch / 8] = {};
    const int granule = shift_ == 3 ? 8 : 16, number = padded / granule;
    for (int row = 0; row < rows; row++) {
      const W* x = row_at(first, row, column, n, padded);
      W* out = row == 0 ? total : granules;
      if (granule == 8) Folding<W>::template Tree<8>::run(x, padded, out);
      else Folding<W>::template Tree<16>::run(x, padded, out);
      if (row > 0)
        for (int i = 0; i < number; i++) total[i] = granules[i] > total[i] ? granules[i] : total[i];
    }
    for (int per = job_.block_columns / granule; per > 1; per /= 2)
      for (int i = 0; i < count * per / 2; i++) total[i] = total[2 * i] > total[2 * i + 1] ? total[2 * i] : total[2 * i + 1];
    const W infinite = sizeof(W) == 4 ? static_cast<W>(0x7F800000) : job_.dtype == BF16 ? 0x7F80 : 0x7C00;
    W largest = 0;
    for (int i = 0; i < count; i++) largest = total[i] > largest ? total[i] : largest;
    if (largest >= infinite) return false;
    for (int i = 0; i < count; i++) {
      if constexpr (sizeof(W) == 4) amax[i] = float_of(total[i]);
      else amax[i] = job_.dtype == BF16 ? from_bf16(total[i]) : from_f16(total[i]);
    }
    return true;
  }

  void search(int64_t first, int rows, int64_t column, int n, int padded, int count, const float* amax,
              const uint8_t* four, uint8_t* codes) {
    const int width = job_.block_columns, size = job_.block_rows * width;
    float* x = transposed_.as<float>();
    for (int block = 0; block < count; block += F::N) {
      const int lanes = count - block < F::N ? count - block : F::N;
      for (int row = 0; row < rows; row++) {
        const W* from = row_at(first, row, column, n, padded) + int64_t{block} * width;
        gather(from, lanes, x + int64_t{row} * width * F::N);
      }
      for (int64_t i = int64_t{rows} * width * F::N; i < int64_t{size} * F::N; i++) x[i] = 0;
      float most[F::N], start[F::N], other[F::N];
      for (int i = 0; i < F::N; i++) {
        const int b = block + (i < lanes ? i : 0);
        most[i] = amax[b], start[i] = codes[b], other[i] = four[b];
      }
      const F::V answer = search_group(job_, x, size, F::load(most), F::load(start), F::load(other), x + int64_t{size} * F::N);
      F::store(start, answer);
      for (int i = 0; i < lanes; i++) codes[block + i] = static_cast<uint8_t>(start[i]);
    }
  }

  // One row of F::N neighbouring blocks, turned so that each block is a lane; lanes to spare repeat the first.
  void gather(const W* x, int lanes, float* out) const {
    const int width = job_.block_columns;
    if (width % F::N == 0) {
      for (int i = 0; i < width; i += F::N) {
        F::V v[F::N];
        for (int lane = 0; lane < F::N; lane++) v[lane] = F::abs(load(x + (lane < lanes ? lane : 0) * width + i));
        F::transpose(v);
        for (int j = 0; j < F::N; j++) F::store(out + (i + j) * F::N, v[j]);
      }
      return;
    }
    float block[16];
    for (int lane = 0; lane < F::N; lane += F::N / width) {  // vectors hold several blocks
      for (int part = 0; part < F::N / width; part++) {
        const int from = lane + part < lanes ? lane + part : 0;
        for (int i = 0; i < width; i++) block[i] = magnitude(x[from * width + i]);
        for (int i = 0; i < width; i++) out[i * F::N + lane + part] = block[i];
      }
    }
  }

  float magnitude(W x) const {
    constexpr W mask = static_cast<W>(~W(0)) >> 1;
    if constexpr (sizeof(W) == 4) return float_of(x & mask);
    else return job_.dtype == BF16 ? from_bf16(x & mask) : from_f16(x & mask);
  }

  void stochastic(const W* x, int n, const uint8_t* codes, int64_t row, int64_t column, uint8_t* out) const {
    const uint64_t start = static_cast<uint64_t>((job_.first_row + row) * job_.columns + column);
    const auto low0 = static_cast<uint32_t>(start), high0 = static_cast<uint32_t>(start >> 32);
    const auto key_low = static_cast<uint32_t>(job_.key), key_high = static_cast<uint32_t>(job_.key >> 32);
    float scale[kStretch], m[kStretch];
    uint8_t code[kStretch];
    for (int i = 0; i < n >> shift_; i++) {
      const float s = job_.tables->effective[codes[i]];
      for (int j = 0; j < job_.block_columns; j++) scale[(i << shift_) + j] = s > 0 ? s : INFINITY;
    }
    for (int i = 0; i < n; i++) m[i] = magnitude(x[i]);
    for (int i = 0; i < n; i++) {
      const uint32_t low = low0 + static_cast<uint32_t>(i), high = high0 + (low < low0);
      const auto bits = mix(mix(low ^ key_low) + (key_high ^ high * 0x9E3779B9u)) >> 8;
      float q = m[i] / scale[i];
      q = q < 6.0f ? q : 6.0f;
      int exponent = static_cast<int>(bits_of(q) >> 23) - 127;
      exponent = exponent > 0 ? exponent : 0;
      const float steps = q * float_of(static_cast<uint32_t>(128 - exponent) << 23), whole = std::floor(steps);
      const bool up = static_cast<float>(static_cast<int32_t>(bits)) < (steps - whole) * 0x1p24f;
      code[i] = static_cast<uint8_t>(exponent * 2 + static_cast<int>(whole) + up);
    }
    for (int i = 0; i < n; i++) code[i] = static_cast<uint8_t>(code[i] | (x[i] >> (8 * sizeof(W) - 4) & 8));
    for (int i = 0; i < n / 2; i++) out[i] = static_cast<uint8_t>(code[2 * i] | code[2 * i + 1] << 4);
  }

  static uint32_t mix(uint32_t x) {
    x = (x ^ x >> 16) * 0x21F0AAADu;
    x = (x ^ x >> 15) * 0xD35A2D97u;
    return x ^ x >> 15;
  }

  // Zeros after the end of a row add nothing to any of these sums.
  void element_stats(const W* x, int n, const uint8_t* codes, const uint8_t* packed) {
    F::V error = F::set1(0), signal = F::set1(0);
    int saturated = 0;
    for (int i = 0; i < n; i += F::N) {
      F::V scale, limit;
      if (F::N <= job_.block_columns) {
        const uint8_t code = codes[i >> shift_];
        scale = F::set1(job_.tables->effective[code]);
        limit = F::set1(float_of(static_cast<uint32_t>(job_.tables->limit32[code][7])));
      } else {
        float s[F::N], l[F::N];
        for (int j = 0; j < F::N; j++) {
          const uint8_t code = codes[(i + j) >> shift_];
          s[j] = job_.tables->effective[code];
          l[j] = float_of(static_cast<uint32_t>(job_.tables->limit32[code][7]));
        }
        scale = F::load(s), limit = F::load(l);
      }
      const F::V v = load(x + i), e = F::sub(F::mul(F::elements(packed + i / 2), scale), v);
      error = F::fma(e, e, error);
      signal = F::fma(v, v, signal);
      saturated += F::count_greater(F::abs(v), limit);
    }
    // Squares of what is very small or very large leave the range of fp32.
    const float total = F::sum(signal), lost = F::sum(error);
    if (total > 0x1p-80f && total < 0x1p120f && lost < 0x1p120f) {
      job_.error += lost;
      job_.signal += total;
    } else {
      element_stats_in_double(x, n, codes, packed);
    }
    job_.saturated += saturated;
  }

  void element_stats_in_double(const W* x, int n, const uint8_t* codes, const uint8_t* packed) {
    static constexpr double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    for (int i = 0; i < n; i++) {
      const double v = magnitude(x[i]), scale = job_.tables->effective[codes[i >> shift_]];
      const double e = values[(packed[i / 2] >> (i % 2 * 4)) & 7] * scale - v;
      job_.error += e * e;
      job_.signal += v * v;
    }
  }

  void scale_stats(const float* amax, int n, const uint8_t* codes) {
    if (job_.format.mantissa_bits == 0) return;  // powers of two are never zero and lose no bits
    const int first_normal = 1 << job_.format.mantissa_bits;
    for (int i = 0; i < n; i++) {
      job_.zero_scales += amax[i] > 0 && codes[i] == 0;
      job_.subnormal_scales += amax[i] > 0 && codes[i] > 0 && codes[i] < first_normal;
    }
  }

  QuantJob& job_;
  int shift_;
  Scratch padded_, transposed_;
};

template <class W>
int quantize_bands(QuantJob* job, int64_t first, int64_t last) {
  Band<W> band(job);
  if (!band.ready()) return NO_MEMORY;
  for (int64_t i = first; i < last; i++)
    if (!band.run(i)) {
      job->bad_row = i * job->block_rows;
      return NOT_FINITE;
    }
  return OK;
}

int quantize_part(QuantJob* job, int64_t first, int64_t last) {
  return job->dtype == F32 ? quantize_bands<uint32_t>(job, first, last) : quantize_bands<uint16_t>(job, first, last);
}

}  // namespace
}  // namespace mxq
