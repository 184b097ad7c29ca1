// Compiled without sanitizers, which would be too slow.
#include "linear_reference.h"

#include <algorithm>

namespace test {

namespace {

constexpr int passes = 3;
// Of a few million results one is five standard deviations off, and three draws estimate the deviation to within a
// factor of about three.
constexpr double spread = 16;

// The sums of decays' gradients run from a chunk's end back to a token, over the perturbations of queries and keys.
Values decay_noise(const LinearCase& c, const LinearResults& exact, const LinearResults& noisy) {
  Values sums(exact.grad_decay.size(), 0.0);
  for (int64_t unit = 0; unit < c.units(); ++unit)
    for (int64_t f = 0; f < c.features; ++f) {
      double sum = 0;
      for (int64_t t = c.length; t-- > 0;) {
        const size_t end = static_cast<size_t>((unit * c.chunks() + t / c.chunk) * c.features + f);
        const size_t token = static_cast<size_t>(unit * c.length + t), at = token * c.features + f;
        if (t == c.length - 1 || (t + 1) % c.chunk == 0) sum = noisy.perturbed_last[end] - exact.perturbed_last[end];
        sum += noisy.perturbed[at] - exact.perturbed[at];
        sums[token * c.gates + (c.gates > 1 ? f : 0)] += sum;
      }
    }
  return sums;
}

// From squared deviations of the passes, pooled over rows of `last` elements and their neighbours among `rows`.
Result bounded(const Values& number, const Values& squares, int64_t rows, int64_t last) {
  Result result;
  result.number = number;
  result.bound.resize(number.size());
  const int64_t reach = std::max(int64_t{2}, 3 / last + 1), total = static_cast<int64_t>(number.size()) / last;
  Values sums(static_cast<size_t>(total), 0.0);
  for (size_t at = 0; at < number.size(); ++at) sums[at / last] += squares[at];
  for (int64_t row = 0; row < total; ++row) {
    const int64_t first = row / rows * rows;
    double sum = 0;
    int64_t count = 0;
    for (int64_t i = std::max(first, row - reach); i <= std::min(first + rows - 1, row + reach); ++i)
      sum += sums[i], count += passes * last;
    for (int64_t x = 0; x < last; ++x) {
      const size_t at = static_cast<size_t>(row * last + x);
      result.bound[at] = spread * std::sqrt(sum / count) + 4 * 0x1p-24 * std::fabs(number[at]) + 1e-30;
    }
  }
  return result;
}

}  // namespace

LinearExpected expected(const LinearCase& c) {
  const Recurrence exact(c, 0, 0);
  std::vector<LinearResults> noisy;
  for (int pass = 0; pass < passes; ++pass)
    noisy.push_back(std::move(Recurrence(c, 0x1p-24, static_cast<uint64_t>(pass) + 1).r));
  const auto around = [&](Values LinearResults::*field, int64_t rows, int64_t last) {
    const Values& right = exact.r.*field;
    Values squares(right.size(), 0.0);
    for (const LinearResults& one : noisy)
      for (size_t at = 0; at < right.size(); ++at) squares[at] += std::pow((one.*field)[at] - right[at], 2);
    if (field == &LinearResults::grad_decay) {
      for (const LinearResults& one : noisy) {
        const Values noise = decay_noise(c, exact.r, one);
        for (size_t at = 0; at < right.size(); ++at) squares[at] += std::pow(noise[at], 2);
      }
    }
    return bounded(right, squares, rows, last);
  };
  const int64_t T = c.length, F = c.features, D = c.value_dim;
  LinearExpected right;
  right.output = around(&LinearResults::output, T, D);
  right.shares = around(&LinearResults::shares, T, 1);
  right.last_state = around(&LinearResults::last_state, F, D);
  right.last_normalizer = around(&LinearResults::last_normalizer, 1, F);
  right.grad_query = around(&LinearResults::grad_query, T, F);
  right.grad_key = around(&LinearResults::grad_key, T, F);
  right.grad_value = around(&LinearResults::grad_value, T, D);
  if (c.gates > 0) right.grad_decay = around(&LinearResults::grad_decay, T, c.gates);
  right.grad_rate = around(&LinearResults::grad_rate, T, 1);
  right.grad_state = around(&LinearResults::grad_state, F, D);
  right.grad_normalizer = around(&LinearResults::grad_normalizer, 1, F);
  return right;
}

}  // namespace test
