"""The functions of a .metal file, with what uniformity.py knows of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lowering import Token, Tokens, match_angle, match_close, split_commas
from signatures import attributes_of

# How far a value or control flow is the same: in the threadgroup; in each simdgroup; nowhere.
SAME, SIMDGROUP, THREAD = 0, 1, 2

POSITIONS = {"simdgroup_index_in_threadgroup": SIMDGROUP, "thread_position_in_threadgroup": THREAD}
POSITIONS |= {"thread_index_in_threadgroup": THREAD, "thread_position_in_grid": THREAD}
POSITIONS |= {"thread_index_in_simdgroup": THREAD}


@dataclass
class Function:
    """A function with a body. The object of a method is its last parameter, `this`."""

    name: str
    place: Token
    body: Tokens
    parameters: list[str]
    types: list[str]  # of the parameters, as written
    owner: str  # the struct of a method
    outputs: set[int]  # parameters that the body can write to
    shared: set[str]  # those that point to memory of all threads
    members: frozenset[str]
    levels: list[int]  # of the parameters, the highest of all calls
    need: int = THREAD
    result: int = SAME  # with those levels
    own_result: int = SAME  # with all parameters the same: what the function adds itself
    own_output: int = SAME


def read_function(
    name: Token, parameters: Tokens, body: Tokens, owner: str, members: frozenset[str], is_const: bool
) -> Function:
    names, types, levels = [], [], []
    outputs, shared = set(), set()
    for i, part in enumerate(split_commas(parameters)):
        bare, attributes = attributes_of(part)
        words = [token.text for token in bare]
        words = words[: words.index("=")] if "=" in words else words
        called = next((word for word in reversed(words) if word[0].isalpha() or word[0] == "_"), "")
        names.append(called)
        types.append(" ".join(word for word in words if word != called))
        if "thread" in words and "const" not in words:
            outputs.add(i)
        if {"device", "threadgroup", "constant"} & set(words):
            shared.add(called)
        levels.append(max((POSITIONS.get(attribute, SAME) for attribute in attributes), default=SAME))
    if owner and not is_const:
        outputs.add(len(names))
    return Function(name.text, name, body, [*names, "this"], types, owner, outputs, shared, members, [*levels, SAME])


def member_names(tokens: Tokens) -> frozenset[str]:
    """Variables that are declared between the braces of a struct, outside of its functions; no constants."""
    names: set[str] = set()
    i = 0
    while i < len(tokens):
        text = tokens[i].text
        if text in ("(", "{"):
            i = match_close(tokens, i)
        elif text == "constexpr":
            i = next((k for k in range(i, len(tokens)) if tokens[k].text == ";"), len(tokens))
        elif tokens[i].kind == "name" and i + 1 < len(tokens) and tokens[i + 1].text in (";", "[", ",", "="):
            names.add(text)
        i += 1
    return frozenset(names)


def functions(tokens: Tokens, owner: str = "", members: frozenset[str] = frozenset()) -> Iterator[Function]:
    """The functions of a declaration, methods included."""
    i = 0
    while i < len(tokens) and tokens[0].text != "namespace":
        token = tokens[i]
        behind = i + 1
        if token.text == "template" and tokens[i + 1].text == "<":
            behind = match_angle(tokens, i + 1) + 1
        elif token.text == "struct":
            opening = next((k for k in range(i, len(tokens)) if tokens[k].text in ("{", ";", "=", "(")), i)
            if tokens[opening].text == "{":
                behind = match_close(tokens, opening) + 1
                inside = tokens[opening + 1 : behind - 1]
                yield from functions(inside, tokens[i + 1].text, member_names(inside))
        elif token.text == "(":
            behind = match_close(tokens, i) + 1
            is_const = behind < len(tokens) and tokens[behind].text == "const"
            body = behind + is_const
            if body < len(tokens) and tokens[body].text == "{" and i > 0 and tokens[i - 1].kind == "name":
                end = match_close(tokens, body)
                inside, parameters = tokens[body + 1 : end], tokens[i + 1 : behind - 1]
                yield read_function(tokens[i - 1], parameters, inside, owner, members, is_const)
                behind = end + 1
        elif token.text in ("{", "["):
            behind = match_close(tokens, i) + 1
        i = behind
