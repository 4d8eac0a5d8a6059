"""Models of a shared store can be read by whoever may read the store, and those of a private one by nobody else."""

from pathlib import Path

import numpy as np
import pytest
from small_models import small_model

from agentrl.engines.weights import write_folder
from agentrl.engines.worker.delta import Delta, TensorChange
from agentrl.models.policy import Policy
from agentrl.models.tiny import train_tokenizer


@pytest.mark.parametrize(("folder_mode", "allowed"), [(0o755, 0o444), (0o750, 0o440), (0o700, 0o400)])
def test_files_of_weights_are_as_readable_as_their_folder(tmp_path: Path, folder_mode: int, allowed: int) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(folder_mode)
    policy = Policy(small_model(), train_tokenizer(["some text"], 300), "small")
    policy.save(folder)
    Delta("a", "b", {}, {"x": TensorChange(None, np.zeros(1, np.int16))}).write(folder / "1.delta")
    for file in ("model.safetensors", "1.delta"):
        assert (folder / file).stat().st_mode & 0o444 == allowed
        assert (folder / file).stat().st_mode & 0o200, "its owner may write it"
    assert (folder / "config.json").stat().st_mode & 0o444 >= allowed
    served = write_folder(policy.model, policy.tokenizer, tmp_path / "served")
    assert all(file.stat().st_mode & 0o444 == 0o444 for file in served.iterdir())
