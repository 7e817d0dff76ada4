"""Certified pruning: no certificate is ever passed, whatever the keys; what is skipped costs no more than was promised; no tensor grows with T²."""
import math
import pytest, torch
from hypothesis import given, settings, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from route_transport.pruning import *

settings.register_profile("pruning", deadline=None, max_examples=80, derandomize=True)
settings.load_profile("pruning")


def weights(q, k, decay):
    "α by the definition, float64."
    q, k, Tq, Tk = q.double(), k.double(), q.shape[-2], k.shape[-2]
    s = q @ k.repeat_interleave(q.shape[1]//k.shape[1], 1).mT / math.sqrt(q.shape[-1]) + decay[..., None, :] - decay[..., Tk - Tq:, None]
    return s.masked_fill(torch.ones(Tq, Tk).triu(Tk - Tq + 1).bool(), -math.inf).softmax(-1)


@st.composite
def problems(draw):
    "Queries, keys and a decay: plain, with a large mean, with outliers, aligned far and opposed near; gates may stand still or shut."
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    Tk, Hk, group, D = draw(st.integers(1, 90)), draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 8]))
    Tq, H, size = draw(st.integers(1, Tk)), Hk*group, draw(st.sampled_from([.1, 1., 4.]))
    q, k = size*torch.randn(2, H, Tq, D, generator=g).double(), size*torch.randn(2, Hk, Tk, D, generator=g).double()
    kind = draw(st.sampled_from(["plain", "mean", "outliers", "aligned", "zero queries"]))
    if kind == "mean": k = k + 10
    if kind == "outliers": k[:, :, ::17] *= 20; q[:, :, ::13] *= 5
    if kind == "aligned": q[:] = q[:, :, :1]; k = torch.where((torch.arange(Tk) < Tk//2)[:, None], 1., -1.)*q[:, :Hk, :1].expand_as(k)
    if kind == "zero queries": q = 0*q
    if draw(st.booleans()): a = alibi_decay([draw(st.sampled_from([0., 1e-3, .05, .3, 2.])) for _ in range(H)], Tk)
    else: a = gate_decay(-torch.rand(2, H, Tk, generator=g).double()*draw(st.sampled_from([1e-2, .5, 5.]))*(torch.rand(2, H, Tk, generator=g) < .7))
    return q, k, a


@given(problems(), st.sampled_from([.5, 1e-2, 1e-5, TOL]), st.integers(0, 12))
def test_no_certificate_is_passed(problem, tol, near):
    q, k, a = problem
    n = first_keys(q, k, a, tol, near)
    at = torch.arange(k.shape[2] - q.shape[2], k.shape[2])
    assert (n >= 0).all() and (n <= at).all()                                       # the own key is always read
    assert (weights(q, k, a)*(torch.arange(k.shape[2]) < n[..., None])).sum(-1).max() <= tol
    assert (first_keys(q, k, a, tol/10, near) <= n).all()                            # less may be lost, more is read


@given(problems(), st.sampled_from([.3, 1e-3, TOL]), st.integers(1, 40))
def test_output_and_gradients_are_off_by_no_more_than_promised(problem, tol, block):
    q, k, a = problem
    g = torch.Generator().manual_seed(0)
    v, dy = torch.randn(*k.shape[:3], 3, generator=g).double(), torch.randn(*q.shape[:3], 3, generator=g).double()
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = [attend_decayed(q, k, v, a, t, block) for t in (0, tol)]
    (gq, gk, gv), (hq, hk, hv) = [torch.autograd.grad(y, (q, k, v), dy) for y in out]
    with torch.no_grad():
        root, V, dn = math.sqrt(q.shape[-1]), v.norm(dim=-1).max(), dy.norm(dim=-1)
        spread = (k - k.mean(-2, keepdim=True)).norm(dim=-1).max()
        tiny = 1e-11*(1 + q.abs().max()*k.abs().max())                               # float64's own rounding
        assert (out[0] - out[1]).norm(dim=-1).max() <= 2*tol*V + tiny
        assert (gv - hv).norm(dim=-1).sum() <= 2*tol*dn.sum() + tiny*dn.sum()
        assert ((gq - hq).norm(dim=-1) <= (6*tol + tiny)/root*dn*V*spread + tiny).all()
        assert (gk - hk).norm(dim=-1).sum() <= (6*tol + tiny)/root*(dn*V*q.norm(dim=-1)).sum() + tiny


@given(problems())
def test_a_shared_mean_of_the_keys_costs_no_reach(problem):
    q, k, a = problem
    assert ((first_keys(q, k, a) - first_keys(q, k + 3, a)).abs() <= 1).all()


@given(st.integers(0, 2**31), st.sampled_from([1e-2, 1e-4]), st.sampled_from([1., 4.]), st.integers(1, 24), st.booleans())
def test_no_future_query_feels_forgotten_keys(seed, tol, Q, recent, gates):
    "Queries of norm Q and new keys follow the gradient of the weight on the forgotten keys."
    g = torch.Generator().manual_seed(seed)
    n, later, H, D = 60, 3, 2, 4
    k = torch.randn(1, H, n + later, D, generator=g).double()
    a = gate_decay(-torch.rand(1, H, n + later, generator=g).double()) if gates else alibi_decay([1., .3], n + later)
    gone = torch.tensor(forgotten_keys(k[:, :, :n], a[..., :n], Q, tol, recent))
    q, new = torch.randn(1, H, later, D, generator=g).double().requires_grad_(), k[:, :, n:].clone().requires_grad_()
    for _ in range(40):
        alpha = weights(Q*torch.nn.functional.normalize(q, dim=-1), torch.cat([k[:, :, :n], new], 2), a)
        mass = (alpha*(torch.arange(n + later) < gone[:, None, None])).sum(-1)
        assert mass.max() <= tol
        dq, dn = torch.autograd.grad((mass + 1e-300).log().sum(), (q, new))
        with torch.no_grad(): q += .3*torch.nn.functional.normalize(dq, dim=-1); new += dn.clamp(-1, 1)


def test_keys_let_go_again_and_again_cost_no_more_in_all():
    g, tol, Q, s = torch.Generator().manual_seed(3), 1e-2, 4., 8
    T, H = 200, 2
    k, q = torch.randn(1, H, T, 4, generator=g).double(), Q*torch.nn.functional.normalize(torch.randn(1, H, T, 4, generator=g).double(), dim=-1)
    a, begin, lost = alibi_decay([1., .2], T), [0]*H, 0.
    for t in range(s, T):
        alpha = weights(q[:, :, t:t+1], k[:, :, :t+1], a[..., :t+1])[0, :, 0]
        lost = max(lost, max(alpha[h, :begin[h]].sum().item() for h in range(H)))
        if t % s == 0:
            for h in range(H): begin[h] += forgotten_keys(k[:, h:h+1, begin[h]:t+1], a[:, h:h+1, begin[h]:t+1], Q, tol, s)[0]
    assert min(begin) > 100 and 0 < lost <= tol


class Largest(TorchDispatchMode):
    numel = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in (out if isinstance(out, (tuple, list)) else [out]):
            if isinstance(t, torch.Tensor): self.numel = max(self.numel, t.untyped_storage().nbytes() // t.element_size())
        return out


def test_no_tensor_grows_with_the_square_of_the_length():
    def largest(T):
        q, k, v = torch.randn(3, 1, 2, T, 8).requires_grad_()
        with Largest() as seen: pruned_attend(q, k, v, [.5, 0.], block=64).sum().backward()
        return seen.numel
    sizes = [largest(T) for T in (1024, 2048)]
    assert sizes[1] <= 2.01*sizes[0] and sizes[1] <= 64*2048 + 8*2*2048*3


@pytest.mark.parametrize("name, call", [
    ("tol", lambda q: first_keys(q, q, alibi_decay([1.], 4), 1.5)), ("decay.shape", lambda q: first_keys(q, q, alibi_decay([1.], 5))),
    ("decay", lambda q: first_keys(q, q, alibi_decay([1.], 4).flip(-1))), ("decay", lambda q: first_keys(q, q, alibi_decay([1.], 4)*math.inf)),
    (r"\(q, k\) shapes", lambda q: first_keys(torch.cat([q, q], 2), q, alibi_decay([1.], 4))), ("block", lambda q: pruned_attend(q, q, q, [1.], block=0)),
    ("v.shape", lambda q: pruned_attend(q, q, q[:, :, 1:], [1.])), ("slopes", lambda q: pruned_attend(q, q, q, [math.nan])),
    ("query_bound", lambda q: forgotten_keys(q, alibi_decay([1.], 4), -1.)), ("query_bound", lambda q: forgotten_keys(q, alibi_decay([1.], 4), [1., 2.])),
    (r"\(tol, recent\)", lambda q: forgotten_keys(q, alibi_decay([1.], 4), 1., recent=0)),
])
def test_refusals_name_the_argument(name, call):
    with pytest.raises(ValueError, match=f"^{name}="): call(torch.ones(1, 1, 4, 2))
