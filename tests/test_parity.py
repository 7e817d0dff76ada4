"""Every transport × control × carry × way of reading (whole, cached, packed, padded, grouped heads) against the double loop over routes."""
import functools, math
import pytest, torch
import torch.nn.functional as F
import route_transport.attention as attention
from route_transport.attention import KVCache, attend, transported_attention
from route_transport.controls import ALiBi, ForgetGate, LogLength, Window, alibi_slopes
from route_transport.documents import documents_from_ids, documents_from_mask
from route_transport.model import GPT, SYSTEMS, GPTConfig, system_config
from route_transport.path import path_steps
from route_transport.reflections import paired, reflection_steps
from route_transport.transport import HeadShape, make_transport, rotation_matrix, rope_frequencies, route_ref

torch.set_num_threads(1)
T, D, WIDTH, VOCAB = 13, 8, 10, 40
TRANSPORTS = {"nope": {}, "rope": {}, "rope of half a head": dict(rotary_dim=4), "random": {}, "random by position": dict(by="position"), "learned": {},
              "reflections": dict(reflections=2, spread=0.5, chunk=4), "random-reflections": dict(chunk=4), "path": {}}
CONTROLS = ("none", "alibi", "window", "window with sinks", "loglength", "forget")
WAYS = ("whole", "cached by 1", "cached by 7", "packed", "packed, cached by 7", "left padded", "grouped heads")


def make(name, n_heads):
    "A transport in float64, its learned numbers away from their special beginning."
    transport = make_transport(name.split(" ")[0], HeadShape(n_heads, D, WIDTH, VOCAB, 16), **TRANSPORTS[name]).double()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in transport.parameters(): p.add_(0.3*torch.randn(p.shape, generator=g, dtype=p.dtype))
    return transport


def make_control(name, n_heads):
    if name == "none": return None
    control = {"alibi": lambda: ALiBi(n_heads), "window": lambda: Window(5, sinks=0), "window with sinks": lambda: Window(5, sinks=2),
               "loglength": lambda: LogLength(6, c=1.5), "forget": lambda: ForgetGate(n_heads, WIDTH)}[name]().double()
    if name == "forget":
        with torch.no_grad(): control.weight.copy_(0.5*torch.randn(control.weight.shape, generator=torch.Generator().manual_seed(2)))
    return control


def steps_of(transport, name, x, tokens, n_heads):
    "The steps M_t of one document as matrices `[1, Hk, n, D, D]`, by the definitions."
    n = tokens.shape[1]
    if name == "nope": return torch.eye(D, dtype=torch.float64).expand(1, n_heads, n, D, D)
    if name.startswith("rope"):
        r = TRANSPORTS[name].get("rotary_dim", D)
        return _wide(rotation_matrix(rope_frequencies(r).expand(1, n_heads, n, r//2)))
    if "reflections" in name:
        axes = transport.axes(x, tokens, torch.arange(n)[None]).unflatten(-1, (n_heads, transport.reflections, D)).transpose(1, 2)
        return reflection_steps(paired(axes, transport.spread) if transport.spread else axes)
    if name == "path":
        frames = transport.frames(x, tokens)
        return path_steps(frames.w, frames.beta)
    return rotation_matrix(transport.angles(x, tokens, torch.arange(n)[None]).double().expand(1, n_heads, n, D//2))


def _wide(M): # the first features turn, the others stay
    out = torch.eye(D, dtype=M.dtype).repeat(*M.shape[:-2], 1, 1)
    out[..., :M.shape[-1], :M.shape[-1]] = M
    return out


def bias_of(control, name, x, n_heads):
    "b_ij of one document, `[1, H, n, n]`, by the formulas."
    n = x.shape[1]
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    zero = torch.zeros(1, n_heads, n, n, dtype=torch.float64)
    if name == "none": return None
    if name == "alibi": return zero - torch.tensor(alibi_slopes(n_heads)).double()[:, None, None]*(i - j)
    if name.startswith("window"): return zero.masked_fill((i - j >= 5) & (j >= control.sinks), -math.inf)
    if name == "loglength": return zero - torch.where(i - j > 6, 1.5*(i - 6).clamp_min(1).double().log(), 0.)
    ln_f = torch.log(torch.sigmoid(x @ control.weight + control.offset)).mT                      # [1, H, n]
    return torch.stack([torch.stack([ln_f[..., b+1:a+1].sum(-1) if b < a else 0*ln_f[..., 0] for b in range(n)], -1) for a in range(n)], -2)


def documents_of(way):
    if way.startswith("packed"): return documents_from_ids(torch.tensor([[5]*4 + [2] + [9]*8, [-1]*2 + [0]*8 + [-1]*3]))
    if way == "left padded": return documents_from_mask((torch.arange(T)[None] >= torch.tensor([[3], [0]])).long())


def spans(documents):
    if documents is None: return [(r, 0, T) for r in range(2)]
    return [(r, int(at[0]), int(at[-1]) + 1) for r in range(2) for n in documents.ids[r].unique() for at in [torch.where(documents.ids[r] == n)[0]]]


def read(transport, control, q, k, v, x, tokens, carry, documents, size):
    "As a model's layer does it: whole, or in pieces with a cache."
    cache, out = (None if size is None else KVCache()), []
    for a in range(0, T, size or T):
        b = min(T, a + (size or T))
        now, together = (None, None) if documents is None else (documents.part(a, b), documents.part(0, b))
        frames = transport.frames(x[:, a:b], tokens[:, a:b], cache and cache.route, now)
        marks = None if control is None else control.marks(x[:, a:b], cache and cache.last_mark)
        out.append(transported_attention(*(t[:, :, a:b] for t in (q, k, v)), frames, carry, control, together, marks, cache))
        if cache is not None: cache.route = frames.state
    return torch.cat(out, 2)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("control", CONTROLS)
@pytest.mark.parametrize("name, carry", [(n, c) for n in TRANSPORTS for c in ("qk", "qkv") if (n, c) != ("path", "qkv")])
def test_every_combination_equals_the_double_loop(name, carry, control, way, monkeypatch):
    monkeypatch.setattr(attention, "attend", functools.partial(attend, block=4))
    heads = (4, 2) if way == "grouped heads" else (2, 2)
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64, requires_grad=True)
    q, k, v, x, tokens = draw(2, heads[0], T, D), draw(2, heads[1], T, D), draw(2, heads[1], T, D), draw(2, T, WIDTH), torch.randint(0, VOCAB, (2, T), generator=g)
    transport, bias, documents = make(name, heads[1]), make_control(control, heads[0]), documents_of(way)
    y = read(transport, bias, q, k, v, x, tokens, carry, documents, int(way[-1]) if "cached" in way else None)
    each, out, w = (lambda t: t.repeat_interleave(heads[0]//heads[1], 1)), torch.zeros_like(y), torch.randn(y.shape, generator=g, dtype=torch.float64)
    for r, a, b in spans(documents):
        one, here = (lambda t: t[r:r+1, :, a:b]), x[r:r+1, a:b]
        steps = steps_of(transport, name, here, tokens[r:r+1, a:b], heads[1])
        out[r:r+1, :, a:b] = route_ref(one(q), each(one(k)), each(one(v)), each(steps), carry, bias_of(bias, control, here, heads[0]))
    torch.testing.assert_close(y, out, atol=1e-10, rtol=1e-8)
    leaves = [q, k, v, x] + [p for m in (transport, bias) if m is not None for p in m.parameters()]
    for got, want in zip(*(torch.autograd.grad((z*w).sum(), leaves, allow_unused=True) for z in (y, out))):
        if want is not None: torch.testing.assert_close(torch.zeros_like(want) if got is None else got, want, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("system", SYSTEMS + ("learned-qkv+window", "rope+loglength", "reflections-qkv+forget", "path+forget"))
def test_a_model_reads_packed_padded_and_cached_alike(system):
    "Whole models, float32: logits of a packed row are those of its documents, of a padded row those without pads, cached ones those read at once."
    model, g = GPT(system_config("smoke", system)), torch.Generator().manual_seed(0)
    texts = [torch.randint(0, 257, (n,), generator=g) for n in (23, 1, 40)]
    close = functools.partial(torch.testing.assert_close, atol=2e-4, rtol=1e-3)
    with torch.no_grad():
        alone = [model(t[None])[0] for t in texts]
        packed = documents_from_ids(torch.repeat_interleave(torch.arange(3), torch.tensor([23, 1, 40]))[None])
        close(model(torch.cat(texts)[None], packed)[0], torch.cat(alone))
        rows = torch.stack([F.pad(t, (40 - len(t), 0), value=7) for t in texts])
        padded = documents_from_mask((torch.arange(40) >= 40 - torch.tensor([[23], [1], [40]])).long())
        for got, want in zip(model(rows, padded), alone): close(got[-len(want):], want)
        cache = model.new_cache()
        whole = torch.cat([model(part, padded.part(a, a + part.shape[1]), cache) for a, part in zip((0, 38, 39), rows.split([38, 1, 1], 1))], 1)
        for got, want in zip(whole, alone): close(got[-len(want):], want)
        more = torch.randint(0, 257, (3, 2), generator=g)
        for got, text, extra in zip(model(more, cache=cache), texts, more): close(got, model(torch.cat([text, extra])[None])[0, -2:])


@pytest.mark.parametrize("name", TRANSPORTS)
def test_the_state_does_not_grow(name):
    "What a layer keeps beside keys, values and marks has the same size after 10 tokens and after 1,000."
    transport, sizes = make(name, 2), []
    for n in (10, 1000):
        state = transport.frames(torch.randn(1, n, WIDTH, dtype=torch.float64), torch.zeros(1, n, dtype=torch.long)).state
        sizes.append(0 if state.frame is None else state.frame.numel())
    assert sizes[0] == sizes[1] <= 2*D*D


def test_fully_masked_rows_stay_finite():
    "Even a user's bias of −∞ everywhere, and a row that is all padding."
    class Wall(Window):
        relative, reach, sinks = False, None, 0
        def bias(self, i, j, mark_i=None, mark_j=None): return torch.full((1, 1, 1, 1), -math.inf)
    q, k, v = torch.randn(3, 2, 2, 12, 8, requires_grad=True).unbind()
    for y in (attend(q, k, v, Wall(3)), attend(q, k, v, ALiBi(2), documents_from_mask(torch.tensor([[0]*12, [1]*12])))):
        assert y.isfinite().all() and all(g.isfinite().all() for g in torch.autograd.grad(y.sum(), (q, k, v)))


@pytest.mark.parametrize("system", ("learned-qkv", "rope+alibi", "random-qkv+forget", "reflections-qkv", "path"))
def test_autocast_leaves_phases_gates_and_biases_alone(system):
    model, seen = GPT(system_config("smoke", system)), {}
    t = torch.randint(0, 257, (1, 40), generator=torch.Generator().manual_seed(0))
    block = model.blocks[0].attention
    original = attention._kernel
    def kernel(q, k, v, bias=None, is_causal=False):
        seen["q"], seen["bias"] = q.dtype, None if bias is None else bias.dtype
        return original(q, k, v, bias, is_causal)
    attention._kernel = kernel
    try:
        with torch.no_grad():
            full = model(t)
            with torch.autocast("cpu", dtype=torch.bfloat16): half = model(t)
    finally: attention._kernel = original
    if block.control is not None: assert seen["bias"] == torch.float32
    assert (half.float() - full).abs().max() <= 0.1*full.abs().max()
    x = torch.randn(1, 40, 32)
    transport = model.transport if block.transport is None else block.transport
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        frames = transport.frames(x, t)
        made = [getattr(frames, n) for n in ("phase", "W", "w", "beta") if hasattr(frames, n)]
        assert made and all(m.dtype == torch.float32 for m in made)
        marks = block.control and block.control.marks(x)
        assert marks is None or marks.dtype == torch.float64


def test_grouped_heads_and_partial_rotation_in_a_model():
    for options in (dict(n_kv_heads=1), dict(n_kv_heads=2, transport_options=dict(rotary_dim=4)), dict(transport="path", n_kv_heads=2),
                    dict(transport="reflections", carry="qkv", n_kv_heads=2, control="forget")):
        model = GPT(GPTConfig(**{**dict(context=16, n_layers=2, width=32, n_heads=4, transport="learned"), **options}))
        t, cache = torch.randint(0, 257, (2, 30), generator=torch.Generator().manual_seed(0)), model.new_cache()
        with torch.no_grad():
            torch.testing.assert_close(torch.cat([model(p, cache=cache) for p in t.split([20, 1, 9], 1)], 1), model(t), atol=2e-4, rtol=1e-3)
        assert cache.layers[0].keys.shape == (2, model.config.n_kv_heads, 30, 8)
