"""`expertile bench plan, gather, moe, dense, epilogue`: measure one stage, or with --model predict it."""

from __future__ import annotations

from typing import Any

from expertile.commands import bench_model, epilogue_bench, gemm_bench, moe_bench, plan_bench


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure: plan, gather, epilogue, moe, dense",
        description="Measures one stage; nothing is timed whose result is further off than it may be. With --model the "
        "times are predicted, and every table says so.",
    )
    stages = parser.add_subparsers(dest="stage", metavar="STAGE", required=True)
    for family in (plan_bench, moe_bench, gemm_bench, epilogue_bench, bench_model):
        family.add(stages)
