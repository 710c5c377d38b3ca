"""Predicted step times: against what can be computed by hand, the simulator, and measured tables."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import trigram
from trigram import _core
from trigram.algorithms.parse import find
from trigram.plan import choice, costs, losses, step, wire
from trigram.plan.inputs import CodecCost, Compute, Costs, ExactCodes, Job, Machines
from trigram.plan.step import predict

BENCHMARKS = Path(__file__).parents[2] / "docs" / "benchmarks.md"
# As measured on the machine of docs/benchmarks.md: processor seconds per value, and per byte.
COSTS = Costs(
    codecs={
        "bf16": CodecCost(2.2e-10, 2.4e-10, 2.4e-10),
        "f16": CodecCost(2.3e-10, 2.3e-10, 3.3e-10),
        "int8": CodecCost(4.4e-10, 2.1e-10, 2.2e-10),
        "sign": CodecCost(1.4e-9, 4.5e-10, 6.0e-10),
        "topk:0.01": CodecCost(1.9e-9, 6.5e-10, 4.1e-10),
        "chunktopk:0.02": CodecCost(2.7e-8, 2.3e-9, 1.7e-9),
    },
    powersgd={"2": 2.6e-9},
    copy=1.7e-10,
    shared=1.7e-10,
    wire=1.5e-9,
    message=2e-6,
)
FREE = Costs({}, {}, copy=0.0, shared=0.0, wire=0.0, call=0.0)
GPT = 10_925_184
MIB = 1 << 20
RATE = {"1 Gbit": 118.5e6, "100 Mbit": 11.85e6}


def job(seconds: float, hosts: int, rate: float, cores: float = 2.0, costs: Costs = COSTS) -> Job:
    compute = replace(Compute.even(GPT, seconds, 384), optimizer_state=2.0, cores=min(1.0, cores))
    return Job(compute, Machines((rate,) * hosts, 1e-4, 1, cores), costs)


def test_an_exposed_average_takes_what_the_wire_takes() -> None:
    """With one bucket nothing overlaps: computation, then 2 (n - 1) / n of the bytes over the link."""
    one = predict(job(0.2, 4, 1e8, costs=FREE), find("gradient_allreduce"), 1 << 40)
    flags = len(Compute.even(GPT, 0.2, 384).tensors)
    whole = 0.2 + 1.5 * 4 * (GPT + flags) / 1e8
    # The first bucket is of 1 MiB: it hides behind backward.
    assert one.seconds == pytest.approx(whole - 1.5 * MIB / 1e8, rel=0.02)
    assert one.nbytes == pytest.approx(1.5 * 4 * GPT, rel=0.002)


def test_a_fast_wire_costs_nothing_and_a_period_divides() -> None:
    assert predict(job(0.2, 4, 1e13, costs=FREE), find("gradient_allreduce"), 4 * MIB).seconds == (
        pytest.approx(0.2, rel=0.01)
    )
    pauses = [
        predict(job(0.2, 4, 1e8, costs=FREE), find("local_sgd", {"every": h}), MIB).seconds - 0.2
        for h in (4, 8)
    ]
    assert pauses[0] == pytest.approx(2 * pauses[1])


def test_communication_takes_processor_time_from_computation() -> None:
    """Half of a core for the link, and a core that computes already: a step is longer by half of the time
    that the link is busy. With a second core it costs nothing."""
    costs = replace(FREE, wire=0.5e-8)
    whole = find("async", {"fragments": 1})
    shared = predict(job(1.0, 2, 1e8, 1.0, costs), whole, MIB)
    assert shared.seconds == pytest.approx(1 + 0.5 * 4 * GPT / 1e8, rel=0.01)
    assert predict(job(1.0, 2, 1e8, 2.0, costs), whole, MIB).seconds == pytest.approx(1.0)


def test_a_slow_link_and_a_slow_rank_are_seen() -> None:
    fast = job(0.2, 4, 1e8)
    slow = replace(fast, machines=replace(fast.machines, rates=(1e8, 1e8, 2e7, 1e8)))
    name = find("gradient_allreduce")
    assert predict(slow, name, 4 * MIB).seconds > 1.5 * predict(fast, name, 4 * MIB).seconds
    late = replace(fast, compute=replace(Compute.even(GPT, 0.4, 384), typical=0.2))
    assert predict(late, find("async_low_precision"), MIB).seconds < 0.4
    assert predict(late, name, 4 * MIB).seconds > 0.4


@pytest.mark.parametrize("hosts", [2, 3, 4, 8])
@pytest.mark.parametrize("nbytes", [MIB, 3 * MIB])
def test_the_closed_form_agrees_with_the_simulator(hosts: int, nbytes: int) -> None:
    """Where both run; the simulator runs the schedules of the engine."""
    rates = (1.185e8,) * hosts
    form, simulated = (
        wire.closed_form(nbytes, rates, 1e-4).alone,
        wire.simulated(nbytes // 4, rates, 1e-4),
    )
    assert form == pytest.approx(simulated, rel=0.1)


def test_what_tune_has_measured_holds_for_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By recursive doubling each of 8 ranks sends the whole 3 times, by shards 7/8 of it twice."""
    seconds = {}
    for name, lines in (
        ("doubling", "8 16777216 -\n"),
        ("shards", "8 1024 -\n"),
        ("others", "4 16777216 -\n"),
    ):
        (tmp_path / name).write_text(lines)
        monkeypatch.setenv("TRIGRAM_TUNING", str(tmp_path / name))
        seconds[name] = _core.simulate_all_reduce(MIB // 8, 1e-5, [RATE["1 Gbit"]] * 8)
    assert seconds["doubling"] == pytest.approx(3 * MIB / 2 / RATE["1 Gbit"], rel=0.1)
    assert seconds["shards"] == pytest.approx(7 / 4 * MIB / 2 / RATE["1 Gbit"], rel=0.1)
    monkeypatch.setenv("TRIGRAM_TUNING", "off")
    assert seconds["others"] == _core.simulate_all_reduce(MIB // 8, 1e-5, [RATE["1 Gbit"]] * 8)


def test_unequal_links_agree_with_the_simulator() -> None:
    rates = (1e8, 1e8, 5e7, 1e8)
    form = wire.closed_form(4 * MIB, rates, 1e-4).alone
    assert form == pytest.approx(wire.simulated(MIB, rates, 1e-4), rel=0.1)


def table(heading: str) -> list[list[str]]:
    part = BENCHMARKS.read_text().partition(f"## {heading}")[2]
    rows = re.findall(r"^\| ([a-z_]+(?: alone)?)(?: \(.*?\))? \|(.*)\|$", part.partition("\n## ")[0], re.M)
    return [[name, *(cell.strip() for cell in cells.split("|"))] for name, cells in rows]


def test_the_published_step_times() -> None:
    """The table of docs/benchmarks.md, from its own compute-alone row and the costs above: median error below
    10 %."""
    rows = {row[0]: row[1:] for row in table("Step time between hosts")}
    errors = {}
    for column, (hosts, rate) in enumerate((h, r) for h in (2, 4) for r in RATE):
        alone = float(rows["compute alone"][2 * column]) / 1e3
        given = job(alone, hosts, RATE[rate], 2 / hosts)
        for entry in trigram.algorithms():
            name = entry["name"]
            if name in ("qadam", "lossless"):
                continue
            if not rows[name][2 * column]:
                continue  # not measured
            found = predict(given, find(name), 4 * MIB, averaged_state=name == "local_sgd")
            errors[name, hosts, rate] = found.seconds * 1e3 / float(rows[name][2 * column]) - 1
    assert len(errors) == 68
    assert statistics.median(map(abs, errors.values())) < 0.1
    assert max(map(abs, errors.values())) < 0.35, errors


def test_what_is_known_of_losses_is_what_was_measured() -> None:
    for name, *cells in table("Loss after the same number of samples"):
        if name.startswith(("ddp", "algorithm")):
            continue
        percent = [float(cell.split(" %")[0]) for cell in cells if "%" in cell]
        assert losses.LOSS_PERCENT[name] == tuple(percent), name
    # It has the bits of the default.
    assert {*losses.LOSS_PERCENT, "lossless"} == {entry["name"] for entry in trigram.algorithms()}


def test_exact_are_the_default_and_exact_codes() -> None:
    kinds = {name: losses.kind(find(name)) for name in choice.CANDIDATES}
    assert {name for name, kind in kinds.items() if kind == "exact"} == {"gradient_allreduce", "lossless"}
    with pytest.raises(trigram.UnsupportedError, match="depend on the gradients"):
        predict(job(0.2, 4, 1e8), find("lossless"), 4 * MIB)
    assert kinds["bytegrad"] == kinds["central/bf16/sync"] == "close"
    assert kinds["powersgd"] == kinds["async"] == kinds["local_sgd"] == kinds["topk"] == "different"


def test_exact_codes_send_what_was_seen_of_gradients() -> None:
    """To all others, or to the owners of shards and from there; and take the time of coding."""
    free = replace(FREE, exact=ExactCodes(1.5, 3.0, CodecCost(0.0, 0.0, 0.0)))
    for hosts, carried in ((2, 1.5), (4, 3 / 4 * (1.5 + 3.0))):
        found = predict(job(0.2, hosts, 1e7, costs=free), find("lossless"), 1 << 40)
        assert found.nbytes == pytest.approx(carried * GPT, rel=0.01)
        assert found.seconds == pytest.approx(0.2 + carried * GPT / 1e7, rel=0.05)
    slow = replace(free, exact=ExactCodes(1.5, 3.0, CodecCost(1e-8, 1e-8, 1e-8)))
    for hosts in (2, 4):
        coded, plain = (
            predict(job(0.2, hosts, 1e13, costs=of), find("lossless"), MIB) for of in (slow, free)
        )
        assert coded.seconds > plain.seconds + 1e-8 * GPT
        assert coded.memory == plain.memory > 4 * GPT
    assert choice.compare(job(0.2, 2, 1e7)).best["exact"].algorithm == "gradient_allreduce"
    assert (
        choice.compare(job(0.2, 2, 1e7, costs=replace(COSTS, exact=free.exact))).best["exact"].algorithm
        == "lossless"
    )


def test_a_sample_says_what_gradients_take() -> None:
    """Sixteen bits in disguise take half of 32 or less, others more than 0.8."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1 << 16, generator=generator)
    found = costs.exact(values.bfloat16().float(), values)
    assert 1.2 < found.own < 2.0 < 3.2 < found.mean < 4.1
    assert min(found.cost.encode, found.cost.decode, found.cost.accumulate) > 0


def test_recommendations_change_numerics_only_for_a_gain() -> None:
    slow = choice.compare(job(0.2, 4, 1.2e7))
    assert slow.best["exact"].algorithm == "gradient_allreduce"
    assert slow.best["close"].algorithm == "bytegrad"
    assert slow.best["any"].kind == "different"
    fast = choice.compare(job(0.2, 4, 1e10))
    assert {row.algorithm for row in fast.best.values()} == {"gradient_allreduce"}


def test_ten_thousand_ranks_take_seconds() -> None:
    began = time.process_time()
    many = job(0.4, 1250, 1.2e9)
    found = choice.compare(replace(many, machines=replace(many.machines, ranks_per_host=8)))
    # qadam is not compared, nor lossless without gradients.
    assert len(found.rows) == len(choice.CANDIDATES) - 2
    assert time.process_time() - began < 60  # a quadratic pattern takes many minutes


class _Plain(step._Thread):
    """Looks at all calls from the first on, whenever it computes."""

    def work(self, seconds: float) -> None:
        slow = step.slowdown(self.job, 1.0)
        for begin, end in self.calls:
            if slow > 1 and end > self.now:
                free = max(0.0, begin - self.now)
                if free >= seconds:
                    break
                self.now, seconds = self.now + free, seconds - free
                shared = min(seconds, (end - self.now) / slow)
                self.now, seconds = self.now + shared * slow, seconds - shared
        self.now += seconds


def _advance_all(gradients: step._Gradients) -> None:
    for bucket in gradients.buckets:
        if bucket.phase == 1 and not bucket.advance(gradients.thread):
            break


@pytest.mark.parametrize("rate", [1e7, 1e8, 1e9, 1e13])
@pytest.mark.parametrize("cores", [0.5, 1.0, 2.0])
def test_what_has_ended_is_not_looked_at_again(
    rate: float, cores: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions are, to the last digit, those of a model that looks at all calls and buckets each time."""
    given = [job(seconds, 4, rate, cores, costs) for seconds in (0.02, 0.4) for costs in (COSTS, FREE)]
    names = ["gradient_allreduce", "bytegrad", "topk", "signsgd", "powersgd", "local_sgd", "decentralized"]

    def predicted() -> list[object]:
        return [
            predict(one, find(name), size)
            for one in given
            for name in names
            for size in (64 << 10, MIB, 25 * MIB)
            if one.costs is COSTS or name in ("gradient_allreduce", "local_sgd", "decentralized")
        ]

    found = predicted()
    monkeypatch.setattr(step, "_Thread", _Plain)
    monkeypatch.setattr(step._Gradients, "_advance", _advance_all)
    assert found == predicted()


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad"])
def test_work_grows_with_the_number_of_buckets_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls and buckets are looked at a few times each."""

    class Counted(list[tuple[float, float]]):
        looks = 0

        def __getitem__(self, k: object) -> tuple[float, float]:  # type: ignore[override]
            Counted.looks += 1
            return super().__getitem__(k)  # type: ignore[index,return-value]

        def __iter__(self) -> Iterator[tuple[float, float]]:
            for pair in super().__iter__():
                Counted.looks += 1
                yield pair

    advances = 0
    advance = step._Bucket.advance

    def counted(bucket: step._Bucket, thread: step._Thread) -> bool:
        nonlocal advances
        advances += 1
        return advance(bucket, thread)

    monkeypatch.setattr(step._Thread, "__init__", _with_calls(Counted))
    monkeypatch.setattr(step._Bucket, "advance", counted)
    many = job(0.4, 2, 1e8, 0.5)
    many = replace(many, compute=replace(Compute.even(GPT, 0.4, 64), cores=1.0))
    predict(many, find(name), 16 << 10)
    count = len(many.compute.tensors)
    assert count > 2000
    assert Counted.looks + advances < 20 * count


def _with_calls(kind: Callable[[], list[tuple[float, float]]]) -> Callable[[step._Thread, Job], None]:
    def begin(thread: step._Thread, of: Job) -> None:
        thread.job, thread.now, thread.calls, thread.over = of, 0.0, kind(), 0
        thread.__post_init__()

    return begin


def test_what_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(trigram.UnsupportedError, match="robust"):
        predict(job(0.2, 4, 1e8), find("central:median/full/sync"), MIB)
    with pytest.raises(trigram.UnsupportedError, match="fp8"):
        predict(job(0.2, 4, 1e8), find("central/fp8/sync"), MIB)
    with pytest.raises(trigram.MisuseError, match="rates above 0"):
        Machines((1e8, 0.0))
