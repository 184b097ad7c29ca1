// The C functions of libtorch's stable ABI that the operators use, declared here so that building needs no torch.
// They are exported by every libtorch from 2.11 on (torch/csrc/inductor/aoti_torch/c/shim.h, torch/csrc/stable/c/shim.h).
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {

using StableIValue = uint64_t;
struct AtenTensorOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
struct StableListOpaque;
using StableListHandle = StableListOpaque*;
class TorchLibraryOpaque;
using TorchLibraryHandle = TorchLibraryOpaque*;

int32_t aoti_torch_device_type_cpu();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_bfloat16();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_bool();
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_layout_strided();

int32_t aoti_torch_delete_tensor_object(AtenTensorHandle tensor);
int32_t aoti_torch_new_tensor_handle(AtenTensorHandle tensor, AtenTensorHandle* copy);
int32_t aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** data);
int32_t aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim);
int32_t aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes);
int32_t aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides);
int32_t aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
int32_t aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                 int32_t device_type, int32_t device_index, AtenTensorHandle* tensor);
int32_t torch_from_blob(void* data, int64_t dim, const int64_t* sizes, const int64_t* strides, int64_t storage_offset,
                        int32_t dtype, int32_t device_type, int32_t device_index, AtenTensorHandle* tensor,
                        int32_t layout, const uint8_t* opaque_metadata, int64_t opaque_metadata_size,
                        void (*deleter)(void* data, void* context), void* context);

int32_t torch_list_size(StableListHandle list, size_t* size);
int32_t torch_list_get_item(StableListHandle list, size_t index, StableIValue* element);
int32_t torch_new_list_reserve_size(size_t size, StableListHandle* list);
int32_t torch_list_push_back(StableListHandle list, StableIValue element);
int32_t torch_delete_list(StableListHandle list);
int32_t torch_get_num_threads(uint32_t* count);
int32_t torch_call_dispatcher(const char* name, const char* overload, StableIValue* stack, uint64_t built_for);

int32_t aoti_torch_library_init_fragment(const char* name, const char* file, uint32_t line, TorchLibraryHandle* library);
int32_t aoti_torch_library_init_impl(const char* name, const char* key, const char* file, uint32_t line,
                                     TorchLibraryHandle* library);
int32_t aoti_torch_library_def(TorchLibraryHandle library, const char* schema);
int32_t torch_library_impl(TorchLibraryHandle library, const char* name,
                           void (*function)(StableIValue*, uint64_t, uint64_t), uint64_t built_for);

}  // extern "C"

namespace clearhead::torch {

// The oldest libtorch whose conversions between IValue and StableIValue these operators follow: 2.11.
inline constexpr uint64_t built_for = (uint64_t{2} << 56) | (uint64_t{11} << 48);

}  // namespace clearhead::torch
