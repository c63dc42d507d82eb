"""The pages that `make docs` builds: without a warning, of every module, and with nothing that another host serves."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FETCHED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^\s>\"']*")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


def test_every_module_has_a_page_with_its_docstring(site: Path) -> None:
    assert "A run directory: who may write to it" in (site / "api" / "runs" / "index.html").read_text()
    modules = (path for path in (REPOSITORY / "eagle3_ray").rglob("*.py") if "in_venv" not in path.parts)
    names = (path.relative_to(REPOSITORY / "eagle3_ray") for path in modules if path.stem != "__main__")
    pages = [name.parent if name.stem == "__init__" else name.with_suffix("") for name in names]
    assert [page for page in pages if not (site / "api" / page / "index.html").is_file()] == []


def test_the_guides_are_there_and_the_readme_is_the_first_page(site: Path) -> None:
    assert "speculative-decoding drafters" in (site / "index.html").read_text()
    assert (site / "images" / "report.png").is_file()
    guides = [path.stem for path in (REPOSITORY / "docs").glob("*.md")]
    assert [name for name in [*guides, "benchmarks"] if not (site / name / "index.html").is_file()] == []


def test_a_page_fetches_nothing_from_elsewhere(site: Path) -> None:
    assert [found for path in site.rglob("*.html") for found in FETCHED.findall(path.read_text())] == []
