"""torch.ops.quoka.attention: quoka's exact attention as an operator of torch's.

    import quoka.torch
    out = torch.ops.quoka.attention(q, k, v, past_k, past_v)

It has a fake form, so torch.compile and torch.export take models with it. On the CPU alone, without gradients: torch refuses
other devices and backward() by the operator's name.

Once it is imported, calls of quoka run in torch's threads: torch.set_num_threads() says how many.
"""
import contextlib
import os
from typing import Optional

import torch
from torch import Tensor

from . import _core

__all__ = ["attention"]

# torch's threads run attention as well: as many as torch.set_num_threads() says, and none beside them.
with contextlib.suppress(ValueError):  # a torch without OpenMP: the library's threads
    _core.use_openmp_of(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))


def _bare(x):
    return x if x is None or not x.requires_grad else x.detach()


def _empty_result(q, v, past_v, v_pages):
    of = next((x for x in (v, past_v, v_pages) if x is not None), None)
    if of is None:
        raise ValueError("quoka: there is neither a chunk nor a past to attend to")
    return q.new_empty(*q.shape[:-1], of.shape[-1])


@torch.library.custom_op("quoka::attention", mutates_args=(), device_types="cpu")
def attention(q: Tensor, k: Optional[Tensor] = None, v: Optional[Tensor] = None, past_k: Optional[Tensor] = None,
              past_v: Optional[Tensor] = None, mask: Optional[Tensor] = None, sinks: Optional[Tensor] = None,
              alibi_slopes: Optional[Tensor] = None, scale: Optional[float] = None, causal: bool = True, window: int = 0,
              softcap: float = 0.0, arithmetic: str = "automatic", threads: int = 0, lists: Optional[Tensor] = None,
              counts: Optional[Tensor] = None, block: int = 1, k_pages: Optional[Tensor] = None, v_pages: Optional[Tensor] = None,
              block_table: Optional[Tensor] = None, lengths: Optional[Tensor] = None) -> Tensor:
    """quoka.attention() of tensors: shapes and meanings are its. The result has q's dtype: [batch, q_heads, q_len, v_dim]."""
    out = _empty_result(q, v, past_v, v_pages)
    _core.attention(_bare(q), _bare(k), _bare(v), past_k=_bare(past_k), past_v=_bare(past_v), k_pages=_bare(k_pages),
                    v_pages=_bare(v_pages), block_table=block_table, lengths=lengths, mask=_bare(mask),
                    sinks=None if sinks is None else _bare(sinks).float(),
                    alibi_slopes=None if alibi_slopes is None else _bare(alibi_slopes).float(), scale=scale,
                    causal=causal, window=window, softcap=softcap, lists=lists, counts=counts, block=block,
                    arithmetic=arithmetic, out=out, threads=threads)
    return out


@attention.register_fake
def _(q, k=None, v=None, past_k=None, past_v=None, mask=None, sinks=None, alibi_slopes=None, scale=None, causal=True,
      window=0, softcap=0.0, arithmetic="automatic", threads=0, lists=None, counts=None, block=1, k_pages=None, v_pages=None,
      block_table=None, lengths=None):
    return _empty_result(q, v, past_v, v_pages)
