"""Damaged GGUF files: every field of a header set to what breaks arithmetic, and files cut short.

All of it under a limit on memory: an allocation by a number that the file merely claims would raise MemoryError.
"""

from __future__ import annotations

import contextlib
import gc
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_fields import Field, Fields

from expertile import _core
from expertile.quants import TYPES, tensor_bytes
from expertile.synth import synthetic_model, write_gguf

GOLDEN = Path(__file__).parent / "data" / "golden"
VALUES = (0, 2**31, 2**63 - 1, 2**64 - 1)
HEADROOM = 96 << 20
# Fields whose size decides nothing about the layout of the file: any value is as good as another.
FREE = re.compile(r"(general\.name|tokenizer\..*|qwen4exp\..*) (value|element \d+ length)$")
MOE_KEYS = (
    "block_count",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "expert_feed_forward_length",
    "expert_shared_feed_forward_length",
    "attention.layer_norm_rms_epsilon",
    "hyper_connection.count",
    "hyper_connection.low_rank",
)


@pytest.fixture(params=["synthetic", "tiny/f32", "wide-experts"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    if request.param == "synthetic":
        sizes, tensors = synthetic_model("tiny", expert_ffn=[64], n_experts=4, top_k=2, vocab=4)
        keys = {"general.tags": ["one", "another"], "general.sizes": [1, 2, 3], "general.alignment": 32}
        write_gguf(path, sizes, tensors, metadata=keys)
    else:
        shutil.copyfile(GOLDEN / request.param / "model.gguf", path)
    return path


@contextlib.contextmanager
def limited_memory(path: Path) -> Iterator[None]:
    """No more address space than there is in use, the file itself, and some headroom."""
    if sys.platform != "linux":  # elsewhere the limit is not enforced
        yield
        return
    import resource

    gc.collect()
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + path.stat().st_size + HEADROOM, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)


def outcome(path: Path, moe: bool = False) -> str | None:
    """The message of the refusal, None where the file opens."""
    try:
        if moe:
            _core.open_gguf(str(path))
        else:
            _core.read_gguf(str(path))
    except _core.GGUFError as error:
        message = str(error)
        assert re.fullmatch(rf"\[{re.escape(str(path))}: .+\] expected .+, got .+", message, re.DOTALL), message
        return message
    return None


@contextlib.contextmanager
def changed(path: Path, field: Field, value: int) -> Iterator[None]:
    with path.open("r+b", buffering=0) as file:
        file.seek(field.at)
        file.write((value % (1 << (8 * field.width))).to_bytes(field.width, "little"))
        try:
            yield
        finally:
            file.seek(field.at)
            file.write(field.value.to_bytes(field.width, "little"))


def test_every_count_length_dimension_and_offset_that_lies_is_refused(model: Path) -> None:
    assert outcome(model) is None
    fields = Fields(model.read_bytes()).fields
    accepted = []
    with limited_memory(model):
        for field in fields:
            for value in VALUES:
                if value % (1 << (8 * field.width)) == field.value or FREE.match(field.name):
                    continue
                if field.name.endswith((" type", "general.sizes value")) or field.name.endswith("alignment value"):
                    continue  # types have a test of their own; 2^31 is a lawful alignment where nothing is aligned
                with changed(model, field, value):
                    if outcome(model) is None:
                        accepted.append((field.name, value))
    assert accepted == []
    assert outcome(model) is None
    assert len(fields) > 100


def test_the_message_names_the_field(model: Path) -> None:
    fields = Fields(model.read_bytes())
    up = "blk.0.ffn_up_exps.weight"
    expected = {
        "version": "version",
        "tensor_count": "tensor_count",
        "metadata_kv_count": "metadata_kv_count",
        "key 3 length": "metadata entry 3 key length",
        "general.architecture value length": "general.architecture value length",
        "tensor 2 name length": "tensor 2 name length",
        f"{up} n_dims": f"{up} n_dims",
        f"{up} dimension 1": up,
        f"{up} offset": f"{up} offset",
    }
    for name, words in expected.items():
        with changed(model, fields[name], 2**64 - 1):
            assert f"{model}: {words}" in (outcome(model) or ""), name


def test_type_numbers_that_lie_never_crash(model: Path) -> None:
    known = {info.id for info in TYPES.values()}
    with limited_memory(model):
        for field in Fields(model.read_bytes()).fields:
            if field.name.endswith(" type"):
                for value in (*range(48), 2**31, 2**32 - 1):
                    with changed(model, field, value):
                        message = outcome(model)
                    is_tensor = field.name.endswith("weight type")
                    if message is None and is_tensor and value not in known:
                        continue  # kept as unknown: an error when the MoE half needs it
                    assert message is None or "expected" in message


def test_model_keys_that_lie_are_refused_by_name(model: Path) -> None:
    fields = Fields(model.read_bytes())
    for key in MOE_KEYS:
        name = f"qwen4exp.{key} value"
        field = next((f for f in fields.fields if f.name == name), None)
        if field is None:
            continue  # an array, by layer
        with limited_memory(model):
            for value in (0, 2**31, 2**31 - 1, 2**32 - 1):
                with changed(model, field, value):
                    message = outcome(model, moe=True)
                    assert message is not None, (key, value)
                    # A size that is lawful by itself disagrees with the first tensor that it shapes.
                    assert f"qwen4exp.{key}]" in message or value == 2**31 - 1, message


def test_a_file_cut_anywhere_in_its_header_is_refused(model: Path) -> None:
    end = Fields(model.read_bytes()).end
    with model.open("r+b") as file, limited_memory(model):
        for size in range(end, -1, -1):
            file.truncate(size)
            message = outcome(model)
            assert message is not None, f"cut at {size} of {end}"
    assert "magic" in message


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_a_refusal_leaves_no_mapping_behind(model: Path) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count(str(model))

    file = _core.read_gguf(str(model))
    assert mappings() == 1
    del file
    with changed(model, Fields(model.read_bytes())["blk.0.ffn_up_exps.weight offset"], 2**63):
        assert outcome(model) is not None
    with changed(model, Fields(model.read_bytes())["blk.0.ffn_up_exps.weight type"], 999):
        assert outcome(model, moe=True) is not None
    gc.collect()
    assert mappings() == 0


def test_data_cut_by_one_byte_is_refused(model: Path) -> None:
    fields = Fields(model.read_bytes())
    names = [f.name.removesuffix(" offset") for f in fields.fields if f.name.endswith(" offset")]
    last = max(names, key=lambda name: fields[f"{name} offset"].value)
    shape = [fields[f"{last} dimension {d}"].value for d in range(fields[f"{last} n_dims"].value)]
    kind = next(info.name for info in TYPES.values() if info.id == fields[f"{last} type"].value)
    end = fields.data_start + fields[f"{last} offset"].value + tensor_bytes(kind, shape)
    with model.open("r+b") as file:
        file.truncate(end)
        assert outcome(model) is None
        file.truncate(end - 1)
        assert f"{last} shape and offset" in (outcome(model) or "")
