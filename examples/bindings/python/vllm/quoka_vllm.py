"""Exact attention of quoka in vLLM on CPUs: a plug-in, which vLLM loads by itself once it is installed.

vLLM's public interface lets a class stand for CPU_ATTN (register_backend()). This one writes keys and values as plain rows

    kv_cache  [blocks, kv_heads, block_size, 2 * head_size]    a token's key, then its value

where vLLM's own kernels keep an order of their own, and quoka.attention() reads the blocks where they lie, by vLLM's table: one
call for all sequences that have as many queries, as single tokens have. Decoders with a cache of float32, float16 or bfloat16: windows, soft-cap, ALiBi and sinks. Others are vLLM's own.
"""

import functools
import itertools

import quoka
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


def register():
    """vLLM calls this in each of its processes."""
    register_backend(AttentionBackendEnum.CPU_ATTN, "quoka_vllm.Backend")


class Backend(CPUAttentionBackend):
    @staticmethod
    def get_impl_cls():
        return Attention


class Attention(CPUAttentionBackendImpl):
    @functools.cached_property
    def _ours(self):
        return self.attn_type == AttentionType.DECODER and not self.is_fp8_kv_cache

    def do_kv_cache_update(self, layer, key, value, kv_cache, slot_mapping):
        if not self._ours:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        tokens = (slot_mapping >= 0).nonzero().flatten()  # the others are padding
        slots, block_size = slot_mapping[tokens], kv_cache.shape[2]
        blocks, rows = slots // block_size, slots % block_size
        kv_cache[blocks, :, rows, :self.head_size] = key[tokens].to(kv_cache.dtype)
        kv_cache[blocks, :, rows, self.head_size:] = value[tokens].to(kv_cache.dtype)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None):
        if attn_metadata is None or not self._ours:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale)
        if output_scale is not None or output_block_scale is not None or attn_metadata.dynamic_causal is not None:
            raise NotImplementedError("quoka_vllm: results in 8 bits and masks that change from query to query are not here")
        heads, size = self.num_heads, self.head_size
        q, out = query.view(-1, heads, size), output.view(-1, heads, size)
        pages = kv_cache.transpose(1, 2)  # [blocks, block_size, kv_heads, 2 * head_size]
        begins = attn_metadata.query_start_loc.tolist()
        sinks, slopes = (None if x is None else x.float() for x in (self.sinks, self.alibi_slopes))
        for count, group in itertools.groupby(range(len(begins) - 1), lambda i: begins[i + 1] - begins[i]):
            if count == 0:
                continue
            group = [*group]
            first, last = group[0], group[-1] + 1
            queries, results = (x[begins[first]:begins[last]].unflatten(0, (-1, count)).transpose(1, 2) for x in (q, out))
            quoka.attention(queries, k_pages=pages[..., :size], v_pages=pages[..., size:],
                            block_table=attn_metadata.block_table[first:last], lengths=attn_metadata.seq_lens[first:last],
                            sinks=sinks, alibi_slopes=slopes, scale=self.scale, causal=attn_metadata.causal,
                            window=max(self.sliding_window, 0), softcap=self.logits_soft_cap, out=results)
        return output
