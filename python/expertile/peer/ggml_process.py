"""The peer process: one layer of experts, or one GEMM, through ggml. Frames come on stdin, replies go to stdout.

The graph is llama.cpp's own (its build_moe_ffn): up and gate by mul_mat_id, swiglu, down by mul_mat_id, times the
router's weights, then the K slots added up. Weights lie where llama.cpp puts them by default: in the first of the
CPU's buffer types that supports their product, so that types with a repacked form are repacked.

op        fields, arrays                                       reply
open      folder, threads                                      version, commit, features
weight    name, type, type_name, shape; bytes uint8            buffer
layer     x fp32 [T, D], ids int32 [T, K], weights fp32 [T, K] -
grouped   name; x fp32 [T, n_inner], ids int32 [T, K]          -
dense     name; x fp32 [T, n_inner]                            -
run       step: total, gate, up or down                        seconds
result    step                                                 fp32, the step's output
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from expertile.peer.ggml_library import GRAPH_SIZE, Ggml
from expertile.peer.protocol import Array, read_frame, write_frame

F32, I32 = 0, 26
PROBE_TOKENS = 512  # the batch for which llama.cpp asks whether a buffer type supports a product


class Graph:
    """Nodes over inputs that lie elsewhere; its intermediates share memory where their lives do not overlap."""

    def __init__(self, ggml: Ggml) -> None:
        self.ggml = ggml
        self.context = ggml.context(GRAPH_SIZE, 1)
        self.graph = ggml.call("new_graph_custom", self.context, GRAPH_SIZE, False)
        self.output = 0
        self.shape: list[int] = []
        self.allocator = 0

    def node(self, operation: str, *arguments: Any) -> int:
        return int(self.ggml.call(operation, self.context, *arguments))

    def expand(self, node: int) -> None:
        self.ggml.call("build_forward_expand", self.graph, node)

    def close_with(self, output: int, shape: list[int]) -> None:
        """The last node, and its shape in numpy's order."""
        call = self.ggml.call
        self.output, self.shape = output, shape
        call("set_output", output)
        self.expand(output)
        self.allocator = call("gallocr_new", call("backend_dev_buffer_type", self.ggml.device))
        if not call("gallocr_alloc_graph", self.allocator, self.graph):
            raise RuntimeError("[ggml] expected memory for the graph, got none")

    def run(self) -> float:
        start = time.perf_counter()
        status = self.ggml.call("backend_graph_compute", self.ggml.backend, self.graph)
        seconds = time.perf_counter() - start
        if status != 0:
            raise RuntimeError(f"[ggml] expected status 0 of a graph, got {status}")
        return seconds

    def result(self) -> Array:
        return fetch(self.ggml, self.output, self.shape)

    def free(self) -> None:
        self.ggml.call("gallocr_free", self.allocator)
        self.ggml.call("free", self.context)


def fetch(ggml: Ggml, tensor: int, shape: list[int]) -> Array:
    values = np.empty(shape, np.float32)
    ggml.call("backend_tensor_get", tensor, values.ctypes.data, 0, values.nbytes)
    return values


class Inputs:
    """Tensors that hold a case's arrays."""

    def __init__(self, ggml: Ggml, arrays: dict[str, Array]) -> None:
        self.ggml = ggml
        self.context = ggml.context(len(arrays))
        self.tensors: dict[str, int] = {}
        for name, array in arrays.items():
            sizes = [*reversed(array.shape), 1, 1][:3]
            kind = I32 if array.dtype == np.int32 else F32
            self.tensors[name] = ggml.call("new_tensor_3d", self.context, kind, *sizes)
        plain = ggml.call("backend_dev_buffer_type", ggml.device)
        self.buffer = ggml.call("backend_alloc_ctx_tensors_from_buft", self.context, plain)
        for name, array in arrays.items():
            packed = np.ascontiguousarray(array)
            ggml.call("backend_tensor_set", self.tensors[name], packed.ctypes.data, 0, packed.nbytes)

    def free(self) -> None:
        self.ggml.call("backend_buffer_free", self.buffer)
        self.ggml.call("free", self.context)


class Session:
    """What the process holds between frames."""

    def __init__(self) -> None:
        self.ggml: Any = None
        self.weights: dict[str, tuple[int, int, list[int]]] = {}  # name -> context, tensor, shape (ggml order)
        self.buffers: dict[str, int] = {}
        self.inputs: list[Inputs] = []
        self.graphs: dict[str, Graph] = {}

    def answer(self, fields: dict[str, Any], arrays: list[Array]) -> tuple[dict[str, Any], list[Array]]:
        operation = fields["op"]
        if operation == "open":
            self.ggml = Ggml(fields["folder"], int(fields["threads"]))
            names = {name: self.ggml.call(name).decode() for name in ("version", "commit")}
            return {**names, "features": self.ggml.features()}, []
        if operation == "weight":
            return {"buffer": self.add_weight(fields, arrays[0])}, []
        if operation == "run":
            return {"seconds": self.graphs[fields["step"]].run()}, []
        if operation == "result":
            return {}, [self.graphs[fields["step"]].result()]
        self.clear()
        {"layer": self.build_layer, "grouped": self.build_grouped, "dense": self.build_dense}[operation](fields, arrays)
        return {}, []

    def clear(self) -> None:
        for graph in self.graphs.values():
            graph.free()
        for inputs in self.inputs:
            inputs.free()
        self.graphs, self.inputs = {}, []

    def add_weight(self, fields: dict[str, Any], data: Array) -> str:
        """Into the first buffer type that supports the weight's product; returns that buffer type's name."""
        call, name, kind = self.ggml.call, fields["name"], int(fields["type"])
        known = (call("type_name", kind) or b"").decode().upper()
        if known != fields["type_name"].upper():
            version = call("version").decode()
            raise RuntimeError(
                f"[ggml] expected type {fields['type_name']} (number {kind}) in ggml {version}, got none"
            )
        shape = [int(size) for size in fields["shape"]]
        if name in self.weights:
            self.clear()
            call("backend_buffer_free", self.buffers.pop(name))
            call("free", self.weights.pop(name)[0])
        for place in self.ggml.weight_buffer_types():
            context = self.ggml.context(1)
            tensor = call("new_tensor_2d" if len(shape) == 2 else "new_tensor_3d", context, kind, *shape)
            if call("nbytes", tensor) != data.nbytes:
                raise RuntimeError(f"[ggml] expected {call('nbytes', tensor)} bytes of {name}, got {data.nbytes}")
            buffer = call("backend_alloc_ctx_tensors_from_buft", context, place)
            if buffer and self.supports(tensor, shape):
                call("backend_tensor_set", tensor, data.ctypes.data, 0, data.nbytes)
                self.weights[name], self.buffers[name] = (context, tensor, shape), buffer
                return str(call("backend_buft_name", place).decode())
            if buffer:
                call("backend_buffer_free", buffer)
            call("free", context)
        raise RuntimeError(f"[ggml] expected a buffer type for {name} ({fields['type_name']}), got none")

    def supports(self, tensor: int, shape: list[int]) -> bool:
        call = self.ggml.call
        context = self.ggml.context(4)
        if len(shape) == 2:
            x = call("new_tensor_2d", context, F32, shape[0], PROBE_TOKENS)
            product = call("mul_mat", context, tensor, x)
        else:
            used = min(8, shape[2])
            x = call("new_tensor_3d", context, F32, shape[0], used, PROBE_TOKENS)
            ids = call("new_tensor_2d", context, I32, used, PROBE_TOKENS)
            product = call("mul_mat_id", context, tensor, x, ids)
        supported = bool(call("backend_dev_supports_op", self.ggml.device, product))
        call("free", context)
        return supported

    def keep(self, arrays: dict[str, Array]) -> dict[str, int]:
        self.inputs.append(Inputs(self.ggml, arrays))
        return self.inputs[-1].tensors

    def product(self, step: str, name: str, x: int, ids: int, entries: tuple[int, int]) -> None:
        """A graph of one mul_mat_id."""
        graph = Graph(self.ggml)
        tensor, shape = self.weights[name][1:]
        graph.close_with(graph.node("mul_mat_id", tensor, x, ids), [*entries, shape[1]])
        self.graphs[step] = graph

    def build_grouped(self, fields: dict[str, Any], arrays: list[Array]) -> None:
        x, ids = arrays
        tensors = self.keep({"x": x[:, None, :], "ids": ids})
        self.product("total", fields["name"], tensors["x"], tensors["ids"], (ids.shape[0], ids.shape[1]))

    def build_dense(self, fields: dict[str, Any], arrays: list[Array]) -> None:
        graph = Graph(self.ggml)
        tensor, shape = self.weights[fields["name"]][1:]
        tensors = self.keep({"x": arrays[0]})
        graph.close_with(graph.node("mul_mat", tensor, tensors["x"]), [len(arrays[0]), shape[1]])
        self.graphs["total"] = graph

    def build_layer(self, fields: dict[str, Any], arrays: list[Array]) -> None:
        x, ids, weights = arrays
        entries = (ids.shape[0], ids.shape[1])
        tensors = self.keep({"x": x[:, None, :], "ids": ids, "weights": weights[:, :, None]})
        ffn, dim = self.weights["down"][2][:2]
        hidden = Graph(self.ggml)
        hidden.close_with(self.activation(hidden, tensors), [*entries, ffn])
        hidden.run()
        values = hidden.result()
        hidden.free()
        fed = self.keep({"hidden": values})
        self.product("gate", "gate", tensors["x"], tensors["ids"], entries)
        self.product("up", "up", tensors["x"], tensors["ids"], entries)
        self.product("down", "down", fed["hidden"], tensors["ids"], entries)
        whole = Graph(self.ggml)
        down = whole.node("mul_mat_id", self.weights["down"][1], self.activation(whole, tensors), tensors["ids"])
        weighted = whole.node("mul", down, tensors["weights"])
        whole.expand(weighted)
        views = []
        for slot in range(entries[1]):
            row = dim * 4
            views.append(whole.node("view_2d", weighted, dim, entries[0], entries[1] * row, slot * row))
            whole.expand(views[-1])
        total = views[0]
        for view in views[1:]:
            total = whole.node("add", total, view)
            whole.expand(total)
        if len(views) == 1:
            total = whole.node("cont", total)
        whole.close_with(total, [entries[0], dim])
        self.graphs["total"] = whole

    def activation(self, graph: Graph, tensors: dict[str, int]) -> int:
        products = {}
        for name in ("up", "gate"):
            products[name] = graph.node("mul_mat_id", self.weights[name][1], tensors["x"], tensors["ids"])
        return graph.node("swiglu_split", products["gate"], products["up"])


def main() -> int:
    """Answers frames until stdin ends. Whatever ggml prints goes to stderr: stdout is for frames alone."""
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "rb")
    session = Session()
    while True:
        try:
            fields, arrays = read_frame(requests)
        except EOFError:
            return 0
        try:
            reply, results = session.answer(fields, arrays)
        except Exception as error:
            write_frame(replies, {"ok": False, "error": f"{type(error).__name__}: {error}"})
            continue
        del arrays
        write_frame(replies, {"ok": True, **reply}, results)


if __name__ == "__main__":
    sys.exit(main())
