"""The command line under misuse: what is given is used or refused, before the work, and no file is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expertile import GGUFError, _core, cli, open_gguf
from expertile.synth import SynthTensor, synthetic_model, write_gguf

PREFILL = ("prefill", "--synthetic", "tiny", "--layers", "1", "--tokens", "2")


def refused(capsys: Any, *arguments: Any, code: int = 2) -> str:
    """The one line that a command says before it does anything."""
    assert cli.main([str(argument) for argument in arguments]) == code
    got = capsys.readouterr()
    assert got.out == "" and got.err.startswith("expertile: ") and got.err.count("\n") == 1, got
    assert "expected" in got.err and "incompatible" not in got.err, got.err
    return str(got.err)


@pytest.mark.parametrize(
    "arguments",
    [
        (*PREFILL, "--ids", ""),
        (*PREFILL, "--streams", ""),
        (*PREFILL, "--gu", ""),
        (*PREFILL, "--dn", ""),
        (*PREFILL, "--out", ""),
        (*PREFILL, "--json", ""),
        (*PREFILL, "--device", ""),
        ("prefill", ""),
        ("schedule", ""),
        ("inspect", ""),
        ("synth", ""),
        ("devices", "--json", ""),
        ("bench", "moe", "--peer", "ggml", "--peer-lib", ""),
        ("schedule", "model.gguf", "--preset", "tiny"),
    ],
    ids=" ".join,
)
def test_a_value_that_would_go_unused_is_refused(capsys: Any, arguments: tuple[str, ...]) -> None:
    refused(capsys, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        (*PREFILL[:-1], "1" + "0" * 30),
        (*PREFILL, "--threads", "5000000000"),
        (*PREFILL, "--chunk", "1" + "0" * 30),
        ("bench", "plan", "--layers", "10000000000"),
        ("bench", "plan", "--tokens", "1048577"),
        ("bench", "plan", "--model", "m5", "--tokens", "1" + "0" * 30),
        ("bench", "dense", "--tokens", "100000000"),
        ("bench", "epilogue", "--tokens", "100000000"),
        ("parity", "dense", "--tokens", "100000000"),
        ("parity", "moe", "--tokens", "128,1048577"),
        ("bench", "moe", "--preset", "tiny", "--experts", "100000", "--tokens", "1"),
        ("schedule", "--layer", "1" + "0" * 30),
    ],
    ids=lambda arguments: " ".join(arguments)[:60],
)
def test_a_number_that_nothing_can_hold_is_refused(capsys: Any, arguments: tuple[str, ...]) -> None:
    refused(capsys, *arguments)


@pytest.mark.parametrize("command", [("parity", "dense"), ("bench", "dense"), ("bench", "moe", "--formats", "all")])
def test_a_tile_that_is_not_compiled_is_refused(capsys: Any, command: tuple[str, ...]) -> None:
    """With no kernel for it there was nothing to compare, and nothing compared passed."""
    assert "16,32,32,4 or" in refused(capsys, *command, "--tile", "16,16,16,1")


def test_types_of_parity_are_taken_in_any_case(capsys: Any) -> None:
    arguments = ["parity", "dense", "--device", "cpu", "--formats", "q8_0", "--tokens", "1", "--tile", "16,64,32,2"]
    assert cli.main(arguments) == 0 and "Q8_0" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--json", "--out"])
@pytest.mark.parametrize("name", ["file/under/a/file", "folder", "x" * 300])
def test_an_output_that_cannot_be_written_is_refused_first(capsys: Any, tmp_path: Path, option: str, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    refused(capsys, *PREFILL, option, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("command", [("devices",), ("schedule",), ("parity", "plan"), ("bench", "plan")], ids=" ".join)
def test_every_command_checks_its_outputs(capsys: Any, tmp_path: Path, command: tuple[str, ...]) -> None:
    assert "--json" in refused(capsys, *command, "--json", tmp_path / "none" / "x.json")
    if command[0] == "bench":
        assert "--csv" in refused(capsys, *command, "--csv", tmp_path / "none" / "x.csv")


def test_no_output_takes_the_place_of_an_input_or_another(capsys: Any, tmp_path: Path) -> None:
    model, streams, new = tmp_path / "model.gguf", tmp_path / "x.npy", tmp_path / "new"
    write_gguf(model, *synthetic_model("tiny"))
    np.save(streams, np.ones((2, 4, 512), np.float32))
    before = model.read_bytes(), streams.read_bytes()
    (tmp_path / "link").symlink_to(model)
    refused(capsys, "inspect", model, "--json", model)
    refused(capsys, "inspect", model, "--json", tmp_path / "link")
    refused(capsys, "prefill", model, "--out", model)
    refused(capsys, "prefill", model, "--streams", streams, "--json", streams)
    refused(capsys, "prefill", model, "--tokens", 2, "--out", new, "--json", new)
    refused(capsys, "synth", new, "--json", new)
    assert (model.read_bytes(), streams.read_bytes()) == before and not new.exists()
    # One of these is safe: the streams are read before --out takes their name.
    assert cli.main(["prefill", str(model), "--streams", str(streams), "--out", str(streams)]) == 0
    assert np.load(streams).shape == (2, 4, 512)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="a system without pipes in the file system")
def test_a_pipe_or_a_device_is_not_replaced_by_a_file(capsys: Any, tmp_path: Path) -> None:
    """Run by root, `--out /dev/null` made a regular file of it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    refused(capsys, *PREFILL, "--out", pipe)
    refused(capsys, "synth", pipe)
    refused(capsys, *PREFILL, "--streams", pipe)
    with pytest.raises(ValueError, match=r"^\[write\] expected a regular file or a new name, got "):
        write_gguf(pipe, *synthetic_model("tiny"))
    assert pipe.is_fifo() and list(tmp_path.iterdir()) == [pipe]


def test_a_link_stays_a_link(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "y.npy").symlink_to(tmp_path / "there.npy")
    (tmp_path / "y.npy.part").touch()
    assert cli.main([*PREFILL, "--out", str(tmp_path / "y.npy")]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.npy", "y.npy", "y.npy.part"]
    assert (tmp_path / "y.npy").is_symlink() and np.load(tmp_path / "there.npy").shape == (2, 4, 512)


def routings() -> dict[str, dict[str, np.ndarray]]:
    ids = np.arange(32).reshape(8, 4) % 16
    return {
        "fractions": {"ids": ids + 0.5},
        "wraps to a good id": {"ids": ids + (1 << 32)},
        "below": {"ids": ids - 1},
        "one number": {"ids": np.int32(3)},
        "one dimension": {"ids": ids[0]},
        "no slots": {"ids": ids[:, :0]},
        "no ids": {"weights": np.ones((8, 4))},
        "weights of another shape": {"ids": ids, "weights": np.ones((8, 3))},
        "weights of whole numbers": {"ids": ids, "weights": np.ones((8, 4), np.int64)},
        "a weight that is no number": {"ids": ids, "weights": np.full((8, 4), np.nan)},
        "objects": {"ids": np.array([[None]], object)},
    }


@pytest.mark.parametrize("name", routings())
def test_a_recorded_routing_is_read_right_or_refused(capsys: Any, tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / "trace.npz", **routings()[name])
    arguments = ("bench", "moe", "--preset", "tiny", "--tokens", 4, "--routing", tmp_path / "trace.npz")
    assert "[--routing]" in refused(capsys, *arguments)


@pytest.mark.parametrize("kind", ["cut", "empty", "one array", "text"])
def test_a_file_that_is_no_archive_is_refused(capsys: Any, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "trace.npz"
    np.savez(path, ids=np.zeros((8, 4), np.int32))
    if kind == "one array":
        with path.open("wb") as file:
            np.save(file, np.zeros((8, 4), np.int32))
    else:
        path.write_bytes({"cut": path.read_bytes()[:100], "empty": b"", "text": b"ids"}[kind])
    refused(capsys, "bench", "moe", "--preset", "tiny", "--tokens", 4, "--routing", path)
    if kind != "one array":
        refused(capsys, *PREFILL[:3], "--streams", path)


def test_a_vocabulary_of_one_token(tmp_path: Path) -> None:
    """ggml drops trailing dimensions of 1."""
    sizes, tensors = synthetic_model("tiny", vocab=1)
    table = tensors["token_embd.weight"]
    tensors["token_embd.weight"] = SynthTensor(table.type, table.shape[:1], table.data)
    write_gguf(tmp_path / "model.gguf", sizes, tensors)
    np.save(tmp_path / "ids.npy", np.zeros(3, np.int8))
    assert cli.main(["prefill", str(tmp_path / "model.gguf"), "--ids", str(tmp_path / "ids.npy")]) == 0


@pytest.mark.skipif(sys.platform != "linux", reason="a file system whose names are any bytes")
def test_a_file_name_that_is_not_utf8(tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path)
    model, out = folder + b"/m\xff.gguf", folder + b"/y\xfe.npy"
    command = [sys.executable, "-c", "import sys; from expertile.cli import main; sys.exit(main())"]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    for arguments in (
        [b"synth", model],
        [b"inspect", model],
        [b"prefill", model, b"--tokens", b"2", b"--out", out, b"--json", out + b".json"],
    ):
        done = subprocess.run([*command, *arguments], capture_output=True, env=strict, timeout=60)
        assert done.returncode == 0, done.stderr
    assert Path(os.fsdecode(out)).exists() and open_gguf(model).config.n_layers == 2
    with pytest.raises(GGUFError, match=r"^\[.*/none\udcff\.gguf: file\] expected a readable file, got "):
        open_gguf(folder + b"/none\xff.gguf")
    assert _core.read_gguf(model).paths == [os.fsdecode(model)]
