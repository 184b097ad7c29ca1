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
  if (kind == CH_SILU || kind == CH_QUICK_GELU) {
    const vf steep = all(kind == CH_SILU ? 1.0f : 1.702f), open = sigmoid_of(steep * x);
    slope = open + steep * x * open * (all(1.0f) - open);
    return x * open;
  }
  if (kind == CH_RELU) {
    slope = x > (vf){} ? all(1.0f) : (vf){};
    return x < (vf){} ? (vf){} : x;  // NaN stays
  }
  slope = all(1.0f);
  return x;
}

// A row of activations may have more groups than a word counts counters of.
CH_INLINE Draw draw_of(uint64_t seed, int32_t dropped, int64_t row, int64_t group) {
  return Draw{seed, dropped, (uint32_t)row, (uint32_t)((uint64_t)group >> 28), OF_ACTIVATIONS};
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
    const int64_t of = column / PLACES;
    auto put = [&](int place, Lanes kept) CH_INLINED {
      vf number = only(kept, get_vector<IO>(input + place) * factor);
      if (added != nullptr) number += get_vector<IO>(added + place);
      put_vector<IO>(output + place, number);
    };
    kept_places(draw_of(w.seed, w.dropped, row, of), (uint32_t)of, [&](int place, Lanes kept, Lanes next) CH_INLINED {
      put(place, kept);
      put(place + VL, next);
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
