// Guarded buffers: NaN before, after and between the rows, so that reading out of bounds spoils a result and writing
// out of bounds is detected afterwards. Without a margin the allocation ends with the tensor, and AddressSanitizer
// detects what NaN would not: a read whose value is discarded.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "clearhead_native.h"

namespace test {

class Random {
 public:
  explicit Random(uint64_t seed) : state(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint64_t next() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
  }
  int64_t below(int64_t n) { return static_cast<int64_t>((next() >> 16) % static_cast<uint64_t>(n)); }
  int64_t uniform(int64_t low, int64_t high) { return low + below(high - low + 1); }
  bool one_in(int64_t n) { return below(n) == 0; }
  double uniform() { return static_cast<double>(next() >> 11) / 9007199254740992.0; }
  template <class T> T pick(const std::vector<T>& from) {
    return from[static_cast<size_t>(below(static_cast<int64_t>(from.size())))];
  }

 private:
  uint64_t state;
};

inline size_t size_of(int dtype) { return dtype == CH_FLOAT32 ? 4 : 2; }

// Exact for the values that tests use: small, and with few bits in 16-bit types.
inline void encode(int dtype, double value, void* to) {
  const float single = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &single, 4);
  if (dtype == CH_FLOAT32) {
    std::memcpy(to, &bits, 4);
    return;
  }
  uint16_t half = static_cast<uint16_t>(bits >> 16);
  if (dtype == CH_FLOAT16) {
    const uint32_t sign = bits >> 16 & 0x8000, exponent = bits >> 23 & 255;
    if (exponent == 255) half = static_cast<uint16_t>(sign | 0x7c00 | ((bits & 0x7fffff) != 0 ? 0x200 : 0));
    else if (exponent > 112) half = static_cast<uint16_t>(sign | (exponent - 112) << 10 | (bits >> 13 & 0x3ff));
    else half = static_cast<uint16_t>(sign | static_cast<uint32_t>(std::ldexp(std::fabs(value), 24)));
  }
  std::memcpy(to, &half, 2);
}

inline double decode(int dtype, const void* from) {
  if (dtype == CH_FLOAT32) {
    float single;
    std::memcpy(&single, from, 4);
    return single;
  }
  uint16_t half;
  std::memcpy(&half, from, 2);
  if (dtype == CH_BFLOAT16) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float single;
    std::memcpy(&single, &bits, 4);
    return single;
  }
  const int exponent = half >> 10 & 31, fraction = half & 0x3ff;
  double size = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) size = fraction == 0 ? INFINITY : NAN;
  return half & 0x8000 ? -size : size;
}

// A [batch, heads, rows, last] tensor in guarded memory, every stride free.
class Guarded {
 public:
  Guarded() = default;
  Guarded(Guarded&& other) noexcept { *this = std::move(other); }
  Guarded& operator=(Guarded&& other) noexcept {
    std::swap(memory, other.memory);
    std::swap(original, other.original);
    bytes = other.bytes, front = other.front, element = other.element, dtype = other.dtype, last = other.last;
    std::memcpy(count, other.count, sizeof(count));
    std::memcpy(stride, other.stride, sizeof(stride));
    return *this;
  }
  ~Guarded() { std::free(memory); }

  // `tight`: contiguous, in this order. Otherwise any order of the axes, with gaps between the rows.
  static Guarded make(Random& random, int dtype, size_t element, int64_t batch, int64_t heads, int64_t rows,
                      int64_t last, bool tight) {
    Guarded made;
    made.dtype = dtype, made.element = element, made.last = last;
    made.count[0] = batch, made.count[1] = heads, made.count[2] = rows;
    static const int orders[4][3] = {{2, 1, 0}, {1, 2, 0}, {2, 0, 1}, {0, 2, 1}};
    const int* order = orders[tight ? 0 : random.below(4)];
    int64_t extent = last;
    bool empty = last == 0;
    for (int i = 0; i < 3; ++i) {
      const int axis = order[i];
      made.stride[axis] = extent + (tight ? 0 : random.below(4));
      if (made.count[axis] == 0) empty = true;
      else extent += made.stride[axis] * (made.count[axis] - 1);
      if (i < 2 && made.count[axis] > 0) extent = made.stride[axis] * made.count[axis];
    }
    if (empty) extent = 0;
    const bool bare = random.one_in(2);
    made.front = bare ? 0 : static_cast<size_t>(1 + random.below(40));
    // If the last axis is not the last in memory, `extent` may end with a gap; AddressSanitizer needs the exact end.
    int64_t exact = empty ? 0 : last;
    for (int axis = 0; axis < 3 && !empty; ++axis) exact += made.stride[axis] * (made.count[axis] - 1);
    made.bytes = (made.front + static_cast<size_t>(exact) + (bare ? 0 : 40)) * element;
    made.memory = static_cast<uint8_t*>(std::malloc(made.bytes == 0 ? 1 : made.bytes));
    std::memset(made.memory, 0xff, made.bytes);
    return made;
  }

  void* data() const { return memory == nullptr ? nullptr : memory + front * element; }
  void* at(int64_t b, int64_t h, int64_t r, int64_t c) const {
    const int64_t place = b * stride[0] + h * stride[1] + r * stride[2] + c;
    return memory + (front + static_cast<size_t>(place)) * element;
  }
  double get(int64_t b, int64_t h, int64_t r, int64_t c) const { return decode(dtype, at(b, h, r, c)); }
  ch_tensor view() const { return {data(), stride[0], stride[1], stride[2]}; }

  // Call before use: inputs must be unmodified afterwards.
  void save_original() { original.assign(memory, memory + bytes); }
  bool unchanged() const { return bytes == 0 || std::memcmp(original.data(), memory, bytes) == 0; }
  // Fills with NaN; with `zero` the tensor itself with 0.
  void clear(bool zero = false) {
    std::memset(memory, 0xff, bytes);
    if (zero) each([&](void* place) { std::memset(place, 0, element); });
  }
  // Whether everything outside the tensor is unmodified.
  bool margins_intact() const {
    std::vector<uint8_t> rest(memory, memory + bytes);
    each([&](void* place) { std::memset(rest.data() + (static_cast<uint8_t*>(place) - memory), 0xff, element); });
    for (uint8_t byte : rest) {
      if (byte != 0xff) return false;
    }
    return true;
  }
  std::vector<uint8_t> copy() const { return std::vector<uint8_t>(memory, memory + bytes); }
  bool untouched() const {
    for (size_t i = 0; i < bytes; ++i) {
      if (memory[i] != 0xff) return false;
    }
    return true;
  }

  int64_t count[3] = {0, 0, 0}, stride[3] = {0, 0, 0}, last = 0;
  int dtype = CH_FLOAT32;

 private:
  template <class Use> void each(const Use& use) const {
    for (int64_t b = 0; b < count[0]; ++b)
      for (int64_t h = 0; h < count[1]; ++h)
        for (int64_t r = 0; r < count[2]; ++r)
          for (int64_t c = 0; c < last; ++c) use(at(b, h, r, c));
  }

  uint8_t* memory = nullptr;
  size_t bytes = 0, front = 0, element = 4;
  std::vector<uint8_t> original;
};

}  // namespace test
