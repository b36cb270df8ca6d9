"""Reads the kernels' signatures off the .metal files and writes what the build needs of them.

    python reflect.py --compiler g++ --kernels metal/kernels --include metal/include --out BUILD_DIR [--units N]
    python reflect.py --list --kernels metal/kernels [--units N]

Written to BUILD_DIR (the names are known beforehand: `--list` prints them):
    lowered_<stem>_<i>.cpp   the kernels of <stem>.metal as host C++, split by instantiations to compile side by side
    kernels_table.cpp        kernel_table(), find_kernel(), and the same with the emulated entries
    metal_sources.cpp        the .metal files as strings, our headers in place of their includes
    quant.lowered.h          metal/include/quant.h as host C++ in namespace expertile::msl
    kernels.json             the signatures
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from emit import outputs, write_all
from lowering import SourceError


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default="c++")
    parser.add_argument("--kernels", type=Path, required=True)
    parser.add_argument("--include", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--units", type=int, help="units a file, instead of the table in this script")
    parser.add_argument("--list", action="store_true", help="print the names of the outputs and stop")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(outputs(options.kernels, options.units)))
        return 0
    if options.include is None or options.out is None:
        parser.error("--include and --out are needed")
    try:
        write_all(options.compiler, options.kernels, options.include, options.out, options.units)
    except SourceError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
