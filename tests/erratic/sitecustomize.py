"""Found by every Python process with this folder on its path: the clock says what $CLOCK_AHEAD_S adds to the time."""

import os
import time

_SETTING = os.environ.get("CLOCK_AHEAD_S")
_right_time = time.time


def _wrong_time() -> float:
    assert _SETTING is not None
    with open(_SETTING) as file:
        return _right_time() + float(file.read())


if _SETTING:
    time.time = _wrong_time
