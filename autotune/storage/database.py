"""An SQLite file with this version's schema: queries, transactions and migrations."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from autotune.errors import InvalidInput, StoreVersionError
from autotune.files import is_file, is_folder
from autotune.storage.damage import BUSY_S, SQLITE_ERRORS, unusable
from autotune.storage.schema import migrations, statements

BUSY_POLL_S = 0.02
PRIMARY_CODE = 0xFF
"""The bits of an SQLite error's code that state its kind; the others state details."""


class Database:
    """An open file. Use it from one thread.

    Its methods raise `InvalidInput` if the file turns out to be damaged, locked or not writable.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self.connection = connection

    @staticmethod
    def open(path: Path) -> Database:
        """Open or create the file; `prepare` comes next. Raises `InvalidInput`."""
        if is_folder(path):
            raise InvalidInput(
                f"the trial store must be a file, but {path} is a directory; give a path such as "
                f"{path / 'autotune.db'}"
            )
        if not is_file(path) and path.exists():
            raise InvalidInput(f"the trial store must be a regular file, but {path} is none")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None)
        except (OSError, *SQLITE_ERRORS) as error:
            raise unusable(path, error) from error
        connection.row_factory = sqlite3.Row
        return Database(path, connection)

    @staticmethod
    def open_to_read(path: Path) -> Database:
        """Open a file for reading; a copy of it if this user may not write it."""
        if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
            return Database.open(path)
        return Database.copied(path)

    @staticmethod
    def copied(path: Path) -> Database:
        """A copy of a file in memory, made without writing anything.

        Raises `InvalidInput`, also if the copy would lack what a write-ahead log still holds.
        """
        log = path.with_name(f"{path.name}-wal")
        if is_file(log) and log.stat().st_size > 0:
            raise InvalidInput(
                f"{path} may not be written by this user, and its last results are still in {log}; "
                "let its owner run `autotune show` once, which moves them"
            )
        try:
            address = f"{path.resolve().as_uri()}?immutable=1"
            with contextlib.closing(sqlite3.connect(address, uri=True)) as file:
                connection = sqlite3.connect(":memory:", isolation_level=None)
                file.backup(connection)
        except (OSError, *SQLITE_ERRORS) as error:
            raise unusable(path, error) from error
        connection.row_factory = sqlite3.Row
        return Database(path, connection)

    def close(self) -> None:
        self.connection.close()

    def prepare(self, derive: Callable[[sqlite3.Connection], None]) -> None:
        """Migrate the file to this version's schema. Raises `StoreVersionError` if it is newer.

        `derive` fills the tables that a file of version 1 lacks.
        """
        with self._errors_explained():
            version, newest = self._version(), len(migrations())
            if version > newest:
                raise StoreVersionError(
                    f"{self.path} has store version {version}, but this autotune reads up to "
                    f"{newest}; update autotune or use another store"
                )
            self._use_write_ahead_log()
            self.connection.execute("PRAGMA synchronous = FULL")
            self.connection.execute("PRAGMA foreign_keys = ON")
            if version < newest:
                self._migrate(derive)
            # Fail now, not in the middle of a job, if the file or directory is not writable.
            with self.transaction() as db:
                db.execute("UPDATE jobs SET status = status WHERE 0")

    def _use_write_ahead_log(self) -> None:
        """Switch a new file to a write-ahead log, as soon as no other process writes it.

        SQLite waits for another writer in every other statement, but not in this one.
        """
        deadline_s = time.monotonic() + BUSY_S
        while True:
            try:
                self.connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & PRIMARY_CODE == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() > deadline_s:
                    raise
                time.sleep(BUSY_POLL_S)

    def rows(self, query: str, parameters: tuple[object, ...] = ()) -> list[sqlite3.Row]:
        """All rows of a query."""
        with self._errors_explained():
            return self.connection.execute(query, parameters).fetchall()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit what is written inside, all or nothing, before any other writer."""
        with self._errors_explained():
            try:
                self.connection.execute("BEGIN IMMEDIATE")
                yield self.connection
                self.connection.execute("COMMIT")
            finally:
                if self.connection.in_transaction:
                    self.connection.execute("ROLLBACK")

    def _migrate(self, derive: Callable[[sqlite3.Connection], None]) -> None:
        """Run all missing migrations in one transaction; another waiting process then runs none."""
        with self.transaction() as db:
            version = self._version()
            for number, script in enumerate(migrations()[version:], start=version + 1):
                for statement in statements(script):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {number}")
            if version == 1:
                derive(db)

    def _version(self) -> int:
        return int(self.connection.execute("PRAGMA user_version").fetchone()[0])

    @contextlib.contextmanager
    def _errors_explained(self) -> Iterator[None]:
        try:
            yield
        except SQLITE_ERRORS as error:
            raise unusable(self.path, error) from error
