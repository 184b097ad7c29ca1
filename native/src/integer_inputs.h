// Rows of x as 15-bit integers for dot products with a weight of integers, where an instruction multiplies four bytes and
// adds them: nothing of the weight is converted to floats.
//
// An integer is two bytes, 256 * high + low, with a sum each, and these are exact.
#pragma once

#include "block_integers.h"
#include "few_rows.h"

namespace CH_NS {

template <class IO, class Codes> class IntegerInputs {
  typedef typename IO::type type;
  typedef IntegerDot Dot;
  typedef Dot::Vector Vector;
  typedef int8_t Bytes __attribute__((vector_size(VL)));

  // A vector has Dot::STEPS bytes of the weight, and so many integers in each of PARTS parts: all of them, or the lower
  // and the upper halves of bytes.
  static constexpr int PARTS = 8 / Codes::BITS;
  static constexpr bool GROUPED = Codes::BITS == 4;  // whether groups have scales; else one scale for the row
  static constexpr int64_t VECTORS = GROUPED ? 1 : 4, BLOCK = VECTORS * PARTS * Dot::STEPS;
  static constexpr int64_t BLOCK_BYTES = VECTORS * Dot::STEPS, COLUMNS = FourRows::COUNT;
  static constexpr int PIECES = 2;  // bytes of an integer, the upper one first
  // Weights that become unsigned by adding Dot::SHIFT have that subtracted from sums.
  static constexpr bool SHIFTED = Codes::BITS == 8 && Dot::SHIFT != 0;
  static constexpr int MAX_TILES = FourRows::MAX_OF_X / DOT_ROWS;

  const ch_quantized& w;
  const int64_t blocks;
  const BlockFactors factors;
  // For each tile of DOT_ROWS rows, or of the fewer that there are, where `rows` is how many it has:
  int8_t* left;  // [blocks][PIECES][VECTORS][PARTS][rows][Dot::STEPS]
  Vector* shifts;  // [blocks][rows], added to the sums of a block
  float* units;  // [blocks][rows]
  float* values;  // of the last row that was read

 public:
  static bool takes(const ch_quantized& w) {
    // One row by bytes waits for memory either way, and longer here (measured on Zen 5).
    if (!GROUPED) return w.rows > 1 && w.group == w.steps;
    return BlockFactors::takes(w, BLOCK);
  }

  explicit IntegerInputs(const ch_quantized& work)
      : w(work), blocks((work.steps + BLOCK - 1) / BLOCK), factors(work, BLOCK), left(nullptr), shifts(nullptr),
        units(nullptr), values(nullptr) {}

  void allocate(BumpAllocator& parts) {
    const int64_t rows = w.rows > DOT_ROWS ? round_up(w.rows, DOT_ROWS) : w.rows;
    left = parts.take<int8_t>(rows * blocks * PIECES * BLOCK);
    shifts = parts.take<Vector>(SHIFTED ? rows * blocks : 0);
    units = parts.take<float>(rows * blocks);
    values = parts.take<float>(blocks * BLOCK);
  }

  // Reads a row of x, and calls `with` with the values that its integers stand for.
  template <class With> void read_row(int64_t r, const With& with) {
    get_row<IO>((const type*)w.x + r * w.x_row, (int)w.steps, values, (int)(blocks * BLOCK));
    for (int64_t b = 0; b < blocks; b++) read_block(r, b, values + b * BLOCK);
    with(values);
  }

  // Adds the lanes of the sums of all rows to `total`.
  void multiply(const FourRows& four, vf total[][COLUMNS]) const {
    if (w.rows > DOT_ROWS) return multiply_many<MAX_TILES>(four, total);
    multiply_rows<DOT_ROWS>(four, total);
  }

 private:
  template <int TILES> void multiply_many(const FourRows& four, vf total[][COLUMNS]) const {
    if constexpr (TILES > 2)
      if (w.rows <= (TILES - 1) * DOT_ROWS) return multiply_many<TILES - 1>(four, total);
    multiply_tiles<DOT_ROWS, TILES>(four, total);
  }

  template <int ROWS> void multiply_rows(const FourRows& four, vf total[][COLUMNS]) const {
    if constexpr (ROWS > 1)
      if (w.rows < ROWS) return multiply_rows<ROWS - 1>(four, total);
    multiply_tiles<ROWS, 1>(four, total);
  }

  // ROWS rows in each of so many tiles, which read a block one after the other. Sums of rows beyond the last one mean nothing.
  template <int ROWS, int TILES> void multiply_tiles(const FourRows& four, vf total[][COLUMNS]) const {
    const int64_t last = w.steps * Codes::BITS / 8 - (blocks - 1) * BLOCK_BYTES;  // bytes of the last block
    const uint8_t* weight[COLUMNS];
    uint8_t rest[COLUMNS][BLOCK_BYTES];
    for (int c = 0; c < COLUMNS; c++) weight[c] = four.weight[c];
    int64_t at = 0, g = 0, left_in_span = factors.span;
    for (int64_t b = 0; b < blocks; b++, at += BLOCK_BYTES) {
      if (b == blocks - 1 && last < BLOCK_BYTES) {
        for (int c = 0; c < COLUMNS; c++) {
          memcpy(rest[c], weight[c] + at, (size_t)last);
          memset(rest[c] + last, 0, (size_t)(BLOCK_BYTES - last));
          weight[c] = rest[c];
        }
        at = 0;
      }
      // More rows take longer than the memory.
      for (int64_t byte = 0; byte < BLOCK_BYTES && TILES == 1; byte += Dot::STEPS)
        prefetch_streams<Dot::STEPS>(four.weight, b * BLOCK_BYTES + byte);
      vf factor[COLUMNS];
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS && GROUPED; c++) factor[c] = factors.at(four.scale[c], g);
#pragma GCC unroll 4
      for (int tile = 0; tile < TILES; tile++) {
        // Sums of a block stay in registers, totals do not.
        vf(*totals)[COLUMNS] = total + tile * ROWS;
        hide(totals);
        const int64_t place = (tile * blocks + b) * ROWS;
        add_block<ROWS>(left + place * PIECES * BLOCK, shifts + place, units + place, weight, at, factor, totals);
      }
      left_in_span -= BLOCK;
      if (left_in_span > 0) continue;
      g = factors.after(g), left_in_span = factors.span;
    }
    for (int r = 0; r < ROWS * TILES && !GROUPED; r++)
      for (int c = 0; c < COLUMNS; c++) total[r][c] *= all(four.scale[c][0]);
  }

  // Replaces the values of a block by those of its integers, which go to `left`.
  void read_block(int64_t row, int64_t block, float* value) {
    const int64_t first = row / DOT_ROWS * DOT_ROWS, rows = minimum((int64_t)DOT_ROWS, w.rows);
    const int64_t place = first * blocks + block * rows + row - first;
    const BlockUnit block_unit(value, BLOCK);
    units[place] = block_unit.unit;
    int8_t high[BLOCK], low[BLOCK];
    for (int64_t s = 0; s < BLOCK; s += VL) {
      const vi code = block_unit.take(value + s), upper = (code + 128) >> 8;
      put_bytes(high + s, upper), put_bytes(low + s, code - (upper << 8));
    }
    int8_t* to = left + (first * blocks + block * rows) * PIECES * BLOCK + (row - first) * Dot::STEPS;
    arrange(high, rows * Dot::STEPS, to), arrange(low, rows * Dot::STEPS, to + rows * BLOCK);
    if constexpr (SHIFTED) shifts[place] = (Vector)(((vi)shift_of(high) << 8) + (vi)shift_of(low));
  }

  static CH_INLINE void put_bytes(int8_t* to, vi codes) {
    const Bytes bytes = __builtin_convertvector(codes, Bytes);
    memcpy(to, &bytes, sizeof(bytes));
  }

  // The bytes of a block as its vectors' parts, `stride` bytes apart.
  static void arrange(const int8_t* bytes, int64_t stride, int8_t* to) {
    for (int64_t v = 0; v < VECTORS; v++, to += PARTS * stride, bytes += PARTS * Dot::STEPS) {
      if constexpr (PARTS == 1) {
        memcpy(to, bytes, Dot::STEPS);
      } else {
        for (int64_t i = 0; i < Dot::STEPS; i += VL) {
          vh pairs;
          memcpy(&pairs, bytes + 2 * i, sizeof(pairs));
          const Bytes even = __builtin_convertvector(pairs, Bytes), odd = __builtin_convertvector(pairs >> 8, Bytes);
          memcpy(to + i, &even, sizeof(even)), memcpy(to + stride + i, &odd, sizeof(odd));
        }
      }
    }
  }

  // What the weight's SHIFT adds to the lanes of a block's sums, negated.
  static Vector shift_of(const int8_t* bytes) {
    const int8_t zeros[Dot::STEPS] = {};
    Vector sum = Dot::zero();
    for (int64_t v = 0; v < VECTORS; v++) sum = Dot::madd(sum, Dot::load_weight(zeros), bytes + v * Dot::STEPS);
    return (Vector)(-(vi)sum);
  }

  // Adds a block of ROWS rows by four rows of the weight.
  template <int ROWS>
  CH_INLINE static void add_block(const int8_t* x, const Vector* shift, const float* unit,
                                  const uint8_t* const weight[COLUMNS], int64_t at, const vf factor[COLUMNS],
                                  vf total[ROWS][COLUMNS]) {
    Vector sum[ROWS][COLUMNS];
#pragma GCC unroll 2
    for (int piece = 0; piece < PIECES; piece++) {
      // The second piece reads the weight again: kept since the first, it would be spilled.
      asm("" : "+r"(at));
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int c = 0; c < COLUMNS; c++) {
          if (piece == 0) sum[r][c] = Dot::zero();
          else if (SHIFTED) sum[r][c] = (Vector)(((vu)sum[r][c] << 8) + (vu)shift[r]);
          else sum[r][c] = (Vector)((vu)sum[r][c] << 8);
        }
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++) {
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; part++) {
          decltype(codes_of(nullptr, 0)) codes[COLUMNS];
#pragma GCC unroll 4
          for (int c = 0; c < COLUMNS; c++) codes[c] = codes_of(weight[c] + at + v * Dot::STEPS, part);
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; r++, x += Dot::STEPS)
#pragma GCC unroll 4
            for (int c = 0; c < COLUMNS; c++) sum[r][c] = Dot::madd(sum[r][c], codes[c], x);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      const vf scale = all(unit[r]);
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; c++)
        total[r][c] = GROUPED ? fused(lanes_of(sum[r][c]) * scale, factor[c], total[r][c])
                              : fused(lanes_of(sum[r][c]), scale, total[r][c]);
    }
  }

  static CH_INLINE vf lanes_of(Vector sum) { return __builtin_convertvector((vi)sum, vf); }

  // A vector of the weight's integers: all bytes, or a half of each.
  static CH_INLINE auto codes_of(const uint8_t* from, int part) {
    if constexpr (PARTS == 1) {
      return Dot::load_weight((const int8_t*)from);
    } else {
      vu bytes;
      memcpy(&bytes, from, sizeof(bytes));
      return Dot::unsigned_bytes((part == 0 ? bytes : bytes >> 4) & 0x0f0f0f0fu);
    }
  }
};

}  // namespace CH_NS
