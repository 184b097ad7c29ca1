// Appends rows to a tensor: keys and values of new tokens to a KV cache.
#pragma once

#include "work.h"

namespace CH_NS {

template <class IO> class Appending {
  typedef typename IO::type type;
  // Added to a float up to 2**22, it leaves the nearest integer in the lower bits.
  static constexpr float ROUNDS = 12582912.0f;

 public:
  explicit Appending(const ch_append& work) : w(work) {}

  int run() const {
    const double elements = (double)w.batch * (double)w.heads * (double)w.rows * (double)w.columns;
    parallel(threads_for(w, 4.0 * elements), w.batch * w.heads, [&](int64_t u) {
      const int64_t b = u / w.heads, h = u % w.heads;
      for (int64_t row = 0; row < w.rows; row++)
        if (w.quantized) quantize(at<IO>(w.source, b, h, row), at<Int8>(w.target, b, h, w.first + row));
        else memcpy(at<IO>(w.target, b, h, w.first + row), at<IO>(w.source, b, h, row), (size_t)w.columns * sizeof(type));
    });
    clearhead::trim_scratch();
    return CH_OK;
  }

 private:
  // Values [c, c + VL) of a row, 0 beyond its end.
  CH_INLINE vf values(const type* row, int64_t c) const {
    if (c + VL <= w.columns) return get_vector<IO>(row + c);
    float padded[VL];
    get_row<IO>(row + c, (int)(w.columns - c), padded, VL);
    return load(padded);
  }

  // The largest absolute value of a row; NaN or infinity if it has one: as integers they are the largest.
  CH_INLINE float largest(const type* row) const {
    vi most = (vi){};
    for (int64_t c = 0; c < w.columns; c += VL) {
      const vi bits = (vi)absolute(values(row, c));
      most = bits > most ? bits : most;
    }
    int32_t bits = 0;
    for (int i = 0; i < VL; i++) bits = maximum(bits, (int32_t)most[i]);
    return bits_to_float((uint32_t)bits);
  }

  void quantize(const type* from, int8_t* to) const {
    const float most = largest(from);
    const bool finite = most <= __FLT_MAX__, none = finite && most < CH_LEAST_QUANTIZED;
    const float scale = none ? 0.0f : finite ? most / 127.0f : __builtin_nanf("");
    memcpy(to + w.columns, &scale, sizeof(scale));
    if (none || !finite) {
      memset(to, 0, (size_t)w.columns);
      return;
    }
    for (int64_t c = 0; c < w.columns; c += VL) {
      const vi rounded = (vi)(values(from, c) / all(scale) + all(ROUNDS));
      const vb bytes = __builtin_convertvector(rounded, vb);
      memcpy(to + c, &bytes, (size_t)minimum((int64_t)VL, w.columns - c));
    }
  }

  const ch_append& w;
};

}  // namespace CH_NS
