// Ragged batches (layer/ragged.hpp): for any selector each sequence has the Selection and the results that it has alone,
// and is refused where it would be alone; and memory that sequences share (attention/attention.hpp). Results of
// attention alone: attention_suite_test.cpp. QUOKA_RAGGED_SEED=n runs one draw, QUOKA_RAGGED_CASES=n more of them.

#include <quoka/attention/arithmetic.hpp>
#include <quoka/layer/ragged.hpp>
#include <quoka/methods/all.hpp>
#include <quoka/select/key_sketch.hpp>
#include <quoka/select/softmax_scores.hpp>

#include "support/attention_fixtures.hpp"
#include "support/selector_draw.hpp"
#include "support/world.hpp"

#include <gtest/gtest.h>

#include <bitset>
#include <deque>
#include <functional>
#include <optional>

namespace {

using namespace quoka_test;
using quoka::AttentionSequence;
using quoka::AttentionWorkspace;
using quoka::QuokaSelector;

// ---- with selection -----------------------------------------------------------------------------

// Causal; of the past it hides nothing, the first keys, or some keys from each query.
StoredMask hiding_mask(Random& random, Index q_len, Index kv_len) {
  Tensor4<float> hides(1, 1, q_len, kv_len + q_len);
  const Index kind = random.below(3), cut = random.below(kv_len + 1);
  for (Index i = 0; i < q_len; ++i)
    for (Index t = 0; t < kv_len + q_len; ++t) {
      const bool sees =
          t >= kv_len ? t <= kv_len + i : kind == 0 || (kind == 1 ? t >= cut : random.below(4) > 0);
      hides(0, 0, i, t) = sees ? 0.0f : -infinity;
    }
  return StoredMask(hides, static_cast<StoredMask::Kind>(random.below(5)));
}

// A sequence, its State, and another State that sees the same calls.
template <class S>
struct OneOfBatch {
  Inputs<float> in;
  Output<float> out, expected;
  std::optional<StoredMask> hides;
  std::optional<Index> q_offset;
  Tensor3<float> norms;
  quoka::KeySketch sketch;
  bool selects = true, has_norms = false, has_sketch = false;
  std::uint64_t number = 0;
  typename S::State state{}, own{};
  Selection keep;

  OneOfBatch(Random& random, const Shape& shape)
      : in(random_inputs<float>(random, shape)),
        out(unwritten<float>(in.q, shape.v_dim)),
        expected(out),
        norms(1, shape.kv_heads, shape.kv_len),
        selects(!random.seldom(5)),
        has_norms(random.seldom(3)),
        has_sketch(shape.kv_len > 0 && random.seldom(3)),
        number(random.bits() % 3) {
    if (random.seldom(4)) hides = hiding_mask(random, shape.q_len, shape.kv_len);
    if (random.seldom(4)) q_offset = shape.kv_len + random.below(500);
    for (Index head = 0; head < shape.kv_heads; ++head)
      for (Index i = 0; i < shape.kv_len; ++i)
        norms(0, head, i) = quoka::inverse_norm(&in.past_k(0, head, i, 0), shape.head_dim);
    if (has_sketch) sketch.update(in.past_k, 0, shape.kv_len, SerialExecutor{});
  }

  quoka::Mask mask() const { return hides ? hides->mask() : quoka::Mask(); }
  quoka::RaggedSequence<S> sequence() {
    return {.q = in.q,
            .past_k = in.past_k,
            .past_v = in.past_v,
            .chunk = {in.k, in.v},
            .out = {out.out, out.lse},
            .state = selects ? &state : nullptr,
            .inverse_norms =
                has_norms ? TensorView<const float, 3>(norms) : TensorView<const float, 3>(),
            .sketch = has_sketch ? &sketch : nullptr,
            .sequence = number,
            .mask = mask(),
            .q_offset = q_offset};
  }
  // By calls of its own; false where these are refused.
  bool alone(const S& selector, AttentionOptions options) {
    const Index heads = in.past_k.dimension(1), kv_len = in.past_k.dimension(2);
    if (hides) options.mask = mask();
    if (q_offset) options.q_offset = q_offset;
    quoka::SelectorInput input{.q = in.q,
                               .k = in.past_k,
                               .logits = options,
                               .capacity = kv_len,
                               .sequence = number,
                               .sketch = has_sketch ? &sketch : nullptr,
                               .attends = true};
    input.in_int8 = quoka::multiplies_int8(options.arithmetic, input.group() * input.q.len());
    if (has_norms) input.inverse_norms = norms;
    if (options.mask.absent()) input.chunk_k = in.k;
    try {
      keep = Selection::all(1, heads, kv_len);
      if (selects && kv_len > 0) quoka::select_visible(selector, input, options.mask, own, keep);
      quoka::attention(in.q, {in.past_k, in.past_v, keep}, {in.k, in.v},
                       {expected.out, expected.lse}, options);
      return true;
    } catch (const std::invalid_argument&) {
      return false;
    }
  }
};

template <class S>
void expect_each_as_alone(Random& random, quoka::RaggedWorkspace<S>& workspace) {
  const Index kv_heads = 1 + random.below(3), q_heads = kv_heads * (1 + random.below(4)),
              sequences = random.below(6), dim = random.one_of(8, 16, 20);
  const auto shape = [&] {
    return Shape{.q_heads = q_heads,
                 .kv_heads = kv_heads,
                 .head_dim = dim,
                 .v_dim = 16,
                 .q_len = random.one_of(Index{1}, Index{1}, 1 + random.below(20), Index{130}),
                 .kv_len = random.seldom(8) ? random.below(3) : random.below(450)};
  };
  const bool alike = random.seldom(4);  // then the options' mask and position may serve them
  const Shape common = shape();
  std::deque<OneOfBatch<S>> of;
  for (Index i = 0; i < sequences; ++i) of.emplace_back(random, alike ? common : shape());

  std::vector<float> sinks, slopes;
  for (Index h = 0; h < q_heads; ++h)
    sinks.push_back(0.3f * static_cast<float>(h)), slopes.push_back(0.1f);
  AttentionOptions options{
      .arithmetic = random.one_of(quoka::Arithmetic::automatic, quoka::Arithmetic::float_,
                                  quoka::Arithmetic::bf16, quoka::Arithmetic::int8)};
  if (random.seldom(3)) options.scale = static_cast<float>(0.05 + random.uniform());
  if (random.seldom(4)) options.sinks = sinks;
  if (random.seldom(8)) options.softcap = 20.0f;
  if (random.seldom(8)) options.alibi_slopes = slopes;
  if (random.seldom(16)) options.sliding_window = 50;
  std::optional<StoredMask> of_all;
  if (random.seldom(alike ? 2 : 16)) of_all = hiding_mask(random, common.q_len, common.kv_len);
  if (of_all) options.mask = of_all->mask();
  if (alike && random.seldom(3)) options.q_offset = common.kv_len + 70;

  const S selector(selector_options<typename S::Options>(random));
  quoka::ThreadPool pool(3);
  std::vector<quoka::RaggedSequence<S>> batch;
  std::vector<Index> refused;
  for (Index i = 0; i < sequences; ++i) {
    OneOfBatch<S>& x = of[uz(i)];
    if (x.selects && x.in.past_k.dimension(2) > 0 &&
        random.seldom(2)) {  // the States have seen some of the keys
      const Index told = 1 + random.below(x.in.past_k.dimension(2) + 1);
      const Rows keys = Rows(x.in.past_k).slice(0, std::min(told, x.in.past_k.dimension(2)));
      for (typename S::State* const state : {&x.state, &x.own}) try {
          selector.appended(
              {.q = {}, .k = keys, .logits = options, .capacity = keys.len(), .sequence = x.number},
              *state, SerialExecutor{});
        } catch (const std::invalid_argument&) {  // then select() refuses the options, too
        }
    }
    if (!x.alone(selector, options)) refused.push_back(i);
    batch.push_back(x.sequence());
  }
  const auto run = [&](ExecutorRef by) {
    quoka::select_and_attend<S>(selector, batch, options, by, workspace);
  };
  if (!refused.empty()) {
    std::string message;
    try {
      run(pool);
    } catch (const std::invalid_argument& error) {
      message = error.what();
    }
    EXPECT_TRUE(std::ranges::any_of(refused, [&](Index i) {
      return Fragment("sequence " + std::to_string(i) + ":").is_in(message);
    })) << message;
    for (const OneOfBatch<S>& x : of) expect_same(x.out, unwritten<float>(x.in.q, 16));
    return;
  }
  const Index kind = random.below(4);
  if (kind == 3) try {  // a failure leaves States as they were, or the call is made again
      run(FailsAt{static_cast<long>(random.below(random.one_of(4, 30, 200)))});
    } catch (const Failure&) {
    }
  if (kind == 0) run(InTurns{random.one_of(1, 2, 64)});
  if (kind == 1) run(pool);
  if (kind > 1) run(SerialExecutor{});
  for (Index i = 0; i < sequences; ++i) {
    SCOPED_TRACE("sequence " + std::to_string(i));
    EXPECT_EQ(workspace.selection(i), of[uz(i)].keep);
    expect_same(of[uz(i)].out, of[uz(i)].expected);
  }
}

// One workspace serves batches of any sizes, refused ones and failed ones among them.
TEST(RaggedSuite, EachSequenceIsAsAlone) {
  quoka::for_each_selector([&]<class S>(const char* name) {
    quoka::RaggedWorkspace<S> workspace;
    for_each_draw("RAGGED", 24, [&](Random& random, std::uint64_t) {
      SCOPED_TRACE(name);
      expect_each_as_alone<S>(random, workspace);
    });
  });
}

// ---- with selection: what is refused --------------------------------------------------------------

// Keeps one key of another past.
struct ShortSighted {
  struct Options {};
  using State = quoka::NoState;
  explicit ShortSighted(const Options&) {}
  void select(const quoka::SelectorInput& input, State&, Selection& keep, ExecutorRef) const {
    keep.select_none(input.k.batch(), input.k.heads(), input.k.len() - 1);
  }
  void appended(const quoka::SelectorInput&, State&, ExecutorRef) const {}
};

TEST(RaggedSelectionRefuses, ASequenceByItsNumber) {
  constexpr Index n = 3, len = 300;
  Random random(70);
  const Inputs<float> in =
      random_inputs<float>(random, {.q_heads = 4, .kv_heads = 2, .q_len = 5, .kv_len = len});
  const StoredMask short_mask = hiding_mask(random, 5, len - 7);
  std::deque<Output<float>> outs(n, unwritten<float>(in.q, 16));
  const QuokaSelector selector({.budget = Budget::keys(40), .sketch = quoka::Sketch::on});
  QuokaSelector::State states[n];
  const auto batch_of = [&]<class S>(typename S::State* state, std::size_t i) {
    return quoka::RaggedSequence<S>{.q = in.q,
                                    .past_k = in.past_k,
                                    .past_v = in.past_v,
                                    .chunk = {in.k, in.v},
                                    .out = {outs[i].out, outs[i].lse},
                                    .state = state,
                                    .sequence = 100 + i};
  };
  std::vector<quoka::RaggedSequence<QuokaSelector>> fits, batch;
  std::vector<quoka::RaggedSequence<ShortSighted>> short_sighted;
  ShortSighted::State state;
  for (std::size_t i = 0; i < n; ++i) {
    fits.push_back(batch_of.operator()<QuokaSelector>(&states[i], i));
    short_sighted.push_back(batch_of.operator()<ShortSighted>(i == 1 ? &state : nullptr, i));
  }
  quoka::RaggedWorkspace<QuokaSelector> workspace;
  quoka::RaggedWorkspace<ShortSighted> other_workspace;
  quoka::ThreadPool pool(2);
  const auto run = [&](ExecutorRef by) {
    quoka::select_and_attend<QuokaSelector>(selector, batch, {}, by, workspace);
  };
  const auto refuses = [&](auto&& change, const std::vector<Fragment>& says) {
    batch = fits;
    change();
    for (const ExecutorRef by : {ExecutorRef(SerialExecutor{}), ExecutorRef(pool)})
      expect_refused([&] { run(by); }, says);
  };
  refuses([&] { batch[2].past_v = Rows(in.past_v).slice(0, len - 1); },
          {"sequence", 2, "past v's len", len - 1, len});
  refuses([&] { batch[1].mask = short_mask.mask(); },
          {"sequence", 1, "mask's keys", len - 2, len + 5});
  refuses([&] { batch[2].state = batch[0].state; }, {"sequences", 0, 2, "the same State"});
  const std::vector<Position> listed(5, 0);
  batch = fits;
  expect_refused(
      [&] {
        quoka::select_and_attend<QuokaSelector>(
            selector, batch, {.lists = quoka::IndexLists({listed.data(), {1, 1, 5, 1}})},
            SerialExecutor{}, workspace);
      },
      {"sequence", 0, "lists of each query's keys and a State"});
  EXPECT_EQ(states[0].kept_bytes(), 0) << "a State was used before all was checked";
  expect_refused(
      [&] {
        quoka::select_and_attend<ShortSighted>(ShortSighted({}), short_sighted, {},
                                               SerialExecutor{}, other_workspace);
      },
      {"sequence", 1, "selection's kv_len", len - 1, len});
  for (const Output<float>& out : outs) expect_same(out, unwritten<float>(in.q, 16));
  batch = fits;
  run(SerialExecutor{});
  refuses([&] { batch[1].sequence = 7; }, {"sequence", 1, "sequence's number", 7, 101});
  batch[0].state = batch[2].state = nullptr;  // no State serves two sequences
  batch[1].sequence = 101;
  EXPECT_NO_THROW(run(SerialExecutor{}));
}

// ---- attention: memory that is shared -------------------------------------------------------------

// Views with random strides in a small memory, against a list of the numbers that each of them has: shared memory is
// always found, in a sequence alone and with each one that joins a batch. Outputs may lie between each other's rows by
// any strides; an output between an input's rows may be refused.
TEST(RaggedMemory, IsFoundWhereAListOfNumbersHasIt) {
  constexpr Index room = 3000;
  using Numbers = std::bitset<room>;
  std::vector<float> memory(room, 0.5f), inputs(room, 0.5f);
  int accepted = 0, refused = 0, alone = 0;
  const bool complete = for_each_draw(2000, [&](Random& random) {
    const Index apart = 1 + random.below(40), sequences = 2 + random.below(5);
    const bool apart_from_inputs = random.below(2) == 0;
    const auto view = [&](std::vector<float>& of, Index heads, Index len, Index dim) {
      return TensorView<float>(
          of.data() + random.below(room - 800), {1, heads, len, dim},
          {0, random.below(4) == 0 ? apart * 4 : random.below(150), random.below(60), 1});
    };
    const auto refusal_of = [&](const std::vector<AttentionSequence>& batch) -> std::string {
      try {
        quoka::attention(batch);
      } catch (const std::invalid_argument& error) {
        return error.what();
      }
      std::fill(memory.begin(), memory.end(), 0.5f);
      return "";
    };
    std::vector<AttentionSequence> batch;
    Numbers written, read;  // by it
    for (Index tries = 0; std::ssize(batch) < sequences && tries < 30; ++tries) {
      const Index heads = 1 + random.below(4), q_len = 1 + random.below(4), len = random.below(6);
      const auto input = [&]() -> auto& {
        return !apart_from_inputs && random.below(4) == 0 ? memory : inputs;
      };
      const TensorView<float> q = view(input(), heads, q_len, 4), k = view(input(), heads, len, 4),
                              v = view(input(), heads, len, 3), out = view(memory, heads, q_len, 3);
      TensorView<float, 3> lse(memory.data() + random.below(room - 800), {1, heads, q_len},
                               {0, random.below(90), random.below(60)});
      if (random.below(2) == 0) lse = {};
      const AttentionSequence x{.q = q, .past = {k, v}, .out = {out, lse}};
      Numbers writes, reads;
      bool twice = false;
      const auto mark = [&](Numbers& of, const float* at) {
        if (at < memory.data() || at >= memory.data() + room) return;
        twice = twice || writes[uz(at - memory.data())];
        of.set(uz(at - memory.data()));
      };
      const auto mark_rows = [&](Numbers& of, const TensorView<float>& rows) {
        for (Index head = 0; head < rows.heads(); ++head)
          for (Index i = 0; i < rows.len(); ++i)
            for (Index c = 0; c < rows.dim(); ++c) mark(of, rows.row(0, head, i) + c);
      };
      mark_rows(writes, out);
      for (Index head = 0; !lse.absent() && head < heads; ++head)
        for (Index i = 0; i < q_len; ++i) mark(writes, &lse.at(0, head, i));
      for (const auto& rows : {q, k, v}) mark_rows(reads, rows);
      if (!refusal_of({x}).empty()) {
        alone += twice;
        continue;
      }
      ASSERT_FALSE(twice);
      const bool shared = (writes & (written | read)).any() || (reads & written).any();
      batch.push_back(x);
      const std::string refusal = refusal_of(batch);
      if (shared || apart_from_inputs) {
        ASSERT_EQ(refusal.empty(), !shared);
      }
      if (refusal.empty()) {
        ++accepted, written |= writes, read |= reads;
        continue;
      }
      ++refused, batch.pop_back();
      const auto names = [&](std::size_t i) {
        return refusal.find(" of sequence " + std::to_string(i)) < refusal.size();
      };
      EXPECT_TRUE(names(batch.size()) && (batch.size() > 1 || names(0))) << refusal;
      EXPECT_LT(refusal.find("shares memory with"), refusal.size());
    }
  });
  if (!complete) return;
  EXPECT_GT(accepted, 300);
  EXPECT_GT(refused, 300);
  EXPECT_GT(alone, 300);
}

}  // namespace
