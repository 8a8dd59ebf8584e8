// expect: (constraint failure|constraints not satisfied)
// A layer of doubles: storage is float, half or bfloat16.
#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/rows/tensor.hpp>
#include <quoka/select/dense.hpp>

#ifdef QUOKA_VALID
using Scalar = Eigen::half;
#else
using Scalar = double;
#endif

quoka::Index len_of(const quoka::ChunkedPrefill<quoka::DenseSelector, Scalar>& layer) {
  return layer.kv_len();
}
