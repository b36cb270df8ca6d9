"""The kernels of the plan (metal/kernels/plan.metal, plan_fused.metal): what each has to do for one `Load`."""

from __future__ import annotations

from collections.abc import Callable

from expertile.plan import META_WORDS
from expertile.predict.work import LANES, LINE_BYTES, Load, Work, ceil_div

PLAN_THREADS = 1024
PLACE_THREADS = 512
PLACE_GROUPS = 16
MIDDLE_LAUNCH_BLOCKS = 96
SCAN_STEPS = 5  # plan_scan: prefix sum, store, barrier, load, prefix sum


def _bits(n_experts: int) -> int:
    return n_experts.bit_length()


def _scan_bytes(load: Load) -> int:
    """expert_offset, tiles and meta."""
    return 4 * (load.n_experts + 1) + 16 * load.n_tiles + 4 * META_WORDS


def _finish_steps(load: Load) -> int:
    """plan_finish: the scan, tile_start, a barrier; then for each 1,024 tiles a bisection and the tile's end."""
    owned = ceil_div(load.n_experts, PLAN_THREADS)
    return SCAN_STEPS + owned + 1 + ceil_div(load.n_tiles, PLAN_THREADS) * (_bits(load.n_experts - 1) + 1)


def _finish_operations(load: Load) -> int:
    return 40 * load.n_experts + 3 * load.n_tiles * _bits(load.n_experts - 1)


def _finish_lines(load: Load) -> float:
    return load.n_experts / LANES + 16 * load.n_tiles / LINE_BYTES


def _pad_steps(load: Load) -> int:
    """plan_pad: an expert a simdgroup, one after the other."""
    return ceil_div(load.n_experts, PLAN_THREADS // LANES)


def _walk_steps(load: Load) -> int:
    """plan_walk_blocks: eight blocks' loads at once, what is left one by one; for every expert that a thread owns."""
    return ceil_div(load.n_experts, PLAN_THREADS) * (load.n_blocks // 8 + load.n_blocks % 8)


def _scatter_lines(load: Load) -> float:
    """ids, weights and position lie side by side; an entry's row_token and row_weight are on lines of their own."""
    return 3 * load.n_entries / LANES + 2 * load.n_kept


def mm_clear(load: Load) -> Work:
    return Work(ceil_div(load.max_rows, 256), 256, 0, 8 * load.max_rows, 0, 0, 0, 2 * load.max_rows / LANES)


def mm_hist(load: Load) -> Work:
    # zero, barrier, atomic, barrier, load
    return Work(
        load.n_blocks,
        PLAN_THREADS,
        4 * load.n_entries,
        4 * load.count_words,
        load.n_kept,
        device_steps=1,
        shared_steps=5,
        lines=(load.n_entries + load.count_words) / LANES,
    )


def mm_scan(load: Load) -> Work:
    return Work(
        1,
        PLAN_THREADS,
        4 * load.count_words,
        4 * load.count_words + _scan_bytes(load),
        load.count_words + _finish_operations(load),
        device_steps=_walk_steps(load),
        shared_steps=_finish_steps(load),
        lines=2 * load.count_words / LANES + _finish_lines(load),
    )


def mm_scan_pad(load: Load) -> Work:
    scan = mm_scan(load)
    return Work(
        1,
        PLAN_THREADS,
        scan.read_bytes,
        scan.write_bytes + 8 * load.n_padding,
        scan.operations + 2 * load.n_padding,
        device_steps=scan.device_steps,
        shared_steps=scan.shared_steps + _pad_steps(load),
        lines=scan.lines + 2 * load.n_active,
    )


def _place(load: Load, operations: float, shared_steps: float) -> Work:
    """ids, then expert_offset and block_offset of what they name."""
    offsets = 2 * min(LANES, load.n_experts / LANES)  # lines of them that 32 entries touch
    return Work(
        load.n_blocks,
        PLAN_THREADS,
        4 * load.n_entries + 4 * load.n_kept + 4 * load.n_pairs + 4 * load.n_active,
        8 * load.n_kept + 4 * load.n_entries,
        operations,
        device_steps=2,
        shared_steps=shared_steps,
        lines=_scatter_lines(load) + offsets * load.n_entries / LANES,
    )


def mm_place(load: Load) -> Work:
    # store, barrier, then one compare and one add for each entry before
    return _place(load, 2 * load.n_before + 3 * load.n_kept, 2 + load.depth)


def _rank_operations(load: Load) -> int:
    """plan_match: three operations a bit; the bytes of 32 sub-blocks: six a word."""
    return load.n_entries * (3 * _bits(load.n_experts) + 8 * 6 + 7)


def mm_place_two_level(load: Load) -> Work:
    # clear, barrier, publish, barrier, load
    return _place(load, _rank_operations(load), 5)


def mm_onegroup(load: Load) -> Work:
    # a block: barrier, atomic, barrier, load and zero
    return Work(
        1,
        PLAN_THREADS,
        4 * load.n_entries,
        8 * load.count_words + _scan_bytes(load) + 8 * load.n_padding,
        load.n_kept + 2 * load.count_words + _finish_operations(load),
        device_steps=load.n_blocks,
        shared_steps=4 * load.n_blocks + _finish_steps(load) + _pad_steps(load),
        lines=(load.n_entries + 2 * load.count_words) / LANES + _finish_lines(load) + 2 * load.n_active,
    )


def mm_scan_blocks(load: Load) -> Work:
    share = ceil_div(load.n_blocks, 32)
    return Work(
        ceil_div(load.n_experts, LANES),
        PLAN_THREADS,
        4 * load.count_words,
        4 * load.count_words,
        2 * load.count_words,
        device_steps=ceil_div(share, 8) + share,
        shared_steps=2 + 31,
        lines=3 * load.count_words / LANES,
    )


def _place_part(
    load: Load, read_bytes: float, device_steps: int, count_lines: float, parts: int = 2, counting: bool = False
) -> Work:
    """clear, barrier, count, publish, scan, next row, barrier, rank, next row; `count_lines` of every threadgroup.

    counting: every threadgroup counts all entries itself, and they write the blocks' counts among them.
    """
    groups = max(parts * load.n_blocks, PLACE_GROUPS)
    counted = 4 * load.count_words if counting else 0
    return Work(
        groups,
        PLACE_THREADS,
        8 * load.n_entries + read_bytes,
        counted + _scan_bytes(load) + 8 * load.n_rows + 4 * load.n_entries,
        _rank_operations(load) + groups * (60 * load.n_experts + (load.n_entries if counting else 0)),
        device_steps=device_steps,
        shared_steps=4 + SCAN_STEPS + 4,
        lines=_scatter_lines(load) + 2 * load.n_padding + load.n_tiles + groups * count_lines,
    )


def mm_place_from_counts(load: Load) -> Work:
    # ids and weights are on their way while the counts are summed
    owned = ceil_div(load.n_experts, PLACE_THREADS)
    steps = owned * ceil_div(load.n_blocks, 8 if load.n_blocks <= 8 else 24)
    return _place_part(load, 4 * load.count_words, steps, load.count_words / LANES)


def mm_single(load: Load) -> Work:
    # four ids a thread on their way at a time; the ids of the part are among them
    steps = ceil_div(load.n_entries, 4 * PLACE_THREADS)
    return _place_part(load, 0, steps, load.n_entries / LANES, parts=4, counting=True)


def mm_place_from_offsets(load: Load) -> Work:
    read_bytes = 4 * load.count_words + 4 * load.n_experts
    return _place_part(load, read_bytes, 1, 3 * load.n_experts / LANES)


PLAN_KERNELS: dict[str, Callable[[Load], Work]] = {
    "mm_clear": mm_clear,
    "mm_hist": mm_hist,
    "mm_scan": mm_scan,
    "mm_scan_pad": mm_scan_pad,
    "mm_place": mm_place,
    "mm_place_two_level": mm_place_two_level,
    "mm_onegroup": mm_onegroup,
    "mm_scan_blocks": mm_scan_blocks,
    "mm_place_from_counts": mm_place_from_counts,
    "mm_place_from_offsets": mm_place_from_offsets,
    "mm_single": mm_single,
}


def plan_launches(variant: str, n_blocks: int) -> list[list[str]]:
    """The groups of a plan, each a list of kernels that may run at the same time. ValueError for another name.

    >>> plan_launches("baseline", 20)
    [['mm_clear', 'mm_hist'], ['mm_scan'], ['mm_place']]
    """
    place = ["mm_place_from_counts"]
    if n_blocks >= MIDDLE_LAUNCH_BLOCKS:
        place = ["mm_scan_blocks", "mm_place_from_offsets"]
    groups = {
        "baseline": [["mm_clear", "mm_hist"], ["mm_scan"], ["mm_place"]],
        "padscan": [["mm_hist"], ["mm_scan_pad"], ["mm_place_two_level"]],
        "onegroup": [["mm_onegroup"], ["mm_place_two_level"]],
        "two_dispatch": [["mm_hist"], *([kernel] for kernel in place)],
        "single": [["mm_single"]],
    }
    if variant not in groups:
        raise ValueError(f"[--variants] expected some of {', '.join(groups)}, got {variant}")
    return groups[variant]
