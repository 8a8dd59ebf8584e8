// A fuzzer's input, and what a fuzzer finds.
#pragma once

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

namespace quoka_fuzz {

using Input = std::span<const std::uint8_t>;

// A promise that was broken: nothing catches it.
[[noreturn]] inline void broken(const std::string& what) { throw std::logic_error(what); }

}  // namespace quoka_fuzz
