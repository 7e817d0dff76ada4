"""No bound of the theory chapters is ever passed by the exact law, over the whole domain and at its edges."""
import itertools
import numpy as np, pytest
from hypothesis import example, given, settings, strategies as st
from route_transport.score_decoherence import *
from route_transport.score_decoherence import ANGLE_LAWS
from route_transport.far_mass import *
from route_transport.value_incoherence import *

settings.register_profile("theory", deadline=None, max_examples=150, derandomize=True)
settings.load_profile("theory")

TINY = 1e-12
floats = lambda low, high, **kw: st.floats(low, high, allow_nan=False, **kw)
unit = floats(1e-9, 1 - 1e-9)                                          # strictly between 0 and 1
logit_bounds = st.one_of(floats(0, 20), st.sampled_from([0., 1e-12, 350., 1e4, 1e300]))
numbers = st.one_of(st.integers(0, 10**6), st.sampled_from([0, 1, 10**12, 10**300]))
amplitude_lists = st.lists(floats(0, 5), min_size=1, max_size=40)
weight_lists = st.lists(floats(0, 1), min_size=0, max_size=30)
phis = st.builds(lambda c, a: c*np.exp(1j*a), floats(0, 1), floats(-np.pi, np.pi))
seeds = st.integers(0, 2**32 - 1)


# ---- claim 1

@given(st.integers(1, 10**6), unit)
@example(1, 1 - 1e-9)
def test_levy_is_never_passed(d, eps):
    assert 0 <= haar_tail(d, eps) <= levy_bound(d, eps)


def test_levy_on_a_grid():
    d, eps = np.r_[1:400, 10**3, 10**4, 10**5][:, None], np.r_[1e-6, np.linspace(.001, .999, 999), 1 - 1e-9]
    ratio = haar_tail(d, eps)/np.maximum(levy_bound(d, eps), 1e-300)
    assert .8243 < ratio.max() <= .8244                  # √e/2, at d = 1 and ε → 1: no smaller constant than √e would do


@given(st.integers(1, 5000), unit, unit)
def test_haar_tail_falls_with_level_and_dimension(d, a, b):
    low, high = sorted((a, b))
    assert haar_tail(d, high) <= haar_tail(d, low)*(1 + 1e-9) and haar_tail(d + 1, a) <= haar_tail(d, a)*(1 + 1e-9) + 1e-300


@given(floats(0, 1), unit)
def test_window_is_where_the_bound_meets_eps(gap, eps):
    L = mixing_window(gap, eps)
    assert L >= 0
    if 0 < gap < 1 and np.isfinite(L):
        assert np.isclose(L*np.log1p(-gap), np.log(eps), rtol=1e-9)
        if gap > 1e-6: assert decay_bound(gap, np.ceil(L)) <= eps*(1 + 1e-6)


@given(st.sampled_from(list(ANGLE_LAWS)), st.integers(-50, 50), floats(0, 10), floats(-4, 4), st.integers(0, 300))
def test_harmonics(law, m, scale, mean, L):
    phi = harmonic(law, m, scale, mean)
    assert abs(phi) <= 1 + TINY and harmonic(law, 0, scale, mean) == 1
    assert np.isclose(harmonic(law, -m, scale, mean), np.conj(phi), atol=TINY)
    assert 0 <= spectral_gap(law, scale) <= 1
    assert np.isclose(abs(harmonic(law, 1, scale, mean)**L), decay_bound(spectral_gap(law, scale), L), rtol=1e-9, atol=TINY)


@given(floats(0, 2), st.integers(0, 10**6))
@example(2., 1)
def test_near_score(eta, L):
    assert -1 <= near_score_bound(eta, L) <= near_score_worst(eta, L) + TINY <= 1 + TINY


@given(st.integers(1, 6), st.integers(0, 8), floats(0, .7), seeds)
def test_no_route_of_small_steps_loses_more(blocks, L, eta, seed):
    rng, d = np.random.default_rng(seed), 2*blocks
    most, P = 2*np.arcsin(eta/2), np.eye(d)
    for _ in range(L):
        Q, R = np.linalg.qr(rng.standard_normal((d, d)))[0], np.zeros((d, d))
        for b, a in enumerate(rng.uniform(-most, most, blocks)): R[2*b:2*b+2, 2*b:2*b+2] = [[np.cos(a), -np.sin(a)], [np.sin(a), np.cos(a)]]
        P = Q @ R @ Q.T @ P
    assert np.diag(P).min() >= near_score_worst(eta, L) - 1e-9
    step = (1 - eta**2/2) + 1j*eta*np.sqrt(1 - eta**2/4)             # a rotation with |step − 1| = η, again and again: attained
    if L*most <= np.pi: assert np.isclose((step**L).real, near_score_worst(eta, L), atol=1e-9)


@given(amplitude_lists, st.lists(floats(-10, 250), min_size=1, max_size=5))
@example([3e-287, 3e-287], [3e-287])                   # the squares underflow, the ratio does not
@example([1., 1e-300], [1e-300, 1., 1.5])
def test_block_bounds_are_ordered(a, t):
    assert np.all(chernoff_bound(t, a) <= block_bound(t, a)*(1 + 1e-9) + 1e-300)
    assert np.all(block_bound(t, a) <= hoeffding_bound(t, a)*(1 + TINY))


@given(st.lists(floats(.2, 1), min_size=4, max_size=40), floats(-1.2, 1.2))
def test_block_tail_is_never_above_its_bounds(a, x):
    t = x*sum(a)
    exact = block_tail(t, a)
    for bound in (chernoff_bound, block_bound, hoeffding_bound): assert exact <= bound(t, a)*(1 + 1e-9) + 3e-7   # 3e-7: the series cut at 4 blocks
    assert np.isclose(exact + block_tail(-t, a), 1, atol=1e-6)


@given(floats(0, 1), floats(1e-3, 1e3))
def test_one_block_in_closed_form(x, a):
    assert np.arccos(x)/np.pi <= chernoff_bound(x*a, [a])*(1 + 1e-9) + (x > 1 - 1e-9)


@given(st.one_of(floats(0, 1e3), st.sampled_from([1e8, 1e150])), st.lists(floats(0, 5), min_size=1, max_size=20))
def test_log_block_mgf(tau, a):
    value = log_block_mgf(tau, a)
    assert np.isfinite(value) and -1e-9 <= value <= tau*sum(a)*(1 + TINY) + 1e-9
    assert value <= tau**2*np.sum(np.square(a))/4*(1 + 1e-9) + 1e-9


@given(floats(0, 300), st.integers(1, 5000))
def test_log_haar_mgf(tau, d):
    value = log_haar_mgf(tau, d)
    assert -1e-9 <= value <= min(tau**2/(2*d), tau)*(1 + 1e-9) + 1e-8
    assert log_weight_ratio(tau, d, 1.) <= 1e-8                          # a far token never weighs more than a perfect near one, on average


@given(st.sampled_from(["gaussian", "cauchy", "laplace"]), floats(0, 3), st.integers(0, 500), floats(0, 10), st.lists(floats(0, 1), min_size=1, max_size=8))
def test_weight_on_the_way_to_mixed(law, scale, L, tau, a):
    now, later = log_route_mgf(tau, a, law, [L, L + 1], scale)
    assert log_block_mgf(tau, a) - 1e-9 <= later <= now + 1e-9 <= tau*sum(a) + 2e-9


@given(st.one_of(st.integers(0, 10**9), st.just(0)), floats(0, 1))
def test_union(n, p):
    assert 0 <= independent_max(n, p) <= union_bound(n, p) + TINY <= 1 + TINY


@given(st.integers(1, 10**6), floats(.15, .95), floats(1e-6, .5))
def test_dimension_is_enough_and_least(n, eps, failure):
    d = dimension_needed_exact(n, eps, failure)
    assert d <= np.ceil(dimension_needed(n, eps, failure)) and n*haar_tail(d, eps)/2 <= failure
    assert d == 1 or n*haar_tail(d - 1, eps)/2 > failure


@given(st.integers(1, 100), st.integers(1, 5))
def test_householder_gap(d, r):
    assert 0 <= householder_gap(d, r) <= householder_gap(d, r + 1) <= 1
    if d > 1: assert np.isclose(householder_gap(d), 2/d)


@given(st.integers(2, 30), floats(-1, 1), st.integers(0, 200))
def test_reflected_second_moment_lies_between_start_and_mixed(d, cosine, L):
    low, high = sorted((cosine**2, 1/d))
    assert low - TINY <= reflected_second_moment(d, L, cosine) <= high + TINY


# ---- claim 2

def softmax_problem(K, M, lam, seed):
    rng = np.random.default_rng(seed)
    lam = min(lam, 1e290)
    return rng.choice([rng.uniform(-lam, lam, K + M), lam*rng.choice([-1., 1.], K + M)]), rng.permutation(K + M) < M


@given(st.integers(0, 40), st.integers(0, 40), logit_bounds, seeds)
def test_far_mass_between_floor_and_ceiling(K, M, lam, seed):
    if K + M == 0: return
    s, far = softmax_problem(K, M, lam, seed)
    rho = far_mass(s, far)
    assert far_mass_lower_bound(M, K, lam) - TINY <= rho <= far_mass_upper_bound(M, K, lam) + TINY
    assert np.isclose(far_mass(np.where(far, -min(lam, 1e290), min(lam, 1e290)), far), far_mass_lower_bound(M, K, lam), atol=TINY)


@given(numbers, numbers, logit_bounds, unit)
def test_floor_and_its_inverses(M, K, lam, mass):
    if M == K == 0: return
    floor = far_mass_lower_bound(M, K, lam)
    assert 0 <= floor <= 1
    if M == 0: assert floor == 0
    if K == 0: assert floor == 1
    need, critical = required_logit_bound(M, K, mass), critical_length(K, lam, mass)
    assert need >= 0 and critical >= 0
    if np.isfinite(need): assert far_mass_lower_bound(M, K, need) <= mass*(1 + 1e-9) + TINY
    if 0 < critical < 1e300: assert np.isclose(far_mass_lower_bound(critical, K, lam), mass, rtol=1e-6)


@given(floats(1e-4, 50), st.integers(0, 20), logit_bounds, st.integers(1, 60), seeds)
def test_alibi_ceiling(slope, R, lam, n, seed):
    d = np.arange(n)
    s, _ = softmax_problem(n, 0, lam, seed)
    bound = alibi_far_mass_bound(slope, R, lam, n)
    assert far_mass(s - slope*d, d > R) <= bound + 1e-9 <= alibi_far_mass_bound(slope, R, lam) + 2e-9
    if lam <= 1e4: assert np.isclose(far_mass(np.where(d > R, lam, -lam) - slope*d, d > R), bound, atol=1e-9)


@given(floats(1e-3, 5), floats(0, 30), floats(.001, .999))
def test_alibi_radius_is_least(slope, lam, mass):
    R = alibi_radius(slope, lam, mass)
    assert alibi_far_mass_bound(slope, R, lam) <= mass*(1 + 1e-5)
    assert R == 0 or alibi_far_mass_bound(slope, R - 1, lam) > mass*(1 - 1e-5)


@given(st.integers(1, 60), st.integers(0, 20), logit_bounds, st.integers(1, 60), seeds)
def test_window_ceiling(W, R, lam, n, seed):
    s, _ = softmax_problem(n, 0, lam, seed)
    d = np.arange(min(n, W))                              # what the window leaves
    assert far_mass(s[:len(d)], d > R) <= window_far_mass_bound(W, R, lam) + TINY


@given(st.integers(1, 30), st.integers(1, 60), floats(0, 30), floats(0, 3), seeds)
def test_log_length_floor_and_ceiling(K, M, lam, c, seed):
    s, far = softmax_problem(K, M, lam, seed)
    low, high = log_length_bounds(M, K, lam, c)
    bias = -np.where(far, c*np.log(M), 0)
    assert low - 1e-9 <= far_mass(s + bias, far) <= high + 1e-9
    extreme = np.where(far, lam, -lam)
    assert np.allclose([far_mass(bias - extreme, far), far_mass(bias + extreme, far)], [low, high], atol=1e-9)       # both attained
    assert log_length_bounds(0, K, lam, c) == (0, 0)


@given(floats(0, 1), floats(0, 1), floats(.01, .99), st.integers(0, 6), floats(0, 4))
def test_gates_all_two_point_laws(f, g, p, R, lam):
    """Every text of 9 tokens enumerated: gates are f or g, independently; the exact mean never passes the ceiling."""
    mean = p*f + (1 - p)*g
    if not 1e-6 < mean < 1 - 1e-6: return
    pick = np.array(list(itertools.product([0, 1], repeat=8)))
    prob = np.prod(np.where(pick, 1 - p, p), 1)
    D = np.cumprod(np.concatenate([np.ones((len(pick), 1)), np.where(pick, g, f)], 1), 1)*np.exp(np.where(np.arange(9) > R, lam, -lam))
    rho = D[:, R + 1:].sum(1)/D.sum(1)
    assert prob @ rho <= forget_gate_far_mass_bound(mean, R, lam) + 1e-9


@given(st.integers(1, 10), st.integers(1, 60), floats(0, 5), floats(0, .5), seeds)
def test_the_adversary_stays_in_its_box(K, M, lam, slope, seed):
    far, bias = np.arange(K + M) >= K, -slope*np.arange(K + M)
    s = push_far_mass(far, lam, bias, steps=50, seed=seed)
    assert np.all(np.abs(s) <= lam)
    if slope > 1e-4: assert far_mass(s + bias, far) <= alibi_far_mass_bound(slope, K - 1, lam, K + M) + 1e-9
    assert far_mass(push_far_mass(far, lam, up=False, steps=50, seed=seed), far) >= far_mass_lower_bound(M, K, lam) - TINY


# ---- claim 3

@given(weight_lists, phis)
def test_energy_equals_its_double_sum_and_obeys_its_bounds(w, phi):
    energy = carried_energy(w, phi)
    assert np.isclose(energy, carried_energy_ref(w, phi), atol=1e-10)
    assert 0 <= energy <= coherent_energy(w)*(1 + 1e-9) + TINY
    c = abs(phi)
    if c < 1: assert carried_energy_floor(w, c)*(1 - 1e-9) - TINY <= energy <= carried_energy_bound(w, c)*(1 + 1e-9) + TINY
    if 0 < c < .995 and w: assert np.isclose(energy, carried_energy_fourier(w, phi), rtol=1e-8, atol=1e-10)


@given(st.integers(2, 4), st.integers(1, 7), floats(0, 1), seeds)
def test_energy_of_noncommuting_steps_by_enumeration(d, n, p, seed):
    """Steps are one of two fixed orthogonal matrices, independently: the mean over all routes is the formula's."""
    rng = np.random.default_rng(seed)
    steps = [np.linalg.qr(rng.standard_normal((d, d)))[0] for _ in range(2)]
    w, mu, mean = rng.uniform(0, 1, n), rng.standard_normal(d), 0.
    for pick in itertools.product([0, 1], repeat=n - 1):
        y = w[0]*mu
        for a, s in zip(w[1:], pick): y = steps[s] @ y + a*mu
        mean += np.prod([p if s == 0 else 1 - p for s in pick])*(y @ y)
    EM = p*steps[0] + (1 - p)*steps[1]
    assert np.isclose(carried_energy_steps(w, EM, mu), mean, rtol=1e-9, atol=TINY)
    c = np.linalg.norm(EM, 2)
    if c < 1 - 1e-9: assert mean <= carried_energy_bound(w, c)*(mu @ mu)*(1 + 1e-9)


@given(st.lists(floats(0, 1), min_size=1, max_size=20), st.lists(st.tuples(phis, floats(-3, 3), floats(-3, 3)), min_size=1, max_size=5))
def test_head_energy_is_a_sum_over_blocks(w, blocks):
    phi, mu = np.array([b[0] for b in blocks]), np.array([b[1:] for b in blocks])
    assert np.isclose(head_energy(w, phi, mu), sum(carried_energy(w, p)*(m @ m) for p, m in zip(phi, mu)), atol=1e-9)


@given(st.lists(st.one_of(floats(0, 30), st.just(1e6)), min_size=1, max_size=10))
def test_phase_locked_floor(a):
    assert 0 <= phase_locked_floor(a) <= 1 and phase_locked_floor(a) <= phase_locked_floor(np.array(a) + .1) + TINY
    assert phase_locked_floor(a) <= np.mean(np.square(a))/4 + TINY                     # I₁/I₀ ≤ a/2


@given(st.lists(floats(.01, 1), min_size=1, max_size=20), st.lists(floats(.01, 1), min_size=1, max_size=20), floats(0, .9))
def test_signal_to_interference(near, far, c):
    plain = signal_to_interference(near, far)
    assert np.isclose(plain, (sum(near)/sum(far))**2)
    assert np.isclose(signal_to_interference(near, far, 1.), plain)                      # steps that do nothing
    assert signal_to_interference(near, far, c) >= carried_energy(near, c)/carried_energy_bound(far, c)*(1 - 1e-9)


# ---- shapes and refusals

def test_scalars_give_scalars_and_arrays_broadcast():
    for f, args in [(mixing_window, (.1, .1)), (haar_tail, (4, .1)), (levy_bound, (4, .1)), (far_mass_lower_bound, (4, 2, 1.)), (critical_length, (4, 1.)),
                    (required_logit_bound, (40, 4, .1)), (alibi_far_mass_bound, (.1, 4, 1.)), (window_far_mass_bound, (9, 4, 1.)), (dimension_needed, (9, .1, .1)), (householder_gap, (9,))]:
        assert np.ndim(f(*args)) == 0, f.__name__
        grid = f(np.array([[args[0]], [args[0]]]), *[np.array([a, a, a]) for a in args[1:]])
        assert grid.shape == ((2, 3) if args[1:] else (2, 1)) and np.allclose(grid, f(*args)), f.__name__
    for f in (hoeffding_bound, block_bound, chernoff_bound): assert np.ndim(f(.1, [.2, .3])) == 0 and f([.1, .2], [.2, .3]).shape == (2,)
    assert block_mgf([[1.], [2.]], [.2, .3]).shape == (2, 1) and block_tail([.1, .2], [.2, .3]).shape == (2,)
    assert carried_energy(np.ones((2, 3, 7)), np.zeros((4, 5))).shape == carried_energy_bound(np.ones((2, 3, 7)), np.zeros((4, 5))).shape == (2, 3, 4, 5)


REFUSED = [
    ("eps", lambda: mixing_window(.1, 0.)), ("eps", lambda: haar_tail(4, 1.)), ("eps", lambda: levy_bound(4, -.5)), ("gap", lambda: mixing_window(-.1, .5)), ("gap", lambda: decay_bound(1.5, 3)),
    ("length", lambda: decay_bound(.5, -1)), ("d", lambda: haar_tail(0, .5)), ("d", lambda: haar_tail(2.5, .5)), ("d", lambda: householder_gap(0)), ("law", lambda: harmonic("normal")), ("scale", lambda: harmonic("gaussian", 1, -1.)),
    ("amplitudes", lambda: block_mgf(1., [-1.])), ("amplitudes", lambda: hoeffding_bound(1., [np.inf])), ("amplitudes", lambda: block_tail(1., [0.])), ("steps", lambda: gap_of_steps(2*np.eye(3)[None])), ("steps", lambda: gap_of_steps(np.eye(3))),
    ("angles", lambda: gap_of_angles([np.nan])), ("eta", lambda: near_score_bound(3., 1)), ("n_far", lambda: union_bound(-1, .5)), ("tail", lambda: union_bound(1, 1.5)), ("failure", lambda: dimension_needed(1, .5, 1.)), ("tau", lambda: log_haar_mgf(np.inf, 3)),
    ("n_far", lambda: far_mass_lower_bound(-1, 1, 1.)), ("n_near", lambda: far_mass_lower_bound(1, -1, 1.)), ("n_far", lambda: far_mass_lower_bound(0, 0, 1.)), ("logit_bound", lambda: far_mass_lower_bound(1, 1, -1.)), ("logit_bound", lambda: critical_length(1, np.nan)),
    ("mass", lambda: critical_length(1, 1., 0.)), ("mass", lambda: required_logit_bound(1, 1, 1.)), ("slope", lambda: alibi_far_mass_bound(0., 1, 1.)), ("radius", lambda: alibi_far_mass_bound(1., 1.5, 1.)), ("length", lambda: alibi_far_mass_bound(1., 1, 1., 0)),
    ("window", lambda: window_far_mass_bound(0, 1, 1.)), ("c", lambda: log_length_bounds(1, 1, 1., np.nan)), ("mean_gate", lambda: forget_gate_far_mass_bound(1., 1, 1.)), ("far", lambda: far_mass([1., 2.], [True])), ("logits", lambda: far_mass([np.inf, 2.], [True, False])),
    ("weights", lambda: carried_energy([-1.], 0.)), ("phi", lambda: carried_energy([1.], 2.)), ("phi", lambda: carried_energy([1.], np.nan)), ("c", lambda: carried_energy_bound([1.], 1.)), ("c", lambda: carried_energy_floor([1.], -.1)), ("background", lambda: head_energy([1.], [.5], [1.])),
    ("mean_step", lambda: carried_energy_steps([1.], 2*np.eye(2), [1., 0.])), ("far", lambda: signal_to_interference([1.], [0.])), ("amplitudes", lambda: phase_locked_floor([])), ("n", lambda: monte_carlo(None, 1, 0)),
]


@pytest.mark.parametrize("i", range(len(REFUSED)), ids=[f"{name}-{i}" for i, (name, _) in enumerate(REFUSED)])
def test_refusals_name_the_argument(i):
    name, call = REFUSED[i]
    with pytest.raises(ValueError, match=rf"^{name}="): call()


def test_nothing_overflows_aloud():
    with np.errstate(all="raise", under="ignore"):
        far_mass_lower_bound([0, 1, 10**300], [1, 0, 1], [1e300, 0., 1e5]); critical_length([0, 1], 1e6); required_logit_bound([0, 1, 3], [1, 0, 2], .5)
        alibi_far_mass_bound([1e-300, 1e300], 3, 1e300); alibi_radius(1e-3, 1e6, .1); log_length_bounds(0, 1, 1e300, 2.)
        mixing_window([0., 1., .5], .1); block_mgf(1e9, [1.]); hoeffding_bound([0., 1e300], [0.]); chernoff_bound([0., .5, 9.], [.5, .5]); independent_max([0, 5], [1., 1.])
        carried_energy(np.full(2000, 5e-4), [0, 1e-300, 1, 1j])
