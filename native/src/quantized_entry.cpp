// The entry points of quantised linear layers.
#include "checks.h"

namespace clearhead {
namespace {

int check_rounding(const ch_quantized& work) {
  if (work.rounding < CH_ROUND_NONE || work.rounding > CH_ROUND_TENSOR) return CH_BAD_OPTION;
  if (work.rounding == CH_ROUND_NONE) return CH_OK;
  if (work.bits != 8 || work.group != work.steps || work.offset != nullptr) return CH_BAD_OPTION;
  if (work.low < -128 || work.high > 127 || work.low >= work.high) return CH_BAD_OPTION;
  return work.steps > CH_MAX_ROUNDED ? CH_BAD_SHAPE : CH_OK;
}

int check_sizes(const ch_quantized& work) {
  if (work.dtype < CH_FLOAT32 || work.dtype > CH_FLOAT16) return CH_BAD_DTYPE;
  if (work.bits != 4 && work.bits != 8) return CH_BAD_OPTION;
  if (!is_count(work.rows) || !is_count(work.columns) || !is_count(work.steps)) return CH_BAD_SHAPE;
  if (!countable(1, 1, work.rows, work.columns) || !countable(1, 1, work.rows, work.steps) ||
      !countable(1, 1, work.columns, work.steps))
    return CH_BAD_SHAPE;
  if (work.steps > 0 && (work.group < 1 || work.steps % work.group != 0)) return CH_BAD_SHAPE;
  if (work.bits == 4 && work.steps % 2 != 0) return CH_BAD_SHAPE;
  if (work.threads < 1 || work.threads > max_threads) return CH_BAD_OPTION;
  if (work.activation < CH_PLAIN || work.activation > CH_QUICK_GELU) return CH_BAD_OPTION;
  if (work.gate != nullptr && work.activation != CH_PLAIN) return CH_BAD_OPTION;
  return check_rounding(work);
}

int check_rows(const void* data, int64_t rows, int64_t stride, int64_t last, int64_t size, Access access = Access::read) {
  return check_memory(data, {{{rows, stride}, {1, 0}, {1, 0}}, last}, size, access);
}

// Panels are words; a weight without elements has none.
int check_panels(const ch_quantized& work, const void* panels) {
  if (work.columns == 0 || work.steps == 0) return CH_OK;
  return panels == nullptr || (uintptr_t)panels % sizeof(uint32_t) != 0 ? CH_BAD_POINTER : CH_OK;
}

int check(const ch_quantized& work) {
  CH_TRY(check_sizes(work));
  const int64_t size = work.dtype == CH_FLOAT32 ? 4 : 2, groups = work.steps > 0 ? work.steps / work.group : 0;
  CH_TRY(check_rows(work.x, work.rows, work.x_row, work.steps, size));
  if (work.panels != nullptr && work.rounding == CH_ROUND_NONE) return CH_BAD_OPTION;
  if (work.panels != nullptr) CH_TRY(check_panels(work, work.panels));
  else CH_TRY(check_rows(work.weight, work.columns, work.weight_row, work.steps * work.bits / 8, 1));
  CH_TRY(check_rows(work.scale, work.columns, groups, groups, sizeof(float)));
  if (work.offset != nullptr) CH_TRY(check_rows(work.offset, work.columns, groups, groups, sizeof(float)));
  if (work.bias != nullptr) CH_TRY(check_rows(work.bias, 1, 0, work.columns, size));
  if (work.gate != nullptr) CH_TRY(check_rows(work.gate, work.rows, work.gate_row, work.columns, size));
  return check_rows(work.output, work.rows, work.output_row, work.columns, size, Access::write);
}

// Whether rows that a layer rounds are those of another.
bool round_alike(const ch_quantized& a, const ch_quantized& b) {
  const bool same_rows = a.x == b.x && a.x_row == b.x_row && a.rows == b.rows && a.steps == b.steps && a.dtype == b.dtype;
  return same_rows && a.isa == b.isa && a.rounding == b.rounding && a.low == b.low && a.high == b.high;
}

int check_layers(const ch_quantized* layers, int32_t count) {
  const Kernels* kernels = nullptr;
  if (count < 1) return CH_BAD_SHAPE;
  for (int32_t i = 0; i < count; i++) {
    CH_TRY(check_library(layers == nullptr ? nullptr : &layers[i], &kernels));
    CH_TRY(check(layers[i]));
    if (count > 1 && (layers[i].rounding == CH_ROUND_NONE || !round_alike(layers[0], layers[i]))) return CH_BAD_OPTION;
  }
  return CH_OK;
}

int check_pack(const ch_quantized& work) {
  CH_TRY(check_sizes(work));
  if (work.rounding == CH_ROUND_NONE || work.panels != nullptr) return CH_BAD_OPTION;
  CH_TRY(check_rows(work.weight, work.columns, work.weight_row, work.steps, 1));
  return check_panels(work, work.output);
}

}  // namespace
}  // namespace clearhead

extern "C" {

int ch_multiply_quantized(const ch_quantized* layers, int32_t count) {
  CH_TRY(clearhead::check_layers(layers, count));
  if (layers->rows == 0 || (count == 1 && layers->columns == 0)) return CH_OK;
  return clearhead::quantized_kernels_of(layers->isa)->multiply(layers, count);
}

int ch_pack_quantized(const ch_quantized* work) {
  const clearhead::Kernels* kernels = nullptr;
  CH_TRY(clearhead::check_library(work, &kernels));
  CH_TRY(clearhead::check_pack(*work));
  return work->columns == 0 ? CH_OK : clearhead::quantized_kernels_of(work->isa)->pack(work);
}

int64_t ch_quantized_panel_bytes(int32_t isa, int64_t steps, int64_t columns) {
  const clearhead::QuantizedKernels* kernels = clearhead::quantized_kernels_of(isa);
  if (kernels == nullptr || !clearhead::is_count(steps) || !clearhead::is_count(columns)) return 0;
  return clearhead::countable(1, 1, columns, steps) ? kernels->panel_bytes(steps, columns) : 0;
}

}  // extern "C"
