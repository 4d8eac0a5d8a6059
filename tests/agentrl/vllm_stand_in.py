"""A stand-in for ``python -m vllm.entrypoints.openai.api_server``: takes its command line, loads weights from folders
and scores with them, and answers each turn with the same three tokens."""

import argparse
import sys
from pathlib import Path
from typing import Any

from speaking import Handler, Speaking

from agentrl.engines.servers import server_command
from agentrl.models.policy import Policy


class Loading(Handler):
    """What speaks vLLM's routes, and reads the weights that it is told of."""

    def post(self, asked: dict[str, Any]) -> None:
        if self.path.startswith("/collective_rpc"):
            self.server.policy = Policy.load(asked["kwargs"]["weights_path"])
        super().post(asked)


def main(arguments: list[str]) -> None:
    """Serve until the process is ended. Options that vLLM's engine gives by itself are known, and no others."""
    expected = server_command("python", Path("model"), [])
    assert arguments[:2] == expected[1:3], arguments
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in (
        "--model",
        "--host",
        "--logprobs-mode",
        "--scheduling-policy",
        "--dtype",
        "--block-size",
        "--max-num-seqs",
    ):
        parser.add_argument(name)
    flags = ("--enable-scale-out", "--disable-uvicorn-access-log", "--enforce-eager", "--no-enable-chunked-prefill")
    for name in flags:
        parser.add_argument(name, action="store_true")
    parser.add_argument("--port", type=int)
    given = parser.parse_args(arguments[2:])
    server = Speaking(Policy.load(given.model), (given.host, given.port), Loading)
    server.thread.join()


if __name__ == "__main__":
    main(sys.argv[1:])
