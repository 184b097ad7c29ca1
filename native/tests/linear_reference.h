// The linear attention family and its gradients in double, one token after the other; and error bounds for float32.
//
// The bounds are measured (Monte Carlo arithmetic; Parker 1997, "Monte Carlo arithmetic: exploiting randomness in
// floating-point arithmetic", section 3): the same recurrence runs again with every product and sum perturbed by one
// rounding of float32, up or down at random. Where the kernels compute differently, the perturbations follow: a decay
// is perturbed by a rounding of its chunk's running sum, which it is computed from, and the effects of a chunk's tokens
// on each other by a rounding of each term of the chunk's GEMMs. The change of the results near an element estimates
// the effect of rounding on that element, to within a small factor. No bound was fitted to a result.
#pragma once

#include "linear_case.h"

namespace test {

struct LinearResults {
  Values output, shares, last_state, last_normalizer;
  Values grad_query, grad_key, grad_value, grad_decay, grad_rate, grad_state, grad_normalizer;
  // The kernels sum gradients of decays from these: [batch, kv_heads, length, features], of a chunk's running sums of
  // log decays; and [batch, kv_heads, chunks, features], of its last one.
  Values perturbed, perturbed_last;
};

// The recurrence of one call, every operation perturbed by `unit` of its result.
class Recurrence {
 public:
  Recurrence(const LinearCase& of, double unit, uint64_t seed) : c(of), u(unit), seed(seed), random(seed) {
    F = c.features, D = c.value_dim, T = c.length;
    const size_t heads = static_cast<size_t>(c.batch * c.heads * T), keys = static_cast<size_t>(c.units() * T);
    const size_t rows = static_cast<size_t>(c.units() * F), f = static_cast<size_t>(F), d = static_cast<size_t>(D);
    r.output.resize(heads * d), r.shares.resize(heads), r.last_state.resize(rows * d), r.last_normalizer.resize(rows);
    r.grad_query.resize(heads * f), r.grad_key.resize(keys * f), r.grad_value.resize(keys * d);
    r.grad_decay.resize(keys * static_cast<size_t>(c.gates)), r.grad_rate.resize(keys);
    r.grad_state.resize(rows * d), r.grad_normalizer.resize(rows);
    r.perturbed.resize(keys * f), r.perturbed_last.resize(static_cast<size_t>(c.units() * c.chunks()) * f);
    const size_t tokens = static_cast<size_t>(T), group = static_cast<size_t>(c.group());
    states.resize((tokens + 1) * f * d), faded.resize(tokens * f * d), sums.resize((tokens + 1) * f);
    decay_factors.resize(tokens * f), k.resize(tokens * f), q.resize(group * tokens * f);
    written.resize(tokens * d), missing.resize(tokens * d), ups.resize(group * tokens * d);
    for (int64_t unit_at = 0; unit_at < c.units(); ++unit_at) {
      start(unit_at);
      for (int64_t t = 0; t < T; ++t) step(t);
      finish();
      for (int64_t t = T; t-- > 0;) back(t);
      for (int64_t i = 0; i < F * D; ++i) r.grad_state[static_cast<size_t>(unit_at * F * D + i)] = ds[i];
      for (int64_t i = 0; i < F; ++i) r.grad_normalizer[static_cast<size_t>(unit_at * F + i)] = dz[i];
    }
  }

  LinearResults r;

 private:
  double perturbed(double x, double by) {
    if (u == 0) return x;
    random = random * 6364136223846793005u + 1442695040888963407u;
    return random >> 63 ? x + by : x - by;
  }
  double rounded(double x) { return perturbed(x, x * u); }
  // One pass perturbs all decays in the same direction: a few random ones could cancel, and with them all their
  // effects.
  bool same_direction() const { return seed == 1; }
  // sum += a b
  void add(double& sum, double a, double b) { sum = rounded(sum + rounded(a * b)); }

  int64_t head_of(int64_t g) const { return unit / c.kv_heads * c.heads + unit % c.kv_heads * c.group() + g; }

  void start(int64_t unit_at) {
    unit = unit_at;
    for (int64_t i = 0; i < F * D; ++i) states[i] = c.state.empty() ? 0 : c.state[unit * F * D + i];
    for (int64_t i = 0; i < F; ++i) sums[i] = c.normalizer.empty() ? 0 : c.normalizer[unit * F + i];
    for (int64_t i = 0; i < T * F; ++i) k[i] = rounded(rounded(feature(c.map, c.key[unit * T * F + i])));
    for (int64_t g = 0; g < c.group(); ++g)
      for (int64_t i = 0; i < T * F; ++i) {
        const double x = rounded(rounded(feature(c.map, c.query[head_of(g) * T * F + i])));
        q[g * T * F + i] = rounded(x * static_cast<float>(c.scale));
      }
    for (int64_t f = 0; f < F; ++f) {
      for (int64_t t = 0; t < T; ++t) {
        const double here = c.gates == 0 ? 0 : c.log_decay[(unit * T + t) * c.gates + (c.gates > 1 ? f : 0)];
        decay_factors[t * F + f] = c.gates == 0 ? 1 : rounded(std::exp(same_direction() ? here + here * u : rounded(here)));
      }
    }
  }

  bool ends_chunk(int64_t t) const { return t == T - 1 || (t + 1) % c.chunk == 0; }

  // Perturbs the state after a chunk by each term that the chunk adds.
  void perturb_state(int64_t t, double* state) {
    earlier(t, t, [&](int64_t j, const double* fade) {
      for (int64_t f = 0; f < F; ++f)
        for (int64_t d = 0; d < D; ++d)
          state[f * D + d] = perturbed(state[f * D + d], k[j * F + f] * fade[f] * written[j * D + d] * u);
    });
  }

  // The same for the gradient of the state before a chunk.
  void perturb_state_back(int64_t first) {
    Values fade(static_cast<size_t>(F), 1.0);
    for (int64_t i = first; i < T && (i == first || i % c.chunk != 0) && u > 0; ++i) {
      for (int64_t f = 0; f < F; ++f) fade[f] *= decay_factors[i * F + f];
      for (int64_t g = 0; g < c.group() + c.delta(); ++g) {
        const double* row = g < c.group() ? &q[(g * T + i) * F] : &k[i * F];
        const double* gradient = g < c.group() ? &ups[(g * T + i) * D] : &r.grad_value[(unit * T + i) * D];
        for (int64_t f = 0; f < F; ++f)
          for (int64_t d = 0; d < D; ++d) ds[f * D + d] = perturbed(ds[f * D + d], row[f] * fade[f] * gradient[d] * u);
      }
    }
  }

  // Calls `use(j, fade)` for the tokens up to `last` of a token's chunk with their decay until then.
  template <class Use> void earlier(int64_t t, int64_t last, const Use& use) {
    if (u == 0) return;
    const int64_t first = t / c.chunk * c.chunk;
    Values fades(static_cast<size_t>((t - first + 1) * F), 1.0);
    for (int64_t i = (t - first) * F; i-- > 0;) fades[i] = fades[i + F] * decay_factors[first * F + i + F];
    for (int64_t j = first; j <= last; ++j) use(j, &fades[(j - first) * F]);
  }

  // Perturbs `x` by a rounding of one more term of a sum, and by one of the sum.
  void perturb_term(double& x, double& sum, double term) {
    sum += term;
    x = perturbed(perturbed(x, term * u), sum * u);
  }

  // Perturbs what a row reads of the chunk's tokens.
  void perturb_read(int64_t t, int64_t last, const double* row, Values& result) {
    Values sum(static_cast<size_t>(D), 0.0);
    earlier(t, last, [&](int64_t j, const double* fade) {
      double p = 0;
      for (int64_t f = 0; f < F; ++f) p += row[f] * fade[f] * k[j * F + f];
      for (int64_t d = 0; d < D; ++d) perturb_term(result[d], sum[d], p * written[j * D + d]);
    });
  }

  // Perturbs gradients of a row and of the tokens it reads, from the gradient of the row's result.
  void perturb_back(int64_t t, int64_t last, const double* row, const double* result, Values& d_row) {
    Values sum(static_cast<size_t>(F), 0.0);
    earlier(t, last, [&](int64_t j, const double* fade) {
      double p = 0, e = 0;
      for (int64_t f = 0; f < F; ++f) p += row[f] * fade[f] * k[j * F + f];
      for (int64_t d = 0; d < D; ++d) {
        e += result[d] * written[j * D + d];
        perturb_term(late_value[j * D + d], value_sums[j * D + d], p * result[d]);
      }
      for (int64_t f = 0; f < F; ++f) {
        perturb_term(late_key[j * F + f], key_sums[j * F + f], e * row[f] * fade[f]);
        perturb_term(d_row[f], sum[f], e * k[j * F + f] * fade[f]);
      }
    });
  }

  void step(int64_t t) {
    const double *from = &states[t * F * D], *key = &k[t * F], *value = &c.value[(unit * T + t) * D];
    double *decayed = &faded[t * F * D], *to = &states[(t + 1) * F * D], *write = &written[t * D];
    Values result(static_cast<size_t>(D), 0.0);
    for (int64_t f = 0; f < F; ++f)
      for (int64_t d = 0; d < D; ++d) decayed[f * D + d] = rounded(from[f * D + d] * decay_factors[t * F + f]);
    for (int64_t d = 0; d < D && c.delta(); ++d)
      for (int64_t f = 0; f < F; ++f) add(result[d], key[f], decayed[f * D + d]);
    if (c.delta()) perturb_read(t, t - 1, key, result);
    for (int64_t d = 0; d < D; ++d) {
      missing[t * D + d] = rounded(value[d] - result[d]);
      write[d] = c.delta() ? rounded(missing[t * D + d] * c.rate[unit * T + t]) : value[d];
    }
    for (int64_t f = 0; f < F; ++f) {
      sums[(t + 1) * F + f] = rounded(sums[t * F + f] + key[f]);
      for (int64_t d = 0; d < D; ++d) to[f * D + d] = rounded(decayed[f * D + d] + rounded(key[f] * write[d]));
    }
    for (int64_t g = 0; g < c.group(); ++g) read(t, g, to);
    if (ends_chunk(t)) perturb_state(t, to);
  }

  void read(int64_t t, int64_t g, const double* state) {
    const double* query = &q[(g * T + t) * F];
    double below = 0, inverse = 1;
    for (int64_t f = 0; f < F; ++f) add(below, query[f], sums[(t + 1) * F + f]);
    // A row without weight gives 0.
    if (c.normalized) inverse = r.shares[head_of(g) * T + t] = std::fabs(below) < 1e-37 ? 0 : rounded(1 / below);
    Values result(static_cast<size_t>(D), 0.0);
    for (int64_t d = 0; d < D; ++d)
      for (int64_t f = 0; f < F; ++f) add(result[d], query[f], state[f * D + d]);
    perturb_read(t, t, query, result);
    for (int64_t d = 0; d < D; ++d) r.output[(head_of(g) * T + t) * D + d] = rounded(result[d] * inverse);
  }

  void finish() {
    for (int64_t i = 0; i < F * D; ++i) r.last_state[unit * F * D + i] = states[T * F * D + i];
    for (int64_t i = 0; i < F; ++i) r.last_normalizer[unit * F + i] = sums[T * F + i];
    key_sums.assign(static_cast<size_t>(T * F), 0.0), value_sums.assign(static_cast<size_t>(T * D), 0.0);
    late_key.assign(static_cast<size_t>(T * F), 0.0), late_value.assign(static_cast<size_t>(T * D), 0.0);
    ds.assign(static_cast<size_t>(F * D), 0.0), dz.assign(static_cast<size_t>(F), 0.0);
    for (int64_t i = 0; i < F * D && !c.grad_last_state.empty(); ++i) ds[i] = c.grad_last_state[unit * F * D + i];
    for (int64_t i = 0; i < F && !c.grad_last_normalizer.empty(); ++i) dz[i] = c.grad_last_normalizer[unit * F + i];
  }

  // From the gradient of the state after a token to that of the state before it.
  void back(int64_t t) {
    const double *decayed = &faded[t * F * D], *key = &k[t * F], *write = &written[t * D];
    const int64_t token = unit * T + t;
    if (ends_chunk(t)) {
      for (int64_t f = 0; f < F; ++f)
        for (int64_t d = 0; d < D; ++d)
          add(r.perturbed_last[(unit * c.chunks() + t / c.chunk) * F + f], states[((t + 1) * F + f) * D + d], ds[f * D + d]);
    }
    for (int64_t g = 0; g < c.group(); ++g) read_back(t, g);
    Values missing_grad(static_cast<size_t>(D), 0.0);  // gradient of what is written, then of the residual
    for (int64_t d = 0; d < D; ++d) {
      for (int64_t f = 0; f < F; ++f) add(missing_grad[d], key[f], ds[f * D + d]);
      missing_grad[d] += late_value[t * D + d];
      if (!c.delta()) continue;
      add(r.grad_rate[token], missing_grad[d], missing[t * D + d]);
      missing_grad[d] = rounded(missing_grad[d] * c.rate[token]);
    }
    Values result(static_cast<size_t>(F), 0.0);
    if (c.delta()) perturb_back(t, t - 1, key, missing_grad.data(), result);
    for (int64_t d = 0; d < D; ++d) r.grad_value[token * D + d] = missing_grad[d];
    for (int64_t f = 0; f < F; ++f) {
      double wrote = late_key[t * F + f], read_grad = result[f], decay = 0;
      for (int64_t d = 0; d < D; ++d) add(wrote, ds[f * D + d], write[d]);
      for (int64_t d = 0; d < D && c.delta(); ++d) {
        add(read_grad, -decayed[f * D + d], missing_grad[d]);
        ds[f * D + d] = rounded(ds[f * D + d] - rounded(key[f] * missing_grad[d]));
      }
      r.perturbed[token * F + f] += key[f] * (read_grad - wrote);
      r.grad_key[token * F + f] = rounded(wrote + read_grad + dz[f]) * slope(c.map, c.key[token * F + f]);
      for (int64_t d = 0; d < D; ++d) {
        add(decay, ds[f * D + d], decayed[f * D + d]);
        ds[f * D + d] = rounded(ds[f * D + d] * decay_factors[t * F + f]);
      }
      if (c.gates > 0) r.grad_decay[token * c.gates + (c.gates > 1 ? f : 0)] += decay;
    }
    if (t % c.chunk == 0) perturb_state_back(t);
  }

  void read_back(int64_t t, int64_t g) {
    const double *state = &states[(t + 1) * F * D], *query = &q[(g * T + t) * F];
    const int64_t row = head_of(g) * T + t;
    const double *grad = &c.grad_output[row * D], *output = &r.output[row * D];
    const double inverse = c.normalized ? r.shares[row] : 1;
    double* up = &ups[(g * T + t) * D];
    double lower = 0;
    for (int64_t d = 0; d < D; ++d) {
      up[d] = rounded(grad[d] * inverse);
      if (c.normalized) add(lower, -up[d], output[d]);
    }
    Values result(static_cast<size_t>(F), 0.0);
    for (int64_t f = 0; f < F; ++f) {
      result[f] = lower * sums[(t + 1) * F + f];
      for (int64_t d = 0; d < D; ++d) {
        add(result[f], state[f * D + d], up[d]);
        add(ds[f * D + d], query[f], up[d]);
      }
      add(dz[f], query[f], lower);
    }
    perturb_back(t, t, query, up, result);
    for (int64_t f = 0; f < F; ++f) {
      r.perturbed[(unit * T + t) * F + f] += query[f] * result[f];
      r.grad_query[row * F + f] = rounded(result[f] * static_cast<float>(c.scale)) * slope(c.map, c.query[row * F + f]);
    }
  }

  const LinearCase& c;
  const double u;
  const uint64_t seed;
  uint64_t random;
  int64_t F, D, T, unit = 0;
  // Of one key head: states before and after each token, the value read from the state, decays, features, what is
  // written.
  Values states, faded, sums, decay_factors, k, q, written, missing, ds, dz;
  // Gradients of numerators; perturbations of gradients by later tokens, and the sums so far.
  Values ups, late_key, late_value, key_sums, value_sums;
};

struct LinearExpected {
  Result output, shares, last_state, last_normalizer;
  Result grad_query, grad_key, grad_value, grad_decay, grad_rate, grad_state, grad_normalizer;
};

LinearExpected expected(const LinearCase& c);

}  // namespace test
