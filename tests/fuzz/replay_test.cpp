// Every fuzzer on inputs from seeds and on those that were kept (corpus/): inputs that once failed, and a few of each
// kind.

#include "fuzz/attention_fuzz.hpp"
#include "fuzz/top_k_fuzz.hpp"
#include "fuzz/settings_fuzz.hpp"
#include "fuzz/gguf_fuzz.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>

namespace {

using quoka_fuzz::Input;

std::vector<char> kept(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void replay(void (*fuzz)(Input), const std::string& name, int seeds) {
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(QUOKA_FUZZ_CORPUS "/" + name)) {
    SCOPED_TRACE(entry.path().string());
    const std::vector<char> bytes = kept(entry.path());
    EXPECT_NO_THROW(fuzz({reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size()}));
    ++files;
  }
  EXPECT_GT(files, 0);
  for (int seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(static_cast<unsigned>(seed));
    std::vector<std::uint8_t> bytes(64);
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
    EXPECT_NO_THROW(fuzz(bytes));
  }
}

TEST(FuzzReplay, Attention) { replay(quoka_fuzz::fuzz_attention, "attention", 300); }
TEST(FuzzReplay, TopK) { replay(quoka_fuzz::fuzz_top_k, "top_k", 1000); }
TEST(FuzzReplay, Settings) { replay(quoka_fuzz::fuzz_settings, "settings", 100); }
TEST(FuzzReplay, Gguf) {
  replay(quoka_fuzz::fuzz_gguf, "gguf", 1000);
  const std::vector<char> whole =
      kept(QUOKA_FUZZ_CORPUS "/gguf/whole");  // or the fuzzer would begin with nothing
  const auto read = quoka_fuzz::read_gguf(std::as_bytes(std::span(whole)));
  EXPECT_EQ(read.refusal, "");
  EXPECT_EQ(read.tensors, 2u);
}

// The fuzzers notice: a promise that is broken throws.
TEST(FuzzReplay, ABrokenPromiseThrows) { EXPECT_THROW(quoka_fuzz::broken("so"), std::logic_error); }

}  // namespace
