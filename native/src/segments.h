// Segments: neighbouring queries that attend to the same interval of keys, each an attention of its own without that
// mask.
//
// Padding gives one segment per sequence, packed documents one per document. Tiles start at segment boundaries, nothing
// between segments is multiplied, and NaN or infinity in one segment affects no other.
#pragma once

#include "invariance.h"
#include "work.h"

namespace CH_NS {

struct Segment {
  int64_t b, query, queries, key, keys;
  int64_t missing;  // keys of its sequence before the first one
  double operations() const { return (double)queries * (double)keys; }
};

class Segments {
  // Few queries may be a segment each; in longer calls segments have at least two on average: starts that differ from row
  // to row are no sequences' starts.
  static constexpr int64_t FEW_QUERIES = 8;
  // From this many queries or keys on, a segment is shared among threads, if there are few of them.
  static constexpr int64_t LARGE = 512, MANY = 64;

  Segment* list = nullptr;

 public:
  int64_t count = 0;
  int64_t large = 0;  // how many of them are large; they come first once sorted
  double operations = 0;
  int64_t keys = 0;  // of sequences in pages
  bool no_memory = false;

  // The segments of a call that has no other mask; none if they are not worth it. `disjoint`: whether a key may belong
  // to one segment only.
  Segments(const Task& w, bool disjoint) {
    if (w.pages != nullptr) add_sequences(w);
    if (w.pages != nullptr || !may(w, disjoint)) return;
    const int64_t capacity = w.batch * (FEW_QUERIES + w.q_len / 2);
    if (!allocate(capacity)) return;
    for (int64_t b = 0; b < w.batch; b++) {
      int64_t last = 0;  // no later segment may begin before this key
      for (int64_t i = 0; i < w.q_len; i++) {
        const int64_t at = b * w.interval_batch + i * w.interval_row;
        const int64_t begin = w.start[at], key = clip(begin, 0, w.k_len), keys = maximum((int64_t)0, clip(w.stop[at], 0, w.k_len) - key);
        // A sequence may start before the first key, or at it.
        const int64_t missing = begin < 0 ? -begin : begin == 0 ? w.first_position : 0;
        Segment* open = i > 0 ? list + count - 1 : nullptr;
        if (open != nullptr && open->keys == keys && (keys == 0 || (open->key == key && open->missing == missing))) {
          open->queries++;
          continue;
        }
        if (count == capacity || (disjoint && keys > 0 && key < last)) {
          count = 0;
          return;
        }
        list[count++] = Segment{b, i, 1, keys > 0 ? key : last, keys, missing};
        if (keys > 0) last = key + keys;
      }
    }
    for (int64_t s = 0; s < count; s++) operations += list[s].operations();
  }

  const Segment& operator[](int64_t s) const { return list[s]; }

  // Calls `body` with every interval of keys that no query attends to: batch entry, first, end. Must run before `sort`.
  template <class Body> void for_gaps(const Task& w, const Body& body) const {
    int64_t last = 0;
    for (int64_t s = 0; s < count; s++) {
      if (list[s].key > last) body(list[s].b, last, list[s].key);
      last = list[s].key + list[s].keys;
      if (s + 1 < count && list[s + 1].b == list[s].b) continue;
      if (last < w.k_len) body(list[s].b, last, w.k_len);
      last = 0;
    }
  }

  // Large ones first, then by decreasing work, so that the last ones to start are short.
  void sort(int64_t heads) {
    const bool many = count * heads >= MANY;
    auto before = [&](const Segment& one, const Segment& other) {
      const bool first = !many && is_large(one), second = !many && is_large(other);
      return first != second ? first : one.operations() > other.operations();
    };
    for (int64_t gap = count / 2; gap > 0; gap /= 2)
      for (int64_t s = gap; s < count; s++) {
        const Segment moved = list[s];
        int64_t to = s;
        for (; to >= gap && before(moved, list[to - gap]); to -= gap) list[to] = list[to - gap];
        list[to] = moved;
      }
    for (large = 0; !many && large < count && is_large(list[large]);) large++;
  }

  // A segment as a call.
  Task part(const Task& w, int64_t s, int threads) const {
    const Segment& segment = list[s];
    // With starts of queries, all sequences in pages are in one batch entry.
    const int64_t b = w.pages != nullptr && w.pages->query_start != nullptr ? 0 : segment.b;
    const int64_t size = w.dtype == CH_FLOAT32 ? 4 : 2, cached_size = w.quantized ? 1 : size, row = b * w.heads * w.head_stride + segment.query;
    Task t = w;
    auto move = [&](ch_tensor& tensor, int64_t rows, int64_t bytes) {
      if (tensor.data != nullptr) tensor.data = (char*)tensor.data + (b * tensor.batch + rows * tensor.row) * bytes;
    };
    auto skip = [&](auto*& rows, int64_t each) {
      if (rows != nullptr) rows += row * each;
    };
    move(t.query, segment.query, size);
    move(t.output, segment.query, size);
    move(t.grad_output, segment.query, size);
    move(t.grad_query, segment.query, size);
    if (w.pages == nullptr) {
      move(t.key, segment.key, cached_size);
      move(t.value, segment.key, cached_size);
      move(t.grad_key, segment.key, size);
      move(t.grad_value, segment.key, size);
    }
    if (t.allowed.data != nullptr)
      t.allowed.data = (const char*)t.allowed.data + b * t.allowed.batch + segment.query * t.allowed.row + segment.key * t.allowed.column;
    for (int r = 0; r < t.num_rules; r++) {
      ch_table& table = t.rules[r].table;
      if (t.rules[r].kind == CH_RULE_DENSE)
        table.data = (const float*)table.data + b * table.batch + segment.query * table.row + segment.key * table.column;
    }
    skip(t.output32, w.value_dim);
    skip(t.lse, 1);
    skip(t.softmax, 2);
    skip(t.grad_lse, 1);
    skip(t.delta, 1);
    t.batch = 1;
    t.q_len = segment.queries;
    t.k_len = segment.keys;
    t.query_offset += segment.query - segment.key;
    t.start = t.stop = nullptr;
    t.intervals = 0;
    t.threads = threads;
    t.units = count * w.kv_heads;
    t.first_position = segment.missing;
    t.corner = Corner{segment.b, segment.query, segment.key};
    if (w.token_numbers != nullptr) {
      const uint64_t key = number_at(w, segment.key), query = number_at(w, w.query_offset + segment.query);
      t.first_batch += (int64_t)(query >> 32);
      t.first_query = w.first_key + (int64_t)(uint32_t)query;
      t.first_key += (int64_t)(uint32_t)key;
      t.token_numbers = nullptr;
    } else {
      t.first_batch += segment.b;
      t.first_query += segment.query;
      t.first_key += segment.key;
    }
    t.total_keys = segment.keys;
    if (w.pages != nullptr) read_pages(w, segment, t);
    t.drop_idle_bounds();
    return t;
  }

 private:
  // A segment without keys may lie behind the last one, and draws nothing.
  static uint64_t number_at(const Task& w, int64_t token) {
    return w.k_len == 0 ? 0 : (uint64_t)w.token_numbers[clip(token, 0, w.k_len - 1)];
  }

  bool allocate(int64_t capacity) {
    list = (Segment*)scratch(clearhead::SLOT_SEGMENTS, (size_t)capacity * sizeof(Segment));
    no_memory = list == nullptr;
    return !no_memory;
  }

  // The last query of a sequence in pages is beside its last key. The sequence is split and masked as if it were alone,
  // so that its bits do not depend on the others.
  void read_pages(const Task& w, const Segment& segment, Task& t) const {
    t.pages = nullptr;
    t.page_table = w.pages->table + segment.b * w.pages->table_row;
    t.page_size = w.pages->size;
    t.total_keys = keys;
    t.units = w.kv_heads;
    t.query_offset = segment.keys - segment.queries;
  }

  // One segment per sequence in pages.
  void add_sequences(const Task& w) {
    const ch_pages& pages = *w.pages;
    if (!allocate(maximum(pages.sequences, (int64_t)1))) return;
    for (int64_t s = 0; s < pages.sequences; s++) {
      const int32_t* start = pages.query_start;
      const int64_t first = start != nullptr ? start[s] : 0, queries = start != nullptr ? start[s + 1] - first : w.q_len;
      if (queries > 0) list[count++] = Segment{s, first, queries, 0, pages.lengths[s], 0};
    }
    for (int64_t s = 0; s < count; s++) operations += list[s].operations(), keys += list[s].keys;
  }

  static bool is_large(const Segment& s) { return s.queries > LARGE || s.keys > LARGE; }

  static bool may(const Task& w, bool backward) {
    const bool by_row = w.start != nullptr && w.intervals == 1 && (w.interval_head == 0 || w.heads == 1);
    if (!by_row || w.blocks.data != nullptr || w.batch == 0) return false;
    if (backward && (w.statistics != nullptr || w.allowed.data != nullptr)) return false;
    for (int r = 0; r < w.num_rules; r++) {
      const ch_rule& rule = w.rules[r];
      if (backward && (rule.kind == CH_RULE_DENSE || rule.grad != nullptr)) return false;
    }
    return true;
  }
};

}  // namespace CH_NS
