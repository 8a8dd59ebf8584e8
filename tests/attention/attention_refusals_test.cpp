// Inputs that attention() and merge() refuse before anything is written: a sound call with one thing wrong, alone and in a
// batch, and the words of the message, both numbers among them.

#include <quoka/attention/attention.hpp>
#include <quoka/attention/merge.hpp>
#include <quoka/kernels/byte_formats.hpp>

#include "support/attention_fixtures.hpp"

#include <gtest/gtest.h>

#include <cstring>
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
  Tensor4<float>&out_memory = full(2, 6, 7, 20), &lse_memory = full(2, 6, 7, 1);
  Selection keep;

  Rows q = normal(2, 6, 7, 16);
  quoka::Past past{normal(2, 3, 37, 16), normal(2, 3, 37, 20)};
  quoka::Chunk chunk{normal(2, 3, 7, 16), normal(2, 3, 7, 20)};
  quoka::OutputRows out{out_memory};
  TensorView<float, 3> lse{lse_memory.data(), {2, 6, 7}};
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
  void out_at(float* at) { out = TensorView<float>(at, {2, 6, 7, 20}); }
  void lse_at(float* at, Index step = 1) {
    lse = TensorView<float, 3>(at, {2, 6, 7}, {42 * step, 7 * step, step});
  }
  // These rows in memory that has room for an output; where it begins.
  float* elsewhere(Rows& rows) {
    float* const at = full(2, 6, 37, 20).data();
    rows = TensorView<const float>(at, rows.sizes());
    return at;
  }
  float* mask(Index b, Index heads, Index q_len, Index keys) {
    Tensor4<float>& added = tensor(b, heads, q_len, keys);
    options.mask = added;
    return added.data();
  }
  // Lists of key 1, ten entries for each query, in blocks, counted or not; then one entry, or one count, is another.
  float* list(Index b, Index heads, Index q_len, Index block = 1, Index at = 0,
              Position entry = 1) {
    entries.assign(1680, 1);
    entries.at(uz(at)) = entry;
    options.lists = quoka::IndexLists({entries.data(), {b, heads, q_len, 10}}, block);
    return reinterpret_cast<float*>(entries.data());
  }
  float* count(Index heads, Index at, Position entry) {
    list(1, 3, 7);
    counts.assign(1680, 10);
    counts.at(uz(at)) = entry;
    options.lists = quoka::IndexLists(options.lists.entries(), 1,
                                      TensorView<const Position, 3>(counts.data(), {1, heads, 7}));
    return reinterpret_cast<float*>(counts.data());
  }
  void select(Index b, Index heads, Index kv_len) {
    keep = random_selection(random, b, heads, kv_len, 7);
    past.selection = &keep;
  }
  // [batch, token, q | k | v | out, heads, dim] in one memory: extents overlap, no byte does.
  void fuse(Index out_at = 204) {
    constexpr Index token = 6 * 16 + 3 * 16 + 3 * 20 + 6 * 20;
    float* const memory = full(1, 1, 1, 2 * 7 * token + 20).data();
    const auto part = [&](Index at, Index heads, Index dim) {
      return TensorView<float>(memory + at, {2, heads, 7, dim}, {7 * token, dim, token, 1});
    };
    const auto move = [&](Rows& x, Index at) {
      const TensorView<float> to = part(at, x.heads(), x.dim());
      for (Index b = 0; b < 2; ++b)
        for (Index head = 0; head < x.heads(); ++head)
          for (Index i = 0; i < 7; ++i)
            std::memcpy(to.row(b, head, i), x.row(b, head, i), uz(x.dim()) * sizeof(float));
      x = to;
    };
    move(q, 0), move(chunk.k, 96), move(chunk.v, 144);
    out = part(out_at, 6, 20);
  }
  // Results in or behind the memory of a mask of bits, whose last byte is the first one of float 11.
  void lse_behind_bits(Index at) {
    float* const memory = full(1, 1, 1, 200).data();
    options.mask = Mask::bits(reinterpret_cast<std::byte*>(memory) + 3, {1, 1, 7, 44}, {0, 0, 6});
    lse_at(memory + at);
  }
  void without_past() { past.k = past.k.slice(0, 0), past.v = past.v.slice(0, 0); }

  quoka::AttentionSequence sequence() const {
    return {q, past, chunk, {out, lse}, options.mask, options.q_offset, options.lists};
  }
  struct Memory {
    std::deque<Tensor4<float>> tensors;
    std::vector<Position> entries, counts;
  };
  Memory memory() const { return {tensors, entries, counts}; }
  void expect_as(const Memory& before) const {
    for (std::size_t i = 0; i < tensors.size(); ++i)
      EXPECT_TRUE(same_bits(tensors[i], before.tensors[i]));
    EXPECT_TRUE(entries == before.entries && counts == before.counts);
  }
};

// Three calls as one batch, each with its own mask, lists and position.
struct Batch {
  Call of[3];
  AttentionOptions options;

  void attend() {
    static quoka::AttentionWorkspace workspace;  // of all batches, refused ones among them
    const quoka::AttentionSequence all[] = {of[0].sequence(), of[1].sequence(), of[2].sequence()};
    quoka::attention(all, options, SerialExecutor{}, workspace);
  }
};

void expect_refused_batch(const std::function<void(Batch&)>& wrong,
                          const std::vector<Fragment>& says) {
  Batch batch;
  std::vector<Call::Memory> before;
  expect_refused(
      [&] {
        wrong(batch);  // some are refused as views
        for (const Call& call : batch.of) before.push_back(call.memory());
        batch.attend();
      },
      says);
  for (std::size_t i = 0; i < before.size(); ++i) batch.of[i].expect_as(before[i]);
  Call alone;
  quoka::attention(alone.q, alone.past, alone.chunk, alone.out);
  Batch sound;  // the workspace serves on
  sound.attend();
  for (const Call& call : sound.of) EXPECT_TRUE(same_bits(call.out_memory, alone.out_memory));
}

// As a call, and as the last one of a batch.
struct Refusal {
  std::function<void(Call&)> wrong;
  std::vector<Fragment> says;
};
void expect_refused_all(const std::vector<Refusal>& table) {
  for (const auto& [wrong, says] : table) {
    SCOPED_TRACE(::testing::Message()
                 << "row " << &wrong - &table[0].wrong << ": " << says[0].text());
    Call call;
    std::optional<Call::Memory> before;
    expect_refused(
        [&] {
          wrong(call);
          before = call.memory();
          quoka::attention(call.q, call.past, call.chunk, {call.out, call.lse}, call.options);
        },
        says);
    if (!before) continue;
    call.expect_as(*before);
    std::vector<Fragment> in_batch = says;
    in_batch.emplace_back("sequence ");
    expect_refused_batch(
        [&](Batch& batch) {
          wrong(batch.of[2]);
          batch.options = batch.of[2].options;
          batch.options.mask = {}, batch.options.lists = {}, batch.options.q_offset = {};
        },
        in_batch);
  }
}

TEST(AttentionRefuses, NothingOfASoundCall) {
  const std::function<void(Call&)> sound[] = {
      [](Call&) {}, [](Call& c) { c.options.scale = c.options.softcap = 1e-30f; },
      [](Call& c) { c.options.scale = c.options.softcap = 1e30f; },
      [](Call& c) {  // a Selection of all keys is none
        c.list(1, 3, 7), c.keep = Selection::all(2, 3, 37), c.past.selection = &c.keep;
      },
      [](Call& c) { c.lse_behind_bits(12); },
      [](Call& c) {  // one key many times
        c.past.k = TensorView<const float>(c.tensors[3].data(), {2, 3, 37, 16}, {0, 0, 0, 1});
      },
      // Without a chunk the past lies before the queries if that is said, or clear.
      [](Call& c) { c.chunk = {}, c.options.causal = false; },
      [](Call& c) { c.chunk = {}, c.options.q_offset = 37; },
      [](Call& c) { c.chunk = {}, c.without_past(); },
      [](Call& c) {
        c.chunk = {}, c.q = c.q.slice(3, 1), c.out = c.out.slice(3, 1), c.lse = c.lse.slice(3, 1);
      },
      [](Call& c) { c.past.v = c.past.k, c.chunk.v = c.chunk.k, c.out = c.full(2, 6, 7, 16); }};
  for (const auto& change : sound) {
    SCOPED_TRACE(&change - sound);
    Call call;
    Batch batch;
    change(call), change(batch.of[1]), batch.options = batch.of[1].options;
    batch.options.mask = {}, batch.options.lists = {}, batch.options.q_offset = {};
    quoka::attention(call.q, call.past, call.chunk, {call.out, call.lse}, call.options);
    batch.attend();
    EXPECT_TRUE(std::isfinite(call.lse.at(1, 5, 0)) || call.past.k.len() == 0);
    EXPECT_NE(call.lse.at(1, 5, 0), -12345.0f);
    EXPECT_TRUE(same_bits(Rows(batch.of[1].out), Rows(call.out)));
  }
}

TEST(AttentionRefuses, NothingOfOneFusedBuffer) {
  Call fused, apart;
  fused.fuse();
  for (Call* const call : {&fused, &apart})
    quoka::attention(call->q, call->past, call->chunk, call->out);
  EXPECT_TRUE(same_bits(Rows(fused.out), apart.out_memory));
  EXPECT_TRUE(same_bits(fused.q, apart.q));
}

TEST(AttentionRefuses, ShapesThatDoNotFit) {
  const quoka::Format& apart = quoka::channel_major_format<float>();
  expect_refused_all({
      {[](Call& c) { c.q = c.normal(2, 7, 7, 16); }, {"q_heads", 7, "kv_heads", 3}},
      {[](Call& c) { c.q = c.normal(2, 6, 0, 16); }, {"q_len", 0, 1}},
      {[](Call& c) { c.q = c.normal(0, 6, 7, 16); }, {"batch", 0, 1}},
      {[](Call& c) { c.q = c.normal(2, 6, 7, 0); }, {"head_dim", 0, 1}},
      {[](Call& c) { c.past.k = c.normal(2, 3, 37, 15); }, {"past k", 15, 16}},
      {[](Call& c) { c.chunk.k = c.normal(2, 3, 7, 17); }, {"chunk k", 17, 16}},
      {[](Call& c) { c.past.k = c.normal(1, 3, 37, 16); }, {"batch", 1, 2}},
      {[](Call& c) { c.chunk.v = c.normal(3, 3, 7, 20); }, {"batch", 3, 2}},
      {[](Call& c) { c.chunk.k = c.normal(2, 2, 7, 16); }, {"heads", 2, 3}},
      {[](Call& c) { c.past.v = c.normal(2, 6, 37, 20); }, {"heads", 6, 3}},
      {[](Call& c) { c.past.v = c.normal(2, 3, 38, 20); }, {"past v's len", 38, 37}},
      {[](Call& c) { c.chunk.v = c.normal(2, 3, 8, 20); }, {"chunk", 8, 7}},
      {[](Call& c) { c.chunk.k = c.normal(2, 3, 5, 16), c.chunk.v = c.normal(2, 3, 5, 20); },
       {"chunk", 5, "q_len", 7}},
      {[](Call& c) { c.chunk.v = c.normal(2, 3, 7, 21); }, {"dim", 21, 20}},
      {[](Call& c) { c.out = c.full(2, 6, 7, 16); }, {"out", 16, 20}},
      {[](Call& c) { c.out = c.full(2, 6, 8, 20); }, {"out", 8, 7}},
      {[](Call& c) { c.out = c.full(2, 3, 7, 20); }, {"out", 3, 6}},
      {[](Call& c) {
         c.lse = {c.full(2, 6, 9, 1).data(), {2, 6, 9}};
       },
       {"lse", 9, 7}},
      {[](Call& c) { c.lse_at(nullptr); }, {"pointer is null"}},
      {[](Call& c) { c.past.k = c.past.k.slice(0, 0); }, {"past v's len", 37, 0}},
      {[](Call& c) { c.chunk.k = c.chunk.k.slice(0, 0); }, {"chunk v's len", 7, 0}},
      {[](Call& c) { c.past = {}, c.chunk = {}; }, {"q_heads", 6, "kv_heads", 0}},
      {[](Call& c) { c.select(2, 3, 38); }, {"selection", 38, 37}},
      {[](Call& c) { c.select(1, 3, 37); }, {"selection", 1, 2}},
      {[](Call& c) { c.select(2, 4, 37); }, {"selection", 4, 3}},
      {[](Call& c) { c.select(2, 3, 37), c.without_past(); }, {"selection", 37, 0}},
      {[](Call& c) { c.q = c.q.with_scales(c.floats(1).data(), 0); },
       {"q has scales that lie apart"}},
      {[](Call& c) { c.out = c.out.with_scales(c.floats(1).data(), 0); },
       {"out has scales that lie apart"}},
      {[&](Call& c) { c.q = Rows(c.q.data(), apart, c.q.sizes(), c.q.strides(), 8); },
       {"q's step between channels in bytes is", 8, "a step of", 0}},
      {[](Call& c) { c.q = Rows(c.q.data(), c.q.format(), c.q.sizes(), c.q.strides(), 8); },
       {"the channel_step of rows of format float is", 8, "a step of", 0}},
      {[](Call& c) {
         Rows& k = c.past.k;
         k = Rows(k.data(), quoka::q8_0_format(), k.sizes(), k.strides(), 64);
       },
       {"the channel_step of rows of format q8_0 is", 64, "a step of", 0}},
      {[](Call& c) {
         c.out = {c.out.data(), c.out.format(), c.out.sizes(), c.out.strides(), 12};
       },
       {"the channel_step of rows of format float is", 12, "a step of", 0}},
  });
}

TEST(AttentionRefuses, OptionsThatDoNotFit) {
  const std::vector<Fragment> order{7,         37, "no chunk", "chunk_in_cache", "causal = false",
                                    "q_offset"};
  expect_refused_all({
      {[](Call& c) { c.options.sinks = c.floats(3); }, {"sinks", 3, "q_heads", 6}},
      {[](Call& c) { c.options.mask_factors = c.floats(3); }, {"mask_factors", 3, 6}},
      {[](Call& c) { c.options.alibi_slopes = c.floats(3); }, {"alibi_slopes", 3, 6}},
      {[](Call& c) { c.options.sliding_window = -1; }, {"sliding_window", -1, 0}},
      {[](Call& c) { c.options.q_offset = 36; }, {"q_offset", 36, 37}},
      {[](Call& c) { c.past.first_position = -1; }, {"first_position", -1, 0}},
      {[](Call& c) { c.mask(3, 6, 7, 44); }, {"mask's batch", 3, 2}},
      {[](Call& c) { c.mask(2, 2, 7, 44); }, {"mask's heads", 2, 6}},
      {[](Call& c) { c.mask(2, 6, 6, 44); }, {"mask's q_len", 6, 7}},
      {[](Call& c) { c.mask(2, 6, 0, 44); }, {"mask's q_len", 0, 7}},
      {[](Call& c) { c.mask(2, 6, 7, 37); }, {"mask's keys", 37, 44}},
      {[](Call& c) { c.mask(2, 6, 7, 45); }, {"mask's keys", 45, 44}},
      {[](Call& c) { c.mask(2, 6, 7, 0); }, {"mask's keys", 0, 44}},
      // Several queries over a past without a chunk.
      {[](Call& c) { c.chunk = {}; }, order},
      {[](Call& c) { c.chunk = {}, c.mask(1, 1, 7, 37); }, order},
      {[](Call& c) { c.chunk = {}, c.select(2, 3, 37); }, order},
  });
  expect_refused_batch(
      [](Batch& batch) {  // the options' mask is for sequences without one
        for (Call& call : batch.of) call.mask(2, 6, 7, 44);
        batch.options.mask = batch.of[0].options.mask, batch.of[1].options.mask = {};
        batch.of[1].past.k = batch.of[1].past.k.slice(0, 36);
        batch.of[1].past.v = batch.of[1].past.v.slice(0, 36);
      },
      {"sequence", 1, "mask's keys", 44, 43});
}

TEST(AttentionRefuses, ListsThatDoNotFit) {
  expect_refused_all({
      {[](Call& c) { c.list(1, 3, 7, 1, (7 + 2) * 10 + 3, 44); },
       {"KV head 1", "query 2", 44, "keys, which is 44"}},
      {[](Call& c) { c.list(1, 3, 7, 1, 7, -2); }, {"is -2", "at least", -1}},
      {[](Call& c) { c.list(1, 3, 7, 8, 7, 6); }, {"is 6", "the number of blocks, which is 6"}},
      {[](Call& c) { c.list(1, 3, 7, 0); }, {"the keys of a block is 0", 1}},
      {[](Call& c) { c.count(3, 4, 11); }, {"query 4", "is 11", "which is 10"}},
      {[](Call& c) { c.count(3, 4, -1); }, {"is -1", "at least"}},
      {[](Call& c) { c.count(2, 4, 1); }, {2, 3}},
      {[](Call& c) { c.list(1, 3, 6); }, {"q_len is 6", "which is 7"}},
      {[](Call& c) { c.list(1, 2, 7); }, {"heads is 2", "which is 3"}},
      {[](Call& c) { c.list(3, 1, 7); }, {"batch is 3", "which is 2"}},
      {[](Call& c) { c.list(1, 3, 7), c.select(2, 3, 37); }, {"lists", "Selection"}},
  });
}

// A NaN among the options would spoil some rows and be hidden in others, by what their softmax meets first.
TEST(AttentionRefuses, OptionsThatAreNotFinite) {
  const char* const most = "[-1e30, 1e30]";
  for (const float x : {not_a_number, infinity, -infinity, 1.1e30f, -1.1e30f}) {
    char value[32];
    std::snprintf(value, sizeof value, "%g", static_cast<double>(x));
    expect_refused_all({
        {[&](Call& c) { c.options.scale = x; }, {"scale", value, most}},
        {[&](Call& c) { c.options.alibi_slopes = c.floats(6, x, 2); },
         {"alibi_slopes[2]", value, most}},
        {[&](Call& c) { c.options.mask_factors = c.floats(6, x, 5); },
         {"mask_factors[5]", value, most}},
    });
  }
  for (const float x : {not_a_number, infinity})
    expect_refused_all({{[&](Call& c) { c.options.sinks = c.floats(6, x, 2); },
                         {"sinks[2]", "[-infinity, 3.4e38]"}}});
  for (const float x : {not_a_number, infinity, -infinity, -1.0f, 1e-40f, 0.9e-30f, 1.1e30f})
    expect_refused_all({{[&](Call& c) { c.options.softcap = x; }, {"softcap", "[1e-30, 1e30]"}}});
}

// ---- memory that is shared ------------------------------------------------------------------------

// Its own results and another one's, in all that a call reads.
TEST(AttentionRefuses, ResultsInWhatIsRead) {
  const struct {
    std::string name;
    std::function<float*(Call&)> place;
  } inputs[] = {{"q", [](Call& c) { return c.elsewhere(c.q); }},
                {"the past's keys", [](Call& c) { return c.elsewhere(c.past.k); }},
                {"the past's values", [](Call& c) { return c.elsewhere(c.past.v); }},
                {"the chunk's keys", [](Call& c) { return c.elsewhere(c.chunk.k); }},
                {"the chunk's values", [](Call& c) { return c.elsewhere(c.chunk.v); }},
                {"the mask", [](Call& c) { return c.mask(2, 6, 7, 44) + 100; }},
                {"the lists", [](Call& c) { return c.list(1, 3, 7); }},
                {"the lists' counts", [](Call& c) { return c.count(3, 0, 10); }}};
  for (const auto& [name, place] : inputs)
    for (const std::string result : {"out", "lse"}) {
      const auto put = [&](Call& writer, Call& reader) {
        float* const at = place(reader);
        result == "out" ? writer.out_at(at) : writer.lse_at(at);
      };
      expect_refused_all({{[&](Call& c) { put(c, c); }, {result + " shares memory with " + name}}});
      for (const std::size_t other : {0u, 2u})
        expect_refused_batch([&](Batch& batch) { put(batch.of[1], batch.of[other]); },
                             {result + " of sequence 1 shares memory with " + name +
                              " of sequence " + std::to_string(other)});
    }
}

// Alone and beside the sequence that reads it.
TEST(AttentionRefuses, ResultsInABlockTableOrAListOfRows) {
  constexpr Index n = 3;
  Random random(101);
  const auto q = random.tensor<float>(1, 2, n, 8), chunk = random.tensor<float>(1, 2, n, 8),
             past = random.tensor<float>(1, 2, 9, 8), pool = random.tensor<float>(2, 2, 4, 8);
  std::vector<Position> table(100, 0);
  Tensor4<float> elsewhere(1, 2, n, 8);
  const TensorView<float> inside(reinterpret_cast<float*>(table.data()), {1, 2, n, 8});
  quoka::AttentionWorkspace workspace;
  for (const std::string part :
       {"the past's keys", "the past's values", "the chunk's keys", "the chunk's values"})
    for (const bool pages : {false, true}) {
      const quoka::AttentionSequence writes{
          .q = q, .past = {past, past}, .chunk = {chunk, chunk}, .out = inside};
      quoka::AttentionSequence reads = writes;
      Rows& rows = part == "the past's keys"     ? reads.past.k
                   : part == "the past's values" ? reads.past.v
                   : part == "the chunk's keys"  ? reads.chunk.k
                                                 : reads.chunk.v;
      rows = pages ? quoka::paged(pool, std::span(table).first(3), rows.len())
                   : rows.gathered(std::span(table).first(uz(rows.len())));
      const std::string of = (pages ? "the block table of " : "the list of ") + part;
      expect_refused(
          [&] { quoka::attention(std::span(&reads, 1), {}, SerialExecutor{}, workspace); },
          {"out shares memory with " + of});
      reads.out = TensorView<float>(elsewhere);
      const quoka::AttentionSequence both[] = {reads, writes};
      expect_refused([&] { quoka::attention(both, {}, SerialExecutor{}, workspace); },
                     {"out of sequence 1 shares memory with " + of + " of sequence 0"});
    }
}

TEST(AttentionRefuses, ResultsInResultsAndAChunkInThePast) {
  expect_refused_all({
      {[](Call& c) { c.lse_at(c.out_memory.data() + 3, 20); }, {"lse shares memory with out"}},
      {[](Call& c) { c.fuse(204 + 20); }, {"out shares memory with q"}},  // the next token's
      {[](Call& c) { c.lse_behind_bits(11); }, {"lse shares memory with the mask"}},
      {[](Call& c) {
         c.options.sinks = {c.out_memory.data() + 40, 6};
       },
       {"out shares memory with the sinks"}},
      {[](Call& c) {
         c.options.alibi_slopes = {c.lse_memory.setConstant(1.0f).data(), 6};
       },
       {"lse shares memory with the alibi_slopes"}},
      {[](Call& c) {
         c.mask(2, 6, 7, 44);
         c.options.mask_factors = {c.lse_memory.setConstant(1.0f).data(), 6};
       },
       {"lse shares memory with the mask_factors"}},
      {[](Call& c) {
         c.past.v = Rows(c.past.v.data(), quoka::i8_format(), {2, 3, 37, 20}, {2220, 740, 20})
                        .with_scales(c.out_memory.data() + 1678, 1);
       },
       {"out shares memory with the scales of the past's values"}},
      {[](Call& c) {  // the last head's
         c.past.v = Rows(c.past.v.data(), quoka::i8_format(), {2, 3, 37, 20}, {2220, 740, 20})
                        .with_scales(c.out_memory.data() + 1681, -1);
       },
       {"out shares memory with the scales of the past's values"}},
      {[](Call& c) {  // backwards
         c.q =
             TensorView<const float>(&c.out_memory(0, 0, 6, 0), {2, 6, 7, 16}, {672, 112, -16, 1});
       },
       {"out shares memory with q"}},
      {[](Call& c) {
         c.out = TensorView<float>(c.out_memory.data(), {2, 6, 7, 20}, {840, 140, 10, 1});
       },
       {"rows of out share memory with each other"}},
      {[](Call& c) { c.lse_at(c.lse_memory.data(), 0); },
       {"rows of lse share memory with each other"}},
      {[](Call& c) { c.chunk.k = c.past.k.slice(30, 7); }, {"chunk's keys lie in the past's"}},
      {[](Call& c) { c.chunk.v = c.past.v.slice(30, 7); }, {"chunk's values lie in the past's"}},
  });
  const auto refused = [](const std::string& result, const std::string& other,
                          const std::function<void(Call & writer, Call & of)>& wrong) {
    expect_refused_batch(
        [&](Batch& batch) { wrong(batch.of[2], batch.of[0]); },
        {result + " of sequence 2 shares memory with " + other + " of sequence 0"});
  };
  refused("out", "out", [](Call& c, Call& of) { c.out = of.out_memory; });
  refused("out", "out", [](Call& c, Call& of) {  // one number is both's
    float* const room = of.full(4, 6, 7, 20).data();
    of.out_at(room), c.out_at(room + 2 * 6 * 7 * 20 - 1);
  });
  refused("lse", "lse", [](Call& c, Call& of) { c.lse_at(of.lse_memory.data()); });
  refused("lse", "out", [](Call& c, Call& of) { c.lse_at(of.out_memory.data()); });
}

// ---- masks and merge ------------------------------------------------------------------------------

TEST(MaskRefuses, WhatIsNoMask) {
  const std::vector<Position> cells{1, 0};
  const Tensor4<float> added = Random(1).tensor<float>(1, 1, 2, 44);
  const auto bits = [](const Mask::Sizes& sizes) { (void)Mask::bits(nullptr, sizes, {0, 0, 44}); };
  const Rows of_bytes(Rows(added).data(), quoka::u8_format(), {1, 1, 2, 44}, {352, 352, 176});
  expect_refused([&] { bits({1, 1, 7, 44}); }, {"a mask of [1, 1, 7, 44]", "null"});
  expect_refused(
      [&] {
        (void)Mask::bytes(nullptr, {1, 1, 7, 44}, {0, 0, 44});
      },
      {"a mask of [1, 1, 7, 44]", "null"});
  expect_refused([&] { bits({-1, 1, 7, 44}); }, {"a mask's batch", -1, 0});
  expect_refused([&] { bits({1, -1, 7, 44}); }, {"a mask's heads", -1, 0});
  expect_refused([&] { bits({1, 1, -1, 44}); }, {"a mask's q_len", -1, 0});
  expect_refused([&] { bits({1, 1, 7, -1}); }, {"a mask's keys", -1, 0});
  expect_refused([&] { (void)Mask(Rows(added).gathered(cells)); }, {"in pages"});
  expect_refused([&] { (void)Mask(of_bytes); }, {"not u8"});
}

TEST(MergeRefuses, PartsOfTwoShapes) {
  const struct {
    Eigen::array<Index, 4> out;
    Eigen::array<Index, 3> lse_a, lse;
    std::vector<Fragment> says;
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
    expect_refused([&] { quoka::merge(a, lse_a, b, lse); }, row.says);
    EXPECT_TRUE(same_bits(a, before));
  }
}

// Four views of one buffer: side by side; then two of them overlap by one element, or rows of one view overlap.
TEST(MergeRefuses, PartsThatShareMemory) {
  constexpr Index out = 48, lse = 6;  // [1, 2, 3, 8] and [1, 2, 3]
  enum { out_a, lse_a, out_b, lse_b };
  struct Places {
    Index at[4] = {0, out, out + lse, 2 * out + lse};
    Index out_step = 8, lse_step = 1;  // of a, from a query to the next
  };
  std::vector<float> memory(2 * (out + lse), 1.0f);
  const auto merge = [&](const Places& x) {
    const auto at = [&](int which) { return memory.data() + x.at[which]; };
    quoka::merge(TensorView<float>(at(out_a), {1, 2, 3, 8}, {out, out / 2, x.out_step, 1}),
                 TensorView<float, 3>(at(lse_a), {1, 2, 3}, {lse, lse / 2, x.lse_step}),
                 TensorView<const float>(at(out_b), {1, 2, 3, 8}),
                 TensorView<const float, 3>(at(lse_b), {1, 2, 3}));
  };
  const struct {
    Places places;
    std::vector<Fragment> says;
  } table[] = {{{.at = {0, 47, 54, 102}}, {"lse_a", "out_a"}},
               {{.at = {0, 102, 47, 96}}, {"out_b", "out_a"}},
               {{.at = {0, 102, 53, 47}}, {"lse_b", "out_a"}},
               {{.at = {0, 48, 53, 102}}, {"out_b", "lse_a"}},
               {{.at = {0, 48, 60, 53}}, {"lse_b", "lse_a"}},
               {{.out_step = 7}, {"rows of out_a"}},
               {{.lse_step = 0}, {"rows of lse_a"}}};
  EXPECT_NO_THROW(merge({}));
  for (const auto& [places, says] : table) {
    const std::vector<float> before = memory;
    expect_refused([&] { merge(places); }, says);
    EXPECT_EQ(memory, before);
  }
}

}  // namespace
