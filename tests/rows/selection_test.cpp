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

// One KV head's positions, by a SelectionWriter.
void write(Selection& selection, std::initializer_list<Position> list, Index kv_len) {
  SelectionWriter writer(selection, 1, 1, kv_len, std::ssize(list));
  std::copy(list.begin(), list.end(), writer.row(0, 0).begin());
  writer.commit();
}

// No sequence, no key.
void expect_nothing(const Selection& selection) {
  EXPECT_EQ(selection.batch(), 0);
  EXPECT_EQ(selection.heads(), 0);
  EXPECT_EQ(selection.kv_len(), 0);
  EXPECT_EQ(selection.sum_of_counts(), 0);
}

// Lists of one length, of any, all keys and none: what each of them says of itself.
TEST(Selection, HoldsThePositionsItWasMadeOf) {
  expect_nothing(Selection());
  Selection none, nothing_of_none;
  none.select_none(2, 2, 7);
  const oracle::Positions any = {{{0, 1, 2, 3, 6}, {}}, {{4}, {1, 2, 5}}},
                          all = oracle::all_positions(2, 2, 7),
                          no_keys = oracle::all_positions(2, 2, 0);
  const struct {
    Selection selection;
    const oracle::Positions& lists;
    bool is_all, spelled_out;
  } table[] = {{to_selection(some, 7), some, false, true},
               {Selection::from_lists(2, 2, 7, lists_of(any)), any, false, true},
               {Selection::all(2, 2, 7), all, true, false},
               {none, no_keys, false, false}};
  for (const auto& [selection, lists, is_all, spelled_out] : table) {
    SCOPED_TRACE(selection.sum_of_counts());
    EXPECT_EQ(selection.batch(), 2);
    EXPECT_EQ(selection.heads(), 2);
    EXPECT_EQ(selection.kv_len(), 7);
    EXPECT_EQ(selection.is_all(), is_all);
    EXPECT_EQ(to_positions(selection), lists);
    Index sum = 0, most = 0;
    for (Index b = 0; b < 2; ++b)
      for (Index head = 0; head < 2; ++head) {
        const Index count = std::ssize(lists[uz(b)][uz(head)]);
        EXPECT_EQ(selection.count(b, head), count);
        EXPECT_EQ(std::ssize(selection.row(b, head)), spelled_out ? count : 0);
        sum += count, most = std::max(most, count);
      }
    EXPECT_EQ(selection.sum_of_counts(), sum);
    EXPECT_EQ(selection.max_count(), most);
  }
  // Of an empty past it is all and none.
  nothing_of_none.select_none(2, 3, 0);
  const Tensor3<Position> no_positions(2, 3, 0);
  const Selection nothing(no_positions, 0);
  EXPECT_EQ(nothing, Selection::all(2, 3, 0));
  EXPECT_EQ(nothing, nothing_of_none);
}

// ---- comparison ---------------------------------------------------------------------------------

// By shape, length of the cache and every list; all of them, none of them and lists that spell it out are alike.
TEST(Selection, EqualsAnotherOfTheSamePositions) {
  auto other = some;
  other[1][1] = {1, 2, 6};
  Selection none;
  none.select_none(1, 1, 7);
  const auto of = [](const oracle::Positions& lists, Index kv_len) {
    return Selection::from_lists(std::ssize(lists), std::ssize(lists[0]), kv_len, lists_of(lists));
  };
  const struct {
    Selection a, b;
    bool equal;
  } table[] = {{to_selection(some, 7), to_selection(some, 7), true},
               {to_selection(some, 7), to_selection(other, 7), false},
               {to_selection(some, 7), to_selection(some, 8), false},
               {Selection::all(1, 4, 7), Selection::all(2, 2, 7), false},
               {Selection::all(2, 2, 7), Selection::all(2, 2, 8), false},
               {none, Selection::all(1, 1, 7), false},
               {none, of({{{}}}, 7), true},
               {selection_of({0, 1, 2}, 3), Selection::all(1, 1, 3), true},
               {of({{{0, 1, 2}, {0, 1, 2}}}, 3), Selection::all(1, 2, 3), true},
               {of({{{0, 1, 2}, {0, 1}}}, 3), Selection::all(1, 2, 3), false},
               {of({{{0, 1}, {3}}}, 7), of({{{0, 1}, {3}}}, 7), true},
               {of({{{0, 1}, {3}}}, 7), of({{{0, 1}, {3, 4}}}, 7), false},
               {of({{{0, 1}, {3}}}, 7), of({{{0}, {1, 3}}}, 7), false}};
  for (const auto& row : table) {
    SCOPED_TRACE(&row - table);
    EXPECT_EQ(row.a == row.b, row.equal);
    EXPECT_EQ(row.b == row.a, row.equal);
  }
}

// ---- reuse --------------------------------------------------------------------------------------

TEST(Selection, ReusedIsAsNew) {
  Selection selection = to_selection(some, 7);
  selection.select_all(1, 1, 5);
  EXPECT_EQ(selection, Selection::all(1, 1, 5));
  write(selection, {3, 8}, 9);
  EXPECT_EQ(selection, selection_of({3, 8}, 9));
  selection.select_none(1, 1, 9);
  Selection none;
  none.select_none(1, 1, 9);
  EXPECT_EQ(selection, none);
}

// Rows with less than their room, whose rest is not looked at.
TEST(SelectionWriter, WritesRowsOfTheirOwnCounts) {
  Selection selection;
  SelectionWriter writer(selection, 1, 3, 9, 4);
  writer.row(0, 0)[0] = 2, writer.row(0, 0)[1] = 5, writer.row(0, 0)[2] = -9;
  writer.set_count(0, 0, 2);
  writer.set_count(0, 1, 0);
  for (Index i = 0; i < 4; ++i) writer.row(0, 2)[uz(i)] = static_cast<Position>(2 * i + 1);
  writer.commit();
  EXPECT_EQ(to_positions(selection), (oracle::Positions{{{2, 5}, {}, {1, 3, 5, 7}}}));
}

TEST(SelectionWriter, LeavesNothingOfNothingUntilCommit) {
  Selection selection = to_selection(some, 7);
  SelectionWriter writer(selection, 1, 1, 9, 1);
  expect_nothing(selection);
  writer.row(0, 0)[0] = 8;
  expect_nothing(selection);
  writer.commit();
  EXPECT_EQ(selection, selection_of({8}, 9));
}

// ---- moved from ---------------------------------------------------------------------------------

TEST(Selection, MovedFromIsNothingOfNothing) {
  for (const Selection& before : {to_selection(some, 7), Selection::all(2, 2, 7)}) {
    Selection first = before;
    Selection constructed = std::move(first), assigned = Selection::all(3, 5, 999);
    EXPECT_EQ(constructed, before);
    expect_nothing(first);
    assigned = std::move(constructed);
    EXPECT_EQ(assigned, before);
    expect_nothing(constructed);
    expect_refused([&] { constructed.require_shape(2, 2, 7); }, {"batch", 0, 2});
  }
}

TEST(Selection, RequiresItsShape) {
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
      expect_refused([&] { write(selection, bad, 7); }, both);
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
          std::vector<Index>& list = heads.emplace_back(random.permutation(kv_len));
          list.resize(uz(random.below(4) == 0 ? kv_len : random.below(kv_len + 1)));
          std::sort(list.begin(), list.end());
          most = std::max(most, std::ssize(list));
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
