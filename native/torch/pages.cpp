#include "pages.h"

#include <algorithm>

namespace clearhead::torch {
namespace {

constexpr const char* attend_name = "attention_paged";
constexpr const char* append_name = "paged_append";

std::string words(int64_t number) { return std::to_string(number); }

void check_pages(const char* function, const char* argument, const Tensor& pages) {
  if (pages.dim() != 4 || (pages.dtype() > Dtype::float16 && !is_quantized(pages)) || pages.size(1) < 1 ||
      pages.size(0) > INT32_MAX || pages.size(1) > INT32_MAX)
    fail(function, argument, "be pages [num_blocks, block_size, kv_heads, head_dim] of float32, bfloat16 or float16, or int8",
         pages.shape(), "See ch.PagedKVCache.");
  if (pages.stride(3) != 1 && pages.size(3) > 1)
    fail(function, argument, "have contiguous channels", pages.shape(), "Allocate the pages with head_dim last.");
}

void check_indices(const char* function, const char* argument, const Tensor& tensor, int64_t dim) {
  if (tensor.dim() != dim || tensor.dtype() != Dtype::int32 || (tensor.size(dim - 1) > 1 && tensor.stride(dim - 1) != 1))
    fail(function, argument, std::string("be contiguous int32 of ") + words(dim) + (dim == 1 ? " axis" : " axes"),
         tensor.shape(), "Convert with .to(torch.int32).contiguous().");
}

// Every entry of the table that is read is a page.
void check_entries(const char* function, const ch_pages& pages) {
  for (int64_t s = 0; s < pages.sequences; ++s) {
    const int64_t length = pages.lengths[s];
    if (length < 0 || length > pages.columns * pages.size)
      fail(function, "lengths", "lie from 0 to " + words(pages.columns * pages.size) + ", what a row of block_table holds",
           words(length) + " for sequence " + words(s), "Add blocks to the table.");
    for (int64_t column = 0; column * pages.size < length; ++column) {
      const int32_t page = pages.table[s * pages.table_row + column];
      if (page < 0 || page >= pages.count)
        fail(function, "block_table", "name blocks from 0 to " + words(pages.count - 1),
             words(page) + " in row " + words(s) + ", column " + words(column), "Entries beyond a sequence's length are not read.");
    }
  }
}

void check_start(const char* function, const ch_pages& pages, const PageTable& table, int64_t batch, int64_t q_len) {
  if (!table.query_start) {
    if (pages.sequences != batch)
      fail(function, "block_table", "have a row for each of the " + words(batch) + " sequences", table.table.shape(),
           "Give query_start for sequences that are packed.");
    return;
  }
  check_indices(function, "query_start", table.query_start, 1);
  const int32_t* start = pages.query_start;
  bool fits = batch == 1 && table.query_start.size(0) == pages.sequences + 1 && start[0] == 0 && start[pages.sequences] == q_len;
  for (int64_t s = 0; fits && s < pages.sequences; ++s) fits = start[s] <= start[s + 1];
  if (!fits)
    fail(function, "query_start", "rise from 0 to the number of queries " + words(q_len) + ", with one more than " +
         words(pages.sequences) + " sequences, for a batch of 1", table.query_start.shape(), "It is the cumulative sum of their query lengths.");
}

}  // namespace

ch_tensor view_of_pages(const Tensor& pages) { return {pages.data(), pages.stride(0), pages.stride(2), pages.stride(1)}; }

ch_pages describe_pages(const char* function, const Tensor& key, const Tensor& value, const PageTable& table,
                        int64_t batch, int64_t q_len) {
  check_pages(function, "key", key), check_pages(function, "value", value);
  if (value.size(0) != key.size(0) || value.size(1) != key.size(1) || value.size(2) != key.size(2) || value.dtype() != key.dtype())
    fail(function, "value", "have key's blocks, heads and dtype", value.shape(), "Allocate both alike.");
  check_indices(function, "block_table", table.table, 2), check_indices(function, "lengths", table.lengths, 1);
  ch_pages pages = {};
  pages.sequences = table.table.size(0), pages.columns = table.table.size(1), pages.table_row = table.table.stride(0);
  if (pages.table_row < 0 || pages.sequences > INT32_MAX || pages.columns > INT32_MAX)
    fail(function, "block_table", "be a table [batch, max_blocks]", table.table.shape(), "Use .contiguous().");
  if (table.lengths.size(0) != pages.sequences)
    fail(function, "lengths", "have one length for each row of block_table, " + words(pages.sequences), table.lengths.shape(),
         "Count the keys of each sequence.");
  pages.count = key.size(0), pages.size = key.size(1);
  pages.table = table.table.as<int32_t>(), pages.lengths = table.lengths.as<int32_t>();
  pages.query_start = table.query_start ? table.query_start.as<int32_t>() : nullptr;
  check_start(function, pages, table, batch, q_len);
  check_entries(function, pages);
  return pages;
}

int64_t longest(const ch_pages& pages) {
  int32_t length = 0;
  for (int64_t s = 0; s < pages.sequences; ++s) length = std::max(length, pages.lengths[s]);
  return length;
}

void check_appended(const char* function, const ch_pages& pages, int64_t q_len) {
  for_sequences(pages, q_len, [&](int64_t, int64_t, int64_t rows, int64_t s) {
    if (pages.lengths[s] < rows)
      fail(function, "lengths", "count the new tokens too", words(pages.lengths[s]) + " for sequence " + words(s) + " with " +
           words(rows) + " new ones", "Add them before the call.");
  });
}

void append_to_pages(const ch_pages& pages, int64_t q_len, const ch_tensor& source, Dtype dtype, const Tensor& target) {
  const ch_tensor to = view_of_pages(target);
  const int64_t size = size_of(dtype);
  for_sequences(pages, q_len, [&](int64_t b, int64_t first, int64_t rows, int64_t s) {
    int64_t position = pages.lengths[s] - rows;
    for (int64_t row = 0; row < rows;) {
      const int64_t at = position % pages.size, count = std::min(rows - row, pages.size - at);
      const int64_t page = pages.table[s * pages.table_row + position / pages.size];
      ch_tensor from = source, page_rows = to;
      from.data = static_cast<char*>(from.data) + (b * from.batch + (first + row) * from.row) * size;
      page_rows.data = static_cast<char*>(page_rows.data) + page * to.batch * size_of(target.dtype());
      append_rows(dtype, 1, target.size(2), count, channels_of(target), at, from, page_rows, is_quantized(target));
      row += count, position += count;
    }
  });
}

void attention_paged(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor query = arguments.tensor();
  const Tensor key = arguments.tensor(), value = arguments.tensor();
  PageTable table;
  table.table = arguments.tensor(), table.lengths = arguments.tensor();
  AttentionOptions options;
  options.scale = arguments.number();
  const bool lse = arguments.flag();
  options.mask.before = arguments.optional_integer(INT64_MAX), options.mask.after = arguments.optional_integer(INT64_MAX);
  table.query_start = arguments.optional_tensor();
  Rules& rules = options.rules;
  rules.kinds = arguments.integers(), rules.values = arguments.numbers(), rules.tables = arguments.tensors();
  rules.sink = arguments.optional_tensor();
  query = std::move(query).with_contiguous_rows();
  if (query.dim() != 4 || query.dtype() > Dtype::float16 || query.size(3) < 1 || query.size(3) > CH_MAX_HEAD_DIM)
    fail(attend_name, "query", "be [batch, heads, q_len, head_dim] of float32, bfloat16 or float16, with 1 to 256 channels",
         query.shape(), "Add the missing axes with .unsqueeze.");
  const ch_pages pages = describe_pages(attend_name, key, value, table, query.size(0), query.size(2));
  if (!is_cached_as(key, query.dtype()) || channels_of(key) != query.size(3) || channels_of(value) < 1 || channels_of(value) > CH_MAX_HEAD_DIM ||
      (key.size(2) == 0 ? query.size(1) != 0 : query.size(1) % key.size(2) != 0))
    fail(attend_name, "key", "have query's dtype and head_dim, or int8 rows of it, and heads that divide query's " + words(query.size(1)), key.shape(),
         "Query head h reads key head h // group.");
  if (std::find(rules.kinds.begin(), rules.kinds.end(), CH_RULE_DENSE) != rules.kinds.end())
    fail(attend_name, "rule_kinds", "be slopes, distances and caps", "a dense bias", "Gather the pages and call attention.");
  ch_attention work = describe_attention(query.dtype());
  work.batch = query.size(0), work.heads = query.size(1), work.kv_heads = key.size(2);
  work.q_len = query.size(2), work.k_len = longest(pages), work.head_dim = query.size(3), work.value_dim = channels_of(value);
  work.quantized = is_quantized(key) ? 1 : 0;
  work.query = view_of(query), work.key = view_of_pages(key), work.value = view_of_pages(value);
  work.pages = &pages;
  describe_options(attend_name, work, options);
  std::vector<Tensor> results;
  results.push_back(empty_heads(query, work.value_dim));
  work.output = view_of(results[0]);
  if (lse) {
    results.push_back(empty(Dtype::float32, {work.batch, work.heads, work.q_len}));
    work.lse = results[1].as<float>();
  }
  check_kernel(ch_forward(&work), attend_name);
  Results(stack).tensors(std::move(results));
}

void paged_append(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  const Tensor key_pages = arguments.tensor(), value_pages = arguments.tensor();
  Tensor key = arguments.tensor(), value = arguments.tensor();
  PageTable table;
  table.table = arguments.tensor(), table.lengths = arguments.tensor(), table.query_start = arguments.optional_tensor();
  key = std::move(key).with_contiguous_rows(), value = std::move(value).with_contiguous_rows();
  const struct {
    const char* argument;
    const Tensor &rows, &pages;
  } given[] = {{"key", key, key_pages}, {"value", value, value_pages}};
  for (const auto& [argument, rows, pages] : given) {
    if (rows.dim() != 4 || pages.dim() != 4 || rows.dtype() > Dtype::float16 || rows.dtype() != key.dtype() ||
        !is_cached_as(pages, rows.dtype()) || rows.size(1) != pages.size(2) || rows.size(3) != channels_of(pages) || rows.size(0) != key.size(0) || rows.size(2) != key.size(2))
      fail(append_name, argument, "be [batch, kv_heads, new, head_dim] as the pages are, " + pages.shape(), rows.shape(),
           "Use one cache per model.");
  }
  const int64_t q_len = key.size(2);
  const ch_pages pages = describe_pages(append_name, key_pages, value_pages, table, key.size(0), q_len);
  check_appended(append_name, pages, q_len);
  append_to_pages(pages, q_len, view_of(key), key.dtype(), key_pages);
  append_to_pages(pages, q_len, view_of(value), value.dtype(), value_pages);
}

}  // namespace clearhead::torch
