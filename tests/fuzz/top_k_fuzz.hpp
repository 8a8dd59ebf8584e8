// top_k() of any scores, with NaN, infinities and ties among them, is the oracle's, by one worker
// and by three.
#pragma once

#include <quoka/select/stages.hpp>

#include "fuzz/bytes.hpp"
#include "support/fixtures.hpp"

namespace quoka_fuzz {

inline void fuzz_top_k(Input input) {
  using namespace quoka_test;
  Bytes bytes(input);
  const Index batch = bytes.number(1, 2), heads = bytes.number(1, 3);
  const Index kv_len = bytes.seldom(4) ? bytes.number(0, 20000) : bytes.number(0, 300);
  const Index k = bytes.number(0, kv_len + 3);
  const quoka::TopKOptions options{.kernel_size = bytes.seldom(2) ? bytes.number(1, 9) : 1,
                                   .keep_first = bytes.seldom(3) ? bytes.number(0, 40) : 0,
                                   .keep_last = bytes.seldom(3) ? bytes.number(0, 40) : 0};
  const int kinds = bytes.byte() % 5;
  std::mt19937 random = bytes.random();
  const auto score = [&]() -> float {
    const auto x = random();
    if (kinds == 1) return static_cast<float>(x % 3);  // ties
    if (kinds == 2 && x % 7 == 0) return not_a_number;
    if (kinds == 2 && x % 7 == 1) return x % 2 == 0 ? infinity : -infinity;
    if (kinds == 3) return std::bit_cast<float>(static_cast<std::uint32_t>(random()));  // anything
    if (kinds == 4) return x % 2 == 0 ? 0.0f : -0.0f;
    return static_cast<float>(static_cast<std::int32_t>(x)) * 0x1p-31f;
  };
  Tensor3<float> scores(batch, heads, kv_len);
  oracle::Scores exact(uz(batch));
  for (Index b = 0; b < batch; ++b)
    for (Index h = 0; h < heads; ++h) {
      auto& of_head = exact[uz(b)].emplace_back();
      for (Index t = 0; t < kv_len; ++t)
        of_head.push_back(static_cast<double>(scores(b, h, t) = score()));
    }
  const oracle::Positions wanted =
      oracle::top_k(oracle::window_max(exact, options.kernel_size), std::min(k, kv_len),
                    options.keep_first, options.keep_last);
  quoka::ThreadPool threads(3);
  for (const ExecutorRef executor : {ExecutorRef(SerialExecutor{}), ExecutorRef(threads)}) {
    const Selection keep = quoka::top_k(scores, k, options, executor);
    for (Index b = 0; b < batch; ++b)
      for (Index h = 0; h < heads; ++h) {
        const auto got = keep.positions(b, h);
        if (!std::equal(got.begin(), got.end(), wanted[uz(b)][uz(h)].begin(),
                        wanted[uz(b)][uz(h)].end()))
          broken("top_k is not the oracle's");
      }
  }
}

}  // namespace quoka_fuzz
