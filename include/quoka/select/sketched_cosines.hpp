// The best keys by cosine, by way of the keys' sketch: the same Selection as from float scores, for a fraction of the
// work.
//
// A kept query q, as code * s with an error of length e, and a key of direction k = scale * code
// with an error of length `error` satisfy
//
//   q . k - s scale (code_q . code_k) = (q - s code_q) . k + s code_q . (k - scale code_k)
//
// and so differ by at most e + (|q| + e) * error, plus what rounding adds to either side. With Q
// the longest kept query and e the largest error among them,
//
//   bound[t] = e + (Q + e) error[t] + (head_dim + rows + 16) 2^-23 Q
//
// holds for the maximum over the queries. The n-th best sketched score, and a level a little above it, divide the keys
// into four kinds:
//
//   sure      sketch - bound above the level: kept, not scored again
//   likely    the others among the n best by the sketch: scored in float; the least of these scores
//             (or the level) is a floor, which n keys reach and so does the n-th best
//   possible  the rest of those with sketch + bound at the floor or above: scored in float
//   out       all others
//
// The best of the likely and the possible ones fill the budget that `sure` leaves. If more of them reach the level than
// fit beside all the sure ones, the sure ones are scored, too. Float scores come from the same kernel in the same order
// as without the sketch: bit for bit the same numbers decide.
//
// Each float score is compared with its sketch. One beyond the bound belongs to a key that changed without an update,
// and throws.
//
// 2 * kv_heads * rows * kv_len * head_dim 8-bit operations, and float scores of 1 to 2 n keys; reads head_dim + 8 bytes
// per key.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/code_units.hpp>
#include <quoka/kernels/compact.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/rows/selection.hpp>
#include <quoka/runtime/head_loops.hpp>
#include <quoka/select/key_sketch.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/select/top_k.hpp>
#include <quoka/select/score.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Memory that the phases of one head share.
struct CosineMemory {
  struct Counts {
    float longest,
        missed;        // of the queries, the largest; infinite where codes cannot stand for one
    float nth, level;  // sketched scores
    Index reach, candidates;  // keys that reach the n-th best, and these with the possible ones
    Index likely, members;    // members: the likely ones, then the possible ones
  };

  // reordered: keys do not lie in the sketch's order.
  static CosineMemory with(Arena& arena, Index rows, Index dim, Index keys, bool reordered,
                           const CodeKernels& kernels) {
    return {.queries = CodedRows::with(arena, rows, dim, CodedRows::padded(rows), kernels),
            .scores = arena.take<float>(keys),
            .errors = reordered ? arena.take<float>(keys) : nullptr,
            .exact = arena.take<float>(keys),
            .values = arena.take<float>(keys + compact_slack),
            .bucket = arena.take<float>(keys + compact_slack),
            .candidates = arena.take<Position>(keys + compact_slack),
            .members = arena.take<Position>(keys + compact_slack),
            .counts = {}};
  }

  CodedRows queries;
  float* scores;           // [keys] by the sketch
  float* errors;           // [keys] of the sketch, where its order is another one
  float* exact;            // [keys] of the members alone
  float *values, *bucket;  // of members or candidates
  Position *candidates, *members;
  Counts counts;
};

// scores[i] of keys [begin, end): the maximum over the queries of what codes say of the cosine. Where the sketch has
// another order than the keys, errors[i] too. gathered: two blocks of codes.
inline void multiply_codes(const SketchedKeys& keys, Index head, Index begin, Index end,
                           const CodedRows& queries, float* scores, float* errors,
                           std::uint8_t* gathered, const CodeKernels& kernels) {
  constexpr Index pair = CodeBlocks::pair;
  const Index b = head / keys.k().heads(), kv_head = head % keys.k().heads();
  const KeySketch& sketch = keys.sketch();
  const CodeBlocks blocks(sketch, keys.mapping(), keys.k().len(), b, kv_head, keys.k().dim(),
                          gathered);
  const float *const scales = sketch.scales(b, kv_head), *const of_sketch =
                                                             sketch.errors(b, kv_head);
  CodeScope scope(kernels, queries.codes(0), queries.packed(0));
  blocks.for_each_pair(
      begin, end, 1, [&](Index kv, Index count, CodePair codes, const LaterBlocks& ahead) {
        alignas(64) float room[pair];
        if (!blocks.in_order())
          std::copy_n(blocks.numbers(of_sketch, kv, count, room), count, errors + kv);
        kernels.best(scope.session, codes, ahead, blocks.numbers(scales, kv, count, room),
                     queries.units()[0], count, scores + kv);
      });
}

struct CosineCall {
  const SketchedKeys& keys;
  const float* q_bar;  // [batch, kv_heads, rows, head_dim]
  Index rows;
  const TensorView<const float, 3>& inverse_norms;  // [batch, kv_heads, kv_len], or absent
  Index capacity;           // of the cache: memory is taken for this many keys
  Index first, last;        // keys that are kept in any case
  Index wanted;             // and this many others, fewer than there are
  SelectionWriter& writer;  // of all of these for each head

  const Rows& k() const { return keys.k(); }
  Index heads() const { return k().batch() * k().heads(); }
};

// The phases of a call.
class SketchedCosines {
 public:
  SketchedCosines(const CosineCall& call, const HeadPlan& plan, QueryScoreState& state,
                  ExecutorRef executor, const CodeKernels& kernels = code_kernels())
      : kernels_(kernels),
        call_(call),
        plan_(plan),
        state_(state),
        ranges_(KeyRanges::by_size(
            call.k().len(),
            std::min(tuning::sketch_task_keys,
                     KeyRanges::for_workers(call.k().len(), call.heads(), plan.workers()).size))),
        parts_(plan.workers() == 1 ? 1 : std::max<Index>(1, 2 * plan.workers() / call.heads())) {
    const Rows& k = call.k();
    const int workers = executor.workers(), slots = static_cast<int>(plan.slots());
    const auto of_head = [&](Arena& arena, Index keys) {
      return CosineMemory::with(arena, call.rows, k.dim(), keys, call.keys.mapping() != nullptr,
                                kernels_);
    };
    state.heads.reserve(slots,
                        [&](Arena& arena) { of_head(arena, std::max(k.len(), call.capacity)); });
    state.call.reserve(1, [&](Arena& arena) { arena.take<CosineMemory>(slots); });
    Arena arena = state.call[0];
    slots_ = arena.take<CosineMemory>(slots);
    for (int slot = 0; slot < slots; ++slot) {
      Arena memory = state.heads[slot];
      std::construct_at(slots_ + slot, of_head(memory, k.len()));
    }
    state.workers.reserve(workers, [&](Arena& worker) { Worker(worker, k.dim(), call.rows); });
    Worker first = scratch(0);
    call.keys.look_up(state.turn, first.floats.row);
  }

  const CosineMemory& memory(int slot) const { return slots_[slot]; }

  void operator()(const HeadLoops& on) const {
    const auto per_head = [&](auto step) {
      on.each(1, [&](Index head, Index, int worker) { step(Head(*this, head, worker)); });
    };
    const auto score = [&](auto first_of) {
      on.each(parts_, [&](Index head, Index part, int worker) {
        const Head x(*this, head, worker);
        const Index first = first_of(x), count = x.m.counts.members - first;
        x.score(first + part * count / parts_, first + (part + 1) * count / parts_);
      });
    };
    if (call_.wanted == 0) return per_head([](Head x) { x.write_forced(); });
    per_head([](Head x) { x.encode(); });
    on.each(ranges_.count, [&](Index head, Index range, int worker) {
      const auto [begin, end] = ranges_.of(range);
      Head(*this, head, worker).multiply(begin, end);
    });
    per_head([](Head x) { x.find_likely(); });
    score([](const Head&) { return Index{0}; });
    per_head([](Head x) { x.find_possible(); });
    score([](const Head& x) { return x.m.counts.likely; });
    per_head([](Head x) { x.write_forced(), x.write_best(); });
  }

 private:
  struct Worker {
    Worker(Arena& arena, Index dim, Index rows)
        : floats(arena, dim, rows), gathered(arena.take<std::uint8_t>(2 * code_block_bytes(dim))) {}
    ScoreScratch floats;
    std::uint8_t* gathered;  // two blocks of codes
  };
  Worker scratch(int worker) const {
    Arena arena = state_.workers[worker];
    return Worker(arena, call_.k().dim(), call_.rows);
  }

  // One KV head.
  struct Head {
    Head(const SketchedCosines& all, Index of_head, int by_worker)
        : of(all), head(of_head), worker(by_worker), m(all.slots_[all.plan_.slot(head, worker)]) {}

    const float* q_bar() const {
      return of.call_.q_bar + head * of.call_.rows * of.call_.k().dim();
    }
    const float* errors() const {
      return m.errors != nullptr ? m.errors
                                 : of.call_.keys.sketch().errors(head / of.call_.k().heads(),
                                                                 head % of.call_.k().heads());
    }
    float slope() const { return m.counts.longest + m.counts.missed; }
    float constant() const {
      return m.counts.missed + static_cast<float>(of.call_.k().dim() + of.call_.rows + 16) *
                                   0x1p-23f * m.counts.longest;
    }
    Index others() const { return of.call_.k().len() - of.call_.first - of.call_.last; }
    std::span<Position> row() const {
      return of.call_.writer.row(head / of.call_.k().heads(), head % of.call_.k().heads());
    }
    // Is its float score above the level for certain?
    bool is_sure(Position key) const {
      return m.scores[key] >= m.counts.nth && m.counts.level < m.scores[key] - bound(key);
    }
    float bound(Index key) const { return error_bound(slope(), errors()[key], constant()); }

    void encode() const {
      const Index rows = of.call_.rows;
      CodedRows& q = m.queries;
      m.counts.longest = m.counts.missed = infinity;
      if (!q.encode(q_bar(), rows, of.call_.k().dim(), RowUnits::shared, of.kernels_)) return;
      m.counts.longest = *std::max_element(q.lengths(), q.lengths() + rows);
      m.counts.missed = *std::max_element(q.missed(), q.missed() + rows);
    }

    void multiply(Index begin, Index end) const {
      if (m.counts.longest < infinity) {
        multiply_codes(of.call_.keys, head, begin, end, m.queries, m.scores, m.errors,
                       of.scratch(worker).gathered, of.kernels_);
      } else {  // all keys are scored in float
        std::fill(m.scores + begin, m.scores + end, 0.0f);
        if (m.errors != nullptr) std::fill(m.errors + begin, m.errors + end, 0.0f);
      }
    }

    // The keys that reach the n-th best sketched score; of these those that are not sure are scored.
    void find_likely() const {
      CosineMemory::Counts& c = m.counts;
      const Index begin = of.call_.first, n = others();
      const float* const x = m.scores + begin;
      const bool coded = std::isfinite(slope());
      // Heuristic; changes speed, never the result. Measured: sketches are off by less than missed / 8, so missed / 4
      // leaves room.
      const float slack = 0.25f * c.missed;
      c.nth = c.level = -infinity;
      if (coded) {
        const auto [kth, count] =
            reach_kth(x, n, of.call_.wanted, static_cast<Position>(begin), m.bucket, m.candidates);
        c.nth = kth.value, c.level = c.nth + slack, c.reach = count;
      } else {
        std::iota(m.candidates, m.candidates + n, static_cast<Position>(begin)), c.reach = n;
      }
      c.likely = 0;
      for (Index i = 0; i < c.reach; ++i) {
        m.members[c.likely] = m.candidates[i];
        c.likely += is_sure(m.candidates[i]) ? 0 : 1;
      }
      c.members = c.likely;
    }

    // The others whose sketch, with its bound, reaches the least score of the likely ones.
    void find_possible() const {
      CosineMemory::Counts& c = m.counts;
      float least = c.level;
      for (Index i = 0; i < c.likely; ++i) least = std::min(least, ordered_score(m.values[i]));
      const Index begin = of.call_.first;
      const float *const x = m.scores + begin, *const e = errors() + begin;
      c.candidates = positions_within({x, e, slope(), constant()}, others(), c.nth, least,
                                      static_cast<Position>(begin), m.candidates);
      for (Index i = 0; i < c.candidates; ++i) {
        m.members[c.members] = m.candidates[i];
        c.members += m.scores[m.candidates[i]] < c.nth ? 1 : 0;
      }
    }

    // Members [begin, end) in float.
    void score(Index begin, Index end) const {
      if (begin == end) return;
      const Rows& k = of.call_.k();
      const HeadKeys keys(k, &of.call_.inverse_norms, head / k.heads(), head % k.heads());
      Worker w = of.scratch(worker);
      TileScorer scorer(q_bar(), of.call_.rows, k.dim(), Aggregation::max, w.floats);
      score_keys_of_head(keys, {0, m.members + begin}, end - begin, scorer, m.values + begin);
      for (Index i = begin; i < end; ++i) {
        const Position key = m.members[i];
        m.exact[key] = m.values[i];
        // A float score beyond the bound of its sketch shows that the key was replaced.
        if (std::abs(m.values[i] - m.scores[key]) > bound(key)) [[unlikely]]
          fail_other_key(
              key,
              "not the one that was sketched (its cache changed and the sketch was not updated, "
              "or its inverse norm is not its own), of",
              k.len());
      }
    }

    // The best of the candidates.
    void write_best() const {
      CosineMemory::Counts& c = m.counts;
      const Index sure = c.reach - c.likely;
      Index above = 0;
      for (Index i = 0; i < c.members; ++i) above += ordered_score(m.values[i]) >= c.level ? 1 : 0;
      const bool all_scored = sure > 0 && above > of.call_.wanted - sure;  // one might have to go
      if (all_scored) {
        std::copy_n(m.candidates, c.candidates, m.members);
        score(0, c.candidates);
      }
      for (Index i = 0; i < c.candidates; ++i) {
        const Position key = m.candidates[i];
        m.values[i] = !all_scored && is_sure(key) ? std::numeric_limits<float>::max()
                                                  : ordered_score(m.exact[key]);
      }
      k_best(m.values, c.candidates, of.call_.wanted, 0, m.bucket, m.members);
      Position* const kept = row().data() + of.call_.first;
      for (Index i = 0; i < of.call_.wanted; ++i) kept[i] = m.candidates[m.members[i]];
    }
    void write_forced() const {
      const std::span<Position> kept = row();
      std::iota(kept.begin(), kept.begin() + of.call_.first, Position{0});
      std::iota(kept.end() - of.call_.last, kept.end(),
                static_cast<Position>(of.call_.k().len() - of.call_.last));
    }

    const SketchedCosines& of;
    Index head;
    int worker;
    CosineMemory& m;
  };

  const CodeKernels& kernels_;
  const CosineCall& call_;
  const HeadPlan& plan_;
  QueryScoreState& state_;
  CosineMemory* slots_ = nullptr;  // of HeadPlan
  KeyRanges ranges_;
  Index parts_;  // of a head's members, to be scored
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
