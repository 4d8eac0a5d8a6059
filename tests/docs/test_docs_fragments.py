"""YAML, JSON and files that the pages show: the schemas read them, and files are those of the examples."""

import importlib
import inspect
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from page_blocks import ROOT, Block, all_blocks
from pydantic import BaseModel, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError

from agentrl.datastore.annotations.labels import LabelSchema
from agentrl.datastore.curation.rules import Rule
from agentrl.environments import ENVIRONMENT
from agentrl.pipelines.file.library import builtin_stages, resolve
from agentrl.pipelines.file.load import load
from agentrl.pipelines.stages.cut import CutTerms
from agentrl.rewards import Rewards
from agentrl.schemas.pipeline import Execution, Profile, StageSpec

EXAMPLES = ROOT / "examples"
BLOCKS = [block for block in all_blocks() if not block.reason]


def of(language: str) -> list[Block]:
    return [block for block in BLOCKS if block.language == language]


def read(text: str) -> list[Any]:
    """What a YAML block says. If it shows the same key several times, each line is a document."""
    yaml = YAML(typ="safe", pure=True)
    try:
        return [yaml.load(text)]
    except DuplicateKeyError:
        return [yaml.load(line) for line in text.splitlines()]


def has_keys_of(model: type[BaseModel], value: Mapping[str, Any], path: str) -> None:
    """The keys are those of the model, and their values what it takes; others may be missing."""
    try:
        model.model_validate(value)
    except ValidationError as error:
        wrong = [item for item in error.errors() if item["type"] != "missing"]
        assert not wrong, f"{path}: {wrong}"


def check_stage(name: str, value: Mapping[str, Any], path: str) -> None:
    if "repeat" in value or "stages" in value:
        for below, entry in value["stages"].items():
            check_stage(below, entry, path)
        return
    spec = StageSpec.model_validate(value) if "uses" in value else None
    if spec is None:  # of a profile or an overlay
        assert set(value) <= {"execution", "with", "inputs", "matrix", "seed"}, path
        Execution.model_validate(value.get("execution", {}))
        return
    stage = resolve(spec.uses) if ":" not in spec.uses else None
    if stage:
        assert set(spec.inputs) <= set(stage.inputs), f"{path}: {name} has inputs {list(spec.inputs)}"
        settings = {key: item for key, item in spec.with_.items() if item != "..."}
        has_keys_of(stage.config, settings, f"{path}: {name}")


def check(value: Mapping[str, Any], block: Block) -> None:
    """Each key of a fragment, by what it is called."""
    position = block.place
    if stage := block.says("part of "):
        has_keys_of(builtin_stages()[stage].config, value.get("with", value), position)
        return
    for key, item in value.items():
        if key == "env":
            ENVIRONMENT.read(item)
        elif key == "rewards":
            TypeAdapter(Rewards).validate_python(item)
        elif key == "rules":
            TypeAdapter(list[Rule]).validate_python(item)
        elif key in CutTerms.model_fields:
            CutTerms.model_validate({key: item})
        elif key == "labels":
            LabelSchema.model_validate(value)
        elif key == "execution":
            Execution.model_validate(item)
        elif key == "profiles":
            for profile in item.values():
                Profile.model_validate(profile)
        elif key == "stages":
            for name, entry in item.items():
                check_stage(name, entry, position)
        elif key not in ("name", "seed", "extends"):
            assert isinstance(item, Mapping), f"{position}: nobody knows what {key} is; say `part of STAGE`"
            check_stage(key, item, position)


@pytest.fixture(autouse=True)
def _forgotten(tmp_path: Path) -> Iterator[None]:
    """Modules of the page are forgotten after it, since other tests have some of the same names."""
    yield
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language == "yaml"], ids=lambda block: block.place
)
def test_yaml_is_what_the_schemas_read(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in EXAMPLES.glob("own_*/my_*"):
        shutil.copytree(package, tmp_path / package.name, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    for value in read(block.text):
        check(value, block)
        if {"name", "stages"} <= set(value):
            for name in ("chats.csv", "logs.jsonl", "math.jsonl", "support.jsonl", "agent.jsonl"):
                (tmp_path / name).touch()
            (tmp_path / "logs").mkdir()
            (tmp_path / "page.yaml").write_text(block.text)
            assert load("page.yaml").nodes


@pytest.mark.parametrize(
    "block", [block for block in BLOCKS if block.language in ("json", "jsonl")], ids=lambda block: block.place
)
def test_json_is_json(block: Block) -> None:
    """A part of an object, or a file of lines."""
    lines = block.language == "jsonl" or block.file.endswith(".jsonl")
    texts = block.text.splitlines() if lines else [f"{{{block.text}}}"]
    assert all(json.loads(text) for text in texts)


def originals(block: Block) -> list[Path]:
    """Files of that name in the examples that the page names."""
    page = (ROOT / block.page).read_text()
    return [
        path for path in EXAMPLES.glob(f"*/{block.file}") if f"examples/{path.relative_to(EXAMPLES).parts[0]}" in page
    ]


SHOWN = [block for block in BLOCKS if block.file and originals(block)]


@pytest.mark.parametrize("block", SHOWN, ids=lambda block: block.place)
def test_files_are_those_of_the_examples(block: Block) -> None:
    texts = [path.read_text() for path in originals(block)]
    assert any(block.text.strip() in text for text in texts), f"{block.place} shows another {block.file}"


@pytest.mark.parametrize("block", [block for block in of("python") if block.file], ids=lambda block: block.place)
def test_python_files_are_shown_from_somewhere_or_compile(block: Block) -> None:
    assert block in SHOWN or compile(block.text, block.file, "exec")


INTERFACES = [block for block in BLOCKS if block.says("interface ")]


@pytest.mark.parametrize("block", INTERFACES, ids=lambda block: block.place)
def test_interfaces_are_those_of_the_code(block: Block) -> None:
    module = importlib.import_module(block.says("interface "))
    known: Any = None
    for line in block.text.splitlines():
        if named := re.match(r"class (\w+)", line):
            known = getattr(module, named[1])
        elif method := re.match(r" +(?:async )?def (\w+)\((.*?)\)", line):
            real = list(inspect.signature(getattr(known, method[1])).parameters)
            shown = [word.partition("=")[0].partition(":")[0].strip() for word in method[2].split(",")]
            assert shown == real or set(shown) - {"*", "..."} <= set(real), f"{block.place}: {method[1]}{tuple(real)}"
        elif attribute := re.match(r" +(\w+): ", line):
            names = {name for base in known.__mro__ for name in getattr(base, "__annotations__", {})}
            assert attribute[1] in names | set(dir(known)), f"{block.place}: {known.__name__} has no {attribute[1]}"
    assert known, block.place
