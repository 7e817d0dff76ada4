"""Where a training step's time goes: torch.profiler over whole steps, as text.

    python benchmarks/profile_training.py       # about a minute
"""
from pathlib import Path
import torch
from fastcore.script import call_parse
from torch.profiler import ProfilerActivity, profile
from peers import OURS, SHAPES, training_run
from route_transport.utils import written_whole


def profiled(system: str, shape: str, steps: int, rows: int) -> str:
    "The operations that take most time of their own."
    step, _ = training_run(system, SHAPES[shape])
    for _ in range(3): step()
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        for _ in range(steps): step()
    events = prof.key_averages()
    total = sum(e.self_cpu_time_total for e in events)
    lines = [f"{system}, {shape}: {total/steps/1e3:.1f} ms a step", f"{'operation':<58}{'share':>7}{'ms/step':>10}{'calls/step':>12}"]
    for e in sorted(events, key=lambda e: -e.self_cpu_time_total)[:rows]:
        lines.append(f"{e.key[:56]:<58}{e.self_cpu_time_total/total:>7.1%}{e.self_cpu_time_total/steps/1e3:>10.2f}{e.count/steps:>12.0f}")
    return "\n".join(lines)


@call_parse
def main(
    systems: str=",".join(OURS),      # comma-separated
    steps: int=10,                    # profiled steps
    rows: int=18,                     # operations a table
    out: str="benchmarks/results",    # folder of profile-training.txt
):
    "Profile whole training steps at the peers' shapes, one thread."
    torch.set_num_threads(1)
    text = "\n\n".join(profiled(system, shape, steps, rows) for shape in SHAPES for system in systems.split(","))
    with written_whole(Path(out)/"profile-training.txt") as tmp: tmp.write_text(text + "\n", encoding="utf-8")
    print(text)
