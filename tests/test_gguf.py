"""Reading GGUF files: what a good one holds, and that a bad one is refused with a message that names file and field."""

from __future__ import annotations

import base64
import os
import re
import shutil
from pathlib import Path

import gguf
import gguf_fields
import numpy as np
import pytest
from gguf_fields import build, fields_of, key, patch, tensor, text

from expertile import _core
from expertile.synth import SynthTensor, synthetic_model, write_gguf

GOLDEN = Path(__file__).parent / "data" / "golden"
F32_BLOCK = np.arange(32, dtype="<f4").tobytes()  # 128 bytes, a multiple of the alignment


def refused(path: Path, *words: str) -> str:
    """Opening `path` raises GGUFError in the form of all messages, naming the file and `words`."""
    with pytest.raises(_core.GGUFError) as error:
        _core.read_gguf(str(path))
    message = str(error.value)
    assert re.fullmatch(r"\[.*\.gguf.*: .+\] expected .+, got .+", message, re.DOTALL), message
    for word in (path.name, *words):
        assert word in message, f"{word!r} not in {message!r}"
    return message


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    sizes, tensors = synthetic_model("tiny", layers=2, seed=3, vocab=8)
    return write_gguf(tmp_path / "tiny.gguf", sizes, tensors, metadata={"general.tags": ["a", "bc", ""]})[0]


# What a good file holds.


@pytest.mark.parametrize("case", ["tiny", "tiny/f32"])
def test_names_shapes_types_and_data_equal_those_of_the_gguf_package(case: str) -> None:
    path = GOLDEN / case / "model.gguf"
    ours, theirs = _core.read_gguf(str(path)), gguf.GGUFReader(path)
    assert set(ours.tensors) == {t.name for t in theirs.tensors}
    for t in theirs.tensors:
        mine = ours.tensors[t.name]
        assert (mine.type, mine.shape) == (t.tensor_type.name, tuple(int(n) for n in t.shape))
        assert (mine.file_offset, mine.bytes) == (t.data_offset, t.n_bytes)
        assert mine.data.tobytes() == t.data.tobytes()
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            assert ours.metadata[name] == field.contents(), name


def test_a_written_model_reads_back_here_and_in_the_gguf_package(tiny: Path) -> None:
    sizes, tensors = synthetic_model("tiny", layers=2, seed=3, vocab=8)
    ours = _core.read_gguf(str(tiny))
    theirs = {t.name: t for t in gguf.GGUFReader(tiny).tensors}
    assert list(ours.tensors) == sorted(tensors) == sorted(theirs)
    for name, t in tensors.items():
        mine = ours.tensors[name]
        assert (mine.type, mine.shape, mine.bytes) == (t.type, t.shape, t.data.nbytes)
        assert np.array_equal(mine.data, t.data)
        assert theirs[name].data.tobytes() == t.data.tobytes()
    assert ours.metadata["general.tags"] == ["a", "bc", ""]
    assert ours.metadata["qwen4exp.expert_count"] == sizes["n_experts"]


def test_a_file_with_a_type_of_number_42_reads(tmp_path: Path) -> None:
    sizes, tensors = synthetic_model("tiny", gu="Q2_0", dn="Q2_0")
    path = write_gguf(tmp_path / "m.gguf", sizes, tensors)[0]
    read = _core.read_gguf(str(path)).tensors
    for name, t in tensors.items():
        assert read[name].type == t.type
        assert np.array_equal(read[name].data, t.data)


def test_every_metadata_type_reads(tmp_path: Path) -> None:
    keys = [
        key("u8", 0, "B", 200), key("i8", 1, "b", -3), key("u16", 2, "H", 60000), key("i16", 3, "h", -300),
        key("u32", 4, "I", 2**32 - 1), key("i32", 5, "i", -(2**31)), key("f32", 6, "f", 0.5), key("bool", 7, "B", 1),
        key("string", 8, "Q2s", 2, b"hi"), key("u64", 10, "Q", 2**64 - 1), key("i64", 11, "q", -(2**63)),
        key("f64", 12, "d", 0.1), key("u8s", 9, "IQ3B", 0, 3, 1, 2, 255), key("f32s", 9, "IQ2f", 6, 2, 1.5, -2.0),
        key("bools", 9, "IQ3B", 7, 3, 1, 0, 1), key("i64s", 9, "IQ1q", 11, 1, -1), key("none", 9, "IQ", 4, 0),
    ]  # fmt: skip
    metadata = _core.read_gguf(str(build(tmp_path / "keys.gguf", keys, []))).metadata
    assert metadata == {
        "u8": 200, "i8": -3, "u16": 60000, "i16": -300, "u32": 2**32 - 1, "i32": -(2**31), "f32": 0.5, "bool": True,
        "string": "hi", "u64": 2**64 - 1, "i64": -(2**63), "f64": 0.1, "u8s": [1, 2, 255], "f32s": [1.5, -2.0],
        "bools": [True, False, True], "i64s": [-1], "none": [],
    }  # fmt: skip
    assert metadata["bool"] is True


def test_text_that_is_not_utf8_is_read_with_a_mark_in_its_place(tmp_path: Path) -> None:
    keys = [key("name", 8, "Q3s", 3, b"a\xffb"), key("names", 9, "IQQ1sQ1s", 8, 2, 1, b"\xc3", 1, b"c")]
    metadata = _core.read_gguf(str(build(tmp_path / "keys.gguf", keys, []))).metadata
    assert metadata == {"name": "a\ufffdb", "names": ["\ufffd", "c"]}


def test_version_2_reads_as_version_3(tiny: Path) -> None:
    newer = {name: t.data.tobytes() for name, t in _core.read_gguf(str(tiny)).tensors.items()}
    older = {name: t.data.tobytes() for name, t in _core.read_gguf(str(patch(tiny, {"version": 2}))).tensors.items()}
    assert older == newer


def test_data_outlives_the_file_object_and_is_read_only(tiny: Path) -> None:
    expected = synthetic_model("tiny", layers=2, seed=3, vocab=8)[1]["blk.1.ffn_up_exps.weight"].data
    data = _core.read_gguf(str(tiny)).tensors["blk.1.ffn_up_exps.weight"].data
    tiny.unlink()
    assert np.array_equal(data, expected)
    with pytest.raises(ValueError, match="read-only"):
        data[0] = 1


@pytest.mark.parametrize("alignment", [8, 64, 4096])
def test_the_alignment_of_the_file_is_used(tmp_path: Path, alignment: int) -> None:
    keys = [key("general.alignment", 4, "I", alignment)]
    path = build(tmp_path / "a.gguf", keys, [tensor("t", (32,))], F32_BLOCK, alignment)
    t = _core.read_gguf(str(path)).tensors["t"]
    assert t.file_offset % alignment == 0
    assert t.data.tobytes() == F32_BLOCK


def test_an_offset_beyond_4_gib_is_reached(tmp_path: Path) -> None:
    far = 5 << 30
    path = build(tmp_path / "far.gguf", [], [tensor("far", (32,), offset=far), tensor("near", (32,))], F32_BLOCK)
    with path.open("r+b") as file:
        file.seek(fields_of(path).data_start + far)
        file.write(F32_BLOCK[::-1])
    assert _core.read_gguf(str(path)).tensors["far"].data.tobytes() == F32_BLOCK[::-1]


# Refusals.


def test_a_dimension_of_zero_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "zero.gguf"
    path.write_bytes(
        base64.b64decode("R0dVRgMAAAABAAAAAAAAAAAAAAAAAAAAAQAAAAAAAAB0AgAAAAEAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=")
    )
    refused(path, "t dimension 1", "at least 1")


def test_what_is_no_readable_file_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "absent.gguf", "No such file")
    (tmp_path / "folder.gguf").mkdir()
    refused(tmp_path / "folder.gguf", "a directory")
    (tmp_path / "empty.gguf").touch()
    refused(tmp_path / "empty.gguf", "magic")
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", "regular file")
    (tmp_path / "zip.gguf").write_bytes(b"PK\3\4" + bytes(60))
    refused(tmp_path / "zip.gguf", "magic")


@pytest.mark.parametrize("version", [0, 1, 4, 2**32 - 1])
def test_other_versions_are_refused(tiny: Path, version: int) -> None:
    refused(patch(tiny, {"version": version}), "version", "2 or 3")


@pytest.mark.parametrize("raw", [b"GGUF\0\0\0\3", b"GGUF\0\0\0\2", b"FUGG\0\0\0\3"])
def test_big_endian_files_are_refused_by_name(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "big.gguf"
    path.write_bytes(raw + bytes(64))
    refused(path, "little-endian", "big-endian")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ([key("twice", 4, "I", 1), key("twice", 4, "I", 1)], ("twice key",)),
        ([key("kind", 13, "I", 1)], ("kind value type", "13")),
        ([key("flag", 7, "B", 2)], ("flag value", "bool")),
        ([key("flags", 9, "IQ2B", 7, 2, 1, 9)], ("flags array element", "bool")),
        ([key("deep", 9, "IQIQ", 9, 1, 9, 0)], ("deep array element type", "arrays within an array")),
        ([key("kinds", 9, "IQ", 77, 0)], ("kinds array element type", "77")),
        ([key("long", 9, "IQ", 4, 2**61)], ("long array length",)),
        ([key("", 4, "I", 1)], ("metadata entry 0 key length",)),
        ([key("caf\xe9", 4, "I", 1)], ("metadata entry 0 key length", "ASCII")),
        ([key("general.alignment", 8, "Q2s", 2, b"32")], ("general.alignment", "a string")),
        ([key("general.alignment", 5, "i", -32)], ("general.alignment", "-32")),
        *(([key("general.alignment", 4, "I", a)], ("general.alignment", str(a))) for a in (0, 1, 4, 24, 33, 2**32 - 1)),
        ([key("split.count", 2, "H", 0)], ("split.count",)),
    ],
)
def test_metadata_outside_the_format_is_refused(tmp_path: Path, keys: list[bytes], words: tuple[str, ...]) -> None:
    refused(build(tmp_path / "keys.gguf", keys, []), *words)


def test_metadata_that_would_decode_to_far_more_than_the_file_is_refused(tmp_path: Path) -> None:
    count = 12 << 20  # bytes that become words of eight
    refused(build(tmp_path / "grow.gguf", [key("grow", 9, f"IQ{count}x", 0, count)], []), "grow array length")


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([tensor("same", (32,)), tensor("same", (32,), offset=128)], ("same name",)),
        ([tensor("a", (32,)), tensor("b", (32,), offset=96)], ("a shape and offset", "b at offset 96", "overlap")),
        ([tensor("a", (32,)), tensor("b", (32,))], ("overlap",)),
        ([tensor("a", (32,)), tensor("b", (32,), 999, 64)], ("a shape and offset", "overlap")),
        ([tensor("odd", (4,), offset=16)], ("odd offset", "multiple of 32")),
        ([tensor("past", (32,), offset=256)], ("past offset",)),
        ([tensor("past", (32,), 999, 256)], ("past offset",)),
        ([tensor("past", (32,), offset=160)], ("past shape and offset",)),
        ([tensor("past", (32,), offset=2**64 - 32)], ("past offset",)),
        ([tensor("big", (2**62, 4))], ("big shape", "2^63")),
        ([tensor("big", (2**40, 2**40))], ("big shape", "2^63")),
        ([tensor("big", (2**60,))], ("big shape and offset",)),
        ([tensor("none", ())], ("none n_dims",)),
        ([tensor("five", (1, 1, 1, 1, 1))], ("five n_dims",)),
        ([tensor("block", (48,), 8)], ("block shape", "multiple of 32", "Q8_0")),
        ([tensor("", (32,))], ("tensor 0 name length",)),
        ([tensor("n\n", (32,))], ("tensor 0 name length", "ASCII")),
    ],
)
def test_tensors_outside_the_format_are_refused(tmp_path: Path, tensors: list[bytes], words: tuple[str, ...]) -> None:
    refused(build(tmp_path / "bad.gguf", [], tensors, F32_BLOCK * 2), *words)


def test_data_without_tensors_is_refused(tmp_path: Path) -> None:
    refused(build(tmp_path / "none.gguf", [], [], F32_BLOCK), "tensor_count")


def test_a_type_that_is_not_known_is_kept_by_number(tmp_path: Path) -> None:
    path = build(tmp_path / "m.gguf", [], [tensor("a", (32,)), tensor("odd", (7,), 999, 128)], F32_BLOCK * 2)
    read = _core.read_gguf(str(path))
    assert read.unknown_types == {"odd": 999}
    assert list(read.tensors) == ["a"]


@pytest.mark.parametrize("n_tensors", [1, 2])
def test_q2_0_in_blocks_of_128_is_refused_with_the_size_expected(tmp_path: Path, n_tensors: int) -> None:
    shape, ours, other = (512, 64), 512 * 64 // 64 * 18, 512 * 64 // 128 * 34
    tensors = [tensor(f"t{i}", shape, 42, i * other) for i in range(n_tensors)]
    assert other % 32 == 0
    path = build(tmp_path / "fork.gguf", [], tensors, bytes(other * n_tensors))
    refused(path, "t0", "Q2_0", f"expected {ours} bytes", f"room for {other}", "34 bytes for 128 weights")
    right = build(tmp_path / "right.gguf", [], [tensor("t0", shape, 42)], bytes(ours))
    assert _core.read_gguf(str(right)).tensors["t0"].bytes == ours


# Files of several shards.


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    sizes, tensors = synthetic_model("tiny", layers=2, seed=3)
    return write_gguf(tmp_path / "model.gguf", sizes, tensors, split=3)


def test_any_shard_opens_the_whole_model(shards: list[Path]) -> None:
    assert [p.name for p in shards] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    expected = synthetic_model("tiny", layers=2, seed=3)[1]
    for path in shards:
        read = _core.read_gguf(str(path))
        assert read.paths == [str(p) for p in shards]
        assert read.metadata["general.architecture"] == "qwen4exp"
        assert set(read.tensors) == set(expected)
        assert all(np.array_equal(read.tensors[name].data, t.data) for name, t in expected.items())
        assert _core.open_gguf(str(path)).config.n_layers == 2


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_missing_shard_is_named(shards: list[Path], gone: int) -> None:
    shards[gone].unlink()
    opened = shards[(gone + 1) % 3]
    with pytest.raises(_core.GGUFError, match=rf"{shards[gone].name}: file\] expected shard {gone + 1} of 3"):
        _core.read_gguf(str(opened))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize(("field", "value"), [("split.count", 2), ("split.count", 4), ("split.no", 7)])
def test_a_shard_that_disagrees_is_named(shards: list[Path], which: int, field: str, value: int) -> None:
    patch(shards[which], {f"{field} value": value})
    with pytest.raises(_core.GGUFError, match=rf"{shards[which].name}: {field}\] expected .*, got {value}"):
        _core.read_gguf(str(shards[0]))


def test_a_total_of_tensors_that_disagrees_is_named(shards: list[Path]) -> None:
    patch(shards[1], {"split.tensors.count value": 5})
    with pytest.raises(_core.GGUFError, match=rf"{shards[1].name}: split.tensors.count\]"):
        _core.read_gguf(str(shards[0]))


def test_a_shard_under_another_name_or_number_is_refused(shards: list[Path], tmp_path: Path) -> None:
    renamed = Path(shutil.copy(shards[0], tmp_path / "renamed.gguf"))
    refused(renamed, "split.count", "NNNNN-of-NNNNN")
    shutil.copy(shards[0], shards[1])
    with pytest.raises(_core.GGUFError, match=rf"{shards[1].name}: split.no\] expected 1"):
        _core.read_gguf(str(shards[0]))


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    t = SynthTensor("F32", (32,), np.frombuffer(F32_BLOCK, np.uint8))
    for i in range(2):
        keys = [key("split.no", 2, "H", i), key("split.count", 2, "H", 2)]
        build(tmp_path / f"m-0000{i + 1}-of-00002.gguf", keys, [tensor("t", t.shape)], F32_BLOCK)
    refused(tmp_path / "m-00002-of-00002.gguf", "t name", "another shard")


def test_a_single_file_named_like_a_shard_is_refused(tiny: Path) -> None:
    renamed = tiny.rename(tiny.with_name("tiny-00001-of-00002.gguf"))
    refused(renamed, "split.count", "none")


def test_helpers_agree_with_the_file(tiny: Path) -> None:
    fields = gguf_fields.fields_of(tiny)
    assert fields.data_start == min(t.file_offset for t in _core.read_gguf(str(tiny)).tensors.values())
    assert text("ab") == b"\2" + bytes(7) + b"ab"
