// Selection: positions in, positions out, and refusals of lists that are not selections; and the rows that gather() takes
// by one, in order, bit for bit.

#include <quoka/rows/selection.hpp>
#include <quoka/select/stages.hpp>

#include "support/refused_calls.hpp"
#include "support/world.hpp"

#include <gtest/gtest.h>

namespace {

using namespace quoka_test;
using quoka::SelectionWriter;

// [batch 2, kv_heads 2, count 3] of 7 keys
const oracle::Positions some = {{{0, 1, 2}, {0, 3, 6}}, {{4, 5, 6}, {1, 2, 5}}};

// A Selection of one KV head.
Selection selection_of(std::initializer_list<Position> list, Index kv_len) {
  Tensor3<Position> positions(1, 1, std::ssize(list));
  std::copy(list.begin(), list.end(), positions.data());
  return Selection(positions, kv_len);
}

std::vector<std::vector<Position>> lists_of(const oracle::Positions& positions) {
  std::vector<std::vector<Position>> lists;
  for (const auto& sequence : positions)
    for (const auto& list : sequence) lists.emplace_back(list.begin(), list.end());
  return lists;
}

// No sequence, no key.
void expect_nothing(const Selection& selection) {
  EXPECT_EQ(selection.batch(), 0);
  EXPECT_EQ(selection.heads(), 0);
  EXPECT_EQ(selection.kv_len(), 0);
  EXPECT_EQ(selection.sum_of_counts(), 0);
}

// ---- as lists -----------------------------------------------------------------------------------

// Lists of any lengths, or all of one length, at times of all keys or of none. There are few keys, so two draws are
// often equal.
struct Lists {
  Index kv_len, count = -1;  // of each list, if all have one length
  oracle::Positions of;

  explicit Lists(Random& random) : kv_len(random.one_of(0, 1, 3, 7)) {
    const Index batch = 1 + random.below(2), heads = 1 + random.below(2);
    if (random.seldom(2)) count = random.one_of(Index{0}, kv_len, random.below(kv_len + 1));
    for (Index b = 0; b < batch; ++b)
      for (Index head = 0; head < heads; ++head) {
        if (head == 0) of.emplace_back();
        of.back().push_back(random.some_of(kv_len, count >= 0 ? count : random.below(kv_len + 1)));
      }
  }
  Index batch() const { return std::ssize(of); }
  Index heads() const { return std::ssize(of[0]); }
  bool operator==(const Lists& other) const { return kv_len == other.kv_len && of == other.of; }

  // Made in any way, in the memory of any other Selection.
  Selection made(Random& random, Selection before) const {
    const Index way = random.below(4);
    if (way == 0 && count == kv_len) return Selection::all(batch(), heads(), kv_len);
    if (way == 1 && count == kv_len) return before.select_all(batch(), heads(), kv_len), before;
    if (way == 1 && count == 0) return before.select_none(batch(), heads(), kv_len), before;
    if (way == 2) return Selection::from_lists(batch(), heads(), kv_len, lists_of(of));
    if (way == 3 && count >= 0) {
      Tensor3<Position> positions(batch(), heads(), count);
      const auto lists = lists_of(of);
      for (Index i = 0; i < positions.size(); ++i)
        positions.data()[i] = lists[uz(i / count)][uz(i % count)];
      return Selection(positions, kv_len);
    }
    // Lists may be shorter than their room, whose rest is not read. Until commit() the Selection is empty.
    const Index room = count >= 0 ? count : kv_len;
    SelectionWriter writer(before, batch(), heads(), kv_len, room);
    for (Index b = 0; b < batch(); ++b)
      for (Index head = 0; head < heads(); ++head) {
        const auto& list = of[uz(b)][uz(head)];
        const std::span<Position> row = writer.row(b, head);
        std::fill(row.begin(), row.end(), -9);
        std::copy(list.begin(), list.end(), row.begin());
        if (std::ssize(list) < room) writer.set_count(b, head, std::ssize(list));
      }
    expect_nothing(before);
    writer.commit();
    return before;
  }
};

// What it says of itself.
void expect_holds(const Selection& selection, const Lists& lists) {
  EXPECT_EQ(selection.batch(), lists.batch());
  EXPECT_EQ(selection.heads(), lists.heads());
  EXPECT_EQ(selection.kv_len(), lists.kv_len);
  EXPECT_EQ(to_positions(selection), lists.of);
  Index sum = 0, most = 0;
  for (Index b = 0; b < lists.batch(); ++b)
    for (Index head = 0; head < lists.heads(); ++head) {
      const Index count = std::ssize(lists.of[uz(b)][uz(head)]);
      EXPECT_EQ(selection.count(b, head), count);
      EXPECT_EQ(std::ssize(selection.row(b, head)), selection.is_all() ? 0 : count);
      EXPECT_TRUE(!selection.is_all() || count == lists.kv_len);
      sum += count, most = std::max(most, count);
    }
  EXPECT_EQ(selection.sum_of_counts(), sum);
  EXPECT_EQ(selection.max_count(), most);
}

// However it was made and moved: a full list and "all" are equal.
TEST(Selection, HoldsItsListsAndEqualsAnyOtherOfThem) {
  expect_nothing(Selection());
  EXPECT_TRUE(Selection::all(1, 1, 7).is_all());
  for_each_draw(2000, [](Random& random) {
    const Lists first(random), second(random);
    Selection a = first.made(random, {});
    expect_holds(a, first);
    const Selection again = first.made(random, a), other = second.made(random, a);
    expect_holds(again, first);
    expect_holds(other, second);
    EXPECT_TRUE(a == again && again == a);
    EXPECT_EQ(a == other, first == second);
    EXPECT_EQ(other == a, first == second);
    Selection constructed = std::move(a), assigned = other;
    expect_nothing(a);  // NOLINT: what was moved from may be used
    assigned = std::move(constructed);
    expect_nothing(constructed);  // NOLINT
    expect_holds(assigned, first);
  });
}

TEST(Selection, RequiresItsShape) {
  Selection moved_from = to_selection(some, 7);
  (void)Selection(std::move(moved_from));
  expect_refused([&] { moved_from.require_shape(2, 2, 7); }, {"batch", 0, 2});  // NOLINT
  for (const Selection& selection : {to_selection(some, 7), Selection::all(2, 2, 7)}) {
    EXPECT_NO_THROW(selection.require_shape(2, 2, 7));
    expect_refused([&] { selection.require_shape(1, 2, 7); }, {"batch", 2, 1});
    expect_refused([&] { selection.require_shape(2, 4, 7); }, {"kv_heads", 2, 4});
    expect_refused([&] { selection.require_shape(2, 2, 8); }, {"kv_len", 7, 8});
    EXPECT_NO_THROW(selection.require_fits(2, 2, 6, 7));  // of KV heads
    EXPECT_NO_THROW(selection.require_fits(2, 1, 2, 7));  // of query heads
    expect_refused([&] { selection.require_fits(2, 1, 4, 7); }, {"kv_heads", 2, 1});
    expect_refused([&] { selection.require_fits(1, 2, 6, 7); }, {"batch", 2, 1});
    expect_refused([&] { selection.require_fits(2, 2, 6, 8); }, {"kv_len", 7, 8});
  }
}

// ---- refused ------------------------------------------------------------------------------------

TEST(Selection, RefusesWhatIsNoSelection) {
  Selection selection = to_selection(some, 7);
  SelectionWriter writer(selection, 1, 2, 7, 3);
  Selection other = to_selection(some, 7);
  const Index most = std::numeric_limits<Position>::max();
  const auto write = [&](Index batch, Index kv_heads, Index kv_len, Index count) {
    return [=, &other] { SelectionWriter(other, batch, kv_heads, kv_len, count); };
  };
  expect_all_refused({
      {[] {
         (void)selection_of({0, 1}, 1);
       },
       {2, 1}},
      {[] { (void)selection_of({0}, 0); }, {1, 0}},
      {[] { (void)selection_of({0}, -3); }, {"kv_len", -3, 0}},
      // The one bad row among good ones.
      {[] {
         (void)to_selection({{{0, 1}, {0, 1}}, {{0, 9}, {0, 1}}}, 7);
       },
       {"position of batch 1, head 0 is", 9, 6}},
      {[] {
         (void)to_selection({{{0, 1}, {4, 1}}, {{0, 1}, {0, 1}}}, 7);
       },
       {"of batch 0, head 1 is", 1, "before"}},
      {write(1, 1, 3, 4), {"positions", 4, 3}},
      {write(1, 1, 3, -1), {"positions", -1, 0}},
      {write(-2, 1, 3, 1), {"batch", -2, 0}},
      {write(1, -2, 3, 1), {"heads", -2, 0}},
      {write(1, 1, most + 1, 1), {"kv_len", most + 1, most}},
      {[&] { writer.set_count(0, 1, 4); }, {"of batch 0, head 1 is", 4, 3}},
      {[&] { writer.set_count(0, 1, -1); }, {"of batch 0, head 1 is", -1, 0}},
      {[&] {
         writer.set_kept_shares(std::array{1.0f, 0.5f, 0.0f});
       },
       {"kept shares", 3, 2}},
      {[] {
         (void)Selection::from_lists(2, 2, 7, lists_of({{{1}, {2}, {3}}}));
       },
       {"lists", 3, 4}},
      {[] {
         (void)Selection::from_lists(1, 3, 7, lists_of({{{1}, {}, {2, 7}}}));
       },
       {"position", 7, 6}},
  });
}

// A writer's refusal leaves a Selection of no sequence, whatever it held before.
TEST(Selection, RefusesListsThatAreNoneAndLeavesNothing) {
  const auto refuses = [](std::initializer_list<Position> bad,
                          std::initializer_list<Fragment> both) {
    expect_refused([&] { (void)selection_of(bad, 7); }, both);
    for (Selection selection : {Selection(), to_selection(some, 7), Selection::all(1, 1, 7)}) {
      SelectionWriter writer(selection, 1, 1, 7, std::ssize(bad));
      std::copy(bad.begin(), bad.end(), writer.row(0, 0).begin());
      expect_refused([&] { writer.commit(); }, both);
      expect_nothing(selection);
      EXPECT_EQ(selection, Selection());
    }
  };
  refuses({0, 5, 2}, {"position", 2, 5});
  refuses({1, 4, 4}, {"position", 4, "the one before"});
  refuses({-3, 2}, {"position", -3, 0});
  refuses({0, 6, 7}, {"position", 7, 6});
  refuses({7}, {"position", 7, 6});
}

// ---- gather -------------------------------------------------------------------------------------

using quoka::gather;

// Any lists, none and all among them, rows of any layout, any threads; zeros behind a list that is shorter than
// another.
TEST(Gather, TakesTheSelectedRows) {
  for_each_storage([]<class T>() {
    for_each_draw(40, [&](Random& random) {
      const Index dims[] = {1, 17, 64};
      const Index dim = dims[random.below(3)], kv_len = random.below(4) == 0 ? 0 : 37;
      auto floats = random.tensor<float>(2, 3, kv_len, dim);
      if (kv_len > 0) floats(0, 0, 2, 0) = not_a_number, floats(1, 2, 5, 0) = infinity;
      const auto past = rows<T>(floats, 0, kv_len);
      oracle::Positions lists(2);
      Index most = 0;
      for (auto& heads : lists)
        for (int head = 0; head < 3; ++head) {
          const Index count = random.seldom(4) ? kv_len : random.below(kv_len + 1);
          heads.push_back(random.some_of(kv_len, count)), most = std::max(most, count);
        }
      Tensor4<T> expected(2, 3, most, dim);
      expected.setConstant(stored<T>(0.0));
      for (Index b = 0; b < 2; ++b)
        for (Index head = 0; head < 3; ++head)
          for (Index i = 0; i < std::ssize(lists[uz(b)][uz(head)]); ++i)
            std::copy_n(&past(b, head, lists[uz(b)][uz(head)][uz(i)], 0), dim,
                        &expected(b, head, i, 0));
      const Selection keep = to_selection(lists, kv_len);
      const StoredRows tokens(floats, quoka::format_of<T>(), StoredRows::Layout::tokens, random);
      for_each_executor([&](ExecutorRef executor) {
        EXPECT_TRUE(same_bits(gather(past, keep, executor), expected));
        EXPECT_TRUE(same_bits(gather(tokens.rows().typed<T>(), keep, executor), expected));
      });
      EXPECT_TRUE(same_bits(gather(past, Selection::all(2, 3, kv_len)), past));
    });
  });
}

TEST(GatherRefuses, ASelectionOfAnotherShape) {
  const Tensor4<float> past(2, 3, 37, 17);
  expect_refused([&] { (void)gather(past, Selection::all(1, 3, 37)); }, {"batch", 1, 2});
  expect_refused([&] { (void)gather(past, Selection::all(2, 4, 37)); }, {"heads", 4, 3});
  expect_refused([&] { (void)gather(past, Selection::all(2, 3, 36)); }, {"len", 36, 37});
}

}  // namespace
