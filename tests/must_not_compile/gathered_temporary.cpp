// expect: deleted
// Rows borrow their list of cells.
#include <quoka/rows/rows.hpp>

#ifdef QUOKA_VALID
const std::vector<quoka::Position>& cells();
#else
std::vector<quoka::Position> cells();
#endif

quoka::Rows gathered(const quoka::Rows& k) { return k.gathered(cells()); }
