"""Lightning's own checks of the ranks pass for what we name, and else get a hint."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import pytest

from runtime_rewriter.rank.lightning_ranks import lightning_hint

if find_spec("lightning") is None:  # an import takes 5 s
    pytest.skip("needs the extra `frameworks`", allow_module_level=True)

FOUR_HOSTS = {
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_WORLD_SIZE": "4",
    "RANK": "2",
    "LOCAL_RANK": "0",
    "GROUP_RANK": "2",
    "TORCHELASTIC_RUN_ID": "autotune",
}
FIX = "Trainer(devices=1, num_nodes=4)"


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in FOUR_HOSTS.items():
        monkeypatch.setenv(name, value)


def checked(devices: int, hosts: int) -> None:
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    environment = TorchElasticEnvironment()
    assert environment.detect() and environment.creates_processes_externally
    environment.validate_settings(num_devices=devices, num_nodes=hosts)


def four_gpus() -> None:
    from lightning.fabric.utilities.device_parser import _sanitize_gpu_ids

    _sanitize_gpu_ids([99], include_cuda=True)  # more than any host has


def own_error() -> None:
    raise ValueError("You requested gpu")


def hint(call: Callable[[], object]) -> str:
    with pytest.raises(Exception) as raised:
        call()
    return lightning_hint(raised.value, FOUR_HOSTS)


def test_what_the_hint_names_passes_lightnings_check() -> None:
    checked(1, 4)
    checked(4, 1)  # on four hosts without GPUs it trains, too: only the product counts


@pytest.mark.parametrize(("devices", "hosts"), [(2, 1), (4, 4), (1, 1)])
def test_other_numbers_of_ranks_get_the_numbers_to_type(devices: int, hosts: int) -> None:
    assert hint(lambda: checked(devices, hosts)).endswith(FIX)


def test_missing_gpus_get_the_numbers_to_type() -> None:
    assert hint(four_gpus).endswith(FIX)


def test_other_errors_get_no_hint() -> None:
    assert hint(own_error) == ""
