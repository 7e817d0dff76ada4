"""Two processes on this machine's CPU (gloo): the same numbers as one, by torchrun and by accelerate launch."""
import json, os, signal, subprocess, sys, time
import pytest, torch
from kill_runs import lines, newest_checkpoint
from safetensors.torch import load_file
from route_transport.data import Blocks, prepare
from route_transport.execution import Execution, adapt
from route_transport.model import GPT, system_config
from route_transport.training import BUDGETS, fit

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"}


def two(*args, launcher=TORCHRUN, **kwargs):
    port = ["--master_port", str(20_000 + os.getpid() % 20_000)] if launcher is TORCHRUN else ["--main_process_port", str(20_000 + os.getpid() % 20_000)]
    done = subprocess.run([*launcher, *port, *map(str, args)], env=ENV, capture_output=True, text=True, timeout=300, **kwargs)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


# What each of two processes does; `sharded` splits the weights themselves (FSDP's second version), which accelerate does on GPUs only
STEP = """
import sys, torch, torch.distributed as dist
from route_transport.data import Blocks, prepare
from route_transport.execution import Alone, Execution, adapt, processes
from route_transport.model import GPT, system_config
from route_transport.training import BUDGETS, _share, _train_step, load_checkpoint, make_optimizer, save_checkpoint, weights

class Sharded(Alone):
    def __init__(self):
        dist.init_process_group("gloo")
        super().__init__("cpu")
        self.num_processes, self.process_index, self.is_main_process = 2, dist.get_rank(), dist.get_rank() == 0
    def prepare(self, model, optimizer):
        from torch.distributed.fsdp import fully_shard
        for block in model.blocks: fully_shard(block)
        fully_shard(model)
        return model, torch.optim.SGD(model.parameters(), lr=1.0) if isinstance(optimizer, torch.optim.SGD) else make_optimizer(model, budget)
    def wait_for_everyone(self): dist.barrier()

kind, micro, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
here, budget, execution = Sharded() if kind == "sharded" else processes("cpu"), BUDGETS["smoke"], Execution(micro_batch=micro)
assert here.num_processes == 2
blocks = Blocks(prepare().tokens("train"), 16)
model = adapt(GPT(system_config("smoke", "learned-qkv")), execution)
model, optimizer = here.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
_train_step(model, optimizer, _share(3, blocks, budget, here), 1.0, 1e9, execution, here)
after = weights(model)
if here.is_main_process: torch.save(after, f"{folder}/after.pt")

model = adapt(GPT(system_config("smoke", "learned-qkv")), execution)
model, optimizer = here.prepare(model, make_optimizer(model, budget))
for step in range(3): _train_step(model, optimizer, _share(step, blocks, budget, here), 1e-3, 1.0, execution, here)
save_checkpoint(f"{folder}/checkpoints", model, optimizer, 3, here)
_train_step(model, optimizer, _share(3, blocks, budget, here), 1e-3, 1.0, execution, here)
after = weights(model)
load_checkpoint(f"{folder}/checkpoints", model, optimizer, here)
_train_step(model, optimizer, _share(3, blocks, budget, here), 1e-3, 1.0, execution, here)
again = weights(model)
if here.is_main_process:
    assert all(torch.equal(after[k], again[k]) for k in after) and len(after) > 10
    torch.save(after, f"{folder}/fourth.pt")
here.wait_for_everyone()
"""


@pytest.mark.parametrize("kind, micro", [("replicated", 1), ("replicated", 3), ("sharded", 2)])
def test_gradients_of_ranks_and_pieces_are_those_of_one_big_batch(kind, micro, tmp_path):
    (tmp_path / "step.py").write_text(STEP)
    prepare()
    two(tmp_path / "step.py", kind, micro, tmp_path)
    model = GPT(system_config("smoke", "learned-qkv"))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.token_losses(*Blocks(prepare().tokens("train"), 16).batch(3, BUDGETS["smoke"].batch_size)).mean().backward()
    after = torch.load(tmp_path / "after.pt")
    for name, p in model.named_parameters(): torch.testing.assert_close(before[name] - after[name], p.grad, rtol=1e-4, atol=1e-6, msg=name)   # a step of 1 against the gradient
    # and the checkpoint of two processes serves one
    from route_transport.training import _train_step, load_checkpoint, make_optimizer
    from route_transport.execution import Alone
    model = adapt(GPT(system_config("smoke", "learned-qkv"), seed=9), Execution())
    optimizer = make_optimizer(model, BUDGETS["smoke"])
    assert load_checkpoint(tmp_path / "checkpoints", model, optimizer)["step"] == 3
    _train_step(model, optimizer, Blocks(prepare().tokens("train"), 16).batch(3, 8), 1e-3, 1.0, Execution(), Alone())
    for name, v in torch.load(tmp_path / "fourth.pt").items(): torch.testing.assert_close(model.state_dict()[name], v, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_training_and_evaluation_on_two_processes_give_the_numbers_of_one(launcher, tmp_path):
    one = fit(system_config("smoke", "random-qkv+alibi"), BUDGETS["smoke"], tmp_path / "one", progress=False)
    two("-m", "route_transport.training", "--system", "random-qkv+alibi", "--preset", "smoke", "--out", tmp_path / "two", "--micro-batch", 3, "--quiet", launcher=launcher)
    assert json.loads((tmp_path / "two" / "train.json").read_text())["processes"] == 2
    torch.testing.assert_close(losses(tmp_path / "two"), losses(one), rtol=1e-5, atol=1e-5)
    a, b = load_file(one / "model.safetensors"), load_file(tmp_path / "two" / "model.safetensors")
    assert list(a) == list(b)
    done = two("-m", "route_transport.extrapolation", tmp_path / "two", "--preset", "smoke", launcher=launcher)
    assert done.stdout.count("(  8×)") == 1                          # printed once, not by each
    shared = json.loads((tmp_path / "two" / "eval.json").read_text())
    subprocess.run([sys.executable, "-m", "route_transport.extrapolation", tmp_path / "two", "--preset", "smoke"], check=True, env=ENV)
    assert json.loads((tmp_path / "two" / "eval.json").read_text()) == shared    # to the last bit


def test_a_batch_that_does_not_divide_is_refused(tmp_path):
    port = ["--master_port", str(20_000 + os.getpid() % 20_000)]
    done = subprocess.run([*TORCHRUN, *port, "-m", "route_transport.training", "--preset", "smoke", "--batch-size", "7", "--out", str(tmp_path / "r")],
                          env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode and "batch_size=7: must be a multiple of the number of processes, 2" in done.stderr
    assert not (tmp_path / "r").exists()


def test_a_launcher_that_is_told_to_stop_saves(tmp_path):
    port = ["--master_port", str(20_000 + os.getpid() % 20_000)]
    process = subprocess.Popen([*TORCHRUN, *port, "-m", "route_transport.training", "--preset", "smoke", "--steps", "20000", "--quiet", "--out", str(tmp_path / "r")],
                               env=ENV, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    until = time.time() + 120
    while time.time() < until and len(lines(tmp_path / "r")) < 2: time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=90)
    step = newest_checkpoint(tmp_path / "r")
    assert process.returncode and step >= 20 and f"stopped by SIGTERM after step {step}, which is saved" in err
