// Stand-in for <metal_atomic>: reflect.py only expands this project's own macros; the shim of each target comes behind it.
