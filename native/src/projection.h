// GEMMs of linear layers: output[rows, columns] = left[rows, steps] right[steps, columns] + bias, in each form that
// forward and backward need, and as a sum of several terms.
//
// Right is packed once, into panels of PW columns that all threads read. With few rows, where packing would dominate,
// each thread packs the panels it multiplies by; with very few rows nothing is packed (GEMV). Left is read in place; if
// it is transposed (the gradient of a weight, whose steps are tokens), or cannot be read as operands, each thread packs
// its block of rows. A block of rows is multiplied by all panels, tile by tile: the tile accumulates in L1, and the
// epilogue applies bias, activation, dropout and rounding, from registers if possible. The order of additions depends
// on the shapes alone, so results are bitwise identical for any number of threads.
#pragma once

#include "activation.h"
#include "gemv.h"

namespace CH_NS {

// Left in place with contiguous steps, or transposed.
template <class M, class IO> class Projection {
  typedef typename M::number number;
  typedef typename IO::type type;

  // Steps whose panel and rows stay in L2 while a tile accumulates.
  static constexpr int64_t DEPTH = 512;
  // Steps that are packed at a time: for weights, whose steps are channels, and for tokens.
  static constexpr int64_t STEPS = 4096, TURNED_STEPS = 2048;
  // Prefetch distance in steps for a transposed left, whose steps are far apart: with a row stride of a power of two
  // its lines share a few L1 sets, and a longer distance would evict lines before they are read.
  static constexpr int64_t PREFETCH_STEPS = 8;
  // Rows of a block, and elements of right that are packed at a time: 16 MiB, a share of the last-level cache.
  static constexpr int64_t BLOCK = 12 * MR, PACKED = int64_t(1) << 22;
  // Rows up to which each thread packs the panels it multiplies by: measured on AVX2, 1.25 to 3 times as fast up to
  // here; beyond, left comes from the last-level cache once per panel.
  static constexpr int64_t FEW = 8 * BLOCK;

  // Rows up to which right is read in place, once for all rows of left (GEMV): packing would take longer than the
  // multiplication. Measured: with AVX-512 two to three times as fast at one row, a tenth at 24 and a fifth if the
  // weight is large; with AVX2 twice as fast at one row and a tenth at eight rows of float32 or 16 of 16 bits, slower
  // from twice as many on, and slower from eight rows on with fewer steps than DOTTED_SHORT, because the horizontal
  // sums then dominate.
  static constexpr int64_t DOTTED = VL == 16 ? 24 : VL == 4 ? 4 : __is_same(IO, Float32) ? 8 : 16;
  static constexpr int64_t DOTTED_SHORT = 4, LONG = 256;
  // The same if right's rows are steps (axpy), and the columns that are accumulated at a time, whose sums stay in
  // cache. bf16 pairs would need two rows of right each: 16-bit types are widened to float32.
  static constexpr int ACROSS_ROWS = M::PAIR == 2 ? 4 : 8;
  static constexpr int64_t STRIPE = 1024;

  // A range of one term's steps; `first` is its offset in the packed panels, in operands.
  struct Piece {
    const ch_term* term;
    int64_t from, count, first;
    CH_INLINE int64_t steps() const { return row_steps<M>(count); }
  };
  // Pieces that are packed together.
  struct Group {
    Piece pieces[CH_MAX_TERMS];
    int count;
    int64_t steps;  // of all pieces, each rounded up to whole vectors
    bool first, last;
  };

  const ch_projection& w;
  int threads;
  int64_t block, blocks, wide, at_once;
  bool direct, few, dotted, across;
  number* packed;
  float* sums;
  float* totals;
  int64_t sums_row;

 public:
  explicit Projection(const ch_projection& work) : w(work), at_once(0), packed(nullptr), sums(nullptr), totals(nullptr), sums_row(0) {
    double steps = 0;
    for (int t = 0; t < w.num_terms; t++) steps += (double)w.terms[t].steps;
    threads = threads_for(w, 2.0 * (double)w.rows * (double)w.columns * steps);
    wide = round_up(w.columns, PW) / PW;
    // Independent of the threads: GEMV adds in another order than panels do.
    dotted = !w.left_turned && may_dot();
    across = !w.left_turned && !w.right_turned && w.num_terms == 1 && w.terms[0].steps > 0 && w.rows <= ACROSS_ROWS;
    few = dotted || across || (w.rows <= FEW && wide >= 2 * threads && !w.left_turned);
    block = few ? block_of(w.rows, 1) : block_of(w.rows, threads);
    blocks = (w.rows + block - 1) / block;
    direct = !w.left_turned && in_place();
  }

  int run() {
    // Without packing there is one group.
    const int64_t most_steps = dotted || across ? INT64_MAX / 4 : w.left_turned ? TURNED_STEPS : STEPS;
    if (!few && !keep_packed(room_of(most_steps))) return CH_NO_MEMORY;
    Group group;
    next_group(group, nullptr, most_steps);
    if (!group.last && !keep_sums()) return CH_NO_MEMORY;
    for (;;) {
      if (across ? !multiply_across(group) : few ? !multiply_few(group) : !multiply_many(group)) return CH_NO_MEMORY;
      if (group.last) break;
      next_group(group, &group, most_steps);
    }
    clearhead::trim_scratch();
    return CH_OK;
  }

 private:
  // Block height that minimises the rows of the busiest thread.
  static int64_t block_of(int64_t rows, int threads) {
    int64_t best = MR, least_rows = INT64_MAX;
    for (int64_t block = BLOCK; block >= (threads > 1 ? BLOCK / 2 : BLOCK); block -= MR) {
      const int64_t rows_a_thread = ((rows + block - 1) / block + threads - 1) / threads * block;
      if (rows_a_thread < least_rows) best = block, least_rows = rows_a_thread;
    }
    // At most the rows there are.
    return least(best, most((int64_t)MR, round_up((rows + threads - 1) / threads, MR)));
  }

  // Steps of the largest group.
  int64_t room_of(int64_t most_steps) const {
    int64_t steps = 0;
    for (int t = 0; t < w.num_terms; t++) steps += round_up(row_steps<M>(w.terms[t].steps), VL);
    return least(steps, most_steps);
  }

  // Whether left can be read in place as operands.
  bool in_place() const {
    if constexpr (!__is_same(IO, Float32)) {
      if (M::PAIR == 1) return false;
      for (int t = 0; t < w.num_terms; t++) {
        const ch_term& term = w.terms[t];
        if (term.steps % M::PAIR || term.left_row % M::PAIR || (uintptr_t)term.left % sizeof(number)) return false;
      }
    }
    return true;
  }

  // Whether rows of right can be read in place.
  bool may_dot() const {
    const ch_term& term = w.terms[0];
    if (w.num_terms != 1 || !w.right_turned || term.steps <= 0) return false;
    // Both sides are read as bf16 pairs.
    if (M::PAIR == 2 && (!in_place() || term.right_row % M::PAIR || (uintptr_t)term.right % sizeof(number))) return false;
    return term.steps % (VL * M::PAIR) == 0 && w.rows <= (term.steps >= LONG ? DOTTED : DOTTED_SHORT);
  }

  // Allocates the panels of right that are packed at a time.
  bool keep_packed(int64_t panel_steps) {
    at_once = least(wide, most((int64_t)1, PACKED / (panel_steps * PW + 1)));
    packed = (number*)scratch(clearhead::SLOT_SHARED, (size_t)(at_once * panel_steps * PW) * sizeof(number) + 64);
    return packed != nullptr;
  }

  bool multiply_many(const Group& group) {
    for (int64_t panel = 0; panel < wide; panel += at_once) {
      const int64_t count = least(at_once, wide - panel);
      if (!pack(group, panel, count) || !multiply(group, panel, count)) return false;
    }
    return true;
  }

  // Allocates float32 sums of the output and of row sums, for GEMMs in several groups of steps.
  bool keep_sums() {
    sums_row = round_up(w.columns, VL);
    sums = (float*)scratch(clearhead::SLOT_PARTIAL, (size_t)(w.rows * (sums_row + 1)) * sizeof(float));
    totals = sums + w.rows * sums_row;
    return sums != nullptr;
  }

  // The pieces after those of the previous group, up to `most_steps`.
  void next_group(Group& group, const Group* before, int64_t most_steps) const {
    int term = 0;
    int64_t from = 0;
    group.first = before == nullptr;
    if (before != nullptr) {
      const Piece& done = before->pieces[before->count - 1];
      term = (int)(done.term - w.terms);
      from = done.from + done.count;
    }
    group.count = 0;
    group.steps = 0;
    for (; term < w.num_terms; term++, from = 0) {
      const ch_term& term_here = w.terms[term];
      const int64_t remaining = (most_steps - group.steps) * M::PAIR;
      const int64_t count = least(remaining, term_here.steps - from);
      if (count > 0) {
        group.pieces[group.count++] = Piece{&term_here, from, count, group.steps};
        group.steps += round_up(row_steps<M>(count), VL);
      }
      if (from + count < term_here.steps) break;
    }
    group.last = term == w.num_terms;
  }

  bool pack(const Group& group, int64_t panel, int64_t count) {
    Fault fault;
    parallel(threads, count, [&](int64_t p) {
      if (!pack_panel(group, panel + p, packed + p * group.steps * PW)) fault.set(CH_NO_MEMORY);
    });
    return fault.get() == CH_OK;
  }

  bool pack_panel(const Group& group, int64_t panel, number* packed) const {
    const int64_t column = panel * PW;
    const int columns = (int)least((int64_t)PW, w.columns - column);
    for (int i = 0; i < group.count; i++) {
      const Piece& piece = group.pieces[i];
      const type* right = (const type*)piece.term->right;
      number* to = packed + piece.first * PW;
      if (w.right_turned) {
        const int64_t staged_numbers = VL * row_numbers<M>((int)piece.count);
        number* staged = (number*)scratch(clearhead::SLOT_WORK, (size_t)staged_numbers * sizeof(number));
        if (staged == nullptr) return false;
        pack_panels<M, IO>(right + column * piece.term->right_row + piece.from, piece.term->right_row, columns,
                           (int)piece.count, to, staged);
      } else {
        pack_rows<M, IO>(right + piece.from * piece.term->right_row + column, piece.term->right_row, (int)piece.count,
                         columns, to, Panels(PW, group.steps));
      }
    }
    return true;
  }

  // Few rows: right is read once, and each panel is packed by the thread that multiplies by it and stays in that
  // thread's cache.
  bool multiply_few(const Group& group) {
    // Each part packs left again if left must be packed.
    const int64_t parts = least(wide, (int64_t)(direct ? 4 : 1) * threads), per_part = (wide + parts - 1) / parts;
    Fault fault;
    parallel(threads, parts, [&](int64_t part) {
      const int64_t laid = direct ? 0 : w.rows * left_row(group);
      float* tile = (float*)scratch(clearhead::SLOT_COLUMNS, (size_t)(block * PW + laid) * sizeof(float));
      const int64_t panel = dotted ? 0 : group.steps * PW;
      number* panel_tile = (number*)scratch(clearhead::SLOT_KEYS, (size_t)panel * sizeof(number) + 64);
      if (tile == nullptr || panel_tile == nullptr) return fault.set(CH_NO_MEMORY);
      number* left = (number*)(tile + block * PW);
      if (!direct) lay_out(group, 0, w.rows, left, false);
      if constexpr (M::PAIR == 1 && Widened<IO>::AT_ONCE == 2)
        for (int64_t row = 0; row < w.rows && dotted; row++)
          Widened<IO>::arrange(left + row * left_row(group), (int)(w.terms[0].steps / VL));
      DropoutMask mask;
      for (int64_t p = part * per_part; p < least(wide, (part + 1) * per_part); p++) {
        if (!dotted && !pack_panel(group, p, panel_tile)) return fault.set(CH_NO_MEMORY);
        for (int64_t row = 0; row < w.rows; row += block) {
          const int64_t rows = least(block, w.rows - row);
          if (group.last && drops()) mask.find(w, row, rows, p * PW);
          if (dotted) dotted_tile(group, left + row * left_row(group), row, rows, p * PW, tile, mask);
          else tile_of(group, panel_tile, left + row * left_row(group), row, rows, p * PW, tile, mask);
        }
      }
    });
    return fault.get() == CH_OK;
  }

  // Very few rows by right in place, with steps as rows: each thread accumulates its stripes of columns.
  bool multiply_across(const Group& group) {
    const ch_term& term = w.terms[0];
    const int64_t least_parts = (w.columns + STRIPE - 1) / STRIPE, parts = least(wide, round_up(least_parts, threads));
    const int64_t stripe = (wide + parts - 1) / parts * PW;
    Fault fault;
    parallel(threads, parts, [&](int64_t part) {
      const int64_t first = part * stripe, count = least(stripe, w.columns - first);
      if (count <= 0) return;
      float* sums = (float*)scratch(clearhead::SLOT_COLUMNS,
                                    (size_t)(ACROSS_ROWS * (STRIPE + PW) + w.rows * term.steps + VL) * sizeof(float));
      if (sums == nullptr) return fault.set(CH_NO_MEMORY);
      float *tile = sums + ACROSS_ROWS * STRIPE, *floats = tile + ACROSS_ROWS * PW;
      const float* left = floats;
      int64_t left_row = term.steps;
      if constexpr (__is_same(IO, Float32)) left = (const float*)term.left, left_row = term.left_row;
      else
        for (int64_t r = 0; r < w.rows; r++)
          for (int64_t s = 0; s < term.steps; s++)
            floats[r * term.steps + s] = get_one<IO>((const type*)term.left + r * term.left_row + s);
      const type* right = (const type*)term.right + first;
      across_rows<ACROSS_ROWS>(left, left_row, right, (int)count, sums);
      DropoutMask mask;
      for (int64_t column = first; column < first + count; column += PW) {
        const int columns = (int)least((int64_t)PW, first + count - column);
        for (int64_t r = 0; r < w.rows; r++)
          memcpy(tile + r * PW, sums + r * STRIPE + column - first, (size_t)round_up(columns, VL) * sizeof(float));
        float bias[PW] = {};
        if (w.bias != nullptr) get_row<IO>((const type*)w.bias + column, columns, bias, PW);
        if (drops()) mask.find(w, 0, w.rows, column);
        finish(group, Way{0, column, columns, w.bias != nullptr ? bias : nullptr, mask}, 0, w.rows, tile);
      }
    });
    return fault.get() == CH_OK;
  }
  template <int ROWS>
  void across_rows(const float* left, int64_t left_row, const type* right, int count, float* sums) const {
    if constexpr (ROWS > 1)
      if (w.rows < ROWS) return across_rows<ROWS - 1>(left, left_row, right, count, sums);
    add_across<IO, ROWS>(w.terms[0].steps, left, left_row, right, w.terms[0].right_row, count, sums, STRIPE);
  }

  // Blocks of rows, and of panels if there are fewer blocks than threads; halved if that is free, so that no thread
  // waits for the last block of another.
  bool multiply(const Group& group, int64_t panel, int64_t count) {
    const int64_t parts = least(count, most((2 * threads + blocks - 1) / blocks, (int64_t)(direct && threads > 1 ? 2 : 1)));
    const int64_t per_part = (count + parts - 1) / parts;
    Fault fault;
    parallel(threads, blocks * parts, [&](int64_t unit) {
      const int64_t row = unit / parts * block, rows = least(block, w.rows - row);
      const int64_t first = unit % parts * per_part, end = least(count, first + per_part);
      const int64_t laid = direct ? 0 : round_up(block, VL) * left_row(group);
      float* tile = (float*)scratch(clearhead::SLOT_WORK, (size_t)(block * PW + laid) * sizeof(float));
      if (tile == nullptr) return fault.set(CH_NO_MEMORY);
      number* left = (number*)(tile + block * PW);
      if (!direct) lay_out(group, row, rows, left, panel == 0 && first == 0);
      DropoutMask mask;
      for (int64_t p = first; p < end; p++) {
        const int64_t column = (panel + p) * PW;
        if (group.last && drops()) mask.find(w, row, rows, column);
        tile_of(group, packed + p * group.steps * PW, left, row, rows, column, tile, mask);
      }
    });
    return fault.get() == CH_OK;
  }

  // Whether to draw dropout: a relu's output is already 0 at dropped elements.
  CH_INLINE bool drops() const { return w.dropped > 0 && w.gate == nullptr; }

  // The dropout mask of a block of rows, for the columns of one draw.
  struct DropoutMask {
    int64_t group = -1, first = -1;
    KeptBits rows_kept[BLOCK];

    void find(const ch_projection& w, int64_t row, int64_t rows, int64_t column) {
      if (column / PLACES == group && row == first) return;
      group = column / PLACES, first = row;
      for (int64_t r = 0; r < rows; r++) rows_kept[r].find(draw_of(w.seed, w.dropped, row + r, group), (uint32_t)group);
    }
    CH_INLINE vf of(int64_t r, int64_t column, vf number) const {
      return where_bits(rows_kept[r].from((int)(column % PLACES)), number);
    }
  };

  CH_INLINE int vectors(int64_t column) const {
    return (int)(round_up(least((int64_t)PW, w.columns - column), VL) / VL);
  }
  // Row stride of a packed left: not a power of two, so rows do not share a few cache sets.
  CH_INLINE int64_t left_row(const Group& group) const { return group.steps + VL; }

  // A block of rows times a panel, over ranges of DEPTH steps; after the last range the epilogue runs while the tile is
  // in L1.
  void tile_of(const Group& group, const number* right, const number* laid, int64_t row, int64_t rows, int64_t column,
               float* tile, const DropoutMask& mask) const {
    const int columns = (int)least((int64_t)PW, w.columns - column), vecs = vectors(column);
    float bias[PW] = {};
    const bool biased = group.last && w.bias != nullptr;
    if (biased) get_row<IO>((const type*)w.bias + column, columns, bias, PW);
    const Way way = {row, column, columns, biased ? bias : nullptr, mask};
    // Epilogues without transcendentals or a second operand run from registers.
    const bool simple = w.activation <= CH_RELU && w.slope == nullptr && w.dropped == 0 && w.gate == nullptr;
    const bool plain = group.first && group.last && simple && columns % VL == 0;
    bool started = false;
    for (int i = 0; i < group.count; i++) {
      const Piece& piece = group.pieces[i];
      const int64_t stride = direct ? piece.term->left_row / M::PAIR : left_row(group);
      const number* left = direct ? (const number*)((const type*)piece.term->left + row * piece.term->left_row) +
                                        piece.from / M::PAIR
                                  : laid + piece.first;
      for (int64_t s = 0; s < piece.steps(); s += DEPTH, started = true) {
        const int64_t steps = least(DEPTH, piece.steps() - s);
        const number* b = right + (piece.first + s) * PW;
        const bool leave = i == group.count - 1 && s + steps == piece.steps();
        if (leave) expect(group, way, 0, least((int64_t)2 * MR, rows));
        for (int64_t r = 0; r < rows; r += MR) {
          const int count = (int)least((int64_t)MR, rows - r);
          const number* a = left + r * stride + s;
          if (leave) expect(group, way, r + 2 * MR, least(r + 3 * MR, rows));
          if (leave && plain) {
            type* output = (type*)w.output + (row + r) * w.output_row + column;
            const Out out = {output, w.output_row, started ? tile + r * PW : nullptr, bias, w.activation == CH_RELU};
            leaving_product(count, vecs, steps, a, stride, b, out);
            continue;
          }
          if (started) product<M, ADD>(count, vecs, steps, a, stride, 1, b, PW, tile + r * PW, PW);
          else product<M, SET>(count, vecs, steps, a, stride, 1, b, PW, tile + r * PW, PW);
          if (leave) finish(group, way, r, r + count, tile);
        }
      }
    }
    if (started) return;
    memset(tile, 0, (size_t)(rows * PW) * sizeof(float));
    finish(group, way, 0, rows, tile);
  }

  // The same with rows of right in place (GEMV).
  void dotted_tile(const Group& group, const number* laid, int64_t row, int64_t rows, int64_t column, float* tile,
                   const DropoutMask& mask) const {
    const int columns = (int)least((int64_t)PW, w.columns - column);
    float bias[PW] = {};
    if (w.bias != nullptr) get_row<IO>((const type*)w.bias + column, columns, bias, PW);
    memset(tile, 0, (size_t)(rows * PW) * sizeof(float));
    const ch_term& term = w.terms[0];
    const int vectors = (int)(row_steps<M>(term.steps) / VL);
    const type* right = (const type*)term.right + column * term.right_row;
    const number* left = direct ? (const number*)((const type*)term.left + row * term.left_row) : laid;
    const int64_t left_stride = direct ? term.left_row / M::PAIR : left_row(group);
    if constexpr (M::PAIR == 2 || __is_same(IO, Float32))
      dots<M>((int)rows, left, left_stride, (const number*)right, term.right_row / M::PAIR, columns, vectors, tile, PW, false);
    else
      dots<Widened<IO>>((int)rows, left, left_stride, right, term.right_row, columns, vectors, tile, PW, false);
    finish(group, Way{row, column, columns, w.bias != nullptr ? bias : nullptr, mask}, 0, rows, tile);
  }

  // Destination of the sums of a few rows: with bias and relu, rounded, to the output. `before` has the sums of earlier
  // steps.
  struct Out {
    type* output;
    int64_t row;
    const float* before;
    const float* bias;
    bool relu;
  };

  template <int ROWS, int VECS>
  static CH_INLINE void leaving_block(int64_t steps, const number* a, int64_t a_row, const number* b, const Out& out) {
    const vf lowest = out.relu ? (vf){} : all(-INF);
    sums_of<M, ROWS, VECS>(steps, a, a_row, 1, b, PW, [&](int r, int v, vf sum) CH_INLINED {
      if (out.before != nullptr) sum += load(out.before + r * PW + v * VL);
      sum += load(out.bias + v * VL);
      put_vector<IO>(out.output + r * out.row + v * VL, sum < lowest ? lowest : sum);
    });
  }

  template <int VECS>
  static __attribute__((noinline)) void leaving_rows(int rows, int64_t steps, const number* a, int64_t a_row,
                                                     const number* b, const Out& out) {
    switch (rows) {
      case 6: return leaving_block<6, VECS>(steps, a, a_row, b, out);
      case 5: return leaving_block<5, VECS>(steps, a, a_row, b, out);
      case 4: return leaving_block<4, VECS>(steps, a, a_row, b, out);
      case 3: return leaving_block<3, VECS>(steps, a, a_row, b, out);
      case 2: return leaving_block<2, VECS>(steps, a, a_row, b, out);
      default: return leaving_block<1, VECS>(steps, a, a_row, b, out);
    }
  }

  // The micro-kernel with its epilogue in registers.
  static CH_INLINE void leaving_product(int rows, int vecs, int64_t steps, const number* a, int64_t a_row,
                                        const number* b, const Out& out) {
    if constexpr (NV == 4) {
      if (vecs == 4) return leaving_rows<4>(rows, steps, a, a_row, b, out);
      if (vecs == 3) return leaving_rows<3>(rows, steps, a, a_row, b, out);
    }
    if (vecs == 2) return leaving_rows<2>(rows, steps, a, a_row, b, out);
    return leaving_rows<1>(rows, steps, a, a_row, b, out);
  }

  // The position of a tile.
  struct Way {
    int64_t row, column;
    int columns;
    const float* bias;
    const DropoutMask& mask;
  };

  // Prefetches the lines that the epilogue of the tile reads and writes.
  CH_INLINE void expect(const Group& group, const Way& way, int64_t from, int64_t to) const {
    for (int64_t r = way.row + from; r < way.row + to; r++) {
      const int64_t bytes = way.columns * (int64_t)(group.last ? sizeof(type) : sizeof(float));
      const auto ask = [&](const void* line, int written) CH_INLINED {
        for (int64_t byte = 0; byte < bytes; byte += 64)
          if (written) __builtin_prefetch((const char*)line + byte, 1);
          else __builtin_prefetch((const char*)line + byte);
      };
      if (!group.last) {
        ask(sums + r * sums_row + way.column, 1);
        continue;
      }
      ask((const type*)w.output + r * w.output_row + way.column, 1);
      if (w.slope != nullptr) ask((const type*)w.slope + r * w.slope_row + way.column, 1);
      if (w.gate != nullptr) ask((const type*)w.gate + r * w.gate_row + way.column, 0);
      if (w.slope_gate != nullptr) ask((const type*)w.slope_gate + r * w.slope_gate_row + way.column, 0);
    }
  }

  // The epilogue of one vector of sums: gates, or activation and dropout.
  CH_INLINE vf through_gate(vf sum, vf gate, vf slope_gate, vf& slope) const {
    slope = sum * slope_gate;
    if (w.gate_kind == CH_GATE_SLOPE) return sum * gate;
    // NaN in the gate propagates.
    const vf open = w.dropped > 0 ? sum * all(dropout_factor(w.dropped)) : sum;
    return gate <= (vf){} ? (vf){} : open;
  }
  CH_INLINE vf activated(const Way& way, int64_t r, int c, vf sum, vf& slope) const {
    vf number = activation_of(w.activation, sum, slope);
    if (w.dropped == 0) return number;
    const vf factor = all(dropout_factor(w.dropped));
    slope = way.mask.of(r, way.column + c, slope * factor);
    return way.mask.of(r, way.column + c, number * factor);
  }

  // The epilogue of rows of a tile: to the partial sums, or the final sums through the epilogue, rounded, to the
  // output.
  void finish(const Group& group, const Way& way, int64_t from, int64_t to, const float* tile) const {
    for (int64_t r = from; r < to; r++) {
      const int64_t row = way.row + r;
      const float* tile_row = tile + r * PW;
      float* sum = sums + row * sums_row + way.column;
      type* output = (type*)w.output + row * w.output_row + way.column;
      type* slope = w.slope == nullptr ? nullptr : (type*)w.slope + row * w.slope_row + way.column;
      const type* gate = w.gate == nullptr ? nullptr : (const type*)w.gate + row * w.gate_row + way.column;
      const type* slope_gate =
          w.slope_gate == nullptr ? nullptr : (const type*)w.slope_gate + row * w.slope_gate_row + way.column;
      for (int c = 0; c < way.columns; c += VL) {
        vf number = load(tile_row + c), grows;
        if (!group.first) number += load(sum + c);
        if (!group.last) {
          store(sum + c, number);
          continue;
        }
        if (way.bias != nullptr) number += load(way.bias + c);
        const int columns = way.columns - c;
        const bool whole = columns >= VL;
        float padded[VL];
        const auto read = [&](const type* from) CH_INLINED {
          if (from == nullptr) return (vf){};
          if (whole) return get_vector<IO>(from + c);
          get_row<IO>(from + c, columns, padded, VL);
          return load(padded);
        };
        if (gate == nullptr) number = activated(way, r, c, number, grows);
        else number = through_gate(number, read(gate), read(slope_gate), grows);
        if (whole) {
          put_vector<IO>(output + c, number);
          if (slope != nullptr) put_vector<IO>(slope + c, grows);
          continue;
        }
        store(padded, number);
        put_row<IO>(output + c, columns, padded, 1.0f);
        if (slope == nullptr) continue;
        store(padded, grows);
        put_row<IO>(slope + c, columns, padded, 1.0f);
      }
    }
  }

  // Packs rows [row, row + rows) of left with contiguous steps.
  void lay_out(const Group& group, int64_t row, int64_t rows, number* to, bool counts) const {
    float counted[BLOCK + VL] = {};
    for (int i = 0; i < group.count; i++) {
      const Piece& piece = group.pieces[i];
      const type* left = (const type*)piece.term->left;
      const int64_t stride = piece.term->left_row;
      if (w.left_turned) {
        turn(left + piece.from * stride + row, stride, piece.count, (int)rows, to + piece.first, left_row(group),
             counted);
      } else {
        for (int64_t r = 0; r < rows; r++)
          get_numbers<M, IO>(left + (row + r) * stride + piece.from, (int)piece.count,
                             to + r * left_row(group) + piece.first, (int)round_up(piece.steps(), VL));
      }
    }
    if (counts && w.row_sums != nullptr) count_rows(group, row, rows, counted);
  }

  // Transposes steps with contiguous rows to rows with contiguous steps; adds each row's elements to `counted`.
  static void turn(const type* from, int64_t stride, int64_t count, int rows, number* to, int64_t to_row,
                   float* counted) {
    const int wide = (int)round_up(rows, VL);
    const number one = unit();
    number staged[VL * (BLOCK + VL)];
    for (int64_t s = 0; s < row_steps<M>(count); s += VL) {
      for (int64_t r = 0; r < VL; r++) {
        const int64_t step = (s + r) * M::PAIR;
        number* staged_row = staged + r * wide;
        ask_for(from, stride, step + PREFETCH_STEPS * M::PAIR, count, rows);
        if (step >= count) memset(staged_row, 0, (size_t)wide * sizeof(number));
        else if constexpr (M::PAIR == 1) get_row<IO>(from + step * stride, rows, staged_row, wide);
        else pair_row(from + step * stride, step + 1 < count ? from + (step + 1) * stride : nullptr, rows, staged_row, wide);
      }
      for (int c = 0; c < wide; c += VL) {
        vf sum = load(counted + c);
        for (int64_t r = 0; r < VL; r++) sum = M::madd_spread(sum, M::spread(&one), M::get(staged + r * wide + c));
        store(counted + c, sum);
        transpose_block((const uint32_t*)staged + c, wide, (uint32_t*)to + c * to_row + s, to_row);
      }
    }
  }

  // Prefetches the lines of the steps that form an operand.
  static CH_INLINE void ask_for(const type* from, int64_t stride, int64_t step, int64_t count, int rows) {
    for (int64_t last = least(count, step + M::PAIR); step < last; step++)
      for (int64_t byte = 0; byte < rows * (int64_t)sizeof(type); byte += 64)
        __builtin_prefetch((const char*)(from + step * stride) + byte);
  }

  // The operand 1: a pair of ones for bf16.
  static CH_INLINE number unit() {
    if constexpr (M::PAIR == 1) return 1.0f;
    else return 0x3f803f80u;
  }

  void count_rows(const Group& group, int64_t row, int64_t rows, float* counted) const {
    if (!group.first)
      for (int64_t r = 0; r < rows; r++) counted[r] += totals[row + r];
    if (group.last) put_row<IO>((type*)w.row_sums + row, (int)rows, counted, 1.0f);
    else memcpy(totals + row, counted, (size_t)rows * sizeof(float));
  }
};

}  // namespace CH_NS
