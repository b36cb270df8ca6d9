"""Synthetic models: right sizes, plausible weights, the same bytes for the same seed, whole files or none."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from expertile import _core
from expertile.quants import TYPES, dequantize, tensor_bytes
from expertile.synth import PRESETS, SynthTensor, random_streams, synthetic_model, write_gguf


@pytest.mark.parametrize("name", TYPES)
def test_weights_are_finite_with_mean_zero_and_a_spread_of_one_over_the_root_of_the_inner_size(name: str) -> None:
    _, tensors = synthetic_model("tiny", gu=name, dn=name, expert_ffn=256, n_experts=4, top_k=2, seed=5)
    for part in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
        t = tensors[f"blk.0.{part}.weight"]
        assert (t.type, t.data.dtype, t.data.size) == (name, np.uint8, tensor_bytes(name, t.shape))
        weights = dequantize(t.data, t.type, t.shape)
        assert np.isfinite(weights).all()
        assert 0.9 < weights.std() * np.sqrt(t.shape[0]) < 1.1
        assert abs(weights.mean()) < 0.05 * weights.std()
        assert (weights != 0).mean() > 0.5


def test_routers_and_norms_are_f32() -> None:
    _, tensors = synthetic_model("tiny")
    for part in ("hc_ffn_norm", "hc_ffn_inject", "ffn_gate_inp", "ffn_gate_inp_shexp"):
        assert tensors[f"blk.0.{part}.weight"].type == "F32"
    gamma = tensors["blk.0.hc_ffn_norm.weight"].data.view("<f4")
    assert abs(gamma.mean() - 1) < 0.05
    assert 0.05 < gamma.std() < 0.15


def test_the_seed_decides_every_byte_and_a_tensor_does_not_depend_on_the_others() -> None:
    _, one = synthetic_model("tiny", layers=1, seed=7)
    _, two = synthetic_model("tiny", layers=2, seed=7, dn="Q8_0", vocab=5)
    _, other = synthetic_model("tiny", layers=1, seed=8)
    for name, t in one.items():
        if "ffn_down_exps" not in name:
            assert np.array_equal(t.data, two[name].data), name
        assert not np.array_equal(t.data, other[name].data), name
    up, gate = two["blk.0.ffn_up_exps.weight"], two["blk.0.ffn_gate_exps.weight"]
    assert not np.array_equal(up.data, gate.data)
    assert not np.array_equal(up.data, two["blk.1.ffn_up_exps.weight"].data)
    assert two["token_embd.weight"].shape == (512, 5)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"layers": 2, "expert_ffn": [32, 96]}])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_model_passes_the_check_of_its_own_sizes(preset: str, options: dict, tmp_path: Path) -> None:
    sizes, tensors = synthetic_model(preset, n_experts=12, **options)
    config = _core.Config(**sizes)
    core = [_core.Tensor(name, t.type, list(t.shape), t.data) for name, t in tensors.items()]
    assert set(_core.Model(config, core).tensors) == set(tensors)
    read = _core.open_gguf(str(write_gguf(tmp_path / "m.gguf", sizes, tensors)[0])).config
    for field, value in sizes.items():
        assert getattr(read, field) == (np.float32(value) if field == "rms_eps" else value)


def test_a_whole_layer_of_flash_next_is_made_in_seconds() -> None:
    start = time.process_time()
    sizes, tensors = synthetic_model("flash-next")
    seconds = time.process_time() - start
    assert sizes == {"n_layers": 1, **PRESETS["flash-next"], "expert_ffn": [640]}
    assert tensors["blk.0.ffn_gate_exps.weight"].data.nbytes * 2 == 512 * 947_200
    assert tensors["blk.0.ffn_down_exps.weight"].data.nbytes == 512 * 921_600
    assert seconds < 8


def test_small_sizes_that_no_quant_block_divides_fall_back_to_f16() -> None:
    _, tensors = synthetic_model("tiny", dim=40, expert_ffn=24, shared_ffn=20, low_rank=5, gu="F32", dn="F16")
    types = {name.split(".")[2]: t.type for name, t in tensors.items()}
    assert (types["hc_ffn_up"], types["ffn_down_shexp"], types["hc_ffn_down"]) == ("F16", "F16", "Q8_0")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "huge"}, "preset"),
        ({"layers": 0}, "at least 1 layer"),
        ({"gu": "Q9_9"}, "Q9_9"),
        ({"dn": "Q4_K"}, "multiples of 256"),
        ({"width": 5}, "'width'"),
        ({"layers": 2, "expert_ffn": [64]}, "expected 2 sizes, got 1"),
    ],
)
def test_wrong_options_are_refused(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        synthetic_model(**{"preset": "tiny", **options})


def test_streams_are_normal_and_a_token_does_not_depend_on_the_number_of_tokens() -> None:
    x = random_streams(200, 4, 96, seed=2)
    assert (x.shape, x.dtype) == ((200, 4, 96), np.float32)
    assert np.array_equal(x[:7], random_streams(7, 4, 96, seed=2))
    assert not np.array_equal(x, random_streams(200, 4, 96, seed=3))
    assert np.isfinite(x).all()
    assert 0.9 < x.std() < 1.4
    assert random_streams(0, 4, 96).shape == (0, 4, 96)


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    sizes, tensors = synthetic_model("tiny", n_experts=2, top_k=1)
    path = tmp_path / "m.gguf"
    path.write_bytes(b"old")
    broken = {**tensors, "last": SynthTensor("F32", (4,), None)}  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        write_gguf(path, sizes, broken)
    assert path.read_bytes() == b"old"

    class Failing:
        type, shape = "F32", (4,)

        @property
        def data(self) -> np.ndarray:
            self.reads = getattr(self, "reads", 0) + 1
            if self.reads > 2:  # after the header, among the data
                raise OSError("no space left")
            return np.zeros(16, np.uint8)

    with pytest.raises(OSError, match="no space left"):
        write_gguf(path, sizes, {**tensors, "last": Failing()})  # type: ignore[dict-item]
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    write_gguf(path, sizes, tensors)
    assert path.read_bytes()[:4] == b"GGUF"


def test_metadata_and_shards_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    sizes, tensors = synthetic_model("tiny", n_experts=2, top_k=1)
    for bad in (None, [1, "a"], [[1]], [], {"a": 1}):
        with pytest.raises(ValueError, match="metadata"):
            write_gguf(tmp_path / "m.gguf", sizes, tensors, metadata={"bad": bad})
    for split in (0, len(tensors) + 1):
        with pytest.raises(ValueError, match="shards"):
            write_gguf(tmp_path / "m.gguf", sizes, tensors, split=split)
    assert list(tmp_path.iterdir()) == []
