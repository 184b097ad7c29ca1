// Random cases, each a function of its number.
#pragma once

#include "guarded.h"
#include "reference.h"

namespace test {

struct RandomCase : Case {
  bool gradient = true;
};

inline void draw_values(Random& random, const Case& c, Values& to, int64_t count, double size) {
  to.resize(static_cast<size_t>(count));
  for (double& number : to) {
    number = size * (2 * random.uniform() - 1);
    // 16-bit types represent eighths exactly.
    number = c.dtype == CH_FLOAT32 ? static_cast<float>(number) : std::round(number * 32) / 32;
  }
}

inline void draw_shape(Random& random, Case& c) {
  static const std::vector<int64_t> dims = {1,  2,  3,  5,  7,  8,  9,  15, 16, 17,  24,  31,  32,  33, 48,
                                            63, 64, 64, 65, 80, 96, 100, 127, 128, 129, 160, 191, 192, 255, 256};
  static const std::vector<int64_t> lengths = {1,  2,  3,  4,  5,  6,  7,  8,  12, 13,  15,  16,  17,  24,  31,  32,
                                               33, 47, 48, 63, 64, 65, 95, 96, 97, 127, 128, 129, 150, 191, 193, 200};
  c.dtype = static_cast<int>(random.pick(std::vector<int64_t>{CH_FLOAT32, CH_FLOAT32, CH_BFLOAT16, CH_BFLOAT16,
                                                              CH_FLOAT16}));
  c.batch = random.uniform(1, 2);
  c.kv_heads = random.uniform(1, 3);
  c.heads = c.kv_heads * random.pick(std::vector<int64_t>{1, 1, 2, 3});
  c.dim = random.pick(dims);
  c.value_dim = random.one_in(2) ? c.dim : random.pick(dims);
  c.q_len = random.pick(lengths), c.k_len = random.pick(lengths);
  switch (random.below(12)) {
    case 0: c.q_len = 0; break;
    case 1: c.k_len = 0; break;
    case 2: c.q_len = random.uniform(1, 16), c.k_len = random.uniform(500, 1500), c.batch = 1; break;  // decoding
    case 3: c.q_len = random.uniform(200, 300), c.k_len = random.uniform(250, 700), c.heads = c.kv_heads = 1; break;
    case 4: c.batch = 5, c.kv_heads = 4, c.heads = 4; break;  // more heads than threads
    case 5: c.q_len = c.k_len = random.uniform(520, 700), c.heads = c.kv_heads = 1, c.dim = c.value_dim = 8; break;
    default: break;
  }
  // The reference is slow.
  while (c.batch * c.heads * c.q_len * c.k_len * (c.dim + c.value_dim) > 12000000) {
    if (c.batch > 1) c.batch = 1;
    else if (c.dim > 16) c.dim = c.dim / 2 + 1;
    else if (c.value_dim > 16) c.value_dim = c.value_dim / 2 + 1;
    else if (c.heads > c.kv_heads) c.heads = c.kv_heads;
    else c.heads = c.kv_heads = 1, c.q_len = c.q_len / 2 + 1;
  }
  c.offset = random.pick(std::vector<int64_t>{0, 0, c.k_len - c.q_len, 3, 1000});
  c.scale = random.pick(std::vector<double>{1.0, 1.0, 1.0, 8.0, -0.5, 0.0}) / std::sqrt(static_cast<double>(c.dim));
}

inline void draw_intervals(Random& random, Case& c) {
  c.intervals = static_cast<int>(random.uniform(1, CH_MAX_INTERVALS));
  for (int64_t row = 0; row < c.batch * c.heads * c.q_len; ++row) {
    int64_t at = random.uniform(-3, c.k_len / 2 + 1);
    for (int run = 0; run < c.intervals; ++run) {
      // Also empty ones and ones beyond the keys: the kernels clamp.
      c.start.push_back(static_cast<int32_t>(at));
      at += random.one_in(4) ? 0 : random.uniform(0, c.k_len / 2 + 4);
      c.stop.push_back(static_cast<int32_t>(at));
      at += random.uniform(0, 9);
    }
  }
}

// Neighbouring queries that share one interval of keys: packed, with gaps, and now and then overlapping.
inline void draw_segments(Random& random, Case& c) {
  c.intervals = 1, c.same_intervals = true;
  const bool disjoint = !random.one_in(5);
  for (int64_t b = 0; b < c.batch; ++b) {
    std::vector<int32_t> start, stop;
    int64_t at = 0;
    while (static_cast<int64_t>(start.size()) < c.q_len) {
      const int64_t queries = random.one_in(4) ? c.q_len : random.uniform(1, 40);
      at = disjoint ? at + (random.one_in(3) ? random.uniform(0, 5) : 0) : random.uniform(-3, c.k_len);
      const int64_t end = at + (random.one_in(6) ? 0 : random.uniform(1, 1 + c.k_len / (random.one_in(2) ? 1 : 4)));
      for (int64_t i = 0; i < queries && static_cast<int64_t>(start.size()) < c.q_len; ++i) {
        start.push_back(static_cast<int32_t>(at));
        stop.push_back(static_cast<int32_t>(end));
      }
      at = end;
    }
    for (int64_t h = 0; h < c.heads; ++h) {
      c.start.insert(c.start.end(), start.begin(), start.end());
      c.stop.insert(c.stop.end(), stop.begin(), stop.end());
    }
  }
}

inline void draw_mask(Random& random, Case& c) {
  const int64_t bands[] = {0, 1, 5, 40, 255};
  switch (random.below(6)) {
    case 0: c.after = 0; break;
    case 1: c.before = bands[random.below(5)], c.after = bands[random.below(5)]; break;
    case 2: c.before = bands[random.below(5)]; break;
    default: break;
  }
  if (random.one_in(4)) return draw_segments(random, c);
  if (random.one_in(4)) draw_intervals(random, c);
  if (random.one_in(4) && c.k_len > 0 && c.q_len > 0) {
    const int64_t full[4] = {c.batch, c.heads, c.q_len, c.k_len};
    int64_t size = 1;
    for (int axis = 0; axis < 4; ++axis) size *= c.allowed_size[axis] = random.one_in(3) ? 1 : full[axis];
    const int64_t rarity = random.uniform(2, 6);
    for (int64_t i = 0; i < size; ++i) c.allowed.push_back(random.one_in(rarity) ? 0 : 1);
  }
  if (random.one_in(4) && c.k_len > 0 && c.q_len > 0) {
    c.offset = c.offset < 0 ? 0 : c.offset;
    c.block_size = random.pick(std::vector<int64_t>{1, 3, 16, 64, 100});
    c.block_rows = (c.offset + c.q_len - 1) / c.block_size + 1 + random.below(2);
    c.block_columns = (c.k_len - 1) / c.block_size + 1 + random.below(2);
    for (int64_t i = 0; i < c.batch * c.heads * c.block_rows * c.block_columns; ++i)
      c.blocks.push_back(random.one_in(2) ? 0 : 1);
  }
}

inline RuleCase draw_rule(Random& random, const Case& c) {
  RuleCase rule;
  rule.kind = static_cast<int>(random.uniform(CH_RULE_SLOPE, CH_RULE_SOFTCAP));
  const bool shared = random.one_in(3);
  rule.size[1] = shared ? 1 : c.heads;
  if (rule.kind == CH_RULE_RELATIVE) {
    rule.reach = static_cast<int>(random.pick(std::vector<int64_t>{0, 1, 7, 64, 300}));
    rule.size[3] = 2 * rule.reach + 1;
  } else if (rule.kind == CH_RULE_DENSE) {
    const int64_t full[4] = {c.batch, c.heads, c.q_len, c.k_len};
    for (int axis = 0; axis < 4; ++axis) rule.size[axis] = random.one_in(3) ? 1 : full[axis];
  }
  rule.value = static_cast<float>(2 + 20 * random.uniform());
  rule.wants_grad = (rule.kind == CH_RULE_RELATIVE || rule.kind == CH_RULE_DENSE) && random.one_in(2);
  Case floats;
  draw_values(random, floats, rule.table, rule.size[0] * rule.size[1] * rule.size[2] * rule.size[3], 1.0);
  return rule;
}

inline void draw_rules(Random& random, Case& c) {
  const int64_t count = random.one_in(2) ? 0 : random.uniform(1, 3);
  for (int64_t i = 0, caps = 0; i < count; ++i) {
    c.rules.push_back(draw_rule(random, c));
    caps += c.rules.back().kind == CH_RULE_SOFTCAP;
    if (caps > 1) c.rules.pop_back(), caps = 1;
  }
  // A bias of -inf is a mask, unless a soft-cap makes it finite.
  if (!c.rules.empty() && c.rules.back().kind == CH_RULE_DENSE && random.one_in(2)) {
    for (double& number : c.rules.back().table) number = random.one_in(5) ? -INFINITY : number;
  }
  if (random.one_in(4)) {
    Case floats;
    draw_values(random, floats, c.sink, c.heads, 2.0);
  }
}

inline RandomCase draw(uint64_t number) {
  Random random(number);
  RandomCase c;
  draw_shape(random, c);
  draw_mask(random, c);
  draw_rules(random, c);
  if (random.one_in(4)) c.dropout = random.pick(std::vector<double>{0.1, 0.5, 0.9}), c.seed = random.next();
  const int64_t rows = c.batch * c.heads * c.q_len, keys = c.batch * c.kv_heads * c.k_len;
  draw_values(random, c, c.query, rows * c.dim, 2.0);
  draw_values(random, c, c.key, keys * c.dim, 2.0);
  draw_values(random, c, c.value, keys * c.value_dim, 2.0);
  draw_values(random, c, c.grad_output, rows * c.value_dim, 2.0);
  Case floats;
  if (random.one_in(3)) draw_values(random, floats, c.grad_lse, rows, 1.0);
  if (c.dropout > 0 && random.one_in(2)) {
    static const std::vector<int64_t> keys_before = {1, 64, 100, 127, 128, 5000, (int64_t{1} << 36) + 77};
    c.first = {random.below(1000), random.below(100), random.pick(keys_before)};
  }
  return c;
}

}  // namespace test
