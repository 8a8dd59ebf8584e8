// Scratch memory of key scoring (score.hpp).
#pragma once

#include <quoka/views/float_rows.hpp>
#include <quoka/base/buffer.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

// Scratch of one worker.
struct ScoreScratch {
  Buffer<float> tile;    // one packed tile of keys
  Buffer<float> panels;  // q_bar, transposed, in panels of one or two packets
  FloatRow row;

  void reserve(const Format* format, Index dim, Index rows);  // of keys; null: there are none
  Index bytes() const { return bytes_of(tile, panels, row); }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
