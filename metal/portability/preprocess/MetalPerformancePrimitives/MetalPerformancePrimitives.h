// Stand-in, as for <metal_tensor>: the shim of each target comes behind it.
