// What a chunk costs when its keys lie on P ranks, from what its parts cost on one: a model with every
// assumption in sight, which the program holds against what it measures.
//
//   T(P, L) = choose                                     every rank chooses the queries
//           + (score L + past(L)) / P                    its own keys, and those selected of them
//           + chunk u,  u = c r / (g n)                  the chunk's own keys, for the rows at home: c of g
//                                                        KV heads, r of n rows
//           + candidate g m P                            every rank merges all ranks' candidates
//           + merge u (P - 1)                            results by log-sum-exp, at home; P where rows are dealt out
//           + deliver                                    every rank writes the whole output
//           + rounds latency(P) + received / bandwidth
//
// L cached keys, g KV heads, m keys proposed by a rank. Seconds of one process, all of its threads. Computing
// takes `contention` times as long where ranks share what a machine has; measured, 1 for a machine a rank.
// What is selected is taken to lie evenly over the ranks. Not in it: waiting for the slowest rank, and the
// rest of a model, which other kinds of parallelism divide.
//
// latency(P) = ceil(log2 P) latency, as allgathers by doubling have it; each rank receives P - 1 messages of
// an allgather through one link, and as many partial results, as large as what is merged of them.
#pragma once

#include <quoka/distributed/sharded_attention.hpp>

#include <bit>
#include <cstdint>

namespace quoka_examples {

using quoka::Index;

struct ChunkShape {
  Index q_heads, kv_heads, v_dim, q_len;
  Index wanted;    // keys of each KV head by their scores, in Domain::logit; 0: nothing is selected
  Index proposed;  // thereof by each rank
};

// By one rank for a chunk, as sharded_prefill.hpp has it: bytes, and calls of the communicator.
struct Sent {
  Index candidates = 0, partial = 0, merged = 0, headers = 0;
  Index calls = 0;

  Index bytes() const { return candidates + partial + merged + headers; }
};
inline Sent sent_per_chunk(const ChunkShape& s, Index header_bytes, Index ranks, Index rank) {
  const Index group = s.q_heads / s.kv_heads, row = 4 * (s.v_dim + 1);
  const quoka::detail::Homes homes(s.kv_heads, s.q_len, ranks);
  const auto home = homes.of(rank);
  Sent sent;
  Index headers = 2;  // at begin and at end
  if (s.wanted > 0) {
    sent.candidates = 8 * s.kv_heads * s.proposed;
    ++sent.calls, ++headers;
  }
  if (ranks > 1) {
    sent.partial = (s.q_heads * s.q_len - home.heads * group * home.rows) * row;
    sent.merged = homes.heads_each() * group * homes.rows_each() * row;
    sent.calls += ranks, headers += 2;
  }
  sent.headers = headers * header_bytes;
  sent.calls += headers;
  return sent;
}

// Of dense attention by a ring, for a chunk after L cached keys.
inline Index ring_bytes_per_chunk(Index kv_heads, Index head_dim, Index v_dim, Index kv_len,
                                  Index ranks) {
  return 4 * kv_heads * (head_dim + v_dim) * (kv_len / ranks) * (ranks - 1);
}

// Seconds of one process.
struct ComputeCost {
  double choose, score_per_key, past, past_per_key, chunk;
  double candidate;  // of one
  double merge;      // of all heads, one partial result
  double deliver;
};

struct Network {
  double latency_s, bytes_per_s;
};

// ceil(log2 ranks).
inline double doublings(Index ranks) {
  return static_cast<double>(std::bit_width(static_cast<std::uint64_t>(ranks - 1)));
}

inline double chunk_seconds(const ChunkShape& s, const ComputeCost& cost, const Network& network,
                            Index header_bytes, Index ranks, Index kv_len, double contention) {
  const auto p = static_cast<double>(ranks), len = static_cast<double>(kv_len);
  const quoka::detail::Homes homes(s.kv_heads, s.q_len, ranks);
  const double home = static_cast<double>(homes.heads_each() * homes.rows_each()) /
                      static_cast<double>(s.kv_heads * s.q_len);
  double compute = cost.choose +
                   (cost.score_per_key * len + cost.past + cost.past_per_key * len) / p +
                   cost.chunk * home;
  if (ranks == 1) return compute * contention;
  compute += cost.candidate * static_cast<double>(s.kv_heads * s.proposed) * p +
             cost.merge * home * (homes.whole_heads() ? p - 1.0 : p) + cost.deliver;
  const Sent sent = sent_per_chunk(s, header_bytes, ranks, 0);
  const Index exchanged = ranks - 1;  // calls that pass partial results from one rank to one
  const double rounds = static_cast<double>(sent.calls - exchanged) * doublings(ranks) +
                        static_cast<double>(exchanged);
  const auto received = static_cast<double>((ranks - 1) * (sent.candidates + 2 * sent.merged));
  return compute * contention + rounds * network.latency_s + received / network.bytes_per_s;
}

}  // namespace quoka_examples
