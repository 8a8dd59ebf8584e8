#include "attend.hpp"

#include <cmath>
#include <limits>

namespace quoka_ggml {
namespace {

constexpr Index by_mask_rows = 128;  // of a mask: they share the cells they read
// Fewer queries do not pay for a look at all cells: keys are scored as they lie in the cache.
constexpr Index sketching_queries = 32;
constexpr std::size_t most_caches = 4096;  // then all are forgotten

// ALiBi as ggml has it: what the mask is multiplied by, for each head. Empty: by 1.
std::vector<float> mask_factors(const Node& node) {
  std::vector<float> factors;
  if (!(node.max_bias > 0.0f)) return factors;
  const auto heads = static_cast<double>(node.q_heads());
  const double whole = std::exp2(std::floor(std::log2(heads)));
  for (double h = 0; h < heads; ++h) {
    const double power = h < whole ? h + 1 : h - whole + 0.5;
    factors.push_back(
        static_cast<float>(std::exp2(-static_cast<double>(node.max_bias) * power / whole)));
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
  pool_ = &pools_.try_emplace(threads, threads).first->second;
}

const float* Attend::floats_of(const ggml_tensor& t, quoka::Buffer<float>& to) {
  if (format_of_type(t.type) != nullptr) return nullptr;
  dequantise(t, to.reserve_amortised(ggml_nelements(&t)), *pool_);
  return to.data();
}

const char* Attend::why_exact(const Node& node) {
  if (settings_.mode == Mode::exact) return "exact: the mode";
  if (settings_.policy.dense.contains(node.layer)) return "exact: a dense layer by the settings";
  if (node.mask == nullptr || node.mask->ne[2] != 1 || node.max_bias > 0.0f)
    return "exact: no mask, one for each head, or ALiBi";
  try {
    settings_.policy.check(node.q_heads(), node.kv_heads(), node.head_dim(),
                           std::numeric_limits<Index>::max());
    return nullptr;
  } catch (const std::invalid_argument& e) {
    stats_.warn(std::string("exact, since ") + e.what());
    return "exact: settings of another model";
  }
}

// Of a layer whose chunks may select.
const char* Attend::did(const std::deque<Stream>& streams, const Work& work) const {
  if (work.attended < work.seen) return "selected";
  bool causal = true, several = false;
  for (const Stream& stream : streams)
    for (const Piece& piece : stream.pieces)
      causal = causal && piece.causal, several = several || piece.count > 1;
  if (!causal) return "exact: a sliding window, or tokens that are seen both ways";
  return several || settings_.decode ? "exact: the budget holds all, or less than min_past"
                                     : "exact: single queries";
}

void Attend::run(const ggml_tensor& op) {
  Stopwatch watch;
  const Node node(op);
  take_pool(node);
  Work work{.calls = 1, .queries = node.n_q() * node.streams()};
  const float* const k_floats = floats_of(node.k, k_floats_);
  const float* const v_floats = floats_of(node.v, v_floats_);
  work.convert = watch.lap();

  const std::vector<float> factors = mask_factors(node);
  const bool by_sequence = node.mask != nullptr && node.mask->ne[2] == 1 && factors.empty();
  const char* const why = why_exact(node);
  const bool selects = why == nullptr;
  calls_.clear(), choices_.clear();
  if (caches_.size() > most_caches) caches_.clear();
  std::deque<Stream> streams;  // calls refer to their cells
  for (Index i = 0; i < node.streams(); ++i) {
    Stream& stream = streams.emplace_back(
        Stream{cache_rows(node.k, i, k_floats), cache_rows(node.v, i, v_floats), {}, &unknown_});
    if (by_sequence)
      stream.pieces = read_pieces([&](Index query) { return node.mask_row(i, query); }, node.n_q(),
                                  node.cells(), *pool_);
    else
      stream.pieces = {{0, node.n_q(), false, {}}};
    work.mask += watch.lap();
    if (selects && k_floats == nullptr) look_at(node, stream);
    work.select += watch.lap();
    for (Piece& piece : stream.pieces) add(node, i, stream, piece, selects);
    work.sequences += std::ssize(stream.pieces);
  }
  work.mask += watch.lap();

  select(node, work);
  work.select += watch.lap();

  quoka::AttentionOptions options{.scale = node.scale, .softcap = node.softcap};
  options.mask_factors = factors;
  if (node.sinks != nullptr)
    options.sink_logits = {static_cast<const float*>(node.sinks->data),
                           static_cast<std::size_t>(node.q_heads())};
  quoka::attention(calls_, options, *pool_, workspace_);
  work.attend = watch.lap();
  stats_.add(node.layer, work, why != nullptr ? why : did(streams, work));
}

// Before something is selected: where keys will be scored by a sketch, and where the cell of a chunk's
// first query has to be found.
void Attend::look_at(const Node& node, Stream& stream) {
  const quoka::Budget budget = settings_.selection(1, node.layer).budget;
  Index queries = 0;
  bool scattered = false;
  for (const Piece& piece : stream.pieces) {
    const Index past =
        piece.first_sees() - 1 + (piece.count - 1) / settings_.chunk * settings_.chunk;
    if (!chooses(piece) || past < std::max<Index>(1, settings_.min_past) ||
        budget.least(past) == past)
      continue;
    queries += piece.count, scattered = scattered || !in_order(piece.cells);
  }
  // Rows of 8-bit codes are scored by cosine as they are; a budget by scores wants scores in float.
  const bool codes = stream.k.format().read_codes != nullptr;
  const bool sketch = settings_.sketch && queries >= sketching_queries && !budget.by_scores() &&
                      (settings_.mode != Mode::quoka || !codes);
  if (!sketch && !scattered) return;
  KnownCells& known = caches_[stream.k.data()];
  known.look(stream.k, sketch, *pool_);
  stream.known = &known;
}

// A piece's calls.
void Attend::add(const Node& node, Index number, const Stream& stream, Piece& piece, bool selects) {
  const auto call = [&](Index begin, Index count, const quoka::Past& past,
                        const quoka::Chunk& chunk, const quoka::Mask& mask) {
    calls_.push_back({.q = node.queries(number, piece.begin + begin, count),
                      .past = past,
                      .chunk = chunk,
                      .out = node.results(number, piece.begin + begin, count),
                      .mask = mask});
  };
  if (!piece.causal) {
    for (Index i = 0; i < piece.count; i += by_mask_rows) {
      const Index count = std::min(by_mask_rows, piece.count - i);
      const bool masked = node.mask != nullptr;
      call(i, count, {stream.k, stream.v}, {},
           masked ? node.mask_of(number, piece.begin + i, count) : quoka::Mask());
    }
    return;
  }
  const Index seen = piece.first_sees();
  const bool ordered = in_order(piece.cells);
  if (selects && !ordered) stream.known->find_own(piece.cells, seen);
  const std::span<const Position> cells = piece.cells;
  const Index step = selects ? settings_.chunk : piece.count;
  for (Index i = 0; i < piece.count; i += step) {
    const Index count = std::min(step, piece.count - i);
    // A query that sees nothing at all has no cell of its own.
    const Index past = std::max<Index>(seen + i - 1, 0);
    const auto before = cells.first(static_cast<std::size_t>(past));
    const auto own = cells.subspan(static_cast<std::size_t>(past))
                         .first(static_cast<std::size_t>(seen > 0 ? count : 0));
    if (selects && chooses(piece) && past >= settings_.min_past)
      choices_.push_back({calls_.size(), stream.known->sketch()});
    call(i, count, {rows_at(stream.k, before, ordered), rows_at(stream.v, before, ordered)},
         {rows_at(stream.k, own, ordered), rows_at(stream.v, own, ordered)}, {});
  }
}

void Attend::select(const Node& node, Work& work) {
  for (const auto& call : calls_)
    work.seen += static_cast<double>(call.q.len() * call.past.k.len());
  work.attended = work.seen;
  if (choices_.empty()) return;
  const quoka::QuokaSelector selector(
      settings_.selection(node.q_heads() / node.kv_heads(), node.layer));
  keep_.resize(std::max(keep_.size(), choices_.size()));
  auto keep = keep_.begin();
  for (const Choice& choice : choices_) {
    quoka::AttentionSequence& call = calls_[choice.call];
    state_.truncate(0);  // keys of no other call
    try {
      selector.select({.q = call.q,
                       .k = call.past.k,
                       .capacity = node.cells(),
                       .scale = node.scale,
                       .sketch = choice.sketch},
                      state_, *keep, *pool_);
    } catch (const std::invalid_argument& e) {
      stats_.warn(std::string("exact, since selection refused: ") + e.what());
      continue;
    }
    call.past.keep = &*keep;
    work.attended -= static_cast<double>(call.q.len()) *
                     (static_cast<double>(call.past.k.len()) -
                      static_cast<double>(keep->total()) / static_cast<double>(node.kv_heads()));
    ++keep;
  }
}

}  // namespace quoka_ggml
