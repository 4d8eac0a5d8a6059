"""Commands that look after recorded episodes which `agentrl serve` has set aside."""

from typing import TYPE_CHECKING, Annotated

import typer

from agentrl.flows.commands._common import FAILED, fail, open_buffer, print_rows
from agentrl.flows.options import Json, Limit, Store, command
from agentrl.flows.terminal import say, say_json

if TYPE_CHECKING:
    from agentrl.recorder.aside import SetAside

app = typer.Typer(no_args_is_help=True, help="Look after recorded episodes that `agentrl serve` has set aside.")

Episode = Annotated[str, typer.Argument(metavar="ID", help="An episode's id, as `agentrl recordings list` shows it")]


@command(app, name="list")
def list_(store: Store = "store", limit: Limit = 50, as_json: Json = False) -> None:
    """List the recorded episodes that are set aside, because they cannot be read or stored, with the reasons."""
    aside = _listed(store)
    rows = [
        {"id": episode_aside.name, "reason": episode_aside.reason, "file": str(episode_aside.path)}
        for episode_aside in aside
    ]
    if as_json:
        say_json(rows)
        return
    if not rows:
        say("no recorded episode is set aside")
        return
    print_rows(rows[:limit], as_json)
    if len(rows) > limit:
        say(f"... and {len(rows) - limit} more")


@command(app)
def show(episode: Episode, store: Store = "store", as_json: Json = False) -> None:
    """Show what can be read of an episode that is set aside: columns, outcome, conversation, and why it is there."""
    from agentrl.recorder.aside import readable

    answer = readable(_named(store, episode))
    if as_json:
        say_json(answer)
        return
    messages = answer.pop("messages", [])
    for name, value in answer.items():
        say(f"{name}: {value}")
    assert isinstance(messages, list)
    for message in messages:
        calls = f" (calls {', '.join(message['calls'])})" if message["calls"] else ""
        say(f"{message['role']}{calls}: {message['content']}")


@command(app)
def release(episode: Episode, store: Store = "store", as_json: Json = False) -> None:
    """Store an episode that was set aside. Correct its file before, if its rows cannot be stored; lines that cannot be
    read are left out, with those that follow them."""
    from agentrl.pipelines.serve import BufferRows
    from agentrl.recorder.aside import UnstorableError
    from agentrl.recorder.aside import release as released
    from agentrl.recorder.episode import DamagedRecordingError

    aside = _named(store, episode)
    try:
        ids, lost = released(aside, BufferRows(open_buffer(store)))
    except (UnstorableError, DamagedRecordingError) as error:
        raise fail(
            f"error: {aside.name}: {error}; correct {aside.path} and release it again, or remove it", FAILED
        ) from None
    if as_json:
        say_json({"id": aside.name, "rows": ids, "lost_lines": lost})
        return
    left = f"; {lost} lines could not be read and are lost" if lost else ""
    say(
        f"{aside.name}: {len(ids)} rows stored{left}" if ids else f"{aside.name}: no client received a turn of it{left}"
    )


def _listed(store: str) -> "list[SetAside]":
    from agentrl.pipelines.serve import recordings_of
    from agentrl.recorder.aside import listed

    return list(listed(recordings_of(open_buffer(store))))


def _named(store: str, name: str) -> "SetAside":
    from agentrl.schemas.hints import did_you_mean

    by_name = {aside.name: aside for aside in _listed(store)}
    if name not in by_name:
        hint = did_you_mean(name, list(by_name)) or "; `agentrl recordings list` shows those that are"
        raise fail(f"error: no recorded episode {name!r} is set aside{hint}")
    return by_name[name]
