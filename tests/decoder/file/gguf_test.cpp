// The reader of GGUF files: what is written comes back, and a damaged or hostile file is an error
// that names the byte and both numbers, never a read out of bounds or a huge allocation.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "decoder/file/gguf.hpp"
#include "decoder/file/gguf_writer.hpp"

namespace {

using namespace quoka_decoder;
using Bytes = std::vector<std::byte>;

// Bytes that count up from `first`.
Bytes counting(std::size_t size, unsigned first = 0) {
  Bytes result(size);
  for (std::size_t i = 0; i < size; ++i) result[i] = static_cast<std::byte>((first + i) & 255);
  return result;
}

template <class T>
void put(Bytes& bytes, std::size_t offset, T value) {
  ASSERT_LE(offset + sizeof(T), bytes.size());
  std::memcpy(bytes.data() + offset, &value, sizeof(T));
}

template <class T>
Bytes raw(const T& value) {
  Bytes result(sizeof(T));
  std::memcpy(result.data(), &value, sizeof(T));
  return result;
}

Bytes operator+(Bytes left, const Bytes& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

// The message of the std::runtime_error that this throws.
template <class Run>
std::string message_of(Run&& run) {
  try {
    run();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "nothing was thrown";
}

std::string refusal(const Bytes& bytes) {
  return message_of([&] { GgufFile::parse(bytes, "f"); });
}

// A file with this one key.
template <class V>
Bytes with_key(const std::string& key, const V& value) {
  GgufWriter writer;
  writer.add(key, value);
  return writer.bytes();
}

// What comes back for a value of type V, read as T.
template <class T, class V>
T through_file(const V& value) {
  const Bytes bytes = with_key("some.key", value);
  return GgufFile::parse(bytes, "f").get<T>("some.key");
}

// ---- values -------------------------------------------------------------------------------------

template <class T>
class GgufNumbers : public ::testing::Test {};
using Numbers =
    ::testing::Types<std::uint8_t, std::int8_t, std::uint16_t, std::int16_t, std::uint32_t,
                     std::int32_t, std::uint64_t, std::int64_t, float, double>;
TYPED_TEST_SUITE(GgufNumbers, Numbers);

TYPED_TEST(GgufNumbers, ComeBackAtTheirLimits) {
  using Limits = std::numeric_limits<TypeParam>;
  for (const TypeParam value : {Limits::lowest(), TypeParam(0), TypeParam(37), Limits::max()}) {
    EXPECT_EQ((through_file<TypeParam>(value)), value);
  }
}

TYPED_TEST(GgufNumbers, ArraysComeBack) {
  using Limits = std::numeric_limits<TypeParam>;
  using Array = std::vector<TypeParam>;
  const Array values = {Limits::lowest(), TypeParam(1), TypeParam(2), TypeParam(3), Limits::max()};
  EXPECT_EQ((through_file<Array>(values)), values);
  EXPECT_EQ((through_file<Array>(Array())), Array());
}

TEST(GgufValues, BoolsAndStringsComeBack) {
  EXPECT_TRUE(through_file<bool>(true));
  EXPECT_FALSE(through_file<bool>(false));
  const std::string text = std::string("a\0b\n", 4) + "\xc3\xa9 \xe2\x96\x81";
  EXPECT_EQ(through_file<std::string>(text), text);
  EXPECT_EQ(through_file<std::string>(std::string()), "");
  const std::vector<std::string> strings = {"", text, "</s>", std::string(501, 'x')};
  EXPECT_EQ(through_file<std::vector<std::string>>(strings), strings);
  const std::vector<bool> flags = {true, false, true};
  EXPECT_EQ(through_file<std::vector<bool>>(flags), flags);
}

TEST(GgufValues, IntegersAreReadInAnyWidthThatHoldsThem) {
  EXPECT_EQ(through_file<std::int64_t>(std::uint8_t{200}), 200);
  EXPECT_EQ(through_file<std::uint32_t>(std::int64_t{4'294'967'295}), 4'294'967'295U);
  EXPECT_EQ(through_file<Index>(std::uint32_t{32'000}), 32'000);
  EXPECT_EQ(through_file<std::int32_t>(std::int8_t{-3}), -3);
  EXPECT_EQ((through_file<std::vector<std::int32_t>>(std::vector<std::uint16_t>{1, 65'535})),
            (std::vector<std::int32_t>{1, 65'535}));
}

// The key "some.key" begins at byte 24, its type at 40 and its value at 44.
TEST(GgufValues, AnIntegerOutOfRangeIsRefusedWithTheRange) {
  EXPECT_EQ(message_of([] { through_file<std::int32_t>(std::uint32_t{2'147'483'648}); }),
            "f: at byte 44: key 'some.key' holds 2147483648; INT32 goes from -2147483648 to "
            "2147483647");
  EXPECT_EQ(message_of([] { through_file<std::uint64_t>(std::int8_t{-1}); }),
            "f: at byte 44: key 'some.key' holds -1; UINT64 goes from 0 to 18446744073709551615");
  EXPECT_EQ(message_of([] { through_file<std::int8_t>(std::uint8_t{128}); }),
            "f: at byte 44: key 'some.key' holds 128; INT8 goes from -128 to 127");
}

TEST(GgufValues, AnElementOutOfRangeIsRefusedAtItsByte) {
  EXPECT_EQ(message_of([] {
              through_file<std::vector<std::uint32_t>>(std::vector<std::int32_t>{5, 6, -7});
            }),
            "f: at byte 64: key 'some.key' holds -7; UINT32 goes from 0 to 4294967295");
}

TEST(GgufValues, FloatsAndDoublesAreReadAsEither) {
  EXPECT_EQ(through_file<double>(0.1F), static_cast<double>(0.1F));
  EXPECT_EQ(through_file<float>(1e-5), 1e-5F);
  EXPECT_EQ(through_file<float>(std::numeric_limits<double>::infinity()),
            std::numeric_limits<float>::infinity());
  EXPECT_NE(message_of([] { through_file<float>(1e39); }).find("holds 1e+39; FLOAT32 goes from"),
            std::string::npos);
}

TEST(GgufValues, AnotherTypeIsRefusedWithTheTypeFoundAndTheTypeWanted) {
  EXPECT_EQ(message_of([] { through_file<std::int32_t>(1.0F); }),
            "f: at byte 44: key 'some.key' is FLOAT32; INT32 is wanted");
  EXPECT_EQ(message_of([] { through_file<float>(std::uint32_t{1}); }),
            "f: at byte 44: key 'some.key' is UINT32; FLOAT32 is wanted");
  EXPECT_EQ(message_of([] { through_file<bool>(std::uint8_t{1}); }),
            "f: at byte 44: key 'some.key' is UINT8; BOOL is wanted");
  EXPECT_EQ(message_of([] { through_file<std::uint64_t>(true); }),
            "f: at byte 44: key 'some.key' is BOOL; UINT64 is wanted");
  EXPECT_EQ(message_of([] { through_file<std::vector<std::string>>(std::string("x")); }),
            "f: at byte 44: key 'some.key' is STRING; an array of STRING is wanted");
  EXPECT_EQ(message_of([] { through_file<float>(std::vector<float>{1}); }),
            "f: at byte 56: key 'some.key' is an array of FLOAT32; FLOAT32 is wanted");
}

TEST(GgufValues, AMissingKeyIsRefusedWithTheTypeWanted) {
  const Bytes bytes = with_key("a", 1);
  EXPECT_EQ(message_of([&] { GgufFile::parse(bytes, "f").get<std::vector<float>>("b"); }),
            "f: there is no key 'b' (an array of FLOAT32 is wanted) among its 1");
}

TEST(GgufValues, TheFallbackServesForAMissingKeyAlone) {
  const Bytes bytes = with_key("a", std::uint32_t{7});
  const GgufFile file = GgufFile::parse(bytes, "f");
  EXPECT_TRUE(file.has("a"));
  EXPECT_FALSE(file.has("b"));
  EXPECT_EQ(file.get_or("a", 3), 7);
  EXPECT_EQ(file.get_or("b", 3), 3);
  EXPECT_EQ(file.get_or<std::string>("b", "x"), "x");
  EXPECT_THROW(file.get_or<std::string>("a", "x"), std::runtime_error);
}

TEST(GgufValues, KeysAreListed) {
  GgufWriter writer;
  writer.add("b.c", 1);
  writer.add("a", "text");
  const Bytes bytes = writer.bytes();
  EXPECT_EQ(GgufFile::parse(bytes, "f").keys(), (std::vector<std::string>{"a", "b.c"}));
}

// ---- tensors ------------------------------------------------------------------------------------

TEST(GgufTensors, ComeBackWithShapeTypeAndData) {
  GgufWriter writer;
  const Bytes first = counting(4 * 3 * 5), second = counting(2 * 34, 7), third = counting(2);
  writer.add_tensor("first", {3, 5}, TensorType::f32, first);
  writer.add_tensor("second", {32, 1, 2, 1}, TensorType::q8_0, second);
  writer.add_tensor("third", {}, TensorType::f16, third);
  const Bytes bytes = writer.bytes();
  const GgufFile file = GgufFile::parse(bytes, "f");
  ASSERT_EQ(file.tensors().size(), 3U);
  EXPECT_EQ(file.tensors()[1].name, "second");

  const GgufTensor& matrix = file.tensor("first");
  EXPECT_EQ(matrix.columns(), 3);
  EXPECT_EQ(matrix.rows(), 5);
  EXPECT_EQ(matrix.type, TensorType::f32);
  EXPECT_TRUE(std::ranges::equal(matrix.data, first));

  const GgufTensor& blocks = file.tensor("second");
  EXPECT_EQ(blocks.shape, (std::vector<Index>{32, 1, 2, 1}));
  EXPECT_EQ(blocks.rows(), 2);
  EXPECT_TRUE(std::ranges::equal(blocks.data, second));

  const GgufTensor& scalar = file.tensor("third");
  EXPECT_EQ(scalar.columns(), 1);
  EXPECT_EQ(scalar.rows(), 1);
  EXPECT_TRUE(std::ranges::equal(scalar.data, third));
}

TEST(GgufTensors, AMissingOneIsNullOrRefusedByName) {
  GgufWriter writer;
  writer.add_tensor("t", {1}, {1.0F});
  const Bytes bytes = writer.bytes();
  const GgufFile file = GgufFile::parse(bytes, "f");
  EXPECT_EQ(file.find_tensor("u"), nullptr);
  EXPECT_EQ(message_of([&] { file.tensor("u"); }), "f: there is no tensor 'u' among its 1");
}

TEST(GgufTensors, OneOfAnotherTypeIsRefusedByItsTypesNameWhenItIsAskedFor) {
  GgufWriter writer;
  writer.add("a", 5);
  writer.add_tensor("t", {256}, static_cast<TensorType>(16), counting(66));
  writer.add_tensor("u", {2}, {1.0F, 2.0F});
  const Bytes bytes = writer.bytes();
  const GgufFile file = GgufFile::parse(bytes, "f");
  EXPECT_EQ(file.get<int>("a"), 5);
  EXPECT_EQ(file.tensor("u").columns(), 2);
  EXPECT_EQ(file.tensors().size(), 1U);
  const std::string expected =
      "f: at byte 62: tensor 't' has type IQ2_XXS (16); this program reads F32, F16, BF16, Q4_0, "
      "Q8_0, Q4_K, Q5_K, Q6_K";
  EXPECT_EQ(message_of([&] { file.tensor("t"); }), expected);
  EXPECT_EQ(message_of([&] { file.find_tensor("t"); }), expected);
}

class GgufAlignment : public ::testing::TestWithParam<std::uint32_t> {};
INSTANTIATE_TEST_SUITE_P(Gguf, GgufAlignment, ::testing::Values(1, 2, 8, 32, 64, 4096));

TEST_P(GgufAlignment, IsHonoured) {
  GgufWriter writer(3, GetParam());
  const Bytes first = counting(12), second = counting(20, 9);
  writer.add_tensor("first", {3}, TensorType::f32, first);
  writer.add_tensor("second", {5}, TensorType::f32, second);
  const Bytes bytes = writer.bytes();
  const GgufFile file = GgufFile::parse(bytes, "f");
  EXPECT_TRUE(std::ranges::equal(file.tensor("first").data, first));
  EXPECT_TRUE(std::ranges::equal(file.tensor("second").data, second));
  EXPECT_EQ((file.tensor("second").data.data() - bytes.data()) % GetParam(), 0);
}

// ---- files --------------------------------------------------------------------------------------

TEST(GgufFiles, Version2IsRead) {
  GgufWriter writer(2);
  writer.add("a", "text");
  writer.add_tensor("t", {2}, {1.0F, 2.0F});
  const Bytes bytes = writer.bytes();
  const GgufFile file = GgufFile::parse(bytes, "f");
  EXPECT_EQ(file.get<std::string>("a"), "text");
  EXPECT_EQ(file.tensor("t").columns(), 2);
}

TEST(GgufFiles, OneWithoutKeysAndTensorsIsRead) {
  const Bytes bytes = GgufWriter().bytes();
  ASSERT_EQ(bytes.size(), 24U);
  const GgufFile file = GgufFile::parse(bytes, "f");
  EXPECT_TRUE(file.keys().empty());
  EXPECT_TRUE(file.tensors().empty());
}

TEST(GgufFiles, AMappedFileOutlivesAMove) {
  const std::string path =
      (std::filesystem::temp_directory_path() / ("quoka_" + std::to_string(::getpid()) + ".gguf"))
          .string();
  GgufWriter writer;
  writer.add("a", 37);
  const Bytes data = counting(28);
  writer.add_tensor("t", {7}, TensorType::f32, data);
  writer.write(path);
  GgufFile opened(path);
  std::filesystem::remove(path);
  const GgufFile file = std::move(opened);
  EXPECT_EQ(file.name(), path);
  EXPECT_EQ(file.get<int>("a"), 37);
  EXPECT_TRUE(std::ranges::equal(file.tensor("t").data, data));
}

TEST(GgufFiles, AMissingFileIsRefusedByItsPath) {
  EXPECT_EQ(message_of([] { GgufFile("/nowhere/model.gguf"); }),
            "/nowhere/model.gguf: cannot open: No such file or directory");
}

// ---- hostile files ------------------------------------------------------------------------------

TEST(GgufHostile, AnotherMagicOrVersion) {
  EXPECT_EQ(refusal({}), "f: at byte 0: the magic takes 4 bytes; 0 remain");
  Bytes bytes = GgufWriter().bytes();
  bytes[3] = std::byte('X');
  EXPECT_EQ(refusal(bytes), "f: at byte 0: the file does not begin with GGUF");
  EXPECT_EQ(refusal(GgufWriter(1).bytes()), "f: at byte 4: the version is 1; 2 and 3 are read");
  EXPECT_EQ(refusal(GgufWriter(4).bytes()), "f: at byte 4: the version is 4; 2 and 3 are read");
  EXPECT_EQ(refusal(GgufWriter(0x03000000).bytes()),
            "f: at byte 4: the file is big-endian; little-endian files are read");
}

TEST(GgufHostile, CountsBeyondTheFile) {
  Bytes bytes = with_key("k", 1);  // 41 bytes
  put(bytes, 8, std::uint64_t{2});
  EXPECT_EQ(refusal(bytes),
            "f: at byte 8: the number of tensors is 2; the 25 bytes that remain hold at most 1");
  put(bytes, 8, std::uint64_t{0});
  put(bytes, 16, ~std::uint64_t{0});
  EXPECT_EQ(refusal(bytes),
            "f: at byte 16: the number of keys is 18446744073709551615; the 17 bytes that remain "
            "hold at most 1");
}

// One key "k": its length at byte 24, its type at 33, its value at 37.
TEST(GgufHostile, StringsLongerThanTheFile) {
  Bytes bytes = with_key("k", "text");
  put(bytes, 24, std::uint64_t{1} << 63);
  EXPECT_EQ(refusal(bytes), "f: at byte 24: a key has 9223372036854775808 bytes; 17 remain");
  bytes = with_key("k", "text");
  put(bytes, 37, std::uint64_t{5});
  EXPECT_EQ(refusal(bytes), "f: at byte 37: a string of key 'k' has 5 bytes; 4 remain");
  bytes = with_key("k", std::vector<std::string>{"one", "two"});
  put(bytes, 60, ~std::uint64_t{0});
  EXPECT_EQ(refusal(bytes),
            "f: at byte 60: a string of key 'k' has 18446744073709551615 bytes; 3 remain");
}

TEST(GgufHostile, DuplicateKeys) {
  GgufWriter writer;
  writer.add("k", 1);
  writer.add("k", 2.0F);
  EXPECT_EQ(refusal(writer.bytes()), "f: at byte 41: key 'k' occurs twice");
}

TEST(GgufHostile, UnknownTypesOfValues) {
  GgufWriter writer;
  writer.add_raw("k", 13, counting(8));
  EXPECT_EQ(refusal(writer.bytes()), "f: at byte 33: key 'k' has type 13; types go from 0 to 12");
  GgufWriter elements;
  elements.add_raw("k", 9, raw(std::uint32_t{99}) + raw(std::uint64_t{0}));
  EXPECT_EQ(refusal(elements.bytes()), "f: at byte 37: key 'k' has type 99; types go from 0 to 12");
}

TEST(GgufHostile, ArraysOfArrays) {
  EXPECT_EQ(refusal(with_key("k", std::vector<std::vector<float>>{{1.0F}})),
            "f: at byte 37: key 'k' is an array of arrays; none are read");
}

TEST(GgufHostile, ArraysLargerThanTheFile) {
  for (const std::uint64_t count : {std::uint64_t{3}, std::uint64_t{1} << 62, ~std::uint64_t{0}}) {
    Bytes bytes = with_key("k", std::vector<float>{1, 2});
    put(bytes, 41, count);
    EXPECT_EQ(refusal(bytes), "f: at byte 49: key 'k' holds " + std::to_string(count) +
                                  " of FLOAT32; 8 bytes remain, enough for 2");
  }
  Bytes bytes = with_key("k", std::vector<std::string>{"abc", "defghij"});
  put(bytes, 41, std::uint64_t{4});
  EXPECT_EQ(refusal(bytes),
            "f: at byte 49: key 'k' holds 4 of STRING; 26 bytes remain, enough for 3");
}

TEST(GgufHostile, ABoolThatIsNeither) {
  GgufWriter writer;
  writer.add_raw("k", 7, {std::byte{2}});
  EXPECT_EQ(refusal(writer.bytes()), "f: at byte 37: key 'k' has a BOOL of 2; 0 or 1 is needed");
  Bytes bytes = with_key("k", std::vector<bool>{true, false, true});
  put(bytes, 51, std::uint8_t{255});
  EXPECT_EQ(refusal(bytes), "f: at byte 51: key 'k' has a BOOL of 255; 0 or 1 is needed");
}

TEST(GgufHostile, Alignments) {
  for (const std::uint32_t alignment : {0U, 3U, 33U, 0xffffffffU}) {
    EXPECT_EQ(refusal(with_key("general.alignment", alignment)),
              "f: at byte 53: general.alignment is " + std::to_string(alignment) +
                  "; a power of 2 is needed");
  }
  EXPECT_EQ(refusal(with_key("general.alignment", "32")),
            "f: at byte 53: key 'general.alignment' is STRING; UINT32 is wanted");
}

TEST(GgufHostile, AnAlignmentBeyondTheFileLeavesNoData) {
  GgufWriter writer;
  writer.add("general.alignment", std::uint32_t{1} << 31);
  writer.add_tensor("t", {1}, {1.0F});
  EXPECT_EQ(refusal(writer.bytes()),
            "f: at byte 82: tensor 't' has 4 bytes of data at offset 0; the file has 0 bytes of "
            "data");
}

// One tensor "t": its rank at byte 33, its extents from 37 on, then its type and its offset.
Bytes with_tensor(const std::vector<Index>& shape, TensorType type, const Bytes& data) {
  GgufWriter writer;
  writer.add_tensor("t", shape, type, data);
  return writer.bytes();
}

TEST(GgufHostile, MoreThanFourDimensions) {
  EXPECT_EQ(refusal(with_tensor({1, 1, 1, 1, 1}, TensorType::f32, counting(4))),
            "f: at byte 33: tensor 't' has 5 dimensions; up to 4 are read");
}

TEST(GgufHostile, ExtentsOfZero) {
  EXPECT_EQ(refusal(with_tensor({3, 0}, TensorType::f32, counting(12))),
            "f: at byte 45: tensor 't': extent 1 is 0");
}

TEST(GgufHostile, ExtentsWhoseProductOverflows) {
  EXPECT_EQ(refusal(with_tensor({-1}, TensorType::f32, counting(12))),
            "f: at byte 37: tensor 't': extent 0 is 18446744073709551615, after a product of 1; up "
            "to 9223372036854775807 values are read");
  EXPECT_EQ(refusal(with_tensor({Index{1} << 32, Index{1} << 31}, TensorType::f32, counting(12))),
            "f: at byte 45: tensor 't': extent 1 is 2147483648, after a product of 4294967296; up "
            "to 9223372036854775807 values are read");
}

TEST(GgufHostile, BytesThatOverflow) {
  EXPECT_EQ(refusal(with_tensor({Index{1} << 62}, TensorType::f32, counting(12))),
            "f: at byte 45: tensor 't' has 4611686018427387904 blocks of 4 bytes; up to "
            "9223372036854775807 bytes are read");
}

TEST(GgufHostile, RowsWithinABlock) {
  EXPECT_EQ(refusal(with_tensor({48, 2}, TensorType::q8_0, counting(3 * 34))),
            "f: at byte 53: tensor 't' has rows of 48 values; Q8_0 needs a multiple of 32");
  EXPECT_EQ(refusal(with_tensor({128, 2}, TensorType::q4_k, counting(144))),
            "f: at byte 53: tensor 't' has rows of 128 values; Q4_K needs a multiple of 256");
}

TEST(GgufHostile, MisalignedOffsets) {
  Bytes bytes = with_tensor({3}, TensorType::f32, counting(12));
  put(bytes, 49, std::uint64_t{4});
  EXPECT_EQ(
      refusal(bytes),
      "f: at byte 49: tensor 't' has the offset 4; a multiple of 32, the alignment, is needed");
}

TEST(GgufHostile, DataBeyondTheEnd) {
  for (const std::uint64_t offset :
       {std::uint64_t{32}, std::uint64_t{1} << 63, ~std::uint64_t{31}}) {
    Bytes bytes = with_tensor({3}, TensorType::f32, counting(12));
    put(bytes, 49, offset);
    EXPECT_EQ(refusal(bytes), "f: at byte 49: tensor 't' has 12 bytes of data at offset " +
                                  std::to_string(offset) + "; the file has 12 bytes of data");
  }
  EXPECT_EQ(refusal(with_tensor({3}, TensorType::f32, counting(11))),
            "f: at byte 49: tensor 't' has 12 bytes of data at offset 0; the file has 11 bytes of "
            "data");
}

TEST(GgufHostile, DuplicateTensors) {
  GgufWriter writer;
  writer.add_tensor("t", {1}, {1.0F});
  writer.add_tensor("t", {1}, {2.0F});
  EXPECT_EQ(refusal(writer.bytes()), "f: at byte 57: tensor 't' occurs twice");
  GgufWriter unread;
  unread.add_tensor("t", {256}, static_cast<TensorType>(16), counting(66));
  unread.add_tensor("t", {1}, {2.0F});
  EXPECT_EQ(refusal(unread.bytes()), "f: at byte 57: tensor 't' occurs twice");
}

TEST(GgufHostile, NamesAreShownWithoutControlCharactersAndShortened) {
  GgufWriter writer;
  writer.add_raw("\x1b[2J" + std::string(200, 'x'), 13, {});
  EXPECT_EQ(refusal(writer.bytes()), "f: at byte 236: key '?[2J" + std::string(76, 'x') +
                                         "...' has type 13; types go from 0 to 12");
}

}  // namespace
