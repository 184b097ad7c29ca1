// What becomes of a linear layer's numbers one by one: activations, how much each grows with its number, and dropout.
#pragma once

#include "work.h"

namespace CH_NS {

// The share of the normal distribution below x, and its density there.
//
// Below -z lies exp(-z*z/2) t P(t) with t = 1 / (1 + 0.27 z): the form of Abramowitz and Stegun 7.1.26, P fitted to the
// least maximal relative error for z up to 14, 2.4e-8. Far below 0 digits are kept that 1 + erf(x / sqrt(2)) loses.
CH_INLINE void normal_of(vf x, vf& below, vf& density) {
  const vf bell = exp2_of<5>(x * x * all(-0.5f * LOG2E));
  const vf t = all(1.0f) / (all(1.0f) + all(0.27f) * absolute(x));
  vf p = all(2.891536685e-02f);
  p = p * t + all(-1.262556515e-01f);
  p = p * t + all(1.692920788e-01f);
  p = p * t + all(-6.862161143e-02f);
  p = p * t + all(1.07399781e-01f);
  p = p * t + all(7.2240176e-02f);
  p = p * t + all(1.017591864e-01f);
  p = p * t + all(1.075505045e-01f);
  p = p * t + all(1.077201811e-01f);
  const vf tail = bell * t * p;
  below = x < (vf){} ? tail : all(1.0f) - tail;
  density = bell * all(0.3989422804014327f);
}

// 1 / (1 + exp(-x)), exactly 0 far below, where not every set's power would be.
CH_INLINE vf sigmoid_of(vf x) {
  const vf found = all(1.0f) / (all(1.0f) + exp2_of<5>(x * all(-LOG2E)));
  return x < all(-87.0f) ? (vf){} : found;
}

// x becomes its activation, and `slope` how much that grows with x.
CH_INLINE vf activation_of(int32_t kind, vf x, vf& slope) {
  if (kind == CH_GELU) {
    vf below, density;
    normal_of(x, below, density);
    slope = below + x * density;
    return x * below;
  }
  if (kind == CH_GELU_TANH) {
    // 1/2 (1 + tanh(u)) = sigmoid(2u)
    const vf twice = all(1.5957691216057308f), cubic = all(0.044715f), square = x * x;
    const vf open = sigmoid_of(twice * x * (all(1.0f) + cubic * square));
    slope = open + x * open * (all(1.0f) - open) * twice * (all(1.0f) + all(3.0f) * cubic * square);
    return x * open;
  }
  if (kind == CH_SILU) {
    const vf open = sigmoid_of(x);
    slope = open + x * open * (all(1.0f) - open);
    return x * open;
  }
  if (kind == CH_RELU) {
    slope = x > (vf){} ? all(1.0f) : (vf){};
    return x < (vf){} ? (vf){} : x;  // NaN stays
  }
  slope = all(1.0f);
  return x;
}

// Which numbers of a row dropout keeps: 16 random bits for each, of Philox4x32-10 under the seed, a function of the
// place alone. Columns [128 g, 128 g + 128) share the counters 16 g to 16 g + 15: column 128 g + 16 i + l is half
// i % 2 of word i / 2 of counter 16 g + l, so that neighbours are lanes of a vector, whatever its width is.
constexpr int64_t PLACES = 128;
constexpr uint32_t OF_ACTIVATIONS = 0xffffffffu;  // where the counters of attention's weights have a batch entry

// Hands out a vector of 0 or -1 for each VL columns of a group: `take(column within the group, kept)`.
template <class Take>
CH_INLINE void kept_places(uint64_t seed, int32_t dropped, uint32_t row, uint64_t group, const Take& take) {
  vu lanes;
  for (int i = 0; i < VL; i++) lanes[i] = (uint32_t)i;
  const uint64_t first = group * 16;
  const vi least_kept = (vi)((uint32_t)dropped - (vu){});
#pragma GCC unroll 4
  for (int part = 0; part < 16; part += VL) {
    // 16 counters from a multiple of 16: the lower word does not run over.
    vu words[4] = {lanes + (uint32_t)(first + (uint64_t)part), row + (vu){}, (uint32_t)(first >> 32) + (vu){},
                   OF_ACTIVATIONS + (vu){}};
    philox(words, (uint32_t)seed, (uint32_t)(seed >> 32));
#pragma GCC unroll 4
    for (int w = 0; w < 4; w++) {
      take(32 * w + part, (vi)(words[w] & 0xffffu) >= least_kept);
      take(32 * w + 16 + part, (vi)(words[w] >> 16) >= least_kept);
    }
  }
}

// A bit for each lane of a vector of 0 or -1, and back.
CH_INLINE uint32_t bits_of(vi kept) {
#if defined(CH_AVX512)
  return _mm512_movepi32_mask((__m512i)kept);
#elif defined(CH_AVX2)
  return (uint32_t)_mm256_movemask_ps((__m256)kept);
#else
  uint32_t bits = 0;
  for (int i = 0; i < VL; i++) bits |= (uint32_t)(kept[i] & 1) << i;
  return bits;
#endif
}

CH_INLINE vf where_bits(uint32_t bits, vf v) {
#if defined(CH_AVX512)
  return (vf)_mm512_mask_mov_ps((__m512)(vf){}, (__mmask16)bits, (__m512)v);
#else
  vi lane;
  for (int i = 0; i < VL; i++) lane[i] = 1 << i;
  return (vf)((vi)v & ((((int32_t)bits + (vi){}) & lane) == lane));
#endif
}

CH_INLINE float dropout_factor(int32_t dropped) { return (float)CH_LEVELS / (float)(CH_LEVELS - dropped); }

// output = what is kept of input, times the factor, + added.
template <class IO> class Dropping {
  typedef typename IO::type type;
  // Columns that a thread takes at a time, or so many rows that they have as many.
  static constexpr int64_t STRETCH = 128 * PLACES;

 public:
  explicit Dropping(const ch_dropout& work) : w(work) {}

  int run() const {
    const int64_t across = (w.columns + STRETCH - 1) / STRETCH, down = most((int64_t)1, STRETCH / w.columns);
    parallel(threads_for(w, 16.0 * (double)w.rows * (double)w.columns), (w.rows + down - 1) / down * across, [&](int64_t u) {
      const int64_t from = u % across * STRETCH, to = least(w.columns, from + STRETCH);
      for (int64_t row = u / across * down; row < least(w.rows, (u / across + 1) * down); row++)
        for (int64_t column = from; column < to; column += PLACES) {
          if (to - column >= PLACES) group(row, column);
          else last_group(row, column, to - column);
        }
    });
    clearhead::trim_scratch();
    return CH_OK;
  }

 private:
  const ch_dropout& w;

  CH_INLINE void group(int64_t row, int64_t column) const {
    const int64_t at = row * w.columns + column;
    const type* added = w.added == nullptr ? nullptr : (const type*)w.added + at;
    drop(row, column, (const type*)w.input + at, added, (type*)w.output + at);
  }

  CH_INLINE void drop(int64_t row, int64_t column, const type* input, const type* added, type* output) const {
    if (w.dropped == 0) return keep_all(input, added, output);
    const vf factor = all(dropout_factor(w.dropped));
    const uint64_t of = (uint64_t)(column / PLACES);
    kept_places(w.seed, w.dropped, (uint32_t)row, of, [&](int place, vi kept) CH_INLINED {
      vf number = (vf)((vi)(get_vector<IO>(input + place) * factor) & kept);
      if (added != nullptr) number += get_vector<IO>(added + place);
      put_vector<IO>(output + place, number);
    });
  }

  CH_INLINE void keep_all(const type* input, const type* added, type* output) const {
    for (int place = 0; place < PLACES; place += VL) {
      vf number = get_vector<IO>(input + place);
      if (added != nullptr) number += get_vector<IO>(added + place);
      put_vector<IO>(output + place, number);
    }
  }

  void last_group(int64_t row, int64_t column, int64_t count) const {
    const int64_t at = row * w.columns + column;
    const size_t bytes = (size_t)count * sizeof(type);
    type input[PLACES] = {}, added[PLACES] = {}, output[PLACES];
    memcpy(input, (const type*)w.input + at, bytes);
    if (w.added != nullptr) memcpy(added, (const type*)w.added + at, bytes);
    drop(row, column, input, w.added == nullptr ? nullptr : added, output);
    memcpy((type*)w.output + at, output, bytes);
  }
};

}  // namespace CH_NS
