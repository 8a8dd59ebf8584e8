#include "support/attention_case.hpp"

#include <quoka/attention/merge.hpp>
#include <quoka/kernels/byte_formats.hpp>

#include "support/float_bounds.hpp"

#include <sstream>

namespace quoka_test {

namespace tuning = quoka::tuning;
using quoka::Arithmetic;
using quoka::Format;
using quoka::detail::kernel_sizes;  // of the instructions in use

// ---- what is drawn --------------------------------------------------------------------------------

// Of a list: around a block, and around as many parts as there may be.
Index count_of_list(Random& random, Index kv_len) {
  const Index block = kernel_sizes().block_keys, near = random.below(3) - 1,
              any = random.below(kv_len + 1), other = random.below(kv_len + 1);
  const Index count = random.one_of(Index{0}, 1, other, any, block + near, kv_len - 1, kv_len,
                                    tuning::max_parts * tuning::part_blocks * block + near);
  return std::clamp<Index>(count, 0, kv_len);
}

struct AttentionDraw {
  AttentionCase& c;
  Random &random, &data;  // of choices, and of the many numbers
  bool long_lists = false;

  bool seldom(Index n) { return random.seldom(n); }
  auto one_of(auto... x) { return random.one_of(x...); }

  Index around(Index n) { return n + random.below(3) - 1; }

  Index length() {
    switch (random.below(8)) {
      case 0:
        return 0;
      case 1:
      case 2:
        return 1 + random.below(40);
      case 3:  // around what is handled together
        return around(one_of(
            kernel_sizes().tile_rows, kernel_sizes().block_keys, 2 * kernel_sizes().block_keys, 128,
            256, tuning::token_together_keys, tuning::token_block_keys,
            tuning::part_blocks * kernel_sizes().block_keys, tuning::long_part_keys,
            tuning::max_parts * tuning::part_blocks * kernel_sizes().block_keys));
      case 4:
        return random.below(5000);
      default:
        return 40 + random.below(460);
    }
  }

  void sizes() {
    Shape& s = c.shape_;
    // Draws of their own: compilers evaluate arguments in any order.
    const Index many = 100 + random.below(200), more = 10 + random.below(80),
                some = 10 + random.below(80), few = 1 + random.below(9);
    s.q_len = one_of(Index{1}, 1, 1, 2, 3, few, some, more, many);
    s.kv_len = length();
    s.batch = seldom(5) ? 2 + random.below(2) : 1;
    s.kv_heads = 1 + random.below(3);
    Index group = 1 + random.below(8);
    if (s.q_len == 1 && seldom(4)) group = one_of(kernel_sizes().token_rows, 9, 16, 17, 33);
    if (s.q_len == 1 && seldom(4)) s.kv_heads = 6;
    const auto dim = [&] {
      return one_of(Index{1}, 3, 8, 15, 16, 17, 19, 24, 32, 37, 40, 56, 64, 64, 80, 96, 100, 112,
                    128, 130, 192, 256, 576);
    };
    s.head_dim = dim(), s.v_dim = seldom(2) ? dim() : s.head_dim;
    c.has_chunk_ = !seldom(5);
    // An oracle in plain loops: some milliseconds a case.
    const auto pairs = [&] { return s.batch * s.kv_heads * group * s.q_len * (c.keys() + 1); };
    if (seldom(8)) {  // rows around a panel, around what is cut over its keys, around a task
      const Index panels = one_of(Index{1}, 2, tuning::min_panels_per_task,
                                  tuning::min_panels_per_task, kernel_sizes().panels_per_task);
      s.q_len = around(panels * kernel_sizes().panel_rows);
      if (panels == kernel_sizes().panels_per_task) c.has_chunk_ = false;  // their own keys
      s.kv_heads = group = 1, s.head_dim = s.v_dim = 1 + random.below(8);
      s.batch = seldom(2) ? 2 : 1;
      if (seldom(2)) {
        s.kv_len = (1 + random.below(2)) * tuning::long_part_keys;
        s.kv_len += random.below(300);
      }
    }
    // Lists of two heads, of which one may take the most parts and the other few.
    long_lists = seldom(24);
    if (long_lists) {
      s.q_len = one_of(Index{1}, 1, 3, 3, 3, 24);  // of 40 an oracle would take too long, see below
      s.kv_len = 2 * tuning::max_parts * tuning::part_blocks * kernel_sizes().block_keys;
      s.batch = group = 1, s.kv_heads = 2, s.head_dim = s.v_dim = 1 + random.below(6);
    }
    // So many heads that one query fills 16 panels, and ends in one where the next query begins.
    if (seldom(60)) {
      s.batch = s.kv_heads = 1, group = 16 * kernel_sizes().panel_rows + 2;
      s.q_len = 3, s.kv_len = random.below(100), s.head_dim = s.v_dim = 1 + random.below(40);
    }
    while (pairs() > 300'000 && group > 1) group /= 2;
    if (pairs() > 300'000 && !long_lists) s.kv_heads = 1;
    if (pairs() > 700'000) s.batch = 1;
    while (pairs() > 700'000 && s.kv_len > 0) s.kv_len /= 2;
    while (pairs() * (s.head_dim + s.v_dim) > 10'000'000)
      s.head_dim = (s.head_dim + 1) / 2, s.v_dim = (s.v_dim + 1) / 2;
    s.q_heads = s.kv_heads * group;
  }

  const Format& alone() {  // one whose rows need nothing beside them
    return *one_of(&quoka::float_format(), &quoka::float_format(), &quoka::float_format(),
                   &quoka::format_of<Eigen::half>(), &quoka::format_of<Eigen::bfloat16>(),
                   &quoka::q8_0_format(), &quoka::u8_format());
  }
  const Format& any() {
    switch (random.below(4)) {
      case 0:
        return *one_of(&quoka::channel_major_format<float>(),
                       &quoka::channel_major_format<Eigen::half>(),
                       &quoka::channel_major_format<Eigen::bfloat16>(), &quoka::i8_format(),
                       &quoka::i8_channel_format(), &quoka::e4m3_format());
      case 1:
        return *one_of(&quoka::q8_0_format(), &quoka::u8_format());
      case 2:
        return *one_of(&quoka::format_of<Eigen::half>(), &quoka::format_of<Eigen::bfloat16>());
      default:
        return quoka::float_format();
    }
  }

  void tensors() {
    const Shape& s = c.shape_;
    const Format& k = any();
    const Format& v = seldom(2) ? any() : k;
    const Format& own_k = seldom(3) ? any() : k;
    const Format& own_v = seldom(3) ? any() : v;
    const Index chunk = c.has_chunk_ ? s.q_len : 0;
    c.in_one_cache_ = chunk > 0 && s.kv_len > 0 && seldom(4);
    c.absent_when_empty_ = seldom(2);
    const double loud = one_of(1.0, 1.0, 1.0, 0.0, 1e-20, 3.0);
    const Index past = s.kv_len + (c.in_one_cache_ ? chunk : 0),
                apart = past > s.kv_len ? 0 : chunk;
    const Adverse adverse = static_cast<Adverse>(data.below(16));
    c.adverse_ = adverse_name(adverse);
    const auto tensor = [&](Index heads, Index len, Index dim, double scale) {
      return data.tensor<float>(s.batch, heads, len, dim, scale);
    };
    const auto keys = [&](Index len) {
      Tensor4<float> x = tensor(s.kv_heads, len, s.head_dim, 1.0);
      spoil(adverse, x, false);
      return x;
    };
    const auto values = [&](Index len, double scale) {
      Tensor4<float> x = tensor(s.kv_heads, len, s.v_dim, scale);
      spoil(adverse, x, true);
      return x;
    };
    c.stored_[0] = StoredRows(tensor(s.q_heads, s.q_len, s.head_dim, loud), alone());
    c.stored_[1] = StoredRows(keys(past), k);
    c.stored_[2] = StoredRows(values(past, one_of(1.0, 1.0, 1e-3)), v);
    c.stored_[3] = StoredRows(keys(apart), own_k);
    c.stored_[4] = StoredRows(values(apart, 1.0), own_v);
  }

  // Numbers as real models have them, and others that are hard for codes and for running sums.
  enum class Adverse { outliers, offset, sink, constant, rising, denormals, steep, none };
  static const char* adverse_name(Adverse x) {
    constexpr const char* names[] = {"outliers", "offset",    "sink", "constant",
                                     "rising",   "denormals", "steep"};
    return x < Adverse::none ? names[static_cast<int>(x)] : "";
  }
  void spoil(Adverse adverse, Tensor4<float>& x, bool values) {
    const Index len = x.dimension(2), dim = x.dimension(3);
    for (Index i = 0; i < x.size(); ++i) {
      const Index channel = i % dim, t = i / dim % len;
      float& at = x.data()[i];
      switch (adverse) {
        case Adverse::outliers:  // a channel of all keys, a row of values
          if (values ? t == len / 2 : channel == dim / 2) at = 50.0f + at;
          break;
        case Adverse::offset:
          at += 10.0f;
          break;
        case Adverse::sink:
          if (t == 0) at *= values ? 0.01f : 4.0f;
          break;
        case Adverse::constant:
          at = 3.0f;
          break;
        case Adverse::rising:  // each maximum above the last
          if (!values) at = 0.02f * static_cast<float>(t);
          break;
        case Adverse::denormals:
          if (i % 3 == 0) at = 1e-40f;
          break;
        case Adverse::steep:
          if (!values) at *= 8.0f;
          break;
        default:
          break;
      }
    }
  }

  void options() {
    const Shape& s = c.shape_;
    // All members: one that is not drawn does not compile.
    auto& [scale, softcap, sinks, sliding_window, arithmetic, q_offset, causal, mask, mask_factors,
           alibi_slopes, lists] = c.options_;
    arithmetic = one_of(Arithmetic::automatic, Arithmetic::float_, Arithmetic::float_,
                        Arithmetic::bf16, Arithmetic::int8);
    if (seldom(3)) scale = one_of(0.088f, 0.5f, -0.25f, 1e-20f, 0.0f);
    if (seldom(4)) {
      softcap = one_of(0.5f, 5.0f, 30.0f, 50.0f);
      if (seldom(3)) scale = one_of(2.0f, 100.0f, 1e4f);
    }
    if (seldom(3)) {
      const Index any = 1 + random.below(c.keys() + 9), other = 1 + random.below(c.keys() + 9),
                  few = 1 + random.below(40);
      sliding_window = one_of(Index{1}, 2, few, s.q_len, s.kv_len, other, any,
                              std::numeric_limits<Index>::max());
    }
    sliding_window = std::max<Index>(sliding_window, 0);
    causal = !seldom(4);
    if (seldom(4)) c.first_position_ = one_of(Index{1}, 100, 100'000, random.below(1000));
    const Index end = c.first_position_ + s.kv_len;
    if ((!c.has_chunk_ && (causal || seldom(2))) || seldom(5))
      q_offset = end + one_of(Index{0}, 0, 1, random.below(300));
    for (Index h = 0; h < s.q_heads; ++h) {
      c.sinks_.push_back(data.one_of(-infinity, 0.0f, 8.0f, static_cast<float>(3 * data.normal())));
      c.slopes_.push_back(data.one_of(0.0f, 0.25f, static_cast<float>(0.1 * data.normal())));
      c.factors_.push_back(data.one_of(0.0f, 1.0f, -1.0f, static_cast<float>(data.normal())));
    }
    if (!seldom(3)) c.sinks_.clear();
    if (!seldom(4)) c.slopes_.clear();
    if (!seldom(4)) c.factors_.clear();
  }

  void lists() {
    const Shape& s = c.shape_;
    if (s.kv_len == 0 || !(long_lists || seldom(3))) return;
    const bool alike = seldom(2);
    const Index heads = seldom(3) ? s.q_heads : s.kv_heads;
    const Index count = count_of_list(random, s.kv_len);
    for (Index b = 0; b < s.batch; ++b) {
      c.lists_.emplace_back();
      for (Index head = 0; head < heads; ++head)
        c.lists_.back().push_back(
            data.some_of(s.kv_len, alike ? count : count_of_list(random, s.kv_len)));
    }
    c.keep_ = to_selection(c.lists_, s.kv_len);
  }

  // Keys of each query: lists of their own, or much like those of the query before.
  void own_lists() {
    const Shape& s = c.shape_;
    const Index keys = c.keys();
    if (c.has_selection() || !seldom(3)) return;
    const Index batch = seldom(2) ? s.batch : 1, heads = seldom(2) ? s.kv_heads : 1;
    if (batch * heads * s.q_len * keys > 2'000'000) return;
    const Index block = one_of(Index{1}, 1, 1, 1, 2, 7, 16, 64, 128);
    StoredLists lists(batch, heads, s.q_len, keys, block);
    const Index entries = (keys + block - 1) / block;
    const Index usual = std::max<Index>(
        1, one_of(Index{1}, random.below(entries + 1), entries / 4, entries / 16, entries));
    const Index news = one_of(Index{0}, 1, usual / 8, usual, usual, usual);  // of a query
    const bool sorted = !seldom(3), repeats = seldom(4);
    std::vector<Index> list;
    for (Index b = 0; b < batch; ++b)
      for (Index head = 0; head < heads; ++head)
        for (Index i = 0; i < s.q_len; ++i) {
          std::erase_if(list, [](Index x) { return x < 0; });
          const bool first = head + i == 0 || news >= usual;
          if (first) list.clear();
          for (Index n = first ? usual : news; n > 0; --n) {
            const Index at = first ? std::ssize(list) : data.below(std::ssize(list) + 1);
            const Index entry = entries > 0 ? data.below(entries) : -1;
            if (at == std::ssize(list)) list.push_back(entry);
            list[uz(at)] = entry;
          }
          if (first && usual == entries) {
            list.clear();
            for (Index entry = 0; entry < entries; ++entry) list.push_back(entry);
          }
          if (sorted) std::sort(list.begin(), list.end());
          if (sorted && !repeats) list.erase(std::unique(list.begin(), list.end()), list.end());
          if (repeats && !list.empty()) list.push_back(list[uz(data.below(std::ssize(list)))]);
          if (data.below(9) == 0) list.insert(list.begin() + data.below(std::ssize(list) + 1), -1);
          std::vector<Index> used = list;
          if (data.below(20) == 0)
            used.resize(std::min<std::size_t>(used.size(), uz(data.below(2))));
          lists.set(b, head, i, used);
        }
    lists.store(data);
    c.own_.emplace(std::move(lists));
  }

  void mask() {
    const Shape& s = c.shape_;
    const Index keys = c.keys();
    // The first sequence's chunk alone is hidden, so that it has fewer keys, blocks and parts than the next one; or the
    // mask is of holes in the past, and adds nothing.
    const bool own = c.has_chunk_ && s.batch > 1 && s.q_len > 1 && seldom(3);
    if (!own && !seldom(3)) return;
    const bool holes = !own && seldom(4);
    const Index batch = own || seldom(2) ? s.batch : 1, heads = !own && seldom(2) ? s.q_heads : 1;
    if (batch * heads * s.q_len * keys > 2'000'000) return;
    c.mask_ = Tensor4<float>(batch, heads, s.q_len, keys);
    const double hidden = own || holes ? 0.0 : one_of(0.0, 0.3, 0.3, 0.95),
                 biased = own || holes ? 0.0 : one_of(0.0, 0.01, 0.3, 0.9);
    c.mask_kind_ =
        one_of(StoredMask::Kind::single, StoredMask::Kind::single, StoredMask::Kind::half,
               StoredMask::Kind::bfloat16, StoredMask::Kind::bytes, StoredMask::Kind::bits);
    const bool only_hides =
        c.mask_kind_ == StoredMask::Kind::bytes || c.mask_kind_ == StoredMask::Kind::bits;
    const bool is_single = c.mask_kind_ == StoredMask::Kind::single;  // others would round them
    const float hides = one_of(-infinity, -infinity, -infinity, -65504.0f,
                               is_single ? quoka::Mask::hides_from : -infinity,
                               is_single ? std::numeric_limits<float>::lowest() : -infinity);
    for (Index i = 0; i < c.mask_.size(); ++i) {
      const double kind = data.uniform();
      float& x = c.mask_.data()[i];
      x = 0.0f;
      if (kind < hidden)
        x = hides;
      else if (kind < hidden + biased && !only_hides)
        x = static_cast<float>(data.below(33) - 16) / 8;  // exact in all kinds
    }
    // Rows that see nothing, and cells that nobody sees, here and there or side by side.
    const auto hide_row = [&](Index b, Index head, Index i) {
      for (Index t = 0; t < keys; ++t) c.mask_(b, head, i, t) = hides;
    };
    if (!own && !holes && seldom(3)) {
      const Index i = random.below(s.q_len), head = random.below(heads), b = random.below(batch);
      hide_row(b, head, i);
    }
    if (keys > 0 && (own || holes || seldom(2))) {
      const bool some = !own && seldom(2);
      for (Index b = 0; b < batch; ++b) {
        Index first = random.below(keys),
              end = std::min(first + random.below(keys - first + 1), holes ? s.kv_len : keys);
        if (own) first = s.kv_len, end = b == 0 ? keys : first;
        for (Index t = 0; t < keys; ++t)
          if (some ? data.below(3) == 0 && (!holes || t < s.kv_len) : first <= t && t < end)
            for (Index head = 0; head < heads; ++head)
              for (Index i = 0; i < s.q_len; ++i) c.mask_(b, head, i, t) = hides;
      }
    }
    c.stored_mask_.emplace(c.mask_, c.mask_kind_, random.below(4));
    c.as_lists_ = seldom(2);
  }

  // Logits of any size, by a scale, queries and keys of any that make it; infinities and NaN; options of any size.
  void go_to_the_ends_of_float() {
    const Shape& s = c.shape_;
    AttentionOptions& o = c.options_;
    const auto some = [&](auto... x) {
      const double all[] = {static_cast<double>(x)...};
      return all[data.below(std::ssize(all))];
    };
    const auto format_of = [&](int which) { return &c.stored_[which].rows().format(); };
    const auto is_wide = [&](int which) {
      const Format* const all[] = {&quoka::float_format(), &quoka::format_of<Eigen::bfloat16>(),
                                   &quoka::u8_format(), &quoka::channel_major_format<float>(),
                                   &quoka::channel_major_format<Eigen::bfloat16>()};
      return std::count(std::begin(all), std::end(all), format_of(which)) > 0;
    };
    const bool wide_keys = is_wide(1) && is_wide(3), wide_values = is_wide(2) && is_wide(4);
    const double size = some(0, 1e-44, 1e-30, 1, 8, 60, 300, 1e6, 1e20, 1e30, 2.3e38, 2.4e38,
                             3.39e38, 1e39),
                 scale = some(1, 0.125, -1, 1e30, 1e-30, 1e-38, 1e-41),
                 key_size = wide_keys ? some(1, 1e-30, 1e30, 1e-41) : some(1, 1e-3, 3e4),
                 value_size = some(1, 1, 1e4, 1e-4);
    o.scale = static_cast<float>(scale);
    const auto query_size =
        static_cast<float>(std::min(size / key_size / std::abs(double{*o.scale}), 3e38));
    const Index channel = data.below(s.head_dim);
    Tensor4<float> q(s.batch, s.q_heads, s.q_len, s.head_dim);
    q.setZero();
    for (Index row = 0; row < q.size() / s.head_dim; ++row)
      q.data()[row * s.head_dim + channel] =
          query_size * static_cast<float>(some(1, 1, -1, 0.5, 0));
    if (seldom(8)) q.data()[data.below(q.size())] = seldom(2) ? infinity : not_a_number;
    c.stored_[0] = StoredRows(q, quoka::float_format());
    for (const int which : {1, 3}) {
      Tensor4<float> k(c.held(which).dimensions()), v(c.held(which + 1).dimensions());
      k.setZero();
      for (Index row = 0; row < k.size() / s.head_dim; ++row) {
        const double normal = data.normal(), uniform = 1 - 2 * data.uniform();
        k.data()[row * s.head_dim + channel] =
            static_cast<float>(key_size * some(1, 1, -1, 0.5, 0, uniform, normal));
      }
      if (k.size() > 0 && wide_keys && seldom(8))
        k.data()[data.below(k.size())] =
            static_cast<float>(some(infinity, -infinity, not_a_number));
      for (Index n = 0; n < v.size(); ++n) {
        const double normal = value_size * data.normal();
        v.data()[n] = static_cast<float>(normal * (wide_values && data.below(20) == 0 ? 1e30 : 1));
      }
      c.stored_[which] = StoredRows(k, *format_of(which));
      c.stored_[which + 1] = StoredRows(v, *format_of(which + 1));
    }
    if (o.softcap != 0) o.softcap = static_cast<float>(some(1e-30, 1e-3, 1, 30, 1e4, 1e20, 1e30));
    const bool moderate = size < 1e20 || o.softcap > 0;
    for (float& x : c.sinks_)
      x = static_cast<float>(
          std::min(some(0, -5, 70, -1e30, 1e30, -3e38, 3.4e38, -infinity, size), 3.4e38));
    for (float& x : c.slopes_)
      x = static_cast<float>(moderate ? some(0, 0.25, 1e-40, 1e30, -0.5) : 0);
    for (float& x : c.factors_) x = static_cast<float>(some(0, 1, -1, 1e-40, moderate ? 1e5 : 1));
    using enum StoredMask::Kind;
    if (c.mask_kind_ < bytes && c.has_mask()) {
      // For each format: the smallest number that is a bias, and the largest one that hides.
      const double first_bias = c.mask_kind_ == single ? -59999
                                : c.mask_kind_ == half ? -59968
                                                       : -59904,
                   last_hidden = c.mask_kind_ == bfloat16 ? -60160 : -60000,
                   huge = moderate && c.mask_kind_ == single ? 1e30 : 1;
      // A few biases are infinite or NaN, at times with 0 for all others.
      const bool infinite = seldom(c.has_lists() ? 2 : 5), alone = infinite && seldom(2);
      const Index rare = one_of(1000, 30);
      for (Index i = 0; i < c.mask_.size(); ++i) {
        float& x = c.mask_.data()[i];
        const bool hides = x <= quoka::Mask::hides_from;
        if (!hides && alone)
          x = 0.0f;
        else if (data.below(3) == 0)
          x = static_cast<float>(hides ? last_hidden : some(-1, 2.5, first_bias, huge));
        if (!hides && infinite && data.below(rare) == 0)
          x = data.below(2) == 0 ? infinity : not_a_number;
      }
      c.stored_mask_.emplace(c.mask_, c.mask_kind_);
    }
    c.numbers_ = AttentionCase::Numbers::ends_of_float;
    c.adverse_ = "from one end of float to the other";
  }

  // Rows that no query sees hold what they may.
  void ruin() {
    const Shape& s = c.shape_;
    const Index group = s.q_heads / s.kv_heads;
    for (Index b = 0; b < s.batch; ++b)
      for (Index head = 0; head < s.kv_heads; ++head)
        for (Index t = 0; t < c.keys(); ++t) {
          bool seen = false;
          for (Index h = head * group; h < (head + 1) * group && !seen; ++h)
            for (Index i = s.q_len - 1; i >= 0 && !seen; --i) seen = c.sees(b, h, i, t);
          if (seen) continue;
          for (const bool value : {false, true})
            c.with_row(value, t, [&](StoredRows& rows, Index at) { rows.ruin(b, head, at); });
        }
    c.ruined_ = true;
  }
};

AttentionCase::AttentionCase(Random& random, Numbers numbers) {
  Random data(random.bits());
  AttentionDraw draw{*this, random, data};
  draw.sizes();
  draw.tensors();
  draw.options();
  draw.lists();
  draw.own_lists();
  draw.mask();
  if (numbers == Numbers::ends_of_float) draw.go_to_the_ends_of_float();
  if (!draw.seldom(4)) draw.ruin();
  if (!draw.seldom(3)) move_elsewhere(data, false);
}

std::string AttentionCase::describe() const {
  std::ostringstream text;
  const Shape& s = shape_;
  text << "batch " << s.batch << ", heads " << s.q_heads << "/" << s.kv_heads << ", dims "
       << s.head_dim << "/" << s.v_dim << ", q_len " << s.q_len << ", kv_len " << s.kv_len;
  const char* const names[] = {"q", "past k", "past v", "chunk k", "chunk v"};
  for (int i = 0; i < 5; ++i)
    if (!stored_[i].rows().empty())
      text << ", " << names[i] << " " << stored_[i].rows().format().name
           << (stored_[i].rows().mapped() ? " mapped" : "");
  text << "; " << arithmetic_name(options_.arithmetic);
  if (!has_chunk_) text << ", no chunk";
  if (in_one_cache_) text << ", the chunk in the cache";
  if (!options_.causal) text << ", not causal";
  if (options_.scale) text << ", scale " << *options_.scale;
  if (options_.softcap != 0) text << ", softcap " << options_.softcap;
  if (options_.sliding_window != 0) text << ", window " << options_.sliding_window;
  if (first_position_ != 0) text << ", first_position " << first_position_;
  if (options_.q_offset) text << ", q_offset " << *options_.q_offset;
  if (!sinks_.empty()) text << ", sinks";
  if (!slopes_.empty()) text << ", alibi";
  if (has_mask())
    text << ", mask of kind " << static_cast<int>(mask_kind_) << " [" << mask_.dimension(0) << ", "
         << mask_.dimension(1) << "]" << (factors_.empty() ? "" : " with factors")
         << (as_lists_ ? " as lists" : "");
  if (has_selection()) {
    text << ", selected";
    for (const auto& heads : lists_)
      for (const auto& list : heads) text << " " << list.size();
  }
  if (has_lists()) text << ", " << own_->describe();
  if (*adverse_ != '\0') text << "; " << adverse_;
  if (ruined_) text << "; what nobody sees is NaN";
  return text.str();
}

// ---- the call -----------------------------------------------------------------------------------

Rows AttentionCase::part(int which) const {
  if (!in_one_cache_) return stored_[which].rows();
  const auto [past, chunk] =
      quoka::chunk_in_cache(stored_[1].rows(), stored_[2].rows(), shape_.q_len);
  const Rows all[] = {q(), past.k, past.v, chunk.k, chunk.v};
  return all[which];
}

quoka::Past AttentionCase::past() const {
  quoka::Past past;
  if (shape_.kv_len > 0 || !has_chunk_ || !absent_when_empty_) past = quoka::Past(part(1), part(2));
  if (keep_) past.selection = &*keep_;
  past.first_position = first_position_;
  return past;
}
quoka::Chunk AttentionCase::chunk() const {
  if (!has_chunk_ && shape_.kv_len > 0 && absent_when_empty_) return {};
  return {part(3), part(4)};
}

AttentionOptions AttentionCase::bare_options() const {
  AttentionOptions options = options_;
  options.sinks = sinks_, options.alibi_slopes = slopes_, options.mask_factors = factors_;
  return options;
}
AttentionOptions AttentionCase::options() const {
  AttentionOptions options = bare_options();
  if (stored_mask_) options.mask = as_drawn(stored_mask_->mask());
  if (own_) options.lists = own_->lists();
  return options;
}

quoka::AttentionSequence AttentionCase::sequence(Index b, const quoka::AttentionOutput& output,
                                                 Selection& keep) const {
  quoka::AttentionSequence one{.out = output};
  one.q = stored_[0].sequence(b);
  const Index past = shape_.kv_len, own = has_chunk_ ? shape_.q_len : 0;
  const auto part_of = [&](int which) {
    if (!in_one_cache_) return stored_[which].sequence(b);
    return which <= 2 ? stored_[which].sequence(b).slice(0, past)
                      : stored_[which - 2].sequence(b).slice(past, own);
  };
  one.past = quoka::Past(part_of(1), part_of(2));
  one.chunk = {part_of(3), part_of(4)};
  one.past.first_position = first_position_;
  if (has_selection()) {
    keep = to_selection({lists_[uz(b)]}, shape_.kv_len);
    one.past.selection = &keep;
  }
  if (stored_mask_) one.mask = as_drawn(stored_mask_->sequence(b));
  if (own_) one.lists = own_->sequence(b);
  return one;
}

quoka::AttentionSequence AttentionCase::sequence(const quoka::AttentionOutput& output) const {
  quoka::AttentionSequence all{.q = q(), .past = past(), .chunk = chunk(), .out = output};
  if (stored_mask_) all.mask = as_drawn(stored_mask_->mask());
  if (own_) all.lists = own_->lists();
  all.q_offset = options_.q_offset;
  return all;
}

void AttentionCase::share_options(const AttentionOptions& options) {
  const std::optional<Index> position = options_.q_offset;
  options_ = options;
  options_.mask = {}, options_.lists = {}, options_.q_offset = position;
  sinks_.clear(), slopes_.clear(), factors_.clear();  // of heads
  if (!has_chunk_ && !position) options_.q_offset = first_position_ + shape_.kv_len;
}

Output<float> AttentionCase::unwritten_output() const {
  Output<float> output{Tensor4<float>(shape_.batch, shape_.q_heads, shape_.q_len, shape_.v_dim),
                       Tensor3<float>(shape_.batch, shape_.q_heads, shape_.q_len)};
  output.out.setConstant(-12345.0f), output.lse.setConstant(-12345.0f);
  return output;
}
Output<float> AttentionCase::attend(const Attend& attend) const {
  Output<float> output = unwritten_output();
  // Without keys at all the values' size is nowhere to be read: the output says it.
  attend(q(), past(), chunk(), {output.out, output.lse}, options());
  return output;
}
Output<float> AttentionCase::attend() const {
  return attend([](const Rows& q, const quoka::Past& past, const quoka::Chunk& chunk,
                   const quoka::AttentionOutput& output, const AttentionOptions& options) {
    quoka::attention(q, past, chunk, output, options);
  });
}
Output<float> AttentionCase::attend(ExecutorRef executor,
                                    quoka::AttentionWorkspace& workspace) const {
  return attend([&](const Rows& q, const quoka::Past& past, const quoka::Chunk& chunk,
                    const quoka::AttentionOutput& output, const AttentionOptions& options) {
    quoka::attention(q, past, chunk, output, options, executor, workspace);
  });
}

Output<float> AttentionCase::merged_at(Index cut) const {
  AttentionOptions options = bare_options();
  const Index kv_len = shape_.kv_len, left = kv_len - cut;
  options.q_offset = options.q_offset.value_or(first_position_ + kv_len);
  const quoka::Past whole = past();
  quoka::Past first(whole.k.slice(0, cut), whole.v.slice(0, cut)),
      second(whole.k.slice(cut, left), whole.v.slice(cut, left));
  first.first_position = first_position_, second.first_position = first_position_ + cut;
  Selection kept[2];
  if (has_selection()) {
    oracle::Positions lists[2];
    for (const auto& heads : lists_) {
      lists[0].emplace_back(), lists[1].emplace_back();
      for (const auto& list : heads) {
        for (auto& half : lists) half.back().emplace_back();
        for (const Index t : list)
          if (t < cut)
            lists[0].back().back().push_back(t);
          else
            lists[1].back().back().push_back(t - cut);
      }
    }
    kept[0] = to_selection(lists[0], cut), kept[1] = to_selection(lists[1], left);
    first.selection = &kept[0], second.selection = &kept[1];
  }
  const auto columns = [&](Index begin, Index count) {
    Tensor4<float> some = mask_.slice(
        Eigen::array<Index, 4>{0, 0, 0, begin},
        Eigen::array<Index, 4>{mask_.dimension(0), mask_.dimension(1), mask_.dimension(2), count});
    return StoredMask(some, mask_kind_);
  };
  std::optional<StoredMask> masks[2];
  if (has_mask()) masks[0].emplace(columns(0, cut)), masks[1].emplace(columns(cut, keys() - cut));
  std::optional<StoredLists> lists[2];
  Random random(1);
  if (own_)
    lists[0].emplace(own_->part(0, cut, random)), lists[1].emplace(own_->part(cut, keys(), random));
  Output<float> a = unwritten_output(), b = unwritten_output();
  if (lists[1]) options.lists = lists[1]->lists();
  if (masks[1]) options.mask = as_drawn(masks[1]->mask());
  quoka::attention(q(), second, chunk(), {b.out, b.lse}, options);
  if (masks[0]) options.mask = as_drawn(masks[0]->mask());
  if (lists[0]) options.lists = lists[0]->lists();
  options.sinks = {};  // one part has them
  quoka::attention(q(), first, {}, {a.out, a.lse}, options);
  quoka::merge(a.out, a.lse, b.out, b.lse);
  return a;
}

// ---- the same call otherwise ----------------------------------------------------------------------

void AttentionCase::move_elsewhere(Random& random, bool plain) {
  for (int i = 0; i < 5; ++i) {
    const bool mapped = i > 0 && shape_.batch == 1 && stored_[i].floats().size() > 0;
    stored_[i] = StoredRows(
        stored_[i],
        plain ? StoredRows::Layout::dense : StoredRows::layouts[random.below(mapped ? 6 : 3)],
        random);
  }
  if (own_) own_->store_otherwise(random);
}

void AttentionCase::widen_to_float() {
  for (StoredRows& rows : stored_)
    rows = StoredRows(Tensor4<float>(rows.floats()), quoka::float_format());
}

void AttentionCase::spell_out_mask(Random& random) {
  const Index batch = mask_.dimension(0), heads = mask_.dimension(1);
  Tensor4<float> all(shape_.batch, shape_.q_heads, shape_.q_len, keys());
  bool biased = false;
  for (Index b = 0; b < shape_.batch; ++b)
    for (Index h = 0; h < shape_.q_heads; ++h)
      for (Index i = 0; i < shape_.q_len; ++i)
        for (Index t = 0; t < keys(); ++t) {
          const float x = mask_(b % batch, h % heads, i, t);
          biased = biased || (x > quoka::Mask::hides_from && x != 0.0f);
          all(b, h, i, t) = x > quoka::Mask::hides_from ? x : -infinity;
        }
  // A token's mask of several heads goes another way, with bits of its own.
  if (shape_.q_len == 1 && heads == 1)
    all = Tensor4<float>(all.slice(Eigen::array<Index, 4>{0, 0, 0, 0},
                                   Eigen::array<Index, 4>{shape_.batch, 1, 1, keys()}));
  using enum StoredMask::Kind;
  const StoredMask::Kind kinds[] = {single, half, bfloat16, bytes, bits};
  mask_kind_ = kinds[random.below(biased ? 3 : 5)];
  mask_ = all;
  stored_mask_.emplace(mask_, mask_kind_, random.below(4));
}

void AttentionCase::hide_nothing(Random& random) {
  const Shape& s = shape_;
  if (!has_selection() && !has_own_keys()) {
    if (s.kv_len > 0) lists_ = oracle::all_positions(s.batch, s.kv_heads, s.kv_len);
    keep_ = random.below(2) == 0 ? Selection::all(s.batch, s.kv_heads, s.kv_len)
            : s.kv_len > 0       ? to_selection(lists_, s.kv_len)
                                 : Selection();
  }
  constexpr Index most = std::numeric_limits<Index>::max();
  if (options_.sliding_window == 0 && keys() > 0)
    options_.sliding_window = random.one_of(
        std::max(distance(s.q_len - 1, 0), distance(s.q_len - 1, s.kv_len)) + 1, most - 1, most);
}

void AttentionCase::select_what_is_shown() {
  if (!has_mask() || has_own_keys() || mask_.dimension(1) > 1 || shape_.kv_len == 0) return;
  if (!has_selection())
    lists_ = oracle::all_positions(shape_.batch, shape_.kv_heads, shape_.kv_len);
  bool only_holes = true;  // then there is no mask
  for (Index b = 0; b < shape_.batch; ++b) {
    const auto all_of = [&](Index t, auto&& condition) {
      for (Index i = 0; i < shape_.q_len; ++i)
        if (!condition(mask_(b % mask_.dimension(0), 0, i, t))) return false;
      return true;
    };
    const auto is_hidden = [&](Index t) {
      return all_of(t, [](float x) { return x <= quoka::Mask::hides_from; });
    };
    for (Index t = 0; t < keys(); ++t)
      only_holes = only_holes && ((t < shape_.kv_len && is_hidden(t)) ||
                                  all_of(t, [](float x) { return x == 0.0f; }));
    for (auto& list : lists_[uz(b)]) std::erase_if(list, is_hidden);
  }
  keep_ = to_selection(lists_, shape_.kv_len);
  if (only_holes) mask_.resize(0, 0, 0, 0), stored_mask_.reset();
}

void AttentionCase::select_otherwise_beside(Index list, Random& random) {
  for (auto& lists : lists_)
    for (Index other = 0; other < std::ssize(lists); ++other) {
      if (other == list) continue;
      const Index count = count_of_list(random, shape_.kv_len);
      lists[uz(other)] = random.some_of(shape_.kv_len, count);
    }
  keep_ = to_selection(lists_, shape_.kv_len);
}

void AttentionCase::move_far_away(Random& random) {
  const Index end = first_position_ + shape_.kv_len,
              far = quoka::max_position - shape_.q_len - options_.q_offset.value_or(end);
  Index& window = options_.sliding_window;
  const bool hidden = window >= shape_.q_len && distance(0, shape_.kv_len - 1) >= window;
  const bool past_stays = slopes_.empty() && (window == 0 || hidden) && random.below(2) == 0;
  if (options_.q_offset || past_stays) options_.q_offset = options_.q_offset.value_or(end) + far;
  if (!past_stays) first_position_ += far;
  if (past_stays && hidden)  // by a window of any size
    window = random.one_of(window, far, distance(0, shape_.kv_len - 1));
}

// ---- what is expected -----------------------------------------------------------------------------

Index AttentionCase::heads_of_a_list() const {
  return shape_.q_heads / (has_selection() ? std::ssize(lists_[0]) : shape_.kv_heads);
}
Index AttentionCase::distance(Index i, Index t) const {
  const Index kv_len = shape_.kv_len;
  const Index first = options_.q_offset.value_or(first_position_ + kv_len);
  return first + i - (t < kv_len ? first_position_ + t : first + t - kv_len);
}
bool AttentionCase::sees(Index b, Index head, Index i, Index t) const {
  const Index before = distance(i, t);
  if (options_.causal && before < 0) return false;
  if (options_.sliding_window > 0 && before >= options_.sliding_window) return false;
  if (t < shape_.kv_len && has_selection()) {
    const auto& list = lists_[uz(b)][uz(head / heads_of_a_list())];
    if (!std::binary_search(list.begin(), list.end(), t)) return false;
  }
  if (own_ && !own_->names(b, head / (shape_.q_heads / shape_.kv_heads), i, t)) return false;
  return !(added(b, head, i, t) <= quoka::Mask::hides_from);  // NaN is added
}
float AttentionCase::added(Index b, Index head, Index i, Index t) const {
  return has_mask() ? mask_(b % mask_.dimension(0), head % mask_.dimension(1), i, t) : 0.0f;
}

void AttentionCase::with_row(bool value, Index t,
                             const std::function<void(StoredRows&, Index)>& f) {
  const bool past = in_one_cache_ || t < shape_.kv_len;
  f(stored_[(past ? 1 : 3) + (value ? 1 : 0)], past ? t : t - shape_.kv_len);
}
const float* AttentionCase::key_row(bool value, Index b, Index kv_head, Index t) const {
  const bool past = in_one_cache_ || t < shape_.kv_len;
  return &held((past ? 1 : 3) + (value ? 1 : 0))(b, kv_head, past ? t : t - shape_.kv_len, 0);
}

bool AttentionCase::decided_by_codes() const {
  if (options_.arithmetic != Arithmetic::automatic || shape_.q_len > 1) return false;
  return (shape_.kv_len > 0 && &part(1).format() == &quoka::q8_0_format()) ||
         (has_chunk_ && &part(3).format() == &quoka::q8_0_format());
}

// Of a call with these tensors, in which `heads` query heads attend to the same keys.
AttentionCase::Bound AttentionCase::product_error(std::optional<ComputedIn> by, Index heads,
                                                  std::span<const int> tensors) const {
  bool exact = true;
  const Format* finest = nullptr;
  for (const int i : tensors) {
    const Rows rows = part(i);
    if (rows.empty()) continue;
    const Format& format = rows.format();
    exact =
        exact && (format.is_bfloat16 || &format == &quoka::channel_major_format<Eigen::bfloat16>());
    if (finest == nullptr || format.rounding < finest->rounding) finest = &format;
  }
  if (finest == nullptr) return {0, 0};
  if (!by) {
    const bool panel = shape_.q_len > 1 || has_lists() || heads > kernel_sizes().token_rows ||
                       (has_mask() && mask_.dimension(1) > 1);
    if (!panel) return {0, 0};
    const Arithmetic used =
        quoka::arithmetic_used(options_.arithmetic, *finest, *finest, heads * shape_.q_len);
    const int automatic = finest->rounding >= 0x1p-8f ? 2 : 3;
    by = ComputedIn{used, used == Arithmetic::automatic ? automatic : 1};
  }
  if (by->arithmetic == Arithmetic::int8) {
    const quoka::Int8Error error = quoka::int8_error(shape_.head_dim, shape_.v_dim);
    return {error.logit, error.value};
  }
  if (by->arithmetic == Arithmetic::float_) return {0, 0};
  const quoka::Bfloat16Error error = quoka::bfloat16_error(by->products, exact);
  return {error.logit, error.value};
}

// The oracle's result, and how far the library's may be off. At the ends of float the oracle rounds logits to float, as
// IEEE arithmetic does: queries have one channel that is not zero, so that a logit is two roundings whatever the order of
// sums, and a row's class (finite, NaN, nothing seen) is known exactly.
const AttentionCase::Expected& AttentionCase::expected(std::optional<ComputedIn> by,
                                                       bool merged) const {
  if (expected_ && expected_by_ == by && expected_merged_ == merged) return *expected_;
  if (!expected_) {
    const Shape& s = shape_;
    oracle::AttentionOptions exact = to_oracle(bare_options());
    exact.first_position = first_position_;
    exact.logits_of_float = numbers_ == Numbers::ends_of_float;
    if (options_.scale && *options_.scale == 0.0f) exact.scale = 1e-300;  // its 0 is the default
    if (has_mask() || has_lists())
      exact.mask = [&](Index b, Index head, Index i, Index t) {
        if (own_ && !own_->names(b, head / (s.q_heads / s.kv_heads), i, t))
          return -oracle::infinity;
        const float x = added(b, head, i, t);
        return x <= quoka::Mask::hides_from ? -oracle::infinity : static_cast<double>(x);
      };
    const auto rows = [&](int which) { return to_oracle(part(which)); };
    expected_.emplace();
    expected_->result =
        oracle::attention(to_oracle(q()), rows(1), rows(2), has_selection() ? &lists_ : nullptr,
                          rows(3), rows(4), exact);
    if (keys() == 0) expected_->result.out = oracle::Tensor(s.batch, s.q_heads, s.q_len, s.v_dim);
  }
  constexpr int past[] = {1, 2}, chunk[] = {3, 4}, both[] = {1, 2, 3, 4};
  const Index heads = heads_of_a_list(), group = shape_.q_heads / shape_.kv_heads;
  Bound product = product_error(by, heads, both);
  // The formats of a shard decide its arithmetic: the past's first keys, the others and the chunk, or the chunk
  // alone. In the last one all heads of a group attend to the same keys, whatever the Selection.
  if (merged)
    for (const Bound& own : {product_error(by, heads, past), product_error(by, group, chunk)})
      product = {std::max(product.logit, own.logit), std::max(product.value, own.value)};
  const bool in_codes = (by ? by->arithmetic : options_.arithmetic) == Arithmetic::int8;
  bound_errors(product, in_codes, merged, *expected_);
  expected_by_ = by, expected_merged_ = merged;
  return *expected_;
}

// The error of a key's logit is that of its products, by lengths, of the cap, and of what is added. The relative errors of
// its weight and of the sums are as large. Keys far below the largest logit may be left out.
// A merge costs float's roundings alone: weights that are off in a shard are off as much in the whole.
void AttentionCase::bound_errors(const Bound& product, bool in_codes, bool merged,
                                 Expected& of) const {
  const Shape& s = shape_;
  const bool at_the_ends = numbers_ == Numbers::ends_of_float;
  const double narrow_sums = at_the_ends && product.value > 0 ? 0x1p-5 : 0.0;
  const double cap = static_cast<double>(options_.softcap),
               scale = std::abs(static_cast<double>(
                   options_.scale.value_or(1.0f / std::sqrt(static_cast<float>(s.head_dim)))));
  struct Sizes {
    double length = 0, sum = 0, largest = 0;  // of a row's channels
  };
  const auto sizes_of = [](const float* row, Index dim) {
    Sizes of_row;
    for (Index c = 0; c < dim; ++c) {
      const double x = std::abs(static_cast<double>(row[c]));
      of_row.length += x * x, of_row.sum += x, of_row.largest = std::max(of_row.largest, x);
    }
    of_row.length = std::sqrt(of_row.length);
    return of_row;
  };
  of.lse_error.clear(), of.out_error.clear();
  const Index group = s.q_heads / s.kv_heads;
  for (Index b = 0; b < s.batch; ++b)
    for (Index h = 0; h < s.q_heads; ++h) {
      std::vector<Sizes> sizes_of_keys;
      for (Index t = 0; t < keys(); ++t)
        sizes_of_keys.push_back(sizes_of(key_row(false, b, h / group, t), s.head_dim));
      for (Index i = 0; i < s.q_len; ++i) {
        const std::vector<double>& logits = of.result.logits[of.lse_error.size()];
        const double lse = of.result.lse[of.lse_error.size()];
        if (!std::isfinite(lse)) {
          of.lse_error.push_back(0), of.out_error.insert(of.out_error.end(), uz(s.v_dim), 0.0);
          continue;
        }
        const Sizes query = sizes_of(&held(0)(b, h, i, 0), s.head_dim);
        const quoka::FloatError own = drawn_float_error(s.head_dim, std::ssize(logits));
        double top = sinks_.empty() ? -oracle::infinity : static_cast<double>(sinks_[uz(h)]);
        for (const double x : logits) top = std::max(top, x);
        double worst = 0, lost = 0;
        std::vector<double> most(uz(s.v_dim)), missed(uz(s.v_dim));
        auto logit = logits.begin();
        for (Index t = 0; t < keys(); ++t) {
          if (!sees(b, h, i, t)) continue;
          const Sizes& key = sizes_of_keys[uz(t)];
          const double size = scale * query.length * key.length,
                       capped = cap != 0 ? std::min(cap, size) : size;
          double error = (product.logit + own.logit) * size;
          if (decided_by_codes()) error += scale * query.largest / 32638 * key.sum;
          if (cap != 0) error = std::min(error, 2 * cap) + std::min(7e-7 * cap, 1.5e-6 * size);
          double biases = 0;
          if (!slopes_.empty())
            biases +=
                std::abs(static_cast<double>(slopes_[uz(h)]) * static_cast<double>(distance(i, t)));
          if (has_mask())
            biases += std::abs(static_cast<double>(added(b, h, i, t)) *
                               (factors_.empty() ? 1.0 : static_cast<double>(factors_[uz(h)])));
          if (biases > 0) error += 0x1p-24 * (3 * biases + capped);
          // An uncertain logit counts for as much as it may weigh.
          const double below = top - *logit++;
          const bool small = below - error > static_cast<double>(quoka::negligible_below);
          if (below - 2 * error < 80) worst = std::max(worst, error);
          const double weight = small ? std::exp(top - below - lse) : 0.0;
          lost += weight;
          const float* const value = key_row(true, b, h / group, t);
          for (Index c = 0; c < s.v_dim; ++c) {
            const double x = std::abs(static_cast<double>(value[c]));
            most[uz(c)] = std::max(most[uz(c)], x), missed[uz(c)] += weight * x;
          }
        }
        if (in_codes)  // a value has one scale for all channels
          std::fill(most.begin(), most.end(), *std::max_element(most.begin(), most.end()));
        const double of_merge = merged ? 0x1p-24 * ((at_the_ends ? 2 : 1) * std::abs(lse) + 16) : 0;
        const double of_sums = own.value + of_merge + narrow_sums;
        of.lse_error.push_back(worst + lost + of_sums + (at_the_ends ? 0 : product.value));
        const double of_weights =
            std::min(2 * std::tanh(worst / 2) + product.value + of_sums, 2.001);
        for (Index c = 0; c < s.v_dim; ++c)
          of.out_error.push_back(of_weights * most[uz(c)] + missed[uz(c)] + 1e-37);
      }
    }
}

::testing::AssertionResult AttentionCase::is_as_oracle(const Output<float>& output,
                                                       std::optional<ComputedIn> by,
                                                       bool merged) const {
  const Expected& of = expected(by, merged);
  std::size_t row = 0;
  for (Index b = 0; b < shape_.batch; ++b)
    for (Index h = 0; h < shape_.q_heads; ++h)
      for (Index i = 0; i < shape_.q_len; ++i, ++row) {
        const auto fail = [&] {
          return ::testing::AssertionFailure() << "[" << b << ", " << h << ", " << i << "]: ";
        };
        const double lse = static_cast<double>(output.lse(b, h, i)), wanted = of.result.lse[row];
        const double of_lse = of.lse_error[row] + (merged ? 0x1p-22 : 0x1p-24) * std::abs(wanted);
        const bool close = std::isnan(wanted)   ? std::isnan(lse)
                           : std::isinf(wanted) ? lse == wanted
                                                : std::abs(lse - wanted) <= of_lse;
        if (!close)
          return fail() << "lse " << lse << ", not " << wanted << "; the bound is " << of_lse;
        for (Index c = 0; c < shape_.v_dim; ++c) {
          // Rows that see nothing are zero.
          const double most =
              wanted == -oracle::infinity ? 0.0 : of.out_error[row * uz(shape_.v_dim) + uz(c)];
          const double x = static_cast<double>(output.out(b, h, i, c)),
                       exact = of.result.out.at(b, h, i, c);
          if (std::isnan(exact) ? !std::isnan(x) : !(std::abs(x - exact) <= most))
            return fail() << "channel " << c << ": " << x << ", not " << exact << "; the bound is "
                          << most;
        }
      }
  return ::testing::AssertionSuccess();
}

::testing::AssertionResult AttentionCase::keeps_nan_in_its_rows(const Output<float>& clean,
                                                                Random& random,
                                                                const Attend& attend_by,
                                                                std::optional<ComputedIn> by) {
  const Shape& s = shape_;
  const Index group = s.q_heads / s.kv_heads, b = random.below(s.batch);
  const Index kind = random.below(3);  // a query, a key, a value
  const float with = kind == 2 && random.below(3) == 0 ? infinity : not_a_number;
  const Index head = random.below(kind == 0 ? s.q_heads : s.kv_heads);
  const Index at = kind == 0 ? random.below(s.q_len) : keys() > 0 ? random.below(keys()) : 0;
  const Index channel = random.below(kind == 2 ? s.v_dim : s.head_dim);
  if (kind > 0 && keys() == 0) return ::testing::AssertionSuccess();
  // The scale of a value's codes is of its finite channels: without one of them it may be another.
  const bool coded = kind == 2 && (by ? by->arithmetic : options_.arithmetic) == Arithmetic::int8;
  if (coded) expected(by);
  std::vector<float> before, after;
  const auto spoil = [&](StoredRows& rows, Index i) {
    const auto read = [&] {
      const float* const from = &rows.floats()(b, head, i, 0);
      return std::vector<float>(from, from + rows.floats().dimension(3));
    };
    before = read();
    rows.set(b, head, i, channel, with);
    after = read();
  };
  if (kind == 0)
    spoil(stored_[0], at);
  else
    with_row(kind == 2, at, spoil);
  const bool broken =
      std::isnan(with) ? std::isnan(after[uz(channel)]) : std::isinf(after[uz(channel)]);
  if (!broken) return ::testing::AssertionSuccess();  // integers have none
  const Output<float> output = attend_by ? attend(attend_by) : attend();
  const auto same = [](float x, float y) {
    return std::bit_cast<std::uint32_t>(x) == std::bit_cast<std::uint32_t>(y);
  };
  for (Index of = 0; of < s.batch; ++of)
    for (Index h = 0; h < s.q_heads; ++h)
      for (Index i = 0; i < s.q_len; ++i) {
        const bool row =
            of == b && (kind == 0 ? h == head && i == at : h / group == head && sees(of, h, i, at));
        const auto fail = [&](const char* what) {
          return ::testing::AssertionFailure()
                 << (kind == 0   ? "query "
                     : kind == 1 ? "key "
                                 : "value ")
                 << at << " of head " << head << " of sequence " << b << " has " << with
                 << " in channel " << channel << ", row [" << of << ", " << h << ", " << i << "] "
                 << what;
        };
        // A row that sees nothing has nothing to multiply its query with.
        const bool empty = clean.lse(of, h, i) == -infinity;
        const bool only_sink = kind == 0 && row && [&] {
          for (Index t = 0; t < keys(); ++t)
            if (sees(of, h, i, t)) return false;
          return true;
        }();
        if (row && kind < 2 && !empty && !only_sink) {
          bool all = std::isnan(output.lse(of, h, i));
          for (Index c = 0; c < s.v_dim; ++c) all = all && std::isnan(output.out(of, h, i, c));
          if (!all) return fail("must be NaN");
          continue;
        }
        const std::size_t number = uz((of * s.q_heads + h) * s.q_len + i);
        const bool apart = coded && row;
        const auto close = [&](float x, float y, double most) {
          return same(x, y) ||
                 std::abs(static_cast<double>(x) - static_cast<double>(y)) <= 2 * most;
        };
        if (!close(output.lse(of, h, i), clean.lse(of, h, i),
                   apart ? expected_->lse_error[number] : 0))
          return fail("has another log-sum-exp");
        for (Index c = 0; c < s.v_dim; ++c) {
          const float x = output.out(of, h, i, c), y = clean.out(of, h, i, c);
          if (!row || kind < 2 || std::memcmp(&before[uz(c)], &after[uz(c)], sizeof(float)) == 0) {
            const double most = apart ? expected_->out_error[number * uz(s.v_dim) + uz(c)] : 0;
            if (!close(x, y, most)) return fail("must not change");
          } else if (std::isnan(after[uz(c)])
                         ? !std::isnan(x)
                         : std::isinf(after[uz(c)]) && !(x == infinity || std::isnan(x))) {
            return fail("must have it in this channel");
          }
        }
      }
  return ::testing::AssertionSuccess();
}

}  // namespace quoka_test
