"""How many cases: a few hundred in the suite; `make fuzz` sets EAGLE3_FUZZ to the examples of each test."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.tiny_target import make_tiny_target
from tests.whole_run import WholeRun, make_whole_run
from tests.writing_model import make_tiny_model, written_by

settings.register_profile(
    "eagle3",
    max_examples=int(os.environ.get("EAGLE3_FUZZ", "60")),
    deadline=5000,  # ms for a case: what takes longer hangs
    derandomize="EAGLE3_FUZZ" not in os.environ,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("eagle3")


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    """A run with every kind of file, which nobody changes."""
    folder = tmp_path_factory.mktemp("whole")
    model = make_tiny_model(folder / "model")
    return make_whole_run(folder / "run", model, written_by(model, 4))


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("tiny") / "target")
