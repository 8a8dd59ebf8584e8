// expect: deleted
// Rows borrow their block table.
#include <quoka/rows/rows.hpp>

#ifdef QUOKA_VALID
const std::vector<quoka::Position>& table();
#else
std::vector<quoka::Position> table();
#endif

quoka::Rows sequence(const quoka::Rows& pool) { return quoka::paged(pool, table(), 20); }
