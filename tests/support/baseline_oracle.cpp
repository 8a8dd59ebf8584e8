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
  if (largest == -infinity) return std::vector<double>(x.size(), 0.0);
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

RowMasses row_masses(const std::vector<Row>& rows, const std::vector<Row>& past,
                     const std::vector<Row>& chunk, const std::vector<Index>& ends,
                     const std::function<double(Row, Row)>& logit) {
  std::vector<Row> keys = past;
  keys.insert(keys.end(), chunk.begin(), chunk.end());
  std::vector<bool> sound;
  for (Row key : keys) sound.push_back(is_finite(key));
  const std::vector<double> none(past.size(), 0.0);
  RowMasses of{none, none, 0.0};
  double count = 0;
  for (std::size_t m = 0; m < rows.size(); ++m) {
    if (!is_finite(rows[m])) continue;
    ++count;
    const std::size_t seen = past.size() + (chunk.empty() ? 0 : uz(ends[m]));
    std::vector<double> logits;
    for (std::size_t t = 0; t < seen; ++t)
      logits.push_back(sound[t] ? logit(rows[m], keys[t]) : -infinity);
    const std::vector<double> p = softmax(logits);
    for (std::size_t t = 0; t < seen; ++t)
      if (t < past.size())
        of.mean[t] += p[t], of.largest[t] = std::max(of.largest[t], p[t]);
      else
        of.chunk += p[t];
  }
  for (double& x : of.mean) x /= std::max(count, 1.0);
  of.chunk /= std::max(count, 1.0);
  for (std::size_t t = 0; t < past.size(); ++t)
    if (!sound[t]) of.mean[t] = of.largest[t] = -infinity;
  return of;
}

namespace {

// q[b, h, i] for every head h that reads `kv_head` and every i of `positions`
std::vector<Row> group_rows(const Tensor& q, Index b, Index kv_head, Index kv_heads,
                            const std::vector<Index>& positions) {
  const Index group = q.heads / kv_heads;
  std::vector<Row> rows;
  for (Index r = 0; r < group; ++r)
    for (Index i : positions) rows.push_back(q.row(b, kv_head * group + r, i));
  return rows;
}

// score(rows of the group, keys, KV head): the scores of each KV head's keys by the query rows at `positions`.
template <class F>
Scores scores_by_rows(const Tensor& q, const Tensor& past_k, const std::vector<Index>& positions,
                      F&& score) {
  Scores scores(uz(past_k.batch));
  for (Index b = 0; b < past_k.batch; ++b)
    for (Index g = 0; g < past_k.heads; ++g)
      scores[uz(b)].push_back(
          score(group_rows(q, b, g, past_k.heads, positions), rows_of(past_k, b, g), g));
  return scores;
}
template <class F>
Scores scores_by_all(const Tensor& q, const Tensor& past_k, F&& score) {
  return scores_by_rows(q, past_k, range(0, q.len), score);
}

// `top_k` for the scores of a single head.
std::vector<Index> best(const std::vector<double>& scores, Index k, Index keep_first = 0,
                        Index keep_last = 0) {
  return top_k({{scores}}, k, keep_first, keep_last)[0][0];
}

}  // namespace

Scores exact_scores(const Tensor& q, const Tensor& past_k, Domain domain, double scale) {
  return sample_scores(q, past_k, q.len, domain, scale);
}

Scores max_scores(const Tensor& q, const Tensor& past_k, double scale) {
  return scores_by_all(q, past_k, [&](const auto& queries, const auto& keys, Index) {
    return row_masses(
               queries, keys, {}, {},
               [&](Row query, Row key) { return scale_or_default(scale, q.dim) * dot(query, key); })
        .largest;
  });
}

Scores sample_scores(const Tensor& q, const Tensor& past_k, Index n_queries, Domain domain,
                     double scale) {
  const Index n = std::min(n_queries, q.len);
  std::vector<Index> positions;
  for (Index m = 0; m < n; ++m) positions.push_back((m + 1) * q.len / n - 1);
  return scores_by_rows(q, past_k, positions, [&](const auto& queries, const auto& keys, Index) {
    return aggregate(scaled_dots(queries, keys, scale), domain);
  });
}

Scores sparq_scores(const Tensor& q, const Tensor& past_k, Index r, Domain domain, double scale) {
  return scores_by_all(q, past_k, [&](const auto& queries, const auto& keys, Index) {
    std::vector<double> a(uz(q.dim), 0.0);
    for (Row query : queries)
      for (std::size_t c = 0; c < query.size(); ++c) a[c] += std::abs(query[c]);
    const std::vector<Index> channels = best(a, r);
    Logits logits;
    for (Row query : queries) {
      double chosen = 0, all = 0;
      for (Index c : channels) chosen += std::abs(query[uz(c)]);
      for (double value : query) all += std::abs(value);
      const double ratio = chosen > 0 ? chosen / all : 1.0;
      logits.push_back({});
      for (Row key : keys) {
        double product = 0;
        for (Index c : channels) product += query[uz(c)] * key[uz(c)];
        logits.back().push_back(scale_or_default(scale, q.dim) * product / std::sqrt(ratio));
      }
    }
    return aggregate(logits, domain);
  });
}

namespace {

// a = sum_i value[i] vector[i] vector[i]^T for a symmetric a, in no particular order.
struct Eigen {
  std::vector<double> values;
  std::vector<std::vector<double>> vectors;  // orthonormal
};

// Cyclic Jacobi: rotate every pair (i, j) of axes by the angle that makes a[i][j] zero, over and
// over, until nothing is left off the diagonal.
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
        const auto rotate = [&](double& x_at, double& y_at) {
          const double x = x_at, y = y_at;
          x_at = cosine_of * x - sine_of * y, y_at = sine_of * x + cosine_of * y;
        };
        for (std::size_t n = 0; n < d; ++n) rotate(a[n][i], a[n][j]);
        for (std::size_t n = 0; n < d; ++n) rotate(a[i][n], a[j][n]);
        for (std::size_t n = 0; n < d; ++n) rotate(vectors[i][n], vectors[j][n]);
      }
  }

  Eigen result{{}, vectors};
  for (std::size_t i = 0; i < d; ++i) result.values.push_back(a[i][i]);
  return result;
}

// cov[i][j] = 1/n sum_t (k[t][i] - mean[i]) (k[t][j] - mean[j])
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

}  // namespace

Basis pca(const std::vector<Row>& keys, Index r) {
  const Eigen pairs = eigen(covariance(keys));
  const Index d = std::ssize(pairs.values);
  const std::vector<Index> order = ranked(range(0, d), pairs.values);

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
  return scores_by_all(q, past_k, [&](const auto& queries, const auto& keys, Index g) {
    const auto coordinates = [&](const std::vector<Row>& rows) {
      std::vector<std::vector<double>> all;
      for (Row row : rows) all.push_back(project(per_kv_head[uz(g)], row));
      return all;
    };
    const auto of_queries = coordinates(queries), of_keys = coordinates(keys);
    return aggregate(scaled_dots({of_queries.begin(), of_queries.end()},
                                 {of_keys.begin(), of_keys.end()}, scale_or_default(scale, q.dim)),
                     domain);
  });
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
    order.push_back(
        ranked(range(sink, past_k.len - recent),
               aggregate(scaled_dots(rows_of(q, b, h), rows_of(past_k, b, kv_head), scale),
                         Domain::softmax)));
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

namespace {

// sum_c max(q[c] min_c, q[c] max_c), with the minimum and maximum of channel c over the keys of a
// page: no q.k of that page is larger. A NaN bounds nothing; NaN for a page with an infinity, or a channel without a number.
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

}  // namespace

Scores quest_scores(const Tensor& q, const Tensor& past_k, Index page, double scale) {
  return scores_by_all(q, past_k, [&](const auto& queries, const auto& keys, Index) {
    std::vector<std::vector<Row>> pages(uz((past_k.len + page - 1) / page));
    for (Index t = 0; t < past_k.len; ++t) pages[uz(t / page)].push_back(keys[uz(t)]);
    Logits logits;
    for (Row query : queries) {
      logits.push_back({});
      for (const std::vector<Row>& of_page : pages)
        logits.back().push_back(scale_or_default(scale, q.dim) * quest_bound(query, of_page));
    }
    const std::vector<double> of_pages = aggregate(logits, Domain::logit);
    std::vector<double> scores;
    for (Index t = 0; t < past_k.len; ++t) scores.push_back(of_pages[uz(t / page)]);
    return scores;
  });
}

std::vector<Index> quest_select(const std::vector<double>& scores, Index kv_len, Index k,
                                Index page) {
  assert(std::ssize(scores) == kv_len);
  const Index full = kv_len / page;
  std::vector<double> of_pages;
  for (Index p = 0; p < full; ++p) of_pages.push_back(scores[uz(p * page)]);
  std::vector<Index> order;
  if (kv_len % page != 0) order.push_back(full);
  for (Index p : ranked(range(0, full), of_pages)) order.push_back(p);

  std::vector<Index> list;
  for (Index p : order)
    for (Index t = p * page; t < std::min((p + 1) * page, kv_len); ++t)
      if (std::ssize(list) < k) list.push_back(t);
  std::sort(list.begin(), list.end());
  return list;
}

namespace {

// -cos(k, anchor), anchor = mean of k/|k| over the candidates; a zero key adds nothing to the
// anchor and scores 0, one that is not finite adds nothing and scores NaN.
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

// The last w queries of the chunk, head by head, score the candidates, of which the last w are their own keys, of which
// row i sees the first i + 1: softmax(scale q.k), summed over rows, and the mean over heads. Of the candidates before the
// window, pooled among themselves: the sum of `kernel` (odd) neighbours / kernel. Rows that are not finite are left out, and
// such keys: they score NaN.
std::vector<double> snapkv_scores(const std::vector<Row>& window_rows, Index w,
                                  const std::vector<Row>& candidates, Index kernel, double scale) {
  const Index before = std::ssize(candidates) - w;
  const std::vector<Row> past(candidates.begin(), candidates.end() - w),
      window(candidates.end() - w, candidates.end());
  std::vector<double> mass(uz(before), 0.0);
  for (std::size_t m = 0; m < window_rows.size(); ++m) {
    const auto of_row = row_masses(
        {window_rows[m]}, past, window, {static_cast<Index>(m) % w + 1}, [&](Row query, Row key) {
          return scale_or_default(scale, std::ssize(query)) * dot(query, key);
        });
    for (std::size_t t = 0; t < mass.size(); ++t)
      mass[t] += std::max(of_row.mean[t], 0.0) * static_cast<double>(w) /
                 static_cast<double>(window_rows.size());
  }
  std::vector<double> pooled;
  for (Index t = 0; t < before; ++t) {
    double sum = 0;
    for (Index u = t - kernel / 2; u <= t + kernel / 2; ++u)
      if (u >= 0 && u < before) sum += mass[uz(u)];
    pooled.push_back(is_finite(past[uz(t)]) ? sum / static_cast<double>(kernel) : not_a_number);
  }
  return pooled;
}

}  // namespace

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
    c.scores = snapkv_scores(group_rows(q, b, kv_head, k.heads, range(q.len - c.forced, q.len)),
                             c.forced, rows, kernel, scale);
    c.scores.resize(rows.size(), 0.0);
  }
  retained.clear();
  for (Index i : best(c.scores, budget, keep_first, c.forced))
    retained.push_back(c.positions[uz(i)]);
  return c;
}

}  // namespace oracle
