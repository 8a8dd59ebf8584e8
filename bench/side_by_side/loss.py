#!/usr/bin/env python3
"""The loss by an engine's rounding and selection in a GGUF model: the negative log-likelihood of a
text's tokens, JSON on stdout. models.py calls it.

    loss.py ENGINE MODEL.gguf --text FILE --tokens 8192 [--threads 2] [--chunk 512]

ENGINE: as first_token.py has it. Tokens [N / 2, N) of the first N count, each predicted by all before it; in nats. The prompt is
computed as first_token.py does: by transformers in one call, by OpenVINO in chunks. OpenVINO GenAI
gives no logits of a prompt, so the model that it makes of the file is run in the same way: with
PagedAttention, its default cache, and for XAttention the settings of its SparseAttentionConfig. All
engines get the tokens of transformers' tokenizer.
"""

import json
import pathlib
import shutil
import sys
import tempfile

import numpy as np

from first_token import engine_arguments, of_engine, token_ids, transformers_network


def losses(logits, following):
    """The likelihoods of tokens `following` [n], which logits [n, vocabulary] predict."""
    logits = logits.astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    total = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
    return total - logits[np.arange(len(following)), following]


def openvino(model, options, flags):
    import openvino as ov
    import openvino_genai as genai
    from openvino._offline_transformations import paged_attention_transformation

    sparse = "xattention" in options
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(model, folder)  # what GenAI makes of it is written beside it
        genai.LLMPipeline(str(pathlib.Path(folder) / pathlib.Path(model).name), "CPU", enable_save_ov_model=True)
        core = ov.Core()
        network = core.read_model(str(pathlib.Path(folder) / "openvino_model.xml"))
        paged_attention_transformation(network, allow_xattention=sparse)
        hint = {"INFERENCE_PRECISION_HINT": options["precision"]} if "precision" in options else {}
        compiled = core.compile_model(network, "CPU", {"INFERENCE_NUM_THREADS": flags.threads} | hint)
    request, defaults = compiled.create_infer_request(), genai.SparseAttentionConfig()

    def give(name, value, dtype=np.int32):
        request.set_tensor(name, ov.Tensor(np.array(value, dtype)))

    def run(ids):
        size, caches = None, [one for one in compiled.inputs if "_cache." in one.any_name]
        for one in caches:
            extent = [one.partial_shape[i] for i in range(4)]
            value = one.any_name.startswith("value")
            size = extent[2].get_length() if value else size
        blocks = -(-len(ids) // size)
        for one in caches:
            request.set_tensor(one, ov.Tensor(one.element_type, [blocks, *(one.partial_shape[i].get_length() for i in (1, 2, 3))]))
        if sparse:
            give("xattention_block_size", defaults.xattention_block_size)
            give("xattention_stride", defaults.xattention_stride)
            for one in compiled.inputs:
                if one.any_name.startswith("xattention_threshold"):
                    request.set_tensor(one, ov.Tensor(np.array([float(options["xattention"])], np.float32)))
        for past in range(0, len(ids), flags.chunk):
            chunk = ids[past:past + flags.chunk]
            used = -(-(past + len(chunk)) // size)
            give("input_ids", chunk, np.int64)
            give("position_ids", np.arange(past, past + len(chunk)), np.int64)
            give("past_lens", [past])
            give("subsequence_begins", [0, len(chunk)])
            give("block_indices", np.arange(used))
            give("block_indices_begins", [0, used])
            give("max_context_len", past + len(chunk))
            request.infer()
            yield past, request.get_output_tensor(0).data.reshape(len(chunk), -1)

    return run


def transformers(model, options, flags):
    import torch

    network, cache = transformers_network(model, options, flags.threads)

    def run(ids):
        with torch.inference_mode():
            logits = network(torch.tensor(ids)[None], past_key_values=cache(), logits_to_keep=len(ids) - len(ids) // 2 + 1).logits[0]
        first = len(ids) - len(logits)
        for at in range(0, len(logits), flags.chunk):
            yield first + at, logits[at:at + flags.chunk].float().numpy()

    return run


def main():
    flags = engine_arguments(__doc__, 8192).parse_args()
    run = of_engine(flags, openvino, transformers)
    ids = token_ids(flags.model, flags.text)[:flags.tokens]
    if len(ids) < flags.tokens:
        sys.exit(f"{flags.text} has {len(ids)} tokens, {flags.tokens} are asked for")
    ids, measured = np.array(ids), np.full(flags.tokens, np.nan)
    for past, logits in run(ids):
        following = ids[past + 1:past + 1 + len(logits)]
        measured[past + 1:past + 1 + len(following)] = losses(logits[:len(following)], following)
    measured = measured[flags.tokens // 2:]
    if not np.isfinite(measured).all():
        sys.exit(f"{int(np.isnan(measured).sum())} of {len(measured)} tokens have no likelihood")
    print(json.dumps([round(float(x), 5) for x in measured]))


if __name__ == "__main__":
    main()
