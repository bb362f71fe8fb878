"""Streams of others: cupy's, torch's, and whatever else speaks CUDA's stream protocol.

Two streams know nothing of each other: what one is to read of the other is ordered by an event, on the
device, so that nobody waits on the host.
"""

from __future__ import annotations

from typing import Any

from warmkv.schema.errors import RecordError


def taken(cupy: Any, stream: Any, gpu: int) -> Any:
    """``stream`` as one of cupy's on GPU number ``gpu``, which keeps it alive. Raises RecordError for what is no
    stream, or one of another GPU."""
    if gpu_of(stream, gpu) != gpu:
        raise RecordError(f"a stream of GPU {gpu_of(stream, gpu)} for work on GPU {gpu}")
    if not hasattr(stream, "__cuda_stream__"):
        raise RecordError(f"{type(stream).__name__} is no stream: expected one with __cuda_stream__, as those of cupy and torch")
    return cupy.cuda.Stream.from_external(stream)


def gpu_of(stream: Any, default: int) -> int:
    """The number of the GPU that a stream is of, ``default`` where it does not say."""
    # Of cupy's and of torch's; streams that any GPU has are told by -1.
    found = getattr(stream, "device_id", getattr(stream, "device_index", -1))
    return default if found is None or found < 0 else int(found)


class Order:
    """Lets one stream wait for what is on another. Events are made once for each GPU whose streams are waited for.

    **Threading:** one caller at a time."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._events: dict[int, Any] = {}

    def after(self, later: Any, earlier: Any, gpu: int) -> None:
        """What is enqueued on ``later`` from now on begins once all that is on ``earlier``, a stream of GPU number
        ``gpu``, by now is done."""
        with self._cupy.cuda.Device(gpu):
            if gpu not in self._events:
                self._events[gpu] = self._cupy.cuda.Event(disable_timing=True)
            event = self._events[gpu]
            event.record(earlier)
        # Who waits has been told by now: the event may be recorded anew.
        later.wait_event(event)
