// Packed weights: integers of 4 or 8 bits in groups of 32 or 16 inputs, each with a scale, and some with a minimum. Inputs are
// rounded to bytes, 32 at a time of each row, so that products are sums of integers.

#include <array>
#include <limits>
#include <utility>
#include <vector>

#include "panels.h"

namespace emssd {
namespace {

constexpr int64_t kBlock = 32, kQuads = kBlock / 4;  // inputs that are rounded together; registers of 4 inputs of each output
constexpr int64_t kHeader = 64;                      // bytes before the panels
constexpr int kMaxRows = kRegister == 64 ? 8 : 4;    // that share one pass over a panel, in vectors

// 32 inputs of a row. `total`: their sum; `start`: of the sum of products of each group, as weights are stored too high.
struct Inputs {
  int8_t values[kQuads][4];
  float scale, total;
  int32_t start[2];
};

INLINE Sums floats_of(const uint16_t* halves) {
#if defined(__AVX512F__)
  return (Sums)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves)));
#else
  const SumBits bits = __builtin_convertvector(load<SumHalves>(halves), SumBits);  // of finite numbers
  return (Sums)((bits & 0x7fffu) << 13 | (bits & 0x8000u) << 16) * 0x1p112f;
#endif
}

INLINE Sums floats_of(const float* floats) { return load<Sums>(floats); }

// A kind of packed weights. A panel's 32 inputs lie together as registers with 4 inputs of each output (of 4 bits, the second
// 16 are the high halves of bytes), then scales [groups, kPanel], then minimums [kPanel] if there are any.
template <int bits, int64_t group, class S, bool has_minimum>
struct Kind {
  using Scale = S;
  static constexpr int kBits = bits;
  static constexpr bool kHasMinimum = has_minimum;
  static constexpr int64_t kGroup = group, kGroups = kBlock / group;
  static constexpr int kOffset = bits == 8 ? 128 : has_minimum ? 0 : 8;  // by which integers are stored too high
  static constexpr int64_t kVectorBytes = kRegister * kQuads * bits / 8, kScales = kVectors * kVectorBytes;
  static constexpr int64_t kMinimums = kScales + kGroups * kPanel * sizeof(Scale);
  static constexpr int64_t kBytes = kMinimums + (has_minimum ? kPanel * sizeof(float) : 0);
  static_assert(!has_minimum || kGroups == 1);

  static INLINE void weights(const uint8_t* block, int vector, SumBits (&to)[kQuads]) {
#pragma GCC unroll 8
    for (int i = 0; i < kQuads * bits / 8; ++i) {
      const SumBits stored = load<SumBits>(block + vector * kVectorBytes + i * kRegister);
      if constexpr (bits == 8) {
        to[i] = stored;
      } else {
        to[i] = stored & 0x0f0f0f0fu, to[kQuads / 2 + i] = stored >> 4 & 0x0f0f0f0fu;
      }
    }
  }

  static INLINE Sums scale(const uint8_t* block, int64_t group_of_block, int vector) {
    return floats_of(reinterpret_cast<const Scale*>(block + kScales) + group_of_block * kPanel + vector * kLanes);
  }

  // The place of an integer: of its byte in a block, and of its lowest bit in that.
  static std::pair<int64_t, int> place(int64_t output, int64_t input) {
    const int64_t quad = bits == 8 ? input / 4 : input % (kBlock / 2) / 4;
    const int64_t byte = output / kLanes * kVectorBytes + quad * kRegister + output % kLanes * 4 + input % 4;
    return {byte, bits == 4 && input >= kBlock / 2 ? 4 : 0};
  }
};

// use(Kind) of a packed weight; false if there is none.
template <class Use>
bool with_kind(const Packed& packed, const Use& use) {
  const auto is = [&](int bits, int group, bool has_floats, bool has_minimum) {
    return packed.bits == bits && packed.group == group && packed.has_float_scale == has_floats &&
           packed.has_minimum == has_minimum;
  };
  if (is(4, 32, false, false)) return use(Kind<4, 32, uint16_t, false>()), true;
  if (is(4, 32, true, true)) return use(Kind<4, 32, float, true>()), true;
  if (is(8, 32, false, false)) return use(Kind<8, 32, uint16_t, false>()), true;
  if (is(8, 32, true, true)) return use(Kind<8, 32, float, true>()), true;
  if (is(8, 16, true, false)) return use(Kind<8, 16, float, false>()), true;
  return false;
}

int64_t blocks_of(const Packed& packed) { return (packed.in + kBlock - 1) / kBlock; }
int64_t panels_of(const Packed& packed) { return (packed.outputs + kPanel - 1) / kPanel; }

// sum, plus for each output 4 products of weights, from 0 to 15 or 255, with the bytes of `by`.
template <int kBits>
INLINE SumBits add_products(SumBits sum, SumBits weights, const int8_t (&bytes)[4]) {
#if defined(__AVX512VNNI__)  // from memory: compilers keep the bytes of all rows in registers, and run out of them
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(weights), "m"(bytes));
  return sum;
#else
  uint32_t by;
  std::memcpy(&by, bytes, 4);
#if defined(__AVX512BW__) || (defined(__AVX2__) && !defined(__AVX512F__))
  if constexpr (kBits == 8) {  // whose pairs of products are more than 16 bits hold: by halves
    const SumBits high = add_products<4>(SumBits{}, weights >> 4 & 0x0f0f0f0fu, bytes);
    return add_products<4>(sum, weights & 0x0f0f0f0fu, bytes) + (high << 4);
  }
#if defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16((__m512i)weights, _mm512_set1_epi32(by));
  return sum + (SumBits)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
  const __m256i pairs = _mm256_maddubs_epi16((__m256i)weights, _mm256_set1_epi32(by));
  return sum + (SumBits)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
#else
  for (int place = 0; place < 4; ++place) {
    sum += (weights >> 8 * place & 0xffu) * static_cast<uint32_t>(static_cast<int8_t>(by >> 8 * place));
  }
  return sum;
#endif
#endif
}

// A row's sums, plus those of one group.
template <class K>
INLINE Sums add_group(Sums sum, SumBits products, Sums scale, const uint8_t* block, int vector, const Inputs& input) {
  typedef int32_t SumInts __attribute__((vector_size(kRegister)));
  sum += __builtin_convertvector((SumInts)products, Sums) * (scale * input.scale);
  if constexpr (K::kHasMinimum) {
    sum += load<Sums>(block + K::kMinimums + vector * kRegister) * input.total;
  }
  return sum;
}

template <class K>
INLINE void fetch_ahead(const uint8_t* block) {
#pragma GCC unroll 64
  for (int64_t line = 0; line < K::kBytes; line += 64) __builtin_prefetch(block + kAhead + line);
}

// N rows of inputs, as [blocks, N], by a panel: sums [N, kPanel].
template <class K, int N>
void multiply_panel(const Inputs* input, const uint8_t* block, int64_t blocks, float* to) {
  Sums sum[N][kVectors] = {};
#pragma GCC unroll 1
  for (const uint8_t* end = block + blocks * K::kBytes; block < end; block += K::kBytes, input += N) {
    fetch_ahead<K>(block);
#pragma GCC unroll 16
    for (int vector = 0; vector < kVectors; ++vector) {
      SumBits weights[kQuads];
      K::weights(block, vector, weights);
#pragma GCC unroll 2
      for (int group = 0; group < K::kGroups; ++group) {
        const Sums scale = K::scale(block, group, vector);
#pragma GCC unroll 16
        for (int row = 0; row < N; ++row) {
          SumBits products = SumBits{} + static_cast<uint32_t>(input[row].start[group]);
#pragma GCC unroll 8
          for (int quad = group * K::kGroup / 4; quad < (group + 1) * K::kGroup / 4; ++quad) {
            products = add_products<K::kBits>(products, weights[quad], input[row].values[quad]);
          }
          sum[row][vector] = add_group<K>(sum[row][vector], products, scale, block, vector, input[row]);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < N; ++row) std::memcpy(to + row * kPanel, sum[row], sizeof(sum[row]));
}

template <class K, int... kRows>
auto panel_kernels(std::integer_sequence<int, kRows...>) {
  return std::array{&multiply_panel<K, kRows + 1>...};
}

#ifdef TILES
// The same for up to 16 rows, by tiles; sums of integers are exact, so no bit differs.
template <class K>
void multiply_by_tiles(const Inputs* input, int64_t count, const uint8_t* block, int64_t blocks, float* to) {
  alignas(64) SumBits weights[kVectors][kQuads];
  alignas(64) int32_t products[kVectors][kTile][kLanes];
  std::fill_n(to, count * kPanel, 0.0f);
  for (const uint8_t* end = block + blocks * K::kBytes; block < end; block += K::kBytes, input += count) {
    fetch_ahead<K>(block);
#pragma GCC unroll 2
    for (int vector = 0; vector < kVectors; ++vector) {
      K::weights(block, vector, weights[vector]);
#pragma GCC unroll 8
      for (SumBits& quad : weights[vector]) quad = (SumBits)_mm512_sub_epi8((__m512i)quad, _mm512_set1_epi8(K::kOffset));
    }
    for (int group = 0; group < K::kGroups; ++group) {
      const int64_t quad = group * K::kGroup / 4;
      _tile_zero(0);
      _tile_zero(1);
      all_written();
      _tile_loadd(4, input->values[quad], sizeof(Inputs));
      _tile_loadd(6, &weights[0][quad], kRegister);
      _tile_dpbssd(0, 4, 6);
      _tile_loadd(7, &weights[1][quad], kRegister);
      _tile_dpbssd(1, 4, 7);
      _tile_stored(0, products[0], kRegister);
      _tile_stored(1, products[1], kRegister);
      for (int vector = 0; vector < kVectors; ++vector) {
        const Sums scale = K::scale(block, group, vector);
        for (int64_t row = 0; row < count; ++row) {
          float* place = to + row * kPanel + vector * kLanes;
          const SumBits whole = load<SumBits>(products[vector][row]);
          const Sums sum = add_group<K>(load<Sums>(place), whole, scale, block, vector, input[row]);
          std::memcpy(place, &sum, sizeof(sum));
        }
      }
    }
  }
}
#endif

// One row [in] to every `step`-th place from `to` on, for weights that are stored `offset` too high.
template <class T>
void round_inputs(const T* row, int64_t in, int groups, int offset, Inputs* to, int64_t step) {
  constexpr int64_t kHalves = kBlock / kPage;
  typedef int8_t Few __attribute__((vector_size(Ints::kOfPart)));
  for (int64_t first = 0; first < in; first += kBlock, to += step) {
    T rest[kBlock] = {};
    const T* inputs = row + first;
    if (in - first < kBlock) inputs = std::copy_n(inputs, in - first, rest) - (in - first);
    Floats values[kHalves];
    Bits sizes;  // of floats without their sign, which are in order as integers, too
    for (int64_t half = 0; half < kHalves; ++half) {
      values[half] = Lane<T>::widen(inputs + half * kPage);
      sizes = larger(sizes, as<Bits>(values[half]) & 0x7fffffffu);
    }
    const uint32_t most = emssd::largest(sizes);
    float largest;
    std::memcpy(&largest, &most, sizeof(largest));
    const bool finite = most < 0x7f800000u;  // neither infinite nor no number
    const float inverse = finite && most ? 127 / largest : 0;
    int32_t sums[kHalves];
    for (int64_t half = 0; half < kHalves; ++half) {
      const Floats scaled = finite ? values[half] * inverse : Floats();
      const Bits nearest = (as<Bits>(scaled) & 0x80000000u) | Bits(0x3f000000u);
      const Ints whole = converted<int32_t>(scaled + as<Floats>(nearest));
      sums[half] = total(whole);
      for (int part = 0; part < Ints::kParts; ++part) {
        const Few few = __builtin_convertvector(whole.part[part], Few);
        std::memcpy(to->values[0] + half * kPage + part * Ints::kOfPart, &few, sizeof(few));
      }
    }
    to->scale = finite ? largest / 127 : std::numeric_limits<float>::quiet_NaN();
    to->total = to->scale * static_cast<float>(sums[0] + sums[1]);
    to->start[0] = -offset * (groups == 1 ? sums[0] + sums[1] : sums[0]), to->start[1] = -offset * sums[1];
  }
}

// Rows by panels of a kind, on one thread.
template <class K>
struct ByPanel {
#ifdef TILES
  const int64_t most_rows = tiles_allowed() ? kTile : kMaxRows;
  TilesOfThread tiles;
#else
  const int64_t most_rows = kMaxRows;
#endif

  void operator()(const Inputs* input, int64_t count, const uint8_t* panel, int64_t blocks, float* to) {
    static const auto kernels = panel_kernels<K>(std::make_integer_sequence<int, kMaxRows>{});
#ifdef TILES
    if (count > kMaxRows) {  // fewer are faster in vectors
      tiles.configure(count, K::kGroup / 4);
      return multiply_by_tiles<K>(input, count, panel, blocks, to);
    }
#endif
    kernels[count - 1](input, panel, blocks, to);
  }
};

template <class K, class T>
void multiply(const Packed& packed, const uint8_t* panels, const float* bias, const T* rows, int64_t num_rows, T* to) {
  const int64_t in = packed.in, outputs = packed.outputs, blocks = blocks_of(packed);
  const int64_t most_rows = ByPanel<K>().most_rows, passes = (num_rows + most_rows - 1) / most_rows;
  const int64_t share = (num_rows + passes - 1) / passes;
  std::vector<Inputs> inputs(num_rows * blocks);
  parallel_for(num_rows, kTaskSize / in + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t first = row / share * share;
      round_inputs(rows + row * in, in, K::kGroups, K::kOffset, inputs.data() + first * blocks + row - first,
                   std::min(share, num_rows - first));
    }
  });
  parallel_for(panels_of(packed), kTaskSize / (num_rows * in * kPanel) + 1, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[kTile * kPanel];
    ByPanel<K> by_panel;
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kPanel;
      for (int64_t row = 0; row < num_rows; row += share) {
        const int64_t count = std::min(share, num_rows - row);
        by_panel(inputs.data() + row * blocks, count, panels + panel * blocks * K::kBytes, blocks, sums);
        for (int64_t i = 0; i < count; ++i) {
          finish(sums + i * kPanel, bias + first, outputs - first, to + (row + i) * outputs + first);
        }
      }
    }
  });
}

}  // namespace

int64_t packed_bytes(const Packed& packed) {
  int64_t bytes = 0;
  with_kind(packed, [&](auto kind) { bytes = kHeader + panels_of(packed) * blocks_of(packed) * decltype(kind)::kBytes; });
  return bytes;
}

void pack(const Packed& packed, const int8_t* values, const void* scale, const float* minimum, uint8_t* to) {
  std::memcpy(to, &packed, sizeof(packed));
  with_kind(packed, [&](auto kind) {
    using K = decltype(kind);
    const auto* scales = static_cast<const typename K::Scale*>(scale);
    const int64_t blocks = blocks_of(packed), groups = (packed.in + K::kGroup - 1) / K::kGroup;
    parallel_for(panels_of(packed), 1, [&](int64_t begin, int64_t end) {
      uint8_t* block = to + kHeader + begin * blocks * K::kBytes;
      std::memset(block, 0, (end - begin) * blocks * K::kBytes);
      for (int64_t panel = begin; panel < end; ++panel) {
        for (int64_t first = 0; first < packed.in; first += kBlock, block += K::kBytes) {
          for (int64_t i = 0; i < std::min(kPanel, packed.outputs - panel * kPanel); ++i) {
            const int64_t output = panel * kPanel + i;
            for (int64_t input = 0; input < std::min(kBlock, packed.in - first); ++input) {
              const auto [byte, bit] = K::place(i, input);
              block[byte] |= static_cast<uint8_t>(values[output * packed.in + first + input] + K::kOffset) << bit;
            }
            for (int64_t group = 0; group < std::min(K::kGroups, groups - first / K::kGroup); ++group) {
              const int64_t from = output * groups + first / K::kGroup + group;
              std::memcpy(block + K::kScales + (group * kPanel + i) * sizeof(*scales), scales + from, sizeof(*scales));
              if (K::kHasMinimum) std::memcpy(block + K::kMinimums + i * sizeof(float), minimum + from, sizeof(float));
            }
          }
        }
      }
    });
  });
}

Packed packed_of(const uint8_t* bytes) {
  Packed packed;
  std::memcpy(&packed, bytes, sizeof(packed));
  return packed;
}

void linear(const uint8_t* bytes, const float* bias, Type type, const void* input, int64_t num_rows, void* out) {
  const Packed packed = packed_of(bytes);
  with_kind(packed, [&](auto kind) {
    const auto run = [&](auto number) {
      using T = decltype(number);
      multiply<decltype(kind)>(packed, bytes + kHeader, bias, static_cast<const T*>(input), num_rows, static_cast<T*>(out));
    };
    type == Type::float32 ? run(float{}) : run(BFloat16{});
  });
}

void rows_of(const uint8_t* bytes, const int64_t* outputs, int64_t count, float* to) {
  const Packed packed = packed_of(bytes);
  with_kind(packed, [&](auto kind) {
    using K = decltype(kind);
    const int64_t size = blocks_of(packed) * K::kBytes;
    parallel_for(count, kTaskSize / packed.in + 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const int64_t output = outputs[row] % kPanel;
        const int vector = static_cast<int>(output / kLanes);
        for (int64_t input = 0; input < packed.in; ++input) {
          const uint8_t* block = bytes + kHeader + outputs[row] / kPanel * size + input / kBlock * K::kBytes;
          const auto [byte, bit] = K::place(output, input % kBlock);
          const int stored = block[byte] >> bit & (K::kBits == 8 ? 0xff : 0x0f);
          double value = stored - K::kOffset;
          value *= K::scale(block, input % kBlock / K::kGroup, vector)[output % kLanes];
          if (K::kHasMinimum) value += load<Sums>(block + K::kMinimums + vector * kRegister)[output % kLanes];
          to[row * packed.in + input] = static_cast<float>(value);
        }
      }
    });
  });
}

}  // namespace emssd
