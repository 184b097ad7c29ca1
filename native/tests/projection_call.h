// GEMMs of linear layers in plain values, drawn at random, each a function of its number; in guarded memory, described
// to the library, run, and compared.
#pragma once

#include <algorithm>

#include "activation_reference.h"
#include "result.h"

namespace test {

struct ProjectionCase {
  int dtype = CH_FLOAT32;
  bool left_transposed = false, right_transposed = false, has_bias = false, has_row_sums = false;  // counted: with row_sums
  int activation = CH_PLAIN, gate_kind = CH_GATE_OUTPUT, dropped = 0;
  bool has_gate = false, has_slopes = false;  // sloped: with slopes written
  uint64_t seed = 0;
  int64_t first_row = 0;  // dropout's number of row 0
  std::vector<int64_t> row_numbers;  // dropout's numbers of all rows, or none
  // Integers that float32 adds exactly: there is one correct answer, and no bound that could hide an error.
  bool integers = false;
  int64_t rows = 1, columns = 1;
  std::vector<int64_t> steps;         // of every term
  std::vector<Values> left, right;  // [rows, steps] and [steps, columns], contiguous, never transposed
  Values bias;                       // [columns], or empty
  Values gate, slope_gate;  // [rows, columns], or empty: the second for gated slopes

  int64_t all_steps() const {
    int64_t sum = 0;
    for (int64_t one : steps) sum += one;
    return sum;
  }
};

// Values that every dtype represents: eight bits, at several magnitudes.
inline double draw_value(Random& random, const ProjectionCase& c) {
  if (c.integers) return static_cast<double>(random.uniform(-8, 8));
  if (c.dtype == CH_FLOAT32) return static_cast<float>(2 * random.uniform() - 1);
  const int exponent = static_cast<int>(random.uniform(-10, -7));
  const double size = std::ldexp(static_cast<double>(random.uniform(128, 255)), exponent);
  return random.one_in(2) ? size : -size;
}

inline void draw_values(Random& random, ProjectionCase& c) {
  const auto fill = [&](Values& to, int64_t count) {
    to.resize(static_cast<size_t>(count));
    for (double& number : to) number = draw_value(random, c);
  };
  c.left.resize(c.steps.size()), c.right.resize(c.steps.size());
  for (size_t t = 0; t < c.steps.size(); ++t) {
    fill(c.left[t], c.rows * c.steps[t]);
    fill(c.right[t], c.steps[t] * c.columns);
  }
  if (c.has_bias) fill(c.bias, c.columns);
  if (c.has_gate) fill(c.gate, c.rows * c.columns);
  if (c.has_gate && c.has_slopes) fill(c.slope_gate, c.rows * c.columns);
}

// To the nearest value of a dtype, ties to even. Not for values that overflow or underflow.
inline double nearest(int dtype, double number) {
  int exponent = 0;
  std::frexp(number, &exponent);
  const int bits = dtype == CH_FLOAT32 ? 24 : dtype == CH_BFLOAT16 ? 8 : 11;
  return std::ldexp(std::nearbyint(std::ldexp(number, bits - exponent)), exponent - bits);
}

struct ProjectionExpected {
  Result output, row_sums, slope;
};

// The bound of a sum's error. float32 adds at most `chain` terms in sequence, and then the sums of such chains, of
// which each term has at least one; each addition is a rounding, and so may be the product and the bias. The bounds are
// those of reference.h.
inline double sum_error(const ProjectionCase& c, double sizes, double chain) {
  if (c.integers) return 0;
  const double steps = static_cast<double>(c.all_steps());
  const double roundings = std::fmin(steps, chain) + steps / chain + 2 * static_cast<double>(c.steps.size()) + 3;
  return 1.01 * roundings * std::ldexp(sizes, -24);
}

// The bound after rounding to the dtype. An exact integer has one correct answer.
inline double rounded_bound(const ProjectionCase& c, double number, double error) {
  if (c.integers && error == 0) return 0;
  if (c.dtype == CH_FLOAT32) return error;
  return error + std::ldexp(std::fabs(number) + error, c.dtype == CH_BFLOAT16 ? -8 : -11) + std::ldexp(1.0, -25);
}

// The output of the epilogue for a sum with an error of at most `error`.
struct EpilogueResult {
  Activated output, slope;
};

inline EpilogueResult epilogue_result(const ProjectionCase& c, size_t row, size_t column, double sum, double error) {
  const double factor = c.dropped > 0 ? 65536.0 / (65536 - c.dropped) : 1;
  if (c.has_gate) {
    const size_t place = row * static_cast<size_t>(c.columns) + column;
    const double gate = c.gate[place];
    // The product with a slope is rounded, and so is a factor that is not a power of two.
    const auto through = [&](double times) {
      return Activated{times * sum, c.integers ? 0 : std::fabs(times) * error + std::ldexp(std::fabs(times * sum), -22)};
    };
    const Activated slope = c.has_slopes ? through(c.slope_gate[place]) : Activated{0, 0};
    return {through(c.gate_kind == CH_GATE_SLOPE ? gate : gate <= 0 ? 0 : factor), slope};
  }
  EpilogueResult epilogue_result = {activated(c.activation, sum, error), slope_of(c.activation, sum, error)};
  if (c.dropped == 0) return epilogue_result;
  const int64_t number = c.row_numbers.empty() ? c.first_row + static_cast<int64_t>(row) : c.row_numbers[row];
  const bool keep = keeps(c.seed, c.dropped, number, static_cast<uint64_t>(column));
  for (Activated* one : {&epilogue_result.output, &epilogue_result.slope}) {
    const double off = one->error == 0 && c.integers ? 0 : factor * one->error + std::ldexp(std::fabs(factor * one->number), -22);
    *one = keep ? Activated{factor * one->number, off} : Activated{0, 0};
  }
  return epilogue_result;
}

inline ProjectionExpected expected(const ProjectionCase& c) {
  ProjectionExpected right;
  right.output.size(c.rows * c.columns), right.row_sums.size(c.has_row_sums ? c.rows : 0);
  right.slope.size(c.has_slopes ? c.rows * c.columns : 0);
  const size_t columns = static_cast<size_t>(c.columns);
  Values sums(columns), sizes(columns);
  for (size_t r = 0; r < static_cast<size_t>(c.rows); ++r) {
    double row_sum = 0, row_size = 0;
    for (size_t x = 0; x < columns; ++x) sums[x] = c.has_bias ? c.bias[x] : 0, sizes[x] = std::fabs(sums[x]);
    for (size_t t = 0; t < c.steps.size(); ++t) {
      const size_t steps = static_cast<size_t>(c.steps[t]);
      for (size_t s = 0; s < steps; ++s) {
        const double left = c.left[t][r * steps + s], size = std::fabs(left);
        const double* row = c.right[t].data() + s * columns;
        double* sum = sums.data();
        double* sized = sizes.data();
        for (size_t x = 0; x < columns; ++x) sum[x] += left * row[x];
        for (size_t x = 0; x < columns && !c.integers; ++x) sized[x] += size * std::fabs(row[x]);
        row_sum += left, row_size += size;
      }
    }
    for (size_t x = 0; x < columns; ++x) {
      const EpilogueResult sum_out = epilogue_result(c, r, x, sums[x], sum_error(c, sizes[x], 512));
      const auto set = [&](Result& to, const Activated& one) {
        const bool exact = c.integers && one.error == 0;
        to.number[r * columns + x] = exact ? nearest(c.dtype, one.number) : one.number;
        to.bound[r * columns + x] = rounded_bound(c, one.number, one.error);
      };
      set(right.output, sum_out.output);
      if (c.has_slopes) set(right.slope, sum_out.slope);
    }
    if (!c.has_row_sums) continue;
    right.row_sums.number[r] = c.integers ? nearest(c.dtype, row_sum) : row_sum;
    right.row_sums.bound[r] = rounded_bound(c, row_sum, sum_error(c, row_size, 1024));
  }
  return right;
}

class ProjectionCall {
 public:
  ProjectionCall(const ProjectionCase& of, Random& random) : c(of) {
    for (size_t t = 0; t < c.steps.size(); ++t) {
      left.push_back(buffer(random, c.rows, c.steps[t], c.left_transposed));
      right.push_back(buffer(random, c.steps[t], c.columns, c.right_transposed));
      put(left[t], c.left[t], c.left_transposed), put(right[t], c.right[t], c.right_transposed);
    }
    if (c.has_bias) bias = buffer(random, 1, c.columns, false), put(bias, c.bias, false);
    if (c.has_row_sums) row_sums = buffer(random, 1, c.rows, false);
    if (c.has_gate) gate = buffer(random, c.rows, c.columns, false), put(gate, c.gate, false);
    if (c.has_slopes) slope = buffer(random, c.rows, c.columns, false);
    if (c.has_gate && c.has_slopes) slope_gate = buffer(random, c.rows, c.columns, false), put(slope_gate, c.slope_gate, false);
    output = buffer(random, c.rows, c.columns, false);
    describe();
    for (Guarded* one : inputs()) one->save_original();
  }

  int run(int isa, int threads) {
    clear();
    ch_projection call = work;
    call.isa = isa, call.threads = threads;
    return ch_project(&call);
  }

  // The same by threads that stay awake.
  int run_in_team(int isa, int threads) {
    struct Call {
      ProjectionCall& call;
      int isa, threads, code;
    } one = {*this, isa, threads, CH_OK};
    const auto twice = [](void* of) {
      Call& it = *static_cast<Call*>(of);
      for (int time = 0; time < 2 && it.code == CH_OK; ++time) it.code = it.call.run(it.isa, it.threads);
    };
    ch_in_team(isa, threads, twice, &one);
    return one.code;
  }

  bool packable() const { return c.steps.size() == 1 && !c.left_transposed; }

  // The same with right packed before, whose own memory is then not read.
  int run_packed(int isa, int threads) {
    clear();
    ch_projection call = work;
    call.isa = isa, call.threads = threads;
    const size_t bytes = static_cast<size_t>(ch_panel_bytes(c.dtype, isa, c.steps[0], c.columns));
    // Of the size exactly, so that a sanitizer sees what is read beyond.
    std::vector<uint8_t> panels(bytes);
    call.output = panels.data();
    if (const int code = ch_pack(&call); code != CH_OK) return code;
    call.panels = panels.data();
    check(unpacks(call), "ch_unpack gives the bits of right, or its panels are wider");
    call.output = work.output;
    return ch_project(&call);
  }

  // Whether ch_unpack gives right's bits; sets that widen 16 bits have no way back.
  bool unpacks(ch_projection call) const {
    const size_t size = static_cast<size_t>(size_of(c.dtype)), steps = static_cast<size_t>(c.steps[0]);
    std::vector<uint8_t> unpacked(static_cast<size_t>(c.columns) * steps * size);
    const uint8_t* from = static_cast<const uint8_t*>(call.terms[0].right);
    const size_t stride = static_cast<size_t>(call.terms[0].right_row);
    call.right_transposed = 1, call.output = unpacked.data(), call.output_row = c.steps[0];
    if (const int code = ch_unpack(&call); code != CH_OK) return code == CH_BAD_OPTION && size == 2;
    for (size_t column = 0; column < static_cast<size_t>(c.columns); ++column) {
      for (size_t step = 0; step < steps; ++step) {
        const size_t place = c.right_transposed ? column * stride + step : step * stride + column;
        if (memcmp(&unpacked[(column * steps + step) * size], from + place * size, size) != 0) return false;
      }
    }
    return true;
  }

  // Whether the output has the bits that some rows alone give.
  bool has_rows(int64_t first, int64_t rows, int isa) const {
    const size_t size = static_cast<size_t>(size_of(c.dtype)), row_bytes = static_cast<size_t>(c.columns) * size;
    std::vector<uint8_t> part(static_cast<size_t>(rows) * row_bytes);
    ch_projection call = work;
    call.isa = isa, call.rows = rows, call.first_row = first, call.row_numbers = nullptr, call.output = part.data(), call.output_row = c.columns;
    call.terms[0].left = left[0].at(0, 0, first, 0);
    if (ch_project(&call) != CH_OK) return false;
    for (int64_t r = 0; r < rows; ++r)
      if (memcmp(part.data() + static_cast<size_t>(r) * row_bytes, output.at(0, 0, first + r, 0), row_bytes) != 0) return false;
    return true;
  }

  void compare_with(const ProjectionExpected& right_one, const std::string& name) const {
    compare(output, right_one.output, name + " output");
    if (c.has_row_sums) compare(row_sums, right_one.row_sums, name + " row_sums");
    if (c.has_slopes) compare(slope, right_one.slope, name + " slope");
  }

  std::vector<std::vector<uint8_t>> bits() const {
    std::vector<std::vector<uint8_t>> all_bits = {output.copy()};
    if (c.has_row_sums) all_bits.push_back(row_sums.copy());
    if (c.has_slopes) all_bits.push_back(slope.copy());
    return all_bits;
  }

  // Nothing was written outside the outputs, and nothing to the inputs.
  void margins(const std::string& name) {
    check(output.margins_intact(), name + ": wrote outside the output");
    if (c.has_row_sums) check(row_sums.margins_intact(), name + ": wrote outside row_sums");
    if (c.has_slopes) check(slope.margins_intact(), name + ": wrote outside the slopes");
    for (const Guarded* one : inputs()) check(one->unchanged(), name + ": wrote to an input");
  }

  void clear() {
    output.clear();
    if (c.has_row_sums) row_sums.clear();
    if (c.has_slopes) slope.clear();
  }
  bool untouched() const {
    return output.untouched() && (!c.has_row_sums || row_sums.untouched()) && (!c.has_slopes || slope.untouched());
  }

  const ProjectionCase& c;
  ch_projection work{};
  std::vector<Guarded> left, right;
  Guarded bias, gate, slope, slope_gate, output, row_sums;

 private:
  Guarded buffer(Random& random, int64_t rows, int64_t columns, bool transposed) const {
    if (transposed) std::swap(rows, columns);
    return Guarded::make(random, c.dtype, size_of(c.dtype), 1, 1, rows, columns, random.one_in(3));
  }

  void put(Guarded& to, const Values& from, bool transposed) const {
    const int64_t rows = transposed ? to.last : to.count[2], columns = transposed ? to.count[2] : to.last;
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t x = 0; x < columns; ++x)
        encode(c.dtype, from[static_cast<size_t>(r * columns + x)], transposed ? to.at(0, 0, x, r) : to.at(0, 0, r, x));
  }

  void describe() {
    work.size = sizeof(ch_projection), work.abi = CH_ABI, work.isa = -1, work.threads = 1, work.dtype = c.dtype;
    work.num_terms = static_cast<int32_t>(c.steps.size()), work.rows = c.rows, work.columns = c.columns;
    work.left_transposed = c.left_transposed, work.right_transposed = c.right_transposed;
    for (size_t t = 0; t < c.steps.size(); ++t)
      work.terms[t] = {left[t].data(), right[t].data(), left[t].stride[2], right[t].stride[2], c.steps[t]};
    work.activation = c.activation, work.dropped = c.dropped, work.gate_kind = c.gate_kind;
    work.seed = c.seed, work.first_row = c.first_row, work.row_numbers = pointer_to(c.row_numbers);
    work.gate = gate.data(), work.gate_row = c.has_gate ? gate.stride[2] : 0;
    work.slope = slope.data(), work.slope_row = c.has_slopes ? slope.stride[2] : 0;
    work.slope_gate = slope_gate.data(), work.slope_gate_row = c.has_gate && c.has_slopes ? slope_gate.stride[2] : 0;
    work.bias = bias.data(), work.row_sums = row_sums.data();
    work.output = output.data(), work.output_row = output.stride[2];
  }

  std::vector<Guarded*> inputs() {
    std::vector<Guarded*> all;
    for (Guarded& one : left) all.push_back(&one);
    for (Guarded& one : right) all.push_back(&one);
    if (c.has_bias) all.push_back(&bias);
    if (c.has_gate) all.push_back(&gate);
    if (c.has_gate && c.has_slopes) all.push_back(&slope_gate);
    return all;
  }
};

// Sizes at which the kernels change: vectors, panels of 8, 16 and 64 columns, 6 rows at a time and 72 in a block, sums
// of 512 steps, and the packing limits: 4096 operands of a row, or 1024 of a transposed one, each of which is two steps
// with bf16 dot-product instructions.
inline ProjectionCase draw_projection(uint64_t number) {
  using Sizes = std::vector<int64_t>;
  static const Sizes few = {1, 2, 3, 5, 6, 7}, primes = {1, 2, 11, 23, 37, 53, 71, 97, 131};
  static const Sizes rows = {5, 6, 7, 11, 13, 71, 72, 73, 77}, many_rows = {143, 145, 289, 359, 361, 500};
  static const Sizes columns = {7, 8, 9, 15, 16, 17, 31, 33, 47, 49, 63, 64, 65, 127, 129};
  static const Sizes many_columns = {191, 193, 257, 320};
  static const Sizes short_steps = {1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 65}, deep = {511, 512, 513, 1023, 1024, 1025};
  static const Sizes transposed_groups = {1024, 1025, 2047, 2048, 2049, 3075, 4099};
  static const Sizes groups = {4095, 4096, 4097, 5001, 8191, 8192, 8193, 12289};
  static const Sizes parts = {0, 1, 7, 16, 100, 511, 512, 513};
  static const Sizes long_parts = {0, 5, 1000, 1024, 2048, 2049, 3000, 4096};
  struct Shape {
    const Sizes &rows, &columns, &steps;
    int64_t least_terms, most_terms;
  };
  static const Shape shapes[] = {
      {few, few, few, 1, 4},         {rows, columns, short_steps, 1, 1}, {rows, columns, short_steps, 2, 4},
      {few, columns, deep, 1, 1},    {few, columns, transposed_groups, 1, 1}, {few, few, groups, 1, 1},
      {rows, columns, parts, 1, 4},  {few, few, long_parts, 2, 4},       {many_rows, few, primes, 1, 1},
      {few, many_columns, primes, 1, 2},     {primes, primes, primes, 1, 1},
  };
  Random random(number + 501);
  ProjectionCase c;
  // In sequence, so that every shape meets every dtype, plain and transposed, in integers and others.
  const uint64_t form = number % 24;
  c.dtype = static_cast<int>(form % 3), c.integers = form / 12;
  c.left_transposed = form / 3 % 2, c.right_transposed = form / 6 % 2;
  const Shape& shape = shapes[number / 24 % (sizeof(shapes) / sizeof(*shapes))];
  c.rows = random.pick(shape.rows), c.columns = random.pick(shape.columns);
  const int64_t terms = random.uniform(shape.least_terms, shape.most_terms);
  for (int64_t t = 0; t < terms; ++t) c.steps.push_back(random.pick(shape.steps));
  c.has_gate = random.one_in(3), c.gate_kind = random.one_in(2) ? CH_GATE_SLOPE : CH_GATE_OUTPUT;
  if (!c.has_gate) c.activation = static_cast<int>(random.uniform(CH_PLAIN, CH_QUICK_GELU));
  c.has_slopes = random.one_in(2) && (!c.has_gate || c.gate_kind == CH_GATE_SLOPE);
  const bool may_drop = !c.has_gate || c.gate_kind == CH_GATE_OUTPUT;
  // Dropping half doubles the rest, which is exact.
  if (may_drop && random.one_in(2)) c.dropped = c.integers ? 32768 : static_cast<int>(random.uniform(1, 65535));
  c.seed = static_cast<uint64_t>(random.uniform(0, INT64_MAX / 2)) * 2 + random.one_in(2);
  c.has_bias = random.one_in(2), c.has_row_sums = c.left_transposed && terms == 1 && !random.one_in(4);
  draw_values(random, c);
  c.first_row = draw_first_row(random), c.row_numbers = draw_row_numbers(random, c.rows);
  return c;
}

}  // namespace test
