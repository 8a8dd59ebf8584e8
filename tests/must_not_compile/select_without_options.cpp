// expect: no match
// select() gets the options that attention() gets: without them it would guess its scale.
#include <quoka/select/quoka.hpp>

quoka::Selection select(const quoka::QuokaSelector& selector, const quoka::Rows& q,
                        const quoka::Rows& past_k) {
#ifdef QUOKA_VALID
  return selector.select(q, past_k, {.scale = 0.088f});
#else
  return selector.select(q, past_k);
#endif
}
