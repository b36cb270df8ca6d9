"""A peer process for tests: the protocol of `expertile.peer`, numpy behind it, and faults on demand.

Its first argument says what goes wrong: nothing, wrong (results), error (a refusal), dies, silent, garbage.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from expertile import reference
from expertile.layer_weights import LayerWeights, WeightArray
from expertile.peer.protocol import read_frame, write_frame

FAULT = sys.argv[1]


def fail() -> None:
    """What happens to the first run."""
    if FAULT == "dies":
        print("a last word", file=sys.stderr, flush=True)
        os.abort()
    if FAULT == "silent":
        time.sleep(60)
    if FAULT == "garbage":
        sys.stdout.buffer.write(b"Segmentation fault?\n")
        sys.stdout.buffer.flush()
    if FAULT == "error":
        raise RuntimeError("no such step")


def layer(tensors: dict[str, Any], x: Any, ids: Any, weights: Any) -> dict[str, Any]:
    made = reference.experts(x, ids, LayerWeights(tensors, 0, ids.shape[1]))
    total = reference.combine(ids, weights, made["down"])
    return {"gate": made["gate"], "up": made["up"], "down": made["down"], "total": total}


def main() -> None:
    tensors: dict[str, Any] = {"blk.0.ffn_gate_inp.weight": WeightArray("F32", (512, 16), np.empty(0, np.uint8))}
    results: dict[str, Any] = {}
    while True:
        try:
            fields, arrays = read_frame(sys.stdin.buffer)
        except EOFError:
            return
        reply: dict[str, Any] = {"ok": True}
        out = []
        try:
            if fields["op"] == "open":
                reply |= {"version": "0.0", "commit": "fake", "features": ["NUMPY"], "threads": fields["threads"]}
            elif fields["op"] == "weight":
                name = f"blk.0.ffn_{fields['name']}_exps.weight"
                tensors[name] = WeightArray(fields["type_name"], tuple(fields["shape"]), arrays[0])
                reply["buffer"] = "numpy"
            elif fields["op"] == "layer":
                results = layer(tensors, *arrays)
            elif fields["op"] == "run":
                fail()
                reply["seconds"] = 0.25
            else:
                out = [(results[fields["step"]] * (1.2 if FAULT == "wrong" else 1)).astype(np.float32)]
        except RuntimeError as error:
            reply = {"ok": False, "error": str(error)}
        write_frame(sys.stdout.buffer, reply, out)


if __name__ == "__main__":
    main()
