"""Makes small mistakes of the sources, which run.py compiles in.

A header is read as statements (Source). Each operator makes of an expression, or of a whole statement, others that a
hurried engineer might have written (operators below). A mutant may change only an expression that
stands alone: a condition, an initial value, a returned value, a statement. So it can be compiled
beside the original and be switched on at run time.
"""

import dataclasses
import hashlib
import re


@dataclasses.dataclass(eq=False)
class Mutant:
    """One mistake: `old` at [begin, end) of the header becomes `new`. `kind` says how both are compiled in."""

    header: str
    operator: str
    kind: str
    begin: int
    end: int
    old: str
    new: str
    function: str
    line: int
    number: int = -1
    key: str = ""  # set by of_header()

    def content(self):
        return "|".join((self.header, self.function, self.operator, squeeze(self.old), squeeze(self.new)))

    def lines(self):
        return range(self.line, self.line + self.old.count("\n") + 1)

    def name(self):
        return f"{self.header}:{self.operator}:{self.key}"


def squeeze(text):
    return " ".join(re.sub("\x01+", "...", text).split())


def blank(text):
    """The source with comments, strings, characters and preprocessor lines blanked: the same length and lines."""
    def spaces(match):
        return re.sub(r"[^\n]", " ", match.group())

    text = re.sub(r'//[^\n]*|/\*.*?\*/', spaces, text, flags=re.S)
    text = re.sub(r'"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])*\'',
                  lambda m: m.group()[0] + "\x01" * (len(m.group()) - 2) + m.group()[-1], text)
    return re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", spaces, text, flags=re.M)


SCOPE = re.compile(r"^(?:inline\s+)?(?:namespace|class|struct|union|enum|extern)\b")
NOT_SWITCHED = re.compile(
    r"^(?:static\s+)?(?:constexpr|static_assert|static|using|typedef|template|case|default|break|continue|goto|friend|"
    r"public|private|protected|requires|concept|thread_local|asm|throw|prefetch\w*|else\s+if\s+constexpr)\b|^if\s+constexpr\b|^QUOKA_|^assert\b")


def without_template(head):
    head = head.strip()
    while head.startswith("template"):
        depth, at = 0, head.find("<")
        for i in range(at, len(head)):
            depth += (head[i] == "<") - (head[i] == ">")
            if depth == 0:
                head = head[i + 1:].strip()
                break
        else:
            return head
    return head


def spans(text):
    """(begin, end, kind, function) of statements and of heads of blocks within functions: text of blank()."""
    found = []
    stack = [{"code": False, "parens": 0, "function": ""}]
    parens, start, broken = 0, 0, False
    for at, c in enumerate(text):
        top = stack[-1]
        if c in "([":
            parens += 1
        elif c in ")]":
            parens -= 1
        elif c == "{":
            head = without_template(text[start:at])
            inner = {"parens": parens, "function": top["function"], "resume": (start, True) if parens > top["parens"] else None}
            if SCOPE.match(head):
                inner["code"] = False
            elif not top["code"] and ")" in head:
                names = re.findall(r"([\w~]+|operator\S+)\s*\(", head)
                inner.update(code=True, function=names[0] if names else "")
            else:
                inner["code"] = top["code"]
            if top["code"] and parens == top["parens"] and not broken:
                found.append((start, at, "head", top["function"]))
            if inner["resume"] is None and top["code"] and re.search(r"(=|return|[\w>])\s*$", head) and not re.match(
                    r"^(?:else|do|try)\b", head):
                inner["resume"] = (start, True)  # braces of a value: the statement goes on behind them
            if re.search(r"\]\s*(\([^{}]*\))?[^;{}]*$", head) and "[" in head and top["code"]:
                inner["resume"] = (start, True)  # a lambda
            stack.append(inner)
            start, broken = at + 1, False
        elif c == "}":
            if len(stack) > 1:
                left = stack.pop()
                parens = left["parens"]
                start, broken = left["resume"] if left["resume"] else (at + 1, False)
        elif c == ";" and parens == top["parens"]:
            if top["code"] and not broken:
                found.append((start, at, "statement", top["function"]))
            start, broken = at + 1, False
    return found


def close_of(text, at):
    """The place of the bracket that closes the one at `at`, or -1."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    return -1


def top_level(text, separators):
    """Places of these characters outside of brackets."""
    depth, places = 0, []
    for i, c in enumerate(text):
        depth += (c in "([{") - (c in ")]}")
        if depth == 0 and c in separators:
            places.append(i)
    return places


# ---- operators: each gives (name, new expression) of an expression -------------------------------------

NUMBER = re.compile(r"(?<![\w.\x01'])(\d[\d']*)(?![\w.'])")
REAL = re.compile(r"(?<![\w.])(\d+\.\d+f?)(?![\w.])")
OPPOSITE = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
NEIGHBOUR = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
ARITHMETIC = {"+": "-", "-": "+", "*": "+", "/": "*", "%": "/"}


def each(pattern, text, change):
    for match in re.finditer(pattern, text):
        new = change(match)
        if new is not None:
            yield text[:match.start()] + new + text[match.end():]


def of_expression(e, variables):
    """All the expressions that the operators make of this one."""
    # A comparison, and its bound. Templates' brackets have no spaces beside them.
    for new in each(r" (<=|>=|<|>|==|!=) ", e, lambda m: f" {OPPOSITE[m[1]]} "):
        yield "comparison", new
    for new in each(r" (<=|>=|<|>) ", e, lambda m: f" {NEIGHBOUR[m[1]]} "):
        yield "bound", new
    for new in each(r"(?<=[\w)\]]) ([-+*/%]) (?=[\w(])", e, lambda m: f" {ARITHMETIC[m[1]]} "):
        yield "arithmetic", new
    for new in each(r"(?:(?<=^)|(?<=[(,=?:] )|(?<=\()|(?<=^ ))-(?=[A-Za-z_(])", e, lambda m: ""):
        yield "sign", new
    for new in each(r" (&&|\|\|) ", e, lambda m: " || " if m[1] == "&&" else " && "):
        yield "logical", new
    for new in each(r"(?<![\w!])!(?=[\w(])", e, lambda m: ""):
        yield "negation", new
    for new in each(NUMBER, e, lambda m: str(int(m[1].replace("'", "")) + 1)):
        yield "constant", new
    for new in each(REAL, e, lambda m: m[1] + (" * 2" if float(m[1].rstrip("f")) else " + 1")):
        yield "constant", new
    for new in each(r"\b(min|max)\b(?=[(<])", e, lambda m: "max" if m[1] == "min" else "min"):
        yield "min_max", new
    for new in each(r"\b(floor|ceil)(?=\()", e, lambda m: "ceil" if m[1] == "floor" else "floor"):
        yield "min_max", new
    # Neighbouring arguments that are plain change places.
    plain = r"[A-Za-z_][\w.]*(?:\[\w+\])?"
    for new in each(rf"(?<=[(,])( ?)({plain}), ({plain})(?=[,)])", e,
                    lambda m: f"{m[1]}{m[3]}, {m[2]}"
                    if m[2] != m[3] and not re.search(r"\b(min|max|swap|fma|_mm\d*_(mul|add)_\w+)\($", e[:m.start()]) else None):
        yield "swapped_arguments", new
    # An index of one more.
    for new in each(r"(?<=[\w)])\[(\w+)\]", e, lambda m: f"[{m[1]} + 1]" if not m[1].isdigit() else None):
        yield "off_by_one", new
    # Another variable of this type.
    for new in each(r"(?<![\w.>:])([A-Za-z_]\w*)\b(?![\w(:<{.]|->)", e, lambda m: variables.get(m[1])):
        yield "wrong_variable", new


def stripped(text, begin, end):
    """[begin, end) without white space at its ends."""
    piece = text[begin:end]
    return end - len(piece.lstrip()), begin + len(piece.rstrip())


def variables_of(text, function_begin, at):
    """Each variable to the next one of its type declared in this function before `at`."""
    by_type = {}
    for match in re.finditer(r"\b(Index|float|double|bool|std::uint32_t|const float\*)\s+(\w+)(?=\s*[=,);])", text[function_begin:at]):
        by_type.setdefault(match[1], {})[match[2]] = True
    to = {}
    for names in by_type.values():
        names = list(names)
        if len(names) > 1:
            to.update(zip(names, names[1:] + names[:1]))
    return to


def of_header(name, source):
    """The mutants of a header's text, in order."""
    text = blank(source)
    found, last_function, function_begin = [], "", 0
    returns_number = set(re.findall(r"\b(?:Index|bool|int|float|double|std::\w*int\w*|std::size_t)\s+(?:\w+::)*(\w+)\(", text))

    def add(operator, kind, begin, end, new, function):
        old = text[begin:end]  # without comments
        if "\x01" in new or (kind == "returned" and "\x01" in old) or squeeze(old) == squeeze(new):
            return
        found.append(Mutant(name, operator, kind, begin, end, old, new, function, source.count("\n", 0, begin) + 1))

    def of_value(begin, end, function, loop=False):
        begin, end = stripped(text, begin, end)
        e = text[begin:end]
        if not e or "{" in e or '"' in e or re.search(r"\bco_|(?<![=!<>])=(?!=)", e):
            return
        for operator, new in of_expression(e, variables_of(text, function_begin, begin)):
            add(operator, "expression", begin, end, new, function)
        if loop:
            for new in each(r" (<|<=) ([^&|]+)$", e, lambda m: f" {m[1]} {m[2]} - 1"):
                add("loop_bound", "expression", begin, end, new, function)

    for begin, end, kind, function in spans(text):
        if function != last_function:
            last_function, function_begin = function, max(0, text.rfind(f"{function}(", 0, begin))
        begin, end = stripped(text, begin, end)
        piece = text[begin:end]
        prefix = re.match(r"(?:else\s+)+|(?:case\b[^:]*|default\s*):\s*", piece)
        if prefix and not piece.startswith("else if constexpr"):
            begin += prefix.end()
            piece = text[begin:end]
        # A statement without braces behind a condition, or behind several.
        while not NOT_SWITCHED.match(piece) and (head := re.match(r"(if|while|for)\s*\(", piece)):
            open_ = begin + head.end()
            close = close_of(text, open_ - 1)
            if not 0 <= close < end:
                break
            parts = [open_ + at for at in top_level(text[open_:close], ";")]
            if head[1] == "for":
                if len(parts) == 2:
                    of_value(parts[0] + 1, parts[1], function, loop=True)
            else:
                condition = stripped(text, parts[-1] + 1 if parts else open_, close)
                of_value(*condition, function)
                if not re.search(r"\{|(?<![=!<>])=(?!=)", text[slice(*condition)]):
                    for new in ("false", "true") if head[1] == "if" else ("false",):
                        add("condition", "expression", *condition, new, function)
            begin, end = stripped(text, close + 1, end)
            piece = text[begin:end]
        if kind == "head" or not piece or NOT_SWITCHED.match(piece):
            continue
        if returned := re.match(r"return\b\s*", piece):
            begin += returned.end()
            value = text[begin:end]
            of_value(begin, end, function)
            if value in ("true", "false"):
                add("returned", "expression", begin, end, "false" if value == "true" else "true", function)
            elif function in returns_number and "{" not in value:
                add("returned", "returned", begin, end, "", function)
            continue
        if re.match(r"(?:const\s+)?[A-Za-z_][\w:]*(?:<[^;=]*?>)?\s*&{1,2}\s*\w+\s*=", piece):
            continue  # a reference: what it is bound to must be the same
        declared = re.match(
            r"(?:const\s+)?[A-Za-z_][\w:]*(?:<[^;=]*?>)?(?:\s+|(?:\s*(?:const\s*)?\*\s*(?:const\s+)?)+)\w+\s*=(?!=)\s*", piece)
        if declared and not re.match(r"(?:return|delete|throw|new)\b", piece):
            value = begin + declared.end()
            ends = [value + comma for comma in top_level(text[value:end], ",")] + [end]
            of_value(value, ends[0], function)
            for comma, stop in zip(ends, ends[1:]):
                if more := re.match(r",\s*\w+\s*=(?!=)\s*", text[comma:stop]):
                    of_value(comma + more.end(), stop, function)
            continue
        # A whole statement: a call, an assignment. Declarations of other forms make no mutants.
        is_call = re.match(r"(?:[A-Za-z_][\w:]*(?:<[^;=]*?>)?|[A-Za-z_][\w.\->\[\]() +*]*)\s*\(", piece) and piece.rstrip().endswith(")")
        is_assignment = re.match(r"[*A-Za-z_][\w.:\->\[\]() +*]*?\s*(?:[-+*/|&^%]|<<|>>)?=(?!=)", piece)
        is_declaration = re.match(r"(?:const\s+)?[A-Za-z_][\w:]*(?:<[^;=()]*>)?[&*]*\s+[*&]?\w+\s*(?:[(\[]|$)", piece)
        if "{" in piece or is_declaration or not (is_call or is_assignment or re.match(r"(\+\+|--)", piece)):
            continue
        add("dropped_statement", "statement", begin, end, "", function)
        if '"' not in piece:
            for operator, new in of_expression(piece, variables_of(text, function_begin, begin)):
                add(operator, "statement", begin, end, new, function)
            for new in each(r" (\+|-)= ", piece, lambda m: " -= " if m[1] == "+" else " += "):
                add("sign", "statement", begin, end, new, function)
            for new in each(r" [-+]= ", piece, lambda m: " = "):
                add("assignment", "statement", begin, end, new, function)
    counts = {}
    for mutant in found:
        content = mutant.content()
        counts[content] = counts.get(content, 0) + 1
        mutant.key = hashlib.sha256(f"{content}|{counts[content]}".encode()).hexdigest()[:10]
    return found


def switched(source, mutants):
    """The header's text with these mutants compiled in, each on its own line."""
    places = {}
    for mutant in mutants:
        places.setdefault((mutant.begin, mutant.end), []).append(mutant)
    pieces, at = [], 0
    for (begin, end), here in sorted(places.items()):
        assert begin >= at, f"{here[0].name()} is within another mutant"
        pieces.append(source[at:begin])
        old = source[begin:end]
        if here[0].kind == "statement":
            text = "{ "
            for m in here:
                text += f"if (QUOKA_MUTANT({m.number})) {{ {squeeze(m.new) + ';' if m.new else ''} }} else "
            text += f"{{ {old}; }} }}"
        else:
            text = "("
            for m in here:
                new = f"::quoka_mutants::other({squeeze(old)})" if m.kind == "returned" else f"({squeeze(m.new)})"
                text += f"QUOKA_MUTANT({m.number}) ? {new} : "
            text += f"({old}))"
        pieces.append(text)
        at = end
        if here[0].kind == "statement" and source[at:at + 1] == ";":
            at += 1
    pieces.append(source[at:])
    return "".join(pieces)


def replaced(source, mutant):
    """The header's text with this mistake and without a switch."""
    return source[:mutant.begin] + mutant.new + source[mutant.end:]
