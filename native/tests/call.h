// A Case in guarded memory: described to the library, run, and compared.
#pragma once

#include "guarded.h"
#include "reference.h"

namespace test {

inline ch_table table_of(const Guarded& from, const int64_t size[4]) {
  const int64_t columns = size[3] > 1 ? 1 : 0;
  return {from.data(), size[0] > 1 ? from.stride[0] : 0, size[1] > 1 ? from.stride[1] : 0,
          size[2] > 1 ? from.stride[2] : 0, columns};
}

class Call {
 public:
  Call(const Case& of, Random& random) : c(of) {
    const bool tight = random.one_in(3);
    query = put(random, c.query, c.heads, c.q_len, c.dim, tight);
    key = put(random, c.key, c.kv_heads, c.k_len, c.dim, tight);
    value = put(random, c.value, c.kv_heads, c.k_len, c.value_dim, tight);
    output = buffer(random, c.heads, c.q_len, c.value_dim, tight);
    output32 = floats(random, c.heads, c.q_len, c.value_dim);
    lse = floats(random, c.heads, c.q_len, 1);
    softmax = floats(random, c.heads, c.q_len, 2);
    delta = floats(random, c.heads, c.q_len, 1);
    grad_query = buffer(random, c.heads, c.q_len, c.dim, tight);
    grad_key = buffer(random, c.kv_heads, c.k_len, c.dim, tight);
    grad_value = buffer(random, c.kv_heads, c.k_len, c.value_dim, tight);
    if (!c.grad_output.empty() || c.q_len == 0)
      grad_output = put(random, c.grad_output, c.heads, c.q_len, c.value_dim, tight);
    if (!c.grad_lse.empty()) {
      grad_lse = floats(random, c.heads, c.q_len, 1);
      fill(grad_lse, c.grad_lse);
    }
    lay_rules(random);
    place_mask(random);
    // Either is enough for backward in float32.
    with_output32 = c.dtype != CH_FLOAT32 || random.one_in(2);
    drops_output = c.k_len <= CH_TILE && c.allowed.empty() && c.blocks.empty() && random.one_in(2);
    describe();
    for (Guarded* read : inputs()) read->save_original();
  }

  int forward(int isa, int threads) {
    output.clear(), output32.clear(), lse.clear(), softmax.clear();
    work.isa = isa, work.threads = threads;
    return ch_forward(&work);
  }

  int backward() {
    delta.clear(), grad_query.clear(), grad_key.clear(), grad_value.clear();
    for (Guarded& grad : rule_grads) grad.clear(true);
    ch_attention work_copy = work;
    if (drops_output) work_copy.output.data = work_copy.output32 = nullptr;
    return ch_backward(&work_copy);
  }

  void compare_forward(const Expected& right, const std::string& name) {
    compare(output, right.output, name + " output");
    if (with_output32) compare(output32, right.output32, name + " output32");
    compare(lse, right.lse, name + " lse");
    margins({&output, &lse, &softmax}, name);
    if (with_output32) margins({&output32}, name);
  }

  void compare_backward(const Expected& right, const std::string& name) {
    compare(grad_query, right.grad_query, name + " grad_query");
    compare(grad_key, right.grad_key, name + " grad_key");
    compare(grad_value, right.grad_value, name + " grad_value");
    compare(delta, right.delta, name + " delta");
    margins({&grad_query, &grad_key, &grad_value, &delta}, name);
    size_t at = 0;
    for (size_t rule = 0; rule < c.rules.size(); ++rule) {
      if (!c.rules[rule].wants_grad) continue;
      compare(rule_grads[at], right.grad_rules[rule], name + " grad of rule " + std::to_string(rule));
      margins({&rule_grads[at++]}, name);
    }
  }

  // Compared bit for bit.
  std::vector<std::vector<uint8_t>> results() const {
    std::vector<std::vector<uint8_t>> all = {output.copy(),     lse.copy(),      softmax.copy(), delta.copy(),
                                             output32.copy(), grad_query.copy(), grad_key.copy(), grad_value.copy()};
    for (const Guarded& grad : rule_grads) all.push_back(grad.copy());
    return all;
  }

  bool gradients_untouched() const {
    return grad_query.untouched() && grad_key.untouched() && grad_value.untouched();
  }

  ch_attention work{};
  bool with_output32 = true;
  bool drops_output = false;  // where backward does not need it
  Guarded query, key, value, output, output32, lse, softmax, delta, grad_query, grad_key, grad_value, grad_output, grad_lse;
  Guarded sink, start, stop, allowed, blocks;
  std::vector<Guarded> tables, rule_grads;

  // Nothing was written outside the outputs, and nothing to the inputs.
  void margins(const std::vector<Guarded*>& written, const std::string& name) {
    for (const Guarded* one : written) check(one->margins_intact(), name + ": wrote outside a tensor");
    for (const Guarded* one : inputs()) check(one->unchanged(), name + ": wrote to an input");
  }

  const Case& c;

 private:
  Guarded buffer(Random& random, int64_t heads, int64_t rows, int64_t last, bool tight) const {
    return Guarded::make(random, c.dtype, size_of(c.dtype), c.batch, heads, rows, last, tight);
  }
  Guarded floats(Random& random, int64_t heads, int64_t rows, int64_t last) const {
    return Guarded::make(random, CH_FLOAT32, 4, c.batch, heads, rows, last, true);
  }
  static void fill(Guarded& to, const Values& from) {
    size_t at = 0;
    for (int64_t b = 0; b < to.count[0]; ++b)
      for (int64_t h = 0; h < to.count[1]; ++h)
        for (int64_t r = 0; r < to.count[2]; ++r)
          for (int64_t x = 0; x < to.last; ++x) encode(to.dtype, from[at++], to.at(b, h, r, x));
  }
  Guarded put(Random& random, const Values& from, int64_t heads, int64_t rows, int64_t last, bool tight) const {
    Guarded made = buffer(random, heads, rows, last, tight);
    fill(made, from);
    return made;
  }
  template <class T> static Guarded put_plain(Random& random, const std::vector<T>& from, const int64_t size[4]) {
    Guarded made = Guarded::make(random, CH_FLOAT32, sizeof(T), size[0], size[1], size[2], size[3], random.one_in(2));
    size_t at = 0;
    for (int64_t b = 0; b < size[0]; ++b)
      for (int64_t h = 0; h < size[1]; ++h)
        for (int64_t r = 0; r < size[2]; ++r)
          for (int64_t x = 0; x < size[3]; ++x) std::memcpy(made.at(b, h, r, x), &from[at++], sizeof(T));
    return made;
  }

  void lay_rules(Random& random) {
    work.num_rules = static_cast<int32_t>(c.rules.size());
    for (size_t i = 0; i < c.rules.size(); ++i) {
      const RuleCase& from = c.rules[i];
      ch_rule& rule = work.rules[i];
      rule.kind = from.kind, rule.value = static_cast<float>(from.value), rule.reach = from.reach;
      if (from.kind == CH_RULE_SOFTCAP) continue;
      Guarded table = Guarded::make(random, CH_FLOAT32, 4, from.size[0], from.size[1], from.size[2], from.size[3],
                                    random.one_in(2));
      fill(table, from.table);
      table.save_original();
      rule.table = table_of(table, from.size);
      tables.push_back(std::move(table));
      if (!from.wants_grad) continue;
      const int64_t columns = from.kind == CH_RULE_DENSE ? c.k_len : from.size[3];
      Guarded grad = Guarded::make(random, CH_FLOAT32, 4, from.size[0], from.size[1], from.size[2], columns,
                                   random.one_in(2));
      grad.clear(true);
      const ch_table strides = table_of(grad, from.size);
      rule.grad = static_cast<float*>(grad.data());
      rule.grad_batch = strides.batch, rule.grad_head = strides.head, rule.grad_row = strides.row;
      rule_grads.push_back(std::move(grad));
    }
    if (c.sink.empty()) return;
    sink = Guarded::make(random, CH_FLOAT32, 4, 1, c.heads, 1, 1, random.one_in(2));
    fill(sink, c.sink);
    work.sink = static_cast<const float*>(sink.data());
    work.sink_head = sink.stride[1];
  }

  void place_mask(Random& random) {
    work.before = c.before, work.after = c.after, work.intervals = c.intervals;
    if (c.intervals > 0) {
      const int64_t size[4] = {c.batch, c.heads, c.q_len, c.intervals};
      start = put_plain(random, c.start, size);
      // Both tensors use the same strides.
      stop = std::move(start);
      start = Guarded();
      Random second(7);
      stop = put_plain(second, c.stop, size);
      Random same_random(7);
      start = put_plain(same_random, c.start, size);
      work.start = static_cast<const int32_t*>(start.data()), work.stop = static_cast<const int32_t*>(stop.data());
      work.interval_batch = start.stride[0], work.interval_row = start.stride[2];
      work.interval_head = c.same_intervals ? 0 : start.stride[1];
    }
    if (!c.allowed.empty()) {
      allowed = put_plain(random, c.allowed, c.allowed_size);
      work.allowed = table_of(allowed, c.allowed_size);
    }
    if (!c.blocks.empty()) {
      const int64_t size[4] = {c.batch, c.heads, c.block_rows, c.block_columns};
      blocks = put_plain(random, c.blocks, size);
      work.blocks = {blocks.data(), blocks.stride[0], blocks.stride[1], blocks.stride[2], 1};
      work.block_size = static_cast<int32_t>(c.block_size);
      work.block_rows = c.block_rows, work.block_columns = c.block_columns;
    }
  }

  void describe() {
    work.size = sizeof(ch_attention), work.abi = CH_ABI, work.isa = -1, work.threads = 1, work.dtype = c.dtype;
    work.batch = c.batch, work.heads = c.heads, work.kv_heads = c.kv_heads;
    work.q_len = c.q_len, work.k_len = c.k_len, work.head_dim = c.dim, work.value_dim = c.value_dim;
    work.query_offset = c.offset, work.scale = c.scale, work.dropout = c.dropout, work.seed = c.seed;
    work.first_batch = c.first[0], work.first_head = c.first[1], work.first_key = c.first[2];
    work.query = query.view(), work.key = key.view(), work.value = value.view(), work.output = output.view();
    work.output32 = with_output32 ? static_cast<float*>(output32.data()) : nullptr;
    work.lse = static_cast<float*>(lse.data());
    work.softmax = static_cast<float*>(softmax.data());
    work.grad_output = grad_output.view();
    work.grad_lse = static_cast<const float*>(grad_lse.data());
    work.grad_query = grad_query.view(), work.grad_key = grad_key.view(), work.grad_value = grad_value.view();
    work.delta = static_cast<float*>(delta.data());
  }

  std::vector<Guarded*> inputs() {
    std::vector<Guarded*> all = {&query, &key, &value, &grad_output, &grad_lse, &sink, &start, &stop, &allowed,
                                 &blocks};
    for (Guarded& table : tables) all.push_back(&table);
    std::vector<Guarded*> non_null;
    for (Guarded* one : all) {
      if (one->data() != nullptr) non_null.push_back(one);
    }
    return non_null;
  }
};

}  // namespace test
