// The kernels' calls on matrices in memory, one function each, from which operators and fused layers are composed.
#pragma once

#include "tensor.h"

#include <array>

namespace clearhead::torch {

// [rows, columns] in memory with a row stride of `step` elements.
struct Matrix {
  void* data = nullptr;
  int64_t rows = 0, columns = 0, step = 0;

  explicit operator bool() const { return data != nullptr; }
  // Columns `first` to `first + count`, or the same rows.
  Matrix columns_from(int64_t first, int64_t count, Dtype dtype) const;
  Matrix rows_from(int64_t first, int64_t count, Dtype dtype) const;
};

// How a weight of integers is read, as in ch_quantized; `bits` is 0 for a weight in floating point.
struct Integers {
  int32_t bits = 0, rounding = CH_ROUND_NONE, low = -128, high = 127;
  int64_t group = 0;
  const float *scale = nullptr, *offset = nullptr;
};

// A linear layer: `weight` is [out, in], stored as such or transposed as [in, out]; `bias` is null for none. Strides of a
// weight of integers count bytes.
struct Linear {
  const void* weight = nullptr;
  int64_t out = 0, in = 0, step = 0;
  bool transposed = false;
  const void* bias = nullptr;
  const void* panels = nullptr;  // the weight as `pack_weight` wrote it, in place of `weight`; null for none
  Integers integers;

  // Rows `first` to `first + count` of the weight, and the same part of the bias. Panels begin at a multiple of their columns.
  Linear outputs_from(int64_t first, int64_t count, Dtype dtype) const;
};

// Reads a weight [out, in] and a bias [out], which may be undefined. Tensors that the kernels cannot read in place are
// copied into `copies`, which must outlive the result.
Linear linear_of(const char* function, const Tensor& weight, const Tensor& bias, Dtype dtype, std::vector<Tensor>& copies);

// Reads a bias [out]. A copy is kept in `copies`, as above.
const void* bias_of(const char* function, const Tensor& bias, int64_t out, Dtype dtype, std::vector<Tensor>& copies);

// The shape of the panels of a weight [out, in] of floats, or of int8 for rounded inputs: panels, columns of each, and bytes of
// each column.
std::array<int64_t, 3> panels_shape(Dtype dtype, int64_t out, int64_t in);
// Reads a weight from its panels, of that shape.
Linear packed_linear_of(const char* function, const Tensor& panels, int64_t out, int64_t in, Dtype dtype);
void pack_weight(Dtype dtype, const Linear& layer, void* panels);
// Writes a packed weight [out, in].
void unpack_weight(Dtype dtype, const Linear& layer, void* weight);

// The seed of a dropout, and the numbers of the rows: those from `first_row` on, which is the first row's index in the
// whole that the call is a part of, or one for each row.
struct Seed {
  uint64_t value = 0;
  int64_t first_row = 0;
  const int64_t* row_numbers = nullptr;

  // Of the rows from `first` on.
  Seed from(int64_t first) const { return {value, first_row + first, row_numbers == nullptr ? nullptr : row_numbers + first}; }
};

// Reads the numbers of `rows` rows; null for an undefined tensor.
const int64_t* row_numbers_of(const char* function, const Tensor& numbers, int64_t rows);

// The epilogue of a forward GEMM, besides the bias.
struct Epilogue {
  int32_t activation = CH_PLAIN;  // enum ch_activation
  int32_t dropped = 0;            // of CH_LEVELS
  Seed seed;
  Matrix slope;  // written: the derivative of the activation, or of the product with a gate
  Matrix gate;  // factors of the sums (CH_GATE_SLOPE), or a ReLU's output (CH_GATE_OUTPUT)
  int32_t gate_kind = CH_GATE_OUTPUT;
  Matrix slope_gate;
};

// output = epilogue(x weight^T + bias); for a weight of integers without dropout and slopes.
void linear(Dtype dtype, const Matrix& x, const Linear& layer, const Matrix& output, const Epilogue& epilogue = {});

// The same for several layers that read one x, in order: rows that neighbours round alike are rounded once.
struct LinearCall {
  const Linear* layer;
  Matrix output;
  Epilogue epilogue;
};
void linears(Dtype dtype, const Matrix& x, const std::vector<LinearCall>& calls);

// One term of an input's gradient: grad weight.
struct InputTerm {
  Matrix grad;
  Linear layer;
};

// output = epilogue(sum over terms of grad weight); at most CH_MAX_TERMS terms.
void input_gradient(Dtype dtype, const std::vector<InputTerm>& terms, const Matrix& output, const Epilogue& epilogue = {});

// weight = grad^T x, and bias = the column sums of grad unless it is null. The rows are those of `sequences` of one
// length; in invariant mode their gradients are added in the order of a binary tree over their index, so that an aligned
// power of two of them is a node of the tree in every batch.
void weight_gradient(Dtype dtype, const Matrix& grad, const Matrix& x, const Matrix& weight, void* bias, int64_t sequences);

// bias = the column sums of grad, without a weight gradient.
void bias_gradient(Dtype dtype, const Matrix& grad, void* bias, int64_t sequences);

// Adds tensors of one size, one for each batch entry, to the first one, in the order of the same tree.
void add_batch_entries(Dtype dtype, const Matrix& first, int64_t batch);

// A norm: its kind (enum ch_norm_kind), epsilon, and optional weight and bias (null).
struct Norm {
  int32_t kind = CH_NORM_LAYER;
  double epsilon = 0.0;
  const void* weight = nullptr;
  const void* bias = nullptr;
};

// sum = dropped(input) + added; output = norm(sum). All contiguous; sum and moments are written unless they are null.
struct NormForward {
  Matrix input;
  const void* added = nullptr;
  int32_t dropped = 0;
  Seed seed;
  void* sum = nullptr;
  float* moments = nullptr;
  void* output = nullptr;
};
void norm(Dtype dtype, const Norm& norm, const NormForward& call);

// The gradients of NormForward's input and of the added tensor (grad_sum); null pointers are absent or not requested.
struct NormBackward {
  Matrix sum;
  const float* moments = nullptr;
  int32_t dropped = 0;
  Seed seed;
  const void* grad_output = nullptr;
  const void* grad_output_second = nullptr;
  const void* grad_residual = nullptr;
  void* grad_sum = nullptr;
  void* grad_input = nullptr;  // only with dropout; without it, grad_sum is the same
  void* grad_weight = nullptr;
  void* grad_bias = nullptr;
};
void norm_backward(Dtype dtype, const Norm& norm, const NormBackward& call, int64_t sequences);

// output = dropped(input) + added, contiguous; added is null for none.
void dropout_add(Dtype dtype, const Matrix& input, int32_t dropped, Seed seed, const void* added, void* output);

// RoPE of [batch, heads, rows, columns] with a table [positions, columns] of cosines, then sines.
struct Rotation {
  int64_t batch = 0, heads = 0, rows = 0, columns = 0, first = 0, positions = 0;
  const float* table = nullptr;
  ch_tensor source = {}, target = {};
  bool back = false;
};
void rotate(Dtype dtype, const Rotation& call);

// target[:, :, first + r] = source[:, :, r], where `quantized` rounded to int8.
void append_rows(Dtype dtype, int64_t batch, int64_t heads, int64_t rows, int64_t columns, int64_t first,
                 const ch_tensor& source, const ch_tensor& target, bool quantized);

}  // namespace clearhead::torch
