// Tensors whose memory is kept when they are gone.
#include <stdint.h>
#include <stdlib.h>

#include "clearhead_native.h"
#include "dlpack.h"
#include "memory.h"

namespace clearhead {
namespace {

// One allocation for all that lasts as long as the tensor.
struct Kept {
  Managed managed;
  size_t bytes;
  int64_t shape[CH_MAX_AXES], strides[CH_MAX_AXES];
};

constexpr Type types[] = {{FLOAT, 32, 1}, {BFLOAT, 16, 1}, {FLOAT, 16, 1}};  // by ch_dtype
constexpr int64_t FARTHEST = INT64_C(1) << 48;

void release(Managed* managed) {
  Kept* own = static_cast<Kept*>(managed->context);
  give_memory(own->managed.tensor.data, own->bytes);
  free(own);
}

// Elements from the first to the last, or -1 where a size, a stride or their product does not fit.
int64_t reach(int32_t axes, const int64_t* shape, const int64_t* strides) {
  int64_t last = 0;
  for (int32_t axis = 0; axis < axes; ++axis) {
    if (shape[axis] < 1 || strides[axis] < 0 || shape[axis] > FARTHEST || strides[axis] > FARTHEST) return -1;
    int64_t step;
    if (__builtin_mul_overflow(shape[axis] - 1, strides[axis], &step) || step > FARTHEST - last) return -1;
    last += step;
  }
  return last + 1;
}

}  // namespace
}  // namespace clearhead

extern "C" {

void* ch_new_tensor(int32_t dtype, int32_t axes, const int64_t* shape, const int64_t* strides) {
  using namespace clearhead;
  if (dtype < 0 || dtype > CH_FLOAT16 || axes < 1 || axes > CH_MAX_AXES || shape == nullptr || strides == nullptr)
    return nullptr;
  const int64_t elements = reach(axes, shape, strides);
  if (elements < 0) return nullptr;
  Kept* own = static_cast<Kept*>(calloc(1, sizeof(Kept)));
  if (own == nullptr) return nullptr;
  own->bytes = static_cast<size_t>(elements) * types[dtype].bits / 8;
  void* data = take_memory(own->bytes);
  if (data == nullptr) {
    free(own);
    return nullptr;
  }
  for (int32_t axis = 0; axis < axes; ++axis) own->shape[axis] = shape[axis], own->strides[axis] = strides[axis];
  own->managed.tensor = Tensor{data, Device{CPU, 0}, axes, types[dtype], own->shape, own->strides, 0};
  own->managed.context = own;
  own->managed.deleter = release;
  return &own->managed;
}

int64_t ch_kept_memory(void) { return static_cast<int64_t>(clearhead::kept_memory()); }

int64_t ch_keep_memory(int64_t bytes) {
  return static_cast<int64_t>(bytes < 0 ? clearhead::memory_limit() : clearhead::keep_at_most(static_cast<size_t>(bytes)));
}

}  // extern "C"
