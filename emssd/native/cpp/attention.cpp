// Ragged attention over a paged KV cache.

#include <atomic>
#include <vector>

#include "kernels.h"
#include "tree.h"
#include "vectors.h"

namespace emssd {
namespace {

constexpr int64_t kBlockPages = 32;  // pages between two corrections of the running maximum
constexpr int64_t kShortRow = 32;    // rows up to so many new tokens store and attend in one task per head
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

template <int n>
using Number = std::integral_constant<int, n>;

// `Attention` of one type.
template <class T>
struct Layer : Attention {
  using L = Lane<T>;
  using Cell = typename L::Cell;
  using Sum = typename L::Sum;
  using Vector = typename L::Vector;

  const T *query = static_cast<const T*>(Attention::query), *key = static_cast<const T*>(Attention::key);
  const T* value = static_cast<const T*>(Attention::value);
  Cell *keys = static_cast<Cell*>(Attention::keys), *values = static_cast<Cell*>(Attention::values);
  T* out = static_cast<T*>(Attention::out);
  Sum scale = static_cast<Sum>(Attention::scale), softcap = static_cast<Sum>(Attention::softcap);
  const Sum* sinks = static_cast<const Sum*>(Attention::sinks);
  const Tree* trees = nullptr;  // [R]; null if no row has a tree
  Cell* joined = nullptr;       // [kv heads] of each tree after the other, [1 + nodes, value_lanes]: see `join`

  explicit Layer(const Attention& of) : Attention(of) {}

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

  // Queries [first, last) of the row's tokens x heads of one KV head, in passes of as many as there are kernels for.
  void attend_some(int64_t row, int64_t head, int64_t first, int64_t last) const {
    for (int64_t count; first < last; first += count) {
      count = kMaxQueries == 8 && last - first >= 7 ? 8 : std::min<int64_t>(last - first, 4);
      attend(row, head, first, count);
    }
  }

  // One pass: queries [first, first + count).
  //
  // A pass reads the values of all tokens that any of its queries sees, and a weight of 0 hides every value but NaN and
  // infinity. So where a result is not finite, each query is computed again by itself, `alone`, from what it sees.
  //
  // In a row with a tree, the page where the tree begins and those behind it are the tail. Its scores are computed for all
  // slots, as in a chain. Then each query picks those of its way and sets them to their positions, so that weights and
  // sums are those of a chain that consists of its way.
  void attend(int64_t row, int64_t head, int64_t first, int64_t count, bool alone = false) const {
    constexpr int64_t kBlock = kBlockPages * kPage;
    constexpr Sum kNever = -std::numeric_limits<Sum>::infinity();
    const int64_t available = num_queries(row), num_new = available / group, kv_len = kv_lens[row];
    const int32_t* row_pages = pages + page_indptr[row];
    const Tree* tree = trees != nullptr && trees[row].nodes > 0 ? trees + row : nullptr;

    static thread_local std::vector<Cell> query_cells;
    query_cells.assign(count * key_cells, Cell{});
    int64_t token[kMaxQueries], q_head[kMaxQueries], slot[kMaxQueries], position[kMaxQueries];
    int64_t earliest = std::numeric_limits<int64_t>::max(), latest = -1, last_slot = -1;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t which = std::min(first + i, available - 1);  // a pass that is not full repeats its last query
      token[i] = query_indptr[row] + which / group;
      q_head[i] = head * group + which % group;
      slot[i] = kv_len - num_new + which / group;
      position[i] = tree ? tree->position(slot[i]) : slot[i];
      earliest = std::min(earliest, position[i]);
      latest = std::max(latest, position[i]);
      last_slot = std::max(last_slot, slot[i]);
      const T* from = query + token[i] * query_token + q_head[i] * query_head;
      for (int64_t cell = 0; cell < key_cells; ++cell) query_cells[i * key_cells + cell] = cell_of(from, cell);
    }

    alignas(64) Sum scores[kMaxQueries * kBlock];
    alignas(64) Cell weights[kMaxQueries * kBlock / L::kWidth];
    static thread_local std::vector<Sum> sums;
    sums.assign(count * value_lanes, Sum{});
    Sum maximum[kMaxQueries], denominator[kMaxQueries];
    for (int64_t i = 0; i < count; ++i) {
      maximum[i] = sinks != nullptr ? sinks[q_head[i]] : kNever;
      denominator[i] = sinks != nullptr ? 1 : 0;
    }

    static thread_local std::vector<Sum> tail;  // [count, tail_slots] the scores of the tail, by slot
    const int64_t tail_page = tree ? tree->before / kPage : std::numeric_limits<int64_t>::max();
    const int64_t tail_slots = tree ? std::max<int64_t>(0, last_slot / kPage + 1 - tail_page) * kPage : 0;
    if (tree) {
      tail.resize(count * tail_slots);
      score(count, row_pages, head, tail_page, tail_page + tail_slots / kPage, query_cells.data(), tail.data(), tail_slots);
    }

    const int64_t begin = window > 0 ? std::max<int64_t>(0, earliest - window + 1) : 0;
    for (int64_t block = begin / kBlock * kBlock; block <= latest; block += kBlock) {
      const int64_t page_begin = std::max(block, begin) / kPage;
      const int64_t page_end = std::min((block + kBlock) / kPage, latest / kPage + 1);
      score(count, row_pages, head, page_begin, std::min(page_end, tail_page), query_cells.data(),
            scores + page_begin * kPage - block, kBlock);
      for (int64_t i = 0; i < count; ++i) {
        Sum* own = scores + i * kBlock - block;  // by position
        for (int64_t page = std::max(page_begin, tail_page); page < page_end; ++page) {
          scores_seen(*tree, tail.data() + i * tail_slots, slot[i], page).store(own + page * kPage);
        }
        hide(own, page_begin * kPage, page_end * kPage, position[i]);
        Vector even(kNever), odd(kNever);  // maxima; each comparison waits for the one before
        for (int64_t page = page_begin; page < page_end; page += 2) {
          even = larger(even, load<Vector>(own + page * kPage));
          odd = larger(odd, load<Vector>(own + std::min(page + 1, page_end - 1) * kPage));
        }
        const Sum next = std::max(maximum[i], largest(larger(even, odd)));
        const Sum known = next == kNever ? Sum{0} : next;  // nothing seen yet: every weight below becomes zero
        const Sum correction = maximum[i] == kNever ? Sum{0} : exponential(maximum[i] - known);
        Vector sum = {};
        for (int64_t at = page_begin * kPage; at < page_end * kPage; at += kPage) {
          const Vector score = load<Vector>(own + at);
          Vector weight = exponential(score - known);
          weight = where_equal(score, Vector(kNever), Vector{}, weight);
          sum += weight;
          L::narrow(weight, reinterpret_cast<T*>(weights + (i * kBlock + at - block) / L::kWidth));
        }
        denominator[i] = denominator[i] * correction + total(sum);
        maximum[i] = next;
        if (correction != Sum{1}) {
          for (int64_t dim = 0; dim < value_lanes; ++dim) sums[i * value_lanes + dim] *= correction;
        }
      }

      if (alone) {
        add_seen_values(block, begin, latest, weights, sums.data(), [&](int64_t from) {
          return tree ? values_seen(*tree, row_pages, head, slot[0], from) : values_at(row_pages, head, from);
        });
        continue;
      }
      const int64_t stop = tree ? std::min(latest + 1, tree->before / L::kWidth * L::kWidth) : latest + 1;
      const int64_t cell_end = std::min(kBlock, stop - block + L::kWidth - 1) / L::kWidth;
      add(count, row_pages, head, block, page_begin, cell_end, weights, sums.data());
      if (tree) {
        for (int64_t i = 0; i < count; ++i) {
          add_joined_values(*tree, head, slot[i], block, begin, weights + i * kBlock / L::kWidth,
                            sums.data() + i * value_lanes);
        }
      }
    }

    const int64_t num_heads = num_kv_heads * group;
    Vector nothing = {};  // NaN where anything is not finite
    for (int64_t i = 0; i < count && first + i < available; ++i) {
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
    if (!alone && total(nothing) != 0) {
      for (int64_t i = 0; i < count && first + i < available; ++i) attend(row, head, first + i, 1, true);
    }
  }

  // Scores become -inf at the positions that a query does not see, out of those from `begin` to `end`, of whole pages.
  void hide(Sum* scores, int64_t begin, int64_t end, int64_t position) const {
    constexpr Sum kNever = -std::numeric_limits<Sum>::infinity();
    if (window > 0) std::fill(scores + begin, scores + std::max(begin, std::min(end, position - window + 1)), kNever);
    std::fill(scores + std::min(end, std::max(begin, position + 1)), scores + end, kNever);
  }

  // to[i * stride...] = the scores of query i in the pages [page_begin, page_end) of a row, of all `count` queries.
  void score(int64_t count, const int32_t* row_pages, int64_t head, int64_t page_begin, int64_t page_end,
             const Cell* query_cells, Sum* to, int64_t stride) const {
    const auto run = [&](auto n) { score_pages<n()>(row_pages, head, page_begin, page_end, query_cells, to, stride); };
    with_count(count, run);
    if (!(softcap > 0)) return;
    for (int64_t i = 0; i < count; ++i) {
      for (Sum* each = to + i * stride; each < to + i * stride + (page_end - page_begin) * kPage; ++each) {
        *each = std::tanh(*each / softcap) * softcap;
      }
    }
  }

  // sums[i][...] += weights[i] x values, over one block of tokens, of all `count` queries.
  void add(int64_t count, const int32_t* row_pages, int64_t head, int64_t block, int64_t page_begin, int64_t cell_end,
           const Cell* weights, Sum* sums) const {
    for (int64_t dim = 0, vectors; dim < value_lanes; dim += vectors * kPage) {
      const int64_t left = (value_lanes - dim) / kPage, most = vectors_at_once(static_cast<int>(count));
      vectors = std::min<int64_t>(most, left >= 4 ? 4 : left >= 2 ? 2 : 1);
      const auto run = [&](auto n) {
        const auto add = [&](auto v) {
          add_values<n(), v()>(row_pages, head, block, page_begin, cell_end, dim, weights, sums);
        };
        if (vectors == 1) return add(Number<1>());
        if constexpr (vectors_at_once(n()) >= 4) {
          if (vectors == 4) return add(Number<4>());
        }
        if constexpr (vectors_at_once(n()) >= 2) add(Number<2>());
      };
      with_count(count, run);
    }
  }

  template <class Run>
  static void with_count(int64_t count, const Run& run) {
    switch (count) {
      case 1: return run(Number<1>());
      case 2: return run(Number<2>());
      case 3: return run(Number<3>());
      case 4: return run(Number<4>());
      default: return run(Number<kMaxQueries>());
    }
  }

  template <int N>
  void score_pages(const int32_t* row_pages, int64_t head, int64_t page_begin, int64_t page_end, const Cell* query_cells,
                   Sum* to, int64_t stride) const {
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
          const Vector score = dots[i][p] * scale;
          score.store(to + i * stride + (page + p - page_begin) * kPage);
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
  const int64_t threads = std::min<int64_t>(num_threads(), count);
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) task(i);
    return;
  }
  std::atomic<int64_t> next{0};
  parallel_for(threads, 1, [&](int64_t, int64_t) {
    for (int64_t i = next++; i < count; i = next++) task(i);
  });
}

template <class T>
void attend_rows(const Layer<T>& layer) {
  const int64_t num_rows = layer.num_rows, num_kv_heads = layer.num_kv_heads;
  int64_t most = 0;  // queries of a row and head
  for (int64_t row = 0; row < num_rows; ++row) most = std::max(most, layer.num_queries(row));
  const auto store = [&](int64_t row, int64_t head) {
    layer.store(row, head);
    if (layer.trees != nullptr) layer.join(row, head);
  };
  if (most > kShortRow * layer.group) {
    run_tasks(num_rows * num_kv_heads, [&](int64_t task) { store(task / num_kv_heads, task % num_kv_heads); });
    const int64_t parts = (most + kMaxQueries - 1) / kMaxQueries;
    run_tasks(num_rows * num_kv_heads * parts, [&](int64_t task) {
      const int64_t row = task / parts / num_kv_heads, head = task / parts % num_kv_heads;
      const int64_t first = task % parts * kMaxQueries;
      layer.attend_some(row, head, first, std::min(first + kMaxQueries, layer.num_queries(row)));
    });
    return;
  }
  const int64_t heads_together = num_rows >= 4 * num_threads() ? num_kv_heads : 1;
  run_tasks(num_rows * num_kv_heads / heads_together, [&](int64_t task) {
    for (int64_t each = task * heads_together; each < (task + 1) * heads_together; ++each) {
      const int64_t row = each / num_kv_heads, head = each % num_kv_heads;
      store(row, head);
      layer.attend_some(row, head, 0, layer.num_queries(row));
    }
  });
}

template <class T>
void attend_typed(const Attention& of) {
  using Cell = typename Lane<T>::Cell;
  Layer<T> layer(of);
  static thread_local std::vector<Cell> joined;
  if (of.trees != nullptr) {
    joined.resize(of.trees->num_cells() * layer.num_kv_heads * layer.value_lanes);
    layer.trees = of.trees->rows(), layer.joined = joined.data();
  }
  attend_rows(layer);
}

template <class T>
void move_typed(const Pages& of, const int64_t* from, const int64_t* to, int64_t count) {
  const int64_t page_size = of.heads * of.rows * of.columns * of.width;
  const int64_t runs = of.heads * (of.are_values ? of.columns : of.rows);  // of neighbours in memory, per token
  const int64_t run = of.are_values ? 1 : of.width;
  const auto place = [&](int64_t slot, int64_t i) {
    const int64_t in_page = slot % kPage;
    const int64_t value = (i / of.columns * of.rows + in_page / of.width) * of.columns + i % of.columns;
    const int64_t offset = of.are_values ? value * of.width + in_page % of.width : (i * kPage + in_page) * of.width;
    return static_cast<T*>(of.data) + slot / kPage * page_size + offset;
  };
  std::vector<T> held(count * runs * run);
  for (int64_t i = 0; i < count * runs; ++i) std::copy_n(place(from[i / runs], i % runs), run, &held[i * run]);
  for (int64_t i = 0; i < count * runs; ++i) std::copy_n(&held[i * run], run, place(to[i / runs], i % runs));
}

}  // namespace

void attend(const Attention& layer) {
  if (layer.type == Type::bfloat16) return attend_typed<BFloat16>(layer);
  if (layer.type == Type::float32) return attend_typed<float>(layer);
  attend_typed<double>(layer);
}

void move(const Pages& pages, const int64_t* sources, const int64_t* targets, int64_t count) {
  if (pages.type == Type::bfloat16) return move_typed<uint16_t>(pages, sources, targets, count);
  if (pages.type == Type::float32) return move_typed<uint32_t>(pages, sources, targets, count);
  move_typed<uint64_t>(pages, sources, targets, count);
}

}  // namespace emssd
