"""The clock, slices, profiler and measurements on a real GPU; skipped if there is none."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import placewise as pw
from placewise.core.cluster import Cluster
from placewise.core.problem import Problem
from placewise.evaluate.measured import Measure
from placewise.graph_capture.capture import CapturedStep
from placewise.machines.slices import slice_devices
from placewise.measure.clocks import PureWork, time_work
from placewise.measure.cuda_instrument import CudaClock, CudaInstrument
from placewise.measure.ops import op_calls
from placewise.measure.ops_in_steps import launched_timings
from placewise.measure.prediction_checks import check_predictions
from placewise.measure.profiler import apply_profile, measure_profile
from placewise.measure.roofline import measure_machine
from placewise.run.backends.cuda import stream_of
from placewise.run.backends.green_contexts import slice_streams
from placewise.run.devices import real_devices

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

SLICES = 4
VIRTUAL = {"cuda:0": SLICES}


def slices() -> Cluster:
    """This machine with its first GPU in four slices."""
    return slice_devices(Cluster.detect(), {"gpu:0": SLICES})


class Branches(nn.Module):
    """Two equal branches; not in a function, because the process that measures imports it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([branch(x) for branch in self.branches]).sum(0)


def wide_step(width: int = 2048) -> CapturedStep:
    model = Branches(width)
    batch = (torch.rand(width, width), torch.rand(width, width))
    return pw.capture(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.01), batch, name="branches")


def product_seconds(*streams: torch.cuda.Stream, rows: int = 4096, times: int = 10) -> float:
    """Returns how long products take on all streams at the same time, each with its own."""
    operands = [torch.rand(rows, rows, device="cuda:0") for _ in streams]
    for _ in range(2):  # the first time is a warm-up
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(times):
            for stream, operand in zip(streams, operands, strict=True):
                with torch.cuda.stream(stream):
                    torch.mm(operand, operand)
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def test_slices_have_their_own_multiprocessors() -> None:
    """A slice is slower than the GPU; four at a time do four times its work in less than twice its time."""
    streams = slice_streams("cuda:0", SLICES)
    assert len({stream.cuda_stream for stream in streams}) == SLICES
    assert slice_streams("cuda:0", SLICES) is streams
    whole = product_seconds(torch.cuda.default_stream("cuda:0"))
    one, four = product_seconds(streams[0]), product_seconds(*streams)
    assert one > 2.0 * whole
    assert four < 2.0 * one


def test_a_slices_stream_computes_and_frees_memory() -> None:
    stream = slice_streams("cuda:0", SLICES)[1]
    with torch.cuda.stream(stream):
        a = torch.full((1000,), 2.0, device="cuda:0")
        b = (a * 3).sum()
    stream.synchronize()
    assert b.item() == 6000.0
    del a, b
    torch.cuda.empty_cache()


def test_the_clock_leaves_out_launches() -> None:
    device = real_devices(slices(), VIRTUAL)[0]
    clock = CudaClock(stream_of(device))
    small = torch.rand(1, device="cuda:0")
    torch.cuda.synchronize()
    tiny = time_work(PureWork(lambda: torch.add(small, 1.0)), clock).seconds
    assert 0 < tiny < 8e-6
    large = torch.rand(4096, 4096, device="cuda:0")
    torch.cuda.synchronize()
    by_clock = time_work(PureWork(lambda: torch.mm(large, large)), clock).seconds
    assert by_clock == pytest.approx(product_seconds(stream_of(device)) / 10, rel=0.25)


def test_a_profile_of_slices() -> None:
    step, cluster = wide_step(512), slices()
    found = measure_profile(step, cluster, VIRTUAL)
    assert found.failures == ()
    profile = found.profile
    assert [device.times_of for device in profile.devices[:SLICES]] == ["gpu:0"] * SLICES
    assert 0 < profile.dispatch_seconds < 1e-4
    assert all(1e8 < link.bytes_per_second < 1e13 for link in profile.links)
    assert len(profile.contention["gpu"].memory) == SLICES
    assert profile.contention["gpu"].memory[-1] > 1.2
    problem = Problem.of(*apply_profile(step, cluster, profile))
    assert (problem.op_seconds >= 0).all()


def test_a_launch_is_the_hosts_time_though_the_gpu_is_busy() -> None:
    """Products of 4096 rows take a GPU milliseconds: its queue is full all the time, and each launch waits for a product."""
    model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(12)])
    batch = (torch.rand(4096, 4096), torch.rand(4096, 4096))
    step = pw.capture(
        model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 1e-3), batch, micro_batches=64, name="products"
    )
    cluster = Cluster.detect()
    gpu = real_devices(cluster)[0]

    def measure(step: pw.CapturedStep) -> tuple[float, float]:
        """Returns the seconds of a launch, and of the longest op."""
        signatures = [call.signature for call in op_calls(step.program, len(step.graph.ops))]
        timings, launch_seconds = launched_timings(step, cluster.devices[0], gpu, signatures)
        assert launch_seconds is not None
        return launch_seconds, max(timing.seconds for timing in timings.values())

    launch_seconds, product_seconds = measure(step)
    small = nn.Sequential(*[nn.Linear(8, 8) for _ in range(12)])
    small_step = pw.capture(
        small, nn.functional.mse_loss, torch.optim.SGD(small.parameters(), 1e-3), (torch.rand(64, 8), torch.rand(64, 8)),
        micro_batches=64, name="small products",
    )  # fmt: skip
    small_launch, small_op = measure(small_step)
    assert launch_seconds == pytest.approx(small_launch, rel=0.5)
    assert small_op < launch_seconds < product_seconds, "an op's time is the GPU's, though the host is slower"


def test_a_copys_launch_takes_longer_than_an_ops() -> None:
    first, second, *_ = real_devices(slices(), VIRTUAL)
    instrument = CudaInstrument()
    assert instrument.launch_seconds(first) < instrument.copy_launch_seconds(first, second) < 2e-4


def test_predictions_are_checked_on_slices() -> None:
    step, cluster = wide_step(4096), slices()
    found = measure_profile(step, cluster, VIRTUAL, runs_step=True)
    checks = check_predictions(step, cluster, found.profile, VIRTUAL).checks
    assert checks[0].placement == "gpu-only"
    assert len(checks) >= 2
    assert abs(checks[0].error) < 0.15


def test_the_machine_is_measured() -> None:
    measured = measure_machine(slices(), VIRTUAL)
    assert 1e12 < measured.devices[0].flops < 1e15
    assert 1e11 < measured.devices[0].bytes_per_second < 1e13
    assert measured.devices[0].flops == measured.devices[SLICES - 1].flops
    assert measured.devices[0].flops_in("bfloat16") > measured.devices[0].flops_in("float64")
    cpu = measured.device_names.index("cpu:0")
    assert 1e9 < measured.bytes_per_second[0, cpu] < 1e12


def test_placements_are_measured_on_slices(tmp_path: Path) -> None:
    plan = pw.place(
        wide_step(),
        slices(),
        strategy="auto",
        evaluations=4,
        measure=Measure(virtual=VIRTUAL),
        run_file=tmp_path / "runs.db",
    )
    assert plan.predicted_seconds is not None
    assert plan.step_seconds is not None
    assert plan.step_seconds < 1.0
