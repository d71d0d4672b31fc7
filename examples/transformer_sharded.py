"""The transformer with its batch over several devices: inside shard_map each device's part is tuned."""

import os
import sys

# Before JAX starts: several devices on a machine that has one.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import jax
from transformer import Sizes, counting, init, loss

P = jax.sharding.PartitionSpec


def main(steps=10):
    """Trains on all devices, and compares the first step with one device's."""
    sizes = Sizes()
    model = init(sizes, jax.random.key(0))
    tokens = counting(sizes, jax.random.key(0))
    alone = float(jax.jit(loss, static_argnums=2)(model, tokens, sizes.heads))
    mesh = jax.make_mesh((jax.device_count(),), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))

    def local(model, tokens):
        """One device's part of a step: its gradients are averaged with the others'."""
        value, gradient = jax.value_and_grad(loss)(model, tokens, sizes.heads)
        value, gradient = jax.lax.pmean((value, gradient), "batch")
        return jax.tree.map(lambda weight, slope: weight - 0.3 * slope, model, gradient), value

    train = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("batch")), out_specs=(P(), P()), check_vma=False))
    values = []
    for number in range(steps):
        model, value = train(model, counting(sizes, jax.random.key(number)))
        values.append(float(value))
    print(f"{jax.device_count()} devices: loss {values[0]:.4f} (one device: {alone:.4f}) -> {values[-1]:.4f}")
    return 0 if abs(values[0] - alone) < 1e-3 and values[-1] < values[0] else 1


if __name__ == "__main__":
    sys.exit(main())
