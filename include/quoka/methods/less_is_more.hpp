// LessIsMore: one set of keys for all heads, the union of each head's best keys, chosen at two
// layers.
//
//   s[h][t]   = mean over the chunk's queries of softmax over t of head h's logits
//   part      = three quarters of the budget by score, rounded down; keep_first keys; the rest most
//             recent
//   list[h]   = the part best keys of head h between first and recent ones, best first
//   union     = rank 0 of every head, then rank 1 of every head, ... each key once, until part keys
//
// 2 * q_heads * q_len * kv_len * head_dim FLOPs at the choosing layers and none elsewhere. Source:
// Yang et al., "Less Is More: Training-Free Sparse Attention with Global Locality for Efficient
// Reasoning", arXiv 2508.07101, and its code, which decodes one query at a time. Deviations: one
// set per chunk; the correction layer by rule (LayerPlan).
#pragma once

#include <quoka/kernels/compact.hpp>
#include <quoka/methods/layer_shared.hpp>
#include <quoka/select/softmax_scores.hpp>
#include <quoka/select/scored_selector.hpp>

#include <algorithm>
#include <cstdint>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of LessIsMoreSelector.
struct LessIsMoreOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head
  LayerPlan plan = {};                 // this layer, and which layers choose
  Index keep_first = 4;                // attention sinks, always kept where the budget is larger
};

// The choice behind LessIsMoreSelector.
class LessIsMoreScorer : public ScorerDefaults {
 public:
  using Options = LessIsMoreOptions;

  struct State : NoState {
    SoftmaxScoreState mass;
    Buffer<float> head_scores;   // [batch, q_heads, kv_len]
    Buffer<Position> lists;      // [batch, q_heads, part]
    Buffer<std::uint8_t> taken;  // [kv_len]
    Arenas workers;
  };

  // The share of the budget that is chosen by score: the authors' value.
  static constexpr double top_share = 0.75;

  // Refuses none of the options.
  explicit LessIsMoreScorer(const Options& options = {}) : options_(options) {}

  // Attention's, by its scale.
  static bool weighs_logits() { return true; }

  // Writes one set of keys for all heads.
  void decide(const SelectorInput& input, State& s, Selection& selection,
              ExecutorRef executor) const {
    const Rows &q = input.q, &k = input.k;
    const Index kv_len = k.len(), q_heads = q.heads(), tasks = q.batch() * q_heads;
    if (select_unscored(k, options_.budget, selection)) return;
    const Index budget = options_.budget.count(kv_len);
    // Of a full cache: then a decode loop does not allocate.
    const Index most_keys = std::max(kv_len, input.capacity),
                most_kept = options_.budget.count(most_keys);
    selection.reserve(q.batch() * k.heads(), q.batch() * k.heads() * most_kept);
    const Index sinks = budget > options_.keep_first ? options_.keep_first : 0;
    const auto share = static_cast<Index>(top_share * static_cast<double>(budget));
    const Index recent = std::max<Index>(0, budget - share - sinks);
    const Index part = budget - sinks - recent;

    float* const head_scores = s.head_scores.reserve_amortised(tasks * most_keys);
    const float logit_scale = input.logit_scale();
    const auto fill = [&](Index b, Index q_head, RowWriter& rows) {
      for (Index j = 0; j < q.len(); ++j) rows.add(q, b, q_head, j, logit_scale);
    };
    softmax_scores(
        {.rows = {q.len(), k.dim(), q.dim()}, .fill = fill, .keys = k, .capacity = input.capacity},
        score_view(head_scores, q.batch(), q_heads, kv_len), s.mass, executor);

    s.workers.reserve(executor.workers(),
                      [&](Arena& arena) { detail::TopKScratch(arena, most_keys, 1); });
    Position* lists = s.lists.reserve_amortised(tasks * most_kept);
    executor.run(part > 0 ? tasks : 0, [&](Index task, int worker) {
      const float* middle = head_scores + task * kv_len + sinks;
      const std::span<Position> list(lists + task * part, static_cast<std::size_t>(part));
      Arena arena = s.workers[worker];
      detail::top_k_head(middle, kv_len - sinks - recent, {}, list,
                         detail::TopKScratch(arena, kv_len, 1));
      std::sort(list.begin(), list.end(), [&](Position x, Position y) {
        const float score_x = detail::ordered_score(middle[x]),
                    score_y = detail::ordered_score(middle[y]);
        return score_x > score_y || (score_x == score_y && x < y);
      });
    });
    std::uint8_t* const taken = s.taken.reserve_amortised(most_keys);
    SelectionWriter writer(selection, q.batch(), k.heads(), kv_len, budget);
    for (Index b = 0; b < q.batch(); ++b) {
      std::fill_n(taken, kv_len, std::uint8_t{0});
      std::fill_n(taken, sinks, std::uint8_t{1});
      std::fill_n(taken + kv_len - recent, recent, std::uint8_t{1});
      for (Index place = 0, left = part; left > 0; ++place) {
        const Index rank = place / q_heads, head = b * q_heads + place % q_heads;
        std::uint8_t& key = taken[sinks + lists[head * part + rank]];
        if (key == 0) key = 1, --left;
      }
      const std::span<Position> first = writer.row(b, 0);
      for (Index t = 0, i = 0; t < kv_len; ++t)
        if (taken[t] != 0) first[static_cast<std::size_t>(i++)] = static_cast<Position>(t);
      for (Index head = 1; head < k.heads(); ++head)
        std::copy(first.begin(), first.end(), writer.row(b, head).begin());
    }
    writer.commit();
  }

 private:
  Options options_;
};

using LessIsMoreSelector = LayerSharedSelector<ScoredSelector<LessIsMoreScorer>>;

}  // namespace QUOKA_ABI
}  // namespace quoka
