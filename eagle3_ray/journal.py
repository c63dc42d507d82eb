"""Finished answers, on disk the moment they arrive, so that a kill costs only what was in flight.

Ray Data commits a block when its last row is done. Until then a row stands here: one line an answer,
`sequence_id JSON`, one file a writer. A writer that died leaves at most a torn last line, which is skipped.
"""

import errno
import json
import uuid
from pathlib import Path
from typing import Any

_ID = 32


class Journal:
    """Reads what all earlier writers left in `folder` and appends to a file of its own.

    Only places are kept in memory (about 150 bytes an answer); an answer is read from disk when it is asked for.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._places: dict[str, tuple[Path, int]] = {}
        for path in sorted(folder.glob("*.jsonl")):
            self._index(path)
        self._file = (folder / f"{uuid.uuid4().hex}.jsonl").open("ab", buffering=0)
        self._start = ""

    def get(self, sequence_id: str) -> dict[str, Any] | None:
        """The answer of an earlier writer, None where there is none or its line is damaged."""
        place = self._places.get(sequence_id)
        if place is None:
            return None
        with place[0].open("rb") as file:
            file.seek(place[1])
            line = file.readline()
        try:
            answer: dict[str, Any] = json.loads(line[_ID + 1 :])
        except ValueError:
            return None
        return answer

    def append(self, sequence_id: str, answer: dict[str, Any]) -> None:
        """Hands the line to the operating system in one write; it survives this process. Raises OSError (disk full)."""
        line = f"{self._start}{sequence_id} {json.dumps(answer)}\n".encode()
        self._start = "\n"  # a full disk can take a part of the line; the next one must not go on behind it
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, "the disk is full", self._file.name)
        self._start = ""

    def _index(self, path: Path) -> None:
        with path.open("rb") as file:
            place = 0
            for line in file:
                if line.endswith(b"\n") and line[_ID : _ID + 1] == b" ":
                    self._places[line[:_ID].decode("ascii", "replace")] = (path, place)
                place += len(line)
