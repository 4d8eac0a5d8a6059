"""An environment of one's own, beside the pipeline file, works as docs/tutorials/own-environment.md shows it."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import own_classes
import pytest
from own_classes import EXAMPLES, ROOT, copied

from agentrl.datastore import TrajectoryBuffer
from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.environments import ENVIRONMENT, load_environment
from agentrl.pipelines.file.load import load
from agentrl.pipelines.file.problems import SpecError
from agentrl.pipelines.plan.plan import Plan, Status, make_plan
from agentrl.pipelines.run.execute import job_of, perform

EXAMPLE = EXAMPLES / "own_environment"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with copied("own_environment", tmp_path) as folder:
        yield folder


def planned(folder: Path) -> Plan:
    small = ("stages.warm.with.steps=2", "stages.tasks.with.train=8", "stages.tasks.with.heldout=2")
    return own_classes.planned(folder / "pipeline.yaml", *small)


def test_the_example_runs_and_is_in_the_plan_and_the_fingerprint(folder: Path) -> None:
    plan = planned(folder)
    for step in plan.to_run:
        perform(job_of(step, plan, "r"))
    rows = TrajectoryBuffer(folder / "store").scan().select("stage", "env", "env_version").unique().collect()
    assert set(rows["stage"]) == {"expert", "eval"}
    assert set(rows["env"]) == {'my_shop.shop:Shop{"dearest": 2}'}, "rows name what their environment is found by"
    assert {step.status for step in planned(folder).steps.values()} == {Status.CACHED}
    source = folder / "my_shop" / "shop.py"
    source.write_text(source.read_text().replace("len(self.asked) <= 2", "len(self.asked) <= 3"))
    again = planned(folder)
    assert again.steps["expert"].reasons[0] == "code my_shop/shop.py changed"
    assert again.steps["eval"].reasons[0] == "code my_shop/shop.py changed"
    assert again.steps["tasks"].ingredients.choices == {"environment my_shop.shop:Shop": "1"}


def test_a_success_without_reward_components_is_the_reward(folder: Path) -> None:
    source = folder / "my_shop" / "shop.py"
    source.write_text(source.read_text().replace("return Score(right, components)", "return Score(right)"))
    plan = own_classes.planned(folder / "pipeline.yaml", "stages.tasks.with.train=8", "stages.expert.with.noise=0.5")
    for name in ("tasks", "expert"):
        perform(job_of(plan.steps[name], plan, "r"))
    rows = TrajectoryBuffer(folder / "store").scan().select("success", "reward").unique().collect()
    assert set(rows.rows()) == {(True, 1.0), (False, 0.0)}


def chosen(folder: Path, env: str) -> Path:
    """The example's pipeline with another environment."""
    text = (EXAMPLE / "pipeline.yaml").read_text()
    path = folder / "pipeline.yaml"
    path.write_text(text.replace('{type: "my_shop.shop:Shop", dearest: 2}', env))
    return path


def test_settings_reach_every_stage_and_an_edit_of_one_re_runs_it(folder: Path) -> None:
    settings = ["stages.warm.with.steps=1", "stages.tasks.with.train=4", "stages.tasks.with.heldout=2"]
    plan = make_plan(
        load(str(folder / "pipeline.yaml"), settings=settings), Catalog(folder / "store"), str(folder / "store")
    )
    for name in ("tasks", "expert"):
        perform(job_of(plan.steps[name], plan, "r"))
    buffer = TrajectoryBuffer(folder / "store")
    ids = buffer.scan().select("trajectory_id").collect()["trajectory_id"].to_list()
    answers = {m.content for row in buffer.get_many(ids) for m in row.messages if m.role == "tool"}
    assert answers == {"1", "2"}, "the tasks and the episodes of the expert have the setting"
    for value, status in (("2", Status.CACHED), ("3", Status.RUN)):
        again = load(str(folder / "pipeline.yaml"), settings=[*settings, f"stages.tasks.with.env.dearest={value}"])
        step = make_plan(again, Catalog(folder / "store"), str(folder / "store")).steps["tasks"]
        assert step.status is status
    assert list(step.reasons) == ["config env.dearest: 2 -> 3"]
    whole, part = ("{type: 'my_shop.shop:Shop', dearest: 9}", "'my_shop.shop:Shop'")
    explicit, implicit = (load(str(chosen(folder, env)), settings=settings) for env in (whole, part))
    assert explicit.nodes["tasks"].config == implicit.nodes["tasks"].config
    assert str(implicit.nodes["tasks"].config.env) == "my_shop.shop:Shop", "defaults are not written"


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ("{type: 'my_shop.shop:Shop', dearst: 3}", "with.env.dearst: unknown key 'dearst'; did you mean 'dearest'?"),
        (
            "{type: 'my_shop.shop:Shop', dearest: 0}",
            "with.env.dearest: Input should be greater than or equal to 1, not 0",
        ),
        ("{type: 'my_shop.shop:Shop', dearest: cheap}", "with.env.dearest: Input should be a valid integer"),
        ("{dearest: 3}", "with.env.type: is missing; it names the environment: "),
        ("{type: lookup, dearest: 3}", "unknown key 'dearest'; allowed: type"),
        ("{type: 'my_shop.shop:Basket'}", "'Basket' is not declared as environment"),
    ],
)
def test_wrong_settings_are_found_before_anything_runs(folder: Path, env: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        load(str(chosen(folder, env)))
    assert message in str(error.value)


SETTINGS = """
import pydantic
from my_shop.shop import Shop


class Prices(pydantic.BaseModel):
    model_config = {"extra": "forbid"}
    dearest: int = 4
    names: list[str] = ["apple"]


class ByConfig(Shop):
    def __init__(self, config: Prices) -> None:
        super().__init__(config.dearest)
        self.names = config.names


class ByKeyword(Shop):
    def __init__(self, *items: str) -> None:
        super().__init__(1)
"""


def test_settings_may_be_one_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my_shop" / "more.py").write_text(SETTINGS)
    monkeypatch.syspath_prepend(folder)
    shop = load_environment('my_shop.more:ByConfig{"names": ["fig"]}')
    assert (shop.dearest, shop.names) == (4, ["fig"])
    choice = ENVIRONMENT.read({"type": "my_shop.more:ByConfig", "dearest": 5})
    assert str(choice) == 'my_shop.more:ByConfig{"dearest": 5}'
    assert pickle.loads(pickle.dumps(choice)) == choice
    with pytest.raises(ValueError, match=r"a setting is a parameter with a name and a type"):
        load_environment("my_shop.more:ByKeyword")
    with pytest.raises(ValueError, match=r"its settings are no JSON"):
        load_environment("my_shop.more:ByConfig{names")
    with pytest.raises(ValueError, match=r"nams: unknown key 'nams'; did you mean 'names'"):
        load_environment('my_shop.more:ByConfig{"nams": 1}')


def test_what_the_docs_show_is_what_is_there() -> None:
    text = (ROOT / "docs/tutorials/own-environment.md").read_text()
    for file in ("my_shop/shop.py", "pipeline.yaml", "test_shop.py"):
        assert (EXAMPLE / file).read_text().strip() in text, f"docs/tutorials/own-environment.md shows another {file}"


def test_a_folder_of_the_users_own_may_be_called_like_one_of_ours_without_an_init(tmp_path: Path) -> None:
    (tmp_path / "schemas").mkdir()
    (tmp_path / "schemas" / "coins.py").write_text(
        "from agentrl.environments.lookup import LookupEnvironment\n\n\n"
        "class Coins(LookupEnvironment):\n    name = 'coins'\n    version = '1'\n"
    )
    (tmp_path / "mine.yaml").write_text(
        "name: mine\nstages:\n"
        "  tasks: {uses: tasks.generate, with: {env: 'schemas.coins:Coins', train: 4, dev: 1, heldout: 1}}\n"
    )
    command = [sys.executable, "-m", "agentrl.flows.cli", "run", "mine.yaml"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 stages ran" in done.stdout + done.stderr
