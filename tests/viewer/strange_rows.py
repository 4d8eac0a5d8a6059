"""Rows that attack the viewer or strain it: payloads in every field, control characters, very many tokens."""

import json
import math
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.buffer import TrajectoryBuffer
from agentrl.pipelines.stages.curate import DROPPED_SCHEMA, FUNNEL_SCHEMA
from agentrl.schemas.manifest import Ingredients, Kind, Manifest, OutputRecord
from agentrl.schemas.pair import PAIR_SCHEMA
from agentrl.schemas.trajectory import Message, RewardComponent, Span, ToolCall, Trajectory

PAYLOADS = (
    "<script>window.pwned=1</script>",
    "<img src=x onerror=window.pwned=1>",
    '"><img src=x onerror=window.pwned=1>',
    "'><svg onload=window.pwned=1>",
    "<svg><script>window.pwned=1</script></svg>",
    "<svg><animate onbegin=window.pwned=1 attributeName=x dur=1s>",
    "<iframe src='javascript:parent.pwned=1'></iframe>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
    "<a href='javascript:window.pwned=1'>here</a>",
    "[here](javascript:window.pwned=1)",
    "![picture](http://evil.test/pixel.png)",
    "<img src='http://evil.test/pixel.png'>",
    "<link rel=stylesheet href='http://evil.test/a.css'>",
    "<style>@import 'http://evil.test/a.css';</style>",
    "<body onload=window.pwned=1>",
    "<details open ontoggle=window.pwned=1><summary>x</summary></details>",
    "<input autofocus onfocus=window.pwned=1>",
    "<video><source onerror=window.pwned=1></video>",
    "<math><mtext><style><img src=x onerror=window.pwned=1></style></mtext></math>",
    "<object data='javascript:window.pwned=1'></object>",
    "<embed src='http://evil.test/a.swf'>",
    "<meta http-equiv=refresh content='0;url=http://evil.test/'>",
    "<base href='http://evil.test/'>",
    "<form action='http://evil.test/'><button>send</button></form>",
    "${window.pwned=1}",
    "{{constructor.constructor('window.pwned=1')()}}",
    "`-window.pwned=1-`",
    "</p></div></div><script>window.pwned=1</script>",
    "<noscript><p title='</noscript><img src=x onerror=window.pwned=1>'></noscript>",
    "&lt;script&gt;window.pwned=1&lt;/script&gt; &#60;img src=x onerror=window.pwned=1&#62;",
)
LONG = 100_000
SIGNS = "a\u202eb\u200bc \u001b[31mred\u001b[0m \u0007 d\u2066e"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
HUGE = "a line of a very long answer\n" * 10_000


def append_strange_rows(store: str) -> None:
    """Appends the rows of this module to a store that has rows with tokens."""
    buffer = TrajectoryBuffer(store)
    rows = buffer.sql("select trajectory_id from trajectories where stage = 'grpo' order by trajectory_id limit 1")
    sampled = buffer.get(rows["trajectory_id"][0])
    plain = [_plain(number, payload) for number, payload in enumerate(PAYLOADS)]
    rows = [*plain, _signs(), _huge(), _long(sampled), _breach(sampled)]
    buffer.append(rows, stage="strange", fingerprint="57a46e")
    _publish_strange_artifact(store, plain)


def _publish_strange_artifact(store: str, rows: list[Trajectory]) -> None:
    """A curation with a rule for each payload, which dropped a row; pairs of tasks that are payloads."""
    ids = [row.trajectory_id for row in rows]
    dropped = [{"trajectory_id": name, "rule": rule} for name, rule in zip(ids, PAYLOADS, strict=True)]
    levels = [
        {"rule": rule, "before": 30 - n, "after": 29 - n, "dropped_examples": []} for n, rule in enumerate(PAYLOADS)
    ]
    pair: dict[str, Any] = {
        "kind": "step",
        "chosen_reward": 1.0,
        "rejected_reward": 0.0,
        "shared_prefix": 1,
        "weight": 1.0,
    }
    for side in ("chosen", "rejected"):
        pair |= {f"{side}_ids": [1, 2], f"{side}_mask": [False, True]}
    pairs = [
        pair
        | dict.fromkeys(("pair_id", "task_id", "method", "tokenizer"), payload)
        | {"chosen_id": name, "rejected_id": name}
        for payload, name in zip(PAYLOADS, ids, strict=True)
    ]
    tables = {
        "dropped": pa.Table.from_pylist(dropped, schema=DROPPED_SCHEMA),
        "funnel": pa.Table.from_pylist(levels, schema=FUNNEL_SCHEMA),
        "pairs": pa.Table.from_pylist(pairs, schema=PAIR_SCHEMA),
    }
    catalog, fingerprint = Catalog(store), ("57a46e" * 6)[:32]
    folder = catalog.staging("strange", fingerprint)
    for name, table in tables.items():
        pq.write_table(table, folder / f"{name}.parquet")
    kinds = {name: Kind.PAIRS if name == "pairs" else Kind.TABLE for name in tables}
    outputs = {name: OutputRecord(kind=kinds[name], path=f"{name}.parquet", digest=name) for name in tables}
    made: dict[str, Any] = {"scheme": 1, "pipeline": "strange", "stage": "strange", "uses": "strange", "seed": 0}
    ingredients = Ingredients(**made, uses_version="1", config={}, inputs={}, code={})
    when = datetime(2026, 1, 1, tzinfo=UTC)
    manifest = Manifest(
        fingerprint=fingerprint,
        ingredients=ingredients,
        outputs=outputs,
        run_id="strange",
        created_at=when,
        duration_s=1,
    )
    catalog.publish(manifest, folder)


def _plain(number: int, payload: str) -> Trajectory:
    quoted = json.dumps({payload: payload})
    call = ToolCall(id=payload, name=payload, arguments=quoted)
    messages = [
        Message(role="system", content=payload),
        Message(role="user", content=payload, name=payload),
        Message(role="assistant", content=payload, reasoning=payload, tool_calls=[call]),
        Message(role="tool", content=payload, tool_call_id=payload, name=payload),
    ]
    return Trajectory(
        trajectory_id=f"xss-{number:02d}-{payload}",
        episode_id=payload + str(number),
        agent=payload,
        task_id=payload,
        source=payload,
        env=payload,
        env_version=payload,
        split=payload,
        prompt=payload,
        policy=payload,
        run_id=payload,
        reward=0.5,
        success=None,
        termination="unknown",
        reward_components=[RewardComponent(name=payload, value=0.5)],
        tags=[payload],
        n_steps=1,
        n_tool_calls=1,
        messages=messages,
        message_seconds=[None, None, 0.25, 2.5],
        tools=json.dumps([{"name": payload}]),
        final_state=quoted,
    )


def _texts(name: str, *contents: str) -> Trajectory:
    messages = [Message(role="user" if i % 2 == 0 else "assistant", content=text) for i, text in enumerate(contents)]
    outcome: dict[str, Any] = {"reward": None, "success": None, "termination": "unknown", "n_steps": len(contents) // 2}
    return Trajectory(
        trajectory_id=name, episode_id=name, task_id=name, source="file", env="none", split="train", prompt=name,
        messages=messages, **outcome,
    )  # fmt: skip


def _signs() -> Trajectory:
    timed = {"tags": ["latency_s:9.00"], "message_seconds": [None, 1.5]}
    return _texts("signs", SIGNS, f"a picture: data:image/png;base64,{PIXEL}").model_copy(update=timed)


def _huge() -> Trajectory:
    return _texts("huge", "write much", HUGE).model_copy(update={"tags": ["latency_s:3.50"]})


def _long(sampled: Trajectory) -> Trajectory:
    """A conversation of 100,000 tokens: the turns of a sampled row, over and over."""
    times = LONG // sampled.n_tokens
    shift = [n * sampled.n_tokens for n in range(times)]
    messages = [
        message.model_copy(update={"token_start": message.token_start + by, "token_end": message.token_end + by})
        for by in shift
        for message in sampled.messages
        if message.token_start is not None and message.token_end is not None
    ]
    spans = [Span(version=n % 4, start=by, end=by + sampled.n_tokens) for n, by in enumerate(shift)]
    counts = {
        name: getattr(sampled, name) * times for name in ("n_steps", "n_tokens", "n_action_tokens", "n_tool_calls")
    }
    tokens = {name: getattr(sampled, name) * times for name in ("input_ids", "action_mask", "logprobs")}
    return _named(sampled, "long", {"messages": messages, "spans": spans, **counts, **tokens})


def _breach(sampled: Trajectory) -> Trajectory:
    """A row whose mask holds two tokens that have no log-prob."""
    own = [number for number, sampled_here in enumerate(sampled.action_mask) if sampled_here]
    logprobs = [math.nan if number in own[2:4] else value for number, value in enumerate(sampled.logprobs)]
    return _named(sampled, "breach", {"logprobs": logprobs, "message_seconds": [3.5] * len(sampled.messages)})


def _named(sampled: Trajectory, name: str, update: dict[str, Any]) -> Trajectory:
    own = {"trajectory_id": name, "episode_id": name, "task_id": name, "group_id": None, "stage": "", "fingerprint": "",
           "run_id": "", "pipeline": None}  # fmt: skip
    return sampled.model_copy(update={**own, **update})
