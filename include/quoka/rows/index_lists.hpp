// IndexLists: sparse attention indices, a list of keys for each query, as a model's own indexer
// writes them: those of DeepSeek and GLM, blocks of MiniMax and Qwen.
//
//   IndexLists(entries)                  [batch or 1, kv_heads or 1, q_len, k], keys
//   IndexLists(entries, 64)              blocks: entry e is keys [64 e, 64 (e + 1)); the last block
//                                        may be shorter
//   IndexLists(entries, 1, counts)       the first counts[b, head, i] entries of a list count
//
// Keys are numbered like a mask's columns: the past's rows, then the chunk's. A list is a set: its
// order has no effect, and a key that is listed twice is attended to once. An entry of -1 is
// padding, as in GPU kernels. Causality, the sliding window and a mask apply as well. If a query
// may see no key of its list, its row is zeros.
//
// A view: it does not own the entries, whose memory is read in each call. A header-only unit that
// makes lists includes attention/attention.hpp as well, or quoka.hpp.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/rows/tensor_view.hpp>

#include <cstdint>
#include <cstdio>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

struct AttendItem;  // attention/plan.hpp
// Attends to an item, with memory that it takes from a worker's arena. From an empty one it only
// adds up sizes.
using Driver = void (*)(const AttendItem& item, Arena& arena);
// Lists, and masks that are read as lists, bring their driver along. So a header-only unit without
// either does not compile it. In header-only use attend_lists.hpp completes ListWork.
struct ListWork;
#if !QUOKA_DEFINES
struct ListWork {
  static void attend(const AttendItem& item, Arena& arena);
};
#endif

}  // namespace detail

class IndexLists {
 public:
  using Entries = TensorView<const Position>;    // [batch or 1, kv_heads or 1, q_len, k]
  using Counts = TensorView<const Position, 3>;  // [batch or 1, kv_heads or 1, q_len]

  // No lists: every key counts.
  IndexLists() = default;
  // `block` keys for each entry; counts absent: all k entries of each list count. Throws
  // std::invalid_argument for a block below 1, and for counts of another shape than the lists.
  template <class Work = detail::ListWork>
  explicit IndexLists(const Entries& entries, Index block = 1, const Counts& counts = {})
      : entries_(entries), counts_(counts), block_(block), driver_(Work::attend) {
    detail::require_size("the keys of a block", block, 1);
    if (counts.absent()) return;
    detail::require_equal("the counts' batch", counts.batch(), "the lists' batch", batch());
    detail::require_equal("the counts' heads", counts.heads(), "the lists' heads", heads());
    detail::require_equal("the counts' len", counts.len(), "the lists' q_len", q_len());
  }

  bool absent() const { return driver_ == nullptr; }   // no lists: every key counts
  Index batch() const { return entries_.batch(); }     // 1: the same for all sequences
  Index heads() const { return entries_.heads(); }     // 1: the same for all KV heads
  Index q_len() const { return entries_.len(); }       // queries
  Index most() const { return entries_.dim(); }        // entries of a list, at most
  Index block() const { return block_; }               // keys of an entry
  const Entries& entries() const { return entries_; }  // as given
  const Counts& counts() const { return counts_; }     // as given
  detail::Driver driver() const { return driver_; }    // the library's own

  // The entries of one query: of KV head `kv_head` of sequence b.
  std::span<const Position> list(Index b, Index kv_head, Index query) const {
    const Index which_b = batch() > 1 ? b : 0, which_head = heads() > 1 ? kv_head : 0;
    const Index count = counts_.absent() ? most() : Index{counts_.at(which_b, which_head, query)};
    return {entries_.row(which_b, which_head, query), static_cast<std::size_t>(count)};
  }
  // The lists of sequence b alone. Throws std::invalid_argument if they have no sequence b.
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
  detail::Driver driver_ = nullptr;  // null: absent
};

}  // namespace QUOKA_ABI
}  // namespace quoka
