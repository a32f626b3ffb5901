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
  Tensor weight, bias;
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
      const int64_t size = (std::max(bytes, kChunk) + kLargePage - 1) / kLargePage * kLargePage;
      void* memory = std::aligned_alloc(kLargePage, size);
      TORCH_CHECK(memory, "no memory for ", size, " bytes of weights");
      madvise(memory, size, MADV_HUGEPAGE);  // what it returns does not matter
      chunk_ = at::from_blob(memory, {size}, [](void* gone) { std::free(gone); }, options), used_ = 0;
    }
    used_ += bytes;
    return chunk_.narrow(0, used_ - bytes, bytes);
  }

 private:
  static constexpr int64_t kLargePage = 1 << 21, kChunk = 16 * kLargePage;
  Tensor chunk_;
  int64_t used_ = 0;
};

// A module of which there is a compiled program: its linear layers, the program, and what the step that runs attends with.
struct Module {
  Weights weights;
  std::vector<Layer> linears;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> program;
  c10::intrusive_ptr<Step> step;  // none: attention is Python's
};

// `values` [size] in float32, zeros if there are none, and zeros behind them up to the end of a panel.
Tensor padded(const std::optional<Tensor>& values, int64_t size) {
  Tensor whole = at::zeros({(size + panel_width() - 1) / panel_width() * panel_width()}, at::kFloat);
  if (values) whole.narrow(0, 0, values->size(0)).copy_(*values);
  return whole;
}

Layer layer_of(Weights& memory, const Tensor& weight, const std::optional<Tensor>& bias) {
  Layer layer{};
  Linear& linear = layer.linear;
  if (weight.scalar_type() == at::kByte) {
    linear.type = Type::packed, linear.outputs = packed_of(weight.const_data_ptr<uint8_t>()).outputs, layer.weight = weight;
  } else {
    linear.type = type_of(weight);
    TORCH_CHECK(linear.type != Type::float64, "no kernel for ", weight.scalar_type());
    linear.outputs = weight.size(0), linear.in = weight.size(1);
    linear.pairs = takes_pairs() && linear.type != Type::float32 && linear.in % 2 == 0;
    const int64_t panels = (linear.outputs + panel_width() - 1) / panel_width();
    layer.weight = memory.take(panels * panel_inputs(linear) * panel_width() * weight.element_size()).zero_();
    to_panels(weight.const_data_ptr(), linear, layer.weight.mutable_data_ptr());
  }
  layer.bias = padded(bias, linear.outputs);
  linear.bias = layer.bias.const_data_ptr<float>(), linear.weights = layer.weight.const_data_ptr();
  return layer;
}

// values [out, in] int8 of 4 or 8 bits, scale and minimum [out, groups]: bytes for `packed_linear` and `packed_embedding`.
Tensor pack(const Tensor& values, const Tensor& scale, const std::optional<Tensor>& minimum, int64_t bits) {
  static std::mutex lock;
  static Weights memory;
  TORCH_CHECK(values.scalar_type() == at::kChar && values.dim() == 2, "packed weights are integers [out, in]");
  const int64_t out = values.size(0), in = values.size(1);
  const bool has_floats = scale.scalar_type() != at::kHalf;
  const int32_t group = has_floats && !minimum ? 16 : 32;
  const Packed packed{static_cast<int32_t>(bits), group, has_floats, minimum.has_value(), out, in};
  const int64_t bytes = packed_bytes(packed);
  const auto fits = [&](const Tensor& part, at::ScalarType type) {
    return part.scalar_type() == type && part.sizes() == at::IntArrayRef({out, (in + group - 1) / group});
  };
  TORCH_CHECK(bytes && fits(scale, has_floats ? at::kFloat : at::kHalf) && (!minimum || fits(*minimum, at::kFloat)),
              "no kernel for weights of ", bits, " bits ", values.sizes(), " with scales ", scale.sizes(), " in ",
              scale.scalar_type());
  const Tensor whole = values.contiguous(), scales = scale.contiguous();
  const Tensor minimums = minimum ? minimum->contiguous() : Tensor();
  Tensor result;
  {
    const std::lock_guard<std::mutex> guard(lock);
    result = memory.take(bytes);
  }
  emssd::pack(packed, whole.const_data_ptr<int8_t>(), scales.const_data_ptr(),
              minimum ? minimums.const_data_ptr<float>() : nullptr, result.mutable_data_ptr<uint8_t>());
  return result;
}

// The result [..., outputs] of use(rows, how many, result) for rows [..., in].
template <class Use>
Tensor product(const Tensor& input, int64_t outputs, const Use& use) {
  const Tensor rows = input.contiguous();
  auto sizes = rows.sizes().vec();
  sizes.back() = outputs;
  Tensor out = at::empty(sizes, rows.options());
  if (out.numel() > 0) use(rows.const_data_ptr(), out.numel() / outputs, out.mutable_data_ptr());
  return out;
}

// input [..., in] by a packed weight, plus a bias as `padded` makes it: [..., outputs].
Tensor packed_product(const Tensor& input, const Tensor& weight, const Tensor& bias, int64_t outputs) {
  const auto* bytes = weight.const_data_ptr<uint8_t>();
  const int64_t in = packed_of(bytes).in;
  const Type type = type_of(input);
  TORCH_CHECK(type == Type::float32 || type == Type::bfloat16, "no kernel for ", input.scalar_type());
  TORCH_CHECK(input.size(-1) == in && outputs == packed_of(bytes).outputs, "inputs of ", input.size(-1),
              " numbers for a packed weight of ", in);
  return product(input, outputs, [&](const void* rows, int64_t count, void* out) {
    emssd::linear(bytes, bias.const_data_ptr<float>(), type, rows, count, out);
  });
}

Tensor packed_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias, int64_t outputs) {
  return packed_product(input, weight, padded(bias, outputs), outputs);
}

// The rows [..., width] of a packed weight at the indices [...], in float32.
Tensor packed_embedding(const Tensor& indices, const Tensor& weight, int64_t width) {
  const Packed packed = packed_of(weight.const_data_ptr<uint8_t>());
  const Tensor rows = indices.to(at::kLong).contiguous();
  const auto* first = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows.numel(); ++i) {
    TORCH_CHECK_INDEX(0 <= first[i] && first[i] < packed.outputs, "no row ", first[i], " of ", packed.outputs);
  }
  TORCH_CHECK(width == packed.in, "rows of ", width, " numbers of a packed weight of ", packed.in);
  auto sizes = rows.sizes().vec();
  sizes.push_back(width);
  Tensor out = at::empty(sizes, at::kFloat);
  rows_of(weight.const_data_ptr<uint8_t>(), first, rows.numel(), out.mutable_data_ptr<float>());
  return out;
}

// input [..., in] by a model's own weight [out, in], of any layout: [..., out].
Tensor plain_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  TORCH_CHECK(weight.dim() == 2 && input.size(-1) == weight.size(1), "inputs of ", input.size(-1), " for a weight of ",
              weight.sizes());
  TORCH_CHECK(input.scalar_type() == weight.scalar_type() && (!bias || bias->scalar_type() == weight.scalar_type()),
              "inputs, weight and bias must be of one type");
  const Tensor own = weight.stride(1) == 1 || weight.stride(0) == 1 ? weight : weight.contiguous();
  const std::optional<Tensor> added = bias ? std::optional(bias->contiguous()) : std::nullopt;
  const PlainLinear layer{type_of(own), own.const_data_ptr(), added ? added->const_data_ptr() : nullptr,
                          own.stride(0), own.stride(1), own.size(1), own.size(0)};
  return product(input, layer.outputs, [&](const void* rows, int64_t count, void* out) {
    emssd::linear(layer, rows, count, out);
  });
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

// Adds a layer: weight [out, in], or the bytes of `pack`; bias [out] or none. Layers are numbered from 0.
void add_weight(const Tensor& handle, const Tensor& weight, const std::optional<Tensor>& bias) {
  Module& module = module_of(handle);
  module.linears.push_back(layer_of(module.weights, weight.contiguous(), bias));
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
  const auto& [layer, weight, bias] = module_of(handle).linears.at(index);
  if (layer.type == Type::packed) return packed_product(input, weight, bias, layer.outputs);
  TORCH_CHECK(type_of(input) == layer.type, "no kernel for ", input.scalar_type());
  TORCH_CHECK(input.size(-1) == layer.in, "inputs of ", input.size(-1), " numbers for a layer of ", layer.in);
  return product(input, layer.outputs, [&, &layer = layer](const void* rows, int64_t count, void* out) {
    emssd::linear(layer, rows, count, out);
  });
}

// The attention of a layer of a compiled program: of the step that runs, or in Python if that is not known here.
Tensor attend_layer(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& handle, int64_t layer) {
  if (const auto& step = module_of(handle).step) return attend(step, query, key, value, layer);
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

std::vector<Tensor> run(Module& module, const Tensor& handle, std::vector<Tensor> inputs, const c10::intrusive_ptr<Step>& step) {
  struct Attending {  // also where the program throws
    Module& module;
    ~Attending() { module.step.reset(); }
  } attending{module};
  module.step = step;
  inputs.push_back(handle);
  return module.program->boxed_run(std::move(inputs));
}

// Runs the program of a module once; attention is Python's.
std::vector<Tensor> run_program(const Tensor& handle, std::vector<Tensor> inputs) {
  return run(module_of(handle), handle, std::move(inputs), nullptr);
}

// Runs the program of a module once, on inputs without padding; attention is done here.
std::vector<Tensor> run_step(const c10::intrusive_ptr<Step>& step, const Tensor& handle, std::vector<Tensor> inputs) {
  return run(module_of(handle), handle, std::move(inputs), step);
}

}  // namespace
}  // namespace emssd
