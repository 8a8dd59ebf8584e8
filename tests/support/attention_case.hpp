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
#include "support/world.hpp"

#include <optional>
#include <span>
#include <string>

namespace quoka_test {

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
  bool has_lists() const { return own_.has_value(); }             // of each query
  bool has_own_keys() const { return has_lists() || as_lists_; }  // these, or a mask read as lists
  bool is_ruined() const { return ruined_; }  // rows that no query sees hold what they may
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

  // Within the bound that the arithmetic states and float's own errors; `by` what stands in for the
  // arithmetic that was drawn. merged: by merged_at().
  ::testing::AssertionResult is_as_oracle(const Output<float>& output,
                                          std::optional<ComputedIn> by = {},
                                          bool merged = false) const;
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
  // Where there is no Selection, one of all keys; where there is no window, one that they fit in.
  void hide_nothing(Random& random);
  // Of the past only keys that a mask for all heads shows to some query of their sequence; and no mask, if it does nothing
  // else.
  void select_what_is_shown();
  // Other lists in place of all but this one of each sequence.
  void select_otherwise_beside(Index list, Random& random);
  // All positions as far from 0 as they may be; and the past as far from the queries, where no option depends on that, or a
  // window hides all of it.
  void move_far_away(Random& random);
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
  const Expected& expected(std::optional<ComputedIn> by, bool merged = false) const;
  void bound_errors(const Bound& product, bool in_codes, bool merged, Expected& of) const;
  Bound product_error(std::optional<ComputedIn> by, Index heads,
                      std::span<const int> tensors) const;
  Index distance(Index i, Index t) const;  // from key t to query i
  Rows part(int which) const;
  const Tensor4<float>& held(int which) const { return stored_[uz(which)].floats(); }
  const float* key_row(bool value, Index b, Index kv_head, Index t) const;
  float added(Index b, Index head, Index i, Index t) const;  // by the mask, before mask_factors
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
  mutable bool expected_merged_ = false;
};

}  // namespace quoka_test
