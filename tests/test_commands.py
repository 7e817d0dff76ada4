"""The command lines as a user types them: what they refuse, and what survives a kill."""
import json, os, signal, subprocess, sys, time
from pathlib import Path
import pytest
from route_transport.data import rt_prepare
from route_transport.extrapolation import rt_eval
from route_transport.figures import rt_figures
from route_transport.reproduce import rt_reproduce
from route_transport.training import rt_train

MODULES = {"rt-prepare": "data", "rt-train": "training", "rt-eval": "extrapolation", "rt-reproduce": "reproduce", "rt-figures": "figures"}


def command(name, *args):
    return [sys.executable, "-m", f"route_transport.{MODULES[name]}", *map(str, args)]


def run(name, *args, **kwargs):
    return subprocess.run(command(name, *args), capture_output=True, text=True, timeout=300, **kwargs)


def test_console_scripts_are_installed():
    for name in MODULES: assert (Path(sys.executable).parent / name).exists()


@pytest.mark.parametrize("name", MODULES)
def test_help_states_defaults(name):
    out = run(name, "--help")
    assert out.returncode == 0 and "default" in out.stdout


@pytest.mark.parametrize("name", MODULES)
def test_unknown_flags_are_refused(name):
    out = run(name, *["some-run"]*(name == "rt-eval"), "--speed", 9)
    assert out.returncode == 2 and "unrecognized arguments: --speed 9" in out.stderr


@pytest.mark.parametrize("command, given, words", [
    (rt_train, dict(system="ropee"), "rt-train: system='ropee': must be one of rope, random-qk"),
    (rt_train, dict(preset="huge"), "preset='huge': must be one of smoke, tiny, small, paper"),
    (rt_train, dict(corpus="text:/no/such/file"), "must be a file or folder that exists"),
    (rt_train, dict(lr=-1.0), "lr=-1.0: must be above 0"),
    (rt_train, dict(corpus="hub:"), "must be one of python, text:PATH, openwebtext, openwebtext:FOLDER, hub:NAME"),
    (rt_train, dict(encoding="gpt3"), "encoding='gpt3': must be one of bytes, gpt2; did you mean 'gpt2'?"),
    (rt_train, dict(precision="fp16"), "precision='fp16': must be one of auto, float32, bf16"),
    (rt_train, dict(device="gpu"), "device='gpu': must be one of cpu, cuda, mps"),
    (rt_train, dict(micro_batch=-3), "micro_batch=-3: must be"),
    (rt_train, dict(dry_run=True, throughput="h1000"), "throughput='h1000': must be one of h200, h100"),
    (rt_prepare, dict(corpus="openwebtext:/no/such"), "must be a folder with .parquet files in it"),
    (rt_prepare, dict(corpus="openwebtxt"), "did you mean 'openwebtext'?"),
    (rt_reproduce, dict(systems="rope,alibi,rope"), "each once"),
    (rt_reproduce, dict(systems="alibee"), "did you mean 'alibi'?"),
    (rt_reproduce, dict(preset="tinny"), "preset='tinny': must be one of smoke, tiny, small, paper; did you mean 'tiny'?"),
    (rt_reproduce, dict(seeds="one"), "seeds='one': must be whole numbers"),
    (rt_reproduce, dict(workers=-1), "workers=-1: must be"),
    (rt_eval, dict(run="/no/such/run"), "must be a run folder whose training has ended"),
    (rt_figures, dict(results="/no/such"), "a results.json that rt-reproduce wrote"),
])
def test_refusals(command, given, words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as e: command(**given)
    assert e.value.code == 2 and words in capsys.readouterr().err
    assert not list(tmp_path.rglob("*"))          # nothing was begun


def test_a_corpus_too_short_is_refused(tmp_path):
    (tmp_path / "t.txt").write_text("short")
    out = run("rt-train", "--preset", "smoke", "--corpus", f"text:{tmp_path / 't.txt'}", "--out", tmp_path / "run",
              env={**os.environ, "ROUTE_TRANSPORT_CACHE": str(tmp_path / "cache")})
    assert out.returncode == 2 and "the corpus is too short" in out.stderr


def test_a_dry_run_plans_and_begins_nothing(tmp_path):
    out = run("rt-train", "--preset", "paper", "--dry-run", "--throughput", "100000", "--micro-batch", "16", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert "151,905,792" in out.stdout and "2,621,440,000" in out.stdout and "2.49e+18" in out.stdout and "7.3 h" in out.stdout and "16 blocks at once, 32 times a step" in out.stdout
    assert not list(tmp_path.rglob("*"))


def test_a_cpu_never_touches_cuda(tmp_path):
    code = """
import torch
def refuse(*a, **k): raise AssertionError("CUDA was touched")
torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.get_device_capability = refuse
from route_transport.training import rt_train
from route_transport.extrapolation import rt_eval
rt_train(preset="smoke", steps=10, quiet=True, out="run")
rt_eval("run", preset="smoke")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "(  8×)" in done.stdout, done.stderr


def test_users_own_text_from_training_to_evaluation(tmp_path):
    (tmp_path / "my notes.txt").write_text("It was the best of times, it was the worst of times. " * 400)
    env = {**os.environ, "ROUTE_TRANSPORT_CACHE": str(tmp_path / "cache")}
    out = run("rt-train", "--preset", "smoke", "--system", "random-qkv+alibi", "--corpus", f"text:{tmp_path / 'my notes.txt'}", "--out", tmp_path / "run", env=env)
    assert out.returncode == 0, out.stderr
    out = run("rt-eval", tmp_path / "run", "--preset", "smoke", env=env)
    assert out.returncode == 0 and "(  8×)" in out.stdout, out.stderr



def test_a_killed_reproduce_goes_on_and_ends_with_the_same_numbers(tmp_path):
    args = ["--preset", "smoke", "--systems", "random-qkv,learned-qkv", "--seeds", "0", "--steps", "60", "--workers", "2"]
    whole = run("rt-reproduce", *args, "--out", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    cut = tmp_path / "cut"
    process = subprocess.Popen(command("rt-reproduce", *args, "--out", cut), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.time() + 120
    while time.time() < deadline and not list(cut.glob("runs/*/seed0/checkpoints/step-*")) + list(cut.glob("runs/*/seed0/train.json")): time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    time.sleep(2.5)                                     # the children notice within a second or two
    assert not list(cut.rglob("results.json"))
    before = {p: p.stat().st_mtime_ns for p in cut.rglob("metrics.jsonl")}
    time.sleep(0.5)
    assert before == {p: p.stat().st_mtime_ns for p in cut.rglob("metrics.jsonl")}, "a training outlived its parent"
    again = run("rt-reproduce", *args, "--out", cut)
    assert again.returncode == 0, again.stderr
    numbers = lambda d: [(r["system"], r["eval"]["lengths"], r["eval"]["by_position"]) for r in json.loads((d / "results.json").read_text())["runs"]]
    assert numbers(cut) == numbers(tmp_path / "whole")
    assert (cut / "table.csv").read_text() == (tmp_path / "whole" / "table.csv").read_text()
    assert (cut / "overview.png").exists() and not list(cut.glob(".*.tmp"))
