// Backward: for each tile of keys, loop over the blocks of queries that attend to it, recompute their weights from the
// saved row maximum and normaliser (FlashAttention, Dao et al. 2022, algorithm 4), and accumulate the gradients of the
// tile's keys and values in cache; the gradients of queries accumulate in memory, by chunk of keys (query_sums.h). With
// few heads, several threads take a piece of a head's chunks each, with the same bits.
#pragma once

#include "invariance.h"
#include "prefetch.h"
#include "query_sums.h"
#include "segments.h"

namespace CH_NS {

template <class M, class IO> struct Backward {
  typedef typename M::operand operand;
  typedef typename IO::type element;
  static constexpr bool TILES = in_tiles<M>();
  static constexpr int MR = M::HEIGHT;
  static constexpr int BLOCK = 96;
  // Rows or keys that a sum along them adds together; none are added outside of whole ones.
  static constexpr int WIDTH = maximum(VL, M::PACK * M::BLOCK);
  // Bytes of packed queries and gradients that a thread caches if those of a head fit: every tile of keys reads them.
  static constexpr int64_t MAX_CACHED_BYTES = int64_t(1) << 23;

  const Task& w;
  int64_t group, blocks;
  int tile;
  Panels keys, queries, grads;  // B of the last three GEMMs
  int operands, value_operands, steps, v_steps, out, v_out;
  int64_t tiles, chunk_tiles;
  KeyChunks chunks;
  int64_t cached_blocks;  // blocks of queries that stay packed: all of a key head's, or only the current one
  bool masked, plain, capped, share_batch, share_heads;
  bool single_tile;  // one tile covers all keys: a row's delta is computed together with its weights
  float base2;
  Dropout dropout;
  int64_t diagonals, learned_diagonals;  // diagonal rules, and how many of them need a gradient
  const ch_statistics* observed;  // null if no statistic has a gradient
  const bool of_queries, of_keys;  // which gradients are computed

  // A block of queries and of output gradients, packed as A rows and as B; in tiles as A rows and as their transpose.
  struct PackedBlock {
    const operand *q, *g, *qb, *gb;
  };

  // Rows that a tile's gradients accumulate in.
  struct Target {
    float* at;
    int64_t ld;
  };

  struct Workspace {
    operand* packed_blocks;  // [cached_blocks][block_operands()]
    bool* is_packed;  // [cached_blocks]: whether a block is packed
    operand *kt, *vt;  // panels
    operand* packed_keys;  // rows of B
    const operand* key_rows;  // these, or the tensor's rows in place
    float *sums_k, *sums_v;  // [tile][out], [tile][v_out]
    float *columns_k, *columns_v;  // their transposes, in which tiles accumulate
    Target dk, dv;  // of the current tile: the buffers above, or the result tensors
    float *s, *dp;  // [MR][tile], for bf16 dot products only
    float* slope;  // [MR][tile]
    KeepMaskRows keep_mask;  // [MR]
    operand *p, *ds;  // [BLOCK / PACK][tile], A with rows along keys
    operand* dr;  // [BLOCK][tile / PACK], A with rows along queries
    MaskRow* row;
    float *largest, *inv_sum, *delta;
    float* diagonal;  // [group][diagonals][length]
    Interval* intervals;  // [group][blocks]
    operand* staged;
    float* dq;  // the sums of chunks; all but the first of them if there are several pieces
    Prefetch prefetch;
    bool first_keys, first_rows;  // first tile of its chunk, first block of its tile: sums are set, not added to
  };

  static int tile_size(const ch_attention& w) {
    if (has_tables(w)) return maximum(64, PW);
    return (int)minimum((int64_t)CH_TILE, maximum((int64_t)PW, round_up(w.k_len, PW)));
  }

  static bool has_gradients(const ch_statistics* s) {
    return s != nullptr && (s->grad_max != nullptr || s->grad_entropy != nullptr || s->grad_distance != nullptr ||
                            s->grad_sink != nullptr || s->grad_received != nullptr);
  }

  explicit Backward(const Task& work)
      : w(work), tile(tile_size(work)), keys(work.head_dim, row_steps<M>(tile)),
        queries(work.head_dim, row_steps<M>(BLOCK)), grads(work.value_dim, row_steps<M>(BLOCK)),
        of_queries(work.grad_query.data != nullptr), of_keys(work.grad_key.data != nullptr) {
    group = w.heads / w.kv_heads;
    blocks = (w.q_len + BLOCK - 1) / BLOCK;
    operands = row_operands<M>((int)w.head_dim);
    value_operands = row_operands<M>((int)w.value_dim);
    steps = (int)row_steps<M>(w.head_dim);
    v_steps = (int)row_steps<M>(w.value_dim);
    out = (int)round_up(w.head_dim, VL);
    v_out = (int)round_up(w.value_dim, VL);
    tiles = (w.k_len + tile - 1) / tile;
    masked = is_masked(w);
    plain = no_rules(w);
    base2 = to_base2(w);
    dropout = dropout_of(w);
    diagonals = count_diagonal(w);
    observed = has_gradients(w.statistics) ? w.statistics : nullptr;
    // With padding, or without segments, the keys of the same sequence may be several tiles.
    const bool reads_output = clearhead::is_invariant() && (w.output32 != nullptr || w.output.data != nullptr);
    single_tile = tiles == 1 && observed == nullptr && !w.partial_rows && !reads_output;
    learned_diagonals = 0;
    capped = share_batch = share_heads = false;
    for (int r = 0; r < w.num_rules; r++) {
      const ch_rule& rule = w.rules[r];
      learned_diagonals += rule.kind == CH_RULE_RELATIVE && rule.grad != nullptr;
      capped = capped || rule.kind == CH_RULE_SOFTCAP;
      if (rule.kind != CH_RULE_DENSE || rule.grad == nullptr) continue;
      // Heads that share a row of the bias are processed by one thread, in order.
      share_batch = share_batch || (rule.grad_batch == 0 && w.batch > 1);
      share_heads = share_heads || (rule.grad_head == 0 && w.kv_heads > 1);
    }
    int64_t units = share_batch || share_heads ? (share_batch ? 1 : w.batch) * (share_heads ? 1 : w.kv_heads) : w.units;
    units = maximum(units, (int64_t)1);
    chunks.group = group, chunks.q_len = w.q_len, chunks.out = of_queries ? out : 0;
    chunks.diagonal_size = learned_diagonals > 0 ? learned_diagonals * diagonal_length(w) : 0;
    chunk_tiles = KeyChunks::KEYS / tile;
    chunks.plan(w.k_len, w.threads == 1 ? 1 : (2 * w.threads + units - 1) / units);
    cached_blocks = group * blocks;
    if (minimum(tiles, chunks.piece_chunks * chunk_tiles) < 2 ||
        cached_blocks * block_operands() * (int64_t)sizeof(operand) > MAX_CACHED_BYTES)
      cached_blocks = 1;
  }

  // With one panel, rows of floats have the same layout as A and as B.
  static bool panels_as_rows(const Panels& panels) { return M::PACK == 1 && panels.count == 1; }
  // Operands of a packed block: of one tensor's rows, and of queries and gradients together.
  static int64_t operands_of(int row, const Panels& panels) {
    return (int64_t)BLOCK * row + (panels_as_rows(panels) ? 0 : panels.operands());
  }
  int64_t block_operands() const { return operands_of(operands, queries) + operands_of(value_operands, grads); }

  int64_t workspace_bytes(Workspace& d, char* base) const {
    BumpAllocator c{base};
    constexpr bool single = M::PACK == 1;
    d.packed_blocks = c.template take<operand>(cached_blocks * block_operands());
    d.is_packed = c.template take<bool>(cached_blocks);
    d.kt = c.template take<operand>((int64_t)tile * operands);
    d.vt = c.template take<operand>((int64_t)tile * value_operands);
    d.packed_keys = c.template take<operand>(keys.operands());
    d.sums_k = c.template take<float>((int64_t)tile * out);
    d.sums_v = c.template take<float>((int64_t)tile * v_out);
    d.columns_k = c.template take<float>(TILES ? (int64_t)tile * out : 0);
    d.columns_v = c.template take<float>(TILES ? (int64_t)tile * v_out : 0);
    d.s = c.template take<float>(single ? 0 : (int64_t)MR * tile);
    d.dp = c.template take<float>(single ? 0 : (int64_t)MR * tile);
    d.slope = c.template take<float>((int64_t)MR * tile);
    d.keep_mask.groups = KeepMaskRows::groups_of(tile);
    d.keep_mask.bits = c.template take<KeepMask>(dropout.on ? MR * d.keep_mask.groups : 0);
    d.p = c.template take<operand>((int64_t)BLOCK / M::PACK * tile);
    d.ds = c.template take<operand>((int64_t)BLOCK / M::PACK * tile);
    d.dr = single ? d.ds : c.template take<operand>((int64_t)BLOCK * tile / M::PACK);
    d.row = c.template take<MaskRow>(BLOCK);
    d.largest = c.template take<float>(BLOCK);
    d.inv_sum = c.template take<float>(BLOCK);
    d.delta = c.template take<float>(BLOCK);
    d.diagonal = c.template take<float>(diagonals > 0 ? group * diagonals * diagonal_length(w) : 0);
    d.intervals = c.template take<Interval>(group * blocks);
    d.staged = c.template take<operand>((int64_t)VL * maximum(operands, value_operands));
    d.dq = c.template take<float>((chunks.depth() - (chunks.pieces > 1)) * chunks.floats());
    return c.next - base;
  }

  // Sums that outlive a unit: of the pieces of a key head, if there are several, and of its diagonals.
  struct Sums {
    float* pieces;  // [batch][kv_heads][pieces][chunks.floats()]
    float* diagonal;  // [batch][heads][chunks.diagonal_size]
  };

  int64_t sums_bytes(Sums& s, char* base) const {
    BumpAllocator c{base};
    s.pieces = c.template take<float>(chunks.pieces > 1 ? w.batch * w.kv_heads * chunks.pieces * chunks.floats() : 0);
    s.diagonal = c.template take<float>(w.batch * w.heads * chunks.diagonal_size);
    return c.next - base;
  }

  float* piece_of(const Sums& sums, int64_t b, int64_t kh, int64_t piece) const {
    return sums.pieces + ((b * w.kv_heads + kh) * chunks.pieces + piece) * chunks.floats();
  }

  template <class Other> static float dot(const element* g, const typename Other::type* o, int count) {
    LaneSums sum;
    int c = 0;
    for (; c + LANES <= count; c += LANES)
      for (int p = 0; p < PARTS; p++)
        sum.part[p] = fused(get_vector<IO>(g + c + p * VL), get_vector<Other>(o + c + p * VL), sum.part[p]);
    if (c == count) return sum_of(sum);
    float rest_g[LANES], rest_o[LANES];
    get_row<IO>(g + c, count - c, rest_g, LANES), get_row<Other>(o + c, count - c, rest_o, LANES);
    for (int p = 0; p < PARTS; p++) sum.part[p] = fused(load(rest_g + p * VL), load(rest_o + p * VL), sum.part[p]);
    return sum_of(sum);
  }

  void write_delta(int64_t b, int64_t h) const {
    const bool unrounded = w.output32 != nullptr;
    if (!unrounded && w.output.data == nullptr) return start_delta(b, h);
    for (int64_t i = 0; i < w.q_len; i++) {
      int64_t place = row_index(w, b, h, i);
      const element* g = at<IO>(w.grad_output, b, h, i);
      const float* o = unrounded ? w.output32 + place * w.value_dim : at<Float32>(w.output, b, h, i);
      const float total = dot<Float32>(g, o, (int)w.value_dim);
      w.delta[place] = w.grad_lse != nullptr ? total - w.grad_lse[place] : total;
    }
  }

  // 0 * NaN is NaN, so with a mask such a call is left to the caller.
  void check_finite(int threads, Fault& fault) const {
    parallel_units(w, threads, w.batch * w.heads, [&](int64_t unit) { check_finite(unit / w.heads, unit % w.heads, fault); });
  }

  void check_finite(int64_t b, int64_t h, Fault& fault) const {
    bool fine = all_finite<IO>(at<IO>(w.query, b, h, 0), w.query.row, w.q_len, (int)w.head_dim);
    fine = fine && all_finite<IO>(at<IO>(w.grad_output, b, h, 0), w.grad_output.row, w.q_len, (int)w.value_dim);
    if (w.grad_lse != nullptr)
      fine = fine && all_finite<Float32>(w.grad_lse + row_index(w, b, h, 0), w.q_len, 1, (int)w.q_len);
    if (h < w.kv_heads) {
      // Tiles outside the band of every query are not read.
      const int64_t from = w.before == INT64_MAX ? 0 : clip(w.query_offset - w.before, 0, w.k_len) / tile * tile;
      const int64_t last = w.after == INT64_MAX ? w.k_len : clip(w.query_offset + w.q_len + w.after, 0, w.k_len);
      const int64_t count = maximum((int64_t)0, minimum(round_up(last, tile), w.k_len) - from);
      fine = fine && all_finite<IO>(at<IO>(w.key, b, h, from), w.key.row, count, (int)w.head_dim);
      fine = fine && all_finite<IO>(at<IO>(w.value, b, h, from), w.value.row, count, (int)w.value_dim);
    }
    // Scores of finite tensors may overflow.
    for (int64_t i = 0; fine && i < w.q_len; i++) fine = w.softmax[2 * row_index(w, b, h, i) + 1] * 0.0f == 0.0f;
    if (!fine) fault.set(CH_NOT_FINITE);
  }

  void pack_keys(int64_t b, int64_t kh, int64_t t0, int count, Workspace& d) const {
    const element* key = at<IO>(w.key, b, kh, t0);
    pack_panels<M, IO>(key, w.key.row, count, (int)w.head_dim, d.kt, d.staged);
    pack_panels<M, IO>(at<IO>(w.value, b, kh, t0), w.value.row, count, (int)w.value_dim, d.vt, d.staged);
    const bool in_place = has_packed_layout<M, IO>(w.key, w.head_dim);
    d.key_rows = in_place ? (const operand*)key : d.packed_keys;
    if (!in_place) pack_rows<M, IO>(key, w.key.row, count, (int)w.head_dim, d.packed_keys, keys);
    if (TILES) pad_blocks<M>(d.packed_keys, keys, 0, count);
    d.first_rows = !masked;
    d.dk = target_of(w.grad_key, b, kh, t0, w.head_dim, d.sums_k, out);
    d.dv = target_of(w.grad_value, b, kh, t0, w.value_dim, d.sums_v, v_out);
    if (!masked) return;
    memset(TILES ? d.columns_k : d.sums_k, 0, (size_t)(TILES ? tile : count) * out * sizeof(float));
    memset(TILES ? d.columns_v : d.sums_v, 0, (size_t)(TILES ? tile : count) * v_out * sizeof(float));
  }

  // The buffer that a tile's gradients accumulate in: the workspace, or the result if a single GEMM computes them.
  Target target_of(const ch_tensor& grad, int64_t b, int64_t kh, int64_t t0, int64_t dim, float* scratch_tile, int64_t ld) const {
    const bool single_gemm = of_keys && !masked && group * blocks == 1 && __is_same(element, float) && dim % VL == 0;
    return single_gemm ? Target{(float*)at<IO>(grad, b, kh, t0), grad.row} : Target{scratch_tile, ld};
  }

  // `count` rows of queries or of output gradients, as A rows and, from `b` on, as B. Read in place if possible;
  // otherwise packed at `to`, unless they are there (`is_packed`).
  const operand* pack_block(const ch_tensor& t, const element* from, int64_t dim, const Panels& panels, int count, bool is_packed,
                            operand* to, const operand*& b) const {
    if (has_packed_layout<M, IO>(t, dim)) return b = (const operand*)from;
    const int ld = row_operands<M>((int)dim);
    operand* const second = panels_as_rows(panels) ? to : to + (int64_t)BLOCK * ld;
    if (!is_packed) {
      for (int r = 0; r < count; r++) get_operands<M, IO>(from + r * t.row, (int)dim, to + (int64_t)r * ld, ld);
      if (TILES) pack_transposed(from, t.row, count, (int)dim, second);
      else if (second != to) pack_rows<M, IO>(from, t.row, count, (int)dim, second, panels);
    }
    b = second;
    return to;
  }

  // `count` rows as pairs, transposed: [column][BLOCK / PACK], zero-padded to a whole block of steps.
  static void pack_transposed(const element* from, int64_t stride, int count, int dim, operand* to) {
#if defined(CH_AMX)
    constexpr int LD = BLOCK / M::PACK;
    alignas(64) uint32_t staged[VL * VL];
    for (int step = 0; step < row_steps<M>(count); step += VL)
      for (int column = 0; column < dim; column += VL) {
        for (int i = 0; i < VL; i++) {
          const int row = M::PACK * (step + i);
          const uint16_t* one = (const uint16_t*)from + row * stride + column;
          if (row < count) pair_row(one, row + 1 < count ? one + stride : nullptr, minimum(VL, dim - column), staged + i * VL, VL);
          else memset(staged + i * VL, 0, VL * sizeof(*staged));
        }
        transpose_block(staged, VL, (uint32_t*)to + column * LD + step, LD);
      }
#else
    (void)from, (void)stride, (void)count, (void)dim, (void)to;
#endif
  }

  PackedBlock load_block(int64_t b, int64_t h, int64_t block, int count, Workspace& d) const {
    int64_t first = block * BLOCK, slot = cached_blocks > 1 ? h % group * blocks + block : 0;
    const bool is_packed = cached_blocks > 1 && d.is_packed[slot];
    operand* to = d.packed_blocks + slot * block_operands();
    PackedBlock packed_block;
    packed_block.q = pack_block(w.query, at<IO>(w.query, b, h, first), w.head_dim, queries, count, is_packed, to,
                                packed_block.qb);
    to += operands_of(operands, queries);
    packed_block.g = pack_block(w.grad_output, at<IO>(w.grad_output, b, h, first), w.value_dim, grads, count, is_packed,
                                to, packed_block.gb);
    d.is_packed[slot] = true;
    for (int r = 0; r < count; r++) {
      int64_t place = row_index(w, b, h, first + r);
      if (masked) mask_row(w, b, h, first + r, d.row[r]);
      d.largest[r] = w.softmax[2 * place];
      d.inv_sum[r] = w.softmax[2 * place + 1];
      d.delta[r] = w.delta[place];
    }
    return packed_block;
  }

  // Degree of the polynomial in the exponential: bfloat16 needs no more.
  static constexpr int DEGREE = M::PACK == 1 ? 5 : 4;

  // Scores of the rows from r0 on, and gradients of their weights: floats in the buffers that the last three GEMMs
  // read.
  float* scores_of(const Workspace& d, int r0) const {
    if constexpr (M::PACK == 1) return d.p + (int64_t)r0 * tile;
    else return d.s;
  }
  float* weight_grads_of(const Workspace& d, int r0) const {
    if constexpr (M::PACK == 1) return d.ds + (int64_t)r0 * tile;
    else return d.dp;
  }

  // Scores of `count` rows and gradients of their weights, in floats, over columns [c0, c1) of the tile.
  void multiply_rows(int r0, int count, int c0, int c1, const PackedBlock& packed_block, Workspace& d) const {
    int c1r = (int)round_up(c1, VL);
    for (int p = c0 / PW; p * PW < c1; p++) {
      int from = maximum(c0, p * PW), to = minimum(c1r, (p + 1) * PW), vecs = (to - from) / VL;
      int64_t inside = from - p * PW;
      d.prefetch.step();
      gemm<M, SET>(count, vecs, steps, packed_block.q + (int64_t)r0 * operands, operands, 1,
                   d.kt + (int64_t)p * PW * operands + inside, PW, scores_of(d, r0) + from, tile);
      gemm<M, SET>(count, vecs, v_steps, packed_block.g + (int64_t)r0 * value_operands, value_operands, 1,
                   d.vt + (int64_t)p * PW * value_operands + inside, PW, weight_grads_of(d, r0) + from, tile);
    }
  }

  // Masks columns [c0, c1) of a row of the block, and the rest of the last vector.
  CH_INLINE void mask_score_row(const Workspace& d, int row, int64_t t0, int c0, int c1, float* s) const {
    const int c1r = (int)round_up(c1, VL);
    if (!masked) mask_tail(s, c1);
    else if (!allows_all(d.row[row], t0 + c0, t0 + c1r)) mask_scores(w, d.row[row], t0 + c0, c1r - c0, s + c0);
  }

  // A row's scores to weights, and its delta if all its keys are in this tile. Forward may have rounded the scores
  // differently, and weights that do not sum to 1 leave a residue where terms should cancel, so delta is the mean under
  // these weights.
  template <bool DROPS>
  CH_INLINE void softmax_single_tile(float* s, const float* dp, int r, int c0, int c1r, int row, Workspace& d) const {
    const vf scale = all(base2), shift = all(d.largest[row]), inv_sum = all(d.inv_sum[row]);
    const KeepMaskRows keep_mask = d.keep_mask;
    LaneSums sum, whole;
    for_lanes(c0, c1r, [&](int64_t c, int part) CH_INLINED {
      const vf e = exp2_of<DEGREE>((load(s + c) - shift) * scale) * inv_sum;
      sum.part[part] = fused(DROPS ? e * factor_of(keep_mask, r, (int)c) : e, load(dp + c), sum.part[part]);
      whole.part[part] += e;
      store(s + c, e);
    });
    // The sum over keys excludes the sink's weight.
    const float total = w.sink == nullptr ? sum_of(whole) : 1.0f;
    d.delta[row] += total > 0.0f ? sum_of(sum) / total : sum_of(sum);
  }

  // Dropout factors of the weights of row r, from column c on.
  CH_INLINE vf factor_of(const KeepMaskRows& keep_mask, int r, int c) const {
    return select_bits(keep_mask.from(r, c), all(dropout.factor));
  }

  void draw(int64_t b, int64_t h, int64_t i, int r, int64_t t0, int c0, int c1r, Workspace& d) const {
    d.keep_mask.draw(r, philox_row(w, dropout, b, h, i), w.first_key + t0, c0, c1r);
  }

  // Turns a row's scores into weights (with dropout), and the gradients of the weights into those of the scores.
  template <bool DROPS>
  CH_INLINE void differentiate_row(float* s, float* dp, int r, int c0, int c1r, int row, Workspace& d) const {
    if (single_tile) softmax_single_tile<DROPS>(s, dp, r, c0, c1r, row, d);
    const vf scale = all(base2), shift = all(d.largest[row]), inv_sum = all(d.inv_sum[row]), delta = all(d.delta[row]);
    const KeepMaskRows keep_mask = d.keep_mask;
    for (int c = c0; c < c1r; c += VL) {
      const vf e = single_tile ? load(s + c) : exp2_of<DEGREE>((load(s + c) - shift) * scale) * inv_sum;
      const vf factor = DROPS ? factor_of(keep_mask, r, c) : (vf){};
      store(s + c, DROPS ? e * factor : e);
      store(dp + c, e * ((DROPS ? load(dp + c) * factor : load(dp + c)) - delta));
    }
  }

  // Applies `differentiate_row` to `count` rows.
  void differentiate(int64_t b, int64_t h, int64_t first, int r0, int count, int64_t t0, int c0, int c1, Workspace& d,
                     const float* diagonal, float* diagonal_grads) const {
    int c1r = (int)round_up(c1, VL);
    for (int r = 0; r < count; r++) {
      float *s = scores_of(d, r0) + r * tile, *dp = weight_grads_of(d, r0) + r * tile, *slope = d.slope + r * tile;
      int64_t i = first + r0 + r;
      if (!plain) apply_rules(w, diagonal, b, h, i, t0 + c0, c1 - c0, s + c0, capped ? slope + c0 : nullptr);
      mask_score_row(d, r0 + r, t0, c0, c1, s);
      if (dropout.on) draw(b, h, i, r, t0, c0, c1r, d);
      if (observed != nullptr) differentiate_observed(b, h, i, r, r0 + r, t0, c0, c1r, s, dp, d);
      else if (dropout.on) differentiate_row<true>(s, dp, r, c0, c1r, r0 + r, d);
      else differentiate_row<false>(s, dp, r, c0, c1r, r0 + r, d);
      if (!plain) rules_backward(b, h, i, t0, c0, c1, dp, slope, diagonal_grads);
    }
  }

  // Like `differentiate`, with statistics: they add to the gradient of a weight, and the row maximum has a gradient of
  // its own. `delta` includes their sums over the row.
  void differentiate_observed(int64_t b, int64_t h, int64_t i, int r, int row, int64_t t0, int c0, int c1r, float* s,
                              float* dp, Workspace& d) const {
    const ch_statistics& of = *observed;
    int64_t place = row_index(w, b, h, i);
    auto of_row = [&](const float* grads) { return all(grads != nullptr ? grads[place] : 0.0f); };
    bool tied = of.grad_max != nullptr;
    vf by_max = of_row(of.grad_max), peak = all(tied ? of.ties[2 * place] : 0.0f);
    if (tied) by_max /= all(maximum(of.ties[2 * place + 1], 1.0f));
    vf by_entropy = of_row(of.grad_entropy), by_distance = of_row(of.grad_distance);
    vf by_sink = of_row(of.grad_sink);
    const float* received = of.grad_received != nullptr ? of.grad_received + (b * w.heads + h) * w.k_len : nullptr;
    float log_inv_sum = d.inv_sum[row] > 0.0f ? log_of(d.inv_sum[row]) : 0.0f;
    vf scale = all(base2), shift = all(d.largest[row]), inv_sum = all(d.inv_sum[row]), delta = all(d.delta[row]);
    vf lowest = all(-1e4f), gap = all((float)(w.query_offset + i - t0 - c0)) - counting(), zero = {};
    int64_t sink_columns = of.grad_sink != nullptr ? of.sink_keys - t0 : 0;
    for (int c = c0; c < c1r; c += VL, gap -= all((float)VL)) {
      vf score = load(s + c), x = (score - shift) * scale, e = exp2_of<5>(x) * inv_sum;
      // -log(weight) - 1
      vf surprise = -fused(vmax(x, lowest), all(LN2), all(log_inv_sum)) - all(1.0f);
      vf g = fused(by_entropy, surprise, by_distance * absolute(gap));
      if (c < sink_columns) g += first_of(by_sink, minimum((int64_t)VL, sink_columns - c));
      if (received != nullptr) g += load_received(received, t0 + c);
      vf k = dropout.on ? factor_of(d.keep_mask, r, c) : all(1.0f);
      store(s + c, e * k);
      vf change = e * (fused(load(dp + c), k, g) - delta);
      store(dp + c, tied ? change + (score == peak ? by_max : zero) : change);
    }
  }

  CH_INLINE vf load_received(const float* received, int64_t from) const {
    if (from + VL <= w.k_len) return load(received + from);
    vf v = {};
    for (int64_t x = 0; from + x < w.k_len; x++) v[x] = received[from + x];
    return v;
  }

  // From the gradient of the last rule's result to that of the scaled score; accumulates the rules' own gradients.
  void rules_backward(int64_t b, int64_t h, int64_t i, int64_t t0, int c0, int c1, float* ds, const float* slope,
                      float* grads) const {
    int64_t length = diagonal_length(w);
    int64_t next = learned_diagonals;
    for (int r = w.num_rules - 1; r >= 0; r--) {
      const ch_rule& rule = w.rules[r];
      if (rule.kind == CH_RULE_SOFTCAP) {
        // A bias may be NaN at a masked score, and so may its slope: 0 there.
        for (int c = c0; c < c1; c += VL) {
          const vf d = load(ds + c), zero = {};
          store(ds + c, d == zero ? zero : d * load(slope + c));
        }
      } else if (rule.grad != nullptr && rule.kind == CH_RULE_DENSE) {
        float* line = rule.grad + b * rule.grad_batch + h * rule.grad_head + i * rule.grad_row + t0;
        for (int c = c0; c < c1; c++) line[c] += ds[c];
      } else if (rule.grad != nullptr && rule.kind == CH_RULE_RELATIVE) {
        float* line = grads + --next * length + diagonal_start(w, i) + t0;
        for (int c = c0; c < c1; c++) line[c] += ds[c];
      }
    }
  }

  // Copies rows of weights and score gradients into the buffers that the last three GEMMs read; 0 elsewhere in [left,
  // right).
  void store_operands(int r0, int count, int left, int right, int c0, int c1r, Workspace& d) const {
    for (int r = 0; r < count; r++) {
      for (int which = 0; which < 2; which++) {
        float* line = (which == 0 ? scores_of(d, r0) : weight_grads_of(d, r0)) + r * tile;
        if (c1r <= c0) {
          memset(line + left, 0, (size_t)(right - left) * sizeof(float));
          continue;
        }
        memset(line + left, 0, (size_t)(c0 - left) * sizeof(float));
        memset(line + c1r, 0, (size_t)(right - c1r) * sizeof(float));
      }
    }
    if constexpr (M::PACK == 2) {
#if defined(CH_BF16DOT)
      for (int r = 0; r < count; r += 2) {
        bool both = r + 1 < count;
        for (int c = left; c < right; c += VL) {
          const float *weight = d.s + r * tile + c, *grad = d.dp + r * tile + c;
          put_pair(r0 + r, c, both, load(weight), both ? load(weight + tile) : (vf){}, load(grad),
                   both ? load(grad + tile) : (vf){}, d);
        }
      }
#endif
    }
  }

  // Whether only the last three GEMMs read weights and score gradients.
  bool stores_pairs() const { return M::PACK == 2 && plain && observed == nullptr; }

#if defined(CH_BF16DOT)
  // Columns [c, c + VL) of two rows: weights and score gradients as bf16 pairs along the rows, and the gradients also
  // row by row. Without a second row the other half of each pair must be 0.
  CH_INLINE void put_pair(int row, int c, bool both, vf weight, vf weight_below, vf grad, vf grad_below, Workspace& d) const {
    const int64_t pair = (int64_t)(row / 2) * tile + c;
    const Rounded grads = round_two(grad, grad_below);
    *(vu_any*)(d.p + pair) = round_two(weight, weight_below).pairs;
    *(vu_any*)(d.ds + pair) = grads.pairs;
    uint16_t* rows = (uint16_t*)d.dr + (int64_t)row * tile + c;
    put_halves(rows, grads.one);
    if (both) put_halves(rows + tile, grads.other);
  }

  // `differentiate` and `store_operands` fused, for calls where nothing else reads the floats: no rules and no statistics.
  template <bool DROPS>
  void differentiate_pairs(int64_t b, int64_t h, int64_t first, int r0, int count, int64_t t0, int left, int right, int c0,
                           int c1, Workspace& d) const {
    const int c1r = (int)round_up(c1, VL);
    const vf scale = all(base2), none = {};
    if (DROPS)
      for (int r = 0; r < count; r++) draw(b, h, first + r0 + r, r, t0, c0, c1r, d);
    const KeepMaskRows drawn = d.keep_mask;
    // Stores weights and score gradients, from a vector of weights before dropout and the gradients of the weights
    // after it.
    auto put = [&](int r, int c, bool both, vf e, vf f, vf grad, vf grad_below, vf delta, vf delta_below) CH_INLINED {
      const vf before = e, before_below = f;
      if (DROPS) {
        const vf factor = factor_of(drawn, r, c), factor_below = factor_of(drawn, r + 1, c);
        e *= factor, grad *= factor;
        f *= factor_below, grad_below *= factor_below;
      }
      put_pair(r0 + r, c, both, e, f, before * (grad - delta), before_below * (grad_below - delta_below), d);
    };
    for (int r = 0; r < count; r += 2) {
      const bool both = r + 1 < count;
      const int below = both ? r0 + r + 1 : r0 + r;
      float *s = d.s + r * tile, *dp = d.dp + r * tile;
      for (int row = r0 + r; row <= below; row++) {
        mask_score_row(d, row, t0, c0, c1, d.s + (row - r0) * tile);
        if (single_tile) softmax_single_tile<DROPS>(d.s + (row - r0) * tile, d.dp + (row - r0) * tile, row - r0, c0, c1r, row, d);
      }
      const vf shift = all(d.largest[r0 + r]), inv_sum = all(d.inv_sum[r0 + r]), delta = all(d.delta[r0 + r]);
      const vf shift_below = all(d.largest[below]), delta_below = all(d.delta[below]);
      const vf inv_sum_below = all(d.inv_sum[below]);
      for (int c = left; c < c0; c += VL) put_pair(r0 + r, c, both, none, none, none, none, d);
      if (both) {
        for (int c = c0; c < c1r; c += VL) {
          const vf e = single_tile ? load(s + c) : exp2_of<DEGREE>((load(s + c) - shift) * scale) * inv_sum;
          const vf f =
              single_tile ? load(s + tile + c) : exp2_of<DEGREE>((load(s + tile + c) - shift_below) * scale) * inv_sum_below;
          put(r, c, true, e, f, load(dp + c), load(dp + tile + c), delta, delta_below);
        }
      } else {
        for (int c = c0; c < c1r; c += VL) {
          const vf e = single_tile ? load(s + c) : exp2_of<DEGREE>((load(s + c) - shift) * scale) * inv_sum;
          put(r, c, false, e, none, load(dp + c), none, delta, none);
        }
      }
      for (int c = c1r; c < right; c += VL) put_pair(r0 + r, c, both, none, none, none, none, d);
    }
  }
#else
  template <bool DROPS>
  void differentiate_pairs(int64_t, int64_t, int64_t, int, int, int64_t, int, int, int, int, Workspace&) const {}
#endif

  void visit(int64_t b, int64_t h, int64_t block, int64_t t0, int key_count, Workspace& d, const float* diagonal,
             float* diagonal_grads, float* dq) const {
    int64_t first = block * BLOCK, t1 = t0 + key_count;
    int count = (int)minimum((int64_t)BLOCK, w.q_len - first);
    const PackedBlock packed_block = load_block(b, h, block, count, d);
    Interval intervals[BLOCK / MR + 1];
    int low = INT32_MAX, high = 0;
    for (int r0 = 0; r0 < count; r0 += MR) {
      Interval interval{INT32_MAX, 0};
      if (!masked) interval = Interval{0, key_count};
      for (int r = r0; r < minimum(r0 + MR, count) && masked; r++) {
        Interval allowed = attended_interval(w, d.row[r], t0, t1);
        if (allowed.high <= allowed.low) continue;
        interval.low = minimum(interval.low, (int)(allowed.low - t0));
        interval.high = maximum(interval.high, (int)(allowed.high - t0));
      }
      if (interval.high <= interval.low) interval = Interval{0, 0};
      intervals[r0 / MR] = interval;
      if (interval.high > 0) {
        low = minimum(low, interval.low);
        high = maximum(high, interval.high);
      }
    }
    if (high <= low) return;
    constexpr int LEFT = maximum(LANES, WIDTH);
    int left = low / LEFT * LEFT, right = (int)round_up(high, WIDTH);
    for (int r0 = 0; r0 < count; r0 += MR) {
      int n = minimum(MR, count - r0);
      Interval interval = intervals[r0 / MR];
      int c0 = interval.low / LANES * LANES, c1 = interval.high;
      if (c1 > c0) multiply_rows(r0, n, c0, c1, packed_block, d);
      const int c1r = (int)round_up(c1, VL);
      if (c1 > c0 && stores_pairs()) {
        if (dropout.on) differentiate_pairs<true>(b, h, first, r0, n, t0, left, right, c0, c1, d);
        else differentiate_pairs<false>(b, h, first, r0, n, t0, left, right, c0, c1, d);
      } else {
        if (c1 > c0) differentiate(b, h, first, r0, n, t0, c0, c1, d, diagonal, diagonal_grads);
        store_operands(r0, n, left, right, c0, c1r, d);
      }
      if (c1 <= c0) continue;
      if (single_tile) memcpy(w.delta + row_index(w, b, h, first + r0), d.delta + r0, (size_t)n * sizeof(float));
      const int start = c0 / WIDTH * WIDTH;
      for (int p = 0; p < keys.count && of_queries; p++)
        gemm_accumulate(d.first_keys, n, keys.vectors(p, out), row_steps<M>(c1 - start),
                        d.dr + ((int64_t)r0 * tile + start) / M::PACK,
                        tile / M::PACK, 1, d.key_rows + p * keys.size + (int64_t)(start / M::PACK) * keys.ld, keys.ld,
                        dq + (first + r0) * out + p * keys.ld, out);
    }
    if (TILES && of_keys) add_key_gradients_in_tiles(intervals, count, left, right, packed_block, d);
    else if (of_keys) add_key_gradients(intervals, count, low, high, packed_block, d);
    d.first_rows = false;
  }

  CH_INLINE void gemm_accumulate(bool first, int rows, int vecs, int64_t along, const operand* a, int64_t a_row,
                                 int64_t a_step, const operand* b, int64_t ldb, float* c, int64_t ldc) const {
    if (first) gemm<M, SET>(rows, vecs, along, a, a_row, a_step, b, ldb, c, ldc);
    else gemm<M, TILES ? CONTINUE : ADD>(rows, vecs, along, a, a_row, a_step, b, ldb, c, ldc);
  }

  // Gradients of keys and values [low, high): each small group of keys takes the rows that attend to one of them.
  void add_key_gradients(const Interval* intervals, int count, int low, int high, const PackedBlock& packed_block,
                         Workspace& d) const {
    for (int j = low; j < high; j += MR) {
      int n = minimum(MR, high - j), from = count, to = 0;
      for (int r0 = 0; r0 < count; r0 += MR) {
        Interval interval = intervals[r0 / MR];
        if (interval.low >= j + n || interval.high <= j) continue;
        from = minimum(from, r0);
        to = r0 + minimum(MR, count - r0);
      }
      if (to <= from) continue;
      int64_t along = row_steps<M>(to - from), skipped = from / M::PACK;
      for (int p = 0; p < grads.count; p++)
        gemm_accumulate(d.first_rows, n, grads.vectors(p, v_out), along, d.p + skipped * tile + j, 1, tile,
                        packed_block.gb + p * grads.size + skipped * grads.ld, grads.ld,
                            d.dv.at + j * d.dv.ld + p * grads.ld, d.dv.ld);
      for (int p = 0; p < queries.count; p++)
        gemm_accumulate(d.first_rows, n, queries.vectors(p, out), along, d.ds + skipped * tile + j, 1, tile,
                        packed_block.qb + p * queries.size + skipped * queries.ld, queries.ld,
                            d.dk.at + j * d.dk.ld + p * queries.ld, d.dk.ld);
    }
  }

  // The same in tiles, for columns [left, right) that `visit` has stored: the transposed gradients are the transposed
  // block times the weights, whose pairs of rows are the layout of B.
  void add_key_gradients_in_tiles(const Interval* intervals, int count, int left, int right, const PackedBlock& packed_block,
                                  Workspace& d) const {
    constexpr int LD = BLOCK / M::PACK;
    const int stored = (int)row_steps<M>(count), padded = (int)round_up(stored, M::BLOCK);
    for (int pair = stored; pair < padded; pair++) {
      memset(d.p + (int64_t)pair * tile + left, 0, (size_t)(right - left) * sizeof(*d.p));
      memset(d.ds + (int64_t)pair * tile + left, 0, (size_t)(right - left) * sizeof(*d.ds));
    }
    for (int j = left, next; j < right; j = next) {
      next = minimum(j + PW, right);
      int from = count, to = 0;
      for (int r0 = 0; r0 < count; r0 += MR) {
        const Interval interval = intervals[r0 / MR];
        if (interval.low >= next || interval.high <= j) continue;
        from = minimum(from, r0);
        to = minimum(r0 + MR, count);
      }
      if (to <= from) continue;
      const int skipped = from / M::PACK / M::BLOCK * M::BLOCK, vecs = (next - j) / VL;
      const int64_t along = row_steps<M>(to) - skipped, at = (int64_t)skipped * tile + j;
      for (int c = 0; c < v_out; c += MR)
        gemm_accumulate(d.first_rows, MR, vecs, along, packed_block.gb + c * LD + skipped, LD, 1, d.p + at, tile,
                        d.columns_v + c * tile + j, tile);
      for (int c = 0; c < out; c += MR)
        gemm_accumulate(d.first_rows, MR, vecs, along, packed_block.qb + c * LD + skipped, LD, 1, d.ds + at, tile,
                        d.columns_k + c * tile + j, tile);
    }
  }

  // The gradients of keys or values of a tile from their transposes.
  void transpose_gradients(const float* columns, int key_count, int dim, float* to) const {
    for (int j = 0; j < key_count; j += VL)
      for (int c = 0; c < dim; c += VL)
        transpose_block((const uint32_t*)columns + c * tile + j, tile, (uint32_t*)to + j * dim + c, dim);
  }

  void find_intervals(int64_t b, int64_t kh, Workspace& d) const {
    for (int64_t g = 0; g < group; g++)
      for (int64_t block = 0; block < blocks; block++) {
        Interval interval{INT32_MAX, 0};
        // With a single visit the visit itself finds out.
        const bool skips = masked && (blocks > 1 || tiles > 1);
        if (!skips) interval = Interval{0, (int)w.k_len};
        for (int64_t i = block * BLOCK; i < minimum((block + 1) * BLOCK, w.q_len) && skips; i++) {
          MaskRow row;
          mask_row(w, b, kh * group + g, i, row);
          if (row.high <= row.low) continue;
          interval.low = minimum(interval.low, (int)row.low);
          interval.high = maximum(interval.high, (int)row.high);
        }
        d.intervals[g * blocks + block] = interval;
      }
  }

  // Whether a block of queries may attend to keys [t0, t1).
  bool is_attended(int64_t t0, int64_t t1, const Workspace& d) const {
    for (int64_t x = 0; x < group * blocks; x++)
      if (d.intervals[x].low < t1 && d.intervals[x].high > t0) return true;
    return false;
  }

  // The constant term of a row's delta, before weights are added.
  void start_delta(int64_t b, int64_t h) const {
    const int64_t from = row_index(w, b, h, 0);
    for (int64_t r = from; r < from + w.q_len; r++) w.delta[r] = w.grad_lse != nullptr ? -w.grad_lse[r] : 0.0f;
  }

  // Prefetches what a key head will write, while it is processed.
  Prefetch prefetch_of(int64_t b, int64_t kh) const {
    Prefetch a;
    a.clear();
    if (chunks.pieces > 1) return a;
    if (of_keys) a.add<IO>(w.grad_key, b, kh, w.k_len, w.head_dim, true);
    if (of_keys) a.add<IO>(w.grad_value, b, kh, w.k_len, w.value_dim, true);
    if (of_queries) a.add<IO>(w.grad_query, b, kh * group, w.q_len, w.head_dim, true);
    a.spread_over(group * ((w.q_len + MR - 1) / MR) * ((w.k_len + PW - 1) / PW));
    return a;
  }

  // Prefetches what the next key head reads, of this call or of the next one.
  void prefetch_next(Prefetch& a, const Task& next, int64_t b, int64_t kh) const {
    if (chunks.pieces > 1) return;
    a.add<IO>(next.key, b, kh, next.k_len, next.head_dim);
    a.add<IO>(next.value, b, kh, next.k_len, next.value_dim);
    a.add<IO>(next.query, b, kh * group, next.q_len, next.head_dim);
    a.add<IO>(next.grad_output, b, kh * group, next.q_len, next.value_dim);
    a.spread_over(group * ((w.q_len + MR - 1) / MR) * ((w.k_len + PW - 1) / PW));
  }

  // The queries that may attend to keys of a chunk.
  QuerySums& begin_chunk(const Workspace& d, int64_t chunk, QuerySumTree& tree) const {
    if (!masked) return tree.begin(0, w.q_len);
    const int64_t from = chunk * KeyChunks::KEYS, to = from + KeyChunks::KEYS;
    int64_t first = blocks, end = 0;
    for (int64_t g = 0; g < group; g++)
      for (int64_t block = 0; block < blocks; block++) {
        const Interval& interval = d.intervals[g * blocks + block];
        if (interval.low >= to || interval.high <= from) continue;
        first = minimum(first, block);
        end = maximum(end, block + 1);
      }
    QuerySums& sums = tree.begin(minimum(first, end) * BLOCK, minimum(end * BLOCK, w.q_len));
    chunks.clear(sums);
    return sums;
  }

  void do_chunk(int64_t b, int64_t kh, int64_t chunk, const QuerySums& sums, Workspace& d) const {
    const int64_t length = diagonal_length(w), h0 = kh * group, rows = w.q_len * out;
    float* const diagonal_grads = sums.at + chunks.query_floats();
    memset(diagonal_grads, 0, (size_t)(group * chunks.diagonal_size) * sizeof(float));
    for (int64_t t = chunk * chunk_tiles; t < minimum((chunk + 1) * chunk_tiles, tiles); t++) {
      int64_t t0 = t * tile;
      int key_count = (int)minimum((int64_t)tile, w.k_len - t0);
      if (!of_keys && !is_attended(t0, t0 + key_count, d)) continue;
      pack_keys(b, kh, t0, key_count, d);
      d.first_keys = !masked && t == chunk * chunk_tiles;
      for (int64_t g = 0; g < group; g++)
        for (int64_t block = 0; block < blocks; block++) {
          Interval interval = d.intervals[g * blocks + block];
          if (interval.low >= t0 + key_count || interval.high <= t0) continue;
          const int64_t first = block * BLOCK, count = minimum((int64_t)BLOCK, w.q_len - first);
          if (!blocks_allow(w, b, h0 + g, first, count, t0, t0 + key_count)) continue;
          visit(b, h0 + g, block, t0, key_count, d, d.diagonal + g * diagonals * length,
                diagonal_grads + g * chunks.diagonal_size, sums.at + g * rows);
        }
      if (TILES && of_keys) {
        transpose_gradients(d.columns_k, key_count, out, d.sums_k);
        transpose_gradients(d.columns_v, key_count, v_out, d.sums_v);
      }
      for (int j = 0; j < key_count && of_keys; j++) {
        put_row<IO>(at<IO>(w.grad_key, b, kh, t0 + j), (int)w.head_dim, d.dk.at + j * d.dk.ld, (float)w.scale);
        if (d.dv.at != d.sums_v) continue;
        put_row<IO>(at<IO>(w.grad_value, b, kh, t0 + j), (int)w.value_dim, d.dv.at + j * d.dv.ld, 1.0f);
      }
    }
  }

  // A piece of a key head's chunks.
  void do_piece(int64_t b, int64_t kh, int64_t piece, const Sums& sums, Workspace& d) const {
    const int64_t length = diagonal_length(w), h0 = kh * group;
    const bool whole = chunks.pieces == 1;
    for (int64_t h = h0; h < h0 + group && whole; h++) single_tile ? start_delta(b, h) : write_delta(b, h);
    for (int64_t g = 0; g < group && diagonals > 0; g++)
      make_diagonals(w, h0 + g, d.diagonal + g * diagonals * length);
    find_intervals(b, kh, d);
    memset(d.is_packed, 0, (size_t)cached_blocks * sizeof(bool));
    QuerySumTree tree(chunks, whole ? d.dq : piece_of(sums, b, kh, piece), whole ? d.dq + chunks.floats() : d.dq);
    const int64_t first = piece * chunks.piece_chunks;
    for (int64_t chunk = first; chunk < minimum(first + chunks.piece_chunks, chunks.count); chunk++) {
      do_chunk(b, kh, chunk, begin_chunk(d, chunk, tree), d);
      tree.finish_chunk();
    }
    const QuerySums& total = tree.total();
    chunks.complete(total);
    if (whole) write_sums(b, kh, total.at, 0, group * w.q_len, sums);
  }

  // Results from the sums over all keys: gradients of queries [first, end) of a key head, and those of its diagonals.
  void write_sums(int64_t b, int64_t kh, const float* total, int64_t first, int64_t end, const Sums& sums) const {
    for (int64_t r = first; r < end && of_queries; r++)
      put_row<IO>(at<IO>(w.grad_query, b, kh * group + r / w.q_len, r % w.q_len), (int)w.head_dim, total + r * out,
                  (float)w.scale);
    if (first > 0 || learned_diagonals == 0) return;
    memcpy(sums.diagonal + (b * w.heads + kh * group) * chunks.diagonal_size, total + chunks.query_floats(),
           (size_t)(group * chunks.diagonal_size) * sizeof(float));
  }

  void add_pieces(int threads, const Sums& sums) const {
    const int64_t stripes = group * blocks;  // of BLOCK rows or fewer, so that several threads share a head
    parallel_units(w, threads, w.batch * w.kv_heads * stripes, [&](int64_t unit) {
      const int64_t head = unit / stripes, b = head / w.kv_heads, kh = head % w.kv_heads;
      const int64_t first = unit % stripes * group * w.q_len / stripes, end = (unit % stripes + 1) * group * w.q_len / stripes;
      float* const total = piece_of(sums, b, kh, 0);
      chunks.combine_pieces(total, chunks.floats(), first * chunks.out, end * chunks.out);
      if (first == 0) chunks.combine_pieces(total, chunks.floats(), chunks.query_floats(), chunks.floats());
      write_sums(b, kh, total, first, end, sums);
    });
  }

  // The sum of `value(b)` over the batch: pairs of neighbours, then pairs of pairs, and so on.
  template <class Value> float add_batch(const Value& value) const {
    float totals[64];
    int count = 0;
    for (int64_t b = 0; b < w.batch; b++) {
      totals[count++] = value(b);
      for (int64_t node = b; node % 2 == 1; node /= 2, count--) totals[count - 2] += totals[count - 1];
    }
    for (; count > 1; count--) totals[count - 2] += totals[count - 1];
    return totals[0];
  }

  // Adds diagonal sums to tables of distances: those of a sequence in order and in double, as a clipped distance
  // accumulates many terms; then the batch, pairs of neighbours first.
  void add_diagonals(const Sums& sums) const {
    int64_t length = diagonal_length(w), next = 0;
    for (int r = 0; r < w.num_rules; r++) {
      const ch_rule& rule = w.rules[r];
      if (rule.kind != CH_RULE_RELATIVE || rule.grad == nullptr) continue;
      for (int64_t h = 0; h < w.heads; h++) {
        int64_t last = w.q_len + w.k_len - 2;  // the first sum of the column
        for (int64_t x = last; x >= 0; x--) {
          int64_t distance = w.query_offset + w.q_len - 1 - x;
          int64_t column = clip(distance, -rule.reach, rule.reach);
          if (x > 0 && clip(distance + 1, -rule.reach, rule.reach) == column) continue;
          rule.grad[h * rule.grad_head + column + rule.reach] += add_batch([&](int64_t b) {
            const float* const diagonal = sums.diagonal + ((b * w.heads + h) * learned_diagonals + next) * length;
            double total = 0.0;
            for (int64_t y = last; y >= x; y--) total += diagonal[y];
            return (float)total;
          });
          last = x - 1;
        }
      }
      next++;
    }
  }

  static double operations_of(const ch_attention& w, double places) {
    return 5.0 * (double)w.heads * places * (double)(w.head_dim + w.value_dim);
  }

  // Large segments one after the other, each with all threads; then the key heads of all others in parallel.
  int run_segments(Segments& segments) const {
    Fault fault;
    const int threads = threads_for(w, operations_of(w, segments.operations));
    // Before anything is written: a band is ignored between segments, but their tokens may be inside it.
    if (w.before != INT64_MAX || w.after != INT64_MAX)
      parallel_units(w, threads, segments.count * w.heads, [&](int64_t unit) {
        const Task part = segments.part(w, unit / w.heads, 1);
        if (part.k_len > 0) Backward(part).check_finite(0, unit % w.heads, fault);
      });
    if (fault.get() != CH_OK) return fault.get();
    segments.for_gaps(w, [&](int64_t b, int64_t first, int64_t end) {
      for (int64_t kh = 0; kh < w.kv_heads; kh++) clear_keys(b, kh, first, end);
    });
    segments.sort(w.kv_heads);
    for (int64_t s = 0; s < segments.large && fault.get() == CH_OK; s++) {
      Task part = segments.part(w, s, threads);
      part.units = w.kv_heads;  // the only ones at a time
      if (const int code = Backward(part).execute(threads); code != CH_OK) fault.set(code);
    }
    const int64_t first = segments.large * w.kv_heads, units = segments.count * w.kv_heads - first;
    parallel_units(w, threads, units, [&](int64_t unit) {
      const int64_t head = first + unit, kh = head % w.kv_heads, next = head + threads;
      const Task part = segments.part(w, head / w.kv_heads, 1);
      const Backward one(part);
      if (part.k_len == 0) return one.clear_queries(0, kh);
      Prefetch prefetch = one.prefetch_of(0, kh);
      if (next < segments.count * w.kv_heads)
        one.prefetch_next(prefetch, segments.part(w, next / w.kv_heads, 1), 0, next % w.kv_heads);
      one.do_head(0, kh, 0, Sums{nullptr, nullptr}, prefetch, fault);
    });
    clearhead::trim_scratch();
    return fault.get();
  }

  void do_head(int64_t b, int64_t kh, int64_t piece, const Sums& sums, const Prefetch& prefetch, Fault& fault) const {
    Workspace d, sizes;
    char* work = (char*)scratch(clearhead::SLOT_WORK, (size_t)workspace_bytes(sizes, nullptr));
    if (work == nullptr) return fault.set(CH_NO_MEMORY);
    workspace_bytes(d, work);
    d.prefetch = prefetch;
    do_piece(b, kh, piece, sums, d);
  }

  int run() const {
    if (w.batch == 0 || w.q_len == 0 || w.k_len == 0) return empty();
    Segments segments(w, true);
    if (segments.no_memory) return CH_NO_MEMORY;
    if (segments.count > 0) return run_segments(segments);
    if (w.token_numbers != nullptr) return CH_BAD_OPTION;
    const int code = execute(threads_for(w, operations_of(w, (double)w.batch * (double)w.q_len * (double)w.k_len)));
    clearhead::trim_scratch();
    return code;
  }

  int execute(int threads) const {
    if (w.k_len == 0) return empty();
    Fault fault;
    if (masked) check_finite(threads, fault);
    if (fault.get() != CH_OK) return fault.get();
    Sums sums, sizes;
    char* base = (char*)scratch(clearhead::SLOT_PARTIAL, (size_t)sums_bytes(sizes, nullptr));
    if (base == nullptr) return CH_NO_MEMORY;
    sums_bytes(sums, base);
    if (chunks.pieces > 1)
      parallel_units(w, threads, w.batch * w.heads, [&](int64_t unit) { write_delta(unit / w.heads, unit % w.heads); });
    int64_t outer_b = share_batch ? 1 : w.batch, outer_h = share_heads ? 1 : w.kv_heads;
    parallel_units(w, threads, outer_b * outer_h * chunks.pieces, [&](int64_t unit) {
      // Early keys first: under a causal mask they have the most queries.
      int64_t piece = unit / (outer_b * outer_h), head = unit % (outer_b * outer_h);
      int64_t b0 = head / outer_h, h0 = head % outer_h;
      for (int64_t b = b0; b < (share_batch ? w.batch : b0 + 1); b++)
        for (int64_t kh = h0; kh < (share_heads ? w.kv_heads : h0 + 1); kh++) {
          Prefetch prefetch = prefetch_of(b, kh);
          const int64_t next = unit + threads;
          if (!share_batch && !share_heads && next < w.units) prefetch_next(prefetch, w, next / w.kv_heads, next % w.kv_heads);
          do_head(b, kh, piece, sums, prefetch, fault);
        }
    });
    if (fault.get() == CH_OK && chunks.pieces > 1) add_pieces(threads, sums);
    if (fault.get() == CH_OK && learned_diagonals > 0) add_diagonals(sums);
    return fault.get();
  }

  // Without queries or without keys every gradient is 0.
  int empty() const {
    for (int64_t b = 0; b < w.batch; b++)
      for (int64_t kh = 0; kh < w.kv_heads; kh++) {
        clear_queries(b, kh);
        clear_keys(b, kh, 0, w.k_len);
      }
    return CH_OK;
  }

  void clear_queries(int64_t b, int64_t kh) const {
    for (int64_t h = kh * group; h < (kh + 1) * group; h++) {
      start_delta(b, h);
      for (int64_t i = 0; i < w.q_len && of_queries; i++)
        memset(at<IO>(w.grad_query, b, h, i), 0, (size_t)w.head_dim * sizeof(element));
    }
  }

  void clear_keys(int64_t b, int64_t kh, int64_t first, int64_t end) const {
    for (int64_t j = first; j < end && of_keys; j++) {
      memset(at<IO>(w.grad_key, b, kh, j), 0, (size_t)w.head_dim * sizeof(element));
      memset(at<IO>(w.grad_value, b, kh, j), 0, (size_t)w.value_dim * sizeof(element));
    }
  }
};

}  // namespace CH_NS
