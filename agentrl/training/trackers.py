"""Sending the metrics of a training run to TensorBoard, Weights & Biases or MLflow, if these are installed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

from agentrl.schemas.installation import install_hint

Tracker = Literal["tensorboard", "wandb", "mlflow"]
Send = Callable[[dict[str, float]], None]


@contextmanager
def track(trackers: Sequence[Tracker], name: str, folder: Path) -> Iterator[Send]:
    """Yield a function that sends one step's metrics, by their ``step``, to every tracker. ``name`` is the run's;
    TensorBoard's files go into ``folder``, and so do those that Weights & Biases keeps. Weights & Biases and MLflow
    read where to send to from their own variables (``WANDB_MODE``, ``WANDB_PROJECT``, ``MLFLOW_TRACKING_URI``).

    Raises ValueError that names a tracker that is not installed.
    """
    with ExitStack() as stack:
        senders = [_open(tracker, name, folder, stack) for tracker in trackers]

        def send(metrics: dict[str, float]) -> None:
            for sender in senders:
                sender(metrics)

        yield send


def _open(tracker: Tracker, name: str, folder: Path, stack: ExitStack) -> Send:
    try:
        return {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}[tracker](name, folder, stack)
    except ImportError:
        hint = install_hint("trackers")
        raise ValueError(f"track: {tracker} is not installed; {hint}, or leave it out") from None


def _tensorboard(name: str, folder: Path, stack: ExitStack) -> Send:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / name))
    stack.callback(writer.close)

    def send(metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            writer.add_scalar(key, value, int(metrics["step"]))

    return send


def _wandb(name: str, folder: Path, stack: ExitStack) -> Send:
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    run = wandb.init(name=name, dir=folder)
    stack.callback(run.finish)
    return lambda metrics: run.log(metrics, step=int(metrics["step"]))


def _mlflow(name: str, folder: Path, stack: ExitStack) -> Send:
    import mlflow

    mlflow.start_run(run_name=name)
    stack.callback(mlflow.end_run)

    def send(metrics: dict[str, float]) -> None:
        mlflow.log_metrics(metrics, step=int(metrics["step"]))

    return send
