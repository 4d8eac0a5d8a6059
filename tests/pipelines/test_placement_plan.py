"""`plan --placement`: what runs where, the memory it needs, and what is refused. Models are configs without weights."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from fake_machines import fake_gpus
from recording import policy_for_tests
from shapes import LLAMA_70B, QWEN_7B, model_folder
from typer.testing import CliRunner

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.flows.cli import app
from agentrl.pipelines.file import readiness
from agentrl.pipelines.file.load import load
from agentrl.pipelines.file.problems import SpecError
from agentrl.pipelines.plan.placement import Placement, place
from agentrl.pipelines.plan.plan import make_plan
from agentrl.schemas import installation

ONE_NODE, MANY = "cluster/dense-8b", "cluster/dense-70b"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """With the tokenizer of a tiny model, whose chat template a plan reads."""
    folder = tmp_path_factory.mktemp("models")
    folders = {ONE_NODE: model_folder(folder / "7b", QWEN_7B), MANY: model_folder(folder / "70b", LLAMA_70B)}
    for path in folders.values():
        policy_for_tests().tokenizer.save_pretrained(path)
    return folders


def placed(name: str, models: dict[str, Path], *settings: str) -> Placement:
    return place(load(name, settings=[f"stages.warm.with.model.path={models[name]}", *settings]))


def rows(placement: Placement, stage: str) -> dict[str, dict[str, Any]]:
    return {row.role: row.to_json() for row in placement.rows if row.stage == stage}


def test_the_files_for_clusters_fit_their_machines(models: dict[str, Path]) -> None:
    item, many = (placed(name, models) for name in (ONE_NODE, MANY))
    assert (item.problems, item.unknown, many.problems, many.unknown) == ([], [], [], [])
    ranks = rows(item, "warm")["rank"]
    assert (ranks["processes"], ranks["nodes"], ranks["gpus_each"]) == (8, 1, 1)
    assert 16 * 7.6e9 / 8 / 2**30 < ranks["gib"] < 80
    servers = rows(item, "sample")["vLLM server"]
    assert (servers["processes"], servers["gpus_each"], servers["gib"]) == (8, 1, pytest.approx(72, abs=0.2))
    assert rows(item, "sample")["stage (probe)"]["gpus_each"] == 0
    ranks = rows(many, "star")["rank"]
    assert (ranks["processes"], ranks["nodes"]) == (32, 4)
    servers = rows(many, "measured")["vLLM server"]
    assert (servers["processes"], servers["nodes"], servers["gpus_each"]) == (4, 4, 8)


@pytest.mark.slow
def test_the_command_prints_it_and_refuses_what_cannot_fit(models: dict[str, Path], tmp_path: Path) -> None:
    given = [
        "--placement",
        "--store",
        str(tmp_path / "store"),
        "--set",
        f"stages.warm.with.model.path={models[ONE_NODE]}",
    ]
    done = CliRunner().invoke(app, ["plan", ONE_NODE, *given])
    assert done.exit_code == 0, done.output
    assert "rank" in done.output
    assert "vLLM server" in done.output
    done = CliRunner().invoke(app, ["plan", ONE_NODE, *given, "--json", "--set", "execution.gpu_gib=24"])
    assert done.exit_code == 2
    printed = json.loads(done.output)
    assert printed["placement"]
    [warm] = [problem for problem in printed["problems"] if problem.startswith("stage warm:")]
    assert "a rank needs" in warm
    assert "of a GPU of 24 GiB" in warm
    assert "it fits with" in warm


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        (ONE_NODE, ["stages.warm.with.deepspeed=null"], "a stage needs .* it fits with deepspeed: {zero: 3}"),
        (ONE_NODE, ["stages.warm.with.deepspeed.zero=0"], "it fits with deepspeed: {zero: 3}"),
        (ONE_NODE, ["stages.sample.with.engine.servers=9"], "its ranks and servers need 9 GPUs, and 8 are reserved"),
        (ONE_NODE, ["stages.warm.with.deepspeed.processes=16"], "deepspeed.processes is 16, and each machine has 8"),
        (MANY, ["stages.sample.with.engine.tensor_parallel=1"], "set engine.tensor_parallel: 2"),
        (
            MANY,
            ["stages.warm.with.optimizer.lora=null", "stages.warm.execution.gpus=4"],
            "a rank needs .* it fits with optimizer.lora",
        ),
        (
            ONE_NODE,
            ["stages.sample.with.sampling.max_tokens=131072"],
            "stage star: a rank needs .* activations .* it fits with deepspeed.sequence_parallel: 2",
        ),
        (
            ONE_NODE,
            ["stages.measured.with.engine=null", "stages.measured.with.max_tokens=null"],
            "KV cache .* set max_tokens or engine.rows lower",
        ),
    ],
)
def test_what_cannot_fit_is_refused_with_what_would(
    name: str, change: list[str], says: str, models: dict[str, Path]
) -> None:
    problems = placed(name, models, *change).problems
    assert any(re.search(says, problem) for problem in problems), problems


LONG = "stages.warm.with.optimizer.micro_tokens=131072"


def test_memory_follows_precision_length_and_the_models_that_lie_beside(models: dict[str, Path]) -> None:
    usual = rows(placed(ONE_NODE, models), "warm")["rank"]
    longer = rows(placed(ONE_NODE, models, "stages.warm.with.optimizer.micro_tokens=32768"), "warm")["rank"]
    assert longer["parts_gib"]["activations"] > 2 * usual["parts_gib"]["activations"]
    single = rows(placed(ONE_NODE, models, "stages.warm.with.optimizer.precision=float32"), "warm")["rank"]
    assert single["parts_gib"]["activations"] != usual["parts_gib"]["activations"]
    split = rows(placed(ONE_NODE, models, LONG, "stages.warm.with.deepspeed.sequence_parallel=4"), "warm")["rank"]
    whole = rows(placed(ONE_NODE, models, LONG), "warm")["rank"]
    assert split["parts_gib"]["activations"] < 0.35 * whole["parts_gib"]["activations"], "but for copies of weights"
    assert split["parts_gib"]["weights"] == whole["parts_gib"]["weights"]


def test_an_engine_beside_ranks_samples_in_their_precision(models: dict[str, Path], tmp_path: Path) -> None:
    def beside(precision: str) -> dict[str, float]:
        write_spec(
            tmp_path,
            f"m: {{uses: model.import, with: {{model: {{path: {models[ONE_NODE]}}}}}}}",
            "n: {uses: train.grpo, inputs: {tasks: t.train, model: m}, with: {deepspeed: {zero: 2}, "
            f"optimizer: {{precision: {precision}}}}}, execution: {{gpus: 4}}}}",
        )
        parts: dict[str, float] = rows(place(load(str(tmp_path / "p.yaml"))), "n")["stage"]["parts_gib"]
        return parts

    rounded, single = beside("bfloat16"), beside("float32")
    assert rounded["weights"] == single["weights"], "those of float32, which are trained"
    assert rounded["KV cache"] == pytest.approx(single["KV cache"] / 2)
    assert 0.3 * single["weights"] < rounded["weights in bfloat16"] <= 0.5 * single["weights"]
    assert "weights in bfloat16" not in single


@pytest.mark.slow
def test_where_it_runs_is_in_no_fingerprint(models: dict[str, Path], tmp_path: Path) -> None:
    def prints(*settings: str) -> dict[str, str]:
        pipeline = load(MANY, settings=[f"stages.warm.with.model.path={models[MANY]}", *settings])
        plan = make_plan(pipeline, Catalog(tmp_path / "store"), str(tmp_path / "store"))
        return {
            name: json.dumps(step.ingredients.model_dump(mode="json")["config"]) for name, step in plan.steps.items()
        }

    other = ["stages.warm.execution.nodes=8", "stages.warm.execution.gpus=4", "execution.gpu_gib=40"]
    other += ["stages.sample.with.engine.tensor_parallel=4", "stages.sample.with.engine.servers=9"]
    assert prints() == prints(*other)
    assert prints() != prints("stages.sample.with.engine.tolerance=0.01"), "what changes a result is"


DEMONSTRATED = """
name: p
stages:
  t: {uses: tasks.generate, with: {env: lookup, train: 2, dev: 1, heldout: 1}}
  e: {uses: trajectories.synthesize, inputs: {tasks: t.train}}
"""


def write_spec(folder: Path, *stages: str) -> None:
    """Write ``p.yaml``: demonstrations, and the lines of what is done with them."""
    (folder / "p.yaml").write_text(DEMONSTRATED + "".join(f"  {line}\n" for line in stages))


@pytest.mark.parametrize(
    ("execution", "config", "says"),
    [
        ("{launcher: hostfile}", "", "belong together"),
        ("{hostfile: hosts}", "", "belong together"),
        ("{launcher: hostfile, hostfile: nowhere}", "deepspeed: {}", "nowhere cannot be read"),
        ("{nodes: 2}", "deepspeed: {}", "needs launcher: ray, slurm or hostfile, not local"),
        ("{launcher: external}", "deepspeed: {}", "ranks have no address"),
        ("{launcher: external}", "", "starts no other processes"),
        ("{launcher: pbs}", "", "'local', 'hostfile', 'ray', 'slurm' or 'external'"),
    ],
)
def test_launchers_that_cannot_work_are_refused_when_the_file_is_read(
    execution: str, config: str, says: str, folder: Path
) -> None:
    trained = f"uses: train.sft, inputs: {{trajectories: e}}, with: {{model: {{init: tiny}}, {config}}}"
    write_spec(folder, f"s: {{{trained}, execution: {execution}}}")
    with pytest.raises(SpecError, match=says):
        load("p.yaml")


@pytest.mark.parametrize(
    "execution", ["{launcher: local, gpus: 1, gpu_gib: 80}", "{launcher: ray, gpus: 1, gpu_gib: 80}"]
)
def test_a_machine_without_the_packages_of_ranks_places_them(
    execution: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where ranks will run is asked on another machine, which has neither DeepSpeed nor Ray."""
    trained = "uses: train.sft, inputs: {trajectories: e}, with: {model: {init: tiny}, deepspeed: {zero: 2}}"
    write_spec(folder, f"s: {{{trained}, execution: {execution}}}")
    monkeypatch.setattr(readiness, "is_installed", lambda package: False)
    monkeypatch.setattr(installation, "is_installed", lambda package: False)
    refused = CliRunner().invoke(app, ["plan", "p.yaml"])
    assert refused.exit_code == 2
    assert "needs the package deepspeed, which is not installed" in refused.output
    assert ("ray is not installed" in refused.output) == ("ray" in execution)
    done = CliRunner().invoke(app, ["plan", "p.yaml", "--placement", "--json"])
    assert done.exit_code == 0, done.output
    assert [(row["stage"], row["role"]) for row in json.loads(done.output)["placement"]] == [("s", "rank")]


SPLIT = """
name: p
stages:
  t: {uses: tasks.generate, with: {env: lookup, train: 2, dev: 1, heldout: 1}}
  e: {uses: trajectories.synthesize, inputs: {tasks: t.train}}
  s: {uses: train.sft, inputs: {trajectories: e}, with: {model: {MODEL}, deepspeed: {SPREAD}}, execution: {EXECUTION}}
  n: {uses: train.sft, inputs: {trajectories: e, model: s}, with: {deepspeed: {SPREAD}}, execution: {EXECUTION}}
"""


@pytest.mark.parametrize(
    ("spread", "execution", "model", "says"),
    [
        ("processes: 3, sequence_parallel: 2", "", "init: tiny", "sequence_parallel: 2 does not divide the 3 ranks"),
        ("sequence_parallel: 2", "", "init: tiny", "sequence_parallel: 2 does not divide the 1 ranks"),
        ("sequence_parallel: 3", "pool: p, gpus: 8", "init: tiny", "sequence_parallel: 3 does not divide the 8 ranks"),
        ("processes: 3, sequence_parallel: 3", "", "init: tiny", "3 ranks cannot share the model's 4 attention heads"),
        (
            "processes: 8, sequence_parallel: 8",
            "",
            "path: PATH",
            "the model's 28 attention heads with 4 for keys",
        ),
        ("processes: 4, sequence_parallel: 4", "", "path: PATH", ""),
        ("sequence_parallel: 4", "pool: p, gpus: 8", "path: PATH", ""),
        ("processes: 4, sequence_parallel: 2", "", "init: tiny", ""),
    ],
)
def test_rows_are_split_over_ranks_that_share_machines_and_heads(
    spread: str,
    execution: str,
    model: str,
    says: str,
    models: dict[str, Path],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    given = {"{SPREAD}": f"{{{spread}}}", "{EXECUTION}": f"{{{execution}}}", "{MODEL}": f"{{{model}}}"}
    text = SPLIT
    for name, value in given.items():
        text = text.replace(name, value)
    (folder / "p.yaml").write_text(text.replace("PATH", str(models[ONE_NODE])))
    if not says:
        load("p.yaml")
        return
    with pytest.raises(SpecError, match=says) as refused:
        load("p.yaml")
    assert {problem.key[1] for problem in refused.value.problems} == {"s", "n"}


@pytest.mark.parametrize(
    ("launcher", "engine", "says"),
    [
        ("external", "{type: vllm}", "name those that run in with.engine.urls"),
        ("external", "{type: vllm, urls: ['http://10.0.0.1:8000']}", ""),
        ("ray, pool: p", "{type: vllm}", "set it to a shared one"),
        ("ray, pool: p", "{type: vllm, folder: /shared}", ""),
    ],
)
def test_servers_of_other_machines_need_addresses_or_a_shared_folder(
    launcher: str, engine: str, says: str, folder: Path
) -> None:
    sampled = f"uses: trajectories.sample, inputs: {{tasks: t.train, model: s}}, with: {{engine: {engine}}}"
    write_spec(
        folder,
        "s: {uses: train.sft, inputs: {trajectories: e}, with: {model: {init: tiny}}}",
        f"r: {{{sampled}, execution: {{launcher: {launcher}}}}}",
    )
    if says:
        with pytest.raises(SpecError, match=says):
            load("p.yaml")
    else:
        load("p.yaml")


def test_the_quickstart_is_placed_on_this_machine_and_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(tmp_path / "bin", 0, monkeypatch)
    result = place(load("quickstart"))
    assert (result.problems, result.unknown) == ([], [])
    assert {row.gpus for row in result.rows} == {0}
    assert {row.stage for row in result.rows} >= {"warm", "sample", "star", "grpo", "eval_grpo"}
    fake_gpus(tmp_path / "bin", 1, monkeypatch)
    result = place(load("quickstart", settings=["stages.warm.execution.gpus=1"]))
    assert result.unknown == [], "the driver says how large its GPU is"
