#include "arrays.hpp"

#include <nanobind/stl/string.h>

#include <quoka/packing/byte_formats.hpp>

#include <cstring>
#include <limits>
#include <memory>
#include <utility>

namespace quoka_python {

namespace {

namespace dlpack = nb::dlpack;

std::string name_of_type(nb::handle of) {
  return nb::cast<std::string>(
      nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(of.ptr()))).attr("__name__"));
}

// The array's memory. numpy hands out no bfloat16, which is a type of ml_dtypes there: as 16 bits, and `is_bfloat16`.
nb::ndarray<nb::ro> taken(nb::handle of, const std::string& name, bool& is_bfloat16) {
  nb::ndarray<nb::ro> array;
  if (nb::hasattr(of, "requires_grad") && nb::cast<bool>(nb::object(of.attr("requires_grad"))))
    quoka::detail::fail_because(name + " requires a gradient, and there is none here: detach() it");
  if (nb::try_cast(of, array, false) && array.is_valid()) {
    if (array.device_type() != nb::device::cpu::value)
      quoka::detail::fail_because(name + " lies on a device of DLPack's type " +
                                  std::to_string(array.device_type()) +
                                  ", but must lie in memory of the CPU, which is 1");
    return array;
  }
  PyErr_Clear();
  if (nb::hasattr(of, "dtype") && nb::hasattr(of, "view")) {
    const nb::object dtype = of.attr("dtype");
    if (nb::hasattr(dtype, "name") &&
        nb::cast<std::string>(nb::str(dtype.attr("name"))) == "bfloat16") {
      const nb::object bits = of.attr("view")("uint16");
      if (nb::try_cast(bits, array, false) && array.is_valid()) {
        is_bfloat16 = true;
        return array;
      }
      PyErr_Clear();
    }
  }
  quoka::detail::fail_because(
      name + " is of type " + name_of_type(of) +
      ", but must be an array that hands out its memory by DLPack or the buffer protocol");
}

const quoka::Format* format_of(const dlpack::dtype& type, bool is_bfloat16) {
  const auto is = [&](dlpack::dtype_code code, int bits) {
    return type.code == static_cast<std::uint8_t>(code) && type.bits == bits && type.lanes == 1;
  };
  if (is_bfloat16 || is(dlpack::dtype_code::Bfloat, 16))
    return &quoka::format_of<Eigen::bfloat16>();
  if (is(dlpack::dtype_code::Float, 32)) return &quoka::format_of<float>();
  if (is(dlpack::dtype_code::Float, 16)) return &quoka::format_of<Eigen::half>();
  return nullptr;
}

std::string type_of(const dlpack::dtype& type) {
  constexpr const char* codes[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  return (type.code < 7 ? codes[type.code] : "type " + std::to_string(type.code) + " of ") +
         std::to_string(type.bits);
}

const quoka::Format& channel_major(const quoka::Format& format) {
  if (&format == &quoka::format_of<float>()) return quoka::channel_major_format<float>();
  if (&format == &quoka::format_of<Eigen::half>())
    return quoka::channel_major_format<Eigen::half>();
  return quoka::channel_major_format<Eigen::bfloat16>();
}

// Sizes and strides, in elements, of an array's axes: the last of N axes but for `missing` are its own, those before stay.
template <std::size_t N>
void read_axes(const nb::ndarray<nb::ro>& array, std::array<Index, N>& sizes,
               std::array<Index, N>& strides, std::size_t missing = 0) {
  const std::size_t first = N - missing - array.ndim();
  for (std::size_t axis = 0; axis < array.ndim(); ++axis) {
    sizes[first + axis] = static_cast<Index>(array.shape(axis));
    strides[first + axis] = array.stride(axis);
  }
}

}  // namespace

Array::Array(nb::handle of, const char* name) : original_(nb::borrow(of)), name_(name) {
  bool is_bfloat16 = false;
  held_ = taken(of, name_, is_bfloat16);
  rank_ = static_cast<int>(held_.ndim());
  if (rank_ != 3 && rank_ != 4)
    quoka::detail::fail(name_ + "'s rank", rank_,
                        "but must be 4, [batch, heads, len, dim], or, without batch,", "", 3);
  format_ = format_of(held_.dtype(), is_bfloat16);
  if (format_ == nullptr)
    quoka::detail::fail_because(name_ + " has elements of " + type_of(held_.dtype()) +
                                ", but they must be float32, float16 or bfloat16");
  element_bytes_ = held_.dtype().bits / 8;
  data_ = held_.data();
  sizes_[0] = 1;
  read_axes(held_, sizes_, strides_);
}

quoka::Rows Array::rows() const {
  const auto bytes = [&](std::size_t axis) { return strides_[axis] * element_bytes_; };
  const std::array<Index, 3> strides{bytes(0), bytes(1), bytes(2)};
  const auto* const data = static_cast<const std::byte*>(data_);
  if (sizes_[3] <= 1 || strides_[3] == 1) return {data, *format_, sizes_, strides};
  if (strides_[3] < 1)
    quoka::detail::fail("the step between " + name_ + "'s channels", strides_[3],
                        "but must be at least", "", 1);
  return {data, channel_major(*format_), sizes_, strides, bytes(3)};
}

quoka::Rows Array::pages() const {
  if (rank_ != 4)
    quoka::detail::fail(name_ + "'s rank", rank_,
                        "but of pages, [pages, page_len, kv_heads, dim], it must be", "", 4);
  const quoka::Rows rows = this->rows();
  const auto& [pages, page_len, heads, dim] = rows.sizes();
  const auto& [page_step, token_step, head_step] = rows.strides();
  return {rows.data(),
          rows.format(),
          {pages, heads, page_len, dim},
          {page_step, head_step, token_step},
          rows.shape(0).channel_step};
}

quoka::Rows Array::queries() {
  const quoka::Rows rows = this->rows();
  if (rows.stores_alone() || rows.empty()) return rows;
  copy_.resize(static_cast<std::size_t>(rows.batch() * rows.heads() * rows.len() * rows.dim()));
  float* to = copy_.data();
  for (Index b = 0; b < rows.batch(); ++b)
    for (Index head = 0; head < rows.heads(); ++head)
      for (Index i = 0; i < rows.len(); ++i, to += rows.dim())
        rows.format().widen(rows.row(b, head, i), rows.shape(head), to);
  return quoka::TensorView<const float>(copy_.data(), rows.sizes());
}

quoka::OutputRows Array::output_rows() const {
  if (sizes_[3] > 1 && strides_[3] != 1)
    quoka::detail::fail("the step between " + name_ + "'s channels", strides_[3],
                        "but of what is written it must be", "", 1);
  // An array that is only read says so by its flags: asked for again, to be written.
  nb::ndarray<> written;
  nb::object bits = original_;
  if (&*format_ == &quoka::format_of<Eigen::bfloat16>() && !nb::try_cast(bits, written, false)) {
    PyErr_Clear();
    bits = original_.attr("view")("uint16");
  }
  if (!written.is_valid() && !nb::try_cast(bits, written, false)) {
    PyErr_Clear();
    quoka::detail::fail_because(name_ + " is read-only");
  }
  return {
      static_cast<std::byte*>(const_cast<void*>(data_)),
      *format_,
      sizes_,
      {strides_[0] * element_bytes_, strides_[1] * element_bytes_, strides_[2] * element_bytes_}};
}

MaskArray::MaskArray(nb::handle of) : original_(nb::borrow(of)) {
  bool is_bfloat16 = false;
  held_ = taken(of, "mask", is_bfloat16);
  const auto rank = static_cast<int>(held_.ndim());
  if (rank < 2 || rank > 4)
    quoka::detail::fail("the mask's rank", rank,
                        "but must be 2, [q_len, keys], 3, [heads, q_len, keys], or", "", 4);
  std::array<Index, 4> sizes{1, 1, 1, 1}, steps{};
  read_axes(held_, sizes, steps);
  const Index bytes = held_.dtype().bits / 8;
  if (sizes[3] > 1 && steps[3] != 1)
    quoka::detail::fail("the step between the mask's keys", steps[3], "but must be", "", 1);
  strides_ = {steps[0] * bytes, steps[1] * bytes, steps[2] * bytes};
  const auto type = held_.dtype();
  const bool is_bool =
      type.bits == 8 && (type.code == static_cast<std::uint8_t>(dlpack::dtype_code::Bool) ||
                         type.code == static_cast<std::uint8_t>(dlpack::dtype_code::UInt));
  if (!is_bool) format_ = format_of(type, is_bfloat16);
  if (!is_bool && format_ == nullptr)
    quoka::detail::fail_because("the mask has elements of " + type_of(type) +
                                ", but they must be bool, uint8, float32, float16 or bfloat16");
  mask_ = view(held_.data(), sizes);
}

quoka::Mask MaskArray::view(const void* data, const quoka::Mask::Sizes& sizes) const {
  if (format_ == nullptr) return quoka::Mask::bytes(data, sizes, strides_);
  return quoka::Rows(static_cast<const std::byte*>(data), *format_, sizes, strides_);
}

quoka::Mask MaskArray::sequence(Index b, Index keys) const {
  const auto& [batch, heads, q_len, all] = mask_.sizes();
  return view(mask_.data() + (batch > 1 ? b : 0) * strides_[0], {1, heads, q_len, keys});
}

namespace {

bool is_int(const dlpack::dtype& type, int bits) {
  return type.code == static_cast<std::uint8_t>(dlpack::dtype_code::Int) && type.bits == bits &&
         type.lanes == 1;
}

void require_ints(const nb::ndarray<nb::ro>& of, const char* name) {
  if (!is_int(of.dtype(), 32) && !is_int(of.dtype(), 64))
    quoka::detail::fail_because(std::string(name) + " has elements of " + type_of(of.dtype()) +
                                ", but they must be int32 or int64");
}

Index int_at(const nb::ndarray<nb::ro>& of, Index at) {
  return is_int(of.dtype(), 32) ? Index{static_cast<const std::int32_t*>(of.data())[at]}
                                : Index{static_cast<const std::int64_t*>(of.data())[at]};
}

// A number, an array of rank 1, or a sequence of numbers.
std::vector<Index> lengths_of(nb::handle of) {
  bool is_bfloat16 = false;
  std::vector<Index> lengths;
  Index one = 0;
  if (nb::try_cast(of, one)) return {one};
  PyErr_Clear();
  if (PyList_Check(of.ptr()) != 0 || PyTuple_Check(of.ptr()) != 0) {
    for (const nb::handle x : nb::iter(of)) {
      if (!nb::try_cast(x, one))
        quoka::detail::fail_because("lengths has a " + name_of_type(x) +
                                    ", but must be of whole numbers");
      lengths.push_back(one);
    }
    return lengths;
  }
  const nb::ndarray<nb::ro> array = taken(of, "lengths", is_bfloat16);
  require_ints(array, "lengths");
  if (array.ndim() != 1)
    quoka::detail::fail("the rank of lengths", static_cast<Index>(array.ndim()),
                        "but must be that of [batch],", "", 1);
  for (Index i = 0; i < static_cast<Index>(array.shape(0)); ++i)
    lengths.push_back(int_at(array, i * array.stride(0)));
  return lengths;
}

}  // namespace

PageTables::PageTables(nb::handle table, nb::handle lengths, Index page_len)
    : lengths_(lengths_of(lengths)) {
  bool is_bfloat16 = false;
  held_ = taken(table, "block_table", is_bfloat16);
  require_ints(held_, "block_table");
  const auto rank = static_cast<Index>(held_.ndim());
  if (rank != 1 && rank != 2)
    quoka::detail::fail("the rank of block_table", rank,
                        "but must be 1, [blocks of a sequence], or, with batch,", "", 2);
  std::array<Index, 2> sizes{1, 1}, strides{};
  read_axes(held_, sizes, strides);
  const auto& [sequences, most] = sizes;
  quoka::detail::require_equal("the number of lengths", batch(), "block_table's sequences",
                               sequences);
  quoka::detail::require_at_least("the tokens of a page", page_len, 1);
  copies_.resize(lengths_.size());
  for (Index b = 0; b < batch(); ++b) {
    quoka::detail::require_size("a length", len(b), 0);
    if (is_int(held_.dtype(), 32) && (most <= 1 || strides[1] == 1)) {
      const auto* const data = static_cast<const quoka::Position*>(held_.data());
      tables_.emplace_back(data + b * strides[0], static_cast<std::size_t>(most));
      continue;
    }
    auto& copy = copies_[static_cast<std::size_t>(b)];
    for (Index i = 0; i < std::min(most, quoka::ceil_div(len(b), page_len)); ++i) {
      const Index page = int_at(held_, b * strides[0] + i * strides[1]);
      if (!std::in_range<quoka::Position>(page))
        quoka::detail::fail("an entry of the block table", page, "but must be at most", "",
                            std::numeric_limits<quoka::Position>::max());
      copy.push_back(static_cast<quoka::Position>(page));
    }
    tables_.emplace_back(copy);
  }
}

quoka::Rows PageTables::sequence(const quoka::Rows& pool, Index b) const {
  try {
    return quoka::paged(pool, tables_[static_cast<std::size_t>(b)], len(b));
  } catch (const std::invalid_argument& error) {
    if (batch() == 1) throw;
    quoka::detail::fail_because("sequence " + std::to_string(b) + ": " +
                                std::string(error.what()).substr(std::strlen("quoka: ")));
  }
}

ListsArray::Numbers::Numbers(nb::handle of, const std::string& name, int missing_axes) {
  bool is_bfloat16 = false;
  held = taken(of, name, is_bfloat16);
  const auto rank = static_cast<int>(held.ndim());
  if (rank < 2 - missing_axes || rank > 4 - missing_axes)
    quoka::detail::fail("the rank of " + name, rank,
                        missing_axes == 0 ? "but must be 2, [q_len, k], 3, [kv_heads, q_len, k], or"
                                          : "but must be 1, [q_len], 2, [kv_heads, q_len], or",
                        "", 4 - missing_axes);
  read_axes(held, sizes, strides, static_cast<std::size_t>(missing_axes));
  const dlpack::dtype type = held.dtype();
  if (type.code != static_cast<std::uint8_t>(dlpack::dtype_code::Int) || type.lanes != 1 ||
      (type.bits != 32 && type.bits != 64))
    quoka::detail::fail_because(name + " has elements of " + type_of(type) +
                                ", but they must be int32 or int64");
  if (type.bits == 32 && (sizes[3] <= 1 || strides[3] == 1)) {
    data = static_cast<const quoka::Position*>(held.data());
    strides[3] = 1;
    return;
  }
  copy.reserve(held.size());
  const auto take = [&](Index at) {
    const Index x = type.bits == 32 ? static_cast<const std::int32_t*>(held.data())[at]
                                    : static_cast<const std::int64_t*>(held.data())[at];
    if (!std::in_range<quoka::Position>(x))
      quoka::detail::fail("an entry of " + name, x, "but must be at most", "",
                          std::numeric_limits<quoka::Position>::max());
    copy.push_back(static_cast<quoka::Position>(x));
  };
  for (Index b = 0; b < sizes[0]; ++b)
    for (Index head = 0; head < sizes[1]; ++head)
      for (Index i = 0; i < sizes[2]; ++i)
        for (Index e = 0; e < sizes[3]; ++e)
          take(b * strides[0] + head * strides[1] + i * strides[2] + e * strides[3]);
  data = copy.data();
  strides = {sizes[1] * sizes[2] * sizes[3], sizes[2] * sizes[3], sizes[3], 1};
}

ListsArray::ListsArray(nb::handle entries, nb::handle counts, Index block) {
  entries_.emplace(entries, "lists", 0);
  const quoka::IndexLists::Entries lists(entries_->data, entries_->sizes, entries_->strides);
  if (counts.is_none()) {
    lists_ = quoka::IndexLists(lists, block);
    return;
  }
  counts_.emplace(counts, "counts", 1);
  if (counts_->held.ndim() + 1 != entries_->held.ndim())
    quoka::detail::fail("the rank of counts", static_cast<Index>(counts_->held.ndim()),
                        "but must be lists' without its last axis,", "",
                        static_cast<Index>(entries_->held.ndim()) - 1);
  const auto first_three = [](const std::array<Index, 4>& of) {
    return std::array<Index, 3>{of[0], of[1], of[2]};
  };
  lists_ = quoka::IndexLists(
      lists, block, {counts_->data, first_three(counts_->sizes), first_three(counts_->strides)});
}

HeadWeights::HeadWeights(nb::handle of) {
  bool is_bfloat16 = false;
  held_ = taken(of, "weights", is_bfloat16);
  const auto rank = static_cast<Index>(held_.ndim());
  if (rank != 2 && rank != 3)
    quoka::detail::fail("the rank of weights", rank, "but must be 2, [heads, q_len], or", "", 3);
  if (is_bfloat16 || held_.dtype() != nb::dtype<float>())
    quoka::detail::fail_because("weights has elements of " +
                                (is_bfloat16 ? "bfloat16" : type_of(held_.dtype())) +
                                ", but they must be float32");
  std::array<Index, 3> sizes{1, 1, 1}, strides{};
  read_axes(held_, sizes, strides);
  view_ = {static_cast<const float*>(held_.data()), sizes, strides};
}

std::vector<float> floats(nb::handle of, const char* name) {
  std::vector<float> list;
  if (of.is_none()) return list;
  nb::ndarray<nb::ro> array;
  if (nb::try_cast(of, array, false) && array.is_valid() && array.ndim() == 1 &&
      array.dtype() == nb::dtype<float>() && array.device_type() == nb::device::cpu::value) {
    const auto* const data = static_cast<const float*>(array.data());
    for (std::size_t i = 0; i < array.shape(0); ++i)
      list.push_back(data[static_cast<Index>(i) * array.stride(0)]);
    return list;
  }
  PyErr_Clear();
  try {
    for (const nb::handle x : nb::iter(of))
      list.push_back(static_cast<float>(nb::cast<double>(nb::float_(x))));
  } catch (const nb::python_error&) {
    quoka::detail::fail_because(std::string(name) + " is of type " + name_of_type(of) +
                                ", but must be an array or a sequence of numbers");
  }
  return list;
}

namespace {

// Takes the memory over.
template <class T>
nb::object numpy_array(std::unique_ptr<T[]> memory, std::span<const Index> sizes) {
  std::vector<std::size_t> shape(sizes.begin(), sizes.end());
  T* const data = memory.get();
  const nb::capsule owner(memory.release(),
                          [](void* of) noexcept { delete[] static_cast<T*>(of); });
  return nb::cast(nb::ndarray<nb::numpy, T>(data, shape.size(), shape.data(), owner));
}

}  // namespace

nb::object new_floats(std::span<const Index> sizes) {
  std::size_t count = 1;
  for (const Index size : sizes) count *= static_cast<std::size_t>(size);
  return numpy_array(std::unique_ptr<float[]>(new float[count]), sizes);
}

nb::object new_positions(std::span<const quoka::Position> of, std::span<const Index> sizes) {
  std::unique_ptr<quoka::Position[]> copy(new quoka::Position[of.size()]);
  std::copy(of.begin(), of.end(), copy.get());
  return numpy_array(std::move(copy), sizes);
}

}  // namespace quoka_python
