// Long contexts: half a million keys, and strides beyond 32 bits.

#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/select/quoka.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <sys/mman.h>

namespace {

using namespace quoka_test;

TEST(LongContext, HalfAMillionKeys) {
  using T = Eigen::half;
  Random random(1);
  const Index kv_len = 524288 + 77, dim = 8;
  const quoka::LayerShape shape{.q_heads = 4,
                                .kv_heads = 2,
                                .head_dim = dim,
                                .k_format = &quoka::format_of<T>(),
                                .v_format = &quoka::format_of<T>()};
  const auto k = random.tensor<T>(1, 2, kv_len, dim), v = random.tensor<T>(1, 2, kv_len, dim);
  quoka::ChunkedPrefill<quoka::DenseSelector> dense(shape);
  quoka::ChunkedPrefill<quoka::QuokaSelector> sketched(
      shape, {.budget = Budget::keys(1000), .sketch = quoka::Sketch::on}),
      exact(shape, {.budget = Budget::keys(1000), .sketch = quoka::Sketch::off});
  dense.append(k, v), sketched.append(k, v), exact.append(k, v);
  ASSERT_EQ(sketched.kv_len(), kv_len);

  const auto chunk = random.tensor<T>(1, 4, 37, dim);
  EXPECT_EQ(sketched.select(chunk), exact.select(chunk));
  const Selection& keep = sketched.selection();
  for (const Index head : {0, 1}) EXPECT_EQ(keep.count(0, head), 1000);
  EXPECT_GT(keep.positions(0, 0).back(), 400000) << "keys beyond the first ones are found";

  Inputs<T> in{random.tensor<T>(1, 4, 1, dim), k, v, random.tensor<T>(1, 2, 1, dim),
               random.tensor<T>(1, 2, 1, dim)};
  Output<T> output = unwritten<T>(in.q, dim);
  quoka::ThreadPool pool(2);
  dense.forward(in.q, in.k, in.v, {output.out, output.lse}, pool);
  expect_close(output, oracle_attend(in), in);
}

// Rows 2^31 elements apart, in memory that is never touched but there.
TEST(LongContext, StridesBeyond32Bits) {
  using T = Eigen::half;
  constexpr Index stride = (Index{1} << 31) + 64, rows = 3, dim = 16;
  const std::size_t bytes = static_cast<std::size_t>((2 * rows + 1) * stride) * sizeof(T);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no address space of " << bytes << " bytes";
  T* const base = static_cast<T*>(memory);
  Random random(2);
  const auto in = random_inputs<T>(
      random, {.q_heads = 2, .head_dim = dim, .v_dim = dim, .q_len = 1, .kv_len = rows});
  for (Index i = 0; i < rows; ++i) {
    std::copy_n(&in.past_k(0, 0, i, 0), dim, base + i * stride);
    std::copy_n(&in.past_v(0, 0, i, 0), dim, base + (rows + i) * stride);
  }
  const auto far = [&](Index first) {
    return TensorView<const T>(base + first * stride, {1, 1, rows, dim},
                               {rows * stride, rows * stride, stride, 1});
  };
  const auto expected = attend(in);
  Output<T> output = unwritten<T>(in.q, dim);
  quoka::attention(in.q, {far(0), far(rows)}, {in.k, in.v}, {output.out, output.lse});
  expect_same(output, expected);
  const quoka::QuokaSelector selector({.budget = Budget::keys(2)});
  EXPECT_EQ(selector.select(in.q, far(0), {}),
            selector.select(in.q, TensorView<const T>(in.past_k), {}));
  ::munmap(memory, bytes);
}

}  // namespace
