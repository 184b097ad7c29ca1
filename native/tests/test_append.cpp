// Appends to a cache, with every instruction set and several threads, and invalid descriptions.
#include "activation_reference.h"
#include "int8_rows.h"
#include "spoiled.h"

namespace test {

namespace {

struct AppendCall {
  Guarded source, target;
  ch_append work{};

  // `behind`: rows of the target after the written ones.
  AppendCall(Random& random, int dtype, int64_t batch, int64_t heads, int64_t rows, int64_t columns, int64_t first,
             int64_t spare) {
    source = Guarded::make(random, dtype, size_of(dtype), batch, heads, rows, columns, false);
    target = Guarded::make(random, dtype, size_of(dtype), batch, heads, first + rows + spare, columns, false);
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t r = 0; r < rows; ++r)
          for (int64_t x = 0; x < columns; ++x)
            encode(dtype, static_cast<double>(random.uniform(-100, 100)) / 4, source.at(b, h, r, x));
    work.size = sizeof(work), work.abi = CH_ABI, work.isa = -1, work.threads = 1, work.dtype = dtype;
    work.batch = batch, work.heads = heads, work.rows = rows, work.columns = columns, work.first = first;
    work.source = source.view(), work.target = target.view();
    source.save_original();
  }

  // Whether the new rows are there, and every other byte is unmodified.
  bool done() {
    const ch_append& w = work;
    bool right = true;
    for (int64_t b = 0; b < w.batch; ++b)
      for (int64_t h = 0; h < w.heads; ++h)
        for (int64_t r = 0; r < w.rows; ++r) {
          uint8_t* row = static_cast<uint8_t*>(target.at(b, h, w.first + r, 0));
          const size_t bytes = static_cast<size_t>(w.columns) * size_of(w.dtype);
          right = right && std::memcmp(row, source.at(b, h, r, 0), bytes) == 0;
          std::memset(row, 0xff, bytes);
        }
    return right && target.untouched() && source.unchanged();
  }
};

int every_size() {
  static const int64_t sizes[][6] = {{1, 1, 1, 1, 0, 0},  {2, 3, 1, 16, 9, 6},    {1, 4, 1, 64, 0, 15}, {3, 2, 5, 33, 4, 0},
                                     {17, 2, 1, 7, 1, 1}, {1, 8, 129, 96, 40, 3}, {0, 2, 3, 4, 1, 1},   {2, 0, 3, 4, 1, 1},
                                     {2, 2, 0, 4, 1, 1},  {2, 2, 3, 0, 1, 1}};
  int cases = 0;
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16})
    for (const auto& s : sizes)
      for (int isa : usable_sets())
        for (int threads : {1, 2, 5}) {
          Random random(static_cast<uint64_t>(++cases));
          AppendCall call(random, dtype, s[0], s[1], s[2], s[3], s[4], s[5]);
          call.work.isa = isa, call.work.threads = threads;
          const std::string name = "append " + std::to_string(dtype) + ", size " + std::to_string(&s - sizes) + ", " +
                                   ch_isa_name(isa) + ", threads " + std::to_string(threads);
          expect(ch_append_rows(&call.work), CH_OK, name);
          check(call.done(), name + ": bytes outside the new rows were written");
        }
  return cases;
}

// Rows of int8 numbers and a scale, against the formula: zeros, tiny and large numbers, NaN and infinity among them.
int quantized_rows() {
  int cases = 0;
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16})
    for (int64_t columns : {1, 7, 8, 33, 64, 128, 300})
      for (int isa : usable_sets()) {
        Random random(static_cast<uint64_t>(++cases) + 77);
        AppendCall call(random, dtype, 2, 3, 9, columns, 2, 1);
        static const double rows[][2] = {{0, 0}, {1e-37, 1e-38}, {3e38, 1}, {NAN, 1}, {INFINITY, 2}, {-INFINITY, 2}, {63.5, 127}};
        for (int64_t r = 0; r < 7; ++r)
          for (int64_t x = 0; x < columns; ++x) encode(dtype, rows[r][x > 0], call.source.at(1, 2, r, x));
        call.source.save_original();
        Guarded target = Guarded::make(random, CH_FLOAT32, 1, 2, 3, 12, columns + CH_SCALE_BYTES, false);
        call.work.quantized = 1, call.work.target = target.view(), call.work.isa = isa, call.work.threads = 2;
        const std::string name = "quantized append " + std::to_string(dtype) + ", columns " + std::to_string(columns) + ", " + ch_isa_name(isa);
        expect(ch_append_rows(&call.work), CH_OK, name);
        std::vector<float> row(static_cast<size_t>(columns));
        std::vector<uint8_t> right(static_cast<size_t>(columns + CH_SCALE_BYTES));
        for (int64_t b = 0; b < 2; ++b)
          for (int64_t h = 0; h < 3; ++h)
            for (int64_t r = 0; r < 9; ++r) {
              for (int64_t x = 0; x < columns; ++x) row[static_cast<size_t>(x)] = static_cast<float>(call.source.get(b, h, r, x));
              quantize_row(row.data(), columns, right.data());
              uint8_t* got = static_cast<uint8_t*>(target.at(b, h, 2 + r, 0));
              float scale, wanted;
              std::memcpy(&scale, got + columns, 4), std::memcpy(&wanted, right.data() + columns, 4);
              check(std::memcmp(got, right.data(), static_cast<size_t>(columns)) == 0 &&
                        (scale == wanted || (std::isnan(scale) && std::isnan(wanted))),
                    name + ": row " + std::to_string(r) + " differs from the formula");
              std::memset(got, 0xff, right.size());
            }
        check(target.untouched() && call.source.unchanged(), name + ": other bytes were written");
      }
  return cases;
}

int bad_descriptions() {
  using W = ch_append;
  const std::vector<Bad<W>> all = spoiled<W>({
      {"dtype", CH_BAD_DTYPE, [](W& w) { w.dtype = 3; }},
      {"negative batch", CH_BAD_SHAPE, [](W& w) { w.batch = -1; }},
      {"negative heads", CH_BAD_SHAPE, [](W& w) { w.heads = -1; }},
      {"negative rows", CH_BAD_SHAPE, [](W& w) { w.rows = -1; }},
      {"negative columns", CH_BAD_SHAPE, [](W& w) { w.columns = -1; }},
      {"negative first", CH_BAD_SHAPE, [](W& w) { w.first = -1; }},
      {"huge first", CH_BAD_SHAPE, [](W& w) { w.first = INT64_MAX; }},
      {"huge rows", CH_BAD_SHAPE, [](W& w) { w.rows = INT64_MAX; }},
      {"counts that overflow", CH_BAD_SHAPE, [](W& w) { w.batch = w.heads = INT32_MAX; }},
      {"quantized 2", CH_BAD_OPTION, [](W& w) { w.quantized = 2; }},
      {"too short quantized rows", CH_BAD_STRIDE, [](W& w) { w.quantized = 1, w.target.row = w.columns + CH_SCALE_BYTES - 1; }},
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
  AppendCall call(random, CH_FLOAT32, 2, 3, 2, 20, 5, 1);
  const int count = expect_refused(call.work, all, "append", ch_append_rows, [&] { return call.target.untouched(); });
  expect(ch_append_rows(nullptr), CH_BAD_POINTER, "append of a null description");
  // Inputs may alias themselves: the same row for every head.
  ch_append shared = call.work;
  shared.source.head = 0;
  expect(ch_append_rows(&shared), CH_OK, "append of rows shared by heads");
  return count;
}

}  // namespace

int append_tests() { return every_size() + quantized_rows() + bad_descriptions(); }

}  // namespace test
