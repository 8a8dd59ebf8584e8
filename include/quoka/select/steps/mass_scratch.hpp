// Scratch memory of softmax mass (softmax_mass.hpp), of one worker.
#pragma once

#include <quoka/base/buffer.hpp>
#include <quoka/rows/rows.hpp>

#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

struct MassScratch {
  Buffer<float> rows;     // [rows][dim], what the queries become before they are transposed
  Buffer<float> tiles;    // one packed block of keys
  Buffer<float> queries;  // a group of panels, transposed
  Buffer<float> weights;  // [panel of the group][key][lane]
  Buffer<float> block_max, block_sum;  // [panel of the group][block][lane]
  Buffer<float> row_max;               // [panel of the group][lane]
  Buffer<std::int64_t> row_sum;        // likewise
  RowReader query;

  void reserve(Index row_count, Index keys, Index dim);
  Index bytes() const {
    return bytes_of(rows, tiles, queries, weights, block_max, block_sum, row_max, row_sum, query);
  }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
