// Definitions of global_top_k.hpp.
#pragma once

#include <quoka/distributed/global_top_k.hpp>
#include <quoka/select/steps/top_k_impl.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

inline Candidate candidate_of(float score, Index position) {
  return Candidate{rank_of(ordered_score(score))} << 32 |
         (0xffffffffu - static_cast<std::uint32_t>(position));
}
inline Index position_of(Candidate candidate) {
  return static_cast<Index>(0xffffffffu - static_cast<std::uint32_t>(candidate));
}

QUOKA_FUNC void GlobalTopK::Scratch::reserve(Index local_len, Index wanted, Index ranks,
                                             Index window) {
  top_k.reserve(local_len + window, window);
  best.reserve_amortised(std::max(wanted * ranks, local_len));
  listed.reserve_amortised(local_len);
  next.reserve(2 * ranks);
  kept.reserve_amortised(std::min(local_len, wanted));
  if (window > 1) run.reserve_amortised(local_len + window);
}

QUOKA_FUNC void GlobalTopK::begin(const ShardMap& map, Index kv_len, Index budget, Index batch,
                                  Index kv_heads, const TopKOptions& options, int workers) {
  map_ = map, options_ = options;
  kv_len_ = kv_len, local_len_ = map.local_len(kv_len);
  batch_ = batch, kv_heads_ = kv_heads, heads_ = batch * kv_heads;
  first_ = std::min(options.keep_first, budget);
  last_ = std::min(options.keep_last, budget - first_);
  wanted_ = budget - first_ - last_;
  local_first_ = map.local_len(first_);
  local_end_ = map.local_len(kv_len - last_);
  runs_ = map.max_runs(kv_len);
  ranks_ = map.ranks();
  if (wanted_ == 0) return;
  if (options.window > 1)
    require_at_most("window, of keys in shards,", options.window, "the tokens of a block",
                    map.block());
  const Index likely = std::max(ceil_div(wanted_, ranks_), most_taken_ + most_taken_ / 8 + 16);
  each_ = most_taken_ > 0 ? std::min(wanted_, likely) : wanted_;
  reserve_candidates();
  scratch_.reserve(workers, local_len_, wanted_, ranks_, options.window);
}

QUOKA_FUNC void GlobalTopK::reserve_candidates() {
  mine_.reserve_amortised(heads_ * each_);
  all_.reserve_amortised(ranks_ * heads_ * each_);
  most_of_head_.reserve(heads_);
}
QUOKA_FUNC void GlobalTopK::propose_all() {
  each_ = wanted_;
  reserve_candidates();
}

QUOKA_FUNC Index GlobalTopK::bytes() const {
  const Index candidates = heads_ * each_ * Index{sizeof(Candidate)};
  return wanted_ == 0 ? 0 : candidates + heads_ * runs_ * halo() * Index{sizeof(float)};
}

// Scores as top-k looks at them: with a window, neighbours' maxima across the ends of runs.
QUOKA_FUNC const float* GlobalTopK::pooled(const float* scores, Rounds& rounds,
                                           ExecutorRef executor) {
  if (options_.window == 1) return scores;
  const Index left = (options_.window - 1) / 2, right = options_.window / 2, run = map_.run();
  const Index all = heads_ * runs_ * halo();
  float* const ends = ends_.reserve(all);
  float* const all_ends = all_ends_.reserve(all * ranks_);
  float* const pooled = pooled_.reserve_amortised(heads_ * local_len_);
  std::fill_n(ends, all, -simd::infinity);
  for (Index head = 0; head < heads_; ++head) {
    const float* const head_scores = scores + head * local_len_;
    for (Index i = 0; i * run < local_len_; ++i) {
      float* const at = ends + (head * runs_ + i) * halo();
      const Index begin = i * run, n = std::min(run, local_len_ - begin);
      std::copy_n(head_scores + begin, std::min(right, n), at);
      // A run that is not full has nothing behind it.
      if (left <= n) std::copy_n(head_scores + begin + n - left, left, at + right);
    }
  }
  rounds.agree("scores at the ends of runs", {{"their number", all}});
  rounds.exchange([&](const CommunicatorRef& c) {
    c.allgather(
        std::as_bytes(std::span(ends, static_cast<std::size_t>(all))),
        std::as_writable_bytes(std::span(all_ends, static_cast<std::size_t>(all * ranks_))));
  });
  executor.run(heads_, [&](Index head, int worker) {
    Scratch& s = scratch_[worker];
    float* const x = s.run.data();
    for (Index i = 0; i * run < local_len_; ++i) {
      const Index begin = i * run, n = std::min(run, local_len_ - begin);
      const ShardMap::Neighbour before = map_.before(i), after = map_.after(i);
      const Index from_left = before.rank >= 0 ? left : 0,
                  from_right = after.rank >= 0 && after.run < runs_ ? right : 0;
      if (from_left > 0)
        std::copy_n(all_ends + ends_at(before.rank, head, before.run) + right, left, x);
      std::copy_n(scores + head * local_len_ + begin, n, x + from_left);
      if (from_right > 0)
        std::copy_n(all_ends + ends_at(after.rank, head, after.run), right, x + from_left + n);
      const float* const most =
          pool_window(x, from_left + n + from_right, options_.window, s.top_k.pooled.data());
      std::copy_n(most + from_left, n, pooled + head * local_len_ + begin);
    }
  });
  return pooled;
}

// The largest of n, as many as are proposed, in their order; returns how many.
QUOKA_FUNC Index GlobalTopK::keep_best(Candidate* candidates, Index n, Candidate* copy) const {
  if (n <= each_) return n;
  std::copy_n(candidates, n, copy);
  std::nth_element(copy, copy + each_ - 1, copy + n,
                   [](Candidate a, Candidate b) { return a > b; });
  const Candidate least = copy[each_ - 1];
  (void)std::remove_if(candidates, candidates + n, [least](Candidate x) { return x < least; });
  return each_;
}

QUOKA_FUNC void GlobalTopK::propose(const float* scores, Rounds& rounds, ExecutorRef executor) {
  const float* const by = pooled(scores, rounds, executor);
  executor.run(heads_, [&](Index head, int worker) {
    Scratch& s = scratch_[worker];
    const float* const from = by + head * local_len_ + local_first_;
    const Index n = local_end_ - local_first_, count = std::min(each_, n);
    Candidate* to = mine_.data() + head * each_;
    std::fill_n(to, each_, Candidate{0});
    if (count <= 0) return;
    const std::span<Position> kept(s.kept.data(), static_cast<std::size_t>(count));
    top_k_head(from, n, {}, kept, s.top_k);
    for (const Position i : kept) *to++ = candidate_of(from[i], map_.position(local_first_ + i));
  });
}

QUOKA_FUNC void GlobalTopK::propose(const Selection& best, const float* scores, Index stride,
                                    ExecutorRef executor) {
  executor.run(heads_, [&](Index head, int worker) {
    Scratch& s = scratch_[worker];
    const std::span<const Position> kept = best.row(head / kv_heads_, head % kv_heads_);
    Candidate* const to = mine_.data() + head * each_;
    Candidate* const free = s.listed.data();
    Index n = 0;
    for (std::size_t i = 0; i < kept.size(); ++i)
      if (kept[i] >= local_first_ && kept[i] < local_end_)
        free[n++] =
            candidate_of(scores[head * stride + static_cast<Index>(i)], map_.position(kept[i]));
    n = keep_best(free, n, s.best.data());
    std::fill(std::copy_n(free, n, to), to + each_, Candidate{0});
  });
}

QUOKA_FUNC bool GlobalTopK::select(Selection& selection, Selection& own, Rounds& rounds,
                                   ExecutorRef executor) {
  const Index budget = first_ + wanted_ + last_, each = heads_ * each_;
  SelectionWriter writer(selection, batch_, kv_heads_, kv_len_, budget);
  SelectionWriter own_writer(own, batch_, kv_heads_, local_len_, std::min(budget, local_len_));
  if (wanted_ > 0) {
    rounds.agree("candidates", {{"their number", each}});
    rounds.exchange([&](const CommunicatorRef& c) {
      c.allgather(
          std::as_bytes(std::span(mine_.data(), static_cast<std::size_t>(each))),
          std::as_writable_bytes(std::span(all_.data(), static_cast<std::size_t>(each * ranks_))));
    });
  }
  executor.run(heads_, [&](Index head, int worker) {
    const Index b = head / kv_heads_, kv_head = head % kv_heads_;
    const std::span<Position> row = writer.row(b, kv_head);
    Position* to = row.data();
    for (Index i = 0; i < first_; ++i) *to++ = static_cast<Position>(i);
    if (wanted_ > 0) to = merge_candidates(head, scratch_[worker], to);
    if (to == nullptr) return;  // too few
    for (Index i = kv_len_ - last_; i < kv_len_; ++i) *to++ = static_cast<Position>(i);
    Position* const places = own_writer.row(b, kv_head).data();
    Index count = 0;
    ShardMap::Block block{};
    for (const Position position : row) {
      if (position >= block.end) block = map_.block_at(position);
      if (block.is_own) places[count++] = static_cast<Position>(position - block.shift);
    }
    own_writer.set_count(b, kv_head, count);
  });
  if (wanted_ > 0) {
    most_taken_ = *std::max_element(most_of_head_.data(), most_of_head_.data() + heads_);
    if (most_taken_ == each_ && each_ < wanted_) return false;
  }
  writer.commit();
  own_writer.commit();
  return true;
}

// The `wanted` best of all ranks' candidates, as ascending positions; null where there are not so many.
QUOKA_FUNC Position* GlobalTopK::merge_candidates(Index head, Scratch& s, Position* to) const {
  const auto candidates_of = [&](Index rank) {
    return all_.data() + (rank * heads_ + head) * each_;
  };
  Candidate* const copy = s.best.data();
  for (Index rank = 0; rank < ranks_; ++rank)
    std::copy_n(candidates_of(rank), each_, copy + rank * each_);
  std::nth_element(copy, copy + wanted_ - 1, copy + ranks_ * each_,
                   [](Candidate a, Candidate b) { return a > b; });
  const Candidate least = copy[wanted_ - 1];
  Index& most = most_of_head_.data()[head];
  most = each_;
  if (least == 0) return nullptr;
  // Each rank's ascend in position.
  Index *const at = s.next.data(), *const taken = at + ranks_;
  std::fill_n(at, 2 * ranks_, Index{0});
  for (Index i = 0; i < wanted_; ++i) {
    Index next = -1, next_position = kv_len_;
    for (Index rank = 0; rank < ranks_; ++rank) {
      const Candidate* const list = candidates_of(rank);
      while (at[rank] < each_ && list[at[rank]] < least) ++at[rank];
      if (at[rank] == each_) continue;
      const Index position = position_of(list[at[rank]]);
      if (position < next_position) next = rank, next_position = position;
    }
    ++at[next], ++taken[next];
    *to++ = static_cast<Position>(next_position);
  }
  most = *std::max_element(taken, taken + ranks_);
  return to;
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
