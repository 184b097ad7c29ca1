// Dropout of activations against its definition, with every instruction set and several threads, and invalid
// descriptions.
#include "activation_reference.h"
#include "spoiled.h"

namespace test {

namespace {

struct DropoutCall {
  Guarded input, added, output;
  std::vector<int64_t> numbers;
  ch_dropout work{};

  DropoutCall(Random& random, int dtype, int64_t rows, int64_t columns, bool adds) {
    const int64_t count = rows * columns;
    const auto line = [&] { return Guarded::make(random, dtype, size_of(dtype), 1, 1, 1, count, false); };
    input = line(), output = line();
    for (int64_t i = 0; i < count; ++i) encode(dtype, draw(random), input.at(0, 0, 0, i));
    if (adds) {
      added = line();
      for (int64_t i = 0; i < count; ++i) encode(dtype, draw(random), added.at(0, 0, 0, i));
    }
    work.size = sizeof(work), work.abi = CH_ABI, work.isa = -1, work.threads = 1, work.dtype = dtype;
    work.dropped = static_cast<int32_t>(random.uniform(0, 65535));
    work.seed = static_cast<uint64_t>(random.uniform(0, INT64_MAX / 2)) * 2 + random.one_in(2);
    work.first_row = draw_first_row(random);
    numbers = draw_row_numbers(random, rows), work.row_numbers = pointer_to(numbers);
    work.rows = rows, work.columns = columns, work.input = input.data(), work.added = added.data(), work.output = output.data();
    input.save_original();
    if (adds) added.save_original();
  }

  // Three bits: every dtype represents them and their sums.
  static double draw(Random& random) { return static_cast<double>(random.uniform(-8, 8)) / 4; }
};

void compare(const DropoutCall& call, const std::string& name) {
  const ch_dropout& w = call.work;
  const double factor = 65536.0 / (65536 - w.dropped);
  const double unit = w.dtype == CH_FLOAT32 ? 0x1p-24 : w.dtype == CH_BFLOAT16 ? 0x1p-8 : 0x1p-11;
  for (int64_t i = 0; i < w.rows * w.columns; ++i) {
    const bool keep = keeps(w.seed, w.dropped, row_number(w, i / w.columns), static_cast<uint64_t>(i % w.columns));
    const double input = call.input.get(0, 0, 0, i), added = w.added == nullptr ? 0 : call.added.get(0, 0, 0, i);
    const double right = (keep ? input * factor : 0) + added, got = call.output.get(0, 0, 0, i);
    // The factor, the product and the sum are rounded in float32, and the result once more to its dtype.
    const double bound = keep ? 0x1p-22 * (std::fabs(input * factor) + std::fabs(added)) + unit * std::fabs(right) : 0;
    // float16 overflows above.
    if (w.dtype == CH_FLOAT16 && std::fabs(right) > 65000) continue;
    if (std::fabs(got - right) <= bound) continue;
    return fail(name + " [" + std::to_string(i) + "] is " + std::to_string(got) + ", not " + std::to_string(right));
  }
}

int every_size() {
  static const int64_t sizes[][2] = {{1, 0}, {0, 9}, {1, 1}, {1, 15}, {1, 127}, {1, 128}, {7, 129}, {1, 1000},
                                     {1, 16384}, {2, 16385}, {1, 70001}, {700, 96}, {301, 1}, {129, 256}};
  int cases = 0;
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16})
    for (const auto& size : sizes)
      for (bool adds : {false, true}) {
        Random random(static_cast<uint64_t>(++cases));
        DropoutCall call(random, dtype, size[0], size[1], adds);
        for (int isa : usable_sets()) {
          std::vector<uint8_t> bits;
          for (int threads : {1, 2, 5}) {
            const std::string name = "dropout " + std::to_string(dtype) + " of " + std::to_string(size[0]) + "x" + std::to_string(size[1]) +
                                     (adds ? " with residual, " : ", ") + ch_isa_name(isa) + ", threads " +
                                     std::to_string(threads);
            call.output.clear();
            call.work.isa = isa, call.work.threads = threads;
            expect(ch_drop(&call.work), CH_OK, name);
            if (threads == 1) compare(call, name), bits = call.output.copy();
            check(call.output.copy() == bits, name + ": bits differ from those with one thread");
            check(call.output.margins_intact(), name + ": wrote outside the output");
            check(call.input.unchanged() && (!adds || call.added.unchanged()), name + ": wrote to an input");
          }
        }
      }
  return cases;
}

// A dropped element is 0, even if it was NaN or infinity.
void contains() {
  Random random(3);
  DropoutCall call(random, CH_FLOAT32, 1, 1000, false);
  call.work.dropped = 32768;
  for (int64_t i = 0; i < 1000; ++i)
    encode(CH_FLOAT32, static_cast<double>(i % 2 ? NAN : INFINITY), call.input.at(0, 0, 0, i));
  for (int isa : usable_sets()) {
    call.work.isa = isa;
    expect(ch_drop(&call.work), CH_OK, "dropout of NaN");
    for (int64_t i = 0; i < 1000; ++i) {
      const double got = call.output.get(0, 0, 0, i);
      const bool keep = keeps(call.work.seed, 32768, row_number(call.work, 0), static_cast<uint64_t>(i));
      check(keep ? !std::isfinite(got) : got == 0, "NaN or infinity is not dropped at " + std::to_string(i));
    }
  }
}

int bad_descriptions() {
  using W = ch_dropout;
  const std::vector<Bad<W>> all = spoiled<W>({
      {"dtype", CH_BAD_DTYPE, [](W& w) { w.dtype = 3; }},
      {"negative rows", CH_BAD_SHAPE, [](W& w) { w.rows = -1; }},
      {"negative columns", CH_BAD_SHAPE, [](W& w) { w.columns = -1; }},
      {"huge rows", CH_BAD_SHAPE, [](W& w) { w.rows = INT64_MAX; }},
      {"huge columns", CH_BAD_SHAPE, [](W& w) { w.columns = INT64_MAX; }},
      {"counts that overflow", CH_BAD_SHAPE, [](W& w) { w.rows = INT32_MAX, w.columns = int64_t{1} << 47; }},
      {"negative first_row", CH_BAD_SHAPE, [](W& w) { w.first_row = -1; }},
      {"huge first_row", CH_BAD_SHAPE, [](W& w) { w.first_row = INT64_MAX; }},
      {"odd row_numbers", CH_BAD_POINTER, [](W& w) { w.row_numbers = reinterpret_cast<const int64_t*>(9); }},
      {"all dropped", CH_BAD_OPTION, [](W& w) { w.dropped = 65536; }},
      {"a negative probability", CH_BAD_OPTION, [](W& w) { w.dropped = -1; }},
      {"no input", CH_BAD_POINTER, [](W& w) { w.input = nullptr; }},
      {"no output", CH_BAD_POINTER, [](W& w) { w.output = nullptr; }},
      {"odd input", CH_BAD_POINTER, [](W& w) { make_odd(w.input); }},
      {"odd added", CH_BAD_POINTER, [](W& w) { make_odd(w.added); }},
      {"odd output", CH_BAD_POINTER, [](W& w) { make_odd(w.output); }},
      {"output at the last address", CH_BAD_STRIDE, [](W& w) { w.output = reinterpret_cast<void*>(-8); }},
  });
  Random random(4);
  DropoutCall call(random, CH_FLOAT32, 3, 100, true);
  const int count = expect_refused(call.work, all, "dropout", ch_drop, [&] { return call.output.untouched(); });
  expect(ch_drop(nullptr), CH_BAD_POINTER, "dropout of a null description");
  return count;
}

}  // namespace

int dropout_tests() {
  contains();
  return every_size() + bad_descriptions();
}

}  // namespace test
