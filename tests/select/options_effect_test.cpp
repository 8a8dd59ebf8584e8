// Every option has an effect: for each member of the options of every selector of methods/all.hpp, of attention, of
// MaskedAttention and of the stages a case in which a change of this member alone changes the Selection, or the output.
// A member that has no case does not compile, nor does a selector without cases.

#include <quoka/attention/attention.hpp>
#include <quoka/engine/masked_attention.hpp>
#include <quoka/methods/all.hpp>
#include <quoka/select/stages.hpp>

#include "support/fixtures.hpp"
#include "support/selector_names.hpp"

#include <tuple>

namespace {

using namespace quoka_test;
using namespace quoka;

// ---- all members: one that is not named here does not compile ------------------------------------

// A member as it is, or the members of a struct of options in it.
template <class T>
auto parts(T& member) {
  return std::tie(member);
}
auto parts(LayerPlan& o);
template <class... T>
auto parts_of(T&... members) {
  return std::tuple_cat(parts(members)...);
}

// All members of T, in their order, by their names: another number of them does not compile, and each named one needs a
// case. members(options): references to all of them.
#define QUOKA_TEST_MEMBERS(T, ...) \
  auto members(T& o) {             \
    auto& [__VA_ARGS__] = o;       \
    return parts_of(__VA_ARGS__);  \
  }
QUOKA_TEST_MEMBERS(LayerPlan, layer, layer_count, first_sparse)
auto parts(LayerPlan& o) { return members(o); }

QUOKA_TEST_MEMBERS(QuokaOptions, budget, n_queries, keep_first, keep_last, sketch)
QUOKA_TEST_MEMBERS(MassOptions, budget, threshold, least, queries, kernel_size, keep_first,
                   keep_last, sketch, all_channels)
QUOKA_TEST_MEMBERS(SampleAttentionOptions, budget, n_queries, keep_first, keep_last, sketch)
QUOKA_TEST_MEMBERS(SparqOptions, budget, rank, keep_first, keep_last, sketch)
QUOKA_TEST_MEMBERS(LokiOptions, budget, rank, fitted, keep_first, keep_last, sketch)
QUOKA_TEST_MEMBERS(TidalDecodeOptions, budget, plan, keep_first, keep_last)
QUOKA_TEST_MEMBERS(LessIsMoreOptions, budget, plan, keep_first)
QUOKA_TEST_MEMBERS(SnapKvOptions, budget, window_size, kernel_size, keep_first)
QUOKA_TEST_MEMBERS(KeyDiffOptions, budget, keep_first)
QUOKA_TEST_MEMBERS(QuestOptions, budget, page, keep_first, keep_last)
QUOKA_TEST_MEMBERS(XAttentionOptions, budget, stride, block, mass)
QUOKA_TEST_MEMBERS(FlashPrefillOptions, budget, block, relative)
QUOKA_TEST_MEMBERS(OracleOptions, budget, aggregation, keep_first, keep_last)
QUOKA_TEST_MEMBERS(RandomOptions, budget, seed, keep_first, keep_last)
QUOKA_TEST_MEMBERS(FirstRecentOptions, budget, keep_first)
QUOKA_TEST_MEMBERS(AttentionOptions, scale, softcap, sinks, sliding_window, arithmetic, q_offset,
                   causal, mask, mask_factors, alibi_slopes, lists)
QUOKA_TEST_MEMBERS(MaskedOptions, selection, chunk, min_past, decode, sketch)
QUOKA_TEST_MEMBERS(SubselectOptions, query_choice, group)
#undef QUOKA_TEST_MEMBERS

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

// The keys that ten chunks of queries attend to, as keys come chunk by chunk; or one chunk by a layer whose earlier
// layers have other queries.
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
      S(of_layer).select({.q = q.slice(layer * chunk, chunk), .k = k, .logits = LogitOptions{}},
                         state, keep[0], serial);
    }
  } else {
    const S selector(options);
    for (Index begin = 0; begin < past_len; begin += chunk)
      selector.appended(
          {.q = q.slice(begin, chunk), .k = k.slice(0, begin + chunk), .logits = LogitOptions{}},
          state, serial);
    for (Index i = 0; i < std::ssize(keep); ++i)
      selector.select(
          {.q = q.slice(i * chunk, chunk), .k = k, .logits = LogitOptions{}, .attends = true},
          state, keep[uz(i)], serial);
  }
  return keep;
}

template <class S, class... Values>
void expect_selects_otherwise(const char* name, const Case<typename S::Options, Values>&... cases) {
  expect_effects<typename S::Options>(name, selected<S>, cases...);
}

// A selector's cases: one of its own for each selector of methods/all.hpp.
template <class S>
void expect_effects_of() {
  static_assert(!std::is_same_v<S, S>, "this selector has no cases of its options");
}
template <>
void expect_effects_of<DenseSelector>() {
  static_assert(std::is_empty_v<DenseSelector::Options>);
}

template <>
void expect_effects_of<QuokaSelector>() {
  using O = QuokaOptions;
  // The sketch changes what a State keeps, and no choice.
  const auto outcome = [](const O& options) {
    QuokaSelector::State state;
    const SerialExecutor serial;
    QuokaSelector(options).appended({.q = {}, .k = inputs().k}, state, serial);
    return std::pair(selected<QuokaSelector>(options), state.kept_bytes());
  };
  const O paper{.budget = Budget::keys(20), .sketch = Sketch::off};
  expect_effects<O>("quoka", outcome, Case<O, Budget>{paper, Budget::keys(21)},
                    Case<O, Index>{paper, 15}, Case<O, Index>{paper, 1}, Case<O, Index>{paper, 1},
                    Case<O, Sketch>{paper, Sketch::on});
}

template <>
void expect_effects_of<MassSelector>() {
  using O = MassOptions;
  O coded = O::balanced(Budget::keys(20));
  coded.sketch = Sketch::on;
  O exact = coded;
  exact.budget = Budget::keys(150), exact.sketch = Sketch::off;
  const O free{.threshold = 1.0f, .least = 0};
  expect_selects_otherwise<MassSelector>(
      "mass", Case<O, Budget>{coded, Budget::keys(21)}, Case<O, float>{free, 2.0f},
      Case<O, Index>{free, 390}, Case<O, Index>{coded, 10}, Case<O, Index>{coded, 1},
      Case<O, Index>{coded, 1}, Case<O, Index>{coded, 1}, Case<O, Sketch>{exact, Sketch::on},
      Case<O, bool>{coded, false});
}

template <>
void expect_effects_of<SampleAttentionSelector>() {
  using O = SampleAttentionOptions;
  const O base{.budget = quoka::Budget::keys(20)},
      exact{.budget = quoka::Budget::keys(150), .sketch = Sketch::off};
  expect_selects_otherwise<SampleAttentionSelector>(
      "sample_attention", Case<O, Budget>{base, Budget::keys(21)}, Case<O, Index>{base, 15},
      Case<O, Index>{base, 1}, Case<O, Index>{base, 1}, Case<O, Sketch>{exact, Sketch::on});
}

template <>
void expect_effects_of<SparqSelector>() {
  using O = SparqOptions;
  const O base{.budget = quoka::Budget::keys(20), .rank = 12},
      exact{.budget = quoka::Budget::keys(150), .rank = 12, .sketch = Sketch::off};
  expect_selects_otherwise<SparqSelector>(
      "sparq", Case<O, Budget>{base, Budget::keys(21)}, Case<O, Index>{base, 6},
      Case<O, Index>{base, 1}, Case<O, Index>{base, 1}, Case<O, Sketch>{exact, Sketch::on});
}

template <>
void expect_effects_of<LokiSelector>() {
  using O = LokiOptions;
  const O base{.budget = quoka::Budget::keys(20), .rank = 6, .fitted = 60},
      exact{.budget = quoka::Budget::keys(150), .rank = 6, .fitted = 60, .sketch = Sketch::off};
  expect_selects_otherwise<LokiSelector>("loki", Case<O, Budget>{base, Budget::keys(21)},
                                         Case<O, Index>{base, 4}, Case<O, Index>{base, 200},
                                         Case<O, Index>{base, 1}, Case<O, Index>{base, 1},
                                         Case<O, Sketch>{exact, Sketch::on});
}

template <>
void expect_effects_of<OracleSelector>() {
  using O = OracleOptions;
  const O base{.budget = quoka::Budget::keys(20)};
  expect_selects_otherwise<OracleSelector>("oracle", Case<O, Budget>{base, Budget::keys(21)},
                                           Case<O, Aggregation>{base, Aggregation::max},
                                           Case<O, Index>{base, 1}, Case<O, Index>{base, 1});
}

template <>
void expect_effects_of<RandomSelector>() {
  using O = RandomOptions;
  const O base{.budget = quoka::Budget::keys(20)};
  expect_selects_otherwise<RandomSelector>("random", Case<O, Budget>{base, Budget::keys(21)},
                                           Case<O, std::uint64_t>{base, 1}, Case<O, Index>{base, 4},
                                           Case<O, Index>{base, 4});
}

template <>
void expect_effects_of<FirstRecentSelector>() {
  using O = FirstRecentOptions;
  const O base{.budget = quoka::Budget::keys(20)};
  expect_selects_otherwise<FirstRecentSelector>(
      "first_recent", Case<O, Budget>{base, Budget::keys(21)}, Case<O, Index>{base, 5});
}

// Keys that end inside a page: most recent ones are forced by keep_last alone.
template <>
void expect_effects_of<QuestSelector>() {
  using O = QuestOptions;
  const O base{.budget = quoka::Budget::keys(50)};
  expect_selects_otherwise<QuestSelector>("quest", Case<O, Budget>{base, Budget::keys(51)},
                                          Case<O, Index>{base, 8}, Case<O, Index>{base, 1},
                                          Case<O, Index>{base, 3});
}

template <>
void expect_effects_of<XAttentionSelector>() {
  using O = XAttentionOptions;
  const O base{.budget = quoka::Budget::keys(50), .stride = 4, .block = 16};
  expect_selects_otherwise<XAttentionSelector>(
      "xattention", Case<O, Budget>{base, Budget::keys(51)}, Case<O, Index>{base, 8},
      Case<O, Index>{base, 8}, Case<O, double>{base, 0.5});
}

template <>
void expect_effects_of<FlashPrefillSelector>() {
  using O = FlashPrefillOptions;
  const O base{.budget = quoka::Budget::keys(150), .block = 16};
  expect_selects_otherwise<FlashPrefillSelector>(
      "flash_prefill", Case<O, Budget>{base, Budget::keys(151)}, Case<O, Index>{base, 8},
      Case<O, double>{base, 0.3});
}

template <>
void expect_effects_of<SnapKvSelector>() {
  using O = SnapKvOptions;
  const O base{.budget = quoka::Budget::keys(50), .window_size = 8};
  expect_selects_otherwise<SnapKvSelector>("snapkv", Case<O, Budget>{base, Budget::keys(51)},
                                           Case<O, Index>{base, 9}, Case<O, Index>{base, 3},
                                           Case<O, Index>{base, 4});
}

template <>
void expect_effects_of<KeyDiffSelector>() {
  using O = KeyDiffOptions;
  const O base{.budget = quoka::Budget::keys(50)};
  expect_selects_otherwise<KeyDiffSelector>("keydiff", Case<O, Budget>{base, Budget::keys(51)},
                                            Case<O, Index>{base, 4});
}

// Layers 2 and 4 of 10 choose.
const LayerPlan plan{.layer = 5, .layer_count = 10}, first_plan{.layer = 3, .layer_count = 10};

template <>
void expect_effects_of<TidalDecodeSelector>() {
  using O = TidalDecodeOptions;
  const O base{.budget = quoka::Budget::keys(20), .plan = plan},
      first{.budget = quoka::Budget::keys(20), .plan = first_plan};
  expect_selects_otherwise<TidalDecodeSelector>(
      "tidal_decode", Case<O, Budget>{base, Budget::keys(21)}, Case<O, Index>{base, 3},
      Case<O, Index>{base, 32}, Case<O, Index>{first, 3}, Case<O, Index>{base, 1},
      Case<O, Index>{base, 1});
}

template <>
void expect_effects_of<LessIsMoreSelector>() {
  using O = LessIsMoreOptions;
  const O base{.budget = quoka::Budget::keys(20), .plan = plan},
      first{.budget = quoka::Budget::keys(20), .plan = first_plan};
  expect_selects_otherwise<LessIsMoreSelector>(
      "less_is_more", Case<O, Budget>{base, Budget::keys(21)}, Case<O, Index>{base, 3},
      Case<O, Index>{base, 32}, Case<O, Index>{first, 3}, Case<O, Index>{base, 0});
}

template <class S>
class OptionsEffectOf : public ::testing::Test {};
TYPED_TEST_SUITE(OptionsEffectOf, SelectorTypes, SelectorNames);

TYPED_TEST(OptionsEffectOf, EachMember) { expect_effects_of<TypeParam>(); }

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
  std::vector<Position> some_keys(uz(chunk * 40));
  for (std::size_t i = 0; i < some_keys.size(); ++i) some_keys[i] = static_cast<Position>(i % 40);
  Tensor4<float> biases(1, 1, chunk, past_len);
  biases.setZero();
  biases(0, 0, 3, 40) = 5.0f;
  const O base{}, windowed{.sliding_window = 30}, masked{.mask = Mask(biases)};
  // The effect depends on the machine: products of bfloat16 if the ISA has them, else float.
  const Arithmetic rounded = Arithmetic::bf16;
  EXPECT_EQ(attended({.arithmetic = rounded}) != attended({.arithmetic = Arithmetic::float_}),
            arithmetic_used(rounded) == rounded);
  const auto outcome = [&](const O& options) {
    return std::tuple(options.arithmetic, attended(options));
  };
  expect_effects<O>("attention", outcome, Case<O, float>{base, 0.1f}, Case<O, float>{base, 2.0f},
                    Case<O, std::span<const float>>{base, of_heads}, Case<O, Index>{base, 30},
                    Case<O, Arithmetic>{base, Arithmetic::bf16}, Case<O, Index>{windowed, past_len},
                    Case<O, bool>{base, false}, Case<O, Mask>{base, Mask(biases)},
                    Case<O, std::span<const float>>{masked, of_heads},
                    Case<O, std::span<const float>>{base, of_heads},
                    Case<O, IndexLists>{base, IndexLists(TensorView<const Position>(
                                                  some_keys.data(), {1, 1, chunk, 40}))});
}

TEST(OptionsEffect, TheStages) {
  const Tensor4<float> q =
      inputs().q.slice(Eigen::array<Index, 4>{0, 0, 0, 0},
                       Eigen::array<Index, 4>{1, group * kv_heads, chunk, head_dim});
  using O = SubselectOptions;
  const O mixed{.query_choice = QueryChoice::mixed};
  const auto kept = [&](const O& options) {
    const auto positions = subselect_query_positions(q, 8, options);
    return std::vector<Position>(positions.data(), positions.data() + positions.size());
  };
  expect_effects<O>("subselect", kept, Case<O, QueryChoice>{O{}, QueryChoice::mixed},
                    Case<O, Index>{mixed, group});
}

// The keys of the inputs as an engine's cache: a chunk of enough queries to select, then a single one.
TEST(OptionsEffect, MaskedAttentions) {
  using O = MaskedOptions;
  const TensorView<const float> q(inputs().q), k(inputs().k);
  const auto mask_of = [](Index queries, Index first_sees) {
    Tensor4<Eigen::half> mask(1, 1, queries, past_len);
    for (Index i = 0; i < queries; ++i)
      for (Index cell = 0; cell < past_len; ++cell)
        mask(0, 0, i, cell) = Eigen::half(cell < first_sees + i ? 0.0f : -infinity);
    return mask;
  };
  constexpr Index many = 2 * chunk;
  const auto of_chunk = mask_of(many, past_len - many + 1), of_one = mask_of(1, past_len);
  const auto outcome = [&](const O& options) {
    MaskedAttention layer;
    std::vector<float> all;
    for (const auto* mask : {&of_chunk, &of_one}) {
      const Index n = mask->dimension(2);
      Tensor4<float> out(1, group * kv_heads, n, head_dim);
      layer.run(
          std::vector{MaskedStream{
              .q = q.slice(0, n), .k = k, .v = k, .mask = *mask, .out = TensorView<float>(out)}},
          options, {}, SerialExecutor{});
      all.insert(all.end(), out.data(), out.data() + out.size());
    }
    return all;
  };
  const O base{.selection = QuokaOptions{.budget = quoka::Budget::keys(20)}};
  // Sums of codes choose other keys than floats where scores lie close: not at every budget, nor by the same
  // instructions.
  O coded;
  for (Index budget = 20; budget <= 200; budget += 9) {
    MassOptions balanced = MassOptions::balanced(quoka::Budget::keys(budget));
    balanced.sketch = Sketch::on;
    coded = {.selection = balanced};
    if (outcome(coded) != outcome({.selection = balanced, .sketch = false})) break;
  }
  expect_effects<O>("masked", outcome,
                    Case<O, std::optional<quoka::SelectionOptions>>{
                        base, QuokaOptions{.budget = quoka::Budget::keys(21)}},
                    Case<O, Index>{base, 16}, Case<O, Index>{base, past_len},
                    Case<O, bool>{base, true}, Case<O, bool>{coded, false});
}

}  // namespace
