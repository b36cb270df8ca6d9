"""Strict check of the .metal files where there is no Metal compiler.

    python metal/strict.py [FILE.metal ...] [--clang clang++-19] [--compiler c++]

Two checks, both without generating code: rules on the tokens (below), and clang on the lowered text with real address
spaces, which finds a device pointer passed as threadgroup, a write through `constant`, an as_type between sizes.
Prints file:line for every fault and exits 1.
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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
    lower,
    match_angle,
)
from signatures import Source, attributes_of, preprocess, read_source

METAL = Path(__file__).parent
PORTABILITY = METAL / "portability"
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wfloat-conversion", "-Wno-unused", "-Wno-undefined-internal"]
WARNINGS += ["-Wno-undefined-inline", "-Wno-unknown-attributes", "-Wno-unused-parameter"]

# Words of C++ that Metal does not have, or that this project keeps out of its kernels.
BANNED = {"double", "goto", "virtual", "dynamic_cast", "typeid", "new", "delete", "throw", "try", "catch", "asm"}
BANNED |= {"thread_local", "wchar_t", "const_cast"}
SCALARS = {"void", "bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "float", "half", "auto"}
SCALARS |= {"size_t", "uint8_t", "int8_t", "uint16_t", "int16_t", "uint32_t", "int32_t", "uint64_t", "int64_t"}
SCALARS |= {"atomic_uint", "atomic_int", "atomic_float"}
SWIZZLE = re.compile(r"[xyzw]{2,4}|[rgba]{1,4}")
SWIZZLES = {"xy", "zw", "xyz"}  # contiguous ones, which the host's and CUDA's vectors have


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
    for i, token in enumerate(tokens):
        if token.kind != "name":
            continue
        if token.text in BANNED:
            yield fault(token, f"expected a word that Metal has, got {token.text}")
        if i > 0 and tokens[i - 1].text == "." and SWIZZLE.fullmatch(token.text) and token.text not in SWIZZLES:
            yield fault(token, f"expected a swizzle of {', '.join(sorted(SWIZZLES))}, got .{token.text}")


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


class OutsideKernel(Lowering):
    """Finds threadgroup declarations where Metal has none."""

    def threadgroup_array(self, i: int) -> int:
        raise fault(self.tokens[i], "expected threadgroup memory declared in a kernel, got a function")


def check_scopes(part: Declaration, tokens: Tokens) -> Iterator[SourceError]:
    """Threadgroup arrays only in kernels; data at namespace scope only as `constant`."""
    if part.kind == "other":
        try:
            OutsideKernel(STRICT).lower(part.tokens)
        except SourceError as error:
            yield error
    words = [token.text for token in tokens]
    if part.kind != "other" or words[-1:] != [";"] or words[0] in ("using", "typedef", "template", "enum", "struct"):
        return
    if "=" in words and "constant" not in words:
        yield fault(tokens[0], f"expected `constant` data at namespace scope, got {' '.join(words[:4])} ...")


def function_name(tokens: Tokens) -> str:
    """Name of a function's definition, else ""."""
    start = match_angle(tokens, 1) + 1 if tokens[0].text == "template" and tokens[1].text == "<" else 0
    if tokens[-1].text != "}" or tokens[start].text in ("struct", "class", "enum", "namespace", "union"):
        return ""
    for i in range(start + 1, len(tokens)):
        if tokens[i].text == "(" and tokens[i - 1].kind == "name":
            return tokens[i - 1].text
    return ""


def check_recursion(source: Source) -> Iterator[SourceError]:
    calls: dict[str, set[str]] = {}
    places: dict[str, Token] = {}
    for part in source.declarations:
        tokens = bare(part.tokens)
        if part.kind == "instantiation" or not tokens or not (name := function_name(tokens)):
            continue
        places.setdefault(name, tokens[0])
        body = next((i for i, token in enumerate(tokens) if token.text == "{"), len(tokens))
        called = {a.text for a, b in itertools.pairwise(tokens[body:]) if b.text in ("(", "<")}
        calls.setdefault(name, set()).update(called)
    for name in calls:
        reached, todo = set[str](), [name]
        while todo:
            for other in calls.get(todo.pop(), set()) - reached:
                reached.add(other)
                todo.append(other)
        if name in reached:
            yield fault(places[name], f"expected no recursion, got {name} calling itself")


def check_tokens(source: Source) -> list[SourceError]:
    """Every rule on the tokens of one file."""
    types = declared_types(source)
    faults: list[SourceError] = []
    for part in source.declarations:
        tokens = bare(part.tokens)
        if not tokens:
            continue
        faults += [*check_words(tokens), *check_pointers(tokens, types), *check_scopes(part, tokens)]
    return [*faults, *check_recursion(source)]


def strict_text(source: Source) -> str:
    """The file for clang: every declaration, kernels' instantiations as explicit instantiations."""
    return '#include "metal_strict.h"\n' + "".join(lower(part.tokens, STRICT) for part in source.declarations) + "\n"


def run_clang(clang: str, text: str) -> str:
    """clang's complaints, "" where there are none."""
    command = [clang, "-x", "c++", "-std=c++17", "-fsyntax-only", "-nostdinc", "-fno-caret-diagnostics", *WARNINGS]
    command += [f"-I{PORTABILITY / 'strict'}", "-"]
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    return "" if result.returncode == 0 else result.stderr


def check_file(path: Path, include: Path, compiler: str, clang: str | None) -> list[str]:
    """Faults of one .metal file; without clang only those of the tokens."""
    try:
        text = preprocess(compiler, path, path.parent.parent, [include, PORTABILITY / "preprocess"])
        source = read_source(text, f"{path.parent.name}/{path.name}")
        faults = [str(error) for error in check_tokens(source)]
        complaints = run_clang(clang, strict_text(source)) if clang else ""
    except SourceError as error:
        return [str(error)]
    return sorted(set(faults)) + ([complaints.rstrip()] if complaints else [])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="default: metal/kernels/*.metal")
    parser.add_argument("--include", type=Path, default=METAL / "include")
    parser.add_argument("--compiler", default="c++", help="its preprocessor expands the macros")
    parser.add_argument("--clang", default="clang++-19")
    parser.add_argument("--tokens-only", action="store_true", help="without clang")
    options = parser.parse_args(arguments)
    clang = None if options.tokens_only else options.clang
    if clang and shutil.which(clang) is None:
        print(f"[strict] expected {clang}, got none (--tokens-only checks without it)", file=sys.stderr)
        return 1
    files = options.files or sorted((METAL / "kernels").glob("*.metal"))
    faults = [text for path in files for text in check_file(path.resolve(), options.include, options.compiler, clang)]
    print("\n".join(faults) if faults else f"{len(files)} files, no fault")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
