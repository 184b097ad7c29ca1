// The form in which array libraries hand tensors to each other: the structures of DLPack before version 1
// (https://dmlc.github.io/dlpack/latest/c_api.html), which torch, NumPy and JAX read.
//
// Whoever takes a `Managed` calls its `deleter` when nothing looks at the numbers any more, from any thread.
#pragma once

#include <stdint.h>

namespace clearhead {

constexpr int32_t CPU = 1;
constexpr uint8_t FLOAT = 2, BFLOAT = 4;

struct Device {
  int32_t type, index;
};

struct Type {
  uint8_t code, bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t axes;
  Type type;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct Managed {
  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);
};

}  // namespace clearhead
