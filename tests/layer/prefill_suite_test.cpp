// Properties of a layer, over layers drawn at random. For any selector, shape, formats, options and history each step
// equals selection, attention and append by separate calls, to the last bit, by any executor and after cuts, moves and
// failures, of memory too. A failed draw is named; QUOKA_PREFILL_SEED=n runs that one alone, QUOKA_PREFILL_CASES=n more
// of them than usual. Properties of selection and attention are in selection_fuzz_test.cpp and attention_suite_test.cpp.

#include <quoka/kernels/byte_formats.hpp>
#include <quoka/layer/chunked_prefill.hpp>
#include <quoka/methods/all.hpp>
#include <quoka/runtime/thread_pool.hpp>

#include "layer/allocations.hpp"
#include "support/attention_fixtures.hpp"
#include "support/selector_draw.hpp"
#include "support/world.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <sstream>

namespace {

using namespace quoka_test;
using quoka::Arithmetic;
using quoka::ChunkedPrefill;
using quoka::LayerShape;
using quoka::QuokaSelector;
using quoka::SelectorInput;

// The library's selectors refuse windows; one of a caller's own may choose as if there were none.
struct OfNoWindow : QuokaSelector {
  explicit OfNoWindow(const Options& options = {}) : QuokaSelector(options) {}
  void select(SelectorInput input, State& state, Selection& selection, ExecutorRef executor) const {
    if (input.logits) input.logits->sliding_window = 0;
    QuokaSelector::select(input, state, selection, executor);
  }
};

// Selects another number of keys for each head, none and all among them.
struct CountsOfItsOwn {
  struct Options {};
  struct State {
    Index len = 0;
    void truncate(Index kv_len) { len = std::min(len, kv_len); }
    static Index bytes() { return 0; }
  };
  explicit CountsOfItsOwn(const Options& = {}) {}

  void select(const SelectorInput& input, State& state, Selection& selection, ExecutorRef) const {
    const Index heads = input.k.heads(), kv_len = input.k.len();
    EXPECT_EQ(state.len, kv_len)
        << "the keys that were appended to the selector are not those of the cache";
    quoka::SelectionWriter writer(selection, input.k.batch(), heads, kv_len, kv_len);
    for (Index b = 0; b < input.k.batch(); ++b)
      for (Index head = 0; head < heads; ++head) {
        Index count = 0;
        for (Index t = 0; t < kv_len && head > 0; ++t)
          if (head == 1 || t % head == b)
            writer.row(b, head)[uz(count++)] = static_cast<Position>(t);
        writer.set_count(b, head, count);
      }
    writer.commit();
  }
  void appended(const SelectorInput& input, State& state, ExecutorRef) const {
    state.len = input.k.len();
  }
};

// ---- a draw -------------------------------------------------------------------------------------

struct LayerDraw {
  LayerShape shape;
  std::vector<float> k_scales, v_scales, sinks, slopes;
  AttentionOptions options;
  bool loud = false;  // a head's keys are beyond what codes hold
  const Format* chunk_format = &quoka::float_format();

  explicit LayerDraw(Random& random) {
    shape.kv_heads = 1 + random.below(3), shape.q_heads = shape.kv_heads * (1 + random.below(4));
    shape.head_dim = random.one_of(1, 8, 16, 20, 40, 64), shape.v_dim = random.one_of(0, 0, 17, 24);
    shape.batch = random.seldom(4) ? 2 + random.below(2) : 1;
    const auto cache_format = [&](const Format*& format, std::vector<float>& scales, Index dim) {
      if (random.seldom(4)) return;  // the layer's own
      format = every_format()[uz(random.below(written_formats))];
      scales = scales_of(*format, shape.kv_heads, dim);
    };
    cache_format(shape.k_format, k_scales, shape.head_dim);
    cache_format(shape.v_format, v_scales, v_dim());
    shape.k_scales = k_scales, shape.v_scales = v_scales;
    options.arithmetic = random.one_of(Arithmetic::automatic, Arithmetic::float_, Arithmetic::bf16,
                                       Arithmetic::int8);
    if (random.seldom(3)) options.scale = static_cast<float>(0.05 + random.uniform());
    if (random.seldom(4)) options.softcap = 20.0f;
    if (random.seldom(4)) options.sliding_window = 1 + random.below(400);
    for (Index h = 0; h < shape.q_heads; ++h) {
      sinks.push_back(static_cast<float>(random.normal()));
      slopes.push_back(static_cast<float>(0.1 * random.uniform()));
    }
    if (random.seldom(4)) options.sinks = sinks;
    if (random.seldom(6)) options.alibi_slopes = slopes;
    options.causal = !random.seldom(4);
    loud = random.seldom(6);
    constexpr Index alone = 5;  // formats without scales apart, which queries may have
    if (random.seldom(4)) chunk_format = every_format()[uz(random.below(alone))];
  }
  LayerDraw(const LayerDraw&) = delete;
  LayerDraw& operator=(const LayerDraw&) = delete;

  Index v_dim() const { return shape.v_dim > 0 ? shape.v_dim : shape.head_dim; }
  std::string describe() const {
    std::ostringstream text;
    text << "batch " << shape.batch << ", heads " << shape.q_heads << "/" << shape.kv_heads
         << ", dims " << shape.head_dim << "/" << v_dim() << ", cache "
         << (shape.k_format != nullptr ? shape.k_format->name : "own") << "/"
         << (shape.v_format != nullptr ? shape.v_format->name : "own") << ", "
         << arithmetic_name(options.arithmetic) << ", softcap " << options.softcap << ", window "
         << options.sliding_window << (options.causal ? "" : ", not causal") << ", chunks in "
         << chunk_format->name;
    for (const auto& [is, name] : {std::pair{!options.sinks.empty(), "sinks"},
                                   {!options.alibi_slopes.empty(), "alibi"},
                                   {loud, "loud keys"}})
      if (is) text << ", " << name;
    return text.str();
  }
};

// Any tokens, in a format of their own.
struct Chunk {
  StoredRows q, k, v;

  Chunk(Random& random, const LayerDraw& draw, Index len) {
    const LayerShape& s = draw.shape;
    Tensor4<float> keys = random.tensor<float>(s.batch, s.kv_heads, len, s.head_dim);
    for (Index i = 0; draw.loud && i < len; i += 3) keys(0, s.kv_heads - 1, i, 0) *= 1e20f;
    const auto stored = [&](const Tensor4<float>& x) {
      return StoredRows(x, *draw.chunk_format, StoredRows::layouts[random.below(3)], random);
    };
    q = stored(random.tensor<float>(s.batch, s.q_heads, len, s.head_dim)), k = stored(keys);
    v = stored(random.tensor<float>(s.batch, s.kv_heads, len, draw.v_dim()));
  }
  Index len() const { return q.rows().len(); }
};

// ---- the same by calls of their own -----------------------------------------------------------------

template <class S>
struct Parts {
  const LayerDraw& draw;
  S selector;
  quoka::KvCache cache;
  typename S::State state{};

  Parts(const LayerDraw& of, const typename S::Options& options)
      : draw(of),
        selector(options),
        cache(of.shape.batch, of.shape.kv_heads, of.shape.head_dim, of.v_dim(),
              {of.shape.k_format != nullptr ? *of.shape.k_format : quoka::float_format(),
               of.k_scales},
              {of.shape.v_format != nullptr ? *of.shape.v_format : quoka::float_format(),
               of.v_scales}) {}

  SelectorInput input(const Rows& q) const {
    return {.q = q,
            .k = cache.k(),
            .logits = draw.options,
            .inverse_norms = cache.inverse_norms(),
            .capacity = cache.capacity(),
            .in_int8 = quoka::multiplies_int8(draw.options.arithmetic,
                                              q.len() * q.heads() / draw.shape.kv_heads)};
  }
  Selection select(const Rows& q, const Rows& chunk_k, bool attends) {
    Selection keep;
    SelectorInput in = input(q);
    in.chunk_k = chunk_k, in.attends = attends;
    selector.select(in, state, keep, SerialExecutor{});
    return keep;
  }
  void append(const Rows& q, const Rows& k, const Rows& v) {
    cache.append(k, v);
    selector.appended(input(q), state, SerialExecutor{});
  }
  // A causal chunk of more than 128 queries is cut for MassSelector.
  Selection forward(const Rows& q, const Rows& k, const Rows& v,
                    const quoka::AttentionOutput& out) {
    Selection keep;
    for (Index begin = 0, n = 0; begin < q.len(); begin += n) {
      n = q.len() - begin;
      if (draw.options.causal && std::is_same_v<S, quoka::MassSelector>)
        n = std::min<Index>(n, 128);
      const Rows some_q = q.slice(begin, n), some_k = k.slice(begin, n), some_v = v.slice(begin, n);
      quoka::AttentionOutput to(out.out.slice(begin, n));
      if (!out.lse_nat.absent()) to.lse_nat = out.lse_nat.slice(begin, n);
      keep = select(some_q, some_k, true);
      quoka::attention(some_q, {cache.k(), cache.v(), keep}, {some_k, some_v}, to, draw.options);
      append(some_q, some_k, some_v);
    }
    return keep;
  }
  void truncate(Index len) {
    cache.truncate(len);
    state.truncate(len);
  }
};

// Selectors refuse options that they cannot weigh.
template <class S>
bool takes(const LayerDraw& draw, const typename S::Options& options) {
  Random random(1);
  Parts<S> parts(draw, options);
  const Chunk chunk(random, draw, 3);
  try {
    parts.append(chunk.q.rows(), chunk.k.rows(), chunk.v.rows());
    (void)parts.select(chunk.q.rows(), chunk.k.rows(), true);
    return true;
  } catch (const std::invalid_argument&) {
    return false;
  }
}

// ---- a history ----------------------------------------------------------------------------------

template <class S>
class History {
 public:
  using Layer = ChunkedPrefill<S>;

  History(Random& random, const LayerDraw& draw, const typename S::Options& options)
      : random_(random),
        draw_(draw),
        options_(options),
        layer_(make()),
        parts_(draw, options),
        pool_(3) {}

  void run() {
    if (random_.seldom(8)) append(5000);
    for (Index step = 6 + random_.below(7); step > 0 && !has_failed(); --step) {
      SCOPED_TRACE("at " + std::to_string(layer_->kv_len()) + " tokens");
      switch (random_.below(10)) {
        case 0:
          append(1 + random_.below(250));
          break;
        case 1:
          in_steps(length());
          break;
        case 2:
          prefill(length() + length());
          break;
        case 3:
          cut();
          break;
        case 4:
          change_place();
          break;
        default:
          forward(length());
      }
      EXPECT_EQ(layer_->kv_len(), parts_.cache.len());
      EXPECT_TRUE(same_bits(layer_->cache().k(), parts_.cache.k()));
      EXPECT_TRUE(same_bits(layer_->cache().v(), parts_.cache.v()));
    }
  }

 private:
  Index length() {
    return random_.one_of(Index{1}, Index{1}, 1 + random_.below(random_.seldom(6) ? 300 : 130),
                          Index{40});
  }
  // A layer. The memory that its options and scales referred to is overwritten and freed.
  std::unique_ptr<Layer> make() const {
    auto from = std::make_unique<Numbers>(draw_);
    auto layer = std::make_unique<Layer>(from->shape, options_, from->options);
    from->spoil();
    return layer;
  }
  struct Numbers {
    explicit Numbers(const LayerDraw& draw)
        : k(draw.k_scales),
          v(draw.v_scales),
          sinks(draw.sinks),
          slopes(draw.slopes),
          shape(draw.shape),
          options(draw.options) {
      shape.k_scales = k, shape.v_scales = v;
      if (!options.sinks.empty()) options.sinks = sinks;
      if (!options.alibi_slopes.empty()) options.alibi_slopes = slopes;
    }
    void spoil() {
      for (auto* const x : {&k, &v, &sinks, &slopes}) x->assign(x->size(), 77.0f);
    }
    std::vector<float> k, v, sinks, slopes;
    LayerShape shape;
    AttentionOptions options;
  };

  // f(executor) on the layer by any executor. Before that it may fail, at any task or at each allocation in turn, which
  // changes nothing; false: the call is not made again.
  template <class F>
  bool by_some(F&& f) {
    const int workers = random_.one_of(1, 2, 5, 64, 128);
    if (random_.seldom(8)) {
      run_out_of_memory([&, len = layer_->kv_len()] {
        EXPECT_EQ(layer_->kv_len(), len);
        f(ExecutorRef(InTurns{workers}));
      });
      return true;
    }
    if (random_.seldom(3)) {
      const Index len = layer_->kv_len();
      try {
        f(ExecutorRef(
            FailsAt{static_cast<long>(random_.below(random_.one_of(4, 30, 200))), workers}));
        return true;
      } catch (const Failure&) {
        EXPECT_EQ(layer_->kv_len(), len);
      }
      if (random_.seldom(3)) return false;
    }
    switch (random_.below(4)) {
      case 0:
        f(ExecutorRef(SerialExecutor{}));
        break;
      case 1:
        f(ExecutorRef(pool_));
        break;
      case 2: {
        ShuffledExecutor shuffled(random_.bits(), workers);
        f(ExecutorRef(shuffled));
        break;
      }
      default:
        f(ExecutorRef(InTurns{workers}));
    }
    return true;
  }
  struct Outputs {
    Tensor4<float> out;
    Tensor3<float> lse;
    Outputs(const LayerDraw& draw, Index len)
        : out(draw.shape.batch, draw.shape.q_heads, len, draw.v_dim()),
          lse(draw.shape.batch, draw.shape.q_heads, len) {
      out.setConstant(-12345.0f), lse.setConstant(-12345.0f);
    }
    quoka::AttentionOutput view() { return {out, lse}; }
  };

  void forward(Index len) {
    const Chunk chunk(random_, draw_, len);
    Outputs got(draw_, len), expected(draw_, len);
    if (!by_some([&](ExecutorRef by) {
          layer_->forward(chunk.q.rows(), chunk.k.rows(), chunk.v.rows(), got.view(), by);
        }))
      return;
    const Selection keep =
        parts_.forward(chunk.q.rows(), chunk.k.rows(), chunk.v.rows(), expected.view());
    EXPECT_EQ(layer_->selection(), keep);
    EXPECT_TRUE(same_bits(got.out, expected.out));
    EXPECT_TRUE(
        same_bits(TensorView<const float, 3>(got.lse), TensorView<const float, 3>(expected.lse)));
  }
  void prefill(Index len) {
    const Chunk prompt(random_, draw_, len);
    const Index chunk_len = 1 + random_.below(len);
    Outputs got(draw_, len), expected(draw_, len);
    if (!by_some([&](ExecutorRef by) {
          layer_->prefill(prompt.q.rows(), prompt.k.rows(), prompt.v.rows(), got.out, chunk_len,
                          by);
        }))
      return;
    for (Index begin = 0; begin < len; begin += chunk_len) {
      const Index n = std::min(chunk_len, len - begin);
      parts_.forward(prompt.q.rows().slice(begin, n), prompt.k.rows().slice(begin, n),
                     prompt.v.rows().slice(begin, n),
                     TensorView<float>(expected.out).slice(begin, n));
    }
    EXPECT_TRUE(same_bits(got.out, expected.out));
  }
  void append(Index len) {
    const Chunk chunk(random_, draw_, len);
    if (by_some([&](ExecutorRef by) { layer_->append(chunk.k.rows(), chunk.v.rows(), by); }))
      parts_.append({}, chunk.k.rows(), chunk.v.rows());
  }
  // forward() without attention.
  void in_steps(Index len) {
    const Chunk chunk(random_, draw_, len);
    const Rows chunk_k = random_.seldom(2) ? chunk.k.rows() : Rows();
    if (!by_some([&](ExecutorRef by) { layer_->select(chunk.q.rows(), chunk_k, by); })) return;
    EXPECT_EQ(layer_->selection(), parts_.select(chunk.q.rows(), chunk_k, false));
    if (by_some([&](ExecutorRef by) {
          layer_->append(chunk.q.rows(), chunk.k.rows(), chunk.v.rows(), by);
        }))
      parts_.append(chunk.q.rows(), chunk.k.rows(), chunk.v.rows());
  }
  void cut() {
    const Index len = layer_->kv_len(), to = random_.seldom(4) ? 0 : random_.below(len + 1);
    EXPECT_EQ(allocations_of([&] { layer_->truncate(to); }), 0);
    parts_.truncate(to);
  }
  // Moved, given room, given another's scratch memory: all of which changes no bit.
  void change_place() {
    switch (random_.below(4)) {
      case 0:
        layer_ = std::make_unique<Layer>(std::move(*layer_));
        break;
      case 1: {
        auto other = make();
        *other = std::move(*layer_);
        layer_ = std::move(other);
        break;
      }
      case 2: {
        static quoka::AttentionWorkspace shared;
        layer_->share_workspace(shared);
        break;
      }
      default:
        layer_->reserve(layer_->kv_len() + random_.below(400));
    }
  }

  Random& random_;
  const LayerDraw& draw_;
  typename S::Options options_;
  std::unique_ptr<Layer> layer_;
  Parts<S> parts_;
  quoka::ThreadPool pool_;
};

template <class S>
void expect_as_parts(const char* name, Index usual) {
  for_each_draw("PREFILL", usual, [&](Random& random, std::uint64_t) {
    LayerDraw draw(random);
    const auto options = selector_options<typename S::Options>(random);
    if (!takes<S>(draw, options)) draw.options.alibi_slopes = {}, draw.options.sliding_window = 0;
    if (!takes<S>(draw, options)) draw.options.softcap = 0.0f;
    SCOPED_TRACE(std::string(name) + ": " + draw.describe());
    History<S>(random, draw, options).run();
  });
}

TEST(PrefillSuite, EachStepIsSelectAttendAppend) {
  quoka::for_each_selector([]<class S>(const char* name) { expect_as_parts<S>(name, 15); });
  expect_as_parts<OfNoWindow>("quoka, whatever the window", 150);
  expect_as_parts<CountsOfItsOwn>("counts of its own", 40);
}

}  // namespace
