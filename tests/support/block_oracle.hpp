// The oracle of the methods that choose blocks of keys, XAttention and FlashPrefill, in naive
// double precision. Written from their definitions, adapted to a chunk before which there are past
// keys, and to one list per KV head: the union over a chunk's query blocks and over the heads of a
// group.
//
// A "set" is one query block of one head of the group: set r * query_blocks + u. Rows that are not
// finite are left out: for XAttention a row of `stride` tokens that holds a NaN or an infinity.
#pragma once

#include <set>

#include "support/baseline_oracle.hpp"

namespace oracle {

using SetScores = std::vector<std::vector<double>>;  // [set][block]

Index rounded_up(Index x, Index of);

// Tokens [first, first + count) of one head of x, those beyond its end zero.
std::vector<std::vector<double>> tokens_of(const Tensor& x, Index b, Index head, Index first,
                                           Index count);
bool all_finite(const std::vector<std::vector<double>>& tokens);

// ---- XAttention (Xu et al. 2025) ----

// Sums of softmax(scale / stride * antidiagonal) over the tiles of each block; `keys` are the past
// and what follows it, the chunk's first token is at `kv_len`.
SetScores xattention_scores(const Tensor& q, const Tensor& keys, Index kv_len, Index b, Index g,
                            Index stride, Index block, double scale);

// The chunk, block 0 and the block that the past ends in, then the best until their sum is tau of
// the total; those that hold past keys. `margin`, if given, becomes the least distance of a sum
// from tau, if that is less.
std::set<Index> xattention_blocks(const SetScores& scores, Index kv_len, Index block, double tau,
                                  double* margin = nullptr);

// max over sets of score / the set's total, of blocks with past keys
std::vector<double> shares_of_total(const SetScores& scores, Index kv_len, Index block);

// ---- FlashPrefill (2026), CompactAttention-FP ----

// sum over the rows of a query block of exp(scale q . mean key - m), m the largest such logit of
// the query block over all blocks; over the sum of all of them
SetScores flash_prefill_scores(const Tensor& q, const Tensor& past_k, Index b, Index g, Index block,
                               double scale);

// max over sets of score / the set's best
std::vector<double> parts_of_best(const SetScores& scores);

// The first ones, the last ones up to each query block's own, and those that reach alpha.
std::set<Index> flash_prefill_blocks(const SetScores& scores, Index q_len, Index kv_len,
                                     Index block, double alpha, Index first, Index last,
                                     double* margin = nullptr);

// ---- keys of blocks ----

std::vector<Index> keys_of_blocks(const std::set<Index>& blocks, Index block, Index kv_len);

// `forced` in its order, then the others by (rank descending, block ascending), until `budget` keys
// are taken; of the last block its first keys. Ascending. `margin` as above: between the last rank
// that is taken and the first that is not, unless both are the best of some set, 1.
std::vector<Index> best_blocks(const std::vector<Index>& forced, const std::vector<double>& ranks,
                               Index block, Index kv_len, Index budget, double* margin = nullptr);

}  // namespace oracle
