// Reads the description of blocks from the lists that Python wrote, and checks that its parts fit each other. The lists
// have first the structure of every block, and then per block what differs between calls. Where blocks differ in tensors
// alone, both are given once.
#include "block.h"
#include "quantized.h"

#include <algorithm>

namespace clearhead::torch {
namespace {

constexpr const char* name = "block";
constexpr int64_t most_parts = 1 << 20, most_channels = int64_t{1} << 40;

std::string words(int64_t number) { return std::to_string(number); }

// Lists that do not describe the blocks are a fault of clearhead.ops.block, never of the caller: Python knows them by the
// last sentence and does not go on op by op.
[[noreturn]] void malformed(const char* lists, const char* requirement, const char* got) {
  fail(name, lists, requirement, got, "The description is malformed.");
}

// Iterates over the three lists.
class Reader {
 public:
  Reader(BlockCall& call, const std::vector<int64_t>& integers, const std::vector<double>& numbers)
      : call_(call), integers_(integers), numbers_(numbers) {}

  int64_t integer() {
    if (integer_ >= integers_.size()) malformed("integers", "describe every block", "too few");
    return integers_[integer_++];
  }
  int64_t integer(int64_t low, int64_t high, const char* what) {
    const int64_t value = integer();
    if (value < low || value > high)
      fail(name, what, "be from " + words(low) + " to " + words(high), words(value), "Use clearhead.ops.block.");
    return value;
  }
  bool flag() { return integer(0, 1, "a flag") == 1; }
  double number() {
    if (number_ >= numbers_.size()) malformed("numbers", "describe every block", "too few");
    return numbers_[number_++];
  }
  Slot slot() {
    if (tensor_ >= call_.tensors.size()) malformed("tensors", "include those of every block", "too few");
    const int64_t index = static_cast<int64_t>(tensor_++);
    return {&call_.tensors[static_cast<size_t>(index)], index};
  }
  // A tensor preceded by a flag that says whether there is one.
  Slot optional_slot() { return flag() ? slot() : Slot{}; }
  Tensor optional_tensor() { return flag() ? slot().tensor->reference() : Tensor(); }
  const Tensor* cache() {
    if (cache_ >= call_.caches.size()) malformed("caches", "include keys and values of each cache", "too few");
    return &call_.caches[cache_++];
  }
  struct Place {
    size_t integer, number, tensor;
  };
  Place place() const { return {integer_, number_, tensor_}; }
  // Reads integers and numbers once more, and the next tensors.
  void repeat_numbers(const Place& from) { integer_ = from.integer, number_ = from.number; }
  // Reads everything but caches once more.
  void repeat(const Place& from) { repeat_numbers(from), tensor_ = from.tensor; }
  void check_end() const {
    if (integer_ != integers_.size() || number_ != numbers_.size() || tensor_ != call_.tensors.size() ||
        cache_ != call_.caches.size())
      malformed("integers, numbers, tensors and caches", "have no elements beyond those of the blocks", "more");
  }

 private:
  BlockCall& call_;
  const std::vector<int64_t>& integers_;
  const std::vector<double>& numbers_;
  size_t integer_ = 0, number_ = 0, tensor_ = 0, cache_ = 0;
};

// A weight of integers, whose scales, offsets and rounding follow.
Linear read_integers(Reader& reader, BlockCall& call, const LinearSpec& spec, Stored stored) {
  const bool packed = stored == Stored::int8_panels;
  const int64_t axes = packed ? 3 : 2;
  if (spec.weight.tensor->dtype() != (stored == Stored::int8 ? Dtype::int8 : Dtype::byte) || spec.weight.tensor->dim() != axes)
    malformed("a weight", "be int8, uint8 of two integers, or panels", "another");
  QuantizedLayer from = {spec.weight.tensor, reader.slot().tensor, nullptr, spec.bias.tensor};
  if (packed) from.in = reader.integer(0, most_channels, "inputs");
  from.offset = reader.optional_slot().tensor;
  from.rounding = reader.integer(), from.low = reader.integer(), from.high = reader.integer();
  return quantized_linear_of(name, from, call.dtype, call.copies);
}

LinearSpec read_linear(Reader& reader, BlockCall& call) {
  LinearSpec spec;
  spec.weight = reader.slot(), spec.bias = reader.optional_slot();
  const Stored stored = static_cast<Stored>(reader.integer(0, 4, "how a weight is stored"));
  if (stored == Stored::int8 || stored == Stored::int4 || stored == Stored::int8_panels) {
    spec.layer = read_integers(reader, call, spec, stored);
    return spec;
  }
  if (stored == Stored::panels) {
    const int64_t out = reader.integer(0, most_channels, "outputs"), in = reader.integer(0, most_channels, "inputs");
    spec.layer = packed_linear_of(name, *spec.weight.tensor, out, in, call.dtype);
    if (spec.bias.tensor) spec.layer.bias = bias_of(name, *spec.bias.tensor, out, call.dtype, call.copies);
    return spec;
  }
  const Tensor none;
  spec.layer = linear_of(name, *spec.weight.tensor, spec.bias.tensor ? *spec.bias.tensor : none, call.dtype, call.copies);
  return spec;
}

NormSpec read_norm(Reader& reader, BlockCall& call, int64_t width) {
  NormSpec spec;
  spec.norm.kind = static_cast<int32_t>(reader.integer(CH_NORM_LAYER, CH_NORM_RMS_FROM_ONE, "a norm's kind"));
  spec.norm.epsilon = reader.number();
  spec.weight = reader.optional_slot(), spec.bias = reader.optional_slot();
  for (const Slot* part : {&spec.weight, &spec.bias}) {
    if (part->tensor == nullptr) continue;
    if (!part->tensor->is_shaped({width}) || part->tensor->dtype() != call.dtype || !part->tensor->contiguous())
      fail(name, "a norm's weight and bias", "be contiguous [" + words(width) + "] in the tokens' dtype",
           part->tensor->shape(), "Use clearhead.ops.block.");
  }
  spec.norm.weight = spec.weight.tensor ? spec.weight.tensor->data() : nullptr;
  spec.norm.bias = spec.bias.tensor ? spec.bias.tensor->data() : nullptr;
  return spec;
}

void read_mask(Reader& reader, Mask& mask) {
  if (reader.flag()) mask.before = reader.integer();
  if (reader.flag()) mask.after = reader.integer();
  mask.start = reader.optional_tensor();
  if (mask.start) mask.stop = reader.slot().tensor->reference();
  mask.allowed = reader.optional_tensor(), mask.blocks = reader.optional_tensor();
  if (mask.blocks) mask.block_size = reader.integer();
}

void read_rules(Reader& reader, Rules& rules) {
  for (int64_t count = reader.integer(0, CH_MAX_RULES, "the number of score rules"); count > 0; --count) {
    rules.kinds.push_back(reader.integer(CH_RULE_SLOPE, CH_RULE_SOFTCAP, "a score rule's kind"));
    if (rules.kinds.back() == CH_RULE_SOFTCAP) rules.values.push_back(reader.number());
    else rules.tables.push_back(reader.slot().tensor->reference());
  }
  rules.sink = reader.optional_tensor();
}

void check_cache(const BlockCall& call, const AttentionSpec& spec) {
  for (const Tensor* part : {spec.cached_key, spec.cached_value}) {
    if (part->dim() != 4 || part->size(0) != call.batch || part->size(1) != spec.kv_heads ||
        channels_of(*part) != spec.head_dim || !is_cached_as(*part, call.dtype) || part->stride(3) != 1 ||
        part->dtype() != spec.cached_key->dtype())
      fail(name, "a cache", "have keys and values [batch, kv_heads, capacity, head_dim] in the tokens' dtype or in int8", part->shape(),
           "Use ch.KVCache.");
    const int64_t more = spec.cache == Cache::grows ? call.length : 0;
    if (spec.cached < 0 || spec.cached > part->size(2) - more)
      fail(name, "a cache", "have capacity for " + words(spec.cached) + " and " + words(more) + " more tokens", part->shape(),
           "Use ch.KVCache.");
  }
}

// Checks the widths of the projections against heads and tokens.
void check_attention(const BlockCall& call, const AttentionSpec& spec, bool reads_memory) {
  const int64_t heads = spec.heads + 2 * spec.kv_heads;
  const bool together = spec.sources.size() == 1;
  const int64_t memory_width = reads_memory ? call.tokens[1].size(2) : call.width;
  for (size_t index = 0; index < spec.sources.size(); ++index) {
    const Linear& layer = spec.sources[index].layer;
    const int64_t count = together ? heads : index == 0 ? spec.heads : spec.kv_heads;
    const int64_t in = index > 0 ? memory_width : call.width;
    const bool unread = index > 0 && spec.cache == Cache::memory;
    if (layer.out != count * spec.head_dim || (!unread && layer.in != in) || (together && memory_width != call.width))
      fail(name, "a projection", "be [" + words(count * spec.head_dim) + ", " + words(in) + "]",
           spec.sources[index].weight.tensor->shape(), "Use clearhead.ops.block.");
  }
  const Linear& first = spec.sources[0].layer;
  const bool split = together && (reads_memory || spec.cache == Cache::memory) && first.panels != nullptr;
  if (split && spec.heads * spec.head_dim % panels_shape(call.dtype, first.out, first.in)[1] != 0)
    fail(name, "a packed projection", "have queries that end with a panel", words(spec.heads * spec.head_dim) + " channels",
         "Unpack it.");
  if (spec.last.layer.in != spec.heads * spec.head_dim)
    fail(name, "the output projection", "read " + words(spec.heads * spec.head_dim) + " channels",
         spec.last.weight.tensor->shape(), "Use clearhead.ops.block.");
  if (spec.table == nullptr) return;
  const Tensor& table = *spec.table;
  if (table.dim() != 2 || table.size(1) != spec.head_dim || table.dtype() != Dtype::float32 || !table.contiguous() ||
      spec.head_dim % 2 != 0)
    fail(name, "a rotary table", "be contiguous float32 [positions, head_dim] of an even head_dim", table.shape(),
         "Use ch.positions.");
}

AttentionSpec read_attention(Reader& reader, BlockCall& call) {
  AttentionSpec spec;
  const bool together = reader.flag();
  spec.heads = reader.integer(1, most_parts, "heads"), spec.kv_heads = reader.integer(1, most_parts, "kv_heads");
  for (int index = 0; index < (together ? 1 : 3); ++index) spec.sources.push_back(read_linear(reader, call));
  spec.last = read_linear(reader, call);
  const int64_t count = together ? spec.heads + 2 * spec.kv_heads : spec.heads;
  spec.head_dim = spec.sources[0].layer.out / count;
  if (spec.head_dim < 1 || spec.head_dim > CH_MAX_HEAD_DIM || spec.heads % spec.kv_heads != 0)
    fail(name, "heads", "divide the projections, kv_heads divide heads, and head_dim be 1 to 256", words(spec.heads),
         "Use clearhead.ops.block.");
  if (reader.flag())
    for (int index = 0; index < 2; ++index) spec.head_norms.push_back(read_norm(reader, call, spec.head_dim));
  spec.rotary = static_cast<Rotary>(reader.integer(0, 2, "rotary"));
  return spec;
}

// A paged cache: pages, the table, lengths with the call's tokens, and where the tokens of each sequence start.
void read_pages(Reader& reader, const BlockCall& call, AttentionSpec& spec) {
  PageTable& table = spec.page_table;
  table.table = reader.slot().tensor->reference(), table.lengths = reader.slot().tensor->reference();
  table.query_start = reader.slot().tensor->reference();
  spec.cached_key = reader.cache(), spec.cached_value = reader.cache();
  spec.pages = describe_pages(name, *spec.cached_key, *spec.cached_value, table, call.batch, call.length);
  check_appended(name, spec.pages, call.length);
  for (const Tensor* part : {spec.cached_key, spec.cached_value}) {
    if (part->size(2) != spec.kv_heads || channels_of(*part) != spec.head_dim || !is_cached_as(*part, call.dtype))
      fail(name, "a paged cache", "have pages [num_blocks, block_size, kv_heads, head_dim] in the tokens' dtype or in int8", part->shape(),
           "Use ch.PagedKVCache.");
  }
}

void read_attention_call(Reader& reader, BlockCall& call, AttentionSpec& spec, bool reads_memory) {
  if (spec.rotary != Rotary::none) spec.table = reader.slot().tensor;
  spec.cache = static_cast<Cache>(reader.integer(0, 3, "a cache's kind"));
  if (spec.cache == Cache::paged) {
    read_pages(reader, call, spec);
  } else if (spec.cache != Cache::none) {
    spec.cached = reader.integer();
    spec.cached_key = reader.cache(), spec.cached_value = reader.cache();
    check_cache(call, spec);
  }
  AttentionOptions& options = spec.options;
  options.scale = reader.number(), options.dropout = reader.number();
  options.seed = static_cast<uint64_t>(reader.integer()), options.query_offset = reader.integer();
  options.first_batch = reader.integer(), options.first_head = reader.integer();
  options.first_key = reader.integer(), options.first_position = reader.integer();
  options.token_numbers = reader.optional_tensor();
  read_mask(reader, options.mask);
  read_rules(reader, options.rules);
  check_attention(call, spec, reads_memory);
}

FeedForwardSpec read_feedforward(Reader& reader, BlockCall& call) {
  FeedForwardSpec spec;
  for (int64_t left = reader.integer(2, 3, "the number of a feedforward's layers"); left > 0; --left)
    spec.layers.push_back(read_linear(reader, call));
  spec.activation = static_cast<int32_t>(reader.integer(CH_PLAIN, CH_QUICK_GELU, "an activation"));
  spec.dropped = static_cast<int32_t>(reader.integer(0, CH_LEVELS - 1, "dropout"));
  const int64_t hidden = spec.layers.back().layer.in;
  for (size_t index = 0; index + 1 < spec.layers.size(); ++index) {
    const Linear& layer = spec.layers[index].layer;
    if (layer.in != call.width || layer.out != hidden)
      fail(name, "a feedforward's layer", "be [" + words(hidden) + ", " + words(call.width) + "]",
           spec.layers[index].weight.tensor->shape(), "Use clearhead.ops.block.");
  }
  return spec;
}

BlockSpec read_block(Reader& reader, BlockCall& call) {
  BlockSpec spec;
  spec.residual = reader.flag(), spec.pre_norm = reader.flag();
  const int64_t attentions = reader.integer(0, 2, "the number of attentions");
  for (int64_t index = 0; index < attentions; ++index) spec.attentions.push_back(read_attention(reader, call));
  spec.has_feedforward = reader.flag();
  if (spec.has_feedforward) spec.feedforward = read_feedforward(reader, call);
  if (spec.sublayers() == 0 || (!spec.residual && spec.sublayers() != 1))
    fail(name, "a block", "have sublayers, and exactly one without residuals", words(static_cast<int64_t>(spec.sublayers())),
         "Use clearhead.ops.block.");
  if (!spec.residual) return spec;
  for (size_t index = 0; index < spec.sublayers(); ++index) {
    ConnectionSpec connection;
    connection.norm = read_norm(reader, call, call.width);
    connection.has_result_norm = reader.flag();
    if (connection.has_result_norm) connection.result_norm = read_norm(reader, call, call.width);
    connection.dropped = static_cast<int32_t>(reader.integer(0, CH_LEVELS - 1, "dropout"));
    const Linear& last = index < spec.attentions.size() ? spec.attentions[index].last.layer
        : spec.feedforward.layers.back().layer;
    if (last.out != call.width)
      fail(name, "a sublayer", "return the tokens' width " + words(call.width), words(last.out), "Use clearhead.ops.block.");
    spec.connections.push_back(std::move(connection));
  }
  return spec;
}

Seed read_seed(Reader& reader, const int64_t* row_numbers) {
  const uint64_t value = static_cast<uint64_t>(reader.integer());
  return {value, reader.integer(), row_numbers};
}

void read_block_call(Reader& reader, BlockCall& call, BlockSpec& spec) {
  for (AttentionSpec& attention : spec.attentions)
    read_attention_call(reader, call, attention, call.tokens.size() > 1 && &attention == &spec.attentions.back());
  if (!spec.has_feedforward && spec.connections.empty()) return;
  const int64_t* numbers = row_numbers_of(name, reader.optional_tensor(), call.batch * call.length);
  if (spec.has_feedforward) spec.feedforward.seed = read_seed(reader, numbers);
  for (ConnectionSpec& connection : spec.connections) connection.seed = read_seed(reader, numbers);
}

}  // namespace

void read_blocks(BlockCall& call, const std::vector<int64_t>& integers, const std::vector<double>& numbers) {
  if (call.tokens.empty() || call.tokens.size() > 2)
    fail(name, "tokens", "be one or two", words(static_cast<int64_t>(call.tokens.size())), "Use clearhead.ops.block.");
  for (Tensor& tokens : call.tokens) {
    if (tokens.dim() != 3 || tokens.dtype() > Dtype::float16 || tokens.dtype() != call.tokens[0].dtype() ||
        tokens.size(0) != call.tokens[0].size(0) || tokens.elements() == 0)
      fail(name, "tokens", "be [batch, len, width], not empty, in float32, bfloat16 or float16", tokens.shape(),
           "Use clearhead.ops.block.");
    tokens = std::move(tokens).as_contiguous();
  }
  call.dtype = call.tokens[0].dtype();
  call.batch = call.tokens[0].size(0), call.length = call.tokens[0].size(1), call.width = call.tokens[0].size(2);
  Reader reader(call, integers, numbers);
  const int64_t count = reader.integer(1, most_parts, "the number of blocks");
  call.blocks.reserve(static_cast<size_t>(count));
  const bool one_structure = reader.flag();
  const Reader::Place structure = reader.place();
  for (int64_t index = 0; index < count; ++index) {
    if (one_structure) reader.repeat_numbers(structure);
    call.blocks.push_back(read_block(reader, call));
  }
  const bool one_call = reader.flag();
  const Reader::Place options = reader.place();
  for (BlockSpec& block : call.blocks) {
    if (one_call) reader.repeat(options);
    read_block_call(reader, call, block);
  }
  reader.check_end();
}

// Whether a weight has no gradient, nor gives one to its input.
static bool has_constants(const BlockSpec& block) {
  const auto has = [](const LinearSpec& linear) { return linear.layer.integers.bits != 0 || linear.layer.panels != nullptr; };
  bool any = std::any_of(block.feedforward.layers.begin(), block.feedforward.layers.end(), has);
  for (const AttentionSpec& spec : block.attentions)
    any = any || has(spec.last) || std::any_of(spec.sources.begin(), spec.sources.end(), has);
  return any;
}

void check_training(const BlockCall& call) {
  bool saves = call.blocks.size() == 1 && call.caches.empty() && !has_constants(call.blocks[0]);
  for (const AttentionSpec& spec : call.blocks[0].attentions) saves = saves && spec.head_norms.empty();
  for (const ConnectionSpec& connection : call.blocks[0].connections) saves = saves && !connection.has_result_norm;
  if (!saves)
    fail(name, "training", "be of one block without caches, packed or integer weights, norms of heads and norms of results",
         words(static_cast<int64_t>(call.blocks.size())) + " blocks and " + words(static_cast<int64_t>(call.caches.size())) +
         " caches", "Run it op by op.");
}

}  // namespace clearhead::torch
