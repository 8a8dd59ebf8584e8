// expect: a row type's narrow must be static void narrow.const float., const RowShape&, std::byte..
// lines: 15
// Taken for absent, the rows would be refused where they are written, when the program runs.
#include <quoka/packing/format_table.hpp>

struct MyRow {
  static constexpr const char* name = "mine";
  static constexpr bool is_float = false;
  static quoka::Index bytes(const quoka::RowShape& shape) { return shape.dim; }
  static quoka::simd::Packet load(quoka::ConstRow, quoka::Index, const quoka::RowShape&) {
    return quoka::simd::zero();
  }
  static float at(quoka::ConstRow, quoka::Index, const quoka::RowShape&) { return 0; }
#ifdef QUOKA_VALID
  static void narrow(const float*, const quoka::RowShape&, std::byte*) {}
#else
  static void narrow(const float*, std::byte*, const quoka::RowShape&) {}
#endif
};

constexpr quoka::Format mine = quoka::format_table<MyRow>();
