#include "support/drawn_rows.hpp"

#include <ostream>

namespace quoka_test {

namespace {

constexpr std::pair<bool Values::*, const char*> value_names[] = {
    {&Values::sinks, "sinks"},
    {&Values::outliers, "outliers"},
    {&Values::copies, "copies"},
    {&Values::zeros, "zeros"},
    {&Values::not_finite, "not finite"},
    {&Values::steep, "steep"},
    {&Values::wide, "wide"},
    {&Values::ends, "ends of float"},
    {&Values::whole, "whole numbers"},
    {&Values::cancels, "heads cancel"},
    {&Values::near, "near"},
    {&Values::nothing, "nothing"},
    {&Values::unfair, "unfair"}};

// A row's length, to the ends of float.
double any_size(Random& random) {
  return random.one_of(1.0, 1.0, 1.0, 1e-10, 1e-13, 1e-20, 1e-22, 1e-30, 1e-38, 1e-42, 1e-45, 1e10,
                       1e13, 1e20, 1e30, 1e38);
}

Tensor4<float> drawn_rows(Random& random, const Values& v, Index batch, Index heads, Index group,
                          Index len, Index dim) {
  const bool keys = group == 0;
  auto rows = random.tensor<float>(batch, heads, len, dim, keys ? 1.0 : 1.5);
  const Index loud = dim / 3;
  const double one_size = v.ends && random.seldom(2) ? any_size(random) : 0.0,
               left = v.cancels && !keys && random.seldom(2) ? any_size(random) : 0.0;
  for (Index b = 0; b < batch; ++b)
    for (Index head = 0; head < heads; ++head)
      for (Index i = 0; i < len; ++i) {
        float* const row = &rows(b, head, i, 0);
        if (v.copies && keys && i >= 5) std::copy_n(&rows(b, head, i % 5, 0), dim, row);
        if (v.near && keys && i >= 5 && i % 3 == 0) row[i % dim] *= 1.002f;
        if (v.outliers) row[loud] = 20.0f + row[loud], row[dim - 1] *= 9.0f;
        if (v.sinks && keys && i < 4) row[0] = 40.0f + static_cast<float>(i);
        if (v.sinks && !keys) row[0] = 2.0f;
        if (v.unfair && (!keys || i % 8 == 0)) row[0] += 9.0f;
        const double odd = random.uniform();
        float size = v.steep && !keys ? 12.0f : 1.0f;
        if (v.wide) size = static_cast<float>(std::pow(10.0, 30.0 * random.uniform() - 15.0));
        if (v.zeros && odd < 0.1) size = 0.0f;
        const double times = !v.ends ? 1.0 : one_size != 0.0 ? one_size : any_size(random);
        for (Index c = 0; c < dim; ++c)
          row[c] = static_cast<float>(double{v.whole ? std::round(row[c]) : row[c]} * double{size} *
                                      times);
        if (v.not_finite && odd > 0.95)
          row[random.below(dim)] = odd > 0.98 ? not_a_number : odd > 0.965 ? infinity : -infinity;
        if (v.nothing) std::fill_n(row, dim, not_a_number);
        if (v.cancels && !keys && head % group == 1)
          for (Index c = 0; c < dim; ++c) {
            float& before = rows(b, head - 1, i, c);
            const bool stays = left != 0.0 && c % 2 == 1;
            if (stays) before = static_cast<float>(left * random.normal());
            row[c] = stays ? static_cast<float>(left * random.normal()) : -before;
          }
      }
  return rows;
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Values& v) {
  for (const auto& [is, name] : value_names)
    if (v.*is) out << ", " << name;
  return out;
}

Values drawn_values(Random& random) {
  Values v;
  for (bool* const is : {&v.sinks, &v.outliers, &v.copies, &v.zeros, &v.not_finite, &v.steep})
    *is = random.chance(0.2);
  v.wide = random.chance(0.07);
  v.near = v.copies && random.chance(0.5);
  v.nothing = random.chance(0.04);
  v.not_finite = v.not_finite || v.nothing;
  return v;
}

Tensor4<float> drawn_keys(Random& random, const Values& v, Index batch, Index heads, Index len,
                          Index dim) {
  return drawn_rows(random, v, batch, heads, 0, len, dim);
}
Tensor4<float> drawn_queries(Random& random, const Values& v, Index batch, Index heads, Index group,
                             Index len, Index dim) {
  return drawn_rows(random, v, batch, heads, group, len, dim);
}

Tensor4<float> without_row(const Tensor4<float>& x, Index i) {
  Tensor4<float> rest(x.dimension(0), x.dimension(1), x.dimension(2) - 1, x.dimension(3));
  for (Index from = 0, to = 0; from < x.dimension(2); ++from)
    if (from != i) rest.chip(to++, 2) = x.chip(from, 2);
  return rest;
}

Tensor4<float> with_row(Tensor4<float> x, Index i, float value) {
  x.chip(i, 2).setConstant(value);
  return x;
}

}  // namespace quoka_test
