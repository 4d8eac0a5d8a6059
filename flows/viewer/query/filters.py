"""The filter box: one SQL expression over the scalar columns, which comes from a browser.

Polars' SQL reads any file that ``read_csv('...')`` names. Its expressions do too, in a subquery, and even the error of
a subquery shows the first line of the file. So what is not on a list is refused before Polars sees it: subqueries,
comments, and calls of other functions than those that only look at a value. None of those on the list makes a text
longer, and few texts can be joined, so a filter cannot fill the memory either. ``matches(messages, '...')`` is answered
before Polars sees the filter.
"""

import re
from collections.abc import Iterator, Sequence

import polars as pl
from polars.exceptions import PanicException, PolarsError

from agentrl.datastore.errors import StoreError
from agentrl.datastore.read import matches, sql
from agentrl.datastore.search import words
from agentrl.flows.viewer.wire import RefusedError
from agentrl.schemas.hints import nearest

MAX_CHARACTERS = 4000
MAX_SUMS = 8
"""Signs of addition, which joins texts."""

MAX_TEXTS = 8
"""That a filter asks for by ``matches``."""

WORDS = {"and", "or", "not", "xor", "in", "any", "all", "like", "ilike", "between", "is", "null"}
WORDS |= {"case", "when", "then", "else", "end", "cast", "try_cast"}
"""Words that may stand before a parenthesis without being a function."""

FUNCTIONS = {"abs", "ceil", "ceiling", "floor", "round", "sign", "sqrt", "mod", "exp", "pow", "power"}
FUNCTIONS |= {"log", "ln", "log10", "log2", "lower", "upper", "length", "char_length", "octet_length", "strpos"}
FUNCTIONS |= {"starts_with", "ends_with", "regexp_like", "left", "right", "substr", "substring", "date_part", "extract"}
FUNCTIONS |= {"coalesce", "nullif", "ifnull", "if", "greatest", "least", "varchar", "char", "decimal", "numeric"}

_TOKEN = re.compile(
    r"""(?P<literal>'(?:[^']|'')*')|(?P<name>"(?:[^"]|"")*")|(?P<word>[^\W\d]\w*)|(?P<number>\d[\w.]*)|(?P<other>\S)""",
    re.DOTALL,
)
_QUOTED = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*\"""")
_ALLOWED_MARKS = frozenset("()=<>!+-*/%,.:~")
_REFUSED_WORDS = {"select", "from", "with", "union", "intersect", "except", "join", "values", "exists", "over", "table"}
_REFUSED_WORDS |= {"into", "copy", "explain", "show", "lateral", "unnest"}


_WITH_A_TEXT = "cannot compare 'date/datetime/time' to a string"
_OF_TIMES = "a time is not a text; write created_at >= date '2026-01-31', or >= '2026-01-31T12:00:00Z'::timestamptz"


def tokens(text: str) -> list[tuple[str, str, int]]:
    """Kind (literal, name in double quotes, word, number, other), text and end of each."""
    return [(str(token.lastgroup), token[0], token.end()) for token in _TOKEN.finditer(text)]


def has_comment(text: str) -> bool:
    """Whether a comment begins outside of texts and quoted names."""
    bare = _QUOTED.sub("''", text)
    return "--" in bare or "/*" in bare


def check(text: str) -> None:
    """Raise RefusedError if an expression holds anything but values, columns, operators and functions of the lists."""
    if len(text) > MAX_CHARACTERS:
        raise bad(f"the filter has {len(text):,} characters; at most {MAX_CHARACTERS:,} are allowed")
    try:
        sql.check(text)
    except StoreError as error:
        raise bad(str(error).partition(". If you wrote")[0].replace("the query", "the filter")) from None
    if has_comment(text):
        raise bad("a filter holds no comment")
    token_list = tokens(text)
    if sum(value == "+" for _, value, _ in token_list) > MAX_SUMS:
        raise bad(f"a filter adds at most {MAX_SUMS} times")
    for (kind, value, end), (follows, after, _) in zip(token_list, [*token_list[1:], ("", "", 0)], strict=False):
        word = value.lower()
        if kind == "other" and value not in _ALLOWED_MARKS:
            raise bad(f"{value!r} has no place in a filter", allowed=sorted(_ALLOWED_MARKS))
        if kind == "word" and not value.isascii():  # its capitals may spell a word of SQL, as those of "ſelect" do
            raise bad(f"{value!r} has letters that no column or word of SQL has")
        if kind == "word" and word in _REFUSED_WORDS:
            raise bad(f"a filter is one expression without {value!r}: it is asked of each row by itself")
        if after == "(" and (kind == "name" or (kind == "word" and word not in FUNCTIONS | WORDS)):
            raise _function(value)
        if kind == "word" and follows == "literal" and text[end] == "'":
            raise bad(f"{value}{after[:20]}: put a space before a text; texts have no prefix")


def _function(name: str) -> RefusedError:
    near = nearest(name.lower().strip('"'), FUNCTIONS, 1, 0.7)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return bad(f"a filter has no function {name!r}{hint}", allowed=sorted(FUNCTIONS))


def bad(error: str, allowed: Sequence[str] = ()) -> RefusedError:
    """What is wrong with a filter, and how one is written."""
    return RefusedError(
        error, field="filter", allowed=allowed, following="write it as in: success and env = 'lookup' and reward >= 0.5"
    )


def expression(text: str, schema: pl.Schema) -> tuple[pl.Expr, list[str]]:
    """The filter as Polars computes it, and the columns that it reads. Raises RefusedError that names an unknown column
    and the one that was probably meant."""
    check(text)
    try:
        parsed = pl.sql_expr(text)
        names = list(dict.fromkeys(parsed.meta.root_names()))
        if unknown := [name for name in names if name not in schema]:
            raise _unknown(unknown[0], schema)
        kind = pl.LazyFrame(schema=schema).select(parsed.alias("found")).collect_schema()["found"]
    except (PolarsError, PanicException) as error:
        first = first_line(error)
        raise bad(f"the filter is wrong: {_OF_TIMES if _WITH_A_TEXT in first else first}") from None
    if kind not in (pl.Boolean, pl.Null):
        raise bad(f"the filter gives {kind}, not true or false; compare it with something")
    return parsed, names


def spelled_out(text: str, schema: pl.Schema) -> str:
    """The filter with ``matches(messages, '...')`` in place of bare words: of its parts, which `and` joins, those that
    hold no operator, no bracket, no text and no column are words to search for. What nearly is a column stays as it is,
    so that the error can say which one was meant."""
    if len(text) > MAX_CHARACTERS:
        return text
    pieces, changed, start = [], False, 0
    for end, after in _ands(text):
        part = text[start:end].strip()
        bare = _is_bare(part, schema)
        changed = changed or bare
        pieces.append(f"matches(messages, {quoted(part)})" if bare else part)
        start = after
    return " and ".join(pieces) if changed else text


def _ands(text: str) -> Iterator[tuple[int, int]]:
    """Where each part of an expression ends and the next one begins: at `and` outside of brackets and of BETWEEN."""
    depth, between = 0, False
    for kind, value, end in tokens(text):
        word = value.lower() if kind == "word" else ""
        depth += {"(": 1, ")": -1}.get(value, 0)
        if word == "and" and depth == 0 and not between:
            yield end - len(value), end
        between = word == "between" or (between and word != "and")
    yield len(text), len(text)


def _is_bare(part: str, schema: pl.Schema) -> bool:
    """Whether a part of a filter holds words alone."""
    if not any(map(str.isalnum, part)) or _OF_EXPRESSIONS.search(part):
        return False
    names = [value.strip('"') for kind, value, _ in tokens(part) if kind in ("word", "name")]
    first = part.split(maxsplit=1)[0].lower()
    if first in ("not", "case") or part.lower() in ("true", "false", "null") or any(name in schema for name in names):
        return False
    return part != "".join(names) or not nearest(part, schema.names(), 1, 0.8)


_OF_EXPRESSIONS = re.compile(r"[=<>()']|\bis\s+(not\s+)?null\b", re.IGNORECASE)
"""What an expression has and words have not."""


def with_words(text: str, schema: pl.Schema) -> tuple[pl.Expr, list[str], dict[str, str]]:
    """The same for a filter that asks for words, bare ones or by ``matches(messages, '...')``: a column of true and
    false stands for each text, and the last answer says which, column -> text."""
    if len(text) > MAX_CHARACTERS:
        check(text)
    text = spelled_out(text, schema)
    try:
        plain, texts = matches.replaced(text, lambda table, number: f'"{matches.PREFIX}{number}"')
        for asked in texts:
            words.parsed(asked)
    except StoreError as error:
        raise bad(str(error)) from None
    if len(texts) > MAX_TEXTS:
        raise bad(f"a filter asks for at most {MAX_TEXTS} texts")
    columns = {f"{matches.PREFIX}{number}": asked for number, asked in enumerate(texts)}
    chosen, names = expression(plain, pl.Schema({**schema, **dict.fromkeys(columns, pl.Boolean())}))
    return chosen, [name for name in names if name not in columns], columns


def _unknown(name: str, schema: pl.Schema) -> RefusedError:
    near = nearest(name, schema.names(), 1, 0.7)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    more = "; a text stands in single quotes"
    if near:
        more = f" To search for the word, write matches(messages, {quoted(name)})" if name.isalnum() else ""
    return bad(f"there is no column {name!r}{hint}{more}", allowed=schema.names())


def first_line(error: BaseException) -> str:
    """What an error of Polars says, without its plan."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def quoted(value: str) -> str:
    """A text as a literal of SQL."""
    return "'" + value.replace("'", "''") + "'"
