// RoPE with every instruction set and several threads, into another tensor and in place, and invalid descriptions.
#include <cfloat>

#include "activation_reference.h"
#include "spoiled.h"

namespace test {

namespace {

struct RotationCall {
  Guarded table, source, target;
  bool in_place;
  ch_rotation work{};

  // `behind`: positions of the table after the requested ones.
  RotationCall(Random& random, int dtype, int64_t batch, int64_t heads, int64_t rows, int64_t columns, int64_t first,
               int64_t offset, bool in_place_)
      : in_place(in_place_) {
    table = Guarded::make(random, CH_FLOAT32, 4, 1, 1, first + rows + offset, columns, true);
    source = Guarded::make(random, dtype, size_of(dtype), batch, heads, rows, columns, false);
    target = Guarded::make(random, dtype, size_of(dtype), batch, heads, rows, columns, false);
    // Rows that must not be read stay NaN.
    for (int64_t r = first; r < first + rows; ++r)
      for (int64_t x = 0; x < columns; ++x) encode(CH_FLOAT32, random.uniform() * 2 - 1, table.at(0, 0, r, x));
    fill(random, source, batch, heads, rows, columns);
    work.size = sizeof(work), work.abi = CH_ABI, work.isa = -1, work.threads = 1, work.dtype = dtype;
    work.batch = batch, work.heads = heads, work.rows = rows, work.columns = columns, work.first = first;
    work.positions = first + rows + offset, work.table = static_cast<const float*>(table.data());
    work.source = source.view(), work.target = in_place ? source.view() : target.view();
    table.save_original();
    if (!in_place) source.save_original();
  }

  static void fill(Random& random, Guarded& tensor, int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t x = 0; x < columns; ++x)
            encode(tensor.dtype, static_cast<double>(random.uniform(-100, 100)) / 4, tensor.at(b, h, r, x));
  }

  // Every element of the source, in order.
  std::vector<double> elements() const { return all_of(source); }
  std::vector<double> all_of(const Guarded& tensor) const {
    std::vector<double> result;
    for (int64_t b = 0; b < work.batch; ++b)
      for (int64_t h = 0; h < work.heads; ++h)
        for (int64_t r = 0; r < work.rows; ++r)
          for (int64_t x = 0; x < work.columns; ++x) result.push_back(tensor.get(b, h, r, x));
    return result;
  }

  // Compares the result with the formula in double; `before` is the source before the call.
  void compare_with_formula(const std::vector<double>& before, const std::string& name) {
    const Guarded& written = in_place ? source : target;
    const int64_t half = work.columns / 2;
    const double unit = work.dtype == CH_FLOAT32 ? 0 : work.dtype == CH_BFLOAT16 ? 0x1p-8 : 0x1p-11;
    size_t row = 0;
    for (int64_t b = 0; b < work.batch; ++b)
      for (int64_t h = 0; h < work.heads; ++h)
        for (int64_t r = 0; r < work.rows; ++r, row += static_cast<size_t>(work.columns))
          for (int64_t c = 0; c < half; ++c) {
            const double x = before[row + static_cast<size_t>(c)], y = before[row + static_cast<size_t>(c + half)];
            const double cosine = table.get(0, 0, work.first + r, c);
            const double sine = table.get(0, 0, work.first + r, c + half) * (work.back ? -1 : 1);
            // Two products and their sum, rounded three times at most, and once to the dtype.
            const double error = 3 * FLT_EPSILON * (std::fabs(x) + std::fabs(y)) + 1e-37;
            within(written.get(b, h, r, c), x * cosine - y * sine, error, unit, name);
            within(written.get(b, h, r, c + half), y * cosine + x * sine, error, unit, name);
          }
    check(table.unchanged() && written.margins_intact(), name + ": wrote outside the target");
    check(in_place || source.unchanged(), name + ": the source was written");
  }

  static void within(double result, double right, double error, double unit, const std::string& name) {
    const double bound = error + unit * (std::fabs(right) + error) + (unit > 0 ? 0x1p-24 : 0);
    largest_ratio = std::fmax(largest_ratio, std::fabs(result - right) / bound);
    check(std::fabs(result - right) <= bound, name + ": " + std::to_string(result) + " for " + std::to_string(right));
  }
};

int every_size() {
  static const int64_t sizes[][6] = {{1, 1, 1, 2, 0, 0},   {2, 3, 1, 16, 9, 6},   {1, 4, 1, 64, 0, 15}, {3, 2, 5, 34, 4, 0},
                                     {17, 2, 1, 6, 1, 1},  {1, 8, 129, 96, 3, 3}, {2, 2, 18, 80, 0, 1}, {1, 2, 3, 256, 1, 0},
                                     {1, 3, 1700, 64, 0, 0}, {0, 2, 3, 4, 1, 1},  {2, 0, 3, 4, 1, 1},   {2, 2, 0, 4, 1, 1},
                                     {2, 2, 3, 0, 1, 1}};
  int cases = 0;
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16})
    for (const auto& s : sizes)
      for (bool in_place : {false, true})
        for (int isa : usable_sets()) {
          std::vector<double> one;
          for (int threads : {1, 2, 5}) {
            Random random(static_cast<uint64_t>(&s - sizes) * 7 + static_cast<uint64_t>(dtype));
            RotationCall call(random, dtype, s[0], s[1], s[2], s[3], s[4], s[5], in_place);
            call.work.isa = isa, call.work.threads = threads, call.work.back = s[2] % 2 == 0 ? 1 : 0;
            const std::string name = "rotation " + std::to_string(dtype) + ", size " + std::to_string(&s - sizes) +
                                     (in_place ? " in place, " : ", ") + ch_isa_name(isa) + ", threads " +
                                     std::to_string(threads);
            const std::vector<double> before = call.elements();
            expect(ch_rotate(&call.work), CH_OK, name);
            call.compare_with_formula(before, name);
            const std::vector<double> result = call.all_of(in_place ? call.source : call.target);
            if (threads == 1) one = result;
            check(result == one, name + ": bits differ from those with one thread");
            ++cases;
          }
        }
  return cases;
}

// NaN or infinity reaches the two elements of its pair only.
void containment() {
  for (int isa : usable_sets()) {
    Random random(3);
    RotationCall call(random, CH_FLOAT32, 1, 2, 5, 40, 0, 0, false);
    call.work.isa = isa;
    encode(CH_FLOAT32, NAN, call.source.at(0, 1, 3, 7));
    expect(ch_rotate(&call.work), CH_OK, "rotation of NaN");
    for (int64_t h = 0; h < 2; ++h)
      for (int64_t r = 0; r < 5; ++r)
        for (int64_t x = 0; x < 40; ++x) {
          const bool reached = h == 1 && r == 3 && x % 20 == 7;
          check(std::isnan(call.target.get(0, h, r, x)) == reached, "NaN outside its pair");
        }
  }
}

int bad_descriptions() {
  using W = ch_rotation;
  const std::vector<Bad<W>> all = spoiled<W>({
      {"dtype", CH_BAD_DTYPE, [](W& w) { w.dtype = 3; }},
      {"negative batch", CH_BAD_SHAPE, [](W& w) { w.batch = -1; }},
      {"negative heads", CH_BAD_SHAPE, [](W& w) { w.heads = -1; }},
      {"negative rows", CH_BAD_SHAPE, [](W& w) { w.rows = -1; }},
      {"negative columns", CH_BAD_SHAPE, [](W& w) { w.columns = -2; }},
      {"odd columns", CH_BAD_SHAPE, [](W& w) { w.columns -= 1; }},
      {"negative first", CH_BAD_SHAPE, [](W& w) { w.first = -1; }},
      {"huge first", CH_BAD_SHAPE, [](W& w) { w.first = INT64_MAX; }},
      {"a table that ends before the rows do", CH_BAD_SHAPE, [](W& w) { w.positions = w.first + w.rows - 1; }},
      {"negative positions", CH_BAD_SHAPE, [](W& w) { w.positions = -1; }},
      {"huge positions", CH_BAD_SHAPE, [](W& w) { w.positions = INT64_MAX; }},
      {"counts that overflow", CH_BAD_SHAPE, [](W& w) { w.batch = w.heads = INT32_MAX; }},
      {"back 2", CH_BAD_OPTION, [](W& w) { w.back = 2; }},
      {"no table", CH_BAD_POINTER, [](W& w) { w.table = nullptr; }},
      {"no source", CH_BAD_POINTER, [](W& w) { w.source.data = nullptr; }},
      {"no target", CH_BAD_POINTER, [](W& w) { w.target.data = nullptr; }},
      {"odd source", CH_BAD_POINTER, [](W& w) { make_odd(w.source.data); }},
      {"odd target", CH_BAD_POINTER, [](W& w) { make_odd(w.target.data); }},
      {"a negative stride", CH_BAD_STRIDE, [](W& w) { w.target.row = -8; }},
      {"a huge stride", CH_BAD_STRIDE, [](W& w) { w.source.head = INT64_MAX; }},
      {"rows of the target that overlap", CH_BAD_STRIDE, [](W& w) { w.target.row = w.columns - 1; }},
      {"heads of the target that overlap", CH_BAD_STRIDE, [](W& w) { w.target.head = 0; }},
      {"a target at the last address", CH_BAD_STRIDE, [](W& w) { w.target.data = reinterpret_cast<void*>(-8); }},
  });
  Random random(4);
  RotationCall call(random, CH_FLOAT32, 2, 3, 2, 20, 5, 1, false);
  const int count = expect_refused(call.work, all, "rotation", ch_rotate, [&] { return call.target.untouched(); });
  expect(ch_rotate(nullptr), CH_BAD_POINTER, "rotation of a null description");
  return count;
}

}  // namespace

int rotation_tests() {
  containment();
  return every_size() + bad_descriptions();
}

}  // namespace test
