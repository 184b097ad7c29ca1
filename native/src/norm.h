// The norm of a sum, row by row: residual, dropout and norm in one pass over memory.
//
// Each row is converted to a line of floats that stays in L1. Sums are in float32 over a stretch of columns and in
// double over stretches, so long rows lose no more digits than short ones.
#pragma once

#include "invariance.h"
#include "activation.h"

namespace CH_NS {

// Columns that are summed in float32.
constexpr int SUM_COLUMNS = 1024;

// The sum over columns of term(c, sum), which adds a vector of terms from column c on to a sum; columns beyond the last
// count as 0.
template <class Term> CH_INLINE double sum_over_columns(int columns, const Term& term) {
  const auto add = [&](vf& sum, int c) CH_INLINED { sum = term(c, sum); };
  double total = 0;
  for (int from = 0; from < columns; from += SUM_COLUMNS) {
    const int to = minimum(columns, from + SUM_COLUMNS);
    LaneSums sums[4];
    int c = from;
    for (; c + 4 * LANES <= to; c += 4 * LANES)
#pragma GCC unroll 16
      for (int i = 0; i < 4 * PARTS; i++) add(sums[i / PARTS].part[i % PARTS], c + i * VL);
    for (; c + LANES <= to; c += LANES)
#pragma GCC unroll 4
      for (int p = 0; p < PARTS; p++) add(sums[0].part[p], c + p * VL);
#pragma GCC unroll 4
    for (int p = 0; p < PARTS; p++, c += VL)
      if (c < to) sums[1].part[p] += first_of(term(c, (vf){}), minimum(VL, to - c));
    total += (double)sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
  }
  return total;
}

template <class IO> class Norm {
 protected:
  typedef typename IO::type type;
  const ch_norm& w;
  const int columns, padded;

  explicit Norm(const ch_norm& work)
      : w(work), columns((int)work.columns), padded((int)round_up(work.columns, GROUP_COLUMNS)) {}

  int64_t place(int64_t row) const { return row * w.columns; }
  int threads() const { return threads_for(w, 16.0 * (double)w.rows * (double)w.columns); }
  float* line_of(clearhead::Slot slot, int64_t count) const {
    return (float*)scratch(slot, (size_t)(count * padded) * sizeof(float));
  }

  void get_line(const void* from, int64_t row, float* line) const {
    get_row<IO>((const type*)from + place(row), columns, line, padded);
  }

  // The factors of the normalised values.
  void get_factors(float* line) const {
    get_line(w.weight, 0, line);
    if (w.kind != CH_NORM_RMS_FROM_ONE) return;
    for (int c = 0; c < columns; c += VL) store(line + c, all(1.0f) + load(line + c));
  }

  // Adds a row of another tensor to a line.
  void add(const void* from, int64_t row, float* line) const {
    const type* added = (const type*)from + place(row);
    int c = 0;
    for (; c + VL <= columns; c += VL) store(line + c, load(line + c) + get_vector<IO>(added + c));
    for (; c < columns; c++) line[c] += get_one<IO>(added + c);
  }

  // A vector rounded to the tensor's dtype and widened again.
  static CH_INLINE vf rounded(vf v) {
    if constexpr (__is_same(IO, Float32)) {
      return v;
    } else {
      type written[VL];
      put_vector<IO>(written, v);
      return get_vector<IO>(written);
    }
  }

  // Applies dropout to a row's line.
  void apply_dropout(int64_t row, float* line) const {
    const vf factor = all(dropout_factor(w.dropped));
    for (int c = 0; c < columns; c += GROUP_COLUMNS) {
      const int of = c / GROUP_COLUMNS;
      const PhiloxRow draw = philox_row(w, row, of);
      draw_keep_masks(draw, (uint32_t)of, columns - c, [&](int at, Lanes keep, Lanes next) CH_INLINED {
        float* to = line + c + at;
        store(to, select_lanes(keep, load(to) * factor));
        store(to + VL, select_lanes(next, load(to + VL) * factor));
      });
    }
  }
};

template <class IO> class NormForward : Norm<IO> {
  typedef Norm<IO> Base;
  using typename Base::type;
  using Base::columns;
  using Base::padded;
  using Base::w;

 public:
  explicit NormForward(const ch_norm& work) : Base(work) {}

  int run() const {
    float* factors = Base::line_of(clearhead::SLOT_SHARED, 2);
    if (factors == nullptr) return CH_NO_MEMORY;
    if (w.weight != nullptr) Base::get_factors(factors);
    if (w.bias != nullptr) Base::get_line(w.bias, 0, factors + padded);
    const int64_t rows_per_unit = maximum((int64_t)1, (int64_t)8192 / w.columns);
    Fault fault;
    parallel(Base::threads(), (w.rows + rows_per_unit - 1) / rows_per_unit, [&](int64_t u) {
      float* line = Base::line_of(clearhead::SLOT_WORK, 1);
      if (line == nullptr) return fault.set(CH_NO_MEMORY);
      for (int64_t row = u * rows_per_unit; row < minimum(w.rows, (u + 1) * rows_per_unit); row++) one_row(row, factors, line);
    });
    clearhead::trim_scratch();
    return fault.get();
  }

 private:
  void one_row(int64_t row, const float* factors, float* line) const {
    read_sum(row, line);
    const double count = (double)columns;
    const bool centred = w.kind == CH_NORM_LAYER;
    const float mean = centred ? (float)(sum_over_columns(columns, [&](int c, vf sum) CH_INLINED { return sum + load(line + c); }) / count) : 0;
    const vf means = all(mean);
    double square = sum_over_columns(columns, [&](int c, vf sum) CH_INLINED {
      const vf difference = load(line + c) - means;
      return fused(difference, difference, sum);
    });
    // The mean is rounded: for values close to it the residual matters.
    double rest = 0;
    if (centred) rest = sum_over_columns(columns, [&](int c, vf sum) CH_INLINED { return sum + (load(line + c) - means); }) / count;
    square = square / count - rest * rest;
    const float scale = (float)(1.0 / __builtin_sqrt((square < 0 ? 0.0 : square) + w.epsilon));
    if (w.moments != nullptr) w.moments[2 * row] = mean, w.moments[2 * row + 1] = scale;
    const vf scales = all(scale), rests = all((float)rest);
    for (int c = 0; c < columns; c += VL) {
      vf value = (load(line + c) - means - rests) * scales;
      if (w.weight != nullptr) value *= load(factors + c);
      if (w.bias != nullptr) value += load(factors + padded + c);
      store(line + c, value);
    }
    put_row<IO>((type*)w.output + Base::place(row), columns, line, 1.0f);
  }

  void read_sum(int64_t row, float* line) const {
    Base::get_line(w.input, row, line);
    if (w.dropped > 0) Base::apply_dropout(row, line);
    if (w.added != nullptr) Base::add(w.added, row, line);
    if (w.added != nullptr || w.dropped > 0)
      for (int c = 0; c < columns; c += VL) store(line + c, Base::rounded(load(line + c)));
    if (w.sum != nullptr) put_row<IO>((type*)w.sum + Base::place(row), columns, line, 1.0f);
  }
};

template <class IO> class NormBackward : Norm<IO> {
  typedef Norm<IO> Base;
  using typename Base::type;
  using Base::columns;
  using Base::padded;
  using Base::w;
  // Parts of rows with a separate sum for the gradients of weight and bias; independent of the number of threads.
  static constexpr int64_t MAX_PARTS = 32, MIN_ROWS = 16;
  // Rows of a part where they must not depend on the number of rows.
  static constexpr int64_t INVARIANT_ROWS = 64;

 public:
  explicit NormBackward(const ch_norm& work) : Base(work) {}

  int run() const {
    const int64_t rows = clearhead::is_invariant() ? INVARIANT_ROWS : maximum((w.rows + MAX_PARTS - 1) / MAX_PARTS, MIN_ROWS);
    const int64_t parts = (w.rows + rows - 1) / rows;
    float* weight = Base::line_of(clearhead::SLOT_SHARED, 1);
    float* sums = sums_wanted() ? Base::line_of(clearhead::SLOT_PARTIAL, 2 * parts) : nullptr;
    if (weight == nullptr || (sums == nullptr && sums_wanted())) return CH_NO_MEMORY;
    if (w.weight != nullptr) Base::get_factors(weight);
    Fault fault;
    parallel(Base::threads(), parts, [&](int64_t u) {
      float* lines = Base::line_of(clearhead::SLOT_WORK, 2);
      if (lines == nullptr) return fault.set(CH_NO_MEMORY);
      float* line_sums = sums == nullptr ? nullptr : sums + 2 * u * padded;
      if (line_sums != nullptr) memset(line_sums, 0, (size_t)(2 * padded) * sizeof(float));
      for (int64_t row = u * rows; row < minimum(w.rows, (u + 1) * rows); row++) one_row(row, weight, lines, line_sums);
    });
    if (sums != nullptr && fault.get() == CH_OK) {
      add_up(sums, parts, w.grad_weight);
      add_up(sums + padded, parts, w.grad_bias);
    }
    clearhead::trim_scratch();
    return fault.get();
  }

 private:
  bool sums_wanted() const { return w.grad_weight != nullptr || w.grad_bias != nullptr; }

  // With d = x - mean, whose mean is not exactly 0, and g the gradient of the normalised values:
  //   normed = scale (d - mean d),  grad = scale (g - mean g - normed mean(g normed)).
  void one_row(int64_t row, const float* weight, float* lines, float* sums) const {
    float *x = lines, *g = lines + padded;
    Base::get_line(w.sum, row, x), read_grad(row, g);
    const bool centred = w.kind == CH_NORM_LAYER;
    const vf means = all(w.moments[2 * row]), scales = all(w.moments[2 * row + 1]);
    const double count = (double)columns, scale = (double)w.moments[2 * row + 1];
    double rest = 0, mean_g = 0;
    for (int c = 0; c < columns; c += VL) store(x + c, load(x + c) - means);
    if (centred) rest = sum_over_columns(columns, [&](int c, vf sum) CH_INLINED { return sum + load(x + c); }) / count;
    const vf rests = all((float)rest);
    const auto weighted = [&](int c) CH_INLINED { return w.weight == nullptr ? load(g + c) : load(g + c) * load(weight + c); };
    if (centred) mean_g = sum_over_columns(columns, [&](int c, vf sum) CH_INLINED { return sum + weighted(c); }) / count;
    const double along =
        scale * sum_over_columns(columns, [&](int c, vf sum) CH_INLINED { return fused(weighted(c), load(x + c) - rests, sum); }) / count;
    const vf means_g = all((float)mean_g), alongs = all((float)along);
    for (int c = 0; c < columns; c += VL) {
      const vf normed = (load(x + c) - rests) * scales, grad = load(g + c);
      if (sums != nullptr) {
        store(sums + c, fused(grad, normed, load(sums + c)));
        store(sums + padded + c, load(sums + padded + c) + grad);
      }
      store(x + c, scales * fused(-normed, alongs, weighted(c) - means_g));
    }
    put_grads(row, x);
  }

  void read_grad(int64_t row, float* line) const {
    Base::get_line(w.grad_output, row, line);
    if (w.grad_output_second != nullptr) Base::add(w.grad_output_second, row, line);
  }

  void put_grads(int64_t row, float* line) const {
    if (w.grad_residual != nullptr) Base::add(w.grad_residual, row, line);
    put_row<IO>((type*)w.grad_sum + Base::place(row), columns, line, 1.0f);
    if (w.grad_input == nullptr) return;
    for (int c = 0; c < columns; c += VL) store(line + c, Base::rounded(load(line + c)));
    if (w.dropped > 0) Base::apply_dropout(row, line);
    put_row<IO>((type*)w.grad_input + Base::place(row), columns, line, 1.0f);
  }

  // Adds the lines of all parts and stores the sum.
  void add_up(float* sums, int64_t parts, void* to) const {
    if (to == nullptr) return;
    for (int c = 0; c < columns; c += VL) {
      vf total = {};
      for (int64_t part = 0; part < parts; part++) total += load(sums + 2 * part * padded + c);
      const int left = minimum(VL, columns - c);
      float line[VL];
      store(line, total);
      put_row<IO>((type*)to + c, left, line, 1.0f);
    }
  }
};

}  // namespace CH_NS
