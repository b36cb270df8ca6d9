"""Times the grouped GEMM of the cpu device: GFLOP/s by rows an expert. No test.

    python tests/measure_gemm.py [--types IQ2_XS:2560:640,IQ4_NL:640:2560] [--precisions exact,bf16]
        [--instructions amx,avx512] [--rows 1,2,5,10,20,40,80] [--threads 2] [--experts 48]

Every expert has weights of its own, so that they come from memory as in a layer. Best of five.
"""

from __future__ import annotations

import argparse
import struct
from typing import Any

import numpy as np
from cases import random_weight

from expertile import _core, quants

TILE = (16, 64, 32, 2)


def best_seconds(device: Any, weights: list[Any], table: Any, n_rows: int, precision: str) -> float:
    type_name, (n_inner, n_cols) = weights[0].type, weights[0].shape
    padded = -(-n_rows // TILE[0]) * TILE[0]
    x = np.random.default_rng(1).standard_normal((len(weights) * padded, n_inner)).astype(np.float16)
    tiles = [
        (expert, expert * padded + row, min(TILE[0], n_rows - row), 0)
        for expert in range(len(weights))
        for row in range(0, n_rows, TILE[0])
    ]
    meta = np.zeros(14, np.uint32)
    meta[:2] = len(x), len(tiles)
    y = np.zeros((len(x), n_cols), np.float32)
    args = struct.pack("<IIIfQ", 0, n_cols, n_inner, 1.0, quants.tensor_bytes(type_name, (n_inner,)))
    scales = np.ones(len(weights), np.float32)
    buffers = [device.upload(array) for array in (x, table, scales, np.array(tiles, np.uint32), meta, y)]
    kernel = f"gemm_grouped_{type_name.lower()}_" + "_".join(map(str, TILE))
    grid = [-(-n_cols // TILE[1]), len(tiles), 1]
    return min(_core.run_kernel(device, kernel, args, buffers, grid, precision) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="IQ2_XS:2560:640,IQ4_NL:640:2560")
    parser.add_argument("--precisions", default="exact,bf16")
    parser.add_argument("--instructions", default=",".join(_core.cpu_instructions()))
    parser.add_argument("--rows", default="1,2,5,10,20,40,80")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--experts", type=int, default=48)
    arguments = parser.parse_args()
    rows = [int(text) for text in arguments.rows.split(",")]
    print(f"{'GFLOP/s by rows an expert':42}" + "".join(f"{n:>8}" for n in rows))
    for text in arguments.types.split(","):
        type_name, n_inner, n_cols = text.split(":")
        shape = (int(n_inner), int(n_cols))
        weights = [random_weight(type_name, shape, np.random.default_rng(i)) for i in range(arguments.experts)]
        for instructions in arguments.instructions.split(","):
            device = _core.open_device("cpu", threads=arguments.threads, instructions=instructions)
            kept = [device.upload(weight.data) for weight in weights]
            table = np.array([buffer.address for buffer in kept], np.uint64)
            for precision in arguments.precisions.split(","):
                figures = []
                for n_rows in rows:
                    seconds = best_seconds(device, weights, table, n_rows, precision)
                    figures.append(2e-9 * n_rows * shape[0] * shape[1] * len(weights) / seconds)
                label = f"{type_name} {shape[0]} x {shape[1]} {instructions} {precision}"
                print(f"{label:42}" + "".join(f"{figure:8.1f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
