// Keys that change behind a State's back: a ring buffer that went round, an edited prompt, another sequence in the same
// cache. Every selector that keeps something of its keys notices, as surely as key_witness.hpp says, names the place and
// the way out, and is as it was; those that keep nothing select by the keys as they are.

#include <quoka/packing/byte_formats.hpp>
#include <quoka/methods/all.hpp>

#include "support/fixtures.hpp"
#include "support/selector_names.hpp"

#include <concepts>
#include <numeric>
#include <optional>

namespace {

using namespace quoka_test;
using quoka::Format;
using quoka::SelectorInput;

constexpr Index batch = 1, q_heads = 4, kv_heads = 2, dim = 32, len = 600, chunk = 50;

// A cache of one sequence in any format, in order or in shuffled pages.
class Cache {
 public:
  Cache(Random& random, const Format& format, Index page_len = 0)
      : format_(&format), page_len_(page_len), row_(format.row_bytes({dim})) {
    bytes_.resize(uz(kv_heads * len * row_));
    for (Index page = 0; page_len > 0 && page < len / page_len; ++page)
      table_.push_back(static_cast<Position>((7 * page + 3) % (len / page_len)));
    for (Index t = 0; t < len; ++t) overwrite(random, t);
  }
  void overwrite(Random& random, Index t) {
    std::vector<float> key(uz(dim));
    for (Index head = 0; head < kv_heads; ++head) {
      for (float& x : key) x = static_cast<float>(random.normal());
      format_->narrow(key.data(), {dim},
                      bytes_.data() + (rows(len).row(0, head, t) - bytes_.data()));
    }
  }
  Rows rows(Index count) const {
    if (page_len_ == 0)
      return Rows(bytes_.data(), *format_, {1, kv_heads, len, dim}, {0, len * row_, row_})
          .slice(0, count);
    const Index of_page = kv_heads * page_len_ * row_;
    const Rows pool(bytes_.data(), *format_, {len / page_len_, kv_heads, page_len_, dim},
                    {of_page, page_len_ * row_, row_});
    return paged(pool, table_, count);
  }

 private:
  const Format* format_;
  Index page_len_, row_;
  std::vector<std::byte> bytes_;
  std::vector<Position> table_;
};

// What a change writes, and the first keys that are as they were.
struct Change {
  const char* name;
  std::vector<Index> keys;
  Index as_before;
  Index calls;  // until it is found at the latest
};
std::vector<Change> changes() {
  const auto run = [](Index first, Index end) {
    std::vector<Index> keys(uz(end - first));
    std::iota(keys.begin(), keys.end(), first);
    return keys;
  };
  // 64 points a call: 1.9 * 600 / 64 calls for one key.
  return {{"a ring buffer that went round", run(0, 37), 0, 1},
          {"and again", run(211, 248), 211, 1},
          {"an edited prompt", run(400, len), 400, 1},
          {"an edited word", run(131, 134), 131, 7},
          {"another sequence", run(0, len), 0, 1},
          {"the oldest key", {0}, 0, 1},
          {"the newest key", {len - 1}, len - 1, 1},
          {"one key", {317}, 317, 18}};
}

template <class S>
typename S::Options with_budget(quoka::Budget budget = quoka::Budget::keys(31)) {
  typename S::Options options{};
  if constexpr (requires { options.budget = budget; }) options.budget = budget;
  if constexpr (requires { options.rank = 7; }) options.rank = 7;
  if constexpr (requires { options.sketch = quoka::Sketch::on; })
    options.sketch = quoka::Sketch::on;
  return options;
}
template <class S>
struct Variants {
  static std::vector<typename S::Options> all() { return {with_budget<S>()}; }
};
template <>
struct Variants<quoka::QuokaSelector> {
  static std::vector<quoka::QuokaOptions> all() {
    std::vector<quoka::QuokaOptions> presets;
    for (const char* const name : {"quoka", "recommended", "robust"})
      presets.push_back(quoka::QuokaOptions::preset(name, quoka::Budget::keys(31)));
    for (quoka::QuokaOptions& options : presets) options.sketch = quoka::Sketch::on;
    presets.push_back({.budget = quoka::Budget::keys(31), .sketch = quoka::Sketch::off});
    return presets;
  }
};

template <class S>
struct Layer {
  Layer(const typename S::Options& options, const Tensor4<float>& queries)
      : selector(options), q(&queries) {}

  SelectorInput input(const Cache& cache, Index count) const {
    return {Rows(*q).slice(0, 7), cache.rows(count), quoka::LogitOptions{}};
  }
  // Tells of keys [first, count).
  void feed(const Cache& cache, Index first, Index count) {
    for (Index end = first; end < count;) {
      end = std::min(count, end + chunk);
      SelectorInput told = input(cache, end);
      told.q = Rows(*q);
      selector.appended(told, state, SerialExecutor{});
    }
  }
  Selection select(const Cache& cache, ExecutorRef executor = SerialExecutor{}) {
    Selection keep;
    selector.select(input(cache, len), state, keep, executor);
    return keep;
  }
  bool keeps() const {
    if constexpr (requires { state.scorer.kept_len(); }) return state.scorer.kept_len() > 0;
    return requires { state.kept_bytes(); }
    &&!requires { state.scorer; };
  }

  S selector;
  typename S::State state;
  const Tensor4<float>* q;
};

template <class List>
struct TypesOf;
template <class... Entries>
struct TypesOf<quoka::SelectorList<Entries...>> {
  using Types = ::testing::Types<typename Entries::Type...>;
};

template <class S>
class ChangedKeys : public ::testing::Test {
 protected:
  void expect_noticed(const Format& format, Index page_len, const typename S::Options& options,
                      const Change& change) {
    SCOPED_TRACE(std::string(change.name) + ", " + format.name);
    Random random(610);
    const auto q = random.tensor<float>(batch, q_heads, chunk, dim);
    Cache cache(random, format, page_len);
    Layer<S> layer(options, q);
    layer.feed(cache, 0, len);
    const Selection before = layer.select(cache);
    Cache changed = cache;
    for (const Index t : change.keys) changed.overwrite(random, t);
    Layer<S> fresh(options, q);
    fresh.feed(changed, 0, len);
    const Selection expected = fresh.select(changed);
    if (!layer.keeps()) {
      EXPECT_EQ(layer.select(changed), expected);
      return;
    }
    Index calls = 0;
    const auto look = [&] {
      for (; calls < change.calls; ++calls) (void)layer.select(changed);
    };
    expect_refused(look, {"key at position", "KV head", len, "truncate(n)"});
    EXPECT_EQ(layer.select(cache), before);  // as it was, for the keys as they were
    layer.state.truncate(change.as_before);
    layer.feed(changed, change.as_before, len);
    fresh.state.truncate(change.as_before);  // for those to whom chunks matter
    fresh.feed(changed, change.as_before, len);
    EXPECT_EQ(layer.select(changed), fresh.select(changed));
  }
};
TYPED_TEST_SUITE(ChangedKeys, TypesOf<quoka::AllSelectors>::Types, SelectorNames);

TYPED_TEST(ChangedKeys, AreNoticed) {
  for (const auto& options : Variants<TypeParam>::all())
    for (const Change& change : changes())
      this->expect_noticed(quoka::format_of<float>(), 0, options, change);
}

// Another sequence, appended behind the first one's keys without a truncate().
TYPED_TEST(ChangedKeys, OfASequenceAppendedAnewAreNoticed) {
  Random random(612);
  const auto q = random.tensor<float>(batch, q_heads, chunk, dim);
  for (const auto& options : Variants<TypeParam>::all()) {
    const Cache first(random, quoka::format_of<float>()), second(random, quoka::format_of<float>());
    for (const Index told : {Index{300}, len}) {
      Layer<TypeParam> layer(options, q), fresh(options, q);
      layer.feed(first, 0, told);
      const auto go_on = [&] { layer.feed(second, told - chunk, len), (void)layer.select(second); };
      if (layer.keeps())
        expect_refused(go_on, {"key at position", "truncate(0)"});
      else
        EXPECT_NO_THROW(go_on());
      layer.state.truncate(0);
      layer.feed(second, 0, len), fresh.feed(second, 0, len);
      EXPECT_EQ(layer.select(second), fresh.select(second));
    }
  }
}

}  // namespace
