// Inputs that attention() and merge() refuse before anything is written: a valid call with one thing wrong, and the
// words of the message, both numbers among them.

#include <quoka/attention/attention.hpp>
#include <quoka/attention/merge.hpp>
#include <quoka/kernels/byte_formats.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <deque>

namespace {

using namespace quoka_test;
using quoka::Mask;
using quoka::Position;

// A call of batch 2, 6 heads over 3, 7 queries, 16 channels (values: 20), over 37 cached keys.
struct Call {
  Random random{100};
  std::deque<Tensor4<float>> tensors;
  std::deque<std::vector<float>> numbers;
  std::vector<Position> entries = std::vector<Position>(210, 1), counts;
  Tensor4<float> out_memory = full(2, 6, 7, 20);
  Tensor3<float> lse_memory = Tensor3<float>(2, 6, 7).setConstant(-12345.0f);
  Selection keep;

  Rows q = normal(2, 6, 7, 16);
  quoka::Past past{normal(2, 3, 37, 16), normal(2, 3, 37, 20)};
  quoka::Chunk chunk{normal(2, 3, 7, 16), normal(2, 3, 7, 20)};
  quoka::OutputRows out{out_memory};
  TensorView<float, 3> lse{lse_memory};
  AttentionOptions options;

  Tensor4<float>& tensor(Index b, Index heads, Index len, Index dim) {
    return tensors.emplace_back(random.tensor<float>(b, heads, len, dim));
  }
  Rows normal(Index b, Index heads, Index len, Index dim) { return tensor(b, heads, len, dim); }
  Tensor4<float>& full(Index b, Index heads, Index len, Index dim) {
    return tensor(b, heads, len, dim).setConstant(-12345.0f), tensors.back();
  }
  std::span<const float> floats(std::size_t count, float x = 1.0f, std::size_t at = 0) {
    numbers.emplace_back(count, 1.0f).at(at) = x;
    return numbers.back();
  }
  void mask(Index b, Index heads, Index q_len, Index keys) {
    options.mask = normal(b, heads, q_len, keys);
  }
  // Each query's list is key 0. Where they lie, as memory for results.
  float* lists_of_one_key() {
    entries.assign(1680, 0);
    options.lists = quoka::IndexLists({entries.data(), {1, 1, 7, 4}});
    return reinterpret_cast<float*>(entries.data());
  }
  // Lists of key 1, ten entries for each query, in blocks, counted or not; then one entry, or one count, is another.
  void list(Index b, Index heads, Index q_len, Index block = 1, Index at = 0, Position entry = 1) {
    entries.assign(uz(b * heads * q_len * 10), 1);
    entries.at(uz(at)) = entry;
    options.lists = quoka::IndexLists({entries.data(), {b, heads, q_len, 10}}, block);
  }
  void count(Index heads, Index at, Position entry) {
    counts.assign(uz(heads * 7), 10);
    counts.at(uz(at)) = entry;
    options.lists = quoka::IndexLists({entries.data(), {1, 3, 7, 10}}, 1,
                                      TensorView<const Position, 3>(counts.data(), {1, heads, 7}));
  }
  void select(Index b, Index heads, Index kv_len) {
    keep = random_selection(random, b, heads, kv_len, 7);
    past.selection = &keep;
  }
};

struct Refusal {
  const char* what;
  std::function<void(Call&)> wrong;
  std::vector<Fragment> message;
};

void expect_message(const std::string& message, const std::vector<Fragment>& fragments) {
  for (const Fragment& fragment : fragments)
    EXPECT_TRUE(fragment.is_in(message)) << "no '" << fragment.text() << "' in: " << message;
}

void expect_refused_all(const std::vector<Refusal>& table) {
  for (const Refusal& refusal : table) {
    SCOPED_TRACE(refusal.what);
    Call call;
    std::deque<Tensor4<float>> before;
    Tensor4<float> out;
    Tensor3<float> lse;
    try {
      refusal.wrong(call);  // some are refused as views
      before = call.tensors, out = call.out_memory, lse = call.lse_memory;
      quoka::attention(call.q, call.past, call.chunk, {call.out, call.lse}, call.options);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::invalid_argument& error) {
      expect_message(error.what(), refusal.message);
    }
    if (before.empty()) continue;
    EXPECT_TRUE(same_bits(call.out_memory, out));
    EXPECT_TRUE(same_bits(call.lse_memory, lse));
    for (std::size_t i = 0; i < before.size(); ++i)
      EXPECT_TRUE(same_bits(call.tensors[i], before[i]));
  }
}

TEST(AttentionRefuses, NothingOfASoundCall) {
  Call call;
  quoka::attention(call.q, call.past, call.chunk, {call.out, call.lse}, call.options);
  EXPECT_NE(call.lse_memory(1, 5, 6), -12345.0f);
}

TEST(AttentionRefuses, ShapesThatDoNotFit) {
  expect_refused_all({
      {"heads in no group",
       [](Call& c) { c.q = c.normal(2, 7, 7, 16); },
       {"q_heads", 7, "kv_heads", 3}},
      {"no queries", [](Call& c) { c.q = c.normal(2, 6, 0, 16); }, {"q_len", 0, 1}},
      {"no batch", [](Call& c) { c.q = c.normal(0, 6, 7, 16); }, {"batch", 0, 1}},
      {"no channels", [](Call& c) { c.q = c.normal(2, 6, 7, 0); }, {"head_dim", 0, 1}},
      {"past k's dim", [](Call& c) { c.past.k = c.normal(2, 3, 37, 15); }, {"past k", 15, 16}},
      {"chunk k's dim", [](Call& c) { c.chunk.k = c.normal(2, 3, 7, 17); }, {"chunk k", 17, 16}},
      {"past k's batch", [](Call& c) { c.past.k = c.normal(1, 3, 37, 16); }, {"batch", 1, 2}},
      {"chunk v's batch", [](Call& c) { c.chunk.v = c.normal(3, 3, 7, 20); }, {"batch", 3, 2}},
      {"chunk k's heads", [](Call& c) { c.chunk.k = c.normal(2, 2, 7, 16); }, {"heads", 2, 3}},
      {"past v's heads", [](Call& c) { c.past.v = c.normal(2, 6, 37, 20); }, {"heads", 6, 3}},
      {"past v's len", [](Call& c) { c.past.v = c.normal(2, 3, 38, 20); }, {"past", 38, 37}},
      {"chunk v's len", [](Call& c) { c.chunk.v = c.normal(2, 3, 8, 20); }, {"chunk", 8, 7}},
      {"chunk of other queries",
       [](Call& c) {
         c.chunk = {c.normal(2, 3, 5, 16), c.normal(2, 3, 5, 20)};
       },
       {"chunk", 5, "q_len", 7}},
      {"values of two dims", [](Call& c) { c.chunk.v = c.normal(2, 3, 7, 21); }, {"dim", 21, 20}},
      {"out's dim", [](Call& c) { c.out = c.full(2, 6, 7, 16); }, {"out", 16, 20}},
      {"out's len", [](Call& c) { c.out = c.full(2, 6, 8, 20); }, {"out", 8, 7}},
      {"out's heads", [](Call& c) { c.out = c.full(2, 3, 7, 20); }, {"out", 3, 6}},
      {"lse's len",
       [](Call& c) { c.lse_memory = Tensor3<float>(2, 6, 9), c.lse = c.lse_memory; },
       {"lse", 9, 7}},
      {"lse without memory",
       [](Call& c) {
         c.lse = TensorView<float, 3>(nullptr, {2, 6, 7}, {42, 7, 1});
       },
       {"pointer is null"}},
      {"past values without keys",
       [](Call& c) { c.past.k = c.past.k.slice(0, 0); },
       {"past v's len", 37, 0}},
      {"chunk values without keys",
       [](Call& c) { c.chunk.k = c.chunk.k.slice(0, 0); },
       {"chunk v's len", 7, 0}},
      {"no keys at all", [](Call& c) { c.past = {}, c.chunk = {}; }, {"q_heads", 6, "kv_heads", 0}},
      {"another cache's selection", [](Call& c) { c.select(2, 3, 38); }, {"selection", 38, 37}},
      {"another batch's selection", [](Call& c) { c.select(1, 3, 37); }, {"selection", 1, 2}},
      {"other heads' selection", [](Call& c) { c.select(2, 4, 37); }, {"selection", 4, 3}},
      {"a selection of no past",
       [](Call& c) {
         c.select(2, 3, 37), c.past.k = c.past.k.slice(0, 0), c.past.v = c.past.v.slice(0, 0);
       },
       {"selection", 37, 0}},
      {"q with scales",
       [](Call& c) { c.q = c.q.with_scales(c.floats(1).data(), 0); },
       {"q has scales that lie apart"}},
      {"out with scales",
       [](Call& c) { c.out = c.out.with_scales(c.floats(1).data(), 0); },
       {"out has scales that lie apart"}},
      {"q's channels apart",
       [](Call& c) {
         c.q =
             Rows(c.q.data(), quoka::channel_major_format<float>(), c.q.sizes(), c.q.strides(), 8);
       },
       {"q's step between channels in bytes is", 8, "a step of", 0}},
      {"a step that q's format has not",
       [](Call& c) { c.q = Rows(c.q.data(), c.q.format(), c.q.sizes(), c.q.strides(), 8); },
       {"the channel_step of rows of format float is", 8, "a step of", 0}},
      {"a step that the keys' format has not",
       [](Call& c) {
         c.past.k =
             Rows(c.past.k.data(), quoka::q8_0_format(), c.past.k.sizes(), c.past.k.strides(), 64);
       },
       {"the channel_step of rows of format q8_0 is", 64, "a step of", 0}},
      {"a step that out's format has not",
       [](Call& c) {
         c.out =
             quoka::OutputRows(c.out.data(), c.out.format(), c.out.sizes(), c.out.strides(), 12);
       },
       {"the channel_step of rows of format float is", 12, "a step of", 0}},
  });
}

TEST(AttentionRefuses, OptionsThatDoNotFit) {
  expect_refused_all({
      {"sinks", [](Call& c) { c.options.sinks = c.floats(3); }, {"sinks", 3, "q_heads", 6}},
      {"factors", [](Call& c) { c.options.mask_factors = c.floats(3); }, {"mask_factors", 3, 6}},
      {"slopes", [](Call& c) { c.options.alibi_slopes = c.floats(3); }, {"alibi_slopes", 3, 6}},
      {"window", [](Call& c) { c.options.sliding_window = -1; }, {"sliding_window", -1, 0}},
      {"a query in the past", [](Call& c) { c.options.q_offset = 36; }, {"q_offset", 36, 37}},
      {"first_position", [](Call& c) { c.past.first_position = -1; }, {"first_position", -1, 0}},
      {"mask's batch", [](Call& c) { c.mask(3, 6, 7, 44); }, {"mask's batch", 3, 2}},
      {"mask's heads", [](Call& c) { c.mask(2, 2, 7, 44); }, {"mask's heads", 2, 6}},
      {"mask's queries", [](Call& c) { c.mask(2, 6, 6, 44); }, {"mask's q_len", 6, 7}},
      {"mask of no queries", [](Call& c) { c.mask(2, 6, 0, 44); }, {"mask's q_len", 0, 7}},
      {"mask of the past", [](Call& c) { c.mask(2, 6, 7, 37); }, {"mask's keys", 37, 44}},
      {"mask's keys", [](Call& c) { c.mask(2, 6, 7, 45); }, {"mask's keys", 45, 44}},
      {"mask of no keys", [](Call& c) { c.mask(2, 6, 7, 0); }, {"mask's keys", 0, 44}},
  });
}

TEST(AttentionRefuses, ListsThatDoNotFit) {
  expect_refused_all({
      {"a key",
       [](Call& c) { c.list(1, 3, 7, 1, (7 + 2) * 10 + 3, 44); },
       {"KV head 1", "query 2", 44, "keys, which is 44"}},
      {"no key", [](Call& c) { c.list(1, 3, 7, 1, 7, -2); }, {"is -2", "at least", -1}},
      {"a block",
       [](Call& c) { c.list(1, 3, 7, 8, 7, 6); },
       {"is 6", "the number of blocks, which is 6"}},
      {"no keys of a block", [](Call& c) { c.list(1, 3, 7, 0); }, {"the keys of a block is 0", 1}},
      {"a count", [](Call& c) { c.count(3, 4, 11); }, {"query 4", "is 11", "which is 10"}},
      {"a negative count", [](Call& c) { c.count(3, 4, -1); }, {"is -1", "at least"}},
      {"counts of other heads", [](Call& c) { c.count(2, 4, 1); }, {2, 3}},
      {"queries", [](Call& c) { c.list(1, 3, 6); }, {"q_len is 6", "which is 7"}},
      {"heads", [](Call& c) { c.list(1, 2, 7); }, {"heads is 2", "which is 3"}},
      {"batch", [](Call& c) { c.list(3, 1, 7); }, {"batch is 3", "which is 2"}},
      {"a Selection, too",
       [](Call& c) { c.list(1, 3, 7), c.select(2, 3, 37); },
       {"lists", "Selection"}},
  });
  Call call;  // a Selection of all keys is none
  call.list(1, 3, 7);
  const Selection all = Selection::all(2, 3, 37);
  call.past.selection = &all;
  EXPECT_NO_THROW(
      quoka::attention(call.q, call.past, call.chunk, {call.out, call.lse}, call.options));
}

// Results in inputs, in each other, backwards, in the mask, in lists; and a chunk that is part of the past.
TEST(AttentionRefuses, MemoryThatIsShared) {
  const auto out_at = [](Call& c, float* at) {
    c.out = TensorView<float>(at, {2, 6, 7, 20}, {840, 140, 20, 1});
  };
  const auto lse_at = [](Call& c, float* at, Index step = 1) {
    c.lse = TensorView<float, 3>(at, {2, 6, 7}, {42 * step, 7 * step, step});
  };
  // The same rows in the memory of the output.
  const auto in_out = [](Call& c, Rows& x) {
    const float* const at = c.out_memory.data();
    x = TensorView<const float>(at, x.sizes());
  };
  const struct {
    const char* name;
    std::size_t tensor;  // behind that of the output
    std::function<void(Call&)> out;
  } inputs[] = {
      {"q", 1, [&](Call& c) { in_out(c, c.q); }},
      {"the past's keys", 2, [&](Call& c) { out_at(c, c.tensors[2].data()); }},
      {"the past's values", 3, [&](Call& c) { out_at(c, c.tensors[3].data()); }},
      {"the chunk's keys", 4, [&](Call& c) { in_out(c, c.chunk.k); }},
      {"the chunk's values", 5, [&](Call& c) { in_out(c, c.chunk.v); }},
  };
  for (const auto& input : inputs)
    expect_refused_all(
        {{input.name, input.out, {std::string("out shares memory with ") + input.name}},
         {input.name,
          [&](Call& c) { lse_at(c, c.tensors[input.tensor].data()); },
          {std::string("lse shares memory with ") + input.name}}});
  expect_refused_all({
      {"lse in out",
       [&](Call& c) { lse_at(c, c.out_memory.data() + 3, 20); },
       {"lse shares memory with out"}},
      {"q backwards in out",
       [](Call& c) {
         const float* const last = c.out_memory.data() + 6 * 16;
         c.q = TensorView<const float>(last, {2, 6, 7, 16}, {672, 112, -16, 1});
       },
       {"out shares memory with q"}},
      {"out in the mask",
       [&](Call& c) {
         c.mask(2, 6, 7, 44);
         out_at(c, c.tensors.back().data() + 100);
       },
       {"out shares memory with the mask"}},
      {"lse in the mask",
       [&](Call& c) {
         c.mask(2, 6, 7, 44);
         lse_at(c, c.tensors.back().data() + 100);
       },
       {"lse shares memory with the mask"}},
      {"out in the lists",
       [&](Call& c) { out_at(c, c.lists_of_one_key()); },
       {"out shares memory with the lists"}},
      {"lse in the lists",
       [&](Call& c) { lse_at(c, c.lists_of_one_key()); },
       {"lse shares memory with the lists"}},
      {"counts of lists in out",
       [](Call& c) {
         c.count(3, 0, 10);
         c.options.lists = quoka::IndexLists(
             c.options.lists.entries(), 1,
             TensorView<const Position, 3>(reinterpret_cast<const Position*>(c.out_memory.data()),
                                           {1, 3, 7}));
         std::fill_n(reinterpret_cast<Position*>(c.out_memory.data()), 21, 10);
       },
       {"out shares memory with the lists' counts"}},
      {"lse in counts of lists",
       [&](Call& c) {
         c.count(3, 0, 10);
         c.counts.resize(84, 10);
         c.options.lists =
             quoka::IndexLists(c.options.lists.entries(), 1,
                               TensorView<const Position, 3>(c.counts.data(), {1, 3, 7}));
         lse_at(c, reinterpret_cast<float*>(c.counts.data()));
       },
       {"lse shares memory with the lists' counts"}},
      {"rows of out in each other",
       [](Call& c) {
         c.out = TensorView<float>(c.out_memory.data(), {2, 6, 7, 20}, {840, 140, 10, 1});
       },
       {"rows of out share memory with each other"}},
      {"rows of lse in each other",
       [&](Call& c) { lse_at(c, c.lse_memory.data(), 0); },
       {"rows of lse share memory with each other"}},
      {"chunk's keys in the past",
       [](Call& c) { c.chunk.k = c.past.k.slice(30, 7); },
       {"chunk's keys lie in the past's"}},
      {"chunk's values in the past",
       [](Call& c) { c.chunk.v = c.past.v.slice(30, 7); },
       {"chunk's values lie in the past's"}},
  });
}

// A NaN among the options would spoil some rows and be hidden in others, by what their softmax meets first.
TEST(AttentionRefuses, OptionsThatAreNotFinite) {
  for (const float x : {not_a_number, infinity, -infinity, 1.1e30f, -1.1e30f}) {
    char value[32];
    std::snprintf(value, sizeof value, "%g", static_cast<double>(x));
    expect_refused_all({
        {"scale", [&](Call& c) { c.options.scale = x; }, {"scale", value, "[-1e30, 1e30]"}},
        {"slope",
         [&](Call& c) { c.options.alibi_slopes = c.floats(6, x, 2); },
         {"alibi_slopes[2]", value, "[-1e30, 1e30]"}},
        {"factor",
         [&](Call& c) { c.options.mask_factors = c.floats(6, x, 5); },
         {"mask_factors[5]", value, "[-1e30, 1e30]"}},
    });
  }
  for (const float x : {not_a_number, infinity})
    expect_refused_all({{"sink",
                         [&](Call& c) { c.options.sinks = c.floats(6, x, 2); },
                         {"sinks[2]", "[-infinity, 3.4e38]"}}});
  for (const float x : {not_a_number, infinity, -infinity, -1.0f, 1e-40f, 0.9e-30f, 1.1e30f})
    expect_refused_all(
        {{"cap", [&](Call& c) { c.options.softcap = x; }, {"softcap", "[1e-30, 1e30]"}}});
  for (const float end : {1e-30f, 1e30f}) {
    Call call;
    call.options.scale = end, call.options.softcap = end;
    quoka::attention(call.q, call.past, call.chunk, {call.out, call.lse}, call.options);
    EXPECT_TRUE(std::isfinite(call.lse_memory(0, 0, 0)));
  }
}

// ---- masks --------------------------------------------------------------------------------------

TEST(MaskRefuses, NoMemoryAndNegativeSizes) {
  expect_refused(
      [] {
        (void)Mask::bytes(nullptr, {1, 1, 7, 44}, {0, 0, 44});
      },
      {"a mask of [1, 1, 7, 44]", "null"});
  const char* const axes[] = {"a mask's batch", "a mask's heads", "a mask's q_len",
                              "a mask's keys"};
  for (std::size_t axis = 0; axis < 4; ++axis) {
    Mask::Sizes sizes{1, 1, 7, 44};
    sizes[axis] = -1;
    expect_refused([&] { (void)Mask::bits(nullptr, sizes, {0, 0, 44}); }, {axes[axis], -1, 0});
  }
}

TEST(MaskRefuses, RowsInPagesAndOtherFormats) {
  const std::vector<Position> cells{1, 0};
  const Tensor4<float> added = Random(1).tensor<float>(1, 1, 2, 44);
  expect_refused([&] { (void)Mask(Rows(added).gathered(cells)); }, {"in pages"});
  expect_refused(
      [&] {
        (void)Mask(Rows(reinterpret_cast<const std::byte*>(added.data()), quoka::u8_format(),
                        {1, 1, 2, 44}, {352, 352, 176}));
      },
      {"not u8"});
}

// ---- a past without a chunk ---------------------------------------------------------------------

constexpr Shape without_a_chunk{
    .batch = 2, .q_heads = 6, .kv_heads = 2, .head_dim = 37, .v_dim = 19, .q_len = 7, .kv_len = 40};

// A call that is refused writes nothing.
void attend_to(const Tensor4<float>& q, const quoka::Past& past, const quoka::Chunk& chunk,
               const AttentionOptions& options = {}) {
  auto output = unwritten<float>(q, past.v.dim());
  const auto before = output;
  try {
    quoka::attention(q, past, chunk, {output.out, output.lse}, options);
  } catch (...) {
    expect_same(output, before);
    throw;
  }
}

TEST(PastWithoutAChunk, OfSeveralQueriesIsRefusedUnlessSaid) {
  Random random(13);
  const auto in = random_inputs<float>(random, without_a_chunk);
  const auto refused = [&](const quoka::Past& past, const AttentionOptions& options = {}) {
    expect_refused([&] { attend_to(in.q, past, {}, options); },
                   {7, 40, "no chunk", "chunk_in_cache", "causal = false", "q_offset"});
  };
  const quoka::Past past(in.past_k, in.past_v);
  refused(past);
  Tensor4<float> mask(1, 1, 7, 40);
  mask.setZero();
  refused(past, {.mask = Mask(mask)});
  const Selection some = to_selection({{{3}, {4}}, {{5}, {6}}}, 40);
  refused({in.past_k, in.past_v, some});
  attend_to(in.q, past, {}, {.causal = false});
  attend_to(in.q, past, {}, {.q_offset = 40});
  attend_to(in.q, {Rows(in.past_k).slice(0, 0), Rows(in.past_v).slice(0, 0)},
            {});  // nothing to see
}

TEST(PastWithoutAChunk, OfOneQueryNeedsNoWord) {
  Random random(14);
  Shape s = without_a_chunk;
  s.q_len = 1;
  const auto in = random_inputs<float>(random, s, false);
  attend_to(in.q, {in.past_k, in.past_v}, {});
}

TEST(PastWithoutAChunk, OfASequenceOfABatchIsRefusedUnlessSaid) {
  Random random(15);
  const auto in = random_inputs<float>(random, without_a_chunk);
  auto output = unwritten<float>(in.q, 19);
  quoka::AttentionSequence sequence{.q = in.q, .past = {in.past_k, in.past_v}, .out = output.out};
  expect_refused([&] { quoka::attention(std::span(&sequence, 1)); }, {7, 40, "no chunk"});
  sequence.q_offset = 40;
  quoka::attention(std::span(&sequence, 1));
}

// ---- merge --------------------------------------------------------------------------------------

TEST(MergeRefuses, PartsOfTwoShapes) {
  const struct {
    Eigen::array<Index, 4> out;
    Eigen::array<Index, 3> lse_a, lse;
    std::vector<Fragment> message;
  } table[] = {{{3, 6, 7, 19}, {2, 6, 7}, {3, 6, 7}, {3, 2}},
               {{2, 5, 7, 19}, {2, 6, 7}, {2, 5, 7}, {5, 6}},
               {{2, 6, 8, 19}, {2, 6, 7}, {2, 6, 8}, {8, 7}},
               {{2, 6, 7, 20}, {2, 6, 7}, {2, 6, 7}, {20, 19}},
               {{2, 6, 7, 19}, {2, 6, 7}, {2, 6, 9}, {"lse", 9, 7}},
               {{2, 6, 7, 19}, {2, 4, 7}, {2, 6, 7}, {"lse", 4, 6}}};
  for (const auto& row : table) {
    Random random(11);
    Tensor4<float> a = random.tensor<float>(2, 6, 7, 19), b(row.out);
    Tensor3<float> lse_a(row.lse_a), lse(row.lse);
    b.setConstant(1.0f), lse_a.setConstant(1.0f), lse.setConstant(1.0f);
    const Tensor4<float> before = a;
    try {
      quoka::merge(a, lse_a, b, lse);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const std::invalid_argument& error) {
      expect_message(error.what(), row.message);
    }
    EXPECT_TRUE(same_bits(a, before));
  }
}

}  // namespace
