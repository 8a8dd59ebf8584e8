#include "support/methods.hpp"

#include <quoka/prefill/chunked_prefill.hpp>
#include <quoka/select/all.hpp>

#include <algorithm>
#include <functional>
#include <sstream>
#include <stdexcept>

namespace quoka_examples {
namespace {

template <class S>
class LayerOf final : public AnyLayer {
 public:
  LayerOf(const quoka::LayerShape& shape, const typename S::Options& options,
          const quoka::AttentionOptions& attention, typename S::State state)
      : layer_(shape, options, attention, std::move(state)) {}

  void forward(View q, View k, View v, quoka::TensorView<float> out,
               quoka::ThreadPool& threads) override {
    layer_.forward(q, k, v, out, threads);
  }
  const quoka::Selection& select(View q, quoka::ThreadPool& threads) override {
    return layer_.select(q, threads);
  }
  void append(View k, View v) override { layer_.append(k, v); }
  void truncate(Index len) override { layer_.truncate(len); }
  void reserve(Index len) override { layer_.reserve(len); }
  Index kv_len() const override { return layer_.kv_len(); }
  View keys() const override { return layer_.cache().k(); }
  View values() const override { return layer_.cache().v(); }
  const quoka::Selection& selection() const override { return layer_.selection(); }
  Index kept_bytes() const override { return layer_.kept_bytes(); }
  Index scratch_bytes() const override { return layer_.scratch_bytes(); }

 private:
  quoka::ChunkedPrefill<S> layer_;
};

struct Request {
  const quoka::LayerShape& shape;
  const MethodOptions& options;
  const quoka::AttentionOptions& attention;
  const std::vector<Index>& which;
  Index layer_count, first_sparse;
};

struct Method {
  std::string name;
  bool shares_layers;
  std::function<LayerStack(const Request&)> make;
};

// The options every method has in common, where S has them.
template <class S>
typename S::Options common_options(const Request& r) {
  typename S::Options o{};
  if constexpr (std::is_same_v<S, quoka::QuokaSelector>) o = r.options.quoka;
  if constexpr (requires { o.budget; }) o.budget = r.options.budget;
  if constexpr (requires { o.n_queries; }) o.n_queries = r.options.quoka.n_queries;
  if constexpr (requires { o.rank; })
    o.rank = r.options.rank > 0 ? r.options.rank
                                : std::min<Index>(64, std::max<Index>(1, r.shape.head_dim / 2));
  if constexpr (requires { o.keep_first; })
    o.keep_first = std::max(o.keep_first, r.options.quoka.keep_first);
  if constexpr (requires { o.keep_last; })
    o.keep_last = std::max(o.keep_last, r.options.quoka.keep_last);
  return o;
}

template <class S>
LayerStack layers_of(const Request& r, const std::function<void(typename S::Options&)>& vary) {
  LayerStack layers;
  typename S::State first{};
  for (const Index layer : r.which) {
    typename S::Options options = common_options<S>(r);
    typename S::State state{};
    if constexpr (requires { options.plan; }) {
      options.plan.layer = layer;
      options.plan.layer_count = r.layer_count;
      options.plan.first_sparse = r.first_sparse;
      state.shared = first.shared;
    }
    if (vary) vary(options);
    layers.push_back(std::make_unique<LayerOf<S>>(r.shape, options, r.attention, std::move(state)));
  }
  return layers;
}

const std::vector<Method>& methods() {
  static const std::vector<Method> list = [] {
    std::vector<Method> all;
    quoka::for_each_selector([&]<class S>(const char* name) {
      using Options = typename S::Options;
      using Vary = std::function<void(Options&)>;
      const auto add =
                     [&](const std::string&variant, const Vary&vary) {
        all.push_back({name + variant, requires(Options o) { o.plan;
                     },
                 [vary](const Request&r) { return layers_of<S>(r, vary); }
    });
  };
  add("", nullptr);
  if constexpr (requires(Options o) { o.domain; }) {
    const bool softmax = Options{}.domain == quoka::Domain::softmax;
    add(softmax ? ".logit" : ".softmax", [softmax](Options& o) {
      o.domain = softmax ? quoka::Domain::logit : quoka::Domain::softmax;
    });
  }
  if constexpr (std::is_same_v<S, quoka::OracleSelector>)
    add(".max", [](Options& o) { o.aggregation = quoka::Aggregation::max; });
  if constexpr (std::is_same_v<S, quoka::QuokaSelector>) {
    add(".uniform", [](Options& o) { o.query_choice = quoka::QueryChoice::uniform; });
    add(".float", [](Options& o) { o.sketch = false; });
    add(".dot", [](Options& o) { o.scoring = quoka::Scoring::dot; });
    add(".mean", [](Options& o) { o.aggregation = quoka::Aggregation::mean; });
  }
});
return all;
}
();
return list;
}

const Method& method_named(const std::string& name) {
  for (const Method& method : methods())
    if (method.name == name) return method;
  std::string known;
  for (const Method& method : methods()) known += ' ' + method.name;
  throw std::invalid_argument("no selector is called \"" + name + "\"; there are" + known);
}

}  // namespace

std::vector<std::string> all_methods() {
  std::vector<std::string> names;
  for (const Method& method : methods()) names.push_back(method.name);
  return names;
}

std::vector<std::string> parse_methods(const std::string& list) {
  std::vector<std::string> names;
  if (list == "all") {
    for (const std::string& name : all_methods()) {
      const bool variant = name.find('.') != std::string::npos;
      if (name != "dense" && (!variant || name.ends_with(".logit") || name.ends_with(".softmax")))
        names.push_back(name);
    }
    return names;
  }
  std::istringstream in(list);
  for (std::string name; std::getline(in, name, ',');) names.push_back(method_named(name).name);
  if (names.empty()) throw std::invalid_argument("no selector is named");
  return names;
}

bool shares_layers(const std::string& method) { return method_named(method).shares_layers; }

LayerStack make_layers(const std::string& method, const quoka::LayerShape& shape,
                       const MethodOptions& options, const quoka::AttentionOptions& attention,
                       const std::vector<Index>& which, Index layer_count, Index first_sparse) {
  return method_named(method).make({shape, options, attention, which, layer_count, first_sparse});
}

}  // namespace quoka_examples
