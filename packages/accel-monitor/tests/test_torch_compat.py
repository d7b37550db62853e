"""The private names of torch that this package uses exist and do what they are used for."""

from __future__ import annotations

from accel_monitor._torch_compat import watch_compilation


def test_compilation_is_reported_until_it_is_removed() -> None:
    import torch._dynamo

    events: list[str] = []
    remove = watch_compilation(lambda *_: events.append("began"), lambda *_: events.append("ended"))
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert events and events[0] == "began" and events[-1] == "ended" and len(events) % 2 == 0
    remove()
    count = len(events)
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(2))
    assert len(events) == count
    remove()
