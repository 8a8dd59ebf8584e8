// Clocks, in seconds.
#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <ctime>
#include <utility>
#include <vector>

namespace quoka_examples {

inline double wall_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
// The calling thread's CPU time if the system gives it, so that waiting for a core that another
// process holds does not count; else the wall clock.
inline double thread_seconds() {
#if defined(CLOCK_THREAD_CPUTIME_ID)
  timespec t{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + 1e-9 * static_cast<double>(t.tv_nsec);
#else
  return wall_seconds();
#endif
}
// CPU time of all threads of this process.
inline double process_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

// The time of f() by one of these clocks.
template <class F>
double seconds_of(F&& f, double (*clock)() = wall_seconds) {
  const double start = clock();
  f();
  return clock() - start;
}

// seconds[i][round] = timed(i) of `count` works that take turns, another one first in each round. A
// machine that slows down slows all of them, and ratios are taken within a round. The first round
// warms up and is not counted. progress(rounds done, that one too) is called after each.
template <class Timed, class Progress>
std::vector<std::vector<double>> time_in_turns(std::size_t count, int rounds, Timed&& timed,
                                               Progress&& progress) {
  std::vector<std::vector<double>> seconds(count);
  for (int round = 0; round <= rounds; ++round) {
    for (std::size_t turn = 0; turn < count; ++turn) {
      const std::size_t i = (turn + static_cast<std::size_t>(round)) % count;
      const double taken = timed(i);
      if (round > 0) seconds[i].push_back(taken);
    }
    progress(round + 1);
  }
  return seconds;
}
template <class Timed>
std::vector<std::vector<double>> time_in_turns(std::size_t count, int rounds, Timed&& timed) {
  return time_in_turns(count, rounds, timed, [](int) {});
}

class Stopwatch {
 public:
  // Since it was made, or since the last lap.
  double seconds() const { return wall_seconds() - start_; }
  double lap() {
    const double now = wall_seconds();
    return now - std::exchange(start_, now);
  }

 private:
  double start_ = wall_seconds();
};

}  // namespace quoka_examples
