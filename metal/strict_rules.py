"""Rules on the tokens of a .metal file: what Apple's compiler refuses, and what this project does without."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from functions import Function, functions
from lowering import (
    SPACES,
    STRICT,
    VECTOR,
    Declaration,
    Lowering,
    SourceError,
    Token,
    Tokens,
    fault,
    match_angle,
    match_close,
)
from signatures import Signature, Source, attributes_of, thread_count
from uniformity import Flow, check_uniformity

# Words of C++ that Metal does not have, or that this project keeps out of its kernels.
BANNED = {"double", "goto", "virtual", "dynamic_cast", "typeid", "new", "delete", "throw", "try", "catch", "asm"}
BANNED |= {"thread_local", "wchar_t", "const_cast", "register", "noexcept", "std"}
KEYWORDS = {"vertex", "fragment", "ray_data", "object_data"}  # of Metal, names elsewhere
SCALARS = {"void", "bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "float", "half", "auto"}
SCALARS |= {"size_t", "uint8_t", "int8_t", "uint16_t", "int16_t", "uint32_t", "int32_t", "uint64_t", "int64_t"}
SCALARS |= {"atomic_uint", "atomic_int", "atomic_float"}
SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{1,4}")
SWIZZLES = {"xy", "zw", "xyz"}  # contiguous ones, which the host's and CUDA's vectors have

# Positions of a kernel must be all scalars or all vectors of one length; an index is a scalar.
POSITIONS = {"thread_position_in_grid", "threads_per_grid", "thread_position_in_threadgroup", "threads_per_threadgroup"}
POSITIONS |= {"threadgroup_position_in_grid", "threadgroups_per_grid"}
POSITION = re.compile(r"(?:uint|ushort)([23]?)")
NOT_DATA = ("using", "typedef", "template", "enum", "struct", "class", "static_assert", ";")
MAX_THREADS, MAX_BUFFER = 1024, 30
NOT_IN_ARGS = {"*": "a pointer", "&": "a reference", "bool": "bool", "size_t": "size_t", "ptrdiff_t": "ptrdiff_t"}
VECTOR_OF_3 = re.compile(r"(?:float|half|int|uint|short|ushort|char|uchar|long|ulong)3")


def bare(tokens: Tokens) -> Tokens:
    return attributes_of([token for token in tokens if token.kind != "mark"])[0]


def declared_types(source: Source) -> set[str]:
    """Names that stand for types: the built-in ones, structs, aliases, template parameters."""
    names = set(SCALARS)
    for part in source.declarations:
        tokens = bare(part.tokens)
        for before, token in itertools.pairwise(tokens):
            if before.text in ("struct", "class", "typename", "using") and token.kind == "name":
                names.add(token.text)
        if tokens and tokens[0].text == "typedef":
            names.add(tokens[-2].text)
    return names


def check_words(tokens: Tokens) -> Iterator[SourceError]:
    for before, token, behind in zip([None, *tokens], tokens, [*tokens[1:], None], strict=False):
        if token.kind != "name":
            continue
        if token.text in BANNED:
            yield fault(token, f"expected a word that Metal has, got {token.text}")
        if token.text == "long" and behind and behind.text == "long":
            yield fault(token, "expected a type that Metal has, got long long")
        if token.text in KEYWORDS:
            yield fault(token, f"expected another name, got {token.text}, a keyword of Metal")
        if token.text.startswith("memory_order_") and token.text != "memory_order_relaxed":
            yield fault(token, f"expected memory_order_relaxed, got {token.text}")
        if before and before.text == "." and SWIZZLE.fullmatch(token.text) and token.text not in SWIZZLES:
            yield fault(token, f"expected a swizzle of {', '.join(sorted(SWIZZLES))}, got .{token.text}")
        if before and before.text == "threadgroup" and token.text == "atomic_float":
            yield fault(token, "expected atomic_float in device memory, got threadgroup")


def check_forms(tokens: Tokens) -> Iterator[SourceError]:
    """Lambdas, pointers to functions, derived structs."""
    texts = [token.text for token in tokens]
    for i, text in enumerate(texts):
        if text == "[" and i > 0 and (texts[i - 1] in "=,({;?:&|" or texts[i - 1] == "return"):
            end = match_close(tokens, i)
            if texts[end + 1 : end + 2] in (["("], ["{"]):
                yield fault(tokens[i], "expected a function, got a lambda")
        if texts[i : i + 2] == ["(", "*"] and texts[i + 3 : i + 5] == [")", "("] and tokens[i + 2].kind == "name":
            yield fault(tokens[i], f"expected a call by name, got {texts[i + 2]}, a pointer to a function")
        if text in ("struct", "class") and texts[i + 2 : i + 3] == [":"] and texts[i + 3 : i + 4] != [":"]:
            yield fault(tokens[i], f"expected a struct without a base, got {texts[i + 1]}")


def check_pointers(tokens: Tokens, types: set[str]) -> Iterator[SourceError]:
    """Pointers and references to a type need an address space; pointers are cast by reinterpret_cast."""
    for i, token in enumerate(tokens):
        if token.text not in ("*", "&") or token.kind != "op" or i == 0:
            continue
        before = tokens[i - 1]
        if before.text == ">":  # of a template: its name is a type's
            is_type = i + 1 < len(tokens) and tokens[i + 1].text in (")", ">")
        else:
            is_type = before.text in types or VECTOR.fullmatch(before.text) is not None
        if not is_type:
            continue
        start = i
        while start > 0 and tokens[start - 1].text not in ("(", ",", ";", "{", "}", "<"):
            start -= 1
        words = {word.text for word in tokens[start:i]}
        if not words & set(SPACES):
            yield fault(token, f"expected an address space at {before.text}{token.text}, got none")
        behind = tokens[i + 1].text if i + 1 < len(tokens) else ""
        cast = start > 0 and tokens[start - 1].text == "(" and behind == ")"
        if cast and i + 2 < len(tokens) and (tokens[i + 2].kind == "name" or tokens[i + 2].text in ("(", "&")):
            yield fault(token, "expected reinterpret_cast, got a cast in parentheses")


def check_casts(tokens: Tokens) -> Iterator[SourceError]:
    """Casts from one address space to another, of names that the same declaration declares."""
    spaces: dict[str, str] = {}
    space = ""
    for i, token in enumerate(tokens):
        behind = tokens[i + 1].text if i + 1 < len(tokens) else ""
        if token.text in SPACES and token.kind == "name":
            space = token.text
        elif token.text in (";", ",", "(", ")", "{", "=") and token.kind == "op":
            space = ""
        elif space and token.kind == "name" and behind in ("=", ";", ",", ")", "["):
            spaces.setdefault(token.text, space)
        if token.text in ("reinterpret_cast", "static_cast") and behind == "<":
            end = match_angle(tokens, i + 1)
            to = next((word.text for word in tokens[i + 1 : end] if word.text in SPACES), "")
            given = next((word for word in tokens[end + 1 : end + 4] if word.kind == "name"), token)
            if to and spaces.get(given.text, to) != to:
                yield fault(token, f"expected a cast inside {spaces[given.text]}, got one of {given.text} to {to}")


class OutsideKernel(Lowering):
    """Finds threadgroup declarations where Metal has none."""

    def threadgroup_array(self, i: int) -> int:
        raise fault(self.tokens[i], "expected threadgroup memory declared in a kernel, got a function")


def check_scopes(part: Declaration, tokens: Tokens) -> Iterator[SourceError]:
    """Threadgroup arrays only in kernels; data at namespace scope only as `constant`; no static variables."""
    if part.kind == "other":
        try:
            OutsideKernel(STRICT).lower(part.tokens)
        except SourceError as error:
            yield error
    for function in functions(tokens):
        for i, token in enumerate(function.body):
            declared = itertools.takewhile(lambda word: word.text not in (";", "="), function.body[i:])
            if token.text == "static" and all(word.text != "constant" for word in declared):
                yield fault(token, f"expected no static variable, got one in {function.name}")
    words = [token.text for token in tokens]
    if part.kind != "other" or words[-1:] != [";"] or words[0] in NOT_DATA:
        return
    if ("=" in words or "(" not in words) and "constant" not in words:
        yield fault(tokens[0], f"expected `constant` data at namespace scope, got {' '.join(words[:4])} ...")


def check_overloads(every: list[Function]) -> Iterator[SourceError]:
    """No two functions whose parameters differ only by address space: on the host they would be one."""
    seen: dict[tuple[str, ...], Function] = {}
    for function in every:
        types = [re.sub(rf"\b(?:{'|'.join(SPACES)}|const)\b", "", text) for text in function.types]
        key = (function.owner, function.name, *("".join(text.split()) for text in types))
        other = seen.setdefault(key, function)
        if other.types != function.types:
            message = f"expected overloads of {function.name} that differ by more than an address space"
            yield fault(function.place, f"{message}, got the one of line {other.place.line} again")


def calls_of(function: Function, every: dict[str, list[Function]]) -> Iterator[Function]:
    """What a function may call: by name and number of arguments, through an object only methods of other structs."""
    body = function.body
    for i, token in enumerate(body):
        opening = Flow.call_at(body, i) if token.text in every and token.kind == "name" else 0
        if not opening:
            continue
        through = i > 0 and body[i - 1].text == "."
        given = len(Flow.arguments(body[opening + 1 : match_close(body, opening)]))
        for other in every[token.text]:
            owned = other.owner not in ("", function.owner) if through else other.owner in ("", function.owner)
            if (owned or body[i - 1].text == "::") and len(other.types) >= given:
                yield other


def check_recursion(every: list[Function], kernels: set[str]) -> Iterator[SourceError]:
    """No function reaches itself, and none calls a kernel."""
    named: dict[str, list[Function]] = {}
    for function in every:
        named.setdefault(function.name, []).append(function)
    calls = {id(function): list(calls_of(function, named)) for function in every}
    for function in every:
        for other in calls[id(function)]:
            if other.name in kernels:
                yield fault(function.place, f"expected no call of a kernel, got {function.name} calling {other.name}")
        reached, todo = set[int](), [id(function)]
        while todo:
            for other in calls[todo.pop()]:
                if id(other) not in reached:
                    reached.add(id(other))
                    todo.append(id(other))
        if id(function) in reached:
            yield fault(function.place, f"expected no recursion, got {function.name} calling itself")


def check_args(source: Source, signature: Signature) -> Iterator[SourceError]:
    """Args structs lie alike for every compiler: no pointer, bool, size_t or vector of three inside."""
    name = signature.args.type.replace("constant", "").replace("const", "").replace("&", "").strip()
    for part in source.declarations:
        tokens = bare(part.tokens)
        if [token.text for token in tokens[:3]] != ["struct", name, "{"]:
            continue
        for token in tokens[3 : match_close(tokens, 2)]:
            what = NOT_IN_ARGS.get(token.text, f"{token.text}" if VECTOR_OF_3.fullmatch(token.text) else "")
            if what:
                yield fault(token, f"expected a number of fixed size in {name}, got {what}")


def check_signature(signature: Signature, part: Declaration) -> Iterator[SourceError]:
    """What Apple's compiler wants of a kernel's head."""
    place = signature.place
    tokens = bare(part.tokens)
    at = next(i for i, token in enumerate(tokens) if token is place)
    if tokens[at - 1].text != "void":
        yield fault(place, f"expected a kernel that returns void, got {tokens[at - 1].text} {place.text}")
    if place.text == "main":
        yield fault(place, "expected a kernel of another name, got main")
    if any(parameter.index > MAX_BUFFER for parameter in signature.parameters):
        yield fault(place, f"expected buffers 0 to {MAX_BUFFER} in {place.text}, got more")
    lengths: dict[str, str] = {}
    for parameter in signature.parameters:
        if parameter.role != "position":
            continue
        match = POSITION.fullmatch(parameter.type.replace("const", "").strip())
        if match is None or (match[1] and parameter.attribute not in POSITIONS):
            yield fault(place, f"expected uint or ushort for {parameter.attribute}, got {parameter.type}")
        elif parameter.attribute in POSITIONS:
            lengths[parameter.attribute] = match[1]
    if len(set(lengths.values())) > 1:
        got = ", ".join(f"{name} {length or 1}" for name, length in lengths.items())
        yield fault(place, f"expected positions all scalar or all of one length in {place.text}, got {got}")


def check_kernels(source: Source) -> Iterator[SourceError]:
    seen: dict[str, Token] = {}
    for part, signature in source.signatures:
        place = signature.place
        if seen.setdefault(place.text, place) is not place:
            yield fault(place, f"expected no overload of a kernel, got {place.text} again")
        yield from check_signature(signature, part)
        yield from check_args(source, signature)
    for kernel in source.kernels:
        threads = thread_count(kernel)
        if threads is not None and not 0 < threads <= MAX_THREADS:
            yield fault(kernel.signature.place, f"expected 1 to {MAX_THREADS} threads in {kernel.name}, got {threads}")


def check_tokens(source: Source) -> list[SourceError]:
    """Every rule on the tokens of one file."""
    types = declared_types(source)
    faults: list[SourceError] = []
    every: list[Function] = []
    for part in source.declarations:
        tokens = bare(part.tokens)
        if not tokens or part.kind == "instantiation":
            continue
        every += functions(tokens)
        faults += [*check_words(tokens), *check_forms(tokens), *check_pointers(tokens, types), *check_casts(tokens)]
        faults += check_scopes(part, tokens)
    kernels = {signature.function for _, signature in source.signatures}
    faults += [*check_overloads(every), *check_recursion(every, kernels), *check_kernels(source)]
    return [*faults, *check_uniformity(source)]
