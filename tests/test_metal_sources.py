"""What Metal's compiler is handed at run time: each .metal file as one text."""

from __future__ import annotations

import re
import sys
from pathlib import Path

METAL = Path(__file__).parent.parent / "metal"
sys.path.insert(0, str(METAL))

import emit  # noqa: E402
from signatures import describe, preprocess, read_source  # noqa: E402


def metal_texts() -> dict[str, str]:
    text = emit.metal_text(METAL / "kernels", METAL / "include")
    parts = text.split('R"~source~(')[1:]
    names = [part.rsplit('{"', 1)[1].split('"')[0] for part in text.split('R"~source~(')[:-1]]
    return {name: part.split(')~source~"')[0] for name, part in zip(names, parts, strict=True)}


SYSTEM_INCLUDES = {
    "cstdint",  # for the host alone
    "metal_stdlib",
    "metal_simdgroup_matrix",
    "metal_tensor",
    "MetalPerformancePrimitives/MetalPerformancePrimitives.h",
}


def test_metal_is_handed_one_text_a_file_that_needs_no_header_of_ours() -> None:
    texts = metal_texts()
    assert sorted(texts) == sorted(path.name for path in (METAL / "kernels").glob("*.metal"))
    for name, text in texts.items():
        included = set(re.findall(r"^\s*#\s*include\s*[<\"](.+?)[>\"]", text, re.MULTILINE))
        assert "metal_stdlib" in included and included <= SYSTEM_INCLUDES, name
        assert "pragma once" not in text and text.startswith("#pragma clang fp contract(off)")
        for header in set(re.findall(r'^#line 1 "include/(.+)"', text, re.MULTILINE)):
            assert text.count(f'#line 1 "include/{header}"') == 1, header


def test_the_handed_text_has_every_kernel_and_says_where_its_lines_come_from(tmp_path: Path) -> None:
    for name, text in metal_texts().items():
        path = tmp_path / name
        path.write_text(text)
        flat = read_source(preprocess("c++", path, tmp_path, [METAL / "portability" / "preprocess"]), name)
        apart = preprocess(
            "c++", METAL / "kernels" / name, METAL, [METAL / "include", METAL / "portability" / "preprocess"]
        )
        want = read_source(apart, f"kernels/{name}")
        assert [describe(kernel) for kernel in flat.kernels] == [describe(kernel) for kernel in want.kernels]


def test_an_include_twice_is_put_in_once(tmp_path: Path) -> None:
    include = tmp_path / "include"
    include.mkdir()
    (include / "a.h").write_text("#pragma once\nuint a;\n")
    (include / "b.h").write_text('#pragma once\n#include "a.h"\nuint b;\n')
    (tmp_path / "k.metal").write_text('#include "b.h"\n#include "a.h"\nuint k;\n')
    text = emit.flat_text(tmp_path / "k.metal", include, set())
    assert re.findall(r"^uint (\w);", text, re.MULTILINE) == ["a", "b", "k"]
    assert text.splitlines()[-2:] == [f'#line 3 "{tmp_path.name}/k.metal"', "uint k;"]
