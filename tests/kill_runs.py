"""Kill a training over and over at random moments, let it go on each time, and compare its end with that of one left alone.

    python tests/kill_runs.py                      # 20 kills, about three minutes on a core
    python tests/kill_runs.py --kills 5 --processes 2

Most kills are SIGKILL to the command and all its processes, some SIGTERM. After each the newest checkpoint must be readable and no more than
`checkpoint_every` steps behind what the metrics had reached. On one process the final weights and every loss must equal the undisturbed run's bit for bit.
"""
import argparse, json, os, random, signal, subprocess, sys, tempfile, time
from pathlib import Path
import psutil, torch
from safetensors.torch import load_file

EVERY = 20   # steps between checkpoints


def command(out, steps, processes, system):
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", str(20_000 + os.getpid() % 20_000)] if processes > 1 else []
    return [sys.executable, *launcher, "-m", "route_transport.training", "--system", system, "--preset", "smoke", "--steps", str(steps), "--checkpoint-every", str(EVERY),
            "--quiet", "--out", str(out)]


def lines(run):
    "The metrics' whole lines."
    path = Path(run) / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []


def newest_checkpoint(run) -> int: # its step; 0 where there is none
    "Read every file of the newest checkpoint."
    found = sorted(Path(run).glob("checkpoints/step-*"))
    if not found: return 0
    assert load_file(found[-1] / "model.safetensors") and torch.load(found[-1] / "optimizer.pt", weights_only=True)
    return json.loads((found[-1] / "state.json").read_text())["step"]


def end(process, number):
    "Send a signal; SIGKILL goes to the process and to all that it started."
    everyone = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)] if number == signal.SIGKILL else [process]
    for p in everyone:
        try: p.send_signal(number)
        except psutil.NoSuchProcess: pass
    process.wait()


def torment(folder, kills: int, processes: int=1, steps: int=None, seed: int=0, system: str="learned-qkv", say=lambda *_: None) -> dict:
    "Kills, resumes, and what differs in the end."
    folder, rng, done = Path(folder), random.Random(seed), dict(SIGKILL=0, SIGTERM=0)
    steps = steps or 200 * (kills + 2)
    env, cut = {**os.environ, "OMP_NUM_THREADS": "1"}, folder / "cut"
    run = lambda out: subprocess.Popen(command(out, steps, processes, system), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert run(folder / "whole").wait() == 0
    starts, lost = 0, 0
    while sum(done.values()) < kills:
        process, starts, before = run(cut), starts + 1, len(lines(cut))
        goal = before + rng.randrange(1, 20) if rng.random() < 0.8 else -1            # some while it is still starting
        until = time.time() + (120 if goal > 0 else rng.uniform(0, 4))
        while time.time() < until and process.poll() is None and not (goal > 0 and len(lines(cut)) >= goal): time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05))                                              # anywhere in a step, a log line or a checkpoint
        if process.poll() is not None: break                                          # it came to its end
        number = signal.SIGTERM if goal > 0 and rng.random() < 0.25 else signal.SIGKILL
        end(process, number)
        done[number.name] += 1
        reached, step = max([l["step"] for l in lines(cut)], default=0), newest_checkpoint(cut)
        lost = max(lost, reached - step)
        assert reached - step <= EVERY, f"killed at step {reached}, but the checkpoint is of step {step}"
        say(f"{sum(done.values()):>3} {number.name} at step {reached}, the checkpoint has {step}")
    finished = run(cut).wait()
    whole, after = load_file(folder / "whole" / "model.safetensors"), load_file(cut / "model.safetensors")
    numbers = lambda r: [{k: l[k] for k in ("step", "loss", "grad_norm", "lr")} for l in lines(r)]
    return dict(kills=sum(done.values()), **done, starts=starts + 1, exit_status=finished, steps=steps, most_steps_lost=lost,
                weights_that_differ=sum(not torch.equal(whole[k], after[k]) for k in whole), largest_difference=max((whole[k] - after[k]).abs().max().item() for k in whole),
                lines_that_differ=sum(a != b for a, b in zip(numbers(folder / "whole"), numbers(cut))) + abs(len(lines(folder / "whole")) - len(lines(cut))),
                left_over=sorted(p.name for p in cut.rglob("*.tmp")))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(kills=20, processes=1, seed=0).items(): parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as d: result = torment(d, **vars(args), say=lambda line: print(line, flush=True))
    print(json.dumps(result, indent=1))
    sys.exit(bool(result["exit_status"] or result["left_over"] or (args.processes == 1 and (result["weights_that_differ"] or result["lines_that_differ"]))))
