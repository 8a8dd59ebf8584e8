// The reader of safetensors files, and the captures read through it. Written values come back. The committed capture
// holds the values that Python's struct module decodes from its source. A damaged or hostile file is an error that
// names both numbers, never a read out of bounds.

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/capture.hpp"
#include "support/safetensors.hpp"
#include "support/write_safetensors.hpp"

namespace {

using namespace quoka_examples;

// Each test has a folder of its own, so that they may run at the same time.
class Safetensors : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::temp_directory_path() /
              ("quoka_" + std::to_string(::getpid()) + "_" + test->name());
    std::filesystem::create_directory(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name = "test.safetensors") const {
    return (folder_ / name).string();
  }

  // Exactly these bytes.
  std::string write_bytes(const std::string& bytes) const {
    std::ofstream(path(), std::ios::binary | std::ios::trunc) << bytes;
    return path();
  }

  // A file with this header and this many bytes of data, which count up from 0.
  std::string write_file(const std::string& header, std::size_t data_bytes = 12) const {
    const std::uint64_t length = header.size();
    std::string bytes(8, '\0');
    std::memcpy(bytes.data(), &length, 8);
    bytes += header;
    for (std::size_t i = 0; i < data_bytes; ++i) bytes += static_cast<char>(i);
    return write_bytes(bytes);
  }

  // A file with one tensor "x" of this dtype, shape and offsets, given as JSON.
  std::string write_entry(const std::string& dtype, const std::string& shape,
                          const std::string& offsets) const {
    return write_file("{\"x\": {\"dtype\": " + dtype + ", \"shape\": " + shape +
                      ", \"data_offsets\": " + offsets + "}}");
  }

  // Runs, and expects a std::runtime_error whose text has the file's name and all the parts, which
  // | separates.
  template <class Run>
  void expect_refused(Run&& run, const std::string& parts) const {
    try {
      run();
      ADD_FAILURE() << "accepted, not refused by " << parts;
    } catch (const std::runtime_error& error) {
      std::istringstream all(folder_.string() + "|" + parts);
      for (std::string part; std::getline(all, part, '|');)
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
            << '"' << part << "\" is not in: " << error.what();
    }
  }
  void expect_file_refused(const std::string& file, const std::string& parts) const {
    expect_refused([&] { SafetensorsFile{file}; }, parts);
  }

  std::filesystem::path folder_;
};
using Hostile = Safetensors;  // files that must be refused
using Capture = Safetensors;

template <class T>
Tensor<T> counting(Index batch, Index heads, Index len, Index dim) {
  Tensor<T> tensor(batch, heads, len, dim);
  for (Index i = 0; i < tensor.size(); ++i)
    tensor.data()[i] = static_cast<T>(0.25f * static_cast<float>(i) - 3.0f);
  return tensor;
}

template <class T>
void expect_same_bits(const Tensor<T>& left, const Tensor<T>& right) {
  ASSERT_EQ(left.dimensions(), right.dimensions());
  const auto bytes = [](const Tensor<T>& x) {
    return std::as_bytes(std::span(x.data(), static_cast<std::size_t>(x.size())));
  };
  EXPECT_TRUE(std::ranges::equal(bytes(left), bytes(right)));
}

// ---- what is written comes back -----------------------------------------------------------------

TEST_F(Safetensors, EveryDtypeIsReadBitForBit) {
  const auto round_trips = [&]<class T>(std::type_identity<T>, Index batch) {
    auto x = counting<T>(batch, 3, 7, 5);
    std::memset(static_cast<void*>(x.data() + 20), 0xff, 3 * sizeof(T));  // NaN with a payload
    write_safetensors<T>(path(), {{"x", x}});
    const SafetensorsFile file(path());
    expect_same_bits(file.read<T>("x"), x);
    const TensorInfo& info = file.info("x");  // a batch of one is written as rank 3
    EXPECT_EQ(info.shape,
              batch == 1 ? (std::vector<Index>{3, 7, 5}) : (std::vector<Index>{batch, 3, 7, 5}));
    EXPECT_EQ(info.bytes, static_cast<std::size_t>(x.size()) * sizeof(T));
    EXPECT_EQ(info.offset + info.bytes, std::filesystem::file_size(path()));
    EXPECT_EQ(std::memcmp(info.data, x.data(), info.bytes), 0);
  };
  round_trips(std::type_identity<float>{}, 2);
  round_trips(std::type_identity<Eigen::half>{}, 2);
  round_trips(std::type_identity<Eigen::bfloat16>{}, 1);
}

TEST_F(Safetensors, SeveralTensorsAndMetadata) {
  const auto a = counting<float>(1, 1, 3, 1), b = counting<float>(1, 2, 1, 37);
  const Tensor<float> empty(1, 3, 0, 5);
  const Metadata metadata = {{"model", "tiny"}, {"quote", "\"\\\n\xC3\xA9"}};
  write_safetensors<float>(path(), {{"b", b}, {"a", a}, {"none", empty}}, metadata);
  static_assert(!std::is_copy_constructible_v<SafetensorsFile>);
  SafetensorsFile first(path());
  const SafetensorsFile file(std::move(first));  // stays open
  EXPECT_EQ(file.names(), (std::vector<std::string>{"a", "b", "none"}));
  EXPECT_TRUE(file.contains("a") && !file.contains("y") && !file.contains("__metadata__"));
  expect_same_bits(file.read_float("a"), a);
  expect_same_bits(file.read_float("b"), b);
  expect_same_bits(file.read_float("none"), empty);
  EXPECT_EQ(file.metadata(), metadata);
  EXPECT_TRUE(SafetensorsFile(write_file("{}")).metadata().empty());
}

TEST_F(Safetensors, HalvesAreReadAsFloatExactlyAndFloatsRoundedToNearestEven) {
  write_safetensors<Eigen::half>(path(), {{"x", counting<Eigen::half>(1, 3, 7, 5)}});
  expect_same_bits(SafetensorsFile(path()).read_float("x"), counting<float>(1, 3, 7, 5));
  write_safetensors<Eigen::bfloat16>(path(), {{"x", counting<Eigen::bfloat16>(1, 3, 7, 5)}});
  expect_same_bits(SafetensorsFile(path()).read_float("x"), counting<float>(1, 3, 7, 5));
  Tensor<float> x(1, 1, 1, 3);
  x.setValues({{{{1.0f + 0x1p-11f, 1.0f + 0x3p-11f, 1e6f}}}});
  write_safetensors<float>(path(), {{"x", x}});
  const auto read = SafetensorsFile(path()).read<Eigen::half>("x");
  EXPECT_EQ(static_cast<float>(read(0, 0, 0, 0)), 1.0f);
  EXPECT_EQ(static_cast<float>(read(0, 0, 0, 1)), 1.0f + 0x1p-9f);
  EXPECT_TRUE((Eigen::numext::isinf)(read(0, 0, 0, 2)));
}

TEST_F(Safetensors, UnalignedDataIsRead) {
  const std::string header =
      R"({"x": {"dtype": "F32", "shape": [1, 1, 2], "data_offsets": [3, 11]}})";
  const SafetensorsFile file(write_file(header + std::string(header.size() % 2 == 0 ? 1 : 2, ' ')));
  const auto x = file.read_float("x");
  const std::uint8_t expected[8] = {3, 4, 5, 6, 7, 8, 9, 10};
  EXPECT_EQ(std::memcmp(x.data(), expected, 8), 0);
  EXPECT_NO_THROW(file.read<Eigen::half>("x"));  // the path that converts
}

TEST_F(Safetensors, WhatIsNotReadIsRefusedByItsName) {
  const struct {
    const char *dtype, *shape, *offsets, *parts;
  } all[] = {{"\"F32\"", "[1, 3]", "[0, 12]", "'x'|rank 2|3 or 4"},
             {"\"I64\"", "[1, 1, 1]", "[0, 8]", "dtype is I64|F16, BF16 and F32 are read"},
             {"\"Q3_K\"", "[1, 1, 7]", "[0, 3]", "'x'|dtype is Q3_K"}};
  for (const auto& [dtype, shape, offsets, parts] : all) {
    const SafetensorsFile file(write_entry(dtype, shape, offsets));
    expect_refused([&] { file.read_float("x"); }, parts);
    expect_refused([&] { file.read_float("layer0.q"); }, "'layer0.q'|among the 1 in");
  }
  const SafetensorsFile file(write_entry("\"I64\"", "[1, 1, 1]", "[0, 8]"));
  EXPECT_FALSE(file.info("x").dtype.has_value());
  EXPECT_EQ(file.info("x").dtype_name, "I64");
  EXPECT_EQ(file.info("x").bytes, 8u);
}

TEST_F(Safetensors, ListingHasNameDtypeAndShapeOfADozen) {
  EXPECT_EQ(SafetensorsFile(write_file("{}")).listing(), "the file has no tensors");
  const SafetensorsFile file(write_file(R"({
      "b": {"dtype": "I64", "shape": [], "data_offsets": [0, 8]},
      "a": {"dtype": "F16", "shape": [2, 3], "data_offsets": [0, 12]}})"));
  EXPECT_EQ(file.listing(), "the file has 2 tensors:\n  a  F16 [2, 3]\n  b  I64 []");
  std::map<std::string, Tensor<float>> tensors;
  for (char name = 'a'; name < 'a' + 14; ++name) {
    tensors[{name}] = counting<float>(1, 1, 1, 1);
    if (name < 'l') continue;
    write_safetensors(path(), tensors);
    const std::string more = name == 'l' ? "" : "\n  and " + std::to_string(name - 'l') + " more";
    EXPECT_TRUE(SafetensorsFile(path()).listing().ends_with("\n  l  F32 [1, 1, 1]" + more));
  }
}

// ---- hostile and damaged files ------------------------------------------------------------------

TEST_F(Hostile, Files) {
  expect_file_refused(path("none"), "cannot open");
  expect_file_refused(folder_.string(), "not a regular file");
  expect_file_refused(write_bytes(""), "at byte 0|has 0 bytes|takes 8");
  expect_file_refused(write_bytes("1234567"), "at byte 0|has 7 bytes|takes 8");
  expect_file_refused(write_bytes(std::string("\3\0\0\0\0\0\0\0{}", 10)),
                      "at byte 0|length is 3|only 2 bytes");
  expect_file_refused(write_bytes(std::string(8, '\xFF') + "{}"),
                      "18446744073709551615|only 2 bytes");
  std::string bytes(8, '\0');
  const std::uint64_t length = 100'000'001;
  std::memcpy(bytes.data(), &length, 8);
  write_bytes(bytes);
  std::filesystem::resize_file(path(), 8 + length);  // sparse: takes no disk
  expect_file_refused(path(), "100000001|limit is 100000000");
}

// A JSON parser silently keeps the last one of two members of a name, but nothing says which is meant.
TEST_F(Hostile, Headers) {
  const std::string x = R"("x": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]})";
  const std::pair<std::string, const char*> all[] = {
      {"{\"x\": !}", "at byte 14|not JSON"},
      {std::string("{}\0\0", 4), "at byte 10|zero byte"},
      {"{\"\xFF\": {}}", "at byte 10|not JSON"},
      {"[1, 2]", "at byte 8|an array|not an object"},
      {"{\"x\": " + std::string(1'000'000, '['), "nests|limit is 3"},
      {R"({"x": {"shape": [[1]]}})", "nests 4 deep|limit is 3"},
      {R"({"x": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 12]}})", "at byte|not JSON"},
      {"{\"x\": 7}", "'x'|is 7|not an object"},
      {R"({"x": {"shape": [3], "data_offsets": [0, 12]}})", "'x'|no \"dtype\""},
      {R"({"x": {"dtype": "F32", "data_offsets": [0, 12]}})", "'x'|no \"shape\""},
      {R"({"x": {"dtype": "F32", "shape": [3]}})", "'x'|no \"data_offsets\""},
      {R"({"__metadata__": "text"})", "__metadata__|\"text\""},
      {R"({"__metadata__": {"softmax_scale": 0.125}})", "'softmax_scale'|0.125|not a string"},
      {"{" + x + ", \"y" + x.substr(2) + ", " + x + "}", "\"x\"|twice"},
      {R"({"x": {"dtype": "F32", "dtype": "F32", "shape": [3], "data_offsets": [0, 12]}})",
       "\"dtype\"|twice"},
      {R"({"__metadata__": {"scale": "1", "scale": "2"}, )" + x + "}", "\"scale\"|twice"},
  };
  for (const auto& [header, parts] : all) expect_file_refused(write_file(header), parts);
  EXPECT_NO_THROW(SafetensorsFile(write_file("{" + x + ", \"y" + x.substr(2) + "}")));
}

// Refusals of tensor x, in a file with 12 bytes of data.
TEST_F(Hostile, Entries) {
  const struct {
    const char *dtype, *shape, *offsets, *parts;
  } all[] = {
      {"\"I64\"", "[1]", "[0, 7]", "span 7|need 8"},
      {"\"Q3_K\"", "[1]", "[0, 13]", "ends at 13|of 12"},
      {"\"Q3_K\"", "[-1]", "[0, 12]", "shape[0] is -1"},
      {"[\"F32\"]", "[3]", "[0, 12]", "dtype is an array"},
      {"\"F32\"", "3", "[0, 12]", "shape is 3"},
      {"\"F32\"", "[1, -3, 1]", "[0, 12]", "shape[1] is -3"},
      {"\"F32\"", "[-1, -3, 1]", "[0, 12]", "shape[0] is -1"},  // whose product fits
      {"\"F32\"", "[1, 3.0, 1]", "[0, 12]", "shape[1] is 3.0"},
      {"\"F32\"", "[18446744073709551619]", "[0, 12]", "shape[0] is 1.8446744073709552e+19"},
      {"\"F32\"", "[9223372036854775808]", "[0, 12]", "9223372036854775808|9223372036854775807"},
      // 2^31 x 2^31 floats are 2^64 bytes, which is 0 in 64 bits.
      {"\"F32\"", "[2147483648, 2147483648]", "[0, 0]",
       "shape[1] = 2147483648|8589934592 bytes|9223372036854775807"},
      // An overflow behind an empty axis.
      {"\"F32\"", "[0, 4294967296, 4294967296]", "[0, 0]", "shape[2] = 4294967296|overflow"},
      {"\"F32\"", "[3]", "[0, 12, 24]", "data_offsets"},
      {"\"F32\"", "[3]", "[-4, 8]", "data_offsets are not two non-negative"},
      {"\"F32\"", "[3]", "[12, 0]", "begin 12|end 0"},
      {"\"F32\"", "[3]", "[4, 16]", "ends at 16|of 12"},
      {"\"F32\"", "[3]", "[18446744073709551603, 18446744073709551615]",
       "ends at 18446744073709551615|of 12"},
      {"\"F32\"", "[2]", "[0, 12]", "span 12|need 8"},
      {"\"F16\"", "[3]", "[0, 12]", "span 12|need 6"},
  };
  for (const auto& [dtype, shape, offsets, parts] : all)
    expect_file_refused(write_entry(dtype, shape, offsets), parts + std::string("|'x'"));
}

// A file that is cut anywhere is refused. One with a flipped bit, or with other bytes in three places, is refused or
// read within its bounds, and gives no error of another type.
TEST_F(Hostile, DamagedFiles) {
  write_safetensors<Eigen::half>(path(), {{"x", counting<Eigen::half>(1, 1, 3, 2)}}, {{"k", "t"}});
  std::ifstream in(path(), std::ios::binary);
  const std::string whole(std::istreambuf_iterator<char>(in), {});
  for (std::size_t length = 0; length < whole.size(); ++length) {
    SCOPED_TRACE(length);
    expect_file_refused(write_bytes(whole.substr(0, length)), "");
  }
  std::mt19937 random(1);
  for (std::size_t damage = 0; damage < 10 * whole.size(); ++damage) {
    std::string damaged = whole;
    if (const std::size_t at = damage / 8; at < whole.size())
      damaged[at] = static_cast<char>(damaged[at] ^ (1 << damage % 8));
    else
      for (int n = 0; n < 3; ++n) damaged[random() % whole.size()] = static_cast<char>(random());
    write_bytes(damaged);
    try {
      const SafetensorsFile file(path());
      for (const std::string& name : file.names()) file.read_float(name);
    } catch (const std::runtime_error&) {
    } catch (...) {
      ADD_FAILURE() << "damage " << damage << " gave an error of another type";
    }
  }
}

// ---- captures -----------------------------------------------------------------------------------

using Shapes = std::map<std::string, std::vector<Index>>;

SafetensorsFile write_capture(const std::string& path, const Shapes& shapes,
                              const Metadata& metadata = {}) {
  std::map<std::string, Tensor<float>> tensors;
  for (const auto& [name, shape] : shapes)
    tensors[name] = counting<float>(shape[0], shape[1], shape[2], shape[3]);
  write_safetensors(path, tensors, metadata);
  return SafetensorsFile(path);
}

// Named layers, and plain q, k and v; values may have another dim, and other tensors are skipped.
TEST_F(Capture, LayersAreLoaded) {
  for (const std::string name : {"a", ""}) {
    const std::string prefix = name.empty() ? "" : name + ".";
    const auto file = write_capture(path(), {{prefix + "q", {2, 6, 7, 5}},
                                             {prefix + "k", {2, 3, 7, 5}},
                                             {prefix + "v", {2, 3, 7, 2}},
                                             {"w", {1, 1, 1, 1}}});
    const std::vector<LayerCapture> layers = load_layers(file);
    ASSERT_EQ(layers.size(), 1u);
    EXPECT_EQ(layers[0].name, name.empty() ? "unnamed" : name);
    expect_same_bits(layers[0].q, counting<float>(2, 6, 7, 5));
    expect_same_bits(layers[0].k, counting<float>(2, 3, 7, 5));
    expect_same_bits(layers[0].v, counting<float>(2, 3, 7, 2));
  }
  const SafetensorsFile others(write_file(R"({
      "a.q": {"dtype": "F32", "shape": [1, 1, 1], "data_offsets": [0, 4]},
      "a.k": {"dtype": "F16", "shape": [1, 1, 1], "data_offsets": [4, 6]},
      "a.v": {"dtype": "BF16", "shape": [1, 1, 1], "data_offsets": [6, 8]},
      "mask": {"dtype": "BOOL", "shape": [1, 3, 1, 1, 1], "data_offsets": [0, 3]},
      "q": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]},
      "quantised": {"dtype": "Q3_K", "shape": [7], "data_offsets": [0, 3]}})"));
  const std::vector<LayerCapture> layers = load_layers(others);
  ASSERT_EQ(layers.size(), 1u);
  EXPECT_EQ(layers[0].name, "a");
}

TEST_F(Capture, LayersComeInTheModelsOrder) {
  const auto file = write_capture(path(), {{"layer11.q", {1, 1, 1, 1}},
                                           {"layer2.q", {1, 1, 1, 1}},
                                           {"layer10.k", {1, 1, 1, 1}},
                                           {"mask", {1, 1, 1, 1}},
                                           {".q", {1, 1, 1, 1}}});
  EXPECT_EQ(layer_names(file), (std::vector<std::string>{"layer2", "layer10", "layer11"}));
}

TEST_F(Capture, WithoutWholeLayersAreRefusedWithWhatTheyHave) {
  const auto one = write_capture(path(), {{"a.q", {1, 1, 1, 1}}, {"a.k", {1, 1, 1, 1}}});
  expect_refused([&] { load_layers(one); }, "'a.v'|2 tensors|a.q  F32 [1, 1, 1]");
  const auto none = write_capture(path(), {{"q", {1, 2, 3, 4}}, {"k", {2, 1, 1, 1}}});
  expect_refused([&] { load_layers(none); },
                 "NAME.q, NAME.k and NAME.v|plain q, k and v|2 tensors|k  F32 [2, 1, 1, 1]|"
                 "q  F32 [2, 3, 4]");
}

// The first number that is not finite is named by its place, in layers with names and without, in any type.
TEST_F(Capture, NumbersThatAreNotFiniteAreRefused) {
  constexpr float infinity = std::numeric_limits<float>::infinity(),
                  nan = std::numeric_limits<float>::quiet_NaN();
  for (const auto& [which, number, is] : {std::tuple{"q", nan, "is NaN"},
                                          {"k", infinity, "is infinite"},
                                          {"v", -infinity, "is -infinite"}}) {
    std::map<std::string, Tensor<float>> tensors;
    for (const std::string name : {"q", "k", "v"})
      tensors["a." + name] = counting<float>(2, 4, 7, 5);
    const std::string name = std::string("a.") + which;
    tensors[name](1, 2, 3, 4) = number, tensors[name](1, 3, 0, 0) = nan;
    write_safetensors(path(), tensors);
    expect_refused([&] { load_layers(SafetensorsFile(path())); },
                   ": " + name + " " + is + " at batch 1, head 2, position 3, channel 4 ");
  }
  std::map<std::string, Tensor<Eigen::half>> halves;
  for (const char* name : {"q", "k", "v"}) halves[name] = counting<Eigen::half>(1, 2, 7, 5);
  halves["v"](0, 0, 6, 1) = static_cast<Eigen::half>(1e6f);
  write_safetensors(path(), halves);
  expect_refused([&] { load_layers(SafetensorsFile(path())); },
                 ": v is infinite at head 0, position 6, channel 1 ");
}

TEST_F(Capture, LayersWhoseShapesDoNotFit) {
  const struct {
    std::vector<Index> q, k, v;
    const char* parts;
  } all[] = {
      {{1, 7, 9, 5}, {1, 3, 9, 5}, {1, 3, 9, 5}, "q_heads|7 and 3"},
      {{1, 6, 9, 5}, {1, 3, 9, 5}, {1, 2, 9, 5}, "kv_heads|3 and 2"},
      {{1, 6, 9, 5}, {1, 3, 8, 5}, {1, 3, 9, 5}, "len|9 and 8"},
      {{1, 6, 9, 5}, {1, 3, 9, 5}, {1, 3, 8, 5}, "len|9 and 8"},
      {{1, 6, 9, 5}, {1, 3, 9, 4}, {1, 3, 9, 5}, "head_dim|5 and 4"},
      {{2, 6, 9, 5}, {1, 3, 9, 5}, {1, 3, 9, 5}, "batch|2 and 1"},
      {{1, 6, 9, 5}, {1, 0, 9, 5}, {1, 0, 9, 5}, "empty|0 and 9"},
  };
  for (const auto& [q, k, v, parts] : all) {
    const auto file = write_capture(path(), {{"a.q", q}, {"a.k", k}, {"a.v", v}});
    expect_refused([&] { load_layer(file, "a"); }, parts);
  }
}

TEST_F(Capture, SoftmaxScaleIsAPositiveNumberOfTheMetadata) {
  EXPECT_EQ(softmax_scale(write_capture(path(), {}, {{"softmax_scale", "0.125"}})), 0.125f);
  EXPECT_EQ(softmax_scale(write_capture(path(), {})), std::nullopt);
  for (const char* text : {"", "1/8", "0", "-0.125", "nan", "1e39", "1e999", "[1]", "\"1\""}) {
    const auto file = write_capture(path(), {}, {{"softmax_scale", text}});
    expect_refused([&] { softmax_scale(file); }, std::string("softmax_scale|") + text);
  }
}

// The capture that comes with the examples has the shapes that its README states, and the values that Python's
// struct.unpack("<e") decoded from the capture that it was cut from.
TEST(CommittedCapture, HasTheShapesAndValuesOfItsSource) {
  const SafetensorsFile file(QUOKA_EXAMPLES_DATA "/tinyllama_passkey_2046_layer11.safetensors");
  EXPECT_EQ(file.names(), (std::vector<std::string>{"layer11.k", "layer11.q", "layer11.v"}));
  for (const std::string& name : file.names()) {
    EXPECT_EQ(file.info(name).shape, (std::vector<Index>{name == "layer11.q" ? 16 : 2, 2046, 64}));
    EXPECT_EQ(file.info(name).dtype, DType::F16);
  }
  EXPECT_EQ(softmax_scale(file), 0.125f);
  const LayerCapture layer = load_layer(file, "layer11");
  EXPECT_EQ(layer.q(0, 0, 0, 0), 0.044830322265625f);
  EXPECT_EQ(layer.q(0, 8, 1023, 17), -0.05987548828125f);
  EXPECT_EQ(layer.q(0, 15, 2045, 63), 1.2880859375f);
  EXPECT_EQ(layer.k(0, 0, 0, 0), 0.07257080078125f);
  EXPECT_EQ(layer.k(0, 1, 1023, 17), -2.3671875f);
  EXPECT_EQ(layer.k(0, 1, 2045, 63), -12.4296875f);
  EXPECT_EQ(layer.v(0, 0, 0, 0), 0.006214141845703125f);
  EXPECT_EQ(layer.v(0, 1, 1023, 17), 0.11688232421875f);
  EXPECT_EQ(layer.v(0, 1, 2045, 63), 0.375244140625f);
}

}  // namespace
