// Runs a model that export_model.py compiled, and compares its output with the numbers that export_model.py wrote.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

namespace {

// The compiled model calls clearhead's operators by name. The library registers them when it is loaded.
void load_operators(const char* path) {
  if (dlopen(path, RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(dlerror());
}

at::Tensor read_tensor(std::ifstream& file) {
  int64_t axes = 0;
  file.read(reinterpret_cast<char*>(&axes), sizeof(axes));
  if (!file || axes < 0 || axes > 8) throw std::runtime_error("numbers.bin: no tensor");
  std::vector<int64_t> sizes(static_cast<size_t>(axes));
  file.read(reinterpret_cast<char*>(sizes.data()), axes * static_cast<int64_t>(sizeof(int64_t)));
  at::Tensor tensor = at::empty(sizes, at::kFloat);
  file.read(reinterpret_cast<char*>(tensor.data_ptr<float>()), static_cast<std::streamsize>(tensor.nbytes()));
  if (!file) throw std::runtime_error("numbers.bin: too short");
  return tensor;
}

int run(const char* library, const std::string& folder) {
  load_operators(library);
  torch::inductor::AOTIModelPackageLoader model(folder + "/model.pt2");
  std::ifstream file(folder + "/numbers.bin", std::ios::binary);
  const at::Tensor x = read_tensor(file), expected = read_tensor(file);
  const at::Tensor output = model.run({x})[0];
  const double difference = (output - expected).abs().max().item<double>();
  std::printf("largest difference to Python: %.3g\n", difference);
  return difference <= 1e-5 ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) {
    std::fprintf(stderr, "usage: %s libclearhead_native.so FOLDER\n", arguments[0]);
    return 2;
  }
  try {
    return run(arguments[1], arguments[2]);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
