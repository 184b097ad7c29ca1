// A tensor that an operator reads or writes, and the errors that operators raise.
#pragma once

#include <initializer_list>
#include <string>
#include <utility>
#include <vector>

#include "clearhead_native.h"
#include "stable_abi.h"

namespace clearhead::torch {

// Raises RuntimeError in Python: "<function>: <argument> must <rule>; got <what>. <what to do>".
[[noreturn]] void fail(const char* function, const std::string& argument, const std::string& requirement,
                       const std::string& got, const std::string& advice);

// Raises where a function of the stable ABI reports an error.
void check_torch(int32_t code, const char* what);

// Dtypes of tensors; the first three are those of enum ch_dtype.
enum class Dtype : int32_t { float32 = CH_FLOAT32, bfloat16 = CH_BFLOAT16, float16 = CH_FLOAT16, int32, int64, byte, int8, other };

int64_t size_of(Dtype dtype);
const char* name_of(Dtype dtype);

// An owning reference to a tensor, with its address, sizes and strides read once.
class Tensor {
 public:
  Tensor() = default;
  explicit Tensor(AtenTensorHandle handle);  // takes ownership of the reference
  Tensor(Tensor&& other) noexcept { *this = std::move(other); }
  Tensor& operator=(Tensor&& other) noexcept;
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;
  ~Tensor();

  explicit operator bool() const { return handle_ != nullptr; }
  int64_t dim() const { return dim_; }
  int64_t size(int64_t axis) const { return sizes_[axis]; }
  // The stride in elements; 0 for an axis of size 1, so that it broadcasts.
  int64_t step(int64_t axis) const { return sizes_[axis] == 1 ? 0 : strides_[axis]; }
  int64_t stride(int64_t axis) const { return strides_[axis]; }
  int64_t elements() const;
  Dtype dtype() const { return dtype_; }
  void* data() const { return data_; }
  template <class Number> Number* as() const { return static_cast<Number*>(data_); }
  bool contiguous() const;
  bool is_shaped(std::initializer_list<int64_t> sizes) const;
  std::string shape() const;  // as text, for errors
  AtenTensorHandle release() { return std::exchange(handle_, nullptr); }
  Tensor reference() const;
  // The same elements with a contiguous last axis, or fully contiguous; copies if needed.
  Tensor with_contiguous_rows() &&;
  Tensor as_contiguous() &&;

 private:
  AtenTensorHandle handle_ = nullptr;
  int64_t dim_ = 0;
  const int64_t* sizes_ = nullptr;
  const int64_t* strides_ = nullptr;
  void* data_ = nullptr;
  Dtype dtype_ = Dtype::other;
};

// [batch, heads, rows, contiguous columns] as the kernels take it.
ch_tensor view_of(const Tensor& tensor);

// Whether the rows of keys or values are int8 integers with a scale behind them; and how many integers a row has.
inline bool is_quantized(const Tensor& rows) { return rows.dtype() == Dtype::int8; }
inline int64_t channels_of(const Tensor& rows) { return rows.size(3) - (is_quantized(rows) ? CH_SCALE_BYTES : 0); }
// Whether keys or values are of a dtype, or quantized.
inline bool is_cached_as(const Tensor& rows, Dtype dtype) { return rows.dtype() == dtype || is_quantized(rows); }

using Sizes = std::vector<int64_t>;

// New uninitialised tensors. Large ones use the cache of freed results (native/src/memory.h).
Tensor empty(Dtype dtype, const Sizes& sizes);
Tensor empty_strided(Dtype dtype, const Sizes& sizes, const Sizes& strides);
Tensor zeros(Dtype dtype, const Sizes& sizes);
// [batch, heads, len, dim] with the memory order of `like`: heads side by side in a token, or one after the other.
Tensor empty_heads(const Tensor& like, int64_t dim);

// Memory of one call, released at its end. What is taken lies side by side in blocks, so small parts need one allocation.
class Workspace {
 public:
  Workspace() = default;
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* take(int64_t bytes);
  // Gives back what was taken, for the next part of a call to take again.
  void rewind() { current_ = 0, used_ = 0; }

 private:
  struct Block {
    char* data;
    size_t bytes;
    bool pooled;
  };
  void add_block(size_t bytes);
  std::vector<Block> blocks_;
  // The block that memory is taken from, and how much of it was.
  size_t current_ = 0, used_ = 0;
};

// torch.get_num_threads(), clamped to the kernels' limit; 1 while there is an `Alone`.
int32_t threads();
// While it exists, kernels that this thread calls share their work with no other thread.
class Alone {
 public:
  Alone();
  ~Alone();
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;
};

// The index of the instruction set that operators run on; -1 for the best that the processor has.
extern int32_t instruction_set;

// Raises where a kernel's code is not CH_OK.
void check_kernel(int code, const char* function);

}  // namespace clearhead::torch
