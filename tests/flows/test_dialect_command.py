"""``agentrl dialect`` prints what was tried, and a plan refuses a dialect that has no way with its tasks' tools."""

import json
from pathlib import Path

import pytest

from agentrl.chat.probes import PROBES
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.flows.cli import call
from agentrl.models.tiny import train_tokenizer
from agentrl.pipelines.file.load import load
from agentrl.pipelines.file.problems import SpecError
from agentrl.pipelines.plan.plan import make_plan

TURNS = "{{ '<|im_start|>' + m.role + '\\n' + m.content }}"
END = "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
LOSES = (
    "{% for m in messages %}" + TURNS + "{% for c in m.tool_calls or [] %}{{ '<|call|>' + c.function.name }}"
    "{% for v in c.function.arguments.values() %}{{ ' ' ~ v }}{% endfor %}{% endfor %}" + END
)
PLAIN = "{% for m in messages %}" + TURNS + END

PIPELINE = """
name: p
stages:
  tasks: {uses: tasks.generate, with: {env: %s, train: 4, dev: 0, heldout: 1}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}
  warm: {uses: train.sft, inputs: {trajectories: expert}, with: {steps: 1, model: {path: %s%s}}}
"""


def model(folder: Path, template: str) -> Path:
    tokenizer = train_tokenizer([template], 400)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return folder


def test_the_table_has_a_line_for_each_probe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = model(tmp_path / "base", PLAIN)
    assert call(["dialect", str(folder), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["dialect"] == "hermes (tools in the system message)"
    assert [probe["probe"] for probe in printed["probes"]] == list(PROBES)
    tools = next(probe for probe in printed["probes"] if probe["probe"] == "tools")
    assert tools["verdict"] == "ok"
    assert '"name": "find"' in tools["wrote"]
    assert call(["dialect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "came back" in text
    assert "remark: the chat template does not show the tools" in " ".join(text.split())


def test_what_does_not_come_back_ends_with_1_and_hermes_can_be_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model(tmp_path / "base", LOSES)
    assert call(["dialect", str(folder), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["cannot"]) == ["tools"]
    assert {probe["probe"]: probe["verdict"] for probe in printed["probes"]}["call"] == "differs"
    assert call(["dialect", str(folder), "--dialect", "hermes"]) == 0


@pytest.mark.parametrize(
    ("template", "code", "reason"),
    [("{{ raise_exception('not today') }}", 1, "not today"), (None, 2, "is not in the store")],
)
def test_a_model_that_has_no_dialect_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str | None, code: int, reason: str
) -> None:
    name = str(model(tmp_path / "base", template)) if template else "nothing"
    assert call(["dialect", name, "--store", str(tmp_path / "store")]) == code
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert reason in printed.err or "no artifact" in printed.err


def test_a_plan_refuses_a_dialect_that_has_no_way_with_the_tasks_tools(tmp_path: Path) -> None:
    folder = model(tmp_path / "base", LOSES)
    file = tmp_path / "p.yaml"
    store = str(tmp_path / "store")
    file.write_text(PIPELINE % ("lookup", folder, ""))
    with pytest.raises(SpecError, match=r"stage warm: with\.model\.path: tasks of lookup have tools, and the dialect"):
        make_plan(load(str(file)), Catalog(store), store)
    file.write_text(PIPELINE % ("lookup", folder, ", dialect: hermes"))
    assert len(make_plan(load(str(file)), Catalog(store), store).to_run) == 3
    file.write_text(PIPELINE % ("predict", folder, ""))  # its tasks have no tools
    assert len(make_plan(load(str(file)), Catalog(store), store).to_run) == 3
