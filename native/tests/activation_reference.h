// Activations, their derivatives and dropout of activations in double, and error bounds for the kernels.
//
// An exponential has the error that reference.h states; its argument x * x is squared and scaled, whose roundings count
// x * x times.
#pragma once

#include "reference.h"

namespace test {

struct Activated {
  double number, error;
};

// The cumulative probability at x: of the normal distribution, or of the logistic one.
struct Probability {
  double value, slope;  // and its derivative
};

inline Probability probability_of(int kind, double x) {
  if (kind == CH_GELU) return {0.5 * std::erfc(-x / std::sqrt(2.0)), std::exp(-x * x / 2) / std::sqrt(2 * M_PI)};
  const double twice = 2 * std::sqrt(2 / M_PI), cubic = 0.044715;
  const double steep = kind == CH_SILU ? 1 : 1.702;
  const double of = kind == CH_GELU_TANH ? twice * x * (1 + cubic * x * x) : steep * x;
  const double inner = kind == CH_GELU_TANH ? twice * (1 + 3 * cubic * x * x) : steep;
  const double value = 1 / (1 + std::exp(-of));
  // Not as a product with 1 - value, which cancels far above 0.
  return {value, inner / (2 + std::exp(of) + std::exp(-of))};
}

inline bool is_smooth(int kind) { return kind >= CH_GELU; }

// Of a cumulative probability: some twenty roundings and an exponential with a rounded argument; far below 0 only
// subnormals remain, and far above only 1.
inline double probability_error(double x) { return 1.6e-6 + std::ldexp(std::fmin(x * x, 300), -23); }

inline Activated activated(int kind, double sum, double error) {
  if (kind == CH_PLAIN) return {sum, error};
  if (kind == CH_RELU) return {sum < 0 ? 0 : sum, error};
  const double value = probability_of(kind, sum).value;
  // No activation has a derivative above 1.13.
  return {sum * value, 1.13 * error + std::fabs(sum) * (value * probability_error(sum) + 1e-36)};
}

inline Activated slope_of(int kind, double sum, double error) {
  if (kind == CH_PLAIN) return {1, 0};
  if (kind == CH_RELU) return {sum > 0 ? 1.0 : 0.0, error > 0 && std::fabs(sum) <= error ? 1.0 : 0.0};
  const Probability probability = probability_of(kind, sum);
  // Bound of the second derivative.
  const double growth = kind == CH_QUICK_GELU ? 0.86 : 0.8;
  const double terms = probability.value + std::fabs(sum * probability.slope);
  return {probability.value + sum * probability.slope, growth * error + terms * probability_error(sum) + std::fabs(sum) * 1e-36};
}

// Whether dropout keeps an activation.
inline bool keeps(uint64_t seed, int dropped, int64_t row, uint64_t column) {
  const uint64_t number = static_cast<uint64_t>(row);
  const uint32_t high = static_cast<uint32_t>(number >> 32) + static_cast<uint32_t>(column / 64 * 8 >> 32);
  return keeps(seed, dropped, column, {static_cast<uint32_t>(number), high, UINT32_MAX});
}

// Dropout's number of a row of a call.
template <class Work> int64_t row_number(const Work& w, int64_t row) {
  return w.row_numbers == nullptr ? w.first_row + row : w.row_numbers[row];
}

// Numbers of a call's rows: none, or any.
inline std::vector<int64_t> draw_row_numbers(Random& random, int64_t rows) {
  std::vector<int64_t> numbers;
  if (random.one_in(2)) return numbers;
  for (int64_t row = 0; row < rows; ++row) numbers.push_back(random.uniform(0, 5) << 32 | random.uniform(0, 1000));
  return numbers;
}

inline const int64_t* pointer_to(const std::vector<int64_t>& numbers) { return numbers.empty() ? nullptr : numbers.data(); }

// Dropout's index of the first row of a call: 0, or one in a larger whole, also where 32 bits wrap around.
inline int64_t draw_first_row(Random& random) {
  return random.one_in(2) ? 0 : random.pick(std::vector<int64_t>{1, 7, 1000, UINT32_MAX - 2, int64_t{1} << 40});
}

}  // namespace test
