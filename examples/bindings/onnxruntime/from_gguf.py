#!/usr/bin/env python3
"""Turns a GGUF file into a folder that onnxruntime-genai's builder reads: weights in float, config and tokenizer.

    from_gguf.py models/SmolLM2-135M-Instruct.Q4_1.gguf build/smollm2
    python -m onnxruntime_genai.models.builder -m smollm2 -i build/smollm2 -o build/smollm2-onnx -p int4 -e cpu

For models that you have only as GGUF; the builder downloads others by their name. Needs torch, transformers, gguf.
"""
import argparse
import pathlib


def main():
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("model", type=pathlib.Path)
    parse.add_argument("folder", type=pathlib.Path)
    flags = parse.parse_args()
    if not flags.model.is_file():
        parse.error(f"there is no file {flags.model}")

    import torch
    import transformers
    from safetensors.torch import save_file

    where = {"pretrained_model_name_or_path": flags.model.parent, "gguf_file": flags.model.name}
    transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(flags.folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    config.pop("quantization_config", None)  # weights are float now
    type(model.config).from_dict(config).save_pretrained(flags.folder)
    tied = model.config.tie_word_embeddings
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    save_file(weights, flags.folder / "model.safetensors", metadata={"format": "pt"})
    print(flags.folder)


if __name__ == "__main__":
    main()
