"""Runs every kernel once on the GPU, for compute-sanitizer: python3 tests/cuda/every_kernel.py [FORMAT...]

Of the GEMMs every format (or those named) with one of the four tiles, the formats taking turns.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]

from cases import PLAN_CASES  # noqa: E402
from launches import all_runs, run  # noqa: E402

FORMS = tuple(f"two_dispatch_{form}{parts}" for form in ("counts", "offsets") for parts in ("", "_quarters"))

import expertile  # noqa: E402
from expertile import _core  # noqa: E402
from expertile.quants import TYPES  # noqa: E402


def main() -> int:
    gpu = expertile.open_device("cuda")
    plans = 0
    for case in PLAN_CASES:
        if case.name not in ("skewed", "repeated experts", "E = 513", "all skipped"):
            continue
        for variant in [*_core.plan_variants(), *FORMS]:
            _core.run_plan(gpu, variant, case.ids(), case.weights(), case.n_experts, case.tile_rows)
            plans += 1
    launches = all_runs(sys.argv[1:] or list(TYPES), one_tile=True)
    for launch in launches:
        run(gpu, launch)
    print(f"{plans} plans, {len(launches)} launches of {len({launch.kernel for launch in launches})} kernels")
    return 0


if __name__ == "__main__":
    sys.exit(main())
