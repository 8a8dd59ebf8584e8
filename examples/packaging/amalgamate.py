#!/usr/bin/env python3
"""amalgamate.py [-o FILE] [--include DIR] [HEADER...]: the library as one header.

    python3 examples/packaging/amalgamate.py -o quoka.hpp                     # quoka.hpp and rows/tensor.hpp
    python3 examples/packaging/amalgamate.py -o quoka.hpp select/stages.hpp   # and Algorithm 1 step by step

Each HEADER is one of include/quoka, besides those two. The result needs Eigen alone, and is the same for the same headers.

Every header stands where it is first included, once. A header that only some instruction sets
include stays inside its #if; its own includes are written before that #if, so that all have them.
"""
import argparse
import pathlib
import re
import sys

ALWAYS = ["quoka.hpp", "rows/tensor.hpp"]
DIRECTIVE = re.compile(r"\s*#\s*(\w+)")
OWN = re.compile(r"#include <quoka/([\w./]+)>\s*(//.*)?$")
OTHER = re.compile(r"#include (<[\w./]+>)\s*(//.*)?$")
NAMED_BY_A_MACRO = "#include QUOKA_EMULATED_TILES"  # a header of the tests, which names it
REFUSAL = '#include "stopped by the error above"'  # base/abi.hpp: names no file on purpose
# They hold: the result refuses QUOKA_COMPILED.
HEADER_ONLY = {"#if !defined(QUOKA_COMPILED)", "#if QUOKA_DEFINES", "#if QUOKA_DEFINES_KERNELS"}


class Amalgamation:
    def __init__(self, root):
        self.root, self.lines = root, {}
        self.out, self.written, self.for_all = [], set(), set()

    def read(self, name):
        """The header's lines, each with whether it is in a condition."""
        if name not in self.lines:
            path = self.root / name
            if not path.is_file():
                sys.exit(f"amalgamate.py: no header {path}")
            lines, conditions = [], []
            for line in path.read_text(encoding="utf-8").splitlines():
                directive = DIRECTIVE.match(line)
                word = directive[1] if directive else ""
                if word == "endif":
                    conditions.pop()
                lines.append((line, any(conditions)))
                if word.startswith("if"):
                    conditions.append(line.strip() not in HEADER_ONLY)
                elif word in ("else", "elif"):
                    conditions[-1] = True
            self.lines[name] = lines
        return self.lines[name]

    def includes(self, name, in_condition):
        return [OWN.match(line)[1] for line, inside in self.read(name) if OWN.match(line) and inside == in_condition]

    def reach(self, name):
        """All that is included without a condition, by a header that is or is not: that must compile everywhere."""
        for included in self.includes(name, False):
            if included not in self.for_all:
                self.for_all.add(included)
                self.reach(included)
        for included in self.includes(name, True):
            self.reach(included)

    def write(self, name, in_condition=False):
        if name in self.written:
            if in_condition:
                sys.exit(f"amalgamate.py: {name} is included in two conditions: there is no one place for it")
            return
        self.written.add(name)
        for included in self.includes(name, True):
            if included not in self.for_all:
                for shared in self.includes(included, False):
                    self.write(shared)
        self.out += ["", f"// ---- quoka/{name}"]
        for line, inside in self.read(name):
            own, other = OWN.match(line), OTHER.match(line)
            if own:
                if own[1] in self.for_all:
                    self.write(own[1])
                else:
                    self.write(own[1], in_condition=True)
            elif other:
                if other[1] not in self.written:
                    if not inside and not in_condition:
                        self.written.add(other[1])
                    self.out.append(line)
            elif line.startswith("#include") and line not in (REFUSAL, NAMED_BY_A_MACRO):
                sys.exit(f"amalgamate.py: {name} has an include of an unknown form: {line}")
            elif line != "#pragma once":
                self.out.append(line)

    def whole(self, headers, version):
        names = ", ".join(headers)
        self.out = [f"// QuoKA {version} in one header, written by examples/packaging/amalgamate.py from: {names}.",
                    "// Copyright 2026 The QuoKA C++ authors. SPDX-License-Identifier: Apache-2.0",
                    "#pragma once", "",
                    "#if defined(QUOKA_COMPILED)",
                    '#error "quoka in one header is header-only: compile without QUOKA_COMPILED"',
                    "#elif defined(QUOKA_VERSION_MAJOR)",
                    '#error "quoka is here twice: include the one header, or those in quoka/, not both"',
                    "#endif"]
        self.for_all.update(headers)
        for header in headers:
            self.reach(header)
        for header in headers:
            self.write(header)
        text = "\n".join(self.out) + "\n"
        return re.sub(r"\n{3,}", "\n\n", text)


def version_of(root):
    text = (root / "base/version.hpp").read_text(encoding="utf-8")
    parts = [re.search(rf"^#define QUOKA_VERSION_{part} +(\d+)", text, re.M) for part in ("MAJOR", "MINOR", "PATCH")]
    if None in parts:
        sys.exit(f"amalgamate.py: no version in {root}/base/version.hpp")
    return ".".join(part[1] for part in parts)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", metavar="FILE", help="where to; standard output otherwise")
    parser.add_argument("--include", metavar="DIR", type=pathlib.Path,
                        default=pathlib.Path(__file__).resolve().parents[2] / "include")
    parser.add_argument("headers", metavar="HEADER", nargs="*")
    arguments = parser.parse_args()
    root = arguments.include / "quoka"
    headers = list(dict.fromkeys(ALWAYS + arguments.headers))
    text = Amalgamation(root).whole(headers, version_of(root))
    if arguments.o:
        pathlib.Path(arguments.o).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
