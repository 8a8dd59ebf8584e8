// Uses the selector and the format that check.cmake has added to a copy of the library, as
// CONTRIBUTING.md says: what each promises at its declaration, against naive code.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/layer/kv_cache.hpp>
#include <quoka/methods/all.hpp>
#include <quoka/rows/tensor.hpp>

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <numeric>
#include <string_view>
#include <vector>

namespace {

using quoka::Index;
constexpr Index kv_heads = 2, len = 61, dim = 37, budget = 9;
int failures = 0;

void expect(bool holds, const char* what) {
  if (!holds) std::cout << "does not hold: " << what << '\n', ++failures;
}

// Uniform in (-1, 1) by a multiplicative generator, times a size that differs from row to row.
quoka::Tensor<float> random_rows() {
  quoka::Tensor<float> x(1, kv_heads, len, dim);
  std::uint64_t state = 1;
  for (Index row = 0; row < kv_heads * len; ++row)
    for (Index c = 0; c < dim; ++c) {
      state = state * 48271 % 2147483647;
      x.data()[row * dim + c] = std::ldexp(static_cast<float>(state) / 1073741824.0f - 1.0f,
                                           static_cast<int>(row * 7 % 40) - 20);
    }
  return x;
}

// The positions of the `budget` largest rows of one head, ascending.
std::vector<quoka::Position> largest(const quoka::Tensor<float>& k, Index head) {
  std::vector<double> squares(len);
  for (Index t = 0; t < len; ++t)
    for (Index c = 0; c < dim; ++c)
      squares[static_cast<std::size_t>(t)] += std::pow(static_cast<double>(k(0, head, t, c)), 2);
  std::vector<quoka::Position> order(len);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](quoka::Position a, quoka::Position b) {
    return squares[static_cast<std::size_t>(a)] > squares[static_cast<std::size_t>(b)];
  });
  order.resize(budget);
  std::sort(order.begin(), order.end());
  return order;
}

template <class S>
void check_selector() {
  quoka::Tensor<float> k = random_rows(), q(1, 2 * kv_heads, 5, dim);
  q.setConstant(1.0f);
  for (Index c = 0; c < dim; ++c) k(0, 0, 3, c) = k(0, 1, 4, c) = 0.0f;
  k(0, 1, 4, 1) = std::numeric_limits<float>::infinity();
  quoka::KvCache cache(1, kv_heads, dim, dim);
  cache.append(k, k);
  k(0, 1, 4, 1) = 0.0f;  // an infinite key is chosen last, as a zero key is

  const typename S::Options options{.budget = quoka::Budget::keys(budget)};
  const S selector(options);
  for (const auto& norms : {cache.inverse_norms(), quoka::TensorView<const float, 3>()}) {
    const quoka::Selection kept = selector.select(q, cache.k(), {}, quoka::SerialExecutor{}, norms);
    for (Index head = 0; head < kv_heads; ++head)
      expect(std::ranges::equal(kept.row(0, head), largest(k, head)),
             norms.absent() ? "key_norm keeps the largest keys"
                            : "key_norm keeps the largest keys by the cache's norms");
  }
}

// x as the cache gives it back.
quoka::Tensor<float> kept_in_format(const quoka::Tensor<float>& x) {
  quoka::KvCache cache(1, kv_heads, dim, dim, quoka::i8_pow2_format(), quoka::i8_pow2_format());
  cache.append(x, x);
  quoka::Tensor<float> read(1, kv_heads, len, dim);
  const quoka::Rows v = cache.v();
  for (Index head = 0; head < kv_heads; ++head)
    for (Index t = 0; t < len; ++t)
      v.format().widen(v.row(0, head, t), v.shape(head), &read(0, head, t, 0));
  return read;
}

void check_format() {
  expect(quoka::i8_pow2_format().row_bytes({dim}) == 1 + dim, "bytes of a row");
  quoka::Tensor<float> x = random_rows();
  for (Index c = 0; c < dim; ++c) {
    x(0, 0, 0, c) = static_cast<float>(c) + 0.5f;  // halfway, with 127 the scale is 1
    x(0, 0, 1, c) = c == 5 ? std::numeric_limits<float>::infinity() : 1.0f;
    x(0, 0, 2, c) = 0.0f;
  }
  x(0, 0, 0, 0) = -127.0f;
  const quoka::Tensor<float> read = kept_in_format(x);
  for (Index head = 0; head < kv_heads; ++head)
    for (Index t = 0; t < len; ++t) {
      if (head == 0 && t == 1) continue;
      double most = 0;
      for (Index c = 0; c < dim; ++c)
        most = std::max(most, std::abs(static_cast<double>(x(0, head, t, c))));
      const double scale = most > 0 ? std::exp2(std::ceil(std::log2(most / 127))) : 0;
      bool close = scale / 2 <= most / 127;
      for (Index c = 0; c < dim; ++c)
        close &= std::abs(static_cast<double>(read(0, head, t, c)) -
                          static_cast<double>(x(0, head, t, c))) <= scale / 2;
      expect(close, "i8_pow2 is off by max|x| / 127 at most, and half a scale");
    }
  for (Index c = 1; c < dim; ++c)
    expect(read(0, 0, 0, c) == 2.0f * std::floor((x(0, 0, 0, c) + 1.0f) / 2.0f), "ties to even");
  for (Index c = 0; c < dim; ++c)
    expect(std::isnan(read(0, 0, 1, c)), "a row with an infinity is NaN");
}

}  // namespace

int main() {
  bool listed = false;
  quoka::for_each_selector([&]<class S>(const char* name) {
    if (std::string_view(name) != "key_norm") return;
    listed = true;
    if constexpr (std::is_same_v<S, quoka::KeyNormSelector>) check_selector<S>();
  });
  expect(listed, "AllSelectors has key_norm");
  check_format();
  return failures == 0 ? 0 : 1;
}
