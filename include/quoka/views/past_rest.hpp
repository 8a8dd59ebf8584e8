// What stands for the past keys that a selection leaves out: one more key and value of each query head.
//
//   logit   scale * q . key, capped if asked, + log_count
//   value   value
//
// As if so many keys were this one. So attention that selects gives what it leaves out the weight that it would have had,
// about, in place of none: without it the kept keys share all of the softmax.
// select/rest_of_head.hpp makes it.
#pragma once

#include <quoka/base/buffer.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

// Of every query head of a Selection.
class PastRest {
 public:
  // Of one query head.
  struct Head {
    float log_count;     // natural logarithm of how many keys it stands for; -infinity: none
    const float* key;    // [k_dim]
    const float* value;  // [v_dim]
  };

  bool absent() const { return heads_ == 0; }  // nothing was left out, or it is not kept
  Index heads() const { return heads_; }       // batch * q_heads
  Index k_dim() const { return k_dim_; }       // channels of a key
  Index v_dim() const { return v_dim_; }       // of a value
  // Of head b * q_heads + q_head.
  Head head(Index head) const {
    const float* const x = numbers_.data() + head * width();
    return {x[0], x + 1, x + 1 + k_dim_};
  }

  // Takes this shape. Each head's row() is then to be written: log_count, the key, the value.
  void reshape(Index heads, Index k_dim, Index v_dim) {
    heads_ = heads, k_dim_ = k_dim, v_dim_ = v_dim;
    numbers_.resize(static_cast<std::size_t>(heads * width()));
  }
  // Of one head, to be written: [1 + k_dim + v_dim].
  float* row(Index head) { return numbers_.data() + head * width(); }
  void clear() { heads_ = 0; }  // absent; memory is kept

 private:
  Index width() const { return 1 + k_dim_ + v_dim_; }

  Index heads_ = 0, k_dim_ = 0, v_dim_ = 0;
  detail::PlainVector<float> numbers_;  // [heads, width]
};

}  // namespace QUOKA_ABI
}  // namespace quoka
