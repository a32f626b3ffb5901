// The token trees of a step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace emssd {

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
  // kv_lens [R], indptr [R + 1] into parents: of each tree, as indices within it, -1 for the token before.
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
        if (parent < -1 || parent >= node) throw std::runtime_error("a parent must stand before its child");
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

}  // namespace emssd
