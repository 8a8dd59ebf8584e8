// Context parallelism of one layer: the loop of quoka::ChunkedPrefill over several ranks, each with
// a shard of the keys, by functions of the library that any engine can call.
//
//   ShardedPrefill layer(shape, quoka::QuokaOptions{}, communicator);          // on every rank
//   layer.forward(q, k, v, out, executor);  // the same q, k, v on every rank
//
// Every rank is called with the whole chunk and gets the whole result. One chunk, on each rank:
//
//   select   its best keys of each KV head, by the selector over its own keys, and their scores;
//            all ranks' best, in one allgather; from them every rank takes the same best of all
//   attend   all query heads to what was selected of its own keys, and those of its KV heads to the
//            chunk itself
//   merge    all ranks' results by their log-sum-exp, in one allgather
//   append   the chunk's keys and values that are its own: shard_map.hpp
//
// A key that is not among the `budget` best of its rank is not among those of all, and a cosine
// depends on its key and the queries alone. So the Selection is that of one machine, to the bit,
// for any number of ranks. (Scores of MassSelector are shares among all keys, which one rank does
// not have.) Outputs are those of one machine up to rounding, the same bits on all ranks.
//
// Each rank sends, with h query heads, g KV heads, n = q_len, d = v_dim, k = keys chosen by their
// scores:
//
//   candidates        8 g k bytes          none grows with the past
//   partial results   4 h n (d + 1)        by many ranks: scatter rows, merge them at home, gather
//
// Dense attention by a ring sends 4 g (kv_len / ranks) (head_dim + d) (ranks - 1) for each chunk.
// An exception on one rank leaves the others waiting, as in any program over MPI: who catches it
// ends the job.
#pragma once

#include "context_parallel/communicator.hpp"
#include "context_parallel/shard_map.hpp"

#include <quoka/attention/attention.hpp>
#include <quoka/attention/merge.hpp>
#include <quoka/layer/kv_cache.hpp>
#include <quoka/select/quoka.hpp>
#include <quoka/select/stages.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <vector>

namespace quoka_examples {

class ShardedPrefill {
 public:
  using View = quoka::TensorView<const float>;
  using Out = quoka::TensorView<float>;

  // One sequence in float. No selection options: every key is attended to. The communicator and
  // what `attention` refers to must outlive the layer. Throws std::invalid_argument for what is
  // said above to be refused, and for a window, a mask, slopes and a q_offset.
  ShardedPrefill(const quoka::LayerShape& shape,
                 const std::optional<quoka::QuokaOptions>& selection, Communicator& ranks,
                 const quoka::AttentionOptions& attention = {}, Index block = ShardMap::usual_block)
      : shape_(shape),
        attention_(attention),
        ranks_(ranks),
        map_(block, ranks.rank(), ranks.ranks()),
        cache_(1, shape.kv_heads, shape.head_dim, v_dim()) {
    if (selection) selector_.emplace(*selection);
    quoka::detail::require_equal("batch", shape.batch, "one sequence", 1);
    quoka::detail::require_multiple("q_heads", shape.q_heads, "kv_heads", shape.kv_heads);
    if (shape.k_format != nullptr || shape.v_format != nullptr)
      quoka::detail::fail_because("a layer over several ranks keeps floats, and has formats");
    quoka::detail::require_equal("sliding_window", attention.sliding_window,
                                 "the only one over several ranks", 0);
    if (!attention.causal || !attention.mask.absent() || !attention.lists.absent() ||
        !attention.alibi_slopes.empty() || attention.q_offset)
      quoka::detail::fail_because(
          "attention over several ranks is causal, without a mask, lists, slopes or a "
          "q_offset");
  }

  // One chunk, or one decode step; collective. q [1, q_heads, q_len, head_dim], k [1, kv_heads,
  // q_len, head_dim], v [1, kv_heads, q_len, v_dim], out [1, q_heads, q_len, v_dim].
  void forward(View q, View k, View v, Out out, quoka::ExecutorRef executor = serial()) {
    quoka::detail::require_sizes("q", q.sizes(), {1, shape_.q_heads, q.len(), shape_.head_dim});
    quoka::detail::require_sizes("out", out.sizes(), {1, shape_.q_heads, q.len(), v_dim()});
    quoka::detail::require_equal("k's len", k.len(), "q_len", q.len());
    check(k, v);
    select(q, executor);
    attend(q, k, v, out, executor);
    append_checked(k, v, executor);
  }

  // A saved prefix: takes over this rank's part of keys and values, without attention. Not
  // collective.
  void append(View k, View v, quoka::ExecutorRef executor = serial()) {
    check(k, v);
    append_checked(k, v, executor);
  }
  // Back to the first `len` tokens, on every rank. Throws std::invalid_argument beyond the present
  // length.
  void truncate(Index len) {
    quoka::detail::require_at_least("truncate's len", len, 0);
    quoka::detail::require_at_most("truncate's len", len, "the layer's len", kv_len_);
    kv_len_ = len;
    cache_.truncate(map_.local_len(len));
    state_.truncate(map_.local_len(len));
  }
  // Room for `len` tokens on all ranks together.
  void reserve(Index len) { cache_.reserve(map_.local_len(len)); }

  Index kv_len() const { return kv_len_; }                  // of all ranks
  const quoka::KvCache& cache() const { return cache_; }    // this rank's
  Index kept_bytes() const { return state_.kept_bytes(); }  // beside the cache
  // What the last forward() attended to of its past, by positions; the same on all ranks.
  const quoka::Selection& selection() const { return selection_; }

 private:
  // A key by its score, for all ranks in the same order.
  struct Candidate {
    float score = -std::numeric_limits<float>::infinity();
    quoka::Position position = std::numeric_limits<quoka::Position>::max();

    friend bool operator<(const Candidate& a, const Candidate& b) {  // is a the better one?
      return a.score != b.score ? a.score > b.score : a.position < b.position;
    }
  };
  // The result of some query heads: rows, then their log-sum-exp.
  struct Part {
    float* data;
    Index heads, q_len, v_dim;

    static Index floats(Index heads, Index q_len, Index v_dim) {
      return heads * q_len * (v_dim + 1);
    }
    Out out() const { return {data, {1, heads, q_len, v_dim}}; }
    quoka::TensorView<float, 3> lse() const {
      return {data + heads * q_len * v_dim, {1, heads, q_len}};
    }
  };

  static quoka::ExecutorRef serial() {
    static quoka::SerialExecutor calling_thread;
    return calling_thread;
  }
  Index v_dim() const { return shape_.v_dim == 0 ? shape_.head_dim : shape_.v_dim; }
  quoka::SelectorInput own_keys(View q) const {
    return {.q = q,
            .k = cache_.k(),
            .logits = attention_,
            .inverse_norms = cache_.inverse_norms(),
            .capacity = cache_.capacity()};
  }

  // The same on every rank, whichever keys are its own.
  void check(View k, View v) const {
    cache_.check(k, v);
    quoka::detail::require_at_most("k's len", k.len(), "max_keys without the layer's",
                                   quoka::max_keys - kv_len_);
  }
  void append_checked(View k, View v, quoka::ExecutorRef executor) {
    map_.for_own(kv_len_, kv_len_ + k.len(), [&](Index begin, Index n) {
      cache_.append(k.slice(begin - kv_len_, n), v.slice(begin - kv_len_, n), executor);
    });
    kv_len_ += k.len();
    if (selector_) selector_->appended(own_keys({}), state_, executor);
  }

  // Writes selection_, by positions, and own_, this rank's part of it by places in its cache.
  void select(View q, quoka::ExecutorRef executor) {
    const Index heads = shape_.kv_heads, local = cache_.len();
    const Index budget = selector_ ? selector_->options().budget.count(kv_len_) : kv_len_;
    if (budget >= kv_len_) {
      selection_.select_all(1, heads, kv_len_);
      own_.select_all(1, heads, local);
      return;
    }
    const quoka::QuokaOptions& forced = selector_->options();
    const Index first = std::min(forced.keep_first, budget),
                last = std::min(forced.keep_last, budget - first), wanted = budget - first - last;
    const std::vector<Candidate> all =
        all_candidates(q, budget, first, kv_len_ - last, wanted, executor);
    quoka::SelectionWriter chosen(selection_, 1, heads, kv_len_, budget);
    quoka::SelectionWriter own(own_, 1, heads, local, std::min(budget, local));
    executor.run(heads, [&](Index head, int) {
      const auto row = chosen.row(0, head);
      choose(all, head, wanted, row.subspan(static_cast<std::size_t>(first)));
      for (Index i = 0; i < first; ++i)
        row[static_cast<std::size_t>(i)] = static_cast<quoka::Position>(i);
      for (Index i = 0; i < last; ++i)
        row[static_cast<std::size_t>(budget - last + i)] =
            static_cast<quoka::Position>(kv_len_ - last + i);
      auto place = own.row(0, head).begin();
      const auto places = place;
      for (const quoka::Position position : row)
        if (map_.is_own(position)) *place++ = static_cast<quoka::Position>(map_.place(position));
      own.set_count(0, head, place - places);
    });
    chosen.commit();
    own.commit();
  }

  // [ranks, kv_heads, wanted]: each rank's best keys at positions [begin, end).
  std::vector<Candidate> all_candidates(View q, Index budget, Index begin, Index end, Index wanted,
                                        quoka::ExecutorRef executor) {
    const Index heads = shape_.kv_heads, local = cache_.len();
    std::vector<Candidate> mine(static_cast<std::size_t>(heads * wanted)),
        all(mine.size() * static_cast<std::size_t>(ranks_.ranks()));
    if (wanted > 0 && local > 0) {
      // As many as the budget: those that are forced anyway are among them.
      quoka::QuokaOptions options = selector_->options();
      options.budget = quoka::Budget::keys(budget);
      options.keep_first = options.keep_last = 0;
      quoka::Selection best;
      quoka::QuokaSelector(options).select(own_keys(q), state_, best, executor);
      const auto scores = scores_of(q, best, executor);
      executor.run(heads, [&](Index head, int) {
        Candidate* to = mine.data() + head * wanted;
        std::vector<Candidate> own;
        for (Index i = 0; i < best.count(0, head); ++i) {
          const Index place = best.is_all() ? i : best.row(0, head)[static_cast<std::size_t>(i)],
                      position = map_.position(place);
          const float score = scores(0, head, i);
          if (position >= begin && position < end)
            own.push_back({std::isnan(score) ? Candidate().score : score,
                           static_cast<quoka::Position>(position)});
        }
        const auto count = std::min(std::ssize(own), wanted);
        std::partial_sort_copy(own.begin(), own.end(), to, to + count);
      });
    }
    allgather<Candidate>(ranks_, mine, all);
    return all;
  }

  // [1, kv_heads, budget] by the stages of the algorithm, of these keys alone.
  quoka::Tensor<float, 3> scores_of(View q, const quoka::Selection& best,
                                    quoka::ExecutorRef executor) const {
    const quoka::QuokaOptions& o = selector_->options();
    const auto kept = quoka::subselect_queries(q, o.n_queries, executor);
    const auto q_bar = quoka::pre_aggregate(kept, shape_.kv_heads, executor);
    const auto keys = quoka::gather(cache_.k().typed<float>(), best, executor);
    return quoka::score_keys(q_bar, keys, quoka::Aggregation::max, {}, executor);
  }

  // The `wanted` best candidates of a head, ascending by position.
  void choose(const std::vector<Candidate>& all, Index head, Index wanted,
              std::span<quoka::Position> to) const {
    if (wanted == 0) return;
    std::vector<Candidate> of_head;
    for (Index rank = 0; rank < ranks_.ranks(); ++rank) {
      const auto from = all.begin() + (rank * shape_.kv_heads + head) * wanted;
      of_head.insert(of_head.end(), from, from + wanted);
    }
    std::nth_element(of_head.begin(), of_head.begin() + wanted - 1, of_head.end());
    std::transform(of_head.begin(), of_head.begin() + wanted, to.begin(),
                   [](const Candidate& x) { return x.position; });
    std::sort(to.begin(), to.begin() + wanted);
  }

  void attend(View q, View k, View v, Out out, quoka::ExecutorRef executor) {
    const Index heads = shape_.q_heads, n = q.len(), size = Part::floats(heads, n, v_dim());
    std::vector<float> floats(static_cast<std::size_t>(size * ranks_.ranks()));
    const auto part = [&](Index rank) {
      return Part{floats.data() + rank * size, heads, n, v_dim()};
    };
    attend_to_past(q, part(ranks_.rank()), executor);
    attend_to_chunk(q, k, v, part(ranks_.rank()), executor);
    allgather<float>(ranks_, std::span(part(ranks_.rank()).data, static_cast<std::size_t>(size)),
                     floats);
    // In the order of the ranks, so that all have the same bits.
    executor.run(heads, [&](Index head, int) {
      const Out sum = part(0).out().some_heads(head, 1);
      const auto lse = part(0).lse().some_heads(head, 1);
      for (Index rank = 1; rank < ranks_.ranks(); ++rank)
        quoka::merge(sum, lse, part(rank).out().some_heads(head, 1),
                     part(rank).lse().some_heads(head, 1));
      for (Index i = 0; i < n; ++i) std::copy_n(sum.row(0, 0, i), v_dim(), out.row(0, head, i));
    });
  }

  // All query heads to this rank's keys.
  void attend_to_past(View q, const Part& to, quoka::ExecutorRef executor) {
    if (cache_.len() == 0) {
      std::fill_n(to.data, to.heads * to.q_len * to.v_dim, 0.0f);
      std::fill_n(to.lse().data(), to.heads * to.q_len, -std::numeric_limits<float>::infinity());
      return;
    }
    quoka::AttentionOptions options = attention_;
    options.sinks = {};               // of one part alone, the chunk's
    options.q_offset = cache_.len();  // all of these keys lie before the queries
    quoka::attention(q, {cache_.k(), cache_.v(), own_}, {}, {to.out(), to.lse()}, options, executor,
                     workspace_);
  }

  // The query heads of this rank's KV heads to the chunk, merged into the result.
  void attend_to_chunk(View q, View k, View v, const Part& to, quoka::ExecutorRef executor) {
    const Index group = shape_.q_heads / shape_.kv_heads,
                each = quoka::ceil_div(shape_.kv_heads, ranks_.ranks()),
                begin = std::min(ranks_.rank() * each, shape_.kv_heads),
                count = std::min(each, shape_.kv_heads - begin), q_begin = begin * group,
                q_count = count * group;
    if (count == 0) return;
    quoka::AttentionOptions options = attention_;
    options.mask_factors = {};  // of no mask
    if (!options.sinks.empty())
      options.sinks = options.sinks.subspan(static_cast<std::size_t>(q_begin),
                                            static_cast<std::size_t>(q_count));
    std::vector<float> floats(static_cast<std::size_t>(Part::floats(q_count, to.q_len, to.v_dim)));
    const Part chunk{floats.data(), q_count, to.q_len, to.v_dim};
    quoka::attention(q.some_heads(q_begin, q_count), {},
                     {k.some_heads(begin, count), v.some_heads(begin, count)},
                     {chunk.out(), chunk.lse()}, options, executor, workspace_);
    quoka::merge(to.out().some_heads(q_begin, q_count), to.lse().some_heads(q_begin, q_count),
                 chunk.out(), chunk.lse());
  }

  quoka::LayerShape shape_;
  std::optional<quoka::QuokaSelector> selector_;  // none: every key
  quoka::AttentionOptions attention_;
  Communicator& ranks_;
  ShardMap map_;
  quoka::KvCache cache_;
  quoka::QuokaSelector::State state_;
  quoka::AttentionWorkspace workspace_;
  quoka::Selection selection_, own_;
  Index kv_len_ = 0;
};

}  // namespace quoka_examples
