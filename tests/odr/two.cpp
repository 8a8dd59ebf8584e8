#include <quoka/quoka.hpp>

#include <cmath>
#include <cstdio>
#include <vector>

float use_in_one(float* x);
static float use_in_two(float* x) {
#include "odr/use.inc"
}

int main(int argc, char**) {
  std::vector<float> x(80000);
  unsigned state = 1;
  for (float& value : x)
    state = state * 1664525u + 1013904223u,
    value = static_cast<float>(state >> 9) * 0x1p-23f - 0.5f;
  const float two = use_in_two(x.data());
  const float one = argc > 1 ? two : use_in_one(x.data());
  std::printf("%g %g\n", static_cast<double>(one), static_cast<double>(two));
  return two != 0.0f && std::abs(one - two) < 1e-3f * std::abs(two) ? 0 : 1;
}
