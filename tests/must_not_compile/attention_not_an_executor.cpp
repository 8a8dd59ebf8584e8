// expect: (no matching function|constraints not satisfied)
// An executor runs tasks and says how many workers it has.
#include <quoka/attention/attention.hpp>
#include <quoka/rows/tensor.hpp>

using Tensor = quoka::Tensor<float>;

struct Pool {
#ifdef QUOKA_VALID
  int workers() const { return 1; }
#endif
  template <class F>
  void run(quoka::Index tasks, F&& f) {
    for (quoka::Index task = 0; task < tasks; ++task) f(task, 0);
  }
};

void attend(const Tensor& q, const Tensor& k, const Tensor& v, Tensor& out, Pool& pool) {
  quoka::attention(q, {}, {k, v}, out, {}, pool);
}
