// Checksums of bytes.

#include <cstring>

#include "kernels.h"

namespace emssd {

uint64_t checksum(const char* data, int64_t size) {
  constexpr int64_t kLanes = 64, kBlock = kLanes * sizeof(uint32_t);
  uint32_t lanes[kLanes];
  for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] = 0x9e3779b9u * (lane + 1);
  for (; size > 0; data += kBlock, size -= kBlock) {
    uint32_t words[kLanes] = {};
    if (size >= kBlock)
      std::memcpy(words, data, kBlock);
    else
      std::memcpy(words, data, size);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const uint32_t mixed = (lanes[lane] ^ words[lane]) * 0x85ebca6bu;
      lanes[lane] = mixed << 13 | mixed >> 19;  // or a pair of flipped signs would cancel
    }
  }
  uint64_t sum = 0;
  for (const uint32_t lane : lanes) sum = with_checksum(sum, lane);
  return sum;
}

}  // namespace emssd
