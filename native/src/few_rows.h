// A few rows of A times a matrix in place, in the order of the GEMM: each sum runs over a stretch of steps, one after
// the other from 0, and the sums of the stretches are added in order. Every row of A has the bits that it has among
// many. Two forms: if the matrix's rows run along the steps, they are transposed in registers; if they are the steps,
// their lanes are the columns already.
#pragma once

#include "gemv.h"

namespace CH_NS {

// Memory that is read later, prefetched into L2 in the order of addresses, in blocks of VL vectors.
struct UpcomingLines {
  static constexpr int BYTES = VL * VL * 4, LINES = maximum(1, (int)(BYTES / LINE_BYTES));
  const char* row;
  int64_t stride, bytes, rows, at;

  CH_INLINE UpcomingLines(const void* from, int64_t stride, int64_t bytes, int64_t rows)
      : row((const char*)from), stride(stride), bytes(bytes), rows(rows), at(0) {
    if (stride == bytes) this->bytes *= rows, this->rows = minimum(rows, (int64_t)1);
  }
  // The next block, or what is read now if there is none.
  CH_INLINE const char* next(const void* current) {
    if (rows <= 0) return (const char*)current;
    const char* block = row + at;
    at += BYTES;
    if (at >= bytes) at = 0, row += stride, rows--;
    return block;
  }
};

// Hides where a pointer comes from: GCC would compute the address of every load of a loop ahead of it, and spill them.
template <class T> CH_INLINE void hide(T*& pointer) { asm("" : "+r"(pointer)); }

// Prefetches line `line` of a block after `value` in the order of the program. Without the dependency the compiler
// prefetches the lines of a block together, which takes up to 1.4 times as long (measured).
CH_INLINE void prefetch_after(const char*& block, int line, [[maybe_unused]] vf value) {
#if defined(CH_AVX512) && defined(__AVX512F__)
  asm("" : "+r"(block) : "v"(value));
#elif defined(CH_AVX2)
  asm("" : "+r"(block) : "x"(value));
#elif defined(CH_NEON)
  asm("" : "+r"(block) : "w"(value));
#endif
  prefetch_line(block + line * LINE_BYTES);
}

// Operands of A that one vector of words of a row of the matrix is multiplied by.
template <class M, class IO> constexpr int operands_across() { return two_steps_a_word<M, IO>() ? 2 * VL : VL; }

// One vector of words of each of VL rows, transposed: a vector across the rows for each word. Beyond the last of `count`
// rows, that one is repeated. Half the lines of `block` are prefetched meanwhile.
template <class M, class IO, bool WHOLE>
CH_INLINE void load_across(const typename IO::type* b, int64_t ldb, int64_t count, Words* words, const char*& block) {
  constexpr int EVERY = 2 * VL / UpcomingLines::LINES;
#pragma GCC unroll 4
  for (int four = 0; four < VL; four += 4) {
    const typename IO::type* rows = b + four * ldb;
    if (WHOLE) hide(rows);
#pragma GCC unroll 4
    for (int i = four; i < four + 4; i++) {
      const typename IO::type* row = WHOLE ? rows + (i - four) * ldb : b + minimum((int64_t)i, count - 1) * ldb;
      if constexpr (M::PACK == 1 && !two_steps_a_word<M, IO>()) words[i] = (Words)get_vector<IO>(row);
      else words[i] = load_words((const uint32_t*)row);
      if (i % EVERY == 0) prefetch_after(block, i / EVERY, (vf)words[i]);
    }
  }
  transpose_words(words);
}

// Adds to the sums of ROWS rows of A what they have of one vector across rows of the matrix.
template <class M, int ROWS>
CH_INLINE void add_vector(const typename M::operand* const row[ROWS], int operand, vf across, vf sum[ROWS]) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) sum[r] = M::madd_broadcast(sum[r], M::broadcast(row[r] + operand), across);
}

// Sums of ROWS rows of A with VECS * VL rows of the matrix, of which there are `count`, over a stretch of operands.
template <class M, class IO, int ROWS, int VECS, bool WHOLE>
CH_INLINE void sum_stretch(const typename IO::type* b, int64_t ldb, int64_t count, int64_t operands,
                           const typename M::operand* a, int64_t a_row, UpcomingLines& upcoming, vf sum[VECS][ROWS]) {
  constexpr int AT_ONCE = operands_across<M, IO>(), LINES = UpcomingLines::LINES, EVERY = 2 * VL / LINES;
  for (int v = 0; v < VECS; v++)
    for (int r = 0; r < ROWS; r++) sum[v][r] = (vf){};
  for (int64_t o = 0; o < operands; o += AT_ONCE, a += AT_ONCE, b += AT_ONCE * M::PACK) {
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v++) {
      const char* block = upcoming.next(b);
      Words words[VL];
      load_across<M, IO, WHOLE>(b + (WHOLE ? v * VL : minimum((int64_t)v * VL, count - 1)) * ldb, ldb,
                                maximum((int64_t)1, count - v * VL), words, block);
      const typename M::operand* row[ROWS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) {
        row[r] = a + r * a_row;
        hide(row[r]);
      }
#pragma GCC unroll 16
      for (int i = 0; i < VL; i++) {
        if (LINES > 1 && i % EVERY == 0) prefetch_after(block, LINES / 2 + i / EVERY, sum[v][0]);
        if constexpr (two_steps_a_word<M, IO>()) {
          add_vector<M, ROWS>(row, 2 * i, first_step(words[i]), sum[v]);
          add_vector<M, ROWS>(row, 2 * i + 1, second_step(words[i]), sum[v]);
        } else {
          add_vector<M, ROWS>(row, i, (vf)words[i], sum[v]);
        }
      }
    }
  }
}

// Rows of A whose sums stay in registers.
constexpr int ACROSS_ROWS = VL == 8 ? 6 : 8;

// Sums of ROWS rows of A with `columns` rows of the matrix, which run along the steps, over stretches of `depth`
// operands, to C. As many rows of the matrix as `following` follow the first and are prefetched.
template <class M, class IO, int ROWS>
__attribute__((noinline)) void gemv_across(const typename IO::type* b, int64_t ldb, int columns, int64_t following,
                                           int64_t operands, int64_t depth, const typename M::operand* a, int64_t a_row,
                                           float* c, int64_t ldc) {
  // With one vector, the chain of one or two rows' sums takes longer than the transpose.
  constexpr int VECS = ROWS <= 2 && (M::PACK == 2 || two_steps_a_word<M, IO>()) ? 2 : 1, WIDTH = VECS * VL;
  const int64_t size = (int64_t)sizeof(typename IO::type);
  UpcomingLines upcoming(b + WIDTH * ldb, ldb * size, operands * M::PACK * size, following - WIDTH);
  for (int column = 0; column < columns; column += WIDTH)
    for (int64_t o = 0; o < operands; o += depth) {
      vf sum[VECS][ROWS];
      const int64_t count = columns - column, steps = minimum(depth, operands - o);
      const typename IO::type* from = b + column * ldb + o * M::PACK;
      if (count >= WIDTH) sum_stretch<M, IO, ROWS, VECS, true>(from, ldb, count, steps, a + o, a_row, upcoming, sum);
      else sum_stretch<M, IO, ROWS, VECS, false>(from, ldb, count, steps, a + o, a_row, upcoming, sum);
#pragma GCC unroll 2
      for (int v = 0; v < VECS; v++)
        if (v * VL < count)
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; r++) {
            float* to = c + r * ldc + column + v * VL;
            store(to, o == 0 ? sum[v][r] : sum[v][r] + load(to));
          }
    }
}

// Rows up to which several panels are multiplied by at a time. Each panel is a stream of memory; a core reads two to four
// 1.05 to 1.2 times as fast as one (measured on Zen 3). With more than one row the sums leave registers for two.
constexpr int ROWS_BY_PANELS = MR / 2, MAX_PANELS = 4;
constexpr int panels_for(int64_t rows) { return rows == 1 ? MAX_PANELS : 2; }

// Panels of a packed matrix, `stride` operands apart.
template <class M> struct PackedPanels {
  const typename M::right* first;
  int64_t stride, count;
};

// Sums of ROWS rows of A with PANELS panels over `steps` steps, in the order of the GEMM, to C or added to it; a panel's are
// `c_panel` after those of the one before.
template <class M, int ROWS, int PANELS, bool ADDS>
__attribute__((noinline)) void sum_panels(int64_t steps, const typename M::operand* __restrict a, int64_t a_row,
                                          const PackedPanels<M>& panels, float* __restrict c, int64_t c_panel) {
  constexpr int VECS = PANELS * NV;
  const typename M::right* __restrict b = panels.first;
  vf sum[ROWS][VECS];
#pragma GCC unroll 3
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int v = 0; v < VECS; v++) sum[r][v] = (vf){};
  for (int64_t s = 0; s < steps; s++, a++, b += PW) {
    Broadcast row[ROWS];
#pragma GCC unroll 3
    for (int r = 0; r < ROWS; r++) row[r] = M::broadcast(a + r * a_row);
#pragma GCC unroll 16
    for (int v = 0; v < VECS; v++) {
      vf right = M::get(b + v / NV * panels.stride + v % NV * VL);
      if (ROWS > 1) hold(right);
#pragma GCC unroll 3
      for (int r = 0; r < ROWS; r++) sum[r][v] = M::madd_broadcast(sum[r][v], row[r], right);
    }
  }
#pragma GCC unroll 3
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 16
    for (int v = 0; v < VECS; v++) {
      float* at = c + v / NV * c_panel + r * PW + v % NV * VL;
      store(at, ADDS ? sum[r][v] + load(at) : sum[r][v]);
    }
}

// The same for `rows` rows, at most ROWS, and two panels or, for one row, four.
template <class M, bool ADDS, int ROWS = ROWS_BY_PANELS>
void sum_panels(int64_t rows, int64_t steps, const typename M::operand* a, int64_t a_row, const PackedPanels<M>& panels,
                float* c, int64_t c_panel) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return sum_panels<M, ADDS, ROWS - 1>(rows, steps, a, a_row, panels, c, c_panel);
  if constexpr (ROWS == 1)
    if (panels.count == MAX_PANELS) return sum_panels<M, 1, MAX_PANELS, ADDS>(steps, a, a_row, panels, c, c_panel);
  sum_panels<M, ROWS, 2, ADDS>(steps, a, a_row, panels, c, c_panel);
}

// More rows take two turns over so few steps of one panel that the second turn reads them from the first cache; each turn
// prefetches its half of steps to come. Measured on Emerald Rapids, four to twelve rows of float32 from memory: 1.15 to 1.8
// times as fast as turns over a stretch, with AVX-512.
constexpr int64_t TURN_STEPS = 32, STEPS_TO_COME = 128, MAX_TURNS_ROWS = 2 * MR;

// Prefetches half of each step of a panel into L2.
struct HalfPrefetch {
  static constexpr int64_t BYTES = PW * (int64_t)sizeof(float) / 2;
  const char* next;
  CH_INLINE void step() {
#pragma GCC unroll 2
    for (int64_t byte = 0; byte < BYTES; byte += LINE_BYTES) prefetch_line(next + byte);
    next += BYTES;
  }
};

// Sums of `rows` rows of A with a panel over `steps` steps, in the order of the GEMM, to C.
template <class M>
void sum_in_turns(int64_t rows, int64_t steps, const typename M::operand* a, int64_t a_row, const typename M::right* b,
                  float* c) {
  const int64_t height = (rows + 1) / 2;
  for (int64_t s = 0; s < steps; s += TURN_STEPS, a += TURN_STEPS, b += TURN_STEPS * PW) {
    const int64_t count = minimum(TURN_STEPS, steps - s);
    for (int64_t r = 0; r < rows; r += height) {
      const int now = (int)minimum(height, rows - r);
      const HalfPrefetch half = {(const char*)(b + STEPS_TO_COME * PW) + (r > 0 ? count * HalfPrefetch::BYTES : 0)};
      const auto multiply = [&]<Update UPDATE>() CH_INLINED {
        gemm_rows<M, NV, UPDATE>(now, count, a + r * a_row, a_row, 1, b, PW, c + r * PW, PW, nullptr, half);
      };
      if (s == 0) multiply.template operator()<SET>();
      else multiply.template operator()<CONTINUE>();
    }
  }
}

// Steps that one pass of axpy reads: each is a memory stream of its own.
constexpr int AXPY_STEPS = 8;

// VL columns of the rows of the matrix, one or two, that form one operand.
template <class M, class IO>
CH_INLINE vf load_operand(const typename IO::type* b, [[maybe_unused]] int64_t ldb, [[maybe_unused]] bool two) {
  if constexpr (M::PACK == 1) {
    return get_vector<IO>(b);
  } else {
#if defined(CH_BF16DOT)
    return (vf)paired(get_halves(b), two ? get_halves(b + ldb) : (vh){});
#endif
  }
}
// The same for the last columns, fewer than VL.
template <class M, class IO>
CH_INLINE vf load_last_operand(const typename IO::type* b, [[maybe_unused]] int64_t ldb, [[maybe_unused]] bool two,
                               int columns) {
  if (columns >= VL) __builtin_unreachable();  // or GCC warns of writing past the end
  typename M::operand padded[VL];
  if constexpr (M::PACK == 1) {
    get_row<IO>(b, columns, padded, VL);
  } else {
#if defined(CH_BF16DOT)
    pair_row(b, two ? b + ldb : nullptr, columns, padded, VL);
#endif
  }
  return M::get(padded);
}

// Adds `operands` operands of ROWS rows of A to their sums with `columns` columns of the matrix, whose rows from `b` on
// are the `steps` steps that remain. Prefetches as many steps after these, if there are any.
template <class M, class IO, int ROWS, class Operands>
CH_INLINE void axpy_steps(Operands operands, int64_t steps, const typename M::operand* a, int64_t a_row,
                          const typename IO::type* b, int64_t ldb, int columns, float* sums, int64_t sums_row) {
  constexpr int LINE = maximum(1, (int)(LINE_BYTES / (VL * sizeof(typename IO::type))));  // vectors per cache line
  const bool more = steps >= 2 * AXPY_STEPS;
  const int count = operands;
  const int whole = columns / VL * VL;
  for (int c = 0; c < columns; c += VL) {
    vf sum[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) sum[r] = load(sums + r * sums_row + c);
#pragma GCC unroll 8
    for (int o = 0; o < count; o++) {
      const typename IO::type* from = b + o * M::PACK * ldb + c;
      if (more && c / VL % LINE == 0)
#pragma GCC unroll 2
        for (int s = 0; s < M::PACK; s++) prefetch_line(from + (AXPY_STEPS + s) * ldb);
      const bool two = (o + 1) * M::PACK <= steps;
      const vf value = c < whole ? load_operand<M, IO>(from, ldb, two)
                                 : load_last_operand<M, IO>(from, ldb, two, columns - c);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; r++) sum[r] = M::madd_broadcast(sum[r], M::broadcast(a + r * a_row + o), value);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) store(sums + r * sums_row + c, sum[r]);
  }
}

// Sums of ROWS rows of A with `columns` columns of a matrix whose rows are the steps, over stretches of `depth`
// operands, to C, rounded up to whole vectors; `sums` has the sums of a stretch, with the same stride.
template <class M, class IO, int ROWS>
void gemv_axpy(int64_t steps, int64_t depth, const typename M::operand* a, int64_t a_row, const typename IO::type* b,
               int64_t ldb, int columns, float* sums, float* c, int64_t ldc) {
  struct All {
    constexpr operator int() const { return AXPY_STEPS / M::PACK; }
  };
  const int64_t operands = row_steps<M>(steps);
  for (int64_t from = 0; from < operands; from += depth) {
    const int64_t to = minimum(operands, from + depth);
    float* stretch = from == 0 ? c : sums;
    for (int r = 0; r < ROWS; r++) memset(stretch + r * ldc, 0, (size_t)round_up(columns, VL) * sizeof(float));
    for (int64_t o = from; o < to; o += All{}) {
      const int64_t step = o * M::PACK, left = steps - step;
      if (minimum(to * M::PACK, steps) - step >= AXPY_STEPS)
        axpy_steps<M, IO, ROWS>(All{}, left, a + o, a_row, b + step * ldb, ldb, columns, stretch, ldc);
      else
        axpy_steps<M, IO, ROWS>((int)(to - o), left, a + o, a_row, b + step * ldb, ldb, columns, stretch, ldc);
    }
    for (int r = 0; r < ROWS && from > 0; r++)
      for (int column = 0; column < columns; column += VL)
        store(c + r * ldc + column, load(sums + r * ldc + column) + load(c + r * ldc + column));
  }
}

}  // namespace CH_NS
