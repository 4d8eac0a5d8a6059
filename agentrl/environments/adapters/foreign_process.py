"""The program in another interpreter (:mod:`agentrl.environments.adapters.foreign`). It imports nothing of ours but
the module beside it that is named ``holder``, whose ``HOLDER`` is a class that takes settings and has the coroutines
``tasks``, ``begin``, ``step``, ``score`` and ``end``. It answers each JSON line of stdin with one of stdout, until
stdin ends."""

import asyncio
import contextlib
import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def serve(holder: Any, lines: Any, out: Any) -> None:
    async def answer(request: dict[str, Any]) -> None:
        number, do = request.pop("number"), request.pop("do")
        try:
            reply = {"number": number, "value": await getattr(holder, do)(**request)}
            text = json.dumps(reply)
        except Exception as error:
            why = "".join(traceback.format_exception(error))[-2000:]
            text = json.dumps({"number": number, "error": f"{type(error).__name__}: {error}\n{why}"})
        out.write(text + "\n")
        out.flush()

    loop, tasks = asyncio.get_running_loop(), set()
    while line := await loop.run_in_executor(None, lines.readline):
        task = asyncio.create_task(answer(json.loads(line)))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the package prints is no answer
    sys.stdout = sys.stderr
    holder = _load(sys.argv[1]).HOLDER(json.loads(sys.argv[2]))
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        asyncio.run(serve(holder, sys.stdin, out))
    os._exit(0)  # threads of the package are no reason to stay


if __name__ == "__main__":
    main()
