// Definitions of attention.hpp.
#pragma once

#include <quoka/attention/attention.hpp>
#include <quoka/attention/attention_tasks.hpp>
#include <quoka/kernels/fixed_panels.hpp>
#include <quoka/kernels/float_panels.hpp>
#include <quoka/packing/format_table.hpp>

namespace quoka {
inline namespace QUOKA_ABI {

namespace detail {

QUOKA_FUNC void check_options(const AttentionOptions& options, Index q_heads) {
  check_call_options(options, q_heads);
}

QUOKA_FUNC void check_attention(const Rows& q, const Past& past, const Chunk& chunk,
                                const AttentionOutput& output, const AttentionOptions& options) {
  check_call(q, past, chunk, output, options, options.mask, options.query_position);
}

// What an arithmetic comes to on this ISA.
constexpr ArithmeticId id_used(ArithmeticId asked) {
  return simd::has_pair_sums ? asked : ArithmeticId::single;
}

template <ArithmeticId id>
const PanelArithmetic& panels_of() {
  if constexpr (id_used(id) == ArithmeticId::fixed16)
    return fixed_panels<simd::PairSums>();
  else
    return float_panels();
}

#if defined(QUOKA_COMPILED)
inline const PanelArithmetic& panels_for(Arithmetic asked) {
  switch (asked.id()) {
    case ArithmeticId::single:
      return panels_of<ArithmeticId::single>();
    case ArithmeticId::fixed16:
      return panels_of<ArithmeticId::fixed16>();
  }
  return panels_of<ArithmeticId::single>();
}
#else
inline const PanelArithmetic& panels_for(Arithmetic asked) { return asked.panels()(); }
#endif

inline void run_calls(AttentionWorkspace::Parts& parts, Arithmetic arithmetic,
                      ExecutorRef executor) {
  parts.run(panels_for(arithmetic), executor);
}

QUOKA_FUNC void attend(const Rows& q, const Past& past, const Chunk& chunk,
                       const AttentionOutput& output, const AttentionOptions& options,
                       ExecutorRef executor, AttentionWorkspace& workspace) {
  AttentionWorkspace::Parts& parts = workspace.parts();
  parts.begin(1);
  parts.calls.push_back(
      resolved_call(q, past, chunk, output, options, options.mask, options.query_position));
  run_calls(parts, options.arithmetic, executor);
}

}  // namespace detail

QUOKA_FUNC Arithmetic arithmetic_used(Arithmetic asked) {
  return {detail::id_used(asked.id()), asked.panels()};
}

QUOKA_FUNC AttentionWorkspace::AttentionWorkspace() : parts_(std::make_unique<Parts>()) {}
QUOKA_FUNC AttentionWorkspace::~AttentionWorkspace() = default;
QUOKA_FUNC AttentionWorkspace::AttentionWorkspace(AttentionWorkspace&&) noexcept = default;
QUOKA_FUNC AttentionWorkspace& AttentionWorkspace::operator=(AttentionWorkspace&&) noexcept =
    default;
QUOKA_FUNC Index AttentionWorkspace::bytes() const {
  if (parts_ == nullptr) return 0;
  return parts_->bytes();
}
QUOKA_FUNC AttentionWorkspace::Parts& AttentionWorkspace::parts() {
  if (parts_ == nullptr) parts_ = std::make_unique<Parts>();
  return *parts_;
}

QUOKA_FUNC void attention(const Rows& q, const Past& past, const Chunk& chunk,
                          const AttentionOutput& output, const AttentionOptions& options,
                          ExecutorRef executor, AttentionWorkspace& workspace) {
  detail::check_attention(q, past, chunk, output, options);
  detail::attend(q, past, chunk, output, options, executor, workspace);
}

QUOKA_FUNC void attention(std::span<const AttentionSequence> batch, const AttentionOptions& options,
                          ExecutorRef executor, AttentionWorkspace& workspace) {
  AttentionWorkspace::Parts& parts = workspace.parts();
  parts.begin(batch.size());
  std::vector<detail::AttentionCall>& calls = parts.calls;
  for (const AttentionSequence& x : batch)
    calls.push_back(detail::checked_call(
        x.q, x.past, x.chunk, x.out, options, x.mask.absent() ? options.mask : x.mask,
        x.query_position ? x.query_position : options.query_position));
  detail::check_outputs_apart(calls, parts.outputs);
  detail::run_calls(parts, options.arithmetic, executor);
}

}  // namespace QUOKA_ABI
}  // namespace quoka
