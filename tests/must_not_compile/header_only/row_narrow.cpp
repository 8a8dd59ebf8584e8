// expect: (constraint failure|constraints not satisfied|no matching function)
// Taken for absent, the rows would be refused where they are written, when the program runs.
#include <quoka/kernels/format_table.hpp>

#include "row.inc"

struct MyRow : RightRow {
#ifdef QUOKA_VALID
  static void narrow(const float*, const quoka::RowShape&, std::byte*) {}
#else
  static void narrow(const float*, std::byte*, const quoka::RowShape&) {}
#endif
};

constexpr quoka::Format mine = quoka::format_table<MyRow>();
