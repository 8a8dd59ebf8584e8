// Queries and keys with a known geometry: where selection by a few queries should hold, and where
// it should fail.
//
// z is a random unit vector with a power-law spectrum, m_q and m_k unit vectors of a KV head with
// cos(m_q, m_k) = -0.5, n a standard normal number:
//
//   keys        10 exp(sigma n) (0.6 m_k + 0.8 z); the first is a sink, 8.55 m_q
//   queries     9 exp(0.25 n) (0.85 m_q + 0.53 z)
//   retrieval   14 (0.8 key / |key| + 0.35 z + 0.25 m_q) for a random earlier key; a few per chunk
//
//   paper       8 of 128 queries retrieve; the heads of a group at the same tokens: QuoKA's premise
//   heads       each head at tokens of its own
//   isotropic   queries 9 z, keys 10 exp(0.25 n) z, nothing retrieves: the negative control
//   adverse     retrieval queries are like the mean as any other: 24 (0.85 m_q + 0.53 o), o the
//               key's direction less its part along m_q; the sink is 2.5 m_q, or it would outshine
//               them
//   norms       sigma = 0.25 in place of 0.05: cosine scores cannot see which keys are long
//   outliers    32 of 128 queries retrieve: more than the 16 that score
#pragma once

#include <quoka/rows/tensor.hpp>

#include "support/capture.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace quoka_examples {

using quoka::Index;

struct Geometry {
  std::string name;
  double retrieval_share = 8.0 / 128.0;
  double key_sigma = 0.05;
  double sink = 8.55;
  bool heads_agree = true, isotropic = false, adverse = false;
};

inline std::vector<Geometry> geometries() {
  return {{.name = "paper"},
          {.name = "heads", .heads_agree = false},
          {.name = "isotropic", .retrieval_share = 0.0, .key_sigma = 0.25, .isotropic = true},
          {.name = "adverse", .sink = 2.5, .adverse = true},
          {.name = "norms", .key_sigma = 0.25},
          {.name = "outliers", .retrieval_share = 32.0 / 128.0}};
}

// Throws std::invalid_argument, with all names, for an unknown one.
inline Geometry geometry_named(const std::string& name) {
  std::string known;
  for (const Geometry& geometry : geometries()) {
    if (geometry.name == name) return geometry;
    known += ' ' + geometry.name;
  }
  throw std::invalid_argument("no geometry is called \"" + name + "\"; there are" + known);
}

class Generator {
 public:
  Generator(const Geometry& geometry, Index head_dim, unsigned seed)
      : geometry_(geometry), dim_(head_dim), random_(seed) {}

  // One layer of `len` tokens: q [1, kv_heads * group, len, head_dim], k, v [1, kv_heads, len,
  // head_dim], and the targets of the queries that retrieve.
  LayerCapture layer(Index kv_heads, Index group, Index len) {
    using Tensor = quoka::Tensor<float>;
    LayerCapture layer{geometry_.name, Tensor(1, kv_heads * group, len, dim_),
                       Tensor(1, kv_heads, len, dim_), Tensor(1, kv_heads, len, dim_),
                       quoka::Tensor<quoka::Position, 3>(1, kv_heads * group, len)};
    layer.targets.setConstant(-1);
    for (Index i = 0; i < layer.v.size(); ++i)
      layer.v.data()[i] = static_cast<float>(normal_(random_));
    for (Index g = 0; g < kv_heads; ++g) head(layer, g, group, len);
    return layer;
  }

 private:
  using Vector = std::vector<double>;

  void head(LayerCapture& layer, Index g, Index group, Index len) {
    const Vector m_q = unit();
    Vector m_k = unit();
    add(m_k, m_q, -dot(m_k, m_q));
    scale(m_k, std::sqrt(0.75) / std::sqrt(dot(m_k, m_k)));
    add(m_k, m_q, -0.5);
    for (Index t = 0; t < len; ++t) {
      Vector key = spectral();
      if (!geometry_.isotropic) scale(key, 0.8), add(key, m_k, 0.6);
      scale(key, 10.0 * std::exp(geometry_.key_sigma * normal_(random_)));
      if (t == 0 && !geometry_.isotropic) key = m_q, scale(key, geometry_.sink);
      put(layer.k, g, t, key);
    }
    for (Index t = 0; t < len; ++t) {
      bool retrieves = uniform_(random_) < geometry_.retrieval_share;
      Index target = t > 0 ? static_cast<Index>(uniform_(random_) * static_cast<double>(t)) : 0;
      for (Index r = 0; r < group; ++r) {
        if (r > 0 && !geometry_.heads_agree) {
          retrieves = uniform_(random_) < geometry_.retrieval_share;
          target = static_cast<Index>(uniform_(random_) * static_cast<double>(t));
        }
        put(layer.q, g * group + r, t, query(layer, g, m_q, retrieves, target));
        if (retrieves) layer.targets(0, g * group + r, t) = static_cast<quoka::Position>(target);
      }
    }
  }

  Vector query(const LayerCapture& layer, Index g, const Vector& m_q, bool retrieves,
               Index target) {
    Vector q = spectral();
    if (geometry_.isotropic) {
      scale(q, 9.0);
    } else if (!retrieves) {
      scale(q, 0.53), add(q, m_q, 0.85);
      scale(q, 9.0 * std::exp(0.25 * normal_(random_)));
    } else {
      Vector key(static_cast<std::size_t>(dim_));
      for (Index c = 0; c < dim_; ++c)
        key[static_cast<std::size_t>(c)] = double{layer.k(0, g, target, c)};
      if (geometry_.adverse) add(key, m_q, -dot(key, m_q));
      const double inverse = 1.0 / std::max(std::sqrt(dot(key, key)), 1e-6);  // the sink's is 0
      scale(q, geometry_.adverse ? 0.0 : 0.35);
      add(q, key, (geometry_.adverse ? 0.53 : 0.8) * inverse);
      add(q, m_q, geometry_.adverse ? 0.85 : 0.25);
      scale(q, geometry_.adverse ? 24.0 : 14.0);
    }
    return q;
  }

  Vector unit() {
    Vector x(static_cast<std::size_t>(dim_));
    for (double& value : x) value = normal_(random_);
    scale(x, 1.0 / std::sqrt(dot(x, x)));
    return x;
  }
  // A unit vector whose channels' variance falls as 1 / (channel + 1).
  Vector spectral() {
    Vector x(static_cast<std::size_t>(dim_));
    for (std::size_t c = 0; c < x.size(); ++c)
      x[c] = normal_(random_) / std::sqrt(static_cast<double>(c + 1));
    scale(x, 1.0 / std::sqrt(dot(x, x)));
    return x;
  }
  static double dot(const Vector& x, const Vector& y) {
    double sum = 0.0;
    for (std::size_t c = 0; c < x.size(); ++c) sum += x[c] * y[c];
    return sum;
  }
  static void scale(Vector& x, double factor) {
    for (double& value : x) value *= factor;
  }
  static void add(Vector& x, const Vector& y, double factor) {
    for (std::size_t c = 0; c < x.size(); ++c) x[c] += factor * y[c];
  }
  static void put(quoka::Tensor<float>& to, Index head, Index t, const Vector& x) {
    for (std::size_t c = 0; c < x.size(); ++c)
      to(0, head, t, static_cast<Index>(c)) = static_cast<float>(x[c]);
  }

  Geometry geometry_;
  Index dim_;
  std::mt19937 random_;
  std::normal_distribution<double> normal_;
  std::uniform_real_distribution<double> uniform_;
};

}  // namespace quoka_examples
