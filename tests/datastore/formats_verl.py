"""verl's own dataset class on an exported file."""

from pathlib import Path
from typing import Any


def load(path: Path, tokenizer: Any) -> Any:
    """The first item of ``MultiTurnSFTDataset``: token ids and the mask of what is trained."""
    from omegaconf import OmegaConf
    from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

    config = OmegaConf.create({"max_length": 512, "truncation": "error", "pad_mode": "right"})
    return MultiTurnSFTDataset(parquet_files=str(path), tokenizer=tokenizer, config=config)[0]
