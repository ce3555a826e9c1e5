"""Writes a domain's folder so that no finished trial is lost, wherever the writer is killed.

A trial is first a line of `.work/trials.journal`, on disk before `append` returns. From time to
time `fold` rewrites the table with all trials. It writes new files next to the old ones, then
`SHA256SUMS`. Then the new files replace the old ones (`folder`), and the journal is emptied. A
journal line whose number is in the table was folded before a kill. A last line that is cut off is a
trial that never ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from autotune.canonical import canonical_json
from autotune.dataset.card import card_data, card_text
from autotune.dataset.columns import table_bytes
from autotune.dataset.folder import (
    DESCRIPTION,
    NEW,
    SUMS,
    TABLE,
    Description,
    domain_of,
    read_description,
    read_domain,
    read_sums,
    sum_of,
)
from autotune.dataset.trials import DatasetTrial, Domain, Environment, Session, disturbed_trials
from autotune.errors import InvalidInput
from autotune.files import read_text
from autotune.parsing import parse, parse_json

WORK = ".work"
"""Folder for files that are not part of the dataset: the journal, logs, jobs."""
MAX_JOURNAL_BYTES = 2**30


class DomainWriter:
    """The only writer of a domain (`opened`). `described` is None until `describe` begins it."""

    def __init__(
        self, folder: Path, described: Description | None, trials: tuple[DatasetTrial, ...]
    ) -> None:
        self.folder = folder
        self.described = described
        self.trials = list(trials)
        self._texts: dict[str, str] = {}
        self._unfolded = 0

    @property
    def domain(self) -> Domain:
        return domain_of(self._known(), tuple(self.trials))

    def describe(self, described: Description) -> None:
        """Begin a domain; its first session writes it to disk."""
        if self.described is not None:
            held = f"{self.folder} already holds domain {self.described.name!r}"
            raise InvalidInput(f"{held}; collect into another folder")
        self.described = described

    def begin_session(self, environment: Environment) -> Session:
        """Begin a session.

        Raises `InvalidInput` where its trials are not comparable with those of earlier sessions.
        """
        described = self._known()
        if described.sessions:
            _refuse_other(self.folder, described.sessions[0].environment, environment)
        began_at = datetime.now(UTC).isoformat(timespec="seconds")
        session = Session(f"{len(described.sessions)}", began_at, environment)
        self.described = replace(described, sessions=(*described.sessions, session))
        self.fold()
        return session

    def append(self, trial: DatasetTrial) -> None:
        """Append a trial; return when it is on disk."""
        if trial.number != len(self.trials):
            rule = f"the next trial in {self.folder} has number {len(self.trials)}"
            raise InvalidInput(f"{rule}, but this one has {trial.number}")
        if trial.session not in {session.id for session in self._known().sessions}:
            rule = "a trial belongs to a session that was begun"
            raise InvalidInput(f"{rule}, but this one to {trial.session!r}")
        with _journal(self.folder).open("a", encoding="utf-8") as file:
            file.write(canonical_json(trial) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.trials.append(trial)
        self._unfolded += 1

    @property
    def unfolded(self) -> int:
        """Number of trials that are only in the journal."""
        return self._unfolded

    def fold(self) -> None:
        """Write all trials into the table, with the cards and the sums."""
        self.trials = list(disturbed_trials(self.trials))
        domain = self.domain
        files = {
            DESCRIPTION: canonical_json(self.described).encode(),
            TABLE: table_bytes(self.trials, self._texts),
            "card.json": (json.dumps(card_data(domain), indent=2) + "\n").encode(),
            "card.md": card_text(domain).encode(),
        }
        _commit(self.folder, files)
        _journal(self.folder).unlink(missing_ok=True)
        self._unfolded = 0

    def take_journal(self) -> None:
        """Take over the trials that a killed writer did not fold.

        Raises `InvalidInput` where the journal does not continue the table.
        """
        for trial in _read_journal(self.folder):
            if trial.number > len(self.trials):
                rule = f"{_journal(self.folder)} must go on where the table ends"
                missing = f"trial {len(self.trials)} is missing before {trial.number}"
                raise InvalidInput(f"{rule}, but {missing}; move it away to go on")
            if trial.number == len(self.trials):
                self.trials.append(trial)
                self._unfolded += 1
        if self._unfolded:
            self.fold()

    def _known(self) -> Description:
        if self.described is None:
            rule = "must be described before it has sessions and trials"
            raise InvalidInput(f"the domain in {self.folder} {rule}")
        return self.described


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[DomainWriter]:
    """The writer of a domain, which folds at the end.

    Raises `InvalidInput` where another process writes the domain or where it is broken.
    """
    (folder / WORK).mkdir(parents=True, exist_ok=True)
    with (folder / WORK / "lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            problem = "is being written by another process"
            raise InvalidInput(f"{folder} {problem}; wait for it, or stop it") from error
        writer = _open(folder)
        try:
            yield writer
        finally:
            if writer.unfolded:
                writer.fold()


def _open(folder: Path) -> DomainWriter:
    if not (folder / SUMS).exists():
        return DomainWriter(folder, None, ())
    _finish_commit(folder)
    domain = read_domain(folder)
    writer = DomainWriter(folder, read_description(folder, read_sums(folder)), domain.trials)
    writer.take_journal()
    return writer


def _read_journal(folder: Path) -> Iterator[DatasetTrial]:
    path = _journal(folder)
    if not path.exists():
        return
    text = read_text(path, MAX_JOURNAL_BYTES)
    # Texts may hold other line breaks; what follows the last line was cut off.
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        where = f"{path}, line {number}"
        yield parse(DatasetTrial, parse_json(line, where), where)


def _journal(folder: Path) -> Path:
    return folder / WORK / "trials.journal"


def _commit(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        _written(folder / (name + NEW), data)
    sums = "".join(f"{sum_of(data)}  {name}\n" for name, data in sorted(files.items()))
    _written(folder / (SUMS + NEW), sums.encode())
    (folder / (SUMS + NEW)).replace(folder / SUMS)
    _synced(folder)
    _finish_commit(folder)


def _finish_commit(folder: Path) -> None:
    """Move new files with listed sums to their places; drop others, which a killed writer left."""
    sums = read_sums(folder)
    for path in folder.glob(f"*{NEW}"):
        name = path.name.removesuffix(NEW)
        if sums.get(name) == sum_of(path.read_bytes()):
            path.replace(folder / name)
        else:
            path.unlink()
    _synced(folder)


def _written(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _synced(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _refuse_other(folder: Path, before: Environment, now: Environment) -> None:
    for name in ("conditions", "cores", "machine"):
        earlier, current = getattr(before, name), getattr(now, name)
        if earlier != current:
            rule = f"the trials in {folder} were taken with {name} {earlier}"
            raise InvalidInput(f"{rule}, but now it is {current}; collect into another folder")
