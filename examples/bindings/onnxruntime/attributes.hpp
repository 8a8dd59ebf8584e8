// A node's attributes: those of com.microsoft's GroupQueryAttention under their names, and this
// library's own.
#pragma once

#include "ort.hpp"

#include "support/budget_text.hpp"
#include "support/refusals.hpp"

#include <quoka/attention/attention.hpp>
#include <quoka/runtime/isa.hpp>
#include <quoka/select/any_selector.hpp>

#include <cmath>
#include <cstdio>
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
  Index window = 0;    // keys that a query sees, itself among them; 0: all
  bool blind = false;  // a window of 0 keys: no query sees any, and outputs are zeros
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

// The attributes of one node. One that is absent has its default; a number may be an int or a
// float. Another kind is refused here, because the runtime does not check the kinds of a custom
// operator's attributes.
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
      quoka::detail::fail_because(std::string(name) + " is not a number, but must be one");
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
  // A number as it was written: "0.25", "1.0", "1024"; "" for none.
  std::string number_text(const char* name) const {
    float broken = 0;
    int64_t whole = 0;
    char text[64] = "";
    if (there(api_.KernelInfoGetAttribute_float(&info_, name, &broken)))
      std::snprintf(text, sizeof text, broken == std::floor(broken) ? "%.1f" : "%g",
                    static_cast<double>(broken));
    else if (there(api_.KernelInfoGetAttribute_int64(&info_, name, &whole)))
      std::snprintf(text, sizeof text, "%lld", static_cast<long long>(whole));
    return text;
  }
  // An int is a count, a float a share: support/budget_text.hpp. Throws std::invalid_argument for
  // any other.
  quoka::Budget budget(const char* name) const {
    float share = 0;
    int64_t keys = 0;
    std::optional<quoka::Budget> budget;
    if (there(api_.KernelInfoGetAttribute_float(&info_, name, &share)))
      budget = quoka_examples::share_budget(share);
    else if (there(api_.KernelInfoGetAttribute_int64(&info_, name, &keys)))
      budget = quoka_examples::count_budget(static_cast<Index>(keys));
    if (budget) return *budget;
    const std::string written = number_text(name);
    quoka::detail::fail_because(std::string(name) + " is " +
                                (written.empty() ? "no number" : written) + ", but must be " +
                                quoka_examples::budget_rules());
  }
  std::string text(const char* name, const char* otherwise) const {
    std::size_t size = 0;
    if (!there(api_.KernelInfoGetAttribute_string(&info_, name, nullptr, &size))) {
      if (is_number(name) || is_list(name))
        quoka::detail::fail_because(std::string(name) + " is not a text, but must be one");
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

// A line in the session's log.
inline void log(const OrtApi& api, const OrtKernelInfo& info, OrtLoggingLevel level,
                const std::string& line) {
  const OrtLogger* logger = nullptr;
  check(api, api.KernelInfo_GetLogger(&info, &logger));
  check(api, api.Logger_LogMessage(logger, level, ("quoka: " + line).c_str(),
                                   ORT_TSTR("attributes.hpp"), __LINE__, "GroupQueryAttention"));
}
inline std::string node_name(const OrtApi& api, const OrtKernelInfo& info) {
  std::size_t size = 0;
  check(api, api.KernelInfo_GetNodeName(&info, nullptr, &size));
  std::string name(size, '\0');
  check(api, api.KernelInfo_GetNodeName(&info, name.data(), &size));
  name.resize(size > 0 ? size - 1 : 0);  // it ends with a zero
  return name.empty() ? "a node without a name" : name;
}

// A warning in the session's log, once for each name in a process, where this machine multiplies in
// float whatever was asked for.
inline void warn_of_float(const OrtApi& api, const OrtKernelInfo& info, quoka::Arithmetic asked) {
  const quoka::Arithmetic used = quoka::arithmetic_used(asked);
  if (asked == quoka::Arithmetic::automatic || used == asked) return;
  static std::mutex mutex;
  static auto& said = *new std::set<std::string>;
  const std::lock_guard lock(mutex);
  if (!said.insert(quoka::arithmetic_name(asked)).second) return;
  log(api, info, ORT_LOGGING_LEVEL_WARNING,
      std::string("arithmetic ") + quoka::arithmetic_name(asked) + " is no faster than " +
          quoka::arithmetic_name(used) + " on this processor (" + quoka::isa() +
          "): " + quoka::arithmetic_name(used) + " is used");
}

// A line for a node that has a preset: how it selects, or, as a warning, why none of its calls can.
inline void log_selection(const OrtApi& api, const OrtKernelInfo& info, const NodeAttributes& node,
                          const Attributes& all) {
  std::size_t outputs = 0;
  check(api, api.KernelInfo_GetOutputCount(&info, &outputs));
  const char* const never = all.window > 0 || all.blind ? "it has a window"
                            : !all.causal               ? "it is not causal"
                            : outputs < 3               ? "it has no presents"
                                                        : nullptr;
  const std::string name = node_name(api, info), preset = node.text("preset", ""),
                    budget = node.number_text("budget");
  if (never != nullptr)
    return log(api, info, ORT_LOGGING_LEVEL_WARNING,
               name + " has the preset " + preset + ", but is exact: " + never);
  log(api, info, ORT_LOGGING_LEVEL_INFO,
      name + " selects keys: preset " + preset + ", budget " +
          (budget.empty() ? "the preset's" : budget) + ", chunk " + std::to_string(all.chunk) +
          ", min_past " + std::to_string(all.min_past) + ", decode " +
          std::to_string(int{all.decode}));
}

// This library's own attributes. Throws std::invalid_argument that names each which is wrong.
inline void read_own(const NodeAttributes& node, Attributes& all) {
  constexpr Index most = std::numeric_limits<std::int32_t>::max();
  quoka_examples::Refusals refused;
  bool selects = true;
  std::string preset;
  refused.in([&] {
    preset = node.text("preset", "");
    selects = !preset.empty();
  });
  for (const char* name : {"budget", "chunk", "min_past", "decode"})
    refused.in([&] {
      if (!selects && node.has(name))
        quoka::detail::fail_because(std::string("there is an attribute ") + name +
                                    ", but no preset, which says that keys are selected");
    });
  std::optional<quoka::Budget> budget;
  refused.in([&] {
    if (selects && node.has("budget")) budget = node.budget("budget");
  });
  refused.in([&] {
    if (!preset.empty()) all.selection = quoka::selection_preset(preset, budget);
  });
  refused.in([&] { all.chunk = node.whole("chunk", 128, 1, most); });
  refused.in([&] { all.min_past = node.whole("min_past", 0, 0, most); });
  refused.in([&] { all.decode = node.whole("decode", 0, 0, 1) == 1; });
  refused.in(
      [&] { all.arithmetic = quoka::arithmetic_named(node.text("arithmetic", "automatic")); });
  refused.in([&] {
    const auto processors = static_cast<Index>(std::max(1u, std::thread::hardware_concurrency()));
    const Index threads = node.whole("threads", 0, 0, 4096);
    all.workers = static_cast<int>(threads == 0 ? processors : threads);
  });
  refused.throw_if_any();
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
  const Index window = node.whole("local_window_size", -1, -most, most);  // below 0: none
  all.window = std::max<Index>(window, 0), all.blind = window == 0;
  all.causal = node.whole("causal", 1, 0, 1) == 1;
  if (!all.causal && window >= 0)
    quoka::detail::fail("local_window_size", window, "but must be -1 where", "causal", 0);
  all.rotary = node.whole("do_rotary", 0, 0, 1) == 1;
  all.interleaved = node.whole("rotary_interleaved", 0, 0, 1) == 1;
  quoka::detail::check_options(
      {.scale = all.scale, .softcap = all.softcap, .sliding_window = all.window}, all.q_heads);
  all.smooth = node.whole("smooth_softmax", -1, -1, 1) == 1;
  read_own(node, all);
  warn_of_float(api, info, all.arithmetic);
  if (all.selection) log_selection(api, info, node, all);
  return all;
}

}  // namespace quoka_onnxruntime
