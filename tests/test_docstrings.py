"""Every public name says what it is, and the examples in the docstrings run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import expertile
from expertile import _core

# What the engine gives to a caller; the rest of _core is the package's own.
BINDINGS = (_core.Buffer, _core.Config, _core.Device, _core.DeviceStatus, _core.GGUFError, _core.Tensor)
PYTHON = [
    importlib.import_module(module.name)
    for module in pkgutil.walk_packages(expertile.__path__, "expertile.")
    if module.name != _core.__name__
]
PUBLIC = [module for module in PYTHON if module.__name__.count(".") == 1 and not hasattr(module, "__path__")]


def own_text(name: str, value: Any) -> str:
    """A docstring without the signature that pybind11 and dataclasses put in its place."""
    first, _, rest = inspect.cleandoc(value.__doc__ or "").partition("\n")
    return rest.strip() if first.startswith(f"{name}(") else first


def undocumented(name: str, value: Any) -> Iterator[str]:
    """`name` and its public members that have no docstring; a property may stand in its class's list instead."""
    text = own_text(name.rpartition(".")[2], value)
    if not text:
        yield name
    if not inspect.isclass(value):
        return
    for key, member in vars(value).items():
        if isinstance(member, (classmethod, staticmethod)):
            member = member.__func__
        listed = isinstance(member, property) and f"\n{key} " in f"\n{inspect.cleandoc(value.__doc__ or '')}"
        if not key.startswith("_") and (callable(member) or isinstance(member, property)) and not listed:
            yield from undocumented(f"{name}.{key}", member)


def public_names() -> dict[str, Any]:
    names = {f"expertile.{name}": getattr(expertile, name) for name in expertile.__all__ if name[0] != "_"}
    names |= {f"_core.{value.__name__}": value for value in BINDINGS}
    for module in PUBLIC:
        names[module.__name__] = module
        for name, value in vars(module).items():
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__:
                names[f"{module.__name__}.{name}"] = value
    return {name: value for name, value in names.items() if callable(value) or inspect.ismodule(value)}


def test_every_public_name_has_a_docstring() -> None:
    names = public_names()
    assert {"expertile.Window", "expertile.plan.make_plan", "expertile.numeric", "_core.Device"} <= set(names)
    assert [fault for name, value in names.items() for fault in undocumented(name, value)] == []


def test_examples_of_the_modules_run() -> None:
    with_examples = [module for module in (expertile, *PYTHON) if ">>> " in inspect.getsource(module)]
    assert len(with_examples) > 12
    outcomes = {module.__name__: doctest.testmod(module) for module in with_examples}
    assert [name for name, outcome in outcomes.items() if outcome.failed or not outcome.attempted] == []


def test_examples_of_the_bindings_run() -> None:
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    for value in (_core.Config, _core.Device, _core.Tensor):
        example = parser.get_doctest(value.__doc__ or "", {}, value.__name__, None, None)
        assert example.examples
        assert runner.run(example).failed == 0
