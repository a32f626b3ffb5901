// The choice of tokens, of PyTorch's tensors; see kernels.h.
#pragma once

#include "step.h"

namespace emssd {
namespace {

Logits logits_of(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1, "rows must be contiguous");
  return {type_of(logits), logits.const_data_ptr(), logits.size(0), logits.size(1), logits.stride(0)};
}

Tensor argmax(const Tensor& logits) {
  const Logits all = logits_of(logits);
  Tensor best = at::empty({all.rows}, logits.options().dtype(at::kLong));
  emssd::argmax(all, best.mutable_data_ptr<int64_t>());
  return best;
}

Tensor top(const Tensor& logits, int64_t k, double scale) {
  const Logits all = logits_of(logits);
  TORCH_CHECK(0 < k && k <= all.size && scale > 0, "k must be from 1 to the vocabulary, and the scale above 0");
  Tensor best = at::empty({2, all.rows, k}, logits.options().dtype(at::kDouble));
  emssd::top(all, k, scale, best.mutable_data_ptr<double>());
  return best;
}

void check_places(const Tensor& keys, const Tensor& positions) {
  for (const Tensor* each : {&keys, &positions}) {
    TORCH_CHECK(each->dim() == 1 && each->is_contiguous() && each->scalar_type() == at::kLong, "places must be int64");
  }
  TORCH_CHECK(keys.size(0) == positions.size(0), "each key has a position");
}

// rows, keys and positions [n] int64, warps [n, 4] double.
Places places_of(const Logits& logits, const Tensor& rows, const Tensor& keys, const Tensor& positions, const Tensor& warps) {
  TORCH_CHECK(logits.size < int64_t{1} << 31, "the vocabulary is too large");
  check_places(rows, keys), check_places(keys, positions);
  const int64_t num = rows.size(0);
  TORCH_CHECK(warps.dim() == 2 && warps.size(0) == num && warps.size(1) == 4 && warps.is_contiguous() &&
              warps.scalar_type() == at::kDouble, "each row has a temperature, top_k, top_p and min_p in float64");
  const int64_t* places = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < num; ++i) {
    TORCH_CHECK(0 <= places[i] && places[i] < logits.rows, "there is no row ", places[i]);
  }
  return {num, places, keys.const_data_ptr<int64_t>(), positions.const_data_ptr<int64_t>(), warps.const_data_ptr<double>()};
}

Tensor sample(const Tensor& logits, const Tensor& rows, const Tensor& keys, const Tensor& positions, const Tensor& warps) {
  const Logits all = logits_of(logits);
  const Places places = places_of(all, rows, keys, positions, warps);
  Tensor chosen = at::empty({places.num}, rows.options());
  emssd::sample(all, places, chosen.mutable_data_ptr<int64_t>());
  return chosen;
}

// Both come as doubles in one tensor [2, n, width], as the host wants them together.
Tensor top_draws(const Tensor& logits, const Tensor& rows, const Tensor& keys, const Tensor& positions, const Tensor& warps,
                 double error, int64_t width) {
  const Logits all = logits_of(logits);
  const Places places = places_of(all, rows, keys, positions, warps);
  TORCH_CHECK(width > 0 && error > 0, "the width must be at least 1, and the error above 0");
  Tensor found = at::empty({2, places.num, width}, warps.options());
  double* tokens = found.mutable_data_ptr<double>();
  emssd::top_draws(all, places, error, width, tokens, tokens + places.num * width);
  return found;
}

Tensor noise_bits(const Tensor& keys, const Tensor& positions, int64_t vocab_size) {
  check_places(keys, positions);
  Tensor bits = at::empty({keys.size(0), vocab_size}, keys.options());
  const Places places{keys.size(0), nullptr, keys.const_data_ptr<int64_t>(), positions.const_data_ptr<int64_t>(), nullptr};
  emssd::noise_bits(places, vocab_size, bits.mutable_data_ptr<int64_t>());
  return bits;
}

}  // namespace
}  // namespace emssd
