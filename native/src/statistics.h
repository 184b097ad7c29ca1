// Statistics of the weights, computed by forward while a block's scores and weights are in cache.
//
// Sums over a row follow the online softmax and are rescaled with it. The top keys of a row are selected by score,
// before the exponential, so that equal scores stay equal. Statistics that need a row's final normaliser (sums over
// queries, pooled tiles, whole rows) are deferred: the block's weights are stored in a strip, each tile's relative to
// the row maximum at that time, and rescaled when they are read.
#pragma once

#include "work.h"

namespace CH_NS {

// What one pass of forward computes: everything, or what belongs to a row, or the statistics that are sums over queries.
enum class Outputs { ALL, ROWS, COLUMN_SUMS };

// The factor from a row's unnormalised weights to weights, and its logarithm.
struct WeightScale {
  float factor, log;
};

struct Candidate {
  float score;
  int32_t key;
};

// Whether a ranks below b: a smaller score, or an equal score at a higher key.
CH_INLINE bool ranks_below(Candidate a, Candidate b) { return a.score < b.score || (a.score == b.score && a.key > b.key); }

// The best candidates so far, in a heap with the worst on top.
struct TopK {
  Candidate* heap;
  int64_t capacity;
  int32_t* num_candidates;

  CH_INLINE float threshold() const { return *num_candidates < capacity ? -INF : heap[in_order() ? capacity - 1 : 0].score; }

  void sift_down(int64_t at, int64_t count) const {
    Candidate moved = heap[at];
    for (int64_t child = 2 * at + 1; child < count; child = 2 * at + 1) {
      if (child + 1 < count && ranks_below(heap[child + 1], heap[child])) child++;
      if (!ranks_below(heap[child], moved)) break;
      heap[at] = heap[child];
      at = child;
    }
    heap[at] = moved;
  }

  void insert(Candidate one) const {
    if (*num_candidates == capacity) {
      heap[0] = one;
      return sift_down(0, capacity);
    }
    int64_t at = (*num_candidates)++;
    for (; at > 0 && ranks_below(one, heap[(at - 1) / 2]); at = (at - 1) / 2) heap[at] = heap[(at - 1) / 2];
    heap[at] = one;
  }

  // Keys are ascending, so a score that only equals the bar ranks below it.
  void scan(const float* scores, int count, int64_t first) const {
    if (in_order()) return scan_few(scores, count, first);
    float min_score = threshold();
    for (int c = 0; c < count; c += VL) {
      uint32_t bits = above(load(scores + c), all(min_score));
      while (bits != 0) {
        int lane = __builtin_ctz(bits);
        bits &= bits - 1;
        if (!(scores[c + lane] > min_score)) continue;
        insert(Candidate{scores[c + lane], (int32_t)(first + c + lane)});
        min_score = threshold();
      }
    }
  }

  // A few candidates fit in vectors of scores and keys, sorted: an insertion shifts the rest, and the last one drops
  // out.
#if defined(CH_AVX512)
  CH_INLINE bool in_order() const { return capacity <= 2 * VL; }

  // Candidates in descending order, `HALVES` vectors of them.
  template <int HALVES> struct Ordered {
    __m512 scores[HALVES];
    __m512i keys[HALVES];

    CH_INLINE void put(float score, int32_t key) {
      __m512 one = _mm512_set1_ps(score);
      __m512i its = _mm512_set1_epi32(key);
      uint32_t reached = _mm512_cmp_ps_mask(scores[HALVES - 1], one, _CMP_GE_OQ);
      if constexpr (HALVES == 2) {
        uint32_t first = _mm512_cmp_ps_mask(scores[0], one, _CMP_GE_OQ);
        if (first != 0xffff) {
          // The last of the first half moves to the front of the second.
          __m512i last = _mm512_set1_epi32(VL - 1);
          scores[1] = _mm512_mask_expand_ps(_mm512_permutexvar_ps(last, scores[0]), 0xfffe, scores[1]);
          keys[1] = _mm512_mask_expand_epi32(_mm512_permutexvar_epi32(last, keys[0]), 0xfffe, keys[1]);
          return insert_at(0, first, one, its);
        }
      }
      insert_at(HALVES - 1, reached, one, its);
    }

    CH_INLINE void insert_at(int half, uint32_t reached, __m512 one, __m512i its) {
      __mmask16 others = (__mmask16)~(reached + 1);
      scores[half] = _mm512_mask_expand_ps(one, others, scores[half]);
      keys[half] = _mm512_mask_expand_epi32(its, others, keys[half]);
    }
  };

  void scan_few(const float* scores, int count, int64_t first) const {
    return capacity <= VL ? scan_ordered<1>(scores, count, first) : scan_ordered<2>(scores, count, first);
  }

  template <int HALVES> void scan_ordered(const float* scores, int count, int64_t first) const {
    float heap_scores[HALVES * VL];
    int32_t heap_keys[HALVES * VL];
    for (int x = 0; x < HALVES * VL; x++) heap_scores[x] = x < *num_candidates ? heap[x].score : -INF;
    for (int x = 0; x < HALVES * VL; x++) heap_keys[x] = x < *num_candidates ? heap[x].key : 0;
    Ordered<HALVES> best;
    for (int half = 0; half < HALVES; half++) {
      best.scores[half] = _mm512_loadu_ps(heap_scores + half * VL);
      best.keys[half] = _mm512_loadu_si512(heap_keys + half * VL);
    }
    __m512i last = _mm512_set1_epi32((int)(capacity - 1) % VL);
    int half = (int)(capacity - 1) / VL;
    __m512 threshold = _mm512_permutexvar_ps(last, best.scores[half]);
    for (int c = 0; c < count; c += VL) {
      uint32_t bits = above(load(scores + c), (vf)threshold);
      if (bits == 0) continue;
      for (; bits != 0; bits &= bits - 1) {
        int lane = __builtin_ctz(bits);
        best.put(scores[c + lane], (int32_t)(first + c + lane));
      }
      threshold = _mm512_permutexvar_ps(last, best.scores[half]);
    }
    for (int part = 0; part < HALVES; part++) {
      _mm512_storeu_ps(heap_scores + part * VL, best.scores[part]);
      _mm512_storeu_si512(heap_keys + part * VL, best.keys[part]);
    }
    int32_t filled = 0;
    while (filled < capacity && heap_scores[filled] > -INF) filled++;
    *num_candidates = filled;
    for (int x = 0; x < filled; x++) heap[x] = Candidate{heap_scores[x], heap_keys[x]};
  }
#else
  CH_INLINE bool in_order() const { return false; }
  void scan_few(const float*, int, int64_t) const {}
#endif

  // Best first.
  void sort() const {
    if (in_order()) return;
    for (int64_t count = *num_candidates - 1; count > 0; count--) {
      Candidate last = heap[0];
      heap[0] = heap[count];
      heap[count] = last;
      sift_down(0, count);
    }
  }
};

// What a row's sums over a tile are relative to, and how they join those of the tiles before (see RowUpdate of forward.h).
struct TileSums {
  float peak, old_step, old_factor, step, factor, base2;
};

// Sums over the queries of one range of a key head's rows.
struct ColumnSums {
  float* lines;  // [group][lines][ld]
  float *high, *total;  // [tile rows][k_tiles]
  float *high_now, *total_now;  // [k_tiles][LANES], of the tile row in progress
  int64_t first, open;  // tile row of `high`'s first line; the one in progress, or -1
};

// The statistics that a call requests, and derived sizes.
struct Statistics {
  const Task& w;
  ch_statistics chosen;
  const ch_statistics* s;  // null: none
  int tile, height, rows;  // keys of a tile; rows at a time; most rows of a block
  int64_t lead;  // keys of the first tile that are before the call's first key; columns of a strip start with them
  int64_t group, tiles, ld, lines, side, q_tiles, k_tiles;
  int64_t ranges, range_blocks, range_tiles;
  bool sums, ties, strip, has_column_sums;

  Statistics(const Task& work, Outputs outputs, int keys_of_tile, int64_t keys_before, int max_rows, int rows_at_once)
      : w(work), s(nullptr), tile(keys_of_tile), height(rows_at_once), rows(max_rows), lead(keys_before), ld(0), lines(0), side(0), q_tiles(0),
        k_tiles(0), ranges(1), range_blocks(0), range_tiles(0), sums(false), ties(false), strip(false), has_column_sums(false) {
    group = w.heads / w.kv_heads;
    tiles = w.k_len > 0 ? (lead + w.k_len + tile - 1) / tile : 0;
    if (!choose(outputs)) return;
    sums = s->entropy != nullptr || s->distance != nullptr || s->sink != nullptr;
    ties = s->ties != nullptr;
    lines = s->num_weights + (s->received != nullptr);
    side = s->heatmap;
    has_column_sums = lines > 0 || side > 0;
    strip = has_column_sums || s->num_rows > 0;
    if (!strip) return;
    // An odd number of cache lines, so that the rows of a group do not map to the same cache sets.
    ld = (round_up(lead + w.k_len, LANES) / 16 + 3) / 2 * 32 + 16;
    // 4 MiB, and whole groups of rows: the grouping of rows must not depend on which statistics are requested.
    rows = (int)maximum((int64_t)height, minimum((int64_t)max_rows, ((int64_t)1 << 20) / ld / height * height));
    q_tiles = side > 0 ? (w.q_len + side - 1) / side : 0;
    k_tiles = side > 0 ? (w.k_len + side - 1) / side : 0;
    plan_ranges();
  }

  Statistics(const Statistics&) = delete;

  // The statistics that are computed together with these outputs; false if there are none.
  bool choose(Outputs outputs) {
    if (w.statistics == nullptr) return false;
    chosen = *w.statistics;
    if (outputs == Outputs::COLUMN_SUMS) {
      chosen.max_score = chosen.ties = chosen.entropy = chosen.distance = chosen.sink = nullptr;
      chosen.top_k = chosen.num_rows = 0;
    }
    if (outputs == Outputs::ROWS) {
      chosen.received = nullptr;
      chosen.num_weights = chosen.heatmap = 0;
    }
    const bool by_row = chosen.max_score != nullptr || chosen.ties != nullptr || chosen.entropy != nullptr ||
                        chosen.distance != nullptr || chosen.sink != nullptr || chosen.top_k > 0 || chosen.num_rows > 0;
    s = by_row || chosen.received != nullptr || chosen.num_weights > 0 || chosen.heatmap > 0 ? &chosen : nullptr;
    return s != nullptr;
  }

  // Sums over queries are computed per range of rows and then added in order; the ranges depend on the rows of a key
  // head alone.
  void plan_ranges() {
    const int64_t blocks = (group * w.q_len + rows - 1) / rows;
    range_blocks = maximum((int64_t)1, (blocks + 15) / 16);
    ranges = maximum((int64_t)1, (blocks + range_blocks - 1) / range_blocks);
    range_tiles = side > 0 ? minimum(range_blocks * rows / side + 2 + group, group * q_tiles) : 0;
  }

  int64_t column_sums_bytes(ColumnSums& c, char* base) const {
    BumpAllocator allocator{base};
    c.lines = allocator.take<float>(group * lines * ld);
    c.high = allocator.take<float>(range_tiles * k_tiles);
    c.total = allocator.take<float>(range_tiles * k_tiles);
    c.high_now = allocator.take<float>(k_tiles * LANES);
    c.total_now = allocator.take<float>(k_tiles * LANES);
    return allocator.next - base;
  }

  // The tile row of the heatmap that a row of a key head belongs to.
  CH_INLINE int64_t tile_row(int64_t row) const { return row / w.q_len * q_tiles + row % w.q_len / side; }

  void begin_range(int64_t first_row, ColumnSums& c, char* base) const {
    int64_t bytes = column_sums_bytes(c, base);
    memset(base, 0, (size_t)bytes);
    c.first = side > 0 ? tile_row(first_row) : 0;
    c.open = -1;
  }

  void close_tile_row(ColumnSums& c) const {
    if (c.open < 0) return;
    int64_t at = (c.open - c.first) * k_tiles;
    for (int64_t j = 0; j < k_tiles; j++) {
      c.high[at + j] = max_of(load_lanes(c.high_now + j * LANES));
      c.total[at + j] = sum_of(load_lanes(c.total_now + j * LANES));
    }
    memset(c.high_now, 0, (size_t)(k_tiles * LANES) * sizeof(float));
    memset(c.total_now, 0, (size_t)(k_tiles * LANES) * sizeof(float));
    c.open = -1;
  }

  // Results of a key head start at 0, accumulate its ranges in order, and end as means.
  void begin_head(int64_t b, int64_t kh) const {
    int64_t h = b * w.heads + kh * group;
    if (s->received != nullptr) memset(s->received + h * w.k_len, 0, (size_t)(group * w.k_len) * sizeof(float));
    if (s->num_weights > 0)
      memset(s->weighted + h * s->num_weights * w.k_len, 0, (size_t)(group * s->num_weights * w.k_len) * sizeof(float));
    if (side == 0) return;
    int64_t places = q_tiles * k_tiles;
    memset(s->heatmap_max + h * places, 0, (size_t)(group * places) * sizeof(float));
    memset(s->heatmap_mean + h * places, 0, (size_t)(group * places) * sizeof(float));
  }

  void add_range(int64_t b, int64_t kh, int64_t range, const ColumnSums& c) const {
    int64_t first = range * range_blocks * rows, last = minimum(first + range_blocks * rows, group * w.q_len) - 1;
    for (int64_t g = first / w.q_len; g <= last / w.q_len; g++)
      for (int64_t line = 0; line < lines; line++) {
        const float* from = c.lines + (g * lines + line) * ld;
        float* to = line_result(b, kh * group + g, line);
        for (int64_t j = 0; j < w.k_len; j++) to[j] += from[lead + j];
      }
    if (side == 0) return;
    int64_t at = (b * w.heads + kh * group) * q_tiles * k_tiles + c.first * k_tiles;
    int64_t count = (tile_row(last) - c.first + 1) * k_tiles;
    float *high = s->heatmap_max + at, *total = s->heatmap_mean + at;
    for (int64_t x = 0; x < count; x++) {
      high[x] = c.high[x] > high[x] ? c.high[x] : high[x];
      total[x] += c.total[x];
    }
  }

  void end_head(int64_t b, int64_t kh) const {
    if (side == 0) return;
    for (int64_t line = 0; line < group * q_tiles; line++) {
      int64_t high = minimum(side, w.q_len - line % q_tiles * side);
      int64_t at = ((b * w.heads + kh * group) * q_tiles + line) * k_tiles;
      for (int64_t j = 0; j < k_tiles; j++) {
        float total = s->heatmap_mean[at + j];
        // The maximum drops NaN, the sum does not.
        if (total != total) s->heatmap_max[at + j] = total;
        s->heatmap_mean[at + j] = total / ((float)high * (float)minimum(side, w.k_len - j * side));
      }
    }
  }

  float* line_result(int64_t b, int64_t h, int64_t line) const {
    int64_t head = b * w.heads + h;
    if (line < s->num_weights) return s->weighted + (head * s->num_weights + line) * w.k_len;
    return s->received + head * w.k_len;
  }
};

// What one thread accumulates for a block of rows.
struct BlockStatistics {
  float *entropy, *distance, *mass;  // [rows][LANES]
  float* ties;  // [rows]
  Candidate* best;  // [rows][top_k]
  int32_t* num_candidates;  // [rows]
  uint8_t* used;  // [top_k]
  float* strip;  // [rows][ld]
  float* tile_maxima;  // [rows][tiles]: the row maximum that a tile's weights are relative to
  Interval* extent;  // [rows / height][tiles]: the columns that were computed
  float* dropped_weights;  // [2 * height][tile]: weights after dropout, if the strip has those before it
  WeightScale* weight_scale;  // [rows]
  float* factor;  // [rows][tiles]

  void carve(BumpAllocator& c, const Statistics& of) {
    if (of.s == nullptr) return;
    int64_t rows = of.rows, top = of.s->top_k;
    entropy = c.take<float>(of.sums ? rows * LANES : 0);
    distance = c.take<float>(of.sums ? rows * LANES : 0);
    mass = c.take<float>(of.sums ? rows * LANES : 0);
    ties = c.take<float>(rows);
    best = c.take<Candidate>(rows * top);
    num_candidates = c.take<int32_t>(rows);
    used = c.take<uint8_t>(top);
    strip = c.take<float>(of.strip ? rows * of.ld : 0);
    tile_maxima = c.take<float>(of.strip ? rows * of.tiles : 0);
    extent = c.take<Interval>(of.strip ? (rows / of.height + 1) * of.tiles : 0);
    dropped_weights = c.take<float>((int64_t)2 * of.height * of.tile);
    weight_scale = c.take<WeightScale>(rows);
    factor = c.take<float>(of.strip ? rows * of.tiles : 0);
  }

  void begin(const Statistics& of, int count) {
    if (of.sums) {
      size_t bytes = (size_t)count * LANES * sizeof(float);
      memset(entropy, 0, bytes), memset(distance, 0, bytes), memset(mass, 0, bytes);
    }
    memset(ties, 0, (size_t)count * sizeof(float));
    memset(num_candidates, 0, (size_t)count * sizeof(int32_t));
    if (of.strip) memset(extent, 0, (size_t)((count + of.height - 1) / of.height * of.tiles) * sizeof(Interval));
  }

  // Before the exponential: candidates and ties among a row's scores in the runs of a tile.
  template <class Runs>
  void scan_scores(const Statistics& of, int r, const float* scores, const Runs& runs, int64_t t0, float peak,
                   float before, float largest) const {
    if (of.s->top_k > 0) {
      TopK row_heap{best + r * of.s->top_k, of.s->top_k, num_candidates + r};
      for (int x = 0; x < runs.count && peak > row_heap.threshold(); x++) {
        const int low = runs.at[x].low;
        row_heap.scan(scores + low, (int)round_up(runs.at[x].high - low, VL), t0 + low);
      }
    }
    if (!of.ties || !(peak == largest) || peak == -INF) return;
    int count = 0;
    for (int x = 0; x < runs.count; x++)
      for (int c = runs.at[x].low; c < runs.at[x].high; c++) count += scores[c] == peak;
    ties[r] = before == largest ? ties[r] + (float)count : (float)count;
  }

  // Together with `softmax_row` and with the same arithmetic: the sums of weight times exponent, and of weight times
  // distance. `first_distance` is q_pos - k_pos of the tile's first column.
  template <int DEGREE, class Runs>
  CH_INLINE void softmax_row(int r, float* s, const Runs& runs, const TileSums& tile_sums, float first_distance,
                             int64_t sink_columns, float* total) const {
    const vf shift = all(tile_sums.peak == -INF ? 0.0f : tile_sums.peak), scale = all(tile_sums.base2), lowest = all(-1e4f);
    LaneSums sum, new_entropy, new_distance, sink_mass;
    for (int x = 0; x < runs.count; x++)
      for_lanes(runs.at[x].low, runs.at[x].high, [&](int64_t c, int part) CH_INLINED {
        const vf exponent = (load(s + c) - shift) * scale, gap = all(first_distance - (float)c) - counting();
        const vf e = exp2_of<DEGREE>(exponent);
        sum.part[part] += e;
        new_entropy.part[part] = fused(e, vmax(exponent, lowest), new_entropy.part[part]);
        new_distance.part[part] = fused(e, absolute(gap), new_distance.part[part]);
        if (c < sink_columns) sink_mass.part[part] += c + VL <= sink_columns ? e : first_of(e, sink_columns - c);
        store(s + c, e);
      });
    const vf before = all(tile_sums.old_factor), factor = all(tile_sums.factor);
    const LaneSums old = load_lanes(total);
    // The exponents of both sums shift to the new maximum.
    LaneSums old_entropy = load_lanes(entropy + r * LANES);
    for (int p = 0; p < PARTS; p++) {
      vf &one = old_entropy.part[p], &other = new_entropy.part[p];
      one = tile_sums.old_factor == 0.0f ? (vf){} : fused(all(tile_sums.old_step), old.part[p], one);
      other = tile_sums.factor == 0.0f ? (vf){} : fused(all(tile_sums.step), sum.part[p], other);
    }
    store_lanes(total, merged(old, before, sum, factor));
    store_lanes(entropy + r * LANES, merged(old_entropy, before, new_entropy, factor));
    store_lanes(distance + r * LANES, merged(load_lanes(distance + r * LANES), before, new_distance, factor));
    store_lanes(mass + r * LANES, merged(load_lanes(mass + r * LANES), before, sink_mass, factor));
  }

  // Finishes one row: `largest` is its maximum in raw scores, `top` in natural ones, `total` its normaliser without the
  // sink.
  void end_row(const Statistics& of, int64_t place, int r, const MaskRow& row, float largest, float top, float total,
               float base2) const {
    const ch_statistics& s = *of.s;
    WeightScale row_scale = weight_scale[r];
    if (s.max_score != nullptr) s.max_score[place] = total != total ? total : top;
    if (s.ties != nullptr) {
      // No score equals NaN.
      s.ties[2 * place] = largest == -INF ? __builtin_nanf("") : largest;
      s.ties[2 * place + 1] = ties[r];
    }
    bool none = row_scale.factor == 0.0f;
    if (s.entropy != nullptr) {
      float sum = LN2 * sum_of(load_lanes(entropy + r * LANES)) + total * row_scale.log, entropy_value = none ? 0.0f
          : -row_scale.factor * sum;
      s.entropy[place] = entropy_value < 0.0f ? 0.0f : entropy_value;
    }
    if (s.distance != nullptr) s.distance[place] = none ? 0.0f : row_scale.factor * sum_of(load_lanes(distance + r * LANES));
    // A row that is NaN has no mass on keys that it may not attend to.
    float sink_mass = s.sink != nullptr && !none ? sum_of(load_lanes(mass + r * LANES)) : 0.0f;
    if (s.sink != nullptr) s.sink[place] = sink_mass == 0.0f ? 0.0f : row_scale.factor * sink_mass;
    if (s.top_k > 0) end_best(of, place, r, row, largest, base2);
  }

  void end_best(const Statistics& of, int64_t place, int r, const MaskRow& row, float largest, float base2) const {
    int64_t k = of.s->top_k, filled = 0, first = of.w.corner.key;
    float* weights = of.s->top_weights + place * k;
    int64_t* indices = of.s->top_indices + place * k;
    float factor = weight_scale[r].factor;
    memset(used, 0, (size_t)k);
    if (factor != factor) {
      for (int64_t key = row.low; key < row.high && filled < k; key++) {
        if (!may_attend(of.w, row, key)) continue;
        weights[filled] = factor;
        indices[filled++] = first + key;
        if (first + key < k) used[first + key] = 1;
      }
    } else {
      TopK row_heap{best + r * k, k, num_candidates + r};
      row_heap.sort();
      for (; filled < *row_heap.num_candidates; filled++) {
        Candidate one = row_heap.heap[filled];
        float weight = exp2_of<5>(all((one.score - largest) * base2))[0] * factor;
        if (!(weight > 0.0f)) break;
        weights[filled] = weight;
        indices[filled] = first + one.key;
        if (first + one.key < k) used[first + one.key] = 1;
      }
    }
    // At most `filled` of the first k keys are used, so they suffice for the remaining entries.
    for (int64_t key = 0; filled < k; key++) {
      if (used[key]) continue;
      weights[filled] = 0.0f;
      indices[filled++] = key;
    }
  }

  // One factor per row and tile normalises the strip's weights.
  void end_strip(const Statistics& of, int count, const MaskRow* row, const float* largest, float base2) const {
    for (int r = 0; r < count; r++) {
      float row_factor = weight_scale[r].factor;
      const Interval* extents = extent + r / of.height * of.tiles;
      for (int64_t t = 0; t < of.tiles; t++) {
        Interval interval = extents[t];
        if (interval.high <= interval.low) continue;
        float& f = factor[r * of.tiles + t];
        float then = tile_maxima[r * of.tiles + t];
        f = row_factor == 0.0f ? 0.0f : then == largest[r] ? row_factor
            : exp2_of<5>(all((then - largest[r]) * base2))[0] * row_factor;
        if (row_factor == row_factor) continue;
        // A NaN row gives NaN to the keys it may attend to, and to no others.
        f = 1.0f;
        for (int c = interval.low; c < interval.high; c++)
          strip[r * of.ld + t * of.tile + c] = may_attend(of.w, row[r], t * of.tile + c - of.lead) ? row_factor : 0.0f;
      }
    }
  }

  // Adds rows [r0, r1) of the block, all of head h and of queries from i on, to the sums over queries.
  void add_lines(const Statistics& of, int64_t b, int64_t h, int64_t i, int r0, int r1, ColumnSums& column_sums) const {
    const ch_statistics& s = *of.s;
    const Interval* extents = extent + r0 / of.height * of.tiles;
    float* head_line = column_sums.lines + h % of.group * of.lines * of.ld;
    for (int64_t line = 0; line < of.lines; line++, head_line += of.ld) {
      const float* by = line < s.num_weights ? s.row_weights + b * s.weight_batch + h * s.weight_head + line * of.w.q_len
                                             : nullptr;
      for (int64_t t = 0; t < of.tiles; t++) {
        Interval interval = extents[t];
        if (interval.high <= interval.low) continue;
        vf f[MAX_HEIGHT];
        for (int r = 0; r < r1 - r0; r++)
          f[r] = all(factor[(r0 + r) * of.tiles + t] * (by != nullptr ? by[i + r] : 1.0f));
        const float* from = strip + r0 * of.ld + t * of.tile;
        float* to = head_line + t * of.tile;
        for (int c = interval.low; c < interval.high; c += VL) {
          vf sum = load(to + c);
          for (int r = 0; r < r1 - r0; r++) sum = fused(load(from + r * of.ld + c), f[r], sum);
          store(to + c, sum);
        }
      }
    }
  }

  // The same for the tiles of a heatmap; the rows belong to one tile row.
  void add_tiles(const Statistics& of, int64_t tile_row, int r0, int r1, ColumnSums& column_sums) const {
    if (column_sums.open != tile_row) {
      if (column_sums.open >= 0) of.close_tile_row(column_sums);
      column_sums.open = tile_row;
    }
    const Interval* extents = extent + r0 / of.height * of.tiles;
    for (int64_t t = 0; t < of.tiles; t++) {
      Interval interval = extents[t];
      if (interval.high <= interval.low) continue;
      vf f[MAX_HEIGHT];
      for (int r = 0; r < r1 - r0; r++) f[r] = all(factor[(r0 + r) * of.tiles + t]);
      const int64_t t0 = t * of.tile - of.lead;
      int64_t from = maximum(t0 + interval.low, (int64_t)0), to = minimum(t0 + interval.high, of.w.k_len);
      for (int64_t j = from / of.side; j * of.side < to; j++) {
        int64_t low = maximum(from, j * of.side), high = minimum(to, (j + 1) * of.side);
        LaneSums top = load_lanes(column_sums.high_now + j * LANES), sum = load_lanes(column_sums.total_now + j * LANES);
        for_lanes(0, high - low, [&](int64_t c, int part) CH_INLINED {
          for (int r = 0; r < r1 - r0; r++) {
            vf weight = load(strip + (r0 + r) * of.ld + of.lead + low + c) * f[r];
            if (low + c + VL > high) weight = first_of(weight, high - low - c);
            top.part[part] = vmax(top.part[part], weight);
            sum.part[part] += weight;
          }
        });
        store_lanes(column_sums.high_now + j * LANES, top);
        store_lanes(column_sums.total_now + j * LANES, sum);
      }
    }
  }

  void write_row(const Statistics& of, int64_t b, int64_t h, int64_t i, int r) const {
    const Corner& corner = of.w.corner;
    int32_t slot = of.s->row_slots[corner.query + i];
    if (slot < 0) return;
    float* to = of.s->rows + (((corner.b + b) * of.w.heads + h) * of.s->num_rows + slot) * of.w.whole_keys;
    memset(to, 0, (size_t)of.w.whole_keys * sizeof(float));
    for (int64_t t = 0; t < of.tiles; t++) {
      Interval interval = extent[r / of.height * of.tiles + t];
      const float* from = strip + r * of.ld + t * of.tile;
      float f = factor[r * of.tiles + t];
      const int64_t t0 = t * of.tile - of.lead, last = minimum((int64_t)interval.high, of.w.k_len - t0);
      for (int64_t c = maximum((int64_t)interval.low, -t0); c < last; c++) to[corner.key + t0 + c] = from[c] * f;
    }
  }

  // Finishes a block; `first` is its first row in its key head.
  void end_block(const Statistics& of, int64_t b, int64_t kh, int64_t first, int count, const MaskRow* row,
                 const float* largest, float base2, ColumnSums* column_sums) const {
    if (!of.strip) return;
    end_strip(of, count, row, largest, base2);
    for (int r0 = 0; r0 < count;) {
      int64_t h = kh * of.group + (first + r0) / of.w.q_len, i = (first + r0) % of.w.q_len;
      int r1 = minimum(r0 / of.height * of.height + of.height, count);
      r1 = (int)minimum((int64_t)r1, r0 + of.w.q_len - i);
      if (of.lines > 0) add_lines(of, b, h, i, r0, r1, *column_sums);
      for (int part = r0; of.side > 0 && part < r1;) {
        int64_t query = i + part - r0;
        int next = (int)minimum((int64_t)r1, part + of.side - query % of.side);
        add_tiles(of, of.tile_row(first + part), part, next, *column_sums);
        part = next;
      }
      for (int r = r0; of.s->num_rows > 0 && r < r1; r++) write_row(of, b, h, i + r - r0, r);
      r0 = r1;
    }
  }
};

}  // namespace CH_NS
