// AMX in plain C++, for processors that have AVX-512 with bfloat16 and no tiles: given to the compiler with -include.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>

#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbssd
#undef _tile_dpbf16ps
#define syscall(...) 0L  // the system allows tiles

namespace emulated {

struct Tiles {
  uint16_t bytes[8];
  uint8_t lines[8];
  alignas(64) uint8_t data[8][16][64];
};
inline thread_local Tiles tiles;

inline void configure(const void* shapes) {  // 16 bytes, 16 widths of 2 bytes, 16 numbers of lines
  const auto* from = static_cast<const uint8_t*>(shapes);
  std::memcpy(tiles.bytes, from + 16, sizeof(tiles.bytes));
  std::memcpy(tiles.lines, from + 48, sizeof(tiles.lines));
  std::memset(tiles.data, 0, sizeof(tiles.data));
}

inline void load(int tile, const void* from, int64_t step) {
  std::memset(tiles.data[tile], 0, sizeof(tiles.data[tile]));
  for (int line = 0; line < tiles.lines[tile]; ++line) {
    std::memcpy(tiles.data[tile][line], static_cast<const uint8_t*>(from) + line * step, tiles.bytes[tile]);
  }
}

inline void store(int tile, void* to, int64_t step) {
  for (int line = 0; line < tiles.lines[tile]; ++line) {
    std::memcpy(static_cast<uint8_t*>(to) + line * step, tiles.data[tile][line], tiles.bytes[tile]);
  }
}

inline void zero(int tile) { std::memset(tiles.data[tile], 0, sizeof(tiles.data[tile])); }

inline void multiply_bytes(int sums, int inputs, int weights) {
  for (int line = 0; line < tiles.lines[sums]; ++line) {
    auto* to = reinterpret_cast<int32_t*>(tiles.data[sums][line]);
    for (int quad = 0; quad < tiles.bytes[inputs] / 4; ++quad) {
      for (int i = 0; i < tiles.bytes[sums]; ++i) {
        to[i / 4] += static_cast<int8_t>(tiles.data[inputs][line][4 * quad + i % 4]) *
                     static_cast<int8_t>(tiles.data[weights][quad][i]);
      }
    }
  }
}

inline void multiply_pairs(int sums, int inputs, int weights) {
  for (int line = 0; line < tiles.lines[sums]; ++line) {
    __m512 sum = _mm512_load_ps(tiles.data[sums][line]);
    for (int pair = 0; pair < tiles.bytes[inputs] / 4; ++pair) {
      int32_t by;
      std::memcpy(&by, tiles.data[inputs][line] + 4 * pair, 4);
      sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_load_si512(tiles.data[weights][pair]), (__m512bh)_mm512_set1_epi32(by));
    }
    _mm512_store_ps(tiles.data[sums][line], sum);
  }
}

}  // namespace emulated

#define _tile_loadconfig(shapes) emulated::configure(shapes)
#define _tile_release() ((void)0)
#define _tile_loadd(tile, from, step) emulated::load(tile, from, step)
#define _tile_stored(tile, to, step) emulated::store(tile, to, step)
#define _tile_zero(tile) emulated::zero(tile)
#define _tile_dpbssd(sums, inputs, weights) emulated::multiply_bytes(sums, inputs, weights)
#define _tile_dpbf16ps(sums, inputs, weights) emulated::multiply_pairs(sums, inputs, weights)
