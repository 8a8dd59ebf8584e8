// Vectors for which the bound of 8-bit codes is tight: the part of a key, or of a query, that codes miss is parallel to the
// other one, whose codes are exact. Codes of a vector with one channel of 127 are its integers.
//
//   coarse(side)   127 in channel 0, 0.499 * side * sign[c] elsewhere: codes see channel 0 and miss 0.499 of a code in every
//                  other one
//   signs(side)    side * sign[c] in channels 1 and up: exact codes, whose product with those of the other one is 0
//
// A rival is exact in codes, and its score lies a little nearer to 0.
#pragma once

#include "support/fixtures.hpp"

#include <array>
#include <vector>

namespace quoka_test {

struct WholeBound {
  using Vector = std::array<double, 128>;

  explicit WholeBound(Random& random) {
    for (double& s : sign) s = random.below(2) == 0 ? -1.0 : 1.0;
  }
  Vector coarse(double side) const {
    Vector x = signs(0.499 * side);
    x[0] = 127.0;
    return x;
  }
  Vector signs(double side) const {
    Vector x{};
    for (std::size_t c = 1; c < x.size(); ++c) x[c] = side * sign[c];
    return x;
  }
  // Its product with signs(1) is `steps`.
  Vector rival_of_coarse_keys(double steps) const {
    Vector x{};
    x[0] = 127.0, x[1] = steps * sign[1];
    return x;
  }
  // Its product with coarse(+-1) is 127 * steps: what codes miss of the query cancels.
  Vector rival_of_coarse_query(double steps) const {
    Vector x{};
    x[0] = steps, x[1] = 127.0 * sign[1], x[2] = -127.0 * sign[2];
    return x;
  }

  Vector sign;
};

// [1, 1, rows, channels], times a size.
inline Tensor4<float> rows_of(const std::vector<WholeBound::Vector>& rows, double size = 1.0) {
  Tensor4<float> x(1, 1, std::ssize(rows), std::ssize(rows[0]));
  for (Index i = 0; i < x.dimension(2); ++i)
    for (Index c = 0; c < x.dimension(3); ++c)
      x(0, 0, i, c) = static_cast<float>(size * rows[uz(i)][uz(c)]);
  return x;
}

}  // namespace quoka_test
