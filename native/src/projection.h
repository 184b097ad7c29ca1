// GEMMs of linear layers: output[rows, columns] = left[rows, steps] right[steps, columns] + bias, in each form that
// forward and backward need, and as a sum of several terms.
//
// Right is packed once a call, or before (`panels`), into panels of PW columns that all threads read. With few rows, where packing would dominate,
// each thread packs the panels it multiplies by; with very few rows nothing is packed (GEMV). Left is read in place; if
// it is transposed (the gradient of a weight, whose steps are tokens), or cannot be read as operands, each thread packs
// its block of rows. A block of rows is multiplied by all panels, tile by tile: the tile accumulates in L1, and the
// epilogue applies bias, activation, dropout and rounding, from registers if possible. Every sum runs over stretches of
// steps, one step after the other, whatever the numbers of rows and threads; only the dot products of very few rows add
// in another order, and in invariant mode they do not run.
#pragma once

#include "activation.h"
#include "few_rows.h"
#include "invariance.h"

namespace CH_NS {

// M multiplies operands (Fp32Fma, Bf16Dot or AmxTile); IO is the dtype in memory.
template <class M, class IO> class Projection {
  typedef typename M::operand operand;
  typedef typename IO::type type;

  static constexpr int MR = M::HEIGHT;
  static constexpr bool TILES = in_tiles<M>();
  // Operands of a stretch: its panel and rows stay in L2 while a tile accumulates; for matrix tiles in L1.
  static constexpr int64_t DEPTH = TILES ? 128 : 512;
  // Steps that are packed at a time: for weights, whose steps are channels, and for tokens.
  static constexpr int64_t STEPS = 4096, TRANSPOSED_STEPS = 2048;
  // Prefetch distance in steps for a transposed left, whose steps are far apart: with a row stride of a power of two
  // its lines share a few L1 sets, and a longer distance would evict lines before they are read.
  static constexpr int64_t PREFETCH_STEPS = 8;
  // Rows of a block, and elements of right that are packed at a time: 16 MiB, a share of the last-level cache.
  static constexpr int64_t BLOCK = 12 * MR, PACKED_OPERANDS = int64_t(1) << 22;
  // Rows up to which each thread packs the panels it multiplies by: measured on AVX2, 1.25 to 3 times as fast up to
  // here; beyond, left comes from the last-level cache once per panel.
  static constexpr int64_t MAX_FEW_ROWS = 576;
  // Rows with which they prefetch what they read after a panel: measured on AVX2, 1.2 to 1.4 times as fast with 8 to 24
  // rows, 1.02 to 1.07 with 128, and no gain beyond unless it was packed before; 0.97 with one or two.
  static constexpr int64_t MIN_PREFETCHING_ROWS = 3, MAX_PREFETCHING_ROWS = 128;
  // Whether any number of rows prefetches panels that were packed before: whole encoders took 0.97 to 1.00 of the time on
  // AVX2, and once 0.92 while other machines took a share of the memory. Not measured with other widths.
  static constexpr bool PREFETCHES_PANELS = VL == 8;

  // Rows up to which right is read in place, once for all rows of left (GEMV): packing would take longer than the
  // multiplication. Measured: with AVX-512 two to three times as fast at one row, a tenth at 24 and a fifth if the
  // weight is large; with AVX2 twice as fast at one row and a tenth at eight rows of float32 or 16 of 16 bits, slower
  // from twice as many on. With fewer than LONG_STEPS steps it is slower from eight rows on: horizontal sums dominate.
  static constexpr int64_t MAX_DOT_ROWS = VL == 16 ? CH_NS::MAX_DOT_ROWS : VL == 4 ? 4 : __is_same(IO, Float32) ? 8 : 16;
  static constexpr int64_t MAX_DOT_ROWS_SHORT = 4, LONG_STEPS = 256;
  // Columns of dot products before their epilogue, a multiple of PW: four streams of memory.
  static constexpr int64_t DOT_COLUMNS = 256;
  // A larger right is taken for one in memory.
  static constexpr int64_t FAR_BYTES = 3 << 20;
  // The same with rows of right that are transposed in registers, in the order of the panels: measured, faster than
  // panels up to here with AVX-512 and AVX2. With AVX-512, two to eight rows of float32 take 0.7 to 1.1 times as long as
  // dot products where these are shorter than LONG_STEPS, and do not run; 1.03 to 1.8 times where they are longer.
  static constexpr int64_t MAX_ACROSS_ROWS = TILES ? MR : VL == 16 ? (__is_same(IO, Float32) ? 16 : 24) : 8;
  // In tiles, rows of right in place are A, and left is B: nothing is transposed but left.
  static constexpr bool REPLACES_DOT = VL == 16 && __is_same(IO, Float32);
  // The same if right's rows are steps (axpy), and the columns that are accumulated at a time, whose sums stay in
  // cache.
  static constexpr int AXPY_ROWS = M::PACK == 2 ? 4 : 8;
  static constexpr int64_t STRIPE = 1024;
  // Steps of a panel's columns that are unpacked at a time.
  static constexpr int64_t UNPACKED_STEPS = 16;

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
    int64_t steps;  // of all pieces, each rounded up to a multiple of LANES: that decides where a group ends
    bool first, last;
  };

  const ch_projection& w;
  int threads;
  int64_t block, blocks, num_panels, panels_at_once;
  bool left_in_place, few_rows, uses_dot, uses_across, uses_axpy;
  operand* packed;  // panels of right, packed by this call
  const operand* panels;  // those that are multiplied by: packed by this call or before
  float* sums;
  float* totals;
  int64_t sums_row;

 public:
  explicit Projection(const ch_projection& work) : w(work), panels_at_once(0), packed(nullptr),
      panels((const operand*)work.panels), sums(nullptr),
      totals(nullptr), sums_row(0) {
    double steps = 0;
    for (int t = 0; t < w.num_terms; t++) steps += (double)w.terms[t].steps;
    threads = threads_for(w, 2.0 * (double)w.rows * (double)w.columns * steps);
    num_panels = round_up(w.columns, PW) / PW;
    const bool one_term = !w.left_transposed && w.num_terms == 1 && w.terms[0].steps > 0 && panels == nullptr;
    const bool invariant = clearhead::is_invariant();
    // Independent of the threads: dot products add in another order than panels do.
    const bool replaces_dot = REPLACES_DOT && w.rows > 1 && w.rows <= ACROSS_ROWS && w.terms[0].steps < LONG_STEPS;
    uses_across = one_term && w.right_transposed && (invariant || TILES ? w.rows <= MAX_ACROSS_ROWS : replaces_dot) &&
                  w.terms[0].steps % (operands_across<M, IO>() * M::PACK) == 0;
    uses_dot = one_term && !invariant && !TILES && !uses_across && can_use_dot();
    uses_axpy = one_term && !TILES && !w.right_transposed && w.rows <= AXPY_ROWS;
    few_rows = in_place() || (w.rows <= MAX_FEW_ROWS && num_panels >= 2 * threads && !w.left_transposed);
    block = few_rows ? block_of(w.rows, 1) : block_of(w.rows, threads);
    blocks = (w.rows + block - 1) / block;
    left_in_place = !w.left_transposed && left_readable();
  }

  int run() {
    // If nothing is packed there is one group.
    const int64_t max_steps = in_place() || panels != nullptr ? INT64_MAX / 4 : w.left_transposed ? TRANSPOSED_STEPS : STEPS;
    if (panels != nullptr) panels_at_once = num_panels;
    else if (!few_rows && !allocate_panels(max_group_steps(max_steps))) return CH_NO_MEMORY;
    Group group;
    next_group(group, nullptr, max_steps);
    if (!group.last && !allocate_sums()) return CH_NO_MEMORY;
    for (;;) {
      if (uses_axpy ? !multiply_axpy(group) : few_rows ? !multiply_few(group) : !multiply_many(group)) return CH_NO_MEMORY;
      if (group.last) break;
      next_group(group, &group, max_steps);
    }
    clearhead::trim_scratch();
    return CH_OK;
  }

  // Packs the right of the only term into `output`.
  int pack_right() {
    Group group;
    next_group(group, nullptr, INT64_MAX / 4);
    packed = (operand*)w.output;
    return pack(group, 0, num_panels) ? CH_OK : CH_NO_MEMORY;
  }

  // Writes the right of the only term, in rows of steps, from the panels. Panels that widen have no way back.
  int unpack_right() {
    if constexpr (sizeof(operand) != M::PACK * sizeof(type)) return CH_BAD_OPTION;
    const int64_t steps = w.terms[0].steps, operands = panel_bytes(steps, 1) / (PW * (int64_t)sizeof(operand));
    parallel(threads, num_panels, [&](int64_t p) {
      const type* from = (const type*)(panels + p * operands * PW);
      type* to = (type*)w.output + p * PW * w.output_row;
      const int64_t columns = minimum((int64_t)PW, w.columns - p * PW);
      // A few steps of every column at a time stay in L1.
      for (int64_t first = 0; first < steps; first += UNPACKED_STEPS)
        for (int64_t c = 0; c < columns; c++)
          for (int64_t s = first; s < minimum(first + UNPACKED_STEPS, steps); s++)
            to[c * w.output_row + s] = from[(s / M::PACK * PW + c) * M::PACK + s % M::PACK];
    });
    return CH_OK;
  }

  static int64_t panel_bytes(int64_t steps, int64_t columns) {
    return round_up(row_steps<M>(steps), LANES) * round_up(columns, PW) * (int64_t)sizeof(operand);
  }

  static int64_t panel_columns() { return PW; }

 private:
  // Block height that minimises the rows of the busiest thread.
  static int64_t block_of(int64_t rows, int threads) {
    int64_t best = MR, min_rows = INT64_MAX;
    for (int64_t block = BLOCK; block >= (threads > 1 ? BLOCK / 2 : BLOCK); block -= MR) {
      const int64_t rows_per_thread = ((rows + block - 1) / block + threads - 1) / threads * block;
      if (rows_per_thread < min_rows) best = block, min_rows = rows_per_thread;
    }
    // At most the rows there are.
    return minimum(best, maximum((int64_t)MR, round_up((rows + threads - 1) / threads, MR)));
  }

  // Whether right is read in place.
  bool in_place() const { return uses_dot || uses_across || uses_axpy; }

  // Steps of the largest group.
  int64_t max_group_steps(int64_t max_steps) const {
    int64_t steps = 0;
    for (int t = 0; t < w.num_terms; t++) steps += round_up(row_steps<M>(w.terms[t].steps), LANES);
    return minimum(steps, max_steps);
  }

  // Whether left can be read in place as operands.
  bool left_readable() const {
    if constexpr (!__is_same(IO, Float32)) {
      if (M::PACK == 1) return false;
      for (int t = 0; t < w.num_terms; t++) {
        const ch_term& term = w.terms[t];
        if (term.steps % (M::PACK * M::BLOCK) || term.left_row % M::PACK || (uintptr_t)term.left % sizeof(operand)) return false;
      }
    }
    return true;
  }

  // Whether rows of right can be read in place for dot products.
  bool can_use_dot() const {
    const ch_term& term = w.terms[0];
    if (!w.right_transposed) return false;
    // Both sides are read as bf16 pairs.
    if (M::PACK == 2 && (!left_readable() || term.right_row % M::PACK || (uintptr_t)term.right % sizeof(operand))) return false;
    return term.steps % (VL * M::PACK) == 0 && w.rows <= (term.steps >= LONG_STEPS ? MAX_DOT_ROWS : MAX_DOT_ROWS_SHORT);
  }

  // Allocates the panels of right that are packed at a time.
  bool allocate_panels(int64_t panel_steps) {
    panels_at_once = minimum(num_panels, maximum((int64_t)1, PACKED_OPERANDS / (panel_steps * PW + 1)));
    packed = (operand*)scratch(clearhead::SLOT_SHARED, (size_t)(panels_at_once * panel_steps * PW) * sizeof(operand) + 64);
    panels = packed;
    return packed != nullptr;
  }

  bool multiply_many(const Group& group) {
    for (int64_t panel = 0; panel < num_panels; panel += panels_at_once) {
      const int64_t count = minimum(panels_at_once, num_panels - panel);
      if (packed != nullptr && !pack(group, panel, count)) return false;
      if (!multiply(group, panel, count)) return false;
    }
    return true;
  }

  // Allocates float32 sums of the output and of row sums, for GEMMs in several groups of steps.
  bool allocate_sums() {
    sums_row = round_up(w.columns, VL);
    sums = (float*)scratch(clearhead::SLOT_PARTIAL, (size_t)(w.rows * (sums_row + 1)) * sizeof(float));
    totals = sums + w.rows * sums_row;
    return sums != nullptr;
  }

  // The pieces after those of the previous group, up to `max_steps`.
  void next_group(Group& group, const Group* before, int64_t max_steps) const {
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
      const int64_t remaining = (max_steps - group.steps) * M::PACK;
      const int64_t count = minimum(remaining, term_here.steps - from);
      if (count > 0) {
        group.pieces[group.count++] = Piece{&term_here, from, count, group.steps};
        group.steps += round_up(row_steps<M>(count), LANES);
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

  bool pack_panel(const Group& group, int64_t panel, operand* packed) const {
    const int64_t column = panel * PW;
    const int columns = (int)minimum((int64_t)PW, w.columns - column);
    for (int i = 0; i < group.count; i++) {
      const Piece& piece = group.pieces[i];
      const type* right = (const type*)piece.term->right;
      operand* to = packed + piece.first * PW;
      if (w.right_transposed) {
        const int64_t staged_operands = VL * row_operands<M>((int)piece.count);
        operand* staged = (operand*)scratch(clearhead::SLOT_WORK, (size_t)staged_operands * sizeof(operand));
        if (staged == nullptr) return false;
        pack_panels<M, IO>(right + column * piece.term->right_row + piece.from, piece.term->right_row, columns,
                           (int)piece.count, to, staged);
      } else {
        const Panels panels(PW, group.steps);
        pack_rows<M, IO>(right + piece.from * piece.term->right_row + column, piece.term->right_row, (int)piece.count,
                         columns, to, panels);
        if (TILES) pad_blocks<M>(to, panels, 0, (int)piece.count);
      }
    }
    return true;
  }

  // Few rows: right is read once, and each panel is packed by the thread that multiplies by it and stays in that
  // thread's cache.
  bool multiply_few(const Group& group) {
    // Each part packs left again if left must be packed.
    const int64_t parts = minimum(num_panels, (int64_t)(left_in_place ? 4 : 1) * threads),
        per_part = (num_panels + parts - 1) / parts;
    Fault fault;
    parallel(threads, parts, [&](int64_t part) {
      const int64_t left_floats = left_in_place ? 0 : w.rows * left_row(group);
      const int64_t columns_floats = TILES && uses_across ? group.steps * VL : 0;
      const bool from_memory = !TILES && panels != nullptr && group.count == 1;
      const int at_once = from_memory && w.rows <= ROWS_BY_PANELS ? panels_for(w.rows) : 1;
      const bool in_turns = from_memory && w.rows > ROWS_BY_PANELS && w.rows <= MAX_TURNS_ROWS;
      const int64_t tile_floats = uses_dot ? w.rows * (DOT_COLUMNS + PW) : block * PW * (in_turns ? 2 : at_once);
      float* tile = (float*)scratch(clearhead::SLOT_COLUMNS,
                                    (size_t)(tile_floats + left_floats + columns_floats) * sizeof(float) + 64);
      const int64_t panel = in_place() || panels != nullptr ? 0 : group.steps * PW;
      operand* panel_tile = (operand*)scratch(clearhead::SLOT_KEYS, (size_t)panel * sizeof(operand) + 64);
      if (tile == nullptr || panel_tile == nullptr) return fault.set(CH_NO_MEMORY);
      operand* left = (operand*)(tile + tile_floats);
      if (!left_in_place) pack_left(group, 0, w.rows, left, false);
      operand* left_columns = left + round_up(left_floats, VL);
      if (columns_floats > 0) pack_left_columns(group, left, left_columns);
      if constexpr (M::PACK == 1 && Widened<IO>::LOAD_VECTORS == 2)
        for (int64_t row = 0; row < w.rows && uses_dot; row++)
          Widened<IO>::deinterleave(left + row * left_row(group), (int)(w.terms[0].steps / VL));
      DropoutMask mask;
      if (uses_dot) return multiply_dot(group, left, part * per_part * PW, per_part * PW, tile, mask);
      int64_t p = part * per_part;
      const int64_t end = minimum(num_panels, (part + 1) * per_part);
      for (int count = at_once; count > 1; count /= 2)
        for (; p + count <= end; p += count) compute_panels(group, p, count, left, tile, mask);
      for (; p < end && in_turns; p++) compute_in_turns(group, p, left, tile, mask);
      for (; p < end; p++) {
        const bool packs = !in_place() && panels == nullptr;
        if (packs && !pack_panel(group, p, panel_tile)) return fault.set(CH_NO_MEMORY);
        const operand* right = panels == nullptr ? panel_tile : panels + p * group.steps * PW;
        for (int64_t row = 0; row < w.rows; row += block) {
          const int64_t rows = minimum(block, w.rows - row);
          if (group.last && drops()) mask.draw(w, row, rows, p * PW);
          if (TILES && uses_across) tiles_in_place(group, left_columns, rows, p * PW, tile, mask);
          else if (in_place()) gemv_tile(group, left, row, rows, p * PW, tile, mask);
          else compute_tile(group, right, left + row * left_row(group), row, rows, p * PW, tile, mask);
        }
      }
    });
    return fault.get() == CH_OK;
  }

  // Left of at most VL rows as B: [operand][VL].
  void pack_left_columns(const Group& group, const operand* packed_left, operand* to) const {
    const uint32_t* from = (const uint32_t*)left_at(group, packed_left, 0);
    for (int64_t o = 0; o < group.steps; o += VL)
      transpose_block(from + o, left_stride(group), (uint32_t*)to + o * VL, VL, (int)w.rows);
  }

  // Very few rows by right in place, with steps as rows: each thread accumulates its stripes of columns.
  bool multiply_axpy(const Group& group) {
    const int64_t min_parts = (w.columns + STRIPE - 1) / STRIPE, parts = minimum(num_panels, round_up(min_parts, threads));
    const int64_t stripe = (num_panels + parts - 1) / parts * PW;
    Fault fault;
    parallel(threads, parts, [&](int64_t part) {
      const int64_t first = part * stripe, count = minimum(stripe, w.columns - first);
      if (count <= 0) return;
      const int64_t left_floats = left_in_place ? 0 : w.rows * left_row(group);
      float* totals = (float*)scratch(clearhead::SLOT_COLUMNS,
                                      (size_t)(AXPY_ROWS * (2 * STRIPE + PW) + left_floats) * sizeof(float));
      if (totals == nullptr) return fault.set(CH_NO_MEMORY);
      float *sums = totals + AXPY_ROWS * STRIPE, *tile = sums + AXPY_ROWS * STRIPE;
      operand* left = (operand*)(tile + AXPY_ROWS * PW);
      if (!left_in_place) pack_left(group, 0, w.rows, left, false);
      axpy_rows<AXPY_ROWS>(group, left, first, (int)count, sums, totals);
      DropoutMask mask;
      finish_columns(group, first, count, totals, STRIPE, tile, mask);
    });
    return fault.get() == CH_OK;
  }

  template <int ROWS>
  void axpy_rows(const Group& group, const operand* packed_left, int64_t column, int count, float* sums,
                 float* totals) const {
    if constexpr (ROWS > 1)
      if (w.rows < ROWS) return axpy_rows<ROWS - 1>(group, packed_left, column, count, sums, totals);
    const ch_term& term = w.terms[0];
    gemv_axpy<M, IO, ROWS>(term.steps, DEPTH, left_at(group, packed_left, 0), left_stride(group),
                           (const type*)term.right + column, term.right_row, count, sums, totals, STRIPE);
  }

  // Left of the first term from a row on, in place or packed, and its stride.
  const operand* left_at(const Group& group, const operand* packed_left, int64_t row) const {
    const ch_term& term = w.terms[0];
    return left_in_place ? (const operand*)((const type*)term.left + row * term.left_row)
                         : packed_left + row * left_row(group);
  }
  int64_t left_stride(const Group& group) const {
    return left_in_place ? w.terms[0].left_row / M::PACK : left_row(group);
  }

  // Blocks of rows, and of panels if there are fewer blocks than threads; halved if that is free, so that no thread
  // waits for the last block of another.
  bool multiply(const Group& group, int64_t panel, int64_t count) {
    const int64_t parts = minimum(count, maximum((2 * threads + blocks - 1) / blocks,
                                                 (int64_t)(left_in_place && threads > 1 ? 2 : 1)));
    const int64_t per_part = (count + parts - 1) / parts;
    Fault fault;
    parallel(threads, blocks * parts, [&](int64_t ones_operand) {
      const int64_t row = ones_operand / parts * block, rows = minimum(block, w.rows - row);
      const int64_t first = ones_operand % parts * per_part, end = minimum(count, first + per_part);
      const int64_t left_floats = left_in_place ? 0 : round_up(block, VL) * left_row(group);
      float* tile = (float*)scratch(clearhead::SLOT_WORK, (size_t)(block * PW + left_floats) * sizeof(float));
      if (tile == nullptr) return fault.set(CH_NO_MEMORY);
      operand* left = (operand*)(tile + block * PW);
      if (!left_in_place) pack_left(group, row, rows, left, panel == 0 && first == 0);
      DropoutMask mask;
      for (int64_t p = first; p < end; p++) {
        const int64_t column = (panel + p) * PW;
        if (group.last && drops()) mask.draw(w, row, rows, column);
        compute_tile(group, panels + p * group.steps * PW, left, row, rows, column, tile, mask);
      }
    });
    return fault.get() == CH_OK;
  }

  // Whether to draw dropout: a relu's output is already 0 at dropped elements.
  CH_INLINE bool drops() const { return w.dropped > 0 && w.gate == nullptr; }

  // The dropout mask of a block of rows, for the columns of one draw.
  struct DropoutMask {
    int64_t group = -1, first = -1;
    KeepMask keep_masks[BLOCK];

    void draw(const ch_projection& w, int64_t row, int64_t rows, int64_t column) {
      if (column / GROUP_COLUMNS == group && row == first) return;
      group = column / GROUP_COLUMNS, first = row;
      for (int64_t r = 0; r < rows; r++) keep_masks[r].draw(philox_row(w, row + r, group), (uint32_t)group);
    }
    CH_INLINE vf of(int64_t r, int64_t column, vf value) const {
      return select_bits(keep_masks[r].from((int)(column % GROUP_COLUMNS)), value);
    }
  };

  CH_INLINE int vectors(int64_t column) const {
    return (int)(round_up(minimum((int64_t)PW, w.columns - column), VL) / VL);
  }
  // Row stride of a packed left: not a power of two, so rows do not share a few cache sets.
  CH_INLINE int64_t left_row(const Group& group) const { return group.steps + VL; }

  // What is read after a panel, or nothing; each turn of rows prefetches a share of it. All of it in one turn would fill the
  // queues of the caches, and leave the memory idle in the other turns.
  StepPrefetch upcoming_of(const Group& group, const operand* panel, int64_t column, int64_t turns) const {
    const bool few = few_rows && w.rows <= MAX_PREFETCHING_ROWS, reads_packed = PREFETCHES_PANELS && w.panels != nullptr;
    if (TILES || w.rows < MIN_PREFETCHING_ROWS || !(few || reads_packed)) return StepPrefetch{nullptr, 0};
    if (w.panels != nullptr) {
      // The next stretch: with a whole panel between, L2 could have lost it again.
      const int64_t stretch = minimum(DEPTH, group.steps) * PW;
      return StepPrefetch{(const char*)(panel + stretch), PW * (int64_t)sizeof(operand) / turns};
    }
    const ch_term& term = w.terms[0];
    const bool contiguous = w.right_transposed && term.right_row == term.steps;
    if (!contiguous || group.count != 1 || !group.first || !group.last) return StepPrefetch{nullptr, 0};
    // The rows that the next panel is packed from.
    const type* rows = (const type*)term.right + (column + PW) * term.right_row;
    return StepPrefetch{(const char*)rows, PW * M::PACK * (int64_t)sizeof(type) / turns};
  }

  // A block of rows times a panel, over ranges of DEPTH steps; after the last range the epilogue runs while the tile is
  // in L1.
  void compute_tile(const Group& group, const operand* right, const operand* packed_left, int64_t row, int64_t rows,
                    int64_t column, float* tile, const DropoutMask& mask) const {
    const int columns = (int)minimum((int64_t)PW, w.columns - column), vecs = vectors(column);
    float bias[PW] = {};
    if (group.last && w.bias != nullptr) get_row<IO>((const type*)w.bias + column, columns, bias, PW);
    const TilePosition position = {row, column, columns, bias, mask};
    // Epilogues without transcendentals or a second operand run from registers.
    const bool simple = w.activation <= CH_RELU && w.slope == nullptr && w.dropped == 0 && w.gate == nullptr;
    const bool plain = group.first && group.last && simple && columns % VL == 0;
    // As many rows at a time in each step: two rows after six would leave FMA units idle.
    const int64_t turns = maximum((rows + MR - 1) / MR, (int64_t)1), at_once = TILES ? MR : (rows + turns - 1) / turns;
    const StepPrefetch upcoming = upcoming_of(group, right, column, turns);
    bool started = !group.first;
    for (int64_t r = 0; r < rows && started; r++)
      memcpy(tile + r * PW, sums + (row + r) * sums_row + column, (size_t)(vecs * VL) * sizeof(float));
    for (int i = 0; i < group.count; i++) {
      const Piece& piece = group.pieces[i];
      const int64_t stride = left_in_place ? piece.term->left_row / M::PACK : left_row(group);
      const operand* left = left_in_place ? (const operand*)((const type*)piece.term->left + row * piece.term->left_row) +
                                        piece.from / M::PACK
                                  : packed_left + piece.first;
      for (int64_t s = 0; s < piece.steps(); s += DEPTH, started = true) {
        const int64_t steps = minimum(DEPTH, piece.steps() - s);
        const operand* b = right + (piece.first + s) * PW;
        const bool finishes = i == group.count - 1 && s + steps == piece.steps();
        if (finishes) prefetch_tile(group, position, 0, minimum(2 * at_once, rows));
        for (int64_t r = 0; r < rows; r += at_once) {
          const int count = (int)minimum(at_once, rows - r);
          const operand* a = left + r * stride + s;
          if (finishes) prefetch_tile(group, position, r + 2 * at_once, minimum(r + 3 * at_once, rows));
          const bool from_registers = finishes && plain && !TILES;
          const auto multiply = [&](auto prefetching) CH_INLINED {
            if (from_registers) {
              type* output = (type*)w.output + (position.row + r) * w.output_row + column;
              const Out out = {output, w.output_row, started ? tile + r * PW : nullptr, bias, w.activation == CH_RELU};
              multiply_with_epilogue(count, vecs, steps, a, stride, b, out, prefetching);
            } else if (started) {
              // Tiles load sums at no cost, so they continue them.
              gemm<M, TILES ? CONTINUE : ADD>(count, vecs, steps, a, stride, 1, b, PW, tile + r * PW, PW, nullptr, prefetching);
            } else {
              gemm<M, SET>(count, vecs, steps, a, stride, 1, b, PW, tile + r * PW, PW, nullptr, prefetching);
            }
          };
          const int64_t share = s * turns + r / at_once * steps;
          if (upcoming.next != nullptr) multiply(StepPrefetch{upcoming.next + share * upcoming.bytes, upcoming.bytes});
          else multiply(NoPrefetch{});
          if (!finishes || from_registers) continue;
          if (plain) finish_plain(position, r, r + count, tile);
          else finish(group, position, r, r + count, tile);
        }
      }
    }
    if (started) return;
    memset(tile, 0, (size_t)(rows * PW) * sizeof(float));
    finish(group, position, 0, rows, tile);
  }

  // All rows, at most ROWS_BY_PANELS, times `count` panels that were packed before.
  void compute_panels(const Group& group, int64_t panel, int64_t count, const operand* packed_left, float* tile,
                      DropoutMask& mask) const {
    // A panel's steps are rounded up, those of left, which may lie in place, are not.
    const int64_t steps = group.pieces[0].steps(), stride = group.steps * PW, tile_size = w.rows * PW;
    const operand *right = panels + panel * stride, *left = left_at(group, packed_left, 0);
    const auto add = [&]<bool ADDS>(int64_t s) CH_INLINED {
      sum_panels<M, ADDS>(w.rows, minimum(DEPTH, steps - s), left + s, left_stride(group),
                          PackedPanels<M>{right + s * PW, stride, count}, tile, tile_size);
    };
    add.template operator()<false>(0);
    for (int64_t s = DEPTH; s < steps; s += DEPTH) add.template operator()<true>(s);
    for (int i = 0; i < count; i++) finish_panel(group, (panel + i) * PW, tile + i * tile_size, mask);
  }

  // The same for at most MAX_TURNS_ROWS rows and one panel.
  void compute_in_turns(const Group& group, int64_t panel, const operand* packed_left, float* tile,
                        DropoutMask& mask) const {
    const int64_t steps = group.pieces[0].steps(), size = w.rows * PW;
    const operand *right = panels + panel * group.steps * PW, *left = left_at(group, packed_left, 0);
    float* stretch = tile + size;
    for (int64_t s = 0; s < steps; s += DEPTH) {
      sum_in_turns<M>(w.rows, minimum(DEPTH, steps - s), left + s, left_stride(group), right + s * PW,
                      s == 0 ? tile : stretch);
      for (int64_t i = 0; i < size && s > 0; i += VL) store(tile + i, load(stretch + i) + load(tile + i));
    }
    finish_panel(group, panel * PW, tile, mask);
  }

  // The same for at most VL rows in tiles, with rows of right in place as A: the tile's transpose.
  void tiles_in_place(const Group& group, const operand* left_columns, int64_t rows, int64_t column, float* tile,
                      const DropoutMask& mask) const {
#if defined(CH_AMX)
    const int columns = (int)minimum((int64_t)PW, w.columns - column);
    float bias[PW] = {};
    if (w.bias != nullptr) get_row<IO>((const type*)w.bias + column, columns, bias, PW);
    const ch_term& term = w.terms[0];
    const int64_t size = (int64_t)sizeof(type), blocks = term.steps / (VL * M::PACK);
    for (int c = 0; c < columns; c += 2 * VL) {
      const type* right = (const type*)term.right + (column + c) * term.right_row;
      UpcomingLines upcoming(right + 2 * VL * term.right_row, term.right_row * size, term.steps * size,
                             w.columns - column - c - 2 * VL);
      alignas(64) float sums[2 * VL * VL];
      multiply_rows_in_place((int)minimum((int64_t)2 * VL, w.columns - column - c), blocks, (const char*)right,
                             term.right_row * size, (const uint32_t*)left_columns, upcoming, sums);
      for (int half = 0; half < 2 * VL && c + half < columns; half += VL) {
        alignas(64) float transposed[VL * VL];
        transpose_block((const uint32_t*)sums + half * VL, VL, (uint32_t*)transposed, VL);
        for (int64_t r = 0; r < rows; r++) store(tile + r * PW + c + half, load(transposed + r * VL));
      }
    }
    finish(group, TilePosition{0, column, columns, bias, mask}, 0, rows, tile);
#else
    (void)group, (void)left_columns, (void)rows, (void)column, (void)tile, (void)mask;
#endif
  }

  // The same with rows of right in place (GEMV).
  void gemv_tile(const Group& group, const operand* packed_left, int64_t row, int64_t rows, int64_t column, float* tile,
                 const DropoutMask& mask) const {
    const int columns = (int)minimum((int64_t)PW, w.columns - column);
    float bias[PW] = {};
    if (w.bias != nullptr) get_row<IO>((const type*)w.bias + column, columns, bias, PW);
    const type* right = (const type*)w.terms[0].right + column * w.terms[0].right_row;
    const operand* left = left_at(group, packed_left, row);
    const int64_t groups = (rows + ACROSS_ROWS - 1) / ACROSS_ROWS, rows_at_once = (rows + groups - 1) / groups;
    for (int64_t r = 0; r < rows; r += rows_at_once)
      across_rows<ACROSS_ROWS>(left + r * left_stride(group), left_stride(group), minimum(rows_at_once, rows - r), right,
                               columns, r == 0 ? w.columns - column : 0, tile + r * PW);
    finish(group, TilePosition{row, column, columns, bias, mask}, 0, rows, tile);
  }

  // Columns [first, first + count), or those there are, as dot products with rows of right in place.
  void multiply_dot(const Group& group, const operand* packed_left, int64_t first, int64_t count, float* sums,
                    DropoutMask& mask) const {
    const ch_term& term = w.terms[0];
    const operand* left = left_at(group, packed_left, 0);
    const int rows = (int)w.rows, vectors = (int)(row_steps<M>(term.steps) / VL);
    const int64_t left_row = left_stride(group), end = minimum(w.columns, first + count);
    const bool far = w.columns * term.steps * (int64_t)sizeof(type) > FAR_BYTES;
    for (int64_t column = first; column < end; column += DOT_COLUMNS) {
      const int columns = (int)minimum(DOT_COLUMNS, end - column);
      const type* right = (const type*)term.right + column * term.right_row;
      if constexpr (M::PACK == 2 || __is_same(IO, Float32))
        gemv_dot<M>(rows, left, left_row, [&](int c) { return (const operand*)(right + c * term.right_row); }, columns,
                    vectors, sums, DOT_COLUMNS, 0, far);
      else
        gemv_dot<Widened<IO>>(rows, left, left_row, [&](int c) { return right + c * term.right_row; }, columns, vectors,
                              sums, DOT_COLUMNS, 0, far);
      finish_columns(group, column, columns, sums, DOT_COLUMNS, sums + rows * DOT_COLUMNS, mask);
    }
  }
  template <int ROWS>
  void across_rows(const operand* left, int64_t left_row, int64_t rows, const type* right, int columns, int64_t following,
                   float* tile) const {
    if constexpr (ROWS > 1)
      if (rows < ROWS) return across_rows<ROWS - 1>(left, left_row, rows, right, columns, following, tile);
    const ch_term& term = w.terms[0];
    gemv_across<M, IO, ROWS>(right, term.right_row, columns, following, row_steps<M>(term.steps), DEPTH, left, left_row,
                             tile, PW);
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

  template <int ROWS, int VECS, class Prefetching>
  static CH_INLINE void epilogue_block(int64_t steps, const operand* a, int64_t a_row, const operand* b, const Out& out,
                                       Prefetching prefetching) {
    const vf lowest = out.relu ? (vf){} : all(-INF);
    const auto emit = [&](int r, int v, vf sum) CH_INLINED {
      if (out.before != nullptr) sum += load(out.before + r * PW + v * VL);
      sum += load(out.bias + v * VL);
      put_vector<IO>(out.output + r * out.row + v * VL, sum < lowest ? lowest : sum);
    };
    micro_kernel<M, ROWS, VECS>(steps, a, a_row, 1, b, PW, emit, nullptr, 0, prefetching);
  }

  template <int VECS, class Prefetching>
  static __attribute__((noinline)) void epilogue_rows(int rows, int64_t steps, const operand* a, int64_t a_row,
                                                      const operand* b, const Out& out, Prefetching prefetching) {
    switch (rows) {
      case 6: return epilogue_block<6, VECS>(steps, a, a_row, b, out, prefetching);
      case 5: return epilogue_block<5, VECS>(steps, a, a_row, b, out, prefetching);
      case 4: return epilogue_block<4, VECS>(steps, a, a_row, b, out, prefetching);
      case 3: return epilogue_block<3, VECS>(steps, a, a_row, b, out, prefetching);
      case 2: return epilogue_block<2, VECS>(steps, a, a_row, b, out, prefetching);
      default: return epilogue_block<1, VECS>(steps, a, a_row, b, out, prefetching);
    }
  }

  // The micro-kernel with its epilogue in registers.
  template <class Prefetching>
  static CH_INLINE void multiply_with_epilogue(int rows, int vecs, int64_t steps, const operand* a, int64_t a_row,
                                               const operand* b, const Out& out, Prefetching prefetching) {
    if constexpr (NV == 4) {
      if (vecs == 4) return epilogue_rows<4>(rows, steps, a, a_row, b, out, prefetching);
      if (vecs == 3) return epilogue_rows<3>(rows, steps, a, a_row, b, out, prefetching);
    }
    if (vecs == 2) return epilogue_rows<2>(rows, steps, a, a_row, b, out, prefetching);
    return epilogue_rows<1>(rows, steps, a, a_row, b, out, prefetching);
  }

  // The position of a tile.
  struct TilePosition {
    int64_t row, column;
    int columns;
    const float* bias;
    const DropoutMask& mask;
  };

  // The epilogue of bias and relu alone, rounded, from a tile.
  void finish_plain(const TilePosition& position, int64_t from, int64_t to, const float* tile) const {
    const vf lowest = w.activation == CH_RELU ? (vf){} : all(-INF);
    for (int64_t r = from; r < to; r++) {
      type* output = (type*)w.output + (position.row + r) * w.output_row + position.column;
#pragma GCC unroll 4
      for (int c = 0; c < position.columns; c += VL) {
        const vf sum = load(tile + r * PW + c) + load(position.bias + c);
        put_vector<IO>(output + c, sum < lowest ? lowest : sum);
      }
    }
  }

  // Prefetches the lines that the epilogue of the tile reads and writes.
  CH_INLINE void prefetch_tile(const Group& group, const TilePosition& position, int64_t from, int64_t to) const {
    for (int64_t r = position.row + from; r < position.row + to; r++) {
      const int64_t bytes = position.columns * (int64_t)(group.last ? sizeof(type) : sizeof(float));
      const auto prefetch = [&](const void* line, int written) CH_INLINED {
        for (int64_t byte = 0; byte < bytes; byte += LINE_BYTES)
          if (written) prefetch_line<3, true>((const char*)line + byte);
          else prefetch_line<3>((const char*)line + byte);
      };
      if (!group.last) {
        prefetch(sums + r * sums_row + position.column, 1);
        continue;
      }
      prefetch((const type*)w.output + r * w.output_row + position.column, 1);
      if (w.slope != nullptr) prefetch((const type*)w.slope + r * w.slope_row + position.column, 1);
      if (w.gate != nullptr) prefetch((const type*)w.gate + r * w.gate_row + position.column, 0);
      if (w.slope_gate != nullptr) prefetch((const type*)w.slope_gate + r * w.slope_gate_row + position.column, 0);
    }
  }

  // The epilogue of one vector of sums: gates, or activation and dropout.
  CH_INLINE vf apply_gate(vf sum, vf gate, vf slope_gate, vf& slope) const {
    slope = sum * slope_gate;
    if (w.gate_kind == CH_GATE_SLOPE) return sum * gate;
    // NaN in the gate propagates.
    const vf open = w.dropped > 0 ? sum * all(dropout_factor(w.dropped)) : sum;
    return gate <= (vf){} ? (vf){} : open;
  }
  CH_INLINE vf apply_activation(const TilePosition& position, int64_t r, int c, vf sum, vf& slope) const {
    vf value = activation_of(w.activation, sum, slope);
    if (w.dropped == 0) return value;
    const vf factor = all(dropout_factor(w.dropped));
    slope = position.mask.of(r, position.column + c, slope * factor);
    return position.mask.of(r, position.column + c, value * factor);
  }

  // Stores rows of a tile as partial sums, or the final sums through the epilogue, rounded, in the output. A bias of 0
  // is added too: it makes -0 to 0, with or without an activation.
  void finish(const Group& group, const TilePosition& position, int64_t from, int64_t to, const float* tile) const {
    for (int64_t r = from; r < to; r++) {
      const int64_t row = position.row + r;
      const float* tile_row = tile + r * PW;
      float* sum = sums + row * sums_row + position.column;
      type* output = (type*)w.output + row * w.output_row + position.column;
      type* slope = w.slope == nullptr ? nullptr : (type*)w.slope + row * w.slope_row + position.column;
      const type* gate = w.gate == nullptr ? nullptr : (const type*)w.gate + row * w.gate_row + position.column;
      const type* slope_gate =
          w.slope_gate == nullptr ? nullptr : (const type*)w.slope_gate + row * w.slope_gate_row + position.column;
      for (int c = 0; c < position.columns; c += VL) {
        vf value = load(tile_row + c), derivative;
        if (!group.last) {
          store(sum + c, value);
          continue;
        }
        value += load(position.bias + c);
        const int columns = position.columns - c;
        const bool whole = columns >= VL;
        float padded[VL];
        const auto read = [&](const type* from) CH_INLINED {
          if (from == nullptr) return (vf){};
          if (whole) return get_vector<IO>(from + c);
          get_row<IO>(from + c, columns, padded, VL);
          return load(padded);
        };
        if (gate == nullptr) value = apply_activation(position, r, c, value, derivative);
        else value = apply_gate(value, read(gate), read(slope_gate), derivative);
        if (whole) {
          put_vector<IO>(output + c, value);
          if (slope != nullptr) put_vector<IO>(slope + c, derivative);
          continue;
        }
        store(padded, value);
        put_row<IO>(output + c, columns, padded, 1.0f);
        if (slope == nullptr) continue;
        store(padded, derivative);
        put_row<IO>(slope + c, columns, padded, 1.0f);
      }
    }
  }

  // The sums of all rows with columns [first, first + count), through the epilogue. `tile` is for a panel's.
  void finish_columns(const Group& group, int64_t first, int64_t count, const float* sums, int64_t sums_row, float* tile,
                      DropoutMask& mask) const {
    for (int64_t column = first; column < first + count; column += PW) {
      const int columns = (int)minimum((int64_t)PW, first + count - column);
      for (int64_t r = 0; r < w.rows; r++)
        memcpy(tile + r * PW, sums + r * sums_row + column - first, (size_t)round_up(columns, VL) * sizeof(float));
      finish_panel(group, column, tile, mask);
    }
  }

  // The epilogue of all rows of a panel.
  void finish_panel(const Group& group, int64_t column, const float* tile, DropoutMask& mask) const {
    const int columns = (int)minimum((int64_t)PW, w.columns - column);
    float bias[PW] = {};
    if (w.bias != nullptr) get_row<IO>((const type*)w.bias + column, columns, bias, PW);
    if (drops()) mask.draw(w, 0, w.rows, column);
    finish(group, TilePosition{0, column, columns, bias, mask}, 0, w.rows, tile);
  }

  // Packs rows [row, row + rows) of left with contiguous steps.
  void pack_left(const Group& group, int64_t row, int64_t rows, operand* to, bool adds_row_sums) const {
    float row_totals[BLOCK + VL] = {};
    for (int i = 0; i < group.count; i++) {
      const Piece& piece = group.pieces[i];
      const type* left = (const type*)piece.term->left;
      const int64_t stride = piece.term->left_row;
      if (w.left_transposed) {
        transpose_left(left + piece.from * stride + row, stride, piece.count, (int)rows, to + piece.first, left_row(group),
                       row_totals);
      } else {
        for (int64_t r = 0; r < rows; r++)
          get_operands<M, IO>(left + (row + r) * stride + piece.from, (int)piece.count,
                              to + r * left_row(group) + piece.first, (int)round_up(piece.steps(), VL));
      }
    }
    if (adds_row_sums && w.row_sums != nullptr) add_row_sums(group, row, rows, row_totals);
  }

  // Transposes steps with contiguous rows to rows with contiguous steps; adds each row's elements to `row_totals`.
  static void transpose_left(const type* from, int64_t stride, int64_t count, int rows, operand* to, int64_t to_row,
                             float* row_totals) {
    const int padded_rows = (int)round_up(rows, VL);
    const operand one = ones_operand();
    operand staged[VL * (BLOCK + VL)];
    for (int64_t s = 0; s < row_steps<M>(count); s += VL) {
      for (int64_t r = 0; r < VL; r++) {
        const int64_t step = (s + r) * M::PACK;
        operand* staged_row = staged + r * padded_rows;
        prefetch_steps(from, stride, step + PREFETCH_STEPS * M::PACK, count, rows);
        if (step >= count) memset(staged_row, 0, (size_t)padded_rows * sizeof(operand));
        else if constexpr (M::PACK == 1) get_row<IO>(from + step * stride, rows, staged_row, padded_rows);
        else pair_row(from + step * stride, step + 1 < count ? from + (step + 1) * stride : nullptr, rows, staged_row,
                      padded_rows);
      }
      for (int c = 0; c < padded_rows; c += VL) {
        vf sum = load(row_totals + c);
        for (int64_t r = 0; r < VL; r++) sum = M::madd_broadcast(sum, M::broadcast(&one), M::get(staged + r * padded_rows + c));
        store(row_totals + c, sum);
        transpose_block((const uint32_t*)staged + c, padded_rows, (uint32_t*)to + c * to_row + s, to_row);
      }
    }
  }

  // Prefetches the lines of the steps that form an operand.
  static CH_INLINE void prefetch_steps(const type* from, int64_t stride, int64_t step, int64_t count, int rows) {
    for (int64_t last = minimum(count, step + M::PACK); step < last; step++)
      for (int64_t byte = 0; byte < rows * (int64_t)sizeof(type); byte += LINE_BYTES)
        prefetch_line<3>((const char*)(from + step * stride) + byte);
  }

  // The operand 1: a pair of ones for bf16.
  static CH_INLINE operand ones_operand() {
    if constexpr (M::PACK == 1) return 1.0f;
    else return 0x3f803f80u;
  }

  void add_row_sums(const Group& group, int64_t row, int64_t rows, float* row_totals) const {
    if (!group.first)
      for (int64_t r = 0; r < rows; r++) row_totals[r] += totals[row + r];
    if (group.last) put_row<IO>((type*)w.row_sums + row, (int)rows, row_totals, 1.0f);
    else memcpy(totals + row, row_totals, (size_t)rows * sizeof(float));
  }
};

}  // namespace CH_NS
