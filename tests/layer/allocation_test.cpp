// Allocations: none in the steady state of a decode loop, and little beyond the cache at 32,768 keys. Attention's
// workspace after an allocation has failed; for a layer that is in prefill_suite_test.cpp, for a sketch in
// cache_sketch_test.cpp.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/methods/all.hpp>

#include "support/attention_case.hpp"
#include "layer/allocations.hpp"
#include "support/selector_draw.hpp"

#include <cerrno>
#include <cstdlib>
#include <memory>

#if defined(QUOKA_TEST_COUNTS)

namespace {
// False if the system has not that much memory.
bool count(std::size_t bytes) noexcept {
  using namespace quoka_test;
  if (!counting.load(std::memory_order_relaxed)) return true;
  allocations.fetch_add(1, std::memory_order_relaxed);
  allocated_bytes.fetch_add(bytes, std::memory_order_relaxed);
  return allocations_left.fetch_sub(1, std::memory_order_relaxed) > 0;
}
}  // namespace

// The program's own definitions come before the C library's, also for operator new, which calls
// malloc.
extern "C" {
void* __libc_malloc(std::size_t bytes);
void* __libc_calloc(std::size_t n, std::size_t bytes);
void* __libc_realloc(void* p, std::size_t bytes);
void* __libc_memalign(std::size_t alignment, std::size_t bytes);

void* malloc(std::size_t bytes) noexcept { return count(bytes) ? __libc_malloc(bytes) : nullptr; }
void* calloc(std::size_t n, std::size_t bytes) noexcept {
  return count(n * bytes) ? __libc_calloc(n, bytes) : nullptr;
}
void* realloc(void* p, std::size_t bytes) noexcept {
  return count(bytes) ? __libc_realloc(p, bytes) : nullptr;
}
void* aligned_alloc(std::size_t alignment, std::size_t bytes) noexcept {
  return count(bytes) ? __libc_memalign(alignment, bytes) : nullptr;
}
int posix_memalign(void** p, std::size_t alignment, std::size_t bytes) noexcept {
  *p = count(bytes) ? __libc_memalign(alignment, bytes) : nullptr;
  return *p == nullptr ? ENOMEM : 0;
}
}

#endif

namespace {

using namespace quoka_test;
using quoka::ChunkedPrefill;
using quoka::DenseSelector;
using quoka::MassSelector;
using quoka::QuokaSelector;

class Allocation : public ::testing::Test {
 protected:
  void SetUp() override {
#if !defined(QUOKA_TEST_COUNTS)
    GTEST_SKIP() << "allocations are not counted under this sanitizer or C library";
#endif
  }
};

// The compiler may drop an allocation that nothing reads.
void* volatile looked_at;

TEST_F(Allocation, IsCountedWhoeverAllocates) {
  EXPECT_EQ(allocations_of([] {
              const auto p = std::make_unique<int>(7);
              looked_at = p.get();
            }),
            1);
  EXPECT_EQ(allocations_of([] {
              quoka::Buffer<float> buffer;
              looked_at = buffer.reserve(100);
            }),
            1);
  EXPECT_GE(allocated_bytes.load(), 400u);
  EXPECT_EQ(allocations_of([] {
              Tensor4<float> x(1, 2, 3, 4);
              looked_at = x.data();
            }),
            1);
  EXPECT_EQ(allocations_of([] {}), 0);
}

// ---- chunks and decode -------------------------------------------------------------------------------------

// Runs every task as one worker of two: who runs what is up to a pool, and must not matter.
struct AsWorker {
  int worker;
  static int workers() { return 2; }
  template <class F>
  void run(Index tasks, F&& f) const {
    for (Index task = 0; task < tasks; ++task) f(task, worker);
  }
};

// A layer with room for so many tokens, some of which are there, and the same chunk of `n` tokens again and again.
template <class S>
struct Loop {
  Random& random;
  Index n;
  ChunkedPrefill<S> layer;
  Tensor4<float> q = tensor(8, n, 24), k = tensor(2, n, 24), v = tensor(2, n, 20), out{1, 8, n, 20};

  Loop(Random& of, Index tokens, const typename S::Options& options, Index room, Index prefix = 0)
      : random(of),
        n(tokens),
        layer({.q_heads = 8, .kv_heads = 2, .head_dim = 24, .v_dim = 20}, options) {
    layer.reserve(room);
    const auto first_k = tensor(2, prefix, 24), first_v = tensor(2, prefix, 20);
    layer.append(first_k, first_v);
  }
  Tensor4<float> tensor(Index heads, Index len, Index dim) const {
    return random.tensor<float>(1, heads, len, dim);
  }
  void run(Index chunks, ExecutorRef by = SerialExecutor{}) {
    for (; chunks > 0; --chunks) layer.forward(q, k, v, out, by);
  }
  void expect_none(Index chunks, ExecutorRef by = SerialExecutor{}) {
    EXPECT_EQ(allocations_of([&] { run(chunks, by); }), 0);
  }
};

// A layer of any options that has run some chunks: none in later ones, up to the length that is reserved and again after a
// cut, past the border from which on selecting pays, whichever worker runs a task, and where codes cannot stand for the
// keys of a head. True where the layer began to select meanwhile.
template <class S>
bool expect_none_in_a_steady_state(Random& random) {
  // A chunk of 6 tokens that begins to select may allocate, once.
  const Index n = random.one_of(1, 1, 6), prompt = n > 1 ? 600 : random.one_of(120, 600),
              room = 1024;
  Loop<S> loop(random, n, selector_options<typename S::Options>(random), room);
  const auto first_q = loop.tensor(8, prompt, 24), first_v = loop.tensor(2, prompt, 20);
  auto first_k = loop.tensor(2, prompt, 24);
  const bool loud = random.seldom(4);  // heads that codes cannot stand for are done in float
  for (Index i = 0; i < prompt && loud && prompt == 600; ++i) first_k(0, 1, i, 3) *= 1e20f;
  Tensor4<float> first_out(1, 8, prompt, 20);
  const SerialExecutor serial;
  const AsWorker one{0}, other{1};
  quoka::ThreadPool pool(2);
  // More workers divide a chunk into more items once it selects, and then allocate once.
  const Index kind = n == 1 ? random.below(3) : 0;
  const ExecutorRef before = kind == 0   ? ExecutorRef(serial)
                             : kind == 1 ? ExecutorRef(pool)
                                         : ExecutorRef(one),
                    by = kind == 2 ? ExecutorRef(other) : before;
  SCOPED_TRACE(::testing::Message() << n << " after " << prompt << ", executor " << kind);
  loop.layer.prefill(first_q, first_k, first_v, first_out, 120, before);
  if (kind == 1) loop.run(3, one), loop.run(3, other);
  loop.run(3, before);
  const bool all = loop.layer.selection().is_all();
  loop.expect_none((room - loop.layer.kv_len()) / n, by);
  EXPECT_EQ(allocations_of([&] { loop.layer.truncate(room - 40 * n); }), 0);
  loop.expect_none(30, by);
  return all && !loop.layer.selection().is_all();
}

TEST_F(Allocation, NoneInASteadyState) {
  Index began_to_select = 0;
  const bool complete = for_each_draw(16, [&](Random& random) {
    expect_none_in_a_steady_state<QuokaSelector>(random);
    expect_none_in_a_steady_state<DenseSelector>(random);
    for (int i = 0; i < 2; ++i)
      began_to_select += expect_none_in_a_steady_state<MassSelector>(random);
  });
  if (!complete) return;
  EXPECT_GT(began_to_select, 2);
}

// A decode loop of any method over a reserved cache, with a budget that stays or grows.
TEST_F(Allocation, NoneInADecodeLoopOfAnySelector) {
  Random random(14);
  quoka::for_each_selector([&]<class S>(const char* name) {
    for (const Budget budget : {Budget::keys(31), Budget::share(0.25)}) {
      SCOPED_TRACE(name + std::string(" of 301: ") + std::to_string(budget.count(301)));
      typename S::Options options{};
      if constexpr (requires { options.budget = budget; }) options.budget = budget;
      if constexpr (requires { options.fitted; }) options.fitted = 200;  // its basis is there
      Loop<S> loop(random, 1, options, 720, 300);
      loop.run(20);
      loop.expect_none(400);
    }
  });
}

// ---- attention ----------------------------------------------------------------------------------

// Any call, alone and as a batch of one: after it the same call allocates nothing. A call that failed halfway leaves no
// reference to memory that was not allocated: the next one with the workspace writes what a fresh one writes.
TEST_F(Allocation, NoneInAttentionWithAWorkspaceWhichServesAfterMemoryRanOut) {
  quoka::ThreadPool pool(2);
  for_each_draw("ATTENTION", 100, [&](Random& random, std::uint64_t) {
    const AttentionCase c(random);
    SCOPED_TRACE(c.describe());
    const Output<float> expected = c.attend();
    Output<float> output = c.unwritten_output();
    const quoka::Past past = c.past();
    const quoka::Chunk chunk = c.chunk();
    const AttentionOptions options = c.options();
    const ExecutorRef by = random.below(3) == 0 ? ExecutorRef(pool) : SerialExecutor{};
    quoka::AttentionWorkspace workspace;
    const auto call = [&] {
      quoka::attention(c.q(), past, chunk, {output.out, output.lse}, options, by, workspace);
    };
    run_out_of_memory(call);
    EXPECT_TRUE(same_bits(output.out, expected.out));
    call();
    if (by.workers() == 1) {
      EXPECT_EQ(allocations_of(call), 0);
    }
    const quoka::AttentionSequence batch[] = {c.sequence({output.out, output.lse})};
    const auto call_batch = [&] { quoka::attention(batch, options, SerialExecutor{}, workspace); };
    if (c.shape().batch > 1) return;
    call_batch();
    EXPECT_EQ(allocations_of(call_batch), 0);
  });
}

// One workspace, and counts of two heads that change between the calls, over a cache of another format.
TEST_F(Allocation, NoneInAttentionWhoseCountsChange) {
  Random random(7);
  const auto past_k = random.tensor<Eigen::half>(1, 2, 1999, 24),
             past_v = random.tensor<Eigen::half>(1, 2, 1999, 20);
  const Selection keeps[] = {to_selection({{oracle::range(0, 1999), oracle::range(5, 6)}}, 1999),
                             to_selection({{{}, oracle::range(0, 1500)}}, 1999)};
  for (const Index q_len : {137, 3, 1}) {
    SCOPED_TRACE(q_len);
    const auto q = random.tensor<float>(1, 8, q_len, 24), k = random.tensor<float>(1, 2, q_len, 24),
               v = random.tensor<float>(1, 2, q_len, 20);
    Tensor4<Eigen::half> out(1, 8, q_len, 20);
    quoka::AttentionWorkspace workspace;
    const auto call = [&](const Selection& keep) {
      quoka::attention(q, {past_k, past_v, keep}, {k, v}, out, {}, SerialExecutor{}, workspace);
    };
    call(keeps[0]);
    EXPECT_EQ(allocations_of([&] { call(keeps[1]), call(keeps[0]); }), 0);
  }
}

// ---- memory -------------------------------------------------------------------------------------

// Beyond the cache: scores and their ranks for 8 KV heads, and each worker's packed block of keys,
// its queries and accumulators.
TEST(Scratch, AtMost32MiBFor32768Keys) {
  constexpr Index kv_len = 32768, block = 512, limit = Index{32} << 20;
  Random random(4);
  const auto block_k = random.tensor<float>(1, 8, block, 128),
             block_v = random.tensor<float>(1, 8, block, 128);
  const auto q = random.tensor<float>(1, 32, 128, 128), k = random.tensor<float>(1, 8, 128, 128),
             v = random.tensor<float>(1, 8, 128, 128);
  Tensor4<float> out(1, 32, 128, 128);
  quoka::ThreadPool pool(2);
  ChunkedPrefill<QuokaSelector> layer({.q_heads = 32, .kv_heads = 8, .head_dim = 128},
                                      {.budget = Budget::keys(1024)});
  layer.reserve(kv_len + 128);
  for (Index i = 0; i < kv_len; i += block) layer.append(block_k, block_v);
  ASSERT_EQ(layer.kv_len(), kv_len);

  allocated_bytes = 0;
  counting = true;
  layer.forward(q, k, v, out, pool);
  counting = false;
  const Index bytes = layer.scratch_bytes();
  RecordProperty("scratch_bytes", std::to_string(bytes));
  RecordProperty("allocated_bytes", std::to_string(allocated_bytes.load()));
  EXPECT_GT(bytes, 0);
  // Attention's and all else.
  EXPECT_LE(allocated_bytes.load(), static_cast<std::size_t>(limit));
  EXPECT_GE(allocated_bytes.load(), static_cast<std::size_t>(bytes + 8 * kv_len * 4))
      << "one score per key and KV head at least";
  EXPECT_EQ(layer.selection().sum_of_counts(), 8 * 1024);
}

// Float queries over pages of half and of 8 bits: the cache is converted only in the blocks that tasks use over float,
// too.
TEST(Scratch, OverPagesOfOtherFormatsIsThatOverFloat) {
  Random random(8);
  const auto k = random.tensor<float>(1, 2, 4096, 64), v = random.tensor<float>(1, 2, 4096, 64);
  const auto pages_of = [](const quoka::Rows& rows, const std::vector<quoka::Position>& table,
                           Index len) {
    const Index bytes = rows.strides()[2];
    const quoka::Rows pool(rows.data(), rows.format(), {256, 2, 16, 64},
                           {16 * bytes, rows.strides()[1], bytes});
    return quoka::paged(pool, table, len);
  };
  std::vector<quoka::Position> table;
  for (const Index page : random.permutation(256))
    table.push_back(static_cast<quoka::Position>(page));
  for (const Index q_len : {128, 1}) {
    const auto q = random.tensor<float>(1, 8, q_len, 64);
    Tensor4<float> out(1, 8, q_len, 64);
    const auto scratch_over = [&](const quoka::Format& format, Index len, bool in_pages) {
      quoka::KvCache cache(1, 2, 64, 64, format, format);
      cache.append(k, v);
      quoka::AttentionWorkspace workspace;
      const quoka::Rows of_k = cache.k(), of_v = cache.v();
      const quoka::Past past(in_pages ? pages_of(of_k, table, len) : of_k.slice(0, len),
                             in_pages ? pages_of(of_v, table, len) : of_v.slice(0, len));
      quoka::attention(q, past, {}, out, {.causal = false}, quoka::SerialExecutor{}, workspace);
      return workspace.bytes();
    };
    for (const Index len : {2048, 4096}) {
      const Index over_float = scratch_over(quoka::float_format(), len, false);
      for (const quoka::Format* const format :
           {&quoka::format_of<Eigen::half>(), &quoka::q8_0_format(), &quoka::u8_format(),
            &quoka::i8_format(), &quoka::e4m3_format()})
        for (const bool in_pages : {false, true})
          EXPECT_LE(scratch_over(*format, len, in_pages), over_float + 4096)
              << format->name << (in_pages ? " in pages" : "") << ", " << len << " keys";
    }
  }
}

// A cache of n keys takes its keys, values and inverse norms, and no more than twice that while it
// grows.
TEST(Scratch, TheCacheTakesWhatItsFormulaSays) {
  Random random(6);
  const auto k = random.tensor<Eigen::half>(2, 3, 37, 24),
             v = random.tensor<Eigen::half>(2, 3, 37, 20);
  constexpr Index per_key = 2 * 3 * (24 * 2 + 20 * 2 + 4);
  const quoka::Format& half = quoka::format_of<Eigen::half>();
  quoka::KvCache reserved(2, 3, 24, 20, half, half), growing(2, 3, 24, 20, half, half);
  reserved.reserve(501);
  EXPECT_EQ(reserved.bytes(), 501 * per_key);
  for (int i = 0; i < 13; ++i) reserved.append(k, v), growing.append(k, v);
  EXPECT_EQ(reserved.bytes(), 501 * per_key);
  EXPECT_LE(growing.bytes(), 2 * 13 * 37 * per_key);
}

}  // namespace
