// The decoder against goldens of an independent program: tests/decoder/goldens/transformer.py.
#include "decoder/tiny_models.hpp"

#include "decoder/file/gguf.hpp"
#include "decoder/model/session.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <thread>

namespace quoka_decoder {
namespace {

// Logits of the goldens are of size 1.7 (rms); every sum here is in float, but for attention's where
// Arithmetic::automatic takes products of bfloat16, off by some 2^-16 in each layer.
const double tolerance =
    quoka::arithmetic_used(quoka::Arithmetic::automatic) == quoka::Arithmetic::single ? 1e-4 : 1e-3;

struct Loaded {
  std::vector<std::byte> bytes;
  Model model;
};

std::unique_ptr<Loaded> load_tiny(const std::string& name) {
  auto loaded = std::make_unique<Loaded>();
  loaded->bytes = write_tiny_model(name);
  loaded->model =
      load_model(std::make_shared<const GgufFile>(GgufFile::parse(loaded->bytes, name)));
  return loaded;
}

std::vector<Token> tokens_of(const Golden& g) { return {g.tokens.begin(), g.tokens.end()}; }

// Dense, but with another method where one is named.
SessionOptions cut_into(Index chunk, Index batch, const std::string& method = "dense",
                        quoka::Budget budget = quoka::Budget::keys(1024)) {
  SessionOptions options;
  options.method = method;
  options.selector.budget = budget;
  options.chunk = chunk;
  options.batch = batch;
  return options;
}

class Architectures : public testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(Tiny, Architectures, testing::ValuesIn(tiny_model_names()),
                         [](const auto& param) { return param.param; });

TEST_P(Architectures, GiveTheLogitsOfTheReference) {
  const auto loaded = load_tiny(GetParam());
  const Golden expected = golden(GetParam());
  quoka::ThreadPool threads(1);
  Session session(loaded->model, {}, threads);
  session.run(tokens_of(expected));

  const Index vocabulary = loaded->model.config.vocabulary, positions = std::ssize(expected.tokens);
  const Vector logits = session.logits(positions);
  for (Index t = 0; t < positions; ++t) {
    const std::span<const float> row(logits.data() + t * vocabulary,
                                     static_cast<std::size_t>(vocabulary));
    const auto top = std::max_element(row.begin(), row.end()) - row.begin();
    EXPECT_EQ(top, expected.top1[static_cast<std::size_t>(t)]) << "position " << t;
    EXPECT_NEAR(weighted_sum(row), expected.weighted_sums[static_cast<std::size_t>(t)], 5e-3)
        << "position " << t;
    if (t < expected.first_position) continue;
    const auto& golden_row = expected.logits[static_cast<std::size_t>(t - expected.first_position)];
    for (std::size_t i = 0; i < row.size(); ++i)
      ASSERT_NEAR(row[i], golden_row[i], tolerance) << "position " << t << ", token " << i;
  }
}

// Chunks, batches, threads and steps of one token change the order of sums, nothing else.
TEST_P(Architectures, DoNotDependOnHowThePromptIsCut) {
  const auto loaded = load_tiny(GetParam());
  const auto tokens = tokens_of(golden(GetParam()));
  quoka::ThreadPool one(1), three(3);
  Session whole(loaded->model, cut_into(64, 64), one);
  Session cut(loaded->model, cut_into(5, 10), three);
  Session stepped(loaded->model, cut_into(1, 1), one);
  for (Session* session : {&whole, &cut, &stepped}) session->run(tokens);
  const Vector expected = whole.logits();
  for (Session* session : {&cut, &stepped}) {
    const Vector logits = session->logits();
    for (std::size_t i = 0; i < logits.size(); ++i)
      ASSERT_NEAR(logits[i], expected[i], tolerance) << "token " << i;
  }
}

TEST(Session, WithABudgetForTheWholePastIsDense) {
  const auto loaded = load_tiny("llama3");
  const auto tokens = tokens_of(golden("llama3"));
  quoka::ThreadPool threads(2);
  Session dense(loaded->model, cut_into(8, 16), threads);
  Session quoka(loaded->model, cut_into(8, 16, "quoka", quoka::Budget::keys(1024)), threads);
  dense.run(tokens);
  quoka.run(tokens);
  EXPECT_EQ(quoka.logits(), dense.logits());
}

TEST(Session, SelectsPastTheDenseLayersOnly) {
  const auto loaded = load_tiny("llama");
  const auto tokens = tokens_of(golden("llama"));
  quoka::ThreadPool threads(1);
  const auto hidden = [&](Index dense_layers, Index layer) {
    SessionOptions options = cut_into(8, 64, "quoka", quoka::Budget::keys(4));
    options.dense_layers = dense_layers;
    Session session(loaded->model, options, threads);
    session.run(tokens);
    const auto state = session.hidden(layer);
    return Vector(state.begin(), state.end());
  };
  Session dense(loaded->model, cut_into(8, 64), threads);
  dense.run(tokens);
  const auto same = [&](const Vector& v, Index layer) {
    return std::equal(v.begin(), v.end(), dense.hidden(layer).begin());
  };
  EXPECT_FALSE(same(hidden(0, 1), 1));
  EXPECT_TRUE(same(hidden(2, 1), 1));
  EXPECT_FALSE(same(hidden(2, 2), 2));
  EXPECT_TRUE(same(hidden(4, 3), 3));
}

TEST(Session, FollowsALayerPolicy) {
  const auto loaded = load_tiny("llama");
  const auto tokens = tokens_of(golden("llama"));
  quoka::ThreadPool threads(1);
  SessionOptions options = cut_into(8, 64, "quoka", quoka::Budget::keys(4));
  const auto first_layer_off = [&](const quoka_examples::LayerPolicy& policy) {
    Session dense(loaded->model, cut_into(8, 64), threads);
    dense.run(tokens);
    options.policy = policy;
    Session session(loaded->model, options, threads);
    session.run(tokens);
    Index layer = 0;
    while (layer < 4 && std::ranges::equal(session.hidden(layer), dense.hidden(layer))) ++layer;
    return layer;
  };
  const auto policy = [](std::optional<quoka::Budget> budget, std::set<Index> dense,
                         std::map<Index, quoka::Budget> budgets) {
    quoka_examples::LayerPolicy p;
    p.budget = budget, p.dense = std::move(dense), p.budgets = std::move(budgets);
    return p;
  };
  EXPECT_EQ(first_layer_off({}), 0);
  EXPECT_EQ(first_layer_off(policy(quoka::Budget::keys(1024), {}, {})),
            4);  // in place of the session's
  EXPECT_EQ(first_layer_off(policy({}, {0, 2}, {})), 1);
  EXPECT_EQ(first_layer_off(policy({}, {0, 1, 2, 3}, {})), 4);
  EXPECT_EQ(first_layer_off(policy({}, {},
                                   {{0, quoka::Budget::keys(1024)},
                                    {1, quoka::Budget::keys(1024)},
                                    {3, quoka::Budget::keys(1024)}})),
            2);
  EXPECT_EQ(first_layer_off(policy(quoka::Budget::keys(1024), {}, {{3, quoka::Budget::keys(4)}})),
            3);

  options.policy = {};
  options.policy.q_heads = 99;
  EXPECT_THROW(Session(loaded->model, options, threads), std::invalid_argument);
  options.policy = policy({}, {}, {{1, quoka::Budget::keys(4)}});
  options.method = "tidal_decode";
  EXPECT_THROW(Session(loaded->model, options, threads), std::invalid_argument);
}

TEST(Session, IsWatchedChunkByChunk) {
  const auto loaded = load_tiny("llama");
  const auto tokens = tokens_of(golden("llama"));
  quoka::ThreadPool threads(1);
  Session session(loaded->model, cut_into(8, 16), threads);
  std::vector<Index> seen(4);
  session.watch = [&](Index layer, Session::View q, Session::View k, Session::View v,
                      Session::View out) {
    EXPECT_EQ(q.len(), out.len());
    EXPECT_EQ(k.len(), v.len());
    EXPECT_LE(q.len(), 8);
    const auto cached = session.layer(layer).keys();  // the chunk's are the last
    EXPECT_EQ(cached.row(0, 0, cached.len() - 1)[0], k.row(0, 0, k.len() - 1)[0]);
    seen[static_cast<std::size_t>(layer)] += q.len();
  };
  session.run(tokens);
  EXPECT_EQ(seen, std::vector<Index>(4, std::ssize(tokens)));
}

// A layer that reuses another's choice must see the choice for its own chunk, whatever the batch.
TEST(Session, BatchesDoNotMixTheChunksOfMethodsThatShareLayers) {
  const auto loaded = load_tiny("llama");
  const auto tokens = tokens_of(golden("llama"));
  quoka::ThreadPool threads(1);
  for (const std::string method : {"tidal_decode", "less_is_more"}) {
    Vector logits[2];
    for (const Index batch : {8, 64}) {
      Session session(loaded->model, cut_into(8, batch, method, quoka::Budget::keys(6)), threads);
      session.run(tokens);
      logits[batch == 8 ? 0 : 1] = session.logits();
    }
    for (std::size_t i = 0; i < logits[0].size(); ++i)
      ASSERT_NEAR(logits[0][i], logits[1][i], tolerance) << method << ", token " << i;
  }
}

// Whatever selects: what is filled is there for later tokens as if it had been run.
TEST(Session, FilledTokensAreSeenAsThoseThatWereRun) {
  const auto loaded = load_tiny("llama");
  const auto tokens = tokens_of(golden("llama"));
  const std::span<const Token> all(tokens), filled = all.first(tokens.size() / 4 * 3),
                                            rest = all.subspan(filled.size());
  quoka::ThreadPool threads(1);
  for (const std::string& method : quoka_examples::all_methods()) {
    Session whole(loaded->model, cut_into(4, 8, method, quoka::Budget::keys(6)), threads);
    Session part(loaded->model, cut_into(4, 8, method, quoka::Budget::keys(6)), threads);
    whole.run(filled);
    whole.run(rest);
    part.fill(filled);
    EXPECT_THROW((void)part.logits(), std::invalid_argument);
    part.run(rest);
    EXPECT_EQ(part.logits(), whole.logits()) << method;
  }
}

TEST(Session, GoesBackToAnEarlierLength) {
  const auto loaded = load_tiny("qwen3");
  const auto tokens = tokens_of(golden("qwen3"));
  quoka::ThreadPool threads(1);
  Session session(loaded->model, cut_into(4, 64, "quoka", quoka::Budget::keys(8)), threads);
  session.run(tokens);
  const Vector expected = session.logits();
  session.truncate(20);
  EXPECT_EQ(session.len(), 20);
  session.run(std::span(tokens).subspan(20));
  const Vector again = session.logits();
  for (std::size_t i = 0; i < again.size(); ++i) ASSERT_NEAR(again[i], expected[i], tolerance);
}

TEST(Session, RefusesTokensOutsideOfTheVocabularyAndStaysAsItWas) {
  const auto loaded = load_tiny("llama");
  quoka::ThreadPool threads(1);
  Session session(loaded->model, {}, threads);
  const std::vector<Token> good{1, 2, 3}, bad{4, 97};
  session.run(good);
  try {
    session.run(bad);
    FAIL() << "token 97 of 97 was taken";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(), "token 97 is not in the vocabulary of 97");
  }
  EXPECT_EQ(session.len(), 3);
  EXPECT_THROW(session.run({}), std::invalid_argument);
  EXPECT_THROW((void)session.logits(4), std::invalid_argument);
}

}  // namespace
}  // namespace quoka_decoder
