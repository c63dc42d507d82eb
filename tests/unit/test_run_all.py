"""How `make bench` runs benchmarks and what it makes of their figures, with small scripts in their place."""

import json
from pathlib import Path

import pytest

from benchmarks import run_all
from benchmarks.pipeline_efficiency import efficiency
from benchmarks.run_all import BENCHMARKS, FOLDER, Benchmark, Figure, installed, run
from eagle3_ray.runs import RunDir


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the benchmarks' scripts."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    monkeypatch.setattr(run_all, "FOLDER", folder)
    monkeypatch.setenv("EAGLE3_RAY_CACHE", str(tmp_path / "cache"))
    (folder / "good.py").write_text('print("by the way"); print(\'{"ratio": 0.9512, "mb": 38}\')')
    (folder / "bad.py").write_text('raise SystemExit("the server is gone")')
    return folder


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_has_each_figure_with_its_goal_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    figures = (
        Figure("ratio", "plain", at_least=0.95),
        Figure("ratio", "plain", at_least=0.96),
        Figure("mb", "none", at_most=38),
        Figure("mb", "none", at_most=37.5),
        Figure("mb", "none"),
    )
    assert run([Benchmark("good", ("good.py",), figures)]) == 0
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert cells(head) == ["benchmark", "figure", "baseline", "goal", "measured", "verdict"]
    assert set(rule) == {"|", "-", " "}
    assert [cells(row) for row in rows] == [
        ["good", "ratio", "plain", "≥ 0.95", "0.9512", "reached"],
        ["good", "ratio", "plain", "≥ 0.96", "0.9512", "NOT reached"],
        ["good", "mb", "none", "≤ 38", "38", "reached"],
        ["good", "mb", "none", "≤ 37.5", "38", "NOT reached"],
        ["good", "mb", "none", "–", "38", "–"],
    ]


def test_a_benchmark_that_fails_is_named_and_the_next_one_runs(
    capfd: pytest.CaptureFixture[str],
) -> None:
    bad, good = Benchmark("bad", ("bad.py",), ()), Benchmark("good", ("good.py",), (Figure("mb", "none"),))
    assert run([bad, good]) == 1
    out, err = capfd.readouterr()
    assert cells(out.splitlines()[2]) == ["bad", "", "", "", "", "FAILED with exit code 1"]
    assert cells(out.splitlines()[3])[:2] == ["good", "mb"]
    assert "the server is gone" in err


def test_a_benchmark_whose_packages_cannot_be_installed_is_skipped_with_the_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    needing = Benchmark("good", ("good.py",), (), packages=("no-such-package-of-ours==1",))
    assert run([needing]) == 0
    last = cells(capsys.readouterr().out.splitlines()[-1])[-1]
    assert last.startswith("skipped: pip cannot install no-such-package-of-ours==1 (")


def test_packages_that_are_there_are_used_and_not_installed_again(scripts: Path, tmp_path: Path) -> None:
    (scripts / "race.py").write_text('import json, rival; print(json.dumps({"step_s": rival.STEP_S}))')
    place = tmp_path / "cache" / "benchmarks" / "rival==1"
    place.mkdir(parents=True)
    (place / "rival.py").write_text("STEP_S = 2.5\n")
    assert installed(("rival==1",)) == place
    race = Benchmark("race", ("race.py",), (), packages=("rival==1",))
    assert run_all.measure(race) == {"step_s": 2.5}


def test_every_benchmark_of_the_list_is_a_script_of_its_folder() -> None:
    assert [b.name for b in BENCHMARKS if not (FOLDER / b.command[0]).is_file()] == []


def test_the_efficiency_of_a_pipeline_leaves_out_what_starts_up(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.write_summary("generate", {"wall_s": 110.0, "start_up_s": 10.0, "busy_s": 95.0})
    run_dir.write_summary("train", {"wall_s": 320.0, "start_up_s": 20.0, "busy_s": 285.0})
    found = efficiency(run_dir)
    assert found["ratio"] == 0.95
    assert found["stages"]["train"] == {"start_up_s": 20.0, "past_s": 300.0, "busy_s": 285.0}
    assert json.loads(json.dumps(found)) == found


def test_a_stage_that_had_nothing_to_do_cannot_be_measured(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    with pytest.raises(SystemExit, match="has no summary"):
        efficiency(run_dir)
    run_dir.write_summary("capture", {"wall_s": 3.0, "start_up_s": None, "busy_s": 0.0})
    with pytest.raises(SystemExit, match=r"The last job of capture in .* found nothing to do"):
        efficiency(run_dir)
