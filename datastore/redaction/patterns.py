"""What secrets look like: one table of regular expressions, beside those of ``detect-secrets``.

If an expression has a group ``s``, that alone is the secret; the rest is its surroundings.
Every repetition is bounded or cannot overlap what follows it, so that no text takes more than linear time.
"""

import re
from typing import NamedTuple

PLACEHOLDER = re.compile(r"<[A-Z][A-Z0-9_]{0,40}_[1-9][0-9]{0,9}>")
"""What stands for a secret: its kind and a number. It is never a secret itself."""


class Pattern(NamedTuple):
    """What a secret of a kind looks like. A text in which none of ``hints`` stands, in small letters, has none: that is
    looked up first, since it takes a hundredth of the time. Without hints every text is searched."""

    kind: str
    expression: re.Pattern[str]
    hints: tuple[str, ...] = ()


Patterns = tuple[Pattern, ...]


def _compiled(*patterns: tuple[str, str, str]) -> Patterns:
    """Patterns of kind, hints (words with spaces between them) and expression."""
    return tuple(Pattern(kind, re.compile(expression), tuple(hints.split())) for kind, hints, expression in patterns)


KEYS = _compiled(
    (
        "AWS_KEY",
        "akia asia abia acca a3t",
        r"(?<![A-Za-z0-9])(?:A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])",
    ),
    (
        "AWS_SECRET",
        "aws",
        r"(?i:aws[^\n]{0,40}?(?:secret|key)[^\n]{0,20}?[\s:=\"'])(?P<s>[A-Za-z0-9/+]{40})(?![A-Za-z0-9/+=])",
    ),
    ("ANTHROPIC_KEY", "sk-ant-", r"\bsk-ant-[\w-]{20,200}"),
    ("OPENAI_KEY", "sk-", r"\bsk-(?!ant-)(?:proj-|svcacct-|admin-|or-v1-)?(?=[\w-]{0,200}\d)[\w-]{20,200}"),
    (
        "GITHUB_TOKEN",
        "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_",
        r"\b(?:gh[pousr]_[A-Za-z0-9]{36,255}|github_pat_[A-Za-z0-9_]{40,255})",
    ),
    ("HUGGING_FACE_TOKEN", "hf_ api_org_", r"\b(?:hf|api_org)_[A-Za-z0-9]{30,60}\b"),
    ("GOOGLE_KEY", "aiza ya29. gocspx-", r"\bAIza[\w-]{35}|\bya29\.[\w-]{20,400}|\bGOCSPX-[\w-]{20,60}"),
    ("NPM_TOKEN", "npm_", r"\bnpm_[A-Za-z0-9]{36}\b"),
    ("SLACK_TOKEN", "xox xapp-", r"\bxox[abeoprs]-[A-Za-z0-9-]{10,200}|\bxapp-\d-[A-Za-z0-9-]{10,200}"),
    ("SLACK_WEBHOOK", "hooks.slack", r"\bhooks\.slack\.com/(?:services|workflows)/[\w/]{20,120}"),
    ("STRIPE_KEY", "k_live_ k_test_ whsec_", r"\b(?:[sr]k_(?:live|test)|whsec)_[A-Za-z0-9]{16,120}"),
    ("TWILIO_KEY", "ac sk", r"\b(?:AC|SK)[0-9a-f]{32}\b"),
    ("DIGITALOCEAN_TOKEN", "_v1_", r"\bdo[opr]_v1_[0-9a-f]{64}\b"),
    ("DATABRICKS_TOKEN", "dapi", r"\bdapi[0-9a-f]{32}(?:-\d)?\b"),
    ("SHOPIFY_TOKEN", "shp", r"\bshp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}\b"),
    ("VAULT_TOKEN", "hvs. hvb. hvr.", r"\bhv[sbr]\.[\w-]{20,300}"),
    ("DOCKER_TOKEN", "dckr_", r"\bdckr_(?:pat|oat)_[\w-]{20,100}"),
    ("GRAFANA_TOKEN", "glsa_ glc_", r"\bgl(?:sa|c)_[A-Za-z0-9_=+/]{32,200}"),
    ("LINEAR_KEY", "lin_", r"\blin_(?:api|oauth)_[A-Za-z0-9]{32,80}"),
    ("MAILGUN_KEY", "key-", r"\bkey-[0-9a-f]{32}\b"),
    ("POSTMAN_KEY", "pmak-", r"\bPMAK-[0-9a-f]{24}-[0-9a-f]{34}\b"),
    ("AGE_KEY", "age-secret", r"\bAGE-SECRET-KEY-1[A-Z0-9]{50,70}"),
    ("AZURE_KEY", "key=", r"\b(?:AccountKey|SharedAccessKey)=(?P<s>[A-Za-z0-9+/]{40,90}={0,2})"),
    ("JWT", "eyj", r"\beyJ[\w-]{8,4000}\.eyJ[\w-]{8,8000}(?:\.[\w-]{0,2000})?"),
    ("BEARER_TOKEN", "bearer", r"(?i:\bbearer\s{1,3})(?P<s>(?=[\w.~+/=-]{0,400}\d)[\w.~+/=-]{16,4000})"),
    (
        "BEARER_TOKEN",
        "authorization",
        r"(?i:\bauthorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:basic|token|apikey)\s{1,3})(?P<s>[\w.~+/=:-]{12,4000})",
    ),
)

_ARMOUR = r"[A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
_LINES = r"(?:[A-Za-z0-9+/=]{16,}+(?:\s|\\[nr])*+)"
"""Possessive, so that text that is none is given up at once."""
PRIVATE_KEYS = _compiled(
    ("PRIVATE_KEY", "private", rf"-----BEGIN {_ARMOUR}(?:(?!-----)[\s\S]){{32,16000}}-----END {_ARMOUR}"),
    # cut off at its end, or at its beginning
    (
        "PRIVATE_KEY",
        "private",
        rf"-----BEGIN {_ARMOUR}(?:\s|\\[nr]|[A-Z][\w-]{{2,20}}: [^\n\\]{{0,80}}){{0,12}}{_LINES}{{1,400}}+",
    ),
    (
        "PRIVATE_KEY",
        "private",
        rf"(?<![A-Za-z0-9+/=]){_LINES}{{1,400}}+(?:[A-Za-z0-9+/=]{{1,15}}+(?:\s|\\[nr])*+)?-----END {_ARMOUR}",
    ),
)

PASSWORD_NAME = r"(?:pass(?:word|wd|phrase|code)|pwd|pgpassword|mysql_pwd)"
SECRET_NAME = (
    r"(?:api[_-]?key|access[_-]?key|secret|auth[_-]?key|account[_-]?key|private[_-]?key|encryption[_-]?key|"
    r"signing[_-]?key|(?<!page)(?<!page[_-])token(?!i[sz])|credentials?|session[_-]?id|sessionid)"
)
PASSWORD_HINTS = ("pass", "pw", "curl", "sql")
SECRET_HINTS = ("key", "secret", "token", "credential", "session")
_QUOTED = r"(?:\"(?P<d>[^\"\n\\]{6,200})\"|'(?P<q>[^'\n\\]{6,200})')"
_ASSIGN = r"\\?[\"']?\]?\s{0,4}(?::=|=>|=(?!=)|:(?!:))\s{0,4}"
ASSIGNED_PASSWORD = re.compile(
    rf"(?i:(?<![A-Za-z])[\w.-]{{0,40}}{PASSWORD_NAME}[\w-]{{0,20}}){_ASSIGN}(?:{_QUOTED}|\\?[\"']?(?P<u>[^\s\"'`,;|<>\\]{{6,200}}))"
)
ASSIGNED_SECRET = re.compile(
    rf"(?i:(?<![A-Za-z])[\w.-]{{0,40}}{SECRET_NAME}[\w-]{{0,20}}){_ASSIGN}(?:{_QUOTED}|\\?[\"']?(?P<u>[^\s\"'`,;|<>\\]{{12,400}}))"
)
"""``name = value`` with a name that says what the value is. Whether the value is one is decided by how it looks."""

SAID_PASSWORDS = _compiled(
    (
        "PASSWORD",
        "pass pwd",
        rf"(?i:\b{PASSWORD_NAME}(?:\s(?:is|was|to|as|of)(?:\snow)?)?:?\s{{1,3}}[\"'`]?)(?P<s>[^\s\"'`,;<>\\]{{6,80}})",
    ),
    ("PASSWORD", "pass pwd", r"(?i:--(?:password|passwd|pass)(?:=|\s{1,3})[\"']?)(?P<s>[^\s\"'`<>\\]{6,80})"),
    ("PASSWORD", "pw", r"(?i:\bpwd?\s{0,2}[:=]\s{0,2}[\"']?)(?P<s>[^\s\"'`,;<>\\]{6,80})"),
    ("PASSWORD", "sshpass", r"\bsshpass\s{1,3}-p\s{0,3}[\"']?(?P<s>[^\s\"'`<>\\]{4,80})"),
    ("PASSWORD", "mysql", r"\bmysql(?:dump)?\b[^\n]{0,80}?\s-p(?P<s>[^\s\"'`<>\\-][^\s\"'`<>\\]{5,80})"),
    (
        "PASSWORD",
        "curl",
        r"\bcurl\b[^\n]{0,200}?\s(?:-u|--user)\s{1,3}[\"']?[^\s:\"']{1,64}:(?P<s>[^\s\"'`<>\\]{4,80})",
    ),
)
"""Passwords in sentences and commands; how they look is looked at too."""

PASSWORDS = _compiled(
    ("PASSWORD", "://", r"://[^\s:/?#@\"'<>]{0,100}:(?P<s>[^\s@/\"'<>\\]{3,200})@"),
    ("PASSWORD_HASH", "$", r"\$(?:1|2[abxy]|5|6|y|argon2id?|scrypt|pbkdf2[\w-]{0,12})\$[\w./$,=+-]{20,200}"),
)

MAIL = _compiled(
    (
        "EMAIL",
        "@",
        r"(?<![\w.+%@/-])(?!git@)[A-Za-z0-9_][\w.+%-]{0,63}@(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.){1,6}"
        r"(?!(?:png|jpe?g|gif|svg|webp|ico|js|ts|py|css|html?|json|md|txt|ya?ml)\b)[A-Za-z]{2,24}(?![\w@-])",
    ),
)

_OCTET = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
IPV4 = re.compile(rf"(?<![\w.-])(?:{_OCTET}\.){{3}}{_OCTET}(?![\w-]|\.\w)")
IPV6 = re.compile(r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{0,4}(?![\w:.])")
VERSION_BEFORE = re.compile(r"(?i:\bv|\bver\.?|version|release|section|==|>=|<=|~=|[<>^])\s?[:=]?\s?[\"']?$")
"""What stands before four numbers that are no address."""

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
INNER_HOST = re.compile(
    rf"(?<![\w.$-])(?:{_LABEL}\.){{1,6}}(?:internal|corp|local|lan|intra|intranet|localdomain|home\.arpa)(?![\w(-]|\.\w)"
)
HOSTS = _compiled(
    ("HOST", "amazonaws", rf"(?<![\w.-])(?:{_LABEL}\.){{1,6}}(?:rds|elb|compute(?:-1)?|elasticache)\.amazonaws\.com\b"),
    (
        "HOST",
        "windows.net azure.com sql.goog",
        rf"(?<![\w.-])(?:{_LABEL}\.){{1,6}}(?:database\.windows\.net|cloudapp\.azure\.com|sql\.goog)\b",
    ),
    (
        "HOST",
        "host",
        r"\b(?:DB_?|PG|MYSQL_|REDIS_|SSH_|MAIL_|SMTP_)?HOST(?:NAME)?=[\"']?(?P<s>[A-Za-z][\w-]{1,62}[\w.-]{0,190}\w)",
    ),
    (
        "HOST",
        "host",
        r"(?i:\b(?:db_?|smtp_?|redis_?)?host(?:_?name)?[\"']\s?:\s?[\"'])(?P<s>[A-Za-z][\w-]{1,62}[\w.-]{0,190}\w)(?=[\"'])",
    ),
    (
        "HOST",
        "@",
        rf"\b(?:ssh|scp|sftp|rsync|mosh)\s(?:-{{1,2}}[\w-]{{1,20}}\s(?:\d{{1,5}}\s|[\w./~-]{{1,80}}(?=\s[\w.-]{{1,64}}@)\s)?){{0,4}}"
        rf"(?:[\w.-]{{1,64}}@)(?P<s>{_LABEL}(?:\.{_LABEL}){{0,6}})",
    ),
    (
        "HOST",
        "@",
        rf"(?m:^|(?<=\s)|(?<=[\[\"]))[a-z_][\w.-]{{0,31}}@(?P<s>{_LABEL}(?:\.{_LABEL}){{0,6}})"
        r"(?=[: ](?:~|/)[^\n]{0,200}?[$#])",
    ),
)

USERS = _compiled(
    (
        "USER",
        "/home/ users /cron/",
        r"(?:/home/|/Users/|/export/home/|/var/spool/cron/|\b[A-Za-z]:(?:\\{1,4}|/)Users(?:\\{1,4}|/))(?P<s>[A-Za-z_][\w.-]{1,31})",
    ),
    (
        "USER",
        "user logname",
        r"\b(?:USER|LOGNAME|USERNAME|SUDO_USER|PGUSER|SSH_USER|DB_USER)=[\"']?(?P<s>[A-Za-z_][\w.-]{1,31})",
    ),
    ("USER", "user login", r"(?i:\b(?:user_?name|login)[\"']\s?:\s?[\"'])(?P<s>[A-Za-z_][\w.-]{1,31})(?=[\"'])"),
    ("USER", "id=", r"\b[ug]id=\d{1,10}\((?P<s>[A-Za-z_][\w.-]{1,31})\)"),
    (
        "USER",
        "rw r-",
        r"(?m:^)[-dlbcps][rwxsStT-]{9}[.+@]?\s{1,4}\d{1,6}\s(?P<s>[A-Za-z_][\w.-]{1,31})\s{1,20}[\w.-]{1,32}\s{1,20}\d",
    ),
    ("USER", "@", r"\b(?:ssh|scp|sftp|rsync|mosh)\s(?:-[^\n@]{0,80}\s)?(?P<s>[A-Za-z_][\w.-]{1,31})@"),
    ("USER", "@", r"(?m:^|(?<=\s)|(?<=[\[\"]))(?P<s>[a-z_][\w.-]{1,31})@[\w.-]{1,200}[: ](?:~|/)[^\n]{0,200}?[$#]"),
    ("USER", "@", r"://(?P<s>[A-Za-z_][\w.-]{1,31}):[^\s@/\"']{3,200}@"),
    (
        "NAME",
        "<",
        r"(?:\b(?:Author|Committer|From|To|Cc|(?:Signed-off|Co-authored|Reviewed|Reported|Acked|Tested)-by): )"
        r"(?P<s>[^\W\d_][^<>\n\"@:]{1,60}[^\W\d_.]\.?)(?= <)",
    ),
)

COMMON_USERS = frozenset(
    [
        "root",
        "user",
        "users",
        "username",
        "admin",
        "administrator",
        "ubuntu",
        "debian",
        "ec2-user",
        "centos",
        "fedora",
        "runner",
        "vscode",
        "node",
        "app",
        "www",
        "www-data",
        "nobody",
        "daemon",
        "bin",
        "sys",
        "public",
        "default",
        "shared",
        "all",
        "guest",
        "test",
        "agent",
        "work",
        "workspace",
        "jovyan",
        "postgres",
        "mysql",
        "redis",
        "git",
        "docker",
        "jenkins",
        "circleci",
        "travis",
        "vagrant",
        "pi",
        "me",
        "you",
        "name",
        "your",
        "home",
        "owner",
        "staff",
        "wheel",
        "operator",
        "system",
        "anonymous",
        "linuxbrew",
        "none",
        "null",
        "string",
        "str",
        "true",
        "false",
        "sandbox",
    ]
)
"""Accounts of systems and images, and words that stand for an account: they name nobody."""

COMMON_HOSTS = frozenset(
    [
        "localhost",
        "localhost.localdomain",
        "host",
        "hostname",
        "example",
        "none",
        "null",
        "string",
        "str",
        "true",
        "false",
        "server",
        "db",
        "redis",
        "postgres",
        "mysql",
        "broker",
        "worker",
        "web",
        "api",
        "local",
        "host.docker.internal",
        "metadata.google.internal",
        "kubernetes.default.svc",
    ]
)
