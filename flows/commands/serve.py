"""Serve a model to agents, and record what they do."""

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from agentrl.flows.commands._common import FAILED, fail, on_secrets, open_catalog
from agentrl.flows.commands.artifacts import looked_up
from agentrl.flows.options import Host, Json, ModelName, OnSecrets, Port, Seed, TurnTokens, command
from agentrl.flows.terminal import say, say_json

if TYPE_CHECKING:
    from agentrl.recorder.recorder import RecorderSettings

app = typer.Typer()


@command(app)
def serve(
    model: ModelName,
    record: Annotated[
        str, typer.Option(envvar="AGENTRL_STORE", help="Store that rows go to, and where artifacts are looked for")
    ] = "store",
    served_name: Annotated[str | None, typer.Option(help="What clients call the model; default: its own name")] = None,
    host: Host = "127.0.0.1",
    port: Port = 8321,
    api_key: Annotated[
        str | None, typer.Option(envvar="AGENTRL_API_KEY", help="Key that clients give; better by the variable")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="As in a pipeline file, e.g. '{type: vllm, urls: [http://127.0.0.1:8000]}'")
    ] = None,
    fixed_temperature: Annotated[
        float | None, typer.Option(help="In place of what requests ask for; training needs 1")
    ] = None,
    accept_any_model: Annotated[
        bool, typer.Option("--accept-any-model", help="Answer requests for models of other names too")
    ] = False,
    unconstrained: Annotated[
        bool, typer.Option("--unconstrained", help="Keep no answer to the JSON schema of its request: train on all")
    ] = False,
    max_turn_tokens: TurnTokens = None,
    context: Annotated[int | None, typer.Option(min=1, help="All tokens of a conversation")] = None,
    history: Annotated[
        str, typer.Option(help="keep: earlier turns stay as sampled; template: as the chat template shows them")
    ] = "keep",
    idle_s: Annotated[float, typer.Option(min=1, help="Seconds without a request that end an episode unscored")] = 3600,
    secrets: OnSecrets = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Answer Anthropic's Messages, and OpenAI's chat completions and Responses, with a model, and record every
    conversation as rows of the buffer, with the tokens that were sampled. Ends at Ctrl-C."""
    from agentrl.schemas.installation import missing

    if lack := missing("uvicorn", "serve") or missing("starlette", "serve"):
        raise fail(f"error: {lack}")
    from agentrl.pipelines.file.library import search_in
    from agentrl.pipelines.parts.budget import SamplingConfig
    from agentrl.pipelines.serve import engine_config, recorder_of
    from agentrl.recorder.app import LOOPBACK
    from agentrl.recorder.server import serve as serving

    if host not in LOOPBACK and not api_key:
        raise fail(f"error: --host {host} is reached by others: set AGENTRL_API_KEY, or leave --host out")
    redacted = on_secrets(secrets, "redact") is not None
    settings = _settings(history, fixed_temperature, accept_any_model, idle_s, api_key, not unconstrained)
    open_catalog(record)  # a store that cannot be used is said before the model is loaded
    search_in([Path.cwd()])  # an engine of the user's own
    sampling = SamplingConfig(max_turn_tokens=max_turn_tokens, max_tokens=context)
    try:
        with looked_up():
            recorder = recorder_of(
                record,
                model,
                engine_config(_read(engine)),
                sampling,
                settings,
                served_name,
                seed=seed,
                redacted=redacted,
            )
    except ValueError as error:
        raise fail(f"error: {error}") from None

    tell = partial(_tell, as_json)
    try:
        left = asyncio.run(serving(recorder, host, port, tell))
    except OSError as error:
        where = error.filename or f"--host {host} --port {port}"
        raise fail(f"error: {where}: {error.strerror or error}", FAILED) from None
    tell("stopped", open=left)
    if left:
        say("open episodes go on when this store is served again", stderr=True)


def _settings(
    history: str,
    fixed_temperature: float | None,
    any_model: bool,
    idle_s: float,
    api_key: str | None,
    constrain: bool,
) -> "RecorderSettings":
    from agentrl.recorder.recorder import HISTORIES, History, RecorderSettings
    from agentrl.recorder.wire import HOTTEST

    if history not in HISTORIES:
        raise fail(f"error: --history {history}: allowed are {', '.join(HISTORIES)}")
    if fixed_temperature is not None and not 0 <= fixed_temperature <= HOTTEST:
        raise fail(f"error: --fixed-temperature {fixed_temperature}: allowed are 0 to {HOTTEST:g}")
    return RecorderSettings(cast(History, history), fixed_temperature, any_model, idle_s, api_key, constrain=constrain)


def _tell(as_json: bool, what: str, **values: Any) -> None:
    """Print an event of the server."""
    if as_json:
        say_json({"event": what, **values})
    else:
        say(": ".join(filter(None, [what, ", ".join(f"{name} {value}" for name, value in values.items())])))
    sys.stdout.flush()


def _read(engine: str | None) -> Any:
    """A choice as a pipeline file has it. Raises ValueError if it is not YAML."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        return YAML(typ="safe").load(engine) if engine else None
    except YAMLError as error:
        raise ValueError(f"--engine is not YAML: {str(error).splitlines()[0]}") from None
