// Scalar types: one signed index type, three storage types, one accumulation type.
//
// Queries, keys, values and outputs are stored as float, Eigen::half or Eigen::bfloat16. Scores,
// softmax and every accumulation are float.
#pragma once

#include <quoka/version.hpp>

#include <concepts>
#include <cstdint>

namespace quoka::inline QUOKA_ABI {

// Every size, position and stride.
using Index = Eigen::Index;

// Positions inside a Selection: half the bytes of Index, enough for 2^31 - 1 keys.
using Position = std::int32_t;

template <class T>
concept Storage =
    std::same_as<T, float> || std::same_as<T, Eigen::half> || std::same_as<T, Eigen::bfloat16>;

constexpr Index ceil_div(Index a, Index b) { return (a + b - 1) / b; }
constexpr Index round_up(Index a, Index multiple) { return ceil_div(a, multiple) * multiple; }

}  // namespace quoka::inline QUOKA_ABI
