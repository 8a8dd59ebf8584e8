#include "support/baseline_oracle.hpp"

namespace oracle {

double scale_or_default(double scale, Index dim) {
  return scale != 0 ? scale : 1.0 / std::sqrt(static_cast<double>(dim));
}

std::vector<Row> rows_of(const Tensor& x, Index b, Index head) {
  std::vector<Row> rows;
  for (Index i = 0; i < x.len; ++i) rows.push_back(x.row(b, head, i));
  return rows;
}

std::vector<Row> group_rows(const Tensor& q, Index b, Index kv_head, Index kv_heads,
                            const std::vector<Index>& positions) {
  const Index group = q.heads / kv_heads;
  std::vector<Row> rows;
  for (Index r = 0; r < group; ++r)
    for (Index i : positions) rows.push_back(q.row(b, kv_head * group + r, i));
  return rows;
}

Logits scaled_dots(const std::vector<Row>& queries, const std::vector<Row>& keys, double scale) {
  Logits logits;
  for (Row query : queries) {
    logits.push_back({});
    for (Row key : keys)
      logits.back().push_back(scale_or_default(scale, std::ssize(query)) * dot(query, key));
  }
  return logits;
}

std::vector<double> softmax(const std::vector<double>& x) {
  double largest = -infinity, sum = 0;
  for (double value : x) largest = std::max(largest, value);
  for (double value : x) sum += std::exp(value - largest);
  std::vector<double> p;
  for (double value : x) p.push_back(std::exp(value - largest) / sum);
  return p;
}

std::vector<double> aggregate(const Logits& logits, Domain domain) {
  if (logits.empty()) return {};
  std::vector<double> mean(logits[0].size(), 0.0);
  for (const std::vector<double>& row : logits) {
    const std::vector<double> value = domain == Domain::softmax ? softmax(row) : row;
    for (std::size_t t = 0; t < mean.size(); ++t) mean[t] += value[t];
  }
  for (double& value : mean) value /= static_cast<double>(logits.size());
  return mean;
}

Scores no_scores(const Tensor& keys) {
  return Scores(uz(keys.batch), std::vector<std::vector<double>>(uz(keys.heads)));
}

std::vector<Index> best(const std::vector<double>& scores, Index k, Index keep_first,
                        Index keep_last) {
  Scores one(1);
  one[0].push_back(scores);
  return top_k(one, k, keep_first, keep_last)[0][0];
}

Scores scores_by_rows(const Tensor& q, const Tensor& past_k, const std::vector<Index>& positions,
                      Domain domain, double scale) {
  Scores scores = no_scores(past_k);
  for (Index b = 0; b < past_k.batch; ++b)
    for (Index g = 0; g < past_k.heads; ++g)
      scores[uz(b)][uz(g)] = aggregate(
          scaled_dots(group_rows(q, b, g, past_k.heads, positions), rows_of(past_k, b, g), scale),
          domain);
  return scores;
}

Scores exact_scores(const Tensor& q, const Tensor& past_k, Domain domain, double scale) {
  return scores_by_rows(q, past_k, range(0, q.len), domain, scale);
}

Scores max_scores(const Tensor& q, const Tensor& past_k, double scale) {
  Scores scores = no_scores(past_k);
  for (Index b = 0; b < past_k.batch; ++b)
    for (Index g = 0; g < past_k.heads; ++g) {
      std::vector<double> largest(uz(past_k.len), 0.0);
      for (const std::vector<double>& row : scaled_dots(
               group_rows(q, b, g, past_k.heads, range(0, q.len)), rows_of(past_k, b, g), scale)) {
        const std::vector<double> p = softmax(row);
        for (std::size_t t = 0; t < p.size(); ++t) largest[t] = std::max(largest[t], p[t]);
      }
      scores[uz(b)][uz(g)] = largest;
    }
  return scores;
}

std::vector<Index> sample_positions(Index len, Index n_queries) {
  const Index n = std::min(n_queries, len);
  std::vector<Index> positions;
  for (Index m = 0; m < n; ++m) positions.push_back((m + 1) * len / n - 1);
  return positions;
}

Scores sample_scores(const Tensor& q, const Tensor& past_k, Index n_queries, Domain domain,
                     double scale) {
  return scores_by_rows(q, past_k, sample_positions(q.len, n_queries), domain, scale);
}

std::vector<Index> sparq_channels(const Tensor& q, Index b, Index kv_head, Index kv_heads,
                                  Index r) {
  std::vector<double> a(uz(q.dim), 0.0);
  for (Row row : group_rows(q, b, kv_head, kv_heads, range(0, q.len)))
    for (std::size_t c = 0; c < row.size(); ++c) a[c] += std::abs(row[c]);
  return best(a, r);
}

double sparq_logit(Row query, Row key, const std::vector<Index>& channels, double scale) {
  double product = 0, chosen = 0, all = 0;
  for (Index c : channels) {
    product += query[uz(c)] * key[uz(c)];
    chosen += std::abs(query[uz(c)]);
  }
  for (double value : query) all += std::abs(value);
  const double ratio = chosen > 0 ? chosen / all : 1.0;
  return scale_or_default(scale, std::ssize(query)) * product / std::sqrt(ratio);
}

Scores sparq_scores(const Tensor& q, const Tensor& past_k, Index r, Domain domain, double scale) {
  Scores scores = no_scores(past_k);
  for (Index b = 0; b < past_k.batch; ++b)
    for (Index g = 0; g < past_k.heads; ++g) {
      const std::vector<Index> channels = sparq_channels(q, b, g, past_k.heads, r);
      Logits logits;
      for (Row query : group_rows(q, b, g, past_k.heads, range(0, q.len))) {
        logits.push_back({});
        for (Row key : rows_of(past_k, b, g))
          logits.back().push_back(sparq_logit(query, key, channels, scale));
      }
      scores[uz(b)][uz(g)] = aggregate(logits, domain);
    }
  return scores;
}

std::vector<double> sparq_official_scores(const Tensor& q, const Tensor& past_k, Index b,
                                          Index kv_head, Index r) {
  assert(q.len == 1);
  const Index group = q.heads / past_k.heads, first = kv_head * group;
  std::vector<double> negated(uz(q.dim), 0.0);  // `ranked` takes the smallest first
  for (Index h = first; h < first + group; ++h)
    for (Index c = 0; c < q.dim; ++c) negated[uz(c)] -= std::abs(q.at(b, h, 0, c));
  const std::vector<Index> order = ranked(range(0, q.dim), negated);

  std::vector<double> sum(uz(past_k.len), 0.0);
  for (Index h = first; h < first + group; ++h) {
    double chosen = 0, all = 0;
    for (Index n = 0; n < q.dim; ++n) {
      const double magnitude = std::abs(q.at(b, h, 0, order[uz(n)]));
      all += magnitude;
      if (n < r) chosen += magnitude;
    }
    if (chosen == 0) continue;  // the head is zero on C: so are its logits
    for (Index t = 0; t < past_k.len; ++t)
      for (Index n = 0; n < std::min(r, q.dim); ++n)
        sum[uz(t)] += q.at(b, h, 0, order[uz(n)]) * past_k.at(b, kv_head, t, order[uz(n)]) /
                      std::sqrt(static_cast<double>(q.dim) * chosen / all);
  }
  return sum;
}

Eigen eigen(std::vector<std::vector<double>> a) {
  const std::size_t d = a.size();
  std::vector<std::vector<double>> vectors(d, std::vector<double>(d, 0.0));
  for (std::size_t i = 0; i < d; ++i) vectors[i][i] = 1;

  for (int sweep = 0; sweep < 100; ++sweep) {
    double off = 0, whole = 0;
    for (std::size_t i = 0; i < d; ++i)
      for (std::size_t j = 0; j < d; ++j) {
        whole += a[i][j] * a[i][j];
        if (i != j) off += a[i][j] * a[i][j];
      }
    if (off <= 1e-32 * whole) break;

    for (std::size_t i = 0; i < d; ++i)
      for (std::size_t j = i + 1; j < d; ++j) {
        if (a[i][j] == 0) continue;
        // tan of the angle, the smaller root of  tan^2 + 2 theta tan - 1 = 0
        const double theta = (a[j][j] - a[i][i]) / (2 * a[i][j]);
        const double tangent =
            (theta < 0 ? -1.0 : 1.0) / (std::abs(theta) + std::sqrt(theta * theta + 1));
        const double cosine_of = 1 / std::sqrt(tangent * tangent + 1);
        const double sine_of = tangent * cosine_of;
        for (std::size_t n = 0; n < d; ++n) {  // columns i, j of a
          const double x = a[n][i], y = a[n][j];
          a[n][i] = cosine_of * x - sine_of * y;
          a[n][j] = sine_of * x + cosine_of * y;
        }
        for (std::size_t n = 0; n < d; ++n) {  // rows i, j of a
          const double x = a[i][n], y = a[j][n];
          a[i][n] = cosine_of * x - sine_of * y;
          a[j][n] = sine_of * x + cosine_of * y;
        }
        for (std::size_t n = 0; n < d; ++n) {
          const double x = vectors[i][n], y = vectors[j][n];
          vectors[i][n] = cosine_of * x - sine_of * y;
          vectors[j][n] = sine_of * x + cosine_of * y;
        }
      }
  }

  Eigen result{{}, vectors};
  for (std::size_t i = 0; i < d; ++i) result.values.push_back(a[i][i]);
  return result;
}

std::vector<std::vector<double>> covariance(const std::vector<Row>& keys) {
  const std::size_t d = keys[0].size();
  const double n = static_cast<double>(keys.size());
  std::vector<double> mean(d, 0.0);
  for (Row key : keys)
    for (std::size_t i = 0; i < d; ++i) mean[i] += key[i] / n;
  std::vector<std::vector<double>> cov(d, std::vector<double>(d, 0.0));
  for (Row key : keys)
    for (std::size_t i = 0; i < d; ++i)
      for (std::size_t j = 0; j < d; ++j) cov[i][j] += (key[i] - mean[i]) * (key[j] - mean[j]) / n;
  return cov;
}

Basis pca(const std::vector<Row>& keys, Index r) {
  const Eigen pairs = eigen(covariance(keys));
  const Index d = std::ssize(pairs.values);
  std::vector<double> negated = pairs.values;  // `ranked` takes the smallest first
  for (double& value : negated) value = -value;
  const std::vector<Index> order = ranked(range(0, d), negated);

  Basis basis{d, std::min(r, d), {}};
  for (Index i = 0; i < basis.r; ++i) {
    const std::vector<double>& vector = pairs.vectors[uz(order[uz(i)])];
    double largest = 0;
    for (double value : vector)
      if (std::abs(value) > std::abs(largest)) largest = value;
    for (double value : vector) basis.components.push_back(largest < 0 ? -value : value);
  }
  return basis;
}

std::vector<double> project(const Basis& basis, Row x) {
  std::vector<double> y;
  for (Index i = 0; i < basis.r; ++i) y.push_back(dot(basis.component(i), x));
  return y;
}

Scores loki_scores(const Tensor& q, const Tensor& past_k, const std::vector<Basis>& per_kv_head,
                   Domain domain, double scale) {
  Scores scores = no_scores(past_k);
  for (Index b = 0; b < past_k.batch; ++b)
    for (Index g = 0; g < past_k.heads; ++g) {
      const Basis& basis = per_kv_head[uz(g)];
      std::vector<std::vector<double>> queries, keys;  // their coordinates
      for (Row query : group_rows(q, b, g, past_k.heads, range(0, q.len)))
        queries.push_back(project(basis, query));
      for (Row key : rows_of(past_k, b, g)) keys.push_back(project(basis, key));
      scores[uz(b)][uz(g)] = aggregate(
          scaled_dots(std::vector<Row>(queries.begin(), queries.end()),
                      std::vector<Row>(keys.begin(), keys.end()), scale_or_default(scale, q.dim)),
          domain);
    }
  return scores;
}

std::vector<Index> less_is_more(const Tensor& q, const Tensor& past_k, Index b, Index budget,
                                Index sink, double scale) {
  if (budget >= past_k.len) return range(0, past_k.len);
  if (budget < sink + 1) sink = 0;
  const Index part =
      std::min(budget - sink, static_cast<Index>(std::floor(0.75 * static_cast<double>(budget))));
  const Index recent = budget - sink - part;

  std::vector<std::vector<Index>> order;  // [q_head], best first
  for (Index h = 0; h < q.heads; ++h) {
    const Index kv_head = h / (q.heads / past_k.heads);
    std::vector<double> negated = aggregate(
        scaled_dots(rows_of(q, b, h), rows_of(past_k, b, kv_head), scale), Domain::softmax);
    for (double& value : negated) value = -value;
    order.push_back(ranked(range(sink, past_k.len - recent), negated));
  }

  std::vector<Index> taken;
  for (Index rank = 0; rank < part; ++rank)
    for (const std::vector<Index>& list : order) {
      const Index t = list[uz(rank)];
      const bool seen = std::find(taken.begin(), taken.end(), t) != taken.end();
      if (!seen && std::ssize(taken) < part) taken.push_back(t);
    }

  for (Index t = 0; t < sink; ++t) taken.push_back(t);
  for (Index t = past_k.len - recent; t < past_k.len; ++t) taken.push_back(t);
  std::sort(taken.begin(), taken.end());
  return taken;
}

double quest_bound(Row query, const std::vector<Row>& page_keys) {
  double bound = 0;
  for (std::size_t c = 0; c < query.size(); ++c) {
    double smallest = infinity, largest = -infinity;  // of numbers
    for (Row key : page_keys) {
      smallest = std::min(smallest, key[c]);
      largest = std::max(largest, key[c]);
    }
    if (!std::isfinite(smallest) || !std::isfinite(largest)) return not_a_number;
    bound += std::max(query[c] * smallest, query[c] * largest);
  }
  return bound;
}

Scores quest_scores(const Tensor& q, const Tensor& past_k, Index page, double scale) {
  Scores scores = no_scores(past_k);
  for (Index b = 0; b < past_k.batch; ++b)
    for (Index g = 0; g < past_k.heads; ++g) {
      std::vector<std::vector<Row>> pages;
      for (Index t = 0; t < past_k.len; ++t) {
        if (t % page == 0) pages.push_back({});
        pages.back().push_back(past_k.row(b, g, t));
      }
      Logits logits;
      for (Row query : group_rows(q, b, g, past_k.heads, range(0, q.len))) {
        logits.push_back({});
        for (const std::vector<Row>& keys : pages)
          logits.back().push_back(scale_or_default(scale, q.dim) * quest_bound(query, keys));
      }
      const std::vector<double> page_scores = aggregate(logits, Domain::logit);
      for (Index t = 0; t < past_k.len; ++t)
        scores[uz(b)][uz(g)].push_back(page_scores[uz(t / page)]);
    }
  return scores;
}

std::vector<Index> quest_select(const std::vector<double>& scores, Index kv_len, Index k,
                                Index page) {
  assert(std::ssize(scores) == kv_len);
  const Index full = kv_len / page;
  std::vector<double> negated;  // `ranked` takes the smallest first
  for (Index p = 0; p < full; ++p) negated.push_back(-scores[uz(p * page)]);
  std::vector<Index> order;
  if (kv_len % page != 0) order.push_back(full);
  for (Index p : ranked(range(0, full), negated)) order.push_back(p);

  std::vector<Index> list;
  for (Index p : order)
    for (Index t = p * page; t < std::min((p + 1) * page, kv_len); ++t)
      if (std::ssize(list) < k) list.push_back(t);
  std::sort(list.begin(), list.end());
  return list;
}

std::vector<double> keydiff_scores(const std::vector<Row>& candidates) {
  if (candidates.empty()) return {};
  std::vector<double> anchor(candidates[0].size(), 0.0);
  for (Row key : candidates)
    for (std::size_t c = 0; c < key.size(); ++c)
      if (is_finite(key) && norm(key) > 0)
        anchor[c] += key[c] / norm(key) / static_cast<double>(candidates.size());
  std::vector<double> scores;
  for (Row key : candidates) scores.push_back(is_finite(key) ? -cosine(key, anchor) : not_a_number);
  return scores;
}

std::vector<double> pool(const std::vector<double>& x, Index kernel) {
  assert(kernel % 2 == 1);
  std::vector<double> pooled;
  for (Index t = 0; t < std::ssize(x); ++t) {
    double sum = 0;
    for (Index u = t - kernel / 2; u <= t + kernel / 2; ++u)
      if (u >= 0 && u < std::ssize(x)) sum += x[uz(u)];
    pooled.push_back(sum / static_cast<double>(kernel));
  }
  return pooled;
}

std::vector<double> snapkv_scores(const std::vector<std::vector<Row>>& window_rows_per_head,
                                  const std::vector<Row>& candidates, Index kernel, double scale) {
  const Index w = std::ssize(window_rows_per_head[0]), before = std::ssize(candidates) - w;
  std::vector<double> mass(uz(before), 0.0);
  for (const std::vector<Row>& rows : window_rows_per_head)
    for (Index i = 0; i < w; ++i) {
      if (!is_finite(rows[uz(i)])) continue;
      std::vector<double> logits = scaled_dots({rows[uz(i)]}, candidates, scale)[0];
      for (Index t = 0; t < before + w; ++t)
        if (t > before + i || !is_finite(candidates[uz(t)])) logits[uz(t)] = -infinity;
      if (*std::max_element(logits.begin(), logits.end()) == -infinity) continue;
      const std::vector<double> p = softmax(logits);
      for (Index t = 0; t < before; ++t)
        mass[uz(t)] += p[uz(t)] / static_cast<double>(window_rows_per_head.size());
    }
  std::vector<double> pooled = pool(mass, kernel);
  for (Index t = 0; t < before; ++t)
    if (!is_finite(candidates[uz(t)])) pooled[uz(t)] = not_a_number;
  return pooled;
}

Candidates Eviction::append(const Tensor& q, const Tensor& k, Index b, Index kv_head) {
  for (Index i = 0; i < k.len; ++i) {
    const Row key = k.row(b, kv_head, i);
    retained.push_back(std::ssize(keys));
    keys.push_back(std::vector<double>(key.begin(), key.end()));
  }
  Candidates c{retained, {}};
  std::vector<Row> rows;
  for (Index position : retained) rows.push_back(keys[uz(position)]);
  if (method == Evict::keydiff) {
    c.scores = keydiff_scores(rows);
  } else if (q.len == 0) {
    for (std::size_t i = 0; i < rows.size(); ++i) c.scores.push_back(static_cast<double>(i));
  } else {
    c.forced = std::min({window, q.len, std::ssize(rows)});
    const Index group = q.heads / k.heads;
    std::vector<std::vector<Row>> of_heads;
    for (Index h = kv_head * group; h < (kv_head + 1) * group; ++h)
      of_heads.push_back(group_rows(q, b, h, q.heads, range(q.len - c.forced, q.len)));
    c.scores = snapkv_scores(of_heads, rows, kernel, scale);
    c.scores.resize(rows.size(), 0.0);
  }
  retained.clear();
  for (Index i : best(c.scores, budget, keep_first, c.forced))
    retained.push_back(c.positions[uz(i)]);
  return c;
}

}  // namespace oracle
