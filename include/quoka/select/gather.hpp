// Gather: the selected rows as a tensor of their own, for those who feed another attention kernel.
//
// quoka::attention never makes this copy: it packs selected rows straight from the cache.
// count * head_dim elements read and written per KV head.
#pragma once

#include <quoka/core/executor.hpp>
#include <quoka/core/view.hpp>
#include <quoka/select/selection.hpp>

namespace quoka::inline QUOKA_ABI {

// past [batch, kv_heads, kv_len, dim] (keys or values) to [batch, kv_heads, count, dim], positions
// ascending. Throws std::invalid_argument when the selection was made for another shape.
template <TensorLike K>
Tensor<storage_t<K>> gather(const K& past, const Selection& keep,
                            ExecutorRef executor = SerialExecutor{}) {
  const auto view = view_of(past);
  keep.require_shape(view.batch(), view.heads(), view.len());
  Tensor<storage_t<K>> rows(view.batch(), view.heads(), keep.count(), view.dim());
  executor.run(view.batch() * view.heads(), [&](Index task, int) {
    const Index b = task / view.heads(), kv_head = task % view.heads();
    const auto positions = keep.row(b, kv_head);
    storage_t<K>* to = rows.data() + task * keep.count() * view.dim();
    for (Index i = 0; i < keep.count(); ++i, to += view.dim())
      std::copy_n(view.row(b, kv_head, keep.is_all() ? i : positions[static_cast<std::size_t>(i)]),
                  view.dim(), to);
  });
  return rows;
}

}  // namespace quoka::inline QUOKA_ABI
