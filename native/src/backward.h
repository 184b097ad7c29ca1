// Backward: for each tile of keys, loop over the blocks of queries that attend to it, recompute their weights from the
// saved row maximum and normaliser (FlashAttention, Dao et al. 2022, algorithm 4), and accumulate the gradients of the
// tile's keys and values in cache; the gradients of queries accumulate in memory. With few heads the keys are split
// into chunks, each with its own sum, and the sums are added in order at the end. The split depends on the shape alone.
#pragma once

#include "prefetch.h"
#include "segments.h"

namespace CH_NS {

template <class M, class IO> struct Backward {
  typedef typename M::number number;
  typedef typename IO::type element;
  static constexpr int BLOCK = 96;
  // Bytes of packed queries and gradients that a thread caches if those of a head fit: every tile of keys reads them.
  static constexpr int64_t MOST_LAID_OUT = int64_t(1) << 23;

  const Task& w;
  int64_t group, blocks;
  int tile;
  Panels keys, queries, grads;  // B operands of the last three GEMMs: a tile of keys, a block of queries, a block of gradients
  int numbers, v_numbers, steps, v_steps, out, v_out;
  int64_t tiles, chunks, chunk_tiles;
  int64_t laid_out;  // blocks of queries that stay packed: all of a key head's, or only the current one
  bool masked, plain, capped, share_batch, share_heads;
  bool alone;  // one tile covers all keys: a row's delta is computed together with its weights
  float base2;
  Dropout dropout;
  int64_t diagonals, learned;  // diagonal rules, and how many of them need a gradient
  const ch_statistics* observed;  // null if no statistic has a gradient

  // A block of queries and of output gradients, packed as A rows and as B.
  struct Laid {
    const number *q, *g, *qb, *gb;
  };

  // Rows that a tile's gradients accumulate in.
  struct Target {
    float* at;
    int64_t ld;
  };

  struct Desk {
    number* laid;  // [laid_out][block_numbers()]
    bool* open;  // [laid_out]: whether a block is packed
    number *kt, *vt;  // panels
    number* packed;  // rows of B
    const number* kn;  // these, or the tensor's rows in place
    float *sums_k, *sums_v;  // [tile][out], [tile][v_out]
    Target dk, dv;  // of the current tile: the buffers above, or the result tensors
    float *s, *dp;  // [MR][tile], for bf16 dot products only
    float* slope;  // [MR][tile]
    KeptRows keep;  // [MR]
    number *p, *ds;  // [BLOCK / PAIR][tile], A with rows along keys
    number* dr;  // [BLOCK][tile / PAIR], A with rows along queries
    Row* row;
    float *largest, *share, *delta;
    float* diagonal;  // [group][diagonals][length]
    Span* spans;  // [group][blocks]
    number* staged;
    float* dq;  // [group][q_len][out], if there is one chunk
    Prefetch prefetch;
    bool first_keys, first_rows;  // the tile is the first of its chunk, the block the first of its tile: sums are set, not added to
  };

  static int tile_of(const ch_attention& w) {
    if (has_tables(w)) return most(64, PW);
    return (int)least((int64_t)CH_TILE, most((int64_t)PW, round_up(w.k_len, PW)));
  }

  static bool has_gradients(const ch_statistics* s) {
    return s != nullptr && (s->grad_max != nullptr || s->grad_entropy != nullptr || s->grad_distance != nullptr ||
                            s->grad_sink != nullptr || s->grad_received != nullptr);
  }

  explicit Backward(const Task& work)
      : w(work), tile(tile_of(work)), keys(work.head_dim, row_steps<M>(tile)),
        queries(work.head_dim, row_steps<M>(BLOCK)), grads(work.value_dim, row_steps<M>(BLOCK)) {
    group = w.heads / w.kv_heads;
    blocks = (w.q_len + BLOCK - 1) / BLOCK;
    numbers = row_numbers<M>((int)w.head_dim);
    v_numbers = row_numbers<M>((int)w.value_dim);
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
    alone = tiles == 1 && observed == nullptr;
    learned = 0;
    capped = share_batch = share_heads = false;
    for (int r = 0; r < w.num_rules; r++) {
      const ch_rule& rule = w.rules[r];
      learned += rule.kind == CH_RULE_RELATIVE && rule.grad != nullptr;
      capped = capped || rule.kind == CH_RULE_SOFTCAP;
      if (rule.kind != CH_RULE_DENSE || rule.grad == nullptr) continue;
      // Heads that share a row of the bias are processed by one thread, in order.
      share_batch = share_batch || (rule.grad_batch == 0 && w.batch > 1);
      share_heads = share_heads || (rule.grad_head == 0 && w.kv_heads > 1);
    }
    int64_t units = share_batch || share_heads ? (share_batch ? 1 : w.batch) * (share_heads ? 1 : w.kv_heads) : w.units;
    chunks = most((int64_t)1, least((16 + units - 1) / most(units, (int64_t)1), tiles * tile / 512));
    chunk_tiles = most((int64_t)1, (tiles + chunks - 1) / chunks);
    chunks = most((int64_t)1, (tiles + chunk_tiles - 1) / chunk_tiles);
    laid_out = group * blocks;
    if (chunk_tiles < 2 || laid_out * block_numbers() * (int64_t)sizeof(number) > MOST_LAID_OUT) laid_out = 1;
  }

  // With one panel, rows of floats have the same layout as A and as B.
  static bool panels_as_rows(const Panels& panels) { return M::PAIR == 1 && panels.count == 1; }
  // Operands of a packed block: of one tensor's rows, and of queries and gradients together.
  static int64_t numbers_of(int row, const Panels& panels) {
    return (int64_t)BLOCK * row + (panels_as_rows(panels) ? 0 : panels.numbers());
  }
  int64_t block_numbers() const { return numbers_of(numbers, queries) + numbers_of(v_numbers, grads); }

  int64_t desk_bytes(Desk& d, char* base) const {
    Carver c{base};
    constexpr bool single = M::PAIR == 1;
    d.laid = c.template take<number>(laid_out * block_numbers());
    d.open = c.template take<bool>(laid_out);
    d.kt = c.template take<number>((int64_t)tile * numbers);
    d.vt = c.template take<number>((int64_t)tile * v_numbers);
    d.packed = c.template take<number>(keys.numbers());
    d.sums_k = c.template take<float>((int64_t)tile * out);
    d.sums_v = c.template take<float>((int64_t)tile * v_out);
    d.s = c.template take<float>(single ? 0 : (int64_t)MR * tile);
    d.dp = c.template take<float>(single ? 0 : (int64_t)MR * tile);
    d.slope = c.template take<float>((int64_t)MR * tile);
    d.keep.groups = KeptRows::groups_of(tile);
    d.keep.bits = c.template take<KeptBits>(dropout.on ? MR * d.keep.groups : 0);
    d.p = c.template take<number>((int64_t)BLOCK / M::PAIR * tile);
    d.ds = c.template take<number>((int64_t)BLOCK / M::PAIR * tile);
    d.dr = single ? d.ds : c.template take<number>((int64_t)BLOCK * tile / M::PAIR);
    d.row = c.template take<Row>(BLOCK);
    d.largest = c.template take<float>(BLOCK);
    d.share = c.template take<float>(BLOCK);
    d.delta = c.template take<float>(BLOCK);
    d.diagonal = c.template take<float>(diagonals > 0 ? group * diagonals * diagonal_length(w) : 0);
    d.spans = c.template take<Span>(group * blocks);
    d.staged = c.template take<number>((int64_t)VL * most(numbers, v_numbers));
    d.dq = chunks == 1 ? c.template take<float>(group * w.q_len * out) : nullptr;
    return c.next - base;
  }

  // Sums that outlive a unit: gradients of queries by chunk, and of diagonals by chunk, batch and head.
  struct Sums {
    float* dq;
    float* diagonal;
  };

  int64_t sums_bytes(Sums& s, char* base) const {
    Carver c{base};
    int64_t heads = chunks * w.batch * w.heads;
    s.dq = c.template take<float>(chunks > 1 ? heads * w.q_len * out : 0);
    s.diagonal = c.template take<float>(learned > 0 ? heads * learned * diagonal_length(w) : 0);
    return c.next - base;
  }

  int64_t sums_place(int64_t chunk, int64_t b, int64_t h) const { return (chunk * w.batch + b) * w.heads + h; }

  void write_delta(int64_t b, int64_t h) const {
    bool unrounded = w.output32 != nullptr;
    for (int64_t i = 0; i < w.q_len; i++) {
      int64_t place = row_index(w, b, h, i);
      const element* g = at<IO>(w.grad_output, b, h, i);
      const float* o = unrounded ? w.output32 + place * w.value_dim : at<Float32>(w.output, b, h, i);
      vf sum = (vf){};
      int c = 0;
      for (; c + VL <= w.value_dim; c += VL) sum += get_vector<IO>(g + c) * load(o + c);
      float total = sum_of(sum);
      for (; c < w.value_dim; c++) total += get_one<IO>(g + c) * o[c];
      w.delta[place] = w.grad_lse != nullptr ? total - w.grad_lse[place] : total;
    }
  }

  // 0 * NaN is NaN, so with a mask such a call is left to the caller.
  void check_finite(int threads, Fault& fault) const {
    attend(w, threads, w.batch * w.heads, [&](int64_t unit) { check_finite(unit / w.heads, unit % w.heads, fault); });
  }

  void check_finite(int64_t b, int64_t h, Fault& fault) const {
    bool fine = all_finite<IO>(at<IO>(w.query, b, h, 0), w.query.row, w.q_len, (int)w.head_dim);
    fine = fine && all_finite<IO>(at<IO>(w.grad_output, b, h, 0), w.grad_output.row, w.q_len, (int)w.value_dim);
    if (w.grad_lse != nullptr)
      fine = fine && all_finite<Float32>(w.grad_lse + row_index(w, b, h, 0), w.q_len, 1, (int)w.q_len);
    if (h < w.kv_heads) {
      fine = fine && all_finite<IO>(at<IO>(w.key, b, h, 0), w.key.row, w.k_len, (int)w.head_dim);
      fine = fine && all_finite<IO>(at<IO>(w.value, b, h, 0), w.value.row, w.k_len, (int)w.value_dim);
    }
    if (!fine) fault.set(CH_NOT_FINITE);
  }

  void pack_keys(int64_t b, int64_t kh, int64_t t0, int count, Desk& d) const {
    const element* key = at<IO>(w.key, b, kh, t0);
    pack_panels<M, IO>(key, w.key.row, count, (int)w.head_dim, d.kt, d.staged);
    pack_panels<M, IO>(at<IO>(w.value, b, kh, t0), w.value.row, count, (int)w.value_dim, d.vt, d.staged);
    const bool lying = lies_laid_out<M, IO>(w.key, w.head_dim);
    d.kn = lying ? (const number*)key : d.packed;
    if (!lying) pack_rows<M, IO>(key, w.key.row, count, (int)w.head_dim, d.packed, keys);
    d.first_rows = !masked;
    d.dk = target_of(w.grad_key, b, kh, t0, w.head_dim, d.sums_k, out);
    d.dv = target_of(w.grad_value, b, kh, t0, w.value_dim, d.sums_v, v_out);
    if (!masked) return;
    memset(d.sums_k, 0, (size_t)count * out * sizeof(float));
    memset(d.sums_v, 0, (size_t)count * v_out * sizeof(float));
  }

  // Where a tile's gradients accumulate: in the workspace, or in the result if a single GEMM computes them.
  Target target_of(const ch_tensor& grad, int64_t b, int64_t kh, int64_t t0, int64_t dim, float* scratch_tile, int64_t ld) const {
    const bool lands = !masked && group * blocks == 1 && __is_same(element, float) && dim % VL == 0;
    return lands ? Target{(float*)at<IO>(grad, b, kh, t0), grad.row} : Target{scratch_tile, ld};
  }

  // `count` rows of queries or of output gradients, as A rows and, from `b` on, as B. Read in place if possible;
  // otherwise packed at `to`, unless they are there (`open`).
  const number* lay_out(const ch_tensor& t, const element* from, int64_t dim, const Panels& panels, int count, bool open,
                        number* to, const number*& b) const {
    if (lies_laid_out<M, IO>(t, dim)) return b = (const number*)from;
    const int ld = row_numbers<M>((int)dim);
    number* const second = panels_as_rows(panels) ? to : to + (int64_t)BLOCK * ld;
    if (!open) {
      for (int r = 0; r < count; r++) get_numbers<M, IO>(from + r * t.row, (int)dim, to + (int64_t)r * ld, ld);
      if (second != to) pack_rows<M, IO>(from, t.row, count, (int)dim, second, panels);
    }
    b = second;
    return to;
  }

  Laid open_block(int64_t b, int64_t h, int64_t block, int count, Desk& d) const {
    int64_t first = block * BLOCK, slot = laid_out > 1 ? h % group * blocks + block : 0;
    const bool open = laid_out > 1 && d.open[slot];
    number* to = d.laid + slot * block_numbers();
    Laid laid;
    laid.q = lay_out(w.query, at<IO>(w.query, b, h, first), w.head_dim, queries, count, open, to, laid.qb);
    to += numbers_of(numbers, queries);
    laid.g = lay_out(w.grad_output, at<IO>(w.grad_output, b, h, first), w.value_dim, grads, count, open, to, laid.gb);
    d.open[slot] = true;
    for (int r = 0; r < count; r++) {
      int64_t place = row_index(w, b, h, first + r);
      if (masked) mask_row(w, b, h, first + r, d.row[r]);
      d.largest[r] = w.softmax[2 * place];
      d.share[r] = w.softmax[2 * place + 1];
      d.delta[r] = w.delta[place];
    }
    return laid;
  }

  // Degree of the polynomial in the exponential: bfloat16 needs no more.
  static constexpr int DEGREE = M::PAIR == 1 ? 5 : 4;

  // Scores of the rows from r0 on, and gradients of their weights: floats in the buffers that the last three GEMMs
  // read.
  float* scores_of(const Desk& d, int r0) const {
    if constexpr (M::PAIR == 1) return d.p + (int64_t)r0 * tile;
    else return d.s;
  }
  float* pulls_of(const Desk& d, int r0) const {
    if constexpr (M::PAIR == 1) return d.ds + (int64_t)r0 * tile;
    else return d.dp;
  }

  // Scores of `count` rows and gradients of their weights, in floats, over columns [c0, c1) of the tile.
  void multiply_rows(int r0, int count, int c0, int c1, const Laid& laid, Desk& d) const {
    int c1r = (int)round_up(c1, VL);
    for (int p = c0 / PW; p * PW < c1; p++) {
      int from = most(c0, p * PW), to = least(c1r, (p + 1) * PW), vecs = (to - from) / VL;
      int64_t inside = from - p * PW;
      d.prefetch.step();
      product<M, SET>(count, vecs, steps, laid.q + (int64_t)r0 * numbers, numbers, 1,
                      d.kt + (int64_t)p * PW * numbers + inside, PW, scores_of(d, r0) + from, tile);
      product<M, SET>(count, vecs, v_steps, laid.g + (int64_t)r0 * v_numbers, v_numbers, 1,
                      d.vt + (int64_t)p * PW * v_numbers + inside, PW, pulls_of(d, r0) + from, tile);
    }
  }

  // Masks columns [c0, c1) of a row of the block, and the rest of the last vector.
  CH_INLINE void close_row(const Desk& d, int row, int64_t t0, int c0, int c1, float* s) const {
    const int c1r = (int)round_up(c1, VL);
    if (!masked) end_scores(s, c1);
    else if (!sees_all(d.row[row], t0 + c0, t0 + c1r)) forbid(w, d.row[row], t0 + c0, c1r - c0, s + c0);
  }

  // A row's scores to weights, and its delta if all its keys are in this tile. Forward may have rounded the scores
  // differently, and weights that do not sum to 1 leave a residue where terms should cancel, so delta is the mean under
  // these weights.
  template <bool DROPS>
  CH_INLINE void weigh_alone(float* s, const float* dp, int r, int c0, int c1r, int row, Desk& d) const {
    const vf scale = all(base2), shift = all(d.largest[row]), share = all(d.share[row]);
    const KeptRows keep = d.keep;
    vf sum = {}, whole = {};
    for (int c = c0; c < c1r; c += VL) {
      const vf e = exp2_of<DEGREE>((load(s + c) - shift) * scale) * share;
      sum += DROPS ? e * factor_of(keep, r, c) * load(dp + c) : e * load(dp + c);
      whole += e;
      store(s + c, e);
    }
    // The sum over keys excludes the sink's weight.
    const float total = w.sink == nullptr ? sum_of(whole) : 1.0f;
    d.delta[row] += total > 0.0f ? sum_of(sum) / total : sum_of(sum);
  }

  // Dropout factors of the weights of row r, from column c on.
  CH_INLINE vf factor_of(const KeptRows& keep, int r, int c) const {
    return where_bits(keep.from(r, c), all(dropout.factor));
  }

  void draw(int64_t b, int64_t h, int64_t i, int r, int64_t t0, int c0, int c1r, Desk& d) const {
    d.keep.find(r, draw_of(w, dropout, b, h, i), w.first_key + t0, c0, c1r);
  }

  // Turns a row's scores into weights (with dropout), and the gradients of the weights into those of the scores.
  template <bool DROPS>
  CH_INLINE void differentiate_row(float* s, float* dp, int r, int c0, int c1r, int row, Desk& d) const {
    if (alone) weigh_alone<DROPS>(s, dp, r, c0, c1r, row, d);
    const vf scale = all(base2), shift = all(d.largest[row]), share = all(d.share[row]), delta = all(d.delta[row]);
    const KeptRows keep_rows = d.keep;
    for (int c = c0; c < c1r; c += VL) {
      const vf e = alone ? load(s + c) : exp2_of<DEGREE>((load(s + c) - shift) * scale) * share;
      const vf factor = DROPS ? factor_of(keep_rows, r, c) : (vf){};
      store(s + c, DROPS ? e * factor : e);
      store(dp + c, e * ((DROPS ? load(dp + c) * factor : load(dp + c)) - delta));
    }
  }

  // Applies `differentiate_row` to `count` rows.
  void differentiate(int64_t b, int64_t h, int64_t first, int r0, int count, int64_t t0, int c0, int c1, Desk& d,
                     const float* diagonal, float* diagonal_grads) const {
    int c1r = (int)round_up(c1, VL);
    for (int r = 0; r < count; r++) {
      float *s = scores_of(d, r0) + r * tile, *dp = pulls_of(d, r0) + r * tile, *slope = d.slope + r * tile;
      int64_t i = first + r0 + r;
      if (!plain) apply_rules(w, diagonal, b, h, i, t0 + c0, c1 - c0, s + c0, capped ? slope + c0 : nullptr);
      close_row(d, r0 + r, t0, c0, c1, s);
      if (dropout.on) draw(b, h, i, r, t0, c0, c1r, d);
      if (observed != nullptr) differentiate_observed(b, h, i, r, r0 + r, t0, c0, c1r, s, dp, d);
      else if (dropout.on) differentiate_row<true>(s, dp, r, c0, c1r, r0 + r, d);
      else differentiate_row<false>(s, dp, r, c0, c1r, r0 + r, d);
      if (!plain) unapply_rules(b, h, i, t0, c0, c1, dp, slope, diagonal_grads);
    }
  }

  // Like `differentiate`, with statistics: they add to the gradient of a weight, and the row maximum has a gradient of
  // its own. `delta` includes their sums over the row.
  void differentiate_observed(int64_t b, int64_t h, int64_t i, int r, int row, int64_t t0, int c0, int c1r, float* s,
                              float* dp, Desk& d) const {
    const ch_statistics& of = *observed;
    int64_t place = row_index(w, b, h, i);
    auto of_row = [&](const float* grads) { return all(grads != nullptr ? grads[place] : 0.0f); };
    bool tied = of.grad_max != nullptr;
    vf by_max = of_row(of.grad_max), peak = all(tied ? of.ties[2 * place] : 0.0f);
    if (tied) by_max /= all(most(of.ties[2 * place + 1], 1.0f));
    vf by_entropy = of_row(of.grad_entropy), by_distance = of_row(of.grad_distance);
    vf by_sink = of_row(of.grad_sink);
    const float* received = of.grad_received != nullptr ? of.grad_received + (b * w.heads + h) * w.k_len : nullptr;
    float log_share = d.share[row] > 0.0f ? __builtin_logf(d.share[row]) : 0.0f;
    vf scale = all(base2), shift = all(d.largest[row]), share = all(d.share[row]), delta = all(d.delta[row]);
    vf lowest = all(-1e4f), gap = all((float)(w.query_offset + i - t0 - c0)) - counting(), zero = {};
    int64_t sink_columns = of.grad_sink != nullptr ? of.sink_keys - t0 : 0;
    for (int c = c0; c < c1r; c += VL, gap -= all((float)VL)) {
      vf score = load(s + c), x = (score - shift) * scale, e = exp2_of<5>(x) * share;
      // -log(weight) - 1
      vf surprise = -(vmax(x, lowest) * all(LN2) + all(log_share)) - all(1.0f);
      vf g = by_entropy * surprise + by_distance * absolute(gap);
      if (c < sink_columns) g += first_of(by_sink, least((int64_t)VL, sink_columns - c));
      if (received != nullptr) g += reach_received(received, t0 + c);
      vf k = dropout.on ? factor_of(d.keep, r, c) : all(1.0f);
      store(s + c, e * k);
      vf change = e * (load(dp + c) * k + g - delta);
      store(dp + c, tied ? change + (score == peak ? by_max : zero) : change);
    }
  }

  CH_INLINE vf reach_received(const float* received, int64_t from) const {
    if (from + VL <= w.k_len) return load(received + from);
    vf v = {};
    for (int64_t x = 0; from + x < w.k_len; x++) v[x] = received[from + x];
    return v;
  }

  // From the gradient of the last rule's result to that of the scaled score; accumulates the rules' own gradients.
  void unapply_rules(int64_t b, int64_t h, int64_t i, int64_t t0, int c0, int c1, float* ds, const float* slope,
                     float* grads) const {
    int64_t length = diagonal_length(w);
    int64_t next = learned;
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
  void spread(int r0, int count, int left, int right, int c0, int c1r, Desk& d) const {
    for (int r = 0; r < count; r++) {
      for (int which = 0; which < 2; which++) {
        float* line = (which == 0 ? scores_of(d, r0) : pulls_of(d, r0)) + r * tile;
        if (c1r <= c0) {
          memset(line + left, 0, (size_t)(right - left) * sizeof(float));
          continue;
        }
        memset(line + left, 0, (size_t)(c0 - left) * sizeof(float));
        memset(line + c1r, 0, (size_t)(right - c1r) * sizeof(float));
      }
    }
    if constexpr (M::PAIR == 2) {
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
  bool in_pairs() const { return M::PAIR == 2 && plain && observed == nullptr; }

#if defined(CH_BF16DOT)
  // Columns [c, c + VL) of two rows: weights and score gradients as bf16 pairs along the rows, and the gradients also
  // row by row. Without a second row the other half of each pair must be 0.
  CH_INLINE void put_pair(int row, int c, bool both, vf weight, vf weight_below, vf grad, vf grad_below, Desk& d) const {
    const int64_t pair = (int64_t)(row / 2) * tile + c;
    const Rounded grads = round_two(grad, grad_below);
    *(vu_any*)(d.p + pair) = round_two(weight, weight_below).pairs;
    *(vu_any*)(d.ds + pair) = grads.pairs;
    uint16_t* rows = (uint16_t*)d.dr + (int64_t)row * tile + c;
    put_halves(rows, grads.one);
    if (both) put_halves(rows + tile, grads.other);
  }

  // `differentiate` and `spread` fused, for calls where nothing else reads the floats: no rules and no statistics.
  template <bool DROPS>
  void differentiate_pairs(int64_t b, int64_t h, int64_t first, int r0, int count, int64_t t0, int left, int right, int c0,
                           int c1, Desk& d) const {
    const int c1r = (int)round_up(c1, VL);
    const vf scale = all(base2), none = {};
    if (DROPS)
      for (int r = 0; r < count; r++) draw(b, h, first + r0 + r, r, t0, c0, c1r, d);
    const KeptRows drawn = d.keep;
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
        close_row(d, row, t0, c0, c1, d.s + (row - r0) * tile);
        if (alone) weigh_alone<DROPS>(d.s + (row - r0) * tile, d.dp + (row - r0) * tile, row - r0, c0, c1r, row, d);
      }
      const vf shift = all(d.largest[r0 + r]), share = all(d.share[r0 + r]), delta = all(d.delta[r0 + r]);
      const vf shift_below = all(d.largest[below]), delta_below = all(d.delta[below]);
      const vf share_below = all(d.share[below]);
      for (int c = left; c < c0; c += VL) put_pair(r0 + r, c, both, none, none, none, none, d);
      if (both) {
        for (int c = c0; c < c1r; c += VL) {
          const vf e = alone ? load(s + c) : exp2_of<DEGREE>((load(s + c) - shift) * scale) * share;
          const vf f =
              alone ? load(s + tile + c) : exp2_of<DEGREE>((load(s + tile + c) - shift_below) * scale) * share_below;
          put(r, c, true, e, f, load(dp + c), load(dp + tile + c), delta, delta_below);
        }
      } else {
        for (int c = c0; c < c1r; c += VL) {
          const vf e = alone ? load(s + c) : exp2_of<DEGREE>((load(s + c) - shift) * scale) * share;
          put(r, c, false, e, none, load(dp + c), none, delta, none);
        }
      }
      for (int c = c1r; c < right; c += VL) put_pair(r0 + r, c, both, none, none, none, none, d);
    }
  }
#else
  template <bool DROPS>
  void differentiate_pairs(int64_t, int64_t, int64_t, int, int, int64_t, int, int, int, int, Desk&) const {}
#endif

  void visit(int64_t b, int64_t h, int64_t block, int64_t t0, int key_count, Desk& d, const float* diagonal,
             float* diagonal_grads, float* dq) const {
    int64_t first = block * BLOCK, t1 = t0 + key_count;
    int count = (int)least((int64_t)BLOCK, w.q_len - first);
    const Laid laid = open_block(b, h, block, count, d);
    Span spans[BLOCK / MR + 1];
    int low = INT32_MAX, high = 0;
    for (int r0 = 0; r0 < count; r0 += MR) {
      Span span{INT32_MAX, 0};
      if (!masked) span = Span{0, key_count};
      for (int r = r0; r < least(r0 + MR, count) && masked; r++) {
        Span allowed = reach(w, d.row[r], t0, t1);
        if (allowed.high <= allowed.low) continue;
        span.low = least(span.low, (int)(allowed.low - t0));
        span.high = most(span.high, (int)(allowed.high - t0));
      }
      if (span.high <= span.low) span = Span{0, 0};
      spans[r0 / MR] = span;
      if (span.high > 0) {
        low = least(low, span.low);
        high = most(high, span.high);
      }
    }
    if (high <= low) return;
    int left = low / VL * VL, right = (int)round_up(high, VL);
    for (int r0 = 0; r0 < count; r0 += MR) {
      int n = least(MR, count - r0);
      Span span = spans[r0 / MR];
      int c0 = span.low / VL * VL, c1 = span.high;
      if (c1 > c0) multiply_rows(r0, n, c0, c1, laid, d);
      const int c1r = (int)round_up(c1, VL);
      if (c1 > c0 && in_pairs()) {
        if (dropout.on) differentiate_pairs<true>(b, h, first, r0, n, t0, left, right, c0, c1, d);
        else differentiate_pairs<false>(b, h, first, r0, n, t0, left, right, c0, c1, d);
      } else {
        if (c1 > c0) differentiate(b, h, first, r0, n, t0, c0, c1, d, diagonal, diagonal_grads);
        spread(r0, n, left, right, c0, c1r, d);
      }
      if (c1 <= c0) continue;
      if (alone) memcpy(w.delta + row_index(w, b, h, first + r0), d.delta + r0, (size_t)n * sizeof(float));
      for (int p = 0; p < keys.count; p++)
        add_product(d.first_keys, n, keys.vectors(p, out), row_steps<M>(c1 - c0),
                    d.dr + ((int64_t)r0 * tile + c0) / M::PAIR,
                    tile / M::PAIR, 1, d.kn + p * keys.size + (int64_t)(c0 / M::PAIR) * keys.ld, keys.ld,
                    dq + (first + r0) * out + p * keys.ld, out);
    }
    gather(spans, count, low, high, laid, d);
    d.first_rows = false;
  }

  CH_INLINE void add_product(bool first, int rows, int vecs, int64_t along, const number* a, int64_t a_row,
                             int64_t a_step, const number* b, int64_t ldb, float* c, int64_t ldc) const {
    if (first) product<M, SET>(rows, vecs, along, a, a_row, a_step, b, ldb, c, ldc);
    else product<M, ADD>(rows, vecs, along, a, a_row, a_step, b, ldb, c, ldc);
  }

  // Gradients of keys and values [low, high): each small group of keys takes the rows that attend to one of them.
  void gather(const Span* spans, int count, int low, int high, const Laid& laid, Desk& d) const {
    for (int j = low; j < high; j += MR) {
      int n = least(MR, high - j), from = count, to = 0;
      for (int r0 = 0; r0 < count; r0 += MR) {
        Span span = spans[r0 / MR];
        if (span.low >= j + n || span.high <= j) continue;
        from = least(from, r0);
        to = r0 + least(MR, count - r0);
      }
      if (to <= from) continue;
      int64_t along = row_steps<M>(to - from), skipped = from / M::PAIR;
      for (int p = 0; p < grads.count; p++)
        add_product(d.first_rows, n, grads.vectors(p, v_out), along, d.p + skipped * tile + j, 1, tile,
                    laid.gb + p * grads.size + skipped * grads.ld, grads.ld, d.dv.at + j * d.dv.ld + p * grads.ld, d.dv.ld);
      for (int p = 0; p < queries.count; p++)
        add_product(d.first_rows, n, queries.vectors(p, out), along, d.ds + skipped * tile + j, 1, tile,
                    laid.qb + p * queries.size + skipped * queries.ld, queries.ld, d.dk.at + j * d.dk.ld + p * queries.ld, d.dk.ld);
    }
  }

  void find_spans(int64_t b, int64_t kh, Desk& d) const {
    for (int64_t g = 0; g < group; g++)
      for (int64_t block = 0; block < blocks; block++) {
        Span span{INT32_MAX, 0};
        // With a single visit the visit itself finds out.
        const bool skips = masked && (blocks > 1 || tiles > 1);
        if (!skips) span = Span{0, (int)w.k_len};
        for (int64_t i = block * BLOCK; i < least((block + 1) * BLOCK, w.q_len) && skips; i++) {
          Row row;
          mask_row(w, b, kh * group + g, i, row);
          if (row.high <= row.low) continue;
          span.low = least(span.low, (int)row.low);
          span.high = most(span.high, (int)row.high);
        }
        d.spans[g * blocks + block] = span;
      }
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
    if (chunks > 1) return a;
    a.add<IO>(w.grad_key, b, kh, w.k_len, w.head_dim, true);
    a.add<IO>(w.grad_value, b, kh, w.k_len, w.value_dim, true);
    a.add<IO>(w.grad_query, b, kh * group, w.q_len, w.head_dim, true);
    a.spread(group * ((w.q_len + MR - 1) / MR) * ((w.k_len + PW - 1) / PW));
    return a;
  }

  // Prefetches what the next key head reads, of this call or of the next one.
  void expect(Prefetch& a, const Task& next, int64_t b, int64_t kh) const {
    if (chunks > 1) return;
    a.add<IO>(next.key, b, kh, next.k_len, next.head_dim);
    a.add<IO>(next.value, b, kh, next.k_len, next.value_dim);
    a.add<IO>(next.query, b, kh * group, next.q_len, next.head_dim);
    a.add<IO>(next.grad_output, b, kh * group, next.q_len, next.value_dim);
    a.spread(group * ((w.q_len + MR - 1) / MR) * ((w.k_len + PW - 1) / PW));
  }

  // One chunk of a key head's keys.
  void do_chunk(int64_t b, int64_t kh, int64_t chunk, const Sums& sums, Desk& d) const {
    int64_t length = diagonal_length(w), h0 = kh * group, rows = w.q_len * out;
    float* dq = chunks == 1 ? d.dq : sums.dq + sums_place(chunk, b, h0) * rows;
    if (masked) memset(dq, 0, (size_t)(group * rows) * sizeof(float));
    for (int64_t h = h0; h < h0 + group && chunks == 1; h++) alone ? start_delta(b, h) : write_delta(b, h);
    float* diagonal_grads = sums.diagonal + sums_place(chunk, b, h0) * learned * length;
    if (learned > 0) memset(diagonal_grads, 0, (size_t)(group * learned * length) * sizeof(float));
    for (int64_t g = 0; g < group && diagonals > 0; g++)
      make_diagonals(w, h0 + g, d.diagonal + g * diagonals * length);
    find_spans(b, kh, d);
    memset(d.open, 0, (size_t)laid_out * sizeof(bool));
    for (int64_t t = chunk * chunk_tiles; t < least((chunk + 1) * chunk_tiles, tiles); t++) {
      int64_t t0 = t * tile;
      int key_count = (int)least((int64_t)tile, w.k_len - t0);
      pack_keys(b, kh, t0, key_count, d);
      d.first_keys = !masked && t == chunk * chunk_tiles;
      for (int64_t g = 0; g < group; g++)
        for (int64_t block = 0; block < blocks; block++) {
          Span span = d.spans[g * blocks + block];
          if (span.low >= t0 + key_count || span.high <= t0) continue;
          const int64_t first = block * BLOCK, count = least((int64_t)BLOCK, w.q_len - first);
          if (!blocks_meet(w, b, h0 + g, first, count, t0, t0 + key_count)) continue;
          visit(b, h0 + g, block, t0, key_count, d, d.diagonal + g * diagonals * length,
                diagonal_grads + g * learned * length, dq + g * rows);
        }
      for (int j = 0; j < key_count; j++) {
        put_row<IO>(at<IO>(w.grad_key, b, kh, t0 + j), (int)w.head_dim, d.dk.at + j * d.dk.ld, (float)w.scale);
        if (d.dv.at != d.sums_v) continue;
        put_row<IO>(at<IO>(w.grad_value, b, kh, t0 + j), (int)w.value_dim, d.dv.at + j * d.dv.ld, 1.0f);
      }
    }
    if (chunks > 1) return;
    for (int64_t r = 0; r < group * w.q_len; r++)
      put_row<IO>(at<IO>(w.grad_query, b, h0 + r / w.q_len, r % w.q_len), (int)w.head_dim, dq + r * out,
                  (float)w.scale);
  }

  void add_chunks(int threads, const Sums& sums) const {
    attend(w, threads, w.batch * w.heads, [&](int64_t unit) {
      int64_t b = unit / w.heads, h = unit % w.heads, rows = w.q_len * out;
      float* first = sums.dq + sums_place(0, b, h) * rows;
      for (int64_t chunk = 1; chunk < chunks; chunk++) {
        const float* part = sums.dq + sums_place(chunk, b, h) * rows;
        for (int64_t x = 0; x < rows; x += VL) store(first + x, load(first + x) + load(part + x));
      }
      for (int64_t i = 0; i < w.q_len; i++)
        put_row<IO>(at<IO>(w.grad_query, b, h, i), (int)w.head_dim, first + i * out, (float)w.scale);
    });
  }

  // Adds diagonal sums to tables of distances, in order and in double: a clipped distance accumulates many terms.
  void add_diagonals(const Sums& sums) const {
    int64_t length = diagonal_length(w), next = 0;
    for (int r = 0; r < w.num_rules; r++) {
      const ch_rule& rule = w.rules[r];
      if (rule.kind != CH_RULE_RELATIVE || rule.grad == nullptr) continue;
      for (int64_t h = 0; h < w.heads; h++) {
        double total = 0.0;
        for (int64_t x = w.q_len + w.k_len - 2; x >= 0; x--) {
          for (int64_t chunk = 0; chunk < chunks; chunk++)
            for (int64_t b = 0; b < w.batch; b++)
              total += sums.diagonal[(sums_place(chunk, b, h) * learned + next) * length + x];
          int64_t distance = w.query_offset + w.q_len - 1 - x;
          int64_t column = clip(distance, -rule.reach, rule.reach);
          if (x > 0 && clip(distance + 1, -rule.reach, rule.reach) == column) continue;
          rule.grad[h * rule.grad_head + column + rule.reach] += (float)total;
          total = 0.0;
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
      attend(w, threads, segments.count * w.heads, [&](int64_t unit) {
        const Task part = segments.part(w, unit / w.heads, 1);
        if (part.k_len > 0) Backward(part).check_finite(0, unit % w.heads, fault);
      });
    if (fault.get() != CH_OK) return fault.get();
    segments.for_gaps(w, [&](int64_t b, int64_t first, int64_t end) {
      for (int64_t kh = 0; kh < w.kv_heads; kh++) clear_keys(b, kh, first, end);
    });
    segments.sort(w.kv_heads);
    for (int64_t s = 0; s < segments.large && fault.get() == CH_OK; s++) {
      const Task part = segments.part(w, s, threads);
      if (const int code = Backward(part).share(threads); code != CH_OK) fault.set(code);
    }
    const int64_t first = segments.large * w.kv_heads, units = segments.count * w.kv_heads - first;
    attend(w, threads, units, [&](int64_t unit) {
      const int64_t head = first + unit, kh = head % w.kv_heads, next = head + threads;
      const Task part = segments.part(w, head / w.kv_heads, 1);
      const Backward one(part);
      if (part.k_len == 0) return one.clear_queries(0, kh);
      Prefetch prefetch = one.prefetch_of(0, kh);
      if (next < segments.count * w.kv_heads)
        one.expect(prefetch, segments.part(w, next / w.kv_heads, 1), 0, next % w.kv_heads);
      one.do_head(0, kh, 0, Sums{nullptr, nullptr}, prefetch, fault);
    });
    clearhead::trim_scratch();
    return fault.get();
  }

  void do_head(int64_t b, int64_t kh, int64_t chunk, const Sums& sums, const Prefetch& prefetch, Fault& fault) const {
    Desk d, need;
    char* work = (char*)scratch(clearhead::SLOT_WORK, (size_t)desk_bytes(need, nullptr));
    if (work == nullptr) return fault.set(CH_NO_MEMORY);
    desk_bytes(d, work);
    d.prefetch = prefetch;
    do_chunk(b, kh, chunk, sums, d);
  }

  int run() const {
    if (w.batch == 0 || w.q_len == 0 || w.k_len == 0) return empty();
    Segments segments(w, true);
    if (segments.no_memory) return CH_NO_MEMORY;
    if (segments.count > 0) return run_segments(segments);
    const int code = share(threads_for(w, operations_of(w, (double)w.batch * (double)w.q_len * (double)w.k_len)));
    clearhead::trim_scratch();
    return code;
  }

  int share(int threads) const {
    if (w.k_len == 0) return empty();
    Fault fault;
    if (masked) check_finite(threads, fault);
    if (fault.get() != CH_OK) return fault.get();
    Sums sums, sizes;
    char* base = (char*)scratch(clearhead::SLOT_PARTIAL, (size_t)sums_bytes(sizes, nullptr));
    if (base == nullptr) return CH_NO_MEMORY;
    sums_bytes(sums, base);
    if (chunks > 1)
      attend(w, threads, w.batch * w.heads, [&](int64_t unit) { write_delta(unit / w.heads, unit % w.heads); });
    int64_t outer_b = share_batch ? 1 : w.batch, outer_h = share_heads ? 1 : w.kv_heads;
    attend(w, threads, outer_b * outer_h * chunks, [&](int64_t unit) {
      // Early keys first: under a causal mask they have the most queries.
      int64_t chunk = unit / (outer_b * outer_h), head = unit % (outer_b * outer_h);
      int64_t b0 = head / outer_h, h0 = head % outer_h;
      for (int64_t b = b0; b < (share_batch ? w.batch : b0 + 1); b++)
        for (int64_t kh = h0; kh < (share_heads ? w.kv_heads : h0 + 1); kh++) {
          Prefetch prefetch = prefetch_of(b, kh);
          const int64_t next = unit + threads;
          if (!share_batch && !share_heads && next < w.units) expect(prefetch, w, next / w.kv_heads, next % w.kv_heads);
          do_head(b, kh, chunk, sums, prefetch, fault);
        }
    });
    if (fault.get() == CH_OK && chunks > 1) add_chunks(threads, sums);
    if (fault.get() == CH_OK && learned > 0) add_diagonals(sums);
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
      for (int64_t i = 0; i < w.q_len; i++)
        memset(at<IO>(w.grad_query, b, h, i), 0, (size_t)w.head_dim * sizeof(element));
    }
  }

  void clear_keys(int64_t b, int64_t kh, int64_t first, int64_t end) const {
    for (int64_t j = first; j < end; j++) {
      memset(at<IO>(w.grad_key, b, kh, j), 0, (size_t)w.head_dim * sizeof(element));
      memset(at<IO>(w.grad_value, b, kh, j), 0, (size_t)w.value_dim * sizeof(element));
    }
  }
};

}  // namespace CH_NS
