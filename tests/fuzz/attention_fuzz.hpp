// attention() of any shape, storage, layout, mask and list is the double oracle's, within the bound of the tests of
// attention; and of shapes that do not fit together it refuses before anything is written.
#pragma once

#include "fuzz/bytes.hpp"
#include "support/attention_fixtures.hpp"

#include <deque>

namespace quoka_fuzz {

using namespace quoka_test;

// A copy of x [1, heads, len, dim] elsewhere: `room` further rows are NaN, and lists or pages name its own.
template <class T>
class Elsewhere {
 public:
  Elsewhere(const Tensor4<T>& x, int layout, std::mt19937& random) : strided_(x) {
    const Index heads = x.dimension(1), len = x.dimension(2), dim = x.dimension(3);
    if (layout < 2 || x.dimension(0) != 1) {
      rows_ = layout == 0 ? Rows(x) : Rows(strided_.view());
      return;
    }
    const Index page = layout == 2 ? 1 : Index{1} << (random() % 5);
    const Index pages = (len + page - 1) / page + 3;
    pool_ = Tensor4<T>(pages, heads, page, dim);
    pool_.setConstant(static_cast<T>(not_a_number));
    std::vector<Position> order(uz(pages));
    for (Index i = 0; i < pages; ++i) order[uz(i)] = static_cast<Position>(i);
    std::shuffle(order.begin(), order.end(), random);
    table_ = order;
    for (Index i = 0; i < len; ++i)
      for (Index h = 0; h < heads; ++h)
        for (Index c = 0; c < dim; ++c) pool_(table_[uz(i / page)], h, i % page, c) = x(0, h, i, c);
    rows_ = quoka::paged(pool_, table_, len);
    if (layout < 4) return;
    for (Index i = 0; i < len; ++i) cells_.push_back(static_cast<Position>(i));
    rows_ = rows_.listed(cells_);
  }
  const Rows& rows() const { return rows_; }

 private:
  Strided<T> strided_;
  Tensor4<T> pool_;
  std::vector<Position> table_, cells_;
  Rows rows_;
};

template <class T>
void fuzz_attention_of(Bytes& bytes) {
  const Index sizes[] = {1, 2, 3, 8, 16, 31, 32, 40, 64, 80, 128};
  const auto size = [&] { return sizes[bytes.byte() % std::size(sizes)]; };
  Shape s;
  s.batch = bytes.seldom(3) ? 2 : 1;
  s.kv_heads = bytes.number(1, 3), s.q_heads = s.kv_heads * bytes.number(1, 5);
  s.head_dim = size(), s.v_dim = bytes.seldom(2) ? size() : s.head_dim;
  s.q_len = bytes.seldom(2) ? bytes.number(1, 90) : bytes.number(1, 4);
  s.kv_len = bytes.seldom(3) ? bytes.number(0, 1500) : bytes.number(0, 130);
  const bool chunk = !bytes.seldom(4);
  const int layout = bytes.byte() % 5, threads = bytes.byte() % 3 + 1;
  const bool lists = bytes.seldom(2), hides = bytes.seldom(3), wrong = bytes.seldom(6);
  AttentionOptions options;
  if (bytes.seldom(3)) options.scale = 0.01f * static_cast<float>(bytes.byte() + 1);
  if (bytes.seldom(3)) options.softcap = 1 + static_cast<float>(bytes.byte());
  if (bytes.seldom(3)) options.sliding_window = bytes.number(1, 200);
  options.causal = !bytes.seldom(5);
  if (bytes.seldom(3)) options.arithmetic = quoka::Arithmetic::single;
  const double loud = bytes.one_of({1.0, 1.0, 0.0, 1e-20, 4.0});
  std::vector<float> sinks, slopes;
  const bool sink = bytes.seldom(3), alibi = bytes.seldom(4);
  const std::uint64_t seed = bytes.byte();
  const int broken_part = bytes.byte() % 5;
  std::mt19937 random = bytes.random();

  Random data(seed);
  Inputs<T> in = random_inputs<T>(data, s, chunk);
  for (Index i = 0; i < in.q.size(); ++i)
    in.q.data()[i] = static_cast<T>(static_cast<float>(in.q.data()[i]) * static_cast<float>(loud));
  for (Index h = 0; h < s.q_heads; ++h) {
    if (sink) sinks.push_back(static_cast<float>(data.normal()));
    if (alibi) slopes.push_back(0.01f * static_cast<float>(data.uniform()));
  }
  options.sink_logits = sinks, options.alibi_slopes = slopes;
  const Index columns = s.kv_len + (chunk ? s.q_len : 0);
  std::vector<std::uint8_t> seen(uz(s.q_len * columns), 1);
  oracle::AttentionOptions exact = to_oracle(options);
  if (hides) {
    for (auto& x : seen) x = random() % 3 != 0;
    options.mask = quoka::Mask::bytes(seen.data(), {1, 1, s.q_len, columns}, {0, 0, columns});
    exact.mask = [&](Index, Index, Index i, Index t) {
      return seen[uz(i * columns + t)] != 0 ? 0.0 : -oracle::infinity;
    };
  }
  Selection some;
  const Selection* keep = nullptr;
  if (lists) {
    some = random_selection(data, s.batch, s.kv_heads, s.kv_len,
                            static_cast<Index>(random() % static_cast<unsigned>(s.kv_len + 1)));
    keep = &some;
  }

  const Elsewhere<T> past_k(in.past_k, layout, random), past_v(in.past_v, layout, random);
  quoka::Past past(past_k.rows(), past_v.rows());
  past.keep = keep;
  quoka::Chunk own{in.k, in.v};
  if (!chunk && !options.query_position) options.query_position = s.kv_len;
  Output<T> output = unwritten<T>(in.q, s.v_dim);
  const Output<T> untouched = output;
  quoka::ThreadPool pool(threads);
  if (wrong && columns > 0) {
    if (broken_part == 0) options.sliding_window = -1;
    if (broken_part == 1) past.v = Rows(in.v.dimension(2) == s.kv_len ? in.q : in.v);
    if (broken_part == 2) sinks.assign(uz(s.q_heads + 1), 0.0f), options.sink_logits = sinks;
    if (broken_part == 3) options.softcap = -1.0f;
    if (broken_part == 4)
      options.mask = quoka::Mask::bytes(seen.data(), {1, 1, s.q_len, columns + 1}, {0, 0, 0});
    try {
      quoka::attention(in.q, past, own, {output.out, output.lse}, options, pool);
      if (broken_part != 1) broken("what does not fit was taken");
    } catch (const std::invalid_argument&) {
      if (!same_bits(output.out, untouched.out)) broken("a refused call wrote");
    }
    return;
  }
  quoka::attention(in.q, past, own, {output.out, output.lse}, options, pool);
  const oracle::AttentionResult wanted = oracle_result(in, exact, keep);
  // The bound holds for logits up to about 10: further ones are off in proportion.
  double most = 10;
  const double scale = options.scale ? static_cast<double>(*options.scale)
                                     : 1 / std::sqrt(static_cast<double>(s.head_dim));
  most = std::max(most, scale * largest(in.q) * std::max(largest(in.past_k), largest(in.k)) *
                            static_cast<double>(s.head_dim));
  const double factor = 2 * most / 10;
  const double value = std::max(largest(in.past_v), largest(in.v));
  if (const auto close = elements_close(output.out, wanted.out, factor * noise * value); !close)
    broken(std::string("attention: ") + close.message());
  if (const auto close = lse_close(output.lse, wanted.lse, factor * noise); !close)
    broken(std::string("log-sum-exp: ") + close.message());
}

inline void fuzz_attention(Input input) {
  Bytes bytes(input);
  switch (bytes.byte() % 3) {
    case 0:
      return fuzz_attention_of<float>(bytes);
    case 1:
      return fuzz_attention_of<Eigen::half>(bytes);
    default:
      return fuzz_attention_of<Eigen::bfloat16>(bytes);
  }
}

}  // namespace quoka_fuzz
