"""Fast attention for LLM inference on CPUs: exact, and query-oriented KV selection.

    out = quoka.attention(q, k, v)                                  # exact
    selection = quoka.select(q, past_k, budget=1024)                # which past keys a chunk needs
    out = quoka.attention(q, k, v, past_k=past_k, past_v=past_v, selection=selection)

A layer that keeps its own cache: quoka.Prefill. Arrays: whatever hands out its memory by DLPack or the buffer protocol
(numpy, torch, jax), float32, float16 or bfloat16, with any strides.
"""
from ._core import (Cache, Prefill, Selection, State, __version__, alibi_slopes, arithmetic_used, attention, index_keys,
                    isa, select, set_threads, use_openmp_of)

__all__ = ["Cache", "Prefill", "Selection", "State", "__version__", "alibi_slopes", "arithmetic_used", "attention",
           "index_keys", "isa", "select", "set_threads", "use_openmp_of"]
