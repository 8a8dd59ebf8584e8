// The reader of GGUF files: the contents of a file, and hostile files.
#include "support/gguf_file.hpp"

#include "fuzz/gguf_fuzz.hpp"
#include "support/gguf_writer.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace quoka_examples {
namespace {

using Bytes = std::vector<std::byte>;

GgufWriter sound(std::uint32_t version = 3, std::uint32_t alignment = 32) {
  GgufWriter file(version, alignment);
  file.add("a.text", std::string("small"));
  file.add("a.number", std::uint32_t{7});
  file.add("a.half", 0.5f);
  file.add("a.negative", std::int64_t{-3});
  file.add("a.flag", true);
  file.add("a.list", std::vector<std::string>{"one", "two"});
  file.add_tensor("m", {3, 2}, {1, 2, 3, 4, 5, 6});
  Bytes halves(4);
  const Eigen::half x[2] = {Eigen::half(0.25f), Eigen::half(-2.0f)};
  std::memcpy(halves.data(), x, 4);
  file.add_tensor("h", {2}, TensorType::f16, halves);
  return file;
}

// The error of opening these bytes, and then reading them so; "": none.
template <class Read = void (*)(const GgufFile&)>
std::string refusal(
    const Bytes& bytes, Read read = [](const GgufFile&) {}) {
  try {
    const GgufFile file(bytes, "FILE");
    read(file);
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

void expect_refused(const Bytes& bytes, const std::string& part) {
  EXPECT_NE(refusal(bytes).find(part), std::string::npos) << refusal(bytes) << ", not " << part;
}

TEST(GgufFile, HoldsWhatWasWritten) {
  for (const std::uint32_t version : {2u, 3u})
    for (const std::uint32_t alignment : {1u, 32u, 256u}) {
      const Bytes bytes = sound(version, alignment).bytes();
      const GgufFile file(bytes, "FILE");
      EXPECT_EQ(file.text("a.text"), "small");
      EXPECT_EQ(file.integer("a.number"), 7);
      EXPECT_EQ(file.number("a.half"), 0.5);
      EXPECT_EQ(file.number("a.negative"), -3);
      EXPECT_EQ(file.number("a.flag"), 1);
      EXPECT_TRUE(file.has("a.list"));
      EXPECT_FALSE(file.has("b"));
      const auto m = file.matrix("m", 2, 3);
      for (Index i = 0; i < 6; ++i) EXPECT_EQ(m.data()[i], static_cast<float>(i + 1));
      EXPECT_EQ(file.matrix("h", 1, 2)(0, 0), 0.25f);
      EXPECT_EQ(file.matrix("h", 1, 2)(0, 1), -2.0f);
    }
}

TEST(GgufFile, NamesWhatIsNotThereOrOtherwise) {
  GgufWriter writer = sound();
  writer.add_tensor("q", {32}, TensorType::q8_0, Bytes(34));
  const std::pair<void (*)(const GgufFile&), const char*> all[] = {
      {[](const GgufFile& file) { file.number("b"); }, "there is no key b"},
      {[](const GgufFile& file) { file.number("a.text"); }, "key a.text is not a number"},
      {[](const GgufFile& file) { file.text("a.list"); }, "key a.list is not a text"},
      {[](const GgufFile& file) { file.integer("a.half"); }, "key a.half is 0.5"},
      {[](const GgufFile& file) { file.integer("a.negative"); }, "key a.negative is -3"},
      {[](const GgufFile& file) { file.matrix("x", 1, 1); }, "there is no tensor x"},
      {[](const GgufFile& file) { file.matrix("m", 3, 2); },
       "tensor m has 2 rows of 3, not 3 of 2"},
      {[](const GgufFile& file) { file.matrix("q", 1, 32); },
       "tensor q has type 8; 0 (F32) and 1 (F16) are read"}};
  for (const auto& [read, says] : all)
    EXPECT_TRUE(refusal(writer.bytes(), read).starts_with(std::string("FILE: ") + says))
        << refusal(writer.bytes(), read) << ", not " << says;
}

TEST(GgufFile, AFileThatIsCutAnywhereIsRefused) {
  const Bytes whole = sound().bytes();
  ASSERT_EQ(refusal(whole), "");
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_NE(refusal({whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)}), "")
        << size << " of " << whole.size() << " bytes";
}

TEST(GgufFile, HostileNumbersAreRefused) {
  const auto with = [](std::size_t at, auto number) {
    Bytes bytes = sound().bytes();
    std::memcpy(bytes.data() + at, &number, sizeof number);
    return bytes;
  };
  expect_refused(with(0, std::uint32_t{1}), "does not begin with GGUF");
  expect_refused(with(4, std::uint32_t{4}), "the version is 4; 2 and 3 are read");
  expect_refused(with(8, ~std::uint64_t{0}), "the list of tensors takes 18446744073709551615");
  expect_refused(with(16, std::uint64_t{1} << 60), "the list of keys takes 1152921504606846976");
  expect_refused(with(24, ~std::uint64_t{0}), "a key takes 18446744073709551615");

  const std::pair<void (*)(GgufWriter&), const char*> all[] = {
      {[](GgufWriter& of) { of.add("k", true), of.add("k", true); }, "key k occurs twice"},
      {[](GgufWriter& of) { of.add_raw("k", 13, Bytes(8)); },
       "key k has type 13; types go from 0 to 12"},
      {[](GgufWriter& of) {
         Bytes array(16);
         array[0] = std::byte{9};
         of.add_raw("k", 9, array);
       },
       "key k is an array of arrays"},
      {[](GgufWriter& of) { of.add("general.alignment", std::uint32_t{24}); },
       "general.alignment is 24, but must be a power of 2"},
      {[](GgufWriter& of) { of.add("general.alignment", std::uint32_t{0}); },
       "general.alignment is 0"},
      {[](GgufWriter& of) { of.add_tensor("t", {1}, {1}), of.add_tensor("t", {1}, {1}); },
       "tensor t occurs twice"},
      {[](GgufWriter& of) {
         of.add_tensor("t", {1, 1, 1, 1, 1}, {1});
       },
       "tensor t has 5 dimensions; up to 4 are read"},
      {[](GgufWriter& of) { of.add_tensor("t", {0}, std::vector<float>{}); },
       "tensor t has extent 0"},
      {[](GgufWriter& of) {
         of.add_tensor("t", {Index{1} << 32, Index{1} << 31}, {1});
       },
       "extent 2147483648 after a product of 4294967296"},
      {[](GgufWriter& of) { of.add_tensor("t", {100}, {1}); },
       "tensor t has 400 bytes at offset 0; the file has 4 bytes"}};
  for (const auto& [write, says] : all) {
    GgufWriter file;
    write(file);
    expect_refused(file.bytes(), says);
  }
}

// Three bytes of a valid file are changed: it is read whole or refused, and nothing else is thrown.
TEST(GgufFile, MutatedFilesAreReadOrRefused) {
  const Bytes whole = sound().bytes();
  int refused = 0;
  constexpr int files = 3000;
  for (int i = 0; i < files; ++i) {
    std::mt19937 random(static_cast<unsigned>(i));
    Bytes bytes = whole;
    for (int n = 0; n < 3; ++n) bytes[random() % bytes.size()] = static_cast<std::byte>(random());
    EXPECT_NO_THROW(refused += quoka_fuzz::read_gguf(bytes).refusal.empty() ? 0 : 1) << i;
  }
  EXPECT_GT(refused, files / 10);
  EXPECT_LT(refused, files);
}

}  // namespace
}  // namespace quoka_examples
