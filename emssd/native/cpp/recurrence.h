// Recurrences of PyTorch's tensors; see kernels.h.
#pragma once

#include "step.h"

namespace emssd {
namespace {

// inputs [tokens, width]: key [heads, k], value [heads, v], decay [heads, k or 1, v or 1] and beta [heads] or none.
// query [fed, heads, k]; states [slots, heads, k, v]; rates [k, v]. tokens [2, length] int64: places of inputs and of
// outputs, -1 for none. paths [paths, 6] int64: the state before, -1 for zeros; their tokens, from and to; after how many
// the state is saved, and where; how many the path before has computed. Returns [fed, heads, v], with zeros where no path has an output.
Tensor recur(const Tensor& inputs, const Tensor& query, Tensor& states, const std::optional<Tensor>& rates, const Tensor& tokens,
             const Tensor& paths, int64_t decay_keys, int64_t decay_values) {
  const int64_t heads = states.size(1), keys = states.size(2), values = states.size(3), width = inputs.size(1);
  const int64_t rest = width - heads * (keys + values + decay_keys * decay_values);
  for (const Tensor* each : {&inputs, &query, static_cast<const Tensor*>(&states), &tokens, &paths}) {
    TORCH_CHECK(each->is_contiguous(), "tensors of a recurrence are contiguous");
  }
  TORCH_CHECK((rest == 0 || rest == heads) && query.size(1) == heads && query.size(2) == keys, "shapes of a recurrence");
  TORCH_CHECK(inputs.scalar_type() == states.scalar_type() && query.scalar_type() == states.scalar_type() &&
              (!rates || (rates->scalar_type() == states.scalar_type() && rates->is_contiguous())), "one dtype");
  TORCH_CHECK(states.scalar_type() == at::kFloat || states.scalar_type() == at::kDouble, "states are float32 or float64");
  Tensor out = at::zeros({query.size(0), heads, values}, query.options());
  const int64_t *places = tokens.const_data_ptr<int64_t>(), *all = paths.const_data_ptr<int64_t>(), length = tokens.size(1);
  std::vector<Path> followed;
  for (int64_t i = 0; i < paths.size(0); ++i) {
    const int64_t* path = all + 6 * i;
    TORCH_CHECK(0 <= path[1] && path[1] <= path[2] && path[2] <= length && path[0] < states.size(0) && path[4] < states.size(0) &&
                    path[5] <= (i == 0 ? 0 : path[-4] - path[-5]) && path[5] < std::max<int64_t>(path[2] - path[1], 1),
                "paths lie within the step");
    followed.push_back({path[0], places + path[1], places + length + path[1], path[2] - path[1], path[3], path[4], path[5]});
  }
  const Recurrence layer{type_of(states), inputs.const_data_ptr(), query.const_data_ptr(), states.mutable_data_ptr(),
                         rates ? rates->const_data_ptr() : nullptr, out.mutable_data_ptr(), heads, keys, values, width,
                         decay_keys, decay_values, rest > 0};
  emssd::recur(layer, followed.data(), static_cast<int64_t>(followed.size()));
  return out;
}

}  // namespace
}  // namespace emssd
