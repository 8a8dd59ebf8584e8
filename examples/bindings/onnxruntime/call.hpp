// One call of the operator: its tensors, checked, and where each sequence's past and chunk lie.
//
//   query   [batch, q_len, q_heads * head_dim], or with keys and values behind the queries, packed:
//           [batch, q_len, (q_heads + 2 kv_heads) * head_dim]
//   key, value            [batch, q_len, kv_heads * head_dim]; absent where they are packed.
//                         Without rows, [batch, 0, ...], the layer borrows its keys: the past holds
//                         all, the chunk's among them
//   past_key, past_value  [batch, kv_heads, past rows, head_dim]
//   present_*             [batch, kv_heads, max(past rows, total_sequence_length), head_dim]: the
//                         past's buffer, or a new one that gets a copy of the past
//   output  [batch, q_len, q_heads * head_dim]
//
// Sequence b has T = seqlens_k[b] + 1 keys after this call, of which the last Q = query_seqlens[b],
// or min(q_len, T) without that input, are of this call; rows of query, key and value from Q on are
// padding.
#pragma once

#include "attributes.hpp"

#include <quoka/rows/rows.hpp>

#include <string>
#include <utility>
#include <vector>

namespace quoka_onnxruntime {

using quoka::OutputRows;
using quoka::Rows;

enum Input : std::size_t {
  in_query,
  in_key,
  in_value,
  in_past_key,
  in_past_value,
  in_seqlens_k,
  in_total_sequence_length,
  in_cos_cache,
  in_sin_cache,
  in_position_ids,
  in_attention_bias,
  in_head_sink,
  in_k_scale,
  in_v_scale,
  in_q_norm_weight,
  in_k_norm_weight,
  in_query_seqlens,
  input_count
};
struct InputKind {
  const char* name;
  Index rank;  // -1: any
  bool optional;
  ONNXTensorElementDataType type;  // undefined: that of the operator
};
inline constexpr ONNXTensorElementDataType own_type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
inline constexpr InputKind input_kinds[input_count] = {
    {"query", 3, false, own_type},
    {"key", 3, true, own_type},
    {"value", 3, true, own_type},
    {"past_key", 4, true, own_type},
    {"past_value", 4, true, own_type},
    {"seqlens_k", -1, false, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
    {"total_sequence_length", -1, false, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32},
    {"cos_cache", 2, true, own_type},
    {"sin_cache", 2, true, own_type},
    {"position_ids", 2, true, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
    {"attention_bias", 4, true, own_type},
    {"head_sink", 1, true, own_type},
    {"k_scale", -1, true, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    {"v_scale", -1, true, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    {"q_norm_weight", 1, true, own_type},
    {"k_norm_weight", 1, true, own_type},
    {"query_seqlens", 1, true, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32}};

// The part of a call that each sequence has of its own.
struct Sequence {
  Index past = 0, q_len = 0;  // q_len: without padding
  Index len() const { return past + q_len; }
};

// Keys or values: what comes, where the past lies, and where all of it goes.
struct Side {
  Rows chunk = {};        // [batch, kv_heads, q_len, head_dim]
  Tensor past = {};       // absent, or [batch, kv_heads, rows, head_dim]
  Tensor present = {};    // absent, or [batch, kv_heads, rows, head_dim]
  bool borrowed = false;  // the past holds the chunk's rows, too

  // The cache that holds past and chunk after append(); absent: no tensor holds both.
  const Tensor& whole() const { return borrowed && !present ? past : present; }
  bool shared() const { return past && present && past.data == present.data; }
};

class Call {
 public:
  Call(const OrtApi& api, OrtKernelContext& context, const Attributes& of) : of_(of) {
    read(api, context);
    const Tensor& query = in[in_query];
    batch = query.sizes[0], q_len = query.sizes[1];
    require_both(in_key, in_value);
    const bool packed = !in[in_key];
    const Index heads = packed ? of.q_heads + 2 * of.kv_heads : of.q_heads;
    if (query.sizes[2] % heads != 0)
      quoka::detail::fail("query's last size", query.sizes[2], "but must be a multiple of",
                          packed ? "num_heads + 2 * kv_num_heads" : "num_heads", heads);
    head_dim = query.sizes[2] / heads;
    quoka::detail::require_at_least("head_size", head_dim, 1);
    const Rows all = token_rows(query, heads);
    q = all.some_heads(0, of.q_heads);
    if (packed) {
      k.chunk = all.some_heads(of.q_heads, of.kv_heads);
      v.chunk = all.some_heads(of.q_heads + of.kv_heads, of.kv_heads);
    } else {
      const bool borrowed = in[in_key].sizes[1] == 0;
      for (const Input which : {in_key, in_value})
        require_sizes(which, {batch, borrowed ? 0 : q_len, of.kv_heads * head_dim});
      k.borrowed = v.borrowed = borrowed;
      k.chunk = token_rows(in[in_key], of.kv_heads);
      v.chunk = token_rows(in[in_value], of.kv_heads);
    }
    require_both(in_past_key, in_past_value);
    k.past = in[in_past_key], v.past = in[in_past_value];
    if (k.past)
      for (const Input which : {in_past_key, in_past_value})
        require_sizes(which, {batch, of.kv_heads, k.past.sizes[2], head_dim});
    read_lengths();
    check_rotary();
    check_bias();
    if (in[in_head_sink]) require_sizes(in_head_sink, {of.q_heads});
    make_outputs(api, context);
  }

  Tensor in[input_count];
  Index batch = 0, q_len = 0, head_dim = 0;
  Index past_rows() const { return k.past ? k.past.sizes[2] : 0; }
  Rows q;  // [batch, q_heads, q_len, head_dim]
  Side k, v;
  Tensor output;
  std::vector<Sequence> sequences;  // [batch]
  bool first_prompt = false;        // no sequence has a past, and position_ids says where all begin

  // The rows of a sequence of a cache [batch, kv_heads, rows, head_dim]: its first len.
  Rows cache_rows(const Tensor& cache, Index b, Index len) const {
    const Index row = head_dim * cache.bytes_of_element(), head = cache.sizes[2] * row;
    return {cache.data + b * of_.kv_heads * head,
            *cache.format,
            {1, of_.kv_heads, len, head_dim},
            {of_.kv_heads * head, head, row}};
  }
  OutputRows output_rows(Index b, Index begin, Index count) const {
    const Index head = head_dim * output.bytes_of_element(), token = of_.q_heads * head;
    return {output.data + (b * q_len + begin) * token,
            *output.format,
            {1, of_.q_heads, count, head_dim},
            {count * token, head, token}};
  }
  // The bias that attention_bias adds for a sequence's queries; absent without it.
  quoka::Mask bias(Index b) const {
    const Tensor& bias = in[in_attention_bias];
    if (!bias) return {};
    const Index row = bias.sizes[3] * bias.bytes_of_element(), head = bias.sizes[2] * row;
    const auto sequence = sequences[static_cast<std::size_t>(b)];
    return quoka::Mask(Rows(bias.data + (bias.sizes[0] == 1 ? 0 : b * bias.sizes[1] * head),
                            *bias.format, {1, bias.sizes[1], sequence.q_len, sequence.len()},
                            {bias.sizes[1] * head, head, row}));
  }
  // The position of token i of sequence b's chunk.
  Index position(Index b, Index i) const {
    const Tensor& ids = in[in_position_ids];
    if (!ids) return sequences[static_cast<std::size_t>(b)].past + i;
    return static_cast<Index>(first_prompt ? ids.as<int64_t>()[0] + i
                                           : ids.as<int64_t>()[b * q_len + i]);
  }

 private:
  void read(const OrtApi& api, OrtKernelContext& context) {
    std::size_t count = 0;
    check(api, api.KernelContext_GetInputCount(&context, &count));
    for (std::size_t i = 0; i < std::min<std::size_t>(count, input_count); ++i) {
      const OrtValue* value = nullptr;
      check(api, api.KernelContext_GetInput(&context, i, &value));
      if (value != nullptr)
        in[i] = tensor_of(api, *value, input_kinds[i].name, input_kinds[i].rank);
    }
    for (const Input which : {in_k_scale, in_v_scale, in_q_norm_weight, in_k_norm_weight})
      if (in[which])
        quoka::detail::fail_because(std::string("there is an input ") + input_kinds[which].name +
                                    ", which GroupQueryAttention of quoka does not know");
  }
  // Or none.
  void require_both(Input a, Input b) const {
    if (bool(in[a]) == bool(in[b])) return;
    const auto [there, absent] = in[a] ? std::pair(a, b) : std::pair(b, a);
    quoka::detail::fail_because(std::string("there is an input ") + input_kinds[there].name +
                                ", but no " + input_kinds[absent].name);
  }
  void require_sizes(Input which, std::initializer_list<Index> sizes) const {
    auto actual = in[which].sizes.begin();
    Index axis = 0;
    for (const Index size : sizes)
      quoka::detail::require_equal(
          std::string("size ") + std::to_string(axis++) + " of " + input_kinds[which].name,
          *actual++, "", size);
  }
  // [batch, len, heads * head_dim] as [batch, heads, len, head_dim].
  Rows token_rows(const Tensor& tensor, Index heads) const {
    const Index head = head_dim * tensor.bytes_of_element(), token = heads * head;
    const Index len = tensor.sizes[1];
    return {tensor.data, *tensor.format, {batch, heads, len, head_dim}, {len * token, head, token}};
  }
  void read_lengths() {
    const auto one = [&](Input which, Index count) {
      quoka::detail::require_equal(
          std::string("the number of elements of ") + input_kinds[which].name, in[which].elements(),
          "", count);
      return in[which].as<int32_t>();
    };
    const int32_t* const last = one(in_seqlens_k, batch);
    total = *one(in_total_sequence_length, 1);
    const int32_t* const own = in[in_query_seqlens] ? one(in_query_seqlens, batch) : nullptr;
    quoka::detail::require_at_least("total_sequence_length", total, 1);
    // A present of its own has the past's rows and the chunk's; one that the past has room for, no
    // more than these.
    const Index rows = past_rows(), chunk = k.borrowed ? 0 : q_len;
    if (total > rows && total != rows + chunk)
      quoka::detail::fail("total_sequence_length", total,
                          "but must be at most past_key's rows, " + std::to_string(rows) +
                              ", or equal these and the chunk's keys",
                          "together", rows + chunk);
    first_prompt = own == nullptr && q_len == total;
    for (Index b = 0; b < batch; ++b) {
      const std::string of = std::string(" of sequence ") + std::to_string(b);
      const Index len = Index{last[b]} + 1;
      quoka::detail::require_at_least("seqlens_k + 1" + of, len, 1);
      quoka::detail::require_at_most("seqlens_k + 1" + of, len, "total_sequence_length", total);
      Index count = std::min(q_len, len);
      if (own == nullptr && !first_prompt && len < q_len)  // a first prompt may be padded
        quoka::detail::fail("seqlens_k + 1" + of, len, "but must be at least", "query's tokens",
                            q_len);
      if (own != nullptr) {
        count = own[b];
        quoka::detail::require_at_least("query_seqlens" + of, count, 0);
        quoka::detail::require_at_most("query_seqlens" + of, count,
                                       "the least of query's tokens and seqlens_k + 1",
                                       std::min(q_len, len));
      }
      quoka::detail::require_at_most("the past's length" + of, k.borrowed ? len : len - count,
                                     "past_key's rows", past_rows());
      sequences.push_back({len - count, count});
    }
  }
  void check_rotary() const {
    if (!of_.rotary) return;
    for (const Input which : {in_cos_cache, in_sin_cache})
      if (!in[which])
        quoka::detail::fail_because(std::string("do_rotary is 1, but there is no ") +
                                    input_kinds[which].name);
    const Tensor& cos = in[in_cos_cache];
    require_sizes(in_sin_cache, {cos.sizes[0], cos.sizes[1]});
    quoka::detail::require_at_most("twice size 1 of cos_cache", 2 * cos.sizes[1], "head_size",
                                   head_dim);
    const Tensor& ids = in[in_position_ids];
    if (ids)
      quoka::detail::require_at_least("the number of position_ids", ids.elements(),
                                      first_prompt ? 1 : batch * q_len);
    for (Index b = 0; b < batch; ++b)
      for (Index i = 0; i < sequences[static_cast<std::size_t>(b)].q_len; ++i) {
        quoka::detail::require_at_least("a position", position(b, i), 0);
        if (position(b, i) >= cos.sizes[0])
          quoka::detail::fail("a position", position(b, i), "but must be below", "cos_cache's rows",
                              cos.sizes[0]);
      }
  }
  void check_bias() const {
    const Tensor& bias = in[in_attention_bias];
    if (!bias) return;
    if (bias.sizes[0] != 1)
      quoka::detail::require_equal("size 0 of attention_bias", bias.sizes[0], "1, or", batch);
    if (bias.sizes[1] != 1)
      quoka::detail::require_equal("size 1 of attention_bias", bias.sizes[1], "1, or num_heads",
                                   of_.q_heads);
    quoka::detail::require_equal("size 2 of attention_bias", bias.sizes[2], "query's tokens",
                                 q_len);
    quoka::detail::require_at_least("size 3 of attention_bias", bias.sizes[3], total);
  }
  void make_outputs(const OrtApi& api, OrtKernelContext& context) {
    const auto make = [&](std::size_t index, std::initializer_list<int64_t> sizes) {
      OrtValue* value = nullptr;
      check(api, api.KernelContext_GetOutput(&context, index, sizes.begin(), sizes.size(), &value));
      return value == nullptr
                 ? Tensor{}
                 : tensor_of(api, *value, "an output", static_cast<Index>(sizes.size()));
    };
    output = make(0, {batch, q_len, of_.q_heads * head_dim});
    std::size_t count = 0;
    check(api, api.KernelContext_GetOutputCount(&context, &count));
    const Index rows = std::max(past_rows(), total);
    if (count > 1) k.present = make(1, {batch, of_.kv_heads, rows, head_dim});
    if (count > 2) v.present = make(2, {batch, of_.kv_heads, rows, head_dim});
  }

  const Attributes& of_;
  Index total = 0;  // keys of the longest sequence
};

}  // namespace quoka_onnxruntime
