// Attention of one layer in an engine's terms: queries of several sequences over one cache, and a
// mask with the cells that each of them sees.
//
//   mask ─▶ segments ──────▶ chunks ─▶ selection ─▶ attention
//           mask_segments.hpp          AnySelector     all of it one ragged batch
//
// In exact mode a segment is one call. With a selection, a causal segment is cut into chunks that
// end at multiples of the chunk length in their sequence. So the borders do not depend on how the
// engine cut its batch, nor on other sequences. A chunk's past is all cells that its queries see,
// without its own; the selector keeps `budget` of them. Fewer than 64 queries of a sequence (a
// draft of speculative decoding, the end of a prompt) attend to everything, as single ones do,
// unless MaskedOptions::decode is set. A row with biases is attended to with the mask, exactly; the
// other rows of its chunk are computed as without it. A few such rows are written twice; a long run
// of them ends a chunk. In a sparse segment the mask is read as lists (rows/index_lists.hpp).
// Always exact: sliding and bidirectional segments, biased rows, a mask for each head.
//
// A chunk is also exact if selecting would take longer (MassScorer::pays).
//
//   quoka::MaskedAttention layer;                            // of one engine context
//   layer.run(streams, {.selection = MassOptions::recommended()}, attention_options, threads);
//
// Between calls it keeps nothing of a cache. K, V and the mask are read in each call. So cells may
// be overwritten, shifted, removed and copied, and several streams may share a cache. What an
// engine knows of the cells, it hands in as CacheCells. A call that threw may be repeated.
#pragma once

#include <quoka/attention/attention.hpp>
#include <quoka/engine/mask_segments.hpp>
#include <quoka/kernels/kernels.hpp>
#include <quoka/select/any_selector.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <numeric>
#include <optional>
#include <span>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {

// What an engine knows of the cells of one layer in one stream's cache, from call to call. Engines
// overwrite, shift, remove and load cells without notice to a backend, so that it has to look for
// itself: examples/bindings/ggml/known_cells.hpp does so by hashes. One call at a time.
class CacheCells {
 public:
  virtual ~CacheCells() = default;
  // Looks at all cells of k [1, kv_heads, cells, head_dim] before something is selected among them.
  // sketch: one is wanted. If it throws, the next one finds what this one would have.
  virtual void refresh(const Rows& k, bool sketch, ExecutorRef executor) = 0;
  // The next refresh reports the changes of the last one again: the call that it was for has failed
  // and will be repeated.
  virtual void find_again() = 0;
  // Of the keys as they were at the last refresh, to be scored in their place; null: none.
  virtual const KeySketch* sketch() const = 0;
  // By cell: 1 where it changed between the last two refreshes. Cells beyond the end did not.
  virtual std::span<const std::uint8_t> changed() const = 0;
};

// Queries, and the cells they may see.
struct MaskedStream {
  Rows q = {};     // [1, q_heads, n_q, head_dim]
  Rows k = {};     // [1, kv_heads, cells, head_dim]: the cache, its cells in any order; any layout
  Rows v = {};     // [1, kv_heads, cells, v_dim]
  Rows mask = {};  // half [1, 1 or q_heads, n_q, cells], added to the logits; empty: all see all
  OutputRows out;  // [1, q_heads, n_q, v_dim]
  CacheCells* known = nullptr;  // of k; null: keys are scored as they lie
};

// Options of selection.
struct MaskedOptions {
  std::optional<SelectionOptions> selection = {};  // absent: exact
  Index chunk = 128;                               // queries that select together
  Index min_past = 0;                              // fewer cells before a chunk: exact
  // Select for single queries, too, and for few of a sequence: fewer than 64, or than `chunk` where
  // that is less.
  bool decode = false;
  bool sketch = true;  // score one of the keys, if they are known, where that is faster
};

// The result of a call.
enum class MaskedOutcome {
  selected,        // at least one chunk read less than its past
  asked_exact,     // no selection asked for
  masks,           // no mask, one for each head, or factors for it
  sliding_window,  // of at least one segment
  bidirectional,   // tokens that see each other, or copies of a sequence side by side
  biases,          // a mask of other numbers than 0 and what hides
  all_kept,        // the budget holds all, the past is below min_past, or all takes less
  single_queries,  // or fewer than 64, and no decode
};

// In words: "selected", or "exact: " and why.
inline const char* describe(MaskedOutcome outcome) {
  constexpr const char* words[] = {"selected",
                                   "exact: no selection asked for",
                                   "exact: no mask, one for each head, or ALiBi",
                                   "exact: a sliding window",
                                   "exact: tokens that see each other, or copies of a sequence",
                                   "exact: a mask of other numbers than 0 and what hides",
                                   "exact: budget holds all, below min_past, or it takes less",
                                   "exact: single queries, or few"};
  return words[static_cast<int>(outcome)];
}

// A report of a call.
struct MaskedReport {
  MaskedOutcome outcome = MaskedOutcome::asked_exact;  // of its streams together
  Index queries = 0, sequences = 0;                    // a sequence: a segment of the mask
  bool sliding_window = false;                         // of a segment
  // A segment was attended to by its part of the mask: `seen` counts hidden cells, too.
  bool by_mask = false;
  // Keys of the past, and of the chunk, summed over queries. Chunks are MaskedOptions::chunk long,
  // whether they select or not: calls of the same queries have the same sums, and layers can be
  // compared.
  double seen = 0, attended = 0, own = 0;
  // Queries of chunks that selected by shares of attention, and the sum over them of the share that
  // their chunk's voters keep, a mean over heads (Selection::kept_shares()).
  double by_shares = 0, kept = 0;
  double mask = 0, select = 0, attend = 0;  // seconds
};

namespace detail {

// Moves the cell that a chunk's first query wrote to the end of cells[0, seen), all that it sees.
// The mask does not say which it is: all of the chunk see it. It must be attended to, selected or
// not. Where a chunk's cells lie side by side it is the last of them. Elsewhere (after removals and
// shifts) it is the nearest changed cell before the chunk's next cell. If none has changed, it is
// the nearest cell. A wrong answer costs one query's own key.
inline void find_own(std::span<const std::uint8_t> changed_cells, std::vector<Position>& cells,
                     Index seen) {
  if (seen < 2) return;
  const auto begin = cells.begin(), end = begin + seen;
  const auto changed = [&](Position cell) {
    return static_cast<std::size_t>(cell) < changed_cells.size() &&
           changed_cells[static_cast<std::size_t>(cell)] != 0;
  };
  const auto nearest = [&](bool among_changed) {  // before the next cell; else the last of all
    auto found = end, last = end;
    for (auto cell = begin; cell != end; ++cell) {
      if (among_changed && !changed(*cell)) continue;
      last = cell;
      if (end != cells.end() && *cell < *end) found = cell;
    }
    return found != end ? found : last;
  };
  auto own = nearest(true);
  if (own == end) own = nearest(false);
  std::rotate(own, own + 1, end);
}

}  // namespace detail

// One call at a time.
class MaskedAttention {
 public:
  // Writes each stream's out, [1, q_heads, n_q, v_dim]. Its mask alone says what a query sees:
  // `asked`'s own mask, q_offset and causal are not used. Where waking other threads would take
  // longer than the work, the calling thread does it alone. Throws std::invalid_argument, with the
  // number of the stream: as attention() does, for a chunk below 1, and for lists, a sliding window
  // and alibi_slopes, before anything is read; as select() does, before anything is written.
  MaskedReport run(std::span<const MaskedStream> streams, const MaskedOptions& masked,
                   const AttentionOptions& asked, ExecutorRef all_workers) {
    const SerialExecutor alone;
    const ExecutorRef executor = worth_waking(streams) ? all_workers : ExecutorRef(alone);
    detail::require_at_least("chunk", masked.chunk, 1);
    const AttentionOptions options = options_of_calls(asked);
    check(streams, options);
    Clock clock;
    MaskedReport report{.mask = 0};
    calls_.clear(), selecting_.clear(), read_.clear(), biased_.clear(), joined_.clear();
    refreshes_.clear();
    const bool can_select = std::all_of(streams.begin(), streams.end(), [&](const auto& stream) {
      return one_mask(stream, options);
    });
    const bool may_select = masked.selection.has_value() && can_select;
    read_masks(streams, masked, options, may_select, report, executor);
    report.mask += clock.lap();
    if (may_select) plan_refreshes(streams, masked, options);
    try {
      refresh_cells(executor);
      report.select += clock.lap();
      for (std::size_t i = 0; i < streams.size(); ++i)
        for (MaskSegment& segment : read_[i].segments)
          add(streams[i], masked, may_select, read_[i], segment);
      // Checked now, because their call comes after others have written.
      for (const AttentionSequence& row : biased_) detail::check_attention(row, options);
      report.mask += clock.lap();
      select(masked, options, report, executor);
      report.select += clock.lap();
      attention(calls_, options, executor, workspace_);
      if (!biased_.empty()) attention(biased_, options, executor, workspace_);
    } catch (...) {
      for (const Refresh& refresh : refreshes_)
        if (refresh.begun) refresh.known->find_again();
      throw;
    }
    report.attend = clock.lap();
    report.outcome = !masked.selection ? MaskedOutcome::asked_exact
                     : !can_select     ? MaskedOutcome::masks
                                       : outcome(masked, report);
    return report;
  }

 private:
  static constexpr Index least_that_select = 64;  // queries, or a chunk where that is less
  static constexpr Index by_mask_rows = 128;      // of a mask: they share the cells they read
  // This many biased rows side by side end a chunk. Fewer are attended to twice: with the chunk,
  // whose rows all read the same packed keys, and then by the mask.
  static constexpr Index long_stretch = 16;
  // Fewer queries do not pay for hashing all cells: keys are scored as they lie in the cache.
  static constexpr Index sketching_queries = 32;

  class Clock {
   public:
    double lap() {
      const auto now = std::chrono::steady_clock::now();
      return std::chrono::duration<double>(now - std::exchange(last_, now)).count();
    }

   private:
    std::chrono::steady_clock::time_point last_ = std::chrono::steady_clock::now();
  };
  struct Read {  // of a stream
    std::vector<MaskSegment> segments = {};
    const CacheCells* known = nullptr;  // if they were refreshed
  };
  struct Refresh {  // of a cache: the longest of the streams' views
    Rows k;
    bool sketch;
    CacheCells* known;
    bool begun = false;
  };
  struct SelectingCall {
    std::size_t call;
    Index cells;   // of its stream
    Index biased;  // queries that attend to all that they see
    const KeySketch* sketch;
  };

  // Cells lie in any order, so nobody knows their tokens' positions.
  static AttentionOptions options_of_calls(AttentionOptions options) {
    if (!options.lists.absent())
      detail::fail_because("there are lists of each query's keys: a mask says what a stream sees");
    if (options.sliding_window > 0)
      detail::fail("sliding_window", options.sliding_window,
                   "but a mask says what a stream sees: it must be", "", 0);
    if (!options.alibi_slopes.empty())
      detail::fail_because(
          "there are alibi_slopes, which count positions, and those of cells are not known: put "
          "distances in the mask, and the slopes in mask_factors");
    options.mask = {}, options.q_offset = {}, options.causal = true;
    return options;
  }
  // The checks of attention() to the whole caches.
  void check(std::span<const MaskedStream> streams, const AttentionOptions& options) {
    whole_.clear();
    for (const MaskedStream& x : streams) {
      if (x.q.len() == 0) continue;
      detail::name_part("stream", &x - streams.data(), [&] {
        whole_.push_back({.q = x.q,
                          .past = {x.k, x.v},
                          .out = x.out,
                          .mask = x.mask.empty() ? Mask() : Mask(x.mask),
                          .q_offset = x.k.len()});  // a past without a chunk is meant
        detail::check_attention(whole_.back(), options);
      });
    }
    detail::check_attention(whole_, options, workspace_);  // outputs and other streams' inputs
  }
  // 100 us of multiply-adds, or of reading.
  static bool worth_waking(std::span<const MaskedStream> streams) {
    double reads = 0, adds = 0;
    for (const MaskedStream& x : streams) {
      const auto keys = static_cast<double>(x.k.len() * x.k.dim());
      reads += keys * static_cast<double>(x.k.heads());
      adds += keys * static_cast<double>(x.q.heads() * x.q.len());
    }
    return std::max(4 * reads / 10e9, 4 * adds / 50e9) >= 100e-6;
  }
  static bool one_mask(const MaskedStream& stream, const AttentionOptions& options) {
    return stream.mask.heads() == 1 && !stream.mask.empty() && options.mask_factors.empty();
  }
  // Does the segment attend as single queries do?
  static bool is_few(const MaskedOptions& masked, const MaskSegment& segment) {
    return segment.count < std::max<Index>(2, std::min(masked.chunk, least_that_select));
  }
  static bool selects(const MaskedOptions& masked, const MaskSegment& segment) {
    return segment.causal() && (masked.decode || !is_few(masked, segment));
  }
  // The rows in the order of a list: a slice where they lie so. A cache that is a list itself has
  // its joined to this one.
  Rows rows_at(const Rows& all, std::span<const Position> cells, bool ordered) {
    if (cells.empty()) return all.slice(0, 0);
    if (ordered) return all.slice(cells.front(), std::ssize(cells));
    return all.map().cells == nullptr ? all.gathered(cells)
                                      : all.gathered(cells, joined_.emplace_back());
  }

  // The segments of all streams.
  void read_masks(std::span<const MaskedStream> streams, const MaskedOptions& masked,
                  const AttentionOptions& options, bool may_select, MaskedReport& report,
                  ExecutorRef executor) {
    for (const MaskedStream& stream : streams) {
      Read& read = read_.emplace_back();
      if (!stream.mask.empty()) {
        detail::require_equal("the mask's queries", stream.mask.len(), "the stream's",
                              stream.q.len());
        detail::require_equal("the mask's cells", stream.mask.dim(), "the cache's", stream.k.len());
      }
      if (one_mask(stream, options))
        read.segments = read_mask_segments(stream.mask, executor);
      else
        read.segments = {{.begin = 0, .count = stream.q.len(), .kind = MaskKind::bidirectional}};
      // Sparse segments are not joined if single queries select, since each selects among its own
      // cells. Nor if the heads of one query fill a panel, since queries then share no work.
      if (!(may_select && masked.decode) &&
          stream.q.heads() <
              detail::kernel_sizes().panel_rows * std::max<Index>(stream.k.heads(), 1))
        join_sparse_segments(read.segments, stream.k.len());
      report.queries += stream.q.len(), report.sequences += std::ssize(read.segments);
      for (const MaskSegment& segment : read.segments)
        report.sliding_window = report.sliding_window || segment.kind == MaskKind::sliding,
        report.by_mask = report.by_mask || !segment.causal();
    }
  }
  void refresh_cells(ExecutorRef executor) {
    for (Refresh& refresh : refreshes_) {
      refresh.begun = true;
      refresh.known->refresh(refresh.k, refresh.sketch, executor);
    }
  }

  // Before something is selected: if keys will be scored by a sketch, or if the cell of a chunk's
  // first query has to be found. A cache is refreshed once for all streams that read it.
  void plan_refreshes(std::span<const MaskedStream> streams, const MaskedOptions& masked,
                      const LogitOptions& logits) {
    for (std::size_t i = 0; i < streams.size();
         ++i)  // cells of a list may have another order in each call
      if (streams[i].known != nullptr && streams[i].k.map().cells == nullptr)
        plan_refresh(streams[i], masked, logits, read_[i]);
  }
  void plan_refresh(const MaskedStream& stream, const MaskedOptions& masked,
                    const LogitOptions& logits, Read& read) {
    Index queries = 0;
    bool scattered = false;
    for (const MaskSegment& segment : read.segments) {
      // past: cells before the last chunk.
      const Index first = segment.first_sees() - 1, last = first + segment.count - 1;
      const Index past = std::max(first, last / masked.chunk * masked.chunk);
      if (!selects(masked, segment) || past < std::max<Index>(1, masked.min_past) ||
          keeps_all(*masked.selection, past))
        continue;
      queries += segment.count, scattered = scattered || !segment.in_order();
    }
    // A soft-cap needs scores in float. A cache that is a list needs them, too, because its cells
    // may lie in another order in the next call.
    const bool sketch =
        masked.sketch && stream.k.map().cells == nullptr && queries >= sketching_queries &&
        (logits.softcap == 0.0f || std::holds_alternative<QuokaOptions>(*masked.selection));
    if (!sketch && !scattered) return;
    const Rows& k = stream.k;
    read.known = stream.known;
    const auto refresh =
        std::find_if(refreshes_.begin(), refreshes_.end(),
                     [&](const Refresh& other) { return other.known == stream.known; });
    if (refresh == refreshes_.end()) return void(refreshes_.push_back({k, sketch, stream.known}));
    if (refresh->k.data() != k.data() || !refresh->k.stored_as(k) ||
        refresh->k.strides()[1] != k.strides()[1] || refresh->k.strides()[2] != k.strides()[2] ||
        refresh->k.heads() != k.heads() || refresh->k.dim() != k.dim())
      detail::fail_because(
          "the keys of two streams have the same CacheCells, but are of other memory, formats, "
          "sizes or strides");
    if (k.len() > refresh->k.len()) refresh->k = k;
    refresh->sketch = refresh->sketch || sketch;
  }

  // A segment's calls.
  void add(const MaskedStream& stream, const MaskedOptions& masked, bool may_select,
           const Read& read, MaskSegment& segment) {
    if (!segment.causal()) {
      const std::size_t before = calls_.size();
      add_by_mask(stream, segment.begin, segment.count, calls_, 0, stream.k.len());
      for (std::size_t i = before; i < calls_.size() && segment.kind == MaskKind::sparse; ++i)
        calls_[i].mask = calls_[i].mask.as_lists();
      return;
    }
    const Index seen = segment.first_sees();
    const bool ordered = segment.in_order();
    if (may_select && !ordered)
      detail::find_own(
          read.known != nullptr ? read.known->changed() : std::span<const std::uint8_t>(),
          segment.cells, seen);
    const std::span<const Position> cells = segment.cells;
    // Stretch `of` by the mask. Adjacent cells are a slice of the cache, read in the order of
    // memory.
    const auto add_biased = [&](const MaskStretch& of, std::vector<AttentionSequence>& to) {
      const Index most = seen + of.begin + of.count - 1;
      const bool slice = ordered && seen > 0;
      add_by_mask(stream, segment.begin + of.begin, of.count, to, slice ? cells.front() : Index{0},
                  slice ? most : stream.k.len());
    };
    auto biased = segment.biased.begin();
    for (Index i = 0, count = 0; i < segment.count; i += count) {
      // A query that sees nothing at all has no cell of its own.
      const Index past = std::max<Index>(seen + i - 1, 0);
      count = segment.count - i;
      if (may_select) count = std::min(count, masked.chunk - past % masked.chunk);
      Index alone = 0;  // biased queries of this call
      for (; biased != segment.biased.end() && biased->begin < i + count; ++biased) {
        if (is_long(*biased, segment)) {
          count = biased->begin - i;
          break;
        }
        add_biased(*biased, biased_);
        alone += biased->count;
      }
      if (count == 0) {
        count = biased->count;
        add_biased(*biased, calls_);
        ++biased;
        continue;
      }
      const auto before = cells.first(static_cast<std::size_t>(past));
      const auto own = cells.subspan(static_cast<std::size_t>(past))
                           .first(static_cast<std::size_t>(seen > 0 ? count : 0));
      if (may_select && selects(masked, segment) && past >= masked.min_past)
        selecting_.push_back(
            {calls_.size(), stream.k.len(), std::min(alone, count),
             masked.sketch && read.known != nullptr ? read.known->sketch() : nullptr});
      calls_.push_back(
          {.q = stream.q.slice(segment.begin + i, count),
           .past = {rows_at(stream.k, before, ordered), rows_at(stream.v, before, ordered)},
           .chunk = {rows_at(stream.k, own, ordered), rows_at(stream.v, own, ordered)},
           .out = stream.out.slice(segment.begin + i, count),
           .q_offset = past});  // a past without a chunk is meant
    }
  }
  static bool is_long(const MaskStretch& biased, const MaskSegment& segment) {
    return biased.count >= long_stretch || biased.count == segment.count;
  }
  // Queries of a stream, over what their rows of the mask show them of cells [first_cell,
  // first_cell + cells).
  static void add_by_mask(const MaskedStream& stream, Index begin, Index count,
                          std::vector<AttentionSequence>& to, Index first_cell, Index cells) {
    const Rows k = stream.k.slice(first_cell, cells), v = stream.v.slice(first_cell, cells);
    for (Index i = 0; i < count; i += by_mask_rows) {
      const Index first = begin + i, n = std::min(by_mask_rows, count - i);
      const auto columns = [&](const Rows& mask) {
        return Mask(Rows(mask.data() + first_cell * mask.format().element_bytes, mask.format(),
                         {mask.batch(), mask.heads(), mask.len(), cells}, mask.strides()));
      };
      to.push_back({.q = stream.q.slice(first, n),
                    .past = {k, v},
                    .chunk = {},
                    .out = stream.out.slice(first, n),
                    .mask = stream.mask.empty() ? Mask() : columns(stream.mask.slice(first, n)),
                    .q_offset = k.len()});  // a past without a chunk is meant
    }
  }
  // Adds the call's keys to `seen` and `own`.
  static void count_keys(const AttentionSequence& call, Index chunk, MaskedReport& report) {
    if (call.chunk.k.len() == 0) {
      report.seen += static_cast<double>(call.q.len() * call.past.k.len());
      return;
    }
    const Index end = call.past.k.len() + call.q.len();
    for (Index past = call.past.k.len(), count = 0; past < end; past += count) {
      count = std::min(end - past, chunk - past % chunk);
      report.seen += static_cast<double>(count * past);
      report.own += static_cast<double>(count * (count + 1)) / 2;
    }
  }
  void select(const MaskedOptions& masked, const AttentionOptions& options, MaskedReport& report,
              ExecutorRef executor) {
    for (const AttentionSequence& call : calls_) count_keys(call, masked.chunk, report);
    report.attended = report.seen;
    if (selecting_.empty()) return;
    const AnySelector selector(*masked.selection);
    keep_.resize(std::max(keep_.size(), selecting_.size()));
    auto selection = keep_.begin();
    for (const SelectingCall& one : selecting_) {
      AttentionSequence& call = calls_[one.call];
      state_.truncate(0);  // keys of no other call
      SelectorInput input{.q = call.q,
                          .k = call.past.k,
                          .logits = options,
                          .capacity = one.cells,
                          .sketch = one.sketch,
                          .chunk_k = call.chunk.k,
                          .attends = true};
      input.in_int8 = multiplies_int8(options.arithmetic, input.group() * call.q.len());
      selector.select(input, state_, *selection, executor);
      call.past.selection = &*selection;
      count_kept(*selection, static_cast<double>(call.q.len()), report);
      report.attended -= static_cast<double>(call.q.len() - one.biased) *
                         (static_cast<double>(call.past.k.len()) -
                          static_cast<double>(selection->sum_of_counts()) /
                              static_cast<double>(selection->heads()));
      ++selection;
    }
  }

  static void count_kept(const Selection& selection, double queries, MaskedReport& report) {
    const std::span<const float> shares = selection.kept_shares();
    if (shares.empty()) return;
    report.by_shares += queries;
    report.kept += queries * std::accumulate(shares.begin(), shares.end(), 0.0) /
                   static_cast<double>(shares.size());
  }

  MaskedOutcome outcome(const MaskedOptions& masked, const MaskedReport& report) const {
    if (report.attended < report.seen) return MaskedOutcome::selected;
    if (report.sliding_window) return MaskedOutcome::sliding_window;
    bool several = masked.decode, biases = false;
    for (const Read& read : read_)
      for (const MaskSegment& segment : read.segments) {
        if (segment.kind == MaskKind::sparse) continue;  // single queries
        if (!segment.causal()) return MaskedOutcome::bidirectional;
        several = several || !is_few(masked, segment);
        for (const MaskStretch& biased : segment.biased)
          biases = biases || is_long(biased, segment);
      }
    return biases    ? MaskedOutcome::biases
           : several ? MaskedOutcome::all_kept
                     : MaskedOutcome::single_queries;
  }

  std::vector<Refresh> refreshes_;            // of a call
  std::deque<Read> read_;                     // calls refer to their cells
  std::deque<std::vector<Position>> joined_;  // and to these, of caches that are lists
  std::vector<AttentionSequence> whole_;      // streams, to be checked
  std::vector<AttentionSequence> calls_;
  std::vector<AttentionSequence> biased_;  // queries of these once more, by the mask
  std::vector<SelectingCall> selecting_;   // those that select
  std::deque<Selection> keep_;             // for each of these
  AnySelector::State state_;               // scratch memory: nothing in it outlives a call
  AttentionWorkspace workspace_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
