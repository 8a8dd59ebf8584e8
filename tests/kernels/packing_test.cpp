// kernels/panel_packing.hpp: what no result of attention shows. That rows of every format are packed where the kernels
// read them is tested by attention_suite_test.cpp. Here: padding is zero, finite values are reported as finite, and how
// much is prefetched.

#include <quoka/kernels/format_table.hpp>
#include <quoka/kernels/panel_packing.hpp>

#include "support/fixtures.hpp"

namespace {

using namespace quoka_test;
namespace detail = quoka::detail;
namespace tuning = quoka::tuning;

constexpr Index dims[] = {1, 15, 16, 17, 100, 128};

// Rows of normal numbers, and where each lies.
struct SomeRows {
  SomeRows(Random& random, Index count, Index dim)
      : numbers(random.tensor<float>(1, 1, count, dim)) {
    for (Index i = 0; i < count; ++i) floats.push_back(&numbers(0, 0, i, 0));
    for (const float* const row : floats) all.push_back(reinterpret_cast<quoka::ConstRow>(row));
  }
  Tensor4<float> numbers;
  std::vector<const float*> floats;
  std::vector<quoka::ConstRow> all;
};

TEST(Packing, PaddingIsZero) {
  Random random(21);
  quoka::Buffer<float> buffer;
  const auto fresh = [&](Index count) {
    std::fill_n(buffer.reserve(count), count, not_a_number);
    return buffer.data();
  };
  for (const Index dim : dims) {
    for (Index count = 0; count < tuning::tile_rows; ++count) {
      const SomeRows keys(random, count, dim);
      const float* const tile = fresh(detail::key_tile_size(dim));
      detail::pack_key_tile<quoka::formats::RowOf<float>>(keys.all.data(), count, {dim},
                                                          buffer.data());
      for (Index i = count; i < tuning::tile_rows; ++i)
        for (Index c = 0; c < dim; ++c)
          ASSERT_EQ(
              tile[(c / detail::slab * tuning::tile_rows + i) * detail::slab + c % detail::slab],
              0.0f)
              << i << ", " << c;
    }
    const SomeRows whole(random, 2 * tuning::tile_rows, dim);
    const Index size = detail::key_tile_size(dim);
    const float* const tiles = fresh(3 * size);
    detail::pack_keys(quoka::float_format(), whole.all.data(), 2 * tuning::tile_rows, {dim},
                      buffer.data());
    EXPECT_TRUE(std::isnan(tiles[2 * size])) << "and nothing is written behind whole tiles";
    for (Index count = 1; count < tuning::panel_rows; ++count) {
      const SomeRows queries(random, count, dim);
      const float* const panel = fresh(tuning::panel_rows * dim);
      detail::pack_queries(queries.floats.data(), count, dim, 0.37f, tuning::panel_rows,
                           buffer.data());
      for (Index c = 0; c < dim; ++c)
        for (Index i = count; i < tuning::panel_rows; ++i)
          ASSERT_EQ(panel[c * tuning::panel_rows + i], 0.0f) << i << ", " << c;
    }
  }
}

// Values that are not finite are multiplied one by one, which is slow.
TEST(Packing, TheLargestFloatIsReportedAsFinite) {
  Random random(24);
  quoka::Buffer<float> buffer;
  for (const Index dim : dims) {
    SomeRows values(random, 7, dim);
    values.numbers(0, 0, 3, dim / 2) = std::numeric_limits<float>::max();
    values.numbers(0, 0, 4, dim - 1) = std::numeric_limits<float>::lowest();
    EXPECT_TRUE(detail::pack_values<quoka::formats::RowOf<float>>(
        values.all.data(), 7, {dim}, buffer.reserve(7 * detail::value_stride(dim))));
  }
}

TEST(Packing, PrefetchCountsTheCacheLinesOfItsRows) {
  const std::vector<std::byte> memory(7 * 512);
  std::vector<quoka::ConstRow> rows;
  for (Index i = 0; i < 7; ++i) rows.push_back(memory.data() + i * 512);
  for (const Index bytes : {4, 60, 64, 66, 256, 512}) {
    detail::RowPrefetch prefetch(rows.data(), 7, bytes);
    const Index lines = 7 * ((bytes + 63) / 64);
    EXPECT_EQ(prefetch.lines(), lines) << bytes;
    EXPECT_EQ(prefetch.prefetch(1), 0);
    EXPECT_EQ(prefetch.prefetch(1000), 1000 - (lines - 1)) << "stops at the last row";
  }
  detail::RowPrefetch none;
  EXPECT_EQ(none.lines(), 0);
  EXPECT_EQ(none.prefetch(3), 3);
}

}  // namespace
