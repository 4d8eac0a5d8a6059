"""Gives rows to another viewer, in that viewer's own interpreter: lines of JSON come from standard input.

    python benchmarks/viewer_ingest.py inspect FOLDER          .eval logs: all rows in one, each long row in its own
    python benchmarks/viewer_ingest.py phoenix URL SECONDS SOME     one span for each row; long rows are left out
    python benchmarks/viewer_ingest.py late URL                a span for each line, whose name the line is
    python benchmarks/viewer_ingest.py steps PROJECT           a training step for each line, to Trackio

Nothing of agentrl is imported here. The last line that is printed is JSON: ``rows``, and ``seconds`` that they took.
``phoenix`` stops after SOME rows if ten times as many would take longer than SECONDS.
"""

import asyncio
import gzip
import itertools
import json
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

AT_ONCE = 500
STILL_S = 30.0
"""Seconds without a new span after which no more will come."""
METADATA = ("trajectory_id", "task_id", "env", "level", "success", "reward", "termination", "policy_version")
Row = dict[str, Any]


def main() -> None:
    rows = map(json.loads, sys.stdin.buffer)
    started = time.time()
    if sys.argv[1] == "inspect":
        count = asyncio.run(logs(Path(sys.argv[2]), rows))
    elif sys.argv[1] == "phoenix":
        count = spans(sys.argv[2], rows, float(sys.argv[3]), int(sys.argv[4]))
    else:
        {"late": late, "steps": steps}[sys.argv[1]](sys.argv[2])
        return
    print(json.dumps({"rows": count, "seconds": round(time.time() - started, 1)}))


def is_long(row: Row) -> bool:
    return row["trajectory_id"].startswith("long-")


# Inspect


async def logs(folder: Path, rows: Iterator[Row]) -> int:
    """The number of samples. Long rows are written by Inspect's own recorder. It takes milliseconds for each sample, so
    the many rows are written as it writes the first of them."""
    folder.mkdir(parents=True, exist_ok=True)
    first = next(rows)
    form = await _Log.begin(folder, "rows")
    await form.add(first)
    await form.end()
    many, count = _Many(folder / "rows.eval", first), 0
    for row in itertools.chain([first], rows):
        count += 1
        if is_long(row):
            log = await _Log.begin(folder, row["trajectory_id"])
            await log.add(row)
            await log.end()
        else:
            many.add(row)
    many.end()
    return count


class _Many:
    """A log with the header of one that Inspect wrote, and samples in the form of its first one."""

    def __init__(self, path: Path, first: Row) -> None:
        from inspect_ai.log import read_eval_log

        header = read_eval_log(str(path), header_only=True)
        self.header = json.loads(header.model_dump_json(exclude_none=True))
        sample = _sample(first)
        self.form = json.loads(sample.model_dump_json(exclude_none=True))
        self.summary = json.loads(sample.summary().model_dump_json(exclude_none=True))
        self.summaries: list[dict[str, Any]] = []
        self.zip = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        start = {name: self.header[name] for name in ("version", "eval", "plan") if name in self.header}
        self.zip.writestr("_journal/start.json", json.dumps(start))

    def add(self, row: Row) -> None:
        messages = [
            {"role": message["role"], "content": message["content"]}
            | ({"function": message["name"] or "find"} if message["role"] == "tool" else {})
            | ({"tool_calls": [_call(call) for call in message["tool_calls"]]} if message["tool_calls"] else {})
            for message in row["messages"]
        ]
        score = {"exact": {"value": row["reward"], "metadata": {"success": row["success"]}}}
        own = {"id": row["trajectory_id"], "input": row["prompt"], "scores": score, "metadata": _kept(row)}
        own["uuid"] = row["trajectory_id"]
        choice = {"message": messages[-1], "stop_reason": "stop"}
        output = {"model": row["policy"], "choices": [choice], "completion": messages[-1]["content"]}
        sample = self.form | own | {"messages": messages, "output": output}
        self.zip.writestr(f"samples/{row['trajectory_id']}_epoch_1.json", json.dumps(sample))
        self.summaries.append(self.summary | own | {"message_count": len(messages)})

    def end(self) -> None:
        self.header["results"] |= {"total_samples": len(self.summaries), "completed_samples": len(self.summaries)}
        self.zip.writestr("summaries.json", json.dumps(self.summaries))
        self.zip.writestr("header.json", json.dumps(self.header))
        self.zip.close()


def _call(call: dict[str, str]) -> dict[str, Any]:
    return {"id": call["id"], "function": call["name"], "arguments": json.loads(call["arguments"])}


def _kept(row: Row) -> Row:
    return {name: row[name] for name in ("task_id", "env", "level", "termination", "policy_version", "n_tokens")}


class _Log:
    def __init__(self, recorder: Any, spec: Any) -> None:
        self.recorder, self.spec, self.count = recorder, spec, 0

    @classmethod
    async def begin(cls, folder: Path, name: str) -> "_Log":
        from inspect_ai.log import EvalConfig, EvalDataset, EvalPlan, EvalSpec
        from inspect_ai.log._recorders.eval import EvalRecorder

        recorder = EvalRecorder(str(folder))
        spec = EvalSpec(
            created="2026-01-01T00:00:00+00:00",
            task=name,
            eval_id=name,
            run_id=name,
            task_id=name,
            dataset=EvalDataset(name="bench"),
            model="warm/3f2a91c4",
            config=EvalConfig(),
        )
        await recorder.log_init(spec, str(folder / f"{name}.eval"), clean=True)
        await recorder.log_start(spec, EvalPlan())
        return cls(recorder, spec)

    async def add(self, row: Row) -> None:
        await self.recorder.log_sample(self.spec, _sample(row))
        self.count += 1

    async def end(self) -> None:
        from inspect_ai.log import EvalMetric, EvalResults, EvalScore, EvalStats

        scores = [EvalScore(name="exact", scorer="exact", metrics={"mean": EvalMetric(name="mean", value=0.5)})]
        results = EvalResults(total_samples=self.count, completed_samples=self.count, scores=scores)
        await self.recorder.log_finish(self.spec, "success", EvalStats(), results, None, header_only=True)


def _sample(row: Row) -> Any:
    from inspect_ai.log import EvalSample
    from inspect_ai.model import ChatMessageAssistant, ChatMessageTool, ChatMessageUser, ModelOutput
    from inspect_ai.scorer import Score
    from inspect_ai.tool import ToolCall

    messages: list[Any] = []
    for message in row["messages"]:
        if message["role"] == "assistant":
            calls = [ToolCall(**_call(call)) for call in message["tool_calls"]]
            messages.append(
                ChatMessageAssistant(content=message["content"], tool_calls=calls or None, source="generate")
            )
        elif message["role"] == "tool":
            messages.append(ChatMessageTool(content=message["content"], function=message["name"] or "find"))
        else:
            messages.append(ChatMessageUser(content=message["content"], source="input"))
    return EvalSample(
        id=row["trajectory_id"],
        epoch=1,
        input=row["prompt"],
        target="",
        messages=messages,
        output=ModelOutput.from_content(row["policy"], messages[-1].content),
        scores={"exact": Score(value=row["reward"], metadata={"success": row["success"]})},
        metadata=_kept(row),
    )


# Phoenix


def spans(url: str, rows: Iterator[Row], limit: float, some: int) -> int:
    """The number of spans that the server has in the end."""
    started, sent = time.time(), 0
    batch: list[Any] = []
    for row in rows:
        if is_long(row):
            continue
        number = sent + len(batch)
        batch.append(_span(row, number, int((started - 3600) * 1e9) + number * 10**6))  # pages show the last days
        if len(batch) < AT_ONCE:
            continue
        _post(url, batch)
        sent, batch = sent + len(batch), []
        if sent % 5000 == 0:
            wait(url, sent - 5000, limit)  # its queue refuses spans if it grows too long
        if sent == some:
            had = wait(url, sent, limit)
            if (time.time() - started) * 10 > limit:
                return had
    if batch:
        _post(url, batch)
    return wait(url, sent + len(batch), limit)


def late(url: str) -> None:
    """Says the id of the project, and the time after each post."""
    print(next(project["id"] for project in projects(url) if project["name"] == "default"), flush=True)
    for number, line in enumerate(sys.stdin):
        span = _span(EXAMPLE, LATE + number, time.time_ns())
        span.name = line.strip()
        _post(url, [span], tries=20)
        print(time.time(), flush=True)


def steps(project: str) -> None:
    """Says when it is ready. Lines hold the values of a step."""
    import trackio

    trackio.init(project=project, name="train")
    print(READY, flush=True)
    for number, line in enumerate(sys.stdin):
        trackio.log(json.loads(line), step=number)
    trackio.finish()


READY = "ready for steps"
LATE = time.time_ns() >> 4
"""Number of the first span that comes late: none of the others has it, nor one of another run."""
EXAMPLE: Row = {"messages": [{"role": "assistant", "content": "late"}], "prompt": "late", "n_tokens": 1}
EXAMPLE |= dict.fromkeys(METADATA, "late") | {"policy": "late"}


def projects(url: str) -> list[dict[str, Any]]:
    query = json.dumps({"query": "{ projects { edges { node { id name traceCount } } } }"}).encode()
    request = urllib.request.Request(f"{url}/graphql", query, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return [edge["node"] for edge in json.load(answer)["data"]["projects"]["edges"]]


def count(url: str) -> int:
    """Traces that the server has."""
    return sum(int(project["traceCount"]) for project in projects(url))


def wait(url: str, least: int, limit: float) -> int:
    """Until the server has so many, or gets no more: it drops spans while its database is locked. Returns how many."""
    end = time.time() + limit
    seen, grew = 0, time.time()
    while (now := count(url)) < least:
        if now > seen:
            seen, grew = now, time.time()
        if time.time() - grew > STILL_S:
            return now
        if time.time() > end:
            raise TimeoutError(f"Phoenix has {now} of {least} spans after {limit:g} s")
        time.sleep(0.5)
    return now


def _post(url: str, actual: list[Any], tries: int = 600) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    body = ExportTraceServiceRequest()
    body.resource_spans.add().scope_spans.add().spans.extend(actual)
    headers = {"content-type": "application/x-protobuf", "content-encoding": "gzip"}
    for _ in range(tries):
        packed = gzip.compress(body.SerializeToString(), 1)
        try:
            urllib.request.urlopen(urllib.request.Request(f"{url}/v1/traces", packed, headers), timeout=120).close()
            return
        except urllib.error.HTTPError as error:  # 429 or 503: its queue is full
            if error.code not in (429, 503):
                raise
            time.sleep(0.5)
    raise TimeoutError("Phoenix takes no more spans")


def _span(row: Row, number: int, start: int) -> Any:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

    values: dict[str, Any] = {
        "openinference.span.kind": "LLM",
        "llm.model_name": row["policy"],
        "input.value": row["prompt"],
        "output.value": row["messages"][-1]["content"],
        "llm.token_count.total": row["n_tokens"],
        "metadata": json.dumps({name: row[name] for name in METADATA}),
    }
    for position, message in enumerate(row["messages"][:-1]):
        values[f"llm.input_messages.{position}.message.role"] = message["role"]
        values[f"llm.input_messages.{position}.message.content"] = message["content"]
    values["llm.output_messages.0.message.role"] = "assistant"
    values["llm.output_messages.0.message.content"] = row["messages"][-1]["content"]
    attributes = [
        KeyValue(key=key, value=AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=value))
        for key, value in values.items()
    ]
    return Span(
        trace_id=(number + 1).to_bytes(16, "big"),
        span_id=(number + 1).to_bytes(8, "big"),
        name=row["trajectory_id"],
        start_time_unix_nano=start,
        end_time_unix_nano=start + 10**9,
        attributes=attributes,
        status=Status(code=Status.STATUS_CODE_OK),
    )


if __name__ == "__main__":
    main()
