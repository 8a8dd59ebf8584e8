// Rotary position embedding (Su et al. 2021): channels come in pairs, and pair i of a query or key
// at position p turns by the angle p * f_i.
//
//   f_i = base^(-2i / dim) / factor_i        factor_i from the file (Llama 3.1), or 1
//   linear scaling by s (Chen et al. 2023)   f_i / s
//   yarn (Peng et al. 2023, NTK by parts)    f_i where a pair turns more than 32 times in the
//                                            trained context, f_i / s where less than once, between
//                                            them linear in i; cosine and sine times 1 + 0.1 ln s, if s > 1
// Besides, cosine and sine are multiplied by RopeConfig::magnitude.
//
// Deviation: the ends of YaRN's ramp are rounded outwards to whole pairs, as llama.cpp does.
#pragma once

#include "decoder/model/config.hpp"

#include <span>
#include <vector>

namespace quoka_decoder {

// Angles per token and radian of one turn, [dim / 2], and what cosine and sine are multiplied with.
struct RopeFrequencies {
  std::vector<double> radians_per_token;
  double magnitude = 1.0;
};

// factors [dim / 2], or empty.
RopeFrequencies rope_frequencies(const RopeConfig& config, std::span<const float> factors);

// Cosines and sines of a run of positions, made once and used by every layer and head.
class RopeTable {
 public:
  // Throws std::invalid_argument unless there are no factors or dim / 2.
  RopeTable(const RopeConfig& config, std::span<const float> factors);

  // The positions first, first + 1, ..., first + count - 1.
  void set_positions(Index first, Index count);

  // Turns the heads of one token in place. x [heads, head_dim], token counted from `first`.
  void rotate(float* x, Index heads, Index head_dim, Index token) const;

 private:
  RopePairing pairing_;
  Index pairs_;
  RopeFrequencies frequencies_;
  std::vector<float> cos_, sin_;  // [count, pairs]
};

}  // namespace quoka_decoder
