// Elementwise functions of linear layers: activations, their derivatives, and dropout.
#pragma once

#include "work.h"

namespace CH_NS {

// The cumulative distribution function of the standard normal distribution at x, and its density.
//
// Below -z it is exp(-z*z/2) t P(t) with t = 1 / (1 + 0.27 z): the form of Abramowitz and Stegun 7.1.26, with P fitted
// for minimal maximal relative error, 2.4e-8 for z up to 14. Far below 0 this keeps digits that 1 + erf(x / sqrt(2))
// loses.
CH_INLINE void normal_of(vf x, vf& below, vf& density) {
  const vf bell = exp2_of<5>(x * x * all(-0.5f * LOG2E));
  const vf t = all(1.0f) / fused(all(0.27f), absolute(x), all(1.0f));
  vf p = all(2.891536685e-02f);
  p = fused(p, t, all(-1.262556515e-01f));
  p = fused(p, t, all(1.692920788e-01f));
  p = fused(p, t, all(-6.862161143e-02f));
  p = fused(p, t, all(1.07399781e-01f));
  p = fused(p, t, all(7.2240176e-02f));
  p = fused(p, t, all(1.017591864e-01f));
  p = fused(p, t, all(1.075505045e-01f));
  p = fused(p, t, all(1.077201811e-01f));
  const vf tail = bell * t * p;
  below = x < (vf){} ? tail : all(1.0f) - tail;
  density = bell * all(0.3989422804014327f);
}

// 1 / (1 + exp(-x)). Exactly 0 below -87, where only some sets' exp2_of overflows to inf.
CH_INLINE vf sigmoid_of(vf x) {
  const vf sigmoid = all(1.0f) / (all(1.0f) + exp2_of<5>(x * all(-LOG2E)));
  return x < all(-87.0f) ? (vf){} : sigmoid;
}

// Replaces x by its activation; `slope` is the derivative at x.
CH_INLINE vf activation_of(int32_t kind, vf x, vf& slope) {
  if (kind == CH_GELU) {
    vf below, density;
    normal_of(x, below, density);
    slope = fused(x, density, below);
    return x * below;
  }
  if (kind == CH_GELU_TANH) {
    // 1/2 (1 + tanh(u)) = sigmoid(2u)
    const vf twice = all(1.5957691216057308f), cubic = all(0.044715f), square = x * x;
    const vf open = sigmoid_of(twice * x * fused(cubic, square, all(1.0f)));
    slope = fused(x * open * (all(1.0f) - open) * twice, fused(all(3.0f) * cubic, square, all(1.0f)), open);
    return x * open;
  }
  if (kind == CH_SILU || kind == CH_QUICK_GELU) {
    const vf steep = all(kind == CH_SILU ? 1.0f : 1.702f), open = sigmoid_of(steep * x);
    slope = fused(steep * x * open, all(1.0f) - open, open);
    return x * open;
  }
  if (kind == CH_RELU) {
    slope = x > (vf){} ? all(1.0f) : (vf){};
    return x < (vf){} ? (vf){} : x;  // NaN propagates
  }
  slope = all(1.0f);
  return x;
}

// One counter word covers 2^28 groups of columns; the high bits of the group go into the word of the number's high bits.
template <class Work> CH_INLINE PhiloxRow philox_row(const Work& w, int64_t row, int64_t group) {
  const uint64_t number = (uint64_t)(w.row_numbers == nullptr ? w.first_row + row : w.row_numbers[row]);
  const uint32_t high = (uint32_t)(number >> 32) + (uint32_t)((uint64_t)group >> 28);
  return PhiloxRow{w.seed, w.dropped, (uint32_t)number, high, ACTIVATIONS_WORD};
}

CH_INLINE float dropout_factor(int32_t dropped) { return (float)CH_LEVELS / (float)(CH_LEVELS - dropped); }

// output = dropped(input) * factor + added. With whole groups of columns, masks are drawn and applied at once.
// Otherwise one bit per element is drawn first and applied to the contiguous elements, so narrow rows fill vectors too.
template <class IO> class Dropping {
  typedef typename IO::type type;
  static constexpr int64_t THREAD_ELEMENTS = 128 * GROUP_COLUMNS;  // elements per thread at a time

 public:
  explicit Dropping(const ch_dropout& work) : w(work) {}

  int run() const {
    const int64_t count = w.rows * w.columns;
    parallel(threads_for(w, 16.0 * (double)count), (count + THREAD_ELEMENTS - 1) / THREAD_ELEMENTS, [&](int64_t u) {
      apply_range(u * THREAD_ELEMENTS, minimum(count, (u + 1) * THREAD_ELEMENTS));
    });
    clearhead::trim_scratch();
    return CH_OK;
  }

 private:
  const ch_dropout& w;

  // One bit per element, starting at `first`.
  struct Mask {
    uint64_t words[THREAD_ELEMENTS / 64 + 1];
    int64_t first, count;

    CH_INLINE void append(uint64_t bits, int64_t num_columns) {
      if (num_columns < 64) bits &= ((uint64_t)1 << num_columns) - 1;
      uint64_t* word = words + count / 64;
      const int64_t bits_in_word = count % 64;
      word[0] = bits_in_word == 0 ? bits : word[0] | bits << bits_in_word;
      word[1] = bits_in_word == 0 ? 0 : bits >> (64 - bits_in_word);
      count += num_columns;
    }
    CH_INLINE uint32_t from(int64_t place) const { return (uint32_t)(words[place / 64] >> place % 64); }
  };

  void apply_range(int64_t first, int64_t end) const {
    Mask mask;
    mask.first = first, mask.count = 0;
    int64_t row = first / w.columns, column = first % w.columns;
    for (int64_t at = first; at < end;) {
      const int64_t group = column / GROUP_COLUMNS, skipped = column % GROUP_COLUMNS;
      const int64_t num_columns = minimum(minimum(GROUP_COLUMNS - skipped, w.columns - column), end - at);
      if (num_columns == GROUP_COLUMNS && w.dropped > 0) {
        apply(mask);
        whole_group(row, group, at);
        mask.first = at + GROUP_COLUMNS, mask.count = 0;
      } else {
        append_group(mask, row, group, skipped, num_columns);
      }
      at += num_columns, column += num_columns;
      if (column == w.columns) row++, column = 0;
    }
    apply(mask);
  }

  CH_INLINE void whole_group(int64_t row, int64_t group, int64_t at) const {
    const vf factor = all(dropout_factor(w.dropped));
    const Data data = data_at(at);
    const PhiloxRow draw = philox_row(w, row, group);
    draw_keep_masks(draw, (uint32_t)group, GROUP_COLUMNS, [&](int place, Lanes keep, Lanes next) CH_INLINED {
      data.put(place, select_lanes(keep, data.get(place) * factor));
      data.put(place + VL, select_lanes(next, data.get(place + VL) * factor));
    });
  }

  CH_INLINE void append_group(Mask& mask, int64_t row, int64_t group, int64_t skipped, int64_t num_columns) const {
    uint64_t halves[GROUP_COLUMNS / 64] = {~(uint64_t)0, ~(uint64_t)0};
    if (w.dropped > 0) {
      KeepMask keep_bits;
      keep_bits.draw(philox_row(w, row, group), (uint32_t)group, skipped + num_columns);
      memcpy(halves, keep_bits.bits, sizeof(halves));
    }
    for (int half = 0; half < GROUP_COLUMNS / 64; half++) {
      const int64_t from = maximum(skipped, (int64_t)64 * half), to = minimum(skipped + num_columns, (int64_t)64 * (half + 1));
      if (from < to) mask.append(halves[half] >> from % 64, to - from);
    }
  }

  void apply(const Mask& mask) const {
    const vf factor = all(dropout_factor(w.dropped));
    const Data data = data_at(mask.first);
    const int64_t whole = mask.count / VL * VL;
    for (int64_t place = 0; place < whole; place += VL)
      data.put(place, select_bits(mask.from(place), data.get(place) * factor));
    if (whole == mask.count) return;
    const size_t bytes = (size_t)(mask.count - whole) * sizeof(type);
    type input[VL] = {}, added[VL] = {}, output[VL];
    memcpy(input, data.input + whole, bytes);
    if (data.added != nullptr) memcpy(added, data.added + whole, bytes);
    const Data last{input, data.added == nullptr ? nullptr : added, output};
    last.put(0, select_bits(mask.from(whole), last.get(0) * factor));
    memcpy(data.output + whole, output, bytes);
  }

  struct Data {
    const type *input, *added;
    type* output;

    CH_INLINE vf get(int64_t place) const { return get_vector<IO>(input + place); }
    CH_INLINE void put(int64_t place, vf value) const {
      if (added != nullptr) value += get_vector<IO>(added + place);
      put_vector<IO>(output + place, value);
    }
  };

  CH_INLINE Data data_at(int64_t at) const {
    return Data{(const type*)w.input + at, w.added == nullptr ? nullptr : (const type*)w.added + at, (type*)w.output + at};
  }
};

}  // namespace CH_NS
