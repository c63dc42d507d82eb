"""cluster.yaml is what `ray up` accepts."""

from pathlib import Path

import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

REPOSITORY = Path(__file__).resolve().parents[2]


def test_ray_accepts_the_cluster_file() -> None:
    config = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())
    validate_config(prepare_config(config))


def test_every_start_of_ray_says_how_it_authenticates() -> None:
    config = yaml.safe_load((REPOSITORY / "cluster.yaml").read_text())
    starts = [c for key in config for c in (config[key] if "start_ray" in key else ()) if "ray start" in c]
    assert len(starts) == 2
    assert all("RAY_AUTH_MODE=token" in command for command in starts)
