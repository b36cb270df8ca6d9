"""The MoE half out of a GGUF file: sizes from its keys, and every tensor checked against them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_fields import fields_of, patch

from expertile import _core
from expertile.synth import SynthTensor, synthetic_model, write_gguf

GOLDEN = Path(__file__).parent / "data" / "golden"
MOE_PARTS = (
    "hc_ffn_norm", "hc_ffn_down", "hc_ffn_up", "hc_ffn_inject", "ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps",
    "ffn_down_exps", "ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp",
)  # fmt: skip


def write(path: Path, tensors: dict[str, SynthTensor], sizes: dict[str, Any], **keys: Any) -> Path:
    return write_gguf(path / "model.gguf", sizes, tensors, metadata=keys.pop("metadata", None), **keys)[0]


def small(layers: int = 2, **options: Any) -> tuple[dict[str, Any], dict[str, SynthTensor]]:
    return synthetic_model("tiny", layers=layers, n_experts=4, top_k=2, **options)


def floats(*shape: int) -> SynthTensor:
    return SynthTensor("F32", shape, np.ones(int(np.prod(shape)), "<f4").view(np.uint8))


def refused(path: Path, *words: str) -> None:
    with pytest.raises(_core.GGUFError) as error:
        _core.open_gguf(str(path))
    for word in (str(path), *words):
        assert word in str(error.value), f"{word!r} not in {error.value!s}"


@pytest.mark.parametrize(
    ("case", "layers", "sizes"),
    [
        ("tiny", 2, (512, 16, 4, 64, 64, 4, 32)),
        ("tiny/f32", 2, (64, 5, 2, 40, 24, 4, 20)),
        ("wide-experts", 1, (128, 512, 10, 32, 64, 4, 32)),
    ],
)
def test_the_sizes_of_the_golden_models(case: str, layers: int, sizes: tuple[int, ...]) -> None:
    c = _core.open_gguf(str(GOLDEN / case / "model.gguf")).config
    dim, experts, top_k, ffn, shared, streams, rank = sizes
    assert (c.n_layers, c.dim, c.n_experts, c.top_k) == (layers, dim, experts, top_k)
    assert (c.expert_ffn, c.shared_ffn, c.n_streams, c.low_rank) == ([ffn] * layers, shared, streams, rank)
    assert c.rms_eps == np.float32(1e-6)


def test_a_layer_may_have_types_and_an_expert_size_of_its_own(tmp_path: Path) -> None:
    types = {"ffn_up_exps": "Q4_K", "blk.1.ffn_gate_exps": "Q8_0", "blk.1.ffn_down_exps": "Q5_1"}
    sizes, tensors = small(types=types, expert_ffn=[64, 96])
    model = _core.open_gguf(str(write(tmp_path, tensors, sizes)))
    assert model.config.expert_ffn == [64, 96]
    found = {name: t.type for name, t in model.tensors.items() if name.endswith("exps.weight")}
    assert found == {
        "blk.0.ffn_gate_exps.weight": "IQ2_XS",
        "blk.0.ffn_up_exps.weight": "Q4_K",
        "blk.0.ffn_down_exps.weight": "IQ4_NL",
        "blk.1.ffn_gate_exps.weight": "Q8_0",
        "blk.1.ffn_up_exps.weight": "Q4_K",
        "blk.1.ffn_down_exps.weight": "Q5_1",
    }


@pytest.mark.parametrize(("number", "name"), [(19, "IQ1_S"), (39, "MXFP4"), (3, "Q4_1"), (77, "type 77")])
@pytest.mark.parametrize("part", ["ffn_up_exps", "ffn_gate_inp", "hc_ffn_norm", "ffn_down_shexp"])
def test_an_unsupported_type_is_named_with_its_tensor(tmp_path: Path, number: int, name: str, part: str) -> None:
    sizes, tensors = small()
    path = patch(write(tmp_path, tensors, sizes), {f"blk.1.{part}.weight type": number})
    assert f"blk.1.{part}.weight" in _core.read_gguf(str(path)).unknown_types
    refused(path, f"blk.1.{part}.weight", name, "IQ4_NL")


def test_an_unsupported_type_outside_the_moe_half_is_no_error(tmp_path: Path) -> None:
    sizes, tensors = small()
    path = patch(
        write(tmp_path, {**tensors, "blk.0.attn_q.weight": floats(32)}, sizes), {"blk.0.attn_q.weight type": 39}
    )
    assert _core.open_gguf(str(path)).config.n_layers == 2


def test_a_draft_block_past_the_trunk_is_no_layer(tmp_path: Path) -> None:
    sizes, tensors = small(layers=3)
    path = write(tmp_path, tensors, sizes, metadata={"qwen4exp.nextn_predict_layers": 1})
    assert _core.open_gguf(str(path)).config.n_layers == 2
    refused(patch(path, {"qwen4exp.nextn_predict_layers value": 3}), "qwen4exp.nextn_predict_layers")


def test_gate_and_up_may_be_fused(tmp_path: Path) -> None:
    sizes, tensors = small(fused=True)
    model = _core.open_gguf(str(write(tmp_path, tensors, sizes)))
    assert model.tensors["blk.0.ffn_gate_up_exps.weight"].shape == (512, 128, 4)
    both = {**tensors, "blk.0.ffn_up_exps.weight": small()[1]["blk.0.ffn_up_exps.weight"]}
    refused(write(tmp_path, both, sizes), "blk.0.ffn_up_exps.weight", "both")


def test_the_norm_may_be_written_by_stream(tmp_path: Path) -> None:
    sizes, tensors = small()
    tensors["blk.0.hc_ffn_norm.weight"] = floats(512, 4)
    assert _core.open_gguf(str(write(tmp_path, tensors, sizes))).config.dim == 512


def test_trailing_dimensions_of_one_may_be_dropped(tmp_path: Path) -> None:
    sizes, tensors = synthetic_model("tiny", n_experts=1, top_k=1)
    for name, t in tensors.items():
        if name.endswith("exps.weight") or name.endswith("gate_inp.weight"):
            tensors[name] = SynthTensor(t.type, t.shape[:-1], t.data)
    assert _core.open_gguf(str(write(tmp_path, tensors, sizes))).config.n_experts == 1


def test_scales_of_experts_are_accepted_as_f32_of_the_right_shape(tmp_path: Path) -> None:
    sizes, tensors = small()
    tensors |= {"blk.1.ffn_up_exps.scale": floats(4), "blk.0.ffn_down_shexp.scale": floats(1)}
    assert _core.open_gguf(str(write(tmp_path, tensors, sizes))).tensors["blk.1.ffn_up_exps.scale"].shape == (4,)
    tensors["blk.1.ffn_up_exps.scale"] = floats(5)
    refused(write(tmp_path, tensors, sizes), "blk.1.ffn_up_exps.scale", "{4}", "{5}")


@pytest.mark.parametrize("name", ["ffn_gate_inp.bias", "exp_probs_b.bias", "ffn_gate_up_exps.scale", "hc_ffn_up.scale"])
def test_a_factor_or_term_that_would_go_unused_is_refused(tmp_path: Path, name: str) -> None:
    sizes, tensors = small()
    refused(write(tmp_path, {**tensors, f"blk.1.{name}": floats(4)}, sizes), f"blk.1.{name}", "no such tensor")


@pytest.mark.parametrize("part", MOE_PARTS)
def test_every_tensor_of_every_layer_must_be_there(tmp_path: Path, part: str) -> None:
    sizes, tensors = small()
    name = f"blk.1.{part}.weight"
    shape = tensors.pop(name).shape
    refused(write(tmp_path, tensors, sizes), name, "{" + ", ".join(map(str, shape)) + "}", "none")


@pytest.mark.parametrize("part", MOE_PARTS)
def test_every_tensor_must_have_its_shape(tmp_path: Path, part: str) -> None:
    sizes, tensors = small()
    name = f"blk.0.{part}.weight"
    wrong = (*tensors[name].shape[:-1], 3 * 256)
    tensors[name] = floats(*wrong)
    refused(write(tmp_path, tensors, sizes), name, "expected shape", "768}")


@pytest.mark.parametrize("part", ["hc_ffn_norm", "ffn_gate_inp_shexp"])
def test_norms_and_the_shared_gate_must_be_f32(tmp_path: Path, part: str) -> None:
    sizes, tensors = small(types={"ffn_gate_inp_shexp": "F16"}) if part != "hc_ffn_norm" else small()
    if part == "hc_ffn_norm":
        tensors["blk.0.hc_ffn_norm.weight"] = SynthTensor("F16", (2048,), np.ones(2048, "<f2").view(np.uint8))
    refused(write(tmp_path, tensors, sizes), f"blk.0.{part}.weight", "F32", "F16")


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    sizes, tensors = small()
    refused(write(tmp_path, tensors, sizes, architecture="qwen3moe"), "general.architecture", "qwen4exp", "qwen3moe")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("expert_used_count", 5, "1 to 4"),
        ("expert_count", 4097, "1 to 4096"),
        ("expert_count", 0, "got 0"),
        ("hyper_connection.count", 17, "1 to 16"),
        ("attention.layer_norm_rms_epsilon", 0.0, "above 0"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "above 0"),
        ("attention.layer_norm_rms_epsilon", float("inf"), "above 0"),
        ("attention.layer_norm_rms_epsilon", 1, "floating-point"),
        ("expert_feed_forward_length", [64, 64, 64], "2 elements"),
        ("expert_feed_forward_length", [64, 0], "got 0"),
        ("expert_feed_forward_length", [64.0, 64.0], "whole numbers"),
        ("embedding_length", "512", "a string"),
        ("embedding_length", True, "true"),
        ("block_count", -1, "got -1"),
        ("block_count", 2**40, str(2**40)),
    ],
)
def test_sizes_outside_the_limits_are_refused_by_key(tmp_path: Path, key: str, value: Any, words: str) -> None:
    sizes, tensors = small()
    field = "n_streams" if words == "1 to 16" else f"qwen4exp.{key}"
    refused(write(tmp_path, tensors, sizes, metadata={f"qwen4exp.{key}": value}), f"{field}]", words)


def test_no_size_is_ever_assumed(tmp_path: Path) -> None:
    sizes, tensors = small()
    path = write(tmp_path, tensors, sizes)
    raw = path.read_bytes()
    keys = {f.name.removesuffix(" value") for f in fields_of(path).fields if f.name.startswith("qwen4exp.")}
    keys = {key.removesuffix(" type") for key in keys}
    assert len(keys) == 9
    for key in keys:
        path.write_bytes(raw.replace(key.encode(), key.replace("qwen4exp", "qwen4ex_").encode()))
        refused(path, key, "no such key")
