// Definitions of sharded_attention.hpp.
#pragma once

#include <quoka/distributed/sharded_attention.hpp>
#include <quoka/kernels/merge_row.hpp>
#include <quoka/packing/format_table.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

QUOKA_FUNC OutputRows ShardedAttention::Layout::out(float* x, Index heads) const {
  constexpr Index bytes = sizeof(float);
  return {reinterpret_cast<std::byte*>(x),
          float_format(),
          {batch, heads, q_len, v_dim},
          {q_len * v_dim * bytes, head() * bytes, v_dim * bytes}};
}
QUOKA_FUNC TensorView<float, 3> ShardedAttention::Layout::lse(float* x, Index heads) const {
  return {x + rows() * v_dim, {batch, heads, q_len}, {q_len, head(), 1}};
}

// The past of some KV heads, whose lists are copied to `keep`.
inline Past past_of_heads(const Past& past, Index first, Index count, Selection& keep) {
  Past some = past;
  some.k = past.k.some_heads(first, count), some.v = past.v.some_heads(first, count);
  some.keep = nullptr;
  if (past.keep == nullptr || past.keep->is_all()) return some;
  SelectionWriter writer(keep, past.keep->batch(), count, past.keep->kv_len(),
                         past.keep->max_count());
  for (Index b = 0; b < past.keep->batch(); ++b)
    for (Index head = 0; head < count; ++head) {
      const std::span<const Position> from = past.keep->row(b, first + head);
      std::copy(from.begin(), from.end(), writer.row(b, head).begin());
      writer.set_count(b, head, std::ssize(from));
    }
  writer.commit();
  some.keep = &keep;
  return some;
}

// For some query heads: sinks belong to one part, the chunk's. There is no mask whose factors would count.
inline AttentionOptions options_of_heads(const AttentionOptions& options, bool with_sinks,
                                         Index q_head, Index q_heads) {
  AttentionOptions some = options;
  some.mask_factors = {};
  if (!with_sinks)
    some.sink_logits = {};
  else if (!options.sink_logits.empty())
    some.sink_logits = options.sink_logits.subspan(static_cast<std::size_t>(q_head),
                                                   static_cast<std::size_t>(q_heads));
  return some;
}

QUOKA_FUNC void ShardedAttention::attend_whole_heads(const Rows& q, const Past& past,
                                                     const Chunk& chunk,
                                                     const AttentionOptions& options,
                                                     const Homes::Home& home,
                                                     ExecutorRef executor) {
  const Index kv_heads = chunk.k.heads(), group = q.heads() / kv_heads;
  const Layout whole{q.batch(), q.len(), chunk.v.dim()};
  const auto sequence = [&](int range, Index first, Index count) {
    float* const to = parts_.data() + first * group * whole.head();
    const Index q_count = count * group;
    AttentionSequence range_sequence{
        .q = q.some_heads(first * group, q_count),
        .past = past_of_heads(past, first, count, keep_[range]),
        .out = {whole.out(to, q_count), whole.lse(to, q_count)},
        .query_position = past.k.len()};  // all of it lies before the queries
    if (range == 1)
      range_sequence.chunk = {chunk.k.some_heads(first, count), chunk.v.some_heads(first, count)};
    return range_sequence;
  };
  const Index behind = home.kv_head + home.heads;
  const AttentionSequence ranges[] = {sequence(0, 0, home.kv_head),
                                      sequence(1, home.kv_head, home.heads),
                                      sequence(2, behind, kv_heads - behind)};
  // Those without heads are the first, the last, or the last two.
  const std::size_t begin = home.kv_head == 0 ? 1 : 0;
  const std::size_t end = home.heads == 0 ? 1 : behind == kv_heads ? 2 : 3;
  if (options.sink_logits.empty())
    return attention(std::span(ranges).subspan(begin, end - begin),
                     options_of_heads(options, false, 0, 0), executor, workspace_);
  for (std::size_t i = begin; i < end; ++i)
    attention(std::span(&ranges[i], 1),
              options_of_heads(options, i == 1, home.kv_head * group, home.heads * group), executor,
              workspace_);
}

QUOKA_FUNC void ShardedAttention::attend_past_and_chunk(const Rows& q, const Past& past,
                                                        const Chunk& chunk,
                                                        const AttentionOptions& options,
                                                        const Homes::Home& home,
                                                        ExecutorRef executor) {
  const Index group = q.heads() / chunk.k.heads();
  const Layout whole{q.batch(), q.len(), chunk.v.dim()};
  AttentionOptions past_options = options_of_heads(options, false, 0, 0);
  past_options.query_position = past.k.len();  // all of it lies before the queries
  attention(q, past, {}, {whole.out(parts_.data(), q.heads()), whole.lse(parts_.data(), q.heads())},
            past_options, executor, workspace_);
  if (home.heads * home.rows == 0) return;
  const Index q_begin = home.kv_head * group, q_count = home.heads * group;
  const Layout layout{whole.batch, home.rows, whole.v_dim};
  const Rows k = chunk.k.some_heads(home.kv_head, home.heads),
             v = chunk.v.some_heads(home.kv_head, home.heads);
  attention(q.some_heads(q_begin, q_count).slice(home.row, home.rows),
            {k.slice(0, home.row), v.slice(0, home.row)},
            {k.slice(home.row, home.rows), v.slice(home.row, home.rows)},
            {layout.out(chunk_parts_.data(), q_count), layout.lse(chunk_parts_.data(), q_count)},
            options_of_heads(options, true, q_begin, q_count), executor, workspace_);
}

QUOKA_FUNC void ShardedAttention::run(const Rows& q, const Past& past, const Chunk& chunk,
                                      const AttentionOutput& output,
                                      const AttentionOptions& options, Rounds& rounds,
                                      ExecutorRef executor) {
  if (rounds.ranks() == 1) {
    AttentionOptions all = options;
    return attention(q, past, chunk, output, all, executor, workspace_);
  }
  const Index ranks = rounds.ranks(), me = rounds.rank();
  const Index kv_heads = chunk.k.heads(), group = q.heads() / kv_heads;
  const Homes homes(kv_heads, q.len(), ranks);
  const Layout whole{q.batch(), q.len(), chunk.v.dim()};
  const auto layout_of = [&](const Homes::Home& home) {
    return Layout{whole.batch, home.rows, whole.v_dim};
  };
  const auto floats_of = [&](const Homes::Home& home) {
    return home.heads * group * layout_of(home).head();
  };
  const Index block =
      homes.heads_each() * group * Layout{whole.batch, homes.rows_each(), whole.v_dim}.head();
  float* const parts = parts_.reserve(q.heads() * whole.head());
  float* const packed = packed_.reserve(homes.whole_heads() ? 0 : block);
  float* const received = received_.reserve(ranks * block);
  float* const chunk_parts = chunk_parts_.reserve(homes.whole_heads() ? 0 : block);
  float* const results = results_.reserve(ranks * block);

  const Homes::Home home = homes.of(me);
  if (homes.whole_heads())
    attend_whole_heads(q, past, chunk, options, home, executor);
  else
    attend_past_and_chunk(q, past, chunk, options, home, executor);

  // The part of `parts` that belongs to a home, as one message.
  const auto part_of = [&](const Homes::Home& to) {
    float* const home_parts = parts + to.kv_head * group * whole.head();
    if (homes.whole_heads()) return home_parts;
    float* at = packed;
    const auto copy_rows = [&](const float* from, Index width) {
      for (Index b = 0; b < whole.batch; ++b)
        at = std::copy_n(from + (b * whole.q_len + to.row) * width, to.rows * width, at);
    };
    for (Index head = 0; head < to.heads * group; ++head) {
      const float* const head_part = home_parts + head * whole.head();
      copy_rows(head_part, whole.v_dim);
      copy_rows(head_part + whole.rows() * whole.v_dim, 1);  // their log-sum-exp
    }
    return packed;
  };
  rounds.agree("partial results");
  rounds.exchange([&](const CommunicatorRef& c) {
    for (Index step = 1; step < ranks; ++step) {
      const Index to = (me + step) % ranks, from = (me + ranks - step) % ranks;
      const Homes::Home there = homes.of(to);
      c.sendrecv(
          std::as_bytes(std::span(part_of(there), static_cast<std::size_t>(floats_of(there)))),
          static_cast<int>(to),
          std::as_writable_bytes(
              std::span(received + from * block, static_cast<std::size_t>(floats_of(home)))),
          static_cast<int>(from));
    }
  });

  // Query head h of those at a home, as it lies in a message, to the output.
  const OutputRows& out = output.out;
  const auto deliver = [&](const Homes::Home& from, Index h, const float* head_part) {
    const Layout there = layout_of(from);
    const Index head = from.kv_head * group + h;
    for (Index row = 0; row < there.rows(); ++row) {
      const Index b = row / from.rows, i = from.row + row % from.rows;
      out.format().narrow(head_part + row * there.v_dim, out.shape(head), out.row(b, head, i));
      if (!output.lse_nat.absent())
        output.lse_nat.at(b, head, i) = head_part[there.rows() * there.v_dim + row];
    }
  };
  const float* const own = part_of(home);
  float* const merged = results + me * block;
  const Layout layout = layout_of(home);
  run_rows(
      executor, home.heads * group * layout.rows(), few_copies, home.heads * group,
      [&](Index head, int) {
        const Index at = head * layout.head(), lse = at + layout.rows() * layout.v_dim;
        const auto part_at = [&](Index rank) { return rank == me ? own : received + rank * block; };
        for (Index row = 0; row < layout.rows(); ++row) {
          const Index x = at + row * layout.v_dim, l = lse + row;
          std::copy_n(part_at(0) + x, layout.v_dim, merged + x);
          merged[l] = part_at(0)[l];
          for (Index rank = 1; rank < ranks; ++rank)
            merge_row(merged + x, merged[l], part_at(rank) + x, part_at(rank)[l], layout.v_dim);
          if (!homes.whole_heads())
            merge_row(merged + x, merged[l], chunk_parts + x, chunk_parts[l], layout.v_dim);
        }
        deliver(home, head, merged + at);
      });
  rounds.agree("merged results");
  rounds.exchange([&](const CommunicatorRef& c) {
    const auto sent = static_cast<std::size_t>(block);
    c.allgather(std::as_bytes(std::span(merged, sent)),
                std::as_writable_bytes(std::span(results, sent * static_cast<std::size_t>(ranks))));
  });

  const Index heads_each = homes.heads_each() * group;
  run_rows(executor, q.heads() * whole.rows(), few_copies, ranks * heads_each,
           [&](Index task, int) {
             const Index rank = task / heads_each, h = task % heads_each;
             const Homes::Home from = homes.of(rank);
             if (rank != me && h < from.heads * group)
               deliver(from, h, results + rank * block + h * layout_of(from).head());
           });
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
