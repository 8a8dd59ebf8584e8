"""vLLM on CPUs with its own attention and with quoka's: the same tokens? And seconds of a long prompt, in turns.

    python try.py [--tokens 8000] [--rounds 3] [--dtype float32] [--window 256]

A model of random weights in the shape of SmolLM2-135M (9 query heads, 3 KV heads, 64 channels), four layers, of all
tokens or with a window; four prompts of different lengths in one batch, prefilled 512 tokens at a time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

LENGTHS = (5, 33, 1700, 129)


def make_model(folder, window):
    import torch
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(1)
    config = MistralConfig(vocab_size=1024, hidden_size=576, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=9,
                           num_key_value_heads=3, head_dim=64, max_position_embeddings=65536, initializer_range=0.2,
                           sliding_window=window)
    MistralForCausalLM(config).save_pretrained(folder)


def run(folder, tokens, dtype):
    """In a process of its own: the tokens of each prompt, then the seconds of a long one."""
    import torch
    from vllm import LLM, SamplingParams

    model = LLM(model=folder, skip_tokenizer_init=True, dtype=dtype, enforce_eager=True, max_model_len=tokens + 64,
                max_num_batched_tokens=512, kv_cache_memory_bytes=1 << 29, enable_prefix_caching=False)
    random = torch.Generator().manual_seed(0)
    prompts = [{"prompt_token_ids": torch.randint(0, 1024, (n,), generator=random).tolist()} for n in (*LENGTHS, tokens)]
    greedy = lambda n: SamplingParams(temperature=0, max_tokens=n, detokenize=False, ignore_eos=True)  # noqa: E731
    chosen = [list(one.outputs[0].token_ids) for one in model.generate(prompts[:-1], greedy(24), use_tqdm=False)]
    begin = time.perf_counter()
    model.generate(prompts[-1:], greedy(1), use_tqdm=False)
    print("RESULT " + json.dumps([chosen, time.perf_counter() - begin]))


def in_process(folder, arguments, plugins):
    command = [sys.executable, __file__, "--tokens", str(arguments.tokens), "--dtype", arguments.dtype, "--model", folder]
    environment = {**os.environ, "VLLM_PLUGINS": plugins, "VLLM_LOGGING_LEVEL": "WARNING"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    for line in ran.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line[len("RESULT "):])
    sys.exit(f"vLLM failed:\n{ran.stdout[-4000:]}\n{ran.stderr[-4000:]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--window", type=int)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model:
        run(arguments.model, arguments.tokens, arguments.dtype)
        return
    with tempfile.TemporaryDirectory() as folder:
        make_model(folder, arguments.window)
        ways = {"vLLM's own": "", "quoka": "quoka"}
        results = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, plugins in ways.items():
                results[name].append(in_process(folder, arguments, plugins))
    own, ours = (results[name][0][0] for name in ways)
    for n, a, b in zip(LENGTHS, own, ours):
        same = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), len(a))
        print(f"prompt of {n:,} tokens: {same} of {len(a)} tokens the same")
    for name, all_rounds in results.items():
        print(f"{name}: {sorted(seconds for _, seconds in all_rounds)[len(all_rounds) // 2]:.2f} s for {arguments.tokens:,} tokens")
    sys.exit(own != ours and arguments.dtype == "float32")


if __name__ == "__main__":
    main()
