"""A key that servers want is in no file that a run or Ray leaves behind."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from tests.jobs import REPOSITORY, Jobs, fake_server, settings, write_prompts

KEY = "k3y-of-the-servers-4711"
OTHER = "hf_another0secret0of0the0environment"


def test_the_key_of_the_servers_is_in_no_file_and_no_output(
    cluster: Jobs, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", 30), tmp_path / "run"
    prompts.write_text(prompts.read_text() + '{"id": "../../x", "prompt": "<script>alert(1)</script>"}\n')
    monkeypatch.setenv("EAGLE3_TEST_KEY", KEY)
    monkeypatch.setenv("HF_TOKEN", OTHER)
    with fake_server(target, api_key=KEY) as server:
        words = [*settings(run, target, prompts, server.url), "generate.api_key_env=EAGLE3_TEST_KEY"]
        job = cluster.run(*words)
        assert (job.code, job.summary["expected"]) == (0, 31), job.stderr
    monkeypatch.setenv("EAGLE3_TEST_KEY", "k3y-that-is-wrong-0815")
    with fake_server(target, api_key=KEY) as server:
        refused = cluster.run(*settings(tmp_path / "other", target, prompts, server.url), words[-1])
    assert (refused.code, "lets nobody in" in refused.stderr) == (2, True)
    report = [sys.executable, "jobs/report.py", str(run)]
    subprocess.run(report, cwd=REPOSITORY, env=cluster.environment(), check=True, capture_output=True)
    assert (run / "report.html").exists()
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    files = [path for folder in (run, tmp_path / "other", session / "logs") for path in folder.rglob("*")]
    files = [path for path in files if path.is_file()]
    assert len(files) > 20
    for secret in (KEY, "k3y-that-is-wrong-0815", OTHER):
        for said in (job.stdout, job.stderr, refused.stdout, refused.stderr):
            assert secret not in said
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
    assert os.environ["HF_TOKEN"] == OTHER
