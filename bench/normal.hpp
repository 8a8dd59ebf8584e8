// Normal numbers: the same on every machine and with every compiler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace quoka_bench {

// Nearly normal, mean 0, variance 1: the sum of four uniform 16-bit numbers.
// std::normal_distribution differs between standard libraries, and takes ten times as long.
class Normal {
 public:
  explicit Normal(std::uint64_t seed) : bits_(seed) {}
  float operator()() {
    const std::uint64_t x = bits_();
    const auto sum =
        static_cast<float>((x & 0xffff) + (x >> 16 & 0xffff) + (x >> 32 & 0xffff) + (x >> 48));
    return (sum - 131070.0f) * (1.7320508f / 65536.0f);
  }

 private:
  std::mt19937_64 bits_;  // its sequence is prescribed by the standard
};

template <class T>
void fill_normal(T* data, std::ptrdiff_t count, std::uint64_t seed) {
  Normal normal(seed);
  for (std::ptrdiff_t i = 0; i < count; ++i) data[i] = static_cast<T>(normal());
}

template <class T>
std::vector<T> normals(std::ptrdiff_t count, std::uint64_t seed) {
  std::vector<T> x(static_cast<std::size_t>(count));
  fill_normal(x.data(), count, seed);
  return x;
}

}  // namespace quoka_bench
