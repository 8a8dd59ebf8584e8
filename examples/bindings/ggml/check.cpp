// "Does it work on my model?" Runs one model in unmodified llama.cpp, with this backend and without, and measures gain
// and loss by settings. examples/bindings/ggml/check.sh builds and calls it.
//
//     check MODEL.gguf [TEXT ...] [--quick] [--lengths 2048,8192] [--out FOLDER]
//
//   rounding llama.cpp without flash attention beside llama.cpp, with --rounding: the effect of its own rounding
//   measure  llama.cpp, exact mode and every preset, in each arithmetic, read the first half of the text side by side
//            (check_pass.hpp)
//   layers   each layer selects alone, over a dense cache, by the settings that lose least: how far are the logits off?
//   refine   if nothing is good enough: the layers that hurt stay dense, of a chunk more queries choose, and what they
//            leave out counts as one more key
//   verify   the written settings on the second half of the text, with other needles: do they keep the promise? If not,
//            and they are as measured first, they are refined, and verified again
//
// FOLDER/check.json holds all of it and is written after each step; a run that was stopped goes on there.
// FOLDER/settings.json is a file for QUOKA_CONFIG, written if something is recommended. check_page.py makes a page of
// the JSON.
#include "arithmetics.hpp"
#include "check_advice.hpp"
#include "node.hpp"
#include "settings_text.hpp"

#include "support/budget_text.hpp"
#include "support/program.hpp"
#include "support/progress.hpp"
#include "support/table.hpp"

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <numeric>
#include <optional>
#include <thread>

#include <unistd.h>

namespace {

using namespace quoka_ggml;
using nlohmann::json;

constexpr Index question_room = 96;
constexpr const char* own_rule = "own";  // in place of a budget: what the preset does without one
constexpr std::uint32_t measuring_seed = 1, verifying_after = 1000;
const std::vector<std::string> settings_names{"mode",   "budget", "dense_layers", "min_past",
                                              "config", "chunk",  "decode",       "min_queries",
                                              "sketch", "stats",  "arithmetic",   "queries"};

// For contexts to come.
void settings(const json& wanted) {
  for (const std::string& name : settings_names) unsetenv(variable_of(name).c_str());
  set_variables(wanted);
  setenv("QUOKA_QUIET", "1", 1);
  restart_quoka();
}

struct Model {
  llama_model_ptr model;
  const llama_vocab* vocab;
  std::string name, description;
  Index layers, q_heads, kv_heads, head_dim, context;

  explicit Model(const std::string& path)
      : model(load_model(path)),
        vocab(llama_model_get_vocab(model.get())),
        name(std::filesystem::path(path).filename().string()) {
    const llama_model* const m = model.get();
    char text[256];
    llama_model_desc(m, text, sizeof text);
    description = text;
    layers = llama_model_n_layer(m), q_heads = llama_model_n_head(m),
    kv_heads = llama_model_n_head_kv(m);
    context = llama_model_n_ctx_train(m);
    head_dim = llama_model_n_embd(m) / std::max<Index>(1, q_heads);
    if (llama_model_meta_val_str(m, "general.architecture", text, sizeof text) > 0 &&
        llama_model_meta_val_str(m, (std::string(text) + ".attention.key_length").c_str(), text,
                                 sizeof text) > 0)
      head_dim = std::atoll(text);
    if (llama_model_is_recurrent(m))
      throw std::invalid_argument(name + " is recurrent: it has no attention to select for");
    if (llama_model_has_encoder(m))
      throw std::invalid_argument(name + " has an encoder: nothing is cached");
    if (llama_vocab_type(vocab) == LLAMA_VOCAB_TYPE_NONE)
      throw std::invalid_argument(name + " has no vocabulary to read a text with");
  }
  json described() const {
    return {{"file", name},       {"description", description}, {"layers", layers},
            {"q_heads", q_heads}, {"kv_heads", kv_heads},       {"head_dim", head_dim},
            {"context", context}};
  }
};

struct Flags {
  std::string model, out, cache = "f16";
  std::vector<std::string> texts{QUOKA_GGML_PROMPT}, modes{"paper", "recommended"},
      arithmetics{"automatic", "bf16"};
  std::vector<std::string> budgets;  // as in settings
  std::vector<Index> lengths;
  Index ubatch = 256, samples = 384, questions = 12, together = 0;
  int threads = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  std::uint32_t seed = measuring_seed;  // of the facts that are read first
  bool quick = false, fresh = false, rounding = false, measure_only = false;
  Limits limits;
};

std::string read_texts(const std::vector<std::string>& paths) {
  std::string all;
  for (const std::string& path : paths) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::invalid_argument("cannot read " + path);
    all.append(std::istreambuf_iterator<char>(file), {});
    all += '\n';
  }
  return all;
}

// Memory that a process can have without swapping: pages that hold files count as available.
double available_bytes() {
  std::ifstream lines("/proc/meminfo");
  for (std::string name, unit; lines >> name;) {
    double kib = 0;
    if (!(lines >> kib)) break;
    std::getline(lines, unit);
    if (name == "MemAvailable:") return kib * 1024;
  }
  return static_cast<double>(sysconf(_SC_AVPHYS_PAGES)) *
         static_cast<double>(sysconf(_SC_PAGESIZE));
}

class Check {
 public:
  Check(Flags flags, json& result, std::function<void()> save)
      : flags_(std::move(flags)), result_(result), save_(std::move(save)), model_(flags_.model) {
    prepare();
  }

  int run() {
    const double start = quoka_examples::wall_seconds();
    const double expected = say_how_long();
    work();
    if (expected > 0)
      fmt::print(stderr, "check: that took {}, {} were expected\n",
                 duration(quoka_examples::wall_seconds() - start), duration(expected));
    return 0;
  }

 private:
  void work() {
    if (flags_.rounding)
      pass("rounding", measured_text_,
           {tried_[0], {"llama.cpp without flash attention", nullptr, false}});
    measure();
    if (flags_.measure_only) return;
    look_at_layers();
    decide();
    verify();
  }

  struct Tried {
    std::string name;
    json settings;  // null: llama.cpp's own. Those to verify are a file's, {"config": its path}.
    bool flash = true;
    bool selects() const { return settings.contains("mode") && settings.at("mode") != "exact"; }
  };

  void prepare() {
    if (flags_.lengths.empty()) {
      const Index most =
          std::min<Index>(model_.context - question_room, flags_.quick ? 2048 : 8192);
      for (Index length = 512; length < most; length *= 2) flags_.lengths.push_back(length);
      if (!flags_.lengths.empty() && flags_.lengths.back() * 5 > most * 4)
        flags_.lengths.pop_back();
      flags_.lengths.push_back(most);
    }
    std::sort(flags_.lengths.begin(), flags_.lengths.end());
    const Index longest = flags_.lengths.back();
    if (flags_.lengths.front() < 128)
      throw std::invalid_argument(
          fmt::format("--lengths {}: at least 128 tokens", flags_.lengths.front()));
    if (longest + question_room > model_.context)
      throw std::invalid_argument(fmt::format(
          "--lengths {}: with {} tokens of a question it is longer than the model's context of {}; "
          "--lengths {} is the longest that works",
          longest, question_room, model_.context, model_.context - question_room));
    if (flags_.budgets.empty()) {
      const auto part = [&](Index of) {
        return std::max<Index>(64, (longest / of + 32) / 64 * 64);
      };
      flags_.budgets = {own_rule};
      if (!flags_.quick) flags_.budgets.push_back(std::to_string(part(8)));
    }
    tried_ = {{"llama.cpp", nullptr}};
    add_in_each_arithmetic("exact", {{"mode", "exact"}});
    for (const std::string& mode : flags_.modes)
      for (const std::string& budget :
           mode == "exact" ? std::vector<std::string>{} : flags_.budgets) {
        json settings{{"dense_layers", 1}};
        if (budget != own_rule) settings["budget"] = value_of(budget);
        settings.update(settings_of_mode(mode));
        add_in_each_arithmetic(budget == own_rule ? mode : mode + " " + budget, settings);
      }
    const std::string text = read_texts(flags_.texts);
    const int facts =
        flags_.questions == 0 ? 0 : static_cast<int>(std::clamp<Index>(longest / 80, 12, 96));
    measured_text_ = Reader(model_.vocab, flags_.seed).read(text, longest, facts);
    verified_text_ =
        flags_.measure_only
            ? Reading{}
            : Reader(model_.vocab, flags_.seed + verifying_after)
                  .read(std::string_view(text).substr(measured_text_.characters), longest, facts);
    const json asked{{"model", model_.described()},
                     {"lengths", flags_.lengths},
                     {"tried", names(tried_)},
                     {"ubatch", flags_.ubatch},
                     {"threads", flags_.threads},
                     {"cache", flags_.cache},
                     {"samples", flags_.samples},
                     {"questions", flags_.questions},
                     {"facts", facts},
                     {"seed", flags_.seed},
                     {"text", std::to_string(std::hash<std::string>{}(text))},
                     {"limits",
                      {{"perplexity", flags_.limits.perplexity},
                       {"kl", flags_.limits.kl},
                       {"needles", flags_.limits.needles},
                       {"gain", flags_.limits.gain}}}};
    if (result_.contains("asked") && (flags_.fresh || result_["asked"] != asked)) {
      if (!flags_.fresh)
        fmt::print(stderr, "check: {}/check.json is of other settings: starting over\n",
                   flags_.out);
      result_ = json::object();
    }
    if (result_.contains("steps")) fmt::print(stderr, "check: goes on where it stopped\n");
    result_["asked"] = asked;
    result_["cpu"] = quoka_examples::cpu_name(),
    result_["build"] = quoka_examples::build_description();
    json texts = json::array();
    for (const std::string& path : flags_.texts)
      texts.push_back(std::filesystem::path(path).filename().string());
    result_["texts"] = texts;
  }

  // Arithmetics that come to the same here are one, and where all are one no name says which.
  void add_in_each_arithmetic(const std::string& name, const json& settings) {
    const ggml_type type = cache_type(flags_.cache);
    std::vector<Tried> all;
    for (const std::string& asked : flags_.arithmetics) {
      Tried one{name + " " +
                    name_of(arithmetic_used(arithmetic_named(asked), type, type, flags_.ubatch, 1)),
                settings};
      if (asked != "automatic") one.settings["arithmetic"] = asked;
      if (std::none_of(all.begin(), all.end(), [&](const Tried& x) { return x.name == one.name; }))
        all.push_back(std::move(one));
    }
    if (all.size() == 1) all[0].name = name;
    tried_.insert(tried_.end(), all.begin(), all.end());
  }
  static json names(const std::vector<Tried>& tried) {
    json all = json::array();
    for (const Tried& one : tried) all.push_back(one.name);
    return all;
  }
  llama_context_params context() const {
    return context_params(flags_.lengths.back() + question_room, flags_.ubatch, flags_.threads,
                          flags_.cache);
  }
  // llama.cpp's own comes first; after it the library stays loaded.
  Contender contender(const Tried& tried) {
    if (tried.settings.is_null()) {
      if (ggml_backend_reg_t const quoka = ggml_backend_reg_by_name("QuoKA"))
        ggml_backend_unload(quoka);
    } else {
      settings(tried.settings);
    }
    llama_context_params params = context();
    if (!tried.flash) params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    return {tried.name, std::make_unique<Session>(model_.model.get(), params)};
  }

  // ---- before it starts ----

  // Two ubatches of llama.cpp alone say how long all of them may take, and whether the model's memory can forget a
  // question's tokens. Returns the seconds, or 0 where nothing is left to do.
  double say_how_long() {
    if (is_done("verify") || (is_done("layers") && result_.contains("advice"))) return 0;
    Contender alone = contender(tried_[0]);
    const Index count = std::min(flags_.ubatch, flags_.lengths.front());
    std::vector<TokenAt> batch;
    for (Index i = 0; i < count; ++i)
      batch.push_back(
          {measured_text_.tokens[static_cast<std::size_t>(i)], static_cast<llama_pos>(i)});
    batch.back().logits = true;
    double seconds = 0;
    for (int turn = 0; turn < 2; ++turn) {  // the first reads the model's file
      const double start = quoka_examples::wall_seconds();
      alone.session->decode(batch);
      (void)alone.session->logits(static_cast<int>(count) - 1);
      seconds = quoka_examples::wall_seconds() - start;
      alone.session->cut(turn == 0 ? count / 2 : 0);
      if (turn == 0) alone.session->cut(0);
    }
    // A token's multiply-adds: the weights', and at half of the longest prompt attention's.
    const auto longest = static_cast<double>(flags_.lengths.back());
    const double weights = static_cast<double>(llama_model_n_params(model_.model.get())),
                 attention = static_cast<double>(model_.layers * model_.q_heads * model_.head_dim) *
                             longest;
    const double a_token = seconds / static_cast<double>(count) * (1 + attention / weights);
    const auto tried = static_cast<double>(tried_.size());
    const double most = static_cast<double>(together()) - 2;
    const double readers =  // llama.cpp and exact mode in each group
        tried - 2 + 2 * std::max(1.0, std::ceil((tried - 2) / most));
    const double left = is_done("measure") ? 0 : readers * longest,
                 layers = longest + 256.0 * static_cast<double>(model_.layers),
                 rest = left + (is_done("layers") || !selecting() ? 0 : layers) + 3 * longest;
    if (flags_.measure_only) {
      fmt::print(stderr, "check: {} settings read {} tokens: about {} with {} threads\n",
                 tried_.size(), flags_.lengths.back(), duration(a_token * left), flags_.threads);
      return a_token * left;
    }
    fmt::print(stderr,
               "check: {} settings read {} tokens, each of {} layers selects alone, and what is "
               "chosen reads {} more: about {} with {} threads, half as much again where nothing "
               "is good enough at once\n",
               tried_.size(), flags_.lengths.back(), model_.layers, flags_.lengths.back(),
               duration(a_token * rest), flags_.threads);
    return a_token * rest;
  }
  static std::string duration(double seconds) {
    if (seconds < 90) return fmt::format("{:.0f} s", std::max(1.0, seconds));
    if (seconds < 90 * 60) return fmt::format("{:.0f} minutes", seconds / 60);
    return fmt::format("{:.1f} hours", seconds / 3600);
  }

  // ---- a pass, or what is left of it ----

  // Contenders whose caches fit half of the memory read side by side. A run that goes on keeps the
  // number that it began with, however much memory is free by then: its groups are its steps.
  Index together() {
    json& chosen = result_["together"];
    if (flags_.together > 0) {
      chosen = std::max<Index>(3, flags_.together);
    } else if (chosen.is_null()) {
      const double cell =
          2.0 * static_cast<double>(model_.layers * model_.kv_heads * model_.head_dim) * 2;
      const double cache =
          cell * static_cast<double>(flags_.lengths.back() + question_room) + 100e6;
      chosen = std::max<Index>(3, static_cast<Index>(available_bytes() / 2 / cache));
    }
    return chosen.get<Index>();
  }
  json& step(const std::string& name) { return result_["steps"][name]; }
  bool is_done(const std::string& name) {
    return result_.contains("steps") && result_["steps"].contains(name);
  }

  // The first two are in each group: all others are compared with them.
  std::vector<Outcome> pass(const std::string& name, const Reading& reading,
                            const std::vector<Tried>& tried) {
    const std::size_t most = static_cast<std::size_t>(together()) - 2;
    std::vector<Outcome> all;
    for (std::size_t begin = 2; begin == 2 || begin < tried.size(); begin += most) {
      std::vector<Tried> group(tried.begin(), tried.begin() + 2);
      for (std::size_t i = begin; i < std::min(tried.size(), begin + most); ++i)
        group.push_back(tried[i]);
      const std::string part =
          group.size() == tried.size() ? name : fmt::format("{} {}", name, begin - 1);
      if (!is_done(part)) step(part) = one_pass(name, reading, group), save_();
      const std::vector<Outcome> outcomes = outcomes_of(step(part)["longest"]);
      all.insert(all.end(), outcomes.begin() + (begin == 2 ? 0 : 2), outcomes.end());
    }
    return all;
  }
  json one_pass(const std::string& name, const Reading& reading, const std::vector<Tried>& tried) {
    std::vector<Contender> contenders;
    for (const Tried& one : tried) contenders.push_back(contender(one));
    quoka_examples::Progress bar(name, flags_.lengths.back() * std::ssize(tried));
    Index done = 0;
    const Pass p =
        run_pass(reading, {flags_.lengths, flags_.ubatch, flags_.samples, flags_.questions},
                 contenders, [&](Index tokens) { bar.update(done += tokens); });
    json by_length = json::array(), longest = json::array(), needles = json::array(),
         pays = json::object(), divergence = json::object(), loss = json::object();
    for (std::size_t c = 0; c < tried.size(); ++c) {
      for (std::size_t l = 0; l < flags_.lengths.size(); ++l)
        by_length.push_back(outcome(p, flags_.lengths, c, tried[c].name, l, l));
      longest.push_back(outcome(p, flags_.lengths, c, tried[c].name, flags_.lengths.size() - 1,
                                flags_.lengths.size() - 1));
      if (c > 0) divergence[tried[c].name] = p.of[c].kl;
      loss[tried[c].name] = p.of[c].nll;
      if (tried[c].selects())
        pays[tried[c].name] = pays_from(p, flags_.lengths, c, flags_.limits.gain);
      for (std::size_t l = 0; l < flags_.lengths.size(); ++l)
        for (std::size_t q = 0; q < p.asked[l].size(); ++q) {
          const Question& question = reading.questions[p.asked[l][q]];
          needles.push_back(
              {{"name", tried[c].name},
               {"length", flags_.lengths[l]},
               {"kind", question.kind},
               {"depth", static_cast<double>(question.at) / static_cast<double>(flags_.lengths[l])},
               {"right", p.of[c].right[l][q]}});
        }
    }
    return {{"by_length", by_length},      {"longest", longest},          {"needles", needles},
            {"pays_from", pays},           {"samples", p.samples.size()}, {"sampled_at", p.samples},
            {"kl_of_samples", divergence}, {"loss_of_samples", loss}};
  }
  static std::vector<Outcome> outcomes_of(const json& rows) {
    std::vector<Outcome> outcomes;
    const auto of = [](const json& x) { return Estimate{x[0], x[1], x[2]}; };
    for (const json& x : rows)
      outcomes.push_back({x["name"], x["length"], x["seconds"], x["speedup"], of(x["gain"]),
                          of(x["perplexity"]), of(x["needles"]), x["kl"], x["agrees"], x["right"]});
    return outcomes;
  }

  // ---- the steps ----

  void measure() { outcomes_ = pass("measure", measured_text_, tried_); }

  // The first that selects.
  std::optional<std::size_t> selecting() const {
    for (std::size_t i = 0; i < tried_.size(); ++i)
      if (tried_[i].selects()) return i;
    return {};
  }

  // The one that loses least of those that select.
  std::size_t least() const {
    std::size_t least = *selecting();
    for (std::size_t i = least; i < outcomes_.size(); ++i)
      if (tried_[i].selects() && outcomes_[i].kl < outcomes_[least].kl) least = i;
    return least;
  }

  // The last tokens of the longest prefix, which one layer reads by selection and the others densely.
  void look_at_layers() {
    if (!selecting()) return;
    if (!is_done("layers")) {
      const Index length = flags_.lengths.back(),
                  last = std::min<Index>(128, flags_.lengths.front() / 2);
      const Tried& selects = tried_[least()];
      quoka_examples::Progress bar("layers", length + model_.layers * last * 2);
      Index done = 0;
      std::vector<TokenAt> rest;
      for (Index i = length - last; i < length; ++i)
        rest.push_back({measured_text_.tokens[static_cast<std::size_t>(i)],
                        static_cast<llama_pos>(i), 0, i % 2 == 1});
      Contender dense = contender(tried_[1]);
      for (Index begin = 0; begin < length - last; begin += flags_.ubatch) {
        std::vector<TokenAt> batch;
        for (Index i = begin; i < std::min(begin + flags_.ubatch, length - last); ++i)
          batch.push_back(
              {measured_text_.tokens[static_cast<std::size_t>(i)], static_cast<llama_pos>(i)});
        dense.session->decode(batch);
        bar.update(done += std::ssize(batch));
      }
      const std::vector<std::uint8_t> state = dense.session->state(0);
      dense.session->decode(rest);
      json layers = json::array();
      for (Index layer = 0; layer < model_.layers; ++layer) {
        json others = json::array();
        for (Index other = 0; other < model_.layers; ++other)
          if (other != layer) others.push_back(other);
        json with = selects.settings;
        with["dense_layers"] = others;
        const Contender one = contender({"", with});
        one.session->load(state, 0);
        one.session->decode(rest);
        double kl = 0, count = 0;
        for (int i = 0; i < static_cast<int>(rest.size()); ++i)
          if (rest[static_cast<std::size_t>(i)].logits)
            kl += divergence(dense.session->logits(i), one.session->logits(i)), ++count;
        layers.push_back({{"layer", layer}, {"kl", kl / count}});
        bar.update(done += 2 * last);
      }
      step("layers") = {{"settings", selects.name}, {"layers", layers}};
      save_();
    }
  }

  // To each of those that select, the layer that hurts most of those that are not dense.
  void note_layers(std::vector<Outcome>& outcomes, const std::vector<Tried>& tried) {
    for (std::size_t i = 1; i < outcomes.size(); ++i) {
      if (!tried[i].selects()) continue;
      const json& dense = tried[i].settings.at("dense_layers");
      Index first = dense.is_number() ? dense.get<Index>() : 0;  // of those that could select
      for (const json& one : step("layers")["layers"]) {
        if (one["kl"] == 0.0 || first-- > 0) continue;
        if (dense.is_array() && std::find(dense.begin(), dense.end(), one["layer"]) != dense.end())
          continue;
        if (one["kl"] > outcomes[i].worst_layer_kl)
          outcomes[i].worst_layer = one["layer"], outcomes[i].worst_layer_kl = one["kl"];
      }
    }
  }

  // Those that hurt far more than others do or than is allowed, a quarter of all at the most, and the first that
  // selects. A layer that cannot select changes nothing.
  std::vector<Index> hurt_layers() {
    std::vector<std::pair<double, Index>> harm;  // of all but the first, which is dense anyway
    std::vector<Index> worst;
    double all = 0;
    for (const json& one : step("layers")["layers"]) {
      if (one["kl"] == 0.0) continue;
      if (worst.empty())
        worst.push_back(one["layer"]);
      else
        harm.emplace_back(one["kl"], one["layer"]), all += harm.back().first;
    }
    std::sort(harm.rbegin(), harm.rend());
    for (const auto& [kl, layer] : harm)
      if (kl > std::min(2 * all / static_cast<double>(harm.size()), flags_.limits.kl) &&
          std::ssize(worst) <= model_.layers / 4)
        worst.push_back(layer);
    std::sort(worst.begin(), worst.end());
    return worst;
  }

  void decide() {
    if (selecting()) note_layers(outcomes_, tried_);
    advice_ = advise(outcomes_, flags_.limits);
    if (!tried_[advice_.contender].selects()) refine();
    conclude();
  }

  // The layers that hurt are left dense, and `balanced` becomes `recommended`. Is that advised, and faster than what
  // was before?
  bool refine() {
    if (measured_in_ == "refine" || !selecting()) return false;
    const bool gains = std::any_of(outcomes_.begin() + 2, outcomes_.end(), [&](const Outcome& o) {
      return o.speedup >= flags_.limits.gain * outcomes_[1].speedup;
    });
    if (!gains) return false;
    Tried refined = tried_[least()];
    refined.settings["dense_layers"] = hurt_layers();
    refined.name += fmt::format(", dense {}", fmt::join(hurt_layers(), " "));
    if (refined.settings["mode"] == "balanced" && !refined.settings.contains("queries")) {
      refined.settings["mode"] = "recommended";
      refined.name += ", as recommended";
    }
    const std::vector<Tried> tried{tried_[0], tried_[1], refined};
    std::vector<Outcome> again = pass("refine", measured_text_, tried);
    step("refine")["settings"] = refined.settings;
    note_layers(again, tried);
    const Advice better = advise(again, flags_.limits);
    const bool arithmetic_is_faster =  // exact mode in another one
        advice_.use == Advice::Use::selection && !tried_[advice_.contender].selects() &&
        outcomes_[advice_.contender].gain.mean >= again[2].gain.mean;
    if (better.use != Advice::Use::selection || arithmetic_is_faster) return false;
    outcomes_ = again, advice_ = better, tried_ = tried, measured_in_ = "refine";
    return true;
  }

  void conclude() {
    const Advice& advice = advice_;
    chosen_ = tried_[advice.contender == 0 ? 1 : advice.contender];
    json written = chosen_.settings;
    if (chosen_.selects()) {
      Index pays_from = 0;
      for (const auto& [name, one] : result_["steps"].items())
        if (name.starts_with(measured_in_) && one["pays_from"].contains(chosen_.name))
          pays_from = one["pays_from"][chosen_.name];
      if (pays_from > 0 && pays_from < flags_.lengths.back()) written["min_past"] = pays_from;
    }
    written["model"] = {
        {"q_heads", model_.q_heads}, {"kv_heads", model_.kv_heads}, {"head_dim", model_.head_dim}};
    settings_ = written;
    result_["advice"] = {{"use", advice.use == Advice::Use::selection ? "selection"
                                 : advice.use == Advice::Use::exact   ? "exact"
                                                                      : "nothing"},
                         {"why", advice.why},
                         {"contender", chosen_.name}};
    if (advice.use != Advice::Use::nothing) result_["advice"]["settings"] = written;
    save_();
  }

  void verify(const std::string& name = "verify") {
    const std::string path = flags_.out + "/settings.json";
    if (advice_.use == Advice::Use::nothing) {
      std::filesystem::remove(path);
      return;
    }
    quoka_examples::write_json(path, settings_);
    std::vector<Tried> tried{tried_[0]};
    if (advice_.use == Advice::Use::selection) tried.push_back(tried_[1]);
    tried.push_back({chosen_.name, {{"config", path}}});
    const std::vector<Outcome> kept = pass(name, verified_text_, tried);
    const std::string broken =
        broken_promise(outcomes_[advice_.contender], kept.back(), flags_.limits, advice_.use);
    if (!broken.empty() && chosen_.selects() && refine()) {
      conclude();
      return verify("verify again");
    }
    json& advice = result_["advice"];
    advice["kept"] = broken.empty();
    if (measured_in_ == "measure")
      if (const std::string said = unsteady(outcomes_, kept); !said.empty())
        advice["unsteady"] = said;
    if (broken.empty()) {
      advice["verified"] = losses(kept.back());
    } else {
      const std::string lost = chosen_.name + " loses more on another text than on the first (" +
                               losses(outcomes_[advice_.contender]) + "): " + broken;
      if (advice_.use == Advice::Use::selection && outcomes_[1].speedup >= flags_.limits.gain) {
        advice["use"] = "exact", advice["contender"] = tried_[1].name;
        advice["why"] = fmt::format("{} is {:.2f} times as fast as llama.cpp; {}",
                                    mode_of(outcomes_[1]), outcomes_[1].speedup, lost);
        advice["settings"] = tried_[1].settings;
        advice["settings"]["model"] = settings_["model"];
        quoka_examples::write_json(path, advice["settings"]);
      } else {
        advice["use"] = "nothing", advice["why"] = "do not use it here: " + lost;
        advice.erase("settings");
        std::filesystem::remove(path);
      }
    }
    save_();
  }

  Flags flags_;
  json& result_;
  std::function<void()> save_;
  Model model_;
  Reading measured_text_, verified_text_;
  std::vector<Tried> tried_;
  std::vector<Outcome> outcomes_;
  std::string measured_in_ = "measure";
  Advice advice_;
  Tried chosen_;
  json settings_;
};

// The results of a step, by its name.
std::string heading(const std::string& step) {
  if (step.starts_with("verify")) return "What is recommended, on the other half of the text";
  if (step.starts_with("rounding")) return "llama.cpp's own rounding";
  if (step.starts_with("refine")) return "With the layers that hurt left dense and more queries";
  return "On the first half of the text";
}

void print(const json& result, const std::string& folder) {
  for (const auto& [name, one] : result["steps"].items()) {
    if (!one.contains("by_length")) continue;
    fmt::print("\n{}. Time to first token, and times as fast as llama.cpp beside it\n",
               heading(name));
    quoka_examples::Table table(
        "settings\ttokens\tto first token\tspeed\tperplexity\tKL\ttop-1\tneedles");
    for (const json& x : one["by_length"])
      table.row("{}\t{}\t{:.1f} s\t{:.2f}x\t{:+.2f} %\t{:.4f}\t{:.1f} %\t{:.0f} %",
                x["name"].get<std::string>(), x["length"].get<Index>(), x["seconds"].get<double>(),
                x["speedup"].get<double>(), x["perplexity"][0].get<double>(), x["kl"].get<double>(),
                100 * x["agrees"].get<double>(), 100 * x["right"].get<double>());
    table.print();
  }
  if (!result.contains("advice")) return;  // only measured
  const json& advice = result["advice"];
  fmt::print("\n{}: {}\n", advice["contender"].get<std::string>(),
             advice["why"].get<std::string>());
  if (advice.contains("verified"))
    fmt::print("On the other half of the text: {}\n", advice["verified"].get<std::string>());
  if (advice.contains("unsteady")) fmt::print("{}.\n", advice["unsteady"].get<std::string>());
  if (advice["use"] == "nothing")
    fmt::print("No settings were written.\n");
  else
    fmt::print("Use it by QUOKA_CONFIG={}/settings.json\n", folder);
}

}  // namespace

int main(int argc, char** argv) {
  quoka_examples::Program program(
      argc, argv, "Does it work on my model? llama.cpp with the QuoKA backend and without");
  Flags flags;
  program.add_option("model", flags.model, "a GGUF file")->required()->check(CLI::ExistingFile);
  program
      .add_option("texts", flags.texts,
                  "files of plain text: one half measures, the other verifies")
      ->check(CLI::ExistingFile);
  program
      .add_option(
          "--lengths", flags.lengths,
          "of prompts, in tokens; by default 512, 1024 and so on up to the context or 8,192")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  program
      .add_option_function<std::string>(
          "--modes", [&](const std::string& text) { flags.modes = modes_of(text); },
          "presets beside exact mode, with settings if wanted: recommended:chunk=256, "
          "recommended:dense_layers=[0,7]; exact: none")
      ->check([](const std::string& text) {
        for (const std::string& mode : modes_of(text)) {
          if (mode.empty()) return "an item of " + text + " is empty";
          const std::string name = mode.substr(0, mode.find(':'));
          if (name != "exact" && name != "paper" && name != "balanced" && name != "recommended")
            return mode + ": a mode is exact, paper, balanced or recommended";
        }
        return std::string();
      });
  program
      .add_option("--arithmetics", flags.arithmetics,
                  "each mode in each of them; those that come to the same here are one")
      ->delimiter(',')
      ->check(CLI::IsMember(arithmetic_names()));
  program
      .add_option("--budgets", flags.budgets,
                  "past keys for each head, with a point a share of the past, or own: what the "
                  "preset keeps without a budget; by default own and an eighth of the longest")
      ->delimiter(',')
      ->check([](const std::string& text) {
        return text == own_rule || quoka_examples::read_budget(text)
                   ? std::string()
                   : text + ": a budget is own, or " + quoka_examples::budget_rules();
      });
  program.add_flag("--quick", flags.quick, "2,048 tokens at most, presets without a budget alone");
  program.add_option("--ubatch", flags.ubatch)->check(CLI::Range(32, 65536));
  program.add_option("--samples", flags.samples, "positions at which logits are compared")
      ->check(CLI::Range(16, 65536));
  program
      .add_option("--questions", flags.questions, "at each length; 0: the text gets no facts, too")
      ->check(CLI::Range(0, 1000));
  program
      .add_option(
          "--together", flags.together,
          "contenders that read side by side; by default as many as half of the memory holds")
      ->check(CLI::PositiveNumber);
  program.add_option("--seed", flags.seed, "of the facts in the text");
  program.add_flag("--measure-only", flags.measure_only,
                   "reads the text, from its beginning, and gives no advice");
  program.add_flag("--rounding", flags.rounding,
                   "llama.cpp without flash attention, too: what its own rounding moves");
  program.add_option("--threads", flags.threads)->check(CLI::PositiveNumber);
  program.add_option("--cache", flags.cache)->check(CLI::IsMember({"f16", "q8_0"}));
  program.add_option("--max-perplexity", flags.limits.perplexity, "percent that settings may add");
  program.add_option(
      "--max-kl", flags.limits.kl,
      "divergence from llama.cpp's logits that settings may have beyond exact mode's, in nats");
  program.add_option("--max-needles", flags.limits.needles, "points of 100 that settings may lose");
  program.add_option("--min-gain", flags.limits.gain, "times as fast as exact mode, at least");
  program.add_option("--out", flags.out, "folder of check.json and settings.json")->required();
  program.add_flag("--fresh", flags.fresh, "do not go on with what --out holds");
  // For a program that is installed apart from what it was built with; not in --help.
  program.add_option("--backend", quoka_ggml::backend_files.quoka)
      ->check(CLI::ExistingFile)
      ->group("");
  program.add_option("--cpu-backends", quoka_ggml::backend_files.cpu_folder)
      ->check(CLI::ExistingDirectory)
      ->group("");
  return program.run([&] {
    llama_log_set(only_errors, nullptr);
    std::filesystem::create_directories(flags.out);
    const std::string path = flags.out + "/check.json";
    json result = json::object();
    if (std::ifstream file(path); file) result = json::parse(file, nullptr, false);
    if (!result.is_object()) result = json::object();
    const int status =
        Check(flags, result, [&] { quoka_examples::write_json(path, result); }).run();
    print(result, std::filesystem::absolute(flags.out).lexically_normal().string());
    return status;
  });
}
