"""Credentials for S3: whether this process has any, and what to do if it has none.

The libraries that open a store (obstore, delta-rs, Polars, Arrow) look in different places. All of them know the
variables, web identities, and the roles of containers and machines; not all of them read profiles.
"""

import os
from functools import cache
from pathlib import Path

_ROLES = (
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
_METADATA = "http://169.254.169.254/latest/api/token"
TIMEOUT_S = 1.0


def missing_credentials() -> str | None:
    """What is missing, and the next step. None if there are credentials, right or wrong."""
    key, secret = (bool(os.environ.get(name)) for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    if key and secret:
        return None
    if key or secret:
        there, lacking = ("ID", "SECRET") if key else ("SECRET", "ID")
        names = {"ID": "AWS_ACCESS_KEY_ID", "SECRET": "AWS_SECRET_ACCESS_KEY"}
        return f"{names[there]} is set and {names[lacking]} is not; export both"
    if any(os.environ.get(name) for name in _ROLES) or _machine_has_a_role():
        return None
    profile = ""
    if os.environ.get("AWS_PROFILE") or os.path.exists(os.path.expanduser("~/.aws/credentials")):
        profile = '; profiles are not read, `eval "$(aws configure export-credentials --format env)"` exports one'
    return (
        "there are no credentials for S3: export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_ENDPOINT_URL for "
        f"another service than Amazon's){profile}"
    )


@cache
def _machine_has_a_role() -> bool:
    """Whether the metadata service of a cloud machine answers."""
    if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return False
    import urllib.request  # takes long to import, and most processes have credentials in variables

    request = urllib.request.Request(_METADATA, method="PUT", headers={"X-aws-ec2-metadata-token-ttl-seconds": "21600"})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=TIMEOUT_S):
            return True
    except OSError:
        return False


def storage_options(uri: str | Path) -> dict[str, str]:
    """Options for delta-rs, Polars and obstore, from the environment. Empty for a local folder."""
    if not str(uri).startswith("s3://"):
        return {}
    names = (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
        "AWS_ENDPOINT_URL",
    )
    options = {name.lower(): os.environ[name] for name in names if os.environ.get(name)}
    if endpoint := os.environ.get("AWS_ENDPOINT_URL_S3"):
        options["aws_endpoint_url"] = endpoint
    if options.get("aws_endpoint_url", "").startswith("http://") or os.environ.get("AWS_ALLOW_HTTP"):
        options["aws_allow_http"] = "true"
    options.setdefault("aws_region", options.pop("aws_default_region", "us-east-1"))
    options.pop("aws_default_region", None)
    return options
