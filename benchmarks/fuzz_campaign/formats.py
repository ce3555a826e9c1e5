"""How each kind of file is mutated: its text, its structure or its bytes."""

from __future__ import annotations

import copy
import gzip
import io
import json
import random
import sqlite3
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.fuzz_campaign.mutations import mutated_bytes, mutated_json, mutated_text

Mutate = Callable[[bytes, random.Random], bytes]
"""(valid content, generator) -> mutated content."""

BYTES_SHARE = 0.15
"""Share of the inputs whose bytes are mutated, whatever their structure is."""


def json_file(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < BYTES_SHARE:
        return mutated_bytes(content, rng)
    return mutated_json(json.loads(content), rng)


def text_file(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < BYTES_SHARE:
        return mutated_bytes(content, rng)
    return mutated_text(content.decode(), rng)


def yaml_file(content: bytes, rng: random.Random) -> bytes:
    """Mutate the text, or the structure, which is then written as JSON: that is YAML too."""
    import yaml

    if rng.random() < 0.5:
        return text_file(content, rng)
    if rng.random() < 0.05:
        return b"a: &a [x, x, x, x, x, x, x, x]\n" + b"".join(
            f"{new}: &{new} [*{old}, *{old}, *{old}, *{old}, *{old}, *{old}, *{old}]\n".encode()
            for old, new in zip("abcdefghij", "bcdefghijk", strict=True)
        )
    return mutated_json(yaml.safe_load(content), rng)


def packed_json(content: bytes, rng: random.Random) -> bytes:
    """Mutate within or around the gzip file; a few unpack to far more than they should."""
    kind = rng.random()
    if kind < 0.3:
        return mutated_bytes(content, rng)
    if kind < 0.32:
        return gzip.compress(b'{"traceEvents": [' + b" " * (100 * 2**20), compresslevel=9)
    return gzip.compress(json_file(gzip.decompress(content), rng), compresslevel=1)


def archive(content: bytes, rng: random.Random) -> bytes:
    """Mutate the archive's bytes, or one of its members."""
    if rng.random() < 0.4:
        return mutated_bytes(content, rng)
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        names = tar.getnames()
        members = {name: tar.extractfile(name).read() for name in names}  # type: ignore[union-attr]
    chosen = rng.choice(names)
    members[chosen] = json_file(members[chosen], rng)
    return archive_of(members)


def archive_of(members: dict[str, bytes]) -> bytes:
    """A tar file with these members."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for name, member in members.items():
            header = tarfile.TarInfo(name)
            header.size = len(member)
            tar.addfile(header, io.BytesIO(member))
    return sink.getvalue()


def sqlite_file(content: bytes, rng: random.Random) -> bytes:
    """Mutate the file's bytes, or one value of one row."""
    if rng.random() < 0.4:
        return mutated_bytes(content, rng)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        path.write_bytes(content)
        db = sqlite3.connect(path)
        try:
            _mutate_row(db, rng)
            db.commit()
        finally:
            db.close()
        return path.read_bytes()


def _mutate_row(db: sqlite3.Connection, rng: random.Random) -> None:
    tables = [name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    table = rng.choice([name for name in tables if not name.startswith("sqlite_")])
    if rng.random() < 0.05:
        db.execute("PRAGMA foreign_keys = OFF")
        db.execute(rng.choice((f'DROP TABLE "{table}"', f'DELETE FROM "{table}"')))
        return
    rows = db.execute(f'SELECT * FROM "{table}"').fetchall()
    if not rows:
        return
    described = db.execute(f'PRAGMA table_info("{table}")').fetchall()
    columns = [row[1] for row in described]
    keys = [at for at, row in enumerate(described) if row[5]] or list(range(len(columns)))
    row, at = rng.choice(rows), rng.randrange(len(columns))
    same = " AND ".join(f'"{columns[key]}" IS ?' for key in keys)
    statement = f'UPDATE OR IGNORE "{table}" SET "{columns[at]}" = ? WHERE {same}'
    db.execute("PRAGMA ignore_check_constraints = ON")
    db.execute(statement, (_mutated_cell(row[at], rng), *(row[key] for key in keys)))


def _mutated_cell(value: Any, rng: random.Random) -> Any:
    if isinstance(value, str) and value.startswith(("{", "[")) and rng.random() < 0.9:
        return json_file(value.encode(), rng).decode(errors="replace")
    return rng.choice((None, -1, 0, 2**62, 1e308, "x", "x" * 10_000, b"\xff\xfe", "NaN"))


def parquet_file(content: bytes, rng: random.Random) -> bytes:
    """Mutate the file's bytes, or one cell of one row."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if rng.random() < 0.4:
        return mutated_bytes(content, rng)
    table = pq.ParquetFile(io.BytesIO(content)).read()
    rows = copy.deepcopy(table.to_pylist())
    for _ in range(rng.choice((1, 1, 2))):
        row = rng.choice(rows)
        name = rng.choice(list(row))
        row[name] = _mutated_cell(row[name], rng)
    if rng.random() < 0.1:
        rows.insert(rng.randrange(len(rows)), rng.choice(rows))
    try:
        changed = pa.Table.from_pylist(rows, table.schema)
        sink = io.BytesIO()
        pq.write_table(changed, sink)
    except (pa.ArrowException, TypeError, OverflowError, ValueError):
        return mutated_bytes(content, rng)  # the value does not fit the column
    return sink.getvalue()


def binary_file(content: bytes, rng: random.Random) -> bytes:
    return mutated_bytes(content, rng)
