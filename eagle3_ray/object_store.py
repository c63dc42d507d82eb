"""An object store, or a folder that stands for one: streams in and out, and small JSON objects replaced in one piece.

Keys for s3:// and gs:// come from the environment or from the machine's role, as those for prompts do.
"""

import json
import uuid
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs

FAILURES = (OSError, pa.ArrowException)
"""What a store raises that cannot be reached, or does not let us in."""


class ObjectStore:
    """All below one URL or folder; names are relative to it. Every method may raise `FAILURES`."""

    def __init__(self, url: str) -> None:
        if url.startswith("s3://"):
            url += ("&" if "?" in url else "?") + "allow_delayed_open=true"  # one request for a small object, not three
        if "://" in url:
            self._filesystem, self._root = pafs.FileSystem.from_uri(url)
        else:
            self._filesystem, self._root = pafs.LocalFileSystem(), url
        self._is_folder = isinstance(self._filesystem, pafs.LocalFileSystem)

    def writing(self, name: str) -> Any:
        """A stream to a new object, which is there when the stream is closed."""
        if self._is_folder:
            self._filesystem.create_dir(str(PurePosixPath(self._root, name).parent), recursive=True)
        return self._filesystem.open_output_stream(f"{self._root}/{name}")

    def reading(self, name: str) -> Any:
        """A stream from an object."""
        return self._filesystem.open_input_stream(f"{self._root}/{name}")

    def replace(self, name: str, value: dict[str, Any]) -> None:
        """Writes a JSON object so that a reader finds the old one or the new one: by a PUT, in a folder by a rename."""
        new = f".{name}.{uuid.uuid4().hex}" if self._is_folder else name
        with self.writing(new) as stream:
            stream.write(json.dumps(value).encode())
        if self._is_folder:
            self._filesystem.move(f"{self._root}/{new}", f"{self._root}/{name}")

    def read(self, name: str) -> dict[str, Any] | None:
        """A JSON object, None where there is none; empty where it holds something else."""
        try:
            with self.reading(name) as stream:
                value = json.loads(stream.read())
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def names(self, folder: str = "") -> set[str]:
        """The names of all objects in `folder`, relative to it."""
        base = f"{self._root}/{folder}".rstrip("/")
        listing = self._filesystem.get_file_info(pafs.FileSelector(base, allow_not_found=True, recursive=True))
        return {entry.path[len(base) + 1 :] for entry in listing if entry.type == pafs.FileType.File}

    def delete(self, name: str) -> None:
        """Deletes an object; one that is gone already is no error."""
        try:
            self._filesystem.delete_file(f"{self._root}/{name}")
        except FileNotFoundError:
            return
