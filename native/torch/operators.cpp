// Registers the operators with torch's dispatcher when the library is loaded.
#include "attention.h"

#include <exception>

namespace clearhead::torch {
namespace {

struct Operator {
  const char* name;
  std::string schema;
  void (*function)(StableIValue*, uint64_t, uint64_t);
};

std::vector<Operator> operators() {
  const std::string options = attention_options_schema;
  return {
      {"attention_forward",
       "attention_forward(Tensor query, Tensor key, Tensor value, float scale, int returns, " + options +
           ", int[]? statistic_sizes=None, Tensor? row_weights=None, Tensor? row_slots=None) -> Tensor[]",
       attention_forward},
      {"attention_gradients",
       "attention_gradients(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor softmax, Tensor? output, "
       "float scale, " + options +
           ", Tensor? grad_lse=None, Tensor?[]? statistics=None, int sink_keys=0, int[]? rule_slots=None) -> (Tensor[], bool)",
       attention_gradients},
  };
}

// Why the operators are not there; empty where they are.
std::string& problem() {
  static std::string words;
  return words;
}

void register_operators() {
  TorchLibraryHandle definitions = nullptr, kernels = nullptr;
  check_torch(aoti_torch_library_init_fragment("clearhead", __FILE__, __LINE__, &definitions), "register operators");
  check_torch(aoti_torch_library_init_impl("clearhead", "CPU", __FILE__, __LINE__, &kernels), "register operators");
  // The libraries stay registered as long as the process lives, so nobody deletes them.
  for (const Operator& each : operators()) {
    check_torch(aoti_torch_library_def(definitions, each.schema.c_str()), "define an operator");
    check_torch(torch_library_impl(kernels, each.name, each.function, built_for), "register an operator");
  }
}

// An exception that left a constructor would end the process, so the loader asks for it.
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

// Why the operators could not be registered; empty where they are.
CH_EXPORT const char* ch_operators_problem(void) { return clearhead::torch::problem().c_str(); }

// Operators run on this instruction set from now on; -1 stands for the best that the processor has.
CH_EXPORT void ch_use_isa(int32_t isa) { clearhead::torch::instruction_set = isa; }

}  // extern "C"
