// NaN and infinity in one place of a call: results that do not depend on that place must be unmodified.
#pragma once

#include <functional>

#include "linear_call.h"

namespace test {

enum class Place { query, key, value, rate, decay };

// Which results depend on a token of the spoiled head. Tokens are classified as before, at and after it; with `column`
// a value is spoiled in one channel only.
struct Spoiled {
  static constexpr int64_t token = 42, kv_head = 1, head = 3, column = 5;

  Place place;
  const Member& member;

  bool output(int64_t h, int64_t i, int64_t x) const {
    if (place == Place::query) return h == head && i == token;
    return i >= token && (place != Place::value || x == column);
  }
  bool last_state(int64_t x) const { return place != Place::query && (place != Place::value || x == column); }
  bool grad_query(int64_t h, int64_t i) const { return place == Place::query ? h == head && i == token : i >= token; }
  bool grad_key(int64_t i) const {
    if (place == Place::query) return i <= token;
    // Quotients, and the values that the delta rule writes, propagate it to other tokens.
    if (member.normalized || place == Place::rate || place == Place::decay) return true;
    if (!member.delta) return i == token;
    return place == Place::key || i >= token;
  }
  bool grad_value(int64_t i) const {
    if (place == Place::query) return i <= token;
    if (place == Place::value) return false;
    if (member.normalized || place == Place::decay) return true;
    return member.delta ? i <= token : i == token;
  }
  // These are sums from a chunk's end on.
  bool grad_decay(int64_t i, int64_t chunk) const {
    if (place == Place::query) return i <= token;
    if (place == Place::decay || (member.delta && place != Place::value)) return true;
    return i / chunk >= token / chunk;
  }
  bool grad_rate(int64_t i) const {
    if (place == Place::query) return i <= token;
    return place != Place::value || i >= token;
  }
  bool grad_state() const {
    if (place == Place::value) return false;
    return place == Place::query || place == Place::decay || member.normalized || member.delta;
  }
};

using Reaches = std::function<bool(int64_t h, int64_t i, int64_t x)>;

// Equal values wherever the spoiled place has no influence.
inline void compare_clean(const Guarded& clean, const Guarded& got, int64_t group, const std::string& name,
                          const Reaches& reaches) {
  for (int64_t h = 0; h < clean.count[1]; ++h)
    for (int64_t i = 0; i < clean.count[2]; ++i)
      for (int64_t x = 0; x < clean.last; ++x) {
        if (h / group == Spoiled::kv_head && reaches(h, i, x)) continue;
        const double right = clean.get(0, h, i, x), actual = got.get(0, h, i, x);
        if (actual == right) continue;
        char line[160];
        std::snprintf(line, sizeof(line), " [%lld, %lld, %lld] is %.9g, not %.9g", static_cast<long long>(h),
                      static_cast<long long>(i), static_cast<long long>(x), actual, right);
        return fail(name + line);
      }
}

inline LinearCase contained_case(const Member& member, int map) {
  LinearCase c;
  Random random(static_cast<uint64_t>(map) + 40);
  c.heads = 4, c.kv_heads = 2, c.length = 75, c.chunk = 32, c.features = 20, c.value_dim = 24;
  c.map = map, c.normalized = member.normalized, c.scale = 0.25;
  draw_floats(random, c.query, c.heads * c.length * c.features, 1.0);
  draw_floats(random, c.key, c.units() * c.length * c.features, 1.0);
  draw_floats(random, c.value, c.units() * c.length * c.value_dim, 1.0);
  draw_floats(random, c.grad_output, c.heads * c.length * c.value_dim, 1.0);
  draw_floats(random, c.grad_last_state, c.units() * c.features * c.value_dim, 1.0);
  c.gates = member.decayed ? member.by_channel ? c.features : 1 : 0;
  draw_floats(random, c.log_decay, c.units() * c.length * c.gates, 0.5);
  for (double& one : c.log_decay) one = -std::fabs(one);
  if (member.delta) c.rate.assign(static_cast<size_t>(c.units() * c.length), 0.03125);
  return c;
}

inline void spoil(LinearCase& c, Place place, double bad) {
  const int64_t token = Spoiled::kv_head * c.length + Spoiled::token;
  const auto row = [&](Values& of, int64_t at, int64_t last) {
    for (int64_t x = 0; x < last; ++x) of[static_cast<size_t>(at * last + x)] = bad;
  };
  if (place == Place::query) row(c.query, Spoiled::head * c.length + Spoiled::token, c.features);
  if (place == Place::key) row(c.key, token, c.features);
  if (place == Place::value) c.value[static_cast<size_t>(token * c.value_dim + Spoiled::column)] = bad;
  if (place == Place::rate) row(c.rate, token, 1);
  if (place == Place::decay) row(c.log_decay, token, c.gates);
}

inline void run_both(LinearCall& call, int isa, int threads, const std::string& name) {
  expect(call.forward(isa, threads), CH_OK, name + " forward");
  expect(call.backward(isa, threads), CH_OK, name + " backward");
}

inline void one_place(const LinearCase& clean, const Spoiled& by, double bad, int isa, int threads,
                      const std::string& name) {
  LinearCase c = clean;
  spoil(c, by.place, bad);
  Random first(9), second(9);
  LinearCall right(clean, first), got(c, second);
  run_both(right, isa, threads, name);
  run_both(got, isa, threads, name);
  const int64_t group = c.group();
  const auto same = [&](Guarded LinearCall::*field, int64_t group_of, const char* what, const Reaches& reaches) {
    compare_clean(right.*field, got.*field, group_of, name + ", " + what, reaches);
  };
  using I = int64_t;
  same(&LinearCall::output, group, "output", [&](I h, I i, I x) { return by.output(h, i, x); });
  same(&LinearCall::last_state, 1, "last_state", [&](I, I, I x) { return by.last_state(x); });
  same(&LinearCall::grad_query, group, "grad_query", [&](I h, I i, I) { return by.grad_query(h, i); });
  same(&LinearCall::grad_key, 1, "grad_key", [&](I, I i, I) { return by.grad_key(i); });
  same(&LinearCall::grad_value, 1, "grad_value", [&](I, I i, I) { return by.grad_value(i); });
  same(&LinearCall::grad_state, 1, "grad_state", [&](I, I, I) { return by.grad_state(); });
  if (c.gates > 0)
    same(&LinearCall::grad_decay, 1, "grad_decay", [&](I, I i, I) { return by.grad_decay(i, c.chunk); });
  if (c.delta()) same(&LinearCall::grad_rate, 1, "grad_rate", [&](I, I i, I) { return by.grad_rate(i); });
}

inline void linear_containment() {
  static const char* names[] = {"query", "key", "value", "rate", "decay"};
  for (const Member& member : members())
    for (int map : {CH_FEATURE_IDENTITY, CH_FEATURE_ELU})
      for (Place place : {Place::query, Place::key, Place::value, Place::rate, Place::decay}) {
        if ((place == Place::rate && !member.delta) || (place == Place::decay && !member.decayed)) continue;
        const LinearCase clean = contained_case(member, map);
        for (double bad : {static_cast<double>(NAN), static_cast<double>(INFINITY)}) {
          // A decay is at most 0.
          if (place == Place::decay && bad > 0) continue;
          for (int isa : usable_sets())
            for (int threads : {1, 5}) {
              const std::string name = std::string(member.name) + ", map " + std::to_string(map) + ", " +
                                       std::to_string(bad) + " in a " + names[static_cast<int>(place)] + ", " +
                                       ch_isa_name(isa) + ", threads " + std::to_string(threads);
              one_place(clean, {place, member}, bad, isa, threads, name);
            }
        }
      }
}

}  // namespace test
