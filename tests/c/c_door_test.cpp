// quoka/c.h against the C++ functions behind it: the same calls give the same bits.

#include <quoka/c.h>
#include <quoka/kernels/byte_formats.hpp>
#include <quoka/methods/indexer.hpp>
#include <quoka/quoka.hpp>

#include "support/attention_case.hpp"

#include <cstring>
#include <map>
#include <memory>

extern "C" int quoka_c_test(void);

namespace {

using namespace quoka_test;

// c_test.c, whose failures it prints itself.
TEST(CDoor, IsWhatItSaysFromC) { EXPECT_EQ(quoka_c_test(), 0); }

template <class Handle>
using Owned = std::unique_ptr<Handle, void (*)(Handle*)>;
template <class Handle, class Create, class... Arguments>
Owned<Handle> made(Create create, void (*free)(Handle*), Arguments... arguments) {
  Handle* handle = nullptr;
  EXPECT_EQ(create(arguments..., &handle), QUOKA_OK) << quoka_message();
  return {handle, free};
}

quoka_type type_of(const quoka::Format& format) {
  const std::map<const quoka::Format*, quoka_type> types{
      {&quoka::format_of<float>(), QUOKA_F32},
      {&quoka::format_of<Eigen::half>(), QUOKA_F16},
      {&quoka::format_of<Eigen::bfloat16>(), QUOKA_BF16},
      {&quoka::channel_major_format<float>(), QUOKA_F32},
      {&quoka::channel_major_format<Eigen::half>(), QUOKA_F16},
      {&quoka::channel_major_format<Eigen::bfloat16>(), QUOKA_BF16},
      {&quoka::q8_0_format(), QUOKA_Q8_0},
      {&quoka::u8_format(), QUOKA_U8},
      {&quoka::i8_format(), QUOKA_I8},
      {&quoka::i8_channel_format(), QUOKA_I8_CHANNEL},
      {&quoka::e4m3_format(), QUOKA_E4M3}};
  return types.at(&format);
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

 private:
  quoka_tensor tensor_{};
  std::vector<Position> table_, cells_;
  bool there_ = false;
};

// The same of rows that are written.
quoka_tensor c_output(const quoka::OutputRows& rows) {
  quoka_tensor tensor{};
  tensor.size = sizeof tensor;
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
  for (std::uint64_t seed = 0; seed < 150; ++seed) {
    Random random(seed);
    const AttentionCase c(random);
    SCOPED_TRACE(c.describe());
    if (c.options().scale == 0.0f) continue;  // which stands for the default here
    selections += c.has_selection(), mapped += c.past().k.mapped(), lists += c.has_lists();
    if (c.has_mask()) ++masks[c.mask_kind()];
    const auto expected = c.attend();
    const auto by_c =
        c.attend([&](const Rows& q, const quoka::Past& past, const quoka::Chunk& chunk,
                     const quoka::AttentionOutput& output, const AttentionOptions& options) {
          const CTensor c_q(q), past_k(past.k), past_v(past.v), chunk_k(chunk.k), chunk_v(chunk.v);
          const quoka_tensor out = c_output(output.out);
          const COptions c_options(options, c.mask_kind());
          Owned<quoka_selection> keep(nullptr, quoka_selection_free);
          if (past.selection != nullptr) keep = c_selection(*past.selection);
          quoka_attention_args call{};
          call.size = sizeof call;
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
    ASSERT_TRUE(
        same_bits(TensorView<const float, 3>(by_c.lse), TensorView<const float, 3>(expected.lse)));
  }
  EXPECT_GT(selections, 10);
  EXPECT_EQ(masks.size(), 5u) << "masks of every kind";
  EXPECT_GT(mapped, 10);
  EXPECT_GT(lists, 10);
}

TEST(CDoor, IndexHeadsChooseWhatTheIndexerBehindItChooses) {
  Random random(4);
  const auto threads = made<quoka_threads>(quoka_threads_create, quoka_threads_free, 2);
  const auto q = random.tensor<float>(2, 6, 9, 16);
  const auto k = random.tensor<Eigen::half>(2, 3, 90, 16);
  const auto weights = random.scores(2, 6, 9);
  const auto turned = random.scores(2, 9, 6);  // [batch, q_len, heads], as models have them
  Tensor4<float> hides(1, 1, 9, 90);
  for (Index i = 0; i < hides.size(); ++i)
    hides.data()[i] = random.below(3) == 0 ? -infinity : 0.0f;
  const CTensor c_q{Rows(q)}, c_k{Rows(k)};
  quoka_mask c_mask{};
  c_mask.size = sizeof c_mask, c_mask.data = hides.data();
  c_mask.q_len = 9, c_mask.keys = 90;
  for (const int which : {0, 1, 2, 3}) {
    quoka_indexer_options options{};
    options.size = sizeof options;
    options.k = 5, options.block = which == 1 ? 8 : 0, options.lists_heads = 3;
    options.keep_first = which == 1 ? 1 : 0, options.keep_last = which == 1 ? 2 : 0;
    options.bidirectional = which == 2;
    quoka::Indexer expected({.k = 5,
                             .block = which == 1 ? 8 : 1,
                             .keep_first = options.keep_first,
                             .keep_last = options.keep_last,
                             .lists_heads = 3,
                             .causal = which != 2});
    quoka::IndexerInput input{.q = q, .k = k};
    quoka_index_args call{};
    call.size = sizeof call;
    call.q = c_q.get(), call.k = c_k.get(), call.threads = threads.get();
    if (which == 0) input.weights = weights, call.weights = weights.data();
    if (which == 1) {
      input.weights = {turned.data(), {2, 6, 9}, {54, 1, 6}}, call.weights = turned.data();
      call.weights_strides[0] = 54, call.weights_strides[1] = 1, call.weights_strides[2] = 6;
    }
    if (which == 3) input.mask = quoka::Mask(hides), call.mask = &c_mask;
    const quoka::IndexLists lists = expected.choose(input);
    const auto indexer = made<quoka_indexer>(quoka_indexer_create, quoka_indexer_free, &options);
    quoka_index_lists c_lists{};
    c_lists.size = sizeof c_lists;
    ASSERT_EQ(quoka_index_keys(indexer.get(), &call, &c_lists), QUOKA_OK) << quoka_message();
    EXPECT_EQ(c_lists.size, sizeof c_lists);
    EXPECT_EQ(c_lists.counts, nullptr);
    ASSERT_EQ(c_lists.batch, 2);
    ASSERT_EQ(c_lists.heads, 3);
    ASSERT_EQ(c_lists.q_len, 9);
    ASSERT_EQ(c_lists.k, 5);
    EXPECT_EQ(c_lists.block, lists.block());
    EXPECT_TRUE(
        std::equal(c_lists.entries, c_lists.entries + 2 * 3 * 9 * 5, lists.entries().data()));
    // A refusal leaves the struct as it was.
    const quoka_index_lists before = c_lists;
    call.k = c_q.get();
    EXPECT_EQ(quoka_index_keys(indexer.get(), &call, &c_lists), QUOKA_INVALID);
    EXPECT_EQ(std::memcmp(&before, &c_lists, sizeof before), 0);
  }
  // All 0 are the defaults.
  const auto indexer = made<quoka_indexer>(quoka_indexer_create, quoka_indexer_free, nullptr);
  quoka_index_args call{};
  call.size = sizeof call;
  const auto one = random.tensor<float>(2, 1, 90, 16);
  const CTensor c_one{Rows(one)};
  call.q = c_q.get(), call.k = c_one.get();
  quoka_index_lists lists{};
  lists.size = sizeof lists;
  ASSERT_EQ(quoka_index_keys(indexer.get(), &call, &lists), QUOKA_OK) << quoka_message();
  EXPECT_EQ(lists.heads, 1);
  EXPECT_EQ(lists.k, 90);
}

TEST(CDoor, SelectsWhatTheSelectorBehindItSelects) {
  Random random(5);
  const auto threads = made<quoka_threads>(quoka_threads_create, quoka_threads_free, 2);
  for (const Index len : {60, 400, 900}) {
    const auto q = random.tensor<float>(1, 8, 40, 64);
    const auto k = random.tensor<Eigen::half>(1, 2, len, 64);
    const auto own = random.tensor<Eigen::half>(1, 2, 40, 64);
    const Rows chunk_k = len == 400 ? Rows(own) : Rows();
    const CTensor c_q{Rows(q)}, c_k{Rows(k)}, c_own{Rows(own)};
    for (const bool paper : {false, true})
      for (const bool sketch : {false, true})
        for (const float cap : {0.0f, 5.0f}) {
          quoka_selection_options how{};
          how.size = sizeof how;
          how.preset = paper ? QUOKA_PAPER : QUOKA_RECOMMENDED;
          how.no_sketch = sketch ? 0 : 1;
          how.budget_share = 0.125;
          how.keep_first = 2, how.keep_last = 5;
          how.queries = paper == sketch ? 0 : 100;
          quoka_attention_options options{};
          options.size = sizeof options;
          options.scale = 0.2f, options.softcap = cap;
          quoka::QuokaOptions of_paper{
              .budget = Budget::share(0.125), .keep_first = 2, .keep_last = 5};
          auto of_mass = quoka::MassOptions::recommended(Budget::share(0.125));
          of_mass.keep_first = 2, of_mass.keep_last = 5;
          if (paper != sketch) of_paper.n_queries = of_mass.queries = 100;
          if (!sketch) of_paper.sketch = of_mass.sketch = quoka::Sketch::off;
          const quoka::AnySelector selector(paper ? quoka::SelectionOptions(of_paper)
                                                  : quoka::SelectionOptions(of_mass));
          const quoka::AttentionOptions attention{.scale = 0.2f, .softcap = cap};

          const auto keep = made<quoka_selection>(quoka_selection_create, quoka_selection_free);
          quoka_select_args call{};
          call.size = sizeof call;
          call.q = c_q.get(), call.k_cache = c_k.get(),
          call.chunk_k = len == 400 ? c_own.get() : nullptr, call.options = &options,
          call.how = &how, call.threads = threads.get();
          ASSERT_EQ(quoka_select(&call, keep.get()), QUOKA_OK) << quoka_message();
          const Selection without_state = cpp_selection(keep.get());
          quoka::AnySelector::State empty_state;
          Selection expected;
          selector.select({.q = q, .k = k, .logits = attention, .chunk_k = chunk_k}, empty_state,
                          expected, SerialExecutor{});
          EXPECT_EQ(without_state, expected);

          const auto state = made<quoka_state>(quoka_state_create, quoka_state_free, &how);
          ASSERT_EQ(quoka_state_appended(state.get(), c_k.get(), 1000, threads.get()), QUOKA_OK);
          call.state = state.get(), call.how = nullptr;
          quoka::AnySelector::State expected_state;
          selector.appended({.q = {}, .k = k}, expected_state, SerialExecutor{});
          selector.select({.q = q, .k = k, .logits = attention, .chunk_k = chunk_k}, expected_state,
                          expected, SerialExecutor{});
          ASSERT_EQ(quoka_select(&call, keep.get()), QUOKA_OK) << quoka_message();
          EXPECT_EQ(cpp_selection(keep.get()), expected);
          // Without a sketch, and of cosines with one, a state is only faster.
          if (paper || !sketch) {
            EXPECT_EQ(expected, without_state);
          }
        }
  }
}

TEST(CDoor, PrefillsAsTheLayerBehindIt) {
  Random random(9);
  const std::vector<float> sinks{0.5f, -1.0f, 2.0f, 0.0f};
  quoka_attention_options options{};
  options.size = sizeof options, options.softcap = 20.0f, options.sinks = floats(sinks);
  quoka_cache_options cache{};
  cache.size = sizeof cache, cache.batch = 2, cache.kv_heads = 2, cache.head_dim = 32,
  cache.v_dim = 48, cache.k_type = QUOKA_Q8_0, cache.v_type = QUOKA_I8;
  const std::vector<float> scales{0.04f, 0.05f};
  cache.v_scales = floats(scales);
  quoka_selection_options how{};
  how.size = sizeof how, how.budget_keys = 24;
  const auto layer = made<quoka_prefill>(quoka_prefill_create, quoka_prefill_free, int64_t{4},
                                         &cache, &options, &how);
  quoka::ChunkedPrefill<quoka::MassSelector> expected(
      {.q_heads = 4,
       .kv_heads = 2,
       .head_dim = 32,
       .v_dim = 48,
       .batch = 2,
       .k_format = &quoka::q8_0_format(),
       .v_format = &quoka::i8_format(),
       .v_scales = scales},
      quoka::MassOptions::recommended(Budget::keys(24)), {.softcap = 20.0f, .sinks = sinks});
  for (const Index len : {50, 20, 1, 7}) {
    const auto q = random.tensor<float>(2, 4, len, 32), k = random.tensor<float>(2, 2, len, 32),
               v = random.tensor<float>(2, 2, len, 48);
    Tensor4<float> out(2, 4, len, 48), by_c(2, 4, len, 48);
    Tensor3<float> lse(2, 4, len), lse_by_c(2, 4, len);
    expected.forward(q, k, v, {out, TensorView<float, 3>(lse)});
    const CTensor c_q{Rows(q)}, c_k{Rows(k)}, c_v{Rows(v)};
    const quoka_tensor c_out = c_output(by_c);
    ASSERT_EQ(quoka_prefill_forward(layer.get(), c_q.get(), c_k.get(), c_v.get(), &c_out,
                                    lse_by_c.data(), nullptr),
              QUOKA_OK)
        << quoka_message();
    EXPECT_TRUE(same_bits(by_c, out));
    EXPECT_EQ(std::memcmp(lse.data(), lse_by_c.data(), sizeof(float) * uz(lse.size())), 0);
    const auto keep = made<quoka_selection>(quoka_selection_create, quoka_selection_free);
    ASSERT_EQ(quoka_prefill_selection(layer.get(), keep.get()), QUOKA_OK);
    EXPECT_EQ(cpp_selection(keep.get()), expected.selection());
  }
  EXPECT_EQ(quoka_prefill_len(layer.get()), expected.kv_len());
}

// Tensors that a cache returns are accepted as inputs: rows of every type, with scales and without.
TEST(CDoor, CachesOfEveryTypeAreViewedAsTheyAreKept) {
  Random random(11);
  const auto k = random.tensor<float>(1, 3, 20, 40), q = random.tensor<float>(1, 3, 2, 40),
             own = random.tensor<float>(1, 3, 2, 40);
  const std::vector<float> of_heads{0.03f, 0.04f, 0.05f}, of_channels(120, 0.03f);
  const CTensor c_q{Rows(q)}, c_k{Rows(k)}, c_own{Rows(own)};
  for (int32_t type = QUOKA_F32; type <= QUOKA_E4M3; ++type) {
    quoka_cache_options options{};
    options.size = sizeof options, options.kv_heads = 3, options.head_dim = 40;
    options.k_type = options.v_type = type;
    if (type == QUOKA_I8 || type == QUOKA_E4M3)
      options.k_scales = options.v_scales = floats(of_heads);
    if (type == QUOKA_I8_CHANNEL) options.k_scales = options.v_scales = floats(of_channels);
    const auto cache = made<quoka_cache>(quoka_cache_create, quoka_cache_free, &options);
    ASSERT_EQ(quoka_cache_append(cache.get(), c_k.get(), c_k.get(), nullptr), QUOKA_OK);
    quoka_tensor kept_k{}, kept_v{};
    kept_k.size = kept_v.size = sizeof kept_k;
    ASSERT_EQ(quoka_cache_view(cache.get(), &kept_k, &kept_v), QUOKA_OK) << quoka_message();
    EXPECT_EQ(kept_k.type, type);
    Tensor4<float> expected(1, 3, 2, 40), by_c(1, 3, 2, 40);
    const auto& format = [&]() -> const quoka::Format& {
      switch (type) {
        case QUOKA_F16:
          return quoka::format_of<Eigen::half>();
        case QUOKA_BF16:
          return quoka::format_of<Eigen::bfloat16>();
        case QUOKA_Q8_0:
          return quoka::q8_0_format();
        case QUOKA_U8:
          return quoka::u8_format();
        case QUOKA_I8:
          return quoka::i8_format();
        case QUOKA_I8_CHANNEL:
          return quoka::i8_channel_format();
        case QUOKA_E4M3:
          return quoka::e4m3_format();
        default:
          return quoka::format_of<float>();
      }
    }();
    const std::span<const float> scales{options.k_scales.data,
                                        static_cast<std::size_t>(options.k_scales.count)};
    quoka::KvCache same(1, 3, 40, 40, {format, scales}, {format, scales});
    same.append(k, k);
    quoka::attention(q, {same.k(), same.v()}, {own, own}, expected);
    const quoka_tensor out = c_output(by_c);
    quoka_attention_args call{};
    call.size = sizeof call;
    call.q = c_q.get(), call.k_cache = &kept_k, call.v_cache = &kept_v,
    call.chunk_k = call.chunk_v = c_own.get(), call.out = &out;
    ASSERT_EQ(quoka_attention(&call), QUOKA_OK) << quoka_message();
    EXPECT_TRUE(same_bits(by_c, expected)) << type;
  }
}

}  // namespace
