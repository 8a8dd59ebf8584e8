// Context parallelism of one layer: ChunkedPrefill over several ranks, each with a shard of the keys.
//
//   ShardedPrefill<QuokaSelector> layer(shape, options, communicator);    // on every rank
//   layer.forward(q, k, v, out, executor);                                // on every rank, the same q, k, v
//
// Every rank is called with the whole chunk and gets the whole result. One chunk, on each rank:
//
//   score    its own keys, by the method's scorer; what is kept per key (norms, sketch) lies with the keys
//   select   its best keys of each KV head as candidates to all; from all of them every rank takes the same
//            best, by (score, position): global_top_k.hpp
//   attend   to what was selected of its own keys, and with its part of the rows to the chunk's own; results are
//            merged by log-sum-exp: sharded_attention.hpp
//   append   the chunk's keys and values that its layout gives it: shard_layout.hpp
//
// The Selection has the bits of ChunkedPrefill's on one machine, for every number of ranks and every
// layout. A key's score must come from that key and the queries alone; or, where it is a share of a
// softmax, from these and the rows' maxima and sums over all keys, which are exchanged and do not depend
// on the order of the keys (steps/softmax_mass.hpp). Scorers say so by shard_keys():
//
//   QuoKA and every scorer in Domain::logit, random, first_recent        candidates alone
//   Oracle, SampleAttention, SparQ, Loki and QuoKA in Domain::softmax    rows' maxima and sums besides
//   refused   Loki without a calibration, Quest in Domain::softmax: they look at all keys. Does not compile:
//             methods that choose blocks, share a choice among layers, or evict
//
// In Domain::logit a shard's 8-bit sketch proposes the candidates, and float decides, as on one machine. In
// Domain::softmax (QuokaOptions::recommended) a sketch's scores depend on which keys it sees together: shards
// score in float, and the Selection is that of Sketch::off.
//
// Outputs are those of one machine up to rounding; one rank gives ChunkedPrefill's bits. For a number of
// ranks and a layout the bits are always the same, on all ranks. Ranks compiled for different
// ISAs are refused: their bits differ.
//
// Cost. P ranks, b sequences, h query heads, g KV heads, n = q_len, d = v_dim, k = keys wanted by score;
// c = ceil(g / P) KV heads at a home and r = n rows of them; with P > g, c = 1, r = ceil(n / floor(P / g)).
// u is the rows of queries at home: c h r / g, fewer on the last ranks. Each rank sends, per chunk:
//
//   candidates        8 b g m                        1 allgather; m <= k (global_top_k.hpp), twice for some
//   window w > 1      4 b g (w - 1) runs             1 allgather; runs: 1, or blocks of tokens per rank
//   softmax           12 b g round_up(rows, panel)   2 allreduces; rows of queries that score for a KV head
//   partial results   4 (h n - u) b (d + 1)          P - 1 sendrecvs
//   merged results    4 (c h / g) r b (d + 1)        1 allgather
//   headers           Rounds::header_bytes           1 allgather before each line, at begin and at end
//
// None of it grows with kv_len, with a budget in keys and a window of 1. Without selection (DenseSelector,
// a past within the budget) the first three lines are nothing. Of dense attention by a ring each rank sends
// 4 b g (kv_len / P) (head_dim + v_dim) (P - 1). FLOPs: scoring and attention over the past are divided by
// the ranks as the layout divides the keys; choosing queries is done by each; the chunk's own part is
// divided as the homes are.
//
// A fault on one rank (an exception; sizes, options or formats that differ from rank 0's) ends the call on
// all of them with one RankError that names it, and every cache is as it was: rounds.hpp. The ranks may go
// on after it. A scorer of one's own has its options compared if it names them: for_each_setting().
#pragma once

#include <quoka/base/hash.hpp>
#include <quoka/distributed/global_top_k.hpp>
#include <quoka/distributed/sharded_attention.hpp>
#include <quoka/prefill/layer.hpp>
#include <quoka/runtime/isa.hpp>
#include <quoka/select/dense.hpp>
#include <quoka/select/scored_selector.hpp>

#include <concepts>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>

namespace quoka {
inline namespace QUOKA_ABI {

// The selectors that ShardedPrefill takes: DenseSelector, and those whose scorer has shard_keys().
template <class S>
concept ShardableSelector = std::same_as<S, DenseSelector> ||
    (Selector<S>&& requires(const S& selector) {
      { selector.scorer().shard_keys() } -> std::convertible_to<Index>;
      selector.options().budget;
    });

namespace detail {
// Throws std::invalid_argument for what attention over shards cannot do.
inline void check_options_of_shards(const AttentionOptions& attention) {
  if (attention.sliding_window != 0)
    fail("sliding_window", attention.sliding_window, "but over shards must be", "", 0);
  if (!attention.alibi_slopes.empty())
    fail("the number of alibi_slopes", std::ssize(attention.alibi_slopes),
         "but over shards must be", "", 0);
  if (!attention.causal) fail_because("over shards causal = false is not supported");
}
}  // namespace detail

template <ShardableSelector S, Storage T = float>
class ShardedPrefill {
 public:
  // The communicator is borrowed. Not collective. Throws std::invalid_argument where ChunkedPrefill
  // does; for a method that cannot be sharded with these options, a layout whose blocks do not suit it, a
  // sliding window, a mask, ALiBi, a query_position, and attention that is not causal.
  ShardedPrefill(const LayerShape& shape, const typename S::Options& options,
                 CommunicatorRef communicator, const ShardLayout& layout = {},
                 const AttentionOptions& attention = {})
      : layer_(shape, format_of<T>(), attention),
        selector_(checked_options(options)),
        rounds_(communicator),
        map_(layout, shard_keys(), communicator.rank(), communicator.ranks()) {
    list_settings(shape);
    detail::check_options_of_shards(attention);
  }
  ShardedPrefill(const ShardedPrefill&) = delete;  // what it borrows of itself does not move
  ShardedPrefill& operator=(const ShardedPrefill&) = delete;

  // One chunk, or one decode step; collective. Shapes as in ChunkedPrefill::forward. Throws RankError,
  // on all ranks, where one of them fails or is called with other sizes; its cache is as it was.
  void forward(const Rows& q, const Rows& k, const Rows& v, const AttentionOutput& out,
               ExecutorRef executor = SerialExecutor{}) {
    detail::Rewind rewind(*this, kv_len_);
    rounds_.call([&] {
      layer_.check_forward(q, k, v, out);
      begin("forward", q.len());
      layer_.cache().grow(map_.local_len(kv_len_ + q.len()));
      choose(q, k, executor);
      attention_.run(q, layer_.past(own_), {k, v}, out, layer_.options(), rounds_, executor);
      append_own(q, k, v, executor);
    });
    rewind.dismiss();
  }

  // A whole prompt, chunk by chunk; collective. After a throw the caches are as before the prompt.
  void prefill(const Rows& q, const Rows& k, const Rows& v, OutputRows out, Index chunk_len,
               ExecutorRef executor = SerialExecutor{}) {
    detail::Rewind rewind(*this, kv_len_);
    rounds_.call([&] {
      detail::require_at_least("chunk_len", chunk_len, 1);
      layer_.check_prompt(q, k, v, out);
      begin("prefill", q.len());
      rounds_.agree("chunks", {{"chunk_len", chunk_len}});
      layer_.cache().grow(map_.local_len(kv_len_ + q.len()));
    });
    for (Index first = 0; first < q.len(); first += chunk_len) {
      const Index n = std::min(chunk_len, q.len() - first);
      forward(q.slice(first, n), k.slice(first, n), v.slice(first, n), out.slice(first, n),
              executor);
    }
    rewind.dismiss();
  }

  // A saved prefix: takes over this rank's part of keys and values, without attention; collective. Shapes
  // as in ChunkedPrefill::append; throws as forward().
  void append(const Rows& k, const Rows& v, ExecutorRef executor = SerialExecutor{}) {
    detail::Rewind rewind(*this, kv_len_);
    rounds_.call([&] {
      cache().check(k, v);
      begin("append", k.len());
      append_own({}, k, v, executor);
    });
    rewind.dismiss();
  }

  // Back to the first `len` tokens. Not collective: every rank does so before the next call. Throws
  // std::invalid_argument beyond the present length.
  void truncate(Index len) {
    detail::require_at_least("truncate's len", len, 0);
    detail::require_at_most("truncate's len", len, "the layer's len", kv_len_);
    kv_len_ = len;
    layer_.truncate(map_.local_len(len));
    state_.truncate(map_.local_len(len));
    global_.forget();
  }
  // Room for `len` tokens on all ranks together. Not collective.
  void reserve(Index len) { layer_.cache().reserve(map_.local_len(len)); }

  Index kv_len() const { return kv_len_; }                 // of all ranks
  const KvCache& cache() const { return layer_.cache(); }  // this rank's
  const ShardMap& shard() const { return map_; }           // which tokens are this rank's
  // Memory of this rank beyond its cache that the method keeps per key.
  Index kept_bytes() const {
    return kept_bytes_of(state_);
  }
  // What the last forward() attended to of its past, by positions; the same on all ranks.
  const Selection& selection() const { return selection_; }
  // Thereof this rank's, by places in its cache.
  const Selection& own_selection() const { return own_; }
  // Keys of each KV head that every rank proposed for it; selection() has as many forced ones besides.
  Index proposed() const { return global_.proposed(); }

 private:
  static constexpr bool is_dense = std::same_as<S, DenseSelector>;
  struct Nothing {
    static void truncate(Index) {}
  };
  static auto state_of() {
    if constexpr (is_dense)
      return Nothing{};
    else
      return decltype(S::State::scorer){};
  }

  // This rank's keys among all.
  class Shard final : public KeyShard {
   public:
    Shard(const ShardMap& map, Index kv_len, detail::Rounds& rounds)
        : map_(map), kv_len_(kv_len), rounds_(rounds) {}
    Index kv_len() const override { return kv_len_; }
    Index position(Index i) const override { return map_.position(i); }
    void maximum(std::span<float> x) const override {
      rounds_.agree("rows' maxima", {{"their number", std::ssize(x)}});
      rounds_.exchange([&](const CommunicatorRef& c) { c.allreduce_max(x); });
    }
    void sum(std::span<std::int64_t> x) const override {
      rounds_.agree("rows' sums", {{"their number", std::ssize(x)}});
      rounds_.exchange([&](const CommunicatorRef& c) { c.allreduce_sum(x); });
    }

   private:
    const ShardMap& map_;
    Index kv_len_;
    detail::Rounds& rounds_;
  };

  static const typename S::Options& checked_options(const typename S::Options& options) {
    return options;
  }
  Index shard_keys() const {
    if constexpr (is_dense) {
      return 1;
    } else {
      const Index keys = selector_.scorer().shard_keys();
      if (keys == 0)
        detail::fail_because(
            "options: with these the method needs all keys in one place, its shard_keys() is 0");
      return keys;
    }
  }

  void begin(const char* what, Index q_len) {
    detail::require_at_most("q_len", q_len, "max_keys without the layer's len", max_keys - kv_len_);
    Index budget = 0;
    if constexpr (!is_dense) budget = selector_.options().budget.count(kv_len_ + q_len);
    rounds_.agree(what,
                  {{"q_len", q_len},
                   {"kv_len", kv_len_},
                   {"batch", shape().batch},
                   {"q_heads", shape().q_heads},
                   {"kv_heads", shape().kv_heads},
                   {"head_dim", shape().head_dim},
                   {"v_dim", shape().v_dim},
                   {"the layout's block", map_.is_contiguous() ? -map_.block() : map_.block()},
                   {"the budget", budget},
                   {"the hash of quoka::isa()", detail::hash_of(isa())}},
                  &settings_);
  }

  // What decides a Selection or an output and is not among the sizes. The budget is compared by its keys.
  void list_settings(const LayerShape& given) {
    const auto add = [this](const char* name, const auto& value) {
      if constexpr (std::is_convertible_v<decltype(value), std::span<const float>>)
        settings_.add({name, detail::hash_of(std::as_bytes(std::span(value)))});
      else
        settings_.add({name, value});
    };
    detail::for_each_setting(layer_.options(), add);
    add("the hash of k_format", detail::hash_of(shape().k_format->name));
    add("the hash of v_format", detail::hash_of(shape().v_format->name));
    add("the hash of k_scales", given.k_scales);
    add("the hash of v_scales", given.v_scales);
    if constexpr (!is_dense) {
      const TopKOptions top_k = selector_.top_k();
      add("top_k.window", top_k.window);
      add("top_k.keep_first", top_k.keep_first);
      add("top_k.keep_last", top_k.keep_last);
      if constexpr (requires {
                      selector_.scorer().for_each_setting([](const char*, const auto&) {});
                    })
        selector_.scorer().for_each_setting(add);
    }
  }

  SelectorInput input(const Rows& q, const Rows& chunk_k, const Shard& shard) const {
    SelectorInput shard_input = layer_.input(q, chunk_k);
    shard_input.shard = &shard;
    return shard_input;
  }

  // Writes selection_ and own_.
  void choose(const Rows& q, const Rows& chunk_k, ExecutorRef executor) {
    const Index batch = shape().batch, heads = shape().kv_heads, local = cache().len();
    if constexpr (!is_dense) {
      const Index budget = selector_.options().budget.count(kv_len_);
      const Shard shard(map_, kv_len_, rounds_);
      // The same on all ranks: it depends on sizes alone. Nothing is what a budget of 0 keeps, whatever it costs.
      const auto pays = [&] {
        if constexpr (requires { selector_.scorer().pays(SelectorInput(), state_); })
          return selector_.scorer().pays(input(q, chunk_k, shard), state_);
        return true;
      };
      if (budget < kv_len_ && (budget == 0 || pays())) {
        global_.begin(map_, kv_len_, budget, batch, heads, selector_.top_k(), executor.workers());
        const Index forced = budget - global_.wanted();
        const auto select = [&] {
          if (global_.wanted() > 0)
            propose(input(q, chunk_k, shard), global_.proposed() + forced, executor);
          return global_.select(selection_, own_, rounds_, executor);
        };
        if (select()) return;
        global_.propose_all();
        select();
        return;
      }
    }
    selection_.select_all(batch, heads, kv_len_);
    own_.select_all(batch, heads, local);
  }

  // The best `keys` of this rank.
  void propose(const SelectorInput& in, Index keys, ExecutorRef executor) {
    const auto& scorer = selector_.scorer();
    const Index heads = in.k.batch() * in.k.heads(), len = in.k.len(), most = std::min(keys, len);
    if constexpr (detail::ScorerScoresSelected<std::remove_cvref_t<decltype(scorer)>>) {
      if (selector_.top_k().window == 1 && most < len &&
          scorer.select(in, most, state_, proposed_, executor)) {
        // It forces keys at the ends of the shard: those that count are still among the others.
        float* const scores = scores_.reserve_amortised(heads * most);
        scorer.score_selected(in, state_, proposed_, most, scores, executor);
        return global_.propose(proposed_, scores, most, executor);
      }
    }
    float* const scores = scores_.reserve_amortised(heads * std::max(len, in.capacity));
    scorer.score(in, state_, TensorView<float, 3>(scores, {in.k.batch(), in.k.heads(), len}),
                 executor);
    global_.propose(scores, rounds_, executor);
  }

  void append_own(const Rows& q, const Rows& k, const Rows& v, ExecutorRef executor) {
    const Index first = kv_len_;
    map_.for_own(first, first + k.len(), [&](Index begin, Index n) {
      layer_.cache().append_checked(k.slice(begin - first, n), v.slice(begin - first, n));
    });
    kv_len_ += k.len();
    if constexpr (!is_dense) {
      const Shard shard(map_, kv_len_, rounds_);
      if constexpr (detail::ScorerAppends<std::remove_cvref_t<decltype(selector_.scorer())>>)
        selector_.scorer().appended(input(q, {}, shard), state_, executor);
    }
  }

  const LayerShape& shape() const { return layer_.shape(); }

  detail::Layer layer_;
  S selector_;
  detail::Rounds rounds_;
  detail::Settings settings_;
  ShardMap map_;
  Index kv_len_ = 0;
  decltype(state_of()) state_;
  detail::GlobalTopK global_;
  detail::ShardedAttention attention_;
  Selection selection_, own_, proposed_;
  Buffer<float> scores_;  // [batch, kv_heads, local keys]
};

}  // namespace QUOKA_ABI
}  // namespace quoka
