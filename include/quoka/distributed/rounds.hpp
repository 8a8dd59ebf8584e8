// Calls that end on all ranks, or on none: what keeps a fault of one rank from being a deadlock.
//
//   rounds.call([&] {
//     ...                                          // this rank's own work; may throw
//     rounds.agree("attend", {{"q_len", n}, ...});  // all are here, and say the same numbers
//     ...                                          // communication that cannot throw by itself
//   });
//
// Each agree() is an allgather of header_bytes from each rank: what it is about to do, the numbers, and
// whether it still can. call() ends with one of its own. A rank that throws reaches the next agree() all
// the same, from call(), and says so there; then its text is broadcast and every rank throws RankError.
// Numbers that differ end the call likewise, and so do Settings: their hash is among the numbers, and
// where it differs they are compared one by one. A communicator's own exception passes through.
#pragma once

#include <quoka/distributed/communicator.hpp>
#include <quoka/base/buffer.hpp>

#include <array>
#include <bit>
#include <concepts>
#include <exception>
#include <initializer_list>
#include <string>
#include <type_traits>
#include <vector>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// A number with a name, for comparison.
struct Named {
  const char* name;
  std::int64_t bits;
  bool is_real = false;  // bits of a double

  Named() = default;
  Named(const char* name_in, std::integral auto value)
      : name(name_in), bits(static_cast<std::int64_t>(value)) {}
  Named(const char* name_in, std::floating_point auto value)
      : name(name_in),
        bits(std::bit_cast<std::int64_t>(static_cast<double>(value))),
        is_real(true) {}
  template <class E>
  requires std::is_enum_v<E> Named(const char* name_in, E value)
      : Named(name_in, static_cast<std::int64_t>(value)) {}
};

// What every rank was made with, and does not change. Names are copied: a scorer may make them up.
class Settings {
 public:
  static constexpr std::size_t most = 20;

  // Throws std::invalid_argument for more than `most` of them.
  void add(const Named& setting);
  // Of all of them, names included; and of the names alone.
  std::int64_t hash() const { return hash_; }
  std::int64_t hash_of_names() const { return hash_of_names_; }
  std::size_t size() const { return names_.size(); }
  // Good as long as this object.
  Named operator[](std::size_t i) const {
    Named setting = numbers_[i];
    setting.name = names_[i].c_str();
    return setting;
  }

 private:
  std::vector<std::string> names_;
  std::vector<Named> numbers_;
  std::int64_t hash_ = 0, hash_of_names_ = 0;
};

class Rounds {
 public:
  static constexpr std::size_t max_numbers = 10;
  struct Header {
    std::int64_t failed = 0;
    std::int64_t step = 0;
    std::int64_t settings = 0;
    std::array<std::int64_t, max_numbers> values{};
  };
  static constexpr Index header_bytes = Index{sizeof(Header)};
  static constexpr Index text_bytes = 256;

  explicit Rounds(CommunicatorRef communicator);

  // Throws RankError on all ranks where one failed, is at another step, or has another number or setting.
  void agree(const char* step, std::initializer_list<Named> numbers = {},
             const Settings* settings = nullptr);

  // Communication after agree(): f(communicator).
  template <class F>
  void exchange(F&& f) {
    inside_ = true;
    f(communicator_);
    inside_ = false;
  }

  template <class F>
  void call(F&& f) {
    inside_ = false;
    try {
      f();
      agree("end");
    } catch (const RankError&) {
      throw;
    } catch (const std::exception& error) {
      if (inside_) throw;
      report(error.what());
    } catch (...) {
      if (inside_) throw;
      report("an exception of an unknown type");
    }
  }

  int rank() const { return communicator_.rank(); }
  int ranks() const { return communicator_.ranks(); }

 private:
  [[noreturn]] void report(const char* text);
  void gather(const Header& mine);
  void gather(const char* step, std::span<const Named> numbers, const Settings* settings);
  void compare(std::span<const Named> numbers);
  [[noreturn]] void compare_settings(const Settings& settings);
  [[noreturn]] void fail(int rank, const char* text);

  CommunicatorRef communicator_;
  Buffer<Header> headers_;  // [ranks]
  bool inside_ = false;     // in the communicator
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/distributed/rounds_impl.hpp>
#endif
