// c.h over quoka::compiled: structs become views and options, a call follows, an exception becomes
// a status. There is nothing of attention or selection here. Compile with QUOKA_COMPILED defined,
// and link what compiled.cpp makes.
#include <quoka/c.h>

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/methods/indexer.hpp>
#include <quoka/quoka.hpp>
#include <quoka/runtime/isa.hpp>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

using namespace quoka;
using detail::fail_because;
using detail::require_at_least;
using detail::require_at_most;
using detail::require_size;

static_assert(sizeof(Index) == sizeof(int64_t) && sizeof(Position) == sizeof(int32_t));

namespace {

// ---- errors -------------------------------------------------------------------------------------

thread_local char last_message[1024] = "";

// The executor of the caller failed: not an argument's fault.
struct ExecutorFailed : std::runtime_error {
  using std::runtime_error::runtime_error;
};

quoka_status failed(quoka_status status, const char* message) noexcept {
  std::snprintf(last_message, sizeof last_message, "%s", message);
  return status;
}

// Words in messages of the C++ functions, and the names that c.h has for them.
constexpr std::pair<std::string_view, std::string_view> words[] = {
    {"chunk_in_cache(k, v, q_len) splits a cache that holds the chunk; q_offset or causal = "
     "false says that all keys lie before the queries",
     "cache_holds_chunk says that the last rows of k_cache and v_cache are the chunk; "
     "has_q_offset or bidirectional says that all keys lie before the queries"},
    {"(truncate() was not called)", "(quoka_state_truncate() was not called)"},
    {"truncate(n) of the state to the first keys that are as they were, then appended(), or "
     "truncate(0) for another sequence",
     "quoka_state_truncate() to the first keys that are as they were, then "
     "quoka_state_appended(), or quoka_state_truncate() to 0 for another sequence"},
    {"or select by cosines or by MassOptions::recommended()",
     "or select by QUOKA_PAPER or QUOKA_RECOMMENDED"},
    {"or select by cosines", "or select by QUOKA_PAPER"},
    {"there are lists of each query's keys and a Selection, which all queries share",
     "there are lists of each query's keys and `selection`, which all queries share"},
    {"budget, as a share of the past,", "budget_share"},
    {"the past's first_position", "past_position"},
    {"ThreadPool's workers", "workers"},
    {"past k", "k_cache"},
    {"past v", "v_cache"},
    {"chunk k", "chunk_k"},
    {"chunk v", "chunk_v"}};
std::string in_words_of_c(std::string message) {
  for (const auto& [cpp, c] : words)
    for (std::size_t at = message.find(cpp); at != message.npos;
         at = message.find(cpp, at + c.size()))
      message.replace(at, cpp.size(), c);
  return message;
}

// f(), whose exceptions become a status.
template <class F>
quoka_status guarded(F&& f) noexcept {
  try {
    f();
    return QUOKA_OK;
  } catch (const std::invalid_argument& error) {
    try {
      return failed(QUOKA_INVALID, in_words_of_c(error.what()).c_str());
    } catch (const std::bad_alloc&) {
      return failed(QUOKA_INVALID, error.what());
    }
  } catch (const std::bad_alloc&) {
    return failed(QUOKA_NO_MEMORY, "quoka: an allocation failed");
  } catch (const std::exception& error) {
    return failed(QUOKA_FAILED, error.what());
  } catch (...) {
    return failed(QUOKA_FAILED, "quoka: an exception of an unknown type");
  }
}

template <class T>
T& required(T* pointer, const char* name) {
  if (pointer == nullptr) fail_because(std::string(name) + " is NULL");
  return *pointer;
}
// Keys and values come together, or not at all.
void require_both_or_none(const void* k, const char* k_name, const void* v, const char* v_name) {
  if ((k == nullptr) == (v == nullptr)) return;
  fail_because(std::string(k == nullptr ? k_name : v_name) + " is NULL, but " +
               (k == nullptr ? v_name : k_name) + " is not");
}

// f(), whose refusals say which tensor it is.
template <class F>
void named(const std::string& tensor, F&& f) {
  try {
    f();
  } catch (const std::invalid_argument& error) {
    const std::string_view own = "quoka: ", text = error.what();
    fail_because(tensor + ": " +
                 std::string(text.substr(text.substr(0, own.size()) == own ? own.size() : 0)));
  }
}

// A copy of the caller's struct, whose size may be another version's. Members that an older caller
// does not have are 0; members that only a newer one has must be 0, because nothing here reads
// them.
template <class T>
T known(const T* given, const char* name) {
  constexpr std::size_t first_version = sizeof(T);  // of a struct that grows: as it was in 0.2
  const std::size_t size = required(given, name).size;
  const std::string what = std::string(name) + "'s size";
  require_at_least(what, static_cast<Index>(size), static_cast<Index>(first_version));
  T copy{};
  std::memcpy(&copy, given, std::min(size, sizeof(T)));
  const auto* const bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(T); i < size; ++i)
    if (bytes[i] != 0)
      detail::fail(what, static_cast<Index>(size),
                   "and members that this version does not have are set: it has", "",
                   static_cast<Index>(sizeof(T)));
  return copy;
}
template <class T>
T known_or_default(const T* given, const char* name) {
  if (given == nullptr) return {};
  return known(given, name);
}

// entries[value], of an enumeration.
template <class T, std::size_t n>
const T& chosen(const T (&entries)[n], int32_t value, const std::string& name) {
  require_at_least(name, value, 0);
  require_at_most(name, value, "the last that there is", static_cast<Index>(n) - 1);
  return entries[value];
}

// Sizes, and the least value of each. whose: "the mask's".
struct NamedSize {
  const char* name;
  Index size, least;
};
void require_sizes(const std::string& whose, std::initializer_list<NamedSize> sizes) {
  for (const NamedSize& x : sizes) require_size(whose + " " + x.name, x.size, x.least);
}
// Memory is there, if it has any elements.
void require_data(const std::string& what, const void* data, bool elements,
                  const std::string& count_name, Index count) {
  if (data == nullptr && elements)
    fail_because(what + " is NULL, but " + count_name + " is " + std::to_string(count));
}

// ---- memory -------------------------------------------------------------------------------------

// No memory has more bytes: addresses have at most 57 bits. Sums of a few such numbers do not
// overflow.
constexpr Index most_bytes = Index{1} << 57;

// Elements of `size` bytes lie at a multiple of them. NULL does.
void require_aligned(std::string_view name, const void* data, Index size) {
  const auto past = static_cast<Index>(reinterpret_cast<std::uintptr_t>(data) %
                                       static_cast<std::uintptr_t>(size));
  if (past != 0)
    fail_because(std::string(name) + " begins " + std::to_string(past) +
                 " bytes past a multiple of its elements' bytes, which are " +
                 std::to_string(size));
}
template <class T>
void require_aligned(std::string_view name, const T* data) {
  require_aligned(name, data, static_cast<Index>(alignof(T)));
}

// Bytes of all sizes together.
Index checked_product(std::string_view name, std::initializer_list<Index> sizes) {
  Index product = 1;
  for (const Index size : sizes) {
    const Index before = product;
    if (__builtin_mul_overflow(before, size, &product) || product > most_bytes)
      detail::fail(name, before, "and too large for any memory, times", "a size", size);
  }
  return product;
}

// An axis of a tensor: its name, its size, and the elements from one to the next.
struct Axis {
  const char* name;
  Index size, stride;
};

// The bytes of a tensor, counted from its first element: [begin, end).
struct Extent {
  Index begin = 0, end = 0;
};

// The extent of `inner` bytes at each place of the axes, whose strides count `step` bytes. Refuses
// strides that lead beyond any memory, and those in bytes that are not a multiple of an element's.
Extent checked_extent(std::string_view name, std::initializer_list<Axis> axes, Index inner,
                      Index step, Index element) {
  const auto refuse = [&](const Axis& axis, std::string_view relation, std::string_view limit,
                          Index value) {
    detail::fail(std::string(name) + "'s stride of " + axis.name, axis.stride, relation, limit,
                 value);
  };
  Extent all{0, inner};
  bool empty = false;
  for (const Axis& axis : axes) {
    empty = empty || axis.size == 0;
    Index reach;
    if (__builtin_mul_overflow(std::max<Index>(axis.size - 1, 1), axis.stride, &reach) ||
        __builtin_mul_overflow(reach, step, &reach) || reach < -most_bytes || reach > most_bytes)
      refuse(axis, "and leads beyond any memory, along", "the axis's size", axis.size);
    if (axis.size <= 1) continue;
    if (axis.stride * step % element != 0)
      refuse(axis, "but must be a multiple of", "an element's bytes", element);
    (reach < 0 ? all.begin : all.end) += reach;
  }
  return empty ? Extent{} : all;
}

std::span<const float> floats(const quoka_floats& given, const char* name) {
  require_at_least(std::string(name) + "'s count", given.count, 0);
  if (given.data == nullptr && given.count > 0)
    detail::fail(std::string(name) + "'s count", given.count, "but its data is NULL: it must be",
                 "", 0);
  require_aligned(name, given.data);
  return {given.data, static_cast<std::size_t>(given.data == nullptr ? 0 : given.count)};
}

// ---- tensors ------------------------------------------------------------------------------------

using FormatOf = const Format& (*)();
constexpr FormatOf formats[] = {format_of<float>,
                                format_of<Eigen::half>,
                                format_of<Eigen::bfloat16>,
                                q8_0_format,
                                u8_format,
                                i8_format,
                                i8_channel_format,
                                e4m3_format};
constexpr FormatOf channel_major_formats[] = {channel_major_format<float>,
                                              channel_major_format<Eigen::half>,
                                              channel_major_format<Eigen::bfloat16>};

std::size_t unsigned_count(Index count) { return static_cast<std::size_t>(count); }

// Bytes of a channel, where rows are arrays of channels; 1 for rows that may lie anywhere.
constexpr Index element_bytes[] = {4, 2, 2, 1, 1, 1, 1, 1};
static_assert(std::size(element_bytes) == std::size(formats));

template <class Byte>
BasicRows<Byte> placed_rows(const quoka_tensor& x, const std::string& name) {
  const Index batch = x.batch == 0 ? 1 : x.batch;
  require_sizes(name + "'s",
                {{"batch", batch, 1}, {"heads", x.heads, 1}, {"len", x.len, 0}, {"dim", x.dim, 1}});
  require_at_least(name + "'s channel_step", x.channel_step, 0);
  require_data(name + "'s data", x.data, x.len > 0, "its len", x.len);
  const Format& format = x.channel_step > 0 ? chosen(channel_major_formats, x.type,
                                                     name + "'s type, whose channels lie apart,")()
                                            : chosen(formats, x.type, name + "'s type")();
  const Index unit = element_bytes[x.type];
  require_aligned(name, x.data, unit);
  checked_extent(name, {{"channels", x.dim, x.channel_step}}, unit, 1, unit);
  const Index row_bytes = format.row_bytes({x.dim, x.channel_step, nullptr});
  checked_product(name + "'s size", {row_bytes, batch, x.heads, x.len});
  const std::array<Index, 4> sizes{batch, x.heads, x.len, x.dim};
  std::array<Index, 3> strides{};
  constexpr quoka_layout layouts[] = {QUOKA_STRIDED, QUOKA_TOKEN_MAJOR, QUOKA_HEAD_MAJOR};
  const quoka_layout layout = chosen(layouts, x.layout, name + "'s layout");
  const Index bytes = x.bytes > unsigned_count(std::numeric_limits<Index>::max())
                          ? std::numeric_limits<Index>::max()
                          : static_cast<Index>(x.bytes);
  if (layout == QUOKA_STRIDED) {
    std::copy_n(x.strides, 3, strides.begin());
  } else {
    const auto order =
        layout == QUOKA_TOKEN_MAJOR ? detail::LayoutOrder::tokens : detail::LayoutOrder::heads;
    named(name, [&] {
      const auto laid_out = detail::layout_strides(
          order, unit, row_bytes, x.len, x.heads,
          {.batch = batch, .capacity = x.capacity, .step_bytes = x.step_bytes});
      if (bytes > 0)
        require_at_most(x.capacity == 0 ? "the size that len, heads and dim come to"
                                        : "the size that capacity, heads and dim come to",
                        laid_out.buffer, "bytes", bytes);
      strides = {laid_out.batch, laid_out.head, laid_out.row};
    });
  }
  const Extent extent = checked_extent(
      name,
      {{"batch", batch, strides[0]}, {"heads", x.heads, strides[1]}, {"len", x.len, strides[2]}},
      row_bytes, 1, unit);
  if (layout == QUOKA_STRIDED && bytes > 0 && extent.begin == 0)
    require_at_most("the bytes that " + name + "'s sizes and strides reach", extent.end,
                    "its bytes", bytes);
  BasicRows<Byte> rows(static_cast<Byte*>(x.data), format, sizes, strides, x.channel_step);
  if (x.scales != nullptr) {
    if (format.separate_scales(x.dim) == 0)
      fail_because(name + " has scales, and rows of " + format.name + " have none apart");
    require_aligned(name + "'s scales", x.scales);
    constexpr auto number = static_cast<Index>(sizeof(float));
    checked_extent(name + "'s scales", {{"heads", x.heads, x.scales_step}},
                   format.separate_scales(x.dim) * number, number, number);
    rows = rows.with_scales(x.scales, x.scales_step);
  }
  return rows;
}

// A list of the caller's.
std::span<const Position> list(const int32_t* data, Index count, const char* name) {
  require_size(std::string("the count of ") + name, count, 0);
  require_aligned(name, data);
  return {data, unsigned_count(count)};
}

Rows rows(const quoka_tensor* given, const char* name) {
  const quoka_tensor x = known(given, name);
  Rows all = placed_rows<const std::byte>(x, name);
  named(name, [&] {
    if (x.table != nullptr) all = paged(all, list(x.table, x.table_count, "the table"), x.tokens);
    if (x.cells != nullptr) all = all.gathered(list(x.cells, x.cells_count, "the list of cells"));
  });
  return all;
}
// Empty if there is no tensor.
Rows rows_or_none(const quoka_tensor* given, const char* name) {
  return given == nullptr ? Rows() : rows(given, name);
}

OutputRows output_rows(const quoka_tensor* given, const char* name) {
  const quoka_tensor x = known(given, name);
  if (x.table != nullptr || x.cells != nullptr)
    fail_because(std::string(name) + " is written, and has pages or cells");
  return placed_rows<std::byte>(x, name);
}

// The tensor of rows that are not mapped.
void write_tensor(quoka_tensor* to, const char* name, const Rows& rows, int32_t type) {
  quoka_tensor x = known(to, name);
  const std::size_t size = x.size;
  x = {};
  x.size = size;
  x.data = const_cast<std::byte*>(rows.data());
  x.type = type;
  x.batch = rows.batch(), x.heads = rows.heads(), x.len = rows.len(), x.dim = rows.dim();
  std::copy_n(rows.strides().begin(), 3, x.strides);
  x.scales = rows.shape(0).scales;
  if (x.scales != nullptr && rows.heads() > 1) x.scales_step = rows.shape(1).scales - x.scales;
  std::memcpy(to, &x, std::min(size, sizeof x));
}

// A float of each query row, [batch, heads, len] of q. strides: in floats; all 0: without gaps.
template <class T>
TensorView<T, 3> row_view(std::string_view name, T* data, const Rows& q, const int64_t* strides) {
  if (data == nullptr) return {};
  require_aligned(name, data);
  std::array<Index, 3> steps{q.heads() * q.len(), q.len(), 1};
  if (strides != nullptr && (strides[0] != 0 || strides[1] != 0 || strides[2] != 0))
    std::copy_n(strides, 3, steps.begin());
  constexpr auto number = static_cast<Index>(sizeof(float));
  checked_extent(
      name,
      {{"batch", q.batch(), steps[0]}, {"heads", q.heads(), steps[1]}, {"len", q.len(), steps[2]}},
      number, number, number);
  return {data, {q.batch(), q.heads(), q.len()}, steps};
}

// ---- options ------------------------------------------------------------------------------------

Arithmetic arithmetic(int32_t value) {
  if (value == 3 || value == 4)  // two and three products of bfloat16 had a name of their own
    fail_because("the arithmetic is " + std::to_string(value) + ", bfloat16_x" +
                 std::to_string(value - 1) +
                 ", which is gone: take QUOKA_ARITHMETIC_AUTOMATIC (0)");
  constexpr Arithmetic all[] = {Arithmetic::automatic, Arithmetic::float_,    Arithmetic::bf16,
                                Arithmetic::automatic, Arithmetic::automatic, Arithmetic::int8};
  return chosen(all, value, "the arithmetic");
}

Mask mask(const quoka_mask* given) {
  if (given == nullptr) return {};
  const quoka_mask x = known(given, "the mask");
  constexpr quoka_mask_type types[] = {QUOKA_MASK_F32, QUOKA_MASK_F16, QUOKA_MASK_BF16,
                                       QUOKA_MASK_BYTES, QUOKA_MASK_BITS};
  const quoka_mask_type type = chosen(types, x.type, "the mask's type");
  const std::array<Index, 4> sizes{x.batch == 0 ? 1 : x.batch, x.heads == 0 ? 1 : x.heads, x.q_len,
                                   x.keys};
  require_sizes("the mask's", {{"batch", sizes[0], 1},
                               {"heads", sizes[1], 1},
                               {"q_len", sizes[2], 0},
                               {"keys", sizes[3], 0}});
  require_data("the mask's data", x.data, sizes[2] * sizes[3] > 0, "its q_len", sizes[2]);
  const Index unit = type == QUOKA_MASK_F32                              ? 4
                     : type == QUOKA_MASK_F16 || type == QUOKA_MASK_BF16 ? 2
                                                                         : 1;
  const Index row = type == QUOKA_MASK_BITS ? ceil_div(x.keys, 8) : x.keys * unit;
  std::array<Index, 3> strides{x.strides[0], x.strides[1], x.strides[2]};
  if (strides == std::array<Index, 3>{}) {
    checked_product("the mask's size", {row, sizes[2], sizes[1], sizes[0]});
    strides = {row * sizes[2] * sizes[1], row * sizes[2], row};
  }
  require_aligned("the mask", x.data, unit);
  checked_extent("the mask",
                 {{"batch", sizes[0], strides[0]},
                  {"heads", sizes[1], strides[1]},
                  {"q_len", sizes[2], strides[2]}},
                 row, 1, unit);
  const Mask mask =
      type == QUOKA_MASK_BYTES ? Mask::bytes(x.data, sizes, strides)
      : type == QUOKA_MASK_BITS
          ? Mask::bits(x.data, sizes, strides)
          : Mask(Rows(static_cast<const std::byte*>(x.data), formats[x.type](), sizes, strides));
  return x.as_lists != 0 ? mask.as_lists() : mask;
}

IndexLists index_lists(const quoka_index_lists* given) {
  if (given == nullptr) return {};
  quoka_index_lists x = known(given, "the index lists");
  if (x.batch == 0) x.batch = 1;
  if (x.heads == 0) x.heads = 1;
  if (x.block == 0) x.block = 1;
  require_sizes(
      "the lists'",
      {{"batch", x.batch, 1}, {"heads", x.heads, 1}, {"q_len", x.q_len, 0}, {"k", x.k, 0}});
  require_data("the lists' entries", x.entries, x.q_len * x.k > 0, "their k", x.k);
  require_aligned("the lists' entries", x.entries);
  require_aligned("the lists' counts", x.counts);
  checked_product("the lists' size", {sizeof(Position), x.k, x.q_len, x.heads, x.batch});
  const IndexLists::Entries entries(x.entries, {x.batch, x.heads, x.q_len, x.k});
  IndexLists::Counts counts;
  if (x.counts != nullptr)
    counts = {x.counts, {x.batch, x.heads, x.q_len}, {x.heads * x.q_len, x.q_len, 1}};
  return IndexLists(entries, x.block, counts);
}

AttentionOptions attention_options(const quoka_attention_options* given) {
  const quoka_attention_options x = known_or_default(given, "the attention options");
  AttentionOptions options;
  if (x.scale != 0.0f) options.scale = x.scale;
  options.softcap = x.softcap;
  options.sinks = floats(x.sinks, "sinks");
  options.sliding_window = x.sliding_window;
  options.arithmetic = arithmetic(x.arithmetic);
  if (x.has_q_offset != 0) options.q_offset = x.q_offset;
  options.causal = x.bidirectional == 0;
  options.mask = mask(x.mask);
  options.mask_factors = floats(x.mask_factors, "mask_factors");
  options.alibi_slopes = floats(x.alibi_slopes, "alibi_slopes");
  options.lists = index_lists(x.lists);
  return options;
}

IndexerOptions indexer_options(const quoka_indexer_options* given) {
  const quoka_indexer_options x = known_or_default(given, "the indexer's options");
  IndexerOptions options{
      .keep_first = x.keep_first, .keep_last = x.keep_last, .causal = x.bidirectional == 0};
  if (x.k != 0) options.k = x.k;
  if (x.block != 0) options.block = x.block;
  if (x.lists_heads != 0) options.lists_heads = x.lists_heads;
  return options;
}

SelectionOptions selection_options(const quoka_selection_options* given) {
  const quoka_selection_options x = known_or_default(given, "the selection options");
  if (x.budget_keys != 0 && x.budget_share != 0.0)
    fail_because("budget_keys is " + std::to_string(x.budget_keys) + " and budget_share is " +
                 std::to_string(x.budget_share) + ": set one of them");
  require_size("budget_keys", x.budget_keys, 0);
  std::optional<Budget> budget;
  if (x.budget_share != 0.0) budget = Budget::share(x.budget_share);
  if (x.budget_keys != 0) budget = Budget::keys(Index{x.budget_keys});
  constexpr const char* presets[] = {"recommended", "paper", "balanced"};  // as in quoka_preset
  SelectionOptions options = selection_preset(chosen(presets, x.preset, "the preset"), budget);
  require_size("keep_first", x.keep_first, 0);
  require_size("keep_last", x.keep_last, 0);
  require_size("queries", x.queries, 0);
  if (x.queries > 0) set_queries(options, x.queries);
  std::visit(
      [&](auto& of) {
        of.keep_first = x.keep_first, of.keep_last = x.keep_last;
        if (x.no_sketch != 0) of.sketch = Sketch::off;
      },
      options);
  return options;
}

// ---- threads ------------------------------------------------------------------------------------

// The caller's executor. Exceptions of tasks stay on this side of it: the first is thrown again
// once it returns.
class CallersExecutor {
 public:
  explicit CallersExecutor(const quoka_executor& of) : of_(of) {}

  int workers() const { return of_.workers; }
  template <class F>
  void run(Index tasks, F&& f) {
    Call call{.f = TaskRef(f), .tasks = tasks, .workers = of_.workers};
    const int32_t status = run_caller(tasks, call);
    if (call.first) std::rethrow_exception(call.first);
    const Index done = call.done.load();
    if (status != 0)
      throw ExecutorFailed("quoka: the executor's run returned " + std::to_string(status) +
                           " after " + std::to_string(done) + " of " + std::to_string(tasks) +
                           " tasks");
    if (done != tasks)
      throw ExecutorFailed("quoka: the executor ran " + std::to_string(done) +
                           " tasks, but was given " + std::to_string(tasks));
    if (call.squares.load() != squares_below(tasks))
      throw ExecutorFailed("quoka: the executor ran " + std::to_string(done) + " tasks of " +
                           std::to_string(tasks) + ", but some twice and others not at all");
  }

 private:
  struct Call {
    TaskRef f;
    Index tasks;
    int32_t workers;
    std::atomic<Index> done{0};
    std::atomic<std::uint64_t> squares{0};  // the sum of those of the tasks that are done
    std::mutex mutex{};
    std::exception_ptr first{};
  };

  // The caller's function may be one of C++ that throws: that is not an argument's fault.
  int32_t run_caller(Index tasks, Call& call) const {
    try {
      return of_.run(of_.context, tasks, run_task, &call);
    } catch (const std::exception& error) {
      throw ExecutorFailed(std::string("quoka: the executor's run threw: ") + error.what());
    } catch (...) {
      throw ExecutorFailed("quoka: the executor's run threw an exception of an unknown type");
    }
  }

  // The sum of squares of all tasks: another one where a task was run in another one's place.
  static std::uint64_t squares_below(Index tasks) {
    __extension__ using Wide = unsigned __int128;
    const auto n = static_cast<Wide>(tasks);
    return static_cast<std::uint64_t>(n < 1 ? 0 : (n - 1) * n * (2 * n - 1) / 6);
  }

  static void require_in_range(const char* what, Index value, const char* limit, Index end) {
    if (value < 0 || value >= end)
      throw ExecutorFailed("quoka: the executor's " + std::string(what) + " is " +
                           std::to_string(value) + ", but must be at least 0 and below its " +
                           limit + ", which is " + std::to_string(end));
  }
  static void run_task(void* argument, int64_t task, int32_t worker) noexcept {
    Call& call = *static_cast<Call*>(argument);
    try {
      require_in_range("worker", worker, "workers", call.workers);
      require_in_range("task", task, "tasks", call.tasks);
      call.f(task, worker);
      call.squares += static_cast<std::uint64_t>(task) * static_cast<std::uint64_t>(task);
      ++call.done;
    } catch (...) {
      const std::lock_guard lock(call.mutex);
      if (!call.first) call.first = std::current_exception();
    }
  }

  quoka_executor of_;
};

}  // namespace

// ---- handles ------------------------------------------------------------------------------------

struct quoka_threads {
  explicit quoka_threads(int32_t workers) : pool(std::in_place, workers) {}
  explicit quoka_threads(const quoka_executor& executor) : callers(executor) {}

  std::optional<ThreadPool> pool;
  std::optional<CallersExecutor> callers;
};

struct quoka_workspace {
  AttentionWorkspace of;
};

struct quoka_selection {
  Selection of;
};

struct quoka_state {
  explicit quoka_state(const SelectionOptions& options) : selector(options) {}

  AnySelector selector;
  AnySelector::State state;
};

struct quoka_indexer {
  explicit quoka_indexer(const IndexerOptions& options) : of(options) {}

  Indexer of;
};

struct quoka_cache {
  KvCache of;
  int32_t k_type, v_type;
};

struct quoka_prefill {
  using Dense = ChunkedPrefill<DenseSelector>;
  using Selecting = ChunkedPrefill<AnySelector>;

  template <class Layer, class... Args>
  explicit quoka_prefill(std::in_place_type_t<Layer> kind, const Args&... args)
      : of(kind, args...) {}

  std::variant<Dense, Selecting> of;
};

namespace {

SerialExecutor calling_thread;

ExecutorRef executor(quoka_threads* threads) {
  if (threads == nullptr) return calling_thread;
  if (threads->pool) return *threads->pool;
  return *threads->callers;
}

// use(layer) of either kind.
template <class Prefill, class Use>
auto with_layer(Prefill* layer, Use&& use) {
  return std::visit(use, required(layer, "layer").of);
}

// A handle made by `make`, written to `to` once nothing can fail.
template <class Handle, class Make>
quoka_status created(Handle** to, const char* name, Make&& make) noexcept {
  return guarded([&] {
    Handle*& handle = required(to, name);
    handle = make().release();
  });
}

struct CacheShape {
  explicit CacheShape(const quoka_cache_options* given)
      : x(known(given, "the cache options")),
        k_format(chosen(formats, x.k_type, "the cache's k_type")()),
        v_format(chosen(formats, x.v_type, "the cache's v_type")()),
        k_scales(floats(x.k_scales, "k_scales")),
        v_scales(floats(x.v_scales, "v_scales")) {
    if (x.batch == 0) x.batch = 1;
    if (x.v_dim == 0) x.v_dim = x.head_dim;
    require_sizes("the cache's", {{"batch", x.batch, 1},
                                  {"kv_heads", x.kv_heads, 1},
                                  {"head_dim", x.head_dim, 1},
                                  {"v_dim", x.v_dim, 1}});
    checked_product("the size of a token's keys",
                    {k_format.row_bytes({x.head_dim}), x.batch, x.kv_heads});
    checked_product("the size of a token's values",
                    {v_format.row_bytes({x.v_dim}), x.batch, x.kv_heads});
  }

  quoka_cache_options x;
  const Format &k_format, &v_format;
  std::span<const float> k_scales, v_scales;
};

}  // namespace

// ---- the functions ------------------------------------------------------------------------------

const char* quoka_message(void) { return last_message; }

const char* quoka_version(void) { return QUOKA_VERSION_STRING; }

const char* quoka_isa(void) { return isa(); }

quoka_status quoka_threads_create(int32_t workers, quoka_threads** threads) {
  return created(threads, "threads", [&] { return std::make_unique<quoka_threads>(workers); });
}

quoka_status quoka_threads_of_caller(const quoka_executor* executor, quoka_threads** threads) {
  return created(threads, "threads", [&] {
    const quoka_executor x = known(executor, "the executor");
    require_at_least("the executor's workers", x.workers, 1);
    if (x.run == nullptr) fail_because("the executor's run is NULL");
    return std::make_unique<quoka_threads>(x);
  });
}

void quoka_threads_free(quoka_threads* threads) { delete threads; }

quoka_status quoka_alibi_slopes(int64_t q_heads, float max_bias, float* slopes) {
  return guarded([&] {
    detail::require_keys("q_heads", q_heads);
    require_aligned("slopes", slopes);
    required(slopes, "slopes");
    const std::vector<float> made = alibi_slopes(q_heads, max_bias);
    std::copy(made.begin(), made.end(), slopes);
  });
}

quoka_status quoka_workspace_create(quoka_workspace** workspace) {
  return created(workspace, "workspace", [] { return std::make_unique<quoka_workspace>(); });
}

void quoka_workspace_free(quoka_workspace* workspace) { delete workspace; }

quoka_status quoka_attention(const quoka_attention_args* args) {
  return guarded([&] {
    const quoka_attention_args x = known(args, "args");
    const Rows q = rows(x.q, "q");
    require_both_or_none(x.k_cache, "k_cache", x.v_cache, "v_cache");
    if (x.cache_holds_chunk == 0) require_both_or_none(x.chunk_k, "chunk_k", x.chunk_v, "chunk_v");
    if (x.k_cache == nullptr && x.cache_holds_chunk != 0)
      fail_because("k_cache is NULL, but cache_holds_chunk is set");
    if (x.k_cache == nullptr && x.chunk_k == nullptr)
      fail_because("k_cache and chunk_k are NULL: there are no keys");
    Rows past_k = rows_or_none(x.k_cache, "k_cache"), past_v = rows_or_none(x.v_cache, "v_cache");
    Chunk chunk{rows_or_none(x.chunk_k, "chunk_k"), rows_or_none(x.chunk_v, "chunk_v")};
    if (x.cache_holds_chunk != 0) {
      if (x.chunk_k != nullptr || x.chunk_v != nullptr)
        fail_because(
            "cache_holds_chunk is set, and there are chunk_k or chunk_v: the chunk would count "
            "twice");
      const CachedChunk both = chunk_in_cache(past_k, past_v, q.len());
      past_k = both.past.k, past_v = both.past.v, chunk = both.chunk;
    }
    Past past(past_k, past_v);
    past.selection = x.selection != nullptr ? &x.selection->of : nullptr;
    past.first_position = x.past_position;
    const AttentionOptions options = attention_options(x.options);
    const AttentionOutput output(output_rows(x.out, "out"),
                                 row_view("lse_nat", x.lse_nat, q, x.lse_strides));
    if (x.workspace != nullptr)
      attention(q, past, chunk, output, options, executor(x.threads), x.workspace->of);
    else
      attention(q, past, chunk, output, options, executor(x.threads));
  });
}

quoka_status quoka_selection_create(quoka_selection** selection) {
  return created(selection, "selection", [] { return std::make_unique<quoka_selection>(); });
}

void quoka_selection_free(quoka_selection* selection) { delete selection; }

quoka_status quoka_selection_set(quoka_selection* selection, int64_t batch, int64_t heads,
                                 int64_t kv_len, const int32_t* positions, const int64_t* counts) {
  return guarded([&] {
    quoka_selection& to = required(selection, "selection");
    require_size("batch", batch, 1);
    require_size("heads", heads, 1);
    require_size("kv_len", kv_len, 0);
    require_aligned("counts", counts);
    required(counts, "counts");
    require_aligned("positions", positions);
    checked_product("the size of counts", {sizeof(int64_t), batch, heads});
    Index most = 0, total = 0;
    for (Index list = 0; list < batch * heads; ++list) {
      require_at_least("an entry of counts", counts[list], 0);
      require_at_most("an entry of counts", counts[list], "kv_len", kv_len);
      most = std::max<Index>(most, counts[list]), total += counts[list];
    }
    if (total > 0) required(positions, "positions");
    Selection made;
    SelectionWriter writer(made, batch, heads, kv_len, most);
    for (Index list = 0; list < batch * heads; ++list) {
      std::copy_n(positions, counts[list], writer.row(list / heads, list % heads).begin());
      writer.set_count(list / heads, list % heads, counts[list]);
      if (positions != nullptr) positions += counts[list];
    }
    writer.commit();
    to.of = std::move(made);
  });
}

quoka_status quoka_selection_shape(const quoka_selection* selection, int64_t* batch, int64_t* heads,
                                   int64_t* kv_len, int32_t* is_all) {
  return guarded([&] {
    const Selection& of = required(selection, "selection").of;
    if (batch != nullptr) *batch = of.batch();
    if (heads != nullptr) *heads = of.heads();
    if (kv_len != nullptr) *kv_len = of.kv_len();
    if (is_all != nullptr) *is_all = of.is_all() ? 1 : 0;
  });
}

namespace {

// The selection, which has this list.
const Selection& with_list(const quoka_selection* selection, int64_t b, int64_t head) {
  const Selection& of = required(selection, "selection").of;
  require_at_least("the sequence", b, 0);
  require_at_most("the sequence", b, "the selection's last", of.batch() - 1);
  require_at_least("the head", head, 0);
  require_at_most("the head", head, "the selection's last", of.heads() - 1);
  return of;
}

}  // namespace

quoka_status quoka_selection_row(const quoka_selection* selection, int64_t b, int64_t head,
                                 const int32_t** positions, int64_t* count) {
  return guarded([&] {
    const Selection& of = with_list(selection, b, head);
    required(count, "count") = of.count(b, head);
    required(positions, "positions") = of.row(b, head).data();
  });
}

quoka_status quoka_selection_kept_share(const quoka_selection* selection, int64_t b, int64_t head,
                                        float* share) {
  return guarded([&] {
    const Selection& of = with_list(selection, b, head);
    const std::span<const float> shares = of.kept_shares();
    required(share, "share") = of.is_all() ? 1.0f
                               : shares.empty()
                                   ? std::numeric_limits<float>::quiet_NaN()
                                   : shares[static_cast<std::size_t>(b * of.heads() + head)];
  });
}

quoka_status quoka_state_create(const quoka_selection_options* options, quoka_state** state) {
  return created(state, "state",
                 [&] { return std::make_unique<quoka_state>(selection_options(options)); });
}

void quoka_state_free(quoka_state* state) { delete state; }

quoka_status quoka_state_appended(quoka_state* state, const quoka_tensor* k, int64_t capacity,
                                  quoka_threads* threads) {
  return guarded([&] {
    quoka_state& of = required(state, "state");
    require_size("capacity", capacity, 0);
    of.selector.appended({.q = {}, .k = rows(k, "k"), .capacity = capacity}, of.state,
                         executor(threads));
  });
}

quoka_status quoka_state_truncate(quoka_state* state, int64_t kv_len) {
  return guarded([&] {
    require_at_least("truncate's len", kv_len, 0);
    required(state, "state").state.truncate(kv_len);
  });
}

quoka_status quoka_select(const quoka_select_args* args, quoka_selection* selection) {
  return guarded([&] {
    const quoka_select_args x = known(args, "args");
    Selection& to = required(selection, "selection").of;
    if (x.state != nullptr && x.how != nullptr)
      fail_because("there is a state, which selects by its own options, and there are others");
    std::optional<quoka_state> own;
    if (x.state == nullptr) own.emplace(selection_options(x.how));
    quoka_state& with = x.state != nullptr ? *x.state : *own;
    const AttentionOptions options = attention_options(x.options);
    if (x.cache_holds_chunk != 0 && x.chunk_k != nullptr)
      fail_because("cache_holds_chunk is set, and there is chunk_k: the chunk would count twice");
    if ((x.cache_holds_chunk != 0 || x.chunk_k != nullptr) && !options.mask.absent())
      fail_because(std::string("there is a mask, which may hide the chunk's keys, and there is ") +
                   (x.chunk_k != nullptr ? "chunk_k" : "cache_holds_chunk"));
    const Rows q = rows(x.q, "q");
    Rows past_k = rows(x.k_cache, "k_cache"), chunk_k = rows_or_none(x.chunk_k, "chunk_k");
    if (x.cache_holds_chunk != 0) {
      const CachedChunk both = chunk_in_cache(past_k, past_k, q.len());
      past_k = both.past.k, chunk_k = both.chunk.k;
    }
    const SelectorInput input{.q = q, .k = past_k, .logits = options, .chunk_k = chunk_k};
    select_visible(with.selector, input, options.mask, with.state, to, executor(x.threads));
  });
}

quoka_status quoka_indexer_create(const quoka_indexer_options* options, quoka_indexer** indexer) {
  return created(indexer, "indexer",
                 [&] { return std::make_unique<quoka_indexer>(indexer_options(options)); });
}

void quoka_indexer_free(quoka_indexer* indexer) { delete indexer; }

quoka_status quoka_index_keys(quoka_indexer* indexer, const quoka_index_args* args,
                              quoka_index_lists* lists) {
  return guarded([&] {
    const quoka_index_args x = known(args, "args");
    Indexer& of = required(indexer, "indexer").of;
    quoka_index_lists to = known(lists, "the index lists");
    const Rows q = rows(x.q, "q");
    const IndexLists made =
        of.choose({.q = q,
                   .k = rows(x.k, "k"),
                   .weights = row_view("weights", x.weights, q, x.weights_strides),
                   .mask = mask(x.mask)},
                  executor(x.threads));
    to.entries = made.entries().data(), to.counts = nullptr;
    to.batch = made.batch(), to.heads = made.heads(), to.q_len = made.q_len();
    to.k = made.most(), to.block = made.block();
    std::memcpy(lists, &to, sizeof to);
  });
}

quoka_status quoka_cache_create(const quoka_cache_options* options, quoka_cache** cache) {
  return created(cache, "cache", [&] {
    const CacheShape of(options);
    return std::unique_ptr<quoka_cache>(new quoka_cache{{of.x.batch,
                                                         of.x.kv_heads,
                                                         of.x.head_dim,
                                                         of.x.v_dim,
                                                         {of.k_format, of.k_scales},
                                                         {of.v_format, of.v_scales}},
                                                        of.x.k_type,
                                                        of.x.v_type});
  });
}

void quoka_cache_free(quoka_cache* cache) { delete cache; }

quoka_status quoka_cache_append(quoka_cache* cache, const quoka_tensor* k, const quoka_tensor* v,
                                quoka_threads* threads) {
  return guarded(
      [&] { required(cache, "cache").of.append(rows(k, "k"), rows(v, "v"), executor(threads)); });
}

quoka_status quoka_cache_truncate(quoka_cache* cache, int64_t len) {
  return guarded([&] { required(cache, "cache").of.truncate(len); });
}

quoka_status quoka_cache_reserve(quoka_cache* cache, int64_t capacity) {
  return guarded([&] {
    require_size("capacity", capacity, 0);
    required(cache, "cache").of.reserve(capacity);
  });
}

int64_t quoka_cache_len(const quoka_cache* cache) {
  return cache == nullptr ? -1 : cache->of.len();
}

quoka_status quoka_cache_view(const quoka_cache* cache, quoka_tensor* k, quoka_tensor* v) {
  return guarded([&] {
    const quoka_cache& of = required(cache, "cache");
    known(k, "k"), known(v, "v");
    write_tensor(k, "k", of.of.k(), of.k_type);
    write_tensor(v, "v", of.of.v(), of.v_type);
  });
}

quoka_status quoka_prefill_create(int64_t q_heads, const quoka_cache_options* cache,
                                  const quoka_attention_options* options,
                                  const quoka_selection_options* how, quoka_prefill** layer) {
  return created(layer, "layer", [&]() -> std::unique_ptr<quoka_prefill> {
    const CacheShape of(cache);
    require_size("q_heads", q_heads, 1);
    const LayerShape shape{.q_heads = q_heads,
                           .kv_heads = of.x.kv_heads,
                           .head_dim = of.x.head_dim,
                           .v_dim = of.x.v_dim,
                           .batch = of.x.batch,
                           .k_format = &of.k_format,
                           .v_format = &of.v_format,
                           .k_scales = of.k_scales,
                           .v_scales = of.v_scales};
    const AttentionOptions attention = attention_options(options);
    if (how == nullptr)
      return std::make_unique<quoka_prefill>(std::in_place_type<quoka_prefill::Dense>, shape,
                                             DenseSelector::Options{}, attention);
    return std::make_unique<quoka_prefill>(std::in_place_type<quoka_prefill::Selecting>, shape,
                                           selection_options(how), attention);
  });
}

void quoka_prefill_free(quoka_prefill* layer) { delete layer; }

quoka_status quoka_prefill_forward(quoka_prefill* layer, const quoka_tensor* q,
                                   const quoka_tensor* k, const quoka_tensor* v,
                                   const quoka_tensor* out, float* lse_nat,
                                   quoka_threads* threads) {
  return guarded([&] {
    const Rows queries = rows(q, "q");
    with_layer(layer, [&](auto& of) {
      of.forward(queries, rows(k, "k"), rows(v, "v"),
                 {output_rows(out, "out"), row_view("lse_nat", lse_nat, queries, nullptr)},
                 executor(threads));
    });
  });
}

quoka_status quoka_prefill_append(quoka_prefill* layer, const quoka_tensor* k,
                                  const quoka_tensor* v, quoka_threads* threads) {
  return guarded([&] {
    with_layer(layer, [&](auto& of) { of.append(rows(k, "k"), rows(v, "v"), executor(threads)); });
  });
}

quoka_status quoka_prefill_truncate(quoka_prefill* layer, int64_t len) {
  return guarded([&] { with_layer(layer, [&](auto& of) { of.truncate(len); }); });
}

quoka_status quoka_prefill_reserve(quoka_prefill* layer, int64_t capacity) {
  return guarded([&] {
    require_size("capacity", capacity, 0);
    with_layer(layer, [&](auto& of) { of.reserve(capacity); });
  });
}

int64_t quoka_prefill_len(const quoka_prefill* layer) {
  return layer == nullptr ? -1 : std::visit([](const auto& of) { return of.kv_len(); }, layer->of);
}

quoka_status quoka_prefill_selection(const quoka_prefill* layer, quoka_selection* selection) {
  return guarded([&] {
    Selection& to = required(selection, "selection").of;
    Selection copy = with_layer(layer, [](const auto& of) { return of.selection(); });
    to = std::move(copy);
  });
}
