// What attention reads in a step, as PyTorch's objects.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <vector>

#include "kernels.h"
#include "tree.h"

namespace emssd {
namespace {

using at::Tensor;
using Integers = std::vector<int64_t>;

Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kBFloat16: return Type::bfloat16;
    case at::kFloat: return Type::float32;
    case at::kDouble: return Type::float64;
    default: TORCH_CHECK(false, "no kernel for ", tensor.scalar_type());
  }
}

std::vector<int32_t> narrow(const Integers& values) { return {values.begin(), values.end()}; }

// The attention of one step, made once: `torch.classes.emssd_native.Step`; see emssd/attention/native.py.
struct Step : torch::CustomClassHolder {
  std::vector<Tensor> keys, values;
  std::vector<int32_t> query_indptr, kv_lens, page_indptr, pages;
  std::vector<double> scales;
  Integers windows;
  std::vector<double> softcaps;
  std::vector<std::optional<Tensor>> sinks;
  std::optional<Trees> trees;

  Step(std::vector<Tensor> keys, std::vector<Tensor> values, const Integers& query_indptr, const Integers& kv_lens,
       const Integers& page_indptr, const Integers& pages, const std::optional<Integers>& tree_indptr,
       const std::optional<Integers>& parents, std::vector<double> scales, Integers windows, std::vector<double> softcaps,
       std::vector<std::optional<Tensor>> sinks)
      : keys(std::move(keys)), values(std::move(values)), query_indptr(narrow(query_indptr)), kv_lens(narrow(kv_lens)),
        page_indptr(narrow(page_indptr)), pages(narrow(pages)), scales(std::move(scales)), windows(std::move(windows)),
        softcaps(std::move(softcaps)), sinks(std::move(sinks)) {
    const size_t rows = kv_lens.size();
    TORCH_CHECK(query_indptr.size() == rows + 1 && page_indptr.size() == rows + 1 &&
                static_cast<int64_t>(pages.size()) >= page_indptr.back(), "each row has its tokens and pages");
    if (!tree_indptr) return;
    TORCH_CHECK(parents && tree_indptr->size() == rows + 1 && static_cast<int64_t>(parents->size()) >= tree_indptr->back(),
                "each row has its tree");
    trees.emplace();
    trees->plan(this->kv_lens.data(), static_cast<int64_t>(rows), narrow(*tree_indptr).data(), narrow(*parents).data());
  }
};

// Stores the keys and values of a step's new tokens, and attends. query [nnz, heads, key_dim], key [nnz, kv_heads, key_dim],
// value [nnz, kv_heads, value_dim]. Returns [nnz, heads, value_dim].
Tensor attend(const c10::intrusive_ptr<Step>& of, const Tensor& query, const Tensor& key, const Tensor& value, int64_t layer) {
  const Step& step = *of;
  TORCH_CHECK(query.stride(2) == 1 && key.stride(2) == 1 && value.stride(2) == 1, "heads must be contiguous");
  const Tensor &keys = step.keys.at(layer), &values = step.values.at(layer);
  const auto type = query.scalar_type();
  TORCH_CHECK(key.scalar_type() == type && value.scalar_type() == type && keys.scalar_type() == type &&
              values.scalar_type() == type, "queries, keys, values and the pool must be of one type");
  const std::optional<Tensor>& sinks = step.sinks.at(layer);
  TORCH_CHECK(!sinks || sinks->scalar_type() == (type == at::kDouble ? type : at::kFloat), "sinks must be of the type of sums");
  Tensor out = at::empty({query.size(0), query.size(1), value.size(2)}, query.options());
  Attention all{};
  all.type = type_of(query);
  all.query = query.const_data_ptr(), all.key = key.const_data_ptr(), all.value = value.const_data_ptr();
  all.query_token = query.stride(0), all.query_head = query.stride(1);
  all.key_token = key.stride(0), all.key_head = key.stride(1);
  all.value_token = value.stride(0), all.value_head = value.stride(1);
  all.keys = keys.mutable_data_ptr(), all.values = values.mutable_data_ptr(), all.out = out.mutable_data_ptr();
  all.query_indptr = step.query_indptr.data(), all.kv_lens = step.kv_lens.data();
  all.page_indptr = step.page_indptr.data(), all.pages = step.pages.data();
  all.num_rows = static_cast<int64_t>(step.kv_lens.size());
  all.num_kv_heads = key.size(1), all.group = query.size(1) / key.size(1);
  all.key_cells = keys.size(2), all.key_dim = key.size(2), all.value_dim = value.size(2), all.value_lanes = values.size(3);
  all.scale = step.scales.at(layer), all.softcap = step.softcaps.at(layer), all.window = step.windows.at(layer);
  all.sinks = sinks ? sinks->const_data_ptr() : nullptr;
  all.trees = step.trees ? &*step.trees : nullptr;
  emssd::attend(all);
  return out;
}

// pages: the pool's keys or values; sources and targets [n] int64.
void move(Tensor& pages, const Tensor& sources, const Tensor& targets, bool are_values) {
  TORCH_CHECK(sources.numel() == targets.numel(), "as many sources as targets");
  TORCH_CHECK(sources.is_contiguous() && targets.is_contiguous() && pages.is_contiguous(), "tensors must be contiguous");
  const Pages all{type_of(pages), pages.mutable_data_ptr(), pages.size(1), pages.size(2), pages.size(3), pages.size(4), are_values};
  emssd::move(all, sources.const_data_ptr<int64_t>(), targets.const_data_ptr<int64_t>(), sources.numel());
}

}  // namespace
}  // namespace emssd
