// The entry points of elementwise kernels: dropout, norms, KV cache appends, and RoPE.
#include "checks.h"

namespace clearhead {
namespace {

// `count` contiguous elements.
int check_line(const void* data, int64_t count, int64_t size, Access access = Access::read) {
  return check_memory(data, {{{1, 0}, {1, 0}, {1, 0}}, count}, size, access);
}

// The same, or null.
int check_optional_line(const void* data, int64_t count, int64_t size, Access access = Access::read) {
  return data == nullptr ? CH_OK : check_line(data, count, size, access);
}

// Common fields: dtype, counts, threads, and dropout.
template <class Description> int check_common(const Description& work) {
  if (work.dtype != CH_FLOAT32 && work.dtype != CH_BFLOAT16 && work.dtype != CH_FLOAT16) return CH_BAD_DTYPE;
  if (!is_count(work.rows) || work.columns < 0 || work.columns > max_position) return CH_BAD_SHAPE;
  if (!countable(1, 1, work.rows, work.columns) || !is_place(work.first_row)) return CH_BAD_SHAPE;
  CH_TRY(check_optional_line(work.row_numbers, work.rows, sizeof(int64_t)));
  return work.threads < 1 || work.threads > max_threads || !is_dropout_level(work.dropped) ? CH_BAD_OPTION : CH_OK;
}

int check(const ch_dropout& work) {
  CH_TRY(check_common(work));
  const int64_t size = work.dtype == CH_FLOAT32 ? 4 : 2, count = work.rows * work.columns;
  CH_TRY(check_line(work.input, count, size));
  CH_TRY(check_optional_line(work.added, count, size));
  return check_line(work.output, count, size, Access::write);
}

// A line of floats, with padding, is counted in 32 bits.
constexpr int64_t max_columns = max_count - 1024;

int check_norm(const ch_norm& work) {
  CH_TRY(check_common(work));
  if (work.columns > max_columns || (work.columns == 0 && work.rows > 0)) return CH_BAD_SHAPE;
  if (work.kind < CH_NORM_LAYER || work.kind > CH_NORM_RMS_FROM_ONE) return CH_BAD_OPTION;
  if (!(work.epsilon >= 0 && work.epsilon <= __DBL_MAX__)) return CH_BAD_OPTION;
  return check_optional_line(work.weight, work.columns, work.dtype == CH_FLOAT32 ? 4 : 2);
}

int check_forward(const ch_norm& work) {
  CH_TRY(check_norm(work));
  const int64_t size = work.dtype == CH_FLOAT32 ? 4 : 2, count = work.rows * work.columns;
  CH_TRY(check_optional_line(work.bias, work.columns, size));
  CH_TRY(check_line(work.input, count, size));
  CH_TRY(check_optional_line(work.added, count, size));
  CH_TRY(check_optional_line(work.sum, count, size, Access::write));
  CH_TRY(check_optional_line(work.moments, 2 * work.rows, sizeof(float), Access::write));
  return check_line(work.output, count, size, Access::write);
}

int check_backward(const ch_norm& work) {
  CH_TRY(check_norm(work));
  const int64_t size = work.dtype == CH_FLOAT32 ? 4 : 2, count = work.rows * work.columns;
  CH_TRY(check_line(work.sum, count, size));
  CH_TRY(check_line(work.moments, 2 * work.rows, sizeof(float)));
  CH_TRY(check_line(work.grad_output, count, size));
  CH_TRY(check_optional_line(work.grad_output_second, count, size));
  CH_TRY(check_optional_line(work.grad_residual, count, size));
  CH_TRY(check_line(work.grad_sum, count, size, Access::write));
  CH_TRY(check_optional_line(work.grad_input, count, size, Access::write));
  CH_TRY(check_optional_line(work.grad_weight, work.columns, size, Access::write));
  return check_optional_line(work.grad_bias, work.columns, size, Access::write);
}

// Rows of heads that are copied between tensors, after `first` others.
template <class Description> int check_rows(const Description& work) {
  if (work.dtype != CH_FLOAT32 && work.dtype != CH_BFLOAT16 && work.dtype != CH_FLOAT16) return CH_BAD_DTYPE;
  for (int64_t count : {work.batch, work.heads, work.rows, work.columns, work.first})
    if (!is_count(count)) return CH_BAD_SHAPE;
  if (!countable(work.batch, work.heads, work.first + work.rows, work.columns)) return CH_BAD_SHAPE;
  return work.threads < 1 || work.threads > max_threads ? CH_BAD_OPTION : CH_OK;
}

template <class Description> Layout layout_of(const Description& work, const ch_tensor& tensor, int64_t rows) {
  return Layout{{{work.batch, tensor.batch}, {work.heads, tensor.head}, {rows, tensor.row}}, work.columns};
}

int check(const ch_append& work) {
  CH_TRY(check_rows(work));
  if (work.quantized != 0 && work.quantized != 1) return CH_BAD_OPTION;
  const int64_t size = work.dtype == CH_FLOAT32 ? 4 : 2;
  CH_TRY(check_memory(work.source.data, layout_of(work, work.source, work.rows), size));
  Layout target = layout_of(work, work.target, work.first + work.rows);
  if (work.quantized) target.last += CH_SCALE_BYTES;
  return check_memory(work.target.data, target, work.quantized ? 1 : size, Access::write);
}

int check(const ch_rotation& work) {
  CH_TRY(check_rows(work));
  if (work.columns % 2 != 0 || !is_count(work.positions) || work.first + work.rows > work.positions)
    return CH_BAD_SHAPE;
  if (work.back != 0 && work.back != 1) return CH_BAD_OPTION;
  const int64_t size = work.dtype == CH_FLOAT32 ? 4 : 2;
  CH_TRY(check_memory(work.table, Layout{{{1, 0}, {1, 0}, {work.positions, work.columns}}, work.columns}, sizeof(float)));
  CH_TRY(check_memory(work.source.data, layout_of(work, work.source, work.rows), size));
  return check_memory(work.target.data, layout_of(work, work.target, work.rows), size, Access::write);
}

template <class Description> bool is_empty(const Description& work) {
  return work.batch == 0 || work.heads == 0 || work.rows == 0 || work.columns == 0;
}

}  // namespace
}  // namespace clearhead

extern "C" {

int ch_drop(const ch_dropout* work) {
  const clearhead::Kernels* kernels = nullptr;
  CH_TRY(clearhead::check_library(work, &kernels));
  CH_TRY(clearhead::check(*work));
  return work->rows == 0 || work->columns == 0 ? CH_OK : kernels->drop(work);
}

int ch_norm_forward(const ch_norm* work) {
  const clearhead::Kernels* kernels = nullptr;
  CH_TRY(clearhead::check_library(work, &kernels));
  CH_TRY(clearhead::check_forward(*work));
  return work->rows == 0 ? CH_OK : kernels->norm(work);
}

int ch_norm_backward(const ch_norm* work) {
  const clearhead::Kernels* kernels = nullptr;
  CH_TRY(clearhead::check_library(work, &kernels));
  CH_TRY(clearhead::check_backward(*work));
  return work->columns == 0 ? CH_OK : kernels->norm_backward(work);
}

int ch_append_rows(const ch_append* work) {
  const clearhead::Kernels* kernels = nullptr;
  CH_TRY(clearhead::check_library(work, &kernels));
  CH_TRY(clearhead::check(*work));
  return clearhead::is_empty(*work) ? CH_OK : kernels->append(work);
}

int ch_rotate(const ch_rotation* work) {
  const clearhead::Kernels* kernels = nullptr;
  CH_TRY(clearhead::check_library(work, &kernels));
  CH_TRY(clearhead::check(*work));
  return clearhead::is_empty(*work) ? CH_OK : kernels->rotate(work);
}

}  // extern "C"
