// expect: (constraint failure|constraints not satisfied|no matching function)
// Products of codes read them as they lie.
#include <quoka/kernels/format_table.hpp>

#include "row.inc"

struct MyRow : RightRow {
  struct Group {
    static constexpr quoka::Index channels = 32;
    static constexpr bool has_codes = true;
    Group(quoka::ConstRow, quoka::Index) {}
    quoka::simd::Packet load(quoka::Index) const { return quoka::simd::zero(); }
#ifdef QUOKA_VALID
    const std::int8_t* codes = nullptr;
#else
    const std::uint8_t* codes = nullptr;
#endif
    quoka::simd::Packet scale = quoka::simd::zero();
  };
};

constexpr quoka::Format mine = quoka::format_table<MyRow>();
