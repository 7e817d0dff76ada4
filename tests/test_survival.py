"""Runs that are killed, asked to stop, or out of disk."""
import json, os, signal, subprocess, sys, time
from dataclasses import replace
import pytest, torch
from safetensors.torch import load_file
from kill_runs import lines, newest_checkpoint, torment
from route_transport.model import GPT, system_config
from route_transport.training import BUDGETS, fit

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_killed_three_times_it_ends_with_the_same_bits(tmp_path):
    result = torment(tmp_path, kills=3)
    assert result["kills"] == 3 and result["exit_status"] == 0 and result["most_steps_lost"] <= 20, result
    assert result["weights_that_differ"] == result["lines_that_differ"] == 0 and not result["left_over"], result


def start(out, *args, steps=3000):
    return subprocess.Popen([sys.executable, "-m", "route_transport.training", "--preset", "smoke", "--steps", str(steps), "--quiet", "--out", str(out), *args],
                            env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_signal_saves_and_ends(number, tmp_path):
    process, until = start(tmp_path / "run"), time.time() + 60
    while time.time() < until and len(lines(tmp_path / "run")) < 3: time.sleep(0.01)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    step = newest_checkpoint(tmp_path / "run")
    assert process.returncode == 128 + number and step >= 30
    assert f"stopped by {number.name} after step {step}, which is saved" in err and "Traceback" not in err
    assert lines(tmp_path / "run")[-1]["step"] == step // 10 * 10


def test_random_state_is_part_of_a_run(tmp_path, monkeypatch):
    plain = GPT.token_losses
    def noisy(self, tokens, targets):                       # as with dropout: every step draws
        return plain(self, tokens, targets) * (1 + 0.3 * torch.randn(targets.shape))
    monkeypatch.setattr(GPT, "token_losses", noisy)
    model, budget = system_config("smoke", "rope"), BUDGETS["smoke"]
    before = torch.get_rng_state()
    whole = fit(model, budget, tmp_path / "whole", progress=False)
    assert torch.equal(torch.get_rng_state(), before)       # the caller's own is left alone
    torch.rand(5)
    for stop in (25, None): cut = fit(model, budget, tmp_path / "cut", progress=False, stop_at=stop)
    a, b = (load_file(r / "model.safetensors") for r in (whole, cut))
    assert all(torch.equal(a[k], b[k]) for k in a)
    assert not torch.equal(a["embed.weight"], load_file(fit(model, replace(budget, seed=1), tmp_path / "other", progress=False) / "model.safetensors")["embed.weight"])


FULL = """
import resource, sys
from route_transport.training import rt_train
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))   # no file may grow beyond it: writing fails as on a full disk
rt_train(preset="smoke", steps=60, quiet=True, out=sys.argv[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path):
    out = tmp_path / "run"
    fit(system_config("smoke", "rope"), replace(BUDGETS["smoke"], steps=60), out, progress=False, stop_at=25)
    assert newest_checkpoint(out) == 20
    for limit in (200_000, 50_000):                          # the optimiser's file does not fit; not even the weights
        done = subprocess.run([sys.executable, "-c", FULL, str(limit), str(out)], env=ENV, capture_output=True, text=True)
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert "could not be written" in done.stderr and "the last good one, step-00000020, is kept" in done.stderr and "Make room" in done.stderr
        assert newest_checkpoint(out) == 20 and not list(out.rglob("*.tmp"))
    fit(system_config("smoke", "rope"), replace(BUDGETS["smoke"], steps=60), out, progress=False)
    assert json.loads((out / "train.json").read_text())["steps"] == 60


def test_two_trainings_do_not_share_a_folder(tmp_path):
    first, until = start(tmp_path / "run", steps=20_000), time.time() + 60
    while time.time() < until and len(lines(tmp_path / "run")) < 3: time.sleep(0.01)
    second = start(tmp_path / "run", steps=20_000)
    try:
        _, err = second.communicate(timeout=90)
        assert second.returncode == 2 and "must be a folder in which no other process is training" in err
        assert first.poll() is None
    finally: first.kill(); first.wait()
