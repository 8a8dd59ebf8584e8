// quoka::compiled for several ISA levels (runtime/isa.hpp), used by a program that is itself compiled for the
// baseline: every level that this machine runs, one after the other, gives the same Selections, and attention
// within rounding.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/quoka.hpp>
#include <quoka/runtime/isa.hpp>

#include "support/fixtures.hpp"

#include <cstdlib>
#include <map>
#include <set>

namespace {

using namespace quoka_test;

// The beginning of isa().
const std::map<std::string, std::string> instructions_of{{"x86-64-v2", "sse"},
                                                         {"x86-64-v3", "avx2_"},
                                                         {"x86-64-v3-vnni", "avx2_"},
                                                         {"x86-64-v4", "avx512_"},
                                                         {"x86-64-v4-vnni", "avx512_"},
                                                         {"armv8-a", "neon"},
                                                         {"x86-64-v4-bf16", "avx512_"},
                                                         {"x86-64-v4-amx", "avx512_"},
                                                         {"armv8.2-a-dotprod", "neon"},
                                                         {"armv8.6-a", "neon"},
                                                         {"plain", "scalar"}};

struct Results {
  std::vector<Selection> selections;
  std::vector<float> outputs;
};

// A prefill, a batch of tokens and attention over 8-bit rows, all made again under the level in
// use.
Results results() {
  Random random(71);
  Results made;
  const auto keep = [&](const Tensor4<float>& out) {
    made.outputs.insert(made.outputs.end(), out.data(), out.data() + out.size());
  };
  for (const auto sketch : {quoka::Sketch::on, quoka::Sketch::off}) {
    quoka::ChunkedPrefill<quoka::QuokaSelector> layer(
        {.q_heads = 8, .kv_heads = 2, .head_dim = 72},
        {.budget = Budget::keys(150), .sketch = sketch});
    for (const Index len : {300, 128, 77, 1, 1}) {
      const auto q = random.tensor<float>(1, 8, len, 72), k = random.tensor<float>(1, 2, len, 72),
                 v = random.tensor<float>(1, 2, len, 72);
      Tensor4<float> out(1, 8, len, 72);
      layer.forward(q, k, v, out);
      made.selections.push_back(layer.selection());
      keep(out);
    }
  }
  const auto k = random.tensor<Eigen::half>(2, 2, 333, 64),
             v = random.tensor<Eigen::half>(2, 2, 333, 64);
  for (const Index len : {1, 5, 130}) {
    const auto q = random.tensor<float>(2, 4, len, 64), own = random.tensor<float>(2, 2, len, 64);
    Tensor4<float> out(2, 4, len, 64);
    quoka::attention(q, {k, v}, {own, own}, out);
    keep(out);
    quoka::KvCache cache(1, 2, 64, 64, quoka::q8_0_format(), quoka::q8_0_format());
    const auto keys = random.tensor<float>(1, 2, 200, 64);
    cache.append(keys, keys);
    const auto one = random.tensor<float>(1, 4, len, 64),
               chunk = random.tensor<float>(1, 2, len, 64);
    Tensor4<float> over_codes(1, 4, len, 64);
    quoka::attention(one, {cache.k(), cache.v()}, {chunk, chunk}, over_codes);
    keep(over_codes);
  }
  return made;
}

TEST(Levels, AreNamedFromTheMostCommonAndTellTheirInstructions) {
  ASSERT_FALSE(quoka::isa_levels().empty());
  std::set<std::string> seen;
  for (const char* const level : quoka::isa_levels()) {
    quoka::use_isa(level);
    ASSERT_TRUE(instructions_of.contains(level)) << level;
    EXPECT_TRUE(std::string(quoka::isa()).starts_with(instructions_of.at(level)))
        << level << ": " << quoka::isa();
    EXPECT_TRUE(seen.insert(quoka::isa()).second) << quoka::isa() << " twice";
  }
}

TEST(Levels, GiveTheSameSelectionsAndOutputsWithinRounding) {
  quoka::use_isa(quoka::isa_levels().front());
  const Results common = results();
  for (const char* const level : quoka::isa_levels().subspan(1)) {
    SCOPED_TRACE(level);
    quoka::use_isa(level);
    const Results here = results();
    ASSERT_EQ(here.selections.size(), common.selections.size());
    for (std::size_t i = 0; i < common.selections.size(); ++i)
      EXPECT_EQ(here.selections[i], common.selections[i]) << "chunk " << i;
    ASSERT_EQ(here.outputs.size(), common.outputs.size());
    for (std::size_t i = 0; i < common.outputs.size(); ++i)  // means of normal values
      ASSERT_NEAR(here.outputs[i], common.outputs[i], 2e-4) << "output " << i;
  }
}

TEST(Levels, RefuseANameThatIsNotThereAndKeepTheirOwn) {
  quoka::use_isa(quoka::isa_levels().front());
  const std::string before = quoka::isa();
  for (const char* const name : {"", "x86-64-v9", "avx2", "x86-64-v2 "}) {
    try {
      quoka::use_isa(name);
      FAIL() << name;
    } catch (const std::invalid_argument& e) {
      EXPECT_NE(std::string(e.what()).find(quoka::isa_levels().front()), std::string::npos)
          << e.what();
    }
    EXPECT_EQ(quoka::isa(), before);
  }
}

// Before anything chose a level, it is the environment's, or the last one, which is the best.
const std::string at_the_start = quoka::isa();

TEST(Levels, BeginAsTheEnvironmentSaysOrWithTheBest) {
  const char* const wanted = std::getenv("QUOKA_ISA");
  const bool there = wanted != nullptr &&
                     std::set<std::string>(quoka::isa_levels().begin(), quoka::isa_levels().end())
                         .contains(wanted);
  quoka::use_isa(there ? wanted : quoka::isa_levels().back());
  EXPECT_EQ(at_the_start, quoka::isa());
}

}  // namespace
