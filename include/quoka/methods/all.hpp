// Every selector by its name: one line per method.
//
//   AllSelectors           SelectorList<Named<"dense", DenseSelector>, ...>
//   for_each_selector(f)   calls f.template operator()<S>(name) for each of them
//
// Programs that take a selector by name and the tests of all selectors take them from this list.
// A new selector needs:
//
//   here             its header and its line
//   its FLOPs        examples/support/scoring_flops.hpp: programs do not compile without
//   its tests        those of its scores, tests/methods/NAME_test.cpp; those of all selectors find
//                    it
//
// Programs give it their options by member name: budget, n_queries, rank, plan, keep_first,
// keep_last (examples/support/methods.cpp).
#pragma once

#include <quoka/methods/first_recent.hpp>
#include <quoka/methods/flash_prefill.hpp>
#include <quoka/methods/keydiff.hpp>
#include <quoka/methods/less_is_more.hpp>
#include <quoka/methods/loki.hpp>
#include <quoka/methods/oracle.hpp>
#include <quoka/methods/quest.hpp>
#include <quoka/methods/random.hpp>
#include <quoka/methods/sample_attention.hpp>
#include <quoka/methods/snapkv.hpp>
#include <quoka/methods/sparq.hpp>
#include <quoka/methods/tidal_decode.hpp>
#include <quoka/methods/xattention.hpp>
#include <quoka/select/mass_selector.hpp>
#include <quoka/select/quoka.hpp>

#include <algorithm>
#include <cstddef>

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

// A name as a template argument.
template <std::size_t size>
struct Text {
  char characters[size] = {};

  constexpr Text(const char (&text)[size]) { std::copy_n(text, size, characters); }
};

}  // namespace detail

// A selector and its name.
template <detail::Text text, Selector S>
struct Named {
  using Type = S;                                       // the selector
  static constexpr const char* name = text.characters;  // as programs call it
};

// Some Named selectors.
template <class... Entries>
struct SelectorList {
  // Calls f.template operator()<Type>(name) for each, in order.
  template <class F>
  static void for_each(F&& f) {
    (f.template operator()<typename Entries::Type>(Entries::name), ...);
  }
};

// All selectors of this library.
using AllSelectors = SelectorList<                       //
    Named<"dense", DenseSelector>,                       //
    Named<"quoka", QuokaSelector>,                       //
    Named<"mass", MassSelector>,                         //
    Named<"sample_attention", SampleAttentionSelector>,  //
    Named<"sparq", SparqSelector>,                       //
    Named<"loki", LokiSelector>,                         //
    Named<"tidal_decode", TidalDecodeSelector>,          //
    Named<"less_is_more", LessIsMoreSelector>,           //
    Named<"snapkv", SnapKvSelector>,                     //
    Named<"keydiff", KeyDiffSelector>,                   //
    Named<"quest", QuestSelector>,                       //
    Named<"xattention", XAttentionSelector>,             //
    Named<"flash_prefill", FlashPrefillSelector>,        //
    Named<"oracle", OracleSelector>,                     //
    Named<"random", RandomSelector>,                     //
    Named<"first_recent", FirstRecentSelector>>;

// Calls f.template operator()<S>(name) for each of AllSelectors.
template <class F>
void for_each_selector(F&& f) {
  AllSelectors::for_each(f);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
