"""A Ray cluster of this machine, made when the first test asks for it, and a target model for jobs on it."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.jobs import Jobs
from tests.tiny_target import make_tiny_target


@pytest.fixture(autouse=True)
def _usual_sigterm() -> Iterator[None]:
    """A job that runs in this process changes what SIGTERM does; the next test's children would inherit it."""
    usual = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, usual)


@pytest.fixture(scope="session")
def cluster() -> Iterator[Jobs]:
    """A cluster with a dashboard, on loopback, for the whole session."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    context = ray.init(num_cpus=4, include_dashboard=True, dashboard_host="127.0.0.1", log_to_driver=False)
    yield Jobs(context.address_info["gcs_address"], f"http://{context.dashboard_url}")
    ray.shutdown()


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a target model without weights."""
    return make_tiny_target(tmp_path_factory.mktemp("target") / "tiny-target")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real prompts and evaluation questions. A machine without them skips the test; CI may not."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "data"
    if not folder.is_dir():
        message = f"the real prompts are not at {folder}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return folder
