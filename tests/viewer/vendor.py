"""Fetches the vendored files of the viewer again, as ``vendor.json`` pins them: ``python tests/viewer/vendor.py``.

Each file comes from one package of the npm registry, whose tarball must have the pinned hash. Browsers know no package
names, so imports such as ``from"preact"`` become ``from"./preact.js"``, and comments that name source maps go. A file
that only defines a global gets an export of it. Nothing else is changed.
"""

import base64
import hashlib
import io
import json
import re
import tarfile
import urllib.request
from pathlib import Path

VENDOR = Path(__file__).parents[2] / "flows/viewer/static/vendor"
GLOBALS = {"uplot.js": "uPlot"}
"""Files that define a global instead of an export: the export is added."""
HOMES = {"preact": "preact.js", "preact/hooks": "preact-hooks.js", "@preact/signals-core": "signals-core.js"}


def pinned() -> list[dict[str, str]]:
    """One record per file: file, package, version, license, from (its path in the tarball), integrity (of the tarball),
    sha256."""
    return json.loads((VENDOR / "vendor.json").read_text())


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def fetch(record: dict[str, str]) -> bytes:
    """The file as we ship it. Raises ValueError if the registry's tarball is not the pinned one."""
    package, version = record["package"], record["version"]
    url = f"https://registry.npmjs.org/{package}/-/{package.rpartition('/')[2]}-{version}.tgz"
    with urllib.request.urlopen(url) as answer:
        tarball = answer.read()
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(tarball).digest()).decode()
    if integrity != record["integrity"]:
        raise ValueError(f"{url} has {integrity}, and vendor.json pins {record['integrity']}")
    with tarfile.open(fileobj=io.BytesIO(tarball)) as files:
        member = files.extractfile(f"package/{record['from']}")
        assert member is not None
        content = member.read()
    if not record["file"].endswith(".js"):
        return content
    added = f"export default {GLOBALS[record['file']]};\n" if record["file"] in GLOBALS else ""
    return (browsable(content.decode()) + added).encode()


def browsable(source: str) -> str:
    """The module with imports that a browser finds beside it, without the names of source maps."""
    for package, file in HOMES.items():
        source = re.sub(rf'(\bfrom|\bimport)"{re.escape(package)}"', rf'\1"./{file}"', source)
    return re.sub(r"\n?//# sourceMappingURL=.*\n?", "\n", source)


if __name__ == "__main__":
    records = pinned()
    for record in records:
        path = VENDOR / record["file"]
        path.write_bytes(fetch(record))
        record["sha256"] = sha256(path)
        print(record["file"], record["version"], len(path.read_bytes()), "bytes")
    (VENDOR / "vendor.json").write_text(json.dumps(records, indent=2) + "\n")
