// Quest: pages of keys, each judged by an upper bound on its logits.
//
//   page p    min[c], max[c] over its keys
//   bound     u[h][j][p] = scale * sum over c of max(q[c] min[c], q[c] max[c])
//   score[t]  = mean over the group's heads and queries of u of t's page
//
// With q = q+ - q-, the positive and the negative part, the bound is q+ . max - q- . min: a dot
// product of 2 * head_dim channels, so pages are scored by the kernels that score keys. 4 *
// kv_heads * kv_len / page * head_dim FLOPs. Keeps 2 * head_dim floats per page. The partial page
// at the end of the past is always kept, as the current page is in decode. Source: Tang et al.,
// "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", arXiv 2406.10774, which
// decodes one query at a time. Deviations: one set per KV head and chunk. A budget that is not a
// multiple of the page is filled with the first keys of the next page. The caller decides whether
// early layers stay dense.
#pragma once

#include <quoka/methods/kept_rows.hpp>
#include <quoka/select/key_scores.hpp>
#include <quoka/select/scored_selector.hpp>

#include <algorithm>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {

// Options of QuestSelector.
struct QuestOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head
  Index page = 16;                     // keys per page
  Index keep_first = 0;                // attention sinks, inside the budget
  Index keep_last = 0;                 // most recent keys, inside the budget
};

// The scores behind QuestSelector.
class QuestScorer : public ScorerDefaults {
 public:
  using Options = QuestOptions;

  // Keeps the maximum and then the minimum of each page's keys.
  struct State : KeptRows {
    Buffer<float> page_scores;  // [batch, kv_heads, pages]
    Buffer<float> mean_rows;    // of mean_logit_scores()
    Arenas workers;
  };

  // Throws std::invalid_argument for a page outside [1, max_keys].
  explicit QuestScorer(const Options& options = {}) : options_(options) {
    detail::require_size("page", options.page, 1);
  }

  // The scores are bounds on attention's logits, and use its scale.
  static bool weighs_logits() { return true; }

  void score(const SelectorInput& input, State& state, TensorView<float, 3> scores,
             ExecutorRef executor) const {
    const Rows &q = input.q, &k = input.k;
    const Index dim = k.dim(), page = options_.page;
    appended(input, state, executor);  // makes the pages of keys that appended() has not seen
    const float logit_scale = input.logit_scale();
    const auto fill = [&](Index b, Index kv_head, RowWriter& rows) {
      for_each_query(input, kv_head, [&](Index head, Index i) {
        const float* const row = rows.read(q, b, head, i);
        for (Index c = 0; c < dim; ++c) {
          const float x = row[c] * logit_scale;
          rows.next()[c] = x > 0.0f ? x : 0.0f;
          rows.next()[dim + c] = x > 0.0f ? 0.0f : x;
        }
        rows.keep_if_finite();
      });
    };
    const Rows pages = state.rows().view();
    const Index most_pages = ceil_div(std::max(k.len(), input.capacity), page);
    const TensorView<float, 3> page_scores =
        score_view(state.page_scores.reserve_amortised(k.batch() * k.heads() * most_pages),
                   k.batch(), k.heads(), pages.len());
    mean_logit_scores({input.group() * q.len(), 2 * dim, q.dim()}, fill, pages, page_scores,
                      state.mean_rows, state.workers, executor);
    const Index whole = k.len() / page * page;
    for_each_kv_head(k, executor, [&](Index b, Index head, int) {
      for (Index t = 0; t < k.len(); ++t)
        scores.at(b, head, t) =
            t < whole ? page_scores.at(b, head, t / page) : std::numeric_limits<float>::max();
    });
  }

  // Bounds of the keys that have come. A NaN bounds nothing.
  void appended(const SelectorInput& input, State& state, ExecutorRef executor) const {
    const Index dim = input.k.dim();
    state.append(input.k, input.capacity, options_.page, 2 * dim, executor,
                 [dim](Index, Index count, auto&& key_at, float* page) {
                   float *const most = page, *const least = page + dim;
                   std::fill_n(most, dim, -std::numeric_limits<float>::infinity());
                   std::fill_n(least, dim, std::numeric_limits<float>::infinity());
                   for (Index i = 0; i < count; ++i) {
                     const float* const key = key_at(i);
                     for (Index c = 0; c < dim; ++c) {
                       most[c] = key[c] > most[c] ? key[c] : most[c];
                       least[c] = key[c] < least[c] ? key[c] : least[c];
                     }
                   }
                 });
  }

 private:
  Options options_;
};

using QuestSelector = ScoredSelector<QuestScorer>;

}  // namespace QUOKA_ABI
}  // namespace quoka
