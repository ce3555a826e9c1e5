"""What surrounds Horovod in a rank: import, rendezvous, place, module. Horovod is not needed."""

from __future__ import annotations

import http.client
import socket
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from autotune.errors import InvalidInput, LaunchError
from autotune.strategy_space.backend import backend_text
from autotune.strategy_space.plan import Message, Plan, TensorSlice
from autotune.strategy_space.strategy import Compressor, Synchronizer
from autotune.workload import Library
from runtime_rewriter.horovod.importing import changed_on_import, replace_attribute
from runtime_rewriter.horovod.modules import module_of
from runtime_rewriter.horovod.own_autotuner import check_own_autotuner
from runtime_rewriter.horovod.places import Place, address_of
from runtime_rewriter.horovod.rendezvous import RendezvousClient, rendezvous_server
from runtime_rewriter.horovod.tensorflow_scripts import tensorflow_horovod_steered
from runtime_rewriter.horovod.torch_scripts import horovod_steered
from runtime_rewriter.horovod.versions import check_horovod
from runtime_rewriter.pytorch.exchange.ranks import TUNING_TIMEOUTS
from runtime_rewriter.rank.missing_libraries import missing_library_hint
from runtime_rewriter.world.horovodrun import read_horovodrun

LAUNCHED = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_a_module_is_changed_when_it_is_imported_and_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "of_a_script.py").write_text("def size(): return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)

    def change(module: ModuleType, undo: ExitStack) -> None:
        replace_attribute(module, "size", lambda: 2, undo)

    with changed_on_import({"of_a_script": change, "never_imported": change}):
        assert "of_a_script" not in sys.modules
        import of_a_script  # type: ignore[import-not-found]

        assert of_a_script.size() == 2
        assert of_a_script.__file__ == str(tmp_path / "of_a_script.py")
    assert of_a_script.size() == 1
    assert sys.meta_path == before
    with changed_on_import({"of_a_script": change}):  # it was imported before
        assert of_a_script.size() == 2
    del sys.modules["of_a_script"]


def test_the_rendezvous_speaks_horovods_protocol_on_one_address_until_it_closes() -> None:
    with rendezvous_server("127.0.0.1") as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        for method, body, status, answer in (
            ("GET", None, 404, b""),
            ("PUT", b"\x00address", 200, b""),
            ("GET", None, 200, b"\x00address"),
            ("DELETE", None, 200, b""),
        ):
            connection.request(method, "/global/0", body)
            response = connection.getresponse()
            assert (response.status, response.read()) == (status, answer)
        connection.putrequest("PUT", "/global/1")
        connection.putheader("Content-Length", str(1 << 30))
        connection.endheaders()
        assert connection.getresponse().status == 400
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), timeout=1)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def test_a_rank_that_does_not_come_is_named_in_time() -> None:
    with rendezvous_server("127.0.0.1") as port:
        client = RendezvousClient("127.0.0.1", port, time.monotonic() + 60.0)
        client.put("0", "here")
        assert client.wait_for("0") == "here"
        client = RendezvousClient("127.0.0.1", port, time.monotonic() + 1.0)
        with pytest.raises(
            LaunchError, match=r"every rank must call hvd.init\(\), but '1' did not"
        ):
            client.wait_for("1")


def test_an_address_of_another_host_is_refused() -> None:
    with (
        pytest.raises(LaunchError, match="an address of rank 0's host"),
        rendezvous_server("192.0.2.1"),
    ):
        pass
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(LaunchError, match="name an interface in HOROVOD_GLOO_IFACE"):
        address_of("none0")


def test_only_ranks_of_our_launcher_and_of_torchrun_get_a_place() -> None:
    place = Place.of(LAUNCHED)
    assert place == Place(3, 4, 1, 2, 1, "10.0.0.1", 29500, agent_store=False)
    agent = Place.of({**LAUNCHED, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert agent is not None and agent.agent_store
    assert Place.of({**LAUNCHED, "HOROVOD_RANK": "3"}) is None
    assert Place.of({"OMPI_COMM_WORLD_RANK": "0"}) is None


def test_the_outermost_module_with_exactly_the_parameters_is_found() -> None:
    first = nn.Linear(2, 2)
    inner = nn.Sequential(first, nn.Linear(2, 1))
    outer = nn.ModuleDict({"inner": inner})
    copied = nn.Sequential(nn.Linear(2, 2))
    assert module_of(list(inner.parameters())) is outer
    assert module_of(list(copied.parameters())) is copied
    inner[1].requires_grad_(False)
    assert module_of([p for p in outer.parameters() if p.requires_grad]) is outer
    with pytest.raises(InvalidInput, match=r"(ModuleDict|Sequential|Linear) has 2"):
        module_of([first.weight])
    with pytest.raises(InvalidInput, match=r"none has all of them; build one nn\.Module"):
        module_of([torch.nn.Parameter(torch.zeros(1))])
    twin = nn.Sequential(copied[0])
    with pytest.raises(InvalidInput, match=r"2 do \(Sequential, Sequential\)"):
        module_of(list(twin.parameters()))


def _plan(*messages: Message) -> Plan:
    return Plan("workload-0", 2, messages)


def test_the_backend_of_a_horovod_script_is_named() -> None:
    dense = Message((TensorSlice("a", 4),), Synchronizer.ALL_REDUCE, Compressor.FP16, "float32")
    other = Message((TensorSlice("b", 4),), Synchronizer.ALL_REDUCE, Compressor.BF16, "float32")
    horovod = Library.HOROVOD
    one = backend_text(_plan(dense), native=False, library=horovod)
    assert one == "carried out by Horovod, 1 operation"
    both = backend_text(_plan(dense, other), native=False, library=horovod)
    assert both == "carried out by Horovod, 1 of 2 messages, and autotune's hooks"
    none = backend_text(_plan(other), native=False, library=horovod)
    assert none == "carried out by autotune's hooks, 1 message"


def test_a_missing_library_is_named_with_the_command_that_installs_it() -> None:
    hint = missing_library_hint(ModuleNotFoundError("no", name="horovod.torch"))
    assert hint == "; `make horovod` installs it (`autotune docs frameworks`)"
    assert missing_library_hint(ModuleNotFoundError("no", name="pandas")) == ""
    assert missing_library_hint(ValueError("horovod")) == ""
    stale = ImportError("horovod/torch/mpi_lib_v2.so: undefined symbol: _ZN3c10")
    assert "must be built for the installed PyTorch" in missing_library_hint(stale)
    assert missing_library_hint(ImportError("cannot import name 'x' from 'horovod'")) == ""


def test_a_horovod_that_the_wrappers_do_not_know_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package, module = ModuleType("horovod"), ModuleType("horovod.torch")
    monkeypatch.setitem(sys.modules, "horovod", package)
    package.__version__ = "0.27.0"  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match=r"must be 0\.28\.1, .* has 0\.27\.0; `make horovod`"):
        check_horovod(module, "PyTorch")
    package.__version__ = "0.28.1"  # type: ignore[attr-defined]
    with pytest.raises(InvalidInput, match=r"must be built for PyTorch, .*; `make horovod`"):
        check_horovod(module, "PyTorch")
    module.init = print  # type: ignore[attr-defined]
    check_horovod(module, "PyTorch")


class NoSession:
    """Steers nothing."""

    def model_built(self, synchronizer: object) -> None:
        raise AssertionError("no model is built")


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_a_script_of_either_framework_checks_its_horovod(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, module = ModuleType("horovod"), ModuleType(f"horovod.{framework}")
    package.__version__ = "0.27.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "horovod", package)
    monkeypatch.setitem(sys.modules, f"horovod.{framework}", module)
    steered = {
        "torch": horovod_steered(NoSession(), TUNING_TIMEOUTS, tuned=True),
        "tensorflow": tensorflow_horovod_steered(NoSession(), TUNING_TIMEOUTS),
    }
    refused = pytest.raises(InvalidInput, match=r"must be 0\.28\.1, .* has 0\.27\.0")
    with refused, steered[framework]:
        pass


def test_a_horovod_that_tunes_itself_is_refused_with_the_fix() -> None:
    for off in ({}, {"HOROVOD_AUTOTUNE": "0"}, {"HOROVOD_AUTOTUNE": ""}):
        check_own_autotuner(off)
    fix = r"HOROVOD_AUTOTUNE=1 turns it on; .* by HOROVOD_CYCLE_TIME in ms and HOROVOD_FUSION_THR"
    with pytest.raises(InvalidInput, match=fix):
        check_own_autotuner({"HOROVOD_AUTOTUNE": "1"})


def test_horovodrun_without_horovod_names_what_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(InvalidInput, match="which `make horovod` builds"):
        read_horovodrun(["-np", "2", "python", "train.py"])


def test_a_port_that_another_program_has_is_refused_with_the_fix() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        place = Place(0, 1, 0, 1, 0, "127.0.0.1", port, agent_store=False)
        with pytest.raises(LaunchError, match=rf"{port}.* in use; give other ports with --master-"):
            place.store()
