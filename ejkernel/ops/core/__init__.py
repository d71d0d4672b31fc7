"""Kernel, call, key, device and record: the values that every room shares. Nothing here measures or stores."""

from typing import TYPE_CHECKING

from .._lazy import lazy

if TYPE_CHECKING:
    from .device import device_fingerprint as device_fingerprint
    from .device import device_kind as device_kind
    from .device import get_device_platform as get_device_platform
    from .device import target_device as target_device
    from .invocation import Cfg as Cfg
    from .invocation import Invocation as Invocation
    from .invocation import Out as Out
    from .kernel import Kernel as Kernel
    from .key import Key as Key
    from .params import BwdParams as BwdParams
    from .params import FwdParams as FwdParams
    from .record import Record as Record
    from .record import Trial as Trial

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        **dict.fromkeys(("Cfg", "Out", "Invocation"), f"{__name__}.invocation"),
        **dict.fromkeys(("BwdParams", "FwdParams"), f"{__name__}.params"),
        **dict.fromkeys(("Record", "Trial"), f"{__name__}.record"),
        **dict.fromkeys(
            ("device_fingerprint", "device_kind", "get_device_platform", "target_device"), f"{__name__}.device"
        ),
        "Kernel": f"{__name__}.kernel",
        "Key": f"{__name__}.key",
    },
)
