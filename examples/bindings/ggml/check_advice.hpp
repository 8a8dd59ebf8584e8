// The results of a pass, and the settings that follow from them.
#pragma once

#include "check_pass.hpp"

#include "support/bootstrap.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace quoka_ggml {

// A mean over samples and its interval of 95 % (support/bootstrap.hpp).
struct Estimate {
  double mean = 0, low = 0, high = 0;
};

// One contender's results up to a length, beside the pass's first one.
struct Outcome {
  std::string name;
  Index length = 0;
  double seconds = 0, speedup = 1;  // to first token
  Estimate gain{1, 1, 1};           // times as fast as the pass's second one, over ubatches
  Estimate perplexity, needles;     // change: in percent; in points of 100
  double kl = 0, agrees = 1, right = 0;
  Index worst_layer = -1;  // of those that select: the one that alone moves logits most
  double worst_layer_kl = 0;
};

// Loss beyond which settings are not recommended, and the least gain that is worth their while. kl:
// beyond exact mode's, and of a single layer. On text that llama.cpp predicts as well as it claims,
// a divergence of 0.01 nats is 1 % of perplexity; but a text's own perplexity rises and falls by
// chance, by several percent over a few hundred positions.
struct Limits {
  double perplexity = 1, kl = 0.01, needles = 5, gain = 1.05;
};

// If the speeds of contenders differ by less than this, the one that loses least is taken: times
// vary by as much.
inline constexpr double alike_in_speed = 1.1;

// Divergence of exact mode's logits, in nats, that other roundings make: some 0.0005 with 8-bit
// weights, for which each layer rounds its input to 8 bits.
inline constexpr double most_rounding = 0.01;

struct Advice {
  // selection: of a contender's settings. They choose keys, or compute exact mode in another
  // arithmetic.
  enum class Use { selection, exact, nothing } use = Use::nothing;
  std::size_t contender = 0;  // of the outcomes
  std::string why;
};

inline Estimate estimate(const std::vector<double>& values) {
  if (values.empty()) return {};
  const auto interval = quoka_examples::Bootstrap(std::ssize(values), 2000).of_mean(values);
  return {quoka_examples::mean(values), interval.low, interval.high};
}

// Times as fast: a's seconds to b's, of all ubatches. Its interval of 95 % is by how much a ubatch
// differs from the next: that what is gained grows along a prompt is not chance.
inline Estimate times_as_fast(std::span<const double> a, std::span<const double> b) {
  const auto sum = [](std::span<const double> x) {
    return std::accumulate(x.begin(), x.end(), 0.0);
  };
  const double ratio = sum(a) / sum(b), n = static_cast<double>(b.size()), mean = sum(b) / n;
  // To first order the ratio varies as the mean of (a[i] - ratio * b[i]) / mean does, whose
  // variance is half of its neighbours' mean squared difference.
  double squares = 0;
  for (std::size_t i = 1; i < a.size(); ++i) {
    const double difference = (a[i] - a[i - 1] - ratio * (b[i] - b[i - 1])) / mean;
    squares += difference * difference;
  }
  const double half = a.size() < 2 ? 0 : 1.96 * std::sqrt(squares / 2 / (n - 1) / n);
  return {ratio, ratio - half, ratio + half};
}

// Losses: of the text from `from` to lengths[last], and of the questions at lengths[first .. last].
inline Outcome outcome(const Pass& pass, const std::vector<Index>& lengths, std::size_t c,
                       const std::string& name, std::size_t first, std::size_t last) {
  const Readings &base = pass.of[0], &own = pass.of[c];
  const Index from = first == 0 ? 0 : lengths[first - 1], to = lengths[last];
  Outcome o;
  o.name = name, o.length = to;
  double base_seconds = 0;
  std::size_t ubatches = 0;
  for (; ubatches < pass.ends.size() && pass.ends[ubatches] <= to; ++ubatches)
    o.seconds += own.seconds[ubatches], base_seconds += base.seconds[ubatches];
  o.speedup = base_seconds / o.seconds;
  if (c > 1)
    o.gain = times_as_fast(std::span(pass.of[1].seconds).first(ubatches),
                           std::span(own.seconds).first(ubatches));
  std::vector<double> nll, right;
  double agree = 0, all = 0, count = 0;
  for (std::size_t i = 0; i < pass.samples.size(); ++i) {
    if (pass.samples[i] < from || pass.samples[i] >= to) continue;
    nll.push_back(own.nll[i] - base.nll[i]);
    o.kl += own.kl[i], agree += own.agrees[i] ? 1 : 0;
  }
  if (!nll.empty()) {
    o.kl /= static_cast<double>(nll.size()), o.agrees = agree / static_cast<double>(nll.size());
    const Estimate change = estimate(nll);
    const auto percent = [](double x) { return 100 * std::expm1(x); };
    o.perplexity = {percent(change.mean), percent(change.low), percent(change.high)};
  }
  for (std::size_t l = first; l <= last; ++l)
    for (std::size_t q = 0; q < own.right[l].size(); ++q, ++count)
      all += own.right[l][q], right.push_back(100 * (own.right[l][q] - base.right[l][q]));
  if (count > 0) o.right = all / count;
  o.needles = estimate(right);
  return o;
}

// Exact mode as texts call it: with its arithmetic where there are several.
inline std::string mode_of(const Outcome& exact) {
  return exact.name == "exact" ? "exact mode" : exact.name;
}

// Logits that are off by less than twice what exact mode's own roundings move: they are llama.cpp's
// except for rounding. That a text does better or worse by them is chance; questions, too, where
// every key is attended to.
inline bool is_rounding(const Outcome& o, const Outcome& exact) { return o.kl < 2 * exact.kl; }
inline bool is_exact(const Outcome& o) { return o.name.starts_with("exact"); }

// The losses beyond the limits: perplexity that falls is not a loss, nor is a rise that chance
// explains. Empty: none.
inline std::string loses_too_much(const Outcome& o, const Outcome& exact, const Limits& limits) {
  std::vector<std::string> all;
  if (o.perplexity.mean > limits.perplexity && o.perplexity.low > 0 && !is_rounding(o, exact))
    all.push_back(fmt::format("perplexity {:+.2f} %, at most {:+g} % is allowed", o.perplexity.mean,
                              limits.perplexity));
  if (o.kl > exact.kl + limits.kl)
    all.push_back(fmt::format("divergence {:.4f}, at most {:g} more than {}'s {:.4f} is allowed",
                              o.kl, limits.kl, mode_of(exact), exact.kl));
  if (o.worst_layer_kl > limits.kl)
    all.push_back(fmt::format("layer {} alone diverges by {:.4f}, at most {:g} is allowed",
                              o.worst_layer, o.worst_layer_kl, limits.kl));
  if (-o.needles.mean > limits.needles && !(is_exact(o) && is_rounding(o, exact)))
    all.push_back(fmt::format("needles {:+.1f} points, at most {:g} may be lost", o.needles.mean,
                              limits.needles));
  return fmt::format("{}", fmt::join(all, "; "));
}
inline std::string losses(const Outcome& o) {
  return fmt::format(
      "perplexity {:+.2f} % ({:+.2f} to {:+.2f}), divergence {:.4f}, needles {:+.1f} points "
      "({:+.1f} to {:+.1f})",
      o.perplexity.mean, o.perplexity.low, o.perplexity.high, o.kl, o.needles.mean, o.needles.low,
      o.needles.high);
}

// outcomes at the longest length, where most is lost: llama.cpp's own, exact mode's, then those of
// other arithmetics and those that select.
inline Advice advise(const std::vector<Outcome>& outcomes, const Limits& limits) {
  const Outcome& exact = outcomes[1];
  if (exact.kl > most_rounding)
    return {Advice::Use::nothing, 0,
            fmt::format("do not use it here: {}'s logits are off by a divergence of {:.4f} from "
                        "llama.cpp's, rounding explains {:g}. Please report it",
                        mode_of(exact), exact.kl, most_rounding)};
  const auto as_exact = [&](const Outcome& o) { return o.speedup / exact.speedup; };
  const auto pays = [&](const Outcome& o) {
    return as_exact(o) >= limits.gain && o.gain.low > std::min(1.0, limits.gain);
  };
  std::optional<std::size_t> best, fastest;  // of those that lose little: that pay; of all
  std::size_t nearest = 0;                   // the fastest, whatever it loses
  for (std::size_t i = 2; i < outcomes.size(); ++i) {
    const Outcome& o = outcomes[i];
    if (nearest == 0 || o.speedup > outcomes[nearest].speedup) nearest = i;
    if (loses_too_much(o, exact, limits).empty() &&
        (!fastest || o.speedup > outcomes[*fastest].speedup))
      fastest = i;
  }
  for (std::size_t i = 2; fastest && i < outcomes.size(); ++i) {
    const Outcome& o = outcomes[i];
    if (pays(o) && loses_too_much(o, exact, limits).empty() &&
        alike_in_speed * o.speedup >= outcomes[*fastest].speedup &&
        (!best || o.kl < outcomes[*best].kl))
      best = i;
  }
  if (best)
    return {Advice::Use::selection, *best,
            fmt::format("{:.2f} times as fast to the first token of {} tokens as llama.cpp, {:.2f} "
                        "as {}: {}",
                        outcomes[*best].speedup, outcomes[*best].length, as_exact(outcomes[*best]),
                        mode_of(exact), losses(outcomes[*best]))};
  std::string but = "no other settings were tried";
  if (fastest)
    but = fmt::format("{} is only {:.2f} times as fast as {} ({:.2f} to {:.2f}), {:.2f} are wanted",
                      outcomes[*fastest].name, as_exact(outcomes[*fastest]), mode_of(exact),
                      outcomes[*fastest].gain.low, outcomes[*fastest].gain.high, limits.gain);
  else if (nearest != 0)
    but = fmt::format("{} loses too much: {}", outcomes[nearest].name,
                      loses_too_much(outcomes[nearest], exact, limits));
  if (exact.speedup >= limits.gain)
    return {Advice::Use::exact, 1,
            fmt::format("{} is {:.2f} times as fast as llama.cpp; {}", mode_of(exact),
                        exact.speedup, but)};
  return {Advice::Use::nothing, 0,
          fmt::format("do not use it here: {} is {:.2f} times as fast as llama.cpp; {}",
                      mode_of(exact), exact.speedup, but)};
}

// The least past from which contender c is faster than exact mode, and stays so: a length, or 0.
inline Index pays_from(const Pass& pass, const std::vector<Index>& lengths, std::size_t c,
                       double gain) {
  Index from = lengths.back();
  for (std::size_t l = lengths.size(); l-- > 0;) {
    const Index begin = l == 0 ? 0 : lengths[l - 1];
    double exact = 0, own = 0;
    for (std::size_t i = 0; i < pass.ends.size(); ++i)
      if (begin < pass.ends[i] && pass.ends[i] <= lengths[l])
        exact += pass.of[1].seconds[i], own += pass.of[c].seconds[i];
    if (exact < gain * own) break;
    from = begin;
  }
  return from;
}

// Were the losses of the second text within what the first one's interval promised (a divergence
// half as large again is not another one)? Empty: yes. Exact mode promises llama.cpp's logits and
// nothing else.
inline std::string broken_promise(const Outcome& promised, const Outcome& kept,
                                  const Limits& limits, Advice::Use use) {
  if (use == Advice::Use::exact)
    return kept.kl <= most_rounding
               ? ""
               : fmt::format("divergence {:.4f}, rounding explains {:g}", kept.kl, most_rounding);
  if (kept.perplexity.low > std::max(promised.perplexity.high, limits.perplexity))
    return fmt::format("perplexity {:+.2f} % at the least, {:+.2f} were promised at the most",
                       kept.perplexity.low, promised.perplexity.high);
  if (const double most = std::max(1.5 * promised.kl, limits.kl); kept.kl > most)
    return fmt::format("divergence {:.4f}, {:.4f} is the most", kept.kl, most);
  if (kept.needles.high < std::min(promised.needles.low, -limits.needles))
    return fmt::format("needles {:+.1f} points at the most, {:+.1f} were promised at the least",
                       kept.needles.high, promised.needles.low);
  return "";
}

// Two passes time exact mode beside llama.cpp. Apart by more than a seventh, they say of the
// machine what they say of neither: something else ran. Empty: they agree, or one has none.
inline std::string unsteady(const std::vector<Outcome>& first, const std::vector<Outcome>& second) {
  const auto speedup = [](const std::vector<Outcome>& all) {
    for (const Outcome& o : all)
      if (is_exact(o)) return o.speedup;  // the first is compared with
    return 0.0;
  };
  const double a = speedup(first), b = speedup(second);
  if (!(a > 0 && b > 0) || std::max(a, b) <= 1.15 * std::min(a, b)) return "";
  return fmt::format(
      "exact mode was {:.2f} times as fast as llama.cpp on one half of the text and {:.2f} times "
      "on "
      "the other: times are not steady here. Run it again with nothing else running, or with "
      "fewer --threads",
      a, b);
}

inline void to_json(nlohmann::json& json, const Estimate& e) { json = {e.mean, e.low, e.high}; }
inline void to_json(nlohmann::json& json, const Outcome& o) {
  json = {{"name", o.name},       {"length", o.length}, {"seconds", o.seconds},
          {"speedup", o.speedup}, {"gain", o.gain},     {"perplexity", o.perplexity},
          {"needles", o.needles}, {"kl", o.kl},         {"agrees", o.agrees},
          {"right", o.right}};
}

}  // namespace quoka_ggml
