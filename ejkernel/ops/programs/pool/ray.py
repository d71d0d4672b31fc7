"""Ray as a pool: a task is a Ray task, and Ray starts another worker for one that died or was ended."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future, InvalidStateError
from typing import Any, final

from ...core.errors import SettingError
from ...core.shown import Shown
from .by_name import call, name_of, places
from .engines import engine

# Processes of a machine without another device, unless a number is given: more compile no faster.
_MOST_ON_A_PROCESSOR = 4
# Ray ends a worker that had a GPU after its task, so that the next one may have another GPU: calls share a task.
_CALLS_ON_A_GPU = 8


@final
class RayFuture(Future[str]):
    """The text to come of a Ray task; `cancel` ends the worker that is at it."""

    def __init__(self, ray: Any, reference: Any) -> None:
        super().__init__()
        self._ray = ray
        # Ray forgets the result of a task to which there is no reference.
        self._reference = reference
        reference.future().add_done_callback(self._take)

    def _take(self, inner: Future[str]) -> None:
        # Either may have been cancelled meanwhile.
        with contextlib.suppress(CancelledError, InvalidStateError):
            error = inner.exception()
            if error is None:
                self.set_result(inner.result())
            else:
                self.set_exception(error)

    def cancel(self) -> bool:
        """Ends the task, also where it runs: then Ray starts another worker."""
        if self.done():
            return False
        self._ray.cancel(self._reference, force=True)
        return super().cancel()


@final
class RayPool(Shown, Executor):
    """An executor on a Ray cluster: that of the address, the one that this process is connected to, or one of its own.

    `asks` are options of Ray's tasks, such as `num_gpus=1` or `resources={"h200": 1}`; without them a task asks for one
    GPU where the cluster has GPUs, else for one processor.
    """

    def __init__(self, workers: int | None = None, *, address: str | None = None, **asks: Any) -> None:
        if workers is not None and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
            raise SettingError(f"workers={workers!r} is not a whole number of at least 1")
        self._ray = ray = engine("ray", "ray")
        self._is_own = not ray.is_initialized()
        if self._is_own:
            _connect(ray, address)
        resources = ray.cluster_resources()
        gpus = int(resources.get("GPU", 0))
        if gpus and "num_gpus" not in asks:
            asks["num_gpus"] = 1
        self.asks = asks
        # A worker that dies costs its calls one more attempt, which is the tuner's to make.
        self._call = ray.remote(call).options(**{"max_retries": 0, **asks})
        if asks.get("num_gpus"):
            self.calls_per_task = _CALLS_ON_A_GPU
        nodes = sum(bool(node.get("Alive")) for node in ray.nodes())
        on_processors = min(int(resources.get("CPU", 1)), _MOST_ON_A_PROCESSOR * max(1, nodes))
        self.workers = workers or max(1, gpus if asks.get("num_gpus") else on_processors)
        self._under_way: set[RayFuture] = set()

    def in_short(self) -> str:
        """The value in a few words."""
        asks = ", ".join(f"{name}={value!r}" for name, value in self.asks.items())
        return f"{self.workers} workers{f' with {asks}' if asks else ''}"

    def submit(self, function: Callable[..., Any], /, *texts: Any, **more: Any) -> RayFuture:  # type: ignore[override]
        """Has a Ray worker call a function of text that can be imported; a future of the text that it returns."""
        name = name_of(function, texts, more)
        future = RayFuture(self._ray, self._call.remote(name, list(texts), places()))
        self._under_way.add(future)
        future.add_done_callback(self._under_way.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the cluster that this pool started, or leaves the one that it found."""
        for future in list(self._under_way):
            if cancel_futures:
                future.cancel()
            elif wait:
                future.exception()
        if self._is_own:
            self._ray.shutdown()
            self._is_own = False


def _connect(ray: Any, address: str | None) -> None:
    try:
        with warnings.catch_warnings():
            # JAX warns of every fork of its process; Ray's run another program at once.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            # Workers' words are in Ray's logs; replies have what matters here.
            ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    # Ray has classes of its own for what is wrong with an address.
    except (OSError, RuntimeError, ValueError) as error:
        at = f"at {address}" if address else "on this machine"
        raise SettingError(f"no Ray cluster answers or starts {at}: {error}") from error


def opened(address: str) -> contextlib.AbstractContextManager[RayPool]:
    """A pool on the cluster at an address; without one, as `ray.init()` finds or starts it."""
    return RayPool(address=address or None)
