// Definitions of sharded_attention.hpp.
#pragma once

#include <quoka/attention/merge.hpp>
#include <quoka/distributed/sharded_attention.hpp>
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

QUOKA_FUNC void ShardedAttention::run(const Rows& q, const Past& past, const Chunk& chunk,
                                      const AttentionOutput& output,
                                      const AttentionOptions& options, Rounds& rounds,
                                      ExecutorRef executor) {
  if (rounds.ranks() == 1) return attention(q, past, chunk, output, options, executor, workspace_);
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
  float* const of_chunk = of_chunk_.reserve(block);
  float* const results = results_.reserve(ranks * block);

  AttentionOptions of_past = options;
  of_past.sink_logits = {};  // they belong to one part: the chunk's
  attention(q, past, {}, {whole.out(parts, q.heads()), whole.lse(parts, q.heads())}, of_past,
            executor, workspace_);
  const Homes::Home home = homes.of(me);
  const Layout layout = layout_of(home);
  const Index q_begin = home.kv_head * group, q_count = home.heads * group;
  if (floats_of(home) > 0) {
    AttentionOptions of_home = options;
    if (!options.sink_logits.empty())
      of_home.sink_logits = options.sink_logits.subspan(static_cast<std::size_t>(q_begin),
                                                        static_cast<std::size_t>(q_count));
    const Rows k = chunk.k.some_heads(home.kv_head, home.heads),
               v = chunk.v.some_heads(home.kv_head, home.heads);
    attention(q.some_heads(q_begin, q_count).slice(home.row, home.rows),
              {k.slice(0, home.row), v.slice(0, home.row)},
              {k.slice(home.row, home.rows), v.slice(home.row, home.rows)},
              {layout.out(of_chunk, q_count), layout.lse(of_chunk, q_count)}, of_home, executor,
              workspace_);
  }

  // The part of `parts` that belongs to a home, as one message.
  const auto part_of = [&](const Homes::Home& to) {
    float* const of_heads = parts + to.kv_head * group * whole.head();
    if (homes.whole_heads()) return of_heads;
    float* at = packed;
    const auto copy_rows = [&](const float* from, Index width) {
      for (Index b = 0; b < whole.batch; ++b)
        at = std::copy_n(from + (b * whole.q_len + to.row) * width, to.rows * width, at);
    };
    for (Index head = 0; head < to.heads * group; ++head) {
      const float* const of_head = of_heads + head * whole.head();
      copy_rows(of_head, whole.v_dim);
      copy_rows(of_head + whole.rows() * whole.v_dim, 1);  // their log-sum-exp
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

  float* const own = part_of(home);
  const auto of_rank = [&](Index rank) { return rank == me ? own : received + rank * block; };
  float* const merged = received + me * block;  // nothing is received from oneself
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
    const auto sent = static_cast<std::size_t>(block);
    c.allgather(std::as_bytes(std::span(merged, sent)),
                std::as_writable_bytes(std::span(results, sent * static_cast<std::size_t>(ranks))));
  });

  const OutputRows& out = output.out;
  for (Index rank = 0; rank < ranks; ++rank) {
    const Homes::Home from = homes.of(rank);
    const Layout there = layout_of(from);
    for (Index h = 0; h < from.heads * group; ++h) {
      const Index head = from.kv_head * group + h;
      const float* const of_head = results + rank * block + h * there.head();
      for (Index row = 0; row < there.rows(); ++row) {
        const Index b = row / from.rows, i = from.row + row % from.rows;
        out.format().narrow(of_head + row * there.v_dim, out.shape(head), out.row(b, head, i));
        if (!output.lse_nat.absent())
          output.lse_nat.at(b, head, i) = of_head[there.rows() * there.v_dim + row];
      }
    }
  }
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
