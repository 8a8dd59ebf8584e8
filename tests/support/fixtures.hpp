// Common code of the tests: one way to draw, random tensors, bridges between the library's types and the oracle's, and a
// check for refused input. Rows, masks and lists as a caller may store them are in world.hpp.
//
//   Random random(7);                                   // failures below it print "seed 7"
//   const auto k = random.tensor<T>(2, 3, 37, 64);      // [batch, heads, len, dim] of T
//   const oracle::Tensor k_exact = to_oracle(k);        // the stored, that is rounded, values
//   expect_refused([&] { f(k, -1); }, {"budget", -1});  // std::invalid_argument that says so
#pragma once

#include <gtest/gtest.h>

#include <quoka/kernels/softmax_state.hpp>
#include <quoka/rows/logit_options.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/rows/selection.hpp>
#include <quoka/rows/tensor.hpp>
#include <quoka/runtime/thread_pool.hpp>
#include <quoka/select/options.hpp>
#include <quoka/kernels/kernels.hpp>

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
#include <map>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace quoka_test {

using quoka::Budget;
using quoka::ExecutorRef;
using quoka::Index;
using quoka::LogitOptions;
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

using oracle::uz;  // the unsigned subscript of std::vector

// ---- storage types ------------------------------------------------------------------------------

// Rows are packed into floats before anything else looks at them: most tests need one type,
// Element, and those of the border run over all, by for_each_storage. Long CI legs name their own.
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

namespace detail {
template <class F, class... T>
void for_each_of(F& f, ::testing::Types<T...>) {
  const auto call = [&]<class One>() {
    const ::testing::ScopedTrace trace(__FILE__, __LINE__, StorageNames::GetName<One>(0));
    f.template operator()<One>();
  };
  (call.template operator()<T>(), ...);
}
template <class First, class... Others>
First first_of(::testing::Types<First, Others...>);
}  // namespace detail

using Element = decltype(detail::first_of(StorageTypes{}));

// f.operator()<T>() for each T; failures name it.
template <class Types = StorageTypes, class F>
void for_each_storage(F&& f) {
  detail::for_each_of(f, Types{});
}

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
                  int line = __builtin_LINE());
  // A draw for each byte, as a fuzzer chose them; behind the last one those of a seed.
  explicit Random(std::span<const std::uint8_t> bytes, const char* file = __builtin_FILE(),
                  int line = __builtin_LINE());

  // The draws of a seed, some of them replaced: the simplest draw is 0.
  Random(std::uint64_t seed, const std::map<Index, std::uint64_t>& replaced,
         const char* file = __builtin_FILE(), int line = __builtin_LINE());

  // The same draws from here on.
  Random(const Random& from, const char* file = __builtin_FILE(), int line = __builtin_LINE());

  std::uint64_t bits();
  double uniform();  // [0, 1)
  Index below(Index n);
  bool seldom(Index n) { return below(n) == n - 1; }  // one time in n
  bool chance(double p) { return uniform() >= 1.0 - p; }
  template <class... T>
  auto one_of(T... x) {  // the simplest first
    const std::common_type_t<T...> all[] = {x...};
    return all[below(std::ssize(all))];
  }
  template <class T, std::size_t n>
  T one_of(const T (&list)[n]) {
    return list[below(static_cast<Index>(n))];
  }
  // Nearly normal, mean 0 and variance 1: four 16-bit uniforms of one draw, so |x| < 3.5.
  double normal();

  // scale times normal values, rounded to T. [batch, heads, len, dim]
  template <class T>
  Tensor4<T> tensor(Index batch, Index heads, Index len, Index dim, double scale = 1.0);
  // Normal values. [batch, heads, len]
  Tensor3<float> scores(Index batch, Index heads, Index len);
  // 0..n-1 in some order.
  std::vector<Index> permutation(Index n);
  // `count` of them, ascending.
  std::vector<Index> some_of(Index n, Index count);
  Index drawn() const { return drawn_; }

 private:
  std::span<const std::uint8_t> bytes_;
  std::mt19937_64 engine_;
  std::map<Index, std::uint64_t> replaced_;
  Index drawn_ = 0;
  ::testing::ScopedTrace trace_;
};

// f(random, seed) for the seeds 0, 1, ...; QUOKA_NAME_SEED=n runs that one alone, QUOKA_NAME_CASES=n this many in place of
// the usual number, QUOKA_TIMES=n n times the usual number in every suite, where n may be .3. A seed that fails is written
// to stderr with its failures, and one that crashes, too. Then it is shrunk for a minute at most: as many of its draws as
// possible become 0, the simplest value, as long as it still fails. It runs once more, which prints its failures, and no
// other seed runs.
// QUOKA_REPLACED=n tries n replacements at most, in place of 300.
// `costs`: one draw of this test takes as long as this many of others that share the name. True if at least the usual
// number ran: what a test counts over all of them is complete.
bool for_each_draw(const std::string& name, Index usual,
                   const std::function<void(Random& random, std::uint64_t seed)>& f,
                   Index costs = 1);
// The same by the name DRAW, which tests without one of their own share.
bool for_each_draw(Index usual, const std::function<void(Random& random)>& f);
// Has this draw failed, or this test? In place of ::testing::Test::HasFailure(), which does not know of draws whose failures
// are not printed.
bool has_failed();

// ---- bridges to the oracle ----------------------------------------------------------------------

// The numbers of rows, of a view or of an Eigen tensor (rank 3: batch 1), as doubles.
oracle::Tensor to_oracle(const Rows& x);
template <quoka::TensorLike E>
oracle::Tensor to_oracle(const E& x) {
  return to_oracle(Rows(quoka::view_of(x)));
}

// [batch][head][position] of a [batch, heads, len] tensor or view.
oracle::Scores to_oracle_scores(TensorView<const float, 3> x);

// "All" is spelled out.
oracle::Positions to_positions(const Selection& selection);

oracle::Positions to_positions(const Tensor3<Position>& positions);

// Lists of any lengths.
Selection to_selection(const oracle::Positions& lists, Index kv_len);

// The rows [begin, begin + n) of x, as T.
template <class T>
Tensor4<T> rows(const Tensor4<float>& x, Index begin, Index n) {
  Tensor4<T> part(x.dimension(0), x.dimension(1), n, x.dimension(3));
  const Index dim = part.dimension(3), heads = part.dimension(0) * part.dimension(1);
  T* to = part.data();
  for (Index head = 0; head < heads; ++head) {
    const float* const from = x.data() + (head * x.dimension(2) + begin) * dim;
    to =
        std::transform(from, from + n * dim, to, [](float value) { return static_cast<T>(value); });
  }
  return part;
}

// ---- checks -------------------------------------------------------------------------------------

// Part of an error's message: a text, or a number that stands alone (7 is not found in 17 or 70).
class Fragment {
 public:
  Fragment(const char* text) : text_(text) {}                                           // NOLINT
  Fragment(std::string text) : text_(std::move(text)) {}                                // NOLINT
  Fragment(std::integral auto number) : text_(std::to_string(number)), alone_(true) {}  // NOLINT

  const std::string& text() const { return text_; }
  bool is_in(const std::string& message) const;

 private:
  std::string text_;
  bool alone_ = false;
};

// f() throws std::invalid_argument, and its message contains every fragment.
void check_refusal(const std::string* message, const std::vector<Fragment>& fragments,
                   const char* file, int line);
template <class F>
void expect_refused(F&& f, const std::vector<Fragment>& fragments,
                    const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  try {
    f();
    check_refusal(nullptr, fragments, file, line);
  } catch (const std::invalid_argument& error) {
    const std::string message = error.what();
    check_refusal(&message, fragments, file, line);
  }
}

// Rows, views or Eigen tensors (rank 3 of floats: scores, inverse norms, log-sum-exp): same shape, same format, and the same
// bytes in every row. Signs of zero and payloads of NaN count.
::testing::AssertionResult same_bits(const Rows& a, const Rows& b);
::testing::AssertionResult same_bits(TensorView<const float, 3> a, TensorView<const float, 3> b);
template <quoka::TensorLike A, quoka::TensorLike B>
::testing::AssertionResult same_bits(const A& a, const B& b) {
  return same_bits(Rows(quoka::view_of(a)), Rows(quoka::view_of(b)));
}

// f(executor) on the calling thread and on pools of 1, 2 and 3 workers; failures name the workers.
void for_each_executor(const std::function<void(ExecutorRef)>& f);

}  // namespace quoka_test
