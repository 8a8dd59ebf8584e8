// prefill/chunked_prefill.hpp: a prompt in chunks through one layer, against the oracle's Algorithm
// 2 and against itself: chunk sizes, batches, threads, turns; and that what is refused leaves the
// cache as it was.

#include <quoka/attention/alibi.hpp>
#include <quoka/packing/byte_formats.hpp>
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/simd/tuning.hpp>
#include <quoka/methods/snapkv.hpp>
#include <quoka/select/dense.hpp>
#include <quoka/select/quoka.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <iterator>
#include <memory>
#include <stdexcept>
#include <utility>

namespace {

using namespace quoka_test;
using quoka::ChunkedPrefill;
using quoka::DenseSelector;
using quoka::LayerShape;
using quoka::QuokaOptions;
using quoka::QuokaSelector;

template <class T>
using Dense = ChunkedPrefill<DenseSelector, T>;
template <class T>
using Quoka = ChunkedPrefill<QuokaSelector, T>;

constexpr Index q_heads = 6, kv_heads = 2, head_dim = 16, v_dim = 20;
constexpr LayerShape layer_shape{
    .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = head_dim, .v_dim = v_dim};

template <class T>
struct Prompt {
  Tensor4<T> q, k, v;  // [batch, heads, len, dim]

  Prompt(Random& random, Index len, Index batch = 1)
      : q(random.tensor<T>(batch, q_heads, len, head_dim)),
        k(random.tensor<T>(batch, kv_heads, len, head_dim)),
        v(random.tensor<T>(batch, kv_heads, len, v_dim)) {}
  Index len() const { return q.dimension(2); }
  TensorView<const T> q_rows(Index begin, Index n) const {
    return TensorView<const T>(q).slice(begin, n);
  }
  TensorView<const T> k_rows(Index begin, Index n) const {
    return TensorView<const T>(k).slice(begin, n);
  }
  TensorView<const T> v_rows(Index begin, Index n) const {
    return TensorView<const T>(v).slice(begin, n);
  }
};

template <class T>
Tensor4<T> output_of(const Prompt<T>& prompt) {
  Tensor4<T> out(prompt.q.dimension(0), q_heads, prompt.len(), v_dim);
  out.setConstant(stored<T>(-12345.0));
  return out;
}

// The rows [begin, end) of a prompt in chunks; the rows of `out` before and after stay.
template <class Layer, class T>
void run(Layer& layer, const Prompt<T>& prompt, Index begin, Index end, Index chunk_len,
         Tensor4<T>& out, ExecutorRef executor = SerialExecutor{}) {
  for (; begin < end; begin += chunk_len) {
    const Index n = std::min(chunk_len, end - begin);
    layer.forward(prompt.q_rows(begin, n), prompt.k_rows(begin, n), prompt.v_rows(begin, n),
                  TensorView<T>(out).slice(begin, n), executor);
  }
}
template <class Layer, class T>
Tensor4<T> run(Layer& layer, const Prompt<T>& prompt, Index chunk_len,
               ExecutorRef executor = SerialExecutor{}) {
  Tensor4<T> out = output_of(prompt);
  run(layer, prompt, 0, prompt.len(), chunk_len, out, executor);
  return out;
}

// ---- dense --------------------------------------------------------------------------------------

TEST(ChunkedPrefillTest, DenseOutputIsTheOracles) {
  for_each_storage([]<class T>() {
    Random random(1);
    const Prompt<T> prompt(random, 301);
    Dense<T> layer(layer_shape);
    const auto out = run(layer, prompt, 37);
    oracle::Prefill reference{oracle::Dense{}};
    const auto expected =
        reference.forward(to_oracle(prompt.q), to_oracle(prompt.k), to_oracle(prompt.v));
    EXPECT_TRUE(elements_close(out, expected, noise * 3.5));
    if constexpr (std::is_same_v<T, float>) {
      EXPECT_LE(oracle::relative_error(to_oracle(out), expected), float_error);
    }
  });
}

TEST(ChunkedPrefillTest, ChunkSizeChangesNoBitOfDenseOutput) {
  Random random(2);
  const Prompt<Element> prompt(random, 301, 2);
  const LayerShape shape{
      .q_heads = q_heads, .kv_heads = kv_heads, .head_dim = head_dim, .v_dim = v_dim, .batch = 2};
  Dense<Element> whole_layer(shape);
  const auto whole = run(whole_layer, prompt, 301);
  for (const Index chunk_len : {7, 37, 128, 299}) {
    Dense<Element> layer(shape);
    EXPECT_TRUE(same_bits(run(layer, prompt, chunk_len), whole)) << "chunk " << chunk_len;
  }
  // A single token adds up in another order.
  for (const Index chunk_len : {1, 300}) {
    Dense<Element> layer(shape);
    EXPECT_TRUE(same_up_to_rounding(run(layer, prompt, chunk_len), whole, noise * 4))
        << "chunk " << chunk_len;
  }
}

// So many keys that they are walked in parts.
TEST(ChunkedPrefillTest, ChunkSizeChangesNoBitOfManyKeys) {
  Random random(12);
  const Index len = 2 * quoka::tuning::long_part_keys + 200;
  const Prompt<Element> prompt(random, len);
  const Index begin = len - 300;
  Tensor4<Element> outs[] = {output_of(prompt), output_of(prompt)};
  for (Tensor4<Element>& out : outs) {
    Dense<Element> layer(layer_shape);
    layer.append(prompt.k_rows(0, begin), prompt.v_rows(0, begin));
    run(layer, prompt, begin, len, &out == outs ? 300 : 77, out);
  }
  EXPECT_TRUE(same_bits(outs[0], outs[1]));
}

TEST(ChunkedPrefillTest, ChunkSizeChangesNoBitWithAWindowAndSinks) {
  Random random(3);
  const Prompt<Element> prompt(random, 301);
  const std::vector<float> sinks{0.5f, -1.0f, 3.0f, 0.0f, 1.0f, 2.0f};
  const AttentionOptions options{.softcap = 10.0f, .sink_logits = sinks, .sliding_window = 130};
  Dense<Element> whole_layer(layer_shape, {}, options);
  const auto whole = run(whole_layer, prompt, 301);
  for (const Index chunk_len : {37, 128}) {
    Dense<Element> layer(layer_shape, {}, options);
    EXPECT_TRUE(same_bits(run(layer, prompt, chunk_len), whole)) << "chunk " << chunk_len;
  }
  Dense<Element> layer(layer_shape, {}, options);
  EXPECT_TRUE(same_up_to_rounding(run(layer, prompt, 1), whole, noise * 4));
}

// As a model's layers do: in turns, of different shapes, also moved.
TEST(ChunkedPrefillTest, LayersMayShareAWorkspace) {
  Random random(21);
  const Prompt<float> prompt(random, 301);
  quoka::AttentionWorkspace workspace;
  const AttentionOptions window{.sliding_window = 50};
  Dense<float> alone[] = {Dense<float>(layer_shape), Dense<float>(layer_shape, {}, window)};
  Dense<float> sharing[] = {Dense<float>(layer_shape), Dense<float>(layer_shape, {}, window)};
  Tensor4<float> before = output_of(prompt);
  run(sharing[0], prompt, 0, 40, 40, before);
  EXPECT_GT(sharing[0].scratch_bytes(), 0);
  sharing[0].truncate(0);
  for (auto& layer : sharing) layer.share_workspace(workspace);
  EXPECT_EQ(sharing[0].scratch_bytes(), 0);
  Dense<float> moved = std::move(sharing[0]);
  Tensor4<float> outs[] = {output_of(prompt), output_of(prompt), output_of(prompt),
                           output_of(prompt)};
  for (Index begin = 0; begin < 301; begin += 43) {
    const Index end = std::min<Index>(begin + 43, 301);
    run(alone[0], prompt, begin, end, 43, outs[0]);
    run(moved, prompt, begin, end, 43, outs[1]);
    run(alone[1], prompt, begin, end, 43, outs[2]);
    run(sharing[1], prompt, begin, end, 43, outs[3]);
  }
  EXPECT_TRUE(same_bits(outs[0], outs[1]));
  EXPECT_TRUE(same_bits(outs[2], outs[3]));
  EXPECT_EQ(moved.scratch_bytes() + sharing[1].scratch_bytes(), 0);
  EXPECT_GT(workspace.bytes(), 0);
}

// ---- QuoKA against the oracle -------------------------------------------------------------------

// Keys that one of two selections has and the other has not are near ties: their exact scores lie
// within `tolerance` of the worst kept one. float scores are off by about 1e-7.
void expect_same_up_to_ties(const Selection& keep, const oracle::Positions& expected,
                            const oracle::Scores& scores, double tolerance = 1e-5) {
  const oracle::Positions got = to_positions(keep);
  for (std::size_t b = 0; b < expected.size(); ++b)
    for (std::size_t head = 0; head < expected[b].size(); ++head) {
      ASSERT_EQ(got[b][head].size(), expected[b][head].size());
      std::vector<Index> different;
      std::set_symmetric_difference(got[b][head].begin(), got[b][head].end(),
                                    expected[b][head].begin(), expected[b][head].end(),
                                    std::back_inserter(different));
      double threshold = oracle::infinity;
      for (const Index t : expected[b][head])
        threshold = std::min(threshold, scores[b][head][uz(t)]);
      for (const Index t : different)
        EXPECT_NEAR(scores[b][head][uz(t)], threshold, tolerance)
            << "head " << head << ", key " << t;
    }
}

// Every chunk: its selection is the oracle's up to near ties, its output that of the oracle's
// attention over the library's selection.
template <class T>
void expect_as_algorithm_2(const Prompt<T>& prompt, Quoka<T>& layer,
                           const oracle::QuokaOptions& options, Index prefill_chunk,
                           Index decode_from) {
  oracle::Tensor past_k(prompt.q.dimension(0), kv_heads, 0, head_dim),
      past_v(prompt.q.dimension(0), kv_heads, 0, v_dim);
  for (Index begin = 0; begin < prompt.len();) {
    SCOPED_TRACE("chunk at " + std::to_string(begin));
    const Index n = begin < decode_from ? std::min(prefill_chunk, decode_from - begin) : 1;
    Tensor4<T> out(prompt.q.dimension(0), q_heads, n, v_dim);
    layer.forward(prompt.q_rows(begin, n), prompt.k_rows(begin, n), prompt.v_rows(begin, n), out);
    const oracle::Tensor q = to_oracle(prompt.q_rows(begin, n)),
                         k = to_oracle(prompt.k_rows(begin, n)),
                         v = to_oracle(prompt.v_rows(begin, n));

    const oracle::Positions kept =
        oracle::subselect_queries(q, options.n_queries, options.choice, kv_heads);
    const oracle::Tensor q_bar =
        oracle::pre_aggregate(oracle::gather_queries(q, kept), kv_heads, options.group);
    const oracle::Scores scores = oracle::score_keys(q_bar, past_k, options.aggregation);
    expect_same_up_to_ties(layer.selection(), oracle::select(q, past_k, options), scores);

    const oracle::Positions keep = to_positions(layer.selection());
    const auto expected = oracle::attention(q, past_k, past_v, &keep, k, v);
    EXPECT_TRUE(elements_close(out, expected.out, noise * 3.5));
    if constexpr (std::is_same_v<T, float>) {
      EXPECT_LE(oracle::relative_error(to_oracle(out), expected.out), float_error);
    }
    past_k = oracle::append(past_k, k);
    past_v = oracle::append(past_v, v);
    begin += n;
    EXPECT_EQ(layer.kv_len(), begin);
  }
}

TEST(ChunkedPrefillTest, QuokaIsAlgorithm2) {
  for_each_storage([]<class T>() {
    Random random(10);
    const Prompt<T> prompt(random, 310);
    Quoka<T> layer(layer_shape, {.budget = Budget::keys(37), .n_queries = 7});
    expect_as_algorithm_2<T>(prompt, layer, {.budget = 37, .n_queries = 7}, 37, 301);
  });
}

TEST(ChunkedPrefillTest, QuokaIsAlgorithm2InABatchAndWithLongChunks) {
  Random random(11);
  const Prompt<Element> prompt(random, 260, 2);
  Quoka<Element> layer(
      {.q_heads = q_heads, .kv_heads = kv_heads, .head_dim = head_dim, .v_dim = v_dim, .batch = 2},
      {.budget = Budget::keys(100)});
  expect_as_algorithm_2<Element>(prompt, layer, {.budget = 100}, 128, 257);
}

TEST(ChunkedPrefillTest, WithinTheBudgetQuokaIsDenseBitForBit) {
  Random random(13);
  const Prompt<Element> prompt(random, 200);
  Dense<Element> dense(layer_shape);
  const auto expected = run(dense, prompt, 37);
  // The last chunk begins at 185: a budget of 185 still keeps every past key of every chunk.
  for (const Budget budget : {Budget::keys(185), Budget::keys(1024), Budget::share(1.0)}) {
    Quoka<Element> layer(layer_shape, {.budget = budget});
    EXPECT_TRUE(same_bits(run(layer, prompt, 37), expected));
    EXPECT_TRUE(layer.selection().is_all());
  }
}

TEST(ChunkedPrefillTest, BudgetZeroIsEachChunkAlone) {
  Random random(14);
  const Prompt<Element> prompt(random, 200);
  Quoka<Element> layer(layer_shape, {.budget = Budget::keys(0)});
  const auto out = run(layer, prompt, 37);
  auto alone = output_of(prompt);
  for (Index begin = 0; begin < 200; begin += 37) {
    const Index n = std::min<Index>(37, 200 - begin);
    quoka::attention(prompt.q_rows(begin, n), {},
                     {prompt.k_rows(begin, n), prompt.v_rows(begin, n)},
                     TensorView<Element>(alone).slice(begin, n));
  }
  EXPECT_TRUE(same_bits(out, alone));
  EXPECT_EQ(layer.kv_len(), 200);
}

// ---- the driver ---------------------------------------------------------------------------------

TEST(ChunkedPrefillTest, PrefillIsTheLoopOverForward) {
  Random random(20);
  const Prompt<Element> prompt(random, 201);
  Quoka<Element> loop(layer_shape, {.budget = Budget::keys(37)}),
      whole(layer_shape, {.budget = Budget::keys(37)});
  const auto expected = run(loop, prompt, 37);
  auto out = output_of(prompt);
  whole.prefill(prompt.q, prompt.k, prompt.v, out, 37);
  EXPECT_TRUE(same_bits(out, expected));
  EXPECT_EQ(whole.kv_len(), 201);
}

TEST(ChunkedPrefillDriver, FloatRowsGoThroughAHalfCache) {
  Random random(28);
  const Prompt<float> prompt(random, 301);
  ChunkedPrefill<QuokaSelector, Eigen::half> layer(layer_shape, {.budget = Budget::keys(37)});
  const Tensor4<Eigen::half> k_half = prompt.k.cast<Eigen::half>(),
                             v_half = prompt.v.cast<Eigen::half>();
  for (Index begin = 0; begin < 301; begin += 43) {
    SCOPED_TRACE("chunk at " + std::to_string(begin));
    const auto past_k = TensorView<const Eigen::half>(k_half).slice(0, begin),
               past_v = TensorView<const Eigen::half>(v_half).slice(0, begin);
    const auto q = prompt.q_rows(begin, 43), k = prompt.k_rows(begin, 43),
               v = prompt.v_rows(begin, 43);
    EXPECT_TRUE(same_bits(layer.cache().k(), past_k));
    EXPECT_TRUE(same_bits(layer.cache().v(), past_v));
    Tensor4<float> out(1, q_heads, 43, v_dim);
    layer.forward(q, k, v, out);
    EXPECT_EQ(layer.selection(), QuokaSelector({.budget = Budget::keys(37)}).select(q, past_k, {}));
    const oracle::Positions keep = to_positions(layer.selection());
    const auto expected = oracle::attention(to_oracle(q), to_oracle(past_k), to_oracle(past_v),
                                            &keep, to_oracle(k), to_oracle(v));
    EXPECT_TRUE(elements_close(out, expected.out, noise * 3.5));
    EXPECT_LE(oracle::relative_error(to_oracle(out), expected.out), float_error);
  }
}

TEST(ChunkedPrefillDriver, SelectionIsWhatTheLastSelectChose) {
  Random random(47);
  const Prompt<float> prompt(random, 200);
  Quoka<float> layer(layer_shape, {.budget = Budget::keys(37)});
  auto out = output_of(prompt);
  run(layer, prompt, 0, 126, 63, out);
  EXPECT_EQ(layer.selection().kv_len(), 63);
  const auto q = prompt.q_rows(126, 37);
  const Selection& keep = layer.select(q);
  EXPECT_EQ(&keep, &layer.selection());
  EXPECT_EQ(layer.selection(),
            QuokaSelector({.budget = Budget::keys(37)}).select(q, prompt.k_rows(0, 126), {}));
  EXPECT_EQ(layer.kv_len(), 126);
  const Selection chosen = keep;
  run(layer, prompt, 126, 163, 37, out);
  EXPECT_EQ(layer.selection(), chosen);
}

TEST(ChunkedPrefillDriver, LseIsOptional) {
  Random random(23);
  const Prompt<float> prompt(random, 64);
  Dense<float> layer(layer_shape), other(layer_shape);
  auto out = output_of(prompt);
  Tensor3<float> lse(1, q_heads, 64);
  layer.forward(prompt.q, prompt.k, prompt.v, {out, lse});
  EXPECT_TRUE(same_bits(run(other, prompt, 64), out));
  const auto expected = oracle::attention(to_oracle(prompt.q), {}, {}, nullptr, to_oracle(prompt.k),
                                          to_oracle(prompt.v));
  EXPECT_TRUE(lse_close(lse, expected.lse, noise));
}

TEST(ChunkedPrefillTest, ABatchIsItsSequencesOneByOne) {
  Random random(25);
  const Prompt<Element> both(random, 201, 2);
  Quoka<Element> layer(
      {.q_heads = q_heads, .kv_heads = kv_heads, .head_dim = head_dim, .v_dim = v_dim, .batch = 2},
      {.budget = Budget::keys(37)});
  const auto out = run(layer, both, 37);
  for (const Index b : {0, 1}) {
    const auto of = [b](const Tensor4<Element>& x) {
      Tensor4<Element> one(1, x.dimension(1), x.dimension(2), x.dimension(3));
      std::copy_n(x.data() + b * one.size(), one.size(), one.data());
      return one;
    };
    Prompt<Element> single(random, 1);
    single.q = of(both.q), single.k = of(both.k), single.v = of(both.v);
    Quoka<Element> alone(layer_shape, {.budget = Budget::keys(37)});
    EXPECT_TRUE(same_bits(run(alone, single, 37), of(out))) << "sequence " << b;
  }
}

// ---- turns --------------------------------------------------------------------------------------

TEST(ChunkedPrefillTest, TruncateAndRunAgainGivesTheSameBits) {
  Random random(30);
  const Prompt<Element> prompt(random, 201), other(random, 90);
  Quoka<Element> layer(layer_shape, {.budget = Budget::keys(37)});
  const auto expected = run(layer, prompt, 37);
  auto out = expected;
  for (const Index len : {185, 111, 37, 0}) {  // borders of chunks
    layer.truncate(len);
    EXPECT_EQ(layer.kv_len(), len);
    run(layer, prompt, len, 201, 37, out);
    EXPECT_TRUE(same_bits(out, expected)) << "truncated to " << len;
  }
  layer.truncate(111);  // another branch in between
  auto branch = output_of(other);
  run(layer, other, 0, 90, 37, branch);
  layer.truncate(111);
  run(layer, prompt, 111, 201, 37, out);
  EXPECT_TRUE(same_bits(out, expected));
}

TEST(ChunkedPrefillTest, AppendTakesOverASavedPrefix) {
  Random random(32);
  const Prompt<Element> prefix(random, 127), turn(random, 37);
  Quoka<Element> computed(layer_shape, {.budget = Budget::keys(37)}),
      restored(layer_shape, {.budget = Budget::keys(37)});
  run(computed, prefix, 37);
  restored.append(computed.cache().k(), computed.cache().v());
  EXPECT_EQ(restored.kv_len(), 127);
  EXPECT_TRUE(same_bits(run(restored, turn, 37), run(computed, turn, 37)));
}

// SnapKV judges by the queries that came with the keys: by none of them it keeps other keys.
TEST(ChunkedPrefillDriver, AppendWithQueriesIsTheEndOfForward) {
  Random random(46);
  const Prompt<float> prompt(random, 201);
  using Layer = quoka::ChunkedPrefill<quoka::SnapKvSelector>;
  Layer forwarded(layer_shape, {.budget = Budget::keys(37)}),
      in_steps(layer_shape, {.budget = Budget::keys(37)});
  for (Index begin = 0; begin < 201; begin += 67) {
    const auto q = prompt.q_rows(begin, 67), k = prompt.k_rows(begin, 67),
               v = prompt.v_rows(begin, 67);
    Tensor4<float> out(1, q_heads, 67, v_dim);
    forwarded.forward(q, k, v, out);
    EXPECT_EQ(in_steps.select(q), forwarded.selection());
    in_steps.append(q, k, v);
  }
  EXPECT_EQ(in_steps.kv_len(), 201);
  const auto q = prompt.q_rows(0, 7), k = prompt.k_rows(0, 8), v = prompt.v_rows(0, 8);
  expect_refused([&] { in_steps.append(q, k, v); }, {"len", 8, 7});
  EXPECT_EQ(in_steps.kv_len(), 201);
}

TEST(ChunkedPrefillTurns, ReserveChangesNoBit) {
  Random random(34);
  const Prompt<float> prompt(random, 127);
  Quoka<float> layer(layer_shape, {.budget = Budget::keys(37)}),
      reserved(layer_shape, {.budget = Budget::keys(37)});
  const auto expected = run(layer, prompt, 7);
  reserved.reserve(64);
  auto out = output_of(prompt);
  run(reserved, prompt, 0, 63, 7, out);
  reserved.reserve(501);
  EXPECT_GE(reserved.cache().capacity(), 501);
  run(reserved, prompt, 63, 127, 7, out);
  EXPECT_TRUE(same_bits(out, expected));
}

// ---- ownership ----------------------------------------------------------------------------------

// Outputs of a prompt of 127 tokens by a layer that is moved twice on the way: constructed from, then assigned.
Tensor4<float> run_moved(std::unique_ptr<Quoka<float>> first, const Prompt<float>& prompt) {
  Tensor4<float> out = output_of(prompt);
  run(*first, prompt, 0, 74, 37, out);
  Quoka<float> second(std::move(*first));
  first.reset();
  run(second, prompt, 74, 111, 37, out);
  Quoka<float> third(layer_shape);
  third = std::move(second);
  run(third, prompt, 111, 127, 37, out);
  return out;
}

// Whatever options and shape refer to may be gone once the layer is made, and once it has moved.
TEST(ChunkedPrefillOwnership, AllThatOptionsReferToIsTheLayersOwn) {
  Random random(43);
  const Prompt<float> prompt(random, 127);
  struct Numbers {
    std::vector<float> sinks{0.5f, -1.0f, 3.0f, 0.0f, 1.0f, 2.0f},
        factors{1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f},
        slopes{0.5f, 0.25f, 0.125f, 0.0625f, 0.3f, 0.7f}, k_scales{0.03f, 0.04f},
        v_scales{0.05f, 0.06f};
    void spoil() {
      for (auto* x : {&sinks, &factors, &slopes, &k_scales, &v_scales})
        std::fill(x->begin(), x->end(), 100.0f);
    }
    auto layer() const {
      LayerShape shape = layer_shape;
      shape.k_format = shape.v_format = &quoka::i8_format();
      shape.k_scales = k_scales, shape.v_scales = v_scales;
      return Quoka<float>(shape, {.budget = quoka::Budget::keys(37)},
                          {.sink_logits = sinks, .mask_factors = factors, .alibi_slopes = slopes});
    }
  };
  const Numbers stay;
  Quoka<float> undisturbed = stay.layer();
  const auto expected = run(undisturbed, prompt, 37);
  auto gone = std::make_unique<Numbers>();
  auto first = std::make_unique<Quoka<float>>(gone->layer());
  gone->spoil(), gone.reset();
  EXPECT_TRUE(same_bits(run_moved(std::move(first), prompt), expected));
  // As a user writes it.
  const std::vector<float> slopes = quoka::alibi_slopes(q_heads);
  Dense<float> named(layer_shape, {}, {.alibi_slopes = slopes}),
      temporary(layer_shape, {}, {.alibi_slopes = quoka::alibi_slopes(q_heads)});
  EXPECT_TRUE(same_bits(run(temporary, prompt, 37), run(named, prompt, 37)));
}

// They are one call's: with the next chunk there are more keys.
TEST(ChunkedPrefillOwnership, ALayerHasNoMaskAndNoPosition) {
  const std::uint8_t seen[] = {1};
  expect_refused(
      [&] {
        Dense<float>(layer_shape, {}, {.mask = quoka::Mask::bytes(seen, {1, 1, 1, 1}, {1, 1, 1})});
      },
      {"mask", "one call's"});
  expect_refused([] { Dense<float>(layer_shape, {}, {.query_position = 9}); },
                 {"query_position", 9});
}

// ---- a selector of the caller's -----------------------------------------------------------------

struct EveryOtherKey {
  struct Options {
    Index fail_at = -1;  // throws when the past is this long
  };
  struct State {
    std::vector<Index> selects, appends, truncates;  // kv_len at each call
    void truncate(Index kv_len) { truncates.push_back(kv_len); }
    static Index bytes() { return 0; }
  };
  explicit EveryOtherKey(const Options& options_in) : options(options_in) {}

  void select(const quoka::SelectorInput& input, State& state, Selection& selection,
              ExecutorRef) const {
    const Index kv_len = input.k.len();
    if (kv_len == options.fail_at) throw std::runtime_error("fails");
    state.selects.push_back(kv_len);
    quoka::SelectionWriter writer(selection, input.k.batch(), input.k.heads(), kv_len, kv_len / 2);
    for (Index b = 0; b < input.k.batch(); ++b)
      for (Index head = 0; head < input.k.heads(); ++head)
        for (Index i = 0; i < kv_len / 2; ++i)
          writer.row(b, head)[uz(i)] = static_cast<Position>(2 * i);
    writer.commit();
  }
  void appended(const quoka::SelectorInput& input, State& state, ExecutorRef) const {
    state.appends.push_back(input.k.len());
  }
  Options options;
};
static_assert(quoka::Selector<EveryOtherKey>);

TEST(ChunkedPrefillSelector, ACallersSelectorEntersByTheConcept) {
  Random random(50);
  const Prompt<float> prompt(random, 111);
  ChunkedPrefill<EveryOtherKey> layer(layer_shape);
  const auto out = run(layer, prompt, 37);
  EXPECT_EQ(layer.state().selects, (std::vector<Index>{0, 37, 74}));
  EXPECT_EQ(layer.state().appends, (std::vector<Index>{37, 74, 111}));
  layer.truncate(74);
  EXPECT_EQ(layer.state().truncates, (std::vector<Index>{74}));
  oracle::Positions keep(1, std::vector<std::vector<Index>>(2));
  for (auto& list : keep[0])
    for (Index t = 0; t < 74; t += 2) list.push_back(t);
  const auto rows = [&](const auto& x, Index begin, Index n) {
    return to_oracle(TensorView<const float>(x).slice(begin, n));
  };
  const auto expected =
      oracle::attention(rows(prompt.q, 74, 37), rows(prompt.k, 0, 74), rows(prompt.v, 0, 74), &keep,
                        rows(prompt.k, 74, 37), rows(prompt.v, 74, 37));
  EXPECT_LE(oracle::relative_error(rows(out, 74, 37), expected.out), float_error);
}

TEST(ChunkedPrefillSelector, AfterItThrowsTheCacheIsAsItWas) {
  Random random(51);
  const Prompt<float> prompt(random, 111);
  ChunkedPrefill<EveryOtherKey> layer(layer_shape, {.fail_at = 74});
  auto out = output_of(prompt);
  EXPECT_THROW(run(layer, prompt, 0, 111, 37, out), std::runtime_error);
  EXPECT_EQ(layer.kv_len(), 74);
  EXPECT_TRUE(same_bits(layer.cache().k(), prompt.k_rows(0, 74)));
  EXPECT_TRUE(same_bits(layer.cache().v(), prompt.v_rows(0, 74)));
}

// KV head h keeps every (h + 2)-th key, but of the last two heads one keeps all and one keeps none.
struct AnotherCountForEachHead {
  struct Options {};
  using State = quoka::NoState;
  explicit AnotherCountForEachHead(const Options&) {}

  static bool keeps(Index head, Index heads, Index t) {
    return head == heads - 1 ? false : head == heads - 2 || t % (head + 2) == 0;
  }
  void select(const quoka::SelectorInput& input, State&, Selection& selection, ExecutorRef) const {
    const Index batch = input.k.batch(), heads = input.k.heads(), kv_len = input.k.len();
    quoka::SelectionWriter writer(selection, batch, heads, kv_len, kv_len);
    for (Index b = 0; b < batch; ++b)
      for (Index head = 0; head < heads; ++head) {
        Index count = 0;
        for (Index t = 0; t < kv_len; ++t)
          if (keeps(head, heads, t)) writer.row(b, head)[uz(count++)] = static_cast<Position>(t);
        writer.set_count(b, head, count);
      }
    writer.commit();
  }
  void appended(const quoka::SelectorInput&, State&, ExecutorRef) const {}
};

TEST(ChunkedPrefillTest, KvHeadsMayKeepDifferentCounts) {
  Random random(55);
  Prompt<Element> prompt(random, 300, 2);
  prompt.q = random.tensor<Element>(2, 8, 300, head_dim);
  prompt.k = random.tensor<Element>(2, 4, 300, head_dim);
  prompt.v = random.tensor<Element>(2, 4, 300, v_dim);
  ChunkedPrefill<AnotherCountForEachHead, Element> layer(
      {.q_heads = 8, .kv_heads = 4, .head_dim = head_dim, .v_dim = v_dim, .batch = 2});
  Tensor4<Element> out(2, 8, 300, v_dim);
  oracle::Tensor past_k(2, 4, 0, head_dim), past_v(2, 4, 0, v_dim);
  for (const auto& [begin, n] : {std::pair<Index, Index>{0, 149}, {149, 150}, {299, 1}}) {
    SCOPED_TRACE("chunk at " + std::to_string(begin));
    run(layer, prompt, begin, begin + n, n, out);
    const Selection& keep = layer.selection();
    EXPECT_EQ(keep.count(1, 0), (begin + 1) / 2);
    EXPECT_EQ(keep.count(1, 1), (begin + 2) / 3);
    EXPECT_EQ(keep.count(0, 2), begin);
    EXPECT_EQ(keep.count(0, 3), 0);
    const auto q = to_oracle(prompt.q_rows(begin, n)), k = to_oracle(prompt.k_rows(begin, n)),
               v = to_oracle(prompt.v_rows(begin, n));
    const oracle::Positions lists = to_positions(keep);
    const auto expected = oracle::attention(q, past_k, past_v, &lists, k, v);
    Tensor4<Element> of_chunk(2, 8, n, v_dim);
    for (Index i = 0; i < n; ++i)
      for (Index b = 0; b < 2; ++b)
        for (Index head = 0; head < 8; ++head)
          std::copy_n(&out(b, head, begin + i, 0), v_dim, &of_chunk(b, head, i, 0));
    EXPECT_TRUE(elements_close(of_chunk, expected.out, noise * 3.5));
    past_k = oracle::append(past_k, k);
    past_v = oracle::append(past_v, v);
  }
}

// Appending is part of the step: what throws there undoes it.
struct FailsWhenAppended {
  struct Options {
    Index fail_at = 0;
  };
  struct State {
    Index seen = 0;
    void truncate(Index len) { seen = len; }
    static Index bytes() { return 0; }
  };
  explicit FailsWhenAppended(const Options& options_in) : options(options_in) {}
  void select(const quoka::SelectorInput& input, State&, Selection& selection, ExecutorRef) const {
    selection.select_all(input.k.batch(), input.k.heads(), input.k.len());
  }
  void appended(const quoka::SelectorInput& input, State& state, ExecutorRef) const {
    state.seen = input.k.len();
    if (input.k.len() == options.fail_at) throw std::runtime_error("fails");
  }
  Options options;
};

TEST(ChunkedPrefillSelector, AfterAppendedThrowsTheLayerIsAsItWas) {
  Random random(53);
  const Prompt<float> prompt(random, 111);
  auto out = output_of(prompt);
  ChunkedPrefill<FailsWhenAppended> layer(layer_shape, {.fail_at = 111});
  run(layer, prompt, 0, 74, 37, out);
  EXPECT_THROW(run(layer, prompt, 74, 111, 37, out), std::runtime_error);
  EXPECT_EQ(layer.kv_len(), 74);
  EXPECT_EQ(layer.state().seen, 74);
  EXPECT_THROW(layer.append(prompt.k_rows(74, 37), prompt.v_rows(74, 37)), std::runtime_error);
  EXPECT_EQ(layer.kv_len(), 74);
  EXPECT_EQ(layer.state().seen, 74);
}

TEST(ChunkedPrefillSelector, AfterAPromptThrowsInTheMiddleTheLayerIsAsItWasBeforeIt) {
  Random random(54);
  const Prompt<float> prompt(random, 111);
  auto out = output_of(prompt);
  ChunkedPrefill<EveryOtherKey> layer(layer_shape, {.fail_at = 74});
  EXPECT_THROW(layer.prefill(prompt.q, prompt.k, prompt.v, out, 37), std::runtime_error);
  EXPECT_EQ(layer.kv_len(), 0);
}

TEST(ChunkedPrefillOwnership, AMovedFromLayerRefusesAChunk) {
  Random random(42);
  const Prompt<float> prompt(random, 37);
  auto out = output_of(prompt);
  Quoka<float> from(layer_shape);
  run(from, prompt, 0, 37, 37, out);
  const Quoka<float> to(std::move(from));
  EXPECT_EQ(to.kv_len(), 37);
  EXPECT_EQ(from.kv_len(), 0);
  EXPECT_THROW(from.forward(prompt.q, prompt.k, prompt.v, out), std::invalid_argument);
}

// ---- what is refused ----------------------------------------------------------------------------

TEST(ChunkedPrefillRefuses, ShapesAndOptionsThatAreNone) {
  using L = Quoka<float>;
  const auto refused = [](const LayerShape& shape, std::initializer_list<Fragment> fragments) {
    expect_refused([&] { L{shape}; }, fragments);
  };
  for (const auto& [q, kv] :
       {std::pair<Index, Index>{7, 3}, {2, 4}, {0, 2}, {4, 0}, {4, -2}, {0, 0}})
    refused({.q_heads = q, .kv_heads = kv, .head_dim = 16}, {"q_heads", q, "kv_heads", kv});
  refused({.q_heads = 4, .kv_heads = 2, .head_dim = 0}, {"dim", 0, 1});
  refused({.q_heads = 4, .kv_heads = 2, .head_dim = 16, .v_dim = -1}, {"dim", -1, 1});
  refused({.q_heads = 4, .kv_heads = 2, .head_dim = 16, .batch = 0}, {"batch", 0, 1});
  const std::vector<float> sinks(5);
  const auto attending = [](const AttentionOptions& options,
                            std::initializer_list<Fragment> fragments) {
    expect_refused([&] { L(layer_shape, {}, options); }, fragments);
  };
  attending({.sink_logits = sinks}, {"sink_logits", 5, 6});
  attending({.softcap = -1.0f}, {"softcap", "[1e-30, 1e30]"});
  attending({.sliding_window = -3}, {"sliding_window", -3, 0});
}

// A layer of 127 keys, and a chunk of 37 with something wrong: refused by forward() and by
// prefill(), the cache as it was, nothing written, and the sound chunk runs as if nothing had been.
TEST(ChunkedPrefillRefuses, AChunkOfOtherShapes) {
  Random random(60);
  const Prompt<float> prefix(random, 127), sound(random, 37);
  Quoka<float> layer(layer_shape, {.budget = Budget::keys(37)});
  layer.append(prefix.k, prefix.v);
  const struct {
    const char* name;
    std::array<Index, 4> sizes;
    std::initializer_list<Fragment> says;
  } table[] = {
      {"q", {2, q_heads, 37, head_dim}, {2, 1}},     {"q", {1, 4, 37, head_dim}, {4, 6}},
      {"q", {1, q_heads, 37, 17}, {17, 16}},         {"k", {1, kv_heads, 36, head_dim}, {36, 37}},
      {"k", {1, 3, 37, head_dim}, {3, 2}},           {"k", {1, kv_heads, 37, 15}, {15, 16}},
      {"v", {1, kv_heads, 30, v_dim}, {30, 37}},     {"v", {3, kv_heads, 37, v_dim}, {3, 1}},
      {"v", {1, kv_heads, 37, 16}, {16, 20}},        {"out", {1, q_heads, 30, v_dim}, {30, 37}},
      {"out", {1, q_heads, 37, head_dim}, {16, 20}}, {"out", {1, kv_heads, 37, v_dim}, {2, 6}},
  };
  for (const auto& [name, sizes, says] : table)
    for (const bool whole : {false, true}) {
      SCOPED_TRACE(std::string(whole ? "prefill" : "forward") + " of another " + name);
      Prompt<float> chunk = sound;
      Tensor4<float> out = output_of(chunk);
      const std::string is = name;
      (is == "q"   ? chunk.q
       : is == "k" ? chunk.k
       : is == "v" ? chunk.v
                   : out) = random.tensor<float>(sizes[0], sizes[1], sizes[2], sizes[3]);
      out.setConstant(-12345.0f);
      expect_refused(
          [&] {
            if (whole)
              layer.prefill(chunk.q, chunk.k, chunk.v, out, 7);
            else
              layer.forward(chunk.q, chunk.k, chunk.v, out);
          },
          says);
      for (Index i = 0; i < out.size(); ++i) ASSERT_EQ(out.data()[i], -12345.0f);
      ASSERT_EQ(layer.kv_len(), 127);
      EXPECT_TRUE(same_bits(layer.cache().k(), prefix.k));
      EXPECT_TRUE(same_bits(layer.cache().v(), prefix.v));
    }
  auto out = output_of(sound);
  const auto none = [](const Tensor4<float>& x) { return TensorView<const float>(x).slice(0, 0); };
  expect_refused(
      [&] {
        layer.forward(none(sound.q), none(sound.k), none(sound.v),
                      TensorView<float>(out).slice(0, 0));
      },
      {"q_len", 0, 1});
  expect_refused([&] { layer.prefill(sound.q, sound.k, sound.v, out, 0); }, {"chunk_len", 0, 1});
  expect_refused([&] { layer.reserve(-5); }, {"capacity", -5, 0});
  expect_refused([&] { layer.truncate(128); }, {128, 127});
  expect_refused([&] { layer.truncate(-1); }, {-1, 0});
  layer.truncate(127);
  Quoka<float> undisturbed(layer_shape, {.budget = Budget::keys(37)});
  undisturbed.append(prefix.k, prefix.v);
  EXPECT_TRUE(same_bits(run(layer, sound, 37), run(undisturbed, sound, 37)));
}

TEST(ChunkedPrefillRefuses, APromptWhoseOutputLiesInItsInputs) {
  Random random(63);
  const auto q = random.tensor<float>(1, 2, 37, 16), k = random.tensor<float>(1, 2, 37, 16),
             v = random.tensor<float>(1, 2, 37, 16);
  Quoka<float> layer({.q_heads = 2, .kv_heads = 2, .head_dim = 16});
  for (const auto& [x, name] : {std::pair{&q, "q"}, {&k, "k"}, {&v, "v"}}) {
    const TensorView<float> out(const_cast<float*>(x->data()), {1, 2, 37, 16},
                                {2 * 37 * 16, 37 * 16, 16, 1});
    expect_refused([&] { layer.prefill(q, k, v, out, 10); },
                   {std::string("out shares memory with ") + name});
    EXPECT_EQ(layer.kv_len(), 0);
  }
}

// A refused chunk leaves no trace at all: the selection and the views are those of before.
TEST(ChunkedPrefillRefuses, AWrongOutputBeforeItSelects) {
  Random random(61);
  const Prompt<float> prompt(random, 111);
  Quoka<float> layer(layer_shape, {.budget = Budget::keys(37)});
  auto out = output_of(prompt);
  run(layer, prompt, 0, 74, 37, out);
  const Selection before = layer.selection();
  const Index capacity = layer.cache().capacity();
  Tensor4<float> wrong(1, q_heads, 5, v_dim);
  expect_refused(
      [&] {
        layer.forward(prompt.q_rows(74, 37), prompt.k_rows(74, 37), prompt.v_rows(74, 37), wrong);
      },
      {"out", 5, 37});
  EXPECT_EQ(layer.selection(), before);
  EXPECT_EQ(layer.cache().capacity(), capacity);
}

// A selector of the caller's own may be wrong.
struct OneKeyMore : DenseSelector {
  using DenseSelector::DenseSelector;
  void select(const quoka::SelectorInput& input, State&, Selection& selection, ExecutorRef) const {
    const Index len = input.k.len();
    selection.select_all(input.k.batch(), input.k.heads(), len > 0 ? len + 1 : 0);
  }
};

TEST(ChunkedPrefillRefuses, ASelectionOfAnotherCache) {
  Random random(62);
  const Prompt<float> prompt(random, 74);
  ChunkedPrefill<OneKeyMore> layer(layer_shape);
  auto out = output_of(prompt);
  expect_refused([&] { layer.prefill(prompt.q, prompt.k, prompt.v, out, 37); },
                 {"the selection's kv_len", 38, 37});
  EXPECT_EQ(layer.kv_len(), 0);
}

}  // namespace
