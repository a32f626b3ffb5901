// Checksums of PyTorch's tensors; see kernels.h.
#pragma once

#include <ATen/ops/zeros.h>

#include "step.h"

namespace emssd {
namespace {

// Of each tensor's elements, whatever their type, in the order of their memory: [tensors].
Tensor checksums(const std::vector<Tensor>& tensors) {
  constexpr int64_t kPiece = 1 << 18;
  std::vector<Tensor> dense;
  std::vector<std::pair<const char*, int64_t>> pieces;
  std::vector<int64_t> owners;
  for (const Tensor& tensor : tensors) {
    dense.push_back(tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous());
    const char* data = static_cast<const char*>(dense.back().const_data_ptr());
    const int64_t size = dense.back().nbytes();
    for (int64_t at = 0; at < size; at += kPiece) {
      pieces.emplace_back(data + at, std::min(kPiece, size - at));
      owners.push_back(dense.size() - 1);
    }
  }
  std::vector<uint64_t> sums(pieces.size());
  parallel_for(pieces.size(), 4, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) sums[piece] = checksum(pieces[piece].first, pieces[piece].second);
  });
  Tensor found = at::zeros({static_cast<int64_t>(tensors.size())}, at::kLong);
  int64_t* to = found.mutable_data_ptr<int64_t>();
  for (size_t piece = 0; piece < pieces.size(); ++piece) to[owners[piece]] = with_checksum(to[owners[piece]], sums[piece]);
  return found;
}

}  // namespace
}  // namespace emssd
