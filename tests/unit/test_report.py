"""The report shows what the run's files say, escapes it, and stands alone."""

import asyncio
import base64
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle3_ray.acceptance.tally import Acceptance
from eagle3_ray.file_hashes import folder_sha
from eagle3_ray.records import SEQUENCE_SCHEMA
from eagle3_ray.rendering import Renderer
from eagle3_ray.report import collect, write_report
from eagle3_ray.report.collect import without_secrets
from eagle3_ray.report.data import over_time
from eagle3_ray.runs import RunDir, RunError, write_json
from eagle3_ray.states_cache import SCORES_SCHEMA
from tests.runs import make_run, sequence
from tests.tiny_target import IM_END, IM_START, make_tiny_target

_LENGTHS = {"code": (90, 30, 240), "maths & logic": (40, 10, 60)}  # partition: rows, mean and limit of answer tokens


def _rows() -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    rows = []
    for partition, (count, mean, limit) in _LENGTHS.items():
        for i in range(count):
            tokens = min(limit, 2 + int(random.gamma(2, mean)))
            cut = tokens == limit
            output_ids = [*random.integers(100, 300, tokens - 1).tolist(), 150 if cut else IM_END]
            row = sequence(f"q{i}", [IM_START, 100, 101], output_ids, partition=partition)
            row |= {
                "finish_reason": "length" if cut else "stop",
                "latency_s": tokens / 20,
                "attempts": 2 if i == 0 else 1,
                "endpoint": f"http://10.0.0.{i % 2 + 1}:30000",
            }
            rows.append(row)
    return rows


def _generated(path: Path, target: Path) -> RunDir:
    """A run of 130 answers, of which 10 more were rejected: 7 for loops, 3 that hold markup."""
    run = make_run(
        path, _rows(), {"generate.temperature": 0.0, "generate.max_new_tokens": 240, "engine.version": "0.5.23"}
    )
    manifest = run.manifest()
    manifest["generate"] |= {
        "command": f"python jobs/generate.py smollm2-cpu run.dir={path} prompts.path=/prompts",
        "config": {"target": {"model": str(target), "trust_remote_code": False}, "audit": {"boundary_ids": []}},
        "versions": {"ray": "2.60.0"},
        "servers": [{"url": "http://user:hunter2@10.0.0.1:30000", "engine.version": "0.5.23"}],
    }
    write_json(path / "manifest.json", manifest)
    evil = Renderer(target).encode("<script>alert('owned')</script>")
    rejected = [
        sequence(f"loop{i}", [IM_START, 100], [120] * (64 + i))
        | {"reason": f"the answer ends in a loop of {64 + i} tokens"}
        for i in range(7)
    ] + [
        sequence(f"evil{i}<img src=x>", [IM_START, 100], [*evil, IM_START, IM_END], partition="<i>&")
        | {"reason": f"special token {IM_START} inside the answer, at position {len(evil)}"}
        for i in range(3)
    ]
    folder = path / "generate" / "rows" / "rejected"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rejected, schema=SEQUENCE_SCHEMA), folder / "0.parquet")
    run.write_summary(
        "generate",
        {
            "stage": "generate",
            "status": "complete",
            "expected": 140,
            "tokens_per_second": 153.2,
            "servers_best_tokens_per_second": 480.4,
            "wall_s": 105.8,
            "stopped_by": None,
            "warnings": ["32% of the tokens/s that the servers showed at their best"],
            "retries": {"http://10.0.0.1:30000": {"timeout": 2}},
        },
    )
    return run


def _captured(run: RunDir) -> None:
    random = np.random.default_rng(1)
    run.claim(
        "capture",
        {"capture.layers": "[2, 4, 5]", "capture.dtype": "float32"},
        {"command": "python jobs/capture.py smollm2-cpu"},
    )
    folder = run.stage("capture") / "scores"
    folder.mkdir(parents=True)
    scores = [
        {
            "row": i,
            "sequence_id": f"s{i}",
            "tokens": 30,
            "mean_difference": 0.9 if i == 7 else 10 ** float(random.normal(-4.5, 0.3)),
            "argmax_agreement": 0.4 if i == 7 else 1.0 - 0.02 * float(random.random()),
            "reason": "log-probabilities differ from the recorded ones by 0.9 nats over 30 tokens, limit 0.001"
            if i == 7
            else None,
        }
        for i in range(130)
    ]
    pq.write_table(pa.Table.from_pylist(scores, schema=SCORES_SCHEMA), folder / "0.parquet")
    summary = {
        "status": "complete",
        "expected": 130,
        "rows": 129,
        "quarantined": 1,
        "tokens": 5210,
        "bytes": 31_000_000,
    }
    summary |= {
        "tokens_per_second": 1234.5,
        "bytes_per_token": 4608,
        "quarantined_by_reason": {"log-probabilities differ": 1},
        "limit": {"mean_difference": 0.13},
    }
    run.write_summary("capture", summary)
    run.succeed("capture", "plan")


def _trained(run: RunDir) -> None:
    settings = {"train": {"ttt_steps": 3, "epochs": 4}}
    run.claim(
        "train",
        {"capture.layers": "[2, 4, 5]", "train.seed": 0},
        {"command": "python jobs/train.py", "config": settings},
    )
    folder = run.stage("train")
    random, lines = np.random.default_rng(2), []
    for step in range(1, 801):
        depth = 1 if step <= 320 else 3
        right = [0.7 * (1 - np.exp(-step / 200)) * 0.75**k for k in range(depth)]
        numbers = {
            "loss": 6 * np.exp(-step / 250) + 1.5 + (0.9 if depth == 3 else 0) + random.normal(0, 0.08),
            "step_losses": [2.0] * depth,
            "step_accuracies": [float(r + random.normal(0, 0.012)) for r in right],
            "tokens": 4096,
            "set_aside": 0,
            "tokens_per_second": 2100 + random.normal(0, 60),
            "wait_share": 0.034,
            "learning_rate": 4e-4,
            "gradient_norm": 0.4,
        }
        lines.append({"step": step, "of": 800, "epoch": 0, "line": len(lines) + 1, **numbers})
        if step % 100 == 0:
            length = 1 + 0.9 * (1 - np.exp(-step / 250))
            parts = {"code": length + 0.15, "maths & logic": length - 0.1}
            numbers = {"loss": 6 * np.exp(-step / 250) + 1.8, "chain_acceptance_length": length, "partitions": parts}
            lines.append({"step": step, "line": len(lines) + 1, "validation": numbers})
    (folder).mkdir(parents=True, exist_ok=True)
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("drafter", "initial"):
        (folder / name).mkdir()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 16000,
        "vocab_size": 49152,
        "hidden_size": 576,
    }
    write_json(folder / "drafter" / "config.json", config)
    (folder / "drafter" / "model.safetensors").write_bytes(b"\0" * 2_500_000)
    run.write_summary(
        "train",
        {
            "status": "complete",
            "steps": 800,
            "expected": 800,
            "tokens": 800 * 4096,
            "set_aside": 0,
            "chain_acceptance_length": 1.8633,
            "tokens_per_second": 2098.7,
            "wait_share": 0.034,
            "drafter_dir": str(folder / "drafter"),
            "launch": f"sglang serve --speculative-algorithm EAGLE3 --api-key s3cret {folder / 'drafter'}",
        },
    )
    run.succeed("train", "plan")


def _evaluated(run: RunDir) -> None:
    def engine(folder: Path, lengths: dict[str, tuple[int, ...]], speed: tuple[float, float]) -> dict[str, Any]:
        groups = {}
        for name, histogram in lengths.items():
            steps, drafts = sum(histogram), sum(n * count for n, count in enumerate(histogram))
            groups[name] = Acceptance(80, steps + drafts, steps, histogram).as_json()
        return {
            "acceptance": groups,
            "speed": {"1": speed[0], "8": speed[1]},
            "speedup": {"1": round(speed[0] / 20.0, 3), "8": round(speed[1] / 100.0, 3)},
            "lossless": {"answers": 160, "equal": 160, "unexplained": 0, "mismatches": []},
            "diagnosis": [],
            "engine": about,
            "folder_sha": folder_sha(folder),
            "answers": 160,
            "output_tokens": 20480,
        }

    initial, drafter = (run.stage("train") / name for name in ("initial", "drafter"))
    about = {"version": "0.5.23", "dtype": "float32", "model": "/models/target"}
    before = {"all": (9900, 100), "gsm8k": (4950, 50), "mt_bench": (4950, 50)}
    after = {
        "all": (5000, 2500, 1500, 600, 300, 100),
        "gsm8k": (2200, 1300, 850, 350, 200, 100),
        "mt_bench": (2800, 1200, 650, 250, 100),
    }
    run.write_summary(
        "evaluate",
        {
            "stage": "evaluate",
            "status": "complete",
            "stopped_by": None,
            "warnings": [],
            "settings": {
                "prompts": ["/eval/gsm8k.jsonl"],
                "limit": 80,
                "max_new_tokens": 128,
                "steps": 5,
            },
            "engines": {
                "none": {"speed": {"1": 20.0, "8": 100.0}, "engine": about, "answers": 160, "output_tokens": 20480},
                str(initial): engine(initial, before, (18.0, 90.0)),
                str(drafter): engine(drafter, after, (31.0, 131.0)),
            },
        },
    )
    run.succeed("evaluate", "plan")


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("report-target") / "tiny")


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, target_folder: Path) -> RunDir:
    """A run whose four stages are complete, with its report."""
    run = _generated(tmp_path_factory.mktemp("full") / "run", target_folder)
    _captured(run)
    _trained(run)
    _evaluated(run)
    write_report(run)
    return run


class _Text(HTMLParser):
    """The visible text of a page, its tags, and what it would load."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.text, self.tags, self.links, self.ids = "", set(), [], []
        self._hidden = False
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._hidden = tag in ("style", "script")
        self.links += [
            value for name, value in attrs if name in ("src", "href", "xlink:href", "srcset", "action") and value
        ]
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self.text += f" {data.strip()}" if data.strip() else ""


@pytest.fixture(scope="module")
def page(full: RunDir) -> _Text:
    return _Text(full.path / "report.html")


def test_a_report_needs_neither_torch_nor_ray() -> None:
    look = "import sys, eagle3_ray.commands.report; print(sorted({'ray', 'torch'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_page_begins_with_the_acceptance_length_before_and_after_training_and_the_speed(page: _Text) -> None:
    # 10,000 verify steps: 100 accepted drafts before; 2,500 + 2 x 1,500 + 3 x 600 + 4 x 300 + 5 x 100 after
    assert "1.01 → 1.90 tokens from each forward pass of the target, measured in the serving engine" in page.text
    assert "Speed, 1 request at once × 1.55 20 → 31 tokens/s" in page.text


def test_acceptance_is_told_by_dataset_with_its_counts(page: _Text) -> None:
    assert "gsm8k 2.070 80 10,350 5,000" in page.text
    assert "mt_bench 1.730 80 8,650 5,000" in page.text
    assert "after training 31.0 × 1.55 131.0 × 1.31" in page.text
    assert "With the drafter after training: unchanged. All 160 answers are equal." in page.text


def test_counts_of_the_data_are_those_of_its_files(full: RunDir, page: _Text) -> None:
    for partition in _LENGTHS:
        lengths = [len(row["output_ids"]) for row in _rows() if row["partition"] == partition]
        assert f"{partition} {len(lengths)} {sum(lengths):,} {sum(lengths) / len(lengths):.1f}" in page.text
    assert "Rejected 10 7.1% of the answers" in page.text
    assert "the answer ends in a loop of N tokens 7 special token N inside the answer, at position N 3" in page.text
    assert "153.2 answer tokens/s from the first request to the last answer: 32% of the 480.4 tokens/s" in page.text
    assert "Set aside 1 (1 × log-probabilities differ)" in page.text


def test_histograms_count_every_row_once(full: RunDir) -> None:
    report = collect(full)
    lengths = report["generate"]["lengths"]
    for partition, (count, _, limit) in _LENGTHS.items():
        bins = lengths["partitions"][partition]
        assert sum(bins["stopped"]) + sum(bins["cut"]) == count
        assert sum(bins["cut"]) == sum(len(r["output_ids"]) == limit for r in _rows() if r["partition"] == partition)
    assert sum(report["generate"]["latency_s"]["histogram"]["counts"]) == 130
    for scores in report["capture"]["scores"].values():
        assert sum(scores["counts"]) == 130
        assert scores["edges"] == sorted(scores["edges"])
    assert report["capture"]["limit"] == {"mean_difference": 0.13}  # what the capture stage used
    assert report["capture"]["scores"]["mean_difference"]["counts"][-1] == 1  # the answer that is off by 0.9 nats


def test_training_curves_end_where_the_log_ends(full: RunDir, page: _Text) -> None:
    train = collect(full)["train"]
    assert train["curves"]["step"][-1] == 800
    assert len(train["curves"]["step"]) == len(train["curves"]["loss"]) == 300
    first, second, third = train["curves"]["step_accuracies"]
    assert first[0] is not None
    assert second[0] is third[0] is None  # the first 320 steps play one drafted token
    assert [check["step"] for check in train["validations"]] == [100, 200, 300, 400, 500, 600, 700, 800]
    assert "1.863 at best, held out" in page.text


def test_the_numbers_of_the_page_are_those_of_the_json(full: RunDir, page: _Text) -> None:
    report = json.loads((full.path / "report.json").read_text())
    assert report == collect(full) | {"written": report["written"]}
    trained = report["evaluate"]["drafters"][-1]
    assert (trained["role"], trained["all"]["acceptance_length"]) == ("trained", report["headline"]["acceptance_after"])
    for number in (
        f"{report['headline']['acceptance_after']:.2f}",
        f"{report['headline']['answer_tokens']:,} tokens",
        f"{trained['datasets']['gsm8k']['acceptance_length']:.3f}",
        f"{report['train']['tokens']:,} at {report['train']['tokens_per_second']:,.1f} tokens/s",
        f"{report['capture']['rows']:,} of {report['capture']['expected']:,} sequences",
    ):
        assert number in page.text


def test_a_script_in_an_answer_is_text_and_special_tokens_are_marked(full: RunDir, page: _Text) -> None:
    html = (full.path / "report.html").read_text()
    assert "&lt;script&gt;alert(&#39;owned&#39;)&lt;/script&gt;<mark>&lt;|im_start|&gt;</mark>" in html
    assert page.tags.isdisjoint({"script", "img", "i"})
    assert "<i>&/evil0<img src=x>, turn 0: 2 + " in page.text


def test_the_page_loads_nothing_and_its_ids_are_unique(page: _Text) -> None:
    assert [link for link in page.links if not link.startswith(("#", "data:,"))] == []
    assert len(page.ids) == len(set(page.ids))
    missing = {link[1:] for link in page.links if link.startswith("#")} - set(page.ids)
    assert missing == set()


def test_plots_have_text_colours_of_the_theme_and_a_description(full: RunDir) -> None:
    html = (full.path / "report.html").read_text()
    plots = re.findall(r"<svg .*?</svg>", html, re.DOTALL)
    assert len(plots) == 12
    for plot in plots:
        assert re.search(r'role="img" aria-label="[^"]{20,}"', plot)
        assert "<text" in plot
        assert "#0101" not in plot
        assert set(re.findall(r"(?:fill|stroke): ([^;\"]+)", plot)) <= {"none", *(f"var(--{n})" for n in _COLOURS)}


_COLOURS = ("ink", "muted", "grid", "paper", *(f"s{n}" for n in range(1, 9)))


def test_keys_and_passwords_are_cut_out(full: RunDir) -> None:
    for name in ("report.html", "report.json"):
        text = (full.path / name).read_text()
        assert "hunter2" not in text
        assert "s3cret" not in text
        assert "http://10.0.0.1:30000" in text
    assert without_secrets({"a": ["--hf-token=abc serve", "hf_abcdefghijkl"]}) == {"a": ["--hf-token=… serve", "hf_…"]}


def test_a_run_with_only_the_generate_stage_tells_what_to_run_next(tmp_path: Path, target_folder: Path) -> None:
    page = _Text(write_report(_generated(tmp_path / "run", target_folder)))
    assert "130 answers of the target that are fit to train on. No drafter has been trained on them yet." in page.text
    said = f"smollm2-cpu run.dir={tmp_path / 'run'} prompts.path=/prompts"
    assert f"No drafter has been trained in this run. Run next: python jobs/train.py {said}" in page.text
    assert f"python jobs/capture.py {said}" in page.text
    assert f"python jobs/evaluate.py {said} evaluate.prompts=QUESTIONS" in page.text


def test_a_run_of_the_pipeline_goes_on_with_the_pipeline(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", _rows()[:3])
    manifest = run.manifest()
    manifest["generate"]["command"] = "python jobs/pipeline.py p.yaml evaluate.prompts=q"
    write_json(run.path / "manifest.json", manifest)
    assert set(collect(run)["next"].values()) == {"python jobs/pipeline.py p.yaml evaluate.prompts=q"}


def test_a_run_of_the_installed_commands_goes_on_with_them(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", _rows()[:3])
    manifest = run.manifest()
    manifest["generate"]["command"] = "eagle3-generate p.yaml run.dir=/eagle3-generate"
    write_json(run.path / "manifest.json", manifest)
    assert collect(run)["next"]["train"] == "eagle3-train p.yaml run.dir=/eagle3-generate"


def test_a_streamed_training_asks_for_no_capture_stage(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", _rows()[:3])
    _trained(run)
    assert "capture" not in collect(run)["next"]
    assert "Hidden states were streamed to training" in _Text(write_report(run)).text


def test_a_run_that_has_only_begun_has_a_report(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.claim("generate", {"generate.temperature": 0.0}, {"command": "python jobs/generate.py p.yaml"})
    run.claim("capture", {}, {})
    run.claim("train", {}, {})
    page = _Text(write_report(run))
    assert (
        "This stage has not come to its end. Its command goes on from here: python jobs/generate.py p.yaml" in page.text
    )


def test_a_stage_that_was_killed_behind_an_earlier_end_is_not_complete(tmp_path: Path, target_folder: Path) -> None:
    run = _generated(tmp_path / "run", target_folder)
    assert collect(run)["generate"]["status"] == "complete"
    run.claim("generate", run.manifest()["generate"]["fingerprint"], {})  # a larger limit; then kill -9
    found = collect(run)
    assert found["generate"]["status"] == "not complete"
    assert "jobs/generate.py" in found["next"]["generate"]


def test_what_an_earlier_drafter_was_worth_is_not_told_of_the_one_in_its_place(full: RunDir, tmp_path: Path) -> None:
    shutil.copytree(full.path, tmp_path / "run", symlinks=True)
    run = RunDir(tmp_path / "run")
    summary = json.dumps(run.summary("evaluate")).replace(str(full.path), str(run.path))
    run.write_summary("evaluate", json.loads(summary))
    assert collect(run)["headline"]["acceptance_after"] == 1.9
    (run.stage("train") / "drafter" / "model.safetensors").write_bytes(b"trained anew")
    found = collect(run)
    assert found["headline"]["acceptance_after"] is None
    assert [drafter["role"] for drafter in found["evaluate"]["drafters"]] == ["none", "earlier", "fresh"]


def test_a_damaged_file_of_scores_is_named(full: RunDir, tmp_path: Path) -> None:
    shutil.copytree(full.path, tmp_path / "run", symlinks=True)
    [scores] = (tmp_path / "run" / "capture" / "scores").glob("*.parquet")
    scores.write_bytes(scores.read_bytes()[:-20])
    with pytest.raises(RunError, match=r"capture/scores is damaged .*Run jobs/capture\.py again"):
        write_report(RunDir(tmp_path / "run"))


def test_a_target_that_is_not_here_leaves_rejections_without_text(tmp_path: Path, target_folder: Path) -> None:
    moved = shutil.copytree(target_folder, tmp_path / "moved")
    run = _generated(tmp_path / "run", moved)
    shutil.rmtree(moved)
    page = _Text(write_report(run))
    assert "Examples cannot be shown as text: the target's tokenizer cannot be loaded" in page.text
    assert "the answer ends in a loop of N tokens 7" in page.text


def test_a_folder_without_a_run_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no run"):
        write_report(RunDir(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_speed_over_time_comes_from_the_times_at_which_files_were_written() -> None:
    written = [(1000.0 + 60 * i, 600) for i in range(9)]
    found = over_time(written, best=12.0)
    assert found == {"minutes": [2.0, 4.0, 6.0, 8.0], "tokens_per_second": [5.0, 10.0, 10.0, 15.0]}


def test_copied_files_and_a_handful_of_files_are_no_speed_over_time() -> None:
    assert over_time([(1000.0 + i / 1000, 600) for i in range(9)], best=12.0) is None
    assert over_time([(1000.0 + 60 * i, 600) for i in range(7)], best=12.0) is None


def test_a_browser_shows_the_page_without_errors_in_light_dark_and_on_a_phone(full: RunDir, tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium is installed (apt-get install chromium)")
    seen = asyncio.run(_look(chromium, full.path / "report.html", tmp_path))
    assert seen["messages"] == []
    assert seen["requests"] == [(full.path / "report.html").as_uri()]
    assert seen["light"] == {"paper": "rgb(255, 255, 255)", "overflow": 0, "plots": 12}
    assert seen["dark"] == {"paper": "rgb(18, 22, 28)", "overflow": 0, "plots": 12}
    assert seen["phone"] == {"paper": "rgb(255, 255, 255)", "overflow": 0, "plots": 12}


_READY = """new Promise(done => {
    const look = () => document.readyState == 'complete' ? done() : setTimeout(look, 20)
    look()
})"""
_MEASURE = """({
    paper: getComputedStyle(document.body).backgroundColor,
    overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
    plots: [...document.querySelectorAll('svg')].filter(plot => plot.getBoundingClientRect().height > 80).length,
})"""


async def _look(chromium: str, page: Path, folder: Path) -> dict[str, Any]:
    """Opens the page and returns what it asks for and complains of, and its measures; leaves pictures in `folder`."""
    async with _chromium(chromium, folder / "profile") as socket:
        seen: dict[str, Any] = {"messages": [], "requests": []}
        sent = 0

        async def call(method: str, **parameters: Any) -> dict[str, Any]:
            nonlocal sent
            sent += 1
            await socket.send_json({"id": sent, "method": method, "params": parameters})
            while True:
                message = await socket.receive_json(timeout=60)
                if message.get("id") == sent:
                    assert "error" not in message, message
                    return dict(message["result"])
                if message["method"] in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
                    seen["messages"].append(message["params"])
                elif message["method"] == "Network.requestWillBeSent":
                    seen["requests"].append(message["params"]["request"]["url"])

        for domain in ("Page", "Log", "Runtime", "Network"):
            await call(f"{domain}.enable")
        await call("Page.navigate", url=page.as_uri())
        for name, width, scheme in (("light", 1100, "light"), ("dark", 1100, "dark"), ("phone", 390, "light")):
            await call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
            await call(
                "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 500
            )
            await call("Runtime.evaluate", expression=_READY, awaitPromise=True)
            measured = await call("Runtime.evaluate", expression=_MEASURE, returnByValue=True)
            seen[name] = measured["result"]["value"]
            picture = await call("Page.captureScreenshot", captureBeyondViewport=True)
            (folder / f"{name}.png").write_bytes(base64.b64decode(picture["data"]))
        printed = await call("Page.printToPDF", printBackground=False)
        (folder / "printed.pdf").write_bytes(base64.b64decode(printed["data"]))
        return seen


@asynccontextmanager
async def _chromium(chromium: str, profile: Path) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    """A headless Chromium's page, as the socket of its DevTools protocol."""
    options = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
    )
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic")
    process = await asyncio.create_subprocess_exec(
        chromium,
        *options,
        *quiet,
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
        stderr=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        port = profile / "DevToolsActivePort"
        async with asyncio.timeout(60):
            while not (port.exists() and port.read_text().strip()):
                await asyncio.sleep(0.05)
        address = f"http://127.0.0.1:{port.read_text().split()[0]}/json/new?about:blank"
        async with aiohttp.ClientSession() as session, session.put(address) as answer:
            target = await answer.json()
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield socket
    finally:
        process.terminate()
        await process.wait()
