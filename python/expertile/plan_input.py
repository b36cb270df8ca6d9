"""A plan that a caller hands in: the kernels follow its numbers into memory, so each is checked first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from expertile.arrays import checked, instance
from expertile.plan import max_rows

PLAN_INPUTS = ("tiles", "row_token", "row_weight", "position", "meta")


def checked_plan(
    plan: Mapping[str, Any],
    n_tokens: int | None,
    top_k: int,
    n_experts: int,
    tile_rows: int,
    columns: tuple[int, int],
    where: str,
) -> dict[str, np.ndarray]:
    """The arrays of `plan` that the steps behind it read, each of its type, its shape and within its range.

    n_tokens  T, None = as many as `position` has
    columns   column tiles of gate/up and of down in the layer that reads them: they replace those of the layer that
              the plan was made for, in the grids of meta

    Raises ValueError, TypeError for what is no mapping.
    """
    instance(plan, Mapping, "the arrays of a plan by name", f"{where}: plan")
    for name in PLAN_INPUTS:
        if name not in plan:
            raise ValueError(
                f"[{where}: plan] expected {', '.join(PLAN_INPUTS)}, got {', '.join(map(str, plan)) or 'nothing'}"
            )
    meta = checked(plan["meta"], np.uint32, (14,), f"{where}: meta").copy()
    n_rows, n_tiles = int(meta[0]), int(meta[1])
    position = checked(
        plan["position"], np.int32, (None if n_tokens is None else n_tokens * top_k,), f"{where}: position"
    )
    if position.size % top_k:
        raise ValueError(f"[{where}: position] expected a multiple of {top_k} entries, got {position.size}")
    n_tokens = position.size // top_k
    bound = max_rows(n_tokens, top_k, n_experts, tile_rows)
    if n_rows != n_tiles * tile_rows or n_rows > bound:
        raise ValueError(
            f"[{where}: meta] expected tiles of {tile_rows} rows, at most {bound} rows, got {n_tiles} of {n_rows} rows"
        )
    tiles = checked(plan["tiles"], np.uint32, (n_tiles, 4), f"{where}: tiles")
    row_token = checked(plan["row_token"], np.int32, (n_rows,), f"{where}: row_token")
    _within(tiles[:, 0], 0, n_experts - 1, f"{where}: tiles: expert")
    _within(tiles[:, 2], 1, tile_rows, f"{where}: tiles: real rows")
    wrong = tiles[:, 1] != np.arange(n_tiles, dtype=np.uint32) * np.uint32(tile_rows)
    if wrong.any():
        tile = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"[{where}: tiles: first row] expected {tile * tile_rows}, got {tiles[tile, 1]} in tile {tile}"
        )
    _within(row_token, -1, n_tokens - 1, f"{where}: row_token")
    _within(position, -1, n_rows - 1, f"{where}: position")
    grids = [n_rows, 1, 1, columns[0], n_tiles, 1, columns[1], n_tiles, 1]
    meta[5:] = np.maximum(grids, 1)
    row_weight = checked(plan["row_weight"], np.float32, (n_rows,), f"{where}: row_weight")
    return {"tiles": tiles, "row_token": row_token, "row_weight": row_weight, "position": position, "meta": meta}


def _within(values: np.ndarray, low: int, high: int, where: str) -> None:
    wrong = (values < low) | (values > high)
    if wrong.any():
        at = int(np.flatnonzero(wrong)[0])
        raise ValueError(f"[{where}] expected {low}..{high}, got {values[at]} at {at}")
