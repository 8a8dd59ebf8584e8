// What the backend did, over all contexts of a process: QUOKA_STATS=1 prints it at the end.
#pragma once

#include "support/clock.hpp"

#include <quoka/base/index.hpp>

#include <cstdio>
#include <map>
#include <mutex>
#include <string>

namespace quoka_ggml {

using quoka::Index, quoka_examples::Stopwatch;

inline void say(const std::string& what) { std::fprintf(stderr, "quoka: %s\n", what.c_str()); }

// One call, or a sum of them.
struct Work {
  Index calls = 0, queries = 0, sequences = 0;
  double seen = 0, attended = 0;                         // past keys, summed over queries
  double mask = 0, convert = 0, select = 0, attend = 0;  // seconds

  void operator+=(const Work& x) {
    calls += x.calls, queries += x.queries, sequences += x.sequences;
    seen += x.seen, attended += x.attended;
    mask += x.mask, convert += x.convert, select += x.select, attend += x.attend;
  }
};

class Stats {
 public:
  bool print = false;

  ~Stats() {
    if (print) table();
  }
  void add(const Work& work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    (work.queries == work.sequences ? tokens_ : chunks_) += work;
  }
  // An operation that was left to the CPU backend. Said at the end, or (warn) when it comes first.
  void note(const std::string& why, bool warn = false) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (++notes_[why] == 1 && warn) say(why);
  }
  // A selection that was not made.
  void warn(const std::string& why) { note(why, true); }

 private:
  void table() {
    std::fprintf(stderr, "quoka: %10s %8s %9s %9s %8s %8s %8s %8s\n", "", "calls", "queries",
                 "past used", "mask s", "convert s", "select s", "attend s");
    for (const auto& [name, x] : {std::pair("chunks", chunks_), std::pair("one token", tokens_)})
      std::fprintf(stderr, "quoka: %10s %8td %9td %8.1f%% %8.3f %8.3f %8.3f %8.3f\n", name, x.calls,
                   x.queries, x.seen > 0 ? 100 * x.attended / x.seen : 100.0, x.mask, x.convert,
                   x.select, x.attend);
    for (const auto& [why, count] : notes_) say(std::to_string(count) + " times: " + why);
  }

  std::mutex mutex_;
  Work chunks_, tokens_;
  std::map<std::string, Index> notes_;
};

}  // namespace quoka_ggml
