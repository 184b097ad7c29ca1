// Invalid descriptions of linear attention, each wrong in one place: every one must return its code and write nothing.
#include "linear_call.h"
#include "spoiled.h"

namespace test {

namespace {

constexpr int64_t huge = INT64_MAX / 2;

template <class T> T* odd(T* pointer) {
  return reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(pointer) + 2);
}

const std::vector<Bad<ch_linear>>& both_ways() {
  static const std::vector<Bad<ch_linear>> all = spoiled<ch_linear>({
      {"negative batch", CH_BAD_SHAPE, [](ch_linear& w) { w.batch = -1; }},
      {"negative heads", CH_BAD_SHAPE, [](ch_linear& w) { w.heads = -2; }},
      {"negative key heads", CH_BAD_SHAPE, [](ch_linear& w) { w.kv_heads = -2; }},
      {"negative length", CH_BAD_SHAPE, [](ch_linear& w) { w.length = INT64_MIN; }},
      {"huge length", CH_BAD_SHAPE, [](ch_linear& w) { w.length = huge; }},
      {"huge heads", CH_BAD_SHAPE, [](ch_linear& w) { w.heads = w.kv_heads * (int64_t{1} << 31); }},
      {"huge product", CH_BAD_SHAPE, [](ch_linear& w) { w.batch = w.length = INT32_MAX; }},
      {"heads that do not divide", CH_BAD_SHAPE, [](ch_linear& w) { w.kv_heads = 3; }},
      {"no key heads", CH_BAD_SHAPE, [](ch_linear& w) { w.kv_heads = 0; }},
      {"no features", CH_BAD_SHAPE, [](ch_linear& w) { w.features = 0; }},
      {"257 features", CH_BAD_SHAPE, [](ch_linear& w) { w.features = w.gates = 257; }},
      {"no value channels", CH_BAD_SHAPE, [](ch_linear& w) { w.value_dim = 0; }},
      {"257 value channels", CH_BAD_SHAPE, [](ch_linear& w) { w.value_dim = 257; }},
      {"chunk 0", CH_BAD_SHAPE, [](ch_linear& w) { w.chunk = 0; }},
      {"chunk 257", CH_BAD_SHAPE, [](ch_linear& w) { w.chunk = CH_MAX_CHUNK + 1; }},
      {"gates for some features", CH_BAD_SHAPE, [](ch_linear& w) { w.gates = w.features - 1; }},
      {"gates without decays", CH_BAD_SHAPE, [](ch_linear& w) { w.log_decay = nullptr; }},
      {"decays without gates", CH_BAD_SHAPE, [](ch_linear& w) { w.gates = 0; }},
      {"no such feature map", CH_BAD_OPTION, [](ch_linear& w) { w.feature_map = 3; }},
      {"negative feature map", CH_BAD_OPTION, [](ch_linear& w) { w.feature_map = -1; }},
      {"threads", CH_BAD_OPTION, [](ch_linear& w) { w.threads = INT32_MAX; }},
      {"scale NaN", CH_BAD_OPTION, [](ch_linear& w) { w.scale = NAN; }},
      {"scale inf", CH_BAD_OPTION, [](ch_linear& w) { w.scale = INFINITY; }},
      {"sums of decayed features", CH_BAD_OPTION, [](ch_linear& w) { w.last_normalizer = w.last_state; }},
      {"sums under the delta rule", CH_BAD_OPTION,
       [](ch_linear& w) { w.last_normalizer = w.last_state, w.log_decay = nullptr, w.gates = 0; }},
      {"no query", CH_BAD_POINTER, [](ch_linear& w) { w.query.data = nullptr; }},
      {"no key", CH_BAD_POINTER, [](ch_linear& w) { w.key.data = nullptr; }},
      {"no value", CH_BAD_POINTER, [](ch_linear& w) { w.value.data = nullptr; }},
      {"odd query", CH_BAD_POINTER, [](ch_linear& w) { w.query.data = odd(static_cast<float*>(w.query.data)); }},
      {"negative stride", CH_BAD_STRIDE, [](ch_linear& w) { w.query.row = -1; }},
      {"huge stride", CH_BAD_STRIDE, [](ch_linear& w) { w.key.row = huge; }},
      {"a stride past the end of memory", CH_BAD_STRIDE, [](ch_linear& w) { w.value.head = INT64_MAX / 160; }},
      {"odd log_decay", CH_BAD_POINTER, [](ch_linear& w) { w.log_decay = odd(w.log_decay); }},
      {"odd rate", CH_BAD_POINTER, [](ch_linear& w) { w.rate = odd(w.rate); }},
      {"odd states", CH_BAD_POINTER, [](ch_linear& w) { w.states = odd(w.states); }},
      {"odd sums", CH_BAD_POINTER, [](ch_linear& w) { w.sums = odd(w.states); }},
  });
  return all;
}

const std::vector<Bad<ch_linear>>& forward_only() {
  static const std::vector<Bad<ch_linear>> all = {
      {"no output", CH_BAD_POINTER, [](ch_linear& w) { w.output.data = nullptr; }},
      {"overlapping rows", CH_BAD_STRIDE, [](ch_linear& w) { w.output.row = w.value_dim - 1; }},
      {"overlapping heads", CH_BAD_STRIDE, [](ch_linear& w) { w.output.head = 1; }},
      {"output broadcast over the batch", CH_BAD_STRIDE, [](ch_linear& w) { w.output.batch = 0; }},
      {"odd state", CH_BAD_POINTER, [](ch_linear& w) { w.state = odd(w.state); }},
      {"no last_state", CH_BAD_POINTER, [](ch_linear& w) { w.last_state = nullptr; }},
      {"odd last_state", CH_BAD_POINTER, [](ch_linear& w) { w.last_state = odd(w.last_state); }},
      {"odd normalizer", CH_BAD_POINTER, [](ch_linear& w) { w.normalizer = odd(w.state); }},
  };
  return all;
}

const std::vector<Bad<ch_linear>>& backward_only() {
  static const std::vector<Bad<ch_linear>> all = {
      {"no states", CH_BAD_POINTER, [](ch_linear& w) { w.states = nullptr; }},
      {"no grad_output", CH_BAD_POINTER, [](ch_linear& w) { w.grad_output.data = nullptr; }},
      {"negative stride of grad_output", CH_BAD_STRIDE, [](ch_linear& w) { w.grad_output.batch = -1; }},
      {"no grad_query", CH_BAD_POINTER, [](ch_linear& w) { w.grad_query.data = nullptr; }},
      {"no grad_key", CH_BAD_POINTER, [](ch_linear& w) { w.grad_key.data = nullptr; }},
      {"no grad_value", CH_BAD_POINTER, [](ch_linear& w) { w.grad_value.data = nullptr; }},
      {"overlapping grad_query", CH_BAD_STRIDE, [](ch_linear& w) { w.grad_query.batch = 0; }},
      {"overlapping grad_key", CH_BAD_STRIDE, [](ch_linear& w) { w.grad_key.row = 3; }},
      {"overlapping grad_value", CH_BAD_STRIDE, [](ch_linear& w) { w.grad_value.head = 0; }},
      {"odd grad_last_state", CH_BAD_POINTER, [](ch_linear& w) { w.grad_last_state = odd(w.state); }},
      {"no grad_state", CH_BAD_POINTER, [](ch_linear& w) { w.grad_state = nullptr; }},
      {"no grad_decay", CH_BAD_POINTER, [](ch_linear& w) { w.grad_decay = nullptr; }},
      {"no grad_rate", CH_BAD_POINTER, [](ch_linear& w) { w.grad_rate = nullptr; }},
      {"odd grad_states", CH_BAD_POINTER, [](ch_linear& w) { w.grad_states = odd(w.grad_states); }},
      {"odd grad_sums", CH_BAD_POINTER, [](ch_linear& w) { w.grad_sums = odd(w.grad_states); }},
      {"grad_normalizer of undivided outputs", CH_BAD_POINTER,
       [](ch_linear& w) { w.grad_normalizer = w.grad_state; }},
  };
  return all;
}

const std::vector<Bad<ch_linear>>& normalized_forward() {
  static const std::vector<Bad<ch_linear>> all = {
      {"states without sums", CH_BAD_POINTER, [](ch_linear& w) { w.sums = nullptr; }},
      {"odd last_normalizer", CH_BAD_POINTER, [](ch_linear& w) { w.last_normalizer = odd(w.last_normalizer); }},
      {"no shares", CH_BAD_POINTER, [](ch_linear& w) { w.shares = nullptr; }},
      {"odd shares", CH_BAD_POINTER, [](ch_linear& w) { w.shares = odd(w.shares); }},
  };
  return all;
}

const std::vector<Bad<ch_linear>>& normalized_backward() {
  static const std::vector<Bad<ch_linear>> all = {
      {"no grad_normalizer", CH_BAD_POINTER, [](ch_linear& w) { w.grad_normalizer = nullptr; }},
      {"odd grad_normalizer", CH_BAD_POINTER, [](ch_linear& w) { w.grad_normalizer = odd(w.grad_normalizer); }},
      {"grad_states without grad_sums", CH_BAD_POINTER, [](ch_linear& w) { w.grad_sums = nullptr; }},
      {"no sums", CH_BAD_POINTER, [](ch_linear& w) { w.sums = nullptr; }},
      {"no output", CH_BAD_POINTER, [](ch_linear& w) { w.output.data = nullptr; }},
      {"odd grad_last_normalizer", CH_BAD_POINTER,
       [](ch_linear& w) { w.grad_last_normalizer = odd(w.grad_last_normalizer); }},
      {"no shares", CH_BAD_POINTER, [](ch_linear& w) { w.shares = nullptr; }},
  };
  return all;
}

// Every field that the member uses, so that each can be spoiled.
LinearCase whole(bool normalized) {
  LinearCase c;
  Random random(13);
  c.batch = 2, c.heads = 4, c.kv_heads = 2, c.length = 11, c.features = 6, c.value_dim = 5, c.chunk = 4;
  c.normalized = normalized, c.map = CH_FEATURE_ELU;
  draw_floats(random, c.query, c.batch * c.heads * c.length * c.features, 1.0);
  draw_floats(random, c.key, c.units() * c.length * c.features, 1.0);
  draw_floats(random, c.value, c.units() * c.length * c.value_dim, 1.0);
  draw_floats(random, c.grad_output, c.batch * c.heads * c.length * c.value_dim, 1.0);
  draw_floats(random, c.state, c.units() * c.features * c.value_dim, 1.0);
  draw_floats(random, c.grad_last_state, c.units() * c.features * c.value_dim, 1.0);
  if (normalized) {
    c.normalizer.assign(static_cast<size_t>(c.units() * c.features), 1.0);
    draw_floats(random, c.grad_last_normalizer, c.units() * c.features, 1.0);
  } else {
    c.gates = c.features;
    c.log_decay.assign(static_cast<size_t>(c.units() * c.length * c.gates), -0.5);
    c.rate.assign(static_cast<size_t>(c.units() * c.length), 0.125);
  }
  return c;
}

// Without work, tensors may be null, and nothing is written.
void no_work(ch_linear work, LinearCall& call) {
  work.query.data = work.key.data = work.value.data = work.output.data = work.grad_output.data = nullptr;
  work.length = 0;
  expect(ch_linear_forward(&work), CH_OK, "linear forward of no tokens");
  expect(ch_linear_backward(&work), CH_OK, "linear backward of no tokens");
  work.length = 11, work.batch = 0;
  expect(ch_linear_forward(&work), CH_OK, "linear forward of an empty batch");
  expect(ch_linear_backward(&work), CH_OK, "linear backward of an empty batch");
  check(call.untouched(), "a linear call without elements wrote something");
}

int spoil_all(LinearCall& call, const std::vector<Bad<ch_linear>>& all, int (*enter)(const ch_linear*), const char* way) {
  return expect_refused(call.work, all, way, enter, [&] {
    const bool untouched = call.untouched();
    call.clear();
    return untouched;
  });
}

}  // namespace

int linear_entry_tests() {
  expect(ch_linear_forward(nullptr), CH_BAD_POINTER, "linear forward of a null description");
  expect(ch_linear_backward(nullptr), CH_BAD_POINTER, "linear backward of a null description");
  int count = 0;
  for (bool normalized : {false, true}) {
    const LinearCase c = whole(normalized);
    Random random(3);
    LinearCall call(c, random);
    expect(call.forward(-1, 1), CH_OK, "the valid linear description, forward");
    expect(call.backward(-1, 1), CH_OK, "the valid linear description, backward");
    call.clear();
    no_work(call.work, call);
    if (!normalized) {
      count += spoil_all(call, both_ways(), ch_linear_forward, "linear forward");
      count += spoil_all(call, both_ways(), ch_linear_backward, "linear backward");
    }
    const bool n = normalized;
    count += spoil_all(call, n ? normalized_forward() : forward_only(), ch_linear_forward, "linear forward");
    count += spoil_all(call, n ? normalized_backward() : backward_only(), ch_linear_backward, "linear backward");
  }
  return count;
}

}  // namespace test
