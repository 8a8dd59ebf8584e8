// The tasks' samples: every test reads them as a solver would, from the prompt alone.
#include "support/ruler_tasks.hpp"

#include "support/chi_square.hpp"
#include "support/fixtures.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <ranges>
#include <set>

namespace quoka_examples {
namespace {

namespace id = task_tokens;

using quoka_test::expect_refused;

constexpr std::array lengths{127, 501, 512, 1024};

bool is_key(Token t) { return t >= id::keys && t < id::values; }
bool is_value(Token t) { return t >= id::values && t < id::noise; }
bool is_noise(Token t) { return t >= id::noise && t < id::end; }

Token token(const TaskSample& s, Index at) { return s.tokens[static_cast<std::size_t>(at)]; }

// Where triples begin with `mark` before the question: MARK key value, SET variable source.
std::vector<Index> triples(const TaskSample& s, Token mark) {
  std::vector<Index> starts;
  for (Index i = 1; i + 2 < s.positions.front(); ++i)
    if (token(s, i) == mark) starts.push_back(i);
  return starts;
}

// The values that stand after a key in the needles.
std::set<Token> values_of(const TaskSample& s, Token key) {
  std::set<Token> values;
  for (const Index start : triples(s, id::mark))
    if (token(s, start + 1) == key) values.insert(token(s, start + 2));
  return values;
}

std::map<Token, Index> counted(const TaskSample& s) {
  std::map<Token, Index> counts;
  for (Index i = 1; i + 1 < std::ssize(s.tokens); ++i) ++counts[token(s, i)];
  return counts;
}

// The answers, recomputed.
std::vector<std::set<Token>> solve(Task task, const TaskSample& s) {
  std::vector<std::set<Token>> answers;
  if (task == Task::vt) {  // what was set to the token at each position
    for (const Index position : s.positions)
      for (const Index start : triples(s, id::set))
        if (token(s, start + 2) == token(s, position)) answers.push_back({token(s, start + 1)});
  } else if (task == Task::cwe || task == Task::fwe) {
    std::vector<std::pair<Index, Token>> by_count;
    for (const auto& [word, count] : counted(s)) by_count.emplace_back(count, word);
    std::sort(by_count.rbegin(), by_count.rend());
    std::set<Token>& most = answers.emplace_back();
    for (std::size_t i = 0; i < (task == Task::cwe ? 10u : 3u); ++i)
      most.insert(by_count[i].second);
  } else {
    for (const Index position : s.positions) answers.push_back(values_of(s, token(s, position)));
  }
  return answers;
}

// How many answers a task has, and tokens each.
std::pair<std::size_t, std::size_t> answers_of(Task task) {
  if (task == Task::multi_query) return {4, 1};
  if (task == Task::vt) return {5, 1};
  return {1, task == Task::multi_value ? 4 : task == Task::cwe ? 10 : task == Task::fwe ? 3 : 1};
}

// Sample i of 40 of a task whose needles stand in noise: their keys and values differ, nothing else is between BOS and the
// question, which asks one key after another; and the asked one stands at the depth: it is the p-th that could begin there if the
// others were one token long.
void expect_needles(Task task, const TaskSample& s, Index i) {
  const auto starts = triples(s, id::mark);
  ASSERT_EQ(starts.size(), task == Task::single ? 1u : 4u);
  std::set<Token> keys, values;
  Index asked = -1;
  for (const Index start : starts) {
    EXPECT_TRUE(is_key(token(s, start + 1)));
    EXPECT_TRUE(is_value(token(s, start + 2)));
    keys.insert(token(s, start + 1)), values.insert(token(s, start + 2));
    const bool is_asked = token(s, start + 1) == token(s, s.positions.front()) &&
                          (task != Task::multi_value || token(s, start + 2) == s.answers[0][0]);
    if (is_asked) asked = start - 1 - 2 * (std::ssize(values) - 1);
  }
  EXPECT_EQ(keys.size(), task == Task::multi_value ? 1u : starts.size());
  EXPECT_EQ(values.size(), starts.size());
  const Index question = s.positions.front() - 1, n = std::ssize(starts);
  EXPECT_EQ(std::count_if(s.tokens.begin() + 1, s.tokens.begin() + question, is_noise),
            question - 1 - 3 * n);
  for (std::size_t a = 0; a < s.positions.size(); ++a) {
    EXPECT_EQ(token(s, s.positions[a] - 1), id::ask);
    EXPECT_EQ(s.positions[a], question + 1 + 2 * static_cast<Index>(a));
  }
  EXPECT_EQ(asked, std::floor(static_cast<double>(i) / 39.0 *
                                  static_cast<double>(question - 1 - 2 * n - 1) +
                              0.5));
}

// Nothing but needles, and the asked key stands once, at the depth.
void expect_haystack(const TaskSample& s, Index i) {
  const Index length = std::ssize(s.tokens), m = (length - 3) / 3, rest = (length - 3) % 3;
  const auto starts = triples(s, id::mark);
  ASSERT_EQ(std::ssize(starts), m);
  Index asked = -1, times = 0;
  for (Index j = 0; j < m; ++j) {
    EXPECT_EQ(starts[static_cast<std::size_t>(j)], 1 + rest + 3 * j);
    if (token(s, 1 + rest + 3 * j + 1) == token(s, length - 1)) asked = j, ++times;
  }
  EXPECT_EQ(times, 1);
  EXPECT_EQ(asked, std::floor(static_cast<double>(i) / 39.0 * static_cast<double>(m - 1) + 0.5));
}

// Two chains in order; the first is asked link by link.
void expect_chains(const TaskSample& s) {
  const auto starts = triples(s, id::set);
  ASSERT_EQ(starts.size(), 10u);
  std::set<Token> variables;
  Index chains = 0;
  for (const Index start : starts) {
    const Token variable = token(s, start + 1), source = token(s, start + 2);
    EXPECT_TRUE(is_key(variable));
    if (is_value(source))
      ++chains;
    else
      EXPECT_TRUE(variables.contains(source)) << "set to a variable that was not set before";
    EXPECT_TRUE(variables.insert(variable).second);
  }
  EXPECT_EQ(chains, 2);
  EXPECT_EQ(token(s, s.positions.front() - 1), id::trace);
  EXPECT_TRUE(is_value(token(s, s.positions.front())));
  for (std::size_t link = 0; link + 1 < s.positions.size(); ++link)
    EXPECT_EQ(token(s, s.positions[link + 1]), s.answers[link][0]);
}

class EveryTask : public testing::TestWithParam<Task> {};
INSTANTIATE_TEST_SUITE_P(Tasks, EveryTask, testing::ValuesIn(all_tasks),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(EveryTask, HasTheLengthTheTokensAndTheAnswersThatThePromptGives) {
  for (const Index length : lengths)
    for (Index i = 0; i < 40; ++i) {
      SCOPED_TRACE("length " + std::to_string(length) + ", sample " + std::to_string(i));
      const TaskSample s = evaluation_sample(GetParam(), length, i, 1);
      ASSERT_EQ(std::ssize(s.tokens), length);
      EXPECT_EQ(token(s, 0), id::bos);
      EXPECT_EQ(std::count(s.tokens.begin(), s.tokens.end(), id::bos), 1);
      for (const Token t : s.tokens)
        EXPECT_TRUE((t >= 1 && t <= 8 && t != 2) || (t >= id::keys && t < id::end)) << t;
      EXPECT_EQ(s.positions.back(), length - 1);
      EXPECT_TRUE(std::is_sorted(s.positions.begin(), s.positions.end()));
      const auto solved = solve(GetParam(), s);
      const auto [count, size] = answers_of(GetParam());
      ASSERT_EQ(s.answers.size(), count);
      ASSERT_EQ(s.positions.size(), s.answers.size());
      ASSERT_EQ(solved.size(), s.answers.size());
      for (std::size_t a = 0; a < solved.size(); ++a) {
        EXPECT_EQ(s.answers[a].size(), size);
        EXPECT_EQ(std::set<Token>(s.answers[a].begin(), s.answers[a].end()), solved[a]) << a;
      }
      if (GetParam() <= Task::multi_query && GetParam() != Task::haystack)
        expect_needles(GetParam(), s, i);
      if (GetParam() == Task::haystack) expect_haystack(s, i);
      if (GetParam() == Task::vt) expect_chains(s);
    }
}

TEST_P(EveryTask, IsTheSameForASeedAndDiffersBetweenSamplesLengthsAndSeeds) {
  const auto tokens = [&](Index length, Index i, std::uint32_t seed) {
    return evaluation_sample(GetParam(), length, i, seed).tokens;
  };
  EXPECT_EQ(tokens(200, 3, 1), tokens(200, 3, 1));
  EXPECT_NE(tokens(200, 3, 1), tokens(200, 43, 1));  // at the same depth
  EXPECT_NE(tokens(200, 3, 1), tokens(200, 3, 2));
  const auto longer = tokens(201, 3, 1);
  EXPECT_FALSE(std::equal(longer.begin(), longer.begin() + 100, tokens(200, 3, 1).begin()));
}

TEST_P(EveryTask, RefusesALengthThatDoesNotHoldItNamingBoth) {
  Draws draws({1});
  const auto make = [&](Index length, std::optional<double> depth = {}) {
    return [=, &draws] { (void)make_sample(GetParam(), length, depth, draws); };
  };
  for (const Index length : {-1, 0, 1, 4, 11}) {
    if (length == 11 && (GetParam() == Task::single || GetParam() == Task::haystack)) continue;
    expect_refused(make(length),
                   {name_of(GetParam()) + " in " + std::to_string(length) + " tokens: "});
  }
  for (const double depth : {1.5, std::nan("")}) expect_refused(make(512, depth), {"depth"});
}

TEST(Tasks, FitIntoTheShortestPromptThatHoldsThem) {
  Draws draws({1});
  const TaskSample single = make_sample(Task::single, 6, 0.5, draws);
  EXPECT_EQ(single.tokens, (std::vector<Token>{id::bos, id::mark, token(single, 2),
                                               token(single, 3), id::ask, token(single, 2)}));
  EXPECT_EQ(triples(make_sample(Task::vt, 1 + 30 + 6, 0.5, draws), id::set).size(), 10u);
  EXPECT_EQ(triples(make_sample(Task::multi_query, 1 + 12 + 8, 0.5, draws), id::mark).size(), 4u);
  expect_refused([&] { (void)make_sample(Task::multi_query, 1 + 11 + 8, {}, draws); },
                 {"multi_query in 20 tokens: its needles take 12 tokens, its context has 11"});
  // The asked words are the most frequent ones.
  expect_refused([&] { (void)make_sample(Task::cwe, 16, {}, draws); },
                 {"cwe in 16 tokens: an asked word comes 1 times, another one 1 times"});
}

TEST(Tasks, AreNamed) {
  for (const Task task : all_tasks) EXPECT_EQ(task_named(name_of(task)), task);
  expect_refused([] { (void)task_named("qa"); },
                 {"no task is called \"qa\"; there are single multi_key haystack multi_value "
                  "multi_query vt cwe fwe"});
}

TEST(Words, ComeAsOftenAsStated) {
  const auto sorted_counts = [](const TaskSample& s) {
    std::vector<Index> counts;
    for (const auto& [word, count] : counted(s)) {
      EXPECT_TRUE(word >= id::noise && word < id::noise + id::words) << word;
      counts.push_back(count);
    }
    std::sort(counts.rbegin(), counts.rend());
    return counts;
  };
  // cwe, C = 1000: 71 each of 10, and 290 among 40.
  std::vector<Index> expected(10, 71);
  expected.insert(expected.end(), 10, 8);
  expected.insert(expected.end(), 30, 7);
  EXPECT_EQ(sorted_counts(evaluation_sample(Task::cwe, 1002, 0, 1)), expected);
  // fwe, C = 1000, z = 1.625133: 615, 153, 68, ..
  const auto counts = sorted_counts(evaluation_sample(Task::fwe, 1002, 0, 1));
  EXPECT_EQ(std::accumulate(counts.begin(), counts.end(), Index{0}), 1000);
  EXPECT_EQ((std::vector<Index>(counts.begin(), counts.begin() + 3)),
            (std::vector<Index>{615, 153, 68}));
}

// ---- distributions ------------------------------------------------------------------------------

// What `of` finds in samples of a task is one of so many things, each as often as another.
template <class F>
void expect_uniform(Task task, Index length, std::size_t choices, double each, F of) {
  Draws draws({5});
  std::map<decltype(of(TaskSample())), int> counts;
  for (Index i = 0; i < static_cast<Index>(each * static_cast<double>(choices)); ++i)
    ++counts[of(make_sample(task, length, std::nullopt, draws))];
  ASSERT_EQ(counts.size(), choices);
  EXPECT_LT(chi_square(std::views::values(counts), each),
            chi_square_bound(static_cast<double>(choices) - 1.0));
}

TEST(Placement, IsUniform) {
  // Four triples in 14 tokens that do not overlap: C(6, 4) = 15 placements.
  expect_uniform(Task::multi_key, 1 + 14 + 2, 15, 200,
                 [](const TaskSample& s) { return triples(s, id::mark); });
  expect_uniform(Task::multi_key, 64, 4, 500, [](const TaskSample& s) {  // the asked one
    const auto starts = triples(s, id::mark);
    std::size_t j = 0;
    while (token(s, starts.at(j) + 1) != s.tokens.back()) ++j;
    return j;
  });
  // Which of the ten places belong to the asked chain: C(10, 5) = 252 choices.
  expect_uniform(Task::vt, 64, 252, 20, [](const TaskSample& s) {
    std::set<Token> asked{s.tokens[s.tokens.size() - 5]};
    for (const auto& answer : s.answers) asked.insert(answer[0]);
    std::vector<bool> places;
    for (const Index start : triples(s, id::set))
      places.push_back(asked.contains(token(s, start + 1)));
    return places;
  });
}

TEST(Noise, IsZipf) {
  Draws draws({8});
  std::vector<double> counts(static_cast<std::size_t>(id::end - id::noise));
  double total = 0.0, z = 0.0;
  for (int i = 0; i < 40; ++i)
    for (const Token t : make_sample(Task::single, 1000, std::nullopt, draws).tokens)
      if (is_noise(t)) ++counts[static_cast<std::size_t>(t - id::noise)], ++total;
  for (std::size_t r = 0; r < counts.size(); ++r) z += 1.0 / static_cast<double>(r + 1);
  double sum = 0.0;
  for (std::size_t r = 0; r < counts.size(); ++r) {
    const double expected = total / (static_cast<double>(r + 1) * z);
    sum += (counts[r] - expected) * (counts[r] - expected) / expected;
  }
  EXPECT_LT(sum, chi_square_bound(static_cast<double>(counts.size()) - 1.0));
}

// ---- scores -------------------------------------------------------------------------------------

TEST(Score, CountsTheRightOnesAmongTheLargestLogitsAndRefusesWhatIsNoNumber) {
  const TaskSample sample{{}, {4, 6}, {{2}, {0, 3}}};
  const std::vector<float> right{0, 0, 5, 1, 7, -1, -1, 6}, half{0, 0, 5, 1, 7, 8, -1, 6},
      tied{5, 0, 5, 1, 7, -1, -1, 6};
  EXPECT_EQ(score(sample, right, 4).right, 3);
  EXPECT_EQ(score(sample, right, 4).of, 3);
  EXPECT_TRUE(score(sample, right, 4).exact());
  EXPECT_EQ(score(sample, half, 4).right, 2);
  EXPECT_FALSE(score(sample, half, 4).exact());
  EXPECT_EQ(score(sample, tied, 4).right, 2);  // of equal logits the first counts
  EXPECT_THROW((void)score(sample, std::vector<float>(7), 4), std::invalid_argument);
  const TaskSample one{{}, {4}, {{2}}};
  EXPECT_THROW((void)score(one, std::vector<float>{0, NAN, 0, 0}, 4), std::invalid_argument);
  const TaskSample many{{}, {4}, {{0, 1, 2}}};
  EXPECT_THROW((void)score(many, std::vector<float>{0, 1}, 2), std::invalid_argument);
}

}  // namespace
}  // namespace quoka_examples
