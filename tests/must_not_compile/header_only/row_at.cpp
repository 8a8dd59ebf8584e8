// expect: (constraint failure|constraints not satisfied|no matching function)
// The channels that fill no packet are read one by one.
#include <quoka/kernels/format_table.hpp>

struct MyRow {
  static constexpr const char* name = "mine";
  static constexpr bool is_float = false;
  static quoka::Index bytes(const quoka::RowShape& shape) { return shape.dim; }
  static quoka::simd::Packet load(quoka::ConstRow, quoka::Index, const quoka::RowShape&) {
    return quoka::simd::zero();
  }
#ifdef QUOKA_VALID
  static float at(quoka::ConstRow, quoka::Index, const quoka::RowShape&) { return 0; }
#endif
};

constexpr quoka::Format mine = quoka::format_table<MyRow>();
