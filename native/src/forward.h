// Forward: blocks of rows loop over tiles of keys with an online softmax (Milakov and Gimelshein 2018; FlashAttention,
// Dao et al. 2022, algorithm 1), 6 rows at a time from the first GEMM to the second, so that scores stay in the L1
// cache. The grouped heads of a key head are additional rows and share its keys.
#pragma once

#include "prefetch.h"
#include "gemv.h"
#include "segments.h"
#include "statistics.h"

namespace CH_NS {

// Bytes of keys and values that are assumed cache-resident. In a model, weights evict them before a layer's cache is
// read again, so fewer of them are resident than in a call that is repeated in a loop. Rows that are short are
// prefetched by the hardware, so the higher limit is that of resident data (measured).
constexpr int64_t RESIDENT_BYTES = 4 << 20, RESIDENT_BYTES_SHORT = 24 << 20;
// Keys of a page that are read in place together; a page has a multiple of it, otherwise its rows are copied.
constexpr int64_t PAGE_PART = 16;
constexpr int ROWS = 96;  // rows of a block: how often a tile of keys is reused while it is in cache

// What one pass of forward computes: both, or only one of them if they need different plans.
enum class Outputs { ALL, OUTPUT, STATISTICS };

template <class M, class IO> struct Forward {
  typedef typename M::operand operand;
  typedef typename IO::type element;

  const Task& w;
  int tile;  // keys of a tile
  int64_t group, rows;  // query heads per key head; rows per key head
  int operands, steps, out;  // operands of a row of A, and those to multiply; columns of O
  int64_t tiles, key_operands, value_operands;  // per tile
  int64_t splits, split_tiles, blocks;  // of keys; blocks of rows
  bool whole_heads;  // a unit processes all rows of a key head and packs its keys itself
  bool masked, plain;
  bool in_place;  // keys and values are read in place
  bool values_packed;  // values in the tensor have the packed layout already, and are not copied if they are finite
  bool out_of_cache;  // keys and values come from memory: they exceed the cache
  float base2;
  Dropout dropout;
  int64_t diagonal_floats;
  Panels values;  // of a tile
  Outputs outputs;
  Statistics observed;

  struct Keys {
    operand* k;
    operand* v;
    uint8_t* bad;  // per tile: the values had NaN or infinity, which are 0 here
  };

  // Whether keys that are read in place are deinterleaved (even elements, then odd ones).
  static constexpr bool DEINTERLEAVED = M::PACK == 1 && Widened<IO>::LOAD_VECTORS == 2;

  // Prefetches the next key head, of this call or of another, while the current one is processed.
  Prefetch prefetch_of(const Task& next, int64_t b, int64_t kh) const {
    Prefetch a;
    a.clear();
    if (blocks * tiles == 0) return a;
    const bool paged = next.page_table != nullptr && next.k_len > 0;
    const int64_t keys = paged ? minimum(next.k_len, next.page_size) : next.k_len, page = paged ? next.page_table[0] : b;
    if (in_place) {
      // In-place reads prefetch for themselves. A whole head at once fills the line fill buffers of Intel's processors
      // and stalls the loop (measured: a fifth slower).
      a.add<IO>(next.key, page, kh, minimum(keys, prefetch_distance(next.head_dim * (int64_t)sizeof(element), 1)),
                next.head_dim);
    } else {
      a.add<IO>(next.key, page, kh, keys, next.head_dim);
      a.add<IO>(next.value, page, kh, keys, next.value_dim);
      a.add<IO>(next.query, b, kh * group, next.q_len, next.head_dim);
    }
    a.spread_over((rows + MR - 1) / MR * (in_place ? tiles : (w.k_len + PW - 1) / PW));
    return a;
  }

  // The query of a row.
  struct Place {
    int64_t h, i;
  };

  // A thread's workspace.
  struct Workspace {
    operand* q;  // [ROWS][operands]
    operand* deinterleaved;  // the same, deinterleaved like keys that are read in place
    float* scores;  // [MR][tile]
    uint16_t* half;  // [MR][tile], weights in bfloat16
    float* o;  // [ROWS][out]
    float* m;
    float* l;  // [ROWS][VL]
    MaskRow* row;
    Place* place;
    float* diagonals;
    operand* staged;
    element* gathered;  // [tile][widest], keys or values from several pages
    float* line;
    KeepMaskRows keep_mask;  // [MR]
    Prefetch prefetch;
    BlockStatistics statistics;
    ColumnSums* column_sums;
    bool only_tile;  // the block has one tile: sums are set, not added to
  };

  // Scores, then weights, of up to MR rows over the columns of a tile; row stride `ld`.
  struct ScoreTile {
    float* at;
    int64_t ld;
  };

  explicit Forward(const Task& work, Outputs what = Outputs::ALL)
      : w(work), tile(tile_size(work)), values(work.value_dim, row_steps<M>(tile)), outputs(what),
        observed(work, what == Outputs::OUTPUT ? nullptr : work.statistics, tile, ROWS) {
    group = w.heads / w.kv_heads;
    rows = group * w.q_len;
    blocks = (rows + observed.rows - 1) / observed.rows;
    operands = row_operands<M>((int)w.head_dim);
    steps = (int)row_steps<M>(w.head_dim);
    out = (int)round_up(w.value_dim, VL);
    tiles = (w.k_len + tile - 1) / tile;
    key_operands = (int64_t)tile * operands;
    value_operands = values.operands();
    masked = is_masked(w);
    plain = no_rules(w);
    base2 = to_base2(w);
    dropout = dropout_of(w);
    if (outputs == Outputs::STATISTICS) dropout.on = false;
    diagonal_floats = count_diagonal(w) * diagonal_length(w) * group;
    plan();
    in_place = (splits > 1 || rows <= ROWS) && can_read_in_place();
    values_packed = w.page_table == nullptr && has_packed_layout<M, IO>(w.value, w.value_dim);
    const int64_t dims = w.head_dim + w.value_dim;
    out_of_cache = w.total_keys * w.kv_heads * dims * (int64_t)sizeof(element) > (dims > 128 ? RESIDENT_BYTES
        : RESIDENT_BYTES_SHORT);
  }

  // With few rows each key is used once, and rows must be whole vectors. With gradients of the row maximum, backward
  // compares its bits, and backward packs.
  bool can_read_in_place() const {
    if (outputs == Outputs::STATISTICS && observed.ties) return false;
    if (w.page_table != nullptr && w.page_size % PAGE_PART != 0) return false;
    return rows <= 12 && w.head_dim % (VL * M::PACK) == 0 && w.value_dim % VL == 0 && w.key.row % M::PACK == 0 &&
           w.key.head % M::PACK == 0 && w.key.batch % M::PACK == 0 && (uintptr_t)w.key.data % 4 == 0;
  }

  static int tile_size(const ch_attention& w) {
    if (has_tables(w)) return maximum(64, PW);
    return maximum(w.head_dim, w.value_dim) * (int64_t)sizeof(element) <= 256 ? 512 : 256;
  }

  // The split of keys depends on the shape alone, so the sums are the same with any number of threads.
  void plan() {
    int64_t heads = w.batch * w.kv_heads;
    splits = 1;
    // Statistics are not computed in splits.
    if (outputs != Outputs::STATISTICS && rows <= 32 && w.units < 64)
      splits = minimum((tiles * tile + 511) / 512, (64 + w.units - 1) / maximum(w.units, (int64_t)1));
    splits = maximum(splits, (int64_t)1);
    split_tiles = (tiles + splits - 1) / splits;
    splits = split_tiles > 0 ? (tiles + split_tiles - 1) / split_tiles : 1;
    whole_heads = splits == 1 && heads >= 4 * w.threads;
    if (w.threads == 1 && splits == 1) whole_heads = true;
    if (splits == 1 && heads % w.threads == 0 && heads / w.threads < 64) whole_heads = true;
    // In-place reading must not depend on the number of threads.
    if (splits == 1 && rows <= ROWS) whole_heads = true;
  }

  void pack_tile(int64_t b, int64_t kh, int64_t t, operand* k, operand* v, uint8_t* bad, Workspace& d) const {
    int64_t first = t * tile;
    int count = (int)minimum((int64_t)tile, w.k_len - first);
    const Rows keys = rows_of(w.key, b, kh, first, count, w.head_dim, d);
    pack_panels<M, IO>(keys.at, keys.stride, count, (int)w.head_dim, k, d.staged);
    *bad = !values_are_clean(b, kh, t);
    if (values_packed && !*bad) return;
    const Rows rows = rows_of(w.value, b, kh, first, count, w.value_dim, d);
    pack_rows<M, IO>(rows.at, rows.stride, count, (int)w.value_dim, v, values);
    if (*bad) zero_nonfinite_values(v, count);
  }

  // Whether no value of a tile must be replaced: there is no mask, or all are finite.
  bool values_are_clean(int64_t b, int64_t kh, int64_t t) const {
    if (!masked) return true;
    bool clean = true;
    for_pages(t * tile, minimum((t + 1) * tile, w.k_len), [&](int64_t first, int64_t last) {
      clean = clean && all_finite<IO>(row_of(w.value, b, kh, first), w.value.row, last - first, (int)w.value_dim);
    });
    return clean;
  }

  // The address of a key's row in keys or values.
  CH_INLINE const element* row_of(const ch_tensor& t, int64_t b, int64_t kh, int64_t key) const {
    if (w.page_table == nullptr) return at<IO>(t, b, kh, key);
    return at<IO>(t, w.page_table[key / w.page_size], kh, key % w.page_size);
  }

  // Calls `body` with each part of keys [first, last) that is in one page; parts do not cross a multiple of `part`.
  template <class Body> CH_INLINE void for_pages(int64_t first, int64_t last, const Body& body, int64_t part = 0) const {
    if (w.page_table == nullptr) return body(first, last);
    part = part == 0 ? w.page_size : part;
    while (first < last) {
      const int64_t stop = minimum(last, (first / part + 1) * part);
      body(first, stop);
      first = stop;
    }
  }

  struct Rows {
    const element* at;
    int64_t stride;
  };

  // Rows [first, first + count) of keys or values: in place where one page has them all, otherwise copied.
  Rows rows_of(const ch_tensor& t, int64_t b, int64_t kh, int64_t first, int count, int64_t dim, Workspace& d) const {
    if (w.page_table == nullptr || first / w.page_size == (first + count - 1) / w.page_size)
      return Rows{row_of(t, b, kh, first), t.row};
    element* to = d.gathered;
    for_pages(first, first + count, [&](int64_t from, int64_t last) {
      const element* row = row_of(t, b, kh, from);
      for (; from < last; from++, row += t.row, to += dim) memcpy(to, row, (size_t)dim * sizeof(element));
    });
    return Rows{d.gathered, dim};
  }

  // 0 * NaN is NaN, so NaN and infinity become 0 until it is known which rows attend to them.
  void zero_nonfinite_values(operand* v, int count) const {
    for (int64_t x = 0; x < values.operands(); x++) {
      if (x % values.size >= row_steps<M>(count) * values.ld) continue;
      if constexpr (M::PACK == 1) {
        if (!(v[x] - v[x] == 0.0f)) v[x] = 0.0f;
      } else {
        uint32_t pair = (uint32_t)v[x];
        if ((pair & 0x7f800000) == 0x7f800000) pair &= 0x0000ffff;
        if ((pair & 0x00007f80) == 0x00007f80) pair &= 0xffff0000;
        v[x] = pair;
      }
    }
  }

  int64_t workspace_bytes(Workspace& d, char* base) const {
    BumpAllocator c{base};
    d.q = c.template take<operand>((int64_t)ROWS * operands);
    d.deinterleaved = DEINTERLEAVED && in_place ? c.template take<operand>(rows * operands) : d.q;
    d.scores = c.template take<float>((int64_t)MR * tile);
    d.half = c.template take<uint16_t>((int64_t)MR * tile);
    d.o = c.template take<float>((int64_t)ROWS * out);
    d.m = c.template take<float>(ROWS);
    d.l = c.template take<float>((int64_t)ROWS * VL);
    d.row = c.template take<MaskRow>(ROWS);
    d.place = c.template take<Place>(ROWS);
    d.diagonals = c.template take<float>(diagonal_floats);
    d.staged = c.template take<operand>((int64_t)VL * operands);
    d.gathered = c.template take<element>(w.page_table != nullptr ? tile * maximum(w.head_dim, w.value_dim) : 0);
    d.line = c.template take<float>(out);
    d.keep_mask.groups = KeepMaskRows::groups_of(tile);
    d.keep_mask.bits = c.template take<KeepMask>(dropout.on ? MR * d.keep_mask.groups : 0);
    d.statistics.carve(c, observed);
    return c.next - base;
  }

  int64_t keys_bytes(Keys& k, char* base, int64_t heads, int64_t count) const {
    BumpAllocator c{base};
    k.k = c.template take<operand>(heads * count * key_operands);
    k.v = c.template take<operand>(heads * count * value_operands);
    k.bad = c.template take<uint8_t>(heads * count);
    return c.next - base;
  }

  void deinterleave(const float* query, float* to) const {
    memcpy(to, query, (size_t)operands * sizeof(operand));
    Widened<IO>::deinterleave(to, steps / VL);
  }

  // Rows [first, first + count) of a key head: queries, masks, and zeroed sums.
  Interval begin_block(int64_t b, int64_t kh, int64_t first, int count, Workspace& d) const {
    Interval interval{INT32_MAX, 0};
    int64_t h = kh * group + first / w.q_len, i = first % w.q_len;
    for (int r = 0; r < count; r++, i++) {
      if (i == w.q_len) h++, i = 0;
      d.place[r] = Place{h, i};
      get_operands<M, IO>(at<IO>(w.query, b, h, i), (int)w.head_dim, d.q + (int64_t)r * operands, operands);
      if constexpr (DEINTERLEAVED)
        if (in_place) deinterleave(d.q + (int64_t)r * operands, d.deinterleaved + (int64_t)r * operands);
      const char* written = (const char*)at<IO>(w.output, b, h, i);
      for (int64_t c = 0; c < w.value_dim * (int64_t)sizeof(element); c += 64) __builtin_prefetch(written + c, 1, 2);
      // Without a mask all rows are equal to the first; only statistics need each.
      if (masked || r == 0) mask_row(w, b, h, i, d.row[r]);
      else if (observed.s != nullptr) d.row[r] = d.row[0];
      d.m[r] = -INF;
      store(d.l + r * VL, (vf){});
      if (const MaskRow& allowed = d.row[masked ? r : 0]; allowed.high > allowed.low) {
        interval.low = minimum(interval.low, (int)allowed.low);
        interval.high = maximum(interval.high, (int)allowed.high);
      }
    }
    if (observed.s != nullptr) d.statistics.begin(observed, count);
    return interval;
  }

  // Whether the block table allows any key of a tile for any row of the block; rows of grouped heads are consecutive.
  bool any_allowed(int64_t b, int64_t kh, int64_t first, int count, int64_t t) const {
    const int64_t t0 = t * tile, t1 = minimum(t0 + tile, w.k_len);
    for (int64_t done = 0; done < count;) {
      const int64_t h = kh * group + (first + done) / w.q_len, i = (first + done) % w.q_len;
      const int64_t rows_here = minimum(count - done, w.q_len - i);
      if (blocks_allow(w, b, h, i, rows_here, t0, t1)) return true;
      done += rows_here;
    }
    return false;
  }

  // The update of a row by a tile: the new row maximum, the shift of the previous exponents, and the rescaling factor.
  struct RowUpdate {
    float peak[MR], before[MR];
    float step[(MR + VL - 1) / VL * VL], factor[(MR + VL - 1) / VL * VL];
  };

  // The new row maximum of each row, after the rules. All rows at once: the maximum of one row is a dependency chain,
  // and six chains hide each other's latency.
  CH_INLINE void update_maxima(ScoreTile score_tile, int c0, int c1, int count, float* largest, RowUpdate& update) const {
    vf maxima[MR];
    for (int r = 0; r < MR; r++) maxima[r] = load(score_tile.at + r * score_tile.ld + c0);
    for (int c = c0 + VL; c < c1; c += VL)
#pragma GCC unroll 6
      for (int r = 0; r < MR; r++) maxima[r] = vmax(maxima[r], load(score_tile.at + r * score_tile.ld + c));
    for (int r = 0; r < count; r++) {
      float before = largest[r], now = max_of(maxima[r]);
      update.peak[r] = now;
      update.before[r] = before;
      if (!(now > before)) now = before;
      largest[r] = now;
      update.step[r] = now == before ? 0.0f : (before - now) * base2;
    }
    // Fill the rest of the vector: the exponential of arbitrary leftovers can cost hundreds of cycles.
    for (int r = count; r < round_up(MR, VL); r++) update.step[r] = 0.0f;
    for (int r = 0; r < MR; r += VL) {
      const vf step = load(update.step + r);
      store(update.factor + r, step == (vf){} ? all(1.0f) : exp2_of<5>(step));
    }
  }

  // Degree of the polynomial in the exponential: bfloat16 needs no more.
  static constexpr int DEGREE = M::PACK == 1 ? 5 : 4;

  // Scores to weights for one row; weights that dropout removes count in the normaliser and become 0 afterwards.
  template <bool DROPS>
  CH_INLINE void softmax_row(float* s, uint16_t* half, int r, int c0, int c1, float largest, float factor, float* total,
                             bool narrow, const KeepMaskRows& keep_mask) const {
    vf shift = all(largest == -INF ? 0.0f : largest), scale = all(base2);
    vf sum = load(total) * all(factor);
    for (int c = c0; c < c1; c += VL) {
      vf e = exp2_of<DEGREE>((load(s + c) - shift) * scale);
      sum += e;
      if (DROPS) e = select_bits(keep_mask.from(r, c), e);
      if (M::PACK == 1 || !narrow)
        store(s + c, e);
      else
        put_vector<BFloat16>(half + c, e);
    }
    store(total, sum);
  }

  // The same with statistics; the weights stay in float32 for the later ones.
  void softmax_row_observed(int r0, int r, const ScoreTile& score_tile, int c0, int c1, int64_t t0,
                            const RowUpdate& update, bool narrow, Workspace& d) const {
    float *s = score_tile.at + r * score_tile.ld, largest = d.m[r0 + r];
    uint16_t* half = d.half + r * tile;
    d.statistics.scan_scores(observed, r0 + r, s, c0, c1, t0, update.peak[r], update.before[r], largest);
    if (!observed.sums) {
      softmax_row<false>(s, half, r, c0, c1, largest, update.factor[r], d.l + (r0 + r) * VL, false, d.keep_mask);
    } else {
      float first_distance = (float)(w.query_offset + d.place[r0 + r].i - t0 - c0);
      int64_t sink_columns = observed.s->sink != nullptr ? observed.s->sink_keys - t0 : 0;
      d.statistics.template softmax_row<DEGREE>(r0 + r, s, c0, c1, largest, update.factor[r], update.step[r], base2,
                                                first_distance, sink_columns,
                             d.l + (r0 + r) * VL, [&](int c, vf e) { store(s + c, e); });
    }
    if (M::PACK == 2 && narrow)
      for (int c = c0; c < c1; c += VL) {
        const vf e = load(s + c);
        put_vector<BFloat16>(half + c, dropout.on ? select_bits(d.keep_mask.from(r, c), e) : e);
      }
  }

  // Keys and values of a tile: packed, or in place.
  struct Tile {
    const operand *k, *v;
    bool bad, in_place;
  };

  void multiply_keys(int64_t b, int64_t kh, int64_t t0, int r0, int count, int c0, int c1, const Tile& here,
                     const ScoreTile& score_tile, Workspace& d) const {
    const operand* a = (here.in_place ? d.deinterleaved : d.q) + (int64_t)r0 * operands;
    if (here.in_place) {
      const int64_t distance = round_up(STREAM_PREFETCH_BYTES / (w.head_dim * (int64_t)sizeof(element)), PAGE_PART);
      return for_pages(t0 + c0, t0 + c1, [&](int64_t first, int64_t last) {
        const element *key = row_of(w.key, b, kh, first), *next = nullptr;
        if (w.page_table != nullptr) next = first + distance < w.k_len ? row_of(w.key, b, kh, first + distance) : key;
        const int keys = (int)(last - first), vectors = steps / VL;
        float* scores = score_tile.at + (first - t0);
        if constexpr (M::PACK == 2 || __is_same(element, float))
          gemv_dot<M>(count, a, operands, (const operand*)key, w.key.row / M::PACK, keys, vectors, scores, score_tile.ld,
                      out_of_cache, (const operand*)next);
        else
          gemv_dot<Widened<IO>>(count, a, operands, key, w.key.row, keys, vectors, scores, score_tile.ld, out_of_cache,
                                next);
      }, PAGE_PART);
    }
    for (int p = c0 / PW; p * PW < c1; p++) {
      int from = maximum(c0, p * PW), to = minimum((int)round_up(c1, VL), (p + 1) * PW);
      d.prefetch.step();
      gemm<M, SET>(count, (to - from) / VL, steps, a, operands, 1,
                   here.k + (int64_t)p * PW * operands + (from - p * PW), PW, score_tile.at + from, score_tile.ld);
    }
  }

  void multiply_values(int64_t b, int64_t kh, int64_t t0, int r0, int count, int c0, int c1, const Tile& here,
                       const ScoreTile& score_tile, const float* factor, Workspace& d) const {
    float* o = d.o + (int64_t)r0 * out;
    if (here.in_place) return multiply_values_in_place(b, kh, t0, count, c0, c1, score_tile, factor, o);
    const operand* weights = (M::PACK == 1 ? (const operand*)score_tile.at : (const operand*)d.half) + c0 / M::PACK;
    int64_t weights_stride = M::PACK == 1 ? score_tile.ld : tile / M::PACK;
    for (int p = 0; p < values.count; p++) {
      const operand* value = here.v + p * values.size + (int64_t)(c0 / M::PACK) * values.ld;
      const int vecs = values.vectors(p, out);
      const int64_t along = row_steps<M>(c1 - c0);
      if (d.only_tile) gemm<M, SET>(count, vecs, along, weights, weights_stride, 1, value, values.ld, o + p * values.ld, out);
      else gemm<M, SCALE_ADD>(count, vecs, along, weights, weights_stride, 1, value, values.ld, o + p * values.ld, out, factor);
    }
  }

  // A few keys at a time, over all columns.
  void multiply_values_in_place(int64_t b, int64_t kh, int64_t t0, int count, int c0, int c1, const ScoreTile& score_tile,
                                const float* factor, float* o) const {
    constexpr int STEP = NV == 4 ? 8 : 16;
    const float ones[MR] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    const int64_t size = (int64_t)sizeof(element), bytes = w.value_dim * size, rows_prefetched = prefetch_distance(bytes, STEP);
    for_pages(t0 + c0, t0 + c1, [&](int64_t first, int64_t last) {
      for (int c = (int)(first - t0); c < last - t0; c += STEP) {
        const element* value = row_of(w.value, b, kh, t0 + c);
        const int64_t remaining = minimum((int64_t)STEP, c1 - c - rows_prefetched);
        if (out_of_cache && remaining > 0)
          prefetch_rows(row_of(w.value, b, kh, t0 + c + rows_prefetched), remaining, w.value.row * size, bytes, true);
        for (int p = 0; p < values.count; p++)
          gemm_in_place(count, values.vectors(p, out), minimum(STEP, (int)(last - t0) - c),
                        ScoreTile{score_tile.at + c, score_tile.ld}, value + p * values.ld, o + p * values.ld,
                        c == c0 ? factor : ones);
      }
    });
  }

  // Prefetches the values of the first of `count` keys while scores become weights.
  void prefetch_values(int64_t b, int64_t kh, int64_t key, int64_t count) const {
    const int64_t size = (int64_t)sizeof(element), bytes = w.value_dim * size;
    for_pages(key, key + minimum(prefetch_distance(bytes, 1), count), [&](int64_t first, int64_t last) {
      prefetch_rows(row_of(w.value, b, kh, first), last - first, w.value.row * size, bytes, out_of_cache);
    });
  }

  CH_INLINE void gemm_in_place(int count, int vecs, int keys, ScoreTile weights, const element* value, float* o,
                               const float* factor) const {
    if constexpr (__is_same(element, float))
      gemm<Fp32Fma, SCALE_ADD>(count, vecs, keys, weights.at, weights.ld, 1, value, w.value.row, o, out, factor);
    else
      gemm<Widened<IO>, SCALE_ADD>(count, vecs, keys, weights.at, weights.ld, 1, value, w.value.row, o, out, factor);
  }

  // `count` rows of a block against one tile.
  void visit(int64_t b, int64_t kh, int r0, int count, int64_t t, const Tile& here, Workspace& d) const {
    int64_t t0 = t * tile, t1 = minimum(t0 + tile, w.k_len);
    Interval interval{INT32_MAX, 0};
    if (!masked) interval = Interval{(int)t0, (int)t1};
    for (int r = 0; r < count && masked; r++) {
      Interval allowed = attended_interval(w, d.row[r0 + r], t0, t1);
      if (allowed.high <= allowed.low) continue;
      interval.low = minimum(interval.low, allowed.low);
      interval.high = maximum(interval.high, allowed.high);
    }
    if (interval.high <= interval.low) {
      if (d.only_tile) memset(d.o + (int64_t)r0 * out, 0, (size_t)count * out * sizeof(float));
      return;
    }
    if (here.in_place) d.prefetch.step();
    int c0 = (interval.low - (int)t0) / VL * VL, c1 = interval.high - (int)t0, c1r = (int)round_up(c1, VL);
    ScoreTile score_tile = observed.strip ? ScoreTile{d.statistics.strip + r0 * observed.ld + t0, observed.ld}
        : ScoreTile{d.scores, tile};
    multiply_keys(b, kh, t0, r0, count, c0, c1, here, score_tile, d);
    if (here.in_place && out_of_cache) prefetch_values(b, kh, t0 + c0, c1 - c0);
    if (!plain) rule_rows(b, kh, r0, count, t0, c0, c1, score_tile, d);
    for (int r = 0; r < count; r++) {
      if (!masked) mask_tail(score_tile.at + r * score_tile.ld, c1);
      else if (!allows_all(d.row[r0 + r], t0 + c0, t0 + c1r))
        mask_scores(w, d.row[r0 + r], t0 + c0, c1r - c0, score_tile.at + r * score_tile.ld + c0);
    }
    RowUpdate update;
    update_maxima(score_tile, c0, c1r, count, d.m + r0, update);
    // Values that are read in place are multiplied by floats.
    const bool narrow = M::PACK == 2 && !here.in_place;
    for (int r = 0; r < count; r++) {
      float *s = score_tile.at + r * score_tile.ld, largest = d.m[r0 + r], *total = d.l + (r0 + r) * VL;
      uint16_t* half = d.half + r * tile;
      if (dropout.on) draw(b, r0, r, t0, c0, c1r, d);
      if (observed.s != nullptr) softmax_row_observed(r0, r, score_tile, c0, c1r, t0, update, narrow, d);
      else if (dropout.on) softmax_row<true>(s, half, r, c0, c1r, largest, update.factor[r], total, narrow, d.keep_mask);
      else softmax_row<false>(s, half, r, c0, c1r, largest, update.factor[r], total, narrow, d.keep_mask);
    }
    if (observed.strip) record_strip_tile(r0, count, t, c0, c1r, d);
    if (outputs == Outputs::STATISTICS) return;
    if (dropout.on && observed.s != nullptr && !narrow) score_tile = apply_dropout(score_tile, count, c0, c1r, d);
    multiply_values(b, kh, t0, r0, count, c0, c1, here, score_tile, update.factor, d);
    if (here.bad) add_nonfinite_values(b, kh, r0, count, t0, c0, c1, score_tile, d);
  }

  // Records where the strip's weights of a tile are and which maximum they are relative to.
  void record_strip_tile(int r0, int count, int64_t t, int c0, int c1r, Workspace& d) const {
    d.statistics.extent[r0 / MR * tiles + t] = Interval{c0, c1r};
    for (int r = 0; r < count; r++) d.statistics.tile_maxima[(r0 + r) * tiles + t] = d.m[r0 + r];
  }

  // Draws the dropout mask of a row's weights.
  void draw(int64_t b, int r0, int r, int64_t t0, int c0, int c1r, Workspace& d) const {
    auto [h, i] = d.place[r0 + r];
    d.keep_mask.draw(r, philox_row(w, dropout, b, h, i), w.first_key + t0, c0, c1r);
  }

  // Applies dropout after statistics have read the weights; the strip keeps the weights before dropout.
  ScoreTile apply_dropout(const ScoreTile& score_tile, int count, int c0, int c1r, Workspace& d) const {
    const ScoreTile to = observed.strip ? ScoreTile{d.statistics.dropped_weights, tile} : score_tile;
    for (int r = 0; r < count; r++)
      for (int c = c0; c < c1r; c += VL)
        store(to.at + r * to.ld + c, select_bits(d.keep_mask.from(r, c), load(score_tile.at + r * score_tile.ld + c)));
    return to;
  }

  void rule_rows(int64_t b, int64_t kh, int r0, int count, int64_t t0, int c0, int c1, const ScoreTile& score_tile,
                 Workspace& d) const {
    for (int r = 0; r < count; r++) {
      auto [h, i] = d.place[r0 + r];
      apply_rules(w, d.diagonals + (h - kh * group) * (diagonal_floats / group), b, h, i, t0 + c0, c1 - c0,
                  score_tile.at + r * score_tile.ld + c0, nullptr);
    }
  }

  void add_nonfinite_values(int64_t b, int64_t kh, int r0, int count, int64_t t0, int c0, int c1, const ScoreTile& score_tile,
                            Workspace& d) const {
    for (int c = c0; c < c1; c++) {
      const element* value = row_of(w.value, b, kh, t0 + c);
      if (all_finite<IO>(value, 0, 1, (int)w.value_dim)) continue;
      get_row<IO>(value, (int)w.value_dim, d.line, out);
      for (int r = 0; r < count; r++) {
        if (!may_attend(w, d.row[r0 + r], t0 + c)) continue;
        float weight = M::PACK == 1 ? score_tile.at[r * score_tile.ld + c] : get_one<BFloat16>(d.half + r * tile + c);
        for (int x = 0; x < w.value_dim; x++)
          if (!(d.line[x] - d.line[x] == 0.0f)) d.o[(int64_t)(r0 + r) * out + x] += weight * d.line[x];
      }
    }
  }

  // Divides by the normaliser and stores the row; returns the factor for its weights.
  WeightScale finish(int64_t b, int64_t h, int64_t i, float* o, float largest, float total) const {
    // Backward needs the maximum that the weights are relative to, without the sink; the sink changes the normaliser.
    float shrink = 1.0f, shrink_log = 0.0f, top = largest == -INF ? -INF : largest * to_scores(w);
    if (w.sink != nullptr) {
      // A NaN logit counts as larger, so that NaN propagates.
      float logit = w.sink[h * w.sink_head], now = logit <= top ? top : logit;
      // A logit of -inf without keys leaves the row empty.
      if (now != -INF) {
        shrink_log = top - now;
        shrink = exp2_of<5>(all(shrink_log * LOG2E))[0];
        total = total * shrink + exp2_of<5>(all((logit - now) * LOG2E))[0];
        top = now;
      }
    }
    bool empty = total == 0.0f, none = empty || largest == -INF;
    const float log_total = w.lse != nullptr || observed.s != nullptr ? __builtin_logf(total) : 0.0f;
    WeightScale weight_scale{none ? 0.0f : shrink / total, none ? -INF : shrink_log - log_total};
    if (outputs == Outputs::STATISTICS) return total == total ? weight_scale : WeightScale{total, total};
    float factor = empty ? 0.0f : shrink * dropout.factor / total;
    if (empty) memset(o, 0, (size_t)out * sizeof(float));
    put_row<IO>(at<IO>(w.output, b, h, i), (int)w.value_dim, o, factor);
    int64_t place = row_index(w, b, h, i);
    if (w.output32 != nullptr) put_row<Float32>(w.output32 + place * w.value_dim, (int)w.value_dim, o, factor);
    if (w.lse != nullptr) w.lse[place] = empty ? -INF : top + log_total;
    if (w.softmax != nullptr) {
      w.softmax[2 * place] = none ? INF : largest;
      w.softmax[2 * place + 1] = weight_scale.factor;
    }
    // Backward treats a row with only NaN scores as empty; observers must see NaN.
    return total == total ? weight_scale : WeightScale{total, total};
  }

  // One block of rows over tiles [from, to); `partial` receives unnormalised sums.
  void do_block(int64_t b, int64_t kh, int64_t block, int64_t from, int64_t to, Keys keys, bool packed, Workspace& d,
                float* partial) const {
    int64_t first = block * observed.rows;
    int count = (int)minimum((int64_t)observed.rows, rows - first);
    Interval interval = begin_block(b, kh, first, count, d);
    if (interval.high > interval.low) {
      from = maximum(from, (int64_t)interval.low / tile);
      to = minimum(to, ((int64_t)interval.high + tile - 1) / tile);
    } else {
      to = from;
    }
    d.only_tile = to - from == 1 && partial == nullptr && !in_place;
    if (!d.only_tile) memset(d.o, 0, (size_t)count * out * sizeof(float));
    for (int64_t t = from; t < to; t++) {
      if (!d.only_tile && !any_allowed(b, kh, first, count, t)) continue;
      int64_t place = packed ? t : 0;
      operand* k = keys.k + place * key_operands;
      operand* v = keys.v + place * value_operands;
      Tile here{k, v, false, !packed && in_place && values_are_clean(b, kh, t)};
      if (!packed && !here.in_place) pack_tile(b, kh, t, k, v, keys.bad, d);
      here.bad = !here.in_place && keys.bad[place];
      if (values_packed && !here.bad) here.v = (const operand*)at<IO>(w.value, b, kh, t * tile);
      for (int r0 = 0; r0 < count; r0 += MR) visit(b, kh, r0, minimum(MR, count - r0), t, here, d);
    }
    for (int r = 0; r < count; r++) {
      float* o = d.o + (int64_t)r * out;
      float total = sum_of(load(d.l + r * VL));
      if (partial != nullptr) {
        float* at = partial + (first + r) * (out + 2);
        at[0] = d.m[r];
        at[1] = total;
        memcpy(at + 2, o, (size_t)out * sizeof(float));
      } else {
        WeightScale weight_scale = finish(b, d.place[r].h, d.place[r].i, o, d.m[r], total);
        if (observed.s == nullptr) continue;
        d.statistics.weight_scale[r] = weight_scale;
        float top = d.m[r] == -INF ? -INF : d.m[r] * to_scores(w);
        d.statistics.end_row(observed, row_index(w, b, d.place[r].h, d.place[r].i), r, d.row[r], d.m[r], top, total, base2);
      }
    }
    if (observed.s != nullptr) d.statistics.end_block(observed, b, kh, first, count, d.row, d.m, base2, d.column_sums);
  }

  bool allocate_workspace(Workspace& d, int64_t kh, Fault& fault) const {
    Workspace sizes;
    char* base = (char*)scratch(clearhead::SLOT_WORK, (size_t)workspace_bytes(sizes, nullptr));
    if (base == nullptr) {
      fault.set(CH_NO_MEMORY);
      return false;
    }
    workspace_bytes(d, base);
    d.prefetch.clear();
    d.column_sums = nullptr;
    if (diagonal_floats > 0)
      for (int64_t g = 0; g < group; g++)
        make_diagonals(w, kh * group + g, d.diagonals + g * (diagonal_floats / group));
    return true;
  }

  // Blocks [from, to) of a key head's rows, one after the other.
  void do_blocks(int64_t b, int64_t kh, int64_t from, int64_t to, Keys keys, bool packed, Workspace& d) const {
    for (int64_t block = from; block < to; block++) do_block(b, kh, block, 0, tiles, keys, packed, d, nullptr);
  }

  // The same for one range of rows; its sums over queries go into `buffer`.
  ColumnSums do_range(int64_t b, int64_t kh, int64_t range, char* buffer, Keys keys, bool packed, Workspace& d) const {
    ColumnSums column_sums;
    int64_t from = range * observed.range_blocks, to = minimum(from + observed.range_blocks, blocks);
    observed.begin_range(from * observed.rows, column_sums, buffer);
    d.column_sums = &column_sums;
    do_blocks(b, kh, from, to, keys, packed, d);
    observed.close_tile_row(column_sums);
    return column_sums;
  }

  // A thread processes all rows of a key head and packs its keys: once, or tile by tile if there is only one block.
  void do_head(int64_t b, int64_t kh, const Prefetch* prefetch, Fault& fault) const {
    if (splits > 1) return do_head_in_splits(b, kh, prefetch, fault);
    Workspace d;
    Keys keys, sizes;
    if (!allocate_workspace(d, kh, fault)) return;
    bool packed = blocks > 1;
    int64_t count = packed ? tiles : 1;
    char* base = (char*)scratch(clearhead::SLOT_KEYS, (size_t)keys_bytes(sizes, nullptr, 1, count));
    if (base == nullptr) return fault.set(CH_NO_MEMORY);
    keys_bytes(keys, base, 1, count);
    if (prefetch != nullptr) d.prefetch = *prefetch;
    if (packed)
      for (int64_t t = 0; t < tiles; t++)
        pack_tile(b, kh, t, keys.k + t * key_operands, keys.v + t * value_operands, keys.bad + t, d);
    if (!observed.has_column_sums) return do_blocks(b, kh, 0, blocks, keys, packed, d);
    char* buffer = column_sums_buffer(1);
    if (buffer == nullptr) return fault.set(CH_NO_MEMORY);
    observed.begin_head(b, kh);
    for (int64_t range = 0; range < observed.ranges; range++)
      observed.add_range(b, kh, range, do_range(b, kh, range, buffer, keys, packed, d));
    observed.end_head(b, kh);
  }

  void run_whole(int threads, Fault& fault) const {
    const int64_t units = w.batch * w.kv_heads;
    parallel_units(w, threads, units, [&](int64_t unit) {
      const int64_t next = unit + threads;
      Prefetch prefetch;
      if (next < units) prefetch = prefetch_of(w, next / w.kv_heads, next % w.kv_heads);
      do_head(unit / w.kv_heads, unit % w.kv_heads, next < units ? &prefetch : nullptr, fault);
    });
  }

  // Large segments one after the other, each with all threads; then the key heads of all others in parallel.
  int run_segments(Segments& segments) const {
    Fault fault;
    segments.sort(w.kv_heads);
    const double operations = 2.0 * segments.operations * (double)w.heads * (double)(w.head_dim + w.value_dim);
    const int threads = threads_for(w, operations);
    for (int64_t s = 0; s < segments.large; s++) {
      const Task part = segments.part(w, s, threads);
      Forward(part, outputs).execute(threads, fault);
    }
    const int64_t first = segments.large * w.kv_heads, units = segments.count * w.kv_heads - first;
    parallel_units(w, threads, units, [&](int64_t unit) {
      const int64_t head = first + unit, next = head + threads;
      const Task part = segments.part(w, head / w.kv_heads, 1);
      const Forward one(part, outputs);
      Prefetch prefetch;
      const bool more = next < segments.count * w.kv_heads;
      if (more) prefetch = one.prefetch_of(segments.part(w, next / w.kv_heads, 1), 0, next % w.kv_heads);
      one.do_head(0, head % w.kv_heads, more ? &prefetch : nullptr, fault);
    });
    clearhead::trim_scratch();
    return fault.get();
  }

  char* column_sums_buffer(int64_t count) const {
    ColumnSums sizes;
    return (char*)scratch(clearhead::SLOT_COLUMNS, (size_t)(count * observed.column_sums_bytes(sizes, nullptr)));
  }

  // Keys are packed once and shared; then threads take blocks of rows, late ones first: under a causal mask they are
  // the longest.
  void run_shared(int threads, Fault& fault) const {
    Keys keys, sizes;
    int64_t heads = w.batch * w.kv_heads;
    char* base = (char*)scratch(clearhead::SLOT_SHARED, (size_t)keys_bytes(sizes, nullptr, heads, tiles));
    if (base == nullptr) return fault.set(CH_NO_MEMORY);
    keys_bytes(keys, base, heads, tiles);
    parallel_units(w, threads, heads * tiles, [&](int64_t unit) {
      int64_t head = unit / tiles;
      Workspace d;
      if (!allocate_workspace(d, head % w.kv_heads, fault)) return;
      pack_tile(head / w.kv_heads, head % w.kv_heads, unit % tiles, keys.k + unit * key_operands,
                keys.v + unit * value_operands, keys.bad + unit, d);
    });
    if (fault.get() != CH_OK) return;
    if (observed.has_column_sums) return run_shared_ranges(threads, keys, fault);
    parallel_units(w, threads, heads * blocks, [&](int64_t unit) {
      int64_t head = unit % heads, block = blocks - 1 - unit / heads;
      Workspace d;
      if (!allocate_workspace(d, head % w.kv_heads, fault)) return;
      do_blocks(head / w.kv_heads, head % w.kv_heads, block, block + 1, keys_of(keys, head), true, d);
    });
  }

  Keys keys_of(const Keys& all_keys, int64_t head) const {
    return Keys{all_keys.k + head * tiles * key_operands, all_keys.v + head * tiles * value_operands,
                all_keys.bad + head * tiles};
  }

  // The same with sums over queries: one sum per range of rows, added in order.
  void run_shared_ranges(int threads, const Keys& keys, Fault& fault) const {
    int64_t heads = w.batch * w.kv_heads;
    ColumnSums sizes;
    int64_t bytes = observed.column_sums_bytes(sizes, nullptr);
    char* buffer = column_sums_buffer(heads * observed.ranges);
    if (buffer == nullptr) return fault.set(CH_NO_MEMORY);
    parallel_units(w, threads, heads * observed.ranges, [&](int64_t unit) {
      int64_t head = unit % heads, range = observed.ranges - 1 - unit / heads;
      Workspace d;
      if (!allocate_workspace(d, head % w.kv_heads, fault)) return;
      do_range(head / w.kv_heads, head % w.kv_heads, range, buffer + (head * observed.ranges + range) * bytes,
               keys_of(keys, head), true, d);
    });
    if (fault.get() != CH_OK) return;
    parallel_units(w, threads, heads, [&](int64_t head) {
      int64_t b = head / w.kv_heads, kh = head % w.kv_heads;
      observed.begin_head(b, kh);
      for (int64_t range = 0; range < observed.ranges; range++) {
        ColumnSums column_sums;
        observed.column_sums_bytes(column_sums, buffer + (head * observed.ranges + range) * bytes);
        column_sums.first = observed.side > 0 ? observed.tile_row(range * observed.range_blocks * observed.rows) : 0;
        observed.add_range(b, kh, range, column_sums);
      }
      observed.end_head(b, kh);
    });
  }

  // Few queries over many keys: the keys are split, and the partial results merged in order.
  void run_split(int threads, Fault& fault) const {
    int64_t heads = w.batch * w.kv_heads, stride = rows * (out + 2);
    float* partial = partial_results(heads, fault);
    if (partial == nullptr) return;
    parallel_units(w, threads, heads * splits, [&](int64_t unit) {
      const int64_t head = unit / splits;
      do_split(head / w.kv_heads, head % w.kv_heads, unit % splits, partial + unit * stride, nullptr, fault);
    });
    if (fault.get() != CH_OK) return;
    for (int64_t head = 0; head < heads; head++) merge_rows(head, partial + head * splits * stride);
  }

  // The same for one key head in one thread.
  void do_head_in_splits(int64_t b, int64_t kh, const Prefetch* prefetch, Fault& fault) const {
    const int64_t stride = rows * (out + 2);
    float* partial = partial_results(1, fault);
    if (partial == nullptr) return;
    for (int64_t split = 0; split < splits; split++)
      do_split(b, kh, split, partial + split * stride, split + 1 == splits ? prefetch : nullptr, fault);
    if (fault.get() == CH_OK) merge_rows(b * w.kv_heads + kh, partial);
  }

  float* partial_results(int64_t heads, Fault& fault) const {
    const int64_t floats = heads * splits * rows * (out + 2);
    float* partial = (float*)scratch(clearhead::SLOT_PARTIAL, (size_t)floats * sizeof(float));
    if (partial == nullptr) fault.set(CH_NO_MEMORY);
    return partial;
  }

  void do_split(int64_t b, int64_t kh, int64_t split, float* partial, const Prefetch* prefetch, Fault& fault) const {
    Workspace d;
    Keys keys, sizes;
    if (!allocate_workspace(d, kh, fault)) return;
    if (prefetch != nullptr) d.prefetch = *prefetch;
    char* base = (char*)scratch(clearhead::SLOT_KEYS, (size_t)keys_bytes(sizes, nullptr, 1, 1));
    if (base == nullptr) return fault.set(CH_NO_MEMORY);
    keys_bytes(keys, base, 1, 1);
    int64_t from = split * split_tiles, to = minimum(from + split_tiles, tiles);
    for (int64_t block = 0; block < blocks; block++) do_block(b, kh, block, from, to, keys, false, d, partial);
  }

  void merge_rows(int64_t head, float* partial) const {
    for (int64_t r = 0; r < rows; r++) merge(head, r, partial + r * (out + 2), rows * (out + 2));
  }

  void merge(int64_t head, int64_t r, float* first, int64_t stride) const {
    float largest = -INF, total = 0.0f;
    for (int64_t s = 0; s < splits; s++) largest = first[s * stride] > largest ? first[s * stride] : largest;
    for (int64_t s = 0; s < splits; s++) {
      float* part = first + s * stride;
      float factor = part[0] == largest ? 1.0f : exp2_of<5>(all((part[0] - largest) * base2))[0];
      total += part[1] * factor;
      for (int x = 0; x < out; x++) first[2 + x] = (s > 0 ? first[2 + x] : 0.0f) + part[2 + x] * factor;
    }
    int64_t b = head / w.kv_heads, h = head % w.kv_heads * group + r / w.q_len;
    finish(b, h, r % w.q_len, first + 2, largest, total);
  }

  int run() const {
    Segments segments(w, false);
    if (segments.no_memory) return CH_NO_MEMORY;
    // In-place reading handles a single block; a strip may need more blocks, and then keys are packed.
    const bool split = splits > 1 || (in_place && (observed.ties || blocks > 1)) || segments.count > 0;
    if (outputs == Outputs::ALL && observed.s != nullptr && split) {
      int code = Forward(w, Outputs::OUTPUT).run();
      return code != CH_OK ? code : Forward(w, Outputs::STATISTICS).run();
    }
    if (w.batch == 0 || w.q_len == 0) return without_rows();
    if (outputs != Outputs::STATISTICS && segments.count > 0) return run_segments(segments);
    Fault fault;
    double operations = 2.0 * (double)w.batch * (double)w.heads * (double)w.q_len * (double)w.k_len *
                        (double)(w.head_dim + w.value_dim);
    execute(threads_for(w, operations), fault);
    clearhead::trim_scratch();
    return fault.get();
  }

  void execute(int threads, Fault& fault) const {
    if (splits > 1)
      run_split(threads, fault);
    else if (whole_heads)
      run_whole(threads, fault);
    else
      run_shared(threads, fault);
  }

  // Without queries, sums over them are 0.
  int without_rows() const {
    for (int64_t b = 0; b < w.batch && observed.has_column_sums; b++)
      for (int64_t kh = 0; kh < w.kv_heads; kh++) observed.begin_head(b, kh);
    return CH_OK;
  }
};

}  // namespace CH_NS
