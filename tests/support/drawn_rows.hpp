// Queries and keys as models have them, and adverse ones.
#pragma once

#include "support/fixtures.hpp"

namespace quoka_test {

struct Values {
  bool sinks = false;       // the first keys are long, and all queries look at them
  bool outliers = false;    // some channels are large everywhere
  bool copies = false;      // keys are copies of a few
  bool zeros = false;       // some rows are zero
  bool not_finite = false;  // some rows have a NaN or an infinity
  bool steep = false;       // queries are long, and so are differences of logits
  bool wide = false;        // rows from 1e-15 to 1e15 long
  bool ends = false;        // rows of any length that a float has, or all of one
  bool whole = false;       // whole numbers, so that codes are exact and scores equal
  bool cancels = false;     // heads of a group cancel, wholly or but for channels that are small
  bool near = false;        // of copies, some are off by little in one channel
  bool nothing = false;     // no number is one
  bool unfair = false;      // each eighth key is better: of these the threshold is guessed
};

std::ostream& operator<<(std::ostream& out, const Values& v);
// Some of them, except `ends`, `whole`, `cancels` and `unfair`.
Values drawn_values(Random& random);

// Keys [batch, heads, len, dim], or queries, of which `group` heads share a KV head.
Tensor4<float> drawn_keys(Random& random, const Values& v, Index batch, Index heads, Index len,
                          Index dim);
Tensor4<float> drawn_queries(Random& random, const Values& v, Index batch, Index heads, Index group,
                             Index len, Index dim);

// x without row i.
Tensor4<float> without_row(const Tensor4<float>& x, Index i);
// x with row i of every head set to this value.
Tensor4<float> with_row(Tensor4<float> x, Index i, float value);

}  // namespace quoka_test
