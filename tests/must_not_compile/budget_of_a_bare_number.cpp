// expect: deleted
// 1024 may be a count, and 1 the whole past: a budget says which it is.
#include <quoka/select/quoka.hpp>

#ifdef QUOKA_VALID
constexpr quoka::Budget few = quoka::Budget::keys(1024);
#else
constexpr int few = 1024;
#endif

quoka::QuokaOptions options() { return {.budget = few}; }
