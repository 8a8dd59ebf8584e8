// Linked with b.cpp: two users of the whole library in one program.
#include <quoka/quoka.hpp>

quoka::Index size_seen_by_b();

int main() { return size_seen_by_b() == static_cast<quoka::Index>(sizeof(quoka::Index)) ? 0 : 1; }
