// Linear layers of integers on every instruction set, for any sizes, groups, dtypes and numbers of threads, against the
// formula in double; rows alone and among others; and invalid descriptions.
#include <cfloat>

#include "activation_reference.h"
#include "program.h"
#include "spoiled.h"

namespace test {
namespace {

struct QuantizedCase {
  int dtype = CH_FLOAT32, bits = 8, rounding = CH_ROUND_NONE;
  int64_t rows = 5, columns = 7, steps = 64, group = 64;
  bool has_offset = false, has_bias = true;
  int activation = CH_PLAIN;
  bool has_gate = false;
};

struct QuantizedCall {
  Guarded x, output, bias, gate;
  std::vector<uint8_t> weight;
  std::vector<float> scale, offset;
  ch_quantized work{};

  QuantizedCall(const QuantizedCase& c, Random& random) : weight(static_cast<size_t>(c.columns * c.steps * c.bits / 8)) {
    const int64_t groups = c.steps > 0 ? c.steps / c.group : 0;
    x = Guarded::make(random, c.dtype, size_of(c.dtype), 1, 1, c.rows, c.steps, false);
    output = Guarded::make(random, c.dtype, size_of(c.dtype), 1, 1, c.rows, c.columns, false);
    bias = Guarded::make(random, c.dtype, size_of(c.dtype), 1, 1, 1, c.columns, true);
    gate = Guarded::make(random, c.dtype, size_of(c.dtype), 1, 1, c.rows, c.columns, false);
    for (int64_t r = 0; r < c.rows; ++r)
      for (int64_t k = 0; k < c.columns; ++k) encode(c.dtype, static_cast<double>(random.uniform(-8, 8)) / 4, gate.at(0, 0, r, k));
    for (int64_t r = 0; r < c.rows; ++r)
      for (int64_t s = 0; s < c.steps; ++s)
        encode(c.dtype, static_cast<double>(random.uniform(-100, 100)) / 64 * static_cast<double>(1 + r % 3), x.at(0, 0, r, s));
    for (int64_t k = 0; k < c.columns; ++k) encode(c.dtype, static_cast<double>(random.uniform(-8, 8)) / 4, bias.at(0, 0, 0, k));
    for (uint8_t& byte : weight) byte = static_cast<uint8_t>(random.below(256));
    for (int64_t k = 0; k < c.columns * groups; ++k) {
      scale.push_back(static_cast<float>(0.001 + random.uniform() / 64));
      offset.push_back(static_cast<float>(random.uniform() / 8 - 0.06));
    }
    work.size = sizeof(work), work.abi = CH_ABI, work.isa = -1, work.threads = 1, work.dtype = c.dtype;
    work.bits = c.bits, work.rounding = c.rounding, work.low = -128, work.high = 127;
    work.rows = c.rows, work.columns = c.columns, work.steps = c.steps, work.group = c.group;
    work.x = x.data(), work.x_row = x.view().row, work.weight = weight.data(), work.weight_row = c.steps * c.bits / 8;
    work.scale = scale.data(), work.offset = c.has_offset ? offset.data() : nullptr;
    work.bias = c.has_bias ? bias.data() : nullptr;
    work.activation = c.activation, work.gate = c.has_gate ? gate.data() : nullptr, work.gate_row = gate.view().row;
    work.output = output.data(), work.output_row = output.view().row;
    x.save_original(), gate.save_original();
  }

  int run(int isa, int threads, int64_t rows) {
    output.clear();
    work.isa = isa, work.threads = threads, work.rows = rows;
    return ch_multiply_quantized(&work, 1);
  }

  // The same from panels, with nothing in the place of the weight.
  int run_packed(int isa, int threads) {
    std::vector<uint32_t> panels(static_cast<size_t>(ch_quantized_panel_bytes(isa, work.steps, work.columns)) / 4 + 1, 0x7f7f7f7f);
    ch_quantized packing = work;
    packing.isa = isa, packing.threads = threads, packing.output = panels.data();
    if (const int code = ch_pack_quantized(&packing); code != CH_OK) return code;
    check(panels.back() == 0x7f7f7f7f, "packing wrote beyond the panels");
    output.clear();
    ch_quantized packed = work;
    packed.isa = isa, packed.threads = threads, packed.panels = panels.data(), packed.weight = nullptr;
    return ch_multiply_quantized(&packed, 1);
  }

  double code(int64_t column, int64_t step) const {
    const uint8_t* row = weight.data() + column * work.weight_row;
    return work.bits == 8 ? static_cast<double>(static_cast<int8_t>(row[step])) : static_cast<double>(row[step / 2] >> step % 2 * 4 & 15);
  }
  double value(int64_t column, int64_t step) const {
    const size_t place = static_cast<size_t>(column * (work.steps / work.group) + step / work.group);
    return scale[place] * code(column, step) + (work.offset == nullptr ? 0.0 : static_cast<double>(offset[place]));
  }

  // The value that an element of x stands for; symmetric rounding only.
  std::vector<double> row_of(int64_t r) const {
    std::vector<double> row;
    double largest = 0;
    for (int64_t s = 0; s < work.steps; ++s) row.push_back(x.get(0, 0, r, s)), largest = std::fmax(largest, std::fabs(row.back()));
    if (work.rounding == CH_ROUND_NONE) return row;
    // Rounded to the dtype as the kernels do; ties of bfloat16 do not occur among these values.
    float unit = static_cast<float>(largest) / 127.5f;
    if (work.dtype == CH_BFLOAT16) {
      uint32_t word;
      std::memcpy(&word, &unit, 4);
      word = (word + 0x7fff + (word >> 16 & 1)) & 0xffff0000u;
      std::memcpy(&unit, &word, 4);
    } else if (work.dtype == CH_FLOAT16) {
      const int exponent = std::ilogb(unit);
      unit = static_cast<float>(std::ldexp(std::nearbyint(std::ldexp(static_cast<double>(unit), 10 - exponent)), exponent - 10));
    }
    unit = std::fmax(unit, FLT_EPSILON);
    const float inverse = 1.0f / unit;
    for (double& each : row) {
      const double rounded = std::nearbyint(static_cast<double>(static_cast<float>(each) * inverse));
      each = std::fmax(-128.0, std::fmin(127.0, rounded)) * unit;
    }
    return row;
  }

  void compare_with_formula(int64_t rows, const std::string& name) const {
    // The panels of sets with bf16 dot products have weights of groups in bfloat16.
    const double unit = work.dtype == CH_FLOAT32 ? FLT_EPSILON : work.dtype == CH_BFLOAT16 ? 0x1p-8 : 0x1p-10;
    const bool rounds_weight = work.dtype == CH_BFLOAT16 && work.rounding == CH_ROUND_NONE;
    for (int64_t r = 0; r < rows; ++r) {
      const std::vector<double> row = row_of(r);
      for (int64_t k = 0; k < work.columns; ++k) {
        double sum = 0, size = 0;
        for (int64_t s = 0; s < work.steps; ++s) {
          const double product = row[static_cast<size_t>(s)] * value(k, s);
          sum += product, size += std::fabs(product);
        }
        if (work.bias != nullptr) sum += bias.get(0, 0, 0, k), size += std::fabs(bias.get(0, 0, 0, k));
        double error_of_sum = 24 * FLT_EPSILON * size + 1e-30;
        if (rounds_weight) error_of_sum += 0x1p-8 * size / std::sqrt(static_cast<double>(work.steps) / 8 + 1);
        Activated result = activated(work.activation, sum, error_of_sum);
        if (work.gate != nullptr) {
          const double factor = gate.get(0, 0, r, k);
          result = {sum * factor, error_of_sum * std::fabs(factor)};
        }
        const double bound = unit * std::fabs(result.number) + result.error + 1e-30;
        const double error = std::fabs(output.get(0, 0, r, k) - result.number);
        largest_ratio = std::fmax(largest_ratio, error / bound);
        check(error <= bound, name + ": " + std::to_string(output.get(0, 0, r, k)) + " for " + std::to_string(result.number));
      }
    }
    check(x.unchanged() && gate.unchanged(), name + ": x or the gate was written");
    if (rows == x.count[2]) check(output.margins_intact(), name + ": wrote outside the output");
  }

  std::vector<uint8_t> row_bytes(int64_t r) const {
    std::vector<uint8_t> bytes(static_cast<size_t>(work.columns) * size_of(work.dtype));
    if (!bytes.empty()) std::memcpy(bytes.data(), output.at(0, 0, r, 0), bytes.size());
    return bytes;
  }
};

const std::vector<QuantizedCase>& cases() {
  static const std::vector<QuantizedCase> all = [] {
    static const int64_t sizes[][4] = {
        // rows, columns, steps, group
        {1, 1, 1, 1},       {3, 5, 64, 64},    {17, 33, 70, 70},     {2, 40, 256, 64},  {9, 19, 1030, 1030}, {1, 70, 1024, 128},
        {13, 66, 96, 32},   {0, 3, 8, 8},      {4, 0, 8, 8},         {5, 4, 60, 20},    {6, 130, 544, 544},  {300, 17, 128, 32},
        {8, 9, 2112, 2112}, {2, 3, 4100, 4100}, {300, 70, 64, 64},  {6, 21, 1056, 32},  {7, 5, 320, 64},
        {8, 11, 288, 288},  {9, 66, 4200, 4200}};
    std::vector<QuantizedCase> made;
    Random random(77);
    for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16})
      for (const auto& s : sizes)
        for (int bits : {8, 4}) {
          if (bits == 4 && s[2] % 2 != 0) continue;
          QuantizedCase c;
          c.dtype = dtype, c.bits = bits, c.rows = s[0], c.columns = s[1], c.steps = s[2], c.group = s[3];
          c.has_offset = random.one_in(2), c.has_bias = random.one_in(2), c.has_gate = random.one_in(3);
          if (!c.has_gate) c.activation = static_cast<int>(random.below(CH_QUICK_GELU + 1));
          made.push_back(c);
          if (bits == 8 && c.group == c.steps) c.rounding = CH_ROUND_SYMMETRIC, c.has_offset = false, made.push_back(c);
        }
    return made;
  }();
  return all;
}

std::string describe(const QuantizedCase& c, int isa, int threads) {
  return "quantized, dtype " + std::to_string(c.dtype) + ", bits " + std::to_string(c.bits) + ", rounding " +
         std::to_string(c.rounding) + ", activation " + std::to_string(c.activation) + (c.has_gate ? ", gated, " : ", ") + std::to_string(c.rows) + " x " + std::to_string(c.columns) + " x " +
         std::to_string(c.steps) + " in " + std::to_string(c.group) + ", " + ch_isa_name(isa) + ", threads " + std::to_string(threads);
}

// The formula, and the same bits on any number of threads.
void one_case(uint64_t number) {
  const QuantizedCase& c = cases()[number];
  Random random(number + 3);
  QuantizedCall call(c, random);
  for (int isa : usable_sets()) {
    std::vector<uint8_t> one;
    for (int threads : {1, 2, 5}) {
      const std::string name = describe(c, isa, threads);
      expect(call.run(isa, threads, c.rows), CH_OK, name);
      if (c.steps > 0) call.compare_with_formula(c.rows, name);
      if (threads == 1) one = call.output.copy();
      check(call.output.copy() == one, name + ": bits differ from those with one thread");
      if (c.rounding == CH_ROUND_NONE || c.rows == 0) continue;
      expect(call.run_packed(isa, threads), CH_OK, name + ", packed");
      check(call.output.copy() == one, name + ": bits of panels differ from those of the weight");
    }
  }
}

// In invariant mode a row has the same bits alone and among any others; with rounding, always.
int rows_among_others() {
  int count = 0;
  for (uint64_t number = 0; number < cases().size(); ++number) {
    const QuantizedCase& c = cases()[number];
    if (c.rows < 2) continue;
    Random random(number + 3);
    QuantizedCall call(c, random);
    ch_set_invariant(c.rounding == CH_ROUND_NONE ? 1 : 0);
    for (int isa : usable_sets()) {
      expect(call.run(isa, 2, c.rows), CH_OK, describe(c, isa, 2));
      std::vector<std::vector<uint8_t>> together;
      for (int64_t r = 0; r < c.rows; ++r) together.push_back(call.row_bytes(r));
      for (int64_t rows : {1, 2, 7}) {
        if (rows > c.rows) continue;
        expect(call.run(isa, 2, rows), CH_OK, describe(c, isa, 2));
        for (int64_t r = 0; r < rows; ++r, ++count)
          check(call.row_bytes(r) == together[static_cast<size_t>(r)], describe(c, isa, 2) + ": a row of " + std::to_string(rows) + " differs");
      }
    }
    ch_set_invariant(0);
  }
  return count;
}

// Rows in units, each of one thread's calls, have the bits of all rows, within a team and outside of one.
int shared_units() {
  QuantizedCase c;
  c.rounding = CH_ROUND_SYMMETRIC, c.rows = 40, c.columns = 70;
  Random random(5);
  QuantizedCall call(c, random);
  for (int isa : usable_sets()) {
    expect(call.run(isa, 1, c.rows), CH_OK, "all rows");
    const std::vector<uint8_t> all = call.output.copy();
    struct Shared {
      ch_quantized work;
      int isa, threads, codes[8], calls[8];
    } shared{call.work, isa, 1, {}, {}};
    const auto unit_of = [](void* of, int64_t unit) {
      Shared& shared = *static_cast<Shared*>(of);
      ch_quantized part = shared.work;
      const int64_t size = shared.work.dtype == CH_FLOAT32 ? 4 : 2;
      part.isa = shared.isa, part.threads = 1, part.rows = 5;
      part.x = static_cast<const char*>(part.x) + unit * 5 * part.x_row * size;
      part.output = static_cast<char*>(part.output) + unit * 5 * part.output_row * size;
      shared.codes[unit] = ch_multiply_quantized(&part, 1), ++shared.calls[unit];
    };
    shared.work.gate = nullptr;
    for (int threads : {1, 2, 5, 1000000}) {
      for (bool in_team : {false, true}) {
        shared.threads = threads;
        std::fill(std::begin(shared.calls), std::end(shared.calls), 0);
        call.output.clear();
        struct Run {
          Shared& shared;
          void (*unit)(void* of, int64_t unit);
        } run{shared, unit_of};
        const auto share = [](void* of) {
          const Run& run = *static_cast<Run*>(of);
          ch_share(run.shared.isa, run.shared.threads, 8, run.unit, &run.shared);
        };
        if (in_team) ch_in_team(isa, 3, share, &run);
        else share(&run);
        const std::string name = "units on " + std::string(ch_isa_name(isa)) + ", threads " + std::to_string(threads);
        for (int unit = 0; unit < 8; ++unit)
          check(shared.codes[unit] == CH_OK && shared.calls[unit] == 1, name + ": a unit was left out, or called again");
        check(call.output.copy() == all, name + ": bits differ from those of all rows");
      }
    }
  }
  return 8 * static_cast<int>(usable_sets().size());
}

// Layers that read the same rows have the bits of each by itself; one reads the output of another as its gate.
int layers_of_the_same_rows() {
  int count = 0;
  for (int rounding : {CH_ROUND_SYMMETRIC, CH_ROUND_ASYMMETRIC, CH_ROUND_TENSOR})
    for (int64_t rows : {3, 40}) {
      QuantizedCase c;
      c.rounding = rounding, c.rows = rows, c.columns = 70;
      Random random(6);
      QuantizedCall first(c, random), second(c, random), third(c, random);
      for (QuantizedCall* each : {&second, &third}) each->work.x = first.work.x, each->work.x_row = first.work.x_row;
      second.work.gate = first.work.output, second.work.gate_row = first.work.output_row;
      for (int isa : usable_sets()) {
        const std::string name = "layers of the same rows on " + std::string(ch_isa_name(isa));
        std::vector<std::vector<uint8_t>> alone;
        for (QuantizedCall* each : {&first, &second, &third}) expect(each->run(isa, 1, rows), CH_OK, name), alone.push_back(each->output.copy());
        for (int threads : {1, 3}) {
          ch_quantized layers[] = {first.work, second.work, third.work};
          for (QuantizedCall* each : {&first, &second, &third}) each->output.clear();
          for (ch_quantized& each : layers) each.isa = isa, each.threads = threads;
          expect(ch_multiply_quantized(layers, 3), CH_OK, name);
          check(first.output.copy() == alone[0] && second.output.copy() == alone[1] && third.output.copy() == alone[2], name + ": other bits");
          ++count;
        }
      }
      ch_quantized layers[] = {first.work, third.work};
      for (ch_quantized& each : layers) each.isa = -1, each.threads = 1, each.rows = rows;
      layers[1].low = -127;
      expect(ch_multiply_quantized(layers, 2), CH_BAD_OPTION, "layers of other ranges");
      layers[1].low = layers[0].low, layers[1].rounding = layers[0].rounding == CH_ROUND_SYMMETRIC ? CH_ROUND_ASYMMETRIC : CH_ROUND_SYMMETRIC;
      expect(ch_multiply_quantized(layers, 2), CH_BAD_OPTION, "layers of other roundings");
      layers[1] = layers[0], layers[1].x = third.x.data();
      expect(ch_multiply_quantized(layers, 2), CH_BAD_OPTION, "layers of other rows");
      layers[0].rounding = layers[1].rounding = CH_ROUND_NONE, layers[1].x = layers[0].x;
      expect(ch_multiply_quantized(layers, 2), CH_BAD_OPTION, "layers that do not round");
      expect(ch_multiply_quantized(layers, 0), CH_BAD_SHAPE, "no layers");
    }
  return count;
}

int bad_descriptions() {
  using W = ch_quantized;
  const std::vector<Bad<W>> all = spoiled<W>({
      {"dtype", CH_BAD_DTYPE, [](W& w) { w.dtype = 3; }},
      {"bits", CH_BAD_OPTION, [](W& w) { w.bits = 3; }},
      {"negative rows", CH_BAD_SHAPE, [](W& w) { w.rows = -1; }},
      {"negative columns", CH_BAD_SHAPE, [](W& w) { w.columns = -1; }},
      {"negative steps", CH_BAD_SHAPE, [](W& w) { w.steps = -2; }},
      {"huge steps", CH_BAD_SHAPE, [](W& w) { w.steps = INT64_MAX; }},
      {"counts that overflow", CH_BAD_SHAPE, [](W& w) { w.rows = w.columns = INT32_MAX; }},
      {"a group of none", CH_BAD_SHAPE, [](W& w) { w.group = 0; }},
      {"a group that does not divide", CH_BAD_SHAPE, [](W& w) { w.group = 3; }},
      {"half a byte", CH_BAD_SHAPE, [](W& w) { w.bits = 4, w.steps = w.group = 7; }},
      {"rounding 4", CH_BAD_OPTION, [](W& w) { w.rounding = 4; }},
      {"rounding -1", CH_BAD_OPTION, [](W& w) { w.rounding = -1; }},
      {"rounding with offsets", CH_BAD_OPTION, [](W& w) { w.rounding = 1; }},
      {"rounding with 4 bits", CH_BAD_OPTION, [](W& w) { w.rounding = 1, w.offset = nullptr, w.bits = 4; }},
      {"rounding with groups", CH_BAD_OPTION, [](W& w) { w.rounding = 1, w.offset = nullptr, w.group /= 2; }},
      {"a range of 9 bits", CH_BAD_OPTION, [](W& w) { w.rounding = 1, w.offset = nullptr, w.low = -129; }},
      {"an empty range", CH_BAD_OPTION, [](W& w) { w.rounding = 1, w.offset = nullptr, w.low = w.high; }},
      {"activation 6", CH_BAD_OPTION, [](W& w) { w.activation = 6; }},
      {"activation -1", CH_BAD_OPTION, [](W& w) { w.activation = -1; }},
      {"a gate with an activation", CH_BAD_OPTION, [](W& w) { w.gate = w.x, w.gate_row = w.columns, w.activation = CH_SILU; }},
      {"an odd gate", CH_BAD_POINTER, [](W& w) { w.gate = w.x, w.gate_row = w.columns, make_odd(w.gate); }},
      {"a negative stride of the gate", CH_BAD_STRIDE, [](W& w) { w.gate = w.x, w.gate_row = -8; }},
      {"sums beyond 32 bits", CH_BAD_SHAPE, [](W& w) { w.rounding = 1, w.offset = nullptr, w.steps = w.group = 65536; }},
      {"no x", CH_BAD_POINTER, [](W& w) { w.x = nullptr; }},
      {"no weight", CH_BAD_POINTER, [](W& w) { w.weight = nullptr; }},
      {"no scale", CH_BAD_POINTER, [](W& w) { w.scale = nullptr; }},
      {"no output", CH_BAD_POINTER, [](W& w) { w.output = nullptr; }},
      {"odd scale", CH_BAD_POINTER, [](W& w) { w.scale = reinterpret_cast<const float*>(reinterpret_cast<uintptr_t>(w.scale) + 1); }},
      {"odd output", CH_BAD_POINTER, [](W& w) { make_odd(w.output); }},
      {"a negative stride of x", CH_BAD_STRIDE, [](W& w) { w.x_row = -8; }},
      {"a negative stride of the weight", CH_BAD_STRIDE, [](W& w) { w.weight_row = -8; }},
      {"a huge stride of the weight", CH_BAD_STRIDE, [](W& w) { w.weight_row = INT64_MAX; }},
      {"panels without rounding", CH_BAD_OPTION, [](W& w) { w.panels = w.weight; }},
      {"odd panels", CH_BAD_POINTER, [](W& w) { w.rounding = 1, w.offset = nullptr, w.panels = w.x, make_odd(w.panels); }},
      {"rows of the output that overlap", CH_BAD_STRIDE, [](W& w) { w.output_row = w.columns - 1; }},
  });
  Random random(4);
  QuantizedCase c;
  c.has_offset = true;
  QuantizedCall call(c, random);
  const auto multiply = [](const W* work) { return ch_multiply_quantized(work, 1); };
  const int count = expect_refused(call.work, all, "quantized", multiply, [&] { return call.output.untouched(); });
  expect(ch_multiply_quantized(nullptr, 1), CH_BAD_POINTER, "a null description");
  const std::vector<Bad<W>> unpackable = spoiled<W>({
      {"no rounding", CH_BAD_OPTION, [](W& w) { w.rounding = 0; }},
      {"4 bits", CH_BAD_OPTION, [](W& w) { w.bits = 4; }},
      {"panels", CH_BAD_OPTION, [](W& w) { w.panels = w.weight; }},
      {"no weight", CH_BAD_POINTER, [](W& w) { w.weight = nullptr; }},
      {"no output", CH_BAD_POINTER, [](W& w) { w.output = nullptr; }},
      {"negative steps", CH_BAD_SHAPE, [](W& w) { w.steps = -2; }},
      {"a negative stride of the weight", CH_BAD_STRIDE, [](W& w) { w.weight_row = -8; }},
  });
  call.work.rounding = CH_ROUND_SYMMETRIC, call.work.offset = nullptr;
  expect_refused(call.work, unpackable, "packing integers", ch_pack_quantized, [&] { return call.output.untouched(); });
  expect(ch_pack_quantized(nullptr), CH_BAD_POINTER, "a null description");
  check(ch_quantized_panel_bytes(-2, 8, 8) == 0 && ch_quantized_panel_bytes(-1, -1, 8) == 0 &&
            ch_quantized_panel_bytes(-1, 8, INT64_MAX) == 0, "bytes of panels out of range");
  return count + static_cast<int>(unpackable.size());
}

}  // namespace
}  // namespace test

int main(int arguments, char** argument) {
  const test::Program program = {"quantized", 0, test::cases().size(), test::one_case, {
      {"among-others", test::rows_among_others},
      {"shared", test::shared_units},
      {"same-rows", test::layers_of_the_same_rows},
      {"invalid", test::bad_descriptions},
  }};
  return test::run_program(program, arguments, argument);
}
