// An operator's arguments and results on the stack of the stable ABI.
#pragma once

#include <string.h>

#include "tensor.h"

namespace clearhead::torch {

// Reads the arguments of a call in order. All are read before any is checked, so that an error leaks no reference.
class Arguments {
 public:
  explicit Arguments(StableIValue* stack) : next_(stack) {}

  Tensor tensor() { return Tensor(take<AtenTensorHandle>()); }
  int64_t integer() { return take<int64_t>(); }
  double number() { return take<double>(); }
  bool flag() { return take<bool>(); }

  int64_t optional_integer(int64_t otherwise) {
    StableIValue* inner = take<StableIValue*>();
    if (inner == nullptr) return otherwise;
    const int64_t value = as<int64_t>(*inner);
    delete inner;
    return value;
  }

  // An undefined Tensor for None.
  Tensor optional_tensor() {
    StableIValue* inner = take<StableIValue*>();
    if (inner == nullptr) return Tensor();
    const StableIValue value = *inner;
    delete inner;
    return Tensor(as<AtenTensorHandle>(value));
  }

  // Optional lists, because a schema has no default for a list of tensors.
  std::vector<Tensor> tensors() {
    return list<Tensor>([](StableIValue value) { return Tensor(as<AtenTensorHandle>(value)); });
  }
  std::vector<Tensor> optional_tensors() {
    return list<Tensor>([](StableIValue value) {
      StableIValue* inner = as<StableIValue*>(value);
      if (inner == nullptr) return Tensor();
      const StableIValue inner_value = *inner;
      delete inner;
      return Tensor(as<AtenTensorHandle>(inner_value));
    });
  }
  // Lists that are not optional: the dispatcher looks for tensors, and so for the device, in such lists only.
  std::vector<Tensor> required_tensors() {
    return elements<Tensor>(take<StableListHandle>(), [](StableIValue value) { return Tensor(as<AtenTensorHandle>(value)); });
  }
  std::vector<int64_t> required_integers() { return elements<int64_t>(take<StableListHandle>(), as<int64_t>); }
  std::vector<double> required_numbers() { return elements<double>(take<StableListHandle>(), as<double>); }
  std::vector<int64_t> integers() { return list<int64_t>(as<int64_t>); }
  std::vector<double> numbers() { return list<double>(as<double>); }

 private:
  template <class Value> static Value as(StableIValue from) {
    Value value;
    memcpy(&value, &from, sizeof(value));
    return value;
  }
  template <class Value> Value take() { return as<Value>(*next_++); }

  template <class Value, class Convert> std::vector<Value> list(Convert convert) {
    // An empty list for None.
    StableIValue* inner = take<StableIValue*>();
    if (inner == nullptr) return {};
    const StableListHandle handle = as<StableListHandle>(*inner);
    delete inner;
    return elements<Value>(handle, convert);
  }

  template <class Value, class Convert> std::vector<Value> elements(StableListHandle handle, Convert convert) {
    size_t size = 0;
    check_torch(torch_list_size(handle, &size), "read a list");
    std::vector<Value> values;
    values.reserve(size);
    for (size_t index = 0; index < size; ++index) {
      StableIValue element = 0;
      check_torch(torch_list_get_item(handle, index, &element), "read a list");
      values.push_back(convert(element));
    }
    check_torch(torch_delete_list(handle), "free a list");
    return values;
  }

  StableIValue* next_;
};

// Writes the results of a call in their order.
class Results {
 public:
  explicit Results(StableIValue* stack) : next_(stack) {}

  void tensor(Tensor tensor) { put(tensor.release()); }
  void flag(bool value) { put(value); }
  // None for an undefined tensor.
  void optional_tensor(Tensor tensor) { put(tensor ? new StableIValue(packed(tensor.release())) : nullptr); }
  void tensors(std::vector<Tensor> tensors) {
    StableListHandle list = nullptr;
    check_torch(torch_new_list_reserve_size(tensors.size(), &list), "make a list");
    for (Tensor& tensor : tensors) check_torch(torch_list_push_back(list, packed(tensor.release())), "fill a list");
    put(list);
  }
  void optional_tensors(std::vector<Tensor> tensors) {
    StableListHandle list = nullptr;
    check_torch(torch_new_list_reserve_size(tensors.size(), &list), "make a list");
    for (Tensor& tensor : tensors) {
      StableIValue* inner = tensor ? new StableIValue(packed(tensor.release())) : nullptr;
      check_torch(torch_list_push_back(list, packed(inner)), "fill a list");
    }
    put(list);
  }

 private:
  template <class Value> static StableIValue packed(Value value) {
    StableIValue result = 0;
    memcpy(&result, &value, sizeof(value));
    return result;
  }
  template <class Value> void put(Value value) { *next_++ = packed(value); }

  StableIValue* next_;
};

}  // namespace clearhead::torch
