// The oracle of the baselines: the KV-selection methods that QuoKA is compared with, in naive
// double precision, for the tests to compare against.
//
// Written from the definitions of SampleAttention, SparQ Attention, Loki, TidalDecode, LessIsMore,
// Quest, KeyDiff and SnapKV, adapted where they need it to a chunk of queries, grouped heads and a
// fixed budget. It shares nothing with the library on purpose, only the types and the small helpers
// of the QuoKA oracle. Everything is a plain loop over doubles.
//
// Conventions of that oracle hold: tensors are [batch, heads, len, dim], query head h reads KV head
// h / group, a scale of 0 means 1/sqrt(dim), sizes are trusted. Queries and keys are trusted to be
// finite too: the treatment of NaN is the library's contract, not the method's. "The rows of a
// group" below are all the query rows of all the heads that read one KV head.
#pragma once

#include <algorithm>
#include <cassert>
#include <cmath>
#include <functional>
#include <iterator>
#include <vector>

#include "support/oracle.hpp"

namespace oracle {

// The quantity averaged over the rows of a group: attention weights or raw logits.
enum class Domain { softmax, logit };

using Logits = std::vector<std::vector<double>>;  // [row][key]

// ---- shared steps ----

// `scale`, or 1/sqrt(dim) for 0
double scale_or_default(double scale, Index dim);

// x[b, head, 0], x[b, head, 1], ...
std::vector<Row> rows_of(const Tensor& x, Index b, Index head);

// scale q.k for every query row and key
Logits scaled_dots(const std::vector<Row>& queries, const std::vector<Row>& keys, double scale);

// p[t] = exp(x[t] - max x) / sum_u exp(x[u] - max x); zeros where nothing is above -infinity
std::vector<double> softmax(const std::vector<double>& x);

// s[t] = mean over rows of softmax(logits[row])[t], or of logits[row][t]
std::vector<double> aggregate(const Logits& logits, Domain domain);

// Attention of rows to keys of the past and of a chunk, of which row m sees the first ends[m]: the mean over the rows of each
// past key's share and its largest one, and the mean share of the whole chunk. Rows that are not finite do not count; a key
// that is not has no share, and -infinity stands in its place.
struct RowMasses {
  std::vector<double> mean, largest;
  double chunk;
};
RowMasses row_masses(const std::vector<Row>& rows, const std::vector<Row>& past,
                     const std::vector<Row>& chunk, const std::vector<Index>& ends,
                     const std::function<double(Row, Row)>& logit);

// ---- controls ----

// The mean of the exact attention of all rows of the group: the control "oracle-mean", and what
// TidalDecode ranks keys by in its selection layers. [b][kv_head][kv]
Scores exact_scores(const Tensor& q, const Tensor& past_k, Domain domain, double scale);

// s[t] = max over the rows of the group of softmax(scale q.k)[t]: the control "oracle-max".
// [b][kv_head][kv]
Scores max_scores(const Tensor& q, const Tensor& past_k, double scale);

// ---- SampleAttention (Zhu et al. 2024) ----

// The exact scores, by the rows j_m = floor((m + 1) len / n) - 1 for m < n = min(n_queries, len): evenly spaced, the last row
// of the chunk among them. [b][kv_head][kv]
Scores sample_scores(const Tensor& q, const Tensor& past_k, Index n_queries, Domain domain,
                     double scale);

// ---- SparQ Attention (Ribar et al. 2024) ----

// aggregate(sparq logits) over all rows of the group, which share one set C of channels: the r channels with the largest a[c] =
// sum over the rows of the group of |q[c]|, ties to the lower channel. The logit is
//   sum_{c in C} q[c] k[c] / sqrt(dim sum_{c in C} |q[c]| / sum_c |q[c]|), with `scale` in the place of 1/sqrt(dim);
// a row that is zero on all of C gets 0, the ratio left out. [b][kv_head][kv]
Scores sparq_scores(const Tensor& q, const Tensor& past_k, Index r, Domain domain,
                    double scale = 0);

// ---- Loki (Singhania et al. 2024) ----

// The leading principal components of the keys of one KV head.
struct Basis {
  Index d = 0, r = 0;
  std::vector<double> components;  // [r][d], a row each, eigenvalues descending

  Row component(Index i) const { return Row(components).subspan(uz(i * d), uz(d)); }
};

// The min(r, d) eigenvectors of the covariance of the keys (at least one key) with the largest
// eigenvalues, each with the sign that makes its component of largest magnitude positive.
Basis pca(const std::vector<Row>& keys, Index r);

// (component_0.x, ..., component_{r-1}.x): the mean is not subtracted.
std::vector<double> project(const Basis& basis, Row x);

// aggregate(scale (P q).(P k)) over all rows of the group, scale 0: 1/sqrt(d) of the full d.
// [b][kv_head][kv]
Scores loki_scores(const Tensor& q, const Tensor& past_k, const std::vector<Basis>& per_kv_head,
                   Domain domain, double scale);

// ---- LessIsMore (Yang et al. 2025) ----

// One list for all heads of batch b, min(budget, kv_len) long, ascending: the first `sink`
// positions (none if budget <= sink), the last `recent`, and `part` of the middle between them.
//   part = floor(0.75 budget), recent = the rest; if that is negative, part = budget - sink, recent
//   = 0
// Every head ranks the middle by (mean over its rows of softmax(scale q.k) over all past keys,
// descending, then position). The part is filled with rank 0 of head 0, 1, ..., then rank 1 of
// head 0, 1, ..., leaving out what is there already.
std::vector<Index> less_is_more(const Tensor& q, const Tensor& past_k, Index b, Index budget,
                                Index sink = 4, double scale = 0);

// ---- Quest (Tang et al. 2024) ----

// Pages are positions [p page, (p + 1) page), the last one maybe shorter. A page scores
// the mean of scale * bound (no q.k of the page is larger) over all rows of the group; a position scores what its page does.
// [b][kv_head][kv]
Scores quest_scores(const Tensor& q, const Tensor& past_k, Index page, double scale);

// A last page that is not full, then the full ones by (score descending, page ascending), until
// min(k, kv_len) positions are taken; of the last page taken its first positions only. Ascending.
// `scores` are those of one head, by position.
std::vector<Index> quest_select(const std::vector<double>& scores, Index kv_len, Index k,
                                Index page);

// ---- eviction over a whole sequence: KeyDiff (Park et al. 2025), SnapKV (Li et al. 2024) ----

enum class Evict { keydiff, snapkv };

// What an append chooses from, [retained, chunk], and their scores. The last `forced` ones stay.
struct Candidates {
  std::vector<Index> positions;
  std::vector<double> scores;
  Index forced = 0;
};

// The keys that one KV head of one sequence retains under KeyDiff or SnapKV. The chunk attends
// `retained` and itself, and then `append` lets it join; what is evicted never returns.
struct Eviction {
  Index budget = 1024, keep_first = 0;
  Evict method = Evict::keydiff;
  Index window = 32, kernel = 5;  // SnapKV
  double scale = 0;               // 0: 1/sqrt(dim)

  std::vector<Index> retained = {};            // positions in the sequence, ascending
  std::vector<std::vector<double>> keys = {};  // of every position so far, evicted or not

  // The best `budget` candidates by (score descending, position ascending), the first keep_first among them, and the last
  // w = min(window, queries) of SnapKV. It judges a chunk without queries by age.
  Candidates append(const Tensor& q, const Tensor& k, Index b = 0, Index kv_head = 0);
};

}  // namespace oracle
