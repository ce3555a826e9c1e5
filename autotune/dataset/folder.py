"""A domain's folder: `domain.json`, `trials.parquet`, `card.json`, `card.md` and `SHA256SUMS`.

`SHA256SUMS` is written last and states which files belong together. A killed writer may leave
`FILE.new` next to `FILE`: the one with the listed sum is valid.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.cluster import Cluster
from autotune.dataset.card import Card
from autotune.dataset.columns import read_table
from autotune.dataset.trials import DatasetTrial, Domain, Session
from autotune.errors import InvalidInput
from autotune.files import read_bytes, read_text
from autotune.parsing import parse, parse_json, refuse_newer
from autotune.workload import Workload

SCHEMA = 1
SUMS = "SHA256SUMS"
DESCRIPTION, TABLE, CARD = "domain.json", "trials.parquet", "card.json"
MAX_BYTES = {DESCRIPTION: 64 * 2**20, TABLE: 2**30, CARD: 2**20}
MAX_SUMS_BYTES = 2**16
NEW = ".new"


@dataclass(frozen=True)
class Description:
    """The content of `domain.json`."""

    __pydantic_config__ = {"extra": "forbid"}

    name: str
    model: str
    cluster_name: str
    workload: Workload
    cluster: Cluster
    costs: dict[str, float]
    cores: int
    sessions: tuple[Session, ...]
    schema: int = SCHEMA


def read_dataset(folder: Path) -> tuple[Domain, ...]:
    """The domains in the folders below `folder`, by name.

    Raises `InvalidInput` where there is none or one is broken.
    """
    folders = sorted(path.parent for path in folder.glob(f"*/{SUMS}"))
    if not folders:
        raise InvalidInput(
            f"{folder} must hold a folder with a {SUMS} per domain, but has none; collect some "
            "with datasets/collect.py"
        )
    return tuple(read_domain(path) for path in folders)


def read_domain(folder: Path) -> Domain:
    """One domain.

    Raises `InvalidInput` for a file that is missing, too large, invalid or has another sum.
    """
    sums = read_sums(folder)
    described = read_description(folder, sums)
    trials = read_table(_checked(folder, TABLE, sums), str(folder / TABLE)) if TABLE in sums else ()
    _check_sessions(described, trials, folder)
    _check_plans(described, trials, folder)
    domain = domain_of(described, trials)
    if CARD in sums:
        read_card(folder, sums).check(domain, str(folder / CARD))
    return domain


def domain_of(described: Description, trials: tuple[DatasetTrial, ...]) -> Domain:
    return Domain(
        name=described.name,
        model=described.model,
        cluster_name=described.cluster_name,
        workload=described.workload,
        cluster=described.cluster,
        costs=described.costs,
        cores=described.cores,
        sessions=described.sessions,
        trials=trials,
    )


def read_description(folder: Path, sums: dict[str, str]) -> Description:
    where = str(folder / DESCRIPTION)
    data = _checked_json(folder, DESCRIPTION, sums)
    refuse_newer(data, SCHEMA, "dataset", where)
    return parse(Description, data, where)


def read_card(folder: Path, sums: dict[str, str]) -> Card:
    return Card.from_data(_checked_json(folder, CARD, sums), str(folder / CARD))


def read_sums(folder: Path) -> dict[str, str]:
    """File name -> SHA-256 in hexadecimal digits, in the format of `sha256sum`."""
    path = folder / SUMS
    sums = {}
    for line in read_text(path, MAX_SUMS_BYTES).splitlines():
        match = re.fullmatch(r"([0-9a-f]{64})  ([A-Za-z0-9_.-]+)", line)
        if match is None:
            rule = "must hold lines as `sha256sum` writes them"
            raise InvalidInput(f"{path} {rule}, but one is {line[:80]!r}")
        sums[match[2]] = match[1]
    return sums


def _checked(folder: Path, name: str, sums: dict[str, str]) -> bytes:
    """The file's bytes, with the listed sum."""
    if name not in sums:
        raise InvalidInput(f"{folder / SUMS} must list {name}, but does not")
    for path in (folder / name, folder / (name + NEW)):
        if path.is_file() and sum_of(data := read_bytes(path, MAX_BYTES[name])) == sums[name]:
            return data
    if not (folder / name).exists():
        raise InvalidInput(f"cannot read {folder / name}: no such file; fetch the folder again")
    raise InvalidInput(
        f"{folder / name} must have the sum that {SUMS} lists, but has another: it was changed or "
        "cut off; fetch it again"
    )


def _checked_json(folder: Path, name: str, sums: dict[str, str]) -> Any:
    where = str(folder / name)
    try:
        text = _checked(folder, name, sums).decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{where} must be UTF-8 text, but byte {error.start} is not") from error
    return parse_json(text, where)


def sum_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check_sessions(described: Description, trials: tuple[DatasetTrial, ...], folder: Path) -> None:
    if not described.sessions:
        file = folder / DESCRIPTION
        raise InvalidInput(f"{file} must describe at least one session, but has none")
    unknown = {trial.session for trial in trials} - {session.id for session in described.sessions}
    if unknown:
        rule = f"trials belong to a session that {DESCRIPTION} describes"
        raise InvalidInput(f"{folder}: {rule}, but not those of {min(unknown)!r}")


def _check_plans(described: Description, trials: tuple[DatasetTrial, ...], folder: Path) -> None:
    """Check that each plan has the domain's model and number of ranks."""
    wanted = (described.workload.id, described.cluster.world_size)
    for trial in trials:
        if trial.plan is not None and (trial.plan.workload_id, trial.plan.world_size) != wanted:
            raise InvalidInput(
                f"{folder}: plans must be of the domain's model {wanted[0]} and {wanted[1]} ranks, "
                f"but that of trial {trial.number} is of {trial.plan.workload_id} and "
                f"{trial.plan.world_size}; fetch the whole folder again"
            )
