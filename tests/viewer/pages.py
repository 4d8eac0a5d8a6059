"""The pages of the viewer: the address of each, and what is there once it is drawn."""

from urllib.parse import quote

from watched import Watched

PAGES = {
    "overview": ("/", ".graph"),
    "buffer": ("/buffer", ".grid [role=gridcell] a"),
    "trajectory": ("/row/breach?lens=logprob&t=60", ".t"),
    "text": ("/row/breach?lens=text", ".turn"),
    "evaluations": ("/evaluation", ".lines"),
    "task": ("/task?env=lookup&task_id=breach", ".strip"),
    "pairs": ("/pair", ".lines"),
    "curation": ("/curation", ".lines"),
    "what-if": ("/?set=grpo.samples%3D2", ".what-if .tag"),
    "runs": ("/runs", ".narrow"),
    "run": ("/run/RUN", ".lines"),
    "calls": ("/calls", ".lines"),
    "pair": ("/pair?artifact=PAIRS&pair_id=PAIRED", ".versus .t"),
    "training": ("/training?step=0", "section[aria-labelledby=step] tbody tr"),
    "doctor": ("/doctor", ".finding, p.good"),
    "labels": ("/labels", ".labels .mark"),
    "part": ("/buffer?among=CURATED", ".part"),
    "no-row": ("/row/nothing", ".problem"),
}


LAID_OUT = "document.fonts.ready.then(() => new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0))))"
"""Fonts are there, and the layout with them was drawn: on a busy machine that may take longer than a page's content."""


def named(seen: Watched, path: str) -> str:
    """A path with the names of artifacts that this store has."""
    if "CURATED" in path:
        path = path.replace("CURATED", seen.ask("/api/curation")["funnels"][0]["artifact"])
    if "PAIRED" in path:
        pairs = seen.ask("/api/pairs")
        path = path.replace("PAIRED", quote(pairs["pairs"][0]["pair_id"], "")).replace("PAIRS", pairs["artifact"])
    return path.replace("RUN", seen.ask("/api/overview")["runs"][0]["run_id"]) if "RUN" in path else path
