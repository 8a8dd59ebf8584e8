// Packing: where each channel lands, that padding is zero where it must be, and that nothing beside
// a row is read or written. Keys and values are packed from every format; queries and outputs are
// float rows, which a format widens and narrows.

#include <quoka/base/buffer.hpp>
#include <quoka/kernels/format_table.hpp>
#include <quoka/kernels/panel_packing.hpp>

#include "support/world.hpp"

namespace {

using namespace quoka_test;
namespace detail = quoka::detail;
namespace simd = quoka::simd;
namespace tuning = quoka::tuning;
using quoka::Buffer;

constexpr Index dims[] = {1, 3, 15, 16, 17, 64, 80, 100, 128};
constexpr Index width = tuning::panel_rows;
constexpr Index tile_rows = tuning::tile_rows;
constexpr Index slab = tuning::slab_channels;

using quoka::formats::RowOf;

// Memory for a kernel, aligned as it needs and full of NaN, so that unwritten elements show.
float* fresh(Buffer<float>& buffer, Index count) {
  std::fill_n(buffer.reserve(count), count, not_a_number);
  return buffer.data();
}

// `count` rows whose neighbours are NaN, by pointer.
template <class T>
struct SomeRows {
  SomeRows(Random& random, Index count, Index dim)
      : memory(random.tensor<float>(1, 1, count, dim), quoka::format_of<T>(),
               StoredRows::Layout::tokens, random) {
    for (Index i = 0; i < count; ++i) addresses.push_back(memory.row(0, 0, i));
  }
  float at(Index i, Index c) const { return memory.floats()(0, 0, i, c); }
  // What lies there now.
  float now(Index i, Index c) const {
    return static_cast<float>(memory.rows().typed<T>().row(0, 0, i)[c]);
  }
  const quoka::ConstRow* data() const { return addresses.data(); }

  StoredRows memory;
  std::vector<quoka::ConstRow> addresses;
};
std::vector<float*> floats_of(SomeRows<float>& rows) {
  std::vector<float*> pointers;
  for (Index i = 0; i < std::ssize(rows.addresses); ++i)
    pointers.push_back(reinterpret_cast<float*>(rows.memory.row(0, 0, i)));
  return pointers;
}

// ---- one row ------------------------------------------------------------------------------------

TEST(Packing, ARowIsNarrowedToTheNearestAndWidened) {
  for_each_storage([]<class T>() {
    Random random(20);
    for (Index dim : dims) {
      SomeRows<T> rows(random, 3, dim);
      const auto floats = random.tensor<float>(1, 1, 1, dim);
      quoka::format_of<T>().narrow(floats.data(), {dim}, rows.memory.row(0, 0, 1));
      std::vector<float> row(uz(dim + 1), not_a_number);
      quoka::format_of<T>().widen(rows.data()[1], {dim}, row.data());
      for (Index c = 0; c < dim; ++c) {
        const auto nearest = static_cast<float>(static_cast<T>(floats.data()[c]));
        ASSERT_TRUE(rows.now(1, c) == nearest && row[uz(c)] == nearest) << dim << ", " << c;
      }
      EXPECT_TRUE(rows.memory.is_untouched_beside_rows()) << dim;
      EXPECT_TRUE(std::isnan(row.back())) << "one float too many at head_dim " << dim;
    }
  });
}

// ---- keys: [slab][tile_rows][slab_channels] -----------------------------------------------------

// Every channel of every key, tile after tile, and zeros beyond the last.
TEST(Packing, KeysFillTileAfterTile) {
  for_each_storage([]<class T>() {
    Random random(21);
    Buffer<float> buffer;
    for (Index dim : dims)
      for (Index count :
           {Index{0}, Index{1}, Index{3}, tile_rows - 1, tile_rows, 2 * tile_rows + 1}) {
        SCOPED_TRACE(dim);
        const SomeRows<T> keys(random, count, dim);
        const Index size = detail::key_tile_size(dim),
                    tiles = std::max<Index>(quoka::ceil_div(count, tile_rows), 1);
        float* const packed = fresh(buffer, tiles * size);
        if (tiles == 1)
          detail::pack_key_tile<RowOf<T>>(keys.data(), count, {dim}, packed);
        else
          detail::pack_keys(quoka::format_of<T>(), keys.data(), count, {dim}, packed);
        for (Index i = 0; i < tiles * tile_rows; ++i)
          for (Index c = 0; c < dim; ++c)
            ASSERT_EQ(packed[i / tile_rows * size + (c / slab * tile_rows + i % tile_rows) * slab +
                             c % slab],
                      i < count ? keys.at(i, c) : 0.0f)
                << i << ", " << c;
      }
  });
}

// ---- values: [key][stride] ----------------------------------------------------------------------

// Row by row, and whether all of them are finite: one element that is not is found in every channel, and the ends of the
// range are finite.
TEST(Packing, ValuesLieRowByRowAndTellOfWhatIsNotFinite) {
  for_each_storage([]<class T>() {
    Random random(24);
    Buffer<float> buffer;
    for (Index dim : dims)
      for (Index count : {1, 3, 7, 37}) {
        SomeRows<T> values(random, count, dim);
        const Index stride = detail::value_stride(dim);
        EXPECT_GE(stride, dim);
        EXPECT_EQ(stride % slab, 0);
        const auto pack = [&] {
          float* const packed = fresh(buffer, count * stride);
          return detail::pack_values<RowOf<T>>(values.data(), count, {dim}, packed);
        };
        EXPECT_TRUE(pack()) << dim;
        for (Index i = 0; i < count; ++i)
          for (Index c = 0; c < dim; ++c) ASSERT_EQ(buffer.data()[i * stride + c], values.at(i, c));
        for (float odd : {not_a_number, infinity, -infinity})
          for (Index c = 0; c < dim; ++c) {  // of a row that changes with it
            const float before = values.at(c % count, c);
            values.memory.set(0, 0, c % count, c, odd);
            ASSERT_FALSE(pack()) << dim << ", channel " << c;
            values.memory.set(0, 0, c % count, c, before);
          }
        for (Index i = 0; i < count; ++i)
          for (Index c = 0; c < dim; ++c)
            values.memory.set(0, 0, i, c, static_cast<float>(std::numeric_limits<T>::max()));
        EXPECT_TRUE(pack()) << dim;
      }
    EXPECT_TRUE(detail::pack_values<RowOf<T>>(nullptr, 0, {3}, fresh(buffer, slab)));
  });
}

// ---- queries: [channel][panel_rows] -------------------------------------------------------------

// Those of one packet have a panel of their own width.
TEST(PackingOfFloats, QueriesAreTransposedAndScaledAndZeroBeyondTheLast) {
  Random random(27);
  Buffer<float> buffer;
  const float scale = 0.37f;
  for (Index dim : dims)
    for (const Index panel_width : {Index{simd::lanes}, width})
      for (Index count : {Index{1}, panel_width / 2, panel_width - 1, panel_width}) {
        if (count == 0) continue;
        SCOPED_TRACE(dim);
        SomeRows<float> queries(random, count, dim);
        float* panel = fresh(buffer, panel_width * dim);
        detail::pack_queries(floats_of(queries).data(), count, dim, scale, panel_width, panel);
        for (Index i = 0; i < panel_width; ++i)
          for (Index c = 0; c < dim; ++c)
            ASSERT_EQ(panel[c * panel_width + i], i < count ? queries.at(i, c) * scale : 0.0f)
                << i << ", " << c;
      }
}

// ---- outputs ------------------------------------------------------------------------------------

TEST(PackingOfFloats, OutputsAreTransposedBack) {
  Random random(30);
  Buffer<float> buffer;
  for (Index dim : dims)
    for (Index count : {Index{1}, std::min<Index>(3, width), width / 2, width - 1, width}) {
      float* panel = fresh(buffer, width * dim);
      for (Index i = 0; i < width * dim; ++i) panel[i] = static_cast<float>(random.normal());
      SomeRows<float> outputs(random, count, dim);
      detail::unpack_outputs(panel, dim, floats_of(outputs).data(), count);
      for (Index i = 0; i < count; ++i)
        for (Index c = 0; c < dim; ++c)
          ASSERT_EQ(outputs.now(i, c), panel[c * width + i])
              << "dim " << dim << ", row " << i << ", channel " << c;
      ASSERT_TRUE(outputs.memory.is_untouched_beside_rows());
    }
}

// ---- prefetching --------------------------------------------------------------------------------

TEST(Packing, PrefetchCountsTheCacheLinesOfItsRows) {
  for_each_storage([]<class T>() {
    Random random(32);
    for (Index dim : dims) {
      const SomeRows<T> rows(random, 7, dim);
      const Index bytes = dim * static_cast<Index>(sizeof(T));
      detail::RowPrefetch prefetch(rows.data(), 7, bytes);
      EXPECT_EQ(prefetch.lines(), 7 * ((bytes + 63) / 64)) << dim;
      prefetch.prefetch(1);
      prefetch.prefetch(1000);  // stops at the last row
    }
    detail::RowPrefetch none;
    EXPECT_EQ(none.lines(), 0);
    none.prefetch(3);
  });
}

}  // namespace
