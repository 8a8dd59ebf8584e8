// Attention with what stands for the keys left out: one more key and value of each query head, against softmax in double precision; on every
// path, and with each option that a logit meets.

#include <quoka/attention/attention.hpp>
#include <quoka/cache/kv_cache.hpp>
#include <quoka/packing/byte_formats.hpp>

#include "support/fixtures.hpp"

#include <numeric>

namespace quoka_test {
namespace {

using quoka::AttentionOptions;
using quoka::AttentionSequence;
using quoka::PastRest;

struct Shape {
  Index batch, group, kv_heads, q_len, kv_len, kept, dim, v_dim;
};

// Queries, a past with a Selection of it, a chunk, and what stands for the others: any numbers.
struct Call {
  Shape s;
  Tensor4<float> q, k, v, chunk_k, chunk_v;
  Selection keep;

  Call(Random& random, const Shape& shape)
      : s(shape),
        q(random.tensor<float>(s.batch, s.group * s.kv_heads, s.q_len, s.dim)),
        k(random.tensor<float>(s.batch, s.kv_heads, s.kv_len, s.dim)),
        v(random.tensor<float>(s.batch, s.kv_heads, s.kv_len, s.v_dim)),
        chunk_k(random.tensor<float>(s.batch, s.kv_heads, s.q_len, s.dim)),
        chunk_v(random.tensor<float>(s.batch, s.kv_heads, s.q_len, s.v_dim)) {
    oracle::Positions lists(uz(s.batch));
    for (auto& of_batch : lists)
      for (Index head = 0; head < s.kv_heads; ++head) {
        auto list = random.permutation(s.kv_len);
        list.resize(uz(s.kept));
        std::sort(list.begin(), list.end());
        of_batch.push_back(list);
      }
    keep = to_selection(lists, s.kv_len);
    keep.rest().reshape(s.batch * s.group * s.kv_heads, s.dim, s.v_dim);
    for (Index head = 0; head < keep.rest().heads(); ++head) {
      float* const row = keep.rest().row(head);
      for (Index c = 0; c < 1 + s.dim + s.v_dim; ++c) row[c] = static_cast<float>(random.normal());
      row[0] = static_cast<float>(std::log(static_cast<double>(s.kv_len - s.kept + 1 + head)));
    }
  }

  // out [batch, q_heads, q_len, v_dim], then the log-sum-exp, by plain loops.
  struct Result {
    oracle::Tensor out;
    oracle::Scores lse;
  };
  Result expected(const AttentionOptions& options = {}) const {
    const oracle::Tensor x = to_oracle(q), keys = to_oracle(k), values = to_oracle(v),
                         own_keys = to_oracle(chunk_k), own_values = to_oracle(chunk_v);
    const double scale = options.scale ? static_cast<double>(*options.scale)
                                       : 1.0 / std::sqrt(static_cast<double>(s.dim));
    const double cap = static_cast<double>(options.softcap);
    Result result{{s.batch, x.heads, s.q_len, s.v_dim}, {}};
    result.lse.assign(uz(s.batch), std::vector(uz(x.heads), std::vector<double>(uz(s.q_len))));
    for (Index b = 0; b < s.batch; ++b)
      for (Index head = 0; head < x.heads; ++head)
        for (Index i = 0; i < s.q_len; ++i) {
          const Index kv_head = head / s.group;
          double sum = options.sink_logits.empty()
                           ? 0.0
                           : std::exp(static_cast<double>(options.sink_logits[uz(head)]));
          const auto see = [&](oracle::Row key, oracle::Row value, double more) {
            double logit = scale * oracle::dot(x.row(b, head, i), key);
            if (cap > 0) logit = cap * std::tanh(logit / cap);
            const double weight = std::exp(logit + more);
            sum += weight;
            for (Index c = 0; c < s.v_dim; ++c)
              result.out.at(b, head, i, c) += weight * value[uz(c)];
          };
          for (const Position p : keep.row(b, kv_head))
            see(keys.row(b, kv_head, p), values.row(b, kv_head, p), 0.0);
          for (Index j = 0; j <= i; ++j)
            see(own_keys.row(b, kv_head, j), own_values.row(b, kv_head, j), 0.0);
          const PastRest::Head rest = keep.rest().head(b * x.heads + head);
          const std::vector<double> key(rest.key, rest.key + s.dim),
              value(rest.value, rest.value + s.v_dim);
          see(key, value, static_cast<double>(rest.log_count));
          for (Index c = 0; c < s.v_dim; ++c) result.out.at(b, head, i, c) /= sum;
          result.lse[uz(b)][uz(head)][uz(i)] = std::log(sum);
        }
    return result;
  }

  void expect(const AttentionOptions& options = {}, double tolerance = 1e-5) const {
    const Result wanted = expected(options);
    for_each_executor([&](ExecutorRef executor) {
      Tensor4<float> out(s.batch, s.group * s.kv_heads, s.q_len, s.v_dim);
      Tensor3<float> lse(s.batch, s.group * s.kv_heads, s.q_len);
      quoka::attention(
          q, {k, v, keep}, {chunk_k, chunk_v},
          {out, TensorView<float, 3>(lse.data(), {s.batch, s.group * s.kv_heads, s.q_len})},
          options, executor);
      expect_near(out, wanted, tolerance);
      for (Index i = 0; i < lse.size(); ++i) {
        const Index head = i / s.q_len;
        const double of = wanted.lse[uz(head / (s.group * s.kv_heads))]
                                    [uz(head % (s.group * s.kv_heads))][uz(i % s.q_len)];
        ASSERT_NEAR(lse.data()[i], of, tolerance * 10) << i;
      }
    });
  }
  static void expect_near(const Tensor4<float>& out, const Result& wanted, double tolerance) {
    for (Index i = 0; i < out.size(); ++i)
      ASSERT_NEAR(out.data()[i], wanted.out.data[uz(i)], tolerance) << i;
  }
};

// Panels, few rows cut over the keys, one token, many keys in parts, heads of a group that is no power of two.
constexpr Shape shapes[] = {{1, 4, 2, 37, 300, 60, 24, 24},   {2, 2, 1, 16, 90, 20, 37, 20},
                            {1, 1, 3, 3, 2500, 2100, 16, 16}, {1, 6, 2, 1, 700, 90, 32, 17},
                            {1, 8, 1, 1, 3000, 2500, 20, 64}, {1, 3, 1, 70, 20, 0, 16, 24},
                            {1, 1, 1, 130, 9000, 8500, 8, 8}};

TEST(AttentionRest, IsOneMoreKeyAndValue) {
  Random random(9321);
  for (const Shape& shape : shapes) {
    SCOPED_TRACE(std::to_string(shape.q_len) + " queries, " + std::to_string(shape.kv_len) +
                 " keys");
    Call(random, shape).expect();
  }
}

TEST(AttentionRest, MeetsScaleSoftcapAndSinks) {
  Random random(9322);
  for (const Shape& shape : shapes) {
    SCOPED_TRACE(std::to_string(shape.q_len) + " queries, " + std::to_string(shape.kv_len) +
                 " keys");
    const Call call(random, shape);
    std::vector<float> sinks;
    for (Index head = 0; head < shape.group * shape.kv_heads; ++head)
      sinks.push_back(static_cast<float>(random.normal()) + 3.0f);
    call.expect({.scale = 0.9f, .softcap = 1.5f, .sink_logits = sinks});
  }
}

// A weight that is all of the softmax: the first state of a row is rescaled, or nearly all that it is.
TEST(AttentionRest, MayBeNearlyNothingAndNearlyAll) {
  Random random(9323);
  for (const Shape& shape : shapes)
    for (const float log_count : {-40.0f, 60.0f}) {
      Call call(random, shape);
      for (Index head = 0; head < call.keep.rest().heads(); ++head)
        call.keep.rest().row(head)[0] = log_count;
      call.expect();
    }
}

TEST(AttentionRest, OfNoKeysChangesNoBit) {
  Random random(9324);
  for (const Shape& shape : shapes) {
    Call call(random, shape);
    Tensor4<float> with(shape.batch, shape.group * shape.kv_heads, shape.q_len, shape.v_dim);
    auto without = with;
    for (Index head = 0; head < call.keep.rest().heads(); ++head)
      call.keep.rest().row(head)[0] = -infinity;
    quoka::attention(call.q, {call.k, call.v, call.keep}, {call.chunk_k, call.chunk_v}, with);
    call.keep.rest().clear();
    quoka::attention(call.q, {call.k, call.v, call.keep}, {call.chunk_k, call.chunk_v}, without);
    EXPECT_TRUE(same_bits(with, without));
  }
}

TEST(AttentionRest, InEachFormatAndArithmetic) {
  Random random(9325);
  const Shape shape{1, 4, 2, 40, 300, 60, 64, 64};
  const Call call(random, shape);
  const auto wanted = call.expected();
  quoka::KvCache cache(1, 2, 64, 64, quoka::q8_0_format(), quoka::q8_0_format());
  cache.append(call.k, call.v);
  Tensor4<float> out(1, 8, 40, 64);
  quoka::attention(call.q, {cache.k(), cache.v(), call.keep}, {call.chunk_k, call.chunk_v}, out);
  Call::expect_near(out, wanted, 0.03);
  const Tensor4<Eigen::half> q = rows<Eigen::half>(call.q, 0, 40);
  quoka::attention(q, {call.k, call.v, call.keep}, {call.chunk_k, call.chunk_v}, out);
  Call::expect_near(out, wanted, 0.003);
  for (const auto arithmetic : {quoka::Arithmetic::bfloat16, quoka::Arithmetic::int8}) {
    quoka::attention(call.q, {call.k, call.v, call.keep}, {call.chunk_k, call.chunk_v}, out,
                     {.arithmetic = arithmetic});
    Call::expect_near(out, wanted, 0.05);
  }
}

TEST(AttentionRest, OfEachSequenceOfABatch) {
  Random random(9326);
  std::vector<Call> calls;
  std::vector<Tensor4<float>> outs;
  for (const Shape& shape : {shapes[0], shapes[3], shapes[4]}) {
    calls.emplace_back(random, shape);
    outs.emplace_back(shape.batch, shape.group * shape.kv_heads, shape.q_len, shape.v_dim);
  }
  std::vector<AttentionSequence> batch;
  for (std::size_t i = 0; i < calls.size(); ++i)
    batch.push_back({.q = calls[i].q,
                     .past = {calls[i].k, calls[i].v, calls[i].keep},
                     .chunk = {calls[i].chunk_k, calls[i].chunk_v},
                     .out = outs[i]});
  quoka::attention(batch);
  for (std::size_t i = 0; i < calls.size(); ++i)
    Call::expect_near(outs[i], calls[i].expected(), 1e-5);
}

TEST(AttentionRest, IsRefusedWhereItDoesNotFit) {
  Random random(9327);
  Call call(random, shapes[0]);
  Tensor4<float> out(1, 8, 37, 24);
  const auto attend = [&](const AttentionOptions& options = {}) {
    quoka::attention(call.q, {call.k, call.v, call.keep}, {call.chunk_k, call.chunk_v}, out,
                     options);
  };
  const std::vector<float> slopes(8, 0.5f);
  expect_refused([&] { attend({.alibi_slopes = slopes}); }, {8, "alibi_slopes"});
  call.keep.rest().reshape(8, 24, 23);
  expect_refused([&] { attend(); }, {23, 24, "values"});
  call.keep.rest().reshape(8, 25, 24);
  expect_refused([&] { attend(); }, {25, 24, "keys"});
  call.keep.rest().reshape(2, 24, 24);
  expect_refused([&] { attend(); }, {2, 8, "heads"});
}

}  // namespace
}  // namespace quoka_test
