// What a method loses on a model with real weights, and what it takes: the last tokens of a text attend to keys that
// each method selects, and their logits are compared with those of exact attention.
//
//   frontier MODEL.gguf TOKENS.json --selectors LIST --parts 4,8,16 --json FILE       (frontier.py makes both files)
//
//   prefix   all tokens but the last ones are read with all keys, once; every method gets these keys and values
//   kl       of the logits to exact attention's, nat: mean and interval of 95 % over the last tokens
//   loss     change of the text's negative log-likelihood, nat, over the same tokens but the last
//   keys     share of the past that a query head attends to, mean over layers and chunks
//   time     of exact attention's on the same queries, keys and values: selecting, attending and appending, of some
//            layers; methods take turns, and ratios are of the same round
//
// The first `dense` layers attend to all keys. Budgets are counts: the text's tokens divided by `parts`. Methods with
// "threshold" in their names have their own number of keys and are run once.
#include "support/ask_model.hpp"
#include "support/bootstrap.hpp"
#include "support/clock.hpp"
#include "support/machine.hpp"
#include "support/program.hpp"
#include "support/selector_flags.hpp"
#include "support/statistics.hpp"
#include "support/table.hpp"

#include <cmath>
#include <fstream>
#include <iterator>
#include <numeric>
#include <string>
#include <vector>

namespace {

using namespace quoka_examples;
using Tensor = quoka::Tensor<float>;
using Rows = SmallModel::Rows;

struct Flags {
  std::string model, tokens, selectors = "quoka.recommended,quoka.balanced,quoka";
  std::vector<Index> parts{4, 8, 16};
  Index last = 512, chunk = 128, dense = 1, timed_layers = 5;
  int rounds = 7;
};

// A method's layers with its budget.
struct Contender {
  std::string method, budget;  // as shown
  LayerStack layers;
  std::vector<double> kl = {}, loss = {};  // by position
  double kept = 0.0;
  Index chunks = 0;
};

// What attention gets at one chunk of one layer.
struct Step {
  Tensor q, k, v;
};

Tensor copied(AnyLayer::View x) {
  Tensor copy(1, x.heads(), x.len(), x.dim());
  quoka::TensorView<float> to = copy;
  for (Index h = 0; h < x.heads(); ++h)
    for (Index t = 0; t < x.len(); ++t)
      for (Index c = 0; c < x.dim(); ++c) to.row(0, h, t)[c] = x.row(0, h, t)[c];
  return copy;
}

// Log-probabilities of each row, in place.
void normalise(Rows& logits) {
  for (Index t = 0; t < logits.rows(); ++t) {
    const float most = logits.row(t).maxCoeff();
    const double sum = (logits.row(t).array() - most).exp().cast<double>().sum();
    logits.row(t).array() -= most + static_cast<float>(std::log(sum));
  }
}

class Frontier {
 public:
  Frontier(const Flags& flags, std::vector<Token> tokens)
      : flags_(flags), model_(GgufFile(flags.model)), tokens_(std::move(tokens)) {
    require_at_least("tokens before the last ones", first(), flags.chunk);
    require_equal("the remainder of these in chunks", first() % flags.chunk, "none", 0);
    read_exactly();
  }

  std::vector<Contender> run() {
    std::vector<Contender> all;
    all.push_back(made("dense", "-", quoka::Budget::keys(1)));
    for (const std::string& method : parse_methods(flags_.selectors)) {
      if (method.find("threshold") != std::string::npos) {
        all.push_back(made(method, "own", quoka::Budget::share(1.0)));
        continue;
      }
      for (const Index part : flags_.parts)
        all.push_back(made(method, fmt::format("1/{}", part),
                           quoka::Budget::keys(std::ssize(tokens_) / part)));
    }
    for (Contender& one : all) compare(one);
    return all;
  }

  // Seconds by contender and round.
  std::vector<std::vector<double>> times(std::vector<Contender>& all) {
    Tensor out(1, model_.q_heads, flags_.chunk, model_.head_dim);
    return time_in_turns(all.size(), flags_.rounds, [&](std::size_t i) {
      double seconds = 0.0;
      for (Index l = flags_.dense; l < model_.layers(); l += stride()) {
        AnyLayer& layer = *all[i].layers[at(l)];
        layer.truncate(first());
        for (Index begin = first(); begin < std::ssize(tokens_); begin += flags_.chunk) {
          const Step& step = steps_[at(l)][at(begin / flags_.chunk)];
          const Index n = step.q.dimension(2);
          const quoka::TensorView<float> to = quoka::TensorView<float>(out).slice(0, n);
          seconds += seconds_of([&] { layer.forward(step.q, step.k, step.v, to, one_thread_); });
        }
      }
      return seconds;
    });
  }

  Index first() const { return std::ssize(tokens_) - flags_.last; }
  Index last() const { return flags_.last; }
  const SmallModel& model() const { return model_; }
  Index timed() const { return quoka::ceil_div(model_.layers() - flags_.dense, stride()); }

 private:
  static std::size_t at(Index i) { return static_cast<std::size_t>(i); }
  Index stride() const {
    return std::max<Index>(1, (model_.layers() - flags_.dense) / flags_.timed_layers);
  }
  std::span<const Token> chunk_at(Index begin) const {
    const Index n = std::min(flags_.chunk, std::ssize(tokens_) - begin);
    return std::span(tokens_).subspan(at(begin), at(n));
  }

  // Everything by dense attention; what its layers were given stays in steps_.
  void read_exactly() {
    const LayerStack layers = layers_of("dense", quoka::Budget::keys(1));
    steps_.resize(at(model_.layers()));
    exact_.resize(flags_.last, model_.vocabulary);
    for (Index begin = 0; begin < std::ssize(tokens_); begin += flags_.chunk) {
      const auto chunk = chunk_at(begin);
      const Rows states = model_.run(chunk, begin,
                                     [&](Index i, AnyLayer::View q, AnyLayer::View k,
                                         AnyLayer::View v, SmallModel::OutView out) {
                                       steps_[at(i)].push_back({copied(q), copied(k), copied(v)});
                                       layers[at(i)]->forward(q, k, v, out, one_thread_);
                                     });
      if (begin >= first())
        exact_.middleRows(begin - first(), states.rows()) = model_.logits(states);
    }
    normalise(exact_);
  }

  LayerStack layers_of(const std::string& method, quoka::Budget budget) const {
    const quoka::LayerShape shape{.q_heads = model_.q_heads,
                                  .kv_heads = model_.kv_heads,
                                  .head_dim = model_.head_dim,
                                  .v_dim = model_.head_dim};
    std::vector<Index> which(at(model_.layers()));
    std::iota(which.begin(), which.end(), Index{0});
    LayerStack layers =
        make_layers(method, shape, {.budget = budget}, {}, which, model_.layers(), flags_.dense);
    LayerStack dense = make_layers("dense", shape, {}, {}, which, model_.layers());
    for (Index i = 0; i < flags_.dense; ++i) layers[at(i)] = std::move(dense[at(i)]);
    return layers;
  }

  // With the prefix in its caches.
  Contender made(const std::string& method, const std::string& budget, quoka::Budget keys) const {
    Contender one{method, budget, layers_of(method, keys)};
    for (Index i = 0; i < model_.layers(); ++i)
      for (Index begin = 0; begin < first(); begin += flags_.chunk) {
        const Step& step = steps_[at(i)][at(begin / flags_.chunk)];
        one.layers[at(i)]->append(step.q, step.k, step.v, one_thread_);
      }
    return one;
  }

  void compare(Contender& one) const {
    for (Index begin = first(); begin < std::ssize(tokens_); begin += flags_.chunk) {
      const Rows states = model_.run(
          chunk_at(begin), begin,
          [&](Index i, AnyLayer::View q, AnyLayer::View k, AnyLayer::View v,
              SmallModel::OutView out) {
            AnyLayer& layer = *one.layers[at(i)];
            layer.forward(q, k, v, out, one_thread_);
            const quoka::Selection& selection = layer.selection();
            if (i < flags_.dense) return;
            one.kept += selection.kv_len() == 0 || selection.is_all()
                            ? 1.0
                            : static_cast<double>(selection.sum_of_counts()) /
                                  static_cast<double>(selection.heads() * selection.kv_len());
            ++one.chunks;
          });
      Rows ours = model_.logits(states);
      normalise(ours);
      for (Index t = 0; t < ours.rows(); ++t) {
        const auto exact = exact_.row(begin - first() + t);
        one.kl.push_back(
            (exact.array().exp() * (exact - ours.row(t)).array()).cast<double>().sum());
        if (const std::size_t next = at(begin + t + 1); next < tokens_.size())
          one.loss.push_back(static_cast<double>(exact(tokens_[next]) - ours(t, tokens_[next])));
      }
    }
  }

  const Flags& flags_;
  SmallModel model_;
  std::vector<Token> tokens_;
  std::vector<std::vector<Step>> steps_;  // [layers][chunks]
  Rows exact_;                            // [last, vocabulary], log-probabilities
  mutable quoka::ThreadPool one_thread_{1};
};

nlohmann::json rounded(const std::vector<double>& values) {
  const Interval i = Bootstrap(std::ssize(values), 2000).of_mean(values);
  const auto digits = [](double x) { return std::round(1e6 * x) / 1e6; };
  return {digits(mean(values)), digits(i.low), digits(i.high)};
}

int run(const Flags& flags, Report& report) {
  std::ifstream file(flags.tokens);
  Frontier frontier(flags, nlohmann::json::parse(file).get<std::vector<Token>>());
  std::vector<Contender> all = frontier.run();
  const auto seconds = frontier.times(all);
  const SmallModel& m = frontier.model();
  report.add({{"tokens", frontier.first() + frontier.last()},
              {"last", frontier.last()},
              {"chunk", flags.chunk},
              {"dense_layers", flags.dense},
              {"timed_layers", frontier.timed()},
              {"rounds", flags.rounds},
              {"q_heads", m.q_heads},
              {"kv_heads", m.kv_heads},
              {"head_dim", m.head_dim},
              {"results", nlohmann::json::array()}});
  Table table("method\tbudget\tkeys\tKL, nat\tof exact attention's time");
  for (std::size_t i = 0; i < all.size(); ++i) {
    const Contender& one = all[i];
    std::vector<double> of_dense;
    for (std::size_t r = 0; r < seconds[i].size(); ++r)
      of_dense.push_back(seconds[i][r] / seconds[0][r]);
    std::sort(of_dense.begin(), of_dense.end());
    const double keys = one.kept / static_cast<double>(std::max<Index>(1, one.chunks));
    const nlohmann::json kl = rounded(one.kl);
    table.row("{}\t{}\t{:.3f}\t{:.4f} ({:.4f} to {:.4f})\t{:.3f} ({:.3f} to {:.3f})", one.method,
              one.budget, keys, kl[0].get<double>(), kl[1].get<double>(), kl[2].get<double>(),
              median(of_dense), of_dense.front(), of_dense.back());
    report["results"].push_back(
        {{"selector", one.method},
         {"budget", one.budget},
         {"keys", std::round(1e4 * keys) / 1e4},
         {"samples", one.kl.size()},
         {"kl", kl},
         {"loss", rounded(one.loss)},
         {"seconds", median(seconds[i])},
         {"of_exact", {median(of_dense), of_dense.front(), of_dense.back()}}});
  }
  fmt::print("{}\n{} tokens, the last {} select\n\n", machine(), frontier.first() + frontier.last(),
             frontier.last());
  table.print();
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Flags flags;
  Program app(argc, argv, "What methods lose on a model with real weights, and what they take");
  app.add_option("model", flags.model, "a GGUF file that frontier.py made")
      ->required()
      ->check(CLI::ExistingFile);
  app.add_option("tokens", flags.tokens, "a text's tokens, a list in JSON")
      ->required()
      ->check(CLI::ExistingFile);
  app.add_option("--selectors", flags.selectors, "a list of methods")->capture_default_str();
  app.add_option("--parts", flags.parts, "keys: the tokens divided by each of these numbers")
      ->delimiter(',')
      ->check(whole_number(1, 1024))
      ->capture_default_str();
  app.add_option("--last", flags.last, "tokens that select")
      ->check(whole_number(2, 65536))
      ->capture_default_str();
  app.add_option("--dense", flags.dense, "first layers that attend to all keys")
      ->check(whole_number(0, 1024))
      ->capture_default_str();
  app.add_option("--timed-layers", flags.timed_layers, "about this many, evenly spaced")
      ->check(whole_number(1, 1024))
      ->capture_default_str();
  app.add_option("--chunk", flags.chunk, "tokens that select together")
      ->check(whole_number(1, 65536))
      ->capture_default_str();
  add_rounds(app, flags.rounds);
  return app.run([&] { return run(flags, app.report); });
}
