"""What the wheels are: for which Mac, from which requirements, the same in every place that says so."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from scikit_build_core.builder.wheel_tag import WheelTag
from scikit_build_core.settings.skbuild_read_settings import SettingsReader

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PYPROJECT = ROOT / "pyproject.toml"


def pyproject() -> dict[str, Any]:
    return tomllib.loads(PYPROJECT.read_text())


def mac_tag(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> str:
    """The platform of the wheel that the build backend makes on a Mac of system 26."""
    sysconfig.get_config_vars()  # this Python's own, read before it says that it is a Mac's
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("platform.mac_ver", lambda: ("26.2", ("", "", ""), "arm64"))
    settings = SettingsReader.from_file(PYPROJECT, {}, state="wheel").settings
    defines = {name: str(value) for name, value in settings.cmake.define.items()}
    return str(WheelTag.compute_best(["arm64"], cmake_defines=defines, env=environment)).rpartition("-")[2]


@pytest.mark.parametrize("environment", [{}, {"MACOSX_DEPLOYMENT_TARGET": "26.0"}])
def test_wheel_of_a_mac_is_for_macos_14(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Also where the build machine's system is newer."""
    assert mac_tag(monkeypatch, environment) == "macosx_14_0_arm64"


def test_deployment_target_is_the_same_everywhere() -> None:
    tool = pyproject()["tool"]
    target = tool["cibuildwheel"]["macos"]["environment"]["MACOSX_DEPLOYMENT_TARGET"]
    (override,) = (part for part in tool["scikit-build"]["overrides"] if part["if"].get("platform-system") == "darwin")
    assert override["cmake"]["define"]["CMAKE_OSX_DEPLOYMENT_TARGET"] == target
    workflow = ROOT / ".github" / "workflows" / "wheels.yml"
    if workflow.parent.parent.exists():  # an sdist has none
        tags = re.findall(r"macosx_(\d+)_(\d+)_arm64", workflow.read_text())
        assert tags and {".".join(tag) for tag in tags} == {target}


def test_metal_headers_are_a_requirement_of_mac_builds_alone() -> None:
    requirements = [Requirement(text) for text in pyproject()["build-system"]["requires"]]
    (metal,) = (requirement for requirement in requirements if requirement.name == "mlx-metal")
    assert metal.marker is not None and metal.marker.evaluate({"sys_platform": "darwin"})
    assert not metal.marker.evaluate({"sys_platform": "linux"})
    assert metal.specifier.contains("0.30.0") and not metal.specifier.contains("0.29.3")  # it has no MTL4 headers
    assert not [text for text in pyproject()["project"]["dependencies"] if "mlx" in text]
