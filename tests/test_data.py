"""Corpora end to end, and the properties that training relies on."""
import json, signal, subprocess, sys, time
from pathlib import Path
import numpy as np
import pyarrow as pa, pyarrow.parquet as pq
import pytest, torch
from hypothesis import given, settings, strategies as st
from route_transport.data import Blocks, SPLITS, get_encoding, prepare, sent, split_documents
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
    assert not list((tmp_path / "stores").glob("[!.]*"))  # nothing half-written stays


def test_any_data_set_of_the_hub_by_name_and_column(tmp_path):
    (tmp_path / "set").mkdir()                            # a local folder laid out like a repository of the hub
    pq.write_table(pa.table({"body": [f"text {i}" for i in range(500)], "id": range(500)}), tmp_path / "set" / "train.parquet")
    store = prepare(f"hub:{tmp_path / 'set'}@body", folder=tmp_path / "stores")
    assert sum(n["documents"] for n in store.meta["splits"].values()) == 500
    with pytest.raises(ValueError, match="columns=.*'text'"): prepare(f"hub:{tmp_path / 'set'}", folder=tmp_path / "stores")


def test_a_loading_script_is_never_run(tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "set.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(RuntimeError, match="script"): prepare(f"hub:{tmp_path / 'set'}", folder=tmp_path / "stores")
    assert not (tmp_path / "ran").exists()


SLOWLY = """
import sys, time
from route_transport import data
data.JOURNAL_EVERY = 0
class Slow(data.Stream):
    def batches(self, state=None, size=16):
        for batch in super().batches(state, size): time.sleep(0.02); yield batch
open_folder = data._open_folder
data._open_folder = lambda folder: Slow((s := open_folder(folder)).dataset, s.column, s.total)
data.prepare(sys.argv[1], folder=sys.argv[2], workers=2)
"""


def test_a_killed_tokenising_goes_on_and_ends_with_the_same_store(tmp_path):
    (tmp_path / "pq").mkdir()
    for part in range(3): pq.write_table(pa.table({"text": [f"{part} {i} " + "x" * i for i in range(700)]}), tmp_path / "pq" / f"{part}.parquet", row_group_size=100)
    corpus, stores = f"openwebtext:{tmp_path / 'pq'}", tmp_path / "stores"
    whole = prepare(corpus, folder=tmp_path / "whole")
    done = []
    for kill in range(3):
        child = subprocess.Popen([sys.executable, "-c", SLOWLY, corpus, str(stores)])
        until = time.time() + 60
        journal = lambda: next(stores.glob("*.unfinished/journal.json"), None)
        read = lambda: sum(n["documents"] for n in json.loads(journal().read_text())["splits"].values()) if journal() else 0
        while time.time() < until and child.poll() is None and read() < (done[-1] if done else 0) + 300: time.sleep(0.01)
        child.send_signal(signal.SIGKILL); child.wait()
        done.append(read())
        assert not list(stores.glob("openwebtext-bytes-????????????????")), "it was killed too late to tell anything"
    assert 300 <= done[0] < done[1] < done[2] < 2100, done    # each went on from the one before
    store = prepare(corpus, folder=stores)
    for name in ("train.bin", "validation.bin", "meta.json"): assert (store.path / name).read_bytes() == (whole.path / name).read_bytes()
    assert not list(stores.glob("*.unfinished"))


def anonymous_memory() -> int: # bytes
    return next(1024*int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's account of memory")
def test_memory_stays_flat_over_ten_thousand_batches(tmp_path):
    np.random.default_rng(0).integers(0, 257, 2_000_000).astype(np.uint16).tofile(tmp_path / "train.bin")
    blocks = Blocks(np.memmap(tmp_path / "train.bin", dtype=np.uint16, mode="r"), 64)
    readings = []
    for step, batch in enumerate(sent((blocks.batch(n, 8) for n in range(12_000)), ahead=True)):
        if step % 2000 == 1999: readings.append(anonymous_memory())
    assert max(readings[1:]) - readings[0] < 2_000_000, readings      # 10,000 batches of 8 kB would be 80 MB


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
