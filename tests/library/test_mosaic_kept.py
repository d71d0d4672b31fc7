"""Cross entropy of exponentials that are kept: interpreted beside float64, and lowered for a Hopper GPU.

Covers `library/linear_cross_entropy_kept.py` and `library/mosaic/exponentials.py`.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_execution import Picking, executor_with
from fakes_library import UNTUNED, normal
from fakes_mosaic import hopper, lowered_by_mosaic, needs_loops, needs_mosaic, races
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from test_linear_cross_entropy import close, truth

from ejkernel.library import (
    LinearCrossEntropy,
    LinearCrossEntropyConfig,
    linear_cross_entropy,
    linear_cross_entropy_kept,
)
from ejkernel.library.linear_cross_entropy_ways import by_exponentials
from ejkernel.library.mosaic.tiles import EXPONENTIALS
from ejkernel.ops import Invocation
from ejkernel.ops.programs.budget_split import share_of
from ejkernel.ops.programs.find import find

__all__ = ["races"]
pytestmark = needs_mosaic
KEPT, PADDED = LinearCrossEntropyConfig("mosaic_kept"), LinearCrossEntropyConfig("mosaic_kept", padded=128)
PLAIN = LinearCrossEntropyConfig("xla")
# One tile of rows that is not whole, and the words of two tiles.
TOKENS, DEPTH, WORDS = 72, 64, 512


def inputs(words=WORDS, tokens=TOKENS):
    """Hidden states, a weight and labels, two of which are to be ignored."""
    labels = np.random.default_rng(2).integers(0, words, tokens)
    labels[[3, 6]] = -100
    weight = normal(DEPTH, words, dtype="bfloat16", seed=1) * jnp.bfloat16(0.25)
    return normal(tokens, DEPTH, dtype="bfloat16"), weight, labels


def both(hidden, weight, labels, cfg=KEPT, dy=1.0, **options):
    """The value, and the gradients for this cotangent."""

    def run(hidden, weight, labels):
        loss = lambda *given: linear_cross_entropy(*given, labels, cfg=cfg, executor=UNTUNED, **options)  # noqa: E731
        out, pull = jax.vjp(loss, hidden, weight)
        return out, *pull(jnp.asarray(dy, jnp.float32))

    return jax.jit(run)(hidden, weight, jnp.asarray(labels))


def compare(hidden, weight, labels, cfg=KEPT, *, reduction="mean", **options):
    """Value and gradients of a call against float64."""
    count = np.sum(labels >= 0) if reduction == "mean" else 1
    dy = np.linspace(-1, 2, len(labels)) if reduction == "none" else np.asarray(1.7)
    out, *grads = both(hidden, weight, labels, cfg, dy, reduction=reduction, **options)
    losses, *right = truth(hidden, weight, labels, dy / count, **options)
    # Exponentials are those of the hardware, and sums are float32: bfloat16 is in the gradients alone.
    close(out, losses if reduction == "none" else losses.sum() / count, "float32")
    assert (out.dtype, *(grad.dtype for grad in grads)) == (jnp.float32, jnp.bfloat16, jnp.bfloat16)
    for got, want in zip(grads, right, strict=True):
        close(got, want, "bfloat16")


@needs_loops
def test_the_mean_and_its_gradients_are_those_of_float64(races):
    """Whole tiles of words, and rows that are none."""
    compare(*inputs())


@needs_loops
def test_all_options_together_agree_with_float64(races):
    """Words that are padded into a part of a tile, the weight the other way round, and a plain sum."""
    hidden, weight, labels = inputs(300)
    options = {"vocab_first": True, "z_loss": 0.1, "label_smoothing": 0.2, "reduction": "sum"}
    compare(hidden, weight.T, labels, PADDED, **options)


@needs_loops
@pytest.mark.parametrize("high", [(3,), (400, 401)], ids=["beside the sample", "in it too"])
def test_logits_far_above_those_of_some_words_agree(races, high):
    """Then a token has several offsets, and is brought to one; losses for each token are weighted."""
    hidden, weight, labels = inputs()
    # What is looked at first is every second word.
    for number, word in enumerate(high):
        weight = weight.at[:, word].multiply(40 << number)
    logits = np.asarray(hidden, np.float32) @ np.asarray(weight, np.float32)
    assert 0 < np.sum(logits.max(axis=1) - logits[:, ::2].max(axis=1) > 40) < TOKENS
    compare(hidden, weight, labels, reduction="none", z_loss=0.01)


@needs_loops
def test_each_exponential_is_multiplied_once(monkeypatch):
    """Some tokens at a time, of which the last ones are among those before."""
    monkeypatch.setattr(linear_cross_entropy_kept, "_ROWS", 16)
    kept, offsets = normal(TOKENS, WORDS, dtype="bfloat16"), normal(2, TOKENS, seed=1)
    top = jnp.max(offsets, axis=0)
    wide = np.asarray(kept, np.float32) * np.repeat(np.exp(offsets - top[None]).T, WORDS // 2, axis=1)

    made, lost = jax.jit(linear_cross_entropy_kept._levelled)(kept, offsets, top, jnp.any(offsets != top[None]))

    np.testing.assert_allclose(np.asarray(made, np.float32), wide, rtol=2**-8)
    np.testing.assert_allclose(lost, (wide - np.asarray(made, np.float32)).sum(axis=1), atol=1e-4)


@needs_loops
def test_a_label_far_above_all_else_leaves_what_the_others_share(races):
    """Its word is none of those that are looked at first, so that its exponential is as large as they may be."""
    rng, labels = np.random.default_rng(3), 2 * np.arange(TOKENS) + 1
    hidden = np.sign(rng.standard_normal((TOKENS, DEPTH)))
    weight = rng.standard_normal((DEPTH, WORDS)) * 0.05
    weight[:, labels] += hidden.T * (30 / DEPTH)
    hidden, weight = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)
    found, *grads = both(hidden, weight, labels)
    losses, *right = truth(hidden, weight, labels, 1 / TOKENS)
    assert abs(found - losses.mean()) < 1e-8
    for got, want in zip(grads, right, strict=True):
        close(got, want, "bfloat16")


@needs_loops
@pytest.mark.parametrize("padded", [192, pytest.param(1024, marks=pytest.mark.slow)])
def test_words_of_whole_tiles_may_be_padded_by_more(races, padded):
    """Into a part of a tile more, and into tiles that have no word; with gradients and without."""
    hidden, weight, labels = inputs()
    cfg = LinearCrossEntropyConfig("mosaic_kept", padded=padded)
    compare(hidden, weight, labels, cfg, label_smoothing=0.1)
    found = jax.jit(lambda *given: linear_cross_entropy(*given, labels, cfg=cfg, executor=UNTUNED))(hidden, weight)
    close(found, truth(hidden, weight, labels, 1.0)[0].sum() / (TOKENS - 2))


@needs_loops
@pytest.mark.parametrize(
    ("words", "options"),
    [(WORDS, {}), (300, {"label_smoothing": 0.1}), (WORDS, {"vocab_first": True})],
    ids=["whole", "padded, with sums", "the other way round"],
)
def test_tiles_with_and_without_a_label_agree(races, words, options):
    """All labels are among the first words of the first warpgroup's tokens, so most tiles are without one."""
    hidden, weight, labels = inputs(words)
    labels = np.where(np.arange(TOKENS) < 64, labels % 200, -100)
    compare(
        hidden,
        weight.T if options.get("vocab_first") else weight,
        labels,
        KEPT if words % 64 == 0 else PADDED,
        **options,
    )


@needs_loops
def test_tiles_that_have_a_label_or_no_words_are_told_apart():
    """Two tiles of rows and three of columns, the last of which has columns beyond the words."""
    from ejkernel.library.mosaic import exponentials

    labels = np.full(256, -100, np.int32)
    labels[[0, 70, 139]] = 3, 300, 600
    found = exponentials._mixed(jnp.asarray(labels), 3, 600, EXPONENTIALS).reshape(3, 4)
    np.testing.assert_array_equal(found, [[1, 0, 0, 0], [0, 1, 0, 0], [1, 1, 1, 1]])


def check_what_rounding_took(interpret):
    """The sums of what is kept and of what rounding took from it are those of exponentials."""
    from ejkernel.library.mosaic import exponentials

    hidden, weight, labels = inputs()
    run = functools.partial(exponentials.exponentials, words=WORDS, vocab_first=False, total=False, interpret=interpret)
    kept, parts = jax.jit(run)(hidden, weight, jnp.asarray(labels), jnp.zeros(TOKENS))
    assert np.all(np.asarray(parts.offset) == 0)
    sums = np.asarray(kept, np.float64).reshape(TOKENS, -1, EXPONENTIALS.n).sum(axis=2).T
    took = np.asarray(parts.norm, np.float64) - sums
    assert np.abs(took).max() > 1e-3
    np.testing.assert_allclose(parts.lost, took, atol=1e-4 * np.abs(sums).max())


@needs_loops
def test_what_rounding_took_is_known(races):
    """As the interpreter computes it."""
    check_what_rounding_took(True)


@pytest.mark.gpu
@pytest.mark.skipif(all(device.platform != "gpu" for device in jax.devices()), reason="there is no GPU here")
def test_what_rounding_took_is_known_on_a_gpu():
    """As compilers leave it, which may join products and sums."""
    check_what_rounding_took(False)


@needs_loops
@pytest.mark.parametrize("depth", [DEPTH, 4 * DEPTH], ids=["one step", "four steps"])
def test_a_warpgroup_that_is_ahead_changes_nothing(races, monkeypatch, depth):
    """Of several tiles for each block, with as many steps as it is ahead and with more."""
    from ejkernel.library.mosaic import exponentials

    hidden, weight, labels = inputs(4 * 256)
    rows, matrix = jnp.tile(hidden, (1, depth // DEPTH)), jnp.tile(weight, (depth // DEPTH, 1)) / (depth // DEPTH)
    given, how = (rows, matrix, jnp.asarray(labels), jnp.zeros(TOKENS)), {"words": 1024, "vocab_first": False}
    found = []
    for lead in (EXPONENTIALS.lead, 0):
        monkeypatch.setattr(exponentials, "EXPONENTIALS", replace(EXPONENTIALS, lead=lead))
        run = functools.partial(exponentials.exponentials, total=False, interpret=True, blocks=1, **how)
        found.append(jax.tree.leaves(jax.jit(run)(*given)))
    assert EXPONENTIALS.lead > 0
    for got, want in zip(*found, strict=True):
        np.testing.assert_array_equal(got, want)


@needs_loops
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "reduction": "sum"}], ids=["mean", "all options"])
def test_chunks_of_tokens_add_up(races, options):
    """Exponentials of some tokens at a time; without a gradient there is nothing to keep."""
    hidden, weight, labels = inputs(tokens=2 * TOKENS)
    cfg = LinearCrossEntropyConfig("mosaic_kept", TOKENS)
    compare(hidden, weight, labels, cfg, **options)


@needs_loops
def test_without_gradients_no_exponentials_are_kept(races):
    """The loss of a forward pass alone, of words that are not whole tiles, is that of float64."""
    hidden, weight, labels = inputs(300)
    how = {"label_smoothing": 0.1, "cfg": PADDED, "executor": UNTUNED}
    found = jax.jit(lambda *given: linear_cross_entropy(*given, labels, **how))(hidden, weight)
    close(found, truth(hidden, weight, labels, 1.0, label_smoothing=0.1)[0].sum() / (TOKENS - 2))


@needs_loops
def test_what_counts_for_nothing_is_left_out(races):
    """Hidden states that are no numbers where a label is ignored, and a label out of range under a trace."""
    hidden, weight, labels = inputs()
    out, *grads = both(hidden, weight, labels)
    broken, wrong = hidden.at[3].set(np.nan), np.where(labels < 0, WORDS + 7, labels)
    again, *others = both(broken, weight, wrong)
    assert out == again
    for one, other in zip(grads, others, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.any(others[0][3])


# The interpreter multiplies by numpy, which says so.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@needs_loops
def test_what_is_no_number_stays_so():
    """Losses are NaN and infinite where all logits at once make them so, and right where a word cannot be."""
    hidden, weight, labels = inputs()
    weight = jnp.abs(weight).at[:, 7].set(-np.inf)
    hidden = jnp.abs(hidden).at[0].set(np.nan).at[1].set(1e30).at[2, 5].set(np.inf).at[4].set(-1e30)
    labels[5] = 7
    how = {"reduction": "none", "executor": UNTUNED}
    found, kept, wanted = (
        jax.jit(fn)(hidden, weight)
        for fn in (
            lambda *given: linear_cross_entropy(*given, labels, cfg=KEPT, **how),
            lambda *given: jax.vjp(lambda *a: linear_cross_entropy(*a, labels, cfg=KEPT, **how), *given)[0],
            lambda *given: linear_cross_entropy(*given, labels, cfg=LinearCrossEntropyConfig("xla"), **how),
        )
    )
    assert {0, 2, 5} <= set(np.flatnonzero(~np.isfinite(wanted)))
    for got in (found, kept):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@needs_loops
def test_a_price_that_leaves_nothing_of_the_exponentials_leaves_the_label():
    """Where derivatives of the normaliser and of its square cancel, no gradient is infinite."""
    hidden, weight, labels = inputs()
    hidden = jnp.zeros_like(hidden)
    # All logits are zero, so that this makes the normaliser's derivative one minus one.
    price = -0.5 / np.log(WORDS)
    compare(hidden, weight, labels, reduction="sum", z_loss=float(price))


@needs_loops
def test_examples_of_a_vmap_and_gradients_of_gradients_agree():
    """Beside those of all logits at once."""
    hidden, weight, labels = inputs(128, 8)
    rows = jnp.stack([hidden, hidden[::-1]])

    def grad(hidden, cfg):
        return jax.grad(lambda h: linear_cross_entropy(h, weight, labels, cfg=cfg, executor=UNTUNED))(hidden)

    def twice(hidden, cfg):
        return jax.grad(lambda h: jnp.sum(grad(h, cfg).astype(jnp.float32) ** 2))(hidden)

    def mapped(rows, cfg):
        return jax.vmap(lambda hidden: grad(hidden, cfg))(rows), twice(rows[0], cfg)

    found, right = (jax.jit(lambda rows, cfg=cfg: mapped(rows, cfg))(rows) for cfg in (KEPT, PLAIN))
    for got, want in zip(found, right, strict=True):
        close(got, want, "bfloat16")


@needs_loops
@pytest.mark.parametrize(("high", "across"), [(1, 1), (3, 8), (5, 19), (32, 594)])
def test_every_tile_is_made_once(high, across):
    """In bands of columns of which the last may be narrower."""
    from ejkernel.library.mosaic.exponentials import _place

    places = jax.vmap(lambda number: (lambda at: (at.row, at.column))(_place(number, high, across)))
    row, column = places(jnp.arange(high * across, dtype=jnp.int32))
    assert sorted(zip(row.tolist(), column.tolist(), strict=True)) == [
        (i, j) for i in range(high) for j in range(across)
    ]


def shaped(tokens, depth, words, dtype=jnp.bfloat16, vocab_first=False):
    """A call's arrays, of which only shape and dtype are known."""
    weight = (words, depth) if vocab_first else (depth, words)
    shapes = ((tokens, depth), dtype), (weight, dtype), ((tokens,), jnp.int32)
    return tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes)


@needs_loops
def test_what_no_chunk_changes_is_computed_once():
    """Of odd words with part of the label: their padding, those that are looked at first, and the sum of all."""
    kernel, cfg = LinearCrossEntropy(), replace(PADDED, chunk=TOKENS)

    def passes(*arrays):
        return kernel.fwd_with_residuals(*arrays, cfg=cfg, label_smoothing=0.1)

    (loop,) = [eqn for eqn in flat(jax.make_jaxpr(passes)(*shaped(4 * TOKENS, DEPTH, 300))) if eqn.params.get("length")]
    assert loop.primitive.name == "scan"
    inner = list(flat(loop.params["jaxpr"]))
    made = {(eqn.primitive.name, *eqn.invars[0].aval.shape) for eqn in inner if eqn.invars}
    assert any(name == "dot_general" for name, *_ in made)
    assert not {("pad", DEPTH, 300), ("slice", DEPTH, 300), ("reduce_sum", DEPTH, 300)} & made


def flat(jaxpr):
    """The equations of a program and of the functions that it calls, but not those of loops and kernels."""
    for eqn in jaxpr.eqns:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        if hasattr(inner, "eqns") and eqn.primitive.name not in ("scan", "while", "pallas_call"):
            yield from flat(inner)
        else:
            yield eqn


@needs_loops
@pytest.mark.parametrize(
    ("words", "chunk", "options", "x64"),
    [
        (131072, None, {}, False),
        (50257, None, {"vocab_first": True, "label_smoothing": 0.1, "z_loss": 0.1}, True),
        (50257, 1024, {"label_smoothing": 0.1}, False),
    ],
    ids=["whole", "odd", "chunks"],
)
def test_the_product_is_lowered_for_a_gpu(words, chunk, options, x64):
    """With gradients, and without."""
    kernel, cfg = LinearCrossEntropy(), replace(KEPT if words % 64 == 0 else PADDED, chunk=chunk)

    def passes(*arrays):
        loss, kept = kernel.fwd_with_residuals(*arrays, cfg=cfg, **options)
        return loss, kernel.vjp(kept, loss, loss, *arrays, cfg=cfg, **options)[:2]

    shapes = shaped(4096, 768, words, vocab_first="vocab_first" in options)
    with jax.enable_x64(x64):
        for fn in (passes, lambda *arrays: kernel.run(*arrays, cfg=cfg, **options)):
            assert "library_exponentials" in lowered_by_mosaic(fn, *shapes)


@needs_loops
def test_it_is_sharded_over_tokens():
    """As a GPU would trace it inside shard_map with its checks on: on shapes, since a CPU cannot run it."""
    mesh, kernel = Mesh(np.array(jax.devices()[:2]), ("tokens",)), LinearCrossEntropy()

    def passes(*args):
        options = {"label_smoothing": 0.1, "reduction": "none", "cfg": KEPT}
        losses, kept = kernel.fwd_with_residuals(*args, **options)
        return losses, kernel.vjp(kept, losses, losses, *args, **options)[1][None]

    sharded = jax.shard_map(passes, mesh=mesh, in_specs=(P("tokens"), P(), P("tokens")), out_specs=P("tokens"))
    made = jax.eval_shape(sharded, *shaped(256, 64, 512))
    assert [out.shape for out in made] == [(256,), (2, 64, 512)]


@needs_loops
@pytest.mark.parametrize("setting", ["numpy_rank_promotion", "numpy_dtype_promotion"])
def test_it_relies_on_no_promotion(setting):
    """Neither of ranks nor of dtypes, with every option; seen by tracing alone."""
    kernel, options = LinearCrossEntropy(), {"label_smoothing": 0.1, "z_loss": 0.1, "cfg": PADDED}

    def passes(*args):
        loss, kept = kernel.fwd_with_residuals(*args, **options)
        return kernel.vjp(kept, loss, loss, *args, **options)[:2]

    with getattr(jax, setting)("raise" if "rank" in setting else "strict"):
        jax.eval_shape(passes, *shaped(128, 64, 300))


@needs_loops
@pytest.mark.parametrize(
    "cfg", [LinearCrossEntropyConfig("chunked_tokens", 64), KEPT], ids=lambda cfg: cfg.implementation
)
def test_its_part_of_a_budget_does_not_depend_on_the_guess(monkeypatch, cfg):
    """A product that is a kernel of its own is worth as much as XLA's, and three times that with gradients."""
    monkeypatch.setattr(LinearCrossEntropy, "valid_cfg", lambda *asked: True)
    monkeypatch.setattr(LinearCrossEntropy, "heuristic_cfg_cpu", lambda *asked: cfg)
    executor, tokens, words = executor_with(Picking()), 256, 1024
    arrays = normal(tokens, 512, dtype="bfloat16"), normal(512, words, dtype="bfloat16")
    labels = jnp.zeros(tokens, jnp.int32)

    def loss(hidden, weight):
        return linear_cross_entropy(hidden, weight, labels, executor=executor)

    def worth(fn):
        (call,) = find(fn, arrays, {}).calls
        return share_of(call.tuned_for("auto")).cost

    # Of a CPU: twenty operations while a byte is moved.
    wanted = 2 * tokens * 512 * words / 20
    assert worth(loss) == wanted
    assert worth(jax.grad(loss, (0, 1))) == 3 * wanted


def test_what_cannot_run_says_why(monkeypatch):
    """By dtype, sizes, memory, GPU and JAX; a cfg by hand is refused with a sentence."""

    def judged(*shape, cfg=KEPT, **how):
        return LinearCrossEntropy().valid_cfg(Invocation("x", shaped(*shape, **how), {}), cfg)

    hopper(monkeypatch)
    if jax.__version_info__ < (0, 10, 2):
        assert "JAX 0.10.0" in judged(8192, 4096, 131072)
        return
    assert judged(8192, 4096, 131072) is True
    assert judged(4096, 3584, 152064) is True
    assert judged(8192, 768, 50257, cfg=PADDED) is True
    assert "must be multiples of 8, 64 and 64" in judged(8192, 768, 50257)
    assert "must be multiples" in judged(8190, 768, 32000)
    assert "must be multiples" in judged(8192, 96, 32000)
    assert "over 3072" in judged(16384, 4096, 131072)
    assert "in bfloat16 alone, not for float16" in judged(8192, 768, 32000, dtype=jnp.float16)
    wide = LinearCrossEntropyConfig("mosaic_kept", wide=True)
    assert "in bfloat16 alone, not for float32" in judged(8192, 768, 32000, cfg=wide)
    assert "whole arrays alone" in judged(8192, 768, 32000, cfg=LinearCrossEntropyConfig("mosaic_kept", stacked=True))
    assert "no such chunks" in judged(8192, 768, 32000, cfg=LinearCrossEntropyConfig("mosaic_kept", 3000))
    assert judged(16384, 4096, 131072, cfg=LinearCrossEntropyConfig("mosaic_kept", 8192)) is True
    # A forward pass takes hidden states of all chunks at once.
    assert "counts in 32 bits" in judged(1 << 20, 2048, 128, cfg=LinearCrossEntropyConfig("mosaic_kept", 8192))
    hopper(monkeypatch, "10.0")
    assert "capability 9, not 10.0" in judged(8192, 4096, 131072)
    monkeypatch.setattr(sys.modules["ejkernel.library.mosaic.served"], "missing", lambda: "no Mosaic")
    hopper(monkeypatch)
    assert judged(8192, 4096, 131072) == "no Mosaic"
    with pytest.raises(ValueError, match="mosaic_kept cannot compute this call: exponentials are kept in bfloat16"):
        linear_cross_entropy(jnp.ones((8, 64)), jnp.ones((64, 64)), jnp.zeros(8, jnp.int32), cfg=KEPT)
    narrow = jnp.ones((8, 64), jnp.bfloat16), jnp.ones((64, 64), jnp.bfloat16), jnp.zeros(8, jnp.int32)
    with pytest.raises(ValueError, match="mosaic_kept cannot compute this call: mosaic_kept writes whole arrays alone"):
        linear_cross_entropy(*narrow, cfg=replace(KEPT, stacked=True))


@pytest.mark.parametrize(
    ("tokens", "words", "cfg"),
    [
        (8192, 131072, KEPT),
        (4096, 152064, KEPT),
        (8192, 50257, PADDED),
        (16384, 131072, LinearCrossEntropyConfig("mosaic_kept", 8192)),
        (3 << 14, 131072, LinearCrossEntropyConfig("mosaic_kept", 12288)),
        (8191, 131072, None),
        (1 << 20, 131072, None),
    ],
)
def test_exponentials_take_no_more_than_is_kept_of_logits(tokens, words, cfg):
    """Words are padded where copies of tiles need it, and tokens come in equal chunks where all are too many."""
    assert by_exponentials(tokens, words) == cfg


@needs_loops
def test_it_is_a_candidate_on_hopper_gpus_and_the_guess_where_it_was_faster(monkeypatch):
    """By JAX 0.11 or later; elsewhere, for other dtypes and for small calls the guess is what it was."""

    def chosen(*shape, **how):
        inv, kernel = Invocation("x", shaped(*shape, **how), {}), LinearCrossEntropy()
        candidates = [cfg.implementation for cfg in kernel.candidate_cfgs_gpu(inv)]
        return kernel.heuristic_cfg_gpu(inv).implementation, "mosaic_kept" in candidates

    hopper(monkeypatch)
    guess = "mosaic_kept" if jax.__version_info__ >= (0, 11) else "chunked_tokens"
    assert chosen(8192, 768, 50257) == (guess, True)
    assert chosen(16384, 4096, 131072) == (guess, True)
    assert chosen(1024, 768, 50304)[1]
    assert chosen(1024, 768, 50304)[0] != "mosaic_kept"
    assert "mosaic_kept" not in chosen(8192, 768, 50304, dtype=jnp.float16)
    assert chosen(8192, 768, 50304, dtype=jnp.float16)[1] is False
    hopper(monkeypatch, "10.0")
    assert chosen(8192, 4096, 131072)[1] is False
