// The effect of selection on each layer of a model, summed over calls: what kind of attention it
// has, which layers select, which do not and why, how much of the past is read, and about what it
// saves.
#pragma once

#include <quoka/engine/masked_attention.hpp>

#include <algorithm>
#include <cstdio>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace quoka_ggml {

using quoka::Index, quoka::MaskedReport;

class LayerAccount {
 public:
  // One layer's sums.
  struct Layer {
    double seen = 0, attended = 0;          // past keys, summed over queries
    double by_shares = 0, kept = 0;         // MaskedReport's
    std::map<std::string, Index> did = {};  // calls, by what was done with them; none: it made none
    std::string kind = {};                  // of attention, in the caller's words; may be empty

    double used_share() const { return seen > 0 ? attended / seen : 1; }
    // The share of attention that selecting chunks keep; 1 where none selected by shares.
    double kept_share() const { return by_shares > 0 ? kept / by_shares : 1; }
    bool treated_as(const Layer& other) const {
      return did == other.did && kind == other.kind && (by_shares > 0) == (other.by_shares > 0);
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
  // A line for layers in a row that were treated alike: their kind; part of the past that was read,
  // and which share of attention it has, from the least to the most; what was done, and in how many
  // calls. One for attention over no cache.
  std::vector<std::string> lines() const {
    std::vector<std::string> all;
    for (auto from = layers_.begin(); from != layers_.end();) {
      auto end = std::next(from);
      while (from->first >= 0 && end != layers_.end() && end->second.treated_as(from->second))
        ++end;
      const int last = std::prev(end)->first;
      std::string name = from->first >= 0 ? "layer " + std::to_string(from->first) : "no cache";
      if (last != from->first) name += " to " + std::to_string(last);
      all.push_back(name + ": " + text(from, end));
      from = end;
    }
    return all;
  }

 private:
  using Layers = std::map<int, Layer>;

  static std::string number(double x) {
    char text[48];
    std::snprintf(text, sizeof text, "%.1f", x);
    return text;
  }
  static std::string text(Layers::const_iterator from, Layers::const_iterator end) {
    const Layer& first = from->second;
    if (first.did.empty()) return "no call: it is recurrent, or computed elsewhere";
    const auto percent = [&](double (Layer::*share)() const) {
      double least = 1, most = 0;
      for (auto at = from; at != end; ++at) {
        least = std::min(least, (at->second.*share)());
        most = std::max(most, (at->second.*share)());
      }
      const std::string low = number(100 * least), high = number(100 * most);
      return low == high ? high : low + " to " + high;
    };
    std::string all = first.kind.empty() ? "" : first.kind + "; ";
    all += percent(&Layer::used_share) + " % of the past";
    if (first.by_shares > 0) all += " with " + percent(&Layer::kept_share) + " % of the attention";
    for (const auto& [what, calls] : first.did)
      all += "; " + what + " (" + std::to_string(calls) + " calls)";
    return all;
  }

  struct Spent {
    double all_pairs = 0, pairs = 0;       // of a query and a key: there were, and were attended
    double mask = 0, attend = 0, all = 0;  // seconds
  };

  Layers layers_;
  Spent spent_[2][2];  // of chunks and single tokens; exact and selecting
};

}  // namespace quoka_ggml
