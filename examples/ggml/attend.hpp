// One FLASH_ATTN_EXT node: mask to pieces, pieces to chunks, selection, attention.
//
// Exact: a piece is one call. Otherwise a causal piece is cut into chunks of 128 queries. What all of
// a chunk's queries see, without the chunk's own cells, is its past; the selector keeps `budget` of
// it. All chunks of all sequences and streams are one ragged batch.
#pragma once

#include "node.hpp"
#include "pieces.hpp"
#include "settings.hpp"
#include "stats.hpp"
#include "written_cells.hpp"

#include <deque>
#include <memory>

namespace quoka_ggml {

// Of one engine context: threads, scratch memory, WrittenCells. One call at a time.
class Attend {
 public:
  Attend(Settings settings, Stats& stats) : settings_(std::move(settings)), stats_(stats) {}

  void set_threads(int threads) { threads_ = settings_.threads > 0 ? settings_.threads : threads; }
  // Writes the node's result. Throws what the library throws.
  void run(const ggml_tensor& op);

 private:
  struct Cache {  // of one stream
    quoka::Rows k, v;
  };

  quoka::ThreadPool& pool() { return *pool_; }
  void take_pool(const Node& node);
  const float* floats_of(const ggml_tensor& t, quoka::Buffer<float>& to);
  bool selects(const Node& node);
  void add(const Node& node, Index stream, const Cache& cache, Piece& piece, bool selects);
  void select(const Node& node, Work& work);

  const Settings settings_;
  Stats& stats_;
  int threads_ = 1;
  std::map<int, std::unique_ptr<quoka::ThreadPool>> pools_;
  quoka::ThreadPool* pool_ = nullptr;  // of this call
  WrittenCells written_;
  quoka::Buffer<float> k_floats_, v_floats_;
  std::vector<quoka::AttentionSequence> calls_;
  std::vector<std::size_t> selecting_;  // of the calls
  std::deque<quoka::Selection> keep_;   // for each of these
  quoka::QuokaSelector::State state_;   // scratch memory: nothing in it outlives a call
  quoka::AttentionWorkspace workspace_;
};

}  // namespace quoka_ggml
