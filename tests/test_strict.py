"""What the strict check must refuse, each rule with a planted fault and a clean twin beside it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from strict_checks import ARGS, CLANG, HEAD, HEADER, METAL, check_pair, faults_of, needs_clang, whole

WORDS = [
    ("double d = 1; //!", "float d = 1; y[t] = uint(d);", "a word that Metal has, got double"),
    ("y[t] = x[t]; goto end; end: y[t] = 1; //!", "y[t] = x[t];", "got goto"),
    ("try { y[t] = 1; } catch (int) { } //!", "y[t] = 1;", "got try"),
    ("throw 1; //!", "return;", "got throw"),
    ("thread uint* p = new uint; //!", "uint v; thread uint* p = &v; *p = 1;", "got new"),
    ("thread uint* p = 0; delete p; //!", "thread uint* p = 0; y[t] = p == 0;", "got delete"),
    ("struct V { virtual void g(); }; //!\n---", "struct V { void g(); };\n---", "got virtual"),
    ("thread_local uint v = 1; //!", "uint v = 1; y[t] = v;", "got thread_local"),
    ("register uint v = 1; //!", "uint v = 1; y[t] = v;", "got register"),
    ("METAL_FUNC uint g() noexcept { return 1; } //!\n---", "METAL_FUNC uint g() { return 1; }\n---", "got noexcept"),
    ("y[t] = std::min(x[t], 1u); //!", "y[t] = min(x[t], 1u);", "got std"),
    ("long long v = 1; //!", "long v = 1; y[t] = uint(v);", "got long long"),
    ("uint vertex = 1; //!", "uint corner = 1; y[t] = corner;", "got vertex, a keyword"),
    ("y[t] = uint4(1).wx[0]; //!", "y[t] = uint4(1).zw[0];", "a swizzle of xy, xyz, zw, got .wx"),
    ("y[t] = uint4(1).yz[0]; //!", "y[t] = uint4(1).xyz[1];", "got .yz"),
    (
        "threadgroup atomic_uint a[1]; atomic_store_explicit(a, 0u, memory_order_seq_cst); //!",
        "threadgroup atomic_uint a[1]; atomic_store_explicit(a, 0u, memory_order_relaxed);",
        "expected memory_order_relaxed",
    ),
    ("threadgroup atomic_float a[1]; //!", "threadgroup atomic_uint a[1];", "atomic_float in device memory"),
    ("auto g = [](uint v) { return v; }; y[t] = g(1); //!", "uint g[1] = {1}; y[t] = g[0];", "got a lambda"),
    (
        "METAL_FUNC uint g(uint v) { return v; }\n---uint (*p)(uint) = g; y[t] = p(1); //!",
        "METAL_FUNC uint g(uint v) { return v; }\n---y[t] = g(1);",
        "got p, a pointer to a function",
    ),
    ("struct V { uint a; };\nstruct W : V { }; //!\n---", "struct V { uint a; };\n---", "without a base, got W"),
    ("static uint v = 1; y[t] = v; //!", "uint v = 1; y[t] = v;", "no static variable, got one in f"),
    ("constexpr uint four = 4; //!\n---", "constant constexpr uint four = 4;\n---", "`constant` data at namespace"),
    ("uint counter; //!\n---", "constant uint counter = 0;\n---", "`constant` data at namespace"),
]

SPACES = [
    ("const uint* p = x; //!", "const device uint* p = x; y[t] = *p;", "an address space at uint*, got none"),
    ("uint v = 1; uint& r = v; r = 2; //!", "uint v = 1; thread uint& r = v; r = 2;", "an address space at uint&"),
    (
        "METAL_FUNC void g(uint* p) { *p = 1; } //!\n---",
        "METAL_FUNC void g(thread uint* p) { *p = 1; }\n---",
        "an address space at uint*, got none",
    ),
    ("y[t] = *(const device uint*)(x); //!", "y[t] = *reinterpret_cast<const device uint*>(x);", "reinterpret_cast"),
    (
        "y[t] = reinterpret_cast<threadgroup float*>(y)[0] > 1; //!",
        "y[t] = reinterpret_cast<device float*>(y)[0] > 1;",
        "a cast inside device, got one of y to threadgroup",
    ),
    (
        "threadgroup uint a[2];\ndevice uint* p = reinterpret_cast<device uint*>(&a[1]); *p = 1; //!",
        "threadgroup uint a[2];\nthreadgroup float* p = reinterpret_cast<threadgroup float*>(&a[1]); *p = 1;",
        "a cast inside threadgroup, got one of a to device",
    ),
    (
        "METAL_FUNC uint g(uint v) { threadgroup uint a[2]; a[v] = v; return a[0]; } //!\n---y[t] = g(t);",
        "METAL_FUNC uint g(threadgroup uint* a, uint v) { a[v] = v; return a[0]; }\n---threadgroup uint a[2]; "
        "y[t] = g(a, t);",
        "in a kernel, got a function",
    ),
    (
        "METAL_FUNC uint g(device uint* p) { return p[0]; }\n"
        "METAL_FUNC uint g(threadgroup uint* p) { return p[0]; } //!\n---",
        "METAL_FUNC uint g(device uint* p) { return p[0]; }\n"
        "METAL_FUNC uint h(threadgroup uint* p) { return p[0]; }\n---",
        "differ by more than an address space",
    ),
    (
        "METAL_FUNC uint g(uint n) { return n ? g(n - 1) : 0; } //!\n---y[t] = g(t);",
        "METAL_FUNC uint g(uint n) { return n; }\n---y[t] = g(t);",
        "no recursion, got g calling itself",
    ),
    (
        "METAL_FUNC uint h(uint n);\nMETAL_FUNC uint g(uint n) { return h(n); } //!\n"
        "METAL_FUNC uint h(uint n) { return g(n); }\n---",
        "METAL_FUNC uint h(uint n) { return n; }\nMETAL_FUNC uint g(uint n) { return h(n); }\n---",
        "no recursion, got g calling itself",
    ),
]

HEADS = [
    (ARGS + HEAD.replace(" [[buffer(1)]]", ") { } //!").replace("  //!", ""), ARGS + HEAD + ") { }", "[[buffer(n)]]"),
    (ARGS + HEAD.replace("buffer(1)", "buffer(2)") + ") { }", ARGS + HEAD + ") { }", "expected buffers 1, 2, ... in"),
    (
        ARGS + HEAD.replace(", max_total_threads_per_threadgroup(64)", "") + ") { }",
        ARGS + HEAD + ") { }",
        "expected [[max_total_threads_per_threadgroup(n)]]",
    ),
    (
        ARGS + HEAD.replace("(64)", "(1056)") + ") { }",
        ARGS + HEAD + ") { }",
        "expected 1 to 1024 threads in f, got 1056",
    ),
    (ARGS + HEAD.replace("void f", "uint f") + ") { return 1; }", ARGS + HEAD + ") { }", "returns void, got uint f"),
    (ARGS + HEAD.replace("void f", "void main") + ") { }", ARGS + HEAD + ") { }", "got main"),
    (
        ARGS + HEAD + "".join(f", device uint* z{i} [[buffer({i})]]" for i in range(2, 32)) + ") { }",
        ARGS + HEAD + "".join(f", device uint* z{i} [[buffer({i})]]" for i in range(2, 31)) + ") { }",
        "expected buffers 0 to 30 in f",
    ),
    (
        ARGS + HEAD + ", uint2 g [[threadgroup_position_in_grid]], uint t [[thread_position_in_threadgroup]]) { }",
        ARGS + HEAD + ", uint2 g [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]]) { }",
        "positions all scalar or all of one length in f, got threadgroup_position_in_grid 2",
    ),
    (
        ARGS + HEAD + ", uint2 t [[thread_index_in_threadgroup]]) { }",
        ARGS + HEAD + ", ushort t [[thread_index_in_threadgroup]]) { }",
        "expected uint or ushort for thread_index_in_threadgroup, got uint2",
    ),
    (
        ARGS + HEAD + ", int g [[threadgroup_position_in_grid]]) { }",
        ARGS + HEAD + ", uint g [[threadgroup_position_in_grid]]) { }",
        "expected uint or ushort for threadgroup_position_in_grid, got int",
    ),
    (
        ARGS + HEAD.replace("  //!", "") + ") { }\n" + HEAD + ", device uint* z [[buffer(2)]]) { }",
        ARGS + HEAD + ") { }\n" + HEAD.replace("void f", "void g") + ", device uint* z [[buffer(2)]]) { }",
        "f",
    ),
    (
        ARGS + HEAD.replace("  //!", "") + ") { }\nMETAL_FUNC void g(constant A& a, device uint* y) { f(a, y); } //!",
        ARGS + HEAD + ") { }\nMETAL_FUNC void g(constant A& a, device uint* y) { y[0] = a.n; }",
        "no call of a kernel, got g calling f",
    ),
    ("struct A { device uint* p; }; //!\n" + HEAD + ") { }", ARGS + HEAD + ") { }", "in A, got a pointer"),
    ("struct A { uint n; bool b; }; //!\n" + HEAD + ") { }", ARGS + HEAD + ") { }", "in A, got bool"),
    ("struct A { size_t n; }; //!\n" + HEAD + ") { }", "struct A { ulong n; };" + HEAD + ") { }", "in A, got size_t"),
    ("struct A { uint3 n; }; //!\n" + HEAD + ") { }", "struct A { uint4 n; };" + HEAD + ") { }", "in A, got uint3"),
]

TYPES = [
    (
        "METAL_FUNC uint h(device uint* p) { return p[0]; }\n---threadgroup uint a[2]; y[t] = h(a); //!",
        "METAL_FUNC uint h(threadgroup uint* p) { return p[0]; }\n---threadgroup uint a[2]; y[t] = h(a);",
        "no matching function for call to 'h'",
    ),
    (
        "METAL_FUNC uint h(device uint* p) { return p[0]; }\n---uint a[2]; y[t] = h(a); //!",
        "METAL_FUNC uint h(thread uint* p) { return p[0]; }\n---uint a[2] = {1, 2}; y[t] = h(a);",
        "no matching function for call to 'h'",
    ),
    ("device uint* p = x; p[t] = 0; //!", "const device uint* p = x; y[t] = *p;", "cannot initialize a variable"),
    ("threadgroup uint* p = y; p[t] = 0; //!", "device uint* p = y; p[t] = 0;", "cannot initialize a variable"),
    ("x[t] = 1; //!", "y[t] = 1;", "read-only variable"),
    ("args.n = 1; //!", "y[t] = args.n;", "cannot assign to"),
    (
        "constant uint four = 4;\n---four = 1; //!",
        "constant uint four = 4;\n---y[t] = four;",
        "cannot assign to variable",
    ),
    ("y[t] = as_type<uint>(ulong(t)); //!", "y[t] = as_type<uint>(float(t));", "as_type"),
    ("y[t] = as_type<ushort>(1.0f); //!", "y[t] = as_type<ushort>(half(1.0f));", "as_type"),
    ("y[t] = reinterpret_cast<threadgroup uint*>(y + 1)[0]; //!", "y[t] = y[1];", "reinterpret_cast"),
    ("y[t] = min(x[t], 1); //!", "y[t] = min(x[t], 1u);", "ambiguous"),
    ("y[t] = 1.5f; //!", "y[t] = uint(1.5f);", "implicit conversion from 'float' to 'uint'"),
    ("uint a[args.n]; a[0] = 1; y[t] = a[0]; //!", "uint a[4]; a[0] = 1; y[t] = a[0];", "variable length array"),
    ("threadgroup float4 a[2049]; //!", "threadgroup float4 a[2048];", "threadgroup memory of a kernel"),
    (
        "threadgroup uint a[8192];\nthreadgroup uchar b[1]; //!",
        "threadgroup uint a[8191];\nthreadgroup uchar b[4];",
        "threadgroup memory of a kernel",
    ),
    (
        "struct S { uint n; METAL_FUNC uint get() const { return n; } };\n---"
        "y[t] = reinterpret_cast<const device S*>(x)->get(); //!",
        "struct S { uint n; METAL_FUNC uint get() const { return n; } };\n---S s; s.n = 1; y[t] = s.get();",
        "argument to member function 'get'",
    ),
    ("y[t] = undeclared(t); //!", "y[t] = clz(t);", "undeclared"),
    ("threadgroup atomic_uint a[1]; y[t] = a[0]; //!", "threadgroup uint a[1]; y[t] = a[0];", "atomic"),
]


@pytest.mark.parametrize(("bad", "good", "message"), [*WORDS, *SPACES, *HEADS])
def test_refuses_what_metal_refuses(tmp_path: Path, bad: str, good: str, message: str) -> None:
    check_pair(tmp_path, bad, good, message, None)


@needs_clang
@pytest.mark.parametrize(("bad", "good", "message"), TYPES)
def test_refuses_types_that_do_not_match(tmp_path: Path, bad: str, good: str, message: str) -> None:
    check_pair(tmp_path, bad, good, message, CLANG)


MATMUL = """using namespace mpp::tensor_ops;
typedef tensor<threadgroup half, dextents<int32_t, 2>> Operand;
template <int M, int N, uint S>
using Product = matmul2d<matmul2d_descriptor(M, N, 32, false, true, false,
                                             matmul2d_descriptor::mode::multiply_accumulate), execution_simdgroups<S>>;
---
threadgroup half a[512], b[1024];
Operand left(a, dextents<int32_t, 2>(32, 16));
Operand right(b, dextents<int32_t, 2>(32, 32));
Product<16, 32, 2> product;
auto sums = product.get_destination_cooperative_tensor<Operand, Operand, float>();
for (ushort i = 0; i < sums.get_capacity(); ++i) { sums[i] = 0.0f; }
product.run(left, right, sums);
"""
MATMUL_FAULTS = [
    (
        "run(left, right, sums)",
        "run(left, Operand(b, dextents<int32_t, 2>(32, 32)), sums)",
        "no matching member function",
    ),
    ("tensor<threadgroup half,", "tensor<threadgroup const half,", "an operand's elements are not const"),
    ("tensor<threadgroup half,", "tensor<constant half,", "does not lie in constant memory"),
    ("tensor<threadgroup half,", "tensor<device half,", "no matching constructor"),
    ("Product<16, 32, 2>", "Product<8, 24, 2>", "M or N is a multiple of 16"),
    ("Operand, float>", "Operand, half>", "the destination is this product's"),
    ("product.run(", "if (simd == 0) product.run(", "expected run where all threads of the threadgroup come by"),
    (
        "product.run(",
        "auto fours = product.get_right_input_cooperative_tensor<half, half, float>();\nproduct.run(",
        "operands in registers are one simdgroup's",
    ),
]


@needs_clang
@pytest.mark.parametrize(("old", "new", "message"), MATMUL_FAULTS)
def test_refuses_misuse_of_matmul2d(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert faults_of(tmp_path, whole(MATMUL), CLANG) == ""
    assert old in MATMUL
    faults = faults_of(tmp_path, whole(MATMUL.replace(old, new, 1)), CLANG)
    assert message in faults and "kernels/t.metal:" in faults


def test_checks_every_form_of_a_file_and_names_it(tmp_path: Path) -> None:
    body = "\n#if EXPERTILE_METAL_TENSOR\ndouble d;\n#endif\n#if EXPERTILE_METAL_K4\ngoto end;\n#endif\n"
    faults = faults_of(tmp_path, whole(body), None).splitlines()
    assert len(faults) == 3  # one in the tensor form, it and another in K4's
    assert "got double (form tensor)" in faults[0]
    assert any("got goto (form tensor K4)" in fault for fault in faults)


@needs_clang
def test_refuses_args_that_set_bytes_does_not_take(tmp_path: Path) -> None:
    text = HEADER + "struct A { uint n[N]; };\n" + HEAD + ") { y[0] = args.n[0]; }\n"
    assert faults_of(tmp_path, text.replace("N", "1024"), CLANG) == ""
    assert "args of a kernel" in faults_of(tmp_path, text.replace("N", "1025"), CLANG)


def test_refuses_a_header_of_the_host(tmp_path: Path) -> None:
    faults = faults_of(tmp_path, HEADER + "#include <cmath>\n" + ARGS + HEAD + ") { }\n", None)
    assert "kernels/t.metal:3:" in faults and "cmath" in faults


def test_kernels_are_strict() -> None:
    clang = [] if CLANG else ["--tokens-only"]
    result = subprocess.run([sys.executable, str(METAL / "strict.py"), *clang], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
