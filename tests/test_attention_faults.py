"""Faults that a review of the attention, its cache and classes of one's own has met: each stays mended."""
import subprocess, sys
import pytest, torch
from route_transport.attention import attend
from route_transport.controls import ALiBi, Control, ForgetGate
from route_transport.documents import documents_from_ids, documents_from_mask
from route_transport.model import GPT, GPTConfig, system_config
from route_transport.remedies import apply_remedy
from route_transport.reproduce import reproduce

torch.set_num_threads(1)
draw = lambda *shape, seed=0: torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
ids = lambda *shape, seed=0: torch.randint(0, 257, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype, off", [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
@pytest.mark.parametrize("gate", [0.1, 0.5, 600.])
def test_half_precision_where_pruning_sets_in(dtype, off, gate):
    q, k, v = (draw(1, 2, 1100, 16, seed=s).to(dtype).requires_grad_() for s in range(3))
    marks = (-gate*torch.rand(1, 2, 1100, generator=torch.Generator().manual_seed(4), dtype=torch.float64)).cumsum(-1)
    control, exact = ForgetGate(2, 1), [t.detach().double().requires_grad_() for t in (q, k, v)]
    y, ref = attend(q, k, v, control, marks=marks), attend(*exact, control.double(), marks=marks)
    assert y.dtype == dtype and (y.double() - ref).abs().max() < off
    y.float().square().sum().backward(); ref.square().sum().backward()
    for a, b in zip((q, k, v), exact): assert (a.grad.double() - b.grad).norm() < 3*off*b.grad.norm()


def test_autocast_casts_on_both_sides_of_the_threshold():
    for T in (1000, 1100):
        q = draw(1, 2, T, 8)
        with torch.autocast("cpu", dtype=torch.bfloat16): assert attend(q, q, q, ALiBi(2)).dtype == torch.bfloat16


def test_a_right_padded_row_does_not_go_on_unasked():
    model, cache = GPT(system_config("smoke", "rope")), None
    cache = model.new_cache()
    with torch.no_grad():
        model(ids(2, 4), documents_from_mask(torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])), cache)
        with pytest.raises(ValueError, match="rows that end in padding"): model(ids(2, 1), cache=cache)


@pytest.mark.parametrize("system", ["rope", "path", "learned-qkv+forget"])
def test_one_row_goes_on_while_another_begins_anew(system):
    model, t = GPT(system_config("smoke", system)), ids(2, 12)
    whole = documents_from_ids(torch.tensor([[0]*12, [0]*7 + [1]*5]))
    again = whole.part(7, 12)._replace(ids=torch.zeros(2, 5, dtype=torch.long))     # the ids of before, as a fresh call has them
    cache = model.new_cache()
    with torch.no_grad():
        model(t[:, :7], whole.part(0, 7), cache)
        torch.testing.assert_close(model(t[:, 7:], again, cache), model(t, whole)[:, 7:], atol=1e-4, rtol=1e-4)


def test_no_nan_hides_in_a_proof():
    q = draw(1, 2, 1100, 8)
    marks = torch.zeros(1, 2, 1100, dtype=torch.float64); marks[:, :, 600:] = float("nan")
    assert attend(q, q, q, ForgetGate(2, 1), marks=marks)[:, :, 600:].isnan().any()


def test_a_bounded_cache_keeps_what_it_cannot_number_anew():
    class Slowing(Control):
        "A price that grows with the square root of the position."
        def decay(self, n_keys, marks=None, device=None): return 10*torch.arange(n_keys, dtype=torch.float64).sqrt().expand(1, 2, -1)
        def bias(self, i, j, mark_i=None, mark_j=None): return (-10*(i.double().sqrt() - j.double().sqrt())).float()
    model = GPT(system_config("smoke", "rope"))
    for block in model.blocks: block.attention.control = Slowing()
    outs = []
    for bounded in (False, True):
        cache = model.new_cache(bounded)
        with torch.no_grad(): outs.append(torch.cat([model(p, cache=cache) for p in ids(1, 200).split(1, 1)], 1))
    torch.testing.assert_close(*outs, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="lengthens queries"): apply_remedy(GPT(system_config("smoke", "rope")), "yarn", 1600).new_cache(bounded=True)


@pytest.mark.parametrize("system", ["path", "path+forget", "reflections-qkv", "learned-qkv+forget"])
def test_blocks_compile_at_several_lengths(system):
    torch._dynamo.reset()
    plain, model = (GPT(system_config("smoke", system)) for _ in "ab")
    for block in model.blocks: block.compile(backend="aot_eager")
    for T in (20, 13, 17):
        torch.testing.assert_close(model(ids(1, T)), plain(ids(1, T)), atol=1e-5, rtol=1e-4)
        model.token_losses(ids(1, T), ids(1, T)).mean().backward()


OWN = '''
import torch
from route_transport.transport import Rotation
class Net(Rotation):
    "Angles from a layer of its own."
    per_layer = True
    def __init__(self, width, head_dim):
        super().__init__(head_dim)
        self.net = torch.nn.Linear(width, head_dim//2)
    def angles(self, x, tokens, positions): return self.net(x.to(self.net.weight.dtype))[:, None].float()
    @classmethod
    def for_heads(cls, shape): return cls(shape.width, shape.head_dim)
class Stretch(Net):
    def frames(self, *args, **kwargs):
        made = super().frames(*args, **kwargs)
        made.cos = 2*made.cos
        return made
class Late(Net):
    def angles(self, x, tokens, positions):
        raise KeyError("no angles")
'''


def test_classes_of_ones_own(tmp_path):
    (tmp_path/"mine.py").write_text(OWN)
    name = f"{tmp_path/'mine.py'}:Net"
    a, b, c = (GPT(GPTConfig(transport=name), seed) for seed in (0, 0, 1))
    weights = lambda m: m.blocks[0].attention.transport.net.weight
    assert torch.equal(weights(a), weights(b)) and not torch.equal(weights(a), weights(c))          # a function of the seed
    torch.save(a, tmp_path/"model.pt")                                                              # and it can be pickled
    plan = subprocess.run([sys.executable, "-m", "route_transport.training", "--preset", "smoke", "--system", f"{name}+alibi", "--dry_run"], capture_output=True, text=True)
    assert plan.returncode == 0 and "parameters" in plan.stdout, plan.stderr
    with pytest.raises(ValueError, match="push does not undo pull"): reproduce("smoke", ["rope", f"{tmp_path/'mine.py'}:Stretch"], [0], tmp_path/"out", steps=3)
    assert not list((tmp_path/"out").rglob("train.json"))                                           # refused before anything is trained
    with pytest.raises(ValueError, match=r"Late: KeyError in line \d+ of .*mine.py"): GPT(GPTConfig(transport=f"{tmp_path/'mine.py'}:Late"))
