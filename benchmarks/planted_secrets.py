# ruff: noqa: E501 (lines of samples)
"""Rows with planted secrets among rows without: what redaction is measured on, with the truth beside it.

Clean rows are conversations of coding and service agents: code and pages of this project, listings, logs, JSON, and
what is most like a secret without being one (digests, ids, versions, dates, names of variables). Secrets are drawn by
kind, each in one of several surroundings, in a message, in the arguments of a call, or in both.
"""

import base64
import json
import random
import string
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentrl.schemas.trajectory import Message, Role, Termination, ToolCall, Trajectory

ROOT = Path(__file__).resolve().parent.parent
Draw = Callable[[random.Random], str]
LOWER, HEX, ALNUM = string.ascii_lowercase, string.hexdigits[:16], string.ascii_letters + string.digits
URLSAFE, UPPER = ALNUM + "-_", string.ascii_uppercase + string.digits


def _of(prefix: str, alphabet: str, length: int, suffix: str = "") -> Draw:
    return lambda random: prefix + "".join(random.choice(alphabet) for _ in range(length)) + suffix


def _password(random: random.Random) -> str:
    word = random.choice(["Winter", "harbor", "Tulip", "rocket", "Quartz", "maple"])
    return word + random.choice("!#$%&*") + str(random.randrange(100, 9999)) + random.choice(["", "x", "Q!"])


def _private_key(random: random.Random) -> str:
    name = random.choice(["RSA ", "EC ", "OPENSSH ", ""])
    body = base64.b64encode(random.randbytes(random.randrange(220, 900))).decode()
    lines = "\n".join(body[at : at + 64] for at in range(0, len(body), 64))
    return f"-----BEGIN {name}PRIVATE KEY-----\n{lines}\n-----END {name}PRIVATE KEY-----"


def _jwt(random: random.Random) -> str:
    def part(value: object) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")

    claims = {"sub": str(random.randrange(10**9)), "iat": random.randrange(1_600_000_000, 1_800_000_000)}
    return f"{part({'alg': 'HS256', 'typ': 'JWT'})}.{part(claims)}.{_of('', URLSAFE, 43)(random)}"


FIRST = ["amelia", "jonas", "priya", "wei", "lars", "fatima", "diego", "hana", "olu", "marta"]
LAST = ["hoffmann", "okafor", "lindqvist", "tanaka", "moreau", "petrov", "silva", "novak", "haddad", "kowalski"]


def _person(random: random.Random) -> str:
    return f"{random.choice(FIRST)}{random.choice(['.', '_', ''])}{random.choice(LAST)}"


def _mail(random: random.Random) -> str:
    domain = random.choice(["northwind.io", "acme-corp.com", "gmail.com", "uni-heidelberg.de", "contoso.co.uk"])
    return f"{_person(random)}{random.randrange(10, 99)}@{domain}"


def _phone(random: random.Random) -> str:
    area = random.choice(["212", "415", "617", "303", "206"])
    exchange, line = random.randrange(220, 990), random.randrange(1000, 9999)
    exchange += exchange % 100 == 11
    shapes = [f"({area}) {exchange}-{line}", f"+1 {area} {exchange} {line}", f"{area}-{exchange}-{line}"]
    return random.choice([*shapes, f"+49 30 {random.randrange(200000, 999999)}{random.randrange(10, 99)}"])


def _ipv4(random: random.Random) -> str:
    first = random.choice(["10", "172", "192.168", "34", "52", "203"])
    rest = [str(random.randrange(16, 250)) for _ in range(3 - first.count("."))]
    return ".".join([first, *rest])


def _inner_host(random: random.Random) -> str:
    name = f"{random.choice(['db', 'web', 'cache', 'build', 'gpu'])}-{random.randrange(1, 99):02d}"
    return f"{name}.{random.choice(['prod', 'eu', 'ops'])}.{random.choice(['internal', 'corp', 'acme.lan'])}"


def _user(random: random.Random) -> str:
    return f"{random.choice(FIRST)[0]}{random.choice(LAST)}{random.choice(['', str(random.randrange(2, 99))])}"


@dataclass(frozen=True)
class Kind:
    """A kind of secret: how it is drawn, and texts that it stands in."""

    draw: Draw
    around: tuple[str, ...]


ENV_FILE = "$ cat .env\nDEBUG=0\n{name}={secret}\nPORT=8000\n"
KINDS: dict[str, Kind] = {
    "aws access key": Kind(
        _of("AKIA", UPPER, 16),
        ("aws_access_key_id = {secret}", "export AWS_ACCESS_KEY_ID={secret}", "using key {secret} now"),
    ),
    "aws secret key": Kind(
        _of("", ALNUM + "+/", 40), ("aws_secret_access_key = {secret}", 'AWS_SECRET_ACCESS_KEY="{secret}"')
    ),
    "github token": Kind(
        _of("ghp_", ALNUM, 36),
        ("git clone https://{secret}@github.com/acme/tool.git", "GITHUB_TOKEN={secret}", "pushed with {secret}."),
    ),
    "gitlab token": Kind(
        _of("glpat-", URLSAFE, 20),
        ("PRIVATE-TOKEN: {secret}", "curl -H 'PRIVATE-TOKEN: {secret}' https://gitlab.com/api/v4/projects"),
    ),
    "slack token": Kind(
        lambda r: f"xoxb-{r.randrange(10**11, 10**12)}-{r.randrange(10**12, 10**13)}-{_of('', ALNUM, 24)(r)}",
        ("slack = WebClient(token='{secret}')", "SLACK_BOT_TOKEN={secret}"),
    ),
    "slack webhook": Kind(
        lambda r: f"hooks.slack.com/services/T{_of('', UPPER, 8)(r)}/B{_of('', UPPER, 8)(r)}/{_of('', ALNUM, 24)(r)}",
        ("curl -X POST https://{secret} -d @x.json",),
    ),
    "stripe key": Kind(_of("sk_live_", ALNUM, 24), ('stripe.api_key = "{secret}"', "the key is {secret}")),
    "openai key": Kind(
        _of("sk-proj-", URLSAFE, 44, "7"),
        ("OPENAI_API_KEY={secret}", "client = OpenAI(api_key='{secret}')", "I will use {secret} for it"),
    ),
    "anthropic key": Kind(_of("sk-ant-api03-", URLSAFE, 80), ("x-api-key: {secret}", "ANTHROPIC_API_KEY={secret}")),
    "hugging face token": Kind(_of("hf_", ALNUM, 34), ("huggingface-cli login --token {secret}", "HF_TOKEN={secret}")),
    "google key": Kind(
        _of("AIza", URLSAFE, 35), ("https://maps.googleapis.com/maps/api/js?key={secret}", "key={secret}")
    ),
    "npm token": Kind(_of("npm_", ALNUM, 36), ("//registry.npmjs.org/:_authToken={secret}", "NPM_TOKEN={secret}")),
    "sendgrid key": Kind(
        lambda r: f"SG.{_of('', URLSAFE, 22)(r)}.{_of('', URLSAFE, 43)(r)}",
        ("SENDGRID_API_KEY='{secret}'", "mail sent with {secret}"),
    ),
    "twilio key": Kind(_of("SK", HEX, 32), ("twilio: {secret}",)),
    "jwt": Kind(_jwt, ("Cookie: session={secret}", "token {secret} expires at noon")),
    "bearer token": Kind(
        _of("", ALNUM + "-_", 40, "3"),
        ("Authorization: Bearer {secret}", "curl -H 'Authorization: Bearer {secret}' https://api.acme.dev/v1/me"),
    ),
    "api key by name": Kind(
        _of("", HEX, 32), ('"api_key": "{secret}"', "WEATHER_API_KEY={secret}", "client_secret: {secret}")
    ),
    "private key": Kind(_private_key, ("$ cat deploy.pem\n{secret}\n", "the deploy key:\n{secret}")),
    "password by name": Kind(
        _password,
        (
            "DB_PASSWORD={secret}",
            'password: "{secret}"',
            "password = '{secret}'",
            "the password is {secret}",
            "mysql -u root -p{secret} shop",
        ),
    ),
    "password in an url": Kind(
        _of("", ALNUM, 14), ("postgres://app:{secret}@localhost:5432/shop", "redis://:{secret}@cache:6379/0")
    ),
    "mail address": Kind(
        _mail, ("contact {secret} about it", "To: {secret}", "user <{secret}> replied", '{{"email": "{secret}"}}')
    ),
    "phone number": Kind(_phone, ("call me at {secret} tomorrow", "Phone: {secret}", '{{"phone": "{secret}"}}')),
    "inner host": Kind(_inner_host, ("connecting to {secret}:5432", "https://{secret}/health is up")),
    "address of a machine": Kind(_ipv4, ("accepted connection from {secret} port 51022", "ping {secret}")),
    "user in a path": Kind(
        _user,
        (
            "/home/{secret}/projects/shop/main.py",
            "C:\\Users\\{secret}\\AppData\\Local",
            "/Users/{secret}/src/app.ts:12",
        ),
    ),
    "user and host of a prompt": Kind(_user, ("{secret}@localhost:~/app$ make test", "ssh {secret}@localhost uptime")),
}


def _near_misses(random: random.Random) -> str:
    """Lines that are like secrets, and are none."""
    digest = _of("", HEX, 40)(random)
    lines = [
        f"commit {digest}\nMerge: {digest[:7]} {_of('', HEX, 7)(random)}",
        f"sha256:{_of('', HEX, 64)(random)}  dist/app-{random.randrange(9)}.{random.randrange(20)}.{random.randrange(9)}.tar.gz",
        f'{{"id": "{uuid.UUID(int=random.getrandbits(128))}", "status": "ok", "total": {random.randrange(10**6)}}}',
        f"order #W{random.randrange(10**6, 10**7)} item {random.randrange(10**9, 10**10)} price {random.randrange(999)}.99",
        f"2026-0{random.randrange(1, 9)}-{random.randrange(10, 28)} 1{random.randrange(9)}:22:31.{random.randrange(999999):06d} INFO worker {random.randrange(99)}: 12 of 40 done",
        f"numpy=={random.randrange(1, 3)}.{random.randrange(26)}.{random.randrange(9)} torch-2.13.0 version 10.12.14.{random.randrange(16, 99)}",
        "token = tokenizer.convert_ids_to_tokens(ids[0]); pad_token='<pad>'; max_tokens=4096",
        "password = getpass.getpass('Password: ')\nif password != confirm_password:\n    raise ValueError('password')",
        "api_key = os.environ['OPENAI_API_KEY']\nsecret = settings.SECRET_KEY\ntoken: str | None = None",
        "def login(username: str, password: str) -> Session:\n    return self.client.post('/login', json={'username': username, 'password': password})",
        "@pytest.mark.parametrize('user', ['admin', 'guest'])\nnpm install react@18.2.0 @types/node@20.4.1",
        "GET http://localhost:8080/api/v1/users?page=2&limit=50 200 12ms from 127.0.0.1",
        f"data:image/png;base64,{base64.b64encode(random.randbytes(90)).decode()}",
        "threading.local() std::vector<int> a::b self.local = x.internal.y",
        "Set `DATABASE_URL=postgres://user:password@localhost/db` and `API_KEY=your-api-key-here` first.",
        f"MAC {':'.join(_of('', HEX, 2)(random) for _ in range(6))} mask 255.255.255.0 time 12:34:5{random.randrange(9)}",
        f"tests/test_api.py::test_{random.choice(LAST)} PASSED [{random.randrange(100)}%] in 0.{random.randrange(99)}s",
        f"seat {random.randrange(1, 40)}C flight HAT{random.randrange(100, 300)} on 2024-05-{random.randrange(10, 30)}, $ {random.randrange(100, 900)}",
        f"fingerprint {_of('', HEX, 16)(random)} loss 0.{random.randrange(10**6)} lr 3e-{random.randrange(4, 7)} step {random.randrange(10**5)}",
        "drwxr-xr-x 2 root root 4096 Nov 26 11:34 docs\nuid=0(root) gid=0(root) /home/user/app /home/runner/work",
    ]
    return random.choice(lines)


@cache
def _pages() -> tuple[str, ...]:
    """Pieces of this project's code and pages, of about 500 characters."""
    files = sorted(
        [*(ROOT / "datastore").rglob("*.py"), *(ROOT / "pipelines").rglob("*.py"), *(ROOT / "agentrl").glob("*/*.py")]
    )
    files = [file for file in files if "redact" not in file.relative_to(ROOT).as_posix()]
    texts = [file.read_text() for file in files[::3]]
    return tuple(text[at : at + 500] for text in texts for at in range(0, len(text) - 500, 2500))


TOOLS = json.dumps(
    [
        {"type": "function", "function": {"name": name, "description": about, "parameters": {"type": "object", "properties": {key: {"type": "string"}}}}}
        for name, about, key in (("bash", "Runs a command.", "command"), ("read", "Reads a file.", "path"), ("lookup", "Finds an order.", "order_id"))
    ]
)  # fmt: skip
QUESTIONS = (
    "Find out why {what} fails.",
    "Please summarise {what}.",
    "My order is late, can you look into {what}?",
    "Fix {what}.",
)
SUBJECTS = ("the login form", "the nightly build", "test_payment", "the invoice export", "order W4082615", "the parser")


@dataclass(frozen=True)
class Planted:
    """``secret`` of a kind stands in the row of this number."""

    row: int
    kind: str
    secret: str


def planted_rows(count: int, secrets: int, seed: int = 0) -> tuple[list[Trajectory], list[Planted]]:
    """``count`` rows, and the ``secrets`` planted in as many of them, the kinds in turn."""
    draw = random.Random(seed)
    holders = sorted(draw.sample(range(count), secrets))
    kinds = list(KINDS)
    planted = [
        Planted(row, kinds[number % len(kinds)], KINDS[kinds[number % len(kinds)]].draw(draw))
        for number, row in enumerate(holders)
    ]
    by_row = {each.row: each for each in planted}
    return [_row(number, by_row.get(number), random.Random(f"{seed}-{number}")) for number in range(count)], planted


def _row(number: int, planted: Planted | None, random: random.Random) -> Trajectory:
    holding = ""
    if planted:
        around = random.choice(KINDS[planted.kind].around)
        holding = around.replace("{secret}", planted.secret).replace("{{", "{").replace("}}", "}")
    where = random.choice(["argument", "answer", "said"]) if planted else ""
    question = random.choice(QUESTIONS).format(what=random.choice(SUBJECTS))
    command = f"cat {random.choice(['src/app.py', 'README.md', 'logs/today.log'])}"
    if where == "argument":
        command += f" && cat <<'EOF'\n{holding}\nEOF"
    shown = [random.choice(_pages()), _near_misses(random), _near_misses(random)]
    if where == "answer":
        shown.insert(random.randrange(4), holding)
    answer = f"Done. {_near_misses(random)}" + (f"\n{holding}" if where == "said" else "")
    messages = [
        Message(role=Role.SYSTEM, content="You are an agent. Use the tools."),
        Message(role=Role.USER, content=question),
        Message(
            role=Role.ASSISTANT,
            reasoning="Look first.",
            tool_calls=[ToolCall(id="c1", name="bash", arguments=json.dumps({"command": command}))],
        ),
        Message(role=Role.TOOL, content="\n".join(shown), tool_call_id="c1", name="bash"),
        Message(role=Role.ASSISTANT, content=answer),
    ]
    return with_tokens(number, question, messages)


@cache
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer of 4,000 tokens, with the control tokens of ChatML."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(_pages()[:200], trainer)
    made.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    return made


def _rendered(message: Message) -> str:
    calls = "".join(
        f"\n<tool_call>\n{json.dumps({'name': call.name, 'arguments': json.loads(call.arguments)})}\n</tool_call>"
        for call in message.tool_calls
    )
    thought = f"<think>\n{message.reasoning}\n</think>\n" if message.reasoning else ""
    return f"{thought}{message.content}{calls}"


def with_tokens(number: int, prompt: str, messages: list[Message]) -> Trajectory:
    """A row of these messages, with the tokens that ChatML makes of them; the assistant's were sampled."""
    ids: list[int] = []
    mask: list[bool] = []
    spoken = []
    for message in messages:
        head = tokenizer().encode(f"<|im_start|>{message.role.value}\n", add_special_tokens=False).ids
        body = tokenizer().encode(f"{_rendered(message)}<|im_end|>", add_special_tokens=False).ids
        start = len(ids) + len(head)
        sampled = message.role is Role.ASSISTANT
        ids += head + body
        mask += [False] * len(head) + [sampled] * len(body)
        spoken.append(message.model_copy(update={"token_start": start, "token_end": len(ids)}))
    return Trajectory(
        trajectory_id=f"planted-{number:06d}",
        episode_id=f"planted-{number:06d}",
        task_id=f"task-{number}",
        source="model",
        env="terminal",
        split="train",
        prompt=prompt,
        reward=1.0,
        success=True,
        termination=Termination.ANSWERED,
        n_steps=2,
        n_tokens=len(ids),
        n_action_tokens=sum(mask),
        n_tool_calls=1,
        messages=spoken,
        tools=TOOLS,
        tokenizer="chatml-4000",
        input_ids=ids,
        action_mask=mask,
        logprobs=[-0.25 if sampled else float("nan") for sampled in mask],
    )


def texts_of(row: Trajectory) -> Iterator[str]:
    """All that a reader of a row sees: its texts, its JSON as text and with its escapes resolved, and what its tokens
    say."""
    yield row.prompt
    for message in row.messages:
        yield message.content
        yield message.reasoning or ""
        for call in message.tool_calls:
            yield call.arguments
            yield (
                json.dumps(json.loads(call.arguments), ensure_ascii=False).encode().decode("unicode_escape", "replace")
            )
    yield row.tools
    yield row.final_state
    yield tokenizer().decode(row.input_ids, skip_special_tokens=False)
