"""Runs Python blocks that share names: a JSON line with the code in, a JSON line with what went wrong out."""

import contextlib
import doctest
import json
import sys
import traceback


def run(code: str, names: dict[str, object]) -> str:
    """What went wrong; empty if nothing did. Code with prompts is a session, whose output is compared."""
    if ">>> " not in code:
        try:
            exec(compile(code, "the block", "exec"), names)
        except BaseException:
            return traceback.format_exc(limit=-3)
        return ""
    texts: list[str] = []
    test = doctest.DocTestParser().get_doctest(code, names, "block", None, 0)
    doctest.DocTestRunner().run(test, out=texts.append, clear_globs=False)
    names.update(test.globs)
    return "".join(texts)


if __name__ == "__main__":
    answers, shared = sys.stdout, {"__name__": "page"}
    sys.path.insert(0, "")
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            wrong = run(json.loads(line), shared)  # type: ignore[arg-type]
        print(json.dumps(wrong), file=answers, flush=True)
