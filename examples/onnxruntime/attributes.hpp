// What a node says: the attributes of com.microsoft's GroupQueryAttention under their names, and this library's own.
#pragma once

#include "ort.hpp"

#include <quoka/attention/attention.hpp>
#include <quoka/runtime/isa.hpp>
#include <quoka/select/any_selector.hpp>

#include <cmath>
#include <limits>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>

namespace quoka_onnxruntime {

struct Attributes {
  Index q_heads = 0, kv_heads = 0;
  float scale = 0;  // 0: 1 / sqrt(head_dim)
  float softcap = 0;
  Index window = 0;  // keys that a query sees, itself among them; 0: all
  bool causal = true;
  bool rotary = false, interleaved = false;
  bool smooth = false;  // one more key of logit 0, without a value

  std::optional<quoka::SelectionOptions> selection = {};  // absent: exact
  Index chunk = 128;                                      // queries that select together
  Index min_past = 0;                                     // fewer keys before a chunk: exact
  bool decode = false;                                    // single and few queries select, too
  quoka::Arithmetic arithmetic = quoka::Arithmetic::automatic;
  int workers = 1;  // at most
};

// The attributes of one node. One that is absent has its default; of numbers whole and broken ones are the same. One of
// another kind is refused: the runtime knows no kinds of a custom operator's attributes.
class NodeAttributes {
 public:
  NodeAttributes(const OrtApi& api, const OrtKernelInfo& info) : api_(api), info_(info) {}

  double number(const char* name, double otherwise) const {
    float broken = 0;
    if (there(api_.KernelInfoGetAttribute_float(&info_, name, &broken))) return broken;
    int64_t whole = 0;
    if (there(api_.KernelInfoGetAttribute_int64(&info_, name, &whole)))
      return static_cast<double>(whole);
    if (is_text(name) || is_list(name))
      quoka::detail::fail_because(std::string(name) + " is no number, but must be one");
    return otherwise;
  }
  // Whether the node has it, of whatever kind.
  bool has(const char* name) const { return is_number(name) || is_text(name) || is_list(name); }
  // Throws std::invalid_argument outside [least, most].
  Index whole(const char* name, Index otherwise, Index least, Index most) const {
    const double value = number(name, static_cast<double>(otherwise));
    if (value != std::floor(value) || value < static_cast<double>(least) ||
        value > static_cast<double>(most))
      quoka::detail::fail_range(
          name, value,
          std::string("[") + std::to_string(least) + ", " + std::to_string(most) + "], whole");
    return static_cast<Index>(value);
  }
  std::string text(const char* name, const char* otherwise) const {
    std::size_t size = 0;
    if (!there(api_.KernelInfoGetAttribute_string(&info_, name, nullptr, &size))) {
      if (is_number(name) || is_list(name))
        quoka::detail::fail_because(std::string(name) + " is no text, but must be one");
      return otherwise;
    }
    std::string value(size, '\0');
    check(api_, api_.KernelInfoGetAttribute_string(&info_, name, value.data(), &size));
    value.resize(size > 0 ? size - 1 : 0);  // it ends with a zero
    return value;
  }

 private:
  bool is_number(const char* name) const {
    float broken = 0;
    int64_t whole = 0;
    return there(api_.KernelInfoGetAttribute_float(&info_, name, &broken)) ||
           there(api_.KernelInfoGetAttribute_int64(&info_, name, &whole));
  }
  bool is_text(const char* name) const {
    std::size_t size = 0;
    return there(api_.KernelInfoGetAttribute_string(&info_, name, nullptr, &size));
  }
  bool is_list(const char* name) const {
    std::size_t size = 0;
    return there(api_.KernelInfoGetAttributeArray_float(&info_, name, nullptr, &size)) ||
           there(api_.KernelInfoGetAttributeArray_int64(&info_, name, nullptr, &size));
  }
  bool there(OrtStatus* status) const {
    if (status == nullptr) return true;
    api_.ReleaseStatus(status);
    return false;
  }

  const OrtApi& api_;
  const OrtKernelInfo& info_;
};

inline quoka::Arithmetic arithmetic_of(const std::string& name) {
  using quoka::Arithmetic;
  if (name == "automatic") return Arithmetic::automatic;
  if (name == "single") return Arithmetic::single;
  if (name == "bfloat16") return Arithmetic::bfloat16;
  if (name == "bfloat16_x2") return Arithmetic::bfloat16_x2;
  if (name == "bfloat16_x3") return Arithmetic::bfloat16_x3;
  if (name == "int8") return Arithmetic::int8;
  quoka::detail::fail_because("arithmetic is \"" + name +
                              "\", but must be automatic, single, bfloat16, bfloat16_x2, "
                              "bfloat16_x3 or int8");
}

// A number below 1 is a share of the past, others are keys.
inline quoka::Budget budget_of(double budget) {
  if (budget > 0 && budget < 1) return quoka::Budget::share(static_cast<float>(budget));
  if (!(budget >= 1 && budget == std::floor(budget) &&
        budget <= static_cast<double>(quoka::max_keys)))
    quoka::detail::fail_range("budget", budget,
                              "(0, 1), a share of the past, nor a whole number of keys from 1 on");
  return quoka::Budget::keys(static_cast<Index>(budget));
}

// A warning in the session's log, once for each name in a process, where this machine multiplies in float whatever was
// asked for.
inline void warn_of_float(const OrtApi& api, const OrtKernelInfo& info, quoka::Arithmetic asked) {
  const quoka::Arithmetic used = quoka::arithmetic_used(asked);
  if (asked == quoka::Arithmetic::automatic || used == asked) return;
  static std::mutex mutex;
  static auto& said = *new std::set<std::string>;
  const std::lock_guard lock(mutex);
  if (!said.insert(asked.name()).second) return;
  const OrtLogger* logger = nullptr;
  check(api, api.KernelInfo_GetLogger(&info, &logger));
  const std::string text = std::string("quoka: arithmetic ") + asked.name() +
                           " is no faster than " + used.name() + " on this processor (" +
                           quoka::isa() + "): " + used.name() + " is used";
  check(api, api.Logger_LogMessage(logger, ORT_LOGGING_LEVEL_WARNING, text.c_str(),
                                   ORT_TSTR("attributes.hpp"), __LINE__, "GroupQueryAttention"));
}

// Throws std::invalid_argument for what no attention of this library's does, by its name.
inline Attributes read_attributes(const OrtApi& api, const OrtKernelInfo& info) {
  const NodeAttributes node(api, info);
  constexpr Index most = std::numeric_limits<std::int32_t>::max();
  for (const char* name : {"kv_cache_bit_width", "qk_output", "sliding_window_cache"})
    if (const double value = node.number(name, 0); value != 0)
      quoka::detail::fail_range(name, value, "{0}: GroupQueryAttention of quoka has no such thing");
  for (const char* name : {"k_quant_type", "v_quant_type"})
    if (const std::string value = node.text(name, "NONE"); value != "NONE")
      quoka::detail::fail_because(std::string(name) + " is \"" + value +
                                  "\", but must be NONE: caches of 8 and 4 bits are not read");
  Attributes all;
  all.q_heads = node.whole("num_heads", 0, 1, most);
  all.kv_heads = node.whole("kv_num_heads", 0, 1, all.q_heads);
  if (all.q_heads % all.kv_heads != 0)
    quoka::detail::fail("num_heads", all.q_heads, "but must be a multiple of", "kv_num_heads",
                        all.kv_heads);
  all.scale = static_cast<float>(node.number("scale", 0));
  all.softcap = static_cast<float>(node.number("softcap", 0));
  all.window = std::max<Index>(node.whole("local_window_size", -1, -1, most), 0);
  all.causal = node.whole("causal", 1, 0, 1) == 1;
  if (!all.causal && all.window != 0)
    quoka::detail::fail("local_window_size", all.window, "but must be -1 where", "causal", 0);
  all.rotary = node.whole("do_rotary", 0, 0, 1) == 1;
  all.interleaved = node.whole("rotary_interleaved", 0, 0, 1) == 1;
  quoka::detail::check_options(
      {.scale = all.scale, .softcap = all.softcap, .sliding_window = all.window}, all.q_heads);
  all.smooth = node.whole("smooth_softmax", -1, -1, 1) == 1;
  const std::string preset = node.text("preset", "");
  if (!preset.empty()) {
    std::optional<quoka::Budget> budget;
    if (node.has("budget")) budget = budget_of(node.number("budget", 0));
    all.selection = quoka::selection_preset(preset, budget);
  } else {
    for (const char* name : {"budget", "chunk", "min_past", "decode"})
      if (node.has(name))
        quoka::detail::fail_because(std::string("there is an attribute ") + name +
                                    ", but no preset, which says that keys are selected");
  }
  all.chunk = node.whole("chunk", 128, 1, most);
  all.min_past = node.whole("min_past", 0, 0, most);
  all.decode = node.whole("decode", 0, 0, 1) == 1;
  all.arithmetic = arithmetic_of(node.text("arithmetic", "automatic"));
  warn_of_float(api, info, all.arithmetic);
  const auto processors = static_cast<Index>(std::max(1u, std::thread::hardware_concurrency()));
  const Index threads = node.whole("threads", 0, 0, 4096);
  all.workers = static_cast<int>(threads == 0 ? processors : threads);
  return all;
}

}  // namespace quoka_onnxruntime
