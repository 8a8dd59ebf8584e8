#include "attend.hpp"

#include <cmath>

namespace quoka_ggml {
namespace {

// ALiBi as ggml has it: what the mask is multiplied by, for each head. Empty: by 1.
std::vector<float> mask_factors(const Node& node) {
  std::vector<float> factors;
  if (!(node.max_bias() > 0.0f)) return factors;
  const auto heads = static_cast<double>(node.q_heads());
  const double whole = std::exp2(std::floor(std::log2(heads)));
  for (double h = 0; h < heads; ++h) {
    const double power = h < whole ? h + 1 : h - whole + 0.5;
    factors.push_back(
        static_cast<float>(std::exp2(-static_cast<double>(node.max_bias()) * power / whole)));
  }
  return factors;
}

// The rows in the order of a list: a slice where they lie so.
quoka::Rows rows_at(const quoka::Rows& all, std::span<const Position> cells, bool ordered) {
  if (cells.empty()) return all.slice(0, 0);
  return ordered ? all.slice(cells.front(), std::ssize(cells)) : all.listed(cells);
}

}  // namespace

// All threads, or the engine's own where waking others would take longer than the work: 100 us of
// multiply-adds, or of reading.
void Attend::take_pool(const Node& node) {
  const auto keys = static_cast<double>(node.cells() * node.streams() * node.head_dim());
  const double reads = 4 * keys * static_cast<double>(node.kv_heads()) / 10e9;
  const double adds = 4 * keys * static_cast<double>(node.q_heads() * node.n_q()) / 50e9;
  const int threads = std::max(reads, adds) < 100e-6 ? 1 : threads_;
  auto& pool = pools_[threads];
  if (pool == nullptr) pool = std::make_unique<quoka::ThreadPool>(threads);
  pool_ = pool.get();
}

const float* Attend::floats_of(const ggml_tensor& t, quoka::Buffer<float>& to) {
  if (format_of_type(t.type) != nullptr) return nullptr;
  dequantise(t, to.reserve_amortised(ggml_nelements(&t)), pool());
  return to.data();
}

bool Attend::selects(const Node& node) {
  if (settings_.mode == Mode::exact || settings_.dense.contains(node.layer())) return false;
  const auto fits = [](Index wanted, Index is) { return wanted == 0 || wanted == is; };
  if (fits(settings_.model_q_heads, node.q_heads()) &&
      fits(settings_.model_kv_heads, node.kv_heads()) &&
      fits(settings_.model_head_dim, node.head_dim()))
    return true;
  stats_.note("exact, since the settings are for another model");
  return false;
}

void Attend::run(const ggml_tensor& op) {
  Stopwatch watch;
  const Node node(op);
  take_pool(node);
  Work work{.calls = 1, .queries = node.n_q() * node.streams()};
  const float* const k_floats = floats_of(node.k_tensor(), k_floats_);
  const float* const v_floats = floats_of(node.v_tensor(), v_floats_);
  work.convert = watch.lap();

  const std::vector<float> factors = mask_factors(node);
  const bool by_sequence = node.masked() && node.one_mask() && factors.empty();
  const bool selects = by_sequence && this->selects(node);
  calls_.clear(), selecting_.clear();
  std::deque<std::vector<Piece>> pieces;  // calls refer to their cells
  for (Index stream = 0; stream < node.streams(); ++stream) {
    const Cache cache{node.k(stream, k_floats), node.v(stream, v_floats)};
    auto& of_stream = pieces.emplace_back();
    if (by_sequence)
      of_stream = read_pieces([&](Index query) { return node.mask_row(stream, query); }, node.n_q(),
                              node.cells(), pool());
    else
      of_stream = {{0, node.n_q(), false, {}}};
    for (Piece& piece : of_stream) add(node, stream, cache, piece, selects);
    const auto scattered = [](const Piece& piece) { return !in_order(piece.cells); };
    if (selects && std::any_of(of_stream.begin(), of_stream.end(), scattered))
      written_.remember(cache.k);
    work.sequences += std::ssize(of_stream);
  }
  work.mask = watch.lap();

  select(node, work);
  work.select = watch.lap();

  quoka::AttentionOptions options{.scale = node.scale(), .softcap = node.softcap()};
  options.mask_factors = factors;
  if (node.sinks() != nullptr)
    options.sink_logits = {node.sinks(), static_cast<std::size_t>(node.q_heads())};
  quoka::attention(calls_, options, pool(), workspace_);
  work.attend = watch.lap();
  stats_.add(work);
}

// A piece's calls.
void Attend::add(const Node& node, Index stream, const Cache& cache, Piece& piece, bool selects) {
  const auto call = [&](Index begin, Index count, const quoka::Past& past,
                        const quoka::Chunk& chunk, const quoka::Mask& mask) {
    calls_.push_back({.q = node.q(stream, piece.begin + begin, count),
                      .past = past,
                      .chunk = chunk,
                      .out = node.out(stream, piece.begin + begin, count),
                      .mask = mask});
  };
  constexpr Index by_mask = 128;  // rows that share the cells they read
  if (!piece.causal) {
    for (Index i = 0; i < piece.count; i += by_mask) {
      const Index count = std::min(by_mask, piece.count - i);
      call(i, count, {cache.k, cache.v}, {},
           node.masked() ? node.mask(stream, piece.begin + i, count) : quoka::Mask());
    }
    return;
  }
  const Index seen = piece.first_sees();
  const bool ordered = in_order(piece.cells);
  if (selects && !ordered) written_.find(cache.k, piece.cells, seen);
  const std::span<const Position> cells = piece.cells;
  const Index step = selects ? settings_.chunk : piece.count;
  for (Index i = 0; i < piece.count; i += step) {
    const Index count = std::min(step, piece.count - i);
    // A query that sees nothing at all has no cell of its own.
    const Index past = std::max<Index>(seen + i - 1, 0);
    const auto before = cells.first(static_cast<std::size_t>(past));
    const auto own = cells.subspan(static_cast<std::size_t>(past))
                         .first(static_cast<std::size_t>(seen > 0 ? count : 0));
    call(i, count, {rows_at(cache.k, before, ordered), rows_at(cache.v, before, ordered)},
         {rows_at(cache.k, own, ordered), rows_at(cache.v, own, ordered)}, {});
    if (selects && (count > 1 || settings_.decode)) selecting_.push_back(calls_.size() - 1);
  }
}

void Attend::select(const Node& node, Work& work) {
  for (const auto& call : calls_)
    work.seen += static_cast<double>(call.q.len() * call.past.k.len());
  work.attended = work.seen;
  if (selecting_.empty()) return;
  const quoka::Budget budget = settings_.budget_of(node.layer());
  const quoka::QuokaSelector selector(
      settings_.mode == Mode::robust
          ? quoka::QuokaOptions::robust(node.q_heads() / node.kv_heads(), budget)
          : quoka::QuokaOptions::paper(budget));
  keep_.resize(std::max(keep_.size(), selecting_.size()));
  auto keep = keep_.begin();
  for (const std::size_t i : selecting_) {
    quoka::AttentionSequence& call = calls_[i];
    const Index len = call.past.k.len();
    if (budget.keys(len) == len) continue;
    state_.truncate(0);  // keys of no other call
    try {
      selector.select(
          {.q = call.q, .k = call.past.k, .capacity = node.cells(), .scale = node.scale()}, state_,
          *keep, pool());
    } catch (const std::invalid_argument& e) {
      stats_.note(std::string("exact, since selection refused: ") + e.what());
      continue;
    }
    call.past.keep = &*keep;
    work.attended -= static_cast<double>(call.q.len()) *
                     (static_cast<double>(len) -
                      static_cast<double>(keep->total()) / static_cast<double>(node.kv_heads()));
    ++keep;
  }
}

}  // namespace quoka_ggml
