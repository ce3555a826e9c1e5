"""Registries: registration, look-up, and entry points of a fake installed distribution."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import InvalidInput
from autotune.plugins import Registry

GROUP = "autotune.tests"
LATE: list[Registry[str]] = []
"""The registry in which the module of a fake distribution registers its entries."""


@pytest.fixture
def registry() -> Registry[str]:
    registry: Registry[str] = Registry(GROUP, "colour")
    registry.register("red", "#f00")
    registry.register("blue", "#00f")
    return registry


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, entry_points: str, code: str) -> None:
    """Put a distribution `paint` on the path, with a module of the same name."""
    metadata = folder / "paint-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: paint\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{entry_points}\n")
    (folder / "paint.py").write_text(code)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(__import__("sys").modules, "paint", raising=False)


def test_entries_keep_the_order_of_registration(registry: Registry[str]) -> None:
    assert dict(registry) == {"red": "#f00", "blue": "#00f"}
    assert list(registry) == ["red", "blue"]
    assert "red" in registry and "green" not in registry
    assert registry.get("green") is None


def test_a_name_is_registered_once(registry: Registry[str]) -> None:
    with pytest.raises(InvalidInput, match="colour 'red' is already registered; choose another"):
        registry.register("red", "#e00")


def test_an_unknown_name_lists_the_known_ones(registry: Registry[str]) -> None:
    with pytest.raises(InvalidInput, match=r"^there is no colour 'rde'; known are red, blue$"):
        registry["rde"]


def test_entry_points_follow_the_registered_entries(
    registry: Registry[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path, monkeypatch, "pink = paint:PINK\ngreen = paint:GREEN", "GREEN, PINK = '0', '1'"
    )
    assert list(registry) == ["red", "blue", "green", "pink"]
    assert registry["pink"] == "1"
    assert list(registry) == ["red", "blue", "green", "pink"]
    assert len(registry) == 4
    with pytest.raises(InvalidInput, match="colour 'green' is already registered"):
        registry.register("green", "#0f0")


def test_a_plugin_that_cannot_be_imported_is_named_when_it_is_used(
    registry: Registry[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "green = paint:GREEN", "import no_such_module")
    assert registry["red"] == "#f00"
    message = r"entry point 'green = paint:GREEN' \(autotune.tests\) of paint cannot be imported: "
    with pytest.raises(InvalidInput, match=message + "ModuleNotFoundError: .*no_such_module"):
        registry["green"]


def test_an_entry_point_may_not_take_a_registered_name(
    registry: Registry[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "red = paint:RED", "RED = ''")
    with pytest.raises(InvalidInput, match=r"colour 'red' of entry point .* of paint is already"):
        list(registry)


def test_a_plugin_may_register_its_own_entries_while_it_is_imported(
    registry: Registry[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "from test_plugins import LATE; LATE[0].register('green', '#0f0')\n"
    code += "LATE[0].register('pink', '#f0f'); green = pink = 'the decorated function'"
    install(tmp_path, monkeypatch, "pink = paint:pink\ngreen = paint:green", code)
    LATE[:] = [registry]
    assert registry["pink"] == "#f0f" and registry["green"] == "#0f0"
    assert list(registry) == ["red", "blue", "green", "pink"]
