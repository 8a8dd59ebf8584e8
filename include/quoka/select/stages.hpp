// The stages of QuoKA's Algorithm 1, one by one, on Eigen tensors.
//
//   kept   = subselect_queries(q, 16)        [b, q_heads, 16, head_dim], most dissimilar first
//   q_bar  = pre_aggregate(kept, kv_heads)   [b, kv_heads, 16, head_dim]
//   scores = score_keys(q_bar, past_k)       [b, kv_heads, kv_len], maximum over the 16
//   keep   = top_k(scores, 1024)             Selection
//   k_star = gather(past_k, keep)            [b, kv_heads, 1024, head_dim]
//
// QuokaSelector does the same without the tensors in between. Not included by quoka.hpp: Eigen's
// Tensor takes a compiler longer to read than the rest of the library.
#pragma once

#include <quoka/select/subselect_queries.hpp>
#include <quoka/select/pre_aggregate.hpp>
#include <quoka/select/score_keys.hpp>
#include <quoka/select/top_k.hpp>
#include <quoka/select/gather.hpp>
