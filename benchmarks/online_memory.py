"""The memory of a training rank under ZeRO 3 against that of one process: one step from a model folder to another.

What both need without a model worth speaking of, for imports above all, is measured with a tiny one and taken off.
"""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

WIDTH, LAYERS = 1024, 17
"""Of a Qwen2 with 300 million parameters."""


class Peaks(NamedTuple):
    """GiB beyond those of a tiny model."""

    alone: float
    rank: float


def peaks(folder: Path, width: int = WIDTH, layers: int = LAYERS, processes: int = 2) -> Peaks:
    """The highest memory of one process, and of any of ``processes`` ranks, from loading to saving."""
    tiny = _both(_job(folder / "tiny", 32, 1, processes))
    large = _both(_job(folder / "large", width, layers, processes))
    return Peaks(*(first - other for first, other in zip(large, tiny, strict=True)))


def _both(job: Path) -> tuple[float, float]:
    from agentrl.training.job import TrainingJob
    from agentrl.training.launch import launch

    command = [sys.executable, str(Path(__file__).resolve()), str(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    history = launch(TrainingJob.model_validate_json(job.read_text()).deepspeed, job, lambda _: None)
    return float(done.stdout.splitlines()[-1]), history[0]["peak_gib"]


def _job(folder: Path, width: int, layers: int, processes: int) -> Path:
    """A job file, with the model and the rows that it reads."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from agentrl.algorithms.sft import SFT
    from agentrl.models.policy import Policy
    from agentrl.models.tiny import train_tokenizer
    from agentrl.schemas.training import TrainingRow
    from agentrl.training.job import DeepSpeed, TrainingJob
    from agentrl.training.optimizer import OptimizerConfig
    from agentrl.training.rows import TrainingRows, write_rows

    folder.mkdir(parents=True)
    config = Qwen2Config(
        vocab_size=8 * width, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 16, num_key_value_heads=width // 16, tie_word_embeddings=True,
    )  # fmt: skip
    Policy(Qwen2ForCausalLM(config), train_tokenizer(["some text"], 300), "model").save(folder / "start")
    rng = random.Random(0)
    rows = []
    for number in range(4):
        row: dict[str, Any] = {"input_ids": [rng.randrange(256) for _ in range(32)], "mask": [False] + [True] * 31}
        rows.append(TrainingRow(row_id=str(number), unit=number, weights=[1.0] * 32, **row))
    write_rows(folder / "rows.arrow", TrainingRows.of(rows).batches)
    spread = DeepSpeed(zero=3, processes=processes)
    optimizer = OptimizerConfig(lr=1e-5, micro_tokens=32)
    return TrainingJob(objective=SFT(), optimizer=optimizer, deepspeed=spread, steps=1, batch=2, seed=0).write(folder)


def alone(job_file: Path) -> float:
    """GiB that this process needs at most for a job."""
    from agentrl.models.policy import Policy
    from agentrl.training.backend import peak_gib
    from agentrl.training.job import TrainingJob
    from agentrl.training.loop import fit
    from agentrl.training.rows import TrainingRows
    from agentrl.training.step import Trainer

    folder, job = job_file.parent, TrainingJob.model_validate_json(job_file.read_text())
    trainer = Trainer(Policy.load(folder / "start"), job.objective, job.optimizer, job.steps)
    fit(trainer, TrainingRows.open(folder / "rows.arrow"), job.batch, job.seed, folder / "one.pt", lambda _: None)
    trainer.policy.save(folder / "alone")
    return peak_gib(trainer.backend.device)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    print(alone(Path(sys.argv[1])))
