"""One run computed in different ways: compiled, recomputed, in pieces, in bf16."""
import json, shutil
from dataclasses import replace
import pytest, torch
from safetensors.torch import load_file
from route_transport.execution import Execution
from route_transport.extrapolation import evaluate_run
from route_transport.model import system_config
from route_transport.training import BUDGETS, fit, load_model

MODEL, BUDGET = system_config("smoke", "learned-qkv"), replace(BUDGETS["smoke"], steps=20, checkpoint_every=10)


def run(out, execution=Execution(), **kwargs): return fit(MODEL, BUDGET, out, execution=execution, progress=False, **kwargs)


def final(out): return load_file(out / "model.safetensors")


def losses(out): return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_recomputing_changes_no_bit_and_pieces_only_the_rounding(tmp_path):
    plain, again, pieces = run(tmp_path / "a"), run(tmp_path / "b", Execution(recompute=True)), run(tmp_path / "c", Execution(micro_batch=3))
    assert all(torch.equal(final(plain)[k], final(again)[k]) for k in final(plain))
    torch.testing.assert_close(losses(pieces), losses(plain), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++") or shutil.which("cl")), reason="torch.compile needs a C++ compiler on a CPU")
@pytest.mark.skipif(" " in torch.__file__, reason="torch.compile does not build where the path of the environment has a space in it")
def test_a_compiled_run_goes_on_uncompiled_and_the_other_way_round(tmp_path):
    plain = run(tmp_path / "plain")
    for name, ways in dict(compiled_first=(True, False), compiled_last=(False, True)).items():
        for compile, stop in zip(ways, (13, None)): out = run(tmp_path / name, Execution(compile=compile), stop_at=stop)
        assert list(final(out)) == list(final(plain)) and not any("_orig_mod" in k for k in final(out))
        torch.testing.assert_close(losses(out), losses(plain), rtol=1e-4, atol=1e-4)
        load_model(out)


def test_bf16_is_asked_for_by_name_and_on_record(tmp_path):
    rough, plain = run(tmp_path / "bf16", Execution(precision="bf16")), run(tmp_path / "plain")
    assert json.loads((rough / "config.json").read_text())["precision"] == "bf16" and "precision" not in json.loads((plain / "config.json").read_text())
    assert losses(rough) != losses(plain)
    torch.testing.assert_close(losses(rough), losses(plain), rtol=0.02, atol=0.02)
    assert all(v.dtype == torch.float32 for v in final(rough).values())             # autocast: the weights stay what they are
    with pytest.raises(ValueError, match="precision: 'bf16' there, 'float32' now"): run(rough)
    kwargs = dict(regions=2, multiples=(1, 4))
    a, b = evaluate_run(rough, **kwargs), evaluate_run(rough, **kwargs, execution=Execution(precision="bf16"))
    assert b["precision"] == "bf16" and "precision" not in a
    assert abs(b["lengths"][1]["ppl"]/a["lengths"][1]["ppl"] - 1) < 0.02
