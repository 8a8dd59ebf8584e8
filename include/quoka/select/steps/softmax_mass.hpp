// Exact softmax mass: how much of some queries' attention each key gets.
//
//   mass[t] += share * sum over rows of softmax over t' (logits of the row)[t]
//
// or the maximum over rows in place of the sum. Every softmax-domain selector uses it: they
// differ in which queries are rows and in what stands for a key. The same tiles as attention, without
// its values: a block's weights are taken against the block's own maximum and kept, 4 bytes per row and
// key, until the row's sum is known; rows enter in groups of panels whose weights fit
// tuning::mass_weight_bytes. 2 * rows * keys * dim FLOPs and one read of the keys per group. A key with a
// NaN or an infinity has no weight and ends with mass NaN; a query with one is the caller's to leave out.
//
// A row's sum is that of its blocks' sums, e^(block's maximum - row's maximum) times each, in fixed point
// of 31 fractional bits: exact whatever the order.
#pragma once

#include <quoka/base/buffer.hpp>
#include <quoka/kernels/key_blocks.hpp>
#include <quoka/rows/rows.hpp>
#include <quoka/select/options.hpp>
#include <quoka/select/steps/mass_scratch.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// How many panels at a time.
inline Index panels_at_once(Index rows, Index keys) {
  const Index panel = std::max<Index>(1, keys) * tuning::panel_rows * Index{sizeof(float)};
  return std::min({ceil_div(rows, tuning::panel_rows), tuning::max_panels_per_task,
                   std::max<Index>(1, tuning::mass_weight_bytes / panel)});
}

// The source of the keys. A block's key_factors are NaN for a key that is not finite; keys_fit: none is.
class MassKeys : public KeyBlocks {
 public:
  explicit MassKeys(Index count) : KeyBlocks(count, tuning::block_keys) {}

  // Where blocks are packed.
  void pack_into(float* memory) { block_.keys = reinterpret_cast<std::byte*>(memory); }
  // Products of the first `count` keys of a block with a panel of queries; top as block_logits() has it.
  virtual void multiply(const PackedBlock& block, const float* queries, Index count, float* x,
                        PanelPackets& top) const = 0;

 protected:
  ~MassKeys() = default;
  // For the block that was packed: are all keys finite, and if not, is_finite(i) for each.
  template <class IsFinite>
  void note_finite(Index count, bool all, IsFinite&& is_finite) {
    block_.keys_fit = all;
    for (Index i = 0; !all && i < count; ++i)
      block_.key_factors[i] = is_finite(i) ? 1.0f : std::numeric_limits<float>::quiet_NaN();
  }

  PackedBlock block_;
};

// Keys as rows of memory, packed for float.
class RowKeys final : public MassKeys {
 public:
  RowKeys(const HeadRows& rows, Index count) : MassKeys(count), rows_(rows) {
    found_.format = rows.format, found_.shape = rows.shape;
  }

  const PackedBlock& pack(const KeyRange& keys) override {
    if (found_at_ != keys.begin) find(keys);
    float* const tiles = reinterpret_cast<float*>(block_.keys);
    pack_keys(*rows_.format, found_.at, keys.count(), rows_.shape, tiles);
    const auto finite = [&](Index first, Index last) {
      return packed_finite(tiles, rows_.shape.dim, first, last);
    };
    note_finite(keys.count(), finite(0, keys.count()), [&](Index i) { return finite(i, i + 1); });
    return block_;
  }
  BlockPrefetch prefetch(const KeyRange& keys, Index panels) override {
    find(keys);
    return {found_.prefetch(), {}, panels};
  }
  void multiply(const PackedBlock& block, const float* queries, Index count, float* x,
                PanelPackets& top) const override {
    block_logits(reinterpret_cast<const float*>(block.keys), queries, rows_.shape.dim, count, x,
                 top);
  }

 private:
  void find(const KeyRange& keys) {
    rows_.find(keys.begin, keys.count(), found_.at);
    found_.count = keys.count(), found_at_ = keys.begin;
  }
  // Products of keys [first, last) in tiles, which they fill up to `dim` channels: [slab][tile_rows][slab_channels].
  static bool packed_finite(const float* tiles, Index dim, Index first, Index last) {
    simd::Packet poison = simd::zero();  // x * 0 is NaN for NaN and infinity
    float tail = 0.0f;
    const Index tile_size = key_tile_size(dim);
    for (Index i = first; i < last; ++i) {
      const float* x = tiles + i / tuning::tile_rows * tile_size + i % tuning::tile_rows * slab;
      for (Index c = 0; c < dim; c += slab, x += Index{slab} * tuning::tile_rows) {
        const Index n = std::min<Index>(slab, dim - c);
        Index j = 0;
        for (; j + simd::lanes <= n; j += simd::lanes)
          poison = simd::fma(simd::load(x + j), simd::zero(), poison);
        for (; j < n; ++j) tail += x[j] * 0.0f;
      }
    }
    return simd::reduce_add(poison) + tail == 0.0f;
  }

  HeadRows rows_;
  BlockRows found_;
  Index found_at_ = -1;  // the first key of the rows that were found last
};

// Statistics of one head's rows, in panels. A block's maximum and sum: [panel][block][panel_rows].
struct MassRows {
  float *block_max, *block_sum;
  float* row_max;         // [panel][panel_rows]; infinite: of a row that is NaN
  std::int64_t* row_sum;  // the same, in units of 2^-31
};

// Rows [0, rows) of queries, [rows, dim] contiguous floats that hold the logit scale. ends, if given, is one past the
// last key that each row sees. rule: of the logits, its scale left out. mass [keys].
class MassAccumulator {
 public:
  MassAccumulator(const float* queries, Index rows, Index dim, MassKeys& keys, Index key_count,
                  MassScratch& scratch, const Index* ends = nullptr, const LogitRule& rule = {})
      : queries_(queries),
        rows_(rows),
        dim_(dim),
        keys_(keys),
        key_count_(key_count),
        s_(scratch),
        ends_(ends),
        rule_(rule) {}

  void add_to(float* mass, float share, Aggregation over) {
    stats_ = {s_.block_max.data(), s_.block_sum.data(), s_.row_max.data(), s_.row_sum.data()};
    for_groups([&] {
      find_weights(mass);
      find_maxima();
      find_sums();
      add(mass, share, over);
    });
  }

 private:
  static constexpr Index width = tuning::panel_rows;

  Index blocks() const { return ceil_div(key_count_, tuning::block_keys); }
  Index panel_count(Index p) const { return std::min(width, rows_ - first_row_ - p * width); }
  float* queries(Index p) const { return s_.queries.data() + p * dim_ * width; }
  float* weights(Index p, Index key) const {
    return s_.weights.data() + (p * key_count_ + key) * width;
  }
  Index at(Index p, Index block) const { return (p * blocks() + block) * width; }

  template <class F>
  void for_groups(F&& f) {
    const Index at_once = panels_at_once(rows_, key_count_);
    for (Index panel = 0; panel * width < rows_; panel += at_once) {
      first_row_ = panel * width;
      panels_ = std::min(at_once, ceil_div(rows_ - first_row_, width));
      f();
    }
  }

  // All weights of the group's rows, each against its row's maximum in the block.
  void find_weights(float* mass) {
    for (Index p = 0; p < panels_; ++p) {
      const float* rows[width];
      for (Index i = 0; i < panel_count(p); ++i)
        rows[i] = queries_ + (first_row_ + p * width + i) * dim_;
      pack_queries(rows, panel_count(p), dim_, 1.0f, tuning::panel_rows, queries(p));
    }
    keys_.pack_into(s_.tiles.data());
    BlockPrefetch prefetch;
    keys_.walk({0, key_count_}, panels_, prefetch,
               [&](Index p, const KeyRange& keys, const PackedBlock& block) {
                 find_weights(p, keys, block, mass);
               });
  }

  void find_weights(Index p, const KeyRange& keys, const PackedBlock& block, float* mass) {
    PanelMask mask;
    const bool masked =
        ends_ != nullptr && mask_after(ends_ + first_row_ + p * width, panel_count(p), keys, mask);
    PanelPackets top;
    keys_.multiply(block, queries(p), keys.count(), logits_, top);
    const VisibleKeys visible{keys.count(), masked ? &mask : nullptr, nullptr, rule_};
    visible.finish_logits(logits_, top);
    if (!block.keys_fit) leave_out(keys, block, mass, top);
    PanelState state;
    for (int j = 0; j < tuning::tile_packets; ++j) state[j] = {top[j], simd::zero()};
    block_weights(logits_, keys.count(), state, weights(p, keys.begin));
    const Index stats = at(p, keys.begin / tuning::block_keys);
    for (int j = 0; j < tuning::tile_packets; ++j) {
      simd::store(stats_.block_max + stats + j * simd::lanes, top[j]);
      simd::store(stats_.block_sum + stats + j * simd::lanes, state[j].sum);
    }
  }

  // Keys that are not finite.
  void leave_out(const KeyRange& keys, const PackedBlock& block, float* mass, PanelPackets& top) {
    for (Index i = 0; i < keys.count(); ++i) {
      if (block.key_factors[i] == block.key_factors[i]) continue;
      std::fill_n(logits_ + i * width, width, -simd::infinity);
      mass[keys.begin + i] = std::numeric_limits<float>::quiet_NaN();
    }
    block_maximum(logits_, keys.count(), top);
  }

  // For the blocks there are. A sum that is not finite makes its row's maximum infinite.
  void find_maxima() const {
    for (Index p = 0; p < panels_; ++p) {
      for (Index lane = 0; lane < width; lane += simd::lanes) {
        simd::Packet most = simd::broadcast(-simd::infinity), poison = simd::zero();
        for (Index block = 0; block < blocks(); ++block) {
          most = simd::max(most, simd::load(stats_.block_max + at(p, block) + lane));
          poison =
              simd::fma(simd::load(stats_.block_sum + at(p, block) + lane), simd::zero(), poison);
        }
        float* const to = stats_.row_max + p * width + lane;
        alignas(64) float not_finite[simd::lanes];
        simd::store_unaligned(to, most);
        simd::store(not_finite, poison);
        for (Index i = 0; i < simd::lanes; ++i)
          if (not_finite[i] != 0.0f) to[i] = simd::infinity;
      }
    }
  }

  // e^(a block's maximum - its row's): 0 for a block without a weight.
  simd::Packet factor(Index p, Index block, Index lane) const {
    const PacketState row{simd::load_unaligned(stats_.row_max + p * width + lane), simd::zero()};
    return simd::exp(
        simd::sub(simd::load(stats_.block_max + at(p, block) + lane), row.reference()));
  }

  void find_sums() const {
    constexpr float unit = 0x1p31f;
    for (Index p = 0; p < panels_; ++p) {
      std::int64_t* const sums = stats_.row_sum + p * width;
      std::fill_n(sums, width, std::int64_t{0});
      for (Index block = 0; block < blocks(); ++block) {
        for (Index lane = 0; lane < width; lane += simd::lanes) {
          alignas(64) float part[simd::lanes];
          const simd::Packet sum = simd::load(stats_.block_sum + at(p, block) + lane);
          simd::store(part,
                      simd::mul(simd::mul(sum, factor(p, block, lane)), simd::broadcast(unit)));
          for (Index i = 0; i < simd::lanes; ++i)
            if (part[i] < 0x1p62f) sums[lane + i] += std::llrint(part[i]);  // no NaN
        }
      }
    }
  }

  // share / sum: 0 for an empty row and a lane without one, NaN for a row that met one.
  void find_scales(Index p, float share, float* scales) const {
    for (Index i = 0; i < width; ++i) {
      const float most = stats_.row_max[p * width + i];
      const auto sum = static_cast<double>(stats_.row_sum[p * width + i]) * 0x1p-31;
      scales[i] = i >= panel_count(p)        ? 0.0f
                  : !(most < simd::infinity) ? std::numeric_limits<float>::quiet_NaN()
                  : sum > 0.0                ? static_cast<float>(static_cast<double>(share) / sum)
                                             : 0.0f;
    }
  }

  // Blocks' maxima become their factors: their rows' maxima and sums are known.
  void add(float* mass, float share, Aggregation over) const {
    for (Index p = 0; p < panels_; ++p) {
      alignas(64) float scales[tuning::panel_rows];
      find_scales(p, share, scales);
      for (Index block = 0; block < blocks(); ++block)
        for (Index lane = 0; lane < width; lane += simd::lanes)
          simd::store(stats_.block_max + at(p, block) + lane,
                      simd::mul(simd::load(scales + lane), factor(p, block, lane)));
    }
    for (Index block = 0, key = 0; key < key_count_; ++block, key += tuning::block_keys) {
      const Index end = std::min<Index>(key + tuning::block_keys, key_count_);
      for (Index t = key; t < end; ++t) {
        simd::Packet sum = simd::zero();
        for (Index p = 0; p < panels_; ++p) {
          simd::unroll<tuning::tile_packets>([&](auto j) QUOKA_INLINE_LAMBDA {
            const simd::Packet w = simd::load(weights(p, t) + j * simd::lanes),
                               f = simd::load(stats_.block_max + at(p, block) + j * simd::lanes);
            sum = over != Aggregation::max ? simd::fma(w, f, sum) : simd::max(sum, simd::mul(w, f));
          });
        }
        if (over != Aggregation::max)
          mass[t] += simd::reduce_add(sum);
        else
          mass[t] = std::max(mass[t], simd::reduce_max(sum));
      }
    }
  }

  const float* queries_;
  Index rows_, dim_;
  MassKeys& keys_;
  Index key_count_;
  MassScratch& s_;
  const Index* ends_;
  LogitRule rule_;
  MassRows stats_{};
  Index first_row_ = 0, panels_ = 0;
  alignas(
      64) float logits_[round_up(tuning::most_block_keys, tuning::tile_rows) * tuning::panel_rows];
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
