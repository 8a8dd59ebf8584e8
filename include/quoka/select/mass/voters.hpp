// Which queries of a chunk vote on the past's keys, and for whose list.
//
// Of each query head `per_head` queries vote: the chunk's last ones, an eighth of them, and others evenly spaced over
// what comes before, so that the heads of a group stand at places of their own. The last ones must be among them: a
// question at the end of a prompt is what the answer is looked for by.
//
// Each query head has a list of its own, which its voters alone decide. Where a KV head has few query rows (a single
// token), attention is bound by memory, and several lists would make it read several times as much: there one list
// serves the KV head, and the voters of the whole group decide.
#pragma once

#include <quoka/base/index.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

struct Voters {
  static constexpr Index last_share = 8;  // one of so many is of the chunk's last
  static constexpr Index least = 4;       // of a query head
  static constexpr Index few_rows = 32;   // query rows of a KV head up to which it has one list

  Index group, q_len;
  Index per_head;  // voters of a query head
  Index lists;     // of a KV head: one for each query head, or one

  // queries: of a KV head, all its query heads together.
  Voters(Index group_in, Index q_len_in, Index queries)
      : group(group_in),
        q_len(q_len_in),
        per_head(std::min(std::max(least, queries / group_in), q_len_in)),
        lists(group_in * q_len_in <= few_rows ? 1 : group_in) {}

  // Rows of a list: an even number, of which the last may be nobody's.
  Index voters_of_list() const { return group / lists * per_head; }
  Index rows_of_list() const { return round_up(voters_of_list(), Index{2}); }
  Index rows() const { return lists * rows_of_list(); }  // of a KV head
  // Voter m of the query head that is number `member` of its group: a position in the chunk. They ascend.
  Index position(Index member, Index m) const {
    const Index last = ceil_div(per_head, last_share), spaced = per_head - last,
                rest = q_len - last;
    return m < spaced ? (m * group + member) * rest / (spaced * group) : rest + m - spaced;
  }
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
