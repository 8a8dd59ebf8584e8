// The plan of a batch: work is balanced by the keys that each sequence attends to.

#include <quoka/attention/attention.hpp>

#include "support/attention_fixtures.hpp"

#include <algorithm>

namespace {

using namespace quoka_test;
using quoka::detail::AttendItem;
using quoka::detail::AttentionCall;
using quoka::detail::Plan;

constexpr Index heads = 2, dim = 16, q_len = 128, kv_len = 8192, kept_keys = 64;

// Items in their order, each by the worker who is free first: when the last one is done, relative
// to all work shared equally. Work is counted in products of the keys that are attended to.
double imbalance(std::span<const AttentionCall> calls, int workers) {
  Plan plan;
  plan.make(calls, workers);
  std::vector<double> busy(uz(workers));
  double total = 0.0;
  for (const AttendItem& item : plan.attends) {
    EXPECT_LE(item.panels, quoka::detail::kernel_sizes().panels_per_task)
        << "scratch memory holds no more";
    const AttentionCall& call = *item.plan->call;
    const quoka::detail::KeySequence keys(call, item.head);
    const auto work = static_cast<double>(item.panels * keys.range().count()) /
                      static_cast<double>(item.plan->parts);
    *std::min_element(busy.begin(), busy.end()) += work;
    total += work;
  }
  return *std::max_element(busy.begin(), busy.end()) * workers / total;
}

// Dense sequences beside others that keep few of as many keys: a dense one is cut for all workers,
// although it is one of many.
TEST(Plan, BalancesDenseSequencesBesideSelectingOnes) {
  const std::vector<float> memory(uz(heads * kv_len * dim), 0.1f);
  const auto rows = [&](Index len) {
    return quoka::Rows(TensorView<const float>(memory.data(), {1, heads, len, dim}));
  };
  std::vector<float> written(uz(heads * q_len * dim));
  const TensorView<float> out(written.data(), {1, heads, q_len, dim});
  std::vector<Position> kept(uz(heads * kept_keys));
  for (Index i = 0; i < heads * kept_keys; ++i) kept[uz(i)] = static_cast<Position>(i % kept_keys);
  const Selection selection(TensorView<const Position, 3>(kept.data(), {1, heads, kept_keys}),
                            kv_len);

  const quoka::Rows q = rows(q_len), past = rows(kv_len);
  const quoka::Chunk chunk{q, q};
  const AttentionOptions options{.arithmetic = quoka::Arithmetic::float_};
  std::vector<AttentionCall> calls;
  for (int i = 0; i < 8; ++i)
    calls.push_back(quoka::detail::resolved_call(
        {.q = q,
         .past = i == 0 ? quoka::Past(past, past) : quoka::Past(past, past, selection),
         .chunk = chunk,
         .out = out},
        options));
  for (AttentionCall& call : calls) quoka::detail::prepare_call(options.arithmetic, call);
  for (const int workers : {2, 4, 8}) EXPECT_LT(imbalance(calls, workers), 1.5) << workers;
}

// Three parts and three workers: an item with all panels of a part would be as balanced.
TEST(Plan, GivesNoItemMorePanelsThanATaskHas) {
  const std::vector<float> memory(100'000);
  std::vector<float> written(4096);
  const quoka::Rows past(TensorView<const float>(memory.data(), {1, 1, 100'000, 1}));
  AttentionCall call =
      quoka::detail::resolved_call({.q = past.slice(0, 4096),
                                    .past = quoka::Past(past, past),
                                    .out = TensorView<float>(written.data(), {1, 1, 4096, 1})},
                                   {});
  quoka::detail::prepare_call(quoka::Arithmetic::float_, call);
  EXPECT_LT(imbalance({&call, 1}, 3), 1.5);
}

// Parts are of long_part_keys, or of the first of 2, 4, ... times as many that most_long_parts of them hold.
TEST(Plan, CutsLongContextsIntoFewPartsForManyPanels) {
  using namespace quoka::tuning;
  for (const Index len : {1, 2048, 40'960, 40'961, 81'920, 81'921, 330'000}) {
    const std::vector<float> memory(uz(len));
    const quoka::Rows past(TensorView<const float>(memory.data(), {1, 1, len, 1}));
    float written[1] = {};
    AttentionCall call = quoka::detail::resolved_call(
        {.q = quoka::Rows(TensorView<const float>(memory.data(), {1, 1, 1, 1})),
         .past = quoka::Past(past, past),
         .out = TensorView<float>(written, {1, 1, 1, 1})},
        {});
    quoka::detail::prepare_call(quoka::Arithmetic::float_, call);
    const quoka::detail::KeySequence keys(call, 0);
    const auto parts = quoka::detail::KeyParts::of_panels(keys, min_panels_per_task);
    Index size = quoka::round_up(long_part_keys, call.block_keys());
    while (quoka::ceil_div(len, size) > most_long_parts) size *= 2;
    EXPECT_EQ(parts.size, size) << len;
    EXPECT_EQ(parts.count, quoka::ceil_div(len, size)) << len;
  }
}

}  // namespace
