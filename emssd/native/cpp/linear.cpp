// Linear layers: weights stream through once for as many rows as there are registers for, and each output is one sum in order
// of the inputs.

#include <array>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "panels.h"

namespace emssd {
namespace {

constexpr int kMaxRows = kRegister == 64 ? 14 : kRegister == 32 ? 6 : 2;  // rows that share one pass over a panel
constexpr int64_t kFarAhead = 9216;  // instead of kAhead, for many rows; measured, as is which rows are many
constexpr int kManyRows = 6;         // so many compute for longer than a nearer cache keeps what is fetched

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

constexpr bool kPairs = true;
#else
using PairCells = HalfCells;
constexpr bool kPairs = false;
#endif

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
  Sums sum[N][kVectors] = {};
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
  for (int row = 0; row < N; ++row) std::memcpy(to + row * kPanel, sum[row], sizeof(sum[row]));
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
      const Cell* weights = panel + cell * kPanel;
      _tile_loadd(4, input + cell * count, kInputLine);
      _tile_loadd(6, weights, kLine);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights + kTile, kLine);
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

void finish(const double* sums, const double* bias, int64_t outputs, double* to) {
  for (int64_t i = 0; i < std::min(outputs, kPanelOf<DoubleCells>); ++i) to[i] = sums[i] + bias[i];
}

// Rows [num_rows, in] by all panels: [num_rows, outputs]. panel_at(panel) gives the cells of one, on the thread that asks.
template <class Way, class T, class PanelAt>
void multiply_by(const T* rows, int64_t num_rows, int64_t in, int64_t outputs, const typename Way::Kind::Sum* bias, T* to,
                 const PanelAt& panel_at) {
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
            finish(sums + i * kPanel, bias + first, outputs - first, to + (row + i) * outputs + first);
          }
        }
      }
    }
  });
}

template <class T, class Kind, class PanelAt>
void multiply(const T* rows, int64_t num_rows, int64_t in, int64_t outputs, const typename Kind::Sum* bias, T* to,
              const PanelAt& panel_at) {
#ifdef TILES
  if constexpr (std::is_base_of_v<PairCells, Kind>) {
    constexpr int64_t kSome = 256;  // rows whose inputs stay in a cache
    for (int64_t row = 0; tiles_allowed() && row < num_rows; row += kSome) {
      multiply_by<Tiles<Kind>>(rows + row * in, std::min(kSome, num_rows - row), in, outputs, bias,
                               to + row * outputs, panel_at);
    }
    if (tiles_allowed()) return;
  }
#endif
  multiply_by<Vectors<Kind>>(rows, num_rows, in, outputs, bias, to, panel_at);
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

// use(how the weights of a layer are stored, a number of its type).
template <class Use>
void with_kind(const Linear& layer, const Use& use) {
  if (layer.type == Type::float32) return use(FloatCells(), 0.0f);
  layer.pairs ? use(PairCells(), BFloat16()) : use(HalfCells(), BFloat16());
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
  multiply<T, Kind>(static_cast<const T*>(input), num_rows, layer.in, layer.outputs, bias.data(),
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

void to_panels(const void* weight, const Linear& layer, void* panels) {
  with_kind(layer, [&](auto kind, auto) {
    using Kind = decltype(kind);
    using Cell = typename Kind::Cell;
    const int64_t cells = layer.in / Kind::kWidth, size = cells_of<Kind>(layer.in) * kPanel;
    parallel_for((layer.outputs + kPanel - 1) / kPanel, 1, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        lay_out<Kind>(static_cast<const Cell*>(weight) + panel * kPanel * cells, cells, 1,
                      std::min(kPanel, layer.outputs - panel * kPanel), cells, static_cast<Cell*>(panels) + panel * size);
      }
    });
  });
}

void linear(const Linear& layer, const void* input, int64_t num_rows, void* out) {
  with_kind(layer, [&](auto kind, auto number) {
    using Kind = decltype(kind);
    using T = decltype(number);
    const auto* weights = static_cast<const typename Kind::Cell*>(layer.weights);
    const int64_t size = cells_of<Kind>(layer.in) * kPanel;
    multiply<T, Kind>(static_cast<const T*>(input), num_rows, layer.in, layer.outputs, layer.bias, static_cast<T*>(out),
                      [=](int64_t panel) { return weights + panel * size; });
  });
}

}  // namespace emssd
