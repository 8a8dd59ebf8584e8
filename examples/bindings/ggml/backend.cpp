// A ggml backend whose one operation is attention, computed by QuoKA's library: libggml-quoka.so.
// Programs built on ggml load it by GGML_BACKEND_PATH and need no change.
//
//   engine's graph ─▶ supports_op ─▶ graph_compute ─▶ Attend::run ─▶ quoka::MaskedAttention
//                     node.hpp       here             attend.hpp      mask ─▶ chunks ─▶ select ─▶ attention
//
// The device is of type ACCEL on the CPU's own buffers, as BLAS is: the scheduler moves the nodes here
// that supports_op takes, and no tensor is copied. No exception leaves this file.
#include <ggml-backend-impl.h>

#if GGML_BACKEND_API_VERSION < 2 || GGML_BACKEND_API_VERSION > 6
#error "quoka: the version of ggml's backend interface must be 2 to 6"
#include "stopped by the error above"
#endif

#include "attend.hpp"
#include "ggml_functions.hpp"

#include <quoka/runtime/isa.hpp>

#include <new>
#include <string_view>

namespace quoka_ggml {
namespace {

// examples/bindings/python/src/quoka/plugin.py looks for it in the file.
constexpr char built_for[] =
    "built for version " QUOKA_TEXT(GGML_BACKEND_API_VERSION) " of ggml's backend interface";

Settings settings;  // of this process
Stats stats;

// ---- backend: one per engine context ------------------------------------------------------------

ggml_guid_t guid() {
  static ggml_guid id{0x71, 0x75, 0x6f, 0x6b, 0x61, 0x2d, 0x67, 0x67,
                      0x6d, 0x6c, 0x2d, 0x61, 0x74, 0x74, 0x6e, 0x31};
  return &id;
}

Attend& attend_of(ggml_backend_t backend) { return *static_cast<Attend*>(backend->context); }

ggml_status compute(ggml_backend_t backend, ggml_cgraph* graph) try {
  for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
    const ggml_tensor* const node = ggml_graph_node(graph, i);
    if (node->op == GGML_OP_FLASH_ATTN_EXT && !ggml_is_empty(node)) attend_of(backend).run(*node);
  }
  return GGML_STATUS_SUCCESS;
} catch (const std::bad_alloc&) {
  say("no memory for attention");
  return GGML_STATUS_ALLOC_FAILED;
} catch (const std::exception& e) {
  say(e.what());
  return GGML_STATUS_FAILED;
}

// Engines call it before each graph.
void set_n_threads(ggml_backend_t backend, int threads) try {
  attend_of(backend).graph_begins(std::max(threads, 1));
} catch (const std::exception& e) {  // the threads are set: no memory for what it would say
  say(e.what());
}

ggml_backend_t make_backend(ggml_backend_dev_t device, const char* parameters) try {
  const Settings own = with_parameters(settings, parameters);
  // The line at the start names the program's arithmetic; this one's parameters may ask for another.
  if (const std::string instead = own.no_faster();
      own.arithmetic != settings.arithmetic && !instead.empty())
    stats.computes_in_another(instead);
  if (own.notes != settings.notes)
    for (const std::string& note : own.notes) stats.say_once("of one backend: " + note);
  auto attend = std::make_unique<Attend>(own, stats);
  attend->set_threads(GGML_DEFAULT_N_THREADS);
  auto backend = std::make_unique<ggml_backend>();
  backend->guid = guid();
  backend->iface.get_name = [](ggml_backend_t) { return "QuoKA"; };
  backend->iface.free = [](ggml_backend_t of) {
    delete &attend_of(of);
    delete of;
  };
  backend->iface.graph_compute = compute;
  backend->device = device;
  backend->context = attend.release();
  return backend.release();
} catch (const std::exception& e) {
  say(e.what());
  return nullptr;
}

// ---- device, registry ---------------------------------------------------------------------------

bool supports_op(ggml_backend_dev_t, const ggml_tensor* op) try {
  const bool of_attention = op->op == GGML_OP_SOFT_MAX && op->src[1] != nullptr;  // with a mask
  if (of_attention || op->op == GGML_OP_FLASH_ATTN_EXT) stats.asked(!of_attention);
  if (op->op != GGML_OP_FLASH_ATTN_EXT)  // or there is nothing to compute
    return op->op == GGML_OP_NONE || op->op == GGML_OP_RESHAPE || op->op == GGML_OP_VIEW ||
           op->op == GGML_OP_PERMUTE || op->op == GGML_OP_TRANSPOSE;
  const char* const why = reason_to_refuse(*op, settings.min_queries);
  if (why != nullptr) stats.declined(why);
  return why == nullptr;
} catch (const std::exception&) {
  return false;
}

ggml_backend_device_i device_interface() {
  ggml_backend_device_i i{};
  i.get_name = [](ggml_backend_dev_t) { return "QuoKA"; };
  i.get_description = [](ggml_backend_dev_t) { return "QuoKA attention on the CPU"; };
  i.get_memory = [](ggml_backend_dev_t, size_t* free, size_t* total) { *free = *total = 0; };
  i.get_type = [](ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; };
  i.get_props = [](ggml_backend_dev_t device, ggml_backend_dev_props* props) {
    *props = {};
    props->name = ggml_backend_dev_name(device);
    props->description = ggml_backend_dev_description(device);
    props->type = GGML_BACKEND_DEVICE_TYPE_ACCEL;
  };
  i.init_backend = make_backend;
  i.get_buffer_type = [](ggml_backend_dev_t) { return ggml_backend_cpu_buffer_type(); };
  i.supports_op = supports_op;
  i.supports_buft = [](ggml_backend_dev_t, ggml_backend_buffer_type_t type) {
    return ggml_backend_buft_is_host(type);
  };
  return i;
}

ggml_backend_reg_t registry() {
  static ggml_backend_reg reg{GGML_BACKEND_API_VERSION, {}, nullptr};
  static ggml_backend_device device{device_interface(), &reg, nullptr};
  // Read again where the library was unloaded and stayed in memory.
  std::string problem;
  const Settings& read = settings = read_settings(problem);
  stats.restart(read.stats, read.stats_file, read.quiet);
  if (!read.isa.empty()) quoka::use_isa(read.isa);
  if (!problem.empty()) say(problem + "; attention stays exact");
  for (const std::string& note : read.notes) say(note);
  if (!read.quiet) say(read.summary());
  reg.iface.get_name = [](ggml_backend_reg_t) { return "QuoKA"; };
  reg.iface.get_device_count = [](ggml_backend_reg_t) { return size_t{1}; };
  reg.iface.get_device = [](ggml_backend_reg_t, size_t) { return &device; };
  reg.iface.get_proc_address = [](ggml_backend_reg_t, const char* name) {
    const bool threads = std::string_view(name) == "ggml_backend_set_n_threads";
    return threads ? reinterpret_cast<void*>(set_n_threads) : nullptr;
  };
  return &reg;
}

}  // namespace
}  // namespace quoka_ggml

extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init() try {
  if (const char* const missing = quoka_ggml::find_ggml_functions(__builtin_return_address(0))) {
    quoka_ggml::say(std::string("not loaded: what loads it has no function ") + missing + " (" +
                    quoka_ggml::built_for + ")");
    return nullptr;
  }
  return quoka_ggml::registry();
} catch (const std::exception&) {
  return nullptr;  // the engine says that it was not loaded
}
