#include "tensor.h"

#include <algorithm>
#include <new>
#include <stdexcept>
#include <stdlib.h>
#include <string.h>

#include "../src/memory.h"

namespace clearhead::torch {
namespace {

// Bytes from which a tensor's memory comes from the library's cache of freed results. Below, malloc usually has memory
// mapped.
constexpr int64_t min_pooled_bytes = int64_t{1} << 20;
constexpr size_t alignment = 64;
// Of a workspace's blocks. malloc would merge its free lists for larger ones.
constexpr size_t least_block_bytes = size_t{1} << 15;
constexpr int32_t max_threads = 4096;

// torch's dtype codes in the order of `Dtype`.
const int32_t* torch_dtypes() {
  static const int32_t numbers[] = {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float16(),
                                    aoti_torch_dtype_int32(),   aoti_torch_dtype_int64(),    aoti_torch_dtype_uint8(),
                                    aoti_torch_dtype_int8()};
  return numbers;
}

Dtype dtype_of(int32_t number) {
  static const int32_t boolean = aoti_torch_dtype_bool();
  if (number == boolean) return Dtype::byte;
  const int32_t* numbers = torch_dtypes();
  const int32_t* end = numbers + static_cast<int32_t>(Dtype::other);
  return static_cast<Dtype>(std::find(numbers, end, number) - numbers);
}

void give_back(void* data, void* bytes) { pool_free(data, reinterpret_cast<size_t>(bytes)); }

}  // namespace

void fail(const char* function, const std::string& argument, const std::string& requirement, const std::string& got,
          const std::string& advice) {
  throw std::runtime_error(std::string(function) + ": " + argument + " must " + requirement + "; got " + got + ". " + advice);
}

void check_torch(int32_t code, const char* what) {
  if (code != 0) throw std::runtime_error(std::string("clearhead: torch failed to ") + what + ".");
}

int64_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::float32:
    case Dtype::int32: return 4;
    case Dtype::int64: return 8;
    case Dtype::byte:
    case Dtype::int8: return 1;
    default: return 2;
  }
}

const char* name_of(Dtype dtype) {
  static const char* const names[] = {"float32", "bfloat16", "float16", "int32", "int64", "bool", "int8", "another dtype"};
  return names[static_cast<int32_t>(dtype)];
}

Tensor::Tensor(AtenTensorHandle handle) : handle_(handle) {
  int64_t *sizes = nullptr, *strides = nullptr;
  int32_t number = 0;
  check_torch(aoti_torch_get_dim(handle, &dim_), "return a tensor's number of axes");
  check_torch(aoti_torch_get_sizes(handle, &sizes), "return a tensor's sizes");
  check_torch(aoti_torch_get_strides(handle, &strides), "return a tensor's strides");
  check_torch(aoti_torch_get_dtype(handle, &number), "return a tensor's dtype");
  check_torch(aoti_torch_get_data_ptr(handle, &data_), "return a tensor's address");
  sizes_ = sizes, strides_ = strides, dtype_ = dtype_of(number);
}

Tensor& Tensor::operator=(Tensor&& other) noexcept {
  std::swap(handle_, other.handle_);
  dim_ = other.dim_, sizes_ = other.sizes_, strides_ = other.strides_, data_ = other.data_, dtype_ = other.dtype_;
  return *this;
}

Tensor::~Tensor() {
  if (handle_ != nullptr) aoti_torch_delete_tensor_object(handle_);
}

Tensor Tensor::reference() const {
  AtenTensorHandle copy = nullptr;
  check_torch(aoti_torch_new_tensor_handle(handle_, &copy), "create a reference to a tensor");
  return Tensor(copy);
}

int64_t Tensor::elements() const {
  int64_t count = 1;
  for (int64_t axis = 0; axis < dim_; ++axis) count *= sizes_[axis];
  return count;
}

bool Tensor::contiguous() const {
  if (elements() == 0) return true;
  int64_t expected = 1;
  for (int64_t axis = dim_ - 1; axis >= 0; --axis) {
    if (sizes_[axis] > 1 && strides_[axis] != expected) return false;
    expected *= sizes_[axis];
  }
  return true;
}

bool Tensor::is_shaped(std::initializer_list<int64_t> sizes) const {
  return dim_ == static_cast<int64_t>(sizes.size()) && std::equal(sizes.begin(), sizes.end(), sizes_);
}

std::string Tensor::shape() const {
  std::string words = "shape (";
  for (int64_t axis = 0; axis < dim_; ++axis) words += (axis ? ", " : "") + std::to_string(sizes_[axis]);
  return words + ") of " + name_of(dtype_);
}

Tensor Tensor::as_contiguous() && {
  if (contiguous()) return std::move(*this);
  static const int32_t contiguous_format = 0;  // c10::MemoryFormat::Contiguous
  StableIValue stack[2] = {0, 0};
  const AtenTensorHandle handle = release();
  memcpy(&stack[0], &handle, sizeof(handle));
  memcpy(&stack[1], &contiguous_format, sizeof(contiguous_format));
  check_torch(torch_call_dispatcher("aten::contiguous", "", stack, built_for), "copy a tensor");
  AtenTensorHandle copy = nullptr;
  memcpy(&copy, &stack[0], sizeof(copy));
  return Tensor(copy);
}

Tensor Tensor::with_contiguous_rows() && {
  if (dim_ == 0 || sizes_[dim_ - 1] <= 1 || strides_[dim_ - 1] == 1) return std::move(*this);
  return std::move(*this).as_contiguous();
}

Tensor empty_strided(Dtype dtype, const Sizes& sizes, const Sizes& strides) {
  int64_t elements = 1;
  for (int64_t size : sizes) elements *= size;
  const int64_t bytes = elements * size_of(dtype), dim = static_cast<int64_t>(sizes.size());
  const int32_t number = torch_dtypes()[static_cast<int32_t>(dtype)];
  static const int32_t cpu = aoti_torch_device_type_cpu(), strided = aoti_torch_layout_strided();
  AtenTensorHandle handle = nullptr;
  if (bytes >= min_pooled_bytes && pool_limit() > 0) {
    void* data = pool_allocate(static_cast<size_t>(bytes));
    if (data == nullptr) throw std::bad_alloc();
    check_torch(torch_from_blob(data, dim, sizes.data(), strides.data(), 0, number, cpu, -1, &handle, strided, nullptr, 0,
                                give_back, reinterpret_cast<void*>(static_cast<size_t>(bytes))),
                "make a tensor");
  } else {
    check_torch(aoti_torch_empty_strided(dim, sizes.data(), strides.data(), number, cpu, -1, &handle), "make a tensor");
  }
  return Tensor(handle);
}

Tensor empty(Dtype dtype, const Sizes& sizes) {
  Sizes strides(sizes.size());
  int64_t step = 1;
  for (size_t axis = sizes.size(); axis-- > 0;) strides[axis] = step, step *= std::max<int64_t>(sizes[axis], 1);
  return empty_strided(dtype, sizes, strides);
}

Tensor zeros(Dtype dtype, const Sizes& sizes) {
  Tensor made = empty(dtype, sizes);
  if (made.elements() > 0) memset(made.data(), 0, static_cast<size_t>(made.elements() * size_of(dtype)));
  return made;
}

Tensor empty_heads(const Tensor& like, int64_t dim) {
  const int64_t batch = like.size(0), heads = like.size(1), length = like.size(2);
  if (like.stride(1) < like.stride(2)) {
    const int64_t row = heads * dim;
    return empty_strided(like.dtype(), {batch, heads, length, dim}, {length * row, dim, row, 1});
  }
  return empty(like.dtype(), {batch, heads, length, dim});
}

Workspace::~Workspace() {
  for (const Block& block : blocks_) {
    if (block.pooled) pool_free(block.data, block.bytes);
    else free(block.data);
  }
}

void* Workspace::take(int64_t bytes) {
  if (bytes <= 0) return nullptr;
  const size_t size = (static_cast<size_t>(bytes) + alignment - 1) / alignment * alignment;
  while (current_ < blocks_.size() && used_ + size > blocks_[current_].bytes) ++current_, used_ = 0;
  if (current_ == blocks_.size()) add_block(std::max(size, least_block_bytes));
  char* data = blocks_[current_].data + used_;
  // A line between two parts: at a distance of whole pages a load would wait for a store to the other.
  used_ += size + alignment;
  return data;
}

void Workspace::add_block(size_t bytes) {
  blocks_.reserve(blocks_.size() + 1);
  const bool pooled = bytes >= min_pooled_bytes && pool_limit() > 0;
  void* data = pooled ? pool_allocate(bytes) : aligned_alloc(alignment, bytes);
  if (data == nullptr) throw std::bad_alloc();
  blocks_.push_back({static_cast<char*>(data), bytes, pooled});
}

int32_t instruction_set = -1;

static thread_local bool is_alone = false;

Alone::Alone() { is_alone = true; }
Alone::~Alone() { is_alone = false; }

int32_t threads() {
  if (is_alone) return 1;
  uint32_t count = 1;
  check_torch(torch_get_num_threads(&count), "return its number of threads");
  return std::min<int32_t>(static_cast<int32_t>(count), max_threads);
}

void check_kernel(int code, const char* function) {
  if (code == CH_OK) return;
  if (code == CH_NO_MEMORY) throw std::bad_alloc();
  if (code == CH_BAD_POINTER) {
    fail(function, "every tensor", "have memory aligned to its elements",
         "one whose memory was freed or begins within an element", "Copy it with .clone().");
  }
  throw std::runtime_error(std::string(function) + ": the call must fit the CPU kernels; got code " +
                           std::to_string(code) + ", " + ch_message(code) + ". Report this: it should have been refused "
                           "before.");
}

}  // namespace clearhead::torch
