"""Scaled RoPE against Hugging Face's rope utilities: frequencies, factor, and the scores of a whole model's queries and keys."""
import math
import pytest, torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from route_transport.rope_scaling import SCALINGS, ScaledRoPE

TYPES = {"interpolation": "linear", "ntk": "dynamic", "yarn": "yarn", "llama3": "llama3"}
SHAPES = [(8, 1e4, 32), (32, 1e4, 128), (64, 1e4, 512), (64, 5e5, 8192), (128, 1e6, 4096)]   # head width, base, context


def hf_config(name, D, base, context, factor, **more):
    "A Llama whose head has width D; NTK takes the length by itself, with the exaggeration as its factor."
    rope = dict(rope_type=TYPES[name], rope_theta=base, factor=factor, original_max_position_embeddings=context)
    if name == "llama3": rope.update(low_freq_factor=1.0, high_freq_factor=4.0)
    return LlamaConfig(hidden_size=2*D, num_attention_heads=2, head_dim=D, max_position_embeddings=context, rope_parameters={**rope, **more})


@pytest.mark.parametrize("s", [1.0, 2.0, 3.7, 16.0, 128.0])
@pytest.mark.parametrize("D, base, context", SHAPES)
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_factor(name, D, base, context, s):
    length = round(s*context)
    config = hf_config(name, D, base, context, 1.0 if name == "ntk" else length/context)
    want, factor = ROPE_INIT_FUNCTIONS[TYPES[name]](config, "cpu", seq_len=length)
    omega, ours = SCALINGS[name](D, base, context, length/context)
    torch.testing.assert_close(omega.float(), want, rtol=2e-6, atol=0)
    assert math.isclose(ours, factor, rel_tol=1e-12)


@pytest.mark.parametrize("name, ours, theirs", [("ntk", dict(alpha=4.0), dict(factor=4.0)), ("yarn", dict(fast=8.0, slow=2.0), dict(beta_fast=8, beta_slow=2)),
                                               ("yarn", dict(temperature=0.0), dict(attention_factor=1.0)), ("llama3", dict(low=.5, high=8.0), dict(low_freq_factor=.5, high_freq_factor=8.0))])
def test_options(name, ours, theirs):
    want, factor = ROPE_INIT_FUNCTIONS[TYPES[name]](hf_config(name, 64, 1e4, 512, **{"factor": 6.0, **theirs}), "cpu", seq_len=6*512)
    omega, f = SCALINGS[name](64, 1e4, 512, 6.0, **ours)
    torch.testing.assert_close(omega.float(), want, rtol=2e-6, atol=0)
    assert math.isclose(f, factor, rel_tol=1e-12)


@pytest.mark.parametrize("name", SCALINGS)
def test_scores_are_those_of_a_llama(name):
    D, base, context, T = 32, 1e4, 64, 400
    rotary = LlamaRotaryEmbedding(hf_config(name, D, base, context, 1.0 if name == "ntk" else T/context))
    q, k = torch.randn(2, 2, 3, T, D, generator=torch.Generator().manual_seed(0))
    hq, hk = apply_rotary_pos_emb(q, k, *rotary(q, torch.arange(T)[None]))
    flip = lambda x: torch.cat([x[..., :D//2], -x[..., D//2:]], -1)           # Llama turns the other way: the mirror image
    for transport in (ScaledRoPE(D, base, name, context, length=T), ScaledRoPE(D, base, name, context)):
        frames = transport.frames(torch.zeros(2, T, 6), torch.zeros(2, T, dtype=torch.long))
        torch.testing.assert_close(frames.pull(flip(q)) @ frames.pull(flip(k)).mT, hq @ hk.mT, rtol=1e-4, atol=2e-3)   # their phases are float32


def test_a_cache_under_a_changing_base_is_refused_where_the_library_goes_on():
    "Hugging Face's dynamic rule turns new keys by new frequencies and leaves the cached ones: its scores are then no function of the distance."
    D, context = 32, 16
    rotary = LlamaRotaryEmbedding(hf_config("ntk", D, 1e4, context, 2.0))
    k = torch.randn(1, 1, 32, D, generator=torch.Generator().manual_seed(1))
    turn = lambda x, at: apply_rotary_pos_emb(x, x, *rotary(x, at[None]))[1]
    pieces = torch.cat([turn(k[:, :, :20], torch.arange(20)), turn(k[:, :, 20:], torch.arange(20, 32))], 2)
    assert (pieces - turn(k, torch.arange(32))).abs().max() > 0.1
    ours = ScaledRoPE(D, 1e4, "ntk", context, alpha=2.0)
    tokens, x = torch.zeros(1, 32, dtype=torch.long), torch.zeros(1, 32, 6)
    state = ours.frames(x, tokens[:, :20]).state
    with pytest.raises(ValueError, match="start.length=20: must be 0 to read 32 tokens"): ours.frames(x, tokens[:, 20:], state)
