"""Tokens of preprocessed .metal files, and what each target makes of them.

A target is a small table of differences (`Target`): how the address spaces are spelled, and where a threadgroup
array lives. Everything else is one pass over the tokens, the same for the host, CUDA and the strict check.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

SPACES = ("device", "constant", "threadgroup", "thread")

TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
    |(?P<mark>^\#[^\n]*)
    |(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
    |(?P<number>\.?\d(?:[eEpP][+-]|[\w.'])*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<op>::|->|<=|>=|==|!=|&&|\|\||.)""",
    re.VERBOSE | re.MULTILINE,
)
MARK = re.compile(r'#(?:line)?\s*(\d+)\s+"([^"]*)"')
FLOAT = re.compile(r"(?:\d+\.\d*|\.\d+|\d+(?=[eEhH]))(?:[eE][+-]?\d+)?(?P<suffix>[fFhH]?)")

VECTOR = re.compile(r"(?:float|half|int|uint|short|ushort|char|uchar|ulong|bool)[234]")

KERNEL_ATTRIBUTES = ("max_total_threads_per_threadgroup", "host_name")


class SourceError(Exception):
    """A fault of a .metal file; the message begins with file:line."""


@dataclass(slots=True)
class Token:
    kind: str  # mark, string, number, name, op
    text: str
    space: str  # white space before it
    file: str
    line: int


Tokens = list[Token]


def fault(token: Token, message: str) -> SourceError:
    return SourceError(f"{token.file}:{token.line}: {message}")


def tokenize(text: str, file: str = "") -> Tokens:
    """Tokens of preprocessed text; its line marks become `mark` tokens and the tokens' places."""
    tokens: Tokens = []
    space, line, position = "", 1, 0
    while position < len(text):
        match = TOKEN.match(text, position)
        assert match is not None and match.lastgroup is not None
        position = match.end()
        kind, piece = match.lastgroup, match.group()
        if kind == "space":
            space += piece
            line += piece.count("\n")
            continue
        if kind == "mark" and (mark := MARK.match(piece)):
            line, file = int(mark[1]) - 1, mark[2]
            if line < 0 or file.startswith("<"):
                continue  # the preprocessor's own
            piece = f'#line {mark[1]} "{file}"'
        tokens.append(Token(kind, piece, space, file, line))
        space = ""
    return tokens


def match_close(tokens: Tokens, start: int) -> int:
    """Index of the bracket that closes the one at `start`: (), [] or {}."""
    opening, closing = "([{", ")]}"
    depth = 0
    for i in range(start, len(tokens)):
        if tokens[i].kind != "op":
            continue
        if tokens[i].text in opening:
            depth += 1
        elif tokens[i].text in closing:
            depth -= 1
            if depth == 0:
                return i
    raise fault(tokens[start], f"expected a bracket that closes {tokens[start].text}, got the end of the file")


def match_angle(tokens: Tokens, start: int) -> int:
    """Index of the `>` that closes the template bracket at `start`."""
    depth, i = 0, start
    while i < len(tokens):
        text = tokens[i].text
        if text in "([{" and tokens[i].kind == "op":
            i = match_close(tokens, i)
        elif text == "<" and i + 1 < len(tokens) and tokens[i + 1].text == "<" and tokens[i + 1].space == "":
            i += 1  # a shift
        elif text == "<":
            depth += 1
        elif text == ">":
            depth -= 1
            if depth == 0:
                return i
        i += 1
    raise fault(tokens[start], "expected > that closes <, got the end of the file")


def is_attribute(tokens: Tokens, i: int) -> bool:
    """Does an attribute, `[[`, begin at i?"""
    return tokens[i].text == "[" and i + 1 < len(tokens) and tokens[i + 1].text == "[" and tokens[i + 1].space == ""


def split_commas(tokens: Tokens) -> list[Tokens]:
    """Splits at commas outside of brackets, template brackets included."""
    parts: list[Tokens] = [[]]
    depth = 0
    for token in tokens:
        if token.kind == "op":
            depth += (token.text in "([{<") - (token.text in ")]}>")
            if token.text == "," and depth == 0:
                parts.append([])
                continue
        parts[-1].append(token)
    return [part for part in parts if part]


def text_of(tokens: Tokens) -> str:
    """One line of text."""
    words = [(" " if token.space and i else "") + token.text for i, token in enumerate(tokens) if token.kind != "mark"]
    return "".join(words)


def join(tokens: Tokens) -> str:
    """The text as it stood."""
    return "".join(token.space + token.text for token in tokens)


@dataclass
class Declaration:
    """Top-level declaration: `kind` is kernel, instantiation (of a kernel) or other."""

    kind: str
    tokens: Tokens
    place: Token = field(repr=False, kw_only=True)


def declaration_end(tokens: Tokens, start: int) -> int:
    """Index behind the declaration that begins at `start`."""
    i, after_parenthesis = start, False
    while i < len(tokens):
        text = tokens[i].text if tokens[i].kind == "op" else ""
        if text in ("(", "["):
            i = match_close(tokens, i)
            after_parenthesis = text == "(" or after_parenthesis
        elif text == ";":
            return i + 1
        elif text == "}":
            return i + 1  # of a namespace
        elif text == "=":
            after_parenthesis = False
        elif text == "{":
            if any(token.text == "namespace" for token in tokens[start:i]):
                return i + 1
            i = match_close(tokens, i)
            if after_parenthesis:
                return i + 1
        i += 1
    return len(tokens)


def has_kernel_word(tokens: Tokens) -> bool:
    """Is `kernel` among the tokens before the body? Template arguments' defaults do not count."""
    start = match_angle(tokens, 1) + 1 if tokens[0].text == "template" and tokens[1].text == "<" else 0
    for i, token in enumerate(tokens[start:], start):
        if token.text in ("{", "=", "("):
            if i > 0 and tokens[i - 1].text in KERNEL_ATTRIBUTES:
                continue
            return False
        if token.kind == "name" and token.text == "kernel":
            return i == 0 or tokens[i - 1].text not in ("::", ".", "->")
    return False


def declarations(tokens: Tokens) -> Iterator[Declaration]:
    """The declarations of a file in order; marks and pragmas are declarations of kind `other`."""
    i = 0
    while i < len(tokens):
        if tokens[i].kind == "mark":
            yield Declaration("other", [tokens[i]], place=tokens[i])
            i += 1
            continue
        end = declaration_end(tokens, i)
        part = tokens[i:end]
        bare = [token for token in part if token.kind != "mark"]
        kind = "other"
        if bare[0].text == "template" and bare[1].text != "<" and any(t.text == "host_name" for t in bare):
            kind = "instantiation"
        elif has_kernel_word(bare) and bare[-1].text == "}":
            kind = "kernel"
        yield Declaration(kind, part, place=bare[0])
        i = end


@dataclass
class Target:
    """How a compiler other than Apple's is told what the words of Metal mean."""

    name: str
    spaces: dict[str, str]  # address space -> words in a type
    # A threadgroup declaration inside a body: (type, name, dimensions, place) -> text.
    array: Callable[[str, str, str, Token], str]
    constant_data: str | None = None  # words for `constant` data at namespace scope, where they differ
    half_literal: str = "half({}f)"
    keep_pragmas: bool = False
    make_vector: str = ""  # what is called instead of a vector's constructor


def host_array(type_text: str, name: str, dimensions: str, place: Token) -> str:
    """A reference into the worker's threadgroup memory, the same for every lane."""
    return (
        f"static const char {name}_key = 0; using {name}_array = {type_text}{dimensions}; "
        f"{name}_array& {name} = *static_cast<{name}_array*>(::expertile::emulator::threadgroup_memory("
        f'&{name}_key, sizeof({name}_array), "{name}", {{"{place.file}", {place.line}}}));'
    )


HOST = Target("host", {"device": "", "thread": "", "threadgroup": "", "constant": "const"}, host_array)


def strict_space(number: int) -> str:
    return f"__attribute__((address_space({number})))"


def strict_array(type_text: str, name: str, dimensions: str, _place: Token) -> str:
    """A reference with the address space of a threadgroup; a local variable cannot have one in plain C++."""
    space = strict_space(3)
    return (
        f"using {name}_array = {type_text}{dimensions}; "
        f"{space} {name}_array& {name} = *reinterpret_cast<{space} {name}_array*>(strict_memory());"
    )


STRICT = Target(
    "strict",
    {
        "device": strict_space(1),
        "constant": f"const {strict_space(2)}",
        "threadgroup": strict_space(3),
        "thread": "",
    },
    strict_array,
    make_vector="strict_make<{}>",
)


def lower_number(text: str, target: Target) -> str:
    """A literal without suffix is a float in Metal; `h` makes a half."""
    match = FLOAT.fullmatch(text)
    if match is None:
        return text
    suffix = match["suffix"]
    digits = text[: len(text) - len(suffix)]
    if suffix in ("h", "H"):
        return target.half_literal.format(digits if "." in digits or "e" in digits.lower() else digits + ".0")
    return digits + (suffix or "f")


class Lowering:
    """One pass over the tokens of a declaration."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def lower(self, tokens: Tokens) -> str:
        """The declaration's text for the target, line for line."""
        self.tokens = tokens
        self.depth = 0
        self.out: list[str] = []
        i = 0
        while i < len(tokens):
            i = self.step(i)
        return "".join(self.out)

    def step(self, i: int) -> int:
        """Writes what stands at token i and returns the index behind it."""
        token = self.tokens[i]
        if is_attribute(self.tokens, i):
            end = match_close(self.tokens, i)
            self.out.append("\n" * join(self.tokens[i : end + 1]).count("\n"))
            return end + 1
        if token.kind == "op":
            self.depth += (token.text == "{") - (token.text == "}")
        if token.kind == "mark":
            keep = token.text.startswith("#line") or self.target.keep_pragmas
            self.out.append(token.space + (token.text if keep else ""))
        elif token.kind == "number":
            self.out.append(token.space + lower_number(token.text, self.target))
        elif token.text == "alignas" and (storage := self.storage_behind_alignas(i)):
            return self.threadgroup_array(storage)
        elif token.text == "threadgroup" and self.is_storage(i):
            return self.threadgroup_array(i)
        elif token.text in SPACES and token.kind == "name":
            self.out.append(token.space + self.space_words(i))
        elif token.text == "kernel" and token.kind == "name":
            self.out.append(token.space)
        elif self.target.make_vector and VECTOR.fullmatch(token.text) and self.neighbour(i, 1) == "(":
            self.out.append(token.space + self.target.make_vector.format(token.text))
        else:
            self.out.append(token.space + token.text)
        return i + 1

    def neighbour(self, i: int, direction: int) -> str:
        i += direction
        while 0 <= i < len(self.tokens) and self.tokens[i].kind == "mark":
            i += direction
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def space_words(self, i: int) -> str:
        space = self.tokens[i].text
        words = self.target.spaces[space]
        before, behind = self.neighbour(i, -1), self.neighbour(i, 1)
        if space == "constant":
            if self.target.constant_data and before in ("", ";", "}", "static", "constexpr") and before != "constexpr":
                words = self.target.constant_data
            if "const" in (before, behind):
                words = words.removeprefix("const").strip()
        return words

    def storage_behind_alignas(self, i: int) -> int | None:
        end = match_close(self.tokens, i + 1)
        behind = end + 1
        if behind < len(self.tokens) and self.tokens[behind].text == "threadgroup" and self.declares_storage(behind):
            return behind
        return None

    def is_storage(self, i: int) -> bool:
        """Does `threadgroup` at i begin a declaration of threadgroup memory, rather than qualify a pointer?"""
        return self.neighbour(i, -1) in (";", "{", "}") and self.depth > 0 and self.declares_storage(i)

    def declares_storage(self, i: int) -> bool:
        angle = 0
        for token in self.tokens[i + 1 :]:
            if token.text in ("<", ">"):
                angle += 1 if token.text == "<" else -1
            elif angle == 0 and token.text in ("*", "&", "("):
                return False
            elif angle == 0 and token.text in ("[", ";", "=", ","):
                return True
        return False

    def threadgroup_array(self, i: int) -> int:
        """`threadgroup T a[4][2], b;` from token i on."""
        tokens = self.tokens
        end = i
        while tokens[end].text != ";":
            end += 1
        body = [token for token in tokens[i + 1 : end] if token.kind != "mark"]
        parts = split_commas(body)
        name_at = next(k for k in range(len(parts[0]) - 1, -1, -1) if self.is_declared_name(parts[0], k))
        type_text = Lowering(self.target).lower(parts[0][:name_at]).strip()
        self.out.append(tokens[i].space)
        for part in [parts[0][name_at:], *parts[1:]]:
            if any(token.text == "=" for token in part):
                raise fault(part[0], f"threadgroup memory cannot be initialised: {part[0].text}")
            self.out.append(self.target.array(type_text, part[0].text, text_of(part[1:]), part[0]) + " ")
        self.out.append("\n" * join(tokens[i + 1 : end + 1]).count("\n"))
        return end + 1

    @staticmethod
    def is_declared_name(part: Tokens, k: int) -> bool:
        return part[k].kind == "name" and (k + 1 == len(part) or part[k + 1].text in ("[", "=")) and k > 0


def lower(tokens: Tokens, target: Target) -> str:
    """Text of one declaration for `target`."""
    return Lowering(target).lower(tokens)
