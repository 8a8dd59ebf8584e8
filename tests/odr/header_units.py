#!/usr/bin/env python3
"""header_units.py INCLUDE TO: units in the folder TO by which every header is compiled alone. Prints their paths, each ending in ;

A header that follows one which it includes anyway, at its top and without a condition, is as good
as alone: the text before its own first line is the same. So a unit is a chain, each header of which
includes the one before it, and costs as much as its last. The chains cover all headers, and their
last headers have the least text to read. One unit more includes all of them, so that each is in two, and one has main().
"""
import pathlib
import re
import sys

INCLUDE = re.compile(r"#\s*include\s*<(quoka/[^>]+)>")
OTHER_ISA = re.compile(r"simd/isa/(avx|sse|neon)")  # one of them fits the flags: isa.hpp


class Header:
    def __init__(self, path):
        self.all, self.at_top = [], []  # what it includes; and of that, what always comes before its first line
        depth, own_line = 0, False
        text = path.read_text()
        self.size = len(text)
        for line in map(str.strip, text.splitlines()):
            include = INCLUDE.match(line)
            if include:
                self.all.append(include[1])
                if depth == 0 and not own_line:
                    self.at_top.append(include[1])
            elif re.match(r"#\s*if", line):
                depth += 1
            elif re.match(r"#\s*endif", line):
                depth -= 1
            elif line and not line.startswith(("#", "//")):
                own_line = True


def reached(headers, start, edges):
    """The headers that `start` includes along `edges`, itself among them."""
    seen, todo = set(), [start]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += edges(headers[name])
    return seen


def chains(headers, wanted):
    whole = {name: reached(headers, name, lambda header: header.all) for name in wanted}
    before = {name: reached(headers, name, lambda header: header.at_top) for name in wanted}
    cost = {name: sum(headers[read].size for read in whole[name]) for name in wanted}
    # A header that its own includes read in turn would not be alone after them.
    followers = {name: [after for after in wanted if name in before[after] and after not in whole[name]] for name in wanted}
    follows = {}

    def find_follower(name, tried):
        for after in followers[name]:
            if after not in tried:
                tried.add(after)
                if after not in follows or find_follower(follows[after], tried):
                    follows[after] = name
                    return True
        return False

    last = [name for name in sorted(wanted, key=lambda name: (-cost[name], name)) if not find_follower(name, set())]
    for name in last:
        chain = [name]
        while chain[-1] in follows:
            chain.append(follows[chain[-1]])
        yield chain[::-1]


def main():
    root, to = map(pathlib.Path, sys.argv[1:])
    headers = {str(path.relative_to(root)): Header(path) for path in root.glob("quoka/**/*.hpp")}
    wanted = sorted(name for name in headers if not OTHER_ISA.search(name))
    alone = list(chains(headers, wanted))
    assert sorted(name for chain in alone for name in chain) == wanted, "headers were left out, or named twice"
    units = {chain[-1].replace("/", "."): chain for chain in alone}
    units["all"] = [name for name in wanted if "simd/isa/plain" not in name]  # not beside another ISA
    texts = {name: "".join(f"#include <{header}>\n" for header in unit) for name, unit in units.items()}
    texts = {name: f"{text}// and again: the guards\n{text}" for name, text in texts.items()} | {"main": "int main() {}\n"}
    to.mkdir(exist_ok=True)
    for name, text in texts.items():
        unit = to / f"{name}.cpp"
        if not unit.exists() or unit.read_text() != text:
            unit.write_text(text)
        print(unit, end=";")


if __name__ == "__main__":
    main()
