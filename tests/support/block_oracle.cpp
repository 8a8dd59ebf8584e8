#include "support/block_oracle.hpp"

namespace oracle {

Index rounded_up(Index x, Index of) { return (x + of - 1) / of; }

std::vector<std::vector<double>> tokens_of(const Tensor& x, Index b, Index head, Index first,
                                           Index count) {
  std::vector<std::vector<double>> tokens;
  for (Index t = first; t < first + count; ++t) {
    tokens.emplace_back(uz(x.dim), 0.0);
    if (t < x.len) tokens.back().assign(x.row(b, head, t).begin(), x.row(b, head, t).end());
  }
  return tokens;
}

bool all_finite(const std::vector<std::vector<double>>& tokens) {
  return std::all_of(tokens.begin(), tokens.end(), [](const auto& x) { return is_finite(x); });
}

SetScores xattention_scores(const Tensor& q, const Tensor& keys, Index kv_len, Index b, Index g,
                            Index stride, Index block, double scale) {
  const Index group = q.heads / keys.heads, query_blocks = rounded_up(q.len, block),
              key_rows = rounded_up(keys.len, stride);
  SetScores scores(uz(group * query_blocks),
                   std::vector<double>(uz(rounded_up(keys.len, block)), 0.0));
  std::vector<std::vector<std::vector<double>>> rows;
  std::vector<bool> sound;
  for (Index t = 0; t < key_rows; ++t) {
    rows.push_back(tokens_of(keys, b, g, t * stride, stride));
    sound.push_back(all_finite(rows.back()));
  }
  for (Index r = 0; r < group; ++r)
    for (Index i = 0; i < q.len; i += stride) {
      const auto queries = tokens_of(q, b, g * group + r, i, stride);
      if (!all_finite(queries)) continue;
      std::vector<double> logits;
      for (Index t = 0; t < key_rows; ++t) {
        logits.push_back(-infinity);
        if (t > (kv_len + i) / stride || !sound[uz(t)]) continue;
        double sum = 0;  // query a meets key c where a + c = stride - 1
        for (Index a = 0; a < stride; ++a)
          sum += dot(queries[uz(a)], rows[uz(t)][uz(stride - 1 - a)]);
        logits.back() = scale_or_default(scale, q.dim) / static_cast<double>(stride) * sum;
      }
      const std::vector<double> p = softmax(logits);
      for (Index t = 0; t < key_rows; ++t)
        scores[uz(r * query_blocks + i / block)][uz(t * stride / block)] += p[uz(t)];
    }
  return scores;
}

std::set<Index> xattention_blocks(const SetScores& scores, Index kv_len, Index block, double tau,
                                  double* margin) {
  std::set<Index> chosen{0};
  for (const std::vector<double>& of_set : scores) {
    double total = 0, sum = 0;
    std::vector<Index> others;
    for (Index j = 0; j < std::ssize(of_set); ++j) {
      total += of_set[uz(j)];
      if (j == 0 || (j + 1) * block > kv_len)
        sum += of_set[uz(j)];
      else
        others.push_back(j);
    }
    if (total == 0) continue;
    for (Index j : ranked(others, of_set)) {
      if (margin != nullptr) *margin = std::min(*margin, std::abs(sum / total - tau));
      if (sum >= tau * total) break;
      sum += of_set[uz(j)], chosen.insert(j);
    }
  }
  if (kv_len % block != 0) chosen.insert(kv_len / block);
  return chosen;
}

std::vector<double> shares_of_total(const SetScores& scores, Index kv_len, Index block) {
  std::vector<double> shares(uz(rounded_up(kv_len, block)), 0.0);
  for (const std::vector<double>& of_set : scores) {
    double total = 0;
    for (double x : of_set) total += x;
    for (std::size_t j = 0; j < shares.size() && total > 0; ++j)
      shares[j] = std::max(shares[j], of_set[j] / total);
  }
  return shares;
}

SetScores flash_prefill_scores(const Tensor& q, const Tensor& past_k, Index b, Index g, Index block,
                               double scale) {
  const Index group = q.heads / past_k.heads, query_blocks = rounded_up(q.len, block),
              blocks = rounded_up(past_k.len, block);
  SetScores scores(uz(group * query_blocks), std::vector<double>(uz(blocks), 0.0));
  for (Index set = 0; set < group * query_blocks; ++set) {
    const Index head = g * group + set / query_blocks, u = set % query_blocks;
    Logits logits(uz(blocks));  // [block][row]
    double top = -infinity;
    for (Index j = 0; j < blocks; ++j) {
      const Index end = std::min((j + 1) * block, past_k.len);
      std::vector<double> mean(uz(q.dim), 0.0);
      for (Index t = j * block; t < end; ++t)
        for (Index c = 0; c < q.dim; ++c)
          mean[uz(c)] += past_k.at(b, g, t, c) / static_cast<double>(end - j * block);
      if (!is_finite(mean)) continue;
      for (Index i = u * block; i < std::min((u + 1) * block, q.len); ++i) {
        if (!is_finite(q.row(b, head, i))) continue;
        logits[uz(j)].push_back(scale_or_default(scale, q.dim) * dot(q.row(b, head, i), mean));
        top = std::max(top, logits[uz(j)].back());
      }
    }
    double total = 0;
    for (Index j = 0; j < blocks; ++j) {
      for (double x : logits[uz(j)]) scores[uz(set)][uz(j)] += std::exp(x - top);
      total += scores[uz(set)][uz(j)];
    }
    for (double& x : scores[uz(set)]) x = total > 0 ? x / total : 0.0;
  }
  return scores;
}

std::vector<double> parts_of_best(const SetScores& scores) {
  std::vector<double> parts(scores[0].size(), 0.0);
  for (const std::vector<double>& of_set : scores) {
    const double best = *std::max_element(of_set.begin(), of_set.end());
    for (std::size_t j = 0; j < parts.size() && best > 0; ++j)
      parts[j] = std::max(parts[j], of_set[j] / best);
  }
  return parts;
}

std::set<Index> flash_prefill_blocks(const SetScores& scores, Index q_len, Index kv_len,
                                     Index block, double alpha, Index first, Index last,
                                     double* margin) {
  std::set<Index> chosen;
  const Index blocks = rounded_up(kv_len, block);
  for (Index j = 0; j < std::min(first, blocks); ++j) chosen.insert(j);
  for (Index u = 0; u < rounded_up(q_len, block); ++u)
    for (Index j = 0; j < blocks; ++j)
      if (const Index own = (kv_len + u * block) / block; j > own - last && j <= own)
        chosen.insert(j);
  const std::vector<double> parts = parts_of_best(scores);
  for (Index j = 0; j < blocks; ++j) {
    if (parts[uz(j)] >= alpha) chosen.insert(j);
    if (margin != nullptr) *margin = std::min(*margin, std::abs(parts[uz(j)] - alpha));
  }
  return chosen;
}

std::vector<Index> keys_of_blocks(const std::set<Index>& blocks, Index block, Index kv_len) {
  std::vector<Index> keys;
  for (Index j : blocks)
    for (Index t = j * block; t < std::min((j + 1) * block, kv_len); ++t) keys.push_back(t);
  return keys;
}

std::vector<Index> best_blocks(const std::vector<Index>& forced, const std::vector<double>& ranks,
                               Index block, Index kv_len, Index budget, double* margin) {
  std::vector<Index> order;
  for (Index j : forced)
    if (std::find(order.begin(), order.end(), j) == order.end() && j * block < kv_len && j >= 0)
      order.push_back(j);
  const Index first_ranked = std::ssize(order);
  std::vector<Index> others;
  for (Index j = 0; j < std::ssize(ranks); ++j)
    if (std::find(order.begin(), order.end(), j) == order.end()) others.push_back(j);
  for (Index j : ranked(others, ranks)) order.push_back(j);
  std::vector<Index> keys;
  for (Index i = 0; i < std::ssize(order) && std::ssize(keys) < budget; ++i) {
    const Index j = order[uz(i)], before = std::ssize(keys);
    for (Index t = j * block; t < std::min((j + 1) * block, kv_len); ++t)
      if (std::ssize(keys) < budget) keys.push_back(t);
    // Where a block is cut, or is the last one, its neighbours in rank decide.
    if (margin == nullptr || before == budget) continue;
    for (Index n : {i - 1, i})
      if (n >= first_ranked && n + 1 < std::ssize(order) && std::ssize(keys) == budget)
        if (ranks[uz(order[uz(n + 1)])] < 1)
          *margin = std::min(*margin, ranks[uz(order[uz(n)])] - ranks[uz(order[uz(n + 1)])]);
  }
  std::sort(keys.begin(), keys.end());
  return keys;
}

}  // namespace oracle
