// Exact softmax mass: how much of some queries' attention each key gets.
//
//   mass[t] += share * sum over rows of softmax over t' (logits of the row)[t]
//
// or the maximum over rows in place of the sum. What every softmax-domain selector is made of: they
// differ in which queries are rows and in what stands for a key. The same tiles and the same online
// softmax as attention, without its values: a block's weights are taken against the running maximum
// and kept, 4 bytes per row and key, until the row's sum is known; rows enter in groups of panels
// whose weights fit tuning::mass_weight_bytes. 2 * rows * keys * dim FLOPs and one read of the keys
// per group. A key with a NaN or an infinity has no weight and ends with mass NaN; a query with one
// is the caller's to leave out.
#pragma once

#include <quoka/core/buffer.hpp>
#include <quoka/core/panel_kernels.hpp>

#include <algorithm>
#include <limits>

namespace quoka::inline QUOKA_ABI {
namespace detail {

enum class MassOver { sum, max };  // over the rows

// Scratch of one worker.
struct MassScratch {
  Buffer<float> rows;     // [rows][dim], what the queries become before they are transposed
  Buffer<float> tiles;    // one packed block of keys
  Buffer<float> queries;  // a group of panels, transposed
  Buffer<float> weights;  // [panel of the group][key][lane]
  Buffer<float>
      references;  // [panel of the group][block][lane]: what the weights are taken against
  Buffer<PacketState> states;

  // How many panels at a time.
  static Index panels_at_once(Index rows, Index keys) {
    const Index panel = std::max<Index>(1, keys) * tuning::panel_rows * Index{sizeof(float)};
    return std::min({ceil_div(rows, tuning::panel_rows), tuning::max_panels_per_task,
                     std::max<Index>(1, tuning::mass_weight_bytes / panel)});
  }
  void reserve(Index row_count, Index keys, Index dim) {
    // A shorter cache may take more panels at once: whichever needs more.
    const Index panels =
        std::min(ceil_div(row_count, tuning::panel_rows), tuning::max_panels_per_task);
    const Index blocks = ceil_div(keys, tuning::block_keys), panel = keys * tuning::panel_rows;
    rows.reserve(row_count * dim);
    tiles.reserve(ceil_div(tuning::block_keys, tuning::tile_rows) * key_tile_size(dim));
    queries.reserve(panels * dim * tuning::panel_rows);
    const Index most = tuning::mass_weight_bytes / Index{sizeof(float)};
    weights.reserve_amortised(std::max(panel, std::min(panels * panel, most)));
    references.reserve_amortised(panels * blocks * tuning::panel_rows);
    states.reserve(panels * tuning::tile_packets);
  }
  Index bytes() const {
    return rows.bytes() + tiles.bytes() + queries.bytes() + weights.bytes() + references.bytes() +
           states.bytes();
  }
};

// Keys as rows of memory: row_of(i) points at the dim channels of key i.
template <class T, class RowOf>
class RowKeys {
 public:
  RowKeys(RowOf row_of, Index keys, Index dim) : row_of_(row_of), keys_(keys), dim_(dim) {}

  // Keys [first, first + count) into tiles; false if one of them is not finite.
  bool pack(Index first, Index count, float* tiles) {
    const T* rows[tuning::block_keys];
    for (Index i = 0; i < count; ++i) rows[i] = row_of_(first + i);
    pack_keys(rows, count, dim_, tiles);
    next_count_ = std::clamp<Index>(keys_ - first - count, 0, tuning::block_keys);
    for (Index i = 0; i < next_count_; ++i) next_[i] = row_of_(first + count + i);
    prefetch_ = RowPrefetch<T>(next_, next_count_, dim_);
    bool finite = true;
    for (Index i = 0; i < count; ++i) finite = is_finite(rows[i]) && finite;
    return finite;
  }
  // Asks for a part of the next block.
  void prefetch(Index parts) { prefetch_.next(ceil_div(prefetch_.lines(), parts)); }
  bool finite(Index i) const { return is_finite(row_of_(i)); }
  void logits(const float* tiles, const float* panel, Index count, float* x, PanelPackets& top) {
    block_logits(tiles, panel, dim_, count, x, top);
  }

 private:
  bool is_finite(const T* row) const {
    simd::Packet poison = simd::zero();  // x * 0 is NaN for NaN and infinity
    float tail = 0.0f;
    Index c = 0;
    for (; c + simd::lanes <= dim_; c += simd::lanes)
      poison = simd::fma(simd::load_as_float(row + c), simd::zero(), poison);
    for (; c < dim_; ++c) tail += static_cast<float>(row[c]) * 0.0f;
    return simd::reduce_add(poison) + tail == 0.0f;
  }

  RowOf row_of_;
  Index keys_, dim_, next_count_ = 0;
  const T* next_[tuning::block_keys];
  RowPrefetch<T> prefetch_;
};

// Rows [0, rows) of queries, [rows, dim] contiguous floats that hold the logit scale and log2(e).
// ends, if given, is one past the last key that each row sees. mass [keys].
template <class Keys>
class MassAccumulator {
 public:
  MassAccumulator(const float* queries, Index rows, Index dim, Keys& keys, Index key_count,
                  MassScratch& scratch, const Index* ends = nullptr)
      : queries_(queries),
        rows_(rows),
        dim_(dim),
        keys_(keys),
        key_count_(key_count),
        s_(scratch),
        ends_(ends) {}

  void add_to(float* mass, float share, MassOver over) {
    mass_ = mass;
    const Index at_once = MassScratch::panels_at_once(rows_, key_count_);
    for (Index row = 0; row < rows_; row += at_once * tuning::panel_rows) {
      const Index left = ceil_div(rows_ - row, tuning::panel_rows);
      first_row_ = row;
      panels_ = std::min(at_once, left);
      weigh();
      finish(share);
      add(over);
    }
  }

 private:
  static constexpr Index width = tuning::panel_rows;

  Index blocks() const { return ceil_div(key_count_, tuning::block_keys); }
  Index panel_count(Index p) const { return std::min(width, rows_ - first_row_ - p * width); }
  float* queries(Index p) const { return s_.queries.data() + p * dim_ * width; }
  float* weights(Index p, Index key) const {
    return s_.weights.data() + (p * key_count_ + key) * width;
  }
  float* reference(Index p, Index block) const {
    return s_.references.data() + (p * blocks() + block) * width;
  }
  PanelState& state(Index p) const {
    return *reinterpret_cast<PanelState*>(s_.states.data() + p * tuning::tile_packets);
  }

  // All weights of the group's rows, each against its row's maximum at the time.
  void weigh() {
    for (Index p = 0; p < panels_; ++p) {
      const float* rows[width];
      for (Index i = 0; i < panel_count(p); ++i)
        rows[i] = queries_ + (first_row_ + p * width + i) * dim_;
      pack_queries<float, tuning::tile_packets>(rows, panel_count(p), dim_, 1.0f, queries(p));
      for (PacketState& lane : state(p)) lane = PacketState::identity();
    }
    for (Index block = 0, key = 0; key < key_count_; ++block, key += tuning::block_keys) {
      const Index count = std::min<Index>(tuning::block_keys, key_count_ - key);
      const bool finite = keys_.pack(key, count, s_.tiles.data());
      for (Index p = 0; p < panels_; ++p) {
        keys_.prefetch(panels_);
        weigh_block(p, block, key, count, finite);
      }
    }
  }

  void weigh_block(Index p, Index block, Index key, Index count, bool finite) {
    float* x = weights(p, key);
    PanelPackets top;
    for (auto& lane : top) lane = simd::broadcast(-simd::infinity);
    if (count % tuning::tile_rows == 0) {
      keys_.logits(s_.tiles.data(), queries(p), count, x, top);
    } else {  // tiles are written whole
      keys_.logits(s_.tiles.data(), queries(p), count, tail_, top);
      std::copy_n(tail_, count * width, x);
    }
    const bool masked = ends_ != nullptr && hide_unseen(p, key, count, x);
    if (!finite)
      for (Index i = 0; i < count; ++i)
        if (!keys_.finite(key + i)) {
          std::fill_n(x + i * width, width, -simd::infinity);
          mass_[key + i] = std::numeric_limits<float>::quiet_NaN();
        }
    if (masked || !finite || count % tuning::tile_rows != 0) block_maximum(x, count, top);
    for (int j = 0; j < tuning::tile_packets; ++j) state(p)[j].raise(top[j]);
    block_weights(x, count, state(p));
    for (int j = 0; j < tuning::tile_packets; ++j)
      simd::store(reference(p, block) + j * simd::lanes, state(p)[j].reference());
  }

  bool hide_unseen(Index p, Index key, Index count, float* x) const {
    PanelMask mask;
    bool any = false;
    for (Index i = 0; i < width; ++i) {
      const Index end = ends_[first_row_ + p * width + std::min(i, panel_count(p) - 1)];
      mask.first[i] = 0.0f;
      mask.end[i] = static_cast<float>(std::clamp<Index>(end - key, 0, count));
      any = any || end < key + count;
    }
    if (any) mask_logits(x, count, mask);
    return any;
  }

  // References become factors: share * 2^(reference - maximum) / sum; 0 for lanes without a row.
  void finish(float share) {
    for (Index p = 0; p < panels_; ++p) {
      for (int j = 0; j < tuning::tile_packets; ++j) {
        alignas(64) float of_lane[simd::lanes];
        for (Index i = 0; i < simd::lanes; ++i)
          of_lane[i] = j * simd::lanes + i < panel_count(p) ? share : 0.0f;
        const PacketState& lane = state(p)[j];
        const simd::Packet scale = simd::mul(simd::load(of_lane), lane.inverse_sum());
        for (Index block = 0; block < blocks(); ++block) {
          float* factor = reference(p, block) + j * simd::lanes;
          const simd::Packet rise = simd::sub(simd::load(factor), lane.reference());
          simd::store(factor, simd::mul(scale, simd::exp2(rise)));
        }
      }
    }
  }

  void add(MassOver over) const {
    for (Index block = 0, key = 0; key < key_count_; ++block, key += tuning::block_keys) {
      const Index end = std::min<Index>(key + tuning::block_keys, key_count_);
      for (Index t = key; t < end; ++t) {
        simd::Packet sum = simd::zero();
        for (Index p = 0; p < panels_; ++p) {
          simd::unroll<tuning::tile_packets>([&](auto j) QUOKA_INLINE_LAMBDA {
            const simd::Packet w = simd::load(weights(p, t) + j * simd::lanes),
                               f = simd::load(reference(p, block) + j * simd::lanes);
            sum = over == MassOver::sum ? simd::fma(w, f, sum) : simd::max(sum, simd::mul(w, f));
          });
        }
        if (over == MassOver::sum)
          mass_[t] += simd::reduce_add(sum);
        else
          mass_[t] = std::max(mass_[t], simd::reduce_max(sum));
      }
    }
  }

  const float* queries_;
  Index rows_, dim_;
  Keys& keys_;
  Index key_count_;
  MassScratch& s_;
  const Index* ends_;
  float* mass_ = nullptr;
  Index first_row_ = 0, panels_ = 0;
  alignas(64) float tail_[tuning::block_keys * tuning::panel_rows];
};

}  // namespace detail
}  // namespace quoka::inline QUOKA_ABI
