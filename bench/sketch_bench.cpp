// From kept queries to the best keys, in float and by the 8-bit sketch, which must select the same; and the kept
// queries' softmax mass, in float and by the sketch, which is nearly the same (`mass_lost`).
//
// rows: queries that score each key, 16 in the paper's defaults, 64 in balanced(). Keys are independent,
// and many lie near the threshold.

#include "measure.hpp"

#include "support/statistics.hpp"

#include <quoka/rows/tensor.hpp>
#include <quoka/select/query_scores.hpp>
#include <quoka/select/quoka.hpp>

namespace quoka_bench {
namespace {

constexpr Index budget = 1024;

// Keys of 8 KV heads and q_bar of `rows` queries for each.
struct Scored {
  explicit Scored(Index rows) {
    const auto past = past_of<float>(qwen3_4b, longest_kv_len);
    k = past.k, inverse_norms = past.inverse_norms;
    const ChunkData<float> chunk(qwen3_4b, chunk_len);
    const auto q = chunk.q.view();
    const Index heads = k.heads(), group = q.heads() / heads, dim = k.dim();
    q_bar = quoka::Tensor<float>(1, heads, rows, dim);
    for (Index head = 0; head < heads; ++head)
      for (Index m = 0; m < rows; ++m) {  // the last ones of every head, unit vectors
        const float* row = q.row(0, head * group + m % group, q.len() - 1 - m / group);
        const float inverse = quoka::inverse_norm(row, dim);
        for (Index c = 0; c < dim; ++c) q_bar(0, head, m, c) = row[c] * inverse;
      }
  }

  TensorView<const float> k;
  TensorView<const float, 3> inverse_norms;
  quoka::Tensor<float> q_bar;  // [1, kv_heads, rows, head_dim]
};

Cost cost_of(const Scored& scored, bool sketch) {
  const auto keys = static_cast<double>(scored.k.heads() * scored.k.len());
  const auto dim = static_cast<double>(scored.k.dim());
  return {.flops = 2.0 * keys * static_cast<double>(scored.q_bar.dimension(2)) * dim,
          .bytes = keys * (sketch ? dim + 8.0 : 4.0 * dim + 4.0)};
}

// QuokaSelector with these rows as its queries: as many as are kept, one head to a KV head.
class TopK {
 public:
  TopK(const Scored& s, quoka::Sketch sketch)
      : input_{s.q_bar, s.k, quoka::LogitOptions{}, s.inverse_norms, s.k.len()},
        selector_({.budget = quoka::Budget::keys(budget),
                   .n_queries = s.q_bar.dimension(2),
                   .sketch = sketch}) {
    selector_.appended(input_, state_, quoka::SerialExecutor{});
  }
  void select() { selector_.select(input_, state_, selection_, quoka::SerialExecutor{}); }
  const quoka::Selection& selection() const { return selection_; }

 private:
  quoka::SelectorInput input_;
  quoka::QuokaSelector selector_;
  quoka::QuokaSelector::State state_;
  quoka::Selection selection_;
};

void top_k_in_float(benchmark::State& state, Index rows) {
  const Scored s(rows);
  TopK in_float(s, quoka::Sketch::off);
  measure(state, cost_of(s, false), [&] { in_float.select(); });
}

void top_k_by_sketch(benchmark::State& state, Index rows) {
  const Scored s(rows);
  TopK in_float(s, quoka::Sketch::off), by_sketch(s, quoka::Sketch::on);
  measure(state, cost_of(s, true), [&] { by_sketch.select(); });
  in_float.select();
  verify(state, by_sketch.selection() == in_float.selection(), "the sketch selects other keys");
}

// ---- softmax mass -------------------------------------------------------------------------------

constexpr float logit_scale = 0.8f;  // of unit queries: logits up to 8 nats with `paper` keys

// The same scores [1, kv_heads, kv_len] twice: in float, and by the sketch.
class MassPair {
 public:
  explicit MassPair(const Scored& scored) : s_(scored) {
    sketch_.append(quoka::Rows(s_.k), s_.k.len(), quoka::SerialExecutor{});
    for (auto* scores : {&float_scores_, &sketch_scores_})
      scores->reserve(s_.k.heads() * s_.k.len());
  }
  void in_float() { score({}, float_scores_); }
  void by_sketch() {
    score(quoka::SketchedKeys(quoka::Rows(s_.k), sketch_, nullptr), sketch_scores_);
  }
  // Float's mass of its own best keys, less that of the sketch's: mean over the heads.
  double mass_lost() {
    return (mass_of_best(float_scores_) - mass_of_best(sketch_scores_)) /
           static_cast<double>(s_.k.heads());
  }

 private:
  void score(std::optional<quoka::SketchedKeys> codes, quoka::Buffer<float>& scores) {
    const auto fill = [&](Index, Index head, quoka::RowWriter& to) {
      for (Index m = 0; m < s_.q_bar.dimension(2); ++m)
        to.add(s_.q_bar.data() + (head * s_.q_bar.dimension(2) + m) * s_.k.dim(), logit_scale);
    };
    quoka::softmax_scores({.rows = {s_.q_bar.dimension(2), s_.k.dim()},
                           .fill = fill,
                           .keys = s_.k,
                           .codes = std::move(codes)},
                          view(scores), state_, quoka::SerialExecutor{});
  }
  TensorView<float, 3> view(quoka::Buffer<float>& scores) const {
    return quoka::score_view(scores.data(), 1, s_.k.heads(), s_.k.len());
  }
  double mass_of_best(quoka::Buffer<float>& scores) {
    quoka::Selection selection;
    quoka::best_keys(view(scores), budget, {}, workers_, selection, quoka::SerialExecutor{});
    double mass = 0.0;
    for (Index head = 0; head < s_.k.heads(); ++head)
      for (const quoka::Position t : selection.positions(0, head))
        mass += static_cast<double>(float_scores_.data()[head * s_.k.len() + t]);
    return mass;
  }

  const Scored& s_;
  quoka::KeySketch sketch_;
  quoka::Buffer<float> float_scores_, sketch_scores_;
  quoka::QueryScoreState state_;
  quoka::Arenas workers_;
};

void mass_in_float(benchmark::State& state, Index rows) {
  const Scored s(rows);
  MassPair pair(s);
  measure(state, cost_of(s, false), [&] { pair.in_float(); });
  pair.by_sketch();
  verify(state, std::abs(pair.mass_lost()) < 0.002, "the masses are wrong");
}

void mass_by_sketch(benchmark::State& state, Index rows) {
  const Scored s(rows);
  MassPair pair(s);
  measure(state, cost_of(s, true), [&] { pair.by_sketch(); });
  const auto seconds = time_in_turns(2, 9, [&](std::size_t i) {
    return seconds_of([&] { i == 0 ? pair.in_float() : pair.by_sketch(); }, thread_seconds);
  });
  state.counters["times_float"] = median_ratio(seconds[0], seconds[1]);
  state.counters["mass_lost"] = pair.mass_lost();
  verify(state, std::abs(pair.mass_lost()) < 0.002, "the sketch loses mass");
}

// ---- the sketch itself --------------------------------------------------------------------------

// The keys of one chunk into the sketch.
void append(benchmark::State& state) {
  constexpr Index kv_len = longest_kv_len;
  const auto past = past_of<float>(qwen3_4b, kv_len);
  quoka::KeySketch sketch;
  sketch.append(past.k, kv_len, quoka::SerialExecutor{});
  measure(state, {.bytes = row_bytes<float>(qwen3_4b, chunk_len)}, [&] {
    sketch.truncate(kv_len - chunk_len);
    sketch.append(past.k, kv_len, quoka::SerialExecutor{});
  });
  verify(state, sketch.len() == kv_len, "keys are missing");
}

[[maybe_unused]] const bool registered = [] {
  const auto pair = [](const std::string& what, Index rows, auto in_float, auto by_sketch) {
    const std::string shape = named("/normal", {{"kv_len", longest_kv_len}, {"rows", rows}});
    add(what + "/float" + shape, [=](auto& state) { in_float(state, rows); });
    add(what + "/sketch" + shape, [=](auto& state) { by_sketch(state, rows); });
  };
  pair("top_k_of_scores", 16, top_k_in_float, top_k_by_sketch);
  pair("softmax_mass", 64, mass_in_float, mass_by_sketch);
  add(named("key_sketch_append", {{"q_len", chunk_len}}), append);
  return true;
}();

}  // namespace
}  // namespace quoka_bench
