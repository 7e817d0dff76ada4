"""What one GPU makes of the paper's model, in under nine minutes and without a network: right answers, speed, and a first training.

    PYTHONPATH=. python benchmarks/gpu.py --out gpu.json          # one GPU of the H100's class
    PYTHONPATH=. python benchmarks/gpu.py --toy --out toy.json    # any CPU, a minute at most: what the tests run

1. Every transport and control against the double-loop oracle, in float32 and bf16, and at length 512 against float64, gradients too.
2. Tokens a second and model-FLOPs utilisation at the paper's shape, with and without torch.compile, against the same model on plain attention.
3. The paper's architecture trained on the Python source that lies on the machine, as bytes, in what time is left: the same number of steps for every system,
   then perplexity from 512 to 65,536 tokens.

Everything goes into one JSON, written whole after each part and row, so that a cut leaves what was measured. `rt-train --dry-run --throughput gpu.json` reads it. It needs
PyTorch, NumPy, einops, safetensors and tqdm, and the package itself (`pip install --no-deps .`, or PYTHONPATH); neither datasets nor tiktoken, Matplotlib, fastcore or accelerate.
"""
import argparse, gc, os, platform, sysconfig, time
from dataclasses import replace
from pathlib import Path
import numpy as np, torch
from route_transport.attention import transported_attention
from route_transport.controls import make_control
from route_transport.data import Blocks, python_files, read_text, sent, split_documents
from route_transport.execution import Alone, Execution, adapt
from route_transport.extrapolation import evaluate
from route_transport.model import GPT, SYSTEMS, count_parameters, parse_system, system_config
from route_transport.path import PaTH, path_steps
from route_transport.planning import PEAKS, flops_per_token, memory
from route_transport.reflections import Householder, paired, reflection_steps
from route_transport.training import TrainConfig, _train_step, learning_rate, make_optimizer
from route_transport.transport import HeadShape, Rotation, make_transport, rotation_matrix, route_ref
from route_transport.utils import write_json

TIMED = ("plain", "rope", "learned-qkv", "random-qkv", "alibi", "reflections-qkv")   # plain: causal attention and nothing else; the longest to compile last
TRAINED = ("rope", "random-qk", "random-qkv", "learned-qkv", "alibi")
HEAD_DIM = 64
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}   # of the largest number of the answer


def steps_of(transport, x, tokens):
    "The steps M_t as float64 matrices `[B or 1, H or 1, T, D, D]`, from what the transport says of each token alone."
    if isinstance(transport, Rotation): return rotation_matrix(transport.angles(x, tokens, torch.arange(tokens.shape[-1], device=tokens.device)[None]).double())
    if isinstance(transport, Householder):
        w = transport.axes(x, tokens, torch.arange(tokens.shape[-1], device=tokens.device)[None]).double().unflatten(-1, (transport.n_heads, transport.reflections, -1))
        return reflection_steps((paired(w, transport.spread) if transport.spread else w).transpose(1, 2))
    if isinstance(transport, PaTH):
        frames = transport.frames(x, tokens)
        return path_steps(frames.w.double(), frames.beta.double())
    return torch.eye(HEAD_DIM, dtype=torch.float64).expand(1, 1, tokens.shape[-1], -1, -1)   # no transport


def problem(system, T, dtype=torch.float64, device="cpu"):
    "Module, control and random inputs of one attention layer; the same numbers for every dtype and device."
    parts, H, g = parse_system(system), 2, torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        transport = make_transport(parts["transport"], HeadShape(H, HEAD_DIM, H*HEAD_DIM, 257, T))
        for p in transport.parameters(): p.add_(0.02*torch.randn(p.shape, generator=g))   # learned steps that differ from token to token
    x, qkv = torch.randn(2, T, H*HEAD_DIM, generator=g), torch.randn(3, 2, H, T, HEAD_DIM, generator=g)
    tokens = torch.randint(0, 257, (2, T), generator=g)
    qkv = [t.to(device, dtype).requires_grad_() for t in qkv]
    return transport.to(device, dtype if dtype == torch.float64 else None), make_control(parts["control"], HeadShape(H, HEAD_DIM, H*HEAD_DIM, 257, T)), parts["carry"], x.to(device, dtype if dtype == torch.float64 else None), tokens.to(device), qkv


def answer(system, T, dtype, device):
    "The fast path's output and the gradients of q, k, v, in float64 on the CPU."
    transport, control, carry, x, tokens, qkv = problem(system, T, dtype, device)
    if control is not None: control.to(device)
    y = transported_attention(*qkv, transport.frames(x, tokens), carry, control, marks=control and control.marks(x))
    y.float().square().sum().backward()
    return [t.detach().double().cpu() for t in (y, *(t.grad for t in qkv))]


def oracle(system, T):
    "The definition: a double loop in float64 on the CPU."
    transport, control, carry, x, tokens, qkv = problem(system, T)
    with torch.no_grad():
        at = torch.arange(T)
        bias = None if control is None else control.bias(at[None, None, :, None], at[None, None, None]).double()
        return route_ref(*qkv, steps_of(transport, x, tokens), carry, bias)


def correctness(device, short, long):
    "One row a system and dtype: errors relative to the largest number of the right answer."
    for system in SYSTEMS:
        exact, far = oracle(system, short), answer(system, long, torch.float64, "cpu")
        for dtype, limit in TOLERANCE.items():
            relative = lambda a, b: ((a - b).abs().max()/b.abs().max()).item()
            got, got_far = answer(system, short, dtype, device)[0], answer(system, long, dtype, device)
            errors = dict(oracle=relative(got, exact), output=relative(got_far[0], far[0]), gradients=max(map(relative, got_far[1:], far[1:])))
            yield dict(system=system, dtype=str(dtype).split(".")[1], tokens=[short, long], **errors, limit=limit, ok=max(errors.values()) <= limit)


class Clock:
    "Seconds since the start, and whether the device has caught up."
    def __init__(self, device, minutes): self.cuda, self.begin, self.limit = device == "cuda", time.perf_counter(), 60*minutes
    def now(self):
        if self.cuda: torch.cuda.synchronize()
        return time.perf_counter() - self.begin
    def left(self): return self.limit - self.now()


def matrix_peak(device, n): # FLOP/s
    "What a large matrix product reaches here, in the precision of the training."
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    a, b, clock = torch.randn(n, n, device=device, dtype=dtype), torch.randn(n, n, device=device, dtype=dtype), Clock(device, 1)
    for _ in range(3): a @ b
    begin = clock.now()
    for _ in range(10): a @ b
    return 10*2*n**3/(clock.now() - begin)


def prepared(system, shape, execution, here):
    "A model and its optimiser, ready to train."
    config = replace(system_config("paper", "nope" if system == "plain" else system), **shape)
    model = adapt(GPT(config).to(here.device), execution)
    return config, model, make_optimizer(model, TrainConfig())


def speed(system, compiled, shape, blocks, clock, device, repeats, peaks):
    "Tokens a second of whole training steps on random ids."
    execution, here = Execution(device, micro_batch=blocks, compile=compiled), Alone(device)
    if compiled: torch._dynamo.reset()
    config, model, optimizer = prepared(system, shape, execution, here)
    g = torch.Generator().manual_seed(0)
    batch = [torch.randint(0, config.vocab_size, (blocks, config.context), generator=g).to(here.device) for _ in range(2)]
    step, begin = lambda: _train_step(model, optimizer, batch, 1e-4, 1.0, execution, here), clock.now()
    if device == "cuda": torch.cuda.reset_peak_memory_stats()
    losses = [step()[0].item() for _ in range(3)]      # compiled or not, they must be alike
    first, seconds = clock.now() - begin, []
    for _ in range(repeats):
        begin = clock.now(); step(); seconds.append(clock.now() - begin)
    tokens = blocks*config.context/sorted(seconds)[len(seconds)//2]
    flops = tokens*flops_per_token(config)
    planned = attempt({}, lambda: memory(config, execution, blocks)[0])
    return dict(system=system, compile=compiled, shape={k: getattr(config, k) for k in ("n_layers", "width", "n_heads", "context", "vocab_size")}, blocks=blocks, precision=execution.dtype,
                parameters=count_parameters(model)["total"], tokens_per_second=tokens, step_seconds=seconds, first_steps_seconds=first, first_losses=losses,
                utilisation={k: flops/p for k, p in peaks.items() if p}, planned_bytes=None if "error" in planned else sum(planned.values()),
                peak_bytes=torch.cuda.max_memory_allocated() if device == "cuda" else None)


def python_source(limit: int) -> dict: # name → text
    "Python files of the standard library and of what is installed, up to `limit` bytes."
    texts, size = {}, 0
    for root, label in ((None, "stdlib"), (sysconfig.get_paths()["purelib"], "installed")):
        found = python_files() if root is None else {p.relative_to(root).as_posix(): p for p in sorted(Path(root).rglob("*.py"))}
        for name, path in sorted(found.items()):
            if size >= limit: break
            try: text = read_text(path)
            except (ValueError, OSError): continue
            texts[f"{label}/{name}"] = text; size += len(text)
    return texts


def streams(limit: int) -> dict: # split → ids
    "The source as byte ids, every document ended by 256."
    return {split: np.concatenate([np.append(np.frombuffer(t.encode("utf-8", "replace"), np.uint8).astype(np.uint16), np.uint16(256)) for t in texts])
            for split, texts in split_documents(python_source(limit)).items()}


def training(system, ids, shape, plan, clock, device, execution, multiples, regions, save):
    "Train for `plan['steps']` steps or until the time is up, `save` the curve, then evaluate."
    here, until = Alone(device), clock.now() + min(plan["seconds"], clock.left() - plan["spare"])
    config, model, optimizer = prepared(system, shape, execution, here)
    budget = TrainConfig(steps=plan["steps"], batch_size=plan["blocks"], lr=plan["lr"], warmup=max(1, plan["steps"]//10))
    blocks, losses = Blocks(ids["train"], config.context, 0), []
    begin, curve = clock.now(), []
    for step, batch in enumerate(sent((blocks.batch(n, budget.batch_size) for n in range(budget.steps)), here.device)):
        losses.append(_train_step(model, optimizer, batch, learning_rate(step, budget), 1.0, execution, here)[0])
        if (step + 1) % 20 == 0 or step + 1 == budget.steps:
            curve.append([step + 1, torch.stack(losses).mean().item()]); losses = []
            if clock.now() > until: break
    row = dict(system=system, steps=step + 1, planned_steps=budget.steps, tokens=(step + 1)*budget.batch_size*config.context, seconds=clock.now() - begin,
               lr=budget.lr, precision=execution.dtype, compile=execution.compile, curve=curve)
    save(row)
    begin, result = clock.now(), evaluate(model.eval(), ids["validation"], config.context, multiples, regions, "bytes", execution, here)
    return dict(row, evaluation_seconds=clock.now() - begin, eval=result)


def step_seconds(system, ids, shape, blocks, clock, device, execution):
    "How long a training step takes, to plan by."
    here = Alone(device)
    config, model, optimizer = prepared(system, shape, execution, here)
    batch = [t.to(here.device) for t in Blocks(ids["train"], config.context, 0).batch(0, blocks)]
    for n in range(8):
        if n == 3: begin = clock.now()
        _train_step(model, optimizer, batch, 1e-5, 1.0, execution, here)
    return (clock.now() - begin)/5


def attempt(row: dict, work):
    "The work's result, or in its place what went wrong; what it held is given back."
    try: return work()
    except Exception as e: return dict(row, error=f"{type(e).__name__}: {e}"[:600])
    finally:
        gc.collect()                                     # a model whose call is its losses refers to itself
        if torch.cuda.is_initialized(): torch.cuda.empty_cache()


def about(device):
    "The machine, and whether bf16 attention runs as flash attention on it."
    cuda = device == "cuda"
    facts = dict(device=torch.cuda.get_device_name() if cuda else f"{platform.machine()} CPU", torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version(), cores=os.cpu_count())
    if cuda:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        q = torch.randn(1, 12, 512, 64, device=device, dtype=torch.bfloat16)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            facts["flash_attention"] = "error" not in attempt({}, lambda: dict(done=torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).shape))
    return facts


def main(out, toy=False, minutes=8.5, compiled=True):
    "All three parts; the JSON is written after every row."
    device = "cpu" if toy else "cuda"
    if not toy and not torch.cuda.is_available(): raise SystemExit("gpu.py: PyTorch finds no CUDA device; --toy runs on a CPU")
    if toy: shape, blocks, timed, repeats, limit, trained, multiples, regions = dict(n_layers=2, width=32, n_heads=2, context=16, vocab_size=257), 4, TIMED, 3, 300_000, TRAINED[:2], (1, 4), 2
    else: shape, blocks, timed, repeats, limit, trained, multiples, regions = {}, 32, TIMED, 12, 96_000_000, TRAINED, (1, 2, 4, 8, 16, 32, 64, 128), 2
    clock = Clock(device, minutes)
    results = dict(about(device), toy=toy, minutes=minutes, correctness=[], speed=[], training=[])
    def keep(part, row):
        results[part].append(row); results["seconds"] = clock.now(); write_json(out, results)
        print(f"{clock.now():6.1f} s  {part}: " + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items() if isinstance(v, (str, float, int, bool)))[:230], flush=True)

    for row in correctness(device, 24 if toy else 40, 48 if toy else 512): keep("correctness", row)
    name = next((n for n in PEAKS if n in results["device"].lower()), None)
    results["peaks"] = peaks = dict(measured=matrix_peak(device, 512 if toy else 8192), data_sheet=PEAKS.get(name))
    for compile in [False, True] if compiled else [False]:
        for system in timed:
            if compile and clock.left() < 0.5*clock.limit: keep("speed", dict(system=system, compile=True, error="left out: its time had come to an end")); continue
            keep("speed", attempt(dict(system=system, compile=compile), lambda: speed(system, compile, shape, blocks, clock, device, repeats, peaks)))
    plain = {r["compile"]: r.get("tokens_per_second") for r in results["speed"] if r["system"] == "plain"}
    for r in results["speed"]:
        if not r.get("tokens_per_second"): continue
        if plain.get(r["compile"]): r["ratio_to_plain"] = r["tokens_per_second"]/plain[r["compile"]]
        twin = next((q for q in results["speed"] if q["system"] == r["system"] and not q["compile"]), {})
        if r["compile"] and twin.get("first_losses"): r["loss_differs_from_uncompiled"] = max(abs(a - b) for a, b in zip(r["first_losses"], twin["first_losses"]))

    ids, shape = streams(limit), dict(shape, vocab_size=257)
    results["corpus"] = dict(bytes={k: len(v) for k, v in ids.items()}, what="Python source of the standard library and installed packages, as bytes")
    execution = Execution(device, micro_batch=blocks)
    slowest = max(step_seconds(s, ids, shape, blocks, clock, device, execution) for s in trained)
    each = clock.left()/len(trained)
    spare = 0.35*each                                                       # for the model's making, evaluation and the unforeseen
    plan = dict(seconds=each - spare, spare=spare, blocks=blocks, lr=6e-4, steps=20 if toy else max(20, int((each - spare)/slowest)))
    results["plan"] = dict(plan, slowest_step_seconds=slowest)
    save = lambda row: write_json(out, dict(results, training=results["training"] + [row]))
    for system in trained:
        if clock.left() < spare and not toy: keep("training", dict(system=system, error="left out: the time had come to an end")); continue
        keep("training", attempt(dict(system=system), lambda: training(system, ids, shape, plan, clock, device, execution, multiples, regions, save)))
    for r in results["training"]:
        if "eval" in r: print(f"{r['system']:<12}" + "  ".join(f"{row['length']}: {row['ppl']:.3f}" for row in r["eval"]["lengths"]))
    bad = [f"{r['system']} in {r['dtype']}" for r in results["correctness"] if not r["ok"]]
    print(f"{clock.now():.0f} s; " + (f"NOT within the limits: {', '.join(bad)}" if bad else "every transport agrees with the oracle") + f"; {out}")
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])   # argparse, since fastcore may be absent there
    parser.add_argument("--out", default="gpu.json", help="where the JSON goes")
    parser.add_argument("--toy", action="store_true", help="a CPU and a toy shape")
    parser.add_argument("--minutes", type=float, default=8.5, help="time for everything")
    parser.add_argument("--no-compile", dest="compiled", action="store_false", help="leave torch.compile out")
    main(**vars(parser.parse_args()))
