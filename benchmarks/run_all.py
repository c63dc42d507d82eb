"""Runs benchmarks one after the other and prints one table: figure, baseline, goal, measured, verdict.

    python benchmarks/run_all.py [NAME ...]

Each runs in a process of its own, whose last line of output is a JSON object with its figures. A goal that is not
reached is a verdict; the exit code is 1 only where a benchmark did not come to its end.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from eagle3_ray.sglang_cpu.cache import cache_folder  # noqa: E402


@dataclass(frozen=True)
class Figure:
    """A number of a benchmark's JSON object, and what it should be: at least `goal`, or at most, or nothing."""

    key: str
    baseline: str
    at_least: float | None = None
    at_most: float | None = None

    def goal(self) -> str:
        if self.at_least is not None:
            return f"≥ {self.at_least:g}"
        return "–" if self.at_most is None else f"≤ {self.at_most:g}"

    def verdict(self, measured: float) -> str:
        if self.at_least is None and self.at_most is None:
            return "–"
        reached = measured >= self.at_least if self.at_least is not None else measured <= (self.at_most or 0)
        return "reached" if reached else "NOT reached"


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder with its arguments, and packages that it needs beside this one's."""

    name: str
    command: tuple[str, ...]
    figures: tuple[Figure, ...]
    packages: tuple[str, ...] = ()


JOBS = ("generate", "capture", "train", "evaluate", "pipeline", "prepare", "report", "doctor")
RIVAL = "specforge 0.2.0, same weights and batch"

BENCHMARKS = (
    Benchmark(
        "generate_client",
        ("generate_client.py",),
        (
            Figure("first_to_last_ratio", "plain asyncio script, 150 in flight, same latency server", at_least=0.97),
            Figure("whole_job_ratio", "the same script's whole time", at_least=0.85),
        ),
    ),
    Benchmark(
        "generate_engine",
        ("generate_engine.py",),
        (Figure("ratio", "best fixed concurrency of a sweep on the same real SGLang", at_least=0.95),),
    ),
    Benchmark(
        "placement",
        ("placement.py",),
        (Figure("ratio", "the same conversations, each turn to the emptiest server", at_least=1.0),),
    ),
    Benchmark(
        "driver_memory",
        ("driver_memory.py",),
        (Figure("growth_mb", "the driver's memory when the plan of a million prompts begins", at_most=200),),
    ),
    Benchmark(
        "capture_sglang",
        ("capture.py", "--backend", "sglang"),
        (Figure("ratio", "prefill of the same sequences, nothing captured", at_least=0.95),),
    ),
    Benchmark(
        "capture_transformers",
        ("capture.py", "--backend", "transformers"),
        (Figure("ratio", "bare forward passes of the same batches", at_least=0.95),),
    ),
    Benchmark(
        "transport",
        ("transport.py",),
        (Figure("ratio", "bare arrays through the object store", at_least=0.9),),
    ),
    Benchmark(
        "train_step",
        ("train_step.py",),
        (
            Figure("ours_fp32_times_faster", RIVAL, at_least=6),
            Figure("ours_bf16_times_faster", RIVAL, at_least=12),
            Figure("ours_fp32_times_less_memory", RIVAL, at_least=5),
            Figure("ours_bf16_times_less_memory", RIVAL, at_least=5),
            Figure("loss_difference", RIVAL, at_most=1e-4),
        ),
        packages=("specforge==0.2.0", "triton"),
    ),
    Benchmark(
        "start_up",
        ("start_up.py",),
        (
            Figure("bare_ray_driver_s", "itself"),
            *(Figure(f"{job}_s", "a bare Ray driver's first task") for job in JOBS),
            *(Figure(f"{job}_mb", "–") for job in JOBS),
        ),
    ),
)


class NotInstalled(RuntimeError):
    """A package that a benchmark needs cannot be installed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("names", metavar="NAME", nargs="*", help=f"which to run (all): {', '.join(names)}")
    chosen = parser.parse_args().names
    if unknown := set(chosen) - set(names):
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    return run([benchmark for benchmark in BENCHMARKS if benchmark.name in (chosen or names)])


def run(benchmarks: Sequence[Benchmark]) -> int:
    """Runs them, prints the table, and returns the exit code."""
    rows, failed = [], False
    for benchmark in benchmarks:
        print(f"--- {benchmark.name}", file=sys.stderr, flush=True)
        try:
            measured = measure(benchmark)
        except NotInstalled as error:
            rows.append([benchmark.name, "", "", "", "", f"skipped: {error}"])
            continue
        except subprocess.CalledProcessError as error:
            failed = True
            rows.append([benchmark.name, "", "", "", "", f"FAILED with exit code {error.returncode}"])
            continue
        for figure in benchmark.figures:
            value = measured[figure.key]
            row = [figure.key, figure.baseline, figure.goal(), f"{value:.4g}", figure.verdict(value)]
            rows.append([benchmark.name, *row])
    print(table(["benchmark", "figure", "baseline", "goal", "measured", "verdict"], rows))
    return int(failed)


def measure(benchmark: Benchmark) -> dict[str, Any]:
    """The figures of the benchmark's last line.

    Raises:
        NotInstalled: it needs packages that cannot be had.
        CalledProcessError: it failed; what it said on stderr went there.
    """
    beside = [str(installed(benchmark.packages))] if benchmark.packages else []
    path = os.pathsep.join([*beside, str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    script, *arguments = benchmark.command
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments],
        cwd=FOLDER.parent,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def installed(packages: Sequence[str], cache: Path | None = None) -> Path:
    """A folder of the cache with the packages and none of what they depend on; made whole, once.

    Raises:
        NotInstalled: pip cannot.
    """
    place = cache_folder(cache) / "benchmarks" / "+".join(packages)
    if place.exists():
        return place
    place.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
        made = Path(scratch) / "packages"
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*pip, "--target", made, *packages], stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode != 0:
            raise NotInstalled(f"pip cannot install {', '.join(packages)} ({done.stderr.strip().splitlines()[-1]})")
        made.rename(place)
    return place


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with columns of even width."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [head, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
