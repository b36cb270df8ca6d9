"""What a launch has to do, as numbers: bytes, operations, and the steps that wait for one another."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from expertile.plan import BLOCK_ENTRIES

LINE_BYTES = 128
LANES = 32
COPY_THREADS = 160  # of the kernels that move 16 bytes a thread


@dataclass(frozen=True)
class Load:
    """What a routing makes of one layer: the counts on which the kernels' work depends.

    n_kept   entries that are not skipped     n_pairs   (block, expert) pairs that have one
    n_before sum of the kept entries' places in their blocks: what a serial rank looks at
    depth    the longest such walk            n_sources tokens with a kept entry
    """

    n_tokens: int
    n_entries: int
    n_kept: int
    n_blocks: int
    n_pairs: int
    n_before: int
    depth: int
    n_sources: int
    n_active: int
    n_rows: int
    n_tiles: int
    max_rows: int
    n_experts: int
    dim: int
    ffn: int

    @classmethod
    def of(cls, ids: npt.NDArray[np.int32], n_experts: int, dim: int, ffn: int, tile_rows: int) -> Load:
        """From ids [T, K], -1 = skipped.

        >>> load = Load.of(np.int32([[2, 0], [-1, 2], [3, 2]]), n_experts=4, dim=8, ffn=4, tile_rows=2)
        >>> load.n_kept, load.n_rows, load.n_tiles, load.n_active, load.n_before
        (5, 8, 4, 3, 13)
        """
        flat = ids.ravel()
        kept = np.flatnonzero(flat >= 0)
        counts = np.bincount(flat[kept], minlength=n_experts)
        n_tiles = int((-(-counts // tile_rows)).sum())
        places = kept % BLOCK_ENTRIES
        return cls(
            n_tokens=ids.shape[0],
            n_entries=flat.size,
            n_kept=kept.size,
            n_blocks=-(-flat.size // BLOCK_ENTRIES),
            n_pairs=np.unique(kept // BLOCK_ENTRIES * n_experts + flat[kept]).size,
            n_before=int(places.sum()),
            depth=int(places.max(initial=0)),
            n_sources=int(np.any(ids >= 0, axis=1).sum()),
            n_active=int(np.count_nonzero(counts)),
            n_rows=n_tiles * tile_rows,
            n_tiles=n_tiles,
            max_rows=-(-(flat.size + min(flat.size, n_experts) * (tile_rows - 1)) // tile_rows) * tile_rows,
            n_experts=n_experts,
            dim=dim,
            ffn=ffn,
        )

    @property
    def n_padding(self) -> int:
        return self.n_rows - self.n_kept

    @property
    def count_words(self) -> int:
        """Of block_count, and of block_offset."""
        return self.n_blocks * self.n_experts


@dataclass(frozen=True)
class Work:
    """One launch.

    threadgroups, threads    grid and threads of a threadgroup
    read_bytes, write_bytes  device memory touched, each byte once
    operations               integer and fp32 operations, the matrix products left out
    flops, decoded           of matrix products, padded rows included; weights decoded for them
    device_steps             loads from device memory that wait for one another, in the threadgroup that has most
    shared_steps             likewise in threadgroup memory or across a simdgroup, barriers included
    lines                    128-byte lines that simdgroups ask for, hits of a cache included
    """

    threadgroups: int
    threads: int
    read_bytes: float
    write_bytes: float
    operations: float
    device_steps: float
    shared_steps: float
    lines: float
    flops: float = 0.0
    decoded: float = 0.0

    @property
    def bytes(self) -> float:
        return self.read_bytes + self.write_bytes


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
