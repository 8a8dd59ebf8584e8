// The flash attention that examples/bindings/ik_llama puts into ik_llama.cpp, called as ggml's threads call it: every
// number in turn. A tensor is the struct that llama.cpp and ik_llama.cpp share.

#include "support/attention_fixtures.hpp"

#include <ggml.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include <malloc.h>

extern "C" int quoka_flash_attn(ggml_tensor* dst, int ith, int nth);

namespace {

using namespace quoka_test;

constexpr Index dim = 32, v_dim = 64, kv_heads = 3, group = 2, q_heads = kv_heads * group;

ggml_tensor tensor_of(void* data, ggml_type type, Index a, Index b, Index c, Index d) {
  ggml_tensor t{};
  t.type = type, t.data = data;
  t.ne[0] = a, t.ne[1] = b, t.ne[2] = c, t.ne[3] = d;
  t.nb[0] = ggml_type_size(type), t.nb[1] = ggml_row_size(type, a);
  for (int i = 2; i < 4; ++i) t.nb[i] = t.nb[i - 1] * static_cast<std::size_t>(t.ne[i - 1]);
  return t;
}

// Numbers as their type rounds them, and their bytes.
struct Stored {
  Stored(ggml_type of, Index batch, Index heads, Index len, Index row, unsigned seed)
      : type(of), values(batch, heads, len, row) {
    std::vector<float> x(values.data.size());
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (float& one : x) one = normal(random);
    const Index rows = batch * heads * len;
    bytes.resize(ggml_row_size(type, row) * uz(rows));
    ggml_quantize_chunk(type, x.data(), bytes.data(), 0, rows, row, nullptr);
    if (type != GGML_TYPE_F32)
      ggml_get_type_traits(type)->to_float(bytes.data(), x.data(), rows * row);
    std::copy(x.begin(), x.end(), values.data.begin());
  }
  ggml_tensor tensor() {
    return tensor_of(bytes.data(), type, values.dim, values.len, values.heads, values.batch);
  }
  ggml_type type;
  oracle::Tensor values;
  std::vector<std::uint8_t> bytes;
};

struct Call {
  Call(ggml_type type, Index queries, Index cells, Index sequences)
      : q_(GGML_TYPE_F32, sequences, q_heads, queries, dim, 1),
        k_(type, sequences, kv_heads, cells, dim, 2),
        v_(type, sequences, kv_heads, cells, v_dim, 3),
        mask_(uz(queries * cells)),
        out_(uz(v_dim * q_heads * queries * sequences), unwritten) {
    for (Index i = 0; i < queries; ++i)
      for (Index j = 0; j < cells; ++j)
        mask_[uz(i * cells + j)] = ggml_fp32_to_fp16(j > cells - queries + i ? -infinity : 0.0f);
    q = q_.tensor(), k = k_.tensor(), v = v_.tensor();
    mask = tensor_of(mask_.data(), GGML_TYPE_F16, cells, queries, 1, 1);
    sinks = tensor_of(sinks_.data(), GGML_TYPE_F32, q_heads, 1, 1, 1);
    dst = tensor_of(out_.data(), GGML_TYPE_F32, v_dim, q_heads, queries, sequences);
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
    oracle::AttentionOptions options;
    options.scale = 0.2, options.softcap = double{softcap}, options.q_offset = k.ne[1] - q.ne[1];
    if (dst.src[4] != nullptr) options.sinks.assign(sinks_.begin(), sinks_.end());
    const oracle::Tensor expected =
        oracle::attention(q_.values, k_.values, v_.values, nullptr, {}, {}, options).out;
    double worst = 0.0;
    auto at = out_.begin();
    for (Index s = 0; s < dst.ne[3]; ++s)
      for (Index i = 0; i < dst.ne[2]; ++i)
        for (Index h = 0; h < q_heads; ++h)
          for (Index c = 0; c < v_dim; ++c)
            worst = std::max(worst, std::abs(expected.at(s, h, i, c) - double{*at++}));
    return worst;
  }

  ggml_tensor q, k, v, mask, sinks, dst;
  float softcap = 0.0f;
  static constexpr float unwritten = 77.0f;

  const std::vector<float>& out() const { return out_; }

 private:
  Stored q_, k_, v_;
  std::vector<ggml_fp16_t> mask_;
  std::vector<float> out_, sinks_{-1.0f, 0.0f, 1.0f, 2.0f, -2.0f, 0.5f};
};

// Of floats.
double float_bound() { return automatic_splits_floats() ? 1e-4 : 1e-5; }

TEST(IkLlama, ThreadsTogetherComputeAllOfIt) {
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0})
    for (const int threads : {1, 2, 4, 7})
      for (const Index sequences : {1, 2}) {
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

// ggml may start new threads for each graph.
TEST(IkLlama, AThreadsMemoryEndsWithIt) {
  Call call(GGML_TYPE_F16, 33, 70, 1);
  const auto in_new_threads = [&](int count) {
    for (int i = 0; i < count; ++i) std::thread([&] { call.run(1); }).join();
    return mallinfo2().uordblks;
  };
  const std::size_t before = in_new_threads(2);
  EXPECT_LT(in_new_threads(50), before + 50'000);
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
