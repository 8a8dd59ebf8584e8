// What the tests share: random tensors, bridges between the library's types and the oracle's,
// strided copies that notice a read or a write beside a row, and a check for refused input.
//
//   Random random(7);                                   // failures below it print "seed 7"
//   const auto k = random.tensor<T>(2, 3, 37, 64);      // [batch, heads, len, dim] of T
//   const oracle::Tensor k_exact = to_oracle(k);        // the stored, that is rounded, values
//   const Strided<T> k_strided(k);                      // [batch, len, heads, dim] and NaNs
//   expect_refused([&] { f(k, -1); }, {"budget", -1});  // std::invalid_argument that says so
#pragma once

#include <gtest/gtest.h>

#include <quoka/kernels/softmax_state.hpp>
#include <quoka/simd/tuning.hpp>
#include <quoka/runtime/thread_pool.hpp>
#include <quoka/views/rows.hpp>
#include <quoka/views/selection.hpp>
#include <quoka/views/tensor.hpp>

#include "support/oracle.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <concepts>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace quoka_test {

using quoka::ExecutorRef;
using quoka::Index;
using quoka::Position;
using quoka::Rows;
using quoka::Selection;
using quoka::SerialExecutor;
using quoka::TensorView;

template <class T>
using Tensor4 = Eigen::Tensor<T, 4, Eigen::RowMajor>;  // [batch, heads, len, dim]
template <class T>
using Tensor3 = Eigen::Tensor<T, 3, Eigen::RowMajor>;  // [batch, heads, len]

inline constexpr float infinity = std::numeric_limits<float>::infinity();
inline constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

using oracle::uz;  // the unsigned subscript that std::vector wants

// ---- storage types ------------------------------------------------------------------------------

// TYPED_TEST_SUITE(Suite, StorageTypes, StorageNames), of which long CI legs leave some out.
using AllStorageTypes = ::testing::Types<float, Eigen::half, Eigen::bfloat16>;
#ifdef QUOKA_TEST_STORAGE
using StorageTypes = ::testing::Types<QUOKA_TEST_STORAGE>;
#else
using StorageTypes = AllStorageTypes;
#endif

struct StorageNames {
  template <class T>
  static std::string GetName(int) {
    if constexpr (std::is_same_v<T, float>) return "float";
    if constexpr (std::is_same_v<T, Eigen::half>) return "half";
    if constexpr (std::is_same_v<T, Eigen::bfloat16>) return "bfloat16";
  }
};

// Largest relative error of rounding a float to T: half a unit in the last place.
template <class T>
inline constexpr double rounding_error = std::is_same_v<T, float>         ? 0x1p-24
                                         : std::is_same_v<T, Eigen::half> ? 0x1p-11
                                                                          : 0x1p-8;

template <class T>
T stored(double x) {
  return static_cast<T>(static_cast<float>(x));
}

// ---- random data --------------------------------------------------------------------------------

// A seeded source of test data, the same on every platform. While it lives, failures print its
// seed; make it a local of the TEST (of a helper, in the order of a stack).
class Random {
 public:
  explicit Random(std::uint64_t seed, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE())
      : engine_(seed), trace_(file, line, "seed " + std::to_string(seed)) {}

  std::uint64_t bits() { return engine_(); }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // [0, 1)
  Index below(Index n) { return static_cast<Index>(bits() % static_cast<std::uint64_t>(n)); }
  // Nearly normal, mean 0 and variance 1: four 16-bit uniforms of one draw, so |x| < 3.5.
  double normal() {
    const std::uint64_t x = bits();
    const std::uint64_t sum =
        (x & 0xffff) + ((x >> 16) & 0xffff) + ((x >> 32) & 0xffff) + (x >> 48);
    return (static_cast<double>(sum) * 0x1p-16 - 2.0) * std::sqrt(3.0);
  }

  // scale times normal values, rounded to T. [batch, heads, len, dim]
  template <class T>
  Tensor4<T> tensor(Index batch, Index heads, Index len, Index dim, double scale = 1.0) {
    Tensor4<T> x(batch, heads, len, dim);
    for (Index i = 0; i < x.size(); ++i) x.data()[i] = stored<T>(scale * normal());
    return x;
  }
  // Normal values. [batch, heads, len]
  Tensor3<float> scores(Index batch, Index heads, Index len) {
    Tensor3<float> x(batch, heads, len);
    for (Index i = 0; i < x.size(); ++i) x.data()[i] = static_cast<float>(normal());
    return x;
  }
  // 0..n-1 in some order.
  std::vector<Index> permutation(Index n) {
    std::vector<Index> order = oracle::range(0, n);
    for (Index i = n - 1; i > 0; --i) std::swap(order[uz(i)], order[uz(below(i + 1))]);
    return order;
  }

 private:
  std::mt19937_64 engine_;
  ::testing::ScopedTrace trace_;
};

// ---- bridges to the oracle ----------------------------------------------------------------------

// The stored values of a view or an Eigen tensor (rank 3: batch 1), as doubles.
template <quoka::TensorLike E>
oracle::Tensor to_oracle(const E& x) {
  const auto view = quoka::view_of(x);
  oracle::Tensor copy(view.batch(), view.heads(), view.len(), view.dim());
  for (Index b = 0; b < view.batch(); ++b)
    for (Index head = 0; head < view.heads(); ++head)
      for (Index i = 0; i < view.len(); ++i)
        for (Index c = 0; c < view.dim(); ++c)
          copy.at(b, head, i, c) = static_cast<double>(static_cast<float>(view.row(b, head, i)[c]));
  return copy;
}

// The same of rows of any format.
inline oracle::Tensor to_oracle(const Rows& x) {
  oracle::Tensor copy(x.batch(), x.heads(), x.len(), x.dim());
  std::vector<float> row(uz(x.dim()));
  for (Index b = 0; b < x.batch(); ++b)
    for (Index head = 0; head < x.heads(); ++head)
      for (Index i = 0; i < x.len(); ++i) {
        x.format().widen(x.row(b, head, i), x.shape(head), row.data());
        for (Index c = 0; c < x.dim(); ++c)
          copy.at(b, head, i, c) = static_cast<double>(row[uz(c)]);
      }
  return copy;
}

// [batch][head][position] of a [batch, heads, len] tensor or view.
inline oracle::Scores to_oracle_scores(TensorView<const float, 3> x) {
  oracle::Scores scores(uz(x.batch()), std::vector<std::vector<double>>(uz(x.heads())));
  for (Index b = 0; b < x.batch(); ++b)
    for (Index head = 0; head < x.heads(); ++head)
      for (Index i = 0; i < x.len(); ++i)
        scores[uz(b)][uz(head)].push_back(static_cast<double>(x.at(b, head, i)));
  return scores;
}

// "All" is spelled out.
inline oracle::Positions to_positions(const Selection& selection) {
  oracle::Positions lists(uz(selection.batch()));
  for (Index b = 0; b < selection.batch(); ++b)
    for (Index head = 0; head < selection.kv_heads(); ++head) {
      const std::vector<Position> list = selection.positions(b, head);
      lists[uz(b)].emplace_back(list.begin(), list.end());
    }
  return lists;
}

inline oracle::Positions to_positions(const Tensor3<Position>& positions) {
  oracle::Positions lists(uz(positions.dimension(0)));
  for (Index b = 0; b < positions.dimension(0); ++b)
    for (Index head = 0; head < positions.dimension(1); ++head) {
      std::vector<Index> list;
      for (Index i = 0; i < positions.dimension(2); ++i) list.push_back(positions(b, head, i));
      lists[uz(b)].push_back(list);
    }
  return lists;
}

// Lists of any lengths.
inline Selection to_selection(const oracle::Positions& lists, Index kv_len) {
  const Index batch = std::ssize(lists), heads = batch > 0 ? std::ssize(lists[0]) : 0;
  std::vector<std::vector<Position>> rows;
  for (const auto& sequence : lists)
    for (const auto& list : sequence) {
      rows.emplace_back();
      for (Index t : list) rows.back().push_back(static_cast<Position>(t));
    }
  return Selection::from_lists(batch, heads, kv_len, rows);
}

// ---- strided copies -----------------------------------------------------------------------------

// A copy of x in [batch, len, heads, dim] order, with `padding` NaNs between the rows and at both
// ends: a kernel that reads beside a row brings NaN in, and padding_intact() tells of a write.
template <class T>
class Strided {
 public:
  Strided(Index batch, Index heads, Index len, Index dim, Index padding = 5)
      : sizes_{batch, heads, len, dim},
        strides_{len * heads * (dim + padding), dim + padding, heads * (dim + padding), 1},
        padding_(padding),
        data_(uz(batch * strides_[0] + padding), stored<T>(std::nan(""))) {}

  template <quoka::TensorLike E>
  explicit Strided(const E& x, Index padding = 5)
      : Strided(quoka::view_of(x).batch(), quoka::view_of(x).heads(), quoka::view_of(x).len(),
                quoka::view_of(x).dim(), padding) {
    const auto from = quoka::view_of(x);
    for (Index b = 0; b < from.batch(); ++b)
      for (Index head = 0; head < from.heads(); ++head)
        for (Index i = 0; i < from.len(); ++i)
          std::copy_n(from.row(b, head, i), from.dim(), view().row(b, head, i));
  }

  TensorView<T> view() { return {data_.data() + padding_, sizes_, strides_}; }
  TensorView<const T> view() const { return {data_.data() + padding_, sizes_, strides_}; }

  bool padding_intact() const {
    const Index row = sizes_[3] + padding_;
    for (Index i = 0; i < std::ssize(data_); ++i)
      if (i % row < padding_ && !std::isnan(static_cast<float>(data_[uz(i)]))) return false;
    return true;
  }

 private:
  std::array<Index, 4> sizes_;    // batch, heads, len, dim
  std::array<Index, 4> strides_;  // of the same axes
  Index padding_;
  std::vector<T> data_;
};

// ---- checks -------------------------------------------------------------------------------------

// Part of an error's message: a text, or a number that stands alone (7 is not found in 17 or 70).
class Fragment {
 public:
  Fragment(const char* text) : text_(text) {}                                           // NOLINT
  Fragment(std::integral auto number) : text_(std::to_string(number)), alone_(true) {}  // NOLINT

  const std::string& text() const { return text_; }
  bool is_in(const std::string& message) const {
    for (auto at = message.find(text_); at != std::string::npos; at = message.find(text_, at + 1))
      if (!alone_ || !(digit(message, at - 1) || digit(message, at + text_.size()))) return true;
    return false;
  }

 private:
  static bool digit(const std::string& s, std::size_t i) {  // npos - or beyond the end - is none
    return i < s.size() && s[i] >= '0' && s[i] <= '9';
  }
  std::string text_;
  bool alone_ = false;
};

// f() throws std::invalid_argument, and its message contains every fragment.
template <class F>
void expect_refused(F&& f, std::initializer_list<Fragment> fragments,
                    const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const ::testing::ScopedTrace trace(file, line, "expect_refused");
  try {
    f();
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::invalid_argument& error) {
    for (const Fragment& fragment : fragments)
      EXPECT_TRUE(fragment.is_in(error.what()))
          << "no '" << fragment.text() << "' in: " << error.what();
  }
}

// Same shape, and the same bits in every element. Signs of zero and payloads of NaN count.
template <quoka::TensorLike A, quoka::TensorLike B>
::testing::AssertionResult same_bits(const A& a, const B& b) {
  static_assert(std::is_same_v<quoka::storage_t<A>, quoka::storage_t<B>>);
  const auto x = quoka::view_of(a);
  const auto y = quoka::view_of(b);
  if (x.sizes() != y.sizes()) return ::testing::AssertionFailure() << "the shapes differ";
  for (Index i = 0; i < x.batch(); ++i)
    for (Index head = 0; head < x.heads(); ++head)
      for (Index n = 0; n < x.len(); ++n)
        for (Index c = 0; c < x.dim(); ++c)
          if (std::memcmp(x.row(i, head, n) + c, y.row(i, head, n) + c,
                          sizeof(quoka::storage_t<A>)) != 0)
            return ::testing::AssertionFailure()
                   << "[" << i << ", " << head << ", " << n << ", " << c
                   << "]: " << static_cast<float>(x.row(i, head, n)[c]) << " and "
                   << static_cast<float>(y.row(i, head, n)[c]);
  return ::testing::AssertionSuccess();
}

// Rows of any format: same shape, same format, and the same bytes in every row.
inline ::testing::AssertionResult same_bits(const Rows& a, const Rows& b) {
  if (a.sizes() != b.sizes()) return ::testing::AssertionFailure() << "the shapes differ";
  if (a.empty()) return ::testing::AssertionSuccess();
  if (&a.format() != &b.format())
    return ::testing::AssertionFailure() << a.format().name << " and " << b.format().name;
  for (Index i = 0; i < a.batch(); ++i)
    for (Index head = 0; head < a.heads(); ++head)
      for (Index n = 0; n < a.len(); ++n)
        if (std::memcmp(a.row(i, head, n), b.row(i, head, n),
                        uz(a.format().row_bytes(a.shape(head)))) != 0)
          return ::testing::AssertionFailure() << "row [" << i << ", " << head << ", " << n << "]";
  return ::testing::AssertionSuccess();
}

// Same shape, and elements that float arithmetic in another order can explain: within two roundings
// to T, and `absolute`.
template <quoka::TensorLike A, quoka::TensorLike B>
::testing::AssertionResult same_up_to_rounding(const A& a, const B& b, double absolute) {
  using T = quoka::storage_t<A>;
  const auto x = quoka::view_of(a);
  const auto y = quoka::view_of(b);
  if (x.sizes() != y.sizes()) return ::testing::AssertionFailure() << "the shapes differ";
  for (Index i = 0; i < x.batch(); ++i)
    for (Index head = 0; head < x.heads(); ++head)
      for (Index n = 0; n < x.len(); ++n)
        for (Index c = 0; c < x.dim(); ++c) {
          const auto p = static_cast<double>(static_cast<float>(x.row(i, head, n)[c]));
          const auto q = static_cast<double>(static_cast<float>(y.row(i, head, n)[c]));
          if (!(std::abs(p - q) <= 2 * rounding_error<T> * std::abs(q) + absolute))
            return ::testing::AssertionFailure() << "[" << i << ", " << head << ", " << n << ", "
                                                 << c << "]: " << p << " and " << q;
        }
  return ::testing::AssertionSuccess();
}

// Rank 3: scores, inverse norms, log-sum-exp.
inline ::testing::AssertionResult same_bits(TensorView<const float, 3> a,
                                            TensorView<const float, 3> b) {
  if (a.sizes() != b.sizes()) return ::testing::AssertionFailure() << "the shapes differ";
  for (Index i = 0; i < a.batch(); ++i)
    for (Index head = 0; head < a.heads(); ++head)
      for (Index n = 0; n < a.len(); ++n)
        if (std::bit_cast<std::uint32_t>(a.at(i, head, n)) !=
            std::bit_cast<std::uint32_t>(b.at(i, head, n)))
          return ::testing::AssertionFailure()
                 << "[" << i << ", " << head << ", " << n << "]: " << a.at(i, head, n) << " and "
                 << b.at(i, head, n);
  return ::testing::AssertionSuccess();
}

// f(executor) on the calling thread and on pools of 1, 2 and 3 workers; failures name the workers.
inline void for_each_executor(const std::function<void(ExecutorRef)>& f) {
  {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, "SerialExecutor");
    f(ExecutorRef(SerialExecutor{}));
  }
  for (int workers : {1, 2, 3}) {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__,
                                       "ThreadPool of " + std::to_string(workers));
    quoka::ThreadPool pool(workers);
    f(ExecutorRef(pool));
  }
}

}  // namespace quoka_test
