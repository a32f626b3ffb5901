"""The pretended device itself: what it refuses, notes and replays."""

from __future__ import annotations

import pytest
import torch

from emssd.attention.packed import on_device, to_host
from tests.pretended.conftest import pytestmark as pytestmark
from tests.support.pretended import DeviceMixError, PretendedCuda


def test_mixed_devices_raise(device: PretendedCuda) -> None:
    with pytest.raises(DeviceMixError, match=r"add.*on cpu those of shapes \[\(2,\)\]"):
        torch.ones(2, device="cuda") + torch.ones(2)
    assert (torch.ones(2, device="cuda") + torch.tensor(1)).device == torch.device("cuda", 0), "a number is no mix"


def test_each_wait_is_noted_with_its_place(device: PretendedCuda) -> None:
    values = torch.arange(3, device="cuda")
    assert not device.waits
    for wait in (values.tolist, values.cpu, lambda: int(values[0]), values.nonzero, lambda: values[values > 1],
                 lambda: torch.ones(2).to("cuda"), lambda: torch.tensor([1], device="cuda"),
                 lambda: to_host(values)):  # fmt: skip
        wait()
        assert len(device.waits) == 1, device.waits
        file, _, line = device.waits.pop().where.partition(":")
        assert file.endswith(("pretended/test_device.py", "attention/packed.py"))
        assert int(line) > 0
    on_device([1, 2], torch.device("cuda"))
    assert not device.waits, "through pinned memory the host does not wait"


def recorded(
    device: PretendedCuda, source: torch.Tensor, factor: list[float]
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = (source * factor[0]).cumsum(0)
    return graph, result


def test_a_replay_does_the_operations_again_and_nothing_of_python(device: PretendedCuda) -> None:
    source, factor = torch.ones(3, device="cuda"), [2.0]
    graph, result = recorded(device, source, factor)
    factor[0] = 5.0
    source.fill_(3.0)
    graph.replay()
    assert result.tolist() == [6.0, 12.0, 18.0]


def test_a_replay_copies_to_pinned_memory_again(device: PretendedCuda) -> None:
    values, host, graph = torch.ones(2, device="cuda"), torch.zeros(2, pin_memory=True), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        host.copy_(values * 2, non_blocking=True)
    values.fill_(3.0)
    graph.replay()
    assert host.tolist() != [6.0, 6.0], "nobody has waited for it"
    torch.cuda.current_stream().synchronize()
    assert host.tolist() == [6.0, 6.0]
    assert not device.illegal


def test_a_replay_spoils_what_other_graphs_gave(device: PretendedCuda) -> None:
    source = torch.ones(2, device="cuda")
    (first, one), (second, two) = (recorded(device, source, [factor]) for factor in (1.0, 2.0))
    first.replay()
    assert (one.tolist(), two.isnan().tolist()) == ([1.0, 2.0], [True, True])
    second.replay()
    assert (one.isnan().tolist(), two.tolist()) == ([True, True], [2.0, 4.0])


@pytest.mark.parametrize("what", ["item", "copy", "mask", "to pageable memory"])
def test_what_a_graph_cannot_record_is_listed(what: str, device: PretendedCuda) -> None:
    values, host = torch.ones(2, device="cuda"), torch.ones(2)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        if what == "item":
            values.sum().item()
        elif what == "copy":
            values.copy_(host, non_blocking=True)
        elif what == "to pageable memory":
            host.copy_(values, non_blocking=True)
        else:
            values[values > 0] = values + 1
    assert device.illegal
    assert device.illegal[0].where.partition(":")[0].endswith("pretended/test_device.py")
