// expect: (constraint failure|constraints not satisfied|no matching function)
// A Group that does not fit is not taken for another class of that name.
#include <quoka/kernels/format_table.hpp>

#include "row.inc"

struct MyRow : RightRow {
  struct Group {
#ifdef QUOKA_VALID
    static constexpr quoka::Index channels = 32;
#endif
    Group(quoka::ConstRow, quoka::Index) {}
    quoka::simd::Packet load(quoka::Index) const { return quoka::simd::zero(); }
  };
};

constexpr quoka::Format mine = quoka::format_table<MyRow>();
