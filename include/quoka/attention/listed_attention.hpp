// Attention where each query has keys of its own: lists, or what lists and a mask leave.
//
//   keys       past, then chunk, in ranges whose rows fit the cache
//   a range    what each query sees of it (seen_keys.hpp), by what that is attended to (list_plan.hpp)
//   by tiles   the union of some panels' keys through the walk over packed blocks (kernels/key_blocks.hpp), hidden
//              from the rows that do not see them
//   by rows    each query's keys, read one by one (listed_rows.hpp)
//   a panel    has sums of both, joined in the end
//
// KV heads outside, ranges next, queries inside: a range's rows are read from memory once for all queries of a task.
// By rows they are read where they lie, and asked for while others are multiplied. Copied side by side first are those
// that several queries read, where that is in 8 bits, which are widened once, or for fewer heads than four: too little
// work to hide that rows of one head lie a power of two apart in many caches and drive each other out of theirs.
//
// 2 * q_heads * keys of all lists * (head_dim + v_dim) FLOPs, and those of keys that are attended to by tiles and
// hidden. What decides how a row is computed is what its panel's tree sees, and nothing else: results do not depend on
// the executor.
#pragma once

#include <quoka/attention/attend_panels.hpp>
#include <quoka/attention/join_rows.hpp>
#include <quoka/attention/listed_rows.hpp>
#include <quoka/kernels/key_blocks.hpp>
#include <quoka/runtime/worker_scratch.hpp>

#include <numeric>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Keys of a range of sequence b: as many as fit the cache as halves, whatever they are stored in, or more, so that a
// query sees enough of them; and whole blocks where that is nearly the same.
inline Index range_keys(const AttentionCall& call, Index b) {
  const Index fit = tuning::listed_range_bytes / (2 * (call.q.dim() + call.v_dim));
  const Index all = call.past_k.len() + call.chunk_k.len();
  const Index listed = call.lists != nullptr ? call.most_listed(b) : call.mask->listed_keys();
  const Index seen = listed > 0 || call.lists != nullptr ? std::min(all, listed) : all;
  const Index enough = tuning::listed_query_keys * all / std::max<Index>(seen, 1);
  // Keys that are read once need not fit the cache: of one list, or where a query's heads alone fill panels.
  const bool once = call.has_one_list(b) || call.group >= tuning::panel_rows;
  const Index most = once ? ListPlan::most_keys : std::clamp(enough, fit, 4 * fit);
  const Index keys =
      std::clamp(round_up(most, SeenKeys::step_keys), SeenKeys::step_keys, ListPlan::most_keys);
  const Index blocks = std::lcm(call.block_keys(), SeenKeys::step_keys);
  return keys >= blocks ? keys / blocks * blocks : keys;
}
// The most of any sequence.
inline Index most_range_keys(const AttentionCall& call) {
  Index most = 0;
  for (Index b = 0; b < call.q.batch(); ++b) most = std::max(most, range_keys(call, b));
  return most;
}
// Of the past, then of the chunk.
inline Index count_ranges(const AttentionCall& call, Index b) {
  const Index keys = range_keys(call, b);
  return ceil_div(call.past_k.len(), keys) + ceil_div(call.chunk_k.len(), keys);
}

// Rows side by side, each of whole packets.
class GatheredRows {
 public:
  void reserve(const AttentionCall& call, const Rows& past, const Rows& chunk, Index dim) {
    Index bytes = 0;
    for (const Rows* const x : {&past, &chunk})
      if (!x->empty()) bytes = std::max(bytes, element(x->format()));
    memory_.reserve(most_range_keys(call) * step(width(dim), bytes));
  }
  Index bytes() const { return memory_.bytes(); }

  // The rows of x that are set in bits[words], at the same places.
  HeadRows gather(const HeadRows& x, const KeyBits* bits, Index words, Index count) {
    const bool widens = x.format->element_bytes == 0;
    // Of this call: the other sequences of a batch may have other channels.
    const Index wide = width(x.shape.dim), size = element(*x.format), row_step = step(wide, size);
    const Format* const format = widens ? &float_format() : x.format;
    const Index used = x.shape.dim * size, rest = wide * size - used, row_bytes = x.row_bytes();
    for (Index w = 0; w < words; ++w)
      for (KeyBits left = bits[w]; left != 0; left &= left - 1) {
        const Index i = w * SeenKeys::word_keys + std::countr_zero(left);
        if (const Index next = i + tuning::token_value_keys;
            next < count &&
            (bits[next / SeenKeys::word_keys] >> (next % SeenKeys::word_keys) & 1u) != 0) {
          if (row_bytes > 0) ask_for(x[next], 0, row_bytes);
        }
        std::byte* const to = memory_.data() + i * row_step;
        const ConstRow from = x[i];
        if (widens) {
          x.format->widen(from, x.shape, reinterpret_cast<float*>(to));
        } else {
          Index at = 0;
          for (; at + 64 <= used; at += 64) std::memcpy(to + at, from + at, 64);
          for (; at < used; at += size)
            std::memcpy(to + at, from + at, static_cast<std::size_t>(size));
        }
        if (rest > 0) std::memset(to + used, 0, static_cast<std::size_t>(rest));
      }
    return {{memory_.data(), row_step}, format, {wide}};
  }

 private:
  static Index element(const Format& format) {
    return format.element_bytes == 0 ? Index{sizeof(float)} : format.element_bytes;
  }
  static Index width(Index dim) { return round_up(dim, simd::lanes); }
  static Index step(Index width, Index element_bytes) {
    return round_up(width * element_bytes, 64);
  }

  Buffer<std::byte> memory_;
};

// Scratch of one worker, beside its HeadScratch.
struct ListedScratch {
  SeenKeys seen;
  ListPlan plan;
  ListedRowsScratch rows;
  GatheredRows k, v;
  Buffer<float> out;                   // [rows of the task's panels][v_dim, rounded up]
  Buffer<SoftmaxState<float>> states;  // [rows of the task's panels]
  Buffer<float> queries;   // of each panel, [most_padded_rows][head_dim, rounded up], scaled
  Buffer<Position> list;   // [keys of a range]
  Buffer<float> tile_out;  // [panel_rows][v_dim]

  void reserve(const AttentionCall& call, Index panels) {
    const Index keys = most_range_keys(call);
    seen.reserve(call, ListTree::most_queries(call));
    rows.reserve(call, keys);
    k.reserve(call, call.past_k, call.chunk_k, call.q.dim());
    v.reserve(call, call.past_v, call.chunk_v, call.v_dim);
    out.reserve(panels * tuning::panel_rows * round_up(call.v_dim, simd::lanes));
    states.reserve(panels * tuning::panel_rows);
    queries.reserve(panels * ListedRows::most_padded_rows * round_up(call.q.dim(), simd::lanes));
    list.reserve(keys + simd::lanes);  // compressed stores write whole packets
    tile_out.reserve(tuning::panel_rows * call.v_dim);
  }
  Index bytes() const { return bytes_of(seen, rows, k, v, out, states, queries, list, tile_out); }
};

// Blocks of listed rows, packed as they are walked.
class ListedBlocks final : public KeyBlocks {
 public:
  // Keys list[0, count) of k, values of v.
  ListedBlocks(const AttentionCall& call, const HeadRows& k, const HeadRows& v,
               const Position* list, Index count, HeadScratch& memory)
      : KeyBlocks(count, call.block_keys()),
        call_(call),
        k_(k.listed(list)),
        v_(v.listed(list)),
        s_(memory) {
    k_.shape.dim = call.q.dim(), v_.shape.dim = call.v_dim;  // without what fills up packets
  }

  const PackedBlock& pack(const KeyRange& keys) override {
    if (found_ != keys.begin) find(keys);
    PackedBlock& to = s_.packed;
    to.k = &s_.k[at_], to.v = &s_.v[at_], to.masked = true;
    to.keys = s_.keys, to.values = s_.values;
    call_.arithmetic->pack(to);
    return to;
  }
  BlockPrefetch prefetch(const KeyRange& keys, Index panels) override {
    if (keys.count() <= 0) return {};
    at_ = 1 - at_;
    find(keys);
    return {s_.k[at_].prefetch(), s_.v[at_].prefetch(), panels};
  }

 private:
  void find(const KeyRange& keys) {
    find(k_, keys, s_.k[at_]), find(v_, keys, s_.v[at_]);
    found_ = keys.begin;
  }
  static void find(const HeadRows& x, const KeyRange& keys, BlockRows& to) {
    x.at.find(keys.begin, keys.count(), to.at);
    to.count = keys.count(), to.format = x.format, to.shape = x.shape;
  }

  const AttentionCall& call_;
  HeadRows k_, v_;
  HeadScratch& s_;
  int at_ = 0;
  Index found_ = -1;
};

// Panels [first_panel, first_panel + panels) of one KV head, all in one tree.
class ListedAttention {
  static constexpr Index width = tuning::panel_rows;

 public:
  ListedAttention(const KeySequence& keys, Index first_panel, Index panels, ListedScratch& scratch,
                  HeadScratch& head_scratch)
      : call_(keys.call()),
        b_(keys.b()),
        kv_head_(keys.kv_head()),
        first_panel_(first_panel),
        panels_(panels),
        tree_(call_, first_panel),
        costs_(call_),
        range_(range_keys(call_, keys.b())),
        past_ranges_(ceil_div(call_.past_k.len(), range_)),
        v_width_(round_up(call_.v_dim, simd::lanes)),
        tiles_(keys, first_panel, panels, head_scratch),
        s_(scratch),
        h_(head_scratch) {}

  // All keys; writes the call's output.
  void run() {
    attend(0, count_ranges(call_, b_), true);
    for (Index p = first_panel_; p < first_panel_ + panels_; ++p) {
      const Index rows = join(p);
      for (Index i = 0; i < rows; ++i)
        write_row(call_, b_, kv_head_, p * width + i, states(p)[i], out(p) + i * v_width_);
    }
  }
  // Ranges [begin, end) of the keys; leaves what is seen of them in `to`.
  void run_part(Index begin, Index end, bool with_sinks, const PartialRows& to) {
    attend(begin, end, with_sinks);
    for (Index p = first_panel_; p < first_panel_ + panels_; ++p) {
      const Index rows = join(p);
      std::copy_n(states(p), rows, to.state + p * width);
      for (Index i = 0; i < rows; ++i)
        std::copy_n(out(p) + i * v_width_, call_.v_dim, to.out + (p * width + i) * call_.v_dim);
    }
  }

 private:
  SoftmaxState<float>* states(Index p) const {
    return s_.states.data() + (p - first_panel_) * width;
  }
  float* out(Index p) const { return s_.out.data() + (p - first_panel_) * width * v_width_; }

  void attend(Index begin, Index end, bool with_sinks) {
    std::fill_n(s_.out.data(), panels_ * width * v_width_, 0.0f);
    std::fill_n(s_.states.data(), panels_ * width, SoftmaxState<float>::identity());
    packed_ = 0;
    for (Index p = first_panel_; p < first_panel_ + panels_; ++p)
      tree_.for_runs(p, [&](const QueryRun& run) {
        for (Index i = 0; i < run.rows && with_sinks; ++i)
          states(p)[run.lane + i].admit(call_.sink_logit(q_head(p, run) + i));
      });
    const ArithmeticScope scope(*call_.arithmetic, h_.panel);
    KeyRange read{0, 0};  // columns
    for (Index i = begin; i < end; ++i) {
      const Range range = range_of(i);
      if (range.column >= read.end) {
        const Index last = range.in_past ? std::min(end, past_ranges_) : end;
        const Range until = range_of(std::min(last, i + SeenKeys::stretch_keys / range_) - 1);
        read = {range.column, until.column + until.count};
        s_.seen.read(call_, b_, kv_head_, tree_.first_query(), tree_.queries(), read.begin,
                     read.count());
      }
      attend_range(range, read.begin);
    }
  }

  // Rows [at, at + count) of the past or the chunk.
  struct Range {
    bool in_past;
    Index at, count, column;
  };
  Range range_of(Index i) const {
    const bool in_past = i < past_ranges_;
    const Index len = in_past ? call_.past_k.len() : call_.chunk_k.len();
    const Index at = (i - (in_past ? 0 : past_ranges_)) * range_;
    return {in_past, at, std::min(range_, len - at), in_past ? at : call_.past_k.len() + at};
  }
  HeadRows keys_of(const Range& range) const {
    return (range.in_past ? call_.past_k : call_.chunk_k).head(b_, kv_head_).from(range.at);
  }
  HeadRows values_of(const Range& range) const {
    return (range.in_past ? call_.past_v : call_.chunk_v).head(b_, kv_head_).from(range.at);
  }
  // stretch_begin: the column that `seen` was read from.
  void attend_range(const Range& range, Index stretch_begin) {
    const Index column = range.column, first = column - stretch_begin, count = range.count;
    const HeadRows k = keys_of(range), v = values_of(range);
    s_.plan.make(tree_, s_.seen, costs_, first, count);
    KeyBits used[ListPlan::most_words] = {};
    Index uses = 0;
    bool by_rows = false;
    const auto use = [&](const KeyBits* bits, auto&& mask) {
      for (Index w = 0; w < s_.plan.words(); ++w) {
        const KeyBits some = bits[w] & mask(w);
        used[w] |= some, uses += std::popcount(some);
      }
    };
    for (Index node = 0; node < ListTree::nodes; ++node)
      if (is_mine(node) && s_.plan.has_tiles(node))
        use(s_.plan.tiles(node), [](Index) { return ~KeyBits{0}; });
    for (Index p = first_panel_; p < first_panel_ + panels_; ++p) {
      if (!s_.plan.has_rows(leaf(p))) continue;
      by_rows = true;
      tree_.for_runs(p, [&](const QueryRun& run) {
        use(bits(run), [&](Index w) { return s_.plan.rows_mask(leaf(p), w); });
      });
    }
    if (uses == 0) return;
    Index rows_used = 0;
    for (Index w = 0; w < s_.plan.words(); ++w) rows_used += std::popcount(used[w]);
    // Rows that are not whole packets are filled up where they are read by themselves.
    const bool fill =
        by_rows && (call_.q.dim() % simd::lanes != 0 || call_.v_dim % simd::lanes != 0);
    // Rows that are widened at once, or that a query has too few heads for to wait for the next one meanwhile.
    const bool often = uses >= tuning::listed_uses * rows_used;
    const auto at_hand = [&](const HeadRows& x, GatheredRows& gathered) {
      const bool gathers = x.format->element_bytes == 0 || call_.group < tuning::listed_place_rows;
      return fill || (often && gathers) ? gathered.gather(x, used, s_.plan.words(), count) : x;
    };
    const HeadRows keys = at_hand(k, s_.k), values = at_hand(v, s_.v);
    for (Index p = first_panel_; p < first_panel_ + panels_ && by_rows; ++p)
      if (s_.plan.has_rows(leaf(p))) attend_by_rows(p, keys, values, column, first);
    for (Index node = 0; node < ListTree::nodes; ++node)
      if (is_mine(node) && s_.plan.has_tiles(node))
        attend_by_tiles(node, keys, values, column, first);
  }

  void attend_by_rows(Index p, const HeadRows& k, const HeadRows& v, Index column, Index first) {
    const Index k_width = round_up(call_.q.dim(), simd::lanes);
    float* queries =
        s_.queries.data() + (p - first_panel_) * ListedRows::most_padded_rows * k_width;
    const std::uint32_t bit = 1u << (p - first_panel_);
    const bool read = (std::exchange(read_, read_ | bit) & bit) == 0;
    tree_.for_runs(p, [&](const QueryRun& run) {
      ListedRows rows(call_, b_, kv_head_, p * width + run.lane, run.rows, range_, queries,
                      s_.rows);
      queries += rows.padded_rows() * k_width;
      if (read) rows.read_queries();
      const KeyBits* const seen = bits(run);
      const Index count = list_of([&](Index w) { return seen[w] & s_.plan.rows_mask(leaf(p), w); });
      if (count == 0) return;
      const bool biased = call_.biased_everywhere() || marks(run, first, SeenKeys::biased);
      rows.attend(k, v, s_.list.data(), count, column, biased,
                  {states(p) + run.lane, out(p) + run.lane * v_width_});
    });
  }

  void attend_by_tiles(Index node, const HeadRows& k, const HeadRows& v, Index column,
                       Index first) {
    const KeyBits* const shared = s_.plan.tiles(node);
    const Index count = list_of([&](Index w) { return shared[w]; });
    // Of the panels below the node those of the task.
    const Index begin = std::max(first_panel_, tree_.first_panel + ListPlan::first_panel(node)),
                end = std::min(
                    first_panel_ + panels_,
                    tree_.first_panel + ListPlan::first_panel(node) + s_.plan.panels(node));
    ListedBlocks blocks(call_, k, v, s_.list.data(), count, h_);
    blocks.walk({0, count}, end - begin, h_.panel.prefetch,
                [&](Index i, const KeyRange& keys, const PackedBlock& block) {
                  const Index p = begin + i;
                  if (!s_.plan.sees(leaf(p), shared)) return;
                  const bool hides = fill_bias(p, keys, column, first, shared);
                  tiles_.attend_listed(p - first_panel_, block,
                                       {.count = keys.count(),
                                        .mask = nullptr,
                                        .bias = hides ? h_.bias : nullptr,
                                        .rule = call_.logits},
                                       pack_once(p));
                });
  }

  // What is added to the logits of keys [begin, end) of the list. Is anything?
  bool fill_bias(Index p, const KeyRange& keys, Index column, Index first, const KeyBits* shared) {
    bool hides = false, adds = call_.biased_everywhere();
    Index lanes = 0;
    tree_.for_runs(p, [&](const QueryRun& run) {
      const KeyBits* const seen = bits(run);
      KeyBits hidden = 0;
      for (Index w = 0; w < s_.plan.words(); ++w) hidden |= shared[w] & ~seen[w];
      hides = hides || hidden != 0;
      adds = adds || marks(run, first, SeenKeys::biased | SeenKeys::uneven);
      lanes = run.lane + run.rows;
    });
    if (!hides && !adds) return false;
    const Position* const list = s_.list.data() + keys.begin;
    float* const bias = h_.bias;
    tree_.for_runs(p, [&](const QueryRun& run) {
      fill_lanes(bits(run), list, keys.count(), run.rows, bias + run.lane);
    });
    for (Index key = 0; key < keys.count() && lanes < width; ++key)
      std::fill(bias + key * width + lanes, bias + (key + 1) * width, -simd::infinity);
    if (!adds) return true;
    LogitBias added(call_, ListedKeys(call_, b_, list, keys.count(), column, s_.rows.columns),
                    call_.mask != nullptr ? s_.rows.mask_row.data() : nullptr);
    added.add(kv_head_, p * width, std::min(width, call_.rows() - p * width), bias, width);
    return true;
  }
  // 0 or -infinity in `rows` lanes side by side.
  static void fill_lanes(const KeyBits* seen, const Position* list, Index count, Index rows,
                         float* to) {
    static constexpr float bit_values[2] = {-simd::infinity,
                                            0.0f};  // a branch would be guessed wrong
    const auto fill = [&](auto n) {
      for (Index key = 0; key < count; ++key) {
        const Index at = list[key];
        const float x =
            bit_values[seen[at / SeenKeys::word_keys] >> (at % SeenKeys::word_keys) & 1u];
        for (Index i = 0; i < n; ++i) to[key * width + i] = x;
      }
    };
    if (rows == 4)
      fill(std::integral_constant<Index, 4>{});
    else if (rows == 8)
      fill(std::integral_constant<Index, 8>{});
    else if (rows == 16)
      fill(std::integral_constant<Index, 16>{});
    else
      fill(rows);
  }
  // What panel p has seen by tiles joins what it has seen by rows. How many rows it has.
  Index join(Index p) {
    const Index i = p - first_panel_, rows = std::min(width, call_.rows() - p * width);
    if ((packed_ >> i & 1u) == 0) return rows;
    SoftmaxState<float> seen[width];
    float* const from = s_.tile_out.data();
    tiles_.unpack(i, seen, from);
    for (Index row = 0; row < rows; ++row)
      join_row(states(p)[row], out(p) + row * v_width_, seen[row], from + row * call_.v_dim,
               call_.v_dim);
    return rows;
  }

  // Is this panel's first block of keys by tiles at hand?
  bool pack_once(Index p) {
    const std::uint32_t bit = 1u << (p - first_panel_);
    return (std::exchange(packed_, packed_ | bit) & bit) == 0;
  }
  // first + i for each bit i that is set. Compressed where that can be: a branch on how many bits a word has would be
  // guessed wrong.
  template <bool compress = simd::has_lane_masks>
  static Position* add_set(KeyBits left, Position first, Position* to) {
    if constexpr (compress) {
      constexpr KeyBits all = (KeyBits{1} << simd::lanes) - 1;
      for (Index i = 0; i < SeenKeys::word_keys; i += simd::lanes) {
        to += simd::store_compressed < compress
                  ? simd::lanes
                  : 0 > (to, static_cast<unsigned>(left & all), first);
        left >>= simd::lanes, first += simd::lanes;
      }
    } else {
      for (; left != 0; left &= left - 1)
        *to++ = first + static_cast<Position>(std::countr_zero(left));
    }
    return to;
  }
  // The listed keys of the range, as its rows; how many.
  template <class Word>
  Index list_of(Word&& word) {
    Position* to = s_.list.data();
    for (Index w = 0; w < s_.plan.words(); ++w)
      if (const KeyBits some = word(w); some != 0)
        to = add_set(some, static_cast<Position>(w * SeenKeys::word_keys), to);
    return to - s_.list.data();
  }
  const KeyBits* bits(const QueryRun& run) const {
    return s_.seen.bits(run.query - tree_.first_query()) + s_.plan.first_word();
  }
  // Has some step of the range one of these marks?
  bool marks(const QueryRun& run, Index first, unsigned which) const {
    if (call_.mask == nullptr) return false;
    const std::uint8_t* const x =
        s_.seen.marks(run.query - tree_.first_query()) + first / SeenKeys::step_keys;
    unsigned all = 0;
    for (Index step = 0; step * SeenKeys::step_keys < s_.plan.words() * SeenKeys::word_keys; ++step)
      all |= x[step];
    return (all & which) != 0;
  }
  Index leaf(Index p) const { return p - tree_.first_panel; }
  Index q_head(Index p, const QueryRun& run) const {
    return kv_head_ * call_.group + (p * width + run.lane) % call_.group;
  }
  // Has a node panels of this task?
  bool is_mine(Index node) const {
    const Index first = tree_.first_panel + ListPlan::first_panel(node);
    return first < first_panel_ + panels_ && first + s_.plan.panels(node) > first_panel_;
  }

  const AttentionCall& call_;
  Index b_, kv_head_, first_panel_, panels_;
  ListTree tree_;
  ListCosts costs_;
  Index range_, past_ranges_, v_width_;
  PanelAttention tiles_;
  ListedScratch& s_;
  HeadScratch& h_;
  std::uint32_t read_ = 0;    // which panels' queries are read for rows
  std::uint32_t packed_ = 0;  // which panels have queries packed, and sums by tiles
};

class ListedAttentions final : public ListedWork {
 public:
  Index bytes() const override { return workers_.bytes(); }
  void reserve(const AttentionCall& call, Index panels, int workers) override {
    workers_.reserve(workers, call, panels);
  }
  Index ranges(const AttentionCall& call, Index b) const override { return count_ranges(call, b); }
  void attend(const AttentionCall& call, Index head, Index first, Index count, Index part,
              const Partials& partials, Arena arena, int worker) override {
    const KeySequence keys(call, head);
    HeadScratch scratch(arena, call, count);
    ListedAttention attention(keys, first, count, workers_[worker], scratch);
    if (partials.parts <= 1) return attention.run();
    const Index all = ranges(call, keys.b()), own = parts(call, keys.b());
    attention.run_part(all * std::min(part, own) / own, all * std::min(part + 1, own) / own,
                       part == 0, partials.part(head, part));
  }

 private:
  WorkerScratch<ListedScratch> workers_;
};

template <class>
std::unique_ptr<ListedWork> make_listed_work() {
  return std::make_unique<ListedAttentions>();
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
