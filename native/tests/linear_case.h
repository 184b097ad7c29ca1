// Random calls of the linear attention family in plain values, each a function of its number.
#pragma once

#include <algorithm>

#include "result.h"

namespace test {

// Every array is contiguous; an empty one stands for null.
struct LinearCase {
  int map = CH_FEATURE_IDENTITY;
  bool normalized = false;
  int64_t batch = 1, heads = 1, kv_heads = 1, length = 1, features = 1, value_dim = 1, chunk = 1, gates = 0;
  double scale = 1;
  Values query, key, value;           // [batch, heads or kv_heads, length, features or value_dim]
  Values log_decay, rate;             // [batch, kv_heads, length, gates] and [batch, kv_heads, length]
  Values state, normalizer;           // [batch, kv_heads, features, value_dim] and [batch, kv_heads, features]
  Values grad_output, grad_last_state, grad_last_normalizer;

  int64_t group() const { return heads / kv_heads; }
  int64_t chunks() const { return (length + chunk - 1) / chunk; }
  int64_t units() const { return batch * kv_heads; }
  bool delta() const { return !rate.empty(); }
};

inline double feature(int map, double x) {
  if (map == CH_FEATURE_RELU) return x > 0 ? x : 0;
  if (map == CH_FEATURE_ELU) return x > 0 ? x + 1 : std::exp(x);
  return x;
}

inline double slope(int map, double x) {
  if (map == CH_FEATURE_RELU) return x > 0 ? 1 : 0;
  if (map == CH_FEATURE_ELU) return x > 0 ? 1 : std::exp(x);
  return 1;
}

// The members of the family: which fields of the description they use.
struct Member {
  const char* name;
  bool normalized, decayed, by_channel, delta;
};

inline const std::vector<Member>& members() {
  static const std::vector<Member> all = {
      {"plain", false, false, false, false},          {"normalized", true, false, false, false},
      {"decayed", false, true, false, false},         {"gated", false, true, true, false},
      {"delta", false, false, false, true},           {"decayed delta", false, true, false, true},
      {"gated delta", false, true, true, true},
  };
  return all;
}

inline void draw_floats(Random& random, Values& to, int64_t count, double size) {
  to.resize(static_cast<size_t>(count));
  for (double& number : to) number = static_cast<float>(size * (2 * random.uniform() - 1));
}

inline void draw_sizes(Random& random, LinearCase& c, uint64_t number) {
  static const std::vector<int64_t> chunks = {1, 4, 16, 63, 64, 256}, groups = {1, 2, 4};
  static const std::vector<int64_t> dims = {1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 48, 63, 64, 65, 100, 130, 256};
  // In sequence, so that every member is tested with every chunk size, and every length with several of them.
  const uint64_t pair = number / members().size();
  c.chunk = chunks[pair % chunks.size()];
  const int64_t lengths[] = {c.chunk, 3 * c.chunk + 5, c.chunk + 1, 1, c.chunk - 1, random.uniform(1, 4 * c.chunk)};
  c.length = std::max(int64_t{1}, lengths[(number + pair / chunks.size()) % 6]);
  c.batch = random.uniform(1, 2);
  c.kv_heads = random.uniform(1, 3);
  c.heads = c.kv_heads * random.pick(groups);
  c.features = random.pick(dims), c.value_dim = random.one_in(3) ? c.features : random.pick(dims);
  // The reference is slow.
  while (c.units() * (c.group() + 3) * c.length * c.features * c.value_dim > 1000000) {
    if (c.batch > 1) c.batch = 1;
    else if (c.features > 20) c.features = c.features / 2 + 1;
    else if (c.value_dim > 20) c.value_dim = c.value_dim / 2 + 1;
    else if (c.kv_heads > 1) c.heads = c.group(), c.kv_heads = 1;
    else c.features = c.features / 2 + 1, c.value_dim = c.value_dim / 2 + 1;
  }
}

inline void draw_decays(Random& random, LinearCase& c, const Member& member) {
  if (!member.decayed) return;
  c.gates = member.by_channel ? c.features : 1;
  const double strength = random.pick(std::vector<double>{0.0, 0.01, 0.3, 5.0});
  c.log_decay.resize(static_cast<size_t>(c.units() * c.length * c.gates));
  // -100 forgets everything.
  for (double& one : c.log_decay) one = static_cast<float>(random.one_in(50) ? -100 : -strength * random.uniform());
}

// Up to 1 over the square of a key, where a token replaces the value of its key; beyond 2 over it states diverge.
inline void draw_rates(Random& random, LinearCase& c, const Member& member) {
  if (!member.delta) return;
  for (int64_t token = 0; token < c.units() * c.length; ++token) {
    double square = 0;
    for (int64_t f = 0; f < c.features; ++f)
      square += std::pow(feature(c.map, c.key[static_cast<size_t>(token * c.features + f)]), 2);
    const double share = random.one_in(4) ? 1 : random.uniform();
    c.rate.push_back(static_cast<float>(share / std::fmax(square, 0.1)));
  }
}

inline void draw_ends(Random& random, LinearCase& c) {
  const int64_t matrix = c.units() * c.features * c.value_dim, row = c.units() * c.features;
  if (random.one_in(2)) draw_floats(random, c.state, matrix, 1.0);
  if (random.one_in(2)) draw_floats(random, c.grad_last_state, matrix, 1.0);
  if (!c.normalized) return;
  if (random.one_in(2)) draw_floats(random, c.normalizer, row, 1.0);
  for (double& one : c.normalizer) one = std::fabs(one);
  if (random.one_in(2)) draw_floats(random, c.grad_last_normalizer, row, 1.0);
}

inline LinearCase draw_linear(uint64_t number) {
  Random random(number + 77);
  const Member& member = members()[number % members().size()];
  LinearCase c;
  draw_sizes(random, c, number);
  c.normalized = member.normalized;
  c.map = static_cast<int>(random.uniform(CH_FEATURE_IDENTITY, CH_FEATURE_RELU));
  const double width = std::sqrt(static_cast<double>(c.features));
  c.scale = random.pick(std::vector<double>{1.0, 1.0 / width, 1.0 / width, -0.5, 0.0});
  const double size = c.map == CH_FEATURE_IDENTITY ? std::sqrt(3.0) / std::sqrt(width) : 2.0;
  draw_floats(random, c.query, c.batch * c.heads * c.length * c.features, size);
  draw_floats(random, c.key, c.units() * c.length * c.features, size);
  // Sums of values with both signs cancel near 0, where the error of a quotient is unbounded.
  for (Values* one : {&c.query, &c.key})
    for (double& x : *one) x = c.normalized && c.map == CH_FEATURE_IDENTITY ? std::fabs(x) : x;
  draw_floats(random, c.value, c.units() * c.length * c.value_dim, 2.0);
  draw_floats(random, c.grad_output, c.batch * c.heads * c.length * c.value_dim, 1.0);
  draw_decays(random, c, member);
  draw_rates(random, c, member);
  draw_ends(random, c);
  return c;
}

}  // namespace test
