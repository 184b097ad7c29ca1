// Invalid descriptions of GEMMs, each wrong in one place: every one must return its code and write nothing.
#include "projection_call.h"
#include "spoiled.h"

namespace test {

namespace {

constexpr int64_t huge = INT64_MAX / 2;

const std::vector<Bad<ch_projection>>& either_way() {
  using W = ch_projection;
  static const std::vector<Bad<W>> all = spoiled<W>({
      {"dtype", CH_BAD_DTYPE, [](W& w) { w.dtype = 3; }},
      {"negative dtype", CH_BAD_DTYPE, [](W& w) { w.dtype = -1; }},
      {"no terms", CH_BAD_SHAPE, [](W& w) { w.num_terms = 0; }},
      {"negative terms", CH_BAD_SHAPE, [](W& w) { w.num_terms = -1; }},
      {"5 terms", CH_BAD_SHAPE, [](W& w) { w.num_terms = CH_MAX_TERMS + 1; }},
      {"negative rows", CH_BAD_SHAPE, [](W& w) { w.rows = -1; }},
      {"negative first_row", CH_BAD_SHAPE, [](W& w) { w.first_row = -1; }},
      {"huge first_row", CH_BAD_SHAPE, [](W& w) { w.first_row = INT64_MAX; }},
      {"lowest rows", CH_BAD_SHAPE, [](W& w) { w.rows = INT64_MIN; }},
      {"huge rows", CH_BAD_SHAPE, [](W& w) { w.rows = huge; }},
      {"rows past int32", CH_BAD_SHAPE, [](W& w) { w.rows = int64_t{1} << 31; }},
      {"negative columns", CH_BAD_SHAPE, [](W& w) { w.columns = -1; }},
      {"huge columns", CH_BAD_SHAPE, [](W& w) { w.columns = huge; }},
      {"negative steps", CH_BAD_SHAPE, [](W& w) { w.terms[0].steps = -1; }},
      {"lowest steps", CH_BAD_SHAPE, [](W& w) { w.terms[0].steps = INT64_MIN; }},
      {"huge steps", CH_BAD_SHAPE, [](W& w) { w.terms[0].steps = huge; }},
      {"huge output", CH_BAD_SHAPE, [](W& w) { w.rows = w.columns = INT32_MAX; }},
      {"huge left", CH_BAD_SHAPE, [](W& w) { w.rows = w.terms[0].steps = INT32_MAX; }},
      {"huge right", CH_BAD_SHAPE, [](W& w) { w.columns = w.terms[0].steps = INT32_MAX; }},
      {"threads", CH_BAD_OPTION, [](W& w) { w.threads = INT32_MAX; }},
      {"left_transposed 2", CH_BAD_OPTION, [](W& w) { w.left_transposed = 2; }},
      {"left_transposed -1", CH_BAD_OPTION, [](W& w) { w.left_transposed = -1; }},
      {"right_transposed 2", CH_BAD_OPTION, [](W& w) { w.right_transposed = 2; }},
      {"no left", CH_BAD_POINTER, [](W& w) { w.terms[0].left = nullptr; }},
      {"no right", CH_BAD_POINTER, [](W& w) { w.terms[0].right = nullptr; }},
      {"no output", CH_BAD_POINTER, [](W& w) { w.output = nullptr; }},
      {"odd left", CH_BAD_POINTER, [](W& w) { make_odd(w.terms[0].left); }},
      {"odd right", CH_BAD_POINTER, [](W& w) { make_odd(w.terms[0].right); }},
      {"odd bias", CH_BAD_POINTER, [](W& w) { make_odd(w.bias); }},
      {"an activation past the last", CH_BAD_OPTION, [](W& w) { w.activation = CH_QUICK_GELU + 1; }},
      {"a negative activation", CH_BAD_OPTION, [](W& w) { w.activation = -1; }},
      {"all dropped", CH_BAD_OPTION, [](W& w) { w.dropped = 65536; }},
      {"a negative dropout probability", CH_BAD_OPTION, [](W& w) { w.dropped = -1; }},
      {"odd slope", CH_BAD_POINTER, [](W& w) { w.slope = w.output, w.slope_row = w.columns, make_odd(w.slope); }},
      {"slopes that overlap", CH_BAD_STRIDE, [](W& w) { w.slope = w.output, w.slope_row = w.columns - 1; }},
      {"odd gate", CH_BAD_POINTER, [](W& w) { make_odd(w.gate); }},
      {"negative stride of a gate", CH_BAD_STRIDE, [](W& w) { w.gate = w.output, w.gate_row = -1; }},
      {"odd output", CH_BAD_POINTER, [](W& w) { make_odd(w.output); }},
      {"negative stride of left", CH_BAD_STRIDE, [](W& w) { w.terms[0].left_row = -1; }},
      {"negative stride of right", CH_BAD_STRIDE, [](W& w) { w.terms[0].right_row = -1; }},
      {"negative stride of output", CH_BAD_STRIDE, [](W& w) { w.output_row = -w.output_row; }},
      {"huge stride of left", CH_BAD_STRIDE, [](W& w) { w.terms[0].left_row = huge; }},
      {"huge stride of right", CH_BAD_STRIDE, [](W& w) { w.terms[0].right_row = huge; }},
      {"huge stride of output", CH_BAD_STRIDE, [](W& w) { w.output_row = huge; }},
      // These exceed what a process can address; the two below exceed the last address.
      {"a stride past the address space of left", CH_BAD_STRIDE, [](W& w) { w.terms[0].left_row = int64_t{1} << 56; }},
      {"a stride past the address space of right", CH_BAD_STRIDE, [](W& w) { w.terms[0].right_row = int64_t{1} << 56; }},
      {"left at the last address", CH_BAD_STRIDE, [](W& w) { w.terms[0].left = reinterpret_cast<void*>(-8); }},
      {"output at the last address", CH_BAD_STRIDE, [](W& w) { w.output = reinterpret_cast<void*>(-8); }},
      {"overlapping rows", CH_BAD_STRIDE, [](W& w) { w.output_row = w.columns - 1; }},
      {"output rows with stride 0", CH_BAD_STRIDE, [](W& w) { w.output_row = 0; }},
  });
  return all;
}

// Of a description with two terms, whose left is not transposed.
const std::vector<Bad<ch_projection>>& with_terms() {
  using W = ch_projection;
  static const std::vector<Bad<W>> all = {
      {"panels of two terms", CH_BAD_OPTION, [](W& w) { w.panels = w.output; }},
      {"negative steps of the second term", CH_BAD_SHAPE, [](W& w) { w.terms[1].steps = -1; }},
      {"huge steps of the second term", CH_BAD_SHAPE, [](W& w) { w.terms[1].steps = huge; }},
      {"no left of the second term", CH_BAD_POINTER, [](W& w) { w.terms[1].left = nullptr; }},
      {"odd right of the second term", CH_BAD_POINTER, [](W& w) { make_odd(w.terms[1].right); }},
      {"negative stride of the second term", CH_BAD_STRIDE, [](W& w) { w.terms[1].right_row = -1; }},
      {"a third term without pointers", CH_BAD_POINTER, [](W& w) { w.num_terms = 3, w.terms[2].steps = 1; }},
      {"row_sums of a left that is not transposed", CH_BAD_OPTION, [](W& w) { w.num_terms = 1, w.row_sums = w.output; }},
  };
  return all;
}

void slopes_of(ch_projection& w, int32_t kind) {
  w.gate_kind = kind, w.slope = w.output, w.slope_row = w.output_row;
  w.slope_gate = w.gate, w.slope_gate_row = w.gate_row;
}

// Of one with a gate.
const std::vector<Bad<ch_projection>>& with_gate() {
  using W = ch_projection;
  static const std::vector<Bad<W>> all = {
      {"a gate past the last", CH_BAD_OPTION, [](W& w) { w.gate_kind = CH_GATE_SLOPE + 1; }},
      {"a negative gate", CH_BAD_OPTION, [](W& w) { w.gate_kind = -1; }},
      {"a gate and a relu", CH_BAD_OPTION, [](W& w) { w.activation = CH_RELU; }},
      {"a gate and slopes without slope_gate", CH_BAD_OPTION, [](W& w) { w.slope = w.output, w.slope_row = w.output_row; }},
      {"slope_gate without slopes", CH_BAD_OPTION, [](W& w) { w.gate_kind = CH_GATE_SLOPE, w.slope_gate = w.gate; }},
      {"slopes with CH_GATE_OUTPUT", CH_BAD_OPTION, [](W& w) { slopes_of(w, CH_GATE_OUTPUT); }},
      {"slope_gate without a gate", CH_BAD_OPTION, [](W& w) { slopes_of(w, CH_GATE_SLOPE), w.gate = nullptr; }},
      {"odd slope_gate", CH_BAD_POINTER,
       [](W& w) { slopes_of(w, CH_GATE_SLOPE), make_odd(w.slope_gate); }},
      {"huge stride of slope_gate", CH_BAD_STRIDE,
       [](W& w) { slopes_of(w, CH_GATE_SLOPE), w.slope_gate_row = huge; }},
      {"slopes and dropout", CH_BAD_OPTION, [](W& w) { w.gate_kind = CH_GATE_SLOPE, w.dropped = 1; }},
  };
  return all;
}

// Of one with row_sums.
const std::vector<Bad<ch_projection>>& with_row_sums() {
  using W = ch_projection;
  static const std::vector<Bad<W>> all = {
      {"row_sums of two terms", CH_BAD_OPTION, [](W& w) { w.num_terms = 2, w.terms[1] = w.terms[0]; }},
      {"row_sums without columns", CH_BAD_SHAPE, [](W& w) { w.columns = 0; }},
      {"odd row_sums", CH_BAD_POINTER, [](W& w) { make_odd(w.row_sums); }},
      {"row_sums at the last address", CH_BAD_STRIDE, [](W& w) { w.row_sums = reinterpret_cast<void*>(-8); }},
  };
  return all;
}

int spoil_all(ProjectionCall& call, const std::vector<Bad<ch_projection>>& all) {
  return expect_refused(call.work, all, "a GEMM", ch_project, [&] {
    const bool untouched = call.untouched();
    call.clear();
    return untouched;
  });
}

}  // namespace

int projection_entry_tests() {
  expect(ch_project(nullptr), CH_BAD_POINTER, "a GEMM of a null description");
  int count = 0;
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16})
    for (bool transposed : {false, true}) {
      ProjectionCase c;
      Random random(3);
      c.dtype = dtype, c.left_transposed = c.right_transposed = c.has_row_sums = transposed, c.has_bias = true;
      c.rows = 13, c.columns = 9, c.steps.assign(transposed ? 1 : 2, 11);
      draw_values(random, c);
      ProjectionCall call(c, random);
      expect(call.run(-1, 1), CH_OK, "the valid description of a GEMM");
      call.clear();
      count += spoil_all(call, either_way());
      count += spoil_all(call, transposed ? with_row_sums() : with_terms());
      c.has_gate = true, c.gate.assign(static_cast<size_t>(c.rows * c.columns), 1.0);
      ProjectionCall has_gate(c, random);
      count += spoil_all(has_gate, with_gate());
    }
  return count;
}

}  // namespace test
