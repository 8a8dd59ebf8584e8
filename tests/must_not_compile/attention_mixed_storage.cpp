// expect: (could not convert|no matching function|no viable conversion|no known conversion|cannot convert)
// Queries in float and keys in half: one call has one storage type, and a conversion is the caller's to see.
#include <quoka/attention/attention.hpp>

#ifdef QUOKA_VALID
using Stored = float;
#else
using Stored = Eigen::half;
#endif
using Queries = Eigen::Tensor<float, 4, Eigen::RowMajor>;
using Keys = Eigen::Tensor<Stored, 4, Eigen::RowMajor>;

void attend(const Queries& q, const Keys& k, const Keys& v, Queries& out) {
  quoka::attention(q, {k, v}, {k, v}, out);
}
