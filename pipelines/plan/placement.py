"""What a pipeline starts where, and whether it fits: processes, GPUs and memory of each stage, from its config and the
shape of its model alone. Nothing is started, and no weights are read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import psutil

from agentrl.pipelines.file.external import as_folder
from agentrl.pipelines.file.load import Node, ResolvedPipeline
from agentrl.pipelines.file.machines import gpu_bytes, machines
from agentrl.placement import memory
from agentrl.placement.base import LaunchError
from agentrl.placement.memory import FLOAT32, GIB, ModelShape, Need, TrainingPlan

FORWARD_TOKENS = 8192
"""Tokens of a pass that computes log-probs of stored rows."""

SHORT_PASS = 2048
"""Tokens of a micro batch that is proposed if a longer one does not fit."""


@dataclass(frozen=True)
class Placed:
    """``count`` equal processes of a stage, on ``gpus`` GPUs each; 0 is the machine's own memory. ``first`` says that
    it shares the stage's first GPU with others."""

    stage: str
    role: str
    count: int
    nodes: int
    gpus: int
    need: Need
    first: bool = False
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        parts = {name: memory.rounded(size) for name, size in self.need.parts.items() if size}
        return {
            "stage": self.stage,
            "role": self.role,
            "processes": self.count,
            "nodes": self.nodes,
            "gpus_each": self.gpus,
            "gib": memory.rounded(self.need.total),
            "parts_gib": parts,
            "host_gib": memory.rounded(self.need.host),
            "remarks": list(self.remarks),
        }


@dataclass
class Placement:
    """Of a whole pipeline. ``problems`` say what cannot work, and what to change."""

    rows: list[Placed] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    """Stages whose model is not known, or whose GPUs nobody described."""


def place(pipeline: ResolvedPipeline, trace: bool = False) -> Placement:
    """Processes, GPUs and memory of every stage of a pipeline that has a model. With ``trace``, what a stage that
    trains holds is that of a trace of its step, not of the formulas."""
    placement = Placement()
    for node in pipeline.nodes.values():
        try:
            model = _model(pipeline, node)
        except ValueError as error:
            placement.unknown.append(f"stage {node.name}: {error}")
            continue
        if model is None:
            continue
        try:
            stage = _Stage(node, model, _length(pipeline, node), trace)
            rows = stage.rows()
        except (LaunchError, ValueError) as error:
            placement.problems.append(f"stage {node.name}: {error}")
            continue
        placement.rows += rows
        placement.problems += stage.misfits(rows)
        placement.unknown += stage.unknown()
    return placement


@dataclass(frozen=True)
class _Model:
    """That of a stage: its config of transformers, its shape, and whether the stage before saved it in float32."""

    config: Any
    shape: ModelShape
    ours: bool


def _model(pipeline: ResolvedPipeline, node: Node) -> _Model | None:
    """The model of a stage; None if it has none."""
    config = getattr(node.config, "model", None)
    path, init = getattr(config, "path", None), getattr(config, "init", None)
    if path:
        return _saved(str(path))
    if config is not None and init == "tiny":
        return _tiny(config.size)
    for edge in node.inputs.get("model", ()):
        if edge.stage in pipeline.nodes and (model := _model(pipeline, pipeline.nodes[edge.stage])):
            return replace(model, ours=True)
    return None


@cache
def _saved(path: str) -> _Model:
    config = memory.config_of(as_folder(path, weights=False))
    return _Model(config, memory.shape_of_config(config), ours=False)


@cache
def _tiny(size: Any) -> _Model:
    from agentrl.models.tiny import tiny_config

    config = tiny_config(size, size.vocabulary)
    return _Model(config, memory.shape_of_config(config), ours=True)


def _length(pipeline: ResolvedPipeline, node: Node) -> int | None:
    """The longest row that a stage samples or is given, as far as configs say."""
    own = getattr(node.config, "max_tokens", None) or getattr(
        getattr(node.config, "sampling", None), "max_tokens", None
    )
    if own:
        return int(own)
    names = [edge.stage for name in ("trajectories", "pairs") for edge in node.inputs.get(name, ())]
    before = [pipeline.nodes[name] for name in names if name in pipeline.nodes]
    lengths = [length_before for edge in before if (length_before := _length(pipeline, edge))]
    return max(lengths, default=None)


class _Stage:
    """One stage with a model."""

    def __init__(self, node: Node, model: _Model, length: int | None, traced: bool) -> None:
        self.node, self.config, self.execution = node, node.config, node.execution
        self.model, self.shape, self.ours = model.config, model.shape, model.ours
        self.length = length
        self.traced = traced
        self.untraced: str | None = None
        self.nodes, self.gpus = machines(node.execution)
        self.gpu = gpu_bytes(node.execution)

    # what runs

    def rows(self) -> list[Placed]:
        trains, spread = hasattr(self.config, "optimizer"), getattr(self.config, "deepspeed", None)
        engine = getattr(self.config, "engine", None)
        rows: list[Placed] = []
        if trains:
            rows.append(self.training(spread))
        if engine is not None and engine.type == "transformers":
            item = FLOAT32 if trains or engine.precision == "float32" else self.item()
            bfloat16 = self.plan().bfloat16 if trains else engine.precision == "bfloat16" and item == FLOAT32
            if spread is not None or not trains:  # else it samples with the model that is trained
                rows.append(self.placed("stage", 1, memory.scoring(self.shape, 8192, item), first=True))
            rows[-1].need.parts |= memory.sampled(self.shape, engine.rows, self.row_length(), item, bfloat16)
        if engine is not None and engine.type == "vllm":
            if not trains:
                need = memory.scoring(self.shape, 64, self.item())
                need.parts["folder for servers"] = need.parts["weights"]  # is written from a copy
                rows.append(Placed(self.node.name, "stage (probe)", 1, 1, 0, need))
            if not engine.urls:
                rows.append(self.servers(engine))
        if spread is not None and self.scores():
            need = memory.scoring(self.shape, FORWARD_TOKENS, FLOAT32)
            rows.append(self.placed("stage (reference)", 1, need, first=True))
        return rows

    def training(self, spread: Any) -> Placed:
        """The ranks, or the stage itself."""
        plan = self.plan()
        need = memory.training(self.shape, plan)
        remarks = self.trace(need, spread, plan) if self.traced else ()
        parts = plan.ranks if plan.zero == 3 else 1
        for what, copies in self.copies(bool(spread)).items():
            need.parts[what] = copies * FLOAT32 * self.shape.parameters / parts
        if spread is None:
            return self.placed("stage", 1, need, first=True, remarks=remarks)
        if self.gpus and self.ranks(spread) > self.gpus:
            raise LaunchError(
                f"deepspeed.processes is {self.ranks(spread)}, and each machine has {self.gpus} GPUs; leave it out"
            )
        return self.placed("rank", plan.ranks, need, remarks=remarks)

    def trace(self, need: Need, spread: Any, plan: TrainingPlan) -> tuple[str, ...]:
        """Put what a trace of the step shows in the place of what was calculated, and say both."""
        from agentrl.pipelines.plan.traces import traced_step

        optimizer, calculated = self.config.optimizer, need.total  # type: ignore[attr-defined]
        try:
            step = traced_step(self.model, optimizer, spread, plan.ranks, self.tokens(), self.length)
        except ValueError as error:
            self.untraced = str(error)
            return ()
        need.parts = {f"traced {step.phase}": step.peaks[step.phase], "overhead": memory.OVERHEAD}
        others = [f"{phase} {memory.rounded(size)}" for phase, size in step.peaks.items() if phase != step.phase]
        exchanges = [f"{name} {calls} x, {size / GIB:.2f} GiB" for name, (calls, size) in sorted(step.moved.items())]
        exchanged = (f"a step exchanges {', '.join(exchanges)}",) if exchanges else ()
        ahead = (f"gathers ahead {step.ahead['forward']} x forward, {step.ahead['backward']} x backward",)
        sharded = ahead if spread and spread.zero == 3 else ()
        return (", ".join(others), f"calculated {memory.rounded(calculated)}", *exchanged, *sharded)

    def placed(self, role: str, count: int, need: Need, first: bool = False, remarks: tuple[str, ...] = ()) -> Placed:
        nodes = self.nodes if role == "rank" else 1
        trains = role in ("rank", "stage") and hasattr(self.config, "optimizer")
        passes = (f"passes of {self.tokens()} tokens",) if trains else ()
        return Placed(self.node.name, role, count, nodes, int(self.gpus > 0), need, first, (*passes, *remarks))

    def servers(self, engine: Any) -> Placed:
        item = {"auto": 2, "bfloat16": 2, "float32": 4}[engine.dtype]
        split = engine.tensor_parallel if self.gpus else 1
        length = engine.context or self.row_length()
        need = memory.serving(self.shape, split, length, item, self.gpu)
        of_sequence = memory.kv_bytes(self.shape, split, length, item)
        room = int(need.parts["KV cache"] // of_sequence)
        remark = f"cache of {room} rows of {length} tokens"
        gpus = split if self.gpus else 0
        nodes = min(self.nodes, engine.servers)
        return Placed(self.node.name, "vLLM server", engine.servers, nodes, gpus, need, False, (remark,))

    def ranks(self, spread: Any) -> int:
        return int(spread.ranks(self.gpus))

    def scores(self) -> bool:
        """Whether the stage's own process computes log-probs of a reference before its ranks train."""
        name = self.node.stage.name
        objective = getattr(self.config, "objective", None)
        return name in ("train.dpo", "train.kto", "train.offline") or bool(getattr(objective, "reference", False))

    def copies(self, on_ranks: bool) -> dict[str, float]:
        """Models beside the one that is trained, in copies of its weights: see :mod:`agentrl.online.models`."""
        algorithm, copies = getattr(self.config, "algorithm", None), dict[str, float]()
        if "iterations" not in type(self.config).model_fields:
            return copies
        if getattr(self.config, "max_staleness", 0) and not on_ranks:
            copies["sampler"] = 1
        if getattr(algorithm, "kl", None) and not self.config.optimizer.lora:  # type: ignore[attr-defined]
            copies["reference"] = 1
        if getattr(algorithm, "needs_critic", False):
            copies["critic"] = 4  # weights, gradients, two moments
        return copies

    def tokens(self) -> int:
        return max(self.config.optimizer.micro_tokens, self.length or 0)  # type: ignore[attr-defined]

    def row_length(self) -> int:
        return self.length or self.shape.context or FORWARD_TOKENS

    def item(self) -> int:
        return FLOAT32 if self.ours else self.shape.item

    def plan(self) -> TrainingPlan:
        optimizer, spread = self.config.optimizer, getattr(self.config, "deepspeed", None)  # type: ignore[attr-defined]
        return TrainingPlan(
            tokens=_share(self.tokens(), spread.sequence_parallel if spread else 1),
            bfloat16=optimizer.precision == "bfloat16",
            checkpointing=optimizer.gradient_checkpointing,
            lora_rank=optimizer.lora.rank if optimizer.lora else None,
            quantized=optimizer.quantized,
            zero=spread.zero if spread else 0,
            ranks=self.ranks(spread) * self.nodes if spread else 0,
            offload_optimizer=bool(spread and spread.offload_optimizer),
            offload_parameters=bool(spread and spread.offload_parameters),
            in_bfloat16=bool(spread and spread.communication == "bfloat16"),
        )

    # what fits

    def misfits(self, rows: list[Placed]) -> Iterator[str]:
        on_gpus = [row for row in rows if row.gpus]
        wanted = sum(row.count * row.gpus for row in on_gpus if row.role in ("vLLM server", "rank"))
        if wanted > self.gpus * self.nodes:
            yield (
                f"stage {self.node.name}: its ranks and servers need {wanted} GPUs, and {self.gpus * self.nodes} are "
                "reserved; set engine.servers, engine.tensor_parallel or deepspeed.processes lower, or execution.gpus "
                "higher"
            )
        if self.gpu is not None and on_gpus:
            yield from self._too_large(on_gpus, wanted)
        if not self.node.execution.pool and self.node.execution.launcher == "local":
            yield from self._beyond_machine(rows)

    def _too_large(self, rows: list[Placed], taken: int) -> Iterator[str]:
        assert self.gpu is not None
        size = f"{self.gpu / GIB:.0f} GiB"
        for row in rows:
            if row.need.total > self.gpu:
                yield f"{self._says(row, size)}; {self._remedy(row)}"
                return
        # ranks and servers take the last GPUs, and the stage itself the first, which it shares if all are taken
        own = [row for row in rows if row.first]
        others = [row for row in rows if not row.first] if taken >= self.gpus * self.nodes else []
        largest = max(others, key=lambda row: row.need.total, default=None)
        together = [*own, largest] if largest else own
        total = sum(row.need.total for row in together)
        if total > self.gpu:
            names = " and ".join(f"{row.role} ({memory.rounded(row.need.total)} GiB)" for row in together)
            yield (
                f"stage {self.node.name}: the first GPU of {size} holds {names}, {memory.rounded(total)} GiB together; "
                "leave it to the stage with one rank or server less, or let more machines share the ranks "
                "(execution.nodes)"
            )

    def _says(self, row: Placed, size: str) -> str:
        largest = max(row.need.parts, key=lambda name: row.need.parts[name])
        return (
            f"stage {self.node.name}: a {row.role} needs {memory.rounded(row.need.total)} GiB of a GPU of {size}, most "
            f"of it for {largest} ({memory.rounded(row.need.parts[largest])} GiB)"
        )

    def _remedy(self, row: Placed) -> str:
        """What to set so that it fits, from what costs the least time."""
        assert self.gpu is not None
        if row.role == "vLLM server":
            for split in (2, 4, 8, 16):
                need = memory.serving(self.shape, split, self.row_length(), 2, None)
                if need.total <= memory.VLLM_SHARE * self.gpu and self.shape.heads % split == 0:
                    return f"set engine.tensor_parallel: {split}"
            return "set engine.context lower, or take a smaller model"
        if row.role == "stage (reference)" or not hasattr(self.config, "optimizer"):
            if row.need.parts.get("KV cache", 0) > self.gpu / 2:
                return "set max_tokens or engine.rows lower, or engine: {type: vllm}, whose cache has a bound"
            return (
                "the stage's own process holds the whole model: take a smaller one, or engine: {type: vllm} to sample"
            )
        plan, extra = self.plan(), row.need.total - memory.training(self.shape, self.plan()).total
        ways, remedies = list(self._ways(plan)), list[str]()
        for text, change in ways:  # one change alone, then several
            if memory.training(self.shape, change(plan)).total + extra <= self.gpu:
                return f"it fits with {text}"
        for text, change in ways:
            plan = change(plan)
            remedies.append(text)
            if memory.training(self.shape, plan).total + extra <= self.gpu:
                return f"it fits with {', '.join(remedies)}"
        return "take a smaller model"

    def _ways(self, plan: TrainingPlan) -> Iterator[tuple[str, Callable[[TrainingPlan], TrainingPlan]]]:
        if not plan.checkpointing:
            yield "optimizer.gradient_checkpointing: true", lambda changed: replace(changed, checkpointing=True)
        if plan.tokens > SHORT_PASS >= (self.length or 0):
            yield f"optimizer.micro_tokens: {SHORT_PASS}", lambda changed: replace(changed, tokens=SHORT_PASS)
        most = max(1, self.gpus) * self.nodes
        if "deepspeed" in type(self.config).model_fields and (plan.zero < 3 or plan.ranks < most):
            yield "deepspeed: {zero: 3}", lambda changed: replace(changed, zero=3, ranks=most)
        longest = plan.tokens
        for share in (2, 4, 8) if plan.ranks > 1 and longest == self.tokens() else ():
            if self.ranks(self.config.deepspeed) % share == 0 and self.shape.splits(share):  # type: ignore[attr-defined]
                tokens = _share(longest, share)
                yield f"deepspeed.sequence_parallel: {share}", lambda changed, n=tokens: replace(changed, tokens=n)  # type: ignore[misc]
        if not plan.lora_rank:
            yield "optimizer.lora: {rank: 16}", lambda changed: replace(changed, lora_rank=16)
        if "deepspeed" in type(self.config).model_fields:
            for more in (2, 4, 8, 16):
                yield f"execution.nodes: {self.nodes * more}", lambda changed, n=most * more: replace(changed, ranks=n)  # type: ignore[misc]

    def _beyond_machine(self, rows: list[Placed]) -> Iterator[str]:
        """On a machine without GPUs all lies in its own memory."""
        on_host = sum(row.count * (row.need.host + (0 if row.gpus else row.need.total)) for row in rows)
        there = psutil.virtual_memory().total
        if on_host > there:
            yield (
                f"stage {self.node.name}: its processes need {memory.rounded(on_host)} GiB of this machine's memory, "
                f"which has {there / GIB:.0f} GiB; set execution.gpus, or take a smaller model"
            )

    def unknown(self) -> Iterator[str]:
        if self.gpus and self.gpu is None:
            yield f"stage {self.node.name}: the memory of its GPUs is not known; set execution.gpu_gib"
        if self.untraced:
            yield f"stage {self.node.name}: its step was not traced, and its memory is calculated: {self.untraced}"


def _share(tokens: int, ranks: int) -> int:
    """Tokens of each of so many ranks that compute a micro batch together."""
    return -(-tokens // ranks)
