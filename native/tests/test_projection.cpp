// GEMMs of linear layers against a plain sum: every instruction set of this processor, with 1, 2 and 5 threads.
#include <functional>

#include "program.h"
#include "projection_call.h"
#include "sets_agree.h"

namespace test {

int projection_entry_tests();
int append_tests();
int rotation_tests();
int dropout_tests();
int norm_tests();

namespace {

std::string describe(const ProjectionCase& c, int isa, int threads) {
  std::string line = "dtype " + std::to_string(c.dtype) + (c.left_transposed ? ", left transposed" : "") +
                     (c.right_transposed ? ", right transposed" : "") + ", " + std::to_string(c.rows) + "x" +
                     std::to_string(c.columns) + " of";
  for (int64_t steps : c.steps) line += " " + std::to_string(steps);
  return line + " steps" + (c.has_bias ? ", bias" : "") + ", activation " + std::to_string(c.activation) +
         (c.has_slopes ? " and slopes" : "") + ", " + std::to_string(c.dropped) + " dropped" +
         (c.has_gate ? ", gate " + std::to_string(c.gate_kind) : "") + ", " +
         ch_isa_name(isa) + ", threads " + std::to_string(threads);
}

// Correct, within its memory, and bitwise identical with any number of threads.
void one_case(const ProjectionCase& c, uint64_t seed, const std::string& what, const std::vector<int>& all_threads) {
  const ProjectionExpected right = expected(c);
  Random random(seed);
  ProjectionCall call(c, random);
  for (int isa : usable_sets()) {
    std::vector<std::vector<uint8_t>> bits;
    for (int threads : all_threads) {
      const std::string name = what + " (" + describe(c, isa, threads) + ")";
      const int before = failures;
      expect_done_first([&] { return call.run(isa, threads); }, name);
      if (threads == 1) call.compare_with(right, name), bits = call.bits();
      check(call.bits() == bits, name + ": bits differ from those with one thread");
      call.margins(name);
      expect(call.run_in_team(isa, threads), CH_OK, name + ", in a team");
      check(call.bits() == bits, name + ": bits in a team differ");
      if (call.packable() && c.steps[0] > 0 && c.columns > 0) {
        expect(call.run_packed(isa, threads), CH_OK, name + ", packed");
        call.compare_with(right, name + ", packed");
        call.margins(name + ", packed");
      }
      if (failures != before) return;
    }
  }
}

void drawn_case(uint64_t number) {
  one_case(draw_projection(number), number + 1000003, "projection case " + std::to_string(number), {1, 2, 5});
}

int sets_agree() {
  SetsAgree agree("projection");
  for (uint64_t number = 3000; number < 3264; ++number) {
    const ProjectionCase c = draw_projection(number);
    if (c.dtype != CH_FLOAT32) continue;
    Random random(number + 1000003);
    ProjectionCall call(c, random);
    agree.add(describe(c, usable_sets().front(), 1), [&](int isa) {
      expect(call.run(isa, 1), CH_OK, "projection");
      return call.bits();
    });
  }
  return agree.end(0xccf06f6351ec4686u);
}

// More than is packed at a time (2^22 elements of right, or of one panel): panels come in several passes, each with all
// of left, and with several groups of steps besides.
int several_passes() {
  struct Shape {
    int dtype;
    bool left_transposed, right_transposed, integers;
    int64_t rows, columns;
    std::vector<int64_t> steps;
  };
  static const Shape shapes[] = {
      {CH_FLOAT32, false, true, false, 7, 1100, {4099}},
      {CH_BFLOAT16, false, true, true, 5, 1100, {8195}},
      {CH_FLOAT16, false, false, true, 3, 1030, {2048, 2048}},
      {CH_FLOAT32, true, false, true, 7, 4110, {1030}},
      {CH_BFLOAT16, true, true, false, 3, 4110, {2051}},
      {CH_BFLOAT16, false, false, true, 13, 1100, {1000, 5001, 3, 2600}},
  };
  uint64_t number = 0;
  for (const Shape& shape : shapes) {
    ProjectionCase c;
    Random random(++number + 17);
    c.dtype = shape.dtype, c.left_transposed = shape.left_transposed, c.right_transposed = shape.right_transposed;
    c.integers = shape.integers, c.rows = shape.rows, c.columns = shape.columns, c.steps = shape.steps;
    c.has_bias = true, c.has_row_sums = c.left_transposed;
    draw_values(random, c);
    // With this many threads right is packed and shared even for few rows.
    one_case(c, number, "several passes", {1, 5, 64});
  }
  return static_cast<int>(number);
}

// Very few rows, whose right is read in place from a number of steps on, with every epilogue.
int very_few_rows() {
  uint64_t number = 0;
  auto one = [&](bool right_transposed, int64_t rows, int64_t steps, int64_t columns) {
    ProjectionCase c;
    Random random(++number + 977);
    c.dtype = random.pick(std::vector<int>{CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16});
    c.right_transposed = right_transposed, c.rows = rows, c.columns = columns, c.steps = {steps};
    c.has_bias = random.one_in(2), c.integers = random.one_in(4);
    c.activation = static_cast<int>(random.uniform(CH_PLAIN, CH_QUICK_GELU)), c.has_slopes = random.one_in(2);
    if (random.one_in(2)) c.dropped = c.integers ? 32768 : static_cast<int>(random.uniform(1, 65535));
    c.seed = static_cast<uint64_t>(random.uniform(0, INT64_MAX / 2));
    draw_values(random, c);
    ch_set_invariant(random.one_in(2));
    // Not always 64 threads: starting them takes longer than the case.
    one_case(c, number, "very few rows", number % 4 == 0 ? std::vector<int>{1, 2, 64} : std::vector<int>{1, 2});
    ch_set_invariant(0);
  };
  for (int64_t rows : {1, 2, 3, 4, 5, 8, 9, 16, 25})
    for (int64_t steps : {8, 16, 32, 240, 256, 264, 4096, 4112, 8224})
      for (int64_t columns : {1, 4, 15, 17, 100}) one(true, rows, steps, columns);
  // Right's rows are steps here, of which eight are added at a time.
  for (int64_t rows = 1; rows < 10; ++rows)
    for (int64_t steps : {1, 7, 8, 9, 16, 37, 600})
      for (int64_t columns : {1, 15, 17, 100, 1030, 2100}) one(false, rows, steps, columns);
  return static_cast<int>(number);
}

// In invariant mode a row has the same bits alone and among any others.
int rows_among_others() {
  uint64_t number = 0;
  ch_set_invariant(1);
  for (bool right_transposed : {false, true})
    for (int64_t steps : {1, 32, 250, 512, 544, 1030, 2112})
      for (int64_t columns : {1, 17, 64, 100}) {
        ProjectionCase c;
        Random random(++number + 4231);
        c.dtype = random.pick(std::vector<int>{CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16});
        c.right_transposed = right_transposed, c.rows = 80, c.columns = columns, c.steps = {steps};
        c.has_bias = random.one_in(2), c.activation = static_cast<int>(random.uniform(CH_PLAIN, CH_QUICK_GELU));
        if (random.one_in(2)) c.dropped = static_cast<int>(random.uniform(1, 65535));
        c.seed = static_cast<uint64_t>(random.uniform(0, INT64_MAX / 2));
        draw_values(random, c);
        ProjectionCall call(c, random);
        for (int isa : usable_sets()) {
          const std::string name = "rows among others (" + describe(c, isa, 2) + ")";
          expect(call.run(isa, 2), CH_OK, name);
          for (int64_t rows : {1, 2, 5, 6, 8, 9, 24, 25})
            check(call.has_rows(random.uniform(0, c.rows - rows), rows, isa), name + ": " + std::to_string(rows) + " differ");
        }
      }
  ch_set_invariant(0);
  return static_cast<int>(number);
}

// Every form of the description, for properties that do not depend on the values.
void each_form(const std::function<void(ProjectionCase&)>& use) {
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16})
    for (bool left_transposed : {false, true})
      for (bool right_transposed : {false, true}) {
        ProjectionCase c;
        c.dtype = dtype, c.left_transposed = left_transposed, c.right_transposed = right_transposed;
        use(c);
      }
}

// The sum of nothing is 0, or the bias: terms without steps need no memory. Without output elements nothing else is
// needed either.
void empty_sums() {
  each_form([](ProjectionCase& c) {
    c.rows = 13, c.columns = 67, c.has_bias = c.right_transposed, c.integers = true;
    c.steps.assign(c.left_transposed ? 1 : 3, 0), c.has_row_sums = c.left_transposed;
    Random random(5);
    draw_values(random, c);
    one_case(c, 6, "no steps", {1, 2, 5});
    ProjectionCall call(c, random);
    for (ch_term& term : call.work.terms) term = {nullptr, nullptr, 0, 0, 0};
    for (int isa : usable_sets()) {
      const std::string name = "no steps and no memory (" + describe(c, isa, 1) + ")";
      expect(call.run(isa, 1), CH_OK, name);
      call.compare_with(expected(c), name);
    }
  });
  each_form([](ProjectionCase& c) {
    c.rows = 5, c.columns = 9, c.steps = {7}, c.has_bias = true, c.has_row_sums = c.left_transposed;
    Random random(5);
    draw_values(random, c);
    ProjectionCall call(c, random);
    ch_projection work = call.work;
    work.rows = 0, work.output = nullptr, work.terms[0].left = nullptr;
    expect(ch_project(&work), CH_OK, "no rows");
    work = call.work;
    work.columns = 0, work.output = work.row_sums = nullptr, work.bias = nullptr, work.terms[0].right = nullptr;
    expect(ch_project(&work), CH_OK, "no columns");
    check(call.untouched(), "a call without elements wrote something");
  });
}

// A stride of an input may be 0, and the stride of a single row is unused.
void zero_strides() {
  each_form([](ProjectionCase& c) {
    c.rows = 7, c.columns = 19, c.steps = {37}, c.integers = true;
    Random random(8);
    draw_values(random, c);
    // The first row stands for all of them.
    const auto repeat = [](Values& of, int64_t rows, int64_t columns, bool transposed) {
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t x = 0; x < columns; ++x)
          of[static_cast<size_t>(r * columns + x)] = of[static_cast<size_t>(transposed ? r * columns : x)];
    };
    repeat(c.left[0], 7, 37, c.left_transposed), repeat(c.right[0], 37, 19, c.right_transposed);
    ProjectionCall call(c, random);
    call.work.terms[0].left_row = call.work.terms[0].right_row = 0;
    for (int isa : usable_sets()) {
      const std::string name = "a row stride of 0 (" + describe(c, isa, 1) + ")";
      expect(call.run(isa, 1), CH_OK, name);
      call.compare_with(expected(c), name);
    }
  });
  each_form([](ProjectionCase& c) {
    c.rows = 1, c.columns = c.right_transposed ? 1 : 19, c.integers = true;
    c.steps = {c.left_transposed || !c.right_transposed ? 1 : 37};
    Random random(8);
    draw_values(random, c);
    ProjectionCall call(c, random);
    call.work.terms[0].left_row = call.work.terms[0].right_row = call.work.output_row = INT64_MAX / 2;
    for (int isa : usable_sets()) {
      const std::string name = "a single row with a huge stride (" + describe(c, isa, 1) + ")";
      expect(call.run(isa, 1), CH_OK, name);
      call.compare_with(expected(c), name);
    }
  });
}

// bf16 pairs can be read in place only if no row starts or ends within a pair: an odd count of steps, stride or address
// must each be detected. NaN follows every row.
void bf16_pairs_in_place() {
  for (int64_t steps : {37, 38, 64})
    for (int64_t stride : {70, 71})
      for (int odd : {0, 1, 2, 3})
        for (int way : {0, 1, 2}) {
          // With three rows the right operand is read in place, too.
          const bool right_transposed = way > 0;
          ProjectionCase c;
          c.dtype = CH_BFLOAT16, c.right_transposed = right_transposed, c.rows = way == 2 ? 3 : 13, c.columns = 33,
              c.steps = {steps};
          Random random(static_cast<uint64_t>(steps));
          draw_values(random, c);
          std::vector<uint16_t> left(static_cast<size_t>(64 * stride + 1), 0xffff), right = left;
          uint16_t *a = left.data() + odd % 2, *b = right.data() + odd / 2;
          for (int64_t s = 0; s < steps; ++s) {
            for (int64_t r = 0; r < c.rows; ++r)
              encode(c.dtype, c.left[0][static_cast<size_t>(r * steps + s)], a + r * stride + s);
            for (int64_t x = 0; x < c.columns; ++x)
              encode(c.dtype, c.right[0][static_cast<size_t>(s * c.columns + x)],
                     right_transposed ? b + x * stride + s : b + s * stride + x);
          }
          ProjectionCall call(c, random);
          call.work.terms[0] = {a, b, stride, stride, steps};
          for (int isa : usable_sets()) {
            const std::string name = "bf16 pairs at " + std::to_string(odd) + ", stride " + std::to_string(stride) + " (" +
                                     describe(c, isa, 1) + ")";
            expect(call.run(isa, 1), CH_OK, name);
            call.compare_with(expected(c), name);
          }
        }
}

// Compares where the second call has other values than the first; some of these must be NaN or infinity.
void compare_clean(const Guarded& clean, const Guarded& got, const std::string& name,
                   const std::function<bool(int64_t r, int64_t x)>& reaches) {
  for (int64_t r = 0; r < clean.count[2]; ++r)
    for (int64_t x = 0; x < clean.last; ++x) {
      const double right = clean.get(0, 0, r, x), actual = got.get(0, 0, r, x);
      if (reaches(r, x) ? !std::isfinite(actual) : actual == right) continue;
      return fail(name + " [" + std::to_string(r) + ", " + std::to_string(x) + "] is " + std::to_string(actual) +
                  ", not " + (reaches(r, x) ? "NaN or inf" : std::to_string(right)));
    }
}

// NaN and infinity stay in their row, or column. The last step has no partner with bf16 dot-product instructions.
void containment() {
  enum Place { in_left, in_right, in_bias };
  static const char* places[] = {"left", "right", "the bias"};
  constexpr size_t rows = 79, columns = 75, steps = 37, row = 40, column = 66;
  each_form([](ProjectionCase& clean) {
    clean.rows = rows, clean.columns = columns, clean.steps = {steps}, clean.has_bias = true;
    clean.has_row_sums = clean.left_transposed;
    Random random(21);
    draw_values(random, clean);
    for (int place : {in_left, in_right, in_bias})
      for (double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)})
        for (size_t step : {size_t{0}, steps - 1}) {
          ProjectionCase c = clean;
          if (place == in_left) c.left[0][row * steps + step] = bad;
          if (place == in_right) c.right[0][step * columns + column] = bad;
          if (place == in_bias) c.bias[column] = bad;
          Random first_value(9), second(9);
          ProjectionCall right(clean, first_value), got(c, second);
          for (int isa : usable_sets())
            for (int threads : {1, 5}) {
              const std::string name =
                  std::to_string(bad) + " in " + places[place] + " (" + describe(c, isa, threads) + ")";
              expect(right.run(isa, threads), CH_OK, name), expect(got.run(isa, threads), CH_OK, name);
              compare_clean(right.output, got.output, name + " output", [&](int64_t r, int64_t x) {
                return place == in_left ? r == static_cast<int64_t>(row) : x == static_cast<int64_t>(column);
              });
              if (!c.has_row_sums) continue;
              compare_clean(right.row_sums, got.row_sums, name + " row_sums", [&](int64_t, int64_t r) {
                return place == in_left && r == static_cast<int64_t>(row);
              });
            }
        }
  });
}

}  // namespace
}  // namespace test

int main(int arguments, char** argument) {
  const test::Program program = {"projection", 0, 264, test::drawn_case, {
      {"sets", test::sets_agree},
      {"passes", test::several_passes},
      {"few-rows", test::very_few_rows},
      {"among-others", test::rows_among_others},
      {"no-steps", test::empty_sums},
      {"strides", test::zero_strides},
      {"pairs", test::bf16_pairs_in_place},
      {"containment", test::containment},
      {"invalid", test::projection_entry_tests},
      {"dropout", test::dropout_tests},
      {"norm", test::norm_tests},
      {"append", test::append_tests},
      {"rotation", test::rotation_tests},
  }};
  return test::run_program(program, arguments, argument);
}
