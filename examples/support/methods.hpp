// Selectors by name, for programs that compare them.
//
// A method is a selector of quoka/methods/all.hpp, in its default form or in a named variant:
// "sparq", "sparq.logit". "xattention.threshold" (tau 0.9), "flash_prefill.threshold" (alpha 0.12)
// and "flash_prefill.compact" (CompactAttention's, 0.06) choose how many keys by themselves: they
// ignore the budget. QuoKA's options may be joined by dots, in any number and order:
//
//   quoka.float.first4               QuokaOptions: float (no sketch), first<n>, recent<n>,
//                                    queries<n>
//   quoka.balanced.float.kernel7     MassOptions: recommended or balanced, with the budget as asked
//                                    for; float, kernel<n>, first<n>, recent<n>, group<n> (queries
//                                    of each KV head), threshold<n> (hundredths), least<n>
//   quoka.mixed.per_head.kernel7     not an option of the library (ablation.hpp): mixed, per_head,
//                                    mean, softmax, kernel<n>; with first<n>, recent<n>,
//                                    queries<n>, group<n>
//
// Its layers hide which selector they hold; a virtual call per chunk costs nothing beside it.
#pragma once

#include "context_parallel/communicator.hpp"

#include <quoka/attention/attention.hpp>
#include <quoka/layer/kv_cache.hpp>
#include <quoka/runtime/thread_pool.hpp>
#include <quoka/select/quoka.hpp>

#include <memory>
#include <string>
#include <vector>

namespace quoka_examples {

using quoka::Index;

// One prefill layer (quoka::ChunkedPrefill) in float, whatever its selector.
class AnyLayer {
 public:
  using View = quoka::TensorView<const float>;

  virtual ~AnyLayer() = default;
  virtual void forward(View q, View k, View v, quoka::TensorView<float> out,
                       quoka::ExecutorRef threads) = 0;
  // k: the chunk's own keys, for methods that look at them.
  virtual const quoka::Selection& select(View q, quoka::ExecutorRef threads, View k = {}) = 0;
  virtual void append(View k, View v) = 0;
  virtual void append(View q, View k, View v, quoka::ExecutorRef threads) = 0;
  virtual void truncate(Index len) = 0;
  virtual void reserve(Index len) = 0;
  virtual Index kv_len() const = 0;
  virtual View keys() const = 0;
  virtual View values() const = 0;
  virtual const quoka::Selection& selection() const = 0;
  virtual Index kept_bytes() const = 0;
  virtual Index scratch_bytes() const = 0;
  // FLOPs of select() for q_len queries at the present length: support/scoring_flops.hpp.
  virtual double scoring_flops(Index q_len) const = 0;
};

using LayerStack = std::vector<std::unique_ptr<AnyLayer>>;

// Options that methods have in common, and QuoKA's own options (their budget is ignored).
// n_queries, keep_first and keep_last are for every method that has them; a method that keeps first
// keys anyway (first_recent, less_is_more) keeps at least its own.
struct MethodOptions {
  quoka::Budget budget = quoka::Budget::keys(1024);
  Index rank = 0;  // channels or directions of SparQ and Loki; 0: half of head_dim, at most 64
  quoka::QuokaOptions quoka = {};
  // Layers in shards over these, called on all of them; null: whole layers. For dense and quoka
  // alone, without a window (context_parallel/sharded_prefill.hpp). Such a layer runs, grows and
  // shrinks; select(), keys(), values() and scratch_bytes() throw std::logic_error.
  Communicator* ranks = nullptr;
};

// Every method and variant; those without a dot are the selectors' default forms.
std::vector<std::string> all_methods();
// "all" is every default form but dense, and those by mean logits (mean_query.hpp); otherwise a
// comma-separated list. Throws std::invalid_argument for an unknown name.
std::vector<std::string> parse_methods(const std::string& list);
// "keys", for a table of what a method looks at: does it share a choice between layers?
bool shares_layers(const std::string& method);

// The layers `which` (0 <= which[i] < layer_count, ascending) of one sequence. A method that shares
// a choice between layers shares it among them, and chooses first at layer first_sparse. Throws
// std::invalid_argument for an unknown name, and for a method that options.ranks does not serve.
LayerStack make_layers(const std::string& method, const quoka::LayerShape& shape,
                       const MethodOptions& options, const quoka::AttentionOptions& attention = {},
                       const std::vector<Index>& which = {0}, Index layer_count = 1,
                       Index first_sparse = 0);

}  // namespace quoka_examples
