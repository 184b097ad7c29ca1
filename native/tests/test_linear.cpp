// The linear attention family against the recurrence: every instruction set of this processor, with 1, 2 and 5 threads.
#include "linear_containment.h"
#include "program.h"
#include "sets_agree.h"

namespace test {

int linear_entry_tests();

namespace {

std::string describe(uint64_t number, const LinearCase& c) {
  const auto n = [](int64_t x) { return std::to_string(x); };
  return "case " + n(static_cast<int64_t>(number)) + " (" + members()[number % members().size()].name + ", map " +
         n(c.map) + ", " + n(c.batch) + "x" + n(c.heads) + "/" + n(c.kv_heads) + "x" + n(c.length) + " in chunks of " +
         n(c.chunk) + ", " + n(c.features) + " and " + n(c.value_dim) + " wide)";
}

void expect_done(int code, const std::string& name) { expect(code, CH_OK, name); }

// Correct, within its memory, and bitwise identical with any number of threads and either schedule of chunks.
void one_case(uint64_t number) {
  const LinearCase c = draw_linear(number);
  const LinearExpected right = expected(c);
  Random random(number + 1000003);
  LinearCall call(c, random);
  for (int isa : usable_sets()) {
    std::vector<std::vector<uint8_t>> forward, state_bits, backward;
    for (int threads : {1, 2, 5}) {
      const std::string name = describe(number, c) + ", " + ch_isa_name(isa) + ", threads " + std::to_string(threads);
      const int before = failures;
      expect_done_first([&] { return call.forward(isa, threads, false); }, name + " forward without states");
      if (threads == 1) forward = call.forward_bits(false);
      check(call.forward_bits(false) == forward, name + ": bits without states differ from those with one thread");
      expect_done_first([&] { return call.forward(isa, threads); }, name + " forward");
      if (threads == 1) call.compare_forward(right, name), state_bits = call.forward_bits(true);
      check(call.forward_bits(false) == forward, name + ": bits with states differ from those without");
      check(call.forward_bits(true) == state_bits, name + ": states differ from those with one thread");
      expect_done_first([&] { return call.backward(isa, threads, false); }, name + " backward without workspace");
      if (threads == 1) call.compare_backward(right, name), backward = call.backward_bits();
      check(call.backward_bits() == backward, name + ": gradients without workspace differ from those with one thread");
      expect_done_first([&] { return call.backward(isa, threads); }, name + " backward");
      check(call.backward_bits() == backward, name + ": gradients with workspace differ from those with one thread");
      call.margins(name);
      if (failures != before) return;
    }
  }
}

int sets_agree() {
  SetsAgree agree("linear attention");
  for (uint64_t number = 3000; number < 3042; ++number) {
    const LinearCase c = draw_linear(number);
    Random random(number + 1000003);
    LinearCall call(c, random);
    agree.add(describe(number, c), [&](int isa) {
      expect_done(call.forward(isa, 1), "forward");
      SetsAgree::Bits bits = call.forward_bits(true);
      expect_done(call.backward(isa, 1), "backward");
      for (std::vector<uint8_t>& gradient : call.backward_bits()) bits.push_back(std::move(gradient));
      return bits;
    });
  }
  return agree.end(0x29b6de9c5a545724u);
}

// Exponentials far below 0 are 0: a feature of elu, and decays, also if their sum would be -inf.
void extremes() {
  const double lowest = -static_cast<double>(__FLT_MAX__);
  for (int64_t gates : {0, 1, 3}) {
    LinearCase c;
    Random random(1);
    c.length = 8, c.chunk = 4, c.features = 3, c.value_dim = 2, c.map = CH_FEATURE_ELU, c.gates = gates;
    for (Values* one : {&c.query, &c.key}) draw_floats(random, *one, c.length * c.features, 1.0);
    for (Values* one : {&c.value, &c.grad_output}) draw_floats(random, *one, c.length * c.value_dim, 1.0);
    c.log_decay.assign(static_cast<size_t>(c.length * gates), -0.125);
    c.key[3] = -1000;
    for (int64_t i = gates; i < 3 * gates; ++i) c.log_decay[static_cast<size_t>(i)] = -104;
    const LinearExpected right = expected(c);
    c.key[3] = lowest;
    for (int64_t i = gates; i < 3 * gates; ++i) c.log_decay[static_cast<size_t>(i)] = lowest;
    LinearCall call(c, random);
    for (int isa : usable_sets()) {
      const std::string name = std::string("the lowest values, ") + ch_isa_name(isa) + ", gates " + std::to_string(gates);
      expect_done(call.forward(isa, 1), name);
      call.compare_forward(right, name);
      expect_done(call.backward(isa, 1), name);
      call.compare_backward(right, name);
    }
  }
}

// Scales whose reciprocal overflows: gradients are smaller by the same factor.
void tiny_scales() {
  for (int map : {CH_FEATURE_IDENTITY, CH_FEATURE_ELU, CH_FEATURE_RELU}) {
    LinearCase c;
    Random random(2);
    c.length = 70, c.chunk = 16, c.features = 9, c.value_dim = 5, c.map = map;
    for (Values* one : {&c.query, &c.key}) draw_floats(random, *one, c.length * c.features, 1.0);
    for (Values* one : {&c.value, &c.grad_output}) draw_floats(random, *one, c.length * c.value_dim, 1.0);
    LinearCall call(c, random);
    for (int isa : usable_sets()) {
      call.work.scale = 1;
      expect_done(call.forward(isa, 1), "scale 1");
      expect_done(call.backward(isa, 1), "scale 1");
      Values right;
      for (int64_t place = 0; place < c.length * c.features; ++place)
        right.push_back(call.grad_query.get(0, 0, place / c.features, place % c.features));
      for (double scale : {1e-38, 2e-39, 1e-40, -1e-40, 1e-46, 0.0}) {
        call.work.scale = scale;
        expect_done(call.forward(isa, 1), "a tiny scale");
        expect_done(call.backward(isa, 1), "a tiny scale");
        bool near = true;
        for (size_t place = 0; place < right.size(); ++place) {
          const int64_t at = static_cast<int64_t>(place), i = at / c.features;
          const double result = call.grad_query.get(0, 0, i, at % c.features), wanted = right[place] * scale;
          near = near && std::fabs(result - wanted) <= 1e-3 * std::fabs(wanted) + 1e-43;
        }
        check(near, "gradients at scale " + std::to_string(scale * 1e40) + "e-40, " + ch_isa_name(isa) + ", map " +
                        std::to_string(map));
      }
    }
  }
}

}  // namespace
}  // namespace test

int main(int arguments, char** argument) {
  const test::Program program = {"linear attention", 0, 126, test::one_case, {
      {"sets", test::sets_agree},
      {"containment", test::linear_containment},
      {"extremes", test::extremes},
      {"scales", test::tiny_scales},
      {"invalid", test::linear_entry_tests},
  }};
  return test::run_program(program, arguments, argument);
}
