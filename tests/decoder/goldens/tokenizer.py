#!/usr/bin/env python3
"""Writes tokenizer.json: two small vocabularies and what llama.cpp makes of some texts with them.

    tokenizer.py models/llama.cpp-v0.5.0      which examples/decoder/get_tinyllama.sh makes

The vocabularies are trained here, over the texts below and without splitting them into words first: their tokens cross
every border, so that a text split at a wrong place, or merged in a wrong order, becomes other tokens. Each is written as
a GGUF file, which llama.cpp reads; tokenizer_test.cpp makes the same file from the JSON.
"""
import collections
import json
import os
import pathlib
import struct
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[2] / "examples" / "decoder"))
import llama_cpp  # noqa: E402

TEXTS = [
    "", " ", "a", "Hello, world!", "hello hello  hello", " hello", "Hello   world \n\n next   ",
    "I'm sure you'll say it's ours; WE'RE not, THEY'VE 'S 'LL 'x don't'd.",
    "\n", "\n\n\n", " \n \n", "\r\n\r\n x", "\t\ttab\tand  spaces   \t mixed \n\t\n end ",
    "1 12 123 1234 12345 1234567 3.14159 1,000,000 2^10 x86 v1.2.3", "١٢٣٤٥ ४५६७ Ⅻ ½ ²³",
    "for (int i = 0; i < 100; ++i) {\n    sum += a[i] * b[i];  // dot\n}\n",
    "def f(x):\n    return x ** 2 if x > 0 else -x\n\n\nprint(f(3))",
    "...!!!??? --- ___ ### $$$ <<>> [[]] {{}} ~~~ ``` || && @@ %% ^^ == != <= =>\n\n* item\n",
    "Crème brûlée, naïve façade, Ångström, Żółć, Straße", "Cafe\u0301 e\u0301te\u0301 n\u0303",
    "Привет, мир! Съешь ещё этих мягких булок.", "Καλημέρα κόσμε, τι κάνεις;",
    "مرحبا بالعالم، كيف حالك؟", "שלום עולם", "नमस्ते दुनिया, आप कैसे हैं?", "สวัสดีชาวโลก",
    "你好，世界！今天天气很好。", "こんにちは世界。カタカナとひらがな。", "안녕하세요 세계, 잘 지내세요?",
    "👋🌍 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 x👍y 🇩🇪", "ℝ ∑ ∫ ≤ ≠ → ← ↔ ∞ α≈β", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀𒁀",
    "non\u00a0breaking\u2003em\u3000wide\u2028line\u0085next\u180emongol\u200bzero", "\ufeffbom",
    "▁a ▁ b", "mixed中文and日本語text한국어with123数字", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "                                 x", "<s> </s> <unk> <0x0A> <|end|> <|im_start|>user",
    "a<|end|>b<|end|> c <tool>call</tool><|end|>\n<|end|>", "<|end|><|end|>!", "<tool> x<tool>",
    "\u0000\u0001\u007f control", "Zażółć gęślą jaźń; Příliš žluťoučký kůň; Pchnąć w tę łódź",
    "The quick brown fox jumps over the lazy dog. The dog, being lazy, did not jump back.",
]
SPECIALS = ["<|end|>", "<|im_start|>", "<|end|>!"]  # control tokens; <tool> is user-defined
# No merges lead to a special token.
TRAINING = [text for text in TEXTS if "<s>" not in text and "|>" not in text and "<tool>" not in text]


# ---- training ----------------------------------------------------------------------------------


def most_frequent_pairs(rows, count):
    """Byte-pair training: the pairs in the order in which they are merged."""
    pairs = []
    for _ in range(count):
        seen = collections.Counter(p for row in rows for p in zip(row, row[1:]))
        best, times = min(seen.items(), key=lambda item: (-item[1], item[0]))
        if times < 2:
            break
        pairs.append(best)
        for row in rows:
            i = 0
            while i + 1 < len(row):
                if (row[i], row[i + 1]) == best:
                    row[i:i + 2] = [row[i] + row[i + 1]]
                i += 1
    return pairs


def byte_alphabet():
    shown = [b for b in range(256) if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE]
    hidden = [b for b in range(256) if b not in shown]
    return {**{b: chr(b) for b in shown}, **{b: chr(256 + i) for i, b in enumerate(hidden)}}


def sentence_piece_vocabulary():
    tokens, types = ["<unk>", "<s>", "</s>"], [2, 3, 3]
    tokens += ["<0x%02X>" % b for b in range(256)]
    types += [6] * 256
    tokens += SPECIALS + ["<tool>"]
    types += [3] * len(SPECIALS) + [4]
    scores = [0.0] * len(tokens)
    rows = [list(t.replace(" ", "▁")) for t in TRAINING]
    common = collections.Counter(c for row in rows for c in row)
    pairs = most_frequent_pairs(rows, 300)
    # Merges come in steps of equal score, so that ties occur; the step of one in five is moved up,
    # so that a merge may be better than those it is made of.
    merged = {}
    for i, (left, right) in enumerate(pairs):
        merged.setdefault(left + right, -float(i // 4) + (25.0 if i % 5 == 4 else 0.0))
    for text, score in merged.items():
        tokens.append(text)
        scores.append(score)
    for char in sorted(common, key=lambda c: (-common[c], c)):
        if common[char] >= 2 and char not in merged and char != "\n":  # the others are bytes
            tokens.append(char)
            scores.append(-1000.0)
    types += [1] * (len(tokens) - len(types))
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores, "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0}


def byte_pair_vocabulary():
    alphabet = byte_alphabet()
    rows = [[alphabet[b] for b in t.encode()] for t in TRAINING]
    pairs = most_frequent_pairs(rows, 400)
    tokens = [alphabet[b] for b in range(256)]
    for left, right in pairs:
        if left + right not in tokens:
            tokens.append(left + right)
    # Words that no merges lead to.
    for word in [" hello", "Hello", "123", "\n\n\n", "'re", "世界", "jump"]:
        spelled = "".join(alphabet[b] for b in word.encode())
        if spelled not in tokens:
            tokens.append(spelled)
    types = [1] * len(tokens)
    tokens += ["<s>", "</s>"] + SPECIALS + ["<tool>"]
    types += [3] * (2 + len(SPECIALS)) + [4]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": [left + " " + right for left, right in pairs],
            "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
            "tokenizer.ggml.eos_token_id": tokens.index("</s>")}


# ---- GGUF --------------------------------------------------------------------------------------


def gguf_string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def gguf_value(value):
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    kind, letter = {str: (8, ""), int: (5, "i"), float: (6, "f")}[type(value[0])]
    head = struct.pack("<IIQ", 9, kind, len(value))
    if letter:
        return head + struct.pack("<%d%s" % (len(value), letter), *value)
    return head + b"".join(map(gguf_string, value))


def write_gguf(path, keys):
    with open(path, "wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, len(keys)))
        for key, value in keys.items():
            file.write(gguf_string(key) + gguf_value(value))


# ---- what llama.cpp says ---------------------------------------------------------------------------


def cases(library):
    variants = [(sentence_piece_vocabulary(), [{}, {"tokenizer.ggml.add_space_prefix": False}]),
                (byte_pair_vocabulary(), [{"tokenizer.ggml.pre": pre} for pre in (
                    "llama-bpe", "smaug-bpe", "qwen2", "gpt-2", "smollm", "default")])]
    for vocabulary, changes in variants:
        for change in changes:
            for parse_special in (False, True):
                with tempfile.TemporaryDirectory() as folder:
                    path = os.path.join(folder, "vocabulary.gguf")
                    write_gguf(path, {"general.architecture": "llama", **vocabulary, **change})
                    reference = llama_cpp.Model(library, path, vocab_only=True)
                    ids = [reference.tokenize(t, True, parse_special) for t in TEXTS]
                yield {"vocabulary": vocabulary["tokenizer.ggml.model"], "keys": change,
                       "parse_special": parse_special, "ids": ids}


def main():
    library = llama_cpp.LlamaCpp(sys.argv[1])
    golden = {"vocabularies": [sentence_piece_vocabulary(), byte_pair_vocabulary()],
              "texts": TEXTS, "cases": list(cases(library))}
    # One line for each list, which keeps differences readable.
    text = json.dumps(golden, ensure_ascii=True, separators=(",", ":"))
    text = text.replace("],[", "],\n[").replace('},{"', '},\n{"').replace(',"tok', ',\n"tok')
    (HERE / "tokenizer.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
