"""Classes of the user's own, outside the repository: found, checked, fingerprinted, run and replayed."""

import textwrap
from pathlib import Path

import pytest
from own_classes import PIPELINE, forget, run
from test_choices import changed, edit, own

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.file.load import ResolvedPipeline, load
from agentrl.pipelines.file.problems import SpecError
from agentrl.pipelines.replay.settings import ReplayError
from agentrl.pipelines.replay.step import replay
from agentrl.pipelines.results.lineage import find_artifact

CLASSES = """
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.policy_gradient import AdvantageEstimator, Advantages, PolicyGradient
from agentrl.algorithms.preference import Preference
from agentrl.rewards.component import Reward
from my_helper import twice


class Better(GRPO):
    scale: float = 1.0

    def advantages(self, step):
        return Advantages([[twice(self.scale) * token for token in one] for one in super().advantages(step).tokens])


class Hinge(Preference):
    def pair_loss(self, chosen, rejected):
        return (1 - chosen + rejected).clamp(min=0)


class NoLoss(Preference):
    pass


class Wrong(PolicyGradient):
    def advantages(self, rollouts, groups):
        return rollouts


class Loud(Reward):
    def value(self, rollout, task):
        return 1.0


class Silent(AdvantageEstimator):
    def advantages(self, step):
        return Advantages([])


def function(step):
    return step


number = 3
"""


def write(folder: Path, choice: str = "algorithm: {type: 'my_classes:Better'}") -> Path:
    (folder / "my_classes.py").write_text(CLASSES)
    (folder / "my_helper.py").write_text("def twice(x):\n    return 2 * x\n")
    path = folder / "p.yaml"
    path.write_text(PIPELINE.replace("CHOICE", choice))
    return path


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("algorithm: {type: 'my_classes:Bettr'}", "rl.with.algorithm.type: module 'my_classes': 'Bettr' is not in it"),
        ("algorithm: {type: 'my_classes:Bettr'}", "did you mean 'Better'?"),
        ("algorithm: {type: 'my_clases:Better'}", "there is no such module beside the pipeline file"),
        ("algorithm: {type: 'my_classes:number'}", "is no algorithm: a class derived from agentrl.algorithms.policy"),
        ("algorithm: {type: 'my_classes:function'}", "'function' is not declared as algorithm (a class derived from"),
        ("algorithm: {type: 'my_classes:Hinge'}", "is no algorithm: a class derived from"),
        ("algorithm: {type: 'my_classes:Wrong'}", "advantages(self, rollouts, groups) must be callable as adv"),
        ("algorithm: {type: 'my_classes:Better', scal: 2}", "rl.with.algorithm.scal: unknown key 'scal'; did you mean"),
        ("algorithm: {type: 'my_classes:Better', scale: big}", "rl.with.algorithm.scale: Input should be a valid"),
        ("algorithm: {type: 'my_classes:Better', kl: {coeff: 1}}", "unknown key 'coeff'; did you mean 'coef'?"),
        ("algorithm: {type: 'my_classes:Better', kl: {estimator: k1}}", "k1 in the loss has no gradient"),
        ("algorithm: {type: grop}", "there is no algorithm 'grop'; did you mean 'grpo'?; ours: cispo"),
        ("algorithm: {scale: 2}", "rl.with.algorithm.type: is missing; it names the algorithm: cispo"),
        ("algorithm: {type: ppo, advantage: {type: 'my_classes:Silent'}}", "advantage: ppo makes its critic's targets"),
        ("algorithm: {type: grpo, advantage: {type: 'my_classes:Loud'}}", "is no advantage: a class derived from"),
        ("rewards: [{type: 'my_classes:Loud'}, {type: 'my_classes:Loud'}]", "two components are called 'Loud'"),
        ("algorithm: 'my_classes:Better', seeed: 1", "unknown key 'seeed'"),
        ("rewards: [{type: 'my_classes:Lou'}]", "rl.with.rewards.0.type: module 'my_classes': 'Lou' is not in its"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_choice_is_found_before_anything_runs(folder: Path, choice: str, message: str) -> None:
    with pytest.raises(SpecError) as error:
        load(str(write(folder, choice)))
    [problem] = error.value.problems
    assert f"{folder}/p.yaml:9: stages.rl.with" in str(problem)
    assert message in str(problem)


def test_a_loss_that_is_not_written_is_named(folder: Path) -> None:
    path = write(folder)
    edit(path, "name: p\nstages:", textwrap.dedent("""\
        name: p
        stages:
          pairs: {uses: pairs.agentq, inputs: {trajectories: expert}}
          hinge: {uses: train.preference, inputs: {pairs: pairs, model: warm}, with: {objective: "my_classes:Hinge"}}
          none: {uses: train.preference, inputs: {pairs: pairs, model: warm}, with: {objective: "my_classes:NoLoss"}}
    """).rstrip())  # fmt: skip
    with pytest.raises(SpecError) as error:
        load(str(path))
    [problem] = error.value.problems
    assert "p.yaml:5: stages.none.with.objective" in str(problem)
    assert "'my_classes:NoLoss' is no loss over pairs: it lacks pair_loss(self, chosen" in str(problem)


def own_of(path: Path) -> dict[str, str]:
    forget()
    pipeline: ResolvedPipeline = load(str(path))
    return own(pipeline)


def test_an_edit_concerns_exactly_what_uses_the_class(folder: Path) -> None:
    path = write(folder)
    before = own_of(path)
    edit(folder / "my_helper.py", "2 * x", "3 * x")
    after = own_of(path)
    assert changed(before, after) == {"rl"}, "a helper of the class counts"
    edit(folder / "my_classes.py", "1 - chosen", "2 - chosen")
    assert changed(after, own_of(path)) == set(), "another class of the same file does not"
    edit(path, "'my_classes:Better'", "'my_classes:Better', scale: 2")
    assert changed(after, own_of(path)) == {"rl"}
    path.write_text(PIPELINE.replace("CHOICE", "rewards: [{type: 'my_classes:Loud'}]"))
    before = own_of(path)
    edit(folder / "my_classes.py", "return 1.0", "return 2.0")
    assert changed(before, own_of(path)) == {"rl"}


def test_an_advantage_of_the_wrong_shape_ends_the_stage_with_its_name(folder: Path) -> None:
    path = write(folder, "algorithm: {type: grpo, advantage: 'my_classes:Silent'}")
    with pytest.raises(ValueError, match="my_classes:Silent gave advantages of 0 rollouts; there are 4"):
        run(path)


def test_a_class_of_ones_own_cannot_be_replayed_without_its_module(folder: Path) -> None:
    path = write(folder)
    run(path)
    catalog = Catalog(str(folder / "store"))
    manifest = find_artifact(catalog, "rl")
    forget()
    (folder / "my_classes.py").unlink()
    with pytest.raises(ReplayError, match=r"algorithm.type: module 'my_classes'.*replay in the folder where it ran"):
        replay(catalog, manifest, 0)
