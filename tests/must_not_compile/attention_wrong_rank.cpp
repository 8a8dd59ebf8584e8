// expect: tensors must have rank 4, .batch, heads, len, dim., or rank 3, without batch
// [len, dim] has no heads.
#include <quoka/attention/attention.hpp>
#include <quoka/rows/tensor.hpp>

#ifdef QUOKA_VALID
using Queries = quoka::Tensor<float, 3>;
#else
using Queries = quoka::Tensor<float, 2>;
#endif
using Keys = quoka::Tensor<float>;

void attend(const Queries& q, const Keys& k, Keys& out) { quoka::attention(q, {}, {k, k}, out); }
