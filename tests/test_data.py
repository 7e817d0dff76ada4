"""Corpora end to end, and the properties that training relies on."""
import numpy as np
import pyarrow as pa, pyarrow.parquet as pq
import pytest, torch
from hypothesis import given, settings, strategies as st
from route_transport.data import Blocks, SPLITS, get_encoding, prepare, split_documents
from route_transport.extrapolation import cut_regions, region_losses


def test_openwebtext_from_a_folder_of_parquet(tmp_path):
    texts = [f"page {i}: " + "word " * (i % 7) for i in range(2000)]
    for part in range(2): pq.write_table(pa.table({"text": texts[part::2]}), tmp_path / f"train-{part:05d}.parquet")
    store = prepare(f"openwebtext:{tmp_path}", folder=tmp_path / "stores")
    counts = store.meta["splits"]
    assert sum(counts[s]["documents"] for s in SPLITS) == 2000 and 1 <= counts["validation"]["documents"] <= 40
    ids = np.concatenate([store.tokens(s) for s in SPLITS])
    back = get_encoding("bytes").decode([t for t in ids.tolist() if t != 256])
    assert sorted(back.split("page ")[1:]) == sorted(t[5:] for t in texts)


def test_a_parquet_without_text_is_refused(tmp_path):
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="columns=.*'text'"): prepare(f"openwebtext:{tmp_path}", folder=tmp_path / "stores")
    assert not list((tmp_path / "stores").iterdir())      # nothing half-written stays


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(0, 300), st.integers(0, 5))
def test_an_epoch_holds_no_token_twice(context, extra, seed):
    tokens = np.arange(2*context + 1 + extra)
    blocks = Blocks(tokens, context, seed)
    x, y = blocks.batch(0, blocks.per_epoch)
    assert torch.equal(x + 1, y) and x.unique().numel() == x.numel() and y.max() < len(tokens)


def test_batches_do_not_depend_on_what_was_asked_before():
    tokens = np.random.default_rng(0).integers(0, 257, 5000)
    a, b = Blocks(tokens, 16, 1), Blocks(tokens, 16, 1)
    for step in (900, 3, 57): b.batch(step, 8)
    assert torch.equal(a.batch(3, 8)[0], b.batch(3, 8)[0])


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.text(min_size=1, max_size=20), min_size=1, max_size=30))
@settings(max_examples=60, deadline=None)
def test_a_split_loses_nothing(texts):
    halves = split_documents(texts)
    joined = sorted("".join(halves["train"]) + "".join(halves["validation"]))
    assert joined == sorted("".join(texts.values()))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 5), st.integers(1, 5), st.integers(0, 200), st.integers(1, 4))
def test_each_target_is_scored_once_at_every_length(log_longest, regions, extra, batch_tokens):
    class Echo:
        def token_losses(self, x, y): return y.float()
    longest = 2**log_longest
    cut = cut_regions(np.arange(longest + 1 + extra), longest, regions)
    assert len(np.unique(cut[:, 1:])) == cut[:, 1:].size
    for k in range(log_longest + 1):
        assert (region_losses(Echo(), cut, 2**k, batch_tokens) == cut[:, 1:]).all()
