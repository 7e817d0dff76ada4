"""Phases and frames: properties over many shapes, and the faults that users of rotary libraries have reported."""
import math
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from route_transport.attention import attend, transported_attention
from route_transport.controls import ALiBi, make_control
from route_transport.model import GPT, SYSTEMS, system_config
from route_transport.transport import (HeadShape, RandomRotation, RoPE, RotationFrames, accumulate, make_transport,
                                       rope_frequencies, rotation_matrix, route_ref, to_phase, TURN)

seeded = lambda seed: torch.Generator().manual_seed(seed)
tokens_of = lambda T, B=1, seed=0: torch.randint(0, 50, (B, T), generator=seeded(seed))


@given(st.integers(-2**60, 2**60))
def test_a_count_becomes_an_angle_in_minus_pi_to_pi(n):
    phase = to_phase(torch.tensor(n), torch.float64).item()
    assert -math.pi < phase <= math.pi
    assert math.isclose(math.remainder(phase/(2*math.pi) - (n % TURN)/TURN, 1), 0, abs_tol=1e-12)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 60), st.data())
def test_any_cut_of_a_sum_is_the_sum_bit_for_bit(T, data):
    cut = data.draw(st.integers(0, T))
    angle = torch.randn(2, T, 3, generator=seeded(T)) * data.draw(st.sampled_from([1e-6, 1., 1e4]))
    whole, end = accumulate(angle)
    first, mid = accumulate(angle[:, :cut]) if cut else (whole[:, :0], None)
    second, last = accumulate(angle[:, cut:], mid) if cut < T else (whole[:, :0], mid)
    assert torch.equal(torch.cat([first, second], 1), whole) and torch.equal(last, end)


@pytest.mark.parametrize("step", [1.0, 0.731, -2.9, math.pi])
def test_phases_are_right_to_1e_6_at_a_million_positions(step):
    n = 2**20
    phase = accumulate(torch.full((n, 1), step, dtype=torch.float64))[0][-1].item()
    assert abs(math.remainder(phase - n*step, 2*math.pi)) < 1e-6


def test_rope_is_right_to_1e_6_at_a_million_positions():
    phase = RoPE(64).frames(torch.zeros(1, dtype=torch.float64), torch.zeros(1, 2**20)).phase[0, 0, -1]
    error = (phase - rope_frequencies(64)*2**20 + math.pi).remainder(2*math.pi) - math.pi
    assert error.abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_angles_distinct_whatever_dtype_came_first(dtype):
    rope = RoPE(32).to(dtype)
    rope.frames(torch.zeros(1, dtype=dtype), tokens_of(300))
    phase = rope.frames(torch.zeros(1), tokens_of(4096)).phase
    assert phase.dtype == torch.float32 and len(phase[0, 0, :, 0].unique()) == 4096
    assert torch.equal(phase, RoPE(32).frames(torch.zeros(1), tokens_of(4096)).phase)


@pytest.mark.parametrize("by", ["token", "position"])
def test_random_steps_survive_a_cast_of_the_model(by):
    a, b = (RandomRotation(2, 8, 50, 64, by=by) for _ in "ab")
    t = tokens_of(700)
    assert torch.equal(a.to(torch.bfloat16).frames(torch.zeros(1), t).phase, b.frames(torch.zeros(1), t).phase)


@pytest.mark.parametrize("name", ["nope", "rope", "random", "learned"])
@pytest.mark.parametrize("D", [2, 4, 16])
def test_small_heads_work_forward_and_backward(name, D):
    shape = HeadShape(3, D, 3*D, 50, 16)
    transport, x = make_transport(name, shape), torch.randn(2, 9, 3*D)
    q, k, v = torch.randn(3, 2, 3, 9, D, requires_grad=True)
    transported_attention(q, k, v, transport.frames(x, tokens_of(9, 2)), "qkv", ALiBi(3)).sum().backward()


@pytest.mark.parametrize("D", [-2, 0, 1, 7, 8.0])
def test_odd_heads_are_refused_at_construction(D):
    with pytest.raises(ValueError, match="head_dim="): RoPE(D)


@pytest.mark.parametrize("T", [1, 2, 7, 20])
@pytest.mark.parametrize("carry", ["qk", "qkv"])
def test_frames_equal_the_double_loop_with_gradients(T, carry):
    q, k, v = (torch.randn(2, 2, T, 6, generator=seeded(i), dtype=torch.float64, requires_grad=True) for i in range(3))
    theta = torch.randn(2, 2, T, 3, generator=seeded(9), dtype=torch.float64, requires_grad=True)
    w = torch.randn(2, 2, T, 6, generator=seeded(8), dtype=torch.float64)
    fast = transported_attention(q, k, v, RotationFrames(accumulate(theta)[0]), carry)
    slow = route_ref(q, k, v, rotation_matrix(theta), carry)
    torch.testing.assert_close(fast, slow, atol=1e-10, rtol=1e-10)
    for a, b in zip(torch.autograd.grad((fast*w).sum(), (q, k, v, theta), allow_unused=True), torch.autograd.grad((slow*w).sum(), (q, k, v, theta), allow_unused=True)):
        torch.testing.assert_close(a, b if b is not None else torch.zeros_like(a), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name, control", [("nope", "alibi"), ("rope", None), ("random", None), ("learned", None), ("learned", "alibi"), ("rope", "forget")])
def test_compiles_into_one_graph_at_two_lengths(name, control):
    torch._dynamo.reset()   # each case compiles the same function anew
    shape = HeadShape(2, 8, 16, 50, 16)
    transport, control = make_transport(name, shape), make_control(control, shape)
    def attention(x, t, q, k, v):
        return transported_attention(q, k, v, transport.frames(x, t), "qkv", control, marks=control and control.marks(x))
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for T in (12, 17):
        x, (q, k, v) = torch.randn(1, T, 16, requires_grad=True), torch.randn(3, 1, 2, T, 8, requires_grad=True)
        y = compiled(x, tokens_of(T), q, k, v)
        torch.testing.assert_close(y, attention(x, tokens_of(T), q, k, v))
        y.sum().backward()


def test_a_model_made_on_meta_is_filled_by_reset_parameters():
    for system in ("rope", "random-qkv", "learned-qkv"):
        config = system_config("smoke", system)
        real = GPT(config)
        model = GPT(config).to("meta").to_empty(device="cpu")
        for m in model.modules():
            if hasattr(m, "reset_parameters") and m is not model: m.reset_parameters()
        model.reset_parameters(0)
        t = tokens_of(20)
        assert torch.equal(model(t), real(t)), system


@pytest.mark.parametrize("system", SYSTEMS)
def test_autocast_leaves_phases_in_float32(system, monkeypatch):
    model = GPT(system_config("smoke", system))
    seen = []
    original = RotationFrames.__init__
    monkeypatch.setattr(RotationFrames, "__init__", lambda self, phase, state=None: (seen.append(phase.dtype), original(self, phase, state))[1])
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16): logits = model(tokens_of(20))
    assert logits.isfinite().all() and all(d == torch.float32 for d in seen)


@pytest.mark.parametrize("T", [1, 2, 127, 128, 129, 300, 1025])
def test_alibi_at_ragged_lengths_equals_one_big_mask(T):
    q, k, v = torch.randn(3, 1, 3, T, 4, generator=seeded(0), dtype=torch.float64, requires_grad=True)
    control, at = ALiBi(3), torch.arange(T)
    mask = control.bias(at[None, None, :, None], at[None, None, None]).double().masked_fill(at[None] > at[:, None], -math.inf)
    y, ref = attend(q, k, v, control), nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(y, ref, atol=1e-12, rtol=1e-10)
    for a, b in zip(torch.autograd.grad(y.square().sum(), (q, k, v)), torch.autograd.grad(ref.square().sum(), (q, k, v))):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-8)
