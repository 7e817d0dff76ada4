"""One window of 65,536 tokens through a whole model, for every system: time and peak memory.

    python benchmarks/long_context.py                              # all systems, an hour or two on one core
    python benchmarks/long_context.py --systems rope,alibi --tokens 8192

Each system runs in a process of its own: a model of the `small` preset's shape (4 layers, width 128, 4 heads of 32), made new, scores every token of the window
with `GPT.token_losses`, no gradient. Peak memory is the highest resident memory during the pass above what was resident before it: weights, libraries and input are not counted.
What is measured is saved after each system; called again, what is there is not measured again.
"""
import json, os, platform, subprocess, sys, time
from pathlib import Path
import torch
from fastcore.script import call_parse
from route_transport.model import GPT, SYSTEMS, parse_system, system_config
from route_transport.utils import read_json, write_json

WITH_CONTROLS = tuple(f"{t}+{c}" for t in ("rope", "learned-qkv", "reflections-qkv", "path") for c in ("alibi", "window", "loglength", "forget"))
SYSTEMS = SYSTEMS + tuple(s for s in WITH_CONTROLS + ("random-qkv+forget",) if s not in SYSTEMS)


def status(field: str) -> int: # bytes
    "`VmRSS` or `VmHWM` of this process (Linux)."
    return next(1024*int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))


def measure_here(system: str, tokens: int, threads: int):
    "One pass, printed as JSON."
    torch.set_num_threads(threads)
    model = GPT(system_config("small", system)).eval()
    ids = torch.randint(0, 257, (1, tokens + 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.token_losses(ids[:, :256], ids[:, 1:257])                    # libraries loaded, kernels chosen
        Path("/proc/self/clear_refs").write_text("5")                      # the high-water mark starts anew
        before, begin = status("VmRSS"), time.perf_counter()
        loss = model.token_losses(ids[:, :-1], ids[:, 1:])
    print(json.dumps(dict(system=system, tokens=tokens, seconds=time.perf_counter() - begin, peak_bytes=status("VmHWM") - before, finite=bool(loss.isfinite().all()))))


def markdown(results: dict) -> str:
    rows = results["rows"]
    rope = next((r["seconds"] for r in rows if r["system"] == "rope"), None)
    lines = [f"One window of {results['tokens']:,} tokens, {results['shape']}, float32, {results['threads']} thread(s), PyTorch {results['torch']}, {results['machine']}. "
             "Peak memory above the weights.", "", "| system | seconds | of `rope` | peak memory, MB |", "|---|---:|---:|---:|"]
    for r in rows: lines.append(f"| {r['system']} | {r['seconds']:.1f} | {'' if rope is None else f'''{r['seconds']/rope:.2f}'''} | {r['peak_bytes']/1e6:,.0f} |")
    return "\n".join(lines) + "\n"


@call_parse
def main(
    systems: str="all",            # comma-separated
    tokens: int=65_536,            # of the window
    threads: int=1,                # CPU threads
    out: str="benchmarks/results", # folder of long_context.json and long_context.md
):
    "Score one long window with every system."
    chosen = list(SYSTEMS) if systems == "all" else systems.split(",")
    for s in chosen: parse_system(s)
    file = Path(out)/"long_context.json"
    results = read_json(file) if file.exists() else {}
    if (results.get("tokens"), results.get("threads")) != (tokens, threads):
        results = dict(tokens=tokens, threads=threads, shape="4 layers, width 128, 4 heads", torch=torch.__version__,
                       machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores", rows=[])
    Path(out).mkdir(parents=True, exist_ok=True)
    for system in chosen:
        if any(r["system"] == system for r in results["rows"]): continue
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).resolve().parent)!r}); import long_context; long_context.measure_here({system!r}, {tokens}, {threads})"
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        results["rows"].append(json.loads(done.stdout))
        order = {s: n for n, s in enumerate([*SYSTEMS, *chosen])}
        results["rows"].sort(key=lambda r: order[r["system"]])
        write_json(file, results)
        Path(out, "long_context.md").write_text(markdown(results), encoding="utf-8")
        print(results["rows"][-1] if False else json.loads(done.stdout), flush=True)
    print(markdown(results))
