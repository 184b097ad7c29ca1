// Statistics of a Call: the weights of every row against the formula, everything else against these weights.
#pragma once

#include <algorithm>

#include "call.h"

namespace test {

class Observed {
 public:
  Observed(Call& of, Random& random) : call(of), c(of.c) {
    heatmap = random.pick(std::vector<int64_t>{1, 5, 16, 64, 100});
    q_tiles = (c.q_len + heatmap - 1) / heatmap, k_tiles = (c.k_len + heatmap - 1) / heatmap;
    top_k = std::min(c.k_len, random.pick(std::vector<int64_t>{1, 3, 8, 16, 17, 40}));
    sink_keys = random.uniform(0, c.k_len + 2);
    lines = random.uniform(0, 3);
    for (int64_t x = 0; x < c.heads * lines * c.q_len; ++x) weights_of_rows.push_back(static_cast<float>(random.uniform() - 0.5));
    for (int64_t i = 0; i < c.q_len; ++i) slots.push_back(static_cast<int32_t>(c.q_len - 1 - i));
    for (Guarded* row : {&max_score, &entropy, &distance, &sink}) *row = floats(random, c.q_len, 1);
    ties = floats(random, c.q_len, 2);
    top_weights = floats(random, c.q_len, top_k);
    top_indices = Guarded::make(random, CH_FLOAT32, 8, c.batch, c.heads, c.q_len, top_k, true);
    received = floats(random, 1, c.k_len);
    weighted = floats(random, lines, c.k_len);
    high = floats(random, q_tiles, k_tiles);
    mean = floats(random, q_tiles, k_tiles);
    rows = floats(random, c.q_len, c.k_len);
    describe();
  }

  // The output is bitwise identical to the one without statistics; then the statistics.
  void run(int isa, int threads, const Expected& right, const std::string& name) {
    const std::vector<uint8_t> plain = call.output.copy();
    for (Guarded* one : written()) one->clear();
    call.work.statistics = &s;
    const int code = call.forward(isa, threads);
    call.work.statistics = nullptr;
    if (code != CH_OK) return fail(name + " with statistics: " + ch_message(code));
    check(call.output.copy() == plain, name + ": statistics changed the output");
    call.margins(written(), name + " with statistics");
    if (c.q_len == 0 || c.k_len == 0) return;
    compare(rows, transposed(right.weights), name + " rows");
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t h = 0; h < c.heads; ++h) check_head(b, h, name);
  }

  std::vector<std::vector<uint8_t>> results() {
    std::vector<std::vector<uint8_t>> all;
    for (Guarded* one : written()) all.push_back(one->copy());
    return all;
  }

 private:
  Guarded floats(Random& random, int64_t count, int64_t last) const {
    return Guarded::make(random, CH_FLOAT32, 4, c.batch, c.heads, count, last, true);
  }
  std::vector<Guarded*> written() {
    return {&max_score, &ties, &entropy, &distance, &sink, &top_weights, &top_indices, &received, &weighted, &high, &mean,
            &rows};
  }
  static float* in(Guarded& to) { return static_cast<float*>(to.data()); }

  void describe() {
    s.max_score = in(max_score), s.ties = in(ties), s.entropy = in(entropy), s.distance = in(distance);
    s.sink = in(sink), s.sink_keys = sink_keys;
    s.top_weights = in(top_weights), s.top_indices = static_cast<int64_t*>(top_indices.data()), s.top_k = top_k;
    s.received = in(received), s.weighted = in(weighted), s.num_weights = lines;
    s.row_weights = weights_of_rows.data(), s.weight_batch = 0, s.weight_head = lines * c.q_len;
    s.heatmap_max = in(high), s.heatmap_mean = in(mean), s.heatmap = heatmap;
    s.rows = in(rows), s.row_slots = slots.data(), s.num_rows = c.q_len;
  }

  // Rows were requested in the opposite order.
  Result transposed(const Result& of) const {
    Result to = of;
    for (int64_t head = 0; head < c.batch * c.heads; ++head)
      for (int64_t i = 0; i < c.q_len; ++i)
        for (int64_t j = 0; j < c.k_len; ++j) {
          const size_t from = static_cast<size_t>((head * c.q_len + i) * c.k_len + j);
          const size_t at = static_cast<size_t>((head * c.q_len + c.q_len - 1 - i) * c.k_len + j);
          to.number[at] = of.number[from], to.bound[at] = of.bound[from];
        }
    return to;
  }

  double weight(int64_t b, int64_t h, int64_t i, int64_t j) const { return rows.get(b, h, c.q_len - 1 - i, j); }

  void near(double actual, double right, double size, const char* what, const std::string& name) const {
    // Sums of up to 2 * max(q_len, k_len) terms, and a logarithm of values near 1.
    const double n = static_cast<double>(c.q_len + c.k_len) + 64, exp = c.dtype == CH_FLOAT32 ? 4e-7 : 8e-6;
    if (!(std::fabs(actual - right) <= (n * 0x1p-23 + 8 * exp) * (size + std::fabs(right)) + 1e-30))
      fail(name + " " + what + " is " + std::to_string(actual) + ", not " + std::to_string(right));
  }

  void check_head(int64_t b, int64_t h, const std::string& name) const {
    for (int64_t i = 0; i < c.q_len; ++i) check_row(b, h, i, name);
    for (int64_t j = 0; j < c.k_len; ++j) {
      double sum = 0;
      for (int64_t i = 0; i < c.q_len; ++i) sum += weight(b, h, i, j);
      near(received.get(b, h, 0, j), sum, sum, "received", name);
      for (int64_t line = 0; line < lines; ++line) {
        double by_row = 0, size = 0;
        for (int64_t i = 0; i < c.q_len; ++i) {
          const double term = weights_of_rows[static_cast<size_t>((h * lines + line) * c.q_len + i)] * weight(b, h, i, j);
          by_row += term, size += std::fabs(term);
        }
        near(weighted.get(b, h, line, j), by_row, size, "weighted sum", name);
      }
    }
    for (int64_t q = 0; q < q_tiles; ++q)
      for (int64_t k = 0; k < k_tiles; ++k) check_tile(b, h, q, k, name);
  }

  void check_tile(int64_t b, int64_t h, int64_t q, int64_t k, const std::string& name) const {
    double most = 0, sum = 0, places = 0;
    for (int64_t i = q * heatmap; i < std::min(c.q_len, (q + 1) * heatmap); ++i)
      for (int64_t j = k * heatmap; j < std::min(c.k_len, (k + 1) * heatmap); ++j, ++places)
        most = std::max(most, weight(b, h, i, j)), sum += weight(b, h, i, j);
    near(high.get(b, h, q, k), most, most, "largest weight of a tile", name);
    near(mean.get(b, h, q, k), sum / places, sum / places, "mean weight of a tile", name);
  }

  void check_row(int64_t b, int64_t h, int64_t i, const std::string& name) const {
    double surprise = 0, way = 0, mass = 0;
    std::vector<std::pair<double, int64_t>> order;
    for (int64_t j = 0; j < c.k_len; ++j) {
      const double p = weight(b, h, i, j);
      if (p > 0) surprise -= p * std::log(p);
      way += p * std::fabs(static_cast<double>(c.offset + i - j));
      if (j < sink_keys) mass += p;
      order.emplace_back(-p, j);
    }
    near(entropy.get(b, h, i, 0), surprise, 1 + std::fabs(call.lse.get(b, h, i, 0)) + surprise, "entropy", name);
    near(distance.get(b, h, i, 0), way, way, "distance", name);
    near(sink.get(b, h, i, 0), mass, mass, "sink", name);
    std::sort(order.begin(), order.end());
    for (int64_t x = 0; x < top_k; ++x) {
      int64_t index = 0;
      std::memcpy(&index, top_indices.at(b, h, i, x), 8);
      const double p = top_weights.get(b, h, i, x), best = -order[static_cast<size_t>(x)].first;
      near(p, best, best, "top weight", name);
      if (index < 0 || index >= c.k_len) return fail(name + ": a top index is not a key");
      near(p, weight(b, h, i, index), p, "weight at a top index", name);
      if (x > 0 && p == 0 && top_weights.get(b, h, i, x - 1) == 0) {
        int64_t before = 0;
        std::memcpy(&before, top_indices.at(b, h, i, x - 1), 8);
        check(before < index, name + ": keys of zero weight are not ascending");
      }
    }
  }

  Call& call;
  const Case& c;
  int64_t heatmap = 1, q_tiles = 0, k_tiles = 0, top_k = 0, sink_keys = 0, lines = 0;
  std::vector<float> weights_of_rows;
  std::vector<int32_t> slots;
  Guarded max_score, ties, entropy, distance, sink, top_weights, top_indices, received, weighted, high, mean, rows;
  ch_statistics s{};
};

}  // namespace test
