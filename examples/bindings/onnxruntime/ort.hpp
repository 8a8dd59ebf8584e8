// ONNX Runtime's C interface with exceptions in place of statuses, and tensors as pointers and
// sizes.
//
// The library asks the runtime for the newest version of the interface that both have. So a build
// with one version's header serves later runtimes, and earlier ones from 1.17 on, which brought
// KernelContext_ParallelFor.
#pragma once

#include <onnxruntime_c_api.h>

#include <quoka/base/check.hpp>
#include <quoka/rows/rows.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <exception>
#include <stdexcept>
#include <string>

namespace quoka_onnxruntime {

using quoka::Index;

inline constexpr uint32_t least_version = 17;

// The newest version that this header and the runtime both have: the runtime 1.32.0 has 32, and a
// 2.x those of 1.x.
inline uint32_t common_version(const OrtApiBase& base) {
  char* rest = nullptr;
  const unsigned long major = std::strtoul(base.GetVersionString(), &rest, 10);
  if (major > 1) return ORT_API_VERSION;
  const unsigned long minor = *rest == '.' ? std::strtoul(rest + 1, nullptr, 10) : 0;
  return static_cast<uint32_t>(std::min<unsigned long>(minor, ORT_API_VERSION));
}

// Throws std::runtime_error with the runtime's words.
inline void check(const OrtApi& api, OrtStatus* status) {
  if (status == nullptr) return;
  const std::string message = api.GetErrorMessage(status);
  api.ReleaseStatus(status);
  throw std::runtime_error(message);
}

// f(), and what it throws as a status.
template <class F>
OrtStatus* guarded(const OrtApi& api, F&& f) {
  try {
    f();
    return nullptr;
  } catch (const std::invalid_argument& e) {
    return api.CreateStatus(ORT_INVALID_ARGUMENT, e.what());
  } catch (const std::exception& e) {
    return api.CreateStatus(ORT_FAIL, e.what());
  } catch (...) {
    return api.CreateStatus(ORT_FAIL, "quoka: an exception of an unknown type");
  }
}

// An input or an output where it lies. Absent: an optional one that the node does not have.
struct Tensor {
  bool present = false;
  std::byte* data = nullptr;
  const quoka::Format* format = nullptr;  // null: whole numbers
  Index rank = 0;
  std::array<Index, 4> sizes{1, 1, 1, 1};  // those beyond the rank: 1

  explicit operator bool() const { return present; }
  Index bytes_of_element() const { return format != nullptr ? format->element_bytes : 0; }
  Index elements() const { return sizes[0] * sizes[1] * sizes[2] * sizes[3]; }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(data);
  }
};

inline const quoka::Format* format_of_type(ONNXTensorElementDataType type) {
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT) return &quoka::format_of<float>();
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16) return &quoka::format_of<Eigen::half>();
  return nullptr;
}

// `name` for errors. Throws std::invalid_argument where it has another rank.
inline Tensor tensor_of(const OrtApi& api, const OrtValue& value, const char* name, Index rank) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  check(api, api.GetTensorTypeAndShape(&value, &info));
  struct Release {
    const OrtApi& api;
    OrtTensorTypeAndShapeInfo* info;
    ~Release() { api.ReleaseTensorTypeAndShapeInfo(info); }
  } const release{api, info};
  std::size_t count = 0;
  check(api, api.GetDimensionsCount(info, &count));
  const std::string rank_of = std::string("the rank of ") + name;
  if (rank >= 0) quoka::detail::require_equal(rank_of, static_cast<Index>(count), "", rank);
  quoka::detail::require_at_most(rank_of, static_cast<Index>(count), "", 4);
  Tensor tensor{.present = true, .rank = static_cast<Index>(count)};
  std::array<int64_t, 4> sizes{1, 1, 1, 1};
  check(api, api.GetDimensions(info, sizes.data(), count));
  std::copy(sizes.begin(), sizes.end(), tensor.sizes.begin());
  ONNXTensorElementDataType type;
  check(api, api.GetTensorElementType(info, &type));
  tensor.format = format_of_type(type);
  void* data = nullptr;  // the runtime has one function for both; inputs are not written
  check(api, api.GetTensorMutableData(const_cast<OrtValue*>(&value), &data));
  tensor.data = static_cast<std::byte*>(data);
  return tensor;
}

}  // namespace quoka_onnxruntime
