"""What surrounds a window: forks, the interpreter's exit, a system without threads or memory to give."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

START = """
import os, resource, sys, threading, time
import numpy as np
import expertile
from expertile.synth import random_streams, synthetic_model

model = expertile.Model.from_tensors(*synthetic_model("tiny", 1))
x = random_streams(64, 4, 512)
"""


def run(script: str, *arguments: str) -> str:
    """The standard output of a script of its own, which must end well and soon."""
    command = [sys.executable, "-c", START + script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    return done.stdout


FORK = """
device = expertile.open_device(sys.argv[1], threads=2)
window = expertile.Window(model, device, max_tokens=64)
want = window.moe_layer(0, x)
child = os.fork()
same = (window.moe_layer(0, x) == want).all()
if child == 0:
    del window, device
    os._exit(0 if same else 3)
for _ in range(300):
    gone, status = os.waitpid(child, os.WNOHANG)
    if gone:
        break
    time.sleep(0.1)
else:
    os.kill(child, 9)
    sys.exit("the child does not end")
assert same and os.waitstatus_to_exitcode(status) == 0, status
"""


@pytest.mark.skipif(sys.platform == "darwin", reason="the system forbids it: its own libraries have threads")
@pytest.mark.parametrize("kind", ["cpu", "emulator"])
def test_a_forked_process_has_threads_of_its_own(kind: str) -> None:
    run(FORK, kind)


SCARCE_AFTER_FORK = """
def no_more_threads():
    if os.getuid() == 0:
        os.setuid(65534)  # root may have any number
    resource.setrlimit(resource.RLIMIT_NPROC, (0, resource.getrlimit(resource.RLIMIT_NPROC)[1]))
    try:
        threading.Thread(target=int).start()
    except RuntimeError:
        return True
    return False

def more_threads():
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (hard, hard))

def n_threads():
    return len(os.listdir("/proc/self/task"))

def ends_well(child, seconds):
    for _ in range(10 * seconds):
        gone, status = os.waitpid(child, os.WNOHANG)
        if gone:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.1)
    os.kill(child, 9)
    return False

window = expertile.Window(model, "cpu", max_tokens=64, threads=3)
want = window.moe_layer(0, x)
child = os.fork()
if child != 0:
    sys.exit(0 if ends_well(child, 60) else "the child failed or does not end")
if not no_more_threads():
    print("no limit", flush=True)
    os._exit(0)
try:
    window.moe_layer(0, x)
    os._exit(3)
except RuntimeError as error:
    print(error, flush=True)
more_threads()
grandchild = os.fork() if sys.argv[1] == "forks again" else 0
if grandchild != 0:
    os._exit(0 if ends_well(grandchild, 30) else 4)
before = n_threads()
same = (window.moe_layer(0, x) == want).all()
os._exit(0 if same and n_threads() == before + 2 else 5)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="threads are limited by user on Linux")
@pytest.mark.parametrize("then", ["goes on", "forks again"])
def test_a_forked_process_without_threads_to_have_gets_them_later(then: str) -> None:
    """A pool whose threads did not start once told those that started later to stop, and waited for them."""
    said = run(SCARCE_AFTER_FORK, then)
    if said == "no limit\n":
        pytest.skip("this system does not limit a user's threads")
    assert said.startswith("[threads] expected 3 of them, got 1: ")


EXIT = """
window = expertile.Window(model, sys.argv[1], max_tokens=64)

def loop():
    while True:
        window.moe_layer(0, x)

for _ in range(3):
    threading.Thread(target=loop, daemon=True).start()
time.sleep(0.2 + float(sys.argv[2]))
"""


@pytest.mark.parametrize("kind", ["cpu", "emulator"])
@pytest.mark.parametrize("wait", ["0", "0.013", "0.031"])
def test_the_interpreter_exits_under_threads_that_run(kind: str, wait: str) -> None:
    """A daemon thread in the engine must not take the process down while the interpreter ends."""
    run(EXIT, kind, wait)


SCARCE = """
device = expertile.open_device("emulator", threads=64)
window = expertile.Window(model, device, max_tokens=64)
want = expertile.Window(model, "emulator", max_tokens=64).moe_layer(0, x)
pages = int(open("/proc/self/statm").read().split()[0])
for spare in (20, 60, 200, 500):
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (spare << 20), resource.RLIM_INFINITY))
    try:
        got = window.moe_layer(0, x)
        print("same" if (got == want).all() else "other")
    except (RuntimeError, MemoryError) as error:
        print("refused:", error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("same" if (window.moe_layer(0, x) == want).all() else "other")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sizes of an address space are limited on Linux")
def test_the_emulator_without_memory_or_threads_refuses_or_is_right() -> None:
    lines = run(SCARCE).splitlines()
    print(lines)
    assert len(lines) == 5 and lines[-1] == "same"
    assert all(line == "same" or line.startswith("refused: [") for line in lines)


SCARCE_SCRATCH = """
n = 4096
x = random_streams(n, 4, 512)
want = expertile.Window(model, "cpu", max_tokens=n, threads=2).moe_layer(0, x)
window = expertile.Window(model, "cpu", max_tokens=n, threads=2)
out = np.empty_like(x)
pages = int(open("/proc/self/statm").read().split()[0])
for limit in (pages * resource.getpagesize(), resource.RLIM_INFINITY):
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
    try:
        said = "same"
        window.moe_layer(0, x, out)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(said if said != "same" or (out == want).all() else "other")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sizes of an address space are limited on Linux")
def test_the_cpu_without_memory_for_its_threads_says_so_and_goes_on() -> None:
    first, then = run(SCARCE_SCRATCH).splitlines()
    assert re.fullmatch(r"RuntimeError: \[cpu scratch\] expected \d+ bytes of memory, got less", first)
    assert then == "same"


def test_more_threads_than_the_system_gives_are_an_error() -> None:
    script = """
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, resource.RLIM_INFINITY))
try:
    expertile.open_device("cpu", threads=60_000)
except RuntimeError as error:
    print(error)
"""
    assert run(script).startswith("[threads] expected 60000 of them, got ")
