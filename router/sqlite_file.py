"""An SQLite file of a router's: it survives the process, and several processes of one machine may share it."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUSY_S = 20.0  # another process may write for so long


class SqliteFile:
    """Any thread may use it; one at a time does. All of this blocks, and belongs into a thread."""

    def __init__(self, path: Path, schema: str, version: int, what: str) -> None:
        """Makes the file if it is not there. `what` it holds, for errors. Raises `OSError` or `sqlite3.Error` if that
        fails, or if it is another kind of file, or one of another version."""
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # prompts of all tenants
        self._lock = threading.Lock()
        self._db = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        with self.transaction() as db:
            found = db.execute("PRAGMA user_version").fetchone()[0]
            if found == 0:
                for statement in schema.split(";"):
                    db.execute(statement)
                db.execute(f"PRAGMA user_version = {version}")
            elif found != version:
                raise sqlite3.DatabaseError(f"{path} has version {found} of {what}; this router has {version}")

    def close(self) -> None:
        with self._lock:
            self._db.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Others may write meanwhile."""
        with self._lock:
            yield self._db

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")
