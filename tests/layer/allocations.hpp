// Allocations of this program, operator new's and the library's own: counted, or failing from the
// n-th on. allocation_test.cpp defines what counts them, unless a sanitizer, or a C library with
// other entry points, has the allocator: then none is counted, and none fails.
#pragma once

#include "support/sanitized.hpp"

#include <atomic>
#include <cstddef>
#include <limits>
#include <new>

#if defined(__GLIBC__) && !defined(QUOKA_TEST_SANITIZED)
#define QUOKA_TEST_COUNTS
#endif

namespace quoka_test {

inline std::atomic<bool> counting{false};
inline std::atomic<long> allocations{0};
inline std::atomic<std::size_t> allocated_bytes{0};
inline std::atomic<long> allocations_left{
    std::numeric_limits<long>::max()};  // while they are counted

// Allocations of f(), by any thread.
template <class F>
long allocations_of(F&& f) {
  allocations = 0;
  allocated_bytes = 0;
  counting = true;
  f();
  counting = false;
  return allocations;
}

// Runs f(), of whose allocations all fail behind the first `left`. False where it needed more.
template <class F>
bool has_memory(long left, F&& f) {
  bool whole = true;
  allocations_left = left;
  counting = true;
  try {
    f();
  } catch (const std::bad_alloc&) {
    whole = false;
  }
  counting = false;
  allocations_left = std::numeric_limits<long>::max();
  return whole;
}
// Lets the first allocation of f() fail, then the second, and so on, until one call has all it asks
// for. Returns how many failed.
template <class F>
long run_out_of_memory(F&& f) {
  long failed = 0;
  while (!has_memory(failed, f)) ++failed;
  return failed;
}

}  // namespace quoka_test
