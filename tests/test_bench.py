"""`bench moe`, `dense` and `epilogue`: what they print and write, what they refuse to time, and the peer process."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertile import _core, cli, reference
from expertile.commands import bench_common, epilogue_bench, gemm_bench, moe_bench
from expertile.commands.common import random_routing
from expertile.layer_weights import LayerWeights
from expertile.measure import rel_l2
from expertile.peer import client, protocol
from expertile.peer.client import Peer, PeerError
from expertile.synth import random_tensor, synthetic_model

TINY = ("--preset", "tiny", "--device", "cpu", "--rounds", 2, "--threads", 1)
FAKE = Path(__file__).parent / "fake_peer.py"
has_llama = importlib.util.find_spec("llama_cpp") is not None


def run(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    code = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def fake(fault: str) -> list[str]:
    return [sys.executable, str(FAKE), fault]


@pytest.fixture
def use_fake(monkeypatch: Any, tmp_path: Path) -> Any:
    """Makes `--peer ggml` start the fake; returns the options."""

    def use(fault: str = "none") -> tuple[object, ...]:
        monkeypatch.setattr(client, "COMMAND", fake(fault))
        return "--peer", "ggml", "--peer-lib", tmp_path

    return use


# --- what a bench says ------------------------------------------------------------------------------------------


def test_moe(capsys: Any, tmp_path: Path) -> None:
    paths = (tmp_path / "moe.json", tmp_path / "moe.csv")
    options = ("--tokens", "1,33", "--routing", "zipf:1.1", "--check-tokens", 5)
    code, text, error = run(capsys, "bench", "moe", *TINY, *options, "--json", paths[0], "--csv", paths[1])
    assert code == 0, error
    read = json.loads(paths[0].read_text())
    assert read["command"] == "bench moe" and read["device"]["kind"] == "cpu"
    rows = read["rows"]
    totals = [row for row in rows if row["step"] == "total"]
    assert [row["tokens"] for row in totals] == [1, 33]
    assert [row["check_tokens"] for row in totals] == [1, 5]
    for row in totals:
        assert 0 < row["ms_p10"] <= row["ms"] <= row["ms_p90"]
        assert row["precision"] == "exact" and row["routing"] == "zipf:1.1"
        assert 0 < row["rel_l2_fp16"] <= 5e-5 < row["rel_l2_exact"] <= row["worst_rel_l2_exact"] <= 1e-3
        assert 0 < row["tflops_real"] < row["tflops_padded"]
        assert row["peak_fraction"] == pytest.approx(row["tflops_real"] * 1e12 / read["peak_flops"])
    # 33 tokens, 4 experts each: gate and up of 512 x 64, down of 64 x 512, two operations a weight.
    assert totals[1]["tflops_real"] * totals[1]["ms"] * 1e9 == pytest.approx(33 * 4 * 3 * 512 * 64 * 2)
    steps = [row["step"] for row in rows if row["tokens"] == 33]
    assert steps == ["total", "plan", "gather", "gate", "up", "activation", "down", "combine"]
    assert {row["step"]: row.get("format") for row in rows}["down"] == "IQ4_NL"
    assert read["window_bytes"] > 0 and read["weight_bytes"] > 16 * 3 * 512 * 64 * 2 / 8
    assert read["peak_rss_bytes"] > read["weight_bytes"] + read["window_bytes"]
    promise = read["weight_bytes"] + read["window_bytes"] + 100e6
    assert read["memory_ok"] == (read["peak_rss_bytes"] <= promise)
    assert "fp32 multiply-add peak" in text and "peak memory" in text
    with paths[1].open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)


def test_moe_sizes_tiles_and_fused_steps(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "moe.json"
    sizes = ("--experts", 8, "--dim", 256, "--ffn", 96, "--top-k", 3)
    options = ("--gu", "Q4_K", "--dn", "Q8_0", "--tile", "32,64,32,4", "--dtile", "32,64,32,4", "--fuse", "swiglu")
    code, _, error = run(capsys, "bench", "moe", *TINY, *sizes, *options, "--tokens", 40, "--json", path)
    assert code == 0, error
    read = json.loads(path.read_text())
    assert (read["n_experts"], read["dim"], read["expert_ffn"], read["top_k"]) == (8, 256, 96, 3)
    fused = next(row for row in read["rows"] if row["step"] == "gate, up and activation")
    assert fused["format"] == "Q4_K"
    assert fused["tflops_real"] * fused["ms"] * 1e9 == pytest.approx(40 * 3 * 2 * 256 * 96 * 2)
    code, _, error = run(capsys, "bench", "moe", *TINY, "--tokens", 1, "--fuse", "combine")
    assert code == 2 and "bench epilogue" in error


def test_moe_of_a_recorded_routing(capsys: Any, tmp_path: Path) -> None:
    path, trace = tmp_path / "moe.json", tmp_path / "trace.npz"
    ids, weights = random_routing(20, 16, 4, 5)
    np.savez(trace, ids=ids.reshape(2, 10, 4), weights=weights.reshape(2, 10, 4))
    got = bench_common.bench_routing(str(trace), 13, 16, 4)
    np.testing.assert_array_equal(got[0], ids[:13])
    np.testing.assert_array_equal(got[1], weights[:13])
    code, _, error = run(capsys, "bench", "moe", *TINY, "--tokens", 20, "--routing", trace, "--json", path)
    assert code == 0, error
    assert json.loads(path.read_text())["rows"][0]["routing"] == str(trace)
    code, _, error = run(capsys, "bench", "moe", *TINY, "--tokens", 21, "--routing", trace)
    assert code == 2 and "21 tokens" in error
    np.savez(trace, ids=ids + 16)
    code, _, error = run(capsys, "bench", "moe", *TINY, "--tokens", 20, "--routing", trace)
    assert code == 2 and "0..15" in error
    code, _, error = run(capsys, "bench", "moe", *TINY, "--tokens", 20, "--routing", "zipf")
    assert code == 2 and "zipf:S" in error


def test_one_gemm_a_type(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "gemm.json"
    options = ("--formats", "Q2_0,iq2_xs", "--tokens", "1,20", "--json", path)
    code, _, error = run(capsys, "bench", "moe", *TINY, *options)
    assert code == 0, error
    rows = json.loads(path.read_text())["rows"]
    assert [(row["format"], row["tokens"]) for row in rows] == [
        ("Q2_0", 1),
        ("Q2_0", 20),
        ("IQ2_XS", 1),
        ("IQ2_XS", 20),
    ]
    assert all(row["kernel"].startswith("gemm_grouped_") for row in rows)
    assert rows[1]["tflops_real"] * rows[1]["ms"] * 1e9 == pytest.approx(20 * 4 * 512 * 64 * 2)
    sizes = ("--inner", 256, "--cols", 72, "--device", "cpu", "--rounds", 2)
    code, _, error = run(capsys, "bench", "dense", *sizes, "--tokens", 17, "--json", path)
    assert code == 0, error
    rows = json.loads(path.read_text())["rows"]
    assert {row["format"] for row in rows} == set(_core.types())
    assert all(row["worst_rel_l2_exact"] <= 1e-3 for row in rows)
    code, _, error = run(capsys, "bench", "dense", *sizes, "--formats", "Q9_9")
    assert code == 2 and "Q9_9" in error and "IQ2_XS" in error


def test_epilogue(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "epilogue.json"
    code, text, error = run(capsys, "bench", "epilogue", *TINY, "--tokens", 33, "--layers", 2, "--json", path)
    assert code == 0, error
    rows = json.loads(path.read_text())["rows"]
    by_step: dict[str, list[Any]] = {}
    for row in rows:
        by_step.setdefault(row["step"], []).append(row)
    assert len(by_step) == len(epilogue_bench.MAKERS)
    for forms in by_step.values():
        assert len(forms) >= 2
        assert forms[0]["speedup"] == 1
        fastest = [row for row in forms if row["fastest"]]
        assert len(fastest) == 1 and fastest[0]["us"] == min(row["us"] for row in forms)
    assert "gatherless" in text and "fastest" in text
    scalar_forms = {"swiglu_h_v4", "act_f16_v4", "gemm_swiglu_f16", "gemm_grouped_swiglu", "moe_out_combine"}
    same = {row["variant"]: row["differing_bytes"] for row in rows}
    assert {name: same[name] for name in scalar_forms} == dict.fromkeys(scalar_forms, 0)
    code, _, error = run(capsys, "bench", "epilogue", *TINY, "--steps", "softmax")
    assert code == 2 and "swiglu_h" in error


def test_peak_is_a_machines() -> None:
    """More than any scalar loop, less than any machine."""
    assert 1e9 < _core.measure_peak(1) < 1e13


# --- what it refuses to time ------------------------------------------------------------------------------------


def spoil(monkeypatch: Any, owner: Any, change: Any) -> None:
    """The results that the bench reads back, changed."""
    honest = owner.result

    def result(self: Any, *arguments: Any) -> Any:
        y = honest(self, *arguments)
        change(y)
        return y

    monkeypatch.setattr(owner, "result", result)


@pytest.mark.parametrize("token", [0, 19])
def test_wrong_layers_are_not_timed(capsys: Any, monkeypatch: Any, tmp_path: Path, token: int) -> None:
    def worse(y: Any) -> None:
        y[token] *= 1.002

    spoil(monkeypatch, moe_bench.Layer, worse)
    path = tmp_path / "moe.json"
    code, text, error = run(capsys, "bench", "moe", *TINY, "--tokens", 20, "--json", path)
    assert code == 1 and "not timed" in error
    assert not path.exists() and "ms" not in text


def test_a_number_that_is_none_is_not_timed(capsys: Any, monkeypatch: Any) -> None:
    def break_one(y: Any) -> None:
        y[1, 3] = np.nan  # not among the tokens that are compared

    spoil(monkeypatch, moe_bench.Layer, break_one)
    code, _, error = run(capsys, "bench", "moe", *TINY, "--tokens", 20, "--check-tokens", 2)
    assert code == 1 and "finite" in error


@pytest.mark.parametrize("command", [("dense", "--inner", 256, "--cols", 72), ("moe", "--preset", "tiny")])
def test_wrong_gemms_are_not_timed(capsys: Any, monkeypatch: Any, command: tuple[Any, ...]) -> None:
    def worse(y: Any) -> None:
        y[-1] *= 1.002

    spoil(monkeypatch, gemm_bench.Product, worse)
    options = ("--formats", "Q8_0", "--tokens", 20, "--device", "cpu")
    code, _, error = run(capsys, "bench", *command, *options)
    assert code == 1 and "Q8_0" in error and "not timed" in error


def test_forms_that_differ_are_not_timed(capsys: Any, monkeypatch: Any) -> None:
    def exchanged(layer: Any) -> Any:
        step = epilogue_bench.swiglu(layer)
        buffers = step.forms[1].calls[0][2]
        buffers[0], buffers[1] = buffers[1], buffers[0]
        return step

    monkeypatch.setitem(epilogue_bench.MAKERS, "swiglu_h", exchanged)
    code, _, error = run(capsys, "bench", "epilogue", *TINY, "--steps", "swiglu_h", "--tokens", 20)
    assert code == 1 and "swiglu_h_v4" in error and "not timed" in error


# --- the peer ---------------------------------------------------------------------------------------------------


def test_frames_come_back() -> None:
    arrays = [np.arange(6, dtype=np.int32).reshape(2, 3), np.zeros((0, 4), np.float32), np.float32([[1.5]])]
    stream = io.BytesIO()
    protocol.write_frame(stream, {"op": "x", "n": 3}, arrays)
    whole = stream.getvalue()
    fields, got = protocol.read_frame(io.BytesIO(whole))
    assert fields == {"op": "x", "n": 3}
    for a, b in zip(got, arrays, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and (a == b).all()
    for cut in (0, 5, len(whole) - 1):
        with pytest.raises(EOFError):
            protocol.read_frame(io.BytesIO(whole[:cut]))
    with pytest.raises(ValueError, match="frame"):
        protocol.read_frame(io.BytesIO(b"[1, 2]\n"))


def test_without_the_extra(capsys: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(client.importlib.util, "find_spec", lambda name: None)
    code, _, error = run(capsys, "bench", "moe", *TINY, "--tokens", 1, "--peer", "ggml")
    assert code == 2 and ".[peer]" in error and "llama-cpp-python" in error
    code, _, error = run(capsys, "bench", "moe", *TINY, "--tokens", 1, "--peer", "ggml", "--peer-lib", tmp_path / "no")
    assert code == 2 and "--peer-lib" in error
    code, _, error = run(capsys, "bench", "moe", *TINY, "--tokens", 1, "--peer-lib", tmp_path)
    assert code == 2 and "--peer ggml" in error
    code, _, error = run(capsys, "bench", "moe", *TINY, "--tokens", 1, "--peer", "ggml", "--peer-lib", tmp_path)
    assert code == 1 and "ggml-base" in error and error.count("\n") == 1


def test_turns_with_a_peer(capsys: Any, use_fake: Any, tmp_path: Path) -> None:
    path = tmp_path / "moe.json"
    code, text, error = run(capsys, "bench", "moe", *TINY, "--tokens", "1,33", *use_fake(), "--json", path)
    assert code == 0, error
    read = json.loads(path.read_text())
    assert read["peer_version"] == "ggml 0.0 (fake)" and read["peer_buffers"]["down"] == "numpy"
    with_peer = [row for row in read["rows"] if "peer" in row]
    assert [row["step"] for row in with_peer] == ["total", "gate", "up", "down"] * 2
    for row in with_peer:
        assert row["peer_ms"] == 250
        assert row["ratio"] == pytest.approx(250 / row["ms"])
    assert all(row["peer_rel_l2_exact"] < 1e-6 for row in with_peer if row["step"] == "total")
    assert "ggml 0.0 (fake)" in text


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("wrong", "peer_rel_l2_exact"),
        ("error", "no such step"),
        ("dies", "SIGABRT; it said: a last word"),
        ("garbage", "another text"),
    ],
)
def test_a_peer_that_fails_is_named(capsys: Any, use_fake: Any, fault: str, message: str) -> None:
    code, _, error = run(capsys, "bench", "moe", *TINY, "--tokens", 5, *use_fake(fault))
    assert code == 1 and message in error and error.count("\n") == 1


def test_a_silent_peer_is_stopped(tmp_path: Path) -> None:
    with Peer(str(tmp_path), 1, fake("silent")) as peer:
        peer.timeout = peer._replies.raw._timeout = 0.5
        start = time.monotonic()
        with pytest.raises(PeerError, match=r"within 0\.5 s"):
            peer.run()
        assert time.monotonic() - start < 20
    assert peer._process.returncode is not None


@pytest.mark.skipif(not has_llama, reason="llama-cpp-python (extra [peer]) is not installed")
def test_ggml_is_a_peer(capsys: Any, tmp_path: Path) -> None:
    """The real one: near the reference in every step, within what 8-bit activations lose."""
    sizes, tensors = synthetic_model("tiny", gu="IQ2_XS", dn="IQ4_NL")
    ids, weights = random_routing(37, sizes["n_experts"], sizes["top_k"], 0)
    x = np.random.default_rng(0).standard_normal((37, sizes["dim"]), np.float32)
    want = reference.experts(x, ids, LayerWeights(tensors, 0, sizes["top_k"]))
    with Peer(client.find_libraries(None), 2) as peer:
        for part in ("gate", "up", "down"):
            assert peer.add_weight(part, tensors[f"blk.0.ffn_{part}_exps.weight"])
        peer.request("layer", [x, ids, weights])
        assert peer.run() > 0
        assert rel_l2(peer.result(), reference.combine(ids, weights, want["down"])) < 3e-2
        for part in ("gate", "up", "down"):
            peer.run(part)
            assert rel_l2(peer.result(part), want[part]) < 3e-2
        dense = random_tensor("w", "Q2_0", (512, 48))
        peer.add_weight("w", dense)
        with pytest.raises(PeerError, match="expected type"):
            peer.request("weight", [dense.data], name="w", type=42, type_name="Q2_7", shape=[512, 48])
    path = tmp_path / "moe.json"
    code, _, error = run(capsys, "bench", "moe", *TINY, "--tokens", "1,33", "--peer", "ggml", "--json", path)
    assert code == 0, error
    total = json.loads(path.read_text())["rows"][0]
    assert total["peer"].startswith("ggml 0.") and 0 < total["peer_rel_l2_exact"] < 3e-2
