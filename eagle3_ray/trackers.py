"""Where training curves go beside the run's own log: TensorBoard always, wandb and mlflow where they are installed and
switched on by their own environment variables (WANDB_PROJECT, MLFLOW_TRACKING_URI).
"""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Trackers:
    """Writes the numbers of a step to all trackers that are on. A resumed run goes on in the same curves; in mlflow,
    each start is a run of its own.
    """

    def __init__(self, folder: Path, name: str, config: Mapping[str, Any], first_step: int) -> None:
        from tensorboardX import SummaryWriter  # imports torch, which the report reads a log without

        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        self._wandb = self._mlflow = None
        if "WANDB_PROJECT" in os.environ:
            self._wandb = importlib.import_module("wandb").init(
                id=f"{name}-{config['plan']}", name=name, resume="allow", config=dict(config)
            )
        if "MLFLOW_TRACKING_URI" in os.environ:
            self._mlflow = importlib.import_module("mlflow")
            self._mlflow.start_run(run_name=name)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Adds the numbers of one step."""
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)
        if self._wandb is not None:
            self._wandb.log(dict(numbers), step=step)
        if self._mlflow is not None:
            self._mlflow.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        """Ends all curves."""
        self._board.close()
        if self._wandb is not None:
            self._wandb.finish()
        if self._mlflow is not None:
            self._mlflow.end_run()
