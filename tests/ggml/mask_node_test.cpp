// FLASH_ATTN_EXT over drawn nodes, against ggml's CPU backend: shapes, types of cache, streams, sinks, soft-cap, ALiBi,
// and masks (support/engine_mask.hpp). n_kv_max is only a hint. QUOKA_NODE_SEED=n runs one draw.
//
// Over all caches except those of floats ggml's own kernel rounds queries and sums by more than a bias of -0.001
// changes. So its operator is given the same numbers as floats, and every row may be compared closely.

#include "ggml/nodes.hpp"
#include "support/attention_fixtures.hpp"
#include "support/engine_mask.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace {

using namespace quoka_test;

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

// Draws the mask of each stream and head that has its own. Returns which rows of the output, [streams, n_q, q_heads],
// have NaN in theirs.
std::vector<bool> draw_mask(GraphOfOne& graph, Random& random) {
  const NodeShape& s = graph.s;
  std::vector<bool> nans(uz(s.streams * s.n_q * s.q_heads), false);
  for (Index stream = 0; s.mask && stream < s.streams; ++stream)
    for (Index head = 0; head < s.mask_heads; ++head) {
      const EngineMask mask(random, s.n_q, s.cells, s.max_bias > 0);
      for (Index query = 0; query < s.n_q; ++query) {
        // ggml adds the numbers that engines write for -inf: a row of nothing else still sees its cells there.
        const bool sees = mask.sees_any(query), nan = mask.has_nan(query);
        for (Index cell = 0; cell < s.cells; ++cell)
          graph.mask_at(cell, query, stream, head) = ggml_fp32_to_fp16(
              sees ? static_cast<float>(mask.values(0, 0, query, cell)) : -infinity);
        for (Index i = 0; nan && i < s.q_heads; ++i)
          if (s.mask_heads == 1 || i == head)
            nans[uz((stream * s.n_q + query) * s.q_heads + i)] = true;
      }
    }
  return nans;
}

// The most numbers but -inf that a row holds.
Index most_numbers(const GraphOfOne& graph) {
  const Index cells = graph.s.cells;
  const auto* row = static_cast<const ggml_fp16_t*>(graph.mask->data);
  Index most = 0;
  for (Index i = 0; i < ggml_nrows(graph.mask); ++i, row += cells)
    most =
        std::max<Index>(most, cells - std::count(row, row + cells, ggml_fp32_to_fp16(-infinity)));
  return most;
}

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

NodeShape drawn_shape(Random& random) {
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
  const Heads of = random.one_of(heads);
  NodeShape s;
  s.q_heads = of.q_heads, s.kv_heads = of.kv_heads, s.head_dim = of.head_dim, s.v_dim = of.v_dim;
  s.v_in_k = s.head_dim == 576;  // MLA
  s.n_q = queries[random.below(s.head_dim == 64 ? 9 : 7)];
  const Index kinds = s.head_dim % 32 == 0 ? 7 : 3;
  s.k_type = types[random.below(kinds)];
  s.v_type = random.seldom(3) ? types[random.below(kinds)] : s.k_type;
  if (s.v_in_k) s.v_type = s.k_type;
  s.cells = s.head_dim == 64 && random.seldom(3) ? 4000 + random.below(1000)  // two ranges
                                                 : 60 + random.below(700);
  s.sinks = random.seldom(4), s.softcap = random.seldom(4) ? 5.0f : 0.0f;
  s.mask = !random.seldom(8);
  s.max_bias = s.mask && random.seldom(5) ? 8.0f : 0.0f;
  s.streams = random.seldom(5) && s.cells < 1000 ? 3 : 1;
  s.mask_heads = s.mask && random.seldom(6) ? s.q_heads : 1;
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
  for_each_draw("NODE", 90, [&](Random& random, std::uint64_t) {
    const NodeShape s = drawn_shape(random);
    Twins twins(s);
    const bool small = ggml_is_quantized(s.k_type) || ggml_is_quantized(s.v_type);
    const double coarse = small && (s.n_q >= 32 || !automatic_is_float) ? rounded : middling;
    for (int mask = 0; mask < 3; ++mask) {
      const std::vector<bool> nans = draw_mask(twins.node, random);
      SCOPED_TRACE(::testing::Message()
                   << s.q_heads << "/" << s.kv_heads << "/" << s.head_dim << "/" << s.v_dim << ", "
                   << s.n_q << " queries, " << s.cells << " cells, " << ggml_type_name(s.k_type)
                   << " and " << ggml_type_name(s.v_type) << ", " << s.streams << " streams, ALiBi "
                   << s.max_bias << ", masks " << s.mask_heads << ", mask " << mask);
      const auto by = [&](const ggml_backend_ptr& backend) {
        Backends::set_threads(backend.get(), 1 + static_cast<int>(random.below(3)));
        return twins.node.computed_by(backend.get());
      };
      ggml_flash_attn_ext_set_n_kv_max(twins.node.out, 0);
      const std::vector<float> ours = by(exact), theirs = twins.by_ggml();
      EXPECT_LT(worst_row(ours, theirs, s, nans), in_float);
      EXPECT_TRUE(are_nan(ours, nans));
      // From 64 queries on ggml drops a NaN that no seen cell of the same 64 follows.
      EXPECT_TRUE(s.n_q >= 64 || are_nan(theirs, nans));
      const std::vector<float> rounding = by(automatic);
      EXPECT_TRUE(are_nan(rounding, nans));
      EXPECT_LT(worst_row(rounding, theirs, s, nans), coarse);
      EXPECT_TRUE(same_bits(by(exact), ours));
      if (!s.mask || s.streams > 1 || s.mask_heads > 1) continue;
      const Index most = most_numbers(twins.node);
      for (const Index hint : {most, most / 2, 2 * most}) {
        ggml_flash_attn_ext_set_n_kv_max(twins.node.out,
                                         static_cast<std::int32_t>(std::max<Index>(hint, 1)));
        EXPECT_TRUE(same_bits(by(random.below(2) == 0 ? exact : selecting), ours)) << hint;
      }
      EXPECT_TRUE(same_bits(twins.by_ggml(), theirs)) << "ggml heeds the hint";
    }
  });
}

}  // namespace
