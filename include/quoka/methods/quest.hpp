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

#include <quoka/methods/chunk_shape.hpp>
#include <quoka/rows/row_store.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/select/scored_selector.hpp>

#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {

// What QuestSelector leaves open.
struct QuestOptions {
  Budget budget = Budget::keys(1024);  // keys per KV head
  Index page = 16;                     // keys per page
  Domain domain = Domain::logit;       // in which several queries' logits are averaged
  TopKOptions top_k = {};              // neighbours, sinks and recent keys, inside the budget
};
// FLOPs of a chunk's scores (chunk_shape.hpp): 4 q_heads B (P / page) d; logit: 4 kv_heads (P / page) d + 2 q_heads B d.
inline double flops(const QuestOptions& o, const ChunkShape& c) {
  const Index pages = ceil_div(c.kv_len, o.page);
  if (o.domain == Domain::softmax)
    return detail::product({4, c.q_heads, c.q_len, pages, c.head_dim});
  return detail::product({4, c.kv_heads, pages, c.head_dim}) +
         detail::product({2, c.q_heads, c.q_len, c.head_dim});
}

// The scores behind QuestSelector.
class QuestScorer {
 public:
  using Options = QuestOptions;

  struct State {
    RowStore<float> pages;      // [batch, kv_heads, pages, 2 * head_dim]: max, then min
    Buffer<float> page_scores;  // [batch, kv_heads, pages]
    QueryScoreState scores;
    RowReader row;
    Index len = 0;  // keys whose pages are up to date

    void truncate(Index kv_len) { len = std::min(len, kv_len); }
    Index kept_len() const { return len; }
    Index kept_bytes() const { return pages.bytes(); }
    Index bytes() const { return bytes_of(pages, page_scores, scores); }
  };

  // Throws std::invalid_argument for a page < 1.
  explicit QuestScorer(const Options& options = {}) : options_(options) {
    detail::require_at_least("page", options.page, 1);
  }

  // Attention's, by its scale.
  static bool weighs_logits() { return true; }

  void score(const SelectorInput& input, State& state, TensorView<float, 3> scores,
             ExecutorRef executor) const {
    const Rows &q = input.q, &k = input.k;
    const Index group = input.group(), tasks = k.batch() * k.heads();
    catch_up(k, input.capacity, state);
    const Index pages = state.pages.len();
    const QueryRows shape{group * q.len(), 2 * k.dim(), q};
    const float logit_scale = input.logit_scale();
    const auto fill = [&](Index b, Index kv_head, RowWriter& rows) {
      for (Index r = 0; r < group; ++r) {
        for (Index j = 0; j < q.len(); ++j) {
          const float* const row = rows.read(q, b, kv_head * group + r, j);
          float* const to = rows.next();
          for (Index c = 0; c < k.dim(); ++c) {
            const float x = row[c] * (logit_scale);
            to[c] = x > 0.0f ? x : 0.0f;
            to[k.dim() + c] = x > 0.0f ? 0.0f : x;
          }
          rows.keep_if_finite();
        }
      }
    };
    const TensorView<float, 3> page_scores =
        score_view(state.page_scores.reserve_amortised(tasks * pages), k.batch(), k.heads(), pages);
    const Rows rows = state.pages.view();
    if (options_.domain == Domain::logit)
      mean_logit_scores(shape, fill, rows, page_scores, state.scores, executor);
    else
      softmax_scores({shape, fill, RowSource(rows), ceil_div(input.capacity, options_.page),
                      Aggregation::mean},
                     page_scores, state.scores, executor);
    const Index whole = k.len() / options_.page * options_.page;
    for (Index b = 0; b < k.batch(); ++b) {
      for (Index head = 0; head < k.heads(); ++head) {
        for (Index t = 0; t < whole; ++t)
          scores.at(b, head, t) = page_scores.at(b, head, t / options_.page);
        for (Index t = whole; t < k.len(); ++t)
          scores.at(b, head, t) = std::numeric_limits<float>::max();
      }
    }
  }

  void appended(const SelectorInput& input, State& state, ExecutorRef) const {
    catch_up(input.k, input.capacity, state);
  }

 private:
  // Bounds of the pages that hold keys from state.len on. A NaN bounds nothing.
  void catch_up(const Rows& k, Index capacity, State& state) const {
    if (state.pages.batch() != k.batch() || state.pages.heads() != k.heads() ||
        state.pages.dim() != 2 * k.dim())
      state.len = 0;
    state.pages.reshape(k.batch(), k.heads(), 2 * k.dim());
    state.pages.resize(ceil_div(k.len(), options_.page), ceil_div(capacity, options_.page));
    state.row.reserve(k);
    const Index first = std::min(state.len, k.len()) / options_.page * options_.page;
    for (Index b = 0; b < k.batch(); ++b) {
      for (Index head = 0; head < k.heads(); ++head) {
        for (Index t = first; t < k.len(); ++t) {
          float* most = state.pages.row(b, head, t / options_.page);
          float* least = most + k.dim();
          const float* const key = state.row.read(k, b, head, t);
          if (t % options_.page == 0) {
            std::fill_n(most, k.dim(), -std::numeric_limits<float>::infinity());
            std::fill_n(least, k.dim(), std::numeric_limits<float>::infinity());
          }
          for (Index c = 0; c < k.dim(); ++c) {
            const float x = key[c];
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

}  // namespace QUOKA_ABI
}  // namespace quoka
