// What the backend did, over all contexts of a process: said once when layers begin to select and once at the
// end. QUOKA_STATS=1 adds a line per layer at the end, QUOKA_STATS=FILE keeps that file up to date as JSON.
#pragma once

#include <quoka/engine/layer_account.hpp>

#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <mutex>

namespace quoka_ggml {

using quoka::Index, nlohmann::json;

inline void say(const std::string& what) { std::fprintf(stderr, "quoka: %s\n", what.c_str()); }

class Stats {
 public:
  ~Stats() { report(); }
  // Reports what was done so far; from here on anew. file: empty for none.
  void restart(bool print, const std::string& file, bool quiet) {
    const std::lock_guard<std::mutex> lock(mutex_);
    report();
    print_ = print, file_ = file, quiet_ = quiet, first_ = none;
    account_ = {}, notes_.clear();
  }
  // did: what was done with the layer's attention, "selected" or why not.
  void add(int layer, const quoka::MaskedReport& call, const char* did) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (first_ == layer && !quiet_) {  // all layers of a graph are counted
      for (const std::string& line : account_.lines()) say(line);
      first_ = said;
    }
    account_.add(layer, call, did);
    if (first_ == none && call.attended < call.seen) first_ = layer;
    const auto now = std::chrono::steady_clock::now();
    if (file_.empty() || now - written_ < std::chrono::seconds(1)) return;
    written_ = now, write();
  }
  // An operation that was left to the CPU backend. Said at the end, or (warn) when it comes first.
  void note(const std::string& why, bool warn = false) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (++notes_[why] == 1 && warn) say(why);
  }

 private:
  static constexpr int none = -2, said = -3;

  void report() const {
    if (!file_.empty()) write();
    const auto [took, dense] = account_.saving();
    char text[120];
    std::snprintf(text, sizeof text,
                  "attention that selected took %.2f s, with every key about %.2f s", took, dense);
    if (took > 0 && (print_ || !quiet_)) say(text);
    if (!print_) return;
    for (const std::string& line : account_.lines()) say(line);
    for (const auto& [why, count] : notes_) say(std::to_string(count) + " times: " + why);
  }
  // Whoever reads the file finds a whole one.
  void write() const {
    json layers = json::array();
    for (const auto& [layer, of] : account_.layers())
      layers.push_back(
          {{"layer", layer}, {"seen", of.seen}, {"attended", of.attended}, {"did", of.did}});
    const auto [took, dense] = account_.saving();
    const json all = {{"layers", layers},
                      {"left_to_the_cpu", notes_},
                      {"selecting_seconds", took},
                      {"seconds_with_every_key", dense}};
    std::error_code error = std::make_error_code(std::errc::io_error);
    if (std::ofstream(file_ + ".new") << all.dump(1, ' ', false, json::error_handler_t::replace))
      std::filesystem::rename(file_ + ".new", file_, error);
    if (error) say("stats: cannot write " + file_);
  }

  bool print_ = false, quiet_ = true;
  std::string file_;
  int first_ = none;  // the first layer that selected
  std::mutex mutex_;
  std::chrono::steady_clock::time_point written_{};
  quoka::LayerAccount account_;
  std::map<std::string, Index> notes_;
};

}  // namespace quoka_ggml
