#include "support/safetensors.hpp"

#include "support/json_text.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace quoka_examples {
namespace {

// A value for an error message. Arrays and objects are not printed: they may be huge.
std::string describe(const nlohmann::json& value) {
  return value.is_primitive() ? value.dump().substr(0, 60) : std::string("an ") + value.type_name();
}

// Bytes of an element of the format's types; 0: none of those, or not whole bytes.
std::size_t element_bytes(const std::string& dtype) {
  static const std::map<std::string, std::size_t> known{
      {"BOOL", 1}, {"U8", 1},  {"I8", 1},  {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"F8_E8M0", 1},
      {"U16", 2},  {"I16", 2}, {"F16", 2}, {"BF16", 2},    {"U32", 4},     {"I32", 4},
      {"F32", 4},  {"U64", 8}, {"I64", 8}, {"F64", 8},     {"C64", 8}};
  const auto found = known.find(dtype);
  return found == known.end() ? 0 : found->second;
}

template <class From, class To>
void convert(const std::byte* from, Tensor<To>& to) {
  for (Index i = 0; i < to.size(); ++i, from += sizeof(From)) {
    From value;
    std::memcpy(&value, from, sizeof(From));  // a file may leave data unaligned
    to.data()[i] = static_cast<To>(static_cast<float>(value));
  }
}

}  // namespace

std::optional<double> number_from(const std::string& text) {
  const nlohmann::json number = nlohmann::json::parse(text, nullptr, false);
  return number.is_number() ? std::optional(number.get<double>()) : std::nullopt;
}

struct SafetensorsFile::Header {
  const SafetensorsFile& file;

  template <class... Parts>
  [[noreturn]] void fail(std::uint64_t offset, const Parts&... parts) const {
    detail::fail(file.path_, offset, parts...);
  }

  nlohmann::json parse(const char* text, std::uint64_t length) const {
    // The parser would take a zero byte for the end, and not look at what follows.
    if (const void* zero = std::memchr(text, 0, length)) {
      fail(static_cast<std::size_t>(static_cast<const char*>(zero) - text) + 8,
           "the header has a zero byte; only spaces may pad it");
    }
    // A sound header nests three deep. Deeper is refused on the way in, before it takes memory.
    RepeatedKeys is_repeated;
    const auto sound = [&](int depth, RepeatedKeys::Event event, const nlohmann::json& parsed) {
      if (depth > 3) fail(8, "the header nests ", depth, " deep; the limit is 3");
      if (is_repeated(event, parsed)) {
        fail(8, "the header has the name ", parsed.dump().substr(0, 200), " twice");
      }
      return true;
    };
    try {
      return nlohmann::json::parse(text, text + length, sound);
    } catch (const nlohmann::json::parse_error& error) {
      fail(error.byte + 7, "the header is not JSON: ", std::string(error.what()).substr(0, 200));
    } catch (const nlohmann::json::exception& error) {  // a number beyond double
      fail(8, "the header is not JSON: ", std::string(error.what()).substr(0, 200));
    }
  }

  void read_metadata(const nlohmann::json& entry, Metadata& metadata) const {
    if (!entry.is_object()) fail(8, "__metadata__ is ", describe(entry), ", not an object");
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string()) {
        fail(8, "__metadata__ '", key, "' is ", describe(value), ", not a string");
      }
      metadata.emplace(key, value.template get<std::string>());
    }
  }

  TensorInfo read_entry(const std::string& who, const nlohmann::json& entry) const {
    if (!entry.is_object()) fail(8, who, "it is ", describe(entry), ", not an object");
    for (const char* key : {"dtype", "shape", "data_offsets"}) {
      if (!entry.contains(key)) fail(8, who, "it has no \"", key, '"');
    }
    TensorInfo result;
    if (!entry["dtype"].is_string()) {
      fail(8, who, "dtype is ", describe(entry["dtype"]), ", not a string");
    }
    result.dtype_name = entry["dtype"].get<std::string>();
    for (const DType dtype : {DType::F16, DType::BF16, DType::F32}) {
      if (result.dtype_name == name_of(dtype)) result.dtype = dtype;
    }
    const std::size_t element = element_bytes(result.dtype_name);
    const std::size_t needed = read_shape(who, entry["shape"], element, result);

    const auto [begin, end] = read_offsets(who, entry["data_offsets"]);
    const std::size_t available = file.file_.size() - file.data_start_;
    if (end > available) {
      fail(file.data_start_, who, "its data ends at ", end, " of ", available, " bytes of data");
    }
    if (element != 0 && end - begin != needed) {
      fail(file.data_start_ + begin, who, "data_offsets span ", end - begin,
           " bytes; shape and dtype need ", needed);
    }
    result.bytes = end - begin;
    result.offset = file.data_start_ + begin;
    result.data = file.file_.data() + result.offset;
    return result;
  }

  // Fills result.shape and returns the size in bytes; of elements of unknown size (0), their count.
  // The product checked is that of the non-zero extents, so that nobody's partial product can
  // overflow later, whatever the order.
  std::size_t read_shape(const std::string& who, const nlohmann::json& shape, std::size_t element,
                         TensorInfo& result) const {
    if (!shape.is_array()) fail(8, who, "shape is ", describe(shape), ", not an array");
    constexpr std::size_t limit = std::numeric_limits<Index>::max();
    std::size_t bytes = std::max<std::size_t>(element, 1);
    bool empty = false;
    for (const nlohmann::json& item : shape) {
      const std::size_t axis = result.shape.size();
      if (!item.is_number_unsigned()) {
        fail(8, who, "shape[", axis, "] is ", describe(item), ", not an integer 0 to ", limit);
      }
      const auto extent = item.get<std::size_t>();
      if (extent > limit / bytes) {
        fail(8, who, bytes, " bytes times shape[", axis, "] = ", extent, " overflow ", limit);
      }
      empty = empty || extent == 0;
      bytes *= std::max<std::size_t>(extent, 1);
      result.shape.push_back(static_cast<Index>(extent));
    }
    return empty ? 0 : bytes;
  }

  std::pair<std::size_t, std::size_t> read_offsets(const std::string& who,
                                                   const nlohmann::json& offsets) const {
    if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
        !offsets[1].is_number_unsigned()) {
      fail(8, who, "data_offsets are not two non-negative integers");
    }
    const auto begin = offsets[0].get<std::size_t>();
    const auto end = offsets[1].get<std::size_t>();
    if (begin > end) fail(8, who, "data_offsets are reversed: begin ", begin, ", end ", end);
    return {begin, end};
  }
};

SafetensorsFile::SafetensorsFile(const std::filesystem::path& path)
    : path_(path.string()), file_(path_) {
  const Header from{*this};
  constexpr std::uint64_t max_header = 100'000'000;  // the limit of the reference implementation
  const std::uint64_t size = file_.size();
  if (size < 8) from.fail(0, "the file has ", size, " bytes; the header length alone takes 8");
  std::uint64_t header = 0;
  std::memcpy(&header, file_.data(), 8);
  if (header > size - 8) {
    from.fail(0, "the header length is ", header, " but only ", size - 8, " bytes follow it");
  }
  if (header > max_header)
    from.fail(0, "the header length is ", header, "; the limit is ", max_header);
  data_start_ = 8 + header;
  const nlohmann::json root = from.parse(reinterpret_cast<const char*>(file_.data()) + 8, header);
  if (!root.is_object()) from.fail(8, "the header is ", describe(root), ", not an object");
  for (const auto& [name, entry] : root.items()) {
    if (name == "__metadata__") {
      from.read_metadata(entry, metadata_);
    } else {
      tensors_.emplace(name, from.read_entry("tensor '" + name + "': ", entry));
    }
  }
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> result;
  for (const auto& item : tensors_) result.push_back(item.first);
  return result;
}

std::string SafetensorsFile::listing() const {
  constexpr std::size_t most = 12, most_text = 80;  // a hostile name or shape may be huge
  if (tensors_.empty()) return "the file has no tensors";
  std::string text = "the file has " + std::to_string(tensors_.size()) +
                     (tensors_.size() == 1 ? " tensor:" : " tensors:");
  std::size_t listed = 0;
  for (const auto& [name, info] : tensors_) {
    if (listed++ == most)
      return text + "\n  and " + std::to_string(tensors_.size() - most) + " more";
    std::string shape;
    for (const Index extent : info.shape)
      shape += (shape.empty() ? "" : ", ") + std::to_string(extent);
    text += "\n  " + name.substr(0, most_text) + "  " + info.dtype_name.substr(0, most_text) +
            " [" + shape.substr(0, most_text) + "]";
  }
  return text;
}

const TensorInfo& SafetensorsFile::info(const std::string& name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    detail::fail(path_, 8, "there is no tensor '", name, "' among the ", tensors_.size(),
                 " in the header");
  }
  return found->second;
}

template <class T>
Tensor<T> SafetensorsFile::read(const std::string& name) const {
  const TensorInfo& from = info(name);
  if (!from.dtype) {
    detail::fail(path_, from.offset, "tensor '", name, "': dtype is ",
                 from.dtype_name.substr(0, 60), "; F16, BF16 and F32 are read");
  }
  const std::size_t rank = from.shape.size();
  if (rank != 3 && rank != 4) {
    detail::fail(path_, from.offset, "tensor '", name, "' has rank ", rank, "; 3 or 4 is needed");
  }
  const Index* last = from.shape.data() + rank;
  Tensor<T> result(rank == 4 ? last[-4] : 1, last[-3], last[-2], last[-1]);
  if (from.dtype == dtype_of<T>()) {
    if (from.bytes != 0) std::memcpy(result.data(), from.data, from.bytes);
  } else if (from.dtype == DType::F16) {
    convert<Eigen::half>(from.data, result);
  } else if (from.dtype == DType::BF16) {
    convert<Eigen::bfloat16>(from.data, result);
  } else {
    convert<float>(from.data, result);
  }
  return result;
}

template Tensor<Eigen::half> SafetensorsFile::read(const std::string&) const;
template Tensor<Eigen::bfloat16> SafetensorsFile::read(const std::string&) const;
template Tensor<float> SafetensorsFile::read(const std::string&) const;

}  // namespace quoka_examples
