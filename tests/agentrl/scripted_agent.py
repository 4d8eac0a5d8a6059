"""An agent program of Python's library alone, which does what its policy says: ``run: COMMAND`` is run by a shell, any
other turn ends it. The first word of its task says how it misbehaves."""

import json
import os
import subprocess
import sys
import time
import urllib.request

BASE, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
TOOLS = [{"type": "function", "function": {"name": "shell", "parameters": {"type": "object", "properties": {}}}}]


def ask(messages, key=KEY, tools=TOOLS, base=BASE):  # type: ignore[no-untyped-def]
    body = {"model": os.environ["AGENTRL_MODEL"], "messages": messages, "tools": tools}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{base}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def refused(**how):  # type: ignore[no-untyped-def]
    try:
        ask([{"role": "user", "content": "x"}], **how)
    except OSError as error:
        return getattr(error, "code", type(error).__name__)
    return "answered"


def work(prompt, system=""):  # type: ignore[no-untyped-def]
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": prompt}]
    while True:
        text = ask(messages) or ""
        if not text.startswith("run: "):
            return text
        ran = subprocess.run(["sh", "-c", text[5:]], capture_output=True, text=True, timeout=60)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": ran.stdout[-200:] or "ok"}]


task = sys.stdin.read()
how = task.split(":")[0]
if how == "silent":
    sys.exit(3)
if how in ("title", "both"):
    ask([{"role": "user", "content": "A title for: " + task}], tools=[])
if how == "key":
    told = [refused(key="run-0123"), refused(key=""), refused(base="http://127.0.0.1:9/v1")]
    with open("told.json", "w") as file:
        json.dump(told, file)
text = work(task)
if how in ("helper", "both"):
    work("help with " + task, system="You are the helper.")
if how == "crash":
    os.kill(os.getpid(), 11)
if how == "hang":
    time.sleep(1000)
print("ended with", text)
