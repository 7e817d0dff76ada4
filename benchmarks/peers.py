"""Our GPT against x-transformers and Hugging Face transformers: training, long forward passes, cached decoding.

    pip install -e ".[peers]"
    python benchmarks/peers.py                              # all of it, about three quarters of an hour
    python benchmarks/peers.py --parts training --rounds 3  # minutes

Equal shapes (layers, width, heads, vocabulary, tied embeddings) with parameter counts within 2 % of our `rope`'s; `learned-qkv` has its own projection of angles on top. One thread, float32,
the same batches, optimiser and loss for all. All take turns in one process, round after round, and a ratio is taken within its round. Long forward passes run in a process each, under a limit on memory and
on time, so that a peer may fail without taking others with it. What fails is said as it fails.
"""
import json, os, platform, statistics, subprocess, sys, time
from pathlib import Path
import torch
import torch.nn.functional as F
from fastcore.script import call_parse
from route_transport.model import GPT, GPTConfig, parse_system
from route_transport.training import TrainConfig, make_optimizer
from route_transport.utils import check_choice, write_json

OURS = ("rope", "alibi", "learned-qkv")
PEERS = ("x-transformers rotary", "x-transformers ALiBi", "HF Llama", "HF BLOOM", "HF Falcon ALiBi")   # BLOOM has eager attention only, Falcon the fused one
RIVALS = {"rope": ("x-transformers rotary", "HF Llama"), "alibi": ("x-transformers ALiBi", "HF BLOOM", "HF Falcon ALiBi"),
          "learned-qkv": ("x-transformers rotary", "HF Llama")}                                          # whom each of ours is held against
SHAPES = {"6×384": dict(n_layers=6, width=384, n_heads=6, context=256, batch=4), "4×128": dict(n_layers=4, width=128, n_heads=4, context=128, batch=8)}
VOCAB, LONG, DECODE_CONTEXT = 257, 65_536, 4096


def make_x_transformers(name, shape, positions):
    from x_transformers import Decoder, TransformerWrapper
    D = shape["width"]//shape["n_heads"]
    where = dict(alibi_pos_bias=True, alibi_num_heads=shape["n_heads"]) if "ALiBi" in name else dict(rotary_pos_emb=True, rotary_emb_dim=D)
    layers = Decoder(dim=shape["width"], depth=shape["n_layers"], heads=shape["n_heads"], attn_dim_head=D, attn_flash=True, **where)
    return TransformerWrapper(num_tokens=VOCAB, max_seq_len=positions, attn_layers=layers, use_abs_pos_emb=False, tie_embedding=True)


def make_hugging_face(name, shape, positions):
    import transformers
    w, L, H = shape["width"], shape["n_layers"], shape["n_heads"]
    common = dict(vocab_size=VOCAB, hidden_size=w, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    if name == "HF Llama":   # a gated MLP of 8/3 the width has as many weights as a plain one of 4; a multiple of 8 suits the kernels
        config = transformers.LlamaConfig(**common, intermediate_size=8*round(w/3), num_hidden_layers=L, num_attention_heads=H, max_position_embeddings=positions)
        return transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    if name == "HF BLOOM":
        return transformers.BloomForCausalLM(transformers.BloomConfig(**common, n_layer=L, n_head=H, hidden_dropout=0., attention_dropout=0.))
    config = transformers.FalconConfig(**common, num_hidden_layers=L, num_attention_heads=H, alibi=True, multi_query=False, parallel_attn=False, bias=False,
                                       hidden_dropout=0., attention_dropout=0., max_position_embeddings=positions)
    return transformers.FalconForCausalLM._from_config(config, attn_implementation="sdpa")


def make(name: str, shape: dict, positions: int=None):
    "A model, and the function that takes it from ids to logits."
    torch.manual_seed(0)
    positions = positions or shape["context"]
    if name in OURS:
        model = GPT(GPTConfig(VOCAB, shape["context"], shape["n_layers"], shape["width"], shape["n_heads"], **parse_system(name)))
        return model, model
    if name.startswith("x-t"): return (model := make_x_transformers(name, shape, positions)), model
    model = make_hugging_face(name, shape, positions)
    return model, lambda x: model(input_ids=x, use_cache=False).logits


def count(model) -> int: return sum(p.numel() for p in model.parameters())


def quartiles(values) -> list: # lower quartile, median, upper quartile
    return [float(q) for q in torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([.25, .5, .75], dtype=torch.float64))]


# ---- training

def training_run(name, shape):
    "A function of no arguments that takes one optimiser step, and the number of parameters."
    model, logits = make(name, shape)
    model.train()
    optimizer = make_optimizer(model, TrainConfig())
    ids = torch.randint(0, VOCAB, (shape["batch"], shape["context"] + 1), generator=torch.Generator().manual_seed(1))
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    def step():
        loss = F.cross_entropy(logits(x).flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()
    return step, count(model)


def measure_training(shape_name: str, rounds: int, steps: int=3) -> dict:
    "Seconds a step of every system in every round."
    shape = SHAPES[shape_name]
    runs = {name: training_run(name, shape) for name in OURS + PEERS}
    for step, _ in runs.values(): step(); step()
    seconds = {name: [] for name in runs}
    for r in range(rounds):
        for name in (list(runs) if r % 2 == 0 else list(runs)[::-1]):            # there and back: no one always follows the same one
            begin = time.perf_counter()
            for _ in range(steps): runs[name][0]()
            seconds[name].append((time.perf_counter() - begin)/steps)
    tokens, reference = shape["batch"]*shape["context"], runs["rope"][1]
    rows = [dict(system=name, parameters=n, parameters_over_ours=n/reference, seconds=seconds[name], tokens_per_second=quartiles([tokens/s for s in seconds[name]]))
            for name, (_, n) in runs.items()]
    off = [r["system"] for r in rows if r["system"] in PEERS and abs(r["parameters_over_ours"] - 1) > .02]
    if off: raise RuntimeError(f"not within 2 % of our parameters: {', '.join(off)}")
    ratios = [dict(ours=a, theirs=b, ratio=quartiles([t/o for o, t in zip(seconds[a], seconds[b])])) for a, bs in RIVALS.items() for b in bs]
    return dict(shape=shape_name, tokens_per_step=tokens, rows=rows, ratios=ratios)


# ---- one long forward pass

def high_water(field: str) -> int: # bytes
    "`VmRSS` or `VmHWM` of this process (Linux)."
    return next(1024*int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))


@torch.no_grad()
def print_forward(name: str, tokens: int, limit_gb: float):
    "Seconds and peak memory, above weights and input, of one forward pass in this process."
    import resource
    torch.set_num_threads(1)
    model, logits = make(name, SHAPES["4×128"], positions=tokens)
    model.eval()
    logits(torch.zeros(1, 64, dtype=torch.long))                                # libraries loaded, kernels chosen
    x = torch.randint(0, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(1))
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit_gb*2**30),)*2)
    Path("/proc/self/clear_refs").write_text("5")                               # the high-water mark starts anew
    before, begin = high_water("VmRSS"), time.perf_counter()
    logits(x)
    print(json.dumps(dict(seconds=time.perf_counter() - begin, peak_bytes=high_water("VmHWM") - before)))


def measure_forward(tokens: int, limit_gb: float, limit_s: float, repeats: int) -> dict:
    "One row a system: seconds of each repeat, peak memory, or how it failed."
    rows = {name: dict(system=name, seconds=[]) for name in OURS + PEERS}
    for _ in range(repeats):
        for name, row in rows.items():
            if "failed" in row: continue
            code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import peers; peers.print_forward({name!r}, {tokens}, {limit_gb})"
            try: done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=limit_s)
            except subprocess.TimeoutExpired: row["failed"] = f"not done within {limit_s:g} s"; continue
            if done.returncode == 0:
                got = json.loads(done.stdout.splitlines()[-1])
                row["seconds"].append(got["seconds"]); row["peak_bytes"] = max(row.get("peak_bytes", 0), got["peak_bytes"])
                continue
            last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
            row["failed"] = f"out of memory at {limit_gb:g} GB" if "memory" in last.lower() or done.returncode == -9 else last[:200]
    return dict(tokens=tokens, limit_gb=limit_gb, limit_s=limit_s, rows=list(rows.values()))


# ---- cached decoding

def decoder(name, shape, context):
    "A function n ↦ (the ids that follow a context, n of them, greedily, with a cache)."
    model, _ = make(name, shape, positions=2*context)
    model.eval()
    x = torch.randint(0, VOCAB, (1, context), generator=torch.Generator().manual_seed(1))
    if name in OURS: return lambda n: model.generate(x, n, temperature=0)
    if name.startswith("x-t"):
        from x_transformers import AutoregressiveWrapper
        wrapper = AutoregressiveWrapper(model)
        return lambda n: wrapper.generate(x, n, temperature=0., cache_kv=True)
    return lambda n: model.generate(x, max_new_tokens=n, min_new_tokens=n, do_sample=False, use_cache=True, attention_mask=torch.ones_like(x))


@torch.no_grad()
def measure_decoding(context: int, rounds: int, n: int=64) -> dict:
    "Tokens a second after the context has been read: n further tokens in the time that n + 1 take beyond one."
    rows, runs = {name: dict(system=name, tokens_per_second=[]) for name in OURS + PEERS}, {}
    for name in rows:
        try: runs[name] = decoder(name, SHAPES["4×128"], context); runs[name](2)
        except Exception as e: rows[name]["failed"] = f"{type(e).__name__}: {e}"[:200]; runs.pop(name, None)
    clock = lambda run, k: (time.perf_counter(), run(k), time.perf_counter())
    for _ in range(rounds):
        for name, run in runs.items():
            (a, _, b), (c, _, d) = clock(run, 1), clock(run, n + 1)
            rows[name]["tokens_per_second"].append(n/max((d - c) - (b - a), 1e-9))
    rate = {name: r["tokens_per_second"] for name, r in rows.items()}
    ratios = [dict(ours=a, theirs=b, ratio=quartiles([x/y for x, y in zip(rate[a], rate[b])])) for a, bs in RIVALS.items() for b in bs if rate[a] and rate[b]]
    return dict(context=context, new_tokens=n, rows=[dict(r, tokens_per_second=quartiles(r["tokens_per_second"]) if r["tokens_per_second"] else None) for r in rows.values()], ratios=ratios)


# ---- tables

def ratio_lines(ratios):
    cell = lambda r: f"{r['ratio'][1]:.2f} ({r['ratio'][0]:.2f} to {r['ratio'][2]:.2f})"
    return ["", "| ours | against | ours over theirs |", "|---|---|---:|"] + [f"| {r['ours']} | {r['theirs']} | {cell(r)} |" for r in ratios]


def markdown(results: dict) -> str:
    "The tables."
    v = results["versions"]
    lines = [f"One thread, float32, PyTorch {v['torch']}, transformers {v['transformers']}, x-transformers {v['x-transformers']}, {results['machine']}. Medians, quartiles in brackets; ratios above 1: "
             "ours is faster. Each ratio is taken within a round, in which all systems take their turns."]
    rate = lambda q: f"{q[1]:,.0f} ({q[0]:,.0f} to {q[2]:,.0f})"
    for t in results.get("training", []):
        lines += ["", f"**Training, {t['shape']} (layers × width), context {SHAPES[t['shape']]['context']}, {t['tokens_per_step']:,} tokens a step: forward, backward, clipping, AdamW; {len(t['rows'][0]['seconds'])} rounds**",
                  "", "| system | parameters | over our rope's | tokens a second |", "|---|---:|---:|---:|"]
        lines += [f"| {r['system']} | {r['parameters']:,} | {r['parameters_over_ours'] - 1:+.1%} | {rate(r['tokens_per_second'])} |" for r in t["rows"]] + ratio_lines(t["ratios"])
    if t := results.get("forward"):
        lines += ["", f"**Forward pass of {t['tokens']:,} tokens, 4×128, a process each, at most {t['limit_gb']:g} GB and {t['limit_s']:g} s**", "", "| system | seconds | peak memory, MB |", "|---|---:|---:|"]
        lines += [f"| {r['system']} | {r['failed']} | |" if "failed" in r else f"| {r['system']} | {statistics.median(r['seconds']):.1f} ({min(r['seconds']):.1f} to {max(r['seconds']):.1f}) | {r['peak_bytes']/1e6:,.0f} |"
                  for r in t["rows"]]
    if t := results.get("decoding"):
        lines += ["", f"**Cached decoding after {t['context']:,} tokens, 4×128, batch 1, greedy, {t['new_tokens']} tokens**", "", "| system | tokens a second |", "|---|---:|"]
        lines += [f"| {r['system']} | {r['failed']} |" if "failed" in r else f"| {r['system']} | {rate(r['tokens_per_second'])} |" for r in t["rows"]] + ratio_lines(t["ratios"])
    return "\n".join(lines) + "\n"


def peer_versions() -> dict:
    from importlib.metadata import version
    return dict(torch=torch.__version__, **{p: version(p) for p in ("transformers", "x-transformers")})


PARTS = ("training", "forward", "decoding")

@call_parse
def main(
    parts: str="all",                # comma-separated of training, forward, decoding; all
    rounds: int=9,                   # rounds of training and of decoding
    repeats: int=2,                  # of the long forward pass
    tokens: int=LONG,                # of the long forward pass
    context: int=DECODE_CONTEXT,     # tokens before the decoding
    limit_gb: float=16.,             # memory of the long forward pass
    limit_s: float=900.,             # seconds of the long forward pass
    out: str="benchmarks/results",   # folder of peers.json and peers.md
):
    "Measure our GPT against its peers and write the tables; parts that are not measured are kept from the last time."
    torch.set_num_threads(1)
    chosen = PARTS if parts == "all" else [check_choice("parts", p, PARTS) for p in parts.split(",")]
    path = Path(out)/"peers.json"
    results = json.loads(path.read_text()) if path.exists() and set(chosen) != set(PARTS) else {}
    results |= dict(versions=peer_versions(), machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    if "training" in chosen: results["training"] = [measure_training(s, rounds) for s in SHAPES]
    if "forward" in chosen: results["forward"] = measure_forward(tokens, limit_gb, limit_s, repeats)
    if "decoding" in chosen: results["decoding"] = measure_decoding(context, rounds)
    Path(out).mkdir(parents=True, exist_ok=True)
    write_json(path, results)
    (Path(out)/"peers.md").write_text(markdown(results), encoding="utf-8")
    print(markdown(results))
