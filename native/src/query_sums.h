// Sums over the keys of a head: gradients of its queries and of its diagonal rules.
//
// Keys are cut into chunks at fixed absolute positions. A chunk has sums of its own; sums of chunks are added in the
// order of a tree: four neighbouring chunks in order, then four neighbouring fours, and so on. So the order is a
// function of positions alone, and a piece of 4**n chunks can be another thread's.
#pragma once

#include "work.h"

namespace CH_NS {

// Sums over some neighbouring chunks: [group][q_len][out] of queries, then [group][diagonal_size] of diagonals.
struct QuerySums {
  float* at;
  int64_t first, end;  // the queries that these chunks concern; the rows of others are not set
};

struct KeyChunks {
  static constexpr int64_t KEYS = 512, FAN = 4;

  int64_t group, q_len, out, diagonal_size;
  int64_t count, piece_chunks, pieces;  // chunks; those of a piece, a power of FAN; pieces

  // `wanted`: the pieces that occupy all threads.
  void plan(int64_t keys, int64_t wanted) {
    count = maximum((int64_t)1, (keys + KEYS - 1) / KEYS);
    for (piece_chunks = 1; piece_chunks < count;) piece_chunks *= FAN;
    while (piece_chunks > 1 && (count + piece_chunks - 1) / piece_chunks < wanted) piece_chunks /= FAN;
    pieces = (count + piece_chunks - 1) / piece_chunks;
  }

  int64_t query_floats() const { return group * q_len * out; }
  int64_t floats() const { return query_floats() + group * diagonal_size; }

  // Most sums at a time, of one piece.
  int64_t depth() const {
    int64_t levels = 1;
    for (int64_t chunks = 1; chunks < minimum(piece_chunks, count); chunks *= FAN) levels++;
    return levels;
  }

  static void add(float* to, const float* from, int64_t floats) {
    for (int64_t x = 0; x < floats; x += VL) store(to + x, load(to + x) + load(from + x));
  }

  void clear(const QuerySums& sums) const {
    for (int64_t g = 0; g < group; g++)
      memset(row(sums, g, sums.first), 0, (size_t)((sums.end - sums.first) * out) * sizeof(float));
  }

  // Sets the rows of the other queries to 0.
  void complete(const QuerySums& sums) const {
    for (int64_t g = 0; g < group; g++) {
      memset(row(sums, g, 0), 0, (size_t)(sums.first * out) * sizeof(float));
      memset(row(sums, g, sums.end), 0, (size_t)((q_len - sums.end) * out) * sizeof(float));
    }
  }

  // Adds the sums of the next chunks to those of earlier ones. 0 added to a sum that began with 0 is the same bits, so
  // rows that only one of both has are not added.
  void combine(QuerySums& to, const QuerySums& next) const {
    add(to.at + query_floats(), next.at + query_floats(), group * diagonal_size);
    if (next.first == next.end) return;
    if (to.first == to.end) to.first = to.end = next.first;
    for (int64_t g = 0; g < group; g++) {
      const int64_t both = maximum(to.first, next.first), both_end = minimum(to.end, next.end);
      if (next.first > to.end) set(to, g, to.end, next.first, nullptr);
      if (next.end < to.first) set(to, g, next.end, to.first, nullptr);
      set(to, g, next.first, minimum(next.end, to.first), &next);
      if (both < both_end) add(row(to, g, both), row(next, g, both), (both_end - both) * out);
      set(to, g, maximum(next.first, to.end), next.end, &next);
    }
    to.first = minimum(to.first, next.first);
    to.end = maximum(to.end, next.end);
  }

  // Adds the pieces of one key head, `distance` floats apart, to the first one: elements [from, to) of all of them.
  void combine_pieces(float* first, int64_t distance, int64_t from, int64_t to) const {
    for (int64_t step = 1; step < pieces; step *= FAN)
      for (int64_t node = 0; node < pieces; node += step * FAN)
        for (int64_t child = node + step; child < minimum(node + step * FAN, pieces); child += step)
          add(first + node * distance + from, first + child * distance + from, to - from);
  }

 private:
  float* row(const QuerySums& sums, int64_t g, int64_t query) const { return sums.at + (g * q_len + query) * out; }

  // Rows [first, end): a copy, or 0.
  void set(const QuerySums& to, int64_t g, int64_t first, int64_t end, const QuerySums* from) const {
    if (first >= end) return;
    const size_t bytes = (size_t)((end - first) * out) * sizeof(float);
    if (from == nullptr) memset(row(to, g, first), 0, bytes);
    else memcpy(row(to, g, first), row(*from, g, first), bytes);
  }
};

// The sums of a piece's chunks as they come: totals of unfinished nodes, the largest first.
class QuerySumTree {
  static constexpr int MOST = 24;

  const KeyChunks& chunks;
  QuerySums totals[MOST];
  float* buffers;  // of all but the first
  int count = 0;
  int64_t next = 0;  // index of the next chunk in the piece

  void combine_last() {
    count--;
    chunks.combine(totals[count - 1], totals[count]);
  }

 public:
  QuerySumTree(const KeyChunks& of, float* result, float* others) : chunks(of), buffers(others) { totals[0].at = result; }

  // A buffer for the next chunk's sums, which concern queries [first, end).
  QuerySums& begin(int64_t first, int64_t end) {
    QuerySums& sums = totals[count++];
    if (count > 1) sums.at = buffers + (count - 2) * chunks.floats();
    sums.first = first, sums.end = end;
    return sums;
  }

  void finish_chunk() {
    for (int64_t node = next++;; node /= KeyChunks::FAN) {
      if (node % KeyChunks::FAN != 0) combine_last();
      if (node % KeyChunks::FAN != KeyChunks::FAN - 1) break;
    }
  }

  QuerySums& total() {
    while (count > 1) combine_last();
    return totals[0];
  }
};

}  // namespace CH_NS
