"""torch's ways: grouped_mm, scaled_dot_product_attention, and rows as it has them and as it compiles them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from .opponent import Call, Opponent

EPSILON = 1e-6


def opponents(call: Call) -> Iterator[Opponent]:
    """Every way of torch for the operation."""
    import torch

    found = _OPERATIONS.get(call.op)
    if found is not None:
        yield from found(torch, call)


def with_gradients(torch: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Result and gradients of every float tensor; the cotangent comes last."""

    def run(*given: Any) -> Any:
        *tensors, dy = given
        leaves = [t.detach().requires_grad_() if t.is_floating_point() else t for t in tensors]
        out = fn(*leaves)
        asked = [leaf for leaf in leaves if leaf.requires_grad]
        return out.detach(), torch.autograd.grad(out, asked, dy.to(out.dtype))

    return run


def made(torch: Any, call: Call, name: str, fn: Callable[..., Any], **more: Any) -> Opponent:
    """An opponent from a forward function that torch can derive."""
    # Where gradients are asked for, tensors ask for them in `with_gradients`; elsewhere none does.
    return Opponent(name, with_gradients(torch, fn) if call.backward else fn, by_torch=True, derived=False, **more)


def attention(torch: Any, call: Call) -> Iterator[Opponent]:
    """Attention by flash attention and by cuDNN, on views in torch's order of dimensions."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if call.static.get("window") is not None:
        return
    shared = call.arrays[0].shape[2] != call.arrays[1].shape[2]

    def run(backend: Any, q: Any, k: Any, v: Any) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel([backend]):
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=call.static["causal"], scale=call.static["scale"], enable_gqa=shared
            )
        return out.transpose(1, 2)

    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        backend = getattr(SDPBackend, name, None)
        if backend is not None:
            yield made(torch, call, f"torch {name.lower()}", functools.partial(run, backend))


def ragged_dot(torch: Any, call: Call) -> Iterator[Opponent]:
    """Products by grouped_mm, gradients by two more; then with the matrices stored by columns, as torch's are."""
    grouped = getattr(torch, "_grouped_mm", None) or torch.nn.functional.grouped_mm

    def forward(lhs: Any, rhs: Any, ends: Any) -> Any:
        return grouped(lhs, rhs, offs=ends)

    def both(lhs: Any, rhs: Any, ends: Any, dy: Any) -> Any:
        to_lhs = grouped(dy, rhs.transpose(1, 2), offs=ends)
        return forward(lhs, rhs, ends), (to_lhs, grouped(lhs.t(), dy, offs=ends))

    def ends_of(sizes: Any) -> Any:
        return torch.cumsum(sizes, 0, dtype=torch.int32)

    def as_given(lhs: Any, rhs: Any, sizes: Any, *dy: Any) -> tuple[Any, ...]:
        return lhs, rhs, ends_of(sizes), *dy

    def by_columns(lhs: Any, rhs: Any, sizes: Any, *dy: Any) -> tuple[Any, ...]:
        return lhs, rhs.transpose(1, 2).contiguous().transpose(1, 2), ends_of(sizes), *dy

    fn = both if call.backward else forward
    yield Opponent("torch grouped_mm", fn, as_given, by_torch=True, derived=False)
    yield Opponent("torch grouped_mm, matrices by columns", fn, by_columns, by_torch=True, derived=False)


def rms_norm(torch: Any, call: Call) -> Iterator[Opponent]:
    """The norm as torch has it, and compiled."""

    def run(x: Any, weight: Any) -> Any:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, EPSILON)

    yield from _both(torch, call, "rms_norm", run)


def layer_norm(torch: Any, call: Call) -> Iterator[Opponent]:
    """The norm as torch has it, and compiled."""

    def run(x: Any, weight: Any, bias: Any) -> Any:
        return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, EPSILON)

    yield from _both(torch, call, "layer_norm", run)


def softmax(torch: Any, call: Call) -> Iterator[Opponent]:
    """The softmax as torch has it, and compiled."""

    def run(x: Any) -> Any:
        return torch.nn.functional.softmax(x, -1)

    yield from _both(torch, call, "softmax", run)


def linear_cross_entropy(torch: Any, call: Call) -> Iterator[Opponent]:
    """All logits at once, in the states' dtype, and the loss of them in float32."""

    def run(hidden: Any, weight: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy((hidden @ weight).float(), labels)

    def wide_labels(hidden: Any, weight: Any, labels: Any, *dy: Any) -> tuple[Any, ...]:
        return hidden, weight, labels.long(), *dy

    yield from _both(torch, call, "cross_entropy", run, prepare=wide_labels)


def matmul(torch: Any, call: Call) -> Iterator[Opponent]:
    """Products alone."""
    if len(call.arrays) == 2 and not call.static:
        yield made(torch, call, "torch matmul", torch.matmul)


def _both(torch: Any, call: Call, name: str, fn: Callable[..., Any], **more: Any) -> Iterator[Opponent]:
    yield made(torch, call, f"torch {name}", fn, **more)
    # Shapes are constants, as in our programs.
    yield made(torch, call, f"torch compiled {name}", torch.compile(fn, dynamic=False), **more)


_OPERATIONS: dict[str, Callable[[Any, Call], Iterator[Opponent]]] = {
    "attention": attention,
    "ragged_dot": ragged_dot,
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "softmax": softmax,
    "linear_cross_entropy": linear_cross_entropy,
    "matmul": matmul,
}
