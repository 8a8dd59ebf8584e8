// Products of a head's queries with blocks of its keys, both 8-bit codes (codes.hpp). Selection
// makes the best of each key of them, or softmax weights of each row and key. Two units multiply,
// and give the same integers:
//
//   VectorCodes       code_dots.hpp
//   TileCodes<Tiles>  AMX: 16 queries x 16 keys x 64 channels an instruction. A block of keys is a
//                     tile as it lies; queries are packed once (pack_codes())
//
// A unit belongs to a task and its thread: it configures the thread's tiles, and gives back what
// was configured before. CodeKernels::begin() chooses tiles if the compiler's flags and the system
// allow them, if they compute what vectors do, and if queries and channels fill them.
//
// Drivers (select/code_mass.hpp, select/sketched_cosines.hpp) have a CodeScope for each task, and
// pass its unit a pair of blocks at a time by the functions of CodeUnit. CodedRows are their
// queries.
#pragma once

#include <quoka/base/arena.hpp>
#include <quoka/kernels/codes.hpp>
#include <quoka/simd/isa/tiles.hpp>

#include <algorithm>
#include <cstdint>
#include <utility>

#if QUOKA_DEFINES_KERNELS
#include <quoka/simd/code_dots.hpp>
#include <quoka/simd/simd.hpp>
#include <cstring>
#include <limits>
#include <new>
#include <type_traits>
#endif

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// ---- products of codes to weights, weights to scores --------------------------------------------
//
//   weight   2^(product * unit of the key * unit of the row + shift of the row), as pairs of
//            bfloat16: [row / 2][key][2]
//   share    sum over the rows of weight * factor of the row
//
// A weight lies in 2^[least_weight, most_weight]; a smaller one is raised to that. A row's largest
// lies in 2^[least_top, most_weight], so a raised weight is below 2^-50 of it. Shares are added up
// as multiples of 2^-64. Nothing overflows, and nothing is denormal, which would be slow. A key
// whose unit is below 0 has no weight.
inline constexpr float most_weight = 60.0f, least_top = -45.0f, least_weight = -95.0f;
inline constexpr float share_scale = 0x1p64f, least_share = 0x1p-62f;
// Weights: their exponential and that of their sum, the 16 bits that are kept of them, and sums in
// float.
inline constexpr float weight_error = 0.0115f;

// Rows of a pass, and the sums of their weights [row][lanes].
struct WeightRows {
  const float *units, *shifts;
  float* sums;
};

// shares [code_pair] from the weights of `count` rows, by their factors, in which share_scale is
// one.
QUOKA_FUNC void shares_of_weights(const std::uint32_t* weights, const float* factors, Index count,
                                  float* shares);

// to[row] = the sum, or the maximum, of numbers [row][lanes].
QUOKA_FUNC void sums_of_lanes(const float* numbers, Index rows, float* to);
QUOKA_FUNC void maxima_of_lanes(const float* numbers, Index rows, float* to);

// The largest length, and the largest length * error, of some keys: one running maximum per lane.
struct KeyExtent {
  alignas(64) float longest[most_lanes] = {}, missed[most_lanes] = {};
};
// For a pair of blocks: units = scale * length, and a larger extent. Returns whether an error is
// infinite.
QUOKA_FUNC bool pair_units(const float* scale, const float* error, const float* length,
                           float* units, KeyExtent& extent);

// ---- a task's products --------------------------------------------------------------------------

// Multiplies pairs of blocks by a task's queries. It is the task's and its thread's: tiles are
// configured as long as it lives.
class CodeUnit {
 public:
  virtual ~CodeUnit() = default;

  // scores[i] = the largest product of key i with a query, times scale[i] times unit.
  virtual void best(const KeyPair& keys, const float* scale, float unit, float* scores) = 0;
  // Weights [row / 2][key][2], and what they add to the rows' sums. partial: is a key's unit below
  // 0?
  virtual void weigh(const KeyPair& keys, const float* key_units, bool partial,
                     const WeightRows& rows, std::uint32_t* weights) = 0;
  // largest [row][lanes] is raised to the rows' largest logits, without their shifts.
  virtual void raise(const KeyPair& keys, const float* key_units, const float* units,
                     float* largest) = 0;
};

// Slabs of steps, each in a tile of its own: as few as cut the steps evenly.
inline constexpr Index most_slab_steps = 16;
constexpr Index slabs_of(Index steps) {
  Index slabs = ceil_div(steps, most_slab_steps);
  while (steps % slabs != 0) ++slabs;
  return slabs;
}
// Do these slabs fill at least half of their tiles?
constexpr bool fits_tiles(Index steps) {
  return steps > 0 && steps / slabs_of(steps) >= std::min(steps, most_slab_steps / 2);
}

// Bytes of queries as tiles take them (TiledQueries).
constexpr Index packed_code_bytes(Index rows, Index steps) {
  return round_up(rows, Index{simd::tile_height}) * (4 * steps + simd::tile_bytes);
}

// The units of the compiler's flags. Tests have a table with other tiles.
struct CodeKernels {
  // Packs queries as tiles take them, [packed_code_bytes()]; nothing where vectors multiply.
  void (*pack)(const QueryCodes& queries, std::byte* packed);
  // Chooses the unit, and makes it in `room`. packed: the same queries, as pack() left them.
  CodeUnit* (*begin)(const QueryCodes& queries, const std::byte* packed, std::byte* room);
};
inline constexpr std::size_t code_unit_bytes = 8384;

QUOKA_FUNC const CodeKernels& code_kernels();

// A unit, as long as this lives.
class CodeScope {
 public:
  CodeScope(const CodeKernels& kernels, const QueryCodes& queries, const std::byte* packed)
      : unit_(kernels.begin(queries, packed, room_)) {}
  ~CodeScope() { unit_->~CodeUnit(); }
  CodeScope(const CodeScope&) = delete;
  CodeScope& operator=(const CodeScope&) = delete;

  CodeUnit* operator->() const { return unit_; }

 private:
  alignas(64) std::byte room_[code_unit_bytes];
  CodeUnit* unit_;
};

// ---- query rows as codes ------------------------------------------------------------------------
//
//   row[m] = units[m] * code[m] + an error of a length of at most missed[m]
//
// Rows whose products are compared as integers share a unit; other rows each have their own. A pass
// handles some rows at a time: all of them, or as many as the caller has memory for their results.
enum class RowUnits { shared, own };

class CodedRows {
 public:
  // Room for the rows in pairs.
  static constexpr Index padded(Index rows) { return rows + rows % 2; }

  // Room for `rows` rows of `dim` channels, in passes of `pass_rows`.
  CodedRows(Arena& arena, Index rows, Index dim, Index pass_rows)
      : dim_(dim),
        steps_(code_steps(dim)),
        pass_rows_(pass_rows),
        packed_step_(packed_code_bytes(pass_rows, steps_)),
        codes_(arena.take<std::int32_t>(steps_ * padded(rows))),
        offsets_(arena.take<std::int32_t>(padded(rows))),
        packed_(arena.take<std::byte>(packed_step_ * passes_of(padded(rows)))),
        units_(arena.take<float>(padded(rows))),
        lengths_(arena.take<float>(padded(rows))),
        missed_(arena.take<float>(padded(rows))) {}

  // Codes of rows [count, dim], at most as many as there is room for. False if codes cannot
  // represent a row: it is not finite, longer than 1e12, or shorter than 1e-12 and not zero. For
  // rows that share a unit the longest decides.
  bool encode(const float* rows, Index count, RowUnits kind, const CodeKernels& kernels);

  Index rows() const { return rows_; }
  Index stride() const { return padded(rows_); }
  Index passes() const { return passes_of(stride()); }
  // The first row of a pass, and how many it has: an even number.
  std::pair<Index, Index> of(Index pass) const {
    const Index first = pass * pass_rows_;
    return {first, std::min(pass_rows_, stride() - first)};
  }
  // [stride()]; of a row that only fills up a pair 0.
  const float* units() const { return units_; }
  const float* lengths() const { return lengths_; }  // rounded up
  const float* missed() const { return missed_; }    // the same

  // The operands of CodeScope: the rows of a pass, and the same packed.
  QueryCodes codes(Index pass) const {
    const auto [first, count] = of(pass);
    return {codes_ + first, offsets_ + first, std::min(count, rows_ - first), stride(), steps_};
  }
  const std::byte* packed(Index pass) const { return packed_ + pass * packed_step_; }

 private:
  Index passes_of(Index rows) const { return ceil_div(rows, std::max<Index>(pass_rows_, 1)); }

  Index dim_, steps_, pass_rows_;
  Index packed_step_;      // bytes of a pass
  Index rows_ = 0;         // that are encoded
  std::int32_t* codes_;    // [steps][stride]: 4 channels of one row
  std::int32_t* offsets_;  // [stride]
  std::byte* packed_;      // [passes][packed_step_]
  float *units_, *lengths_, *missed_;
};

#if QUOKA_DEFINES_KERNELS

inline bool is_coded(const float* x, Index size, float length) {
  return length > least_coded_length || std::all_of(x, x + size, [](float c) { return c == 0.0f; });
}

QUOKA_FUNC bool CodedRows::encode(const float* rows, Index count, RowUnits kind,
                                  const CodeKernels& kernels) {
  rows_ = count;
  std::fill_n(codes_, steps_ * stride(), 0);
  std::fill_n(offsets_, stride(), 0);
  for (float* numbers : {units_, lengths_, missed_}) std::fill_n(numbers, stride(), 0.0f);
  float longest = 0.0f, largest = 0.0f;  // length, unit
  for (Index m = 0; m < count; ++m) {
    const float* const row = rows + m * dim_;
    const float length = coded_length(row, dim_);
    if (!(length < most_coded_length)) return false;
    if (kind == RowUnits::own && !is_coded(row, dim_, length)) return false;
    lengths_[m] = length;
    units_[m] = query_unit(row, dim_);
    longest = std::max(longest, length), largest = std::max(largest, units_[m]);
  }
  if (kind == RowUnits::shared) {
    if (!is_coded(rows, count * dim_, longest)) return false;
    std::fill_n(units_, count, largest);
  }
  for (Index m = 0; m < count; ++m)
    missed_[m] = encode_query(rows + m * dim_, dim_, units_[m], m, stride(), codes_, offsets_[m]);
  for (Index pass = 0; pass < passes(); ++pass)
    kernels.pack(codes(pass), packed_ + pass * packed_step_);
  return true;
}

// Products [height][pair of blocks] of a tile of queries, floats or integers. With the query of
// zeros behind an odd number of them the height is even.
template <class T>
struct CodeTile {
  Index height;
  const T* products;
};

class VectorCodes {
 public:
  // As many as registers hold; else as many as make calls few.
  static constexpr Index most_height = simd::has_fast_code_products ? simd::most_code_queries : 12;

  explicit VectorCodes(const QueryCodes& queries) : queries_(queries) {}

  // best [code_pair] is raised to the dot products with all queries. Prefetches the blocks ahead.
  void dots(const KeyPair& keys, std::int32_t* best) const {
    for (Index m = 0, height; m < queries_.rows; m += height) {
      height = simd::code_tile_height(queries_.rows - m, simd::most_code_queries);
      simd::with_code_height<simd::most_code_queries, 1>(height, [&](auto count) {
        simd::code_dots_of<count>(m == 0 ? keys : keys.alone(), queries_.from(m), best);
      });
    }
  }

  // The tile of queries from m on, good until the next call. m: 0, then behind the tile before.
  CodeTile<float> products(Index m, const KeyPair& keys) {
    const Index height = simd::code_tile_height(round_up(queries_.rows, Index{2}) - m, most_height);
    simd::with_code_height<most_height, 2>(height, [&](auto count) {
      simd::code_products_of<count>(m == 0 ? keys : keys.alone(), queries_.from(m), products_);
    });
    return {height, products_};
  }

 private:
  QueryCodes queries_;
  alignas(64) float products_[most_height * simd::code_pair];
};

// Queries as tiles take them, at `packed`:
//
//   a         [tile][slab][height][4 slab_steps] codes, signed
//   offsets   [tile][height][16 keys], what sums begin as
//
// Slabs of a block, and tiles of queries, are of one size each, so that one configuration serves.
struct TiledQueries {
  static_assert(most_slab_steps == simd::tile_bytes / 4);
  static constexpr Index most_height = simd::tile_height;
  static constexpr Index row_of_sums = simd::tile_bytes;

  Index rows, tiles, height, slabs, slab_steps;

  explicit TiledQueries(const QueryCodes& queries)
      : rows(queries.rows),
        tiles(ceil_div(rows, most_height)),
        height(round_up(ceil_div(rows, tiles), Index{2})),
        slabs(slabs_of(queries.steps)),
        slab_steps(queries.steps / slabs) {}

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

// Tiles: simd::Tiles, or what stands in for it in tests. a is a slab of a tile of queries, b a slab
// of a block of keys, as it lies, unsigned; c [height][16 keys].
template <class Tiles>
class TileCodes {
 public:
  static constexpr Index most_height = TiledQueries::most_height;

  // packed: by TiledQueries::pack().
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

  void dots(const KeyPair& keys, std::int32_t* best) {
    for (Index m = 0; m < q_.rows; m += q_.height)
      simd::take_dots_in(products(m, keys).products, std::min(q_.height, q_.rows - m), best);
  }

  // As VectorCodes has it. Several tiles are multiplied before the first is used: what uses it need
  // not wait.
  CodeTile<std::int32_t> products(Index m, const KeyPair& keys) {
    const Index tile = m / q_.height;
    if (tile % at_once == 0) {
      const Index count = std::min(at_once, q_.tiles - tile);
      Index i = 0;
      const auto pair = [&] { return tile + i == 0 ? keys : keys.alone(); };
      for (; i + 2 <= count; i += 2) multiply<2>(pair(), tile + i, dots_ + i);
      if (i < count) multiply<1>(pair(), tile + i, dots_ + i);
    }
    return {std::min(q_.height, round_up(q_.rows, Index{2}) - m), dots_[tile % at_once]};
  }

 private:
  static constexpr int a_tile = 4, b_tile = 6;  // c has 0 to 3
  static constexpr Index row_of_c = TiledQueries::row_of_sums, at_once = 4;
  using Dots = std::int32_t[simd::tile_height * simd::code_pair];

  // Count tiles of queries from t on, times both blocks.
  template <int Count>
  void multiply(const KeyPair& keys, Index t, Dots* dots) const {
    const Index slab_bytes = q_.slab_bytes(), key_bytes = q_.slab_steps * row_of_c;
    const std::byte* const a = a_ + t * q_.slabs * slab_bytes;
    const std::byte* const offsets = offsets_ + t * q_.height * row_of_c;
    begin<0>(offsets);
    if constexpr (Count > 1) begin<1>(offsets + q_.height * row_of_c);
    for (Index s = 0; s < q_.slabs; ++s) {
      if (keys.ahead[0] != nullptr)
        for (Index line = s * key_bytes; line < (s + 1) * key_bytes; line += 64)
          simd::prefetch(keys.ahead[0] + line), simd::prefetch(keys.ahead[1] + line);
      Tiles::template load<b_tile>(keys.codes[0] + s * key_bytes, row_of_c);
      Tiles::template load<b_tile + 1>(keys.codes[1] + s * key_bytes, row_of_c);
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
  static std::byte packed[static_cast<std::size_t>(packed_code_bytes(rows, steps))];
  static float expected[rows * simd::code_pair];
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
  const KeyPair blocks{simd::code_pair, {keys[0], keys[1]}};
  const auto for_tiles = [&](auto&& unit, auto&& use) {  // of queries
    for (Index m = 0; m < rows;) {
      const auto [height, products] = unit.products(m, blocks);
      use(expected + m * simd::code_pair, products, height * simd::code_pair);
      m += height;
    }
  };
  for_tiles(VectorCodes(queries),
            [](float* to, const float* products, Index n) { std::copy_n(products, n, to); });
  TiledQueries(queries).pack(queries, packed);
  bool agree = true;
  for_tiles(TileCodes<Tiles>(queries, packed),
            [&](const float* from, const std::int32_t* products, Index n) {
              for (Index i = 0; i < n; ++i)
                agree = agree && from[i] == static_cast<float>(products[i]);
            });
  return agree;
}

template <class Tiles>
bool code_tiles_work() {
  static const bool work = simd::tiles_pass(code_tiles_agree<Tiles>, "vectors for codes");
  return work;
}

// Tests have tiles of their own where the ISA has none. Those always serve.
template <class Tiles>
inline constexpr bool tiles_exist = simd::has_tiles || !std::is_same_v<Tiles, simd::Tiles>;

template <class Tiles>
bool tiles_serve(Index rows, Index steps) {
  if constexpr (tiles_exist<Tiles>)
    return rows >= least_tile_queries && fits_tiles(steps) &&
           (!std::is_same_v<Tiles, simd::Tiles> || code_tiles_work<Tiles>());
  return false;
}

template <class Tiles>
void pack_codes(const QueryCodes& queries, std::byte* packed) {
  if (tiles_serve<Tiles>(queries.rows, queries.steps)) TiledQueries(queries).pack(queries, packed);
}

// ---- what becomes of products -------------------------------------------------------------------

static_assert(weight_error > simd::weight_pair_max_error + 2 * simd::exp2_rough_max_error);

// The weights of the first `height` rows, an even number. products [height, code_pair]; key_units:
// the keys' units. Partial: some of them are below 0.
template <bool Partial, class Product>
void row_weights(const Product* products, const float* key_units, Index height,
                 const WeightRows& rows, std::uint32_t* to) {
  constexpr Index pair = simd::code_pair;
  for (Index m = 0; m < height; m += 2, products += 2 * pair, to += pair) {
    simd::Packet unit[2], shift[2], total[2];
    simd::unroll<2>([&](auto i) QUOKA_INLINE_LAMBDA {
      unit[i] = simd::broadcast(rows.units[m + i]);
      shift[i] = simd::broadcast(rows.shifts[m + i]);
      total[i] = simd::load(rows.sums + (m + i) * simd::lanes);
    });
    simd::unroll<pair / simd::lanes>([&](auto j) QUOKA_INLINE_LAMBDA {
      const simd::Packet key_unit = simd::load(key_units + j * simd::lanes);
      simd::Packet weight[2];
      simd::unroll<2>([&](auto i) QUOKA_INLINE_LAMBDA {
        const simd::Packet product = simd::load_dots(products + i * pair + j * simd::lanes);
        const simd::Packet logit = simd::fma(simd::mul(product, key_unit), unit[i], shift[i]);
        weight[i] = simd::exp2_rough(simd::max(logit, simd::broadcast(least_weight)));
        if constexpr (Partial)
          weight[i] = simd::select_less(key_unit, simd::zero(), simd::zero(), weight[i]);
        total[i] = simd::add(total[i], weight[i]);
      });
      simd::store_weight_pairs(to + j * simd::lanes, weight[0], weight[1]);
    });
    simd::unroll<2>([&](auto i) QUOKA_INLINE_LAMBDA {
      simd::store(rows.sums + (m + i) * simd::lanes, total[i]);
    });
  }
}

QUOKA_FUNC void shares_of_weights(const std::uint32_t* weights, const float* factors, Index count,
                                  float* shares) {
  constexpr Index pair = simd::code_pair, packets = pair / simd::lanes;
  constexpr int together = packets < 2 ? 1 : 2;
  for (Index j = 0; j < packets; j += together) {
    simd::Packet sum[together][2];
    simd::unroll<together, 2>([&](auto i, auto row)
                                  QUOKA_INLINE_LAMBDA { sum[i][row] = simd::zero(); });
    for (Index m = 0; m < count; m += 2) {
      const simd::Packet factor[2] = {simd::broadcast(factors[m]), simd::broadcast(factors[m + 1])};
      simd::unroll<together>([&](auto i) QUOKA_INLINE_LAMBDA {
        const std::uint32_t* const at = weights + m / 2 * pair + (j + i) * simd::lanes;
        const simd::Packet weight[2] = {simd::first_weights(at), simd::second_weights(at)};
        simd::unroll<2>([&](auto row) QUOKA_INLINE_LAMBDA {
          sum[i][row] = simd::fma(weight[row], factor[row], sum[i][row]);
        });
      });
    }
    simd::unroll<together>([&](auto i) QUOKA_INLINE_LAMBDA {
      const simd::Packet large =
          simd::max(simd::add(sum[i][0], sum[i][1]), simd::broadcast(least_share));
      simd::store(shares + (j + i) * simd::lanes,
                  simd::mul(large, simd::broadcast(1.0f / share_scale)));
    });
  }
}

// Products: VectorCodes or TileCodes.
template <class Products>
class CodeUnitOf final : public CodeUnit {
 public:
  template <class... Args>
  explicit CodeUnitOf(const QueryCodes& queries, const Args&... args)
      : rows_(queries.rows), products_(queries, args...) {}

  void best(const KeyPair& keys, const float* scale, float unit, float* scores) override {
    alignas(64) std::int32_t best[code_pair];
    std::fill_n(best, code_pair, std::numeric_limits<std::int32_t>::min());
    products_.dots(keys, best);
    if (keys.count < code_pair) {
      for (Index i = 0; i < keys.count; ++i)
        scores[i] = static_cast<float>(best[i]) * (scale[i] * unit);
      return;
    }
    for (Index i = 0; i < code_pair; i += simd::lanes)
      simd::store_unaligned(
          scores + i, simd::mul(simd::load_dots(best + i),
                                simd::mul(simd::load_unaligned(scale + i), simd::broadcast(unit))));
  }

  void weigh(const KeyPair& keys, const float* key_units, bool partial, const WeightRows& rows,
             std::uint32_t* weights) override {
    for_tiles(keys, [&](Index m, Index height, const auto* products) {
      const WeightRows some{rows.units + m, rows.shifts + m, rows.sums + m * simd::lanes};
      std::uint32_t* const to = weights + m * code_pair / 2;
      if (partial)
        row_weights<true>(products, key_units, height, some, to);
      else
        row_weights<false>(products, key_units, height, some, to);
    });
  }

  void raise(const KeyPair& keys, const float* key_units, const float* units,
             float* largest) override {
    for_tiles(keys, [&](Index first, Index height, const auto* products) {
      for (Index m = first; m < first + height; ++m, products += code_pair) {
        const simd::Packet row_unit = simd::broadcast(units[m]);
        simd::Packet most = simd::load(largest + m * simd::lanes);
        for (Index j = 0; j < code_pair; j += simd::lanes) {
          const simd::Packet key_unit = simd::load(key_units + j);
          const simd::Packet logit =
              simd::mul(simd::mul(simd::load_dots(products + j), key_unit), row_unit);
          const simd::Packet none = simd::broadcast(-simd::infinity);
          most = simd::max(most, simd::select_less(key_unit, simd::zero(), none, logit));
        }
        simd::store(largest + m * simd::lanes, most);
      }
    });
  }

 private:
  // use(first row, rows, products) of all tiles of queries.
  template <class Use>
  QUOKA_INLINE void for_tiles(const KeyPair& keys, Use&& use) {
    for (Index m = 0, next; m < rows_; m = next) {
      const auto [height, products] = products_.products(m, keys);
      next = m + height;
      use(m, height, products);
    }
  }

  Index rows_;
  Products products_;
};

QUOKA_FUNC void sums_of_lanes(const float* numbers, Index rows, float* to) {
  for (Index m = 0; m < rows; ++m) to[m] = simd::reduce_add(simd::load(numbers + m * simd::lanes));
}

QUOKA_FUNC void maxima_of_lanes(const float* numbers, Index rows, float* to) {
  for (Index m = 0; m < rows; ++m) to[m] = simd::reduce_max(simd::load(numbers + m * simd::lanes));
}

QUOKA_FUNC bool pair_units(const float* scale, const float* error, const float* length,
                           float* units, KeyExtent& extent) {
  simd::Packet longest = simd::load(extent.longest), missed = simd::load(extent.missed),
               worst = simd::zero();
  for (Index i = 0; i < code_pair; i += simd::lanes) {
    const simd::Packet e = simd::load(error + i), l = simd::load(length + i);
    simd::store(units + i, simd::mul(simd::load(scale + i), l));
    worst = simd::max(worst, e);
    longest = simd::max(longest, l);
    // Where codes stand for nothing, the length is 0.
    missed = simd::max(missed, simd::mul(simd::min(e, simd::broadcast(1.0f)), l));
  }
  simd::store(extent.longest, longest), simd::store(extent.missed, missed);
  return simd::reduce_max(worst) == simd::infinity;
}

// ---- the choice of a unit -----------------------------------------------------------------------

template <class Tiles>
CodeUnit* begin_codes(const QueryCodes& queries, [[maybe_unused]] const std::byte* packed,
                      std::byte* room) {
  if constexpr (tiles_exist<Tiles>) {
    using Unit = CodeUnitOf<TileCodes<Tiles>>;
    static_assert(sizeof(Unit) <= code_unit_bytes);
    if (tiles_serve<Tiles>(queries.rows, queries.steps)) return new (room) Unit(queries, packed);
  }
  using Unit = CodeUnitOf<VectorCodes>;
  static_assert(sizeof(Unit) <= code_unit_bytes);
  return new (room) Unit(queries);
}

template <class Tiles>
inline constexpr CodeKernels code_kernels_of{.pack = pack_codes<Tiles>,
                                             .begin = begin_codes<Tiles>};

QUOKA_FUNC const CodeKernels& code_kernels() { return code_kernels_of<simd::Tiles>; }

#endif  // QUOKA_DEFINES_KERNELS

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
