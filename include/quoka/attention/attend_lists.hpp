// Attention where each query has keys of its own: lists, or what lists and a mask leave.
//
//   bits       which keys each query sees, of the past, then of the chunk (seen_keys.hpp)
//   by rows    each query's own keys, read one by one, its heads together (gather_rows.hpp)
//   by tiles   the union of a panel's keys through packed blocks, hidden from the rows that do not see them
//
// For each panel of query rows and each step of 128 keys one comparison decides, in multiply-adds of a panel in float
// (tuning.hpp's gather_*): u keys of the union, of which each query sees some,
//
//   by rows    sum over queries of keys * (rows_cost(heads) + gather_key)
//   by tiles   u * (tile_cost + pack_cost), tile_cost more by gather_tile where something is hidden
//
// A panel all of whose queries see the same keys is assumed to have neighbours that do, too: it counts a share of
// the packing. Panels whose unions are the same, key by key of a block, share packed blocks: so equal lists cost what
// one list does, and keys that all see what they cost without lists.
//
// Panels of an item go through the keys together, a range at a time that stays in L2, so that its rows are read from
// memory once for all of them. A panel that sees few keys of a range waits for more: to begin and to end takes a query
// as long as some 20 keys. Rows that several queries read are first copied side by side, as floats, where they are in 8
// bits, or where fewer heads than four share them: too little work to hide that rows of one head lie a power of two
// apart in many caches and drive each other out of theirs.
//
// 2 * q_heads * keys of all lists * (head_dim + v_dim) FLOPs, and those of keys that are attended to by tiles and
// hidden. Only what a panel sees decides how its rows are computed: results depend neither on the executor nor on how a
// list is written.
#pragma once

#include <quoka/attention/attend_panels.hpp>
#include <quoka/attention/join_rows.hpp>
#include <quoka/attention/gather_rows.hpp>
#include <quoka/attention/seen_keys.hpp>

#include <bit>
#include <cstring>
#include <numeric>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// ---- ranges and parts of the keys --------------------------------------------------------------------

// Bytes of an element where rows may be copied side by side before queries read them one by one; 0 where they never
// are.
inline Index copied_bytes(const AttentionCall& call) {
  bool copies = call.group < tuning::gather_place_rows || call.q.dim() % simd::lanes != 0 ||
                call.v_dim % simd::lanes != 0;
  Index bytes = 0;
  for (const Rows* const x : {&call.past_k, &call.past_v, &call.chunk_k, &call.chunk_v}) {
    if (x->empty()) continue;
    const bool widens = x->format().element_bytes == 0;
    copies = copies || widens;
    bytes = std::max(bytes, widens ? Index{sizeof(float)} : x->format().element_bytes);
  }
  return copies ? bytes : 0;
}
inline constexpr Index most_range_keys = 8 * SeenKeys::step_keys;
// A panel waits for this many ranges at most.
inline constexpr Index most_gather_ranges = 4;
// Keys of a range: as many as fit the cache as halves, in whole blocks where that is nearly the same. Rows that one
// query's heads alone fill panels with are read once, and need not fit.
inline Index range_keys(const AttentionCall& call) {
  const Index fit = tuning::gather_range_bytes / (2 * (call.q.dim() + call.v_dim));
  const Index step = SeenKeys::step_keys, blocks = std::lcm(call.block_keys(), step);
  const Index keys =
      call.group >= tuning::panel_rows ? most_range_keys : std::clamp(fit, step, most_range_keys);
  return keys >= blocks ? keys / blocks * blocks : keys / step * step;
}

// Ranges of the past, then of the chunk: keys are cut into as many parts at most.
inline Index gather_ranges(const AttentionCall& call) {
  const Index keys = range_keys(call);
  return ceil_div(call.past_k.len(), keys) + ceil_div(call.chunk_k.len(), keys);
}
inline Index gather_parts(const AttentionCall& call) {
  return std::clamp<Index>(gather_ranges(call), 1, tuning::max_parts);
}
// The columns of one of `parts`.
inline KeyRange gather_columns(const AttentionCall& call, Index part, Index parts) {
  const Index ranges = gather_ranges(call), keys = range_keys(call);
  const Index past = call.past_k.len(), past_ranges = ceil_div(past, keys);
  const auto column = [&](Index range) {
    return range < past_ranges
               ? range * keys
               : std::min(past + (range - past_ranges) * keys, past + call.chunk_k.len());
  };
  return {column(ranges * part / parts), column(ranges * (part + 1) / parts)};
}

// ---- costs ---------------------------------------------------------------------------------------------

// Costs of one key, in multiply-adds of a panel in float.
struct ListCosts {
  float channels;
  float tile;  // of a panel
  float pack;  // of a block's key

  explicit ListCosts(const AttentionCall& call)
      : channels(static_cast<float>(call.q.dim() + call.v_dim)) {
    const PanelCost panel = call.arithmetic->cost();
    tile = tuning::panel_rows * channels * panel.products;
    pack = tuning::panel_rows * channels * panel.packing;
  }
  float rows(Index heads) const {
    const Index rest = heads % 4;
    return tuning::gather_key + channels * (static_cast<float>(heads / 4) * tuning::gather_rows[3] +
                                            (rest > 0 ? tuning::gather_rows[rest - 1] : 0.0f));
  }
};

// ---- scratch -------------------------------------------------------------------------------------------

// A panel on its way through the keys.
struct ListedPanel {
  Index begin;              // keys before it are attended to
  Index waiting;            // keys from there on, over all queries
  std::uint32_t row_steps;  // of these keys: bit i, step i is attended to by rows
  Index tile_keys;          // keys that it attends to by tiles
  bool hides;               // of these: some query does not see one
  unsigned marks;           // of all these steps (SeenKeys::Mark)
  bool read, packed;        // queries for rows, for tiles
};

// Memory of one worker for items of `panels` panels, beside its HeadScratch.
struct ListedScratch {
  ListedScratch(Arena& arena, const AttentionCall& call, Index panels)
      : most_keys(most_gather_ranges * range_keys(call)),
        seen(arena, call, std::min(call.q.len(), panels * tuning::panel_rows / call.group + 2)),
        rows(arena, call, most_keys) {
    const Index rows_in_all = panels * tuning::panel_rows, packet = simd::lanes;
    panel = arena.take<ListedPanel>(panels);
    states = arena.take<SoftmaxState<float>>(rows_in_all);
    out = arena.take<float>(rows_in_all * round_up(call.v_dim, packet));
    // Groups of 5 leave most room in tiles: 8 rows for 5.
    queries = arena.take<float>(2 * rows_in_all * round_up(call.q.dim(), packet));
    tile_out = arena.take<float>(tuning::panel_rows * call.v_dim);
    list = arena.take<Position>(most_keys + packet);
    tile_lists = arena.take<Position>(panels * (most_keys + packet));
    const Index copied = most_keys * copied_bytes(call);
    k = arena.take<std::byte>(copied * round_up(call.q.dim(), packet));
    v = arena.take<std::byte>(copied * round_up(call.v_dim, packet));
  }
  // The keys that panel i attends to by tiles.
  Position* tile_list(Index i) const { return tile_lists + i * (most_keys + simd::lanes); }

  Index most_keys;  // that a panel waits for
  SeenKeys seen;
  ListedRowsScratch rows;
  ListedPanel* panel;           // [panels]
  SoftmaxState<float>* states;  // [rows]
  float* out;                   // [rows][v_dim, rounded up]
  float* queries;               // [panels][2 panel_rows][head_dim, rounded up], scaled, for rows
  float* tile_out;              // [panel_rows][v_dim]
  Position* list;               // [most_keys]; compressed stores write whole packets
  Position* tile_lists;         // [panels][most_keys, the same]
  std::byte *k, *v;             // [most_keys][channels, rounded up], copied rows
};

// ---- the walk ------------------------------------------------------------------------------------------

// Panels [first_panel, first_panel + panels) of one KV head.
class ListedPanels {
  static constexpr Index width = tuning::panel_rows;

 public:
  ListedPanels(const KeySequence& keys, Index first_panel, Index panels, ListedScratch& scratch,
               HeadScratch& head_scratch)
      : call_(keys.call()),
        b_(keys.b()),
        kv_head_(keys.kv_head()),
        first_panel_(first_panel),
        panels_(panels),
        first_query_(first_panel * width / call_.group),
        costs_(call_),
        range_(range_keys(call_)),
        k_width_(round_up(call_.q.dim(), simd::lanes)),
        v_width_(round_up(call_.v_dim, simd::lanes)),
        copies_(copied_bytes(call_) > 0),
        tiles_(keys, first_panel, panels, head_scratch),
        s_(scratch),
        h_(head_scratch) {}

  // Columns of the sequence: the past's, then the chunk's. The first part has the sinks.
  void attend(const KeyRange& columns, bool with_sinks) {
    std::fill_n(s_.out, panels_ * width * v_width_, 0.0f);
    for (Index i = 0; i < panels_ * width; ++i) {
      const Index row = first_panel_ * width + i;
      s_.states[i] = SoftmaxState<float>::identity();
      if (with_sinks && row < call_.rows())
        s_.states[i].update(call_.sink(call_.query_row(kv_head_, row).q_head));
    }
    for (Index p = 0; p < panels_; ++p) s_.panel[p].read = s_.panel[p].packed = false;
    const ArithmeticScope scope(*call_.arithmetic, h_.panel);
    const Index past = call_.past_k.len();
    attend(call_.past_k, call_.past_v, 0, {columns.begin, std::min(columns.end, past)});
    attend(call_.chunk_k, call_.chunk_v, past, {std::max(columns.begin, past), columns.end});
  }
  // Then: f(row of the head, state, sums [v_dim]) of each row.
  template <class F>
  void for_rows(F&& f) {
    for (Index p = 0; p < panels_; ++p) {
      const Index first = (first_panel_ + p) * width, rows = std::min(width, call_.rows() - first);
      if (s_.panel[p].packed) join_tiles(p, rows);
      for (Index i = 0; i < rows; ++i) f(first + i, states(p)[i], out(p) + i * v_width_);
    }
  }

 private:
  SoftmaxState<float>* states(Index p) const { return s_.states + p * width; }
  float* out(Index p) const { return s_.out + p * width * v_width_; }

  // f(run) for the queries of a panel.
  template <class F>
  void for_runs(Index p, F&& f) const {
    const Index first = (first_panel_ + p) * width, end = std::min(first + width, call_.rows());
    for (Index row = first, in_tiles = 0; row < end;) {
      const Index query = row / call_.group, rows = std::min(end, (query + 1) * call_.group) - row;
      f(QueryRun{query, row - first, rows, in_tiles});
      row += rows, in_tiles += rows_in_tiles(rows);
    }
  }
  const KeyBits* bits(const QueryRun& run) const { return s_.seen.bits(run.query - first_query_); }

  // Columns of the past or of the chunk, whose row 0 is column `first`.
  void attend(const Rows& k, const Rows& v, Index first, const KeyRange& columns) {
    constexpr Index most = SeenKeys::stretch_keys;
    const Index last_row = std::min((first_panel_ + panels_) * width, call_.rows()) - 1;
    const Index stretch = most / range_ * range_,
                queries = last_row / call_.group + 1 - first_query_;
    for (Index column = columns.begin; column < columns.end; column += stretch) {
      const Index count = std::min(stretch, columns.end - column);
      s_.seen.read(call_, b_, kv_head_, first_query_, queries, column, count);
      attend_stretch(k.head(b_, kv_head_).from(column - first),
                     v.head(b_, kv_head_).from(column - first), column, count);
    }
  }
  // For `count` keys, as the bits are.
  void attend_stretch(const HeadRows& k, const HeadRows& v, Index column, Index count) {
    for (Index p = 0; p < panels_; ++p) s_.panel[p].begin = s_.panel[p].waiting = 0;
    for (Index begin = 0, end; begin < count; begin = end) {
      end = std::min(begin + range_, count);
      Index first = end;  // of the keys that some panel attends to now
      for (Index p = 0; p < panels_; ++p) {
        ListedPanel& panel = s_.panel[p];
        Index queries = 0;
        for_runs(p, [&](const QueryRun& run) {
          ++queries, panel.waiting += count_bits(bits(run), begin, end);
        });
        panel.row_steps = 0, panel.tile_keys = 0;
        if (panel.waiting == 0) panel.begin = end;
        const bool more = end < count && end - panel.begin < most_gather_ranges * range_;
        if (more && panel.waiting < tuning::gather_query_keys * queries) continue;
        choose(p, panel.begin, end);
        first = std::min(first, panel.begin);
      }
      if (first == end) continue;
      attend_by_rows(k, v, column, first, end);
      attend_by_tiles(k, v, column);
      for (Index p = 0; p < panels_; ++p)
        if (s_.panel[p].row_steps != 0 || s_.panel[p].tile_keys > 0)
          s_.panel[p].begin = end, s_.panel[p].waiting = 0;
    }
  }
  static Index count_bits(const KeyBits* bits, Index begin, Index end) {
    Index sum = 0;
    for (Index w = begin / SeenKeys::word_keys; w < ceil_div(end, SeenKeys::word_keys); ++w)
      sum += std::popcount(bits[w]);
    return sum;
  }

  // How panel p attends to each step of keys [begin, end).
  void choose(Index p, Index begin, Index end) {
    constexpr Index words = SeenKeys::step_words, most_steps = 32;
    static_assert(most_gather_ranges * most_range_keys == most_steps * SeenKeys::step_keys);
    ListedPanel& panel = s_.panel[p];
    const Index first = begin / SeenKeys::step_keys,
                steps = ceil_div(end, SeenKeys::step_keys) - first;
    float rows_cost[most_steps] = {}, seen[most_steps] = {};
    KeyBits all[most_steps * words] = {};
    float queries = 0.0f;
    panel.marks = 0, panel.hides = false;
    for_runs(p, [&](const QueryRun& run) {
      const KeyBits* const own = bits(run) + first * words;
      const float cost = costs_.rows(run.rows);
      queries += 1.0f;
      for (Index step = 0; step < steps; ++step) {
        const Index at = step * words;
        const auto keys = static_cast<float>(std::popcount(own[at]) + std::popcount(own[at + 1]));
        rows_cost[step] += cost * keys, seen[step] += keys;
        all[at] |= own[at], all[at + 1] |= own[at + 1];
        const unsigned marks = s_.seen.marks(run.query - first_query_, first + step);
        panel.marks |= marks;
        // Heads that see other keys than each other have no keys in common to go by.
        if ((marks & SeenKeys::uneven) != 0) rows_cost[step] = simd::infinity;
      }
    });
    // The estimated number of panels that pack the same keys.
    const float sharing =
        queries > 1.0f ? tuning::gather_sharing : static_cast<float>(ceil_div(call_.group, width));
    Position* const list = s_.tile_list(p);
    Position* to = list;
    for (Index step = 0; step < steps; ++step) {
      const KeyBits* const u = all + step * words;
      const auto keys = static_cast<float>(std::popcount(u[0]) + std::popcount(u[1]));
      const bool hides = seen[step] != keys * queries;
      const float tiles = keys * (hides ? costs_.tile * tuning::gather_tile + costs_.pack
                                        : costs_.tile + costs_.pack / sharing);
      if (keys > 0.0f && tiles <= rows_cost[step]) {
        panel.hides |= hides;
        for (Index w = 0; w < words; ++w)
          to = add_set(u[w], ((first + step) * words + w) * SeenKeys::word_keys, to);
      } else if (keys > 0.0f) {
        panel.row_steps |= std::uint32_t{1} << step;
      }
    }
    panel.tile_keys = to - list;
  }

  // first + i for each bit i that is set. Compressed where that can be: a branch on how many bits a word has would be
  // guessed wrong.
  template <bool compress = simd::has_lane_masks>
  static Position* add_set(KeyBits left, Index first_key, Position* to) {
    auto first = static_cast<Position>(first_key);
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

  // ---- by rows ----

  // f(word) for the words of the steps that panel p attends to by rows.
  template <class F>
  void for_row_words(Index p, F&& f) const {
    const ListedPanel& panel = s_.panel[p];
    for (std::uint32_t left = panel.row_steps; left != 0; left &= left - 1) {
      const Index word =
          panel.begin / SeenKeys::word_keys + std::countr_zero(left) * SeenKeys::step_words;
      for (Index w = word; w < word + SeenKeys::step_words; ++w) f(w);
    }
  }
  // Keys of the ranges from `first` to `end`, by the panels that do now.
  void attend_by_rows(const HeadRows& k, const HeadRows& v, Index column, Index first, Index end) {
    KeyList keys{k.from(first), v.from(first), s_.list, 0, column + first, false};
    if (copies_) copy_rows(first, end, keys);
    for (Index p = 0; p < panels_; ++p) {
      ListedPanel& panel = s_.panel[p];
      if (panel.row_steps == 0) continue;
      float* const queries = s_.queries + p * 2 * width * k_width_;
      if (!std::exchange(panel.read, true))
        for_runs(p, [&](const QueryRun& run) {
          read_queries(call_, b_, kv_head_, (first_panel_ + p) * width + run.lane, run.rows,
                       queries + run.in_tiles * k_width_);
        });
      keys.biased = call_.biased_everywhere() || (panel.marks & SeenKeys::biased) != 0;
      for_runs(p, [&](const QueryRun& run) {
        const KeyBits* const own = bits(run);
        Position* to = s_.list;
        for_row_words(p,
                      [&](Index w) { to = add_set(own[w], w * SeenKeys::word_keys - first, to); });
        keys.count = to - s_.list;
        if (keys.count > 0)
          attend_rows(call_, b_, kv_head_, (first_panel_ + p) * width + run.lane, run.rows,
                      queries + run.in_tiles * k_width_, keys, s_.rows, states(p) + run.lane,
                      out(p) + run.lane * v_width_);
      });
    }
  }
  // The rows of these keys side by side, if several queries read them or they are not whole packets.
  void copy_rows(Index first, Index end, KeyList& keys) {
    KeyBits used[most_gather_ranges * most_range_keys / SeenKeys::word_keys] = {};
    const Index first_word = first / SeenKeys::word_keys;
    Index uses = 0;
    for (Index p = 0; p < panels_; ++p)
      for_runs(p, [&](const QueryRun& run) {
        const KeyBits* const own = bits(run);
        for_row_words(
            p, [&](Index w) { used[w - first_word] |= own[w], uses += std::popcount(own[w]); });
      });
    Position* to = s_.list;
    for (Index w = 0; w < ceil_div(end - first, SeenKeys::word_keys); ++w)
      to = add_set(used[w], w * SeenKeys::word_keys, to);
    const bool whole = call_.q.dim() % simd::lanes == 0 && call_.v_dim % simd::lanes == 0;
    if (whole && uses < tuning::gather_uses * (to - s_.list)) return;
    keys.k = copied(keys.k, s_.list, to - s_.list, s_.k);
    keys.v = copied(keys.v, s_.list, to - s_.list, s_.v);
  }
  // Rows list[0, count) of x in the same places, of whole packets: as they are, or widened at once for all queries.
  static HeadRows copied(const HeadRows& x, const Position* list, Index count, std::byte* memory) {
    const bool widens = x.format->element_bytes == 0;
    const Format& format = widens ? float_format() : *x.format;
    const Index dim = x.shape.dim, row_width = round_up(dim, simd::lanes),
                row_bytes = x.row_bytes();
    const Index used = dim * format.element_bytes, step = row_width * format.element_bytes;
    for (Index i = 0; i < count; ++i) {
      if (i + tuning::token_value_keys < count && row_bytes > 0)
        ask_for(x[list[i + tuning::token_value_keys]], 0, row_bytes);
      std::byte* const to = memory + list[i] * step;
      if (widens)
        x.format->widen(x[list[i]], x.shape, reinterpret_cast<float*>(to));
      else
        std::memcpy(to, x[list[i]], static_cast<std::size_t>(used));
      std::fill(to + used, to + step, std::byte{0});
    }
    return {.first = memory, .step = step, .format = &format, .shape = {row_width}};
  }

  // ---- by tiles ----

  void attend_by_tiles(const HeadRows& k, const HeadRows& v, Index column) {
    const Index step = call_.block_keys();
    for (Index at = 0, more = 1; more > 0; at += step) {
      more = 0;
      const Position* packed = nullptr;  // the keys of the block
      Index count = 0;
      for (Index p = 0; p < panels_; ++p) {
        const Index left = s_.panel[p].tile_keys - at;
        if (left <= 0) continue;
        more = std::max(more, left - step);
        const Position* const list = s_.tile_list(p) + at;
        if (packed == nullptr || count != std::min(step, left) ||
            !std::equal(list, list + count, packed)) {
          packed = list, count = std::min(step, left);
          pack(k, v, list, count, std::min(step, left - count));
        }
        ListedPanel& panel = s_.panel[p];
        const bool biased = fill_bias(p, list, count, column);
        h_.panel.prefetch.begin_panel();
        tiles_.attend_gathered(p, h_.packed,
                               {.count = count,
                                .mask = nullptr,
                                .bias = biased ? h_.bias : nullptr,
                                .rule = call_.logits},
                               !std::exchange(panel.packed, true));
        h_.panel.prefetch.end_panel();
      }
    }
  }
  // Rows list[0, count) as a block; the next ones are asked for meanwhile.
  void pack(const HeadRows& k, const HeadRows& v, const Position* list, Index count, Index next) {
    const auto find = [&](const HeadRows& x, Index begin, Index rows, BlockRows& to) {
      x.gathered(list).find(begin, rows, to.at);
      to.count = rows, to.format = x.format, to.shape = x.shape;
    };
    find(k, 0, count, h_.k[0]), find(v, 0, count, h_.v[0]);
    find(k, count, next, h_.k[1]), find(v, count, next, h_.v[1]);
    h_.panel.prefetch = {h_.k[1].prefetch(), h_.v[1].prefetch(), panels_};
    PackedBlock& to = h_.packed;
    to.k = &h_.k[0], to.v = &h_.v[0], to.masked = true;
    to.keys = h_.keys, to.values = h_.values;
    call_.arithmetic->pack(to);
  }
  // Finds what is added to the logits of keys list[0, count). Returns whether anything is.
  bool fill_bias(Index p, const Position* list, Index count, Index column) {
    const ListedPanel& panel = s_.panel[p];
    const bool adds = call_.biased_everywhere() || panel.marks != 0;
    if (!panel.hides && !adds) return false;
    float* const bias = h_.bias;
    const Index first_row = (first_panel_ + p) * width,
                rows = std::min(width, call_.rows() - first_row);
    for_runs(p, [&](const QueryRun& run) {
      fill_lanes(bits(run), list, count, run.rows, bias + run.lane);
    });
    for (Index key = 0; key < count && rows < width; ++key)
      std::fill(bias + key * width + rows, bias + (key + 1) * width, -simd::infinity);
    if (!adds) return true;
    LogitBias added(call_, ListedKeys(call_, b_, list, count, column, s_.rows.columns),
                    call_.mask != nullptr ? s_.rows.mask_row : nullptr);
    added.add(kv_head_, first_row, rows, bias, width);
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
  // Merges what panel p has seen by tiles into what it has seen by rows.
  void join_tiles(Index p, Index rows) {
    SoftmaxState<float> seen[width];
    tiles_.unpack(p, seen, s_.tile_out);
    for (Index row = 0; row < rows; ++row)
      join_row(states(p)[row], out(p) + row * v_width_, seen[row], s_.tile_out + row * call_.v_dim,
               call_.v_dim);
  }

  const AttentionCall& call_;
  Index b_, kv_head_, first_panel_, panels_, first_query_;
  ListCosts costs_;
  Index range_, k_width_, v_width_;
  bool copies_;
  PanelAttention tiles_;
  ListedScratch& s_;
  HeadScratch& h_;
};

// Panels [first, first + panels) of head b * kv_heads + kv_head: over all keys, to the call's output, or, where there
// are parts, over one of these, to partials.
inline void attend_lists(const AttentionCall& call, Index head, Index first, Index panels,
                         Index part, const Partials& partials, Arena arena) {
  const KeySequence keys(call, head);
  HeadScratch head_scratch(arena, call, panels);
  ListedScratch scratch(arena, call, panels);
  ListedPanels attention(keys, first, panels, scratch, head_scratch);
  const bool in_parts = partials.parts > 1;
  attention.attend(gather_columns(call, part, in_parts ? partials.parts : 1), part == 0);
  attention.for_rows([&](Index row, const SoftmaxState<float>& state, float* sums) {
    if (!in_parts) return write_row(call, keys.b(), keys.kv_head(), row, state, sums);
    const PartialRows to = partials.part(head, part);
    to.state[row] = state;
    std::copy_n(sums, call.v_dim, to.out + row * call.v_dim);
  });
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
