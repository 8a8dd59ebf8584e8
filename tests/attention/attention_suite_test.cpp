// Properties of attention(), over calls drawn at random: every arithmetic, format, layout and option, alone and
// together (support/attention_case.hpp). A failure names its case; QUOKA_ATTENTION_SEED=n runs that one alone,
// QUOKA_ATTENTION_CASES=n more of them than usual. AttentionSuite tests numbers and layouts, and must run for every set
// of instructions. AttentionWork tests how a call is cut into work and how its memory is reused.

#include <quoka/attention/attention.hpp>
#include <quoka/kernels/byte_formats.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include "support/attention_case.hpp"

#include <gtest/gtest.h>

#include <cfenv>
#include <deque>
#include <memory>

namespace {

using namespace quoka_test;
using quoka::Arithmetic;
using quoka::AttentionWorkspace;

// f(case, random) for drawn cases.
using Numbers = AttentionCase::Numbers;
template <class F>
bool for_each_case(Index usual, F&& f, Numbers numbers = Numbers::usual) {
  return for_each_draw("ATTENTION", usual, [&](Random& random, std::uint64_t) {
    AttentionCase c(random, numbers);
    SCOPED_TRACE(c.describe());
    f(c, random);
  });
}

ShuffledExecutor some_workers(Random& random) {
  constexpr int counts[] = {1, 2, 3, 5, 8, 16, 33};
  return {random.bits(), counts[random.below(std::ssize(counts))]};
}

// Programs may trap floating-point exceptions. No division by zero happens for rows that see nothing, lanes without a row,
// rows of zeros, or NaN; and of finite numbers none of those that may be trapped.
TEST(AttentionSuite, IsTheOraclesAndRaisesNoFlag) {
  for_each_case(320, [](AttentionCase& c, Random&) {
    std::feclearexcept(FE_ALL_EXCEPT);
    const Output<float> output = c.attend();
    // Of float, half and bfloat16. A factor of 0 may meet a mask's minus infinity.
    const auto plain = [](const Rows& x) { return x.empty() || x.format().element_bytes > 0; };
    const bool finite = !c.is_ruined() && (!c.has_mask() || c.options().mask_factors.empty()) &&
                        plain(c.q()) && plain(c.past().k) && plain(c.past().v) &&
                        plain(c.chunk().k) && plain(c.chunk().v);
    EXPECT_EQ(std::fetestexcept(FE_DIVBYZERO | (finite ? FE_INVALID | FE_OVERFLOW : 0)), 0);
    EXPECT_TRUE(c.is_as_oracle(output));
  });
}

TEST(AttentionSuite, IsTheOraclesFromOneEndOfFloatToTheOther) {
  for_each_case(
      250,
      [](AttentionCase& c, Random& random) {
        EXPECT_TRUE(c.is_as_oracle(c.attend()));
        if (c.shape().kv_len < 2 || random.below(3) != 0) return;
        EXPECT_TRUE(c.is_as_oracle(c.merged_at(c.shape().kv_len / 2), {}, true));
      },
      Numbers::ends_of_float);
}

// Tasks run by any executor, in any order.
TEST(AttentionWork, AnyExecutorGivesTheSameBits) {
  AttentionWorkspace workspace;
  quoka::ThreadPool pool(3);
  for_each_case(250, [&](AttentionCase& c, Random& random) {
    const Output<float> alone = c.attend();
    ShuffledExecutor shuffled = some_workers(random);
    expect_same(c.attend(shuffled, workspace), alone);
    expect_same(c.attend(pool, workspace), alone);
  });
}

// How a head is cut over its keys depends on its own list.
TEST(AttentionSuite, AHeadsBitsDoNotDependOnTheListsOfOthers) {
  for_each_case(500, [](AttentionCase& c, Random& random) {
    if (!c.has_selection()) return;
    const Output<float> before = c.attend();
    const Index heads = c.heads_of_a_list(), list = random.below(c.shape().q_heads / heads);
    c.select_otherwise_beside(list, random);
    const Output<float> after = c.attend();
    for (Index b = 0; b < c.shape().batch; ++b)
      for (Index head = list * heads; head < (list + 1) * heads; ++head)
        for (Index i = 0; i < c.shape().q_len; ++i)
          ASSERT_TRUE(same_row(after, before, b, head, i)) << b << ", " << head << ", " << i;
  });
}

// Scratch memory serves whatever it served before: another case, or this one with less to keep of it.
TEST(AttentionWork, AWorkspaceServesAnyCallAfterAnyOther) {
  std::unique_ptr<AttentionCase> before;
  for_each_draw("ATTENTION", 300, [&](Random& random, std::uint64_t) {
    Random again = random;
    const AttentionCase c(random);
    SCOPED_TRACE(c.describe());
    const Output<float> alone = c.attend();
    auto floats = std::make_unique<AttentionCase>(again);
    floats->widen_to_float();
    for (const AttentionCase* const other : {before.get(), floats.get()}) {
      AttentionWorkspace workspace;
      ShuffledExecutor few(1, 1), some = some_workers(random);
      if (other != nullptr) (void)other->attend(few, workspace);
      expect_same(c.attend(few, workspace), alone);
      const Index bytes = workspace.bytes();
      AttentionWorkspace moved_to(std::move(workspace));
      EXPECT_EQ(moved_to.bytes(), bytes);
      EXPECT_EQ(workspace.bytes(), 0);  // NOLINT: what was moved from may be used
      expect_same(c.attend(some, moved_to), alone);
      expect_same(c.attend(some, workspace), alone);
    }
    before = std::move(floats);
  });
}

// Sequences by themselves, and as a list of sequences.
TEST(AttentionWork, ABatchIsItsSequences) {
  AttentionWorkspace workspace;
  for_each_case(250, [&](AttentionCase& c, Random& random) {
    if (c.shape().batch == 1 && random.below(4) != 0) return;
    const Output<float> whole = c.attend();
    AttentionOptions options = c.options();
    options.mask = {}, options.lists = {};
    const Shape& s = c.shape();
    std::vector<Selection> keep(uz(2 * s.batch));
    std::vector<quoka::AttentionSequence> sequences;
    Output<float> listed = c.unwritten_output(), alone = c.unwritten_output();
    const auto of = [&](Output<float>& output, Index b, Index which) {
      const TensorView<float> out(&output.out(b, 0, 0, 0), {1, s.q_heads, s.q_len, s.v_dim},
                                  {0, s.q_len * s.v_dim, s.v_dim, 1});
      const TensorView<float, 3> lse(&output.lse(b, 0, 0), {1, s.q_heads, s.q_len},
                                     {0, s.q_len, 1});
      return c.sequence(b, {out, lse}, keep[uz(which)]);
    };
    for (Index b = 0; b < s.batch; ++b) {
      sequences.push_back(of(listed, b, b));
      const quoka::AttentionSequence one = of(alone, b, s.batch + b);
      AttentionOptions own = options;
      own.mask = one.mask, own.lists = one.lists;
      quoka::attention(one.q, one.past, one.chunk, one.out, own);
    }
    expect_same(alone, whole);
    ShuffledExecutor shuffled(random.bits(), 5);
    quoka::attention(sequences, options, shuffled, workspace);
    expect_same(listed, whole);
  });
}

// Calls of any kinds as one ragged batch, of one set of options.
TEST(AttentionWork, ABatchOfAnyCallsIsEachOfThem) {
  AttentionWorkspace serial, pooled;
  quoka::ThreadPool pool(2);
  for_each_case(200, [&](AttentionCase& first, Random& random) {
    AttentionOptions options = first.options();
    options.mask = {}, options.lists = {}, options.q_offset = {};
    options.sinks = options.mask_factors = options.alibi_slopes = {};
    std::deque<AttentionCase> others;
    std::vector<AttentionCase*> calls{&first};
    for (Index more = random.below(5); more > 0; --more)
      calls.push_back(&others.emplace_back(random));
    std::deque<Output<float>> outputs[2];
    std::vector<quoka::AttentionSequence> batches[2];
    for (AttentionCase* const call : calls) {
      call->share_options(options);
      for (const std::size_t i : {std::size_t{0}, std::size_t{1}}) {
        Output<float>& output = outputs[i].emplace_back(call->unwritten_output());
        batches[i].push_back(call->sequence({output.out, output.lse}));
      }
    }
    quoka::attention(batches[0], options, SerialExecutor{}, serial);
    quoka::attention(batches[1], options, pool, pooled);
    for (std::size_t i = 0; i < calls.size(); ++i) {
      SCOPED_TRACE("sequence " + std::to_string(i) + ": " + calls[i]->describe());
      const Output<float> alone = calls[i]->attend();
      expect_same(outputs[0][i], alone);
      expect_same(outputs[1][i], alone);
    }
  });
}

// Where a tensor lies changes no bit, nor how a mask is written, nor whether a hole of the past is hidden or not selected,
// nor what hides nothing, nor where position 0 is.
TEST(AttentionSuite, LayoutsChangeNoBit) {
  for_each_case(250, [](AttentionCase& c, Random& random) {
    const Output<float> before = c.attend();
    c.move_elsewhere(random, random.below(2) == 0);
    if (random.below(2) == 0) c.select_what_is_shown();
    if (c.has_mask()) c.spell_out_mask(random);
    if (random.below(2) == 0)
      c.move_far_away(random);
    else
      c.hide_nothing(random);
    expect_same(c.attend(), before);
  });
}

// Nor in what format, but where products depend on it. Lists add up in another order beyond two
// ranges of 128 keys: panels wait for two ranges of keys in float, and for four of others
// (ListRanges::waiting).
TEST(AttentionSuite, FormatsAreTheirFloats) {
  for_each_case(250, [](AttentionCase& c, Random&) {
    c.ask_for(Arithmetic::float_);
    const Output<float> before = c.attend();
    const quoka::Rows keys = c.shape().kv_len > 0 ? c.past().k : c.chunk().k;
    const bool same_order = !c.has_own_keys() || keys.format().is_float || c.keys() <= 256;
    c.widen_to_float();
    const Output<float> floats = c.attend();
    if (same_order)
      expect_same(floats, before);
    else
      EXPECT_TRUE(c.is_as_oracle(floats));
  });
}

// An output is rounded once, to whatever format, and what lies between its rows stays.
TEST(AttentionSuite, OutputsAreRoundedOnce) {
  const quoka::Format* const formats[] = {
      &quoka::format_of<Eigen::half>(), &quoka::format_of<Eigen::bfloat16>(), &quoka::q8_0_format(),
      &quoka::u8_format(), &quoka::float_format()};
  for_each_case(200, [&](AttentionCase& c, Random& random) {
    const Output<float> floats = c.attend();
    const quoka::Format& format = *formats[random.below(std::ssize(formats))];
    const Shape& s = c.shape();
    const Index bytes = format.row_bytes({s.v_dim}), step = bytes + 4 * random.below(3);
    std::vector<std::byte> memory(uz(s.batch * s.q_heads * s.q_len * step), std::byte{0x5a}),
        expected = memory;
    const quoka::OutputRows out(memory.data(), format, {s.batch, s.q_heads, s.q_len, s.v_dim},
                                {s.q_len * s.q_heads * step, step, s.q_heads * step});
    for (Index b = 0; b < s.batch; ++b)
      for (Index h = 0; h < s.q_heads; ++h)
        for (Index i = 0; i < s.q_len; ++i)
          format.narrow(&floats.out(b, h, i, 0), {s.v_dim},
                        expected.data() + (out.row(b, h, i) - memory.data()));
    quoka::attention(c.q(), c.past(), c.chunk(), out, c.options());  // without a log-sum-exp
    EXPECT_TRUE(memory == expected) << format.name;
  });
}

// Shards of a past, merged.
TEST(AttentionWork, ShardsMergedAreTheWhole) {
  for_each_case(200, [](AttentionCase& c, Random& random) {
    const Index kv_len = c.shape().kv_len;
    if (kv_len == 0) return;
    const Index cuts[] = {0, 1, random.below(kv_len + 1), kv_len};
    EXPECT_TRUE(c.is_as_oracle(c.merged_at(cuts[random.below(4)]), {}, true));
  });
}

// NaN and infinite values stay in the rows that see them; all others keep their bits.
TEST(AttentionSuite, NaNStaysInItsRows) {
  for_each_case(250, [](AttentionCase& c, Random& random) {
    const Output<float> clean = c.attend();
    EXPECT_TRUE(c.keeps_nan_in_its_rows(clean, random));
  });
}

}  // namespace
