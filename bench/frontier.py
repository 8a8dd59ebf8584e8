#!/usr/bin/env python3
"""What bench/frontier reads, of a model with real weights: the same weights as F16 in a file of its form, and the tokens of a text.

    frontier.py MODEL.gguf --text emma.txt --tokens 4096 --to FOLDER

MODEL.gguf is of the architecture llama, without biases, as SmolLM2's and TinyLlama's are: bench/frontier computes just that, under the name
smollm3. Prints the paths of both files. Needs gguf, transformers and torch.
"""
import argparse
import json
import pathlib

import gguf
import numpy as np
from transformers import AutoTokenizer

NUMBERS = {"block_count": "uint32", "embedding_length": "uint32", "feed_forward_length": "uint32", "attention.head_count": "uint32",
           "attention.head_count_kv": "uint32", "attention.layer_norm_rms_epsilon": "float32", "rope.freq_base": "float32"}


def convert(model, to):
    reader = gguf.GGUFReader(model)
    of = lambda key: reader.fields[f"llama.{key}"].contents()  # noqa: E731
    if (name := reader.fields["general.architecture"].contents()) != "llama":
        raise SystemExit(f"{model}: its architecture is {name}, not llama")
    writer = gguf.GGUFWriter(to, "smollm3")
    for key, kind in NUMBERS.items():
        getattr(writer, f"add_{kind}")(f"smollm3.{key}", of(key))
    writer.add_uint32("smollm3.vocab_size", next(int(t.shape[1]) for t in reader.tensors if t.name == "token_embd.weight"))
    dim = of("embedding_length") // of("attention.head_count")
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        writer.add_uint32(f"smollm3.{key}", dim)
    writer.add_uint32("smollm3.no_rope_layer_interval", 0)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32 if values.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("model", type=pathlib.Path)
    parse.add_argument("--text", type=pathlib.Path, required=True)
    parse.add_argument("--tokens", type=int, default=4096)
    parse.add_argument("--to", type=pathlib.Path, required=True)
    args = parse.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    weights = args.to / f"{args.model.stem}.f16.gguf"
    if not weights.exists():
        convert(args.model, weights)
    tokenizer = AutoTokenizer.from_pretrained(str(args.model.parent), gguf_file=args.model.name)
    tokens = args.to / f"{args.text.stem}_{args.tokens}.json"
    ids = tokenizer(args.text.read_text(encoding="utf-8")[:8 * args.tokens]).input_ids[:args.tokens]
    if len(ids) < args.tokens:
        raise SystemExit(f"{args.text} has {len(ids)} tokens, not {args.tokens}")
    tokens.write_text(json.dumps(ids) + "\n")
    print(weights, tokens, sep="\n")


if __name__ == "__main__":
    main()
