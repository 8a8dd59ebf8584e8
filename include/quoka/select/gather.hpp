// Gather: the selected rows as a tensor of their own, for those who feed another attention kernel.
//
// quoka::attention never makes this copy: it packs selected rows straight from the cache.
// count * head_dim elements read and written per KV head.
#pragma once

#include <quoka/runtime/executor.hpp>
#include <quoka/views/selection.hpp>
#include <quoka/views/tensor.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {

// past [batch, kv_heads, kv_len, dim] (keys or values) to [batch, kv_heads, most, dim], positions
// ascending; `most` is keep.max_count(), and a KV head that keeps fewer ends in rows of zeros. Throws
// std::invalid_argument when the selection was made for another shape.
template <TensorLike K>
Tensor<storage_t<K>> gather(const K& past, const Selection& keep,
                            ExecutorRef executor = SerialExecutor{}) {
  using T = storage_t<K>;
  const auto view = view_of(past);
  keep.require_shape(view.batch(), view.heads(), view.len());
  const Index most = keep.max_count();
  Tensor<T> rows(view.batch(), view.heads(), most, view.dim());
  executor.run(view.batch() * view.heads(), [&](Index task, int) {
    const Index b = task / view.heads(), kv_head = task % view.heads();
    const auto positions = keep.row(b, kv_head);
    const Index count = keep.count(b, kv_head);
    T* to = rows.data() + task * most * view.dim();
    for (Index i = 0; i < count; ++i, to += view.dim())
      std::copy_n(view.row(b, kv_head, keep.is_all() ? i : positions[static_cast<std::size_t>(i)]),
                  view.dim(), to);
    std::fill_n(to, (most - count) * view.dim(), T(0.0f));
  });
  return rows;
}

}  // namespace QUOKA_ABI
}  // namespace quoka
