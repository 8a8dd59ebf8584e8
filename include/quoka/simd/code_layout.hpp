// The layout of 8-bit codes in memory, the same for all instructions:
//
//   keys      [block][step][16 keys][4 channels]
//   queries   [step][query][4 channels]
//
// which is what the dot-product instructions take (code_dots.hpp). Those of x86 need unsigned keys:
// a key's code is stored with a bias.
#pragma once

#include <quoka/base/index.hpp>

#include <cstdint>

namespace quoka {
inline namespace QUOKA_ABI {
namespace simd {

inline constexpr Index code_block = 16;    // keys
inline constexpr Index code_channels = 4;  // of a step
// Keys of two blocks, which products take together.
inline constexpr Index code_pair = 2 * code_block;
// Channels that share a scale where decode multiplies a row's own codes (kernels/token_codes.hpp).
inline constexpr Index code_group = 32;
// The bias that is added to a key's code.
inline constexpr int code_bias = 128;

// Steps of code_channels channels; blocks of code_block keys; bytes of one block.
constexpr Index code_steps(Index dim) { return ceil_div(dim, code_channels); }
constexpr Index code_blocks(Index keys) { return ceil_div(keys, code_block); }
constexpr Index code_block_bytes(Index dim) { return code_steps(dim) * code_channels * code_block; }

// A key's code as it is stored, and where: channel c of key t % code_block of its block. Channels
// beyond the last hold stored_key_code(0).
constexpr std::uint8_t stored_key_code(int code) {
  return static_cast<std::uint8_t>(code + code_bias);
}
constexpr Index key_code_at(Index key, Index c) {
  return (c / code_channels * code_block + key) * code_channels + c % code_channels;
}

// Two blocks of keys, which products take together; their addresses are multiples of 64.
struct KeyPair {
  Index count;                        // keys: fewer than code_pair in a head's last pair alone
  const std::uint8_t* codes[2];       // of each block
  const std::uint8_t* ahead[2] = {};  // two blocks to prefetch meanwhile; null: none

  // Without those.
  KeyPair alone() const { return {count, {codes[0], codes[1]}}; }
};

// `rows` queries of the `stride` that lie side by side. Behind an odd number of them lies one of
// zeros.
struct QueryCodes {
  const std::int32_t* codes;    // [steps][stride]
  const std::int32_t* offsets;  // [rows], what takes the keys' bias back
  Index rows, stride, steps;

  // Those from m on.
  QueryCodes from(Index m) const { return {codes + m, offsets + m, rows - m, stride, steps}; }
};

}  // namespace simd
}  // namespace QUOKA_ABI
}  // namespace quoka
