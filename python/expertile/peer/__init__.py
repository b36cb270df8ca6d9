"""The peer that the benches measure against: ggml's own GEMMs, in a process of their own.

`client.Peer` starts that process and talks to it in the frames of `protocol`; the process is `ggml_process`, which
loads ggml's shared libraries through `ggml_library`. A peer that aborts takes nothing down but itself.
"""
