"""`expertile parity plan, moe, dense, prompt`: devices, variants and the reference, stage by stage.

Exit code 1 on any fault.
"""

from __future__ import annotations

from typing import Any

from expertile.commands.common import add_command, add_precision, tile, token_list, type_list
from expertile.commands.layer_parity import run_dense, run_prompt
from expertile.commands.moe_parity import run_moe
from expertile.commands.plan_parity import run_plan
from expertile.synth import PRESETS

SEE_PRESET = "all present, for flash-next the best"


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "parity",
        help="compare devices and the reference: plan, moe, dense, prompt",
        description="Compares the devices present, or --device, with the numpy reference; exits 1 on any fault.",
    )
    stages = parser.add_subparsers(dest="stage", metavar="STAGE", required=True)
    plan = add_command(
        stages, "plan", run_plan, "every variant of the plan and the gather, byte for byte", device="all present"
    )
    plan.add_argument(
        "--tokens", type=token_list, metavar="LIST", help="only these T (default 128,512,1024,2048 and odd sizes)"
    )
    moe = add_command(stages, "moe", run_moe, "plan, gather and the routed experts of a layer", device=SEE_PRESET)
    moe.add_argument(
        "--tokens", type=token_list, default=[128, 256], metavar="LIST", help="T, in turn (default 128,256)"
    )
    moe.add_argument("--gu", metavar="TYPE", help="type of gate and up (default IQ2_XS)")
    moe.add_argument("--dn", metavar="TYPE", help="type of down (default IQ4_NL)")
    moe.add_argument("--tile", type=tile, metavar="M,N,K,S", help="tile of gate and up")
    moe.add_argument("--dtile", type=tile, metavar="M,N,K,S", help="tile of down")
    dense = add_command(stages, "dense", run_dense, "the dense GEMM of every type", device="all present")
    dense.add_argument("--tokens", type=token_list, default=[33], metavar="LIST", help="T, in turn (default 33)")
    dense.add_argument("--formats", type=type_list, metavar="LIST", help="types (default: all that have a kernel)")
    dense.add_argument("--tile", type=tile, metavar="M,N,K,S", help="only this tile (default: all)")
    for stage in (moe, dense):
        add_precision(stage)
    prompt = add_command(stages, "prompt", run_prompt, "router, hyper-connection, shared expert", device=SEE_PRESET)
    prompt.add_argument(
        "--tokens", type=token_list, default=[33, 128], metavar="LIST", help="T, in turn (default 33,128)"
    )
    for stage, preset in ((moe, "flash-next"), (prompt, "tiny")):
        stage.add_argument(
            "--preset",
            choices=sorted(PRESETS),
            default=preset,
            help=f"sizes of the random layer (default {preset})",
        )
