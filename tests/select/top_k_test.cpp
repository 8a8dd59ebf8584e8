// Top-k against the oracle, which gets the very same scores: every position must be equal.

#include <quoka/select/stages.hpp>

#include "support/fixtures.hpp"

namespace {

using namespace quoka_test;
using quoka::top_k;
using quoka::TopKOptions;

Tensor3<float> row_of(const std::vector<float>& list) {
  Tensor3<float> scores(1, 1, std::ssize(list));
  std::copy(list.begin(), list.end(), scores.data());
  return scores;
}

void expect_as_oracle(const Tensor3<float>& scores, Index k, const TopKOptions& options = {}) {
  const oracle::Scores widened = oracle::window_max(to_oracle_scores(scores), options.kernel_size);
  EXPECT_EQ(to_positions(top_k(scores, k, options)),
            oracle::top_k(widened, k, options.keep_first, options.keep_last))
      << "kv_len " << scores.dimension(2) << ", k " << k << ", kernel_size " << options.kernel_size
      << ", keep_first " << options.keep_first << ", keep_last " << options.keep_last;
}

// Hard scores: few values, both zeros, NaN, infinities, denormals, the ends of the range.
Tensor3<float> odd_scores(Random& random, Index batch, Index heads, Index len) {
  const float odd[] = {0.0f,
                       -0.0f,
                       1.0f,
                       -1.0f,
                       0.5f,
                       infinity,
                       -infinity,
                       not_a_number,
                       -not_a_number,
                       std::numeric_limits<float>::max(),
                       std::numeric_limits<float>::lowest(),
                       std::numeric_limits<float>::min(),
                       -std::numeric_limits<float>::min(),
                       std::numeric_limits<float>::denorm_min(),
                       -std::numeric_limits<float>::denorm_min()};
  Tensor3<float> scores(batch, heads, len);
  for (Index i = 0; i < scores.size(); ++i) scores.data()[i] = odd[random.below(std::ssize(odd))];
  return scores;
}

// ---- order --------------------------------------------------------------------------------------

// Any k, kernel size and forced keys; scores of all kinds, by whole rows and by ranges. They are left alone.
TEST(TopK, AgreesWithTheOracle) {
  quoka::ThreadPool pool(16);
  for_each_draw("DRAW", 600, [&](Random& random, std::uint64_t seed) {
    const Index kind = random.below(7);
    const bool is_long = seed % 50 == 0 || (kind == 6 && seed % 4 == 0);
    const Index len = 1 + random.below(is_long ? 9000 : seed % 3 == 0 ? 12 : 501);
    Tensor3<float> scores = kind == 0 ? odd_scores(random, 2, 3, len) : random.scores(2, 3, len);
    for (Index i = 0; i < scores.size() && kind > 1; ++i) {
      const std::uint64_t bits = random.bits();
      scores.data()[i] =
          kind == 2   ? std::bit_cast<float>(static_cast<std::uint32_t>(bits))  // any
          : kind == 3 ? static_cast<float>(bits % 7) - 1.0f                     // many ties
          : kind == 4 ? 1.0f + 0x1p-23f * static_cast<float>(bits % 300)        // of one bucket
          : kind == 5 ? -7.0f
                      // A sample of every 8th score guesses the threshold: of the best alone.
                      : scores.data()[i] + (i % len % 8 == 0 ? 100.0f : 0.0f);
    }
    const auto some = [&](Index most) { return random.seldom(4) ? random.below(most) : Index{0}; };
    const Index k = random.below(3) > 0 ? random.below(len + 2)
                                        : random.below(4) + len - std::min<Index>(len, 3);
    const TopKOptions options{1 + (random.below(2) == 0 ? 0 : some(20) + some(3 * len)),
                              some(9) + some(len), some(9) + some(len)};
    const auto before = scores;
    expect_as_oracle(scores, k, options);
    EXPECT_EQ(top_k(scores, k, options, pool), top_k(scores, k, options));
    EXPECT_TRUE(same_bits(scores, before));
  });
}

// By example, because the oracle could be wrong, too.
TEST(TopK, KeepsThese) {
  constexpr float least = std::numeric_limits<float>::denorm_min(),
                  lowest = std::numeric_limits<float>::lowest();
  constexpr Index largest = std::numeric_limits<Index>::max();
  const std::vector<float> odd{infinity, not_a_number, -5, -infinity, -7},
      rising{0, 1, 2, 3, 4, 5, 6}, tied{1, 2, 1, 2, 1, 2, 1}, one{0, 0, 0, 9, 0, 0, 0};
  const struct {
    const char* what;
    std::vector<float> scores;
    Index k;
    std::vector<Position> best;
    TopKOptions options = {};
  } all[] = {
      {"the best, ascending", {0.1f, 0.9f, 0.3f, 0.8f, 0.2f}, 3, {1, 2, 3}},
      {"negative scores", {-0.5f, -0.1f, -3.0f, -0.2f, -1e30f}, 2, {1, 3}},
      {"ties go to the earlier key", tied, 2, {1, 3}},
      {"ties of the others, too", tied, 4, {0, 1, 3, 5}},
      {"-0 is 0", {-0.0f, 0.0f, -0.0f, 0.0f}, 2, {0, 1}},
      {"-0 is above -1", {-1.0f, -0.0f, 0.0f, 1.0f}, 2, {1, 3}},
      {"what is not finite ranks last", odd, 2, {2, 4}},
      {"and fills up by position", odd, 3, {0, 2, 4}},
      {"NaN like infinity", odd, 4, {0, 1, 2, 4}},
      {"the lowest finite score is above NaN", {not_a_number, lowest, infinity}, 1, {1}},
      {"denormals are not 0", {-least, 0.0f, least}, 1, {2}},
      {"nor negative ones", {-least, -0.0f, -least}, 1, {1}},
      {"forced keys count inside k", {0, 1, 9, 1, 8, 1, 0}, 4, {0, 2, 5, 6}, {1, 1, 2}},
      {"and not twice", {9, 1, 2, 1, 8}, 3, {0, 2, 4}, {1, 1, 1}},
      {"and may be NaN", {not_a_number, 1, 2, 1, infinity}, 3, {0, 2, 4}, {1, 1, 1}},
      {"the first stay where both do not fit", rising, 3, {0, 1, 6}, {1, 2, 2}},
      {"the first fill k", rising, 3, {0, 1, 2}, {1, 3, 2}},
      {"more forced keys than there are", rising, 3, {0, 1, 2}, {1, 1000, 1000}},
      {"as many as there may be", {0, 1, 2, 9, 0}, 2, {0, 1}, {1, largest, largest}},
      {"the last fill k", {9, 8, 7, 6, 5, 4, 3}, 3, {4, 5, 6}, {1, 0, 1000}},
      {"a window brings neighbours", {1, 2, 3, 9, 0, 0, 0}, 3, {2, 3, 4}, {3}},
      {"one of 2 is kv and kv + 1", one, 2, {2, 3}, {2}},
      {"one of 4 is kv - 1 to kv + 2", one, 4, {1, 2, 3, 4}, {4}},
      {"a window stops at the ends of the row", {9, 0, 1, 0, 8}, 4, {0, 1, 3, 4}, {3}},
      // The NaN key itself stays last, its neighbours take nothing from it.
      {"it passes over what is not finite",
       {0, 1, not_a_number, 2, infinity, 0, 0},
       5,
       {0, 1, 3, 5, 6},
       {3}},
      {"it sees forced keys", {9, 0, 1, 1, 0, 0}, 2, {0, 1}, {3, 1}},
      {"it may be the whole row", {0, 1, 2, 9, 0}, 2, {0, 1}, {largest}},
  };
  for (const auto& [what, scores, k, best, options] : all)
    EXPECT_EQ(top_k(row_of(scores), k, options).positions(0, 0), best) << what;
}

// ---- nothing to choose from ---------------------------------------------------------------------

TEST(TopK, OfAnEmptyPastIsAll) { EXPECT_TRUE(top_k(Tensor3<float>(2, 3, 0), 7).is_all()); }

}  // namespace
