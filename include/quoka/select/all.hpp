// Every selector by its name: one line per method.
//
// for_each_selector(f) calls f.template operator()<S>(name) for each; programs that take a selector
// by name, and the tests that hold for all of them, go through it.
#pragma once

#include <quoka/select/baselines/first_recent.hpp>
#include <quoka/select/baselines/keydiff.hpp>
#include <quoka/select/baselines/less_is_more.hpp>
#include <quoka/select/baselines/loki.hpp>
#include <quoka/select/baselines/oracle.hpp>
#include <quoka/select/baselines/quest.hpp>
#include <quoka/select/baselines/random.hpp>
#include <quoka/select/baselines/sample_attention.hpp>
#include <quoka/select/baselines/snapkv.hpp>
#include <quoka/select/baselines/sparq.hpp>
#include <quoka/select/baselines/tidal_decode.hpp>
#include <quoka/select/dense.hpp>
#include <quoka/select/quoka.hpp>

namespace quoka::inline QUOKA_ABI {

template <class F>
void for_each_selector(F&& f) {
  f.template operator()<DenseSelector>("dense");
  f.template operator()<QuokaSelector>("quoka");
  f.template operator()<SampleAttentionSelector>("sample_attention");
  f.template operator()<SparqSelector>("sparq");
  f.template operator()<LokiSelector>("loki");
  f.template operator()<TidalDecodeSelector>("tidal_decode");
  f.template operator()<LessIsMoreSelector>("less_is_more");
  f.template operator()<SnapKvSelector>("snapkv");
  f.template operator()<KeyDiffSelector>("keydiff");
  f.template operator()<QuestSelector>("quest");
  f.template operator()<OracleSelector>("oracle");
  f.template operator()<RandomSelector>("random");
  f.template operator()<FirstRecentSelector>("first_recent");
}

}  // namespace quoka::inline QUOKA_ABI
