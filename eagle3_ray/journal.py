"""Finished answers, on disk the moment they arrive, so that a kill costs only what was in flight.

Ray Data commits a block when its last row is done. Until then a row stands here: one line an answer,
`sequence_id checksum JSON`, one file a writer. A writer that died leaves at most a torn last line; a line that does not
fit its checksum is skipped.
"""

import errno
import json
import uuid
import zlib
from pathlib import Path
from typing import Any

_ID = 32
_SUM = 8


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
        self._start = b""

    def get(self, sequence_id: str) -> dict[str, Any] | None:
        """The answer of an earlier writer, None where there is none or its line is damaged."""
        place = self._places.get(sequence_id)
        if place is None:
            return None
        with place[0].open("rb") as file:
            file.seek(place[1])
            line = file.readline()
        told, text = line[_ID + 1 : _ID + 1 + _SUM], line[_ID + _SUM + 2 : -1]
        if told != _checksum(sequence_id, text):
            return None
        answer: dict[str, Any] = json.loads(text)
        return answer

    def append(self, sequence_id: str, answer: dict[str, Any]) -> None:
        """Hands the line to the operating system in one write; it survives this process. Raises OSError (disk full)."""
        text = json.dumps(answer).encode()
        line = b"%s%s %s %s\n" % (self._start, sequence_id.encode(), _checksum(sequence_id, text), text)
        self._start = b"\n"  # a full disk can take a part of the line; the next one must not go on behind it
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, "the disk is full", self._file.name)
        self._start = b""

    def _index(self, path: Path) -> None:
        with path.open("rb") as file:
            place = 0
            for line in file:
                if line.endswith(b"\n") and line[_ID : _ID + 1] == b" ":
                    self._places[line[:_ID].decode("ascii", "replace")] = (path, place)
                place += len(line)


def _checksum(sequence_id: str, text: bytes) -> bytes:
    """CRC-32 of a line's two parts, so that no flipped bit is taken for an answer."""
    return b"%08x" % zlib.crc32(text, zlib.crc32(sequence_id.encode()))
