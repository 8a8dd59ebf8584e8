// Waiting for something that another thread is about to do: a few instructions first, the scheduler then.
#pragma once

#include <quoka/base/version.hpp>

#include <thread>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class Pause {
 public:
  void operator()() {
    if (count_ == spins) return std::this_thread::yield();  // the other one may want this core
    const int hints = ++count_ < 16 ? 1 : 8;
    for (int i = 0; i < hints; ++i) QUOKA_SPIN_HINT();
  }

 private:
  static constexpr int spins = 48;  // some 10 us

  int count_ = 0;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
