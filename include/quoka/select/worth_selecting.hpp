// Does selecting and attending to what was chosen take less than attending to everything? By counted cost: bytes and
// products, each with a weight. No clock, no threads: the answer is that of the shapes, wherever the call is made.
//
//   choose     +    attend to the share that was chosen     <    attend to all
//   scores          products, and rows that lie apart            products, bytes
//
// For calls that select and attend in one (SelectorInput::attends). Attention to all keys in place of a chosen part
// is only ever more exact.
//
// Without 8-bit codes of the keys a scorer by softmax packs every key as a chunk's attention does and multiplies it by
// at least one packet of queries: for one token that alone is 2 to 6 times the attention to all keys. The weights are
// fitted to 1,980 measured ratios of five shapes on a Zen 4 (bench/pays.cpp). Where the answer is wrong, it is near the
// threshold: bench/README.md has what that costs.
#pragma once

#include <quoka/base/index.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// What of a call its cost depends on, for each KV head.
struct SelectingCost {
  Index rows;              // query rows: group * q_len
  Index tokens;            // q_len
  Index k_dim, v_dim;      // channels
  Index k_bytes, v_bytes;  // of a row
  Index scoring_rows;      // queries that score
  bool codes;              // there are 8-bit codes of all keys
  bool softmax;            // scores are weights, not logits
  bool neighbours;         // chosen keys come side by side (TopKOptions::window)
  double share;            // of the keys that is chosen
};

// Of one key, in multiply-adds of float that run at full rate.
//
//   a query row        its products, and `of_weight` for the softmax
//   one token          reads rows as they lie: `byte` in order, and where rows lie apart `byte_apart`, or
//                      `byte_of_neighbours`; the memory's latency is in it
//   several tokens     packets of 16 query rows, and packing: `packed` for a channel, where rows lie apart `packed_apart`
//   scores             by codes a quarter of a product; by softmax in float `packed_to_score` for a channel, and half a
//                      product for each of 16 rows; by logits in float 2 products; and choosing the best, `choice`, or
//                      in float `float_choice`
inline bool selecting_pays(const SelectingCost& c) {
  constexpr double of_weight = 16, byte = 1.5, byte_apart = 8, byte_of_neighbours = 4, packed = 6,
                   packed_apart = 16, packed_to_score = 32, choice = 128, float_choice = 512,
                   of_coded_weight = 8;
  const auto number = [](Index n) { return static_cast<double>(n); };
  const auto packets = [&](Index rows) { return number(round_up(rows, Index{16})); };
  const double channels = number(c.k_dim + c.v_dim), bytes = number(c.k_bytes + c.v_bytes);
  const bool token = c.tokens == 1;
  const double products = (token ? number(c.rows) : packets(c.rows)) * (channels + of_weight);
  const double all = products + (token ? byte * bytes : packed * channels);
  const double chosen = products + (token ? (c.neighbours ? byte_of_neighbours : byte_apart) * bytes
                                          : packed_apart * channels);
  const double dim = number(c.k_dim), scoring = number(c.scoring_rows);
  double scores = 2 * scoring * dim + float_choice;
  if (c.codes)
    scores = dim + scoring * (dim / 4 + (c.softmax ? of_coded_weight : 0)) + choice;
  else if (c.softmax)
    scores = (packed_to_score + packets(c.scoring_rows) / 2) * dim + float_choice;
  return scores + c.share * chosen < all;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
