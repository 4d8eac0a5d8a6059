"""Several servers behind one engine: where turns go, and what happens if a server fails. The servers here speak vLLM's
routes and fail on demand; real ones are in test_engine_vllm.py."""

import asyncio
import copy
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from architectures import qwen
from speaking import Speaking, settled, speaking, turn

from agentrl.engines.base import EngineError, Sampling, SchemaError, Weights
from agentrl.engines.blocking import blocking
from agentrl.engines.configs import VLLMConfig
from agentrl.engines.servers import Server
from agentrl.engines.vllm import VLLMEngine
from agentrl.engines.weights import shapes, write_folder
from agentrl.models.policy import Policy
from agentrl.placement.launcher import placed
from agentrl.schemas.pipeline import Execution


@pytest.fixture(scope="module")
def policy() -> Policy:
    return qwen()


@pytest.fixture
def servers(policy: Policy) -> Iterator[list[Speaking]]:
    with speaking(policy) as made:
        yield made


@pytest.fixture
def engine(policy: Policy, servers: list[Speaking]) -> Iterator[VLLMEngine]:
    made = VLLMEngine(policy, [Server(server.url) for server in servers])
    yield made
    blocking(made.close())


def test_sessions_of_one_root_stay_on_one_server_and_roots_are_spread(
    engine: VLLMEngine, servers: list[Speaking]
) -> None:
    async def ask() -> None:
        await asyncio.gather(*(turn(engine, f"group-{number // 4}") for number in range(32)))

    blocking(ask())
    roots = [len(server.asked) for server in servers]
    assert sum(roots) == 32
    assert min(roots) >= 8


@pytest.mark.parametrize("fault", [429, 500, "garbage", "half"])
def test_a_turn_that_a_server_fails_is_asked_of_another(
    engine: VLLMEngine, servers: list[Speaking], fault: int | str
) -> None:
    for server in servers:
        server.faults = [fault]

    async def ask() -> Any:
        made = await turn(engine)
        await settled(engine)
        return made

    with pytest.warns(
        UserWarning, match=r"the vLLM server .* failed, and gets no requests until it answers again: http"
    ):
        made = blocking(ask())
    assert (made.ids, made.stop) == ([7, 8, 2], "stop")
    assert sum(len(server.asked) for server in servers) >= 2


def test_a_schema_that_a_server_refuses_ends_its_turn_alone(engine: VLLMEngine, servers: list[Speaking]) -> None:
    for server in servers:
        server.faults = ["Grammar error: Invalid type: nonsense"]
    session = engine.open()
    session.observe([5, 6])
    with pytest.raises(SchemaError, match=r"^Grammar error: Invalid type: nonsense$"):
        blocking(engine.turn(session, Sampling(), stop=[2], seed=0, schema='{"type": "nonsense"}'))
    [asked] = [body for server in servers for body in server.asked]
    assert asked["sampling_params"]["structured_outputs"] == {"json": '{"type": "nonsense"}'}
    assert {replica.state for replica in engine.replicas} == {"serving"}, "no server has failed"


def test_a_server_that_always_fails_ends_in_an_error_that_says_so(engine: VLLMEngine, servers: list[Speaking]) -> None:
    for server in servers:
        server.faults = [500] * 20
    with pytest.raises(EngineError, match=r"requests failed one after the other; the last: .* answered 500"):
        blocking(turn(engine))


def test_a_turn_is_cut_at_its_time_limit_even_if_the_server_hangs(
    engine: VLLMEngine, servers: list[Speaking], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.engines.replicas.ANSWER_S", 0.2)
    for server in servers:
        server.faults = ["hang"]
        server.routes.append("/inference/v1/abort_requests")
    started = time.monotonic()
    made = blocking(turn(engine, time_limit=0.2))
    assert (made.ids, made.stop) == ([], "cut")
    assert time.monotonic() - started < 3


def test_a_server_that_was_started_again_gets_the_current_weights_before_it_serves(
    policy: Policy, engine: VLLMEngine, servers: list[Speaking]
) -> None:
    async def ask() -> None:
        await engine.load(Weights(3, policy.model))
        for server in servers:
            server.label, server.faults, server.loads = "default", [500], []  # as after a restart behind the same URL
        made = await turn(engine)
        assert [span.version for span in made.spans] == [3]
        await settled(engine)

    blocking(ask())
    again = [server for server in servers if server.asked and server.loads]
    assert again
    assert all(item.label == "3" for item in again)


def test_a_server_that_was_started_again_unnoticed_samples_nothing_with_the_weights_of_its_start(
    policy: Policy, engine: VLLMEngine, servers: list[Speaking]
) -> None:
    """It answers as if nothing had happened; only the label of its weights tells."""

    async def ask() -> None:
        for server in servers:
            server.label, server.loads = "default", []
        made = await turn(engine)
        assert [span.version for span in made.spans] == [0]
        await settled(engine)
        for server in servers:
            server.label, server.loads = "default", []
        assert len(await engine.score([5, 6, 7])) == 2
        await settled(engine)

    blocking(ask())
    assert [server for server in servers if server.loads], "they were given the weights again"


def test_weights_that_a_server_cannot_load_leave_the_old_ones(
    policy: Policy, engine: VLLMEngine, servers: list[Speaking]
) -> None:
    servers[0].loads_fail = 1
    with pytest.raises(EngineError, match="did not load version 1"):
        blocking(engine.load(Weights(1, policy.model)))
    assert servers[0].loads[-1].endswith("/0")


def test_weights_of_the_version_before_go_and_nothing_else_does(
    policy: Policy, servers: list[Speaking], tmp_path: Path
) -> None:
    (tmp_path / "of somebody else").mkdir()
    engine = VLLMEngine(policy, [Server(servers[0].url)], tmp_path)
    for version in (1, 2):
        blocking(engine.load(Weights(version, policy.model)))
    blocking(engine.close())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "2", "of somebody else"]


def test_a_server_that_fails_while_it_gets_its_weights_again_is_tried_again(
    policy: Policy, engine: VLLMEngine, servers: list[Speaking], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.engines.vllm.PAUSE_S", 0.01)

    async def ask() -> None:
        for server in servers:
            server.label, server.faults, server.loads_fail = "default", [500], 2
        await asyncio.gather(*(turn(engine, f"root {number}") for number in range(4)))
        await settled(engine)

    blocking(ask())
    assert [server.label for server in servers] == ["0", "0"]


ANSWERS = """
import asyncio

async def handle(reader, writer):
    try:
        while True:
            head = await reader.readuntil(b"\\r\\n\\r\\n")
            sizes = [line.split(b":")[1] for line in head.lower().splitlines() if line.startswith(b"content-length")]
            await reader.readexactly(int(sizes[0]))
            await asyncio.sleep(0.05)
            writer.write(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\n{}")
    except asyncio.IncompleteReadError:
        writer.close()

async def main():
    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_request_costs_the_same_however_many_are_under_way() -> None:
    """The pool of one client would take several times the processor time with hundreds of connections."""
    other = subprocess.Popen([sys.executable, "-c", ANSWERS], stdout=subprocess.PIPE, text=True)
    assert other.stdout
    server = Server(f"http://127.0.0.1:{int(other.stdout.readline())}")

    async def asked(at_once: int, number: int = 1024) -> float:
        async def some() -> None:
            for _ in range(number // at_once):
                await server.call("POST", "/", json={"token_ids": list(range(100))})

        await asyncio.gather(*(some() for _ in range(at_once)))  # connects
        started = time.process_time()
        await asyncio.gather(*(some() for _ in range(at_once)))
        return time.process_time() - started

    async def both() -> tuple[float, float]:
        few, many = await asked(8), await asked(256)
        await server.stop()
        return few, many

    few, many = blocking(both())
    other.kill()
    other.wait()
    assert many < 2.5 * few


STARTS = """
import sys
from pathlib import Path
from agentrl.engines.servers import SERVING, server_command
from agentrl.placement.local import Local

here = Path(sys.argv[1])
command = server_command(sys.executable, here / "model", ["--some", "option"])
env = SERVING | {"PYTHONPATH": str(here)}
print(Local().start("vLLM server", command, log=here / "log", env=env).pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_the_process_that_started_it(tmp_path: Path, number: signal.Signals) -> None:
    """Here something else stands in vLLM's place; test_engine_vllm.py does it with vLLM."""
    (tmp_path / "vllm" / "entrypoints" / "openai").mkdir(parents=True)
    stand_in = "import sys, time; open('said', 'w').write(' '.join(sys.argv[1:])); time.sleep(600)"
    (tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text(stand_in)
    command = [sys.executable, "-c", STARTS, str(tmp_path)]
    starter = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert starter.stdout
    server = psutil.Process(int(starter.stdout.readline()))
    ends = time.monotonic() + 20
    while not ((tmp_path / "said").exists() and (tmp_path / "said").read_text()):
        assert time.monotonic() < ends, (tmp_path / "log").read_text()
        time.sleep(0.02)
    assert "--some option" in (tmp_path / "said").read_text()
    assert server.is_running()
    starter.send_signal(number)
    starter.wait()
    psutil.wait_procs([server], timeout=10)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE


FORGETS = """
import sys
from pathlib import Path
from architectures import qwen
from speaking import Speaking
from agentrl.engines.servers import Server
from agentrl.engines.vllm import VLLMEngine
from agentrl.placement.local import Local

policy = qwen()
engine = VLLMEngine(policy, [Server(Speaking(policy).url)])
engine.replicas[0].process = started = Local().start("server", ["sleep", "600"], log=Path(sys.argv[1]))
print(started.pid, engine.folder)
"""


@pytest.mark.slow
def test_a_program_that_closes_no_engine_ends_without_a_word_and_leaves_nothing(tmp_path: Path) -> None:
    """No thread can be started any more when the engine is closed then."""
    done = subprocess.run(
        [sys.executable, "-c", FORGETS, str(tmp_path / "log")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    started, folder = done.stdout.split()
    assert not psutil.pid_exists(int(started))
    assert not Path(folder).exists()


def test_weights_of_a_stage_lie_in_its_folder(policy: Policy, servers: list[Speaking], tmp_path: Path) -> None:
    """It is removed before the next try if the stage is killed."""
    with placed(Execution(), tmp_path / "started"):
        engine = VLLMEngine(policy, [Server(servers[0].url)])
        assert engine.folder.parent == tmp_path / "started"
        blocking(engine.close())


def test_weights_that_a_server_starts_again_from_stay_until_it_has(
    policy: Policy, engine: VLLMEngine, servers: list[Speaking], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, there = engine.replicas[0], []
    healthy = replica.healthy

    async def ends() -> bool:
        return False

    async def revive(folder: Path) -> None:
        while engine.version != 2:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.3)
        there.append((folder / "config.json").exists())
        monkeypatch.setattr(replica, "healthy", healthy)

    async def ask() -> None:
        await engine.load(Weights(1, policy.model))
        monkeypatch.setattr(replica, "healthy", ends)
        monkeypatch.setattr(replica, "revive", revive)
        servers[0].faults = [500]
        await asyncio.gather(*(turn(engine, f"root {number}") for number in range(4)))
        await engine.load(Weights(2, policy.model))
        await settled(engine)

    blocking(ask())
    assert there == [True]
    assert [server.label for server in servers] == ["2", "2"]


def test_a_server_with_other_log_probs_is_refused(policy: Policy, servers: list[Speaking]) -> None:
    servers[1].shift = 0.01
    with pytest.raises(EngineError, match=r"other log-probs than transformers with version 0 \(mean difference 0.01"):
        VLLMEngine(policy, [Server(server.url) for server in servers])


@pytest.mark.parametrize("wrong", [False, True])
def test_a_server_in_bfloat16_passes_and_one_with_a_wrong_layer_does_not(policy: Policy, wrong: bool) -> None:
    """Rounding to bfloat16 alone costs more than the 1e-3 that servers in float32 are allowed."""
    rounded = copy.deepcopy(policy.model).bfloat16()
    if wrong:
        layers = rounded.model.layers
        layers[-1].load_state_dict(layers[0].state_dict())
    server = Speaking(Policy(rounded, policy.tokenizer, "rounded"))
    try:
        if wrong:
            with pytest.raises(EngineError, match="its weights are wrong"):
                VLLMEngine(policy, [Server(server.url)], dtype="bfloat16")
            return
        engine = VLLMEngine(policy, [Server(server.url)], dtype="bfloat16")
        assert 1e-3 < engine._probe.allowed < 0.05
        blocking(engine.close())
        with pytest.raises(EngineError, match="its weights are wrong"):
            VLLMEngine(policy, [Server(server.url)], dtype="float32")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_in_process_says_what_to_do(policy: Policy) -> None:
    with pytest.raises(EngineError, match=r"vLLM cannot be imported here .* leave in_process out and name .*python"):
        VLLMConfig(in_process=True).build(policy)


def test_a_missing_flag_is_named(policy: Policy, servers: list[Speaking]) -> None:
    servers[0].routes.remove("/inference/v1/generate")
    with pytest.raises(EngineError, match="--enable-scale-out"):
        VLLMEngine(policy, [Server(servers[0].url)])


def test_a_folder_for_servers_has_its_own_output_layer_and_names_its_class(policy: Policy, tmp_path: Path) -> None:
    """Without the class a server takes the model for one that embeds; tied, it reloads it wrongly on a CPU."""
    folder = write_folder(policy.model, policy.tokenizer, tmp_path / "0")
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["tie_word_embeddings"]) == (["Qwen3ForCausalLM"], False)
    assert shapes(folder)["lm_head.weight"] == shapes(folder)["model.embed_tokens.weight"]
    again = write_folder(folder, None, tmp_path / "1", like=folder)
    assert shapes(again) == shapes(folder)
