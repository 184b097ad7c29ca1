// Forward: blocks of rows loop over tiles of keys with an online softmax (Milakov and Gimelshein 2018; FlashAttention,
// Dao et al. 2022, algorithm 1), 6 or 16 rows at a time from the first GEMM to the second, so that scores stay in the L1
// cache. The grouped heads of a key head are additional rows and share its keys.
//
// A row's bits are a function of its own query, keys and mask. Tiles start at multiples of their size in the sequence;
// scores add along head_dim, step by step; a tile's weights are relative to its own maximum, its sums start at 0 and
// run from key to key (normalisers: in LANES lanes), and tiles merge in order. Keys that a row may not attend to add
// exact zeros, so it does not matter which of them are skipped, which rows share a block, or who computes a tile.
#pragma once

#include "column_dot.h"
#include "few_rows.h"
#include "invariance.h"
#include "prefetch.h"
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
// Heads per thread from which heads alone occupy the threads.
constexpr int MANY_HEADS = 8;
constexpr int MAX_TILE = 512;
constexpr int PIECE = 64;  // keys of a piece of a tile; those that a table forbids to all rows are skipped

// IO is how queries and the output are stored, and KV how keys and values are.
template <class M, class IO, class KV = IO> struct Forward {
  typedef typename M::operand operand;
  typedef typename IO::type element;
  typedef typename KV::type cached;
  // Keys and values are int8 with a scale each. Scales of keys multiply scores, and those of values weights, so that
  // neither is ever stored as floats beyond a tile in cache.
  static constexpr bool QUANTIZED = __is_same(KV, Int8);
  static constexpr bool TILES = in_tiles<M>();
  static constexpr int MR = M::HEIGHT;
  // Up to so many rows read keys and values in place: each is used once or twice, and a packed tile would leave the L1
  // cache.
  static constexpr int FEW_ROWS = TILES ? MR : 2 * MR;
  // Up to so many rows multiply values in place by vectors instead of tiles, which would have to be packed.
  static constexpr int LANE_ROWS = 4;
  // Keys whose values are multiplied together in place.
  static constexpr int VALUE_PART = maximum((int)PAGE_PART, M::PACK * M::BLOCK);

  const Task& w;
  int tile;  // keys of a tile
  int64_t group, rows;  // query heads per key head; rows per key head
  int operands, steps, out;  // operands of a row of A, and those to multiply; columns of O
  int64_t tiles, key_operands, value_operands;  // per tile
  int64_t blocks;  // of rows
  bool whole_heads;  // a unit processes all rows of a key head and packs its keys itself
  bool masked, plain;
  bool in_place;  // keys are packed panel by panel, in the L1 cache, and values are read in place
  bool in_lanes;  // values are multiplied by vectors, in the order of sums of tiles, which flush subnormals
  bool along_rows;  // few rows' scores are sums along rows of keys: other bits, and faster where keys are in cache
  bool values_packed;  // values in the tensor have the packed layout already, and are not copied if they are finite
  bool out_of_cache;  // keys and values come from memory: they exceed the cache
  float base2;
  Dropout dropout;
  int64_t diagonal_floats;
  Panels values;  // of a tile
  Outputs outputs;
  int64_t lead;  // keys of the first tile that are before the call's first key
  Statistics observed;

  struct Keys {
    operand* k;
    operand* v;
    uint8_t* bad;  // per tile: the values had NaN or infinity, which are 0 here
    float* scales;  // per tile: those of its keys, and those of its values, of quantized rows
  };

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
      a.add<KV>(next.key, page, kh, minimum(keys, prefetch_distance(next.head_dim * (int64_t)sizeof(cached), 1)),
                next.head_dim);
    } else {
      a.add<KV>(next.key, page, kh, keys, next.head_dim);
      a.add<KV>(next.value, page, kh, keys, next.value_dim);
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
    operand* q_columns;  // [operands][VL], in place: B of keys as A
    operand* panel;  // of keys, in place
    operand* value_rows;  // pairs of rows of a piece, in place
    float* scores;  // [rows at a time][tile]
    uint16_t* half;  // the same, weights in bfloat16
    float* rounded;  // [LANE_ROWS][tile], these as floats
    float* sums;  // [rows at a time][out], of a tile in pieces
    float* o;  // [ROWS][out]
    float* m;
    float* l;  // [ROWS][LANES]
    MaskRow* row;
    Place* place;
    float* diagonals;
    operand* staged;
    cached* gathered;  // [tile][widest], keys or values from several pages
    float *key_scales, *value_scales;  // of a tile of quantized rows
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
        lead(work.first_position % tile), observed(work, what, tile, lead, ROWS, MR) {
    group = w.heads / w.kv_heads;
    rows = group * w.q_len;
    blocks = (rows + observed.rows - 1) / observed.rows;
    operands = row_operands<M>((int)w.head_dim);
    steps = (int)row_steps<M>(w.head_dim);
    out = (int)round_up(w.value_dim, VL);
    tiles = w.k_len > 0 ? (lead + w.k_len + tile - 1) / tile : 0;
    key_operands = (int64_t)tile * operands;
    value_operands = values.operands();
    masked = is_masked(w);
    plain = no_rules(w);
    base2 = to_base2(w);
    dropout = dropout_of(w);
    if (outputs == Outputs::COLUMN_SUMS) dropout.on = false;
    diagonal_floats = count_diagonal(w) * diagonal_length(w) * group;
    plan();
    in_place = blocks == 1 && can_read_in_place();
    // Backward recomputes scores, and compares bits of the row maximum where that is observed. In 16 bits transposing costs
    // little where keys come from memory, and with more rows nothing.
    along_rows = __is_same(cached, float) && in_place && rows <= COLUMN_DOT_ROWS && w.head_dim % VL == 0 &&
                 w.softmax == nullptr && !clearhead::is_invariant();
    in_lanes = TILES && in_place && rows <= LANE_ROWS && flushes_subnormals(w) &&
               (w.page_table == nullptr || w.page_size % VALUE_PART == 0);
    values_packed = w.page_table == nullptr && has_packed_layout<M, KV>(w.value, w.value_dim);
    const int64_t dims = w.head_dim + w.value_dim;
    out_of_cache = w.total_keys * w.kv_heads * dims * (int64_t)sizeof(cached) > (dims > 128 ? RESIDENT_BYTES
        : RESIDENT_BYTES_SHORT);
  }

  // With few rows each key is used once, and rows must be whole vectors.
  bool can_read_in_place() const {
    if (w.page_table != nullptr && w.page_size % PAGE_PART != 0) return false;
    return rows <= FEW_ROWS && w.value_dim % VL == 0;
  }

  // The same for all calls of a model: tiles are where weights are rescaled.
  static int tile_size(const ch_attention& w) {
    return maximum(w.head_dim, w.value_dim) * (int64_t)sizeof(element) <= 256 ? MAX_TILE : MAX_TILE / 2;
  }

  void plan() {
    int64_t heads = w.batch * w.kv_heads;
    whole_heads = w.threads == 1 || blocks == 1 || heads >= 4 * w.threads;
    if (heads % w.threads == 0 && heads / w.threads < 64) whole_heads = true;
  }

  // The first key of a tile; with keys before the call's first one it is negative.
  CH_INLINE int64_t tile_start(int64_t t) const { return t * tile - lead; }
  CH_INLINE int64_t tile_end(int64_t t) const { return minimum(tile_start(t) + tile, w.k_len); }

  // The operands of tile `place` of packed ones.
  Keys tile_of(const Keys& keys, int64_t place) const {
    return Keys{keys.k + place * key_operands, keys.v + place * value_operands, keys.bad + place,
                keys.scales + (QUANTIZED ? 2 * place * tile : 0)};
  }

  void pack_tile(int64_t b, int64_t kh, int64_t t, const Keys& to, Workspace& d) const {
    const auto [k, v, bad, scales] = to;
    const int64_t first = maximum(tile_start(t), (int64_t)0);
    const int count = (int)(tile_end(t) - first), column = (int)(first - tile_start(t));
    const Rows keys = rows_of(w.key, b, kh, first, count, w.head_dim, d);
    pack_panels<M, KV>(keys.at, keys.stride, count, (int)w.head_dim, k, d.staged, column);
    *bad = !values_are_clean(b, kh, first, tile_end(t));
    if constexpr (QUANTIZED) {
      const Interval columns{column, column + count};
      load_scales(w.key, b, kh, tile_start(t), columns, w.head_dim, scales);
      load_scales(w.value, b, kh, tile_start(t), columns, w.value_dim, scales + tile);
      for (int c = column; c < column + count && *bad; c++)
        if (!is_finite(scales[tile + c])) scales[tile + c] = 0.0f;
    }
    if (values_packed && !*bad) return;
    const Rows rows = rows_of(w.value, b, kh, first, count, w.value_dim, d);
    pack_rows<M, KV>(rows.at, rows.stride, count, (int)w.value_dim, v, values, column);
    if (TILES) pad_blocks<M>(v, values, column, column + count);
    if (*bad && !QUANTIZED) zero_nonfinite_values(v, column, count);
  }

  // Columns of a tile that rows attend to, in ascending intervals that start at multiples of LANES.
  struct Runs {
    int count = 0;
    Interval at[MAX_TILE / PIECE];

    int first() const { return at[0].low; }
    int end() const { return at[count - 1].high; }
    void add(int low, int high) {
      low = low / LANES * LANES;
      if (count > 0 && (int)round_up(at[count - 1].high, VL) >= low) at[count - 1].high = high;
      else at[count++] = Interval{low, high};
    }
  };

  // Whether no value of keys [first, last) must be replaced: there is no mask, or all are finite.
  bool values_are_clean(int64_t b, int64_t kh, int64_t first, int64_t last) const {
    if (!masked) return true;
    bool clean = true;
    for_pages(first, last, [&](int64_t from, int64_t to) {
      if constexpr (QUANTIZED) {
        for (int64_t key = from; key < to && clean; key++) clean = is_finite(scale_of(w.value, b, kh, key, w.value_dim));
      } else {
        clean = clean && all_finite<KV>(row_of(w.value, b, kh, from), w.value.row, to - from, (int)w.value_dim);
      }
    });
    return clean;
  }

  // The same for the columns of a tile that rows attend to.
  bool values_are_clean(int64_t b, int64_t kh, int64_t t0, const Runs& runs) const {
    bool clean = true;
    for (int x = 0; x < runs.count && clean; x++)
      clean = values_are_clean(b, kh, maximum(t0 + runs.at[x].low, (int64_t)0), t0 + runs.at[x].high);
    return clean;
  }

  // The address of a key's row in keys or values.
  CH_INLINE const cached* row_of(const ch_tensor& t, int64_t b, int64_t kh, int64_t key) const {
    if (w.page_table == nullptr) return at<KV>(t, b, kh, key);
    return at<KV>(t, w.page_table[key / w.page_size], kh, key % w.page_size);
  }

  static CH_INLINE bool is_finite(float x) { return x - x == 0.0f; }

  // The scale behind the integers of a quantized row.
  CH_INLINE float scale_of(const ch_tensor& t, int64_t b, int64_t kh, int64_t key, int64_t dim) const {
    float scale;
    memcpy(&scale, row_of(t, b, kh, key) + dim, sizeof(scale));
    return scale;
  }

  // The scales of a run of a tile's columns, 0 before the first key and up to the next vector.
  void load_scales(const ch_tensor& t, int64_t b, int64_t kh, int64_t t0, Interval run, int64_t dim, float* to) const {
    const int64_t first = maximum(t0 + run.low, (int64_t)0);
    fill(to, run.low / LANES * LANES, first - t0, 0.0f);
    for_pages(first, t0 + run.high, [&](int64_t key, int64_t last) {
      const cached* at = row_of(t, b, kh, key) + dim;
      for (; key < last; key++, at += t.row) memcpy(to + (key - t0), at, sizeof(float));
    });
    fill(to, run.high, round_up(run.high, VL), 0.0f);
  }

  // Calls `body` with each part of keys [first, last) that is in one page.
  template <class Body> CH_INLINE void for_pages(int64_t first, int64_t last, const Body& body) const {
    if (w.page_table == nullptr) return body(first, last);
    while (first < last) {
      const int64_t stop = minimum(last, (first / w.page_size + 1) * w.page_size);
      body(first, stop);
      first = stop;
    }
  }

  struct Rows {
    const cached* at;
    int64_t stride;
  };

  // Rows [first, first + count) of keys or values: in place where one page has them all, otherwise copied.
  Rows rows_of(const ch_tensor& t, int64_t b, int64_t kh, int64_t first, int count, int64_t dim, Workspace& d) const {
    if (w.page_table == nullptr || first / w.page_size == (first + count - 1) / w.page_size)
      return Rows{row_of(t, b, kh, first), t.row};
    cached* to = d.gathered;
    for_pages(first, first + count, [&](int64_t from, int64_t last) {
      const cached* row = row_of(t, b, kh, from);
      for (; from < last; from++, row += t.row, to += dim) memcpy(to, row, (size_t)dim * sizeof(cached));
    });
    return Rows{d.gathered, dim};
  }

  // 0 * NaN is NaN, so NaN and infinity become 0 until it is known which rows attend to them.
  void zero_nonfinite_values(operand* v, int first, int count) const {
    for (int64_t x = 0; x < values.operands(); x++) {
      const int64_t row = x % values.size / values.ld;
      if (row < first / M::PACK || row >= row_steps<M>(first + count)) continue;
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
    d.q_columns = c.template take<operand>(in_place && TILES ? (int64_t)VL * operands : 0);
    const int64_t at_a_time = in_place ? FEW_ROWS : MR;
    d.panel = c.template take<operand>(in_place ? (int64_t)PW * operands : 0);
    d.value_rows = c.template take<operand>(in_place && M::PACK == 2 ? value_piece().operands() : 0);
    d.scores = c.template take<float>(at_a_time * tile);
    d.half = c.template take<uint16_t>(at_a_time * tile);
    d.rounded = c.template take<float>(in_lanes ? LANE_ROWS * tile : 0);
    d.sums = c.template take<float>(at_a_time * out);
    d.o = c.template take<float>((int64_t)ROWS * out);
    d.m = c.template take<float>(ROWS);
    d.l = c.template take<float>((int64_t)ROWS * LANES);
    d.row = c.template take<MaskRow>(ROWS);
    d.place = c.template take<Place>(ROWS);
    d.diagonals = c.template take<float>(VL + diagonal_floats) + VL;
    d.staged = c.template take<operand>((int64_t)VL * operands);
    d.gathered = c.template take<cached>(w.page_table != nullptr ? tile * maximum(w.head_dim, w.value_dim) : 0);
    d.line = c.template take<float>(out);
    d.keep_mask.groups = KeepMaskRows::groups_of(tile);
    d.keep_mask.bits = c.template take<KeepMask>(dropout.on ? 1 + MR * d.keep_mask.groups : 0) + 1;
    d.statistics.carve(c, observed);
    return c.next - base;
  }

  int64_t keys_bytes(Keys& k, char* base, int64_t heads, int64_t count) const {
    BumpAllocator c{base};
    k.k = c.template take<operand>(heads * count * key_operands);
    k.v = c.template take<operand>(heads * count * value_operands);
    k.bad = c.template take<uint8_t>(heads * count);
    k.scales = c.template take<float>(QUANTIZED ? heads * count * 2 * tile : 0);
    return c.next - base;
  }

  // Rows [first, first + count) of a key head: queries, masks, and zeroed sums.
  Interval begin_block(int64_t b, int64_t kh, int64_t first, int count, Workspace& d) const {
    Interval interval{INT32_MAX, 0};
    int64_t h = kh * group + first / w.q_len, i = first % w.q_len;
    for (int r = 0; r < count; r++, i++) {
      if (i == w.q_len) h++, i = 0;
      d.place[r] = Place{h, i};
      get_operands<M, IO>(at<IO>(w.query, b, h, i), (int)w.head_dim, d.q + (int64_t)r * operands, operands);
      const char* written = (const char*)at<IO>(w.output, b, h, i);
      for (int64_t c = 0; c < w.value_dim * (int64_t)sizeof(element); c += LINE_BYTES) prefetch_line<2, true>(written + c);
      // Without a mask all rows are equal to the first; only statistics need each.
      if (masked || r == 0) mask_row(w, b, h, i, d.row[r]);
      else if (observed.s != nullptr) d.row[r] = d.row[0];
      d.m[r] = -INF;
      store_lanes(d.l + r * LANES, LaneSums{});
      if (const MaskRow& allowed = d.row[masked ? r : 0]; allowed.high > allowed.low) {
        interval.low = minimum(interval.low, (int)allowed.low);
        interval.high = maximum(interval.high, (int)allowed.high);
      }
    }
    if (observed.s != nullptr) d.statistics.begin(observed, count);
    for (int o = 0; TILES && in_place && o < operands; o += VL)
      transpose_block((const uint32_t*)d.q + o, operands, (uint32_t*)d.q_columns + o * VL, VL, count);
    return interval;
  }

  // The pieces of a tile, a bit each, of which the block table allows any key for any row of the block; rows of grouped
  // heads are consecutive.
  uint32_t allowed_pieces(int64_t b, int64_t kh, int64_t first, int count, int64_t t) const {
    const int64_t t0 = tile_start(t);
    uint32_t pieces = (uint32_t)((1u << tile / PIECE) - 1), allowed = 0;
    if (w.blocks.data == nullptr) return pieces;
    for (int64_t done = 0; done < count && allowed != pieces;) {
      const int64_t h = kh * group + (first + done) / w.q_len, i = (first + done) % w.q_len;
      const int64_t rows_here = minimum(count - done, w.q_len - i);
      for (int piece = 0; piece < tile / PIECE; piece++) {
        const int64_t from = maximum(t0 + piece * PIECE, (int64_t)0), to = minimum(t0 + (piece + 1) * PIECE, w.k_len);
        if (to > from && blocks_allow(w, b, h, i, rows_here, from, to)) allowed |= 1u << piece;
      }
      done += rows_here;
    }
    return allowed;
  }

  // The union of what rows [r0, r0 + count) attend to in these pieces of a tile.
  Runs find_runs(int r0, int count, int64_t t, uint32_t pieces, const Workspace& d) const {
    Runs runs;
    const int64_t t0 = tile_start(t), t1 = tile_end(t);
    if (!masked) {
      runs.add((int)(maximum(t0, (int64_t)0) - t0), (int)(t1 - t0));
      return runs;
    }
    const int64_t step = has_tables(w) ? PIECE : tile;
    for (int64_t from = t0; from < t1; from += step) {
      if (step == PIECE && !(pieces >> (from - t0) / PIECE & 1)) continue;
      Interval both{INT32_MAX, 0};
      for (int r = 0; r < count; r++) {
        const Interval allowed = attended_interval(w, d.row[r0 + r], maximum(from, (int64_t)0), minimum(from + step, t1));
        if (allowed.high <= allowed.low) continue;
        both.low = minimum(both.low, allowed.low);
        both.high = maximum(both.high, allowed.high);
      }
      if (both.high > both.low) runs.add((int)(both.low - t0), (int)(both.high - t0));
    }
    return runs;
  }

  // Rows meet a tile: its maximum and that of the tiles before, the shift of the exponents of both sums to the new
  // maximum, and their factors. One of the two factors is 1.
  struct RowUpdate {
    float peak[MR], before[MR];
    float old_step[Factors::ROWS], step[Factors::ROWS];
    Factors factors;
  };

  // Sets all but `peak`, and the rows' new maxima.
  CH_INLINE void meet(int count, float* largest, RowUpdate& update) const {
    for (int r = 0; r < count; r++) {
      float before = largest[r], peak = update.peak[r], now = peak > before ? peak : before;
      update.before[r] = before;
      largest[r] = now;
      update.old_step[r] = now == before ? 0.0f : (before - now) * base2;
      update.step[r] = now == peak ? 0.0f : (peak - now) * base2;
    }
    // Fill the rest of the vector: the exponential of arbitrary leftovers can cost hundreds of cycles.
    for (int r = count; r < Factors::ROWS; r++) update.old_step[r] = update.step[r] = 0.0f;
    for (int r = 0; r < MR; r += VL) {
      const vf old_step = load(update.old_step + r), step = load(update.step + r);
      store(update.factors.before + r, old_step == (vf){} ? all(1.0f) : exp2_of<5>(old_step));
      store(update.factors.sums + r, step == (vf){} ? all(1.0f) : exp2_of<5>(step));
    }
  }

  // The maximum of each row in a tile, after the rules. All rows at once: the maximum of one row is a dependency chain,
  // and six chains hide each other's latency.
  CH_INLINE void find_peaks(ScoreTile score_tile, const Runs& runs, int count, RowUpdate& update) const {
    vf maxima[MR];
    for (int r = 0; r < MR; r++) maxima[r] = load(score_tile.at + r * score_tile.ld + runs.first());
    for (int x = 0; x < runs.count; x++)
      for (int c = runs.at[x].low; c < runs.at[x].high; c += VL)
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) maxima[r] = vmax(maxima[r], load(score_tile.at + r * score_tile.ld + c));
    for (int r = 0; r < count; r++) update.peak[r] = max_of(maxima[r]);
  }

  // Degree of the polynomial in the exponential: bfloat16 needs no more.
  static constexpr int DEGREE = M::PACK == 1 ? 5 : 4;

  // Scores to weights for one row, relative to its maximum in the tile; weights that dropout removes count in the
  // normaliser and become 0 afterwards.
  template <bool DROPS>
  CH_INLINE void softmax_row(float* s, uint16_t* half, int r, const Runs& runs, const RowUpdate& update, float* total,
                             bool narrow, const KeepMaskRows& keep_mask, const float* value_scales) const {
    const vf shift = all(update.peak[r] == -INF ? 0.0f : update.peak[r]), scale = all(base2);
    LaneSums sum;
    for (int x = 0; x < runs.count; x++)
      for_lanes(runs.at[x].low, runs.at[x].high, [&](int64_t c, int part) CH_INLINED {
        vf e = exp2_of<DEGREE>((load(s + c) - shift) * scale);
        sum.part[part] += e;
        if (DROPS) e = select_bits(keep_mask.from(r, c), e);
        if (QUANTIZED && narrow) e *= load(value_scales + c);
        if (M::PACK == 1 || !narrow)
          store(s + c, e);
        else
          put_vector<BFloat16>(half + c, e);
      });
    store_lanes(total, merged(load_lanes(total), all(update.factors.before[r]), sum, all(update.factors.sums[r])));
  }

  // The same with statistics; the weights stay in float32 for the later ones.
  void softmax_row_observed(int r0, int r, const ScoreTile& score_tile, uint16_t* half, const Runs& runs, int64_t t0,
                            const RowUpdate& update, Workspace& d) const {
    float *s = score_tile.at + r * score_tile.ld, *total = d.l + (r0 + r) * LANES;
    d.statistics.scan_scores(observed, r0 + r, s, runs, t0, update.peak[r], update.before[r], d.m[r0 + r]);
    if (!observed.sums) {
      softmax_row<false>(s, half, r, runs, update, total, false, d.keep_mask, nullptr);
    } else {
      const TileSums tile_sums{update.peak[r], update.old_step[r], update.factors.before[r], update.step[r], update.factors.sums[r], base2};
      const float distance = (float)(w.query_offset + d.place[r0 + r].i - t0);
      const int64_t sink_columns = observed.s->sink != nullptr ? observed.s->sink_keys - w.corner.key - t0 : 0;
      d.statistics.template softmax_row<DEGREE>(r0 + r, s, runs, tile_sums, distance, sink_columns, total);
    }
    if constexpr (M::PACK == 2)
      for (int x = 0; x < runs.count; x++)
        for (int c = runs.at[x].low; c < runs.at[x].high; c += VL) {
          put_vector<BFloat16>(half + c, applied(load(s + c), r, c, d));
        }
  }

  // Keys and values of a tile, packed.
  struct Tile {
    const operand *k, *v;
    bool bad;
  };

  void multiply_keys(int r0, int count, Interval run, const Tile& here, const ScoreTile& score_tile, Workspace& d) const {
    const operand* a = d.q + (int64_t)r0 * operands;
    for (int p = run.low / PW; p * PW < run.high; p++) {
      int from = maximum(run.low, p * PW), to = minimum((int)round_up(run.high, VL), (p + 1) * PW);
      d.prefetch.step();
      gemm<M, SET>(count, (to - from) / VL, steps, a, operands, 1,
                   here.k + (int64_t)p * PW * operands + (from - p * PW), PW, score_tile.at + from, score_tile.ld);
    }
  }

  // The same for all rows: keys are transposed in registers, or in panels that are packed just before.
  void multiply_keys_in_place(int64_t b, int64_t kh, int64_t t0, int count, Interval run, const ScoreTile& score_tile,
                              Workspace& d) const {
    if constexpr (__is_same(cached, float))
      if (along_rows) return multiply_keys_along_rows(b, kh, t0, count, run, score_tile, d);
    if (TILES && !QUANTIZED && w.head_dim % (M::PACK * M::BLOCK) == 0) return multiply_keys_as_left(b, kh, t0, count, run, score_tile, d);
    const bool in_registers = !TILES && HAS_COLUMN_DOT && count <= COLUMN_DOT_ROWS &&
                              w.head_dim * (int64_t)sizeof(cached) % 16 == 0;
    for (int c = run.low, next; c < run.high; c = next) {
      const int end = (int)round_up(run.high, VL), whole = (int)(minimum(t0 + end, w.k_len) - t0);
      if (in_registers && t0 + c >= 0 && c + VL <= whole) {
        const int most = QUANTIZED && count <= 2 ? COLUMN_DOT_VECTORS_INT8 : COLUMN_DOT_VECTORS;
        const int vectors = c + most * VL <= whole ? most : 1;
        next = c + vectors * VL;
        dot_in_registers(b, kh, t0 + c, count, vectors, ScoreTile{score_tile.at + c, score_tile.ld}, d);
        continue;
      }
      next = in_registers ? c + VL : minimum(end, (c / PW + 1) * PW);
      pack_panel(b, kh, t0, c, next, d);
      for (int r0 = 0; r0 < count; r0 += MR)
        gemm<M, SET>(minimum(MR, count - r0), (next - c) / VL, steps, d.q + (int64_t)r0 * operands, operands, 1,
                     d.panel + c % PW, PW, score_tile.at + r0 * score_tile.ld + c, score_tile.ld);
    }
  }

  // The same in tiles: keys in place are A and queries B, and the tiles of scores are transposed.
  void multiply_keys_as_left(int64_t b, int64_t kh, int64_t t0, int count, Interval run, const ScoreTile& score_tile,
                             const Workspace& d) const {
#if defined(CH_AMX)
    const int64_t row_bytes = w.key.row * (int64_t)sizeof(cached), bytes = w.head_dim * (int64_t)sizeof(cached);
    for (int c = run.low, next; c < run.high; c = next) {
      const bool both = t0 + c >= 0 && c + VL < run.high && w.page_table == nullptr;
      next = c + (both ? 2 * VL : VL);
      const int64_t first = maximum(t0 + c, (int64_t)0), last = minimum(t0 + next, w.k_len), following = first + following_keys(0);
      const cached* key = row_of(w.key, b, kh, first);
      UpcomingLines upcoming(following < w.k_len ? row_of(w.key, b, kh, following) : key, row_bytes, bytes,
                             minimum((int64_t)next - c, w.k_len - following));
      alignas(64) float sums[2 * VL * VL];
      multiply_rows_in_place((int)(last - first), operands / VL, (const char*)key, row_bytes, (const uint32_t*)d.q_columns,
                             upcoming, sums + (first - t0 - c) * VL);
      if (count <= 2) {
        // A whole transposition would take longer than the product.
        for (int r = 0; r < count; r++)
          for (int from = c; from < next; from++) score_tile.at[r * score_tile.ld + from] = sums[(from - c) * VL + r];
        continue;
      }
      for (int from = c; from < next; from += VL)
        transpose_block((const uint32_t*)sums + (from - c) * VL, VL, (uint32_t*)score_tile.at + from, score_tile.ld);
    }
#else
    (void)b, (void)kh, (void)t0, (void)count, (void)run, (void)score_tile, (void)d;
#endif
  }

  void multiply_keys_along_rows(int64_t b, int64_t kh, int64_t t0, int count, Interval run, const ScoreTile& score_tile,
                                const Workspace& d) const {
    const int64_t bytes = w.head_dim * (int64_t)sizeof(cached), first = maximum(t0 + run.low, (int64_t)0);
    if (first >= t0 + run.high) return;
    const int distance = w.key.row == w.head_dim ? 0 : (int)(prefetch_distance(bytes, 4) / 4);
    const auto dot = [&](const auto& key_at) CH_INLINED {
      gemv_dot<M>(count, d.q, operands, key_at, (int)(t0 + run.high - first), steps / VL, score_tile.at + (first - t0),
                  score_tile.ld, distance, out_of_cache);
    };
    const cached* keys = row_of(w.key, b, kh, first);
    if (w.page_table == nullptr) dot([&](int64_t key) { return keys + key * w.key.row; });
    else dot([&](int64_t key) { return row_of(w.key, b, kh, first + key); });
  }

  // How many keys later those are that are prefetched in a pass over `keys` of them.
  int64_t following_keys(int64_t keys) const {
    return keys + round_up(STREAM_PREFETCH_BYTES / (w.head_dim * (int64_t)sizeof(cached)), PAGE_PART);
  }

  void dot_in_registers(int64_t b, int64_t kh, int64_t key, int count, int vectors, const ScoreTile& scores,
                        const Workspace& d) const {
    constexpr int64_t size = (int64_t)sizeof(cached);
    const int64_t bytes = w.head_dim * size, following = key + following_keys(vectors * VL);
    const void* keys[COLUMN_DOT_VECTORS_INT8];
    for (int v = 0; v < vectors; v++) keys[v] = row_of(w.key, b, kh, key + v * VL);
    // Keys in one piece may be followed by those of the next head.
    const void* next = w.page_table == nullptr ? (const cached*)keys[0] + (following - key) * w.key.row
        : following < w.k_len ? row_of(w.key, b, kh, following) : keys[0];
    const LinePrefetch lines(next, bytes, w.key.row * size);
    const auto dot = [&]<int VECTORS>() {
      column_dot<M, KV, VECTORS>(count, d.q, operands, keys, w.key.row * size, (int)(bytes / 4), scores.at, scores.ld, lines);
    };
    if (vectors == 1) return dot.template operator()<1>();
    if constexpr (QUANTIZED)
      if (vectors == COLUMN_DOT_VECTORS_INT8) return dot.template operator()<COLUMN_DOT_VECTORS_INT8>();
    dot.template operator()<COLUMN_DOT_VECTORS>();
  }

  // Packs columns [from, to) of a tile, whole vectors of one panel, and prefetches keys that follow.
  void pack_panel(int64_t b, int64_t kh, int64_t t0, int from, int to, Workspace& d) const {
    const int64_t bytes = w.head_dim * (int64_t)sizeof(cached), distance = prefetch_distance(bytes, VL);
    for (int c = from; c < to; c += VL) {
      const int64_t first = maximum(t0 + c, (int64_t)0), last = minimum(t0 + c + VL, w.k_len);
      if (out_of_cache)
        for_pages(minimum(first + distance, w.k_len), minimum(last + distance, w.k_len), [&](int64_t key, int64_t end) {
          prefetch_rows(row_of(w.key, b, kh, key), end - key, w.key.row * (int64_t)sizeof(cached), bytes, true);
        });
      const Rows keys = rows_of(w.key, b, kh, first, (int)(last - first), w.head_dim, d);
      pack_panels<M, KV>(keys.at, keys.stride, (int)(last - first), (int)w.head_dim, d.panel, d.staged,
                         (int)(first - t0) % PW);
    }
  }

  // Weights of the rows of a tile, as operands.
  struct Weights {
    const operand* at;
    int64_t ld;
  };

  Weights weights_of(const ScoreTile& weights, const uint16_t* half) const {
    if (M::PACK == 1) return Weights{(const operand*)weights.at, weights.ld};
    return Weights{(const operand*)half, tile / M::PACK};
  }

  // Zeros the weights of a run's blocks of keys outside of the run, for `count` rows from `row` of the workspace on.
  void pad_weights(int row, int count, const Runs& runs, Workspace& d) const {
    constexpr int WIDTH = M::PACK * M::BLOCK;
    for (int x = 0; x < runs.count; x++) {
      const int from = runs.at[x].low, to = (int)round_up(runs.at[x].high, VL);
      for (int r = row; r < row + count; r++) {
        if (from % WIDTH) put_halves(d.half + r * tile + from - VL, (vh){});
        if (to % WIDTH) put_halves(d.half + r * tile + to, (vh){});
      }
    }
  }

  // The first column of a run with a value: columns before the first key have none.
  CH_INLINE int first_value(Interval run, int64_t t0) const {
    return maximum(run.low, (int)maximum(-t0, (int64_t)0) / M::PACK * M::PACK);
  }

  void multiply_values(int64_t t0, int r0, int count, const Runs& runs, const Tile& here, const ScoreTile& score_tile,
                       const RowUpdate& update, Workspace& d) const {
    float* o = d.o + (int64_t)r0 * out;
    const Weights weights = weights_of(score_tile, d.half);
    for (int x = 0; x < runs.count; x++) {
      const int from = first_value(runs.at[x], t0) / (M::PACK * M::BLOCK) * M::BLOCK;
      const int64_t along = row_steps<M>(runs.at[x].high) - from;
      for (int p = 0; p < values.count; p++) {
        const operand *value = here.v + p * values.size + (int64_t)from * values.ld, *a = weights.at + from;
        const int vecs = values.vectors(p, out);
        float *to = o + p * values.ld, *sums = d.sums + p * values.ld;
        if (x > 0) gemm<M, CONTINUE>(count, vecs, along, a, weights.ld, 1, value, values.ld, sums, out);
        else if (runs.count > 1) gemm<M, SET>(count, vecs, along, a, weights.ld, 1, value, values.ld, sums, out);
        else if (d.only_tile) gemm<M, SET>(count, vecs, along, a, weights.ld, 1, value, values.ld, to, out);
        else gemm<M, MERGE>(count, vecs, along, a, weights.ld, 1, value, values.ld, to, out, &update.factors);
      }
    }
    if (runs.count > 1) merge_sums<M>(r0, count, 0, update, d);
  }

  // How values are multiplied in place: narrower numbers may be widened as they are loaded.
  template <bool WIDENS, class Packed> struct Choice {
    typedef Packed type;
  };
  template <class Packed> struct Choice<true, Packed> {
    typedef Widened<KV> type;
  };
  typedef typename Choice<M::PACK == 1 && !__is_same(cached, float), M>::type Reader;

  Panels value_piece() const { return Panels(w.value_dim, row_steps<M>(VALUE_PART)); }

  // A few keys at a time, all rows over all columns; the sums continue from one to the next.
  void multiply_values_in_place(int64_t b, int64_t kh, int64_t t0, int count, const Runs& runs, const Weights& weights,
                                Workspace& d) const {
    const int64_t size = (int64_t)sizeof(cached), bytes = w.value_dim * size;
    const int64_t distance = prefetch_distance(bytes, VALUE_PART), end = t0 + runs.end();
    memset(d.sums, 0, (size_t)count * out * sizeof(float));
    for (int x = 0; x < runs.count; x++)
      for (int c = first_value(runs.at[x], t0), next; c < runs.at[x].high; c = next) {
        next = minimum((c / VALUE_PART + 1) * VALUE_PART, runs.at[x].high);
        const int64_t key = maximum(t0 + c, (int64_t)0), following = key + distance;
        if (out_of_cache && following < end)
          for_pages(following, minimum(following + VALUE_PART, end), [&](int64_t from, int64_t to) {
            prefetch_rows(row_of(w.value, b, kh, from), to - from, w.value.row * size, bytes, true);
          });
        const cached* value = row_of(w.value, b, kh, key);
        if constexpr (TILES)
          if (in_lanes) {
            add_values_in_lanes(count, value, (int)(key - t0), next, d);
            continue;
          }
        if (TILES) c = c / VALUE_PART * VALUE_PART;
        const Weights here{weights.at + c / M::PACK, weights.ld};
        if constexpr (M::PACK == 2) {
          const Panels packed = value_piece();
          for_pages(key, t0 + next, [&](int64_t from, int64_t to) {
            pack_rows<M, KV>(row_of(w.value, b, kh, from), w.value.row, (int)(to - from), (int)w.value_dim, d.value_rows, packed,
                             (int)(from - t0 - c));
          });
          if (TILES) pad_blocks<M>(d.value_rows, packed, (int)(key - t0 - c), next - c);
          for (int p = 0; p < values.count; p++)
            add_values(count, p, row_steps<M>(next - c), here, d.value_rows + p * packed.size, packed.ld, d);
        } else {
          for (int p = 0; p < values.count; p++) add_values(count, p, next - c, here, value + p * values.ld, w.value.row, d);
        }
      }
  }

  // The same by vectors, for keys [from, to) of the tile, which are in one block: like a tile, a sum of the even and one
  // of the odd keys.
  void add_values_in_lanes(int count, const cached* value, int from, int to, Workspace& d) const {
    for (int p = 0; p < values.count; p++) {
      const cached* columns = value + p * values.ld;
      float* sums = d.sums + p * values.ld;
      switch (values.vectors(p, out)) {
        case 4: lane_rows<LANE_ROWS, 4>(count, columns, from, to, sums, d); break;
        case 3: lane_rows<LANE_ROWS, 3>(count, columns, from, to, sums, d); break;
        case 2: lane_rows<LANE_ROWS, 2>(count, columns, from, to, sums, d); break;
        default: lane_rows<LANE_ROWS, 1>(count, columns, from, to, sums, d);
      }
    }
  }
  template <int ROWS, int VECS>
  CH_INLINE void lane_rows(int count, const cached* value, int from, int to, float* sums, const Workspace& d) const {
    if constexpr (ROWS > 1)
      if (count < ROWS) return lane_rows<ROWS - 1, VECS>(count, value, from, to, sums, d);
    lane_block<ROWS, VECS>(value, from, to, sums, d);
  }
  template <int ROWS, int VECS>
  __attribute__((noinline)) void lane_block(const cached* value, int from, int to, float* sums, const Workspace& d) const {
    typedef Widened<KV> Lanes;
    const int64_t ldv = w.value.row;
    const int even = from + from % 2, odd = from + 1 - from % 2;
    vf total[ROWS][VECS];
    micro_kernel<Lanes, ROWS, VECS>((to - even + 1) / 2, d.rounded + even, tile, 2, value + (even - from) * ldv, 2 * ldv,
                                    [&](int r, int v, vf sum) CH_INLINED { total[r][v] = sum; });
    micro_kernel<Lanes, ROWS, VECS>((to - odd + 1) / 2, d.rounded + odd, tile, 2, value + (odd - from) * ldv, 2 * ldv,
                                    [&](int r, int v, vf sum) CH_INLINED {
                                      float* at = sums + r * out + v * VL;
                                      store(at, load(at) + (total[r][v] + sum));
                                    });
  }

  // Rounded weights of rows as floats.
  void widen_weights(int count, const Runs& runs, Workspace& d) const {
    for (int r = 0; r < count; r++)
      for (int c = runs.first(); c < runs.end(); c += VL)
        store(d.rounded + r * tile + c, get_vector<BFloat16>(d.half + r * tile + c));
  }

  // Adds `along` steps of one panel's columns to the sums of all rows.
  CH_INLINE void add_values(int count, int p, int64_t along, const Weights& weights, const typename Reader::right* value,
                            int64_t ldv, Workspace& d) const {
    for (int r0 = 0; r0 < count; r0 += MR)
      gemm<Reader, CONTINUE>(minimum(MR, count - r0), values.vectors(p, out), along, weights.at + r0 * weights.ld, weights.ld,
                             1, value, ldv, d.sums + (int64_t)r0 * out + p * values.ld, out);
  }

  // Merges a tile's sums, which are those of rows from `row` on of the workspace, into the rows'.
  template <class Sums>
  void merge_sums(int r0, int count, int row, const RowUpdate& update, Workspace& d) const {
    for (int r = 0; r < count; r++) {
      float *o = d.o + (int64_t)(r0 + r) * out, *sums = d.sums + (int64_t)(row + r) * out;
      const vf before = all(update.factors.before[r]), factor = all(update.factors.sums[r]);
      for (int p = 0; p < values.count; p++, o += values.ld, sums += values.ld) {
        const int columns = values.vectors(p, out) * VL;
        if constexpr (Sums::LOAD_VECTORS == 2)
          for (int c = 0; c + 2 * VL <= columns; c += 2 * VL) {
            vf one = load(sums + c), other = load(sums + c + VL);
            Sums::put_in_order(one, other);
            store(sums + c, one);
            store(sums + c + VL, other);
          }
        for (int c = 0; c < columns; c += VL) store(o + c, merged(load(o + c), before, load(sums + c), factor));
      }
    }
  }

  // Prefetches the values of the first of `count` keys while scores become weights.
  void prefetch_values(int64_t b, int64_t kh, int64_t key, int64_t count) const {
    const int64_t size = (int64_t)sizeof(cached), bytes = w.value_dim * size;
    for_pages(key, key + minimum(prefetch_distance(bytes, 1), count), [&](int64_t first, int64_t last) {
      prefetch_rows(row_of(w.value, b, kh, first), last - first, w.value.row * size, bytes, out_of_cache);
    });
  }

  ScoreTile scores_of(int r0, int64_t t, const Workspace& d) const {
    return observed.strip ? ScoreTile{d.statistics.strip + r0 * observed.ld + t * tile, observed.ld} : ScoreTile{d.scores, tile};
  }

  // `count` rows of a block against one packed tile.
  void visit(int64_t b, int64_t kh, int r0, int count, int64_t t, uint32_t pieces, const Tile& here, Workspace& d) const {
    const int64_t t0 = tile_start(t);
    const Runs runs = find_runs(r0, count, t, pieces, d);
    if (runs.count == 0) {
      if (d.only_tile) memset(d.o + (int64_t)r0 * out, 0, (size_t)count * out * sizeof(float));
      return;
    }
    ScoreTile score_tile = scores_of(r0, t, d);
    for (int x = 0; x < runs.count; x++) multiply_keys(r0, count, runs.at[x], here, score_tile, d);
    RowUpdate update;
    score_tile = weigh(b, kh, r0, count, t, runs, score_tile, 0, update, d);
    if (outputs == Outputs::COLUMN_SUMS) return;
    if (TILES) pad_weights(0, count, runs, d);
    multiply_values(t0, r0, count, runs, here, score_tile, update, d);
    if (here.bad) add_nonfinite_values(b, kh, r0, count, t0, runs, score_tile, update, d);
  }

  // All rows of a block of few against one tile in place.
  void visit_in_place(int64_t b, int64_t kh, int count, int64_t t, const Runs& runs, Workspace& d) const {
    const int64_t t0 = tile_start(t);
    d.prefetch.step();
    const ScoreTile score_tile = scores_of(0, t, d);
    for (int x = 0; x < runs.count; x++) multiply_keys_in_place(b, kh, t0, count, runs.at[x], score_tile, d);
    const int64_t first = maximum(t0 + runs.first(), (int64_t)0);
    if (out_of_cache && outputs != Outputs::COLUMN_SUMS) prefetch_values(b, kh, first, t0 + runs.end() - first);
    for (int x = 0; QUANTIZED && x < runs.count; x++) {
      load_scales(w.key, b, kh, t0, runs.at[x], w.head_dim, d.key_scales);
      load_scales(w.value, b, kh, t0, runs.at[x], w.value_dim, d.value_scales);
    }
    RowUpdate update[FEW_ROWS / MR];
    ScoreTile weights = score_tile;
    for (int r0 = 0; r0 < count; r0 += MR) {
      const ScoreTile scores{score_tile.at + r0 * score_tile.ld, score_tile.ld};
      const ScoreTile weighed = weigh(b, kh, r0, minimum(MR, count - r0), t, runs, scores, r0, update[r0 / MR], d);
      if (r0 == 0) weights = weighed;
    }
    if (outputs == Outputs::COLUMN_SUMS) return;
    if (in_lanes) widen_weights(count, runs, d);
    else if (TILES) pad_weights(0, count, runs, d);
    multiply_values_in_place(b, kh, t0, count, runs, weights_of(weights, d.half), d);
    for (int r0 = 0; r0 < count; r0 += MR) merge_sums<Reader>(r0, minimum(MR, count - r0), r0, update[r0 / MR], d);
  }

  // Scores to weights for `count` rows, which are those from `row` on of the workspace; returns the weights' place.
  ScoreTile weigh(int64_t b, int64_t kh, int r0, int count, int64_t t, const Runs& runs, const ScoreTile& score_tile,
                  int row, RowUpdate& update, Workspace& d) const {
    const int64_t t0 = tile_start(t);
    if (QUANTIZED) scale_scores(score_tile, count, runs, d);
    for (int x = 0; x < runs.count; x++) forbid(b, kh, r0, count, t0, runs.at[x], score_tile, d);
    find_peaks(score_tile, runs, count, update);
    meet(count, d.m + r0, update);
    for (int r = 0; r < count; r++) {
      float *s = score_tile.at + r * score_tile.ld, *total = d.l + (r0 + r) * LANES;
      uint16_t* half = d.half + (row + r) * tile;
      if (dropout.on) draw(b, r0, r, t0, runs, d);
      if (observed.s != nullptr) softmax_row_observed(r0, r, score_tile, half, runs, t0, update, d);
      else if (dropout.on) softmax_row<true>(s, half, r, runs, update, total, true, d.keep_mask, d.value_scales);
      else softmax_row<false>(s, half, r, runs, update, total, true, d.keep_mask, d.value_scales);
    }
    if (observed.strip) record_strip_tile(r0, count, t, runs, update, d);
    if (outputs == Outputs::COLUMN_SUMS || !(dropout.on || QUANTIZED) || observed.s == nullptr || M::PACK == 2) return score_tile;
    return apply_factors(score_tile, count, runs, row, d);
  }

  // Multiplies the sums over int8 integers by the keys' scales.
  void scale_scores(const ScoreTile& score_tile, int count, const Runs& runs, const Workspace& d) const {
    for (int x = 0; x < runs.count; x++)
      for (int c = runs.at[x].low; c < runs.at[x].high; c += VL) {
        const vf scales = load(d.key_scales + c);
        for (int r = 0; r < count; r++) {
          float* s = score_tile.at + r * score_tile.ld + c;
          store(s, load(s) * scales);
        }
      }
  }

  // Weights as they multiply values: after dropout, and times the scales of quantized values.
  CH_INLINE vf applied(vf weights, int r, int c, const Workspace& d) const {
    if (dropout.on) weights = select_bits(d.keep_mask.from(r, c), weights);
    return QUANTIZED ? weights * load(d.value_scales + c) : weights;
  }

  // Applies the rules to a run of scores, and -inf where a row may not attend.
  void forbid(int64_t b, int64_t kh, int r0, int count, int64_t t0, Interval run, const ScoreTile& score_tile,
              Workspace& d) const {
    const int c0 = run.low, c1 = run.high, c1r = (int)round_up(c1, VL);
    if (!plain) rule_rows(b, kh, r0, count, t0, c0, c1, score_tile, d);
    for (int r = 0; r < count; r++) {
      float* scores = score_tile.at + r * score_tile.ld;
      if (t0 + c0 < 0) fill(scores, c0, -t0, -INF);
      if (!masked) mask_tail(scores, c1);
      else if (!allows_all(d.row[r0 + r], t0 + c0, t0 + c1r)) mask_scores(w, d.row[r0 + r], t0 + c0, c1r - c0, scores + c0);
    }
  }

  // Records where the strip's weights of a tile are and which maximum they are relative to.
  void record_strip_tile(int r0, int count, int64_t t, const Runs& runs, const RowUpdate& update, Workspace& d) const {
    d.statistics.extent[r0 / MR * tiles + t] = Interval{runs.first(), (int)round_up(runs.end(), VL)};
    for (int r = 0; r < count; r++) {
      d.statistics.tile_maxima[(r0 + r) * tiles + t] = update.peak[r];
      float* strip = d.statistics.strip + (r0 + r) * observed.ld + t * tile;
      for (int x = 1; x < runs.count; x++) fill(strip, round_up(runs.at[x - 1].high, VL), runs.at[x].low, 0.0f);
    }
  }

  // Draws the dropout mask of a row's weights.
  void draw(int64_t b, int r0, int r, int64_t t0, const Runs& runs, Workspace& d) const {
    auto [h, i] = d.place[r0 + r];
    d.keep_mask.draw(r, philox_row(w, dropout, b, h, i), w.first_key + t0, runs.first(), (int)round_up(runs.end(), VL));
  }

  // Applies dropout and scales after statistics have read the weights; the strip keeps the weights before them.
  ScoreTile apply_factors(const ScoreTile& score_tile, int count, const Runs& runs, int row, Workspace& d) const {
    const ScoreTile to = observed.strip ? ScoreTile{d.statistics.dropped_weights + row * tile, tile} : score_tile;
    for (int r = 0; r < count; r++)
      for (int c = runs.first(); c < runs.end(); c += VL)
        store(to.at + r * to.ld + c, applied(load(score_tile.at + r * score_tile.ld + c), r, c, d));
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

  void add_nonfinite_values(int64_t b, int64_t kh, int r0, int count, int64_t t0, const Runs& runs,
                            const ScoreTile& score_tile, const RowUpdate& update, Workspace& d) const {
    for (int64_t key = maximum(t0 + runs.first(), (int64_t)0); key < t0 + runs.end(); key++) {
      const cached* value = row_of(w.value, b, kh, key);
      if constexpr (QUANTIZED) {
        const float scale = scale_of(w.value, b, kh, key, w.value_dim);
        if (is_finite(scale)) continue;
        fill(d.line, 0, w.value_dim, scale);
      } else {
        if (all_finite<KV>(value, 0, 1, (int)w.value_dim)) continue;
        get_row<KV>(value, (int)w.value_dim, d.line, out);
      }
      for (int r = 0; r < count; r++) {
        if (!may_attend(w, d.row[r0 + r], key)) continue;
        const int64_t c = key - t0;
        float weight = M::PACK == 1 ? score_tile.at[r * score_tile.ld + c] : get_one<BFloat16>(d.half + r * tile + c);
        weight *= update.factors.sums[r];
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
    const float log_total = w.lse != nullptr || observed.s != nullptr ? log_of(total) : 0.0f;
    WeightScale weight_scale{none ? 0.0f : shrink / total, none ? -INF : shrink_log - log_total};
    if (outputs == Outputs::COLUMN_SUMS) return total == total ? weight_scale : WeightScale{total, total};
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

  // One block of rows over all tiles.
  void do_block(int64_t b, int64_t kh, int64_t block, Keys keys, bool packed, Workspace& d) const {
    int64_t first = block * observed.rows;
    int count = (int)minimum((int64_t)observed.rows, rows - first);
    const Interval visited = tiles_of(begin_block(b, kh, first, count, d));
    d.only_tile = visited.high - visited.low == 1 && !in_place && !has_tables(w);
    if (!d.only_tile) memset(d.o, 0, (size_t)count * out * sizeof(float));
    for (int64_t t = visited.low; t < visited.high; t++) do_tile(b, kh, first, count, t, keys, packed, d);
    for (int r = 0; r < count; r++) {
      const float total = sum_of(load_lanes(d.l + r * LANES));
      WeightScale weight_scale = finish(b, d.place[r].h, d.place[r].i, d.o + (int64_t)r * out, d.m[r], total);
      if (observed.s == nullptr) continue;
      d.statistics.weight_scale[r] = weight_scale;
      float top = d.m[r] == -INF ? -INF : d.m[r] * to_scores(w);
      const int64_t place = row_index(w, w.corner.b + b, d.place[r].h, w.corner.query + d.place[r].i);
      d.statistics.end_row(observed, place, r, d.row[r], d.m[r], top, total, base2);
    }
    if (observed.s != nullptr) d.statistics.end_block(observed, b, kh, first, count, d.row, d.m, base2, d.column_sums);
  }

  // The tiles of an interval of keys.
  Interval tiles_of(Interval keys) const {
    if (keys.high <= keys.low) return Interval{0, 0};
    return Interval{(int)((keys.low + lead) / tile), (int)((keys.high + lead + tile - 1) / tile)};
  }

  // Rows [first, first + count) of a key head against one tile.
  void do_tile(int64_t b, int64_t kh, int64_t first, int count, int64_t t, Keys keys, bool packed, Workspace& d) const {
    const uint32_t pieces = allowed_pieces(b, kh, first, count, t);
    if (pieces == 0) return;
    const Keys tile_keys = tile_of(keys, packed ? t : 0);
    d.key_scales = tile_keys.scales, d.value_scales = tile_keys.scales + tile;
    if (!packed && in_place) {
      const Runs runs = find_runs(0, count, t, pieces, d);
      if (runs.count == 0) return;
      if (values_are_clean(b, kh, tile_start(t), runs)) return visit_in_place(b, kh, count, t, runs, d);
    }
    if (!packed) pack_tile(b, kh, t, tile_keys, d);
    Tile here{tile_keys.k, tile_keys.v, *tile_keys.bad != 0};
    if (values_packed && !here.bad) here.v = (const operand*)(at<KV>(w.value, b, kh, 0) + tile_start(t) * w.value.row);
    for (int r0 = 0; r0 < count; r0 += MR) visit(b, kh, r0, minimum(MR, count - r0), t, pieces, here, d);
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
    for (int64_t block = from; block < to; block++) do_block(b, kh, block, keys, packed, d);
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
        pack_tile(b, kh, t, tile_of(keys, t), d);
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
      pack_tile(head / w.kv_heads, head % w.kv_heads, unit % tiles, tile_of(keys, unit), d);
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

  Keys keys_of(const Keys& all_keys, int64_t head) const { return tile_of(all_keys, head * tiles); }

  // The same with sums over queries: one sum per range of rows, added in order. As many at once as fit in 64 MiB.
  void run_shared_ranges(int threads, const Keys& keys, Fault& fault) const {
    ColumnSums sizes;
    const int64_t heads = w.batch * w.kv_heads, bytes = observed.column_sums_bytes(sizes, nullptr);
    const int64_t fit = maximum((int64_t)1, ((int64_t)1 << 26) / bytes), ranges = minimum(observed.ranges, fit);
    const int64_t at_once = minimum(heads, maximum((int64_t)1, fit / observed.ranges));
    char* buffer = column_sums_buffer(at_once * ranges);
    if (buffer == nullptr) return fault.set(CH_NO_MEMORY);
    for (int64_t head = 0; head < heads; head += at_once)
      for (int64_t range = 0; range < observed.ranges && fault.get() == CH_OK; range += ranges)
        run_ranges(head, minimum(at_once, heads - head), range, minimum(ranges, observed.ranges - range), buffer, threads, keys, fault);
  }

  // Some ranges of some heads; a head's come in order.
  void run_ranges(int64_t first_head, int64_t heads, int64_t first, int64_t ranges, char* buffer, int threads,
                  const Keys& keys, Fault& fault) const {
    ColumnSums sizes;
    const int64_t bytes = observed.column_sums_bytes(sizes, nullptr);
    // Late ones first: under a causal mask they are the longest.
    parallel_units(w, threads, heads * ranges, [&](int64_t unit) {
      int64_t place = unit % heads, head = first_head + place, range = ranges - 1 - unit / heads;
      Workspace d;
      if (!allocate_workspace(d, head % w.kv_heads, fault)) return;
      do_range(head / w.kv_heads, head % w.kv_heads, first + range, buffer + (place * ranges + range) * bytes,
               keys_of(keys, head), true, d);
    });
    if (fault.get() != CH_OK) return;
    parallel_units(w, threads, heads, [&](int64_t place) {
      int64_t b = (first_head + place) / w.kv_heads, kh = (first_head + place) % w.kv_heads;
      if (first == 0) observed.begin_head(b, kh);
      for (int64_t range = 0; range < ranges; range++) {
        ColumnSums column_sums;
        observed.column_sums_bytes(column_sums, buffer + (place * ranges + range) * bytes);
        const int64_t first_row = (first + range) * observed.range_blocks * observed.rows;
        column_sums.first = observed.side > 0 ? observed.tile_row(first_row) : 0;
        observed.add_range(b, kh, first + range, column_sums);
      }
      if (first + ranges == observed.ranges) observed.end_head(b, kh);
    });
  }

  // One block of rows over many keys: threads share the tiles, whose sums are merged in order.
  void run_tiles(int threads, Fault& fault) const {
    const int64_t heads = w.batch * w.kv_heads, each = rows * partial_floats(), head_floats = tiles * each;
    float* partial = (float*)scratch(clearhead::SLOT_PARTIAL, (size_t)(heads * head_floats) * sizeof(float));
    if (partial == nullptr) return fault.set(CH_NO_MEMORY);
    // Parts of a head, so that few of them convert queries and many are there for threads that finish early.
    const int64_t parts = minimum(tiles, (8 * (int64_t)threads + heads - 1) / heads), length = (tiles + parts - 1) / parts;
    parallel_units(w, threads, heads * parts, [&](int64_t unit) {
      const int64_t head = unit / parts, from = unit % parts * length;
      do_part(head / w.kv_heads, head % w.kv_heads, from, minimum(from + length, tiles), partial + head * head_floats, fault);
    });
    if (fault.get() != CH_OK) return;
    parallel_units(w, threads, heads, [&](int64_t head) {
      Workspace d;
      if (!allocate_workspace(d, head % w.kv_heads, fault)) return;
      for (int64_t r0 = 0; r0 < rows; r0 += MR)
        merge_tiles(head, r0, (int)minimum((int64_t)MR, rows - r0), partial + head * head_floats + r0 * partial_floats(), d);
    });
  }

  // A row's maximum, normaliser and sums of one tile.
  int64_t partial_floats() const { return 1 + LANES + out; }

  void do_part(int64_t b, int64_t kh, int64_t from, int64_t to, float* partial, Fault& fault) const {
    Workspace d;
    Keys keys, sizes;
    if (!allocate_workspace(d, kh, fault)) return;
    char* base = (char*)scratch(clearhead::SLOT_KEYS, (size_t)keys_bytes(sizes, nullptr, 1, 1));
    if (base == nullptr) return fault.set(CH_NO_MEMORY);
    keys_bytes(keys, base, 1, 1);
    const Interval visited = tiles_of(begin_block(b, kh, 0, (int)rows, d));
    d.only_tile = false;
    for (int64_t t = from; t < to; t++) {
      for (int64_t r = 0; r < rows; r++) d.m[r] = -INF;
      memset(d.l, 0, (size_t)(rows * LANES) * sizeof(float));
      memset(d.o, 0, (size_t)(rows * out) * sizeof(float));
      if (t >= visited.low && t < visited.high) do_tile(b, kh, 0, (int)rows, t, keys, false, d);
      float* to_row = partial + t * rows * partial_floats();
      for (int64_t r = 0; r < rows; r++, to_row += partial_floats()) {
        to_row[0] = d.m[r];
        memcpy(to_row + 1, d.l + r * LANES, LANES * sizeof(float));
        memcpy(to_row + 1 + LANES, d.o + r * out, (size_t)out * sizeof(float));
      }
    }
  }

  // Merges the tiles of at most MR rows, in order.
  void merge_tiles(int64_t head, int64_t r0, int count, const float* partial, Workspace& d) const {
    for (int r = 0; r < count; r++) d.m[r] = -INF;
    memset(d.l, 0, (size_t)(count * LANES) * sizeof(float));
    memset(d.o, 0, (size_t)count * out * sizeof(float));
    RowUpdate update;
    for (int64_t t = 0; t < tiles; t++, partial += rows * partial_floats()) {
      for (int r = 0; r < count; r++) update.peak[r] = partial[r * partial_floats()];
      meet(count, d.m, update);
      for (int r = 0; r < count; r++) {
        const float* from = partial + r * partial_floats() + 1;
        const vf before = all(update.factors.before[r]), factor = all(update.factors.sums[r]);
        store_lanes(d.l + r * LANES, merged(load_lanes(d.l + r * LANES), before, load_lanes(from), factor));
        float* o = d.o + (int64_t)r * out;
        for (int c = 0; c < out; c += VL) store(o + c, merged(load(o + c), before, load(from + LANES + c), factor));
      }
    }
    const int64_t b = head / w.kv_heads, h = head % w.kv_heads * group;
    for (int r = 0; r < count; r++)
      finish(b, h + (r0 + r) / w.q_len, (r0 + r) % w.q_len, d.o + (int64_t)r * out, d.m[r], sum_of(load_lanes(d.l + r * LANES)));
  }

  int run() const {
    Segments segments(w, false);
    if (segments.no_memory) return CH_NO_MEMORY;
    if (outputs == Outputs::ALL && observed.has_column_sums && segments.count > 0) {
      int code = Forward(w, Outputs::ROWS).run();
      return code != CH_OK ? code : Forward(w, Outputs::COLUMN_SUMS).run();
    }
    if (w.batch == 0 || w.q_len == 0) return without_rows();
    if (outputs != Outputs::COLUMN_SUMS && segments.count > 0) return run_segments(segments);
    if (outputs != Outputs::COLUMN_SUMS && w.token_numbers != nullptr) return CH_BAD_OPTION;
    Fault fault;
    double operations = 2.0 * (double)w.batch * (double)w.heads * (double)w.q_len * (double)w.k_len *
                        (double)(w.head_dim + w.value_dim);
    execute(threads_for(w, operations), fault);
    clearhead::trim_scratch();
    return fault.get();
  }

  void execute(int threads, Fault& fault) const {
    if (threads > 1 && blocks == 1 && tiles > 1 && observed.s == nullptr && w.batch * w.kv_heads < MANY_HEADS * threads)
      run_tiles(threads, fault);
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
