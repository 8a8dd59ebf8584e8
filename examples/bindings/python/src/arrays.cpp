#include "arrays.hpp"

#include <nanobind/stl/string.h>

#include <quoka/kernels/byte_formats.hpp>

#include <algorithm>
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

// What is imported when it is first asked for, and stays, is no static that an import initialises: an import lets other
// threads run, and these would wait for the static with the GIL, which the import needs.

// numpy.ndarray, which has none of what torch's tensors are asked for.
bool is_numpy(nb::handle of) {
  static PyObject* type = nullptr;
  if (type == nullptr)
    type = nb::object(nb::module_::import_("numpy").attr("ndarray")).release().ptr();
  return reinterpret_cast<PyObject*>(Py_TYPE(of.ptr())) == type;
}

// Properties of a torch tensor beside its memory that DLPack ignores. Valid while torch is loaded, which is until the
// process ends.
struct Torch {
  nb::object forward_ad = nb::module_::import_("torch.autograd.forward_ad");
  nb::object tracing = nb::module_::import_("torch._C").attr("_get_tracing_state");  // None: no

  static const Torch& get() {
    static const Torch* one = nullptr;
    if (one == nullptr) one = new Torch;
    return *one;
  }
};

bool is_tensor(nb::handle of) {
  return !is_numpy(of) && nb::hasattr(of, "is_neg") && nb::hasattr(of, "requires_grad");
}

// A tensor to be read: without the negative bit, whose sign is still to be changed. Refuses what a function without
// derivatives would lose, and what a trace would not see.
nb::object checked_tensor(nb::handle of, const std::string& name) {
  const Torch& torch = Torch::get();
  if (nb::cast<bool>(nb::object(of.attr("requires_grad"))))
    quoka::detail::fail_because(name + " requires a gradient, and there is none here: detach() it");
  if (nb::cast<Index>(torch.forward_ad.attr("_current_level")) >= 0)
    quoka::detail::fail_because(name +
                                " is a tensor under forward-mode differentiation "
                                "(torch.func.jvp, dual_level), and there is no derivative here");
  if (!torch.tracing().is_none())
    quoka::detail::fail_because(
        name +
        " is a tensor under torch.jit.trace, which would keep the result of this call as a "
        "constant: take torch.ops.quoka.attention");
  if (nb::cast<bool>(of.attr("is_neg")())) return nb::object(of.attr("resolve_neg")());
  return nb::borrow(of);
}

// A tensor by torch's C functions for DLPack, in a tenth of the time of its __dlpack__(). None: there are no such
// functions, or the tensor's memory is not handed out by them.
nb::object exchanged(nb::handle of) {
  // The head of DLPack's DLPackExchangeAPI, version 1.
  struct Exchange {
    std::uint32_t major, minor;
    void* previous;
    void* allocate;
    int (*hand_out)(void* tensor, void** managed);
  };
  struct Managed {  // DLPack's DLManagedTensorVersioned
    std::uint32_t major, minor;
    void* manager;
    void (*deleter)(Managed*);
  };
  const nb::object capsule = nb::getattr(of.type(), "__dlpack_c_exchange_api__", nb::none());
  if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return nb::none();
  const auto* const api =
      static_cast<const Exchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  void* managed = nullptr;
  if (api->major != 1 || api->hand_out(of.ptr(), &managed) != 0) {
    PyErr_Clear();
    return nb::none();
  }
  // nanobind renames the capsule when it takes the memory over.
  PyObject* const made = PyCapsule_New(managed, "dltensor_versioned", [](PyObject* of) {
    if (PyCapsule_IsValid(of, "dltensor_versioned") == 0) return;
    auto* const tensor = static_cast<Managed*>(PyCapsule_GetPointer(of, "dltensor_versioned"));
    if (tensor->deleter != nullptr) tensor->deleter(tensor);
  });
  if (made == nullptr) {
    auto* const tensor = static_cast<Managed*>(managed);
    if (tensor->deleter != nullptr) tensor->deleter(tensor);
    throw nb::python_error();
  }
  return nb::steal(made);
}

// Why an array's memory is not handed out.
[[noreturn]] void refuse_array(nb::handle of, const std::string& name) {
  const auto text = [](nb::handle x) { return nb::cast<std::string>(nb::str(x)); };
  if (nb::hasattr(of, "dtype") && nb::hasattr(of, "strides") && nb::hasattr(of, "itemsize")) {
    const nb::object dtype = of.attr("dtype");
    if (nb::hasattr(dtype, "isnative") && !nb::cast<bool>(nb::object(dtype.attr("isnative"))))
      quoka::detail::fail_because(name + " has elements of " + text(dtype) +
                                  ", whose bytes are in the other order: " + name + ".astype(" +
                                  name + ".dtype.newbyteorder(\"=\"))");
    const Index bytes = nb::cast<Index>(nb::object(of.attr("itemsize")));
    Index step = 0, odd_step = 0;  // the last axis' of those that are odd: the smallest, usually
    if (nb::isinstance<nb::tuple>(of.attr("strides")))
      for (const nb::handle x : of.attr("strides"))
        if (nb::try_cast(x, step) && bytes > 0 && step % bytes != 0) odd_step = step;
    if (odd_step != 0)
      quoka::detail::fail_because(name + " has a stride of " + std::to_string(odd_step) +
                                  " bytes, but it must be a multiple of its elements' " +
                                  std::to_string(bytes));
    if (nb::hasattr(dtype, "kind") && text(dtype.attr("kind")) == "f")
      quoka::detail::fail_because(name + " has elements of " + text(dtype) +
                                  ", but they must be float32, float16 or bfloat16");
  }
  quoka::detail::fail_because(
      name + " is of type " + name_of_type(of) +
      ", but must be an array that hands out its memory by DLPack or the buffer protocol");
}

// The array's memory. numpy hands out no bfloat16, which is a type of ml_dtypes there: as 16 bits, and `is_bfloat16`.
nb::ndarray<nb::ro> taken(nb::handle of, const std::string& name, bool& is_bfloat16,
                          bool* may_write = nullptr) {
  nb::ndarray<nb::ro> array;
  nb::object resolved, handed_out;
  if (is_tensor(of)) {
    of = resolved = checked_tensor(of, name);
    handed_out = exchanged(of);
    if (may_write != nullptr) *may_write = !handed_out.is_none();
    if (!handed_out.is_none()) of = handed_out;
  }
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
  refuse_array(of, name);
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

// Sizes and strides, in elements, of an array's axes: the last N - `missing` axes are its own, those before stay. numpy
// gives arrays without elements strides of 0: there strides are those of rows side by side.
template <std::size_t N>
void read_axes(const nb::ndarray<nb::ro>& array, std::array<Index, N>& sizes,
               std::array<Index, N>& strides, std::size_t missing = 0) {
  const std::size_t first = N - missing - array.ndim();
  for (std::size_t axis = 0; axis < array.ndim(); ++axis) {
    sizes[first + axis] = static_cast<Index>(array.shape(axis));
    strides[first + axis] = array.stride(axis);
  }
  if (std::find(sizes.begin(), sizes.end(), 0) == sizes.end()) return;
  Index step = 1;
  for (std::size_t axis = N; axis-- > 0; step *= std::max<Index>(sizes[axis], 1))
    strides[axis] = step;
}

}  // namespace

Array::Array(nb::handle of, const char* name) : original_(nb::borrow(of)), name_(name) {
  bool is_bfloat16 = false;
  held_ = taken(of, name_, is_bfloat16, &may_write_);
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
                        "but of pages, [pages, page_size, kv_heads, dim], it must be", "", 4);
  const quoka::Rows rows = this->rows();
  const auto& [pages, page_size, heads, dim] = rows.sizes();
  const auto& [page_step, token_step, head_step] = rows.strides();
  return {rows.data(),
          rows.format(),
          {pages, heads, page_size, dim},
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
  if (is_tensor(original_) && nb::cast<bool>(original_.attr("is_neg")()))
    quoka::detail::fail_because(name_ +
                                " has torch's negative bit (resolve_neg()), and what is written "
                                "there would be read with the other sign");
  check_writable();
  return {
      static_cast<std::byte*>(const_cast<void*>(data_)),
      *format_,
      sizes_,
      {strides_[0] * element_bytes_, strides_[1] * element_bytes_, strides_[2] * element_bytes_}};
}

void Array::check_writable() const {
  if (may_write_) return;
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
}

MaskArray::MaskArray(nb::handle of, Index q_len, Index keys) {
  bool is_bfloat16 = false;
  held_ = taken(of, "mask", is_bfloat16);
  const auto rank = static_cast<int>(held_.ndim());
  if (rank < 2 || rank > 4)
    quoka::detail::fail("the mask's rank", rank,
                        "but must be 2, [q_len, keys], 3, [heads, q_len, keys], or", "", 4);
  std::array<Index, 4> sizes{1, 1, 1, 1}, steps{};
  read_axes(held_, sizes, steps);
  const auto type = held_.dtype();
  const bool is_bool =
      type.bits == 8 && (type.code == static_cast<std::uint8_t>(dlpack::dtype_code::Bool) ||
                         type.code == static_cast<std::uint8_t>(dlpack::dtype_code::UInt));
  if (!is_bool) format_ = format_of(type, is_bfloat16);
  if (!is_bool && format_ == nullptr)
    quoka::detail::fail_because("the mask has elements of " + type_of(type) +
                                ", but they must be bool, uint8, float32, float16 or bfloat16");
  const Index bytes = type.bits / 8;
  const void* data = held_.data();
  if (sizes[2] == 1) sizes[2] = q_len, steps[2] = 0;
  if (sizes[3] == 1 && keys > 1) sizes[3] = keys, steps[3] = 0;
  if (sizes[3] > 1 && steps[3] != 1) data = copy_rows(sizes, steps, bytes);
  strides_ = {steps[0] * bytes, steps[1] * bytes, steps[2] * bytes};
  mask_ = view(data, sizes);
}

// Each row, with its keys side by side, once for all places of an axis whose step is 0. Changes the steps to the
// copy's.
const void* MaskArray::copy_rows(std::array<Index, 4> sizes, std::array<Index, 4>& steps,
                                 Index bytes) {
  const std::array<Index, 4> from = steps;
  steps = {0, 0, 0, 1};
  Index step = sizes[3];
  for (const std::size_t axis : {2, 1, 0})
    if (from[axis] == 0)
      sizes[axis] = std::min<Index>(sizes[axis], 1);
    else
      steps[axis] = step, step *= sizes[axis];
  copy_.resize(static_cast<std::size_t>(sizes[0] * sizes[1] * sizes[2] * sizes[3] * bytes));
  const auto* const data = static_cast<const std::byte*>(held_.data());
  std::byte* to = copy_.data();
  for (Index b = 0; b < sizes[0]; ++b)
    for (Index head = 0; head < sizes[1]; ++head)
      for (Index i = 0; i < sizes[2]; ++i)
        for (Index key = 0; key < sizes[3]; ++key, to += bytes)
          std::memcpy(to,
                      data + (b * from[0] + head * from[1] + i * from[2] + key * from[3]) * bytes,
                      static_cast<std::size_t>(bytes));
  return copy_.data();
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

PageTables::PageTables(nb::handle table, nb::handle lengths, Index page_size)
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
  quoka::detail::require_at_least("the tokens of a page", page_size, 1);
  copies_.resize(lengths_.size());
  for (Index b = 0; b < batch(); ++b) {
    quoka::detail::require_size("a length", len(b), 0);
    if (is_int(held_.dtype(), 32) && (most <= 1 || strides[1] == 1)) {
      const auto* const data = static_cast<const quoka::Position*>(held_.data());
      tables_.emplace_back(data + b * strides[0], static_cast<std::size_t>(most));
      continue;
    }
    auto& copy = copies_[static_cast<std::size_t>(b)];
    for (Index i = 0; i < std::min(most, quoka::ceil_div(len(b), page_size)); ++i) {
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
  nb::object resolved;
  if (is_tensor(of)) of = resolved = checked_tensor(of, name);
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
nb::object new_floats(std::span<const float> of, std::span<const Index> sizes) {
  std::unique_ptr<float[]> copy(new float[of.size()]);
  std::copy(of.begin(), of.end(), copy.get());
  return numpy_array(std::move(copy), sizes);
}

}  // namespace quoka_python
