#include "support/mass_oracle.hpp"

namespace oracle {
namespace {

std::vector<Index> voters(Index member, Index group, Index len, const MassRule& rule) {
  const Index n = std::min(std::max<Index>(4, rule.queries / group), len), last = (n + 7) / 8,
              spaced = n - last, rest = len - last;
  std::vector<Index> all;
  for (Index m = 0; m < spaced; ++m) all.push_back((m * group + member) * rest / (spaced * group));
  for (Index i = rest; i < len; ++i) all.push_back(i);
  return all;
}

}  // namespace

MassShares mass_shares(const Tensor& q, const Tensor& past_k, const Tensor& chunk_k,
                       const MassRule& rule) {
  const Index group = q.heads / past_k.heads, heads = group * q.len <= 32 ? group : 1,
              lists = q.heads / heads;
  const AttentionOptions options{.scale = rule.scale, .softcap = rule.softcap};
  MassShares result;
  for (Index b = 0; b < q.batch; ++b) {
    std::vector<std::vector<double>> shares, values;
    std::vector<double> of_chunk;
    for (Index list = 0; list < lists; ++list) {
      std::vector<double> share(uz(past_k.len), 0.0);
      double chunk_share = 0.0;
      Index count = 0;
      for (Index h = list * heads; h < (list + 1) * heads; ++h) {
        const Index g = h / group;
        for (const Index i : voters(h % group, group, q.len, rule)) {
          const Row query = q.row(b, h, i);
          if (!is_finite(query)) continue;
          ++count;
          std::vector<double> logits;
          const auto look_at = [&](Row key) {
            logits.push_back(is_finite(key) ? logit(query, key, options) : -infinity);
          };
          for (Index t = 0; t < past_k.len; ++t) look_at(past_k.row(b, g, t));
          for (Index t = 0; t <= i && t < chunk_k.len; ++t) look_at(chunk_k.row(b, g, t));
          if (*std::max_element(logits.begin(), logits.end()) == -infinity) continue;
          const std::vector<double> p = softmax(logits);
          for (std::size_t t = 0; t < p.size(); ++t)
            (t < share.size() ? share[t] : chunk_share) += p[t];
        }
      }
      const double voted = static_cast<double>(std::max<Index>(count, 1));
      std::vector<double> value(share.size());
      for (Index t = 0; t < past_k.len; ++t)
        share[uz(t)] =
            is_finite(past_k.row(b, list * heads / group, t)) ? share[uz(t)] / voted : -infinity;
      for (Index t = 0; t < past_k.len; ++t) {
        value[uz(t)] = share[uz(t)];
        for (Index near = t - (rule.kernel_size - 1) / 2; near <= t + rule.kernel_size / 2; ++near)
          if (near >= 0 && near < past_k.len && share[uz(t)] > -infinity)
            value[uz(t)] = std::max(value[uz(t)], share[uz(near)]);
      }
      shares.push_back(share), values.push_back(value), of_chunk.push_back(chunk_share / voted);
    }
    result.shares.push_back(shares), result.values.push_back(values);
    result.chunk_share.push_back(of_chunk);
  }
  return result;
}

double kth_value(const MassShares& of, Index b, Index k) {
  std::vector<double> all;
  for (const auto& list : of.values[uz(b)]) all.insert(all.end(), list.begin(), list.end());
  std::sort(all.begin(), all.end(), std::greater<>());
  return all[uz(k - 1)];
}

}  // namespace oracle
