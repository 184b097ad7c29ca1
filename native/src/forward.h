// Forward: blocks of rows loop over tiles of keys with an online softmax (Milakov and Gimelshein 2018; FlashAttention,
// Dao et al. 2022, algorithm 1), 6 rows at a time from the first GEMM to the second, so that scores stay in the L1
// cache. The grouped heads of a key head are additional rows and share its keys.
#pragma only_tile

#include "prefetch.h"
#include "gemv.h"
#include "segments.h"
#include "statistics.h"

namespace CH_NS {

// Bytes of keys and values that are assumed cache-resident. In a model, weights evict them before a layer's cache is
// read again, so fewer of them are resident than in a call that is repeated in a loop. Rows that are short are
// prefetched by the hardware, so the higher limit is that of resident data (measured).
constexpr int64_t NEAR = 4 << 20, NEAR_SHORT = 24 << 20;
constexpr int ROWS = 96;  // rows of a block: how often a tile of keys is reused while it is in cache

// What one pass of forward computes: both, or only one of them if they need different plans.
enum class Gives { ALL, OUTPUT, STATISTICS };

template <class M, class IO> struct Forward {
  typedef typename M::number number;
  typedef typename IO::type element;

  const Task& w;
  int tile;  // keys of a tile
  int64_t group, rows;  // query heads per key head; rows per key head
  int numbers, steps, out;  // operands of a row of A, and those to multiply; columns of O
  int64_t tiles, k_numbers, v_numbers;  // per tile
  int64_t splits, split_tiles, blocks;  // of keys; blocks of rows
  bool whole;  // a unit processes all rows of a key head and packs its keys itself
  bool masked, plain;
  bool direct;  // keys and values are read in place
  bool lying;  // values in the tensor have the packed layout already, and are not copied if they are finite
  bool far;  // keys and values come from memory: they exceed the cache
  float base2;
  Dropout dropout;
  int64_t diagonal_floats;
  Panels values;  // of a tile
  Gives gives;
  Statistics observed;

  struct Keys {
    number* k;
    number* v;
    uint8_t* bad;  // per tile: the values had NaN or infinity, which are 0 here
  };

  // Whether keys that are read in place are deinterleaved (even elements, then odd ones).
  static constexpr bool ARRANGED = M::PAIR == 1 && Widened<IO>::AT_ONCE == 2;

  // Prefetches the next key head, of this call or of another, while the current one is processed.
  Prefetch prefetch_of(const Task& next, int64_t b, int64_t kh) const {
    Prefetch a;
    a.clear();
    if (blocks * tiles == 0) return a;
    if (direct) {
      // In-place reads prefetch for themselves. A whole head at once fills the line fill buffers of Intel's processors
      // and stalls the loop (measured: a fifth slower).
      a.add<IO>(next.key, b, kh, least(next.k_len, rows_ahead(next.head_dim * (int64_t)sizeof(element), 1)), next.head_dim);
    } else {
      a.add<IO>(next.key, b, kh, next.k_len, next.head_dim);
      a.add<IO>(next.value, b, kh, next.k_len, next.value_dim);
      a.add<IO>(next.query, b, kh * group, next.q_len, next.head_dim);
    }
    a.spread((rows + MR - 1) / MR * (direct ? tiles : (w.k_len + PW - 1) / PW));
    return a;
  }

  // The query of a row.
  struct Place {
    int64_t h, i;
  };

  // A thread's workspace.
  struct Desk {
    number* q;  // [ROWS][numbers]
    number* arranged;  // the same, deinterleaved like keys that are read in place
    float* scores;  // [MR][tile]
    uint16_t* half;  // [MR][tile], weights in bfloat16
    float* o;  // [ROWS][out]
    float* m;
    float* l;  // [ROWS][VL]
    Row* row;
    Place* place;
    float* diagonals;
    number* staged;
    float* line;
    KeptRows keep;  // [MR]
    Prefetch prefetch;
    Gather gather;
    Columns* columns;
    bool only_tile;  // the block has one tile: sums are set, not added to
  };

  // Scores, then weights, of up to MR rows over the columns of a tile; row stride `ld`.
  struct Sheet {
    float* at;
    int64_t ld;
  };

  explicit Forward(const Task& work, Gives what = Gives::ALL)
      : w(work), tile(tile_of(work)), values(work.value_dim, row_steps<M>(tile)), gives(what),
        observed(work, what == Gives::OUTPUT ? nullptr : work.statistics, tile, ROWS) {
    group = w.heads / w.kv_heads;
    rows = group * w.q_len;
    blocks = (rows + observed.rows - 1) / observed.rows;
    numbers = row_numbers<M>((int)w.head_dim);
    steps = (int)row_steps<M>(w.head_dim);
    out = (int)round_up(w.value_dim, VL);
    tiles = (w.k_len + tile - 1) / tile;
    k_numbers = (int64_t)tile * numbers;
    v_numbers = values.numbers();
    masked = is_masked(w);
    plain = no_rules(w);
    base2 = to_base2(w);
    dropout = dropout_of(w);
    if (gives == Gives::STATISTICS) dropout.on = false;
    diagonal_floats = count_diagonal(w) * diagonal_length(w) * group;
    plan();
    direct = (splits > 1 || rows <= ROWS) && reads_directly();
    lying = lies_laid_out<M, IO>(w.value, w.value_dim);
    const int64_t dims = w.head_dim + w.value_dim;
    far = w.batch * w.kv_heads * w.k_len * dims * (int64_t)sizeof(element) > (dims > 128 ? NEAR : NEAR_SHORT);
  }

  // With few rows each key is used once, and rows must be whole vectors. With gradients of the row maximum, backward
  // compares its bits, and backward packs.
  bool reads_directly() const {
    if (gives == Gives::STATISTICS && observed.ties) return false;
    return rows <= 12 && w.head_dim % (VL * M::PAIR) == 0 && w.value_dim % VL == 0 && w.key.row % M::PAIR == 0 &&
           w.key.head % M::PAIR == 0 && w.key.batch % M::PAIR == 0 && (uintptr_t)w.key.data % 4 == 0;
  }

  static int tile_of(const ch_attention& w) {
    if (has_tables(w)) return most(64, PW);
    return most(w.head_dim, w.value_dim) * (int64_t)sizeof(element) <= 256 ? 512 : 256;
  }

  // The split of keys depends on the shape alone, so the sums are the same with any number of threads.
  void plan() {
    int64_t heads = w.batch * w.kv_heads;
    splits = 1;
    // Statistics are not computed in splits.
    if (gives != Gives::STATISTICS && rows <= 32 && w.units < 64)
      splits = least((tiles * tile + 511) / 512, (64 + w.units - 1) / most(w.units, (int64_t)1));
    splits = most(splits, (int64_t)1);
    split_tiles = (tiles + splits - 1) / splits;
    splits = split_tiles > 0 ? (tiles + split_tiles - 1) / split_tiles : 1;
    whole = splits == 1 && heads >= 4 * w.threads;
    if (w.threads == 1 && splits == 1) whole = true;
    if (splits == 1 && heads % w.threads == 0 && heads / w.threads < 64) whole = true;
    // In-place reading must not depend on the number of threads.
    if (splits == 1 && rows <= ROWS) whole = true;
  }

  void pack_tile(int64_t b, int64_t kh, int64_t t, number* k, number* v, uint8_t* bad, Desk& d) const {
    int64_t first = t * tile;
    int count = (int)least((int64_t)tile, w.k_len - first);
    pack_panels<M, IO>(at<IO>(w.key, b, kh, first), w.key.row, count, (int)w.head_dim, k, d.staged);
    *bad = !sound_values(b, kh, t);
    if (lying && !*bad) return;
    pack_rows<M, IO>(at<IO>(w.value, b, kh, first), w.value.row, count, (int)w.value_dim, v, values);
    if (*bad) clean_values(v, count);
  }

  // Whether no value of a tile must be replaced: there is no mask, or all are finite.
  bool sound_values(int64_t b, int64_t kh, int64_t t) const {
    int64_t first = t * tile, count = least((int64_t)tile, w.k_len - first);
    return !masked || all_finite<IO>(at<IO>(w.value, b, kh, first), w.value.row, count, (int)w.value_dim);
  }

  // 0 * NaN is NaN, so NaN and infinity become 0 until it is known which rows attend to them.
  void clean_values(number* v, int count) const {
    for (int64_t x = 0; x < values.numbers(); x++) {
      if (x % values.size >= row_steps<M>(count) * values.ld) continue;
      if constexpr (M::PAIR == 1) {
        if (!(v[x] - v[x] == 0.0f)) v[x] = 0.0f;
      } else {
        uint32_t pair = (uint32_t)v[x];
        if ((pair & 0x7f800000) == 0x7f800000) pair &= 0x0000ffff;
        if ((pair & 0x00007f80) == 0x00007f80) pair &= 0xffff0000;
        v[x] = pair;
      }
    }
  }

  int64_t desk_bytes(Desk& d, char* base) const {
    Carver c{base};
    d.q = c.template take<number>((int64_t)ROWS * numbers);
    d.arranged = ARRANGED && direct ? c.template take<number>(rows * numbers) : d.q;
    d.scores = c.template take<float>((int64_t)MR * tile);
    d.half = c.template take<uint16_t>((int64_t)MR * tile);
    d.o = c.template take<float>((int64_t)ROWS * out);
    d.m = c.template take<float>(ROWS);
    d.l = c.template take<float>((int64_t)ROWS * VL);
    d.row = c.template take<Row>(ROWS);
    d.place = c.template take<Place>(ROWS);
    d.diagonals = c.template take<float>(diagonal_floats);
    d.staged = c.template take<number>((int64_t)VL * numbers);
    d.line = c.template take<float>(out);
    d.keep.groups = KeptRows::groups_of(tile);
    d.keep.bits = c.template take<KeptBits>(dropout.on ? MR * d.keep.groups : 0);
    d.gather.carve(c, observed);
    return c.next - base;
  }

  int64_t keys_bytes(Keys& k, char* base, int64_t heads, int64_t count) const {
    Carver c{base};
    k.k = c.template take<number>(heads * count * k_numbers);
    k.v = c.template take<number>(heads * count * v_numbers);
    k.bad = c.template take<uint8_t>(heads * count);
    return c.next - base;
  }

  void arrange(const float* query, float* to) const {
    memcpy(to, query, (size_t)numbers * sizeof(number));
    Widened<IO>::arrange(to, steps / VL);
  }

  // Rows [first, first + count) of a key head: queries, masks, and zeroed sums.
  Span begin_block(int64_t b, int64_t kh, int64_t first, int count, Desk& d) const {
    Span span{INT32_MAX, 0};
    int64_t h = kh * group + first / w.q_len, i = first % w.q_len;
    for (int r = 0; r < count; r++, i++) {
      if (i == w.q_len) h++, i = 0;
      d.place[r] = Place{h, i};
      get_numbers<M, IO>(at<IO>(w.query, b, h, i), (int)w.head_dim, d.q + (int64_t)r * numbers, numbers);
      if constexpr (ARRANGED)
        if (direct) arrange(d.q + (int64_t)r * numbers, d.arranged + (int64_t)r * numbers);
      const char* written = (const char*)at<IO>(w.output, b, h, i);
      for (int64_t c = 0; c < w.value_dim * (int64_t)sizeof(element); c += 64) __builtin_prefetch(written + c, 1, 2);
      // Without a mask all rows are equal to the first; only statistics need each.
      if (masked || r == 0) mask_row(w, b, h, i, d.row[r]);
      else if (observed.s != nullptr) d.row[r] = d.row[0];
      d.m[r] = -INF;
      store(d.l + r * VL, (vf){});
      if (const Row& allowed = d.row[masked ? r : 0]; allowed.high > allowed.low) {
        span.low = least(span.low, (int)allowed.low);
        span.high = most(span.high, (int)allowed.high);
      }
    }
    if (observed.s != nullptr) d.gather.begin(observed, count);
    return span;
  }

  // Whether the block table allows any key of a tile for any row of the block; rows of grouped heads are consecutive.
  bool meets(int64_t b, int64_t kh, int64_t first, int count, int64_t t) const {
    const int64_t t0 = t * tile, t1 = least(t0 + tile, w.k_len);
    for (int64_t done = 0; done < count;) {
      const int64_t h = kh * group + (first + done) / w.q_len, i = (first + done) % w.q_len;
      const int64_t rows_here = least(count - done, w.q_len - i);
      if (blocks_meet(w, b, h, i, rows_here, t0, t1)) return true;
      done += rows_here;
    }
    return false;
  }

  // The update of a row by a tile: the new row maximum, the shift of the previous exponents, and the rescaling factor.
  struct Rise {
    float peak[MR], before[MR];
    float step[(MR + VL - 1) / VL * VL], factor[(MR + VL - 1) / VL * VL];
  };

  // The new row maximum of each row, after the rules. All rows at once: the maximum of one row is a dependency chain,
  // and six chains hide each other's latency.
  CH_INLINE void raise(Sheet sheet, int c0, int c1, int count, float* largest, Rise& rise) const {
    vf most_score[MR];
    for (int r = 0; r < MR; r++) most_score[r] = load(sheet.at + r * sheet.ld + c0);
    for (int c = c0 + VL; c < c1; c += VL)
#pragma GCC unroll 6
      for (int r = 0; r < MR; r++) most_score[r] = vmax(most_score[r], load(sheet.at + r * sheet.ld + c));
    for (int r = 0; r < count; r++) {
      float before = largest[r], now = max_of(most_score[r]);
      rise.peak[r] = now;
      rise.before[r] = before;
      if (!(now > before)) now = before;
      largest[r] = now;
      rise.step[r] = now == before ? 0.0f : (before - now) * base2;
    }
    // Fill the rest of the vector: the exponential of arbitrary leftovers can cost hundreds of cycles.
    for (int r = count; r < round_up(MR, VL); r++) rise.step[r] = 0.0f;
    for (int r = 0; r < MR; r += VL) {
      const vf step = load(rise.step + r);
      store(rise.factor + r, step == (vf){} ? all(1.0f) : exp2_of<5>(step));
    }
  }

  // Degree of the polynomial in the exponential: bfloat16 needs no more.
  static constexpr int DEGREE = M::PAIR == 1 ? 5 : 4;

  // Scores to weights for one row; weights that dropout removes count in the normaliser and become 0 afterwards.
  template <bool DROPS>
  CH_INLINE void weigh(float* s, uint16_t* half, int r, int c0, int c1, float largest, float factor, float* total,
                       bool narrow, const KeptRows& keep) const {
    vf shift = all(largest == -INF ? 0.0f : largest), scale = all(base2);
    vf sum = load(total) * all(factor);
    for (int c = c0; c < c1; c += VL) {
      vf e = exp2_of<DEGREE>((load(s + c) - shift) * scale);
      sum += e;
      if (DROPS) e = where_bits(keep.from(r, c), e);
      if (M::PAIR == 1 || !narrow)
        store(s + c, e);
      else
        put_vector<BFloat16>(half + c, e);
    }
    store(total, sum);
  }

  // The same with statistics; the weights stay in float32 for the later ones.
  void weigh_observed(int r0, int r, const Sheet& sheet, int c0, int c1, int64_t t0, const Rise& rise, bool narrow,
                      Desk& d) const {
    float *s = sheet.at + r * sheet.ld, largest = d.m[r0 + r];
    uint16_t* half = d.half + r * tile;
    d.gather.look_at_scores(observed, r0 + r, s, c0, c1, t0, rise.peak[r], rise.before[r], largest);
    if (!observed.sums) {
      weigh<false>(s, half, r, c0, c1, largest, rise.factor[r], d.l + (r0 + r) * VL, false, d.keep);
    } else {
      float far = (float)(w.query_offset + d.place[r0 + r].i - t0 - c0);
      int64_t sink_columns = observed.s->sink != nullptr ? observed.s->sink_keys - t0 : 0;
      d.gather.template weigh<DEGREE>(r0 + r, s, c0, c1, largest, rise.factor[r], rise.step[r], base2, far, sink_columns,
                             d.l + (r0 + r) * VL, [&](int c, vf e) { store(s + c, e); });
    }
    if (M::PAIR == 2 && narrow)
      for (int c = c0; c < c1; c += VL) {
        const vf e = load(s + c);
        put_vector<BFloat16>(half + c, dropout.on ? where_bits(d.keep.from(r, c), e) : e);
      }
  }

  // Keys and values of a tile: packed, or in place.
  struct Tile {
    const number *k, *v;
    bool bad, direct;
  };

  void multiply_keys(int64_t b, int64_t kh, int64_t t0, int r0, int count, int c0, int c1, const Tile& here,
                     const Sheet& sheet, Desk& d) const {
    const number* a = (here.direct ? d.arranged : d.q) + (int64_t)r0 * numbers;
    if (here.direct) {
      const element* key = at<IO>(w.key, b, kh, t0 + c0);
      const int keys = c1 - c0, vectors = steps / VL;
      float* scores = sheet.at + c0;
      if constexpr (M::PAIR == 2 || __is_same(element, float))
        return dots<M>(count, a, numbers, (const number*)key, w.key.row / M::PAIR, keys, vectors, scores, sheet.ld, far);
      else
        return dots<Widened<IO>>(count, a, numbers, key, w.key.row, keys, vectors, scores, sheet.ld, far);
    }
    for (int p = c0 / PW; p * PW < c1; p++) {
      int from = most(c0, p * PW), to = least((int)round_up(c1, VL), (p + 1) * PW);
      d.prefetch.step();
      product<M, SET>(count, (to - from) / VL, steps, a, numbers, 1,
                      here.k + (int64_t)p * PW * numbers + (from - p * PW), PW, sheet.at + from, sheet.ld);
    }
  }

  void multiply_values(int64_t b, int64_t kh, int64_t t0, int r0, int count, int c0, int c1, const Tile& here,
                       const Sheet& sheet, const float* factor, Desk& d) const {
    float* o = d.o + (int64_t)r0 * out;
    if (here.direct) return multiply_values_directly(b, kh, t0, count, c0, c1, sheet, factor, o);
    const number* weights = (M::PAIR == 1 ? (const number*)sheet.at : (const number*)d.half) + c0 / M::PAIR;
    int64_t weights_stride = M::PAIR == 1 ? sheet.ld : tile / M::PAIR;
    for (int p = 0; p < values.count; p++) {
      const number* value = here.v + p * values.size + (int64_t)(c0 / M::PAIR) * values.ld;
      const int vecs = values.vectors(p, out);
      const int64_t along = row_steps<M>(c1 - c0);
      if (d.only_tile) product<M, SET>(count, vecs, along, weights, weights_stride, 1, value, values.ld, o + p * values.ld, out);
      else product<M, SCALE_ADD>(count, vecs, along, weights, weights_stride, 1, value, values.ld, o + p * values.ld, out, factor);
    }
  }

  // A few keys at a time, over all columns.
  void multiply_values_directly(int64_t b, int64_t kh, int64_t t0, int count, int c0, int c1, const Sheet& sheet,
                                const float* factor, float* o) const {
    constexpr int STEP = NV == 4 ? 8 : 16;
    const float ones[MR] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
    const int64_t size = (int64_t)sizeof(element), bytes = w.value_dim * size, rows_prefetched = rows_ahead(bytes, STEP);
    for (int c = c0; c < c1; c += STEP) {
      const element* value = at<IO>(w.value, b, kh, t0 + c);
      const int64_t remaining = least((int64_t)STEP, c1 - c - rows_prefetched);
      if (far) ask_for_rows(value + rows_prefetched * w.value.row, remaining, w.value.row * size, bytes, far);
      for (int p = 0; p < values.count; p++)
        product_direct(count, values.vectors(p, out), least(STEP, c1 - c), Sheet{sheet.at + c, sheet.ld},
                       value + p * values.ld, o + p * values.ld, c == c0 ? factor : ones);
    }
  }

  // Prefetches the values of the first of `count` keys while scores become weights.
  void ask_for_values(int64_t b, int64_t kh, int64_t key, int64_t count) const {
    const int64_t size = (int64_t)sizeof(element), bytes = w.value_dim * size;
    ask_for_rows(at<IO>(w.value, b, kh, key), least(rows_ahead(bytes, 1), count), w.value.row * size, bytes, far);
  }

  CH_INLINE void product_direct(int count, int vecs, int keys, Sheet weights, const element* value, float* o,
                                const float* factor) const {
    if constexpr (__is_same(element, float))
      product<Single, SCALE_ADD>(count, vecs, keys, weights.at, weights.ld, 1, value, w.value.row, o, out, factor);
    else
      product<Widened<IO>, SCALE_ADD>(count, vecs, keys, weights.at, weights.ld, 1, value, w.value.row, o, out, factor);
  }

  // `count` rows of a block against one tile.
  void visit(int64_t b, int64_t kh, int r0, int count, int64_t t, const Tile& here, Desk& d) const {
    int64_t t0 = t * tile, t1 = least(t0 + tile, w.k_len);
    Span span{INT32_MAX, 0};
    if (!masked) span = Span{(int)t0, (int)t1};
    for (int r = 0; r < count && masked; r++) {
      Span allowed = reach(w, d.row[r0 + r], t0, t1);
      if (allowed.high <= allowed.low) continue;
      span.low = least(span.low, allowed.low);
      span.high = most(span.high, allowed.high);
    }
    if (span.high <= span.low) {
      if (d.only_tile) memset(d.o + (int64_t)r0 * out, 0, (size_t)count * out * sizeof(float));
      return;
    }
    if (here.direct) d.prefetch.step();
    int c0 = (span.low - (int)t0) / VL * VL, c1 = span.high - (int)t0, c1r = (int)round_up(c1, VL);
    Sheet sheet = observed.strip ? Sheet{d.gather.strip + r0 * observed.ld + t0, observed.ld} : Sheet{d.scores, tile};
    multiply_keys(b, kh, t0, r0, count, c0, c1, here, sheet, d);
    if (here.direct && far) ask_for_values(b, kh, t0 + c0, c1 - c0);
    if (!plain) rule_rows(b, kh, r0, count, t0, c0, c1, sheet, d);
    for (int r = 0; r < count; r++) {
      if (!masked) end_scores(sheet.at + r * sheet.ld, c1);
      else if (!sees_all(d.row[r0 + r], t0 + c0, t0 + c1r))
        forbid(w, d.row[r0 + r], t0 + c0, c1r - c0, sheet.at + r * sheet.ld + c0);
    }
    Rise rise;
    raise(sheet, c0, c1r, count, d.m + r0, rise);
    // Values that are read in place are multiplied by floats.
    const bool narrow = M::PAIR == 2 && !here.direct;
    for (int r = 0; r < count; r++) {
      float *s = sheet.at + r * sheet.ld, largest = d.m[r0 + r], *total = d.l + (r0 + r) * VL;
      uint16_t* half = d.half + r * tile;
      if (dropout.on) draw(b, r0, r, t0, c0, c1r, d);
      if (observed.s != nullptr) weigh_observed(r0, r, sheet, c0, c1r, t0, rise, narrow, d);
      else if (dropout.on) weigh<true>(s, half, r, c0, c1r, largest, rise.factor[r], total, narrow, d.keep);
      else weigh<false>(s, half, r, c0, c1r, largest, rise.factor[r], total, narrow, d.keep);
    }
    if (observed.strip) keep_strip(r0, count, t, c0, c1r, d);
    if (gives == Gives::STATISTICS) return;
    if (dropout.on && observed.s != nullptr && !narrow) sheet = dropped(sheet, count, c0, c1r, d);
    multiply_values(b, kh, t0, r0, count, c0, c1, here, sheet, rise.factor, d);
    if (here.bad) add_bad_values(b, kh, r0, count, t0, c0, c1, sheet, d);
  }

  // Records where the strip's weights of a tile are and which maximum they are relative to.
  void keep_strip(int r0, int count, int64_t t, int c0, int c1r, Desk& d) const {
    d.gather.extent[r0 / MR * tiles + t] = Span{c0, c1r};
    for (int r = 0; r < count; r++) d.gather.mark[(r0 + r) * tiles + t] = d.m[r0 + r];
  }

  // Draws the dropout mask of a row's weights.
  void draw(int64_t b, int r0, int r, int64_t t0, int c0, int c1r, Desk& d) const {
    auto [h, i] = d.place[r0 + r];
    d.keep.find(r, draw_of(w, dropout, b, h, i), w.first_key + t0, c0, c1r);
  }

  // Applies dropout after statistics have read the weights; the strip keeps the weights before dropout.
  Sheet dropped(const Sheet& sheet, int count, int c0, int c1r, Desk& d) const {
    const Sheet to = observed.strip ? Sheet{d.gather.dropped, tile} : sheet;
    for (int r = 0; r < count; r++)
      for (int c = c0; c < c1r; c += VL)
        store(to.at + r * to.ld + c, where_bits(d.keep.from(r, c), load(sheet.at + r * sheet.ld + c)));
    return to;
  }

  void rule_rows(int64_t b, int64_t kh, int r0, int count, int64_t t0, int c0, int c1, const Sheet& sheet,
                 Desk& d) const {
    for (int r = 0; r < count; r++) {
      auto [h, i] = d.place[r0 + r];
      apply_rules(w, d.diagonals + (h - kh * group) * (diagonal_floats / group), b, h, i, t0 + c0, c1 - c0,
                  sheet.at + r * sheet.ld + c0, nullptr);
    }
  }

  void add_bad_values(int64_t b, int64_t kh, int r0, int count, int64_t t0, int c0, int c1, const Sheet& sheet,
                      Desk& d) const {
    for (int c = c0; c < c1; c++) {
      const element* value = at<IO>(w.value, b, kh, t0 + c);
      if (all_finite<IO>(value, 0, 1, (int)w.value_dim)) continue;
      get_row<IO>(value, (int)w.value_dim, d.line, out);
      for (int r = 0; r < count; r++) {
        if (!may_attend(w, d.row[r0 + r], t0 + c)) continue;
        float weight = M::PAIR == 1 ? sheet.at[r * sheet.ld + c] : get_one<BFloat16>(d.half + r * tile + c);
        for (int x = 0; x < w.value_dim; x++)
          if (!(d.line[x] - d.line[x] == 0.0f)) d.o[(int64_t)(r0 + r) * out + x] += weight * d.line[x];
      }
    }
  }

  // Divides by the normaliser and stores the row; returns the factor for its weights.
  Share finish(int64_t b, int64_t h, int64_t i, float* o, float largest, float total) const {
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
    Share share{none ? 0.0f : shrink / total, none ? -INF : shrink_log - log_total};
    if (gives == Gives::STATISTICS) return total == total ? share : Share{total, total};
    float factor = empty ? 0.0f : shrink * dropout.factor / total;
    if (empty) memset(o, 0, (size_t)out * sizeof(float));
    put_row<IO>(at<IO>(w.output, b, h, i), (int)w.value_dim, o, factor);
    int64_t place = row_index(w, b, h, i);
    if (w.output32 != nullptr) put_row<Float32>(w.output32 + place * w.value_dim, (int)w.value_dim, o, factor);
    if (w.lse != nullptr) w.lse[place] = empty ? -INF : top + log_total;
    if (w.softmax != nullptr) {
      w.softmax[2 * place] = none ? INF : largest;
      w.softmax[2 * place + 1] = share.factor;
    }
    // Backward treats a row with only NaN scores as empty; observers must see NaN.
    return total == total ? share : Share{total, total};
  }

  // One block of rows over tiles [from, to); `partial` receives unnormalised sums.
  void do_block(int64_t b, int64_t kh, int64_t block, int64_t from, int64_t to, Keys keys, bool packed, Desk& d,
                float* partial) const {
    int64_t first = block * observed.rows;
    int count = (int)least((int64_t)observed.rows, rows - first);
    Span span = begin_block(b, kh, first, count, d);
    if (span.high > span.low) {
      from = most(from, (int64_t)span.low / tile);
      to = least(to, ((int64_t)span.high + tile - 1) / tile);
    } else {
      to = from;
    }
    d.only_tile = to - from == 1 && partial == nullptr && !direct;
    if (!d.only_tile) memset(d.o, 0, (size_t)count * out * sizeof(float));
    for (int64_t t = from; t < to; t++) {
      if (!d.only_tile && !meets(b, kh, first, count, t)) continue;
      int64_t place = packed ? t : 0;
      number* k = keys.k + place * k_numbers;
      number* v = keys.v + place * v_numbers;
      Tile here{k, v, false, !packed && direct && sound_values(b, kh, t)};
      if (!packed && !here.direct) pack_tile(b, kh, t, k, v, keys.bad, d);
      here.bad = !here.direct && keys.bad[place];
      if (lying && !here.bad) here.v = (const number*)at<IO>(w.value, b, kh, t * tile);
      for (int r0 = 0; r0 < count; r0 += MR) visit(b, kh, r0, least(MR, count - r0), t, here, d);
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
        Share share = finish(b, d.place[r].h, d.place[r].i, o, d.m[r], total);
        if (observed.s == nullptr) continue;
        d.gather.share[r] = share;
        float top = d.m[r] == -INF ? -INF : d.m[r] * to_scores(w);
        d.gather.end_row(observed, row_index(w, b, d.place[r].h, d.place[r].i), r, d.row[r], d.m[r], top, total, base2);
      }
    }
    if (observed.s != nullptr) d.gather.end_block(observed, b, kh, first, count, d.row, d.m, base2, d.columns);
  }

  bool open_desk(Desk& d, int64_t kh, Fault& fault) const {
    Desk sizes;
    char* base = (char*)scratch(clearhead::SLOT_WORK, (size_t)desk_bytes(sizes, nullptr));
    if (base == nullptr) {
      fault.set(CH_NO_MEMORY);
      return false;
    }
    desk_bytes(d, base);
    d.prefetch.clear();
    d.columns = nullptr;
    if (diagonal_floats > 0)
      for (int64_t g = 0; g < group; g++)
        make_diagonals(w, kh * group + g, d.diagonals + g * (diagonal_floats / group));
    return true;
  }

  // Blocks [from, to) of a key head's rows, one after the other.
  void do_blocks(int64_t b, int64_t kh, int64_t from, int64_t to, Keys keys, bool packed, Desk& d) const {
    for (int64_t block = from; block < to; block++) do_block(b, kh, block, 0, tiles, keys, packed, d, nullptr);
  }

  // The same for one range of rows; its sums over queries go into `buffer`.
  Columns do_span(int64_t b, int64_t kh, int64_t span, char* buffer, Keys keys, bool packed, Desk& d) const {
    Columns columns;
    int64_t from = span * observed.span_blocks, to = least(from + observed.span_blocks, blocks);
    observed.begin_span(from * observed.rows, columns, buffer);
    d.columns = &columns;
    do_blocks(b, kh, from, to, keys, packed, d);
    observed.close_tile_row(columns);
    return columns;
  }

  // A thread processes all rows of a key head and packs its keys: once, or tile by tile if there is only one block.
  void do_head(int64_t b, int64_t kh, const Prefetch* prefetch, Fault& fault) const {
    Desk d;
    Keys keys, sizes;
    if (!open_desk(d, kh, fault)) return;
    bool packed = blocks > 1;
    int64_t count = packed ? tiles : 1;
    char* base = (char*)scratch(clearhead::SLOT_KEYS, (size_t)keys_bytes(sizes, nullptr, 1, count));
    if (base == nullptr) return fault.set(CH_NO_MEMORY);
    keys_bytes(keys, base, 1, count);
    if (prefetch != nullptr) d.prefetch = *prefetch;
    if (packed)
      for (int64_t t = 0; t < tiles; t++)
        pack_tile(b, kh, t, keys.k + t * k_numbers, keys.v + t * v_numbers, keys.bad + t, d);
    if (!observed.columns) return do_blocks(b, kh, 0, blocks, keys, packed, d);
    char* buffer = columns_buffer(1);
    if (buffer == nullptr) return fault.set(CH_NO_MEMORY);
    observed.begin_head(b, kh);
    for (int64_t span = 0; span < observed.spans; span++)
      observed.add_span(b, kh, span, do_span(b, kh, span, buffer, keys, packed, d));
    observed.end_head(b, kh);
  }

  void run_whole(int threads, Fault& fault) const {
    const int64_t units = w.batch * w.kv_heads;
    attend(w, threads, units, [&](int64_t unit) {
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
      Forward(part, gives).share(threads, fault);
    }
    const int64_t first = segments.large * w.kv_heads, units = segments.count * w.kv_heads - first;
    attend(w, threads, units, [&](int64_t unit) {
      const int64_t head = first + unit, next = head + threads;
      const Task part = segments.part(w, head / w.kv_heads, 1);
      const Forward one(part, gives);
      Prefetch prefetch;
      const bool more = next < segments.count * w.kv_heads;
      if (more) prefetch = one.prefetch_of(segments.part(w, next / w.kv_heads, 1), 0, next % w.kv_heads);
      one.do_head(0, head % w.kv_heads, more ? &prefetch : nullptr, fault);
    });
    clearhead::trim_scratch();
    return fault.get();
  }

  char* columns_buffer(int64_t count) const {
    Columns sizes;
    return (char*)scratch(clearhead::SLOT_COLUMNS, (size_t)(count * observed.columns_bytes(sizes, nullptr)));
  }

  // Keys are packed once and shared; then threads take blocks of rows, late ones first: under a causal mask they are
  // the longest.
  void run_shared(int threads, Fault& fault) const {
    Keys keys, sizes;
    int64_t heads = w.batch * w.kv_heads;
    char* base = (char*)scratch(clearhead::SLOT_SHARED, (size_t)keys_bytes(sizes, nullptr, heads, tiles));
    if (base == nullptr) return fault.set(CH_NO_MEMORY);
    keys_bytes(keys, base, heads, tiles);
    attend(w, threads, heads * tiles, [&](int64_t unit) {
      int64_t head = unit / tiles;
      Desk d;
      if (!open_desk(d, head % w.kv_heads, fault)) return;
      pack_tile(head / w.kv_heads, head % w.kv_heads, unit % tiles, keys.k + unit * k_numbers,
                keys.v + unit * v_numbers, keys.bad + unit, d);
    });
    if (fault.get() != CH_OK) return;
    if (observed.columns) return share_spans(threads, keys, fault);
    attend(w, threads, heads * blocks, [&](int64_t unit) {
      int64_t head = unit % heads, block = blocks - 1 - unit / heads;
      Desk d;
      if (!open_desk(d, head % w.kv_heads, fault)) return;
      do_blocks(head / w.kv_heads, head % w.kv_heads, block, block + 1, keys_of(keys, head), true, d);
    });
  }

  Keys keys_of(const Keys& all_keys, int64_t head) const {
    return Keys{all_keys.k + head * tiles * k_numbers, all_keys.v + head * tiles * v_numbers,
                all_keys.bad + head * tiles};
  }

  // The same with sums over queries: one sum per range of rows, added in order.
  void share_spans(int threads, const Keys& keys, Fault& fault) const {
    int64_t heads = w.batch * w.kv_heads;
    Columns sizes;
    int64_t bytes = observed.columns_bytes(sizes, nullptr);
    char* buffer = columns_buffer(heads * observed.spans);
    if (buffer == nullptr) return fault.set(CH_NO_MEMORY);
    attend(w, threads, heads * observed.spans, [&](int64_t unit) {
      int64_t head = unit % heads, span = observed.spans - 1 - unit / heads;
      Desk d;
      if (!open_desk(d, head % w.kv_heads, fault)) return;
      do_span(head / w.kv_heads, head % w.kv_heads, span, buffer + (head * observed.spans + span) * bytes,
              keys_of(keys, head), true, d);
    });
    if (fault.get() != CH_OK) return;
    attend(w, threads, heads, [&](int64_t head) {
      int64_t b = head / w.kv_heads, kh = head % w.kv_heads;
      observed.begin_head(b, kh);
      for (int64_t span = 0; span < observed.spans; span++) {
        Columns columns;
        observed.columns_bytes(columns, buffer + (head * observed.spans + span) * bytes);
        columns.first = observed.side > 0 ? observed.tile_row(span * observed.span_blocks * observed.rows) : 0;
        observed.add_span(b, kh, span, columns);
      }
      observed.end_head(b, kh);
    });
  }

  // Few queries over many keys: the keys are split, and the partial results merged in order.
  void run_split(int threads, Fault& fault) const {
    int64_t heads = w.batch * w.kv_heads, stride = rows * (out + 2);
    float* partial = (float*)scratch(clearhead::SLOT_PARTIAL, (size_t)(heads * splits * stride) * sizeof(float));
    if (partial == nullptr) return fault.set(CH_NO_MEMORY);
    attend(w, threads, heads * splits, [&](int64_t unit) {
      int64_t head = unit / splits, split = unit % splits;
      Desk d;
      Keys keys, sizes;
      if (!open_desk(d, head % w.kv_heads, fault)) return;
      char* base = (char*)scratch(clearhead::SLOT_KEYS, (size_t)keys_bytes(sizes, nullptr, 1, 1));
      if (base == nullptr) return fault.set(CH_NO_MEMORY);
      keys_bytes(keys, base, 1, 1);
      int64_t from = split * split_tiles, to = least(from + split_tiles, tiles);
      for (int64_t block = 0; block < blocks; block++)
        do_block(head / w.kv_heads, head % w.kv_heads, block, from, to, keys, false, d, partial + unit * stride);
    });
    if (fault.get() != CH_OK) return;
    for (int64_t head = 0; head < heads; head++)
      for (int64_t r = 0; r < rows; r++) merge(head, r, partial + head * splits * stride + r * (out + 2), stride);
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
    const bool split = splits > 1 || (direct && (observed.ties || blocks > 1)) || segments.count > 0;
    if (gives == Gives::ALL && observed.s != nullptr && split) {
      int code = Forward(w, Gives::OUTPUT).run();
      return code != CH_OK ? code : Forward(w, Gives::STATISTICS).run();
    }
    if (w.batch == 0 || w.q_len == 0) return without_rows();
    if (gives != Gives::STATISTICS && segments.count > 0) return run_segments(segments);
    Fault fault;
    double operations = 2.0 * (double)w.batch * (double)w.heads * (double)w.q_len * (double)w.k_len *
                        (double)(w.head_dim + w.value_dim);
    share(threads_for(w, operations), fault);
    clearhead::trim_scratch();
    return fault.get();
  }

  void share(int threads, Fault& fault) const {
    if (splits > 1)
      run_split(threads, fault);
    else if (whole)
      run_whole(threads, fault);
    else
      run_shared(threads, fault);
  }

  // Without queries, sums over them are 0.
  int without_rows() const {
    for (int64_t b = 0; b < w.batch && observed.columns; b++)
      for (int64_t kh = 0; kh < w.kv_heads; kh++) observed.begin_head(b, kh);
    return CH_OK;
  }
};

}  // namespace CH_NS
