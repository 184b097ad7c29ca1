// Few rows of x by a weight of integers (GEMV): dot products with four rows of the weight at a time, where they lie.
//
// `Inputs` has the rows of x, and multiplies them: as floats here, as integers in `integer_inputs.h`. Sums along a row have
// the lanes of a vector, so their order is not that of the panels: in invariant mode these dot products do not run.
#pragma once

#include "gemv.h"
#include "invariance.h"
#include "quantized.h"

namespace CH_NS {

// The first `count` floats, fewer than a vector, and zeros.
CH_INLINE vf load_first(const float* from, int64_t count) {
#if defined(CH_AVX512)
  return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), from);
#elif defined(CH_AVX2)
  return (vf)_mm256_maskload_ps(from, (__m256i)(counting() < all((float)count)));
#else
  float some[VL] = {};
  memcpy(some, from, (size_t)count * sizeof(float));
  return load(some);
#endif
}

// Four rows of a weight of integers that are multiplied together. They are far apart, so that each begins a stream of
// memory, which the hardware prefetches (as in `gemv_dot`).
struct FourRows {
  static constexpr int64_t COUNT = 4;
  // Rows of x that multiply them; measured on AVX2, 4,096 by 4,096: beyond, panels are as fast.
  static constexpr int64_t MAX_OF_X = 8;
  const uint8_t* weight[COUNT];
  const float* scale[COUNT];  // one a group

  // The rows `column`, `column + stride` and so on; the weight's last row in place of those beyond it.
  FourRows(const ch_quantized& w, int64_t groups, int64_t column, int64_t stride) {
    for (int64_t c = 0; c < COUNT; c++) {
      const int64_t row = minimum(column + c * stride, w.columns - 1);
      weight[c] = (const uint8_t*)w.weight + row * w.weight_row;
      scale[c] = w.scale + row * groups;
    }
  }
};

// Rows of x as floats: the integers of the weight become floats in registers, and each group of a row is scaled once.
template <class IO, class Codes> class FloatInputs {
  typedef typename IO::type type;
  static constexpr int64_t BLOCK = 2 * VL, COLUMNS = FourRows::COUNT;

  const ch_quantized& w;
  const int64_t groups, padded;
  float* left;  // [rows][padded], in the order in which `get_half` reads

 public:
  static bool takes(const ch_quantized& w) { return w.group == w.steps || w.group % BLOCK == 0; }

  explicit FloatInputs(const ch_quantized& work)
      : w(work), groups(work.steps / work.group), padded(round_up(work.steps, BLOCK)), left(nullptr) {}

  void allocate(BumpAllocator& parts) { left = parts.take<float>(w.rows * padded); }

  // Reads a row of x, and calls `with` with its values.
  template <class With> void read_row(int64_t r, const With& with) {
    float* to = left + r * padded;
    get_row<IO>((const type*)w.x + r * w.x_row, (int)w.steps, to, (int)padded);
    with(to);
    for (int64_t s = 0; s < padded && Codes::ALTERNATE; s += BLOCK) {
      float odd[VL];
      for (int i = 0; i < VL; i++) odd[i] = to[s + 2 * i + 1];
      for (int i = 0; i < VL; i++) to[s + i] = to[s + 2 * i];
      memcpy(to + s + VL, odd, sizeof(odd));
    }
  }

  // The lanes of the sums of all rows.
  void multiply(const FourRows& four, vf total[][COLUMNS]) const {
    for (int64_t r = 0; r < w.rows; r += DOT_ROWS)
      multiply_rows<DOT_ROWS>((int)minimum((int64_t)DOT_ROWS, w.rows - r), r, four, total + r);
  }

 private:
  // ROWS rows, from `row` on.
  template <int ROWS> void multiply_rows(int rows, int64_t row, const FourRows& four, vf total[][COLUMNS]) const {
    if constexpr (ROWS > 1)
      if (rows < ROWS) return multiply_rows<ROWS - 1>(rows, row, four, total);
    if (w.group == 2 * BLOCK) return multiply_groups<ROWS, 2>(row, four, total);
    if (w.group == BLOCK) return multiply_groups<ROWS, 1>(row, four, total);
    multiply_groups<ROWS, 0>(row, four, total);
  }

  // A group has BLOCKS blocks; 0 for any number.
  template <int ROWS, int BLOCKS> void multiply_groups(int64_t row, const FourRows& four, vf output[][COLUMNS]) const {
    const float* x = left + row * padded;
    vf total[ROWS][COLUMNS] = {};
    for (int64_t g = 0; g < groups; g++) {
      vf sum[ROWS][COLUMNS] = {};
      if constexpr (BLOCKS > 0) {
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; block++) add_whole<ROWS>(sum, x, four, (g * BLOCKS + block) * BLOCK);
      } else {
        const int64_t end = (g + 1) * w.group, whole = end / BLOCK * BLOCK;
        for (int64_t s = g * w.group; s < whole; s += BLOCK) add_whole<ROWS>(sum, x, four, s);
        if (whole < end) add_rest<ROWS>(sum, x, four, whole);
      }
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; c++) {
        const vf factor = all(four.scale[c][g]);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) total[r][c] = fused(factor, sum[r][c], total[r][c]);
      }
    }
    memcpy(output, total, sizeof(total));
  }

  // Adds the block of steps from `s` on.
  template <int ROWS> CH_INLINE void add_whole(vf sum[ROWS][COLUMNS], const float* x, const FourRows& four, int64_t s) const {
    const int64_t at = s * Codes::BITS / 8;
    prefetch_streams<BLOCK * Codes::BITS / 8>(four.weight, at);
    add_block<ROWS>(sum, x + s, [&](int c) CH_INLINED { return four.weight[c] + at; });
  }

  // Adds the last steps, fewer than a block, from `s` on.
  template <int ROWS> void add_rest(vf sum[ROWS][COLUMNS], const float* x, const FourRows& four, int64_t s) const {
    const int64_t at = s * Codes::BITS / 8, bytes = w.steps * Codes::BITS / 8 - at;
    uint8_t rest[COLUMNS][BLOCK] = {};
    for (int c = 0; c < COLUMNS; c++) memcpy(rest[c], four.weight[c] + at, (size_t)bytes);
    add_block<ROWS>(sum, x + s, [&](int c) CH_INLINED { return rest[c]; });
  }

  template <int ROWS, class Read>
  CH_INLINE void add_block(vf sum[ROWS][COLUMNS], const float* x, const Read& read) const {
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; c++) {
      const vf first = Codes::template get_half<0>(read(c)), second = Codes::template get_half<1>(read(c));
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) sum[r][c] = fused(load(x + r * padded), first, sum[r][c]);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) sum[r][c] = fused(load(x + r * padded + VL), second, sum[r][c]);
    }
  }
};

template <class IO, class Inputs> class QuantizedGemv {
  typedef typename IO::type type;

  static constexpr int64_t COLUMNS = FourRows::COUNT, MAX_ROWS = FourRows::MAX_OF_X;
  // Rows of the weight before their epilogue, in four streams.
  static constexpr int64_t WIDTH = 256;
  static_assert(WIDTH % VL == 0 && WIDTH % COLUMNS == 0);

  const ch_quantized& w;
  const int64_t groups, padded_groups;
  int threads;
  Inputs inputs;
  float* group_sums;  // [rows][padded_groups] of x, where there are offsets

 public:
  static bool takes(const ch_quantized& w) {
    return w.rows <= MAX_ROWS && w.steps > 0 && !clearhead::is_invariant() && Inputs::takes(w);
  }

  explicit QuantizedGemv(const ch_quantized& work)
      : w(work), groups(work.steps / work.group), padded_groups(round_up(groups, VL)), inputs(work), group_sums(nullptr) {
    threads = threads_for(w, 2.0 * (double)w.rows * (double)w.columns * (double)w.steps);
  }

  int run() {
    BumpAllocator parts = {nullptr};
    for (int pass = 0; pass < 2; pass++) {
      inputs.allocate(parts);
      group_sums = parts.take<float>(w.offset == nullptr ? 0 : w.rows * padded_groups);
      if (pass == 0) parts.next = (char*)scratch(clearhead::SLOT_SHARED, (size_t)(parts.next - (char*)nullptr));
      if (parts.next == nullptr) return CH_NO_MEMORY;
    }
    for (int64_t r = 0; r < w.rows; r++)
      inputs.read_row(r, [&](const float* row) CH_INLINED { sum_groups(row, group_sums + r * padded_groups); });
    // Each unit begins four streams, which takes as long as to read some KiB.
    const int64_t vectors = (w.columns + VL - 1) / VL, units = minimum(vectors, (int64_t)2 * threads);
    const int64_t per_unit = (vectors + units - 1) / units;
    parallel(threads, units, [&](int64_t unit) {
      const int64_t end = minimum(w.columns, (unit + 1) * per_unit * VL);
      for (int64_t column = unit * per_unit * VL; column < end; column += WIDTH)
        multiply_columns(column, (int)minimum(WIDTH, end - column));
    });
    clearhead::trim_scratch();
    return CH_OK;
  }

 private:
  // The sums of the groups of a row of x, which has its values in order.
  void sum_groups(const float* row, float* sums) const {
    if (w.offset == nullptr) return;
    for (int64_t g = 0; g < padded_groups; g++) {
      const int64_t end = minimum(g + 1, groups) * w.group;
      int64_t s = g * w.group;
      vf lanes = {};
      for (; s + VL <= end; s += VL) lanes += load(row + s);
      float sum = sum_of(lanes);
      for (; s < end; s++) sum += row[s];
      sums[g] = sum;
    }
  }

  // All rows of x by the weight's rows [column, column + columns).
  void multiply_columns(int64_t column, int columns) const {
    float sums[MAX_ROWS * WIDTH] = {}, bias[WIDTH] = {};
    const int64_t quarter = (columns + COLUMNS - 1) / COLUMNS;
    for (int64_t c = 0; c < quarter; c++) multiply_four(FourRows(w, groups, column + c, quarter), sums + c, quarter);
    if (w.bias != nullptr) get_row<IO>((const type*)w.bias + column, columns, bias, WIDTH);
    for (int64_t r = 0; r < w.rows; r++)
      for (int c = 0; c < columns; c += VL) store(sums + r * WIDTH + c, load(sums + r * WIDTH + c) + load(bias + c));
    put_sums<IO>(w, Sums{0, w.rows, column, columns, sums, WIDTH});
  }

  // The sums of all rows by four rows of the weight, which are `stride` apart.
  void multiply_four(const FourRows& four, float* sums, int64_t stride) const {
    vf total[MAX_ROWS][COLUMNS] = {};
    inputs.multiply(four, total);
    for (int64_t r = 0; r < w.rows; r++) {
      if (w.offset != nullptr) add_offsets(four, group_sums + r * padded_groups, total[r]);
      float some[COLUMNS];
      horizontal_sums(total[r], some);
      for (int64_t c = 0; c < COLUMNS; c++) sums[r * WIDTH + c * stride] = some[c];
    }
  }

  void add_offsets(const FourRows& four, const float* x, vf total[COLUMNS]) const {
    for (int64_t c = 0; c < COLUMNS; c++) {
      const float* offset = w.offset + (four.scale[c] - w.scale);
      int64_t g = 0;
      for (; g + VL <= groups; g += VL) total[c] = fused(load(offset + g), load(x + g), total[c]);
      if (g < groups) total[c] = fused(load_first(offset + g, groups - g), load(x + g), total[c]);
    }
  }
};

}  // namespace CH_NS
