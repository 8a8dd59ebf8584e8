// Every option has an effect: for each member of the options of attention and of every selector a case in which a
// change of this member alone changes the Selection, or the output. A member that has no case does not compile.

#include <quoka/attention/attention.hpp>
#include <quoka/select/all.hpp>

#include "support/fixtures.hpp"

#include <tuple>

namespace {

using namespace quoka_test;
using namespace quoka;

// ---- all members: one that is not named here does not compile ------------------------------------

auto members(TopKOptions& o) {
  auto& [window, keep_first, keep_last] = o;
  return std::tie(window, keep_first, keep_last);
}
auto members(TwoLevels& o) {
  auto& [block, candidates] = o;
  return std::tie(block, candidates);
}
auto members(LayerPlan& o) {
  auto& [layer, layer_count, first_sparse] = o;
  return std::tie(layer, layer_count, first_sparse);
}
auto members(QuokaOptions& o) {
  auto& [budget, n_queries, scoring, aggregation, group_mode, query_choice, domain, top_k, sketch,
         cascade, two_levels] = o;
  return std::tuple_cat(std::tie(budget, n_queries, scoring, aggregation, group_mode, query_choice,
                                 domain, sketch, cascade),
                        members(top_k), members(two_levels));
}
auto members(SampleAttentionOptions& o) {
  auto& [budget, n_queries, domain, top_k, sketch] = o;
  return std::tuple_cat(std::tie(budget, n_queries, domain, sketch), members(top_k));
}
auto members(SparqOptions& o) {
  auto& [budget, rank, domain, top_k, sketch] = o;
  return std::tuple_cat(std::tie(budget, rank, domain, sketch), members(top_k));
}
auto members(LokiOptions& o) {
  auto& [budget, rank, domain, calibration, top_k, sketch] = o;
  return std::tuple_cat(std::tie(budget, rank, domain, calibration, sketch), members(top_k));
}
auto members(TidalDecodeOptions& o) {
  auto& [budget, plan, top_k] = o;
  return std::tuple_cat(std::tie(budget), members(plan), members(top_k));
}
auto members(LessIsMoreOptions& o) {
  auto& [budget, plan, keep_first] = o;
  return std::tuple_cat(std::tie(budget, keep_first), members(plan));
}
auto members(SnapKvOptions& o) {
  auto& [budget, observation, pool, keep_first] = o;
  return std::tie(budget, observation, pool, keep_first);
}
auto members(KeyDiffOptions& o) {
  auto& [budget, keep_first] = o;
  return std::tie(budget, keep_first);
}
auto members(QuestOptions& o) {
  auto& [budget, page, domain, top_k] = o;
  return std::tuple_cat(std::tie(budget, page, domain), members(top_k));
}
auto members(XAttentionOptions& o) {
  auto& [budget, stride, block] = o;
  return std::tie(budget, stride, block);
}
auto members(FlashPrefillOptions& o) {
  auto& [budget, block] = o;
  return std::tie(budget, block);
}
auto members(OracleOptions& o) {
  auto& [budget, aggregation, top_k] = o;
  return std::tuple_cat(std::tie(budget, aggregation), members(top_k));
}
auto members(RandomOptions& o) {
  auto& [budget, seed, top_k] = o;
  return std::tuple_cat(std::tie(budget, seed), members(top_k));
}
auto members(FirstRecentOptions& o) {
  auto& [budget, keep_first] = o;
  return std::tie(budget, keep_first);
}
auto members(AttentionOptions& o) {
  auto& [scale, softcap, sink_logits, sliding_window, arithmetic, query_position, causal, mask,
         mask_factors, alibi_slopes, may_repeat] = o;  // the last refuses: repeated_chunk_test
  return std::tie(scale, softcap, sink_logits, sliding_window, arithmetic, query_position, causal,
                  mask, mask_factors, alibi_slopes);
}

// ---- a case for each of them ---------------------------------------------------------------------

// These options, and another value of one member.
template <class Options, class Value>
struct Case {
  Options base;
  Value value;
};

// As many cases as members, in their order.
template <class Options, class Outcome, class... Values>
void expect_effects(const char* name, Outcome&& outcome, const Case<Options, Values>&... cases) {
  using Members = decltype(members(std::declval<Options&>()));
  static_assert(std::tuple_size_v<Members> == sizeof...(Values), "each member has a case");
  [&]<std::size_t... i>(std::index_sequence<i...>) {
    const auto expect_effect = [&]<std::size_t at>(const auto& one) {
      Options changed = one.base;
      std::get<at>(members(changed)) = one.value;
      EXPECT_FALSE(outcome(one.base) == outcome(changed)) << name << ": member " << at;
    };
    (expect_effect.template operator()<i>(cases), ...);
  }
  (std::index_sequence_for<Values...>{});
}

constexpr Index group = 4, kv_heads = 2, head_dim = 24, past_len = 400, chunk = 40;

struct Inputs {
  Tensor4<float> q, k;
};
// Some keys matter, some channels more than others.
const Inputs& inputs() {
  static const Inputs made = [] {
    Random random(960);
    Inputs in{random.tensor<float>(1, group * kv_heads, past_len, head_dim, 1.5),
              random.tensor<float>(1, kv_heads, past_len, head_dim, 1.5)};
    for (Index t = 0; t < past_len; ++t)
      for (Index head = 0; head < kv_heads; ++head)
        for (Index c = 0; c < head_dim; ++c)
          in.k(0, head, t, c) *= (t % 7 == 3 ? 2.0f : 1.0f) / static_cast<float>(1 + c % 5);
    return in;
  }();
  return made;
}

// What ten chunks of queries attend to, of keys that came chunk by chunk; or one chunk by a layer, where layers
// before it have other queries.
template <class S>
std::vector<Selection> selected(const typename S::Options& options) {
  const TensorView<const float> q(inputs().q), k(inputs().k);
  const SerialExecutor serial;
  typename S::State state;
  std::vector<Selection> keep(past_len / chunk);
  if constexpr (requires { options.plan; }) {
    auto of_layer = options;
    for (Index layer = 0; layer <= options.plan.layer; ++layer) {
      of_layer.plan.layer = layer;
      S(of_layer).select({.q = q.slice(layer * chunk, chunk), .k = k}, state, keep[0], serial);
    }
  } else {
    const S selector(options);
    for (Index begin = 0; begin < past_len; begin += chunk)
      selector.appended({.q = q.slice(begin, chunk), .k = k.slice(0, begin + chunk)}, state,
                        serial);
    for (Index i = 0; i < std::ssize(keep); ++i)
      selector.select({.q = q.slice(i * chunk, chunk), .k = k}, state, keep[uz(i)], serial);
  }
  return keep;
}

template <class S, class... Values>
void expect_selects_otherwise(const char* name, const Case<typename S::Options, Values>&... cases) {
  expect_effects<typename S::Options>(name, selected<S>, cases...);
}

// Of keys that others have not.
std::shared_ptr<const LokiCalibration> calibration() {
  Random random(961);
  const auto keys = random.tensor<float>(1, kv_heads, 64, head_dim);
  LokiFit fit(kv_heads, head_dim);
  fit.add(view_of(keys));
  return std::make_shared<const LokiCalibration>(fit.finish());
}

TEST(OptionsEffect, Quoka) {
  using O = QuokaOptions;
  const O paper{.budget = 20}, mean{.budget = 20, .domain = Domain::softmax};
  O coded = O::recommended(group, 20);
  coded.sketch = Sketch::on;
  O exact = coded;
  exact.budget = 150, exact.sketch = Sketch::off, exact.cascade = 0;
  O levels = paper;
  levels.sketch = Sketch::on, levels.two_levels = {.block = 16, .candidates = 3};
  expect_selects_otherwise<QuokaSelector>(
      "quoka", Case<O, Budget>{paper, 21}, Case<O, Index>{paper, 15},
      Case<O, Scoring>{paper, Scoring::dot}, Case<O, Aggregation>{mean, Aggregation::mean},
      Case<O, GroupMode>{paper, GroupMode::shared},
      Case<O, QueryChoice>{paper, QueryChoice::dissimilar_and_last},
      Case<O, Domain>{paper, Domain::softmax}, Case<O, Sketch>{exact, Sketch::on},
      Case<O, Index>{coded, 0}, Case<O, Index>{paper, 3}, Case<O, Index>{paper, 1},
      Case<O, Index>{paper, 1}, Case<O, Index>{paper, 16}, Case<O, Index>{levels, 6});
}

// Each value of an option of QuoKA's selects otherwise than every other.
TEST(OptionsEffect, EveryChoiceOfQuoka) {
  const auto expect_differ = [](auto member, auto values) {
    std::vector<std::vector<Selection>> all;
    for (const auto value : values) {
      QuokaOptions o{.budget = 20};
      o.*member = value;
      all.push_back(selected<QuokaSelector>(o));
    }
    for (std::size_t i = 0; i < all.size(); ++i)
      for (std::size_t j = 0; j < i; ++j) EXPECT_FALSE(all[i] == all[j]) << i << " as " << j;
  };
  expect_differ(&QuokaOptions::group_mode,
                std::array{GroupMode::rank, GroupMode::shared, GroupMode::per_head});
  expect_differ(&QuokaOptions::query_choice,
                std::array{QueryChoice::dissimilar, QueryChoice::uniform, QueryChoice::last,
                           QueryChoice::dissimilar_and_last, QueryChoice::mixed});
}

TEST(OptionsEffect, MethodsThatScoreKeys) {
  const Budget some = 20;
  {
    using O = SampleAttentionOptions;
    const O base{.budget = some}, exact{.budget = 150, .sketch = Sketch::off};
    expect_selects_otherwise<SampleAttentionSelector>(
        "sample_attention", Case<O, Budget>{base, 21}, Case<O, Index>{base, 15},
        Case<O, Domain>{base, Domain::logit}, Case<O, Sketch>{exact, Sketch::on},
        Case<O, Index>{base, 3}, Case<O, Index>{base, 1}, Case<O, Index>{base, 1});
  }
  {
    using O = SparqOptions;
    const O base{.budget = some, .rank = 12},
        exact{.budget = 150, .rank = 12, .sketch = Sketch::off};
    expect_selects_otherwise<SparqSelector>(
        "sparq", Case<O, Budget>{base, 21}, Case<O, Index>{base, 6},
        Case<O, Domain>{base, Domain::logit}, Case<O, Sketch>{exact, Sketch::on},
        Case<O, Index>{base, 3}, Case<O, Index>{base, 1}, Case<O, Index>{base, 1});
  }
  {
    using O = LokiOptions;
    const O base{.budget = some, .rank = 6, .calibration = calibration()},
        exact{.budget = 150, .rank = 6, .calibration = calibration(), .sketch = Sketch::off};
    expect_selects_otherwise<LokiSelector>(
        "loki", Case<O, Budget>{base, 21}, Case<O, Index>{base, 4},
        Case<O, Domain>{base, Domain::logit},
        Case<O, std::shared_ptr<const LokiCalibration>>{base, nullptr},
        Case<O, Sketch>{exact, Sketch::on}, Case<O, Index>{base, 3}, Case<O, Index>{base, 1},
        Case<O, Index>{base, 1});
  }
  {
    using O = OracleOptions;
    const O base{.budget = some};
    expect_selects_otherwise<OracleSelector>(
        "oracle", Case<O, Budget>{base, 21}, Case<O, Aggregation>{base, Aggregation::max},
        Case<O, Index>{base, 3}, Case<O, Index>{base, 1}, Case<O, Index>{base, 1});
  }
  {
    using O = RandomOptions;
    const O base{.budget = some};
    expect_selects_otherwise<RandomSelector>(
        "random", Case<O, Budget>{base, 21}, Case<O, std::uint64_t>{base, 1},
        Case<O, Index>{base, 3}, Case<O, Index>{base, 4}, Case<O, Index>{base, 4});
  }
  {
    using O = FirstRecentOptions;
    const O base{.budget = some};
    expect_selects_otherwise<FirstRecentSelector>("first_recent", Case<O, Budget>{base, 21},
                                                  Case<O, Index>{base, 5});
  }
}

// Keys that end inside a page: most recent ones are forced by keep_last alone.
TEST(OptionsEffect, MethodsThatChooseBlocks) {
  {
    using O = QuestOptions;
    const O base{.budget = 50};
    expect_selects_otherwise<QuestSelector>(
        "quest", Case<O, Budget>{base, 51}, Case<O, Index>{base, 8},
        Case<O, Domain>{base, Domain::softmax}, Case<O, Index>{base, 3}, Case<O, Index>{base, 1},
        Case<O, Index>{base, 3});
  }
  {
    using O = XAttentionOptions;
    const O base{.budget = 50, .stride = 4, .block = 16};
    expect_selects_otherwise<XAttentionSelector>("xattention", Case<O, Budget>{base, 51},
                                                 Case<O, Index>{base, 8}, Case<O, Index>{base, 8});
  }
  {
    using O = FlashPrefillOptions;
    const O base{.budget = 150, .block = 16};
    expect_selects_otherwise<FlashPrefillSelector>("flash_prefill", Case<O, Budget>{base, 151},
                                                   Case<O, Index>{base, 8});
  }
}

TEST(OptionsEffect, MethodsThatEvict) {
  using S = SnapKvOptions;
  const S snapkv{.budget = 50, .observation = 8};
  expect_selects_otherwise<SnapKvSelector>("snapkv", Case<S, Budget>{snapkv, 51},
                                           Case<S, Index>{snapkv, 9}, Case<S, Index>{snapkv, 3},
                                           Case<S, Index>{snapkv, 4});
  using K = KeyDiffOptions;
  const K keydiff{.budget = 50};
  expect_selects_otherwise<KeyDiffSelector>("keydiff", Case<K, Budget>{keydiff, 51},
                                            Case<K, Index>{keydiff, 4});
}

// Layers 2 and 4 of 10 choose.
TEST(OptionsEffect, MethodsThatShareAChoice) {
  const LayerPlan plan{.layer = 5, .layer_count = 10}, first{.layer = 3, .layer_count = 10};
  using T = TidalDecodeOptions;
  const T tidal{.budget = 20, .plan = plan}, tidal_first{.budget = 20, .plan = first};
  expect_selects_otherwise<TidalDecodeSelector>(
      "tidal_decode", Case<T, Budget>{tidal, 21}, Case<T, Index>{tidal, 3},
      Case<T, Index>{tidal, 32}, Case<T, Index>{tidal_first, 3}, Case<T, Index>{tidal, 3},
      Case<T, Index>{tidal, 1}, Case<T, Index>{tidal, 1});
  using L = LessIsMoreOptions;
  const L less{.budget = 20, .plan = plan}, less_first{.budget = 20, .plan = first};
  expect_selects_otherwise<LessIsMoreSelector>(
      "less_is_more", Case<L, Budget>{less, 21}, Case<L, Index>{less, 0}, Case<L, Index>{less, 3},
      Case<L, Index>{less, 32}, Case<L, Index>{less_first, 3});
}

TEST(OptionsEffect, Attention) {
  using O = AttentionOptions;
  const TensorView<const float> q = TensorView<const float>(inputs().q).slice(0, chunk),
                                k(inputs().k);
  const auto attended = [&](const O& options) {
    std::vector<float> out(uz(group * kv_heads * chunk * head_dim));
    const Past past(k.slice(0, past_len - chunk), k.slice(0, past_len - chunk));
    const Chunk own{k.slice(past_len - chunk, chunk), k.slice(past_len - chunk, chunk)};
    attention(
        q, past, own,
        TensorView<float>(out.data(), {1, group * kv_heads, chunk, head_dim},
                          {group * kv_heads * chunk * head_dim, chunk * head_dim, head_dim, 1}),
        options);
    return out;
  };
  const std::vector<float> of_heads(uz(group * kv_heads), 0.5f);
  Tensor4<float> biases(1, 1, chunk, past_len);
  biases.setZero();
  biases(0, 0, 3, 40) = 5.0f;
  const O base{}, windowed{.sliding_window = 30}, masked{.mask = Mask(biases)};
  // In fixed point where the ISA has it, and elsewhere in float: an effect of the machine's.
  const Arithmetic fixed = arithmetic_used(Arithmetic::fixed16);
  if (fixed == Arithmetic::fixed16)
    EXPECT_NE(attended({.arithmetic = fixed}), attended(base));
  else
    EXPECT_EQ(attended({.arithmetic = Arithmetic::fixed16}), attended(base));
  const auto outcome = [&](const O& options) {
    return std::pair(options.arithmetic, attended(options));
  };
  expect_effects<O>("attention", outcome, Case<O, float>{base, 0.1f}, Case<O, float>{base, 2.0f},
                    Case<O, std::span<const float>>{base, of_heads}, Case<O, Index>{base, 30},
                    Case<O, Arithmetic>{base, Arithmetic::fixed16},
                    Case<O, Index>{windowed, past_len}, Case<O, bool>{base, false},
                    Case<O, Mask>{base, Mask(biases)},
                    Case<O, std::span<const float>>{masked, of_heads},
                    Case<O, std::span<const float>>{base, of_heads});
}

}  // namespace
