// What a layer has whatever its method: sizes, attention's options, a cache, and the checks of a call.
//
// A call is checked here, once and as a whole, before anything is done. Selection, attention and the
// cache then take it as it is. No template: compiled once.
#pragma once

#include <quoka/attention/attention.hpp>
#include <quoka/layer/kv_cache.hpp>
#include <quoka/layer/layer_shape.hpp>
#include <quoka/select/selector.hpp>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

class Layer {
 public:
  // `own`: the format of keys and values where the shape names none. Throws std::invalid_argument for
  // sizes below 1, q_heads that are no multiple of kv_heads, formats and scales that KvCache refuses,
  // and options that attention() or OwnedAttentionOptions refuses.
  Layer(const LayerShape& shape, const Format& own, const AttentionOptions& options);

  // Each throws std::invalid_argument for what its call must not be given: shapes that do not fit,
  // memory of this layer's cache, which growth frees, outputs that share memory.
  void check_queries(const Rows& q) const;
  void check_chunk(const Rows& q, const Rows& k, const Rows& v) const;
  void check_forward(const Rows& q, const Rows& k, const Rows& v, const AttentionOutput& out) const;
  void check_prompt(const Rows& q, const Rows& k, const Rows& v, const OutputRows& out) const;

  // Of what was checked: attention to the cached keys in `selection` and to the chunk.
  void attend(const Rows& q, const Selection& selection, const Chunk& chunk,
              const AttentionOutput& out, ExecutorRef executor);

  // The cached keys in `selection`, for attention.
  Past past(const Selection& selection) { return {cache_.k(), cache_.v(), selection}; }
  // For a selector: these queries over the cached keys.
  SelectorInput input(const Rows& q, const Rows& chunk_k) const;

  const LayerShape& shape() const { return shape_; }  // v_dim and formats filled in, no scales
  AttentionOptions options() const { return options_.view(); }
  KvCache& cache() { return cache_; }
  const KvCache& cache() const { return cache_; }
  // Another's scratch memory from now on, which outlives the layer.
  void share_workspace(AttentionWorkspace& workspace) {
    workspace_ = {};
    shared_workspace_ = &workspace;
  }
  AttentionWorkspace& workspace() {
    return shared_workspace_ != nullptr ? *shared_workspace_ : workspace_;
  }
  Index scratch_bytes() const { return workspace_.bytes(); }  // of its own
  // Back to the first `len` keys. Throws as KvCache::truncate.
  void truncate(Index len) { cache_.truncate(len); }

 private:
  LayerShape shape_;
  OwnedAttentionOptions options_;
  KvCache cache_;
  AttentionWorkspace workspace_;
  AttentionWorkspace* shared_workspace_ = nullptr;  // in its place, if given
};

// A layer back at `len` tokens, unless all went well.
template <class L>
class Rewind {
 public:
  Rewind(L& layer, Index len) : layer_(&layer), len_(len) {}
  Rewind(const Rewind&) = delete;
  Rewind& operator=(const Rewind&) = delete;
  ~Rewind() {
    if (layer_ != nullptr) layer_->truncate(len_);
  }
  void dismiss() { layer_ = nullptr; }

 private:
  L* layer_;
  Index len_;
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka

#if !defined(QUOKA_COMPILED)
#include <quoka/layer/layer_impl.hpp>
#endif
