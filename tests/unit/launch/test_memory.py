"""Goal: what does not fit is refused with figures and advice that helps. Method: made-up machines."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from regrow.checks import DENSE_OPTIMIZERS, OPTIMIZERS
from regrow.config import TrainConfig
from regrow.errors import MemoryShort
from regrow.launch import memory
from regrow.units import GIB, MIB


def test_every_optimizer_has_a_size() -> None:
    """Adam keeps three floats where SGD keeps one; a row of row-wise Adagrad only one more."""
    shape = TrainConfig(model="kaggle").load_model()
    sizes = {name: memory.estimate_need(TrainConfig(optimizer=name), shape).tables for name in OPTIMIZERS}
    assert sizes["adam"] == pytest.approx(3 * sizes["sgd"], rel=0.15)
    assert sizes["adagrad"] == pytest.approx(2 * sizes["sgd"], rel=0.15)
    assert sizes["sgd"] < sizes["rowwise_adagrad"] < sizes["momentum"] < sizes["partial_rowwise_adam"]
    for name in DENSE_OPTIMIZERS:
        assert memory.estimate_need(TrainConfig(dense_optimizer=name), shape).tables > 0


def test_parities_and_spares_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, ...]] = []
    monkeypatch.setattr(memory._kernels, "shard_bytes", lambda *arguments: asked.append(arguments) or 1000)
    shape = TrainConfig(model="tiny").load_model()
    plain = memory.estimate_need(TrainConfig(servers=6), shape)
    coded = memory.estimate_need(TrainConfig(servers=6, protection="ec", k=2, r=1, rings=2), shape)
    assert {arguments[2:6] for arguments in asked} == {(1, 0, 1, 6), (2, 1, 2, 6)}
    assert coded.processes > plain.processes
    assert coded.tables > plain.tables  # the dense parameters, whole at another server


def machine(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: (available, "available on this machine"))


def test_advice_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever follows the advice gets through, and does not have to give up much more than needed."""
    machine(monkeypatch, 8 * GIB)
    config = TrainConfig(model="mlperf", rows_max=40_000_000)
    with pytest.raises(MemoryShort) as caught:
        memory.check(config)
    assert re.fullmatch(
        r"not enough memory: \S+ GiB needed \(\S+ GiB for the rows of 5 servers, \S+ GiB for processes\), "
        r"8\.0 GiB available on this machine",
        caught.value.message,
    )
    match = re.match(r"lower --rows-max \(now 40000000\) to (\d+),", caught.value.hint or "")
    assert match is not None
    cap = int(match[1])
    memory.check(config.replace(rows_max=cap))
    with pytest.raises(MemoryShort):
        memory.check(config.replace(rows_max=int(cap * 1.05)))


def test_advice_for_a_hungry_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 8 * GIB)
    config = TrainConfig(model="mlperf", optimizer="adam")
    with pytest.raises(MemoryShort) as caught:
        memory.check(config)
    assert (caught.value.hint or "").startswith("--optimizer rowwise_adagrad needs ")
    memory.check(config.replace(optimizer="rowwise_adagrad"))


def test_advice_for_too_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 1 * GIB)
    with pytest.raises(MemoryShort) as caught:
        memory.check(TrainConfig(model="tiny", workers=100))
    assert (caught.value.hint or "").startswith("lower --workers or --servers")


def test_spare_workers_are_counted_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 1 * GIB)
    config = TrainConfig(model="tiny", workers=2, servers=5, protection="ec", spare_workers=3)
    none = memory.estimate_need(config.replace(spare_workers=0), config.load_model())
    assert memory.estimate_need(config, config.load_model()).processes == none.processes + 3 * 400 * 2**20
    with pytest.raises(MemoryShort, match=r"1\.2 GiB of it for 3 spare worker") as caught:
        memory.check(config)
    assert (caught.value.hint or "").startswith("lower --spare-workers, --workers or --servers")


def test_machine_that_does_not_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "missing"
    assert memory.available_bytes(meminfo=missing, cgroup=missing, root=missing)[0] is None
    monkeypatch.setattr(memory, "available_bytes", lambda: (None, "known"))
    memory.check(TrainConfig(model="mlperf", rows_max=40_000_000))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_smallest_limit_counts(tmp_path: Path) -> None:
    """The machine has 8 GiB; an outer group, of either version, has less left."""
    meminfo, cgroup, root = tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "root"
    write(meminfo, f"MemTotal: 99 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    write(cgroup, "4:memory,other:/a/b\n3:cpu:/a\n0::/c/d\n")

    def left() -> tuple[int | None, str]:
        return memory.available_bytes(meminfo=meminfo, cgroup=cgroup, root=root)

    assert left() == (8 * GIB, "available on this machine")
    write(root / "memory.max", "max\n")
    write(root / "c/memory.max", f"{4 * GIB}\n")
    write(root / "c/memory.current", f"{2 * GIB}\n")
    write(root / "c/memory.stat", f"anon 1\ninactive_file {GIB}\n")
    assert left() == (3 * GIB, f"left in this container ({root}/c)")
    write(root / "memory/a/b/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(root / "memory/a/b/memory.usage_in_bytes", f"{GIB}\n")
    write(root / "memory/a/b/memory.stat", "total_inactive_file 0\n")
    assert left() == (GIB, f"left in this container ({root}/memory/a/b)")
    write(root / "memory/a/b/memory.limit_in_bytes", "9223372036854771712\n")
    assert left()[0] == 3 * GIB


def test_of_a_cache_only_what_rows_can_fill_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tiered: dict[str, Any] = {"model": "tiny", "store": "tiered", "store_dir": "d", "servers": 2}
    small, large, huge = (
        memory.estimate_need(config, config.load_model()).tables
        for config in (TrainConfig(cache_bytes=count, **tiered) for count in (MIB, 1 << 30, 1 << 45))
    )
    assert large == huge, "there are not so many rows"
    assert huge > small >= 2 * (MIB + memory.TIERED_BYTES)
    machine(monkeypatch, large + (8 << 30))
    memory.check(TrainConfig(cache_bytes=1 << 45, **tiered))
