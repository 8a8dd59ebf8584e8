// FLASH_ATTN_EXT over drawn nodes, against ggml's CPU backend: shapes, types of cache, streams, sinks, soft-cap, ALiBi, and
// masks. Masks hold a set of cells for each query, runs, blocks, chunks, chunks after padding, prefixes and images that
// are seen both ways, windows, a server's batch, no cell, one cell, all cells, and numbers in some places. n_kv_max is
// only a hint.
//
// Over all caches except those of floats ggml's own kernel rounds queries and sums by more than a bias of -0.001
// changes. So its operator is given the same numbers as floats, and every row may be compared closely.

#include "ggml/nodes.hpp"
#include "support/attention_fixtures.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>

namespace {

using namespace quoka_test;

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

NodeShape in_floats(NodeShape s) {
  s.k_type = s.v_type = GGML_TYPE_F32;
  return s;
}

// A node, and the same numbers as floats.
class Twins {
 public:
  explicit Twins(const NodeShape& s) : node(s), floats_(in_floats(s)) {
    copy(node.q_rows, floats_.q_rows), copy(node.k_cache, floats_.k_cache);
    if (!s.v_in_k) copy(node.v_cache, floats_.v_cache);
    if (s.sinks) copy(node.out->src[4], floats_.out->src[4]);
  }
  std::vector<float> by_ggml() {
    if (node.mask != nullptr)
      std::memcpy(floats_.mask->data, node.mask->data, ggml_nbytes(node.mask));
    std::memcpy(floats_.out->op_params, node.out->op_params, sizeof node.out->op_params);
    return floats_.computed_by(backends().cpu.get());
  }

  GraphOfOne node;

 private:
  static void copy(const ggml_tensor* from, ggml_tensor* to) {
    const std::vector<float> x = floats_of(*from);
    std::memcpy(to->data, x.data(), x.size() * sizeof(float));
  }
  GraphOfOne floats_;
};

// Masks of a node.
class Drawn {
 public:
  Drawn(GraphOfOne& graph, unsigned seed) : graph_(graph), random_(seed) {}

  // The cells of all queries, of each stream and head that has its own.
  void mask() {
    const NodeShape& s = graph_.s;
    nans_.assign(uz(s.streams * s.n_q * s.q_heads), false);
    if (!s.mask) return;
    for (std::int64_t stream = 0; stream < s.streams; ++stream)
      for (std::int64_t head = 0; head < s.mask_heads; ++head) mask_of(stream, head);
  }
  // The most numbers but -inf that a row holds.
  std::int64_t most() const {
    const std::int64_t cells = graph_.s.cells;
    const auto* row = static_cast<const ggml_fp16_t*>(graph_.mask->data);
    std::int64_t most = 0;
    for (std::int64_t i = 0; i < ggml_nrows(graph_.mask); ++i, row += cells)
      most = std::max<std::int64_t>(
          most, cells - std::count(row, row + cells, ggml_fp32_to_fp16(-infinity)));
    return most;
  }
  // Which rows of the output, [streams, n_q, q_heads], have NaN in their row of the mask.
  const std::vector<bool>& nans() const { return nans_; }
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(random_() % static_cast<unsigned>(n));
  }

 private:
  enum Kind {
    nothing,
    one,
    all,
    nearly_all,
    set,
    as_before,
    runs,
    blocks,
    chunk,
    window,
    padded,  // on the left
    prefix,  // seen both ways
    images,  // seen both ways, with text between them
    batch,   // of a server: sequences anywhere
    any
  };

  // One head's mask.
  void mask_of(std::int64_t stream, std::int64_t head) {
    const auto kind = static_cast<Kind>(below(any + 1));
    const std::int64_t cells = graph_.s.cells, n_q = graph_.s.n_q;
    first_ = below(std::max<std::int64_t>(cells - n_q, 1)), step_ = std::int64_t{1} << below(7);
    share_ = 1 + below(40), seen_.assign(uz(cells), false);
    padding_ = 1 + below(first_ + n_q), both_ways_ = 1 + below(n_q), left_ = 0;
    rows_to_numbers_ = std::array{1, 3, 30, 1000}[uz(below(4))];
    const bool all_alike = below(2) == 0;
    for (std::int64_t query = 0; query < n_q; ++query) {
      const bool other = kind == any || (!all_alike && below(12) == 0);
      see(other ? static_cast<Kind>(below(any)) : kind, query);
      write(stream, head, query);
    }
  }

  // The cells that a query sees.
  void see(Kind kind, std::int64_t query) {
    const std::int64_t cells = graph_.s.cells;
    const auto show = [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t cell = std::max<std::int64_t>(begin, 0); cell < std::min(end, cells);
           ++cell)
        seen_[uz(cell)] = true;
    };
    const auto show_some = [&](std::int64_t size) {
      for (std::int64_t begin = 0; begin < cells; begin += size)
        if (below(share_) == 0) show(begin, begin + size);
    };
    if (kind == batch && left_ > 0)  // the sequence's next query
      --left_;
    else if (kind != as_before)
      std::fill(seen_.begin(), seen_.end(), false);
    if (kind == batch) {
      if (left_ == 0) {  // another sequence, after a prefix of all
        left_ = below(2) * below(90) + 1;
        show(0, share_);
        for (std::int64_t i = below(cells / 8); i > 0; --i) seen_[uz(below(cells))] = true;
      }
      seen_[uz(below(cells))] = true;  // its own cell
    }
    if (kind == as_before)
      for (std::int64_t i = below(5); i > 0; --i) seen_[uz(below(cells))].flip();
    if (kind == one) seen_[uz(below(cells))] = true;
    if (kind == all || kind == nearly_all) show(0, cells);
    for (std::int64_t i = below(cells / 8); i > 0 && kind == nearly_all; --i)
      seen_[uz(below(cells))] = false;
    if (kind == set) show_some(1);
    if (kind == blocks) show_some(step_);
    for (std::int64_t i = below(4) + 1; i > 0 && kind == runs; --i) {
      const std::int64_t begin = below(cells);
      show(begin, begin + 1 + below(200));
    }
    if (kind == chunk) show(0, first_ + query + 1);
    if (kind == window) show(first_ + query - 30, first_ + query + 1);
    if (kind == padded) show(padding_, first_ + query + 1);
    if (kind == prefix) show(0, first_ + std::max(query + 1, both_ways_));
    const std::int64_t image = query / both_ways_;
    if (kind == images)
      show(0, first_ +
                  (image % 2 == 0 ? query + 1 : std::min((image + 1) * both_ways_, graph_.s.n_q)));
  }
  // Its row of the mask, with numbers here and there; with ALiBi, distances.
  void write(std::int64_t stream, std::int64_t head, std::int64_t query) {
    const std::int64_t cells = graph_.s.cells;
    const auto put = [&](std::int64_t cell, float x) {
      graph_.mask_at(cell, query, stream, head) = ggml_fp32_to_fp16(x);
    };
    const bool distances = graph_.s.max_bias > 0 && below(3) > 0;
    const auto number = [&] { return below(3) == 0 ? 3.0f : -0.001f; };
    // ggml adds the numbers that engines write for -inf: a row of nothing else still sees its cells
    // there.
    const bool any_seen = std::find(seen_.begin(), seen_.end(), true) != seen_.end();
    const float hidden =
        any_seen && below(4) == 0 ? below(2) == 0 ? -65504.0f : -60000.0f : -infinity;
    const bool has_numbers = below(rows_to_numbers_) == 0, biased = has_numbers && below(4) == 0;
    for (std::int64_t cell = 0; cell < cells; ++cell)
      put(cell, !seen_[uz(cell)] ? hidden
                : distances      ? -static_cast<float>(std::abs(cell - first_ - query))
                : biased         ? static_cast<float>(below(2000)) * 1e-3f - 1.0f
                                 : 0.0f);
    if (has_numbers && below(2) == 0)
      for (std::int64_t i = below(4); i >= 0; --i) put(below(cells), number());
    else if (const std::int64_t cell = a_seen_one(); has_numbers && cell >= 0)
      put(cell, number());
    if (!has_numbers || below(10) > 0) return;
    put(below(cells), not_a_number);
    const std::int64_t heads = graph_.s.q_heads, row = (stream * graph_.s.n_q + query) * heads;
    for (std::int64_t i = 0; i < heads; ++i)
      if (graph_.s.mask_heads == 1 || i == head) nans_[uz(row + i)] = true;
  }
  // -1: there is none.
  std::int64_t a_seen_one() {
    const std::int64_t count = std::count(seen_.begin(), seen_.end(), true);
    if (count == 0) return -1;
    auto at = std::find(seen_.begin(), seen_.end(), true);
    for (std::int64_t i = below(count); i > 0; --i) at = std::find(at + 1, seen_.end(), true);
    return at - seen_.begin();
  }
  static std::size_t uz(std::int64_t i) { return static_cast<std::size_t>(i); }

  GraphOfOne& graph_;
  std::mt19937 random_;
  std::vector<bool> seen_;  // by the query at hand
  std::vector<bool> nans_;
  std::int64_t left_ = 0;  // queries of the batch's sequence
  std::int64_t first_ = 0, step_ = 1, share_ = 1, rows_to_numbers_ = 1;
  std::int64_t padding_ = 1;    // cells
  std::int64_t both_ways_ = 1;  // queries of a prefix or an image
};

// The largest difference of a row, [v_dim] of one query and head, by the row's length, over all rows but these: those
// with NaN in the mask. A row may be nearly 0: a sink takes all.
double worst_row(const std::vector<float>& x, const std::vector<float>& reference,
                 const NodeShape& s, const std::vector<bool>& but) {
  if (x.empty() || x.size() != reference.size()) return infinity;
  double worst = 0;
  const auto n = static_cast<std::size_t>(s.v_dim);
  for (std::size_t row = 0; row < x.size() / n; ++row) {
    if (but[row]) continue;
    double off = 0, size = 0;
    for (std::size_t i = row * n; i < row * n + n; ++i) {
      const double a = x[i], b = reference[i];
      off += (a - b) * (a - b), size += b * b;
    }
    if (!std::isfinite(off)) return infinity;
    worst = std::max(worst, std::sqrt(off / std::max(size, 1e-20)));
  }
  return worst;
}

// Are all numbers of these rows NaN?
bool are_nan(const std::vector<float>& x, const std::vector<bool>& rows) {
  const std::size_t n = x.size() / rows.size();
  for (std::size_t i = 0; i < x.size(); ++i)
    if (rows[i / n] && !std::isnan(x[i])) return false;
  return !x.empty();
}

bool same_bits(const std::vector<float>& x, const std::vector<float>& y) {
  return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
}

NodeShape drawn_shape(std::mt19937& random) {
  const auto below = [&](unsigned n) { return static_cast<std::int64_t>(random() % n); };
  const auto seldom = [&](unsigned n) { return random() % n == 0; };
  struct Heads {
    std::int64_t q_heads, kv_heads, head_dim, v_dim;
  };
  // 34 heads: one query's fill a panel. The last ones have no blocks of 32 channels.
  constexpr Heads heads[] = {{8, 2, 128, 128}, {4, 1, 64, 64},  {16, 1, 576, 512}, {34, 1, 96, 32},
                             {4, 4, 256, 256}, {32, 8, 96, 96}, {5, 1, 128, 96},   {1, 1, 40, 40},
                             {6, 2, 80, 80},   {20, 4, 72, 72}};
  // 130 queries: more than are attended to at a time.
  constexpr std::int64_t queries[] = {1, 1, 2, 3, 8, 17, 40, 65, 130};
  constexpr ggml_type types[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16,  GGML_TYPE_Q8_0,
                                 GGML_TYPE_Q4_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL};
  const Heads& of = heads[below(std::size(heads))];
  NodeShape s;
  s.q_heads = of.q_heads, s.kv_heads = of.kv_heads, s.head_dim = of.head_dim, s.v_dim = of.v_dim;
  s.v_in_k = s.head_dim == 576;  // MLA
  s.n_q = queries[below(s.head_dim == 64 ? 9 : 7)];
  const unsigned kinds = s.head_dim % 32 == 0 ? 7 : 3;
  s.k_type = types[below(kinds)], s.v_type = seldom(3) ? types[below(kinds)] : s.k_type;
  if (s.v_in_k) s.v_type = s.k_type;
  s.cells = s.head_dim == 64 && seldom(3) ? 4000 + below(1000) : 60 + below(700);  // two ranges
  s.sinks = seldom(4), s.softcap = seldom(4) ? 5.0f : 0.0f;
  s.mask = !seldom(8);
  s.max_bias = s.mask && seldom(5) ? 8.0f : 0.0f;
  s.streams = seldom(5) && s.cells < 1000 ? 3 : 1;
  s.mask_heads = s.mask && seldom(6) ? s.q_heads : 1;
  return s;
}

// Every row is the one of ggml's operator; threads and n_kv_max, right or wrong, change no bit; and where the model says
// that it chooses keys, a mode that selects computes what exact mode does.
TEST(MaskNode, DrawnNodesAreWhatGgmlMakesOfThem) {
  constexpr double in_float = 2e-5, middling = 1e-3, rounded = 4e-2;
  const ggml_backend_ptr exact = Backends::quoka(R"({"arithmetic": "float"})"),
                         automatic = Backends::quoka(""),
                         selecting = Backends::quoka(
                             R"({"arithmetic": "float", "mode": "paper", "budget": 16,)"
                             R"( "dense_layers": 0, "decode": true, "threads": 2})");
  const char* const one = std::getenv("QUOKA_NODE_SEED");  // this case alone
  const unsigned first = one != nullptr ? static_cast<unsigned>(std::atoi(one)) : 0;
  for (unsigned seed = first; seed < first + (one != nullptr ? 1 : 90); ++seed) {
    std::mt19937 random(seed);
    const NodeShape s = drawn_shape(random);
    Twins twins(s);
    Drawn drawn(twins.node, static_cast<unsigned>(random()));
    const bool small = ggml_is_quantized(s.k_type) || ggml_is_quantized(s.v_type);
    const double coarse = small && (s.n_q >= 32 || !automatic_is_float) ? rounded : middling;
    for (int mask = 0; mask < 3; ++mask) {
      drawn.mask();
      SCOPED_TRACE(::testing::Message()
                   << "seed " << seed << ", " << s.q_heads << "/" << s.kv_heads << "/" << s.head_dim
                   << "/" << s.v_dim << ", " << s.n_q << " queries, " << s.cells << " cells, "
                   << ggml_type_name(s.k_type) << " and " << ggml_type_name(s.v_type) << ", "
                   << s.streams << " streams, ALiBi " << s.max_bias << ", masks " << s.mask_heads
                   << ", mask " << mask);
      const auto by = [&](const ggml_backend_ptr& backend) {
        Backends::set_threads(backend.get(), 1 + static_cast<int>(drawn.below(3)));
        return twins.node.computed_by(backend.get());
      };
      ggml_flash_attn_ext_set_n_kv_max(twins.node.out, 0);
      const std::vector<float> ours = by(exact), theirs = twins.by_ggml();
      EXPECT_LT(worst_row(ours, theirs, s, drawn.nans()), in_float);
      EXPECT_TRUE(are_nan(ours, drawn.nans()));
      // From 64 queries on ggml drops a NaN that no seen cell of the same 64 follows.
      EXPECT_TRUE(s.n_q >= 64 || are_nan(theirs, drawn.nans()));
      const std::vector<float> rounding = by(automatic);
      EXPECT_TRUE(are_nan(rounding, drawn.nans()));
      EXPECT_LT(worst_row(rounding, theirs, s, drawn.nans()), coarse);
      EXPECT_TRUE(same_bits(by(exact), ours));
      if (!s.mask || s.streams > 1 || s.mask_heads > 1) continue;
      for (const std::int64_t hint : {drawn.most(), drawn.most() / 2, 2 * drawn.most()}) {
        ggml_flash_attn_ext_set_n_kv_max(
            twins.node.out, static_cast<std::int32_t>(std::max<std::int64_t>(hint, 1)));
        EXPECT_TRUE(same_bits(by(drawn.below(2) == 0 ? exact : selecting), ours)) << hint;
      }
      EXPECT_TRUE(same_bits(twins.by_ggml(), theirs)) << "ggml heeds the hint";
    }
  }
}

// A prefix and an image that are seen both ways are exact where the chunks beside them select, and a chunk after
// padding on the left selects; a budget of all cells is exact everywhere. However the mask writes what is hidden.
TEST(MaskNode, CellsSeenBothWaysAreNeverLeftOut) {
  struct Sees {
    std::int64_t begin, end;
    bool both_ways;
  };
  constexpr std::int64_t past = 300;
  NodeShape s;
  s.n_q = 160, s.cells = 512;
  const std::pair<const char*, std::function<Sees(std::int64_t)>> masks[] = {
      {"a prefix",
       [](std::int64_t query) {
         return Sees{0, past + std::max<std::int64_t>(query + 1, 70), query < 70};
       }},
      {"an image",
       [](std::int64_t query) {
         const bool inside = query >= 64 && query < 96;
         return Sees{0, past + (inside ? 96 : query + 1), inside};
       }},
      {"padding on the left",
       [](std::int64_t query) {
         return Sees{50, past + query + 1, false};
       }},
  };
  const auto by = [](GraphOfOne& node, const std::string& settings) {
    return node.computed_by(
        Backends::quoka(R"({"arithmetic": "float", "chunk": 32, "dense_layers": 0, )" + settings +
                        "}")
            .get());
  };
  constexpr double in_float = 2e-5;
  const std::vector<bool> none(static_cast<std::size_t>(s.n_q * s.q_heads), false);
  for (const auto& [name, sees] : masks) {
    SCOPED_TRACE(name);
    std::vector<std::vector<float>> by_budget;
    for (const float hidden : {-infinity, -65504.0f}) {
      SCOPED_TRACE(hidden);
      Twins twins(s);
      std::vector<bool> causal;
      for (std::int64_t query = 0; query < s.n_q; ++query) {
        const Sees seen = sees(query);
        for (std::int64_t cell = 0; cell < s.cells; ++cell)
          twins.node.mask_at(cell, query) =
              ggml_fp32_to_fp16(cell >= seen.begin && cell < seen.end ? 0.0f : hidden);
        causal.insert(causal.end(), static_cast<std::size_t>(s.q_heads), !seen.both_ways);
      }
      const std::vector<float> theirs = twins.by_ggml();
      EXPECT_LT(worst_row(by(twins.node, R"("mode": "exact")"), theirs, s, none), in_float);
      EXPECT_LT(worst_row(by(twins.node, R"("mode": "paper", "budget": 1.0)"), theirs, s, none),
                in_float);
      by_budget.push_back(by(twins.node, R"("mode": "paper", "budget": 16)"));
      EXPECT_LT(worst_row(by_budget.back(), theirs, s, causal), in_float);
      EXPECT_GT(worst_row(by_budget.back(), theirs, s, none), 0.1) << "nothing was selected";
    }
    EXPECT_TRUE(same_bits(by_budget[0], by_budget[1]));
  }
}

}  // namespace
