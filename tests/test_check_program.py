"""check_program on programs that no window builds: byte ranges at the end of 64 bits, grids outside their buffer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

CPP = Path(__file__).parent.parent / "cpp"

SOURCE = r"""
#include <cstdlib>
#include <iostream>

#include "expertile/program.h"

using namespace expertile;

struct Memory : Buffer {
  explicit Memory(std::uint64_t bytes) { bytes_ = bytes; }
};

const std::vector<KernelInfo>& expertile::kernel_table() {
  static const std::vector<KernelInfo> table = {{"fill", "fill.metal", 4, 32, {{"y", 1, false}}}};
  return table;
}
const KernelInfo* expertile::find_kernel(const std::string&) { return &kernel_table()[0]; }

// offset and bytes of the binding, offset of the indirect grid
int main(int, char** arguments) {
  const auto number = [&](int i) { return std::strtoull(arguments[i], nullptr, 10); };
  const BufferRef y = std::make_shared<Memory>(64), meta = std::make_shared<Memory>(56);
  Launch launch;
  launch.kernel = "fill";
  launch.args.resize(4);
  launch.buffers = {{y, Access::Write, number(1), number(2), "y"}};
  launch.grid.indirect = meta;
  launch.grid.indirect_offset = number(3);
  Program program;
  program.groups = {{"only", {launch}}};
  program.inputs = {{meta, Access::Read, 0, 56, "meta"}};
  for (const Fault& fault : check_program(program)) std::cout << fault.kind << ": " << fault.detail << "\n";
}
"""


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("check_program")
    (folder / "main.cpp").write_text(SOURCE)
    command = ["g++", "-std=c++20", f"-I{CPP}", f"-I{CPP / 'include'}", str(folder / "main.cpp")]
    subprocess.run([*command, str(CPP / "core" / "program.cpp"), "-o", str(folder / "check")], check=True)
    return folder / "check"


@pytest.mark.parametrize(
    ("offset", "size", "grid", "faults"),
    [
        (0, 64, 44, []),
        (60, 4, 0, []),
        (60, 5, 0, ["contract: buffer y: byte range outside its buffer"]),
        (2**64 - 4, 8, 0, ["contract: buffer y: byte range outside its buffer"]),
        (8, 2**64 - 4, 0, ["contract: buffer y: byte range outside its buffer"]),
        (0, 64, 48, ["contract: indirect grid: three words outside its buffer"]),
        (0, 64, 2**64 - 8, ["contract: indirect grid: three words outside its buffer"]),
    ],
)
def test_ranges_outside_their_buffer_are_faults(
    check: Path, offset: int, size: int, grid: int, faults: list[str]
) -> None:
    done = subprocess.run([check, str(offset), str(size), str(grid)], capture_output=True, text=True, check=True)
    contract = [line for line in done.stdout.splitlines() if line.startswith("contract")]
    assert contract == faults
    assert faults or not done.stdout
