"""benchmarks/gpu.py at a toy shape on the CPU: all of its parts, and what it writes."""
import json, os, subprocess, sys
from pathlib import Path
import pytest
from route_transport.model import SYSTEMS
from route_transport.planning import tokens_per_second
from route_transport.model import system_config
from dataclasses import replace

SCRIPT = Path(__file__).resolve().parent.parent / "benchmarks" / "gpu.py"
ABSENT = ("datasets", "tiktoken", "matplotlib", "fastcore", "accelerate", "scipy", "pyarrow", "filelock")

# A machine that lacks what the script may not need: importing any of it fails
BARE = """
import builtins, runpy, sys
real = builtins.__import__
def bare(name, globals=None, locals=None, fromlist=(), level=0):
    user = (globals or {}).get("__name__", "").startswith(("route_transport", "__main__"))
    if user and level == 0 and name.partition(".")[0] in %r: raise ImportError(f"no {name} on this machine")
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = bare
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
""" % (ABSENT,)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    out = tmp_path_factory.mktemp("gpu") / "toy.json"
    done = subprocess.run([sys.executable, "-c", BARE, str(SCRIPT), "--toy", "--no-compile", "--minutes", "1", "--out", str(out)],
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_every_transport_agrees_with_the_oracle(toy):
    rows = json.loads(toy[0].read_text())["correctness"]
    assert {(r["system"], r["dtype"]) for r in rows} == {(s, d) for s in SYSTEMS for d in ("float32", "bfloat16")}
    assert all(r["ok"] for r in rows) and "every transport agrees with the oracle" in toy[1]


def test_speed_and_training_are_there(toy):
    results = json.loads(toy[0].read_text())
    assert [r["system"] for r in results["speed"]] == ["plain", "rope", "learned-qkv", "random-qkv", "alibi", "reflections-qkv"]
    assert all(r["tokens_per_second"] > 0 and r["utilisation"]["measured"] > 0 for r in results["speed"]) and results["speed"][0]["ratio_to_plain"] == 1
    for r in results["training"]:
        assert [row["length"] for row in r["eval"]["lengths"]] == [16, 64] and r["curve"][-1][1] < 5.6 and r["steps"] == 20
    assert results["peaks"]["data_sheet"] is None and results["peaks"]["measured"] > 0


def test_the_dry_run_reads_it(toy):
    speed, words = tokens_per_second(str(toy[0]), replace(system_config("smoke", "learned-qkv")))
    assert speed > 0 and words.startswith("measured on")


def test_without_a_gpu_it_says_so(tmp_path):
    import torch
    if torch.cuda.is_available(): pytest.skip("there is a GPU")
    done = subprocess.run([sys.executable, str(SCRIPT), "--out", str(tmp_path / "x.json")], capture_output=True, text=True)
    assert done.returncode == 1 and "--toy runs on a CPU" in done.stderr and not list(tmp_path.iterdir())
