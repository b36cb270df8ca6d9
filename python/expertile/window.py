"""The engine: a window of prompt tokens through the MoE half of every layer."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from expertile import _core
from expertile.arrays import checked, checked_out, checked_tile, flag, instance, listed, text, whole
from expertile.calls import Calls, check_callback
from expertile.device import Device, open_device
from expertile.device_array import is_device_array, run_on_device
from expertile.model import Model, open_gguf
from expertile.numeric import to_half
from expertile.plan import empty_plan
from expertile.plan_input import checked_plan
from expertile.route_error import RouteError

Arrays = dict[str, np.ndarray]
TokenMixer = Callable[[int, np.ndarray], None]


class Window:
    """Buffers for up to `max_tokens` prompt tokens, and the programs of every layer.

    model       a Model (or what open_gguf gives)
    device      a Device, or its kind; None = the best that is present
    max_tokens  the largest chunk
    plan        a variant of the plan; "" = the device's default
    gate_up     tile (M, N, K, S) of the grouped gate and up GEMMs: rows, columns, inner step, simdgroups
    down        tile of the grouped down GEMM, with the same M
    threads     worker threads, where `device` is a kind; 0 = as many as this process may use
    fuse        which kernels of a whole layer run as one, with the same bits: "swiglu" (the experts' gate, up and
                activation), "gatherless" (gate and up read the tokens' rows themselves; not with swiglu), "combine"
                (the weighted sum and the write into the streams); None = what was measured to be the fastest on the
                device: "combine" on cuda, nothing elsewhere
    elementwise "scalar" or "vector" (four columns a thread) kernels behind the GEMMs, with the same bits; "" = the
                device's default: "vector" on cuda, where it moves 1.4 times the bytes a second
    precision   how the experts' GEMMs (the routed and the shared one's) take their weights: "exact", as halves, within
                1e-3 of the float reference; "bf16", on cpu alone, rounded once more, within 4e-3: faster with AMX's
                tiles from some twenty rows an expert on, no faster with few. All else stays exact: its sums choose the
                experts.
    profile     time every step by itself (`seconds`)

    Raises ValueError for sizes over a limit, a tile that is not compiled (naming those that are) or a precision that
    the device lacks, TypeError for an option of another type, RuntimeError where the device has not enough memory.

    `x` is [T, C, D] fp32: the residual streams, T <= max_tokens. One call at a time runs; others wait, and one that a
    callback of the window makes is a ValueError. A callback must not wait for another thread's call either: that call
    cannot run before the callback returns. Calls release the GIL. A process that forks while a call runs in another
    thread leaves the child no use of that window; it may make new ones.
    """

    def __init__(
        self,
        model: Model,
        device: Device | str | None = None,
        max_tokens: int = 512,
        *,
        plan: str = "",
        gate_up: tuple[int, int, int, int] = (16, 64, 32, 2),
        down: tuple[int, int, int, int] = (16, 64, 32, 2),
        threads: int = 0,
        fuse: Sequence[str] | None = None,
        elementwise: str = "",
        precision: str = "exact",
        profile: bool = False,
    ) -> None:
        max_tokens = whole(max_tokens, 1, 1 << 20, "Window: max_tokens")
        gate_up, down = checked_tile(gate_up, "Window: gate_up"), checked_tile(down, "Window: down")
        names = None if fuse is None else listed(fuse, "None or a list of names", "Window: fuse")
        self.model: Model = instance(model, Model, "a Model", "Window: model")
        self.config = self.model.config
        if device is not None:
            instance(device, (Device, str), "a Device, its kind or None", "Window: device")
        self.device = device if isinstance(device, Device) else open_device(device, threads=threads)
        self.max_tokens = max_tokens
        self.precision = precision
        self._core = _core.Window(
            self.model._core,
            self.device,
            max_tokens,
            text(plan, "Window: plan"),
            list(gate_up),
            list(down),
            None if names is None else [text(name, "Window: fuse") for name in names],
            text(elementwise, "Window: elementwise"),
            text(precision, "Window: precision"),
            flag(profile, "Window: profile"),
        )
        self._tiles = (gate_up, down)
        self._calls = Calls()

    @classmethod
    def from_gguf(
        cls, path: str | os.PathLike[str], device: Device | str | None = None, max_tokens: int = 512, **options: Any
    ) -> Window:
        """A window over a GGUF file; `options` as for Window."""
        return cls(open_gguf(path), device, max_tokens, **options)

    # The whole.

    def prompt_chunk(
        self,
        x: np.ndarray,
        out: np.ndarray | None = None,
        token_mixer: TokenMixer | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:
        """The MoE half of every layer, in order.

        x            [T, C, D] fp32, not changed
        out          [T, C, D] fp32, C-contiguous, takes the result; None = a new array
        token_mixer  called as token_mixer(layer, streams) before each layer's MoE half with a writable [T, C, D] view:
                     where a server puts its attention
        progress     called as progress(layer, n_layers) after each layer

        x may also lie in the device's memory: a DeviceArray or, on cuda, whatever has `__cuda_array_interface__` (a
        torch tensor). Then no copy passes through the host, `out` is such an array too (None = a new DeviceArray), and
        the token_mixer gets the streams as a DeviceArray, to change in place. Work that wrote `x`, or that the
        token_mixer leaves behind, is waited for: by order where the device was opened on the caller's stream, else by
        waiting until the GPU is idle. On return the result is there.

        Raises RouteError (a RuntimeError) for tokens that cannot be routed; `out` then holds the other tokens' results
        and NaN for these.
        """
        return self._run(range(self.config.n_layers), x, out, token_mixer, progress, "prompt_chunk")

    def moe_layer(self, layer: int, x: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        """The MoE half of one layer: x [T, C, D] fp32 to the same after the layer. Errors as in prompt_chunk."""
        return self._run([self._layer(layer, "moe_layer")], x, out, None, None, "moe_layer")

    def _run(
        self,
        layers: Sequence[int],
        x: np.ndarray,
        out: np.ndarray | None,
        token_mixer: TokenMixer | None,
        progress: Callable[[int, int], None] | None,
        where: str,
    ) -> Any:
        for name, callback in (("token_mixer", token_mixer), ("progress", progress)):
            check_callback(callback, f"{where}: {name}")
        if is_device_array(x):
            return run_on_device(self, layers, x, out, token_mixer, progress, where)
        x = self._streams(x, where)
        out, n_tokens = checked_out(out, x.shape, where), x.shape[0]
        if n_tokens == 0:
            return out
        with self._calls.one(where):
            self._core.write("streams", x)
            self._core.clear_faults(n_tokens)
            for layer in layers:
                if token_mixer is not None:
                    self._mix(token_mixer, layer, x.shape, where)
                self._core.moe_layer(layer, n_tokens)
                if progress is not None:
                    self._calls.back(progress, f"{where}: progress", layer, len(layers))
            faults = self._core.route_faults(n_tokens)
            self._core.read("streams", out)
        if faults:
            out[list(faults)] = np.nan
            raise RouteError(faults)
        return out

    def _mix(self, token_mixer: TokenMixer, layer: int, shape: tuple[int, ...], where: str) -> None:
        memory = self._core.host_view("streams")
        if memory is None:
            streams = np.empty(shape, np.float32)
            self._core.read("streams", streams)
        else:
            streams = memory[: int(np.prod(shape)) * 4].view(np.float32).reshape(shape)
        self._calls.back(token_mixer, f"{where}: token_mixer", layer, streams)
        if memory is None:
            self._core.write("streams", streams)

    # The steps by themselves.

    def hc_read(self, layer: int, x: np.ndarray) -> Arrays:
        """Hyper-connection read of x [T, C, D].

        normed_half fp16 [T, C*D], inverse_rms fp32 [T, C], low_rank fp32 [T, R] (before 1/C and silu), low_rank_half
        fp16 [T, R], mixed fp32 [T, D], mixed_half fp16 [T, D], inject fp32 [T, C] (before 1/C and sigmoid)
        """
        c, x = self.config, self._streams(x, "hc_read")
        t = x.shape[0]
        return self._step(
            "hc_read",
            layer,
            t,
            {"streams": x},
            {
                "normed_half": ((t, c.n_streams * c.dim), np.float16),
                "inverse_rms": ((t, c.n_streams), np.float32),
                "low_rank": ((t, c.low_rank), np.float32),
                "low_rank_half": ((t, c.low_rank), np.float16),
                "mixed": ((t, c.dim), np.float32),
                "mixed_half": ((t, c.dim), np.float16),
                "inject": ((t, c.n_streams), np.float32),
            },
        )

    def route(self, layer: int, mixed: np.ndarray) -> Arrays:
        """Router on mixed [T, D] fp32: logits fp32 [T, E], ids int32 [T, K], weights fp32 [T, K].

        Raises RouteError for tokens that cannot be routed.
        """
        c, mixed = self.config, self._tokens(mixed, np.float32, self.config.dim, "route: mixed")
        t = mixed.shape[0]
        with self._calls.one("route"):
            self._core.clear_faults(t)
            result = self._step(
                "route",
                layer,
                t,
                {"mixed": mixed, "mixed_half": to_half(mixed)[0]},
                {
                    "logits": ((t, c.n_experts), np.float32),
                    "ids": ((t, c.top_k), np.int32),
                    "weights": ((t, c.top_k), np.float32),
                },
            )
            faults = self._core.route_faults(t)
        if faults:
            raise RouteError(faults)
        return result

    def plan(self, ids: np.ndarray, weights: np.ndarray) -> Arrays:
        """Sorts entries into rows: the arrays of expertile.plan.Plan, by name.

        ids [T, K] int32 in -1..E-1 (-1 = skipped), weights [T, K] fp32. Raises ValueError for another id.
        """
        c = self.config
        ids = self._tokens(ids, np.int32, c.top_k, "plan: ids")
        weights = checked(weights, np.float32, ids.shape, "plan: weights")
        wrong = (ids < -1) | (ids >= c.n_experts)
        if wrong.any():
            token, slot = np.argwhere(wrong)[0]
            raise ValueError(f"[plan: ids[{token}, {slot}]] expected -1..{c.n_experts - 1}, got {ids[token, slot]}")
        if ids.shape[0] == 0:
            return empty_plan(c.n_experts)
        t, entries = ids.shape[0], ids.size
        blocks = -(-entries // 1024)
        with self._calls.one("plan"):
            result = self._step(
                "plan",
                0,
                t,
                {"ids": ids, "weights": weights},
                {
                    "block_count": ((blocks, c.n_experts), np.uint32),
                    "expert_offset": ((c.n_experts + 1,), np.uint32),
                    "position": ((entries,), np.int32),
                    "meta": ((14,), np.uint32),
                },
            )
            n_rows, n_tiles = int(result["meta"][0]), int(result["meta"][1])
            result["tiles"] = self._get("tiles", (n_tiles, 4), np.uint32)
            result["row_token"] = self._get("row_token", (n_rows,), np.int32)
            result["row_weight"] = self._get("row_weight", (n_rows,), np.float32)
        return result

    def gather(self, plan: Arrays, mixed_half: np.ndarray) -> np.ndarray:
        """rows fp16 [n_rows, D]: mixed_half [T, D] fp16 by row_token; padding rows are zero."""
        mixed_half = self._tokens(mixed_half, np.float16, self.config.dim, "gather: mixed_half")
        inputs = self._plan_inputs(plan, mixed_half.shape[0], 0, "gather")
        shape = (inputs["row_token"].size, self.config.dim)
        inputs["mixed_half"] = mixed_half
        return self._step("gather", 0, mixed_half.shape[0], inputs, {"rows": (shape, np.float16)})["rows"]

    def experts(self, layer: int, plan: Arrays, rows: np.ndarray) -> Arrays:
        """gate, up fp32 [n_rows, F], hidden fp16 [n_rows, F] = silu(gate) * up, expert_out fp32 [n_rows, D].

        Padding rows of gate, up and expert_out are not written.
        """
        ffn = self.config.expert_ffn[self._layer(layer, "experts")]
        inputs = self._plan_inputs(plan, None, layer, "experts")
        n_rows = inputs["row_token"].size
        rows = checked(rows, np.float16, (n_rows, self.config.dim), "experts: rows")
        return self._step(
            "experts",
            layer,
            inputs["position"].size // self.config.top_k,
            inputs | {"rows": rows},
            {
                "gate": ((n_rows, ffn), np.float32),
                "up": ((n_rows, ffn), np.float32),
                "hidden": ((n_rows, ffn), np.float16),
                "expert_out": ((n_rows, self.config.dim), np.float32),
            },
        )

    def shared(self, layer: int, mixed: np.ndarray) -> Arrays:
        """The shared expert on mixed [T, D] fp32.

        shared_gate, shared_up fp32 [T, Fs], shared_hidden fp16 [T, Fs], shared_scalar fp32 [T] (before the sigmoid),
        shared_out fp32 [T, D] (before the gate)
        """
        c, mixed = self.config, self._tokens(mixed, np.float32, self.config.dim, "shared: mixed")
        t = mixed.shape[0]
        return self._step(
            "shared",
            layer,
            t,
            {"mixed": mixed, "mixed_half": to_half(mixed)[0]},
            {
                "shared_gate": ((t, c.shared_ffn), np.float32),
                "shared_up": ((t, c.shared_ffn), np.float32),
                "shared_hidden": ((t, c.shared_ffn), np.float16),
                "shared_scalar": ((t,), np.float32),
                "shared_out": ((t, c.dim), np.float32),
            },
        )

    def combine(self, plan: Arrays, expert_out: np.ndarray) -> np.ndarray:
        """routed fp32 [T, D]: a token's rows of expert_out [n_rows, D], weighted, summed in slot order."""
        inputs, dim = self._plan_inputs(plan, None, 0, "combine"), self.config.dim
        inputs["expert_out"] = checked(expert_out, np.float32, (inputs["row_token"].size, dim), "combine: expert_out")
        t = inputs["position"].size // self.config.top_k
        return self._step("combine", 0, t, inputs, {"routed": ((t, dim), np.float32)})["routed"]

    def hc_write(
        self, x: np.ndarray, routed: np.ndarray, shared_out: np.ndarray, shared_scalar: np.ndarray, inject: np.ndarray
    ) -> np.ndarray:
        """x [T, C, D] + 2 * sigmoid(inject / C) * (routed + sigmoid(shared_scalar) * shared_out)."""
        c, x = self.config, self._streams(x, "hc_write: x")
        t = x.shape[0]
        inputs = {
            "streams": x,
            "routed": checked(routed, np.float32, (t, c.dim), "hc_write: routed"),
            "shared_out": checked(shared_out, np.float32, (t, c.dim), "hc_write: shared_out"),
            "shared_scalar": checked(shared_scalar, np.float32, (t,), "hc_write: shared_scalar"),
            "inject": checked(inject, np.float32, (t, c.n_streams), "hc_write: inject"),
        }
        return self._step("hc_write", 0, t, inputs, {"streams": (x.shape, np.float32)})["streams"]

    # What it costs.

    @property
    def seconds(self) -> dict[str, float]:
        """Device seconds by step since the window was made (with profile=True, or of steps run by themselves)."""
        return dict(self._core.seconds())

    @property
    def saturated(self) -> int:
        """Activations that met the fp16 limit of +-65504 since the window was made."""
        return int(self._core.saturated())

    def memory(self) -> int:
        """Bytes of the window's own buffers, without the weights."""
        return int(self._core.memory())

    def program(self, layer: int, n_tokens: int) -> dict[str, Any]:
        """The groups of a layer at this T, what each launch reads and writes, and check_program's faults."""
        n_tokens = whole(n_tokens, 1, self.max_tokens, "program: n_tokens")
        return dict(self._core.program(self._layer(layer, "program"), n_tokens))

    def check_groups(self, layer: int, n_tokens: int, groups: Sequence[Sequence[int]]) -> list[dict[str, str]]:
        """What check_program says of a layer's launches, numbered in their order, put into other groups.

        A list of faults, each with `kind` ("hazard", "unwritten", "barrier", "contract"), `where` and `detail`.
        """
        n_tokens = whole(n_tokens, 1, self.max_tokens, "check_groups: n_tokens")
        expected, where = "lists of launches", "check_groups: groups"
        members = [listed(group, expected, where) for group in listed(groups, expected, where)]
        numbers = [[whole(launch, 0, 2**32 - 1, where) for launch in group] for group in members]
        return list(self._core.check_groups(self._layer(layer, "check_groups"), n_tokens, numbers))

    # Helpers.

    def _step(
        self, step: str, layer: int, n_tokens: int, inputs: Arrays, outputs: dict[str, tuple[tuple[int, ...], Any]]
    ) -> Arrays:
        layer = self._layer(layer, step)
        if n_tokens > self.max_tokens:
            raise ValueError(f"[{step}] expected at most {self.max_tokens} tokens (max_tokens), got {n_tokens}")
        with self._calls.one(step):
            for name, array in inputs.items():
                self._core.write(name, array)
            self._core.run_step(step, layer, n_tokens)
            return {name: self._get(name, shape, dtype) for name, (shape, dtype) in outputs.items()}

    def _get(self, name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        array = np.empty(shape, dtype)
        self._core.read(name, array)
        return array

    def _plan_inputs(self, plan: Arrays, n_tokens: int | None, layer: int, where: str) -> Arrays:
        c, ((rows, wide, *_), down) = self.config, self._tiles
        columns = (-(-c.expert_ffn[layer] // wide), -(-c.dim // down[1]))
        return checked_plan(plan, n_tokens, c.top_k, c.n_experts, rows, columns, where)

    def _layer(self, layer: int, where: str) -> int:
        return whole(layer, 0, self.config.n_layers - 1, f"{where}: layer")

    def _streams(self, x: np.ndarray, where: str) -> np.ndarray:
        x = checked(x, np.float32, (None, self.config.n_streams, self.config.dim), where)
        return self._bounded(x, where)

    def _tokens(self, x: np.ndarray, dtype: Any, width: int, where: str) -> np.ndarray:
        return self._bounded(checked(x, dtype, (None, width), where), where)

    def _bounded(self, x: np.ndarray, where: str) -> np.ndarray:
        if x.shape[0] > self.max_tokens:
            raise ValueError(f"[{where}] expected at most {self.max_tokens} tokens (max_tokens), got {x.shape[0]}")
        return x
