"""The plan: which row each entry goes to. This numpy version defines what the kernels must give.

The entries ``i = token * K + slot`` are sorted by expert, in their order inside an expert (a stable sort), and the rows
of each expert are padded to a multiple of ``tile_rows``::

    position[i] = expert_offset[e] + #{j < i : ids[j] = e},    e = ids[i]

Three tokens, two slots each, four experts, tiles of two rows. Token 1 leaves a slot out; expert 1 is never chosen:

>>> import numpy as np
>>> ids = np.array([[2, 0], [-1, 2], [3, 2]], dtype=np.int32)
>>> weights = np.array([[0.75, 0.25], [0.0, 1.0], [0.5, 0.5]], dtype=np.float32)
>>> plan = make_plan(ids, weights, n_experts=4, tile_rows=2)
>>> plan.expert_offset.tolist()  # expert 0 owns rows 0-1, expert 1 none, expert 2 rows 2-5, expert 3 rows 6-7
[0, 2, 2, 6, 8]
>>> plan.row_token.tolist()
[0, -1, 0, 1, 2, -1, 2, -1]
>>> plan.row_weight.tolist()
[0.25, 0.0, 0.75, 1.0, 0.5, 0.0, 0.5, 0.0]
>>> plan.position.reshape(3, 2).tolist()
[[2, 0], [-1, 3], [6, 4]]
>>> plan.tiles.tolist()  # expert, first row, real rows, 0
[[0, 0, 1, 0], [2, 2, 2, 0], [2, 4, 1, 0], [3, 6, 1, 0]]
>>> plan.n_rows, plan.n_tiles, plan.n_kept, plan.n_active, plan.largest
(8, 4, 5, 3, 3)
>>> round(plan.padding, 2)  # rows for every entry kept
1.6
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK_ENTRIES = 1024
META_WORDS = 14
MAX_EXPERTS = 4096
MAX_TOP_K = 32
MAX_TOKENS = 1 << 20
MAX_TILE_ROWS = 65535  # together they keep T*K + E*(M-1), and so every row, below 2^31

UintArray = npt.NDArray[np.uint32]
IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Plan:
    """The arrays of a plan.

    ============= ====== =========== ==================================================================
    block_count   uint32 n_blocks, E entries of an expert in each block of 1,024 entries
    block_offset  uint32 n_blocks, E entries of an expert in earlier blocks
    expert_offset uint32 E + 1       first row of an expert; the last is n_rows
    tiles         uint32 n_tiles, 4  expert, first row, real rows in the tile (1..M), 0
    row_token     int32  n_rows      token of the row, -1 = padding
    row_weight    fp32   n_rows      weight of the row, +0 for padding
    position      int32  T * K       row of the entry, -1 = skipped
    meta          uint32 14          n_rows, n_tiles, entries kept, active experts, rows of the largest
                                     expert, and three grids: over rows, gate/up, down
    ============= ====== =========== ==================================================================
    """

    block_count: UintArray
    block_offset: UintArray
    expert_offset: UintArray
    tiles: UintArray
    row_token: IntArray
    row_weight: FloatArray
    position: IntArray
    meta: UintArray

    @property
    def n_rows(self) -> int:
        """Rows, padding included."""
        return int(self.meta[0])

    @property
    def n_tiles(self) -> int:
        """Tiles of `tile_rows` rows."""
        return int(self.meta[1])

    @property
    def n_kept(self) -> int:
        """Entries that are not skipped."""
        return int(self.meta[2])

    @property
    def n_active(self) -> int:
        """Experts with a row."""
        return int(self.meta[3])

    @property
    def largest(self) -> int:
        """Real rows of the expert that has the most."""
        return int(self.meta[4])

    @property
    def padding(self) -> float:
        """Rows, padding included, for every entry kept; 1 where nothing is kept."""
        return self.n_rows / self.n_kept if self.n_kept else 1.0

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def max_rows(n_tokens: int, top_k: int, n_experts: int, tile_rows: int) -> int:
    """Bound on n_rows, a multiple of tile_rows, that holds for every choice of ids.

    >>> max_rows(n_tokens=3, top_k=2, n_experts=4, tile_rows=2)
    10
    """
    entries = n_tokens * top_k
    bound = entries + min(entries, n_experts) * (tile_rows - 1)
    return -(-bound // tile_rows) * tile_rows


def _check_sizes(n_tokens: int, top_k: int, n_experts: int, tile_rows: int) -> None:
    for name, value, limit in (
        ("n_experts", n_experts, MAX_EXPERTS),
        ("top_k", top_k, min(n_experts, MAX_TOP_K)),
        ("tile_rows", tile_rows, MAX_TILE_ROWS),
    ):
        if not 1 <= value <= limit:
            raise ValueError(f"[plan: {name}] expected 1 to {limit}, got {value}")
    if n_tokens > MAX_TOKENS:
        raise ValueError(f"[plan: n_tokens] expected at most {MAX_TOKENS}, got {n_tokens}")


def _check_arrays(ids: npt.ArrayLike, weights: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], FloatArray]:
    id_array, weight_array = np.asarray(ids), np.asarray(weights)
    if id_array.ndim != 2 or id_array.dtype.kind not in "iu":
        raise ValueError(f"[plan: ids] expected integers [T, K], got {id_array.dtype} {list(id_array.shape)}")
    if weight_array.shape != id_array.shape or weight_array.dtype.kind != "f":
        raise ValueError(
            f"[plan: weights] expected floats {list(id_array.shape)}, "
            f"got {weight_array.dtype} {list(weight_array.shape)}"
        )
    if id_array.dtype == np.uint64 and id_array.size and int(id_array.max()) >= 1 << 31:
        raise ValueError(f"[plan: ids] expected ids below 2^31, got {int(id_array.max())}")
    return id_array.astype(np.int64), np.ascontiguousarray(weight_array, dtype=np.float32)


def _exclusive_cumsum(counts: npt.NDArray[np.int64], axis: int = 0) -> npt.NDArray[np.int64]:
    return np.cumsum(counts, axis=axis) - counts


def _make_tiles(counts: npt.NDArray[np.int64], tile_rows: int) -> UintArray:
    n_tiles = -(-counts // tile_rows)
    expert = np.repeat(np.arange(len(counts)), n_tiles)
    in_expert = np.arange(len(expert)) - _exclusive_cumsum(n_tiles)[expert]
    real = np.minimum(counts[expert] - in_expert * tile_rows, tile_rows)
    first_row = np.arange(len(expert)) * tile_rows
    return np.stack([expert, first_row, real, np.zeros_like(real)], axis=1).astype(np.uint32)


def _make_meta(counts: npt.NDArray[np.int64], tile_rows: int, gate_up_columns: int, down_columns: int) -> UintArray:
    n_tiles = int((-(-counts // tile_rows)).sum())
    n_rows = n_tiles * tile_rows
    sums = [n_rows, n_tiles, int(counts.sum()), int((counts > 0).sum()), int(counts.max())]
    grids = [n_rows, 1, 1, gate_up_columns, n_tiles, 1, down_columns, n_tiles, 1]
    return np.array(sums + [max(size, 1) for size in grids], dtype=np.uint32)


def make_plan(
    ids: npt.ArrayLike,
    weights: npt.ArrayLike,
    n_experts: int,
    tile_rows: int,
    gate_up_columns: int = 1,
    down_columns: int = 1,
    *,
    _skip_unknown: bool = False,
) -> Plan:
    """Sort the entries of ``ids`` into rows and tiles.

    ids             integers T, K  expert of the entry, -1 = skipped
    weights         floats   T, K  router weight of the entry, rounded to fp32
    n_experts       E              at most 4096
    tile_rows       M              each expert's rows are padded to a multiple of it
    gate_up_columns                column tiles of the gate/up GEMM, for the grid in meta
    down_columns                   column tiles of the down GEMM

    Raises ValueError for an id that is neither -1 nor in 0..E-1 and for sizes beyond the limits of the engine.
    ``_skip_unknown`` skips such ids instead, as the kernels do.
    """
    id_array, weight_array = _check_arrays(ids, weights)
    n_tokens, top_k = id_array.shape
    _check_sizes(n_tokens, top_k, n_experts, tile_rows)
    flat = id_array.ravel()
    known = (flat >= 0) & (flat < n_experts)
    if not _skip_unknown and not np.all(known | (flat == -1)):
        entry = int(np.flatnonzero(~known & (flat != -1))[0])
        raise ValueError(
            f"[plan: ids[{entry // top_k}, {entry % top_k}]] expected -1 or 0 to {n_experts - 1}, got {flat[entry]}"
        )

    n_blocks = -(-flat.size // BLOCK_ENTRIES)
    kept = np.flatnonzero(known)
    block_count = np.zeros((n_blocks, n_experts), dtype=np.int64)
    np.add.at(block_count, (kept // BLOCK_ENTRIES, flat[kept]), 1)
    counts = block_count.sum(axis=0)
    padded = -(-counts // tile_rows) * tile_rows
    expert_offset = np.concatenate([[0], np.cumsum(padded)])
    n_rows = int(expert_offset[-1])

    by_expert = kept[np.argsort(flat[kept], kind="stable")]
    rank = np.arange(kept.size) - np.repeat(_exclusive_cumsum(counts), counts)
    rows = expert_offset[flat[by_expert]] + rank
    position = np.full(flat.size, -1, dtype=np.int32)
    position[by_expert] = rows
    row_token = np.full(n_rows, -1, dtype=np.int32)
    row_token[rows] = by_expert // top_k
    row_weight = np.zeros(n_rows, dtype=np.float32)
    row_weight[rows] = weight_array.ravel()[by_expert]
    return Plan(
        block_count=block_count.astype(np.uint32),
        block_offset=_exclusive_cumsum(block_count).astype(np.uint32),
        expert_offset=expert_offset.astype(np.uint32),
        tiles=_make_tiles(counts, tile_rows),
        row_token=row_token,
        row_weight=row_weight,
        position=position,
        meta=_make_meta(counts, tile_rows, gate_up_columns, down_columns),
    )


def argsort_plan(
    ids: IntArray, weights: FloatArray, n_experts: int, tile_rows: int
) -> tuple[UintArray, UintArray, IntArray, FloatArray, IntArray]:
    """The peer that the plan is timed against: the usual stable-argsort pipeline, on int32, nothing checked.

    Gives expert_offset, tiles, row_token, row_weight and position of `make_plan`, for ids that are -1 or in 0..E-1.

    >>> ids = np.array([[2, 0], [-1, 2], [3, 2]], dtype=np.int32)
    >>> argsort_plan(ids, np.ones((3, 2), np.float32), n_experts=4, tile_rows=2)[4].tolist()
    [2, 0, -1, 3, 6, 4]
    """
    flat = ids.ravel()
    order = np.argsort(flat, kind="stable").astype(np.int32)
    order = order[flat.size - np.count_nonzero(flat >= 0) :]  # the skipped come first
    experts = flat[order]
    counts = np.bincount(experts, minlength=n_experts).astype(np.int32)
    n_tiles = (counts + np.int32(tile_rows - 1)) // np.int32(tile_rows)
    expert_offset = np.zeros(n_experts + 1, dtype=np.int32)
    np.cumsum(n_tiles * np.int32(tile_rows), out=expert_offset[1:])
    before = np.cumsum(counts, dtype=np.int32) - counts
    rows = np.arange(order.size, dtype=np.int32) + np.repeat(expert_offset[:-1] - before, counts)
    position = np.full(flat.size, -1, dtype=np.int32)
    position[order] = rows
    row_token = np.full(int(expert_offset[-1]), -1, dtype=np.int32)
    row_token[rows] = order // np.int32(ids.shape[1])
    row_weight = np.zeros(int(expert_offset[-1]), dtype=np.float32)
    row_weight[rows] = weights.ravel()[order]
    tile_expert = np.repeat(np.arange(n_experts, dtype=np.int32), n_tiles)
    first_row = np.arange(tile_expert.size, dtype=np.int32) * np.int32(tile_rows)
    real = np.minimum(counts[tile_expert] - (first_row - expert_offset[tile_expert]), np.int32(tile_rows))
    tiles = np.stack([tile_expert, first_row, real, np.zeros_like(real)], axis=1).astype(np.uint32)
    return expert_offset.astype(np.uint32), tiles, row_token, row_weight, position


def empty_plan(n_experts: int) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a plan of no tokens, by name, as Window.plan gives them."""
    none = {"block_count": (0, n_experts), "expert_offset": (n_experts + 1,), "meta": (14,), "tiles": (0, 4)}
    result: dict[str, npt.NDArray[Any]] = {name: np.zeros(shape, np.uint32) for name, shape in none.items()}
    result["meta"][5:] = 1
    for name in ("position", "row_token"):
        result[name] = np.zeros(0, np.int32)
    result["row_weight"] = np.zeros(0, np.float32)
    return result
