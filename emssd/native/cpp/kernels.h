// What the parts of the library have for each other. Only library.cpp knows PyTorch; the others compute on memory.
//
// Every query's result depends on its own row alone: neither the other rows of a batch, nor how many tokens are
// verified beside it, nor the number of threads change the order of its sums. A draft cannot change the output.
#pragma once

#include <cstdint>

namespace emssd {

enum class Type { bfloat16, float32, float64, packed };

// use(with, begin, end) for parts of [0, count) of `grain` or more, on PyTorch's threads.
void on_threads(int64_t count, int64_t grain, void (*use)(const void*, int64_t, int64_t), const void* with);
int num_threads();

template <class Use>
void parallel_for(int64_t count, int64_t grain, const Use& use) {
  const auto call = [](const void* with, int64_t begin, int64_t end) { (*static_cast<const Use*>(with))(begin, end); };
  on_threads(count, grain, call, &use);
}

class Trees;

// One layer's attention in one step. The last dimension of tensors is contiguous.
struct Attention {
  Type type;
  const void *query, *key, *value;  // [nnz, heads, key_dim], [nnz, kv_heads, key_dim], [nnz, kv_heads, value_dim]
  int64_t query_token, query_head, key_token, key_head, value_token, value_head;  // strides
  void *keys, *values;  // the pool: [pages, kv_heads, cells, 16, width] and [pages, kv_heads, 16 / width, lanes, width]
  void* out;            // [nnz, heads, value_dim]
  const int32_t *query_indptr, *kv_lens, *page_indptr, *pages;  // [R + 1]; [R] with the new tokens; [R + 1] into pages
  int64_t num_rows, num_kv_heads, group, key_cells, key_dim, value_dim, value_lanes;
  double scale, softcap;  // softcap 0 and window 0 stand for none
  int64_t window;
  const void* sinks;   // [heads] scores of a key that every query sees, and that has no value; null for none
  const Trees* trees;  // null if no row has any
};

// Stores the keys and values of a step's new tokens, and attends.
void attend(const Attention& layer);

// Keys, or values, of one pool.
struct Pages {
  Type type;
  void* data;
  int64_t heads, rows, columns, width;  // of [pages, heads, rows, columns, width], see `Attention`
  bool are_values;
};

// Copies those of tokens to other slots (page x 16 + place in the page). All are read before one is written.
void move(const Pages& pages, const int64_t* sources, const int64_t* targets, int64_t count);

// y = x W^T + b. Weights [outputs, in] are laid out as panels: of `panel_width()` outputs, the last ones filled with zeros.
struct Linear {
  Type type;            // of the weights
  const void* weights;  // [panels, in, panel width], pairs [panels, panel_inputs / 2, panel width, 2]
  const float* bias;    // [panels * panel width]
  bool pairs;
  int64_t in, outputs;
};

int64_t panel_width();
bool takes_pairs();  // whether weights in bfloat16 of an even number of inputs are pairs
int64_t panel_inputs(const Linear& layer);  // how many inputs a panel has place for, zeros behind the last
void to_panels(const void* weight, const Linear& layer, void* panels);
void linear(const Linear& layer, const void* input, int64_t num_rows, void* out);

// A weight [outputs, in] of integers: value * scale + minimum, by groups of inputs. It stands before the panels of `pack`.
struct Packed {
  int32_t bits, group;  // 4 or 8; 32 or 16 inputs
  bool has_float_scale, has_minimum;  // else the scale is a half, and nothing is added
  int64_t outputs, in;
};

int64_t packed_bytes(const Packed& packed);  // 0: there is no such kind
// values [outputs, in]; scale and minimum [outputs, groups].
void pack(const Packed& packed, const int8_t* values, const void* scale, const float* minimum, uint8_t* to);
Packed packed_of(const uint8_t* bytes);
void linear(const uint8_t* packed, const float* bias, Type type, const void* input, int64_t num_rows, void* out);
void rows_of(const uint8_t* packed, const int64_t* outputs, int64_t count, float* to);  // [count, in]

// Logits [rows, size], contiguous rows.
struct Logits {
  Type type;
  const void* data;
  int64_t rows, size, stride;
};

// The same with weights as a model has them: [outputs, in] with these strides, and a bias of their type; null for none.
struct PlainLinear {
  Type type;  // of weights, bias and inputs
  const void *weight, *bias;
  int64_t output_step, input_step, in, outputs;
};

void linear(const PlainLinear& layer, const void* input, int64_t num_rows, void* out);

// The first of the largest entries of each row: [rows]. NaN counts as larger than any number, as in torch.argmax.
void argmax(const Logits& logits, int64_t* best);

// The k largest entries of each row, the largest first, of equal ones the first: their places, and the logarithm of what
// each has of the sum of e^(entry * scale) over its row: [2, rows, k]. Shares are NaN in rows with NaN, or without a finite
// largest entry; places never are.
void top(const Logits& logits, int64_t k, double scale, double* best);

// What is drawn: in row rows[i] of logits, with the noise of keys[i] and positions[i], after warps[i]: temperature, top_k,
// top_p and min_p as in emssd/sampling/params.py.
struct Places {
  int64_t num;
  const int64_t *rows, *keys, *positions;  // [num]
  const double* warps;                     // [num, 4]
};

// The tokens [num] that are drawn. -1 where rounding could decide, and in rows with NaN or without a finite largest logit.
void sample(const Logits& logits, const Places& places, int64_t* chosen);

// The `width` likeliest draws [num, width] under an error of the logits: see emssd/decoding/top_tokens.py. Tokens, and the
// logarithms of how likely; -inf where no token is left.
void top_draws(const Logits& logits, const Places& places, double error, int64_t width, double* tokens, double* shares);

// The random bits [num, vocab_size] of each token's noise.
void noise_bits(const Places& places, int64_t vocab_size, int64_t* bits);

// A layer that keeps a state; the tensors of recurrence.h.
struct Recurrence {
  Type type;
  const void *inputs, *query;
  void* states;
  const void* rates;  // null for none
  void* out;
  int64_t heads, keys, values, width, decay_keys, decay_values;
  bool has_beta;
};

// Tokens of one row, from a state on.
struct Path {
  int64_t slot;
  const int64_t *inputs, *outputs;
  int64_t length, save, save_slot, shared;  // `shared`: its first tokens are the first ones of the path before
};

// Follows all paths; no two save to one slot, and none starts from a slot that another saves to.
void recur(const Recurrence& layer, const Path* paths, int64_t num_paths);

}  // namespace emssd
