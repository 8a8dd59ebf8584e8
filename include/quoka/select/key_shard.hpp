// What a selector knows of the other shards when its keys are one shard of a longer cache
// (distributed/sharded_prefill.hpp). Without it the keys of a call are all there are.
//
// A shard is some blocks of consecutive keys. Calls with a shard are collective: all shards make the
// same ones, with the same queries.
#pragma once

#include <quoka/base/index.hpp>

#include <cstdint>
#include <span>

namespace quoka {
inline namespace QUOKA_ABI {

class KeyShard {
 public:
  virtual Index kv_len() const = 0;           // keys of all shards
  virtual Index position(Index i) const = 0;  // of the shard's key i among them; ascending in i

  // Element by element over all shards; collective.
  virtual void maximum(std::span<float> x) const = 0;
  // Likewise their sum.
  virtual void sum(std::span<std::int64_t> x) const = 0;

 protected:
  ~KeyShard() = default;
};

}  // namespace QUOKA_ABI
}  // namespace quoka
