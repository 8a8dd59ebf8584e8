// The ggml backend's report on each layer at the end, and the time that selecting saved.

#include "ggml/layer_account.hpp"

#include <gtest/gtest.h>

namespace {

using quoka::Index, quoka::MaskedReport, quoka_ggml::LayerAccount;

TEST(LayerAccount, SumsByLayerAndSaysAboutWhatIsSaved) {
  LayerAccount account;
  // Exact: 1000 pairs in 1 s. Selecting: 1000 of 4000 pairs, in 1.5 s altogether.
  account.add(
      0, {.queries = 10, .sequences = 1, .seen = 900, .attended = 900, .own = 100, .attend = 1},
      "exact: x");
  for (int layer = 1; layer < 4; ++layer)
    account.add(layer,
                {.queries = 10,
                 .sequences = 1,
                 .seen = 3900,
                 .attended = 900,
                 .own = 100,
                 .mask = 0.1,
                 .select = 0.4,
                 .attend = 1},
                "selected");
  const auto [took, dense] = account.saving();
  EXPECT_NEAR(took, 4.5, 1e-9);
  EXPECT_NEAR(dense, 12 + 0.3, 1e-9) << "masks are read in any case";
  const std::vector<std::string> lines = account.lines();
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0], "layer 0: 100.0 % of the past; exact: x (1 calls)");
  EXPECT_EQ(lines[1], "layer 1 to 3: 23.1 % of the past; selected (1 calls)");
}

// Chunks and single tokens each have their own price per pair; if few calls are exact, it is that of the calls that
// select.
TEST(LayerAccount, PricesChunksAndSingleTokensApart) {
  const auto call = [](Index queries, Index sequences, double seen, double attended,
                       double attend) {
    return MaskedReport{.queries = queries,
                        .sequences = sequences,
                        .seen = seen,
                        .attended = attended,
                        .attend = attend};
  };
  LayerAccount account;
  account.add(0, call(10, 1, 1000, 1000, 1), "exact");  // a pair of a chunk: 1 ms
  account.add(0, call(1, 1, 1000, 1000, 10), "exact");  // of a token: 10 ms
  account.add(1, call(10, 1, 5000, 1000, 2), "selected");
  account.add(1, call(1, 1, 3000, 1000, 4), "selected");
  EXPECT_NEAR(account.saving().took, 6, 1e-9);
  EXPECT_NEAR(account.saving().dense, 5 + 30, 1e-9);
  LayerAccount selecting;  // nothing was exact: 2 s for 1000 pairs
  selecting.add(1, call(10, 1, 5000, 1000, 2), "selected");
  EXPECT_NEAR(selecting.saving().dense, 10, 1e-9);
  selecting.add(1, call(10, 1, 9, 9, 5), "exact");  // of 9 pairs nothing is learnt
  EXPECT_NEAR(selecting.saving().dense, 10, 1e-9);
  EXPECT_EQ(LayerAccount().saving().dense, 0);
  // A window: most of its 100,000 pairs were hidden, and cost nothing.
  MaskedReport window = call(10, 1, 100'000, 100'000, 1);
  window.by_mask = true;
  account.add(2, window, "exact: a sliding window");
  EXPECT_NEAR(account.saving().dense, 5 + 30, 1e-9);
}

// Layers that never called are listed between those that did, and none after the last.
TEST(LayerAccount, JoinsLayersInARowThatWereTreatedAlike) {
  LayerAccount account;
  const MaskedReport report{.queries = 10, .sequences = 1, .seen = 100, .attended = 50};
  account.add(-1, report, "selected");
  EXPECT_EQ(account.layers().size(), 1u);
  for (const int layer : {3, 1, 4, 0}) account.add(layer, report, "selected");
  account.add(5, {.queries = 10, .sequences = 1, .seen = 100, .attended = 100}, "exact: x");
  for (int times = 0; times < 2; ++times) account.add(6, report, "selected");
  account.add(7, {.queries = 10, .sequences = 1}, "exact: x");  // of no past all is read
  for (const int layer : {8, 9, 10})
    account.add(layer, report, "selected", layer < 10 ? "full" : "");
  const std::string half = ": 50.0 % of the past; selected (1 calls)";
  EXPECT_EQ(account.lines(),
            (std::vector<std::string>{
                "no cache" + half, "layer 0 to 1" + half,
                "layer 2: no call: it is recurrent, or computed elsewhere", "layer 3 to 4" + half,
                "layer 5: 100.0 % of the past; exact: x (1 calls)",
                "layer 6: 50.0 % of the past; selected (2 calls)",
                "layer 7: 100.0 % of the past; exact: x (1 calls)",
                "layer 8 to 9: full; 50.0 % of the past; selected (1 calls)", "layer 10" + half}));
  // Layers of one line: the least and the most of each share.
  MaskedReport less = report;
  less.attended = 20, less.by_shares = 10, less.kept = 7;
  account.add(11, less, "selected", "full");
  less.attended = 30, less.kept = 9;
  account.add(12, less, "selected", "full");
  EXPECT_EQ(
      account.lines().back(),
      "layer 11 to 12: full; 20.0 to 30.0 % of the past with 70.0 to 90.0 % of the attention; "
      "selected (1 calls)");
  account.add(10, report, "selected", "a window");  // known later
  EXPECT_EQ(account.layers().at(10).kind, "a window");
}

// The mean over selecting chunks alone, weighed by their queries.
TEST(LayerAccount, SaysWhatShareOfAttentionIsKept) {
  LayerAccount account;
  const MaskedReport report{.queries = 10, .sequences = 1, .seen = 100, .attended = 50};
  MaskedReport by_shares = report;
  by_shares.by_shares = 8, by_shares.kept = 7;
  account.add(0, report, "selected");
  account.add(1, by_shares, "selected");
  by_shares.by_shares = 2, by_shares.kept = 1;
  account.add(1, by_shares, "selected");
  account.add(1, report, "selected");
  EXPECT_EQ(account.lines(),
            (std::vector<std::string>{
                "layer 0: 50.0 % of the past; selected (1 calls)",
                "layer 1: 50.0 % of the past with 80.0 % of the attention; selected (3 calls)"}));
  EXPECT_EQ(account.layers().at(0).kept_share(), 1);
  EXPECT_DOUBLE_EQ(account.layers().at(1).kept_share(), 0.8);
}

}  // namespace
