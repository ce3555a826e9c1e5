"""Messages that a backward pass left under way, and the variables that they complete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from autotune.errors import SynchronizationError


class Arriving(Protocol):
    """A message under way."""

    @property
    def number(self) -> int: ...

    @property
    def arrived(self) -> bool: ...

    def wait(self) -> None: ...


class MessagesUnderWay:
    """The messages of one backward pass that have not been received yet."""

    def __init__(self) -> None:
        self._outstanding: dict[int, Arriving] = {}
        self._messages_of: Sequence[Sequence[Arriving]] = ()
        self._variables_of: dict[int, list[int]] = {}  # by number of the message, once per slice
        self._missing: list[int] = []  # slices of each variable that are under way
        self._complete: list[int] = []  # variables of which none is
        self.broken: str | None = None
        """The error that a wait for a message raised."""

    def plan(self, messages_of: Sequence[Sequence[Arriving]]) -> None:
        """Set the messages of each variable under a new plan."""
        self._messages_of = messages_of
        self._variables_of = {}
        for position, messages in enumerate(messages_of):
            for message in messages:
                self._variables_of.setdefault(message.number, []).append(position)

    def begin(self, messages: Sequence[Arriving]) -> None:
        """These messages, all of a pass, have been issued in this order."""
        self._outstanding = {message.number: message for message in messages}
        self._missing = [len(of_variable) for of_variable in self._messages_of]
        self._complete = []

    def forget(self) -> None:
        """Drop them: they will never arrive."""
        self._outstanding, self._complete = {}, []

    def __bool__(self) -> bool:
        return bool(self._outstanding)

    @property
    def complete(self) -> bool:
        """Whether a variable waits to be taken by `take_complete`."""
        return bool(self._complete)

    def next_arrived(self) -> bool:
        """Whether the first outstanding message has arrived. They mostly arrive in issue order."""
        return bool(self._outstanding) and next(iter(self._outstanding.values())).arrived

    def all_numbers(self) -> list[int]:
        """The outstanding messages, in issue order of the plan."""
        return sorted(self._outstanding)

    def numbers_of(self, positions: Iterable[int]) -> list[int]:
        """The outstanding messages of these variables, in issue order of the plan."""
        needed = {m.number for position in positions for m in self._messages_of[position]}
        return sorted(needed & self._outstanding.keys())

    def receive(self, number: int) -> None:
        """Wait for a message; raises `SynchronizationError`, also noted in `broken`."""
        try:
            self._outstanding[number].wait()
        except SynchronizationError as error:
            self.broken = str(error)
            raise
        del self._outstanding[number]
        for position in self._variables_of[number]:
            self._missing[position] -= 1
            if self._missing[position] == 0:
                self._complete.append(position)

    def receive_arrived(self) -> None:
        """Receive messages as long as the first outstanding one has arrived."""
        while self.next_arrived():
            self.receive(next(iter(self._outstanding)))

    def take_complete(self) -> list[int]:
        """The variables all of whose messages were received since the last call."""
        complete, self._complete = self._complete, []
        return complete
