"""``kill -9`` of an agent program, of the worker in which its stage and the recorder are, and of the whole run, at
random moments: each answer that an agent acknowledged is in exactly one row of what the stage selects.

``KILLS`` kills (default 3), ``SEED`` draws the moments.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from own_classes import planned

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.datastore.errors import NoBufferError
from agentrl.models.policy import Policy
from agentrl.models.tiny import TinySize, tiny_policy
from agentrl.pipelines.run.execute import open_output
from agentrl.schemas.manifest import InputRecord
from agentrl.schemas.trajectory import Message, Role, Termination, Trajectory

KILLS = int(os.environ.get("KILLS") or 3)
SEED = int(os.environ.get("SEED") or 7)
VICTIMS = ("agent", "worker", "run")
AT_ONCE = 4
TURNS = 7
WAITS_S = 120.0

AGENT = """
import json, os, sys, urllib.request
diary, attempt, task = sys.argv[1], os.urandom(8).hex(), sys.stdin.read()

def note(**what):
    line = json.dumps({"attempt": attempt, **what}) + "\\n"
    file = os.open(diary, os.O_WRONLY)
    os.write(file, line.encode())
    os.close(file)

def ask(messages):
    body = {"model": os.environ["AGENTRL_MODEL"], "messages": messages}
    headers = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=60) as reply:
        answer = json.load(reply)
    text = answer["choices"][0]["message"]["content"] or ""
    note(text=text, tokens=answer["usage"]["completion_tokens"])
    return [*messages, {"role": "assistant", "content": text}, {"role": "user", "content": "go on"}]

note(task=task)
first = talk = ask([{"role": "user", "content": task + " " + attempt}])
for _ in range(3):
    talk = ask(talk)
ask([*first[:-1], {"role": "user", "content": "another way"}])
helper = [{"role": "system", "content": "You help."}, {"role": "user", "content": "help with " + attempt}]
for _ in range(2):
    helper = ask(helper)
note(ended=True)
"""
"""Four turns, one more after it went back to the first, and a helper of two. It writes down each answer that it has."""


class Diary(threading.Thread):
    """What agents wrote down, by attempt, as it happens. The pipe outlives whoever is killed."""

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        os.mkfifo(path)
        path.chmod(0o666)
        self.pipe = os.open(path, os.O_RDWR)
        self.texts: dict[str, list[str]] = defaultdict(list)
        self.tokens: Counter[str] = Counter()
        self.ended: set[str] = set()
        self.acknowledged = 0
        self.start()

    def has(self, acknowledged: int) -> bool:
        return self.acknowledged >= acknowledged

    def run(self) -> None:
        with os.fdopen(self.pipe, "rb") as lines:
            for line in lines:
                entry = json.loads(line)
                texts = self.texts[entry["attempt"]]
                if "text" in entry:
                    texts.append(entry["text"])
                    self.tokens[entry["attempt"]] += entry["tokens"]
                    self.acknowledged += 1
                elif "ended" in entry:
                    self.ended.add(entry["attempt"])


@contextmanager
def open_folder() -> Iterator[Path]:
    """A folder with a short path that also nobody may enter, as an agent in its sandbox is."""
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def speaking() -> Policy:
    """A tiny model that ends each turn after some tokens, so that no limit explains how an episode ends: all tokens
    have one direction in common, and the end of a turn more of it."""
    policy = tiny_policy([[Message(role=Role.USER, content="go on")]], seed=0, size=TinySize(context=1024))
    with torch.no_grad():
        policy.model.get_input_embeddings().weight[:, 0] += 0.2
        out = policy.model.get_output_embeddings().weight
        out[policy.tokenizer.convert_tokens_to_ids("<|im_end|>"), 0] += 0.8
    return policy


def write_pipeline(folder: Path, diary: Path, episodes: int) -> Path:
    (folder / "model").mkdir()
    speaking().save(folder / "model")
    prompts = [{"prompt": f"task {number}"} for number in range(episodes)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in prompts))
    env = {
        "type": "harness",
        "agent": ["python", "-c", AGENT, str(diary)],
        "file": str(folder / "tasks.jsonl"),
        "timeout": 60,
        "at_once": AT_ONCE,
        "sandbox": {"type": "bubblewrap", "readable": [str(diary.parent)]},
    }
    stages = {
        "tasks": {"uses": "tasks.generate", "with": {"env": env, "train": episodes, "dev": 0, "heldout": 0}},
        "model": {"uses": "model.import", "with": {"model": {"path": str(folder / "model")}}},
        "sample": {
            "uses": "trajectories.sample",
            "inputs": {"tasks": "tasks.train", "model": "model"},
            "with": {
                "samples": 1,
                "shard_tasks": 1,
                "engine": {"type": "transformers", "schedule": "free"},
                "sampling": {"max_tokens": 900, "max_turn_tokens": 60},
                "limits": {"retry": {"attempts": 100, "backoff_s": 0.01}},
            },
        },
    }
    path = folder / "pipeline.yaml"
    path.write_text(json.dumps({"name": "kills", "stages": stages}))  # JSON is YAML
    return path


def start(path: Path, folder: Path) -> "subprocess.Popen[bytes]":
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    command = [sys.executable, str(Path(__file__).with_name("harness_crash_run.py")), str(path)]
    with (path.parent / "run.log").open("ab") as log:
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)


def wait_until(condition: Callable[[], Any], running: "subprocess.Popen[bytes]", log: Path) -> Any:
    """What a condition gives when it is true."""
    ends = time.monotonic() + WAITS_S
    while not (result := condition()):
        assert running.poll() is None, f"the run ended with {running.returncode}: {log.read_text()[-3000:]}"
        assert time.monotonic() < ends, f"nothing happens: {log.read_text()[-3000:]}"
        time.sleep(0.002)
    return result


def line_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def victim_of(kind: str, run: int, diary: str) -> psutil.Process | None:
    """A process of this kind below a run, if there is one at the moment."""
    if kind == "run":
        return psutil.Process(run)
    below = psutil.Process(run).children(recursive=True)
    if kind == "worker":  # its guard, which it was forked off, has the same command
        guards = {process.pid for process in below if "run.worker" in line_of(process)}
        return next((process for process in below if process.pid in guards and process.ppid() in guards), None)
    agents = [process for process in below if diary in (words := line_of(process)) and words.startswith("python")]
    return agents[-1] if agents else None


def kill(kind: str, run: int, diary: str) -> list[psutil.Process]:
    """Kill a process of this kind. Gives it and all that were below it; none if there is none at the moment."""
    try:
        if (victim := victim_of(kind, run, diary)) is None:
            return []
        below = victim.children(recursive=True)
        victim.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return []
    return [victim, *below]


def left_of(processes: list[psutil.Process]) -> list[str]:
    """Those that still live after a while."""
    _, living = psutil.wait_procs(processes, timeout=20)
    return [str(process) for process in living if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def attempt_of(rows: list[Trajectory]) -> str:
    """The attempt whose conversations these rows are."""
    heard = " ".join(message.content for row in rows for message in row.messages if message.role is Role.USER)
    names = set(re.findall("[0-9a-f]{16}", heard))
    assert len(names) <= 1, f"{rows[0].episode_id} mixes attempts"
    return names.pop() if names else ""


def stored(store: Path) -> dict[str, list[Trajectory]]:
    """The rows in the store, by episode."""
    result: dict[str, list[Trajectory]] = defaultdict(list)
    with suppress(NoBufferError):
        buffer = TrajectoryBuffer(store)
        for row in buffer.get_many(buffer.scan().select("trajectory_id").collect()["trajectory_id"].to_list()):
            result[row.episode_id].append(row)
    return result


def trained(rows: list[Trajectory]) -> Counter[str]:
    """The texts of the turns whose tokens the rows train on."""
    return Counter(
        message.content
        for row in rows
        for message in row.messages
        if message.role is Role.ASSISTANT
        and message.token_end
        and all(row.action_mask[message.token_start or 0 : message.token_end])
    )


def killed(path: Path, folder: Path, diary: Diary, marker: str) -> tuple[Counter[str], dict[str, str], list[str]]:
    """Run a pipeline to its end, through all kills. Gives the victims, the attempt of each episode that was in the
    store at a kill, and the processes that a kill left."""
    moments, log = random.Random(SEED), path.parent / "run.log"
    victims: Counter[str] = Counter()
    known: dict[str, str] = {}
    left: list[str] = []
    running = start(path, folder)
    try:
        for number in range(KILLS):
            kind, wanted = VICTIMS[number % len(VICTIMS)], diary.acknowledged + moments.randint(1, 2 * TURNS * AT_ONCE)
            wait_until(partial(diary.has, wanted), running, log)
            time.sleep(moments.uniform(0, 0.1))
            below = wait_until(partial(kill, kind, running.pid, marker), running, log)
            victims[kind] += 1
            if kind == "run":
                running.wait(20)
            left += left_of(below)
            for episode, rows in stored(path.parent / "store").items():
                assert known.setdefault(episode, attempt_of(rows)) == attempt_of(rows), f"{episode} was made twice"
            if kind == "run":
                running = start(path, folder)
        assert running.wait(600) == 0, log.read_text()[-3000:]
    finally:
        if running.poll() is None:
            running.kill()
    return victims, known, left


def selected(path: Path) -> dict[str, list[Trajectory]]:
    """The rows that the stage selects, by episode."""
    plan, store = planned(path), path.parent / "store"
    assert not plan.to_run
    record = InputRecord(stage="sample", output="trajectories", fingerprint=plan.steps["sample"].fingerprint)
    result: dict[str, list[Trajectory]] = defaultdict(list)
    for row in open_output(record, Catalog(str(store)), TrajectoryBuffer(store)).read():
        result[row.episode_id].append(row)
    return result


def cut_short(chosen: dict[str, list[Trajectory]], attempts: dict[str, str], diary: Diary) -> int:
    """Check that each selected episode has each answer of its attempt in exactly one row. Gives the number of those
    that a kill ended, after a turn without an end, which then counts as the end of the episode."""
    cut = 0
    for episode, rows in chosen.items():
        name = attempts[episode]
        if name not in diary.ended:
            assert {row.termination for row in rows} == {Termination.MAX_TOKENS}, episode
            cut += 1
            continue
        assert {row.termination for row in rows} <= {Termination.ANSWERED, Termination.MAX_TOKENS}, episode
        assert (len(diary.texts[name]), len(rows)) == (TURNS, 3)
        assert trained(rows) == Counter(diary.texts[name]), episode
        assert sum(row.n_action_tokens for row in rows) == diary.tokens[name], episode
    return cut


@pytest.mark.slow
def test_each_answer_is_in_one_row_whoever_is_killed(tmp_path: Path) -> None:
    episodes = 10 + 4 * KILLS
    with open_folder() as folder:
        shared = folder / "diary"
        shared.mkdir(mode=0o755)
        diary, marker = Diary(shared / "pipe"), str(shared / "pipe")
        path = write_pipeline(tmp_path, shared / "pipe", episodes)
        victims, known, left = killed(path, folder, diary, marker)
        left += [line for process in psutil.process_iter() if marker in (line := line_of(process))]
    assert left == [], "something is left running"
    assert sum(victims.values()) == KILLS
    chosen, everything = selected(path), stored(path.parent / "store")
    ids = Counter(row.trajectory_id for rows in everything.values() for row in rows)
    assert set(ids.values()) == {1}
    assert Counter(rows[0].prompt for rows in chosen.values()) == Counter(f"task {n}" for n in range(episodes))
    attempts = {episode: attempt_of(rows) for episode, rows in everything.items()}
    assert set(Counter(filter(None, attempts.values())).values()) == {1}, "an attempt is in two episodes"
    assert {episode: attempts.get(episode) for episode in known} == known, "what was stored was made again"
    cut = cut_short(chosen, attempts, diary)
    failed = {episode: rows for episode, rows in everything.items() if episode not in chosen}
    for episode, rows in failed.items():  # an agent was killed, perhaps before it wrote down its last answer
        assert {row.termination for row in rows} == {Termination.ENV_ERROR}
        assert (trained(rows) - Counter(diary.texts[attempts[episode]])).total() <= 1
    again = len(diary.texts) - len(chosen)
    late = len(diary.ended - set(attempts.values()))
    print(
        f"seed {SEED}: kills {dict(victims)}, {episodes} episodes, {diary.acknowledged} answers acknowledged, "
        f"{again} attempts made again, {len(failed)} of them kept as failed, {late} had ended and were not stored yet, "
        f"{cut} episodes were ended by a kill"
    )
    assert cut + len(failed) <= victims["agent"]
    assert again <= victims["agent"] + 3 * AT_ONCE * (victims["worker"] + victims["run"])
