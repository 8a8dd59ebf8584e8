#!/usr/bin/env python3
"""quoka.transformers on small models of random weights, against sdpa, or eager if sdpa does not support a model: logits, padded
batches, caches, generate(), beam search; selection; what is handed on or refused."""
import contextlib
import contextvars
import copy
import itertools
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
from quoka.transformers import Cache, Settings, attention_forward, settings, watched

torch.set_num_threads(1)  # these models are small
torch.set_grad_enabled(False)  # in this thread; others begin with gradients

SIZES = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": None}
IN_TURN = ["sliding_attention", "full_attention"] * 2
CONFIGS = {
    "Llama": LlamaConfig(**SIZES),
    "Qwen3": Qwen3Config(**SIZES),
    # Soft-caps so low that logits of random weights meet them.
    "Gemma2": Gemma2Config(**SIZES, sliding_window=24, layer_types=IN_TURN, query_pre_attn_scalar=16, attn_logit_softcapping=0.02),
    "Gemma3": Gemma3TextConfig(**SIZES, sliding_window=24, layer_types=IN_TURN),
    "GptOss": GptOssConfig(**SIZES, sliding_window=24, num_local_experts=2, num_experts_per_tok=1, layer_types=IN_TURN),
}
PAPER = {"mode": "paper", "budget": 10, "dense_layers": 0}
RECOMMENDED = {"mode": "recommended", "budget": 10}


def model(name="Llama", implementation="quoka", dtype=torch.float32, **quokas):
    """A new one of the same weights, with these settings."""
    torch.manual_seed(11)
    made = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[name]), attn_implementation="eager").to(dtype).eval()
    if name == "GptOss":  # which random weights leave nearly alike
        for layer in made.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    made.set_attn_implementation(implementation)
    if quokas:
        made.config.quoka = quokas
    return made


def other_model(name="Llama"):
    return model(name, "eager" if name in ("Gemma2", "GptOss") else "sdpa")


def ids(*shape, seed=3):
    return torch.randint(2, 500, shape, generator=torch.Generator().manual_seed(seed))


def mask_of(tokens, *hidden):
    """A mask as a tokenizer makes it: the first hidden[i] tokens of sequence i are padding."""
    return (torch.arange(tokens.shape[1]) >= torch.tensor(hidden)[:, None]).long()


def in_parts(of, tokens, widths, cache, seen=None):
    """Logits of tokens that are passed in calls of these widths."""
    logits, end = [], 0
    for n in widths:
        end += n
        masked = {} if seen is None else {"attention_mask": seen[:, :end]}
        logits.append(of(tokens[:, end - n:end], past_key_values=cache, **masked).logits)
    return torch.cat(logits, 1)


def logits_by(of, tokens, given, **named):
    """Logits of a model whose config has these settings."""
    of.config.quoka = given
    return of(tokens, **named).logits


def apart(got, expected):
    return float((got - expected).abs().max())


def relatively_apart(got, expected):
    return apart(got, expected) / float(expected.abs().max())


def said(run):
    """The warnings of this package."""
    quoka.transformers._warned.clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run()
    return [str(one.message) for one in seen if str(one.message).startswith("quoka: ")]


class Exact(unittest.TestCase):
    @drawn(5, widths=st.lists(st.sampled_from([1, 18, 30]), max_size=4), left=st.booleans(),
           padding=st.lists(st.integers(0, 13), min_size=1, max_size=3))
    def test_a_prompt_in_chunks_and_tokens(self, widths, left, padding):
        tokens = ids(len(padding), 40 + sum(widths))
        for name in CONFIGS:
            ours, theirs = model(name), other_model(name)
            for cache in (DynamicCache(config=ours.config), Cache(config=ours.config), Cache(), None,
                          StaticCache(config=ours.config, max_cache_len=200)):
                seen = mask_of(tokens, *(padding if not isinstance(cache, StaticCache) else [0] * len(padding)))
                if not left:
                    seen = seen.flip(1)
                masked = {} if seen.all() else {"attention_mask": seen}
                if cache is None:
                    got = ours(tokens, **masked).logits
                else:
                    got = in_parts(ours, tokens, [40, *widths], cache, masked.get("attention_mask"))
                expected = theirs(tokens, **masked).logits
                with self.subTest(name, cache=type(cache).__name__):
                    self.assertLess(relatively_apart(got[seen.bool()], expected[seen.bool()]), 1e-4)

    def test_generate(self):
        tokens = ids(2, 30)
        for name in CONFIGS:
            for how in ({}, {"num_beams": 3}, {"past_key_values": Cache}):
                both = [m.generate(tokens, attention_mask=mask_of(tokens, 7, 0), max_new_tokens=64, do_sample=False,
                                   **{k: v(config=m.config) if isinstance(v, type) else v for k, v in how.items()})
                        for m in (model(name), other_model(name))]
                with self.subTest(name, how=how):
                    self.assertTrue(torch.equal(*both))

    def test_the_soft_cap_of_gemma_2_is_felt(self):
        of = other_model("Gemma2")
        capped = of(ids(1, 90)).logits
        for layer in of.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        self.assertGreater(relatively_apart(of(ids(1, 90)).logits, capped), 1e-2)

    def test_halves(self):
        for dtype, relative in ((torch.bfloat16, 5e-2), (torch.float16, 1e-2)):
            ours, theirs = (model("Llama", by, dtype)(ids(1, 60)).logits.float() for by in ("quoka", "sdpa"))
            self.assertLess(relatively_apart(ours, theirs), relative)

    def test_what_is_not_ours_is_handed_on(self):
        ours, theirs = model(), other_model()
        tokens = ids(1, 20)

        def run():
            for _ in range(2):
                ours(tokens).logits.sum().backward()

        with torch.enable_grad():
            warned, = said(run)
            self.assertIn("gradients", warned)
            theirs(tokens).logits.sum().backward()
            got, expected = (m.model.layers[0].self_attn.q_proj.weight.grad for m in (ours, theirs))
            self.assertLess(apart(got / 2, expected), 1e-4)
        cache = DynamicCache()  # a chunk: no mask is made, and sdpa needs one
        ours(tokens, past_key_values=cache)
        with torch.enable_grad():
            got = ours(tokens, past_key_values=cache).logits.detach()
            self.assertLess(relatively_apart(got, theirs(torch.cat([tokens, tokens], 1)).logits[:, 20:].detach()), 1e-4)
            for name, words in (("GptOss", "gradients .*sinks, which sdpa does not know"), ("Gemma2", "gradients .*a soft-cap, which sdpa does not know")):
                with self.assertRaisesRegex(ValueError, words):
                    model(name)(tokens)

    def test_a_window_without_a_mask(self):
        for q_len, window in ((4, 5), (1, 5), (9, 5), (4, 99)):
            q, k, v = torch.randn(1, 2, q_len, 16), torch.randn(1, 2, 9, 16), torch.randn(1, 2, 9, 16)

            def attend(of_q):
                return attention_forward(torch.nn.Module(), of_q, k, v, None, sliding_window=window)[0]  # noqa: B023

            with settings(arithmetic="float"):
                ours = attend(q)
            with torch.enable_grad():
                of_sdpa = attend(q.requires_grad_())
            self.assertLess(apart(ours, of_sdpa), 1e-5)

    def test_keys_without_positions_may_repeat(self):
        module = torch.nn.Module()
        module.layer_idx = 0
        q, k, v = torch.randn(1, 4, 4, 16), torch.randn(1, 2, 4, 16), torch.randn(1, 2, 4, 16)
        k, v = torch.cat([k, k], 2), torch.cat([v, v], 2)
        mask = torch.ones(4, 8, dtype=torch.bool).tril(4)
        expected = torch.nn.functional.scaled_dot_product_attention(
            q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), attn_mask=mask).transpose(1, 2)
        for mode in ("exact", "paper"):
            with settings(mode=mode, budget=1.0, dense_layers=0, arithmetic="float"):
                got, weights = attention_forward(module, q, k, v, None)
            self.assertLess(apart(got, expected), 1e-5)
            self.assertIsNone(weights)


class Selects(unittest.TestCase):
    def test_all_keys_are_exact_attention(self):
        tokens = ids(3, 300)
        for name, seen in itertools.product(CONFIGS, (None, mask_of(tokens, 40, 0, 3))):
            ours = model(name)
            shown = slice(None) if seen is None else seen.bool()

            def run(**given):
                return logits_by(ours, tokens, given, attention_mask=seen)[shown]  # noqa: B023

            expected = run()
            for mode in ("recommended", "paper"):
                of = {"mode": mode, "chunk": 64, "dense_layers": 0}
                with self.subTest(name, mode=mode, padded=seen is not None):
                    self.assertLess(apart(run(**of, budget=1.0), expected), 1e-5)
                    self.assertGreater(apart(run(**of, budget=5), expected), 1e-4)

    def test_a_prompt_is_cut_as_chunks_are(self):
        ours, tokens = model(), ids(1, 320)
        for mode in ("paper", "recommended"):
            with settings(mode=mode, budget=24, chunk=64, dense_layers=[0, 2]):
                whole = ours(tokens).logits
                for cache in (Cache(), DynamicCache()):
                    self.assertLess(apart(in_parts(ours, tokens, [64] * 5, cache), whole), 1e-5)
            self.assertGreater(apart(whole, ours(tokens).logits), 0.05)

    def test_padding_takes_no_budget(self):
        ours, tokens = model(**PAPER | {"budget": 30, "chunk": 100}), ids(1, 200)
        padded = torch.cat([torch.zeros(1, 70, dtype=torch.long), tokens], 1)
        seen = mask_of(padded, 70)
        got = ours(padded, attention_mask=seen, position_ids=(seen.cumsum(1) - 1).clamp(min=0)).logits[:, 70:]
        # Chunks of 100 end elsewhere: the first 30 tokens, and no more, are in a chunk without a past in both.
        self.assertLess(apart(ours(tokens).logits[:, :30], got[:, :30]), 1e-4)
        self.assertTrue(bool(torch.isfinite(got).all()))

    def test_decode_and_layers(self):
        chosen = Settings(mode="paper", dense_layers=2, layer_budgets={"3": 7}, budget=0.5)
        self.assertEqual([chosen.selects(n) for n in (0, 1, 2, 3)], [False, False, True, True])
        self.assertEqual([chosen.budget_of(n) for n in (2, 3)], [0.5, 7])
        ours, tokens, cache = model(), ids(1, 200), Cache()
        ours(tokens[:, :199], past_key_values=cache)
        without, decodes, exact = (logits_by(ours, tokens[:, 199:], given, past_key_values=copy.deepcopy(cache))
                                   for given in (PAPER, PAPER | {"decode": True}, {"mode": "exact"}))
        self.assertGreater(apart(without, decodes), 1e-4)
        self.assertTrue(torch.equal(without, exact))

    def test_queries_change_the_choice(self):
        ours, tokens = model(), ids(1, 200)
        for chunk in (200, 100):  # with a past of its own, and cut in the call
            logits = []
            for queries in (0, 16, 200):
                ours.config.quoka = PAPER | {"chunk": chunk, "queries": queries}
                logits.append(in_parts(ours, tokens, [200] if chunk == 100 else [100, 100], Cache()))
            self.assertTrue(torch.equal(logits[0], logits[1]))  # the preset's: 16 of each query head
            self.assertGreater(apart(logits[0], logits[2]), 1e-4)

    def test_a_short_past_is_attended_to_whole(self):
        with watched() as chosen:
            model(**PAPER | {"dense_layers": 3, "chunk": 50, "min_past": 100})(ids(1, 220))
        self.assertEqual([(c.first, c.selection is None) for c in chosen],
                         [(0, True), (50, True), (100, False), (150, False), (200, False)])

    def test_what_was_chosen_can_be_watched(self):
        ours = model(**PAPER | {"budget": 20, "chunk": 60, "dense_layers": 2})
        with watched() as chosen:
            ours(ids(2, 150))
        ours(ids(1, 150))
        self.assertEqual([(c.layer, c.batch, c.first, c.last) for c in chosen],
                         [(layer, b, first, min(first + 60, 150)) for layer in (2, 3) for b in (0, 1) for first in (0, 60, 120)])
        self.assertEqual([None if c.selection is None else (c.selection.max_count, c.selection.kv_len) for c in chosen[:3]],
                         [None, (20, 60), (20, 120)])
        self.assertEqual([c.kept_share for c in chosen[:2]], [1.0, None])  # of all, and paper does not tell
        with watched() as chosen:
            logits_by(ours, ids(1, 150), {"mode": "recommended", "budget": 20, "chunk": 60, "dense_layers": 3})
        self.assertEqual(chosen[0].kept_share, 1.0)
        for c in chosen[1:]:
            self.assertTrue(0 < c.kept_share < 1)
            self.assertAlmostEqual(c.kept_share, float(c.selection.kept_shares.mean()), places=6)

    def test_layers_with_a_window_are_not_counted(self):
        chosen = Settings(mode="paper", dense_layers=1)
        self.assertEqual([chosen.selects(n, IN_TURN) for n in (1, 3)], [False, True])
        self.assertEqual([chosen.selects(n) for n in (0, 1)], [False, True])
        ours, tokens = model("Gemma3"), ids(1, 200)
        logits = [logits_by(ours, tokens, PAPER | {"chunk": 64, "dense_layers": dense}) for dense in (1, [1], [1, 3], 2)]
        self.assertTrue(torch.equal(logits[0], logits[1]) and torch.equal(logits[2], logits[3]))
        self.assertGreater(apart(logits[0], logits[2]), 1e-4)


class Given(unittest.TestCase):
    """Settings as they are given: a dictionary, a file, variables of the environment."""

    def environment(self, **variables):
        return unittest.mock.patch.dict(os.environ, {f"QUOKA_{name}": text for name, text in variables.items()})

    def folder(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return pathlib.Path(folder.name)

    def test_a_dictionary_or_a_file(self):
        given = {"mode": "recommended", "budget": 0.25, "dense_layers": 1, "min_past": 1024, "stats": 1, "model": {"q_heads": 4}}
        file = self.folder() / "settings.json"
        file.write_text(json.dumps(given))
        self.assertEqual(Settings.of(str(file)), Settings("recommended", 0.25, 1, {}, 1024))
        # As check.sh writes one after its last step, refine: the layers that hurt are dense, and more queries choose.
        written = {"arithmetic": "int8", "budget": 0.25, "dense_layers": [0, 7, 29], "min_past": 2048, "mode": "recommended",
                   "queries": 256, "model": {"head_dim": 64, "kv_heads": 3, "q_heads": 9}}
        self.assertEqual(Settings.of(written), Settings("recommended", 0.25, [0, 7, 29], {}, 2048, queries=256, arithmetic="int8"))

    def test_files_without_settings(self):
        folder = self.folder()
        (folder / "text").write_text("mode: paper"), (folder / "list").write_text("[1]")
        for path, words in ((folder, "Is a directory"), (folder / "none", "No such file"), (folder / "text", "is not JSON"),
                            (folder / "list", "holds [1], but must hold an object")):
            with self.assertRaisesRegex(ValueError, "^quoka: .*" + re.escape(words)):
                Settings.of(str(path))
            with self.environment(CONFIG=str(path), BUDGET="512"), \
                    self.assertRaisesRegex(ValueError, "^quoka: QUOKA_CONFIG: .*" + re.escape(words)):
                Settings.of_environment()

    def test_variables(self):
        empty = dict.fromkeys(("CONFIG", "MODE", "BUDGET", "CHUNK", "DENSE_LAYERS", "MOED"), "")  # are not set
        for variables, expected in ((empty, Settings()), ({"MODE": "paper", "BUDGET": ".25"}, Settings("paper", 0.25)),
                                    ({"MODE": "paper", "BUDGET": "1."}, Settings("paper", 1.0))):
            with self.environment(**variables):
                self.assertEqual(Settings.of_environment(), expected)
        with self.environment(MODE="best"), self.assertRaisesRegex(ValueError, "best"):
            Settings.of_environment()
        with self.environment(BUGDET="512"):
            self.assertRegex(*said(Settings.of_environment), "QUOKA_BUGDET.*QUOKA_BUDGET")

    def test_a_program_that_does_not_mention_quoka(self):
        folder = self.folder()
        (folder / "settings.json").write_text('{"mode": "recommended", "budget": 0.25, "queries": 256}')
        (folder / "program.py").write_text("""
import sys, torch, transformers
torch.manual_seed(1)
sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes), attn_implementation="quoka").eval()
import quoka.transformers
tokens = torch.arange(1300)[None] % 50
with torch.no_grad(), quoka.transformers.watched() as chosen: model(tokens)
model.config.quoka = {}  # a model's own settings win
with torch.no_grad(), quoka.transformers.watched() as none: model(tokens)
print(sys.argv[1:], chosen[-1].selection.max_count, len(none))
""")
        with self.environment(CONFIG=str(folder / "settings.json"), BUDGET="512", MODE="paper"):
            self.assertEqual(Settings.of_environment(), Settings("paper", 512, queries=256))
            package = pathlib.Path(quoka.__file__).parents[1]
            done = subprocess.run([sys.executable, "-m", "quoka", "program", "a", "b"], cwd=folder, check=True, text=True,
                                  stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": f"{package}:{folder}"})
        self.assertEqual(done.stdout.strip(), "['a', 'b'] 512 0")

    def test_settings_without_effect_are_named(self):
        self.assertEqual(said(lambda: Settings.of({"budget": 0.25, "decode": True, "threads": 1})),
                         ["quoka: budget, decode without a mode: attention is exact; mode recommended, balanced or paper selects keys"])
        self.assertEqual(said(lambda: (Settings.of({"budget": 0.25, "mode": "exact"}), Settings.of({"threads": 1}))), [])
        ours = model()
        for given, words in (({"dense_layers": 99}, ["no layer selects keys: dense_layers is 99, and 4 of the model's layers could select"]),
                             ({"dense_layers": [0, 77]}, ["dense_layers names layer 77, but the model's last layer is 3"]),
                             ({"layer_budgets": {"77": 64}}, ["layer_budgets names layer 77, but the model's last layer is 3"]),
                             ({"dense_layers": [0], "layer_budgets": {"1": 64}}, []), ({"dense_layers": 99, "mode": "exact"}, [])):
            ours.config.quoka = {"mode": "paper", "budget": 64} | given
            self.assertEqual(said(lambda: (ours(ids(1, 20)), ours(ids(1, 20)))), [f"quoka: {one}" for one in words])

    def test_values_that_cannot_be_meant(self):
        for given, words in (
                ({"mode": "best"}, "best"), ({"budget": 0.0}, r"\(0, 1\]"), ({"budget": "mass:0.9"}, "mass:0.9"), ({"queries": -3}, "queries is -3"),
                ({"queries": 10**9}, "from 0 to 1048576"), ({"threads": 5000}, "threads is 5000, but must be a whole number from 0 to 1024"),
                ({"threads": None}, "threads is None"), ({"decode": 2}, "decode is 2"), ({"chunk": 0}, "chunk is 0"), ({"chunk": "x"}, "chunk is 'x'"),
                ({"chunk": 12.5}, "chunk is 12.5"), ({"arithmetic": "fp8"}, "fp8"), ({"min_past": -1}, "-1"), ({"min_past": "10"}, "min_past is '10'"),
                ({"min_queries": -1}, "min_queries is -1"), ({"dense_layers": "0,5"}, r"such as \[0, 5\]"), ({"dense_layers": -5}, "dense_layers is -5"),
                ({"dense_layers": [0, -1]}, "-1"), ({"dense_layers": "first"}, "'first'"), ({"dense_layers": True}, "True"),
                ({"layer_budgets": {"3": -5}}, "-5"), ({"layer_budgets": [3]}, "layer_budgets"), ({"layer_budgets": {"last": 3}}, "'last'"),
                ({"layer_budgets": {-1: 3}}, "-1"), ({"layer_budgets": {"07": 3}}, "'07'"), ({"budgets": 3}, "budgets"), ({"bugdet": 3}, "'bugdet' .*Is 'budget' meant"), (["paper"], r"\['paper'\]")):
            with self.assertRaisesRegex(ValueError, words):
                Settings.of(given)
        with self.assertRaisesRegex(ValueError, "bugdet"), settings(bugdet=3):
            pass
        with self.assertRaises(ValueError) as caught:  # all at once
            Settings.of({"mode": "best", "budget": 1.5, "chunk": 0, "dense_layers": -1, "bugdet": 3, "layer_budgets": {"x": 64}, "arithmetic": "fp8"})
        for words in ("mode is 'best'", "1.5", "chunk is 0", "dense_layers is -1", "'bugdet' is not a setting", "layer_budgets has 'x'", "arithmetic is 'fp8'"):
            self.assertIn(words, str(caught.exception))
        self.assertNotIn("(budget)", str(caught.exception))


class History:
    """What may happen to a cache and to the tensors that it gave out, step by step: a step and a number, drawn. The same steps
    are taken of quoka.transformers.Cache and of DynamicCache."""

    STEPS = ("grow", "grow", "crop", "keep", "back", "cut_by_hand", "thin", "write", "write_and_crop", "reorder", "repeat", "select", "fork", "turn")
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

    def write_and_crop(self, layers, number):
        self.write(layers, number // 100)
        self.crop(layers, number)

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

        got, expected = (History(kind(), grow).run(steps) for kind in (Cache, DynamicCache))
        for one, other in zip(got, expected, strict=True):
            self.assertTrue(torch.equal(one, other))

    def test_where_it_writes(self):
        """In place, unless others hold the memory that was cut off."""
        cache = Cache()
        k, v = torch.randn(2, 1, 2, 200, 8).unbind()

        def appended(n):
            cache.update(k[:, :, :n], v[:, :, :n], 0)
            return cache.layers[0].keys.data_ptr()

        appended(200)
        where = appended(20)
        self.assertEqual(appended(5), where)
        for _ in range(3):
            cache.crop(-10)
            self.assertEqual(appended(12), where)
        kept = cache.layers[0].keys
        cache.crop(-10)
        self.assertNotEqual(appended(12), where)
        self.assertEqual(kept.shape[2], 231)
        cache.reset()
        self.assertEqual(cache.get_seq_length(), 0)
        appended(200)
        self.assertTrue(torch.equal(cache.layers[0].keys, k))

    def test_from_inference_mode_on(self):
        ours, logits = model(), []
        for cache in (Cache(config=ours.config), DynamicCache(config=ours.config)):
            with torch.inference_mode():
                in_parts(ours, ids(1, 59), [50, 9], cache)
            logits.append(ours(ids(1, 20), past_key_values=cache).logits)
        self.assertTrue(torch.equal(*logits))

    def test_gradients_flow_through_chunks(self):
        gradients = []
        for cache in (Cache(), DynamicCache()):
            ours = model()
            with torch.enable_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                in_parts(ours, ids(1, 60), [30, 20, 10], cache).square().sum().backward()
            gradients.append(ours.model.layers[0].self_attn.k_proj.weight.grad)
        self.assertTrue(torch.equal(*gradients))


class KeptStates(unittest.TestCase):
    """Cache keeps the codes of its keys: the same bits as with a State made for each call."""

    LAYERS = 3  # that select, of four

    def setUp(self):
        self.ours, self.made, State = model(), [], quoka._core.State

        def make(*args, **named):
            if "preset" in named:  # else it is Settings, which looks at a budget
                self.made.append(named)
            return State(*args, **named)

        patch = unittest.mock.patch.object(quoka.transformers._core, "State", make)
        patch.start()
        self.addCleanup(patch.stop)

    def both(self, run, ours=None):
        """run(model, a cache) has the same result with and without kept States. Returns how many States each made."""
        ours, results, made = ours or self.ours, [], []
        for kind in (Cache, DynamicCache):
            del self.made[:]
            results.append(run(ours, kind(config=ours.config)))
            made.append(len(self.made))
        self.assertTrue(torch.equal(*results))
        self.assertGreater(float(results[0].abs().max()), 0)
        return tuple(made)

    def test_chunks_and_tokens(self):
        for given, sequences, widths in (
                (RECOMMENDED, 2, [64, 64, 30, 100, 142]), (RECOMMENDED | {"budget": 0.125}, 2, [64, 64, 30, 100, 142]),
                (PAPER | {"budget": 20, "dense_layers": 1}, 2, [64, 64, 30, 100, 142]), (RECOMMENDED, 1, [170] + [1] * 30)):
            self.ours.config.quoka = given | {"chunk": 64, "decode": True}
            made = self.both(lambda m, cache: in_parts(m, ids(sequences, sum(widths)), widths, cache))  # noqa: B023
            self.assertEqual(made, (self.LAYERS * sequences, self.LAYERS * sequences * len(widths)))

    @drawn(20, steps=st.lists(st.tuples(st.sampled_from((*History.STEPS, "settings", "exact")), st.integers(0, 1000)), max_size=9))
    def test_through_any_history(self, steps):
        options = (RECOMMENDED, RECOMMENDED | {"budget": 0.125}, {"mode": "paper", "budget": 20}, RECOMMENDED | {"queries": 99},
                   RECOMMENDED | {"chunk": 20})

        class Model(History):
            def settings(self, layers, number):
                of_model.config.quoka = {"chunk": 32, "decode": True, "dense_layers": 1, **options[number % len(options)]}

            def exact(self, layers, number):
                with settings(mode="exact"):
                    self.grow(layers, number)

        of_model = self.ours

        def run(m, cache):
            history = Model(cache, lambda cache, sequences, number: m(
                ids(sequences, (1, 20, 70, 100)[number % 4], seed=number), past_key_values=cache).logits)
            history.settings(None, 0)
            return torch.cat([x.flatten() for x in history.run(steps)])

        self.both(run)

    def test_which_changes_they_outlive(self):
        """They outlive a cut, but not an empty cache. Keys that others changed: test_through_any_history."""
        self.ours.config.quoka = RECOMMENDED | {"chunk": 32}
        tokens = ids(2, 300)

        def cut_and_exact(cache):
            cache.crop(-90)
            with settings(mode="exact"):
                self.ours(tokens[:, :20], past_key_values=cache)

        def begun_anew(emptied):  # DynamicCache remembers how many sequences there were, and its length after reset()
            return lambda cache: DynamicCache() if type(cache) is DynamicCache else emptied(cache)

        for name, change, batch, outlived in (
                ("nothing", lambda cache: None, 2, True), ("cut", lambda cache: cache.crop(-60), 2, True), ("cut and exact", cut_and_exact, 2, True),
                ("cut to nothing", begun_anew(lambda cache: cache.crop(-150)), 1, False), ("reset", begun_anew(lambda cache: cache.reset()), 2, False)):
            def run(m, cache):
                m(tokens[:, :150], past_key_values=cache)
                another = change(cache)  # noqa: B023
                more = tokens[:1, 150:].expand(batch, -1)  # noqa: B023
                return in_parts(m, more, [50] * 3, cache if another is None else another)

            with self.subTest(name):
                self.assertEqual(self.both(run)[0], self.LAYERS * (2 + (0 if outlived else batch)))

    def test_inference_mode(self):
        self.ours.config.quoka = RECOMMENDED | {"chunk": 32}
        tokens, cache = ids(1, 200), Cache()
        with torch.inference_mode():
            got = in_parts(self.ours, tokens, [40] * 5, cache)
            self.assertEqual(len(self.made), self.LAYERS)
            self.assertTrue(torch.equal(got, in_parts(self.ours, tokens, [40] * 5, DynamicCache())))
            for layer in cache.layers:  # unnoticed: no version counts there
                layer.keys.mul_(2)
            if any(state.kept_bytes for layer in cache.layers if layer._states for state in layer._states[1]):  # else: no codes here
                with self.assertRaisesRegex(ValueError, "was appended"):
                    self.ours(tokens, past_key_values=cache)

    def test_other_settings_begin_anew(self):
        # Exact in between: the kept codes of those keys are added afterwards.
        for states, changes in ((5, [{"budget": 10}, {"budget": 1.0}, {"budget": 1}, {"budget": 1, "mode": "paper"}, {"budget": 1, "queries": 99}]),
                                (1, [{"budget": 10}, {"mode": "exact"}, {"budget": 10}, {"budget": 10, "chunk": 20}])):
            def run(m, cache):
                return torch.cat([logits_by(m, part, {"mode": "recommended", "chunk": 75, **change}, past_key_values=cache)
                                  for part, change in zip(ids(1, 375).split(75, 1), changes)], 1)  # noqa: B023

            self.assertEqual(self.both(run)[0], self.LAYERS * states)

    def test_a_batch_with_padding(self):
        self.ours.config.quoka = RECOMMENDED | {"chunk": 64, "decode": True}
        tokens = ids(3, 200)

        def run(m, cache):
            masked = in_parts(m, tokens, [120, 50, 1, 29], cache, mask_of(tokens, 40, 0, 3))
            # Without a mask all keys are seen, those of the masked calls too.
            return torch.cat([masked[:, [119, 169, 170, 199]], m(tokens[:, :60], past_key_values=cache).logits[:, -1:]], 1)

        self.assertEqual(self.both(run)[0], self.LAYERS * 3)

    def test_layers_with_a_window(self):
        for name in ("Gemma2", "Gemma3", "GptOss"):
            with self.subTest(name):
                ours = model(name, **RECOMMENDED, chunk=60, dense_layers=0)
                self.assertEqual(self.both(lambda m, cache: in_parts(m, ids(1, 300), [60] * 5, cache), ours), (2, 10))

    def test_generate(self):
        self.ours.config.quoka = RECOMMENDED | {"chunk": 64, "decode": True}
        alone, batch = ids(1, 40).repeat(1, 3), ids(2, 100)
        for name, tokens, how in (("greedy", batch, {}), ("beams", batch, {"num_beams": 3}),
                                  ("of the prompt, with crop()", alone, {"prompt_lookup_num_tokens": 4, "eos_token_id": 499})):
            def run(m, cache):
                made = m.generate(tokens, attention_mask=torch.ones_like(tokens), past_key_values=cache, do_sample=False,  # noqa: B023
                                  max_new_tokens=30, output_scores=True, return_dict_in_generate=True, **how)  # noqa: B023
                return torch.cat([made.sequences[:, -30:].flatten().float(), *(x.flatten() for x in made.scores)])

            with self.subTest(name), unittest.mock.patch.object(Cache, "crop", autospec=True, side_effect=Cache.crop) as crop:
                made, without = self.both(run)
                self.assertEqual(crop.called, "crop" in name)
                if name != "beams":
                    self.assertEqual(made, self.LAYERS * len(tokens))
                self.assertGreaterEqual(without, made)

    def test_attention_without_an_update(self):
        """Asked twice of the same keys, and of keys that are not the cache's last ones."""
        module, layer = torch.nn.Module(), quoka.transformers._GrowingLayer()
        module.layer_idx = 0
        k, v, q = torch.randn(1, 2, 200, 16), torch.randn(1, 2, 200, 16), torch.randn(1, 4, 50, 16)

        def attend(keys, values):
            return attention_forward(module, q, keys, values, None)[0]

        with settings(**RECOMMENDED, dense_layers=0, chunk=32):
            early = layer.update(k[:, :, :100], v[:, :, :100])
            first = attend(*early)
            late = layer.update(k[:, :, 100:], v[:, :, 100:])
            for pair in (late, late, early, late):
                got = attend(*pair)
                self.assertTrue(torch.equal(got, attend(*(x.clone() for x in pair))))
                self.assertTrue(pair is late or torch.equal(got, first))

    def test_compiled(self):
        tokens = ids(1, 60)
        self.ours.config.quoka = RECOMMENDED | {"chunk": 16}
        compiled, caches = torch.compile(self.ours, backend="aot_eager"), (Cache(), DynamicCache())
        for run, part in zip((self.ours, compiled, self.ours), tokens.split(20, 1)):  # compiled code attends to everything
            got, expected = (run(part, past_key_values=cache).logits for cache in caches)
            self.assertLess(apart(got, expected), 1e-5)


class NotCausal(unittest.TestCase):
    """Masks that show a token what comes behind it: a selection of all keys is exact attention there, too, and one of few keys is
    not made, and says so."""

    TOKENS = 300

    def check(self, make, run, given=({}, PAPER | {"budget": 1.0}, PAPER, PAPER | {"decode": True, "chunk": 32}), warned=1):
        torch.manual_seed(1)
        ours = make().eval()
        theirs = copy.deepcopy(ours)
        ours.set_attn_implementation("quoka"), theirs.set_attn_implementation("sdpa")
        expected = run(theirs)
        self.assertTrue(bool(torch.isfinite(expected).all()))

        def run_ours():
            for one in given:
                with settings(**one):
                    self.assertLess(relatively_apart(run(ours), expected), 1e-5, one)

        self.assertEqual(sum("not causal" in one for one in said(run_ours)), warned)

    def padded(self):
        tokens = ids(2, self.TOKENS)
        return tokens, mask_of(tokens, 70, 0)

    def test_all_tokens_see_all(self):  # as EmbeddingGemma's
        config = Gemma3TextConfig(**SIZES, sliding_window=64, layer_types=["full_attention"] * 4, use_bidirectional_attention=True)
        tokens, seen = self.padded()
        for mask in (torch.ones_like(seen), seen):
            self.check(lambda: transformers.Gemma3TextModel(config),
                       lambda m: m(tokens, attention_mask=mask).last_hidden_state[mask.bool()])  # noqa: B023

    def test_encoders_that_are_padded(self):
        sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
                 "pad_token_id": 0, "max_position_embeddings": 512}
        tokens, seen = self.padded()
        for kind, config in (
                (transformers.BertModel, transformers.BertConfig(**sizes)), (transformers.XLMRobertaModel, transformers.XLMRobertaConfig(**sizes)),
                (transformers.ModernBertModel, transformers.ModernBertConfig(
                    **sizes, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2, global_attn_every_n_layers=1))):
            for mask in (seen, seen.flip(1)):
                with self.subTest(kind.__name__, left=bool(mask[0, -1])):
                    self.check(lambda: kind(config), lambda m: m(tokens, attention_mask=mask).last_hidden_state[mask.bool()])  # noqa: B023

    def test_decoders_beside_a_padded_source(self):
        sizes = {"vocab_size": 500, "d_model": 64, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_layers": 2, "decoder_layers": 2,
                 "encoder_attention_heads": 4, "decoder_attention_heads": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
                 "decoder_start_token_id": 0, "max_position_embeddings": 512}
        given = ({}, PAPER | {"budget": 1.0}, PAPER | {"budget": 1.0, "decode": True, "chunk": 32}, PAPER | {"min_past": 500})
        tokens, seen = self.padded()
        for kind, config in ((transformers.BartModel, transformers.BartConfig), (transformers.MarianModel, transformers.MarianConfig)):
            for length in (1, 20, 300, 400):  # shorter than the source, as long, and longer
                own = ids(2, length, seed=7)
                with self.subTest(kind.__name__, length=length):
                    self.check(lambda: kind(config(**sizes)), lambda m: m(  # noqa: B023
                        tokens, attention_mask=seen, decoder_input_ids=own).last_hidden_state, given)  # noqa: B023

    def test_a_prefix_by_a_mask_of_four_dimensions(self):
        causal = torch.ones(self.TOKENS, self.TOKENS, dtype=torch.bool).tril()
        for rows, columns in ((slice(200), slice(200)), (150, 151), (100, 290)):  # the last: one token sees another, in a chunk or behind it
            mask = causal.clone()
            mask[rows, columns] = True
            self.check(lambda: transformers.LlamaForCausalLM(copy.deepcopy(CONFIGS["Llama"])),
                       lambda m: m(ids(1, self.TOKENS), attention_mask=mask[None, None]).logits)  # noqa: B023
        with settings(**PAPER), watched() as chosen:  # a causal one selects
            ours, tokens = model(), ids(1, self.TOKENS)
            given = ours(tokens, attention_mask=causal[None, None]).logits
            self.assertGreater(len(chosen), 0)
            self.assertLess(apart(given, ours(tokens).logits), 1e-5)

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

    def run_by(self, widths, seen=None, **more):
        """Logits of the last tokens, which come in calls of these widths behind a prompt of 300."""
        ours, tokens = model(**PAPER | more), ids(1 if seen is None else len(seen), 300 + sum(widths))
        return in_parts(ours, tokens, [300, *widths], Cache(config=ours.config), seen)[:, 300:]

    def test_a_short_chunk_is_as_its_tokens(self):
        one_by_one = self.run_by([1] * 63)
        for widths in ([63], [11, 52], [21, 2, 40]):
            self.assertLess(apart(self.run_by(widths), one_by_one), 1e-5, widths)
        self.assertGreater(apart(self.run_by([63], decode=True), one_by_one), 1e-4)  # asked otherwise
        self.assertGreater(apart(self.run_by([63], chunk=63), self.run_by([1] * 63, chunk=63)), 1e-4)
        self.assertGreater(apart(self.run_by([64])[:, :63], one_by_one), 1e-4)  # a chunk of a prompt
        seen = mask_of(ids(2, 330), 40, 0)
        self.assertLess(apart(self.run_by([30], seen), self.run_by([1] * 30, seen)), 1e-5)

    def test_prompt_lookup_gives_the_tokens_of_greedy(self):
        # transformers puts the first draft into the prompt's own call, so the prompt is exact here: min_past.
        for seed in range(4):
            ours, widths = model(**PAPER, min_past=299), []
            tokens = ids(1, 60, seed=seed).repeat(1, 5)
            ours.model.layers[0].register_forward_pre_hook(lambda _, given: widths.append(given[0].shape[1]))  # noqa: B023
            made = [ours.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=40, eos_token_id=499,
                                  past_key_values=Cache(config=ours.config), **how) for how in ({}, {"prompt_lookup_num_tokens": 10})]
            self.assertTrue(torch.equal(*made), seed)
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
            self.assertGreater(apart(alike[:, :20], one_by_one[:, :20]), 1e-4)  # 20 are not fewer: they select
            self.assertLess(apart(self.run_by([20] + [1] * 5, min_queries=21, decode=True), one_by_one), 1e-4)
            self.assertEqual(calls[20:], [20] * 4 + [1] * 20)
            del calls[:]
            ours = model("GptOss")  # sinks, which sdpa does not support
            self.assertTrue(torch.equal(*(logits_by(ours, ids(1, 9), given) for given in (None, {"min_queries": 50}))))
            self.assertEqual(calls, [])


class Seen(unittest.TestCase):
    """Settings select, or are refused, or it is said that they do not."""

    def composite(self):
        text = {**SIZES, "layer_types": ["full_attention"] * 4}
        config = transformers.Gemma3Config(text_config=text, vision_config={
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56, "patch_size": 14})
        ours = transformers.Gemma3ForConditionalGeneration(config).eval()
        ours.set_attn_implementation("quoka")
        return ours

    def test_a_composite_model(self):
        ours, tokens, given = self.composite(), ids(1, 300), {"mode": "paper", "budget": 10}
        exact = ours(tokens).logits
        with self.assertRaisesRegex(ValueError, "nonsense"):
            ours.config.quoka = {"mode": "nonsense"}
        self.assertFalse(hasattr(ours.config, "quoka"))
        with watched() as chosen:
            self.assertGreater(apart(logits_by(ours, tokens, dict(given)), exact), 1e-4)
        self.assertEqual({c.layer for c in chosen}, {1, 2, 3})
        ours.config.quoka["mode"] = "best"  # where it is used, at the latest
        with self.assertRaisesRegex(ValueError, "best"):
            ours(tokens)
        self.assertTrue(torch.equal(logits_by(ours, tokens, None), exact))
        ours.config.text_config.quoka = given
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
        ours, tokens = model(), ids(1, 300)

        def run(by=lambda target: target()):
            """Logits by a thread, and what it said of scopes."""
            result = []

            def target():
                with torch.no_grad():
                    result.append(ours(tokens).logits)

            def in_a_thread():
                thread = threading.Thread(target=by, args=[target])
                thread.start(), thread.join()

            warned = [one for one in said(in_a_thread) if "does not hold" in one]
            return result[0], warned

        exact, warned = run()
        self.assertEqual(warned, [])
        with settings(mode="paper", budget=10):
            got, warned = run()
            self.assertTrue(torch.equal(got, exact))
            self.assertRegex(*warned, "settings.*copy_context")
            got, warned = run(contextvars.copy_context().run)
            self.assertFalse(torch.equal(got, exact))
            self.assertEqual(warned, [])
        self.assertEqual(run()[1], [])
        ours.config.quoka = {"mode": "paper", "budget": 10}
        with watched() as chosen:
            self.assertRegex(run()[1][0], "watched")
            self.assertEqual(chosen, [])
            run(contextvars.copy_context().run)
            self.assertGreater(len(chosen), 0)

    def test_attention_weights_are_missed(self):
        self.assertRegex(*said(lambda: model()(ids(1, 20), output_attentions=True)), "output_attentions.*eager")


class Compiled(unittest.TestCase):
    def setUp(self):
        torch._dynamo.reset()
        self.addCleanup(torch._dynamo.reset)

    def decode(self, implementation, scope=contextlib.nullcontext, config=None, padded=False, cache=DynamicCache):
        """A prompt and 12 tokens: logits, and how many graphs were compiled of each call."""
        torch._dynamo.reset()
        ours, graphs, tokens = model("Llama", implementation, **(config or {})), [], ids(2, 52)

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        compiled, seen = torch.compile(ours, backend=backend, fullgraph=True), mask_of(tokens, 7, 0)

        def scoped(*args, **named):
            with scope():
                return compiled(*args, **named)

        logits = in_parts(scoped, tokens, [40] + [1] * 12, cache(config=ours.config), seen if padded else None)
        return logits[seen.bool() if padded else slice(None)], len(graphs)

    def test_a_decode_loop_is_as_few_graphs_as_of_sdpa(self):
        for padded in (False, True):
            expected, graphs = self.decode("sdpa", padded=padded)
            for how in ({}, {"config": {"mode": "exact", "threads": 1}}, {"cache": Cache}, {"scope": lambda: settings(arithmetic="float")}):
                with self.subTest(padded=padded, how=list(how)):
                    got, ours = self.decode("quoka", padded=padded, **how)
                    self.assertLess(relatively_apart(got, expected), 1e-4)
                    self.assertLessEqual(ours, graphs)

    def test_other_settings_compile_anew(self):
        ours = model()
        with unittest.mock.patch.object(quoka.torch._core, "attention", side_effect=quoka.torch._core.attention) as attention:
            compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
            for config in (None, {"arithmetic": "float"}, Settings(arithmetic="int8")):
                ours.config.quoka = config
                compiled(ids(1, 20), use_cache=False)
            with settings(arithmetic="bf16"):
                compiled(ids(1, 20), use_cache=False)
        self.assertEqual([call.kwargs["arithmetic"] for call in attention.mock_calls[::4]], ["automatic", "float", "int8", "bf16"])

    def test_it_says_that_it_does_not_select(self):
        ours, tokens = model(**PAPER), ids(1, 200)
        quoka.transformers._warned.clear()
        with self.assertWarnsRegex(UserWarning, "selects nothing"):
            got = torch.compile(ours, backend="aot_eager", fullgraph=True)(tokens, use_cache=False).logits
        self.assertLess(apart(got, logits_by(ours, tokens, None)), 1e-5)

    def test_export(self):
        ours, expected = model(), other_model()

        class Logits(torch.nn.Module):
            def __init__(self, of):
                super().__init__()
                self.of = of

            def forward(self, tokens):
                return self.of(input_ids=tokens, use_cache=False).logits

        for strict in (True, False):
            made = torch.export.export(Logits(ours), (ids(1, 40),), strict=strict).module()
            self.assertLess(apart(made(ids(1, 40, seed=9)), expected(ids(1, 40, seed=9)).logits), 1e-4)


if __name__ == "__main__":
    unittest.main()
