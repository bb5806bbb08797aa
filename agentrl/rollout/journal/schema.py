"""The journal's file: where it lies, its tables, and how it is told from other files.

One file a process: `_rollouts.db` in the run's folder, `_rollouts-K.db` of process K; `transformers` leaves names with
an underscore out of what it pushes to the hub. Its header says that it is a journal (`application_id`) and of which
version (`user_version`); one of another program, or of another version, is refused.

It is in WAL mode with `synchronous=NORMAL`: a commit is in the hands of the operating system when it returns. A process
that is killed loses nothing that was committed. A machine that loses power may lose the last seconds, but the file
stays whole. `FULL` would wait for the disk at each commit, which the checkpoints beside the journal do not do either.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from agentrl.errors import ConfigurationError

APPLICATION_ID = 0x61677274
"""`agrt`."""

VERSION = 4
"""Version of the tables below; raise it with every change of them."""

BUSY_SECONDS = 5.0
"""How long a statement waits for another process's lock."""

TABLES = """
CREATE TABLE runs (              -- one each time that training began anew; a resumed run goes on in its own
    id INTEGER PRIMARY KEY,
    started REAL NOT NULL,       -- seconds since 1970, as all times
    info TEXT NOT NULL           -- JSON: algorithm, model, configuration
);
CREATE TABLE weights (           -- which weights had which version, where several play one window
    run INTEGER NOT NULL REFERENCES runs,
    version INTEGER NOT NULL,    -- optimizer steps behind them
    digest TEXT NOT NULL,
    PRIMARY KEY (run, version)
);
CREATE TABLE windows (           -- rollouts that were played together
    id INTEGER PRIMARY KEY,
    run INTEGER NOT NULL REFERENCES runs,
    kind TEXT NOT NULL,          -- "train", "eval" or what the caller calls it
    step INTEGER NOT NULL,       -- optimizer steps before it
    identity TEXT NOT NULL,      -- JSON: which one it is among those of its kind
    policy TEXT NOT NULL,        -- digest of settings, and of the weights if one policy plays it; "": not taken
    weights_version INTEGER NOT NULL,
    started REAL NOT NULL
);
CREATE TABLE rollouts (          -- one for each attempt at a task
    id INTEGER PRIMARY KEY,
    window INTEGER NOT NULL REFERENCES windows,
    "group" TEXT NOT NULL,
    member INTEGER NOT NULL,
    seed INTEGER NOT NULL,
    environment TEXT,
    task TEXT NOT NULL,          -- JSON: the dataset's prompt and columns
    attempt INTEGER NOT NULL,    -- attempts before it, whose environment failed
    state TEXT NOT NULL,         -- see `records.State`
    prompt TEXT NOT NULL,        -- JSON: as the model saw it
    prompt_ids BLOB NOT NULL,
    completion TEXT,             -- JSON: what followed, of a rollout that a program of the user's played; else NULL
    exact INTEGER,               -- of such a rollout: whether all of it can be given back as it was
    started REAL NOT NULL,
    ended REAL,
    resetting REAL,              -- seconds before `started`: an instance, `reset`, rendering
    rewarding REAL,              -- seconds of `get_reward`
    outcome TEXT,
    "limit" TEXT,
    failure TEXT,                -- JSON: where, error, traceback
    extra TEXT NOT NULL DEFAULT '{}',
    reward REAL,                 -- of `get_reward`
    rewards TEXT,                -- JSON: value of each reward source by name
    advantages TEXT              -- JSON: one number, or one a turn
);
CREATE INDEX rollouts_of_window ON rollouts (window, "group", member);
CREATE TABLE trajectory_rows (   -- of rollouts that a program of the user's played
    rollout INTEGER NOT NULL REFERENCES rollouts,
    number INTEGER NOT NULL,
    prompt_ids BLOB,             -- NULL of the first one: those of the rollout
    completion_ids BLOB NOT NULL,
    loss_mask BLOB NOT NULL,     -- a byte for each id
    logprobs BLOB NOT NULL,
    PRIMARY KEY (rollout, number)
);
CREATE TABLE turns (             -- where `trajectory_rows` has the ids, without ids, message and time
    rollout INTEGER NOT NULL REFERENCES rollouts,
    number INTEGER NOT NULL,
    row INTEGER NOT NULL,        -- which row of the trajectory
    start INTEGER NOT NULL,      -- its span in the completion of the row
    stop INTEGER NOT NULL,
    finish TEXT NOT NULL,
    ids BLOB NOT NULL,           -- int32
    logprobs BLOB NOT NULL,      -- float64, one for each id
    weights_version INTEGER NOT NULL,   -- of its first id
    updates TEXT NOT NULL,       -- JSON: where newer weights took over, and which
    message TEXT NOT NULL,       -- JSON: the sampled message as it was read
    results TEXT NOT NULL,       -- JSON: calls and their answers
    shown INTEGER NOT NULL,      -- whether the answers became part of the conversation
    next_ids BLOB,               -- what follows in the row, or the prompt of the next row
    added INTEGER,               -- tokens by which that lengthened the episode
    forks INTEGER,               -- whether it is the prompt of the next row
    seconds REAL NOT NULL,       -- spent sampling
    prefill REAL,                -- of these, until the first id; NULL if the generator does not tell
    listed_reward REAL,
    at REAL,
    PRIMARY KEY (rollout, number)
);
CREATE TABLE images (
    digest TEXT PRIMARY KEY,     -- SHA-256 of mode, size and pixels
    png BLOB NOT NULL
);
CREATE TABLE rollout_images (    -- which rollouts refer to an image
    rollout INTEGER NOT NULL REFERENCES rollouts,
    digest TEXT NOT NULL,
    PRIMARY KEY (rollout, digest)
) WITHOUT ROWID;
CREATE TABLE logs (              -- what a trainer logged; a resumed run logs some steps again
    run INTEGER NOT NULL REFERENCES runs,
    step INTEGER NOT NULL,
    at REAL NOT NULL,
    metrics TEXT NOT NULL        -- JSON: numbers by name
);
"""


def journal_path(folder: str | Path, rank: int = 0) -> Path:
    """The journal of a process within a run's folder."""
    return Path(folder) / ("_rollouts.db" if rank == 0 else f"_rollouts-{rank}.db")


def has_journal(folder: str | Path) -> bool:
    """Whether there is a journal of any process in a run's folder."""
    return any(Path(folder).glob("_rollouts*.db"))


def rank_of(path: Path) -> int:
    """The process that a journal is of, by its name."""
    number = path.stem.rpartition("-")[2]
    return int(number) if number.isdigit() else 0


def check_file(path: Path) -> None:
    """Check by its header that a file, if there is one, is a journal that this version can read.

    Raises:
        ConfigurationError: It is another file, of a newer or older agentrl, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            header = file.read(100)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    if not header or _sibling(path, "-journal").exists():  # its process was killed while it was being made
        return
    is_database = header[:16] == b"SQLite format 3\0"
    _check_kind(path, int.from_bytes(header[68:72], "big") if is_database else 0)
    _check_version(path, int.from_bytes(header[60:64], "big"))


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open a journal, or begin one, for use by one thread.

    Raises:
        ConfigurationError: There is another file in its place.
        sqlite3.Error: It cannot be opened or begun.
    """
    check_file(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)
    try:
        connection.row_factory = sqlite3.Row
        with transaction(connection):
            if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
                for statement in TABLES.split(";\n"):
                    connection.execute(statement)
                connection.execute(f"PRAGMA application_id={APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version={VERSION}")
        _check_kind(path, connection.execute("PRAGMA application_id").fetchone()[0])
        _check_version(path, connection.execute("PRAGMA user_version").fetchone()[0])
        # Only now: the header of the file itself then says what it is, whatever becomes of the log beside it.
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
    except BaseException:
        connection.close()
        raise
    return connection


def open_for_reading(path: Path) -> sqlite3.Connection:
    """Open a journal that may be being written to.

    Raises:
        ConfigurationError: There is none, or it is not one.
    """
    if not path.exists():
        raise ConfigurationError(f"there is no journal {path}")
    check_file(path)
    # The second way is for folders in which nothing can be written; it would not see a log beside the file.
    for options in ("mode=ro",) if _sibling(path, "-wal").exists() else ("mode=ro", "immutable=1"):
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?{options}", uri=True, timeout=BUSY_SECONDS, check_same_thread=False
        )
        connection.row_factory = sqlite3.Row
        try:
            connection.execute("SELECT count(*) FROM runs")
        except sqlite3.OperationalError as error:
            connection.close()
            cause = error
        else:
            return connection
    raise ConfigurationError(f"{path} cannot be read: {cause}")


def _check_kind(path: Path, application_id: int) -> None:
    if application_id != APPLICATION_ID:
        raise ConfigurationError(
            f"{path} is no journal of agentrl; another output_dir, or another name for that file, keeps them apart"
        )


def _check_version(path: Path, version: int) -> None:
    if version > VERSION:
        raise ConfigurationError(
            f"{path} was written by a newer agentrl (journal version {version}; this one reads {VERSION}); "
            "install that one, or use another output_dir"
        )
    if 0 < version < VERSION:
        raise ConfigurationError(
            f"{path} was written by an older agentrl (journal version {version}; this one reads {VERSION}); "
            "use another output_dir, and read that one with the agentrl that wrote it"
        )


def _sibling(path: Path, suffix: str) -> Path:
    """A file that SQLite keeps beside a database."""
    return path.with_name(path.name + suffix)


class transaction:  # noqa: N801 (a context manager, named as one)
    """Commit what happens inside, or none of it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._connection.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._connection.execute("COMMIT")
        elif self._connection.in_transaction:  # SQLite may have ended it itself
            self._connection.execute("ROLLBACK")
