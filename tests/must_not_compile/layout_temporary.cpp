// expect: a buffer that is a temporary would be gone before its view is used
// lines: 15
// A view of a temporary buffer would outlive it.
#include <quoka/rows/layouts.hpp>

#include <vector>

#ifdef QUOKA_VALID
std::vector<float>& make();
#else
std::vector<float> make();
#endif

quoka::Index len_of_made() { return quoka::token_major(make(), 7, 2, 16).len(); }
