"""Cross entropy of a linear layer: values and gradients in chunks, what they hold, and what is refused.

Covers `library/linear_cross_entropy_chunks.py` and `library/linear_cross_entropy_ways.py`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fakes_library import UNTUNED
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from thinning import each_once

from ejkernel.library import LinearCrossEntropy, LinearCrossEntropyConfig, linear_cross_entropy
from ejkernel.ops import ConfigCache, ConfigSelectorChain, Executor, Invocation, OpsError, check

# Chunks and blocks that divide neither tokens nor words.
WAYS = {
    "xla": LinearCrossEntropyConfig("xla"),
    "tokens": LinearCrossEntropyConfig("chunked_tokens", 5),
    "vocab": LinearCrossEntropyConfig("chunked_vocab", 8),
    "wide": LinearCrossEntropyConfig("chunked_tokens", 4, wide=True),
    "triton": LinearCrossEntropyConfig("triton", 5, block=8),
    "triton whole": LinearCrossEntropyConfig("triton"),
    "tokens padded": LinearCrossEntropyConfig("chunked_tokens", 5, padded=16),
    "tokens stacked": LinearCrossEntropyConfig("chunked_tokens", 5, padded=16, stacked=True),
    "triton padded": LinearCrossEntropyConfig("triton", 5, block=8, padded=64),
    "triton stacked": LinearCrossEntropyConfig("triton", 5, block=8, stacked=True),
    "triton padded and stacked": LinearCrossEntropyConfig("triton", 5, block=8, padded=16, stacked=True),
}
TOKENS, DEPTH, WORDS = 13, 6, 29
LIMITS = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}
LABELS = np.random.default_rng(1).integers(0, WORDS, TOKENS)
LABELS[[3, 12]] = -100


def inputs(dtype=jnp.float32, vocab_first=False):
    """Hidden states and a weight."""
    rng = np.random.default_rng(0)
    shape = (WORDS, DEPTH) if vocab_first else (DEPTH, WORDS)
    return jnp.asarray(rng.standard_normal((TOKENS, DEPTH)).astype(dtype)), jnp.asarray(
        rng.standard_normal(shape).astype(dtype)
    )


def truth(hidden, weight, labels, scales, *, vocab_first=False, z_loss=0.0, label_smoothing=0.0):
    """Losses of tokens, and gradients of their sum weighted by these scales, in float64."""
    hidden, weight = np.asarray(hidden, np.float64), np.asarray(weight, np.float64)
    weight = weight.T if vocab_first else weight
    counted = (labels >= 0).astype(float)
    logits = hidden @ weight
    top = logits.max(axis=1)
    normaliser = top + np.log(np.exp(logits - top[:, None]).sum(axis=1))
    target = np.eye(weight.shape[1])[np.where(labels < 0, 0, labels)] * (1 - label_smoothing)
    target = target + label_smoothing / weight.shape[1]
    losses = (normaliser - (target * logits).sum(axis=1) + z_loss * normaliser**2) * counted
    share = np.exp(logits - normaliser[:, None])
    slopes = (share * (1 + 2 * z_loss * normaliser)[:, None] - target) * (counted * scales)[:, None]
    d_weight = hidden.T @ slopes
    return losses, slopes @ weight.T, d_weight.T if vocab_first else d_weight


def close(got, want, dtype="float32"):
    """Is every element right, in units of the largest?"""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    assert np.max(np.abs(got - want), initial=0) <= LIMITS[dtype] * max(np.max(np.abs(want), initial=0), 1e-30)


def compare(way, dtype=jnp.float32, reduction="mean", **options):
    """Value and gradients of one call against float64."""
    hidden, weight = inputs(dtype, options.get("vocab_first", False))
    scales = np.linspace(-1, 2, TOKENS) if reduction == "none" else np.asarray(1.7)
    counted = np.sum(LABELS >= 0) if reduction == "mean" else 1

    @jax.jit
    def both(hidden, weight, labels):
        def loss(hidden, weight):
            given = (hidden, weight, labels)
            return linear_cross_entropy(*given, reduction=reduction, cfg=way, executor=UNTUNED, **options)

        out, pull = jax.vjp(loss, hidden, weight)
        return out, *pull(jnp.asarray(scales, jnp.float32))

    out, d_hidden, d_weight = both(hidden, weight, jnp.asarray(LABELS))
    losses, *grads = truth(hidden, weight, LABELS, scales / counted, **options)
    name = jnp.dtype(dtype).name
    close(out, losses if reduction == "none" else losses.sum() / counted, name)
    assert (out.dtype, d_hidden.dtype, d_weight.dtype) == (jnp.float32, dtype, dtype)
    for got, want in zip((d_hidden, d_weight), grads, strict=True):
        close(got, want, name)


@pytest.mark.thinned
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("way", ["xla", "tokens", "vocab", "triton", "triton whole", "tokens padded", "triton padded"])
def test_every_implementation_agrees_with_float64(way, reduction):
    """Values and gradients, with labels to ignore, and chunks that divide nothing."""
    compare(WAYS[way], reduction=reduction)


@pytest.mark.parametrize("way", ["xla", "tokens", "vocab", "triton", "triton whole", "tokens padded", "triton padded"])
def test_all_options_together_agree_with_float64(way):
    """The weight the other way round, a share for all words, a price on the normaliser, a plain sum."""
    compare(WAYS[way], reduction="sum", vocab_first=True, z_loss=0.1, label_smoothing=0.2)


@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("tokens", jnp.bfloat16),
        ("vocab", jnp.float16),
        ("wide", jnp.float16),
        ("triton", jnp.bfloat16),
        ("triton whole", jnp.float16),
        ("triton padded", jnp.float16),
        ("triton stacked", jnp.bfloat16),
    ],
)
def test_narrow_inputs_are_summed_in_float32(way, dtype):
    """The loss is float32; gradients have the inputs' dtypes and are as right as those allow."""
    compare(WAYS[way], dtype)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("way", ["tokens stacked", "triton padded and stacked"])
def test_derivatives_that_are_kept_give_the_same_gradients(way, reduction):
    """The weight the other way round, a share for all words and a price on the normaliser."""
    options = {"vocab_first": True, "z_loss": 0.1, "label_smoothing": 0.2}
    compare(WAYS[way], jnp.bfloat16, reduction=reduction, **options)


@pytest.mark.parametrize(
    ("cfg", "dtype", "words", "reason"),
    [
        (LinearCrossEntropyConfig("chunked_vocab", 8, padded=128), "bfloat16", 50257, "neither pads"),
        (LinearCrossEntropyConfig("triton", 512, padded=128), "bfloat16", 32000, "such a multiple"),
        (LinearCrossEntropyConfig("triton", 512, padded=-8), "bfloat16", 32000, "padded=-8"),
        (LinearCrossEntropyConfig("mosaic", 512, stacked=True), "bfloat16", 32000, "whole arrays alone"),
        (LinearCrossEntropyConfig("triton", 512, stacked=True), "float16", 32000, "bfloat16 alone"),
        (LinearCrossEntropyConfig("triton", 512, wide=True, stacked=True), "bfloat16", 32000, "not for float32"),
        (LinearCrossEntropyConfig("triton", 512, stacked=True), "bfloat16", 300_000, "over 3072"),
    ],
)
def test_products_that_gain_nothing_are_refused(cfg, dtype, words, reason):
    """With the reason: padding, and derivatives of all tokens."""
    shapes = (((8192, 64), dtype), ((64, words), dtype), ((8192,), "int32"))
    inv = Invocation("x", tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes), {})
    assert reason in LinearCrossEntropy().valid_cfg(inv, cfg)


@pytest.mark.parametrize(("words", "padded"), [(50257, 128), (131072, None)])
def test_candidates_have_whole_products(words, padded):
    """Odd numbers of words are padded, and derivatives of all tokens are kept."""
    shapes = (((8192, 64), "bfloat16"), ((64, words), "bfloat16"), ((8192,), "int32"))
    inv = Invocation("x", tuple(jax.ShapeDtypeStruct(*shape) for shape in shapes), {})
    found = list(LinearCrossEntropy().candidate_cfgs_gpu(inv))
    assert len(set(found)) == len(found)
    assert {cfg.padded for cfg in found if cfg.stacked} == {padded}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, {"vocab_first": True}, {"z_loss": 0.1}, {"label_smoothing": 0.3}], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_the_whole_grid_agrees_with_float64(way, options, reduction, dtype):
    """Ways, options, reductions and dtypes, each with each."""
    compare(WAYS[way], dtype, reduction, **options)


@pytest.mark.parametrize("way", ["tokens", "vocab"])
def test_all_logits_are_never_held_at_once(way):
    """The compiled loss with its gradients needs a fraction of what the logits alone would take."""
    tokens, depth, words = 1024, 8, 4096
    shapes = (tokens, depth), (depth, words)
    hidden, weight = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
    name, chunk = ("chunked_tokens", 32) if way == "tokens" else ("chunked_vocab", 128)

    def loss(hidden, weight, labels, cfg):
        return linear_cross_entropy(hidden, weight, labels, cfg=cfg, executor=UNTUNED)

    def needed(cfg):
        both = jax.jit(jax.value_and_grad(lambda *args: loss(*args, cfg), argnums=(0, 1)))
        return both.lower(hidden, weight, labels).compile().memory_analysis().temp_size_in_bytes

    logits = tokens * words * 4
    assert needed(LinearCrossEntropyConfig("xla")) >= logits
    assert needed(LinearCrossEntropyConfig(name, chunk)) < logits / 8


def test_all_at_once_is_refused_where_it_would_hold_much():
    """Then it is no candidate; where all logits are as small as a chunk, it is."""

    def refused(tokens):
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((tokens, 8), (8, 1 << 15))]
        labels = jax.ShapeDtypeStruct((tokens,), jnp.int32)
        inv = Invocation("x", (*args, labels), {})
        return LinearCrossEntropy().valid_cfg(inv, WAYS["xla"])

    assert refused(512) is True
    assert "128 MiB, over the 64 MiB" in refused(1024)


def test_chunks_of_candidates_are_never_everything():
    """Of two tokens or words and more, at least two chunks are made."""
    for tokens, words in ((2, 5), (1000, 50), (8192, 131072)):
        args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((tokens, 8), (8, words))]
        inv = Invocation("x", (*args, jax.ShapeDtypeStruct((tokens,), jnp.int32)), {})
        kernel = LinearCrossEntropy()
        for cfg in (*kernel.candidate_cfgs(inv), *kernel.candidate_cfgs_cpu(inv), kernel.heuristic_cfg(inv)):
            whole = {"chunked_tokens": tokens, "chunked_vocab": words}.get(cfg.implementation)
            assert whole is None or cfg.chunk <= -(-whole // 2)


def test_leading_dimensions_are_the_labels():
    """Hidden states (batch, length, d) with labels (batch, length) give losses of that shape."""
    hidden, weight = inputs()
    shaped, labels = hidden[:12].reshape(3, 4, DEPTH), LABELS[:12].reshape(3, 4)
    losses = linear_cross_entropy(shaped, weight, labels, reduction="none", cfg=WAYS["tokens"], executor=UNTUNED)
    close(losses, truth(hidden[:12], weight, LABELS[:12], 1.0)[0].reshape(3, 4))


def test_nothing_that_counts_is_a_loss_of_zero():
    """All labels ignored, and no labels at all: zero, with gradients of zero."""
    hidden, weight = inputs()
    ignored = jnp.full(TOKENS, -100)

    def loss(weight):
        return linear_cross_entropy(hidden, weight, ignored, cfg=WAYS["tokens"], executor=UNTUNED)

    value, grad = jax.jit(jax.value_and_grad(loss))(weight)
    assert value == 0
    assert not np.any(grad)
    assert linear_cross_entropy(hidden[:0], weight, ignored[:0]) == 0


def test_a_label_out_of_range_counts_for_nothing_under_a_trace():
    """Where values cannot be read, it is as if it were to be ignored."""
    hidden, weight = inputs()
    wrong = np.where(LABELS < 0, WORDS + 7, LABELS)
    for way in ("xla", "tokens", "vocab", "triton"):
        loss = jax.jit(
            lambda labels, way=way: linear_cross_entropy(hidden, weight, labels, cfg=WAYS[way], executor=UNTUNED)
        )
        close(loss(jnp.asarray(wrong)), truth(hidden, weight, LABELS, 1.0)[0].sum() / 11)


@pytest.mark.parametrize("way", ["tokens", "vocab", "triton", "triton padded and stacked"])
def test_losses_are_mapped(way):
    """A vmap over hidden states and labels gives each example's own."""
    hidden, weight = inputs()
    rows, labels = jnp.stack([hidden, hidden[::-1]]), np.stack([LABELS, np.roll(LABELS, 1)])

    def loss(hidden, labels):
        return linear_cross_entropy(hidden, weight, labels, reduction="sum", cfg=WAYS[way], executor=UNTUNED)

    losses, grads = jax.jit(jax.vmap(jax.value_and_grad(loss)))(rows, jnp.asarray(labels))
    for row, label, value, grad in zip(rows, labels, losses, grads, strict=True):
        want, d_hidden, _ = truth(row, weight, label, 1.0)
        close(value, want.sum())
        close(grad, d_hidden)


@pytest.mark.parametrize("way", ["tokens", "vocab", "triton", "triton padded and stacked"])
def test_losses_are_sharded_over_tokens(way):
    """Each shard's own sum, added up; the gradient of the weight that all share is summed too."""
    hidden, weight = inputs()
    mesh = Mesh(np.array(jax.devices()[:2]), ("tokens",))

    def loss(hidden, weight, labels):
        part = linear_cross_entropy(hidden, weight, labels, reduction="sum", cfg=WAYS[way], executor=UNTUNED)
        return jax.lax.psum(part, "tokens")

    # JAX interprets Pallas kernels without that check alone.
    specs = {"in_specs": (P("tokens"), P(), P("tokens")), "check_vma": not way.startswith("triton")}
    sharded = jax.shard_map(loss, mesh=mesh, out_specs=P(), **specs)
    value, grads = jax.jit(jax.value_and_grad(sharded, argnums=(0, 1)))(hidden[:12], weight, jnp.asarray(LABELS[:12]))
    want, *right = truth(hidden[:12], weight, LABELS[:12], 1.0)
    close(value, want.sum())
    for got, one in zip(grads, right, strict=True):
        close(got, one)


def test_arrays_may_be_given_by_name():
    """The kernel takes them so, with gradients, whatever the platform's own method is."""
    hidden, weight = inputs()
    given = {"labels": jnp.asarray(LABELS), "cfg": WAYS["tokens"]}
    grad = jax.grad(lambda weight: UNTUNED(LinearCrossEntropy(), hidden=hidden, weight=weight, **given))(weight)
    close(grad, truth(hidden, weight, LABELS, 1 / 11)[2])


@pytest.mark.parametrize(
    ("way", "value"), each_once({way: way for way in ("xla", "tokens", "vocab", "triton")}, [np.nan, np.inf])
)
def test_what_does_not_count_need_not_be_a_number(way, value):
    """Hidden states whose label is to be ignored are left out of the loss and of both gradients, whatever they are."""
    hidden, weight = inputs()
    broken = hidden.at[3].set(value)
    for reduction, count in (("mean", 11), ("sum", 1), ("none", 1)):

        def loss(hidden, weight, reduction=reduction):
            given = {"reduction": reduction, "cfg": WAYS[way], "executor": UNTUNED}
            return jnp.sum(linear_cross_entropy(hidden, weight, jnp.asarray(LABELS), **given))

        found, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(broken, weight)
        losses, *right = truth(hidden, weight, LABELS, 1 / count)
        close(found, losses.sum() / count)
        for got, want in zip(grads, right, strict=True):
            close(got, want)


@pytest.mark.parametrize("way", ["xla", "tokens", "vocab", "triton"])
def test_a_word_s_number_may_be_ignored(way):
    """As where words are padded with the first one."""
    hidden, weight = inputs()
    padded = np.where(LABELS < 0, 0, LABELS)

    def loss(hidden, weight):
        given = {"ignore_index": 0, "label_smoothing": 0.1, "cfg": WAYS[way], "executor": UNTUNED}
        return linear_cross_entropy(hidden, weight, jnp.asarray(padded), **given)

    counted = np.where(padded == 0, -100, padded)
    losses, *right = truth(hidden, weight, counted, 1 / np.sum(counted >= 0), label_smoothing=0.1)
    found, grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, weight)
    close(found, losses.sum() / np.sum(counted >= 0))
    for got, want in zip(grads, right, strict=True):
        close(got, want)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
def test_labels_are_read_before_they_are_narrowed(dtype):
    """A number that 32 bits would turn into a label, or into what is ignored, is out of range."""
    hidden, weight = inputs()
    for wrong in (1 << 32 | 3, (1 << 32) - 100):
        if wrong <= np.iinfo(dtype).max:
            labels = np.zeros(TOKENS, dtype)
            labels[4] = wrong
            with pytest.raises(ValueError, match=f"1 of 13 are not, the first is {wrong}"):
                linear_cross_entropy(hidden, weight, labels, executor=UNTUNED)


def test_under_a_trace_a_label_beyond_32_bits_counts_for_nothing():
    """It does not become another one."""
    hidden, weight = inputs()
    with jax.enable_x64(True):
        wide = jnp.asarray(np.where(LABELS < 0, 1 << 32 | 3, LABELS), jnp.int64)
        loss = jax.jit(
            lambda labels: linear_cross_entropy(hidden, weight, labels, cfg=WAYS["tokens"], executor=UNTUNED)
        )
        found = loss(wide)
    close(found, truth(hidden, weight, LABELS, 1.0)[0].sum() / 11)


def test_what_is_ignored_may_be_beyond_32_bits():
    """Where labels are."""
    hidden, weight = inputs()
    ignored = 1 << 40
    labels = np.where(LABELS < 0, ignored, LABELS)
    found = linear_cross_entropy(hidden, weight, labels, ignore_index=ignored, cfg=WAYS["tokens"], executor=UNTUNED)
    close(found, truth(hidden, weight, LABELS, 1.0)[0].sum() / 11)


@pytest.mark.parametrize("cfg", [None, *WAYS.values()], ids=[None, *WAYS])
def test_without_a_width_every_word_is_as_likely(cfg):
    """All logits are zero, so the loss is the logarithm of the number of words; nothing is tuned for it."""
    hidden, weight = jnp.zeros((TOKENS, 0)), jnp.zeros((0, WORDS))
    cache = ConfigCache()
    how = {"z_loss": 0.1, "cfg": cfg, "executor": Executor(ConfigSelectorChain(cache))}
    found, grad = jax.value_and_grad(lambda w: linear_cross_entropy(hidden, w, LABELS, **how))(weight)
    close(found, np.log(WORDS) + 0.1 * np.log(WORDS) ** 2)
    assert grad.shape == (0, WORDS)
    assert cache.size() == 0


def test_every_candidate_agrees_and_the_call_is_tuned():
    """Each one's values and gradients; then, under jit, with labels that the kernel draws, the winner is kept."""
    hidden, weight = inputs(jnp.bfloat16)
    trials = check(LinearCrossEntropy(), hidden, weight, jnp.asarray(LABELS))
    assert {trial.status for trial in trials} == {"ok"}
    assert {trial.cfg.implementation for trial in trials} == {"xla", "chunked_tokens", "chunked_vocab"}
    cache = ConfigCache()
    run = Executor(ConfigSelectorChain(cache))
    loss = jax.jit(lambda *args: linear_cross_entropy(*args, executor=run))(hidden, weight, jnp.asarray(LABELS))
    close(loss, truth(hidden, weight, LABELS, 1.0)[0].sum() / 11, "bfloat16")
    assert cache.size() == 1


HIDDEN, WEIGHT = inputs()
BAD = [
    ((HIDDEN, WEIGHT[:5], LABELS), {}, ValueError, r"hidden \(13, 6\) and weight \(5, 29\) differ in d"),
    ((HIDDEN, WEIGHT.T, LABELS), {}, ValueError, "with vocab_first=True it would fit"),
    ((HIDDEN, WEIGHT, LABELS[:5]), {}, ValueError, r"labels \(5,\) must have the shape of hidden \(13, 6\)"),
    ((HIDDEN, WEIGHT, np.full(13, 29)), {}, ValueError, "from 0 to 28, .* 13 of 13 are not, the first is 29"),
    ((HIDDEN, WEIGHT, LABELS), {"ignore_index": -1}, ValueError, "the first is -100"),
    ((HIDDEN, WEIGHT, LABELS * 1.0), {}, TypeError, "labels is float"),
    ((HIDDEN.astype(jnp.int8), WEIGHT, LABELS), {}, TypeError, "hidden is int8"),
    ((HIDDEN.astype(jnp.bfloat16), WEIGHT, LABELS), {}, TypeError, "hidden is bfloat16 and weight is float32"),
    ((HIDDEN, WEIGHT[0], LABELS), {}, ValueError, r"weight must have the shape \(d, vocab\), got \(29,\)"),
    ((HIDDEN, WEIGHT, LABELS), {"reduction": "all"}, ValueError, "reduction"),
    ((HIDDEN, WEIGHT, LABELS), {"label_smoothing": 2.0}, ValueError, "label_smoothing"),
    ((HIDDEN, WEIGHT, LABELS), {"z_loss": jnp.ones(())}, TypeError, "z_loss must be a number"),
    ((HIDDEN, WEIGHT, LABELS), {"cfg": LinearCrossEntropyConfig("nothing")}, ValueError, "names no way"),
]


@pytest.mark.parametrize(("args", "options", "kind", "message"), BAD)
def test_bad_input_is_a_clear_error(args, options, kind, message):
    """It names the argument and both shapes, before anything is tuned."""
    with pytest.raises(kind, match=message) as caught:
        linear_cross_entropy(*args, **options)
    assert isinstance(caught.value, OpsError)
