"""A domain's folder: `domain.json`, `trials.parquet`, `card.json`, `card.md` and `SHA256SUMS`.

`SHA256SUMS` is written last and says which files belong together. A writer that was killed may leave `FILE.new` beside `FILE`: the one
whose sum is listed is the file.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from autotune.cluster import Cluster
from autotune.dataset.columns import read_table
from autotune.dataset.trials import DatasetTrial, Domain, Session
from autotune.errors import InvalidInput
from autotune.parsing import parse, parse_json, read_text, refuse_newer
from autotune.workload import Workload

SCHEMA = 1
SUMS = "SHA256SUMS"
DESCRIPTION, TABLE = "domain.json", "trials.parquet"
MAX_BYTES = {DESCRIPTION: 64 * 2**20, TABLE: 2**30}
MAX_SUMS_BYTES = 2**16
NEW = ".new"


@dataclass(frozen=True)
class Description:
    """What `domain.json` holds."""

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
    """The domains in the folders below `folder`, by name. Raises `InvalidInput` where there is none or one is broken."""
    found = sorted(path.parent for path in folder.glob(f"*/{SUMS}"))
    if not found:
        raise InvalidInput(
            f"{folder} must hold a folder with a {SUMS} per domain, but has none; collect some with datasets/collect.py"
        )
    return tuple(read_domain(path) for path in found)


def read_domain(folder: Path) -> Domain:
    """One domain. Raises `InvalidInput` for a file that is missing, too large, not the one whose sum is listed, or not valid."""
    sums = read_sums(folder)
    described = read_description(folder, sums)
    trials = read_table(_checked(folder, TABLE, sums), str(folder / TABLE)) if TABLE in sums else ()
    _check_sessions(described, trials, folder)
    _check_plans(described, trials, folder)
    return domain_of(described, trials)


def domain_of(described: Description, trials: tuple[DatasetTrial, ...]) -> Domain:
    fields = {
        name: getattr(described, name)
        for name in ("name", "model", "cluster_name", "workload", "cluster", "costs", "cores")
    }
    return Domain(**fields, sessions=described.sessions, trials=trials)


def read_description(folder: Path, sums: dict[str, str]) -> Description:
    where = str(folder / DESCRIPTION)
    try:
        text = _checked(folder, DESCRIPTION, sums).decode()
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{where} must be UTF-8 text, but byte {error.start} is not") from error
    data = parse_json(text, where)
    refuse_newer(data, SCHEMA, "dataset", where)
    return parse(Description, data, where)


def read_sums(folder: Path) -> dict[str, str]:
    """File name -> SHA-256 in hexadecimal digits, in the format of `sha256sum`."""
    path = folder / SUMS
    sums = {}
    for line in read_text(path, MAX_SUMS_BYTES).splitlines():
        match = re.fullmatch(r"([0-9a-f]{64})  ([A-Za-z0-9_.-]+)", line)
        if match is None:
            raise InvalidInput(
                f"{path} must hold lines as `sha256sum` writes them, but one is {line[:80]!r}"
            )
        sums[match[2]] = match[1]
    return sums


def _checked(folder: Path, name: str, sums: dict[str, str]) -> bytes:
    """The file's bytes, whose sum is the listed one."""
    if name not in sums:
        raise InvalidInput(f"{folder / SUMS} must list {name}, but does not")
    for path in (folder / name, folder / (name + NEW)):
        if path.is_file() and sum_of(data := _bytes(path, MAX_BYTES[name])) == sums[name]:
            return data
    if not (folder / name).exists():
        raise InvalidInput(
            f"cannot read {folder / name}: no such file; fetch the whole folder again"
        )
    raise InvalidInput(
        f"{folder / name} must have the sum that {SUMS} lists, but has another: it was changed or cut off; fetch it again"
    )


def _bytes(path: Path, most: int) -> bytes:
    try:
        size = path.stat().st_size
        if size > most:
            raise InvalidInput(f"{path} may hold at most {most} bytes, but has {size}")
        return path.read_bytes()
    except OSError as error:
        raise InvalidInput(
            f"cannot read {path}: {error.strerror or error}; check the path and its permissions"
        ) from error


def sum_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _check_sessions(described: Description, trials: tuple[DatasetTrial, ...], folder: Path) -> None:
    if not described.sessions:
        raise InvalidInput(
            f"{folder / DESCRIPTION} must describe at least one session, but has none"
        )
    unknown = {trial.session for trial in trials} - {session.id for session in described.sessions}
    if unknown:
        raise InvalidInput(
            f"{folder}: trials belong to a session that {DESCRIPTION} describes, but not those of {sorted(unknown)[0]!r}"
        )


def _check_plans(described: Description, trials: tuple[DatasetTrial, ...], folder: Path) -> None:
    """That each is one of the domain's model and number of ranks."""
    wanted = (described.workload.id, described.cluster.world_size)
    for trial in trials:
        if trial.plan is not None and (trial.plan.workload_id, trial.plan.world_size) != wanted:
            raise InvalidInput(
                f"{folder}: plans must be of the domain's model {wanted[0]} and {wanted[1]} ranks, but that of trial {trial.number} is of "
                f"{trial.plan.workload_id} and {trial.plan.world_size}; fetch the whole folder again"
            )
