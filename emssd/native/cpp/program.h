// Modules: their linear layers, and the compiled programs that run them, once or level by level.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

#include "choice.h"
#include "step.h"

namespace emssd {
namespace {

// A linear layer, with the memory that it reads.
struct Layer {
  Linear linear;
  Tensor weight, bias, scale;
};

// Memory for the weights of a module, in large pages where the system has any: a step reads all of it, and looking up as
// many small pages takes a fifth of its time.
class Weights {
 public:
  // [bytes], kept for as long as the tensor is.
  Tensor take(int64_t bytes) {
    bytes = (bytes + 63) / 64 * 64;
    const auto options = at::TensorOptions(at::kByte);
    if (bytes < kLargePage / 16) return at::empty({bytes}, options);
    if (!chunk_.defined() || chunk_.numel() - used_ < bytes) {
      const int64_t size = (std::max(bytes, total_) + kLargePage - 1) / kLargePage * kLargePage;
      void* memory = std::aligned_alloc(kLargePage, size);
      TORCH_CHECK(memory, "no memory for ", size, " bytes of weights");
      madvise(memory, size, MADV_HUGEPAGE);  // what it returns does not matter
      chunk_ = at::from_blob(memory, {size}, [](void* gone) { std::free(gone); }, options), used_ = 0;
    }
    used_ += bytes, total_ += bytes;
    return chunk_.narrow(0, used_ - bytes, bytes);
  }

 private:
  static constexpr int64_t kLargePage = 1 << 21;
  Tensor chunk_;
  int64_t used_ = 0, total_ = 0;
};

// A module of which there is a compiled program: its linear layers, the program, and what the step that runs attends with.
struct Module {
  Weights weights;
  std::vector<Layer> linears;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> program;
  const Step* step = nullptr;  // none: attention is Python's
};

// `values` [n] in float32, zeros behind them up to `size`; all zeros if there are none.
Tensor padded(const std::optional<Tensor>& values, int64_t size) {
  Tensor whole = at::zeros({size}, at::kFloat);
  if (values) whole.narrow(0, 0, values->size(0)).copy_(*values);
  return whole;
}

Layer packed_layer(Weights& memory, const Tensor& weight, const std::optional<Tensor>& bias, const std::optional<Tensor>& scale) {
  const int64_t out = weight.size(0), in = weight.size(1), width = panel_width(), panels = (out + width - 1) / width;
  Layer layer{};
  Linear& linear = layer.linear;
  linear.type = type_of(weight), linear.in = in, linear.outputs = out;
  if (scale && scale->dim() == 2) {
    const int64_t groups = (in + 31) / 32;
    TORCH_CHECK(scale->scalar_type() == at::kBFloat16 && scale->is_contiguous() && scale->size(0) == out && scale->size(1) == groups,
                "weights of 4 bits have a scale in bfloat16 for each 32 inputs");
    layer.weight = memory.take(panels * groups * group_bytes());
    linear.type = Type::int4;
    to_groups(weight.const_data_ptr<int8_t>(), static_cast<const uint16_t*>(scale->const_data_ptr()), out, in,
              layer.weight.mutable_data_ptr<uint8_t>());
  } else {
    TORCH_CHECK(linear.type != Type::float64, "no kernel for ", weight.scalar_type());
    linear.pairs = takes_pairs() && linear.type != Type::float32 && in % 2 == 0;
    layer.weight = memory.take(panels * panel_inputs(linear) * width * weight.element_size()).zero_();
    to_panels(weight.const_data_ptr(), linear, layer.weight.mutable_data_ptr());
    if (scale) layer.scale = padded(scale, panels * width), linear.scale = layer.scale.const_data_ptr<float>();
  }
  layer.bias = padded(bias, panels * width), linear.bias = layer.bias.const_data_ptr<float>();
  linear.weights = layer.weight.const_data_ptr();
  return layer;
}

// input [..., in] by a model's own weight [out, in], of any layout: [..., out].
Tensor plain_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  TORCH_CHECK(weight.dim() == 2 && input.size(-1) == weight.size(1), "inputs of ", input.size(-1), " for a weight of ",
              weight.sizes());
  TORCH_CHECK(input.scalar_type() == weight.scalar_type() && (!bias || bias->scalar_type() == weight.scalar_type()),
              "inputs, weight and bias must be of one type");
  const Tensor rows = input.contiguous();
  const Tensor own = weight.stride(1) == 1 || weight.stride(0) == 1 ? weight : weight.contiguous();
  const std::optional<Tensor> added = bias ? std::optional(bias->contiguous()) : std::nullopt;
  TORCH_CHECK(type_of(own) != Type::int8, "no kernel for int8");
  const PlainLinear layer{type_of(own), own.const_data_ptr(), added ? added->const_data_ptr() : nullptr,
                          own.stride(0), own.stride(1), own.size(1), own.size(0)};
  auto sizes = rows.sizes().vec();
  sizes.back() = layer.outputs;
  Tensor out = at::empty(sizes, rows.options());
  if (out.numel() > 0) emssd::linear(layer, rows.const_data_ptr(), out.numel() / layer.outputs, out.mutable_data_ptr());
  return out;
}

// By the number that stands in its handle. A module stays where it is until it is freed.
std::mutex modules_lock;
std::unordered_map<int64_t, std::unique_ptr<Module>> modules;
int64_t num_modules = 0;

Module& module_of(const Tensor& handle) {
  const std::lock_guard<std::mutex> guard(modules_lock);
  return *modules.at(*handle.const_data_ptr<int64_t>());
}

// A new handle [] int64: a module without linear layers and without a program so far.
Tensor new_module() {
  int64_t number;
  {
    const std::lock_guard<std::mutex> guard(modules_lock);
    modules[number = ++num_modules] = std::make_unique<Module>();
  }
  return at::scalar_tensor(number, at::kLong);
}

// Adds a layer: weight [out, in], bias [out] or none; int8 weights with the scale [out] of each output, or
// [out, groups] in bfloat16 of each 32 inputs, whose weights are from -8 to 7 and take 4 bits. Layers are numbered
// from 0.
void add_weight(const Tensor& handle, const Tensor& weight, const std::optional<Tensor>& bias,
                const std::optional<Tensor>& scale) {
  TORCH_CHECK(scale.has_value() == (weight.scalar_type() == at::kChar), "int8 weights, and only they, have a scale");
  Module& module = module_of(handle);
  module.linears.push_back(packed_layer(module.weights, weight.contiguous(), bias, scale));
}

// Frees the module of a handle. A plain function and not an operator: Python's finalizers call it at any point, also where
// operators are traced. No lock is held while tensors go.
void free_module(int64_t number) {
  std::unique_ptr<Module> gone;
  const std::lock_guard<std::mutex> guard(modules_lock);
  if (const auto found = modules.find(number); found != modules.end()) {
    gone.swap(found->second);
    modules.erase(found);
  }
}

// input [..., in] by layer `index` of a handle: [..., outputs].
Tensor linear(const Tensor& input, const Tensor& handle, int64_t index, int64_t) {
  const Linear& layer = module_of(handle).linears.at(index).linear;
  const Tensor rows = input.contiguous();
  const Type type = type_of(rows);
  const bool rounded = layer.type == Type::int8 || layer.type == Type::int4;
  TORCH_CHECK(type == layer.type || (rounded && type != Type::float64), "no kernel for ", rows.scalar_type());
  TORCH_CHECK(rows.size(-1) == layer.in, "inputs of ", rows.size(-1), " numbers for a layer of ", layer.in);
  auto sizes = rows.sizes().vec();
  sizes.back() = layer.outputs;
  Tensor out = at::empty(sizes, rows.options());
  if (rows.numel() > 0) emssd::linear(layer, type, rows.const_data_ptr(), rows.numel() / layer.in, out.mutable_data_ptr());
  return out;
}

// The attention of a layer of a compiled program: of the step that runs, or in Python if that is not known here.
Tensor attend_layer(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& handle, int64_t layer) {
  if (const Step* step = module_of(handle).step) return attend(query, key, value, *step, layer);
  static const auto in_python = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("emssd::attend", "")
                                    .typed<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t)>();
  return in_python.call(query, key, value, handle, layer);
}

// Loads the program of a module. Returns the names of the constants that it needs.
std::vector<std::string> open_program(const Tensor& handle, const std::string& path) {
  Module& module = module_of(handle);
  module.program = std::make_unique<torch::inductor::AOTIModelPackageLoader>(path, "model", true);
  return module.program->get_constant_fqns();
}

// Gives a program its constants, all of them. None is copied: they must stay.
void load_constants(const Tensor& handle, const std::vector<std::string>& names, const std::vector<Tensor>& tensors) {
  TORCH_CHECK(names.size() == tensors.size(), "each constant has a name");
  std::unordered_map<std::string, Tensor> constants;
  for (size_t i = 0; i < names.size(); ++i) constants.emplace(names[i], tensors[i]);
  module_of(handle).program->load_constants(constants, false, true, true);
}

std::vector<Tensor> run(Module& module, const Tensor& handle, std::vector<Tensor> inputs, const Step* step) {
  struct Attending {  // also where the program throws
    Module& module;
    Attending(Module& module, const Step* step) : module(module) { module.step = step; }
    ~Attending() { module.step = nullptr; }
  } attending(module, step);
  inputs.push_back(handle);
  return module.program->boxed_run(std::move(inputs));
}

// Runs the program of a module once; attention is Python's.
std::vector<Tensor> run_program(const Tensor& handle, std::vector<Tensor> inputs) {
  return run(module_of(handle), handle, std::move(inputs), nullptr);
}

// Runs the program of a module once, on inputs without padding; attention is done here.
std::vector<Tensor> run_step(const c10::intrusive_ptr<Step>& step, const Tensor& handle, std::vector<Tensor> inputs) {
  return run(module_of(handle), handle, std::move(inputs), step.get());
}

// The draft of a row, while it grows: its nodes in the order of their creation, -1 being the newest token. What becomes
// of each is what `emssd.drafting.levels.GrowingTree` and `DynamicShape.expand` make of it.
struct Growing {
  std::vector<int32_t> parents;                  // of the nodes in the cache, as indices among them
  std::vector<int32_t> places;                   // of each node, its index among them; -1 for others
  std::vector<double> log_probs, scores;         // of each node, and of its whole path
  std::vector<std::pair<double, int32_t>> best;  // minus its score, and the node: the best come first
  int64_t num_levels = 0;

  // Adds a level: the children of some nodes, so many of each. Returns those that get children in turn, the best first.
  // Logarithms of shares that are above 0, or are not numbers, are set right.
  std::vector<int32_t> add(const std::vector<int32_t>& expanded, int64_t num_children, double* shares, int64_t depth,
                           int64_t num_nodes, int64_t room, int64_t width, double least) {
    const int32_t start = static_cast<int32_t>(places.size());
    for (const int32_t parent : expanded) {
      for (int64_t rank = 0; rank < num_children; ++rank) {
        log_probs.push_back(0);
        if (shares) {
          *shares = std::isnan(*shares) ? -std::numeric_limits<double>::infinity() : std::min(*shares, 0.0);
          log_probs.back() = *shares++;
        }
        scores.push_back((parent < 0 ? 0 : scores[parent]) + log_probs.back());
        best.emplace_back(-scores.back(), static_cast<int32_t>(places.size())), places.push_back(-1);
      }
    }
    std::sort(best.begin(), best.end());
    best.resize(std::min<size_t>(best.size(), num_nodes));
    std::vector<int32_t> next;
    if (++num_levels >= depth) return next;
    int64_t looked_at = 0;
    for (int64_t i = 0; i < std::min<int64_t>(best.size(), num_nodes - 1) && looked_at < width; ++i) {
      const int32_t node = best[i].second;
      if (node < start) continue;
      ++looked_at;
      if (log_probs[node] >= least && static_cast<int64_t>(parents.size() + next.size()) < room) next.push_back(node);
    }
    return next;
  }

  bool is_chain() const {
    for (size_t i = 0; i < parents.size(); ++i) {
      if (parents[i] != static_cast<int32_t>(i) - 1) return false;
    }
    return true;
  }
};

// Drafts trees of the likeliest tokens, one pass a level, and nothing of the host between. A chain has a width of 1.
//
// inputs: of the first pass: token ids [1, nnz] of a model, or vectors [1, nnz, size] of a head; positions [1, nnz]; the
// last token of each row [R]. The step has no trees, and each row's pages have room for its nodes. depths, num_nodes,
// rooms [R]: the most levels, drafted nodes, and nodes in the cache. width: the nodes of a level that get children, and
// the children of each. vocab_size: only so many logits are looked at. table [vocab, hidden]: of a head, what a token's
// embedding is, beside which the hidden state of its parent stands in the next pass; none for a model. target_ids: of a
// head, the tokens that its columns are; none if they are the same. scale: of the logits, where shares are wanted; else
// 0. least: a node whose share has a smaller logarithm gets no children.
// Returns for all nodes that were computed, level by level and row by row, the tokens after each [n, width] int64 and the
// logarithms of their shares [n, width], at most 0, or [n, 0].
std::tuple<Tensor, Tensor> grow(const c10::intrusive_ptr<Step>& first_step, const Tensor& handle, std::vector<Tensor> inputs,
                                const Integers& depths, const Integers& num_nodes, const Integers& rooms, int64_t width,
                                int64_t vocab_size, const std::optional<Tensor>& table,
                                const std::optional<Tensor>& target_ids, double scale, double least) {
  const size_t num_rows = depths.size();
  Step step(*first_step);
  TORCH_CHECK(inputs.size() == 3 && step.kv_lens.size() == num_rows && inputs[2].numel() == static_cast<int64_t>(num_rows) &&
              num_nodes.size() == num_rows && rooms.size() == num_rows && !step.trees, "a draft behind the last token of each row");
  TORCH_CHECK(scale > 0 || width == 1, "the likeliest tokens need their shares");
  Module& module = module_of(handle);
  const auto ints = inputs[1].options();
  Integers active(num_rows), origins(num_rows);  // rows, and the positions of their newest tokens
  const int64_t* first = inputs[1].const_data_ptr<int64_t>();
  const int64_t* last = inputs[2].const_data_ptr<int64_t>();
  for (size_t row = 0; row < num_rows; ++row) active[row] = row, origins[row] = first[last[row]];
  std::vector<Growing> trees(num_rows);
  std::vector<std::vector<int32_t>> level(num_rows, {-1});  // of the active rows, the nodes that are computed
  std::vector<Tensor> tokens, shares;
  for (;;) {
    const std::vector<Tensor> outputs = run(module, handle, std::move(inputs), &step);
    const Tensor& all_logits = outputs[table ? 1 : 0];
    const Tensor logits = all_logits.view({-1, all_logits.size(-1)}).narrow(1, 0, std::min(vocab_size, all_logits.size(-1)));
    const int64_t num = logits.size(0), num_children = std::min(width, logits.size(1));
    if (scale > 0) {
      const Tensor found = top(logits, num_children, scale);
      tokens.push_back(found[0].to(at::kLong)), shares.push_back(found[1]);
    } else {
      tokens.push_back(argmax(logits).unsqueeze(1)), shares.push_back(at::empty({num, 0}, at::kDouble));
    }
    if (target_ids) tokens.back() = target_ids->index_select(0, tokens.back().flatten()).view_as(tokens.back());
    const int64_t* ids = tokens.back().const_data_ptr<int64_t>();
    double* log_probs = scale > 0 ? shares.back().mutable_data_ptr<double>() : nullptr;

    Integers going, next_ids, parents, positions;
    std::vector<std::vector<int32_t>> next_level;
    std::vector<int32_t> lens, indptr{0}, tree_indptr{0}, tree_parents;
    int64_t place = 0;
    for (size_t i = 0; i < active.size(); ++i) {
      const int64_t row = active[i], start = place;
      Growing& tree = trees[row];
      const int32_t before = static_cast<int32_t>(tree.places.size());
      place += static_cast<int64_t>(level[i].size());
      TORCH_CHECK(place <= num, "one row of logits behind each node");
      std::vector<int32_t> next = tree.add(level[i], num_children, log_probs ? log_probs + start * num_children : nullptr,
                                           depths[row], num_nodes[row], rooms[row], width, least);
      if (next.empty()) continue;
      for (const int32_t node : next) {
        const int64_t child = node - before, parent = level[i][child / num_children];
        next_ids.push_back(ids[start * num_children + child]), parents.push_back(start + child / num_children);
        positions.push_back(origins[row] + tree.num_levels);
        tree.parents.push_back(parent < 0 ? -1 : tree.places[parent]);
        tree.places[node] = static_cast<int32_t>(tree.parents.size()) - 1;
      }
      going.push_back(row), indptr.push_back(indptr.back() + static_cast<int32_t>(next.size()));
      lens.push_back(first_step->kv_lens[row] + static_cast<int32_t>(tree.parents.size()));
      if (!tree.is_chain()) tree_parents.insert(tree_parents.end(), tree.parents.begin(), tree.parents.end());
      tree_indptr.push_back(static_cast<int32_t>(tree_parents.size()));
      next_level.push_back(std::move(next));
    }
    TORCH_CHECK(place == num, "a node behind each row of logits");
    if (going.empty()) return {at::cat(tokens), at::cat(shares)};
    const Tensor next = at::tensor(next_ids);
    if (table) {
      const Tensor hidden = outputs[0].view({-1, outputs[0].size(-1)}).index_select(0, at::tensor(parents));
      inputs = {at::cat({at::embedding(*table, next), hidden}, 1).unsqueeze(0)};
    } else {
      inputs = {next.unsqueeze(0)};
    }
    inputs.push_back(at::tensor(positions).unsqueeze(0));
    inputs.push_back(at::arange(next.numel(), ints));
    if (going.size() < active.size()) {  // pages of those rows alone
      step.page_indptr = {0}, step.pages.clear();
      for (const int64_t row : going) {
        const int32_t *pages = first_step->pages.data(), *starts = first_step->page_indptr.data() + row;
        step.pages.insert(step.pages.end(), pages + starts[0], pages + starts[1]);
        step.page_indptr.push_back(static_cast<int32_t>(step.pages.size()));
      }
    }
    step.query_indptr = std::move(indptr), step.kv_lens = std::move(lens), step.trees.reset();
    if (!tree_parents.empty()) {
      step.trees.emplace();
      step.trees->plan(step.kv_lens.data(), static_cast<int64_t>(going.size()), tree_indptr.data(), tree_parents.data());
    }
    active.swap(going), level.swap(next_level);
  }
}

}  // namespace
}  // namespace emssd
