// expect: deleted
// A preset takes the budget alone, and 256 may be a group.
#include <quoka/select/mass_selector.hpp>

#ifdef QUOKA_VALID
constexpr quoka::Budget some = quoka::Budget::keys(256);
#else
constexpr int some = 256;
#endif

quoka::MassOptions options() { return quoka::MassOptions::balanced(some); }
