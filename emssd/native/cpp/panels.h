// What linear layers share: outputs whose weights lie together as a panel, and AMX tiles.
#pragma once

#include <algorithm>

#include "kernels.h"
#include "vectors.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__)
#define TILES
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace emssd {
namespace {

constexpr int kLanes = Floats::kOfPart;
constexpr int kVectors = std::max(2, Floats::kParts);
constexpr int64_t kPanel = kVectors * kLanes;  // outputs whose weights lie together
constexpr int64_t kAhead = 4608;               // bytes that are fetched ahead; measured
constexpr int64_t kTaskSize = 1 << 15;         // multiplications that are worth a task
constexpr int64_t kTile = 16;                  // rows, cells and outputs of a tile

using Sums = Floats::Part;
using SumBits = Bits::Part;
typedef uint16_t SumHalves __attribute__((vector_size(2 * kLanes)));

#ifdef TILES
// What a tile holds: lines, and bytes of each. Tiles are configured before they are used, by each thread, and released.
struct TileShapes {
  uint8_t palette = 1, start_line = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t lines[16] = {};
};

// Compilers do not know what loading a tile reads: nothing that is written before this may be written after it.
INLINE void all_written() { asm volatile("" ::: "memory"); }

// Whether the system lets this process use tiles: it must be asked, once.
inline bool tiles_allowed() {
  constexpr long kAskForPermission = 0x1023, kTileData = 18;
  static const bool allowed = syscall(SYS_arch_prctl, kAskForPermission, kTileData) == 0;
  return allowed;
}

// The tiles of a thread, for as many rows as it multiplies: 0 to 3 are sums, 4 and 5 inputs, 6 and 7 weights. 2, 3 and 5
// have the rows from the seventeenth on.
class TilesOfThread {
 public:
  ~TilesOfThread() {
    if (rows_) _tile_release();
  }

  // weight_lines: of 64 bytes, with the weights of 16 outputs; as many numbers has each input.
  void configure(int64_t rows, int64_t weight_lines) {
    if (rows == rows_) return;
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
      const bool second = tile == 2 || tile == 3 || tile == 5, inputs = tile == 4 || tile == 5;
      shapes.bytes[tile] = inputs ? 4 * weight_lines : 64;
      shapes.lines[tile] = tile >= 6 ? weight_lines : std::clamp<int64_t>(second ? rows - kTile : rows, 1, kTile);
    }
    all_written();
    _tile_loadconfig(&shapes);
    rows_ = rows;
  }

 private:
  int64_t rows_ = 0;
};
#endif

// A panel's sums plus `bias`, to the first `outputs` of the row at `to`.
template <class T>
void finish(const float* sums, const float* bias, int64_t outputs, T* to) {
  for (int64_t first = 0; first < std::min(outputs, kPanel); first += kPage) {
    const Floats values = load<Floats>(sums + first) + load<Floats>(bias + first);
    if (outputs - first >= kPage) {
      Lane<T>::narrow(values, to + first);
      continue;
    }
    T block[kPage];
    Lane<T>::narrow(values, block);
    std::copy_n(block, outputs - first, to + first);
  }
}

}  // namespace
}  // namespace emssd
