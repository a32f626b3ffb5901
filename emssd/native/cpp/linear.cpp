// Linear layers: weights stream through once for as many rows as there are registers for, and each output is one sum in order
// of the inputs.

#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

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
constexpr int kMaxRows = kRegister == 64 ? 14 : kRegister == 32 ? 6 : 2;  // rows that share one pass over a panel
constexpr int64_t kPanel = kVectors * kLanes;  // outputs whose weights lie together, as [cell][output]
constexpr int64_t kAhead = 4608, kFarAhead = 9216;  // bytes that are fetched ahead; measured, as is which rows are many
constexpr int kManyRows = 6;                   // so many compute for longer than a nearer cache keeps what is fetched
constexpr int64_t kTaskSize = 1 << 15;         // multiplications that are worth a task

using Sums = Floats::Part;
using SumBits = Bits::Part;
typedef uint16_t SumHalves __attribute__((vector_size(2 * kLanes)));
typedef int8_t SumBytes __attribute__((vector_size(kLanes)));

// How the weights of a layer are stored, as cells of kWidth inputs, and multiplied: `of` is a vector of weights ready for any
// number of rows. Inputs are floats, but for pairs.
struct FloatCells {
  using Cell = float;
  using Input = float;
  using Sum = float;
  static constexpr int64_t kWidth = 1;
  static INLINE Sums of(const Cell* cells) { return load<Sums>(cells); }
  static INLINE Sums multiply_add(Sums sum, Sums weights, Input by) { return sum + weights * by; }
};

struct DoubleCells {
  using Cell = double;
  using Input = double;
  using Sum = double;
  static constexpr int64_t kWidth = 1;
  static INLINE Doubles::Part of(const Cell* cells) { return load<Doubles::Part>(cells); }
  static INLINE Doubles::Part multiply_add(Doubles::Part sum, Doubles::Part weights, Input by) { return sum + weights * by; }
};

struct HalfCells : FloatCells {
  using Cell = uint16_t;
  static INLINE Sums of(const Cell* cells) {
    return (Sums)(__builtin_convertvector(load<SumHalves>(cells), SumBits) << 16);
  }
};

struct ByteCells : FloatCells {
  using Cell = int8_t;
  static INLINE Sums of(const Cell* cells) {
#if defined(__AVX512F__)
    return (Sums)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(cells))));
#elif defined(__AVX2__)
    return (Sums)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(cells))));
#else
    return __builtin_convertvector(load<SumBytes>(cells), Sums);
#endif
  }
};

#ifdef __AVX512BF16__
struct PairCells {
  using Cell = uint32_t;
  using Input = uint32_t;
  using Sum = float;
  static constexpr int64_t kWidth = 2;
  static INLINE __m512bh of(const Cell* cells) { return (__m512bh)_mm512_loadu_si512(cells); }
  static INLINE Sums multiply_add(Sums sum, __m512bh weights, Input by) {
    return (Sums)_mm512_dpbf16_ps((__m512)sum, weights, (__m512bh)_mm512_set1_epi32(by));
  }
};

// Bytes are numbers of bfloat16, too, and its products are twice as many at a time.
struct BytePairCells : PairCells {
  using Cell = uint16_t;
  static INLINE __m512bh of(const Cell* cells) {
    const auto part = [](const Cell* from) {
      return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
    };
    return _mm512_cvtne2ps_pbh(part(cells + 8), part(cells));
  }
};

// The same weights by inputs in float32, one after the other.
struct FloatBytePairCells {
  using Cell = uint16_t;
  struct Input {
    float first, second;
  };
  using Sum = float;
  static constexpr int64_t kWidth = 2;
  struct Weights {
    Sums first, second;
  };
  static INLINE Weights of(const Cell* cells) {
    const __m512i both = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(cells)));
    return {(Sums)_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(both, 24), 24)),
            (Sums)_mm512_cvtepi32_ps(_mm512_srai_epi32(both, 8))};
  }
  static INLINE Sums multiply_add(Sums sum, Weights weights, Input by) {
    sum += weights.first * by.first;
    return sum + weights.second * by.second;
  }
};
constexpr bool kPairs = true;
#else
using PairCells = HalfCells;
using BytePairCells = ByteCells;
using FloatBytePairCells = ByteCells;
constexpr bool kPairs = false;
#endif

constexpr int64_t kTile = 16;  // rows, cells and outputs of a tile
#ifdef TILES
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif

// The cells of a panel: pairs fill tiles, zeros behind the last.
template <class Kind>
constexpr int64_t cells_of(int64_t in) {
  const int64_t cells = in / Kind::kWidth;
  return kTiles && Kind::kWidth == 2 ? (cells + kTile - 1) / kTile * kTile : cells;
}

// A panel of a kind with its own sums: as many vectors, of as many numbers as a register holds.
template <class Kind>
constexpr int64_t kLanesOf = Wide<typename Kind::Sum>::kOfPart;
template <class Kind>
constexpr int64_t kPanelOf = kVectors * kLanesOf<Kind>;

// weight [out, cells] as [panels, all cells, kPanel], in memory that holds zeros.
template <class Cell>
void panels_of(const Cell* from, int64_t out, int64_t cells, int64_t all_cells, Cell* to) {
  parallel_for((out + kPanel - 1) / kPanel, 1, [&](int64_t begin, int64_t end) {
    for (int64_t output = begin * kPanel; output < std::min(end * kPanel, out); ++output) {
      Cell* panel = to + output / kPanel * all_cells * kPanel + output % kPanel;
      for (int64_t cell = 0; cell < cells; ++cell) panel[cell * kPanel] = from[output * cells + cell];
    }
  });
}

// What a pass over a panel fetches beside it: with each cell, `step` bytes on from `from`.
struct Ahead {
  const char* from;
  int64_t step;
};

// N rows of input, as [cells, N], by a panel: sums [N, kPanel].
template <class Kind, int N>
void multiply_panel(const typename Kind::Input* input, const typename Kind::Cell* panel, int64_t cells, Ahead ahead,
                    typename Kind::Sum* to) {
  using Sums = typename Wide<typename Kind::Sum>::Part;
  constexpr int64_t kLanes = kLanesOf<Kind>, kPanel = kPanelOf<Kind>;
  constexpr int kNear = N < kManyRows ? 3 : 2;  // which cache
  Sums sum[N][kVectors];
#pragma GCC unroll 16
  for (int row = 0; row < N; ++row) {
#pragma GCC unroll 16
    for (int vector = 0; vector < kVectors; ++vector) sum[row][vector] = Sums{};
  }
#pragma GCC unroll 1
  for (int64_t cell = 0; cell < cells; ++cell) {
    const auto* place = panel + cell * kPanel;
    __builtin_prefetch(ahead.from + cell * ahead.step, 0, kNear);
    if (sizeof(*place) * kPanel > 64) __builtin_prefetch(ahead.from + cell * ahead.step + 64, 0, kNear);
    decltype(Kind::of(place)) weights[kVectors];
#pragma GCC unroll 16
    for (int vector = 0; vector < kVectors; ++vector) weights[vector] = Kind::of(place + vector * kLanes);
#pragma GCC unroll 16
    for (int row = 0; row < N; ++row) {
#pragma GCC unroll 16
      for (int vector = 0; vector < kVectors; ++vector) {
        sum[row][vector] = Kind::multiply_add(sum[row][vector], weights[vector], input[cell * N + row]);
      }
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < N; ++row) {
#pragma GCC unroll 16
    for (int vector = 0; vector < kVectors; ++vector) {
      std::memcpy(to + row * kPanel + vector * kLanes, &sum[row][vector], sizeof(Sums));
    }
  }
}

template <class Kind, int... kRows>
auto panel_kernels(std::integer_sequence<int, kRows...>) {
  return std::array{&multiply_panel<Kind, kRows + 1>...};
}

// Rows by panels in vectors: a kernel for each number of rows.
template <class K>
struct Vectors {
  using Kind = K;
  using Input = typename Kind::Input;
  static constexpr int64_t kMostRows = kMaxRows, kMostCells = std::numeric_limits<int64_t>::max();
  static constexpr int64_t ahead(int64_t count) { return count < kManyRows ? kAhead : kFarAhead; }

  // Rows [count, in] as [cells, count].
  template <class T>
  static void lay_out(const T* rows, int64_t count, int64_t in, int64_t, Input* to) {
    const int64_t cells = in / Kind::kWidth;
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t cell = 0; cell < cells; ++cell) {
        if constexpr (std::is_floating_point_v<Input>) {
          to[cell * count + row] = static_cast<Input>(rows[row * cells + cell]);
        } else {
          std::memcpy(&to[cell * count + row], rows + (row * cells + cell) * 2, sizeof(Input));
        }
      }
    }
  }

  void operator()(const Input* input, int64_t count, const typename Kind::Cell* panel, int64_t cells, int64_t, int64_t,
                  Ahead ahead, typename Kind::Sum* to) {
    static const auto kernels = panel_kernels<Kind>(std::make_integer_sequence<int, kMaxRows>{});
    kernels[count - 1](input, panel, cells, ahead, to);
  }
};

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
bool tiles_allowed() {
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

// Rows by panels in tiles: up to 32 rows, 16 cells at a time.
template <class K>
struct Tiles {
  using Kind = K;
  using Input = uint32_t;
  using Cell = typename Kind::Cell;
  static constexpr int64_t kMostRows = 2 * kTile, kMostCells = 512;  // with which a part of a panel stays in a near cache
  static constexpr int64_t ahead(int64_t) { return kAhead; }
  TilesOfThread tiles;

  // Rows [count, in] as [cells / 16, count, 16], in memory that holds zeros.
  static void lay_out(const BFloat16* rows, int64_t count, int64_t in, int64_t, Input* to) {
    constexpr int64_t kInputs = kTile * Kind::kWidth;
    for (int64_t row = 0; row < count; ++row) {
      for (int64_t first = 0; first < in; first += kInputs) {
        std::memcpy(to + (first / kInputs * count + row) * kTile, rows + row * in + first,
                    std::min(kInputs, in - first) * sizeof(BFloat16));
      }
    }
  }

  // Cells [begin, end) of a panel; sums go on from those at `to`, if `begin` is not 0.
  template <bool kTwice>
  static void run(const Input* input, int64_t count, const Cell* panel, int64_t begin, int64_t end, Ahead ahead, float* to) {
    constexpr int64_t kLine = kPanel * sizeof(float), kInputLine = kTile * sizeof(Input);
    alignas(64) uint32_t converted[kTile * kPanel];
    if (begin == 0) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, to, kLine);
      _tile_loadd(1, to + kTile, kLine);
      if (kTwice) {
        _tile_loadd(2, to + kTile * kPanel, kLine);
        _tile_loadd(3, to + kTile * kPanel + kTile, kLine);
      }
    }
    for (int64_t cell = begin; cell < end; cell += kTile) {
      for (int64_t byte = 0; byte < kTile * ahead.step; byte += 64) {
        __builtin_prefetch(ahead.from + cell * ahead.step + byte, 0, 3);
      }
      const void* weights = panel + cell * kPanel;
      if constexpr (sizeof(Cell) < sizeof(Input)) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < kTile * kPanel; i += kLanes) {
          _mm512_store_si512(converted + i, (__m512i)Kind::of(panel + cell * kPanel + i));
        }
        weights = converted;
        all_written();
      }
      _tile_loadd(4, input + cell * count, kInputLine);
      _tile_loadd(6, weights, kLine);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, static_cast<const float*>(weights) + kTile, kLine);
      _tile_dpbf16ps(1, 4, 7);
      if (kTwice) {
        _tile_loadd(5, input + cell * count + kTile * kTile, kInputLine);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, to, kLine);
    _tile_stored(1, to + kTile, kLine);
    if (kTwice) {
      _tile_stored(2, to + kTile * kPanel, kLine);
      _tile_stored(3, to + kTile * kPanel + kTile, kLine);
    }
  }

  void operator()(const Input* input, int64_t count, const Cell* panel, int64_t, int64_t begin, int64_t end, Ahead ahead,
                  float* to) {
    tiles.configure(count, kTile);
    count > kTile ? run<true>(input, count, panel, begin, end, ahead, to)
                  : run<false>(input, count, panel, begin, end, ahead, to);
  }
};
#endif

// A panel's sums, times `scale` if there is one, plus `bias`, to the first `outputs` of the row at `to`.
template <class T>
void finish(const float* sums, const float* scale, const float* bias, int64_t outputs, T* to) {
  for (int64_t first = 0; first < std::min(outputs, kPanel); first += kPage) {
    Floats values = load<Floats>(sums + first);
    if (scale) values *= load<Floats>(scale + first);
    values += load<Floats>(bias + first);
    if (outputs - first >= kPage) {
      Lane<T>::narrow(values, to + first);
      continue;
    }
    T block[kPage];
    Lane<T>::narrow(values, block);
    std::copy_n(block, outputs - first, to + first);
  }
}

void finish(const double* sums, const double*, const double* bias, int64_t outputs, double* to) {
  for (int64_t i = 0; i < std::min(outputs, kPanelOf<DoubleCells>); ++i) to[i] = sums[i] + bias[i];
}

// Rows [num_rows, in] by all panels: [num_rows, outputs]. panel_at(panel) gives the cells of one, on the thread that asks.
template <class Way, class T, class PanelAt>
void multiply_by(const T* rows, int64_t num_rows, int64_t in, int64_t outputs, const typename Way::Kind::Sum* scale,
                 const typename Way::Kind::Sum* bias, T* to, const PanelAt& panel_at) {
  using Kind = typename Way::Kind;
  constexpr int64_t kPanel = kPanelOf<Kind>;
  constexpr int64_t kCellBytes = kPanel * sizeof(typename Kind::Cell);
  const int64_t cells = cells_of<Kind>(in), passes = (num_rows + Way::kMostRows - 1) / Way::kMostRows;
  const int64_t share = (num_rows + passes - 1) / passes, most = passes > 1 ? std::min(Way::kMostCells, cells) : cells;
  std::vector<typename Way::Input> inputs(num_rows * cells);
  parallel_for((num_rows + share - 1) / share, kTaskSize / (share * in) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * share; row < std::min(end * share, num_rows); row += share) {
      Way::lay_out(rows + row * in, std::min(share, num_rows - row), in, cells, inputs.data() + row * cells);
    }
  });
  parallel_for((outputs + kPanel - 1) / kPanel, kTaskSize / (num_rows * in * kPanel) + 1, [&](int64_t begin, int64_t end) {
    static thread_local std::vector<typename Kind::Sum> all_sums;
    all_sums.resize((most < cells ? num_rows : share) * kPanel);
    Way way;
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kPanel;
      const typename Kind::Cell* place = panel_at(panel);
      for (int64_t cell = 0; cell < cells; cell += most) {
        for (int64_t row = 0; row < num_rows; row += share) {
          const int64_t count = std::min(share, num_rows - row);
          typename Kind::Sum* sums = all_sums.data() + (most < cells ? row * kPanel : 0);
          // One pass fetches what it needs next. Of several, each fetches its part of the next panel: arithmetic hides memory.
          Ahead ahead{reinterpret_cast<const char*>(place) + Way::ahead(count), kCellBytes};
          if (passes > 1) {
            const char* next = reinterpret_cast<const char*>(place + cells * kPanel);
            ahead = {next + row / share * cells * kCellBytes / passes, kCellBytes / passes};
          }
          way(inputs.data() + row * cells, count, place, cells, cell, std::min(cell + most, cells), ahead, sums);
          if (cell + most < cells) continue;
          for (int64_t i = 0; i < count; ++i) {
            finish(sums + i * kPanel, scale ? scale + first : nullptr, bias + first, outputs - first,
                   to + (row + i) * outputs + first);
          }
        }
      }
    }
  });
}

template <class T, class Kind, class PanelAt>
void multiply(const T* rows, int64_t num_rows, int64_t in, int64_t outputs, const typename Kind::Sum* scale,
              const typename Kind::Sum* bias, T* to, const PanelAt& panel_at) {
#ifdef TILES
  if constexpr (std::is_base_of_v<PairCells, Kind>) {
    constexpr int64_t kSome = 256;  // rows whose inputs stay in a cache
    for (int64_t row = 0; tiles_allowed() && row < num_rows; row += kSome) {
      multiply_by<Tiles<Kind>>(rows + row * in, std::min(kSome, num_rows - row), in, outputs, scale, bias,
                               to + row * outputs, panel_at);
    }
    if (tiles_allowed()) return;
  }
#endif
  multiply_by<Vectors<Kind>>(rows, num_rows, in, outputs, scale, bias, to, panel_at);
}

template <class T, class Kind>
void multiply(const T* rows, int64_t num_rows, const Linear& layer, T* to) {
  const auto* weights = static_cast<const typename Kind::Cell*>(layer.weights);
  const int64_t size = cells_of<Kind>(layer.in) * kPanelOf<Kind>;
  multiply<T, Kind>(rows, num_rows, layer.in, layer.outputs, layer.scale, layer.bias, to,
                    [=](int64_t panel) { return weights + panel * size; });
}

// Weights of 4 bits in groups of kGroup inputs, each with a scale; see `Linear`. Inputs are rounded to bytes, group by group
// of each row, so that products are sums of integers. Only what drafts computes so.
constexpr int64_t kGroup = 32;
constexpr int64_t kParts4 = kGroup / 8;  // registers of 4 inputs in the low and 4 in the high halves of the bytes of each output
constexpr int64_t kGroupBytes = kPanel * (kGroup / 2 + sizeof(BFloat16));  // of a panel: the weights, then the scales
constexpr int kMaxGroupRows = kRegister == 64 ? 8 : 4;

struct GroupInput {
  int8_t values[kGroup / 4][4];
  float scale;
  int32_t start;  // of the sum: weights are stored 8 too high
};

// sum, plus for each output 4 products of weights from 0 to 15 with the bytes of `by`.
INLINE SumBits add_products(SumBits sum, SumBits weights, const int8_t (&bytes)[4]) {
#if defined(__AVX512VNNI__)  // from memory: compilers keep the bytes of all rows in registers, and run out of them
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(bytes));
  return sum;
#else
  uint32_t by;
  std::memcpy(&by, bytes, 4);
#if defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(by));
  return sum + (SumBits)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(by));
  return sum + (SumBits)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  for (int place = 0; place < 4; ++place) {
    sum += (weights >> 8 * place & 0xffu) * static_cast<uint32_t>(static_cast<int8_t>(by >> 8 * place));
  }
  return sum;
#endif
#endif
}

// N rows of inputs, as [groups, N], by a panel: sums [N, kPanel].
template <int N>
void multiply_groups(const GroupInput* input, const uint8_t* panel, int64_t groups, float* to) {
  typedef int32_t SumInts __attribute__((vector_size(4 * kLanes)));
  Sums sum[N][kVectors];
#pragma GCC unroll 16
  for (int row = 0; row < N; ++row) {
#pragma GCC unroll 16
    for (int vector = 0; vector < kVectors; ++vector) sum[row][vector] = Sums{};
  }
#pragma GCC unroll 1
  for (int64_t group = 0; group < groups; ++group, input += N, panel += kGroupBytes) {
#pragma GCC unroll 16
    for (int64_t line = 0; line < kGroupBytes; line += 64) __builtin_prefetch(panel + kAhead + line);
#pragma GCC unroll 16
    for (int vector = 0; vector < kVectors; ++vector) {
      SumBits weights[2 * kParts4];
#pragma GCC unroll 16
      for (int part = 0; part < kParts4; ++part) {
        const SumBits both = load<SumBits>(panel + (vector * kParts4 + part) * kRegister);
        weights[part] = both & 0x0f0f0f0fu, weights[kParts4 + part] = both >> 4 & 0x0f0f0f0fu;
      }
      const auto* scales = reinterpret_cast<const uint16_t*>(panel + kPanel * kGroup / 2) + vector * kLanes;
      const Sums scale = HalfCells::of(scales);
#pragma GCC unroll 16
      for (int row = 0; row < N; ++row) {
        SumBits products = SumBits{} + static_cast<uint32_t>(input[row].start);
#pragma GCC unroll 16
        for (int part = 0; part < 2 * kParts4; ++part) {
          products = add_products(products, weights[part], input[row].values[part]);
        }
        sum[row][vector] += __builtin_convertvector((SumInts)products, Sums) * (scale * input[row].scale);
      }
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < N; ++row) std::memcpy(to + row * kPanel, sum[row], sizeof(sum[row]));
}

#ifdef TILES
// The same for up to 16 rows, by tiles; sums of integers are exact, so no bit differs.
void multiply_groups_by_tiles(const GroupInput* input, int count, const uint8_t* panel, int64_t groups, float* to) {
  alignas(64) int8_t weights[kVectors][2 * kParts4][kRegister];
  alignas(64) int32_t products[kVectors][kTile][kLanes];
  std::fill_n(to, count * kPanel, 0.0f);
  for (int64_t group = 0; group < groups; ++group, input += count, panel += kGroupBytes) {
#pragma GCC unroll 16
    for (int64_t line = 0; line < kGroupBytes; line += 64) __builtin_prefetch(panel + kAhead + line);
#pragma GCC unroll 16
    for (int part = 0; part < kVectors * kParts4; ++part) {
      const SumBits both = load<SumBits>(panel + part * kRegister);
      const auto put = [&](int place, SumBits nibbles) {
        _mm512_store_si512(weights[part / kParts4][place], _mm512_sub_epi8((__m512i)nibbles, _mm512_set1_epi8(8)));
      };
      put(part % kParts4, both & 0x0f0f0f0fu), put(kParts4 + part % kParts4, both >> 4 & 0x0f0f0f0fu);
    }
    _tile_zero(0);
    _tile_zero(1);
    all_written();
    _tile_loadd(4, input->values, sizeof(GroupInput));
    _tile_loadd(6, weights[0], kRegister);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, weights[1], kRegister);
    _tile_dpbssd(1, 4, 7);
    _tile_stored(0, products[0], kRegister);
    _tile_stored(1, products[1], kRegister);
#pragma GCC unroll 16
    for (int vector = 0; vector < kVectors; ++vector) {
      const Sums scale = HalfCells::of(reinterpret_cast<const uint16_t*>(panel + kPanel * kGroup / 2) + vector * kLanes);
      for (int row = 0; row < count; ++row) {
        float* place = to + row * kPanel + vector * kLanes;
        const Sums floats = (Sums)_mm512_cvtepi32_ps(_mm512_load_si512(products[vector][row]));
        const Sums sum = load<Sums>(place) + floats * (scale * input[row].scale);
        std::memcpy(place, &sum, sizeof(sum));
      }
    }
  }
}
#endif

template <int... kRows>
auto group_kernels(std::integer_sequence<int, kRows...>) {
  return std::array{&multiply_groups<kRows + 1>...};
}

// One row [in] to every `step`-th group from `to` on.
template <class T>
void round_inputs(const T* row, int64_t in, GroupInput* to, int64_t step) {
  constexpr int64_t kBlocks = kGroup / kPage;
  typedef int8_t Few __attribute__((vector_size(Ints::kOfPart)));
  for (int64_t first = 0; first < in; first += kGroup, to += step) {
    T rest[kGroup] = {};
    const T* inputs = row + first;
    if (in - first < kGroup) inputs = std::copy_n(inputs, in - first, rest) - (in - first);
    Floats values[kBlocks];
    Bits sizes;  // of floats without their sign, which are in order as integers, too
    for (int64_t block = 0; block < kBlocks; ++block) {
      values[block] = Lane<T>::widen(inputs + block * kPage);
      sizes = larger(sizes, as<Bits>(values[block]) & 0x7fffffffu);
    }
    const uint32_t most = emssd::largest(sizes);
    float largest;
    std::memcpy(&largest, &most, sizeof(largest));
    const bool finite = most < 0x7f800000u;  // neither infinite nor no number
    const float inverse = finite && most ? 127 / largest : 0;
    int32_t sum = 0;
    for (int64_t block = 0; block < kBlocks; ++block) {
      const Floats scaled = finite ? values[block] * inverse : Floats();
      const Bits half = (as<Bits>(scaled) & 0x80000000u) | Bits(0x3f000000u);
      const Ints whole = converted<int32_t>(scaled + as<Floats>(half));
      sum += total(whole);
      for (int part = 0; part < Ints::kParts; ++part) {
        const Few few = __builtin_convertvector(whole.part[part], Few);
        std::memcpy(to->values[0] + block * kPage + part * Ints::kOfPart, &few, sizeof(few));
      }
    }
    to->scale = finite ? largest / 127 : std::numeric_limits<float>::quiet_NaN(), to->start = -8 * sum;
  }
}

// Rows by panels of 4 bits, on one thread.
struct Groups {
#ifdef TILES
  const int64_t most_rows = tiles_allowed() ? kTile : kMaxGroupRows;
  TilesOfThread tiles;
#else
  const int64_t most_rows = kMaxGroupRows;
#endif

  void operator()(const GroupInput* input, int64_t count, const uint8_t* panel, int64_t groups, float* to) {
    static const auto kernels = group_kernels(std::make_integer_sequence<int, kMaxGroupRows>{});
#ifdef TILES
    if (count > kMaxGroupRows) {  // fewer are faster in vectors
      tiles.configure(count, kGroup / 4);
      return multiply_groups_by_tiles(input, count, panel, groups, to);
    }
#endif
    kernels[count - 1](input, panel, groups, to);
  }
};

template <class T>
void multiply_rounded(const T* rows, int64_t num_rows, const Linear& layer, T* to) {
  const int64_t in = layer.in, outputs = layer.outputs, groups = (in + kGroup - 1) / kGroup;
  const int64_t most_rows = Groups().most_rows, passes = (num_rows + most_rows - 1) / most_rows;
  const int64_t share = (num_rows + passes - 1) / passes;
  std::vector<GroupInput> inputs(num_rows * groups);
  parallel_for(num_rows, kTaskSize / in + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t first = row / share * share;
      round_inputs(rows + row * in, in, inputs.data() + first * groups + row - first, std::min(share, num_rows - first));
    }
  });
  const auto* weights = static_cast<const uint8_t*>(layer.weights);
  parallel_for((outputs + kPanel - 1) / kPanel, kTaskSize / (num_rows * in * kPanel) + 1, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[kTile * kPanel];
    Groups by_panel;
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kPanel;
      for (int64_t row = 0; row < num_rows; row += share) {
        const int64_t count = std::min(share, num_rows - row);
        by_panel(inputs.data() + row * groups, count, weights + panel * groups * kGroupBytes, groups, sums);
        for (int64_t i = 0; i < count; ++i) {
          finish(sums + i * kPanel, nullptr, layer.bias + first, outputs - first, to + (row + i) * outputs + first);
        }
      }
    }
  });
}

template <class T>
void multiply(const T* rows, int64_t num_rows, const Linear& layer, T* to) {
  if (layer.type == Type::int4) return multiply_rounded<T>(rows, num_rows, layer, to);
  if (layer.type == Type::int8) {
    using Pairs = std::conditional_t<std::is_same_v<T, float>, FloatBytePairCells, BytePairCells>;
    return layer.pairs ? multiply<T, Pairs>(rows, num_rows, layer, to) : multiply<T, ByteCells>(rows, num_rows, layer, to);
  }
  if constexpr (std::is_same_v<T, float>) {
    multiply<T, FloatCells>(rows, num_rows, layer, to);
  } else if (layer.pairs) {
    multiply<T, PairCells>(rows, num_rows, layer, to);
  } else {
    multiply<T, HalfCells>(rows, num_rows, layer, to);
  }
}

// 16 x 16 cells of 4 bytes: column by column, `to_step` apart.
void transpose(const uint32_t* from, int64_t from_step, uint32_t* to, int64_t to_step) {
#if defined(__AVX512F__) && !defined(__clang__)
  typedef uint32_t Row __attribute__((vector_size(64)));
  Row rows[16], keep, give;
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) rows[i] = load<Row>(from + i * from_step);
#pragma GCC unroll 4
  for (int step = 1; step < 16; step *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) keep[i] = i & step ? 16 + i - step : i, give[i] = i & step ? 16 + i : i + step;
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      if (i & step) continue;
      const Row one = rows[i], other = rows[i + step];
      rows[i] = __builtin_shuffle(one, other, keep), rows[i + step] = __builtin_shuffle(one, other, give);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) std::memcpy(to + i * to_step, &rows[i], sizeof(Row));
#else
  for (int64_t column = 0; column < 16; ++column) {
    for (int64_t row = 0; row < 16; ++row) to[column * to_step + row] = from[row * from_step + column];
  }
#endif
}

// `outputs` of the weights at `from` as a panel [cells, panel], zeros behind them. A cell is one weight, or two neighbours.
template <class Kind>
void lay_out(const typename Kind::Cell* from, int64_t output_step, int64_t cell_step, int64_t outputs, int64_t cells,
             typename Kind::Cell* to) {
  constexpr int64_t kPanel = kPanelOf<Kind>;
  using Cell = typename Kind::Cell;
  int64_t done = 0;
  if (sizeof(Cell) == 4 && cell_step == 1 && outputs >= kPanel) {
    for (; done + 16 <= cells; done += 16) {
      for (int64_t output = 0; output < kPanel; ++output) {  // too many streams for hardware to foresee
        __builtin_prefetch(from + output * output_step + done + 512 / sizeof(Cell), 0, 2);
      }
      for (int64_t output = 0; output < kPanel; output += 16) {
        transpose(reinterpret_cast<const uint32_t*>(from + output * output_step + done), output_step,
                  reinterpret_cast<uint32_t*>(to + done * kPanel + output), kPanel);
      }
    }
  }
  for (int64_t cell = done; cell < cells; ++cell) {
    for (int64_t output = 0; output < kPanel; ++output) {
      to[cell * kPanel + output] = output < outputs ? from[output * output_step + cell * cell_step] : Cell{};
    }
  }
}

// Weights stay where they are: the thread that multiplies by a panel lays it out first.
template <class T, class Kind>
void multiply_plain(const PlainLinear& layer, const void* input, int64_t num_rows, void* out) {
  using Cell = typename Kind::Cell;
  constexpr int64_t kPanel = kPanelOf<Kind>;
  const int64_t cells = layer.in / Kind::kWidth;
  std::vector<typename Kind::Sum> bias((layer.outputs + kPanel - 1) / kPanel * kPanel);
  if (layer.bias) std::copy_n(static_cast<const T*>(layer.bias), layer.outputs, bias.begin());
  const auto panel_at = [&](int64_t panel) {
    static thread_local std::vector<Cell> place;
    place.resize(cells_of<Kind>(layer.in) * kPanel);
    std::fill(place.begin() + cells * kPanel, place.end(), Cell{});
    const auto* from = static_cast<const T*>(layer.weight) + panel * kPanel * layer.output_step;
    lay_out<Kind>(reinterpret_cast<const Cell*>(from), layer.output_step / Kind::kWidth, layer.input_step,
                  std::min(kPanel, layer.outputs - panel * kPanel), cells, place.data());
    return static_cast<const Cell*>(place.data());
  };
  multiply<T, Kind>(static_cast<const T*>(input), num_rows, layer.in, layer.outputs, nullptr, bias.data(),
                    static_cast<T*>(out), panel_at);
}

}  // namespace

void linear(const PlainLinear& layer, const void* input, int64_t num_rows, void* out) {
  if (layer.type == Type::float64) return multiply_plain<double, DoubleCells>(layer, input, num_rows, out);
  if (layer.type == Type::float32) return multiply_plain<float, FloatCells>(layer, input, num_rows, out);
  const bool pairs = kPairs && layer.in % 2 == 0 && layer.input_step == 1 && layer.output_step % 2 == 0;
  pairs ? multiply_plain<BFloat16, PairCells>(layer, input, num_rows, out)
        : multiply_plain<BFloat16, HalfCells>(layer, input, num_rows, out);
}

int64_t panel_width() { return kPanel; }

bool takes_pairs() { return kPairs; }

int64_t panel_inputs(const Linear& layer) { return layer.pairs ? 2 * cells_of<PairCells>(layer.in) : layer.in; }

int64_t group_bytes() { return kGroupBytes; }

void to_groups(const int8_t* weight, const uint16_t* scales, int64_t out, int64_t in, uint8_t* panels) {
  const int64_t groups = (in + kGroup - 1) / kGroup;
  parallel_for((out + kPanel - 1) / kPanel, 1, [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; ++panel) {
      for (int64_t group = 0; group < groups; ++group) {
        uint8_t* place = panels + (panel * groups + group) * kGroupBytes;
        for (int64_t i = 0; i < kPanel; ++i) {
          const int64_t output = panel * kPanel + i, lane = i % kLanes;
          uint8_t* bytes = place + i / kLanes * kParts4 * kRegister + 4 * lane;
          const auto nibble = [&](int64_t input) -> uint8_t {
            input += group * kGroup;
            return output < out && input < in ? weight[output * in + input] + 8 : 8;
          };
          for (int64_t input = 0; input < kGroup / 2; ++input) {
            bytes[input / 4 * kRegister + input % 4] = nibble(input) | nibble(kGroup / 2 + input) << 4;
          }
          const uint16_t scale = output < out ? scales[output * groups + group] : 0;
          std::memcpy(place + kPanel * kGroup / 2 + 2 * i, &scale, 2);
        }
      }
    }
  });
}

void to_panels(const void* weight, const Linear& layer, void* panels) {
  const auto pack = [&](auto cell, int64_t width) {
    using Cell = decltype(cell);
    panels_of(static_cast<const Cell*>(weight), layer.outputs, layer.in / width, panel_inputs(layer) / width,
              static_cast<Cell*>(panels));
  };
  if (layer.type == Type::int8) return layer.pairs ? pack(uint16_t{}, 2) : pack(int8_t{}, 1);
  if (layer.type == Type::float32) return pack(uint32_t{}, 1);
  layer.pairs ? pack(uint32_t{}, 2) : pack(uint16_t{}, 1);
}

void linear(const Linear& layer, Type type, const void* input, int64_t num_rows, void* out) {
  if (type == Type::float32) {
    return multiply(static_cast<const float*>(input), num_rows, layer, static_cast<float*>(out));
  }
  multiply(static_cast<const BFloat16*>(input), num_rows, layer, static_cast<BFloat16*>(out));
}

}  // namespace emssd
