// Which processor and which build produced a number.
#pragma once

#include <quoka/runtime/isa.hpp>
#include <quoka/simd/simd.hpp>
#include <quoka/base/version.hpp>

#include <fmt/format.h>

#include <fstream>
#include <string>

namespace quoka_examples {

// "model name" of the first processor in /proc/cpuinfo, or "unknown CPU".
inline std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const auto colon = line.find(':');
    if (colon != std::string::npos && colon + 2 <= line.size()) return line.substr(colon + 2);
  }
  return "unknown CPU";
}

// For example "g++ 12.2.0, quoka 0.2.0, avx512_fma_f16c_vnni, 16 lanes".
inline std::string build_description() {
#if defined(__clang__)
  std::string compiler = "clang++ " __clang_version__;
#elif defined(__GNUC__)
  std::string compiler = "g++ " __VERSION__;
#else
  std::string compiler = "unknown compiler";
#endif
  compiler.erase(compiler.find_last_not_of(' ') + 1);
  return fmt::format("{}, quoka {}.{}.{}, {}, {} lanes", compiler, QUOKA_VERSION_MAJOR,
                     QUOKA_VERSION_MINOR, QUOKA_VERSION_PATCH, quoka::isa(),
                     int{quoka::simd::lanes});
}

// Both, for the head of what a program prints.
inline std::string machine() { return cpu_name() + "; " + build_description(); }

// A program's command line, as typed.
inline std::string command_line(int argc, char** argv) {
  return fmt::format("{}", fmt::join(argv, argv + argc, " "));
}

}  // namespace quoka_examples
