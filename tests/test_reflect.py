"""The tokenizer's traps, kernel signatures, and what is generated from them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

METAL = Path(__file__).parent.parent / "metal"
sys.path.insert(0, str(METAL))

import emit  # noqa: E402
from lowering import HOST, SourceError, declarations, lower, tokenize  # noqa: E402
from signatures import Source, describe, read_source, thread_count  # noqa: E402

HEADER = "#include <metal_stdlib>\nusing namespace metal;\nstruct A { uint n; };\n"
PLAIN = """
[[kernel, max_total_threads_per_threadgroup(32)]] void f(constant A& args [[buffer(0)]],
    const device uint* x [[buffer(1)]], device uint* y [[buffer(2)]], uint t [[thread_position_in_threadgroup]]) {
  BODY
}
"""


def lowered(text: str) -> str:
    return "".join(lower(part.tokens, HOST) for part in declarations(tokenize(text, "t.metal")))


def read(text: str) -> Source:
    return read_source(text, "t.metal")


def test_text_survives() -> None:
    text = 'int a = b[c[0]] >> 2;\nconst char* s = "[[x]] \\" device";\nfloat y = 1e-3f + .5f;'
    assert lowered(text) == text


def test_nested_subscript_is_no_attribute_end() -> None:
    assert lowered("void g(uint* a, uint* b) { a[b[1]] = a[b[a[0]]]; }") == (
        "void g(uint* a, uint* b) { a[b[1]] = a[b[a[0]]]; }"
    )
    assert lowered("void g(uint n [[buffer(x[y[1]])]]) { }") == "void g(uint n) { }"


def test_threadgroup_is_storage_here_and_a_qualifier_there() -> None:
    text = lowered("void g(threadgroup half* p) { threadgroup half a[4][8], b; threadgroup half* q = a[0]; }")
    assert "void g( half* p)" in text
    assert "using a_array = half[4][8];" in text and "using b_array = half;" in text
    assert text.rstrip().endswith("half* q = a[0]; }")
    assert "using c_array = vec<half, 4>[3];" in lowered("void g() { alignas(16) threadgroup vec<half, 4> c[3]; }")
    assert "alignas" not in lowered("void g() { alignas(16) threadgroup vec<half, 4> c[3]; }")
    assert "(half4*)" in lowered("void g() { x = (threadgroup half4*)y; }").replace(" ", "")
    with pytest.raises(SourceError, match=r"t\.metal:2: threadgroup memory cannot be initialised"):
        lowered("void g() {\n threadgroup uint a = 3; }")


def test_constant_becomes_const_once() -> None:
    assert lowered("constant uint t[2] = {1, 2};") == "const uint t[2] = {1, 2};"
    assert lowered("const constant uint* p;").split() == ["const", "uint*", "p;"]
    assert lowered("constant const uint* p;").split() == ["const", "uint*", "p;"]
    text = lowered("struct S { static constexpr constant uint n = 4; };")
    assert text == "struct S { static constexpr const uint n = 4; };"


def test_literals() -> None:
    assert lowered("x = 1.5h + 2h + 1.0 + 3. + 1e3 + 0x1e3 + 7u + 1.0f;") == (
        "x = half(1.5f) + half(2.0f) + 1.0f + 3.f + 1e3f + 0x1e3 + 7u + 1.0f;"
    )


def test_lines_survive() -> None:
    text = '#line 7 "kernels/x.metal"\n\nvoid g() {\n  threadgroup\n  uint a[4];\n  a[0] = 1;\n}'
    assert lowered(text).count("\n") == text.count("\n")
    assert 'kernels/x.metal", 10' in lowered(text)


def test_signatures() -> None:
    source = read(
        "struct A { uint n; };\n"
        "template <typename T, int N = 4, bool FLAG = (1 > 0)>\n"
        "[[kernel, max_total_threads_per_threadgroup(N * 32)]] void f(\n"
        "    constant A& args [[buffer(0)]], const device vec<T, 4>* x [[buffer(1)]], device T* y [[buffer(2)]],\n"
        "    uint2 group [[threadgroup_position_in_grid]]) { y[x[0][1]] = N < 3 ? T(1) : T(2); }\n"
        'template [[host_name("f_half_" "2")]] [[kernel]] decltype(f<half, 2>) f<half, 2>;\n'
        'template [[host_name("f_float_8")]] kernel void f<float, 1 << 3>(constant A&, const device float4*, '
        "device float*, uint2);\n"
        "kernel [[max_total_threads_per_threadgroup(64)]] void plain(constant A& args [[buffer(0)]]) { }\n"
    )
    assert [kernel.name for kernel in source.kernels] == ["f_half_2", "f_float_8", "plain"]
    assert source.kernels[0].call == "f<half, 2>"
    assert source.kernels[1].call == "f<float, 1 << 3>"
    assert [thread_count(kernel) for kernel in source.kernels] == [64, None, 64]
    row = describe(source.kernels[0])
    assert row["buffers"] == [
        {"name": "x", "index": 1, "type": "const device vec<T, 4>*", "const": True},
        {"name": "y", "index": 2, "type": "device T*", "const": False},
    ]
    assert row["args"] == "A" and row["line"] == 3
    assert row["positions"] == {"group": "threadgroup_position_in_grid"}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("x [[buffer(1)]]", "x", r"t\.metal:4: expected \[\[buffer\(n\)\]\] at x, got none"),
        ("[[buffer(2)]]", "[[buffer(3)]]", r"t\.metal:3: expected buffers 1, 2, \.\.\. in order in f, got \[1, 3\]"),
        (", max_total_threads_per_threadgroup(32)", "", r"expected \[\[max_total_threads_per_threadgroup"),
        (" [[thread_position_in_threadgroup]]", "", r"t\.metal:4: expected an attribute that says what t is, got none"),
        ("const device uint* x", "const uint* x", r"expected device or constant at x"),
        ("constant A& args [[buffer(0)]],", "", r"expected `constant Args& args"),
    ],
)
def test_signature_faults(old: str, new: str, message: str) -> None:
    text = "struct A { uint n; };\n" + PLAIN
    assert old in text
    with pytest.raises(SourceError, match=message):
        read(text.replace(old, new, 1))


def test_outputs_are_as_listed(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "gemm.metal").write_text(HEADER + PLAIN.replace("BODY", "y[t] = x[t];"))
    (folder / "other.metal").write_text(HEADER + PLAIN.replace("BODY", "y[t] = x[t];").replace(" f(", " g("))
    out = tmp_path / "out"
    emit.write_all("c++", folder, METAL / "include", out, None)
    assert sorted(path.name for path in out.iterdir()) == sorted(emit.outputs(folder, None))
    assert emit.outputs(folder, 1)[:2] == ["lowered_gemm_0.cpp", "lowered_other_0.cpp"]
    (folder / "other.metal").write_text((folder / "gemm.metal").read_text())
    with pytest.raises(SourceError, match="expected one kernel f, got another"):
        emit.write_all("c++", folder, METAL / "include", out, None)
