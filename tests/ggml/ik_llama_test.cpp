// The flash attention that examples/bindings/ik_llama puts into ik_llama.cpp, called as ggml's threads call it: every
// number in turn. The reference is softmax in double; a tensor is the struct that llama.cpp and ik_llama.cpp share.

#include "support/attention_fixtures.hpp"

#include <ggml.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

extern "C" int quoka_flash_attn(ggml_tensor* dst, int ith, int nth);

namespace {

constexpr std::int64_t dim = 32, v_dim = 64, kv_heads = 3, group = 2, q_heads = kv_heads * group;

ggml_tensor tensor(void* data, ggml_type type, std::int64_t a, std::int64_t b, std::int64_t c,
                   std::int64_t d) {
  ggml_tensor t{};
  t.type = type, t.data = data;
  t.ne[0] = a, t.ne[1] = b, t.ne[2] = c, t.ne[3] = d;
  t.nb[0] = ggml_type_size(type), t.nb[1] = ggml_row_size(type, a);
  for (int i = 2; i < 4; ++i) t.nb[i] = t.nb[i - 1] * static_cast<std::size_t>(t.ne[i - 1]);
  return t;
}

// Rows as their type rounds them, and their bytes.
struct Stored {
  Stored(ggml_type type, std::int64_t row, std::int64_t rows, unsigned seed)
      : values(static_cast<std::size_t>(row * rows)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& x : values) x = normal(random);
    bytes.resize(ggml_row_size(type, row) * static_cast<std::size_t>(rows));
    ggml_quantize_chunk(type, values.data(), bytes.data(), 0, rows, row, nullptr);
    if (type == GGML_TYPE_F32)
      std::memcpy(bytes.data(), values.data(), bytes.size());
    else
      ggml_get_type_traits(type)->to_float(bytes.data(), values.data(), row * rows);
  }
  std::vector<float> values;
  std::vector<std::uint8_t> bytes;
};

struct Call {
  Call(ggml_type type, std::int64_t queries, std::int64_t cells, std::int64_t sequences)
      : q_(GGML_TYPE_F32, dim, queries * q_heads * sequences, 1),
        k_(type, dim, cells * kv_heads * sequences, 2),
        v_(type, v_dim, cells * kv_heads * sequences, 3),
        mask_(static_cast<std::size_t>(queries * cells)),
        out_(static_cast<std::size_t>(v_dim * q_heads * queries * sequences), unwritten) {
    for (std::int64_t i = 0; i < queries; ++i)
      for (std::int64_t j = 0; j < cells; ++j)
        mask_[static_cast<std::size_t>(i * cells + j)] = ggml_fp32_to_fp16(
            j > cells - queries + i ? -std::numeric_limits<float>::infinity() : 0.0f);
    q = tensor(q_.bytes.data(), GGML_TYPE_F32, dim, queries, q_heads, sequences);
    k = tensor(k_.bytes.data(), type, dim, cells, kv_heads, sequences);
    v = tensor(v_.bytes.data(), type, v_dim, cells, kv_heads, sequences);
    mask = tensor(mask_.data(), GGML_TYPE_F16, cells, queries, 1, 1);
    sinks = tensor(sinks_.data(), GGML_TYPE_F32, q_heads, 1, 1, 1);
    dst = tensor(out_.data(), GGML_TYPE_F32, v_dim, q_heads, queries, sequences);
    dst.src[0] = &q, dst.src[1] = &k, dst.src[2] = &v, dst.src[3] = &mask;
    set(0.2f, 0.0f, 0.0f);
  }
  void set(float scale, float bias, float cap) {
    const float parameters[] = {scale, bias, cap};
    std::memcpy(dst.op_params, parameters, sizeof parameters);
    softcap = cap;
  }
  // How many of the threads say that they have computed it.
  int run(int threads) {
    int done = 0;
    for (int ith = 0; ith < threads; ++ith) done += quoka_flash_attn(&dst, ith, threads);
    return done;
  }
  double error() const {
    double worst = 0.0;
    for (std::int64_t s = 0; s < dst.ne[3]; ++s)
      for (std::int64_t i = 0; i < dst.ne[2]; ++i)
        for (std::int64_t h = 0; h < q_heads; ++h) worst = std::max(worst, error(s, i, h));
    return worst;
  }

  ggml_tensor q, k, v, mask, sinks, dst;
  float softcap = 0.0f;
  static constexpr float unwritten = 77.0f;

  const std::vector<float>& out() const { return out_; }

 private:
  double error(std::int64_t s, std::int64_t i, std::int64_t h) const {
    const std::int64_t queries = q.ne[1], cells = k.ne[1], kv = h / group;
    const float* const of_q =
        &q_.values[static_cast<std::size_t>(((s * q_heads + h) * queries + i) * dim)];
    double sum =
        dst.src[4] != nullptr ? std::exp(double{sinks_[static_cast<std::size_t>(h)]}) : 0.0;
    std::vector<double> row(static_cast<std::size_t>(v_dim));
    for (std::int64_t j = 0; j <= cells - queries + i; ++j) {
      const float* const of_k =
          &k_.values[static_cast<std::size_t>(((s * kv_heads + kv) * cells + j) * dim)];
      double logit = 0.0;
      for (std::int64_t c = 0; c < dim; ++c) logit += 0.2 * double{of_q[c]} * double{of_k[c]};
      if (softcap != 0.0f) logit = double{softcap} * std::tanh(logit / double{softcap});
      const double weight = std::exp(logit);
      sum += weight;
      for (std::int64_t c = 0; c < v_dim; ++c)
        row[static_cast<std::size_t>(c)] +=
            weight *
            double{
                v_.values[static_cast<std::size_t>(((s * kv_heads + kv) * cells + j) * v_dim + c)]};
    }
    double worst = 0.0;
    for (std::int64_t c = 0; c < v_dim; ++c)
      worst = std::max(
          worst,
          std::abs(
              row[static_cast<std::size_t>(c)] / sum -
              double{
                  out_[static_cast<std::size_t>(((s * queries + i) * q_heads + h) * v_dim + c)]}));
    return worst;
  }

  Stored q_, k_, v_;
  std::vector<ggml_fp16_t> mask_;
  std::vector<float> out_, sinks_{-1.0f, 0.0f, 1.0f, 2.0f, -2.0f, 0.5f};
};

// Of floats.
double float_bound() { return quoka_test::automatic_splits_floats() ? 1e-4 : 1e-5; }

TEST(IkLlama, ThreadsTogetherComputeAllOfIt) {
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0})
    for (const int threads : {1, 2, 4, 7})
      for (const std::int64_t sequences : {1, 2}) {
        Call call(type, 33, 70, sequences);
        ASSERT_EQ(call.run(threads), threads);
        EXPECT_LT(call.error(), type == GGML_TYPE_F32 ? float_bound() : 2e-2)
            << ggml_type_name(type) << ' ' << threads;
      }
}

TEST(IkLlama, SinksAndSoftCapsAreTheOperations) {
  Call call(GGML_TYPE_F32, 20, 50, 1);
  call.dst.src[4] = &call.sinks;
  call.set(0.2f, 0.0f, 2.0f);
  ASSERT_EQ(call.run(2), 2);
  EXPECT_LT(call.error(), float_bound());
}

TEST(IkLlama, LeavesOtherOperations) {
  const auto leaves = [](Call& call) {
    for (int ith = 0; ith < 3; ++ith)
      if (quoka_flash_attn(&call.dst, ith, 3) != 0) return false;
    return std::all_of(call.out().begin(), call.out().end(),
                       [](float x) { return x == Call::unwritten; });
  };
  Call few(GGML_TYPE_F16, 15, 40, 1);
  EXPECT_TRUE(leaves(few));
  Call alibi(GGML_TYPE_F16, 20, 40, 1);
  alibi.set(0.2f, 8.0f, 0.0f);
  EXPECT_TRUE(leaves(alibi));
  Call unmasked(GGML_TYPE_F16, 20, 40, 1);
  unmasked.dst.src[3] = nullptr;
  EXPECT_TRUE(leaves(unmasked));
  Call other(GGML_TYPE_Q8_0, 20, 40, 1);
  other.k.type = GGML_TYPE_Q4_0;
  EXPECT_TRUE(leaves(other));
  Call more(GGML_TYPE_F16, 20, 40, 1);
  more.dst.src[5] = &more.mask;
  EXPECT_TRUE(leaves(more));
}

}  // namespace
