// quoka/c.h against the C++ functions behind it: the same drawn calls give the same bits, in every layout that c.h has
// a name for; and what the door refuses by itself, in the names of c.h.

#include <quoka/c.h>
#include <quoka/kernels/byte_formats.hpp>
#include <quoka/methods/indexer.hpp>
#include <quoka/quoka.hpp>

#include "support/attention_case.hpp"

#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>

extern "C" int quoka_c_test(void);

namespace {

using namespace quoka_test;

// c_test.c, whose failures it prints itself.
TEST(CDoor, IsWhatItSaysFromC) { EXPECT_EQ(quoka_c_test(), 0); }

// A struct of c.h without values but its size.
template <class T>
T sized() {
  T x{};
  x.size = sizeof x;
  return x;
}

template <class Handle>
using Owned = std::unique_ptr<Handle, void (*)(Handle*)>;
template <class Handle, class Create, class... Arguments>
Owned<Handle> made(Create create, void (*free)(Handle*), Arguments... arguments) {
  Handle* handle = nullptr;
  EXPECT_EQ(create(arguments..., &handle), QUOKA_OK) << quoka_message();
  return {handle, free};
}

// Formats in the order of quoka_type.
std::vector<const quoka::Format*> formats() {
  return {&quoka::format_of<float>(),
          &quoka::format_of<Eigen::half>(),
          &quoka::format_of<Eigen::bfloat16>(),
          &quoka::q8_0_format(),
          &quoka::u8_format(),
          &quoka::i8_format(),
          &quoka::i8_channel_format(),
          &quoka::e4m3_format()};
}
int32_t type_of(const quoka::Format& format) {
  if (&format == &quoka::channel_major_format<float>()) return QUOKA_F32;
  if (&format == &quoka::channel_major_format<Eigen::half>()) return QUOKA_F16;
  if (&format == &quoka::channel_major_format<Eigen::bfloat16>()) return QUOKA_BF16;
  const auto all = formats();
  return static_cast<int32_t>(std::ranges::find(all, &format) - all.begin());
}

// Rows of any layout as a caller of C has them.
class CTensor {
 public:
  explicit CTensor(const Rows& rows) {
    tensor_.size = sizeof tensor_;
    if (rows.empty() && rows.data() == nullptr) return;
    const auto sizes = rows.pool_sizes();
    const auto strides = rows.pool_strides();
    tensor_.data = const_cast<std::byte*>(rows.data());
    tensor_.type = type_of(rows.format());
    tensor_.batch = sizes[0], tensor_.heads = sizes[1], tensor_.len = sizes[2],
    tensor_.dim = sizes[3];
    std::copy_n(strides.begin(), 3, tensor_.strides);
    const auto shape = rows.shape(0);
    tensor_.channel_step = shape.channel_step;
    if (shape.channel_step == 0) name_layout(rows.format().row_bytes(shape));
    tensor_.scales = shape.scales;
    if (shape.scales != nullptr && rows.heads() > 1)
      tensor_.scales_step = rows.shape(1).scales - shape.scales;
    if (rows.mapped() && rows.map().pages == nullptr) {
      for (Index i = 0; i < rows.len(); ++i)
        cells_.push_back(static_cast<Position>(rows.pool_row(i)));
    } else if (rows.mapped() && rows.map().cells == nullptr && rows.pool_begin() == 0) {
      tensor_.table = rows.map().pages;
      tensor_.table_count = quoka::ceil_div(rows.len(), rows.map().page_size);
      tensor_.tokens = rows.len();
    } else if (rows.mapped()) {  // every page in turn, and a list of their rows
      for (Index page = 0; page < sizes[0]; ++page) table_.push_back(static_cast<Position>(page));
      for (Index i = 0; i < rows.len(); ++i)
        cells_.push_back(static_cast<Position>(rows.pool_row(i)));
      tensor_.table = table_.data(), tensor_.table_count = sizes[0],
      tensor_.tokens = sizes[0] * sizes[2];
    }
    if (!cells_.empty())
      tensor_.cells = cells_.data(), tensor_.cells_count = std::ssize(cells_);
    else if (rows.mapped() && tensor_.table == nullptr)
      tensor_.len = 0;
    there_ = true;
  }
  CTensor(const CTensor&) = delete;
  CTensor& operator=(const CTensor&) = delete;
  const quoka_tensor* get() const { return there_ ? &tensor_ : nullptr; }
  int32_t layout() const { return tensor_.layout; }

 private:
  // Strides of a named layout are given by its name instead, with padding, more room than tokens, and all bytes.
  void name_layout(Index row_bytes) {
    const auto& [of_batch, of_head, of_row] = tensor_.strides;
    const Index heads = tensor_.heads, len = tensor_.len;
    if (of_row <= 0 || of_head <= 0 || len == 0) return;
    if ((of_head == row_bytes || heads == 1) && of_row >= heads * row_bytes) {
      const Index room = tensor_.batch > 1 ? of_batch / of_row : len;
      if (room < len || (tensor_.batch > 1 && of_batch != room * of_row)) return;
      tensor_.layout = QUOKA_TOKEN_MAJOR, tensor_.capacity = room, tensor_.step_bytes = of_row;
      tensor_.bytes = uz(tensor_.batch * room * of_row);
    } else if (of_head % of_row == 0 && of_head >= len * of_row) {
      if (tensor_.batch > 1 && of_batch != heads * of_head) return;
      tensor_.layout = QUOKA_HEAD_MAJOR, tensor_.step_bytes = of_row;
      tensor_.capacity = of_head / of_row;
      tensor_.bytes = uz(tensor_.batch * heads * of_head);
    } else {
      return;
    }
    std::fill_n(tensor_.strides, 3, -1);  // which is not read
  }

  quoka_tensor tensor_{};
  std::vector<Position> table_, cells_;
  bool there_ = false;
};

// The same of rows that are written.
quoka_tensor c_output(const quoka::OutputRows& rows) {
  auto tensor = sized<quoka_tensor>();
  tensor.data = rows.data();
  tensor.type = type_of(rows.format());
  tensor.batch = rows.batch(), tensor.heads = rows.heads(), tensor.len = rows.len(),
  tensor.dim = rows.dim();
  std::copy_n(rows.strides().begin(), 3, tensor.strides);
  tensor.scales = rows.shape(0).scales;
  tensor.channel_step = rows.shape(0).channel_step;
  return tensor;
}

quoka_floats floats(std::span<const float> x) { return {x.data(), std::ssize(x)}; }

// AttentionOptions as a caller of C has them, with a mask of this kind.
class COptions {
 public:
  COptions(const quoka::AttentionOptions& options, StoredMask::Kind kind) {
    options_.size = sizeof options_;
    options_.scale = options.scale.value_or(0.0f);
    options_.softcap = options.softcap;
    options_.sinks = floats(options.sinks);
    options_.alibi_slopes = floats(options.alibi_slopes);
    options_.mask_factors = floats(options.mask_factors);
    options_.sliding_window = options.sliding_window;
    constexpr int32_t arithmetics[] = {QUOKA_ARITHMETIC_AUTOMATIC, QUOKA_ARITHMETIC_FLOAT,
                                       QUOKA_ARITHMETIC_BF16, QUOKA_ARITHMETIC_INT8};
    options_.arithmetic = arithmetics[options.arithmetic.number()];
    options_.bidirectional = options.causal ? 0 : 1;
    options_.has_q_offset = options.q_offset ? 1 : 0;
    options_.q_offset = options.q_offset.value_or(0);
    if (!options.lists.absent()) {
      const quoka::IndexLists& lists = options.lists;
      for (Index b = 0; b < lists.batch(); ++b)
        for (Index head = 0; head < lists.heads(); ++head)
          for (Index i = 0; i < lists.q_len(); ++i) {
            const auto* const row = lists.entries().row(b, head, i);
            entries_.insert(entries_.end(), row, row + lists.most());
            if (!lists.counts().absent()) counts_.push_back(lists.counts().at(b, head, i));
          }
      lists_ = {.size = sizeof lists_,
                .entries = entries_.data(),
                .counts = counts_.empty() ? nullptr : counts_.data(),
                .batch = lists.batch(),
                .heads = lists.heads(),
                .q_len = lists.q_len(),
                .k = lists.most(),
                .block = lists.block()};
      options_.lists = &lists_;
    }
    if (options.mask.absent()) return;
    const auto& sizes = options.mask.sizes();
    const auto& strides = options.mask.strides();
    mask_ = {.size = sizeof mask_,
             .data = options.mask.data(),
             .type = static_cast<int32_t>(kind),
             .batch = sizes[0],
             .heads = sizes[1],
             .q_len = sizes[2],
             .keys = sizes[3],
             .strides = {},
             .as_lists = options.mask.is_lists()};
    // Rows without a gap need no strides.
    if (strides[2] != options.mask.row_bytes()) std::copy_n(strides.begin(), 3, mask_.strides);
    options_.mask = &mask_;
  }
  COptions(const COptions&) = delete;
  COptions& operator=(const COptions&) = delete;
  const quoka_attention_options* get() const { return &options_; }

 private:
  quoka_attention_options options_{};
  quoka_mask mask_{};
  quoka_index_lists lists_{};
  std::vector<Position> entries_, counts_;
};

Owned<quoka_selection> c_selection(const Selection& from) {
  auto selection = made<quoka_selection>(quoka_selection_create, quoka_selection_free);
  std::vector<Position> positions;
  std::vector<int64_t> counts;
  for (Index b = 0; b < from.batch(); ++b)
    for (Index head = 0; head < from.heads(); ++head) {
      const auto list = from.positions(b, head);
      positions.insert(positions.end(), list.begin(), list.end());
      counts.push_back(std::ssize(list));
    }
  EXPECT_EQ(quoka_selection_set(selection.get(), from.batch(), from.heads(), from.kv_len(),
                                positions.data(), counts.data()),
            QUOKA_OK)
      << quoka_message();
  return selection;
}

Selection cpp_selection(const quoka_selection* from) {
  int64_t batch, heads, kv_len;
  int32_t is_all;
  EXPECT_EQ(quoka_selection_shape(from, &batch, &heads, &kv_len, &is_all), QUOKA_OK);
  if (is_all != 0) return Selection::all(batch, heads, kv_len);
  std::vector<std::vector<Position>> lists;
  for (Index head = 0; head < batch * heads; ++head) {
    const Position* row = nullptr;
    int64_t count = 0;
    EXPECT_EQ(quoka_selection_row(from, head / heads, head % heads, &row, &count), QUOKA_OK);
    lists.emplace_back(row, row + count);
  }
  return Selection::from_lists(batch, heads, kv_len, lists);
}

TEST(CDoor, AttendsToTheSameBitsAsTheFunctionBehindIt) {
  int selections = 0, mapped = 0, lists = 0;
  std::map<StoredMask::Kind, int> masks;
  std::map<int32_t, int> layouts;
  const bool complete = for_each_draw(150, [&](Random& random) {
    const AttentionCase c(random);
    SCOPED_TRACE(c.describe());
    if (c.options().scale == 0.0f) return;  // which stands for the default here
    selections += c.has_selection(), mapped += c.past().k.mapped(), lists += c.has_lists();
    if (c.has_mask()) ++masks[c.mask_kind()];
    const auto expected = c.attend();
    const auto by_c =
        c.attend([&](const Rows& q, const quoka::Past& past, const quoka::Chunk& chunk,
                     const quoka::AttentionOutput& output, const AttentionOptions& options) {
          const CTensor c_q(q), past_k(past.k), past_v(past.v), chunk_k(chunk.k), chunk_v(chunk.v);
          ++layouts[past_k.layout()];
          const quoka_tensor out = c_output(output.out);
          const COptions c_options(options, c.mask_kind());
          Owned<quoka_selection> keep(nullptr, quoka_selection_free);
          if (past.selection != nullptr) keep = c_selection(*past.selection);
          auto call = sized<quoka_attention_args>();
          call.q = c_q.get();
          call.k_cache = past_k.get(), call.v_cache = past_v.get();
          call.chunk_k = chunk_k.get(), call.chunk_v = chunk_v.get();
          call.out = &out;
          call.lse_nat = const_cast<float*>(output.lse_nat.data());
          std::copy_n(output.lse_nat.strides().begin(), 3, call.lse_strides);
          call.options = c_options.get();
          call.selection = keep.get();
          call.past_position = past.first_position;
          ASSERT_EQ(quoka_attention(&call), QUOKA_OK) << quoka_message();
        });
    ASSERT_TRUE(same_bits(by_c.out, expected.out));
    ASSERT_TRUE(same_bits(by_c.lse, expected.lse));
  });
  if (!complete) return;
  EXPECT_GT(selections, 10);
  EXPECT_EQ(masks.size(), 5u) << "masks of every kind";
  EXPECT_GT(mapped, 10);
  EXPECT_GT(lists, 10);
  EXPECT_GT(layouts[QUOKA_STRIDED], 10);
  EXPECT_GT(layouts[QUOKA_TOKEN_MAJOR], 10);
  EXPECT_GT(layouts[QUOKA_HEAD_MAJOR], 10);
}

TEST(CDoor, IndexHeadsChooseWhatTheIndexerBehindItChooses) {
  const auto threads = made<quoka_threads>(quoka_threads_create, quoka_threads_free, 2);
  for_each_draw(24, [&](Random& random) {
    const Index batch = 1 + random.below(2), heads = random.one_of(1, 3),
                q_len = 1 + random.below(9), keys = q_len + random.below(90);
    const auto q = random.tensor<float>(batch, 2 * heads, q_len, 16);
    const auto k = random.tensor<Eigen::half>(batch, heads, keys, 16);
    const auto weights = random.scores(batch, 2 * heads, q_len);
    const auto turned = random.scores(batch, q_len, 2 * heads);  // as models have them
    Tensor4<float> hides(1, 1, q_len, keys);
    for (Index i = 0; i < hides.size(); ++i)
      hides.data()[i] = random.below(3) == 0 ? -infinity : 0.0f;
    const CTensor c_q{Rows(q)}, c_k{Rows(k)};
    auto options = sized<quoka_indexer_options>();  // of which 0 is the default
    auto call = sized<quoka_index_args>();
    call.q = c_q.get(), call.k = c_k.get(), call.threads = threads.get();
    quoka::IndexerOptions how;
    quoka::IndexerInput input{.q = q, .k = k};
    if (random.seldom(3)) how.k = options.k = 1 + random.below(9);
    if (random.seldom(3)) how.block = options.block = 8;
    if (random.seldom(3)) how.keep_first = options.keep_first = 1;
    if (random.seldom(3)) how.keep_last = options.keep_last = 2;
    if (heads > 1 || random.seldom(2)) how.lists_heads = options.lists_heads = heads;
    if (random.seldom(3)) how.causal = false, options.bidirectional = 1;
    if (const Index kind = random.below(3); kind == 1) {
      input.weights = weights, call.weights = weights.data();
    } else if (kind == 2) {
      const Index step = 2 * heads;
      input.weights = {turned.data(), {batch, step, q_len}, {step * q_len, 1, step}};
      call.weights = turned.data();
      call.weights_strides[0] = step * q_len, call.weights_strides[1] = 1;
      call.weights_strides[2] = step;
    }
    auto mask = sized<quoka_mask>();
    mask.data = hides.data(), mask.q_len = q_len, mask.keys = keys;
    if (random.seldom(3)) input.mask = quoka::Mask(hides), call.mask = &mask;
    quoka::Indexer expected(how);
    const quoka::IndexLists lists = expected.choose(input);
    const auto indexer = made<quoka_indexer>(quoka_indexer_create, quoka_indexer_free, &options);
    auto c_lists = sized<quoka_index_lists>();
    ASSERT_EQ(quoka_index_keys(indexer.get(), &call, &c_lists), QUOKA_OK) << quoka_message();
    ASSERT_EQ((std::array{c_lists.batch, c_lists.heads, c_lists.q_len, c_lists.k, c_lists.block}),
              (std::array<int64_t, 5>{lists.batch(), lists.heads(), lists.q_len(), lists.most(),
                                      lists.block()}));
    EXPECT_EQ(c_lists.counts, nullptr);
    const auto count = c_lists.batch * c_lists.heads * c_lists.q_len * c_lists.k;
    EXPECT_TRUE(std::equal(c_lists.entries, c_lists.entries + count, lists.entries().data()));
    // A refusal leaves the struct as it was.
    const quoka_index_lists before = c_lists;
    call.k = nullptr;
    EXPECT_EQ(quoka_index_keys(indexer.get(), &call, &c_lists), QUOKA_INVALID);
    EXPECT_EQ(std::memcmp(&before, &c_lists, sizeof before), 0);
  });
}

// Any preset, budget, mask and chunk, with a state and without, by threads of the library's.
TEST(CDoor, SelectsWhatTheSelectorBehindItSelects) {
  const auto threads = made<quoka_threads>(quoka_threads_create, quoka_threads_free, 2);
  int masked = 0, in_cache = 0, shares = 0;
  const bool complete = for_each_draw(60, [&](Random& random) {
    const Index len = 40 + random.below(900), q_len = 1 + random.below(40);
    const auto q = random.tensor<float>(1, 8, q_len, 64);
    const auto all = random.tensor<Eigen::half>(1, 2, len + q_len, 64);
    const Rows k = Rows(all).slice(0, len), own = Rows(all).slice(len, q_len);
    const CTensor c_q{Rows(q)}, c_all{Rows(all)}, c_k{k}, c_own{own};

    const Index preset = random.below(3), budget = random.below(3);
    auto how = sized<quoka_selection_options>();
    how.preset = static_cast<int32_t>(preset);
    if (budget == 1) how.budget_keys = 1 + random.below(len);
    if (budget == 2) how.budget_share = 0.125;
    how.no_sketch = static_cast<int32_t>(random.below(2));
    how.keep_first = random.below(3), how.keep_last = random.below(6);
    how.queries = random.below(2) * 100;
    const std::optional<Budget> wanted = budget == 1 ? std::optional(Budget::keys(how.budget_keys))
                                         : budget == 2 ? std::optional(Budget::share(0.125))
                                                       : std::nullopt;
    const auto with = [&](auto of) -> quoka::SelectionOptions {
      if (wanted) of.budget = *wanted;
      of.keep_first = how.keep_first, of.keep_last = how.keep_last;
      if (how.no_sketch != 0) of.sketch = quoka::Sketch::off;
      if constexpr (requires { of.n_queries; }) {
        if (how.queries > 0) of.n_queries = how.queries;
      } else if (how.queries > 0) {
        of.queries = how.queries;
      }
      return of;
    };
    using quoka::MassOptions;
    const quoka::AnySelector selector(
        preset == QUOKA_PAPER ? with(quoka::QuokaOptions{})
        : preset == QUOKA_BALANCED
            ? with(wanted ? MassOptions::balanced(*wanted) : MassOptions::balanced())
            : with(wanted ? MassOptions::recommended(*wanted) : MassOptions::recommended()));

    auto options = sized<quoka_attention_options>();
    options.scale = 0.2f, options.softcap = random.below(2) == 0 ? 0.0f : 5.0f;
    const LogitOptions logits{.scale = 0.2f, .softcap = options.softcap};
    auto call = sized<quoka_select_args>();
    call.q = c_q.get(), call.k_cache = c_k.get(), call.options = &options, call.how = &how;
    call.threads = threads.get();
    std::vector<std::uint8_t> seen(uz(q_len * (len + q_len)), 1);
    for (std::uint8_t& byte : seen) byte = random.below(50) > 0;
    auto mask = sized<quoka_mask>();
    mask.data = seen.data(), mask.type = QUOKA_MASK_BYTES, mask.q_len = q_len,
    mask.keys = len + q_len;
    quoka::Mask hides;
    quoka::SelectorInput input{.q = q, .k = k, .logits = logits};
    switch (random.below(4)) {
      case 0:
        options.mask = &mask, ++masked;
        hides = quoka::Mask::bytes(seen.data(), {1, 1, q_len, len + q_len}, {0, 0, len + q_len});
        break;
      case 1:
        input.chunk_k = own, call.chunk_k = c_own.get();
        break;
      case 2:
        input.chunk_k = own, call.k_cache = c_all.get(), call.cache_holds_chunk = 1, ++in_cache;
    }

    const auto keep = made<quoka_selection>(quoka_selection_create, quoka_selection_free);
    const auto expect_as = [&](quoka::AnySelector::State& state) {
      Selection expected;
      select_visible(selector, input, hides, state, expected, SerialExecutor{});
      ASSERT_EQ(quoka_select(&call, keep.get()), QUOKA_OK) << quoka_message();
      ASSERT_EQ(cpp_selection(keep.get()), expected);
      const auto kept = expected.kept_shares();
      for (Index head = 0; head < expected.heads(); ++head) {
        float share = -1.0f;
        ASSERT_EQ(quoka_selection_kept_share(keep.get(), 0, head, &share), QUOKA_OK);
        const float wanted_share = expected.is_all() ? 1.0f
                                   : kept.empty()    ? not_a_number
                                                     : kept[uz(head)];
        ASSERT_EQ(std::bit_cast<std::uint32_t>(share), std::bit_cast<std::uint32_t>(wanted_share));
        shares += !kept.empty();
      }
    };
    quoka::AnySelector::State none, appended;
    ASSERT_NO_FATAL_FAILURE(expect_as(none));
    const auto state = made<quoka_state>(quoka_state_create, quoka_state_free, &how);
    call.state = state.get(), call.how = nullptr;
    for (const bool again : {false, true}) {  // some keys were taken back
      if (again) {
        ASSERT_EQ(quoka_state_truncate(state.get(), len / 3), QUOKA_OK);
        appended.truncate(len / 3);
      }
      ASSERT_EQ(quoka_state_appended(state.get(), c_k.get(), 1000, threads.get()), QUOKA_OK);
      selector.appended({.q = {}, .k = k, .capacity = 1000}, appended, SerialExecutor{});
      ASSERT_NO_FATAL_FAILURE(expect_as(appended));
    }
  });
  if (!complete) return;
  EXPECT_GT(masked, 5);
  EXPECT_GT(in_cache, 5);
  EXPECT_GT(shares, 20);
}

// A cache and a layer over keys and values of any types, with scales and without, selecting and dense, after a prefix that
// was cut; the tensors that the cache returns are accepted as inputs.
TEST(CDoor, CachesAndLayersAreThoseBehindIt) {
  const auto threads = made<quoka_threads>(quoka_threads_create, quoka_threads_free, 2);
  for_each_draw(24, [&](Random& random) {
    const Index batch = 1 + random.below(2);
    auto cache = sized<quoka_cache_options>();
    cache.batch = batch, cache.kv_heads = 2, cache.head_dim = 32, cache.v_dim = 48;
    cache.k_type = static_cast<int32_t>(random.below(8));
    cache.v_type = static_cast<int32_t>(random.below(8));
    const quoka::Format &k_format = *formats()[uz(cache.k_type)],
                        &v_format = *formats()[uz(cache.v_type)];
    const auto k_scales = scales_of(k_format, 2, 32), v_scales = scales_of(v_format, 2, 48);
    cache.k_scales = floats(k_scales), cache.v_scales = floats(v_scales);
    const std::vector<float> sinks{0.5f, -1.0f, 2.0f, 0.0f};
    auto options = sized<quoka_attention_options>();
    options.softcap = 20.0f, options.sinks = floats(sinks);
    const AttentionOptions attention{.softcap = 20.0f, .sinks = sinks};
    const auto tensor = [&](Index heads, Index len, Index dim) {
      return random.tensor<float>(batch, heads, len, dim);
    };

    const auto kept = made<quoka_cache>(quoka_cache_create, quoka_cache_free, &cache);
    quoka::KvCache same(batch, 2, 32, 48, {k_format, k_scales}, {v_format, v_scales});
    for (const bool first : {true, false}) {  // what was cut is written anew
      const auto k = tensor(2, 20, 32), v = tensor(2, 20, 48);
      const CTensor c_k{Rows(k)}, c_v{Rows(v)};
      ASSERT_EQ(quoka_cache_append(kept.get(), c_k.get(), c_v.get(), nullptr), QUOKA_OK);
      same.append(k, v);
      ASSERT_EQ(quoka_cache_truncate(kept.get(), first ? 3 : 20), QUOKA_OK);
      same.truncate(first ? 3 : 20);
      ASSERT_EQ(quoka_cache_reserve(kept.get(), 500), QUOKA_OK);
    }
    ASSERT_EQ(quoka_cache_len(kept.get()), 20);
    auto kept_k = sized<quoka_tensor>(), kept_v = sized<quoka_tensor>();
    for (quoka_tensor* const of : {&kept_k, &kept_v})  // which is only written
      std::memset(reinterpret_cast<char*>(of) + sizeof of->size, 0xff,
                  sizeof *of - sizeof of->size);
    ASSERT_EQ(quoka_cache_view(kept.get(), &kept_k, &kept_v), QUOKA_OK) << quoka_message();
    EXPECT_EQ(kept_k.type, cache.k_type);
    {
      const auto q = tensor(4, 2, 32), own_k = tensor(2, 2, 32), own_v = tensor(2, 2, 48);
      const CTensor c_q{Rows(q)}, c_k{Rows(own_k)}, c_v{Rows(own_v)};
      Tensor4<float> expected(batch, 4, 2, 48), by_c(batch, 4, 2, 48);
      quoka::attention(q, {same.k(), same.v()}, {own_k, own_v}, expected);
      const quoka_tensor out = c_output(by_c);
      auto call = sized<quoka_attention_args>();
      call.q = c_q.get(), call.k_cache = &kept_k, call.v_cache = &kept_v;
      call.chunk_k = c_k.get(), call.chunk_v = c_v.get(), call.out = &out;
      ASSERT_EQ(quoka_attention(&call), QUOKA_OK) << quoka_message();
      EXPECT_TRUE(same_bits(by_c, expected));
    }

    const quoka::LayerShape shape{4, 2, 32, 48, batch, &k_format, &v_format, k_scales, v_scales};
    const auto as_expected = [&](auto expected, const quoka_selection_options* how) {
      const auto layer = made<quoka_prefill>(quoka_prefill_create, quoka_prefill_free, int64_t{4},
                                             &cache, &options, how);
      ASSERT_EQ(quoka_prefill_reserve(layer.get(), 90), QUOKA_OK);
      for (const Index len : {60, 20, 1, 7}) {
        const auto q = tensor(4, len, 32), k = tensor(2, len, 32), v = tensor(2, len, 48);
        const CTensor c_q{Rows(q)}, c_k{Rows(k)}, c_v{Rows(v)};
        if (len == 60) {
          ASSERT_EQ(quoka_prefill_append(layer.get(), c_k.get(), c_v.get(), threads.get()),
                    QUOKA_OK);
          ASSERT_EQ(quoka_prefill_truncate(layer.get(), 50), QUOKA_OK);
          expected.append(k, v), expected.truncate(50);
          continue;
        }
        Tensor4<float> out(batch, 4, len, 48), by_c(batch, 4, len, 48);
        Tensor3<float> lse(batch, 4, len), lse_by_c(batch, 4, len);
        expected.forward(q, k, v, {out, TensorView<float, 3>(lse)});
        const quoka_tensor c_out = c_output(by_c);
        ASSERT_EQ(quoka_prefill_forward(layer.get(), c_q.get(), c_k.get(), c_v.get(), &c_out,
                                        lse_by_c.data(), len == 7 ? nullptr : threads.get()),
                  QUOKA_OK)
            << quoka_message();
        EXPECT_TRUE(same_bits(by_c, out));
        EXPECT_EQ(std::memcmp(lse.data(), lse_by_c.data(), sizeof(float) * uz(lse.size())), 0);
        const auto keep = made<quoka_selection>(quoka_selection_create, quoka_selection_free);
        ASSERT_EQ(quoka_prefill_selection(layer.get(), keep.get()), QUOKA_OK);
        EXPECT_EQ(cpp_selection(keep.get()), expected.selection());
        EXPECT_EQ(quoka_prefill_len(layer.get()), expected.kv_len());
      }
    };
    auto how = sized<quoka_selection_options>();
    how.budget_keys = 24;
    const auto keys = quoka::MassOptions::recommended(Budget::keys(24));
    as_expected(quoka::ChunkedPrefill<quoka::MassSelector>(shape, keys, attention), &how);
    as_expected(quoka::ChunkedPrefill<quoka::DenseSelector>(shape, {}, attention), nullptr);
  });
}

// ---- refusals -------------------------------------------------------------------------------------

// A call's status, and what its message says.
void expect_status(quoka_status status, quoka_status wanted, const std::vector<Fragment>& says,
                   const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  const std::string message = quoka_message();
  if (status == wanted)
    check_refusal(&message, says, file, line);
  else
    ADD_FAILURE_AT(file, line) << "status " << status << ", not " << wanted << ": " << message;
}
void expect_invalid(quoka_status status, const std::vector<Fragment>& says,
                    const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  expect_status(status, QUOKA_INVALID, says, file, line);
}

// The same pointer, some bytes further on.
template <class T>
T* shifted(T* pointer, std::uintptr_t bytes) {
  return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(pointer) + bytes);
}

constexpr int64_t far_sizes[] = {int64_t{1} << 31, int64_t{1} << 60, INT64_MAX, INT64_MIN, -1};

// A call that is right, for the tables below to change: 25 keys of the past and a chunk of 3, token by token.
struct Call {
  static constexpr float unwritten = 777.25f;
  std::vector<float> numbers = std::vector<float>(25 * 2 * 24),  // k_cache
      others = std::vector<float>(25 * 2 * 24), result = std::vector<float>(3 * 6 * 20, unwritten),
                     lse = std::vector<float>(6 * 3, unwritten);
  std::array<int32_t, 3> entries{0, 1, 7}, counts{1, 1, 1};
  quoka_tensor q = quoka_token_major(others.data(), QUOKA_F32, 3, 6, 24),
               k_cache = quoka_token_major(numbers.data(), QUOKA_F32, 25, 2, 24),
               v_cache = quoka_token_major(numbers.data(), QUOKA_F32, 25, 2, 20),
               chunk_k = quoka_token_major(others.data(), QUOKA_F32, 3, 2, 24),
               chunk_v = quoka_token_major(others.data(), QUOKA_F32, 3, 2, 20),
               out = quoka_token_major(result.data(), QUOKA_F32, 3, 6, 20);
  quoka_mask mask = sized<quoka_mask>();
  quoka_index_lists lists = sized<quoka_index_lists>();
  quoka_attention_options options = sized<quoka_attention_options>();
  quoka_attention_args args = sized<quoka_attention_args>();

  Call() {
    mask.data = numbers.data(), mask.q_len = 3, mask.keys = 28;
    lists.entries = entries.data(), lists.counts = counts.data(), lists.q_len = 3, lists.k = 1;
    args.q = &q, args.k_cache = &k_cache, args.v_cache = &v_cache, args.chunk_k = &chunk_k;
    args.chunk_v = &chunk_v, args.out = &out, args.lse_nat = lse.data(), args.options = &options;
  }
  Call(const Call&) = delete;
  void with_mask() { options.mask = &mask; }
  void with_lists() { options.lists = &lists; }
  void without_keys() { args.k_cache = args.v_cache = args.chunk_k = args.chunk_v = nullptr; }
  // The past's keys as they lie, by strides; and as one page of a pool, or a list.
  void strided() {
    k_cache.layout = QUOKA_STRIDED, k_cache.strides[1] = 96, k_cache.strides[2] = 192;
  }
  void paged(int64_t count) {
    k_cache.table = entries.data(), k_cache.table_count = count, k_cache.tokens = 25;
  }
  void listed(int64_t count) { k_cache.cells = entries.data(), k_cache.cells_count = count; }
  bool wrote() const {
    const auto is_unwritten = [](float x) { return x == unwritten; };
    return !std::ranges::all_of(result, is_unwritten) || !std::ranges::all_of(lse, is_unwritten);
  }
};

struct Wrong {
  std::function<void(Call&)> change;
  std::vector<Fragment> says;
};
void expect_refused_calls(const std::vector<Wrong>& table) {
  for (const auto& [change, says] : table) {
    SCOPED_TRACE(says[0].text());
    Call x;
    change(x);
    expect_invalid(quoka_attention(&x.args), says);
    EXPECT_FALSE(x.wrote());
  }
}

TEST(CDoorRefuses, NothingOfACallThatIsRight) {
  Call plain, other;
  plain.k_cache.bytes = SIZE_MAX;  // a larger buffer is as good
  EXPECT_EQ(quoka_attention(&plain.args), QUOKA_OK) << quoka_message();
  other.with_mask(), other.strided(), other.listed(2);
  other.k_cache.strides[0] = 97;  // of one sequence
  other.v_cache.len = 2, other.mask.keys = 5;
  EXPECT_EQ(quoka_attention(&other.args), QUOKA_OK) << quoka_message();
  other.options.mask = nullptr, other.with_lists(), other.entries = {1, 0, 4};
  EXPECT_EQ(quoka_attention(&other.args), QUOKA_OK) << quoka_message();
}

TEST(CDoorRefuses, WhatIsNotThere) {
  expect_invalid(quoka_attention(nullptr), {"args is NULL", "quoka"});
  expect_refused_calls({
      {[](Call& x) { x.args.q = nullptr; }, {"q is NULL"}},
      {[](Call& x) { x.args.out = nullptr; }, {"out is NULL"}},
      {[](Call& x) { x.args.v_cache = nullptr; }, {"v_cache is NULL", "k_cache is not"}},
      {[](Call& x) { x.args.k_cache = nullptr; }, {"k_cache is NULL", "v_cache is not"}},
      {[](Call& x) { x.args.chunk_v = nullptr; }, {"chunk_v is NULL", "chunk_k is not"}},
      {[](Call& x) { x.args.chunk_k = nullptr; }, {"chunk_k is NULL", "chunk_v is not"}},
      {[](Call& x) { x.without_keys(); }, {"k_cache and chunk_k are NULL", "no keys"}},
      {[](Call& x) { x.without_keys(), x.args.cache_holds_chunk = 1; },
       {"k_cache is NULL", "cache_holds_chunk"}},
      {[](Call& x) { x.args.chunk_k = x.args.chunk_v = nullptr; },
       {"cache_holds_chunk says", "has_q_offset or bidirectional"}},
      {[](Call& x) { x.args.cache_holds_chunk = 1; }, {"cache_holds_chunk", "twice"}},
      {[](Call& x) { x.args.chunk_v = nullptr, x.args.cache_holds_chunk = 1; },
       {"cache_holds_chunk", "twice"}},
      {[](Call& x) {
         x.args.chunk_k = x.args.chunk_v = nullptr, x.args.cache_holds_chunk = 1;
         x.k_cache.len = x.v_cache.len = 2;
       },
       {"q_len", 3, 2}},
      {[](Call& x) { x.q.data = nullptr; }, {"q's data is NULL", "len", 3}},
      {[](Call& x) { x.v_cache.data = nullptr; }, {"v_cache's data is NULL", "len", 25}},
      {[](Call& x) { x.out.data = nullptr; }, {"out's data is NULL", "len", 3}},
      {[](Call& x) { x.with_mask(), x.mask.data = nullptr; }, {"the mask's data is NULL", 3}},
      {[](Call& x) { x.with_lists(), x.lists.entries = nullptr; },
       {"the lists' entries is NULL", "k", 1}},
      {[](Call& x) { x.options.sinks.count = 6; }, {"sinks's count", 6, "NULL"}},
  });
}

TEST(CDoorRefuses, ValuesOutOfRange) {
  expect_refused_calls({
      {[](Call& x) { x.q.type = -1; }, {"q's type", -1, 0}},
      {[](Call& x) { x.q.type = 8; }, {"q's type", 8, 7}},
      {[](Call& x) { x.q.layout = 3; }, {"q's layout", 3, 2}},
      {[](Call& x) { x.q.heads = 0; }, {"q's heads", 0, 1}},
      {[](Call& x) { x.q.dim = 0; }, {"q's dim", 0, 1}},
      {[](Call& x) { x.q.dim = INT64_MAX; }, {"q's dim", INT64_MAX, INT32_MAX}},
      {[](Call& x) { x.k_cache.len = -1; }, {"k_cache's len", -1, 0}},
      {[](Call& x) { x.k_cache.batch = -1; }, {"k_cache's batch", -1, 1}},
      {[](Call& x) { x.k_cache.capacity = 24; }, {"k_cache: a layout's len", 25, 24}},
      {[](Call& x) { x.k_cache.bytes = 4799; }, {"k_cache", 4800, 4799}},
      {[](Call& x) { x.strided(), x.k_cache.bytes = 4799; }, {"k_cache", 4800, 4799}},
      {[](Call& x) { x.k_cache.channel_step = -4; }, {"channel_step", -4, 0}},
      {[](Call& x) { x.k_cache.channel_step = 4, x.k_cache.type = QUOKA_Q8_0; }, {"type", 3, 2}},
      {[](Call& x) { x.k_cache.scales = x.numbers.data(); }, {"scales", "float"}},
      {[](Call& x) { x.paged(-1); }, {"table", -1, 0}},
      {[](Call& x) { x.paged(3), x.k_cache.len = 10, x.k_cache.batch = 2; }, {"block table", 7, 2}},
      {[](Call& x) { x.listed(3), x.entries[1] = 25; }, {"gathered cell", 25}},
      {[](Call& x) { x.out.cells = x.entries.data(), x.out.cells_count = 2; },
       {"out is written", "cells"}},
      {[](Call& x) { x.args.lse_strides[0] = -1; }, {"lse"}},
      {[](Call& x) { x.options.arithmetic = 3; },
       {"bfloat16_x2", "gone: take QUOKA_ARITHMETIC_AUTOMATIC"}},
      {[](Call& x) { x.options.arithmetic = 4; },
       {"bfloat16_x3", "gone: take QUOKA_ARITHMETIC_AUTOMATIC"}},
      {[](Call& x) { x.options.arithmetic = 6; }, {"arithmetic", 6, 5}},
      {[](Call& x) { x.with_mask(), x.mask.type = 5; }, {"type", 5, 4}},
      {[](Call& x) { x.with_mask(), x.mask.keys = -1; }, {"keys", -1, 0}},
      {[](Call& x) { x.with_lists(), x.counts[1] = 2; }, {2, 1}},
      // By the C++ functions, in the names of c.h.
      {[](Call& x) { x.args.past_position = -1; }, {"past_position", -1, 0}},
      {[](Call& x) { x.chunk_k.len = x.chunk_v.len = 2; }, {"chunk_k's len", 2, 3}},
      {[](Call& x) { x.k_cache.heads = 1; }, {"v_cache's heads", 2, 1}},
      {[](Call& x) { x.k_cache.dim = 20; }, {"k_cache's dim", 20, 24}},
  });
}

// Structs of a later version are longer, and what this one does not have must be 0.
TEST(CDoorRefuses, StructsOfNoKnownSize) {
  expect_refused_calls({
      {[](Call& x) { x.q.size = 0; }, {"q's size", 0, "at least"}},
      {[](Call& x) { x.args.size = 8; }, {"args's size", 8, "at least"}},
      {[](Call& x) { x.options.size = 0; }, {"attention options's size", 0, "at least"}},
      {[](Call& x) { x.with_mask(), x.mask.size = 0; }, {"the mask's size", 0, "at least"}},
      {[](Call& x) { x.with_lists(), x.lists.size = 0; }, {"lists's size", 0, "at least"}},
  });
  Call x;
  struct {
    quoka_attention_args known;
    int64_t later[512];  // more than the library's copy of the struct has room for
  } longer{x.args, {}};
  longer.known.size = sizeof longer;
  EXPECT_EQ(quoka_attention(&longer.known), QUOKA_OK) << quoka_message();
  longer.later[511] = INT64_MIN;  // its last byte
  expect_invalid(quoka_attention(&longer.known), {"are set", "size"});
}

// Elements that do not lie at multiples of their size.
TEST(CDoorRefuses, ElementsOffTheirBoundary) {
  const auto stride = [](const char* of, Index bytes, int32_t type = QUOKA_F32) {
    return [=](Call& x) {
      x.strided(), x.k_cache.type = type;
      (of == std::string("heads") ? x.k_cache.strides[1] : x.k_cache.strides[2]) = bytes;
    };
  };
  expect_refused_calls({
      {[](Call& x) { x.k_cache.data = shifted(x.k_cache.data, 2); }, {"k_cache begins 2 bytes", 4}},
      {[](Call& x) { x.out.data = shifted(x.out.data, 1); }, {"out begins 1 bytes", 4}},
      {[](Call& x) { x.args.lse_nat = shifted(x.lse.data(), 1); }, {"lse_nat begins 1 bytes", 4}},
      {[](Call& x) { x.k_cache.type = QUOKA_I8, x.k_cache.scales = shifted(x.numbers.data(), 2); },
       {"scales begins 2 bytes", 4}},
      {[](Call& x) { x.listed(1), x.k_cache.cells = shifted(x.k_cache.cells, 1); },
       {"cells begins 1 bytes", 4}},
      {[](Call& x) { x.paged(1), x.k_cache.table = shifted(x.k_cache.table, 1); },
       {"table begins 1 bytes", 4}},
      {[](Call& x) {
         x.options.sinks = {shifted(x.numbers.data(), 1), 6};
       },
       {"sinks begins 1 bytes", 4}},
      {[](Call& x) { x.with_mask(), x.mask.data = shifted(x.mask.data, 2); },
       {"mask begins 2 bytes", 4}},
      {[](Call& x) { x.with_lists(), x.lists.entries = shifted(x.lists.entries, 2); },
       {"entries begins 2 bytes", 4}},
      {[](Call& x) { x.with_lists(), x.lists.counts = shifted(x.lists.counts, 2); },
       {"counts begins 2 bytes", 4}},
      {stride("len", 190), {"stride of len", 190, 4}},
      {stride("heads", 98), {"stride of heads", 98, 4}},
      {stride("len", 97, QUOKA_F16), {"stride of len", 97, 2}},
      {stride("len", 97, QUOKA_BF16), {"stride of len", 97, 2}},
      {[](Call& x) { x.strided(), x.k_cache.channel_step = 6; }, {"stride of channels", 6, 4}},
      {[](Call& x) { x.k_cache.step_bytes = 194; }, {"step_bytes", 194, 4}},
      {[](Call& x) { x.with_mask(), x.mask.strides[2] = 114; }, {"q_len", 114, 4}},
      {[](Call& x) { x.with_mask(), x.mask.strides[2] = 113, x.mask.type = QUOKA_MASK_BF16; },
       {"q_len", 113, 2}},
  });
}

// Sizes and strides whose products exceed all memory, or what 64 bits count.
TEST(CDoorRefuses, WhatNoMemoryHolds) {
  for (int shift = 58; shift < 63; ++shift) {
    const int64_t far = int64_t{1} << shift;
    expect_refused_calls({
        {[=](Call& x) { x.strided(), x.k_cache.channel_step = far, x.k_cache.bytes = 4800; },
         {"stride of channels", 24}},
        {[=](Call& x) { x.strided(), x.k_cache.strides[2] = far; }, {"stride of len", 25}},
        {[=](Call& x) { x.strided(), x.k_cache.strides[1] = -far; }, {"stride of heads", 2}},
        {[=](Call& x) { x.strided(), x.k_cache.batch = 5, x.k_cache.strides[0] = far; },
         {"stride of batch", 5}},
        {[=](Call& x) { x.k_cache.step_bytes = far; }, {"k_cache"}},
        {[=](Call& x) {
           x.k_cache.type = QUOKA_I8, x.k_cache.scales = x.numbers.data();
           x.k_cache.scales_step = far;
         },
         {"scales's stride of heads", 2}},
        {[=](Call& x) { x.args.lse_strides[1] = far; }, {"lse_nat's stride of heads", 6}},
        {[=](Call& x) { x.args.lse_strides[2] = far; }, {"lse_nat's stride of len", 3}},
        {[=](Call& x) { x.paged(far); }, {"count of the table", INT32_MAX}},
        {[=](Call& x) { x.paged(1), x.k_cache.tokens = far; }, {"paged sequence", INT32_MAX}},
        {[=](Call& x) { x.listed(far); }, {"count of the list of cells", INT32_MAX}},
        {[=](Call& x) { x.with_mask(), x.mask.strides[2] = far; }, {"mask's stride of q_len", 3}},
        {[=](Call& x) { x.with_mask(), x.mask.heads = 6, x.mask.strides[1] = -far; },
         {"mask's stride of heads", 6}},
    });
  }
  const auto huge = [](Call& x) { x.k_cache.batch = x.k_cache.heads = x.k_cache.len = INT32_MAX; };
  expect_refused_calls({
      {huge, {"k_cache", INT32_MAX}},
      {[=](Call& x) { x.strided(), huge(x), x.k_cache.strides[1] = x.k_cache.strides[2] = 0; },
       {"k_cache's size", INT32_MAX}},
      {[](Call& x) {
         x.with_mask(), x.mask.q_len = x.mask.keys = x.mask.heads = x.mask.batch = INT32_MAX;
       },
       {"mask's size", INT32_MAX}},
      {[](Call& x) {
         x.with_lists(), x.lists.batch = x.lists.heads = x.lists.q_len = x.lists.k = INT32_MAX;
       },
       {"lists' size", INT32_MAX}},
  });
}

// The caller's threads: what they were given to do is done, each task once, by workers that there are.
TEST(CDoorRefuses, ExecutorsThatDoNotRunEveryTaskOnce) {
  struct Callers {
    int32_t status = 0, worker = 0;
    int64_t left_out = 0, last_task = 0;  // task 0 comes last
  };
  const struct {
    Callers callers;
    std::vector<Fragment> says;
  } wrong[] = {
      {{.status = 5}, {"returned 5"}},
      {{.left_out = 1}, {"but was given"}},
      {{.worker = 3}, {"worker is 3", 3}},
      {{.worker = -1}, {"worker", -1, 3}},
      {{.last_task = 1}, {"twice", "not at all"}},
      {{.last_task = 1000000}, {"task", 1000000}},
      {{.last_task = -1}, {"task", -1}},
  };
  Callers callers;
  auto executor = sized<quoka_executor>();
  quoka_threads* none = nullptr;
  expect_invalid(quoka_threads_of_caller(&executor, &none), {"workers", 0, 1});
  executor.workers = 3;
  expect_invalid(quoka_threads_of_caller(&executor, &none), {"run is NULL"});
  expect_invalid(quoka_threads_of_caller(nullptr, &none), {"executor is NULL"});
  expect_invalid(quoka_threads_create(0, &none), {"quoka: workers", 0, 1});
  expect_invalid(quoka_threads_create(1, nullptr), {"threads is NULL"});
  EXPECT_EQ(none, nullptr);
  executor.context = &callers;
  executor.run = [](void* context, int64_t tasks, quoka_task task, void* argument) {
    const Callers& of = *static_cast<Callers*>(context);
    for (int64_t i = tasks; i-- > of.left_out;)
      task(argument, i == 0 ? of.last_task : i, i == 0 ? of.worker : 2);
    return of.status;
  };
  const auto threads = made<quoka_threads>(quoka_threads_of_caller, quoka_threads_free, &executor);
  const auto workspace = made<quoka_workspace>(quoka_workspace_create, quoka_workspace_free);
  Call x;
  x.q.len = x.out.len = x.chunk_k.len = x.chunk_v.len = 2;
  x.k_cache.len = x.v_cache.len = 8;
  for (quoka_tensor* const rows : {&x.k_cache, &x.v_cache, &x.chunk_k, &x.chunk_v})
    rows->heads = 6;  // tasks
  x.args.threads = threads.get(), x.args.workspace = workspace.get();
  for (const auto& [of, says] : wrong) {
    callers = of;
    expect_status(quoka_attention(&x.args), QUOKA_FAILED, says);
    callers = {};
    EXPECT_EQ(quoka_attention(&x.args), QUOKA_OK) << quoka_message();
  }
}

TEST(CDoorRefuses, WhatAHandleCannotDo) {
  const Call x;
  const auto keep = made<quoka_selection>(quoka_selection_create, quoka_selection_free);
  const int32_t positions[] = {0, 4, 19, 7}, twice[] = {4, 4, 19, 7};
  const int64_t counts[] = {3, 1}, too_many[] = {21, 1}, negative[] = {3, -1};
  const auto set = [&](const int32_t* of, const int64_t* some, int64_t heads = 2) {
    return quoka_selection_set(keep.get(), 1, heads, 20, of, some);
  };
  ASSERT_EQ(set(positions, counts), QUOKA_OK);
  const Selection before = cpp_selection(keep.get());
  expect_invalid(set(twice, counts), {4});
  expect_invalid(set(positions, too_many), {21, 20});
  expect_invalid(set(positions, negative), {-1, 0});
  expect_invalid(set(nullptr, counts), {"positions is NULL"});
  expect_invalid(set(positions, nullptr), {"counts is NULL"});
  expect_invalid(set(shifted(positions, 1), counts), {"positions begins 1 bytes", 4});
  expect_invalid(set(positions, shifted(counts, 4)), {"counts begins 4 bytes", 8});
  expect_invalid(set(positions, counts, 0), {"heads", 0, 1});
  EXPECT_EQ(cpp_selection(keep.get()), before);
  const int32_t* row = nullptr;
  int64_t count = 0;
  float share = 0.0f;
  expect_invalid(quoka_selection_row(keep.get(), 1, 0, &row, &count), {"sequence", 1, 0});
  expect_invalid(quoka_selection_row(keep.get(), -1, 0, &row, &count), {"sequence", -1, 0});
  expect_invalid(quoka_selection_row(keep.get(), 0, 2, &row, &count), {"the head", 2, 1});
  expect_invalid(quoka_selection_row(nullptr, 0, 0, &row, &count), {"selection is NULL"});
  expect_invalid(quoka_selection_kept_share(keep.get(), 0, -1, &share), {"the head", -1, 0});
  expect_invalid(quoka_selection_kept_share(keep.get(), 0, 0, nullptr), {"share is NULL"});
  Call other;
  other.args.selection = keep.get();
  expect_invalid(quoka_attention(&other.args), {"kv_len", 20, 25});

  // Selection, with a state and without.
  auto how = sized<quoka_selection_options>();
  auto options = sized<quoka_attention_options>();
  auto select = sized<quoka_select_args>();
  select.q = &x.q, select.k_cache = &x.k_cache, select.how = &how, select.options = &options;
  const auto refuses = [&](const std::vector<Fragment>& says, int line = __builtin_LINE()) {
    expect_invalid(quoka_select(&select, keep.get()), says, __FILE__, line);
  };
  expect_invalid(quoka_select(nullptr, keep.get()), {"args is NULL"});
  expect_invalid(quoka_select(&select, nullptr), {"selection is NULL"});
  how.budget_keys = 7, how.budget_share = 0.1;
  refuses({"budget_keys", 7, "budget_share is 0.1"});
  how.budget_keys = 0, how.budget_share = 1.5, refuses({"budget_share is 1.5", "(0, 1]"});
  how.budget_share = 0, how.preset = 3, refuses({"preset", 3, 2});
  how.preset = QUOKA_RECOMMENDED, how.budget_keys = 4;
  const std::vector<float> slopes(6);
  options.alibi_slopes = floats(slopes);
  refuses({"alibi_slopes", "or select by QUOKA_PAPER"});
  options.alibi_slopes = {}, select.chunk_k = &x.chunk_k, select.cache_holds_chunk = 1;
  refuses({"cache_holds_chunk", "twice"});
  options.mask = &x.mask, select.cache_holds_chunk = 0, refuses({"mask", "chunk_k"});
  select.chunk_k = nullptr, select.cache_holds_chunk = 1;
  refuses({"mask", "cache_holds_chunk"});
  options.mask = nullptr;
  Call shorter;
  shorter.chunk_k.len = 2;
  select.cache_holds_chunk = 0, select.chunk_k = &shorter.chunk_k;
  refuses({"chunk_k's len", 2, 3});
  select.chunk_k = nullptr;
  const auto state = made<quoka_state>(quoka_state_create, quoka_state_free, &how);
  ASSERT_EQ(quoka_state_appended(state.get(), &x.k_cache, 0, nullptr), QUOKA_OK);
  select.state = state.get(), refuses({"state", "options"});
  select.how = nullptr, select.k_cache = &shorter.k_cache;  // shorter, and the state was not cut
  shorter.k_cache.len = 10;
  refuses({25, "(quoka_state_truncate() was not called)", 10});
  expect_invalid(quoka_state_truncate(nullptr, 0), {"state is NULL"});
  EXPECT_EQ(cpp_selection(keep.get()), before);

  // A cache, a layer, an indexer.
  auto of = sized<quoka_cache_options>();
  quoka_cache* none = nullptr;
  expect_invalid(quoka_cache_create(&of, &none), {"kv_heads", 0, 1});
  of.kv_heads = 2, of.head_dim = 24, of.v_dim = 20, of.k_type = 9;
  expect_invalid(quoka_cache_create(&of, &none), {"k_type", 9, 7});
  EXPECT_EQ(none, nullptr);
  of.k_type = QUOKA_F32;
  const auto cache = made<quoka_cache>(quoka_cache_create, quoka_cache_free, &of);
  ASSERT_EQ(quoka_cache_append(cache.get(), &x.k_cache, &x.v_cache, nullptr), QUOKA_OK);
  quoka_tensor unsized{};
  expect_invalid(quoka_cache_view(cache.get(), &unsized, &unsized), {"k's size", 0, "at least"});
  EXPECT_EQ(quoka_cache_len(cache.get()), 25);
  EXPECT_EQ(quoka_cache_len(nullptr), -1);

  const auto layer =
      made<quoka_prefill>(quoka_prefill_create, quoka_prefill_free, int64_t{6}, &of, nullptr, &how);
  ASSERT_EQ(quoka_prefill_append(layer.get(), &x.k_cache, &x.v_cache, nullptr), QUOKA_OK);
  expect_invalid(
      quoka_prefill_forward(nullptr, &x.q, &x.chunk_k, &x.chunk_v, &x.out, nullptr, nullptr),
      {"layer is NULL"});
  EXPECT_EQ(quoka_prefill_len(layer.get()), 25);
  EXPECT_EQ(quoka_prefill_len(nullptr), -1);
  EXPECT_FALSE(x.wrote());

  const auto indexer = made<quoka_indexer>(quoka_indexer_create, quoka_indexer_free, nullptr);
  auto call = sized<quoka_index_args>();
  auto lists = sized<quoka_index_lists>();
  call.q = &x.q;
  expect_invalid(quoka_index_keys(indexer.get(), &call, &lists), {"k is NULL"});
  call.k = &x.k_cache;
  expect_invalid(quoka_index_keys(nullptr, &call, &lists), {"indexer is NULL"});
  call.weights = shifted(x.numbers.data(), 1);
  expect_invalid(quoka_index_keys(indexer.get(), &call, &lists), {"weights begins 1 bytes", 4});
  lists.size = 8;
  expect_invalid(quoka_index_keys(indexer.get(), &call, &lists), {"size", 8, "at least"});
  float of_one = 0.0f;
  expect_invalid(quoka_alibi_slopes(0, 8.0f, &of_one), {"q_heads", 0, 1});
  expect_invalid(quoka_alibi_slopes(INT64_MAX, 8.0f, &of_one), {INT64_MAX, INT32_MAX});
  expect_invalid(quoka_alibi_slopes(4, 8.0f, nullptr), {"slopes is NULL"});
  for (const float bias : {not_a_number, infinity, 2e30f, -8.0f})
    expect_invalid(quoka_alibi_slopes(1, bias, &of_one), {"max_bias", "1e30"});

  quoka_threads_free(nullptr), quoka_workspace_free(nullptr), quoka_selection_free(nullptr);
  quoka_state_free(nullptr), quoka_cache_free(nullptr), quoka_prefill_free(nullptr);
  quoka_indexer_free(nullptr);
}

// Every size of every function, and every option that is a number.
TEST(CDoorRefuses, SizesAndNumbersOutOfRangeInAnyFunction) {
  const Call x;
  auto how = sized<quoka_selection_options>();
  auto of = sized<quoka_cache_options>();
  auto index = sized<quoka_indexer_options>();
  auto options = sized<quoka_attention_options>();
  of.kv_heads = 2, of.head_dim = 24, index.lists_heads = 2;
  const auto keep = made<quoka_selection>(quoka_selection_create, quoka_selection_free);
  const auto state = made<quoka_state>(quoka_state_create, quoka_state_free, nullptr);
  const auto cache = made<quoka_cache>(quoka_cache_create, quoka_cache_free, &of);
  const auto layer =
      made<quoka_prefill>(quoka_prefill_create, quoka_prefill_free, int64_t{6}, &of, nullptr, &how);
  const auto indexer = made<quoka_indexer>(quoka_indexer_create, quoka_indexer_free, &index);
  quoka_state* no_state = nullptr;
  quoka_cache* no_cache = nullptr;
  quoka_prefill* no_layer = nullptr;
  quoka_indexer* no_indexer = nullptr;
  const auto with = [](auto& in, auto member, auto value, const auto& call) {
    const auto before = std::exchange(in.*member, value);
    EXPECT_EQ(call(), QUOKA_INVALID) << quoka_message();
    in.*member = before;
  };
  const auto make_state = [&] { return quoka_state_create(&how, &no_state); };
  const auto make_cache = [&] { return quoka_cache_create(&of, &no_cache); };
  const auto make_layer = [&] { return quoka_prefill_create(6, &of, &options, &how, &no_layer); };
  const auto make_indexer = [&] { return quoka_indexer_create(&index, &no_indexer); };
  const int64_t counts[] = {0, 0};
  for (const int64_t far : far_sizes) {
    for (const auto member :
         {&quoka_selection_options::budget_keys, &quoka_selection_options::keep_first,
          &quoka_selection_options::keep_last, &quoka_selection_options::queries})
      with(how, member, far, make_state);
    for (const auto member : {&quoka_indexer_options::k, &quoka_indexer_options::block,
                              &quoka_indexer_options::keep_first, &quoka_indexer_options::keep_last,
                              &quoka_indexer_options::lists_heads})
      with(index, member, far, make_indexer);
    for (const auto member : {&quoka_cache_options::batch, &quoka_cache_options::kv_heads,
                              &quoka_cache_options::head_dim, &quoka_cache_options::v_dim}) {
      with(of, member, far, make_cache);
      with(of, member, far, make_layer);
    }
    for (const quoka_status status :
         {quoka_prefill_create(far, &of, nullptr, &how, &no_layer),
          quoka_state_appended(state.get(), &x.k_cache, far, nullptr),
          quoka_cache_truncate(cache.get(), far), quoka_cache_reserve(cache.get(), far),
          quoka_prefill_reserve(layer.get(), far), quoka_prefill_truncate(layer.get(), far),
          quoka_selection_set(keep.get(), far, 1, 25, nullptr, counts),
          quoka_selection_set(keep.get(), 1, far, 25, nullptr, counts),
          quoka_selection_set(keep.get(), 1, 2, far, nullptr, counts)})
      EXPECT_EQ(status, QUOKA_INVALID) << far;
    if (far < 0) {
      EXPECT_EQ(quoka_state_truncate(state.get(), far), QUOKA_INVALID) << far;
    }
    if (far == far_sizes[0]) continue;  // 2^31 floats lie somewhere
    auto call = sized<quoka_index_args>();
    auto lists = sized<quoka_index_lists>();
    call.q = &x.q, call.k = &x.k_cache, call.weights = x.numbers.data();
    call.weights_strides[1] = 3, call.weights_strides[2] = far == -1 ? -(int64_t{1} << 60) : far;
    expect_invalid(quoka_index_keys(indexer.get(), &call, &lists), {"weights's stride of len", 3});
  }
  of.batch = of.kv_heads = of.head_dim = INT32_MAX;
  expect_invalid(make_cache(), {"size of a token's keys", INT32_MAX});
  of.batch = 1, of.kv_heads = 2, of.head_dim = 24;

  auto select = sized<quoka_select_args>();
  select.q = &x.q, select.k_cache = &x.k_cache, select.options = &options, select.how = &how;
  const auto choose = [&] { return quoka_select(&select, keep.get()); };
  for (const float number : {not_a_number, infinity, -1e31f}) {
    for (const auto member : {&quoka_attention_options::scale, &quoka_attention_options::softcap}) {
      with(options, member, number, make_layer);
      for (how.preset = QUOKA_RECOMMENDED; how.preset <= QUOKA_BALANCED; ++how.preset)
        with(options, member, number, choose);
      how.preset = QUOKA_RECOMMENDED;
    }
    with(how, &quoka_selection_options::budget_share, static_cast<double>(number), make_state);
    of.k_type = of.v_type = QUOKA_I8;
    with(of, &quoka_cache_options::k_scales, quoka_floats{&number, 1}, make_cache);
    of.k_type = of.v_type = QUOKA_F32;
  }
  EXPECT_TRUE(no_state == nullptr && no_cache == nullptr && no_layer == nullptr &&
              no_indexer == nullptr);
}

}  // namespace
