"""One endpoint in front of many recorded episodes, each with a sampler of its own: a request goes to the episode whose
key it has. Nothing is written to a disk. It needs uvicorn."""

import asyncio
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from agentrl.engines.base import EngineError
from agentrl.recorder.episode import About, RecordedEpisode
from agentrl.recorder.episodes import Episodes
from agentrl.recorder.lines import Line, lines
from agentrl.recorder.listening import bound
from agentrl.recorder.recorder import Recorder, RecorderSettings
from agentrl.recorder.sampler import Sampler
from agentrl.recorder.turns import Turning
from agentrl.recorder.wire import ApiError, OverflowingError, Reply, TurnRequest
from agentrl.schemas.annotation import Annotation
from agentrl.schemas.trajectory import Trajectory

MODEL = "policy"
OVER = "episode_over"


class _NotStored:
    """The store of episodes whose rows are made by who plays them."""

    def stored(self, recording: str) -> set[str]:
        return set()

    def keep(self, recording: str, rows: list[Trajectory]) -> None:
        pass

    def annotate(self, annotations: list[Annotation]) -> None:
        pass


class Attended:
    """An episode under way, of at most ``turns`` turns. ``number`` orders episodes, and ``root`` names those that are
    likely to begin alike. ``trouble`` is what the last request came to, if it was not answered by a whole turn:
    ``refused`` for the number of turns, ``full`` for the tokens of a row, ``cut`` for the time of a turn, or
    ``engine``. ``error`` is the last one. ``on_failure`` is told of an engine's error as it comes."""

    def __init__(
        self, sampler: Sampler, number: int, root: str, turns: int, on_failure: Callable[[EngineError], None]
    ) -> None:
        self.key = f"run-{secrets.token_hex(24)}"
        self.turns, self.over, self.trouble = turns, False, ""
        self.error: BaseException | None = None
        episodes = Episodes(Path(os.devnull), _NotStored(), "", "")
        self.episode = RecordedEpisode("", number, About(group_id=root[:1000] or None), "", "", None, self.key)
        episodes.register(self.episode)
        settings = RecorderSettings(any_model=True, fixed_sampling=True, constrain=False)  # all is to be trained on
        self.recorder = Recorder(sampler, MODEL, episodes, settings)
        self._on_failure = on_failure

    @property
    def lines(self) -> list[Line]:
        """What was said so far."""
        return list(lines(self.episode.tree.turns))

    async def ask(self, asked: TurnRequest, digest: str, again: bool) -> Turning:
        """See :class:`agentrl.recorder.wire.Answerer`."""
        if self.over:
            raise ApiError(400, "the episode is over", OVER)
        if self.episode.turns >= self.turns and not again:
            self.trouble = "refused"
            raise ApiError(400, f"the episode is over: it has had its {self.turns} turns", OVER)
        reply = await self.recorder.ask(self.episode, asked, digest, again)
        assert reply.task is not None
        reply.task.add_done_callback(lambda task: self._done(reply, task))
        return reply

    def _done(self, reply: Turning, task: "asyncio.Task[object]") -> None:
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, OverflowingError):
            self.trouble, self.error = "full", error
        elif error is not None and isinstance(error.__cause__, EngineError):
            self.trouble, self.error = "engine", error.__cause__
            self._on_failure(error.__cause__)
        elif reply.turn is not None:
            self.trouble = {"length": "full", "cut": "cut"}.get(reply.turn.turn.stop, "")

    async def end(self) -> None:
        """No further turn is sampled."""
        self.over = True
        await self.recorder.cancel()
        for turn in self.episode.tree.turns:
            if turn.session is not None:
                turn.session.end()


class AgentDesk:
    """The endpoint of all episodes under way, at ``url`` and behind the socket ``door``. Use it on the event loop on
    which it was made."""

    model = MODEL

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.started = asyncio.create_task(self._start())
        self._by_key: dict[str, Attended] = {}
        self._by_episode: dict[RecordedEpisode, Attended] = {}

    async def _start(self) -> None:
        from agentrl.recorder.app import application  # which needs the extra serve
        from agentrl.recorder.server import server_of

        self._folder = Path(tempfile.mkdtemp(prefix="agentrl-desk-"))
        self._folder.chmod(0o711)
        self.door = self._folder / "door"
        behind_door = socket.socket(socket.AF_UNIX)
        behind_door.bind(str(self.door))
        self.door.chmod(0o666)  # who comes through has a key, as on the loopback
        listening = bound("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        self._sockets = [listening, behind_door]
        self._server = server_of(application(self))
        self._serving = asyncio.create_task(self._server.serve(self._sockets))

    async def stop(self) -> None:
        """Close the sockets."""
        await self.started
        self._server.should_exit = True
        [ended] = await asyncio.gather(self._serving, return_exceptions=True)
        if ended is not None:  # it was cancelled with all else on the loop
            await self._server.shutdown(self._sockets)
        shutil.rmtree(self._folder, ignore_errors=True)

    def admit(self, attended: Attended) -> None:
        self._by_key[attended.key] = self._by_episode[attended.episode] = attended

    def dismiss(self, attended: Attended) -> None:
        """Its key opens nothing from now on."""
        self._by_key.pop(attended.key, None)
        self._by_episode.pop(attended.episode, None)

    def place_of(self, key: str | None, episode: str | None) -> Attended:
        asking = self._by_key.get(key or "")
        if asking is None:
            raise ApiError(401, "the api key is not that of an episode under way", "invalid_api_key")
        return asking

    async def ask(self, addressed: Attended, asked: TurnRequest, digest: str, again: bool) -> Reply:
        return await addressed.ask(asked, digest, again)

    async def count(self, addressed: Attended, asked: TurnRequest) -> int:
        return await addressed.recorder.count(addressed.episode, asked)

    def received(self, reply: Reply) -> None:
        if attended := self._of(reply):
            attended.recorder.received(reply)

    async def left(self, reply: Reply) -> None:
        if attended := self._of(reply):
            await attended.recorder.left(reply)

    def _of(self, reply: Reply) -> Attended | None:
        assert isinstance(reply, Turning)
        return self._by_episode.get(reply.episode)
