// Attention that reads keys and values in int8, against the formula over what the rows stand for: every instruction set
// and several threads, with every mask, rule and statistic of the other cases.
#include "cases.h"
#include "observed.h"
#include "int8_rows.h"
#include "sets_agree.h"

namespace test {

namespace {

struct QuantizedCase {
  Case c;
  Guarded key, value;

  QuantizedCase(const Case& of, Random& random) : c(of) {
    key = quantized(random, c.key, c.batch, c.kv_heads, c.k_len, c.dim);
    value = quantized(random, c.value, c.batch, c.kv_heads, c.k_len, c.value_dim);
  }
  void describe(Call& call) const {
    call.work.quantized = 1;
    call.work.key = key.view(), call.work.value = value.view();
  }
  void check_unchanged(const std::string& name) const {
    check(key.unchanged() && value.unchanged(), name + ": wrote to keys or values");
  }
};

// Sizes at which rows of one to four queries read keys and values in place, which drawn cases seldom have.
std::vector<Case> decoding_cases() {
  std::vector<Case> cases;
  uint64_t seed = 70;
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16})
    for (int64_t dim : {16, 33, 64, 256})
      for (int64_t group : {1, 2, 4})
        for (int64_t k_len : {1, 65, 700}) {
          Random random(++seed);
          Case c;
          c.dtype = dtype, c.batch = 1, c.kv_heads = 2, c.heads = 2 * group, c.q_len = 1, c.k_len = k_len;
          c.dim = dim, c.value_dim = random.one_in(2) ? dim : 64, c.offset = k_len - 1, c.after = 0, c.scale = 0.125;
          if (random.one_in(2)) c.before = 40;
          draw_values(random, c, c.query, c.heads * dim, 2.0);
          draw_values(random, c, c.key, 2 * k_len * dim, 2.0);
          draw_values(random, c, c.value, 2 * k_len * c.value_dim, 2.0);
          cases.push_back(c);
        }
  return cases;
}

void one_quantized(const Case& drawn, const std::string& what, uint64_t seed) {
  Random random(seed);
  const QuantizedCase of(drawn, random);
  const Expected right = Reference(of.c).r;
  Call call(of.c, random);
  of.describe(call);
  Observed observed(call, random);
  for (int isa : usable_sets()) {
    std::vector<uint8_t> first;
    for (int threads : {1, 2, 5}) {
      const std::string name = what + ", " + ch_isa_name(isa) + ", threads " + std::to_string(threads);
      expect_done_first([&] { return call.forward(isa, threads); }, name);
      if (threads == 1) call.compare_forward(right, name), first = call.output.copy();
      check(call.output.copy() == first, name + ": bits differ from those with one thread");
      observed.run(isa, threads, right, name);
      of.check_unchanged(name);
    }
  }
  expect(ch_backward(&call.work), CH_BAD_OPTION, what + " backward");
}

// A row of NaN or infinity spoils the queries that may attend to it, and no other.
int contained() {
  int number = 0;
  for (int64_t q_len : {1, 3, 40})
    for (int which : {0, 1}) {
      Random random(static_cast<uint64_t>(++number) + 900);
      Case c;
      c.batch = 1, c.heads = 4, c.kv_heads = 2, c.q_len = q_len, c.k_len = 300, c.dim = c.value_dim = 64, c.offset = 100;
      c.after = 0, c.scale = 0.125;
      draw_values(random, c, c.query, 4 * q_len * 64, 2.0);
      draw_values(random, c, c.key, 2 * 300 * 64, 2.0);
      draw_values(random, c, c.value, 2 * 300 * 64, 2.0);
      // Key 101 of the second head: query 0 may not attend to it, and query 1 may.
      (which == 0 ? c.key : c.value)[(300 + 101) * 64 + 7] = which == 0 ? NAN : INFINITY;
      const QuantizedCase of(c, random);
      Call call(of.c, random);
      of.describe(call);
      for (int isa : usable_sets()) {
        expect(call.forward(isa, 2), CH_OK, "containment of quantized rows");
        for (int64_t h = 0; h < 4; ++h)
          for (int64_t i = 0; i < q_len; ++i)
            for (int64_t x = 0; x < 64; ++x)
              check(std::isnan(call.output.get(0, h, i, x)) == (h >= 2 && i >= 1),
                    std::string("quantized NaN on ") + ch_isa_name(isa) + ", head " + std::to_string(h) + ", query " + std::to_string(i));
      }
    }
  return number;
}

int sets_agree() {
  SetsAgree agree("quantized attention");
  uint64_t seed = 0;
  for (const Case& c : decoding_cases()) {
    if (c.dtype != CH_FLOAT32) continue;
    Random random(++seed);
    const QuantizedCase of(c, random);
    Call call(of.c, random);
    of.describe(call);
    agree.add("case " + std::to_string(seed), [&](int isa) {
      expect(call.forward(isa, 1), CH_OK, "quantized forward");
      return SetsAgree::Bits{call.output.copy(), call.lse.copy()};
    });
  }
  return static_cast<int>(seed);
}

}  // namespace

int quantized_tests() {
  uint64_t seed = 0;
  for (const Case& c : decoding_cases()) ++seed, one_quantized(c, "quantized " + std::to_string(seed), seed);
  for (uint64_t number = 5000; number < 5060; ++number, ++seed)
    one_quantized(draw(number), "quantized case " + std::to_string(number), number);
  return static_cast<int>(seed) + contained() + sets_agree();
}

}  // namespace test
