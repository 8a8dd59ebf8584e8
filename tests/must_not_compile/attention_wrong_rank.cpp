// expect: (could not convert|no matching function|no viable conversion|cannot convert|invalid initialization)
// [len, head_dim] has no heads: rank 4, or 3 for a batch of one.
#include <quoka/attention/attention.hpp>

#ifdef QUOKA_VALID
using Queries = Eigen::Tensor<float, 3, Eigen::RowMajor>;
#else
using Queries = Eigen::Tensor<float, 2, Eigen::RowMajor>;
#endif
using Keys = Eigen::Tensor<float, 4, Eigen::RowMajor>;

void attend(const Queries& q, const Keys& k, const Keys& v, Keys& out) { quoka::attention(q, {}, {k, v}, out); }
