// The tasks' samples: every test reads them as a solver would, from the prompt alone.
#include "support/ruler_tasks.hpp"

#include "support/chi_square.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <ranges>
#include <set>
#include <stdexcept>

namespace quoka_examples {
namespace {

namespace id = task_tokens;

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

std::size_t answer_size(Task task) {
  if (task == Task::multi_value) return 4;
  return task == Task::cwe ? 10 : task == Task::fwe ? 3 : 1;
}

std::size_t answer_count(Task task) {
  return task == Task::multi_query ? 4 : task == Task::vt ? 5 : 1;
}

// The sentence with which a length is refused; empty where it is taken.
std::string refusal(Task task, Index length) {
  Draws draws({1});
  try {
    (void)make_sample(task, length, std::nullopt, draws);
    return "";
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
}

class EveryTask : public testing::TestWithParam<Task> {};
INSTANTIATE_TEST_SUITE_P(Tasks, EveryTask, testing::ValuesIn(all_tasks),
                         [](const auto& test) { return name_of(test.param); });

TEST_P(EveryTask, HasTheLengthTheTokensAndTheAnswersThatThePromptGives) {
  for (const Index length : lengths)
    for (Index i = 0; i < 20; ++i) {
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
      ASSERT_EQ(s.answers.size(), answer_count(GetParam()));
      ASSERT_EQ(s.positions.size(), s.answers.size());
      ASSERT_EQ(solved.size(), s.answers.size());
      for (std::size_t a = 0; a < solved.size(); ++a) {
        EXPECT_EQ(s.answers[a].size(), answer_size(GetParam()));
        EXPECT_EQ(std::set<Token>(s.answers[a].begin(), s.answers[a].end()), solved[a]) << a;
      }
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
  for (const Index length : {-1, 0, 1, 4, 11}) {
    if (length == 11 && (GetParam() == Task::single || GetParam() == Task::haystack)) continue;
    const std::string says = refusal(GetParam(), length);
    EXPECT_TRUE(
        says.starts_with(name_of(GetParam()) + " in " + std::to_string(length) + " tokens: "))
        << says;
  }
  Draws draws({1});
  EXPECT_THROW((void)make_sample(GetParam(), 512, 1.5, draws), std::invalid_argument);
  EXPECT_THROW((void)make_sample(GetParam(), 512, std::nan(""), draws), std::invalid_argument);
}

TEST(Tasks, FitIntoTheShortestPromptThatHoldsThem) {
  Draws draws({1});
  const TaskSample single = make_sample(Task::single, 6, 0.5, draws);
  EXPECT_EQ(single.tokens, (std::vector<Token>{id::bos, id::mark, token(single, 2),
                                               token(single, 3), id::ask, token(single, 2)}));
  EXPECT_EQ(triples(make_sample(Task::vt, 1 + 30 + 6, 0.5, draws), id::set).size(), 10u);
  EXPECT_EQ(triples(make_sample(Task::multi_query, 1 + 12 + 8, 0.5, draws), id::mark).size(), 4u);
  EXPECT_EQ(refusal(Task::multi_query, 1 + 11 + 8),
            "multi_query in 20 tokens: its needles take 12 tokens, its context has 11");
  // The asked words are the most frequent ones.
  EXPECT_EQ(refusal(Task::cwe, 16),
            "cwe in 16 tokens: an asked word comes 1 times, another one 1 times");
}

TEST(Tasks, AreNamed) {
  for (const Task task : all_tasks) EXPECT_EQ(task_named(name_of(task)), task);
  try {
    (void)task_named("qa");
    FAIL() << "qa is no task";
  } catch (const std::invalid_argument& error) {
    EXPECT_STREQ(error.what(),
                 "no task is called \"qa\"; there are single multi_key haystack multi_value "
                 "multi_query vt cwe fwe");
  }
}

TEST(Needles, StandInNoiseWithDistinctKeysAndValues) {
  for (const Task task : {Task::single, Task::multi_key, Task::multi_value, Task::multi_query}) {
    for (Index i = 0; i < 40; ++i) {
      const TaskSample s = evaluation_sample(task, 300, i, 1);
      const auto starts = triples(s, id::mark);
      ASSERT_EQ(starts.size(), task == Task::single ? 1u : 4u);
      std::set<Token> keys, values;
      for (const Index start : starts) {
        EXPECT_TRUE(is_key(token(s, start + 1)));
        EXPECT_TRUE(is_value(token(s, start + 2)));
        keys.insert(token(s, start + 1)), values.insert(token(s, start + 2));
      }
      EXPECT_EQ(keys.size(), task == Task::multi_value ? 1u : starts.size());
      EXPECT_EQ(values.size(), starts.size());
      // Nothing else is between BOS and the question, which asks one key after another.
      const Index question = s.positions.front() - 1;
      EXPECT_EQ(std::count_if(s.tokens.begin() + 1, s.tokens.begin() + question, is_noise),
                question - 1 - 3 * std::ssize(starts));
      for (std::size_t a = 0; a < s.positions.size(); ++a) {
        EXPECT_EQ(token(s, s.positions[a] - 1), id::ask);
        EXPECT_EQ(s.positions[a], question + 1 + 2 * static_cast<Index>(a));
      }
    }
  }
}

// Among n triples in C tokens the asked one is the p-th that could begin there if the others were
// one token long.
TEST(Needles, TheAskedOneStandsAtTheDepth) {
  for (const Task task : {Task::single, Task::multi_key, Task::multi_query}) {
    for (Index i = 0; i < 40; ++i) {
      const double depth = static_cast<double>(i) / 39.0;
      const TaskSample s = evaluation_sample(task, 400, i, 2);
      const auto starts = triples(s, id::mark);
      const Index context = s.positions.front() - 2, n = std::ssize(starts);
      const auto asked = std::find_if(starts.begin(), starts.end(), [&](Index start) {
        return token(s, start + 1) == token(s, s.positions.front());
      });
      ASSERT_NE(asked, starts.end());
      const Index p = *asked - 1 - 2 * (asked - starts.begin());
      EXPECT_EQ(p, std::floor(depth * static_cast<double>(context - 2 * n - 1) + 0.5));
    }
  }
  // The first of several values too: somewhere among the needles there is one at that place.
  const TaskSample last = evaluation_sample(Task::multi_value, 400, 39, 2);
  EXPECT_EQ(triples(last, id::mark).back(), last.positions.front() - 1 - 3);
  const TaskSample first = evaluation_sample(Task::multi_value, 400, 0, 2);
  EXPECT_EQ(triples(first, id::mark).front(), 1);
  EXPECT_EQ(token(first, 3), first.answers[0][0]);
}

TEST(Haystack, IsNothingButNeedlesAndTheAskedKeyStandsOnceAtTheDepth) {
  for (Index i = 0; i < 40; ++i) {
    const Index length = 300 + i % 3;
    const TaskSample s = evaluation_sample(Task::haystack, length, i, 1);
    const auto starts = triples(s, id::mark);
    const Index m = (length - 3) / 3, rest = (length - 3) % 3;
    ASSERT_EQ(std::ssize(starts), m);
    EXPECT_EQ(starts.front(), 1 + rest);
    Index asked = -1, times = 0;
    for (Index j = 0; j < m; ++j) {
      EXPECT_EQ(starts[static_cast<std::size_t>(j)], 1 + rest + 3 * j);
      if (token(s, 1 + rest + 3 * j + 1) == token(s, length - 1)) asked = j, ++times;
    }
    EXPECT_EQ(times, 1);
    EXPECT_EQ(asked, std::floor(static_cast<double>(i) / 39.0 * static_cast<double>(m - 1) + 0.5));
  }
}

TEST(VariableTracking, HasTwoChainsInOrderAndAsksTheFirstLinkByLink) {
  for (Index i = 0; i < 40; ++i) {
    const TaskSample s = evaluation_sample(Task::vt, 300, i, 1);
    const auto starts = triples(s, id::set);
    ASSERT_EQ(starts.size(), 10u);
    std::set<Token> variables;
    std::map<Token, Index> set_at;  // where each variable was set
    Index chains = 0;
    for (const Index start : starts) {
      const Token variable = token(s, start + 1), source = token(s, start + 2);
      EXPECT_TRUE(is_key(variable));
      EXPECT_TRUE(variables.insert(variable).second);
      if (is_value(source))
        ++chains;
      else
        EXPECT_TRUE(set_at.contains(source)) << "set to a variable that was not set before";
      set_at[variable] = start;
    }
    EXPECT_EQ(chains, 2);
    EXPECT_EQ(token(s, s.positions.front() - 1), id::trace);
    EXPECT_TRUE(is_value(token(s, s.positions.front())));
    for (std::size_t link = 0; link + 1 < s.positions.size(); ++link)
      EXPECT_EQ(token(s, s.positions[link + 1]), s.answers[link][0]);
  }
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

// Four triples in 14 tokens: C(6, 4) = 15 placements.
TEST(Placement, IsUniformOverAllThatDoNotOverlap) {
  Draws draws({5});
  constexpr int samples = 3000;
  std::map<std::vector<Index>, int> counts;
  for (int i = 0; i < samples; ++i)
    ++counts[triples(make_sample(Task::multi_key, 1 + 14 + 2, std::nullopt, draws), id::mark)];
  ASSERT_EQ(counts.size(), 15u);
  EXPECT_LT(chi_square(std::views::values(counts), samples / 15.0), chi_square_bound(14.0));
}

TEST(Placement, OfTheAskedNeedleAmongTheOthersIsUniform) {
  Draws draws({6});
  std::array<int, 4> counts{};
  constexpr int samples = 2000;
  for (int i = 0; i < samples; ++i) {
    const TaskSample s = make_sample(Task::multi_key, 64, std::nullopt, draws);
    const auto starts = triples(s, id::mark);
    for (std::size_t j = 0; j < 4; ++j)
      if (token(s, starts[j] + 1) == s.tokens.back()) ++counts[j];
  }
  EXPECT_LT(chi_square(counts, samples / 4.0), chi_square_bound(3.0));
}

// Which of the ten places belong to the asked chain: C(10, 5) = 252 choices.
TEST(Placement, OfTheChainsIsUniform) {
  Draws draws({7});
  constexpr int each = 20, choices = 252;
  std::map<std::vector<bool>, int> counts;
  for (int i = 0; i < each * choices; ++i) {
    const TaskSample s = make_sample(Task::vt, 64, std::nullopt, draws);
    std::set<Token> asked{s.tokens[s.tokens.size() - 5]};
    for (const auto& answer : s.answers) asked.insert(answer[0]);
    std::vector<bool> places;
    for (const Index start : triples(s, id::set))
      places.push_back(asked.contains(token(s, start + 1)));
    ++counts[places];
  }
  ASSERT_EQ(counts.size(), static_cast<std::size_t>(choices));
  EXPECT_LT(chi_square(std::views::values(counts), each), chi_square_bound(choices - 1.0));
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
