#!/usr/bin/env python3
"""The overhead of a call: attention of one token over one past key, CPU time of the calling thread,
medians.

The work itself takes less than two microseconds: the printed times are nearly all overhead, array
by array.
"""
import time

import numpy as np

import quoka

x, k, past = (number * np.ones((1, 1, 1, 8), np.float32) for number in (1, 2, 3))
out = np.zeros_like(x)
keep = quoka.Selection([[[0]]], 1)
layer = quoka.Prefill(1, 1, 8, capacity=100000)


def median(call, rounds=31, calls=200):
    times = []
    for _ in range(rounds):
        begin = time.thread_time()
        for _ in range(calls):
            call()
        times.append((time.thread_time() - begin) / calls)
    return sorted(times)[rounds // 2] * 1e6


for name, call in (("attention(q, k, v, past_k, past_v, out)",
                    lambda: quoka.attention(x, k, x, past_k=past, past_v=past, out=out, threads=1)),
                   ("the same, a new array", lambda: quoka.attention(x, k, x, past_k=past, past_v=past, threads=1)),
                   ("the same, of a selection",
                    lambda: quoka.attention(x, k, x, past_k=past, past_v=past, out=out, selection=keep, threads=1)),
                   ("Prefill.forward(q, k, v, out)", lambda: (layer.truncate(0), layer.forward(x, x, x, out=out, threads=1)))):
    call()
    print(f"{name:45s} {median(call):6.1f} microseconds")
try:
    import torch
except ImportError:
    pass
else:
    import quoka.torch

    t, tk, tp, o = (torch.from_numpy(array.copy()) for array in (x, k, past, out))
    for name, call in (("attention of torch's tensors, out",
                        lambda: quoka.attention(t, tk, t, past_k=tp, past_v=tp, out=o, threads=1)),
                       ("torch.ops.quoka.attention",
                        lambda: torch.ops.quoka.attention(t, tk, t, tp, tp, threads=1))):
        call()
        print(f"{name:45s} {median(call):6.1f} microseconds")
