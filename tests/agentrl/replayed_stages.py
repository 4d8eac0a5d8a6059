"""Every kind of training stage on a small store, whose steps are computed again; and other components of a reward."""

from pathlib import Path

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.pipelines.file.load import load
from agentrl.pipelines.plan.plan import make_plan
from agentrl.pipelines.run.execute import job_of, perform
from agentrl.rewards.component import Reward
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Trajectory

SPEC = """
name: small
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 6, dev: 2, heldout: 2}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}}
  sloppy: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}, with: {noise: 1.0}}
  # It learns two ways to act in each task, so that the rollouts of a group differ in reward.
  warm:
    uses: train.sft
    inputs: {trajectories: [expert, sloppy]}
    with: {model: {init: tiny, size: {layers: 3}}, steps: 50, batch: 6, optimizer: {lr: 5.0e-3, warmup: 10}}
  sample:
    uses: trajectories.sample
    inputs: {model: warm, tasks: tasks.train}
    with: {samples: 4, sampling: {max_turn_tokens: 24, max_tokens: 120}}
  adapted:
    uses: train.sft
    inputs: {trajectories: expert, model: warm}
    with: {steps: 3, batch: 4, optimizer: {lr: 1.0e-3, lora: {rank: 2, alpha: 4}}, template_weight: 0.5}
  pairs: {uses: pairs.agentq, inputs: {trajectories: sample}}
  dpo: {uses: train.dpo, inputs: {pairs: pairs, model: warm}, with: {steps: 3, batch: 2}}
  kto: {uses: train.kto, inputs: {trajectories: [sample], model: warm}, with: {steps: 2, batch: 4}}
  offline:
    uses: train.offline
    inputs: {trajectories: sample, model: warm}
    with: {steps: 2, batch: 4, observe: {tool: 0.2}, algorithm: {type: rloo, off_policy: {truncate: 2.0}}}
"""
LORA = ", lora: {rank: 2, alpha: 4}"
ONLINE = {
    "plain": "{type: grpo}",
    "low-rank": "{type: grpo}",
    "ppo": "{type: ppo, level: turn, kl: {where: reward, estimator: k1}}",
    "vapo": "{type: vapo, critic: {pretrain: 1}, per_level: true, off_policy: {vtrace: [1.0, 1.0]}}",
    "subgoal": "{type: grpo, credit: subgoal}\n      observe: {tool: 0.3}",
    "mixed": "{type: grpo, kl: {}}\n      replay: {share: 0.4, draw: priority, correction: {truncate: 2.0}}",
}
for name, algorithm in ONLINE.items():
    SPEC += f"""
  {name}:
    uses: train.online
    inputs: {{model: warm, tasks: tasks.train{", replay: sample" if name == "mixed" else ""}}}
    with:
      iterations: 2
      tasks: 6
      samples: 4
      updates: 2
      max_tokens: 120
      max_turn_tokens: 24
      optimizer: {{lr: 1.0e-3{LORA if name == "low-rank" else ""}}}
      algorithm: {algorithm}
"""
SPEC += """
  judged: {uses: evaluate.policy, inputs: {model: plain, tasks: tasks.dev}, with: {max_tokens: 120}}
  told: {uses: report.training, inputs: {evaluations: judged.results, metrics: [warm.metrics, plain.metrics]}}
"""


def store_of(folder: Path) -> Catalog:
    """A store in ``folder`` in which all stages were run."""
    (folder / "small.yaml").write_text(SPEC)
    store = Catalog(folder / "store")
    plan = make_plan(load(str(folder / "small.yaml")), store, str(folder / "store"))
    for step in plan.to_run:
        perform(job_of(step, plan, "test-run"))
    return store


class First(Reward):
    """Half a point for the first rollout of a group."""

    def value(self, rollout: Trajectory, task: Task) -> float:
        return float(rollout.sample_index == 0)


class Cart(Reward):
    def value(self, rollout: Trajectory, task: Task) -> float:
        raise RuntimeError("the cart is closed")
