"""Gather, the experts' products and the sum of their rows: what each kernel has to do for one `Load`."""

from __future__ import annotations

from collections.abc import Callable

from expertile.predict.work import COPY_THREADS, LANES, LINE_BYTES, Load, Work, ceil_div

IQ2_XS, IQ4_NL = 74 / 256, 18 / 32  # bytes of a weight
# Column tile and simdgroups of the grouped products.
GATE_UP_TILE, DOWN_TILE = (32, 4), (64, 2)


def _gather(load: Load, value_bytes: int) -> Work:
    """meta, row_token, the token's row: a padding row needs no third load."""
    row_bytes = load.dim * value_bytes
    return Work(
        load.n_rows,
        COPY_THREADS,
        4 * load.n_rows + row_bytes * load.n_sources,
        row_bytes * load.n_rows,
        0,
        device_steps=2 + load.n_kept / load.n_rows * ceil_div(row_bytes, 16 * 4 * COPY_THREADS),
        shared_steps=0,
        lines=row_bytes * (load.n_kept + load.n_rows) / LINE_BYTES,
    )


def mm_gather(load: Load) -> Work:
    return _gather(load, 4)


def mm_gather_h(load: Load) -> Work:
    return _gather(load, 2)


def _gemm_grouped(
    load: Load, sizes: tuple[int, int], tile: tuple[int, int], weight_bytes: float, row_value_bytes: int = 2
) -> Work:
    """sizes: n_cols, n_inner. The padding rows are multiplied, and neither read nor written.

    The waits of the inner loop are not counted: other threadgroups fill them. What they cost is in the rate at which
    weights are decoded.
    """
    n_cols, n_inner = sizes
    columns, simdgroups = tile
    matrix = n_cols * n_inner
    row_bytes, column_tiles = row_value_bytes * n_inner, ceil_div(n_cols, columns)
    read = load.n_active * matrix * weight_bytes + load.n_kept * row_bytes
    write = 4 * load.n_kept * n_cols
    asked = load.n_tiles * matrix * weight_bytes + load.n_kept * row_bytes * column_tiles + write
    return Work(
        load.n_tiles * column_tiles,
        simdgroups * LANES,
        read,
        write,
        0,
        device_steps=0,
        shared_steps=0,
        lines=asked / LINE_BYTES,
        flops=2 * load.n_rows * matrix,
        decoded=load.n_tiles * matrix,
    )


def gemm_gate(load: Load) -> Work:
    return _gemm_grouped(load, (load.ffn, load.dim), GATE_UP_TILE, IQ2_XS)


def gemm_gate_fp32(load: Load) -> Work:
    """On fp32 rows: what followed the fp32 gather. Not a kernel of ours."""
    return _gemm_grouped(load, (load.ffn, load.dim), GATE_UP_TILE, IQ2_XS, 4)


def gemm_down(load: Load) -> Work:
    return _gemm_grouped(load, (load.dim, load.ffn), DOWN_TILE, IQ4_NL)


def act_f16_v4(load: Load) -> Work:
    """meta, row_token, gate and up. Eight operations a value, the exponential one of them."""
    return Work(
        load.n_rows,
        COPY_THREADS,
        4 * load.n_rows + 8 * load.n_kept * load.ffn,
        2 * load.n_rows * load.ffn,
        8 * load.n_kept * load.ffn,
        device_steps=2 + load.n_kept / load.n_rows * ceil_div(load.ffn, 4 * COPY_THREADS),
        shared_steps=0,
        lines=load.ffn * (8 * load.n_kept + 2 * load.n_rows) / LINE_BYTES,
    )


def mm_combine_v4(load: Load) -> Work:
    """position, then weights and rows, five slots at a time."""
    top_k = load.n_entries // load.n_tokens
    chunks = ceil_div(load.dim, 4 * COPY_THREADS)
    moved = 4 * load.dim * (load.n_kept + load.n_tokens)
    return Work(
        load.n_tokens * chunks,
        COPY_THREADS,
        4 * load.n_entries + 4 * load.n_kept + 4 * load.n_kept * load.dim,
        4 * load.n_tokens * load.dim,
        2 * load.n_kept * load.dim,
        device_steps=2 * ceil_div(top_k, 5),
        shared_steps=0,
        lines=moved / LINE_BYTES,
    )


EXPERT_KERNELS: dict[str, Callable[[Load], Work]] = {
    "mm_gather": mm_gather,
    "mm_gather_h": mm_gather_h,
    "gemm_gate": gemm_gate,
    "gemm_gate_fp32": gemm_gate_fp32,
    "gemm_down": gemm_down,
    "act_f16_v4": act_f16_v4,
    "mm_combine_v4": mm_combine_v4,
}
