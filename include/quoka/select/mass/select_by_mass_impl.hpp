// Definitions of select_by_mass.hpp.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/format_table.hpp>
#include <quoka/runtime/head_loops.hpp>
#include <quoka/select/mass/code_votes.hpp>
#include <quoka/select/mass/float_votes.hpp>
#include <quoka/select/mass/select_by_mass.hpp>
#include <quoka/select/mass/threshold.hpp>

#include <algorithm>
#include <memory>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// A KV head at work, and one worker.
struct VoteSlot {
  VoteSlot(Arena& arena, const VoteShape& shape, Index weight_bytes)
      : votes(arena, shape, weight_bytes), floats(arena, shape), codes(arena, shape, votes) {}
  HeadVotes votes;
  FloatMemory floats;
  VoteCodes codes;
};
struct VoteWorker {
  VoteWorker(Arena& arena, const VoteShape& shape)
      : votes(arena, shape),
        codes(arena, shape.rows(), shape.dim),
        positions(arena.take<Position>(shape.keys + compact_slack)) {}
  VoteScratch votes;
  CodeScratch codes;
  Position* positions;  // [keys] of a list
};

struct MassMemory {
  Buffer<float> shares;       // [batch][lists][keys]
  Buffer<float> bucket;       // of the k-th largest value
  Buffer<ListCounts> counts;  // [batch][lists]
  Buffer<float> kept_shares;  // [batch][lists] of the chunk, then with the kept keys
  Arenas heads, workers;
  std::vector<VoteSlot> slots;
  WorkerScratch<CodedRows> coded;  // of each slot
  WorkerScratch<RowReader> queries, keys;
  Buffer<float> errors;    // [batch, kv_heads] of logits in nats; infinite: in float
  std::uint64_t turn = 0;  // of looking keys up

  Index bytes() const {
    return bytes_of(shares, bucket, counts, kept_shares, heads, workers, coded, queries, keys,
                    errors);
  }
};

// The shares of all lists. Tiles: what multiplies codes where tiles serve.
template <class Tiles>
class MassShares {
  using Codes = CodeVotes<Tiles>;

 public:
  MassShares(const SelectorInput& input, const VoteShape& shape, const SketchedKeys* codes,
             const ShareRows& shares, MassMemory& memory, ExecutorRef executor)
      : input_(input),
        shape_(shape),
        codes_(codes),
        shares_(shares),
        m_(memory),
        plan_(input.k.batch() * input.k.heads(), executor) {
    const Index slots = plan_.slots();
    m_.coded.at_least(slots);
    // A fuller cache may take fewer rows at once: whichever needs more.
    for (const Index keys : {shape.keys, std::max(shape.keys, input.capacity)}) {
      VoteShape of = shape;
      of.keys = keys;
      m_.heads.reserve(static_cast<int>(slots),
                       [&](Arena& arena) { VoteSlot(arena, of, weight_bytes(of)); });
      m_.workers.reserve(executor.workers(), [&](Arena& arena) { VoteWorker(arena, of); });
      for (Index slot = 0; codes_ != nullptr && slot < slots; ++slot)
        Codes::reserve(of, m_.coded[slot]);
    }
    m_.slots.clear();
    for (Index slot = 0; slot < slots; ++slot) {
      Arena arena = m_.heads[static_cast<int>(slot)];
      m_.slots.emplace_back(arena, shape_, weight_bytes(shape_));
      m_.slots.back().codes.coded = &m_.coded[slot];
    }
    m_.queries.reserve(executor.workers(), input.q);
    m_.keys.reserve(executor.workers(), input.k);
  }

  void find() const {
    plan_.run([&](const HeadLoops& on) { run(on); });
  }

  // ---- by codes: stages of run_by_codes() ----

  template <class Use>
  void with(Index task, int worker, Use&& use) const {
    VoteSlot& s = slot(task, worker);
    const VoteWorker of_worker = scratch(worker);
    use(Codes(shape_, *codes_, task / kv_heads(), task % kv_heads(), s.votes, s.codes,
              of_worker.codes));
  }
  void encode(Index task, int worker) const {
    with(task, worker, [](const Codes& head) { head.encode_rows(); });
  }
  RowReader& reader(int worker) const { return m_.keys[worker]; }
  void find_factors(const Codes& head, Index, Index pass) const { head.find_factors(pass); }
  void add(const Codes& head, Index task, Index pass, Index range) const {
    head.add(pass, range, shares_, task * shape_.voters.lists);
  }

 private:
  static Index weight_bytes(const VoteShape& shape) {
    return std::max(FloatVotes::weight_bytes(shape), Codes::weight_bytes(shape));
  }
  Index kv_heads() const { return input_.k.heads(); }
  VoteSlot& slot(Index task, int worker) const {
    return m_.slots[static_cast<std::size_t>(plan_.slot(task, worker))];
  }
  VoteWorker scratch(int worker) const {
    Arena arena = m_.workers[worker];
    return VoteWorker(arena, shape_);
  }

  void run(const HeadLoops& on) const {
    on.each(1, [&](Index task, Index, int worker) {
      VoteSlot& s = slot(task, worker);
      const VoteWorker of_worker = scratch(worker);
      VotingRows(shape_, s.votes)
          .read(input_.q, input_.chunk_k, task / kv_heads(), task % kv_heads(), m_.queries[worker],
                of_worker.votes);
    });
    if (codes_ != nullptr)
      run_by_codes(*this, on, Codes::ranges(shape_).count, Codes::passes(shape_));
    in_float(on);
    on.each(1, [&](Index task, Index, int worker) { finish(task, worker); });
  }

  // Of heads that codes do not serve.
  void in_float(const HeadLoops& on) const {
    const Index ranges = FloatVotes::ranges(shape_).count;
    const auto each = [&](Index parts, auto&& f) {
      on.each(parts, [&](Index task, Index part, int worker) {
        VoteSlot& s = slot(task, worker);
        if (codes_ != nullptr && s.codes.by_codes) return;
        f(FloatVotes(shape_, s.votes, s.floats), task, part, worker);
      });
    };
    for (Index pass = 0; pass < FloatVotes::passes(shape_); ++pass) {
      each(ranges, [&](const FloatVotes& head, Index task, Index range, int worker) {
        const VoteWorker of_worker = scratch(worker);
        head.weigh(pass, range, input_.k.head(task / kv_heads(), task % kv_heads()),
                   of_worker.votes);
      });
      each(1, [&](const FloatVotes& head, Index, Index, int) { head.find_factors(pass); });
      each(ranges, [&](const FloatVotes& head, Index task, Index range, int) {
        head.add(pass, range, shares_, task * shape_.voters.lists);
      });
    }
  }

  void finish(Index task, int worker) const {
    const Index lists = shape_.voters.lists, first = task * lists;
    const VoteSlot& s = slot(task, worker);
    const bool by_codes = codes_ != nullptr && s.codes.by_codes;
    m_.errors.data()[task] = by_codes ? s.codes.error * static_cast<float>(ln_2) : simd::infinity;
    for (Index list = first; list < first + lists; ++list) {
      float* const x = shares_[list];
      std::fill_n(x - shares_.pad, shares_.pad, -simd::infinity);
      std::fill_n(x + shares_.keys, shares_.pad, -simd::infinity);
      m_.kept_shares.data()[list] = s.votes.chunk_share[list - first];
      if (by_codes) codes_->look_up_best(task % kv_heads(), x, m_.keys[worker]);
    }
  }

  const SelectorInput& input_;
  const VoteShape& shape_;
  const SketchedKeys* codes_;
  const ShareRows& shares_;
  MassMemory& m_;
  HeadPlan plan_;
};

// From there to the Selection.
class MassChoice {
 public:
  MassChoice(const MassRule& rule, Index batch, Index kv_heads, const VoteShape& shape,
             const ShareRows& shares, MassMemory& memory, ExecutorRef executor)
      : rule_(rule),
        batch_(batch),
        lists_(kv_heads * shape.voters.lists),
        shape_(shape),
        shares_(shares),
        m_(memory),
        executor_(executor),
        first_(std::min(rule.keep_first, rule.most)),
        last_(std::min(rule.keep_last, rule.most - first_)),
        keys_(shares.keys - first_ - last_) {}

  void write(Index capacity, Selection& selection) const {
    m_.counts.reserve(batch_ * lists_);
    m_.bucket.reserve_amortised((capacity + compact_slack) * lists_);
    for (Index b = 0; b < batch_; ++b) choose(b);
    Index most = 0;
    for (Index i = 0; i < batch_ * lists_; ++i) most = std::max(most, kept(i));
    selection.reserve(batch_ * lists_ * capacity);
    SelectionWriter writer(selection, batch_, lists_, shares_.keys, most);
    executor_.run(batch_ * lists_, [&](Index i, int worker) { write_one(i, worker, writer); });
    writer.set_kept_shares({m_.kept_shares.data(), static_cast<std::size_t>(batch_ * lists_)});
    writer.commit();
  }

 private:
  ListValues values(Index list) const { return {shares_[list], first_, keys_, rule_.kernel_size}; }
  Index kept(Index list) const {
    const ListCounts& counts = m_.counts.data()[list];
    return first_ + last_ + counts.above + counts.ties;
  }
  Index pairs(Index of_list) const { return (of_list - first_ - last_) * lists_; }

  // The threshold of a sequence, and how many of each list's keys stay.
  void choose(Index b) const {
    const float given = rule_.threshold / static_cast<float>(shares_.keys);
    const Index most = pairs(rule_.most), least = std::max<Index>(0, pairs(rule_.least));
    if (rule_.threshold > 0.0f) {
      const Index reached = count(b, given);
      if (least <= reached && reached <= most) return;
      cut(b, reached < least ? least : most);
    } else {
      cut(b, most);
    }
  }
  // Counts the keys of sequence b that reach the threshold.
  Index count(Index b, float threshold) const {
    executor_.run(lists_, [&](Index list, int) {
      m_.counts.data()[b * lists_ + list] = count_of_list(values(b * lists_ + list), threshold);
    });
    Index reached = 0;
    for (Index list = 0; list < lists_; ++list) {
      const ListCounts& counts = m_.counts.data()[b * lists_ + list];
      reached += counts.above + counts.equal;
    }
    return reached;
  }
  // Exactly `wanted` of sequence b stay.
  void cut(Index b, Index wanted) const {
    if (wanted >= keys_ * lists_) {
      count(b, -simd::infinity);
      return;
    }
    if (wanted <= 0) {
      count(b, simd::infinity);
      return;
    }
    const KthLargest kth = kth_largest(b, wanted);
    count(b, kth.value);
    Index ties = wanted - kth.above;
    for (Index list = 0; list < lists_; ++list) {
      ListCounts& counts = m_.counts.data()[b * lists_ + list];
      counts.ties = std::min(counts.equal, ties);
      ties -= counts.ties;
    }
  }

  // Of all values of sequence b.
  KthLargest kth_largest(Index b, Index k) const {
    const Index room = keys_ + compact_slack, n = keys_ * lists_;
    float* const bucket = m_.bucket.data();
    const float pivot = sampled_pivot(
        n, k, bucket, [&](Index i) { return values(b * lists_ + i / keys_).at(i % keys_); });
    for (const float least : {pivot, -simd::infinity}) {
      executor_.run(lists_, [&](Index list, int) {
        const ListValues of = values(b * lists_ + list);
        float* const to = bucket + list * room;
        Index count = 0;
        for_each_compared(keys_, [&](auto at) QUOKA_INLINE_LAMBDA {
          const auto value = of(at);
          count +=
              simd::store_compressed(to + count, simd::not_less(value, at.broadcast(least)), value);
        });
        m_.counts.data()[b * lists_ + list].above = count;
      });
      Index count = 0;
      for (Index list = 0; list < lists_; ++list) {
        const Index some = m_.counts.data()[b * lists_ + list].above;
        std::copy_n(bucket + list * room, some, bucket + count);
        count += some;
      }
      if (count >= k) return kth_by_bins(bucket, count, k);  // else the sample was not fair
    }
    return {-simd::infinity, 0};
  }

  void write_one(Index i, int worker, SelectionWriter& writer) const {
    Arena arena = m_.workers[worker];
    Position* const positions = VoteWorker(arena, shape_).positions;
    Position* to = positions;
    for (Index t = 0; t < first_; ++t) *to++ = static_cast<Position>(t);
    const ListCounts& counts = m_.counts.data()[i];
    to += write_list(values(i), counts, static_cast<Position>(first_), to);
    for (Index t = first_ + keys_; t < shares_.keys; ++t) *to++ = static_cast<Position>(t);
    writer.set_count(i / lists_, i % lists_, to - positions);
    std::copy(positions, to, writer.row(i / lists_, i % lists_).data());
    double share = static_cast<double>(m_.kept_shares.data()[i]);  // of the chunk
    for (const Position* t = positions; t < to; ++t)
      share += static_cast<double>(std::max(shares_[i][*t], 0.0f));
    m_.kept_shares.data()[i] = static_cast<float>(std::min(share, 1.0));
  }

  const MassRule& rule_;
  Index batch_, lists_;  // of a sequence
  const VoteShape& shape_;
  const ShareRows& shares_;
  MassMemory& m_;
  ExecutorRef executor_;
  Index first_, last_, keys_;  // forced at either end; between them
};

QUOKA_FUNC void select_by_mass(const SelectorInput& input, const MassRule& rule,
                               const SketchedKeys* codes, MassMemory& memory, Selection& selection,
                               ExecutorRef executor) {
  const Rows &q = input.q, &k = input.k;
  const Index kv_heads = k.heads(), keys = k.len();
  const VoteShape shape{
      Voters(input.group(), q.len(), rule.queries),    k.dim(),          keys, input.chunk_k.len(),
      LogitRule{input.logit_scale(), input.softcap()}, rule.all_channels};
  const Index lists = kv_heads * shape.voters.lists, capacity = std::max(keys, input.capacity);
  const Index pad = rule.kernel_size;
  memory.shares.reserve_amortised(k.batch() * lists * ShareRows::stride(capacity, pad));
  const ShareRows shares{memory.shares.data(), keys, pad};
  memory.errors.reserve(k.batch() * kv_heads);
  memory.kept_shares.reserve(k.batch() * lists);
  MassShares<simd::Tiles> of_lists(input, shape, codes, shares, memory, executor);
  if (codes != nullptr) codes->look_up(memory.turn, memory.keys[0]);
  of_lists.find();
  MassChoice(rule, k.batch(), kv_heads, shape, shares, memory, executor).write(capacity, selection);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
