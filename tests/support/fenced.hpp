// Memory between two protected pages, if the system has them.
#pragma once

#include <gtest/gtest.h>

#include <quoka/base/index.hpp>

#include <cstddef>
#include <memory>

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace quoka_test {

class Fenced {
 public:
  Fenced() = default;
  explicit Fenced(quoka::Index bytes) {
#if defined(__unix__) || defined(__APPLE__)
    const quoka::Index page = sysconf(_SC_PAGESIZE);
    inner_ = (bytes + page - 1) / page * page;
    const auto size = static_cast<std::size_t>(inner_ + 2 * page);
    void* const all =
        mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(all, MAP_FAILED);
    auto* const first = static_cast<std::byte*>(all);
    memory_ = {first + page, [first, size](std::byte*) { munmap(first, size); }};
    EXPECT_EQ(mprotect(first, static_cast<std::size_t>(page), PROT_NONE), 0);
    EXPECT_EQ(mprotect(end(), static_cast<std::size_t>(page), PROT_NONE), 0);
#else
    inner_ = (bytes + 63) / 64 * 64;
    memory_ = {new std::byte[static_cast<std::size_t>(inner_)], [](std::byte* x) { delete[] x; }};
#endif
  }

  std::byte* begin() const { return memory_.get(); }
  std::byte* end() const { return begin() + inner_; }

 private:
  quoka::Index inner_ = 0;
  std::shared_ptr<std::byte> memory_;
};

}  // namespace quoka_test
