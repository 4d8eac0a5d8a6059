"""10,000 conversations of a shop's agent, as its logs have them: `python make_logs.py FOLDER`.

Two teams wrote them. Among them are copies and near copies, calls whose arguments do not fit the tool, mail addresses
and keys that customers typed, and questions of the benchmark that the agent is measured on, in `FOLDER/bench.jsonl`.
"""

import json
import random
import sys
from pathlib import Path

TOOL = {
    "type": "function",
    "function": {
        "name": "order",
        "description": "Look an order up.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}
THINGS = ["lamp", "kettle", "chair", "jacket", "phone case", "gift card", "bicycle", "printer", "rug", "mirror"]
WANTS = ["refund", "exchange", "tracking", "invoice", "repair", "cancellation"]
PLACES = ["Lisbon", "Oslo", "Leeds", "Porto", "Graz", "Lyon", "Gdansk", "Turin", "Bergen", "Ghent"]
REASONS = ["it arrived broken", "it is too small", "I ordered two by mistake", "nobody answers the phone", "I moved"]


def record(number: int, draw: random.Random) -> dict[str, object]:
    """One conversation. Every 40th is a copy of an earlier one, every 25th calls the tool wrongly, every 50th holds a
    secret, every 100th asks a question of the benchmark."""
    if number % 40 == 39:
        number -= 20
        draw = random.Random(number)
    order, thing, want = 10_000 + number, draw.choice(THINGS), draw.choice(WANTS)
    reason, city = draw.choice(REASONS), draw.choice(PLACES)
    asked = f"I need a {want} for the {thing} of order {order}, because {reason}. Please send the answer to {city}."
    if number % 100 == 7:
        asked = bench_question(number // 100)
    if number % 50 == 11:
        asked += (
            f" My address is {draw.choice(['ann', 'ben', 'eva'])}.{draw.choice(PLACES).lower()}{number}@northwind.io."
        )
    if number % 250 == 13:
        asked += (
            f" The key of our account is sk-proj-{''.join(draw.choices('abcdefghijkmnpqrstuvwxyz23456789', k=40))}."
        )
    argument = f"order {order}" if number % 25 == 3 else order
    call = {"id": "c", "type": "function", "function": {"name": "order", "arguments": json.dumps({"number": argument})}}
    state = draw.choice(["delivered", "on its way", "lost"])
    done = draw.random() < 0.6
    answer = f"The {want} for order {order} is under way." if done else f"I cannot do a {want} for you."
    return {
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": f"order {order}: {thing}, {state}, {city}"},
            {"role": "assistant", "content": answer},
        ],
        "tools": [TOOL],
        "score": float(done),
    }


def bench_question(number: int) -> str:
    draw = random.Random(-1 - number)
    return (
        f"A customer of {draw.choice(PLACES)} returns a {draw.choice(THINGS)} after {10 + number} days, and the shop "
        f"takes goods back for thirty days: which of refund, exchange and repair may the agent of shift {number} offer?"
    )


def main(folder: Path, rows: int = 10_000) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for first, name in ((0, "north.jsonl"), (rows // 2, "south.jsonl")):
        lines = (json.dumps(record(number, random.Random(number))) for number in range(first, first + rows // 2))
        (folder / name).write_text("\n".join(lines) + "\n")
    questions = (json.dumps({"question": bench_question(number)}) for number in range(0, rows // 100, 2))
    (folder / "bench.jsonl").write_text("\n".join(questions) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
