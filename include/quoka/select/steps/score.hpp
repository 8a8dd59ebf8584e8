// Key scoring (QuoKA, Algorithm 1, third stage): how much some kept query wants each cached key.
//
//   score[kv] = max over m of q_bar[m] . k[kv] / |k[kv]|
//
// Aggregation::mean takes the mean over m. The inverse norms come from the cache that computed them
// at append, or are taken from the keys on the way; the bits are the same. Scores are what the formula gives: a key with a NaN or an infinity, or so large
// that its products overflow, has a score that is not finite. 2 * kv_heads * rows * kv_len *
// head_dim FLOPs over one read of the keys: 8 FLOPs per byte with 16 float rows, near the balance
// of arithmetic and memory on CPUs of today. Nothing of the size rows x kv_len is kept.
#pragma once

#include <quoka/runtime/executor.hpp>
#include <quoka/runtime/worker_scratch.hpp>
#include <quoka/select/options.hpp>
#include <quoka/select/steps/score_scratch.hpp>
#include <quoka/views/rows.hpp>
#include <quoka/views/selection.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

// What scores of keys are made of.
struct KeyScoring {
  const float* q_bar;  // [batch, kv_heads, rows, head_dim], contiguous
  Index rows;          // kept queries of each KV head
  Rows keys;           // [batch, kv_heads, kv_len, head_dim]
  // [batch, kv_heads, kv_len]; absent: taken from the keys; null: products with the keys as they are.
  const TensorView<const float, 3>* inverse_norms;
  Aggregation aggregation;
};

// scores [batch, kv_heads, kv_len], contiguous.
void score_all_keys(const KeyScoring& scoring, float* scores, WorkerScratch<ScoreScratch>& scratch,
                    ExecutorRef executor);

// products [batch, kv_heads, kv_len], contiguous: q . k[kv] of one query of each KV head, q [batch,
// kv_heads, head_dim], contiguous.
inline void multiply_all_keys(const float* q, const Rows& keys, float* products,
                              WorkerScratch<ScoreScratch>& scratch, ExecutorRef executor) {
  score_all_keys({q, 1, keys, nullptr, Aggregation::max}, products, scratch, executor);
}

// 1 / |k| of each key to norms [batch, kv_heads, kv_len].
void write_inverse_norms(const Rows& keys, TensorView<float, 3> norms, ExecutorRef executor);

}  // namespace detail

}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/select/steps/score_impl.hpp>
#endif
