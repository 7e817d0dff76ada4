"""What a transport costs: its attention against plain causal attention, in time and memory.

    python benchmarks/transports.py                    # all of it, about ten minutes
    python benchmarks/transports.py --lengths 512      # seconds

Each number is the whole of what a layer pays: steps and frames from the layer's input, attention, and the way back. All systems
take turns in one process, round after round, so that whatever else the machine does meets them alike; a ratio is taken within its round. Peak memory
is measured in a process of its own, above what the inputs and PyTorch itself take.
"""
import os, platform, statistics, subprocess, sys, time
from pathlib import Path
import torch
import torch.nn.functional as F
from fastcore.script import call_parse
from route_transport.attention import transported_attention
from route_transport.controls import make_control
from route_transport.model import parse_system
from route_transport.transport import HeadShape, make_transport
from route_transport.utils import check_choice, write_json

SYSTEMS = ("plain", "rope", "random-qkv", "learned-qkv", "alibi", "reflections-qk", "reflections-qkv", "random-reflections-qkv", "path")
HEADS, HEAD_DIM = 4, 64
ROUNDS = {"forward": {512: 30, 4096: 9, 32_768: 3}, "forward+backward": {512: 20, 4096: 7}}


def make_run(system: str, T: int, mode: str):
    "A function of no arguments that does one layer's attention."
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, T, HEAD_DIM, generator=g).requires_grad_(mode != "forward") for _ in range(3))
    width = HEADS*HEAD_DIM
    x, tokens = torch.randn(1, T, width, generator=g), torch.randint(0, 257, (1, T), generator=g)
    if system == "plain": attend = lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        parts = parse_system(system)
        transport, control = make_transport(parts["transport"], HeadShape(HEADS, HEAD_DIM, width, 257, 512)), make_control(parts["control"], HeadShape(HEADS, HEAD_DIM, width, 257, 512))
        attend = lambda: transported_attention(q, k, v, transport.frames(x, tokens), parts["carry"], control)

    def run():
        if mode == "forward":
            with torch.no_grad(): return attend()
        attend().sum().backward()
    return run


def high_water(field: str) -> int: # bytes
    "`VmRSS` or `VmHWM` of this process (Linux)."
    return next(1024*int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))


def peak_memory(system: str, T: int, mode: str) -> int: # bytes above the inputs
    "Highest resident memory of one run beyond what was there before it; measured in a fresh process."
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import transports; transports.print_peak({system!r}, {T}, {mode!r})"
    return int(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def print_peak(system, T, mode):
    torch.set_num_threads(1)
    make_run(system, 64, mode)()                                           # libraries loaded, kernels chosen
    run = make_run(system, T, mode)
    Path("/proc/self/clear_refs").write_text("5")                          # the high-water mark starts anew
    before = high_water("VmRSS")
    kept = run()
    print(high_water("VmHWM") - before)


def measure(T: int, mode: str, systems, rounds: int, memory: bool) -> list:
    "Rows of one table: seconds and ratios of every round, peak memory."
    runs = {s: make_run(s, T, mode) for s in systems}
    if T <= 4096:
        for run in runs.values(): run()
    seconds = {s: [] for s in systems}
    for _ in range(rounds):
        for s, run in runs.items():
            begin = time.perf_counter()
            run()
            seconds[s].append(time.perf_counter() - begin)
    rows = []
    for s in systems:
        ratios = [a/b for a, b in zip(seconds[s], seconds["plain"])]
        rows.append(dict(system=s, tokens=T, mode=mode, best=min(seconds[s]), seconds=seconds[s], ratio_of_bests=min(seconds[s])/min(seconds["plain"]),
                         ratio=statistics.median(ratios), ratio_low=min(ratios), ratio_high=max(ratios), peak_bytes=peak_memory(s, T, mode) if memory else None))
    return rows


def markdown(results: dict) -> str:
    "The tables."
    head = (f"Attention of {results['heads']} heads of {results['head_dim']}, batch 1, float32, {results['threads']} thread, PyTorch {results['torch']}, {results['machine']}. "
            "Ratios to plain causal `scaled_dot_product_attention` within the same round: median (lowest to highest), and the ratio of the best times. Memory above the inputs.")
    lines = [head]
    for mode, T in dict.fromkeys((r["mode"], r["tokens"]) for r in results["rows"]):
        lines += ["", f"**{mode}, {T:,} tokens**", "", "| system | best, s | ratio, median (range) | ratio of bests | peak memory, MB |", "|---|---:|---:|---:|---:|"]
        for r in results["rows"]:
            if (r["mode"], r["tokens"]) != (mode, T): continue
            peak = "" if r["peak_bytes"] is None else f"{r['peak_bytes']/1e6:,.0f}"
            lines.append(f"| {r['system']} | {r['best']:.4g} | {r['ratio']:.2f} ({r['ratio_low']:.2f} to {r['ratio_high']:.2f}) | {r['ratio_of_bests']:.2f} | {peak} |")
    return "\n".join(lines) + "\n"


@call_parse
def main(
    lengths: str="512,4096,32768",     # tokens, comma-separated; forward+backward up to 4096
    systems: str="all",                # comma-separated; all: every one of the table; plain is always measured
    rounds: int=0,                     # rounds of all systems; 0: more for shorter lengths
    out: str="benchmarks/results",     # folder of transports.json and transports.md
    no_memory: bool=False,             # leave peak memory out
):
    "Time every transport's attention against plain causal attention and write the tables."
    torch.set_num_threads(1)
    chosen = list(SYSTEMS) if systems == "all" else ["plain"] + [check_choice("systems", s, SYSTEMS) for s in systems.split(",") if s != "plain"]
    rows = []
    for T in map(int, lengths.split(",")):
        for mode in ROUNDS:
            if mode != "forward" and T > 4096: continue
            rows += measure(T, mode, chosen, rounds or ROUNDS[mode].get(T, 3), not no_memory and Path("/proc/self/clear_refs").exists())
    results = dict(heads=HEADS, head_dim=HEAD_DIM, threads=1, torch=torch.__version__, machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores", rows=rows)
    Path(out).mkdir(parents=True, exist_ok=True)
    write_json(Path(out)/"transports.json", results)
    (Path(out)/"transports.md").write_text(markdown(results), encoding="utf-8")
    print(markdown(results))
