"""Files and batches in an SQLite file: it survives the process, and several processes of one machine may share it.

A batch is worked at by the process that leases it, and by another one if that ends. A line has one answer: the first
that was written. All of this blocks, and belongs into a thread.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from common.errors import InvalidArgumentError, NotFoundError
from router.batches.records import UNFINISHED, Batch, BatchLine, BatchStatus, LineAnswer, LineError, StoredFile
from router.limits.clients import ApiClient
from router.sqlite_file import SqliteFile

SCHEMA_VERSION = 1
PART_BYTES = 2**20
MAX_LISTED_ROWS = 10_000  # of one owner
LEFT_S = 86_400.0  # after which an upload goes on no more

_SCHEMA = """
CREATE TABLE files (
    file_id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, purpose TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, is_whole INTEGER NOT NULL
);
CREATE TABLE parts (file_id TEXT NOT NULL, number INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY (file_id, number));
CREATE TABLE batches (
    batch_id TEXT PRIMARY KEY, owner TEXT NOT NULL, client TEXT NOT NULL, endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL, completion_window_s INTEGER NOT NULL, metadata TEXT, status TEXT NOT NULL,
    errors TEXT NOT NULL, output_file_id TEXT, error_file_id TEXT, created_at INTEGER NOT NULL, times TEXT NOT NULL,
    worker TEXT NOT NULL, leased_until REAL NOT NULL,
    num_lines INTEGER NOT NULL DEFAULT 0, num_completed INTEGER NOT NULL DEFAULT 0,
    num_failed INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE lines (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, body BLOB NOT NULL,
    status INTEGER, request_id TEXT, answer BLOB, PRIMARY KEY (batch_id, number), UNIQUE (batch_id, custom_id)
);
CREATE INDEX unanswered ON lines (batch_id, number) WHERE status IS NULL;
CREATE INDEX unfinished ON batches (status, leased_until);
"""


class BatchStore:
    """Any thread may use it; one at a time does."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Makes the file if it is not there. Raises `OSError` or `sqlite3.Error` if that fails, or if it is another
        kind of file, or one of another version."""
        self._clock = clock
        self._file = SqliteFile(path, _SCHEMA, SCHEMA_VERSION, "batches")

    def close(self) -> None:
        self._file.close()

    # ------------------------------------------------------------------------------------------------------------ files

    def begin_file(self, file_id: str, owner: str, name: str, purpose: str) -> None:
        with self._file.transaction() as db:
            row = (file_id, owner, name, purpose, 0, int(self._clock()), 0)
            db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def add_part(self, file_id: str, number: int, data: bytes) -> None:
        """Does nothing if the file was forgotten meanwhile."""
        with self._file.transaction() as db:
            grown = "UPDATE files SET num_bytes = num_bytes + ? WHERE file_id = ?"
            if db.execute(grown, (len(data), file_id)).rowcount:
                db.execute("INSERT INTO parts VALUES (?, ?, ?)", (file_id, number, data))

    def num_bytes(self, owner: str) -> int:
        """Of all files of `owner`, those that are arriving, too."""
        with self._file.reading() as db:
            asked = "SELECT COALESCE(SUM(num_bytes), 0) FROM files WHERE owner = ?"
            return int(db.execute(asked, (owner,)).fetchone()[0])

    def end_file(self, file_id: str) -> StoredFile:
        with self._file.transaction() as db:
            db.execute("UPDATE files SET is_whole = 1 WHERE file_id = ?", (file_id,))
            return _file(db.execute("SELECT * FROM files WHERE file_id = ?", (file_id,)).fetchone())

    def forget_file(self, file_id: str) -> None:
        with self._file.transaction() as db:
            _forget(db, file_id)

    def file(self, file_id: str, owner: str) -> StoredFile:
        """Raises `NotFoundError`."""
        with self._file.reading() as db:
            return _known_file(db, file_id, owner)

    def listed_files(self, owner: str, purpose: str | None = None) -> list[StoredFile]:
        """The newest first, the last `MAX_LISTED_ROWS`."""
        with self._file.reading() as db:
            asked = (
                "SELECT * FROM files WHERE owner = ? AND is_whole = 1 AND purpose = COALESCE(?, purpose) "
                "ORDER BY created_at DESC, rowid DESC LIMIT ?"
            )
            return [_file(row) for row in db.execute(asked, (owner, purpose, MAX_LISTED_ROWS))]

    def delete_file(self, file_id: str, owner: str) -> None:
        """Raises `NotFoundError`, and `InvalidArgumentError` while a batch that has not ended needs it."""
        with self._file.transaction() as db:
            _known_file(db, file_id, owner)
            marks = ", ".join("?" for _ in UNFINISHED)
            asked = f"SELECT 1 FROM batches WHERE input_file_id = ? AND status IN ({marks})"  # noqa: S608 - marks alone
            if db.execute(asked, (file_id, *UNFINISHED)).fetchone() is not None:
                raise InvalidArgumentError("file_id", "is the input of a batch that has not ended: cancel that first")
            _forget(db, file_id)

    def content(self, file_id: str) -> Iterator[bytes]:
        """The file's bytes, part by part."""
        number = 0
        while True:
            with self._file.reading() as db:
                asked = "SELECT data FROM parts WHERE file_id = ? AND number = ?"
                row = db.execute(asked, (file_id, number)).fetchone()
            if row is None:
                return
            yield row["data"]
            number += 1

    def clean(self, keep_s: float) -> int:
        """Forgets files, and batches that have ended, older than `keep_s`; uploads that were left, after a day. Returns
        how many."""
        now = self._clock()
        marks = ", ".join("?" for _ in UNFINISHED)
        needed = f"SELECT input_file_id FROM batches WHERE status IN ({marks})"  # noqa: S608 - marks alone
        with self._file.reading() as db:
            old_files = db.execute(
                f"SELECT file_id FROM files WHERE file_id NOT IN ({needed}) "  # noqa: S608 - as above
                "AND created_at < CASE is_whole WHEN 1 THEN ? ELSE ? END",
                (*UNFINISHED, now - keep_s, now - min(keep_s, LEFT_S)),
            ).fetchall()
            old_batches = db.execute(
                f"SELECT batch_id FROM batches WHERE status NOT IN ({marks}) AND created_at < ?",  # noqa: S608
                (*UNFINISHED, now - keep_s),
            ).fetchall()
        for row in old_files:
            self.forget_file(row["file_id"])
        for row in old_batches:
            with self._file.transaction() as db:
                db.execute("DELETE FROM lines WHERE batch_id = ?", (row["batch_id"],))
                db.execute("DELETE FROM batches WHERE batch_id = ?", (row["batch_id"],))
        return len(old_files) + len(old_batches)

    # ---------------------------------------------------------------------------------------------------------- batches

    def add_batch(self, batch: Batch) -> None:
        """Raises `NotFoundError` if its file is not one of its owner's."""
        with self._file.transaction() as db:
            _known_file(db, batch.input_file_id, batch.client.owner, field="input_file_id")
            client = batch.client
            row = {
                "batch_id": batch.batch_id,
                "owner": client.owner,
                "client": json.dumps([client.name, client.tenant]),
                "endpoint": batch.endpoint,
                "input_file_id": batch.input_file_id,
                "completion_window_s": batch.completion_window_s,
                "metadata": None if batch.metadata is None else json.dumps(batch.metadata),
                "status": batch.status,
                "created_at": batch.created_at,
            }
            names = ", ".join(row)
            marks = ", ".join(f":{name}" for name in row)
            db.execute(
                f"INSERT INTO batches ({names}, errors, times, worker, leased_until) "  # noqa: S608 - names alone
                f"VALUES ({marks}, '[]', '{{}}', '', 0)",
                row,
            )

    def batch(self, batch_id: str, owner: str | None = None) -> Batch:
        """Raises `NotFoundError`. `owner` None: whoever's it is."""
        with self._file.reading() as db:
            row = db.execute("SELECT * FROM batches WHERE batch_id = ?", (batch_id,)).fetchone()
        if row is None or owner not in (None, row["owner"]):
            raise NotFoundError(f"batch {batch_id[:100]!r} does not exist", field="batch_id")
        return _batch(row)

    def listed_batches(self, owner: str) -> list[Batch]:
        """The newest first, the last `MAX_LISTED_ROWS`."""
        with self._file.reading() as db:
            asked = "SELECT * FROM batches WHERE owner = ? ORDER BY created_at DESC, rowid DESC LIMIT ?"
            return [_batch(row) for row in db.execute(asked, (owner, MAX_LISTED_ROWS))]

    def num_unfinished(self, owner: str) -> int:
        """Batches of `owner` that have not ended."""
        marks = ", ".join("?" for _ in UNFINISHED)
        with self._file.reading() as db:
            asked = f"SELECT COUNT(*) FROM batches WHERE owner = ? AND status IN ({marks})"  # noqa: S608 - marks alone
            return int(db.execute(asked, (owner, *UNFINISHED)).fetchone()[0])

    def lease(self, worker: str, lease_s: float) -> Batch | None:
        """A batch with work to do that nobody works at, the oldest of the owner of whose batches `worker` works at the
        fewest; from now on `worker` does, for so long."""
        now = self._clock()
        marks = ", ".join("?" for _ in UNFINISHED)
        with self._file.transaction() as db:
            asked = (
                "SELECT * FROM batches AS free "  # noqa: S608 - marks alone
                f"WHERE status IN ({marks}) AND leased_until < ? ORDER BY (SELECT COUNT(*) FROM batches "
                f"WHERE owner = free.owner AND worker = ? AND leased_until >= ? AND status IN ({marks})), "
                "created_at, rowid LIMIT 1"
            )
            row = db.execute(asked, (*UNFINISHED, now, worker, now, *UNFINISHED)).fetchone()
            if row is None:
                return None
            renewed = "UPDATE batches SET worker = ?, leased_until = ? WHERE batch_id = ?"
            db.execute(renewed, (worker, now + lease_s, row["batch_id"]))
            return _batch(row)

    def renew(self, batch_id: str, worker: str, lease_s: float) -> BatchStatus | None:
        """The batch's status; None if another process works at it now."""
        with self._file.transaction() as db:
            renewed = "UPDATE batches SET leased_until = ? WHERE batch_id = ? AND worker = ?"
            if not db.execute(renewed, (self._clock() + lease_s, batch_id, worker)).rowcount:
                return None
            row = db.execute("SELECT status FROM batches WHERE batch_id = ?", (batch_id,)).fetchone()
            return BatchStatus(row["status"])

    def release(self, worker: str) -> None:
        """Others may go on with what `worker` worked at."""
        with self._file.transaction() as db:
            db.execute("UPDATE batches SET worker = '', leased_until = 0 WHERE worker = ?", (worker,))

    def cancel(self, batch_id: str, owner: str) -> Batch:
        """Raises `NotFoundError`, and `InvalidArgumentError` if the batch has ended."""
        batch = self.batch(batch_id, owner)
        if batch.status == BatchStatus.CANCELLING:
            return batch
        if not self.become(batch_id, BatchStatus.CANCELLING, of=(BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)):
            raise InvalidArgumentError("batch_id", f"has ended: it is {self.batch(batch_id).status}")
        return self.batch(batch_id)

    def become(
        self,
        batch_id: str,
        status: BatchStatus,
        *,
        of: Iterable[BatchStatus],
        errors: Iterable[LineError] = (),
        files: tuple[str | None, str | None] = (None, None),
    ) -> bool:
        """Whether the batch was one `of` these, and is of this status now. `files`: of its output and its errors,
        which are whole now."""
        with self._file.transaction() as db:
            row = db.execute("SELECT status, times FROM batches WHERE batch_id = ?", (batch_id,)).fetchone()
            if row["status"] not in of:
                return False
            times = {**json.loads(row["times"]), status: int(self._clock())}
            told = json.dumps([[one.message, one.line, one.param, one.code] for one in errors])
            changed = (
                "UPDATE batches SET status = ?, times = ?, errors = ?, output_file_id = ?, error_file_id = ? "
                "WHERE batch_id = ?"
            )
            db.execute(changed, (status, json.dumps(times), told, *files, batch_id))
            for file_id in files:
                db.execute("UPDATE files SET is_whole = 1 WHERE file_id = ?", (file_id,))
            return True

    def add_lines(self, lines: Iterable[BatchLine]) -> None:
        """Those that are there already stay as they are. Raises `sqlite3.IntegrityError` if two have one custom_id."""
        with self._file.transaction() as db:
            for line in lines:
                added = (
                    "INSERT INTO lines (batch_id, number, custom_id, body) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT (batch_id, number) DO NOTHING"
                )
                db.execute(added, (line.batch_id, line.number, line.custom_id, line.body))

    def forget_lines(self, batch_id: str) -> None:
        with self._file.transaction() as db:
            db.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))

    def count_lines(self, batch_id: str) -> None:
        """Notes how many lines the batch has, once all are there."""
        with self._file.transaction() as db:
            counted = (
                "UPDATE batches SET num_lines = (SELECT COUNT(*) FROM lines WHERE batch_id = ?) WHERE batch_id = ?"
            )
            db.execute(counted, (batch_id, batch_id))

    def unanswered(self, batch_id: str, after: int, limit: int) -> list[BatchLine]:
        """The next lines without an answer, those behind line `after`."""
        with self._file.reading() as db:
            asked = "SELECT * FROM lines WHERE batch_id = ? AND status IS NULL AND number > ? ORDER BY number LIMIT ?"
            rows = db.execute(asked, (batch_id, after, limit)).fetchall()
        return [BatchLine(row["batch_id"], row["number"], row["custom_id"], row["body"]) for row in rows]

    def answer(self, line: BatchLine, answer: LineAnswer) -> bool:
        """Whether this is the line's answer: it had none."""
        with self._file.transaction() as db:
            written = (
                "UPDATE lines SET status = ?, request_id = ?, answer = ? "
                "WHERE batch_id = ? AND number = ? AND status IS NULL"
            )
            given = (answer.status, answer.request_id, answer.body, line.batch_id, line.number)
            if not db.execute(written, given).rowcount:
                return False
            column = "num_completed" if answer.is_good else "num_failed"
            counted = f"UPDATE batches SET {column} = {column} + 1 WHERE batch_id = ?"  # noqa: S608 - one of two
            db.execute(counted, (line.batch_id,))
            return True

    def answers(self, batch_id: str, *, good: bool) -> Iterator[tuple[BatchLine, LineAnswer | None]]:
        """The lines whose answers are good, or those whose are not, with those that have none."""
        number = 0
        which = "status BETWEEN 200 AND 299" if good else "(status IS NULL OR status NOT BETWEEN 200 AND 299)"
        while True:
            with self._file.reading() as db:
                asked = f"SELECT * FROM lines WHERE batch_id = ? AND number > ? AND {which} ORDER BY number LIMIT 1"  # noqa: S608
                row = db.execute(asked, (batch_id, number)).fetchone()
            if row is None:
                return
            number = row["number"]
            line = BatchLine(row["batch_id"], number, row["custom_id"], row["body"])
            is_answered = row["status"] is not None
            yield line, LineAnswer(row["status"], row["request_id"], row["answer"]) if is_answered else None


def _known_file(db: sqlite3.Connection, file_id: str, owner: str, field: str = "file_id") -> StoredFile:
    row = db.execute("SELECT * FROM files WHERE file_id = ? AND is_whole = 1", (file_id,)).fetchone()
    if row is None or row["owner"] != owner:
        raise NotFoundError(f"file {file_id[:100]!r} does not exist", field=field)
    return _file(row)


def _forget(db: sqlite3.Connection, file_id: str) -> None:
    db.execute("DELETE FROM parts WHERE file_id = ?", (file_id,))
    db.execute("DELETE FROM files WHERE file_id = ?", (file_id,))


def _file(row: sqlite3.Row) -> StoredFile:
    return StoredFile(
        file_id=row["file_id"],
        owner=row["owner"],
        name=row["name"],
        purpose=row["purpose"],
        num_bytes=row["num_bytes"],
        created_at=row["created_at"],
    )


def _batch(row: sqlite3.Row) -> Batch:
    return Batch(
        batch_id=row["batch_id"],
        client=ApiClient(*json.loads(row["client"])),
        endpoint=row["endpoint"],
        input_file_id=row["input_file_id"],
        completion_window_s=row["completion_window_s"],
        metadata=None if row["metadata"] is None else json.loads(row["metadata"]),
        status=BatchStatus(row["status"]),
        errors=tuple(LineError(*error) for error in json.loads(row["errors"])),
        output_file_id=row["output_file_id"],
        error_file_id=row["error_file_id"],
        num_lines=row["num_lines"],
        num_completed=row["num_completed"],
        num_failed=row["num_failed"],
        created_at=row["created_at"],
        times=json.loads(row["times"]),
    )
