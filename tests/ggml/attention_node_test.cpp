// FLASH_ATTN_EXT in exact mode: which nodes the backend takes, and its arithmetics. Drawn nodes against ggml's CPU backend are in
// mask_node_test.cpp.

#include "ggml/nodes.hpp"
#include "ggml/said.hpp"
#include "support/attention_fixtures.hpp"

#include <quoka/runtime/isa.hpp>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <sstream>
#include <string>

namespace {

using namespace quoka_test;

TEST(AttentionNode, IsChosenByTheScheduler) {
  NodeShape s;
  GraphOfOne graph(s);
  const ggml_backend_ptr ours = Backends::quoka("");
  EXPECT_TRUE(ggml_backend_supports_op(ours.get(), graph.out));
  EXPECT_EQ(ggml_backend_get_default_buffer_type(ours.get()), ggml_backend_cpu_buffer_type());
  EXPECT_EQ(ggml_backend_dev_type(ggml_backend_get_device(ours.get())),
            GGML_BACKEND_DEVICE_TYPE_ACCEL);
}

TEST(AttentionNode, LeavesAnEmptyCacheAndFewQueriesToTheCpu) {
  for (const ggml_type type :
       {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
        GGML_TYPE_Q4_1, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL})
    for (const std::int64_t n_q : {1, 2, 31, 256}) {
      SCOPED_TRACE(std::string(ggml_type_name(type)) + ", queries " + std::to_string(n_q));
      NodeShape s;
      s.n_q = n_q, s.k_type = s.v_type = type;
      GraphOfOne graph(s);
      const ggml_backend_ptr ours = Backends::quoka("");
      EXPECT_TRUE(ggml_backend_supports_op(ours.get(), graph.out));
      std::memset(graph.k_cache->data, 0, ggml_nbytes(graph.k_cache));
      EXPECT_FALSE(ggml_backend_supports_op(ours.get(), graph.out));
    }
}

TEST(AttentionNode, HiddenCellsMayHoldAnything) {
  NodeShape s;
  s.n_q = 20;
  GraphOfOne graph(s);
  graph.see_causally(60);
  const auto expected = graph.computed_by(Backends::quoka("").get());
  const auto row = static_cast<std::size_t>(s.kv_heads * s.head_dim);
  for (ggml_tensor* const t : {graph.k_cache, graph.v_cache})
    std::fill_n(static_cast<ggml_fp16_t*>(t->data) + 81 * row, (256 - 81) * row,
                ggml_fp32_to_fp16(NAN));
  EXPECT_EQ(graph.computed_by(Backends::quoka("").get()), expected);
}

// ---- arithmetics ----

const ggml_type cache_types[] = {GGML_TYPE_F32,  GGML_TYPE_F16,  GGML_TYPE_BF16,  GGML_TYPE_Q8_0,
                                 GGML_TYPE_Q4_0, GGML_TYPE_Q5_1, GGML_TYPE_IQ4_NL};

// The same bits as the library's by the arithmetic of that name; and `automatic` by its table.
TEST(AttentionNode, ArithmeticsAreTheLibrarysOwn) {
  const bool has_bf16 = quoka::arithmetic_used(quoka::Arithmetic::bf16) == quoka::Arithmetic::bf16;
  for (const ggml_type type : cache_types)
    for (const std::int64_t n_q : {1, 31, 32, 70}) {
      SCOPED_TRACE(std::string(ggml_type_name(type)) + ", queries " + std::to_string(n_q));
      NodeShape s;
      s.k_type = s.v_type = type, s.n_q = n_q, s.cells = 512;
      GraphOfOne graph(s);
      graph.see_causally(300);
      const auto said = [&](const char* name) {
        return graph.computed_by(
            Backends::quoka(std::string(R"({"arithmetic": ")") + name + "\"}").get());
      };
      const auto single = by_the_library(graph, {}, quoka::Arithmetic::float_),
                 bf16 = by_the_library(graph, {}, quoka::Arithmetic::bf16),
                 library = by_the_library(graph);
      EXPECT_EQ(said("float"), single);
      EXPECT_EQ(said("bf16"), bf16);
      EXPECT_EQ(said("int8"), by_the_library(graph, {}, quoka::Arithmetic::int8));
      EXPECT_EQ(bf16 != single, has_bf16 && n_q > 1) << "a token's attention is float";
      const bool rounds = has_bf16 && n_q >= 32 && ggml_is_quantized(type);
      EXPECT_EQ(said("automatic"), rounds ? bf16 : library);
      EXPECT_EQ(graph.computed_by(Backends::quoka("").get()), said("automatic"));
    }
}

// As the backend is loaded again at an ISA level, with these variables besides.
std::string restarted_at(const std::string& level,
                         std::map<std::string, std::string> variables = {}) {
  quoka::use_isa(level);
  variables["QUOKA_ISA"] = level;
  return said_while([&] { restart_with(variables); });
}

// If the processor has no products of an arithmetic, attention uses another one, and a line says so: at the start for
// the program's, and when a backend is made whose parameters ask for one of its own.
TEST(AttentionNode, AnArithmeticThatIsNoFasterIsNamed) {
  const auto made = [](const std::string& arithmetic) {
    return said_while(
        [&] { EXPECT_NE(Backends::quoka(R"({"arithmetic": ")" + arithmetic + "\"}"), nullptr); });
  };
  backends();
  const char* const isa = std::getenv("QUOKA_ISA");
  const std::string before = isa != nullptr ? isa : quoka::isa_levels().back();
  for (const std::string level : quoka::isa_levels())
    for (const quoka::Arithmetic asked : arithmetics) {
      const std::string name = name_of(asked);
      SCOPED_TRACE(level + ", " + name);
      EXPECT_EQ(restarted_at(level, {{"QUOKA_QUIET", "1"}}), "");
      EXPECT_EQ(made(name), "");
      restarted_at(level);
      const quoka::Arithmetic used = quoka::arithmetic_used(asked);
      const bool other = asked != quoka::Arithmetic::automatic && used != asked;
      const std::string line = "in " + name_of(used) + ": " + name + " is no faster here\n";
      if (level == "x86-64-v3") {
        EXPECT_EQ(other, name == "bf16" || name == "int8");
      }
      EXPECT_EQ(made(name), other ? "quoka: attention of one backend " + line : "");
      EXPECT_EQ(made(name), "") << "said once";
      const std::string start = restarted_at(level, {{"QUOKA_ARITHMETIC", name}});
      EXPECT_EQ(start.ends_with(", " + line), other) << start;
      EXPECT_EQ(made(name), "") << "said at the start";
    }
  restarted_at(before);
  if (isa != nullptr) setenv("QUOKA_ISA", before.c_str(), 1);
}

// By the root of the mean square over logits of every size: where llama.cpp has less than bf16, `automatic` has not
// more.
TEST(AttentionNode, AutomaticIsNotWorseThanLlamaCpp) {
  for (const ggml_type type : cache_types)
    for (const std::int64_t n_q : {1, 8, 63, 64}) {
      SCOPED_TRACE(std::string(ggml_type_name(type)) + ", queries " + std::to_string(n_q));
      NodeShape s;
      s.k_type = s.v_type = type, s.n_q = n_q, s.cells = 512, s.q_heads = 4;
      GraphOfOne graph(s);
      graph.see_causally(400);
      double ours = 0, theirs = 0;
      for (const float size : {0.3f, 1.0f, 3.0f, 10.0f}) {
        graph.fill(graph.q_rows, size);
        const std::vector<double> exact = in_double(graph, 400);
        const auto error = [&](ggml_backend_t backend) {
          const std::vector<float> x = graph.computed_by(backend);
          EXPECT_EQ(x.size(), exact.size());
          double off = 0, all = 0;
          for (std::size_t i = 0; i < x.size(); ++i)
            off += std::pow(static_cast<double>(x[i]) - exact[i], 2), all += exact[i] * exact[i];
          return std::sqrt(off / all);
        };
        ours = std::max(ours, error(Backends::quoka("").get()));
        theirs = std::max(theirs, error(backends().cpu.get()));
      }
      EXPECT_LT(ours, std::max(theirs, automatic_is_float ? 1e-5 : 1e-4));
    }
}

}  // namespace
