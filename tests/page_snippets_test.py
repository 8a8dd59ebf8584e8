#!/usr/bin/env python3
"""page_snippets_test.py CXX EIGEN WORK: the blocks of C++ and of C in examples/README.md compile, as an engine takes them over that has what
their comments name: the first two blocks one after the other, each of the others behind them."""
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
CXX, EIGEN, WORK = sys.argv[1:]

CPP = """#include <quoka/quoka.hpp>
std::vector<float> queries, result;
std::vector<std::uint16_t> k_cache, v_cache, k_pool, v_pool;
std::vector<std::int32_t> block_table;
quoka::Index q_len, q_heads, kv_heads, head_dim, tokens, capacity, pages, kv_len;
std::uint64_t id;
quoka::ThreadPool threads(1);
void engine() {
%s
}
"""
C = """#include <quoka/c.h>
#include <stdio.h>
void engine(float* queries, uint16_t* k_cache, uint16_t* v_cache, float* result, int64_t q_len, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
            int64_t tokens, quoka_workspace* workspace, quoka_threads* threads, quoka_selection* selection);
void engine(float* queries, uint16_t* k_cache, uint16_t* v_cache, float* result, int64_t q_len, int64_t q_heads, int64_t kv_heads, int64_t head_dim,
            int64_t tokens, quoka_workspace* workspace, quoka_threads* threads, quoka_selection* selection) {
%s
}
"""


def compile_blocks(language, count, program, *flags):
    blocks = re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "examples/README.md").read_text(), re.MULTILINE | re.DOTALL)
    if len(blocks) != count:
        sys.exit(f"examples/README.md has {len(blocks)} blocks of {language}, not {count}")
    source = pathlib.Path(WORK) / f"page_snippets.{language}"
    source.write_text(program % "".join([*blocks[:2], *(f"{{\n{block}}}\n" for block in blocks[2:])]))
    subprocess.run([CXX, *flags, f"-I{ROOT / 'include'}", "-fsyntax-only", str(source)], check=True)


compile_blocks("cpp", 5, CPP, "-std=c++20", "-DQUOKA_COMPILED", "-isystem", EIGEN)
compile_blocks("c", 2, C, "-x", "c", "-std=c99", "-Wall", "-Wextra", "-Werror")
