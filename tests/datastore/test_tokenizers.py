"""Token ids become text by the store's own table of bytes, as the tokenizer itself would decode them."""

import json
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from agentrl.datastore.artifacts.catalog import Catalog
from agentrl.datastore.artifacts.tokenizers import UNKNOWN, TokenBytes, keep, kept
from agentrl.datastore.errors import StoreError

TEXTS = ["find the boss of Ann, then her car", 'naïve café — 東京 🦊🦊 {"who": "Ann"}', "a  b\n\tc   d"]


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(TEXTS * 4, trainer)
    made.add_tokens([AddedToken("<two words>"), AddedToken("東京都")])
    return made


def sentencepiece() -> Tokenizer:
    """As Llama 2 and Mistral have it: text with ``▁`` for spaces, and bytes for what the vocabulary lacks."""
    words = ["▁", "▁find", "▁the", "▁boss", "f", "i", "n", "d", "t", "h", "e", "b", "o", "s", "a", "c", "é", "<", ">"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<s>", "</s>"])
    return made


def unigram() -> Tokenizer:
    """As T5 and XLM-R have it."""
    scored = [("<unk>", 0.0), ("▁", -1.0), *((item, -2.0) for item in "abcdefghijklmnopqrstuvwxyz é東京,.")]
    made = Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    return made


MADE = {make.__name__: make() for make in (byte_level, sentencepiece, unigram)}
TABLES = {name: TokenBytes.of(made.to_str()) for name, made in MADE.items()}


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@given(text=st.text(st.sampled_from("ab find the é東京🦊🏽\n\t\0<>|▁Ġ\u200d\uffff"), max_size=60))
def test_any_text_comes_back(name: str, text: str) -> None:
    made, table = MADE[name], TABLES[name]
    ids = made.encode(text).ids
    result, offsets = table.text(ids)
    assert result.decode() == made.decode(ids, skip_special_tokens=False)
    assert (len(offsets), offsets[0], offsets[-1]) == (len(ids) + 1, 0, len(result))
    assert table.unknown(ids) == 0


@given(data=st.data())
def test_any_ids_decode_as_the_library_decodes_them(data: st.DataObject) -> None:
    made, table = MADE["byte_level"], TABLES["byte_level"]
    ids = data.draw(st.lists(st.integers(0, made.get_vocab_size() - 1), max_size=40))
    assert table.text(ids)[0].decode(errors="replace") == made.decode(ids, skip_special_tokens=False)


def test_a_unigram_with_marks_for_spaces() -> None:
    made, table = MADE["unigram"], TABLES["unigram"]
    for text in ("find the boss", "東京, abc"):
        ids = made.encode(text).ids
        assert table.text(ids)[0].decode() == made.decode(ids, skip_special_tokens=False) == text


def test_a_character_that_tokens_share_stays_in_bytes() -> None:
    made, table = MADE["byte_level"], TABLES["byte_level"]
    letters = [made.token_to_id(item) for item in made.pre_tokenizer.pre_tokenize_str("🦉")[0][0]]
    result, offsets = table.text([*letters, made.token_to_id("<|im_end|>")])
    assert result == "🦉<|im_end|>".encode()
    assert offsets.tolist() == [0, 1, 2, 3, 4, 14]


def test_ids_that_there_are_not_are_shown_and_counted() -> None:
    table = TABLES["byte_level"]
    ids = np.array([-1, 0, 10**9, len(table)])
    assert table.unknown(ids) == 3
    assert table.text([-1, 10**9])[0] == 2 * UNKNOWN
    holes = json.loads(MADE["sentencepiece"].to_str())
    del holes["model"]["vocab"]["▁the"]
    assert TokenBytes.of(json.dumps(holes)).text([MADE["sentencepiece"].token_to_id("▁the")])[0] == UNKNOWN


def test_a_million_tokens_take_no_loop_over_tokens() -> None:
    table = TABLES["byte_level"]
    ids = np.random.default_rng(0).integers(0, len(table), 1_000_000)
    result, offsets = table.text(ids)
    assert len(offsets) == len(ids) + 1
    assert result[offsets[-2] :] == table.text(ids[-1:])[0]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda value: value | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
            "WordPiece is not supported",
        ),
        (lambda value: value | {"decoder": None}, "decoder None is not supported"),
        (lambda value: value | {"model": {"type": "Odd"}}, "'Odd' has no vocabulary"),
    ],
)
def test_what_is_not_known_is_named(change: Callable[[dict[str, object]], dict[str, object]], says: str) -> None:
    with pytest.raises(StoreError, match=says):
        TokenBytes.of(json.dumps(change(json.loads(MADE["byte_level"].to_str()))))


def test_a_tokenizer_is_written_once(store: str) -> None:
    storage, asked = Catalog(store).storage, 0

    def text() -> str:
        nonlocal asked
        asked += 1
        return MADE["byte_level"].to_str()

    assert kept(storage, "0123456789abcdef") is None
    for _ in range(2):
        keep(storage, "0123456789abcdef", text)
    assert asked == 1
    assert kept(storage, "0123456789abcdef") == MADE["byte_level"].to_str().encode()
    with pytest.raises(StoreError, match="cannot name a folder"):
        kept(storage, "../runs/secret")
