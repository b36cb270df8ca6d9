"""What the README and docs show must run, and be right."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "cuda"))

import readme_table

from expertile import reference
from expertile.cli import build_parser
from expertile.layer_weights import LayerWeights, example_weights

ROOT = Path(__file__).parent.parent
NAMES = {
    "norm": "hc_ffn_norm",
    "hc_down": "hc_ffn_down",
    "hc_up": "hc_ffn_up",
    "inject": "hc_ffn_inject",
    "router": "ffn_gate_inp",
    "shared_gate": "ffn_gate_shexp",
    "shared_up": "ffn_up_shexp",
    "shared_down": "ffn_down_shexp",
    "shared_scalar": "ffn_gate_inp_shexp",
}


def python_blocks(page: str = "README.md") -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def matrices(weights: LayerWeights) -> dict[str, Any]:
    """The README's `w`, from a layer's tensors."""
    w: dict[str, Any] = {name: weights.matrix(part) for name, part in NAMES.items()}
    for part in ("gate", "up", "down"):
        w[part] = [weights.expert(part, expert) for expert in range(weights.n_experts)]  # type: ignore[arg-type]
    return w


def test_formulas_are_the_reference() -> None:
    scope: dict[str, Any] = {"np": np, "sigmoid": reference.sigmoid, "silu": reference.silu}
    exec(python_blocks()[0], scope)
    weights = example_weights()
    x = np.random.default_rng(3).standard_normal((9, weights.n_streams, weights.dim))
    want = reference.layer(x, weights)["out_streams"]
    assert np.abs(want - x).max() > 0.1  # the layer does something
    np.testing.assert_allclose(scope["moe_half"](x, matrices(weights), weights.top_k), want, rtol=1e-12, atol=1e-12)


def test_example_runs(monkeypatch: Any) -> None:
    monkeypatch.chdir(ROOT)
    scope: dict[str, Any] = {}
    exec(python_blocks()[1], scope)
    assert scope["y"].shape == scope["x"].shape
    assert np.isfinite(scope["y"]).all()
    assert not np.array_equal(scope["y"], scope["x"])


def test_figures_of_the_gpu_are_the_results() -> None:
    text = (ROOT / "README.md").read_text()
    assert readme_table.updated(text) == text, "python3 tests/cuda/readme_table.py brings it up to date"


def test_two_commands_are_all_the_set_up() -> None:
    commands = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("pip install")]
    assert len(commands) == 2  # .ci/run takes them from there


def test_commands_of_the_docs_exist() -> None:
    text = (ROOT / "docs" / "metal.md").read_text()
    lines = [line for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    lines += re.findall(r"`(expertile [^`]*)`", text)
    commands = [line.split()[1:] for line in lines if line.startswith("expertile ")]
    assert len(commands) > 9
    for command in commands:
        assert build_parser().parse_args(command).command == command[0]


def test_example_of_the_docs_runs_but_for_its_device(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(ROOT)
    (example,) = python_blocks("docs/metal.md")
    opened = 'open_device("metal", matrix=matrix)'
    assert opened in example
    exec(example.replace(opened, 'open_device("emulator")'), {})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == ["base", "staged", "k4"]
    assert all(float(distance) < 1e-3 for _, distance in lines)
