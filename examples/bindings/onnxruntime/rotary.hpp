// Rotary position embedding, as GroupQueryAttention has it: pairs of a row's first 2 * half
// channels are turned by the angle of their token's position, of which cos_cache and sin_cache
// [positions, half] have cosine and sine. A pair is channels i and half + i, or, interleaved, 2 i
// and 2 i + 1.
#pragma once

#include "call.hpp"

#include <vector>

namespace quoka_onnxruntime {

// The rotation of one worker.
class Rotary {
 public:
  Rotary(const Call& call, bool interleaved)
      : cos_(call.in[in_cos_cache]),
        sin_(call.in[in_sin_cache]),
        half_(cos_.sizes[1]),
        interleaved_(interleaved),
        angles_(static_cast<std::size_t>(2 * half_)) {}

  // Rows that are turned from now on are of a token at this position.
  void stand_at(Index position) {
    widen(cos_, position, angles_.data());
    widen(sin_, position, angles_.data() + half_);
  }
  void turn(float* row) const {
    const float *const cos = angles_.data(), *const sin = cos + half_;
    const Index step = interleaved_ ? 2 : 1, other = interleaved_ ? 1 : half_;
    for (Index i = 0; i < half_; ++i) {
      float &x = row[i * step], &y = row[i * step + other];
      const float turned = x * cos[i] - y * sin[i];
      y = x * sin[i] + y * cos[i];
      x = turned;
    }
  }

 private:
  void widen(const Tensor& from, Index position, float* to) const {
    from.format->widen(from.data + position * half_ * from.bytes_of_element(), {half_}, to);
  }

  Tensor cos_, sin_;
  Index half_;
  bool interleaved_;
  std::vector<float> angles_;  // [2, half]
};

}  // namespace quoka_onnxruntime
