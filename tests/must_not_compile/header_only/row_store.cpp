// expect: a row type that is written by channels needs both static void store
// lines: 15
// The channels that fill no packet are written one by one.
#include <quoka/packing/format_table.hpp>

#include "row.inc"

struct MyRow : RightRow {
  static void store(std::byte*, quoka::Index, const quoka::simd::Packet&, const quoka::RowShape&) {}
#ifdef QUOKA_VALID
  static void put(std::byte*, quoka::Index, float, const quoka::RowShape&) {}
#endif
};

constexpr quoka::Format mine = quoka::format_table<MyRow>();
