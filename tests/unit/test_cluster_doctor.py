"""What the cluster's doctor makes of the facts, and how it asks an SGLang; no Ray here."""

import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3_ray.cluster_doctor import Finding, judge, judge_access, judge_endpoint
from eagle3_ray.commands.doctor import main
from eagle3_ray.node_probe import NodeFacts, SGLang, ask_sglang, reads

GIB = 1 << 30
WELL = NodeFacts(
    name="n1",
    code="0.1.0+aa",
    token_auth=True,
    ray_gpus=8,
    object_store=100 * GIB,
    gpus=("NVIDIA B200",) * 8,
    drivers=("580.65.06",),
    sglang=SGLang("0.5.23", ""),
    shm=200 * GIB,
    spill_folder="/spill",
    disk_free=900 * GIB,
    disk_total=1000 * GIB,
    open_files=65_536,
)


def troubles(*nodes: NodeFacts, required: bool = False) -> list[tuple[str, str, str]]:
    """(level, where, text) of all findings that are not OK; each of them has a remedy."""
    found = [f for f in judge(nodes, "0.1.0+aa", required) if f.level != "OK"]
    assert all(f.remedy.endswith(".") for f in found)
    return [(f.level, f.where, f.text) for f in found]


def only(*nodes: NodeFacts, required: bool = False) -> tuple[str, str]:
    """Level and text of the only trouble."""
    [(level, _, text)] = troubles(*nodes, required=required)
    return level, text


def test_a_node_that_is_well_has_only_good_findings() -> None:
    assert troubles(WELL, replace(WELL, name="n2")) == []


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"code": "0.1.0+bb"}, "FAIL", "eagle3_ray 0.1.0+bb, this machine 0.1.0+aa"),
        ({"gpus": (), "drivers": ()}, "FAIL", "Ray counts 8 GPUs, nvidia-smi shows none"),
        ({"ray_gpus": 4}, "WARN", "nvidia-smi sees 8 GPUs, Ray counts 4"),
        ({"shm": 64 << 20}, "FAIL", "Ray's object store 100.0 GiB, which then lies on disk"),
        ({"shm": 102 * GIB}, "WARN", "a capturing SGLang wants 4.0 GiB more"),
        ({"disk_free": 40 * GIB}, "FAIL", "40.0 GiB of 1,000.0 GiB are free in /spill, where Ray spills"),
        ({"disk_free": 60 * GIB}, "WARN", "Ray stops at 95% full"),
        ({"open_files": 1024}, "WARN", "may open 1,024 files"),
        ({"clock_s": 2.5, "clock_bound_s": 0.1}, "WARN", "its clock is +2.50 s from ours (measured to 0.10 s)"),
        ({"clock_s": -3600.0}, "FAIL", "its clock is -3600.00 s from ours"),
        ({"sglang": SGLang(None, "")}, "WARN", "no SGLang"),
        ({"sglang": SGLang("0.5.20", "")}, "WARN", "SGLang 0.5.20 is not the version"),
        ({"sglang": SGLang("0.5.23", "no torch")}, "FAIL", "the capture plugin does not load (no torch)"),
    ],
)
def test_each_trouble_is_one_line_of_its_level(change: dict[str, Any], level: str, words: str) -> None:
    found, text = only(replace(WELL, **change))
    assert found == level
    assert words in text


def test_a_clock_within_what_the_round_trip_can_tell_is_no_trouble() -> None:
    assert troubles(replace(WELL, clock_s=1.5, clock_bound_s=0.8)) == []


def test_a_process_without_a_limit_of_files_is_no_trouble() -> None:
    assert troubles(replace(WELL, open_files=resource.RLIM_INFINITY)) == []


def test_a_missing_sglang_fails_where_its_python_was_named() -> None:
    assert only(replace(WELL, sglang=SGLang(None, "")), required=True)[0] == "FAIL"


def test_a_head_without_gpus_needs_neither_sglang_nor_room_for_captures() -> None:
    assert troubles(replace(WELL, ray_gpus=0, gpus=(), drivers=(), sglang=None, shm=101 * GIB)) == []


def test_nodes_of_two_drivers_are_told() -> None:
    assert troubles(WELL, replace(WELL, name="n2", drivers=("570.1",))) == [
        ("WARN", "driver", "the nodes have NVIDIA drivers 570.1, 580.65.06")
    ]


def levels(findings: Any) -> list[tuple[str, str]]:
    return [(finding.level, finding.where) for finding in findings]


def test_a_cluster_without_tokens_fails_and_one_machine_is_warned() -> None:
    assert levels(judge_access({"n1": True, "n2": True}, "127.0.0.1")) == [("OK", "auth")]
    assert levels(judge_access({"n1": True, "n2": False}, "127.0.0.1")) == [("FAIL", "auth")]
    assert levels(judge_access({"n1": False}, "")) == [("WARN", "auth")]


def test_a_dashboard_that_others_see_fails_unless_it_wants_a_token() -> None:
    assert levels(judge_access({"n1": True}, "0.0.0.0")) == [("OK", "auth"), ("WARN", "dashboard")]
    assert levels(judge_access({"n1": False}, "10.0.0.1")) == [("WARN", "auth"), ("FAIL", "dashboard")]


def test_a_server_that_one_node_cannot_reach_fails_with_the_name_of_the_node() -> None:
    info = {"version": "0.5.23", "model_path": "/models/k2"}
    reached, unreached = judge_endpoint("http://h:1", {"n1": info, "n2": "connection lost"})
    assert (reached.level, unreached.level) == ("FAIL", "OK")
    assert "n2 gets no answer (connection lost)" in reached.text


def test_a_server_that_speculates_or_filters_fails_and_a_capturing_one_does_not() -> None:
    url, info = "http://h:1", {"version": "0.5.23", "model_path": "/models/k2", "speculative_algorithm": "EAGLE3"}
    assert levels(judge_endpoint(url, {"n1": info})) == [("OK", url), ("FAIL", url)]
    assert levels(judge_endpoint(url, {"n1": info | {"enable_return_aux_hidden_states": True}})) == [("OK", url)]
    filters = {**info, "speculative_algorithm": None, "enable_strict_thinking": True, "reasoning_parser": "kimi_k2"}
    assert levels(judge_endpoint(url, {"n1": filters})) == [("OK", url), ("FAIL", url), ("WARN", url)]


def test_a_finding_is_one_line_with_its_remedy() -> None:
    assert str(Finding("OK", "n1", "no GPUs")) == "OK   n1: no GPUs."
    assert str(Finding("FAIL", "n1", "no disk", "Add one.")) == "FAIL n1: no disk. Add one."


def fake_sglang(folder: Path, version: str) -> str:
    """A command of a Python that believes to have SGLang of that version."""
    info = folder / f"sglang-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
    (folder / "python").write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{folder}" exec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)
    return str(folder / "python")


def test_an_sglang_is_asked_for_its_version_and_loads_our_plugin_without_our_package(tmp_path: Path) -> None:
    assert ask_sglang(fake_sglang(tmp_path, "0.5.23")) == SGLang("0.5.23", "")


def test_a_python_without_sglang_and_no_python_at_all_have_none() -> None:
    assert ask_sglang(sys.executable).version is None
    assert "No such file" in ask_sglang("/nowhere/python").plugin_error


def test_an_sglang_without_torch_says_why_the_plugin_does_not_load(tmp_path: Path) -> None:
    python = fake_sglang(tmp_path, "0.5.23")
    (tmp_path / "python").write_text(
        f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{tmp_path}" exec {sys.executable} -S "$@"\n'
    )  # without site-packages
    answer = ask_sglang(python)
    assert answer.version == "0.5.23"
    assert "No module named" in answer.plugin_error


def test_a_probe_file_has_to_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "n1").write_text("n1")
    assert reads(tmp_path / "n1", "n1")
    assert not reads(tmp_path / "n1", "n2")
    assert not reads(tmp_path / "n2", "n2")


def test_the_job_sets_aside_the_stages_that_have_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["eagle3-doctor", "--help"])
    with pytest.raises(SystemExit):
        main()
    assert "{generate,capture,train,evaluate}" in capsys.readouterr().out
