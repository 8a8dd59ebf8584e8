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
      const Index g = list * heads / group;
      std::vector<Row> rows;
      std::vector<Index> ends;
      for (Index h = list * heads; h < (list + 1) * heads; ++h)
        for (const Index i : voters(h % group, group, q.len, rule))
          rows.push_back(q.row(b, h, i)), ends.push_back(std::min(i + 1, chunk_k.len));
      const RowMasses of =
          row_masses(rows, rows_of(past_k, b, g), rows_of(chunk_k, b, g), ends,
                     [&](Row query, Row key) { return logit(query, key, options); });
      std::vector<double> value = of.mean;
      for (Index t = 0; t < past_k.len; ++t)
        for (Index near = t - (rule.kernel_size - 1) / 2; near <= t + rule.kernel_size / 2; ++near)
          if (near >= 0 && near < past_k.len && of.mean[uz(t)] > -infinity)
            value[uz(t)] = std::max(value[uz(t)], of.mean[uz(near)]);
      shares.push_back(of.mean), values.push_back(value), of_chunk.push_back(of.chunk);
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
