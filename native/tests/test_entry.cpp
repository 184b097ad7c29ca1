// Invalid descriptions, each wrong in one place: every one must return its code and write nothing.
#include <cmath>

#include "call.h"
#include "cases.h"
#include "spoiled.h"

namespace test {

namespace {

constexpr int64_t huge = INT64_MAX / 2;

const std::vector<Bad<ch_attention>>& both_ways() {
  static const std::vector<Bad<ch_attention>> all = spoiled<ch_attention>({
      {"dtype", CH_BAD_DTYPE, [](ch_attention& w) { w.dtype = 3; }},
      {"negative dtype", CH_BAD_DTYPE, [](ch_attention& w) { w.dtype = -1; }},
      {"negative batch", CH_BAD_SHAPE, [](ch_attention& w) { w.batch = -1; }},
      {"negative q_len", CH_BAD_SHAPE, [](ch_attention& w) { w.q_len = -1; }},
      {"negative k_len", CH_BAD_SHAPE, [](ch_attention& w) { w.k_len = INT64_MIN; }},
      {"huge k_len", CH_BAD_SHAPE, [](ch_attention& w) { w.k_len = huge; }},
      {"huge product", CH_BAD_SHAPE, [](ch_attention& w) { w.batch = w.q_len = INT32_MAX; }},
      {"heads that do not divide", CH_BAD_SHAPE, [](ch_attention& w) { w.kv_heads = 3; }},
      {"no key heads", CH_BAD_SHAPE, [](ch_attention& w) { w.kv_heads = 0; }},
      {"head_dim 0", CH_BAD_SHAPE, [](ch_attention& w) { w.head_dim = 0; }},
      {"head_dim 257", CH_BAD_SHAPE, [](ch_attention& w) { w.head_dim = 257; }},
      {"value_dim 257", CH_BAD_SHAPE, [](ch_attention& w) { w.value_dim = 257; }},
      {"query_offset", CH_BAD_SHAPE, [](ch_attention& w) { w.query_offset = INT64_MAX; }},
      {"negative first_batch", CH_BAD_SHAPE, [](ch_attention& w) { w.first_batch = -1; }},
      {"negative first_head", CH_BAD_SHAPE, [](ch_attention& w) { w.first_head = -1; }},
      {"negative first_key", CH_BAD_SHAPE, [](ch_attention& w) { w.first_key = -1; }},
      {"huge first_key", CH_BAD_SHAPE, [](ch_attention& w) { w.first_key = INT64_MAX; }},
      {"threads", CH_BAD_OPTION, [](ch_attention& w) { w.threads = INT32_MAX; }},
      {"scale NaN", CH_BAD_OPTION, [](ch_attention& w) { w.scale = NAN; }},
      {"dropout 1", CH_BAD_OPTION, [](ch_attention& w) { w.dropout = 1.0; }},
      {"dropout NaN", CH_BAD_OPTION, [](ch_attention& w) { w.dropout = NAN; }},
      {"no query", CH_BAD_POINTER, [](ch_attention& w) { w.query.data = nullptr; }},
      {"no key", CH_BAD_POINTER, [](ch_attention& w) { w.key.data = nullptr; }},
      {"no value", CH_BAD_POINTER, [](ch_attention& w) { w.value.data = nullptr; }},
      {"odd query",
       CH_BAD_POINTER, [](ch_attention& w) { w.query.data = static_cast<char*>(w.query.data) + 1; }},
      {"negative stride", CH_BAD_STRIDE, [](ch_attention& w) { w.query.row = -1; }},
      {"huge stride", CH_BAD_STRIDE, [](ch_attention& w) { w.key.row = huge; }},
      {"a stride past the end of memory", CH_BAD_STRIDE, [](ch_attention& w) { w.key.row = INT64_MAX / 160; }},
      {"negative intervals", CH_BAD_MASK, [](ch_attention& w) { w.intervals = -1; }},
      {"five intervals", CH_BAD_MASK, [](ch_attention& w) { w.intervals = 5; }},
      {"no start and stop", CH_BAD_MASK, [](ch_attention& w) { w.intervals = 0; }},
      {"no stop", CH_BAD_POINTER, [](ch_attention& w) { w.stop = nullptr; }},
      {"negative interval stride", CH_BAD_STRIDE, [](ch_attention& w) { w.interval_row = -4; }},
      {"before", CH_BAD_MASK, [](ch_attention& w) { w.before = INT64_MIN; }},
      {"after", CH_BAD_MASK, [](ch_attention& w) { w.after = INT64_MAX - 1; }},
      {"block size 0", CH_BAD_MASK, [](ch_attention& w) { w.block_size = 0; }},
      {"block size without a table", CH_BAD_MASK, [](ch_attention& w) { w.blocks.data = nullptr; }},
      {"too few block rows", CH_BAD_MASK, [](ch_attention& w) { w.block_rows -= 1; }},
      {"too few block columns", CH_BAD_MASK, [](ch_attention& w) { w.block_columns -= 1; }},
      {"blocks before position 0", CH_BAD_MASK, [](ch_attention& w) { w.query_offset = -1; }},
      {"negative table stride", CH_BAD_STRIDE, [](ch_attention& w) { w.allowed.column = -1; }},
      {"huge table stride", CH_BAD_STRIDE, [](ch_attention& w) { w.allowed.column = huge; }},
      {"nine rules", CH_BAD_RULE, [](ch_attention& w) { w.num_rules = 9; }},
      {"no such rule", CH_BAD_RULE, [](ch_attention& w) { w.rules[0].kind = 5; }},
      {"rule 0", CH_BAD_RULE, [](ch_attention& w) { w.rules[0].kind = 0; }},
      {"negative reach", CH_BAD_RULE, [](ch_attention& w) { w.rules[0].reach = -1; }},
      {"huge reach", CH_BAD_RULE, [](ch_attention& w) { w.rules[0].reach = INT32_MAX; }},
      {"no table", CH_BAD_POINTER, [](ch_attention& w) { w.rules[0].table.data = nullptr; }},
      {"column stride 2", CH_BAD_RULE, [](ch_attention& w) { w.rules[1].table.column = 2; }},
      {"negative bias stride", CH_BAD_STRIDE, [](ch_attention& w) { w.rules[1].table.row = -1; }},
      {"cap 0", CH_BAD_RULE, [](ch_attention& w) { w.rules[2].value = 0; }},
      {"cap NaN", CH_BAD_RULE, [](ch_attention& w) { w.rules[2].value = NAN; }},
      {"a count of distances that overflows", CH_BAD_SHAPE,
       [](ch_attention& w) {
         w.before = w.after = INT64_MAX, w.intervals = 0, w.start = w.stop = nullptr, w.num_rules = 1;
         w.allowed.data = w.blocks.data = nullptr, w.block_size = 0;
         w.heads = int64_t{1} << 24, w.kv_heads = 1, w.k_len = INT32_MAX;
       }},
      {"two caps", CH_BAD_RULE, [](ch_attention& w) { w.rules[0] = w.rules[2]; }},
      {"a gradient of a cap", CH_BAD_RULE, [](ch_attention& w) { w.rules[2].grad = w.delta; }},
      {"negative sink stride", CH_BAD_STRIDE, [](ch_attention& w) { w.sink_head = -1; }},
  });
  return all;
}

const std::vector<Bad<ch_attention>>& forward_only() {
  static const std::vector<Bad<ch_attention>> all = {
      {"no output", CH_BAD_POINTER, [](ch_attention& w) { w.output.data = nullptr; }},
      {"overlapping rows", CH_BAD_STRIDE, [](ch_attention& w) { w.output.row = w.value_dim - 1; }},
      {"overlapping heads", CH_BAD_STRIDE, [](ch_attention& w) { w.output.head = 1; }},
      {"output broadcast over the batch", CH_BAD_STRIDE, [](ch_attention& w) { w.output.batch = 0; }},
      {"odd lse", CH_BAD_POINTER,
       [](ch_attention& w) { w.lse = reinterpret_cast<float*>(reinterpret_cast<char*>(w.lse) + 2); }},
  };
  return all;
}

// Statistics that each need one element more than the buffers of the description have.
ch_statistics needing_one_more(void (*spoil)(ch_statistics&)) {
  ch_statistics s{};
  spoil(s);
  return s;
}

const std::vector<Bad<ch_attention>>& bad_statistics() {
  static float buffer[4096];
  static int32_t slots[64] = {0, -1, -1, -1, -1, -1, -1, -1, -1, -1};
  static ch_statistics s;
#define CH_BAD(what, code, spoil) \
  {what, code, [](ch_attention& w) { s = needing_one_more([](ch_statistics& t) { spoil; }); w.statistics = &s; }}
  static const std::vector<Bad<ch_attention>> all = {
      CH_BAD("odd entropy", CH_BAD_POINTER, t.entropy = reinterpret_cast<float*>(reinterpret_cast<char*>(buffer) + 1)),
      CH_BAD("negative sink", CH_BAD_STATISTIC, t.sink_keys = -1),
      CH_BAD("negative top_k", CH_BAD_STATISTIC, t.top_k = -1),
      CH_BAD("top_k past k_len", CH_BAD_STATISTIC, t.top_k = 21),
      CH_BAD("top_k without weights", CH_BAD_POINTER, t.top_k = 1),
      CH_BAD("top_k without indices", CH_BAD_POINTER, (t.top_k = 1, t.top_weights = buffer)),
      CH_BAD("negative num_weights", CH_BAD_STATISTIC, t.num_weights = -1),
      CH_BAD("huge num_weights", CH_BAD_STATISTIC, t.num_weights = huge),
      CH_BAD("row weights without a result", CH_BAD_POINTER, t.num_weights = 1),
      CH_BAD("no row weights", CH_BAD_POINTER, (t.num_weights = 1, t.weighted = buffer)),
      CH_BAD("negative weight stride", CH_BAD_STRIDE,
             (t.num_weights = 1, t.weighted = buffer, t.row_weights = buffer, t.weight_head = -1)),
      CH_BAD("negative heatmap", CH_BAD_STATISTIC, t.heatmap = -2),
      CH_BAD("heatmap without results", CH_BAD_POINTER, t.heatmap = 4),
      CH_BAD("heatmap without means", CH_BAD_POINTER, (t.heatmap = 4, t.heatmap_max = buffer)),
      CH_BAD("negative num_rows", CH_BAD_STATISTIC, t.num_rows = -1),
      CH_BAD("rows without a result", CH_BAD_POINTER, t.num_rows = 1),
      CH_BAD("rows without slots", CH_BAD_POINTER, (t.num_rows = 1, t.rows = buffer)),
      CH_BAD("a slot past the last", CH_BAD_STATISTIC,
             (t.num_rows = 1, t.rows = buffer, slots[3] = 1, t.row_slots = slots)),
      CH_BAD("a slot below -1", CH_BAD_STATISTIC,
             (t.num_rows = 1, t.rows = buffer, slots[3] = -2, t.row_slots = slots)),
      CH_BAD("one slot for two queries", CH_BAD_STATISTIC,
             (t.num_rows = 2, t.rows = buffer, slots[3] = slots[7] = 1, t.row_slots = slots)),
  };
#undef CH_BAD
  return all;
}

const std::vector<Bad<ch_attention>>& bad_statistic_gradients() {
  static float buffer[4096];
  static ch_statistics s;
  static const std::vector<Bad<ch_attention>> all = {
      {"odd grad_entropy", CH_BAD_POINTER,
       [](ch_attention& w) {
         s = {}, s.grad_entropy = reinterpret_cast<float*>(reinterpret_cast<char*>(buffer) + 2), w.statistics = &s;
       }},
      {"grad_max without ties", CH_BAD_POINTER,
       [](ch_attention& w) { s = {}, s.grad_max = buffer, w.statistics = &s; }},
      {"statistics of partial rows", CH_BAD_STATISTIC,
       [](ch_attention& w) { s = {}, w.partial_rows = 1, w.statistics = &s; }},
      {"negative sink of a gradient", CH_BAD_STATISTIC,
       [](ch_attention& w) { s = {}, s.sink_keys = -5, w.statistics = &s; }},
  };
  return all;
}

const std::vector<Bad<ch_attention>>& backward_only() {
  static const std::vector<Bad<ch_attention>> all = {
      {"no softmax", CH_BAD_POINTER, [](ch_attention& w) { w.softmax = nullptr; }},
      {"no delta", CH_BAD_POINTER, [](ch_attention& w) { w.delta = nullptr; }},
      {"no output and no output32", CH_BAD_POINTER, [](ch_attention& w) { w.output32 = nullptr, w.output.data = nullptr; }},
      {"no output32 in bfloat16", CH_BAD_POINTER,
       [](ch_attention& w) { w.dtype = CH_BFLOAT16, w.output32 = nullptr; }},
      {"no grad_output", CH_BAD_POINTER, [](ch_attention& w) { w.grad_output.data = nullptr; }},
      {"no gradient", CH_BAD_POINTER,
       [](ch_attention& w) { w.grad_query.data = w.grad_key.data = w.grad_value.data = nullptr; }},
      {"no grad_key", CH_BAD_POINTER, [](ch_attention& w) { w.grad_key.data = nullptr; }},
      {"no grad_value", CH_BAD_POINTER, [](ch_attention& w) { w.grad_value.data = nullptr; }},
      {"partial_rows 2", CH_BAD_OPTION, [](ch_attention& w) { w.partial_rows = 2; }},
      {"partial rows without their output", CH_BAD_POINTER,
       [](ch_attention& w) {
         w.partial_rows = 1, w.output.data = nullptr, w.output32 = nullptr;
         w.allowed.data = w.blocks.data = nullptr, w.block_size = 0;
       }},
      {"overlapping grad_key", CH_BAD_STRIDE, [](ch_attention& w) { w.grad_key.row = 3; }},
      {"overlapping grad of a rule", CH_BAD_STRIDE, [](ch_attention& w) { w.rules[1].grad_row = 1; }},
  };
  return all;
}

// Every kind of mask and rule at once, so that each can be spoiled.
Case everything() {
  Case c;
  Random random(11);
  c.batch = 2, c.heads = 4, c.kv_heads = 2, c.q_len = 10, c.k_len = 20, c.dim = 8, c.value_dim = 6;
  c.scale = 0.5, c.before = 15, c.after = 12;
  draw_intervals(random, c);
  for (int axis = 0; axis < 4; ++axis) c.allowed_size[axis] = axis < 2 ? 1 : axis == 2 ? c.q_len : c.k_len;
  c.allowed.assign(static_cast<size_t>(c.q_len * c.k_len), 1);
  c.block_size = 4, c.block_rows = 3, c.block_columns = 5;
  c.blocks.assign(static_cast<size_t>(c.batch * c.heads * 15), 1);
  RuleCase relative, dense, cap;
  relative.kind = CH_RULE_RELATIVE, relative.reach = 3, relative.size[1] = c.heads, relative.size[3] = 7;
  dense.kind = CH_RULE_DENSE, dense.size[2] = c.q_len, dense.size[3] = c.k_len;
  dense.wants_grad = relative.wants_grad = true;
  cap.kind = CH_RULE_SOFTCAP, cap.value = 9;
  draw_values(random, c, relative.table, c.heads * 7, 1.0);
  draw_values(random, c, dense.table, c.q_len * c.k_len, 1.0);
  c.rules = {relative, dense, cap};
  draw_values(random, c, c.sink, c.heads, 1.0);
  draw_values(random, c, c.query, c.batch * c.heads * c.q_len * c.dim, 1.0);
  draw_values(random, c, c.key, c.batch * c.kv_heads * c.k_len * c.dim, 1.0);
  draw_values(random, c, c.value, c.batch * c.kv_heads * c.k_len * c.value_dim, 1.0);
  draw_values(random, c, c.grad_output, c.batch * c.heads * c.q_len * c.value_dim, 1.0);
  return c;
}

void answers() {
  check(ch_abi() == CH_ABI, "ch_abi");
  check(ch_isa_name(-1) == nullptr && ch_isa_name(99) == nullptr, "ch_isa_name past the ends");
  check(ch_isa_usable(-1) == 0 && ch_isa_usable(99) == 0, "ch_isa_usable past the ends");
  check(ch_isa_usable(ch_isa_best()) == 1, "the best set must be usable");
  check(ch_isa_for(CH_OTHER_VENDOR) == usable_sets().front(), "the widest usable set");
  const bool dot_products = std::strcmp(ch_isa_name(usable_sets().front()), "avx512bf16") == 0;
  check(ch_isa_for(CH_INTEL) == usable_sets()[dot_products ? 1 : 0], "Intel's processors widen bfloat16");
  for (int isa : usable_sets())
    for (int32_t dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16})
      check(ch_product_rate(dtype, isa, 2) > 1e6, std::string("peak throughput, ") + ch_isa_name(isa));
  check(ch_product_rate(CH_FLOAT32, -1, 1) > 1e6, "peak throughput of the best set");
  check(ch_product_rate(-1, -1, 1) == 0.0 && ch_product_rate(3, -1, 1) == 0.0, "ch_product_rate of no dtype");
  check(ch_product_rate(CH_FLOAT32, 99, 1) == 0.0 && ch_product_rate(CH_FLOAT32, -2, 1) == 0.0, "ch_product_rate of no set");
  check(ch_product_rate(CH_FLOAT32, -1, 0) == 0.0 && ch_product_rate(CH_FLOAT32, -1, 1 << 20) == 0.0,
        "ch_product_rate of no threads");
  check(std::strcmp(ch_message(12345), "no such code") == 0, "ch_message of no code");
  expect(ch_forward(nullptr), CH_BAD_POINTER, "forward of a null description");
  expect(ch_backward(nullptr), CH_BAD_POINTER, "backward of a null description");
}

// Without work, tensors may be null.
void no_work() {
  ch_attention work{};
  work.size = sizeof(work), work.abi = CH_ABI, work.isa = -1, work.threads = 1;
  work.before = work.after = INT64_MAX, work.head_dim = work.value_dim = 8, work.k_len = 4;
  expect(ch_forward(&work), CH_OK, "forward of an empty batch");
  expect(ch_backward(&work), CH_OK, "backward of an empty batch");
}

}  // namespace

int entry_tests() {
  answers();
  no_work();
  const Case c = everything();
  Random random(3);
  Call call(c, random);
  expect(call.forward(-1, 1), CH_OK, "the valid description, forward");
  expect(call.backward(), CH_OK, "the valid description, backward");
  ch_attention good = call.work;
  good.isa = -1;
  call.output.clear(), call.grad_query.clear(), call.grad_key.clear(), call.grad_value.clear();
  int count = 0;
  const auto run = [&](const std::vector<Bad<ch_attention>>& all, int (*enter)(const ch_attention*), const char* way) {
    count += expect_refused(good, all, way, enter, [&] { return call.output.untouched() && call.gradients_untouched(); });
  };
  run(both_ways(), ch_forward, "forward");
  run(both_ways(), ch_backward, "backward");
  run(forward_only(), ch_forward, "forward");
  run(backward_only(), ch_backward, "backward");
  run(bad_statistics(), ch_forward, "forward");
  run(bad_statistic_gradients(), ch_backward, "backward");
  return count;
}

}  // namespace test
