// Modules: their linear layers, and the compiled programs that run them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>

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

}  // namespace
}  // namespace emssd
