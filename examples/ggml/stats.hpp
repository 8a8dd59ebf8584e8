// What the backend did, over all contexts of a process, and with each layer: QUOKA_STATS=1 prints it at the
// end, QUOKA_STATS=FILE writes it there as JSON.
#pragma once

#include "support/clock.hpp"

#include <quoka/base/index.hpp>

#include <nlohmann/json.hpp>

#include <cstdio>
#include <fstream>
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
  ~Stats() { report(); }
  // Reports what was done so far; from here on anew. file: empty for none.
  void restart(bool print, const std::string& file) {
    const std::lock_guard<std::mutex> lock(mutex_);
    report();
    print_ = print, file_ = file;
    chunks_ = tokens_ = {};
    notes_.clear(), layers_.clear();
  }
  // did: what was done with the layer's attention, "selected" or why not.
  void add(int layer, const Work& work, const char* did) {
    const std::lock_guard<std::mutex> lock(mutex_);
    (work.queries == work.sequences ? tokens_ : chunks_) += work;
    Layer& of = layers_[layer];
    of.seen += work.seen, of.attended += work.attended;
    ++of.did[did];
  }
  // An operation that was left to the CPU backend. Said at the end, or (warn) when it comes first.
  void note(const std::string& why, bool warn = false) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (++notes_[why] == 1 && warn) say(why);
  }
  // A selection that was not made.
  void warn(const std::string& why) { note(why, true); }

 private:
  struct Layer {
    double seen = 0, attended = 0;     // past keys, summed over queries
    std::map<std::string, Index> did;  // calls

    bool operator==(const Layer&) const = default;
    std::string text() const {
      std::string all;
      for (const auto& [what, calls] : did)
        all += (all.empty() ? "" : ", ") + what + " (" + std::to_string(calls) + " calls)";
      char used[48];
      std::snprintf(used, sizeof used, "; %.1f %% of the past",
                    seen > 0 ? 100 * attended / seen : 100.0);
      return all + used;
    }
  };

  void report() {
    if (print_) table();
    if (!file_.empty() && !(std::ofstream(file_)
                            << json().dump(1, ' ', false, nlohmann::json::error_handler_t::replace)
                            << '\n'))
      say("stats: cannot write " + file_);
  }
  nlohmann::json json() const {
    nlohmann::json layers = nlohmann::json::array();
    for (const auto& [layer, of] : layers_)
      layers.push_back(
          {{"layer", layer}, {"seen", of.seen}, {"attended", of.attended}, {"did", of.did}});
    return {{"layers", layers}, {"left_to_the_cpu", notes_}};
  }
  // A line for layers in a row that were treated alike.
  void each_layer() const {
    for (auto from = layers_.begin(); from != layers_.end();) {
      auto end = from;
      int last = from->first;
      for (; end != layers_.end() && end->second == from->second && end->first <= last + 1; ++end)
        last = end->first;
      std::string name = std::to_string(from->first);
      if (last != from->first) name += " to " + std::to_string(last);
      say((from->first < 0 ? "no cache" : "layer " + name) + ": " + from->second.text());
      from = end;
    }
  }
  void table() {
    std::fprintf(stderr, "quoka: %10s %8s %9s %9s %8s %8s %8s %8s\n", "", "calls", "queries",
                 "past used", "mask s", "convert s", "select s", "attend s");
    for (const auto& [name, x] : {std::pair("chunks", chunks_), std::pair("one token", tokens_)})
      std::fprintf(stderr, "quoka: %10s %8td %9td %8.1f%% %8.3f %8.3f %8.3f %8.3f\n", name, x.calls,
                   x.queries, x.seen > 0 ? 100 * x.attended / x.seen : 100.0, x.mask, x.convert,
                   x.select, x.attend);
    each_layer();
    for (const auto& [why, count] : notes_) say(std::to_string(count) + " times: " + why);
  }

  bool print_ = false;
  std::string file_;
  std::mutex mutex_;
  Work chunks_, tokens_;
  std::map<std::string, Index> notes_;
  std::map<int, Layer> layers_;
};

}  // namespace quoka_ggml
