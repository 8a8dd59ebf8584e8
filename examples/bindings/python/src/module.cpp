// The module quoka._core: each function makes views and options of what Python hands in, releases the GIL, and calls
// the library once. Signatures and types for type checkers: quoka/_core.pyi.
#include "arrays.hpp"
#include "support/budget_text.hpp"
#include "threads.hpp"

#include <quoka/attention/attention_options.hpp>
#include <quoka/kernels/byte_formats.hpp>
#include <quoka/methods/indexer.hpp>
#include <quoka/runtime/isa.hpp>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <variant>

namespace quoka_python {
namespace {

using namespace nb::literals;
using quoka::detail::require_size;
using OptionalArray = std::optional<Array>;

// ---- options ------------------------------------------------------------------------------------

// Once for each: an arithmetic that was asked for to be fast, and is float here, bit for bit.
void warn_if_float(quoka::Arithmetic asked) {
  static std::vector<std::string> said;  // under the GIL
  const std::string name(quoka::arithmetic_name(asked));
  const quoka::Format& format = quoka::format_of<float>();
  if (asked == quoka::Arithmetic::float_ || asked == quoka::Arithmetic::automatic ||
      quoka::arithmetic_used(asked, format, format, quoka::many_rows) !=
          quoka::Arithmetic::float_ ||
      std::find(said.begin(), said.end(), name) != said.end())
    return;
  said.push_back(name);
  const std::string text = "quoka: the arithmetic \"" + name +
                           "\" is float on this machine: its instructions (" +
                           std::string(quoka::isa()) + ") have no faster products for it";
  if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) != 0) throw nb::python_error();
}

const quoka::Format& format_named(const std::string& name) {
  if (name == "float32") return quoka::format_of<float>();
  if (name == "float16") return quoka::format_of<Eigen::half>();
  if (name == "bfloat16") return quoka::format_of<Eigen::bfloat16>();
  if (name == "q8_0") return quoka::q8_0_format();
  if (name == "u8") return quoka::u8_format();
  quoka::detail::fail_because("the cache's dtype is \"" + name +
                              "\", but must be float32, float16, bfloat16, q8_0 or u8");
}

// A budget of 1 may mean one key or the whole past.
void warn_if_few(Index keys) {
  if (keys >= quoka_examples::least_keys) return;
  const std::string text =
      "quoka: budget is " + std::to_string(keys) + (keys == 1 ? " key" : " keys") +
      " for each KV head, which loses nearly every answer: a share of the past "
      "has a point, 0.25, and 1.0 is all of it";
  if (PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) != 0) throw nb::python_error();
}

// A whole number counts keys, one with a point is a share of the past: support/budget_text.hpp.
// Fewer keys than it allows are a warning here.
quoka::Budget budget_of(nb::handle of) {
  Index keys = 0;
  double share = 0;
  std::optional<quoka::Budget> budget;
  const bool is_number = PyBool_Check(of.ptr()) == 0 && PyUnicode_Check(of.ptr()) == 0;
  // Without an index it is no whole number: nanobind 2.2 rounds numpy's float32.
  if (is_number && PyIndex_Check(of.ptr()) != 0 && nb::try_cast(of, keys)) {
    if (keys >= 1) warn_if_few(keys), budget = quoka::Budget::keys(keys);
  } else if (is_number && nb::try_cast(of, share)) {  // numpy's, too
    budget = quoka_examples::share_budget(share);
  }
  if (budget) return *budget;
  quoka::detail::fail_because("budget is " + nb::cast<std::string>(nb::repr(of)) +
                              ", but must be " + quoka_examples::budget_rules());
}

constexpr const char* usual_preset = "recommended";

// budget: None: the preset's own.
quoka::SelectionOptions selection_options(nb::handle budget, const std::string& preset,
                                          Index queries, Index keep_first, Index keep_last) {
  std::optional<quoka::Budget> of;
  if (!budget.is_none()) of = budget_of(budget);
  quoka::SelectionOptions options = quoka::selection_preset(preset, of);
  require_size("queries", queries, 0);
  if (queries > 0) quoka::set_queries(options, queries);
  std::visit([&](auto& how) { how.keep_first = keep_first, how.keep_last = keep_last; }, options);
  return options;
}

// For a call that has no use for selection_options(): whatever of them is not the default.
void refuse_selection_options(const std::string& preset, Index queries, Index keep_first,
                              Index keep_last, const std::string& why) {
  if (preset != usual_preset)
    quoka::detail::fail_because(why + ", and preset is \"" + preset + "\"");
  for (const auto& [name, value] :
       {std::pair{"queries", queries}, {"keep_first", keep_first}, {"keep_last", keep_last}})
    if (value != 0)
      quoka::detail::fail_because(why + ", and " + name + " is " + std::to_string(value));
}

// AttentionOptions and what they refer to.
struct Options {
  quoka::AttentionOptions of;
  std::vector<float> sinks, slopes;
  std::optional<MaskArray> mask;
  std::optional<ListsArray> lists;

  Options(std::optional<double> scale, bool causal, Index window, nb::handle sinks_in,
          double softcap, nb::handle slopes_in, const std::string& arithmetic)
      : sinks(floats(sinks_in, "sinks")), slopes(floats(slopes_in, "alibi_slopes")) {
    if (scale) of.scale = static_cast<float>(*scale);
    of.causal = causal;
    require_size("window", window, 0);
    of.sliding_window = window;
    of.softcap = static_cast<float>(softcap);
    of.sinks = sinks;
    of.alibi_slopes = slopes;
    of.arithmetic = quoka::arithmetic_named(arithmetic);
    warn_if_float(of.arithmetic);
  }
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;

  // None: everything is seen.
  void take_mask(nb::handle of_python, Index q_len, Index keys) {
    if (!of_python.is_none()) of.mask = mask.emplace(of_python, q_len, keys).mask();
  }
};

// Options that a function does not have are an error that names them. nanobind's own shows the whole signature, and
// leaves the search to its reader.
void refuse_unknown(const nb::kwargs& unknown, const char* function) {
  if (unknown.size() == 0) return;
  std::string names;
  for (const auto& [name, value] : unknown)
    names += (names.empty() ? "" : ", ") + nb::cast<std::string>(name);
  throw nb::type_error(("quoka: " + std::string(function) + " has no option " + names).c_str());
}

OptionalArray optional_array(nb::handle of, const char* name) {
  if (of.is_none()) return std::nullopt;
  return Array(of, name);
}
void require_both(const OptionalArray& k, const OptionalArray& v, const std::string& k_name,
                  const std::string& v_name) {
  if (k.has_value() != v.has_value())
    quoka::detail::fail_because("there is " + (k ? k_name : v_name) + ", and there is no " +
                                (k ? v_name : k_name));
}
quoka::Rows rows_of(const OptionalArray& array) { return array ? array->rows() : quoka::Rows(); }

// The output: the caller's, or a new array of float32 with the rank of q.
struct Output {
  nb::object object;
  Array array;

  Output(nb::object given, const quoka::Rows& q, int rank, Index v_dim)
      : object(given.is_none() ? made(q, rank, v_dim) : given), array(object, "out") {}

 private:
  static nb::object made(const quoka::Rows& q, int rank, Index v_dim) {
    const Index sizes[] = {q.batch(), q.heads(), q.len(), v_dim};
    return new_floats(std::span(sizes).last(static_cast<std::size_t>(rank)));
  }
};

// The log-sum-exp, a new array where it is wanted.
struct LogSumExp {
  nb::object object = nb::none();
  quoka::TensorView<float, 3> view = {};

  LogSumExp(bool wanted, const quoka::Rows& q, int rank) {
    if (!wanted) return;
    const Index sizes[] = {q.batch(), q.heads(), q.len()};
    object = new_floats(std::span(sizes).last(static_cast<std::size_t>(rank - 1)));
    view = {nb::cast<nb::ndarray<float>>(object).data(),
            {q.batch(), q.heads(), q.len()},
            {q.heads() * q.len(), q.len(), 1}};
  }
};

nb::object result(const Output& out, const LogSumExp& lse, bool with_lse) {
  return with_lse ? nb::object(nb::make_tuple(out.object, lse.object)) : out.object;
}

// ---- classes ------------------------------------------------------------------------------------

struct Selection {
  quoka::Selection of;

  nb::object positions(Index b, Index head) const {
    require_head(b, head);
    const auto positions = of.positions(b, head);
    const Index sizes[] = {std::ssize(positions)};
    return new_positions(positions, sizes);
  }
  Index count(Index b, Index head) const {
    require_head(b, head);
    return of.count(b, head);
  }
  nb::object kept_shares() const {
    if (of.is_all()) {
      const std::vector<float> whole(static_cast<std::size_t>(of.batch() * of.heads()), 1.0f);
      return shares_of(whole);
    }
    return of.kept_shares().empty() ? nb::none() : shares_of(of.kept_shares());
  }
  std::string repr() const {
    return "Selection(batch=" + std::to_string(of.batch()) +
           ", heads=" + std::to_string(of.heads()) + ", kv_len=" + std::to_string(of.kv_len()) +
           (of.is_all() ? ", all" : ", at most " + std::to_string(of.max_count()) + " keys") + ")";
  }

 private:
  nb::object shares_of(std::span<const float> shares) const {
    const Index sizes[] = {of.batch(), of.heads()};
    return new_floats(shares, sizes);
  }
  void require_head(Index b, Index head) const {
    quoka::detail::require_at_least("the sequence", b, 0);
    quoka::detail::require_at_most("the sequence", b, "the last one", of.batch() - 1);
    quoka::detail::require_at_least("the head", head, 0);
    quoka::detail::require_at_most("the head", head, "the last one", of.heads() - 1);
  }
};

struct State {
  quoka::AnySelector selector;
  quoka::AnySelector::State state;
  Users users = {};

  Users::Hold change() { return {users, "State", true}; }
};

// Keys and values of one layer, and what selection keeps of the keys.
struct Cache {
  quoka::KvCache of;
  std::string dtype;
  Users users = {};

  Users::Hold read() { return {users, "Cache", false}; }
  Users::Hold change() { return {users, "Cache", true}; }
  // A copy, as float32: appending moves the cache.
  nb::object copy(bool values) {
    const auto held = read();
    const quoka::Rows rows = values ? of.v() : of.k();
    const Index sizes[] = {rows.batch(), rows.heads(), rows.len(), rows.dim()};
    const nb::object made = new_floats(sizes);
    float* to = nb::cast<nb::ndarray<float>>(made).data();
    for (Index b = 0; b < rows.batch(); ++b)
      for (Index head = 0; head < rows.heads(); ++head)
        for (Index i = 0; i < rows.len(); ++i, to += rows.dim())
          rows.format().widen(rows.row(b, head, i), rows.shape(head), to);
    return made;
  }
};

struct Prefill {
  std::variant<quoka::ChunkedPrefill<quoka::DenseSelector>,
               quoka::ChunkedPrefill<quoka::AnySelector>>
      of;
  Users users = {};

  Users::Hold read() { return {users, "Prefill", false}; }
  Users::Hold change() { return {users, "Prefill", true}; }
  template <class F>
  decltype(auto) visit(F&& f) {
    return std::visit(f, of);
  }
  Index len() {
    const auto held = read();
    return visit([](const auto& layer) { return layer.kv_len(); });
  }
};

// ---- pages ----------------------------------------------------------------------------------------

// Keys and values of several sequences in pages of one pool. Only keys: where values are not wanted.
struct Pages {
  Array k;
  OptionalArray v;
  quoka::Rows k_pool, v_pool;
  PageTables tables;

  Pages(nb::handle k_in, nb::handle v_in, nb::handle table, nb::handle lengths)
      : k(k_in, "k_pages"),
        v(optional_array(v_in, "v_pages")),
        k_pool(k.pages()),
        v_pool(v ? v->pages() : quoka::Rows()),
        tables(table, lengths, k_pool.len()) {
    if (!v) return;
    quoka::detail::require_equal("v_pages' pages", v_pool.batch(), "k_pages'", k_pool.batch());
    quoka::detail::require_equal("the tokens of a page of v_pages", v_pool.len(), "k_pages'",
                                 k_pool.len());
  }
  quoka::Rows keys(Index b) const { return tables.sequence(k_pool, b); }
  quoka::Rows values(Index b) const { return v ? tables.sequence(v_pool, b) : quoka::Rows(); }
};

// None where none of these is there.
std::optional<Pages> optional_pages(nb::handle k, nb::handle v, nb::handle table,
                                    nb::handle lengths, bool wants_values) {
  std::optional<Pages> pages;
  if (k.is_none() && v.is_none() && table.is_none() && lengths.is_none()) return pages;
  const std::pair<nb::handle, const char*> parts[] = {{k, "k_pages"},
                                                      {table, "block_table"},
                                                      {lengths, "lengths"},
                                                      {v, wants_values ? "v_pages" : nullptr}};
  for (const auto& [part, name] : parts)
    if (part.is_none() && name != nullptr)
      quoka::detail::fail_because(std::string("a past in pages is k_pages, ") +
                                  (wants_values ? "v_pages, " : "") +
                                  "block_table and lengths, and there is no " + name);
  pages.emplace(k, v, table, lengths);
  return pages;
}

// Sequence b of rows that are not in pages.
template <class Byte>
quoka::BasicRows<Byte> sequence_of(const quoka::BasicRows<Byte>& rows, Index b) {
  if (rows.data() == nullptr) return rows;
  return {rows.data() + b * rows.strides()[0],
          rows.format(),
          {1, rows.heads(), rows.len(), rows.dim()},
          rows.strides(),
          rows.shape(0).channel_step};
}

// The past keys that each sequence attends to: a Selection of one sequence, or a list of them, None for all. Holds the
// Selections: without the GIL another thread may change the list.
class Selections {
 public:
  Selections(nb::handle of, Index batch) : of_(static_cast<std::size_t>(batch)) {
    if (of.is_none()) return;
    if (PyList_Check(of.ptr()) == 0 && PyTuple_Check(of.ptr()) == 0) {
      quoka::detail::require_equal("the number of sequences", batch,
                                   "that of one selection (give a list of them)", 1);
      take(0, nb::borrow(of));
      return;
    }
    quoka::detail::require_equal("the number of selections", static_cast<Index>(nb::len(of)),
                                 "that of sequences", batch);
    for (std::size_t b = 0; b < of_.size(); ++b) take(b, nb::object(of[b]));
  }
  // Of a sequence; null: all of its past.
  const quoka::Selection* operator[](Index b) const { return of_[static_cast<std::size_t>(b)]; }

 private:
  void take(std::size_t b, nb::object x) {
    if (x.is_none()) return;
    const Selection* selection = nullptr;
    if (!nb::try_cast(x, selection))
      quoka::detail::fail_because(
          "selection must be a quoka.Selection, or, of pages, a list of them");
    of_[b] = &selection->of;
    held_.push_back(std::move(x));
  }

  std::vector<const quoka::Selection*> of_;
  std::vector<nb::object> held_;
};

// Each sequence as a call of its own. Moves the options' mask and lists there.
std::vector<quoka::AttentionSequence> sequences_of(const quoka::Rows& q, const Pages& pages,
                                                   const quoka::Chunk& chunk, bool has_chunk,
                                                   const quoka::AttentionOutput& output,
                                                   const Selections& selections, Options& options) {
  const Index batch = pages.tables.batch();
  quoka::detail::require_equal("block_table's sequences", batch, "q's batch", q.batch());
  quoka::detail::require_equal("out's batch", output.out.batch(), "q's batch", batch);
  if (has_chunk) {
    quoka::detail::require_equal("k's batch", chunk.k.batch(), "q's batch", batch);
    quoka::detail::require_equal("v's batch", chunk.v.batch(), "q's batch", batch);
  }
  const auto keys_of = [&](Index b) { return pages.tables.len(b) + (has_chunk ? q.len() : 0); };
  if (options.mask) {
    Index longest = 0;
    for (Index b = 0; b < batch; ++b) longest = std::max(longest, keys_of(b));
    const quoka::Mask& mask = options.mask->mask();
    if (mask.batch() != 1)
      quoka::detail::require_equal("the mask's batch", mask.batch(), "q's batch", batch);
    quoka::detail::require_equal("the mask's keys", mask.keys(), "those of the longest sequence",
                                 longest);
  }
  const quoka::IndexLists lists = options.of.lists;
  if (!lists.absent() && lists.batch() != 1)
    quoka::detail::require_equal("the lists' batch", lists.batch(), "q's batch", batch);
  options.of.mask = {}, options.of.lists = {};
  std::vector<quoka::AttentionSequence> sequences;
  for (Index b = 0; b < batch; ++b) {
    const quoka::Rows k = pages.keys(b), v = pages.values(b);
    // Without a chunk it is the last of what lies in the pages.
    quoka::CachedChunk of{{k, v}, {sequence_of(chunk.k, b), sequence_of(chunk.v, b)}};
    if (!has_chunk) of = quoka::chunk_in_cache(k, v, q.len());
    of.past.selection = selections[b];
    const auto& lse = output.lse_nat;
    sequences.push_back(
        {.q = sequence_of(q, b),
         .past = of.past,
         .chunk = of.chunk,
         .out = {sequence_of(output.out, b),
                 lse.absent()
                     ? lse
                     : quoka::TensorView<float, 3>(lse.data() + b * lse.strides()[0],
                                                   {1, q.heads(), q.len()}, lse.strides())},
         .mask = options.mask ? options.mask->sequence(b, keys_of(b)) : quoka::Mask(),
         .lists = lists.sequence(b)});
  }
  return sequences;
}

// ---- calls --------------------------------------------------------------------------------------

nb::object attend(nb::handle q_in, nb::handle k_in, nb::handle v_in, nb::handle past_k_in,
                  nb::handle past_v_in, nb::handle past_in, nb::handle k_pages, nb::handle v_pages,
                  nb::handle block_table, nb::handle lengths, std::optional<double> scale,
                  bool causal, Index window, nb::handle sinks, double softcap, nb::handle slopes,
                  nb::handle mask, nb::handle lists, nb::handle counts, Index block,
                  nb::handle selection, const std::string& arithmetic, nb::object out_in,
                  bool return_lse, int threads, const nb::kwargs& unknown) {
  const InModule here;
  refuse_unknown(unknown, "attention()");
  Array q(q_in, "q");
  const OptionalArray k = optional_array(k_in, "k"), v = optional_array(v_in, "v"),
                      past_k = optional_array(past_k_in, "past_k"),
                      past_v = optional_array(past_v_in, "past_v");
  Options options(scale, causal, window, sinks, softcap, slopes, arithmetic);
  if (!lists.is_none())
    options.of.lists = options.lists.emplace(lists, counts, block).lists();
  else if (!counts.is_none() || block != 1)
    quoka::detail::fail_because("there are counts or a block of keys, and no lists");
  const quoka::Rows queries = q.queries();
  quoka::Past past(rows_of(past_k), rows_of(past_v));
  std::optional<Users::Hold> held;
  if (!past_in.is_none()) {
    Cache* cache = nullptr;
    if (past_k || past_v)
      quoka::detail::fail_because(
          "there is a cache as past, and there are past_k or past_v: the past would count twice");
    if (!nb::try_cast(past_in, cache)) quoka::detail::fail_because("past must be a quoka.Cache");
    held.emplace(cache->users, "Cache", false);
    past = quoka::Past(cache->of.k(), cache->of.v());
  }
  const std::optional<Pages> pages = optional_pages(k_pages, v_pages, block_table, lengths, true);
  if (pages && (past_k || past_v || !past_in.is_none()))
    quoka::detail::fail_because(
        "there are pages as past, and there is another past: it would count twice");
  require_both(past_k, past_v, "past_k", "past_v");
  require_both(k, v, "k", "v");
  const quoka::Chunk chunk{rows_of(k), rows_of(v)};
  if (k && chunk.k.len() != queries.len())
    quoka::detail::fail("k's length", chunk.k.len(),
                        "but k and v are of the chunk, and those of the keys before it are past_k "
                        "and past_v, so it must be",
                        "q's length", queries.len());
  const Index own_keys = k ? queries.len() : 0;
  options.take_mask(mask, queries.len(),
                    (pages ? pages->tables.longest() : past.k.len()) + own_keys);
  const Selections selections(selection, pages ? pages->tables.batch() : 1);
  if (!pages) past.selection = selections[0];
  if (!v && !pages && past.v.empty())
    quoka::detail::fail_because("there is neither a chunk nor a past to attend to");
  const Output out(std::move(out_in), queries, q.rank(),
                   v       ? chunk.v.dim()
                   : pages ? pages->v_pool.dim()
                           : past.v.dim());
  const LogSumExp lse(return_lse, queries, q.rank());
  const quoka::AttentionOutput output(out.array.output_rows(), lse.view);
  const Scratch<quoka::AttentionWorkspace> workspace;
  if (pages) {
    const auto sequences =
        sequences_of(queries, *pages, chunk, v.has_value(), output, selections, options);
    run_by(threads, [&](quoka::ExecutorRef executor) {
      quoka::attention(sequences, options.of, executor, *workspace);
    });
    return result(out, lse, return_lse);
  }
  run_by(threads, [&](quoka::ExecutorRef executor) {
    quoka::attention(queries, past, chunk, output, options.of, executor, *workspace);
  });
  return result(out, lse, return_lse);
}

// Cached keys that a caller gives: an array, or a Cache.
class CachedKeys {
 public:
  CachedKeys(nb::handle of, const char* name) {
    if (nb::try_cast(of, cache_))
      held_.emplace(cache_->users, "Cache", false);
    else
      PyErr_Clear(), array_.emplace(of, name);
  }
  const quoka::KvCache* cache() const { return cache_ != nullptr ? &cache_->of : nullptr; }
  quoka::Rows k() const { return cache_ != nullptr ? cache_->of.k() : array_->rows(); }

 private:
  OptionalArray array_;
  Cache* cache_ = nullptr;
  std::optional<Users::Hold> held_;
};

Selection choose(nb::handle q_in, nb::handle past_k_in, nb::object budget,
                 const std::string& preset, Index queries, Index keep_first, Index keep_last,
                 nb::handle k_pages, nb::handle block_table, nb::handle lengths,
                 std::optional<double> scale, double softcap, nb::handle slopes, nb::handle mask,
                 nb::handle chunk_k_in, State* state, int threads, const nb::kwargs& unknown) {
  const InModule here;
  refuse_unknown(unknown, "select()");
  Array q(q_in, "q");
  const std::optional<Pages> pages =
      optional_pages(k_pages, nb::none(), block_table, lengths, false);
  if (pages.has_value() != past_k_in.is_none())
    quoka::detail::fail_because(pages ? "there are pages, and there is past_k"
                                      : "there is no past_k, and there are no pages");
  std::optional<CachedKeys> past_k;
  if (!pages) past_k.emplace(past_k_in, "past_k");
  const quoka::KvCache* const cache = past_k ? past_k->cache() : nullptr;
  if (pages)
    quoka::detail::require_equal("block_table's sequences", pages->tables.batch(),
                                 "one, which select() is of,", 1);
  const quoka::Rows queries_of_chunk = q.queries(), keys = pages ? pages->keys(0) : past_k->k();
  Options options(scale, true, 0, nb::none(), softcap, slopes, "automatic");
  options.take_mask(mask, queries_of_chunk.len(), keys.len() + queries_of_chunk.len());
  const OptionalArray chunk_k = optional_array(chunk_k_in, "chunk_k");
  if (!chunk_k_in.is_none() && !options.of.mask.absent())
    quoka::detail::fail_because(
        "there is a mask, which may hide the chunk's keys, and there is chunk_k");
  std::optional<State> own;
  if (state != nullptr) {
    if (!budget.is_none())
      quoka::detail::fail_because(
          "there is a state, which has its own budget, and there is another one");
    refuse_selection_options(preset, queries, keep_first, keep_last,
                             "there is a state, which has its own options");
  } else {
    own.emplace(State{
        quoka::AnySelector(selection_options(budget, preset, queries, keep_first, keep_last)), {}});
    state = &*own;
  }
  const auto held = state->change();
  const quoka::SelectorInput input{.q = queries_of_chunk,
                                   .k = keys,
                                   .logits = options.of,
                                   .capacity = cache != nullptr ? cache->capacity() : 0,
                                   .chunk_k = rows_of(chunk_k)};
  Selection selection;
  run_by(threads, [&](quoka::ExecutorRef executor) {
    // A state is there to be kept: keys that it has not seen are encoded once, not read as they are at each call. A
    // call that is refused leaves it as it was.
    if (!own && options.of.mask.absent()) {
      state->selector.check(input);
      state->selector.appended(
          {.q = {}, .k = input.k, .logits = input.logits, .capacity = input.capacity}, state->state,
          executor);
    }
    quoka::select_visible(state->selector, input, options.of.mask, state->state, selection.of,
                          executor);
  });
  return selection;
}

nb::object index_keys(nb::handle q_in, nb::handle k_in, nb::handle weights_in, Index top_k,
                      Index block, Index keep_first, Index keep_last, Index lists_heads,
                      bool causal, nb::handle mask_in, int threads, const nb::kwargs& unknown) {
  const InModule here;
  refuse_unknown(unknown, "index_keys()");
  Array q(q_in, "q");
  const Array k(k_in, "k");
  std::optional<HeadWeights> weights;
  std::optional<MaskArray> mask;
  quoka::IndexerInput input{.q = q.queries(), .k = k.rows()};
  if (!weights_in.is_none()) input.weights = weights.emplace(weights_in).view();
  if (!mask_in.is_none()) input.mask = mask.emplace(mask_in, input.q.len(), input.k.len()).mask();
  require_size("top_k", top_k, 1);
  const quoka::IndexerOptions options{.k = top_k,
                                      .block = block,
                                      .keep_first = keep_first,
                                      .keep_last = keep_last,
                                      .lists_heads = lists_heads,
                                      .causal = causal};
  // Its memory stays from call to call of the same options.
  const Scratch<quoka::Indexer> kept;
  quoka::Indexer& indexer = *kept;
  if (indexer.options() != options) indexer = quoka::Indexer(options);
  quoka::IndexLists lists;
  run_by(threads, [&](quoka::ExecutorRef executor) { lists = indexer.choose(input, executor); });
  const Index sizes[] = {lists.batch(), lists.heads(), lists.q_len(), lists.most()};
  const Index size = sizes[0] * sizes[1] * sizes[2] * sizes[3];
  return new_positions({lists.entries().data(), static_cast<std::size_t>(size)},
                       std::span(sizes).subspan(q.rank() == 3 ? 1 : 0));
}

Selection selection_of_lists(const std::vector<std::vector<std::vector<quoka::Position>>>& lists,
                             Index kv_len) {
  std::vector<std::vector<quoka::Position>> flat;
  const Index heads = lists.empty() ? 0 : std::ssize(lists.front());
  for (const auto& sequence : lists) {
    quoka::detail::require_equal("the KV heads of a sequence", std::ssize(sequence),
                                 "those of the first", heads);
    flat.insert(flat.end(), sequence.begin(), sequence.end());
  }
  return {quoka::Selection::from_lists(std::ssize(lists), heads, kv_len, flat)};
}

}  // namespace
}  // namespace quoka_python

using namespace quoka_python;

NB_MODULE(_core, module) {
  nb::set_leak_warnings(false);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&InterpreterUse::end));
  module.attr("__version__") = QUOKA_VERSION_STRING;

  nb::class_<Selection>(
      module, "Selection",
      "Which past keys each head of each sequence attends to: each KV head, or each query head.")
      .def(
          nb::new_([](const std::vector<std::vector<std::vector<quoka::Position>>>& lists,
                      Index kv_len) { return selection_of_lists(lists, kv_len); }),
          "lists"_a, "kv_len"_a,
          "Lists of your own: lists[b][head], ascending positions below kv_len; a list for each KV "
          "head or for each query head.")
      .def_prop_ro("batch", [](const Selection& x) { return x.of.batch(); })
      .def_prop_ro(
          "heads", [](const Selection& x) { return x.of.heads(); },
          "Of a sequence: KV heads, whose query heads share a list, or query heads.")
      .def_prop_ro("kv_len", [](const Selection& x) { return x.of.kv_len(); })
      .def_prop_ro(
          "is_all", [](const Selection& x) { return x.of.is_all(); }, "Is every key kept?")
      .def_prop_ro(
          "max_count", [](const Selection& x) { return x.of.max_count(); },
          "Positions of the head that has most.")
      .def("count", &Selection::count, "b"_a, "head"_a, "How many keys this head attends to.")
      .def("positions", &Selection::positions, "b"_a, "head"_a,
           "Those keys, ascending: int32 [count].")
      .def_prop_ro("kept_shares", &Selection::kept_shares,
                   "How much of their attention, to past and chunk, the queries that chose keep on "
                   "average: float32 [batch, heads]; 1 where all keys are kept, None where the "
                   "preset does not tell (paper).")
      .def(
          "__eq__", [](const Selection& a, const Selection& b) { return a.of == b.of; },
          nb::is_operator())
      .def("__repr__", &Selection::repr);

  module.attr("Selection").attr("__hash__") = nb::none();  // equal ones would have different hashes

  nb::class_<State>(
      module, "State",
      "What selection keeps of one layer of one sequence: 8-bit codes of its keys. What they "
      "change of a choice: select(). "
      "One call at a time; a second one is a RuntimeError.")
      .def(
          "__init__",
          [](State* to, nb::object budget, const std::string& preset, Index queries,
             Index keep_first, Index keep_last, const nb::kwargs& unknown) {
            const InModule here;
            refuse_unknown(unknown, "State()");
            new (to) State{quoka::AnySelector(
                               selection_options(budget, preset, queries, keep_first, keep_last)),
                           {}};
          },
          "budget"_a = nb::none(), nb::kw_only(), "preset"_a = usual_preset, "queries"_a = 0,
          "keep_first"_a = 0, "keep_last"_a = 0, "unknown"_a, "As select() has them.")
      .def(
          "appended",
          [](State& state, nb::handle k_in, Index capacity, int threads) {
            const InModule here;
            require_size("capacity", capacity, 0);
            const auto held = state.change();
            const CachedKeys keys(k_in, "k");
            const quoka::Rows k = keys.k();
            run_by(threads, [&](quoka::ExecutorRef executor) {
              state.selector.appended({.q = {}, .k = k, .capacity = capacity}, state.state,
                                      executor);
            });
          },
          "k"_a, nb::kw_only(), "capacity"_a = 0, "threads"_a = 0,
          "Keys came: k [batch, kv_heads, kv_len, head_dim], or a Cache, is all of them now. "
          "select() "
          "does it where there is no mask; here it can be done earlier, and for capacity keys at "
          "once.")
      .def(
          "truncate",
          [](State& state, Index len) {
            require_size("len", len, 0);
            const auto held = state.change();
            state.state.truncate(len);
          },
          "len"_a, "The cache was cut to its first `len` keys.")
      .def_prop_ro(
          "kept_bytes",
          [](State& x) {
            const auto held = x.change();
            return x.state.kept_bytes();
          },
          "Memory kept per key, in all.");

  nb::class_<Cache>(
      module, "Cache",
      "One layer's keys and values. Appends in place. Calls may read it together; one that "
      "changes it beside another is a RuntimeError.")
      .def(
          "__init__",
          [](Cache* to, Index batch, Index kv_heads, Index head_dim, std::optional<Index> v_dim,
             const std::string& dtype, Index capacity, const nb::kwargs& unknown) {
            const InModule here;
            refuse_unknown(unknown, "Cache()");
            require_size("batch", batch, 1), require_size("kv_heads", kv_heads, 1),
                require_size("head_dim", head_dim, 1);
            if (v_dim) require_size("v_dim", *v_dim, 1);
            require_size("capacity", capacity, 0);
            const quoka::Format& format = format_named(dtype);
            new (to) Cache{
                quoka::KvCache(batch, kv_heads, head_dim, v_dim.value_or(head_dim), format, format),
                dtype};
            to->of.reserve(capacity);
          },
          "batch"_a, "kv_heads"_a, "head_dim"_a, nb::kw_only(), "v_dim"_a = nb::none(),
          "dtype"_a = "float32", "capacity"_a = 0, "unknown"_a,
          "dtype: float32, float16, bfloat16, or 8 bits: q8_0 and u8. capacity: keys to make room "
          "for at once.")
      .def(
          "append",
          [](Cache& cache, nb::handle k_in, nb::handle v_in, int threads) {
            const InModule here;
            const auto held = cache.change();
            const Array k(k_in, "k"), v(v_in, "v");
            const quoka::Rows keys = k.rows(), values = v.rows();
            run_by(threads,
                   [&](quoka::ExecutorRef executor) { cache.of.append(keys, values, executor); });
          },
          "k"_a, "v"_a, nb::kw_only(), "threads"_a = 0,
          "k [batch, kv_heads, n, head_dim], v [batch, kv_heads, n, v_dim], rounded to the cache's "
          "dtype.")
      .def(
          "truncate",
          [](Cache& cache, Index len) {
            const auto held = cache.change();
            cache.of.truncate(len);
          },
          "len"_a, "Back to the first `len` keys.")
      .def(
          "reserve",
          [](Cache& cache, Index capacity) {
            require_size("capacity", capacity, 0);
            const auto held = cache.change();
            cache.of.reserve(capacity);
          },
          "capacity"_a, "Makes room for this many keys.")
      .def("__len__",
           [](Cache& cache) {
             const auto held = cache.read();
             return cache.of.len();
           })
      .def_prop_ro(
          "k", [](Cache& cache) { return cache.copy(false); },
          "A copy of the keys: float32 [batch, kv_heads, len, head_dim].")
      .def_prop_ro(
          "v", [](Cache& cache) { return cache.copy(true); },
          "A copy of the values: float32 [batch, kv_heads, len, v_dim].")
      .def_prop_ro("dtype", [](const Cache& cache) { return cache.dtype; })
      .def_prop_ro(
          "nbytes",
          [](Cache& cache) {
            const auto held = cache.read();
            return cache.of.bytes();
          },
          "Its memory.");

  nb::class_<Prefill>(module, "Prefill",
                      "One layer with a cache of its own: forward() selects, attends and appends. "
                      "One call at a time; a second one is a RuntimeError.")
      .def(
          "__init__",
          [](Prefill* to, Index q_heads, Index kv_heads, Index head_dim, std::optional<Index> v_dim,
             Index batch, nb::object budget, const std::string& preset, Index queries,
             Index keep_first, Index keep_last, const std::string& dtype, Index capacity,
             std::optional<double> scale, Index window, nb::handle sinks, double softcap,
             nb::handle slopes, const std::string& arithmetic, const nb::kwargs& unknown) {
            const InModule here;
            refuse_unknown(unknown, "Prefill()");
            require_size("batch", batch, 1), require_size("kv_heads", kv_heads, 1),
                require_size("head_dim", head_dim, 1);
            require_size("capacity", capacity, 0);
            const quoka::Format& format = format_named(dtype);
            const quoka::LayerShape shape{.q_heads = q_heads,
                                          .kv_heads = kv_heads,
                                          .head_dim = head_dim,
                                          .v_dim = v_dim.value_or(head_dim),
                                          .batch = batch,
                                          .k_format = &format,
                                          .v_format = &format,
                                          .k_scales = {},
                                          .v_scales = {}};
            const Options options(scale, true, window, sinks, softcap, slopes, arithmetic);
            if (budget.is_none()) {
              refuse_selection_options(
                  preset, queries, keep_first, keep_last,
                  "there is no budget, without which every key is attended to");
              new (to) Prefill{quoka::ChunkedPrefill<quoka::DenseSelector>(shape, {}, options.of)};
            } else {
              const quoka::SelectionOptions how =
                  selection_options(budget, preset, queries, keep_first, keep_last);
              new (to) Prefill{quoka::ChunkedPrefill<quoka::AnySelector>(shape, how, options.of)};
            }
            to->visit([&](auto& layer) { layer.reserve(capacity); });
          },
          "q_heads"_a, "kv_heads"_a, "head_dim"_a, nb::kw_only(), "v_dim"_a = nb::none(),
          "batch"_a = 1, "budget"_a = nb::none(), "preset"_a = usual_preset, "queries"_a = 0,
          "keep_first"_a = 0, "keep_last"_a = 0, "dtype"_a = "float32", "capacity"_a = 0,
          "scale"_a = nb::none(), "window"_a = 0, "sinks"_a = nb::none(), "softcap"_a = 0.0,
          "alibi_slopes"_a = nb::none(), "arithmetic"_a = "automatic", "unknown"_a,
          "budget: None attends to everything; any other selects, as "
          "select() does. The "
          "other options are those of attention() and Cache.")
      .def(
          "forward",
          [](Prefill& layer, nb::handle q_in, nb::handle k_in, nb::handle v_in, nb::object out_in,
             bool return_lse, int threads) {
            const InModule here;
            const auto held = layer.change();
            Array q(q_in, "q");
            const Array k(k_in, "k"), v(v_in, "v");
            const quoka::Rows queries = q.queries(), keys = k.rows(), values = v.rows();
            const Output out(std::move(out_in), queries, q.rank(), values.dim());
            const LogSumExp lse(return_lse, queries, q.rank());
            const quoka::AttentionOutput output(out.array.output_rows(), lse.view);
            run_by(threads, [&](quoka::ExecutorRef executor) {
              layer.visit([&](auto& of) { of.forward(queries, keys, values, output, executor); });
            });
            return result(out, lse, return_lse);
          },
          "q"_a, "k"_a, "v"_a, nb::kw_only(), "out"_a = nb::none(), "return_lse"_a = false,
          "threads"_a = 0,
          "One chunk, or one token: q [batch, q_heads, q_len, head_dim], k and v [batch, kv_heads, "
          "q_len, ...]. Returns "
          "as attention() does. After an error the cache is as it was.")
      .def(
          "append",
          [](Prefill& layer, nb::handle k_in, nb::handle v_in, int threads) {
            const InModule here;
            const auto held = layer.change();
            const Array k(k_in, "k"), v(v_in, "v");
            const quoka::Rows keys = k.rows(), values = v.rows();
            run_by(threads, [&](quoka::ExecutorRef executor) {
              layer.visit([&](auto& of) { of.append(keys, values, executor); });
            });
          },
          "k"_a, "v"_a, nb::kw_only(), "threads"_a = 0,
          "Takes keys and values over without attention: a saved prefix.")
      .def(
          "truncate",
          [](Prefill& layer, Index len) {
            const auto held = layer.change();
            layer.visit([&](auto& of) { of.truncate(len); });
          },
          "len"_a, "Back to the first `len` tokens.")
      .def(
          "reserve",
          [](Prefill& layer, Index capacity) {
            require_size("capacity", capacity, 0);
            const auto held = layer.change();
            layer.visit([&](auto& of) { of.reserve(capacity); });
          },
          "capacity"_a, "Makes room for this many tokens.")
      .def("__len__", &Prefill::len)
      .def_prop_ro(
          "selection",
          [](Prefill& layer) {
            const auto held = layer.read();
            return layer.visit([](auto& of) { return Selection{of.selection()}; });
          },
          "What the last forward() attended to of its past: a copy.");

  module.def("attention", &attend, "q"_a, "k"_a = nb::none(), "v"_a = nb::none(), nb::kw_only(),
             "past_k"_a = nb::none(), "past_v"_a = nb::none(), "past"_a = nb::none(),
             "k_pages"_a = nb::none(), "v_pages"_a = nb::none(), "block_table"_a = nb::none(),
             "lengths"_a = nb::none(), "scale"_a = nb::none(), "causal"_a = true, "window"_a = 0,
             "sinks"_a = nb::none(), "softcap"_a = 0.0, "alibi_slopes"_a = nb::none(),
             "mask"_a = nb::none(), "lists"_a = nb::none(), "counts"_a = nb::none(), "block"_a = 1,
             "selection"_a = nb::none(), "arithmetic"_a = "automatic", "out"_a = nb::none(),
             "return_lse"_a = false, "threads"_a = 0, "unknown"_a,
             R"(Exact attention of a chunk over its past and itself: softmax(scale q k^T) v.

q             [batch, q_heads, q_len, head_dim]
k, v          [batch, kv_heads, q_len, head_dim or v_dim], the chunk's own; q_heads is a multiple of kv_heads
past_k, _v    [batch, kv_heads, kv_len, head_dim or v_dim], before them; past: a Cache in their place
k_pages, v_   [pages, page_size, kv_heads, head_dim or v_dim], or pages of a pool in their place, with any strides and any page_size
block_table   [batch, most], int32 or int64: token i of sequence b lies in page block_table[b, i / page_size], at i % page_size;
              entries beyond a sequence's tokens are not looked at. Without batch: [most]
lengths       [batch], int32 or int64, or numbers: tokens of each sequence's past. Where there are no k and v, its last q_len
              tokens are the chunk, which lies in the pages already
scale         of the logits; None: 1 / sqrt(head_dim)
causal        query i sees the past and the chunk's keys 0..i; False: all, as the mask allows
window        a query sees no key this far before it, or further; 0: no window
sinks         [q_heads], learned logits that join the softmax sum; softcap: cap on |logit|, 0: none
alibi_slopes  [q_heads], logit -= slope * distance: alibi_slopes()
mask          [q_len, keys], [q_heads or 1, q_len, keys] or [batch or 1, q_heads or 1, q_len, keys] of past and chunk:
              bool, False hides, or numbers that are added to the logits: -inf, or at or below -60,000, hides. A q_len or
              keys of 1 counts for all. With pages keys are the longest sequence's
lists         [q_len, k], [kv_heads or 1, q_len, k] or [batch or 1, kv_heads or 1, q_len, k], int32 or int64: which keys each
              query attends to, as a model's own chooser says; numbers of the past's keys, then the chunk's, -1: none. They
              join what else hides keys
counts        lists without their last axis: how many entries of each list count; None: all
block         entry e of a list names keys block * e to block * (e + 1) - 1
selection     of the past, as select() makes it; None: all of it. With pages: one for each sequence, in a list
arithmetic    automatic, float, bf16 or int8
out           [batch, q_heads, q_len, v_dim], written in its own dtype; None: a new array of float32
return_lse    True: returns (out, lse), lse [batch, q_heads, q_len] the natural log of the sum of exp(logit)
threads       0: as set_threads() says

Arrays are float32, float16 or bfloat16 in memory of the CPU, with any strides, by DLPack or the buffer protocol; nothing
is copied (but queries whose channels lie apart, masks whose keys do, and tensors of torch with the negative bit). All may be of rank 3, without batch. Returns out. Raises ValueError, with both numbers, before anything is
written. The GIL is released.)");

  module.def("select", &choose, "q"_a, "past_k"_a = nb::none(), nb::kw_only(),
             "budget"_a = nb::none(), "preset"_a = usual_preset, "queries"_a = 0,
             "keep_first"_a = 0, "keep_last"_a = 0, "k_pages"_a = nb::none(),
             "block_table"_a = nb::none(), "lengths"_a = nb::none(), "scale"_a = nb::none(),
             "softcap"_a = 0.0, "alibi_slopes"_a = nb::none(), "mask"_a = nb::none(),
             "chunk_k"_a = nb::none(), "state"_a = nb::none(), "threads"_a = 0, "unknown"_a,
             R"(Which past keys a chunk needs: the Selection for attention().

q                      [batch, q_heads, q_len, head_dim], the chunk's queries, 128 to 256 of them
past_k                 [batch, kv_heads, kv_len, head_dim], or a Cache, without the chunk
budget                 1024: this many keys for each KV head; 0.125: a share of the past, 1.0 all of it; None: the preset's
                       (recommended and balanced: what the text asks for; paper: 1024), or the state's
preset                 recommended, which keeps answers, paper, the fastest, or balanced, between them
queries                how many of the chunk's queries choose: for each KV head, of all its query heads (paper: of each query head); more lose less;
                       0: the preset's (recommended: 256, balanced: 128)
keep_first, keep_last  sinks and recent keys that are kept, inside the budget
k_pages                in place of past_k, with block_table and lengths, as attention() gets them, of one sequence and
                       without the chunk
scale, softcap, mask   as attention() gets them; a mask is of one sequence
chunk_k                [batch, kv_heads, q_len, head_dim], the chunk's own keys, causal, without a mask: recommended and
                       balanced then weigh a key by its share of all of a query's attention, as Prefill does; None: by its
                       share of the attention to the past
state                  of this layer and sequence: encodes keys that it has not seen, without a mask; several times as fast.
                       Scores are then those of codes. paper chooses the same keys; recommended and balanced may choose
                       another one where scores are nearly equal

A past no longer than the budget is kept whole. Raises ValueError, with both numbers.)");

  module.def("index_keys", &index_keys, "q"_a, "k"_a, "weights"_a = nb::none(), nb::kw_only(),
             "top_k"_a = 2048, "block"_a = 1, "keep_first"_a = 0, "keep_last"_a = 0,
             "lists_heads"_a = 1, "causal"_a = true, "mask"_a = nb::none(), "threads"_a = 0,
             "unknown"_a,
             R"(The keys that a model's own index heads choose for each query: attention()'s lists.

q           [batch, index_heads, q_len, dim]
k           [batch, 1 or lists_heads, kv_len, dim], the index cache, the chunk's q_len keys last
weights     [batch, index_heads, q_len], float32: a key's score is the sum over heads of weight * max(0, q . k), as DeepSeek's
            lightning indexer has it; None: the best q . k of all heads
top_k       entries of a list at most: the best keys, or blocks
block       keys of an entry, which has the score of its best key; hand it to attention() as well
keep_first  the first entries that a query sees are in its list in any case, keep_last: the last ones, its own among them
lists_heads KV heads with lists of their own, each by an equal share of the index heads; 1: for all
causal      query i sees no key behind kv_len - q_len + i
mask        [q_len, kv_len], [lists_heads or 1, q_len, kv_len] or [batch or 1, lists_heads or 1, q_len, kv_len]: bool, False
            hides, or numbers, of which -inf, or at or below -60,000, hides
threads     0: as set_threads() says

Returns int32 [batch, lists_heads, q_len, n], ascending, -1 behind the last; n is top_k, or the number of entries where that is
less. Without batch where q has none. Raises ValueError, with both numbers. The GIL is released.)");

  module.def(
      "alibi_slopes",
      [](Index q_heads, double max_bias) {
        require_size("q_heads", q_heads, 1);
        return quoka::alibi_slopes(q_heads, static_cast<float>(max_bias));
      },
      "q_heads"_a, "max_bias"_a = 8.0, "ALiBi's slope of each head: 2^(-max_bias i / n).");
  module.def(
      "arithmetic_used",
      [](const std::string& asked, const std::string& dtype, std::optional<Index> rows) {
        const quoka::Format& format = format_named(dtype);
        return quoka::arithmetic_name(quoka::arithmetic_used(
            quoka::arithmetic_named(asked), format, format, rows.value_or(quoka::many_rows)));
      },
      "asked"_a = "automatic", "dtype"_a = "float32", "rows"_a = nb::none(),
      "The arithmetic that a request gives on this machine, over keys and values of a dtype, for "
      "this "
      "many query rows of a KV head: q_heads / kv_heads * q_len. Only int8 depends on them; None: "
      "many.");
  module.def(
      "isa", [] { return std::string(quoka::isa()); }, "The instructions in use.");
  module.def(
      "set_threads",
      [](int threads) {
        if (threads != 0) require_threads(threads);
        default_threads() = threads;
      },
      "threads"_a,
      "Threads of calls that do not say how many; 0: as many as there are processors, or as the "
      "OpenMP has, the default.");
  module.def(
      "use_openmp_of",
      [](const std::optional<std::string>& library) {
        if (library)
          openmp().emplace(*library);
        else
          openmp().reset();
      },
      "library"_a.none(),
      "Calls run in the threads of the OpenMP that this loaded library was linked with, by its "
      "path, if they are for as "
      "many threads: a program then has one pool. None: in the library's own threads. quoka.torch "
      "says so of torch's.");
}
