#!/usr/bin/env python3
"""The operator in a model that onnxruntime-genai runs, past and present in one buffer; without that package nothing is tested.

    QUOKA_ONNXRUNTIME_LIBRARY=.../libonnxruntime-quoka.so python3 tests/test_genai.py
"""
import json
import pathlib
import shutil
import tempfile
import unittest

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from test_operator import LIBRARY, decoder, rewritten

try:
    import onnxruntime_genai as genai
except ImportError:
    genai = None

LAYERS = 3


def genai_model():
    """decoder() with the inputs that onnxruntime-genai hands out: lengths come from the attention mask."""
    model = decoder(LAYERS)
    graph = model.graph
    names = {"ids": "input_ids"}
    for layer in range(LAYERS):
        for what in ("key", "value"):
            names |= {f"past_{what}_{layer}": f"past_key_values.{layer}.{what}", f"present_{what}_{layer}": f"present.{layer}.{what}"}
    for node in graph.node:
        for list_ in (node.input, node.output):
            for i, name in enumerate(list_):
                list_[i] = names.get(name, name)
    for value in (*graph.input, *graph.output):
        value.name = names.get(value.name, value.name)
    inputs = [value for value in graph.input if value.name not in ("seqlens_k", "total_sequence_length")]
    inputs.insert(1, helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch", "total"]))
    graph.initializer.extend([numpy_helper.from_array(np.array([1]), "ones"), numpy_helper.from_array(np.array(1), "axis")])
    lengths = [helper.make_node("ReduceSum", ["attention_mask", "ones"], ["counted"], keepdims=0), helper.make_node("Sub", ["counted", "ones"], ["last"]),
               helper.make_node("Cast", ["last"], ["seqlens_k"], to=TensorProto.INT32), helper.make_node("Shape", ["attention_mask"], ["sizes"]),
               helper.make_node("Gather", ["sizes", "axis"], ["total"]), helper.make_node("Cast", ["total"], ["total_sequence_length"], to=TensorProto.INT32)]
    nodes = [*lengths, *graph.node]
    del graph.input[:], graph.node[:]
    graph.input.extend(inputs)
    graph.node.extend(nodes)
    return model


@unittest.skipIf(genai is None, "onnxruntime-genai is not installed")
class GenAi(unittest.TestCase):
    def tokens(self, own, shared=True):
        """60 tokens, greedy, after a prompt of 50; own: None, or rewrite()'s attributes."""
        model = genai_model()
        options = {"provider_options": []}
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            if own is not None:
                model = rewritten(model, **own)
                shutil.copy(LIBRARY, folder / "operator.so")
                options["custom_ops_library"] = "operator.so"
            onnx.save(model, folder / "model.onnx")
            names = {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
            presents = {"present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}
            part = {"session_options": options, "filename": "model.onnx", "head_size": 16, "hidden_size": 48, "num_attention_heads": 4,
                    "num_hidden_layers": LAYERS, "num_key_value_heads": 2, "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask"} | names,
                    "outputs": {"logits": "logits"} | presents}
            config = {"model": {"bos_token_id": 0, "eos_token_id": 52, "pad_token_id": 0, "context_length": 128, "type": "llama", "vocab_size": 53, "decoder": part},
                      "search": {"max_length": 120, "past_present_share_buffer": shared}}
            (folder / "genai_config.json").write_text(json.dumps(config))
            loaded = genai.Model(name)
            parameters = genai.GeneratorParams(loaded)
            parameters.set_search_options(max_length=120, do_sample=False, past_present_share_buffer=shared)
            generator = genai.Generator(loaded, parameters)
            generator.append_tokens(np.arange(50, dtype=np.int32))
            text = []
            while not generator.is_done() and len(text) < 60:
                generator.generate_next_token()
                text.append(int(generator.get_next_tokens()[0]))
            return text

    def test_greedy(self):
        wanted = self.tokens(None)
        self.assertEqual(len(wanted), 60)
        for shared in (True, False):
            self.assertEqual(self.tokens({}, shared), wanted)

    def test_selection(self):
        # A budget of all keys gives the same tokens. A small one gives others, the same each time.
        wanted = self.tokens(None)
        self.assertEqual(self.tokens({"preset": "recommended", "budget": 100, "chunk": 16}), wanted)
        few = [self.tokens({"preset": "paper", "budget": 0.05, "chunk": 16}) for _ in range(2)]
        self.assertNotEqual(few[0], wanted)
        self.assertEqual(*few)


if __name__ == "__main__":
    unittest.main()
