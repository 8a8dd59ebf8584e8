// The reader and writer of safetensors files, and the captures read through it. Written values come
// back. The committed capture holds the values that Python's struct module decodes from its source.
// A damaged or hostile file is an error that names both numbers, never a read out of bounds.

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
#include <span>
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

  std::string bytes_of_file() const {
    std::ifstream in(path(), std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  std::filesystem::path folder_;
};
using Hostile = Safetensors;  // files that must be refused
using Capture = Safetensors;

// Runs, and expects a std::runtime_error whose text has all the parts.
template <class Run>
void expect_refused(Run&& run, const std::vector<std::string>& parts) {
  try {
    run();
    ADD_FAILURE() << "accepted";
  } catch (const std::runtime_error& error) {
    for (const std::string& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos)
          << '"' << part << "\" is not in: " << error.what();
    }
  }
}

void expect_file_refused(const std::string& path, std::vector<std::string> parts) {
  parts.push_back(path);  // every message names the file
  expect_refused([&] { SafetensorsFile file(path); }, parts);
}

template <class T>
Tensor<T> counting(Index batch, Index heads, Index len, Index dim) {
  Tensor<T> tensor(batch, heads, len, dim);
  for (Index i = 0; i < tensor.size(); ++i) {
    tensor.data()[i] = static_cast<T>(0.25f * static_cast<float>(i) - 3.0f);
  }
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

TEST_F(Safetensors, EveryDtypeRoundTripsBitForBit) {
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

TEST_F(Safetensors, SeveralTensorsAndMetadataRoundTrip) {
  const auto a = counting<float>(1, 1, 3, 1), b = counting<float>(1, 2, 1, 37);
  const Tensor<float> empty(1, 3, 0, 5);
  const Metadata metadata = {{"model", "tiny"}, {"quote", "\"\\\n\xC3\xA9"}};
  write_safetensors<float>(path(), {{"b", b}, {"a", a}, {"none", empty}}, metadata);
  const SafetensorsFile file(path());
  EXPECT_EQ(file.names(), (std::vector<std::string>{"a", "b", "none"}));
  EXPECT_TRUE(file.contains("a") && !file.contains("y") && !file.contains("__metadata__"));
  expect_same_bits(file.read_float("a"), a);
  expect_same_bits(file.read_float("b"), b);
  expect_same_bits(file.read_float("none"), empty);
  EXPECT_EQ(file.metadata(), metadata);
  EXPECT_TRUE(SafetensorsFile(write_file("{}")).metadata().empty());
}

TEST_F(Safetensors, DataStartsOn8Bytes) {
  for (std::size_t length = 1; length <= 9; ++length) {
    const std::string name(length, 'x');
    write_safetensors<float>(path(), {{name, counting<float>(1, 1, 1, 1)}});
    EXPECT_EQ(SafetensorsFile(path()).info(name).offset % 8, 0u) << length;
  }
}

TEST_F(Safetensors, HalvesAreReadAsFloatExactlyAndFloatsRoundedToNearestEven) {
  write_safetensors<Eigen::half>(path(), {{"x", counting<Eigen::half>(1, 3, 7, 5)}});
  expect_same_bits(SafetensorsFile(path()).read_float("x"), counting<float>(1, 3, 7, 5));
  // 1.0 and -2.5 as bfloat16, little-endian.
  std::string bytes(8, '\0');
  const std::string header = R"({"x":{"dtype":"BF16","shape":[1,1,2],"data_offsets":[0,4]}})";
  bytes[0] = static_cast<char>(header.size());
  const auto wide =
      SafetensorsFile(write_bytes(bytes + header + "\x80\x3F\x20\xC0")).read_float("x");
  EXPECT_EQ(wide(0, 0, 0, 0), 1.0f);
  EXPECT_EQ(wide(0, 0, 0, 1), -2.5f);
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

TEST_F(Safetensors, FileIsMoveOnlyAndStaysOpenWhenMoved) {
  static_assert(!std::is_copy_constructible_v<SafetensorsFile>);
  static_assert(!std::is_copy_assignable_v<SafetensorsFile>);
  const auto x = counting<float>(1, 3, 7, 5);
  write_safetensors<float>(path(), {{"x", x}});
  SafetensorsFile first(path());
  SafetensorsFile second(std::move(first));
  expect_same_bits(second.read_float("x"), x);
  write_safetensors<float>(path("other"), {});
  SafetensorsFile third(path("other"));
  third = std::move(second);
  expect_same_bits(third.read_float("x"), x);
}

TEST_F(Safetensors, WhatIsNotReadIsRefusedByItsName) {
  const struct {
    const char *dtype, *shape, *offsets;
    std::vector<std::string> parts;
  } all[] = {{"\"F32\"", "[1, 3]", "[0, 12]", {"'x'", "rank 2", "3 or 4"}},
             {"\"I64\"", "[1, 1, 1]", "[0, 8]", {"dtype is I64", "F16, BF16 and F32 are read"}},
             {"\"Q3_K\"", "[1, 1, 7]", "[0, 3]", {"'x'", "dtype is Q3_K"}}};
  for (const auto& [dtype, shape, offsets, parts] : all) {
    const SafetensorsFile file(write_entry(dtype, shape, offsets));
    std::vector<std::string> named = parts;
    named.push_back(path());
    expect_refused([&] { file.read_float("x"); }, named);
    expect_refused([&] { file.read_float("layer0.q"); }, {path(), "'layer0.q'", "among the 1 in"});
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
  for (char name = 'a'; name < 'a' + 12; ++name) tensors[{name}] = counting<float>(1, 1, 1, 1);
  write_safetensors(path(), tensors);
  const std::string dozen = SafetensorsFile(path()).listing();
  EXPECT_TRUE(dozen.ends_with("\n  l  F32 [1, 1, 1]")) << dozen;
  tensors["m"] = tensors["n"] = counting<float>(1, 1, 1, 1);
  write_safetensors(path(), tensors);
  const std::string more = SafetensorsFile(path()).listing();
  EXPECT_TRUE(more.starts_with("the file has 14 tensors:\n  a  F32 [1, 1, 1]\n")) << more;
  EXPECT_TRUE(more.ends_with("\n  l  F32 [1, 1, 1]\n  and 2 more")) << more;
}

TEST_F(Safetensors, WriterNamesWhatItCannotWriteAndReplacesAFileThatIsOpen) {
  const auto x = counting<float>(1, 3, 7, 5);
  const std::string nowhere = path("missing/test.safetensors");
  expect_refused([&] { write_safetensors<float>(nowhere, {}); }, {nowhere, "cannot write"});
  for (const auto& [name, part] : {std::pair{"__metadata__", "__metadata__"}, {"\xFF", "UTF-8"}})
    expect_refused(
        [&, &to = name] {
          write_safetensors<float>(path(), {{to, x}});
        },
        {path(), part});
  write_safetensors<float>(path(), {{"x", x}});
  const SafetensorsFile before(path());
  write_safetensors<float>(path(), {});
  expect_same_bits(before.read_float("x"), x);
  EXPECT_FALSE(SafetensorsFile(path()).contains("x"));
}

// ---- hostile and damaged files ------------------------------------------------------------------

TEST_F(Hostile, Files) {
  expect_file_refused(path("none"), {"cannot open"});
  expect_file_refused(folder_.string(), {"not a regular file"});
  const std::pair<std::string, std::vector<std::string>> all[] = {
      {"", {"at byte 0", "has 0 bytes", "takes 8"}},
      {"1234567", {"at byte 0", "has 7 bytes", "takes 8"}},
      {std::string("\3\0\0\0\0\0\0\0{}", 10), {"at byte 0", "length is 3", "only 2 bytes"}},
      {std::string(8, '\xFF') + "{}", {"18446744073709551615", "only 2 bytes"}}};
  for (const auto& [bytes, parts] : all) expect_file_refused(write_bytes(bytes), parts);
  std::string bytes(8, '\0');
  const std::uint64_t length = 100'000'001;
  std::memcpy(bytes.data(), &length, 8);
  write_bytes(bytes);
  std::filesystem::resize_file(path(), 8 + length);  // sparse: takes no disk
  expect_file_refused(path(), {"100000001", "limit is 100000000"});
}

TEST_F(Hostile, Headers) {
  const struct {
    const char* what;
    std::string header;
    std::vector<std::string> parts;
  } all[] = {
      {"header that is not JSON", "{\"x\": !}", {"at byte 14", "not JSON"}},
      {"header padded with zeros", std::string("{}\0\0", 4), {"at byte 10", "zero byte"}},
      {"header that is not UTF-8", "{\"\xFF\": {}}", {"at byte 10", "not JSON"}},
      {"header that is not an object", "[1, 2]", {"at byte 8", "an array", "not an object"}},
      {"header that nests without end",
       "{\"x\": " + std::string(1'000'000, '['),
       {"nests", "limit is 3"}},
      {"number beyond double",
       R"({"x": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 12]}})",
       {"at byte", "not JSON"}},
      {"entry that is not an object", "{\"x\": 7}", {"'x'", "is 7", "not an object"}},
      {"missing dtype",
       R"({"x": {"shape": [3], "data_offsets": [0, 12]}})",
       {"'x'", "no \"dtype\""}},
      {"missing shape",
       R"({"x": {"dtype": "F32", "data_offsets": [0, 12]}})",
       {"'x'", "no \"shape\""}},
      {"missing offsets",
       R"({"x": {"dtype": "F32", "shape": [3]}})",
       {"'x'", "no \"data_offsets\""}},
      {"metadata that is not an object",
       R"({"__metadata__": "text"})",
       {"__metadata__", "\"text\""}},
      {"metadata value that is not text",
       R"({"__metadata__": {"softmax_scale": 0.125}})",
       {"'softmax_scale'", "0.125", "not a string"}},
  };
  for (const auto& [what, header, parts] : all) {
    SCOPED_TRACE(what);
    expect_file_refused(write_file(header), parts);
  }
}

// Refusals of tensor x, in a file with 12 bytes of data.
TEST_F(Hostile, Entries) {
  const struct {
    const char *what, *dtype, *shape, *offsets;
    std::vector<std::string> parts;
  } all[] = {
      {"other dtype that the offsets do not match",
       "\"I64\"",
       "[1]",
       "[0, 7]",
       {"span 7", "need 8"}},
      {"other dtype beyond the end", "\"Q3_K\"", "[1]", "[0, 13]", {"ends at 13", "of 12"}},
      {"other dtype of a negative extent", "\"Q3_K\"", "[-1]", "[0, 12]", {"shape[0] is -1"}},
      {"dtype that is not text", "[\"F32\"]", "[3]", "[0, 12]", {"dtype is an array"}},
      {"shape that is not an array", "\"F32\"", "3", "[0, 12]", {"shape is 3"}},
      {"negative extent", "\"F32\"", "[1, -3, 1]", "[0, 12]", {"shape[1] is -3"}},
      {"two negative extents whose product fits",
       "\"F32\"",
       "[-1, -3, 1]",
       "[0, 12]",
       {"shape[0] is -1"}},
      {"extent that is not an integer", "\"F32\"", "[1, 3.0, 1]", "[0, 12]", {"shape[1] is 3.0"}},
      {"extent beyond 64 bits",
       "\"F32\"",
       "[18446744073709551619]",
       "[0, 12]",
       {"shape[0] is 1.8446744073709552e+19"}},
      {"extent beyond signed 64 bits",
       "\"F32\"",
       "[9223372036854775808]",
       "[0, 12]",
       {"9223372036854775808", "9223372036854775807"}},
      // 2^31 x 2^31 floats are 2^64 bytes, which is 0 in 64 bits.
      {"shape whose product wraps to the right size",
       "\"F32\"",
       "[2147483648, 2147483648]",
       "[0, 0]",
       {"shape[1] = 2147483648", "8589934592 bytes", "9223372036854775807"}},
      {"overflow hidden behind an empty axis",
       "\"F32\"",
       "[0, 4294967296, 4294967296]",
       "[0, 0]",
       {"shape[2] = 4294967296", "overflow"}},
      {"offsets that are not a pair", "\"F32\"", "[3]", "[0, 12, 24]", {"data_offsets"}},
      {"negative offset", "\"F32\"", "[3]", "[-4, 8]", {"data_offsets"}},
      {"reversed offsets", "\"F32\"", "[3]", "[12, 0]", {"begin 12", "end 0"}},
      {"offsets beyond the end", "\"F32\"", "[3]", "[4, 16]", {"ends at 16", "of 12"}},
      {"offsets beyond the end that wrap around",
       "\"F32\"",
       "[3]",
       "[18446744073709551603, 18446744073709551615]",
       {"ends at 18446744073709551615", "of 12"}},
      {"offsets that do not match the shape", "\"F32\"", "[2]", "[0, 12]", {"span 12", "need 8"}},
      {"offsets that do not match the dtype", "\"F16\"", "[3]", "[0, 12]", {"span 12", "need 6"}},
  };
  for (const auto& [what, dtype, shape, offsets, parts] : all) {
    SCOPED_TRACE(what);
    std::vector<std::string> named = parts;
    named.push_back("'x'");
    expect_file_refused(write_entry(dtype, shape, offsets), named);
  }
}

// A JSON parser silently keeps the last one, but nothing says which of two tensors is meant.
TEST_F(Hostile, NameThatOccursTwice) {
  const std::string entry = R"({"dtype": "F32", "shape": [3], "data_offsets": [0, 12]})";
  expect_file_refused(
      write_file(R"({"x": )" + entry + R"(, "y": )" + entry + R"(, "x": )" + entry + "}"),
      {"\"x\"", "twice"});
  expect_file_refused(
      write_file(
          R"({"x": {"dtype": "F32", "dtype": "F32", "shape": [3], "data_offsets": [0, 12]}})"),
      {"\"dtype\"", "twice"});
  expect_file_refused(
      write_file(R"({"__metadata__": {"scale": "1", "scale": "2"}, "x": )" + entry + "}"),
      {"\"scale\"", "twice"});
  EXPECT_NO_THROW(SafetensorsFile(write_file(R"({"x": )" + entry + R"(, "y": )" + entry + "}")));
}

TEST_F(Hostile, EveryTruncationIsRefused) {
  write_safetensors<float>(path(), {{"x", counting<float>(1, 1, 3, 2)}}, {{"key", "text"}});
  const std::string whole = bytes_of_file();
  for (std::size_t length = 0; length < whole.size(); ++length) {
    SCOPED_TRACE(length);
    expect_file_refused(write_bytes(whole.substr(0, length)), {});
  }
}

TEST_F(Hostile, EveryFlippedBitIsRefusedOrReadWithinBounds) {
  write_safetensors<Eigen::half>(path(), {{"x", counting<Eigen::half>(1, 1, 3, 2)}}, {{"k", "t"}});
  const std::string whole = bytes_of_file();
  for (std::size_t bit = 0; bit < 8 * whole.size(); ++bit) {
    std::string damaged = whole;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << bit % 8));
    write_bytes(damaged);
    try {
      const SafetensorsFile file(path());
      for (const std::string& name : file.names()) file.read_float(name);
    } catch (const std::runtime_error&) {
    } catch (...) {
      ADD_FAILURE() << "bit " << bit << " gave an error of another type";
    }
  }
}

// ---- captures -----------------------------------------------------------------------------------

using Shapes = std::map<std::string, std::vector<Index>>;

SafetensorsFile write_capture(const std::string& path, const Shapes& shapes,
                              const Metadata& metadata = {}) {
  std::map<std::string, Tensor<float>> tensors;
  for (const auto& [name, shape] : shapes) {
    tensors[name] = counting<float>(shape[0], shape[1], shape[2], shape[3]);
  }
  write_safetensors(path, tensors, metadata);
  return SafetensorsFile(path);
}

// Named layers, and plain q, k and v; values may have another dim.
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
}

TEST_F(Capture, LayersComeInTheModelsOrder) {
  const auto file = write_capture(path(), {{"layer11.q", {1, 1, 1, 1}},
                                           {"layer2.q", {1, 1, 1, 1}},
                                           {"layer10.k", {1, 1, 1, 1}},
                                           {"mask", {1, 1, 1, 1}},
                                           {".q", {1, 1, 1, 1}}});
  EXPECT_EQ(layer_names(file), (std::vector<std::string>{"layer2", "layer10", "layer11"}));
}

TEST_F(Capture, OtherTensorsAreSkipped) {
  const SafetensorsFile file(write_file(R"({
      "a.q": {"dtype": "F32", "shape": [1, 1, 1], "data_offsets": [0, 4]},
      "a.k": {"dtype": "F16", "shape": [1, 1, 1], "data_offsets": [4, 6]},
      "a.v": {"dtype": "BF16", "shape": [1, 1, 1], "data_offsets": [6, 8]},
      "mask": {"dtype": "BOOL", "shape": [1, 3, 1, 1, 1], "data_offsets": [0, 3]},
      "position_ids": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
      "q": {"dtype": "U8", "shape": [], "data_offsets": [0, 1]},
      "quantised": {"dtype": "Q3_K", "shape": [7], "data_offsets": [0, 3]}})"));
  const std::vector<LayerCapture> layers = load_layers(file);
  ASSERT_EQ(layers.size(), 1u);
  EXPECT_EQ(layers[0].name, "a");
}

TEST_F(Capture, MissingTensorIsRefused) {
  const auto file = write_capture(path(), {{"a.q", {1, 1, 1, 1}}, {"a.k", {1, 1, 1, 1}}});
  expect_refused([&] { load_layers(file); }, {path(), "'a.v'", "2 tensors", "a.q  F32 [1, 1, 1]"});
}

TEST_F(Capture, FileWithoutLayersIsRefusedWithWhatItHas) {
  const auto file = write_capture(path(), {{"q", {1, 2, 3, 4}}, {"k", {2, 1, 1, 1}}});
  expect_refused([&] { load_layers(file); },
                 {path(), "NAME.q, NAME.k and NAME.v", "plain q, k and v", "2 tensors",
                  "k  F32 [2, 1, 1, 1]", "q  F32 [2, 3, 4]"});
}

// A number that is not finite, at [1, 2, 3, 4] of a tensor of sizes [2, 4, 7, 5], and a later one.
void expect_place(const std::string& path, const std::string& tensor, float number,
                  std::vector<std::string> parts) {
  std::map<std::string, Tensor<float>> tensors;
  for (const char* name : {"a.q", "a.k", "a.v"}) tensors[name] = counting<float>(2, 4, 7, 5);
  tensors[tensor](1, 2, 3, 4) = number;
  tensors[tensor](1, 3, 0, 0) = std::numeric_limits<float>::quiet_NaN();
  write_safetensors(path, tensors);
  parts.push_back(path + ": " + tensor + " is ");
  expect_refused([&] { load_layers(SafetensorsFile(path)); }, parts);
}

TEST_F(Capture, NumbersThatAreNotFiniteAreRefused) {
  const std::string where = "at batch 1, head 2, position 3, channel 4 ";
  constexpr float infinity = std::numeric_limits<float>::infinity();
  expect_place(path(), "a.q", std::numeric_limits<float>::quiet_NaN(), {"is NaN " + where});
  expect_place(path(), "a.k", infinity, {"is infinite " + where});
  expect_place(path(), "a.v", -infinity, {"is -infinite " + where});
}

TEST_F(Capture, NumberThatIsNotFiniteInAnUnnamedLayerOfHalves) {
  std::map<std::string, Tensor<Eigen::half>> tensors;
  for (const char* name : {"q", "k", "v"}) tensors[name] = counting<Eigen::half>(1, 2, 7, 5);
  tensors["v"](0, 0, 6, 1) = static_cast<Eigen::half>(1e6f);
  write_safetensors(path(), tensors);
  expect_refused([&] { load_layers(SafetensorsFile(path())); },
                 {path() + ": v is infinite at head 0, position 6, channel 1 "});
}

TEST_F(Capture, LayersWhoseShapesDoNotFit) {
  const struct {
    const char* what;
    std::vector<Index> q, k, v;
    std::vector<std::string> parts;
  } all[] = {
      {"a group that is not whole",
       {1, 7, 9, 5},
       {1, 3, 9, 5},
       {1, 3, 9, 5},
       {"q_heads", "7 and 3"}},
      {"KV heads", {1, 6, 9, 5}, {1, 3, 9, 5}, {1, 2, 9, 5}, {"kv_heads", "3 and 2"}},
      {"len of q and k", {1, 6, 9, 5}, {1, 3, 8, 5}, {1, 3, 9, 5}, {"len", "9 and 8"}},
      {"len of k and v", {1, 6, 9, 5}, {1, 3, 9, 5}, {1, 3, 8, 5}, {"len", "9 and 8"}},
      {"head_dim", {1, 6, 9, 5}, {1, 3, 9, 4}, {1, 3, 9, 5}, {"head_dim", "5 and 4"}},
      {"batch", {2, 6, 9, 5}, {1, 3, 9, 5}, {1, 3, 9, 5}, {"batch", "2 and 1"}},
      {"no KV heads", {1, 6, 9, 5}, {1, 0, 9, 5}, {1, 0, 9, 5}, {"empty", "0 and 9"}},
  };
  for (const auto& [what, q, k, v, parts] : all) {
    SCOPED_TRACE(what);
    const auto file = write_capture(path(), {{"a.q", q}, {"a.k", k}, {"a.v", v}});
    std::vector<std::string> named = parts;
    named.push_back(path());
    expect_refused([&] { load_layer(file, "a"); }, named);
  }
}

TEST_F(Capture, SoftmaxScaleIsReadFromTheMetadata) {
  EXPECT_EQ(softmax_scale(write_capture(path(), {}, {{"softmax_scale", "0.125"}})), 0.125f);
  EXPECT_EQ(softmax_scale(write_capture(path(), {})), std::nullopt);
}

TEST_F(Capture, SoftmaxScaleThatIsNoPositiveNumberIsRefused) {
  for (const char* text : {"", "1/8", "0", "-0.125", "nan", "1e39", "1e999", "[1]", "\"1\""}) {
    SCOPED_TRACE(text);
    const auto file = write_capture(path(), {}, {{"softmax_scale", text}});
    expect_refused([&] { softmax_scale(file); }, {path(), "softmax_scale", text});
  }
}

// ---- the capture that comes with the examples ---------------------------------------------------

const char committed[] = QUOKA_EXAMPLES_DATA "/tinyllama_passkey_2046_layer11.safetensors";

TEST(CommittedCapture, HasTheShapesItsReadmeStates) {
  const SafetensorsFile file(committed);
  EXPECT_EQ(file.names(), (std::vector<std::string>{"layer11.k", "layer11.q", "layer11.v"}));
  EXPECT_EQ(file.info("layer11.q").shape, (std::vector<Index>{16, 2046, 64}));
  EXPECT_EQ(file.info("layer11.k").shape, (std::vector<Index>{2, 2046, 64}));
  EXPECT_EQ(file.info("layer11.v").shape, (std::vector<Index>{2, 2046, 64}));
  for (const std::string& name : file.names()) EXPECT_EQ(file.info(name).dtype, DType::F16);
  EXPECT_EQ(softmax_scale(file), 0.125f);
}

// Decoded by Python's struct.unpack("<e") from the capture that this one was cut from.
TEST(CommittedCapture, HasTheValuesOfItsSource) {
  const LayerCapture layer = load_layer(SafetensorsFile(committed), "layer11");
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
