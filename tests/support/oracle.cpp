#include "support/oracle.hpp"

namespace oracle {

double dot(Row x, Row y) {
  assert(x.size() == y.size());
  double sum = 0;
  for (std::size_t c = 0; c < x.size(); ++c) sum += x[c] * y[c];
  return sum;
}

double norm(Row x) { return std::sqrt(dot(x, x)); }

double cosine(Row x, Row y) {
  const double norms = norm(x) * norm(y);
  return norms > 0 ? dot(x, y) / norms : 0.0;
}

bool is_finite(Row x) {
  for (double value : x)
    if (!std::isfinite(value)) return false;
  return true;
}

std::vector<Index> range(Index first, Index end) {
  std::vector<Index> list;
  for (Index i = first; i < end; ++i) list.push_back(i);
  return list;
}

Positions all_positions(Index batch, Index heads, Index len) {
  return Positions(uz(batch), std::vector<std::vector<Index>>(uz(heads), range(0, len)));
}

std::vector<Index> ranked(std::vector<Index> candidates, const std::vector<double>& value) {
  std::sort(candidates.begin(), candidates.end(), [&](Index i, Index j) {
    const double x = value[uz(i)], y = value[uz(j)];
    if (std::isfinite(x) != std::isfinite(y)) return std::isfinite(x);
    if (std::isfinite(x) && x != y) return x > y;
    return i < j;
  });
  return candidates;
}

Scores query_cosines(const Tensor& q) {
  const std::vector<double> unknown(uz(q.len), not_a_number);
  Scores cosines(uz(q.batch), std::vector<std::vector<double>>(uz(q.heads), unknown));
  for (Index b = 0; b < q.batch; ++b)
    for (Index h = 0; h < q.heads; ++h) {
      std::vector<double> mean(uz(q.dim), 0.0);
      Index rows = 0;
      for (Index i = 0; i < q.len; ++i) {
        if (!is_finite(q.row(b, h, i))) continue;
        for (Index c = 0; c < q.dim; ++c) mean[uz(c)] += q.at(b, h, i, c);
        ++rows;
      }
      for (double& value : mean) value /= static_cast<double>(std::max<Index>(rows, 1));
      for (Index i = 0; i < q.len; ++i)
        if (is_finite(q.row(b, h, i))) cosines[uz(b)][uz(h)][uz(i)] = cosine(q.row(b, h, i), mean);
    }
  return cosines;
}

Positions subselect_queries(const Tensor& q, Index n_queries) {
  if (q.len <= n_queries) return all_positions(q.batch, q.heads, q.len);
  Positions kept = all_positions(q.batch, q.heads, 0);
  const Scores value = query_cosines(q);
  for (std::size_t b = 0; b < kept.size(); ++b)
    for (std::size_t h = 0; h < kept[b].size(); ++h) {
      std::vector<double> negated = value[b][h];  // the lowest first
      for (double& x : negated) x = -x;
      const std::vector<Index> order = ranked(range(0, q.len), negated);
      kept[b][h].assign(order.begin(), order.begin() + n_queries);
    }
  return kept;
}

Tensor gather_queries(const Tensor& q, const Positions& positions) {
  const Index n = q.batch * q.heads > 0 ? std::ssize(positions[0][0]) : 0;
  Tensor kept(q.batch, q.heads, n, q.dim);
  for (Index b = 0; b < q.batch; ++b)
    for (Index h = 0; h < q.heads; ++h)
      for (Index m = 0; m < n; ++m)
        for (Index c = 0; c < q.dim; ++c)
          kept.at(b, h, m, c) = q.at(b, h, positions[uz(b)][uz(h)][uz(m)], c);
  return kept;
}

Tensor pre_aggregate(const Tensor& kept, Index kv_heads) {
  const Index group = kept.heads / kv_heads;
  Tensor q_bar(kept.batch, kv_heads, kept.len, kept.dim);
  for (Index b = 0; b < kept.batch; ++b)
    for (Index h = 0; h < kept.heads; ++h)
      for (Index m = 0; m < kept.len; ++m) {
        const Row row = kept.row(b, h, m);
        if (!is_finite(row) || norm(row) == 0) continue;
        for (Index c = 0; c < kept.dim; ++c)
          q_bar.at(b, h / group, m, c) += row[uz(c)] / norm(row) / static_cast<double>(group);
      }
  return q_bar;
}

Scores score_keys(const Tensor& q_bar, const Tensor& keys, Aggregation aggregation) {
  Scores scores(uz(keys.batch), std::vector<std::vector<double>>(uz(keys.heads)));
  for (Index b = 0; b < keys.batch; ++b)
    for (Index g = 0; g < keys.heads; ++g)
      for (Index t = 0; t < keys.len; ++t) {
        const Row key = keys.row(b, g, t);
        const double length = norm(key);
        double largest = -infinity, sum = 0;
        for (Index m = 0; m < q_bar.len; ++m) {
          const double score = length > 0 ? dot(q_bar.row(b, g, m), key) / length : 0.0;
          largest = std::max(largest, score);
          sum += score;
        }
        double score =
            aggregation == Aggregation::max ? largest : sum / static_cast<double>(q_bar.len);
        if (!is_finite(key)) score = not_a_number;
        scores[uz(b)][uz(g)].push_back(score);
      }
  return scores;
}

Scores window_max(const Scores& scores, Index w) {
  Scores widened = scores;
  for (std::size_t b = 0; b < scores.size(); ++b)
    for (std::size_t g = 0; g < scores[b].size(); ++g) {
      const std::vector<double>& score = scores[b][g];
      const Index len = std::ssize(score);
      for (Index t = 0; t < len; ++t) {
        double largest = std::isfinite(score[uz(t)]) ? score[uz(t)] : not_a_number;
        for (Index u = std::max<Index>(0, t - (w - 1) / 2); u <= std::min(len - 1, t + w / 2); ++u)
          if (std::isfinite(score[uz(u)]) && score[uz(u)] > largest) largest = score[uz(u)];
        widened[b][g][uz(t)] = largest;
      }
    }
  return widened;
}

Positions top_k(const Scores& scores, Index k, Index keep_first, Index keep_last) {
  Positions keep(scores.size());
  for (std::size_t b = 0; b < scores.size(); ++b)
    for (const std::vector<double>& score : scores[b]) {
      const Index len = std::ssize(score);
      if (k >= len) {
        keep[b].push_back(range(0, len));
        continue;
      }
      const Index first = std::min(keep_first, k);
      const Index last = std::min(keep_last, k - first);
      const std::vector<Index> order = ranked(range(first, len - last), score);
      std::vector<Index> list = range(0, first);
      for (Index m = 0; m < k - first - last; ++m) list.push_back(order[uz(m)]);
      for (Index t = len - last; t < len; ++t) list.push_back(t);
      std::sort(list.begin(), list.end());
      keep[b].push_back(list);
    }
  return keep;
}

Positions select(const Tensor& q, const Tensor& past_k, const QuokaOptions& options) {
  if (past_k.len <= options.budget) return all_positions(past_k.batch, past_k.heads, past_k.len);
  const Tensor kept = gather_queries(q, subselect_queries(q, options.n_queries));
  const Scores scores = score_keys(pre_aggregate(kept, past_k.heads), past_k, Aggregation::max);
  return top_k(scores, options.budget, options.keep_first, options.keep_last);
}

namespace {

double rounded(double x, const AttentionOptions& options) {
  return options.logits_of_float ? double{static_cast<float>(x)} : x;
}

}  // namespace

double logit(Row query, Row key, const AttentionOptions& options) {
  const double scale =
      options.scale != 0 ? options.scale : 1.0 / std::sqrt(static_cast<double>(query.size()));
  double x = 0;
  for (std::size_t c = 0; c < query.size(); ++c)
    x = rounded(x + rounded(scale * query[c], options) * key[c], options);
  if (options.softcap != 0) x = rounded(options.softcap * std::tanh(x / options.softcap), options);
  return x;
}

bool sees(Index q_offset, Index key_position, const AttentionOptions& options) {
  if (options.causal && key_position > q_offset) return false;
  return options.window == 0 || q_offset - key_position < options.window;
}

AttentionResult attention(const Tensor& q, const Tensor& past_k, const Tensor& past_v,
                          const Positions* keep, const Tensor& k, const Tensor& v,
                          const AttentionOptions& options) {
  const Index kv_heads = std::max(past_k.heads, k.heads), group = q.heads / kv_heads;
  const Positions all = all_positions(q.batch, kv_heads, past_k.len);
  const Positions& past = keep != nullptr ? *keep : all;
  AttentionResult result{Tensor(q.batch, q.heads, q.len, std::max(past_v.dim, v.dim)), {}, {}};
  for (Index b = 0; b < q.batch; ++b)
    for (Index h = 0; h < q.heads; ++h)
      for (Index i = 0; i < q.len; ++i) {
        const Index g = h / group, before = options.first_position,
                    first = options.q_offset.value_or(before + past_k.len);
        std::vector<double>& logits = result.logits.emplace_back();
        std::vector<Row> values;
        const auto meet = [&](Row key, Row value, Index column, Index position) {
          if (!sees(first + i, position, options)) return;
          const double added = options.mask ? options.mask(b, h, i, column) : 0.0;
          if (added == -infinity) return;
          double x = logit(q.row(b, h, i), key, options);
          if (!options.alibi_slopes.empty())
            x -= options.alibi_slopes[uz(h)] * static_cast<double>(first + i - position);
          x += (options.mask_factors.empty() ? 1.0 : options.mask_factors[uz(h)]) * added;
          logits.push_back(rounded(x, options));
          values.push_back(value);
        };
        for (Index t : past[uz(b)][uz(h * std::ssize(past[uz(b)]) / q.heads)])
          meet(past_k.row(b, g, t), past_v.row(b, g, t), t, before + t);
        for (Index j = 0; j < k.len; ++j)
          meet(k.row(b, g, j), v.row(b, g, j), past_k.len + j, first + j);
        const double sink = options.sinks.empty() ? -infinity : options.sinks[uz(h)];
        bool empty = sink == -infinity;  // nothing above -infinity; a row with a NaN is not empty
        double largest = sink, sum = 0;
        for (double x : logits) {
          if (x != -infinity) empty = false;
          if (x > largest) largest = x;
        }
        if (empty) {
          result.lse.push_back(-infinity);
          continue;
        }
        for (double x : logits) sum += std::exp(x - largest);
        sum += std::exp(sink - largest);
        for (std::size_t n = 0; n < values.size(); ++n) {
          const double weight = std::exp(logits[n] - largest) / sum;
          for (Index c = 0; c < result.out.dim; ++c)
            result.out.at(b, h, i, c) += weight * values[n][uz(c)];
        }
        result.lse.push_back(largest + std::log(sum));
      }
  return result;
}

Tensor append(const Tensor& past, const Tensor& chunk) {
  Tensor joined(chunk.batch, chunk.heads, past.len + chunk.len, chunk.dim);
  for (Index b = 0; b < chunk.batch; ++b)
    for (Index h = 0; h < chunk.heads; ++h)
      for (Index i = 0; i < joined.len; ++i)
        for (Index c = 0; c < chunk.dim; ++c)
          joined.at(b, h, i, c) =
              i < past.len ? past.at(b, h, i, c) : chunk.at(b, h, i - past.len, c);
  return joined;
}

double relative_error(const Tensor& a, const Tensor& reference) {
  if (a.batch != reference.batch || a.heads != reference.heads || a.len != reference.len ||
      a.dim != reference.dim)
    throw std::invalid_argument("oracle::relative_error: the shapes differ");
  std::vector<double> difference;
  for (std::size_t n = 0; n < a.data.size(); ++n)
    difference.push_back(a.data[n] - reference.data[n]);
  if (norm(difference) == 0) return 0;
  return norm(difference) / norm(reference.data);
}

}  // namespace oracle
