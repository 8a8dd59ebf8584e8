// A graph of one FLASH_ATTN_EXT node as an engine builds it, for tests and measurements: K and V
// are permuted views of cache tensors, the mask is the caller's.
#pragma once

#include <ggml-backend.h>
#include <ggml-cpp.h>
#include <ggml.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace quoka_ggml {

struct NodeShape {
  std::int64_t head_dim = 64, v_dim = 64, q_heads = 8, kv_heads = 2, n_q = 32, cells = 256;
  std::int64_t streams = 1, mask_heads = 1;
  ggml_type k_type = GGML_TYPE_F16, v_type = GGML_TYPE_F16;
  bool mask = true, sinks = false, v_in_k = false;
  float softcap = 0.0f, max_bias = 0.0f;
  int layer = 1;
};

class GraphOfOne {
 public:
  explicit GraphOfOne(const NodeShape& shape) : s(shape), random_(1) {
    context_.reset(ggml_init({.mem_size = 64 * ggml_tensor_overhead() + ggml_graph_overhead(),
                              .mem_buffer = nullptr,
                              .no_alloc = true}));
    ggml_context* const c = context_.get();
    const auto permuted = [&](ggml_tensor* rows, std::int64_t dim, std::int64_t heads,
                              std::int64_t len, std::size_t step) {
      ggml_tensor* const view =
          ggml_view_4d(c, rows, dim, heads, len, s.streams, ggml_row_size(rows->type, dim), step,
                       step * static_cast<std::size_t>(len), 0);
      return ggml_permute(c, view, 0, 2, 1, 3);
    };
    const auto cache = [&](ggml_type type, std::int64_t dim, const std::string& name) {
      ggml_tensor* const t = ggml_new_tensor_3d(c, type, dim * s.kv_heads, s.cells, s.streams);
      ggml_set_name(t, (name + std::to_string(s.layer)).c_str());
      return t;
    };
    k_cache = cache(s.k_type, s.head_dim, "cache_k_l");
    v_cache = s.v_in_k ? k_cache : cache(s.v_type, s.v_dim, "cache_v_l");
    q_rows = ggml_new_tensor_3d(c, GGML_TYPE_F32, s.head_dim * s.q_heads, s.n_q, s.streams);
    ggml_tensor* const q = permuted(q_rows, s.head_dim, s.q_heads, s.n_q, q_rows->nb[1]);
    ggml_tensor* const k = permuted(k_cache, s.head_dim, s.kv_heads, s.cells, k_cache->nb[1]);
    ggml_tensor* const v = s.v_in_k
                               ? ggml_view_4d(c, k, s.v_dim, s.cells, s.kv_heads, s.streams,
                                              k->nb[1], k->nb[2], k->nb[3], 0)
                               : permuted(v_cache, s.v_dim, s.kv_heads, s.cells, v_cache->nb[1]);
    if (s.mask)
      mask = ggml_new_tensor_4d(c, GGML_TYPE_F16, s.cells, s.n_q, s.mask_heads, s.streams);
    out = ggml_flash_attn_ext(c, q, k, v, mask, 1.0f / std::sqrt(static_cast<float>(s.head_dim)),
                              s.max_bias, s.softcap);
    if (s.sinks)
      ggml_flash_attn_ext_add_sinks(out, ggml_new_tensor_1d(c, GGML_TYPE_F32, s.q_heads));
    graph_ = ggml_new_graph(c);
    ggml_build_forward_expand(graph_, out);
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(c, ggml_backend_cpu_buffer_type()));
    if (!buffer_) throw std::bad_alloc();
    for (ggml_tensor* const t : {q_rows, k_cache, v_cache}) fill(t, t == q_rows ? 3.0f : 1.0f);
    if (s.sinks) fill(out->src[4], 3.0f);
    if (mask != nullptr) hide_all();
  }

  // Normal numbers times `size`, in the tensor's type.
  void fill(ggml_tensor* t, float size) {
    std::normal_distribution<float> normal(0.0f, size);
    std::vector<float> x(static_cast<std::size_t>(ggml_nelements(t)));
    for (float& one : x) one = normal(random_);
    ggml_quantize_chunk(t->type, x.data(), t->data, 0, ggml_nrows(t), t->ne[0], nullptr);
  }
  void hide_all() {
    ggml_fp16_t* const x = static_cast<ggml_fp16_t*>(mask->data);
    std::fill_n(x, ggml_nelements(mask), ggml_fp32_to_fp16(-INFINITY));
  }
  ggml_fp16_t& mask_at(std::int64_t cell, std::int64_t query, std::int64_t stream = 0,
                       std::int64_t head = 0) {
    return static_cast<ggml_fp16_t*>(
        mask->data)[((stream * s.mask_heads + head) * s.n_q + query) * s.cells + cell];
  }
  void see(std::int64_t cell, std::int64_t query, std::int64_t stream = 0) {
    for (std::int64_t head = 0; head < s.mask_heads; ++head) mask_at(cell, query, stream, head) = 0;
  }
  // A chunk of all queries after `past` cells, in order.
  void see_causally(std::int64_t past) {
    for (std::int64_t stream = 0; stream < s.streams; ++stream)
      for (std::int64_t query = 0; query < s.n_q; ++query)
        for (std::int64_t cell = 0; cell <= past + query; ++cell) see(cell, query, stream);
  }

  // Each query sees `count` cells of the first `cells`, drawn for it alone, in blocks of `block`
  // side by side.
  void see_own(std::int64_t count, std::int64_t cells, std::int64_t block = 1) {
    std::vector<std::int64_t> blocks(static_cast<std::size_t>(cells / block));
    for (std::int64_t stream = 0; stream < s.streams; ++stream)
      for (std::int64_t query = 0; query < s.n_q; ++query) {
        std::iota(blocks.begin(), blocks.end(), 0);
        std::shuffle(blocks.begin(), blocks.end(), random_);
        for (std::int64_t i = 0; i < count / block; ++i)
          for (std::int64_t cell = 0; cell < block; ++cell)
            see(blocks[static_cast<std::size_t>(i)] * block + cell, query, stream);
      }
  }

  // Other keys in cells [begin, end), as an engine writes a chunk's before the node runs.
  void write_keys(std::int64_t begin, std::int64_t end) {
    std::normal_distribution<float> normal;
    std::vector<float> row(static_cast<std::size_t>(k_cache->ne[0]));
    for (std::int64_t cell = begin; cell < end; ++cell) {
      for (float& x : row) x = normal(random_);
      ggml_quantize_chunk(
          k_cache->type, row.data(),
          static_cast<char*>(k_cache->data) + static_cast<std::size_t>(cell) * k_cache->nb[1], 0, 1,
          k_cache->ne[0], nullptr);
    }
  }

  ggml_status run(ggml_backend_t backend) { return ggml_backend_graph_compute(backend, graph_); }
  // [streams, n_q, q_heads, v_dim]; empty where the backend failed.
  std::vector<float> computed_by(ggml_backend_t backend) {
    std::vector<float> x(static_cast<std::size_t>(ggml_nelements(out)), -1e9f);
    std::copy(x.begin(), x.end(), static_cast<float*>(out->data));
    if (run(backend) != GGML_STATUS_SUCCESS) return {};
    std::copy_n(static_cast<const float*>(out->data), x.size(), x.begin());
    return x;
  }

  NodeShape s;
  ggml_tensor *q_rows = nullptr, *k_cache = nullptr, *v_cache = nullptr, *mask = nullptr,
              *out = nullptr;

 private:
  std::mt19937 random_;
  ggml_context_ptr context_;
  ggml_backend_buffer_ptr buffer_;
  ggml_cgraph* graph_ = nullptr;
};

// All of t [dim, heads, cells] as floats.
inline std::vector<float> floats_of(const ggml_tensor& t) {
  std::vector<float> x(static_cast<std::size_t>(ggml_nelements(&t)));
  if (t.type == GGML_TYPE_F32)
    std::memcpy(x.data(), t.data, ggml_nbytes(&t));
  else
    ggml_get_type_traits(t.type)->to_float(t.data, x.data(), ggml_nelements(&t));
  return x;
}

// The output in double, [n_q, q_heads, head_dim], of queries after `cached` cells in order.
inline std::vector<double> in_double(const GraphOfOne& graph, std::int64_t cached) {
  const NodeShape& s = graph.s;
  const std::vector<float> q = floats_of(*graph.q_rows), k = floats_of(*graph.k_cache),
                           v = floats_of(*graph.v_cache);
  const auto row = [&](const std::vector<float>& x, std::int64_t at) {
    return x.data() + at * s.head_dim;
  };
  const double scale = static_cast<double>(1.0f / std::sqrt(static_cast<float>(s.head_dim)));
  std::vector<double> out(q.size()), weights;
  for (std::int64_t i = 0; i < s.n_q; ++i)
    for (std::int64_t head = 0; head < s.q_heads; ++head) {
      const std::int64_t kv_head = head / (s.q_heads / s.kv_heads), seen = cached + i + 1;
      const float* const query = row(q, i * s.q_heads + head);
      weights.assign(static_cast<std::size_t>(seen), 0.0);
      for (std::int64_t cell = 0; cell < seen; ++cell) {
        const float* const key = row(k, cell * s.kv_heads + kv_head);
        double sum = 0;
        for (std::int64_t c = 0; c < s.head_dim; ++c)
          sum += static_cast<double>(query[c]) * static_cast<double>(key[c]);
        weights[static_cast<std::size_t>(cell)] = scale * sum;
      }
      const double top = *std::max_element(weights.begin(), weights.end());
      double all = 0;
      for (double& x : weights) all += x = std::exp(x - top);
      double* const to = out.data() + (i * s.q_heads + head) * s.head_dim;
      for (std::int64_t cell = 0; cell < seen; ++cell) {
        const float* const value = row(v, cell * s.kv_heads + kv_head);
        const double weight = weights[static_cast<std::size_t>(cell)] / all;
        for (std::int64_t c = 0; c < s.head_dim; ++c)
          to[c] += weight * static_cast<double>(value[c]);
      }
    }
  return out;
}

// The CPU backend, and this one with its parameters (a JSON object, as the configuration file).
struct Backends {
  Backends() {
    load();
    cpu.reset(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    if (!cpu) throw std::runtime_error("no CPU backend in " GGML_LIBRARIES);
    set_threads(cpu.get(), 1);
  }
  static void load() {
    if (ggml_backend_dev_count() == 0) ggml_backend_load_all_from_path(GGML_LIBRARIES);
    if (ggml_backend_dev_by_name("QuoKA") == nullptr) ggml_backend_load(QUOKA_GGML_BACKEND);
  }
  static ggml_backend_ptr quoka(const std::string& parameters, int threads = 1) {
    load();
    ggml_backend_ptr backend(ggml_backend_init_by_name("QuoKA", parameters.c_str()));
    if (backend) set_threads(backend.get(), threads);
    return backend;
  }
  static void set_threads(ggml_backend_t backend, int threads) {
    ggml_backend_reg_t const reg = ggml_backend_dev_backend_reg(ggml_backend_get_device(backend));
    reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(reg, "ggml_backend_set_n_threads"))(backend, threads);
  }

  ggml_backend_ptr cpu;
};

}  // namespace quoka_ggml
