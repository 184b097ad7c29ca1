// Rows of int8 integers with a scale, made by the formula in plain C++.
#pragma once

#include "guarded.h"

namespace test {

// Quantizes a row of floats into `to`, columns + CH_SCALE_BYTES bytes.
inline void quantize_row(const float* from, int64_t columns, uint8_t* to) {
  float most = 0;
  bool finite = true;
  for (int64_t x = 0; x < columns; ++x) {
    most = std::fmax(most, std::fabs(from[x]));
    finite = finite && std::isfinite(from[x]);
  }
  const bool none = most < 0x1p-119f;
  const float scale = !finite ? NAN : none ? 0.0f : most / 127.0f;
  for (int64_t x = 0; x < columns; ++x)
    to[x] = static_cast<uint8_t>(static_cast<int8_t>(!finite || none ? 0.0f : std::nearbyint(from[x] / scale)));
  std::memcpy(to + columns, &scale, sizeof(scale));
}

inline double dequantized(const uint8_t* row, int64_t columns, int64_t x) {
  float scale;
  std::memcpy(&scale, row + columns, sizeof(scale));
  return static_cast<double>(static_cast<int8_t>(row[x])) * static_cast<double>(scale);
}

// [batch, heads, rows, columns] values in order, as quantized rows in guarded memory; the values become what the rows
// stand for.
inline Guarded quantized(Random& random, std::vector<double>& values, int64_t batch, int64_t heads, int64_t rows, int64_t columns) {
  Guarded made = Guarded::make(random, CH_FLOAT32, 1, batch, heads, rows, columns + CH_SCALE_BYTES, random.one_in(3));
  std::vector<float> row(static_cast<size_t>(columns));
  size_t at = 0;
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t r = 0; r < rows; ++r, at += static_cast<size_t>(columns)) {
        for (int64_t x = 0; x < columns; ++x) row[static_cast<size_t>(x)] = static_cast<float>(values[at + static_cast<size_t>(x)]);
        uint8_t* to = static_cast<uint8_t*>(made.at(b, h, r, 0));
        quantize_row(row.data(), columns, to);
        for (int64_t x = 0; x < columns; ++x) values[at + static_cast<size_t>(x)] = dequantized(to, columns, x);
      }
  made.save_original();
  return made;
}

}  // namespace test
