"""Where the time of the plan's kernels goes on the GPU: python3 tests/cuda/isolate.py OUT.json

Each kernel's CUDA text is compiled as it is, with one part taken out (the results are then wrong: only the time is
read), with another order of programmatic launch, and with the cycle counter read between its parts. A time is the
median of a graph of 48 launches, each beginning before its predecessor's end, as the device's own graphs do. Needs
torch, for memory, stream and graph.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "metal")]

import lower_cuda  # noqa: E402
from measure import run_of  # noqa: E402
from test_compile import METAL, OPTIONS, load_nvrtc, texts  # noqa: E402

import expertile  # noqa: E402
from expertile.plan import max_rows  # noqa: E402
from expertile.report_json import envelope, write  # noqa: E402

E, K, M, LAUNCHES, REPEATS = 512, 10, 16, 48, 30
Edit = tuple[str, str]

ENTER = "EXPERTILE_ENTER(grid_rows)"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
AWAIT = "await_inputs();"
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'
EARLY = 'asm volatile("griddepcontrol.launch_dependents;" ::: "memory");'
PUT = "plan_put(args, expert, part.weight, part.entry, row, stok, sw, pos);"
COUNT = "if (id {}) {{\n    atomic_fetch_add_explicit(&totals"
OWNED = (
    "uint first;\n  const uint owned = plan_owned<512>(args, thread_index, first);\n"
    "  for (uint j = 0; j < OWNED; ++j) {\n    if (j < owned) {\n      const uint n_tiles"
)
# Taken out of the place kernels, one at a time.
SHARED_PARTS: dict[str, Edit] = {
    "without tiles": ("for (uint t = group; t < n_tiles;", "for (uint t = n_tiles; t < n_tiles;"),
    "without padding": ("r < n_tiles * args.tile_rows; r +=", "r < counts[j]; r +="),
    "without the scan": (
        "plan_scan<512>(plan_totals<OWNED>(counts, OWNED, args.tile_rows), reports, lane, simd, partial, all);",
        "thread_index * plan_div_up(counts[0], args.tile_rows); all = PlanTotals{args.n_experts, 1, 1, 1};",
    ),
    "without the rank": (
        "plan_rank<16>(expert, same, args.n_experts, counted, lane, simd, words);",
        "same & 1u;",
    ),
    "without placing": (PUT, "if (row == ~0u) pos[0] = 1;"),
}  # fmt: skip
COUNTS: Edit = (
    "plan_owned_counts<1>(args, bcnt, part.block, thread_index, counts, before);",
    "counts[0] = args.n_entries / args.n_experts + 1; before[0] = 0;",
)
KERNELS: dict[str, dict[str, Edit]] = {
    "mm_hist": {},
    "mm_place_from_counts": SHARED_PARTS
    | {
        "without the match": (
            "const uint same = plan_match(expert, args.n_experts);\n  plan_publish<16>(expert, same, args.n_experts",
            "const uint same = 1u << lane;\n  plan_publish<16>(expert, same, args.n_experts",
        ),
        "without the blocks' counts": COUNTS,
        "eight loads at once": ("plan_sum_blocks<24>(", "plan_sum_blocks<8>("),
        "16 loads at once": ("plan_sum_blocks<24>(", "plan_sum_blocks<16>("),
        "matches behind the wait": (
            "const uint same = true ? plan_match_part(args, part, lane, simd, pool) : 0u;\n  await_inputs();\n"
            "  if (args.n_experts <= 512) {\n    uint counts[1], before[1];\n    plan_owned_counts",
            "await_inputs();\n  const uint same = true ? plan_match_part(args, part, lane, simd, pool) : 0u;\n"
            "  if (args.n_experts <= 512) {\n    uint counts[1], before[1];\n    plan_owned_counts",
        ),
    },
    "mm_single": SHARED_PARTS
    | {
        "without counting": (COUNT.format("< args.n_experts"), COUNT.format("== ~1u")),
    },
}  # fmt: skip
# The cycle counter by one thread of the first threadgroup; the text behind which or before which it is read.
CLOCK = "EXPERTILE_CLOCK({}) "
CLOCK_TEXT = """
extern "C" {{ __device__ long long expertile_cycles[16]; }}
#define EXPERTILE_CLOCK(n) \\
  {{ long long now; asm volatile("mov.u64 %0, %%clock64;" : "=l"(now) :: "memory"); \\
     if (threadIdx.x == 0 && blockIdx.x == {group}u) expertile_cycles[n] = now; }}
"""
PLACE_CLOCKS: list[tuple[str, str, str]] = [  # name of what ends there, text, "before" or "behind"
    ("offsets of the experts", OWNED, "before"),
    ("tiles and padding", BARRIER + "\n  uint row = plan_rank<16>(", "before"),
    ("barrier", "uint row = plan_rank<16>(", "before"),
    ("rank", PUT, "before"),
    ("placing", PUT, "behind"),
]  # fmt: skip
CLOCKS = {
    "mm_place_from_counts": [
        ("ids, clearing, entries before the part, match", "plan_owned_counts<1>(args, bcnt", "before"),
        ("counts of the blocks", "plan_place_behind<1>(args, part", "before"),
        *PLACE_CLOCKS,
    ],
    "mm_single": [
        ("ids, clearing", "const bool with_block =", "before"),
        ("counting, match", "if (with_block) {\n     uint* row = bcnt", "before"),
        ("counts of a block", "plan_place_part<1>(args, part", "before"),
        *PLACE_CLOCKS,
    ],
}


def replaced(text: str, edit: Edit) -> str:
    old, new = edit
    assert text.count(old) == 1, f"expected once, got {text.count(old)} times: {old}"
    return text.replace(old, new)


class Texts:
    """The kernels' CUDA text, and its compiler."""

    def __init__(self) -> None:
        sources = lower_cuda.read_all("c++", [METAL / "kernels"], METAL / "include", METAL / "portability")
        self.shim = lower_cuda.shim_texts(METAL / "portability")
        self.nvrtc: Any = None
        self.files, self.entries, self.threads = {}, {}, {}
        for source in sources:
            for kernel in source.kernels:
                if kernel.name in KERNELS:
                    self.files[kernel.name] = lower_cuda.file_text(source)
                    self.entries[kernel.name] = lower_cuda.entry_text(kernel)
                    self.threads[kernel.name] = int(eval(lower_cuda.threads_text(kernel)))

    def compile(self, kernel: str, file: str, entry: str, shim: dict[str, str] | None = None) -> bytes:
        headers = {**self.shim, **(shim or {}), "kernel.cuh": file}
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        self.nvrtc = self.nvrtc or load_nvrtc()
        nvrtc, source = self.nvrtc, f'#include "kernel.cuh"\n{entry}'.encode()
        names, values = texts(list(headers)), texts(list(headers.values()))
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"isolate.cu", len(headers), values, names)
        result = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), texts(list(OPTIONS)))
        nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetProgramLog(program, log)
        assert result == 0, f"{kernel}: {log.value.decode()}"
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, code)
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        return code.raw

    def forms(self) -> dict[tuple[str, str], bytes]:
        """Machine code by kernel and what was done to it."""
        codes = {}
        first = {"threads.h": replaced(self.shim["threads.h"], (WAIT, f"{EARLY} {WAIT}"))}
        for kernel, parts in KERNELS.items():
            file, entry = self.files[kernel], self.entries[kernel]
            codes[kernel, "whole"] = self.compile(kernel, file, entry)
            empty = replaced(entry, (ENTER, f"{ENTER} {AWAIT} if (grid_rows != ~0u) return;"))
            codes[kernel, "empty"] = self.compile(kernel, file, empty)
            codes[kernel, "next launch ahead of the wait"] = self.compile(kernel, file, entry, first)
            waiting = replaced(entry, (ENTER, f"{ENTER} {AWAIT}"))
            codes[kernel, "waits at its start"] = self.compile(kernel, file, waiting)
            for name, edit in parts.items():
                codes[kernel, name] = self.compile(kernel, replaced(file, edit), entry)
        for kernel, group in itertools.product(CLOCKS, (0, 1)):
            codes[kernel, f"clocks of group {group}"] = self.clocked(kernel, group)
        return codes

    def clocked(self, kernel: str, group: int) -> bytes:
        file = self.files[kernel]
        for i, (_, text, where) in enumerate(CLOCKS[kernel]):
            clock = CLOCK.format(i + 1)
            assert text in file, f"expected: {text}"  # of the kernels that share a file, only one is compiled
            file = file.replace(text, clock + text if where == "before" else text + clock)
        include = '#include "metal_cuda.h"\n'
        file = replaced(file, (include, include + CLOCK_TEXT.format(group=group)))
        entry = replaced(self.entries[kernel], (ENTER, f"{ENTER} {AWAIT} {CLOCK.format(0)}"))
        return self.compile(kernel, file, entry)


class Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("gx", "gy", "gz", "bx", "by", "bz", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint),
    )


class Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


PROGRAMMATIC = Attribute(6, 0, 1)


class Gpu:
    def __init__(self) -> None:
        import torch

        torch.zeros(1, device="cuda")
        self.torch, self.cuda = torch, ctypes.CDLL("libcuda.so.1")

    def check(self, result: int, where: str) -> None:
        assert result == 0, f"{where}: error {result}"

    def function(self, code: bytes, name: str) -> tuple[Any, Any]:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.cuda.cuModuleLoadData(ctypes.byref(module), code), name)
        self.check(self.cuda.cuModuleGetFunction(ctypes.byref(function), module, name.encode()), name)
        return module, function

    def launch(self, function: Any, groups: int, threads: int, args: bytes, buffers: list[Any]) -> None:
        stream = self.torch.cuda.current_stream().cuda_stream
        packed = ctypes.create_string_buffer(args, len(args))
        pointers = [ctypes.c_void_p(buffer.data_ptr()) for buffer in buffers]
        rows = ctypes.c_uint(1)
        parameters = (ctypes.c_void_p * (len(buffers) + 2))(
            *[ctypes.addressof(one) for one in (packed, *pointers, rows)]
        )
        attribute = ctypes.addressof(PROGRAMMATIC)
        config = Config(groups, 1, 1, threads, 1, 1, 0, stream, attribute, 1)
        self.check(self.cuda.cuLaunchKernelEx(ctypes.byref(config), function, parameters, None), "launch")

    def time(self, launches: list[tuple[Any, ...]]) -> dict[str, float]:
        """Of one after the other, LAUNCHES times over; us a time over."""
        torch = self.torch
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(LAUNCHES):
                for launch in launches:
                    self.launch(*launch)
        times = []
        for _ in range(REPEATS + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / LAUNCHES)
        times = sorted(times[3:])
        return {"us": times[len(times) // 2], "us_p10": times[len(times) // 10], "us_p90": times[-len(times) // 10]}

    def cycles(self, module: Any, names: list[str]) -> dict[str, int]:
        self.torch.cuda.synchronize()
        address, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.check(
            self.cuda.cuModuleGetGlobal_v2(ctypes.byref(address), ctypes.byref(size), module, b"expertile_cycles"),
            "cycles",
        )
        values = (ctypes.c_longlong * 16)()
        self.check(self.cuda.cuMemcpyDtoH_v2(values, address, ctypes.sizeof(values)), "cycles")
        return {name: values[i + 1] - values[i] for i, name in enumerate(names)}


def buffers_of(gpu: Gpu, n_tokens: int) -> tuple[bytes, dict[str, list[Any]]]:
    torch = gpu.torch
    entries, rows = n_tokens * K, max_rows(n_tokens, K, E, M)
    blocks = -(-entries // 1024)
    generator = torch.Generator(device="cuda").manual_seed(n_tokens)
    scores = torch.rand(n_tokens, E, device="cuda", generator=generator)
    ids = scores.topk(K, dim=1).indices.to(torch.int32).contiguous()
    weights = torch.rand(n_tokens, K, device="cuda", generator=generator)

    def words(n: int) -> Any:
        return torch.zeros(n, dtype=torch.int32, device="cuda")

    counts = words(blocks * E)
    rest = [words(E + 1), words(rows // M * 4), words(rows), words(rows), words(entries), words(14)]
    args = struct.pack("<9I", n_tokens, E, K, M, entries, blocks, rows, 10, 40)
    both = [ids, weights, counts, *rest]
    return args, {"mm_hist": [ids, counts], "mm_place_from_counts": both, "mm_single": both}


def main(arguments: list[str]) -> int:
    gpu, text, device = Gpu(), Texts(), expertile.open_device("cuda")
    codes = text.forms()
    loaded = {key: gpu.function(code, key[0]) for key, code in codes.items()}
    rows: list[dict[str, Any]] = []
    for n_tokens in (128, 512, 1024, 2048):
        args, buffers = buffers_of(gpu, n_tokens)
        blocks = -(-n_tokens * K // 1024)
        groups = {"mm_hist": blocks, "mm_place_from_counts": max(4 * blocks, 16), "mm_single": max(4 * blocks, 16)}

        def launch(kernel: str, form: str) -> tuple[Any, ...]:
            function = loaded[kernel, form][1]
            return function, groups[kernel], text.threads[kernel], args, buffers[kernel]  # noqa: B023

        for kernel, form in codes:
            row: dict[str, Any] = {"tokens": n_tokens, "kernel": kernel, "form": form}
            if kernel == "mm_place_from_counts":  # its input; also a warm-up
                gpu.launch(*launch("mm_hist", "whole"))
            row |= gpu.time([launch(kernel, form)])
            if form.startswith("clocks"):
                row["cycles"] = gpu.cycles(loaded[kernel, form][0], [name for name, *_ in CLOCKS[kernel]])
            rows.append(row)
        place = "mm_place_from_counts"
        alone = ("next launch ahead of the wait", "waits at its start", "empty")
        seconds = ("whole", "matches behind the wait", "eight loads at once", "16 loads at once")
        pairs = [*((form, form) for form in alone), *(("whole", form) for form in seconds)]
        for first, second in pairs:
            time = gpu.time([launch("mm_hist", first), launch(place, second)])
            rows.append(
                {"tokens": n_tokens, "kernel": "mm_hist, mm_place_from_counts", "form": f"{first}; {second}", **time}
            )
        for row in rows:
            if row["tokens"] == n_tokens:
                print(
                    f"{n_tokens:>6} {row['kernel']:<30} {row['form']:<56} {row['us']:7.2f} {row.get('cycles', '')}",
                    flush=True,
                )
        write(Path(arguments[0]), envelope("isolate plan", True, rows, device, run_of()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
