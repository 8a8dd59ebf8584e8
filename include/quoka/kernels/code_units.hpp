// Units that multiply the queries of a head with blocks of its keys, both 8-bit codes (simd/code_dots.hpp).
// Every unit gives the same integers.
//
//   VectorCodes       code_dots.hpp
//   TileCodes<Tiles>  AMX: 16 queries x 16 keys x 64 channels an instruction. A block of keys is a tile
//                     as it lies; queries are packed once (pack_codes())
//
// A unit belongs to a task and its thread: it configures the thread's tiles, and gives back what was
// configured before. with_code_unit() chooses: tiles where the compiler's flags and the system allow
// them and they compute what vectors do, for some queries and channels that fill them.
#pragma once

#include <quoka/kernels/unit.hpp>
#include <quoka/simd/code_dots.hpp>
#include <quoka/simd/isa/tiles.hpp>

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// `rows` queries of the `stride` that lie side by side. Behind an odd number of them lies one of zeros.
struct QueryCodes {
  const std::int32_t* codes;    // [steps][stride]
  const std::int32_t* offsets;  // [rows]
  Index rows, stride, steps;
};

// Two blocks of keys, aligned to 64 bytes.
using CodePair = const std::uint8_t* const (&)[2];

class VectorCodes {
 public:
  // As many as registers hold; else as many as make calls few.
  static constexpr Index most_height = simd::has_fast_code_products ? simd::most_code_queries : 12;

  explicit VectorCodes(const QueryCodes& queries) : queries_(queries) {}

  // best [pair of blocks] takes the dot products with all queries in. Prefetches the blocks `later`.
  void dots(simd::CodeScores over, CodePair keys, std::int32_t* best,
            const simd::LaterBlocks& later) const {
    const QueryCodes& q = queries_;
    for (Index m = 0, height; m < q.rows; m += height) {
      height = simd::code_tile_height(q.rows - m, simd::most_code_queries);
      simd::with_code_height<simd::most_code_queries>(height, [&](auto count) {
        simd::code_dots_of<count>(over, keys, q.codes + m, q.stride, q.steps, q.offsets + m, best,
                                  m == 0 ? later : simd::LaterBlocks{});
      });
    }
  }

  // use(m, height, products): products [height][pair of blocks], floats or integers, are those of queries
  // [m, m + height), with the one of zeros an even number. room: of as many floats.
  template <class Use>
  void products(CodePair keys, float* room, const simd::LaterBlocks& later, Use&& use) const {
    const QueryCodes& q = queries_;
    const Index rows = round_up(q.rows, Index{2});
    for (Index m = 0, height; m < rows; m += height) {
      height = simd::code_tile_height(rows - m, most_height);
      simd::with_code_height<most_height>(height, [&](auto count) {
        if constexpr (decltype(count)::value % 2 == 0)
          simd::code_products_of<count>(keys, q.codes + m, q.stride, q.steps, q.offsets + m, room,
                                        m == 0 ? later : simd::LaterBlocks{});
      });
      use(m, height, std::as_const(room));
    }
  }

 private:
  QueryCodes queries_;
};

// Queries as tiles take them, at `packed`:
//
//   a         [tile][slab][height][4 slab_steps] codes, signed
//   offsets   [tile][height][16 keys], what sums begin as
//
// Slabs of a block, and tiles of queries, are of one size each, so that one configuration serves.
struct TiledQueries {
  static constexpr Index most_height = simd::tile_height, most_steps = simd::tile_bytes / 4;
  static constexpr Index row_of_sums = simd::tile_bytes;

  Index rows, tiles, height, slabs, slab_steps;

  explicit TiledQueries(const QueryCodes& queries)
      : rows(queries.rows),
        tiles(ceil_div(rows, most_height)),
        height(round_up(ceil_div(rows, tiles), Index{2})),
        slabs(slabs_of(queries.steps)),
        slab_steps(queries.steps / slabs) {}

  static constexpr Index bytes(Index rows, Index steps) {
    return round_up(rows, most_height) * (4 * steps + row_of_sums);
  }
  // Steps that are cut into equal slabs of at least half a tile.
  static constexpr bool fits(Index steps) {
    return steps > 0 && steps / slabs_of(steps) >= std::min(steps, most_steps / 2);
  }
  static constexpr Index slabs_of(Index steps) {
    Index slabs = ceil_div(steps, most_steps);
    while (steps % slabs != 0) ++slabs;
    return slabs;
  }

  Index slab_bytes() const { return height * slab_steps * 4; }
  Index offsets_at() const { return tiles * slabs * slab_bytes(); }

  // Queries beyond the last are zeros.
  void pack(const QueryCodes& queries, std::byte* packed) const {
    for (Index m = 0; m < tiles * height; ++m) {
      std::byte* const tile =
          packed + m / height * slabs * slab_bytes() + m % height * slab_steps * 4;
      std::int32_t sum = 0;
      for (Index s = 0; s < queries.steps; ++s) {
        std::int8_t code[simd::code_channels] = {};
        if (m < rows) std::memcpy(code, queries.codes + s * queries.stride + m, sizeof code);
        std::memcpy(tile + s / slab_steps * slab_bytes() + s % slab_steps * 4, code, sizeof code);
        if constexpr (simd::product_bias != simd::code_bias)
          for (const std::int8_t x : code) sum += x;
      }
      // On an ISA whose own products have no bias, offsets do not take it back.
      const std::int32_t offset =
          (m < rows ? queries.offsets[m] : 0) + (simd::product_bias - simd::code_bias) * sum;
      for (Index i = 0; i < simd::code_block; ++i)
        std::memcpy(packed + offsets_at() + m * row_of_sums + i * 4, &offset, 4);
    }
  }
};

// Tiles: simd::Tiles, or what stands in for it in tests. a is a slab of a tile of queries, b a slab of a block of keys,
// as it lies, unsigned; c [height][16 keys].
template <class Tiles>
class TileCodes {
 public:
  static constexpr Index most_height = TiledQueries::most_height;

  // packed: TiledQueries::pack() was there.
  TileCodes(const QueryCodes& queries, const std::byte* packed)
      : q_(queries), a_(packed), offsets_(packed + q_.offsets_at()) {
    Tiles::configuration(before_);
    simd::TileShapes shapes;
    shapes.palette = 1;
    const auto shape = [&](int t, Index rows, Index row_bytes) {
      shapes.rows[t] = static_cast<std::uint8_t>(rows);
      shapes.row_bytes[t] = static_cast<std::uint16_t>(row_bytes);
    };
    for (int t = 0; t < a_tile; ++t) shape(t, q_.height, row_of_c);
    for (int t = a_tile; t < b_tile; ++t) shape(t, q_.height, 4 * q_.slab_steps);
    for (int t = b_tile; t < b_tile + 2; ++t) shape(t, q_.slab_steps, row_of_c);
    Tiles::configure(shapes);
  }
  ~TileCodes() { Tiles::configure(before_); }
  TileCodes(const TileCodes&) = delete;
  TileCodes& operator=(const TileCodes&) = delete;

  void dots(simd::CodeScores over, CodePair keys, std::int32_t* best,
            const simd::LaterBlocks& later) {
    for_each_tile(keys, later, [&](Index m, const std::int32_t* dots) {
      simd::take_dots_in(over, dots, std::min(q_.height, q_.rows - m), best);
    });
  }

  template <class Use>
  void products(CodePair keys, float*, const simd::LaterBlocks& later, Use&& use) {
    for_each_tile(keys, later, [&](Index m, const std::int32_t* dots) {
      use(m, std::min(q_.height, round_up(q_.rows, Index{2}) - m), dots);
    });
  }

 private:
  static constexpr int a_tile = 4, b_tile = 6;  // c has 0 to 3
  static constexpr Index row_of_c = TiledQueries::row_of_sums, at_once = 4;
  using Dots = std::int32_t[simd::tile_height * simd::code_pair];

  // use(m, dots): the dot products [height][pair of blocks] with queries from m on. Several tiles are
  // multiplied before the first is used: what uses it need not wait.
  template <class Use>
  void for_each_tile(CodePair keys, const simd::LaterBlocks& later, Use&& use) {
    for (Index t = 0; t < q_.tiles; t += at_once) {
      const Index count = std::min(at_once, q_.tiles - t);
      Index i = 0;
      const auto to_prefetch = [&] { return t + i == 0 ? later : simd::LaterBlocks{}; };
      for (; i + 2 <= count; i += 2) multiply<2>(keys, t + i, to_prefetch(), dots_ + i);
      if (i < count) multiply<1>(keys, t + i, to_prefetch(), dots_ + i);
      for (i = 0; i < count; ++i) use((t + i) * q_.height, dots_[i]);
    }
  }

  // Count tiles of queries from t on, times both blocks.
  template <int Count>
  void multiply(CodePair keys, Index t, const simd::LaterBlocks& later, Dots* dots) const {
    const Index slab_bytes = q_.slab_bytes(), key_bytes = q_.slab_steps * row_of_c;
    const std::byte* const a = a_ + t * q_.slabs * slab_bytes;
    const std::byte* const offsets = offsets_ + t * q_.height * row_of_c;
    begin<0>(offsets);
    if constexpr (Count > 1) begin<1>(offsets + q_.height * row_of_c);
    for (Index s = 0; s < q_.slabs; ++s) {
      if (later.first != nullptr)
        for (Index line = s * key_bytes; line < (s + 1) * key_bytes; line += 64)
          simd::prefetch(later.first + line), simd::prefetch(later.second + line);
      Tiles::template load<b_tile>(keys[0] + s * key_bytes, row_of_c);
      Tiles::template load<b_tile + 1>(keys[1] + s * key_bytes, row_of_c);
      add<0>(a + s * slab_bytes);
      if constexpr (Count > 1) add<1>(a + (q_.slabs + s) * slab_bytes);
    }
    end<0>(dots[0]);
    if constexpr (Count > 1) end<1>(dots[1]);
  }

  // For tile i of the current queries.
  template <int i>
  void begin(const std::byte* offsets) const {
    Tiles::template load<2 * i>(offsets, row_of_c);
    Tiles::template load<2 * i + 1>(offsets, row_of_c);
  }
  template <int i>
  void add(const std::byte* a) const {
    Tiles::template load<a_tile + i>(a, 4 * q_.slab_steps);
    Tiles::template dot_signed_codes<2 * i, a_tile + i, b_tile>();
    Tiles::template dot_signed_codes<2 * i + 1, a_tile + i, b_tile + 1>();
  }
  template <int i>
  void end(Dots& dots) const {
    Tiles::template store<2 * i>(dots, 2 * row_of_c);
    Tiles::template store<2 * i + 1>(dots + simd::code_block, 2 * row_of_c);
  }

  TiledQueries q_;
  const std::byte *a_, *offsets_;
  simd::TileShapes before_;  // another library's tiles of this thread
  alignas(64) Dots dots_[at_once];
};

// Fewer queries are left to vectors: reading the keys takes longer.
inline constexpr Index least_tile_queries = 4;

// Do tiles and vectors agree on some products?
template <class Tiles>
bool code_tiles_agree() {
  constexpr Index rows = 20, steps = 32;
  alignas(64) static std::uint8_t keys[2][steps * simd::code_channels * simd::code_block];
  static std::int32_t codes[steps * rows];
  static std::byte packed[static_cast<std::size_t>(TiledQueries::bytes(rows, steps))];
  alignas(64) std::int32_t best[2][simd::code_pair] = {};
  std::int32_t offsets[rows] = {};
  std::uint32_t state = 1;
  const auto draw = [&] { return (state = state * 1664525u + 1013904223u) >> 24; };
  for (auto& block : keys)
    for (std::uint8_t& x : block) x = static_cast<std::uint8_t>(draw());
  // Small codes: no ISA's sums of 16 bits saturate.
  for (std::int32_t& x : codes) {
    std::int8_t four[simd::code_channels];
    for (std::int8_t& c : four) c = static_cast<std::int8_t>(static_cast<int>(draw() % 31u) - 15);
    std::memcpy(&x, four, sizeof x);
  }
  for (Index m = 0; m < rows; ++m)
    for (Index c = 0; c < steps * simd::code_channels; ++c)
      offsets[m] += simd::code_offset(
          reinterpret_cast<const std::int8_t*>(codes)[simd::query_code_at(rows, m, c)]);
  const QueryCodes queries{codes, offsets, rows, rows, steps};
  const std::uint8_t* const blocks[2] = {keys[0], keys[1]};
  VectorCodes(queries).dots(simd::CodeScores::sum, blocks, best[0], {});
  TiledQueries(queries).pack(queries, packed);
  TileCodes<Tiles>(queries, packed).dots(simd::CodeScores::sum, blocks, best[1], {});
  return std::equal(best[0], best[0] + simd::code_pair, best[1]);
}

template <class Tiles>
bool code_tiles_work() {
  static const bool work = tiles_pass(code_tiles_agree<Tiles>, "vectors for codes");
  return work;
}

template <class Tiles>
bool tiles_serve(Index rows, Index steps) {
  if constexpr (!simd::has_tiles && std::is_same_v<Tiles, simd::Tiles>)
    return false;
  else if (rows < least_tile_queries || !TiledQueries::fits(steps))
    return false;
  else if constexpr (std::is_same_v<Tiles, simd::Tiles>)
    return code_tiles_work<Tiles>();
  else
    return true;
}

// Room for packed queries, and packing them; nothing where tiles do not serve them.
template <class Tiles>
Index packed_bytes(Index rows, Index steps) {
  return tiles_serve<Tiles>(rows, steps) ? TiledQueries::bytes(rows, steps) : 0;
}
template <class Tiles>
void pack_codes(const QueryCodes& queries, std::byte* packed) {
  if (tiles_serve<Tiles>(queries.rows, queries.steps)) TiledQueries(queries).pack(queries, packed);
}

// use(unit), of queries that lie packed at `packed`.
template <class Tiles, class Use>
decltype(auto) with_code_unit(const QueryCodes& queries, const std::byte* packed, Use&& use) {
  if constexpr (simd::has_tiles || !std::is_same_v<Tiles, simd::Tiles>)
    if (tiles_serve<Tiles>(queries.rows, queries.steps)) {
      TileCodes<Tiles> unit(queries, packed);
      return use(unit);
    }
  VectorCodes unit(queries);
  return use(unit);
}

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
