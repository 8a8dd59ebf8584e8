#!/usr/bin/env python3
"""A novel of Jane Austen's (public domain) as plain text, a paragraph a line, without headings.

    novel.py r-cran-janeaustenr_1.0.0-1_all.deb emma --out emma.txt

Debian's package r-cran-janeaustenr has six of them, from Project Gutenberg, as R stores lists of strings: blocks of
zlib, and in them each line of a book behind its length. dpkg-deb unpacks the package; R is not needed.
"""

import argparse
import pathlib
import re
import struct
import subprocess
import sys
import tempfile
import zlib

TITLES = {
    "emma": "EMMA",
    "mansfield": "MANSFIELD PARK",
    "northanger": "NORTHANGER ABBEY",
    "persuasion": "Persuasion",
    "pride": "PRIDE AND PREJUDICE",
    "sense": "SENSE AND SENSIBILITY",
}
STRING = re.compile(rb"\x00[\x00\x04\x08\x40]\x00\x09")  # flags of R's CHARSXP, before a length and the bytes


def lists_of_strings(stored):
    """The contents of each block of a lazy-load database."""
    at = 0
    while at < len(stored):
        block = zlib.decompressobj()
        text = block.decompress(stored[at + 4:])
        at = len(stored) - len(block.unused_data)
        lines, place = [], 0
        while found := STRING.search(text, place):
            (length,) = struct.unpack(">i", text[found.end():found.end() + 4])
            place = found.end() + 4 + max(length, 0)
            lines.append(text[found.end() + 4:place].decode("utf-8"))
        yield lines


def paragraphs(lines):
    """Joined lines; headings, which are short and have no full stop, and what stands before the first chapter left out."""
    first = next(i for i, line in enumerate(lines) if re.fullmatch(r"(CHAPTER|Chapter) (1|I)\.?", line.strip()))
    for part in "\n".join(lines[first:]).split("\n\n"):
        joined = " ".join(part.split())
        if len(joined) > 40 or joined.endswith((".", "!", "?", '"')):
            if not re.match(r"(CHAPTER|Chapter|VOLUME|FINIS|THE END)\b", joined):
                yield joined


def main():
    parse = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parse.add_argument("package", type=pathlib.Path)
    parse.add_argument("novel", choices=TITLES)
    parse.add_argument("--out", type=pathlib.Path, required=True)
    flags = parse.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", flags.package, folder], check=True)
        stored = (pathlib.Path(folder) / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    for lines in lists_of_strings(stored):
        if lines and lines[0] == TITLES[flags.novel]:
            flags.out.write_text("".join(one + "\n" for one in paragraphs(lines)))
            return
    sys.exit(f"novel.py: {flags.package} has no {flags.novel}")


if __name__ == "__main__":
    main()
