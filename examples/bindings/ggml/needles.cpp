// A needle in a haystack by llama.cpp as it is and with this backend, one prompt for each depth:
// a pass key at a depth of a long text, asked for at the end.
//
//     needles MODEL.gguf [--lengths 1024,2040] [--depths 10] [--needles 1] [--modes exact,recommended]
//             [--budgets 128,256] [--ubatch 128] [--threads 2] [--out results.json]
//
// A prompt is answered if every token with a digit is the most probable one after the right ones before it.
// Whole ubatches that a prompt shares with the one before stay in the cache. QUOKA_DENSE_LAYERS and the
// others act as ever.
#include "haystack.hpp"
#include "llama_session.hpp"

#include "support/json_file.hpp"
#include "support/progress.hpp"
#include "support/table.hpp"

#include <CLI/CLI.hpp>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>

namespace {

using namespace quoka_ggml;

struct Contender {
  std::string mode, budget;
  std::unique_ptr<Session> session;
  std::vector<Token> tokens = {};  // in its cache
};

// By llama.cpp, of a model that outlives it.
Tokenizer tokenizer_of(const llama_model* model) {
  const llama_vocab* const vocab = llama_model_get_vocab(model);
  return {[vocab](const std::string& text, Tokenizer::Options options) {
            std::vector<Token> tokens(text.size() + 2);
            const int count = llama_tokenize(vocab, text.data(), static_cast<int>(text.size()),
                                             tokens.data(), static_cast<int>(tokens.size()),
                                             options.add_bos, options.parse_special);
            if (count < 0) throw std::runtime_error("llama.cpp makes no tokens of a text");
            tokens.resize(static_cast<std::size_t>(count));
            return tokens;
          },
          [vocab](Token token) {
            char piece[256];
            const int size = llama_token_to_piece(vocab, token, piece, sizeof piece, 0, false);
            return std::string(piece, static_cast<std::size_t>(std::max(size, 0)));
          }};
}

bool answers(Contender& c, const NeedlePrompt& prompt, Index ubatch) {
  const Index keep = shared_chunks(prompt.tokens, c.tokens, ubatch);
  llama_memory_seq_rm(c.session->memory(), 0, static_cast<llama_pos>(keep), -1);
  c.tokens = prompt.tokens;
  std::vector<TokenAt> batch;
  for (Index i = keep; i < std::ssize(prompt.tokens); ++i)
    batch.push_back({prompt.tokens[static_cast<std::size_t>(i)], static_cast<llama_pos>(i)});
  batch.back().logits = true;
  bool right = true;
  for (const Token token : prompt.answer) {
    c.session->decode(batch);
    right = right && best(c.session->logits(static_cast<int>(batch.size()) - 1)) == token;
    batch = {{token, batch.back().position + 1, 0, true}};
  }
  return right;
}

}  // namespace

int main(int argc, char** argv) try {
  CLI::App app("Needle in a haystack by llama.cpp, with and without the QuoKA backend");
  std::string model_path, haystack_path = QUOKA_GGML_PROMPT, out;
  std::vector<std::string> modes{"exact", "recommended"}, budgets{"128", "256"};
  std::vector<Index> lengths{1024, 2040};
  Index depths = 10, needles = 1, ubatch = 128;
  std::uint32_t seed = 1;
  int threads = 2;
  app.add_option("model", model_path)->required()->check(CLI::ExistingFile);
  app.add_option("--haystack", haystack_path, "a text")->check(CLI::ExistingFile);
  app.add_option("--lengths", lengths, "of prompts, in tokens")
      ->delimiter(',')
      ->check(CLI::PositiveNumber);
  app.add_option("--depths", depths, "from 0 to 1, evenly spaced")->check(CLI::PositiveNumber);
  app.add_option("--needles", needles, "pass keys at each depth")->check(CLI::PositiveNumber);
  app.add_option("--modes", modes, "of this backend")->delimiter(',');
  app.add_option("--budgets", budgets, "of each mode but exact")->delimiter(',');
  app.add_option("--ubatch", ubatch)->check(CLI::PositiveNumber);
  app.add_option("--threads", threads)->check(CLI::PositiveNumber);
  app.add_option("--seed", seed, "of the pass keys");
  app.add_option("--out", out, "results as JSON");
  CLI11_PARSE(app, argc, argv);

  std::ifstream stream(haystack_path);
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  llama_log_set(only_errors, nullptr);
  const llama_model_ptr model = load_model(model_path);
  const Tokenizer tokenizer = tokenizer_of(model.get());
  const char* const chat_template = llama_model_chat_template(model.get(), nullptr);
  const Haystack haystack(tokenizer, text, chat_turns(chat_template ? chat_template : ""));

  const Index longest = *std::max_element(lengths.begin(), lengths.end());
  const llama_context_params p = context_params(longest + 8, ubatch, threads);
  std::vector<Contender> contenders;
  contenders.push_back({"llama.cpp", "-", std::make_unique<Session>(model.get(), p)});
  for (const std::string& mode : modes)
    for (const std::string& budget : mode == "exact" ? std::vector<std::string>{"-"} : budgets) {
      setenv("QUOKA_MODE", mode.c_str(), 1);
      if (mode != "exact") setenv("QUOKA_BUDGET", budget.c_str(), 1);
      restart_quoka();
      contenders.push_back({mode, budget, std::make_unique<Session>(model.get(), p)});
    }

  nlohmann::json json{{"model", std::filesystem::path(model_path).filename()},
                      {"ubatch", ubatch},
                      {"seed", seed},
                      {"haystack", std::filesystem::path(haystack_path).filename()},
                      {"results", nlohmann::json::array()}};
  std::vector<std::vector<Index>> right(contenders.size(), std::vector<Index>(lengths.size()));
  quoka_examples::Progress bar("needles",
                               std::ssize(lengths) * depths * needles * std::ssize(contenders));
  Index done = 0;
  for (std::size_t l = 0; l < lengths.size(); ++l)
    for (Index i = 0; i < depths; ++i)
      for (Index needle = 0; needle < needles; ++needle) {
        const double depth = depth_of(i, depths);
        const auto prompt =
            haystack.prompt(lengths[l], depth, draw_key(seed, lengths[l], i, needle));
        for (std::size_t c = 0; c < contenders.size(); ++c) {
          const bool exact = answers(contenders[c], prompt, ubatch);
          right[c][l] += exact ? 1 : 0;
          json["results"].push_back({{"mode", contenders[c].mode},
                                     {"budget", contenders[c].budget},
                                     {"length", lengths[l]},
                                     {"depth", depth},
                                     {"key", prompt.key},
                                     {"exact", exact}});
          bar.update(++done);
        }
        if (!out.empty()) quoka_examples::write_json(out, json);
      }

  quoka_examples::Table table(fmt::format("mode\tbudget\t{}", fmt::join(lengths, "\t")));
  for (std::size_t c = 0; c < contenders.size(); ++c) {
    table.row("{}\t{}", contenders[c].mode, contenders[c].budget);
    for (const Index count : right[c]) table.more("{} of {}", count, depths * needles);
  }
  table.print();
} catch (const std::exception& e) {
  std::fprintf(stderr, "needles: %s\n", e.what());
  return 1;
}
