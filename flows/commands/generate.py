"""Try a model out: one episode, with its tokens."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.flows.commands._common import fail, open_catalog
from agentrl.flows.commands.artifacts import looked_up
from agentrl.flows.options import Json, ModelName, Seed, Store, TurnTokens, command
from agentrl.flows.terminal import console, say, say_json

if TYPE_CHECKING:
    from agentrl.schemas.trajectory import Message

app = typer.Typer()


@command(app)
def generate(
    model: ModelName,
    task: Annotated[
        str | None, typer.Option(help="Id of a task; the model's own tasks are looked through first")
    ] = None,
    prompt: Annotated[str | None, typer.Option(help="What the user says; without --task or --prompt, type it")] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the most likely token")] = 1.0,
    max_turn_tokens: TurnTokens = None,
    seed: Seed = 0,
    store: Store = "store",
    as_json: Json = False,
) -> None:
    """Roll out one episode, and print it with its tokens. With --task it acts in the task's environment and is scored;
    with --prompt it answers once; with neither, it talks until the end of input. Nothing is written."""
    from agentrl.flows.commands._render import print_trajectory
    from agentrl.pipelines.file.library import search_in
    from agentrl.pipelines.generate import find_task, policy_of, question
    from agentrl.pipelines.generate import generate as rolled_out
    from agentrl.pipelines.parts.budget import SamplingConfig

    if task is not None and prompt is not None:
        raise fail("error: --task and --prompt: give one of them, not both")
    search_in([Path.cwd()])  # an environment of the user's own
    catalog = open_catalog(store)
    with looked_up():
        policy, manifest = policy_of(catalog, model)
        known_task = find_task(catalog, task, manifest) if task is not None else None
    talks = known_task is None and prompt is None
    if known_task is None:
        text = prompt if prompt is not None else _heard()
        if text is None:
            raise fail("error: nothing was said; give --task, --prompt, or a line of input")
        known_task = question(text)
    sampling = SamplingConfig(temperature=temperature, max_turn_tokens=max_turn_tokens)
    try:
        row = rolled_out(policy, known_task, sampling, seed, _answer if talks else None)
    except ValueError as error:
        raise fail(f"error: {error}") from None
    if as_json:
        say_json(row.model_dump(mode="json"))
    else:
        print_trajectory(console(), row, tokens=True)


def _heard() -> str | None:
    """The next line that the user types; None at the end of input."""
    if sys.stdin.isatty():
        say("your turn, Ctrl-D ends it:", stderr=True)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _answer(message: "Message") -> str | None:
    say(message.content, stderr=True)
    return _heard()
