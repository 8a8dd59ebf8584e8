#!/usr/bin/env python3
"""What users of the library depend on, compared with what is written in public.txt beside this file.

    check.py                        fails if a public declaration was taken away, changed or added
    check.py --write                writes public.txt
    check.py --against FILE         compares with another public.txt; returns 3 if something was taken away or changed
    check.py --library FILE NM      fails if a function of the compiled library lacks the version in its name

Public is what .cmake/docs/public_names.py says: names, parameters, members in their order, with defaults. Names of
quoka::compiled carry the version, so that a program and a library of different versions do not link; within a patch
release .github/release.sh compares both libraries by abidiff, too.
"""
import difflib
import os
import pathlib
import re
import subprocess
import sys

SOURCE = pathlib.Path(__file__).resolve().parents[2]
WRITTEN = pathlib.Path(__file__).with_name("public.txt")
COMMAND = "python3 tests/abi/check.py --write"
NOT_PUBLIC = re.compile(r"^(kernels|matrix|simd|select/steps|select/sketch|packing/(?!byte_formats|format_table))|_impl\.hpp$")
sys.path.insert(0, str(SOURCE / ".cmake/docs"))
sys.dont_write_bytecode = True


def declarations(path):
    """The header's public declarations, one a line; members stand below their type, indented."""
    from public_names import Header
    text = re.sub(r"/\*\*.*?\*/", "", Header(path).result(), flags=re.S)
    text = "\n".join(re.sub(r"\s*///.*", "", line) for line in text.split("\n"))
    text = re.sub(r"\b(inline|QUOKA_INLINE|QUOKA_FUNC) ", "", re.sub(r"\s+", " ", text))
    found, line, depth, round_ = [], "", 0, 0
    for at, c in enumerate(text):
        line += c
        round_ += (c in "([") - (c in ")]")
        bare = line.strip()
        opens = c == "{" and round_ == 0 and re.match(r"(template .*)?(class|struct|union|namespace)\b[^=]*$", bare[:-1])
        if opens or round_ == 0 and (c == ";" or c == ":" and bare in ("public:", "private:", "protected:")):
            if line.count("{") - bool(opens) == line.count("}") and not bare.startswith("namespace"):
                found.append("  " * depth + re.sub(r" ([;,)])", r"\1", bare))
                line = ""
            elif bare.startswith("namespace"):
                line = ""
            if opens and line == "":
                depth += not bare.startswith("namespace")
        elif c == "}" and round_ == 0 and line.count("{") < line.count("}"):
            depth, line = max(depth - 1, 0), ""
    return [re.sub(r" try;$", ";", entry) for entry in found
            if not re.match(r"(;|public:|private:|protected:|catch \(.*)$", entry.strip())]


def public():
    root, lines = SOURCE / "include/quoka", []
    for path in sorted(root.rglob("*.hpp")):
        name = str(path.relative_to(root))
        if not NOT_PUBLIC.search(name):
            found = declarations(path)
            lines += [f"# {name}", *found] if found else []
    if len(lines) < 500:
        sys.exit(f"check.py: only {len(lines)} public declarations were found: the headers are no longer read")
    return lines


def compare(old, new):
    """Lines that differ, each below its header and type, and whether one was taken away or changed."""
    report, broken = [], False
    for group in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if group[0] == "equal":
            continue
        _, first, last, begin, end = group
        place = [line for line in old[:first] if line.startswith("#")][-1:] or ["#"]
        report += [place[0], *(f"- {line}" for line in old[first:last]), *(f"+ {line}" for line in new[begin:end])]
        broken = broken or last > first
    return report, broken


def check_library(path, nm):
    version = ".".join(re.findall(r"^#define QUOKA_VERSION_(?:MAJOR|MINOR|PATCH) +(\d+)",
                                  (SOURCE / "include/quoka/base/version.hpp").read_text(encoding="utf-8"), re.M))
    tag = f"v{version.replace('.', '_')}_compiled"
    symbols = subprocess.run([nm, "--defined-only", "--format=posix", path], capture_output=True, text=True, check=True)
    names = [line.split()[0] for line in symbols.stdout.splitlines() if re.match(r"\S+ [TDBR] ", line)]
    unversioned = [name for name in names if f"5quoka{len(tag)}{tag}" not in name]
    if len(names) < 50 or unversioned:
        sys.exit(f"{path}: of {len(names)} names that programs may link, these are not in quoka::{tag}: {unversioned}")
    print(f"{len(names)} names, all in quoka::{tag}")


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == ["--library"] and len(arguments) == 3:
        return check_library(*arguments[1:])
    if arguments[:1] == ["--against"] and len(arguments) == 2:
        report, broken = compare(pathlib.Path(arguments[1]).read_text(encoding="utf-8").splitlines(), public())
        print("\n".join(report))
        sys.exit(3 if broken else 0)
    new = public()
    if arguments == ["--write"]:
        WRITTEN.write_text("\n".join(new) + "\n", encoding="utf-8")
        return print(f"{os.path.relpath(WRITTEN)}: {len(new)} lines")
    if arguments:
        sys.exit(f"check.py: unknown arguments {arguments}")
    report, broken = compare(WRITTEN.read_text(encoding="utf-8").splitlines(), new)
    if report:
        what = ("Something public was taken away or changed. That is a break: .github/CONTRIBUTING.md says what it costs, "
                "and .github/CHANGELOG.md should name it." if broken else "Something public was added.")
        sys.exit("\n".join(report) + f"\n\n{what} If it is meant, write the list anew:\n    {COMMAND}")
    print(f"{len(new)} lines of public declarations are as written")


if __name__ == "__main__":
    main()
