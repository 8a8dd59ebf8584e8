#include "support/fixtures.hpp"

#include <gtest/gtest-spi.h>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <optional>
#include <sstream>

#if defined(__unix__) || defined(__APPLE__)
#include <signal.h>
#include <unistd.h>
#endif

namespace quoka_test {

// ---- random data --------------------------------------------------------------------------------

Random::Random(std::uint64_t seed, const char* file, int line)
    : engine_(seed), trace_(file, line, "seed " + std::to_string(seed)) {}

Random::Random(std::span<const std::uint8_t> bytes, const char* file, int line)
    : bytes_(bytes), engine_(bytes.size()), trace_(file, line, "a fuzzer's bytes") {}

Random::Random(std::uint64_t seed, const std::map<Index, std::uint64_t>& replaced, const char* file,
               int line)
    : Random(seed, file, line) {
  replaced_ = replaced;
}

Random::Random(const Random& from, const char* file, int line)
    : bytes_(from.bytes_),
      engine_(from.engine_),
      replaced_(from.replaced_),
      drawn_(from.drawn_),
      trace_(file, line, "the same draws again") {}

std::uint64_t Random::bits() {
  if (bytes_.empty()) {
    const std::uint64_t usual = engine_();
    const auto other = replaced_.find(drawn_++);
    return other != replaced_.end() ? other->second : usual;
  }
  const std::uint64_t byte = bytes_.front();
  bytes_ = bytes_.subspan(1);
  return byte * 0x0101010101010101u;
}
double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
Index Random::below(Index n) { return static_cast<Index>(bits() % static_cast<std::uint64_t>(n)); }

double Random::normal() {
  const std::uint64_t x = bits();
  const std::uint64_t sum = (x & 0xffff) + ((x >> 16) & 0xffff) + ((x >> 32) & 0xffff) + (x >> 48);
  return (static_cast<double>(sum) * 0x1p-16 - 2.0) * std::sqrt(3.0);
}

template <class T>
Tensor4<T> Random::tensor(Index batch, Index heads, Index len, Index dim, double scale) {
  Tensor4<T> x(batch, heads, len, dim);
  for (Index i = 0; i < x.size(); ++i) x.data()[i] = stored<T>(scale * normal());
  return x;
}

Tensor3<float> Random::scores(Index batch, Index heads, Index len) {
  Tensor3<float> x(batch, heads, len);
  for (Index i = 0; i < x.size(); ++i) x.data()[i] = static_cast<float>(normal());
  return x;
}

std::vector<Index> Random::permutation(Index n) {
  std::vector<Index> order = oracle::range(0, n);
  for (Index i = n - 1; i > 0; --i) std::swap(order[uz(i)], order[uz(below(i + 1))]);
  return order;
}

std::vector<Index> Random::some_of(Index n, Index count) {
  std::vector<Index> some = permutation(n);
  some.resize(uz(count));
  std::sort(some.begin(), some.end());
  return some;
}

namespace {

const ::testing::TestPartResultArray* quiet_results =
    nullptr;  // of a draw whose failures are not printed

Index asked_for(const std::string& variable, Index usual) {
  const char* const text = std::getenv(variable.c_str());
  return text != nullptr ? std::atol(text) : usual;
}

// While it lives, a crash says what was drawn before it goes on.
class SaysWhatCrashes {
 public:
#if defined(__unix__) || defined(__APPLE__)
  explicit SaysWhatCrashes(const std::string& what) {
    text_ = what;
    struct sigaction action = {};
    action.sa_handler = [](int signal) {
      [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text_.data(), text_.size());
      for (std::size_t i = 0; i < std::size(signals); ++i)
        if (signals[i] == signal) ::sigaction(signal, &before_[i], nullptr);  // which comes next
    };
    for (std::size_t i = 0; i < std::size(signals); ++i)
      ::sigaction(signals[i], &action, &before_[i]);
  }
  ~SaysWhatCrashes() {
    for (std::size_t i = 0; i < std::size(signals); ++i)
      ::sigaction(signals[i], &before_[i], nullptr);
  }

 private:
  static constexpr int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT};
  static inline struct sigaction before_[std::size(signals)];
  static inline std::string text_;
#else
  explicit SaysWhatCrashes(const std::string&) {}
#endif
};

}  // namespace

bool has_failed() {
  if (quiet_results == nullptr) return ::testing::Test::HasFailure();
  for (int i = 0; i < quiet_results->size(); ++i)
    if (quiet_results->GetTestPartResult(i).failed()) return true;
  return false;
}

bool for_each_draw(const std::string& name, Index usual,
                   const std::function<void(Random& random, std::uint64_t seed)>& f, Index costs) {
  using Replaced = std::map<Index, std::uint64_t>;
  const auto run = [&](std::uint64_t seed, const Replaced& replaced) {
    Random random(seed, replaced);
    const SaysWhatCrashes crash("QUOKA_" + name + "_SEED=" + std::to_string(seed) + " crashes" +
                                (replaced.empty() ? "" : " with simpler draws") + "\n");
    try {
      f(random, seed);
    } catch (const std::exception& error) {
      ADD_FAILURE() << "throws " << error.what();
    }
    return random.drawn();
  };
  struct FailedRun {
    Index drawn;  // numbers
    std::string messages;
  };
  const auto failure_of = [&](std::uint64_t seed,
                              const Replaced& replaced) -> std::optional<FailedRun> {
    using Reporter = ::testing::ScopedFakeTestPartResultReporter;
    ::testing::TestPartResultArray results;
    const Reporter quiet(Reporter::INTERCEPT_ALL_THREADS, &results);
    quiet_results = &results;
    const Index drawn = run(seed, replaced);
    const bool failed = has_failed();
    quiet_results = nullptr;
    if (!failed) return {};
    std::ostringstream messages;
    for (int i = 0; i < results.size(); ++i) messages << results.GetTestPartResult(i);
    return FailedRun{drawn, messages.str()};
  };
  const Index only = asked_for("QUOKA_" + name + "_SEED", -1);
  const char* const text = std::getenv("QUOKA_TIMES");
  const double times = text != nullptr ? std::atof(text) : 1.0;
  const Index wanted = costs * static_cast<Index>(std::ceil(static_cast<double>(usual) * times));
  const Index end = only >= 0 ? only + 1 : asked_for("QUOKA_" + name + "_CASES", wanted) / costs;
  for (Index i = std::max<Index>(only, 0); i < end; ++i) {
    const auto seed = static_cast<std::uint64_t>(i);
    const std::optional<FailedRun> first = failure_of(seed, {});
    if (!first) continue;
    const std::string asked = "QUOKA_" + name + "_SEED=" + std::to_string(i);
    // Said at once: a simpler draw may crash, or take until the test is killed.
    std::cerr << asked << " fails. Now with simpler draws; as it is:\n"
              << first->messages << std::endl;
    const Index most = asked_for("QUOKA_REPLACED", 300);  // each costs a run
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    Replaced replaced;
    Index drawn = first->drawn;
    for (Index at = 0; at < std::min(drawn, most) && std::chrono::steady_clock::now() < until;
         ++at) {
      Replaced simpler = replaced;
      simpler[at] = 0;
      if (const auto still = failure_of(seed, simpler)) replaced = simpler, drawn = still->drawn;
    }
    const ::testing::ScopedTrace trace(
        __FILE__, __LINE__,
        asked + ", with " + std::to_string(replaced.size()) + " draws replaced by 0");
    run(seed, replaced);
    if (!::testing::Test::HasFailure())
      ADD_FAILURE() << "it failed before, and does not now. Without replaced draws it said:\n"
                    << first->messages;
    return false;
  }
  return only < 0 && end >= usual;
}

bool for_each_draw(Index usual, const std::function<void(Random& random)>& f) {
  return for_each_draw("DRAW", usual, [&](Random& random, std::uint64_t) { f(random); });
}

// ---- bridges to the oracle ----------------------------------------------------------------------

oracle::Tensor to_oracle(const Rows& x) {
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

oracle::Scores to_oracle_scores(TensorView<const float, 3> x) {
  oracle::Scores scores(uz(x.batch()), std::vector<std::vector<double>>(uz(x.heads())));
  for (Index b = 0; b < x.batch(); ++b)
    for (Index head = 0; head < x.heads(); ++head)
      for (Index i = 0; i < x.len(); ++i)
        scores[uz(b)][uz(head)].push_back(static_cast<double>(x.at(b, head, i)));
  return scores;
}

oracle::Positions to_positions(const Selection& selection) {
  oracle::Positions lists(uz(selection.batch()));
  for (Index b = 0; b < selection.batch(); ++b)
    for (Index head = 0; head < selection.heads(); ++head) {
      const std::vector<Position> list = selection.positions(b, head);
      lists[uz(b)].emplace_back(list.begin(), list.end());
    }
  return lists;
}

oracle::Positions to_positions(const Tensor3<Position>& positions) {
  oracle::Positions lists(uz(positions.dimension(0)));
  for (Index b = 0; b < positions.dimension(0); ++b)
    for (Index head = 0; head < positions.dimension(1); ++head) {
      std::vector<Index> list;
      for (Index i = 0; i < positions.dimension(2); ++i) list.push_back(positions(b, head, i));
      lists[uz(b)].push_back(list);
    }
  return lists;
}

Selection to_selection(const oracle::Positions& lists, Index kv_len) {
  const Index batch = std::ssize(lists), heads = batch > 0 ? std::ssize(lists[0]) : 0;
  std::vector<std::vector<Position>> rows;
  for (const auto& sequence : lists)
    for (const auto& list : sequence) {
      rows.emplace_back();
      for (Index t : list) rows.back().push_back(static_cast<Position>(t));
    }
  return Selection::from_lists(batch, heads, kv_len, rows);
}

// ---- checks -------------------------------------------------------------------------------------

bool Fragment::is_in(const std::string& message) const {
  const auto digit = [&](std::size_t i) {  // npos - or beyond the end - is none
    return i < message.size() && message[i] >= '0' && message[i] <= '9';
  };
  for (auto at = message.find(text_); at != std::string::npos; at = message.find(text_, at + 1))
    if (!alone_ || !(digit(at - 1) || digit(at + text_.size()))) return true;
  return false;
}

void check_refusal(const std::string* message, const std::vector<Fragment>& fragments,
                   const char* file, int line) {
  if (message == nullptr) {
    ADD_FAILURE_AT(file, line) << "expect_refused: nothing was thrown";
    return;
  }
  for (const Fragment& fragment : fragments)
    if (!fragment.is_in(*message))
      ADD_FAILURE_AT(file, line) << "expect_refused: no '" << fragment.text()
                                 << "' in: " << *message;
}

::testing::AssertionResult same_bits(const Rows& a, const Rows& b) {
  if (a.sizes() != b.sizes()) return ::testing::AssertionFailure() << "the shapes differ";
  if (a.empty()) return ::testing::AssertionSuccess();
  if (&a.format() != &b.format())
    return ::testing::AssertionFailure() << a.format().name << " and " << b.format().name;
  std::vector<float> x(uz(a.dim())), y = x;
  for (Index i = 0; i < a.batch(); ++i)
    for (Index head = 0; head < a.heads(); ++head)
      for (Index n = 0; n < a.len(); ++n) {
        const quoka::ConstRow p = a.row(i, head, n), q = b.row(i, head, n);
        if (std::memcmp(p, q, uz(a.format().row_bytes(a.shape(head)))) == 0) continue;
        a.format().widen(p, a.shape(head), x.data()), b.format().widen(q, b.shape(head), y.data());
        const auto [left, right] =
            std::mismatch(x.begin(), x.end(), y.begin(), [](float u, float v) {
              return std::bit_cast<std::uint32_t>(u) == std::bit_cast<std::uint32_t>(v);
            });
        auto failure = ::testing::AssertionFailure()
                       << "row [" << i << ", " << head << ", " << n << "]";
        if (left != x.end())
          failure << ", channel " << left - x.begin() << ": " << *left << " and " << *right;
        return failure;
      }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult same_bits(TensorView<const float, 3> a, TensorView<const float, 3> b) {
  const auto rows = [](const TensorView<const float, 3>& x) {
    const auto& steps = x.strides();
    return Rows(reinterpret_cast<const std::byte*>(x.data()), quoka::float_format(),
                {x.batch(), x.heads(), x.len(), 1}, {steps[0] * 4, steps[1] * 4, steps[2] * 4});
  };
  return same_bits(rows(a), rows(b));
}

void for_each_executor(const std::function<void(ExecutorRef)>& f) {
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

// ---- for every storage type ---------------------------------------------------------------------

#define QUOKA_TEST_INSTANTIATE(T) \
  template Tensor4<T> Random::tensor<T>(Index, Index, Index, Index, double);
QUOKA_TEST_INSTANTIATE(float)
QUOKA_TEST_INSTANTIATE(Eigen::half)
QUOKA_TEST_INSTANTIATE(Eigen::bfloat16)
#undef QUOKA_TEST_INSTANTIATE

}  // namespace quoka_test
