"""The rules for Markdown pages, which `bench/tables.py --check` applies.

Relative links lead to a file, and to a heading where they name one. Every JSON file and picture in
bench/results/ is named by a page or by a function that makes a table or a picture. Every table is shown somewhere.
"""

import fnmatch
import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parent.parent
SKIPPED = ("build*", "models", ".git", "node_modules")


def all_pages():
    found = []
    for path in ROOT.rglob("*.md"):
        parts = path.relative_to(ROOT).parts
        if not any(fnmatch.fnmatch(part, skipped) for part in parts[:-1] for skipped in SKIPPED):
            found.append(path)
    return sorted(found)


def without_code(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(text):
    """The anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", without_code(text), flags=re.MULTILINE):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        base = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        anchor, count = base, 0
        while anchor in found:
            count += 1
            anchor = f"{base}-{count}"
        found.add(anchor)
    return found


def broken_links(texts):
    for page, text in texts.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_code(text))):
            if re.match(r"[a-z]+:", target):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists():
                yield f"{page}: no file {target}"
            elif anchor and file.suffix == ".md" and anchor not in anchors(texts.get(file) or file.read_text()):
                yield f"{page}: no heading {target}"


def unnamed_results(texts, results):
    """JSON files and pictures that nothing mentions. A page may name several by *."""
    sources = list(texts.values()) + [(ROOT / "bench" / name).read_text() for name in ("tables.py", "plot.py", "overview.py", "ruler_results.py")]
    names = {name for name in re.findall(r"[\w.*\-]+", "\n".join(sources)) if len(name.partition("*")[0]) > 4}
    for file in sorted([*results.glob("*.json"), *results.glob("*.png"), *results.glob("*.svg")]):
        if not any(fnmatch.fnmatch(file.name, name) or fnmatch.fnmatch(file.stem, name) for name in names):
            yield f"{file}: no page and no table names it"


def faults(texts, results, tables):
    pages = {path: text for path, text in texts.items() if path.suffix == ".md"}
    wrong = [*broken_links(pages), *unnamed_results(pages, results)]
    shown = set(re.findall(r"<!-- table: (\S+) -->", "\n".join(pages.values())))
    wrong += [f"bench/tables.py: no page shows the table {name}" for name in tables if name not in shown]
    return wrong
