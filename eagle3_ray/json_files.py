"""JSON files that hold one object: what is not whole is told apart, and the caller says what to do about it."""

import json
from pathlib import Path
from typing import Any


def read_object(path: Path, remedy: str, error: type[Exception]) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        error: there is none; the message names the file and ends in `remedy`.
    """
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as cause:
        raise error(f"{path} is damaged ({cause}). {remedy}") from None
    if not isinstance(value, dict):
        raise error(f"{path} is damaged (it holds no JSON object). {remedy}")
    return value
