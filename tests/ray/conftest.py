"""A real target in miniature and its own answers, for the jobs that capture and train."""

from pathlib import Path
from typing import Any

import pytest

from tests.writing_model import make_tiny_model, written_by


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny-model")


@pytest.fixture(scope="session")
def sequences(model: Path) -> list[dict[str, Any]]:
    """Rows of a run that the model answered."""
    return written_by(model, 60)
