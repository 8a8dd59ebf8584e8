#!/usr/bin/env python3
"""One pool or two: the time of attention in torch's threads, and in threads of its own beside them.

    threads.py [--rounds 9] [--threads 2] [--out FILE.json]
    threads.py --onnxruntime [--rounds 9] [--threads 2]        beside ONNX Runtime's threads (wants onnx, onnxruntime)

Calls: attention right after a product of torch's, whose threads then wait for the next one. A model: random weights in the
shape of SmolLM2-135M, 3 of its layers, float32, a prompt of 2,048 tokens in one call, then 32 single tokens. Once for each
OMP_WAIT_POLICY, which says how torch's threads wait: unset (they spin for a while), active (always) and passive (they
sleep). Wall-clock time, ways in turns, medians: on a machine with other work it says nothing.
"""
import argparse
import json
import os
import subprocess
import sys
import time

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--rounds", type=int, default=9)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--out", default="")
parser.add_argument("--onnxruntime", action="store_true")
parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
args = parser.parse_args()


TOKENS, DECODED = 2048, 32
CALLS = {"128 queries, 8,192 keys": (32, 128, 8192), "128 queries, 1,024 keys": (32, 128, 1024),
         "32 queries, 256 keys": (32, 32, 256), "1 query, 4,096 keys": (32, 1, 4096)}
WAYS = {"torch's threads": ("torch", args.threads), "its own": (None, args.threads), "one thread": (None, 1)}


def one_policy():
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

    import quoka
    import quoka.torch
    import quoka.transformers

    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")

    def take(way):
        pool, threads = WAYS[way]
        quoka.use_openmp_of(library if pool else None)
        quoka.set_threads(threads)

    torch.manual_seed(1)
    torch.set_num_threads(args.threads)
    times = {}
    a = torch.randn(512, 512)
    for name, (heads, queries, keys) in CALLS.items():
        q, out = torch.randn(2, 1, heads, queries, 128).unbind()
        k, own = (torch.randn(1, heads // 4, n, 128) for n in (keys, queries))
        of = times[name] = {way: [] for way in WAYS}
        for turn in range(args.rounds + 1):
            for way in WAYS:
                take(way)
                torch.mm(a, a)
                begin = time.monotonic()
                quoka.attention(q, own, own, past_k=k, past_v=k, out=out)
                if turn > 0:
                    of[way].append(1e3 * (time.monotonic() - begin))
    model = AutoModelForCausalLM.from_config(LlamaConfig(
        vocab_size=4096, hidden_size=576, intermediate_size=1536, num_hidden_layers=3, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=32768, tie_word_embeddings=True)).eval()
    tokens = torch.randint(2, 4000, (1, TOKENS + DECODED))
    prompt, token = ({way: [] for way in ("sdpa", *WAYS)} for _ in range(2))
    times["a model's prompt"], times["a model's token"] = prompt, token
    with torch.inference_mode():
        for turn in range(args.rounds + 1):
            for way in prompt:
                cache_of = DynamicCache if way == "sdpa" else quoka.transformers.Cache
                model.set_attn_implementation("sdpa" if way == "sdpa" else "quoka")
                if way != "sdpa":
                    take(way)
                cache, begin = cache_of(config=model.config), time.monotonic()
                model(tokens[:, :TOKENS], past_key_values=cache, logits_to_keep=1)
                between = time.monotonic()
                for i in range(TOKENS, TOKENS + DECODED):
                    model(tokens[:, i:i + 1], past_key_values=cache, logits_to_keep=1)
                if turn > 0:
                    prompt[way].append(1e3 * (between - begin))
                    token[way].append(1e3 * (time.monotonic() - between) / DECODED)
    print(json.dumps(times))


def beside_onnxruntime():
    """Attention right after a product of ONNX Runtime's, whose threads spin or sleep until the next one."""
    import numpy as np
    import onnxruntime
    from onnx import TensorProto, helper

    import quoka

    rng = np.random.default_rng(1)
    a = rng.standard_normal((512, 512)).astype(np.float32)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, a.shape) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "a"], ["y"])], "product", [x], [y],
                              [helper.make_tensor("a", TensorProto.FLOAT, a.shape, a.tobytes(), raw=True)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()
    for waiting, spins in (("they spin", "1"), ("they sleep", "0")):  # one session at a time: spinning outlasts a call
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = args.threads
        options.add_session_config_entry("session.intra_op.allow_spinning", spins)
        session = onnxruntime.InferenceSession(model, options)
        for name, (heads, queries, keys) in CALLS.items():
            q, out = rng.standard_normal((2, 1, heads, queries, 128)).astype(np.float32)
            k, own = (rng.standard_normal((1, heads // 4, n, 128)).astype(np.float32) for n in (keys, queries))
            times = {args.threads: [], 1: []}
            for turn in range(args.rounds + 1):
                for threads, of in times.items():
                    session.run(None, {"x": a})
                    begin = time.monotonic()
                    quoka.attention(q, own, own, past_k=k, past_v=k, out=out, threads=threads)
                    if turn > 0:
                        of.append(1e3 * (time.monotonic() - begin))
            print(f"{waiting:10s} {name:26s}" + "".join(f"  {n} of ours {sorted(x)[len(x) // 2]:.2f} ms" for n, x in times.items()),
                  flush=True)
        del session


def main():
    result = {"command": " ".join(["examples/bindings/python/threads.py", *sys.argv[1:]]), "threads": args.threads, "results": []}
    for policy in ("unset", "active", "passive"):
        environment = {key: value for key, value in os.environ.items() if key != "OMP_WAIT_POLICY"}
        if policy != "unset":
            environment["OMP_WAIT_POLICY"] = policy
        times = json.loads(subprocess.run([sys.executable, __file__, "--one", *sys.argv[1:]], env=environment, check=True,
                                          stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
        for name, ways in times.items():
            medians = {way: sorted(x)[len(x) // 2] for way, x in ways.items()}
            result["results"].append({"policy": policy, "work": name, "milliseconds": medians})
            print(f"{policy:8s} {name:26s}" + "".join(f"  {way} {x:.2f} ms" for way, x in medians.items()), flush=True)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


one_policy() if args.one else beside_onnxruntime() if args.onnxruntime else main()
