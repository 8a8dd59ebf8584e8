#!/usr/bin/env python3
"""public_names.py HEADER: the header as Doxygen reads it. Prints the public declarations, with their comments.

What is public: include/quoka/README.md, "Public and detail". Dropped: function bodies, private parts, preprocessor
lines, the inline namespace, quoka::detail and its like, a State's members other than truncate, bytes and kept_bytes,
in quoka::formats all but the row types, whose members format_table.hpp lists, and without a comment what is deleted,
defaulted or a destructor. The type that a header is named after has the header's first comment, if none of its own.
Comments are plain `//` in the headers. Those above a declaration, without a blank line between, become `///`, those
after a member `///<`, the header's first one its `\\file`. Indented lines are shown as they are. Lines keep their numbers.
"""
import pathlib
import re
import sys

# Members that a concept asks for, by folder: they are documented there unless they say more themselves.
CONTRACTS = {
    "select": {
        "Options": "Options of the method.",
        "State": "The data that one sequence carries from call to call: the Selector concept says how it is used.",
        "Scratch": "Memory of one worker.",
        "truncate": "The State after the cache was cut to its first kv_len keys.",
        "bytes": "All its memory, in bytes.",
        "kept_bytes": "The part of them that grows with the cache, in bytes.",
        "reserve": "Makes room for a call with this many candidates.",
        "select": "Writes the Selection of `input`: the Selector concept. Throws std::invalid_argument where shapes do not fit.",
        "appended": "Keys were appended to the cache: the Selector concept. A State that remembers keys refuses those of "
                    "another cache by std::invalid_argument.",
        "score": "Writes the scores: the Scorer concept, or EvictionMethod for methods that evict.",
        "choose": "A choice whose size no budget bounds, where a threshold is set; false: the budget counts.",
        "by_threshold": "Is there a threshold in place of the budget?",
        "weighs_logits": "Does the method weigh attention's logits? Then it refuses a call without attention's options.",
        "supports_softcap": "Does it weigh them under a soft-cap, too?",
        "options": "As given.",
        "scorer": "The method's scorer.",
    },
    "runtime": {
        "workers": "Workers that run() has, at least 1.",
        "run": "Runs f(task, worker) for every task in [0, tasks): the Executor concept.",
    },
}
CONTRACTS["methods"] = CONTRACTS["select"]
STATE_MEMBERS = re.compile(r"\b(reserve|truncate|bytes|kept_bytes)\s*\(")
ATTRIBUTE = re.compile(r"\[\[[^\[\]]*\]\]\s*")
NOT_PUBLIC = {"detail", "simd", "tuning", "Eigen", ""}


def escaped(text):
    """Plain text, of which Doxygen shall not make commands, tags or links."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([\\@<>&#%|~*])", r"\\\1", part).replace(r"\*", "&lowast;").replace(r"\~", "&#126;")
                  for part in parts[::2]]
    return "`".join(parts)


class Header:
    def __init__(self, path):
        self.path = path
        self.source = path.read_text()
        self.lines = self.source.split("\n")
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)
        self.comments = {}  # line: (column, text after the slashes)
        self.code = self.mask()
        self.kept = [list(" " * len(line)) for line in self.lines]
        self.spoken = {}  # line: what its comment becomes
        self.about = ""  # what the opening comment documents, if not the file
        self.before = {}  # line: a comment before it
        self.names = 0
        parts = path.parts
        self.below = pathlib.Path(*parts[len(parts) - parts[::-1].index("quoka"):])

    def line_of(self, at):
        low, high = 0, len(self.lines)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.starts[middle] <= at else (low, middle)
        return low

    def mask(self):
        """The source with blanks for comments and preprocessor lines, and for what is inside quotes."""
        code, continued = [], False
        for number, line in enumerate(self.lines):
            if continued or line.lstrip().startswith("#"):
                continued = line.endswith("\\")
                code.append(" " * len(line))
                continue
            masked = re.sub(r'"(\\.|[^"\\])*"|\'(\\.|[^\'\\])\'', lambda m: '"' + "_" * (len(m[0]) - 2) + '"', line)
            column = masked.find("//")
            if column >= 0:
                self.comments[number] = (column, line[column + 2:])
                masked = masked[:column] + " " * (len(line) - column)
            code.append(ATTRIBUTE.sub(lambda m: " " * len(m[0]), masked))
        return "\n".join(code)

    # --- what is kept --------------------------------------------------------------------------------------------

    def keep(self, begin, end):
        for at in range(begin, end):
            if self.code[at] not in " \n":
                line = self.line_of(at)
                column = at - self.starts[line]
                self.kept[line][column] = self.source[at]

    def alone(self, line):
        """Is the line a comment and nothing else?"""
        return line in self.comments and not self.lines[line][:self.comments[line][0]].strip()

    def speak(self, lines, mark):
        if mark == "///<" and len(lines) > 1:  # as one line, whose first sentence is the summary
            self.spoken.update((line, "") for line in lines)
            self.spoken[lines[0]] = mark + " " + " ".join(escaped(self.comments[line][1].strip()) for line in lines)
            return
        for line in lines:
            text = self.comments[line][1]
            self.spoken[line] = (mark + "   " + text.rstrip() if text.startswith("   ") else
                                 mark + escaped(text) if text.strip() else mark)

    def comment_above(self, begin):
        first = last = self.line_of(begin)
        while first > 0 and self.alone(first - 1):
            first -= 1
        return list(range(first, last))

    def comment_after(self, end):
        line = self.line_of(end - 1)
        if line not in self.comments or self.alone(line) or self.code[end:self.starts[line + 1]].strip():
            return []
        column, lines = self.comments[line][0], [line]
        while self.alone(lines[-1] + 1) and self.comments[lines[-1] + 1][0] == column:
            lines.append(lines[-1] + 1)
        return lines

    def document(self, begin, end, name=""):
        after = self.comment_after(end)
        above = [] if after else [n for n in self.comment_above(begin) if n not in self.spoken]
        if after:
            self.speak(after, "///<")
        if above:
            self.speak(above, "///")
        if above or after:
            return
        line = self.line_of(begin)
        stem = self.path.stem.replace("_", "")
        word = re.search(r"\b(class|struct|using)\b", self.blank_angles(self.code[begin:end]))
        if word and name.lower() in (stem, stem + "selector"):  # what the header is about
            self.about = "\\" + word[1].replace("using", "typedef") + " quoka::" + name
        elif name in CONTRACTS.get(self.below.parts[0], {}):
            self.before[line] = f"/** {CONTRACTS[self.below.parts[0]][name]} */"
        elif re.match(r"enum|concept", self.blank_angles(self.code[begin:end])):
            self.before[line] = f"/** \\no_comment_for_{name} */"  # Doxygen 1.9.4 has no warning for it

    # --- statements ----------------------------------------------------------------------------------------------

    def skip(self, at, opening="{", closing="}"):
        depth = 0
        while True:
            depth += (self.code[at] == opening) - (self.code[at] == closing)
            at += 1
            if depth == 0:
                return at

    def blank_angles(self, head):
        """The declaration without its template head."""
        head = head.strip()
        while head.startswith("template"):
            at, depth = head.index("<"), 0
            while True:
                depth += (head[at] == "<") - (head[at] == ">" and head[at - 1] != "-")
                at += 1
                if depth == 0:
                    break
            head = head[at:].strip()
        return head

    def statement(self, at):
        """(kind, name, end of the head, end) of what begins at `at`."""
        begin, depth = at, 0
        while True:
            c = self.code[at]
            depth += (c in "([") - (c in ")]")
            head = self.code[begin:at]
            if c == ";" and depth == 0:
                return "plain", "", at + 1, at + 1
            if c == ":" and depth == 0 and head.strip() in ("public", "private", "protected"):
                return "access", head.strip(), at + 1, at + 1
            if c == "{" and (depth > 0 or re.search(r"\bconcept\b", head)):
                at = self.skip(at)
                continue
            if c == "{":
                bare = self.blank_angles(head)
                space = re.match(r"(?:inline\s+)?namespace\b\s*([\w:]*)", bare)
                if space:
                    return "namespace", space[1], at, at
                type_ = re.match(r"(enum\s+class|enum|class|struct|union)\s+([\w:]+)", bare)
                if type_ and ("(" not in bare or bare.endswith(">")):
                    return type_[1].split()[0], type_[2], at, at
                end = self.skip(at)
                rest = self.code[end:].lstrip()
                if rest[:1] in (",", "{") or re.search(r"\brequires\s*$", head):
                    at = end
                    continue
                flat = re.sub(r"operator\s*\S+?\(", "(", bare)
                while re.search(r"\([^()]*\)", flat):
                    flat = re.sub(r"\([^()]*\)", "", flat)
                if "(" not in bare or re.search(r"[^=<>!]=\s*$", flat):
                    at = end
                    continue
                return "function", "", at, end
            at += 1

    def wanted(self, head, scope, documented):
        bare = self.blank_angles(head)
        if re.match(r"(static_assert|friend\s+(class|struct)|extern|using\s+namespace)\b", bare):
            return False
        if re.match(r"(class|struct|enum|enum class)\s+\w+\s*;?$", bare):  # declared only
            return False
        if re.match(r"[^(=]*\w(<[^()]*>)?::(operator\b|~?\w+\s*\()", bare) and not bare.startswith("using"):
            return False  # the definition of a member: documented where it is declared
        if re.match(r"[^()]*\w_\b", bare) and "(" not in bare and not bare.startswith("using"):
            return False  # a name that ends so is a class's own
        if scope in ("State", "Scratch") and not STATE_MEMBERS.search(bare):
            return False
        return documented or not (re.search(r"=\s*(delete|default)\s*;?$", bare) or "~" in bare)

    def scope(self, at, name, inside, visible):
        while True:
            while self.code[at:at + 1] in (" ", "\n"):
                at += 1
            if at >= len(self.code) or self.code[at] == "}":
                return at
            begin = at
            kind, label, head_end, end = self.statement(at)
            head = self.code[begin:head_end]
            at = end
            if kind == "namespace":
                part = inside.copy()
                for piece in label.split("::"):
                    part += [] if piece == "QUOKA_ABI" else [piece]
                shown = bool(part) and part[0] == "quoka" and not NOT_PUBLIC & set(part)
                emitted = shown and label != "QUOKA_ABI"
                if emitted:
                    self.keep(begin, head_end + 1)
                    if part == ["quoka"]:
                        self.spoken[self.line_of(begin)] = f"/** \\addtogroup {self.room()} */ /** @{{ */"
                at = self.scope(head_end + 1, part[-1], part, True) if shown else self.skip(head_end) - 1
                if emitted:
                    self.keep(at, at + 1)
                    if part == ["quoka"]:
                        line = self.line_of(at)
                        self.kept[line] = ["/** @} */ "] + self.kept[line]
                at += 1
            elif kind == "access":
                visible = label == "public"
                self.keep(begin, end)
            elif kind in ("class", "struct", "union", "enum"):
                closing = self.skip(head_end)
                end = self.code.index(";", closing) + 1
                row_type = inside[-1:] == ["formats"]
                public = visible and inside and "template <>" not in head and "::" not in label and (not row_type or label.endswith("Row"))
                if public:
                    self.document(begin, head_end + 1 if kind != "enum" else end, label)
                    self.names += 1
                    self.keep(begin, head_end + 1)
                    if kind == "enum":
                        self.enum(head_end + 1, closing)
                    elif not row_type:
                        self.scope(head_end + 1, label, inside + [label], kind != "class")
                    self.keep(closing - 1, end)
                at = end
            elif visible and inside:
                bare = self.blank_angles(head)
                documented = bool(self.comment_after(end) or self.comment_above(begin))
                if not self.wanted(head, name, documented) or inside[-1:] == ["formats"] and not re.match(r"using \w+Row\b", bare):
                    continue
                called = re.match(r"(?:using|concept)\s+(\w+)\s*=", bare) or re.search(r"(\w+)\s*\(", bare)
                self.document(begin, end, called[1] if called else "")
                self.names += 1
                self.keep(begin, self.signature_end(begin, head_end) if kind == "function" else head_end)
                if kind == "function":
                    line = self.line_of(head_end)
                    self.kept[line][head_end - self.starts[line]] = ";"
                self.parameters(begin, head_end)
                if kind == "plain" and "(" not in bare:
                    self.split(begin, head_end)

    def signature_end(self, begin, end):
        """Where a function's head ends, before a constructor's initialisers."""
        depth = 0
        for at in range(begin, end):
            depth += (self.code[at] in "([") - (self.code[at] in ")]")
            if depth == 0 and self.code[at] == ":" and ":" not in (self.code[at - 1], self.code[at + 1]):
                return at
        return end

    def split(self, begin, end):
        """`T a, b;` becomes `T a; T b;`, each with the comment: Doxygen gives it to one of them."""
        code = re.sub(r"\s+", " ", self.code[begin:end - 1])
        depth, pieces = 0, [""]
        for c in code:
            depth += (c in "<{[(") - (c in ">}])")
            pieces[-1:] = [pieces[-1], ""] if c == "," and depth == 0 else [pieces[-1] + c]
        if len(pieces) == 1 or code.startswith("using"):
            return
        type_, first = re.match(r"(.*?)([*&]?\w+( = .*)?)$", pieces[0]).group(1, 2)
        lines = self.comment_after(end) or self.comment_above(begin)
        comment = " ".join(escaped(self.comments[line][1].strip()) for line in lines)
        for line in range(self.line_of(begin), self.line_of(end - 1) + 1):
            self.kept[line] = []
        for line in lines:
            self.spoken.pop(line, None)
        self.kept[self.line_of(begin)] = [
            " ".join(f"{type_} {name.strip()};" + (f" /**< {comment} */" if comment else "")
                     for name in [first] + pieces[1:])]

    def parameters(self, begin, end):
        """Comments after the lines of a parameter list."""
        for line in range(self.line_of(begin), self.line_of(end - 1)):
            if line in self.comments and line not in self.spoken and not self.alone(line):
                self.speak([line], "///<")

    def enum(self, begin, end):
        self.keep(begin, end - 1)
        line = self.line_of(begin)
        while line < self.line_of(end):
            if line in self.comments and line not in self.spoken:
                group = [line]
                while self.alone(group[-1] + 1) and self.comments[group[-1] + 1][0] == self.comments[line][0]:
                    group.append(group[-1] + 1)
                self.speak(group, "///" if self.alone(line) else "///<")
                line = group[-1]
            line += 1
        if self.line_of(begin) == self.line_of(end):  # all in one line: the enumeration's own comment is theirs
            return
        at = begin
        for name in self.code[begin:end - 1].split(","):
            line = self.line_of(at + len(name) - len(name.lstrip()))
            if name.strip() and line not in self.spoken and not self.alone(line - 1):
                self.spoken[line] = f"///< \\no_comment_for_{name.split()[0]}"  # likewise
            at += len(name) + 1

    def room(self):
        parts = self.below.parts
        return parts[0] if len(parts) > 1 else "base"

    def blank(self, pattern):
        self.code = re.sub(pattern, lambda m: re.sub(r"[^\n]", " ", m[0]), self.code)

    def read_c(self):
        """c.h: as C++ has its names, in a group of their own."""
        self.blank(r'extern\s+"_*"\s*\{')
        self.blank(r"\}\s*$")
        self.blank(r"\bQUOKA_C_API\b")
        self.blank(r"\btypedef\b(?=\s+(struct|enum)\s+\w+\s*\{)")
        self.blank(r"(?<=\})\s*quoka_\w+(?=\s*;)")
        self.scope(0, "", ["quoka"], True)
        first = next(number for number, kept in enumerate(self.kept) if "".join(kept).strip())
        while self.alone(first - 1):  # a comment belongs to what is below it
            first -= 1
        self.before[first] = "/** \\addtogroup c */ /** @{ */ "
        self.kept[-1] = ["/** @} */"]

    def result(self):
        if self.path.suffix == ".h":
            self.read_c()
        else:
            self.scope(0, "", [], False)
        if self.names == 0:
            return ""
        opening = 0
        while self.alone(opening):
            opening += 1
        self.speak(list(range(opening)), "///")
        if self.path.suffix == ".h":
            self.spoken[opening] = "/// \\file"
        if self.lines[opening] == "#pragma once":
            self.spoken[opening] = "/// " + (self.about or "\\file")
            if self.about:
                self.spoken[opening + 1] = f"/** \\file {self.below}"
                self.spoken[opening + 2] = f"{self.about.split()[1]} and what belongs to it. */"
        return "\n".join((self.before.get(number, "") + "".join(kept).rstrip() + " " + self.spoken.get(number, "")).rstrip()
                         for number, kept in enumerate(self.kept)) + "\n"


if __name__ == "__main__":
    try:
        sys.stdout.write(Header(pathlib.Path(sys.argv[1]).resolve()).result())
    except Exception as error:  # Doxygen goes on without the header: make it complain
        sys.stdout.write(f"/** \\file\n\\cannot_read_this_header {error!r} */\n")
