// Vectors of 16 numbers in as many registers as they take, how each type is stored and multiplied, and e^x.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace emssd {

constexpr int64_t kPage = 16;  // tokens per page: one vector of scores

// As PyTorch's, whose header takes longer to compile than all of this.
struct BFloat16 {
  uint16_t x;

  BFloat16() = default;
  explicit BFloat16(float value) {  // for numbers that have one, such as 0 and infinity
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    x = static_cast<uint16_t>(bits >> 16);
  }
  operator float() const {
    const uint32_t bits = uint32_t{x} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  }
};

// Bytes of a register.
#if defined(__AVX512F__)
constexpr int kRegister = 64;
#elif defined(__AVX__)
constexpr int kRegister = 32;
#else
constexpr int kRegister = 16;
#endif

// kPage numbers in as many registers as they take. GCC's own vectors do the same, but where they are wider than a register
// they go through memory with each operation, one number at a time where they are compared.
template <class S>
struct Wide {
  static constexpr int kOfPart = kRegister / static_cast<int>(sizeof(S)), kParts = static_cast<int>(kPage) / kOfPart;
  typedef S Part __attribute__((vector_size(kRegister)));
  Part part[kParts];

  INLINE Wide() : part{} {}
  INLINE explicit Wide(S all) {
    for (Part& each : part) each = all - Part{};  // and not 0 + all, which is an addition
  }
  // From and to any place. Copied as a whole, the numbers would go through memory.
  static INLINE Wide at(const void* from) {
    Wide result;
#pragma GCC unroll 16
    for (int i = 0; i < kParts; ++i) std::memcpy(&result.part[i], static_cast<const char*>(from) + i * kRegister, kRegister);
    return result;
  }
  INLINE void store(void* to) const {
#pragma GCC unroll 16
    for (int i = 0; i < kParts; ++i) std::memcpy(static_cast<char*>(to) + i * kRegister, &part[i], kRegister);
  }
  INLINE S operator[](int64_t lane) const { return part[lane / kOfPart][lane % kOfPart]; }
  INLINE void set(int64_t lane, S value) { part[lane / kOfPart][lane % kOfPart] = value; }

  // `use` of the parts of both.
  template <class Use>
  static INLINE Wide of(const Wide& a, const Wide& b, const Use& use) {
    Wide result;
#pragma GCC unroll 16
    for (int i = 0; i < kParts; ++i) result.part[i] = use(a.part[i], b.part[i]);
    return result;
  }
  friend INLINE Wide operator+(Wide a, Wide b) { return of(a, b, [](Part x, Part y) { return x + y; }); }
  friend INLINE Wide operator-(Wide a, Wide b) { return of(a, b, [](Part x, Part y) { return x - y; }); }
  friend INLINE Wide operator*(Wide a, Wide b) { return of(a, b, [](Part x, Part y) { return x * y; }); }
  friend INLINE Wide operator&(Wide a, Wide b) { return of(a, b, [](Part x, Part y) { return x & y; }); }
  friend INLINE Wide operator|(Wide a, Wide b) { return of(a, b, [](Part x, Part y) { return x | y; }); }
  friend INLINE Wide operator+(Wide a, S b) { return a + Wide(b); }
  friend INLINE Wide operator-(Wide a, S b) { return a - Wide(b); }
  friend INLINE Wide operator*(Wide a, S b) { return a * Wide(b); }
  friend INLINE Wide operator&(Wide a, S b) { return a & Wide(b); }
  friend INLINE Wide operator<<(Wide a, int bits) { return of(a, a, [bits](Part x, Part) { return x << bits; }); }
  friend INLINE Wide operator>>(Wide a, int bits) { return of(a, a, [bits](Part x, Part) { return x >> bits; }); }
  INLINE Wide& operator+=(Wide other) { return *this = *this + other; }
  INLINE Wide& operator*=(Wide other) { return *this = *this * other; }
  // Lane by lane: of two numbers the larger, `a` where it is not; and `other` where a number equals `this_one`.
  friend INLINE Wide larger(Wide a, Wide b) { return of(a, b, [](Part x, Part y) { return x > y ? x : y; }); }
  friend INLINE Wide where_equal(Wide a, Wide this_one, Wide other, Wide otherwise) {
    Wide result;
#pragma GCC unroll 16
    for (int i = 0; i < kParts; ++i) {
      result.part[i] = a.part[i] == this_one.part[i] ? other.part[i] : otherwise.part[i];
    }
    return result;
  }
};
using Floats = Wide<float>;
using Doubles = Wide<double>;
using Ints = Wide<int32_t>;
using Bits = Wide<uint32_t>;

template <class V>
INLINE V load(const void* from) {
  if constexpr (std::is_class_v<V>) {
    return V::at(from);
  } else {
    V vector;
    std::memcpy(&vector, from, sizeof(V));
    return vector;
  }
}

// The same bits as another type.
template <class V, class S>
INLINE V as(const Wide<S>& from) {
  static_assert(sizeof(V) == sizeof(from));
  V result;
#pragma GCC unroll 16
  for (int i = 0; i < V::kParts; ++i) result.part[i] = (typename V::Part)from.part[i];
  return result;
}

// The same numbers, towards zero, of any S that stand one after another.
template <class To, class S>
INLINE Wide<To> converted(const S* from) {
  typedef S Some __attribute__((vector_size(sizeof(S) * Wide<To>::kOfPart)));
  Wide<To> result;
  for (int i = 0; i < Wide<To>::kParts; ++i) {
    result.part[i] = __builtin_convertvector(load<Some>(from + i * Wide<To>::kOfPart), typename Wide<To>::Part);
  }
  return result;
}

template <class To, class S>
INLINE Wide<To> converted(const Wide<S>& from) {
  if constexpr (sizeof(To) == sizeof(S)) {
    Wide<To> result;
#pragma GCC unroll 16
    for (int i = 0; i < Wide<To>::kParts; ++i) {
      result.part[i] = __builtin_convertvector(from.part[i], typename Wide<To>::Part);
    }
    return result;
  } else {
    alignas(kRegister) S all[kPage];
    from.store(all);
    return converted<To>(all);
  }
}

// How a type is stored and multiplied. A cell holds the kWidth neighbours that one multiplication sums up; `put` fills
// it from place 0 on and clears the places behind, and `copy` does so for 16 cells from a place of others; `widen` and
// `narrow` read and write a vector of sums as the type.
template <class T>
struct Lane;

// A type that is summed up in itself, one at a time.
template <class T, class V>
struct WideLane {
  using Sum = T;
  using Vector = V;
  using Cell = T;
  static constexpr int64_t kWidth = 1;
  static INLINE Vector multiply_add(Vector sum, const Cell* kv, Cell by) { return sum + load<Vector>(kv) * by; }
  static INLINE void put(Cell* cell, int64_t, T value) { *cell = value; }
  static INLINE void copy(Cell* cells, int64_t, const Cell* from, int64_t) { std::memcpy(cells, from, sizeof(Vector)); }
  static INLINE Vector widen(const T* from) { return load<Vector>(from); }
  static INLINE void narrow(const Vector& values, T* to) { values.store(to); }
};

template <>
struct Lane<float> : WideLane<float, Floats> {};

template <>
struct Lane<double> : WideLane<double, Doubles> {};

template <>
struct Lane<BFloat16> {
  using Sum = float;
  using Vector = Floats;
  using Cell = uint32_t;
  static constexpr int64_t kWidth = 2;
  static INLINE Vector multiply_add(Vector sum, const Cell* kv, Cell by) {
#ifdef __AVX512BF16__
    sum.part[0] = (Floats::Part)_mm512_dpbf16_ps((__m512)sum.part[0], (__m512bh)_mm512_loadu_si512(kv),
                                                 (__m512bh)_mm512_set1_epi32(by));
    return sum;
#else
    const Bits pairs = load<Bits>(kv);
    const uint32_t low = by << 16, high = by & 0xffff0000u;
    float low_value, high_value;
    std::memcpy(&low_value, &low, 4);
    std::memcpy(&high_value, &high, 4);
    sum += as<Vector>(pairs << 16) * low_value;
    return sum + as<Vector>(pairs & 0xffff0000u) * high_value;
#endif
  }
  static INLINE void put(Cell* cell, int64_t place, BFloat16 value) {
    *cell = place == 0 ? uint32_t{value.x} : (*cell & 0xffffu) | uint32_t{value.x} << 16;
  }
  static INLINE void copy(Cell* cells, int64_t place, const Cell* from, int64_t from_place) {
    const Bits values = load<Bits>(from) >> (16 * static_cast<int>(from_place)) & 0xffffu;
    const Bits result = place == 0 ? values : (load<Bits>(cells) & 0xffffu) | values << 16;
    result.store(cells);
  }
  static INLINE Vector widen(const BFloat16* from) {
    return as<Vector>(converted<uint32_t>(&from->x) << 16);
  }
  static INLINE void narrow(const Vector& values, BFloat16* to) {
#ifdef __AVX512BF16__
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)values.part[0]);
    std::memcpy(to, &halves, sizeof(halves));
#else
    const Bits bits = as<Bits>(values);  // to the nearest, of two equally near the even one
    const Bits rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    typedef uint16_t Halves __attribute__((vector_size(2 * Bits::kOfPart)));
    for (int i = 0; i < Bits::kParts; ++i) {
      const Halves halves = __builtin_convertvector(rounded.part[i], Halves);
      std::memcpy(to + i * Bits::kOfPart, &halves, sizeof(halves));
    }
#endif
  }
};

constexpr float kLowest = -87.3f;  // e^x is still an ordinary float

// e^x for kLowest <= x <= 0, to one unit in the last place of a float or so.
INLINE Floats exponential_within(Floats x) {
  const Floats scaled = x * 1.44269504088896341f - 0.5f;
  const Ints whole = converted<int32_t>(scaled);  // towards zero: the nearest, as x <= 0
  const Floats power = converted<float>(whole);
  const Floats rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
  Floats result(1.9875691500e-4f);
  result = result * rest + 1.3981999507e-3f;
  result = result * rest + 8.3334519073e-3f;
  result = result * rest + 4.1665795894e-2f;
  result = result * rest + 1.6666665459e-1f;
  result = result * rest + 5.0000001201e-1f;
  result = result * (rest * rest) + rest + 1.0f;
  return result * as<Floats>((whole + 127) << 23);
}

// The same for x <= 0; e^kLowest below that.
INLINE Floats exponential(Floats x) { return exponential_within(larger(Floats(kLowest), x)); }

inline Doubles exponential(Doubles x) {
  for (int lane = 0; lane < kPage; ++lane) x.set(lane, std::exp(x[lane]));
  return x;
}

inline float exponential(float x) { return exponential(Floats(x))[0]; }
inline double exponential(double x) { return std::exp(x); }

template <class V>
inline auto largest(V vector) {
  auto result = vector[0];
  for (int lane = 1; lane < kPage; ++lane) result = std::max(result, vector[lane]);
  return result;
}

template <class V>
inline auto total(V vector) {
  auto result = vector[0];
  for (int lane = 1; lane < kPage; ++lane) result += vector[lane];
  return result;
}

}  // namespace emssd
