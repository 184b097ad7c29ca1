// The entry points of linear attention: check the whole description, then call the kernels.
#include <cmath>

#include "checks.h"

namespace clearhead {
namespace {

int check_sizes(const ch_linear& work) {
  for (int64_t number : {work.batch, work.heads, work.kv_heads, work.length}) {
    if (!is_count(number)) return CH_BAD_SHAPE;
  }
  for (int64_t number : {work.features, work.value_dim}) {
    if (number < 1 || number > CH_MAX_HEAD_DIM) return CH_BAD_SHAPE;
  }
  if (work.chunk < 1 || work.chunk > CH_MAX_CHUNK) return CH_BAD_SHAPE;
  if (work.kv_heads == 0 ? work.heads != 0 : work.heads % work.kv_heads != 0) return CH_BAD_SHAPE;
  if (work.log_decay == nullptr ? work.gates != 0 : work.gates != 1 && work.gates != work.features) return CH_BAD_SHAPE;
  return countable(work.batch, work.heads, work.length, CH_MAX_HEAD_DIM) ? CH_OK : CH_BAD_SHAPE;
}

// [batch, heads, rows, last] of which only the last axis must be contiguous.
int check_rows(const ch_linear& work, const ch_tensor& tensor, int64_t heads, int64_t last, Access access) {
  const Layout layout = {{{work.batch, tensor.batch}, {heads, tensor.head}, {work.length, tensor.row}}, last};
  return check_memory(tensor.data, layout, sizeof(float), access);
}

// Contiguous, `each` elements for every key head.
int check_each(const ch_linear& work, const float* data, int64_t each) {
  return check_memory(data, {{{work.batch * work.kv_heads, each}, {1, 0}, {1, 0}}, each}, sizeof(float));
}

int check_optional(const ch_linear& work, const float* data, int64_t each) {
  return data == nullptr ? CH_OK : check_each(work, data, each);
}

int64_t padded(int64_t count) { return (count + CH_LINEAR_PAD - 1) / CH_LINEAR_PAD * CH_LINEAR_PAD; }

// States that are saved for backward, or backward's workspace.
int check_states(const ch_linear& work, const float* states, const float* sums) {
  const int64_t chunks = (work.length + work.chunk - 1) / work.chunk;
  CH_TRY(check_optional(work, states, chunks * work.features * padded(work.value_dim)));
  return check_optional(work, sums, chunks * padded(work.features));
}

int check_call(const ch_linear& work) {
  const bool normalized = work.last_normalizer != nullptr;
  if (work.feature_map < CH_FEATURE_IDENTITY || work.feature_map > CH_FEATURE_RELU) return CH_BAD_OPTION;
  if (work.threads < 1 || work.threads > max_threads || !std::isfinite(work.scale)) return CH_BAD_OPTION;
  // No kernel supports a decayed sum of features.
  if (normalized && (work.log_decay != nullptr || work.rate != nullptr)) return CH_BAD_OPTION;
  CH_TRY(check_rows(work, work.query, work.heads, work.features, Access::read));
  CH_TRY(check_rows(work, work.key, work.kv_heads, work.features, Access::read));
  CH_TRY(check_rows(work, work.value, work.kv_heads, work.value_dim, Access::read));
  CH_TRY(check_optional(work, work.log_decay, work.length * work.gates));
  CH_TRY(check_optional(work, work.rate, work.length));
  return check_states(work, work.states, work.sums);
}

int check_linear_forward(const ch_linear& work) {
  const int64_t matrix = work.features * work.value_dim;
  CH_TRY(check_rows(work, work.output, work.heads, work.value_dim, Access::write));
  CH_TRY(check_optional(work, work.state, matrix));
  CH_TRY(check_each(work, work.last_state, matrix));
  CH_TRY(check_optional(work, work.normalizer, work.features));
  if (work.last_normalizer == nullptr) return CH_OK;
  // Sums are saved with states, so that any thread can process any chunk of a head.
  if (work.states != nullptr && work.sums == nullptr) return CH_BAD_POINTER;
  CH_TRY(check_each(work, work.last_normalizer, work.features));
  return check_memory(work.shares, {{{work.batch * work.heads, work.length}, {1, 0}, {1, 0}}, work.length},
                      sizeof(float));
}

int check_linear_backward(const ch_linear& work) {
  const int64_t matrix = work.features * work.value_dim;
  const bool normalized = work.grad_normalizer != nullptr;
  if (normalized != (work.last_normalizer != nullptr)) return CH_BAD_POINTER;
  CH_TRY(check_each(work, work.states, 1));
  CH_TRY(check_rows(work, work.grad_output, work.heads, work.value_dim, Access::read));
  CH_TRY(check_rows(work, work.grad_query, work.heads, work.features, Access::write));
  CH_TRY(check_rows(work, work.grad_key, work.kv_heads, work.features, Access::write));
  CH_TRY(check_rows(work, work.grad_value, work.kv_heads, work.value_dim, Access::write));
  CH_TRY(check_optional(work, work.grad_last_state, matrix));
  CH_TRY(check_each(work, work.grad_state, matrix));
  if (work.log_decay != nullptr) CH_TRY(check_each(work, work.grad_decay, work.length * work.gates));
  if (work.rate != nullptr) CH_TRY(check_each(work, work.grad_rate, work.length));
  CH_TRY(check_states(work, work.grad_states, work.grad_sums));
  if (!normalized) return CH_OK;
  if (work.grad_states != nullptr && work.grad_sums == nullptr) return CH_BAD_POINTER;
  CH_TRY(check_each(work, work.sums, 1));
  CH_TRY(check_rows(work, work.output, work.heads, work.value_dim, Access::read));
  CH_TRY(check_optional(work, work.grad_last_normalizer, work.features));
  CH_TRY(check_each(work, work.grad_normalizer, work.features));
  return check_memory(work.shares, {{{work.batch * work.heads, work.length}, {1, 0}, {1, 0}}, work.length},
                      sizeof(float));
}

using LinearCheck = int (*)(const ch_linear& work);
using LinearKernel = int (*Kernels::*)(const ch_linear* work);

int run_linear(const ch_linear* work, LinearCheck check, LinearKernel kernel) {
  const Kernels* kernels = nullptr;
  CH_TRY(check_library(work, &kernels));
  CH_TRY(check_sizes(*work));
  CH_TRY(check_call(*work));
  CH_TRY(check(*work));
  // Without tokens the last state is the first, which the caller has.
  if (work->batch == 0 || work->heads == 0 || work->length == 0) return CH_OK;
  return (kernels->*kernel)(work);
}

}  // namespace
}  // namespace clearhead

extern "C" {

int ch_linear_forward(const ch_linear* work) {
  return clearhead::run_linear(work, clearhead::check_linear_forward, &clearhead::Kernels::linear_forward);
}

int ch_linear_backward(const ch_linear* work) {
  return clearhead::run_linear(work, clearhead::check_linear_backward, &clearhead::Kernels::linear_backward);
}

}  // extern "C"
