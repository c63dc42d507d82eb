"""Files and folders that appear whole: written under a name of their own, then renamed."""

import os
import re
import shutil
import uuid
from pathlib import Path

_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{32}")


def temporary(path: Path) -> Path:
    """A name beside `path` for what will be renamed to it; `sweep` knows such names."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def sweep(folder: Path) -> None:
    """Removes what killed writers left at any depth of `folder`, where nobody writes any more."""
    for parent, folders, files in os.walk(folder):
        for name in filter(_TEMPORARY.fullmatch, [*folders, *files]):
            path = Path(parent, name)
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        folders[:] = [name for name in folders if not _TEMPORARY.fullmatch(name)]
