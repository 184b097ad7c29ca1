// Norms of sums and their gradients against the formulas in double, with every instruction set and several threads, and
// invalid descriptions.
//
// The bounds are those of rounding analysis (see reference.h), to first order; the number of roundings is counted at
// each place. Values are on a grid if possible, so that sums of them are exact in any order.
#include <algorithm>
#include <cstddef>
#include <functional>

#include "activation_reference.h"
#include "sets_agree.h"
#include "spoiled.h"

namespace test {

namespace {

constexpr double unit = 0x1p-24;  // unit roundoff of float32

// The rounding error of the dtype; the last rounding to float32 is counted where it occurs. float16 is a grid near 0.
double rounding(int dtype, double number) {
  if (dtype == CH_FLOAT32) return 0;
  return dtype == CH_BFLOAT16 ? 0x1p-8 * std::fabs(number) : std::fmax(0x1p-11 * std::fabs(number), 0x1p-25);
}

// Roundings on the longest path into a sum over columns: sixteen interleaved accumulators, the tail of a stretch of
// 1024, and the reduction of four vectors and their lanes. Everything after that is in double.
double roundings_of_sum(int64_t columns) { return static_cast<double>(std::min<int64_t>(columns, 1024) / 16 + 12); }

// The same over rows: sequential in up to 32 parts of at least 16 rows, and then part after part.
double roundings_over(int64_t rows) { return static_cast<double>(std::min<int64_t>(rows, rows / 32 + 48)); }

constexpr int KINDS[] = {CH_NORM_LAYER, CH_NORM_RMS, CH_NORM_RMS_FROM_ONE};

struct NormCase {
  int dtype = CH_FLOAT32, kind = CH_NORM_LAYER;
  int32_t dropped = 0;
  int64_t rows = 1, columns = 1;
  double epsilon = 1e-5;
  // Inputs are shift + k * grain with k from -reach to reach; added values are the same without the shift.
  double shift = 0, grain = 0.25;
  int64_t reach = 8;
  bool weight = false, bias = false;
  bool added = false, sum = false, moments = false;                                              // forward
  bool more = false, residual = false, grad_input = false, grad_weight = false, grad_bias = false;  // backward

  double factor() const { return 65536.0 / (65536 - dropped); }
  // Whether the sum is on the grid, with no more bits than any dtype has.
  bool exact() const { return dropped == 0 || dropped == 32768 || dropped == 49152; }
  bool keeps_at(const ch_norm& work, int64_t r, int64_t x) const {
    return keeps(work.seed, dropped, row_number(work, r), static_cast<uint64_t>(x));
  }
  size_t at(int64_t r, int64_t x) const { return static_cast<size_t>(r * columns + x); }
};

std::string describe(const NormCase& c) {
  const std::pair<bool, const char*> has[] = {
      {c.weight, "weight"},   {c.bias, "bias"},       {c.added, "added"},           {c.sum, "sum"},
      {c.moments, "moments"}, {c.more, "more"},       {c.residual, "residual gradient"},       {c.grad_input, "grad_input"},
      {c.grad_weight, "grad_weight"}, {c.grad_bias, "grad_bias"}};
  char numbers[96];
  std::snprintf(numbers, sizeof(numbers), "epsilon %g, shift %g, grain %g", c.epsilon, c.shift, c.grain);
  static const char* const kinds[] = {"layer", "rms", "rms from one"};
  std::string line = std::string(kinds[c.kind]) + ", dtype " + std::to_string(c.dtype) + ", " +
                     std::to_string(c.rows) + "x" + std::to_string(c.columns) + ", " + std::to_string(c.dropped) +
                     " dropped, " + numbers;
  for (const auto& one : has) line += one.first ? std::string(", ") + one.second : "";
  return line;
}

// The mean is stored as a float, but differences use the unrounded one; `centre_error` bounds its error.
struct Moments {
  double mean = 0, mean_error = 0, centre_error = 0, scale = 0, scale_error = 0;  // that of the scale is relative
};

Moments moments_of(const NormCase& c, const double* row, bool on_grid) {
  const double n = static_cast<double>(c.columns), roundings = unit * roundings_of_sum(c.columns);
  Moments m;
  double total = 0, size = 0, squares = 0, distance = 0;
  for (int64_t x = 0; x < c.columns; ++x) total += row[x], size += std::fabs(row[x]);
  if (c.kind == CH_NORM_LAYER) {
    m.mean = total / n;
    const bool adds_up = on_grid && size <= 0x1p24 * c.grain;
    m.mean_error = unit * std::fabs(m.mean) + (adds_up ? 0 : roundings * size / n);
  }
  for (int64_t x = 0; x < c.columns; ++x) {
    const double from_mean = row[x] - m.mean;
    squares += from_mean * from_mean, distance += std::fabs(from_mean);
  }
  const double variance = squares / n, inside = variance + c.epsilon;
  // The mean of the differences, each rounded, is the error of the mean.
  if (c.kind == CH_NORM_LAYER) m.centre_error = (roundings + unit) * (distance / n + m.mean_error);
  // Around the stored mean the variance is larger by the square of its error, which is subtracted. A difference is
  // rounded, which counts twice, and so is its square.
  const double around = variance + m.mean_error * m.mean_error;
  const double error = (roundings + 3 * unit) * around + 2 * m.mean_error * m.centre_error;
  // Half of two for epsilon and its addition, the root, the division, and one to spare.
  m.scale = 1 / std::sqrt(inside), m.scale_error = error / inside / 2 + 4 * unit;
  return m;
}

// The error of a value minus its mean: that of the mean, and two subtractions.
double error_from_mean(const Moments& m, double from_mean) {
  return m.centre_error + unit * (2 * std::fabs(from_mean) + m.mean_error);
}

// Shared by forward and backward: one call with its memory.
class NormCall {
 public:
  NormCase c;
  std::vector<int64_t> numbers;  // of the rows
  ch_norm work{};

  NormCall(const NormCase& of, Random& random, int (*made)(const ch_norm*)) : c(of), made(made) {
    work.size = sizeof(work), work.abi = CH_ABI, work.isa = -1, work.threads = 1;
    work.dtype = c.dtype, work.kind = c.kind, work.dropped = c.dropped;
    work.seed = static_cast<uint64_t>(random.uniform(0, INT64_MAX / 2)) * 2 + random.one_in(2);
    work.first_row = draw_first_row(random);
    numbers = draw_row_numbers(random, c.rows), work.row_numbers = pointer_to(numbers);
    work.rows = c.rows, work.columns = c.columns, work.epsilon = c.epsilon;
  }

  int run(int isa, int threads) {
    for (Guarded* one : writes) one->clear();
    work.isa = isa, work.threads = threads;
    return made(&work);
  }
  int run(const ch_norm& other) const { return made(&other); }
  std::vector<std::vector<uint8_t>> bits() const {
    std::vector<std::vector<uint8_t>> all;
    for (const Guarded* one : writes) all.push_back(one->copy());
    return all;
  }
  void contained(const std::string& name) const {
    for (const Guarded* one : writes) check(one->margins_intact(), name + ": wrote outside its results");
    for (const Guarded* one : reads) check(one->unchanged(), name + ": wrote to an input");
  }
  bool untouched() const {
    for (const Guarded* one : writes) {
      if (!one->untouched()) return false;
    }
    return true;
  }

 protected:
  int (*made)(const ch_norm*);
  std::vector<Guarded*> reads, writes;

  template <class Draw>
  void* put(Random& random, Guarded& to, int dtype, int64_t rows, int64_t columns, const Draw& draw) {
    to = Guarded::make(random, dtype, size_of(dtype), 1, 1, rows, columns, true);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t x = 0; x < columns; ++x) encode(dtype, draw(), to.at(0, 0, r, x));
    to.save_original();
    reads.push_back(&to);
    return to.data();
  }
  void* buffer(Random& random, Guarded& to, int dtype, int64_t rows, int64_t columns) {
    to = Guarded::make(random, dtype, size_of(dtype), 1, 1, rows, columns, true);
    writes.push_back(&to);
    return to.data();
  }
  static double on_grid(Random& random, double grain, int64_t reach) {
    return grain * static_cast<double>(random.uniform(-reach, reach));
  }
  // Weights and biases; adding 1 to one of them is exact in every dtype.
  void* put_channels(Random& random, Guarded& to) {
    return put(random, to, c.dtype, 1, c.columns, [&] { return on_grid(random, 0.25, 8); });
  }
};

double channel(const Guarded& of, int64_t x) { return of.data() == nullptr ? 0 : of.get(0, 0, 0, x); }

// The factor of a normalised value.
double factor_of(const NormCase& c, const Guarded& weight, int64_t x) {
  const bool counts_from_one = c.kind == CH_NORM_RMS_FROM_ONE || weight.data() == nullptr;
  return channel(weight, x) + (counts_from_one ? 1 : 0);
}

Values values(const Guarded& of) {
  Values all;
  for (int64_t r = 0; r < of.count[2]; ++r)
    for (int64_t x = 0; x < of.last; ++x) all.push_back(of.get(0, 0, r, x));
  return all;
}

struct ForwardCall : NormCall {
  Guarded input, added, weight, bias, sum, output, moments;

  ForwardCall(const NormCase& of, Random& random) : NormCall(of, random, ch_norm_forward) {
    const auto whole = [&](Guarded& to, double shift) {
      return put(random, to, c.dtype, c.rows, c.columns, [&] { return shift + on_grid(random, c.grain, c.reach); });
    };
    work.input = whole(input, c.shift);
    if (c.added) work.added = whole(added, 0);
    if (c.weight) work.weight = put_channels(random, weight);
    if (c.bias) work.bias = put_channels(random, bias);
    if (c.sum) work.sum = buffer(random, sum, c.dtype, c.rows, c.columns);
    if (c.moments) work.moments = static_cast<float*>(buffer(random, moments, CH_FLOAT32, c.rows, 2));
    work.output = buffer(random, output, c.dtype, c.rows, c.columns);
  }

  // The sum before it is rounded, and its error bound, which is 0 if the sum is exact.
  Result right_sum() const {
    Result right;
    right.size(c.rows * c.columns);
    for (int64_t r = 0; r < c.rows; ++r)
      for (int64_t x = 0; x < c.columns; ++x) {
        const bool keep = c.keeps_at(work, r, x);
        const double part = keep ? input.get(0, 0, r, x) * c.factor() : 0;
        const double number = part + (c.added ? added.get(0, 0, r, x) : 0);
        right.number[c.at(r, x)] = number;
        // The factor, the product and the addition.
        const double error = unit * (2 * std::fabs(part) + std::fabs(number));
        if (keep && !c.exact()) right.bound[c.at(r, x)] = error + rounding(c.dtype, std::fabs(number) + error);
      }
    return right;
  }

  struct Right {
    Result output, moments;
  };
  Right right_of(const Values& sums) const {
    Right right;
    right.output.size(c.rows * c.columns), right.moments.size(c.rows * 2);
    for (int64_t r = 0; r < c.rows; ++r) {
      const double* row = sums.data() + c.at(r, 0);
      const Moments m = moments_of(c, row, c.exact());
      const size_t two = static_cast<size_t>(r * 2);
      right.moments.number[two] = m.mean, right.moments.bound[two] = m.mean_error;
      right.moments.number[two + 1] = m.scale, right.moments.bound[two + 1] = m.scale * m.scale_error;
      for (int64_t x = 0; x < c.columns; ++x) {
        const double from_mean = row[x] - m.mean, normal = from_mean * m.scale, factor = factor_of(c, weight, x);
        const double number = normal * factor + channel(bias, x);
        // Two products and the bias.
        const double before = m.scale * error_from_mean(m, from_mean) + std::fabs(normal) * (m.scale_error + unit);
        const double error = std::fabs(factor) * (before + unit * std::fabs(normal)) + unit * std::fabs(number);
        right.output.number[c.at(r, x)] = number;
        right.output.bound[c.at(r, x)] = error + rounding(c.dtype, std::fabs(number) + error);
        // A single value minus itself is 0, and the bias has the dtype already.
        if (c.columns == 1 && c.kind == CH_NORM_LAYER) right.output.bound[c.at(r, x)] = 0;
      }
    }
    return right;
  }
};

// Backward's moments are inputs, rounded as given. Results are checked against the given scale, and the mean is taken
// as given.
struct BackwardCall : NormCall {
  Guarded sum, moments, weight, grad_output, grad_output_second, grad_residual, grad_sum, grad_input, grad_weight, grad_bias;

  static constexpr double grain = 0.25, grain_of_more = grain / 512;

  BackwardCall(const NormCase& of, Random& random) : NormCall(of, random, ch_norm_backward) {
    const auto whole = [&](Guarded& to, double shift, double step) {
      return put(random, to, c.dtype, c.rows, c.columns, [&] { return shift + on_grid(random, step, c.reach); });
    };
    const auto results = [&](Guarded& to, int64_t rows) { return buffer(random, to, c.dtype, rows, c.columns); };
    work.sum = whole(sum, c.shift, c.grain);
    const Values sums = values(sum);
    std::vector<float> given;
    for (int64_t r = 0; r < c.rows; ++r) {
      const Moments m = moments_of(c, sums.data() + c.at(r, 0), true);
      given.push_back(static_cast<float>(m.mean)), given.push_back(static_cast<float>(m.scale));
    }
    size_t next = 0;
    work.moments = static_cast<float*>(put(random, moments, CH_FLOAT32, c.rows, 2, [&] { return given[next++]; }));
    work.grad_output = whole(grad_output, 0, grain);
    // No 16-bit dtype represents their sum.
    if (c.more) work.grad_output_second = whole(grad_output_second, 0, grain_of_more);
    if (c.residual) work.grad_residual = whole(grad_residual, 0, grain);
    if (c.weight) work.weight = put_channels(random, weight);
    work.grad_sum = results(grad_sum, c.rows);
    if (c.grad_input) work.grad_input = results(grad_input, c.rows);
    if (c.grad_weight) work.grad_weight = results(grad_weight, 1);
    if (c.grad_bias) work.grad_bias = results(grad_bias, 1);
  }

  struct Right {
    Result sum, weight, bias;
  };
  Right right() const {
    Right right;
    const double n = static_cast<double>(c.columns), roundings = unit * roundings_of_sum(c.columns);
    const bool layer = c.kind == CH_NORM_LAYER;
    const Values sums = values(sum);
    right.sum.size(c.rows * c.columns), right.weight.size(c.columns), right.bias.size(c.columns);
    Values grad(static_cast<size_t>(c.columns)), normal = grad, weighted = grad, normal_error = grad;
    Values weight_error = grad, weight_size = grad, bias_size = grad;
    for (int64_t r = 0; r < c.rows; ++r) {
      const Moments m = moments_of(c, sums.data() + c.at(r, 0), true);
      const double scale = moments.get(0, 0, r, 1);
      double of_weighted = 0, of_both = 0, error_of_weighted = 0, error_of_both = 0;
      for (int64_t x = 0; x < c.columns; ++x) {
        const size_t i = static_cast<size_t>(x);
        const double from_mean = sums[c.at(r, x)] - m.mean;
        grad[i] = grad_output.get(0, 0, r, x) + (c.more ? grad_output_second.get(0, 0, r, x) : 0);
        normal[i] = from_mean * scale;
        normal_error[i] = scale * error_from_mean(m, from_mean) + unit * std::fabs(normal[i]);
        weighted[i] = grad[i] * factor_of(c, weight, x);
        const double both = weighted[i] * normal[i], term = grad[i] * normal[i];
        // Gradients are summed and multiplied, and multiplied again.
        of_weighted += weighted[i], error_of_weighted += (roundings + 2 * unit) * std::fabs(weighted[i]) / n;
        of_both += both, error_of_both += (roundings + 3 * unit) * std::fabs(both) / n;
        error_of_both += std::fabs(weighted[i]) * normal_error[i] / n;
        right.weight.number[i] += term, weight_size[i] += std::fabs(term);
        weight_error[i] += std::fabs(grad[i]) * normal_error[i];
        right.bias.number[i] += grad[i], bias_size[i] += std::fabs(grad[i]);
      }
      if (!layer) of_weighted = error_of_weighted = 0;
      // Both means are rounded.
      const double mean_weighted = of_weighted / n, mean_both = of_both / n;
      error_of_weighted += unit * std::fabs(mean_weighted), error_of_both += unit * std::fabs(mean_both);
      for (int64_t x = 0; x < c.columns; ++x) {
        const size_t i = static_cast<size_t>(x), at = c.at(r, x);
        const double slope = mean_both * normal[i], change = scale * (weighted[i] - mean_weighted - slope);
        const double number = change + (c.residual ? grad_residual.get(0, 0, r, x) : 0);
        // Five for the weighted gradient: a sum, a product, two subtractions, and the product with the scale.
        const double terms = std::fabs(weighted[i]) + std::fabs(mean_weighted) + std::fabs(slope);
        const double of_slope = std::fabs(normal[i]) * error_of_both + std::fabs(mean_both) * normal_error[i];
        const double error = scale * (error_of_weighted + of_slope + 5 * unit * terms) +
                             (c.residual ? unit * std::fabs(number) : 0);
        right.sum.number[at] = number, right.sum.bound[at] = error + rounding(c.dtype, std::fabs(number) + error);
      }
    }
    for (size_t i = 0; i < static_cast<size_t>(c.columns); ++i) {
      // Gradients are summed and multiplied. Only gradients are on their grid.
      const double of_weight = weight_error[i] + unit * (roundings_over(c.rows) + 2) * weight_size[i];
      const bool adds_up = bias_size[i] <= 0x1p24 * (c.more ? grain_of_more : grain);
      const double of_bias = adds_up ? 0 : unit * (roundings_over(c.rows) + 1) * bias_size[i];
      right.weight.bound[i] = of_weight + rounding(c.dtype, std::fabs(right.weight.number[i]) + of_weight);
      right.bias.bound[i] = of_bias + rounding(c.dtype, std::fabs(right.bias.number[i]) + of_bias);
    }
    return right;
  }

  // The gradient of the input, from that of the sum as stored.
  Result right_input() const {
    Result right;
    right.size(c.rows * c.columns);
    for (int64_t r = 0; r < c.rows; ++r)
      for (int64_t x = 0; x < c.columns; ++x) {
        if (!c.keeps_at(work, r, x)) continue;
        const double number = grad_sum.get(0, 0, r, x) * c.factor(), error = 2 * unit * std::fabs(number);
        right.number[c.at(r, x)] = number;
        // The factor and the product, unless the factor is 1.
        if (c.dropped > 0) right.bound[c.at(r, x)] = error + rounding(c.dtype, std::fabs(number) + error);
      }
    return right;
  }
};

std::string name_of(const char* what, const NormCase& c, int isa, int threads) {
  return std::string(what) + " (" + describe(c) + ", " + ch_isa_name(isa) + ", threads " + std::to_string(threads) +
         ")";
}

// Correct with one thread, the same with others, and within its memory.
template <class Call, class Compare> void at_every_set(Call& call, const char* what, const Compare& compare_one) {
  for (int isa : usable_sets()) {
    std::vector<std::vector<uint8_t>> bits;
    for (int threads : {1, 2, 5}) {
      const std::string name = name_of(what, call.c, isa, threads);
      expect_done_first([&] { return call.run(isa, threads); }, name);
      if (threads == 1) compare_one(name), bits = call.bits();
      check(call.bits() == bits, name + ": bits differ from those with one thread");
      call.contained(name);
    }
  }
}

void forward_case(const NormCase& c, uint64_t seed) {
  Random random(seed);
  ForwardCall call(c, random);
  const Result sums = call.right_sum();
  const ForwardCall::Right planned = call.right_of(sums.number);
  at_every_set(call, "norm", [&](const std::string& name) {
    if (c.sum) compare(call.sum, sums, name + " sum");
    const ForwardCall::Right right = c.exact() ? planned : call.right_of(values(call.sum));
    compare(call.output, right.output, name + " output");
    if (c.moments) compare(call.moments, right.moments, name + " moments");
    // The output is that of the rounded sum, whether or not the sum is stored.
    const std::vector<uint8_t> bits = call.output.copy();
    ch_norm alone = call.work;
    alone.sum = nullptr, alone.moments = nullptr;
    call.output.clear();
    expect(call.run(alone), CH_OK, name + " alone");
    check(call.output.copy() == bits, name + ": another output without optional results");
  });
}

void backward_case(const NormCase& c, uint64_t seed) {
  Random random(seed);
  BackwardCall call(c, random);
  const BackwardCall::Right right = call.right();
  at_every_set(call, "norm backward", [&](const std::string& name) {
    compare(call.grad_sum, right.sum, name + " grad_sum");
    if (c.grad_input) compare(call.grad_input, call.right_input(), name + " grad_input");
    if (c.grad_weight) compare(call.grad_weight, right.weight, name + " grad_weight");
    if (c.grad_bias) compare(call.grad_bias, right.bias, name + " grad_bias");
  });
}

// Everything requested, nothing, or some of it.
NormCase draw_norm(Random& random, int dtype, int kind, int64_t rows, int64_t columns, int draw) {
  NormCase c;
  c.dtype = dtype, c.kind = kind, c.rows = rows, c.columns = columns;
  for (bool* flag : {&c.weight, &c.bias, &c.added, &c.sum, &c.moments, &c.more, &c.residual, &c.grad_input,
                     &c.grad_weight, &c.grad_bias})
    *flag = draw == 0 || (draw > 1 && random.one_in(2));
  const int64_t form = draw == 1 ? 0 : random.below(4);
  // With 16 bits of probability there is a factor that float16 cannot represent exactly.
  if (form == 1) c.dropped = random.one_in(2) ? 32768 : 49152;
  if (form == 2) c.dropped = random.pick<int32_t>({1, 6554, 60000, dtype == CH_FLOAT32 ? 65535 : 59999});
  // A large mean, in as few bits as the dtype has, with sums that are still exact.
  if (form == 3) {
    c.reach = 2, c.grain = dtype == CH_FLOAT32 ? 1 : 0.5;
    c.shift = dtype == CH_FLOAT32 ? (columns <= 1600 ? 10000 : 1000) : dtype == CH_BFLOAT16 ? 64 : 512;
  } else if (dtype != CH_FLOAT16 && columns >= 15 && form != 2) {
    c.grain = random.pick<double>({0.25, 0.25, 0x1p50, 0x1p-22});
  }
  // Without epsilon a row of one value has no scale.
  c.epsilon = random.pick<double>({1e-5, 0.5});
  if (columns >= 15 && c.dropped <= 32768 && random.one_in(2)) c.epsilon = random.one_in(2) ? 0 : 1e-12;
  return c;
}

int every_size() {
  static const int64_t sizes[][2] = {{0, 5},   {1, 1},    {3, 1},    {5, 2},    {3, 3},   {1, 15},
                                     {9, 16},  {4, 31},   {1, 127},  {2, 128},  {7, 129}, {1, 1000},
                                     {3, 4097}, {700, 96}, {301, 1}, {129, 256}, {1500, 33}};
  uint64_t number = 0;
  int cases = 0;
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16})
    for (int kind : KINDS)
      for (const auto& size : sizes)
        for (int draw = 0; draw < 3; ++draw, cases += 2) {
          Random random(++number);
          NormCase c = draw_norm(random, dtype, kind, size[0], size[1], draw);
          backward_case(c, number + 4000);
          // The output is compared through the stored sum unless the sum is exact.
          c.sum = c.sum || !c.exact();
          forward_case(c, number);
        }
  return cases;
}

int sets_agree() {
  static const int64_t sizes[][2] = {{1, 1}, {3, 15}, {9, 16}, {4, 31}, {7, 129}, {1, 1000}, {3, 4097}, {70, 96}};
  SetsAgree agree("norm");
  uint64_t number = 3000;
  for (int kind : KINDS)
    for (const auto& size : sizes)
      for (int draw = 0; draw < 3; ++draw) {
        Random random(++number);
        const NormCase c = draw_norm(random, CH_FLOAT32, kind, size[0], size[1], draw);
        ForwardCall forward(c, random);
        BackwardCall backward(c, random);
        agree.add(describe(c), [&](int isa) {
          expect(forward.run(isa, 1), CH_OK, "norm");
          expect(backward.run(isa, 1), CH_OK, "gradient of a norm");
          SetsAgree::Bits bits = forward.bits();
          for (std::vector<uint8_t>& gradient : backward.bits()) bits.push_back(std::move(gradient));
          return bits;
        });
      }
  return agree.end(0xe878c66670d37b10u);
}

// A mean that is large against the spread is subtracted first, in backward as well: the difference of squares would
// cancel.
int large_means() {
  int cases = 0;
  for (int64_t columns : {64, 1000, 1531}) {
    NormCase c;
    c.rows = 5, c.columns = columns, c.shift = 10000, c.grain = 1, c.reach = 2;
    c.weight = c.bias = c.added = c.sum = c.moments = c.grad_input = c.grad_weight = c.grad_bias = true;
    forward_case(c, 31), backward_case(c, 32), cases += 2;
  }
  return cases;
}

// Squares of such values overflow and the scale is 0, so the output is the bias, not NaN.
void huge_values() {
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16})
    for (int kind : KINDS) {
      NormCase c;
      c.dtype = dtype, c.kind = kind, c.rows = 3, c.columns = 129, c.grain = 0x1p99;
      c.added = c.weight = c.bias = c.sum = c.moments = true;
      Random random(6);
      ForwardCall call(c, random);
      for (int isa : usable_sets()) {
        const std::string name = name_of("norm of huge values", c, isa, 1);
        expect(call.run(isa, 1), CH_OK, name);
        for (double number : values(call.output)) check(std::isfinite(number), name + ": " + std::to_string(number));
        for (double number : values(call.moments)) check(std::isfinite(number), name + ": " + std::to_string(number));
      }
    }
}

// Compares where the second call has other values than the first; with `must_differ`, some must be NaN or infinity.
void compare_clean(const Guarded& clean, const Guarded& got, const std::string& name, bool must_differ,
                   const std::function<bool(int64_t r, int64_t x)>& reaches) {
  bool reached = false, shown = false;
  for (int64_t r = 0; r < clean.count[2]; ++r)
    for (int64_t x = 0; x < clean.last; ++x) {
      const double right = clean.get(0, 0, r, x), actual = got.get(0, 0, r, x);
      if (reaches(r, x)) reached = true, shown = shown || !std::isfinite(actual);
      else if (actual != right)
        return fail(name + " [" + std::to_string(r) + ", " + std::to_string(x) + "] is " + std::to_string(actual) +
                    ", not " + std::to_string(right));
    }
  check(!must_differ || !reached || shown, name + ": no result has NaN or infinity");
}

constexpr int64_t bad_row = 17, bad_column = 66;

NormCase with_everything(int dtype, int kind) {
  NormCase c;
  c.dtype = dtype, c.kind = kind, c.rows = 37, c.columns = 131, c.dropped = 32768;
  c.weight = c.bias = c.added = c.sum = c.moments = true;
  c.more = c.residual = c.grad_input = c.grad_weight = c.grad_bias = true;
  return c;
}

// Runs a call, and the same call modified by `spoil`.
template <class Call>
void spoiled_pair(const NormCase& c, const std::string& what, const std::function<void(Call&)>& spoil,
                  const std::function<void(Call& clean, Call& got, const std::string& name)>& compare_them) {
  Random first_value(9), second_value(9);
  Call clean(c, first_value), got(c, second_value);
  spoil(got);
  for (int isa : usable_sets())
    for (int threads : {1, 5}) {
      const std::string name = name_of(what.c_str(), c, isa, threads);
      expect(clean.run(isa, threads), CH_OK, name), expect(got.run(isa, threads), CH_OK, name);
      compare_them(clean, got, name);
    }
}

// NaN and infinity stay in their row, and dropout removes them.
void containment_forward(const NormCase& c, double bad) {
  const auto in_row = [](int64_t r, int64_t) { return r == bad_row; };
  const auto everywhere_else = [&](ForwardCall& clean, ForwardCall& got, const std::string& name) {
    compare_clean(clean.sum, got.sum, name + " sum", true,
                  [](int64_t r, int64_t x) { return r == bad_row && x == bad_column; });
    compare_clean(clean.output, got.output, name + " output", true, in_row);
    compare_clean(clean.moments, got.moments, name + " moments", false, in_row);
    if (!std::isnan(bad)) return;
    // The scale of such a row is NaN as well, and so is everything that it scales.
    bool all = std::isnan(got.moments.get(0, 0, bad_row, 1));
    for (int64_t x = 0; x < c.columns; ++x) all = all && std::isnan(got.output.get(0, 0, bad_row, x));
    check(all, name + ": a finite value among NaN");
  };
  spoiled_pair<ForwardCall>(c, std::to_string(bad) + " in the residual",
                            [&](ForwardCall& call) { encode(c.dtype, bad, call.added.at(0, 0, bad_row, bad_column)); },
                            everywhere_else);
  NormCase without_dropout = c;
  without_dropout.dropped = 0;
  spoiled_pair<ForwardCall>(without_dropout, std::to_string(bad) + " in the input",
                            [&](ForwardCall& call) { encode(c.dtype, bad, call.input.at(0, 0, bad_row, bad_column)); },
                            everywhere_else);
  spoiled_pair<ForwardCall>(
      c, std::to_string(bad) + " in a dropped element",
      [&](ForwardCall& call) {
        for (int64_t r = 0; r < c.rows; ++r)
          for (int64_t x = 0; x < c.columns; ++x) {
            if (!c.keeps_at(call.work, r, x)) encode(c.dtype, bad, call.input.at(0, 0, r, x));
          }
      },
      [](ForwardCall& clean, ForwardCall& got, const std::string& name) {
        check(values(clean.sum) == values(got.sum) && values(clean.output) == values(got.output) &&
                  values(clean.moments) == values(got.moments),
              name + ": it propagates");
      });
}

void containment_backward(const NormCase& c, double bad) {
  enum Reach { nowhere, one_column, anywhere };
  struct Place {
    const char* what;
    Guarded BackwardCall::*at;
    bool whole_row;
    Reach in_weight, in_bias;
  };
  // If the sum has NaN or infinity, no element of its row has a distance from the mean.
  static const Place places[] = {{"the sum", &BackwardCall::sum, true, anywhere, nowhere},
                                 {"grad_output", &BackwardCall::grad_output, true, one_column, one_column},
                                 {"grad_output_second", &BackwardCall::grad_output_second, true, one_column, one_column},
                                 {"grad_residual", &BackwardCall::grad_residual, false, nowhere, nowhere}};
  for (const Place& place : places) {
    const auto reaches = [&](int64_t r, int64_t x) { return r == bad_row && (place.whole_row || x == bad_column); };
    const auto columns = [](Reach reach) {
      return [reach](int64_t, int64_t x) { return reach == anywhere || (reach == one_column && x == bad_column); };
    };
    spoiled_pair<BackwardCall>(
        c, std::to_string(bad) + " in " + place.what,
        [&](BackwardCall& call) { encode(c.dtype, bad, (call.*place.at).at(0, 0, bad_row, bad_column)); },
        [&](BackwardCall& clean, BackwardCall& got, const std::string& name) {
          compare_clean(clean.grad_sum, got.grad_sum, name + " grad_sum", true, reaches);
          // The gradient of a dropped element is 0, whatever the incoming gradient is.
          compare_clean(clean.grad_input, got.grad_input, name + " grad_input", true, [&](int64_t r, int64_t x) {
            return reaches(r, x) && c.keeps_at(got.work, r, x);
          });
          compare_clean(clean.grad_weight, got.grad_weight, name + " grad_weight", true, columns(place.in_weight));
          compare_clean(clean.grad_bias, got.grad_bias, name + " grad_bias", true, columns(place.in_bias));
        });
  }
}

void containment() {
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16})
    for (int kind : KINDS)
      for (double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
        containment_forward(with_everything(dtype, kind), bad);
        containment_backward(with_everything(dtype, kind), bad);
      }
}

// Without rows no tensor is needed, and sums over rows are 0.
void no_rows() {
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16})
    for (int kind : KINDS)
      for (int64_t columns : {0, 1, 37}) {
        NormCase c = with_everything(dtype, kind);
        c.rows = 0, c.columns = columns;
        Random random(11);
        ForwardCall forward(c, random);
        BackwardCall backward(c, random);
        forward.work.input = forward.work.added = nullptr;
        forward.work.sum = forward.work.output = nullptr, forward.work.moments = nullptr;
        backward.work.sum = backward.work.grad_sum = backward.work.grad_input = nullptr;
        backward.work.moments = nullptr;
        backward.work.grad_output = backward.work.grad_output_second = backward.work.grad_residual = nullptr;
        for (int isa : usable_sets())
          for (int threads : {1, 2, 5}) {
            const std::string name = name_of("no rows", c, isa, threads);
            expect(forward.run(isa, threads), CH_OK, name), expect(backward.run(isa, threads), CH_OK, name);
            for (const Guarded* sums : {&backward.grad_weight, &backward.grad_bias})
              for (double number : values(*sums)) check(number == 0, name + ": sums over no rows are not 0");
            backward.contained(name);
          }
      }
}

// A pointer field of the description, by its offset.
struct Field {
  const char* what;
  size_t place;
  bool needed;

  uintptr_t get(const ch_norm& w) const {
    uintptr_t address;
    std::memcpy(&address, reinterpret_cast<const char*>(&w) + place, sizeof(address));
    return address;
  }
  void set(ch_norm& w, uintptr_t address) const {
    std::memcpy(reinterpret_cast<char*>(&w) + place, &address, sizeof(address));
  }
};

int spoil_all(NormCall& call, const std::string& which, const std::vector<Field>& fields) {
  using W = ch_norm;
  std::vector<Bad<W>> all = spoiled<W>({
      {"dtype", CH_BAD_DTYPE, [](W& w) { w.dtype = 3; }},
      {"negative dtype", CH_BAD_DTYPE, [](W& w) { w.dtype = -1; }},
      {"negative rows", CH_BAD_SHAPE, [](W& w) { w.rows = -1; }},
      {"negative columns", CH_BAD_SHAPE, [](W& w) { w.columns = -1; }},
      {"negative first_row", CH_BAD_SHAPE, [](W& w) { w.first_row = -1; }},
      {"huge first_row", CH_BAD_SHAPE, [](W& w) { w.first_row = INT64_MAX; }},
      {"no columns", CH_BAD_SHAPE, [](W& w) { w.columns = 0; }},
      {"huge rows", CH_BAD_SHAPE, [](W& w) { w.rows = INT64_MAX; }},
      {"huge columns", CH_BAD_SHAPE, [](W& w) { w.columns = INT64_MAX; }},
      {"counts that overflow", CH_BAD_SHAPE, [](W& w) { w.rows = INT32_MAX, w.columns = int64_t{1} << 47; }},
      {"odd row_numbers", CH_BAD_POINTER, [](W& w) { w.row_numbers = reinterpret_cast<const int64_t*>(9); }},
      {"all dropped", CH_BAD_OPTION, [](W& w) { w.dropped = 65536; }},
      {"a negative probability", CH_BAD_OPTION, [](W& w) { w.dropped = -1; }},
      {"kind", CH_BAD_OPTION, [](W& w) { w.kind = 3; }},
      {"negative kind", CH_BAD_OPTION, [](W& w) { w.kind = -1; }},
      {"negative epsilon", CH_BAD_OPTION, [](W& w) { w.epsilon = -1e-5; }},
      {"epsilon NaN", CH_BAD_OPTION, [](W& w) { w.epsilon = static_cast<double>(NAN); }},
      {"epsilon inf", CH_BAD_OPTION, [](W& w) { w.epsilon = static_cast<double>(INFINITY); }},
  });
  for (const Field& f : fields) {
    if (f.needed) all.push_back({std::string("no ") + f.what, CH_BAD_POINTER, [&f](W& w) { f.set(w, 0); }});
    all.push_back({std::string("odd ") + f.what, CH_BAD_POINTER, [&f](W& w) { f.set(w, f.get(w) + 1); }});
    all.push_back({f.what + std::string(" at the last address"), CH_BAD_STRIDE,
                   [&f](W& w) { f.set(w, UINTPTR_MAX - 7); }});
  }
  // Moments are float32 with any dtype.
  all.push_back({"unaligned moments", CH_BAD_POINTER,
                 [](W& w) { w.moments = reinterpret_cast<float*>(reinterpret_cast<uintptr_t>(w.moments) + 2); }});
  const int count = expect_refused(
      call.work, all, which, [&](const ch_norm* work) { return call.run(*work); },
      [&] {
        call.contained(which);
        return call.untouched();
      });
  expect(call.run(call.work), CH_OK, which + " with a valid description");
  return count;
}

int bad_descriptions() {
  using W = ch_norm;
  const std::vector<Field> forward = {{"input", offsetof(W, input), true},
                                      {"output", offsetof(W, output), true},
                                      {"added", offsetof(W, added), false},
                                      {"weight", offsetof(W, weight), false},
                                      {"bias", offsetof(W, bias), false},
                                      {"sum", offsetof(W, sum), false},
                                      {"moments", offsetof(W, moments), false}};
  const std::vector<Field> backward = {{"sum", offsetof(W, sum), true},
                                       {"moments", offsetof(W, moments), true},
                                       {"grad_output", offsetof(W, grad_output), true},
                                       {"grad_sum", offsetof(W, grad_sum), true},
                                       {"weight", offsetof(W, weight), false},
                                       {"grad_output_second", offsetof(W, grad_output_second), false},
                                       {"grad_residual", offsetof(W, grad_residual), false},
                                       {"grad_input", offsetof(W, grad_input), false},
                                       {"grad_weight", offsetof(W, grad_weight), false},
                                       {"grad_bias", offsetof(W, grad_bias), false}};
  int count = 0;
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16}) {
    Random random(4);
    ForwardCall there(with_everything(dtype, CH_NORM_LAYER), random);
    BackwardCall back(with_everything(dtype, CH_NORM_LAYER), random);
    count += spoil_all(there, "norm", forward) + spoil_all(back, "norm backward", backward);
  }
  expect(ch_norm_forward(nullptr), CH_BAD_POINTER, "a norm of a null description");
  expect(ch_norm_backward(nullptr), CH_BAD_POINTER, "a norm gradient of a null description");
  return count;
}

}  // namespace

int norm_tests() {
  huge_values();
  containment();
  no_rows();
  return sets_agree() + every_size() + large_means() + bad_descriptions();
}

}  // namespace test
