// The effect of selection on each layer of a model, summed over calls: what kind of attention it
// has, which layers select, which do not and why, how much of the past is read, and about what it
// saves.
#pragma once

#include <quoka/engine/masked_attention.hpp>

#include <cstdio>
#include <map>
#include <string>
#include <vector>

namespace quoka_ggml {

using quoka::Index, quoka::MaskedReport;

class LayerAccount {
 public:
  // One layer's sums. Layers that were treated alike are equal.
  struct Layer {
    double seen = 0, attended = 0;          // past keys, summed over queries
    double by_shares = 0, kept = 0;         // MaskedReport's
    std::map<std::string, Index> did = {};  // calls, by what was done with them; none: it made none
    std::string kind = {};                  // of attention, in the caller's words; may be empty

    bool operator==(const Layer&) const = default;
    // The share of attention that selecting chunks keep; 1 where none selected by shares.
    double kept_share() const { return by_shares > 0 ? kept / by_shares : 1; }
    // In one line: the kind; part of the past that was read, and which share of attention it has;
    // what was done, and in how many calls.
    std::string text() const {
      if (did.empty()) return "no call: it is recurrent, or computed elsewhere";
      char used[48];
      std::snprintf(used, sizeof used, "%.1f %% of the past",
                    seen > 0 ? 100 * attended / seen : 100.0);
      std::string all = kind.empty() ? used : kind + "; " + used;
      if (by_shares > 0) {
        std::snprintf(used, sizeof used, " with %.1f %% of the attention", 100 * kept_share());
        all += used;
      }
      for (const auto& [what, calls] : did)
        all += "; " + what + " (" + std::to_string(calls) + " calls)";
      return all;
    }
  };
  // For the calls that selected.
  struct Saving {
    double took = 0;   // seconds
    double dense = 0;  // about those of the same calls with every key, masks read as they were
  };

  // Counts a call of a layer; did: describe() of its outcome, or the caller's own reason; kind: of
  // its attention, as far as earlier calls show it.
  void add(int layer, const MaskedReport& call, const char* did, const std::string& kind = {}) {
    if (layers_.count(layer) == 0)
      for (int before = 0; before <= layer; ++before) layers_.try_emplace(before);
    Layer& of = layers_[layer];
    of.kind = kind;
    of.seen += call.seen, of.attended += call.attended, ++of.did[did];
    of.by_shares += call.by_shares, of.kept += call.kept;
    const bool selected = call.attended < call.seen;
    if (call.by_mask && !selected) return;  // hidden cells cost less than others: no price
    Spent& spent = spent_[call.queries == call.sequences][selected];
    spent.all_pairs += call.seen + call.own, spent.pairs += call.attended + call.own;
    spent.mask += call.mask, spent.attend += call.attend;
    spent.all += call.mask + call.select + call.attend;
  }
  // By number, and from 0 to the last that called, those between without a call; -1: attention over
  // no cache.
  const std::map<int, Layer>& layers() const { return layers_; }
  // At the price per query and key of the calls that did not select and whose queries saw all that
  // was counted; where these are few, of those that did.
  Saving saving() const {
    Saving sum;
    for (const auto& [exact, selecting] : spent_) {
      const Spent& price = exact.pairs > selecting.pairs / 100 ? exact : selecting;
      sum.took += selecting.all;
      sum.dense += selecting.mask;
      if (price.pairs > 0) sum.dense += selecting.all_pairs * price.attend / price.pairs;
    }
    return sum;
  }
  // A line for layers in a row that were treated alike; one for attention over no cache.
  std::vector<std::string> lines() const {
    std::vector<std::string> all;
    for (auto from = layers_.begin(); from != layers_.end();) {
      auto end = from;
      int last = from->first;
      const bool numbered = from->first >= 0;
      for (++end; numbered && end != layers_.end() && end->second == from->second &&
                  end->first == last + 1;
           ++end)
        last = end->first;
      std::string name = numbered ? "layer " + std::to_string(from->first) : "no cache";
      if (last != from->first) name += " to " + std::to_string(last);
      all.push_back(name + ": " + from->second.text());
      from = end;
    }
    return all;
  }

 private:
  struct Spent {
    double all_pairs = 0, pairs = 0;       // of a query and a key: there were, and were attended
    double mask = 0, attend = 0, all = 0;  // seconds
  };

  std::map<int, Layer> layers_;
  Spent spent_[2][2];  // of chunks and single tokens; exact and selecting
};

}  // namespace quoka_ggml
