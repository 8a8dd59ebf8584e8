// Writes .safetensors files, for tests of their readers (examples/support/safetensors.hpp has the
// format).
#pragma once

#include "support/safetensors.hpp"

#include <nlohmann/json.hpp>

#include <fstream>
#include <map>
#include <stdexcept>
#include <string>

namespace quoka_examples {

// Writes tensors of one storage type, in the map's order, without gaps; data starts on 8 bytes.
// Batch 1 is written as rank 3, [heads, len, dim]. Throws std::runtime_error if the system refuses the
// file.
template <class T>
void write_safetensors(const std::filesystem::path& path,
                       const std::map<std::string, Tensor<T>>& tensors,
                       const Metadata& metadata = {}) {
  nlohmann::json root = nlohmann::json::object();
  if (!metadata.empty()) root["__metadata__"] = metadata;
  std::size_t begin = 0;
  for (const auto& [name, tensor] : tensors) {
    std::vector<Index> shape(tensor.dimensions().begin(), tensor.dimensions().end());
    if (shape[0] == 1) shape.erase(shape.begin());
    const std::size_t end = begin + static_cast<std::size_t>(tensor.size()) * sizeof(T);
    root[name] = {
        {"dtype", name_of(dtype_of<T>())}, {"shape", shape}, {"data_offsets", {begin, end}}};
    begin = end;
  }
  std::string header = root.dump();
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const std::uint64_t length = header.size();

  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  const auto put = [&out](const void* bytes, std::size_t count) {
    out.write(static_cast<const char*>(bytes), static_cast<std::streamsize>(count));
  };
  put(&length, 8);
  put(header.data(), header.size());
  for (const auto& item : tensors)
    put(item.second.data(), static_cast<std::size_t>(item.second.size()) * sizeof(T));
  if (!out.flush()) throw std::runtime_error("cannot write " + path.string());
}

}  // namespace quoka_examples
