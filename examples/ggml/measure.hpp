// What the programs that time something share.
#pragma once

#include "support/median.hpp"

#include <chrono>
#include <ctime>

namespace quoka_ggml {

// Seconds: of the wall's clock, and of all processors together.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
inline double cpu() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

using quoka_examples::median;

}  // namespace quoka_ggml
