// The queries that score: sub-selected from the chunk, then aggregated to those of each KV head.
#pragma once

#include <quoka/base/buffer.hpp>
#include <quoka/runtime/head_loops.hpp>
#include <quoka/select/selector.hpp>
#include <quoka/select/steps/pre_aggregate.hpp>
#include <quoka/select/steps/subselect.hpp>

#include <algorithm>

namespace quoka {
inline namespace QUOKA_ABI {
namespace detail {

// Which queries, and what becomes of them. The defaults are the paper's.
struct QueryStageOptions {
  Index n_queries;  // of each query head
  QueryChoice choice = QueryChoice::dissimilar;
  GroupMode mode = GroupMode::mean;
  bool raw = false;  // not normalised
};

// Reused memory.
struct QueryMemory {
  Buffer<Position> positions;  // [batch, q_heads, n_queries]
  Buffer<float> q_bar;         // [batch, kv_heads, rows, head_dim]
  WorkerScratch<SubselectScratch> subselect;
  WorkerScratch<RowReader> rows;  // to read one

  Index bytes() const { return bytes_of(positions, q_bar, subselect, rows); }
};

// The first phases of each KV head: its queries to q_bar.
class QueryStages {
 public:
  QueryStages(const SelectorInput& input, const QueryStageOptions& options, QueryMemory& memory,
              ExecutorRef executor)
      : input_(input),
        options_(options),
        memory_(memory),
        n_(std::min(options.n_queries, input.q.len())),
        parts_(HeadPlan(input.k.batch() * input.k.heads(), executor).workers() == 1
                   ? 1
                   : std::min<Index>(n_, 4)) {
    const Rows &q = input.q, &k = input.k;
    memory.positions.reserve(q.batch() * q.heads() * n_);
    memory.subselect.reserve(executor.workers(), &q.format(), q.dim(), q.len());
    memory.rows.reserve(executor.workers(), q);
    memory.q_bar.reserve(k.batch() * k.heads() * rows() * k.dim());
  }

  // Rows of each KV head.
  Index rows() const { return aggregated_rows(n_, input_.group(), options_.mode); }
  const float* q_bar() const { return memory_.q_bar.data(); }  // [batch, kv_heads, rows, head_dim]

  void operator()(const HeadLoops& on) const {
    const bool some = n_ < input_.q.len();  // a token, or a chunk of few, keeps all in order
    if (some)
      on.each(input_.group(), [&](Index task, Index member, int worker) {
        subselect_head(input_.q, n_, {options_.choice, input_.group()}, memory_.positions.data(),
                       task * input_.group() + member, memory_.subselect[worker]);
      });
    on.each(parts_, [&](Index task, Index part, int worker) {
      pre_aggregate_head({input_.q, some ? memory_.positions.data() : nullptr, n_, input_.k.heads(),
                          options_.mode, options_.raw, memory_.q_bar.data()},
                         task, part * n_ / parts_, (part + 1) * n_ / parts_, memory_.rows[worker]);
    });
  }

 private:
  const SelectorInput& input_;
  QueryStageOptions options_;
  QueryMemory& memory_;
  Index n_, parts_;  // of a head: queries that are kept, and tasks that see to some of them
};

}  // namespace detail
}  // namespace QUOKA_ABI
}  // namespace quoka
