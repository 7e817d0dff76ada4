"""Steps that do not commute: fast paths against independent references, over ragged lengths, widths, types and pieces."""
import math
import pytest, torch
import torch.nn.functional as F
from route_transport.attention import KVCache, batch_bias, transported_attention
from route_transport.controls import ALiBi
from route_transport.model import GPT, SYSTEMS, system_config
from route_transport.path import PathFrames, PaTH, carried_keys, path_attention, path_steps
from route_transport.reflections import RandomReflections, ReflectionFrames, Reflections, reflection_steps
from route_transport.transport import CARRIES, route_ref

torch.set_num_threads(1)
CHUNK, BLOCK = 32, 16
LENGTHS = (1, 2, CHUNK - 1, CHUNK, CHUNK + 1)


gen = torch.Generator()


@pytest.fixture(autouse=True)
def seeded(): gen.manual_seed(0)


def draw(*shape): return torch.randn(*shape, dtype=torch.float64, generator=gen)
def strengths(*shape): return 2*torch.rand(*shape, dtype=torch.float64, generator=gen)


def close(a, b, tol, what=""):
    "Relative to the largest entry."
    off = (a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-2)
    assert off <= tol, f"{what}: off by {off:.1e}"


def frames_one_by_one(steps):
    "C_t = M_t … M_1, `[B, H, T, D, D]`."
    C, out = torch.eye(steps.shape[-1], dtype=steps.dtype).expand(steps.shape[:2] + steps.shape[3:]), []
    for M in steps.unbind(2):
        C = M @ C
        out.append(C)
    return torch.stack(out, 2)


def scores_one_by_one(q, k, steps):
    "q_iᵀ P_{j→i} k_j for all pairs, whatever the steps: keys carried on token after token, `[B, H, T, T]`."
    T, keys, rows = q.shape[2], k[:, :, :0], []
    for t in range(T):
        keys = torch.cat([keys @ steps[:, :, t].mT, k[:, :, t:t+1]], 2)
        rows.append(F.pad((q[:, :, t:t+1] @ keys.mT)[:, :, 0], (0, T - t - 1), value=-math.inf))
    return torch.stack(rows, 2)


def by_matrices(q, k, v, steps, carry):
    "The reference for long routes: explicit frames of orthogonal steps, one ordinary attention."
    C = frames_one_by_one(steps)
    pull = lambda x: (C.mT @ x[..., None])[..., 0]
    y = F.scaled_dot_product_attention(pull(q), pull(k), pull(v) if carry == "qkv" else v, is_causal=True)
    return (C @ y[..., None])[..., 0] if carry == "qkv" else y


def grads(y, leaves):
    upstream = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    return torch.autograd.grad((y*upstream.to(y.dtype)).sum(), leaves, allow_unused=True)


def compare(fast, reference, leaves, names):
    "Values and gradients: float64 against the reference, then float32 against float64."
    leaves = [t.detach().requires_grad_() for t in leaves]
    y, ref = fast(*leaves), reference(*leaves)
    close(y, ref, 1e-10, "value")
    expected = grads(ref, leaves)
    for name, a, b in zip(names, grads(y, leaves), expected):
        if b is not None: close(a, b, 1e-10, f"gradient of {name}")
    single = [t.detach().float().requires_grad_() for t in leaves]
    y = fast(*single)
    close(y, ref, 1e-4, "float32 value")
    for name, a, b in zip(names, grads(y, single), expected):
        if b is not None: close(a, b, 1e-4, f"float32 gradient of {name}")


# ---- reflections

@pytest.mark.parametrize("carry", CARRIES)
@pytest.mark.parametrize("r", (1, 2, 4))
@pytest.mark.parametrize("T, D", [(T, 6) for T in LENGTHS] + [(CHUNK + 1, D) for D in (2, 5, 64, 128)] + [(1025, 16)], ids=lambda x: str(x))
def test_frames_equal_matrices(T, D, r, carry):
    qkv, axes = draw(3, 1, 2, T, D).unbind(), draw(1, 2, T, r, D)
    fast = lambda q, k, v, w: transported_attention(q, k, v, ReflectionFrames(w, chunk=CHUNK), carry)
    compare(fast, lambda q, k, v, w: by_matrices(q, k, v, reflection_steps(w), carry), [*qkv, axes], ("q", "k", "v", "axes"))


@pytest.mark.parametrize("carry", CARRIES)
def test_the_reference_equals_the_double_loop(carry):
    q, k, v = draw(3, 1, 2, 9, 4)
    steps = reflection_steps(draw(1, 2, 9, 2, 4))
    close(by_matrices(q, k, v, steps, carry), route_ref(q, k, v, steps, carry), 1e-12)
    leaky = path_steps(F.normalize(draw(1, 2, 9, 4), dim=-1), torch.full((1, 2, 9), 0.7).double())
    close((scores_one_by_one(q, k, leaky)/2).softmax(-1) @ v, route_ref(q, k, v, leaky), 1e-12)


def test_axes_of_any_length_and_none():
    x, axes = draw(1, 1, 70, 8), draw(1, 1, 70, 1, 8)
    scale = 10.0**torch.linspace(-12, 12, 70, dtype=torch.float64)[:, None, None]
    close(ReflectionFrames(axes*scale).pull(x), ReflectionFrames(axes).pull(x), 1e-10)
    assert torch.equal(ReflectionFrames(0*axes).pull(x), x) and torch.equal(ReflectionFrames(0*axes).push(x), x)
    same_axis = axes[:, :, :1].expand(1, 1, 70, 2, 8)                        # twice the same axis: the identity
    close(ReflectionFrames(same_axis).pull(x), x, 1e-12)
    bad = axes.clone(); bad[:, :, 40] = math.nan                             # NaN stays visible
    assert ReflectionFrames(bad).pull(x)[:, :, 40:].isnan().all()


def test_orthogonal_at_65536_tokens_gradients_too():
    T, D = 65_536, 16
    x, axes, g = draw(1, 1, T, D).float(), draw(1, 1, T, 1, D).float(), draw(1, 1, T, D).float()
    results = []
    for dtype in (torch.float32, torch.float64):
        a, b = axes.to(dtype).requires_grad_(), x.to(dtype).requires_grad_()
        frames = ReflectionFrames(a)
        y = frames.pull(b)
        results.append((frames, y, *torch.autograd.grad((y*g.to(dtype)).sum(), (a, b))))
    (frames, *single), (_, *double) = results
    for C in (frames.C, frames.state.frame[:, :, None].float()): assert (C.mT @ C - torch.eye(D)).abs().max() <= 1e-5
    for name, a, b in zip(("value", "gradient of the axes", "gradient of x"), single, double): close(a, b, 1e-5, name)
    close(single[0].norm(dim=-1), x.norm(dim=-1), 1e-5, "norm")
    close(single[2].norm(dim=-1), g.norm(dim=-1), 1e-5, "norm of the gradient")


@pytest.mark.parametrize("make", [lambda: Reflections(2, 8, width=6), lambda: Reflections(2, 8, 6, reflections=2, spread=0.3),
                                  lambda: RandomReflections(2, 8, 50), lambda: RandomReflections(2, 8, 50, by="position", reflections=2, spread=1.)])
def test_pieces_causality_and_casts(make):
    transport, x, tokens = make(), draw(2, 100, 6).float(), torch.randint(0, 50, (2, 100), generator=gen)
    y, f = draw(2, 2, 100, 8).float(), transport.frames(x, tokens)
    state, out = None, []
    for a, b in [(0, 1), (1, 40), (40, 41), (41, 100)]:
        part = transport.frames(x[:, a:b], tokens[:, a:b], state)
        out.append(part.pull(y[:, :, a:b])); state = part.state
    close(torch.cat(out, 2), f.pull(y), 1e-5, "pieces")
    close(state.frame, f.state.frame, 1e-10 if "Random" in type(transport).__name__ else 1e-5, "state")
    assert state.length == 100 and state.frame.shape[-2:] == (8, 8)
    later = transport.frames(torch.cat([x[:, :60], x[:, 60:] + 1], 1), torch.cat([tokens[:, :60], 49 - tokens[:, 60:]], 1))
    assert torch.equal(later.pull(y)[:, :, :60], f.pull(y)[:, :, :60])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = transport.frames(x, tokens)
        assert torch.equal(mixed.pull(y), f.pull(y)) and mixed.pull(y.bfloat16()).dtype == torch.bfloat16


def test_meta_device():
    for make in (lambda: RandomReflections(2, 8, 50), lambda: Reflections(2, 8, 6), lambda: PaTH(2, 8, 6)):
        torch.manual_seed(0); here = make()
        with torch.device("meta"): there = make()
        there = there.to_empty(device="cpu")
        torch.manual_seed(0); there.reset_parameters()
        for a, b in zip([*here.parameters(), *here.buffers()], [*there.parameters(), *there.buffers()]): assert torch.equal(a, b)


# ---- PaTH

@pytest.mark.parametrize("T, D, heads", [(T, 6, (4, 2)) for T in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1)] + [(2*BLOCK + 1, D, (2, 2)) for D in (2, 5, 64, 128)]
                         + [(2*BLOCK, 4, (6, 1)), (1025, 8, (1, 1))], ids=lambda x: str(x))
def test_blocks_equal_all_pairs(T, D, heads):
    H, Hk = heads
    q, k, v, w = draw(1, H, T, D), draw(1, Hk, T, D), draw(1, Hk, T, D), F.normalize(draw(1, Hk, T, D), dim=-1)
    beta = strengths(1, Hk, T)
    if T > 4: w[:, :, 3], beta[:, :, 2], beta[:, :, 1] = w[:, :, 2], 0, 2      # coinciding axes, no step, a reflection
    each = lambda x: x.repeat_interleave(H//Hk, 1)

    def all_pairs(q, k, v, w, beta): return (scores_one_by_one(q, each(k), each(path_steps(w, beta)))/math.sqrt(D)).softmax(-1) @ each(v)
    block = BLOCK if T < 1000 else None
    compare(lambda *t: path_attention(*t, block=block), all_pairs, [q, k, v, w, beta], ("q", "k", "v", "w", "beta"))


def test_a_control_on_top():
    q, k, v, w = draw(4, 2, 3, 37, 4)
    w, beta, at = F.normalize(w, dim=-1), torch.full((2, 3, 37), 0.8).double(), torch.arange(37)
    bias = ALiBi(3).bias(at[None, None, :, None], at[None, None, None]).double()
    expected = (scores_one_by_one(q, k, path_steps(w, beta))/2 + bias).softmax(-1) @ v
    close(transported_attention(q, k, v, PathFrames(w, beta), "qk", ALiBi(3)), expected, 1e-10)


def test_strength_two_is_a_reflection():
    q, k, v, w = draw(4, 1, 2, 70, 8)
    w = F.normalize(w, dim=-1)
    two = torch.full((1, 2, 70), 2.).double()
    close(path_attention(q, k, v, w, two), transported_attention(q, k, v, ReflectionFrames(w[..., None, :])), 1e-10)
    close(path_attention(q, k, v, w, 0*two), F.scaled_dot_product_attention(q, k, v, is_causal=True), 1e-10)


@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_decoding_equals_the_full_pass(dtype, tol):
    q, k, v, w = draw(2, 4, 90, 8), draw(2, 2, 90, 8), draw(2, 2, 90, 8), F.normalize(draw(2, 2, 90, 8), dim=-1)
    beta = strengths(2, 2, 90)
    inputs = [t.to(dtype) for t in (q, k, v, w, beta)]
    for control in (None, ALiBi(4)):
        full = path_attention(*inputs, bias=control and batch_bias(control), block=16)
        for pieces in ([1]*90, [70] + [1]*20):
            cache = KVCache()
            parts = [transported_attention(*p[:3], PathFrames(*p[3:]), "qk", control, cache=cache) for p in zip(*(t.split(pieces, 2) for t in inputs))]
            close(torch.cat(parts, 2), full, tol)
            close(cache.keys, carried_keys(*inputs[1:2], *inputs[3:], block=32), tol)


def test_path_transport_pieces_causality_and_casts():
    torch.manual_seed(0)
    path, x, tokens = PaTH(2, 8, width=6), draw(2, 30, 6).float(), torch.zeros(2, 30)
    with torch.no_grad(): path.taps.normal_(); path.strength.normal_()
    f, state, parts = path.frames(x, tokens), None, []
    for a, b in [(0, 1), (1, 2), (2, 20), (20, 30)]:
        parts.append(path.frames(x[:, a:b], tokens[:, a:b], state)); state = parts[-1].state
    close(torch.cat([p.w for p in parts], 2), f.w, 1e-5)
    close(torch.cat([p.beta for p in parts], 2), f.beta, 1e-5)
    later = path.frames(torch.cat([x[:, :20], x[:, 20:] + 1], 1), tokens)
    assert torch.equal(later.w[:, :, :20], f.w[:, :, :20]) and torch.equal(later.beta[:, :, :20], f.beta[:, :, :20])
    q, k, v = draw(3, 2, 2, 30, 8).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = path.frames(x, tokens)
        assert torch.equal(mixed.w, f.w) and torch.equal(mixed.attend(q, k, v), f.attend(q, k, v))


def test_extremes_stay_finite():
    "Strengths at both ends, every axis the same, and routes so long that a contracting key leaves float32's range."
    for beta in (0., 1., 2.):
        q, k, v, w = draw(4, 1, 1, 3000, 2).float()
        w = F.normalize(w, dim=-1)
        leaves = [t.requires_grad_() for t in (q, k, v, w[:, :, :1].expand_as(w).clone() if beta == 2 else w, torch.full((1, 1, 3000), beta))]
        y = path_attention(*leaves)
        assert y.isfinite().all() and all(g.isfinite().all() for g in torch.autograd.grad(y.square().sum(), leaves))


# ---- in the model

@pytest.mark.parametrize("system", [s for s in SYSTEMS if "reflections" in s or s.startswith("path")])
def test_model_reads_far_beyond_its_context(system):
    model, tokens = GPT(system_config("smoke", system)), torch.randint(0, 257, (1, 700), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(tokens)
        torch.testing.assert_close(model(tokens[:, :333]), whole[:, :333], atol=1e-5, rtol=1e-4)
    assert whole.isfinite().all()
