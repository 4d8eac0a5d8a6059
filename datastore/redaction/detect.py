"""Where secrets stand in a text: by the patterns of ``detect-secrets``, by ``phonenumbers``, and by our own."""

import ipaddress
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

from agentrl.datastore.errors import StoreError
from agentrl.datastore.optional import optional
from agentrl.datastore.redaction import patterns as p
from agentrl.datastore.redaction.settings import Redaction

EXTRA = "redact"
REMEMBERED, LONG = 8192, 4096
"""Texts whose secrets are remembered, and characters from which on one is not: rows share tools and openings."""


class Detection(NamedTuple):
    """``text[start:end]`` is a secret of this kind."""

    start: int
    end: int
    kind: str


class Detectors:
    """The detectors that some settings ask for."""

    def __init__(self, settings: Redaction) -> None:
        """Raises StoreError if the packages of the extra ``redact`` are not installed, or a region is unknown."""
        self._settings = settings
        self._patterns = [p.Pattern(kind, re.compile(expression)) for kind, expression in settings.patterns.items()]
        self._keep = [re.compile(expression) for expression in settings.keep]
        self._patterns += (*p.KEYS, *_of_detect_secrets()) if settings.of("keys") else ()
        self._patterns += p.PASSWORDS if settings.of("passwords") else ()
        self._patterns += p.MAIL if settings.of("mail") else ()
        self._patterns += p.HOSTS if settings.of("hosts") else ()
        self._patterns += p.USERS if settings.of("users") else ()
        self._patterns += p.PRIVATE_KEYS if settings.of("private_keys") else ()
        self._phones = _phone_regions(settings.regions) if settings.of("phone") else []
        self._remembered = lru_cache(maxsize=REMEMBERED)(self._detections)
        self.clean_json: set[str] = set()
        """JSON texts that hold no secret; at most :data:`REMEMBERED`."""

    def __call__(self, text: str) -> list[Detection]:
        """The secrets in a text, in order; no two overlap. Placeholders are none, and no part of one."""
        if len(text) < 4:
            return []
        return self._remembered(text) if len(text) < LONG else self._detections(text)

    def _detections(self, text: str) -> list[Detection]:
        hits = list(self._all(text))
        if "\\" in text and (shown := _ESCAPE.sub(_resolved, text)) != text:
            hits += self._all(shown)
        return self._disjoint(text, [hit for hit in hits if not self._kept(text[hit.start : hit.end])])

    def value(self, text: str, name: str) -> str | None:
        """The kind of a whole value of JSON, by the name that it has there; None if that says nothing of it."""
        if p.PLACEHOLDER.fullmatch(text) or self._kept(text):
            return None
        if self._settings.of("passwords") and _PASSWORD_NAME.fullmatch(name) and _is_password(text, quoted=True):
            return "PASSWORD"
        if self._settings.of("keys") and _SECRET_NAME.fullmatch(name) and _is_token(text):
            return "SECRET"
        if self._settings.of("phone") and _PHONE_NAME.fullmatch(name) and 7 <= sum(map(str.isdigit, text)) <= 15:
            return "PHONE" if _PHONE.fullmatch(text) else None
        if self._settings.of("users") and _USER_NAME.fullmatch(name) and _NAMELIKE.fullmatch(text) and _is_user(text):
            return "USER"
        if self._settings.of("hosts") and _HOST_NAME.fullmatch(name) and _NAMELIKE.fullmatch(text) and _is_host(text):
            return "HOST"
        return None

    def _kept(self, value: str) -> bool:
        return any(pattern.fullmatch(value) for pattern in self._keep)

    def _all(self, text: str) -> Iterator[Detection]:
        small = text.casefold()
        for kind, pattern, hints in self._patterns:
            if hints and not any(hint in small for hint in hints):
                continue
            for match in pattern.finditer(text):
                start, end = match.span("s") if "s" in pattern.groupindex else match.span()
                if _LOOKS.get(kind, _anything)(text[start:end]):
                    yield Detection(start, end, kind)
        if self._settings.of("passwords") and any(hint in small for hint in p.PASSWORD_HINTS):
            yield from _assigned(text, p.ASSIGNED_PASSWORD, "PASSWORD", _is_password)
            yield from _said(text)
        if self._settings.of("keys") and any(hint in small for hint in p.SECRET_HINTS):
            yield from _assigned(text, p.ASSIGNED_SECRET, "SECRET", _is_token)
        if self._settings.of("hosts"):
            yield from _hosts(text)
        if self._phones:
            yield from _phones(text, self._phones)

    def _disjoint(self, text: str, hits: list[Detection]) -> list[Detection]:
        """Of detections that overlap, the longest at the first place; without the placeholders in them."""
        free: list[Detection] = []
        for hit in sorted(hits, key=lambda hit: (hit.start, -hit.end)):
            start = max(hit.start, free[-1].end if free else 0)
            for inside in p.PLACEHOLDER.finditer(text, hit.start, hit.end):
                if inside.start() - start >= 4:
                    free.append(Detection(start, inside.start(), hit.kind))
                start = max(start, inside.end())
            if start < hit.end and (start == hit.start or hit.end - start >= 4):
                free.append(Detection(start, hit.end, hit.kind))
        return free


@cache
def _of_detect_secrets() -> p.Patterns:
    """The regular expressions of the plugins of ``detect-secrets`` that are for one service each, by kind. Of those
    with groups, the first one that matched is the secret."""
    optional("detect_secrets", EXTRA)
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class

    plugins: dict[str, Any] = get_mapping_from_secret_type_to_class()
    chosen = {name: _DETECT_SECRETS[name] for name in sorted(plugins) if name in _DETECT_SECRETS}
    if lacking := sorted(set(_DETECT_SECRETS) - set(plugins)):
        raise StoreError(
            f"detect-secrets has no plugin {lacking[0]!r} any more; install the version of the extra redact"
        )
    return tuple(
        p.Pattern(kind, pattern, tuple(hints))
        for name, (kind, *hints) in chosen.items()
        for pattern in plugins[name].denylist
        if not pattern.groups or name in ("GitHub Token", "GitLab Token")
    )


_DETECT_SECRETS = {
    "AWS Access Key": ("AWS_KEY", "akia", "asia", "abia", "acca", "a3t"),
    "Azure Storage Account access key": ("AZURE_KEY", "accountkey"),
    "Discord Bot Token": ("DISCORD_TOKEN", "."),
    "GitHub Token": ("GITHUB_TOKEN", "gh"),
    "GitLab Token": ("GITLAB_TOKEN", "gl", "gr1348941"),
    "Mailchimp Access Key": ("MAILCHIMP_KEY", "-us"),
    "OpenAI Token": ("OPENAI_KEY", "sk-"),
    "PyPI Token": ("PYPI_TOKEN", "pypi-"),
    "SendGrid API Key": ("SENDGRID_KEY", "sg."),
    "Slack Token": ("SLACK_TOKEN", "xox", "hooks.slack"),
    "Square OAuth Secret": ("SQUARE_TOKEN", "sq0csp"),
    "Stripe Access Key": ("STRIPE_KEY", "_live_"),
    "Telegram Bot Token": ("TELEGRAM_TOKEN", ":"),
}
"""Plugins of ``detect-secrets`` by the type that they name: our kind, and hints. Left out are those that ask for
entropy alone, those whose surroundings are matched too, and those that we have patterns of our own for."""

_PASSWORD_NAME = re.compile(rf"(?i)[\w.-]{{0,40}}{p.PASSWORD_NAME}[\w-]{{0,20}}")
_SECRET_NAME = re.compile(rf"(?i)[\w.-]{{0,40}}{p.SECRET_NAME}[\w-]{{0,20}}")
_PHONE_NAME = re.compile(r"(?i)[\w.-]{0,20}(?:phone|mobile|telephone|fax)(?:_?(?:number|no))?")
_USER_NAME = re.compile(r"(?i)(?:ssh_|db_|pg)?user_?name|login|(?:ssh|db|pg)_?user")
_HOST_NAME = re.compile(r"(?i)(?:db_?|smtp_?|redis_?|pg)?host(?:_?name)?")
_NAMELIKE = re.compile(r"[A-Za-z_][\w.-]{1,200}")
_PHONE = re.compile(r"\+?[\d\s().-]{7,24}")
_NO_VALUE = re.compile(
    r"(?i)(?:your|my|the|new|old|test|user|db|some|enter)?[_-]?(?:pass(?:word|wd|phrase|code)?|pwd|secret|token|key)s?\d?"
    r"|required|optional|changeme|redacted|placeholder|[x*.•_-]+|\$[a-z_]\w*|%\(?\w+\)?s?"
)
"""Values that stand for a secret and are none."""
_TEMPLATE = re.compile(r"\$[{(]|\{\{|%s|\.{3}|\*{3}|x{6}|<[a-z]|(?i:your[_-])")
_CODE = re.compile(r"[\[(){}]|^(?:self|args|config|settings|params|request|os|process|env|options|opts)\.|->|::|://")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z_.]*[0-9]?")
_TOKEN = re.compile(r"[\w.~+/=:@%-]+")


_ESCAPE = re.compile(r'\\(?:[nrt"\'/]|u[0-9a-fA-F]{4})')
"""What JSON and code write for the end of a line, and for quotes."""


def _resolved(escape: re.Match[str]) -> str:
    """An escape as what it stands for, after spaces that keep its length."""
    character = {"n": "\n", "r": "\n", "t": "\t", "u": " "}.get(escape[0][1], escape[0][1])
    return character.rjust(len(escape[0]))


def _anything(value: str) -> bool:
    return True


def _is_password(value: str, quoted: bool = True) -> bool:
    """Whether the value of a password's name is one: not a word, a variable, a call or a sentence."""
    if not 4 <= len(value) <= 200 or " " in value.strip() or _NO_VALUE.fullmatch(value) or _TEMPLATE.search(value):
        return False
    if not quoted and (_IDENTIFIER.fullmatch(value) or _CODE.search(value)):
        return False
    letters, digits = any(map(str.isalpha, value)), any(map(str.isdigit, value))
    symbols = any(character in "!@#$%^&*~+=?" for character in value)
    return (letters and (digits or symbols)) or (quoted and len(value) >= 16 and not value.islower())


def _is_token(value: str, quoted: bool = True) -> bool:
    """Whether the value of a token's name is one: it has no spaces, has digits and letters, and looks drawn."""
    if not 12 <= len(value) <= 400 or _NO_VALUE.fullmatch(value) or _TEMPLATE.search(value) or "::" in value:
        return False
    drawn = _TOKEN.fullmatch(value) and sum(map(str.isdigit, value)) >= 2 and any(map(str.isalpha, value))
    return bool(drawn) and _entropy(value) >= 2.8


def _entropy(value: str) -> float:
    """Bits a character (Shannon, 1948)."""
    counts = Counter(value)
    return -sum(count / len(value) * math.log2(count / len(value)) for count in counts.values())


def _assigned(text: str, pattern: re.Pattern[str], kind: str, looks: Any) -> Iterator[Detection]:
    for match in pattern.finditer(text):
        group = next(name for name in ("d", "q", "u") if match[name] is not None)
        if looks(match[group], quoted=group != "u"):
            yield Detection(*match.span(group), kind)


def _said(text: str) -> Iterator[Detection]:
    for kind, pattern, _ in p.SAID_PASSWORDS:
        for match in pattern.finditer(text):
            start, end = match.span("s")
            end -= text[end - 1] in ".?:)" and text[end : end + 1] in ("", " ", "\n")  # the sentence's
            if _is_password(text[start:end], quoted=False):
                yield Detection(start, end, kind)


def _is_user(name: str) -> bool:
    return name.casefold() not in p.COMMON_USERS and not name.endswith((".py", ".md", ".txt"))


def _is_host(name: str) -> bool:
    """A name that is said to be a host's. One without digits, points and hyphens may be any word."""
    plain = name.casefold()
    return plain not in p.COMMON_HOSTS and not plain.startswith("127.") and any(c in "0123456789.-" for c in plain)


def _is_no_stand_in(value: str) -> bool:
    return not (_NO_VALUE.fullmatch(value) or _TEMPLATE.search(value))


_LOOKS: dict[str, Any] = {"USER": _is_user, "HOST": _is_host, "PASSWORD": _is_no_stand_in}


def _hosts(text: str) -> Iterator[Detection]:
    """Addresses of machines, and names of those inside a network."""
    for match in p.IPV4.finditer(text):
        octets = [int(part) for part in match[0].split(".")]
        before = text[max(0, match.start() - 12) : match.start()]
        common = octets[0] in (0, 127, 255) or match[0].startswith("255.") or max(octets) < 10
        if not common and not p.VERSION_BEFORE.search(before):
            yield Detection(*match.span(), "HOST")
    for match in p.IPV6.finditer(text):
        if sum(map(bool, match[0].split(":"))) >= 3 and _is_ipv6(match[0]):
            yield Detection(*match.span(), "HOST")
    for match in p.INNER_HOST.finditer(text):
        labels = match[0].split(".")
        named = len(labels) >= 3 or any(c in "0123456789-" for c in match[0])
        if match[0].casefold() not in p.COMMON_HOSTS and (named or text[: match.start()].endswith(("://", "@"))):
            yield Detection(*match.span(), "HOST")


def _is_ipv6(text: str) -> bool:
    try:
        return not ipaddress.IPv6Address(text).is_loopback
    except ValueError:
        return False


def _phone_regions(regions: Iterable[str]) -> list[str | None]:
    numbers = optional("phonenumbers", EXTRA)
    if unknown := [region for region in regions if region not in numbers.SUPPORTED_REGIONS]:
        raise StoreError(f"regions: {unknown[0]!r} is no country with phone numbers; write two letters, as in US")
    return [None, *regions]


def _phones(text: str, regions: list[str | None]) -> Iterator[Detection]:
    """Valid phone numbers. One without + counts only if it is written as phone numbers are, with what separates its
    parts: ten digits in a row are any number."""
    import phonenumbers

    for candidate in _PHONE_LIKE.finditer(text):
        written = candidate[0]
        while written.startswith("+") and sum(map(str.isdigit, written)) > MOST_DIGITS and _LAST_GROUP.search(written):
            written = _LAST_GROUP.sub("", written)  # another number that stands behind it
        separators = sum(not character.isdigit() for character in written)
        national = _TRUNK.fullmatch(written) or (separators >= 2 and not _DATE.search(written))
        if not written.startswith("+") and not national:
            continue
        if not 7 <= len(written) - separators <= MOST_DIGITS:
            continue
        for region in regions if not written.startswith("+") else regions[:1]:
            match = next(iter(phonenumbers.PhoneNumberMatcher(written, region)), None)
            if match is not None and sum(not character.isdigit() for character in match.raw_string) >= 1:
                yield Detection(candidate.start() + match.start, candidate.start() + match.end, "PHONE")
                break


MOST_DIGITS = 15
"""Of a phone number, by E.164."""
_LAST_GROUP = re.compile(r"[). -]+\d+$")
_TRUNK = re.compile(r"0\d{2,4}[ -]\d{5,8}")
"""An area with the 0 before it, and the number, as in 07911 123456."""
_PHONE_LIKE = re.compile(r"(?<![\w/#$.+-])(?:\+\d|\(\d|\d)[\d(). -]{6,20}\d(?![\w.-]?\d)")
_DATE = re.compile(r"(?:19|20)\d\d[-./]\d\d?[-./]\d\d?|\d\d?\.\d\d?\.\d{2,4}")
