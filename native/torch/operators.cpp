// Registers the operators with torch's dispatcher when the library is loaded.
#include "block.h"
#include "layers.h"
#include "linear_attention.h"
#include "pages.h"
#include "quantized.h"

#include <exception>

namespace clearhead::torch {
namespace {

struct Operator {
  const char* name;
  std::string schema;
  void (*function)(StableIValue*, uint64_t, uint64_t);
};

std::vector<Operator> all_operators() {
  const std::string options = attention_options_schema;
  const std::string forward = "(Tensor query, Tensor key, Tensor value, float scale, int returns, " + options +
                              ", int[]? statistic_sizes=None, Tensor? row_weights=None, Tensor? row_slots=None) -> Tensor[]";
  return {
      {"attention_forward", "attention_forward" + forward, attention_forward},
      // For torch.compile's graphs: only this one has autograd registered, which would slow down every eager call.
      {"attention_compiled", "attention_compiled" + forward, attention_forward},
      {"attention_gradients",
       "attention_gradients(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor softmax, Tensor? output, "
       "float scale, " + options +
           ", Tensor? grad_lse=None, Tensor?[]? statistics=None, int sink_keys=0, int[]? rule_slots=None, bool partial_rows=False, int side=0) -> (Tensor[], bool)",
       attention_gradients},
      {"linear", "linear(Tensor x, Tensor weight, Tensor? bias=None, int activation=0) -> Tensor", linear_forward},
      {"linear_packed", "linear_packed(Tensor x, Tensor panels, int out, Tensor? bias=None, int activation=0) -> Tensor",
       linear_packed},
      {"pack_weight", "pack_weight(Tensor weight) -> Tensor", pack_weight},
      {"unpack_weight", "unpack_weight(Tensor panels, Tensor like) -> Tensor", unpack_weight},
      {"linear_quantized",
       "linear_quantized(Tensor x, Tensor weight, Tensor scale, Tensor? offset=None, Tensor? bias=None, int rounding=0, "
       "int low=-128, int high=127, int activation=0) -> Tensor",
       linear_quantized},
      {"linear_input_gradient", "linear_input_gradient(Tensor[] grads, Tensor[] weights) -> Tensor", linear_input_gradient},
      {"linear_weight_gradient", "linear_weight_gradient(Tensor grad, Tensor x, bool bias) -> (Tensor, Tensor)",
       linear_weight_gradient},
      {"norm", "norm(Tensor x, Tensor? weight, Tensor? bias, int kind, float epsilon, bool training=False) -> (Tensor, Tensor)",
       norm_forward},
      {"norm_gradients",
       "norm_gradients(Tensor grad, Tensor x, Tensor moments, Tensor? weight, Tensor? bias, int kind, float epsilon, "
       "bool of_weight, bool of_bias) -> (Tensor, Tensor, Tensor)",
       norm_gradients},
      {"rotary", "rotary(Tensor x, Tensor table, int first=0, bool back=False) -> Tensor", rotary},
      {"token_angles", "token_angles(Tensor cosine, Tensor sine) -> Tensor", token_angles},
      {"dropout_add", "dropout_add(Tensor x, Tensor? residual, int levels, int seed, int first_row=0, Tensor? row_numbers=None) -> Tensor", dropout_add_forward},
      {"cache_append", "cache_append(Tensor(a!) cache, Tensor new, int first) -> ()", cache_append},
      {"attention_paged", attention_paged_schema, attention_paged},
      {"paged_append", paged_append_schema, paged_append},
      {"block",
       "block(Tensor[] tokens, Tensor[] tensors, Tensor(a!)[] caches, int[] integers, float[] numbers) -> Tensor",
       block},
      {"block_forward",
       "block_forward(Tensor[] tokens, Tensor[] tensors, int[] integers, float[] numbers) -> Tensor[]", block_forward},
      {"block_backward",
       "block_backward(Tensor grad, Tensor[] tokens, Tensor[] tensors, Tensor[] saved, int[] integers, "
       "float[] numbers, int[] needs) -> (Tensor[], bool)",
       block_backward},
      {"linear_attention_forward", linear_attention_forward_schema, linear_attention_forward},
      {"linear_attention_gradients", linear_attention_gradients_schema, linear_attention_gradients},
  };
}

const std::vector<Operator>& operators() {
  static const std::vector<Operator> operators = all_operators();
  return operators;
}

// Why the operators are not registered; empty if they are.
std::string& problem() {
  static std::string words;
  return words;
}

void register_operators() {
  TorchLibraryHandle definitions = nullptr, kernels = nullptr;
  check_torch(aoti_torch_library_init_fragment("clearhead", __FILE__, __LINE__, &definitions), "register operators");
  check_torch(aoti_torch_library_init_impl("clearhead", "CPU", __FILE__, __LINE__, &kernels), "register operators");
  // The libraries stay registered for the life of the process and are never deleted.
  for (const Operator& each : operators()) {
    check_torch(aoti_torch_library_def(definitions, each.schema.c_str()), "define an operator");
    check_torch(torch_library_impl(kernels, each.name, each.function, built_for), "register an operator");
  }
}

// An exception in a constructor would end the process, so the loader asks for the error.
__attribute__((constructor)) void on_load() {
  try {
    register_operators();
  } catch (const std::exception& error) {
    problem() = error.what();
  }
}

}  // namespace
}  // namespace clearhead::torch

extern "C" {

// Why the operators could not be registered; empty if they are.
CH_EXPORT const char* ch_operators_problem(void) { return clearhead::torch::problem().c_str(); }

// The schema of the operator at an index; null past the last one.
CH_EXPORT const char* ch_operator_schema(int32_t index) {
  const auto& all = clearhead::torch::operators();
  return index >= 0 && index < static_cast<int32_t>(all.size()) ? all[index].schema.c_str() : nullptr;
}

// Sets the instruction set that operators run on; -1 is the best that the processor has.
CH_EXPORT void ch_use_isa(int32_t isa) { clearhead::torch::instruction_set = isa; }

}  // extern "C"
