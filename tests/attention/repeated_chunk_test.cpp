// attention/repeated_chunk.hpp: a chunk that the past holds already is found, by a copy as by its memory, and what
// only looks like one is not; and several queries over a past without a chunk, which must be said.

#include <quoka/packing/byte_formats.hpp>
#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/prefill/ragged.hpp>
#include <quoka/select/dense.hpp>
#include <quoka/select/quoka.hpp>

#include "support/attention_fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::Mask, quoka::Past, quoka::Rows;

// Keys or values of a past, and of the chunk behind it.
template <class T>
Tensor4<T> joined(const Tensor4<T>& past, const Tensor4<T>& chunk) {
  return past.concatenate(chunk, 2).eval();
}
template <class To, class From>
Tensor4<To> as(const Tensor4<From>& x) {
  Tensor4<To> y(x.dimensions());
  for (Index i = 0; i < x.size(); ++i)
    y.data()[i] = static_cast<To>(static_cast<float>(x.data()[i]));
  return y;
}

constexpr Shape shape{
    .batch = 2, .q_heads = 6, .kv_heads = 2, .head_dim = 37, .v_dim = 19, .q_len = 7, .kv_len = 40};

void attend_to(const Tensor4<float>& q, const Past& past, const quoka::Chunk& chunk,
               const AttentionOptions& options = {}) {
  auto output = unwritten<float>(q, past.v.dim());
  const auto before = output;
  try {
    quoka::attention(q, past, chunk, {output.out, output.lse}, options);
  } catch (...) {
    expect_same(output, before);
    throw;
  }
}
void expect_twice(const Tensor4<float>& q, const Past& past, const quoka::Chunk& chunk,
                  const AttentionOptions& options = {}) {
  expect_refused([&] { attend_to(q, past, chunk, options); },
                 {chunk.k.len(), past.k.len(), "count twice", "chunk_in_cache"});
}

// ---- what is found ------------------------------------------------------------------------------

TEST(RepeatedChunk, ACopyInThePastIsRefused) {
  Random random(1);
  for (const Index q_len : {1, 2, 7}) {
    Shape s = shape;
    s.q_len = q_len;
    const auto in = random_inputs<float>(random, s);
    const auto k = joined(in.past_k, in.k), v = joined(in.past_v, in.v);
    expect_twice(in.q, {k, v}, {in.k, in.v});
    const auto again = in;
    expect_twice(in.q, {again.k, again.v}, {in.k, in.v});  // nothing else in the past
  }
}

TEST(RepeatedChunk, ACopyThatTheCacheHasRoundedIsRefused) {
  Random random(2);
  const auto in = random_inputs<float>(random, shape);
  const auto k = joined(in.past_k, in.k), v = joined(in.past_v, in.v);
  const auto half_k = as<Eigen::half>(k);
  const auto bfloat16_v = as<Eigen::bfloat16>(v);
  expect_twice(in.q, {half_k, bfloat16_v}, {in.k, in.v});
  // Formats with scales in their rows, and apart.
  const std::vector<float> k_scales(2, 0.04f);
  const std::pair<quoka::CacheFormat, quoka::CacheFormat> stored[] = {
      {{quoka::q8_0_format()}, {quoka::u8_format()}},
      {{quoka::i8_format(), k_scales}, {quoka::e4m3_format()}}};
  for (const auto& [k_as, v_as] : stored) {
    quoka::KvCache cache(2, 2, 37, 19, k_as, v_as);
    cache.append(k, v);
    expect_twice(in.q, {cache.k(), cache.v()}, {in.k, in.v});
  }
  // A chunk with less in it than the cache could hold.
  const auto half_chunk_k = as<Eigen::half>(in.k);
  const auto half_chunk_v = as<Eigen::half>(in.v);
  const auto widened_k = joined(in.past_k, as<float>(half_chunk_k)),
             widened_v = joined(in.past_v, as<float>(half_chunk_v));
  expect_twice(in.q, {widened_k, widened_v}, {half_chunk_k, half_chunk_v});
}

TEST(RepeatedChunk, RowsOfManyChannelsAreCompared) {
  Random random(3);
  Shape s = shape;
  s.head_dim = 3000, s.v_dim = 3;
  const auto in = random_inputs<float>(random, s);
  const auto k = as<Eigen::half>(joined(in.past_k, in.k));
  const auto v = joined(in.past_v, in.v);
  expect_twice(in.q, {k, v}, {in.k, in.v});
}

TEST(RepeatedChunk, ACopyInPagesOrOfAListIsRefused) {
  Random random(4);
  Shape s = shape;
  s.batch = 1;
  const auto in = random_inputs<float>(random, s);
  const auto k = joined(in.past_k, in.k), v = joined(in.past_v, in.v);
  const std::vector<quoka::Position> cells = [] {
    std::vector<quoka::Position> all;
    for (quoka::Position i = 0; i < 47; ++i) all.push_back(i);
    std::swap(all[3], all[20]);
    return all;
  }();
  expect_twice(in.q, {Rows(k).listed(cells), Rows(v).listed(cells)}, {in.k, in.v});
  // A page for each token.
  const Rows of_k(k), of_v(v);
  const auto pool = [](const Rows& x) {
    return Rows(x.data(), x.format(), {47, 2, 1, x.dim()},
                {x.strides()[2], x.strides()[1], x.strides()[2]});
  };
  expect_twice(in.q, {quoka::paged(pool(of_k), cells, 47), quoka::paged(pool(of_v), cells, 47)},
               {in.k, in.v});
}

TEST(RepeatedChunk, OneOfABatchIsRefused) {
  Random random(5);
  const auto in = random_inputs<float>(random, shape), other = random_inputs<float>(random, shape);
  const auto k = joined(in.past_k, in.k), v = joined(in.past_v, in.v);
  auto a = unwritten<float>(in.q, 19), b = a;
  const auto before = a;
  const quoka::AttentionSequence batch[] = {
      {.q = other.q,
       .past = {other.past_k, other.past_v},
       .chunk = {other.k, other.v},
       .out = a.out},
      {.q = in.q, .past = {k, v}, .chunk = {in.k, in.v}, .out = b.out}};
  expect_refused([&] { quoka::attention(batch); }, {7, 47, "count twice"});
  expect_same(a, before);
  quoka::attention(std::span(batch).first(1));
}

TEST(RepeatedChunk, IsFoundBehindASelector) {
  Random random(6);
  Shape s = shape;
  s.batch = 1, s.v_dim = 37;
  const auto in = random_inputs<float>(random, s);
  const auto k = joined(in.past_k, in.k), v = joined(in.past_v, in.v);
  const quoka::QuokaSelector selector({.budget = quoka::Budget::keys(20)});
  const Selection keep = selector.select(in.q, k, {});
  expect_twice(in.q, {k, v, keep}, {in.k, in.v});

  auto out = unwritten<float>(in.q, 37);
  quoka::QuokaSelector::State state;
  const std::vector<quoka::RaggedSequence<quoka::QuokaSelector>> batch{{.q = in.q,
                                                                        .past_k = k,
                                                                        .past_v = v,
                                                                        .chunk = {in.k, in.v},
                                                                        .out = out.out,
                                                                        .state = &state}};
  quoka::RaggedWorkspace<quoka::QuokaSelector> workspace;
  expect_refused(
      [&] {
        quoka::select_and_attend(selector, std::span(batch), {}, SerialExecutor{}, workspace);
      },
      {7, 47, "count twice"});

  // A layer whose caller appends first.
  quoka::ChunkedPrefill<quoka::QuokaSelector> layer({.q_heads = 6, .kv_heads = 2, .head_dim = 37},
                                                    {.budget = quoka::Budget::keys(20)});
  layer.append(k, v);
  expect_refused([&] { layer.forward(in.q, in.k, in.v, out.out); }, {7, 47, "count twice"});
  EXPECT_EQ(layer.kv_len(), 47);
  layer.truncate(40);
  // What was attended to may come again: the layer appended it itself.
  for (int i = 0; i < 3; ++i) layer.forward(in.q, in.k, in.v, out.out);
  layer.append(in.k, in.v);
  expect_refused([&] { layer.forward(in.q, in.k, in.v, out.out); }, {7, 68, "count twice"});
  quoka::ChunkedPrefill<quoka::QuokaSelector> without_positions(
      {.q_heads = 6, .kv_heads = 2, .head_dim = 37}, {.budget = quoka::Budget::keys(20)},
      {.may_repeat = true});
  without_positions.append(k, v);
  without_positions.forward(in.q, in.k, in.v, out.out);
}

// ---- what is none -------------------------------------------------------------------------------

TEST(RepeatedChunk, AChunkBehindThePastInOneCacheIsNone) {
  Random random(7);
  auto in = random_inputs<float>(random, shape);
  in.past_k.setRandom(), in.past_v.setRandom();
  // The last rows of the past and those of the chunk are equal: keys without positions.
  auto k = joined(in.past_k, in.k), v = joined(in.past_v, in.v);
  for (Index b = 0; b < 2; ++b)
    for (Index head = 0; head < 2; ++head)
      for (Index i = 0; i < 7; ++i) {
        for (Index c = 0; c < 37; ++c) k(b, head, 33 + i, c) = k(b, head, 40 + i, c);
        for (Index c = 0; c < 19; ++c) v(b, head, 33 + i, c) = v(b, head, 40 + i, c);
      }
  const auto [past, chunk] = quoka::chunk_in_cache(k, v, 7);
  attend_to(in.q, past, chunk);
  Strided<float> of_k(k), of_v(v);  // [batch, len, heads, dim]
  const auto strided = quoka::chunk_in_cache(of_k.view(), of_v.view(), 7);
  attend_to(in.q, strided.past, strided.chunk);
  expect_twice(in.q, {Rows(k).slice(0, 40), Rows(v).slice(0, 40)}, {in.k, in.v});
}

TEST(RepeatedChunk, EveryRowAndEveryHeadMustBeEqual) {
  Random random(8);
  const auto in = random_inputs<float>(random, shape);
  for (const bool of_keys : {true, false})
    for (const Index i : {0, 3, 6})
      for (const Index head : {0, 1})
        for (const Index b : {0, 1}) {
          auto k = joined(in.past_k, in.k), v = joined(in.past_v, in.v);
          auto& x = of_keys ? k : v;
          x(b, head, 40 + i, 18) += 1.0f;
          attend_to(in.q, {k, v}, {in.k, in.v});
        }
}

TEST(RepeatedChunk, RowsThatAreAllTheSameAreNone) {
  Random random(9);
  for (const Index q_len : {1, 7}) {
    Shape s = shape;
    s.q_len = q_len;
    auto in = random_inputs<float>(random, s);
    for (const float x : {0.0f, 1.0f}) {  // keys of one number, whatever the values are
      in.k.setConstant(x);
      const auto k = joined(in.past_k, in.k), v = joined(in.past_v, in.v);
      attend_to(in.q, {k, v}, {in.k, in.v});
      const auto again = in;
      attend_to(in.q, {again.k, again.v}, {in.k, in.v});
    }
    // Padding: a token that is repeated.
    in = random_inputs<float>(random, s);
    for (Tensor4<float>* const x : {&in.past_k, &in.past_v, &in.k, &in.v})
      for (Index b = 0; b < 2; ++b)
        for (Index head = 0; head < 2; ++head)
          for (Index i = 0; i < x->dimension(2); ++i)
            for (Index c = 0; c < x->dimension(3); ++c)
              (*x)(b, head, i, c) = static_cast<float>(c * c % 11 + head);
    attend_to(in.q, {in.past_k, in.past_v}, {in.k, in.v});
  }
}

TEST(RepeatedChunk, KeysWithoutPositionsAreNone) {
  Random random(10);
  const auto in = random_inputs<float>(random, shape);
  const auto k = joined(in.past_k, in.k), v = joined(in.past_v, in.v);
  const std::vector<float> slopes(6, 0.1f);
  attend_to(in.q, {k, v}, {in.k, in.v}, {.alibi_slopes = slopes});
  attend_to(in.q, {k, v}, {in.k, in.v}, {.mask_factors = slopes});
  attend_to(in.q, {k, v}, {in.k, in.v}, {.may_repeat = true});
}

TEST(RepeatedChunk, ASelectionWithoutTheCopiesHasThemOnce) {
  Random random(11);
  const auto in = random_inputs<float>(random, shape);
  const auto k = joined(in.past_k, in.k), v = joined(in.past_v, in.v);
  oracle::Positions lists(2, std::vector<std::vector<Index>>(2, {1, 5, 39}));
  const Selection before = to_selection(lists, 47);
  attend_to(in.q, {k, v, before}, {in.k, in.v});
  lists[1][0] = {1, 5, 40};
  const Selection one = to_selection(lists, 47);
  expect_twice(in.q, {k, v, one}, {in.k, in.v});
}

TEST(RepeatedChunk, AMaskThatHidesTheCopiesHasThemOnce) {
  Random random(12);
  const auto in = random_inputs<float>(random, shape);
  const auto k = joined(in.past_k, in.k), v = joined(in.past_v, in.v);
  Tensor4<float> mask(1, 6, 7, 54);
  mask.setZero();
  expect_twice(in.q, {k, v}, {in.k, in.v}, {.mask = Mask(mask)});
  for (Index head = 0; head < 6; ++head)
    for (Index i = 0; i < 7; ++i)
      for (Index t = 40; t < 47; ++t) mask(0, head, i, t) = -infinity;
  attend_to(in.q, {k, v}, {in.k, in.v}, {.mask = Mask(mask)});
  mask(0, 4, 6, 46) = 0.0f;
  expect_twice(in.q, {k, v}, {in.k, in.v}, {.mask = Mask(mask)});
}

// ---- a past without a chunk ---------------------------------------------------------------------

TEST(PastWithoutAChunk, OfSeveralQueriesIsRefusedUnlessSaid) {
  Random random(13);
  const auto in = random_inputs<float>(random, shape);
  const auto refused = [&](const Past& past, const AttentionOptions& options = {}) {
    expect_refused([&] { attend_to(in.q, past, {}, options); },
                   {7, 40, "no chunk", "chunk_in_cache", "causal = false", "query_position"});
  };
  const Past past(in.past_k, in.past_v);
  refused(past);
  Tensor4<float> mask(1, 1, 7, 40);
  mask.setZero();
  refused(past, {.mask = Mask(mask)});
  const Selection some = to_selection({{{3}, {4}}, {{5}, {6}}}, 40);
  refused({in.past_k, in.past_v, some});
  attend_to(in.q, past, {}, {.causal = false});
  attend_to(in.q, past, {}, {.query_position = 40});
  attend_to(in.q, {Rows(in.past_k).slice(0, 0), Rows(in.past_v).slice(0, 0)},
            {});  // nothing to see
}

TEST(PastWithoutAChunk, OfOneQueryNeedsNoWord) {
  Random random(14);
  Shape s = shape;
  s.q_len = 1;
  const auto in = random_inputs<float>(random, s, false);
  attend_to(in.q, {in.past_k, in.past_v}, {});
}

TEST(PastWithoutAChunk, OfASequenceOfABatchIsRefusedUnlessSaid) {
  Random random(15);
  const auto in = random_inputs<float>(random, shape);
  auto output = unwritten<float>(in.q, 19);
  quoka::AttentionSequence sequence{.q = in.q, .past = {in.past_k, in.past_v}, .out = output.out};
  expect_refused([&] { quoka::attention(std::span(&sequence, 1)); }, {7, 40, "no chunk"});
  sequence.query_position = 40;
  quoka::attention(std::span(&sequence, 1));
}

}  // namespace
