// Which processor and which build produced a number.
#pragma once

#include <quoka/attention/attention.hpp>
#include <quoka/runtime/isa.hpp>
#include <quoka/simd/simd.hpp>

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
#define QUOKA_TEXT_(a, b, c) #a "." #b "." #c
#define QUOKA_TEXT(a, b, c) QUOKA_TEXT_(a, b, c)
  const std::string version =
      QUOKA_TEXT(QUOKA_VERSION_MAJOR, QUOKA_VERSION_MINOR, QUOKA_VERSION_PATCH);
#undef QUOKA_TEXT
#undef QUOKA_TEXT_
#if defined(__clang__)
  const std::string compiler = "clang++ " __clang_version__;
#elif defined(__GNUC__)
  const std::string compiler = "g++ " __VERSION__;
#else
  const std::string compiler = "unknown compiler";
#endif
  std::string text = compiler.substr(0, compiler.find_last_not_of(' ') + 1);
  return text + ", quoka " + version + ", " + quoka::isa() + ", " +
         std::to_string(quoka::simd::lanes) + " lanes";
}

// What attention was computed in, if `asked` was.
inline std::string arithmetic_name(quoka::Arithmetic asked) {
  if (asked == quoka::Arithmetic::single) return "float";
  return quoka::arithmetic_used(asked) == asked ? "16-bit fixed point"
                                                : "float (no 16-bit dot products here)";
}

// A program's command line, as typed.
inline std::string command_line(int argc, char** argv) {
  std::string text;
  for (int i = 0; i < argc; ++i) text.append(i == 0 ? "" : " ").append(argv[i]);
  return text;
}

}  // namespace quoka_examples
