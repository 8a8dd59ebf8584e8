// Which operations this backend takes. What it does not take, the CPU backend computes.
//
// Engines decide whether to use flash attention at all by a graph with one token per sequence, and
// switch it off if that lands on another device than the layer's weights. They ask before anything was
// cached: their cache is zeros then. So a cache without keys is refused for few queries, and decode
// steps over a cache with keys are taken.
#pragma once

#include "settings.hpp"

#include <ggml.h>

namespace quoka_ggml {

// Null: taken.
const char* reason_to_refuse(const ggml_tensor& op, const Settings& settings);

}  // namespace quoka_ggml
