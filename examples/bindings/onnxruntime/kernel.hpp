// GroupQueryAttention of one node: the chunk's keys and values go into the cache, turned by their
// positions where asked for, then quoka::attention reads queries, cache and outputs where the
// runtime has them.
#pragma once

#include "ort_threads.hpp"
#include "rotary.hpp"
#include "selecting.hpp"

#include <quoka/attention/attention.hpp>
#include <quoka/base/buffer.hpp>

#include <cstring>
#include <memory>

namespace quoka_onnxruntime {

// Scratch memory of a call: as many as calls run at once, whichever nodes they are of.
struct Scratch {
  quoka::AttentionWorkspace workspace;
  quoka::Buffer<float> turned_q, turned_k;  // [batch, q_len, heads, head_dim]
  quoka::Selection selection;
};
class ScratchPool {
 public:
  std::unique_ptr<Scratch> take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::make_unique<Scratch>();
    auto one = std::move(free_.back());
    free_.pop_back();
    return one;
  }
  void give_back(std::unique_ptr<Scratch> one) {
    const std::lock_guard lock(mutex_);
    free_.push_back(std::move(one));
  }
  // Never destroyed: the runtime's threads may outlive the program's main().
  static ScratchPool& of_process() {
    static auto& pool = *new ScratchPool;
    return pool;
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Scratch>> free_;
};

class Kernel {
 public:
  Kernel(const OrtApi& api, const OrtKernelInfo& info)
      : api_(api), of_(read_attributes(api, info)) {
    if (of_.selection) selecting_ = std::make_unique<Selecting>(*of_.selection);
  }

  const OrtApi& api() const { return api_; }
  // Throws std::invalid_argument, before anything is written, for tensors that do not fit together.
  void compute(OrtKernelContext& context) {
    Call call(api_, context, of_);
    const OrtThreads threads(api_, context, of_.workers);
    std::unique_ptr<Scratch> scratch = ScratchPool::of_process().take();
    append(call, *scratch, threads);
    attend(call, *scratch, threads);
    ScratchPool::of_process().give_back(std::move(scratch));
  }

 private:
  static constexpr Index few_bytes = Index{1} << 17;  // that one thread copies sooner than several
  static constexpr Index least_that_select = 64;      // queries, or of_.chunk where that is less

  // f(task, worker), by the calling thread alone if there are few bytes.
  template <class F>
  static void run(const OrtThreads& threads, Index bytes, Index tasks, F&& f) {
    if (bytes <= few_bytes)
      quoka::SerialExecutor{}.run(tasks, f);
    else
      threads.run(tasks, f);
  }

  // Completes the presents, call.q and, without a present key, the chunk's rotated keys.
  void append(Call& call, Scratch& scratch, const OrtThreads& threads) const {
    copy_pasts(call, threads);
    float *turned_q = nullptr, *turned_k = nullptr;
    const Index tokens = call.batch * call.q_len;
    if (of_.rotary) {
      turned_q = scratch.turned_q.reserve(tokens * of_.q_heads * call.head_dim);
      if (!call.k.whole())
        turned_k = scratch.turned_k.reserve(tokens * of_.kv_heads * call.head_dim);
    }
    const Index row = call.head_dim * call.output.bytes_of_element();
    run(threads, tokens * (of_.q_heads + 2 * of_.kv_heads) * row, tokens, [&](Index token, int) {
      const Index b = token / call.q_len, i = token % call.q_len;
      const Sequence& sequence = call.sequences[static_cast<std::size_t>(b)];
      if (i >= sequence.q_len) return;
      for (Index head = 0; head < of_.kv_heads; ++head)
        if (call.v.present && !call.v.borrowed)
          std::memcpy(present_row(call, call.v, b, head, sequence.past + i),
                      call.v.chunk.row(b, head, i), static_cast<std::size_t>(row));
      if (of_.rotary) return turn(call, token, turned_q, turned_k);
      for (Index head = 0; head < of_.kv_heads; ++head)
        if (call.k.present && !call.k.borrowed)
          std::memcpy(present_row(call, call.k, b, head, sequence.past + i),
                      call.k.chunk.row(b, head, i), static_cast<std::size_t>(row));
    });
    if (turned_q != nullptr) call.q = float_rows(call, turned_q, of_.q_heads);
    if (turned_k != nullptr) call.k.chunk = float_rows(call, turned_k, of_.kv_heads);
  }
  // Past rows where the present has a buffer of its own, and zeros behind the last.
  void copy_pasts(const Call& call, const OrtThreads& threads) const {
    for (const Side* side : {&call.k, &call.v}) {
      if (!side->present || side->shared()) continue;
      const Index row = call.head_dim * side->present.bytes_of_element();
      run(threads, side->present.elements() * side->present.bytes_of_element(),
          call.batch * of_.kv_heads, [&](Index task, int) {
            const Index b = task / of_.kv_heads, head = task % of_.kv_heads;
            const Sequence& sequence = call.sequences[static_cast<std::size_t>(b)];
            const Index count = side->borrowed ? sequence.len() : sequence.past;
            if (count > 0)
              std::memcpy(present_row(call, *side, b, head, 0),
                          side->past.data + task * side->past.sizes[2] * row,
                          static_cast<std::size_t>(count * row));
            std::memset(present_row(call, *side, b, head, sequence.len()), 0,
                        static_cast<std::size_t>((side->present.sizes[2] - sequence.len()) * row));
          });
    }
  }
  std::byte* present_row(const Call& call, const Side& side, Index b, Index head, Index i) const {
    const Tensor& to = side.present;
    return to.data +
           ((b * of_.kv_heads + head) * to.sizes[2] + i) * call.head_dim * to.bytes_of_element();
  }
  // One token's queries and keys; keys go to the present, or to turned_k.
  void turn(const Call& call, Index token, float* turned_q, float* turned_k) const {
    const Index b = token / call.q_len, i = token % call.q_len, dim = call.head_dim;
    thread_local std::vector<float> row;
    row.resize(static_cast<std::size_t>(dim));
    Rotary rotary(call, of_.interleaved);
    rotary.stand_at(call.position(b, i));
    for (Index head = 0; head < of_.q_heads; ++head) {
      float* const to = turned_q + (token * of_.q_heads + head) * dim;
      call.q.format().widen(call.q.row(b, head, i), {dim}, to);
      rotary.turn(to);
    }
    if (call.k.borrowed) return;  // turned where they were cached
    for (Index head = 0; head < of_.kv_heads; ++head) {
      float* const to =
          turned_k != nullptr ? turned_k + (token * of_.kv_heads + head) * dim : row.data();
      call.k.chunk.format().widen(call.k.chunk.row(b, head, i), {dim}, to);
      rotary.turn(to);
      if (turned_k == nullptr)
        call.k.present.format->narrow(
            to, {dim},
            present_row(call, call.k, b, head,
                        call.sequences[static_cast<std::size_t>(b)].past + i));
    }
  }
  static Rows float_rows(const Call& call, float* data, Index heads) {
    const Index head = call.head_dim * static_cast<Index>(sizeof(float)), token = heads * head;
    return {reinterpret_cast<const std::byte*>(data),
            quoka::format_of<float>(),
            {call.batch, heads, call.q_len, call.head_dim},
            {call.q_len * token, head, token}};
  }

  void attend(const Call& call, Scratch& scratch, const OrtThreads& threads) {
    if (of_.blind) {
      std::memset(
          call.output.data, 0,
          static_cast<std::size_t>(call.output.elements() * call.output.bytes_of_element()));
      return;
    }
    const std::vector<float> sinks = read_sinks(call);
    const quoka::AttentionOptions options{
        .scale = of_.scale == 0 ? std::optional<float>() : of_.scale,
        .softcap = of_.softcap,
        .sinks = sinks,
        .sliding_window = of_.window,
        .arithmetic = of_.arithmetic,
        .causal = of_.causal};
    std::vector<quoka::AttentionSequence> exact;
    std::optional<Selecting::Turn> turn;
    for (Index b = 0; b < call.batch; ++b) {
      const Sequence& sequence = call.sequences[static_cast<std::size_t>(b)];
      hide_padding(call, b);
      if (sequence.q_len == 0) continue;
      if (!selects(call, sequence)) {
        exact.push_back(part(call, b, 0, sequence.q_len));
        continue;
      }
      if (!turn) turn.emplace(*selecting_);
      // Chunks end where their sequence is a multiple of the chunk long, wherever the caller cuts
      // it.
      for (Index i = 0, count = 0; i < sequence.q_len; i += count) {
        const Index past = sequence.past + i;
        count = std::min(sequence.q_len - i, of_.chunk - past % of_.chunk);
        quoka::AttentionSequence one = part(call, b, i, count);
        if (past > 0 && past >= of_.min_past) {
          turn->select(one.q, one.past.k, one.chunk.k, b, call.k.present.sizes[2], options, threads,
                       scratch.selection);
          one.past.selection = &scratch.selection;
        }
        quoka::attention(one.q, one.past, one.chunk, one.out, options, threads, scratch.workspace);
      }
    }
    if (!exact.empty()) quoka::attention(exact, options, threads, scratch.workspace);
  }
  // Windows, biases and what is seen both ways are exact; so are calls that keep no cache. Few
  // queries attend as single ones do: they are the draft that speculative decoding verifies, or the
  // end of a prompt.
  bool selects(const Call& call, const Sequence& sequence) const {
    return selecting_ != nullptr && of_.causal && of_.window == 0 && !call.in[in_attention_bias] &&
           call.k.present && call.v.present &&
           (of_.decode || sequence.q_len >= std::min(of_.chunk, least_that_select));
  }
  // Queries [begin, begin + count) of a sequence, and what lies before their end.
  quoka::AttentionSequence part(const Call& call, Index b, Index begin, Index count) const {
    const Sequence& sequence = call.sequences[static_cast<std::size_t>(b)];
    const Index past = sequence.past + begin;
    const auto rows = [&](const Side& side) -> std::pair<Rows, Rows> {
      if (side.whole()) {
        const Rows all = call.cache_rows(side.whole(), b, past + count);
        return {all.slice(0, past), all.slice(past, count)};
      }
      const Rows chunk = sequence_of(side.chunk, b).slice(begin, count);
      if (past == 0) return {Rows(), chunk};
      return {call.cache_rows(side.past, b, past), chunk};
    };
    const auto [past_k, chunk_k] = rows(call.k);
    const auto [past_v, chunk_v] = rows(call.v);
    return {.q = sequence_of(call.q, b).slice(begin, count),
            .past = {past_k, past_v},
            .chunk = {chunk_k, chunk_v},
            .out = call.output_rows(b, begin, count),
            .mask = call.bias(b)};
  }
  static Rows sequence_of(const Rows& all, Index b) {
    return {all.row(b, 0, 0), all.format(), {1, all.heads(), all.len(), all.dim()}, all.strides()};
  }
  // Output rows behind a sequence's queries are zeros.
  void hide_padding(const Call& call, Index b) const {
    const Index own = call.sequences[static_cast<std::size_t>(b)].q_len;
    if (own == call.q_len) return;
    const Index token = of_.q_heads * call.head_dim * call.output.bytes_of_element();
    std::memset(call.output.data + (b * call.q_len + own) * token, 0,
                static_cast<std::size_t>((call.q_len - own) * token));
  }
  std::vector<float> read_sinks(const Call& call) const {
    const Tensor& sinks = call.in[in_head_sink];
    if (!sinks && !of_.smooth) return {};
    std::vector<float> logits(static_cast<std::size_t>(of_.q_heads), 0.0f);
    if (sinks) sinks.format->widen(sinks.data, {of_.q_heads}, logits.data());
    return logits;
  }

  const OrtApi& api_;
  const Attributes of_;
  std::unique_ptr<Selecting> selecting_;
};

}  // namespace quoka_onnxruntime
