// A report of the backend, over all contexts of a process: once when layers begin to select and
// once at the end. QUOKA_STATS=1 adds a line per layer at the end, QUOKA_STATS=FILE keeps that file
// up to date as JSON:
//
//   layers               each, by the model's number, with the kind of its attention, its past's
//                        keys seen and attended, summed over queries, the share of attention that
//                        its selecting chunks keep (null: no selector reports it), and what was
//                        done in how many calls; none: it is recurrent, or elsewhere
//   arithmetic           float, bf16 or another, and in how many calls
//   selections_refused   why, and in how many calls
//   questions_declined   why an operation was left to the CPU, and how often the engine had asked
//   none_came            why no attention came here; "" where some did, or no graph was computed
//                        yet
//   selecting_seconds, seconds_with_every_key
#pragma once

#include "layer_account.hpp"

#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>

namespace quoka_ggml {

using quoka::Index, nlohmann::json;

inline void say(const std::string& what) { std::fprintf(stderr, "quoka: %s\n", what.c_str()); }

class Stats {
 public:
  ~Stats() { report(); }
  // Reports the calls until now, and starts over. file: empty for none.
  void restart(bool print, const std::string& file, bool quiet) {
    const std::lock_guard<std::mutex> lock(mutex_);
    report();
    print_ = print, file_ = file, quiet_ = quiet, first_ = none;
    account_ = {}, declined_.clear(), arithmetic_.clear(), refused_.clear(), unwritten_ = false;
    said_.clear(), asked_ = Asked::nothing, came_ = graph_done_ = false;
  }
  // One line, once.
  void say_once(const std::string& line) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (said_.insert(line).second) say(line);
  }
  // did: what was done with the layer's attention, "selected" or why not. kind: what attention it
  // has.
  void add(int layer, const quoka::MaskedReport& call, const std::string& arithmetic,
           const char* did, const std::string& kind) {
    const std::lock_guard<std::mutex> lock(mutex_);
    came_ = true;
    ++arithmetic_[arithmetic];
    if (first_ == layer && !quiet_) {  // all layers of a graph are counted
      for (const std::string& line : account_.lines()) say(line);
      first_ = said;
    }
    account_.add(layer, call, did, kind);
    if (first_ == none && call.attended < call.seen) first_ = layer;
    const auto now = std::chrono::steady_clock::now();
    if (file_.empty() || now - written_ < std::chrono::seconds(1)) return;
    written_ = now, write();
  }
  // The engine asked whether an operation is taken, and it is not. An engine asks several times for
  // a graph that it makes, and not when it runs one again: a number of questions, not of
  // operations.
  void declined(const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    ++declined_[why];
  }
  // The engine asked about attention: one operation, or a softmax between two products, which is
  // not this backend's.
  void asked(bool in_one_operation) {
    const std::lock_guard<std::mutex> lock(mutex_);
    asked_ = in_one_operation ? Asked::in_one : Asked::in_parts;
  }
  // A graph of an engine's context was computed, by whichever backends. Where nothing of it came
  // here, it says why: the line at the start has promised something else.
  void graph_done() {
    const std::lock_guard<std::mutex> lock(mutex_);
    graph_done_ = true;
    // Few queries over an empty cache are left to the CPU: the next ones come.
    if (asked_ == Asked::in_one || came_) return;
    if (const std::string line = none_came(); said_.insert(line).second) {
      say(line);
      if (!file_.empty()) write();
    }
  }
  // A backend whose own parameters ask for an arithmetic that is another one here. Said when it
  // comes first.
  void computes_in_another(const std::string& instead) {
    if (!quiet_) say_once("attention of one backend " + instead);
  }
  // A call that was to select and is exact, since selection or settings refused it. Said when it
  // comes first.
  void refused(const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (++refused_[why] == 1) say("exact, since " + why);
  }

 private:
  static constexpr int none = -2, said = -3;
  enum class Asked {
    nothing,
    in_parts,
    in_one
  };  // the latest of the engine's questions on attention

  std::string none_came() const {
    if (came_ || !graph_done_) return "";
    if (asked_ == Asked::in_parts)
      return "no attention comes here: the engine computes it without flash attention. Turn that "
             "on (-fa on, "
             "flash_attn=True), and leave out -dev QuoKA, which turns it off";
    if (asked_ == Asked::nothing)
      return "no attention comes here: the engine has offered none. A GPU in use keeps it, and "
             "some models have none";
    return "no attention came here: the engine's was left to the CPU";
  }

  void report() {
    if (!file_.empty()) write();
    if (const std::string line = none_came(); !line.empty() && said_.insert(line).second) say(line);
    const auto [took, dense] = account_.saving();
    char text[120];
    std::snprintf(text, sizeof text,
                  "attention that selected took %.2f s, with every key about %.2f s", took, dense);
    if (took > 0 && (print_ || !quiet_)) say(text);
    if (!print_) return;
    for (const std::string& line : account_.lines()) say(line);
    for (const auto& [name, count] : arithmetic_)
      say("in " + name + ": " + std::to_string(count) + " calls");
    for (const auto& [why, count] : refused_)
      say(std::to_string(count) + " calls exact, since " + why);
    for (const auto& [why, count] : declined_)
      say("asked " + std::to_string(count) + " times, and left to the CPU: " + why);
  }
  // A reader always finds a whole file.
  void write() {
    json layers = json::array();
    for (const auto& [layer, of] : account_.layers())
      layers.push_back({{"layer", layer},
                        {"kind", of.kind},
                        {"seen", of.seen},
                        {"attended", of.attended},
                        {"kept_share", of.by_shares > 0 ? json(of.kept_share()) : json()},
                        {"did", of.did}});
    const auto [took, dense] = account_.saving();
    const json all = {{"layers", layers},
                      {"arithmetic", arithmetic_},
                      {"questions_declined", declined_},
                      {"selections_refused", refused_},
                      {"none_came", none_came()},
                      {"selecting_seconds", took},
                      {"seconds_with_every_key", dense}};
    std::error_code error = std::make_error_code(std::errc::io_error);
    if (std::ofstream(file_ + ".new") << all.dump(1, ' ', false, json::error_handler_t::replace))
      std::filesystem::rename(file_ + ".new", file_, error);
    if (error && !unwritten_) say("stats: cannot write " + file_);
    unwritten_ = static_cast<bool>(error);
  }

  bool print_ = false, quiet_ = true;
  std::string file_;
  int first_ = none;  // the first layer that selected
  std::mutex mutex_;
  std::chrono::steady_clock::time_point written_{};
  LayerAccount account_;
  std::map<std::string, Index> declined_, refused_, arithmetic_;  // questions, calls, calls
  std::set<std::string> said_;                                    // lines, once each
  Asked asked_ = Asked::nothing;
  bool came_ = false, graph_done_ = false;  // attention; a graph
  bool unwritten_ = false;                  // the file, when it was tried last
};

}  // namespace quoka_ggml
