#include "calls.h"

#include "../src/invariance.h"

#include <string.h>

namespace clearhead::torch {
namespace {

template <class Description> Description describe(Dtype dtype) {
  Description work = {};
  work.size = sizeof(work), work.abi = CH_ABI, work.isa = instruction_set, work.threads = threads();
  work.dtype = static_cast<int32_t>(dtype);
  return work;
}

void* offset(const void* data, int64_t elements, Dtype dtype) {
  return const_cast<char*>(static_cast<const char*>(data)) + elements * size_of(dtype);
}

void set_epilogue(ch_projection& work, const Epilogue& epilogue) {
  work.activation = epilogue.activation, work.dropped = epilogue.dropped, work.seed = epilogue.seed.value;
  work.first_row = epilogue.seed.first_row, work.row_numbers = epilogue.seed.row_numbers;
  work.slope = epilogue.slope.data, work.slope_row = epilogue.slope.step;
  work.gate = epilogue.gate.data, work.gate_row = epilogue.gate.step;
  work.gate_kind = epilogue.gate ? epilogue.gate_kind : CH_GATE_OUTPUT;
  work.slope_gate = epilogue.slope_gate.data, work.slope_gate_row = epilogue.slope_gate.step;
}

void run(const ch_projection& work) {
  if (work.rows > 0 && work.columns > 0) check_kernel(ch_project(&work), "linear");
}

void pack_integers(const Linear& layer, void* panels) {
  ch_quantized work = describe<ch_quantized>(Dtype::float32);
  work.bits = 8, work.rounding = CH_ROUND_SYMMETRIC, work.low = -128, work.high = 127;
  work.columns = layer.out, work.steps = layer.in, work.group = layer.in;
  work.weight = layer.weight, work.weight_row = layer.step, work.output = panels;
  check_kernel(ch_pack_quantized(&work), "pack_weight");
}

bool round_alike(const Integers& a, const Integers& b) {
  return a.rounding != CH_ROUND_NONE && a.rounding == b.rounding && a.low == b.low && a.high == b.high;
}

ch_quantized quantized_of(Dtype dtype, const Matrix& x, const LinearCall& call) {
  const auto& [read, output, epilogue] = call;
  const Linear& layer = *read;
  const Integers& integers = layer.integers;
  ch_quantized work = describe<ch_quantized>(dtype);
  work.bits = integers.bits, work.rounding = integers.rounding, work.low = integers.low, work.high = integers.high;
  work.group = integers.group, work.scale = integers.scale, work.offset = integers.offset;
  work.rows = x.rows, work.columns = layer.out, work.steps = x.columns;
  work.x = x.data, work.x_row = x.step, work.weight = layer.weight, work.weight_row = layer.step;
  work.panels = layer.panels;
  work.bias = layer.bias, work.output = output.data, work.output_row = output.step;
  work.activation = epilogue.activation, work.gate = epilogue.gate.data, work.gate_row = epilogue.gate.step;
  return work;
}

}  // namespace

Matrix Matrix::columns_from(int64_t first, int64_t count, Dtype dtype) const {
  return {offset(data, first, dtype), rows, count, step};
}

Matrix Matrix::rows_from(int64_t first, int64_t count, Dtype dtype) const {
  return {offset(data, first * step, dtype), count, columns, step};
}

Linear Linear::outputs_from(int64_t first, int64_t count, Dtype dtype) const {
  Linear part = *this;
  part.out = count;
  if (panels != nullptr) part.panels = static_cast<const char*>(panels) + first * step;
  else if (integers.bits == 0) part.weight = offset(weight, transposed ? first : first * step, dtype);
  else part.weight = static_cast<const char*>(weight) + first * step;
  const int64_t groups = integers.group == 0 ? 0 : in / integers.group;
  if (integers.scale != nullptr) part.integers.scale = integers.scale + first * groups;
  if (integers.offset != nullptr) part.integers.offset = integers.offset + first * groups;
  part.bias = bias == nullptr ? nullptr : offset(bias, first, dtype);
  return part;
}

const void* bias_of(const char* function, const Tensor& bias, int64_t out, Dtype dtype, std::vector<Tensor>& copies) {
  if (!bias.is_shaped({out}) || bias.dtype() != dtype)
    fail(function, "bias", "be [out] in the weight's dtype", bias.shape(), "Pass None for no bias.");
  if (bias.contiguous()) return bias.data();
  copies.push_back(bias.reference().as_contiguous());
  return copies.back().data();
}

Linear linear_of(const char* function, const Tensor& weight, const Tensor& bias, Dtype dtype, std::vector<Tensor>& copies) {
  if (weight.dim() != 2 || weight.dtype() != dtype)
    fail(function, "weight", std::string("be [out, in] of ") + name_of(dtype), weight.shape(), "Convert with .to(dtype).");
  Linear layer;
  layer.out = weight.size(0), layer.in = weight.size(1);
  const Tensor* read = &weight;
  layer.transposed = weight.stride(0) == 1 && weight.stride(1) != 1 && layer.in > 1;
  if (!layer.transposed && weight.stride(1) != 1 && layer.in > 1) {
    copies.push_back(weight.reference().as_contiguous());
    read = &copies.back();
  }
  layer.weight = read->data(), layer.step = read->stride(layer.transposed ? 1 : 0);
  if (bias) layer.bias = bias_of(function, bias, layer.out, dtype, copies);
  return layer;
}

const int64_t* row_numbers_of(const char* function, const Tensor& numbers, int64_t rows) {
  if (!numbers) return nullptr;
  if (numbers.dtype() != Dtype::int64 || !numbers.is_shaped({rows}) || !numbers.contiguous())
    fail(function, "numbers of rows", "be contiguous int64 [" + std::to_string(rows) + "]", numbers.shape(), "Pass None for a whole tensor.");
  return numbers.as<int64_t>();
}

std::array<int64_t, 3> panels_shape(Dtype dtype, int64_t out, int64_t in) {
  const bool integers = dtype == Dtype::int8;
  const int32_t kind = integers ? CH_FLOAT32 : static_cast<int32_t>(dtype);
  const int64_t columns = ch_panel_columns(kind, instruction_set), panels = (out + columns - 1) / columns;
  const int64_t bytes =
      integers ? ch_quantized_panel_bytes(instruction_set, in, out) : ch_panel_bytes(kind, instruction_set, in, out);
  return {panels, columns, panels == 0 ? 0 : bytes / (panels * columns)};
}

Linear packed_linear_of(const char* function, const Tensor& panels, int64_t out, int64_t in, Dtype dtype) {
  const auto [count, columns, bytes] = panels_shape(dtype, out, in);
  if (!panels.is_shaped({count, columns, bytes}) || panels.dtype() != Dtype::byte || !panels.contiguous())
    fail(function, "panels", "be bytes [" + std::to_string(count) + ", " + std::to_string(columns) + ", " + std::to_string(bytes) + "], as pack_weight makes them",
         panels.shape(), "Pack the weight again.");
  Linear layer;
  layer.out = out, layer.in = in, layer.panels = panels.data(), layer.step = bytes;
  return layer;
}

void pack_weight(Dtype dtype, const Linear& layer, void* panels) {
  if (dtype == Dtype::int8) return pack_integers(layer, panels);
  ch_projection work = describe<ch_projection>(dtype);
  work.num_terms = 1, work.right_transposed = layer.transposed ? 0 : 1, work.columns = layer.out;
  work.terms[0] = {nullptr, layer.weight, 0, layer.step, layer.in};
  work.output = panels;
  check_kernel(ch_pack(&work), "pack_weight");
}

void unpack_weight(Dtype dtype, const Linear& layer, void* weight) {
  ch_projection work = describe<ch_projection>(dtype);
  work.num_terms = 1, work.right_transposed = 1, work.columns = layer.out;
  work.terms[0] = {nullptr, nullptr, 0, layer.in, layer.in};
  work.panels = layer.panels, work.output = weight, work.output_row = layer.in;
  check_kernel(ch_unpack(&work), "unpack_weight");
}

void linears(Dtype dtype, const Matrix& x, const std::vector<LinearCall>& calls) {
  std::vector<ch_quantized> works;  // that read the same rounded rows
  const auto multiply = [&] {
    if (!works.empty()) check_kernel(ch_multiply_quantized(works.data(), static_cast<int32_t>(works.size())), "linear_quantized");
    works.clear();
  };
  for (size_t index = 0; index < calls.size(); ++index) {
    const Integers& integers = calls[index].layer->integers;
    if (index > 0 && !round_alike(integers, calls[index - 1].layer->integers)) multiply();
    const bool empty = x.rows == 0 || calls[index].layer->out == 0;
    if (integers.bits != 0 && !empty) works.push_back(quantized_of(dtype, x, calls[index]));
    if (integers.bits == 0) linear(dtype, x, *calls[index].layer, calls[index].output, calls[index].epilogue);
  }
  multiply();
}

void linear(Dtype dtype, const Matrix& x, const Linear& layer, const Matrix& output, const Epilogue& epilogue) {
  if (layer.integers.bits != 0) return linears(dtype, x, {{&layer, output, epilogue}});
  ch_projection work = describe<ch_projection>(dtype);
  work.num_terms = 1, work.right_transposed = layer.transposed ? 0 : 1;
  work.rows = x.rows, work.columns = layer.out;
  work.terms[0] = {x.data, layer.weight, x.step, layer.step, x.columns};
  work.bias = layer.bias, work.output = output.data, work.output_row = output.step;
  work.panels = layer.panels;
  set_epilogue(work, epilogue);
  run(work);
}

void input_gradient(Dtype dtype, const std::vector<InputTerm>& terms, const Matrix& output, const Epilogue& epilogue) {
  ch_projection work = describe<ch_projection>(dtype);
  work.num_terms = static_cast<int32_t>(terms.size());
  work.rows = output.rows, work.columns = output.columns, work.output = output.data, work.output_row = output.step;
  bool all_transposed = true, any_transposed = false;
  for (const InputTerm& term : terms) {
    all_transposed = all_transposed && term.layer.transposed;
    any_transposed = any_transposed || term.layer.transposed;
  }
  work.right_transposed = all_transposed ? 1 : 0;
  Workspace copies;
  for (size_t index = 0; index < terms.size(); ++index) {
    const auto& [grad, layer] = terms[index];
    ch_term& term = work.terms[index];
    term = {grad.data, layer.weight, grad.step, layer.step, layer.out};
    if (any_transposed && !all_transposed && layer.transposed) {
      // A call has one layout for the right operands of all its terms.
      const int64_t size = size_of(dtype);
      char* copy = static_cast<char*>(copies.take(layer.out * layer.in * size));
      for (int64_t row = 0; row < layer.out; ++row)
        for (int64_t column = 0; column < layer.in; ++column)
          memcpy(copy + (row * layer.in + column) * size, offset(layer.weight, column * layer.step + row, dtype),
                 static_cast<size_t>(size));
      term.right = copy, term.right_row = layer.in;
    }
  }
  set_epilogue(work, epilogue);
  run(work);
}

namespace {

// Whether the gradients of parameters are those of each sequence, added up in the order of a tree.
bool sums_by_sequence(int64_t rows, int64_t sequences) { return sequences > 1 && rows > 0 && is_invariant(); }

void add(Dtype dtype, const Matrix& from, const Matrix& to) {
  if (to) dropout_add(dtype, from, 0, {}, to.data, to.data);
}

// Gradients of a weight and of a bias; contiguous, null if they are not requested.
struct ParameterGradients {
  Matrix weight, bias;
};

// Sums of `compute(sequence, gradients)` over sequences, in `results`: pairs of neighbours, pairs of pairs, and so on.
template <class Compute>
void add_sequences(Dtype dtype, int64_t sequences, const ParameterGradients& results, const Compute& compute) {
  Workspace workspace;
  std::vector<ParameterGradients> nodes;  // sums of finished nodes, the largest first
  nodes.push_back(results);
  size_t count = 0;
  const auto combine_last = [&] {
    --count;
    add(dtype, nodes[count].weight, nodes[count - 1].weight);
    add(dtype, nodes[count].bias, nodes[count - 1].bias);
  };
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    if (count == nodes.size()) {
      nodes.push_back(results);
      for (Matrix* matrix : {&nodes.back().weight, &nodes.back().bias})
        if (*matrix) matrix->data = workspace.take(matrix->rows * matrix->columns * size_of(dtype));
    }
    compute(sequence, nodes[count++]);
    for (int64_t node = sequence; node % 2 == 1; node /= 2) combine_last();
  }
  while (count > 1) combine_last();
}

// Rows [first, first + count) of a call.
NormBackward part_of(Dtype dtype, const NormBackward& call, int64_t first, int64_t count) {
  NormBackward part = call;
  part.sum = call.sum.rows_from(first, count, dtype);
  part.moments += 2 * first, part.seed = call.seed.from(first);
  const int64_t bytes = first * call.sum.columns * size_of(dtype);
  for (const void** read : {&part.grad_output, &part.grad_output_second, &part.grad_residual})
    if (*read != nullptr) *read = static_cast<const char*>(*read) + bytes;
  for (void** written : {&part.grad_sum, &part.grad_input})
    if (*written != nullptr) *written = static_cast<char*>(*written) + bytes;
  return part;
}

// The rows of one of several sequences.
Matrix sequence_of(const Matrix& rows, int64_t sequence, int64_t sequences, Dtype dtype) {
  const int64_t length = rows.rows / sequences;
  return rows.rows_from(sequence * length, length, dtype);
}

}  // namespace

void add_batch_entries(Dtype dtype, const Matrix& first, int64_t batch) {
  const int64_t bytes = first.rows * first.columns * size_of(dtype);
  const auto entry = [&](int64_t index) {
    Matrix matrix = first;
    matrix.data = static_cast<char*>(first.data) + index * bytes;
    return matrix;
  };
  for (int64_t step = 1; step < batch; step *= 2)
    for (int64_t index = 0; index + step < batch; index += 2 * step) add(dtype, entry(index + step), entry(index));
}

void weight_gradient(Dtype dtype, const Matrix& grad, const Matrix& x, const Matrix& weight, void* bias, int64_t sequences) {
  if (x.columns == 0 && bias != nullptr) return bias_gradient(dtype, grad, bias, sequences);
  if (sums_by_sequence(grad.rows, sequences)) {
    const Matrix sums = {bias, 1, grad.columns, grad.columns};
    return add_sequences(dtype, sequences, {weight, sums}, [&](int64_t sequence, const ParameterGradients& results) {
      weight_gradient(dtype, sequence_of(grad, sequence, sequences, dtype), sequence_of(x, sequence, sequences, dtype),
                      results.weight, results.bias.data, 1);
    });
  }
  ch_projection work = describe<ch_projection>(dtype);
  work.num_terms = 1, work.left_transposed = 1;
  work.rows = grad.columns, work.columns = x.columns;
  work.terms[0] = {grad.data, x.data, grad.step, x.step, grad.rows};
  work.output = weight.data, work.output_row = weight.step, work.row_sums = bias;
  run(work);
}

void bias_gradient(Dtype dtype, const Matrix& grad, void* bias, int64_t sequences) {
  // The same GEMM as the weight gradient, with a single column of ones.
  Workspace workspace;
  const int64_t size = size_of(dtype);
  char* ones = static_cast<char*>(workspace.take(grad.rows * size));
  char* unread = static_cast<char*>(workspace.take(grad.columns * size));
  const float one = 1.0f;
  const uint16_t bfloat16_one = 0x3f80, float16_one = 0x3c00;
  for (int64_t row = 0; row < grad.rows; ++row) {
    const void* number = dtype == Dtype::float32 ? static_cast<const void*>(&one)
                         : dtype == Dtype::bfloat16 ? static_cast<const void*>(&bfloat16_one) : &float16_one;
    memcpy(ones + row * size, number, static_cast<size_t>(size));
  }
  weight_gradient(dtype, grad, {ones, grad.rows, 1, 1}, {unread, grad.columns, 1, 1}, bias, sequences);
}

void norm(Dtype dtype, const Norm& norm, const NormForward& call) {
  if (call.input.rows == 0 || call.input.columns == 0) return;
  ch_norm work = describe<ch_norm>(dtype);
  work.kind = norm.kind, work.epsilon = norm.epsilon, work.weight = norm.weight, work.bias = norm.bias;
  work.rows = call.input.rows, work.columns = call.input.columns;
  work.dropped = call.dropped, work.seed = call.seed.value, work.first_row = call.seed.first_row;
  work.row_numbers = call.seed.row_numbers;
  work.input = call.input.data, work.added = call.added, work.sum = call.sum, work.moments = call.moments;
  work.output = call.output;
  check_kernel(ch_norm_forward(&work), "norm");
}

void norm_backward(Dtype dtype, const Norm& norm, const NormBackward& call, int64_t sequences) {
  if (call.sum.columns == 0) return;
  if (sums_by_sequence(call.sum.rows, sequences)) {
    const int64_t columns = call.sum.columns;
    const ParameterGradients results = {{call.grad_weight, 1, columns, columns}, {call.grad_bias, 1, columns, columns}};
    return add_sequences(dtype, sequences, results, [&](int64_t sequence, const ParameterGradients& sums) {
      NormBackward part = part_of(dtype, call, sequence * (call.sum.rows / sequences), call.sum.rows / sequences);
      part.grad_weight = sums.weight.data, part.grad_bias = sums.bias.data;
      norm_backward(dtype, norm, part, 1);
    });
  }
  ch_norm work = describe<ch_norm>(dtype);
  work.kind = norm.kind, work.epsilon = norm.epsilon, work.weight = norm.weight;
  work.rows = call.sum.rows, work.columns = call.sum.columns;
  work.dropped = call.dropped, work.seed = call.seed.value, work.first_row = call.seed.first_row;
  work.row_numbers = call.seed.row_numbers;
  work.sum = call.sum.data, work.moments = const_cast<float*>(call.moments);
  work.grad_output = call.grad_output, work.grad_output_second = call.grad_output_second, work.grad_residual = call.grad_residual;
  work.grad_sum = call.grad_sum, work.grad_input = call.grad_input;
  work.grad_weight = call.grad_weight, work.grad_bias = call.grad_bias;
  check_kernel(ch_norm_backward(&work), "norm");
}

void dropout_add(Dtype dtype, const Matrix& input, int32_t dropped, Seed seed, const void* added, void* output) {
  if (input.rows == 0 || input.columns == 0) return;
  ch_dropout work = describe<ch_dropout>(dtype);
  work.dropped = dropped, work.seed = seed.value, work.first_row = seed.first_row, work.row_numbers = seed.row_numbers;
  work.rows = input.rows, work.columns = input.columns;
  work.input = input.data, work.added = added, work.output = output;
  check_kernel(ch_drop(&work), "dropout");
}

void rotate(Dtype dtype, const Rotation& call) {
  ch_rotation work = describe<ch_rotation>(dtype);
  work.back = call.back ? 1 : 0;
  work.batch = call.batch, work.heads = call.heads, work.rows = call.rows, work.columns = call.columns;
  work.first = call.first, work.positions = call.positions, work.table = call.table;
  work.source = call.source, work.target = call.target;
  check_kernel(ch_rotate(&work), "rotary");
}

void append_rows(Dtype dtype, int64_t batch, int64_t heads, int64_t rows, int64_t columns, int64_t first,
                 const ch_tensor& source, const ch_tensor& target, bool quantized) {
  ch_append work = describe<ch_append>(dtype);
  work.quantized = quantized ? 1 : 0;
  work.batch = batch, work.heads = heads, work.rows = rows, work.columns = columns, work.first = first;
  work.source = source, work.target = target;
  check_kernel(ch_append_rows(&work), "cache_append");
}

}  // namespace clearhead::torch
