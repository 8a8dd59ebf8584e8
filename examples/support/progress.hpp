// A progress bar on stderr: the part that is done, the time it took, and the time of the rest at
// the same rate. On a terminal it is one line, redrawn at most ten times a second. Elsewhere (a
// file, a pipe, a build log) it is one line per quarter, so at most four.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

namespace quoka_examples {

// Made, updated and destroyed by one thread. Work that costs more later (a dense prefill) should
// count its cost in `total`, not its steps, or the estimate is too short.
class Progress {
 public:
  Progress(std::string label, std::int64_t total)
      : label_(std::move(label)),
        total_(std::max<std::int64_t>(total, 1)),
        terminal_(::isatty(STDERR_FILENO) == 1) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() {
    if (terminal_ && drawn_)
      std::fputc('\n', stderr);  // after an exception too: the message gets its own line
  }

  // done of total, counted from 0.
  void update(std::int64_t done) {
    done = std::clamp<std::int64_t>(done, 0, total_);
    const Clock::time_point now = Clock::now();
    const int quarter =
        static_cast<int>(static_cast<double>(done) / static_cast<double>(total_) * 4.0);
    const bool due =
        terminal_ ? !drawn_ || done == total_ || now - last_ >= std::chrono::milliseconds(100)
                  : quarter > quarter_;
    if (!due) return;
    drawn_ = true;
    last_ = now;
    quarter_ = quarter;
    draw(done, std::chrono::duration<double>(now - start_).count());
  }

 private:
  using Clock = std::chrono::steady_clock;

  static std::string time(double seconds) {
    const auto whole = static_cast<long long>(seconds);
    return whole < 60 ? fmt::format("{:.1f} s", seconds)
                      : fmt::format("{} min {:02} s", whole / 60, whole % 60);
  }

  void draw(std::int64_t done, double elapsed_s) const {
    constexpr int width = 30;
    const double share = static_cast<double>(done) / static_cast<double>(total_);
    const int full = static_cast<int>(share * width);
    const std::string rest =
        done > 0 && done < total_ ? ", " + time(elapsed_s / share - elapsed_s) + " left" : "";
    if (terminal_)  // ESC [ K clears what a longer line left behind
      fmt::print(stderr, "\r{} [{:#<{}}{:.<{}}] {:3.0f} %, {}{}\x1b[K", label_, "", full, "",
                 width - full, share * 100.0, time(elapsed_s), rest);
    else
      fmt::print(stderr, "{} {:3.0f} %, {}{}\n", label_, share * 100.0, time(elapsed_s), rest);
    std::fflush(stderr);
  }

  std::string label_;
  std::int64_t total_;
  bool terminal_;
  bool drawn_ = false;
  int quarter_ = 0;
  Clock::time_point start_ = Clock::now();
  Clock::time_point last_ = start_;
};

}  // namespace quoka_examples
