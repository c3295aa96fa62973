"""Responses that clients may continue, read and delete, in an SQLite file.

    conversation ──┬── response ◄── response ◄── response      each holds its own input and answer, and names the one
                   │                    ▲                      that it continues
                   └────────────────────┴─────── response

A conversation is forgotten as a whole, when it was not continued for `keep_s` or when there is no room: so a response
that is there has all that came before it, unless a client deleted a part. Room is made by the owner's conversation that
was used least recently; if all owners together take too much, by one of the owner who takes most.
"""

from __future__ import annotations

import re
import secrets
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common import metrics
from common.errors import NotFoundError
from router.sqlite_file import SqliteFile

SCHEMA_VERSION = 2
MAX_RESPONSES = 100_000  # of one owner
ROW_BYTES = 512  # of a response beside its texts
TAG_CHARS, RANDOM_CHARS = 8, 32  # of an id, in hex: which file has it, and which response it is

_ID = re.compile(f"resp_([0-9a-f]{{{TAG_CHARS}}})[0-9a-f]{{{RANDOM_CHARS}}}")

_SCHEMA = """
CREATE TABLE store (tag TEXT NOT NULL);
CREATE TABLE owners (owner TEXT PRIMARY KEY, num_responses INTEGER NOT NULL, num_bytes INTEGER NOT NULL);
CREATE TABLE conversations (
    conversation_id TEXT PRIMARY KEY, owner TEXT NOT NULL, session TEXT NOT NULL, used_at REAL NOT NULL,
    num_responses INTEGER NOT NULL, num_bytes INTEGER NOT NULL
);
CREATE TABLE responses (
    response_id TEXT PRIMARY KEY, conversation_id TEXT NOT NULL, previous_id TEXT, status TEXT NOT NULL,
    input BLOB NOT NULL, output BLOB NOT NULL, response BLOB NOT NULL
);
CREATE INDEX of_owner ON conversations (owner, used_at);
CREATE INDEX by_use ON conversations (used_at);
CREATE INDEX of_conversation ON responses (conversation_id);
"""
_OF_A_TURN = "response_id, previous_id, input, output"  # without the response, which may be far longer


@dataclass(slots=True, frozen=True, kw_only=True)
class StoredResponse:
    response_id: str
    previous_id: str | None = None  # the response that it continues
    status: str  # OpenAI's word: completed, incomplete or failed
    input: bytes  # JSON: the items of its own request
    output: bytes  # JSON: of its answer, the items that go on in a conversation
    response: bytes  # JSON, as it was told

    @property
    def num_bytes(self) -> int:
        return ROW_BYTES + len(self.input) + len(self.output) + len(self.response)


@dataclass(slots=True, frozen=True)
class Turn:
    """What a response adds to its conversation."""

    response_id: str
    input: bytes
    output: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.input) + len(self.output)


@dataclass(slots=True, frozen=True)
class Earlier:
    """A conversation up to one of its responses."""

    session: str  # whose requests belong to one worker
    turns: list[Turn]  # the first one first
    last: StoredResponse  # of the last one

    @property
    def num_bytes(self) -> int:
        return self.last.num_bytes + sum(one.num_bytes for one in self.turns)


class ResponseStore:
    """Any thread may use it; one at a time does. All of it blocks, and belongs into a thread."""

    def __init__(
        self,
        path: Path,
        *,
        keep_s: float,
        max_bytes: int,
        max_owner_bytes: int,
        max_responses: int = MAX_RESPONSES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`max_bytes`: of all owners; `max_owner_bytes`, `max_responses`: of one. Raises what `SqliteFile` raises."""
        self._file = SqliteFile(path, _SCHEMA, SCHEMA_VERSION, "responses")
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._max_owner_bytes = min(max_owner_bytes, max_bytes)
        self._max_responses = max_responses
        self._clock = clock
        with self._file.transaction() as db:
            if (row := db.execute("SELECT tag FROM store").fetchone()) is None:
                db.execute("INSERT INTO store VALUES (?)", (secrets.token_hex(TAG_CHARS // 2),))
                row = db.execute("SELECT tag FROM store").fetchone()
            self._tag = str(row["tag"])

    def close(self) -> None:
        self._file.close()

    def new_id(self) -> str:
        """An id that nobody guesses, and that says which file has the response."""
        return f"resp_{self._tag}{secrets.token_hex(RANDOM_CHARS // 2)}"

    def add(self, one: StoredResponse, owner: str, session: str, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Whether it is there now. It is not if its conversation is gone meanwhile, or alone takes more than an owner
        has, or if it `is_wanted` no longer when the file is free. `session`: of a conversation that begins."""
        now, size = self._clock(), one.num_bytes
        with self._file.transaction() as db:
            if not is_wanted():
                return False
            conversation_id = one.response_id
            if one.previous_id is not None:
                if (previous := self._row(db, one.previous_id, owner)) is None:
                    return False
                conversation_id = previous["conversation_id"]
            asked = "SELECT num_bytes FROM conversations WHERE conversation_id = ?"
            before = db.execute(asked, (conversation_id,)).fetchone()
            if size + (0 if before is None else before["num_bytes"]) > self._max_owner_bytes:
                return False
            begun = "INSERT INTO conversations VALUES (?, ?, ?, ?, 0, 0) ON CONFLICT DO NOTHING"
            db.execute(begun, (conversation_id, owner, session, now))
            row = (one.response_id, conversation_id, one.previous_id, one.status, one.input, one.output)
            db.execute("INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?)", (*row, one.response))
            db.execute("UPDATE conversations SET used_at = ? WHERE conversation_id = ?", (now, conversation_id))
            _count(db, conversation_id, 1, size)
            num_forgotten = self._make_room(db, owner, conversation_id)
        metrics.router_stored_responses.labels("displaced").inc(num_forgotten)
        metrics.router_stored_responses.labels("stored").inc()
        return True

    def get(self, response_id: str, owner: str) -> StoredResponse:
        """Raises `NotFoundError`."""
        with self._file.reading() as db:
            row = self._row(db, response_id, owner)
        if row is None:
            raise NotFoundError(self._missing(response_id), field="response_id")
        return _response(row)

    def earlier(self, response_id: str, owner: str, max_bytes: int) -> Earlier:
        """The conversation up to this response, which counts as used now. Raises `NotFoundError` if one of its
        responses is not there, `ValueError` if its turns have more than `max_bytes`."""
        found: list[Turn] = []
        next_id: str | None = response_id
        with self._file.transaction() as db:
            num_bytes = 0
            if (last := self._row(db, response_id, owner)) is None:
                raise NotFoundError(self._missing(response_id))
            while next_id is not None:
                if (row := self._row(db, next_id, owner, _OF_A_TURN)) is None:
                    raise NotFoundError(f"{response_id!r} continues {next_id!r}, which was deleted")
                found.append(Turn(row["response_id"], row["input"], row["output"]))
                num_bytes += found[-1].num_bytes
                if num_bytes > max_bytes:
                    raise ValueError(f"its conversation has more than {max_bytes} bytes")
                next_id = row["previous_id"]
            used = "UPDATE conversations SET used_at = ? WHERE conversation_id = ?"
            db.execute(used, (self._clock(), last["conversation_id"]))
            return Earlier(last["session"], found[::-1], _response(last))

    def delete(self, response_id: str, owner: str) -> None:
        """Those that continue it can be continued no longer. Raises `NotFoundError`."""
        with self._file.transaction() as db:
            if (row := self._row(db, response_id, owner)) is None:
                raise NotFoundError(self._missing(response_id), field="response_id")
            db.execute("DELETE FROM responses WHERE response_id = ?", (response_id,))
            _count(db, row["conversation_id"], -1, -_response(row).num_bytes)
            empty = "DELETE FROM conversations WHERE conversation_id = ? AND num_responses = 0"
            db.execute(empty, (row["conversation_id"],))
            _drop_empty_owners(db)
        metrics.router_stored_responses.labels("deleted").inc()

    def clean(self) -> int:
        """Forgets conversations that were not continued for long. Returns how many responses they had."""
        num_forgotten = 0
        while True:
            with self._file.transaction() as db:
                asked = "SELECT conversation_id FROM conversations WHERE used_at < ? LIMIT 1"
                if (row := db.execute(asked, (self._clock() - self._keep_s,)).fetchone()) is None:
                    break
                num_forgotten += _forget(db, row["conversation_id"])
        metrics.router_stored_responses.labels("expired").inc(num_forgotten)
        return num_forgotten

    def _row(
        self, db: sqlite3.Connection, response_id: str, owner: str, columns: str = "responses.*"
    ) -> sqlite3.Row | None:
        found = "FROM responses JOIN conversations USING (conversation_id) WHERE response_id = ? AND owner = ?"
        asked = f"SELECT {columns}, session {found} AND used_at >= ?"
        row: sqlite3.Row | None = db.execute(asked, (response_id, owner, self._clock() - self._keep_s)).fetchone()
        return row

    def _missing(self, response_id: str) -> str:
        """Why there is no such response, as far as its id says it."""
        named = _ID.fullmatch(response_id)
        if named is not None and named[1] != self._tag:
            return f"{response_id!r} is not kept here: other routers have a file of responses of their own"
        return f"{response_id[:100]!r} does not exist: it was not stored, was deleted, or is too old"

    def _make_room(self, db: sqlite3.Connection, owner: str, current: str) -> int:
        """Returns how many responses were forgotten: never those of the conversation `current`."""
        num_forgotten = 0
        oldest = "SELECT conversation_id FROM conversations WHERE owner = ? AND conversation_id <> ? ORDER BY used_at"
        while True:
            own = db.execute("SELECT * FROM owners WHERE owner = ?", (owner,)).fetchone()
            total = db.execute("SELECT SUM(num_bytes) FROM owners").fetchone()[0]
            if own["num_bytes"] > self._max_owner_bytes or own["num_responses"] > self._max_responses:
                whose = [owner]
            elif total > self._max_bytes:
                whose = [row["owner"] for row in db.execute("SELECT owner FROM owners ORDER BY num_bytes DESC LIMIT 2")]
            else:
                return num_forgotten
            for one in whose:  # the second has others, if the first one's only conversation is this one
                if (row := db.execute(f"{oldest} LIMIT 1", (one, current)).fetchone()) is not None:
                    num_forgotten += _forget(db, row["conversation_id"])
                    break
            else:
                return num_forgotten


def _forget(db: sqlite3.Connection, conversation_id: str) -> int:
    asked = "SELECT num_responses, num_bytes FROM conversations WHERE conversation_id = ?"
    row = db.execute(asked, (conversation_id,)).fetchone()
    db.execute("DELETE FROM responses WHERE conversation_id = ?", (conversation_id,))
    _count(db, conversation_id, -row["num_responses"], -row["num_bytes"])
    db.execute("DELETE FROM conversations WHERE conversation_id = ?", (conversation_id,))
    _drop_empty_owners(db)
    return int(row["num_responses"])


def _count(db: sqlite3.Connection, conversation_id: str, num_responses: int, num_bytes: int) -> None:
    """Adds to what a conversation and its owner have."""
    changed = "SET num_responses = num_responses + ?, num_bytes = num_bytes + ? WHERE conversation_id = ?"
    db.execute(f"UPDATE conversations {changed}", (num_responses, num_bytes, conversation_id))
    asked = "SELECT owner FROM conversations WHERE conversation_id = ?"
    owner = db.execute(asked, (conversation_id,)).fetchone()["owner"]
    added = (
        "INSERT INTO owners VALUES (?, ?, ?) ON CONFLICT (owner) DO UPDATE "
        "SET num_responses = num_responses + excluded.num_responses, num_bytes = num_bytes + excluded.num_bytes"
    )
    db.execute(added, (owner, num_responses, num_bytes))


def _drop_empty_owners(db: sqlite3.Connection) -> None:
    db.execute("DELETE FROM owners WHERE num_responses = 0")


def _response(row: sqlite3.Row) -> StoredResponse:
    return StoredResponse(
        response_id=row["response_id"],
        previous_id=row["previous_id"],
        status=row["status"],
        input=row["input"],
        output=row["output"],
        response=row["response"],
    )
