// Paged KV caches: pages of keys and values, and the table that says which pages a sequence reads.
#pragma once

#include "attention.h"
#include "calls.h"

namespace clearhead::torch {

// The tensors behind a ch_pages; `query_start` may be undefined.
struct PageTable {
  Tensor table, lengths, query_start;
};

// Pages [pages, page_size, kv_heads, head_dim] as the kernels take them.
ch_tensor view_of_pages(const Tensor& pages);

// Checks pages and table against each other and against queries of [batch, ..., q_len, ...]: afterwards every entry that
// is read names a page.
ch_pages describe_pages(const char* function, const Tensor& key, const Tensor& value, const PageTable& table,
                        int64_t batch, int64_t q_len);

// The largest length, which a description of attention has as its number of keys.
int64_t longest(const ch_pages& pages);

// Calls `body(batch entry, first row, rows, sequence)` for every sequence that has queries.
template <class Body> void for_sequences(const ch_pages& pages, int64_t q_len, const Body& body) {
  for (int64_t s = 0; s < pages.sequences; ++s) {
    const int32_t* start = pages.query_start;
    if (start == nullptr) body(s, int64_t{0}, q_len, s);
    else if (start[s + 1] > start[s]) body(int64_t{0}, int64_t{start[s]}, int64_t{start[s + 1]} - start[s], s);
  }
}

// Raises unless every sequence is at least as long as its queries, whose keys are its last ones.
void check_appended(const char* function, const ch_pages& pages, int64_t q_len);

// Writes the keys or values [batch, kv_heads, q_len, head_dim] of the queries into the pages of their sequences.
void append_to_pages(const ch_pages& pages, int64_t q_len, const ch_tensor& source, Dtype dtype, const Tensor& target);

void attention_paged(StableIValue* stack, uint64_t, uint64_t);
void paged_append(StableIValue* stack, uint64_t, uint64_t);

inline constexpr const char* attention_paged_schema =
    "attention_paged(Tensor query, Tensor key, Tensor value, Tensor block_table, Tensor lengths, float scale, "
    "bool lse=False, int? before=None, int? after=None, Tensor? query_start=None, int[]? rule_kinds=None, "
    "float[]? rule_values=None, Tensor[]? rule_tables=None, Tensor? sink=None) -> Tensor[]";
inline constexpr const char* paged_append_schema =
    "paged_append(Tensor(a!) key_pages, Tensor(b!) value_pages, Tensor key, Tensor value, Tensor block_table, "
    "Tensor lengths, Tensor? query_start=None) -> ()";

}  // namespace clearhead::torch
