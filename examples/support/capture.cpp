#include "support/capture.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <stdexcept>

namespace quoka_examples {

std::vector<std::string> layer_names(const SafetensorsFile& file) {
  std::set<std::string> found;
  for (const std::string& name : file.names()) {
    if (name.size() > 2 && (name.ends_with(".q") || name.ends_with(".k") || name.ends_with(".v"))) {
      found.insert(name.substr(0, name.size() - 2));
    }
  }
  if (file.contains("q") && file.contains("k") && file.contains("v")) found.insert("");
  if (found.empty()) {
    throw std::runtime_error(
        file.path() +
        ": no layer found: tensors NAME.q, NAME.k and NAME.v are expected per layer, or plain q, k "
        "and v; " +
        file.listing());
  }
  std::vector<std::string> names(found.begin(), found.end());
  std::stable_sort(names.begin(), names.end(),
                   [](const std::string& a, const std::string& b) { return a.size() < b.size(); });
  return names;
}

void require_finite(const std::string& who, const Tensor<float>& x) {
  const float* const end = x.data() + x.size();
  const float* const found =
      std::find_if_not(x.data(), end, [](float value) { return std::isfinite(value); });
  if (found == end) return;
  const Index at = found - x.data(), row = at / x.dimension(3), head = row / x.dimension(2);
  const auto where = [](const char* axis, Index index) { return axis + std::to_string(index); };
  throw std::runtime_error(
      who + " is " +
      (std::isnan(*found) ? "NaN"
       : *found > 0.0f    ? "infinite"
                          : "-infinite") +
      " at" + (x.dimension(0) > 1 ? where(" batch ", head / x.dimension(1)) + ',' : "") +
      where(" head ", head % x.dimension(1)) + where(", position ", row % x.dimension(2)) +
      where(", channel ", at % x.dimension(3)) + " (from 0); all numbers must be finite");
}

LayerCapture load_layer(const SafetensorsFile& file, const std::string& name) {
  const auto full_name = [&](const char* part) { return name.empty() ? part : name + '.' + part; };
  for (const char* part : {"q", "k", "v"}) {
    if (!file.contains(full_name(part))) {
      throw std::runtime_error(file.path() + ": there is no tensor '" + full_name(part) +
                               "', which the layer needs; " + file.listing());
    }
  }
  LayerCapture layer{name.empty() ? "unnamed" : name,
                     file.read_float(full_name("q")),
                     file.read_float(full_name("k")),
                     file.read_float(full_name("v")),
                     {}};
  const auto require = [&](bool fits, const char* what, Index left, Index right) {
    if (!fits) {
      throw std::runtime_error(file.path() + ": " + (name.empty() ? "" : name + ": ") + what +
                               ": " + std::to_string(left) + " and " + std::to_string(right));
    }
  };
  const auto same = [&](const char* what, Index left, Index right) {
    require(left == right, what, left, right);
  };
  const Tensor<float>& q = layer.q;
  const Tensor<float>& k = layer.k;
  const Tensor<float>& v = layer.v;
  for (const Tensor<float>* tensor : {&q, &k, &v}) {
    require(tensor->size() > 0, "a tensor is empty: its heads and len are", tensor->dimension(1),
            tensor->dimension(2));
  }
  same("q and k differ in batch", q.dimension(0), k.dimension(0));
  same("k and v differ in batch", k.dimension(0), v.dimension(0));
  require(q.dimension(1) % k.dimension(1) == 0, "q_heads is not a multiple of kv_heads",
          q.dimension(1), k.dimension(1));
  same("k and v differ in kv_heads", k.dimension(1), v.dimension(1));
  same("q and k differ in len", q.dimension(2), k.dimension(2));
  same("k and v differ in len", k.dimension(2), v.dimension(2));
  same("q and k differ in head_dim", q.dimension(3), k.dimension(3));
  require_finite(file.path() + ": " + full_name("q"), q);
  require_finite(file.path() + ": " + full_name("k"), k);
  require_finite(file.path() + ": " + full_name("v"), v);
  return layer;
}

Index layer_number(const std::string& name) {
  constexpr const char* digits = "0123456789";
  const std::size_t begin = std::min(name.find_first_of(digits), name.size());
  const std::size_t end = std::min(name.find_first_not_of(digits, begin), name.size());
  if (begin == end || end - begin > 4 || name.find_first_of(digits, end) != std::string::npos)
    throw std::invalid_argument(
        "the layer \"" + name +
        "\" should have its number in its name, one of at most four digits, "
        "such as layer11");
  return std::stoll(name.substr(begin, end - begin));
}

std::vector<Index> layer_numbers(const std::vector<LayerCapture>& layers) {
  std::vector<Index> numbers;
  for (const LayerCapture& layer : layers) {
    const Index number = layer_number(layer.name);
    if (const auto same = std::find(numbers.begin(), numbers.end(), number); same != numbers.end())
      throw std::invalid_argument(layers[static_cast<std::size_t>(same - numbers.begin())].name +
                                  " and " + layer.name + " are both layer " +
                                  std::to_string(number));
    numbers.push_back(number);
  }
  return numbers;
}

std::vector<LayerCapture> load_layers(const SafetensorsFile& file) {
  std::vector<LayerCapture> layers;
  for (const std::string& name : layer_names(file)) layers.push_back(load_layer(file, name));
  return layers;
}

std::optional<float> softmax_scale(const SafetensorsFile& file) {
  const auto found = file.metadata().find("softmax_scale");
  if (found == file.metadata().end()) return std::nullopt;
  const double scale = number_from(found->second).value_or(0.0);
  if (!(scale >= double{std::numeric_limits<float>::min()} &&
        scale <= double{std::numeric_limits<float>::max()})) {
    throw std::runtime_error(file.path() + ": metadata softmax_scale is '" +
                             found->second.substr(0, 60) + "', not a positive finite number");
  }
  return static_cast<float>(scale);
}

}  // namespace quoka_examples
