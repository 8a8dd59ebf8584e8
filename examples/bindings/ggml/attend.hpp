// One FLASH_ATTN_EXT node: what the settings say of its layer, then quoka::MaskedAttention.
#pragma once

#include "known_cells.hpp"
#include "layer_order.hpp"
#include "node.hpp"
#include "settings.hpp"
#include "stats.hpp"

#include <quoka/attention/attention_options.hpp>

namespace quoka_ggml {

// The attention of one engine context: threads, scratch memory, and memory of its caches. One call
// at a time.
class Attend {
 public:
  Attend(Settings settings, Stats& stats) : settings_(std::move(settings)), stats_(stats) {}

  void set_threads(int threads) { threads_ = settings_.threads > 0 ? settings_.threads : threads; }
  // The engine is about to compute a graph.
  void graph_begins(int threads) {
    set_threads(threads);
    if (graphs_++ == 0) return;
    stats_.graph_done();
    check_layers();
  }

  // Writes the node's result. Throws what the library throws.
  void run(const ggml_tensor& op) {
    const Node node(op);
    quoka::ThreadPool& pool = pools_.try_emplace(threads_, threads_).first->second;
    streams_.clear();
    for (Index i = 0; i < node.q.ne[3]; ++i) {
      streams_.push_back(
          {.q = rows_of<quoka::Rows>(node.q, quoka::format_of<float>(), i, 2, 1),
           .k = cache_rows(node.k, i, k_floats_, pool),
           .v = cache_rows(node.v, i, v_floats_, pool),
           .out = rows_of<quoka::OutputRows>(op, quoka::format_of<float>(), i, 1, 2)});
      if (node.mask == nullptr) continue;  // it may have more rows than there are queries
      streams_.back().mask = rows_of<quoka::Rows>(*node.mask, quoka::format_of<Eigen::half>(),
                                                  i % node.mask->ne[3], 2, 1)
                                 .slice(0, node.q.ne[1]);
    }
    quoka::AttentionOptions options{
        .scale = node.scale,
        .softcap = node.softcap,
        .arithmetic =
            arithmetic_of_node(settings_.arithmetic, node.k.type, node.v.type, node.q.ne[1])};
    std::vector<float> factors;
    if (node.max_bias > 0) factors = quoka::alibi_slopes(node.q_heads(), node.max_bias);
    options.mask_factors = factors;
    if (node.sinks != nullptr)
      options.sinks = {static_cast<const float*>(node.sinks->data),
                       static_cast<std::size_t>(node.q_heads())};
    quoka::MaskedOptions masked{.chunk = settings_.chunk,
                                .min_past = settings_.min_past,
                                .decode = settings_.decode,
                                .sketch = settings_.sketch};
    if (node.layer >= 0) {
      if (node.layer <= last_layer_) check_layers();  // those of a graph have called
      last_layer_ = node.layer;
      layers_.saw(node.layer, node.cache_cells(), node.unselectable() == nullptr);
    }
    const char* exact = why_exact(node);
    if (exact == nullptr) {
      masked.selection = settings_.selection(node.layer);
      find_known(node);
    }
    quoka::MaskedReport report;
    try {
      report = attention_.run(streams_, masked, options, pool);
    } catch (const std::invalid_argument& e) {  // nothing was written
      if (!masked.selection) throw;
      stats_.refused(std::string("selection refused: ") + e.what());
      masked.selection.reset(), exact = "exact: selection refused";
      report = attention_.run(streams_, masked, options, pool);
    }
    if (report.sliding_window && node.layer >= 0 && !layers_.has_window(node.layer)) {
      layers_.slides(node.layer);
      if (exact == among_first) exact = a_window();
    }
    const Arithmetic used = arithmetic_used(settings_.arithmetic, node.k.type, node.v.type,
                                            node.q.ne[1], node.q_heads() / node.kv_heads());
    stats_.add(node.layer, report, name_of(used),
               exact != nullptr ? exact : quoka::describe(report.outcome), kind_of(node));
  }

 private:
  // k or v of one stream; of a type that is not read in place: all of it is converted with the
  // first.
  static quoka::Rows cache_rows(const ggml_tensor& t, Index stream, quoka::Buffer<float>& floats,
                                quoka::ThreadPool& pool) {
    if (const quoka::Format* const format = format_of_type(t.type))
      return rows_of<quoka::Rows>(t, *format, stream, 2, 1);
    if (stream == 0) dequantise(t, floats.reserve_amortised(ggml_nelements(&t)), pool);
    const auto row = static_cast<Index>(sizeof(float)) * t.ne[0], head = row * t.ne[1];
    return {reinterpret_cast<const std::byte*>(floats.data()) + stream * t.ne[2] * head,
            quoka::format_of<float>(),
            {1, t.ne[2], t.ne[1], t.ne[0]},
            {0, head, row}};
  }
  static constexpr std::size_t most_caches = 4096;  // then all are forgotten
  static constexpr const char* among_first =
      "exact: one of the first layers, dense by the settings";
  static const char* a_window() { return quoka::describe(quoka::MaskedOutcome::sliding_window); }

  // The layer's kind of attention, as far as earlier calls show it.
  std::string kind_of(const Node& node) const {
    const char* const why = node.unselectable();
    std::string kind = why != nullptr                   ? why
                       : layers_.has_window(node.layer) ? "a sliding window"
                                                        : "full attention";
    if (node.shares_keys()) kind += " over layer " + std::to_string(node.cache_layer) + "'s keys";
    return kind;
  }
  // Once, where all layers have called (a server's first graph, of two tokens over an empty cache, is
  // the CPU's): says which settings of layers the model does not have, and
  // that none selects.
  void check_layers() {
    if (last_layer_ < 0 || std::exchange(checked_, true) || settings_.mode == "exact") return;
    std::string dense_missing, budgets_missing;
    const auto look_for = [&](Index layer, std::string& missing) {
      if (!layers_.called(static_cast<int>(layer)))
        missing += (missing.empty() ? "" : ", ") + std::to_string(layer);
    };
    for (const Index layer : settings_.policy.dense) look_for(layer, dense_missing);
    for (const auto& own : settings_.policy.budgets) look_for(own.first, budgets_missing);
    const auto [first, last] = layers_.first_and_last();
    for (const auto& [setting, missing] :
         {std::pair{"dense_layers", dense_missing}, {"layer_budgets", budgets_missing}})
      if (!missing.empty())
        stats_.say_once(std::string(setting) + " names layer " + missing +
                        ", and no attention of it comes here: the first that comes is of layer " +
                        std::to_string(first) + ", the last of layer " + std::to_string(last));
    const std::vector<int> could = layers_.selectable();
    const auto dense = [&](int layer) {
      return settings_.policy.dense.contains(layer) ||
             layers_.before(layer) < settings_.first_dense;
    };
    if (could.empty())
      stats_.say_once("no layer selects keys: the model has none that could");
    else if (std::all_of(could.begin(), could.end(), dense))
      stats_.say_once("no layer selects keys: dense_layers is " + settings_.dense_layers() +
                      ", and " + std::to_string(could.size()) +
                      " of the model's layers could select");
  }
  // What is known of the cells that a selection chooses from, where keys lie in a cache.
  void find_known(const Node& node) {
    if (!node.cached || format_of_type(node.k.type) == nullptr) return;
    if (caches_.size() > most_caches) caches_.clear();
    for (quoka::MaskedStream& stream : streams_) stream.known = &caches_[stream.k.data()];
  }
  // Why this layer is exact; null: its chunks may select.
  const char* why_exact(const Node& node) try {
    if (settings_.mode == "exact") return "exact: the mode";
    if (node.model_chooses()) return "exact: the model chooses keys by itself";
    if (settings_.policy.dense.contains(node.layer)) return "exact: a dense layer by the settings";
    if (layers_.has_window(node.layer)) return a_window();
    if (node.layer >= 0 && layers_.before(node.layer) < settings_.first_dense) return among_first;
    settings_.policy.check_shape(node.q_heads(), node.kv_heads(), node.q.ne[0]);
    return nullptr;
  } catch (const std::invalid_argument& e) {
    stats_.refused(e.what());
    return "exact: settings of another model";
  }

  const Settings settings_;
  Stats& stats_;
  LayerOrder layers_;
  int last_layer_ = -1;   // that called
  bool checked_ = false;  // settings of layers
  int threads_ = 1;
  Index graphs_ = 0;
  std::map<int, quoka::ThreadPool> pools_;
  quoka::Buffer<float> k_floats_, v_floats_;
  std::vector<quoka::MaskedStream> streams_;
  std::map<const void*, KnownCells> caches_;  // by where a layer's keys begin
  quoka::MaskedAttention attention_;
};

}  // namespace quoka_ggml
