"""Every panel of the Grafana dashboard has data while the stages run: a real Prometheus scrapes their cluster."""

import json
import math
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

from eagle3_ray.sglang.processes import HOST, free_port
from tests.jobs import fake_server, write_prompts
from tests.nodes import Nodes
from tests.ray.test_train_job import curve, words
from tests.unit.test_deploy import expressions
from tests.writing_model import answer_all

PROMPTS, ANSWER = 160, 24


def test_every_panel_has_data_while_the_stages_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("no Prometheus is installed (apt-get install prometheus)")
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "500")  # these stages take seconds and not hours
    prompts, answers, run = (tmp_path / name for name in ("prompts.jsonl", "answers.jsonl", "run"))
    answer_all(model, [write_prompts(prompts, PROMPTS)], ANSWER, answers)
    faulty = fake_server(model, answers=str(answers), base_latency_s=0.2, max_running=8, faults={"http_500": 0.1})
    with faulty as server, Nodes() as nodes, prometheus(nodes.metrics_ports(), tmp_path) as url:
        started = time.time()
        settings = [
            *words(run, model),
            f"prompts.path={prompts}",
            f"generate.endpoints={server.url}",
            f"generate.max_new_tokens={ANSWER}",
            "audit.loop_tokens=32",
            "capture.shard_tokens=200",
            "capture.batch_tokens=64",
            "train.feed=cache",
            "train.epochs=3",
        ]
        for stage in ("generate", "capture", "train"):
            result = nodes.jobs.run(*settings, job=stage)
            assert result.code == 0, result.stderr
        drawn = {expression: values(url, expression, started) for _, expression in expressions()}
    assert [f"{title}: {expression}" for title, expression in expressions() if not drawn[expression]] == []
    [(partition, rows)] = drawn["sum by (partition) (ray_eagle3_generate_rows_total)"].items()
    assert partition == "partition=prompts"
    assert 0 < max(rows) <= PROMPTS
    assert drawn["sum by (endpoint) (ray_eagle3_generate_in_flight)"].keys() == {f"endpoint={server.url}"}
    losses = [loss for _, loss, _ in curve(run)]
    assert all(
        loss == pytest.approx(min(losses, key=lambda one: abs(one - loss)))
        for loss in drawn["max(ray_eagle3_train_loss)"][""]
    )
    assert max(drawn["max(ray_eagle3_train_steps_total)"][""]) <= len(losses)


@contextmanager
def prometheus(ports: list[int], folder: Path) -> Iterator[str]:
    """A real Prometheus that scrapes these ports of this machine every half second; gives its address."""
    port, config = free_port(), folder / "prometheus.yml"
    targets = [f"{HOST}:{port}" for port in ports]
    scrape = {"job_name": "ray", "scrape_interval": "500ms", "static_configs": [{"targets": targets}]}
    config.write_text(yaml.safe_dump({"scrape_configs": [scrape]}))
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    process = subprocess.Popen([*command, f"--web.listen-address={HOST}:{port}"], stderr=subprocess.DEVNULL)
    try:
        yield f"http://{HOST}:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def values(url: str, expression: str, start: float) -> dict[str, list[float]]:
    """What a panel with that expression draws, from `start` on: numbers by the labels of each curve."""
    query = {"query": expression.replace("$__rate_interval", "5s"), "start": start, "end": time.time(), "step": 0.5}
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        curves = json.load(answer)["data"]["result"]
    found = {}
    for one in curves:
        numbers = [float(value) for _, value in one["values"] if math.isfinite(float(value))]
        if numbers:
            found[",".join(f"{name}={value}" for name, value in sorted(one["metric"].items()))] = numbers
    return found
