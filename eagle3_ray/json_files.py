"""JSON files that hold one object: what is not whole is told apart, and the caller says what to do about it."""

import json
from pathlib import Path
from typing import Any


class DamagedJson(ValueError):
    """The file cannot be read, or holds something else; the message names it."""


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        DamagedJson: there is none.
    """
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedJson(f"{path} is damaged ({error})") from None
    if not isinstance(value, dict):
        raise DamagedJson(f"{path} is damaged (it holds no JSON object)")
    return value
