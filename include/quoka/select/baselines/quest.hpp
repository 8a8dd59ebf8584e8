// Quest: pages of keys, each judged by an upper bound on its logits.
//
//   page p    min[c], max[c] over its keys
//   bound     u[h][j][p] = scale * sum over c of max(q[c] min[c], q[c] max[c])
//   score[t]  = mean over the group's heads and queries of u of t's page   (Domain::logit, Quest's)
//             = mean of softmax over the pages of u                        (Domain::softmax)
//
// With q = q+ - q-, the positive and the negative part, the bound is q+ . max - q- . |min|: a dot
// product of 2 * head_dim channels, so pages are scored by the kernels that score keys.
// 4 * kv_heads * kv_len / page * head_dim FLOPs (logit); times group * q_len (softmax). Keeps
// 2 * head_dim floats per page. The partial page at the end of the past is always kept, as the
// current page is in decode. Source: Tang et al., "Quest: Query-Aware Sparsity for Efficient
// Long-Context LLM Inference", arXiv 2406.10774, which decodes one query at a time. Deviations: one
// set per KV head and chunk; a budget that is no multiple of the page is filled with the first keys
// of the next page; whether early layers stay dense is the caller's choice.
#pragma once

#include <quoka/cache/row_store.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/select/scored_selector.hpp>

#include <limits>

namespace quoka::inline QUOKA_ABI {

struct QuestOptions {
  Budget budget = 1024;
  Index page = 16;  // keys per page
  Domain domain = Domain::logit;
  Index window = 1;      // neighbouring keys kept together; 1: none
  Index keep_first = 0;  // attention sinks, inside the budget
  Index keep_last = 0;   // recent keys, inside the budget
};

class QuestScorer {
 public:
  using Options = QuestOptions;

  struct State {
    RowStore<float> pages;  // [batch, kv_heads, pages, 2 * head_dim]: max, then min
    Buffer<float> of_page;  // [batch, kv_heads, pages]
    detail::QueryScoreState scores;
    Index len = 0;  // keys whose pages are up to date

    void truncate(Index kv_len) { len = std::min(len, kv_len); }
    Index kept_bytes() const { return pages.bytes(); }
    Index bytes() const { return pages.bytes() + of_page.bytes() + scores.bytes(); }
  };

  // Throws std::invalid_argument for a page < 1.
  explicit QuestScorer(const Options& options = {}) : options_(options) {
    detail::require_at_least("page", options.page, 1);
  }

  template <class T>
  void score(const SelectorInput<T>& input, State& state, float* scores,
             ExecutorRef executor) const {
    const TensorView<const T>&q = input.q, &k = input.k;
    const Index group = input.group(), tasks = k.batch() * k.heads();
    catch_up(k, input.capacity, state);
    const Index pages = state.pages.len();
    const detail::QueryRows shape{tasks, group * q.len(), 2 * k.dim()};
    const auto fill = [&](Index task, float factor, detail::RowWriter& rows) {
      for (Index r = 0; r < group; ++r) {
        for (Index j = 0; j < q.len(); ++j) {
          const T* row = q.row(task / k.heads(), task % k.heads() * group + r, j);
          float* to = rows.next();
          for (Index c = 0; c < k.dim(); ++c) {
            const float x = static_cast<float>(row[c]) * (factor * input.logit_scale());
            to[c] = x > 0.0f ? x : 0.0f;
            to[k.dim() + c] = x > 0.0f ? 0.0f : x;
          }
          rows.keep_if_finite();
        }
      }
    };
    float* of_page = state.of_page.reserve_amortised(tasks * pages);
    const TensorView<const float> rows = state.pages.view();
    if (options_.domain == Domain::logit)
      detail::mean_logit_scores(shape, fill, rows, of_page, state.scores, executor);
    else
      detail::softmax_scores(
          shape, fill, pages, ceil_div(input.capacity, options_.page),
          [&](Index task) { return detail::cached_keys(rows, task); }, detail::MassOver::sum,
          of_page, state.scores, executor);
    const Index whole = k.len() / options_.page * options_.page;
    for (Index task = 0; task < tasks; ++task) {
      float* to = scores + task * k.len();
      for (Index t = 0; t < whole; ++t) to[t] = of_page[task * pages + t / options_.page];
      std::fill(to + whole, to + k.len(), std::numeric_limits<float>::max());
    }
  }

  template <class T>
  void appended(const SelectorInput<T>& input, State& state, ExecutorRef) const {
    catch_up(input.k, input.capacity, state);
  }

 private:
  // Bounds of the pages that hold keys from state.len on. A NaN bounds nothing.
  template <class T>
  void catch_up(const TensorView<const T>& k, Index capacity, State& state) const {
    if (state.pages.batch() != k.batch() || state.pages.heads() != k.heads() ||
        state.pages.dim() != 2 * k.dim())
      state.len = 0;
    state.pages.reshape(k.batch(), k.heads(), 2 * k.dim());
    state.pages.reserve(ceil_div(capacity, options_.page));
    state.pages.resize(ceil_div(k.len(), options_.page));
    const Index first = std::min(state.len, k.len()) / options_.page * options_.page;
    for (Index b = 0; b < k.batch(); ++b) {
      for (Index head = 0; head < k.heads(); ++head) {
        for (Index t = first; t < k.len(); ++t) {
          float* most = state.pages.row(b, head, t / options_.page);
          float* least = most + k.dim();
          const T* key = k.row(b, head, t);
          if (t % options_.page == 0) {
            std::fill_n(most, k.dim(), -simd::infinity);
            std::fill_n(least, k.dim(), simd::infinity);
          }
          for (Index c = 0; c < k.dim(); ++c) {
            const float x = static_cast<float>(key[c]);
            most[c] = x > most[c] ? x : most[c];
            least[c] = x < least[c] ? x : least[c];
          }
        }
      }
    }
    state.len = k.len();
  }

  Options options_;
};

using QuestSelector = ScoredSelector<QuestScorer>;
static_assert(Selector<QuestSelector>);

}  // namespace quoka::inline QUOKA_ABI
