// A layer with headers alone, as most have it; with QUOKA_TEST_ASKED it names what few ask for. check.cmake
// looks at what was compiled.

#include <quoka/quoka.hpp>

void forward(const quoka::Rows& q, const quoka::Rows& k, const quoka::Rows& v,
             const quoka::AttentionOutput& out) {
#if defined(QUOKA_TEST_ASKED)
  quoka::ChunkedPrefill<quoka::QuokaSelector> layer({.q_heads = 32, .kv_heads = 8, .head_dim = 128},
                                                    {.domain = quoka::Domain::softmax},
                                                    {.arithmetic = quoka::Arithmetic::fixed16});
#else
  quoka::ChunkedPrefill<quoka::QuokaSelector> layer({.q_heads = 32, .kv_heads = 8, .head_dim = 128},
                                                    {.budget = quoka::Budget::keys(1024)},
                                                    {.arithmetic = quoka::Arithmetic::single});
#endif
  layer.forward(q, k, v, out, quoka::SerialExecutor{});
}
