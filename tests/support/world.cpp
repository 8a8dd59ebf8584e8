#include "support/world.hpp"

#include <quoka/kernels/byte_formats.hpp>

namespace quoka_test {

// ---- rows ---------------------------------------------------------------------------------------

std::span<const Format* const> every_format() {
  static const Format* const all[] = {&quoka::float_format(),
                                      &quoka::format_of<Eigen::half>(),
                                      &quoka::format_of<Eigen::bfloat16>(),
                                      &quoka::q8_0_format(),
                                      &quoka::u8_format(),
                                      &quoka::i8_format(),
                                      &quoka::i8_channel_format(),
                                      &quoka::e4m3_format(),
                                      &quoka::channel_major_format<float>(),
                                      &quoka::channel_major_format<Eigen::half>(),
                                      &quoka::channel_major_format<Eigen::bfloat16>()};
  return all;
}

std::vector<float> scales_of(const Format& format, Index heads, Index dim) {
  std::vector<float> scales;
  for (Index i = 0; i < heads * format.separate_scales(dim); ++i)
    scales.push_back((&format == &quoka::e4m3_format() ? 0.01f : 0.03f) *
                     (1.0f + 0.1f * static_cast<float>(i % 7)));
  return scales;
}

namespace {

// Bytes of a channel where a row's channels lie apart; else 0.
Index element_of(const Format& format) {
  if (&format == &quoka::channel_major_format<float>()) return 4;
  if (&format == &quoka::channel_major_format<Eigen::half>()) return 2;
  return &format == &quoka::channel_major_format<Eigen::bfloat16>() ? 2 : 0;
}

}  // namespace

template <class F>
void StoredRows::for_each_row(F&& f) const {
  for (Index b = 0; b < floats_.dimension(0); ++b)
    for (Index head = 0; head < floats_.dimension(1); ++head)
      for (Index i = 0; i < floats_.dimension(2); ++i) f(b, head, i);
}

StoredRows::StoredRows(const Tensor4<float>& x, const Format& format)
    : format_(&format),
      element_(element_of(format)),
      scales_(scales_of(format, x.dimension(1), x.dimension(3))),
      floats_(x) {
  lay_out(Layout::dense, 0);
  for_each_row([&](Index b, Index head, Index i) { write(b, head, i, &x(b, head, i, 0)); });
}

StoredRows::StoredRows(const Tensor4<float>& x, const Format& format, Layout layout, Random& random)
    : StoredRows(StoredRows(x, format), layout, random) {}

StoredRows::StoredRows(const StoredRows& from, Layout layout, Random& random)
    : format_(from.format_), element_(from.element_), scales_(from.scales_), floats_(from.floats_) {
  if (format_ == nullptr) return;
  lay_out(layout, random.bits());
  for_each_row([&](Index b, Index head, Index i) {
    const std::byte* const source = from.rows_.row(b, head, i);
    std::byte* const to = row(b, head, i);
    if (element_ == 0)
      std::memcpy(to, source, uz(format_->row_bytes(rows_.shape(head))));
    else
      for (Index c = 0; c < floats_.dimension(3); ++c)
        std::memcpy(to + c * channel_step_, source + c * from.channel_step_, uz(element_));
  });
}

StoredRows::StoredRows(const StoredRows& from)
    : format_(from.format_), element_(from.element_), scales_(from.scales_), floats_(from.floats_) {
  if (format_ == nullptr) return;
  lay_out(from.layout_, from.seed_);
  std::copy(from.memory_.begin(), from.memory_.end(), memory_.begin());
}

void StoredRows::lay_out(Layout layout, std::uint64_t seed) {
  layout_ = layout, seed_ = seed;
  Random random(seed);
  const Index batch = floats_.dimension(0), heads = floats_.dimension(1),
              len = floats_.dimension(2), dim = floats_.dimension(3);
  const bool listed = layout == Layout::list || layout == Layout::list_of_pages;
  const bool paged = layout == Layout::pages || layout == Layout::list_of_pages;
  const bool loose = layout != Layout::dense;
  const bool part = layout == Layout::tokens || layout == Layout::padded;  // of what lies there
  if (part) first_row_ = random.below(4);
  const Index cells = len + (listed ? 3 : 0) + (part ? first_row_ + random.below(4) : 0);
  const Index page = !paged                 ? cells
                     : random.below(2) == 0 ? 1 + random.below(40)
                                            : Index{1} << random.below(6),
              extra = paged ? random.below(4) : 0;
  const Index pages = paged ? (cells + page - 1) / page + extra : batch;
  // [pages, heads, page], then what a row needs; or [pages, heads, dim, page] of elements.
  const Index unit = element_ > 0 ? element_ : std::max<Index>(format_->element_bytes, 1);
  const Index room = layout == Layout::tokens ? unit * (1 + random.below(4))
                     : loose                  ? unit * random.below(5)
                                              : 0;
  Index page_step, head_step, row_step;
  if (element_ > 0) {
    channel_step_ = page * element_ + room;
    row_step = element_, head_step = dim * channel_step_, page_step = heads * head_step;
  } else {
    const Index row = format_->row_bytes({dim, 0, nullptr}) + room;
    const bool by_token = layout == Layout::tokens || (paged && random.below(2) == 0);
    row_step = by_token ? heads * row : row, head_step = by_token ? row : page * row;
    page_step = heads * page * row;
  }
  const Index last =
      element_ > 0 ? (dim - 1) * channel_step_ + element_ : format_->row_bytes({dim, 0, nullptr});
  const Index extent =
      (pages - 1) * page_step + (heads - 1) * head_step + (page - 1) * row_step + last;
  const Index size = pages > 0 && heads > 0 && page > 0 && dim > 0 ? extent : 0;
  const Index apart = loose && random.below(2) == 0 ? unit * random.below(8) : 0;
  memory_ = Fenced(size + apart + 64);
  std::memset(memory_.begin(), 0xff, static_cast<std::size_t>(memory_.end() - memory_.begin()));
  pool_ = Rows(memory_.end() - apart - size, *format_, {pages, heads, page, dim},
               {page_step, head_step, row_step}, channel_step_);
  if (!scales_.empty()) pool_ = pool_.with_scales(scales_.data(), std::ssize(scales_) / heads);
  rows_ = part ? pool_.slice(first_row_, len) : pool_;
  if (paged) {
    for (const Index i : random.permutation(pages)) table_.push_back(static_cast<Position>(i));
    rows_ = quoka::paged(pool_, table_, cells);
  }
  if (listed) {
    for (const Index i : random.permutation(cells)) cells_.push_back(static_cast<Position>(i));
    cells_.resize(uz(len));
    rows_ = rows_.gathered(cells_);
  }
}

Rows StoredRows::sequence(Index b) const {
  if (rows_.mapped() || rows_.empty()) {
    if (!rows_.empty() || rows_.batch() == 1) return rows_;
    return Rows(memory_.begin(), *format_, {1, rows_.heads(), rows_.len(), rows_.dim()},
                rows_.strides());
  }
  const Rows one(rows_.data() + b * rows_.strides()[0], *format_,
                 {1, rows_.heads(), rows_.len(), rows_.dim()}, rows_.strides(), channel_step_);
  return scales_.empty() ? one
                         : one.with_scales(scales_.data(), std::ssize(scales_) / rows_.heads());
}

std::byte* StoredRows::row(Index b, Index head, Index i) {
  return const_cast<std::byte*>(rows_.row(b, head, i));
}

// And reads them back, as the format holds them.
void StoredRows::write(Index b, Index head, Index i, const float* values) {
  std::byte* const to = row(b, head, i);
  if (element_ == 0) format_->narrow(values, rows_.shape(head), to);
  for (Index c = 0; c < rows_.dim() && element_ > 0; ++c) {
    const float x = values[c];
    const auto put = [&](auto element) {
      std::memcpy(to + c * channel_step_, &element, sizeof element);
    };
    if (format_ == &quoka::channel_major_format<float>()) put(x);
    if (format_ == &quoka::channel_major_format<Eigen::half>()) put(static_cast<Eigen::half>(x));
    if (format_ == &quoka::channel_major_format<Eigen::bfloat16>())
      put(static_cast<Eigen::bfloat16>(x));
  }
  format_->widen(to, rows_.shape(head), &floats_(b, head, i, 0));
}

void StoredRows::ruin(Index b, Index head, Index i) {
  const Index bytes = element_ > 0 ? element_ : format_->row_bytes(rows_.shape(head)),
              runs = element_ > 0 ? rows_.dim() : 1;
  for (Index c = 0; c < runs; ++c)
    std::memset(row(b, head, i) + c * channel_step_, 0xff, uz(bytes));
  format_->widen(row(b, head, i), rows_.shape(head), &floats_(b, head, i, 0));
}

void StoredRows::set(Index b, Index head, Index i, Index c, float x) {
  std::vector<float> values(&floats_(b, head, i, 0), &floats_(b, head, i, 0) + rows_.dim());
  values[uz(c)] = x;
  write(b, head, i, values.data());
}

void StoredRows::change(Index b, Index head, Index i) {
  const Index dim = rows_.dim(), bytes = format_->row_bytes(rows_.shape(head));
  std::vector<float> values(&floats_(b, head, i, 0), &floats_(b, head, i, 0) + dim);
  const std::vector<std::byte> before(row(b, head, i), row(b, head, i) + bytes);
  for (float add = 0.25f; std::memcmp(before.data(), row(b, head, i), uz(bytes)) == 0; add *= 4) {
    for (float& x : values) x = std::isfinite(x) ? add - x : add;
    write(b, head, i, values.data());
  }
}

// ---- masks --------------------------------------------------------------------------------------

StoredMask::StoredMask(const Tensor4<float>& x, Kind kind, Index padding) : kind_(kind) {
  for (std::size_t axis = 0; axis < 4; ++axis) sizes_[axis] = x.dimension(axis);
  const Index keys = sizes_[3], width = kind == Kind::single                           ? 4
                                        : kind == Kind::half || kind == Kind::bfloat16 ? 2
                                                                                       : 1;
  const Index row = kind == Kind::bits ? (keys + 7) / 8 + padding : (keys + padding) * width;
  strides_ = {sizes_[1] * sizes_[2] * row, sizes_[2] * row, row};
  memory_.assign(uz(sizes_[0] * strides_[0] + 1), 0xff);
  for (Index n = 0; n < sizes_[0] * sizes_[1] * sizes_[2]; ++n)
    for (Index key = 0; key < keys; ++key) {
      std::uint8_t* const to = memory_.data() + n * row;
      const float added = x.data()[n * keys + key];
      const auto put = [&](auto element) {
        std::memcpy(to + key * static_cast<Index>(sizeof element), &element, sizeof element);
      };
      if (kind == Kind::single) put(added);
      if (kind == Kind::half) put(static_cast<Eigen::half>(added));
      if (kind == Kind::bfloat16) put(static_cast<Eigen::bfloat16>(added));
      if (kind == Kind::bytes)  // a visible key is 1 in every other row, else any number above 0
        put(static_cast<std::uint8_t>(added != 0.0f ? 0 : n % 2 == 0 ? 1 : 1 + key % 255));
      if (kind == Kind::bits && added != 0.0f)
        to[key / 8] = static_cast<std::uint8_t>(to[key / 8] & ~(1 << (key % 8)));
    }
}

quoka::Mask StoredMask::at(const std::uint8_t* data, const std::array<Index, 4>& sizes) const {
  const auto* const bytes = reinterpret_cast<const std::byte*>(data);
  switch (kind_) {
    case Kind::single:
      return Rows(bytes, quoka::format_of<float>(), sizes, strides_);
    case Kind::half:
      return Rows(bytes, quoka::format_of<Eigen::half>(), sizes, strides_);
    case Kind::bfloat16:
      return Rows(bytes, quoka::format_of<Eigen::bfloat16>(), sizes, strides_);
    case Kind::bytes:
      return quoka::Mask::bytes(bytes, sizes, strides_);
    case Kind::bits:
      return quoka::Mask::bits(bytes, sizes, strides_);
  }
  return {};
}
quoka::Mask StoredMask::mask() const { return at(memory_.data(), sizes_); }
quoka::Mask StoredMask::sequence(Index b) const {
  std::array<Index, 4> one = sizes_;
  one[0] = 1;
  return at(memory_.data() + (sizes_[0] > 1 ? b : 0) * strides_[0], one);
}

// ---- lists of each query ---------------------------------------------------------------------------

void StoredLists::set(Index b, Index head, Index i, const std::vector<Index>& list) {
  entries_.resize(uz(batch_ * heads_ * q_len_));
  const Index row = (b * heads_ + head) * q_len_ + i;
  entries_[uz(row)] = list;
  for (const Index entry : list)
    for (Index key = entry * block_; entry >= 0 && key < std::min(keys_, (entry + 1) * block_);
         ++key)
      named_[uz(row * keys_ + key)] = 1;
}

void StoredLists::store(Random& random) {
  entries_.resize(uz(batch_ * heads_ * q_len_));
  for (const auto& list : entries_) most_ = std::max(most_, std::ssize(list));
  most_ += random.below(3), step_ = most_ + random.below(4);
  const bool counted = random.below(2) == 0;
  // Behind a list's end: a number that is no key, or a key that the list may lack.
  memory_.assign(uz(std::ssize(entries_) * step_ + 1),
                 counted ? random.one_of(Position{0}, Position{77'777'777}) : -1);
  for (Index row = 0; row < std::ssize(entries_); ++row) {
    const auto& list = entries_[uz(row)];
    for (Index i = 0; i < std::ssize(list); ++i)
      memory_[uz(row * step_ + i)] = static_cast<Position>(list[uz(i)]);
    if (counted) counts_.push_back(static_cast<Position>(list.size()));
  }
}

void StoredLists::store_otherwise(Random& random) {
  for (auto& list : entries_) {
    if (list.empty()) continue;
    const Index once = std::ssize(list);
    for (Index more = random.below(2 * once); more > 0; --more)
      list.push_back(list[uz(random.below(once))]);
    std::vector<Index> shuffled;
    for (const Index i : random.permutation(std::ssize(list))) shuffled.push_back(list[uz(i)]);
    list = shuffled;
  }
  most_ = 0, counts_.clear();
  store(random);
}

quoka::IndexLists StoredLists::lists() const {
  const TensorView<const Position> entries(memory_.data(), {batch_, heads_, q_len_, most_},
                                           {heads_ * q_len_ * step_, q_len_ * step_, step_, 1});
  if (counts_.empty()) return quoka::IndexLists(entries, block_);
  return quoka::IndexLists(entries, block_,
                           TensorView<const Position, 3>(counts_.data(), {batch_, heads_, q_len_}));
}

StoredLists StoredLists::part(Index begin, Index end, Random& random) const {
  StoredLists some(batch_, heads_, q_len_, end - begin, 1);
  for (Index b = 0; b < batch_; ++b)
    for (Index head = 0; head < heads_; ++head)
      for (Index i = 0; i < q_len_; ++i) {
        std::vector<Index> list;
        for (Index key = begin; key < end; ++key)
          if (names(b, head, i, key)) list.push_back(key - begin);
        some.set(b, head, i, list);
      }
  some.store(random);
  return some;
}

std::string StoredLists::describe() const {
  return "lists [" + std::to_string(batch_) + ", " + std::to_string(heads_) + ", " +
         std::to_string(q_len_) + ", " + std::to_string(most_) + "] of blocks of " +
         std::to_string(block_) + (counts_.empty() ? "" : ", counted");
}

}  // namespace quoka_test
