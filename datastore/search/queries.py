"""What a parsed question asks of the full-text index: the best rows of tantivy, and all rows of the bits too."""

from collections.abc import Mapping
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.datastore.optional import optional
from agentrl.datastore.search import words
from agentrl.datastore.search.text_index import PAIRS, ROW, ROW_BITS, TEXT, Held

if TYPE_CHECKING:
    import tantivy


def query(held: Held, asked: words.Words) -> "tantivy.Query":
    """The query that tantivy answers. A pair of common words is asked for as one word, and scored as one."""
    tantivy = optional("tantivy", words.EXTRA)
    kinds = tantivy.Occur
    parts = [(kinds.Must, _part(held, words.terms(written))) for written in asked.wanted]
    return tantivy.Query.boolean_query(
        parts + [(kinds.MustNot, _part(held, words.terms(written))) for written in asked.unwanted]
    )


def rows(held: Held, asked: words.Words, files: Mapping[str, int]) -> np.ndarray:
    """Which rows of these files, each with its number of rows, hold what is asked for: bool [rows of all files], in the
    order of the files. What has a bit is read there, and tantivy is asked for the rest. Raises ValueError if the
    index is damaged."""
    sides: tuple[tuple[str, ...], ...] = (asked.wanted, asked.unwanted)
    bits = [[held.bits.common.bit(words.terms(written)) for written in side] for side in sides]
    rest = words.Words(
        *(
            tuple(w for w, bit in zip(side, of, strict=True) if bit is None)
            for side, of in zip(sides, bits, strict=True)
        )
    )
    if rest.wanted:
        mask = _found(held, query(held, rest), files)
    else:
        mask = np.ones(sum(files.values()), bool)
        for written in rest.unwanted:
            mask &= ~_found(held, _part(held, words.terms(written)), files)
    first = 0
    for name, count in files.items():
        of_file = mask[first : first + count]
        for wanted, side in zip((True, False), bits, strict=True):
            for bit in side:
                if bit is not None and of_file.any():
                    of_file &= held.bits.of(name, bit, count) == wanted
        first += count
    return mask


def _part(held: Held, terms: list[str]) -> Any:
    queries, schema = optional("tantivy", words.EXTRA).Query, held.index.schema
    if len(terms) == 1:
        return queries.term_query(schema, TEXT, terms[0])
    pair = held.bits.common.pair(*terms) if len(terms) == 2 else None
    if pair is not None:
        return queries.term_query(schema, PAIRS, pair, index_option="freq")
    return queries.phrase_query(schema, TEXT, terms)


def _found(held: Held, asked: Any, files: Mapping[str, int]) -> np.ndarray:
    """Which rows of these files tantivy finds: bool [rows of all files]."""
    hits = held.searcher.search(asked, limit=max(1, held.searcher.num_docs), count=False, order_by_field=ROW).hits
    numbers = np.fromiter(map(itemgetter(0), hits), np.int64, len(hits))
    counts = np.fromiter(files.values(), np.int64, len(files))
    first = np.full(max(held.files.values()) + 1, -1, np.int64)  # of files that are not asked about: -1
    first[[held.files[name] for name in files]] = counts.cumsum() - counts
    starts = first[numbers >> ROW_BITS]
    here = starts >= 0
    mask = np.zeros(int(counts.sum()), bool)
    mask[starts[here] + (numbers & (2**ROW_BITS - 1))[here]] = True
    return mask
