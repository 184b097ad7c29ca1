// A LinearCase in guarded memory: described to the library, run, and compared.
#pragma once

#include "linear_reference.h"

namespace test {

class LinearCall {
 public:
  LinearCall(const LinearCase& of, Random& random) : c(of) {
    const bool tight = random.one_in(3);
    const int64_t T = c.length, F = c.features, D = c.value_dim, C = c.chunks();
    const int64_t f = padded(F), d = padded(D);
    query = buffer(random, c.heads, T, F, tight), key = buffer(random, c.kv_heads, T, F, tight);
    value = buffer(random, c.kv_heads, T, D, tight), grad_output = buffer(random, c.heads, T, D, tight);
    output = buffer(random, c.heads, T, D, tight), grad_query = buffer(random, c.heads, T, F, tight);
    grad_key = buffer(random, c.kv_heads, T, F, tight), grad_value = buffer(random, c.kv_heads, T, D, tight);
    last_state = buffer(random, c.kv_heads, F, D), grad_state = buffer(random, c.kv_heads, F, D);
    states = buffer(random, c.kv_heads, C, F * d), grad_states = buffer(random, c.kv_heads, C, F * d);
    if (c.normalized) {
      shares = buffer(random, c.heads, T, 1);
      last_normalizer = buffer(random, c.kv_heads, 1, F), grad_normalizer = buffer(random, c.kv_heads, 1, F);
      sums = buffer(random, c.kv_heads, C, f), grad_sums = buffer(random, c.kv_heads, C, f);
    }
    for (Guarded* one : {&log_decay, &grad_decay})
      if (c.gates > 0) *one = buffer(random, c.kv_heads, T, c.gates);
    if (c.delta()) rate = buffer(random, c.kv_heads, T, 1), grad_rate = buffer(random, c.kv_heads, T, 1);
    if (!c.state.empty()) state = buffer(random, c.kv_heads, F, D);
    if (!c.normalizer.empty()) normalizer = buffer(random, c.kv_heads, 1, F);
    if (!c.grad_last_state.empty()) grad_last_state = buffer(random, c.kv_heads, F, D);
    if (!c.grad_last_normalizer.empty()) grad_last_normalizer = buffer(random, c.kv_heads, 1, F);
    put(query, c.query), put(key, c.key), put(value, c.value), put(grad_output, c.grad_output);
    put(log_decay, c.log_decay), put(rate, c.rate), put(state, c.state), put(normalizer, c.normalizer);
    put(grad_last_state, c.grad_last_state), put(grad_last_normalizer, c.grad_last_normalizer);
    describe();
    for (Guarded* one : inputs()) one->save_original();
  }

  // Without `with_states` no state is saved for backward, and one thread processes a head's chunks.
  int forward(int isa, int threads, bool with_states = true) {
    for (Guarded* one : written_forward()) one->clear();
    ch_linear call = work;
    call.isa = isa, call.threads = threads;
    if (!with_states) call.states = call.sums = nullptr;
    return ch_linear_forward(&call);
  }

  // After a forward with states; without them here, chunks cannot run in parallel.
  int backward(int isa, int threads, bool with_states = true) {
    for (Guarded* one : written_backward()) one->clear();
    for (Guarded* one : saved()) one->save_original();
    ch_linear call = work;
    call.isa = isa, call.threads = threads;
    if (!with_states) call.grad_states = call.grad_sums = nullptr;
    const int code = ch_linear_backward(&call);
    for (Guarded* one : saved()) check(one->unchanged(), "backward wrote to results of forward");
    return code;
  }

  void compare_forward(const LinearExpected& right, const std::string& name) const {
    compare(output, right.output, name + " output");
    compare(last_state, right.last_state, name + " last_state");
    if (!c.normalized) return;
    compare(last_normalizer, right.last_normalizer, name + " last_normalizer");
    compare(shares, right.shares, name + " shares");
  }

  void compare_backward(const LinearExpected& right, const std::string& name) const {
    compare(grad_query, right.grad_query, name + " grad_query");
    compare(grad_key, right.grad_key, name + " grad_key");
    compare(grad_value, right.grad_value, name + " grad_value");
    compare(grad_state, right.grad_state, name + " grad_state");
    if (c.gates > 0) compare(grad_decay, right.grad_decay, name + " grad_decay");
    if (c.delta()) compare(grad_rate, right.grad_rate, name + " grad_rate");
    if (c.normalized) compare(grad_normalizer, right.grad_normalizer, name + " grad_normalizer");
  }

  // Compared bit for bit, including saved states.
  std::vector<std::vector<uint8_t>> forward_bits(bool with_states) { return bits(written_forward(), with_states); }
  std::vector<std::vector<uint8_t>> backward_bits() { return bits(written_backward(), false); }

  // Nothing was written outside the outputs, and nothing to the inputs.
  void margins(const std::string& name) {
    for (const std::vector<Guarded*>& all : {written_forward(), written_backward()})
      for (const Guarded* one : all) check(one->margins_intact(), name + ": wrote outside a tensor");
    for (const Guarded* one : inputs()) check(one->unchanged(), name + ": wrote to an input");
  }

  void clear() {
    for (Guarded* one : written_forward()) one->clear();
    for (Guarded* one : written_backward()) one->clear();
  }
  bool untouched() {
    bool all = true;
    for (const Guarded* one : written_forward()) all = all && one->untouched();
    for (const Guarded* one : written_backward()) all = all && one->untouched();
    return all;
  }

  const LinearCase& c;
  ch_linear work{};
  Guarded query, key, value, output, log_decay, rate, state, normalizer, last_state, last_normalizer, shares;
  Guarded states, sums, grad_output, grad_last_state, grad_last_normalizer, grad_query, grad_key, grad_value;
  Guarded grad_state, grad_normalizer, grad_decay, grad_rate, grad_states, grad_sums;

 private:
  static int64_t padded(int64_t count) { return (count + CH_LINEAR_PAD - 1) / CH_LINEAR_PAD * CH_LINEAR_PAD; }

  Guarded buffer(Random& random, int64_t heads, int64_t rows, int64_t last, bool tight = true) const {
    return Guarded::make(random, CH_FLOAT32, 4, c.batch, heads, rows, last, tight);
  }

  static void put(Guarded& to, const Values& from) {
    size_t at = 0;
    for (int64_t b = 0; b < to.count[0]; ++b)
      for (int64_t h = 0; h < to.count[1]; ++h)
        for (int64_t r = 0; r < to.count[2]; ++r)
          for (int64_t x = 0; x < to.last && at < from.size(); ++x) encode(to.dtype, from[at++], to.at(b, h, r, x));
  }

  static float* floats(const Guarded& of) { return static_cast<float*>(of.data()); }

  void describe() {
    work.size = sizeof(ch_linear), work.abi = CH_ABI, work.isa = -1, work.threads = 1, work.feature_map = c.map;
    work.batch = c.batch, work.heads = c.heads, work.kv_heads = c.kv_heads, work.length = c.length;
    work.features = c.features, work.value_dim = c.value_dim, work.chunk = c.chunk, work.gates = c.gates;
    work.scale = c.scale;
    work.query = query.view(), work.key = key.view(), work.value = value.view(), work.output = output.view();
    work.log_decay = floats(log_decay), work.rate = floats(rate);
    work.state = floats(state), work.normalizer = floats(normalizer);
    work.last_state = floats(last_state), work.last_normalizer = floats(last_normalizer);
    work.shares = floats(shares), work.states = floats(states), work.sums = floats(sums);
    work.grad_output = grad_output.view();
    work.grad_last_state = floats(grad_last_state), work.grad_last_normalizer = floats(grad_last_normalizer);
    work.grad_query = grad_query.view(), work.grad_key = grad_key.view(), work.grad_value = grad_value.view();
    work.grad_state = floats(grad_state), work.grad_normalizer = floats(grad_normalizer);
    work.grad_decay = floats(grad_decay), work.grad_rate = floats(grad_rate);
    work.grad_states = floats(grad_states), work.grad_sums = floats(grad_sums);
  }

  static std::vector<Guarded*> non_null(const std::vector<Guarded*>& all) {
    std::vector<Guarded*> list;
    for (Guarded* one : all) {
      if (one->data() != nullptr) list.push_back(one);
    }
    return list;
  }
  std::vector<Guarded*> inputs() {
    return non_null({&query, &key, &value, &log_decay, &rate, &state, &normalizer, &grad_output, &grad_last_state,
                     &grad_last_normalizer});
  }
  std::vector<Guarded*> saved() { return non_null({&states, &sums, &output, &shares}); }
  // Saved states come last.
  std::vector<Guarded*> written_forward() {
    return non_null({&output, &last_state, &last_normalizer, &shares, &states, &sums});
  }
  std::vector<Guarded*> written_backward() {
    return non_null({&grad_query, &grad_key, &grad_value, &grad_state, &grad_normalizer, &grad_decay, &grad_rate, &grad_states,
                     &grad_sums});
  }
  std::vector<std::vector<uint8_t>> bits(const std::vector<Guarded*>& all, bool with_states) const {
    std::vector<std::vector<uint8_t>> all_bits;
    for (const Guarded* one : all) {
      const bool is_state = one == &states || one == &sums || one == &grad_states || one == &grad_sums;
      if (with_states || !is_state) all_bits.push_back(one->copy());
    }
    return all_bits;
  }
};

}  // namespace test
