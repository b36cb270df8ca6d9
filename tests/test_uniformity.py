"""A barrier that not every thread reaches is refused: each way to miss it planted, with a clean twin beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from strict_checks import BARRIER, CLANG, check_pair, faults_of, whole

EARLY = "threadgroup_barrier where all threads of the threadgroup come by"
IN_SIMD = "simd_sum where all threads of a simdgroup come by"
UNIFORM = [
    (f"if (t >= args.n) {{ return; }}\n{BARRIER} //!", f"if (group.x >= args.n) {{ return; }}\n{BARRIER}", EARLY),
    (f"if (x[t] > 3) {{ return; }}\n{BARRIER} //!", f"if (x[3] <= group.y) {{ return; }}\n{BARRIER}", EARLY),
    (f"uint n = x[group.x];\nn += t;\nif (n > 3) {{ return; }}\n{BARRIER} //!", f"{BARRIER} if (t > 3) return;", EARLY),
    (f"if (lane == 0) {{\n{BARRIER} //!\n}}", f"if (lane == 0) {{ y[0] = 1; }} {BARRIER}", EARLY),
    (f"if (simd == 0) {{\n{BARRIER} //!\n}}", "if (simd == 0) { y[lane] = simd_sum(lane); }", EARLY),
    (f"if (args.n > 1) y[t] = 1; else if (t > 1) {BARRIER} //!", f"if (args.n > 1) y[t] = 1; else {BARRIER}", EARLY),
    (
        f"for (uint i = t; i < 64; ++i) {{\n{BARRIER} //!\n}}",
        f"for (uint i = 0; i < args.n; ++i) {{ {BARRIER} }}",
        EARLY,
    ),
    (
        f"uint i = 0;\nwhile (i < x[t]) {{ ++i;\n{BARRIER} //!\n}}",
        f"uint i = 0; while (i < 3) {{ ++i; {BARRIER} }}",
        EARLY,
    ),
    (
        f"uint i = t;\ndo {{ {BARRIER} //!\n}} while (++i < 9);",
        f"uint i = 0; do {{ {BARRIER} }} while (++i < 9);",
        EARLY,
    ),
    (
        f"for (uint i = 0; i < 9; ++i) {{ {BARRIER} //!\nif (x[t + i] == 1) {{ break; }} }}",
        f"for (uint i = 0; i < 9; ++i) {{ {BARRIER} if (x[i] == 1) {{ break; }} }}",
        EARLY,
    ),
    (
        f"for (uint i = 0; i < 9; ++i) {{ if (x[t + i] == 1) {{ continue; }}\n{BARRIER} }} //!",
        f"for (uint i = 0; i < 9; ++i) {{ if (x[t + i] == 1) {{ y[t] = i; }} {BARRIER} }}",
        EARLY,
    ),
    (
        f"for (uint i = 0; i < 9; ++i) {{ if (x[t + i] == 1) {{ return; }} }}\n{BARRIER} //!",
        f"for (uint i = 0; i < 9; ++i) {{ if (x[t + i] == 1) {{ break; }} }} {BARRIER}",
        EARLY,
    ),
    (f"switch (t) {{ case 1: {BARRIER} //!\n}}", f"switch (args.n) {{ case 1: {BARRIER} }}", EARLY),
    ("y[t] = t > 3 ? simd_sum(t) : 0; //!", "y[t] = args.n > 3 ? simd_sum(t) : 0;", IN_SIMD),
    ("y[t] = t > 3 && simd_sum(t) > 0; //!", "y[t] = simd_sum(t) > 0 && t > 3;", IN_SIMD),
    (
        "y[t] = max(x[0], t > 3 || simd_any(t > 4) ? 1u : 0u); //!",
        "y[t] = max(t > 3 ? 1u : 0u, simd_sum(t));",
        "simd_any",
    ),
    ("if (lane > 3) { return; }\ny[t] = simd_sum(t); //!", "if (simd > 3) { return; } y[t] = simd_sum(t);", IN_SIMD),
    (
        f"METAL_FUNC void g(uint n) {{ if (n > 3) {{\n{BARRIER} //!\n}} }}\n---g(t);",
        f"METAL_FUNC void g(uint n) {{ if (n > 3) {{ {BARRIER} }} }}\n---g(args.n);",
        EARLY,
    ),
    (
        f"METAL_FUNC void g() {{ {BARRIER} }}\nMETAL_FUNC void h() {{ g(); }}\n---if (t > 3) {{ return; }}\nh(); //!",
        f"METAL_FUNC void g() {{ {BARRIER} }}\nMETAL_FUNC void h() {{ g(); }}\n---h(); if (t > 3) {{ return; }}",
        "expected h where all threads of the threadgroup come by",
    ),
    (
        "METAL_FUNC void g(uint a, thread uint& b) { b = a; }\n---uint n;\ng(t, n);\n"
        f"if (n > 3) {{ return; }}\n{BARRIER} //!",
        "METAL_FUNC void g(uint a, thread uint& b) { b = a; }\n---uint n; g(args.n, n);\n"
        f"if (n > 3) {{ return; }}\n{BARRIER}",
        EARLY,
    ),
    (
        "METAL_FUNC uint g(uint a) { if (a > 3) { return 1; } return 2; }\n"
        f"---if (g(t) == 1) {{ return; }}\n{BARRIER} //!",
        "METAL_FUNC uint g(uint a) { if (a > 3) { return 1; } return 2; }\n"
        f"---y[t] = g(t); if (g(args.n) == 1) {{ return; }} {BARRIER}",
        EARLY,
    ),
    (
        "struct S { uint n; METAL_FUNC bool ends() const { return n > 3; } };\n"
        f"---S s;\ns.n = t;\nif (s.ends()) {{ return; }}\n{BARRIER} //!",
        "struct S { uint n; METAL_FUNC bool ends() const { return n > 3; } };\n"
        f"---S s; s.n = args.n; if (s.ends()) {{ return; }} {BARRIER}",
        EARLY,
    ),
    (
        f"device atomic_uint* a = reinterpret_cast<device atomic_uint*>(y);\n"
        f"if (atomic_fetch_add_explicit(a, 1u, memory_order_relaxed) > 3) {{ return; }}\n{BARRIER} //!",
        f"for (uint i = t; i < 9; ++i) {{ y[i] = 0; }} for (uint i = 0; i < 9; ++i) {{ {BARRIER} }}",
        EARLY,
    ),
]


@pytest.mark.parametrize(("bad", "good", "message"), UNIFORM)
def test_refuses_what_some_threads_do_not_reach(tmp_path: Path, bad: str, good: str, message: str) -> None:
    check_pair(tmp_path, bad, good, message, None)


METHODS = """struct In { uint n; METAL_FUNC void add(uint v) { n += v; } };
struct Out { In in; METAL_FUNC void add(uint v) { in.add(v); } };
template <uint N> struct Sums {
  static constant constexpr uint count = N;
  uint sums[N];
  METAL_FUNC uint all() { uint sum = 0; for (uint i = 0; i < count; ++i) { sum += simd_sum(sums[i]); } return sum; }
};
"""


def test_methods_of_one_name_are_no_recursion_and_constants_of_a_struct_uniform(tmp_path: Path) -> None:
    text = METHODS + "---Out o; o.in.n = t; o.add(t); Sums<3> s; s.sums[0] = o.in.n; y[t] = s.all();"
    assert faults_of(tmp_path, whole(text), CLANG) == ""
    faults = faults_of(tmp_path, whole(text.replace("static constant constexpr uint count = N;", "uint count;")), None)
    assert "expected simd_sum where all threads of a simdgroup come by" in faults
