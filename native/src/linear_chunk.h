// One chunk of the linear attention family: its tiles, its decays, and the GEMMs within it.
//
// G is the running sum of a chunk's log decays, [token] or [token][feature], in two floats: after a strong decay one
// float has few digits left for weak ones. Every exponent is at most 0.
#pragma once

#include "work.h"

namespace CH_NS {

// The non-zero part of a GEMM between tokens of one chunk: rows are queries, and columns or steps are keys.
enum Part {
  ALL,  // everything
  LOWER,  // columns up to the row's index
  UP_TO,  // steps up to the row's index
  FROM_ON,  // steps from the row's index on
};

struct Matrix {
  const float* data;
  int64_t row, step;
};

CH_INLINE Matrix plain(const float* data, int64_t ld) { return Matrix{data, ld, 1}; }
CH_INLINE Matrix transposed(const float* data, int64_t ld) { return Matrix{data, 1, ld}; }

// C [rows x columns] from A [rows x steps] and B [steps x columns]; columns are a multiple of VL. `height` rows share
// one triangle boundary, so zeros are multiplied within it: 1 if an element may be NaN or infinity.
template <Update UPDATE, Part PART = ALL>
void chunk_gemm(int64_t rows, int64_t columns, int64_t steps, Matrix a, const float* b, int64_t ldb, float* c, int64_t ldc,
                int height = MR) {
  for (int64_t p = 0; p < columns; p += PW) {
    for (int64_t r = 0; r < rows; r += height) {
      const int some = (int)minimum((int64_t)height, rows - r);
      int64_t wide = minimum(columns - p, (int64_t)PW), first = 0, last = steps;
      if constexpr (PART == LOWER) wide = minimum(wide, round_up(maximum(r + some - p, (int64_t)0), VL));
      if constexpr (PART == UP_TO) last = minimum(steps, r + some);
      if constexpr (PART == FROM_ON) first = r;
      if (wide <= 0) continue;
      gemm<Fp32Fma, UPDATE>(some, (int)(wide / VL), last - first, a.data + r * a.row + first * a.step, a.row, a.step,
                            b + first * ldb + p, ldb, c + r * ldc + p, ldc);
    }
  }
}

// [rows][ld] to [columns][to_ld] in whole blocks: both counts are rounded up, and both buffers have that capacity.
CH_INLINE void transpose(const float* from, int64_t ld, int64_t rows, int64_t columns, float* to, int64_t to_ld) {
  for (int64_t r = 0; r < rows; r += VL)
    for (int64_t c = 0; c < columns; c += VL)
      transpose_block((const uint32_t*)(from + r * ld + c), ld, (uint32_t*)(to + c * to_ld + r), to_ld);
}

// e^x for x <= 0, to about 1 ULP, and exactly 1 for 0: a decay of 1 must not fade over hundreds of chunks.
//
// x = n ln 2 + r with |r| <= ln(2) / 2, so seven terms of the series are enough.
CH_INLINE vf exp_nonpositive(vf x) {
  const vf low = all(-87.0f);  // powers of two are built from exponent bits, which covers normal floats only
  const vf bounded = x < low ? low : x;  // NaN propagates
#if defined(CH_AVX512)
  const vf n = (vf)_mm512_roundscale_ps((__m512)(bounded * all(LOG2E)), 0x08);
#else
  const vf magic = all(12582912.0f);  // 1.5 * 2**23: adding it rounds to an integer
  const vf n = (bounded * all(LOG2E) + magic) - magic;
#endif
  const vf r = fused(n, all(2.12194440e-4f), fused(-n, all(0.693359375f), bounded));  // ln 2 in two parts
  vf p = all(1.0f / 5040.0f);
  p = fused(p, r, all(1.0f / 720.0f));
  p = fused(p, r, all(1.0f / 120.0f));
  p = fused(p, r, all(1.0f / 24.0f));
  p = fused(p, r, all(1.0f / 6.0f));
  p = fused(p, r, all(0.5f));
  p = fused(p, r, all(1.0f));
  p = fused(p, r, all(1.0f));
#if defined(CH_AVX512)
  return (vf)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLT_UQ), (__m512)p, (__m512)n);
#else
  const vi whole = __builtin_convertvector(bounded == bounded ? n : (vf){}, vi);
  const vf power = p * (vf)((whole + 127) << 23);
  return x < low ? (vf){} : power;
#endif
}

template <int MAP> CH_INLINE vf feature_of(vf x) {
  const vf above = x < (vf){} ? (vf){} : x;  // NaN propagates
  if constexpr (MAP == CH_FEATURE_RELU) return above;
  // Not `exp_nonpositive`: features are not multiplied over many chunks.
  if constexpr (MAP == CH_FEATURE_ELU) return exp2_of<5>((x < (vf){} ? x : (vf){}) * all(LOG2E)) + above;
  return x;
}

// The derivative of a feature map, from the feature.
CH_INLINE vf slope_of(int map, vf feature) {
  if (map == CH_FEATURE_RELU) return feature > (vf){} ? all(1.0f) : feature == feature ? (vf){} : feature;
  if (map == CH_FEATURE_ELU) return feature > all(1.0f) ? all(1.0f) : feature;
  return all(1.0f);
}

// Compensated sums: the second float has the rounding error of the first.
struct Compensated {
  vf high, low;
};

CH_INLINE Compensated add(Compensated sum, vf more) {
  const vf high = sum.high + more, moved = high - sum.high;
  return Compensated{high, sum.low + ((sum.high - (high - moved)) + (more - moved))};
}

CH_INLINE vf operator-(Compensated a, Compensated b) { return (a.high - b.high) + (a.low - b.low); }

struct CompensatedAt {
  float *high, *low;

  CH_INLINE Compensated operator[](int64_t at) const { return Compensated{load(high + at), load(low + at)}; }
  CH_INLINE Compensated every(int64_t at) const { return Compensated{all(high[at]), all(low[at])}; }
  CH_INLINE vf rounded(int64_t at) const { return load(high + at) + load(low + at); }
  CH_INLINE void put(int64_t at, Compensated sum) const { store(high + at, sum.high), store(low + at, sum.low); }
};

// Whether rows of `columns` elements, a multiple of VL, are finite: x * 0 is NaN otherwise. Two accumulators hide
// latency.
CH_INLINE bool finite_rows(const float* from, int64_t rows, int64_t columns, int64_t row) {
  vf zero = (vf){}, other = (vf){};
  for (int64_t i = 0; i < rows; i++) {
    int64_t c = 0;
    for (; c + 2 * VL <= columns; c += 2 * VL) {
      zero += load(from + i * row + c) * (vf){};
      other += load(from + i * row + c + VL) * (vf){};
    }
    for (; c < columns; c += VL) zero += load(from + i * row + c) * (vf){};
  }
  return sum_of(zero + other) == 0.0f;
}

CH_INLINE float dot(const float* a, const float* b, int64_t ld) {
  LaneSums sum;
  for_lanes(0, ld, [&](int64_t c, int part) CH_INLINED { sum.part[part] = fused(load(a + c), load(b + c), sum.part[part]); });
  return sum_of(sum);
}

// to += row * factor
CH_INLINE void add_row(float* to, const float* row, float factor, int64_t ld) {
  for (int64_t c = 0; c < ld; c += VL) store(to + c, fused(load(row + c), all(factor), load(to + c)));
}

CH_INLINE void scale_row(float* to, float factor, int64_t ld) {
  for (int64_t c = 0; c < ld; c += VL) store(to + c, load(to + c) * all(factor));
}

// to = a * b, each of `count` elements
CH_INLINE void multiply(float* to, const float* a, const float* b, int64_t count) {
  for (int64_t i = 0; i < count; i += VL) store(to + i, load(a + i) * load(b + i));
}

CH_INLINE void clear(float* to, int64_t count) { memset(to, 0, (size_t)count * sizeof(float)); }

// The working set of one chunk of one key head. Rows are zero-padded to F features, D channels, C tokens.
struct Tiles {
  int64_t batch, head, first, rows;  // which tokens
  int height;  // rows that share a boundary in a triangular GEMM, see `chunk_gemm`
  float *k, *v, *kt;  // features of keys, values, and the keys' transpose
  const float* values;  // values as forward's GEMMs read them
  int64_t values_row;
  float *q, *u, *o;  // features of one head's queries, its output's gradient, its output
  float *p, *d;  // scores within the chunk, and their gradients
  float *running, *sums;  // recurrent state and sum of features
  float *chunk_sums, *chunk_feature_sums;  // what this chunk adds to them
  CompensatedAt gates, gates_t;  // G as [token][feature], and its transpose
  float *decay;  // e^(G_i - G_j), with one decay per token
  float *fade_q, *fade_k, *fade_state;  // e^G, e^(Gend - G) as [token][feature], e^Gend as [feature]
  float *kf, *qf;  // keys and queries times these
  float *left, *right, *product;  // blocks of queries and keys, decayed to a common token; a product of two blocks
  float *a, *r, *rate;  // delta rule: K K^T, the residual to write, rates
  float *vt, *st, *ht;  // transposes of values, state, and gradient of the state
  float *dq, *dk, *dv, *read, *h;  // gradients; of the keys as read; of G
  float *lower, *end;  // gradients of normalisers, and of Gend
};

class Chunk {
 protected:
  static constexpr int64_t SUB = 16;  // tokens of a block within which decays are computed pair by pair

  const ch_linear& w;
  const int64_t F, D, C, chunks, units, group, state;
  const bool decays, channels, delta, normalized;
  const int threads;

  explicit Chunk(const ch_linear& work)
      : w(work),
        F(round_up(w.features, CH_LINEAR_PAD)),
        D(round_up(w.value_dim, CH_LINEAR_PAD)),
        C(round_up(w.chunk, CH_LINEAR_PAD)),
        chunks((w.length + w.chunk - 1) / w.chunk),
        units(w.batch * w.kv_heads),
        group(w.heads / w.kv_heads),
        state(w.features * D),
        decays(w.log_decay != nullptr),
        channels(decays && w.gates > 1),
        delta(w.rate != nullptr),
        normalized(w.last_normalizer != nullptr),
        threads(clearhead::after_fork() ? 1 : w.threads) {}

  // Chunks run in parallel if whole heads would not keep the threads busy and the caller has allocated states for them;
  // with the delta rule a chunk depends on the state before it.
  bool by_chunk() const {
    return threads > 1 && !delta && chunks > 1 && w.states != nullptr && units < 2 * threads && units % threads != 0;
  }

  Tiles allocate_tiles(char* from, bool back, size_t* bytes) const {
    BumpAllocator take{from};
    Tiles t{};
    // GEMMs store whole rows of VL elements and read rows up to a multiple of MR.
    const int64_t tall = C + VL, keys = tall * F, values = tall * D, square = tall * C, matrix = F * D;
    auto some = [&](int64_t count) { return take.take<float>(count); };
    t.k = some(keys), t.v = some(values), t.kt = some(F * C), t.q = some(keys), t.o = some(values);
    t.p = some(square), t.running = some(matrix), t.sums = some(F), t.chunk_sums = some(matrix), t.chunk_feature_sums = some(F);
    t.kf = t.k, t.qf = t.q;
    if (decays) {
      t.gates = {some(keys), some(keys)}, t.gates_t = {some(F * C), some(F * C)};
      t.fade_q = some(keys), t.fade_k = some(keys), t.fade_state = some(F);
      t.kf = some(keys), t.qf = some(keys);
      if (channels) t.left = some(keys), t.right = some(maximum(keys, F * C)), t.product = some(keys);
      if (!channels) t.decay = some(square);
    }
    if (delta) t.a = some(square), t.r = some(values), t.rate = some(C);
    if (back) {
      t.u = some(values), t.d = some(square), t.vt = some(D * C), t.st = some(matrix), t.ht = some(matrix);
      t.dq = some(keys), t.dk = some(keys), t.dv = some(values), t.lower = some(C);
      t.read = some(keys), t.h = some(keys), t.end = some(F);
    }
    *bytes = (size_t)(take.next - from);
    return t;
  }

  bool tiles(bool back, Tiles* t) const {
    size_t bytes;
    allocate_tiles(nullptr, back, &bytes);
    char* memory = (char*)scratch(clearhead::SLOT_WORK, bytes);
    if (memory == nullptr) return false;
    *t = allocate_tiles(memory, back, &bytes);
    return true;
  }

  void select_chunk(Tiles& t, int64_t unit, int64_t c) const {
    t.batch = unit / w.kv_heads, t.head = unit % w.kv_heads;
    t.first = c * w.chunk, t.rows = minimum(w.chunk, w.length - t.first);
  }

  int64_t padded_rows(const Tiles& t) const { return round_up(t.rows, VL); }

  // The address of chunk `c`'s state, or sum of features.
  float* state_at(float* all, int64_t unit, int64_t c) const {
    return all == nullptr ? nullptr : all + (unit * chunks + c) * state;
  }
  float* sums_at(float* all, int64_t unit, int64_t c) const {
    return all == nullptr || !normalized ? nullptr : all + (unit * chunks + c) * F;
  }

  // ---- loading and storing rows -----------------------------------------------------------------------------

  void get_rows(const Tiles& t, const ch_tensor& from, int64_t head, int64_t dim, int64_t ld, float* to) const {
    const float* row = at<Float32>(from, t.batch, head, t.first);
    for (int64_t i = 0; i < t.rows; i++) get_row<Float32>(row + i * from.row, (int)dim, to + i * ld, (int)ld);
    clear(to + t.rows * ld, (padded_rows(t) - t.rows) * ld);  // whole blocks are transposed
  }

  void put_rows(const Tiles& t, const ch_tensor& to, int64_t head, int64_t dim, const float* from, int64_t ld) const {
    float* row = at<Float32>(to, t.batch, head, t.first);
    for (int64_t i = 0; i < t.rows; i++) put_row<Float32>(row + i * to.row, (int)dim, from + i * ld, 1.0f);
  }

  // Loads rows through the feature map into a tile, zeros beyond the last feature; returns whether the features are
  // finite.
  template <int MAP>
  bool map_rows(const Tiles& t, const ch_tensor& from, int64_t head, float scale, float* to) const {
    const float* row = at<Float32>(from, t.batch, head, t.first);
    const int64_t whole = w.features / VL * VL;
    vf zero = (vf){};
    for (int64_t i = 0; i < t.rows; i++, row += from.row, to += F) {
      if (whole < F) get_row<Float32>(row + whole, (int)(w.features - whole), to + whole, (int)(F - whole));
      for (int64_t c = 0; c < F; c += VL) {
        vf features = feature_of<MAP>(load((c < whole ? row : to) + c)) * all(scale);
        // Zero beyond the last channel.
        if (c + VL > w.features) features = first_of(features, maximum(w.features - c, (int64_t)0));
        store(to + c, features);
        zero += features * (vf){};
      }
    }
    clear(to, (padded_rows(t) - t.rows) * F);  // whole blocks are transposed
    return sum_of(zero) == 0.0f;
  }

  bool get_features(const Tiles& t, const ch_tensor& from, int64_t head, float scale, float* to) const {
    switch (w.feature_map) {
      case CH_FEATURE_ELU: return map_rows<CH_FEATURE_ELU>(t, from, head, scale, to);
      case CH_FEATURE_RELU: return map_rows<CH_FEATURE_RELU>(t, from, head, scale, to);
      default: return map_rows<CH_FEATURE_IDENTITY>(t, from, head, scale, to);
    }
  }

  // Values are read in place if nothing modifies or transposes them and their rows are whole vectors.
  void load_keys(Tiles& t, bool values_in_place = false) const {
    const bool finite = get_features(t, w.key, t.head, 1.0f, t.k);
    t.values = t.v, t.values_row = D;
    if (values_in_place && !delta && w.value_dim == D) {
      t.values = at<Float32>(w.value, t.batch, t.head, t.first), t.values_row = w.value.row;
    } else {
      get_rows(t, w.value, t.head, w.value_dim, D, t.v);
    }
    t.height = finite && finite_rows(t.values, t.rows, D, t.values_row) ? MR : 1;
    if (decays) load_decays(t);
  }

  void transpose_keys(const Tiles& t) const { transpose(t.k, F, padded_rows(t), F, t.kt, C); }

  void load_queries(Tiles& t, int64_t g) const {
    get_features(t, w.query, t.head * group + g, (float)w.scale, t.q);
    if (decays) multiply(t.qf, t.q, t.fade_q, t.rows * F);
  }

  // ---- decays -----------------------------------------------------------------------------------------------

  void load_gates(Tiles& t) const {
    const float* from = w.log_decay + ((t.batch * w.kv_heads + t.head) * w.length + t.first) * w.gates;
    for (int64_t i = 0; i < t.rows; i++, from += w.gates) {
      const int64_t row = i * F;
      if (channels) get_row<Float32>(from, (int)w.features, t.gates.high + row, (int)F);
      for (int64_t c = 0; c < F; c += VL) {
        vf here = channels ? load(t.gates.high + row + c) : all(*from);
        // Its exponential is 0 in float32, and -inf would give NaN between later tokens.
        here = here < all(-104.0f) ? all(-104.0f) : here;
        t.gates.put(row + c, i == 0 ? Compensated{here, (vf){}} : add(t.gates[row - F + c], here));
      }
    }
    for (int64_t c = 0; c < F; c += VL) store(t.fade_state + c, exp_nonpositive(t.gates.rounded((t.rows - 1) * F + c)));
  }

  void load_fades(Tiles& t) const {
    load_gates(t);
    const int64_t last = (t.rows - 1) * F;
    for (int64_t i = 0; i < t.rows; i++) {
      const int64_t row = i * F;
      // With one decay per token, all features share its exponential.
      vf forth = exp_nonpositive(t.gates.rounded(row)), back = exp_nonpositive(t.gates[last] - t.gates[row]);
      for (int64_t c = 0; c < F; c += VL) {
        if (channels && c > 0)
          forth = exp_nonpositive(t.gates.rounded(row + c)), back = exp_nonpositive(t.gates[last + c] - t.gates[row + c]);
        store(t.fade_q + row + c, forth), store(t.fade_k + row + c, back);
      }
    }
  }

  void load_decays(Tiles& t) const {
    load_fades(t);
    multiply(t.kf, t.k, t.fade_k, t.rows * F);
    transpose_gates(t, t.gates.high, t.gates_t.high);
    transpose_gates(t, t.gates.low, t.gates_t.low);
    if (channels) return;
    for (int64_t i = 0; i < t.rows; i++) {
      const Compensated here = t.gates[i * F];
      for (int64_t j = 0; j <= i; j += VL) {
        const vf distance = here - t.gates_t[j];
        // Above the diagonal the difference is positive and unused.
        store(t.decay + i * C + j, exp_nonpositive(distance < (vf){} ? distance : (vf){}));
      }
    }
  }

  void transpose_gates(const Tiles& t, float* gates, float* to) const {
    clear(gates + t.rows * F, (padded_rows(t) - t.rows) * F);
    transpose(gates, F, padded_rows(t), channels ? F : VL, to, C);
  }

  // ---- scores within a chunk --------------------------------------------------------------------------------

  // Applies decays that features share, and zeros the part above the diagonal (with `strict` also the diagonal).
  void shape(const Tiles& t, float* p, const float* lower, bool decayed, bool strict) const {
    for (int64_t i = 0; i < t.rows; i++) {
      float* row = p + i * C;
      const int64_t count = strict ? i : i + 1;
      for (int64_t j = 0; j < count; j += VL) {
        vf x = load(row + j);
        if (lower != nullptr) x += all(lower[i]);
        if (decayed) x *= load(t.decay + i * C + j);
        store(row + j, j + VL > count ? first_of(x, count - j) : x);
      }
      // The end of what the GEMM reads for this block of rows.
      const int64_t end = minimum(round_up(round_up(i + 1, MR), VL), C);
      for (int64_t j = round_up(count, VL); j < end; j += VL) store(row + j, (vf){});
    }
  }

  // p = tril(rows keys^T), decayed.
  void scores(Tiles& t, const float* rows, float* p, bool strict) const {
    if (channels) {
      scores_by_channel(t, rows, p);
    } else {
      chunk_gemm<SET, LOWER>(t.rows, padded_rows(t), F, plain(rows, F), t.kt, C, p, C, t.height);
    }
    shape(t, p, nullptr, decays && !channels, strict);
  }

  // Rows from `first` on, decayed since the token before it.
  void fade_left(const Tiles& t, const float* rows, int64_t first, int64_t count) const {
    const int64_t middle = (first - 1) * F;
    for (int64_t i = first; i < first + count; i++)
      for (int64_t c = 0; c < F; c += VL)
        store(t.left + i * F + c, load(rows + i * F + c) * exp_nonpositive(t.gates[i * F + c] - t.gates[middle + c]));
  }

  // Blocks of SUB rows and the keys before them are decayed to the token between them; within a block, pair by pair.
  void scores_by_channel(Tiles& t, const float* rows, float* p) const {
    for (int64_t b = 0; b < t.rows; b += SUB) {
      const int64_t count = minimum(SUB, t.rows - b);
      if (b > 0) {
        fade_left(t, rows, b, count);
        for (int64_t f = 0; f < w.features; f++) {
          const Compensated middle = t.gates.every((b - 1) * F + f);
          for (int64_t j = 0; j < b; j += VL)
            store(t.right + f * C + j, load(t.kt + f * C + j) * exp_nonpositive(middle - t.gates_t[f * C + j]));
        }
        chunk_gemm<SET>(count, b, w.features, plain(t.left + b * F, F), t.right, C, p + b * C, C);
      }
      for (int64_t i = b; i < b + count; i++)
        for (int64_t j = b; j <= i; j++) p[i * C + j] = pair(t, rows + i * F, i, j);
    }
  }

  float pair(const Tiles& t, const float* row, int64_t i, int64_t j) const {
    LaneSums sum;
    for_lanes(0, F, [&](int64_t c, int part) CH_INLINED {
      const vf fade = exp_nonpositive(t.gates[i * F + c] - t.gates[j * F + c]);
      sum.part[part] = fused(load(row + c) * load(t.k + j * F + c), fade, sum.part[part]);
    });
    return sum_of(sum);
  }

  // From the gradient d of p (0 above the diagonal): adds the gradients of rows and keys.
  void scores_back(Tiles& t, const float* rows, const float* d, float* d_rows, float* d_keys) const {
    if (channels) return back_by_channel(t, rows, d, d_rows, d_keys);
    chunk_gemm<ADD, UP_TO>(t.rows, F, t.rows, plain(d, C), t.k, F, d_rows, F, t.height);
    chunk_gemm<ADD, FROM_ON>(t.rows, F, t.rows, transposed(d, C), rows, F, d_keys, F, t.height);
  }

  void back_by_channel(Tiles& t, const float* rows, const float* d, float* d_rows, float* d_keys) const {
    for (int64_t b = 0; b < t.rows; b += SUB) {
      const int64_t count = minimum(SUB, t.rows - b);
      if (b > 0) back_across_blocks(t, rows, d, d_rows, d_keys, b, count);
      for (int64_t i = b; i < b + count; i++) {
        for (int64_t j = b; j <= i; j++) {
          const vf both = all(d[i * C + j]);
          for (int64_t c = 0; c < F; c += VL) {
            const vf e = both * exp_nonpositive(t.gates[i * F + c] - t.gates[j * F + c]);
            store(d_rows + i * F + c, fused(e, load(t.k + j * F + c), load(d_rows + i * F + c)));
            store(d_keys + j * F + c, fused(e, load(rows + i * F + c), load(d_keys + j * F + c)));
          }
        }
      }
    }
  }

  void back_across_blocks(Tiles& t, const float* rows, const float* d, float* d_rows, float* d_keys, int64_t b,
                          int64_t count) const {
    const int64_t middle = (b - 1) * F;
    fade_left(t, rows, b, count);
    for (int64_t j = 0; j < b; j++)
      for (int64_t c = 0; c < F; c += VL)
        store(t.right + j * F + c, load(t.k + j * F + c) * exp_nonpositive(t.gates[middle + c] - t.gates[j * F + c]));
    chunk_gemm<SET>(count, F, b, plain(d + b * C, C), t.right, F, t.product, F);
    for (int64_t i = 0; i < count; i++) {
      for (int64_t c = 0; c < F; c += VL) {
        const int64_t at = (b + i) * F + c;
        const vf fade = exp_nonpositive(t.gates[at] - t.gates[middle + c]);
        store(d_rows + at, fused(load(t.product + i * F + c), fade, load(d_rows + at)));
      }
    }
    chunk_gemm<SET>(b, F, count, transposed(d + b * C, C), t.left + b * F, F, t.product, F);
    for (int64_t j = 0; j < b; j++) {
      for (int64_t c = 0; c < F; c += VL) {
        const int64_t at = j * F + c;
        const vf fade = exp_nonpositive(t.gates[middle + c] - t.gates[at]);
        store(d_keys + at, fused(load(t.product + at), fade, load(d_keys + at)));
      }
    }
  }

  // ---- the delta rule ---------------------------------------------------------------------------------------

  // What each token writes: v becomes the solution of (I + diag(rate) tril(K K^T, -1)) v = rate (V - e^G K S).
  void correct(Tiles& t, const float* before) const {
    const float* from = w.rate + (t.batch * w.kv_heads + t.head) * w.length + t.first;
    for (int64_t i = 0; i < t.rows; i++) t.rate[i] = from[i];
    read_keys(t, t.q);
    chunk_gemm<SET>(t.rows, D, w.features, plain(t.q, F), before, D, t.r, D);
    for (int64_t i = 0; i < t.rows * D; i += VL) store(t.r + i, load(t.v + i) - load(t.r + i));
    scores(t, t.k, t.a, true);
    for (int64_t b = 0; b < t.rows; b += MR) {
      const int64_t end = minimum(b + MR, t.rows);
      if (b > 0) chunk_gemm<SET>(end - b, D, b, plain(t.a + b * C, C), t.v, D, t.o, D);
      for (int64_t i = b; i < end; i++) {
        float* row = t.v + i * D;
        for (int64_t c = 0; c < D; c += VL) {
          vf left = load(t.r + i * D + c);
          if (b > 0) left -= load(t.o + (i - b) * D + c);
          for (int64_t j = b; j < i; j++) left = fused(all(-t.a[i * C + j]), load(t.v + j * D + c), left);
          store(t.r + i * D + c, left);
          store(row + c, left * all(t.rate[i]));
        }
      }
    }
    // A rate, a decay or an overflow may introduce NaN or infinity that keys and values do not have.
    if (!finite_rows(t.v, t.rows, D, D)) t.height = 1;
  }

  // Keys as the rule reads the state with them.
  void read_keys(const Tiles& t, float* to) const {
    if (decays) return multiply(to, t.k, t.fade_q, t.rows * F);
    memcpy(to, t.k, (size_t)(t.rows * F) * sizeof(float));
  }

  // The transposed system, in place: from the gradient of the written values to rate times the solution, which is the
  // gradient of V - e^G K S. Also the gradient of the rates.
  void correct_back(const Tiles& t, float* x, float* d_rate) const {
    for (int64_t b = (t.rows - 1) / MR * MR; b >= 0; b -= MR) {
      const int64_t end = minimum(b + MR, t.rows);
      if (end < t.rows)
        chunk_gemm<SET>(end - b, D, t.rows - end, transposed(t.a + end * C + b, C), x + end * D, D, t.o, D);
      for (int64_t i = end - 1; i >= b; i--) {
        LaneSums moved;
        for_lanes(0, D, [&](int64_t c, int part) CH_INLINED {
          vf left = load(x + i * D + c);
          if (end < t.rows) left -= load(t.o + (i - b) * D + c);
          for (int64_t j = i + 1; j < end; j++) left = fused(all(-t.a[j * C + i]), load(x + j * D + c), left);
          moved.part[part] = fused(left, load(t.r + i * D + c), moved.part[part]);
          store(x + i * D + c, left * all(t.rate[i]));
        });
        d_rate[i] = sum_of(moved);
      }
    }
  }
};

}  // namespace CH_NS
