"""What mkdocs makes beside the pages of this folder: the README as the first one, and the API, a page a module."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "eagle3_ray"
NO_API = ("in_venv", "__main__.py")  # scripts of SGLang's own environment, and commands


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the API to the navigation, each package with its modules below it."""
    assert config.nav is not None
    config.nav.append({"API": _navigation(PACKAGE)})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages."""
    readme = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=readme))
    files.append(File.generated(config, "benchmarks.md", content=(ROOT / "benchmarks" / "README.md").read_text()))
    for path in _modules(PACKAGE):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        files.append(File.generated(config, _page(path), content=f"# {name}\n\n::: {name}\n"))
    return files


def _navigation(package: Path) -> list[Any]:
    inside = [path for path in sorted(package.iterdir()) if path.name not in NO_API]
    modules = [{path.stem: _page(path)} for path in inside if path.suffix == ".py" and path.stem != "__init__"]
    packages = [{path.name: _navigation(path)} for path in inside if (path / "__init__.py").exists()]
    return [_page(package / "__init__.py"), *modules, *packages]


def _modules(package: Path) -> Iterator[Path]:
    return (path for path in package.rglob("*.py") if not set(NO_API) & set(path.parts))


def _page(module: Path) -> str:
    place = module.relative_to(PACKAGE).with_suffix(".md")
    return f"api/{place.with_name('index.md') if place.stem == '__init__' else place}"
