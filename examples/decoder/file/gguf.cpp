#include "decoder/file/gguf.hpp"

#include <bit>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "decoder/file/gguf_format.hpp"

namespace quoka_decoder {

using namespace gguf_format;

// Walks the header once, from its first byte to the last, and fills a GgufFile.
class GgufFile::Parser {
 public:
  explicit Parser(GgufFile& file) : file_(file), bytes_(file.bytes_) {}

  void run() {
    read_magic_and_version();
    const std::uint64_t tensors = read_count("tensors", least_tensor);
    const std::uint64_t keys = read_count("keys", least_key);
    for (std::uint64_t i = 0; i < keys; ++i) read_key();
    read_alignment();
    std::vector<Pending> pending;
    for (std::uint64_t i = 0; i < tensors; ++i) read_tensor(pending);
    place(pending);
  }

 private:
  // The least bytes that each takes: an empty name, and one byte of value or no extent.
  static constexpr std::uint64_t least_key = 8 + 4 + 1, least_tensor = 8 + 4 + 4 + 8;

  // The data of a tensor of a readable type, to be placed when the start of all data is known.
  struct Pending {
    std::uint64_t offset, field;  // from the start of the data; where that number stands
    std::uint64_t bytes;
  };

  template <class... Parts>
  [[noreturn]] void fail(std::uint64_t offset, const Parts&... parts) const {
    gguf_format::fail(file_.name_, offset, parts...);
  }

  std::uint64_t remaining() const { return bytes_.size() - position_; }

  template <class T, class... What>
  T read(const What&... what) {
    if (remaining() < sizeof(T)) {
      fail(position_, what..., " takes ", sizeof(T), " bytes; ", remaining(), " remain");
    }
    const T result = read_at<T>(bytes_, position_);
    position_ += sizeof(T);
    return result;
  }

  template <class... What>
  std::string_view read_string(const What&... what) {
    const std::uint64_t start = position_;
    const auto length = read<std::uint64_t>("the length of ", what...);
    if (length > remaining()) {
      fail(start, what..., " has ", length, " bytes; ", remaining(), " remain");
    }
    const auto* text = reinterpret_cast<const char*>(bytes_.data()) + position_;
    position_ += length;
    return {text, length};
  }

  void read_magic_and_version() {
    constexpr std::uint32_t magic = 'G' | 'G' << 8 | 'U' << 16 | 'F' << 24;
    if (read<std::uint32_t>("the magic") != magic) fail(0, "the file does not begin with GGUF");
    const auto version = read<std::uint32_t>("the version");
    if (version != 0 && (version & 0xffff) == 0) {
      fail(4, "the file is big-endian; little-endian files are read");
    }
    if (version != 2 && version != 3) fail(4, "the version is ", version, "; 2 and 3 are read");
  }

  std::uint64_t read_count(const char* what, std::uint64_t least) {
    const std::uint64_t start = position_;
    const auto count = read<std::uint64_t>("the number of ", what);
    if (count > remaining() / least) {
      fail(start, "the number of ", what, " is ", count, "; the ", remaining(),
           " bytes that remain hold at most ", remaining() / least);
    }
    return count;
  }

  void read_key() {
    const std::uint64_t start = position_;
    const std::string key(read_string("a key"));
    const std::string who = "key " + in_quotes(key);
    if (file_.has(key)) fail(start, who, " occurs twice");
    Value value;
    value.type = read_value_type(who);
    if (value.type == array) {
      value.is_array = true;
      value.type = read_value_type(who);
      if (value.type == array) fail(position_ - 4, who, " is an array of arrays; none are read");
      value.count = read<std::uint64_t>("the count of ", who);
    }
    value.offset = position_;
    if (value.count > remaining() / least_bytes[value.type]) {
      fail(position_, who, " holds ", value.count, " of ", name_of_value(value.type), "; ",
           remaining(), " bytes remain, enough for ", remaining() / least_bytes[value.type]);
    }
    skip_value(value, who);
    file_.values_.emplace(key, value);
  }

  std::uint32_t read_value_type(const std::string& who) {
    const auto type = read<std::uint32_t>("the type of ", who);
    if (type >= value_types) {
      fail(position_ - 4, who, " has type ", type, "; types go from 0 to ", value_types - 1);
    }
    return type;
  }

  void skip_value(const Value& value, const std::string& who) {
    if (value.type == string) {
      for (std::uint64_t i = 0; i < value.count; ++i) read_string("a string of ", who);
    } else if (value.type == boolean) {
      for (std::uint64_t i = 0; i < value.count; ++i) {
        const int flag = read<std::uint8_t>(who);
        if (flag > 1) fail(position_ - 1, who, " has a BOOL of ", flag, "; 0 or 1 is needed");
      }
    } else {
      position_ += value.count * least_bytes[value.type];
    }
  }

  void read_alignment() {
    const auto found = file_.values_.find("general.alignment");
    if (found == file_.values_.end()) return;
    alignment_ = file_.get<std::uint32_t>("general.alignment");
    if (!std::has_single_bit(alignment_)) {
      fail(found->second.offset, "general.alignment is ", alignment_, "; a power of 2 is needed");
    }
  }

  void read_tensor(std::vector<Pending>& pending) {
    const std::uint64_t start = position_;
    GgufTensor tensor;
    tensor.name = read_string("a tensor's name");
    const std::string who = "tensor " + in_quotes(tensor.name);
    if (file_.places_.find(tensor.name) != file_.places_.end()) fail(start, who, " occurs twice");
    const std::uint64_t values = read_shape(tensor, who);
    Place place;
    place.type_offset = position_;
    place.type = read<std::uint32_t>("the type of ", who);
    Pending data{};
    data.field = position_;
    data.offset = read<std::uint64_t>("the offset of ", who);
    if (data.offset % alignment_ != 0) {
      fail(data.field, who, " has the offset ", data.offset, "; a multiple of ", alignment_,
           ", the alignment, is needed");
    }
    if (is_readable(place.type)) {
      tensor.type = static_cast<TensorType>(place.type);
      data.bytes = bytes_of_rows(tensor, values, place.type_offset, who);
      place.index = static_cast<std::ptrdiff_t>(pending.size());
      pending.push_back(data);
      file_.tensors_.push_back(std::move(tensor));
      file_.places_.emplace(file_.tensors_.back().name, place);
    } else {
      file_.places_.emplace(std::move(tensor.name), place);
    }
  }

  // Returns the number of values.
  std::uint64_t read_shape(GgufTensor& tensor, const std::string& who) {
    const auto rank = read<std::uint32_t>("the rank of ", who);
    if (rank > 4) fail(position_ - 4, who, " has ", rank, " dimensions; up to 4 are read");
    std::uint64_t values = 1;
    for (std::uint32_t axis = 0; axis < rank; ++axis) {
      const auto extent = read<std::uint64_t>("an extent of ", who);
      if (extent == 0) fail(position_ - 8, who, ": extent ", axis, " is 0");
      if (extent > most / values) {
        fail(position_ - 8, who, ": extent ", axis, " is ", extent, ", after a product of ", values,
             "; up to ", most, " values are read");
      }
      values *= extent;
      tensor.shape.push_back(static_cast<Index>(extent));
    }
    return values;
  }

  std::uint64_t bytes_of_rows(const GgufTensor& tensor, std::uint64_t values, std::uint64_t offset,
                              const std::string& who) const {
    const Index block = values_per_block(tensor.type);
    if (tensor.columns() % block != 0) {
      fail(offset, who, " has rows of ", tensor.columns(), " values; ", name_of(tensor.type),
           " needs a multiple of ", block);
    }
    const std::uint64_t blocks = values / static_cast<std::uint64_t>(block);
    const auto bytes = static_cast<std::uint64_t>(bytes_per_block(tensor.type));
    if (blocks > most / bytes) {
      fail(offset, who, " has ", blocks, " blocks of ", bytes, " bytes; up to ", most,
           " bytes are read");
    }
    return blocks * bytes;
  }

  void place(const std::vector<Pending>& pending) {
    const std::uint64_t padding = (alignment_ - position_ % alignment_) % alignment_;
    const std::uint64_t available = remaining() > padding ? remaining() - padding : 0;
    for (std::size_t i = 0; i < pending.size(); ++i) {
      const auto [offset, field, bytes] = pending[i];
      if (bytes > available || offset > available - bytes) {
        fail(field, "tensor ", in_quotes(file_.tensors_[i].name), " has ", bytes,
             " bytes of data at offset ", offset, "; the file has ", available, " bytes of data");
      }
      file_.tensors_[i].data = bytes_.subspan(position_ + padding + offset, bytes);
    }
  }

  static constexpr std::uint64_t most = std::numeric_limits<Index>::max();

  GgufFile& file_;
  std::span<const std::byte> bytes_;
  std::uint64_t position_ = 0;
  std::uint64_t alignment_ = 32;
};

GgufFile::GgufFile(const std::string& path) : name_(path), mapped_(path) {
  bytes_ = {mapped_->data(), mapped_->size()};
  Parser(*this).run();
}

GgufFile GgufFile::parse(std::span<const std::byte> bytes, std::string name) {
  GgufFile result;
  result.name_ = std::move(name);
  result.bytes_ = bytes;
  Parser(result).run();
  return result;
}

Index GgufTensor::rows() const {
  Index result = 1;
  for (std::size_t axis = 1; axis < shape.size(); ++axis) result *= shape[axis];
  return result;
}

std::vector<std::string> GgufFile::keys() const {
  std::vector<std::string> result;
  for (const auto& item : values_) result.push_back(item.first);
  return result;
}

std::vector<std::string> GgufFile::tensor_names() const {
  std::vector<std::string> result;
  for (const auto& item : places_) result.push_back(item.first);
  return result;
}

const GgufTensor* GgufFile::find_tensor(std::string_view name) const {
  const auto found = places_.find(name);
  if (found == places_.end()) return nullptr;
  const Place& place = found->second;
  if (place.index < 0) {
    std::string readable;
    for (const TensorType type : readable_types) {
      readable += (readable.empty() ? "" : ", ") + std::string(name_of(type));
    }
    fail(name_, place.type_offset, "tensor ", in_quotes(name), " has type ",
         ggml_type_name(place.type), " (", place.type, "); this program reads ", readable);
  }
  return &tensors_[static_cast<std::size_t>(place.index)];
}

const GgufTensor& GgufFile::tensor(std::string_view name) const {
  const GgufTensor* found = find_tensor(name);
  if (found != nullptr) return *found;
  throw std::runtime_error(name_ + ": there is no tensor " + in_quotes(name) + " among its " +
                           std::to_string(places_.size()));
}

}  // namespace quoka_decoder
