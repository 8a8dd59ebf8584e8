// Which layers of a model could select, in order: "the first layers" of a setting are counted over
// these.
//
// Recurrent layers have no attention and never call. Layers with a sliding window, and those for
// which the model itself chooses keys, call and cannot select. A window shows in the cache, which
// has fewer cells than other layers' (as engines make it unless asked otherwise), or in the mask,
// once that slides. A layer whose window does not show yet counts as one that could select, and the
// first such layer is dense. This lasts until a model's first graph has been computed to its first
// layer without a window or, if all caches have one size, until a prompt is longer than the window.
#pragma once

#include <quoka/base/index.hpp>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

namespace quoka_ggml {

using quoka::Index;

// The layers of one engine context.
class LayerOrder {
 public:
  // A layer calls, over a cache of `cells` cells. could_select: nothing but a window forbids it.
  void saw(int layer, Index cells, bool could_select) {
    Layer& of = layers_.try_emplace(layer, Layer{}).first->second;
    of.cells = cells, of.could_select = could_select;
    most_cells_ = std::max(most_cells_, cells);
  }
  // Its mask slides.
  void slides(int layer) { layers_[layer].slides = true; }

  bool has_window(int layer) const {
    const auto of = layers_.find(layer);
    return of != layers_.end() && (of->second.slides || of->second.cells < most_cells_);
  }
  bool called(int layer) const { return layers_.count(layer) > 0; }
  // The numbers of those that called.
  std::pair<int, int> first_and_last() const {
    return {layers_.begin()->first, layers_.rbegin()->first};
  }
  // Those that could select.
  std::vector<int> selectable() const {
    std::vector<int> all;
    for (const auto& [number, of] : layers_)
      if (of.could_select && !has_window(number)) all.push_back(number);
    return all;
  }
  // How many layers before this one could select.
  Index before(int layer) const {
    const std::vector<int> all = selectable();
    return std::lower_bound(all.begin(), all.end(), layer) - all.begin();
  }

 private:
  struct Layer {
    Index cells = 0;
    bool could_select = false, slides = false;
  };

  std::map<int, Layer> layers_;
  Index most_cells_ = 0;
};

}  // namespace quoka_ggml
