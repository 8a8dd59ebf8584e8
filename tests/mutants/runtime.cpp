// Linked into every test program by run.py, which defines QUOKA_MUTANTS: how many there are.
//
//   QUOKA_MUTANT=n            mutant n is alive
//   QUOKA_MUTANT_TRACE=file   none is; a line per test: its name, milliseconds of processor time, the mutants that it
//                             reached
#include "runtime.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <string>

namespace quoka_mutants {

int on[QUOKA_MUTANTS];

namespace {

int alive = -1;
bool seen[QUOKA_MUTANTS];

void watch_all() {
  for (int i = 0; i < QUOKA_MUTANTS; ++i) on[i] = 1, seen[i] = false;
}

// Before anything that the program initialises.
[[gnu::constructor(101)]] void begin() {
  if (std::getenv("QUOKA_MUTANT_TRACE") != nullptr) return watch_all();
  if (const char* const number = std::getenv("QUOKA_MUTANT")) {
    alive = std::atoi(number);
    on[alive] = 1;
  }
}

class Tracer : public testing::EmptyTestEventListener {
 public:
  explicit Tracer(const char* path) : file_(std::fopen(path, "w")) {}

  void OnTestStart(const testing::TestInfo&) override { watch_all(), begun_ = std::clock(); }
  void OnTestEnd(const testing::TestInfo& test) override {
    if (file_ == nullptr || test.result()->Skipped()) return;
    std::fprintf(file_, "%s.%s %d %d", test.test_suite_name(), test.name(), test.result()->Passed() ? 1 : 0,
                 static_cast<int>((std::clock() - begun_) * 1000 / CLOCKS_PER_SEC));
    for (int i = 0; i < QUOKA_MUTANTS; ++i)
      if (seen[i]) std::fprintf(file_, " %d", i);
    std::fprintf(file_, "\n");
    std::fflush(file_);
  }

 private:
  std::FILE* file_;
  std::clock_t begun_ = 0;
};

const bool listens = [] {
  if (const char* const path = std::getenv("QUOKA_MUTANT_TRACE"))
    testing::UnitTest::GetInstance()->listeners().Append(new Tracer(path));
  return true;
}();

}  // namespace

bool hit(int mutant) noexcept {
  if (alive >= 0) return mutant == alive;
  seen[mutant] = true;
  on[mutant] = 0;
  return false;
}

}  // namespace quoka_mutants
