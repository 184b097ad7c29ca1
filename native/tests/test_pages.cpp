// Attention that reads keys and values in pages, against calls of their own for every sequence, with every instruction
// set and several threads; and page tables, lengths and starts that point outside.
#include <algorithm>

#include "result.h"
#include "spoiled.h"

namespace test {

namespace {

struct Sequence {
  int64_t queries, keys;
};

struct PagedCase {
  int dtype;
  int64_t heads, kv_heads, dim, value_dim, size;
  int64_t before, after;
  bool packed;  // sequences one after the other in one batch entry
  std::vector<Sequence> sequences;
};

int64_t blocks_of(const PagedCase& c, const Sequence& s) { return (s.keys + c.size - 1) / c.size; }

// Sequences whose keys lie in pages in any order, and the same ones alone.
class Pages {
 public:
  Pages(const PagedCase& of, Random& random) : c(of) {
    int64_t needed = 0, total = 0;
    for (const Sequence& s : c.sequences) {
      needed += blocks_of(c, s), total += s.queries;
      columns = std::max(columns, blocks_of(c, s)), longest = std::max(longest, s.keys);
    }
    const int64_t sequences = static_cast<int64_t>(c.sequences.size());
    const int64_t batch = c.packed ? 1 : sequences, q_len = c.packed ? total : c.sequences[0].queries;
    query = tensor(random, batch, c.heads, q_len, c.dim);
    output = tensor(random, batch, c.heads, q_len, c.value_dim);
    lse = Guarded::make(random, CH_FLOAT32, 4, batch, c.heads, q_len, 1, true);
    const int64_t spare = random.below(3);
    key = tensor(random, needed + spare, c.kv_heads, c.size, c.dim);
    value = tensor(random, needed + spare, c.kv_heads, c.size, c.value_dim);
    scatter(random, needed + spare);
    fill(random, query);
    start.push_back(0);
    for (const Sequence& s : c.sequences) start.push_back(start.back() + static_cast<int32_t>(s.queries));
    describe(batch, q_len, needed + spare);
    for (Guarded* read : {&query, &key, &value}) read->save_original();
  }

  int run(int isa, int threads) {
    output.clear(), lse.clear();
    work.isa = isa, work.threads = threads;
    return ch_forward(&work);
  }

  // The results of every sequence in a call of its own, on copies of its keys.
  void compare(int isa, const std::string& name) {
    const bool exact = c.size % 16 == 0 && c.before == INT64_MAX;
    for (size_t s = 0; s < c.sequences.size(); ++s) {
      const auto [queries, keys] = c.sequences[s];
      if (queries == 0) continue;
      Random random(3);
      Guarded k = alone(random, key, s, c.dim), v = alone(random, value, s, c.value_dim);
      Guarded out = tensor(random, 1, c.heads, queries, c.value_dim);
      Guarded sums = Guarded::make(random, CH_FLOAT32, 4, 1, c.heads, queries, 1, true);
      ch_attention one = work;
      one.pages = nullptr, one.isa = isa, one.threads = 1, one.batch = 1, one.q_len = queries, one.k_len = keys;
      one.query_offset = keys - queries;
      one.query.data = query.at(batch_of(s), 0, row_of(s), 0);
      one.key = k.view(), one.value = v.view(), one.output = out.view(), one.lse = static_cast<float*>(sums.data());
      expect(ch_forward(&one), CH_OK, name + " alone");
      for (int64_t h = 0; h < c.heads; ++h)
        for (int64_t i = 0; i < queries; ++i) {
          for (int64_t x = 0; x < c.value_dim; ++x)
            same(output.at(batch_of(s), h, row_of(s) + i, x), out.at(0, h, i, x), c.dtype, exact,
                 name + " output of sequence " + std::to_string(s));
          same(lse.at(batch_of(s), h, row_of(s) + i, 0), sums.at(0, h, i, 0), CH_FLOAT32, exact, name + " lse");
        }
    }
    check(output.margins_intact() && lse.margins_intact(), name + ": wrote outside a tensor");
    for (const Guarded* read : {&query, &key, &value}) check(read->unchanged(), name + ": wrote to an input");
  }

  bool untouched() const { return output.untouched() && lse.untouched(); }

  ch_attention work{};
  ch_pages pages{};
  Guarded query, key, value, output, lse;
  std::vector<int32_t> table, lengths, start;

 private:
  size_t element() const { return size_of(c.dtype); }
  Guarded tensor(Random& random, int64_t batch, int64_t heads, int64_t rows, int64_t last) const {
    return Guarded::make(random, c.dtype, element(), batch, heads, rows, last, random.one_in(2));
  }
  int64_t batch_of(size_t s) const { return c.packed ? 0 : static_cast<int64_t>(s); }
  int64_t row_of(size_t s) const { return c.packed ? start[s] : 0; }

  void fill(Random& random, Guarded& to) const {
    for (int64_t b = 0; b < to.count[0]; ++b)
      for (int64_t h = 0; h < to.count[1]; ++h)
        for (int64_t r = 0; r < to.count[2]; ++r)
          for (int64_t x = 0; x < to.last; ++x) encode(c.dtype, value_of(random), to.at(b, h, r, x));
  }
  static double value_of(Random& random) { return static_cast<double>(random.uniform(-32, 32)) / 16; }

  // Rows beyond a sequence's length stay NaN, and entries of the table beyond its last block point outside.
  void scatter(Random& random, int64_t count) {
    std::vector<int32_t> free(static_cast<size_t>(count));
    for (size_t i = 0; i < free.size(); ++i) free[i] = static_cast<int32_t>(i);
    for (const Sequence& s : c.sequences) {
      lengths.push_back(static_cast<int32_t>(s.keys));
      for (int64_t column = 0; column < columns; ++column) {
        if (column >= blocks_of(c, s)) {
          table.push_back(INT32_MAX);
          continue;
        }
        std::swap(free[static_cast<size_t>(random.below(static_cast<int64_t>(free.size())))], free.back());
        table.push_back(free.back());
        free.pop_back();
        const int64_t rows = std::min(c.size, s.keys - column * c.size);
        for (Guarded* to : {&key, &value})
          for (int64_t h = 0; h < c.kv_heads; ++h)
            for (int64_t r = 0; r < rows; ++r)
              for (int64_t x = 0; x < to->last; ++x) encode(c.dtype, value_of(random), to->at(table.back(), h, r, x));
      }
    }
  }

  // Where bfloat16 is multiplied in pairs, keys are read in place only from whole words, and sums are then in another
  // order: the copy lies in whole words if the pages do.
  static bool in_words(const Guarded& tensor) {
    const ch_tensor view = tensor.view();
    return (view.batch | view.head | view.row) % 2 == 0 && reinterpret_cast<uintptr_t>(view.data) % 4 == 0;
  }

  Guarded alone(Random& random, const Guarded& from, size_t s, int64_t last) const {
    const int64_t keys = c.sequences[s].keys;
    Guarded made;
    do made = Guarded::make(random, c.dtype, element(), 1, c.kv_heads, keys, last, true);
    while (c.dtype == CH_BFLOAT16 && in_words(made) != in_words(from));
    for (int64_t h = 0; h < c.kv_heads; ++h)
      for (int64_t r = 0; r < keys; ++r) {
        const int32_t page = table[s * static_cast<size_t>(columns) + static_cast<size_t>(r / c.size)];
        for (int64_t x = 0; x < last; ++x) std::memcpy(made.at(0, h, r, x), from.at(page, h, r % c.size, x), element());
      }
    return made;
  }

  // The same bits, or within the error of sums in another order.
  void same(const void* got, const void* wanted, int dtype, bool exact, const std::string& name) const {
    if (exact) return check(std::memcmp(got, wanted, size_of(dtype)) == 0, name + ": other bits than alone");
    const double actual = decode(dtype, got), right = decode(dtype, wanted);
    const double bound = (c.dtype == CH_FLOAT32 ? 2e-5 : c.dtype == CH_FLOAT16 ? 4e-3 : 3e-2) * (1 + std::fabs(right));
    check(actual == right || std::fabs(actual - right) <= bound, name + ": differs from alone");
  }

  void describe(int64_t batch, int64_t q_len, int64_t count) {
    pages.table = table.data(), pages.lengths = lengths.data(), pages.query_start = c.packed ? start.data() : nullptr;
    pages.sequences = static_cast<int64_t>(c.sequences.size()), pages.columns = pages.table_row = columns;
    pages.count = count, pages.size = c.size;
    work.size = sizeof(work), work.abi = CH_ABI, work.isa = -1, work.threads = 1, work.dtype = c.dtype;
    work.batch = batch, work.heads = c.heads, work.kv_heads = c.kv_heads, work.q_len = q_len, work.k_len = longest;
    work.head_dim = c.dim, work.value_dim = c.value_dim, work.scale = 0.25, work.before = c.before, work.after = c.after;
    work.query = query.view(), work.key = key.view(), work.value = value.view(), work.output = output.view();
    work.lse = static_cast<float*>(lse.data()), work.pages = &pages;
  }

  const PagedCase c;
  int64_t columns = 0, longest = 0;
};

// Lengths around the ends of pages and tiles; decoding, chunks, and sequences of different numbers of queries.
std::vector<PagedCase> paged_cases() {
  const int64_t all = INT64_MAX;
  return {
      {CH_FLOAT32, 4, 4, 64, 64, 16, all, 0, false, {{1, 1}, {1, 16}, {1, 17}, {1, 600}}},
      {CH_FLOAT32, 4, 2, 64, 32, 32, all, all, false, {{1, 1100}, {1, 0}, {1, 31}}},
      {CH_FLOAT32, 6, 2, 32, 64, 48, all, 0, false, {{3, 3}, {3, 530}, {3, 96}}},
      {CH_BFLOAT16, 4, 1, 64, 64, 16, all, 0, false, {{1, 515}, {1, 100}}},
      {CH_BFLOAT16, 2, 2, 128, 128, 64, all, 0, true, {{1, 300}, {40, 40}, {0, 7}, {17, 200}}},
      {CH_FLOAT16, 2, 1, 64, 64, 16, all, 0, true, {{5, 90}, {1, 33}}},
      {CH_FLOAT32, 2, 2, 20, 12, 16, all, 0, true, {{30, 300}, {1, 5}, {130, 140}}},
      {CH_FLOAT32, 2, 1, 64, 64, 5, all, 0, true, {{1, 23}, {20, 520}}},
      {CH_BFLOAT16, 2, 2, 64, 64, 1, all, 0, false, {{1, 40}, {1, 3}}},
      {CH_FLOAT32, 2, 2, 64, 64, 16, 40, 0, true, {{1, 300}, {20, 300}}},
      {CH_FLOAT32, 1, 1, 64, 64, 256, all, 0, false, {{20, 10}, {20, 700}}},
  };
}

int every_case() {
  int number = 0;
  for (const PagedCase& c : paged_cases())
    for (uint64_t draw = 0; draw < 2; ++draw) {
      Random random(static_cast<uint64_t>(number) * 2 + draw + 11);
      Pages call(c, random);
      for (int isa : usable_sets()) {
        std::vector<uint8_t> first;
        for (int threads : {1, 2, 5}) {
          const std::string name = "pages " + std::to_string(number / 2) + ", " + ch_isa_name(isa) + ", threads " +
                                   std::to_string(threads);
          expect(call.run(isa, threads), CH_OK, name);
          if (threads == 1) call.compare(isa, name), first = call.output.copy();
          check(call.output.copy() == first, name + ": bits differ from those with one thread");
        }
      }
      ++number;
    }
  return number;
}

// A description with a page table of its own, which a mistake is made in.
struct Spoiled {
  ch_attention work;
  ch_pages pages;
  std::vector<int32_t> table, lengths, start;
};

int bad_pages() {
  const PagedCase c = {CH_FLOAT32, 2, 2, 64, 64, 16, INT64_MAX, 0, true, {{1, 40}, {3, 20}}};
  Random random(5);
  Pages call(c, random);
  struct Mistake {
    std::string what;
    int code;
    std::function<void(Spoiled&)> make;
  };
  const std::vector<Mistake> mistakes = {
      {"a page past the last", CH_BAD_PAGES, [](Spoiled& s) { s.table[1] = static_cast<int32_t>(s.pages.count); }},
      {"a negative page", CH_BAD_PAGES, [](Spoiled& s) { s.table[3] = -1; }},
      {"a negative length", CH_BAD_PAGES, [](Spoiled& s) { s.lengths[0] = -1; }},
      {"a length beyond the table", CH_BAD_PAGES, [](Spoiled& s) { s.lengths[1] = 49; }},
      {"a length beyond k_len", CH_BAD_PAGES, [](Spoiled& s) { s.lengths[0] = 41; }},
      {"starts that fall", CH_BAD_PAGES, [](Spoiled& s) { s.start[1] = 5; }},
      {"starts from 1", CH_BAD_PAGES, [](Spoiled& s) { s.start[0] = 1; }},
      {"starts beyond q_len", CH_BAD_PAGES, [](Spoiled& s) { s.start[2] = 5; }},
      {"starts in a batch", CH_BAD_PAGES, [](Spoiled& s) { s.work.batch = 2; }},
      {"sequences that are no batch", CH_BAD_PAGES, [](Spoiled& s) { s.pages.query_start = nullptr; }},
      {"a page of no keys", CH_BAD_PAGES, [](Spoiled& s) { s.pages.size = 0; }},
      {"a negative count", CH_BAD_PAGES, [](Spoiled& s) { s.pages.count = -1; }},
      {"huge pages", CH_BAD_STRIDE, [](Spoiled& s) { s.pages.size = INT32_MAX, s.work.key.row = INT64_MAX / 64; }},
      {"too few columns", CH_BAD_PAGES, [](Spoiled& s) { s.pages.columns = 2; }},
      {"no table", CH_BAD_POINTER, [](Spoiled& s) { s.pages.table = nullptr; }},
      {"no lengths", CH_BAD_POINTER, [](Spoiled& s) { s.pages.lengths = nullptr; }},
      {"an odd table", CH_BAD_POINTER, [](Spoiled& s) { make_odd(s.pages.table); }},
      {"a negative row of the table", CH_BAD_STRIDE, [](Spoiled& s) { s.pages.table_row = -3; }},
      {"no keys", CH_BAD_POINTER, [](Spoiled& s) { s.work.key.data = nullptr; }},
      {"a negative page stride", CH_BAD_STRIDE, [](Spoiled& s) { s.work.value.batch = -1; }},
      {"dropout", CH_BAD_PAGES, [](Spoiled& s) { s.work.dropout = 0.5; }},
      {"an offset", CH_BAD_PAGES, [](Spoiled& s) { s.work.query_offset = 1; }},
      {"softmax", CH_BAD_PAGES, [](Spoiled& s) { s.work.softmax = s.work.lse; }},
      {"a table of the mask", CH_BAD_PAGES, [](Spoiled& s) { s.work.allowed.data = s.work.query.data; }},
      {"a dense bias", CH_BAD_PAGES,
       [](Spoiled& s) { s.work.num_rules = 1, s.work.rules[0].kind = CH_RULE_DENSE; }},
  };
  for (const Mistake& mistake : mistakes) {
    Spoiled s = {call.work, call.pages, call.table, call.lengths, call.start};
    s.pages.table = s.table.data(), s.pages.lengths = s.lengths.data(), s.pages.query_start = s.start.data();
    s.work.pages = &s.pages;
    mistake.make(s);
    expect(ch_forward(&s.work), mistake.code, "pages with " + mistake.what);
    check(call.untouched(), "pages with " + mistake.what + ": something was written");
  }
  expect(ch_backward(&call.work), CH_BAD_PAGES, "backward with pages");
  return static_cast<int>(mistakes.size());
}

}  // namespace

int pages_tests() { return every_case() + bad_pages(); }

}  // namespace test
