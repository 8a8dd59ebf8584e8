// The row-major Eigen tensor that the stages return. The only header that includes Eigen's Tensor:
// it takes a compiler longer to read than the rest of the library.
#pragma once

#include <quoka/rows/tensor_view.hpp>

#include <unsupported/Eigen/CXX11/Tensor>

namespace quoka {
inline namespace QUOKA_ABI {

static_assert(sizeof(Eigen::Index) == sizeof(Index),
              "quoka: Eigen's index must have 64 bits: leave EIGEN_DEFAULT_DENSE_INDEX_TYPE alone");

// A row-major Eigen tensor, [batch, heads, len, dim] or [batch, heads, len].
template <class T, int Rank = 4>
using Tensor = Eigen::Tensor<T, Rank, Eigen::RowMajor>;

}  // namespace QUOKA_ABI
}  // namespace quoka
