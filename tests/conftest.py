"""Options and fixtures shared by the tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

DEFAULT_DEVICES = ("cpu", "emulator")
STANDIN = "metal-standin"  # the device metal of a build against tests/metal_standin
GOLDEN_FOLDER = Path(__file__).parent / "data" / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        action="append",
        default=[],
        metavar="NAME",
        help=f"device to test, may be repeated (default: {' and '.join(DEFAULT_DEVICES)}); {STANDIN}: the Metal device "
        "of a build with EXPERTILE_METAL_STANDIN=ON",
    )
    parser.addoption(
        "--golden",
        type=Path,
        default=GOLDEN_FOLDER,
        metavar="DIR",
        help="folder of the captured cases, one folder a case with model.gguf and golden.npz",
    )


def kind_of(name: str) -> str:
    """The kind of device that a name of --device stands for."""
    if name != STANDIN:
        return name
    from expertile import _core

    if not hasattr(_core, "metal_standin"):
        raise pytest.UsageError(
            f"[--device] expected a build with EXPERTILE_METAL_STANDIN=ON for {STANDIN}, got another"
        )
    return "metal"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument `device_name` runs once for every device asked for."""
    if "device_name" in metafunc.fixturenames:
        names = metafunc.config.getoption("--device") or DEFAULT_DEVICES
        metafunc.parametrize("device_name", [kind_of(name) for name in names], scope="session")


@pytest.fixture(autouse=True)
def no_metal_faults(request: pytest.FixtureRequest) -> Iterator[None]:
    """Behind every test on the stand-in for Metal: nothing was misused."""
    yield
    if STANDIN in request.config.getoption("--device"):
        from expertile import _core

        assert _core.metal_standin.take_faults() == []


SANITIZED = ("test_window", "test_plan", "test_decoders", "test_gguf", "test_gguf_model", "test_gguf_mutations")
# They run the same kernels again, many times.
REPEATING = (
    "test_bits_do_not_change_from_run_to_run",
    "test_every_memory_layout_is_read_right",
    "test_plan_and_tile_do_not_change_a_bit",
    "test_ten_runs_give_the_same_bits",
    "test_threads_do_not_change_a_bit",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what runs under AddressSanitizer and UBSan: kernels in the emulator, and the reader of files."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        device_name = callspec.params.get("device_name", "emulator") if callspec else "emulator"
        repeats = getattr(item, "originalname", item.name) in REPEATING
        if item.path.stem in SANITIZED and device_name == "emulator" and not repeats:
            item.add_marker(pytest.mark.sanitize)


@pytest.fixture(scope="session")
def device(device_name: str):
    """The device of `device_name`, opened once a session."""
    import expertile

    return expertile.open_device(device_name)


@pytest.fixture(scope="session")
def golden_folder(pytestconfig: pytest.Config) -> Path:
    folder: Path = pytestconfig.getoption("--golden")
    if not (folder / "tiny" / "golden.npz").is_file():
        pytest.fail(f"[golden] expected captured cases in {folder}, got none; name their folder with --golden DIR")
    return folder
