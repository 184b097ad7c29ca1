// Rows of x as 15-bit integers for dot products with a weight of integers, on AVX2, where an instruction multiplies 16-bit
// integers and adds pairs of products, and none does so for bytes of any size.
//
// A row of the weight is multiplied for a stretch before the next of four: the sums of all rows of x then stay in registers,
// and a vector of the weight is unpacked once for them.
#pragma once

#include "block_integers.h"

namespace CH_NS {

template <class IO, class Codes> class ShortInputs {
  typedef typename IO::type type;
  typedef IntegerDot Dot;
  typedef Dot::Left Left;
  typedef Left Lefts __attribute__((vector_size(VL * sizeof(Left))));

  static constexpr bool GROUPED = Codes::BITS == 4;  // whether groups have scales; else one scale for the row
  // A block is PARTS vectors: of bytes one after the other, of half bytes those at the same place of each two bytes.
  static constexpr int PARTS = 4;
  static constexpr int64_t BLOCK = PARTS * Dot::STEPS, BLOCK_BYTES = BLOCK * Codes::BITS / 8, COLUMNS = FourRows::COUNT;
  static constexpr int ROWS = 4;  // of x that are multiplied together
  // Bytes of a row of the weight before those of the next one; it prefetches as much, which is read when its turn comes again.
  static constexpr int64_t STRETCH_BYTES = 512, STRETCH = STRETCH_BYTES / BLOCK_BYTES;
  static constexpr int64_t MAX_GROUPS = 4;  // of a block

  const ch_quantized& w;
  const int64_t blocks;
  const BlockFactors factors;
  // For each tile of ROWS rows, or of the fewer that the last one has, where `rows` is how many:
  Left* left;  // [blocks][PARTS][rows][Dot::STEPS]
  float* units;  // [blocks][rows]
  float* values;  // of the last row that was read

 public:
  static bool takes(const ch_quantized& w) {
    // One row from memory takes as long in floats (measured on Zen 3), which are exact.
    return w.rows > 1 && (GROUPED ? BlockFactors::takes(w, BLOCK) : w.group == w.steps);
  }

  explicit ShortInputs(const ch_quantized& work)
      : w(work), blocks((work.steps + BLOCK - 1) / BLOCK), factors(work, BLOCK), left(nullptr), units(nullptr),
        values(nullptr) {}

  void allocate(BumpAllocator& parts) {
    left = parts.take<Left>(w.rows * blocks * BLOCK);
    units = parts.take<float>(w.rows * blocks);
    values = parts.take<float>(blocks * BLOCK);
  }

  // Reads a row of x, and calls `with` with the values that its integers stand for.
  template <class With> void read_row(int64_t r, const With& with) {
    get_row<IO>((const type*)w.x + r * w.x_row, (int)w.steps, values, (int)(blocks * BLOCK));
    const int64_t first = r / ROWS * ROWS, rows = minimum((int64_t)ROWS, w.rows - first);
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t place = first * blocks + b * rows;
      Left* to = left + place * BLOCK + (r - first) * Dot::STEPS;
      units[place + r - first] = read_block(values + b * BLOCK, rows * Dot::STEPS, to);
    }
    with(values);
  }

  // Adds the lanes of the sums of all rows to `total`.
  void multiply(const FourRows& four, vf total[][COLUMNS]) const {
    const int64_t last = w.steps * Codes::BITS / 8 - (blocks - 1) * BLOCK_BYTES;
    const int64_t whole = last < BLOCK_BYTES ? blocks - 1 : blocks;
    Stretch part = {0, 0, 0, factors.span / BLOCK};
    for (; part.from < whole; part = after(part)) {
      part.to = minimum(part.from + STRETCH, whole);
      for (int64_t r = 0; r < w.rows; r += ROWS)
        for (int64_t c = 0; c < COLUMNS; c++)
          add_stretch(r, four.weight[c] + part.from * BLOCK_BYTES, four.scale[c] + part.group, part, &total[r][c]);
    }
    part.to = blocks;
    for (int64_t c = 0; c < COLUMNS && whole < blocks; c++) {
      uint8_t rest[BLOCK_BYTES] = {};
      float scales[MAX_GROUPS] = {};
      memcpy(rest, four.weight[c] + whole * BLOCK_BYTES, (size_t)last);
      for (int64_t g = 0; g < factors.count(part.group); g++) scales[g] = four.scale[c][part.group + g];
      for (int64_t r = 0; r < w.rows; r += ROWS) add_stretch(r, rest, scales, part, &total[r][c]);
    }
    for (int64_t r = 0; r < w.rows && !GROUPED; r++)
      for (int64_t c = 0; c < COLUMNS; c++) total[r][c] *= all(four.scale[c][0]);
  }

 private:
  // Replaces the values of a block by those of its integers, which go to `to` in parts, `stride` elements apart; their unit.
  static float read_block(float* value, int64_t stride, Left* to) {
    const BlockUnit unit(value, BLOCK);
    Left codes[BLOCK];
    for (int64_t s = 0; s < BLOCK; s += VL) {
      const Lefts some = __builtin_convertvector(unit.take(value + s), Lefts);
      memcpy(codes + s, &some, sizeof(some));
    }
    for (int64_t part = 0; part < PARTS; part++)
      for (int64_t i = 0; i < Dot::STEPS; i++)
        to[part * stride + i] = codes[GROUPED ? i * PARTS + part : part * Dot::STEPS + i];
    return unit.unit;
  }

  // Blocks [from, to). The first one's scales begin with that of `group`, and `same` blocks from it on have them.
  struct Stretch {
    int64_t from, to, group, same;
  };

  // What begins where a stretch ends.
  Stretch after(const Stretch& part) const {
    const int64_t of_span = factors.span / BLOCK, later = part.to - part.from - part.same;
    if (later < 0) return {part.to, part.to, part.group, -later};
    return {part.to, part.to, factors.after(part.group, 1 + later / of_span), of_span - later % of_span};
  }

  // Adds a tile of x from row `row` on by a stretch of a row of the weight.
  void add_stretch(int64_t row, const uint8_t* weight, const float* scale, const Stretch& part, vf* total) const {
    for_rows<ROWS>((int)minimum((int64_t)ROWS, w.rows - row), [&]<int SOME>() CH_INLINED {
      const int64_t place = row * blocks + part.from * SOME;
      const auto add = !GROUPED || factors.within == 1 ? add_blocks<SOME, 1>
                       : factors.within == 2           ? add_blocks<SOME, 2>
                                                       : add_blocks<SOME, 4>;
      add(left + place * BLOCK, units + place, weight, scale, factors, part, total);
    });
  }

  // SOME rows by blocks of GROUPS groups. Not inlined: the caller's constants would take registers that sums need.
  template <int SOME, int GROUPS>
  static __attribute__((noinline)) void add_blocks(const Left* x, const float* unit, const uint8_t* weight, const float* scale,
                                                   const BlockFactors& factors, const Stretch& part, vf* total) {
    vf sum[SOME];
#pragma GCC unroll 4
    for (int r = 0; r < SOME; r++) sum[r] = total[r * COLUMNS];
    int64_t same = part.same;
    for (int64_t b = part.from; b < part.to; b++, weight += BLOCK_BYTES, x += SOME * BLOCK, unit += SOME) {
      if (b * BLOCK_BYTES % LINE_BYTES == 0) prefetch_line<3>(weight + STRETCH_BYTES);
      Dot::Vector codes[PARTS];
#pragma GCC unroll 4
      for (int p = 0; p < PARTS; p++) codes[p] = codes_of(weight, p);
      const vf factor = GROUPED ? factors.of_all<GROUPS>(scale) : vf{};
#pragma GCC unroll 4
      for (int r = 0; r < SOME; r++) {
        Dot::Vector products = Dot::zero();
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) products = Dot::madd(products, codes[p], x + (p * SOME + r) * Dot::STEPS);
        const vf lanes = __builtin_convertvector((vi)products, vf);
        sum[r] = GROUPED ? fused(lanes * all(unit[r]), factor, sum[r]) : fused(lanes, all(unit[r]), sum[r]);
      }
      if (GROUPS > 1) scale += GROUPS;
      else if (--same == 0) scale++, same = factors.span / BLOCK;
    }
#pragma GCC unroll 4
    for (int r = 0; r < SOME; r++) total[r * COLUMNS] = sum[r];
  }

  // A part of a block of the weight.
  static CH_INLINE Dot::Vector codes_of(const uint8_t* weight, int part) {
    if (!GROUPED) return Dot::load_weight((const int8_t*)weight + part * Dot::STEPS);
    vu pairs;
    memcpy(&pairs, weight, sizeof(pairs));
    return (Dot::Vector)(pairs >> 4 * part & 0x000f000fu);
  }
};

}  // namespace CH_NS
