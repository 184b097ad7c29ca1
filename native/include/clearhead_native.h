/* The plain C interface of the CPU kernels: one description and two calls, for attention and for its linear family,
 * and calls for what stands beside it in a layer: products, rotary positions, dropout, norms.
 *
 * Nothing here knows torch. Whoever calls fills a `ch_attention`, with `size` set to `sizeof(ch_attention)` and
 * every field that is not used set to zero, and gets 0 back, or a code that `ch_message` puts into words. Sizes,
 * strides and pointers are checked against each other before any of them is followed.
 *
 * Strides count elements, not bytes. The last axis of query, key, value, output and their gradients is
 * contiguous; every other stride is free, also 0 for what is only read.
 */
#ifndef CLEARHEAD_NATIVE_H
#define CLEARHEAD_NATIVE_H

#include <stdint.h>

#if defined(_WIN32)
#define CH_EXPORT __declspec(dllexport)
#else
#define CH_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a description, the meaning of a field or the arguments of a call change. */
#define CH_ABI 20
#define CH_MAX_HEAD_DIM 256
#define CH_MAX_RUNS 4
#define CH_MAX_RULES 8
/* Backward works through so many keys at a time. */
#define CH_TILE 256

enum ch_dtype { CH_FLOAT32 = 0, CH_BFLOAT16 = 1, CH_FLOAT16 = 2 };

enum ch_rule_kind {
  CH_RULE_SLOPE = 1,    /* score -= data[head] * |q_pos - k_pos|                                   (Alibi) */
  CH_RULE_RELATIVE = 2, /* score += data[head, clip(q_pos - k_pos, -reach, reach) + reach]  (RelativeBias) */
  CH_RULE_DENSE = 3,    /* score += data[batch, head, query, key]                              (DenseBias) */
  CH_RULE_SOFTCAP = 4,  /* score = value * tanh(score / value)                                   (SoftCap) */
};

enum ch_code {
  CH_OK = 0,
  CH_BAD_SIZE = 1,      /* `size` or `abi` is not this library's                                            */
  CH_BAD_SHAPE = 2,     /* a count is negative, too large, or does not divide                               */
  CH_BAD_DTYPE = 3,     /* no such dtype                                                                    */
  CH_BAD_POINTER = 4,   /* a tensor that is needed is null                                                  */
  CH_BAD_STRIDE = 5,    /* a stride is negative, or rows that are written overlap                           */
  CH_BAD_MASK = 6,      /* runs, intervals, table or block size do not fit                                  */
  CH_BAD_RULE = 7,      /* no such rule, or its numbers do not fit                                          */
  CH_BAD_OPTION = 8,    /* scale, dropout or threads out of range                                           */
  CH_BAD_ISA = 9,       /* the processor lacks the instruction set asked for                                */
  CH_NO_MEMORY = 10,    /* scratch memory could not be had; what was written is of no use                   */
  CH_NOT_FINITE = 11,   /* backward: NaN or inf in what it reads, under a mask; gradients not written       */
  CH_BAD_STATISTIC = 12, /* a statistic's size or count does not fit                                        */
};

/* A tensor [batch, heads, rows, last axis contiguous]; strides in elements. */
typedef struct ch_tensor {
  void* data;
  int64_t batch, head, row;
} ch_tensor;

/* A table [batch, heads, rows, columns] of which any stride may be 0. */
typedef struct ch_table {
  const void* data;
  int64_t batch, head, row, column;
} ch_table;

typedef struct ch_rule {
  int32_t kind;
  int32_t reserved;
  float value;          /* CH_RULE_SOFTCAP: the cap                                                         */
  int32_t reach;        /* CH_RULE_RELATIVE: R                                                              */
  ch_table table;       /* float32. SLOPE: [heads]; RELATIVE: [heads, 2R+1]; DENSE: [batch, heads, q, k],
                           column stride 0 or 1                                                             */
  /* float32, written by backward when not null; zeroed by the caller. RELATIVE: [heads, 2R+1] with the
     strides `grad_head` and 1, summed over what the table shares; DENSE: laid out by the grad_* strides. */
  float* grad;
  int64_t grad_batch, grad_head, grad_row;
} ch_rule;

/* What forward gathers besides the output, of the weights before dropout, and gradients that backward takes of it.
 * A null pointer asks for nothing. float32 and contiguous, unless it says otherwise; scores are natural ones. */
typedef struct ch_statistics {
  float* max_score;        /* [batch, heads, q_len]; -inf where a row has no key                            */
  /* [batch, heads, q_len, 2]: the largest score as backward will compute it, before the scale where there is no
     rule, and how many keys have it; written for backward, which reads it with `grad_max`.                 */
  float* ties;
  float* entropy;          /* [batch, heads, q_len], in nats                                                */
  float* distance;         /* [batch, heads, q_len]: mean |q_pos - k_pos|                                   */
  float* sink;             /* [batch, heads, q_len]: mass on the first `sink_keys` keys                     */
  int64_t sink_keys;
  float* top_weights;      /* [batch, heads, q_len, top_k], largest first, the lower key first among equals */
  int64_t* top_indices;    /* the same shape; keys without weight fill up in order                          */
  int64_t top_k;
  float* received;         /* [batch, heads, k_len]: sums over queries                                      */
  float* weighted;         /* [batch, heads, num_weights, k_len]: sums over queries times `row_weights`     */
  const float* row_weights; /* [batch, heads, num_weights, q_len] with the two strides below, then contiguous */
  int64_t num_weights, weight_batch, weight_head;
  float* heatmap_max;      /* [batch, heads, q_len / heatmap, k_len / heatmap], rounded up: largest weight  */
  float* heatmap_mean;     /* the same shape: mean weight over the places that a tile has                   */
  int64_t heatmap;
  float* rows;             /* [batch, heads, num_rows, k_len]: weights of single queries                    */
  const int32_t* row_slots; /* [q_len]: which of `rows` a query's weights go to, -1 for none                */
  int64_t num_rows;

  const float* grad_max;      /* [batch, heads, q_len], shared evenly by the keys that have the largest score */
  const float* grad_entropy;  /* [batch, heads, q_len]                                                      */
  const float* grad_distance; /* [batch, heads, q_len]                                                      */
  const float* grad_sink;     /* [batch, heads, q_len]                                                      */
  const float* grad_received; /* [batch, heads, k_len]                                                      */
} ch_statistics;

typedef struct ch_attention {
  uint32_t size;        /* sizeof(ch_attention)                                                             */
  uint32_t abi;         /* CH_ABI                                                                           */
  int32_t isa;          /* index of an instruction set, or -1: the best that the processor has              */
  int32_t threads;      /* at least 1                                                                       */
  int32_t dtype;        /* ch_dtype of query, key, value, output and their gradients                        */
  int32_t num_rules;
  int64_t batch, heads, kv_heads, q_len, k_len, head_dim, value_dim;
  int64_t query_offset; /* absolute position of the first query                                             */
  double scale;
  double dropout;       /* probability; 0 switches it off; taken to the nearest 1 / CH_LEVELS                */
  uint64_t seed;

  ch_tensor query, key, value, output;
  float* output32;      /* [batch, heads, q_len, value_dim] contiguous, or null: the output unrounded       */
  float* lse;           /* [batch, heads, q_len] contiguous, or null: natural logarithm                     */
  float* softmax;       /* [batch, heads, q_len, 2] contiguous, or null: a row's largest score and the
                           reciprocal of its sum, from which backward has the very weights of forward       */

  /* The mask is the conjunction of what is given. */
  int64_t before, after; /* keys from q_pos - before to q_pos + after; INT64_MAX for no bound               */
  const int32_t* start;  /* runs [start, stop) of keys, ascending and disjoint: [batch, heads, q_len, runs] */
  const int32_t* stop;   /* with the strides below and 1; null for none                                     */
  int64_t run_batch, run_head, run_row;
  int32_t runs;
  int32_t block_size;    /* > 0: `blocks` is [batch, heads, q_pos / block_size, k_pos / block_size]         */
  ch_table allowed;      /* bytes 0 or 1, one per query and key; null for none                              */
  ch_table blocks;       /* bytes 0 or 1; null for none                                                     */
  int64_t block_rows, block_columns;

  ch_rule rules[CH_MAX_RULES]; /* applied in order; one soft-cap at most                                    */
  const float* sink;     /* a logit per head, stride sink_head; null for none                               */
  int64_t sink_head;

  /* Backward only. It reads softmax as forward wrote it, and output32 (or output, where that is float32) likewise:
     null for both where there are at most CH_TILE keys, no tables and no statistics, and a row's delta is found where
     its weights are.                                                                                        */
  ch_tensor grad_output; /* dtype of the tensors                                                            */
  const float* grad_lse; /* [batch, heads, q_len] contiguous, or null                                       */
  ch_tensor grad_query, grad_key, grad_value;
  float* delta;          /* [batch, heads, q_len] contiguous, written: sum(grad_output * output) - grad_lse */

  /* Null for none. Gradients of statistics also change a row's delta, by the sum over keys of weight times what each
     adds to the weight's gradient: the caller takes that sum off `grad_lse`.                                */
  const ch_statistics* statistics;
} ch_attention;

enum ch_feature_map {
  CH_FEATURE_IDENTITY = 0,
  CH_FEATURE_ELU = 1,  /* elu(x) + 1 */
  CH_FEATURE_RELU = 2,
};

/* Features and value channels of states that lie between calls are padded to a multiple of this. */
#define CH_LINEAR_PAD 16
#define CH_MAX_CHUNK 256

/* Causal linear attention in chunks: S = e^log_decay S + phi(k)^T v, output = scale phi(q) S, where a `normalizer`
 * divides by scale phi(q) z, and where a `rate` writes rate (v - phi(k) S) in place of v.
 * All float32; contiguous, unless it says otherwise. */
typedef struct ch_linear {
  uint32_t size;        /* sizeof(ch_linear)                                                                */
  uint32_t abi;         /* CH_ABI                                                                           */
  int32_t isa;          /* as in ch_attention                                                               */
  int32_t threads;
  int32_t feature_map;  /* ch_feature_map                                                                   */
  int32_t reserved;
  int64_t batch, heads, kv_heads, length, features, value_dim;
  int64_t chunk;        /* tokens, 1 to CH_MAX_CHUNK                                                        */
  int64_t gates;        /* of log_decay: 1, or `features`; 0 without                                        */
  double scale;

  ch_tensor query, key, value, output;
  const float* log_decay;  /* [batch, kv_heads, length, gates], at most 0; null for none                    */
  const float* rate;       /* [batch, kv_heads, length]; null for none                                      */
  const float* state;      /* [batch, kv_heads, features, value_dim]; null for zeros                        */
  const float* normalizer; /* [batch, kv_heads, features]; null for zeros                                   */
  float* last_state;       /* as state, written                                                             */
  float* last_normalizer;  /* as normalizer, written; null: outputs are not divided                         */
  float* shares;           /* [batch, heads, length], written: one over a row's sum; null without           */
  /* The state before each chunk, [batch, kv_heads, chunks, features, value_dim padded], and the sum of features,
     [batch, kv_heads, chunks, features padded]: written by forward, where not null, and read by backward.  */
  float* states;
  float* sums;

  /* Backward only; it reads output and shares as well.                                                     */
  ch_tensor grad_output;
  const float* grad_last_state;      /* null for zeros                                                      */
  const float* grad_last_normalizer; /* null for zeros                                                      */
  ch_tensor grad_query, grad_key, grad_value;
  float* grad_state;       /* as state, written                                                             */
  float* grad_normalizer;  /* as normalizer, written; null where outputs were not divided                   */
  float* grad_decay;       /* as log_decay, written                                                         */
  float* grad_rate;        /* as rate, written                                                              */
  float* later;            /* room, as states and sums; without it chunks of one head stay with one thread  */
  float* later_sums;
} ch_linear;

#define CH_MAX_TERMS 4
#define CH_LEVELS 65536   /* dropout drops a whole number of so many */

/* One product of a sum: [rows, steps] times [steps, columns]. Strides count elements from row to row as it lies. */
typedef struct ch_term {
  const void* left;
  const void* right;
  int64_t left_row, right_row;
  int64_t steps;
} ch_term;

/* The last one is x / (1 + exp(-1.702 x)).                                                                 */
enum ch_activation { CH_PLAIN = 0, CH_RELU = 1, CH_GELU = 2, CH_GELU_TANH = 3, CH_SILU = 4, CH_QUICK_GELU = 5 };

enum ch_gate { CH_GATE_OUTPUT = 0, CH_GATE_SLOPE = 1 };

/* The products of a linear layer, forward and backward: output = sum over terms of left right, + bias.
 * What is `turned` lies transposed in memory: left as [steps, rows], right as [columns, steps]. */
typedef struct ch_projection {
  uint32_t size;        /* sizeof(ch_projection)                                                            */
  uint32_t abi;         /* CH_ABI                                                                           */
  int32_t isa;          /* as in ch_attention                                                               */
  int32_t threads;
  int32_t dtype;        /* ch_dtype of everything here; sums are kept in float32 and rounded once           */
  int32_t num_terms;    /* 1 to CH_MAX_TERMS                                                                */
  int32_t left_turned;  /* 0 or 1                                                                           */
  int32_t right_turned; /* 0 or 1                                                                           */
  int32_t activation;   /* ch_activation of the sums with their bias                                        */
  int32_t dropped;      /* of CH_LEVELS numbers of the output how many become 0, at random; the others are divided by
                           what is kept on average. 0 to CH_LEVELS - 1                                                  */
  uint64_t seed;        /* of dropout                                                                       */
  int64_t rows, columns;
  ch_term terms[CH_MAX_TERMS];
  const void* bias;     /* [columns] contiguous; null for none                                              */
  void* output;         /* [rows, columns], written                                                         */
  int64_t output_row;
  void* slope;          /* [rows, columns], written: how much the output grows with the sum, or the sum times
                           `slope_gate`; null for none                                                      */
  int64_t slope_row;
  const void* gate;     /* [rows, columns], what forward left for the way back; null for none. CH_GATE_OUTPUT: the output
                           of a relu; the sum is 0 where it is not above 0, and what it is where it is NaN; `dropped`
                           says what dropped it, so that no seed is asked. CH_GATE_SLOPE: slopes, by which sums are
                           multiplied. Neither goes with an activation, slopes not with `dropped`           */
  int64_t gate_row;
  int32_t gate_kind;    /* ch_gate                                                                          */
  int32_t reserved;
  const void* slope_gate; /* [rows, columns], by which sums are multiplied for `slope`, where that is written beside a
                           CH_GATE_SLOPE; null for none                                                     */
  int64_t slope_gate_row;
  void* row_sums;       /* [rows] contiguous, written: sums of left along its steps; null for none. Only where left
                           is turned: the gradient of a bias, beside that of its weight                     */
} ch_projection;

/* Dropout of activations: output = (what is kept of input) * CH_LEVELS / (CH_LEVELS - dropped) + added, all contiguous.
 * What is kept depends on the seed, the row and the column alone, as in a product with such an output. */
typedef struct ch_dropout {
  uint32_t size;        /* sizeof(ch_dropout)                                                               */
  uint32_t abi;         /* CH_ABI                                                                           */
  int32_t isa;          /* as in ch_attention                                                               */
  int32_t threads;
  int32_t dtype;        /* ch_dtype of everything here; worked out in float32 and rounded once              */
  int32_t dropped;      /* as in ch_projection                                                              */
  uint64_t seed;
  int64_t rows, columns;
  const void* input;
  const void* added;    /* null for none                                                                    */
  void* output;         /* written; nothing that is read may lie in it                                      */
} ch_dropout;

/* target[:, :, first + r] = source[:, :, r]: keys or values of new tokens, put behind those that a cache holds. */
typedef struct ch_append {
  uint32_t size;        /* sizeof(ch_append)                                                                */
  uint32_t abi;         /* CH_ABI                                                                           */
  int32_t isa;          /* as in ch_attention                                                               */
  int32_t threads;
  int32_t dtype;        /* ch_dtype of both                                                                 */
  int32_t reserved;
  int64_t batch, heads, rows, columns; /* of the source                                                     */
  int64_t first;        /* rows of the target in front of those that are written                            */
  ch_tensor source;
  ch_tensor target;     /* written; the source may not lie in it                                            */
} ch_append;

/* Rotary positions: channels c and c + columns / 2 of a row are a point of the plane, turned by the angle that its
 * position has:
 *   target[b, h, r, c] = x cos - y sin, target[b, h, r, c + columns / 2] = y cos + x sin,
 * with x and y from the same places of the source, worked out in float32 and rounded once. */
typedef struct ch_rotation {
  uint32_t size;        /* sizeof(ch_rotation)                                                              */
  uint32_t abi;         /* CH_ABI                                                                           */
  int32_t isa;          /* as in ch_attention                                                               */
  int32_t threads;
  int32_t dtype;        /* ch_dtype of source and target                                                    */
  int32_t back;         /* 1: by the angle's opposite, which is the way back of a gradient; else 0          */
  int64_t batch, heads, rows, columns; /* of both; columns are even                                         */
  int64_t first;        /* position of row 0                                                                */
  int64_t positions;    /* that the table has: at least first + rows                                        */
  const float* table;   /* [positions, columns], contiguous: of each columns / 2 cosines, then as many sines */
  ch_tensor source;
  ch_tensor target;     /* written; it may be the source itself, or lies apart from it                      */
} ch_rotation;

enum ch_norm_kind { CH_NORM_LAYER = 0, CH_NORM_RMS = 1, CH_NORM_RMS_FROM_ONE = 2 };

/* The norm of a sum, row by row, all contiguous, worked out in float32:
 *   sum = (what is kept of input) * CH_LEVELS / (CH_LEVELS - dropped) + added, rounded to its dtype,
 *   output = (sum - mean) * scale * weight + bias, with scale = 1 / sqrt(variance + epsilon).
 * CH_NORM_RMS takes 0 for the mean, and so does CH_NORM_RMS_FROM_ONE, whose factor is 1 + weight. What is kept is kept as
 * by ch_drop. */
typedef struct ch_norm {
  uint32_t size;        /* sizeof(ch_norm)                                                                  */
  uint32_t abi;         /* CH_ABI                                                                           */
  int32_t isa;          /* as in ch_attention                                                               */
  int32_t threads;
  int32_t dtype;        /* ch_dtype of all but the moments                                                  */
  int32_t dropped;      /* as in ch_projection                                                              */
  uint64_t seed;
  int64_t rows, columns; /* columns from 1, where there are rows                                            */
  double epsilon;       /* from 0                                                                           */
  int32_t kind;         /* ch_norm_kind                                                                     */
  int32_t reserved;
  const void* input;    /* forward reads it                                                                 */
  const void* added;    /* the same; null for none                                                          */
  const void* weight;   /* [columns]; null where the factor is 1                                            */
  const void* bias;     /* [columns]; null for none                                                         */
  void* sum;            /* [rows, columns]: forward writes it, where not null; backward reads it            */
  void* output;         /* [rows, columns]: forward writes it; nothing that is read may lie in it           */
  float* moments;       /* [rows, 2]: mean and scale, which forward writes, where not null, and backward reads */

  /* Backward only: gradients that arrive at the output, in one part or two, and at the sum. Nothing that is read may lie
     in what is written.                                                                                    */
  const void* grad_output;
  const void* grad_more;    /* null for none                                                                */
  const void* grad_arrived; /* at the sum; null for none                                                    */
  void* grad_sum;           /* written: what `added` gets, and input too where nothing is dropped           */
  void* grad_input;         /* written, where not null: what is kept of grad_sum, times the factor          */
  void* grad_weight;        /* [columns], written, where not null                                           */
  void* grad_bias;          /* [columns], written, where not null                                           */
} ch_norm;

CH_EXPORT int ch_abi(void);
/* The instruction sets this library was built for, widest first; null past the last. */
CH_EXPORT const char* ch_isa_name(int index);
/* Whether this processor can run it. */
CH_EXPORT int ch_isa_usable(int index);
/* Vendors that the choice of a set distinguishes. */
#define CH_OTHER_VENDOR 0
#define CH_INTEL 1
/* The set for a processor of a vendor with this processor's instructions: the widest usable one that the vendor's processors
 * do not run slower than the next one. */
CH_EXPORT int ch_isa_for(int32_t vendor);
/* The one that -1 stands for: ch_isa_for this processor's vendor. */
CH_EXPORT int ch_isa_best(void);
/* How many multiplications and additions a second so many threads do in the product that every kernel is made of, of 64 steps
 * whose operands and sums lie in the innermost caches: kernels of the set exceed it by hundredths at most, where sums of more
 * steps are written less often. -1 stands for the best set; 0 where dtype, set or threads are out of range. Takes some 20 ms. */
CH_EXPORT double ch_product_rate(int32_t dtype, int32_t isa, int32_t threads);

CH_EXPORT int ch_forward(const ch_attention* work);
CH_EXPORT int ch_backward(const ch_attention* work);
CH_EXPORT int ch_linear_forward(const ch_linear* work);
CH_EXPORT int ch_linear_backward(const ch_linear* work);
CH_EXPORT int ch_project(const ch_projection* work);
CH_EXPORT int ch_drop(const ch_dropout* work);
CH_EXPORT int ch_norm_forward(const ch_norm* work);
CH_EXPORT int ch_norm_backward(const ch_norm* work);
CH_EXPORT int ch_append_rows(const ch_append* work);
CH_EXPORT int ch_rotate(const ch_rotation* work);
CH_EXPORT const char* ch_message(int code);
/* Bytes that are kept now. */
CH_EXPORT int64_t ch_kept_memory(void);
/* Keeps at most so many bytes from now on, what is above goes back at once; an eighth of the machine's memory until
   this is called. Below 0 nothing changes. Returns the limit before. */
CH_EXPORT int64_t ch_keep_memory(int64_t bytes);

#ifdef __cplusplus
}
#endif
#endif
