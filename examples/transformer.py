"""A small transformer trained for some steps: library kernels under jit and grad, each tuned once."""

import sys
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ejkernel.library import attention, linear_cross_entropy, matmul, rms_norm
from ejkernel.ops import default_selector


@dataclass(frozen=True)
class Sizes:
    """The sizes of the model."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    hidden: int = 256
    words: int = 256
    length: int = 64
    batch: int = 4


def init(sizes, key):
    """Random weights; those of all layers in one array, for `scan`."""

    def normal(key, *shape):
        return jax.random.normal(key, shape) / shape[-2] ** 0.5

    keys = jax.random.split(key, 6)
    layers, width, hidden = sizes.layers, sizes.width, sizes.hidden
    blocks = {
        "norm_1": jnp.ones((layers, width)),
        "qkv": normal(keys[0], layers, width, 3 * width),
        "out": normal(keys[1], layers, width, width),
        "norm_2": jnp.ones((layers, width)),
        "up": normal(keys[2], layers, width, hidden),
        "down": normal(keys[3], layers, hidden, width),
    }
    embedding = jax.random.normal(keys[4], (sizes.words, width))
    return {"embedding": embedding, "blocks": blocks, "head": normal(keys[5], width, sizes.words)}


def block(x, weights, heads):
    """Attention and a feed-forward layer, each behind a norm."""
    batch, length, width = x.shape
    qkv = matmul(rms_norm(x, weights["norm_1"]), weights["qkv"])
    q, k, v = (part.reshape(batch, length, heads, width // heads) for part in jnp.split(qkv, 3, axis=-1))
    x = x + matmul(attention(q, k, v, causal=True).reshape(x.shape), weights["out"])
    up = matmul(rms_norm(x, weights["norm_2"]), weights["up"], activation="gelu")
    return x + matmul(up, weights["down"])


def loss(model, tokens, heads):
    """The mean cross entropy of the next tokens."""
    x = model["embedding"][tokens[:, :-1]]
    x, _ = jax.lax.scan(lambda x, weights: (block(x, weights, heads), None), x, model["blocks"])
    return linear_cross_entropy(x.reshape(-1, x.shape[-1]), model["head"], tokens[:, 1:].reshape(-1))


def step(model, tokens, heads, rate=0.3):
    """One step of gradient descent."""
    value, gradient = jax.value_and_grad(loss)(model, tokens, heads)
    return jax.tree.map(lambda weight, slope: weight - rate * slope, model, gradient), value


def counting(sizes, key):
    """Tokens that count up from a random start: easy to foretell."""
    start = jax.random.randint(key, (sizes.batch, 1), 0, sizes.words)
    return (start + jnp.arange(sizes.length + 1)) % sizes.words


def main(steps=20):
    """Trains, and shows the loss and what was tuned."""
    sizes = Sizes()
    model = init(sizes, jax.random.key(0))
    train = jax.jit(step, static_argnums=2, donate_argnums=0)
    values = []
    for number in range(steps):
        model, value = train(model, counting(sizes, jax.random.key(number)), sizes.heads)
        values.append(float(value))
    print(f"loss {values[0]:.2f} -> {values[-1]:.2f} in {steps} steps")
    for device, operation, call in sorted(default_selector().cache.keys()):
        print(f"  {operation:<32} {default_selector().cache.get(device, operation, call).implementation}")
    return 0 if values[-1] < values[0] else 1


if __name__ == "__main__":
    sys.exit(main())
