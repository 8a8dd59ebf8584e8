// A call of attention() drawn at random: shape, formats, layouts, options, mask and lists, alone
// and together. The properties of a case are in attention/attention_suite_test.cpp; fuzzers and
// other arithmetics draw the same cases.
//
//   Random random(seed);
//   const AttentionCase c(random);        // c.describe() says what was drawn
//   const Output<float> output = c.attend();
//   EXPECT_TRUE(c.is_as_oracle(output));
#pragma once

#include <quoka/attention/attention.hpp>

#include "support/attention_fixtures.hpp"
#include "support/fenced.hpp"

#include <optional>
#include <string>

namespace quoka_test {

// Rows of any format in memory of their own, laid out in any way. Memory that holds no row is 0xff:
// NaN in all formats that have one.
class StoredRows {
 public:
  enum class Layout { dense, side_by_side, padded, pages, list, list_of_pages };

  StoredRows() = default;
  // x rounded to the format.
  StoredRows(const Tensor4<float>& x, const quoka::Format& format);
  // The same rows, byte by byte, in another layout; pages and lists are of one sequence.
  StoredRows(const StoredRows& from, Layout layout, Random& random);
  StoredRows(StoredRows&&) = default;
  StoredRows& operator=(StoredRows&&) = default;

  const Rows& rows() const { return rows_; }
  Rows sequence(Index b) const;  // one sequence of the batch; of pages and lists there is one
  const Tensor4<float>& floats() const { return floats_; }  // as the format holds them
  // Row i becomes all NaN, or what 0xff is.
  void ruin(Index b, Index head, Index i);
  // Channel c of row i becomes x; channels that share a scale with it change accordingly.
  void set(Index b, Index head, Index i, Index c, float x);

 private:
  void lay_out(Layout layout, Random* random);
  std::byte* row(Index b, Index head, Index i);
  void read_back(Index b, Index head, Index i);

  const quoka::Format* format_ = nullptr;
  Index element_ = 0, channel_step_ = 0;  // of channels that lie apart: bytes
  Fenced memory_;                         // the last row ends at a fence, in some layouts
  std::byte* first_ = nullptr;
  std::vector<float> scales_;
  std::vector<Position> table_, cells_;
  Tensor4<float> floats_;
  Rows rows_;
};

// The numbers added to the logits, [batch or 1, q_heads or 1, q_len, keys], as a caller may have
// them.
class StoredMask {
 public:
  enum class Kind { single, half, bfloat16, bytes, bits };  // the last two hide what is not 0

  // `padding` elements of something else lie between the rows.
  StoredMask(const Tensor4<float>& x, Kind kind, Index padding = 3);
  quoka::Mask mask() const;
  quoka::Mask sequence(Index b) const;

 private:
  quoka::Mask at(const std::uint8_t* data, const std::array<Index, 4>& sizes) const;

  Kind kind_;
  std::array<Index, 4> sizes_;
  std::array<Index, 3> strides_;
  std::vector<std::uint8_t> memory_;
};

// Runs tasks in any order by any of this many workers, all on the calling thread.
class ShuffledExecutor {
 public:
  ShuffledExecutor(std::uint64_t seed, int workers) : engine_(seed), workers_(workers) {}
  int workers() const { return workers_; }
  template <class F>
  void run(Index tasks, F&& f) {
    std::vector<Index> order(uz(tasks));
    for (Index i = 0; i < tasks; ++i) order[uz(i)] = i;
    std::shuffle(order.begin(), order.end(), engine_);
    for (const Index task : order)
      f(task, static_cast<int>(engine_() % static_cast<unsigned>(workers_)));
  }

 private:
  std::mt19937_64 engine_;
  int workers_;
};

// Lists of each query's keys, as a caller may have them: in any order, some named twice, padded
// with -1 or counted.
class StoredLists {
 public:
  StoredLists(Index batch, Index heads, Index q_len, Index keys, Index block)
      : batch_(batch),
        heads_(heads),
        q_len_(q_len),
        keys_(keys),
        block_(block),
        named_(uz(batch * heads * q_len * keys)) {}

  // Query i of these names the entries of `list`, negative ones nothing.
  void set(Index b, Index head, Index i, const std::vector<Index>& list);
  // Once all are set: room for some more entries than the longest list has, padded or counted.
  void store(Random& random);
  quoka::IndexLists lists() const;
  quoka::IndexLists sequence(Index b) const { return lists().sequence(batch_ > 1 ? b : 0); }
  // The same lists in another order and in other memory, with some entries repeated.
  void store_otherwise(Random& random);
  // For KV heads and sequences as a call has them.
  bool names(Index b, Index kv_head, Index i, Index key) const {
    return named_[uz(((b % batch_ * heads_ + kv_head % heads_) * q_len_ + i) * keys_ + key)] != 0;
  }
  // The lists of keys [begin, end), one by one.
  StoredLists part(Index begin, Index end, Random& random) const;
  Index block() const { return block_; }
  std::string describe() const;

 private:
  Index batch_, heads_, q_len_, keys_, block_;
  std::vector<std::uint8_t> named_;  // [batch, heads, q_len, keys]
  std::vector<std::vector<Index>> entries_;
  std::vector<Position> memory_, counts_;
  Index most_ = 0, step_ = 0;
};

// The arithmetic of a chunk, and the number of its products of bfloat16.
struct ComputedIn {
  quoka::Arithmetic arithmetic;
  int products = 1;

  bool operator==(const ComputedIn&) const = default;
};

class AttentionCase {
 public:
  // A call of attention(), or of an arithmetic in its place.
  using Attend =
      std::function<void(const Rows& q, const quoka::Past& past, const quoka::Chunk& chunk,
                         const quoka::AttentionOutput& output, const AttentionOptions& options)>;

  // Numbers of about 1, adverse ones among them; or queries and keys of one channel, whose logits
  // lie anywhere from one end of float to the other.
  enum class Numbers { usual, ends_of_float };

  explicit AttentionCase(Random& random, Numbers numbers = Numbers::usual);
  AttentionCase(const AttentionCase&) = delete;
  AttentionCase& operator=(const AttentionCase&) = delete;

  std::string describe() const;
  const Shape& shape() const { return shape_; }
  bool has_selection() const { return !lists_.empty(); }
  bool has_mask() const { return mask_.size() > 0; }
  StoredMask::Kind mask_kind() const { return mask_kind_; }
  bool has_lists() const { return own_.has_value(); }  // of each query
  Index keys() const { return shape_.kv_len + (has_chunk_ ? shape_.q_len : 0); }

  // The parts of the call. They refer to this object.
  const Rows& q() const { return stored_[0].rows(); }
  quoka::Past past() const;
  quoka::Chunk chunk() const;
  AttentionOptions options() const;
  void ask_for(quoka::Arithmetic arithmetic) { options_.arithmetic = arithmetic; }
  // One sequence of the batch as a call of its own.
  quoka::AttentionSequence sequence(Index b, const quoka::AttentionOutput& output,
                                    Selection& keep) const;

  // All of it as one sequence of a ragged batch, and with another case's options, except numbers of
  // heads.
  quoka::AttentionSequence sequence(const quoka::AttentionOutput& output) const;
  void share_options(const AttentionOptions& options);

  // An output full of a value that no result has.
  Output<float> unwritten_output() const;
  Output<float> attend() const;
  Output<float> attend(const Attend& attend) const;
  Output<float> attend(ExecutorRef executor, quoka::AttentionWorkspace& workspace) const;

  // Within the bound that the arithmetic states, float's own errors and one rounding of each
  // number; `by` what stands in for the arithmetic that was drawn, `parts` that were merged.
  ::testing::AssertionResult is_as_oracle(const Output<float>& output,
                                          std::optional<ComputedIn> by = {}, int parts = 1) const;
  // Query heads that attend to the same keys: a group, or one where the Selection is of query
  // heads.
  Index heads_of_a_list() const;
  // May query i of a head be influenced by key t, past rows first?
  bool sees(Index b, Index head, Index i, Index t) const;

  // The same call with every tensor and list in other memory, or as floats.
  void move_elsewhere(Random& random, bool plain);
  void widen_to_float();
  // The same mask of another kind, and spelled out for all sequences and heads.
  void spell_out_mask(Random& random);
  // The result of the first `cut` keys and of the others, merged; not of what is left out.
  Output<float> merged_at(Index cut) const;

  // Spoils one number, and compares all rows with `clean`.
  ::testing::AssertionResult keeps_nan_in_its_rows(const Output<float>& clean, Random& random,
                                                   const Attend& attend_by = {},
                                                   std::optional<ComputedIn> by = {});

 private:
  friend struct AttentionDraw;
  struct Bound {
    double logit, value;  // of a logit, and of the output
  };
  struct Expected {
    oracle::AttentionResult result;
    std::vector<double> lse_error;  // [batch, q_heads, q_len]
    std::vector<double> out_error;  // [batch, q_heads, q_len, v_dim]
  };
  const Expected& expected(std::optional<ComputedIn> by) const;
  Expected of_usual_numbers(std::optional<ComputedIn> by) const;
  Expected at_the_ends_of_float(std::optional<ComputedIn> by) const;
  Bound product_error(std::optional<ComputedIn> by) const;
  Index distance(Index i, Index t) const;  // from key t to query i
  Rows part(int which) const;
  const Tensor4<float>& held(int which) const { return stored_[uz(which)].floats(); }
  float key_at(bool value, Index b, Index kv_head, Index t, Index c) const;
  void with_row(bool value, Index t, const std::function<void(StoredRows&, Index)>& f);
  bool decided_by_codes() const;
  AttentionOptions bare_options() const;  // without the mask
  quoka::Mask as_drawn(const quoka::Mask& mask) const { return as_lists_ ? mask.as_lists() : mask; }

  Shape shape_;
  bool has_chunk_ = true, in_one_cache_ = false, absent_when_empty_ = false, ruined_ = false;
  StoredRows
      stored_[5];  // q, past k, past v, chunk k, chunk v; in one cache the past's have all rows
  Numbers numbers_ = Numbers::usual;
  const char* adverse_ = "";  // what numbers are drawn, except normal ones
  std::vector<float> sinks_, slopes_, factors_;
  Tensor4<float> mask_;  // -infinity, biases
  StoredMask::Kind mask_kind_ = StoredMask::Kind::single;
  bool as_lists_ = false;  // Mask::as_lists()
  std::optional<StoredMask> stored_mask_;
  oracle::Positions lists_;
  std::optional<Selection> keep_;
  std::optional<StoredLists> own_;
  AttentionOptions options_;  // without spans
  Index first_position_ = 0;
  mutable std::optional<Expected> expected_;
  mutable std::optional<ComputedIn> expected_by_;
};

}  // namespace quoka_test
