"""Strict check of the .metal files where there is no Metal compiler.

    python metal/strict.py [FILE.metal ...] [--clang clang++-19] [--compiler c++]

Two checks, both without generating code: rules on the tokens (below), and clang on the lowered text with real address
spaces, which finds a device pointer passed as threadgroup, a write through `constant`, an as_type between sizes.
Prints file:line for every fault and exits 1.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from lowering import STRICT, Lowering, SourceError, lower
from signatures import Source, preprocess, read_source
from strict_rules import check_tokens

METAL = Path(__file__).parent
PORTABILITY = METAL / "portability"
TENSOR = "-DEXPERTILE_METAL_TENSOR=1"
# What the host compiles: name, version of Metal, its macros. A form that leaves a file as it was needs no check.
FORMS = [("base", 310, ""), ("tensor", 400, TENSOR), ("tensor K4", 400, f"{TENSOR} -DEXPERTILE_METAL_K4=1")]
MAX_MEMORY, MAX_ARGS = 32768, 4096  # bytes: of a threadgroup, of what setBytes takes
WARNINGS = ["-Wall", "-Wextra", "-Werror", "-Wfloat-conversion", "-Wno-unused", "-Wno-undefined-internal"]
WARNINGS += ["-Wno-undefined-inline", "-Wno-unknown-attributes", "-Wno-unused-parameter"]


class KernelBody(Lowering):
    """A kernel's text, in which clang adds up the threadgroup memory."""

    def threadgroup_array(self, i: int) -> int:
        end = super().threadgroup_array(i)
        names = re.findall(r"using (\w+_array)", "".join(self.out))
        total = " + ".join(f"sizeof({name})" for name in names)
        self.out.append(f'static_assert({total} <= {MAX_MEMORY}, "threadgroup memory of a kernel"); ')
        return end


def strict_text(source: Source) -> str:
    """The file for clang: every declaration, kernels' instantiations as explicit instantiations."""
    args = {signature.args.type.replace("constant", "").replace("&", "").strip() for _, signature in source.signatures}
    text = '#include "metal_strict.h"\n#include "metal_strict_tensor.h"\n'
    for part in source.declarations:
        text += KernelBody(STRICT).lower(part.tokens) if part.kind == "kernel" else lower(part.tokens, STRICT)
    for name in sorted(args):
        text += f'\nstatic_assert(sizeof({name}) <= {MAX_ARGS}, "args of a kernel");'
    return text + "\n"


def run_clang(clang: str, text: str) -> str:
    """clang's complaints, "" where there are none."""
    command = [clang, "-x", "c++", "-std=c++20", "-fsyntax-only", "-nostdinc", "-fno-caret-diagnostics", *WARNINGS]
    command += [f"-I{PORTABILITY / 'strict'}", "-"]
    result = subprocess.run(command, input=text, capture_output=True, text=True)
    return "" if result.returncode == 0 else result.stderr


def check_text(text: str, path: str, clang: str | None) -> list[str]:
    """Faults of preprocessed text; without clang only those of the tokens."""
    try:
        source = read_source(text, path)
        faults = sorted({str(error) for error in check_tokens(source)})
        complaints = run_clang(clang, strict_text(source)) if clang else ""
    except SourceError as error:
        return [str(error)]
    return faults + ([complaints.rstrip()] if complaints else [])


def check_file(path: Path, include: Path, compiler: str, clang: str | None) -> list[str]:
    """Faults of one .metal file in every form that differs from the one before."""
    faults: list[str] = []
    seen: set[str] = set()
    for form, version, macros in FORMS:
        try:
            folders = [include, PORTABILITY / "preprocess"]
            text = preprocess(f"{compiler} {macros}", path, path.parent.parent, folders, version)
        except SourceError as error:
            return [*faults, str(error)]
        if text not in seen:
            found = check_text(text, f"{path.parent.name}/{path.name}", clang)
            faults += [fault if form == "base" else f"{fault} (form {form})" for fault in found if fault not in faults]
        seen.add(text)
    return faults


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
