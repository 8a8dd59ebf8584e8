// A fuzzer's input as a source of choices and numbers: the first bytes decide sizes and options,
// and what follows seeds the data. An input that ends goes on with zeros.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <random>
#include <span>
#include <stdexcept>
#include <string>

namespace quoka_fuzz {

using Input = std::span<const std::uint8_t>;

class Bytes {
 public:
  explicit Bytes(Input input) : input_(input) {}

  std::uint8_t byte() { return at_ < input_.size() ? input_[at_++] : std::uint8_t{0}; }
  // In [least, most].
  std::ptrdiff_t number(std::ptrdiff_t least, std::ptrdiff_t most) {
    const std::ptrdiff_t x = byte() << 8 | byte();
    return least + x % (most - least + 1);
  }
  // Once in n.
  bool seldom(int n) { return byte() % n == 1; }
  template <class T>
  T one_of(std::initializer_list<T> all) {
    return all.begin()[static_cast<std::size_t>(byte()) % all.size()];
  }
  std::mt19937 random() { return std::mt19937(static_cast<std::uint32_t>(byte()) << 8 | byte()); }

 private:
  Input input_;
  std::size_t at_ = 0;
};

// A promise that was broken: nothing catches it.
[[noreturn]] inline void broken(const std::string& what) { throw std::logic_error(what); }

}  // namespace quoka_fuzz
