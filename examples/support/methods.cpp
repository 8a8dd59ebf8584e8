#include "support/methods.hpp"

#include "support/ablation.hpp"
#include "support/mean_query.hpp"
#include "support/scoring_flops.hpp"

#include "context_parallel/sharded_prefill.hpp"

#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/methods/all.hpp>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>

namespace quoka_examples {
namespace {

template <class S>
class LayerOf final : public AnyLayer {
 public:
  LayerOf(const quoka::LayerShape& shape, const typename S::Options& options,
          const quoka::AttentionOptions& attention, typename S::State state)
      : layer_(shape, options, attention, std::move(state)), shape_(shape), options_(options) {}

  void forward(View q, View k, View v, quoka::TensorView<float> out,
               quoka::ExecutorRef threads) override {
    layer_.forward(q, k, v, out, threads);
  }
  void append(View k, View v) override { layer_.append(k, v); }
  void truncate(Index len) override { layer_.truncate(len); }
  void reserve(Index len) override { layer_.reserve(len); }
  Index kv_len() const override { return layer_.kv_len(); }
  const quoka::Selection& selection() const override { return layer_.selection(); }
  Index kept_bytes() const override { return layer_.kept_bytes(); }
  double scoring_flops(Index q_len) const override {
    return static_cast<double>(shape_.batch) *
           quoka_examples::scoring_flops(
               options_, {shape_.q_heads, shape_.kv_heads, shape_.head_dim, q_len, kv_len()});
  }
  const quoka::Selection& select(View q, quoka::ExecutorRef threads, View k) override {
    return k.empty() ? layer_.select(q, threads) : layer_.select(q, k, threads);
  }
  void append(View q, View k, View v, quoka::ExecutorRef threads) override {
    layer_.append(q, k, v, threads);
  }
  View keys() const override { return layer_.cache().k().template typed<float>(); }
  View values() const override { return layer_.cache().v().template typed<float>(); }
  Index scratch_bytes() const override { return layer_.scratch_bytes(); }

 private:
  quoka::ChunkedPrefill<S> layer_;
  quoka::LayerShape shape_;
  typename S::Options options_;
};

// Over several ranks, by the paper's options or none.
class ShardedLayer final : public AnyLayer {
 public:
  ShardedLayer(const quoka::LayerShape& shape, const std::optional<quoka::QuokaOptions>& options,
               Communicator& ranks, const quoka::AttentionOptions& attention)
      : layer_(shape, options, ranks, attention), shape_(shape), options_(options) {}

  void forward(View q, View k, View v, quoka::TensorView<float> out,
               quoka::ExecutorRef threads) override {
    layer_.forward(q, k, v, out, threads);
  }
  void append(View k, View v) override { layer_.append(k, v); }
  void append(View, View k, View v, quoka::ExecutorRef threads) override {
    layer_.append(k, v, threads);
  }
  void truncate(Index len) override { layer_.truncate(len); }
  void reserve(Index len) override { layer_.reserve(len); }
  Index kv_len() const override { return layer_.kv_len(); }
  const quoka::Selection& selection() const override { return layer_.selection(); }
  Index kept_bytes() const override { return layer_.kept_bytes(); }
  double scoring_flops(Index q_len) const override {
    if (!options_) return 0.0;
    return quoka_examples::scoring_flops(
        *options_, {shape_.q_heads, shape_.kv_heads, shape_.head_dim, q_len, kv_len()});
  }
  const quoka::Selection& select(View, quoka::ExecutorRef, View) override { refuse(); }
  View keys() const override { refuse(); }
  View values() const override { refuse(); }
  Index scratch_bytes() const override { refuse(); }

 private:
  [[noreturn]] static void refuse() {
    throw std::logic_error("a layer in shards is asked for what lies on all ranks");
  }

  ShardedPrefill layer_;
  quoka::LayerShape shape_;
  std::optional<quoka::QuokaOptions> options_;
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
  const quoka::QuokaOptions& asked = r.options.quoka;
  if constexpr (requires { o.budget; }) o.budget = r.options.budget;
  if constexpr (requires { o.n_queries; }) o.n_queries = asked.n_queries;
  if constexpr (std::is_same_v<S, quoka::QuokaSelector> || std::is_same_v<S, quoka::MassSelector>)
    o.sketch = asked.sketch;
  if constexpr (requires { o.rank; })
    o.rank = r.options.rank > 0 ? r.options.rank
                                : std::min<Index>(64, std::max<Index>(1, r.shape.head_dim / 2));
  if constexpr (requires { o.keep_first; }) o.keep_first = std::max(o.keep_first, asked.keep_first);
  if constexpr (requires { o.keep_last; }) o.keep_last = std::max(o.keep_last, asked.keep_last);
  return o;
}

// ---- quoka.A.B: options by name -----------------------------------------------------------------

template <class Options>
using Words = std::map<std::string, std::function<void(Options&)>>;
template <class Options>
using Numbers = std::map<std::string, std::function<void(Options&, Index)>>;

// The options that parts of a name set, as in methods.hpp.
template <class Options>
struct Vocabulary {
  Words<Options> words;
  Numbers<Options> numbers;

  // False if `part` is another one.
  bool set(const std::string& part, Options& o) const {
    if (const auto word = words.find(part); word != words.end()) {
      word->second(o);
      return true;
    }
    const std::size_t digits = part.find_first_of("0123456789");
    if (digits == std::string::npos || part.size() - digits > 9 ||
        part.find_first_not_of("0123456789", digits) != std::string::npos)
      return false;
    const auto number = numbers.find(part.substr(0, digits));
    if (number == numbers.end()) return false;
    number->second(o, std::stoll(part.substr(digits)));
    return true;
  }
};

const Vocabulary<quoka::QuokaOptions>& vocabulary(quoka::QuokaOptions) {
  using O = quoka::QuokaOptions;
  static const Vocabulary<O> all{{{"float", [](O& o) { o.sketch = quoka::Sketch::off; }}},
                                 {{"first", [](O& o, Index n) { o.keep_first = n; }},
                                  {"recent", [](O& o, Index n) { o.keep_last = n; }},
                                  {"queries", [](O& o, Index n) { o.n_queries = n; }}}};
  return all;
}
// By the budget that was asked for; the rest stays.
void set_preset(quoka::MassOptions& o, const quoka::MassOptions& preset) {
  o.queries = preset.queries, o.threshold = preset.threshold, o.least = preset.least;
}
const Vocabulary<quoka::MassOptions>& vocabulary(quoka::MassOptions) {
  using O = quoka::MassOptions;
  static const Vocabulary<O> all{
      {{"recommended", [](O& o) { set_preset(o, O::recommended(o.budget)); }},
       {"balanced", [](O& o) { set_preset(o, O::balanced(o.budget)); }},
       {"float", [](O& o) { o.sketch = quoka::Sketch::off; }}},
      {{"kernel", [](O& o, Index n) { o.kernel_size = n; }},
       {"first", [](O& o, Index n) { o.keep_first = n; }},
       {"recent", [](O& o, Index n) { o.keep_last = n; }},
       {"group", [](O& o, Index n) { o.queries = n; }},
       {"least", [](O& o, Index n) { o.least = n; }},
       {"threshold", [](O& o, Index n) {
          o.threshold = static_cast<float>(n) / 100.0f, o.budget = quoka::Budget::share(1.0);
        }}}};
  return all;
}
const Vocabulary<AblationOptions>& vocabulary(AblationOptions) {
  using O = AblationOptions;
  static const Vocabulary<O> all{
      {{"dissimilar", [](O& o) { o.mixed = false; }},
       {"mixed", [](O& o) { o.mixed = true; }},
       {"mean", [](O& o) { o.aggregation = quoka::Aggregation::mean; }},
       {"per_head", [](O& o) { o.per_head = true; }},
       {"softmax", [](O& o) { o.softmax = true; }}},
      {{"kernel", [](O& o, Index n) { o.kernel_size = n; }},
       {"first", [](O& o, Index n) { o.keep_first = n; }},
       {"recent", [](O& o, Index n) { o.keep_last = n; }},
       {"queries", [](O& o, Index n) { o.n_queries = n, o.of_group = false; }},
       {"group", [](O& o, Index n) { o.n_queries = n, o.of_group = true; }}}};
  return all;
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
    if (r.options.ranks == nullptr) {
      layers.push_back(
          std::make_unique<LayerOf<S>>(r.shape, options, r.attention, std::move(state)));
      continue;
    }
    std::optional<quoka::QuokaOptions> selection;
    if constexpr (std::is_same_v<S, quoka::QuokaSelector>)
      selection = options;
    else if (!std::is_same_v<S, quoka::DenseSelector>)
      throw std::invalid_argument("over several processes there are dense and quoka");
    layers.push_back(
        std::make_unique<ShardedLayer>(r.shape, selection, *r.options.ranks, r.attention));
  }
  return layers;
}

// S with these parts; none if one of them is unknown.
template <class S>
std::optional<Method> composed(const std::string& name, const std::vector<std::string>& parts) {
  using Options = typename S::Options;
  Options tried;
  for (const std::string& part : parts)
    if (!vocabulary(tried).set(part, tried)) return std::nullopt;
  return Method{name, false, [parts](const Request& r) {
                  return layers_of<S>(r, [&](Options& o) {
                    for (const std::string& part : parts) vocabulary(o).set(part, o);
                  });
                }};
}

// "quoka.mixed.kernel7": any number of parts, each one option.
std::optional<Method> composed_quoka(const std::string& name) {
  std::istringstream in(name);
  std::string part;
  std::getline(in, part, '.');
  if (part != "quoka") return std::nullopt;
  std::vector<std::string> parts;
  bool mass = false;
  for (; std::getline(in, part, '.'); parts.push_back(part))
    mass = mass || part == "recommended" || part == "balanced";
  if (mass) return composed<quoka::MassSelector>(name, parts);
  if (auto paper = composed<quoka::QuokaSelector>(name, parts)) return paper;
  return composed<AblationSelector>(name, parts);
}

// The default form of S and its named variants, appended to `all`.
template <class S>
void add_methods(const std::string& name, std::vector<Method>& all) {
  using Options = typename S::Options;
  using Vary = std::function<void(Options&)>;
  constexpr bool shares = requires(Options o) { o.plan; };
  const auto add = [&](const std::string& variant, const Vary& vary) {
    all.push_back(
        {name + variant, shares, [vary](const Request& r) { return layers_of<S>(r, vary); }});
  };
  if constexpr (std::is_same_v<S, quoka::MassSelector>) {
    for (const char* preset : {"quoka.recommended", "quoka.balanced"})
      all.push_back(composed_quoka(preset).value());
    return;
  }
  add("", nullptr);
  using Rows = typename RowsOf<S>::Type;
  if constexpr (!std::is_void_v<Rows>)
    all.push_back({name + ".logit", false, [](const Request& r) {
                     return layers_of<MeanQuerySelector<Rows>>(r, nullptr);
                   }});
  if constexpr (!std::is_same_v<S, quoka::QuokaSelector> && requires(Options o) { o.sketch; })
    add(".float", [](Options& o) { o.sketch = quoka::Sketch::off; });
  if constexpr (std::is_same_v<S, quoka::XAttentionSelector>)
    add(".threshold", [](Options& o) { o.mass = Options::paper().mass; });
  if constexpr (std::is_same_v<S, quoka::FlashPrefillSelector>) {
    add(".threshold", [](Options& o) { o.relative = Options::paper().relative; });
    add(".compact", [](Options& o) { o.relative = Options::compact_attention().relative; });
  }
  if constexpr (std::is_same_v<S, quoka::OracleSelector>)
    add(".max", [](Options& o) { o.aggregation = quoka::Aggregation::max; });
  if constexpr (std::is_same_v<S, quoka::QuokaSelector>)
    for (const char* part : {".float", ".mean"}) all.push_back(composed_quoka(name + part).value());
}

const std::vector<Method>& methods() {
  static const std::vector<Method> list = [] {
    std::vector<Method> all;
    quoka::for_each_selector([&]<class S>(const char* name) { add_methods<S>(name, all); });
    return all;
  }();
  return list;
}

Method method_named(const std::string& name) {
  for (const Method& method : methods())
    if (method.name == name) return method;
  if (const auto composed = composed_quoka(name)) return *composed;
  std::string known;
  for (const Method& method : methods()) known += ' ' + method.name;
  throw std::invalid_argument("no selector is called \"" + name + "\"; there are" + known +
                              ", and quoka with options joined by dots, such as "
                              "quoka.mixed.per_head.kernel7");
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
      if (name != "dense" && (!variant || name == "quoka.recommended" || name == "quoka.balanced" ||
                              name.ends_with(".logit") || name.ends_with(".softmax")))
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
