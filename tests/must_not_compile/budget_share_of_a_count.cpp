// expect: deleted
// A share has a point: 1 may be one key.
#include <quoka/select/options.hpp>

#ifdef QUOKA_VALID
constexpr double all = 1.0;
#else
constexpr int all = 1;
#endif

quoka::Budget budget() { return quoka::Budget::share(all); }
