#include "attention.h"

#include <string.h>

#include <algorithm>
#include <cmath>

#include "../src/invariance.h"
#include "calls.h"

namespace clearhead::torch {
namespace {

constexpr const char* name = "attention";

// Optional results of forward after the output, in this order; bits of `returns`.
enum Returned : int64_t {
  LSE = 1 << 0,
  SOFTMAX = 1 << 1,
  OUTPUT32 = 1 << 2,
  MAX_SCORE = 1 << 3,
  TIES = 1 << 4,
  ENTROPY = 1 << 5,
  DISTANCE = 1 << 6,
  SINK_MASS = 1 << 7,
  TOP_K = 1 << 8,
  RECEIVED = 1 << 9,
  HEATMAP = 1 << 10,
  ROW_WEIGHTS = 1 << 11,
  ROWS = 1 << 12,
};
constexpr int64_t any_statistic = MAX_SCORE | TIES | ENTROPY | DISTANCE | SINK_MASS | TOP_K | RECEIVED | ROW_WEIGHTS | HEATMAP | ROWS;

// Which gradients backward computes: all, those of queries, or those of keys and values.
enum Side : int64_t { BOTH_SIDES = 0, QUERY_SIDE = 1, KEY_SIDE = 2 };

// Sizes of statistics: keys of the sink mass, entries of top-k, tile side of the heatmap, single rows.
struct StatisticSizes {
  int64_t sink_keys = 0, top_k = 0, heatmap = 0, rows = 0;
};

std::string words(int64_t number) { return std::to_string(number); }

void check_qkv(const Tensor& query, const Tensor& key, const Tensor& value) {
  const struct {
    const char* argument;
    const Tensor& tensor;
  } given[] = {{"query", query}, {"key", key}, {"value", value}};
  for (const auto& [argument, tensor] : given) {
    if (tensor.dim() != 4)
      fail(name, argument, "have axes [batch, heads, len, head_dim]", tensor.shape(), "Add the missing axes with .unsqueeze.");
    const bool cached = &tensor != &query && is_quantized(tensor) && is_quantized(key);
    if (query.dtype() > Dtype::float16 || (tensor.dtype() != query.dtype() && !cached))
      fail(name, argument, "be float32, bfloat16 or float16, the same for all three, or key and value both int8 rows of a cache",
           tensor.shape(), "Convert with .to(dtype).");
    if (channels_of(tensor) < 1 || channels_of(tensor) > CH_MAX_HEAD_DIM)
      fail(name, argument, "have 1 to " + words(CH_MAX_HEAD_DIM) + " channels", tensor.shape(), "Use another backend.");
    if (tensor.size(0) != query.size(0))
      fail(name, argument, "have query's batch size " + words(query.size(0)), tensor.shape(), "Expand it to the batch.");
  }
  if (channels_of(key) != query.size(3))
    fail(name, "key", "have query's head_dim " + words(query.size(3)), key.shape(), "Project both to one width.");
  if (is_quantized(value) != is_quantized(key))
    fail(name, "value", "be int8 rows of a cache as key is", value.shape(), "Pass what ch.KVCache returned.");
  if (value.size(1) != key.size(1) || value.size(2) != key.size(2))
    fail(name, "value", "have key's heads and length", value.shape(), "One value per key.");
  if (key.size(1) == 0 ? query.size(1) != 0 : query.size(1) % key.size(1) != 0)
    fail(name, "key", "have a number of heads that divides query's " + words(query.size(1)), key.shape(),
         "Query head h reads key head h // group.");
}

// Whether each axis of a table has the call's size or 1.
bool broadcasts(const Tensor& table, std::initializer_list<int64_t> sizes) {
  if (table.dim() != static_cast<int64_t>(sizes.size())) return false;
  int64_t axis = 0;
  for (int64_t size : sizes) {
    if (table.size(axis) != 1 && table.size(axis) != size) return false;
    ++axis;
  }
  return true;
}

ch_table table_of(const Tensor& table) {
  return {table.data(), table.step(0), table.step(1), table.step(2), table.step(3)};
}

void describe_mask(const char* function, ch_attention& work, const Mask& mask) {
  work.before = mask.before, work.after = mask.after;
  if (mask.start) {
    const Tensor &start = mask.start, &stop = mask.stop;
    const int64_t count = start.dim() == 4 ? start.size(3) : -1;
    if (!stop || count < 1 || count > CH_MAX_INTERVALS || !broadcasts(start, {work.batch, work.heads, work.q_len, count}) ||
        !stop.is_shaped({start.size(0), start.size(1), start.size(2), count}) || start.dtype() != Dtype::int32 ||
        stop.dtype() != Dtype::int32 || !start.contiguous() || !stop.contiguous())
      fail(function, "start and stop", "be contiguous int32 intervals [batch, heads, q_len, 1 to " + words(CH_MAX_INTERVALS) + "]",
           start.shape(), "Lower the mask with ch.masks.");
    work.start = start.as<int32_t>(), work.stop = stop.as<int32_t>(), work.intervals = static_cast<int32_t>(count);
    work.interval_batch = start.step(0), work.interval_head = start.step(1), work.interval_row = start.step(2);
  }
  if (mask.allowed) {
    if (mask.allowed.dtype() != Dtype::byte || !broadcasts(mask.allowed, {work.batch, work.heads, work.q_len, work.k_len}))
      fail(function, "allowed", "be bool [batch, heads, q_len, k_len]", mask.allowed.shape(), "Use ch.Dense.");
    work.allowed = table_of(mask.allowed);
  }
  if (mask.blocks) {
    const Tensor& blocks = mask.blocks;
    if (blocks.dtype() != Dtype::byte || blocks.dim() != 4 ||
        !broadcasts(blocks, {work.batch, work.heads, blocks.size(2), blocks.size(3)}) || mask.block_size < 1 ||
        mask.block_size > INT32_MAX)
      fail(function, "blocks", "be bool [batch, heads, query blocks, key blocks] of a block size from 1", blocks.shape(),
           "Use ch.Blocks.");
    work.blocks = table_of(blocks), work.block_size = static_cast<int32_t>(mask.block_size);
    work.block_rows = blocks.size(2), work.block_columns = blocks.size(3);
  }
}

void describe_rule(const char* function, ch_attention& work, ch_rule& rule, int64_t kind, const Tensor& table) {
  if (table.dtype() != Dtype::float32)
    fail(function, "rule_tables", "be float32", table.shape(), "Convert with .to(torch.float32).");
  rule.kind = static_cast<int32_t>(kind);
  if (kind == CH_RULE_SLOPE && broadcasts(table, {work.heads})) {
    rule.table = {table.data(), 0, table.step(0), 0, 0};
  } else if (kind == CH_RULE_RELATIVE && table.dim() == 2 && table.size(1) % 2 == 1 && table.size(1) < INT32_MAX &&
             broadcasts(table, {work.heads, table.size(1)}) && (table.size(1) == 1 || table.stride(1) == 1)) {
    rule.table = {table.data(), 0, table.step(0), 0, table.step(1)};
    rule.reach = static_cast<int32_t>(table.size(1) / 2);
  } else if (kind == CH_RULE_DENSE && broadcasts(table, {work.batch, work.heads, work.q_len, work.k_len}) &&
             table.step(3) <= 1) {
    rule.table = table_of(table);
  } else {
    fail(function, "rule_tables", "fit the call: slopes [heads], distances [heads, 2 reach + 1] or biases "
         "[batch, heads, q_len, k_len]", table.shape(), "Give each rule the call's sizes, or 1.");
  }
}

void describe_rules(const char* function, ch_attention& work, const Rules& rules) {
  if (rules.kinds.size() > CH_MAX_RULES)
    fail(function, "rule_kinds", "have at most " + words(CH_MAX_RULES) + " rules",
         words(static_cast<int64_t>(rules.kinds.size())), "Add rules up, or use another backend.");
  size_t value = 0, table = 0;
  for (size_t index = 0; index < rules.kinds.size(); ++index) {
    const int64_t kind = rules.kinds[index];
    ch_rule& rule = work.rules[index];
    const bool is_known = kind >= CH_RULE_SLOPE && kind <= CH_RULE_SOFTCAP;
    if (!is_known || (kind == CH_RULE_SOFTCAP ? value >= rules.values.size() : table >= rules.tables.size()))
      fail(function, "rule_kinds", "be of enum ch_rule_kind, with a value or a table for each", words(kind), "See enum ch_rule_kind.");
    if (kind == CH_RULE_SOFTCAP) {
      rule.kind = CH_RULE_SOFTCAP, rule.value = static_cast<float>(rules.values[value++]);
    } else {
      describe_rule(function, work, rule, kind, rules.tables[table++]);
    }
  }
  work.num_rules = static_cast<int32_t>(rules.kinds.size());
  if (rules.sink) {
    if (rules.sink.dtype() != Dtype::float32 || !broadcasts(rules.sink, {work.heads}))
      fail(function, "sink", "be float32 [heads]", rules.sink.shape(), "Convert with .to(torch.float32).");
    work.sink = rules.sink.as<float>(), work.sink_head = rules.sink.step(0);
  }
}

ch_attention describe(const Tensor& query, const Tensor& key, const Tensor& value, const AttentionOptions& options) {
  check_qkv(query, key, value);
  ch_attention work = describe_attention(query.dtype());
  work.batch = query.size(0), work.heads = query.size(1), work.kv_heads = key.size(1);
  work.q_len = query.size(2), work.k_len = key.size(2), work.head_dim = query.size(3), work.value_dim = channels_of(value);
  work.quantized = is_quantized(key) ? 1 : 0;
  work.query = view_of(query), work.key = view_of(key), work.value = view_of(value);
  describe_options(name, work, options);
  return work;
}

// Results of a forward call: allocates each and sets its pointer in the description.
class Forward {
 public:
  Forward(ch_attention& work, const Tensor& query, int64_t returns, const StatisticSizes& sizes)
      : work_(work), returns_(returns) {
    results_.push_back(empty_heads(query, work.value_dim));
    work.output = view_of(results_[0]);
    work.lse = rows(LSE, 1);
    work.softmax = rows(SOFTMAX, 2);
    work.output32 = rows(OUTPUT32, work.value_dim);
    if (returns & any_statistic) set_statistics(sizes);
  }
  std::vector<Tensor> take() { return std::move(results_); }

 private:
  float* result(Dtype dtype, const Sizes& sizes) {
    results_.push_back(empty(dtype, sizes));
    return results_.back().as<float>();
  }
  // A float32 [batch, heads, q_len] or [batch, heads, q_len, last]; null if it is not requested.
  float* rows(int64_t bit, int64_t last) {
    if (!(returns_ & bit)) return nullptr;
    Sizes sizes = {work_.batch, work_.heads, work_.q_len};
    if (last != 1 || bit == OUTPUT32) sizes.push_back(last);
    return result(Dtype::float32, sizes);
  }
  float* keys(int64_t count) { return result(Dtype::float32, {work_.batch, work_.heads, count, work_.k_len}); }

  void set_statistics(const StatisticSizes& sizes) {
    statistics_.max_score = rows(MAX_SCORE, 1);
    statistics_.ties = rows(TIES, 2);
    statistics_.entropy = rows(ENTROPY, 1);
    statistics_.distance = rows(DISTANCE, 1);
    statistics_.sink = rows(SINK_MASS, 1);
    statistics_.sink_keys = sizes.sink_keys;
    if (returns_ & TOP_K) {
      statistics_.top_k = sizes.top_k;
      const Sizes shape = {work_.batch, work_.heads, work_.q_len, sizes.top_k};
      statistics_.top_weights = result(Dtype::float32, shape);
      statistics_.top_indices = reinterpret_cast<int64_t*>(result(Dtype::int64, shape));
    }
    if (returns_ & RECEIVED) statistics_.received = result(Dtype::float32, {work_.batch, work_.heads, work_.k_len});
    if (returns_ & HEATMAP) {
      const int64_t side = statistics_.heatmap = sizes.heatmap;
      const Sizes tiles = {work_.batch, work_.heads, (work_.q_len + side - 1) / side, (work_.k_len + side - 1) / side};
      statistics_.heatmap_max = result(Dtype::float32, tiles);
      statistics_.heatmap_mean = result(Dtype::float32, tiles);
    }
    work_.statistics = &statistics_;
  }

 public:
  void weigh_rows(const Tensor& weights) {
    if (!broadcasts(weights, {work_.batch, work_.heads, weights.dim() == 4 ? weights.size(2) : 0, work_.q_len}) ||
        weights.dtype() != Dtype::float32 || !weights.contiguous())
      fail(name, "row_weights", "be contiguous float32 [batch, heads, weights, q_len]", weights.shape(), "See ch.Want.");
    statistics_.row_weights = weights.as<float>(), statistics_.num_weights = weights.size(2);
    statistics_.weight_batch = weights.step(0), statistics_.weight_head = weights.step(1);
    statistics_.weighted = keys(weights.size(2));
  }
  void select_rows(const Tensor& slots, int64_t count) {
    if (!slots.is_shaped({work_.q_len}) || slots.dtype() != Dtype::int32 || !slots.contiguous() || count < 0)
      fail(name, "row_slots", "be contiguous int32 [q_len]", slots.shape(), "See ch.Want.");
    statistics_.row_slots = slots.as<int32_t>(), statistics_.num_rows = count;
    statistics_.rows = keys(count);
  }

 private:
  ch_attention& work_;
  int64_t returns_;
  ch_statistics statistics_ = {};
  std::vector<Tensor> results_;
};

void check_sizes(int64_t returns, const std::vector<int64_t>& sizes) {
  const bool side = !(returns & HEATMAP) || (sizes.size() == 4 && sizes[2] >= 1);
  const bool top = !(returns & TOP_K) || (sizes.size() == 4 && sizes[1] >= 0);
  if (returns < 0 || !side || !top || ((returns & any_statistic) && sizes.size() != 4))
    fail(name, "statistic_sizes", "give sink_keys, top_k, heatmap and rows", words(static_cast<int64_t>(sizes.size())) + " sizes",
         "See ch.Want.");
}

// The float32 gradients of learned rules: one zeroed tensor for each, which the kernel accumulates into.
std::vector<Tensor> rule_gradients(ch_attention& work, const Rules& rules, const std::vector<int64_t>& slots) {
  if (slots.empty()) return {};
  std::vector<Tensor> grads(static_cast<size_t>(std::max<int64_t>(0, *std::max_element(slots.begin(), slots.end()) + 1)));
  size_t table = 0;
  for (size_t index = 0; index < rules.kinds.size(); ++index) {
    if (rules.kinds[index] == CH_RULE_SOFTCAP) continue;
    const Tensor& learned = rules.tables[table];
    if (table >= slots.size()) break;
    const int64_t slot = slots[table++];
    if (slot < 0) continue;
    Tensor& grad = grads[static_cast<size_t>(slot)];
    ch_rule& rule = work.rules[index];
    if (!grad) {
      Sizes sizes;
      for (int64_t axis = 0; axis < learned.dim(); ++axis) sizes.push_back(learned.size(axis));
      // One for each batch entry, to add in the order of a tree.
      if (rule.kind == CH_RULE_DENSE && is_invariant()) sizes[0] = work.batch;
      grad = zeros(Dtype::float32, sizes);
    }
    rule.grad = grad.as<float>();
    if (rule.kind == CH_RULE_DENSE) {
      rule.grad_batch = grad.step(0), rule.grad_head = grad.step(1), rule.grad_row = grad.step(2);
    } else {
      rule.grad_head = grad.step(0);
    }
  }
  return grads;
}

// Gradients of biases that the batch shares, from those of its entries.
void add_rule_gradients(const ch_attention& work, const Rules& rules, const std::vector<int64_t>& slots, std::vector<Tensor>& grads) {
  for (size_t table = 0; table < slots.size() && table < rules.tables.size(); ++table) {
    if (slots[table] < 0) continue;
    const Tensor& learned = rules.tables[table];
    Tensor& grad = grads[static_cast<size_t>(slots[table])];
    if (grad.dim() != 4 || learned.size(0) == grad.size(0)) continue;
    const int64_t rows = grad.size(1) * grad.size(2), columns = grad.size(3);
    add_batch_entries(Dtype::float32, {grad.data(), rows, columns, columns}, work.batch);
    Tensor sum = empty(Dtype::float32, {1, grad.size(1), grad.size(2), columns});
    memcpy(sum.data(), grad.data(), static_cast<size_t>(rows * columns) * sizeof(float));
    grad = std::move(sum);
  }
}

const float* contiguous_rows(const char* argument, const Tensor& tensor, const Sizes& sizes) {
  if (!tensor) return nullptr;
  bool fits = tensor.dim() == static_cast<int64_t>(sizes.size()) && tensor.dtype() == Dtype::float32 && tensor.contiguous();
  for (size_t axis = 0; fits && axis < sizes.size(); ++axis) fits = tensor.size(static_cast<int64_t>(axis)) == sizes[axis];
  if (!fits) fail(name, argument, "be contiguous float32 of the call's rows", tensor.shape(), "Pass what forward returned.");
  return tensor.as<float>();
}

}  // namespace

ch_tensor view_of(const Tensor& tensor) { return {tensor.data(), tensor.stride(0), tensor.stride(1), tensor.stride(2)}; }

ch_attention describe_attention(Dtype dtype) {
  ch_attention work = {};
  work.size = sizeof(work), work.abi = CH_ABI, work.isa = instruction_set, work.threads = threads();
  work.dtype = static_cast<int32_t>(dtype);
  work.before = work.after = INT64_MAX;
  return work;
}

AttentionOptions read_options(Arguments& arguments, double scale) {
  AttentionOptions options;
  Mask& mask = options.mask;
  mask.before = arguments.optional_integer(INT64_MAX), mask.after = arguments.optional_integer(INT64_MAX);
  options.scale = scale, options.dropout = arguments.number();
  options.seed = static_cast<uint64_t>(arguments.integer());
  options.query_offset = arguments.integer();
  mask.start = arguments.optional_tensor(), mask.stop = arguments.optional_tensor();
  mask.allowed = arguments.optional_tensor(), mask.blocks = arguments.optional_tensor();
  mask.block_size = arguments.integer();
  Rules& rules = options.rules;
  rules.kinds = arguments.integers(), rules.values = arguments.numbers(), rules.tables = arguments.tensors();
  rules.sink = arguments.optional_tensor();
  options.first_batch = arguments.integer(), options.first_head = arguments.integer();
  options.first_key = arguments.integer();
  options.first_position = arguments.integer();
  options.token_numbers = arguments.optional_tensor();
  return options;
}

void describe_options(const char* function, ch_attention& work, const AttentionOptions& options) {
  if (!std::isfinite(options.scale)) fail(function, "scale", "be finite", std::to_string(options.scale), "Scale the query.");
  if (!(options.dropout >= 0.0 && options.dropout < 1.0))
    fail(function, "dropout", "be a probability below 1", std::to_string(options.dropout), "0 switches dropout off.");
  const struct {
    const char* argument;
    int64_t place;
  } places[] = {{"first_batch", options.first_batch}, {"first_head", options.first_head}, {"first_key", options.first_key},
                {"first_position", options.first_position}};
  for (const auto& [argument, place] : places) {
    if (place < 0) fail(function, argument, "be 0 or more", std::to_string(place), "It is a place in the whole call.");
  }
  work.scale = options.scale, work.dropout = options.dropout, work.seed = options.seed;
  work.query_offset = options.query_offset;
  work.first_batch = options.first_batch, work.first_head = options.first_head, work.first_key = options.first_key;
  work.first_position = options.first_position;
  work.token_numbers = row_numbers_of(function, options.token_numbers, work.k_len);
  describe_mask(function, work, options.mask);
  describe_rules(function, work, options.rules);
}

void attention_forward(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor query = arguments.tensor(), key = arguments.tensor(), value = arguments.tensor();
  const double scale = arguments.number();
  const int64_t returns = arguments.integer();
  const AttentionOptions options = read_options(arguments, scale);
  const std::vector<int64_t> sizes = arguments.integers();
  const Tensor row_weights = arguments.optional_tensor(), row_slots = arguments.optional_tensor();
  check_sizes(returns, sizes);
  query = std::move(query).with_contiguous_rows(), key = std::move(key).with_contiguous_rows();
  value = std::move(value).with_contiguous_rows();
  ch_attention work = describe(query, key, value, options);
  const StatisticSizes statistic_sizes = sizes.size() == 4 ? StatisticSizes{sizes[0], sizes[1], sizes[2], sizes[3]}
      : StatisticSizes{};
  Forward forward(work, query, returns, statistic_sizes);
  if (returns & ROW_WEIGHTS) forward.weigh_rows(row_weights);
  if (returns & ROWS) forward.select_rows(row_slots, statistic_sizes.rows);
  check_kernel(ch_forward(&work), name);
  Results(stack).tensors(forward.take());
}

void attention_gradients(StableIValue* stack, uint64_t, uint64_t) {
  Arguments arguments(stack);
  Tensor grad_output = arguments.tensor(), query = arguments.tensor(), key = arguments.tensor(), value = arguments.tensor();
  const Tensor softmax = arguments.tensor(), output = arguments.optional_tensor();
  const double scale = arguments.number();
  const AttentionOptions options = read_options(arguments, scale);
  const Tensor grad_lse = arguments.optional_tensor();
  // Ties, and gradients of the maximum, entropy, distance, sink and received statistics.
  const std::vector<Tensor> statistics = arguments.optional_tensors();
  const int64_t sink_keys = arguments.integer();
  const std::vector<int64_t> rule_slots = arguments.integers();
  const bool partial_rows = arguments.flag();
  const int64_t side = arguments.integer();
  if (side < BOTH_SIDES || side > KEY_SIDE)
    fail(name, "side", "be 0 for all gradients, 1 for those of queries or 2 for those of keys", words(side), "Pass 0.");
  query = std::move(query).with_contiguous_rows(), key = std::move(key).with_contiguous_rows();
  value = std::move(value).with_contiguous_rows(), grad_output = std::move(grad_output).with_contiguous_rows();
  ch_attention work = describe(query, key, value, options);
  if (work.quantized)
    fail(name, "key and value", "be floating point for gradients", key.shape(), "Call it under torch.no_grad().");
  if (!grad_output.is_shaped({work.batch, work.heads, work.q_len, work.value_dim}) || grad_output.dtype() != query.dtype())
    fail(name, "grad_output", "have the output's shape and dtype", grad_output.shape(), "Pass the gradient of the output unmodified.");
  work.grad_output = view_of(grad_output);
  const Sizes rows = {work.batch, work.heads, work.q_len};
  work.softmax = const_cast<float*>(contiguous_rows("softmax", softmax, {work.batch, work.heads, work.q_len, 2}));
  work.grad_lse = contiguous_rows("grad_lse", grad_lse, rows);
  if (output) {
    if (!output.is_shaped({work.batch, work.heads, work.q_len, work.value_dim}) || output.dtype() != Dtype::float32 ||
        (query.dtype() != Dtype::float32 && !output.contiguous()))
      fail(name, "output", "be forward's float32 output", output.shape(), "Pass what forward returned.");
    work.output = view_of(output);
    if (query.dtype() != Dtype::float32) work.output32 = output.as<float>();
  }
  if (partial_rows && ((!output && !grad_lse) || !statistics.empty()))
    fail(name, "partial_rows", "come with the output or grad_lse and without statistics", "others",
         "Pass the whole rows' output.");
  work.partial_rows = partial_rows;
  ch_statistics given = {};
  if (!statistics.empty()) {
    if (statistics.size() != 6)
      fail(name, "statistics", "be 6 tensors or none", words(static_cast<int64_t>(statistics.size())),
           "Pass None for absent ones.");
    given.sink_keys = sink_keys;
    given.ties = const_cast<float*>(contiguous_rows("ties", statistics[0], {work.batch, work.heads, work.q_len, 2}));
    given.grad_max = contiguous_rows("grad_max", statistics[1], rows);
    given.grad_entropy = contiguous_rows("grad_entropy", statistics[2], rows);
    given.grad_distance = contiguous_rows("grad_distance", statistics[3], rows);
    given.grad_sink = contiguous_rows("grad_sink", statistics[4], rows);
    given.grad_received = contiguous_rows("grad_received", statistics[5], {work.batch, work.heads, work.k_len});
    work.statistics = &given;
  }
  std::vector<Tensor> results;
  if (side != KEY_SIDE) {
    results.push_back(empty_heads(query, work.head_dim));
    work.grad_query = view_of(results.back());
  }
  if (side != QUERY_SIDE) {
    results.push_back(empty_heads(key, work.head_dim));
    work.grad_key = view_of(results.back());
    results.push_back(empty_heads(value, work.value_dim));
    work.grad_value = view_of(results.back());
  }
  results.push_back(empty(Dtype::float32, rows));
  work.delta = results.back().as<float>();
  std::vector<Tensor> rule_grads = rule_gradients(work, options.rules, rule_slots);
  const int code = ch_backward(&work);
  if (code != CH_NOT_FINITE) check_kernel(code, name);
  add_rule_gradients(work, options.rules, rule_slots, rule_grads);
  for (Tensor& grad : rule_grads) results.push_back(std::move(grad));
  Results written(stack);
  written.tensors(std::move(results));
  written.flag(code != CH_NOT_FINITE);
}

}  // namespace clearhead::torch
