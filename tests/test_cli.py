"""The command line: exit codes, one-line errors, the JSON envelope, and results that do not depend on the chunks."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import expertile
from expertile import _core, cli, device, report_json
from expertile.commands import common, layer_parity, schedule
from expertile.device import DEVICE_KINDS

ENVELOPE = {"command", "ok", "version", "commit", "machine", "device", "rows"}
TINY = Path("tiny") / "model.gguf"


def run(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command."""
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def document(path: Path, command: str) -> dict[str, Any]:
    """The JSON, checked for its envelope."""
    read: dict[str, Any] = json.loads(path.read_text())
    assert set(read) >= ENVELOPE
    assert read["command"] == command
    assert read["version"] == expertile.__version__
    return read


def one_line(text: str) -> str:
    """An error is one line that starts with the command's name, and no traceback."""
    assert text.startswith("expertile: ")
    assert text.count("\n") == 1
    assert "Traceback" not in text
    return text


@pytest.fixture(scope="module")
def golden(pytestconfig: pytest.Config) -> Path:
    folder: Path = pytestconfig.getoption("--golden")
    return folder


# --- parsing and errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["prefill"],
        ["prefill", "--synthetic", "huge"],
        ["prefill", "model.gguf", "--synthetic", "tiny"],
        ["prefill", "--synthetic", "tiny", "--tokens", "0"],
        ["prefill", "--synthetic", "tiny", "--tokens", "-3"],
        ["prefill", "--synthetic", "tiny", "--device", "abacus"],
        ["prefill", "--synthetic", "tiny", "--gu", "Q99"],
        ["prefill", "--synthetic", "tiny", "--out", "/no/such/folder/y.npy"],
        ["prefill", "--synthetic", "tiny", "--streams", "/no/such/x.npy"],
        ["prefill", "--synthetic", "tiny", "--stream-budget", "1"],
        ["bench", "plan", "--variants", "fastest"],
        ["bench", "plan", "--routing", "zipf:"],
        ["parity", "dense", "--formats", "Q99"],
        ["parity", "moe", "--tile", "16,64,32"],
        ["schedule", "--layer", "7"],
        ["synth", "model.gguf", "--device", "cpu"],
    ],
    ids=" ".join,
)
def test_misuse_exits_2(capsys: Any, arguments: list[str]) -> None:
    code, _, error = run(capsys, *arguments)
    assert code == 2
    one_line(error)


def test_a_file_that_is_no_gguf_exits_1(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model at all, but long enough to be read")
    for command in ("inspect", "prefill"):
        code, _, error = run(capsys, command, path)
        assert code == 1
        assert str(path) in one_line(error)


def test_a_process_exits_with_the_code(golden: Path) -> None:
    command = [sys.executable, "-c", "import sys; from expertile.cli import main; sys.exit(main())"]
    good = subprocess.run([*command, "devices"], capture_output=True, text=True)
    assert (good.returncode, good.stderr) == (0, "")
    bad = subprocess.run([*command, "prefill", golden / TINY, "--device", "abacus"], capture_output=True, text=True)
    assert bad.returncode == 2
    one_line(bad.stderr)


def test_help_names_every_command(capsys: Any) -> None:
    code, text, _ = run(capsys, "--help")
    assert code == 0
    for command in ("devices", "inspect", "prefill", "synth", "parity", "bench", "schedule"):
        assert re.search(rf"^\s+{command}\s", text, re.MULTILINE)


# --- the JSON ---------------------------------------------------------------------------------------------------


def test_json_is_strict(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    report_json.write(path, {"rows": [{"a": np.float32(np.nan), "b": np.int64(3), "c": (np.inf, 1.5)}]})
    assert json.loads(path.read_text()) == {"rows": [{"a": None, "b": 3, "c": [None, 1.5]}]}
    with pytest.raises(ValueError, match="version"):
        report_json.envelope("bench", True, [], top={"version": 3})


def test_devices(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "devices.json"
    code, text, _ = run(capsys, "devices", "--json", path)
    assert code == 0
    read = document(path, "devices")
    kinds = [status.kind for status in expertile.list_devices()]
    assert [row["device"] for row in read["rows"]] == kinds == list(DEVICE_KINDS)
    for row in read["rows"]:
        assert row["device"] in text
        assert row["detail"]


def test_a_named_device_starts_no_other_driver(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> None:
        raise AssertionError("the devices were asked for")

    monkeypatch.setattr(_core, "list_devices", probe)
    monkeypatch.setattr(device, "load_nvrtc", probe)
    code, text, _ = run(capsys, "bench", "plan", "--device", "cpu", "--tokens", "4", "--layers", "1")
    assert code == 0
    assert "two_dispatch" in text


def test_devices_shows_the_form_that_is_named(capsys: Any) -> None:
    code, text, _ = run(capsys, "devices", "--device", "cpu:portable")
    lines = [line.split() for line in text.splitlines()]
    assert code == 0 and [(line[0], line[-1]) for line in lines[1:]] == [("cpu", "(portable)")]


def test_inspect(capsys: Any, tmp_path: Path, golden: Path) -> None:
    path = tmp_path / "inspect.json"
    code, text, _ = run(capsys, "inspect", golden / TINY, "--chunk", "64", "--json", path)
    assert code == 0
    read = document(path, "inspect")
    assert (read["sizes"]["dim"], read["sizes"]["n_experts"], read["chunk"]) == (512, 16, 64)
    assert {
        "tensor": "blk.0.ffn_down_exps.weight",
        "format": "IQ4_NL",
        "shape": [64, 512, 16],
        "bytes": 294912,
    } in read["rows"]
    assert read["window_bytes"] > 0
    assert re.search(r"ffn_down_exps\.weight +0-1 +IQ4_NL +64 x 512 x 16", text)


# --- prefill ----------------------------------------------------------------------------------------------------


def prefill(capsys: Any, tmp_path: Path, name: str, *arguments: object) -> np.ndarray:
    """The streams that `prefill --out` wrote."""
    out = tmp_path / f"{name}.npy"
    code, _, error = run(capsys, "prefill", *arguments, "--out", out)
    assert (code, error) == (0, "")
    y: np.ndarray = np.load(out)
    assert not (tmp_path / f"{name}.npy.part").exists()
    return y


def test_prefill_of_a_file_meets_llama_cpp(capsys: Any, tmp_path: Path, golden: Path) -> None:
    captured = np.load(golden / "tiny" / "golden.npz")
    x = captured["layer0/in_streams"]
    np.save(tmp_path / "x.npy", x)
    path = tmp_path / "prefill.json"
    y = prefill(capsys, tmp_path, "y", golden / TINY, "--layers", 1, "--streams", tmp_path / "x.npy", "--json", path)
    assert y.shape == x.shape
    want = captured["layer0/out_streams"]
    assert np.linalg.norm(y - want) <= 1e-3 * np.linalg.norm(want - x)  # of what the layer changed
    read = document(path, "prefill")
    assert read["tokens_per_s"] > 0
    assert read["peak_rss_bytes"] > 1 << 20
    assert [row["step"] for row in read["rows"]][-2:] == ["host", "total"]
    assert read["rows"][-1]["ms"] == pytest.approx(sum(row["ms"] for row in read["rows"][:-1]), rel=0.05)


def test_prefill_does_not_depend_on_chunk_or_threads(capsys: Any, tmp_path: Path) -> None:
    common_options = ("--synthetic", "tiny", "--layers", 2, "--tokens", 300, "--seed", 5, "--device", "cpu")
    whole = prefill(capsys, tmp_path, "whole", *common_options)
    assert np.isfinite(whole).all()
    assert whole.any()
    for chunk, threads in ((300, 1), (257, 2), (64, 1), (7, 2)):
        y = prefill(capsys, tmp_path, "y", *common_options, "--chunk", chunk, "--threads", threads)
        assert y.tobytes() == whole.tobytes()
    other = prefill(capsys, tmp_path, "other", *common_options[:-3], 6, "--device", "cpu")
    assert other.tobytes() != whole.tobytes()


def test_prefill_takes_a_part_of_the_streams(capsys: Any, tmp_path: Path, golden: Path) -> None:
    x = np.load(golden / "tiny" / "golden.npz")["layer0/in_streams"]
    np.save(tmp_path / "x.npy", x.astype(np.float64))  # another float type is converted
    options = (golden / TINY, "--streams", tmp_path / "x.npy")
    whole = prefill(capsys, tmp_path, "whole", *options)
    part = prefill(capsys, tmp_path, "part", *options, "--tokens", 5)
    assert part.tobytes() == whole[:5].tobytes()
    code, _, error = run(capsys, "prefill", *options, "--tokens", len(x) + 1)
    assert code == 2
    assert "--tokens" in one_line(error)


def test_prefill_embeds_ids(capsys: Any, tmp_path: Path, golden: Path) -> None:
    model = expertile.open_gguf(str(golden / TINY))
    ids = np.array([3, 0, 3, 7], np.int64)
    np.save(tmp_path / "ids.npy", ids)
    if "token_embd.weight" not in model.tensors:
        code, _, error = run(capsys, "prefill", golden / TINY, "--ids", tmp_path / "ids.npy")
        assert code == 2
        assert "token_embd" in one_line(error)
        return
    y = prefill(capsys, tmp_path, "y", golden / TINY, "--ids", tmp_path / "ids.npy")
    assert y.shape == (4, model.config.n_streams, model.config.dim)
    assert y[0].tobytes() == y[2].tobytes()
    assert y[0].tobytes() != y[1].tobytes()
    np.save(tmp_path / "ids.npy", np.array([3, 10**9]))
    code, _, error = run(capsys, "prefill", golden / TINY, "--ids", tmp_path / "ids.npy")
    assert code == 2
    assert "1000000000" in one_line(error)


def test_prefill_of_a_nan_fails_and_names_the_token(capsys: Any, tmp_path: Path) -> None:
    x = np.random.default_rng(0).standard_normal(tiny_shape(20), np.float32)
    x[13, 0, 3] = np.nan
    np.save(tmp_path / "x.npy", x)
    options = ("--synthetic", "tiny", "--layers", 1, "--streams", tmp_path / "x.npy", "--out", tmp_path / "y.npy")
    code, _, error = run(capsys, "prefill", *options, "--chunk", 8, "--json", tmp_path / "y.json")
    assert code == 1
    assert re.search(r"\btoken 13\b", one_line(error))
    assert list(tmp_path.glob("y.npy*")) == []
    read = document(tmp_path / "y.json", "prefill")
    assert not read["ok"]
    assert "token 13" in read["error"]


def tiny_shape(n_tokens: int) -> tuple[int, int, int]:
    from expertile.commands.synth import synthetic

    config = synthetic("tiny", layers=1).config
    return n_tokens, config.n_streams, config.dim


@pytest.mark.parametrize("array", [np.zeros((3, 4)), np.zeros((2, 1, 1), np.int32), np.array({}, object)])
def test_prefill_refuses_streams_of_another_kind(capsys: Any, tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "x.npy", array)
    code, _, error = run(capsys, "prefill", "--synthetic", "tiny", "--streams", tmp_path / "x.npy")
    assert code == 2
    assert "--streams" in one_line(error)


def test_synth_writes_what_prefill_makes(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    code, text, _ = run(capsys, "synth", path, "--preset", "tiny", "--layers", 2, "--seed", 3)
    assert code == 0
    assert str(path) in text
    options = ("--tokens", 40, "--seed", 3)
    from_file = prefill(capsys, tmp_path, "file", path, *options)
    in_memory = prefill(capsys, tmp_path, "memory", "--synthetic", "tiny", "--layers", 2, *options)
    assert from_file.tobytes() == in_memory.tobytes()


# --- parity, bench, schedule ------------------------------------------------------------------------------------


def test_parity_plan(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "parity.json"
    code, text, _ = run(capsys, "parity", "plan", "--tokens", "37,130", "--json", path)
    assert code == 0
    assert "PASS" in text
    rows = document(path, "parity plan")["rows"]
    assert {row["array"] for row in rows} >= {"meta", "tiles", "row_token", "row_weight", "position", "rows_fp16"}
    assert not any(row["differing_bytes"] for row in rows)


def test_parity_plan_sees_a_wrong_byte(capsys: Any, monkeypatch: Any) -> None:
    from expertile import _core

    right = _core.run_plan

    def wrong(*arguments: Any) -> dict[str, Any]:
        plan: dict[str, Any] = right(*arguments)
        plan["row_weight"] = -plan["row_weight"]  # padding becomes -0: equal as numbers, not as bytes
        return plan

    monkeypatch.setattr(_core, "run_plan", wrong)
    code, text, _ = run(capsys, "parity", "plan", "--tokens", "37", "--device", "cpu")
    assert code == 1
    assert "FAIL" in text
    assert "row_weight differs" in text
    code, _, error = run(capsys, "bench", "plan", "--tokens", "37", "--device", "cpu")
    assert code == 1
    assert "row_weight" in one_line(error)  # what is wrong is not timed


def test_parity_of_the_other_stages(capsys: Any, tmp_path: Path) -> None:
    for stage, options in (
        ("moe", ("--preset", "tiny", "--tokens", "19")),
        ("dense", ("--formats", "Q8_0,IQ2_XS", "--tokens", "17", "--device", "cpu")),
        ("prompt", ("--tokens", "19", "--device", "cpu")),
    ):
        path = tmp_path / f"{stage}.json"
        code, text, _ = run(capsys, "parity", stage, *options, "--json", path)
        assert code == 0, text
        rows = document(path, f"parity {stage}")["rows"]
        assert rows
        assert all(row["ok"] for row in rows)


def test_bounds_are_bounds() -> None:
    want = np.ones((3, 8))
    assert layer_parity.gemm_row(want * (1 + 4e-5), want, want)["ok"]
    off = want.copy()
    off[1] *= 1 + 1e-4
    assert not layer_parity.gemm_row(off, want, want)["ok"]  # the worst token counts, not the mean
    assert layer_parity.gemm_row(off, want, off)["ok"]  # nearer to the exact reference
    assert not layer_parity.gemm_row(want, want, want * 1.01)["ok"]
    assert not layer_parity.gemm_row(np.full((3, 8), np.nan), want, want)["ok"]
    assert not layer_parity.element_row(want * (1 + 1e-5), want, want, layer_parity.ELEMENT_BOUND)["ok"]


def test_bench_plan(capsys: Any, tmp_path: Path) -> None:
    paths = (tmp_path / "bench.json", tmp_path / "bench.csv")
    options = ("--tokens", "33,70", "--layers", 2, "--device", "cpu")
    code, text, _ = run(capsys, "bench", "plan", *options, "--json", paths[0], "--csv", paths[1])
    assert code == 0
    rows = document(paths[0], "bench plan")["rows"]
    totals = [row for row in rows if row["kernel"] == "total"]
    assert {row["peer"] for row in totals} == {"numpy", "counting sort"}
    assert {row["tokens"] for row in totals} == {33, 70}
    for row in totals:
        assert row["us_p10"] <= row["us"] <= row["us_p90"]
        assert row["ratio"] == pytest.approx(row["peer_us"] / row["us"])
        assert row["variant"] in text
    with paths[1].open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)


def test_bench_gather(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    options = ("--tokens", "33", "--routing", "zipf:1.1")
    code, _, _ = run(capsys, "bench", "gather", *options, "--device", "cpu", "--json", path)
    assert code == 0
    rows = document(path, "bench gather")["rows"]
    assert [row["kernel"] for row in rows] == ["mm_gather", "mm_gather_h"]
    assert all(row["gb_s"] > 0 and row["routing"] == "zipf:1.1" for row in rows)


def test_schedule(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "schedule.json"
    code, text, _ = run(capsys, "schedule", "--device", "cpu", "--json", path)
    assert code == 0
    read = document(path, "schedule")
    kernels = [row["kernel"] for row in read["rows"]]
    assert {"gr_norm_h", "route_topk", "moe_out_combine"} <= set(kernels)
    assert kernels.index("route_topk") < kernels.index("act_f16") < kernels.index("moe_out_combine")
    costs = {row["variant"]: row for row in read["plan_variants"]}
    assert costs["baseline"]["dispatches"] == 4
    assert all(row["verdict"] == "ok" and row["barriers"] <= row["dispatches"] for row in costs.values())
    assert "no hazard, no redundant barrier" in text


def test_schedule_exits_1_on_a_fault(capsys: Any, monkeypatch: Any) -> None:
    fault = {"kind": "hazard", "where": "group 3", "detail": "two writers of ids"}
    right = expertile.Window.program

    def faulty(*arguments: Any) -> dict[str, Any]:
        return {**right(*arguments), "faults": [fault]}

    monkeypatch.setattr(schedule.expertile.Window, "program", faulty)
    code, text, _ = run(capsys, "schedule", "--device", "cpu")
    assert code == 1
    assert "two writers of ids" in text


# --- routing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zipf", [None, 1.2])
def test_random_routing(zipf: float | None) -> None:
    ids, weights = common.random_routing(5000, 64, 6, seed=1, zipf=zipf)
    assert (ids.dtype, weights.dtype, ids.shape) == (np.int32, np.float32, (5000, 6))
    assert all(len(set(row)) == 6 for row in ids.tolist())
    np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-6)
    counts = np.sort(np.bincount(ids.reshape(-1), minlength=64))[::-1]
    assert counts.sum() == 30000
    assert (counts[0] > 3 * counts[32]) == (zipf is not None)
    again, _ = common.random_routing(5000, 64, 6, seed=1, zipf=zipf)
    assert (again == ids).all()


@pytest.mark.parametrize("text", ["1,", "a", "1,-2", "0", "1.5"])
def test_lists_are_checked(text: str) -> None:
    with pytest.raises(Exception, match="expected a whole number"):
        common.positive_list(text)
