// LessIsMore: one set for all heads, the union of what each head wants most, at two layers.
//
//   s[h][t]   = mean over the chunk's queries of softmax over t of head h's logits
//   part      = three quarters of the budget by score, rounded down; keep_first keys; the rest most recent
//   list[h]   = the part best keys of head h between first and recent ones, best first
//   union     = rank 0 of every head, then rank 1 of every head, ... each key once, until part keys
//
// 2 * q_heads * q_len * kv_len * head_dim FLOPs at the choosing layers and none elsewhere. The
// union is a top-k: a key's score is minus its place (rank * q_heads + head) in that order. Source:
// Yang et al., "Less Is More: Training-Free Sparse Attention with Global Locality for Efficient
// Reasoning", arXiv 2508.07101, and its code, which decodes one query at a time. Deviations: one
// set per chunk; the correction layer by rule (LayerPlan).
#pragma once

#include <quoka/methods/chunk_shape.hpp>
#include <quoka/methods/layer_shared.hpp>
#include <quoka/select/query_scores.hpp>

#include <algorithm>
#include <limits>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {

// What LessIsMoreSelector leaves open.
struct LessIsMoreOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head
  LayerPlan plan = {};                 // this layer, and which layers choose
  Index keep_first = 4;                // attention sinks, always kept where the budget is larger
};
// FLOPs of a chunk's scores (chunk_shape.hpp): the oracle's at the layers that choose, none at the others.
inline double flops(const LessIsMoreOptions& o, const ChunkShape& c) {
  return o.plan.chooses() ? detail::exact_flops(c) : 0.0;
}

// The choice behind LessIsMoreSelector.
class LessIsMoreChoice {
 public:
  using Options = LessIsMoreOptions;

  struct State : NoState {
    QueryScoreState query_scores;
    Buffer<float> head_scores;  // [batch, q_heads, kv_len]
    Buffer<float> places;       // [batch, kv_len], minus the place in the union
    Buffer<Position> lists;     // [batch, q_heads, part]
    WorkerScratch<TopKScratch> top_k;

    Index bytes() const { return bytes_of(query_scores, head_scores, places, lists, top_k); }
  };

  // Of the budget, chosen by score: the authors' share.
  static constexpr double top_share = 0.75;

  // Throws std::invalid_argument for a negative keep_first.
  explicit LessIsMoreChoice(const Options& options = {}) : options_(options) {
    detail::require_at_least("keep_first", options.keep_first, 0);
  }

  // Attention's, by its scale.
  static bool weighs_logits() { return true; }

  void select(const SelectorInput& input, Index budget, State& s, Selection& selection,
              ExecutorRef executor) const {
    const Rows &q = input.q, &k = input.k;
    const Index kv_len = k.len(), q_heads = q.heads(), tasks = q.batch() * q_heads;
    const Index sinks = budget > options_.keep_first ? options_.keep_first : 0;
    const auto share = static_cast<Index>(top_share * static_cast<double>(budget));
    const Index recent = std::max<Index>(0, budget - share - sinks);
    const Index part = budget - sinks - recent;

    float* const head_scores = s.head_scores.reserve_amortised(tasks * kv_len);
    const float logit_scale = input.logit_scale();
    const auto fill = [&](Index b, Index q_head, RowWriter& rows) {
      for (Index j = 0; j < q.len(); ++j) rows.add(q, b, q_head, j, logit_scale);
    };
    softmax_scores({{q.len(), k.dim(), q}, fill, RowSource(k), input.capacity, Aggregation::mean},
                   score_view(head_scores, q.batch(), q_heads, kv_len), s.query_scores, executor);

    s.top_k.reserve(executor.workers(), kv_len, 1);
    Position* lists = s.lists.reserve_amortised(tasks * part);
    executor.run(part > 0 ? tasks : 0, [&](Index task, int worker) {
      const float* middle = head_scores + task * kv_len + sinks;
      const std::span<Position> list(lists + task * part, static_cast<std::size_t>(part));
      best_of_head({middle, static_cast<std::size_t>(kv_len - sinks - recent)}, {}, list,
                   s.top_k[worker]);
      std::sort(list.begin(), list.end(), [&](Position x, Position y) {
        const auto score_x = ordered_score(middle[x]), score_y = ordered_score(middle[y]);
        return score_x > score_y || (score_x == score_y && x < y);
      });
    });
    float* places = s.places.reserve_amortised(q.batch() * kv_len);
    std::fill_n(places, q.batch() * kv_len, -std::numeric_limits<float>::infinity());
    SelectionWriter writer(selection, q.batch(), k.heads(), kv_len, budget);
    for (Index b = 0; b < q.batch(); ++b) {
      float* key_places = places + b * kv_len;
      for (Index head = 0; head < q_heads; ++head) {
        for (Index rank = 0; rank < part; ++rank) {
          float& place = key_places[sinks + lists[(b * q_heads + head) * part + rank]];
          place = std::max(place, -static_cast<float>(rank * q_heads + head));
        }
      }
      const std::span<Position> first = writer.row(b, 0);
      best_of_head({key_places, static_cast<std::size_t>(kv_len)},
                   {.keep_first = sinks, .keep_last = recent}, first, s.top_k[0]);
      for (Index head = 1; head < k.heads(); ++head)
        std::copy(first.begin(), first.end(), writer.row(b, head).begin());
    }
    writer.commit();
  }

 private:
  Options options_;
};

using LessIsMoreSelector = LayerSharedSelector<LessIsMoreChoice>;
static_assert(Selector<LessIsMoreSelector>);

}  // namespace QUOKA_ABI
}  // namespace quoka
