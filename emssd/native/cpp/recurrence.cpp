// States of recurrent layers, along the paths of a step; see emssd/model/hf/mixing.py.

#include <algorithm>
#include <vector>

#include "kernels.h"
#include "vectors.h"

namespace emssd {
namespace {

constexpr int64_t kColumns = 64;  // of a state at a time, so that they stay in the nearest cache

// Columns [first, first + kColumns) of one head's state, along one path. Each column is summed up by itself. `kept` has the
// states after so many tokens of the paths before that this one and the next ones go on from, up to `next`.
template <class S>
void follow(const Recurrence& layer, const Path& path, const Path* next, const Path* end, int64_t head, int64_t first, S* state,
            std::vector<std::vector<S>>& kept) {
  const int64_t columns = std::min(kColumns, layer.values - first);
  const int64_t whole = layer.keys * layer.values, head_at = head * whole + first;
  S* all = static_cast<S*>(layer.states);
  if (path.shared > 0) std::copy_n(kept[path.shared].data(), layer.keys * kColumns, state);
  for (int64_t k = 0; k < layer.keys && path.shared == 0; ++k) {
    S* row = state + k * kColumns;
    if (path.slot < 0)
      std::fill(row, row + kColumns, S(0));
    else
      std::copy_n(all + path.slot * layer.heads * whole + head_at + k * layer.values, columns, row);
  }
  const int64_t value_at = layer.heads * layer.keys, decay_at = value_at + layer.heads * layer.values;
  const int64_t decays = layer.decay_keys * layer.decay_values, beta_at = decay_at + layer.heads * decays;
  const S* rates = static_cast<const S*>(layer.rates);
  S scales[kColumns], update[kColumns], sums[kColumns];
  for (int64_t i = path.shared; i < path.length; ++i) {
    const S* inputs = static_cast<const S*>(layer.inputs) + path.inputs[i] * layer.width;
    const S *key = inputs + head * layer.keys, *value = inputs + value_at + head * layer.values + first;
    const S* decay = inputs + decay_at + head * decays;
    std::fill_n(sums, kColumns, S(0));
    for (int64_t k = 0; k < layer.keys; ++k) {
      S* row = state + k * kColumns;
      if (rates) {
        for (int64_t v = 0; v < columns; ++v) scales[v] = decay[first + v] * rates[k * layer.values + first + v];
        for (int64_t v = 0; v < kColumns; v += kPage) exponential(load<Wide<S>>(scales + v)).store(scales + v);
      } else if (k == 0 || layer.decay_keys > 1) {
        std::fill_n(scales, kColumns, std::exp(decay[k]));
      }
      const S weight = key[k];
      for (int64_t v = 0; v < kColumns; ++v) {
        row[v] *= scales[v];
        sums[v] += weight * row[v];
      }
    }
    if (layer.has_beta) {
      const S beta = inputs[beta_at + head];
      for (int64_t v = 0; v < columns; ++v) update[v] = (value[v] - sums[v]) * beta;
    } else {
      std::copy_n(value, columns, update);
    }
    for (int64_t k = 0; k < layer.keys; ++k) {
      S* row = state + k * kColumns;
      const S weight = key[k];
      for (int64_t v = 0; v < kColumns; ++v) row[v] += weight * update[v];
    }
    if (path.outputs[i] >= 0) {
      const S* query = static_cast<const S*>(layer.query) + (path.outputs[i] * layer.heads + head) * layer.keys;
      std::fill_n(sums, kColumns, S(0));
      for (int64_t k = 0; k < layer.keys; ++k) {
        const S weight = query[k];
        for (int64_t v = 0; v < kColumns; ++v) sums[v] += weight * state[k * kColumns + v];
      }
      std::copy_n(sums, columns, static_cast<S*>(layer.out) + (path.outputs[i] * layer.heads + head) * layer.values + first);
    }
    for (const Path* later = next; later < end && later->shared > path.shared; ++later) {
      if (later->shared == i + 1) kept[i + 1].assign(state, state + layer.keys * kColumns);
    }
    if (path.save != i + 1) continue;
    S* to = all + path.save_slot * layer.heads * whole + head_at;
    for (int64_t k = 0; k < layer.keys; ++k) std::copy_n(state + k * kColumns, columns, to + k * layer.values);
  }
}

template <class S>
void recur_as(const Recurrence& layer, const Path* paths, int64_t num_paths) {
  const int64_t blocks = (layer.values + kColumns - 1) / kColumns, parts = layer.heads * blocks;
  std::vector<const Path*> trees;  // each begins with a path that shares nothing
  for (int64_t i = 0; i < num_paths; ++i) {
    if (paths[i].shared == 0) trees.push_back(paths + i);
  }
  trees.push_back(paths + num_paths);
  int64_t longest = 0;
  for (int64_t i = 0; i < num_paths; ++i) longest = std::max(longest, paths[i].shared);
  parallel_for((static_cast<int64_t>(trees.size()) - 1) * parts, 1, [&](int64_t begin, int64_t end) {
    std::vector<S> state(layer.keys * kColumns);
    std::vector<std::vector<S>> kept(longest + 1);
    for (int64_t task = begin; task < end; ++task) {
      const int64_t part = task % parts;
      const Path* last = trees[task / parts + 1];
      for (const Path* path = trees[task / parts]; path < last; ++path) {
        follow<S>(layer, *path, path + 1, last, part / blocks, part % blocks * kColumns, state.data(), kept);
      }
    }
  });
}

}  // namespace

void recur(const Recurrence& layer, const Path* paths, int64_t num_paths) {
  layer.type == Type::float64 ? recur_as<double>(layer, paths, num_paths) : recur_as<float>(layer, paths, num_paths);
}

}  // namespace emssd
