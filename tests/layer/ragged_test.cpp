// Ragged batches (attention/attention.hpp, layer/ragged.hpp): whose options serve which sequence, selection for each of
// them, and that nothing is written where one is refused. That each sequence has the results of a call of its own is
// tested in attention_suite_test.cpp.

#include <quoka/layer/ragged.hpp>
#include <quoka/select/mass_selector.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/select/key_sketch.hpp>
#include <quoka/select/quoka.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <optional>

namespace {

using namespace quoka_test;
using quoka::AttentionSequence;
using quoka::AttentionWorkspace;
using quoka::MassSelector;

// A sequence's mask and position stand in place of the options'.
TEST(Ragged, TheOptionsServeSequencesWithoutTheirOwn) {
  Random random(2);
  const auto in =
      random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 5, .kv_len = 60});
  Tensor4<float> ours(1, 1, 5, 65), theirs(1, 1, 5, 65);
  for (Index i = 0; i < ours.size(); ++i) {
    ours.data()[i] = random.below(2) == 0 ? 0.0f : -infinity;
    theirs.data()[i] = random.below(2) == 0 ? 0.0f : -infinity;
  }
  const std::vector<float> slopes{0.5f, 0.25f, 0.125f, 0.0625f};
  AttentionOptions options{.q_offset = 80, .mask = ours, .alibi_slopes = slopes};
  auto with = unwritten<float>(in.q, 16), without = with;
  const auto sequence = [&](Output<float>& to) {
    return AttentionSequence{
        .q = in.q, .past = {in.past_k, in.past_v}, .chunk = {in.k, in.v}, .out = {to.out, to.lse}};
  };
  AttentionSequence batch[] = {sequence(with), sequence(without)};
  batch[0].mask = theirs, batch[0].q_offset = 90;
  quoka::attention(batch, options);
  expect_same(without, attend(in, options));
  options.mask = theirs, options.q_offset = 90;
  expect_same(with, attend(in, options));
}

TEST(Ragged, NoSequenceIsNothingToDo) {
  AttentionWorkspace workspace;
  quoka::ThreadPool pool(2);
  EXPECT_NO_THROW(quoka::attention(std::span<const AttentionSequence>{}, {}, pool, workspace));
  EXPECT_NO_THROW(quoka::attention(std::span<const AttentionSequence>{}));
}

// ---- with selection -----------------------------------------------------------------------------

// Sequences of different lengths, of which the second attends to all of its past.
class RaggedSelection : public ::testing::Test {
 protected:
  using State = MassSelector::State;
  using Sequence = quoka::RaggedSequence<MassSelector>;
  static constexpr std::size_t sequences = 4;

  void SetUp() override {
    constexpr Index lens[sequences][2] = {{41, 1}, {450, 5}, {300, 17}, {150, 30}};
    for (const auto& [kv_len, q_len] : lens) {
      in_.push_back(random_inputs<float>(
          random_, {.q_heads = 4, .kv_heads = 2, .q_len = q_len, .kv_len = kv_len}));
      output_.push_back(unwritten<float>(in_.back().q, 16));
    }
    for (std::size_t i = 0; i < sequences; ++i)
      batch_.push_back({.q = in_[i].q,
                        .past_k = in_[i].past_k,
                        .past_v = in_[i].past_v,
                        .chunk = {in_[i].k, in_[i].v},
                        .out = {output_[i].out, output_[i].lse},
                        .state = i == 1 ? nullptr : &states_[i]});
  }
  Selection selected_alone(const MassSelector& selector, std::size_t i,
                           std::optional<float> scale) const {
    if (batch_[i].state == nullptr) return Selection::all(1, 2, in_[i].past_k.dimension(2));
    State state;
    Selection keep;
    selector.select({.q = in_[i].q,
                     .k = in_[i].past_k,
                     .logits = quoka::LogitOptions{.scale = scale},
                     .chunk_k = batch_[i].mask.absent() ? Rows(in_[i].k) : Rows(),
                     .attends = true},
                    state, keep, SerialExecutor{});
    return keep;
  }

  Random random_{6};
  std::vector<Inputs<float>> in_;
  std::vector<Output<float>> output_;
  State states_[sequences];
  std::vector<Sequence> batch_;
  quoka::RaggedWorkspace<MassSelector> workspace_;
};

// Selection uses attention's scale for every sequence.
TEST_F(RaggedSelection, IsThatOfEachSequenceAlone) {
  const MassSelector selector(
      {.budget = quoka::Budget::keys(20), .queries = 16, .sketch = quoka::Sketch::off});
  quoka::ThreadPool pool(3);
  for (const ExecutorRef executor : {ExecutorRef(SerialExecutor{}), ExecutorRef(pool)})
    for (const std::optional<float> scale : {std::optional<float>{}, {2.0f}}) {
      const AttentionOptions options{.scale = scale};
      quoka::select_and_attend<MassSelector>(selector, batch_, options, executor, workspace_);
      for (std::size_t i = 0; i < sequences; ++i) {
        const Selection alone = selected_alone(selector, i, scale);
        EXPECT_EQ(workspace_.selection(static_cast<Index>(i)), alone) << i;
        expect_same(output_[i], attend(in_[i], options, &alone));
      }
    }
  EXPECT_NE(selected_alone(selector, 2, {}), selected_alone(selector, 2, 2.0f));
}

// A second, smaller batch by the same workspace, then the first again.
TEST_F(RaggedSelection, AWorkspaceServesFewerSequencesAndMore) {
  const MassSelector selector({.budget = quoka::Budget::keys(20)});
  for (const std::size_t count : {sequences, std::size_t{2}, std::size_t{3}, sequences}) {
    const std::span<const Sequence> some(batch_.data() + sequences - count, count);
    quoka::select_and_attend<MassSelector>(selector, some, {}, SerialExecutor{}, workspace_);
    for (std::size_t i = 0; i < count; ++i)
      EXPECT_EQ(workspace_.selection(static_cast<Index>(i)),
                selected_alone(selector, sequences - count + i, {}));
  }
}

// A sketch, or inverse norms, of one sequence's cache do not serve another's.
TEST_F(RaggedSelection, TakesTheSketchAndTheNormsOfASequencesCache) {
  const MassSelector selector({.budget = quoka::Budget::keys(20), .sketch = quoka::Sketch::on});
  Tensor3<float> norms(1, 2, 41);  // of the first one's 41 keys
  for (Index head = 0; head < 2; ++head)
    for (Index i = 0; i < 41; ++i)
      norms(0, head, i) = quoka::inverse_norm(&in_[0].past_k(0, head, i, 0), 16);
  quoka::KeySketch sketch;
  sketch.update(in_[2].past_k, 0, 300, SerialExecutor{});
  batch_[0].inverse_norms = norms, batch_[2].sketch = &sketch;
  const auto run = [&] {
    quoka::select_and_attend<MassSelector>(selector, batch_, {}, SerialExecutor{}, workspace_);
  };
  run();
  for (std::size_t i = 0; i < sequences; ++i)
    EXPECT_EQ(workspace_.selection(static_cast<Index>(i)), selected_alone(selector, i, {})) << i;
  const Tensor4<float> before = in_[2].past_k;
  for (Index i = 0; i < before.size(); ++i) in_[2].past_k.data()[i] = before.data()[i] * -1.0f;
  expect_refused(run, {"not the one that was sketched"});
}

// Each its own position and mask.
TEST_F(RaggedSelection, PassesOnWhatASequenceHas) {
  const MassSelector selector({.budget = quoka::Budget::keys(20)});
  batch_[3].q_offset = 600;
  Tensor4<float> hides(1, 1, 5, 455);
  hides.setZero();
  for (Index i = 0; i < 5; ++i) hides(0, 0, i, 90 * i + 7) = -infinity;
  batch_[1].mask = hides;
  const std::vector<float> sinks(static_cast<std::size_t>(batch_[0].q.heads()), 0.5f);
  const AttentionOptions options{.sinks = sinks, .arithmetic = quoka::Arithmetic::bf16};
  quoka::select_and_attend<MassSelector>(selector, batch_, options, SerialExecutor{}, workspace_);
  for (std::size_t i = 0; i < sequences; ++i) {
    AttentionOptions own = options;
    own.q_offset = batch_[i].q_offset, own.mask = batch_[i].mask;
    const Selection alone = selected_alone(selector, i, {});
    expect_same(output_[i], attend(in_[i], own, &alone));
  }
}

// Slopes of ALiBi reach each sequence's attention; a selector by cosines does not weigh them.
TEST_F(RaggedSelection, PassesOnSlopes) {
  using quoka::QuokaSelector;
  const QuokaSelector selector({.budget = quoka::Budget::keys(20)});
  QuokaSelector::State states[sequences];
  std::vector<quoka::RaggedSequence<QuokaSelector>> batch;
  for (std::size_t i = 0; i < sequences; ++i)
    batch.push_back({.q = in_[i].q,
                     .past_k = in_[i].past_k,
                     .past_v = in_[i].past_v,
                     .chunk = {in_[i].k, in_[i].v},
                     .out = {output_[i].out, output_[i].lse},
                     .state = i == 1 ? nullptr : &states[i]});
  const std::vector<float> slopes{0.5f, 0.25f, 0.0625f, 0.01f};
  const AttentionOptions options{.arithmetic = quoka::Arithmetic::bf16, .alibi_slopes = slopes};
  quoka::RaggedWorkspace<QuokaSelector> workspace;
  quoka::select_and_attend<QuokaSelector>(selector, batch, options, SerialExecutor{}, workspace);
  for (std::size_t i = 0; i < sequences; ++i) {
    const Selection& keep = workspace.selection(static_cast<Index>(i));
    EXPECT_EQ(keep.max_count(), i == 1 ? in_[i].past_k.dimension(2) : 20) << i;
    expect_same(output_[i], attend(in_[i], options, &keep));
  }
}

// ---- what is refused ----------------------------------------------------------------------------

class RaggedRefuses : public ::testing::Test {
 protected:
  static constexpr Index sequences = 3;

  void SetUp() override {
    for (Index i = 0; i < sequences; ++i) {
      in_.push_back(random_inputs<float>(
          random_, {.q_heads = 4, .kv_heads = 4, .q_len = 5, .kv_len = 30 + i}));
      output_.push_back(unwritten<float>(in_.back().q, 16));
      mask_.emplace_back(1, 1, 5, 35 + i);
      mask_.back().setZero();
    }
    for (std::size_t i = 0; i < sequences; ++i)
      batch_.push_back({.q = in_[i].q,
                        .past = {in_[i].past_k, in_[i].past_v},
                        .chunk = {in_[i].k, in_[i].v},
                        .out = {output_[i].out, output_[i].lse},
                        .mask = mask_[i]});
  }
  // The call is refused, and nothing is written.
  void refused(std::initializer_list<Fragment> fragments, const AttentionOptions& options = {}) {
    const auto inputs = in_;
    const auto outputs = output_;
    const auto masks = mask_;
    expect_refused([&] { quoka::attention(batch_, options); }, fragments);
    for (std::size_t i = 0; i < sequences; ++i) {
      EXPECT_TRUE(same_bits(in_[i].q, inputs[i].q));
      EXPECT_TRUE(same_bits(in_[i].past_k, inputs[i].past_k));
      EXPECT_TRUE(same_bits(mask_[i], masks[i]));
      expect_same(output_[i], outputs[i]);
    }
  }

  // The text of one sequence's output in what another one has.
  static std::string shares(std::size_t sequence, const std::string& output, std::size_t other,
                            const std::string& name) {
    return output + " of sequence " + std::to_string(sequence) + " shares memory with " + name +
           " of sequence " + std::to_string(other);
  }
  std::vector<std::pair<std::string, Tensor4<float>*>> named_inputs(std::size_t i) {
    return {{"q", &in_[i].q},
            {"the past's keys", &in_[i].past_k},
            {"the past's values", &in_[i].past_v},
            {"the chunk's keys", &in_[i].k},
            {"the chunk's values", &in_[i].v}};
  }

  Random random_{3};
  std::vector<Inputs<float>> in_;
  std::vector<Output<float>> output_;
  std::vector<Tensor4<float>> mask_;
  std::vector<AttentionSequence> batch_;
};

TEST_F(RaggedRefuses, ASequenceThatDoesNotFitOrSharesMemory) {
  EXPECT_NO_THROW(quoka::attention(batch_));
  const auto fits = batch_;
  const auto out_in = [](float* memory) {
    return TensorView<float>(memory, {1, 4, 5, 16}, {320, 80, 16, 1});
  };
  const auto lse_in = [](float* memory) {
    return TensorView<float, 3>(memory, {1, 4, 5}, {20, 5, 1});
  };
  std::vector<float> room(2 * 4 * 5 * 16);  // of two outputs, of which one number is both's
  using Change = std::function<void()>;
  struct Row {
    Change change;
    std::initializer_list<Fragment> says;
    AttentionOptions options = {};
  };
  const Row table[] = {
      {[&] { batch_[2].past.v = Rows(in_[2].past_v).slice(0, 31); },
       {"sequence", 2, "past v's len", 31, 32}},
      {[&] { batch_[2].mask = mask_[1]; }, {"sequence", 2, "mask's keys", 36, 37}},
      {[&] { batch_[1].mask = {}; }, {"sequence", 1, "mask's keys", 35, 36}, {.mask = mask_[0]}},
      {[&] { batch_[1].q_offset = 30; }, {"sequence", 1, "q_offset", 30, 31}},
      {[&] { batch_[1].out = out_in(in_[1].past_k.data()); },
       {"sequence", 1, "out shares memory with the past's keys"}},
      {[&] {
         batch_[2].out = {output_[0].out, output_[2].lse};
       },
       {shares(2, "out", 0, "out")}},
      {[&] {
         batch_[0].out = {out_in(room.data()), output_[0].lse};
         batch_[2].out = {out_in(room.data() + 4 * 5 * 16 - 1), output_[2].lse};
       },
       {shares(2, "out", 0, "out")}},
      {[&] {
         batch_[2].out = {output_[2].out, output_[0].lse};
       },
       {shares(2, "lse", 0, "lse")}},
      {[&] {
         batch_[2].out = {output_[2].out, lse_in(output_[0].out.data())};
       },
       {shares(2, "lse", 0, "out")}},
  };
  for (const auto& [change, says, options] : table) {
    batch_ = fits;
    change();
    refused(says, options);
  }
  for (const std::size_t other : {0u, 2u})
    for (const auto& [name, x] : named_inputs(other)) {
      batch_ = fits;
      batch_[1].out = out_in(x->data());
      refused({shares(1, "out", other, name)});
      batch_[1].out = {output_[1].out, lse_in(x->data())};
      refused({shares(1, "lse", other, name)});
    }
  // After a refusal the workspace still works.
  AttentionWorkspace workspace;
  batch_ = fits;
  batch_[2].mask = mask_[1];
  expect_refused([&] { quoka::attention(batch_, {}, SerialExecutor{}, workspace); }, {36, 37});
  quoka::attention(fits, {}, SerialExecutor{}, workspace);
  for (std::size_t i = 0; i < sequences; ++i)
    expect_same(output_[i], attend(in_[i], {.mask = mask_[i]}));
}

TEST_F(RaggedRefuses, ResultsInAnothersMask) {
  for (const std::size_t other : {0u, 2u}) {
    const TensorView<float, 3> lse(mask_[other].data(), {1, 4, 5}, {20, 5, 1});
    batch_[1].out = {output_[1].out, lse};
    refused({shares(1, "lse", other, "the mask")});
    Tensor4<float> wide(1, 1, 5, 400);  // room for an output
    wide.setZero();
    const TensorView<float> out(wide.data(), {1, 4, 5, 16}, {320, 80, 16, 1});
    const auto own = batch_[other].mask;
    batch_[other].mask = Rows(wide).first_channels(own.keys());
    batch_[1].out = out;
    refused({shares(1, "out", other, "the mask")});
    batch_[other].mask = own;
  }
}

// Heads of many sequences in turn, as [heads, tokens, dim] of a whole batch has them: compared in the order of
// memory, not pair by pair.
TEST(RaggedMemory, OfThousandsOfTokensHeadByHead) {
  constexpr Index n = 3000, heads = 8, dim = 4;
  std::vector<float> queries(uz(heads * n * dim), 0.25f), out = queries, cache = queries,
                                                          lse(uz(heads * n));
  // Head h of token i, of the queries or of the outputs.
  const auto rows = [&](std::vector<float>& all, Index i) {
    return TensorView<float>(all.data() + i * dim, {1, heads, 1, dim}, {0, n * dim, dim, 1});
  };
  std::vector<AttentionSequence> batch;
  for (Index i = 0; i < n; ++i) {
    const TensorView<float, 3> sums(lse.data() + i, {1, heads, 1}, {0, n, 1});
    batch.push_back({.q = rows(queries, i),
                     .past = {TensorView<const float>(cache.data(), {1, heads, 3, dim}),
                              TensorView<const float>(cache.data(), {1, heads, 3, dim})},
                     .out = {rows(out, i), sums}});
  }
  EXPECT_NO_THROW(quoka::attention(batch));
  batch[2000].out = {rows(out, 17), TensorView<float, 3>()};
  expect_refused([&] { quoka::attention(batch); },
                 {"out of sequence", 2000, "out of sequence", 17});
  batch[2000].out = {rows(out, 2000),
                     TensorView<float, 3>(lse.data() + 2999, {1, heads, 1}, {0, n, 1})};
  expect_refused([&] { quoka::attention(batch); }, {"lse of sequence", 2999, 2000});
  batch[2000].out = rows(out, 2000);
  batch[40].q = rows(out, 2999);
  expect_refused([&] { quoka::attention(batch); }, {"out of sequence", 2999, "q of sequence", 40});
}

// Random strides in a small memory, against a list of the bytes: what is shared is always found. Outputs may lie
// between each other's rows by any strides; an output between an input's rows may be refused.
TEST(RaggedMemory, IsFoundWhereAListOfBytesHasIt) {
  Random random(4);
  constexpr Index room = 3000;
  std::vector<float> memory(room, 0.5f), inputs(room, 0.5f);
  int accepted = 0, refused = 0;
  for (int round = 0; round < 2000; ++round) {
    SCOPED_TRACE("round " + std::to_string(round));
    const Index apart = 1 + random.below(40);
    const auto view = [&](std::vector<float>& of, Index heads, Index len, Index dim) {
      return TensorView<float>(
          of.data() + random.below(room - 800), {1, heads, len, dim},
          {0, random.below(4) == 0 ? apart * 4 : random.below(150), random.below(60), 1});
    };
    std::vector<AttentionSequence> batch;
    std::vector<std::vector<bool>> written, touched;
    const Index sequences = 2 + random.below(5);
    const bool apart_from_inputs = random.below(2) == 0;
    for (Index tries = 0; std::ssize(batch) < sequences && tries < 30; ++tries) {
      const Index heads = 1 + random.below(4), q_len = 1 + random.below(4), len = random.below(6);
      const auto input = [&]() -> auto& {
        return !apart_from_inputs && random.below(4) == 0 ? memory : inputs;
      };
      const TensorView<float> q = view(input(), heads, q_len, 4), k = view(input(), heads, len, 4),
                              v = view(input(), heads, len, 3), out = view(memory, heads, q_len, 3);
      const TensorView<float, 3> lse(memory.data() + random.below(room - 800), {1, heads, q_len},
                                     {0, random.below(90), random.below(60)});
      const bool has_lse = random.below(2) == 0;
      AttentionSequence x{
          .q = q, .past = {k, v}, .out = {out, has_lse ? lse : TensorView<float, 3>()}};
      try {  // alone it is valid
        quoka::attention({&x, 1});
      } catch (const std::invalid_argument&) {
        continue;
      }
      std::vector<bool> writes(room), touches(room);
      const auto mark = [&](std::vector<bool>& of, const TensorView<float>& rows) {
        if (rows.data() < memory.data() || rows.data() >= memory.data() + room) return;
        for (Index head = 0; head < rows.heads(); ++head)
          for (Index i = 0; i < rows.len(); ++i)
            for (Index c = 0; c < rows.dim(); ++c)
              of[uz(rows.row(0, head, i) + c - memory.data())] = true;
      };
      mark(writes, out);
      for (Index head = 0; has_lse && head < heads; ++head)
        for (Index i = 0; i < q_len; ++i) writes[uz(&lse.at(0, head, i) - memory.data())] = true;
      touches = writes;
      for (const auto& rows : {q, k, v}) mark(touches, rows);
      batch.push_back(x), written.push_back(writes), touched.push_back(touches);
    }
    bool shared = false;
    for (std::size_t i = 0; i < batch.size(); ++i)
      for (std::size_t j = 0; j < batch.size(); ++j)
        for (std::size_t at = 0; at < room && i != j; ++at)
          shared = shared || (written[i][at] && touched[j][at]);
    bool thrown = false;
    try {
      quoka::attention(batch);
    } catch (const std::invalid_argument&) {
      thrown = true;
    }
    std::fill(memory.begin(), memory.end(), 0.5f);
    if (shared || apart_from_inputs) {
      ASSERT_EQ(thrown, shared);
    }
    (shared ? refused : accepted) += batch.size() > 1 ? 1 : 0;
  }
  EXPECT_GT(accepted, 300);
  EXPECT_GT(refused, 300);
}

// Sequences may read the same memory: a common prefix.
TEST_F(RaggedRefuses, NoCommonInputs) {
  batch_[1].past = batch_[0].past;
  batch_[1].mask = batch_[0].mask;
  EXPECT_NO_THROW(quoka::attention(batch_));
  Inputs<float> shared = in_[1];
  shared.past_k = in_[0].past_k, shared.past_v = in_[0].past_v;
  expect_same(output_[1], attend(shared, {.mask = mask_[0]}));
}

}  // namespace
