"""How far shards are: what a run's record keeps of them, which ``agentrl status`` and the viewer show."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

State = Literal["waiting", "running", "slow", "set aside"]


class ShardTry(BaseModel):
    """A shard that is not done. ``waiting``: it was given to the engine, and no worker has begun with it; ``slow``: it
    takes much longer than others, so that it is started once more if nothing else is left to start, and then is there
    twice. ``worker`` is empty if there is none, ``seconds`` None. ``problem`` says in one line why it was set aside."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shard: str
    state: State
    worker: str = ""
    seconds: float | None = None
    problem: str = ""

    def __str__(self) -> str:
        worker = f" on {self.worker}" if self.worker else ""
        took = "" if self.seconds is None else f" for {self.seconds:.0f} s"
        return f"{self.shard!r}{worker}{f': {self.problem}' if self.problem else took}"


class ShardsNow(BaseModel):
    """What shards do besides those that are done: ``what`` is their step. ``counts`` has how many there are in each
    state, and ``tries`` the first of them: those that were set aside, then those that run longest. ``again``: how often
    a shard was made again. ``notice`` is what the engine has to say, as that nobody works in a pool."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: str
    counts: dict[State, int] = {}
    again: int = 0
    notice: str = ""
    tries: list[ShardTry] = []

    @property
    def aside(self) -> int:
        return self.counts.get("set aside", 0)

    def __str__(self) -> str:
        counts = [f"{number} {state}" for state, number in self.counts.items() if number]
        again = [f"{self.again} tried again"] if self.again else []
        return ", ".join(filter(None, [self.what, *counts, *again, self.notice]))
