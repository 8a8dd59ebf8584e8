// IndexLists: which keys each query attends to, a list for each of them, as a model's own chooser writes them
// (DeepSeek's and GLM's indexers, MiniMax's and Qwen's blocks).
//
//   IndexLists(entries)                  [batch or 1, kv_heads or 1, q_len, k], keys
//   IndexLists(entries, 64)              blocks: entry e names keys [64 e, 64 (e + 1)), the last one as far as keys go
//   IndexLists(entries, 1, counts)       the first counts[b, head, i] entries of a list count
//
// Keys are counted as a mask's columns are: the past's rows, then the chunk's. A list is a set: its order means
// nothing, and a key that is named twice is attended to once. An entry of -1 names nothing, as kernels of GPUs have
// their padding. Lists join what else hides keys: causality, the sliding window and a mask. A query whose list
// names nothing that it may see has an empty row, of zeros.
//
// Values, not owned: the entries' memory is read in each call.
#pragma once

#include <quoka/views/own_keys.hpp>
#include <quoka/views/tensor_view.hpp>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {

class IndexLists {
 public:
  using Entries = TensorView<const Position>;    // [batch or 1, kv_heads or 1, q_len, k]
  using Counts = TensorView<const Position, 3>;  // [batch or 1, kv_heads or 1, q_len]

  // No lists: every key counts.
  IndexLists() = default;
  // `block` keys for each entry; counts absent: all k entries of each list count. Throws std::invalid_argument for a
  // block below 1, and for counts of another shape than the lists.
  explicit IndexLists(const Entries& entries, Index block = 1, const Counts& counts = {})
      : entries_(entries),
        counts_(counts),
        block_(block),
        make_work_(detail::known_listed_work<void>),
        present_(true) {
    detail::require_size("the keys of a block", block, 1);
    if (counts.absent()) return;
    detail::require_equal("the counts' batch", counts.batch(), "the lists' batch", batch());
    detail::require_equal("the counts' heads", counts.heads(), "the lists' heads", heads());
    detail::require_equal("the counts' len", counts.len(), "the lists' q_len", q_len());
  }

  bool absent() const { return !present_; }                        // no lists: every key counts
  Index batch() const { return entries_.batch(); }                 // 1: the same for all sequences
  Index heads() const { return entries_.heads(); }                 // 1: the same for all KV heads
  Index q_len() const { return entries_.len(); }                   // queries
  Index most() const { return entries_.dim(); }                    // entries of a list, at most
  Index block() const { return block_; }                           // keys of an entry
  const Entries& entries() const { return entries_; }              // as given
  const Counts& counts() const { return counts_; }                 // as given
  detail::MakeListedWork make_work() const { return make_work_; }  // the library's own

  // The entries of one query: of KV head `kv_head` of sequence b.
  std::span<const Position> list(Index b, Index kv_head, Index query) const {
    const Index which_b = batch() > 1 ? b : 0, which_head = heads() > 1 ? kv_head : 0;
    const Index count = counts_.absent() ? most() : Index{counts_.at(which_b, which_head, query)};
    return {entries_.row(which_b, which_head, query), static_cast<std::size_t>(count)};
  }
  // Has each query of a KV head of sequence b the same list as the first? Lists are sets.
  bool same_for_all_queries(Index b) const {
    for (Index head = 0; head < heads(); ++head) {
      const std::span<const Position> first = list(b, head, 0);
      for (Index i = 1; i < q_len(); ++i) {
        const std::span<const Position> other = list(b, head, i);
        if (!std::equal(first.begin(), first.end(), other.begin(), other.end()) &&
            !same_set(first, other))
          return false;
      }
    }
    return true;
  }
  // The most different entries that a list of sequence b has. The last query's is often the longest: it comes first, and
  // a list that cannot have more is only counted.
  Index most_different(Index b) const {
    Index found = 0;
    for (Index head = 0; head < heads(); ++head)
      for (Index i = q_len() - 1; i >= 0 && found < most(); --i) {
        const std::span<const Position> list = this->list(b, head, i);
        const Index named =
            std::count_if(list.begin(), list.end(), [](Position x) { return x >= 0; });
        if (named > found) found = std::max(found, different(list));
      }
    return found;
  }
  // Those of sequence b alone. Throws std::invalid_argument where there is none such.
  IndexLists sequence(Index b) const {
    detail::require_at_least("the lists' sequence", b, 0);
    if (absent() || batch() == 1) return *this;
    detail::require_at_most("the lists' sequence", b, "the last one", batch() - 1);
    IndexLists one = *this;
    one.entries_ =
        Entries(entries_.row(b, 0, 0), {1, heads(), q_len(), most()}, entries_.strides());
    if (!counts_.absent())
      one.counts_ = Counts(counts_.row(b, 0, 0), {1, heads(), q_len()}, counts_.strides());
    return one;
  }

  // Throws std::invalid_argument unless the lists serve this shape and name keys alone.
  void check(Index batch_size, Index kv_heads, Index queries, Index keys) const {
    if (batch() != 1) detail::require_equal("the lists' batch", batch(), "q's batch", batch_size);
    if (heads() != 1) detail::require_equal("the lists' heads", heads(), "kv_heads", kv_heads);
    detail::require_equal("the lists' q_len", q_len(), "q_len", queries);
    const Index entries = ceil_div(keys, block_);
    for (Index b = 0; b < batch(); ++b)
      for (Index head = 0; head < heads(); ++head)
        for (Index i = 0; i < q_len(); ++i) check_list(b, head, i, entries);
  }

 private:
  // Entries as bits, in groups.
  class Bits {
   public:
    static constexpr Index size = Index{1} << 16;

    // Entries [first, first + count) of the list.
    Bits(std::span<const Position> list, Index first, Index count) : first_(first), count_(count) {
      std::fill_n(words_, ceil_div(count, 64), std::uint64_t{0});
      for (const Position x : list)
        if (covers(x)) words_[(x - first) / 64] |= std::uint64_t{1} << ((x - first) % 64);
    }
    bool covers(Position x) const { return x >= first_ && x < first_ + count_; }
    bool has(Position x) const {
      return (words_[(x - first_) / 64] >> ((x - first_) % 64) & 1u) != 0;
    }
    Index count() const {
      Index sum = 0;
      for (Index w = 0; w < ceil_div(count_, 64); ++w) sum += std::popcount(words_[w]);
      return sum;
    }

   private:
    Index first_, count_;
    std::uint64_t words_[size / 64];
  };
  // One past the largest entry.
  static Index end_of(std::span<const Position> list) {
    Index end = 0;
    for (const Position x : list) end = std::max(end, Index{x} + 1);
    return end;
  }
  static Index different(std::span<const Position> list) {
    const Index end = end_of(list);
    Index sum = 0;
    for (Index first = 0; first < end; first += Bits::size)
      sum += Bits(list, first, std::min(Bits::size, end - first)).count();
    return sum;
  }
  static bool same_set(std::span<const Position> a, std::span<const Position> b) {
    const Index end = end_of(a);
    if (end_of(b) != end) return false;
    for (Index first = 0; first < end; first += Bits::size) {
      const Index count = std::min(Bits::size, end - first);
      const Bits of_a(a, first, count);
      for (const Position x : b)
        if (of_a.covers(x) && !of_a.has(x)) return false;
      if (Bits(b, first, count).count() != of_a.count()) return false;
    }
    return true;
  }

  void check_list(Index b, Index head, Index query, Index entries) const {
    if (!counts_.absent()) {
      const Index count = counts_.at(b, head, query);
      if (count < 0) fail_at(b, head, query, "the count", count, "but must be at least", "", 0);
      if (count > most())
        fail_at(b, head, query, "the count", count, "but must be at most", "the lists' k", most());
    }
    const std::span<const Position> list = this->list(b, head, query);
    bool wrong = false;
    for (const Position x : list) wrong |= x < -1 || x >= entries;
    if (!wrong) [[likely]]
      return;
    for (const Position x : list) {
      if (x < -1) fail_at(b, head, query, "an entry", x, "but must be at least", "", -1);
      if (x >= entries)
        fail_at(b, head, query, "an entry", x, "but must be below",
                block_ == 1 ? "the past's and the chunk's keys" : "the number of blocks", entries);
    }
  }
  [[noreturn, gnu::cold, gnu::noinline]] static void fail_at(Index b, Index head, Index query,
                                                             const char* what, Index value,
                                                             const char* relation,
                                                             const char* limit, Index limit_value) {
    char name[128];
    std::snprintf(name, sizeof name, "%s of the list of batch %td, KV head %td, query %td", what, b,
                  head, query);
    detail::fail(name, value, relation, limit, limit_value);
  }

  Entries entries_;
  Counts counts_;
  Index block_ = 1;
  detail::MakeListedWork make_work_ = nullptr;
  bool present_ = false;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
