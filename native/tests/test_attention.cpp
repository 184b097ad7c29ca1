// Attention against the formula: every instruction set of this processor, with 1, 2 and 5 threads.
#include <pthread.h>

#include "call.h"
#include "cases.h"
#include "observed.h"
#include "program.h"
#include "sets_agree.h"

// AddressSanitizer's; not every compiler ships its header.
extern "C" size_t __sanitizer_get_current_allocated_bytes(void);

namespace test {

int entry_tests();
int pages_tests();
int parts_tests();
int quantized_tests();

namespace {

std::string describe(uint64_t number, const Case& c) {
  char line[256];
  std::snprintf(line, sizeof(line), "case %llu (dtype %d, %lldx%lld/%lldx%lldx%lld, %lld and %lld wide, %d rules)",
                static_cast<unsigned long long>(number), c.dtype, static_cast<long long>(c.batch),
                static_cast<long long>(c.heads), static_cast<long long>(c.kv_heads), static_cast<long long>(c.q_len),
                static_cast<long long>(c.k_len), static_cast<long long>(c.dim), static_cast<long long>(c.value_dim),
                static_cast<int>(c.rules.size()));
  return line;
}

void expect_done(int code, const std::string& name) {
  if (code != CH_OK) fail(name + ": " + ch_message(code));
}

// Correct, within its memory, and bitwise identical with any number of threads.
void on_set(int isa, Call& call, Observed& observed, const Expected& right, const std::string& what) {
  std::vector<std::vector<uint8_t>> first, first_statistics;
  for (int threads : {1, 2, 5}) {
    const std::string name = what + ", " + ch_isa_name(isa) + ", threads " + std::to_string(threads);
    const int before = failures;
    expect_done(call.forward(isa, threads), name + " forward");
    if (threads == 1) call.compare_forward(right, name);
    observed.run(isa, threads, right, name);
    if (threads == 1) first_statistics = observed.results();
    check(observed.results() == first_statistics, name + ": statistics differ from those with one thread");
    expect_done(call.backward(), name + " backward");
    if (failures != before) return;
    if (threads == 1) {
      call.compare_backward(right, name);
      first = call.results();
    } else {
      check(call.results() == first, name + ": bits differ from those with one thread");
    }
  }
}

void one_case(uint64_t number) {
  const Case c = draw(number);
  const Expected right = Reference(c).r;
  Random random(number + 1000003);
  Call call(c, random);
  Observed observed(call, random);
  for (int isa : usable_sets())
    on_new_thread([&] { on_set(isa, call, observed, right, describe(number, c)); });
}

// Forward, statistics and backward.
int sets_agree() {
  SetsAgree agree("attention");
  for (uint64_t number = 3000; number < 3180; ++number) {
    const Case c = draw(number);
    if (c.dtype != CH_FLOAT32) continue;
    const Expected right = Reference(c).r;
    Random random(number + 1000003);
    Call call(c, random);
    Observed observed(call, random);
    agree.add(describe(number, c), [&](int isa) {
      expect_done(call.forward(isa, 1), "forward");
      observed.run(isa, 1, right, "statistics");
      expect_done(call.backward(), "backward");
      SetsAgree::Bits bits = call.results();
      for (std::vector<uint8_t>& statistic : observed.results()) bits.push_back(std::move(statistic));
      return bits;
    });
  }
  return agree.end(0x394a1a63f6b5c44au);
}

// Two heads of 90 keys; the caller sets each row's interval.
Case of_two_heads(Random& random, int dtype, int64_t q_len) {
  Case c;
  c.dtype = dtype, c.heads = c.kv_heads = 2, c.q_len = q_len, c.k_len = 90, c.dim = 24, c.value_dim = 40, c.intervals = 1;
  draw_values(random, c, c.query, 2 * q_len * 24, 2.0);
  draw_values(random, c, c.key, 2 * 90 * 24, 2.0);
  draw_values(random, c, c.value, 2 * 90 * 40, 2.0);
  draw_values(random, c, c.grad_output, 2 * q_len * 40, 2.0);
  return c;
}

// NaN in a masked key and value affects no result; backward returns CH_NOT_FINITE and writes nothing.
void containment() {
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16}) {
    Random random(static_cast<uint64_t>(dtype) + 5);
    Case c = of_two_heads(random, dtype, 40);
    c.start.assign(80, 0), c.stop.assign(80, 77);
    const Expected right = Reference(c).r;
    for (double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
      Case spoiled = c;
      for (int64_t head = 0; head < 2; ++head) {
        for (int64_t x = 0; x < 24; ++x) spoiled.key[static_cast<size_t>((head * 90 + 77) * 24 + x)] = bad;
        for (int64_t x = 0; x < 40; ++x) spoiled.value[static_cast<size_t>((head * 90 + 80) * 40 + x)] = bad;
      }
      Call call(spoiled, random);
      for (int isa : usable_sets()) {
        const std::string name = std::string("masked NaN or inf, ") + ch_isa_name(isa) + ", dtype " +
                                 std::to_string(dtype);
        expect_done(call.forward(isa, 2), name);
        call.compare_forward(right, name);
        check(call.backward() == CH_NOT_FINITE, name + ": backward must return CH_NOT_FINITE");
        check(call.gradients_untouched(), name + ": backward must not write");
      }
    }
  }
}

// NaN or infinity in an output gradient would reach masked keys: backward refuses it too.
void nonfinite_output_gradients() {
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16}) {
    Random random(static_cast<uint64_t>(dtype) + 7);
    Case c = of_two_heads(random, dtype, 40);
    c.grad_lse.assign(80, 0.5);
    c.start.assign(80, 0), c.stop.assign(80, 77);
    for (bool of_lse : {false, true}) {
      Case spoiled = c;
      if (of_lse) spoiled.grad_lse[79] = NAN;
      else spoiled.grad_output[static_cast<size_t>(79 * 40 + 39)] = NAN;
      Call call(spoiled, random);
      for (int isa : usable_sets()) {
        const std::string name = std::string("NaN in an output gradient, ") + ch_isa_name(isa) + ", dtype " +
                                 std::to_string(dtype);
        expect_done(call.forward(isa, 2), name);
        check(call.backward() == CH_NOT_FINITE, name + ": backward must return CH_NOT_FINITE");
        check(call.gradients_untouched(), name + ": backward must not write");
      }
    }
  }
}

// Two documents followed by padding, which is NaN: backward never reads it.
void nan_padding() {
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16}) {
    Random random(static_cast<uint64_t>(dtype) + 11);
    Case c = of_two_heads(random, dtype, 90);
    c.same_intervals = true;
    for (int row = 0; row < 180; ++row) {
      const int i = row % 90;
      c.start.push_back(i < 50 ? 0 : i < 77 ? 50 : 77), c.stop.push_back(i < 50 ? 50 : 77);
    }
    const Expected right = Reference(c).r;
    Case spoiled = c;
    for (int64_t head = 0; head < 2; ++head)
      for (int64_t row = 77; row < 90; ++row) {
        for (int64_t x = 0; x < 24; ++x) spoiled.query[static_cast<size_t>((head * 90 + row) * 24 + x)] = NAN;
        for (int64_t x = 0; x < 24; ++x) spoiled.key[static_cast<size_t>((head * 90 + row) * 24 + x)] = NAN;
        for (int64_t x = 0; x < 40; ++x) spoiled.value[static_cast<size_t>((head * 90 + row) * 40 + x)] = INFINITY;
      }
    Call call(spoiled, random);
    for (int isa : usable_sets()) {
      const std::string name = std::string("NaN in padding, ") + ch_isa_name(isa) + ", dtype " +
                               std::to_string(dtype);
      expect_done(call.forward(isa, 2), name);
      call.compare_forward(right, name);
      expect_done(call.backward(), name);
      call.compare_backward(right, name);
    }
  }
}

// More queries than one block has, which attend to nothing: without keys, or with none allowed.
void queries_without_keys() {
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16}) {
    for (int64_t k_len : {0, 90}) {
      Case c;
      c.dtype = dtype, c.q_len = 700, c.k_len = k_len, c.dim = 24, c.value_dim = 40, c.intervals = 1, c.same_intervals = true;
      Random random(static_cast<uint64_t>(dtype) + 17);
      draw_values(random, c, c.query, 700 * 24, 2.0);
      draw_values(random, c, c.key, k_len * 24, 2.0);
      draw_values(random, c, c.value, k_len * 40, 2.0);
      draw_values(random, c, c.grad_output, 700 * 40, 2.0);
      c.start.assign(700, 0), c.stop.assign(700, 0);
      const Expected right = Reference(c).r;
      Call call(c, random);
      for (int isa : usable_sets()) {
        const std::string name = std::string("queries without keys, ") + ch_isa_name(isa) + ", keys " +
                                 std::to_string(k_len) + ", dtype " + std::to_string(dtype);
        on_new_thread([&] {
          expect_done(call.forward(isa, 1), name);
          call.compare_forward(right, name);
          expect_done(call.backward(), name);
          call.compare_backward(right, name);
        });
      }
    }
  }
}

void both_ways(Case& c, Random& random, const std::string& what) {
  const Expected right = Reference(c).r;
  Call call(c, random);
  for (int isa : usable_sets()) {
    const std::string name = what + ", " + ch_isa_name(isa) + ", dtype " + std::to_string(c.dtype);
    expect_done(call.forward(isa, 1), name);
    call.compare_forward(right, name);
    expect_done(call.backward(), name);
    call.compare_backward(right, name);
  }
}

// Scales that are 0 or subnormal as floats, and scales that overflow in base 2.
void scales() {
  for (double scale : {1e-46, 1e-40, 2.0e38, 2.4e38, 3.4e38})
    for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16}) {
      // Products of halves are not that small.
      if (scale > 1 && dtype != CH_FLOAT32) continue;
      Case c;
      c.dtype = dtype, c.heads = c.kv_heads = 2, c.q_len = 13, c.k_len = 70, c.dim = 24, c.value_dim = 40;
      c.scale = scale;
      Random random(static_cast<uint64_t>(dtype) + 23);
      draw_values(random, c, c.query, 2 * 13 * 24, 0.25);
      draw_values(random, c, c.key, 2 * 70 * 24, 0.25);
      draw_values(random, c, c.value, 2 * 70 * 40, 2.0);
      draw_values(random, c, c.grad_output, 2 * 13 * 40, 2.0);
      for (Values* one : {&c.query, &c.key})
        for (double& number : *one) number = scale > 1 ? std::ldexp(number, -62) : number;
      both_ways(c, random, "scale " + std::to_string(std::log10(scale)) + " as a power of ten");
    }
}

// Subnormal halves are normal floats and must not be flushed, though attention flushes subnormal floats.
void subnormal_halves() {
  for (int64_t dim : {3, 16, 19}) {
    Case c;
    c.dtype = CH_FLOAT16, c.heads = c.kv_heads = 2, c.q_len = 13, c.k_len = 70, c.dim = dim, c.value_dim = 40, c.scale = 256;
    Random random(static_cast<uint64_t>(dim) + 41);
    draw_values(random, c, c.query, 2 * 13 * dim, 2.0);
    draw_values(random, c, c.key, 2 * 70 * dim, 2.0);
    draw_values(random, c, c.value, 2 * 70 * 40, 2.0);
    draw_values(random, c, c.grad_output, 2 * 13 * 40, 0.125);
    for (double& number : c.query) number = std::ldexp(number, -16);  // multiples of 2^-21, all below 2^-14
    both_ways(c, random, "subnormal halves");
  }
}

// NaN in a bias at a masked score: the derivative of the cap there is NaN too, and must not propagate.
void masked_nan_under_cap() {
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16})
    for (double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY), -static_cast<double>(INFINITY)}) {
      Case c;
      c.dtype = dtype, c.heads = c.kv_heads = 2, c.q_len = c.k_len = 90, c.dim = 24, c.value_dim = 40, c.after = 0;
      Random random(static_cast<uint64_t>(dtype) + 29);
      for (Values* one : {&c.query, &c.key}) draw_values(random, c, *one, 2 * 90 * 24, 2.0);
      for (Values* one : {&c.value, &c.grad_output}) draw_values(random, c, *one, 2 * 90 * 40, 2.0);
      RuleCase bias, cap;
      bias.kind = CH_RULE_DENSE, bias.size[2] = bias.size[3] = 90, bias.wants_grad = true;
      for (int place = 0; place < 90 * 90; ++place) bias.table.push_back(place % 90 > place / 90 ? bad : 0.5);
      cap.kind = CH_RULE_SOFTCAP, cap.value = 5;
      c.rules = {bias, cap};
      both_ways(c, random, "masked NaN under a soft-cap");
    }
}

// A row without keys has only the sink's logit: NaN propagates from there too.
void nan_sink_logits() {
  for (bool in_intervals : {false, true}) {
    Case c;
    c.q_len = 20, c.k_len = 30, c.dim = 8, c.value_dim = 8, c.sink = {NAN};
    Random random(31);
    draw_values(random, c, c.query, 20 * 8, 2.0);
    for (Values* one : {&c.key, &c.value}) draw_values(random, c, *one, 30 * 8, 2.0);
    if (in_intervals) c.intervals = 1, c.same_intervals = true, c.start.assign(20, 0), c.stop.assign(20, 0);
    else c.allowed.assign(20 * 30, 0), c.allowed_size[0] = c.allowed_size[1] = 1, c.allowed_size[2] = 20, c.allowed_size[3] = 30;
    Call call(c, random);
    for (int isa : usable_sets()) {
      expect_done(call.forward(isa, 1), "a NaN sink");
      bool all = true;
      for (int64_t i = 0; i < 20; ++i) all = all && std::isnan(call.output.get(0, 0, i, 3)) &&
          std::isnan(call.lse.get(0, 0, i, 0));
      check(all, std::string("a NaN sink does not propagate to an empty row, ") + ch_isa_name(isa));
    }
  }
}

// Few rows over so many keys that the strip has fewer rows than an in-place read of the keys covers.
void statistics_of_long_rows() {
  constexpr int64_t batch = 64, rows = 7, keys = 90000, dim = 16;
  Random random(37);
  std::vector<float> query(batch * rows * dim), key(keys * dim), output(batch * rows * dim), second(batch * rows * dim);
  std::vector<float> received(batch * keys);
  for (std::vector<float>* one : {&query, &key})
    for (float& number : *one) number = static_cast<float>(2 * random.uniform() - 1);
  ch_attention work{};
  work.size = sizeof(work), work.abi = CH_ABI, work.isa = -1, work.threads = 2, work.dtype = CH_FLOAT32;
  work.batch = batch, work.heads = work.kv_heads = 1, work.q_len = rows, work.k_len = keys;
  work.head_dim = work.value_dim = dim, work.scale = 0.25, work.before = work.after = INT64_MAX;
  work.query = {query.data(), rows * dim, 0, dim}, work.key = work.value = {key.data(), 0, 0, dim};
  work.output = {output.data(), rows * dim, 0, dim};
  expect_done(ch_forward(&work), "long rows");
  ch_statistics statistics{};
  statistics.received = received.data();
  work.output.data = second.data(), work.statistics = &statistics;
  expect_done(ch_forward(&work), "long rows with statistics");
  check(output == second, "statistics of long rows changed the output");
}

// Worker threads do not cache the large workspace of a long backward.
void workers_free_large_workspaces() {
  constexpr int64_t heads = 4, rows = 70000, dim = 256;
  std::vector<float> one(rows * dim), softmax(heads * rows * 2), delta(heads * rows);
  std::vector<float> grad_query(heads * rows * dim), grad_key(heads * 8 * dim), grad_value(heads * 8 * dim);
  ch_attention work{};
  work.size = sizeof(work), work.abi = CH_ABI, work.isa = -1, work.threads = 2, work.dtype = CH_FLOAT32;
  work.batch = 1, work.heads = work.kv_heads = heads, work.q_len = rows, work.k_len = 8;
  work.head_dim = work.value_dim = dim, work.scale = 1, work.before = work.after = INT64_MAX;
  work.query = work.key = work.value = work.grad_output = {one.data(), 0, 0, dim};
  work.grad_query = {grad_query.data(), 0, rows * dim, dim};
  work.grad_key = {grad_key.data(), 0, 8 * dim, dim}, work.grad_value = {grad_value.data(), 0, 8 * dim, dim};
  work.softmax = softmax.data(), work.delta = delta.data();
  const size_t before = __sanitizer_get_current_allocated_bytes();
  expect_done(ch_backward(&work), "a long backward");
  const size_t after = __sanitizer_get_current_allocated_bytes();
  check(after < before + rows * dim * sizeof(float), "threads cache the workspace of a long backward");
}

struct Caller {
  const Case* c;
  const Expected* right;
  uint64_t number;
  int isa;
};

void* call_often(void* argument) {
  const Caller& caller = *static_cast<Caller*>(argument);
  Random random(caller.number);
  Call call(*caller.c, random);
  for (int round = 0; round < 6; ++round) {
    const std::string name = describe(caller.number, *caller.c) + " with concurrent callers";
    expect_done(call.forward(caller.isa, 1 + round % 3), name);
    call.compare_forward(*caller.right, name);
    expect_done(call.backward(), name);
    call.compare_backward(*caller.right, name);
  }
  return nullptr;
}

// Eight concurrent callers, each with its own work and its own number of threads.
void concurrent_callers() {
  constexpr int count = 8;
  std::vector<Case> cases;
  std::vector<Expected> right;
  std::vector<Caller> callers;
  for (uint64_t i = 0; i < count; ++i) cases.push_back(draw(7000 + i));
  for (const Case& c : cases) right.push_back(Reference(c).r);
  const std::vector<int> sets = usable_sets();
  for (size_t i = 0; i < count; ++i) callers.push_back({&cases[i], &right[i], 7000 + i, sets[i % sets.size()]});
  pthread_t threads[count];
  for (size_t i = 0; i < count; ++i) pthread_create(&threads[i], nullptr, call_often, &callers[i]);
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
}

}  // namespace
}  // namespace test

int main(int arguments, char** argument) {
  const test::Program program = {"attention", 1, 240, test::one_case, {
      {"sets", test::sets_agree},
      {"containment", test::containment},
      {"output-gradients", test::nonfinite_output_gradients},
      {"padding", test::nan_padding},
      {"no-keys", test::queries_without_keys},
      {"scales", test::scales},
      {"subnormals", test::subnormal_halves},
      {"cap", test::masked_nan_under_cap},
      {"sink", test::nan_sink_logits},
      {"long-rows", test::statistics_of_long_rows},
      {"workspaces", test::workers_free_large_workspaces},
      {"callers", test::concurrent_callers},
      {"invalid", test::entry_tests},
      {"pages", test::pages_tests},
      {"parts", test::parts_tests},
      {"quantized", test::quantized_tests},
  }};
  return test::run_program(program, arguments, argument);
}
