// Appends rows to a tensor: keys and values of new tokens to a KV cache.
#pragma once

#include "work.h"

namespace CH_NS {

template <class IO> class Appending {
  typedef typename IO::type type;

 public:
  explicit Appending(const ch_append& work) : w(work) {}

  int run() const {
    const double elements = (double)w.batch * (double)w.heads * (double)w.rows * (double)w.columns;
    parallel(threads_for(w, 4.0 * elements), w.batch * w.heads, [&](int64_t u) {
      const int64_t b = u / w.heads, h = u % w.heads;
      for (int64_t row = 0; row < w.rows; row++)
        memcpy(at<IO>(w.target, b, h, w.first + row), at<IO>(w.source, b, h, row), (size_t)w.columns * sizeof(type));
    });
    clearhead::trim_scratch();
    return CH_OK;
  }

 private:
  const ch_append& w;
};

}  // namespace CH_NS
