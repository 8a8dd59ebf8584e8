#include "support/ruler_tasks.hpp"

#include "support/require.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>

namespace quoka_examples {
namespace {

namespace id = task_tokens;

using Tokens = std::vector<Token>;

constexpr std::array names{"single",      "multi_key", "haystack", "multi_value",
                           "multi_query", "vt",        "cwe",      "fwe"};

std::size_t at(Index i) { return static_cast<std::size_t>(i); }

// `count` different ids of [begin, end).
Tokens distinct(Draws& draws, Token begin, Token end, Index count) {
  Tokens tokens;
  for (const Index i : draws.distinct(end - begin, count))
    tokens.push_back(begin + static_cast<Token>(i));
  return tokens;
}

Tokens noise(Draws& draws, Index count) {
  static const std::vector<double> cumulative = [] {
    std::vector<double> sums;
    for (Token r = 0; r < id::end - id::noise; ++r)
      sums.push_back((sums.empty() ? 0.0 : sums.back()) + 1.0 / (r + 1));
    return sums;
  }();
  Tokens tokens(at(count));
  for (Token& token : tokens) {
    const double draw = draws.unit() * cumulative.back();
    // The product may round up to the last sum itself.
    const auto found = std::upper_bound(cumulative.begin(), cumulative.end() - 1, draw);
    token = id::noise + static_cast<Token>(found - cumulative.begin());
  }
  return tokens;
}

Index at_depth(double depth, Index last) {
  return static_cast<Index>(depth * static_cast<double>(last) + 0.5);
}

void require_room(Index context, Index needles) {
  if (context < 3 * needles)
    throw std::invalid_argument("its needles take " + std::to_string(3 * needles) +
                                " tokens, its context has " + std::to_string(context));
}

struct Places {
  std::vector<Index> starts;  // of triples, ascending
  Index asked = 0;            // which of them is the one at the depth
};

Places places(Draws& draws, Index context, Index count, std::optional<double> depth) {
  require_room(context, count);
  const Index room = context - 2 * count;  // starts, were triples as short as one token
  const Index asked = depth ? at_depth(*depth, room - 1) : draws.below(room);
  Places result{draws.distinct(room - 1, count - 1), 0};
  for (Index& other : result.starts) other += other >= asked ? 1 : 0;
  result.starts.push_back(asked);
  std::sort(result.starts.begin(), result.starts.end());
  result.asked =
      std::lower_bound(result.starts.begin(), result.starts.end(), asked) - result.starts.begin();
  for (Index i = 0; i < count; ++i) result.starts[at(i)] += 2 * i;
  return result;
}

void put(Tokens& context, Index start, std::array<Token, 3> triple) {
  std::copy(triple.begin(), triple.end(), context.begin() + start);
}

TaskSample with_question(const Tokens& context, const Tokens& question) {
  TaskSample sample{{id::bos}, {}, {}};
  sample.tokens.insert(sample.tokens.end(), context.begin(), context.end());
  sample.tokens.insert(sample.tokens.end(), question.begin(), question.end());
  return sample;
}

// `keys` keys with `values_each` needles each in noise; the first `asks` keys are asked.
TaskSample needles(Draws& draws, Index length, Index keys, Index asks, Index values_each,
                   std::optional<double> depth) {
  const Index count = keys * values_each;
  const Tokens names_of_keys = distinct(draws, id::keys, id::values, keys);
  const Tokens values = distinct(draws, id::values, id::noise, count);
  Places where = places(draws, length - 1 - 2 * asks, count, depth);
  // Needle 0 stands at the depth, the others anywhere.
  std::swap(where.starts.front(), where.starts[at(where.asked)]);
  std::vector<Index> others(where.starts.begin() + 1, where.starts.end());
  draws.shuffle(others);
  std::copy(others.begin(), others.end(), where.starts.begin() + 1);

  Tokens context = noise(draws, length - 1 - 2 * asks), question;
  for (Index i = 0; i < count; ++i)
    put(context, where.starts[at(i)],
        {id::mark, names_of_keys[at(i / values_each)], values[at(i)]});
  for (Index i = 0; i < asks; ++i) question.insert(question.end(), {id::ask, names_of_keys[at(i)]});
  TaskSample sample = with_question(context, question);
  for (Index i = 0; i < asks; ++i) {
    sample.positions.push_back(length - 1 - 2 * (asks - 1 - i));
    const auto first = values.begin() + i * values_each;
    sample.answers.emplace_back(first, first + values_each);
  }
  return sample;
}

TaskSample haystack(Draws& draws, Index length, std::optional<double> depth) {
  const Index context_len = length - 3, count = context_len / 3;
  require_room(context_len, 1);
  Tokens shuffled = distinct(draws, id::keys, id::values, id::values - id::keys);
  const Token asked = shuffled.back();
  shuffled.pop_back();
  const Index where = depth ? at_depth(*depth, count - 1) : draws.below(count);
  Tokens context = noise(draws, context_len % 3);
  Token answer = 0;
  for (Index i = 0; i < count; ++i) {
    const Token key = i == where ? asked : shuffled[at(draws.below(std::ssize(shuffled)))];
    const Token value = id::values + static_cast<Token>(draws.below(id::noise - id::values));
    context.insert(context.end(), {id::mark, key, value});
    if (i == where) answer = value;
  }
  TaskSample sample = with_question(context, {id::ask, asked});
  sample.positions = {length - 1};
  sample.answers = {{answer}};
  return sample;
}

TaskSample variable_tracking(Draws& draws, Index length) {
  constexpr Index chains = 2, links = 5, count = chains * links;
  const Index context_len = length - 2 - links;
  const Tokens variables = distinct(draws, id::keys, id::values, count);
  const Tokens values = distinct(draws, id::values, id::noise, chains);
  const Places where = places(draws, context_len, count, std::nullopt);
  std::vector<Index> chain_of_place(at(count));
  for (Index i = 0; i < count; ++i) chain_of_place[at(i)] = i / links;
  draws.shuffle(chain_of_place);

  Tokens context = noise(draws, context_len);
  std::array<Index, chains> next{};  // link of each chain
  for (Index place = 0; place < count; ++place) {
    const Index chain = chain_of_place[at(place)], link = next[at(chain)]++;
    const Token source = link == 0 ? values[at(chain)] : variables[at(chain * links + link - 1)];
    put(context, where.starts[at(place)], {id::set, variables[at(chain * links + link)], source});
  }
  Tokens question{id::trace, values.front()};
  question.insert(question.end(), variables.begin(), variables.begin() + links - 1);
  TaskSample sample = with_question(context, question);
  for (Index link = 0; link < links; ++link) {
    sample.positions.push_back(length - links + link);
    sample.answers.push_back({variables[at(link)]});
  }
  return sample;
}

// Words w_1, w_2, .. as often as `counts` says, shuffled; the first `asked` are the answer. They must
// be those that come most often.
TaskSample counted_words(Draws& draws, const std::vector<Index>& counts, Index asked,
                         Token question) {
  const auto first_rare = counts.begin() + asked;
  const Index least = *std::min_element(counts.begin(), first_rare),
              most = *std::max_element(first_rare, counts.end());
  if (least <= most)
    throw std::invalid_argument("an asked word comes " + std::to_string(least) +
                                " times, another one " + std::to_string(most) + " times");
  const Tokens words =
      distinct(draws, id::noise, id::noise + static_cast<Token>(id::words), std::ssize(counts));
  Tokens context;
  for (std::size_t i = 0; i < counts.size(); ++i)
    context.insert(context.end(), at(counts[i]), words[i]);
  draws.shuffle(context);
  TaskSample sample = with_question(context, {question});
  sample.positions = {std::ssize(sample.tokens) - 1};
  sample.answers = {{words.begin(), words.begin() + asked}};
  return sample;
}

TaskSample common_words(Draws& draws, Index length) {
  constexpr Index asked = 10, rare = 40;
  const Index context = std::max<Index>(0, length - 2), often = context / (asked + rare / 10);
  const Index remaining = context - asked * often;
  std::vector<Index> counts(at(asked), often);
  for (Index i = 0; i < rare; ++i)
    counts.push_back(remaining / rare + (i < remaining % rare ? 1 : 0));
  return counted_words(draws, counts, asked, id::common);
}

TaskSample frequent_words(Draws& draws, Index length) {
  constexpr Index asked = 3, count = 50;
  const Index context = std::max<Index>(0, length - 2);
  double z = 0.0;
  for (Index r = 1; r <= count; ++r) z += 1.0 / static_cast<double>(r * r);
  std::vector<Index> counts;
  for (Index r = 1; r <= count; ++r)
    counts.push_back(
        static_cast<Index>(static_cast<double>(context) / (static_cast<double>(r * r) * z)));
  const Index missing = context - std::accumulate(counts.begin(), counts.end(), Index{0});
  for (Index i = 0; i < missing; ++i) ++counts[at(count - 1 - i % (count - asked))];
  return counted_words(draws, counts, asked, id::frequent);
}

// The `count` largest, the first of equal ones.
Tokens largest(const float* logits, Index vocabulary, Index count) {
  quoka_examples::require_at_most("the answer's tokens", count, "the vocabulary", vocabulary);
  Tokens tokens(at(vocabulary));
  std::iota(tokens.begin(), tokens.end(), Token{0});
  std::partial_sort(tokens.begin(), tokens.begin() + count, tokens.end(), [&](Token a, Token b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  });
  tokens.resize(at(count));
  return tokens;
}

}  // namespace

std::string name_of(Task task) { return names[static_cast<std::size_t>(task)]; }

Task task_named(const std::string& name) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found != names.end()) return all_tasks[at(found - names.begin())];
  std::string known;
  for (const char* other : names) known.append(1, ' ').append(other);
  throw std::invalid_argument("no task is called \"" + name + "\"; there are" + known);
}

TaskSample make_sample(Task task, Index length, std::optional<double> depth, Draws& draws) {
  if (depth && !(*depth >= 0.0 && *depth <= 1.0))
    quoka_examples::fail_range("the depth of a needle", *depth, "[0, 1]");
  try {
    switch (task) {
      case Task::single:
        return needles(draws, length, 1, 1, 1, depth);
      case Task::multi_key:
        return needles(draws, length, 4, 1, 1, depth);
      case Task::haystack:
        return haystack(draws, length, depth);
      case Task::multi_value:
        return needles(draws, length, 1, 1, 4, depth);
      case Task::multi_query:
        return needles(draws, length, 4, 4, 1, depth);
      case Task::vt:
        return variable_tracking(draws, length);
      case Task::cwe:
        return common_words(draws, length);
      case Task::fwe:
        return frequent_words(draws, length);
    }
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(name_of(task) + " in " + std::to_string(length) +
                                " tokens: " + error.what());
  }
  throw std::invalid_argument("there is no task " + std::to_string(static_cast<int>(task)));
}

TaskSample evaluation_sample(Task task, Index length, Index i, std::uint32_t seed) {
  constexpr Index depths = 40;
  Draws draws({static_cast<Index>(seed), static_cast<Index>(task), length, i});
  const double depth = static_cast<double>(i % depths) / static_cast<double>(depths - 1);
  return make_sample(task, length, depth, draws);
}

TaskScore score(const TaskSample& sample, std::span<const float> logits, Index vocabulary) {
  quoka_examples::require_equal("the number of logits", std::ssize(logits), "answers * vocabulary",
                                std::ssize(sample.answers) * vocabulary);
  for (std::size_t i = 0; i < logits.size(); ++i)
    if (std::isnan(logits[i]))
      throw std::invalid_argument("logit " + std::to_string(i) + " is not a number");
  TaskScore result;
  for (std::size_t i = 0; i < sample.answers.size(); ++i) {
    const Tokens& right = sample.answers[i];
    for (const Token token :
         largest(logits.data() + static_cast<Index>(i) * vocabulary, vocabulary, std::ssize(right)))
      result.right += std::find(right.begin(), right.end(), token) != right.end() ? 1 : 0;
    result.of += std::ssize(right);
  }
  return result;
}

}  // namespace quoka_examples
