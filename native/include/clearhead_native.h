/* The C interface of the CPU kernels: for attention and for the linear attention family a description with a forward
 * and a backward call each, and calls for the other operations of a layer: GEMMs, RoPE, dropout, norms, KV caches.
 *
 * The interface is independent of torch. The caller fills a description such as `ch_attention`, with `size` set to
 * `sizeof(ch_attention)` and every unused field set to zero. The call returns 0, or a code that `ch_message` explains.
 * Sizes, strides and pointers are checked against each other before any pointer is dereferenced.
 *
 * Strides count elements, not bytes. The last axis of query, key, value, output and their gradients is contiguous;
 * every other stride is free, and may be 0 for inputs.
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
#define CH_ABI 33
#define CH_MAX_HEAD_DIM 256
#define CH_MAX_INTERVALS 4
#define CH_MAX_RULES 8
/* Bytes of the scale behind the int8 integers of a quantized row. */
#define CH_SCALE_BYTES 4
/* The smallest value that is not 0 in a quantized row, 2**-119: the scale of a smaller one could be subnormal. */
#define CH_LEAST_QUANTIZED 1.504632769052528e-36f
/* Keys of a tile in backward. */
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
  CH_BAD_SIZE = 1,      /* `size` or `abi` differs from this library's                                      */
  CH_BAD_SHAPE = 2,     /* a count is negative, too large, or does not divide                               */
  CH_BAD_DTYPE = 3,     /* no such dtype                                                                    */
  CH_BAD_POINTER = 4,   /* a required tensor is null or misaligned                                           */
  CH_BAD_STRIDE = 5,    /* a stride is negative, or rows that are written overlap                           */
  CH_BAD_MASK = 6,      /* intervals, bounds, tables or block size do not fit the call                      */
  CH_BAD_RULE = 7,      /* no such rule, or its parameters do not fit                                       */
  CH_BAD_OPTION = 8,    /* scale, dropout or threads out of range                                           */
  CH_BAD_ISA = 9,       /* the processor lacks the requested instruction set                                */
  CH_NO_MEMORY = 10,    /* out of memory for workspaces; the results are invalid                            */
  CH_NOT_FINITE = 11,   /* backward with a mask: NaN or infinity in an input; no gradient is written        */
  CH_BAD_STATISTIC = 12, /* a statistic's size or count does not fit                                        */
  CH_BAD_PAGES = 13,    /* a page table, length or start of queries is out of range, or the call has a part that
                           pages do not go with                                                             */
};

/* A tensor [batch, heads, rows, last axis contiguous]; strides in elements. */
typedef struct ch_tensor {
  void* data;
  int64_t batch, head, row;
} ch_tensor;

/* A table [batch, heads, rows, columns]; any stride may be 0. */
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
  /* float32, accumulated by backward if not null; zeroed by the caller. RELATIVE: [heads, 2R+1] with the strides
     `grad_head` and 1; DENSE: with the grad_* strides. A stride of 0 sums over its axis.                   */
  float* grad;
  int64_t grad_batch, grad_head, grad_row;
} ch_rule;

/* Statistics of the attention weights before dropout, which forward computes, and the gradients of some of them, which
 * backward reads. Null pointers are not computed. float32 and contiguous unless stated otherwise; scores are natural
 * ones (base e). */
typedef struct ch_statistics {
  float* max_score;        /* [batch, heads, q_len]; -inf where a row has no key                            */
  /* [batch, heads, q_len, 2]: the row maximum as backward computes it (before the scale if there is no rule), and the
     number of keys that attain it; backward reads it with `grad_max`.                                      */
  float* ties;
  float* entropy;          /* [batch, heads, q_len], in nats                                                */
  float* distance;         /* [batch, heads, q_len]: mean |q_pos - k_pos|                                   */
  float* sink;             /* [batch, heads, q_len]: mass on the first `sink_keys` keys                     */
  int64_t sink_keys;
  float* top_weights;      /* [batch, heads, q_len, top_k], largest first; ties by the lower key         */
  int64_t* top_indices;    /* the same shape; padded with keys of zero weight, ascending                 */
  int64_t top_k;
  float* received;         /* [batch, heads, k_len]: sums over queries                                      */
  float* weighted;         /* [batch, heads, num_weights, k_len]: sums over queries times `row_weights`     */
  const float* row_weights; /* [batch, heads, num_weights, q_len] with the two strides below, then contiguous */
  int64_t num_weights, weight_batch, weight_head;
  float* heatmap_max;      /* [batch, heads, q_len / heatmap, k_len / heatmap], rounded up: largest weight  */
  float* heatmap_mean;     /* the same shape: mean weight over the elements of a tile                    */
  int64_t heatmap;
  float* rows;             /* [batch, heads, num_rows, k_len]: weights of single queries                    */
  const int32_t* row_slots; /* [q_len]: the index in `rows` of a query's weights, -1 for none             */
  int64_t num_rows;

  const float* grad_max;      /* [batch, heads, q_len], divided evenly among the keys that attain the maximum */
  const float* grad_entropy;  /* [batch, heads, q_len]                                                      */
  const float* grad_distance; /* [batch, heads, q_len]                                                      */
  const float* grad_sink;     /* [batch, heads, q_len]                                                      */
  const float* grad_received; /* [batch, heads, k_len]                                                      */
} ch_statistics;

/* Keys and values in pages: sequences of different lengths, each of which reads the pages that a table names. */
typedef struct ch_pages {
  const int32_t* table;   /* [sequences, columns] with the row stride below: the page of keys [column * size, ...).
                             Entries beyond a sequence's last page are not read                             */
  const int32_t* lengths; /* [sequences]: the number of keys of each sequence, at most k_len                */
  /* [sequences + 1], ascending from 0 to q_len: where the queries of each sequence start in a call with a batch of 1.
     Null: each sequence is one batch entry.                                                                */
  const int32_t* query_start;
  int64_t sequences, columns, table_row;
  int64_t count;          /* pages                                                                          */
  int64_t size;           /* keys of a page                                                                 */
} ch_pages;

typedef struct ch_attention {
  uint32_t size;        /* sizeof(ch_attention)                                                             */
  uint32_t abi;         /* CH_ABI                                                                           */
  int32_t isa;          /* index of an instruction set, or -1 for the best that the processor has           */
  int32_t threads;      /* at least 1                                                                       */
  int32_t dtype;        /* ch_dtype of query, key, value, output and their gradients                        */
  int32_t num_rules;
  /* Forward only: 1 if a row of key and value is int8 integers followed by their float32 scale, CH_SCALE_BYTES that need no
     alignment, as ch_append_rows writes it. An element of the two tensors is then a byte. Else 0.           */
  int32_t quantized;
  int32_t reserved;
  int64_t batch, heads, kv_heads, q_len, k_len, head_dim, value_dim;
  int64_t query_offset; /* absolute position of the first query                                             */
  double scale;
  double dropout;       /* probability; 0 switches it off; rounded to a multiple of 1 / CH_LEVELS           */
  uint64_t seed;
  /* Dropout draws by place: these are the places of the call's first batch entry, head and key in the whole that the call
     is a part of, and its first query is at first_key + query_offset. 0 for a whole call; never negative.  */
  int64_t first_batch, first_head, first_key;
  /* [k_len] numbers of packed tokens, the sequence's index in the upper 32 bits and the position in it: dropout then draws
     as in a padded batch. Only in a batch of 1 whose intervals are sequences; null for none.               */
  const int64_t* token_numbers;
  /* Forward only: the place in its sequence of the call's first key, not 0 in a cache that dropped the keys before. The
     order of sums goes by places in the sequence, which starts at its mask's first key where it has a start.  */
  int64_t first_position;
  /* Backward only: 1 if the rows have keys besides those of the call, so that what forward wrote is that of more keys.
     Needs output32 (or output, if that is float32), and no statistics.                                     */
  int64_t partial_rows;

  ch_tensor query, key, value, output;
  float* output32;      /* [batch, heads, q_len, value_dim] contiguous, or null: the output before rounding */
  float* lse;           /* [batch, heads, q_len] contiguous, or null: natural logarithm                     */
  float* softmax;       /* [batch, heads, q_len, 2] contiguous, or null: row maximum and reciprocal normaliser,
                           from which backward recomputes forward's weights bit for bit                     */

  /* The mask is the conjunction of all parts that are given. */
  int64_t before, after; /* keys from q_pos - before to q_pos + after; INT64_MAX for no bound               */
  const int32_t* start;  /* intervals [start, stop) of keys, ascending and disjoint: [batch, heads, q_len,   */
  const int32_t* stop;   /* intervals] with the strides below and 1; null for none                           */
  int64_t interval_batch, interval_head, interval_row;
  int32_t intervals;
  int32_t block_size;    /* > 0: `blocks` is [batch, heads, q_pos / block_size, k_pos / block_size]         */
  ch_table allowed;      /* bytes 0 or 1, one per query and key; null for none                              */
  ch_table blocks;       /* bytes 0 or 1; null for none                                                     */
  int64_t block_rows, block_columns;

  ch_rule rules[CH_MAX_RULES]; /* applied in order; one soft-cap at most                                    */
  const float* sink;     /* a logit per head, stride sink_head; null for none                               */
  int64_t sink_head;

  /* Backward only. It reads softmax as forward wrote it, and output32 (or output, if that is float32). Both may be null
     with at most CH_TILE keys, whole rows, no tables and no statistics: delta is then computed together with the
     weights. With partial_rows and grad_lse they may be null too: delta is -grad_lse. */
  ch_tensor grad_output; /* dtype of the tensors                                                            */
  const float* grad_lse; /* [batch, heads, q_len] contiguous, or null                                       */
  ch_tensor grad_query, grad_key, grad_value; /* null: not computed; of keys and values both or neither     */
  float* delta;          /* [batch, heads, q_len] contiguous, written: sum(grad_output * output) - grad_lse */

  /* Null for none. Gradients of statistics also change a row's delta, by the sum over keys of the weight times its
     gradient from the statistics: the caller subtracts that sum from `grad_lse`.                            */
  const ch_statistics* statistics;

  /* Forward only; null for none. `batch` of key and value is the stride from page to page, and the last query of a
     sequence is beside its last key. The mask has a band at most; without dropout, statistics, CH_RULE_DENSE, softmax
     and output32. With pages of a multiple of 16 keys a sequence's bits are those of a call of its own. */
  const ch_pages* pages;
} ch_attention;

enum ch_feature_map {
  CH_FEATURE_IDENTITY = 0,
  CH_FEATURE_ELU = 1,  /* elu(x) + 1 */
  CH_FEATURE_RELU = 2,
};

/* Features and value channels of saved states are padded to a multiple of this. */
#define CH_LINEAR_PAD 16
#define CH_MAX_CHUNK 256

/* Causal linear attention in chunks: S = e^log_decay S + phi(k)^T v, output = scale phi(q) S. With a `normalizer` z the
 * output is divided by scale phi(q) z; with a `rate` (delta rule) the state receives rate (v - phi(k) S) instead of v.
 * All float32; contiguous unless stated otherwise. */
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
  float* last_state;       /* written; as state                                                             */
  float* last_normalizer;  /* written; as normalizer; null: outputs are not divided                         */
  float* shares;           /* [batch, heads, length], written: reciprocal normaliser of a row; null for none */
  /* The state before each chunk, [batch, kv_heads, chunks, features, value_dim padded], and the sum of features,
     [batch, kv_heads, chunks, features padded]: written by forward if not null, and read by backward.      */
  float* states;
  float* sums;

  /* Backward only; it reads output and shares as well.                                                     */
  ch_tensor grad_output;
  const float* grad_last_state;      /* null for zeros                                                      */
  const float* grad_last_normalizer; /* null for zeros                                                      */
  ch_tensor grad_query, grad_key, grad_value;
  float* grad_state;       /* as state, written                                                             */
  float* grad_normalizer;  /* written; as normalizer; null if outputs were not divided                      */
  float* grad_decay;       /* as log_decay, written                                                         */
  float* grad_rate;        /* as rate, written                                                              */
  float* grad_states;            /* workspace of the size of states; null: one thread processes all chunks of a head */
  float* grad_sums;        /* workspace of the size of sums                                                 */
} ch_linear;

#define CH_MAX_TERMS 4
#define CH_LEVELS 65536   /* dropout probabilities are multiples of 1 / CH_LEVELS */

/* One GEMM of a sum: [rows, steps] times [steps, columns]. Strides count elements between consecutive rows in memory. */
typedef struct ch_term {
  const void* left;
  const void* right;
  int64_t left_row, right_row;
  int64_t steps;
} ch_term;

/* CH_QUICK_GELU is x / (1 + exp(-1.702 x)).                                                                */
enum ch_activation { CH_PLAIN = 0, CH_RELU = 1, CH_GELU = 2, CH_GELU_TANH = 3, CH_SILU = 4, CH_QUICK_GELU = 5 };

enum ch_gate { CH_GATE_OUTPUT = 0, CH_GATE_SLOPE = 1 };

/* The GEMMs of a linear layer, forward and backward: output = epilogue(sum over terms of left right + bias).
 * A transposed operand is stored as left [steps, rows] or right [columns, steps]. */
typedef struct ch_projection {
  uint32_t size;        /* sizeof(ch_projection)                                                            */
  uint32_t abi;         /* CH_ABI                                                                           */
  int32_t isa;          /* as in ch_attention                                                               */
  int32_t threads;
  int32_t dtype;        /* ch_dtype of all tensors; sums are in float32 and rounded once                    */
  int32_t num_terms;    /* 1 to CH_MAX_TERMS                                                                */
  int32_t left_transposed;  /* 0 or 1                                                                       */
  int32_t right_transposed; /* 0 or 1                                                                       */
  int32_t activation;   /* ch_activation, applied after the bias                                            */
  int32_t dropped;      /* dropout probability times CH_LEVELS, 0 to CH_LEVELS - 1; the other elements are scaled
                           by CH_LEVELS / (CH_LEVELS - dropped)                                             */
  uint64_t seed;        /* of dropout                                                                       */
  int64_t first_row;    /* dropout's number of the first row: its index in the whole that the call is a part of */
  const int64_t* row_numbers; /* [rows], dropout's number of each row in place of first_row + row; null for none */
  int64_t rows, columns;
  ch_term terms[CH_MAX_TERMS];
  const void* bias;     /* [columns] contiguous; null for none                                              */
  void* output;         /* [rows, columns], written                                                         */
  int64_t output_row;
  void* slope;          /* [rows, columns], written: the derivative of the output by the sum, or the sum times
                           `slope_gate`; null for none                                                      */
  int64_t slope_row;
  const void* gate;     /* [rows, columns], saved by forward for backward; null for none. CH_GATE_OUTPUT: the output of a
                           relu; the sum becomes 0 where the gate is at most 0, and is scaled for `dropped`, which
                           needs no seed because dropped elements are 0. CH_GATE_SLOPE: factors of the sums. Neither
                           can be combined with an activation, nor CH_GATE_SLOPE with `dropped`             */
  int64_t gate_row;
  int32_t gate_kind;    /* ch_gate                                                                          */
  int32_t reserved;
  const void* slope_gate; /* [rows, columns], factors of the sums for `slope`, if that is written together with a
                           CH_GATE_SLOPE; null for none                                                     */
  int64_t slope_gate_row;
  void* row_sums;       /* [rows] contiguous, written: sums of left along its steps; null for none. Only with a
                           transposed left: the gradient of a bias, together with that of its weight        */
  const void* panels;   /* right as ch_pack wrote it for this set and dtype, read in its place; null for none. Only with
                           one term and a left that is not transposed                                       */
} ch_projection;

/* How ch_quantized reads x: as it is, or rounded to integers of `low` to `high`, with a scale for each row whose zero is in
 * the middle of the range, with a scale and a zero for each row, or with one for all rows. */
enum ch_rounding { CH_ROUND_NONE = 0, CH_ROUND_SYMMETRIC = 1, CH_ROUND_ASYMMETRIC = 2, CH_ROUND_TENSOR = 3 };

/* A linear layer with a weight of integers: output = activation(x (scale weight + offset)^T + bias), or the same sums times
 * a gate, with sums in float32, rounded once. With rounding, sums are exact, and the scales of rows are those of torchao and
 * torch.ao. */
typedef struct ch_quantized {
  uint32_t size;        /* sizeof(ch_quantized)                                                             */
  uint32_t abi;         /* CH_ABI                                                                           */
  int32_t isa;          /* as in ch_attention                                                               */
  int32_t threads;
  int32_t dtype;        /* ch_dtype of x, bias and output                                                   */
  int32_t bits;         /* 8: signed integers; 4: two of 0 to 15 a byte, the lower half first               */
  int32_t rounding;     /* ch_rounding; other than CH_ROUND_NONE only with 8 bits, one group, no offset, and at most
                           CH_MAX_ROUNDED steps                                                             */
  int32_t low, high;    /* of the integers of x, -128 to 127; ignored without rounding                      */
  int32_t activation;   /* ch_activation, applied after the bias                                            */
  int64_t rows, columns, steps; /* steps are even with 4 bits                                               */
  int64_t group;        /* steps that share a scale; divides steps                                          */
  const void* x;        /* [rows, steps]                                                                    */
  int64_t x_row;
  const void* weight;   /* [columns, steps * bits / 8] bytes                                                */
  int64_t weight_row;
  const float* scale;   /* [columns, steps / group] contiguous                                              */
  const float* offset;  /* the same; null for 0                                                             */
  const void* bias;     /* [columns] contiguous; null for none                                              */
  const void* gate;     /* [rows, columns], factors of the sums; null for none. Not with an activation      */
  int64_t gate_row;
  void* output;         /* [rows, columns], written                                                         */
  int64_t output_row;
  const void* panels;   /* weight as ch_pack_quantized wrote it for this set, read in its place; null for none. Only with
                           rounding                                                                         */
} ch_quantized;
#define CH_MAX_ROUNDED 65535 /* steps whose sums fit in 32 bits */

/* Dropout of activations: output = mask * input * CH_LEVELS / (CH_LEVELS - dropped) + added, all contiguous. The mask is a
 * function of the seed, the row and the column, the same as in the epilogue of ch_project. */
typedef struct ch_dropout {
  uint32_t size;        /* sizeof(ch_dropout)                                                               */
  uint32_t abi;         /* CH_ABI                                                                           */
  int32_t isa;          /* as in ch_attention                                                               */
  int32_t threads;
  int32_t dtype;        /* ch_dtype of all tensors; computed in float32 and rounded once                    */
  int32_t dropped;      /* as in ch_projection                                                              */
  uint64_t seed;
  int64_t first_row;    /* as in ch_projection                                                              */
  const int64_t* row_numbers; /* the same                                                                   */
  int64_t rows, columns;
  const void* input;
  const void* added;    /* null for none                                                                    */
  void* output;         /* written; must not overlap an input                                               */
} ch_dropout;

/* target[:, :, first + r] = source[:, :, r]: appends keys or values of new tokens to a KV cache. A quantized row of the
 * target is round(x / scale) as int8 integers and the scale, max |x| / 127: 0 for a row whose values are all below
 * CH_LEAST_QUANTIZED, which count as 0, and NaN for a row with NaN or infinity. Halves round to even. */
typedef struct ch_append {
  uint32_t size;        /* sizeof(ch_append)                                                                */
  uint32_t abi;         /* CH_ABI                                                                           */
  int32_t isa;          /* as in ch_attention                                                               */
  int32_t threads;
  int32_t dtype;        /* ch_dtype of the source, and of a target that is not quantized                    */
  int32_t quantized;    /* 0, or 1 if a row of the target has columns + CH_SCALE_BYTES bytes                */
  int64_t batch, heads, rows, columns; /* of the source                                                     */
  int64_t first;        /* index of the first row of the target that is written                             */
  ch_tensor source;
  ch_tensor target;     /* written; must not overlap the source                                             */
} ch_append;

/* RoPE: channels c and c + columns / 2 of a row are a pair (x, y), rotated by the angle of the row's position:
 *   target[b, h, r, c] = x cos - y sin, target[b, h, r, c + columns / 2] = y cos + x sin,
 * computed in float32 and rounded once. */
typedef struct ch_rotation {
  uint32_t size;        /* sizeof(ch_rotation)                                                              */
  uint32_t abi;         /* CH_ABI                                                                           */
  int32_t isa;          /* as in ch_attention                                                               */
  int32_t threads;
  int32_t dtype;        /* ch_dtype of source and target                                                    */
  int32_t back;         /* 1: by the opposite angle, for gradients; else 0                                  */
  int64_t batch, heads, rows, columns; /* of both; columns are even                                         */
  int64_t first;        /* position of row 0                                                                */
  int64_t positions;    /* rows of the table: at least first + rows                                         */
  const float* table;   /* [positions, columns], contiguous: columns / 2 cosines, then as many sines        */
  ch_tensor source;
  ch_tensor target;     /* written; either the source itself, or without overlap with it                    */
} ch_rotation;

enum ch_norm_kind { CH_NORM_LAYER = 0, CH_NORM_RMS = 1, CH_NORM_RMS_FROM_ONE = 2 };

/* The norm of a sum, row by row, all contiguous, computed in float32:
 *   sum = mask * input * CH_LEVELS / (CH_LEVELS - dropped) + added, rounded to its dtype,
 *   output = (sum - mean) * scale * weight + bias, with scale = 1 / sqrt(variance + epsilon).
 * CH_NORM_RMS and CH_NORM_RMS_FROM_ONE use 0 for the mean; the latter multiplies by 1 + weight. The mask is that of
 * ch_drop. */
typedef struct ch_norm {
  uint32_t size;        /* sizeof(ch_norm)                                                                  */
  uint32_t abi;         /* CH_ABI                                                                           */
  int32_t isa;          /* as in ch_attention                                                               */
  int32_t threads;
  int32_t dtype;        /* ch_dtype of all tensors except moments, which are float32                        */
  int32_t dropped;      /* as in ch_projection                                                              */
  uint64_t seed;
  int64_t first_row;    /* as in ch_projection                                                              */
  const int64_t* row_numbers; /* the same                                                                   */
  int64_t rows, columns; /* columns: at least 1 if there are rows                                           */
  double epsilon;       /* at least 0                                                                       */
  int32_t kind;         /* ch_norm_kind                                                                     */
  int32_t reserved;
  const void* input;    /* forward reads it                                                                 */
  const void* added;    /* the same; null for none                                                          */
  const void* weight;   /* [columns]; null for a factor of 1                                                */
  const void* bias;     /* [columns]; null for none                                                         */
  void* sum;            /* [rows, columns]: forward writes it if not null; backward reads it                */
  void* output;         /* [rows, columns]: forward writes it; must not overlap an input                    */
  float* moments;       /* [rows, 2]: mean and scale; forward writes them if not null, and backward reads them */

  /* Backward only: gradients of the output, as one tensor or the sum of two, and of the sum. Results must not overlap
     inputs.                                                                                                */
  const void* grad_output;
  const void* grad_output_second;    /* null for none                                                                */
  const void* grad_residual; /* gradient of the sum from the residual; null for none                         */
  void* grad_sum;           /* written: the gradient of `added`, and without dropout of input too           */
  void* grad_input;         /* written if not null: dropout of grad_sum with the same mask                  */
  void* grad_weight;        /* [columns], written if not null                                               */
  void* grad_bias;          /* [columns], written if not null                                               */
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
/* The set that -1 selects: ch_isa_for this processor's vendor. */
CH_EXPORT int ch_isa_best(void);
/* Peak throughput: multiplications and additions per second of this many threads in the GEMM micro-kernel, with 64 steps and
 * operands and sums in L1. GEMMs of the set exceed it by a few percent at most, since longer sums are stored less often. -1 is
 * the best set; returns 0 if dtype, set or threads are out of range. Takes about 20 ms. */
CH_EXPORT double ch_product_rate(int32_t dtype, int32_t isa, int32_t threads);

/* Calls `function(of)`, in which calls on this set share their work with threads that stay awake meanwhile. For many short
 * calls one after the other. The function must not throw. */
CH_EXPORT void ch_in_team(int32_t isa, int32_t threads, void (*function)(void* of), void* of);
/* Calls `body(of, unit)` for each unit, shared in the same way where threads are awake. Calls of this library within the body
 * must ask for one thread. The body must not throw. */
CH_EXPORT void ch_share(int32_t isa, int32_t threads, int64_t units, void (*body)(void* of, int64_t unit), void* of);
CH_EXPORT int ch_forward(const ch_attention* work);
CH_EXPORT int ch_backward(const ch_attention* work);
CH_EXPORT int ch_linear_forward(const ch_linear* work);
CH_EXPORT int ch_linear_backward(const ch_linear* work);
CH_EXPORT int ch_project(const ch_projection* work);
/* Packs the right of the only term of a GEMM, whose rows may be 0, into ch_panel_bytes() bytes at `output`. GEMMs that read
 * them have the bits of those that read right. */
CH_EXPORT int ch_pack(const ch_projection* work);
/* Writes what ch_pack read, a right that is transposed, from `panels` to [columns, steps] at `output`. CH_BAD_OPTION where
 * the set's panels have wider elements than the dtype. */
CH_EXPORT int ch_unpack(const ch_projection* work);
/* Columns of a panel; a right has the panels of as many as it has columns, rounded up. 0 as below. */
CH_EXPORT int64_t ch_panel_columns(int32_t dtype, int32_t isa);
/* Bytes of the panels of a right [steps, columns]; 0 if dtype, set or sizes are out of range. */
CH_EXPORT int64_t ch_panel_bytes(int32_t dtype, int32_t isa, int64_t steps, int64_t columns);
/* Linear layers with weights of integers. Several read the same x and round it alike, once, and are computed in order, so
 * that the output of one may be the gate of a later one. */
CH_EXPORT int ch_multiply_quantized(const ch_quantized* layers, int32_t count);
/* Packs the weight, where x is rounded, into ch_quantized_panel_bytes() bytes at `output`. Results have the same bits. A
 * panel has ch_panel_columns(CH_FLOAT32, isa) columns. */
CH_EXPORT int ch_pack_quantized(const ch_quantized* work);
/* Bytes of the panels of a weight [columns, steps]; 0 if set or sizes are out of range. */
CH_EXPORT int64_t ch_quantized_panel_bytes(int32_t isa, int64_t steps, int64_t columns);
CH_EXPORT int ch_drop(const ch_dropout* work);
CH_EXPORT int ch_norm_forward(const ch_norm* work);
CH_EXPORT int ch_norm_backward(const ch_norm* work);
CH_EXPORT int ch_append_rows(const ch_append* work);
CH_EXPORT int ch_rotate(const ch_rotation* work);
CH_EXPORT const char* ch_message(int code);
/* Bytes in the cache of freed results. */
CH_EXPORT int64_t ch_kept_memory(void);
/* Sets the limit of that cache and releases what exceeds it; the initial limit is an eighth of the machine's memory. A
 * negative limit changes nothing. Returns the previous limit. */
CH_EXPORT int64_t ch_keep_memory(int64_t bytes);
/* Whether results may depend on how a sequence is computed (0), or not (1): among other sequences, in chunks, or token
 * by token. Of the whole process. */
CH_EXPORT void ch_set_invariant(int32_t invariant);

#ifdef __cplusplus
}
#endif
#endif
