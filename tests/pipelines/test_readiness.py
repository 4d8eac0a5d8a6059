"""What can be found before anything runs is found then."""

import json
import os
from pathlib import Path

import pytest

from datastore.catalog import Catalog
from pipelines import readiness
from pipelines.load import load
from pipelines.plan import make_plan
from pipelines.problems import SpecError

PIPELINE = """
name: p
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 4, dev: 1, heldout: 1}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}
  warm:
    uses: train.sft
    inputs: {trajectories: expert}
    with: {model: {MODEL}, steps: 1, batch: 4, optimizer: {lora: {rank: 4}}, deepspeed: {zero: 1}}
"""


def write(folder: Path, model: str = "init: tiny") -> str:
    path = folder / "p.yaml"
    path.write_text(PIPELINE.replace("MODEL", model))
    return str(path)


def test_a_missing_optional_package_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "is_installed", lambda package: False)
    with pytest.raises(SpecError) as error:
        load(write(tmp_path))
    text = str(error.value)
    assert "stages.warm.with.optimizer.lora: needs the package peft, which is not installed: pip install" in text
    assert "stages.warm.with.deepspeed: needs the package deepspeed, which is not installed: pip install" in text


def test_a_tokenizer_without_a_template_is_refused_when_the_file_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "base"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    path = write(tmp_path, f"path: {folder}")
    with pytest.raises(SpecError, match=r"stages\.warm\.with\.model\.path: its tokenizer has no chat_template"):
        load(path)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert "warm" in load(path).nodes


def test_a_store_that_is_a_file_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.write_text("")
    for path in (store, store / "below"):
        with pytest.raises(SpecError, match="is a file; give a folder"):
            make_plan(load(write(tmp_path)), Catalog(tmp_path), str(path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_store_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir(mode=0o500)
    with pytest.raises(SpecError, match="is not writable for this user"):
        make_plan(load(write(tmp_path)), Catalog(str(store)), str(store))


def test_a_store_that_cannot_be_written_is_told_from_one_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "is not writable" in (readiness.store_problem(str(tmp_path / "store"), write=True) or "")
    assert readiness.store_problem(str(tmp_path / "store"), write=False) is None
