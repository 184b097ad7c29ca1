// The entry points of the GEMMs of linear layers.
#include "checks.h"

namespace clearhead {
namespace {

int64_t element_size(const ch_projection& work) { return work.dtype == CH_FLOAT32 ? 4 : 2; }

// A matrix of `rows` by `columns`, or its transpose.
int check_matrix(const ch_projection& work, const void* data, int64_t rows, int64_t columns, int64_t row, bool transposed,
                 Access access) {
  const int64_t leading = transposed ? columns : rows, last = transposed ? rows : columns;
  return check_memory(data, {{{leading, row}, {1, 0}, {1, 0}}, last}, element_size(work), access);
}

int check_vector(const ch_projection& work, const void* data, int64_t count) {
  return data == nullptr ? CH_OK : check_matrix(work, data, 1, count, 0, false, Access::read);
}

// Activation, dropout and gate: each is valid, and so is the combination.
int check_epilogue(const ch_projection& work) {
  if (work.activation < CH_PLAIN || work.activation > CH_QUICK_GELU || !is_dropout_level(work.dropped)) return CH_BAD_OPTION;
  if (work.gate == nullptr) return work.slope_gate == nullptr ? CH_OK : CH_BAD_OPTION;
  if (work.gate_kind != CH_GATE_OUTPUT && work.gate_kind != CH_GATE_SLOPE) return CH_BAD_OPTION;
  if (work.activation != CH_PLAIN || (work.slope == nullptr) != (work.slope_gate == nullptr)) return CH_BAD_OPTION;
  if (work.slope != nullptr && work.gate_kind != CH_GATE_SLOPE) return CH_BAD_OPTION;
  return work.gate_kind == CH_GATE_SLOPE && work.dropped != 0 ? CH_BAD_OPTION : CH_OK;
}

int check_sizes(const ch_projection& work) {
  if (work.dtype != CH_FLOAT32 && work.dtype != CH_BFLOAT16 && work.dtype != CH_FLOAT16) return CH_BAD_DTYPE;
  if (work.num_terms < 1 || work.num_terms > CH_MAX_TERMS) return CH_BAD_SHAPE;
  if (!is_count(work.rows) || !is_count(work.columns)) return CH_BAD_SHAPE;
  if (!countable(1, 1, work.rows, work.columns) || !is_place(work.first_row)) return CH_BAD_SHAPE;
  for (int t = 0; t < work.num_terms; ++t) {
    const int64_t steps = work.terms[t].steps;
    if (!is_count(steps) || !countable(1, 1, work.rows, steps) || !countable(1, 1, work.columns, steps))
      return CH_BAD_SHAPE;
  }
  if (work.threads < 1 || work.threads > max_threads) return CH_BAD_OPTION;
  for (int32_t flag : {work.left_transposed, work.right_transposed}) {
    if (flag != 0 && flag != 1) return CH_BAD_OPTION;
  }
  CH_TRY(check_epilogue(work));
  if (work.panels != nullptr && (work.num_terms != 1 || work.left_transposed)) return CH_BAD_OPTION;
  if (work.row_sums == nullptr) return CH_OK;
  // Row sums are not defined for several terms or for a left that is read in place, and need at least one column.
  if (work.columns == 0) return CH_BAD_SHAPE;
  return !work.left_transposed || work.num_terms != 1 ? CH_BAD_OPTION : CH_OK;
}

int check(const ch_projection& work) {
  CH_TRY(check_sizes(work));
  if (work.row_numbers != nullptr)
    CH_TRY(check_memory(work.row_numbers, {{{1, 0}, {1, 0}, {1, 0}}, work.rows}, sizeof(int64_t)));
  for (int t = 0; t < work.num_terms; ++t) {
    const ch_term& term = work.terms[t];
    CH_TRY(check_matrix(work, term.left, work.rows, term.steps, term.left_row, work.left_transposed, Access::read));
    // Packed, right itself is not read.
    if (work.panels == nullptr)
      CH_TRY(check_matrix(work, term.right, term.steps, work.columns, term.right_row, work.right_transposed, Access::read));
  }
  CH_TRY(check_vector(work, work.bias, work.columns));
  if (work.gate != nullptr)
    CH_TRY(check_matrix(work, work.gate, work.rows, work.columns, work.gate_row, false, Access::read));
  if (work.slope_gate != nullptr)
    CH_TRY(check_matrix(work, work.slope_gate, work.rows, work.columns, work.slope_gate_row, false, Access::read));
  if (work.slope != nullptr)
    CH_TRY(check_matrix(work, work.slope, work.rows, work.columns, work.slope_row, false, Access::write));
  CH_TRY(check_vector(work, work.row_sums, work.rows));
  return check_matrix(work, work.output, work.rows, work.columns, work.output_row, false, Access::write);
}

int check_pack(const ch_projection& work) {
  CH_TRY(check_sizes(work));
  if (work.num_terms != 1 || work.left_transposed || work.panels != nullptr) return CH_BAD_OPTION;
  const ch_term& term = work.terms[0];
  CH_TRY(check_matrix(work, term.right, term.steps, work.columns, term.right_row, work.right_transposed, Access::read));
  return work.output == nullptr ? CH_BAD_POINTER : CH_OK;
}

int check_unpack(const ch_projection& work) {
  CH_TRY(check_sizes(work));
  if (work.num_terms != 1 || !work.right_transposed || work.left_transposed) return CH_BAD_OPTION;
  if (work.panels == nullptr) return CH_BAD_POINTER;
  return check_matrix(work, work.output, work.columns, work.terms[0].steps, work.output_row, false, Access::write);
}

}  // namespace
}  // namespace clearhead

extern "C" {

int ch_project(const ch_projection* work) {
  const clearhead::Kernels* kernels = nullptr;
  CH_TRY(clearhead::check_library(work, &kernels));
  CH_TRY(clearhead::check(*work));
  return work->rows == 0 || work->columns == 0 ? CH_OK : kernels->project(work);
}

int ch_pack(const ch_projection* work) {
  const clearhead::Kernels* kernels = nullptr;
  CH_TRY(clearhead::check_library(work, &kernels));
  CH_TRY(clearhead::check_pack(*work));
  return work->columns == 0 ? CH_OK : kernels->pack(work);
}

int ch_unpack(const ch_projection* work) {
  const clearhead::Kernels* kernels = nullptr;
  CH_TRY(clearhead::check_library(work, &kernels));
  CH_TRY(clearhead::check_unpack(*work));
  return work->columns == 0 || work->terms[0].steps == 0 ? CH_OK : kernels->unpack(work);
}

int64_t ch_panel_columns(int32_t dtype, int32_t isa) {
  const clearhead::Kernels* kernels = clearhead::kernels_of(isa);
  return kernels == nullptr || dtype < 0 || dtype > CH_FLOAT16 ? 0 : kernels->panel_columns(dtype);
}

int64_t ch_panel_bytes(int32_t dtype, int32_t isa, int64_t steps, int64_t columns) {
  const clearhead::Kernels* kernels = clearhead::kernels_of(isa);
  if (kernels == nullptr || dtype < 0 || dtype > CH_FLOAT16) return 0;
  if (!clearhead::is_count(steps) || !clearhead::is_count(columns) || !clearhead::countable(1, 1, columns, steps)) return 0;
  return kernels->panel_bytes(dtype, steps, columns);
}

}  // extern "C"
