// Kernels for CPUs: ragged attention over a paged KV cache, linear layers whose weights are laid out once, and the choice of
// a token, greedy or sampled.
//
// Every query's result depends on its own row alone: neither the other rows of a batch, nor how many tokens are
// verified beside it, nor the number of threads change the order of its sums. A draft cannot change the output.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace {

using at::BFloat16;
using at::Tensor;

constexpr int64_t kPage = 16;         // tokens per page: one vector of scores
constexpr int64_t kBlockPages = 32;   // pages between two corrections of the running maximum
constexpr int64_t kTypicalTokens = 32;  // of a step, for oneDNN's choice of a layout
constexpr int64_t kShortRow = 32;     // rows up to so many new tokens store and attend in one task per head
// Queries that share one pass over keys and values; and, for n of them, the pages and the vectors of values that are summed
// up at once. Sums that do not fit into the registers cost more than what they save.
#ifdef __AVX512F__
constexpr int kMaxQueries = 8;
constexpr int pages_at_once(int n) { return n <= 2 ? 4 : n <= 4 ? 2 : 1; }
constexpr int vectors_at_once(int n) { return n <= 4 ? 4 : 2; }
#else
constexpr int kMaxQueries = 4;
constexpr int pages_at_once(int n) { return n == 1 ? 4 : 1; }
constexpr int vectors_at_once(int n) { return n == 1 ? 4 : 1; }
#endif

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
  if constexpr (requires { V::at(from); }) {
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

// The token tree that a row ends with. Tokens have slots in the order in which they are stored, and positions in their
// sequence; both are the same up to the tree. Node i has slot `before` + i, and its position goes by its depth. At every
// position up to its own, a node sees one slot: that of a token before the tree, of an ancestor, or of itself.
struct Tree {
  int64_t before = 0, nodes = 0;      // tokens before the tree, and in it; rows without a tree have 0 nodes
  int64_t deepest = 0;                // nodes on the longest way
  const int32_t* depths = nullptr;    // [nodes] nodes on the way to each, itself included
  const int32_t* ways = nullptr;      // [nodes, deepest] these nodes, from the first level on
  int64_t first_cells = 0;            // of `Layer::joined`: nodes, and one for each tree, in the rows before this one

  int64_t position(int64_t slot) const { return slot < before ? slot : before - 1 + depths[slot - before]; }

  // The node at a position that the token in `slot` sees; -1 for the last position before the tree.
  int64_t node(int64_t slot, int64_t position) const {
    return position < before ? -1 : ways[(slot - before) * deepest + position - before];
  }

  // The slot that the token in `slot` sees at a position.
  int64_t seen(int64_t slot, int64_t position) const {
    return position < before ? position : before + node(slot, position);
  }
};

// The trees of all rows of a step; none if no row has any.
class Trees {
 public:
  // kv_lens [R], indptr [R + 1] into parents, which are as in `attend` below.
  void plan(const int32_t* kv_lens, int64_t num_rows, const int32_t* indptr, const int32_t* parents) {
    rows_.assign(num_rows, Tree{});
    depths_.resize(indptr[num_rows]);
    int64_t num_cells = 0, size = 0;
    for (int64_t row = 0; row < num_rows; ++row) {
      Tree& tree = rows_[row];
      tree.nodes = indptr[row + 1] - indptr[row], tree.before = kv_lens[row] - tree.nodes;
      int32_t* depths = depths_.data() + indptr[row];
      for (int64_t node = 0; node < tree.nodes; ++node) {
        const int32_t parent = parents[indptr[row] + node];
        TORCH_CHECK(parent >= -1 && parent < node, "a parent must stand before its child");
        depths[node] = parent < 0 ? 1 : depths[parent] + 1;
        tree.deepest = std::max<int64_t>(tree.deepest, depths[node]);
      }
      tree.depths = depths, tree.first_cells = num_cells;
      num_cells += tree.nodes > 0 ? tree.nodes + 1 : 0;
      size += tree.nodes * tree.deepest;
    }
    num_cells_ = num_cells;
    ways_.resize(size);
    int32_t* way = ways_.data();
    for (int64_t row = 0; row < num_rows; ++row) {
      Tree& tree = rows_[row];
      tree.ways = way;
      for (int64_t node = 0; node < tree.nodes; ++node, way += tree.deepest) {
        const int32_t parent = parents[indptr[row] + node];
        if (parent >= 0) std::copy_n(tree.ways + parent * tree.deepest, tree.depths[parent], way);
        way[tree.depths[node] - 1] = node;
      }
    }
  }

  const Tree* rows() const { return rows_.data(); }
  int64_t num_cells() const { return num_cells_; }  // what `Layer::joined` has room for, in cells of all dimensions

 private:
  std::vector<Tree> rows_;
  std::vector<int32_t> depths_, ways_;
  int64_t num_cells_ = 0;
};

// Everything about one layer's attention in one step; pointers and sizes as in `attend` below.
template <class T>
struct Layer {
  using L = Lane<T>;
  using Cell = typename L::Cell;
  using Sum = typename L::Sum;
  using Vector = typename L::Vector;

  const T *query, *key, *value;
  int64_t query_token, query_head, key_token, key_head, value_token, value_head;  // strides
  Cell *keys, *values;
  T* out;
  const int32_t *query_indptr, *kv_lens, *page_indptr, *pages;
  int64_t num_kv_heads, group, key_cells, key_dim, value_dim, value_lanes;
  Sum scale, softcap;
  const Sum* sinks = nullptr;  // [heads] scores of a key that every query sees, and that has no value; null for none
  int64_t window;
  const Tree* trees = nullptr;  // [R]; null if no row has a tree
  Cell* joined = nullptr;       // [kv heads] of each tree after the other, [1 + nodes, value_lanes]: see `join`

  Cell* key_page(int64_t page, int64_t head) const {
    return keys + (page * num_kv_heads + head) * key_cells * kPage;
  }
  Cell* value_page(int64_t page, int64_t head) const {
    return values + (page * num_kv_heads + head) * (kPage / L::kWidth) * value_lanes;
  }

  // The cell of a head's vector, with zeros behind its end.
  Cell cell_of(const T* head, int64_t cell) const {
    Cell result{};
    std::memcpy(&result, head + cell * L::kWidth, std::min<int64_t>(L::kWidth, key_dim - cell * L::kWidth) * sizeof(T));
    return result;
  }

  // The new keys and values of one row and head: keys as [dims / width][token][width], values as
  // [tokens / width][dim][width].
  void store(int64_t row, int64_t head) const {
    const int64_t first = query_indptr[row], last = query_indptr[row + 1];
    const int32_t* row_pages = pages + page_indptr[row];
    for (int64_t token = first; token < last; ++token) {
      const int64_t position = kv_lens[row] - (last - token), slot = position % kPage;
      const T* from_key = key + token * key_token + head * key_head;
      Cell* to_key = key_page(row_pages[position / kPage], head) + slot;
      for (int64_t cell = 0; cell < key_cells; ++cell) to_key[cell * kPage] = cell_of(from_key, cell);
      const T* from_value = value + token * value_token + head * value_head;
      Cell* to_value = value_page(row_pages[position / kPage], head) + slot / L::kWidth * value_lanes;
      for (int64_t dim = 0; dim < value_dim; ++dim) L::put(to_value + dim, slot % L::kWidth, from_value[dim]);
    }
  }

  // Values are summed up cell by cell, and in a tree the neighbours of a cell lie apart. So each node gets the cell that
  // a chain would have at its position: the ancestors whose values come before its own in that cell, and its own. The
  // first of these cells is that of the last token before the tree.
  void join(int64_t row, int64_t head) const {
    const Tree& tree = trees[row];
    if (tree.nodes == 0) return;
    const int32_t* row_pages = pages + page_indptr[row];
    for (int64_t node = tree.before > 0 ? -1 : 0; node < tree.nodes; ++node) {
      const int64_t slot = tree.before + node, position = tree.position(slot), first = position / L::kWidth * L::kWidth;
      Cell* to = joined_cells(tree, head, node);
      for (int64_t at = first; at <= position; ++at) {
        const int64_t seen = tree.seen(slot, at), place = seen % kPage;
        const Cell* from = value_page(row_pages[seen / kPage], head) + place / L::kWidth * value_lanes;
        for (int64_t dim = 0; dim < value_lanes; dim += kPage) L::copy(to + dim, at - first, from + dim, place % L::kWidth);
      }
    }
  }

  Cell* joined_cells(const Tree& tree, int64_t head, int64_t node) const {
    return joined + (tree.first_cells * num_kv_heads + head * (tree.nodes + 1) + node + 1) * value_lanes;
  }

  // The cell of values that the token in `slot` sees from a position on, the first of a cell.
  const Cell* values_seen(const Tree& tree, const int32_t* row_pages, int64_t head, int64_t slot, int64_t from) const {
    if (from < tree.before / L::kWidth * L::kWidth) return values_at(row_pages, head, from);
    return joined_cells(tree, head, tree.node(slot, std::min(from + L::kWidth - 1, tree.position(slot))));
  }
  const Cell* values_at(const int32_t* row_pages, int64_t head, int64_t slot) const {
    return value_page(row_pages[slot / kPage], head) + slot % kPage / L::kWidth * value_lanes;
  }

  int64_t num_queries(int64_t row) const { return (query_indptr[row + 1] - query_indptr[row]) * group; }

  // How many of the queries that are left share the next pass.
  static int64_t pass(int64_t left) {
    if (kMaxQueries == 8 && left >= 7) return 8;
    return std::min<int64_t>(left, 4);
  }

  // Queries [first, first + count) of the row's tokens x heads of one KV head.
  void attend(int64_t row, int64_t head, int64_t first, int64_t count) const {
    const bool is_tree = trees != nullptr && trees[row].nodes > 0;
    switch (count) {
      case 1: return is_tree ? attend_some<1, true>(row, head, first) : attend_some<1, false>(row, head, first);
      case 2: return is_tree ? attend_some<2, true>(row, head, first) : attend_some<2, false>(row, head, first);
      case 3: return is_tree ? attend_some<3, true>(row, head, first) : attend_some<3, false>(row, head, first);
      case 4: return is_tree ? attend_some<4, true>(row, head, first) : attend_some<4, false>(row, head, first);
      default:
        return is_tree ? attend_some<kMaxQueries, true>(row, head, first)
                       : attend_some<kMaxQueries, false>(row, head, first);
    }
  }

  // A pass reads the values of all tokens that any of its queries sees, and a weight of 0 hides every value but NaN and
  // infinity. So where a result is not finite, each query is computed again by itself, kAlone, from what it sees.
  //
  // In a row with a tree, kTree, the page where the tree begins and those behind it are the tail. Its scores are
  // computed for all slots, as in a chain. Then each query picks those of its way and sets them to their positions, so
  // that weights and sums are those of a chain that consists of its way.
  template <int N, bool kTree, bool kAlone = false>
  void attend_some(int64_t row, int64_t head, int64_t first) const {
    constexpr int64_t kBlock = kBlockPages * kPage;
    constexpr Sum kNever = -std::numeric_limits<Sum>::infinity();
    const int64_t available = num_queries(row), num_new = available / group, kv_len = kv_lens[row];
    const int32_t* row_pages = pages + page_indptr[row];
    const Tree* tree = kTree ? trees + row : nullptr;

    static thread_local std::vector<Cell> query_cells;
    query_cells.assign(N * key_cells, Cell{});
    int64_t token[N], q_head[N], slot[N], position[N];
    int64_t earliest = std::numeric_limits<int64_t>::max(), latest = -1, last_slot = -1;
    for (int i = 0; i < N; ++i) {
      const int64_t which = std::min(first + i, available - 1);  // a pass that is not full repeats its last query
      token[i] = query_indptr[row] + which / group;
      q_head[i] = head * group + which % group;
      slot[i] = kv_len - num_new + which / group;
      position[i] = kTree ? tree->position(slot[i]) : slot[i];
      earliest = std::min(earliest, position[i]);
      latest = std::max(latest, position[i]);
      last_slot = std::max(last_slot, slot[i]);
      const T* from = query + token[i] * query_token + q_head[i] * query_head;
      for (int64_t cell = 0; cell < key_cells; ++cell) query_cells[i * key_cells + cell] = cell_of(from, cell);
    }

    alignas(64) Sum scores[N][kBlock];
    alignas(64) Cell weights[N][kBlock / L::kWidth];
    static thread_local std::vector<Sum> sums;
    sums.assign(N * value_lanes, Sum{});
    Sum maximum[N], denominator[N];
    for (int i = 0; i < N; ++i) {
      maximum[i] = sinks != nullptr ? sinks[q_head[i]] : kNever;
      denominator[i] = sinks != nullptr ? 1 : 0;
    }

    static thread_local std::vector<Sum> tail;  // [N, tail_slots] the scores of the tail, by slot
    const int64_t tail_page = kTree ? tree->before / kPage : 0;
    const int64_t tail_slots = kTree ? std::max<int64_t>(0, last_slot / kPage + 1 - tail_page) * kPage : 0;
    if constexpr (kTree) {
      tail.resize(N * tail_slots);
      Sum* to = tail.data() - tail_page * kPage;
      score_pages<N>(row_pages, head, tail_page, tail_page + tail_slots / kPage, query_cells.data(),
                     [&](int i, int64_t start, Vector score) {
                       score.store(to + i * tail_slots + start);
                     });
    }

    const int64_t begin = window > 0 ? std::max<int64_t>(0, earliest - window + 1) : 0;
    for (int64_t block = begin / kBlock * kBlock; block <= latest; block += kBlock) {
      const int64_t page_begin = std::max(block, begin) / kPage;
      const int64_t page_end = std::min((block + kBlock) / kPage, latest / kPage + 1);
      Vector block_maximum[N];
      for (int i = 0; i < N; ++i) block_maximum[i] = Vector(kNever);
      const auto keep = [&](int i, int64_t start, Vector score) {
        if (start + kPage - 1 > position[i] || (window > 0 && start <= position[i] - window)) {
          for (int lane = 0; lane < kPage; ++lane) {
            const int64_t at = start + lane;
            if (at > position[i] || (window > 0 && at <= position[i] - window)) score.set(lane, kNever);
          }
        }
        block_maximum[i] = larger(block_maximum[i], score);
        score.store(&scores[i][start - block]);
      };
      score_pages<N>(row_pages, head, page_begin, kTree ? std::min(page_end, tail_page) : page_end, query_cells.data(),
                     keep);
      if constexpr (kTree) {
        for (int64_t page = std::max(page_begin, tail_page); page < page_end; ++page) {
          for (int i = 0; i < N; ++i) {
            keep(i, page * kPage, scores_seen(*tree, tail.data() + i * tail_slots, slot[i], page));
          }
        }
      }

      for (int i = 0; i < N; ++i) {
        const Sum next = std::max(maximum[i], largest(block_maximum[i]));
        const Sum known = next == kNever ? Sum{0} : next;  // nothing seen yet: every weight below becomes zero
        const Sum correction = maximum[i] == kNever ? Sum{0} : exponential(maximum[i] - known);
        Vector sum = {};
        for (int64_t at = page_begin * kPage - block; at < page_end * kPage - block; at += kPage) {
          const Vector score = load<Vector>(&scores[i][at]);
          Vector weight = exponential(score - known);
          weight = where_equal(score, Vector(kNever), Vector{}, weight);
          sum += weight;
          L::narrow(weight, reinterpret_cast<T*>(&weights[i][at / L::kWidth]));
        }
        denominator[i] = denominator[i] * correction + total(sum);
        maximum[i] = next;
        if (correction != Sum{1}) {
          for (int64_t dim = 0; dim < value_lanes; ++dim) sums[i * value_lanes + dim] *= correction;
        }
      }

      if constexpr (kAlone) {
        add_seen_values(block, begin, latest, &weights[0][0], sums.data(), [&](int64_t from) {
          return kTree ? values_seen(*tree, row_pages, head, slot[0], from) : values_at(row_pages, head, from);
        });
        continue;
      }
      const int64_t stop = kTree ? std::min(latest + 1, tree->before / L::kWidth * L::kWidth) : latest + 1;
      const int64_t cell_end = std::min(kBlock, stop - block + L::kWidth - 1) / L::kWidth;
      for (int64_t dim = 0; dim < value_lanes;) {
        const int64_t left = (value_lanes - dim) / kPage;
        if (vectors_at_once(N) >= 4 && left >= 4) {
          add_values<N, 4>(row_pages, head, block, page_begin, cell_end, dim, &weights[0][0], sums.data());
          dim += 4 * kPage;
        } else if (vectors_at_once(N) >= 2 && left >= 2) {
          add_values<N, 2>(row_pages, head, block, page_begin, cell_end, dim, &weights[0][0], sums.data());
          dim += 2 * kPage;
        } else {
          add_values<N, 1>(row_pages, head, block, page_begin, cell_end, dim, &weights[0][0], sums.data());
          dim += kPage;
        }
      }
      if constexpr (kTree) {
        for (int i = 0; i < N; ++i) {
          add_joined_values(*tree, head, slot[i], block, begin, &weights[i][0], sums.data() + i * value_lanes);
        }
      }
    }

    const int64_t num_heads = num_kv_heads * group;
    Vector nothing = {};  // NaN where anything is not finite
    for (int i = 0; i < N && first + i < available; ++i) {
      T* to = out + (token[i] * num_heads + q_head[i]) * value_dim;
      const Sum inverse = 1 / denominator[i];
      alignas(64) T heads[kPage];
      for (int64_t dim = 0; dim < value_dim; dim += kPage) {
        Vector average = load<Vector>(&sums[i * value_lanes + dim]) * inverse;
        for (int64_t lane = value_dim - dim; lane < kPage; ++lane) average.set(lane, 0);
        nothing += average * Sum{0};
        L::narrow(average, heads);
        std::copy_n(heads, std::min(kPage, value_dim - dim), to + dim);
      }
    }
    if (!kAlone && total(nothing) != 0) {
      for (int i = 0; i < N && first + i < available; ++i) attend_some<1, kTree, true>(row, head, first + i);
    }
  }

  // keep(i, 16 x page, the scores of query i there), for the pages [page_begin, page_end) of a row.
  template <int N, class Keep>
  INLINE void score_pages(const int32_t* row_pages, int64_t head, int64_t page_begin,
                                                         int64_t page_end, const Cell* query_cells,
                                                         const Keep& keep) const {
    constexpr int kPagesAtOnce = pages_at_once(N);
    for (int64_t page = page_begin; page < page_end; page += kPagesAtOnce) {
      const Cell* cells[kPagesAtOnce];
      for (int p = 0; p < kPagesAtOnce; ++p) {
        cells[p] = key_page(row_pages[std::min(page + p, page_end - 1)], head);
      }
      const Cell* coming[kPagesAtOnce];  // what is read next lies scattered, which hardware does not foresee
      for (int p = 0; p < kPagesAtOnce; ++p) {
        coming[p] = value_page(row_pages[std::min(page + p, page_end - 1)], head);
      }
      Vector dots[N][kPagesAtOnce];
#pragma GCC unroll 1
      for (int64_t cell = 0; cell < key_cells; ++cell) {
#pragma GCC unroll 16
        for (int p = 0; p < kPagesAtOnce; ++p) __builtin_prefetch(coming[p] + cell * kPage);
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
#pragma GCC unroll 16
          for (int p = 0; p < kPagesAtOnce; ++p) {
            dots[i][p] = L::multiply_add(dots[i][p], cells[p] + cell * kPage, query_cells[i * key_cells + cell]);
          }
        }
      }
#pragma GCC unroll 16
      for (int p = 0; p < kPagesAtOnce; ++p) {
        if (page + p >= page_end) break;
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) {
          Vector score = dots[i][p] * scale;
          if (softcap > 0) {
            for (int lane = 0; lane < kPage; ++lane) score.set(lane, std::tanh(score[lane] / softcap) * softcap);
          }
          keep(i, (page + p) * kPage, score);
        }
      }
    }
  }

  // The scores of a query at the positions of a page, out of those of the tail; anything behind its own position.
  Vector scores_seen(const Tree& tree, const Sum* tail, int64_t slot, int64_t page) const {
    const int64_t start = page * kPage, position = tree.position(slot), tail_begin = tree.before / kPage * kPage;
    alignas(64) Sum scores[kPage] = {};
    if (start < tree.before && start <= position) std::memcpy(scores, tail + start - tail_begin, sizeof(scores));
    for (int64_t at = std::max(start, tree.before); at < std::min(start + kPage, position + 1); ++at) {
      scores[at - start] = tail[tree.seen(slot, at) - tail_begin];
    }
    return load<Vector>(scores);
  }

  // sums[dim...] += weights x values of the tokens at positions [first, last] in one block, in the order of `add_values`.
  // cells_at gives the cells of a position.
  template <class Cells>
  void add_seen_values(int64_t block, int64_t first, int64_t last, const Cell* weights, Sum* sums,
                       const Cells& cells_at) const {
    const int64_t stop = std::min(last + 1, block + kBlockPages * kPage);
    for (int64_t start = std::max(first, block) / L::kWidth * L::kWidth; start < stop; start += L::kWidth) {
      const Cell* from = cells_at(start);
      for (int64_t dim = 0; dim < value_lanes; dim += kPage) {
        alignas(64) T places[kPage * L::kWidth];  // of each dimension the neighbours that a cell holds
        std::memcpy(places, from + dim, sizeof(places));
        for (int64_t place = 0; place < L::kWidth; ++place) {
          if (start + place >= first && start + place <= last) continue;
          for (int64_t lane = 0; lane < kPage; ++lane) places[lane * L::kWidth + place] = T(0);
        }
        const Vector sum = L::multiply_add(load<Vector>(sums + dim), reinterpret_cast<const Cell*>(places),
                                           weights[(start - block) / L::kWidth]);
        sum.store(sums + dim);
      }
    }
  }

  // sums[dim...] += weights x values of the way of one query, from the cell where the tree begins on, in one block.
  void add_joined_values(const Tree& tree, int64_t head, int64_t slot, int64_t block, int64_t begin,
                         const Cell* weights, Sum* sums) const {
    const int64_t first = std::max({tree.before, block, begin}) / L::kWidth * L::kWidth;
    const int64_t position = tree.position(slot), stop = std::min(position + 1, block + kBlockPages * kPage);
    for (int64_t dim = 0; dim < value_lanes; dim += kPage) {
      Vector sum = load<Vector>(sums + dim);
      for (int64_t at = first; at < stop; at += L::kWidth) {
        const int64_t node = tree.node(slot, std::min(at + L::kWidth - 1, position));
        sum = L::multiply_add(sum, joined_cells(tree, head, node) + dim, weights[(at - block) / L::kWidth]);
      }
      sum.store(sums + dim);
    }
  }

  // sums[n][dim...] += weights[n] x values, over one block of tokens, for kVectors vectors of dimensions.
  template <int N, int kVectors>
  void add_values(const int32_t* row_pages, int64_t head, int64_t block, int64_t page_begin, int64_t cell_end,
                  int64_t dim, const Cell* weights, Sum* sums) const {
    constexpr int64_t kCells = kBlockPages * kPage / L::kWidth, kPageCells = kPage / L::kWidth;
    Vector sum[N][kVectors];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[i][v] = load<Vector>(sums + i * value_lanes + dim + v * kPage);
    }
    const int64_t block_page = block / kPage, next_head = std::min(head + 1, num_kv_heads - 1);
    for (int64_t cell = (page_begin - block_page) * kPageCells; cell < cell_end;) {
      const Cell* from = value_page(row_pages[block_page + cell / kPageCells], head) + dim;
      const int64_t stop = std::min(cell_end - cell, kPageCells);
      const Cell* coming = key_page(row_pages[block_page + cell / kPageCells], next_head) + dim * kPageCells;
#pragma GCC unroll 1
      for (int64_t c = 0; c < stop; ++c) {
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) __builtin_prefetch(coming + (c * kVectors + v) * kPage);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 16
          for (int i = 0; i < N; ++i) {
            sum[i][v] = L::multiply_add(sum[i][v], from + c * value_lanes + v * kPage, weights[i * kCells + cell + c]);
          }
        }
      }
      cell += kPageCells;
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sum[i][v].store(sums + i * value_lanes + dim + v * kPage);
    }
  }
};

// Runs task(0), …, task(count - 1) on all threads; whoever is free takes the next.
template <class Task>
void run_tasks(int64_t count, const Task& task) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), count);
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) task(i);
  });
}

template <class T>
void attend_rows(const Layer<T>& layer, int64_t num_rows, int64_t num_kv_heads) {
  struct Pass {
    int32_t row, head, first, count;
  };
  static thread_local std::vector<Pass> passes;
  passes.clear();
  int64_t longest = 0;
  for (int64_t row = 0; row < num_rows; ++row) {
    longest = std::max<int64_t>(longest, layer.query_indptr[row + 1] - layer.query_indptr[row]);
  }
  if (longest <= kShortRow) {
    const int64_t heads_together = num_rows >= 4 * at::get_num_threads() ? num_kv_heads : 1;
    run_tasks(num_rows * num_kv_heads / heads_together, [&](int64_t task) {
      for (int64_t each = task * heads_together; each < (task + 1) * heads_together; ++each) {
        const int64_t row = each / num_kv_heads, head = each % num_kv_heads, queries = layer.num_queries(row);
        layer.store(row, head);
        if (layer.trees != nullptr) layer.join(row, head);
        for (int64_t first = 0, count; first < queries; first += count) {
          layer.attend(row, head, first, count = Layer<T>::pass(queries - first));
        }
      }
    });
    return;
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t queries = layer.num_queries(row);
    for (int64_t head = 0; head < num_kv_heads; ++head) {
      for (int64_t first = 0, count; first < queries; first += count) {
        count = Layer<T>::pass(queries - first);
        passes.push_back({int32_t(row), int32_t(head), int32_t(first), int32_t(count)});
      }
    }
  }
  run_tasks(num_rows * num_kv_heads, [&](int64_t task) {
    layer.store(task / num_kv_heads, task % num_kv_heads);
    if (layer.trees != nullptr) layer.join(task / num_kv_heads, task % num_kv_heads);
  });
  const Pass* all = passes.data();  // of the calling thread: the name means another vector on the others
  run_tasks(static_cast<int64_t>(passes.size()), [&](int64_t task) {
    layer.attend(all[task].row, all[task].head, all[task].first, all[task].count);
  });
}

template <class T>
Tensor attend_typed(const Tensor& query, const Tensor& key, const Tensor& value, Tensor& keys, Tensor& values,
                    const Tensor& query_indptr, const Tensor& kv_lens, const Tensor& page_indptr, const Tensor& pages,
                    const std::optional<Tensor>& tree_indptr, const std::optional<Tensor>& parents, double scale,
                    int64_t window, double softcap, const std::optional<Tensor>& sinks) {
  using Cell = typename Lane<T>::Cell;
  Layer<T> layer;
  layer.query = query.const_data_ptr<T>(), layer.key = key.const_data_ptr<T>(), layer.value = value.const_data_ptr<T>();
  layer.query_token = query.stride(0), layer.query_head = query.stride(1);
  layer.key_token = key.stride(0), layer.key_head = key.stride(1);
  layer.value_token = value.stride(0), layer.value_head = value.stride(1);
  layer.keys = reinterpret_cast<Cell*>(keys.mutable_data_ptr<T>());
  layer.values = reinterpret_cast<Cell*>(values.mutable_data_ptr<T>());
  layer.query_indptr = query_indptr.const_data_ptr<int32_t>(), layer.kv_lens = kv_lens.const_data_ptr<int32_t>();
  layer.page_indptr = page_indptr.const_data_ptr<int32_t>(), layer.pages = pages.const_data_ptr<int32_t>();
  layer.num_kv_heads = key.size(1), layer.group = query.size(1) / key.size(1);
  layer.key_dim = key.size(2), layer.value_dim = value.size(2);
  layer.key_cells = keys.size(2), layer.value_lanes = values.size(3);
  layer.scale = scale, layer.softcap = softcap, layer.window = window;
  if (sinks) layer.sinks = sinks->const_data_ptr<typename Lane<T>::Sum>();
  Tensor out = at::empty({query.size(0), query.size(1), value.size(2)}, query.options());
  layer.out = out.mutable_data_ptr<T>();
  static thread_local Trees trees;
  static thread_local std::vector<Cell> joined;
  if (tree_indptr) {
    trees.plan(layer.kv_lens, kv_lens.size(0), tree_indptr->const_data_ptr<int32_t>(),
               parents->const_data_ptr<int32_t>());
    joined.resize(trees.num_cells() * layer.num_kv_heads * layer.value_lanes);
    layer.trees = trees.rows(), layer.joined = joined.data();
  }
  attend_rows(layer, kv_lens.size(0), layer.num_kv_heads);
  return out;
}

// Stores the keys and values of a step's new tokens, and attends.
//
// query [nnz, heads, key_dim], key [nnz, kv_heads, key_dim], value [nnz, kv_heads, value_dim]; the last dimension is
// contiguous. keys [pages, kv_heads, cells, 16, width] and values [pages, kv_heads, 16 / width, lanes, width]: the pool.
// query_indptr [R + 1], kv_lens [R] with the new tokens, page_indptr [R + 1] into pages: int32. window 0 and softcap 0
// stand for none. tree_indptr [R + 1] into parents, int32: the trees that the last tokens of each row are, their parents
// as indices within the tree, -1 for the token before it; none if no row has any. sinks [heads], of the type of sums: see
// `Layer::sinks`. Returns [nnz, heads, value_dim].
Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, Tensor& keys, Tensor& values,
              const Tensor& query_indptr, const Tensor& kv_lens, const Tensor& page_indptr, const Tensor& pages,
              const std::optional<Tensor>& tree_indptr, const std::optional<Tensor>& parents, double scale,
              int64_t window, double softcap, const std::optional<Tensor>& sinks) {
  TORCH_CHECK(query.stride(2) == 1 && key.stride(2) == 1 && value.stride(2) == 1, "heads must be contiguous");
  switch (query.scalar_type()) {
    case at::kBFloat16:
      return attend_typed<BFloat16>(query, key, value, keys, values, query_indptr, kv_lens, page_indptr, pages,
                                    tree_indptr, parents, scale, window, softcap, sinks);
    case at::kFloat:
      return attend_typed<float>(query, key, value, keys, values, query_indptr, kv_lens, page_indptr, pages,
                                 tree_indptr, parents, scale, window, softcap, sinks);
    case at::kDouble:
      return attend_typed<double>(query, key, value, keys, values, query_indptr, kv_lens, page_indptr, pages,
                                  tree_indptr, parents, scale, window, softcap, sinks);
    default:
      TORCH_CHECK(false, "no kernel for ", query.scalar_type());
  }
}

// Copies keys, or values, of tokens to other slots (page x 16 + place in the page). All are read before one is written.
template <class T>
void move_typed(T* pages, at::IntArrayRef sizes, const Tensor& sources, const Tensor& targets, bool are_values) {
  const int64_t heads = sizes[1], width = sizes[4], page_size = heads * sizes[2] * sizes[3] * width;
  const int64_t runs = heads * (are_values ? sizes[3] : sizes[2]);  // of neighbours in memory, per token
  const int64_t run = are_values ? 1 : width;
  const auto place = [&](int64_t slot, int64_t i) {
    const int64_t in_page = slot % kPage;
    const int64_t offset = are_values ? ((i / sizes[3] * sizes[2] + in_page / width) * sizes[3] + i % sizes[3]) * width +
                                            in_page % width
                                      : (i * kPage + in_page) * width;
    return pages + slot / kPage * page_size + offset;
  };
  const int64_t *from = sources.const_data_ptr<int64_t>(), *to = targets.const_data_ptr<int64_t>();
  std::vector<T> held(sources.numel() * runs * run);
  for (int64_t i = 0; i < sources.numel() * runs; ++i) std::copy_n(place(from[i / runs], i % runs), run, &held[i * run]);
  for (int64_t i = 0; i < targets.numel() * runs; ++i) std::copy_n(&held[i * run], run, place(to[i / runs], i % runs));
}

// pages: the pool's keys or values as in `attend`; sources and targets [n] int64.
void move(Tensor& pages, const Tensor& sources, const Tensor& targets, bool are_values) {
  TORCH_CHECK(sources.numel() == targets.numel(), "as many sources as targets");
  TORCH_CHECK(sources.is_contiguous() && targets.is_contiguous() && pages.is_contiguous(), "tensors must be contiguous");
  switch (pages.scalar_type()) {
    case at::kBFloat16: return move_typed(pages.mutable_data_ptr<BFloat16>(), pages.sizes(), sources, targets, are_values);
    case at::kFloat: return move_typed(pages.mutable_data_ptr<float>(), pages.sizes(), sources, targets, are_values);
    case at::kDouble: return move_typed(pages.mutable_data_ptr<double>(), pages.sizes(), sources, targets, are_values);
    default: TORCH_CHECK(false, "no kernel for ", pages.scalar_type());
  }
}

// y = x W^T + b by our own hands: weights stream through once for as many rows as there are registers for, and each output is
// one sum in order of the inputs. Only tiles of bfloat16 are left to oneDNN.
#ifdef __AMX_BF16__
constexpr bool kTiles = true;
#else
constexpr bool kTiles = false;
#endif
constexpr int kLanes = Floats::kOfPart;
constexpr int kVectors = std::max(2, Floats::kParts);
constexpr int kMaxRows = kRegister == 64 ? 14 : kRegister == 32 ? 6 : 2;  // rows that share one pass over a panel
constexpr int64_t kPanel = kVectors * kLanes;  // outputs whose weights lie together, as [cell][output]
constexpr int64_t kAhead = 2048;               // bytes that are fetched ahead
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
  static constexpr int64_t kWidth = 1;
  static INLINE Sums of(const Cell* cells) { return load<Sums>(cells); }
  static INLINE Sums multiply_add(Sums sum, Sums weights, Input by) { return sum + weights * by; }
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

// weight [out, in] of cells as [panels, in, kPanel], zeros behind the last output.
template <class Cell>
void to_panels(const Cell* from, int64_t out, int64_t in, Cell* to) {
  at::parallel_for(0, (out + kPanel - 1) / kPanel, 1, [&](int64_t begin, int64_t end) {
    for (int64_t output = begin * kPanel; output < std::min(end * kPanel, out); ++output) {
      Cell* panel = to + output / kPanel * in * kPanel + output % kPanel;
      for (int64_t cell = 0; cell < in; ++cell) panel[cell * kPanel] = from[output * in + cell];
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
                    float* to) {
  Sums sum[N][kVectors];
#pragma GCC unroll 16
  for (int row = 0; row < N; ++row) {
#pragma GCC unroll 16
    for (int vector = 0; vector < kVectors; ++vector) sum[row][vector] = Sums{};
  }
#pragma GCC unroll 1
  for (int64_t cell = 0; cell < cells; ++cell) {
    const auto* place = panel + cell * kPanel;
    __builtin_prefetch(ahead.from + cell * ahead.step);
    if (sizeof(*place) * kPanel > 64) __builtin_prefetch(ahead.from + cell * ahead.step + 64);
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

// Rows [count, in] as [cells, count].
template <class T, class Input>
void across(const T* rows, int64_t count, int64_t cells, Input* to) {
  for (int64_t row = 0; row < count; ++row) {
    for (int64_t cell = 0; cell < cells; ++cell) {
      if constexpr (std::is_same_v<Input, float>) {
        to[cell * count + row] = static_cast<float>(rows[row * cells + cell]);
      } else {
        std::memcpy(&to[cell * count + row], rows + (row * cells + cell) * 2, sizeof(Input));
      }
    }
  }
}

// A panel's sums, times `scale` if there is one, plus `bias`, to the first `outputs` of the row at `to`.
template <class T>
void finish(const float* sums, const float* scale, const float* bias, int64_t outputs, T* to) {
  for (int64_t first = 0; first < std::min(outputs, kPanel); first += kPage) {
    Floats values = load<Floats>(sums + first);
    if (scale) values *= load<Floats>(scale + first);
    values += load<Floats>(bias + first);
    T block[kPage];
    Lane<T>::narrow(values, block);
    std::copy_n(block, std::min(outputs - first, kPage), to + first);
  }
}

// A linear layer of ours. Weights [panels, cells, kPanel]; scale and bias [panels * kPanel], in float32.
struct Panels {
  Tensor weight, bias;
  std::optional<Tensor> scale;  // of int8
  bool pairs;
};

template <class T, class Kind>
void multiply(const T* rows, int64_t num_rows, int64_t in, const Panels& layer, int64_t outputs, T* to) {
  static const auto kernels = panel_kernels<Kind>(std::make_integer_sequence<int, kMaxRows>{});
  using Input = typename Kind::Input;
  constexpr int64_t kCellBytes = kPanel * sizeof(typename Kind::Cell);
  const int64_t cells = in / Kind::kWidth, passes = (num_rows + kMaxRows - 1) / kMaxRows;
  const int64_t share = (num_rows + passes - 1) / passes;
  std::vector<Input> inputs(num_rows * cells);
  at::parallel_for(0, (num_rows + share - 1) / share, kTaskSize / (share * in) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin * share; row < std::min(end * share, num_rows); row += share) {
      across(rows + row * in, std::min(share, num_rows - row), cells, inputs.data() + row * cells);
    }
  });
  const auto* weights = static_cast<const typename Kind::Cell*>(layer.weight.const_data_ptr());
  const float* bias = layer.bias.const_data_ptr<float>();
  const float* scale = layer.scale ? layer.scale->const_data_ptr<float>() : nullptr;
  at::parallel_for(0, layer.weight.size(0), kTaskSize / (num_rows * in * kPanel) + 1, [&](int64_t begin, int64_t end) {
    alignas(64) float sums[kMaxRows * kPanel];
    for (int64_t panel = begin; panel < end; ++panel) {
      const int64_t first = panel * kPanel;
      for (int64_t row = 0; row < num_rows; row += share) {
        const int64_t count = std::min(share, num_rows - row);
        const auto* place = weights + first * cells;
        // One pass fetches what it needs next. Of several, each fetches its part of the next panel: arithmetic hides memory.
        Ahead ahead{reinterpret_cast<const char*>(place) + kAhead, kCellBytes};
        if (passes > 1) {
          const char* next = reinterpret_cast<const char*>(place + cells * kPanel);
          ahead = {next + row / share * cells * kCellBytes / passes, kCellBytes / passes};
        }
        kernels[count - 1](inputs.data() + row * cells, place, cells, ahead, sums);
        for (int64_t i = 0; i < count; ++i) {
          finish(sums + i * kPanel, scale ? scale + first : nullptr, bias + first, outputs - first,
                 to + (row + i) * outputs + first);
        }
      }
    }
  });
}

template <class T>
void multiply(const T* rows, int64_t num_rows, int64_t in, const Panels& layer, int64_t outputs, T* to) {
  if (layer.scale) return multiply<T, ByteCells>(rows, num_rows, in, layer, outputs, to);
  if constexpr (std::is_same_v<T, float>) {
    multiply<T, FloatCells>(rows, num_rows, in, layer, outputs, to);
  } else if (layer.pairs) {
    multiply<T, PairCells>(rows, num_rows, in, layer, outputs, to);
  } else {
    multiply<T, HalfCells>(rows, num_rows, in, layer, outputs, to);
  }
}

Tensor own_linear(const Tensor& input, const Panels& layer, int64_t outputs) {
  const Tensor rows = input.contiguous();
  const int64_t in = rows.size(-1), num_rows = rows.numel() / in;
  auto sizes = rows.sizes().vec();
  sizes.back() = outputs;
  Tensor out = at::empty(sizes, rows.options());
  if (num_rows == 0) return out;
  switch (rows.scalar_type()) {
    case at::kFloat:
      multiply(rows.const_data_ptr<float>(), num_rows, in, layer, outputs, out.mutable_data_ptr<float>());
      break;
    case at::kBFloat16:
      multiply(rows.const_data_ptr<BFloat16>(), num_rows, in, layer, outputs, out.mutable_data_ptr<BFloat16>());
      break;
    default: TORCH_CHECK(false, "no kernel for ", rows.scalar_type());
  }
  return out;
}

// `values` [n] in float32, zeros behind them up to whole panels; all zeros if there are none.
Tensor padded(const std::optional<Tensor>& values, int64_t out) {
  Tensor whole = at::zeros({(out + kPanel - 1) / kPanel * kPanel}, at::kFloat);
  if (values) whole.narrow(0, 0, out).copy_(*values);
  return whole;
}

Panels own_layer(const Tensor& weight, const std::optional<Tensor>& bias, const std::optional<Tensor>& scale) {
  const int64_t out = weight.size(0), in = weight.size(1), panels = (out + kPanel - 1) / kPanel;
  const bool pairs = kPairs && weight.scalar_type() == at::kBFloat16 && in % 2 == 0;
  Tensor packed = pairs ? at::zeros({panels, in / 2, kPanel, 2}, weight.options()) : at::zeros({panels, in, kPanel}, weight.options());
  const void* from = weight.const_data_ptr();
  void* to = packed.mutable_data_ptr();
  const auto pack = [&](auto cell, int64_t cells) {
    using Cell = decltype(cell);
    to_panels(static_cast<const Cell*>(from), out, cells, static_cast<Cell*>(to));
  };
  switch (weight.scalar_type()) {
    case at::kFloat: pack(uint32_t{}, in); break;
    case at::kBFloat16: pairs ? pack(uint32_t{}, in / 2) : pack(uint16_t{}, in); break;
    case at::kChar: pack(int8_t{}, in); break;
    default: TORCH_CHECK(false, "no kernel for ", weight.scalar_type());
  }
  return {packed, padded(bias, out), scale ? std::optional(padded(scale, out)) : std::nullopt, pairs};
}

// oneDNN's linear layer on weights in its own layout; both operators are registered by PyTorch.
Tensor onednn_linear(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                             .typed<Tensor(const Tensor&, const Tensor&, const std::optional<Tensor>&, std::string_view,
                                           c10::List<std::optional<at::Scalar>>, std::optional<std::string_view>)>();
  static const c10::List<std::optional<at::Scalar>> no_scalars;
  return op.call(input, weight, bias, "none", no_scalars, std::nullopt);
}

Tensor onednn_layout(const Tensor& weight) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("mkldnn::_reorder_linear_weight", "")
                             .typed<Tensor(const Tensor&, std::optional<c10::SymInt>)>();
  return op.call(weight, c10::SymInt(kTypicalTokens));
}

struct Linear {
  std::optional<Panels> own;
  Tensor weight;  // else: in the layout of oneDNN
  std::optional<Tensor> bias;
};

// What attention reads in one step, layer by layer; all as in `attend`.
struct Step {
  std::vector<Tensor> keys, values;
  Tensor query_indptr, kv_lens, page_indptr, pages;
  std::optional<Tensor> tree_indptr, parents;
  std::vector<double> scales;
  std::vector<int64_t> windows;
  std::vector<double> softcaps;
  c10::List<std::optional<Tensor>> sinks;
};

// A module of which there is a compiled program: its linear layers, the program, and what the step that runs attends with.
struct Module {
  std::vector<Linear> linears;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> program;
  Step* step = nullptr;  // none: attention is Python's
};

// By the number that stands in its handle. A module stays where it is until it is freed.
std::mutex modules_lock;
std::unordered_map<int64_t, std::unique_ptr<Module>> modules;
int64_t num_modules = 0;

Module& module_of(const Tensor& handle) {
  const std::lock_guard<std::mutex> guard(modules_lock);
  return *modules.at(*handle.const_data_ptr<int64_t>());
}

// A new handle [] int64: a module without linear layers and without a program so far.
Tensor new_module() {
  int64_t number;
  {
    const std::lock_guard<std::mutex> guard(modules_lock);
    modules[number = ++num_modules] = std::make_unique<Module>();
  }
  return at::scalar_tensor(number, at::kLong);
}

// Adds a layer: weight [out, in], bias [out] or none; int8 weights with the scale [out] of each output. Layers are numbered
// from 0. Returns whether inputs of many different sizes are slower than those of few: oneDNN makes a program for each.
bool add_weight(const Tensor& handle, const Tensor& weight, const std::optional<Tensor>& bias,
                const std::optional<Tensor>& scale) {
  TORCH_CHECK(scale.has_value() == (weight.scalar_type() == at::kChar), "int8 weights, and only they, have a scale");
  const bool by_tiles = kTiles && weight.scalar_type() == at::kBFloat16;
  if (by_tiles) {
    module_of(handle).linears.push_back({std::nullopt, onednn_layout(weight.contiguous()), bias});
  } else {
    module_of(handle).linears.push_back({own_layer(weight.contiguous(), bias, scale), {}, std::nullopt});
  }
  return by_tiles;
}

// Frees the module of a handle. A plain function and not an operator: Python's finalizers call it at any point, also where
// operators are traced. No lock is held while tensors go.
void free_module(int64_t number) {
  std::unique_ptr<Module> gone;
  const std::lock_guard<std::mutex> guard(modules_lock);
  if (const auto found = modules.find(number); found != modules.end()) {
    gone.swap(found->second);
    modules.erase(found);
  }
}

// input [..., in] by layer `index` of a handle: [..., out_features]. oneDNN gets one row as two, since it sums up a single
// one in another order.
Tensor linear(const Tensor& input, const Tensor& handle, int64_t index, int64_t out_features) {
  const Linear& layer = module_of(handle).linears.at(index);
  if (layer.own) return own_linear(input, *layer.own, out_features);
  if (input.numel() == input.size(-1)) {
    const Tensor twice = input.reshape({1, input.size(-1)}).expand({2, input.size(-1)}).contiguous();
    auto sizes = input.sizes().vec();
    sizes.back() = out_features;
    return onednn_linear(twice, layer.weight, layer.bias).narrow(0, 0, 1).reshape(sizes);
  }
  return onednn_linear(input, layer.weight, layer.bias);
}

// The first of the largest entries of each row: logits [rows, vocab], contiguous rows, to [rows] int64. NaN counts as
// larger than any number, as in torch.argmax.
template <class T>
void argmax_rows(const Tensor& logits, Tensor& best) {
  using L = Lane<T>;
  using Vector = typename L::Vector;
  using Sum = typename L::Sum;
  const int64_t size = logits.size(1), stride = logits.stride(0);
  const T* all = logits.const_data_ptr<T>();
  int64_t* to = best.mutable_data_ptr<int64_t>();
  at::parallel_for(0, logits.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = all + row * stride;
      Vector largest_seen(-std::numeric_limits<Sum>::infinity());
      Vector nothing = {};  // NaN once an entry is not finite
      int64_t at = 0;
      for (; at + kPage <= size; at += kPage) {
        const Vector entries = L::widen(from + at);
        nothing += entries * Sum{0};
        largest_seen = larger(entries, largest_seen);
      }
      Sum largest_entry = largest(largest_seen), none = total(nothing);
      for (; at < size; ++at) {
        const Sum entry = static_cast<Sum>(from[at]);
        none += entry * 0;
        largest_entry = std::max(largest_entry, entry);
      }
      int64_t place = size;
      if (none != 0) {
        for (place = 0; place < size && !std::isnan(static_cast<Sum>(from[place]));) ++place;
      }
      if (place == size) {
        for (place = 0; place + 1 < size && static_cast<Sum>(from[place]) != largest_entry;) ++place;
      }
      to[row] = place;
    }
  });
}

Tensor argmax(const Tensor& logits) {
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1, "rows must be contiguous");
  Tensor best = at::empty({logits.size(0)}, logits.options().dtype(at::kLong));
  switch (logits.scalar_type()) {
    case at::kBFloat16: argmax_rows<BFloat16>(logits, best); break;
    case at::kFloat: argmax_rows<float>(logits, best); break;
    case at::kDouble: argmax_rows<double>(logits, best); break;
    default: TORCH_CHECK(false, "no kernel for ", logits.scalar_type());
  }
  return best;
}

// The k largest entries of each row, the largest first, of equal ones the first: their places [rows, k], and the logarithm
// of what each has of the sum of e^(entry * scale) over its row. Both come as doubles in one tensor [2, rows, k], as the
// host wants them together. Shares are NaN in rows with NaN, or without a finite largest entry; places never are.
template <class T>
void top_rows(const Tensor& logits, double scale, Tensor& best) {
  using L = Lane<T>;
  using Vector = typename L::Vector;
  using Sum = typename L::Sum;
  const int64_t rows = logits.size(0), size = logits.size(1), stride = logits.stride(0), k = best.size(2);
  const T* all = logits.const_data_ptr<T>();
  double* to = best.mutable_data_ptr<double>();
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    std::vector<std::pair<Sum, int64_t>> top(k);
    for (int64_t row = begin; row < end; ++row) {
      const T* from = all + row * stride;
      for (int64_t place = 0; place < k; ++place) top[place] = {-std::numeric_limits<Sum>::infinity(), place};
      int64_t found = 0;  // places of `top` that are taken
      const auto look = [&](int64_t at) {
        const Sum entry = static_cast<Sum>(from[at]);
        if (std::isnan(entry) || (found == k && !(entry > top[k - 1].first))) return;
        int64_t place = found < k ? found++ : k - 1;
        for (; place > 0 && entry > top[place - 1].first; --place) top[place] = top[place - 1];
        top[place] = {entry, at};
      };
      int64_t at = 0;
      for (; at < std::min(k, size); ++at) look(at);
      for (; at < size && at % kPage != 0; ++at) look(at);
      for (; at + kPage <= size; at += kPage) {
        if (!(largest(L::widen(from + at)) <= top[k - 1].first) || found < k)
          for (int64_t lane = 0; lane < kPage; ++lane) look(at + lane);
      }
      for (; at < size; ++at) look(at);
      const Sum high = top[0].first, by = static_cast<Sum>(scale);
      Vector shares = {};
      for (at = 0; at + kPage <= size; at += kPage) {
        const Vector below = (L::widen(from + at) - high) * by;
        shares += where_equal(below, below, exponential(below), below);
      }
      double sum = total(shares);
      for (; at < size; ++at) sum += std::exp((static_cast<Sum>(from[at]) - high) * by);
      for (int64_t place = 0; place < k; ++place) {
        to[row * k + place] = static_cast<double>(top[place].second);
        to[(rows + row) * k + place] = static_cast<double>((top[place].first - high) * by) - std::log(sum);
      }
    }
  });
}

Tensor top(const Tensor& logits, int64_t k, double scale) {
  TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1, "rows must be contiguous");
  TORCH_CHECK(0 < k && k <= logits.size(1) && scale > 0, "k must be from 1 to the vocabulary, and the scale above 0");
  Tensor best = at::empty({2, logits.size(0), k}, logits.options().dtype(at::kDouble));
  switch (logits.scalar_type()) {
    case at::kBFloat16: top_rows<BFloat16>(logits, scale, best); break;
    case at::kFloat: top_rows<float>(logits, scale, best); break;
    case at::kDouble: top_rows<double>(logits, scale, best); break;
    default: TORCH_CHECK(false, "no kernel for ", logits.scalar_type());
  }
  return best;
}

inline uint64_t splitmix64(uint64_t value) {
  value += 0x9E3779B97F4A7C15u;
  value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9u;
  value = (value ^ value >> 27) * 0x94D049BB133111EBu;
  return value ^ value >> 31;
}

inline uint32_t fmix32(uint32_t bits) {
  bits ^= bits >> 16;
  bits *= 0x85EBCA6Bu;
  bits ^= bits >> 13;
  bits *= 0xC2B2AE35u;
  return bits ^ bits >> 16;
}

// The noise of one position: emssd/sampling/noise.py in the same words.
struct Noise {
  uint32_t low, high;

  Noise(int64_t key, int64_t position) {
    const uint64_t state = splitmix64(static_cast<uint64_t>(key) ^ splitmix64(static_cast<uint64_t>(position)));
    low = static_cast<uint32_t>(state), high = static_cast<uint32_t>(state >> 32);
  }

  uint32_t bits(uint32_t token) const { return fmix32(fmix32(token * 0x9E3779B9u + low) ^ high); }
};

inline double gumbel(uint32_t bits) { return -std::log(-std::log((bits + 0.5) * 0x1p-32)); }

// log(1 + x) for -0.3 < x < 0.42, to two units in the last place of a float or so: Cephes' logf.
inline float logarithm_near_one(float x) {
  float sum = 7.0376836292e-2f;
  for (const float next : {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f, -1.6668057665e-1f,
                           2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f}) {
    sum = sum * x + next;
  }
  return x + x * x * (sum * x - 0.5f);
}

// log(value) of an ordinary positive float. `near` is value - 1, and stands for it where the value is from 0.707 to 1.414.
inline float logarithm(float value, float near) {
  uint32_t bits, near_bits, rest_bits;
  std::memcpy(&bits, &value, sizeof(bits)), std::memcpy(&near_bits, &near, sizeof(near_bits));
  const int32_t exponent = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;  // of 2; the rest is from 0.707 to 1.414
  bits -= static_cast<uint32_t>(exponent) << 23;
  float rest;
  std::memcpy(&rest, &bits, sizeof(rest));
  rest -= 1;
  std::memcpy(&rest_bits, &rest, sizeof(rest_bits));
  const uint32_t far = exponent == 0 ? 0 : ~0u;  // masks, as GCC makes no vectors of a loop with a branch
  rest_bits = (rest_bits & far) | (near_bits & ~far);
  std::memcpy(&rest, &rest_bits, sizeof(rest));
  return logarithm_near_one(rest) + static_cast<float>(exponent) * 0.693147181f;
}

// The same noise in float, wrong by at most 1e-5.
inline float gumbel_in_float(uint32_t bits) {
  const float uniform = (static_cast<float>(bits) + 0.5f) * 0x1p-32f;
  const float rest = (static_cast<float>(~bits) + 0.5f) * 0x1p-32f;  // 1 - uniform, also where that is tiny
  const float waiting = -logarithm(uniform, -rest);
  return -logarithm(waiting, waiting - 1);
}

// What is done to a row of logits before a token is drawn, as in emssd/sampling/params.py.
struct Warp {
  double temperature, top_k, top_p, min_p;
};

// Draws tokens. A token's score is its logit divided by the temperature, and its total is score and noise. The largest total
// wins, among the tokens that top-k, top-p and min-p leave.
//
// Totals are computed in double, and only for tokens whose upper bound, a float, reaches the best total so far. The bound
// gets kSlack on top, for what floats may be wrong by. Shares of the probability are known to kShareError.
// Where rounding could decide, here or in PyTorch, nothing is drawn: then PyTorch decides.
//
// All three limits leave the tokens above some score. So top-p need not sort: the best token of all is left if those with
// higher scores have less than top_p. If it is not left, no token with its score or a lower one is, and the rest races again.
template <class T>
class Sampler {
  using L = Lane<T>;
  using Sum = typename L::Sum;
  using Vector = typename L::Vector;

  static constexpr int64_t kChunk = 64;
  static constexpr Sum kNone = -std::numeric_limits<Sum>::infinity();
  static constexpr double kLeastNoise = -3.13, kMostNoise = 22.88;  // of 32 bits
  static constexpr double kSlack = 1e-3;       // ten times what floats of the size of a bound are wrong by
  static constexpr double kShareError = 2e-5;  // 1.8e-7 times at most 14, the mean logarithm of a weight, for both sums
  static constexpr double kLogError = 1e-12;   // of a logarithm in double, of any libm
  static constexpr double kLargest = 0x1p32;   // score whose last bit is far below kSlack
  static constexpr double kColdest = 1e-7, kHottest = 1e6;  // temperatures whose reciprocals are ordinary floats

 public:
  // The token of a row [size]; -1 for none: rounding could decide, or a logit is NaN, or the largest not finite.
  int64_t draw(const T* row, int64_t size, Noise noise, const Warp& warp) {
    values_ = row, tokens_ = nullptr, size_ = size, temperature_ = warp.temperature;
    if (!(temperature_ >= kColdest && temperature_ <= kHottest)) return -1;
    if constexpr (std::is_same_v<T, double>) {  // different logits may have equal scores
      if (temperature_ != 1) divide();
    }
    by_ = static_cast<Sum>(1 / temperature_);
    if (!find_high() || !(std::fabs(score(high_)) < kLargest)) return -1;
    if (warp.top_k > 0 && warp.top_k < size) keep_top(static_cast<int64_t>(warp.top_k));
    const double limit = std::log(warp.min_p);  // -inf for none
    Sum floor = kNone;
    if (warp.min_p > 0) {  // surely not too high
      const double high = static_cast<double>(high_);
      floor = static_cast<Sum>(high + (limit - kSlack) * temperature_ - std::fabs(high) * 0x1p-20);
    }
    for (;;) {  // until the best is one that is left; each turn raises the floor
      const Best best = race(noise, floor);
      if (best.token < 0 || !(best.total - best.second > kLogError + (std::fabs(best.total) + 32) * 0x1p-50)) return -1;
      if (best.value == high_) return best.token;
      const double below = score(best.value) - score(high_);
      if (below < limit - kLogError) {
        floor = best.value;
        continue;
      }
      if (below < limit + kLogError) return -1;
      if (warp.top_p >= 1) return best.token;
      const double share = share_above(best.value);
      if (share < warp.top_p - kShareError) return best.token;
      if (share <= warp.top_p + kShareError) return -1;
      floor = best.value;
    }
  }

  // The `width` tokens of a row [size] with the largest totals, the largest first, and how likely the target draws them:
  // the logarithm of what each has of the sum of e^(total * temperature / error) over the row. -inf stands behind the last
  // token that is left, and everywhere if a logit is NaN, or the largest not finite.
  //
  // Totals are compared in double, where a float says that they may be among the largest. The sum is of Sum's precision.
  void likeliest(const T* row, int64_t size, Noise noise, const Warp& warp, double error, int64_t width, double* tokens,
                 double* shares) {
    values_ = row, tokens_ = nullptr, size_ = size, temperature_ = warp.temperature;
    by_ = static_cast<Sum>(1 / temperature_);
    std::fill_n(tokens, width, 0.0), std::fill_n(shares, width, -std::numeric_limits<double>::infinity());
    if (!find_high()) return;
    if (warp.top_k > 0 && warp.top_k < size) keep_top(static_cast<int64_t>(warp.top_k));
    Sum floor = kNone;
    if (warp.min_p > 0) floor = static_cast<Sum>(static_cast<double>(high_) + std::log(warp.min_p) * temperature_);
    if (warp.top_p < 1) floor = std::max(floor, nucleus_floor(warp.top_p));
    const double pull = temperature_ / error;
    const Sum highest = find_exponents(noise, floor, static_cast<Sum>(1 / error), static_cast<Sum>(pull));
    Doubles all = {};
    int64_t found = 0;  // places of `shares` that are taken
    Sum bound = kNone;
    for (int64_t at = 0; at < size_; at += kChunk) {
      const Sum* exponents = exponents_.data() + at;
      int any = 0;
      for (int64_t lane = 0; lane < kChunk; ++lane) any |= exponents[lane] > bound;
      for (int64_t page = 0; page < kChunk; page += kPage) {
        all += converted<double>(weights(exponents + page, highest, 1));
      }
      for (int64_t lane = 0; any != 0 && lane < kChunk; ++lane) {
        if (!(exponents[lane] > bound)) continue;
        const uint32_t token = tokens_ == nullptr ? static_cast<uint32_t>(at + lane) : tokens_[at + lane];
        const double below = static_cast<double>(values_[at + lane]) - static_cast<double>(high_);
        const double total = below / error + pull * gumbel(noise.bits(token));
        if (found == width && !(total > shares[width - 1])) continue;
        int64_t place = found < width ? found++ : width - 1;
        for (; place > 0 && total > shares[place - 1]; --place) {
          shares[place] = shares[place - 1], tokens[place] = tokens[place - 1];
        }
        shares[place] = total, tokens[place] = static_cast<double>(token);
        const double least = shares[width - 1];  // what floats are wrong by grows with both parts of a total
        if (found == width) bound = static_cast<Sum>(least - (std::fabs(least) + 64 * pull) * 0x1p-18);
      }
    }
    const double whole = static_cast<double>(highest) + std::log(total(all));
    for (int64_t place = 0; place < found; ++place) shares[place] -= whole;
  }

 private:
  struct Best {
    int64_t token = -1;
    Sum value = kNone;
    double total = -std::numeric_limits<double>::infinity(), second = total;
  };

  double score(Sum value) const { return static_cast<double>(value) / temperature_; }

  // Calls use(values, place of the first) with kChunk at a time; behind the last are some of -inf. What is done with them
  // stands in plain loops.
  template <class Use>
  void each_chunk(const Use& use) const {
    Sum values[kChunk];
    for (int64_t at = 0; at < size_; at += kChunk) {
      const T* from = values_ + at;
      T rest[kChunk];
      if (size_ - at < kChunk) {
        std::fill_n(rest, kChunk, static_cast<T>(kNone));
        from = std::copy_n(from, size_ - at, rest) - (size_ - at);
      }
      for (int64_t page = 0; page < kChunk; page += kPage) {
        const Vector widened = L::widen(from + page);
        widened.store(values + page);
      }
      use(values, at);
    }
  }

  void divide() {
    scores_.resize(size_);
    for (int64_t at = 0; at < size_; ++at) scores_[at] = values_[at] / temperature_;
    values_ = scores_.data(), temperature_ = 1;
  }

  // Finds the largest value. Returns whether it is finite, and none is NaN.
  bool find_high() {
    Sum most[kChunk];
    std::fill_n(most, kChunk, kNone);
    int strange = 0;
    each_chunk([&](const Sum* values, int64_t) {
      for (int64_t lane = 0; lane < kChunk; ++lane) {
        strange |= values[lane] != values[lane];
        most[lane] = values[lane] > most[lane] ? values[lane] : most[lane];
      }
    });
    high_ = *std::max_element(most, most + kChunk);
    return strange == 0 && std::isfinite(high_);
  }

  // Leaves the k largest values, and those equal to the last of them. At least k are no smaller than the k-th largest of
  // many maxima, each of values of its own.
  void keep_top(int64_t k) {
    Sum bound = kNone;
    if (size_ >= 2 * k + kChunk) {
      const int64_t strip = std::max<int64_t>(1, size_ / (8 * k + kChunk));  // chunks that one maximum in each lane is of
      maxima_.clear();
      int64_t num = 0;
      each_chunk([&](const Sum* values, int64_t) {
        if (num++ % strip == 0) {
          maxima_.insert(maxima_.end(), values, values + kChunk);
          return;
        }
        Sum* most = maxima_.data() + maxima_.size() - kChunk;
        for (int64_t lane = 0; lane < kChunk; ++lane) most[lane] = values[lane] > most[lane] ? values[lane] : most[lane];
      });
      bound = kth_largest(k);
    }
    kept_.clear(), kept_tokens_.clear(), maxima_.clear();
    each_chunk([&](const Sum* values, int64_t at) {
      int found = 0;
      for (int64_t lane = 0; lane < kChunk; ++lane) found |= values[lane] >= bound;
      if (found == 0) return;
      for (int64_t lane = 0; lane < std::min(kChunk, size_ - at); ++lane) {
        if (!(values[lane] >= bound)) continue;
        kept_.push_back(values_[at + lane]), kept_tokens_.push_back(static_cast<uint32_t>(at + lane));
        maxima_.push_back(values[lane]);
      }
    });
    bound = kth_largest(k);
    int64_t left = 0;
    for (size_t place = 0; place < kept_.size(); ++place) {
      if (static_cast<Sum>(kept_[place]) >= bound) kept_[left] = kept_[place], kept_tokens_[left++] = kept_tokens_[place];
    }
    kept_tokens_.resize(left + kChunk);  // also for a last chunk that is not full
    values_ = kept_.data(), tokens_ = kept_tokens_.data(), size_ = left;
  }

  Sum kth_largest(int64_t k) {
    std::nth_element(maxima_.begin(), maxima_.begin() + (k - 1), maxima_.end(), std::greater<Sum>());
    return maxima_[k - 1];
  }

  // The largest total of values above a floor, which is below the largest value, and the next one if it is near.
  //
  // A total is above another one only if -log(u) < e^(score - other). There 1 - u stands for -log(u), from below, and what
  // is linear between powers of 2 for the exponential function, from above.
  Best race(Noise noise, Sum floor) const {
    Best best;
    const double high = score(high_);
    double known = high + kLeastNoise - kSlack;  // a total that is reached
    float reach = static_cast<float>(high - known + kSlack);
    each_chunk([&](const Sum* values, int64_t at) {
      float above[kChunk];
      int any = 0;
      for (int64_t lane = 0; lane < kChunk; ++lane) {
        const float exponent = static_cast<float>((values[lane] - high_) * by_) + reach;
        above[lane] = exponent > kLowest ? exponent : kLowest;
        any |= exponent > static_cast<float>(-kMostNoise);
      }
      if (any == 0) return;
      uint32_t tokens[kChunk], bits[kChunk];
      if (tokens_ != nullptr) std::copy_n(tokens_ + at, kChunk, tokens);
      for (int64_t lane = 0; lane < kChunk; ++lane) {
        if (tokens_ == nullptr) tokens[lane] = static_cast<uint32_t>(at + lane);
        bits[lane] = noise.bits(tokens[lane]);
      }
      int open[kChunk];
      any = 0;
      for (int64_t lane = 0; lane < kChunk; ++lane) {
        const int32_t whole = static_cast<int32_t>((above[lane] * 1.44269504f + 127.0f) * 0x1p23f);
        float most;
        std::memcpy(&most, &whole, sizeof(most));
        open[lane] = static_cast<float>(static_cast<int32_t>(~bits[lane] >> 8)) * 0x1p-24f < most;
        any |= open[lane];
      }
      if (any == 0) return;
      for (int64_t lane = 0; lane < kChunk; ++lane) {
        if (!open[lane] || !(values[lane] > floor)) continue;
        const double total = score(values[lane]) + gumbel(bits[lane]);
        if (total > best.total) {
          best = {static_cast<int64_t>(tokens[lane]), values[lane], total, best.total};
          known = std::max(known, total), reach = static_cast<float>(high - known + kSlack);
        } else {
          best.second = std::max(best.second, total);
        }
      }
    });
    return best;
  }

  // Writes (value - high_) * by + pull * noise for values from a floor on, and -inf for others. Returns the largest.
  Sum find_exponents(Noise noise, Sum floor, Sum by, Sum pull) {
    exponents_.resize(size_ + kChunk);
    Sum most[kChunk];
    std::fill_n(most, kChunk, kNone);
    each_chunk([&](const Sum* values, int64_t at) {
      uint32_t tokens[kChunk];
      Sum noises[kChunk];
      if (tokens_ != nullptr) std::copy_n(tokens_ + at, kChunk, tokens);
      for (int64_t lane = 0; lane < kChunk; ++lane) {
        if (tokens_ == nullptr) tokens[lane] = static_cast<uint32_t>(at + lane);
        tokens[lane] = noise.bits(tokens[lane]);
      }
      for (int64_t lane = 0; lane < kChunk; ++lane) {
        if constexpr (std::is_same_v<Sum, float>) {
          noises[lane] = gumbel_in_float(tokens[lane]);
        } else {
          noises[lane] = gumbel(tokens[lane]);
        }
      }
      Sum* to = exponents_.data() + at;
      for (int64_t lane = 0; lane < kChunk; ++lane) {
        const Sum exponent = (values[lane] - high_) * by + pull * noises[lane];
        to[lane] = values[lane] >= floor ? exponent : kNone;
        most[lane] = to[lane] > most[lane] ? to[lane] : most[lane];
      }
    });
    return *std::max_element(most, most + kChunk);
  }

  // e^((value - high) * by) of a page of values that are not above `high`; e^kLowest where it is less.
  static Vector weights(const Sum* values, Sum high, Sum by) {
    Sum below[kPage];
    for (int64_t lane = 0; lane < kPage; ++lane) {
      const Sum exponent = (values[lane] - high) * by;
      below[lane] = exponent > kLowest ? exponent : kLowest;
    }
    if constexpr (std::is_same_v<Sum, float>) {
      return exponential_within(load<Floats>(below));
    } else {
      return exponential(load<Doubles>(below));
    }
  }

  // The least value that top-p leaves: the last one, from the largest on, before which values have less than top_p.
  Sum nucleus_floor(double top_p) {
    exponents_.resize(size_ + kChunk);
    Doubles all = {};
    each_chunk([&](const Sum* values, int64_t at) {
      for (int64_t page = 0; page < kChunk; page += kPage) {
        const Vector found = weights(values + page, high_, by_);
        all += converted<double>(found);
        found.store(exponents_.data() + at + page);
      }
    });
    // All values whose share is less than `light` have less than 1 - top_p together.
    const double whole = total(all), limit = top_p * whole, light = (whole - limit) / static_cast<double>(size_);
    weighed_.clear();
    for (int64_t at = 0; at < size_; ++at) {
      if (exponents_[at] >= light) weighed_.emplace_back(static_cast<Sum>(values_[at]), exponents_[at]);
    }
    auto first = weighed_.begin(), last = weighed_.end();
    for (double before = 0; last - first > 1;) {
      const auto middle = first + (last - first) / 2;
      std::nth_element(first, middle, last, std::greater<>());
      double sum = before;
      for (auto each = first; each != middle; ++each) sum += each->second;
      if (sum < limit) {
        first = middle, before = sum;
      } else {
        last = middle;
      }
    }
    return first->first;
  }

  // What the values above one have of the probability.
  double share_above(Sum value) const {
    Doubles all = {}, above = {};
    each_chunk([&](const Sum* values, int64_t) {
      float below[kChunk];
      int32_t mask[kChunk];
      for (int64_t lane = 0; lane < kChunk; ++lane) {
        const float exponent = static_cast<float>((values[lane] - high_) * by_);
        below[lane] = exponent > kLowest ? exponent : kLowest;
        mask[lane] = values[lane] > value ? -1 : 0;
      }
      for (int64_t page = 0; page < kChunk; page += kPage) {
        const Floats weights = exponential_within(load<Floats>(below + page));
        all += converted<double>(weights);
        above += converted<double>(as<Floats>(as<Ints>(weights) & load<Ints>(mask + page)));
      }
    });
    return total(above) / total(all);
  }

  const T* values_;         // [size_] logits
  const uint32_t* tokens_;  // [size_] whose; null if they are all from 0 on
  int64_t size_;
  double temperature_;
  Sum high_, by_;  // the largest value; the reciprocal of the temperature
  std::vector<double> scores_;
  std::vector<Sum> maxima_, exponents_;
  std::vector<std::pair<Sum, Sum>> weighed_;  // values, and what they have of the probability up to a factor
  std::vector<T> kept_;
  std::vector<uint32_t> kept_tokens_;
};

// The places of drawn tokens: row rows[i] of logits [R, vocab], contiguous rows, with the noise of keys[i] and positions[i],
// all [n] int64, after warps[i]: temperature, top_k, top_p and min_p as in emssd/sampling/params.py, double.
struct Places {
  int64_t num;
  const int64_t *rows, *keys, *positions;
  const double* warps;

  Places(const Tensor& logits, const Tensor& row_places, const Tensor& key, const Tensor& position, const Tensor& warp)
      : num(row_places.size(0)) {
    TORCH_CHECK(logits.dim() == 2 && logits.stride(1) == 1, "rows must be contiguous");
    TORCH_CHECK(logits.size(1) < int64_t{1} << 31, "the vocabulary is too large");
    check(row_places, key), check(key, position);
    TORCH_CHECK(warp.dim() == 2 && warp.size(0) == num && warp.size(1) == 4 && warp.is_contiguous() &&
                warp.scalar_type() == at::kDouble, "each row has a temperature, top_k, top_p and min_p in float64");
    rows = row_places.const_data_ptr<int64_t>(), keys = key.const_data_ptr<int64_t>();
    positions = position.const_data_ptr<int64_t>(), warps = warp.const_data_ptr<double>();
    for (int64_t place = 0; place < num; ++place) {
      TORCH_CHECK(0 <= rows[place] && rows[place] < logits.size(0), "there is no row ", rows[place]);
    }
  }

  static void check(const Tensor& keys, const Tensor& positions) {
    for (const Tensor* each : {&keys, &positions}) {
      TORCH_CHECK(each->dim() == 1 && each->is_contiguous() && each->scalar_type() == at::kLong, "places must be int64");
    }
    TORCH_CHECK(keys.size(0) == positions.size(0), "each key has a position");
  }

  // Calls use(sampler, place, its row, its noise, its warp) for each place.
  template <class T, class Use>
  void each_of(const Tensor& logits, const Use& use) const {
    const T* all = logits.const_data_ptr<T>();
    const int64_t stride = logits.stride(0);
    at::parallel_for(0, num, 1, [&](int64_t begin, int64_t end) {
      Sampler<T> sampler;
      for (int64_t place = begin; place < end; ++place) {
        const double* warp = warps + place * 4;
        use(sampler, place, all + rows[place] * stride, Noise(keys[place], positions[place]),
            Warp{warp[0], warp[1], warp[2], warp[3]});
      }
    });
  }

  template <class Use>
  void each(const Tensor& logits, const Use& use) const {
    switch (logits.scalar_type()) {
      case at::kBFloat16: each_of<BFloat16>(logits, use); break;
      case at::kFloat: each_of<float>(logits, use); break;
      case at::kDouble: each_of<double>(logits, use); break;
      default: TORCH_CHECK(false, "no kernel for ", logits.scalar_type());
    }
  }
};

// The tokens [n] int64 that are drawn at `Places`. -1 where rounding could decide, and in rows with NaN or without a finite
// largest logit.
Tensor sample(const Tensor& logits, const Tensor& rows, const Tensor& keys, const Tensor& positions, const Tensor& warps) {
  const Places places(logits, rows, keys, positions, warps);
  Tensor chosen = at::empty({places.num}, rows.options());
  int64_t* to = chosen.mutable_data_ptr<int64_t>();
  places.each(logits, [&](auto& sampler, int64_t place, auto* row, Noise noise, const Warp& warp) {
    to[place] = sampler.draw(row, logits.size(1), noise, warp);
  });
  return chosen;
}

// The `width` likeliest draws at `Places` under an error of the logits: see emssd/sampling/draws.py. Tokens and the
// logarithms of how likely come as doubles in one tensor [2, n, width], as the host wants them together; -inf where no
// token is left.
Tensor top_draws(const Tensor& logits, const Tensor& rows, const Tensor& keys, const Tensor& positions, const Tensor& warps,
                 double error, int64_t width) {
  const Places places(logits, rows, keys, positions, warps);
  TORCH_CHECK(width > 0 && error > 0, "the width must be at least 1, and the error above 0");
  Tensor found = at::empty({2, places.num, width}, warps.options());
  double* tokens = found.mutable_data_ptr<double>();
  double* shares = tokens + places.num * width;
  places.each(logits, [&](auto& sampler, int64_t place, auto* row, Noise noise, const Warp& warp) {
    const int64_t to = place * width;
    sampler.likeliest(row, logits.size(1), noise, warp, error, width, tokens + to, shares + to);
  });
  return found;
}

// The random bits [n, vocab_size] int64 of each token's noise, for keys [n] and positions [n].
Tensor noise_bits(const Tensor& keys, const Tensor& positions, int64_t vocab_size) {
  Places::check(keys, positions);
  Tensor bits = at::empty({keys.size(0), vocab_size}, keys.options());
  int64_t* to = bits.mutable_data_ptr<int64_t>();
  for (int64_t place = 0; place < keys.size(0); ++place) {
    const Noise noise(keys.const_data_ptr<int64_t>()[place], positions.const_data_ptr<int64_t>()[place]);
    for (int64_t token = 0; token < vocab_size; ++token) *to++ = noise.bits(static_cast<uint32_t>(token));
  }
  return bits;
}

// The attention of a layer of a compiled program: of the step that runs, or in Python if that is not known here.
Tensor attend_layer(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& handle, int64_t layer) {
  if (Step* step = module_of(handle).step) {
    return attend(query, key, value, step->keys.at(layer), step->values.at(layer), step->query_indptr, step->kv_lens,
                  step->page_indptr, step->pages, step->tree_indptr, step->parents, step->scales.at(layer),
                  step->windows.at(layer), step->softcaps.at(layer), step->sinks.get(layer));
  }
  static const auto in_python = c10::Dispatcher::singleton()
                                    .findSchemaOrThrow("emssd::attend", "")
                                    .typed<Tensor(const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t)>();
  return in_python.call(query, key, value, handle, layer);
}

// Loads the program of a module. Returns the names of the constants that it needs.
std::vector<std::string> open_program(const Tensor& handle, const std::string& path) {
  Module& module = module_of(handle);
  module.program = std::make_unique<torch::inductor::AOTIModelPackageLoader>(path, "model", true);
  return module.program->get_constant_fqns();
}

// Gives a program its constants, all of them. None is copied: they must stay.
void load_constants(const Tensor& handle, const std::vector<std::string>& names, const std::vector<Tensor>& tensors) {
  TORCH_CHECK(names.size() == tensors.size(), "each constant has a name");
  std::unordered_map<std::string, Tensor> constants;
  for (size_t i = 0; i < names.size(); ++i) constants.emplace(names[i], tensors[i]);
  module_of(handle).program->load_constants(constants, false, true, true);
}

std::vector<Tensor> run(Module& module, const Tensor& handle, std::vector<Tensor> inputs, Step* step) {
  struct Attending {  // also where the program throws
    Module& module;
    Attending(Module& module, Step* step) : module(module) { module.step = step; }
    ~Attending() { module.step = nullptr; }
  } attending(module, step);
  inputs.push_back(handle);
  return module.program->boxed_run(std::move(inputs));
}

// Runs the program of a module once; attention is Python's.
std::vector<Tensor> run_program(const Tensor& handle, std::vector<Tensor> inputs) {
  return run(module_of(handle), handle, std::move(inputs), nullptr);
}

// Runs the program of a module once, on inputs without padding; attention is done here.
std::vector<Tensor> run_step(const Tensor& handle, std::vector<Tensor> inputs, std::vector<Tensor> keys,
                             std::vector<Tensor> values, const Tensor& query_indptr, const Tensor& kv_lens,
                             const Tensor& page_indptr, const Tensor& pages, const std::optional<Tensor>& tree_indptr,
                             const std::optional<Tensor>& parents, std::vector<double> scales, std::vector<int64_t> windows,
                             std::vector<double> softcaps, c10::List<std::optional<Tensor>> sinks) {
  Step step{std::move(keys), std::move(values), query_indptr, kv_lens, page_indptr, pages, tree_indptr, parents,
            std::move(scales), std::move(windows), std::move(softcaps), std::move(sinks)};
  return run(module_of(handle), handle, std::move(inputs), &step);
}

// Drafts chains, one pass a level, and nothing of the host between: behind each row its likeliest token, behind that one
// the next, and so on.
//
// inputs: of the first pass: token ids [1, nnz] of a model, or vectors [1, nnz, width] of a head; positions [1, nnz]; the
// last token of each row [R]. The step has no trees, and the pages of each row reach as far as its chain. lengths [R]: of
// the chains, at least 1. vocab_size: only so many logits are looked at. table [vocab, hidden]: of a head, what a token's
// embedding is, beside which its own hidden state stands in the next pass; none for a model. target_ids: of a head, the
// tokens that its columns are; none if they are the same. scale: of the logits, where shares are wanted; else 0. least: a
// token whose share has a smaller logarithm is the last of its chain.
// Returns tokens [R, k] int64 and the logarithms of their shares [R, k], as of `top`; k is the longest chain, and anything
// stands behind shorter ones.
std::tuple<Tensor, Tensor> run_chain(const Tensor& handle, std::vector<Tensor> inputs, std::vector<Tensor> keys,
                                     std::vector<Tensor> values, const Tensor& query_indptr, const Tensor& kv_lens,
                                     const Tensor& page_indptr, const Tensor& pages,
                                     const std::optional<Tensor>& tree_indptr, const std::optional<Tensor>& parents,
                                     std::vector<double> scales, std::vector<int64_t> windows, std::vector<double> softcaps,
                                     c10::List<std::optional<Tensor>> sinks, const std::vector<int64_t>& lengths,
                                     int64_t vocab_size, const std::optional<Tensor>& table,
                                     const std::optional<Tensor>& target_ids, double scale, double least) {
  const int64_t num_rows = static_cast<int64_t>(lengths.size());
  TORCH_CHECK(inputs.size() == 3 && kv_lens.numel() == num_rows && inputs[2].numel() == num_rows && !tree_indptr,
              "a chain behind the last token of each row");
  Module& module = module_of(handle);
  Step step{std::move(keys), std::move(values), query_indptr, kv_lens, page_indptr, pages, tree_indptr, parents,
            std::move(scales), std::move(windows), std::move(softcaps), std::move(sinks)};
  const int64_t depth = *std::max_element(lengths.begin(), lengths.end());
  const auto ints = inputs[1].options();
  Tensor tokens = at::zeros({num_rows, depth}, ints), shares = at::zeros({num_rows, scale > 0 ? depth : 0}, at::kDouble);
  int64_t* all_tokens = tokens.mutable_data_ptr<int64_t>();
  double* all_shares = shares.mutable_data_ptr<double>();
  std::vector<int64_t> active(num_rows), positions(num_rows);
  const int64_t* first = inputs[1].const_data_ptr<int64_t>();
  const int64_t* last = inputs[2].const_data_ptr<int64_t>();
  for (int64_t row = 0; row < num_rows; ++row) active[row] = row, positions[row] = first[last[row]];
  const int32_t *lens = kv_lens.const_data_ptr<int32_t>(), *starts = page_indptr.const_data_ptr<int32_t>();
  for (int64_t level = 0;; ++level) {
    const std::vector<Tensor> outputs = run(module, handle, std::move(inputs), &step);
    const Tensor& all_logits = outputs[table ? 1 : 0];
    const Tensor logits = all_logits.view({-1, all_logits.size(-1)}).narrow(1, 0, std::min(vocab_size, all_logits.size(-1)));
    const int64_t num_active = static_cast<int64_t>(active.size());
    TORCH_CHECK(logits.size(0) == num_active, "one row of logits behind each chain");
    const Tensor chosen = scale > 0 ? top(logits, 1, scale) : argmax(logits);
    std::vector<int64_t> going, ids, places;
    for (int64_t i = 0; i < num_active; ++i) {
      const int64_t row = active[i];
      int64_t token = scale > 0 ? static_cast<int64_t>(chosen.const_data_ptr<double>()[i]) : chosen.const_data_ptr<int64_t>()[i];
      const double share = scale > 0 ? chosen.const_data_ptr<double>()[num_active + i] : 0;
      if (scale > 0) all_shares[row * depth + level] = share;
      if (target_ids) token = target_ids->const_data_ptr<int64_t>()[token];
      all_tokens[row * depth + level] = token;
      if (level + 1 < lengths[row] && !(share < least)) going.push_back(row), ids.push_back(token), places.push_back(i);
    }
    if (going.empty()) return {tokens, shares};
    const int64_t num = static_cast<int64_t>(going.size());
    const auto tensor = [&](const auto& value, int64_t size, at::ScalarType type) {
      Tensor made = at::empty({size}, ints.dtype(type));
      for (int64_t i = 0; i < size; ++i) {
        if (type == at::kInt) made.mutable_data_ptr<int32_t>()[i] = static_cast<int32_t>(value(i));
        else made.mutable_data_ptr<int64_t>()[i] = value(i);
      }
      return made;
    };
    const Tensor next = tensor([&](int64_t i) { return ids[i]; }, num, at::kLong);
    if (table) {
      Tensor hidden = outputs[0].view({-1, outputs[0].size(-1)});
      if (num < num_active) hidden = hidden.index_select(0, tensor([&](int64_t i) { return places[i]; }, num, at::kLong));
      inputs = {at::cat({at::embedding(*table, next), hidden}, 1).unsqueeze(0)};
    } else {
      inputs = {next.unsqueeze(0)};
    }
    inputs.push_back(tensor([&](int64_t i) { return positions[going[i]] + level + 1; }, num, at::kLong).unsqueeze(0));
    inputs.push_back(at::arange(num, ints));
    if (num < num_active) {  // pages of those rows alone
      std::vector<int32_t> begins{0}, some;
      for (const int64_t row : going) {
        some.insert(some.end(), pages.const_data_ptr<int32_t>() + starts[row], pages.const_data_ptr<int32_t>() + starts[row + 1]);
        begins.push_back(static_cast<int32_t>(some.size()));
      }
      step.page_indptr = tensor([&](int64_t i) { return begins[i]; }, num + 1, at::kInt);
      step.pages = tensor([&](int64_t i) { return some[i]; }, static_cast<int64_t>(some.size()), at::kInt);
    }
    step.query_indptr = tensor([](int64_t i) { return i; }, num + 1, at::kInt);
    step.kv_lens = tensor([&](int64_t i) { return lens[going[i]] + level + 1; }, num, at::kInt);
    active.swap(going);
  }
}

constexpr char kStepArguments[] =
    "Tensor handle, Tensor[] inputs, Tensor[] keys, Tensor[] values, Tensor query_indptr, Tensor kv_lens, "
    "Tensor page_indptr, Tensor pages, Tensor? tree_indptr, Tensor? parents, float[] scales, int[] windows, "
    "float[] softcaps, Tensor?[] sinks";

TORCH_LIBRARY(emssd_native, library) {
  library.def("argmax(Tensor logits) -> Tensor");
  library.impl("argmax", c10::DispatchKey::CPU, TORCH_FN(argmax));
  library.def("top(Tensor logits, int k, float scale) -> Tensor");
  library.impl("top", c10::DispatchKey::CPU, TORCH_FN(top));
  library.def("sample(Tensor logits, Tensor rows, Tensor keys, Tensor positions, Tensor warps) -> Tensor");
  library.impl("sample", c10::DispatchKey::CPU, TORCH_FN(sample));
  library.def(
      "top_draws(Tensor logits, Tensor rows, Tensor keys, Tensor positions, Tensor warps, float error, int width) -> Tensor");
  library.impl("top_draws", c10::DispatchKey::CPU, TORCH_FN(top_draws));
  library.def("noise_bits(Tensor keys, Tensor positions, int vocab_size) -> Tensor");
  library.impl("noise_bits", c10::DispatchKey::CPU, TORCH_FN(noise_bits));
  library.def("new_module() -> Tensor", TORCH_FN(new_module));
  library.def("add_weight(Tensor handle, Tensor weight, Tensor? bias, Tensor? scale) -> bool");
  library.impl("add_weight", c10::DispatchKey::CPU, TORCH_FN(add_weight));
  library.def("free_module_address() -> int", [] { return reinterpret_cast<int64_t>(&free_module); });
  library.def("linear(Tensor input, Tensor handle, int index, int out_features) -> Tensor");
  library.impl("linear", c10::DispatchKey::CPU, TORCH_FN(linear));
  library.def(
      "attend(Tensor query, Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor query_indptr, "
      "Tensor kv_lens, Tensor page_indptr, Tensor pages, Tensor? tree_indptr, Tensor? parents, float scale, int window, "
      "float softcap, Tensor? sinks) -> Tensor");
  library.impl("attend", c10::DispatchKey::CPU, TORCH_FN(attend));
  library.def("attend_layer(Tensor query, Tensor key, Tensor value, Tensor handle, int layer) -> Tensor");
  library.impl("attend_layer", c10::DispatchKey::CPU, TORCH_FN(attend_layer));
  library.def("open_program(Tensor handle, str path) -> str[]");
  library.impl("open_program", c10::DispatchKey::CPU, TORCH_FN(open_program));
  library.def("load_constants(Tensor handle, str[] names, Tensor[] tensors) -> ()");
  library.impl("load_constants", c10::DispatchKey::CPU, TORCH_FN(load_constants));
  library.def("run_program(Tensor handle, Tensor[] inputs) -> Tensor[]");
  library.impl("run_program", c10::DispatchKey::CPU, TORCH_FN(run_program));
  library.def((std::string("run_step(") + kStepArguments + ") -> Tensor[]").c_str());
  library.impl("run_step", c10::DispatchKey::CPU, TORCH_FN(run_step));
  library.def((std::string("run_chain(") + kStepArguments +
               ", int[] lengths, int vocab_size, Tensor? table, Tensor? target_ids, float scale, float least) -> (Tensor, Tensor)")
                  .c_str());
  library.impl("run_chain", c10::DispatchKey::CPU, TORCH_FN(run_chain));
  library.def("move(Tensor(a!) pages, Tensor sources, Tensor targets, bool are_values) -> ()");
  library.impl("move", c10::DispatchKey::CPU, TORCH_FN(move));
}

}  // namespace
