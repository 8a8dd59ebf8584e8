// Definitions of sharded_attention.hpp.
#pragma once

#include <quoka/attention/merge.hpp>
#include <quoka/distributed/sharded_attention.hpp>
#include <quoka/formats/format_table.hpp>

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

QUOKA_FUNC void ShardedAttention::run(const Rows& q, const Past& past, const Chunk& chunk,
                                      const AttentionOutput& output,
                                      const AttentionOptions& options, Rounds& rounds,
                                      ExecutorRef executor) {
  if (rounds.ranks() == 1) return attention(q, past, chunk, output, options, executor, workspace_);
  const Index ranks = rounds.ranks(), me = rounds.rank();
  const Index kv_heads = chunk.k.heads(), group = q.heads() / kv_heads;
  const Layout layout{q.batch(), q.len(), chunk.v.dim()};
  const Index each = ceil_div(kv_heads, ranks), home = each * group;  // the most heads at a home
  const auto begin_of = [&](Index rank) { return std::min(rank * each, kv_heads); };
  const auto heads_of = [&](Index rank) { return begin_of(rank + 1) - begin_of(rank); };
  const auto floats_of = [&](Index rank) {
    return static_cast<std::size_t>(heads_of(rank) * group * layout.head());
  };
  float* const parts = parts_.reserve(q.heads() * layout.head());
  float* const received = received_.reserve(ranks * home * layout.head());
  float* const of_chunk = of_chunk_.reserve(home * layout.head());
  float* const results = results_.reserve(ranks * home * layout.head());

  AttentionOptions of_past = options;
  of_past.sink_logits = {};  // they belong to one part: the chunk's
  attention(q, past, {}, {layout.out(parts, q.heads()), layout.lse(parts, q.heads())}, of_past,
            executor, workspace_);
  const Index heads = heads_of(me), q_begin = begin_of(me) * group, q_count = heads * group;
  if (heads > 0) {
    AttentionOptions of_home = options;
    if (!options.sink_logits.empty())
      of_home.sink_logits = options.sink_logits.subspan(static_cast<std::size_t>(q_begin),
                                                        static_cast<std::size_t>(q_count));
    attention(q.some_heads(q_begin, q_count), {},
              {chunk.k.some_heads(begin_of(me), heads), chunk.v.some_heads(begin_of(me), heads)},
              {layout.out(of_chunk, q_count), layout.lse(of_chunk, q_count)}, of_home, executor,
              workspace_);
  }

  rounds.agree("partial results");
  rounds.exchange([&](const CommunicatorRef& c) {
    for (Index step = 1; step < ranks; ++step) {
      const Index to = (me + step) % ranks, from = (me + ranks - step) % ranks;
      c.sendrecv(
          std::as_bytes(std::span(parts + begin_of(to) * group * layout.head(), floats_of(to))),
          static_cast<int>(to),
          std::as_writable_bytes(std::span(received + from * home * layout.head(), floats_of(me))),
          static_cast<int>(from));
    }
  });

  const auto of_rank = [&](Index rank) {
    return rank == me ? parts + q_begin * layout.head() : received + rank * home * layout.head();
  };
  float* const merged = received + me * home * layout.head();  // nothing is received from oneself
  std::copy_n(of_rank(0), q_count * layout.head(), merged);
  executor.run(q_count, [&](Index head, int) {
    const Index at = head * layout.head();
    for (Index rank = 1; rank <= ranks; ++rank) {
      float* const other = (rank < ranks ? of_rank(rank) : of_chunk) + at;
      merge(layout.out(merged + at, 1), layout.lse(merged + at, 1), layout.out(other, 1),
            layout.lse(other, 1));
    }
  });
  rounds.agree("merged results");
  rounds.exchange([&](const CommunicatorRef& c) {
    const auto block = static_cast<std::size_t>(home * layout.head());
    c.allgather(
        std::as_bytes(std::span(merged, block)),
        std::as_writable_bytes(std::span(results, block * static_cast<std::size_t>(ranks))));
  });

  // Homes follow each other without a gap: only the last ones may have fewer heads.
  const OutputRows& out = output.out;
  for (Index head = 0; head < q.heads(); ++head) {
    const float* const of_head = results + head * layout.head();
    for (Index row = 0; row < layout.rows(); ++row) {
      const Index b = row / layout.q_len, i = row % layout.q_len;
      out.format().narrow(of_head + row * layout.v_dim, out.shape(head), out.row(b, head, i));
      if (!output.lse_nat.absent())
        output.lse_nat.at(b, head, i) = of_head[layout.rows() * layout.v_dim + row];
    }
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
