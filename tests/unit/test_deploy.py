"""What is shipped for operators fits the code: manifests, dashboard and the table of metrics."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3_ray import __version__, metrics
from eagle3_ray.config import load
from eagle3_ray.states_cache import bytes_per_token

REPOSITORY = Path(__file__).resolve().parents[2]
KUBERAY = REPOSITORY / "deploy" / "kuberay"
RAY_JOBS = ("generate", "pipeline")
INSTALLED = "/opt/eagle3_ray/"

# Fields of ray.io/v1, from KubeRay's API reference; authOptions since 1.5.1.
JOB_FIELDS = {"entrypoint", "backoffLimit", "submitterConfig", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished"}
JOB_FIELDS |= {"rayClusterSpec", "runtimeEnvYAML", "submissionMode", "activeDeadlineSeconds", "suspend", "metadata"}
CLUSTER_FIELDS = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling"}
HEAD_FIELDS = {"serviceType", "enableIngress", "rayStartParams", "template", "headService"}
WORKER_FIELDS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template", "numOfHosts"}
RAY_START = {"dashboard-host", "num-cpus", "num-gpus", "metrics-export-port", "object-spilling-directory"}


def ray_job(name: str) -> dict[str, Any]:
    manifest = yaml.safe_load((KUBERAY / f"{name}.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    spec: dict[str, Any] = manifest["spec"]
    return spec


def groups(spec: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = spec["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


@pytest.mark.parametrize("name", RAY_JOBS)
def test_a_ray_job_has_only_fields_that_kuberay_knows(name: str) -> None:
    spec = ray_job(name)
    cluster = spec["rayClusterSpec"]
    assert spec.keys() <= JOB_FIELDS
    assert cluster.keys() <= CLUSTER_FIELDS
    assert cluster["headGroupSpec"].keys() <= HEAD_FIELDS
    for group in cluster["workerGroupSpecs"]:
        assert group.keys() <= WORKER_FIELDS
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in groups(spec):
        assert group["rayStartParams"].keys() <= RAY_START
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "KubeRay takes strings only"


@pytest.mark.parametrize("name", RAY_JOBS)
def test_a_ray_job_starts_a_job_that_exists_with_a_configuration_that_loads(name: str) -> None:
    python, script, preset, *overrides = shlex.split(ray_job(name)["entrypoint"])
    assert python == "python"
    assert script == f"{INSTALLED}jobs/{name}.py"
    assert (REPOSITORY / script.removeprefix(INSTALLED)).is_file()
    assert f"COPY . {INSTALLED.rstrip('/')}\n" in (KUBERAY / "Dockerfile").read_text()
    config = load(preset, overrides)
    assert config.run.dir.startswith("/shared/")
    assert config.generate.endpoints == []
    [workers] = ray_job(name)["rayClusterSpec"]["workerGroupSpecs"]
    gpus = 8 * workers["replicas"]
    assert (config.generate.servers, config.generate.gpus_per_server) == ("auto", 8)
    train = config.train.workers * config.train.gpus_per_worker
    if name == "pipeline":
        assert config.capture.targets * config.capture.gpus_per_target + train == gpus


@pytest.mark.parametrize("name", RAY_JOBS)
def test_a_ray_job_asks_for_a_token_and_shows_the_dashboard_to_nobody_outside(name: str) -> None:
    cluster = ray_job(name)["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert cluster["headGroupSpec"]["enableIngress"] is False


@pytest.mark.parametrize("name", RAY_JOBS)
def test_every_pod_mounts_what_it_names_and_has_room_for_shared_memory(name: str) -> None:
    claim = yaml.safe_load((KUBERAY / "shared-storage.yaml").read_text())
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for group in groups(ray_job(name)):
        pod = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        [container] = pod["containers"]
        mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
        assert mounts["/shared"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        assert group["rayStartParams"]["object-spilling-directory"] in mounts
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]
        memory = int(resources["limits"]["memory"].removesuffix("Gi"))
        shared = int(mounts["/dev/shm"]["emptyDir"]["sizeLimit"].removesuffix("Gi"))
        assert 0.3 * memory + 4 <= shared <= memory / 2, "Ray's object store takes 30% of memory, a capture 4 GiB"


@pytest.mark.parametrize("name", RAY_JOBS)
def test_gpus_are_on_the_workers_alone_and_ray_counts_those_of_the_pod(name: str) -> None:
    head, *workers = groups(ray_job(name))
    assert head["rayStartParams"]["num-gpus"] == "0"
    assert "nvidia.com/gpu" not in head["template"]["spec"]["containers"][0]["resources"]["limits"]
    for worker in workers:
        limits = worker["template"]["spec"]["containers"][0]["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == worker["rayStartParams"]["num-gpus"] == "8"


def test_prometheus_finds_the_port_that_the_pods_name() -> None:
    monitor = yaml.safe_load((KUBERAY / "pod-monitor.yaml").read_text())
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    for group in (group for name in RAY_JOBS for group in groups(ray_job(name))):
        ports = {port["name"]: port["containerPort"] for port in group["template"]["spec"]["containers"][0]["ports"]}
        assert str(ports[endpoint["port"]]) == group["rayStartParams"]["metrics-export-port"]


def test_versions_in_the_manifests_are_those_of_the_package() -> None:
    project = (REPOSITORY / "pyproject.toml").read_text()
    ray = re.search(r"ray\[.*?\]==([\d.]+)", project)
    sglang = re.search(r"sglang==([\d.]+)", project)
    assert ray
    assert sglang
    assert f"FROM lmsysorg/sglang:v{sglang[1]}\n" in (KUBERAY / "Dockerfile").read_text()
    for name in RAY_JOBS:
        assert ray_job(name)["rayClusterSpec"]["rayVersion"] == ray[1]
        for group in groups(ray_job(name)):
            image = group["template"]["spec"]["containers"][0]["image"]
            assert image.endswith(f"/eagle3_ray:{__version__}")


def test_the_cluster_file_names_five_values_and_keeps_what_they_need() -> None:
    text = (REPOSITORY / "cluster.yaml").read_text()
    assert re.findall(r"<- (\d)\.", text) == list("12345")
    starts = [line for line in text.splitlines() if "ray start" in line and line.startswith("  - ")]
    assert len(starts) == 2
    for start in starts:
        assert "ulimit -n 65536;" in start
        assert '--object-spilling-directory="$SPILL"' in start
    assert "--dashboard-host=127.0.0.1" in starts[0]


def test_a_stopped_job_has_time_to_end_its_servers_and_to_save() -> None:
    """The supervisor that waits runs on the head, and reads this where Ray was started."""
    cluster = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())
    assert "RAY_JOB_STOP_WAIT_TIME_S=120" in cluster["head_start_ray_commands"][-1]
    for name in RAY_JOBS:
        [head] = ray_job(name)["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
        assert {"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": "120"} in head["env"]


# ---- metrics


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Every metric that metrics.py makes: name to type, labels and description."""
    found: dict[str, tuple[str, tuple[str, ...], str]] = {}

    def recorder(kind: str) -> Any:
        def make(name: str, about: str, *rest: Any) -> None:  # a histogram's boundaries come before its labels
            found[name] = (kind, next((value for value in rest if isinstance(value, tuple)), ()), about)

        return make

    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(metrics, kind, recorder(kind.lower()))
    for name, value in vars(metrics).items():
        if isinstance(value, type) and value.__module__ == metrics.__name__ and name.endswith("Metrics"):
            value()
    assert {"eagle3_generate_rows_total", "eagle3_train_loss"} <= found.keys()
    return found


def test_the_table_of_metrics_is_that_of_the_code(declared: dict[str, tuple[str, tuple[str, ...], str]]) -> None:
    lines = (REPOSITORY / "docs" / "metrics.md").read_text().splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `eagle3_")]
    documented = {
        name.strip("`"): (kind, tuple(re.findall(r"`(\w+)`", labels)), about) for name, kind, labels, _, about in table
    }
    assert documented == declared
    assert all(unit for *_, unit, _ in table)


def expressions() -> list[tuple[str, str]]:
    """(panel's title, expression) of the dashboard."""
    dashboard = json.loads((REPOSITORY / "deploy" / "grafana" / "eagle3_ray.json").read_text())
    return [(p["title"], target["expr"]) for p in dashboard["panels"] for target in p.get("targets", ())]


def test_the_dashboard_asks_for_metrics_and_labels_that_exist_and_for_all_of_them(
    declared: dict[str, tuple[str, tuple[str, ...], str]],
) -> None:
    exported = {}
    for name, (kind, labels, _) in declared.items():
        if kind == "histogram":
            exported |= {f"ray_{name}{end}": (name, {*labels, "le"}) for end in ("_bucket", "_count", "_sum")}
        else:
            exported[f"ray_{name}"] = (name, set(labels))
    shown = set()
    for title, expression in expressions():
        names = set(re.findall(r"\bray_\w+", expression))
        assert names, title
        assert names <= exported.keys(), title
        grouped = {label.strip() for by in re.findall(r"\bby \(([^)]*)\)", expression) for label in by.split(",")}
        chosen = set(re.findall(r'(\w+)(?:=|!=|=~|!~)"', expression))
        for name in names:
            metric, labels = exported[name]
            assert grouped | chosen <= labels, f"{title}: {name}"
            shown.add(metric)
    assert shown == declared.keys()


def test_counters_are_shown_as_rates_or_totals_never_as_gauges_and_gauges_are_not_rated(
    declared: dict[str, tuple[str, tuple[str, ...], str]],
) -> None:
    gauges = {f"ray_{name}" for name, (kind, _, _) in declared.items() if kind == "gauge"}
    for title, expression in expressions():
        rated = set(re.findall(r"rate\((ray_\w+)", expression))
        assert not rated & gauges, title


def test_the_dashboard_has_what_grafana_needs_to_draw_it() -> None:
    dashboard = json.loads((REPOSITORY / "deploy" / "grafana" / "eagle3_ray.json").read_text())
    assert {"title", "uid", "schemaVersion", "time", "templating", "panels"} <= dashboard.keys()
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    rows = [panel["title"] for panel in panels if panel["type"] == "row"]
    assert rows == ["Generation", "Fleet", "Capture", "Training", "Data health"]
    assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["datasource"]
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, f"{panel['title']} lies over another panel"
        taken |= cells
        for target in panel.get("targets", ()):
            assert target["datasource"] == panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


# ---- the plan on paper


def table_row(first_cell: str) -> list[float]:
    """The numbers of a row of docs/scale.md behind its first cell, in order."""
    lines = (REPOSITORY / "docs" / "scale.md").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(f"| {first_cell}")]
    cells = line.strip("| ").split(" | ")[1:]
    return [float(number) for cell in cells for number in re.findall(r"\d+(?:\.\d+)?", cell.replace(",", ""))]


def hours(tokens: float, a_second: float) -> list[float]:
    """On 1, 4 and 16 nodes, several of them at 0.95 of linear."""
    return [tokens / (a_second * nodes * (1 if nodes == 1 else 0.95)) / 3600 for nodes in (1, 4, 16)]


def test_the_paper_plan_adds_up() -> None:
    bf16, fp8 = (bytes_per_token(7168, storage) - 4 for storage in ("bf16", "fp8"))  # the likeliest token beside them
    assert (bf16, fp8) == (57_344, 28_688)
    sample, answer = 828e9 / bf16 / 10_000, 225 * 5.3 * 3600 / 10_000
    assert (round(sample), round(answer)) == (1444, 429)
    tokens, answers = 144.4e6, 42.9e6
    generate = hours(answers, 930)
    assert table_row("generate at 930") == pytest.approx(generate, rel=0.02)
    assert table_row("generate as the seed") == pytest.approx(hours(answers, 225), rel=0.02)
    capture = hours(tokens, 20_000)
    assert table_row("capture once, into") == pytest.approx(capture, rel=0.02)
    assert table_row("capture once at") == pytest.approx(hours(tokens, 3_165), rel=0.02)
    seen = 4 * tokens
    train = [seen * bf16 / 2e9 / 3600, seen / (3 * 20_000) / 3600, seen / (12 * 20_000) / 3600]
    assert table_row("train, 4 passes") == pytest.approx(train, rel=0.02)
    load = 3 * 600 / 2 / 3600
    total = [generate[0] + capture[0] + train[0] + load + 0.3]
    total += [g + t + load + 0.3 for g, t in zip(generate[1:], train[1:], strict=True)]
    assert table_row("loading 600 GB") == pytest.approx([load] * 3)
    assert table_row("**sum**") == pytest.approx(total, rel=0.02)
    assert table_row("cache of states, bf16 / fp8")[:2] == pytest.approx(
        [tokens * bf16 / 1e12, tokens * fp8 / 1e12], rel=0.02
    )
    assert table_row("reading a bf16 cache") == [round(seen * bf16 / 1e12)]
