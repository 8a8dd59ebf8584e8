// expect: deleted
// true is not a number of keys.
#include <quoka/select/options.hpp>

#ifdef QUOKA_VALID
constexpr int some = 1;
#else
constexpr bool some = true;
#endif

quoka::Budget budget() { return quoka::Budget::keys(some); }
