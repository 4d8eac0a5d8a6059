"""What runs in the sandbox of an agent, of Python's own library alone: it forwards a port to the door, runs the agent,
ends all processes that it left, and hands the workspace back. The agent may end it: then there is no workspace."""

import asyncio
import contextlib
import io
import json
import os
import shutil
import signal
import stat
import sys
import tarfile
import time

PORT = 8321
REPORT = "report.json"
_KEPT = 64_000  # bytes of the end of an output


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, door: str) -> None:
    try:
        from_door, to_door = await asyncio.open_unix_connection(door)
    except OSError:
        writer.close()
        return
    await asyncio.gather(_copied(reader, to_door), _copied(from_door, writer))


async def _copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    with contextlib.suppress(OSError):
        writer.close()


async def _ran(command: list[str], settings: dict, name: str, seconds: float) -> dict:
    """Run a command in the workspace, and end whatever it began. The prompt is its standard input."""
    started = time.monotonic()
    with open("prompt", "rb") as given, open(f"{name}.out", "w+b") as out, open(f"{name}.err", "w+b") as err:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=given,
                stdout=out,
                stderr=err,
                cwd=settings["workspace"],
                env=settings["env"],
                start_new_session=True,
            )
        except OSError as error:
            return {"code": 127, "stdout": "", "stderr": str(error), "timed_out": False, "seconds": 0.0}
        timed_out = False
        try:
            await asyncio.wait_for(process.wait(), seconds)
        except TimeoutError:
            timed_out = True
        code = process.returncode
        end_others()
        await process.wait()
        ran = {"code": code, "timed_out": timed_out, "seconds": time.monotonic() - started}
        return {**ran, "stdout": _end_of(out), "stderr": _end_of(err)}


def end_others() -> None:
    """End all processes but this one, as long as there are some."""
    for _ in range(200):
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        if not any(_lives(int(name)) for name in os.listdir("/proc") if name.isdigit()):
            return
        time.sleep(0.02)


def _lives(process: int) -> bool:
    if process in (1, os.getpid()):
        return False
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _end_of(file: io.BufferedRandom) -> str:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _KEPT))
    return file.read().decode(errors="replace")


def _files(folder: str, most: int) -> tuple[list[tuple[str, os.stat_result]], int]:
    """The plain files of a folder, links not followed, and their bytes."""
    files, size = [], 0
    for above, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(above, name)
            with contextlib.suppress(OSError):
                about = os.lstat(path)
                if stat.S_ISREG(about.st_mode):
                    files.append((path, about))
                    size += about.st_size + 1024
                    if size > most:
                        return files, size
    return files, size


def hand_back(report: dict, folder: str, most: int) -> None:
    """Write the report and the files of a folder to the standard output, as a tar."""
    files, size = _files(folder, most)
    report["too_large"] = size > most
    with tarfile.open(fileobj=sys.stdout.buffer, mode="w|", format=tarfile.PAX_FORMAT) as tar:
        text = json.dumps(report).encode()
        entry = tarfile.TarInfo(REPORT)
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
        for path, about in [] if report["too_large"] else files:
            entry = tarfile.TarInfo("workspace/" + os.path.relpath(path, folder))
            entry.mode = about.st_mode & 0o777
            with contextlib.suppress(OSError), open(path, "rb") as file:
                data = file.read(about.st_size)
                entry.size = len(data)
                tar.addfile(entry, io.BytesIO(data))


async def main() -> None:
    with open("settings.json") as file:
        settings = json.load(file)
    os.remove("settings.json")
    if os.path.isdir("workspace"):
        shutil.copytree("workspace", settings["workspace"], dirs_exist_ok=True)
    report = {}
    if settings["setup"]:
        report["setup"] = await _ran(["/bin/sh", "-c", settings["setup"]], settings, "setup", settings["setup_s"])
    if not settings["setup"] or report["setup"]["code"] == 0:
        server = await asyncio.start_server(
            lambda reader, writer: _forward(reader, writer, settings["door"]), "127.0.0.1", PORT
        )
        async with server:
            report["agent"] = await _ran(settings["command"], settings, "agent", settings["seconds"])
    hand_back(report, settings["workspace"], settings["most"])


if __name__ == "__main__":
    asyncio.run(main())
