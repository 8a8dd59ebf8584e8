// expect: a row type's Group needs static constexpr Index channels
// lines: 15
// A Group that does not fit is not taken for another class of that name.
#include <quoka/packing/format_table.hpp>

struct MyRow {
  static constexpr const char* name = "mine";
  static constexpr bool is_float = false;
  static quoka::Index bytes(const quoka::RowShape& shape) { return shape.dim; }
  static quoka::simd::Packet load(quoka::ConstRow, quoka::Index, const quoka::RowShape&) {
    return quoka::simd::zero();
  }
  static float at(quoka::ConstRow, quoka::Index, const quoka::RowShape&) { return 0; }
  struct Group {
#ifdef QUOKA_VALID
    static constexpr quoka::Index channels = 32;
#endif
    Group(quoka::ConstRow, quoka::Index) {}
    quoka::simd::Packet load(quoka::Index) const { return quoka::simd::zero(); }
  };
};

constexpr quoka::Format mine = quoka::format_table<MyRow>();
