// Calls that would have to guess.
// expect PRESET_OF_A_NUMBER: deleted
// expect WITHOUT_OPTIONS: no match
#include <quoka/select/mass_selector.hpp>
#include <quoka/select/quoka.hpp>

#if defined(PRESET_OF_A_NUMBER)  // 256 may be a group
constexpr int some = 256;
#else
constexpr quoka::Budget some = quoka::Budget::keys(256);
#endif

quoka::MassOptions options() { return quoka::MassOptions::balanced(some); }

quoka::Selection select(const quoka::QuokaSelector& selector, const quoka::Rows& q, const quoka::Rows& past_k) {
#if defined(WITHOUT_OPTIONS)  // select() has its scale from the options that attention() gets
  return selector.select(q, past_k);
#else
  return selector.select(q, past_k, {.scale = 0.088f});
#endif
}
