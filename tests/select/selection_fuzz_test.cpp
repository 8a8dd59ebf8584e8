// A differential fuzz of selection: random shapes, formats, layouts, options, histories and values, and the properties
// of every draw (FUZZ of for_each_draw(), and SKETCH).

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/layer/kv_cache.hpp>
#include <quoka/methods/all.hpp>
#include <quoka/select/stages.hpp>
#include <quoka/select/visible.hpp>

#include "support/drawn_rows.hpp"
#include "support/rounding_modes.hpp"
#include "support/selector_fixtures.hpp"
#include "support/selector_names.hpp"
#include "support/world.hpp"

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <future>
#include <iterator>
#include <limits>
#include <sstream>
#include <thread>

namespace {

using namespace quoka_test;
using quoka::KeySketch;
using quoka::MassSelector;
using quoka::QuokaSelector;
using quoka::SelectorInput;
using quoka::Sketch;

// ---- a draw -------------------------------------------------------------------------------------

using Layout = StoredRows::Layout;
constexpr const char* layout_names[] = {"dense", "tokens", "padded",
                                        "pages", "list",   "list of pages"};

struct Draw {
  std::uint64_t seed = 0;  // of the numbers
  Index batch = 1, kv_heads = 1, group = 1, dim = 64, kv_len = 100, q_len = 8;
  int q_as = 0, k_as = 0;
  Layout layout = Layout::dense;
  Values values;
  Budget budget = Budget::keys(1024);
  Index queries = 16;             // QuokaOptions::n_queries, MassOptions::queries
  quoka::TopKOptions top_k = {};  // kernel_size: of MassSelector
  Sketch sketch = Sketch::on;
  std::optional<float> scale;
  float softcap = 0.0f;
  int workers = 3;
  Index piece = 50;      // keys that are appended to the State at once
  Index cut = 0;         // tokens of another branch, which are taken back; 0: none
  bool other = false;    // another sequence had the State before
  bool selects = false;  // a selection after each piece
  int hides = 0;         // what a mask hides, as below
  bool norms = false;    // inverse norms of the keys are given
  bool chunk = false;    // so are the chunk's own keys
  RoundingMode mode = rounding_modes[0];

  Index q_heads() const { return kv_heads * group; }
  LogitOptions logits() const { return {.scale = scale, .softcap = softcap}; }
  // Rows of queries for each KV head, of MassSelector or of QuokaSelector.
  Index rows(bool of_mass) const {
    if (!of_mass) return std::min(q_len, queries);
    return group * std::min(q_len, MassOptions{.queries = queries}.queries_per_head(group));
  }
};

std::ostream& operator<<(std::ostream& out, const Draw& x) {
  out << "batch " << x.batch << ", KV heads " << x.kv_heads << ", group " << x.group
      << ", head_dim " << x.dim << ", kv_len " << x.kv_len << ", q_len " << x.q_len << "; q "
      << every_format()[uz(x.q_as)]->name << ", k " << every_format()[uz(x.k_as)]->name << ", "
      << layout_names[static_cast<int>(x.layout)] << "; budget " << x.budget.count(x.kv_len) << ", "
      << x.queries << " queries, " << x.top_k.kernel_size << " neighbours, keep "
      << x.top_k.keep_first << "/" << x.top_k.keep_last;
  if (x.scale) out << ", scale " << *x.scale;
  if (x.softcap != 0) out << ", softcap " << x.softcap;
  out << x.values;
  for (const auto& [is, name] : {std::pair{x.other, "after another sequence"},
                                 {x.selects, "selects in between"},
                                 {x.sketch == Sketch::on, "sketch"},
                                 {x.norms, "norms"},
                                 {x.chunk, "chunk"}})
    if (is) out << ", " << name;
  return out << "; " << x.workers << " workers, pieces of " << x.piece << ", branch of " << x.cut
             << ", mask " << x.hides << ", " << x.mode.name;
}

// small: for methods, which are slower, and some of which refuse a softcap.
Draw draw(Random& random, bool of_mass, bool small) {
  Draw x;
  x.batch = random.chance(0.25) ? 2 : 1;
  x.kv_heads = 1 + random.below(3);
  x.group = random.one_of<Index>({1, 1, 2, 3, 4, 4, 5, 7, 8, 16});
  x.dim = random.one_of<Index>(
      {1, 3, 7, 17, 24, 32, 37, 56, 64, 64, 80, 96, 100, 112, 128, 128, 192, 256});
  x.q_len = random.one_of<Index>({1, 1, 2, 3, 5, 16, 17, 33, 64, 128, 130});
  x.q_as = static_cast<int>(random.below(random.chance(0.8) ? 3 : written_formats));
  x.k_as = static_cast<int>(random.below(written_formats));
  x.layout = StoredRows::layouts[random.below(x.batch > 1 ? 3 : 6)];
  x.values = drawn_values(random);

  const bool as_preset = random.below(2) == 0;
  if (of_mass) {
    x.queries = as_preset ? 64 : random.one_of<Index>({1, 2, 7, 16, 33, 64, 132});
    x.top_k.kernel_size = as_preset ? 3 : random.one_of<Index>({1, 1, 2, 3, 5, 8, 17});
  } else if (!as_preset) {
    x.queries = random.one_of<Index>({1, 2, 3, 7, 16, 33});
  }
  if (random.chance(0.3)) x.top_k.keep_first = random.below(9);
  if (random.chance(0.3)) x.top_k.keep_last = random.below(9);
  x.sketch = random.chance(0.4) ? Sketch::off : Sketch::on;

  const double size = random.uniform();
  if (size > 0.96)
    x.dim = std::min<Index>(x.dim, 16), x.kv_heads = 1, x.group = std::min<Index>(x.group, 2);
  x.kv_len = size > 0.96   ? 8000 + random.below(3000)
             : size < 0.1  ? random.below(5)
             : size < 0.85 ? 5 + random.below(600)
                           : 600 + random.below(4000);
  if (small) {
    x.kv_len = std::min<Index>(x.kv_len, 400), x.dim = std::min<Index>(x.dim, 64);
    x.group = std::min<Index>(x.group, 4), x.q_len = std::min<Index>(x.q_len, 33);
  }
  const auto work = [&] { return x.batch * x.kv_heads * x.kv_len * x.dim * (x.rows(of_mass) + 8); };
  while (work() > 6'000'000) x.kv_len = x.kv_len * 2 / 3;

  Index count = random.below(std::max<Index>(2, random.chance(0.3) ? x.kv_len : x.kv_len / 4));
  if (random.seldom(6)) count = random.one_of(Index{0}, x.kv_len);
  x.budget =
      random.chance(0.3) ? Budget::share(0.02 + 0.5 * random.uniform()) : Budget::keys(count);
  if (random.chance(0.4)) x.scale = static_cast<float>(0.05 + random.uniform());
  if (!small && random.chance(0.1)) x.softcap = 5.0f;

  x.workers = static_cast<int>(random.one_of<Index>({1, 2, 3, 5, 16}));
  x.piece = 1 + random.below(std::max<Index>(2, x.kv_len));
  if (x.kv_len / x.piece > 12) x.piece = x.kv_len / 12;
  x.cut = random.chance(0.5) ? 1 + random.below(40) : 0;
  x.other = random.chance(0.3);
  x.selects = random.chance(0.5);
  x.hides = static_cast<int>(random.below(6));
  x.norms = random.chance(0.3);
  x.chunk = random.chance(0.5);
  x.values.unfair = x.kv_len > 7000 && random.chance(0.7);
  if (random.seldom(20)) x.values.not_finite = x.values.nothing = true;
  x.seed = random.bits();
  return x;
}

// ---- its keys and queries -----------------------------------------------------------------------

const Format& format_of(int as) { return *every_format()[uz(as)]; }
StoredRows stored(const Tensor4<float>& x, int as, Layout layout, std::uint64_t seed) {
  Random random(seed);
  return StoredRows(x, format_of(as), layout, random);
}

Tensor4<float> keys_of(const Draw& x, Random& random, Index len) {
  return drawn_keys(random, x.values, x.batch, x.kv_heads, len, x.dim);
}

// The draw's rows, as they lie in its layout and side by side.
struct Data {
  explicit Data(const Draw& draw)
      : x(draw),
        random(draw.seed + 1'000'000),
        q_floats(drawn_queries(random, x.values, x.batch, x.q_heads(), x.group, x.q_len, x.dim)),
        k_floats(keys_of(x, random, x.kv_len)),
        chunk_floats(keys_of(x, random, x.chunk ? x.q_len : 0)),
        q(q_floats, format_of(x.q_as)),
        k(k_floats, format_of(x.k_as)),
        chunk(chunk_floats, format_of(x.k_as)),
        q_laid(stored(q_floats, x.q_as, Layout::tokens, x.seed)),
        k_laid(stored(k_floats, x.k_as, x.layout, x.seed)),
        chunk_laid(stored(chunk_floats, x.k_as, Layout::tokens, x.seed)),
        cache(x.batch, x.kv_heads, x.dim, 1, {format_of(x.k_as), k.scales()}) {
    const Tensor4<float> values(x.batch, x.kv_heads, x.kv_len, 1);
    cache.append(k.rows(), values);
  }

  const Draw& x;
  Random random;
  Tensor4<float> q_floats, k_floats, chunk_floats;
  StoredRows q, k, chunk, q_laid, k_laid, chunk_laid;
  quoka::KvCache cache;  // for the keys' norms
};

// ---- expectations of a Selection ----------------------------------------------------------------

template <class... Parts>
std::string words(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Which keys of the first list that differs are more, and which are missing.
::testing::AssertionResult same(const Selection& is, const Selection& wanted) {
  if (is == wanted) return ::testing::AssertionSuccess();
  auto failure = ::testing::AssertionFailure() << "other keys";
  const auto a = to_positions(is), b = to_positions(wanted);
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i)
    for (std::size_t head = 0; head < std::min(a[i].size(), b[i].size()); ++head) {
      if (a[i][head] == b[i][head]) continue;
      std::vector<Index> more, fewer;
      std::ranges::set_difference(a[i][head], b[i][head], std::back_inserter(more));
      std::ranges::set_difference(b[i][head], a[i][head], std::back_inserter(fewer));
      return failure << ", batch " << i << ", head " << head << ": with "
                     << ::testing::PrintToString(more) << ", without "
                     << ::testing::PrintToString(fewer);
    }
  return failure << ": other shapes";
}

// Does f() throw a Failure? It must throw nothing else.
template <class F>
bool fails(F&& f) {
  try {
    f();
    return false;
  } catch (const Failure&) {
    return true;
  }
}

// Ascending, unique, in range, as many as the budget says, forced keys among them. shared: by all lists together.
void expect_shape(const Selection& keep, const Draw& x, const Budget& budget,
                  const quoka::TopKOptions& top_k, bool shared) {
  const Index wanted = budget.count(x.kv_len);
  const bool by_query_head = keep.heads() == x.q_heads() && x.group > 1;
  ASSERT_TRUE(keep.batch() == x.batch && (keep.heads() == x.kv_heads || by_query_head) &&
              keep.kv_len() == x.kv_len);
  for (Index b = 0; b < x.batch; ++b) {
    Index of_all = 0;
    for (Index head = 0; head < keep.heads(); ++head) {
      const auto list = keep.positions(b, head);
      const Index n = std::ssize(list);
      of_all += n;
      ASSERT_EQ(n, keep.count(b, head));
      if (!shared) {
        ASSERT_EQ(n, wanted);
      }
      for (std::size_t i = 0; i < list.size(); ++i)
        ASSERT_TRUE(list[i] >= (i > 0 ? list[i - 1] + 1 : 0) && list[i] < x.kv_len) << list[i];
      const Index first = std::min(wanted, top_k.keep_first),
                  last = std::min(wanted - first, top_k.keep_last);
      ASSERT_TRUE((first == 0 || list[uz(first - 1)] == first - 1) &&
                  (last == 0 || list[uz(n - last)] == x.kv_len - last))
          << "forced keys are missing";
    }
    ASSERT_EQ(of_all, wanted * keep.heads());
  }
}

// ---- any selector: executors, layouts, histories, failures --------------------------------------

// A selector and its State.
template <class S>
struct Stateful {
  S selector;
  typename S::State state{};

  explicit Stateful(const typename S::Options& options) : selector(options) {}

  Selection select(const SelectorInput& input, ExecutorRef by = SerialExecutor{}) {
    Selection keep = Selection::all(3, 5, 999);  // of another call
    selector.select(input, state, keep, by);
    return keep;
  }
  void append(const SelectorInput& input, ExecutorRef by = SerialExecutor{}) {
    selector.appended(input, state, by);
  }
};

SelectorInput input_of(const Draw& x, const Rows& q, const Rows& k) {
  return {.q = q, .k = k, .logits = x.logits(), .capacity = k.len()};
}
// The input of all keys of the draw, perhaps with their norms and the chunk's keys.
SelectorInput input_of(const Data& data, const Rows& q, const Rows& k) {
  SelectorInput input = input_of(data.x, q, k);
  if (data.x.chunk) input.chunk_k = data.chunk.rows();
  if (data.x.norms) input.inverse_norms = data.cache.inverse_norms();
  return input;
}

// Appends keys [begin, end) to the State, a piece at a time; q has some queries.
template <class S>
void append_keys(Stateful<S>& stateful, const Draw& x, const Rows& q, const StoredRows& k,
                 Index begin, Index end, bool selects, ExecutorRef by = SerialExecutor{}) {
  while (begin < end) {
    const Index n = std::min(x.piece, end - begin);
    if (selects) {
      stateful.select(input_of(x, q, k.rows(begin)), by);
      stateful.state.truncate(begin);  // no effect: it has that length, or less
      stateful.state.truncate(begin + 7);
    }
    stateful.append(input_of(x, q.slice(0, std::min(n, q.len())), k.rows(begin + n)), by);
    begin += n;
  }
}

// Appends all keys, perhaps after another sequence, and after a branch that was cut off again.
template <class S>
void append_as_drawn(Stateful<S>& stateful, const Draw& x, const Data& data, const Rows& q,
                     const StoredRows& k, ExecutorRef by) {
  Index at = 0;
  if (x.other || x.cut > 0) {
    Draw longer = x;
    longer.kv_len += x.cut, longer.values.not_finite = false;
    Random random(x.seed + 2'000'000);
    Tensor4<float> floats = keys_of(longer, random, longer.kv_len);
    if (x.other) {
      append_keys(stateful, x, q, stored(floats, x.k_as, x.layout, x.seed), 0, longer.kv_len,
                  x.selects, by);
      stateful.state.truncate(0);
    }
    if (x.cut > 0) {
      // A branch leaves at a piece's end, so that those to whom pieces matter see the same ones.
      at = x.kv_len / 2 / x.piece * x.piece;
      for (Index b = 0; b < x.batch; ++b)
        for (Index head = 0; head < x.kv_heads; ++head)
          for (Index i = 0; i < at; ++i)
            std::copy_n(&data.k_floats(b, head, i, 0), x.dim, &floats(b, head, i, 0));
      append_keys(stateful, x, q, k, 0, at, x.selects, by);
      append_keys(stateful, x, q, stored(floats, x.k_as, x.layout, x.seed), at, longer.kv_len,
                  x.selects, by);
      stateful.state.truncate(at);
    }
  }
  append_keys(stateful, x, q, k, at, x.kv_len, x.selects, by);
}

// Selection among the cells that a mask leaves, by a State of all cells, which stays as it is, or by the sketch of a
// cache.
template <class S>
void expect_hidden_cells(const Draw& x, Data& data, const typename S::Options& options,
                         const Selection& plain, const KeySketch* sketch = nullptr) {
  const Rows q = data.q_laid.rows();
  const StoredRows& store = data.k_laid;
  Stateful<S> stateful(options);
  if (sketch == nullptr) append_keys(stateful, x, q, store, 0, x.kv_len, false);
  const Index row = x.kv_len + x.q_len, hole = data.random.below(x.kv_len);
  std::vector<std::uint8_t> seen(uz(x.q_len * row), 1);
  for (Index i = 0; i < x.q_len; ++i)
    for (Index t = 0; t < x.kv_len; ++t) {
      const bool hidden = x.hides == 1   ? t == hole
                          : x.hides == 2 ? t >= hole
                          : x.hides == 3 ? t % 3 == 0 && (i != 0 || t % 2 == 0)
                          : x.hides == 4 ? t < hole
                                         : x.hides == 5 && (t + i) % 2 == 0;
      if (hidden) seen[uz(i * row + t)] = 0;
    }
  const quoka::VisibleCells visible(
      quoka::Mask::bytes(seen.data(), {1, 1, x.q_len, row}, {0, 0, row}), x.kv_len);
  const Index count = std::ssize(visible.to_all);
  SelectorInput input = input_of(data, q, store.rows());
  input.sketch = sketch;
  Selection keep, chosen = plain;
  if constexpr (requires { requires S::evicts; })
    if (count < x.kv_len) {
      EXPECT_THROW(select_visible(stateful.selector, input, visible, stateful.state, keep),
                   std::invalid_argument);
      EXPECT_TRUE(same(stateful.select(input), plain));
      return;
    }
  select_visible(stateful.selector, input, visible, stateful.state, keep);
  if (count < x.kv_len) {
    Tensor4<float> some(1, x.kv_heads, count, x.dim);
    for (Index i = 0; i < count; ++i)
      some.chip(i, 2) = data.k_floats.chip(visible.to_all[uz(i)], 2);
    const StoredRows moved_up(some, format_of(x.k_as));
    Stateful<S> own(options);
    SelectorInput among = input_of(x, data.q.rows(), moved_up.rows());
    among.chunk_k = input.chunk_k;
    chosen = own.select(among);
  }
  oracle::Positions lists(1);
  for (Index head = 0; head < chosen.heads(); ++head) {
    auto& list = lists[0].emplace_back(visible.to_some.begin(), visible.to_some.end());
    for (const Position i : chosen.positions(0, head))
      list.push_back(count == x.kv_len ? i : visible.to_all[uz(i)]);
    std::ranges::sort(list);
  }
  EXPECT_TRUE(same(keep, to_selection(lists, x.kv_len))) << "among visible cells";
  EXPECT_TRUE(same(stateful.select(input), plain)) << "after cells were hidden";
}

// A State that keeps something of its keys compares the newest of these in each call, and others in turn: what has
// changed everywhere is found at once, wherever else by the call after a cut. It stays as it was.
template <class S>
void expect_others_are_refused(Stateful<S>& stateful, const Draw& x, Data& data,
                               const SelectorInput& laid, const Selection& plain,
                               ExecutorRef pool) {
  if (x.kv_len == 0 || quoka::kept_bytes_of(stateful.state) == 0) return;
  Index newest = x.kv_len - 1;
  if constexpr (requires { stateful.state.scorer.kept_len(); })
    newest = std::min(newest, stateful.state.scorer.kept_len() - 1);
  if (newest < 0) return;
  StoredRows changed = data.k_laid;
  const bool all = data.random.below(2) == 0;
  const Index one = data.random.below(x.kv_heads), sequence = data.random.below(x.batch);
  for (Index t = all ? 0 : newest; t <= newest; ++t)
    for (Index b = 0; b < x.batch; ++b)
      for (Index head = 0; head < x.kv_heads; ++head)
        if (all || (b == sequence && head == one)) changed.change(b, head, t);
  expect_refused([&] { (void)stateful.select(input_of(x, laid.q, changed.rows()), pool); },
                 {words("key at position ", newest), "truncate(n)"});
  SelectorInput stranger = laid, fewer = input_of(x, laid.q, data.k_laid.rows(x.kv_len - 1));
  stranger.sequence = 7;
  expect_refused([&] { (void)stateful.select(stranger); }, {"sequence"});
  expect_refused([&] { stateful.append(stranger, pool); }, {"sequence"});
  if (x.kv_len > 1) {
    expect_refused([&] { (void)stateful.select(fewer); }, {"truncate()", x.kv_len});
    expect_refused([&] { stateful.append(fewer, pool); }, {"truncate()", x.kv_len});
  }
  EXPECT_TRUE(same(stateful.select(laid), plain)) << "a State that refused others";
}

template <class S>
Selection expect_the_same_keys(const Draw& x, Data& data, const typename S::Options& options) {
  const Rows q = data.q.rows(), k = data.k.rows();
  const SelectorInput input = input_of(data, q, k);
  Stateful<S> fresh(options);
  std::feclearexcept(FE_ALL_EXCEPT);
  append_keys(fresh, x, q, data.k, 0, x.kv_len, false);
  const Selection plain = fresh.select(input);
  EXPECT_EQ(std::fetestexcept(FE_DIVBYZERO), 0);

  quoka::ThreadPool pool(x.workers);
  SelectorInput laid = input_of(data, data.q_laid.rows(), data.k_laid.rows());
  if (x.chunk) laid.chunk_k = data.chunk_laid.rows();
  Stateful<S> lived(options);
  append_as_drawn(lived, x, data, laid.q, data.k_laid, pool);
  EXPECT_TRUE(same(lived.select(laid, pool), plain)) << "with a history, rows elsewhere, threads";
  EXPECT_TRUE(same(lived.select(input), plain)) << "the same keys at another address";
  // One selector serves threads, each with a State of its own.
  const SelectorInput of_one = input_of(x, q.slice(0, 1), k);
  const Selection kept_by_one = lived.select(of_one);
  Selection at_once;
  std::atomic<bool> begun = false;
  std::future<void> other = std::async(std::launch::async, [&] {
    begun = true;
    for (int round = 0; round < 3; ++round)
      fresh.selector.select(of_one, lived.state, at_once, SerialExecutor{});
  });
  while (!begun) std::this_thread::yield();
  for (int round = 0; round < 3; ++round)
    EXPECT_TRUE(same(fresh.select(input), plain)) << "beside another thread";
  other.get();
  EXPECT_TRUE(same(at_once, kept_by_one)) << "by another thread";
  if (x.batch == 1 && x.kv_len > 0) expect_hidden_cells<S>(x, data, options, plain);

  // Wherever it fails, the State is as it was.
  for (int times = 0; times < 3; ++times) {
    Selection keep;
    if (fails([&] { keep = lived.select(laid, FailsAt{data.random.below(times == 0 ? 4 : 40)}); }))
      keep = lived.select(laid);
    EXPECT_TRUE(same(keep, plain)) << "by two workers, or after a failed selection";
  }
  if (x.kv_len > 0) {
    Stateful<S> again(options);
    const Index last = (x.kv_len - 1) / x.piece * x.piece, n = x.kv_len - last;
    append_keys(again, x, q, data.k, 0, last, false);
    const SelectorInput appended = input_of(x, q.slice(0, std::min(n, q.len())), k);
    if (fails([&] { again.append(appended, FailsAt{data.random.below(12)}); })) {
      if (last > 0 && data.random.below(2) ==
                          0) {  // the State of the keys before, until keys are appended again
        Stateful<S> before(options);
        append_keys(before, x, q, data.k, 0, last, false);
        const SelectorInput of_before = input_of(x, q, data.k.rows(last));
        again.state.truncate(last);
        EXPECT_TRUE(same(again.select(of_before), before.select(of_before)))
            << "a State that could not take keys in";
      }
      again.append(appended, pool);
    }
    EXPECT_TRUE(same(again.select(input), plain)) << "appended again after a failure";
  }
  expect_others_are_refused(lived, x, data, laid, plain, pool);
  return plain;
}

// ---- QuoKA --------------------------------------------------------------------------------------

// The sketch of a cache, whose pool has rows of others: that of a State has the same codes.
template <class S>
void expect_same_by_cache_sketch(const Draw& x, Data& data, const typename S::Options& options,
                                 const Selection& plain, const Selection& sketched) {
  const Index room = data.k_laid.pool_rows();
  quoka::ThreadPool threads(x.workers);
  KeySketch sketch;
  sketch.update(data.k_laid.pool(), 0, room, threads);
  SelectorInput input = input_of(data, data.q_laid.rows(), data.k_laid.rows());
  input.sketch = &sketch;
  Stateful<S> stateful(options);
  EXPECT_TRUE(same(stateful.select(input, threads), sketched)) << "the sketch of a cache";
  stateful.append(input, threads);
  EXPECT_EQ(quoka::kept_bytes_of(stateful.state), 0) << "beside the sketch of a cache";
  if constexpr (std::is_same_v<S, QuokaSelector>)
    if (x.kv_len > 0) expect_hidden_cells<S>(x, data, options, plain, &sketch);
  if constexpr (!std::is_same_v<S, QuokaSelector> && !std::is_same_v<S, MassSelector>) return;

  // Rows without an update are scored in float.
  KeySketch of_some;
  of_some.update(data.k_laid.pool(), room / 3, room - room / 3, threads);
  input.sketch = &of_some;
  const Selection some = stateful.select(input);
  EXPECT_TRUE(some == sketched || same(some, plain)) << "the sketch of a part of a cache";

  // A part of a sequence, from any of its keys on.
  const Index begin = data.random.below(x.kv_len + 1), n = x.kv_len - begin;
  SelectorInput part = input_of(x, data.q.rows(), data.k.rows().slice(begin, n));
  Stateful<S> of_part(options);
  of_part.append(part);
  const Selection of_keys = of_part.select(part);
  part.q = data.q_laid.rows(), part.k = data.k_laid.rows().slice(begin, n), part.sketch = &sketch;
  EXPECT_TRUE(same(stateful.select(part), of_keys)) << "the sketch of a cache, for a part of it";

  // Rows are overwritten in a pool that has moved; perhaps the first update fails.
  if (x.kv_len == 0) return;
  StoredRows written = data.k_laid;
  std::vector<Position> rows;
  for (Index i = 0; i < 9; ++i) {
    const Index t = data.random.below(x.kv_len);
    for (Index head = 0; head < x.kv_heads; ++head) written.change(0, head, t);
    rows.push_back(static_cast<Position>(written.pool_row(t)));
  }
  SelectorInput own = input_of(x, data.q_laid.rows(), written.rows());
  own.chunk_k = input.chunk_k;
  const Index newest = data.k_laid.pool_row(x.kv_len - 1);
  const bool looks = x.budget.count(x.kv_len) > 0 && x.budget.count(x.kv_len) < x.kv_len &&
                     !(std::is_same_v<S, MassSelector> && x.softcap != 0);
  if (looks && sketch.errors(0, 0)[newest] < infinity) {  // it has codes
    StoredRows forgotten = data.k_laid;
    forgotten.change(0, 0, x.kv_len - 1);
    KeySketch moved;
    moved.update(data.k_laid.pool(), 0, room, threads);
    moved.update(forgotten.pool(), {}, threads);
    SelectorInput stale = input_of(x, data.q_laid.rows(), forgotten.rows());
    stale.sketch = &moved;
    EXPECT_THROW((void)stateful.select(stale), std::invalid_argument)
        << "the newest key has changed behind a sketch's back";
  }
  Stateful<S> fresh(options), without_keys(options);
  fresh.append(own);
  const Selection expected = fresh.select(own), in_float = without_keys.select(own);
  input.k = written.rows(), input.sketch = &sketch, input.inverse_norms = {};
  if (fails([&] { sketch.update(written.pool(), rows, FailsAt{data.random.below(4)}); })) {
    const Selection keep = stateful.select(input);
    EXPECT_TRUE(keep == expected || same(keep, in_float)) << "a sketch whose update failed";
    sketch.update(written.pool(), rows, threads);
  }
  EXPECT_TRUE(same(stateful.select(input), expected))
      << "a sketch that was updated with written rows";
}

// A method's sketch of keys: a State without all keys does not use it, and the sketch of the cache that keys lie in
// serves as the State's own.
template <class S>
void expect_same_by_own_sketch(const Draw& x, Data& data, const typename S::Options& options,
                               const Selection& sketched) {
  typename S::Options off = options;
  off.sketch = Sketch::off;
  const SelectorInput input = input_of(data, data.q.rows(), data.k.rows());
  Stateful<S> in_float(off), without_keys(options), of_some(options);
  append_keys(in_float, x, input.q, data.k, 0, x.kv_len, false);
  const Selection plain = in_float.select(input);
  if (std::is_same_v<S, QuokaSelector> || x.softcap != 0.0f) {
    EXPECT_TRUE(same(sketched, plain)) << "the sketch";
  }
  EXPECT_TRUE(same(without_keys.select(input), plain)) << "no key was appended";
  append_keys(of_some, x, input.q, data.k, 0, x.kv_len / 2, false);
  if (x.kv_len > 1) {
    EXPECT_TRUE(same(of_some.select(input), plain)) << "half of the keys were appended";
  }
  if (x.batch == 1) expect_same_by_cache_sketch<S>(x, data, options, plain, sketched);
}

// The stages one by one, which stages_test and top_k_test compare with the oracle.
Selection by_stages(const Draw& x, const Data& data) {
  const auto kept = quoka::subselect_queries(data.q.floats(), x.queries);
  const auto scores = quoka::score_keys(quoka::pre_aggregate(kept, x.kv_heads), data.k.floats());
  return quoka::top_k(scores, x.budget.count(x.kv_len), x.top_k);
}

void fuzz(const std::string& name, Index draws, const std::function<Draw(Random&)>& make,
          const std::function<void(const Draw&)>& expect) {
  for_each_draw(name, draws, [&](Random& random, std::uint64_t) {
    const Draw x = make(random);
    SCOPED_TRACE(words(x));
    expect(x);
  });
}

// Many small draws of numbers of any size, and a few long ones, for the bound of the sketch.
TEST(SelectionFuzz, OfQuokaByTheSketchIsThatInFloat) {
  const auto make = [](Random& random) {
    Draw x;
    x.group = 1 + random.below(2), x.dim = 1 + random.below(40), x.kv_len = 2 + random.below(90);
    x.q_len = 1 + random.below(5), x.piece = 37, x.norms = random.seldom(2);
    if (random.seldom(200)) x.dim = 64, x.kv_len = x.piece = 3000;
    x.budget = Budget::keys(1 + random.below(x.kv_len - 1)), x.queries = 1 + random.below(6);
    if (random.seldom(3)) x.top_k.keep_first = random.below(4);
    if (random.seldom(3)) x.top_k.keep_last = random.below(4);
    x.values = {.not_finite = random.seldom(2),
                .ends = true,
                .whole = random.seldom(3),
                .cancels = x.group > 1 && random.seldom(2)};
    x.mode = random.one_of(rounding_modes);
    x.seed = random.bits();
    return x;
  };
  fuzz("SKETCH", 2000, make, [](const Draw& x) {
    const Data data(x);
    const auto selected = [&](Sketch sketch) {
      Stateful<QuokaSelector> stateful({.budget = x.budget,
                                        .n_queries = x.queries,
                                        .keep_first = x.top_k.keep_first,
                                        .keep_last = x.top_k.keep_last,
                                        .sketch = sketch});
      append_keys(stateful, x, data.q.rows(), data.k, 0, x.kv_len, false);
      return stateful.select(input_of(data, data.q.rows(), data.k.rows()));
    };
    const auto [by_codes, in_float] =
        in(x.mode, [&] { return std::pair(selected(Sketch::on), selected(Sketch::off)); });
    EXPECT_TRUE(same(by_codes, in_float));
  });
}

// ---- every method -------------------------------------------------------------------------------

// Only scaled logits count, and a method that does not weigh logits needs no scale.
template <class S>
void expect_scaled_logits(Data& data, const typename S::Options& options) {
  const float scale = data.x.scale.value_or(0.3f);
  const Tensor4<float> louder = data.q_floats * 64.0f;
  Stateful<S> stateful(options);
  SelectorInput input = input_of(data, Rows(data.q_floats), data.k.rows()), by_louder = input;
  append_keys(stateful, data.x, input.q, data.k, 0, data.x.kv_len, false);
  input.logits = LogitOptions{.scale = scale};
  by_louder.q = louder, by_louder.logits = LogitOptions{.scale = scale / 64.0f};
  const Selection plain = stateful.select(input);
  EXPECT_TRUE(same(stateful.select(by_louder), plain)) << "louder queries, and a smaller scale";
  input.logits.reset();
  try {
    EXPECT_TRUE(same(stateful.select(input), plain)) << "without a scale";
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("SelectorInput::logits"), std::string::npos);
  }
}

// Does it weigh each query of the chunk by itself? Others choose among them by place, or by likeness.
template <class S>
bool weighs_each_query(const Draw& x) {
  if constexpr (std::is_same_v<S, MassSelector>) return x.rows(true) == x.group * x.q_len;
  return !std::is_same_v<S, QuokaSelector> && !std::is_same_v<S, quoka::SampleAttentionSelector> &&
         !std::is_same_v<S, quoka::XAttentionSelector> &&
         !std::is_same_v<S, quoka::FlashPrefillSelector> &&
         !std::is_same_v<S, quoka::SnapKvSelector>;
}
// A query that is not finite is left out.
template <class S>
void expect_odd_queries_left_out(Data& data, const typename S::Options& options) {
  const Draw& x = data.x;
  if (!weighs_each_query<S>(x) || x.q_len == 1) return;
  const Index odd = data.random.below(x.q_len);
  const auto selected = [&](const Rows& queries) {
    Stateful<S> stateful(options);
    append_keys(stateful, x, data.q_floats, data.k, 0, x.kv_len, false);
    return stateful.select(input_of(x, queries, data.k.rows()));
  };
  const Tensor4<float> rest = without_row(data.q_floats, odd);
  const Selection wanted = selected(rest);
  for (const float value : {not_a_number, infinity, -infinity}) {
    Tensor4<float> q = with_row(data.q_floats, odd, 1000.0f);
    q.chip(odd, 2).chip(data.random.below(x.dim), 2).setConstant(value);
    const Selection keep = selected(q);
    if (keep.heads() != wanted.heads()) return;  // a shorter chunk has lists of query heads
    EXPECT_TRUE(same(keep, wanted)) << "without query " << odd << ", which has " << value;
  }
}

// The draw's options, as far as S has them; `forced` becomes those of them that say which keys are always kept.
template <class S>
typename S::Options options_of(const Draw& x, quoka::TopKOptions& forced) {
  constexpr bool is_mass = std::is_same_v<S, MassSelector>;
  typename S::Options o{};
  if constexpr (requires { o.budget; }) o.budget = x.budget;
  if constexpr (std::is_same_v<S, QuokaSelector>) o.n_queries = x.queries;
  if constexpr (is_mass) {
    o.threshold = 0.0f, o.least = 0, o.queries = x.queries;
    o.kernel_size = forced.kernel_size = x.top_k.kernel_size;
  }
  if constexpr (requires { o.keep_last; }) o.keep_last = forced.keep_last = x.top_k.keep_last;
  if constexpr (requires { o.keep_first; }) {
    o.keep_first = x.top_k.keep_first;
    // A budget by share is smaller while there are few keys: methods that evict may have dropped some of these then.
    bool dropped = false;
    if constexpr (requires { requires S::evicts; }) dropped = x.budget.count(1'000'000) > x.kv_len;
    // LessIsMore has its first keys only where the budget is larger.
    const bool fill = !std::is_same_v<S, quoka::LessIsMoreSelector>;
    if ((fill || o.keep_first < x.budget.count(x.kv_len)) && !dropped)
      forced.keep_first = o.keep_first;
  }
  if constexpr (requires { o.rank = 7; })
    o.rank = 1 + static_cast<Index>(x.seed % static_cast<std::uint64_t>(x.dim));
  if constexpr (requires { o.fitted = 40; }) o.fitted = 40;
  if constexpr (requires { o.block = Index{16}; }) o.block = 16;
  if constexpr (requires { o.sketch; }) o.sketch = x.sketch;
  return o;
}

template <class S>
void fuzz_selector(Index draws, bool small) {
  constexpr bool is_mass = std::is_same_v<S, MassSelector>,
                 is_cosines = std::is_same_v<S, QuokaSelector>;
  const auto make = [small](Random& random) { return draw(random, is_mass, small); };
  fuzz("FUZZ", draws, make, [](const Draw& x) {
    Data data(x);
    quoka::TopKOptions forced;
    const auto options = options_of<S>(x, forced);
    const Selection keep = expect_the_same_keys<S>(x, data, options);
    constexpr bool has_budget = requires { options.budget; };
    expect_shape(keep, x, has_budget ? x.budget : Budget::keys(x.kv_len), forced, is_mass);
    // Loki's sketch is of its projected keys, and catches up.
    if constexpr (requires { options.sketch; } && !std::is_same_v<S, quoka::LokiSelector>)
      if (x.sketch == Sketch::on) expect_same_by_own_sketch<S>(x, data, options, keep);
    if (x.kv_len == 0) return;
    if (is_cosines) {  // MassSelector's oracle is in mass_rule_test
      EXPECT_TRUE(same(by_stages(x, data), keep)) << "the stages";
    }
    expect_scaled_logits<S>(data, options);
    expect_odd_queries_left_out<S>(data, options);
  });
}

TEST(SelectionFuzz, OfQuoka) {
  fuzz_selector<QuokaSelector>(70, false);
  fuzz_selector<MassSelector>(80, false);
}

template <class S>
class SelectionFuzzOf : public ::testing::Test {};
TYPED_TEST_SUITE(SelectionFuzzOf, SelectorTypes, SelectorNames);

TYPED_TEST(SelectionFuzzOf, AMethod) { fuzz_selector<TypeParam>(16, true); }

}  // namespace
