// Files near a sound one: cut at every length, and mutated with a fixed seed. Each is read whole or
// refused with a byte within it; nothing else may happen, least of all under a sanitizer.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "decoder/file/gguf.hpp"
#include "decoder/gguf_fuzz.hpp"
#include "decoder/file/gguf_writer.hpp"

namespace {

using namespace quoka_decoder;
using Bytes = std::vector<std::byte>;

// A file with every type of value, alone and in arrays, and a tensor of every type.
struct Sample {
  Bytes bytes;
  std::size_t header = 0;  // bytes before the padding and the data
};

template <class... Ts>
void add_each(GgufWriter& writer) {
  int number = 0;
  (writer.add("one." + std::to_string(number++), Ts{}), ...);
  (writer.add("many." + std::to_string(number++), std::vector<Ts>(3)), ...);
}

Sample sample() {
  GgufWriter writer(3, 16);
  add_each<std::uint8_t, std::int8_t, std::uint16_t, std::int16_t, std::uint32_t, std::int32_t,
           std::uint64_t, std::int64_t, float, double, bool, std::string>(writer);
  writer.add("tokens", std::vector<std::string>{"<s>", "a", "bc"});
  const std::size_t keys = writer.bytes().size();
  std::size_t names = 0;
  for (const TensorType type : readable_types) {
    const Index block = values_per_block(type);
    writer.add_tensor(name_of(type), {2 * block, 3, 1}, type,
                      Bytes(static_cast<std::size_t>(bytes_of(type, 6 * block)), std::byte{0x35}));
    names += std::strlen(name_of(type)) + 8 + 4 + 3 * 8 + 4 + 8;
  }
  return {writer.bytes(), keys + names};
}

TEST(GgufFuzz, TheSampleIsReadWhole) {
  const FuzzResult result = fuzz_one(sample().bytes);
  EXPECT_EQ(result.refusal, "");
  EXPECT_EQ(result.tensors, std::size(readable_types));
  EXPECT_EQ(result.keys, 1U + 2 * 12 + 1);
}

TEST(GgufFuzz, EveryTruncationIsRefusedWithinIt) {
  const Bytes whole = sample().bytes;
  for (std::size_t length = 0; length < whole.size(); ++length) {
    // A vector of this very size, so that a sanitizer sees a read behind it.
    const Bytes cut(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length));
    const std::string message = fuzz_one(cut).refusal;
    ASSERT_EQ(message.rfind("fuzz: at byte ", 0), 0U) << length << ": " << message;
    ASSERT_LE(std::stoull(message.substr(14)), length) << message;
  }
}

class Mutator {
 public:
  explicit Mutator(Sample from) : from_(std::move(from)) {}

  Bytes next() {
    Bytes bytes = from_.bytes;
    const int changes = 1 + below(3);
    for (int i = 0; i < changes && !bytes.empty(); ++i) change(bytes);
    return {bytes.begin(), bytes.end()};
  }

 private:
  int below(std::size_t end) { return static_cast<int>(random_() % end); }

  // Mostly in the header, where the numbers are.
  std::ptrdiff_t place(const Bytes& bytes) {
    const std::size_t end = below(8) == 0 ? bytes.size() : std::min(bytes.size(), from_.header);
    return below(end);
  }

  template <class T>
  void overwrite(Bytes& bytes, T value) {
    const std::ptrdiff_t at = place(bytes);
    const auto size = std::min(sizeof(T), bytes.size() - static_cast<std::size_t>(at));
    std::memcpy(bytes.data() + at, &value, size);
  }

  void change(Bytes& bytes) {
    const std::uint64_t powers = std::uint64_t{1} << below(64);
    switch (below(8)) {
      case 0:
        bytes[static_cast<std::size_t>(place(bytes))] ^= static_cast<std::byte>(1 << below(8));
        return;
      case 1:
        bytes[static_cast<std::size_t>(place(bytes))] = static_cast<std::byte>(below(256));
        return;
      case 2:
        return overwrite(bytes, powers - static_cast<std::uint64_t>(below(3)));
      case 3:
        return overwrite(bytes, ~std::uint64_t{0} - static_cast<std::uint64_t>(below(64)));
      case 4:
        return overwrite(bytes, static_cast<std::uint32_t>(below(48)));
      case 5:
        return overwrite(bytes, static_cast<std::uint64_t>(below(2 * bytes.size())));
      case 6:
        if (below(4) == 0) bytes.resize(static_cast<std::size_t>(place(bytes)));
        return;
      default:
        return splice(bytes);
    }
  }

  // A piece of the sample goes in at another place, over what was there or before it; or out.
  void splice(Bytes& bytes) {
    const std::ptrdiff_t from = place(from_.bytes), to = place(bytes);
    const auto length =
        std::min<std::ptrdiff_t>(below(64), static_cast<std::ptrdiff_t>(from_.bytes.size()) - from);
    const auto piece = from_.bytes.begin() + from;
    const auto here = bytes.begin() + to;
    const int kind = below(3);
    const auto room = std::min<std::ptrdiff_t>(length, bytes.end() - here);
    if (kind == 0) std::copy(piece, piece + room, here);
    if (kind == 1) bytes.insert(here, piece, piece + length);
    if (kind == 2) bytes.erase(here, here + room);
  }

  Sample from_;
  std::mt19937 random_{20};
};

TEST(GgufFuzz, EveryMutationIsReadWholeOrRefused) {
  Mutator mutator(sample());
  int read = 0, refused = 0;
  for (int i = 0; i < 20'000; ++i) {
    const Bytes bytes = mutator.next();
    const FuzzResult result = fuzz_one(bytes);
    (result.refusal.empty() ? read : refused) += 1;
    if (result.refusal.empty()) continue;
    ASSERT_EQ(result.refusal.rfind("fuzz: at byte ", 0), 0U) << i << ": " << result.refusal;
    ASSERT_LE(std::stoull(result.refusal.substr(14)), bytes.size()) << i;
  }
  EXPECT_GT(read, 2'000);
  EXPECT_GT(refused, 10'000);
}

}  // namespace
