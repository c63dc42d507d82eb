"""What the unit tests share: a small target model and the real prompts beside the repository."""

import os
from pathlib import Path

import pytest

from tests.tiny_target import make_tiny_target

SHARED_DATA = Path(__file__).parents[2] / "../shared/data"


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights; see `tests/tiny_target.py`."""
    return make_tiny_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real prompts and evaluation questions. A machine without them skips the test; CI may not."""
    folder = SHARED_DATA.resolve()
    if not folder.is_dir():
        message = f"the real prompts are not at {folder}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return folder
