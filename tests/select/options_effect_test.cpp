// Every option has an effect: a change of one member alone of the options of any selector of methods/all.hpp changes
// the Selection of some drawn options. A selector whose members are not named does not compile.

#include <quoka/attention/attention.hpp>
#include <quoka/methods/all.hpp>
#include <quoka/select/stages.hpp>

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

// members(options): references to all members of T, in their order. Another number of them does not compile.
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
#undef QUOKA_TEST_MEMBERS

// ---- calls ------------------------------------------------------------------------------------------

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
    static_assert(
        requires(Options & o) { members(o); },
        "options without QUOKA_TEST_MEMBERS: a line above has one for each method");
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

// ---- arithmetics ------------------------------------------------------------------------------------

// Products of bfloat16 have their own bits where the machine has them, else float's. Every other option of attention()
// is the oracle's: attention_suite_test.cpp.
TEST(OptionsEffect, OfArithmetic) {
  const auto attended = [](Arithmetic arithmetic) {
    const TensorView<const float> q = TensorView<const float>(inputs().q).slice(0, chunk),
                                  k(inputs().k);
    Tensor4<float> out(1, group * kv_heads, chunk, head_dim);
    attention(q, Past(k, k), {}, out, {.arithmetic = arithmetic, .causal = false});
    return out;
  };
  EXPECT_EQ(!same_bits(attended(Arithmetic::bf16), attended(Arithmetic::float_)),
            arithmetic_used(Arithmetic::bf16) == Arithmetic::bf16);
}

}  // namespace
