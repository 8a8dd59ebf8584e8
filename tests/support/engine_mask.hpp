// Masks of an engine, drawn: numbers added to the logits, half [1, 1, n_q, cells]. Each query sees a
// set of cells, runs, blocks, a chunk, one after padding, a prefix or images that are seen both
// ways, a window, a server's batch, no cell, one cell or all of them. Numbers stand in some places,
// or in all of a row. What is hidden is minus infinity, or a number that engines write in its place.
#pragma once

#include <quoka/rows/mask.hpp>

#include "support/fixtures.hpp"

namespace quoka_test {

class EngineMask {
 public:
  enum Kind {
    chunk,
    window,
    padded,  // on the left
    prefix,  // seen both ways
    images,  // seen both ways, with text between them
    batch,   // of a server: sequences anywhere
    set,
    as_before,
    runs,
    blocks,
    nothing,
    one,
    all,
    nearly_all,
    any
  };

  // distances: most rows have them in place of 0, as ALiBi does.
  EngineMask(Random& random, Index n_q, Index cells, bool distances = false)
      : values(1, 1, n_q, cells),
        kind(static_cast<Kind>(random.below(random.seldom(2) ? any + 1 : batch + 1))),
        random_(random),
        seen_(uz(cells)) {
    first_ = random.below(std::max<Index>(cells - n_q, 1)), step_ = Index{1} << random.below(7);
    share_ = 1 + random.below(40), padding_ = 1 + random.below(first_ + n_q);
    both_ways_ = 1 + random.below(n_q);
    rows_to_numbers_ = random.one_of(1000, 30, 3, 1);
    if (random.seldom(3))  // in a stretch of rows
      numbers_begin_ = random.below(n_q), numbers_end_ = numbers_begin_ + 1 + random.below(60);
    const Index alike = random.one_of(1'000'000, 50, 12);  // one row of so many is of another kind
    for (Index query = 0; query < n_q; ++query) {
      const bool other = kind == any || random.seldom(alike);
      see(other ? static_cast<Kind>(random.below(any)) : kind, query);
      write(query, distances && !random.seldom(3));
    }
  }

  bool sees(Index query, Index cell) const {
    return !(static_cast<float>(values(0, 0, query, cell)) <= quoka::Mask::hides_from);
  }
  bool sees_any(Index query) const {
    return of_any_cell([&](Index cell) { return sees(query, cell); });
  }
  bool is_biased(Index query) const {
    return of_any_cell([&](Index cell) {
      return sees(query, cell) && static_cast<float>(values(0, 0, query, cell)) != 0.0f;
    });
  }
  bool has_nan(Index query) const {
    return of_any_cell(
        [&](Index cell) { return std::isnan(static_cast<float>(values(0, 0, query, cell))); });
  }

  Tensor4<Eigen::half> values;
  const Kind kind;  // of most rows

 private:
  template <class F>
  bool of_any_cell(F&& is) const {
    Index cell = 0;
    while (cell < values.dimension(3) && !is(cell)) ++cell;
    return cell < values.dimension(3);
  }
  // The cells that a query sees.
  void see(Kind by, Index query) {
    const Index cells = values.dimension(3), n_q = values.dimension(2), own = first_ + query + 1;
    const auto show = [&](Index begin, Index end) {
      for (Index cell = std::max<Index>(begin, 0); cell < std::min(end, cells); ++cell)
        seen_[uz(cell)] = true;
    };
    const auto show_some = [&](Index size) {
      for (Index begin = 0; begin < cells; begin += size)
        if (random_.below(share_) == 0) show(begin, begin + size);
    };
    const auto one_of = [&]() { return seen_.begin() + random_.below(cells); };
    if (by == batch && left_ > 0)  // the sequence's next query
      --left_;
    else if (by != as_before)
      std::fill(seen_.begin(), seen_.end(), false);
    const Index image = query / both_ways_;
    switch (by) {
      case chunk:
        return show(0, own);
      case window:
        return show(own - 31, own);
      case padded:
        return show(padding_, own);
      case prefix:
        return show(0, std::max(own, first_ + both_ways_));
      case images:
        return show(0, image % 2 == 0 ? own : first_ + std::min((image + 1) * both_ways_, n_q));
      case batch:
        if (left_ == 0) {  // another sequence, after a prefix of all
          left_ = random_.below(2) * random_.below(90) + 1;
          show(0, share_);
          for (Index i = random_.below(cells / 8); i > 0; --i) *one_of() = true;
        }
        *one_of() = true;  // its own cell
        return;
      case set:
        return show_some(1);
      case as_before:
        for (Index i = random_.below(5); i > 0; --i) (*one_of()).flip();
        return;
      case runs:
        for (Index i = random_.below(4) + 1; i > 0; --i) {
          const Index begin = random_.below(cells);
          show(begin, begin + 1 + random_.below(200));
        }
        return;
      case blocks:
        return show_some(step_);
      case one:
        *one_of() = true;
        return;
      case all:
      case nearly_all:
        show(0, cells);
        for (Index i = random_.below(cells / 8); i > 0 && by == nearly_all; --i) *one_of() = false;
        return;
      case nothing:
      case any:
        return;
    }
  }
  // Its row of the mask.
  void write(Index query, bool distances) {
    const Index cells = values.dimension(3);
    const auto put = [&](Index cell, float x) { values(0, 0, query, cell) = Eigen::half(x); };
    const float in_place = random_.one_of(-infinity, -infinity, -65504.0f, -60000.0f);
    const bool has_numbers =
        numbers_begin_ <= query && query < numbers_end_ && random_.seldom(rows_to_numbers_);
    const bool biased = has_numbers && random_.seldom(4);
    for (Index cell = 0; cell < cells; ++cell)
      put(cell, !seen_[uz(cell)] ? (random_.seldom(2) ? in_place : -infinity)
                : distances      ? -static_cast<float>(std::abs(cell - first_ - query))
                : biased         ? static_cast<float>(random_.below(2000)) * 1e-3f - 1.0f
                                 : 0.0f);
    if (!has_numbers) return;
    const auto number = [&] { return random_.seldom(3) ? 3.0f : -0.001f; };
    if (random_.seldom(2))
      for (Index i = random_.below(4); i >= 0; --i) put(random_.below(cells), number());
    else if (const Index cell = a_seen_one(); cell >= 0)
      put(cell, number());
    if (random_.seldom(10)) put(random_.below(cells), not_a_number);
  }
  // -1: there is none.
  Index a_seen_one() {
    const Index count = std::count(seen_.begin(), seen_.end(), true);
    if (count == 0) return -1;
    auto at = std::find(seen_.begin(), seen_.end(), true);
    for (Index i = random_.below(count); i > 0; --i) at = std::find(at + 1, seen_.end(), true);
    return at - seen_.begin();
  }

  Random& random_;
  std::vector<bool> seen_;  // by the query at hand
  Index left_ = 0;          // queries of the batch's sequence
  Index first_ = 0, step_ = 1, share_ = 1, rows_to_numbers_ = 1;
  Index numbers_begin_ = 0, numbers_end_ = std::numeric_limits<Index>::max();  // queries
  Index padding_ = 1;                                                          // cells
  Index both_ways_ = 1;  // queries of a prefix or an image
};

}  // namespace quoka_test
