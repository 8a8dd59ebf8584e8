// One FLASH_ATTN_EXT node: mask to pieces, pieces to chunks, selection, attention.
//
// Exact: a piece is one call. Otherwise a causal piece is cut into chunks of 128 queries. What all of
// a chunk's queries see, without the chunk's own cells, is its past; the selector keeps `budget` of
// it. All chunks of all sequences and streams are one ragged batch.
#pragma once

#include "known_cells.hpp"
#include "node.hpp"
#include "pieces.hpp"
#include "settings.hpp"
#include "stats.hpp"

#include <deque>
#include <map>
#include <memory>

namespace quoka_ggml {

// Of one engine context: threads, scratch memory, KnownCells. One call at a time.
class Attend {
 public:
  Attend(Settings settings, Stats& stats) : settings_(std::move(settings)), stats_(stats) {}

  void set_threads(int threads) { threads_ = settings_.threads > 0 ? settings_.threads : threads; }
  // Writes the node's result. Throws what the library throws.
  void run(const ggml_tensor& op);

 private:
  struct Stream {
    quoka::Rows k, v;
    std::vector<Piece> pieces;
    const KnownCells* known;
  };
  struct Choice {
    std::size_t call;
    const quoka::KeySketch* sketch;
  };

  void take_pool(const Node& node);
  const float* floats_of(const ggml_tensor& t, quoka::Buffer<float>& to);
  // Why all of a layer's attention is exact; null: its chunks may select.
  const char* why_exact(const Node& node);
  bool chooses(const Piece& piece) const {
    return piece.causal && (piece.count > 1 || settings_.decode);
  }
  const char* did(const std::deque<Stream>& streams, const Work& work) const;
  void look_at(const Node& node, Stream& stream);
  void add(const Node& node, Index number, const Stream& stream, Piece& piece, bool selects);
  void select(const Node& node, Work& work);

  const Settings settings_;
  Stats& stats_;
  int threads_ = 1;
  std::map<int, quoka::ThreadPool> pools_;
  quoka::ThreadPool* pool_ = nullptr;         // of this call
  std::map<const void*, KnownCells> caches_;  // by where a layer's keys begin
  const KnownCells unknown_;                  // of a cache that was not looked at
  quoka::Buffer<float> k_floats_, v_floats_;
  std::vector<quoka::AttentionSequence> calls_;
  std::vector<Choice> choices_;        // those that select
  std::deque<quoka::Selection> keep_;  // for each of these
  quoka::QuokaSelector::State state_;  // scratch memory: nothing in it outlives a call
  quoka::AttentionWorkspace workspace_;
};

}  // namespace quoka_ggml
