#!/usr/bin/env python3
"""quoka.transformers on small models of random weights, against sdpa, or eager if sdpa does not
support a model: logits, padded
batches, caches, generate(), beam search; selection; what is handed on or refused."""
import contextlib
import contextvars
import copy
import json
import os
import pathlib
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import unittest
import unittest.mock
import warnings

import torch
import transformers
from drawn import drawn, st
from transformers import (AutoModelForCausalLM, DynamicCache, Gemma2Config, Gemma3TextConfig, GptOssConfig, LlamaConfig,
                          Qwen3Config, StaticCache)

import quoka.transformers

torch.set_num_threads(1)  # these models are small

SIZES = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": None}
CONFIGS = {
    "Llama": LlamaConfig(**SIZES),
    "Qwen3": Qwen3Config(**SIZES),
    # Soft-caps so low that logits of random weights meet them.
    "Gemma2": Gemma2Config(**SIZES, sliding_window=24, layer_types=["sliding_attention", "full_attention"] * 2,
                           query_pre_attn_scalar=16, attn_logit_softcapping=0.02),
    "Gemma3": Gemma3TextConfig(**SIZES, sliding_window=24, layer_types=["sliding_attention", "full_attention"] * 2),
    "GptOss": GptOssConfig(**SIZES, sliding_window=24, num_local_experts=2, num_experts_per_tok=1,
                           layer_types=["sliding_attention", "full_attention"] * 2),
}


def model(name, implementation, dtype=torch.float32):
    """A new one of the same weights."""
    torch.manual_seed(11)
    made = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation="eager").to(dtype).eval()
    if name == "GptOss":  # which random weights leave nearly alike
        for layer in made.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    made.set_attn_implementation(implementation)
    return made


def other(name):
    return "eager" if name in ("Gemma2", "GptOss") else "sdpa"


def ids(*shape, seed=3):
    return torch.randint(2, 500, shape, generator=torch.Generator().manual_seed(seed))


class Exact(unittest.TestCase):
    def assert_alike(self, got, expected, relative=1e-4):
        self.assertLess(float((got - expected).abs().max() / expected.abs().max()), relative)

    def each(self):
        for name in CONFIGS:
            with self.subTest(name), torch.no_grad():
                yield model(name, "quoka"), model(name, other(name))

    @drawn(60, name=st.sampled_from(list(CONFIGS)), widths=st.lists(st.sampled_from([1, 18, 30]), max_size=4), left=st.booleans(),
           cache=st.sampled_from([DynamicCache, quoka.transformers.Cache, StaticCache, None]),
           padding=st.lists(st.integers(0, 13), min_size=1, max_size=3))
    def test_a_prompt_in_chunks_and_tokens(self, name, widths, left, cache, padding):
        ours, theirs = model(name, "quoka"), model(name, other(name))
        tokens = ids(len(padding), 40 + sum(widths))
        seen = torch.ones_like(tokens)
        for one, hidden in zip(seen, padding if cache is not StaticCache else ()):
            one[:hidden] = 0
        if not left:
            seen = seen.flip(1)
        masked = {"attention_mask": seen} if not seen.all() else {}
        with torch.no_grad():
            expected = theirs(tokens, **masked).logits
            if cache is None:
                got = ours(tokens, **masked).logits
            else:
                kept = cache(config=ours.config, max_cache_len=200) if cache is StaticCache else cache(config=ours.config)
                got, end = [], 0
                for n in (40, *widths):
                    end += n
                    masked = {"attention_mask": seen[:, :end]} if masked else {}
                    got.append(ours(tokens[:, end - n:end], past_key_values=kept, **masked).logits)
                got = torch.cat(got, 1)
        self.assert_alike(got[seen.bool()], expected[seen.bool()])

    def test_each_model_by_each_cache(self):
        for ours, theirs in self.each():
            tokens = ids(1, 90)
            expected = theirs(tokens).logits
            for cache in (DynamicCache(config=ours.config), quoka.transformers.Cache(config=ours.config),
                          quoka.transformers.Cache()):
                got = [ours(part, past_key_values=cache).logits for part in tokens.split([40, 30, 1, 1, 18], 1)]
                self.assert_alike(torch.cat(got, 1), expected)

    def test_generate(self):
        for ours, theirs in self.each():
            tokens, seen = ids(2, 30), torch.ones(2, 30, dtype=torch.long)
            seen[0, :7] = 0
            for how in ({"do_sample": False}, {"do_sample": False, "num_beams": 3},
                        {"do_sample": False, "past_key_values": quoka.transformers.Cache}):
                both = [m.generate(tokens, attention_mask=seen, max_new_tokens=64,
                                   **{k: v(config=m.config) if isinstance(v, type) else v for k, v in how.items()})
                        for m in (ours, theirs)]
                self.assertTrue(torch.equal(*both), how)

    def test_the_soft_cap_of_gemma_2(self):
        with torch.no_grad():
            ours, theirs = model("Gemma2", "quoka"), model("Gemma2", "eager")
            capped = theirs(ids(1, 90)).logits
            self.assert_alike(ours(ids(1, 90)).logits, capped)
            for layer in theirs.model.layers:
                layer.self_attn.attn_logit_softcapping = None
            self.assertGreater(float((theirs(ids(1, 90)).logits - capped).abs().max() / capped.abs().max()), 1e-2)

    def test_halves(self):
        for dtype, relative in ((torch.bfloat16, 5e-2), (torch.float16, 1e-2)):
            with torch.no_grad():
                ours, theirs = model("Llama", "quoka", dtype), model("Llama", "sdpa", dtype)
                self.assert_alike(ours(ids(1, 60)).logits.float(), theirs(ids(1, 60)).logits.float(), relative)

    def test_what_is_not_ours_is_handed_on(self):
        ours, theirs = model("Llama", "quoka"), model("Llama", "sdpa")
        tokens = ids(1, 20)
        quoka.transformers._warned.clear()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                ours(tokens).logits.sum().backward()
        said = [str(w.message) for w in seen if "quoka" in str(w.message)]
        self.assertEqual(len(said), 1, said)
        self.assertIn("gradients", said[0])
        theirs(tokens).logits.sum().backward()
        got, expected = (m.model.layers[0].self_attn.q_proj.weight.grad for m in (ours, theirs))
        self.assertLess(float((got / 2 - expected).abs().max()), 1e-4)
        cache = DynamicCache()  # a chunk: no mask is made, and sdpa needs one
        with torch.no_grad():
            ours(tokens, past_key_values=cache)
        self.assert_alike(ours(tokens, past_key_values=cache).logits.detach(),
                          theirs(torch.cat([tokens, tokens], 1)).logits[:, 20:].detach())
        with self.assertRaisesRegex(ValueError, "sinks"):
            model("GptOss", "quoka")(tokens)

    def test_a_window_without_a_mask(self):
        module = torch.nn.Module()
        for q_len, window in ((4, 5), (1, 5), (9, 5), (4, 99)):
            q, k, v = torch.randn(1, 2, q_len, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)
            with torch.no_grad(), quoka.transformers.settings(arithmetic="float"):
                ours = quoka.transformers.attention_forward(module, q, k, v, None, sliding_window=window)[0]
            of_sdpa = quoka.transformers.attention_forward(module, q.requires_grad_(), k, v, None, sliding_window=window)[0]
            self.assertLess(float((ours - of_sdpa).abs().max()), 1e-5)

    def test_keys_without_positions_may_repeat(self):
        module = torch.nn.Module()
        module.layer_idx = 0
        q, k, v = torch.randn(1, 4, 4, 16), torch.randn(1, 2, 4, 16), torch.randn(1, 2, 4, 16)
        k, v = torch.cat([k, k], 2), torch.cat([v, v], 2)
        mask = torch.ones(4, 8, dtype=torch.bool).tril(4)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=mask).transpose(1, 2)
        for mode in ("exact", "paper"):
            with quoka.transformers.settings(mode=mode, budget=1.0, dense_layers=0, arithmetic="float"):
                got, weights = quoka.transformers.attention_forward(module, q, k, v, None)
            self.assertLess(float((got - expected).abs().max()), 1e-5)
            self.assertIsNone(weights)

    def test_compiled(self):
        with torch.no_grad():
            ours = model("Llama", "quoka")
            compiled = torch.compile(ours, backend="aot_eager")
            self.assert_alike(compiled(ids(1, 20)).logits, ours(ids(1, 20)).logits, 1e-5)


class Selects(unittest.TestCase):
    def test_all_keys_are_exact_attention(self):
        for name in CONFIGS:
            with self.subTest(name), torch.no_grad():
                ours = model(name, "quoka")
                tokens = ids(2, 300)
                expected = ours(tokens).logits
                for mode in ("recommended", "paper"):
                    ours.config.quoka = {"mode": mode, "budget": 1.0, "chunk": 64, "dense_layers": 0}
                    self.assertLess(float((ours(tokens).logits - expected).abs().max()), 1e-5)
                    ours.config.quoka["budget"] = 20
                    self.assertGreater(float((ours(tokens).logits - expected).abs().max()), 1e-4)

    def test_all_keys_of_a_padded_batch(self):
        for name in ("Llama", "GptOss"):
            with self.subTest(name), torch.no_grad():
                ours = model(name, "quoka")
                tokens, seen = ids(3, 150), torch.ones(3, 150, dtype=torch.long)
                seen[0, :40] = seen[2, :3] = 0
                expected = ours(tokens, attention_mask=seen).logits[seen.bool()]
                ours.config.quoka = {"mode": "paper", "budget": 1.0, "chunk": 64, "dense_layers": 0}
                got = ours(tokens, attention_mask=seen).logits[seen.bool()]
                self.assertLess(float((got - expected).abs().max()), 1e-5)
                ours.config.quoka = {"mode": "paper", "budget": 5, "chunk": 64, "dense_layers": 0}
                got = ours(tokens, attention_mask=seen).logits[seen.bool()]
                self.assertGreater(float((got - expected).abs().max()), 1e-4)

    def test_a_prompt_is_cut_as_chunks_are(self):
        with torch.no_grad():
            ours = model("Llama", "quoka")
            tokens = ids(1, 320)
            for mode in ("paper", "recommended"):
                with quoka.transformers.settings(mode=mode, budget=24, chunk=64, dense_layers=[0, 2]):
                    whole = ours(tokens).logits
                    for cache in (quoka.transformers.Cache(), DynamicCache()):
                        parts = torch.cat([ours(part, past_key_values=cache).logits for part in tokens.split(64, 1)], 1)
                        self.assertLess(float((whole - parts).abs().max()), 1e-5)
                self.assertGreater(float((whole - ours(tokens).logits).abs().max()), 0.05)

    def test_padding_takes_no_budget(self):
        with torch.no_grad():
            ours = model("Llama", "quoka")
            tokens = ids(1, 200)
            padded = torch.cat([torch.zeros(1, 70, dtype=torch.long), tokens], 1)
            seen = (padded > 0).long()
            positions = (seen.cumsum(1) - 1).clamp(min=0)
            ours.config.quoka = {"mode": "paper", "budget": 30, "chunk": 100, "dense_layers": 0}
            alone = ours(tokens).logits
            with_padding = ours(padded, attention_mask=seen, position_ids=positions).logits[:, 70:]
            # Chunks of 100 end elsewhere: the first 30 tokens, and no more, are in a chunk without a past in both.
            self.assertLess(float((alone - with_padding)[:, :30].abs().max()), 1e-4)
            self.assertTrue(bool(torch.isfinite(with_padding).all()))

    def test_decode_and_layers(self):
        chosen = quoka.transformers.Settings(mode="paper", dense_layers=2, layer_budgets={"3": 7}, budget=0.5)
        self.assertEqual([chosen.selects(n) for n in (0, 1, 2, 3)], [False, False, True, True])
        self.assertEqual([chosen.budget_of(n) for n in (2, 3)], [0.5, 7])
        with torch.no_grad():
            ours = model("Llama", "quoka")
            tokens = ids(1, 200)
            cache = quoka.transformers.Cache()
            ours(tokens[:, :199], past_key_values=cache)
            logits = []
            for decode in (False, True):
                ours.config.quoka = {"mode": "paper", "budget": 10, "dense_layers": 0, "decode": decode}
                logits.append(ours(tokens[:, 199:], past_key_values=copy.deepcopy(cache)).logits)
            self.assertGreater(float((logits[0] - logits[1]).abs().max()), 1e-4)
            ours.config.quoka = {"mode": "exact"}
            self.assertTrue(torch.equal(ours(tokens[:, 199:], past_key_values=copy.deepcopy(cache)).logits, logits[0]))

    def test_settings(self):
        of = quoka.transformers.Settings.of
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({"mode": "recommended", "budget": 0.25, "dense_layers": 1, "min_past": 1024, "stats": 1,
                       "model": {"q_heads": 4}}, file)
            file.flush()
            self.assertEqual(of(file.name), quoka.transformers.Settings("recommended", 0.25, 1, {}, 1024))
        # As check.sh writes one after its last step, refine: the layers that hurt are dense, and more queries choose.
        written = {"arithmetic": "int8", "budget": 0.25, "dense_layers": [0, 7, 29], "min_past": 2048, "mode": "recommended",
                   "queries": 256, "model": {"head_dim": 64, "kv_heads": 3, "q_heads": 9}}
        self.assertEqual(of(written), quoka.transformers.Settings(
            "recommended", 0.25, [0, 7, 29], {}, 2048, queries=256, arithmetic="int8"))
        with self.assertRaises(ValueError) as caught:  # all at once
            of({"mode": "best", "budget": 1.5, "chunk": 0, "dense_layers": -1, "bugdet": 3, "layer_budgets": {"x": 64}, "arithmetic": "fp8"})
        for word in ("mode is 'best'", "1.5", "chunk is 0", "dense_layers is -1", "'bugdet' is not a setting", "layer_budgets has 'x'", "arithmetic is 'fp8'"):
            self.assertIn(word, str(caught.exception))
        self.assertNotIn("(budget)", str(caught.exception))
        with tempfile.TemporaryDirectory() as folder:  # files that hold no settings
            text, list_ = pathlib.Path(folder, "text"), pathlib.Path(folder, "list.json")
            text.write_text("mode: paper"), list_.write_text("[1]")
            for path, words in ((folder, "Is a directory"), (f"{folder}/none", "No such file"), (text, "is not JSON"), (list_, "holds [1], but must hold an object")):
                with self.assertRaisesRegex(ValueError, "^quoka: .*" + re.escape(words)):
                    of(str(path))
                with unittest.mock.patch.dict(os.environ, {"QUOKA_CONFIG": str(path), "QUOKA_BUDGET": "512"}), \
                        self.assertRaisesRegex(ValueError, "^quoka: QUOKA_CONFIG: .*" + re.escape(words)):
                    quoka.transformers.Settings.of_environment()

    def said(self, run):
        """The warnings of this package."""
        quoka.transformers._warned.clear()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            run()
        return [str(one.message) for one in seen if str(one.message).startswith("quoka: ")]

    def test_settings_without_effect_are_named(self):
        of = quoka.transformers.Settings.of
        self.assertEqual(self.said(lambda: of({"budget": 0.25, "decode": True, "threads": 1})),
                         ["quoka: budget, decode without a mode: attention is exact; mode recommended, balanced or paper selects keys"])
        self.assertEqual(self.said(lambda: (of({"budget": 0.25, "mode": "exact"}), of({"threads": 1}))), [])
        ours = model("Llama", "quoka")
        count = ours.config.num_hidden_layers
        for given, words in (({"dense_layers": 99}, [f"no layer selects keys: dense_layers is 99, and {count} of the model's layers could select"]),
                             ({"dense_layers": [0, 77]}, [f"dense_layers names layer 77, but the model's last layer is {count - 1}"]),
                             ({"layer_budgets": {"77": 64}}, [f"layer_budgets names layer 77, but the model's last layer is {count - 1}"]),
                             ({"dense_layers": [0], "layer_budgets": {"1": 64}}, []), ({"dense_layers": 99, "mode": "exact"}, [])):
            ours.config.quoka = {"mode": "paper", "budget": 64} | given
            with torch.no_grad():
                self.assertEqual(self.said(lambda: (ours(ids(1, 20)), ours(ids(1, 20)))), [f"quoka: {one}" for one in words])

    def test_empty_variables_are_not_set(self):
        empty = {"QUOKA_" + name: "" for name in ("CONFIG", "MODE", "BUDGET", "CHUNK", "DENSE_LAYERS", "MOED")}
        with unittest.mock.patch.dict(os.environ, empty):
            self.assertEqual(quoka.transformers.Settings.of_environment(), quoka.transformers.Settings())
        for text, share in ((".25", 0.25), ("1.", 1.0)):
            with unittest.mock.patch.dict(os.environ, {"QUOKA_MODE": "paper", "QUOKA_BUDGET": text}):
                self.assertEqual(quoka.transformers.Settings.of_environment(), quoka.transformers.Settings("paper", share))

    def test_settings_of_the_environment(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "settings.json")
            path.write_text('{"mode": "recommended", "budget": 0.25, "queries": 256}')
            with unittest.mock.patch.dict(os.environ, {"QUOKA_CONFIG": str(path), "QUOKA_BUDGET": "512", "QUOKA_MODE": "paper"}):
                self.assertEqual(quoka.transformers.Settings.of_environment(),
                                 quoka.transformers.Settings("paper", 512, queries=256))
                # In a program that does not mention quoka; a model's own settings win.
                program = pathlib.Path(folder, "program.py")
                program.write_text(
                    "import sys, torch, transformers\n"
                    "torch.manual_seed(1)\n"
                    "model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(vocab_size=50, hidden_size=32,"
                    " intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1),"
                    " attn_implementation='quoka').eval()\n"
                    "import quoka.transformers\n"
                    "tokens = torch.arange(1300)[None] % 50\n"
                    "with torch.no_grad(), quoka.transformers.watched() as chosen: model(tokens)\n"
                    "model.config.quoka = {}\n"
                    "with torch.no_grad(), quoka.transformers.watched() as none: model(tokens)\n"
                    "print(sys.argv[1:], chosen[-1].selection.max_count, len(none))\n")
                package = pathlib.Path(quoka.__file__).parents[1]
                said = subprocess.run([sys.executable, "-m", "quoka", "program", "a", "b"], cwd=folder, check=True, text=True,
                                      stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": f"{package}:{folder}"}).stdout
                self.assertEqual(said.strip(), "['a', 'b'] 512 0")
            with unittest.mock.patch.dict(os.environ, {"QUOKA_MODE": "best"}), self.assertRaisesRegex(ValueError, "best"):
                quoka.transformers.Settings.of_environment()

    def test_queries_change_the_choice(self):
        with torch.no_grad():
            ours, tokens, logits = model("Llama", "quoka"), ids(1, 200), []
            for chunk in (200, 100):  # with a past of its own, and cut in the call
                for queries in (0, 16, 200):
                    ours.config.quoka = {"mode": "paper", "budget": 10, "dense_layers": 0, "chunk": chunk, "queries": queries}
                    cache = quoka.transformers.Cache()
                    ours(tokens[:, :100], past_key_values=cache)
                    logits.append(ours(tokens[:, 100:], past_key_values=cache).logits if chunk == 200 else ours(tokens).logits)
            for of in (logits[:3], logits[3:]):
                self.assertTrue(torch.equal(of[0], of[1]))  # the preset's: 16 of each query head
                self.assertGreater(float((of[0] - of[2]).abs().max()), 1e-4)

    def test_a_short_past_is_attended_to_whole(self):
        with torch.no_grad(), quoka.transformers.watched() as chosen:
            ours = model("Llama", "quoka")
            ours.config.quoka = {"mode": "paper", "budget": 10, "dense_layers": 3, "chunk": 50, "min_past": 100}
            ours(ids(1, 220))
        self.assertEqual([(c.first, c.selection is None) for c in chosen],
                         [(0, True), (50, True), (100, True), (150, False), (200, False)])

    def test_what_was_chosen_can_be_watched(self):
        with torch.no_grad(), quoka.transformers.watched() as chosen:
            ours = model("Llama", "quoka")
            ours.config.quoka = {"mode": "paper", "budget": 20, "chunk": 60, "dense_layers": 2}
            ours(ids(2, 150))
        with torch.no_grad():
            ours(ids(1, 150))
        self.assertEqual([(c.layer, c.batch, c.first, c.last) for c in chosen],
                         [(layer, b, first, min(first + 60, 150)) for layer in (2, 3) for b in (0, 1) for first in (0, 60, 120)])
        self.assertEqual([None if c.selection is None else (c.selection.max_count, c.selection.kv_len) for c in chosen[:3]],
                         [None, (20, 60), (20, 120)])
        self.assertEqual([c.kept_share for c in chosen[:2]], [1.0, None])  # of all, and paper does not tell
        with torch.no_grad(), quoka.transformers.watched() as chosen:
            ours.config.quoka = {"mode": "recommended", "budget": 20, "chunk": 60, "dense_layers": 3}
            ours(ids(1, 150))
        self.assertEqual(chosen[0].kept_share, 1.0)
        for c in chosen[1:]:
            self.assertTrue(0 < c.kept_share < 1)
            self.assertAlmostEqual(c.kept_share, float(c.selection.kept_shares.mean()), places=6)

    def test_layers_with_a_window_are_not_counted(self):
        types = ["sliding_attention", "full_attention"] * 2
        chosen = quoka.transformers.Settings(mode="paper", dense_layers=1)
        self.assertEqual([chosen.selects(n, types) for n in (1, 3)], [False, True])
        self.assertEqual([chosen.selects(n) for n in (0, 1)], [False, True])
        with torch.no_grad():
            ours, tokens = model("Gemma3", "quoka"), ids(1, 200)
            logits = []
            for dense in (1, [1], [1, 3], 2):
                ours.config.quoka = {"mode": "paper", "budget": 10, "chunk": 64, "dense_layers": dense}
                logits.append(ours(tokens).logits)
            self.assertTrue(torch.equal(logits[0], logits[1]) and torch.equal(logits[2], logits[3]))
            self.assertGreater(float((logits[0] - logits[2]).abs().max()), 1e-4)


class History:
    """What may happen to a cache and to the tensors that it gave out, step by step: a step and a number, drawn. The same steps
    are taken of quoka.transformers.Cache and of DynamicCache."""

    STEPS = ("grow", "grow", "crop", "keep", "back", "cut_by_hand", "thin", "write", "reorder", "repeat", "select", "fork", "turn")
    FORKS = (copy.copy, copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), lambda layer: History.by_attributes(layer))
    KEPT = (lambda x: x, lambda x: x[:, :, x.shape[2] // 2:], lambda x: x.numpy(), lambda x: x.detach(), lambda x: torch.from_dlpack(x))

    def __init__(self, cache, grow):
        """grow(cache, sequences, number) adds tokens and returns what came of them."""
        self.caches, self.of_grow, self.kept, self.got = [cache], grow, [], []

    def run(self, steps):
        for step, number in (("grow", 3), *steps):
            getattr(self, step)(self.caches[-1].layers, number)
            self.grow(self.caches[-1].layers, number % 2)  # what the step did is seen
        for number in range(len(self.caches)):  # each goes on, and all are as they were left
            self.grow(self.caches[-1].layers, number), self.turn(None, 0)
        left = [(layer.keys, layer.values) for cache in self.caches for layer in cache.layers]
        return self.got + [torch.as_tensor(x) for pairs in (*self.kept, left) for pair in pairs for x in pair]

    @staticmethod
    def by_attributes(layer):
        fork = type(layer)()
        fork.__dict__.update(layer.__dict__)
        return fork

    @staticmethod
    def length(layers):
        return layers[0].keys.shape[2]

    def grow(self, layers, number):
        sequences = layers[0].keys.shape[0] if layers and layers[0].is_initialized else 2
        self.got.append(self.of_grow(self.caches[-1], sequences, number + 1000 * len(self.got)))  # never the same tokens

    def crop(self, layers, number):
        if number % self.length(layers):
            self.caches[-1].crop(-(number % self.length(layers)))

    def keep(self, layers, number):
        of = self.KEPT[number % len(self.KEPT)]
        self.kept.append([(of(layer.keys), of(layer.values)) for layer in layers])

    def back(self, layers, number):  # to what was kept, if that is tensors of whole keys
        for kept in self.kept[-1:]:
            if all(isinstance(x, torch.Tensor) and x.shape[2] > 1 for pair in kept for x in pair):
                for layer, (layer.keys, layer.values) in zip(layers, kept):
                    pass

    def cut_by_hand(self, layers, number):
        length = 1 + number % self.length(layers)
        for layer in layers:
            layer.keys, layer.values = layer.keys[:, :, :length], layer.values[:, :, :length]

    def thin(self, layers, number):  # every second token, where they lie
        for layer in layers:
            layer.keys, layer.values = layer.keys[:, :, ::2], layer.values[:, :, ::2]

    def write(self, layers, number):
        if not self.kept and len(self.caches) == 1:  # DynamicCache's tensors are copies by then, and the other's are not
            for layer in layers:
                layer.keys[:, :, number % self.length(layers)] = 3.0

    def reorder(self, layers, number):
        sequences = layers[0].keys.shape[0]
        self.caches[-1].reorder_cache(torch.arange(1, sequences + 1) % sequences * (number % 4 > 0))

    def repeat(self, layers, number):
        if layers[0].keys.shape[0] < 3:
            self.caches[-1].batch_repeat_interleave(2)

    def select(self, layers, number):
        self.caches[-1].batch_select_indices(torch.tensor([number % layers[0].keys.shape[0]]))

    def fork(self, layers, number):
        other = copy.copy(self.caches[-1])
        other.layers = [self.FORKS[number % len(self.FORKS)](layer) for layer in layers]
        self.caches.append(other)

    def turn(self, layers, number):
        self.caches = self.caches[1:] + self.caches[:1]


histories = st.lists(st.tuples(st.sampled_from(History.STEPS), st.integers(0, 1000)), max_size=14)


class Caches(unittest.TestCase):
    @drawn(300, steps=histories)
    def test_it_is_a_dynamic_cache(self, steps):
        def grow(cache, sequences, number):
            of = torch.Generator().manual_seed(number)
            k, v = torch.randn(2, sequences, 2, (1, 3, 8, 40)[number % 4], 8, generator=of).unbind()
            cache.update(k, v, 0)
            return torch.cat([cache.layers[0].keys, cache.layers[0].values])  # copied

        got, expected = (History(kind(), grow).run(steps) for kind in (quoka.transformers.Cache, DynamicCache))
        for one, other in zip(got, expected, strict=True):
            self.assertTrue(torch.equal(one, other))

    def test_it_does_not_copy(self):
        cache = quoka.transformers.Cache()
        k, v = torch.randn(2, 2, 2, 10, 8).unbind()
        cache.update(k, v, 0), cache.update(k[:, :, :3], v[:, :, :3], 0)
        before = cache.layers[0].keys.data_ptr()
        cache.update(k[:, :, :5], v[:, :, :5], 0)
        self.assertEqual(cache.layers[0].keys.data_ptr(), before)
        cache.reset()
        self.assertEqual(cache.get_seq_length(), 0)
        cache.update(k, v, 0)
        self.assertTrue(torch.equal(cache.layers[0].keys, k))


def made_states():
    """A list that grows by one for each State that attention makes in its scope."""
    made, State = [], quoka._core.State

    def make(*args, **named):
        if "preset" in named:  # else it is Settings, which looks at a budget
            made.append(named)
        return State(*args, **named)

    return unittest.mock.patch.object(quoka.transformers._core, "State", make), made


class KeptStates(unittest.TestCase):
    """quoka.transformers.Cache keeps the codes of its keys: the same bits as with a State made for
    each call."""

    LAYERS = 3  # that select, of four

    def setUp(self):
        self.ours = model("Llama", "quoka")
        patch, self.made = made_states()
        self.enterContext(patch) if hasattr(self, "enterContext") else (patch.start(), self.addCleanup(patch.stop))

    def both(self, run, ours=None):
        """run(model, a cache) with and without what is kept: the first result."""
        ours, results = ours or self.ours, []
        for kind in (quoka.transformers.Cache, DynamicCache):
            del self.made[:]
            with torch.no_grad():
                results.append(run(ours, kind(config=ours.config)))
            if not results[1:]:
                made = len(self.made)
        self.assertTrue(torch.equal(*results))
        self.assertGreater(float(results[0].abs().max()), 0)
        return made, len(self.made)

    def test_a_prompt_in_chunks(self):
        tokens = ids(2, 400)
        for mode, budget in (("recommended", 10), ("recommended", 0.125), ("paper", 20)):
            self.ours.config.quoka = {"mode": mode, "budget": budget, "chunk": 64, "decode": True}
            made = self.both(lambda m, cache: torch.cat(
                [m(part, past_key_values=cache).logits for part in tokens.split([64, 64, 30, 100, 142], 1)], 1))
            self.assertEqual(made, (self.LAYERS * 2, self.LAYERS * 2 * 5))

    def test_single_tokens(self):
        tokens = ids(1, 200)
        self.ours.config.quoka = {"mode": "recommended", "budget": 10, "chunk": 64, "decode": True}
        made = self.both(lambda m, cache: torch.cat([m(part, past_key_values=cache).logits for part in tokens.split([170] + [1] * 30, 1)], 1))
        self.assertEqual(made, (self.LAYERS, self.LAYERS * 31))

    @drawn(20, steps=st.lists(st.tuples(st.sampled_from((*History.STEPS, "settings", "exact")), st.integers(0, 1000)), max_size=9))
    def test_through_any_history(self, steps):
        options = ({"mode": "recommended", "budget": 10}, {"mode": "recommended", "budget": 0.125}, {"mode": "paper", "budget": 20},
                   {"mode": "recommended", "budget": 10, "queries": 99}, {"mode": "recommended", "budget": 10, "chunk": 20})

        class Model(History):
            def settings(self, layers, number):
                of_model.config.quoka = {"chunk": 32, "decode": True, "dense_layers": 1, **options[number % len(options)]}

            def exact(self, layers, number):
                with quoka.transformers.settings(mode="exact"):
                    self.grow(layers, number)

        of_model = self.ours

        def run(m, cache):
            history = Model(cache, lambda cache, sequences, number: m(
                ids(sequences, (1, 20, 70, 100)[number % 4], seed=number), past_key_values=cache).logits)
            history.settings(None, 0)
            return torch.cat([x.flatten() for x in history.run(steps)])

        self.both(run)

    def test_keys_that_others_changed(self):
        self.ours.config.quoka = {"mode": "recommended", "budget": 10, "chunk": 32}
        tokens = ids(2, 300)

        def by_hand(change):
            def of(cache):
                for layer in cache.layers:
                    layer.keys, layer.values = change(layer.keys), change(layer.values)
            return of

        def write(cache):
            for layer in cache.layers:
                layer.keys[:, :, 5:9] = 3.0

        def cut_and_exact(cache):
            cache.crop(-90)
            with quoka.transformers.settings(mode="exact"):
                self.ours(tokens[:, :20], past_key_values=cache)

        def cut_to_nothing(cache):
            if type(cache) is DynamicCache:  # which remembers how many sequences there were, and its length after reset()
                return DynamicCache()
            cache.crop(-150)

        def reset(cache):
            return DynamicCache() if type(cache) is DynamicCache else cache.reset()

        for name, change, batch, kept in (
                ("nothing", lambda cache: None, 2, True), ("cut", lambda cache: cache.crop(-60), 2, True), ("cut and exact", cut_and_exact, 2, True),
                ("cut to nothing", cut_to_nothing, 1, False), ("written and cut", lambda cache: (write(cache), cache.crop(-60))[2:] or None, 2, False),
                ("reorder", lambda cache: cache.reorder_cache(torch.tensor([1, 0])), 2, False),
                ("select", lambda cache: cache.batch_select_indices(torch.tensor([1])), 1, False),
                ("repeat", lambda cache: cache.batch_repeat_interleave(2), 4, False), ("reset", reset, 2, False),
                ("every second key", by_hand(lambda x: x[:, :, ::2].clone()), 2, False),
                ("cut by hand", by_hand(lambda x: x[:, :, :70]), 2, False), ("written", write, 2, False)):
            with self.subTest(name):
                def run(m, cache):
                    m(tokens[:, :150], past_key_values=cache)
                    changed = change(cache)
                    cache = cache if changed is None else changed
                    more = tokens[:1, 150:].expand(batch, -1)
                    return torch.cat([m(part, past_key_values=cache).logits for part in more.split(50, 1)], 1)

                self.assertEqual(self.both(run)[0], self.LAYERS * (2 + (0 if kept else batch)))

    def test_inference_mode(self):
        self.ours.config.quoka = {"mode": "recommended", "budget": 10, "chunk": 32}
        tokens, cache = ids(1, 200), quoka.transformers.Cache()
        with torch.inference_mode():
            parts = torch.cat([self.ours(part, past_key_values=cache).logits for part in tokens.split(40, 1)], 1)
            self.assertEqual(len(self.made), self.LAYERS)
            whole = DynamicCache()
            self.assertTrue(torch.equal(parts, torch.cat([self.ours(part, past_key_values=whole).logits for part in tokens.split(40, 1)], 1)))
            for layer in cache.layers:  # unnoticed: no version counts there
                layer.keys.mul_(2)
            if any(state.kept_bytes for layer in cache.layers if layer._states for state in layer._states[1]):  # else: no codes here
                with self.assertRaisesRegex(ValueError, "was appended"):
                    self.ours(tokens, past_key_values=cache)

    def test_other_settings_begin_anew(self):
        tokens = ids(1, 375)
        changes = [{"budget": 10}, {"budget": 1.0}, {"budget": 1}, {"budget": 1, "mode": "paper"}, {"budget": 1, "queries": 99}]

        def run(m, cache):
            logits = []
            for part, change in zip(tokens.split(75, 1), changes):
                m.config.quoka = {"mode": "recommended", "chunk": 75, **change}
                logits.append(m(part, past_key_values=cache).logits)
            return torch.cat(logits, 1)

        self.assertEqual(self.both(run)[0], self.LAYERS * 5)
        # Exact in between: the kept codes of those keys are added afterwards.
        changes[:] = [{"budget": 10}, {"mode": "exact"}, {"budget": 10}, {"budget": 10, "chunk": 20}]
        self.assertEqual(self.both(run)[0], self.LAYERS)

    def test_a_batch_with_padding(self):
        self.ours.config.quoka = {"mode": "recommended", "budget": 10, "chunk": 64, "decode": True}
        tokens, seen = ids(3, 200), torch.ones(3, 200, dtype=torch.long)
        seen[0, :40] = seen[2, :3] = 0

        def run(m, cache):
            logits, end = [], 0
            for n in (120, 50, 1, 29):
                end += n
                logits.append(m(tokens[:, end - n:end], attention_mask=seen[:, :end], past_key_values=cache).logits)
            # Without a mask all keys are seen, those of the masked calls too.
            logits.append(m(tokens[:, :60], past_key_values=cache).logits)
            return torch.cat([x[:, -1:] for x in logits], 1)

        self.assertEqual(self.both(run)[0], self.LAYERS * 3)

    def test_layers_with_a_window(self):
        for name in ("Gemma2", "Gemma3", "GptOss"):
            with self.subTest(name):
                ours, tokens = model(name, "quoka"), ids(1, 300)
                ours.config.quoka = {"mode": "recommended", "budget": 10, "chunk": 60, "dense_layers": 0}
                made = self.both(lambda m, cache: torch.cat([m(part, past_key_values=cache).logits for part in tokens.split(60, 1)], 1), ours)
                self.assertEqual(made, (2, 10))

    def test_generate(self):
        self.ours.config.quoka = {"mode": "recommended", "budget": 10, "chunk": 64, "decode": True}
        alone, batch = ids(1, 40).repeat(1, 3), ids(2, 100)
        for name, tokens, how in (("greedy", batch, {}), ("beams", batch, {"num_beams": 3}),
                                  ("of the prompt, with crop()", alone, {"prompt_lookup_num_tokens": 4, "eos_token_id": 499})):
            with self.subTest(name):
                cuts = []
                crop = quoka.transformers.Cache.crop

                def run(m, cache):
                    said = m.generate(tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, do_sample=False,
                                      max_new_tokens=30, output_scores=True, return_dict_in_generate=True, **how)
                    return torch.cat([said.sequences[:, -30:].flatten().float(), *(x.flatten() for x in said.scores)])

                with unittest.mock.patch.object(quoka.transformers.Cache, "crop", lambda *a: (cuts.append(a[1:]), crop(*a))):
                    made, without = self.both(run)
                self.assertEqual(len(cuts) > 0, "crop" in name)
                if name != "beams":
                    self.assertEqual(made, self.LAYERS * len(tokens))
                self.assertGreaterEqual(without, made)

    def test_attention_without_an_update(self):
        """Asked twice of the same keys, and of keys that are not the cache's last ones."""
        module, how = torch.nn.Module(), {"mode": "recommended", "budget": 10, "dense_layers": 0, "chunk": 32}
        module.layer_idx = 0
        layer = quoka.transformers._GrowingLayer()
        k, v, q = torch.randn(2, 200, 16), torch.randn(2, 200, 16), torch.randn(1, 4, 50, 16)
        attend = quoka.transformers.attention_forward
        with torch.no_grad(), quoka.transformers.settings(**how):
            early = layer.update(k[None, :, :100], v[None, :, :100])
            first = attend(module, q, *early, None)[0]
            late = layer.update(k[None, :, 100:], v[None, :, 100:])
            for keys, values in (late, late, early, late):
                got = attend(module, q, keys, values, None)[0]
                self.assertTrue(torch.equal(got, attend(module, q, keys.clone(), values.clone(), None)[0]))
                if keys is early[0]:
                    self.assertTrue(torch.equal(got, first))

    def test_compiled(self):
        tokens = ids(1, 60)
        self.ours.config.quoka = {"mode": "recommended", "budget": 10, "chunk": 16}
        with torch.no_grad():
            compiled, caches = torch.compile(self.ours, backend="aot_eager"), (quoka.transformers.Cache(), DynamicCache())
            for n, run in enumerate((self.ours, compiled, self.ours)):  # compiled code attends to everything
                got, expected = (run(tokens[:, 20 * n:20 * n + 20], past_key_values=cache).logits for cache in caches)
                self.assertLess(float((got - expected).abs().max()), 1e-5)


class NotCausal(unittest.TestCase):
    """Masks that show a token what comes behind it: a selection of all keys is exact attention there, too, and one of few keys is
    not made, and says so."""

    TOKENS = 300

    def check(self, make, run, other="sdpa"):
        torch.manual_seed(1)
        ours = make().eval()
        theirs = copy.deepcopy(ours)
        ours.set_attn_implementation("quoka"), theirs.set_attn_implementation(other)
        with torch.no_grad():
            expected = run(theirs)
            self.assertTrue(bool(torch.isfinite(expected).all()))
            quoka.transformers._warned.clear()
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                for settings in ({}, {"budget": 1.0}, {"budget": 10}, {"budget": 10, "decode": True, "chunk": 32}):
                    with quoka.transformers.settings(**({"mode": "paper", "dense_layers": 0, **settings} if settings else {})):
                        got = run(ours)
                    self.assertLess(float((got - expected).abs().max() / expected.abs().max()), 1e-5, settings)
        self.assertEqual(sum("not causal" in str(w.message) for w in seen), 1)

    def padded(self):
        tokens, seen = ids(2, self.TOKENS), torch.ones(2, self.TOKENS, dtype=torch.long)
        seen[0, :70] = 0
        return tokens, seen

    def test_all_tokens_see_all(self):  # as EmbeddingGemma's
        config = Gemma3TextConfig(**SIZES, sliding_window=64, layer_types=["full_attention"] * 4, use_bidirectional_attention=True)
        tokens, seen = self.padded()
        for mask in (torch.ones_like(seen), seen):
            self.check(lambda: transformers.Gemma3TextModel(config),
                       lambda m: m(tokens, attention_mask=mask).last_hidden_state[mask.bool()])

    def test_encoders_that_are_padded(self):
        sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "pad_token_id": 0, "max_position_embeddings": 512}
        tokens, seen = self.padded()
        for name, make in (
                ("Bert", lambda: transformers.BertModel(transformers.BertConfig(**sizes))),
                ("XLM-R", lambda: transformers.XLMRobertaModel(transformers.XLMRobertaConfig(**sizes))),
                ("ModernBert", lambda: transformers.ModernBertModel(transformers.ModernBertConfig(
                    **sizes, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, global_attn_every_n_layers=1)))):
            for mask in (seen, seen.flip(1)):
                with self.subTest(name, left=bool(mask[0, -1])):
                    self.check(make, lambda m: m(tokens, attention_mask=mask).last_hidden_state[mask.bool()])

    def test_decoders_beside_a_padded_source(self):
        sizes = {"vocab_size": 500, "d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_layers": 2, "decoder_layers": 2,
                 "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
                 "decoder_start_token_id": 0, "max_position_embeddings": 512}
        tokens, seen = self.padded()
        for name, make in (("Bart", lambda: transformers.BartModel(transformers.BartConfig(**sizes))),
                           ("Marian", lambda: transformers.MarianModel(transformers.MarianConfig(**sizes)))):
            for length in (1, 20, 300, 400):  # shorter than the source, as long, and longer
                with self.subTest(name, length=length):
                    self.check_source(make, tokens, seen, ids(2, length, seed=7))

    def check_source(self, make, tokens, seen, own):
        torch.manual_seed(1)
        ours = make().eval()
        theirs = copy.deepcopy(ours)
        ours.set_attn_implementation("quoka"), theirs.set_attn_implementation("sdpa")
        run = lambda m: m(tokens, attention_mask=seen, decoder_input_ids=own).last_hidden_state
        with torch.no_grad():
            expected = run(theirs)
            for settings in ({}, {"budget": 1.0}, {"budget": 1.0, "decode": True, "chunk": 32}, {"budget": 10, "min_past": 500}):
                with quoka.transformers.settings(**({"mode": "paper", "dense_layers": 0, **settings} if settings else {})):
                    self.assertLess(float((run(ours) - expected).abs().max() / expected.abs().max()), 1e-5, settings)

    def test_a_prefix_by_a_mask_of_four_dimensions(self):
        n = self.TOKENS
        prefix = torch.ones(n, n, dtype=torch.bool).tril()
        prefix[:200, :200] = True
        late = torch.ones(n, n, dtype=torch.bool).tril()
        late[150, 151] = True  # one token sees the next one, in the middle of a chunk
        far = torch.ones(n, n, dtype=torch.bool).tril()
        far[100, 290] = True
        for mask in (prefix, late, far):
            self.check(lambda: transformers.LlamaForCausalLM(copy.deepcopy(CONFIGS["Llama"])),
                       lambda m: m(ids(1, n), attention_mask=mask[None, None]).logits)

    def test_a_causal_mask_of_four_dimensions_selects(self):
        n = self.TOKENS
        mask = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
        with torch.no_grad(), quoka.transformers.settings(mode="paper", budget=10, dense_layers=0), quoka.transformers.watched() as chosen:
            ours = model("Llama", "quoka")
            given = ours(ids(1, n), attention_mask=mask).logits
            self.assertGreater(len(chosen), 0)
            self.assertLess(float((given - ours(ids(1, n)).logits).abs().max()), 1e-5)

    def vision(self, **more):
        return {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56,
                "patch_size": 14, **more}

    def test_the_tokens_of_an_image(self):
        text = {**SIZES, "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "sliding_window": 4096}
        config = transformers.Gemma3Config(text_config=text, vision_config=self.vision(image_size=224), mm_tokens_per_image=256,
                                           image_token_id=499, boi_token_id=498, eoi_token_id=497)
        tokens, image = ids(1, 400).clamp(max=490), torch.randn(1, 3, 224, 224)
        tokens[0, 20:276] = 499
        self.check(lambda: transformers.Gemma3ForConditionalGeneration(config), lambda m: m(
            tokens, pixel_values=image, token_type_ids=(tokens == 499).long(), attention_mask=torch.ones_like(tokens)).logits)

    def test_a_prefix_of_image_and_question(self):
        config = transformers.PaliGemmaConfig(
            text_config={"model_type": "gemma", **SIZES}, vision_config={"model_type": "siglip_vision_model", **self.vision()},
            image_token_id=499, projection_dim=64)
        config.text_config.num_image_tokens = 16
        tokens, image = ids(1, 300).clamp(max=490), torch.randn(1, 3, 56, 56)
        tokens[0, :16] = 499
        kinds = torch.zeros_like(tokens)
        kinds[0, 200:] = 1
        self.check(lambda: transformers.PaliGemmaForConditionalGeneration(config), lambda m: m(
            tokens, pixel_values=image, attention_mask=torch.ones_like(tokens), token_type_ids=kinds).logits)

    def test_a_mask_that_ends_before_the_keys(self):
        shown = quoka.transformers._mask(1, q_length=4, kv_length=4, attention_mask=torch.ones(1, 3, dtype=torch.bool))
        self.assertIsNotNone(shown)
        self.assertFalse(bool(shown[0, 0, :, 3].any()))


class Speculative(unittest.TestCase):
    """Chunks by which a draft is verified are decoding: they attend as single tokens do."""

    def run_by(self, widths, **settings):
        """Logits of the last tokens, given `at_once` at once behind a prompt of 300."""
        ours, tokens = model("Llama", "quoka"), ids(1, 300 + sum(widths))
        ours.config.quoka = {"mode": "paper", "budget": 10, "dense_layers": 0, **settings}
        cache = quoka.transformers.Cache(config=ours.config)
        with torch.no_grad():
            return torch.cat([ours(part, past_key_values=cache).logits for part in tokens.split([300, *widths], 1)][1:], 1)

    def test_a_short_chunk_is_as_its_tokens(self):
        one_by_one = self.run_by([1] * 63)
        for widths in ([63], [11, 52], [21, 2, 40]):
            self.assertLess(float((self.run_by(widths) - one_by_one).abs().max()), 1e-5, widths)
        self.assertGreater(float((self.run_by([63], decode=True) - one_by_one).abs().max()), 1e-4)  # asked otherwise
        self.assertGreater(float((self.run_by([63], chunk=63) - self.run_by([1] * 63, chunk=63)).abs().max()), 1e-4)
        self.assertGreater(float((self.run_by([64])[:, :63] - one_by_one).abs().max()), 1e-4)  # a chunk of a prompt

    def test_a_short_chunk_of_a_padded_batch(self):
        ours, tokens, seen = model("Llama", "quoka"), ids(2, 330), torch.ones(2, 330, dtype=torch.long)
        seen[0, :40] = 0
        ours.config.quoka = {"mode": "paper", "budget": 10, "dense_layers": 0}
        logits = []
        for widths in ([30], [1] * 30):
            cache, end = quoka.transformers.Cache(config=ours.config), 0
            for n in (300, *widths):
                end += n
                with torch.no_grad():
                    last = ours(tokens[:, end - n:end], attention_mask=seen[:, :end], past_key_values=cache).logits[:, -1]
            logits.append(last)
        self.assertLess(float((logits[0] - logits[1]).abs().max()), 1e-5)

    def test_prompt_lookup_gives_the_tokens_of_greedy(self):
        # transformers puts the first draft into the prompt's own call, so the prompt is exact here: min_past.
        for seed in range(4):
            ours = model("Llama", "quoka")
            tokens = ids(1, 60, seed=seed).repeat(1, 5)
            ours.config.quoka = {"mode": "paper", "budget": 10, "dense_layers": 0, "min_past": 299}
            widths = []
            ours.model.layers[0].register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))
            said = [ours.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=40, eos_token_id=499,
                                  past_key_values=quoka.transformers.Cache(config=ours.config), **how)
                    for how in ({}, {"prompt_lookup_num_tokens": 10})]
            self.assertTrue(torch.equal(*said), seed)
            self.assertTrue(any(1 < n < 64 for n in widths))

    def test_fewer_than_min_queries_are_of_sdpa(self):
        sdpa, calls = quoka.transformers.sdpa_attention_forward, []

        def counted(module, query, *args, **kwargs):
            calls.append(query.shape[2])
            return sdpa(module, query, *args, **kwargs)

        with unittest.mock.patch.object(quoka.transformers, "sdpa_attention_forward", counted), warnings.catch_warnings():
            warnings.filterwarnings("error", "quoka")
            warnings.filterwarnings("ignore", "quoka: budget is")
            one_by_one = self.run_by([20] + [1] * 5)
            self.assertEqual(calls, [])
            alike = self.run_by([20] + [1] * 5, min_queries=20, decode=True)
            self.assertEqual(calls, [1] * 5 * 4)
            self.assertGreater(float((alike - one_by_one)[:, :20].abs().max()), 1e-4)  # 20 are not fewer: they select
            self.assertLess(float((self.run_by([20] + [1] * 5, min_queries=21, decode=True) - one_by_one).abs().max()), 1e-4)
            self.assertEqual(calls[20:], ([20] * 4 + [1] * 20))
            del calls[:]
            with torch.no_grad():  # sinks, which sdpa does not support
                ours = model("GptOss", "quoka")
                exact = ours(ids(1, 9)).logits
                ours.config.quoka = {"min_queries": 50}
                self.assertTrue(torch.equal(ours(ids(1, 9)).logits, exact))
            self.assertEqual(calls, [])


class SeenSettings(unittest.TestCase):
    """Settings select, or are refused, or it is said that they do not."""

    def composite(self):
        text = {**SIZES, "layer_types": ["full_attention"] * 4}
        config = transformers.Gemma3Config(text_config=text, vision_config={
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56, "patch_size": 14})
        ours = transformers.Gemma3ForConditionalGeneration(config).eval()
        ours.set_attn_implementation("quoka")
        return ours

    def test_a_composite_model(self):
        ours, tokens = self.composite(), ids(1, 300)
        with torch.no_grad():
            exact = ours(tokens).logits
            with self.assertRaisesRegex(ValueError, "nonsense"):
                ours.config.quoka = {"mode": "nonsense"}
            self.assertFalse(hasattr(ours.config, "quoka"))
            ours.config.quoka = {"mode": "paper", "budget": 10}
            with quoka.transformers.watched() as chosen:
                self.assertGreater(float((ours(tokens).logits - exact).abs().max()), 1e-4)
            self.assertEqual({c.layer for c in chosen}, {1, 2, 3})
            ours.config.quoka["mode"] = "best"  # where it is used, at the latest
            with self.assertRaisesRegex(ValueError, "best"):
                ours(tokens)
            ours.config.quoka = None
            self.assertTrue(torch.equal(ours(tokens).logits, exact))
            ours.config.text_config.quoka = {"mode": "paper", "budget": 10}
            self.assertFalse(torch.equal(ours(tokens).logits, exact))
            del ours.config.quoka
            self.assertTrue(torch.equal(ours(tokens).logits, exact))

    def test_a_config_keeps_them(self):
        ours = self.composite()
        ours.config.quoka = {"mode": "paper", "budget": 10}
        with tempfile.TemporaryDirectory() as folder:
            ours.config.save_pretrained(folder)
            read = transformers.Gemma3Config.from_pretrained(folder)
        for config in (read, copy.deepcopy(ours.config)):
            self.assertEqual((config.quoka, config.text_config.quoka), (ours.config.quoka,) * 2)

    def test_a_thread_says_that_it_does_not_select(self):
        ours, tokens = model("Llama", "quoka"), ids(1, 300)

        def run(*how):
            result = []

            def target():
                with torch.no_grad():
                    result.append(ours(tokens).logits)

            quoka.transformers._warned.clear()
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                thread = threading.Thread(target=how[0] if how else target, args=[target] if how else [])
                thread.start(), thread.join()
            return result[0], [str(w.message) for w in seen if "does not hold" in str(w.message)]

        exact, said = run()
        self.assertEqual(said, [])
        with quoka.transformers.settings(mode="paper", budget=10):
            got, said = run()
            self.assertTrue(torch.equal(got, exact))
            self.assertEqual(len(said), 1)
            self.assertRegex(said[0], "settings.*copy_context")
            got, said = run(contextvars.copy_context().run)
            self.assertFalse(torch.equal(got, exact))
            self.assertEqual(said, [])
        self.assertEqual(run()[1], [])
        ours.config.quoka = {"mode": "paper", "budget": 10}
        with quoka.transformers.watched() as chosen:
            self.assertRegex(run()[1][0], "watched")
            self.assertEqual(chosen, [])
            run(contextvars.copy_context().run)
            self.assertGreater(len(chosen), 0)

    def test_values_that_cannot_be_meant(self):
        for given, words in (
                ({"mode": "best"}, "best"), ({"budget": 0.0}, r"\(0, 1\]"), ({"budget": "mass:0.9"}, "mass:0.9"), ({"queries": -3}, "queries is -3"),
                ({"queries": 10**9}, "from 0 to 1048576"), ({"threads": 5000}, "threads is 5000, but must be a whole number from 0 to 1024"),
                ({"threads": None}, "threads is None"), ({"decode": 2}, "decode is 2"), ({"chunk": 0}, "chunk is 0"), ({"chunk": "x"}, "chunk is 'x'"),
                ({"chunk": 12.5}, "chunk is 12.5"), ({"arithmetic": "fp8"}, "fp8"), ({"min_past": -1}, "-1"), ({"min_past": "10"}, "min_past is '10'"),
                ({"min_queries": -1}, "min_queries is -1"), ({"dense_layers": "0,5"}, r"such as \[0, 5\]"), ({"dense_layers": -5}, "dense_layers is -5"),
                ({"dense_layers": [0, -1]}, "-1"), ({"dense_layers": "first"}, "'first'"), ({"dense_layers": True}, "True"),
                ({"layer_budgets": {"3": -5}}, "-5"), ({"layer_budgets": [3]}, "layer_budgets"), ({"layer_budgets": {"last": 3}}, "'last'"),
                ({"layer_budgets": {-1: 3}}, "-1"), ({"budgets": 3}, "budgets"), ({"bugdet": 3}, "'bugdet' .*Is 'budget' meant"), (["paper"], r"\['paper'\]")):
            with self.assertRaisesRegex(ValueError, words):
                quoka.transformers.Settings.of(given)
        with self.assertRaisesRegex(ValueError, "bugdet"), quoka.transformers.settings(bugdet=3):
            pass

    def test_a_misspelt_variable(self):
        quoka.transformers._warned.clear()
        with unittest.mock.patch.dict(os.environ, {"QUOKA_BUGDET": "512"}), self.assertWarnsRegex(UserWarning, "QUOKA_BUGDET.*QUOKA_BUDGET"):
            quoka.transformers.Settings.of_environment()

    def test_attention_weights_are_missed(self):
        quoka.transformers._warned.clear()
        with torch.no_grad(), self.assertWarnsRegex(UserWarning, "output_attentions.*eager"):
            model("Llama", "quoka")(ids(1, 20), output_attentions=True)


class Compiled(unittest.TestCase):
    def setUp(self):
        torch._dynamo.reset()
        self.addCleanup(torch._dynamo.reset)

    def decode(self, implementation, scope=contextlib.nullcontext, config=None, padded=False, cache=DynamicCache):
        """A prompt and 12 tokens of 4 layers: logits, and how many graphs were compiled of each call."""
        torch._dynamo.reset()
        ours, graphs, tokens = model("Llama", implementation), [], ids(2, 52)
        if config is not None:
            ours.config.quoka = config

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        compiled, kept, logits, end = torch.compile(ours, backend=backend, fullgraph=True), cache(config=ours.config), [], 0
        seen = torch.ones(2, 52, dtype=torch.long)
        seen[0, :7] = 0
        with torch.no_grad():
            for n in [40] + [1] * 12:
                end += n
                with scope():
                    logits.append(compiled(tokens[:, end - n:end], past_key_values=kept, attention_mask=seen[:, :end] if padded else None).logits)
        return torch.cat(logits, 1)[seen[:, :52].bool() if padded else slice(None)], len(graphs)

    def test_a_decode_loop_is_as_few_graphs_as_of_sdpa(self):
        for padded in (False, True):
            expected, graphs = self.decode("sdpa", padded=padded)
            for how in ({}, {"config": {"mode": "exact", "threads": 1}}, {"cache": quoka.transformers.Cache},
                        {"scope": lambda: quoka.transformers.settings(arithmetic="float")}):
                with self.subTest(padded=padded, how=list(how)):
                    got, ours = self.decode("quoka", padded=padded, **how)
                    self.assertLess(float((got - expected).abs().max() / expected.abs().max()), 1e-4)
                    self.assertLessEqual(ours, graphs)

    def test_other_settings_compile_anew(self):
        ours, seen = model("Llama", "quoka"), []
        attend = quoka.torch._core.attention
        with unittest.mock.patch.object(quoka.torch._core, "attention", lambda *a, **k: (seen.append(k["arithmetic"]), attend(*a, **k))[1]):
            compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
            with torch.no_grad():
                for config in (None, {"arithmetic": "float"}, quoka.transformers.Settings(arithmetic="int8")):
                    ours.config.quoka = config
                    compiled(ids(1, 20), use_cache=False)
                with quoka.transformers.settings(arithmetic="bf16"):
                    compiled(ids(1, 20), use_cache=False)
        self.assertEqual(seen[::4], ["automatic", "float", "int8", "bf16"])

    def test_it_says_that_it_does_not_select(self):
        ours = model("Llama", "quoka")
        ours.config.quoka = {"mode": "paper", "budget": 10, "dense_layers": 0}
        quoka.transformers._warned.clear()
        with torch.no_grad():
            with self.assertWarnsRegex(UserWarning, "selects nothing"):
                got = torch.compile(ours, backend="aot_eager", fullgraph=True)(ids(1, 200), use_cache=False).logits
            ours.config.quoka = None
            self.assertLess(float((got - ours(ids(1, 200)).logits).abs().max()), 1e-5)

    def test_export(self):
        ours, expected = model("Llama", "quoka"), model("Llama", "sdpa")

        class Logits(torch.nn.Module):
            def __init__(self, of):
                super().__init__()
                self.of = of

            def forward(self, tokens):
                return self.of(input_ids=tokens, use_cache=False).logits

        for strict in (True, False):
            with torch.no_grad():
                made = torch.export.export(Logits(ours), (ids(1, 40),), strict=strict).module()
                self.assertLess(float((made(ids(1, 40, seed=9)) - expected(ids(1, 40, seed=9)).logits).abs().max()), 1e-4)


class Rooms(unittest.TestCase):
    """Where quoka.transformers.Cache writes."""

    def test_a_cut_cache_that_nobody_shares_is_not_copied(self):
        cache = quoka.transformers.Cache()
        k, v = torch.randn(2, 1, 2, 200, 8).unbind()
        cache.update(k, v, 0), cache.update(k[:, :, :20], v[:, :, :20], 0)
        where = cache.layers[0].keys.data_ptr()
        for _ in range(3):
            cache.crop(-10)
            cache.update(k[:, :, :12], v[:, :, :12], 0)
            self.assertEqual(cache.layers[0].keys.data_ptr(), where)
        kept = cache.layers[0].keys
        cache.crop(-10)
        cache.update(k[:, :, :12], v[:, :, :12], 0)
        self.assertNotEqual(cache.layers[0].keys.data_ptr(), where)
        self.assertEqual(kept.shape[2], 226)

    def test_from_inference_mode_on(self):
        ours, logits = model("Llama", "quoka"), []
        for kind in (quoka.transformers.Cache, DynamicCache):
            cache = kind(config=ours.config)
            with torch.inference_mode():
                ours(ids(1, 50), past_key_values=cache), ours(ids(1, 9), past_key_values=cache)
            with torch.no_grad():
                logits.append(ours(ids(1, 20), past_key_values=cache).logits)
        self.assertTrue(torch.equal(*logits))

    def test_gradients_flow_through_chunks(self):
        gradients = []
        for kind in (quoka.transformers.Cache, DynamicCache):
            ours, cache = model("Llama", "quoka"), kind()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                sum(ours(part, past_key_values=cache).logits.square().sum() for part in ids(1, 60).split([30, 20, 10], 1)).backward()
            gradients.append(ours.model.layers[0].self_attn.k_proj.weight.grad)
        self.assertTrue(torch.equal(*gradients))


class Arithmetics(unittest.TestCase):
    def test_one_that_is_float_here_says_so(self):
        levels = [None] + ["x86-64-v3"] * (os.uname().machine == "x86_64")
        for level in levels:
            environment = {**os.environ, **({} if level is None else {"QUOKA_ISA": level})}
            said = json.loads(subprocess.run([sys.executable, "-c", """
import json, warnings, numpy, quoka
q = numpy.ones((1, 2, 64, 64), numpy.float32)
answer = {"level": quoka.isa()}
for name in ("automatic", "float", "bf16", "int8"):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        quoka.attention(q, q, q, arithmetic=name), quoka.attention(q, q, q, arithmetic=name)
    answer[name] = [quoka.arithmetic_used(name), [str(w.message) for w in seen]]
print(json.dumps(answer))
"""], check=True, text=True, stdout=subprocess.PIPE, env=environment).stdout)
            for name in ("automatic", "float", "bf16", "int8"):
                used, warned = said[name]
                is_float = name in ("bf16", "int8") and used == "float"
                self.assertEqual(len(warned), is_float, said)
                if is_float:
                    self.assertIn(name, warned[0])
                    self.assertIn(said["level"], warned[0])
            if level is not None:
                self.assertEqual(said["bf16"][0], "float")


if __name__ == "__main__":
    unittest.main()
