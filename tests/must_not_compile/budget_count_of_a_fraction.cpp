// expect: deleted
// Half a key is not a count.
#include <quoka/select/options.hpp>

#ifdef QUOKA_VALID
constexpr int half = 512;
#else
constexpr double half = 0.5;
#endif

quoka::Budget budget() { return quoka::Budget::keys(half); }
