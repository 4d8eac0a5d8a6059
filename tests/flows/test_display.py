"""What a person sees of a stage that samples: on a terminal of 80 columns, and in lines."""

import io
import re
import time

import pytest
from rich.console import Console

from agentrl.flows import display

METRICS = {"success": 0.061, "episodes/s": "4.0", "tokens/s": "812"}


@pytest.mark.parametrize("width", [80, 140])
def test_a_bar_shows_how_much_how_long_and_what(width: int) -> None:
    out = io.StringIO()
    live = display.Live(Console(file=out, force_terminal=True, width=width, color_system=None))
    live.start({"sample": None}, 0, "here")
    live.stage_started("sample")
    for done in (10, 16, 24):
        live.progress("sample", done, 240, METRICS)
        time.sleep(0.3)
    live.stop()
    frames = [line for line in re.split(r"[\r\n]", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())) if line]
    [*_, shown] = [line for line in frames if "24/240" in line]
    assert re.search(r"sample .* 24/240 0:00:0\d left [-0-9:]+ +success 0.061  episodes/s", shown), shown
    assert len(shown.rstrip()) <= width
    if width == 140:
        assert shown.rstrip().endswith("success 0.061  episodes/s 4.0  tokens/s 812")


def test_a_line_says_how_much_time_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(display, "LINE_EVERY_S", 0.0)
    texts: list[str] = []
    lines = display.Lines(texts.append)
    lines.start({"sample": None}, 0, "here")
    lines.stage_started("sample")
    lines.progress("sample", 10, 110, METRICS)
    time.sleep(0.2)
    lines.progress("sample", 20, 110, METRICS)
    lines.progress("sample", 21, None, METRICS)
    start, first, later, endless = texts[1:]
    assert start == "[1/1] sample: started"
    assert first == "[1/1] sample: 10/110  success 0.061  episodes/s 4.0  tokens/s 812"
    left = re.fullmatch(re.escape(first).replace("10/110", "20/110") + r"  ([0-9.]+) s left", later)
    assert left, later
    assert 1.5 < float(left[1]) < 20, "nine times as many as took 0.2 s"
    assert endless == "[1/1] sample: 21  success 0.061  episodes/s 4.0  tokens/s 812"
