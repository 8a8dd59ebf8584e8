// Every option has an effect. A change of one member alone of the options of any selector of methods/all.hpp changes the
// Selection of some drawn options; for attention, MaskedAttention and the stages there is a case for each member. A
// selector whose members are not named does not compile, nor does a member without a case.

#include <quoka/attention/attention.hpp>
#include <quoka/engine/masked_attention.hpp>
#include <quoka/methods/all.hpp>
#include <quoka/select/stages.hpp>

#include "ggml/known_cells.hpp"
#include "support/selector_draw.hpp"
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
                   keep_last, sketch)
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
      S(of_layer).select(
          {.q = q.slice(layer % 10 * chunk, chunk), .k = k, .logits = LogitOptions{}}, state,
          keep[0], serial);
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

// ---- members of a selector's options, drawn ---------------------------------------------------------

// Another value of a member, often one that the method refuses.
void redraw(Budget& x, Random& random) {
  x = random.seldom(3) ? Budget::share(0.02 + 0.5 * random.uniform())
                       : Budget::keys(1 + random.below(160));
}
void redraw(Index& x, Random& random) {
  x = random.one_of<Index>(0, 1, 2, 3, 4, 5, 7, 8, 10, 16, 30, 32, 60, 390);
}
void redraw(std::uint64_t& x, Random& random) { x = random.bits(); }
void redraw(bool& x, Random& random) { x = random.seldom(2); }
void redraw(Sketch& x, Random& random) { x = random.one_of(Sketch::on, Sketch::off); }
void redraw(Aggregation& x, Random& random) {
  x = random.one_of(Aggregation::max, Aggregation::mean);
}
template <std::floating_point T>
void redraw(T& x, Random& random) {
  x = random.one_of(T{0}, static_cast<T>(random.uniform()), T{1}, T{2});
}

// The Selections by such options; none where they are refused. QuoKA's sketch changes what a State keeps, and no
// choice.
template <class S>
std::optional<std::pair<std::vector<Selection>, Index>> outcome_of(
    const typename S::Options& options) {
  try {
    Index kept = 0;
    if constexpr (std::is_same_v<S, QuokaSelector>) {
      QuokaSelector::State state;
      S(options).appended({.q = {}, .k = inputs().k}, state, SerialExecutor{});
      kept = state.kept_bytes();
    }
    return std::pair(selected<S>(options), kept);
  } catch (const std::invalid_argument&) {
    return {};
  }
}

template <class S>
void expect_an_effect_of_each_member() {
  using Options = typename S::Options;
  if constexpr (!std::is_empty_v<Options>) {
    using Members = decltype(members(std::declval<Options&>()));
    const auto expect_effect = [&]<std::size_t at>() {
      Random random(at);
      for (int draws = 0; draws < 300; ++draws) {
        Options base{};
        const auto redraw_some = [&](auto&... member) {
          ((random.seldom(3) ? redraw(member, random) : void()), ...);
        };
        std::apply(redraw_some, members(base));
        if constexpr (requires { base.budget; }) redraw(base.budget, random);
        Options changed = base;
        redraw(std::get<at>(members(changed)), random);
        const auto before = outcome_of<S>(base), after = outcome_of<S>(changed);
        if (before && after && *before != *after) return;
      }
      ADD_FAILURE() << "member " << at << " changes nothing";
    };
    [&]<std::size_t... i>(std::index_sequence<i...>) {
      (expect_effect.template operator()<i>(), ...);
    }
    (std::make_index_sequence<std::tuple_size_v<Members>>{});
  }
}

template <class S>
class OptionsEffectOf : public ::testing::Test {};
TYPED_TEST_SUITE(OptionsEffectOf, SelectorTypes, SelectorNames);

TYPED_TEST(OptionsEffectOf, EachMember) { expect_an_effect_of_each_member<TypeParam>(); }

// ---- a case for each member --------------------------------------------------------------------------

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
    quoka_ggml::KnownCells known;
    std::vector<float> all;
    for (const auto* mask : {&of_chunk, &of_one}) {
      const Index n = mask->dimension(2);
      Tensor4<float> out(1, group * kv_heads, n, head_dim);
      layer.run(std::vector{MaskedStream{.q = q.slice(0, n),
                                         .k = k,
                                         .v = k,
                                         .mask = *mask,
                                         .out = TensorView<float>(out),
                                         .known = &known}},
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
