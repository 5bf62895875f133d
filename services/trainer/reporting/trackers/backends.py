"""The trackers by the names that the recipe's field `trackers` takes."""

from __future__ import annotations

from pipelinerl.errors import MissingPackage
from services.trainer.reporting.trackers.tracker import Tracker


def open_tracker(name: str) -> Tracker:
    """Imports the tracker's library. Raises `MissingPackage` where it cannot be, `ValueError` for another name."""
    try:
        return _opened(name)
    except ImportError as error:
        raise MissingPackage(f"{error}; pip install 'pipelinerl[{name}]', or leave it out of trackers") from error


def _opened(name: str) -> Tracker:
    match name:
        case "tensorboard":
            from services.trainer.reporting.trackers.tensorboard import TensorBoardTracker

            return TensorBoardTracker()
        case "mlflow":
            from services.trainer.reporting.trackers.mlflow import MlflowTracker

            return MlflowTracker()
        case "wandb":
            from services.trainer.reporting.trackers.wandb import WandbTracker

            return WandbTracker()
    raise ValueError(f"no tracker is called {name!r}")
