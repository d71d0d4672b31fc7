"""Parts of a program that a GPU's compiler times: whether there are any, which are the same, and which are large."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from ejkernel.ops.timing.compiler_timing import _products, compiler_timing, has_kernel, has_large_products

KERNEL = "stablehlo.custom_call @mosaic_gpu_v2("
TIMED = {
    "a product": lambda x: x @ x,
    "a reduction": lambda x: x.sum(axis=0),
    "a reduction of pairs": lambda x: x.argmax(axis=0),
    "a transpose": lambda x: x.T * 2,
}


def text_of(fn, *shapes, dtype="float32"):
    """The text of a lowered program of arrays of these shapes."""
    return jax.jit(fn).lower(*(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)).as_text()


@pytest.mark.parametrize("fn", TIMED.values(), ids=TIMED)
def test_products_reductions_and_transposes_are_timed(fn):
    """A program without a kernel has a name of its own for them."""
    assert compiler_timing(text_of(fn, (4, 4)))
    assert compiler_timing(text_of(fn, (4, 4))) != compiler_timing(text_of(fn, (8, 8)))


def test_nothing_is_timed_of_other_programs():
    """Reductions beside a kernel are left as they come, products are not."""
    assert compiler_timing(text_of(lambda x: jax.lax.reduce_precision(x, 5, 2), (4, 4))) == ""
    reduced = "stablehlo.reduce(%0 init: %1)"
    assert compiler_timing(reduced)
    assert compiler_timing(f"{KERNEL} {reduced}") == ""
    assert compiler_timing(f"{KERNEL}\n stablehlo.dot_general")


def test_equal_products_beside_different_kernels_have_one_name():
    """Whatever the kernel is called with, and whatever its values are called."""
    dot = "%{} = stablehlo.dot_general %{}, %arg1, contracting_dims = [1] x [0] : {}"
    wide, narrow = "(tensor<8x8xbf16>)", "(tensor<4x4xbf16>)"
    one = compiler_timing(f"%0 = {KERNEL} a\n{dot.format(1, 0, wide)}")
    assert compiler_timing(f"%0 = {KERNEL} b\n%1 = stablehlo.add\n{dot.format('2#1', 1, wide)}") == one
    assert compiler_timing(f"%0 = {KERNEL} a\n{dot.format(1, 0, narrow)}") != one
    assert compiler_timing(f"{KERNEL} a\n{dot.format(1, 0, wide)}\n{dot.format(2, 1, wide)}") != one
    # Without a kernel all that the compiler fuses is timed.
    assert compiler_timing(dot.format(1, 0, wide)) not in (one, compiler_timing(dot.format(2, 1, wide)))


def test_products_in_loops_and_functions_count_as_often_as_they_run():
    """The text has them once: a loop of two steps gains less than one of sixty-four."""

    @jax.jit
    def once(x):
        return x @ x

    def beside_a_kernel(fn):
        return compiler_timing(text_of(fn, (4, 4)).replace("return ", f"%k = {KERNEL}\n return ", 1))

    def looped(steps):
        return lambda x: jax.lax.fori_loop(0, steps, lambda at, y: y @ x, x)

    def called(times):
        return lambda x: [x := once(x) for _ in range(times)][-1]

    assert beside_a_kernel(looped(2)) == beside_a_kernel(looped(2))
    assert beside_a_kernel(looped(2)) != beside_a_kernel(looped(64))
    assert beside_a_kernel(called(1)) != beside_a_kernel(called(3))
    # A function that is called once is as good as its products.
    assert beside_a_kernel(called(1)) == beside_a_kernel(lambda x: x @ x)


def test_functions_with_any_name_hold_their_own_products():
    """That of a lambda stands in quotation marks; read as part of the function before it, that one called itself."""
    double = jax.jit(lambda x: jnp.clip(x + x, 0, 1) @ x)

    @jax.jit
    def before(x):
        return jnp.clip(x, 0, 1) * 2

    def whole(x):
        return before(double(before(double(before(x)))))

    text = text_of(whole, (4, 4))
    assert '@"<lambda>' in text
    (product,) = found = _products(text)
    assert "stablehlo.dot_general" in product
    assert found[product] == 2


def test_a_product_counts_as_often_as_its_loops_run():
    """A loop's counter is compared with a constant; of one that ends by a condition only that it is a loop is known."""

    def whole(x):
        def outer(carry, _):
            return jax.lax.scan(lambda c, _: (c @ x, None), carry, None, length=3)[0], None

        x = jax.lax.scan(outer, x, None, length=5)[0]
        x = jax.lax.fori_loop(0, 64, lambda at, y: y @ x, x)
        return jax.lax.while_loop(lambda y: y.sum() < 3.0, lambda y: y @ x, x)

    found = _products(text_of(whole, (4, 4)))
    assert {line.startswith("in a loop: "): times for line, times in found.items()} == {False: 3 * 5 + 64, True: 1}
    # The same in the text that is written down for another process, where constants stand elsewhere.
    exported = jax.export.export(jax.jit(whole))(jax.ShapeDtypeStruct((4, 4), "float32")).mlir_module()
    assert sorted(_products(exported).values()) == [1, 3 * 5 + 64]


@pytest.mark.parametrize(
    ("start", "step", "goes_on"),
    [
        pytest.param(900, 1, lambda at, x: at < 1000, id="from-another-number"),
        pytest.param(0, 250, lambda at, x: at < 1000, id="by-other-steps"),
        pytest.param(0, 1, lambda at, x: (at < 5) & (x.sum() < 1000), id="by-two-conditions"),
        pytest.param(0, 1, lambda at, x: at <= 5, id="another-comparison"),
    ],
)
def test_only_a_loop_that_counts_from_zero_by_ones_tells_how_often_it_runs(start, step, goes_on):
    """Of any other its products are known to be in a loop, and no more."""

    def whole(x):
        return jax.lax.while_loop(lambda s: goes_on(*s), lambda s: (s[0] + step, s[1] @ x), (start, x))

    for text in (text_of(whole, (4, 4)), jax.export.export(jax.jit(whole))(jnp.ones((4, 4))).mlir_module()):
        assert [(line.startswith("in a loop: "), n) for line, n in _products(text).items()] == [(True, 1)]


def test_which_loop_runs_how_often_is_a_part_of_the_name():
    """Two steps of a small product and many of a large one are not the same as the reverse."""

    def looped(few, many):
        return lambda x, y: (
            jax.lax.fori_loop(0, few, lambda at, z: z @ x, x),
            jax.lax.fori_loop(0, many, lambda at, z: z @ y, y),
        )

    def beside_a_kernel(few, many):
        text = text_of(looped(few, many), (4, 4), (8, 8))
        return compiler_timing(text.replace("return ", f"%k = {KERNEL}\n return ", 1))

    assert beside_a_kernel(2, 64) == beside_a_kernel(2, 64)
    assert beside_a_kernel(2, 64) != beside_a_kernel(64, 2)


def test_a_product_behind_a_composite_is_one():
    """Its function is named by what it is decomposed into; one that cannot be found at all has a name of its own."""
    text = text_of(lambda x: jax.lax.composite(lambda y: y @ y, "my.product")(x), (4, 4))
    assert sum(_products(text).values()) == 1
    assert compiler_timing(f"func.func public @main() {{\n{KERNEL}\n}}\nfunc.func @other() {{\nstablehlo.dot\n}}")


def test_a_text_that_cannot_be_read_ends_no_tuning():
    """Functions that seem to call each other for ever."""
    text = (
        "func.func @main() {\n call @a\n}\nfunc.func @a() {\n call @b\n stablehlo.dot\n}\nfunc.func @b() {\n call @a\n}"
    )
    assert compiler_timing(f"{text} {KERNEL}")
    assert not has_large_products(text)


def test_small_products_in_a_loop_count_as_often_as_they_run():
    """One large product beside thousands of small ones is not nearly all."""

    def whole(x, y, z):
        return x @ y, jax.lax.scan(lambda c, _: (c @ z, None), z, None, length=4096)[0]

    def until(x, y, z):
        return x @ y, jax.lax.while_loop(lambda c: c[0, 0] < 3, lambda c: c @ z, z)

    shapes = (2048, 4096), (4096, 1024), (256, 256)
    assert not has_large_products(text_of(whole, *shapes, dtype="bfloat16"))
    assert not has_large_products(text_of(until, *shapes, dtype="bfloat16"))


def test_kernels_are_told_by_their_calls():
    """Those of Pallas and of cuDNN; other calls are no kernels."""
    assert has_kernel(KERNEL)
    assert has_kernel("stablehlo.custom_call @__cudnn$fmhaSoftmax(")
    assert not has_kernel("stablehlo.custom_call @Sharding(")


@pytest.mark.parametrize(
    ("shapes", "dtype", "large"),
    [
        (((2048, 4096), (4096, 1024)), "bfloat16", True),
        (((2048, 4096), (4096, 1024)), "float16", True),
        (((2048, 4096), (4096, 1024)), "float32", False),
        (((64, 8192), (8192, 28672)), "bfloat16", False),
        (((8192, 64), (64, 28672)), "bfloat16", False),
        (((1024, 1024), (1024, 1024)), "bfloat16", False),
        (((16, 1024, 1024), (16, 1024, 1024)), "bfloat16", True),
        (((512, 256, 256), (512, 256, 256)), "bfloat16", False),
        (((0, 4096), (4096, 1024)), "bfloat16", False),
    ],
)
def test_a_product_is_large_that_keeps_a_whole_gpu_busy(shapes, dtype, large):
    """The rows, columns and addends of each matrix count, and so do all operations; 16-bit numbers alone."""
    assert has_large_products(text_of(jnp.matmul, *shapes, dtype=dtype)) is large


def test_small_products_beside_large_ones_make_no_difference_where_they_are_few():
    """A twentieth of the operations, such as those of a sample of a vocabulary."""

    def both(x, y):
        return x @ y, x @ y[:, :32]

    def half(x, y):
        return x @ y, x[:128] @ y

    def scalar(x, y):
        return x @ y, jnp.vdot(x[0], x[1]), x[0] @ x[1]

    for beside in (both, scalar):
        assert has_large_products(text_of(beside, (2048, 4096), (4096, 1024), dtype="bfloat16"))
    assert not has_large_products(text_of(half, (2048, 4096), (4096, 1024), dtype="bfloat16"))
    assert not has_large_products(text_of(lambda x: x + 1, (4, 4)))


def test_a_product_of_a_gradient_is_read_like_any_other():
    """The transposed operands have other axes to add over."""

    def both(x, y):
        out, back = jax.vjp(jnp.matmul, x, y)
        return back(out)

    assert has_large_products(text_of(both, (2048, 4096), (4096, 1024), dtype="bfloat16"))
    assert not has_large_products(text_of(both, (2048, 4096), (4096, 128), dtype="bfloat16"))


def test_a_product_that_cannot_be_read_is_not_large():
    """Convolutions are timed by another part of the compiler."""
    kernel = jnp.ones((3, 3, 64, 64), "bfloat16")

    def convolved(x):
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    assert not has_large_products(text_of(convolved, (8, 64, 64, 64), dtype="bfloat16"))
