"""Reads the signatures of the kernels off preprocessed .metal files."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from lowering import (
    Declaration,
    SourceError,
    Token,
    Tokens,
    declarations,
    fault,
    is_attribute,
    match_angle,
    match_close,
    split_commas,
    text_of,
    tokenize,
)

METAL_VERSION = 310

# Attributes of a parameter that say where a thread is, and their x, y, z from an emulator::Position p.
POSITIONS = {
    "thread_position_in_threadgroup": "p.thread, 0, 0",
    "thread_index_in_threadgroup": "p.thread, 0, 0",
    "thread_position_in_grid": "p.group[0] * p.threads + p.thread, p.group[1], p.group[2]",
    "threadgroup_position_in_grid": "p.group[0], p.group[1], p.group[2]",
    "threads_per_threadgroup": "p.threads, 1, 1",
    "threadgroups_per_grid": "p.grid[0], p.grid[1], p.grid[2]",
    "threads_per_grid": "p.grid[0] * p.threads, p.grid[1], p.grid[2]",
    "thread_index_in_simdgroup": "p.thread % 32, 0, 0",
    "simdgroup_index_in_threadgroup": "p.thread / 32, 0, 0",
    "threads_per_simdgroup": "32, 1, 1",
    "simdgroups_per_threadgroup": "(p.threads + 31) / 32, 1, 1",
}


@dataclass
class Parameter:
    """One parameter: `role` is args, buffer or position."""

    role: str
    name: str
    type: str  # as written
    index: int = -1  # of a buffer
    is_const: bool = False
    attribute: str = ""  # of a position


@dataclass
class Signature:
    """A kernel function as it is written, before instantiation."""

    function: str
    template: Tokens  # between < and >, empty for a plain function
    threads: str  # expression
    parameters: list[Parameter]
    host_name: str
    place: Token
    body: Tokens = field(default_factory=list, repr=False)  # behind {

    @property
    def args(self) -> Parameter:
        return self.parameters[0]

    @property
    def buffers(self) -> list[Parameter]:
        return [parameter for parameter in self.parameters if parameter.role == "buffer"]


@dataclass
class Kernel:
    """A kernel that can be launched: a plain function, or one instantiation of a template."""

    name: str
    call: str  # f or f<arguments>
    template_arguments: list[str]
    signature: Signature
    declaration: Declaration | None = None  # the instantiation


@dataclass
class Source:
    """One .metal file, read."""

    path: str
    declarations: list[Declaration]
    kernels: list[Kernel]
    signatures: list[tuple[Declaration, Signature]]


def preprocess(compiler: str, source: Path, root: Path, includes: list[Path], version: int = METAL_VERSION) -> str:
    """The file with its macros expanded and its includes in, line marks kept; raises SourceError."""
    command = [*shlex.split(compiler), "-E", "-x", "c++", "-std=c++17", "-undef", "-nostdinc"]
    command += [f"-D__METAL_VERSION__={version}", "-D__METAL__=1"]
    for include in includes:
        command += ["-I", os.path.relpath(include, root)]
    result = subprocess.run([*command, os.path.relpath(source, root)], cwd=root, capture_output=True, text=True)
    if result.returncode != 0:
        raise SourceError(f"{source}: the preprocessor failed\n{result.stderr}")
    return result.stdout


def attributes_of(tokens: Tokens) -> tuple[Tokens, dict[str, Tokens]]:
    """The tokens without their attributes, and the attributes: name -> tokens of the argument."""
    bare: Tokens = []
    found: dict[str, Tokens] = {}
    i = 0
    while i < len(tokens):
        if is_attribute(tokens, i):
            end = match_close(tokens, i)
            for part in split_commas(tokens[i + 2 : end - 1]):
                found[part[0].text] = part[2:-1] if len(part) > 1 else []
            i = end + 1
            continue
        bare.append(tokens[i])
        i += 1
    return bare, found


def host_name_of(attributes: dict[str, Tokens]) -> str:
    """The name, neighbouring string literals joined."""
    return "".join(token.text[1:-1] for token in attributes.get("host_name", []) if token.kind == "string")


def read_parameter(tokens: Tokens) -> Parameter:
    """One parameter of a kernel; raises SourceError where Metal needs an attribute that is not there."""
    bare, attributes = attributes_of(tokens)
    name = bare[-1]
    words = [token.text for token in bare]
    type_text = text_of(bare[:-1])
    if "*" in words or "&" in words:
        if "buffer" not in attributes:
            raise fault(name, f"expected [[buffer(n)]] at {name.text}, got none")
        index = text_of(attributes["buffer"])
        if not index.isdigit():
            raise fault(name, f"expected a number in [[buffer(n)]] of {name.text}, got {index}")
        if not {"device", "constant"} & set(words):
            raise fault(name, f"expected device or constant at {name.text}, got {type_text}")
        before_pointer = words[: words.index("*")] if "*" in words else words
        is_const = "const" in before_pointer or "constant" in before_pointer
        role = "args" if index == "0" else "buffer"
        if (role == "args") != ("&" in words):
            raise fault(name, f"expected the args struct's reference at buffer(0) and pointers behind, got {type_text}")
        return Parameter(role, name.text, type_text, int(index), is_const)
    known = [attribute for attribute in attributes if attribute in POSITIONS]
    if len(known) != 1:
        raise fault(name, f"expected an attribute that says what {name.text} is, got {', '.join(attributes) or 'none'}")
    return Parameter("position", name.text, type_text, attribute=known[0])


def read_signature(declaration: Declaration) -> Signature:
    """Signature of a kernel's definition."""
    tokens = [token for token in declaration.tokens if token.kind != "mark"]
    template: Tokens = []
    if tokens[0].text == "template":
        end = match_angle(tokens, 1)
        template, tokens = tokens[2:end], tokens[end + 1 :]
    body = next(i for i, token in enumerate(tokens) if token.text == "{")
    head, attributes = attributes_of(tokens[:body])
    opening = next(i for i, token in enumerate(head) if token.text == "(")
    name = head[opening - 1]
    if "max_total_threads_per_threadgroup" not in attributes:
        raise fault(name, f"expected [[max_total_threads_per_threadgroup(n)]] at {name.text}, got none")
    # The parameters again, with their attributes.
    start = next(i for i, token in enumerate(tokens) if token is head[opening])
    end = match_close(tokens, start)
    parameters = [read_parameter(part) for part in split_commas(tokens[start + 1 : end])]
    if not parameters or parameters[0].role != "args":
        raise fault(name, f"expected `constant Args& args [[buffer(0)]]` first in {name.text}, got another parameter")
    indices = [parameter.index for parameter in parameters if parameter.role == "buffer"]
    if indices != list(range(1, len(indices) + 1)):
        raise fault(name, f"expected buffers 1, 2, ... in order in {name.text}, got {indices}")
    threads = text_of(attributes["max_total_threads_per_threadgroup"])
    return Signature(name.text, template, threads, parameters, host_name_of(attributes), name, tokens[body + 1 :])


def read_instantiation(declaration: Declaration, signatures: dict[str, Signature]) -> Kernel:
    """`template [[host_name("x")]] kernel void f<A>(...)`, or `decltype(f<A>) f<A>`."""
    tokens = [token for token in declaration.tokens if token.kind != "mark"]
    bare, attributes = attributes_of(tokens[1:])
    if not host_name_of(attributes):
        raise fault(declaration.place, 'expected [[host_name("...")]] at a kernel\'s instantiation, got none')
    for i, token in enumerate(bare):
        if token.text in signatures and i + 1 < len(bare) and bare[i + 1].text == "<":
            end = match_angle(bare, i + 1)
            arguments = [text_of(part) for part in split_commas(bare[i + 2 : end])]
            call = f"{token.text}<{', '.join(arguments)}>"
            return Kernel(host_name_of(attributes), call, arguments, signatures[token.text], declaration)
    raise fault(declaration.place, f"expected an instantiation of a kernel, got {text_of(bare)}")


def read_source(text: str, path: str) -> Source:
    """Kernels and declarations of preprocessed text."""
    parts = list(declarations(tokenize(text, path)))
    signatures: dict[str, Signature] = {}
    written: list[tuple[Declaration, Signature]] = []
    kernels: list[Kernel] = []
    for part in parts:
        if part.kind == "kernel":
            signature = read_signature(part)
            signatures[signature.function] = signature
            written.append((part, signature))
            if not signature.template:
                kernels.append(Kernel(signature.host_name or signature.function, signature.function, [], signature))
        elif part.kind == "instantiation":
            kernels.append(read_instantiation(part, signatures))
    names: dict[str, Kernel] = {}
    for kernel in kernels:
        if kernel.name in names:
            raise fault(kernel.signature.place, f"expected one kernel {kernel.name}, got two")
        names[kernel.name] = kernel
    return Source(path, parts, kernels, written)


def template_names(signature: Signature) -> list[str]:
    """The template's parameters' names; default arguments hold `=`."""
    names = []
    for part in split_commas(signature.template):
        words = [token.text for token in part]
        names.append(words[words.index("=") - 1] if "=" in words else words[-1])
    return names


def thread_count(kernel: Kernel) -> int | None:
    """The number of threads where it is plain arithmetic on the template's arguments, else None."""
    values = dict(zip(template_names(kernel.signature), kernel.template_arguments, strict=False))
    expression = re.sub(r"[A-Za-z_]\w*", lambda m: f"({values.get(m[0], m[0])})", kernel.signature.threads)
    if not re.fullmatch(r"[\d\s()+*/-]+", expression):
        return None
    return int(eval(expression.replace("/", "//"), {"__builtins__": {}}))  # digits and operators only


def describe(kernel: Kernel) -> dict[str, object]:
    """The kernel's row of kernels.json."""
    signature = kernel.signature
    return {
        "name": kernel.name,
        "file": Path(signature.place.file).name,
        "line": signature.place.line,
        "args": signature.args.type.replace("constant", "").replace("&", "").strip(),
        "threads": thread_count(kernel),
        "buffers": [{"name": b.name, "index": b.index, "type": b.type, "const": b.is_const} for b in signature.buffers],
        "positions": {p.name: p.attribute for p in signature.parameters if p.role == "position"},
    }
