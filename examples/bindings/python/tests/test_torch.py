#!/usr/bin/env python3
"""quoka.torch: the operator against torch's own attention, compiled and exported, and what is refused."""
import os
import time
import unittest
import warnings

import torch
import torch.nn.functional as F

import quoka
import quoka.torch  # noqa: F401

torch.manual_seed(5)
AUTOMATIC = 1e-5 if quoka.arithmetic_used() == "float" else 1e-4  # it may split floats into bfloat16 numbers


def expected(q, k, v, past_k=None, past_v=None):
    if past_k is not None:
        k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
    group, past = q.shape[1] // k.shape[1], k.shape[2] - q.shape[2]
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(past)
    return F.scaled_dot_product_attention(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), attn_mask=mask)


class Operator(unittest.TestCase):
    def setUp(self):
        self.q = torch.randn(2, 6, 9, 24)
        self.k, self.v = torch.randn(2, 2, 2, 9, 24).unbind()
        self.past_k, self.past_v = torch.randn(2, 2, 2, 40, 24).unbind()
        self.all = (self.q, self.k, self.v, self.past_k, self.past_v)

    def test_is_attention(self):
        for dtype, tolerance in ((torch.float32, AUTOMATIC), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
            arrays = [x.to(dtype) for x in self.all]
            got = torch.ops.quoka.attention(*arrays)
            self.assertEqual(got.dtype, dtype)
            torch.testing.assert_close(got.double(), expected(*(x.double() for x in arrays)), atol=tolerance, rtol=0)
        by_token = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in self.all]
        torch.testing.assert_close(torch.ops.quoka.attention(*by_token), torch.ops.quoka.attention(*self.all), atol=0, rtol=0)
        narrow = (self.q, self.k, self.v[..., :20], self.past_k, self.past_v[..., :20])  # values of another width
        torch.testing.assert_close(torch.ops.quoka.attention(*narrow), torch.ops.quoka.attention(*self.all)[..., :20], atol=1e-6, rtol=0)
        mask = torch.rand(2, 1, 9, 49) < 0.8
        got = torch.ops.quoka.attention(self.q, None, None, torch.cat([self.past_k, self.k], 2),
                                        torch.cat([self.past_v, self.v], 2), mask, causal=False)
        k, v = torch.cat([self.past_k, self.k], 2), torch.cat([self.past_v, self.v], 2)
        torch.testing.assert_close(got, F.scaled_dot_product_attention(
            self.q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), attn_mask=mask), atol=AUTOMATIC, rtol=0)

    def test_the_functions_take_tensors_too(self):
        out = torch.zeros(2, 6, 9, 24, dtype=torch.bfloat16)
        quoka.attention(*(x.bfloat16() for x in self.all[:3]), out=out)
        self.assertGreater(out.abs().max(), 0.1)
        keep = quoka.select(self.q, self.past_k, budget=7)
        self.assertEqual(sum(keep.count(0, head) for head in range(keep.heads)), 7 * keep.heads)
        with self.assertRaisesRegex(ValueError, "gradient"):
            quoka.attention(self.q.requires_grad_(), self.k, self.v)

    def test_the_fake_form(self):
        torch.library.opcheck(torch.ops.quoka.attention.default, self.all, test_utils=(
            "test_schema", "test_faketensor", "test_autograd_registration"))

        class Layer(torch.nn.Module):
            def forward(self, q, k, v, past_k, past_v):
                return torch.ops.quoka.attention(q, k, v, past_k, past_v, softcap=3.0).sum(-1) * 2

        fake = torch.empty(2, 2, 9, 20, device="meta")
        self.assertEqual(torch.ops.quoka.attention(self.q.to("meta"), self.k.to("meta"), fake).shape, (2, 6, 9, 20))
        plain = Layer()(*self.all)
        program = torch.export.export(Layer(), self.all)
        torch.testing.assert_close(program.module()(*self.all), plain, atol=0, rtol=0)
        compiled = torch.compile(Layer(), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(*self.all), plain, atol=0, rtol=0)

    def test_lists(self):
        lists = torch.randint(-1, 49, (2, 2, 9, 12))  # int64, as topk() has them
        mask = torch.zeros(2, 2, 9, 50, dtype=torch.bool).scatter_(3, torch.where(lists < 0, 49, lists), True)[..., :49]
        mask = mask.repeat_interleave(3, 1)
        mask &= torch.ones(9, 49, dtype=torch.bool).tril(40)
        k, v = torch.cat([self.past_k, self.k], 2), torch.cat([self.past_v, self.v], 2)
        wanted = F.scaled_dot_product_attention(self.q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), attn_mask=mask)
        wanted = torch.where(mask.any(3, keepdim=True), wanted, 0.0)  # a row without keys
        torch.testing.assert_close(torch.ops.quoka.attention(*self.all, lists=lists), wanted, atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.ops.quoka.attention(*self.all, lists=lists, counts=torch.zeros(2, 2, 9, dtype=torch.int32)),
                                   torch.zeros_like(wanted), atol=0, rtol=0)
        of_all = torch.ops.quoka.attention(*self.all, lists=torch.arange(7).expand(9, 7), block=7, arithmetic="float")
        torch.testing.assert_close(of_all, torch.ops.quoka.attention(*self.all, arithmetic="float"), atol=1e-6, rtol=0)

    def test_pages(self):
        k_pages, v_pages = (torch.zeros(12, 8, 2, x.shape[-1]) for x in (self.past_k, self.past_v))
        table = torch.randperm(12)[:10].reshape(2, 5)
        for pool, x in ((k_pages, self.past_k), (v_pages, self.past_v)):
            pool[table] = x.transpose(1, 2).reshape(2, 5, 8, 2, -1)
        pages = {"k_pages": k_pages, "v_pages": v_pages, "block_table": table, "lengths": torch.tensor([40, 40])}
        plain = torch.ops.quoka.attention(*self.all)
        torch.testing.assert_close(torch.ops.quoka.attention(self.q, self.k, self.v, **pages), plain, atol=0, rtol=0)
        compiled = torch.compile(lambda: torch.ops.quoka.attention(self.q, **pages), fullgraph=True, backend="aot_eager")
        self.assertEqual(compiled().shape, plain.shape)

    @unittest.skipUnless(os.path.isdir("/proc/self/task") and "OpenMP" in torch.__config__.parallel_info(), "no OpenMP, or no /proc")
    def test_calls_run_in_torchs_threads(self):
        before = torch.get_num_threads()
        self.addCleanup(torch.set_num_threads, before)
        torch.set_num_threads(3)
        torch.randn(500, 500) @ torch.randn(500, 500)
        threads = len(os.listdir("/proc/self/task"))
        q, k = torch.randn(1, 8, 64, 64), torch.randn(1, 2, 500, 64)
        quoka.attention(q, causal=False, past_k=k, past_v=k)
        self.assertEqual(len(os.listdir("/proc/self/task")), threads)
        quoka.attention(q, causal=False, past_k=k, past_v=k, threads=5)
        self.assertEqual(len(os.listdir("/proc/self/task")), threads + 4)

    def test_what_is_refused_says_the_operator(self):
        out = torch.ops.quoka.attention(self.q.clone().requires_grad_(), self.k, self.v)
        with self.assertRaisesRegex(RuntimeError, "quoka::attention|quoka.attention"):
            out.sum().backward()
        with self.assertRaisesRegex(ValueError, "neither"):
            torch.ops.quoka.attention(self.q)
        with self.assertRaisesRegex(ValueError, "8.*9|9.*8"):
            torch.ops.quoka.attention(self.q, self.k[:, :, :8], self.v)

    def test_the_negative_bit(self):
        q, k, v = self.all[:3]
        expected = quoka.attention(q, k, v)
        negative = [torch._neg_view(-x) for x in (q, k, v)]
        self.assertTrue(negative[0].is_neg() and torch.equal(negative[0], q))
        np_equal = lambda got, want=expected: self.assertTrue((got == want).all())
        np_equal(quoka.attention(*negative))
        np_equal(torch.ops.quoka.attention(*negative).numpy())
        np_equal(quoka.attention(torch.complex(q, -q).conj().imag, k, v))
        mask = torch.randn(9, 9)
        np_equal(quoka.attention(q, k, v, mask=torch._neg_view(-mask)), quoka.attention(q, k, v, mask=mask))
        sinks = torch.randn(6)
        np_equal(quoka.attention(q, k, v, sinks=torch._neg_view(-sinks)), quoka.attention(q, k, v, sinks=sinks))
        with self.assertRaisesRegex(ValueError, "sinks requires a gradient"):
            quoka.attention(q, k, v, sinks=sinks.requires_grad_())
        cache = quoka.Cache(2, 2, 24)
        cache.append(*negative[1:])
        np_equal(cache.k, k.numpy())
        out = torch._neg_view(torch.zeros(2, 6, 9, 24))
        with self.assertRaisesRegex(ValueError, "out has torch's negative bit"):
            quoka.attention(q, k, v, out=out)
        self.assertEqual(out.abs().max(), 0)

    def test_forward_mode_is_refused(self):
        q, k, v = self.all[:3]
        for call in (lambda x: torch.ops.quoka.attention(x, k, v), lambda x: torch.from_numpy(quoka.attention(x, k, v)),
                     lambda x: torch.from_numpy(quoka.attention(q, k, v, sinks=x[0, :, 0, 0]))):
            with self.assertRaisesRegex(ValueError, "forward-mode"):
                torch.func.jvp(call, (q,), (q,))
            with torch.autograd.forward_ad.dual_level(), self.assertRaisesRegex(ValueError, "forward-mode"):
                call(torch.autograd.forward_ad.make_dual(q, q))

    def test_vmap(self):
        q = torch.randn(3, *self.q.shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it runs in a loop, torch says
            got = torch.vmap(lambda x: torch.ops.quoka.attention(x, self.k, self.v))(q)
        torch.testing.assert_close(got, torch.stack([torch.ops.quoka.attention(x, self.k, self.v) for x in q]), atol=0, rtol=0)
        with self.assertRaisesRegex(ValueError, "q is of type Tensor"):
            torch.vmap(lambda x: torch.from_numpy(quoka.attention(x, self.k, self.v)))(q)

    def test_a_trace(self):
        q = self.q + 1
        traced = torch.jit.trace(lambda x: torch.ops.quoka.attention(x, self.k, self.v), (self.q,))
        torch.testing.assert_close(traced(q), torch.ops.quoka.attention(q, self.k, self.v), atol=0, rtol=0)
        with self.assertRaisesRegex(ValueError, "q is a tensor under torch.jit.trace"):
            torch.jit.trace(lambda x: torch.from_numpy(quoka.attention(x, self.k, self.v)), (self.q,))

    def test_overhead(self):
        q, k, v = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
        for _ in range(200):
            torch.ops.quoka.attention(q, k, v, threads=1)
        times = []
        for _ in range(15):
            begin = time.process_time()
            for _ in range(200):
                torch.ops.quoka.attention(q, k, v, threads=1)
            times.append((time.process_time() - begin) / 200)
        print(f"a call of the operator: {sorted(times)[7] * 1e6:.1f} microseconds of CPU time (median)")
        self.assertLess(sorted(times)[0], 500e-6)  # a bound that holds on any machine


if __name__ == "__main__":
    unittest.main()
