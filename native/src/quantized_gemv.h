// Few rows of x by a weight of integers (GEMV): dot products with four rows of the weight at a time, where they lie.
//
// The integers become floats in registers, and each group of a row is scaled once. Sums along a row have the lanes of a
// vector, so their order is not that of the panels: in invariant mode these dot products do not run.
#pragma once

#include "gemv.h"
#include "invariance.h"
#include "quantized.h"

namespace CH_NS {

template <class IO, class Codes> class QuantizedGemv {
  typedef typename IO::type type;

  static constexpr int64_t BLOCK = 2 * VL, COLUMNS = 4;
  // Rows that read the weight once more; measured on AVX2, 4,096 by 4,096: beyond, panels are as fast.
  static constexpr int64_t MAX_ROWS = 8;

  const ch_quantized& w;
  const int64_t groups, padded;
  int threads;
  float* left;  // [rows][padded], in the order in which `get_half` reads
  float* group_sums;  // [rows][groups] of x; null without offsets

 public:
  static bool takes(const ch_quantized& w) {
    const bool whole_blocks = w.group == w.steps || w.group % BLOCK == 0;
    return w.rows <= MAX_ROWS && w.steps > 0 && whole_blocks && !clearhead::is_invariant();
  }

  explicit QuantizedGemv(const ch_quantized& work)
      : w(work), groups(work.steps / work.group), padded(round_up(work.steps, BLOCK)), left(nullptr), group_sums(nullptr) {
    threads = threads_for(w, 2.0 * (double)w.rows * (double)w.columns * (double)w.steps);
  }

  int run() {
    BumpAllocator parts = {nullptr};
    for (int pass = 0; pass < 2; pass++) {
      left = parts.take<float>(w.rows * padded);
      group_sums = parts.take<float>(w.rows * groups);
      if (pass == 0) parts.next = (char*)scratch(clearhead::SLOT_SHARED, (size_t)(parts.next - (char*)nullptr));
      if (parts.next == nullptr) return CH_NO_MEMORY;
    }
    for (int64_t r = 0; r < w.rows; r++) read_row(r);
    const int64_t fours = (w.columns + COLUMNS - 1) / COLUMNS, units = minimum(fours, (int64_t)4 * threads);
    const int64_t per_unit = (fours + units - 1) / units;
    parallel(threads, units, [&](int64_t unit) {
      for (int64_t four = unit * per_unit; four < minimum(fours, (unit + 1) * per_unit); four++)
        for (int64_t r = 0; r < w.rows; r += DOT_ROWS)
          multiply_four((int)minimum((int64_t)DOT_ROWS, w.rows - r), r, four * COLUMNS);
    });
    clearhead::trim_scratch();
    return CH_OK;
  }

 private:
  void multiply_four(int rows, int64_t row, int64_t column) const {
    if (w.group == 2 * BLOCK) return multiply<DOT_ROWS, 2>(rows, row, column);
    if (w.group == BLOCK) return multiply<DOT_ROWS, 1>(rows, row, column);
    return multiply<DOT_ROWS, 0>(rows, row, column);
  }

  // A row of x as floats, zero-padded; and the sums of its groups.
  void read_row(int64_t r) {
    const type* row = (const type*)w.x + r * w.x_row;
    float* to = left + r * padded;
    get_row<IO>(row, (int)w.steps, to, (int)padded);
    for (int64_t g = 0; g < groups && w.offset != nullptr; g++) {
      float sum = 0.0f;
      for (int64_t s = g * w.group; s < (g + 1) * w.group; s++) sum += to[s];
      group_sums[r * groups + g] = sum;
    }
    for (int64_t s = 0; s < padded && Codes::ALTERNATE; s += BLOCK) {
      float odd[VL];
      for (int i = 0; i < VL; i++) odd[i] = to[s + 2 * i + 1];
      for (int i = 0; i < VL; i++) to[s + i] = to[s + 2 * i];
      memcpy(to + s + VL, odd, sizeof(odd));
    }
  }

  // ROWS rows by the weight's rows [column, column + 4), or those there are. A group has BLOCKS blocks; 0 for any number.
  template <int ROWS, int BLOCKS> void multiply(int rows, int64_t row, int64_t column) const {
    if constexpr (ROWS > 1)
      if (rows < ROWS) return multiply<ROWS - 1, BLOCKS>(rows, row, column);
    const int64_t last = w.columns - 1 - column;
    const uint8_t* weight[COLUMNS];
    const float* scale[COLUMNS];
    for (int64_t c = 0; c < COLUMNS; c++) {
      weight[c] = (const uint8_t*)w.weight + (column + minimum(c, last)) * w.weight_row;
      scale[c] = w.scale + (column + minimum(c, last)) * groups;
    }
    const int64_t next = row == 0 && last >= 2 * COLUMNS ? COLUMNS * w.weight_row : 0;
    const float* x = left + row * padded;
    vf total[ROWS][COLUMNS] = {};
    for (int64_t g = 0; g < groups; g++) {
      vf sum[ROWS][COLUMNS] = {};
      if constexpr (BLOCKS > 0) {
#pragma GCC unroll 4
        for (int block = 0; block < BLOCKS; block++) add_whole<ROWS>(sum, x, weight, next, (g * BLOCKS + block) * BLOCK);
      } else {
        const int64_t end = (g + 1) * w.group, whole = end / BLOCK * BLOCK;
        for (int64_t s = g * w.group; s < whole; s += BLOCK) add_whole<ROWS>(sum, x, weight, next, s);
        if (whole < end) add_rest<ROWS>(sum, x, weight, whole);
      }
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; c++) {
        const vf factor = all(scale[c][g]);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; r++) total[r][c] = fused(factor, sum[r][c], total[r][c]);
      }
    }
    for (int r = 0; r < ROWS; r++) finish(total[r], row + r, column, minimum(COLUMNS, last + 1));
  }

  // Adds the block of steps from `s` on, and prefetches the next rows of the weight.
  template <int ROWS>
  CH_INLINE void add_whole(vf sum[ROWS][COLUMNS], const float* x, const uint8_t* const weight[COLUMNS], int64_t next,
                           int64_t s) const {
    const int64_t at = s * Codes::BITS / 8;
    if (at % 64 == 0)
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; c++) __builtin_prefetch(weight[c] + next + at, 0, 2);
    add_block<ROWS>(sum, x + s, [&](int c) CH_INLINED { return weight[c] + at; });
  }

  // Adds the last steps, fewer than a block, from `s` on.
  template <int ROWS>
  void add_rest(vf sum[ROWS][COLUMNS], const float* x, const uint8_t* const weight[COLUMNS], int64_t s) const {
    const int64_t at = s * Codes::BITS / 8, bytes = w.steps * Codes::BITS / 8 - at;
    uint8_t rest[COLUMNS][BLOCK] = {};
    for (int c = 0; c < COLUMNS; c++) memcpy(rest[c], weight[c] + at, (size_t)bytes);
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

  // Adds offsets, and stores through the epilogue.
  void finish(const vf total[COLUMNS], int64_t row, int64_t column, int64_t columns) const {
    static_assert(COLUMNS <= VL);
    float sums[VL] = {}, ones[VL], bias[VL] = {};
    store(ones, all(1.0f));
    horizontal_sums(total, sums);
    for (int64_t c = 0; c < columns && w.offset != nullptr; c++) sums[c] += offsets(row, column + c);
    if (w.bias != nullptr) get_row<IO>((const type*)w.bias + column, (int)columns, bias, VL);
    put_scaled<IO>(w, row, column, (int)columns, sums, ones, bias);
  }

  float offsets(int64_t row, int64_t column) const {
    const float *offset = w.offset + column * groups, *x = group_sums + row * groups;
    vf sum = {};
    int64_t g = 0;
    for (; g + VL <= groups; g += VL) sum = fused(load(offset + g), load(x + g), sum);
    float all_groups = sum_of(sum);
    for (; g < groups; g++) all_groups += offset[g] * x[g];
    return all_groups;
  }
};

}  // namespace CH_NS
