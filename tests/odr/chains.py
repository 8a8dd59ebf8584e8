#!/usr/bin/env python3
"""chains.py INCLUDE: which headers can be compiled alone in one unit. Reads their names, such as quoka/rows/rows.hpp, on
stdin; each line of its output is one unit, headers in the order in which it includes them.

A header that follows one which it includes anyway, at its top and without a condition, is as good
as alone: the text before its own first line is the same. So a unit is a chain, each header of which
includes the one before it, and costs as much as its last. The chains cover all headers, and their
last headers have the least text to read.
"""
import pathlib
import re
import sys

INCLUDE = re.compile(r"#\s*include\s*<(quoka/[^>]+)>")


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
    root = pathlib.Path(sys.argv[1])
    wanted = sys.stdin.read().split()
    headers = {str(path.relative_to(root)): Header(path) for path in root.glob("quoka/**/*.hpp")}
    for chain in chains(headers, wanted):
        print(" ".join(chain))


if __name__ == "__main__":
    main()
