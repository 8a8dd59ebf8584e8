// Attention of one layer as an engine asks for it: the queries of several sequences over one cache, and
// a mask that says which cells each of them sees.
//
//   mask ─▶ pieces ──────▶ chunks ─▶ selection ─▶ attention
//           mask_pieces.hpp          QuokaSelector   all of it one ragged batch
//
// Exact: a piece is one call. Where a selection is asked for, a causal piece is cut into chunks, which end
// where their sequence is a multiple of the chunk long, wherever the engine cut it: other sequences of a
// batch move no other border. What all of a chunk's queries see, without the chunk's own cells, is its
// past; the selector keeps `budget` of it.
// Exact in any case: windows, tokens that are seen both ways, rows of a mask with other numbers than 0 and
// minus infinity, masks for each head.
//
//   quoka::MaskedAttention layer;                            // of one engine context
//   layer.run(streams, {.selection = QuokaOptions::recommended(group)}, attention_options, threads);
//
// What is kept between calls, unless the mode is exact: KnownCells of each cache, and nothing that is
// believed unseen. K, V and the mask are read in each call. So cells may be overwritten, shifted,
// removed and copied, and several streams may share a cache. A call that threw may be made again.
#pragma once

#include <quoka/attention/attention.hpp>
#include <quoka/engine/known_cells.hpp>
#include <quoka/engine/mask_pieces.hpp>
#include <quoka/select/quoka.hpp>

#include <chrono>
#include <deque>
#include <map>
#include <optional>

namespace quoka {
inline namespace QUOKA_ABI {

// Queries, and the cells they may see.
struct MaskedStream {
  Rows q = {};       // [1, q_heads, n_q, head_dim]
  Rows k = {};       // [1, kv_heads, cells, head_dim]: the cache, its cells in any order
  Rows v = {};       // [1, kv_heads, cells, v_dim]
  Rows mask = {};    // half [1, 1 or q_heads, n_q, cells], added to the logits; empty: all see all
  OutputRows out;    // [1, q_heads, n_q, v_dim]
  bool kept = true;  // K lies where it will in the next call: a sketch of it pays
};

// What selects, and when.
struct MaskedOptions {
  std::optional<QuokaOptions> selection = {};  // absent: exact
  Index chunk = 128;                           // queries that select together
  Index min_past = 0;                          // fewer cells before a chunk: exact
  bool decode = false;                         // select for single queries, too
  bool sketch = true;                          // keep one of the keys where that is faster
};

// What a call came to.
enum class MaskedOutcome {
  selected,        // at least one chunk read less than its past
  asked_exact,     // no selection asked for
  masks,           // no mask, one for each head, or factors for it
  both_ways,       // sliding windows, or tokens that are seen both ways
  all_kept,        // the budget holds all, or the past is less than min_past
  single_queries,  // and no decode
};

// In words: "selected", or "exact: " and why.
inline const char* describe(MaskedOutcome outcome) {
  constexpr const char* words[] = {"selected",
                                   "exact: no selection asked for",
                                   "exact: no mask, one for each head, or ALiBi",
                                   "exact: a sliding window, or tokens that are seen both ways",
                                   "exact: the budget holds all, or less than min_past",
                                   "exact: single queries"};
  return words[static_cast<int>(outcome)];
}

// What a call did.
struct MaskedReport {
  MaskedOutcome outcome = MaskedOutcome::asked_exact;  // of its streams together
  Index queries = 0, sequences = 0;                    // a sequence: a piece of the mask
  double seen = 0, attended = 0,
         own = 0;  // keys of the past, and of the chunk, summed over queries
  double mask = 0, select = 0, attend = 0;  // seconds
};

// One call at a time.
class MaskedAttention {
 public:
  // Writes each stream's out, [1, q_heads, n_q, v_dim]. options' mask and query_position are the streams'.
  // Where waking other threads would take longer than the work, the calling thread does it alone. Throws
  // std::invalid_argument as select() and attention() do, before anything is written, and for a chunk below 1.
  MaskedReport run(std::span<const MaskedStream> streams, const MaskedOptions& masked,
                   const AttentionOptions& options, ExecutorRef all_workers) {
    const SerialExecutor alone;
    const ExecutorRef executor = worth_waking(streams) ? all_workers : ExecutorRef(alone);
    detail::require_at_least("chunk", masked.chunk, 1);
    Clock clock;
    MaskedReport report{.mask = 0};
    calls_.clear(), choices_.clear(), read_.clear();
    if (caches_.size() > most_caches) caches_.clear();
    const bool can_select = std::all_of(streams.begin(), streams.end(), [&](const auto& stream) {
      return one_mask(stream, options);
    });
    const bool selects = masked.selection.has_value() && can_select;
    for (const MaskedStream& stream : streams) {
      Read& read = read_.emplace_back();
      if (one_mask(stream, options))
        read.pieces = read_mask_pieces(stream.mask, executor);
      else
        read.pieces = {{0, stream.q.len(), false, {}}};
      report.queries += stream.q.len(), report.sequences += std::ssize(read.pieces);
    }
    report.mask += clock.lap();
    looks_.clear();
    if (selects) plan_looks(streams, masked);
    try {
      for (Look& look : looks_) {
        look.begun = true;
        look.known->look(look.k, look.sketch, executor);
      }
      report.select += clock.lap();
      for (std::size_t i = 0; i < streams.size(); ++i)
        for (MaskPiece& piece : read_[i].pieces) add(streams[i], masked, selects, read_[i], piece);
      report.mask += clock.lap();
      select(masked, options.scale, report, executor);
      report.select += clock.lap();
      attention(calls_, options, executor, workspace_);
    } catch (...) {
      for (const Look& look : looks_)
        if (look.begun) look.known->find_again();
      throw;
    }
    report.attend = clock.lap();
    report.outcome = !masked.selection ? MaskedOutcome::asked_exact
                     : !can_select     ? MaskedOutcome::masks
                                       : outcome(masked, report);
    return report;
  }

 private:
  static constexpr Index by_mask_rows = 128;  // of a mask: they share the cells they read
  // Fewer queries do not pay for a look at all cells: keys are scored as they lie in the cache.
  static constexpr Index sketching_queries = 32;
  static constexpr std::size_t most_caches = 4096;  // then all are forgotten

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
    std::vector<MaskPiece> pieces = {};
    const KnownCells* known = nullptr;
  };
  struct Look {  // at a cache: the longest of the streams' views
    Rows k;
    bool sketch;
    KnownCells* known;
    bool begun = false;
  };
  struct Choice {
    std::size_t call;
    Index cells;  // of its stream
    const KeySketch* sketch;
  };

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
  static bool chooses(const MaskedOptions& masked, const MaskPiece& piece) {
    return piece.causal && (piece.count > 1 || masked.decode);
  }
  // The rows in the order of a list: a slice where they lie so.
  static Rows rows_at(const Rows& all, std::span<const Position> cells, bool ordered) {
    if (cells.empty()) return all.slice(0, 0);
    return ordered ? all.slice(cells.front(), std::ssize(cells)) : all.listed(cells);
  }

  // Before something is selected: where keys will be scored by a sketch, and where the cell of a chunk's
  // first query has to be found. A cache is looked at once, whichever streams read it: a second look would find
  // that nothing has changed.
  void plan_looks(std::span<const MaskedStream> streams, const MaskedOptions& masked) {
    for (std::size_t i = 0; i < streams.size(); ++i)
      if (streams[i].kept) plan_look(streams[i], masked, read_[i]);
  }
  void plan_look(const MaskedStream& stream, const MaskedOptions& masked, Read& read) {
    const Budget budget = masked.selection->budget;
    Index queries = 0;
    bool scattered = false;
    for (const MaskPiece& piece : read.pieces) {
      // Before the last chunk.
      const Index first = piece.first_sees() - 1, last = first + piece.count - 1;
      const Index past = std::max(first, last / masked.chunk * masked.chunk);
      if (!chooses(masked, piece) || past < std::max<Index>(1, masked.min_past) ||
          budget.least(past) == past)
        continue;
      queries += piece.count, scattered = scattered || !piece.in_order();
    }
    // Rows of 8-bit codes are scored by cosine as they are; a budget by scores wants scores in float.
    const bool codes = stream.k.format().read_codes != nullptr;
    const bool sketch = masked.sketch && queries >= sketching_queries && !budget.by_scores() &&
                        (masked.selection->domain == Domain::softmax || !codes);
    if (!sketch && !scattered) return;
    const Rows& k = stream.k;
    KnownCells* const known = &caches_[k.data()];
    read.known = known;
    const auto look = std::find_if(looks_.begin(), looks_.end(),
                                   [&](const Look& other) { return other.known == known; });
    if (look == looks_.end()) return void(looks_.push_back({k, sketch, known}));
    if (!look->k.stored_as(k) || look->k.strides()[1] != k.strides()[1] ||
        look->k.strides()[2] != k.strides()[2] || look->k.heads() != k.heads() ||
        look->k.dim() != k.dim())
      detail::fail_because(
          "the keys of two streams begin at one address, but are of other formats, sizes or "
          "strides");
    if (k.len() > look->k.len()) look->k = k;
    look->sketch = look->sketch || sketch;
  }

  // A piece's calls.
  void add(const MaskedStream& stream, const MaskedOptions& masked, bool selects, const Read& read,
           MaskPiece& piece) {
    const auto call = [&](Index begin, Index count, const Past& past, const Chunk& chunk,
                          const Mask& mask) {
      calls_.push_back({.q = stream.q.slice(piece.begin + begin, count),
                        .past = past,
                        .chunk = chunk,
                        .out = stream.out.slice(piece.begin + begin, count),
                        .mask = mask});
    };
    if (!piece.causal) {
      for (Index i = 0; i < piece.count; i += by_mask_rows) {
        const Index count = std::min(by_mask_rows, piece.count - i);
        call(i, count, {stream.k, stream.v}, {},
             stream.mask.empty() ? Mask() : Mask(stream.mask.slice(piece.begin + i, count)));
      }
      return;
    }
    const Index seen = piece.first_sees();
    const bool ordered = piece.in_order();
    if (selects && !ordered)
      (read.known != nullptr ? *read.known : unknown_).find_own(piece.cells, seen);
    const std::span<const Position> cells = piece.cells;
    for (Index i = 0, count = 0; i < piece.count; i += count) {
      // A query that sees nothing at all has no cell of its own.
      const Index past = std::max<Index>(seen + i - 1, 0);
      count = piece.count - i;
      if (selects) count = std::min(count, masked.chunk - past % masked.chunk);
      const auto before = cells.first(static_cast<std::size_t>(past));
      const auto own = cells.subspan(static_cast<std::size_t>(past))
                           .first(static_cast<std::size_t>(seen > 0 ? count : 0));
      if (selects && chooses(masked, piece) && past >= masked.min_past)
        choices_.push_back({calls_.size(), stream.k.len(),
                            read.known != nullptr ? read.known->sketch() : nullptr});
      call(i, count, {rows_at(stream.k, before, ordered), rows_at(stream.v, before, ordered)},
           {rows_at(stream.k, own, ordered), rows_at(stream.v, own, ordered)}, {});
    }
  }

  void select(const MaskedOptions& masked, std::optional<float> scale, MaskedReport& report,
              ExecutorRef executor) {
    for (const AttentionSequence& call : calls_) {
      report.seen += static_cast<double>(call.q.len() * call.past.k.len());
      report.own += static_cast<double>((call.q.len() + 1) * call.chunk.k.len()) / 2;
    }
    report.attended = report.seen;
    if (choices_.empty()) return;
    const QuokaSelector selector(*masked.selection);
    keep_.resize(std::max(keep_.size(), choices_.size()));
    auto keep = keep_.begin();
    for (const Choice& choice : choices_) {
      AttentionSequence& call = calls_[choice.call];
      state_.truncate(0);  // keys of no other call
      selector.select({.q = call.q,
                       .k = call.past.k,
                       .capacity = choice.cells,
                       .scale = scale,
                       .sketch = choice.sketch},
                      state_, *keep, executor);
      call.past.keep = &*keep;
      report.attended -=
          static_cast<double>(call.q.len()) *
          (static_cast<double>(call.past.k.len()) -
           static_cast<double>(keep->total()) / static_cast<double>(call.past.k.heads()));
      ++keep;
    }
  }

  MaskedOutcome outcome(const MaskedOptions& masked, const MaskedReport& report) const {
    if (report.attended < report.seen) return MaskedOutcome::selected;
    bool several = masked.decode;
    for (const Read& read : read_)
      for (const MaskPiece& piece : read.pieces) {
        if (!piece.causal) return MaskedOutcome::both_ways;
        several = several || piece.count > 1;
      }
    return several ? MaskedOutcome::all_kept : MaskedOutcome::single_queries;
  }

  std::map<const void*, KnownCells> caches_;  // by where a layer's keys begin
  std::vector<Look> looks_;                   // of a call
  const KnownCells unknown_{};                // of a cache that was not looked at
  std::deque<Read> read_;                     // calls refer to their cells
  std::vector<AttentionSequence> calls_;
  std::vector<Choice> choices_;  // those that select
  std::deque<Selection> keep_;   // for each of these
  QuokaSelector::State state_;   // scratch memory: nothing in it outlives a call
  AttentionWorkspace workspace_;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
