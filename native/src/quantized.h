// Linear layers whose weight is 8-bit or 4-bit integers: output = epilogue(x weight^T * scale + bias), with x in float.
//
// The weight is read where it lies, [columns][steps], once for up to MAX_ROWS rows: a stretch of PW rows of it becomes a
// panel in L1, by which all rows of x are multiplied with the micro-kernel of every other GEMM. So a sum has the order of
// those GEMMs, whatever the number of rows. With one scale a column the panel has the integers themselves, which every
// dtype represents, and the epilogue scales; with groups it has scale * integer + offset.
#pragma once

#include "activation.h"

namespace CH_NS {

// VL bytes, zero-extended.
CH_INLINE vu get_bytes(const uint8_t* from) {
#if defined(CH_AVX512)
  return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(CH_AVX2)
  return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#elif defined(CH_NEON)
  uint32_t four;
  memcpy(&four, from, 4);
  return (vu)vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)))));
#else
  vu bytes;
  for (int i = 0; i < VL; i++) bytes[i] = from[i];
  return bytes;
#endif
}

// VL signed bytes as floats.
CH_INLINE vf get_signed(const uint8_t* from) {
#if defined(CH_AVX512)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(CH_AVX2)
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  return __builtin_convertvector((vi)(get_bytes(from) << 24) >> 24, vf);
#endif
}

// How a row of the weight has its integers. `get_half` reads VL of 2 VL of them: the first or the last VL, or the even or
// the odd ones (ALTERNATE).
struct Codes8 {
  static constexpr int BITS = 8;
  static constexpr bool ALTERNATE = false;
  template <int HALF> static CH_INLINE vf get_half(const uint8_t* from) { return get_signed(from + HALF * VL); }
  // The even and the odd ones.
  static CH_INLINE void get_pairs(const uint8_t* from, vf& even, vf& odd) {
    vh halves;
    memcpy(&halves, from, sizeof(halves));
    const vu words = __builtin_convertvector(halves, vu);
    even = __builtin_convertvector((vi)(words << 24) >> 24, vf), odd = __builtin_convertvector((vi)(words << 16) >> 24, vf);
  }
  static CH_INLINE float get(const uint8_t* row, int64_t step) { return (float)(int8_t)row[step]; }
};

// Two integers of 0 to 15 a byte, the lower half first.
struct Codes4 {
  static constexpr int BITS = 4;
  static constexpr bool ALTERNATE = true;
  template <int HALF> static CH_INLINE vf get_half(const uint8_t* from) {
    const vu bytes = get_bytes(from);
    return __builtin_convertvector((vi)(HALF == 0 ? bytes & 15 : bytes >> 4), vf);
  }
  static CH_INLINE void get_pairs(const uint8_t* from, vf& even, vf& odd) {
    even = get_half<0>(from), odd = get_half<1>(from);
  }
  static CH_INLINE float get(const uint8_t* row, int64_t step) { return (float)(row[step / 2] >> step % 2 * 4 & 15); }
};

// Rows of a weight that are read later, prefetched line by line.
struct Lines {
  const uint8_t* row;
  int64_t stride, bytes, at = 0;
  CH_INLINE void prefetch_next() {
    prefetch_line(row + at);
    at += LINE_BYTES;
    if (at >= bytes) at = 0, row += stride;
  }
};

// Sums of rows from `row` on by columns from `column` on, `stride` apart. Whole vectors of columns can be read and written.
struct Sums {
  int64_t row, rows, column;
  int columns;
  float* at;
  int64_t stride;
};

// The epilogue of sums that have their scale and bias: an activation or a gate, rounded once. It is applied to all rows
// before any is stored: those are chains of operations that overlap.
template <class IO> void put_sums(const ch_quantized& w, const Sums& sums) {
  typedef typename IO::type type;
  const int columns = sums.columns, whole = columns / VL * VL;
  vf slope;
  for (int64_t r = 0; r < sums.rows && w.activation != CH_PLAIN; r++) {
    float* line = sums.at + r * sums.stride;
    for (int c = 0; c < columns; c += VL) store(line + c, activation_of(w.activation, load(line + c), slope));
  }
  for (int64_t r = 0; r < sums.rows; r++) {
    float* from = sums.at + r * sums.stride;
    type* output = (type*)w.output + (sums.row + r) * w.output_row + sums.column;
    if (w.gate != nullptr) {
      const type* gate = (const type*)w.gate + (sums.row + r) * w.gate_row + sums.column;
      for (int c = 0; c < whole; c += VL) store(from + c, load(from + c) * get_vector<IO>(gate + c));
      float rest[VL];
      if (whole < columns) get_row<IO>(gate + whole, columns - whole, rest, VL);
      if (whole < columns) store(from + whole, load(from + whole) * load(rest));
    }
    for (int c = 0; c < whole; c += VL) put_vector<IO>(output + c, load(from + c));
    if (whole < columns) put_row<IO>(output + whole, columns - whole, from + whole, 1.0f);
  }
}

// M multiplies operands; IO is the dtype of x, bias and output; Codes is Codes8 or Codes4.
// DEQUANTIZES: the panel has scale * integer + offset; else the epilogue scales.
template <class M, class IO, class Codes, bool DEQUANTIZES> class WeightOnly {
  typedef typename M::operand operand;
  typedef typename IO::type type;

  static constexpr int MR = M::HEIGHT;
  static constexpr bool TILES = in_tiles<M>();
  static constexpr int64_t DEPTH = TILES ? 128 : 512;  // as in Projection: operands of a stretch
  static constexpr int64_t MAX_ROWS = 48 * MR;  // rows for which a panel is made once; their tile stays in cache
  static constexpr int64_t BLOCK = 2 * VL;  // steps that are converted at a time

  const ch_quantized& w;
  const int64_t operands, groups;
  const bool in_place;
  int threads;
  const operand* left;
  int64_t left_row;

 public:
  explicit WeightOnly(const ch_quantized& work)
      : w(work), operands(row_steps<M>(work.steps)), groups(work.steps > 0 ? work.steps / work.group : 0), in_place(readable()), left(nullptr), left_row(0) {
    threads = threads_for(w, 2.0 * (double)w.rows * (double)w.columns * (double)w.steps);
  }

  int run() {
    Fault fault;
    for (int64_t row = 0; row < w.rows; row += MAX_ROWS) {
      const int64_t rows = minimum(MAX_ROWS, w.rows - row);
      if (!read_left(row, rows)) return CH_NO_MEMORY;
      const int64_t panels = (w.columns + PW - 1) / PW, parts = minimum(panels, (int64_t)4 * threads);
      const int64_t per_part = (panels + parts - 1) / parts;
      parallel(threads, parts, [&](int64_t part) {
        operand* panel = (operand*)scratch(clearhead::SLOT_KEYS, (size_t)(round_up(DEPTH, BLOCK) * PW) * sizeof(operand));
        float* tile = (float*)scratch(clearhead::SLOT_WORK, (size_t)(round_up(rows, MR) * PW) * sizeof(float));
        if (panel == nullptr || tile == nullptr) return fault.set(CH_NO_MEMORY);
        for (int64_t p = part * per_part; p < minimum(panels, (part + 1) * per_part); p++)
          multiply(row, rows, p * PW, panel, tile);
      });
    }
    clearhead::trim_scratch();
    return fault.get();
  }

 private:
  bool readable() const {
    if constexpr (__is_same(IO, Float32)) return true;
    return M::PACK == 2 && w.steps % (M::PACK * M::BLOCK) == 0 && w.x_row % M::PACK == 0 &&
           (uintptr_t)w.x % sizeof(operand) == 0;
  }

  // Rows of x as operands, in place or packed.
  bool read_left(int64_t row, int64_t rows) {
    const type* x = (const type*)w.x + row * w.x_row;
    left = (const operand*)x, left_row = w.x_row / M::PACK;
    if (in_place) return true;
    const int64_t padded = round_up(operands, VL);
    left_row = padded + VL;
    operand* to = (operand*)scratch(clearhead::SLOT_SHARED, (size_t)(rows * left_row) * sizeof(operand));
    left = to;
    if (to == nullptr) return false;
    parallel(threads, rows, [&](int64_t r) {
      get_operands<M, IO>(x + r * w.x_row, (int)w.steps, to + r * left_row, (int)padded);
    });
    return true;
  }

  // All rows by the weight's rows from `column` on.
  void multiply(int64_t row, int64_t rows, int64_t column, operand* panel, float* tile) const {
    const int columns = (int)minimum((int64_t)PW, w.columns - column), vecs = (columns + VL - 1) / VL;
    if (operands == 0) memset(tile, 0, (size_t)(rows * PW) * sizeof(float));
    for (int64_t s = 0; s < operands; s += DEPTH) {
      const int64_t steps = minimum(DEPTH, operands - s);
      fill_panel(column, columns, s, steps, panel);
      for (int64_t r = 0; r < rows; r += MR) {
        const int count = (int)minimum((int64_t)MR, rows - r);
        const operand* a = left + r * left_row + s;
        if (s == 0) gemm<M, SET>(count, vecs, steps, a, left_row, 1, panel, PW, tile + r * PW, PW);
        else gemm<M, TILES ? CONTINUE : ADD>(count, vecs, steps, a, left_row, 1, panel, PW, tile + r * PW, PW);
      }
    }
    finish(row, rows, column, columns, tile);
  }

  // Where the integers of a row of the weight are.
  CH_INLINE const uint8_t* row_of(int64_t column) const { return (const uint8_t*)w.weight + column * w.weight_row; }

  // The panel of `columns` rows of the weight and of the operands [first, first + count). Columns are whole vectors, and
  // operands whole blocks, zero-padded.
  void fill_panel(int64_t column, int columns, int64_t first, int64_t count, operand* panel) const {
    const int64_t from = first * M::PACK, until = minimum(w.steps, (first + count) * M::PACK);
    // The rest of a row is read value by value.
    const bool simple = !DEQUANTIZES || groups == 1 || w.group % BLOCK == 0;
    const int64_t whole = simple ? from + (until - from) / BLOCK * BLOCK : from;
    for (int c = 0; c < columns; c += VL) {
      const int rows = minimum(VL, columns - c);
      // What is read after this stretch: the next one of these rows, or the first one of those that are a panel away.
      const bool last = until == w.steps;
      const uint8_t* next = row_of(column + c) + (last ? PW * w.weight_row : until * Codes::BITS / 8);
      if (last && column + c + PW + VL > w.columns) next = row_of(column + c);
      Lines lines = {next, w.weight_row, (until - from) * Codes::BITS / 8};
      if (rows == VL) fill_groups<true>(column + c, VL, from, whole, panel + c, lines);
      else fill_groups<false>(column + c, rows, from, whole, panel + c, lines);
      fill_rest(column + c, rows, whole, until, from, round_up(count, M::BLOCK), panel + c);
    }
  }

  // Steps [from, until), whole blocks, of at most VL rows, group by group.
  template <bool ALL>
  void fill_groups(int64_t column, int rows, int64_t from, int64_t until, operand* to, Lines& lines) const {
    constexpr int64_t LINES = maximum((int64_t)1, VL * BLOCK * Codes::BITS / 512);  // that a block reads
    for (int64_t s = from; s < until;) {
      const int64_t group = DEQUANTIZES ? s / w.group : 0, end = DEQUANTIZES ? minimum(until, (group + 1) * w.group) : until;
      vf scale[VL], offset[VL];
      for (int r = 0; r < VL && DEQUANTIZES; r++) {
        const int64_t place = (column + minimum(r, rows - 1)) * groups + group;
        scale[r] = all(w.scale[place]), offset[r] = all(w.offset == nullptr ? 0.0f : w.offset[place]);
      }
      for (; s < end; s += BLOCK, to += BLOCK / M::PACK * PW) {
#pragma GCC unroll 8
        for (int64_t i = 0; i < LINES; i++) lines.prefetch_next();
        fill_half<ALL, 0>(row_of(column) + s * Codes::BITS / 8, rows, scale, offset, to);
        if constexpr (M::PACK == 1) fill_half<ALL, 1>(row_of(column) + s * Codes::BITS / 8, rows, scale, offset, to);
      }
    }
  }

  // One half of a block, transposed; with pairs the whole block.
  template <bool ALL, int HALF>
  CH_INLINE void fill_half(const uint8_t* row, int rows, const vf* scale, const vf* offset, operand* to) const {
    constexpr int FIRST = Codes::ALTERNATE ? HALF : HALF * VL, STEP = M::PACK == 1 && Codes::ALTERNATE ? 2 : 1;
    const auto value = [&](vf codes, int r) CH_INLINED { return DEQUANTIZES ? fused(scale[r], codes, offset[r]) : codes; };
    Words words[VL];
#pragma GCC unroll 16
    for (int r = 0; r < VL; r++, row += w.weight_row) {
      if (!ALL && r >= rows) {
        words[r] = Words{};
        continue;
      }
      if constexpr (M::PACK == 1) {
        words[r] = (Words)value(Codes::template get_half<HALF>(row), r);
      } else {
        vf even, odd;
        Codes::get_pairs(row, even, odd);
        words[r] = (Words)pair_of(value(even, r), value(odd, r));
      }
    }
    transpose_words(words);
#pragma GCC unroll 16
    for (int i = 0; i < VL; i++) store_words((uint32_t*)to + (FIRST + i * STEP) * PW, words[i]);
  }

  // Steps [from, until) value by value, and zeros up to `count` operands from step `start` on.
  void fill_rest(int64_t column, int rows, int64_t from, int64_t until, int64_t start, int64_t count, operand* panel) const {
    for (int64_t o = (from - start) / M::PACK; o < count; o++) {
      operand* to = panel + o * PW;
      for (int r = 0; r < VL; r++) {
        const int64_t step = start + o * M::PACK;
        const float one = r < rows && step < until ? value(column + r, step) : 0.0f;
        if constexpr (M::PACK == 1) {
          to[r] = one;
        } else {
          const float other = r < rows && step + 1 < until ? value(column + r, step + 1) : 0.0f;
          to[r] = float_to_bfloat(one) | (uint32_t)float_to_bfloat(other) << 16;
        }
      }
    }
  }

  float value(int64_t column, int64_t step) const {
    const float code = Codes::get(row_of(column), step);
    if constexpr (!DEQUANTIZES) return code;
    const int64_t place = column * groups + step / w.group;
    return fused(all(w.scale[place]), all(code), all(w.offset == nullptr ? 0.0f : w.offset[place]))[0];
  }

  static CH_INLINE vu pair_of(vf even, vf odd) {
#if defined(CH_BF16DOT)
    return paired(rounded(even), rounded(odd));
#else
    return (vu)even + (vu)odd;  // never called
#endif
  }

  // Scales the sums of a tile, adds the bias, and rounds.
  void finish(int64_t row, int64_t rows, int64_t column, int columns, float* tile) const {
    float scale[PW], bias[PW] = {};
    for (int c = 0; c < PW; c++) scale[c] = DEQUANTIZES || c >= columns ? 1.0f : w.scale[column + c];
    if (w.bias != nullptr) get_row<IO>((const type*)w.bias + column, columns, bias, PW);
    for (int64_t r = 0; r < rows; r++)
      for (int c = 0; c < columns; c += VL) store(tile + r * PW + c, fused(load(tile + r * PW + c), load(scale + c), load(bias + c)));
    put_sums<IO>(w, Sums{row, rows, column, columns, tile, PW});
  }
};

}  // namespace CH_NS
