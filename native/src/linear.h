// The linear attention family, forward and backward: a recurrent state of fixed size, passed from chunk to chunk.
//
// With phi(Q) including the scale, S and z the state before a chunk, and U the output's gradient divided by the row's
// normaliser:
//
//   P = tril(phi(Q) phi(K)^T e^(G_i - G_j))          D  = tril((U V^T + lower) e^(G_i - G_j))
//   O = e^G phi(Q) S + P V                           dQ = e^G U S^T + D phi(K)                  (+ lower z)
//   S = e^Gend S + (e^(Gend - G) phi(K))^T V         dK = e^(Gend - G) V dS^T + D^T phi(Q)      (+ dz)
//   z = z + phi(K)^T 1                               dV = e^(Gend - G) phi(K) dS + P^T U
//                                                    dS = e^Gend dS + (e^G phi(Q))^T U          (dz + phi(Q)^T lower)
//
// With the delta rule V is the result of `correct`. There are two schedules with the same sums: a thread processes
// whole heads with the state in its cache; or, if there are fewer heads than keep the threads busy, all chunk
// contributions to the state in parallel, then their prefix sums, then all chunks in parallel.
#pragma once

#include "linear_chunk.h"

namespace CH_NS {

// Forward and Backward define what one chunk adds to the state, the order of the state's recurrence, and the rest of a
// chunk.
template <class Pass> int distribute(const Pass& pass, bool by_chunk, int threads, int64_t units, int64_t chunks) {
  Fault fault;
  auto each = [&](int64_t count, auto&& body) {
    parallel(threads, count, [&](int64_t task) {
      Tiles t;
      if (fault.get() != CH_OK) return;
      if (!pass.allocate(&t)) return fault.set(CH_NO_MEMORY);
      body(t, task);
    });
  };
  if (!by_chunk) {
    each(units, [&](Tiles& t, int64_t unit) { pass.head(t, unit); });
    return fault.get();
  }
  each(units * chunks, [&](Tiles& t, int64_t task) { pass.part(t, task / chunks, task % chunks); });
  if (fault.get() == CH_OK) each(units, [&](Tiles& t, int64_t unit) { pass.sums(t, unit); });
  if (fault.get() == CH_OK)
    each(units * chunks, [&](Tiles& t, int64_t task) { pass.rest(t, task / chunks, task % chunks); });
  return fault.get();
}

class StateRecurrence : protected Chunk {
 protected:
  using Chunk::Chunk;

  // running = fade_state * running + chunk_sums, sums = sums + chunk_feature_sums
  void accumulate_state(const Tiles& t, bool sums) const {
    for (int64_t f = 0; f < w.features; f++) {
      const vf fade_state = all(decays ? t.fade_state[f] : 1.0f);
      for (int64_t c = 0; c < D; c += VL) {
        float* running = t.running + f * D + c;
        store(running, fused(load(running), fade_state, load(t.chunk_sums + f * D + c)));
      }
    }
    if (sums) add_row(t.sums, t.chunk_feature_sums, 1.0f, F);
  }

  // Swaps the chunk's contribution with the state, which takes its place.
  void swap_state(Tiles& t, float* slot, float* sums) const {
    memcpy(t.chunk_sums, slot, (size_t)state * sizeof(float));
    memcpy(slot, t.running, (size_t)state * sizeof(float));
    if (sums != nullptr) {
      memcpy(t.chunk_feature_sums, sums, (size_t)F * sizeof(float));
      memcpy(sums, t.sums, (size_t)F * sizeof(float));
    }
    if (decays) load_gates(t);
    accumulate_state(t, sums != nullptr);
  }

  // The initial state [features, value_dim] of a unit, padded; zeros if there is none.
  void begin(const Tiles& t, int64_t unit, const float* matrix, const float* normalizer) const {
    clear(t.running, F * D);
    clear(t.sums, F);
    for (int64_t f = 0; matrix != nullptr && f < w.features; f++)
      memcpy(t.running + f * D, matrix + (unit * w.features + f) * w.value_dim, (size_t)w.value_dim * sizeof(float));
    if (normalizer != nullptr)
      memcpy(t.sums, normalizer + unit * w.features, (size_t)w.features * sizeof(float));
  }

  void finish(const Tiles& t, int64_t unit, float* matrix, float* normalizer) const {
    float* to = matrix + unit * w.features * w.value_dim;
    for (int64_t f = 0; f < w.features; f++)
      memcpy(to + f * w.value_dim, t.running + f * D, (size_t)w.value_dim * sizeof(float));
    if (normalizer != nullptr)
      memcpy(normalizer + unit * w.features, t.sums, (size_t)w.features * sizeof(float));
  }
};

class LinearForward : StateRecurrence {
 public:
  explicit LinearForward(const ch_linear& work) : StateRecurrence(work) {}

  int run() { return distribute(*this, by_chunk(), threads, units, chunks); }

  bool allocate(Tiles* t) const { return tiles(false, t); }

  void head(Tiles& t, int64_t unit) const {
    begin(t, unit, w.state, w.normalizer);
    for (int64_t c = 0; c < chunks; c++) {
      select_chunk(t, unit, c);
      if (w.states != nullptr) memcpy(state_at(w.states, unit, c), t.running, (size_t)state * sizeof(float));
      if (w.sums != nullptr) memcpy(sums_at(w.sums, unit, c), t.sums, (size_t)F * sizeof(float));
      load_keys(t, true);
      if (delta) transpose_keys(t), correct(t, t.running);
      outputs(t, t.running, t.sums);
      if (decays) chunk_sums<SET>(t, t.chunk_sums, t.chunk_feature_sums), accumulate_state(t, normalized);
      else chunk_sums<ADD>(t, t.running, t.sums);
    }
    finish(t, unit, w.last_state, w.last_normalizer);
  }

  void part(Tiles& t, int64_t unit, int64_t c) const {
    select_chunk(t, unit, c);
    load_keys(t, true);
    chunk_sums<SET>(t, state_at(w.states, unit, c), sums_at(w.sums, unit, c));
  }

  void sums(Tiles& t, int64_t unit) const {
    begin(t, unit, w.state, w.normalizer);
    for (int64_t c = 0; c < chunks; c++) {
      select_chunk(t, unit, c);
      swap_state(t, state_at(w.states, unit, c), sums_at(w.sums, unit, c));
    }
    finish(t, unit, w.last_state, w.last_normalizer);
  }

  void rest(Tiles& t, int64_t unit, int64_t c) const {
    select_chunk(t, unit, c);
    load_keys(t, true);
    outputs(t, state_at(w.states, unit, c), sums_at(w.sums, unit, c));
  }

 private:
  // What a chunk adds to the state and to the sum of features.
  template <Update UPDATE> void chunk_sums(const Tiles& t, float* matrix, float* sums) const {
    chunk_gemm<UPDATE>(w.features, D, t.rows, transposed(t.kf, F), t.values, t.values_row, matrix, D);
    for (int64_t c = 0; normalized && c < F; c += VL) {
      vf sum = (vf){};
      for (int64_t i = 0; i < t.rows; i++) sum += load(t.k + i * F + c);
      store(sums + c, UPDATE == ADD ? load(sums + c) + sum : sum);
    }
  }

  void outputs(Tiles& t, const float* before, const float* sums) const {
    if (!delta) transpose_keys(t);
    for (int64_t g = 0; g < group; g++) {
      load_queries(t, g);
      chunk_gemm<SET>(t.rows, D, w.features, plain(t.qf, F), before, D, t.o, D);
      scores(t, t.q, t.p, false);
      chunk_gemm<ADD, UP_TO>(t.rows, D, t.rows, plain(t.p, C), t.values, t.values_row, t.o, D, t.height);
      const int64_t head = t.head * group + g;
      if (normalized) put_divided(t, head, sums);
      else put_rows(t, w.output, head, w.value_dim, t.o, D);
    }
  }

  // Divided by each row's normaliser; a row without weight gives 0.
  void put_divided(const Tiles& t, int64_t head, const float* sums) const {
    float* shares = w.shares + (t.batch * w.heads + head) * w.length + t.first;
    float* to = at<Float32>(w.output, t.batch, head, t.first);
    for (int64_t i = 0; i < t.rows; i++, to += w.output.row) {
      LaneSums more;
      for_lanes(0, F, [&](int64_t c, int part) CH_INLINED {
        more.part[part] = fused(load(t.q + i * F + c), load(sums + c), more.part[part]);
      });
      for_lanes(0, i + 1, [&](int64_t j, int part) CH_INLINED { more.part[part] += load(t.p + i * C + j); });
      const float below = sum_of(more);
      const bool none = __builtin_fabsf(below) < __FLT_MIN__;
      shares[i] = none ? 0.0f : 1.0f / below;
      // Set to 0 instead of multiplying by 0: the sums may be NaN or infinity.
      if (none) clear(to, w.value_dim);
      else put_row<Float32>(to, (int)w.value_dim, t.o + i * D, shares[i]);
    }
  }
};

class LinearBackward : StateRecurrence {
 public:
  explicit LinearBackward(const ch_linear& work) : StateRecurrence(work) {}

  int run() { return distribute(*this, by_chunk() && w.grad_states != nullptr, threads, units, chunks); }

  bool allocate(Tiles* t) const { return tiles(true, t); }

  void head(Tiles& t, int64_t unit) const {
    begin(t, unit, w.grad_last_state, w.grad_last_normalizer);
    for (int64_t c = chunks; c-- > 0;) {
      select_chunk(t, unit, c);
      chunk(t, unit, c, t.running, t.sums, true);
      accumulate_state(t, normalized);
    }
    finish(t, unit, w.grad_state, w.grad_normalizer);
  }

  void part(Tiles& t, int64_t unit, int64_t c) const {
    select_chunk(t, unit, c);
    if (decays) load_fades(t);
    t.chunk_sums = state_at(w.grad_states, unit, c);
    if (normalized) t.chunk_feature_sums = sums_at(w.grad_sums, unit, c);
    for (int64_t g = 0; g < group; g++) {
      load_queries(t, g);
      load_upstream(t, g);
      chunk_sums(t, g);
    }
  }

  void sums(Tiles& t, int64_t unit) const {
    begin(t, unit, w.grad_last_state, w.grad_last_normalizer);
    for (int64_t c = chunks; c-- > 0;) {
      select_chunk(t, unit, c);
      swap_state(t, state_at(w.grad_states, unit, c), sums_at(w.grad_sums, unit, c));
    }
    finish(t, unit, w.grad_state, w.grad_normalizer);
  }

  void rest(Tiles& t, int64_t unit, int64_t c) const {
    select_chunk(t, unit, c);
    chunk(t, unit, c, state_at(w.grad_states, unit, c), sums_at(w.grad_sums, unit, c), false);
  }

 private:
  // The gradient of a head's output divided by its normalisers, and the gradient of the normalisers.
  void load_upstream(Tiles& t, int64_t g) const {
    const int64_t head = t.head * group + g;
    get_rows(t, w.grad_output, head, w.value_dim, D, t.u);
    if (!normalized) return;
    get_rows(t, w.output, head, w.value_dim, D, t.o);
    const float* shares = w.shares + (t.batch * w.heads + head) * w.length + t.first;
    for (int64_t i = 0; i < t.rows; i++) {
      // The output of a row without weight is constant 0.
      if (shares[i] == 0.0f) clear(t.u + i * D, D);
      else scale_row(t.u + i * D, shares[i], D);
      t.lower[i] = -dot(t.u + i * D, t.o + i * D, D);
    }
  }

  void chunk_sums(Tiles& t, int64_t g) const {
    if (g == 0) {
      chunk_gemm<SET>(w.features, D, t.rows, transposed(t.qf, F), t.u, D, t.chunk_sums, D);
    } else {
      chunk_gemm<ADD>(w.features, D, t.rows, transposed(t.qf, F), t.u, D, t.chunk_sums, D);
    }
    if (!normalized) return;
    if (g == 0) clear(t.chunk_feature_sums, F);
    for (int64_t i = 0; i < t.rows; i++) add_row(t.chunk_feature_sums, t.q + i * F, t.lower[i], F);
  }

  // `grad_after` is the gradient of the state after the chunk.
  void chunk(Tiles& t, int64_t unit, int64_t c, const float* grad_after, const float* grad_sums_after, bool adds_chunk) const {
    const float* before = state_at(w.states, unit, c);
    load_keys(t);
    transpose_keys(t);
    if (delta) correct(t, before);
    transpose(t.v, D, padded_rows(t), D, t.vt, C);
    transpose_state(before, t.st);
    transpose_state(grad_after, t.ht);
    grads_from_state(t, before, grad_after, grad_sums_after);
    const int safe_height = t.height;
    for (int64_t g = 0; g < group; g++) {
      load_queries(t, g);
      load_upstream(t, g);
      t.height = safe_height == MR && finite_rows(t.q, t.rows, F, F) && finite_rows(t.u, t.rows, D, D) ? MR : 1;
      one_head(t, sums_at(w.sums, unit, c));
      if (adds_chunk) chunk_sums(t, g);
      put_gradients(t, w.grad_query, t.head * group + g, t.q, t.dq, (float)w.scale);
    }
    if (delta) through_correction(t);
    keys_and_gates(t);
  }

  // [features][D] to [channels][F]; 0 beyond the last feature.
  void transpose_state(const float* from, float* to) const {
    const int64_t whole = w.features / VL * VL;
    transpose(from, D, whole, D, to, F);
    for (int64_t d = 0; d < D; d++)
      for (int64_t f = whole; f < F; f++) to[d * F + f] = f < w.features ? from[f * D + d] : 0.0f;
  }

  // Gradients of keys, values and the last decay through the state after the chunk.
  void grads_from_state(Tiles& t, const float* before, const float* grad_after, const float* grad_sums_after) const {
    chunk_gemm<SET>(t.rows, D, w.features, plain(t.kf, F), grad_after, D, t.dv, D);
    chunk_gemm<SET>(t.rows, F, w.value_dim, plain(t.v, D), t.ht, F, t.dk, F);
    if (decays) {
      multiply(t.dk, t.dk, t.fade_k, t.rows * F);
      clear(t.end, F);
      for (int64_t f = 0; f < w.features; f++) t.end[f] = t.fade_state[f] * dot(before + f * D, grad_after + f * D, D);
      for (int64_t i = 0; i < t.rows; i++)
        for (int64_t x = 0; x < F; x += VL)
          store(t.end + x, fused(load(t.k + i * F + x), load(t.dk + i * F + x), load(t.end + x)));
      clear(t.h, t.rows * F);
    }
    for (int64_t i = 0; normalized && i < t.rows; i++) add_row(t.dk + i * F, grad_sums_after, 1.0f, F);
    if (delta) clear(t.read, t.rows * F);
  }

  void one_head(Tiles& t, const float* sums) const {
    chunk_gemm<SET, LOWER>(t.rows, padded_rows(t), w.value_dim, plain(t.u, D), t.vt, C, t.d, C, t.height);
    shape(t, t.d, normalized ? t.lower : nullptr, decays && !channels, false);
    chunk_gemm<SET>(t.rows, F, w.value_dim, plain(t.u, D), t.st, F, t.dq, F);
    if (decays) multiply(t.dq, t.dq, t.fade_q, t.rows * F);
    for (int64_t i = 0; normalized && i < t.rows; i++) add_row(t.dq + i * F, sums, t.lower[i], F);
    scores_back(t, t.q, t.d, t.dq, t.dk);
    scores(t, t.q, t.p, false);
    chunk_gemm<ADD, FROM_ON>(t.rows, D, t.rows, transposed(t.p, C), t.u, D, t.dv, D, t.height);
    for (int64_t i = 0; decays && i < t.rows * F; i += VL)
      store(t.h + i, fused(load(t.q + i), load(t.dq + i), load(t.h + i)));
  }

  // From the gradient of the written values to those of values, rates, keys and the state.
  void through_correction(Tiles& t) const {
    correct_back(t, t.dv, w.grad_rate + (t.batch * w.kv_heads + t.head) * w.length + t.first);
    chunk_gemm<SET, LOWER>(t.rows, padded_rows(t), w.value_dim, plain(t.dv, D), t.vt, C, t.d, C, t.height);
    for (int64_t i = 0; i < t.rows; i++) scale_row(t.d + i * C, -1.0f, padded_rows(t));
    shape(t, t.d, nullptr, decays && !channels, true);
    chunk_gemm<SET>(t.rows, F, w.value_dim, plain(t.dv, D), t.st, F, t.read, F);
    for (int64_t i = 0; i < t.rows * F; i += VL) store(t.read + i, -load(t.read + i));
    if (decays) multiply(t.read, t.read, t.fade_q, t.rows * F);
    scores_back(t, t.k, t.d, t.read, t.dk);
    read_keys(t, t.q);
    for (int64_t i = 0; i < t.rows * F; i += VL) store(t.q + i, -load(t.q + i));
    chunk_gemm<ADD>(w.features, D, t.rows, transposed(t.q, F), t.dv, D, t.chunk_sums, D);
  }

  void keys_and_gates(Tiles& t) const {
    if (decays) {
      for (int64_t i = 0; i < t.rows * F; i += VL) {
        vf moved = fused(-load(t.k + i), load(t.dk + i), load(t.h + i));
        if (delta) moved = fused(load(t.k + i), load(t.read + i), moved);
        store(t.h + i, moved);
      }
      put_gates(t);
    }
    for (int64_t i = 0; delta && i < t.rows * F; i += VL) store(t.dk + i, load(t.dk + i) + load(t.read + i));
    put_gradients(t, w.grad_key, t.head, t.k, t.dk, 1.0f);
    put_rows(t, w.grad_value, t.head, w.value_dim, t.dv, D);
  }

  // A token's decay affects every later G of the chunk.
  void put_gates(Tiles& t) const {
    float* to = w.grad_decay + ((t.batch * w.kv_heads + t.head) * w.length + t.first) * w.gates;
    for (int64_t i = t.rows; i-- > 0;) {
      add_row(t.end, t.h + i * F, 1.0f, F);
      if (channels) put_row<Float32>(to + i * w.gates, (int)w.features, t.end, 1.0f);
      else to[i] = total(t.end);
    }
  }

  float total(const float* row) const {
    LaneSums sum;
    for_lanes(0, F, [&](int64_t c, int part) CH_INLINED { sum.part[part] += load(row + c); });
    return sum_of(sum);
  }

  // Through the feature map, whose derivative follows from the features.
  void put_gradients(const Tiles& t, const ch_tensor& to, int64_t head, const float* features, float* d,
                     float scale) const {
    const int map = w.feature_map;
    if (map != CH_FEATURE_IDENTITY || scale != 1.0f) {
      // The reciprocal of a tiny scale is inf: divide by the scale instead.
      const bool tiny = __builtin_fabsf(scale) < __FLT_MIN__ && scale != 0.0f;
      const vf factor = all(scale), back = all(scale == 0.0f ? 0.0f : tiny ? scale : 1.0f / scale);
      for (int64_t i = 0; i < t.rows * F; i += VL) {
        const vf feature = load(features + i);
        store(d + i, load(d + i) * factor * slope_of(map, tiny ? feature / back : feature * back));
      }
    }
    put_rows(t, to, head, w.features, d, F);
  }
};

}  // namespace CH_NS
