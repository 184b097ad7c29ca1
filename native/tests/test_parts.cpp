// Backward of a call's keys in two parts, each of which sees the softmax and output of the whole rows: together they are
// the gradients of the whole call.
#include "call.h"
#include "cases.h"

namespace test {

namespace {

struct PartsCase {
  int dtype;
  int64_t heads, kv_heads, q_len, k_len, cut;  // keys [0, cut) and [cut, k_len)
  double dropout;
  bool biased;  // a slope per head and a sink
};

Case whole_of(const PartsCase& parts, Random& random) {
  Case c;
  c.dtype = parts.dtype, c.batch = 2, c.heads = parts.heads, c.kv_heads = parts.kv_heads;
  c.q_len = parts.q_len, c.k_len = parts.k_len, c.dim = 24, c.value_dim = 40, c.scale = 0.25;
  c.offset = c.k_len - c.q_len, c.after = 0, c.dropout = parts.dropout, c.seed = random.next();
  const int64_t rows = c.batch * c.heads * c.q_len, keys = c.batch * c.kv_heads * c.k_len;
  draw_values(random, c, c.query, rows * 24, 2.0);
  draw_values(random, c, c.key, keys * 24, 2.0);
  draw_values(random, c, c.value, keys * 40, 2.0);
  draw_values(random, c, c.grad_output, rows * 40, 2.0);
  if (!parts.biased) return c;
  Case floats;
  RuleCase slope;
  slope.kind = CH_RULE_SLOPE, slope.size[1] = c.heads;
  draw_values(random, floats, slope.table, c.heads, 0.1);
  draw_values(random, floats, c.sink, c.heads, 2.0);
  draw_values(random, floats, c.grad_lse, rows, 1.0);
  c.rules = {slope};
  return c;
}

// `count` keys from `first` on, as a description; the gradient of the query goes to `grad_query`.
ch_attention part_of(const Call& call, int64_t first, int64_t count, const Guarded& grad_query) {
  ch_attention part = call.work;
  part.partial_rows = 1, part.k_len = count, part.query_offset -= first, part.first_key += first;
  const auto from = [&](const Guarded& tensor) {
    ch_tensor view = tensor.view();
    view.data = tensor.at(0, 0, first, 0);
    return view;
  };
  part.key = from(call.key), part.value = from(call.value);
  part.grad_key = from(call.grad_key), part.grad_value = from(call.grad_value), part.grad_query = grad_query.view();
  return part;
}

// The sum of two gradients; each is rounded to the dtype.
void compare_sum(const Guarded& one, const Guarded& other, const Result& right, const std::string& name) {
  const double rounding = Precision(one.dtype).out;
  size_t at = 0;
  for (int64_t b = 0; b < one.count[0]; ++b)
    for (int64_t h = 0; h < one.count[1]; ++h)
      for (int64_t i = 0; i < one.count[2]; ++i)
        for (int64_t x = 0; x < one.last; ++x, ++at) {
          const double first = one.get(b, h, i, x), second = other.get(b, h, i, x), number = right.number[at];
          const double bound = right.bound[at] + rounding * (std::fabs(first) + std::fabs(second));
          if (std::fabs(first + second - number) <= bound) continue;
          return fail(name + ": a sum of gradients is " + std::to_string(first + second) + ", not " +
                      std::to_string(number));
        }
}

void one_case(const PartsCase& parts, const std::string& name) {
  Random random(static_cast<uint64_t>(parts.cut + parts.k_len) + 43);
  const Case c = whole_of(parts, random);
  const Expected right = Reference(c).r;
  Call call(c, random);
  Guarded grad_query[2];
  for (Guarded& one : grad_query)
    one = Guarded::make(random, c.dtype, size_of(c.dtype), c.batch, c.heads, c.q_len, c.dim, random.one_in(2));
  for (int isa : usable_sets())
    for (int threads : {1, 5}) {
      const std::string line = name + ", " + ch_isa_name(isa) + ", threads " + std::to_string(threads);
      expect(call.forward(isa, threads), CH_OK, line + " forward");
      call.grad_key.clear(), call.grad_value.clear();
      for (int part : {0, 1}) {
        const int64_t first = part == 0 ? 0 : parts.cut, end = part == 0 ? parts.cut : parts.k_len;
        const ch_attention work = part_of(call, first, end - first, grad_query[part]);
        grad_query[part].clear(), call.delta.clear();
        expect(ch_backward(&work), CH_OK, line + " backward of part " + std::to_string(part));
        compare(call.delta, right.delta, line + " delta");
      }
      compare(call.grad_key, right.grad_key, line + " grad_key");
      compare(call.grad_value, right.grad_value, line + " grad_value");
      compare_sum(grad_query[0], grad_query[1], right.grad_query, line);
      call.margins({&call.grad_key, &call.grad_value, &grad_query[0], &grad_query[1], &call.delta}, line);
    }
}

}  // namespace

// Parts of less than a tile of keys, of several tiles, and of none of a row's keys.
int parts_tests() {
  int number = 0;
  for (int dtype : {CH_FLOAT32, CH_BFLOAT16, CH_FLOAT16})
    for (const PartsCase& c : {PartsCase{dtype, 2, 2, 90, 90, 33, 0, false}, PartsCase{dtype, 4, 2, 40, 90, 64, 0.5, true},
                               PartsCase{dtype, 2, 1, 7, 600, 300, 0.1, false}, PartsCase{dtype, 2, 2, 50, 300, 299, 0, true}})
      one_case(c, "parts " + std::to_string(number++));
  return number;
}

}  // namespace test
