#include <quoka/quoka.hpp>

quoka::Index size_seen_by_b();

quoka::Index size_seen_by_b() { return static_cast<quoka::Index>(sizeof(quoka::Index)); }
