// Top-k against the oracle, over drawn calls (support/top_k_case.hpp) and by example.

#include "support/top_k_case.hpp"

namespace {

using namespace quoka_test;
using quoka::top_k;
using quoka::TopKOptions;

Tensor3<float> row_of(const std::vector<float>& list) {
  Tensor3<float> scores(1, 1, std::ssize(list));
  std::copy(list.begin(), list.end(), scores.data());
  return scores;
}

TEST(TopK, AgreesWithTheOracle) {
  quoka::ThreadPool pool(16);
  for_each_draw("DRAW", 600, [&](Random& random, std::uint64_t) {
    EXPECT_TRUE(TopKCase(random).is_as_oracle(pool));
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
