// Block sizes and distances of simd/tuning.hpp, each tried alone on the work that it decides most.
//
// Compiled with QUOKA_TUNING, which makes them variables; this unit's library is one of its own, and it
// includes nothing of the benchmarks that names the library's types. In each round all candidates of a
// value take turns, the default twice: the second time tells what ratios mean nothing. Ratios are of a
// candidate's time to the default's in the same round. Results are compared with the default's.

#if !defined(QUOKA_TUNING)
#error "compile with QUOKA_TUNING"
#endif

#include "tune.hpp"
#include "normal.hpp"

#include "support/clock.hpp"
#include "support/statistics.hpp"
#include "support/table.hpp"

#include <quoka/attention/attention.hpp>
#include <quoka/cache/key_sketch.hpp>
#include <quoka/packing/byte_formats.hpp>
#include <quoka/select/quoka.hpp>
#include <quoka/select/stages.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

namespace quoka_bench {
namespace {

namespace tuning = quoka::tuning;
using quoka::Index;
using quoka::Rows;
using quoka::Selection;
using quoka::TensorView;
using quoka_examples::quantile, quoka_examples::ratios, quoka_examples::thread_seconds;

constexpr Index dim = 128, group = 4, most_heads = 8;  // KV heads
constexpr double worth = 0.99;                         // a smaller gain is none
constexpr double shortest_turn = 0.002;                // seconds
constexpr int fewest_rounds = 5, most_rounds = 41;

// What a value decides: run() computes, result() is what it computed.
struct Work {
  std::string what;
  std::function<void()> run;
  std::function<std::vector<float>()> result;
};

struct Value {
  const char* name;
  const char* trades;  // more against less
  Index* index;        // the variable: this one,
  int* integer;        // or that one
  std::vector<Index> candidates;
  bool same_bits;  // no candidate changes a bit of the result; otherwise the order of sums

  Index get() const { return index != nullptr ? *index : *integer; }
  void set(Index to) const {
    if (index != nullptr)
      *index = to;
    else
      *integer = static_cast<int>(to);
  }
};

// Normal numbers [heads, len, dim], or the same memory as [len, heads, dim].
class Numbers {
 public:
  Numbers(Index heads, Index len, std::uint64_t seed) : heads_(heads), len_(len) {
    fill_normal(data_.reserve(heads * len * dim), heads * len * dim, seed);
  }
  Rows rows(Index heads, Index len) const {
    return TensorView<const float>(data_.data(), {1, heads, len, dim}, {0, len_ * dim, dim, 1});
  }
  Rows rows() const { return rows(heads_, len_); }
  Rows side_by_side() const {
    return TensorView<const float>(data_.data(), {1, heads_, len_, dim}, {0, dim, heads_ * dim, 1});
  }
  float* data() { return data_.data(); }
  Index size() const { return heads_ * len_ * dim; }

 private:
  Index heads_, len_;
  quoka::Buffer<float> data_;
};

class Tuner {
 public:
  explicit Tuner(const TuneFlags& flags)
      : flags_(flags), len_(std::max<Index>(64, static_cast<Index>(flags.keys))) {}

  int run() {
    const std::vector<Value> values = all_values();
    std::vector<const Value*> wanted;
    for (const Value& value : values)
      if (std::string(value.name).find(flags_.name) != std::string::npos) wanted.push_back(&value);
    if (wanted.empty()) {
      std::cerr << "--tune: no value's name contains \"" << flags_.name << "\"\n";
      return 2;
    }
    seconds_ = flags_.seconds / static_cast<double>(wanted.size());
    fmt::print(
        "Times relative to the default's in the same round: median (quartiles). One thread, 8 KV "
        "heads "
        "of 128 channels, group 4.\nA candidate is better if three quarters of its ratios lie "
        "below "
        "three quarters of the default's against itself,\nand their median below {:.2f}.\n",
        worth);
    for (const Value* value : wanted) compare(*value, work_for(value->name));
    fmt::print("\nDefaults and bests: include/quoka/simd/tuning.hpp\n\n");
    std::fflush(stdout);
    table_.print();
    return failures_ == 0 ? 0 : 1;
  }

 private:
  static std::vector<Value> all_values() {
    const auto index = [](const char* name, Index& value, std::vector<Index> candidates,
                          const char* trades, bool same_bits = true) {
      return Value{name, trades, &value, nullptr, std::move(candidates), same_bits};
    };
    // Whole tiles and whole packets, as the library wants its blocks.
    std::vector<Index> blocks;
    constexpr Index step = std::lcm(Index{tuning::tile_rows}, Index{quoka::simd::lanes});
    for (const Index part : {4, 2})
      if (tuning::block_keys % (part * step) == 0) blocks.push_back(tuning::block_keys / part);
    for (const Index times : {2, 3}) blocks.push_back(tuning::block_keys * times);
    constexpr Index mib = Index{1} << 20;
    return {
        {"block_keys", "weights leave L1 / accumulators are read and written more often", nullptr,
         &tuning::block_keys, blocks, false},
        index("max_panels_per_task", tuning::max_panels_per_task, {2, 4, 8, 16, 32, 64},
              "queries and sums leave L2 / keys and values are packed more often"),
        index("token_block_keys", tuning::token_block_keys, {256, 512, 1024, 2048, 4096},
              "weights leave L1 / memory idles at each change from keys to values", false),
        index("token_stretch_keys", tuning::token_stretch_keys, {4, 8, 16},
              "keys leave L1 between query rows / more calls"),
        index("token_value_keys", tuning::token_value_keys, {4, 8, 16},
              "values leave L1 between query rows / sums are read and written more often"),
        index("token_prefetch_keys", tuning::token_prefetch_keys, {16, 32, 48, 96, 192},
              "lines leave L1 unused / memory is waited for"),
        index("token_together_keys", tuning::token_together_keys, {16, 32, 48, 96, 128},
              "the turn's rows leave L2 / more turns"),
        index("score_prefetch_tiles", tuning::score_prefetch_tiles, {1, 2, 4, 8},
              "lines leave L1 unused / memory is waited for"),
        index("sketch_prefetch_pairs", tuning::sketch_prefetch_pairs, {2, 4, 8, 16, 32},
              "lines leave L1 unused / memory is waited for"),
        index("code_row_prefetch_keys", tuning::code_row_prefetch_keys, {16, 32, 64, 128, 256},
              "lines leave L1 unused / memory is waited for"),
        index("top_k_samples", tuning::top_k_samples, {256, 512, 1024, 2048, 4096},
              "a longer sample / more scores kept by its threshold"),
        index("mass_weight_bytes", tuning::mass_weight_bytes,
              {mib, 2 * mib, 4 * mib, 8 * mib, 16 * mib},
              "weights leave the last cache / more passes", false),
    };
  }

  // ---- works ------------------------------------------------------------------------------------

  Work work_for(const std::string& value) {
    if (value == "block_keys" || value == "max_panels_per_task") return dense_chunk();
    if (value == "token_together_keys") return token(true);
    if (value.rfind("token_", 0) == 0) return token(false);
    if (value == "score_prefetch_tiles") return select({.sketch = quoka::Sketch::off}, "in float");
    if (value == "sketch_prefetch_pairs")
      return select({.sketch = quoka::Sketch::on}, "by the sketch");
    if (value == "code_row_prefetch_keys") return select_codes();
    if (value == "top_k_samples") return top_k();
    quoka::QuokaOptions options = quoka::QuokaOptions::recommended();
    options.sketch = quoka::Sketch::off;
    return select(options, "by recommended() in float", 2);
  }

  std::string keys_text(Index len) const { return " over " + std::to_string(len) + " keys"; }

  Work attend(std::string what, const Rows& k, const Rows& v, Index q_len) {
    out_ = std::make_unique<Numbers>(k.heads() * group, q_len, 4);
    const Rows q = q_.rows(k.heads() * group, q_len), chunk_k = chunk_k_.rows(k.heads(), q_len),
               chunk_v = chunk_v_.rows(k.heads(), q_len);
    const TensorView<float> out(out_->data(), {1, k.heads() * group, q_len, dim},
                                {0, q_len * dim, dim, 1});
    return {std::move(what),
            [=, this] {
              quoka::attention(q, {k, v}, {chunk_k, chunk_v}, out, {}, quoka::SerialExecutor{},
                               workspace_);
            },
            [this] { return std::vector<float>(out_->data(), out_->data() + out_->size()); }};
  }
  Work dense_chunk() {
    const Index heads = 2, len = std::min<Index>(len_, 4096);
    return attend("a chunk of " + std::to_string(chunk_) + " tokens, 2 KV heads" + keys_text(len),
                  k_.rows(heads, len), v_.rows(heads, len), chunk_);
  }
  Work token(bool side_by_side) {
    return side_by_side ? attend("a token, [len, heads, dim]," + keys_text(len_), k_.side_by_side(),
                                 v_.side_by_side(), 1)
                        : attend("a token" + keys_text(len_), k_.rows(), v_.rows(), 1);
  }

  Work select_from(quoka::QuokaOptions options, std::string what, const Rows& k,
                   const TensorView<const float, 3>& inverse_norms) {
    options.budget = quoka::Budget::keys(std::min<Index>(1024, len_ / 4));
    const quoka::QuokaSelector selector(options);
    state_ = std::make_unique<quoka::QuokaSelector::State>();
    const quoka::SelectorInput input{.q = q_.rows(k.heads() * group, chunk_ / 2),
                                     .k = k,
                                     .logits = quoka::LogitOptions{},
                                     .inverse_norms = inverse_norms};
    selector.appended(input, *state_, quoka::SerialExecutor{});
    return {std::move(what),
            [=, this] { selector.select(input, *state_, keep_, quoka::SerialExecutor{}); },
            [this] { return selected(); }};
  }
  Work select(const quoka::QuokaOptions& options, const std::string& how,
              Index heads = most_heads) {
    const TensorView<const float, 3> none;
    return select_from(options, "selection " + how + keys_text(len_), k_.rows(heads, len_), none);
  }
  Work select_codes() {
    const quoka::Format& format = quoka::q8_0_format();
    const Index bytes = format.row_bytes({dim});
    if (coded_.bytes() == 0) {
      coded_.reserve(most_heads * len_ * bytes);
      norms_.resize(static_cast<std::size_t>(most_heads * len_));
      for (Index row = 0; row < most_heads * len_; ++row) {
        format.narrow(k_.data() + row * dim, {dim}, coded_.data() + row * bytes);
        norms_[static_cast<std::size_t>(row)] = quoka::inverse_norm(k_.data() + row * dim, dim);
      }
    }
    const Rows rows(coded_.data(), format, {1, most_heads, len_, dim}, {0, len_ * bytes, bytes});
    return select_from({}, "selection in q8_0 rows" + keys_text(len_), rows,
                       {norms_.data(), {1, most_heads, len_}, {0, len_, 1}});
  }
  Work top_k() {
    scores_ = quoka::Tensor<float, 3>(1, most_heads, len_);
    fill_normal(scores_.data(), scores_.size(), 6);
    const Index budget = std::min<Index>(1024, len_ / 4);
    return {"the best" + keys_text(len_).replace(1, 4, "of"),
            [=, this] { keep_ = quoka::top_k(scores_, budget); }, [this] { return selected(); }};
  }
  std::vector<float> selected() const {
    std::vector<float> all;
    for (Index head = 0; head < keep_.kv_heads(); ++head)
      for (const auto position : keep_.positions(0, head))
        all.push_back(static_cast<float>(position));
    return all;
  }

  // ---- trying -----------------------------------------------------------------------------------

  double timed(const Value& value, Index candidate, const Work& work) {
    value.set(candidate);
    return quoka_examples::seconds_of(
        [&] {
          for (int i = 0; i < repeats_; ++i) work.run();
        },
        thread_seconds);
  }

  static bool agree(const std::vector<float>& a, const std::vector<float>& b, bool same_bits) {
    if (a.size() != b.size() || a.empty()) return false;
    for (std::size_t i = 0; i < a.size(); ++i)
      if (!(std::abs(a[i] - b[i]) <= (same_bits ? 0.0f : 1e-4f))) return false;
    return true;
  }

  void compare(const Value& value, const Work& work) {
    const Index usual = value.get();
    std::vector<Index> candidates{usual, usual};  // the second is the noise
    for (const Index candidate : value.candidates)
      if (candidate != usual) candidates.push_back(candidate);
    const std::size_t count = candidates.size();

    // Warms up, and looks at the results.
    work.run();
    const std::vector<float> expected = work.result();
    repeats_ = 1;
    double once = 0.0;
    for (const Index candidate : candidates) {
      once += timed(value, candidate, work);
      if (agree(work.result(), expected, value.same_bits)) continue;
      std::cerr << value.name << ": " << candidate << " changes the result\n";
      ++failures_;
    }
    const double of_a_turn =
        std::min(shortest_turn, seconds_ / static_cast<double>(fewest_rounds * count));
    repeats_ =
        static_cast<int>(std::ceil(of_a_turn * static_cast<double>(count) / std::max(once, 1e-9)));
    once *= repeats_;
    const int rounds = static_cast<int>(
        std::clamp<double>(seconds_ / std::max(once, 1e-9), fewest_rounds, most_rounds));
    const auto seconds = quoka_examples::time_in_turns(
        count, rounds, [&](std::size_t i) { return timed(value, candidates[i], work); });
    value.set(usual);

    struct Quartiles {
      double low, middle, high;
    };
    std::vector<Quartiles> times;  // relative to the default's
    for (const auto& of_candidate : seconds) {
      const auto all = ratios(of_candidate, seconds[0]);
      times.push_back({quantile(all, 0.25), quantile(all, 0.5), quantile(all, 0.75)});
    }
    const double noise = std::min(1.0, times[1].low);
    std::size_t best = 0;
    double least = worth;
    for (std::size_t i = 2; i < count; ++i)
      if (times[i].middle < least && times[i].high < noise) best = i, least = times[i].middle;
    fmt::print("\n{}: {} by default. More / less: {}.\n  {}, {} rounds{}\n", value.name, usual,
               value.trades, work.what, rounds,
               value.same_bits ? "" : "; changes the order of sums");
    for (std::size_t i = 1; i < count; ++i)
      fmt::print("  {:>10}  {:.3f} ({:.3f} to {:.3f}){}\n", candidates[i], times[i].middle,
                 times[i].low, times[i].high,
                 i == 1      ? "  the default again"
                 : i == best ? "  better"
                             : "");
    std::fflush(stdout);
    table_.row("{}\t{}\t{}\t{}", value.name, usual,
               best == 0 ? "the default" : std::to_string(candidates[best]),
               best == 0 ? "1" : fmt::format("{:.2f}", least));
  }

  TuneFlags flags_;
  Index len_;
  double seconds_ = 0.0;  // for one value
  int repeats_ = 1;       // of the work in a turn
  int failures_ = 0;
  quoka_examples::Table table_{"value\tdefault\tbest here\ttime"};

  Index chunk_ = std::min<Index>(256, len_);
  Numbers q_{most_heads * group, chunk_, 1}, chunk_k_{most_heads, chunk_, 2},
      chunk_v_{most_heads, chunk_, 3}, k_{most_heads, len_, 7}, v_{most_heads, len_, 8};
  std::unique_ptr<Numbers> out_;
  quoka::AttentionWorkspace workspace_;
  quoka::Buffer<std::byte> coded_;  // the keys as q8_0
  std::vector<float> norms_;
  std::unique_ptr<quoka::QuokaSelector::State> state_;
  Selection keep_;
  quoka::Tensor<float, 3> scores_;
};

}  // namespace

int tune(const TuneFlags& flags) { return Tuner(flags).run(); }

}  // namespace quoka_bench
