"""What notebooks show: HTML that runs nothing, says what is cut, and has text where a tokenizer is known."""

import gc
import json
import math
import subprocess
import sys
import textwrap
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.tokenizers import _CHARACTERS, keep
from agentrl.datastore.buffer import TrajectoryBuffer, open_buffers
from agentrl.pipelines import displays
from agentrl.pipelines.handles import SELECTION_SCHEMA, Trajectories
from agentrl.pipelines.results.arms import Arm
from agentrl.pipelines.results.compare import Comparison
from agentrl.pipelines.results.measured import Measured
from agentrl.schemas.pair import Pair, PairKind
from agentrl.schemas.trajectory import Message, RewardComponent, Role, Termination, ToolCall, Trajectory

PAYLOADS = (
    "<script>window.pwned=1</script>",
    "</div></span></table><script>1</script>",
    '" onmouseover="window.pwned=1',
    "' style='background:url(http://evil.test)",
    "<img src=x onerror=window.pwned=1>",
    "<!--<style>@import 'http://evil.test/a.css';",
    "&lt;script&gt;&#60;img&#62;",
    "a\u202eb\u200bc\x1b[31m\x00\ud800",
)
TAGS = {"div", "span", "b", "p", "table", "thead", "tbody", "tr", "th", "td"}


class Reader(HTMLParser):
    """Tags, attributes and text, and whether each element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.styles = ""
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attributes}
        self.styles += "".join(value or "" for _, value in attributes)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)


def read(text: str) -> Reader:
    """The HTML, of which nothing comes from a store but text."""
    assert len(text.encode()) <= displays.LIMIT
    result = Reader(text)
    assert result.open == []
    assert result.tags <= TAGS
    assert result.attributes <= {"style"}
    assert "url(" not in result.styles
    return result


def trajectory(text: str = "hello", ids: list[int] | None = None, **fields: Any) -> Trajectory:
    ids = list(text.encode(errors="replace")) if ids is None else ids
    call = ToolCall(id="1", name=text, arguments=json.dumps({"x": text}))
    messages = [
        Message(role=Role.USER, content=text, name=text, token_start=0, token_end=len(ids) // 2),
        Message(
            role=Role.ASSISTANT,
            content=text,
            reasoning=text,
            tool_calls=[call],
            token_start=len(ids) // 2,
            token_end=len(ids),
        ),
    ]
    names = ("trajectory_id", "episode_id", "task_id", "source", "env", "split", "prompt", "stage", "policy")
    mask = [number >= len(ids) // 2 for number in range(len(ids))]
    values: dict[str, Any] = dict.fromkeys(names, text) | {"reward": 0.5, "success": True, "messages": messages}
    values |= {"termination": Termination.ANSWERED, "reward_components": [RewardComponent(name=text, value=1)]}
    values |= {"input_ids": ids, "action_mask": mask, "logprobs": [-3.0 if acts else math.nan for acts in mask]}
    return Trajectory.model_construct(
        **{**Trajectory.model_construct().__dict__, **values, "n_tokens": len(ids), **fields}
    )


def pair(text: str = "hello", ids: list[int] | None = None, shared: int = 2) -> Pair:
    ids = list(text.encode(errors="replace")) if ids is None else ids
    sides = {
        f"{side}_{what}": value
        for side in ("chosen", "rejected")
        for what, value in (("ids", ids), ("mask", [True] * len(ids)), ("reward", 1.0), ("id", text))
    }
    return Pair.model_construct(
        pair_id=text,
        task_id=text,
        kind=PairKind.STEP,
        method=text,
        shared_prefix=min(shared, len(ids)),
        tokenizer="",
        **sides,
    )


def comparison(text: str) -> Comparison:
    from datetime import UTC, datetime

    from agentrl.schemas.manifest import Ingredients, Manifest

    ingredients = Ingredients(
        scheme=1,
        pipeline=text,
        stage=text,
        uses="evaluate.policy",
        uses_version="1",
        config={},
        seed=0,
        inputs={},
        code={},
    )
    manifest = Manifest(
        fingerprint="f" * 32,
        ingredients=ingredients,
        outputs={},
        run_id=text,
        created_at=datetime.now(UTC),
        duration_s=1,
    )
    outcomes = [
        {(text, f"{text}{number}", text): float(number % better == 0) for number in range(12)} for better in (3, 2)
    ]
    return Comparison(
        [Arm((Measured(manifest, f"{text}{n}", outcome, {}),), ()) for n, outcome in enumerate(outcomes)], []
    )


def shown_as(made: Trajectory | Pair | Comparison) -> str:
    if isinstance(made, Trajectory):
        return displays.trajectory(made)
    return displays.pair(made) if isinstance(made, Pair) else made._repr_html_()


def test_ipython_shows_rows_and_pairs(tmp_path: Path) -> None:
    code = """
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        import sys
        import agentrl
        assert "agentrl.schemas.trajectory" not in sys.modules, "import agentrl costs nothing"
        row = agentrl.Trajectory.model_construct(**agentrl.Trajectory.model_construct().__dict__ | dict(
            trajectory_id="row-1", success=True, reward=1.0, stage="s", fingerprint="f", policy="p", env="e",
            termination=agentrl.Trajectory.model_fields["termination"].annotation("answered"), split="train",
            messages=[]))
        print(shell.display_formatter.format(row)[0]["text/html"])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "<b>row-1</b>" in done.stdout
    assert "✓ success" in done.stdout


@pytest.mark.parametrize("payload", PAYLOADS)
def test_payloads_are_text(payload: str) -> None:
    shown = displays.escaped(payload)
    for made in (
        trajectory(payload),
        trajectory(payload, input_ids=[], action_mask=[], logprobs=[]),
        pair(payload),
        comparison(payload),
    ):
        html = shown_as(made)
        read_back = read(html)
        assert shown in html
        assert "\u202e" not in read_back.text
        assert "\x1b" not in read_back.text


@settings(max_examples=20, deadline=None)
@given(st.text(max_size=80), st.lists(st.integers(-1, 2**31 - 1), max_size=40), st.integers(0, 50))
def test_any_row_and_pair_is_closed_html(text: str, ids: list[int], shared: int) -> None:
    read(displays.trajectory(trajectory(text, ids)))
    read(displays.pair(pair(text, ids, shared)))


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=60))
def test_any_text_becomes_the_text_that_it_is_without_signs(text: str) -> None:
    result = Reader(f"<p>{displays.escaped(text)}</p>").text
    assert result == "".join(map(displays._sign, text))


def test_a_row_of_a_hundred_thousand_tokens_is_cut_and_says_so() -> None:
    ids = list(range(100_000))
    long = trajectory("long", ids)
    html = displays.trajectory(long)
    read(html)
    assert len(html.encode()) > 0.9 * displays.LIMIT
    assert "cut at 200 kB: 2 of 2 messages are whole, of 100,000 tokens" in html
    many = trajectory("x", [], messages=[Message(role=Role.USER, content="<" * 50)] * 10_000)
    html = displays.trajectory(many)
    read(html)
    assert "of 10000 messages are whole" in html
    html = displays.pair(pair("long", ids))
    read(html)
    assert "cut at 200 kB" in html
    assert html.count("the loss covers 100,000 of 100,000 tokens") == 2
    html = displays.trajectory(trajectory("x", [], messages=[Message(role=Role.USER, content="é\u202e" * 1_000_000)]))
    read(html)
    assert "0 of 1 messages are whole" in html


def test_tokens_are_text_where_a_store_with_their_tokenizer_is_open(tmp_path: Path) -> None:
    vocabulary = {chr(character): byte for character, byte in _CHARACTERS.items() if byte < 256}
    document = {"added_tokens": [], "decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": vocabulary}}
    buffer = TrajectoryBuffer(tmp_path)
    name = "cafe0123456789ab"
    keep(Catalog(tmp_path).storage, name, lambda: json.dumps(document))
    row = trajectory("h<llo é", tokenizer=name)
    assert "‹" not in displays.trajectory(row)
    assert "h&lt;llo é" in read_text(row)
    assert "inset 0 -3px rgba(217,119,6,0.8)" in displays.trajectory(row), "the log-prob is a style"
    assert "‹104›" in displays.trajectory(trajectory("h", [104, 104], tokenizer="unknown"))
    assert buffer in open_buffers()
    del buffer
    gc.collect()
    assert str(tmp_path) not in [buffer.store for buffer in open_buffers()], "a store that nobody uses is forgotten"


def read_text(row: Trajectory) -> str:
    """Escaped text without tags."""
    return displays.escaped(read(displays.trajectory(row)).text)


def test_a_selection_shows_its_first_rows(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = TrajectoryBuffer(tmp_path)
    rows = [
        trajectory(PAYLOADS[0], [], trajectory_id=f"row-{number:02d}", episode_id=f"e{number}", tokenizer="")
        for number in range(25)
    ]
    checked = [Trajectory.model_validate(row.model_dump()) for row in rows]
    buffer.append(checked, stage="s", fingerprint="f" * 32)
    ids = [row.trajectory_id for row in rows]
    pq.write_table(
        pa.Table.from_arrays([ids, np.ones(25, np.float32)], schema=SELECTION_SCHEMA), tmp_path / "selection.parquet"
    )
    html = Trajectories(tmp_path / "selection.parquet", "curated", "trajectories", "f" * 32, buffer)._repr_html_()
    read_back = read(html)
    assert "25 rows, selected by curated/ffffffff" in read_back.text
    assert "row-19" in read_back.text
    assert "row-20" not in read_back.text
    assert "and 5 more rows" in read_back.text


def test_a_comparison_shows_the_verdict_of_the_command() -> None:
    made = comparison("p")
    read_back = read(made._repr_html_())
    assert made.to_json()["differences"][0]["verdict"] in read_back.text
    assert "gained: " in read_back.text
