// The best keys by cosine, by way of the keys' sketch: the same Selection as from float scores, for
// a fraction of the work.
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
// holds for the maximum over the queries. The n-th best sketched score, and a level a little above
// it, divide the keys into four kinds:
//
//   sure      sketch - bound above the level: kept, not scored again
//   likely    the others among the n best by the sketch: scored in float; the least of these scores
//             (or the level) is a floor, which n keys reach and so does the n-th best
//   possible  the rest of those with sketch + bound at the floor or above: scored in float
//   out       all others
//
// The best of the likely and the possible ones fill the budget that `sure` leaves. If more of them
// reach the level than fit beside all the sure ones, the sure ones are scored, too. Float scores
// come from the same kernel in the same order as without the sketch: bit for bit the same numbers
// decide.
//
// Each float score is compared with its sketch. One beyond the bound belongs to a key that changed
// without an update, and throws.
//
// CosineHead has these steps for one KV head, in their order; SketchedCosines runs them for all.
//
// 2 * kv_heads * rows * kv_len * head_dim 8-bit operations, and float scores of 1 to 2 n keys;
// reads head_dim + 8 bytes per key.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/code_units.hpp>
#include <quoka/kernels/compact.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/rows/selection.hpp>
#include <quoka/runtime/head_loops.hpp>
#include <quoka/select/key_scores.hpp>
#include <quoka/select/sketched_keys.hpp>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// A call, of all KV heads.
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

// Memory of one worker.
struct CosineScratch {
  CosineScratch(Arena& arena, Index dim, Index rows)
      : floats(arena, dim, rows), gathered(arena.take<std::uint8_t>(2 * code_block_bytes(dim))) {}
  ScoreScratch floats;
  std::uint8_t* gathered;  // two blocks of codes
};

// One KV head: memory that its tasks share, and its phases, in the order in which they run.
class CosineHead {
 public:
  // Room for `keys` keys.
  CosineHead(Arena& arena, const CosineCall& call, Index keys)
      : call_(call),
        queries_(arena, call.rows, call.k().dim(), CodedRows::padded(call.rows)),
        scores_(arena.take<float>(keys)),
        own_errors_(call.keys.mapping() != nullptr ? arena.take<float>(keys) : nullptr),
        exact_(arena.take<float>(keys)),
        values_(arena.take<float>(keys + compact_slack)),
        bucket_(arena.take<float>(keys + compact_slack)),
        candidates_(arena.take<Position>(keys + compact_slack)),
        members_(arena.take<Position>(keys + compact_slack)) {}

  Index members() const { return members_count_; }  // keys to score in float: the likely ones,
  Index likely() const { return likely_; }          // then the possible ones

  // Codes of the queries of KV head `head`.
  void encode(Index head) {
    head_ = head, b_ = head / call_.k().heads(), kv_head_ = head % call_.k().heads();
    const Index rows = call_.rows;
    errors_ = own_errors_ != nullptr ? own_errors_ : call_.keys.sketch().errors(b_, kv_head_);
    longest_ = missed_ = infinity;
    if (!queries_.encode(q_bar(), rows, RowUnits::shared, code_kernels())) return;
    longest_ = *std::max_element(queries_.lengths(), queries_.lengths() + rows);
    missed_ = *std::max_element(queries_.missed(), queries_.missed() + rows);
  }

  // Sketched scores of keys [begin, end).
  void multiply(Index begin, Index end, const CosineScratch& s) const {
    if (longest_ == infinity) {  // all keys are scored in float
      std::fill(scores_ + begin, scores_ + end, 0.0f);
      if (own_errors_ != nullptr) std::fill(own_errors_ + begin, own_errors_ + end, 0.0f);
      return;
    }
    constexpr Index pair = CodeBlocks::pair;
    const KeySketch& sketch = call_.keys.sketch();
    const CodeBlocks blocks(call_.keys, b_, kv_head_);
    const float *const scales = sketch.scales(b_, kv_head_), *const errors =
                                                                 sketch.errors(b_, kv_head_);
    CodeScope scope(code_kernels(), queries_.codes(0), queries_.packed(0));
    for (Index kv = begin; kv < end; kv += pair) {
      const KeyPair codes = blocks.at(kv, end, s.gathered);
      alignas(64) float room[pair];
      if (own_errors_ != nullptr)
        std::copy_n(blocks.numbers(errors, kv, codes.count, room), codes.count, own_errors_ + kv);
      scope->best(codes, blocks.numbers(scales, kv, codes.count, room), queries_.units()[0],
                  scores_ + kv);
    }
  }

  // The keys that reach the n-th best sketched score; of these those that are not sure are scored.
  void find_likely() {
    const Index begin = call_.first, n = others();
    // Heuristic; changes speed, never the result. Measured: sketches are off by less than missed /
    // 8, so missed / 4 leaves room.
    const float slack = 0.25f * missed_;
    nth_ = level_ = -infinity;
    if (std::isfinite(slope())) {
      const auto [kth, count] = reach_kth(scores_ + begin, n, call_.wanted,
                                          static_cast<Position>(begin), bucket_, candidates_);
      nth_ = kth.value, level_ = nth_ + slack, reach_ = count;
    } else {
      std::iota(candidates_, candidates_ + n, static_cast<Position>(begin)), reach_ = n;
    }
    likely_ = 0;
    for (Index i = 0; i < reach_; ++i) {
      members_[likely_] = candidates_[i];
      likely_ += is_sure(candidates_[i]) ? 0 : 1;
    }
    members_count_ = likely_;
  }

  // The others whose sketch, with its bound, reaches the least score of the likely ones.
  void find_possible() {
    float least = level_;
    for (Index i = 0; i < likely_; ++i) least = std::min(least, ordered_score(values_[i]));
    const Index begin = call_.first;
    candidates_count_ =
        positions_within({scores_ + begin, errors_ + begin, slope(), constant()}, others(), nth_,
                         least, static_cast<Position>(begin), candidates_);
    for (Index i = 0; i < candidates_count_; ++i) {
      members_[members_count_] = candidates_[i];
      members_count_ += scores_[candidates_[i]] < nth_ ? 1 : 0;
    }
  }

  // Members [begin, end) in float.
  void score(Index begin, Index end, CosineScratch& s) const {
    if (begin == end) return;
    const Rows& k = call_.k();
    const HeadKeys keys(k, &call_.inverse_norms, b_, kv_head_, 0, members_ + begin);
    TileScorer scorer(q_bar(), call_.rows, k.dim(), Aggregation::max, s.floats);
    score_keys_of_head(keys, end - begin, scorer, values_ + begin);
    for (Index i = begin; i < end; ++i) {
      const Position key = members_[i];
      exact_[key] = values_[i];
      // A float score beyond the bound of its sketch shows that the key was replaced.
      if (std::abs(values_[i] - scores_[key]) > bound(key)) [[unlikely]]
        fail_other_key(
            key,
            "not the one that was sketched (its cache changed and the sketch was not updated, "
            "or its inverse norm is not its own), of",
            k.len());
    }
  }

  // The forced keys, and the best of the candidates.
  void write(CosineScratch& s) {
    write_forced(head_);
    const Index sure = reach_ - likely_;
    Index above = 0;
    for (Index i = 0; i < members_count_; ++i) above += ordered_score(values_[i]) >= level_ ? 1 : 0;
    const bool all_scored = sure > 0 && above > call_.wanted - sure;  // one might have to go
    if (all_scored) {
      std::copy_n(candidates_, candidates_count_, members_);
      score(0, candidates_count_, s);
    }
    for (Index i = 0; i < candidates_count_; ++i) {
      const Position key = candidates_[i];
      values_[i] = !all_scored && is_sure(key) ? std::numeric_limits<float>::max()
                                               : ordered_score(exact_[key]);
    }
    k_best(values_, candidates_count_, call_.wanted, 0, bucket_, members_);
    Position* const kept = row(head_).data() + call_.first;
    for (Index i = 0; i < call_.wanted; ++i) kept[i] = candidates_[members_[i]];
  }
  void write_forced(Index head) const {
    const std::span<Position> kept = row(head);
    std::iota(kept.begin(), kept.begin() + call_.first, Position{0});
    std::iota(kept.end() - call_.last, kept.end(),
              static_cast<Position>(call_.k().len() - call_.last));
  }

 private:
  const float* q_bar() const { return call_.q_bar + head_ * call_.rows * call_.k().dim(); }
  float slope() const { return longest_ + missed_; }
  float constant() const {
    return missed_ + static_cast<float>(call_.k().dim() + call_.rows + 16) * 0x1p-23f * longest_;
  }
  Index others() const { return call_.k().len() - call_.first - call_.last; }
  std::span<Position> row(Index head) const {
    return call_.writer.row(head / call_.k().heads(), head % call_.k().heads());
  }
  // Is its float score above the level for certain?
  bool is_sure(Position key) const {
    return scores_[key] >= nth_ && level_ < scores_[key] - bound(key);
  }
  float bound(Index key) const { return error_bound(slope(), errors_[key], constant()); }

  const CosineCall& call_;
  Index head_ = 0, b_ = 0, kv_head_ = 0;
  CodedRows queries_;
  float* scores_;                  // [keys] by the sketch
  float* own_errors_;              // [keys] of the sketch, where its order is another one
  const float* errors_ = nullptr;  // these, or the sketch's
  float* exact_;                   // [keys] of the members alone
  float *values_, *bucket_;        // of members or candidates
  Position *candidates_, *members_;
  float longest_ = 0.0f,
        missed_ = 0.0f;              // of the queries; infinite where codes cannot stand for one
  float nth_ = 0.0f, level_ = 0.0f;  // sketched scores
  Index reach_ = 0;                  // find_likely(): first candidates, sure and likely keys
  Index likely_ = 0;                 // find_likely(): first members, likely keys
  // find_possible(): candidates are then sure, likely and possible keys, ascending; members likely
  // keys, then possible ones. write() makes members the places of the kept candidates.
  Index candidates_count_ = 0, members_count_ = 0;
};

// The phases of a call.
class SketchedCosines {
 public:
  // of_call, of_heads, of_workers: reused memory.
  SketchedCosines(const CosineCall& call, const HeadPlan& plan, Arenas& of_call, Arenas& of_heads,
                  Arenas& of_workers, ExecutorRef executor)
      : call_(call),
        plan_(plan),
        workers_(of_workers),
        ranges_(KeyRanges::by_size(
            call.k().len(),
            std::min(tuning::sketch_task_keys,
                     KeyRanges::for_workers(call.k().len(), call.heads(), plan.workers_per_head())
                         .size))),
        parts_(plan.workers_per_head() == 1
                   ? 1
                   : std::max<Index>(1, 2 * plan.workers_per_head() / call.heads())) {
    const Index slots = plan.slots(), keys = call.k().len();
    of_heads.reserve(static_cast<int>(slots),
                     [&](Arena& arena) { CosineHead(arena, call, std::max(keys, call.capacity)); });
    of_call.reserve(1, [&](Arena& arena) { arena.take<CosineHead>(slots); });
    of_workers.reserve(executor.workers(),
                       [&](Arena& arena) { CosineScratch(arena, call.k().dim(), call.rows); });
    Arena arena = of_call[0];
    heads_ = arena.take<CosineHead>(slots);
    for (Index slot = 0; slot < slots; ++slot) {
      Arena memory = of_heads[static_cast<int>(slot)];
      std::construct_at(heads_ + slot, memory, call, keys);
    }
    CosineScratch first = scratch(0);
    call.keys.look_up(first.floats.row);
  }

  void operator()(const HeadLoops& on) const {
    const auto per_head = [&](auto step) {
      on.each(1, [&](Index task, Index, int worker) {
        step(heads_[plan_.slot(task, worker)], task, worker);
      });
    };
    const auto score = [&](auto first_of) {
      on.each(parts_, [&](Index task, Index part, int worker) {
        const CosineHead& head = heads_[plan_.slot(task, worker)];
        CosineScratch s = scratch(worker);
        const Index first = first_of(head), count = head.members() - first;
        head.score(first + part * count / parts_, first + (part + 1) * count / parts_, s);
      });
    };
    if (call_.wanted == 0)
      return per_head([](CosineHead& head, Index task, int) { head.write_forced(task); });
    per_head([](CosineHead& head, Index task, int) { head.encode(task); });
    on.each(ranges_.count, [&](Index task, Index range, int worker) {
      const auto [begin, end] = ranges_.of(range);
      heads_[plan_.slot(task, worker)].multiply(begin, end, scratch(worker));
    });
    per_head([](CosineHead& head, Index, int) { head.find_likely(); });
    score([](const CosineHead&) { return Index{0}; });
    per_head([](CosineHead& head, Index, int) { head.find_possible(); });
    score([](const CosineHead& head) { return head.likely(); });
    per_head([&](CosineHead& head, Index, int worker) {
      CosineScratch s = scratch(worker);
      head.write(s);
    });
  }

 private:
  CosineScratch scratch(int worker) const {
    Arena arena = workers_[worker];
    return CosineScratch(arena, call_.k().dim(), call_.rows);
  }

  const CosineCall& call_;
  const HeadPlan& plan_;
  const Arenas& workers_;
  CosineHead* heads_ = nullptr;  // [plan.slots()]
  KeyRanges ranges_;
  Index parts_;  // of a head's members, to be scored
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
