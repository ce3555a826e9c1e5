"""The store that torchrun's agent keeps at MASTER_PORT, where then no rank can listen."""

# mypy: untyped-calls-exclude=torch

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True)
class AgentStore:
    """Tells the ranks a port on which rank 0 listens. `start` counts the starts of the ranks."""

    address: str
    port: int
    start: str

    @staticmethod
    def of(environment: Mapping[str, str]) -> AgentStore | None:
        """The store of this rank's agent; None if MASTER_PORT is rank 0's."""
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return None
        address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
        return AgentStore(address, port, environment.get("TORCHELASTIC_RESTART_COUNT", "0"))

    def agreed_port(self, purpose: str, own: int | None, timeout_s: float) -> int:
        """Rank 0's port for this purpose: `own` on rank 0, None on the others, which wait."""
        from torch.distributed import TCPStore

        waits = timedelta(seconds=timeout_s)
        store = TCPStore(self.address, self.port, is_master=False, timeout=waits)
        key = f"autotune/{purpose}/{self.start}"
        if own is not None:
            store.set(key, str(own))
        return int(store.get(key))
