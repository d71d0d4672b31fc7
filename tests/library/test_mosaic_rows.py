"""Row kernels by Mosaic GPU: interpreted with races looked for, beside float64, and lowered for a GPU.

Covers `library/mosaic/launch.py`, `library/mosaic/meeting.py`,
`library/mosaic/norm_gradients.py`, `library/mosaic/norm_rows.py`, `library/mosaic/recipes.py`,
`library/mosaic/residual_rows.py`, `library/mosaic/rows.py`, `library/mosaic/spread.py` and
`library/mosaic/together.py`.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED, assert_near, normal, pull
from fakes_mosaic import hopper, lowered_by_mosaic, needs_loops, needs_mosaic, races

from ejkernel.library import (
    LayerNorm,
    LayerNormConfig,
    LinearCrossEntropy,
    LinearCrossEntropyConfig,
    ResidualNorm,
    ResidualNormConfig,
    RmsNorm,
    RmsNormConfig,
    Softmax,
    SoftmaxConfig,
    layer_norm,
    linear_cross_entropy,
    residual_norm,
    rms_norm,
    softmax,
)
from ejkernel.library.mosaic import norm_rows
from ejkernel.library.mosaic.spread import launches, refuses, spread
from ejkernel.ops import Invocation

__all__ = ["races"]
pytestmark = needs_mosaic

FUNCTIONS = {"softmax": (softmax, SoftmaxConfig), "rms_norm": (rms_norm, RmsNormConfig)}
FUNCTIONS["layer_norm"] = (layer_norm, LayerNormConfig)
VECTORS = {"softmax": 0, "rms_norm": 1, "layer_norm": 2}


def operation(name, cfg, *args):
    """The function with this cfg."""
    return FUNCTIONS[name][0](*args, cfg=cfg, executor=UNTUNED)


def inputs(name, rows, width, dtype="bfloat16"):
    """Rows far from zero, and vectors."""
    x = normal(rows, width, dtype="float32") + 3.0
    return (x.astype(dtype), *(normal(width, seed=seed) for seed in range(1, 1 + VECTORS[name])))


def exact(name, x, *vectors):
    """In float64."""
    x, *vectors = (np.asarray(a, np.float64) for a in (x, *vectors))
    if name == "softmax":
        powers = np.exp(x - x.max(-1, keepdims=True))
        return powers / powers.sum(-1, keepdims=True)
    off = x - x.mean(-1, keepdims=True) if name == "layer_norm" else x
    normed = off / np.sqrt((off * off).mean(-1, keepdims=True) + 1e-6)
    return normed * vectors[0] + (vectors[1] if vectors[1:] else 0)


def two_blocks(monkeypatch, each=32):
    """Gradients by two blocks, with so many elements of a row for each thread."""
    monkeypatch.setattr(norm_rows, "_MULTIPROCESSORS", 2)
    monkeypatch.setattr(norm_rows, "_BLOCKS", 1)
    course = norm_rows.Course(each)
    monkeypatch.setattr("ejkernel.library.mosaic.norm_gradients.course_of", lambda *_, **__: course)


@pytest.mark.thinned
@pytest.mark.parametrize(("width", "each"), [(300, None), (389, 1)], ids=["held", "read twice"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_is_that_of_float64(races, name, width, each):
    """Held in registers, and read twice, for widths that no chunk divides."""
    args = inputs(name, 2, width)
    cfg = FUNCTIONS[name][1]("mosaic", num_warps=4, each=each)
    assert_near(operation(name, cfg, *args), exact(name, *args), "bfloat16")


@needs_loops
@pytest.mark.parametrize(
    ("name", "each"),
    [
        ("layer_norm", None),
        ("softmax", 1),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("softmax", None), ("layer_norm", 1), ("rms_norm", 1))
        ),
    ],
)
def test_warpgroups_share_a_row_without_a_race(races, name, each):
    """They tell each other sums and maxima, and write apart."""
    args = inputs(name, 2, 1111)
    cfg = FUNCTIONS[name][1]("mosaic", num_warps=8, each=each)
    assert_near(operation(name, cfg, *args), exact(name, *args), "bfloat16")


def met_and_reduced(jaxpr):
    """The barriers that warpgroups wait at and the vectors that they reduce to a number, in the kernel's order."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in ("barrier_wait", "inline_mgpu", "inline_mgpu_p"):
            yield "met"
        elif eqn.primitive.name in ("reduce_sum", "reduce_max") and eqn.outvars[0].aval.shape == ():
            yield "reduced"
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda value: hasattr(value, "eqns")):
            inner = getattr(value, "jaxpr", value)
            yield from met_and_reduced(inner) if hasattr(inner, "eqns") else ()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("each", [None, 8])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_warpgroups_meet_between_two_reductions(monkeypatch, name, each, backward):
    """They reduce in one place of shared memory, which neither the interpreter nor its race detection has."""
    course = norm_rows.Course()
    monkeypatch.setattr("ejkernel.library.mosaic.norm_gradients.course_of", lambda *_, **__: course)
    kernel = {"softmax": Softmax(), "rms_norm": RmsNorm(), "layer_norm": LayerNorm()}[name]
    cfg = FUNCTIONS[name][1]("mosaic", num_warps=16, each=each)
    shapes = [jax.ShapeDtypeStruct((8, 8192), jnp.float32)]
    shapes += [jax.ShapeDtypeStruct((8192,), jnp.float32)] * VECTORS[name]

    def run(*args):
        made, back = jax.vjp(lambda *a: kernel.run(*a, cfg=cfg), *args)
        return back(made) if backward else made

    found = list(met_and_reduced(jax.make_jaxpr(run)(*shapes).jaxpr))
    # The second kernel's, if any, begin anew; in a loop over rows the first follows on the last.
    assert found
    assert found == ["met", "reduced"] * (len(found) // 2)


@pytest.mark.parametrize("place", [150, *(pytest.param(place, marks=pytest.mark.slow) for place in (0, 299))])
def test_softmax_of_what_is_ruled_out(place):
    """Minus infinity in one chunk and none in others, and in all but one place."""
    x = np.full((2, 300), -np.inf, np.float32)
    x[:, place] = 2.0
    x[1, :] = np.where(np.arange(300) < 128, -np.inf, 1e30)
    for each in (None, 1):
        made = operation("softmax", SoftmaxConfig("mosaic", num_warps=4, each=each), jnp.asarray(x))
        np.testing.assert_allclose(made, jax.nn.softmax(x, -1), rtol=1e-5)


@needs_loops
@pytest.mark.parametrize("name", ["layer_norm", pytest.param("rms_norm", marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_plain_way(races, monkeypatch, name):
    """Blocks that go through several rows each, and add up what vectors get."""
    two_blocks(monkeypatch)
    args = inputs(name, 5, 300, "float32")
    dy = normal(5, 300, seed=9)
    config = FUNCTIONS[name][1]
    found = pull(lambda *a: operation(name, config("mosaic", num_warps=4), *a), args, dy)
    wanted = pull(lambda *a: operation(name, config("xla"), *a), args, dy)
    for one, other in zip(found, wanted, strict=True):
        assert_near(one, np.asarray(other, np.float64), "float32", slack=10)


@needs_loops
@pytest.mark.parametrize(
    ("width", "num_warps", "each"),
    [(300, 4, None), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((389, 4, 1), (2500, 8, None)))],
)
def test_gradients_from_what_was_kept_are_those_of_the_plain_way(races, monkeypatch, width, num_warps, each):
    """Rows of a large mean, by blocks that go through several of them, and with one or both vectors."""
    two_blocks(monkeypatch, each=32 if width < 2048 else 16)
    x, dy = normal(5, width) + 100.0, normal(5, width, seed=9)
    cfg = LayerNormConfig("mosaic", num_warps=num_warps, each=each, kept=True)
    for vectors in ((), (normal(width, seed=1),), (normal(width, seed=1), normal(width, seed=2))):
        found = pull(lambda *a: operation("layer_norm", cfg, *a), (x, *vectors), dy)
        wanted = pull(lambda *a: operation("layer_norm", LayerNormConfig("xla"), *a), (x, *vectors), dy)
        for one, other in zip(found, wanted, strict=True):
            # A mean of a hundred deviations leaves float32 a hundredth of its digits.
            assert_near(one, np.asarray(other, np.float64), "float32", slack=300)


@needs_loops
def test_gradients_of_gradients_from_what_was_kept():
    """They are those of the plain way, through what is kept as well."""
    x, weight, bias = inputs("layer_norm", 2, 130, "float32")

    def second(cfg):
        def loss(x, weight):
            return jnp.sum(operation("layer_norm", cfg, x, weight, bias) ** 3)

        return jax.jit(jax.grad(lambda *a: jnp.sum(jax.grad(loss)(*a) ** 2), argnums=(0, 1)))(x, weight)

    found = second(LayerNormConfig("mosaic", num_warps=4, kept=True))
    for one, other in zip(found, second(LayerNormConfig("xla")), strict=True):
        assert_near(one, np.asarray(other, np.float64), "float32", slack=100)


def test_what_is_kept_is_mapped_and_sharded():
    """Gradients under vmap are lowered for a GPU, and traced inside shard_map with its checks on."""
    cfg, kernel = LayerNormConfig("mosaic", num_warps=4, kept=True), LayerNorm()
    x, vector = jax.ShapeDtypeStruct((4, 8, 256), jnp.bfloat16), jax.ShapeDtypeStruct((256,), jnp.float32)

    def both(x, weight, bias):
        made, back = jax.vjp(lambda *a: kernel.run(*a, cfg=cfg), x, weight, bias)
        return made, *(grad[None] if grad.ndim == 1 else grad for grad in back(made))

    lowered_by_mosaic(jax.vmap(both, in_axes=(0, None, None)), x, vector, vector)
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    specs = {"in_specs": (spec("batch"), spec(), spec()), "out_specs": (spec("batch"), spec("batch"), spec(), spec())}
    assert jax.eval_shape(jax.shard_map(both, mesh=mesh, **specs), x, vector, vector)[0].shape == x.shape


def test_fewer_meetings_are_refused_where_they_gain_nothing(monkeypatch):
    """Reasons of `valid_cfg`: by implementation, and by what has a gradient."""
    hopper(monkeypatch)
    narrow, broad = (Invocation("x", (jax.ShapeDtypeStruct((4, width), jnp.bfloat16),), {}) for width in (4096, 32768))
    kernel, held = LayerNorm(), LayerNormConfig("mosaic", num_warps=4, kept=True)
    assert kernel.valid_cfg(narrow, held) is True
    assert held in list(kernel.candidate_cfgs_gpu(narrow))
    assert not any(cfg.kept for cfg in kernel.candidate_cfgs_gpu(broad))
    for inv, cfg, reason in (
        (narrow, LayerNormConfig("xla", kept=True), "for mosaic alone"),
        (broad, LayerNormConfig("mosaic", num_warps=16, kept=True), "no gradient by mosaic"),
    ):
        assert reason in kernel.valid_cfg(inv, cfg)


@needs_loops
@pytest.mark.parametrize(
    ("kind", "width", "num_warps"),
    [("layer", 300, 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("rms", 300, 4), ("rms", 2500, 8)))],
)
def test_a_sum_and_its_norm_are_those_of_the_plain_way(races, monkeypatch, kind, width, num_warps):
    """Both results, and the gradient that both give, in one pass."""
    two_blocks(monkeypatch, each=16)
    x, residual, *dy = (normal(4, width, seed=seed) for seed in range(4))
    vectors = [normal(width, seed=seed) for seed in (4, 5)]

    def both(cfg):
        def run(*args):
            return residual_norm(*args, kind=kind, cfg=cfg, executor=UNTUNED)

        made, back = jax.vjp(run, x, residual, *vectors)
        return [*made, *back(tuple(dy))]

    found = both(ResidualNormConfig("mosaic", num_warps=num_warps))
    for one, other in zip(found, both(ResidualNormConfig("xla")), strict=True):
        assert_near(one, np.asarray(other, np.float64), "float32", slack=10)


@needs_loops
@pytest.mark.slow
@pytest.mark.parametrize("width", [2049, 2500])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_gradients_of_a_row_of_several_warpgroups(races, monkeypatch, name, width):
    """A warpgroup that is a row ahead does not write over what the others still read."""
    two_blocks(monkeypatch, each=16)
    args, dy = inputs(name, 4, width, "float32"), normal(4, width, seed=9)
    config = FUNCTIONS[name][1]
    found = pull(lambda *a: operation(name, config("mosaic", num_warps=8), *a), args, dy)
    wanted = pull(lambda *a: operation(name, config("xla"), *a), args, dy)
    for one, other in zip(found, wanted, strict=True):
        assert_near(one, np.asarray(other, np.float64), "float32", slack=10)


@pytest.mark.parametrize("name", ["layer_norm", pytest.param("softmax", marks=pytest.mark.slow)])
def test_it_works_under_vmap_and_shard_map(races, name):
    """As every way of the library does."""
    x, *vectors = inputs(name, 4, 130, "float32")
    cfg = FUNCTIONS[name][1]("mosaic", num_warps=4)
    wanted = exact(name, x, *vectors)
    batched = jax.vmap(lambda x: operation(name, cfg, x, *vectors))(x.reshape(2, 2, 130))
    assert_near(batched.reshape(4, 130), wanted, "float32")
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec
    kernel = {"softmax": Softmax(), "rms_norm": RmsNorm(), "layer_norm": LayerNorm()}[name]
    sharded = jax.shard_map(
        lambda *a: kernel.run(*a, cfg=cfg),
        mesh=mesh,
        in_specs=(spec("batch"), *(spec() for _ in vectors)),
        out_specs=spec("batch"),
    )
    # With its checks on it is traced alone, since the interpreter cannot run it so.
    assert jax.eval_shape(sharded, x, *vectors).shape == x.shape


@pytest.mark.thinned
@pytest.mark.parametrize(
    ("width", "num_warps", "each"),
    [
        (1000, 4, None),
        (50257, 20, None),
        (128256, 32, 16),
        *(
            pytest.param(*launch, marks=pytest.mark.slow)
            for launch in ((4096, 4, None), (131, 4, None), (7168, 8, None))
        ),
    ],
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_it_is_lowered_for_a_gpu(name, width, num_warps, each):
    """Layouts are found and shared memory suffices, for narrow, odd and wide rows, and under vmap."""
    kernel = {"softmax": Softmax(), "rms_norm": RmsNorm(), "layer_norm": LayerNorm()}[name]
    cfg = FUNCTIONS[name][1]("mosaic", num_warps=num_warps, each=each)
    vectors = [jax.ShapeDtypeStruct((width,), jnp.float32)] * VECTORS[name]

    def run(x, *vectors):
        return kernel.run(x, *vectors, cfg=cfg)

    lowered_by_mosaic(run, jax.ShapeDtypeStruct((8, width), jnp.bfloat16), *vectors)
    if width == 1000:
        several = jax.vmap(run, in_axes=(0, *(None for _ in vectors)))
        lowered_by_mosaic(several, jax.ShapeDtypeStruct((2, 8, width), jnp.float32), *vectors)


@pytest.mark.thinned
@pytest.mark.parametrize("width", [1000, 4096, 8192, pytest.param(129, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_gradients_are_lowered_for_a_gpu(name, width):
    """One kernel for what x and the vectors get."""
    kernel = {"rms_norm": RmsNorm(), "layer_norm": LayerNorm()}[name]
    cfg = FUNCTIONS[name][1]("mosaic", num_warps=4)
    shapes = [jax.ShapeDtypeStruct((64, width), jnp.bfloat16)]
    shapes += [jax.ShapeDtypeStruct((width,), jnp.float32)] * VECTORS[name]
    text = lowered_by_mosaic(lambda *a: jax.vjp(lambda *b: kernel.run(*b, cfg=cfg), *a)[1](a[0]), *shapes)
    assert f"library_{name}_gradient" in text


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="this JAX has each sum by itself")
@pytest.mark.parametrize(
    ("name", "width", "more", "meetings"),
    [
        ("rms_norm", 8192, {}, 1),
        ("layer_norm", 1000, {}, 2),
        ("layer_norm", 8192, {"kept": True}, 1),
    ],
)
def test_all_sums_of_a_row_may_have_one_barrier(monkeypatch, name, width, more, meetings):
    """A mean has one before, unless it was kept; a forward pass has none of these."""
    course = norm_rows.Course(together=True)
    monkeypatch.setattr("ejkernel.library.mosaic.norm_gradients.course_of", lambda *_, **__: course)
    kernel = {"rms_norm": RmsNorm(), "layer_norm": LayerNorm()}[name]
    cfg = FUNCTIONS[name][1]("mosaic", num_warps=4, **more)
    shapes = [jax.ShapeDtypeStruct((64, width), jnp.bfloat16)]
    shapes += [jax.ShapeDtypeStruct((width,), jnp.float32)] * VECTORS[name]

    def back(*args):
        return jax.vjp(lambda *given: kernel.run(*given, cfg=cfg), *args)[1](args[0])

    assert "bar.sync" in lowered_by_mosaic(back, *shapes)
    assert len(re.findall(r"= inline_mgpu\w*\[", str(jax.make_jaxpr(back)(*shapes)))) == meetings


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="this JAX has each sum by itself")
def test_a_gradient_of_wide_rows_without_a_mean_has_one_barrier():
    """Of 4096 elements with two warpgroups, if no gradient is added; narrow rows and those with a mean have several."""
    found = {width: norm_rows.course_of(width, 2, centred=False, added=False) for width in (1024, 4096, 7168)}
    assert {width: course.together for width, course in found.items()} == {1024: False, 4096: True, 7168: True}
    assert {width: course.each for width, course in found.items()} == {1024: 32, 4096: 16, 7168: 32}
    assert norm_rows.course_of(4096, 2, centred=False, added=True).each == 32
    assert not norm_rows.course_of(4096, 2, centred=True, added=False).together


@pytest.mark.parametrize(("width", "asked"), [(1000, True), (4096, True), (1004, False), (129, False)])
def test_a_gradient_asks_for_rows_in_advance_where_copies_can(width, asked):
    """Rows that do not begin at a whole load are loaded alone."""
    kernel, cfg = RmsNorm(), RmsNormConfig("mosaic", num_warps=4)
    x = jax.ShapeDtypeStruct((64, width), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((width,), jnp.float32)
    text = str(jax.make_jaxpr(lambda x, w: jax.vjp(lambda *a: kernel.run(*a, cfg=cfg), x, w)[1](x))(x, weight))
    assert ("async_prefetch" in text) == asked


@pytest.mark.parametrize("count", [1, 5, 100, 10**6])
@pytest.mark.parametrize("width", [129, 1024, 4096, 8192])
def test_blocks_of_a_gradient_run_at_once(width, count):
    """No more than rows, nor than have registers on the multiprocessors of an H200 together."""
    for extra in (0, 1, 2):
        groups, programs = norm_rows.portions(count, width, extra)
        assert 1 <= programs <= count
        assert -(-programs // 132) * groups * 128 * min(7 * -(-width // (128 * groups)), 255) <= 1 << 16


@pytest.mark.parametrize("width", [1000, 4096])
def test_a_sum_and_its_norm_are_lowered_for_a_gpu(width):
    """One kernel forward, and one for what the sum and the weight get."""
    kernel, cfg = ResidualNorm(), ResidualNormConfig("mosaic", num_warps=4)
    shapes = [jax.ShapeDtypeStruct((64, width), jnp.bfloat16)] * 2 + [jax.ShapeDtypeStruct((width,), jnp.float32)]

    def run(*args):
        made, back = jax.vjp(lambda *a: kernel.run(*a, kind="rms", cfg=cfg), *args)
        return made, back(made)

    text = lowered_by_mosaic(run, *shapes)
    assert "library_residual_norm_gradient" in text


@pytest.mark.one_leg(but_first=True)
@pytest.mark.parametrize(
    ("block", "padded"), [(512, None), (512, 128), *(pytest.param(128, p, marks=pytest.mark.slow) for p in (None, 500))]
)
def test_losses_and_gradients_of_odd_vocabularies_agree(races, block, padded):
    """Sums of logits and their derivatives by Mosaic, beside all logits at once."""
    rng = np.random.default_rng(0)
    hidden, weight = (jnp.asarray(rng.standard_normal(shape).astype(jnp.bfloat16)) for shape in ((3, 8), (8, 700)))
    labels = jnp.asarray([5, 699, 300])

    def both(cfg):
        def loss(hidden, weight):
            options = {"z_loss": 0.1, "label_smoothing": 0.2, "cfg": cfg, "executor": UNTUNED}
            return linear_cross_entropy(hidden, weight, labels, **options)

        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, weight))

    found = both(LinearCrossEntropyConfig("mosaic", 3, block=block, num_warps=4, padded=padded))
    for got, want in zip(found, both(LinearCrossEntropyConfig("xla")), strict=True):
        assert_near(got, np.asarray(want, np.float64), "bfloat16")


@pytest.mark.parametrize(("words", "padded"), [(131, None), (100_003, None), (50257, 128)])
def test_cross_entropy_is_lowered_for_a_gpu(words, padded):
    """Both passes over logits."""
    launch = {"block": 2048, "num_warps": 8} if words > 4096 else {"block": 128, "num_warps": 4}
    cfg, kernel = LinearCrossEntropyConfig("mosaic", 8, padded=padded, **launch), LinearCrossEntropy()

    def both(hidden, weight, labels):
        loss, kept = kernel.fwd_with_residuals(hidden, weight, labels, label_smoothing=0.1, cfg=cfg)
        return kernel.vjp(kept, loss, loss, hidden, weight, labels, label_smoothing=0.1, cfg=cfg)[:2]

    shapes = ((16, 16), jnp.bfloat16), ((16, words), jnp.bfloat16), ((16,), jnp.int32)
    text = lowered_by_mosaic(both, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert "library_row_sums" in text
    assert "library_row_slopes" in text


@pytest.mark.parametrize("groups", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("width", [128, 129, 777, 1000, 4096, 50257])
def test_chunks_cover_a_row_once(width, groups):
    """Every element is counted by one chunk alone, and a warpgroup writes none of another's."""
    for each in (None, 1, 2, 8):
        if refuses(width, 2, 4 * groups, each) and "registers" not in refuses(width, 2, 4 * groups, each):
            continue
        lying = spread(width, 2, groups, each)
        counted, written = np.zeros(width, int), np.full(width, -1)
        for group in range(groups):
            for number in range(lying.count):
                first = (group * lying.count + number) * lying.size
                start = min(first, width - lying.size)
                assert start % lying.vec == 0
                assert lying.may_overlap(number) or first == start
                counted[first : start + lying.size] += 1
                part = written[start : start + lying.size]
                assert np.isin(part, (-1, group)).all()
                part[:] = group
        assert (counted == 1).all()


def test_what_cannot_run_says_why(monkeypatch):
    """Reasons of `valid_cfg`, by width, launch, GPU and JAX."""
    inv = Invocation("x", (jax.ShapeDtypeStruct((4, 50257), jnp.bfloat16),), {})
    assert "GPUs alone" in Softmax().valid_cfg(inv, SoftmaxConfig("mosaic", num_warps=16))
    hopper(monkeypatch)
    assert Softmax().valid_cfg(inv, SoftmaxConfig("mosaic", num_warps=4, each=16)) is True
    assert Softmax().valid_cfg(inv, SoftmaxConfig("mosaic", num_warps=16)) is True
    for cfg, reason in (
        (SoftmaxConfig("mosaic", num_warps=6), "whole warpgroups"),
        (SoftmaxConfig("mosaic", num_warps=4), "too wide for the registers of 4 warps"),
        (SoftmaxConfig("mosaic", num_warps=4, each=0), "each=0 must be at least 1"),
    ):
        assert reason in Softmax().valid_cfg(inv, cfg)
    short = Invocation("x", (jax.ShapeDtypeStruct((4, 64), jnp.bfloat16),), {})
    assert "shorter than the 128 threads" in Softmax().valid_cfg(short, SoftmaxConfig("mosaic", num_warps=4))
    hopper(monkeypatch, "7.5")
    assert "capability 9 and later, not 7.5" in Softmax().valid_cfg(inv, SoftmaxConfig("mosaic", num_warps=16))
    hopper(monkeypatch)
    monkeypatch.setattr("ejkernel.library.mosaic.served.missing", lambda: "jax 0.99 has no Mosaic GPU")
    assert Softmax().valid_cfg(inv, SoftmaxConfig("mosaic", num_warps=16)) == "jax 0.99 has no Mosaic GPU"


@pytest.mark.parametrize("width", [512, 1000, 8192, 32000, 50257, 128256, 300_000])
def test_candidates_are_few_and_can_run(width):
    """Rows of every width have some, wide ones also such as are read twice."""
    found = launches(jax.ShapeDtypeStruct((8, width), jnp.bfloat16))
    assert 1 <= len(found) <= 8
    assert not any(refuses(width, 2, *one) for one in found)
    assert any(each for _, each in found) == (width > 16384)


def test_rows_without_a_gpu_s_kernel_are_refused_with_a_sentence():
    """A cfg that was given by hand."""
    with pytest.raises(ValueError, match="mosaic cannot compute this call: rows of 64 are shorter"):
        operation("softmax", SoftmaxConfig("mosaic", num_warps=4), jnp.ones((2, 64)))


@pytest.mark.parametrize("shape", [(3, 9), (2, 300)])
def test_maximum_and_sum_of_one_pass_are_those_of_two(shape):
    """Plain JAX, for wide rows: with infinities of either sign as well."""
    x = np.asarray(normal(*shape)) * 30
    x[0, 3], x[1, 2:] = -np.inf, -np.inf
    made = operation("softmax", SoftmaxConfig("online"), jnp.asarray(x))
    np.testing.assert_allclose(made, jax.nn.softmax(x, -1), rtol=1e-5, atol=1e-7)
