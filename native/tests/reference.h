// Attention and its gradients in double, from the formula, one element at a time; and beside each result an error bound
// for the kernels' precision.
//
// The bounds are those of rounding analysis (Higham 2002, "Accuracy and Stability of Numerical Algorithms", section
// 3.1): n additions of products err by at most n * u * sum(|terms|), and the absolute error of a score is the relative
// error of its weight. No bound was fitted to a result.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "result.h"

namespace test {

struct RuleCase {
  int kind = 0;
  double value = 0;
  int reach = 0;
  // A table [batch or 1, heads or 1, q_len or 1, k_len or 1]; RELATIVE has [1, heads or 1, 1, 2 * reach + 1].
  int64_t size[4] = {1, 1, 1, 1};
  Values table;
  bool wants_grad = false;
};

// One call in plain values; every array is contiguous.
struct Case {
  int dtype = CH_FLOAT32;
  int64_t batch = 1, heads = 1, kv_heads = 1, q_len = 1, k_len = 1, dim = 1, value_dim = 1, offset = 0;
  double scale = 1, dropout = 0;
  uint64_t seed = 0;
  std::array<int64_t, 3> first = {0, 0, 0};  // dropout's places of the first batch entry, head and key
  int64_t before = INT64_MAX, after = INT64_MAX;
  int intervals = 0;
  std::vector<int32_t> start, stop;       // [batch, heads, q_len, runs]
  bool same_intervals = false;                 // in every head
  int64_t allowed_size[4] = {0, 0, 0, 0};  // 0: none
  std::vector<uint8_t> allowed;
  int64_t block_size = 0, block_rows = 0, block_columns = 0;
  std::vector<uint8_t> blocks;  // [batch, heads, block_rows, block_columns]
  std::vector<RuleCase> rules;
  Values sink;                  // [heads], or empty
  Values query, key, value;
  Values grad_output, grad_lse;  // grad_lse may be empty

  bool may(int64_t b, int64_t h, int64_t i, int64_t j) const {
    const int64_t q_pos = offset + i;
    if (before != INT64_MAX && j < q_pos - before) return false;
    if (after != INT64_MAX && j > q_pos + after) return false;
    if (intervals > 0) {
      bool inside = false;
      for (int r = 0; r < intervals; ++r) {
        const size_t at = static_cast<size_t>(((b * heads + h) * q_len + i) * intervals + r);
        inside = inside || (j >= start[at] && j < stop[at]);
      }
      if (!inside) return false;
    }
    if (!allowed.empty() && !allowed[broadcast(allowed_size, b, h, i, j)]) return false;
    if (blocks.empty()) return true;
    const int64_t line = (b * heads + h) * block_rows + q_pos / block_size;
    return blocks[static_cast<size_t>(line * block_columns + j / block_size)] != 0;
  }

  static size_t broadcast(const int64_t size[4], int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t index[4] = {b, h, i, j};
    int64_t at = 0;
    for (int axis = 0; axis < 4; ++axis) at = at * size[axis] + (size[axis] > 1 ? index[axis] : 0);
    return static_cast<size_t>(at);
  }

  bool masked() const {
    return before != INT64_MAX || after != INT64_MAX || intervals > 0 || !allowed.empty() || !blocks.empty();
  }
};

// Philox4x32-7, Salmon et al. 2011, section 3.3: the words of a counter.
inline std::array<uint32_t, 4> philox_words(uint64_t seed, std::array<uint32_t, 4> c) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 7; ++round) {
    const uint64_t one = uint64_t{0xD2511F53} * c[0], two = uint64_t{0xCD9E8D57} * c[2];
    c = {static_cast<uint32_t>(two >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(two),
         static_cast<uint32_t>(one >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(one)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// Whether dropout keeps a column of a row: 16 bits of one of the counters of its 64 columns.
inline bool keeps(uint64_t seed, int dropped, uint64_t column, std::array<uint32_t, 3> row) {
  const uint64_t counter = column / 64 * 8 + column % 32 / 4, pair = column % 64 / 32;
  const std::array<uint32_t, 4> words = philox_words(seed, {static_cast<uint32_t>(counter), row[0], row[1], row[2]});
  const uint64_t number = words[2 * pair + 1] | uint64_t{words[2 * pair]} << 32;
  return static_cast<int>(number >> (16 * (column % 4)) & 0xffff) >= dropped;
}

struct Expected {
  Result output, output32, lse, weights, delta, grad_query, grad_key, grad_value;
  std::vector<Result> grad_rules;  // with the shape of the tables, but DENSE always with k_len columns
};

struct Precision {
  double u = 0x1p-24;  // unit roundoff of float32, in which everything is summed
  double exp;  // relative error of an exponential
  double weight, out;  // rounding of weights before the second GEMM, and of results
  double tiny;  // absolute, for subnormal results
  explicit Precision(int dtype) {
    const bool is_float32 = dtype == CH_FLOAT32;
    exp = is_float32 ? 4e-7 : 8e-6;
    weight = is_float32 ? 0.0 : 0x1p-8;
    out = is_float32 ? 0x1p-24 : dtype == CH_BFLOAT16 ? 0x1p-8 : 0x1p-11;
    tiny = dtype == CH_FLOAT16 ? 0x1p-24 : 1e-30;
  }
};

// Scores of one row, and their error bounds.
class Reference {
 public:
  explicit Reference(const Case& of) : c(of), p(of.dtype) {
    const int64_t rows = c.batch * c.heads * c.q_len, keys = c.batch * c.kv_heads * c.k_len;
    r.output.size(rows * c.value_dim), r.output32.size(rows * c.value_dim);
    r.lse.size(rows), r.delta.size(rows), r.weights.size(rows * c.k_len);
    r.grad_query.size(rows * c.dim), r.grad_key.size(keys * c.dim), r.grad_value.size(keys * c.value_dim);
    for (const RuleCase& rule : c.rules) {
      r.grad_rules.emplace_back();
      const int64_t columns = rule.kind == CH_RULE_DENSE ? c.k_len : rule.size[3];
      r.grad_rules.back().size(rule.size[0] * rule.size[1] * rule.size[2] * columns);
    }
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t i = 0; i < c.q_len; ++i) row(b, h, i);
    finish();
  }

  Expected r;

 private:
  struct Score {
    int64_t key;
    double score, error, weight, factor, slope;
    std::vector<double> rule_slope;  // derivative of the final score by each rule's addend
  };

  const double* key_row(const Values& of, int64_t b, int64_t h, int64_t j, int64_t last) const {
    const int64_t kv = h / (c.heads / c.kv_heads);
    return of.data() + ((b * c.kv_heads + kv) * c.k_len + j) * last;
  }

  Score score(int64_t b, int64_t h, int64_t i, int64_t j) const {
    Score s{j, 0, 0, 0, 1, 1, {}};
    const double* q = c.query.data() + ((b * c.heads + h) * c.q_len + i) * c.dim;
    const double* k = key_row(c.key, b, h, j, c.dim);
    double size = 0;
    for (int64_t x = 0; x < c.dim; ++x) s.score += q[x] * k[x], size += std::fabs(q[x] * k[x]);
    s.score *= c.scale;
    s.error = static_cast<double>(c.dim + 4) * p.u * std::fabs(c.scale) * size;
    const int64_t distance = c.offset + i - j;
    for (const RuleCase& rule : c.rules) {
      if (rule.kind == CH_RULE_SOFTCAP) {
        const double t = std::tanh(s.score / rule.value), slope = 1 - t * t;
        for (double& earlier : s.rule_slope) earlier *= slope;
        s.slope *= slope;
        s.score = rule.value * t;
        s.error += rule.value * 16 * p.u;
      } else {
        const double term = added(rule, b, h, i, j, distance);
        s.score += term;
        if (std::isfinite(term)) s.error += 4 * p.u * (std::fabs(s.score) + std::fabs(term));
      }
      s.rule_slope.push_back(1.0);
    }
    return s;
  }

  double added(const RuleCase& rule, int64_t b, int64_t h, int64_t i, int64_t j, int64_t distance) const {
    if (rule.kind == CH_RULE_SLOPE)
      return -rule.table[Case::broadcast(rule.size, 0, h, 0, 0)] * std::fabs(static_cast<double>(distance));
    if (rule.kind == CH_RULE_RELATIVE) {
      const int64_t reach = rule.reach, clipped = distance < -reach ? -reach : distance > reach ? reach : distance;
      return rule.table[Case::broadcast(rule.size, 0, h, 0, clipped + reach)];
    }
    return rule.table[Case::broadcast(rule.size, b, h, i, j)];
  }

  void row(int64_t b, int64_t h, int64_t i) {
    const int64_t place = (b * c.heads + h) * c.q_len + i;
    std::vector<Score> scores;
    double largest = -INFINITY, error = 0;
    for (int64_t j = 0; j < c.k_len; ++j) {
      if (!c.may(b, h, i, j)) continue;
      Score s = score(b, h, i, j);
      if (s.score == -INFINITY) continue;
      largest = std::fmax(largest, s.score);
      scores.push_back(s);
    }
    const double logit = c.sink.empty() ? -INFINITY : c.sink[static_cast<size_t>(h)];
    largest = std::fmax(largest, logit);
    double total = std::isfinite(logit) ? std::exp(logit - largest) : 0;
    for (Score& s : scores) {
      s.weight = std::exp(s.score - largest);
      total += s.weight;
      // The conversion to base 2 and the shift by the maximum round once more each.
      s.error += 4 * p.u * (std::fabs(s.score) + std::fabs(largest));
      error = std::fmax(error, s.error);
    }
    r.lse.number[static_cast<size_t>(place)] = total > 0 ? largest + std::log(total) : -INFINITY;
    if (total == 0) {
      // The delta of an empty row is unused; it must not be NaN.
      r.delta.bound[static_cast<size_t>(place)] = INFINITY;
      return;
    }
    const double n = static_cast<double>(scores.size()) + 64;
    const double lse_error = error + p.exp + n * p.u + 4 * p.u * (std::fabs(largest) + std::fabs(std::log(total)));
    r.lse.bound[static_cast<size_t>(place)] = lse_error;
    for (Score& s : scores) {
      s.weight /= total;
      const std::array<uint32_t, 3> row = {static_cast<uint32_t>(c.first[2] + c.offset + i),
                                           static_cast<uint32_t>(c.first[1] + h), static_cast<uint32_t>(c.first[0] + b)};
      const int dropped = static_cast<int>(std::lround(c.dropout * 65536.0));
      s.factor = keeps(c.seed, dropped, static_cast<uint64_t>(c.first[2] + s.key), row) ? 1.0 / (1.0 - c.dropout) : 0.0;
      const size_t at = static_cast<size_t>(place * c.k_len + s.key);
      r.weights.number[at] = s.weight;
      r.weights.bound[at] = s.weight * (s.error + lse_error + 4 * p.exp + n * p.u) + 1e-30;
    }
    forward(b, h, place, scores, error, n);
    if (!c.grad_output.empty()) backward(b, h, i, place, scores, lse_error, n);
  }

  void forward(int64_t b, int64_t h, int64_t place, const std::vector<Score>& scores, double error, double n) {
    // Numerator and normaliser have the largest error of a score each, and every tile's rescaling rounds.
    const double relative = 2 * error + 4 * p.exp + 2 * p.weight + 2 * n * p.u;
    for (int64_t x = 0; x < c.value_dim; ++x) {
      double sum = 0, size = 0;
      for (const Score& s : scores) {
        const double v = key_row(c.value, b, h, s.key, c.value_dim)[x];
        sum += s.weight * s.factor * v;
        size += s.weight * s.factor * std::fabs(v);
      }
      const size_t at = static_cast<size_t>(place * c.value_dim + x);
      r.output.number[at] = r.output32.number[at] = sum;
      r.output32.bound[at] = relative * size + 1e-30;
      r.output.bound[at] = relative * size + p.out * std::fabs(sum) + p.tiny;
    }
  }

  void backward(int64_t b, int64_t h, int64_t i, int64_t place, const std::vector<Score>& scores, double lse_error,
                double n) {
    const double* grad = c.grad_output.data() + place * c.value_dim;
    const double width = static_cast<double>(c.value_dim + 4);
    double delta = 0, delta_error = 0;
    for (int64_t x = 0; x < c.value_dim; ++x) {
      const size_t at = static_cast<size_t>(place * c.value_dim + x);
      delta += grad[x] * r.output.number[at];
      delta_error += std::fabs(grad[x]) * (r.output32.bound[at] + width * p.u * std::fabs(r.output.number[at]));
    }
    if (!c.grad_lse.empty()) {
      delta -= c.grad_lse[static_cast<size_t>(place)];
      delta_error += p.u * (std::fabs(delta) + std::fabs(c.grad_lse[static_cast<size_t>(place)]));
    }
    r.delta.number[static_cast<size_t>(place)] = delta;
    r.delta.bound[static_cast<size_t>(place)] = delta_error + 1e-30;
    const double* query = c.query.data() + place * c.dim;
    for (const Score& s : scores) {
      const double* value = key_row(c.value, b, h, s.key, c.value_dim);
      const double* key = key_row(c.key, b, h, s.key, c.dim);
      double dp = 0, size = 0;
      for (int64_t x = 0; x < c.value_dim; ++x) dp += grad[x] * value[x], size += std::fabs(grad[x] * value[x]);
      const double weight_error = s.error + lse_error + 2 * p.exp;
      const double inner = s.factor * dp - delta;
      const double inner_error = s.factor * width * 2 * p.u * size + delta_error + 4 * p.u * std::fabs(inner);
      const double ds = s.weight * inner;
      // The derivative of a soft-cap depends on its score, and is a difference from 1.
      const double slope_error = has_cap() ? 2 * s.error / least_cap() + 64 * p.u : 0;
      const double ds_error = std::fabs(ds) * (weight_error + 2 * p.weight + slope_error) + s.weight * inner_error;
      const double whole = ds * s.slope * c.scale;
      const double whole_error = std::fabs(c.scale) * (ds_error + 2 * n * p.u * std::fabs(ds)) + 1e-30;
      const int64_t kv = h / (c.heads / c.kv_heads), key_place = (b * c.kv_heads + kv) * c.k_len + s.key;
      const double rows = static_cast<double>(c.q_len * (c.heads / c.kv_heads) + 64);
      for (int64_t x = 0; x < c.dim; ++x) {
        const size_t q_at = static_cast<size_t>(place * c.dim + x), k_at = static_cast<size_t>(key_place * c.dim + x);
        r.grad_query.number[q_at] += whole * key[x];
        r.grad_query.bound[q_at] += whole_error * std::fabs(key[x]);
        r.grad_key.number[k_at] += whole * query[x];
        r.grad_key.bound[k_at] += (whole_error + rows * p.u * std::fabs(whole)) * std::fabs(query[x]);
      }
      const double kept_weight = s.weight * s.factor;
      for (int64_t x = 0; x < c.value_dim; ++x) {
        const size_t at = static_cast<size_t>(key_place * c.value_dim + x);
        r.grad_value.number[at] += kept_weight * grad[x];
        r.grad_value.bound[at] += kept_weight * (weight_error + 2 * p.weight + rows * p.u) * std::fabs(grad[x]);
      }
      for (size_t rule = 0; rule < c.rules.size(); ++rule) {
        if (c.rules[rule].kind == CH_RULE_DENSE || c.rules[rule].kind == CH_RULE_RELATIVE)
          rule_grad(rule, b, h, i, s, ds, ds_error);
      }
    }
  }

  void rule_grad(size_t rule, int64_t b, int64_t h, int64_t i, const Score& s, double ds, double ds_error) {
    const RuleCase& of = c.rules[rule];
    int64_t size[4] = {of.size[0], of.size[1], of.size[2], c.k_len}, column = s.key;
    if (of.kind == CH_RULE_RELATIVE) {
      const int64_t distance = c.offset + i - s.key, reach = of.reach;
      column = (distance < -reach ? -reach : distance > reach ? reach : distance) + reach;
      size[3] = of.size[3];
    }
    const size_t at = Case::broadcast(size, b, h, i, column);
    // This many terms can be summed in one element of the table.
    const double terms = static_cast<double>(c.batch * c.heads * c.q_len * c.k_len);
    r.grad_rules[rule].number[at] += ds * s.rule_slope[rule];
    r.grad_rules[rule].bound[at] += ds_error + terms * p.u * std::fabs(ds) + 1e-30;
  }

  bool has_cap() const { return std::isfinite(least_cap()); }
  double least_cap() const {
    double least = INFINITY;
    for (const RuleCase& rule : c.rules) {
      if (rule.kind == CH_RULE_SOFTCAP) least = std::fmin(least, rule.value);
    }
    return least;
  }

  void finish() {
    for (Result* result : {&r.grad_query, &r.grad_key, &r.grad_value}) {
      for (size_t at = 0; at < result->number.size(); ++at)
        result->bound[at] += p.out * std::fabs(result->number[at]) + p.tiny;
    }
  }

  const Case& c;
  Precision p;
};

}  // namespace test
