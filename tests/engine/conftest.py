"""Real SGLang servers on the CPU for all engine tests that only ask them questions."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle3_ray.sglang_cpu import Server, model

PARSER = "qwen3"  # opens and closes with <think> tags
SHORT_CONTEXT = 256


@pytest.fixture(scope="session")
def cpu_model() -> Path:
    """SmolLM2-135M-Instruct; the first call on a machine installs SGLang too."""
    return model()


@pytest.fixture(scope="session")
def cpu_server(cpu_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A plain server. Tests that kill a server or change its arguments start their own."""
    with Server(cpu_model, log=tmp_path_factory.mktemp("sglang") / "server.log") as server:
        yield server


@pytest.fixture(scope="session")
def parsing_server(cpu_model: Path) -> Iterator[Server]:
    """One with a reasoning parser and a short context."""
    arguments = ["--reasoning-parser", PARSER, "--context-length", str(SHORT_CONTEXT)]
    with Server(cpu_model, args=arguments, kv_tokens=4096) as server:
        yield server
