// Linked with b.cpp, which is compiled without vector instructions: two users of the library in one
// program, built with different flags. Each must get its own functions, and both the same results
// up to rounding.
#include <quoka/quoka.hpp>

#include <cmath>

int lanes_of_b();
void attend_in_b(const float* q, const float* k, float* out);

void attend_in_a(const float* q, const float* k, float* out);
void attend_in_a(const float* q, const float* k, float* out) {
#include "odr/attend.inc"
}

int main() {
  quoka::Tensor<float> q(1, 4, 32, 40), k(1, 2, 300, 40), a(1, 4, 32, 40), b(1, 4, 32, 40);
  q.setRandom(), k.setRandom();
  attend_in_a(q.data(), k.data(), a.data());
  attend_in_b(q.data(), k.data(), b.data());
  float error = 0.0f;
  for (quoka::Index i = 0; i < a.size(); ++i)
    error = std::max(error, std::abs(a.data()[i] - b.data()[i]));
  const bool other_functions = quoka::simd::lanes == 1 || lanes_of_b() == 1;
  return error < 1e-5f && other_functions ? 0 : 1;
}
