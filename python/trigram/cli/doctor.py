"""`trigram doctor`: checks what this machine has for training, and runs two ranks on it."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import platform
import resource
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from trigram._core import interfaces
from trigram.cli.trials import crossover, trial
from trigram.errors import UnsupportedError
from trigram.gpu import nccl
from trigram.runtime import far_links

Status = Literal["ok", "warn", "fail"]
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}

_SHORT_SECRET = 16
"""A job secret of fewer characters can be guessed."""

_LONG_TRIP, _LONG_RATE = 0.1, 1000.0
"""Seconds of a round trip between sites, and the Mbit/s of a fast link."""

PLUGIN = Path(__file__).resolve().parent.parent / "libnccl-net-trigram.so"


class Check(NamedTuple):
    """One line of the report."""

    name: str
    status: Status
    found: str
    advice: str = ""


def run(as_json: bool = False, report: bool = False) -> int:
    """Prints what was found.

    Args:
        as_json: As JSON.
        report: As plain text for a bug report.

    Returns:
        The exit code: 1 if a check failed, 0 otherwise, also with warnings.
    """
    if as_json or report:
        found = list(checks())
        typer.echo(json.dumps([c._asdict() for c in found], indent=1) if as_json else as_text(found))
        return int(any(check.status == "fail" for check in found))
    console = Console()
    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("")
    table.add_column("what", no_wrap=True)
    table.add_column("found", overflow="fold")
    table.add_column("what to do", overflow="fold")
    with console.status("running two ranks over shared memory and over TCP ..."):
        found = list(checks())
    for check in found:
        colour = COLOURS[check.status]
        table.add_row(f"[{colour}]{check.status}[/]", check.name, escape(check.found), escape(check.advice))
    console.print(table)
    if PLUGIN.exists():
        # Not wrapped, so that users can copy the lines.
        console.print("To let NCCL use Trigram's network transport, in any program (docs/gpu.md):")
        console.print(f"  export NCCL_NET_PLUGIN={PLUGIN}\n  export NCCL_NET=Trigram\n", soft_wrap=True)
    if not any(check.status == "fail" for check in found):
        with console.status("measuring each all_reduce schedule over shared memory and over TCP ..."):
            schedules = crossover()
        console.print(schedules)
    return int(any(check.status == "fail" for check in found))


def as_text(found: list[Check]) -> str:
    """Lines for a bug report, with what else one asks for: the kernel, and how torch was built."""
    build = {"linux": platform.release(), "torch built with": torch.version.cuda or "no CUDA"}
    build |= {"threads": str(torch.get_num_threads()), "libc": " ".join(platform.libc_ver())}
    lines = [f"{name}: {said}" for name, said in build.items()]
    lines += [f"{c.status:4} {c.name}: {c.found}" + (f"  ({c.advice})" if c.advice else "") for c in found]
    return "\n".join(["```text", *lines, "```"])


def checks() -> Iterator[Check]:
    """All checks, in the order of the report."""
    yield from software()
    yield from hardware()
    yield from shared_memory()
    yield from limits()
    yield from network()
    yield from far()
    yield from environment()
    yield from accelerators()
    for transport in ("shm", "tcp"):
        result = trial(transport)
        yield Check(
            f"2 ranks over {transport}", "ok" if result.correct else "fail", result.found, result.advice
        )


def software() -> Iterator[Check]:
    """Versions, and the backends of torch.distributed."""
    yield Check("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Check("torch", "ok", torch.__version__)
    try:
        yield Check("trigram", "ok", version("trigram"))
    except PackageNotFoundError:
        yield Check("trigram", "warn", "can be imported, but is not installed", "pip install trigram")
    if not dist.is_available():
        advice = "install a torch built with USE_DISTRIBUTED=1: ranks find each other through its Store"
        yield Check("torch.distributed", "fail", "not built in", advice)
        return
    built = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    yield Check(
        "torch.distributed", "ok", ", ".join(name for name, there in built.items() if there) or "no backends"
    )


def hardware() -> Iterator[Check]:
    """Cores, the CPU limit of the container, and memory."""
    usable, quota = len(os.sched_getaffinity(0)), _cpu_quota()
    found = f"{usable} usable of {os.cpu_count()}"
    if quota is not None and quota < usable:
        advice = f"start at most {max(1, int(quota))} ranks, or raise the container's CPU limit"
        yield Check("cores", "warn", f"{found}, limited to {quota:g} by the control group (cgroup)", advice)
    else:
        yield Check("cores", "ok", found)
    lines = (line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    memory = {name: int(value.split()[0]) * 1024 for name, value in lines}
    free = memory["MemAvailable"]
    low = free < 1 << 30
    yield Check(
        "memory",
        "warn" if low else "ok",
        f"{decimal(free)} free of {decimal(memory['MemTotal'])}",
        "end other processes: less than 1 GiB is free" if low else "",
    )


def shared_memory() -> Iterator[Check]:
    """memfd_create, with which ranks of one host share memory, and /dev/shm, which data loaders use."""
    try:
        descriptor = os.memfd_create("trigram-doctor")
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            mmap.mmap(descriptor, mmap.PAGESIZE).close()
        finally:
            os.close(descriptor)
        yield Check("memfd_create", "ok", "works")
    except OSError as error:
        advice = "allow memfd_create in the sandbox's seccomp profile, or set TRIGRAM_TRANSPORT=tcp"
        yield Check("memfd_create", "fail", str(error), advice)
    try:
        room = os.statvfs("/dev/shm")
    except OSError as error:
        yield Check("/dev/shm", "warn", str(error), "mount a tmpfs there: torch's DataLoader workers need it")
        return
    size = room.f_frsize * room.f_blocks
    small = size < 256 << 20
    advice = "trigram does not use it, but DataLoader workers do: docker run --shm-size=1g" if small else ""
    yield Check("/dev/shm", "warn" if small else "ok", decimal(size), advice)


def limits() -> Iterator[Check]:
    """Open files and locked memory."""
    files, hardest = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= files < 1024
    yield Check(
        "open files",
        "warn" if few else "ok",
        f"{_limit(files)}, can be raised to {_limit(hardest)}",
        "run ulimit -n 4096: each peer needs several sockets" if few else "",
    )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    tight = torch.cuda.is_available() and 0 <= locked < 64 << 20
    yield Check(
        "locked memory",
        "warn" if tight else "ok",
        "unlimited" if locked == resource.RLIM_INFINITY else decimal(locked),
        "run ulimit -l unlimited: NCCL pins memory for InfiniBand" if tight else "",
    )


def network() -> Iterator[Check]:
    """The interfaces with their addresses, and whether TRIGRAM_IFACE is one of them."""
    addresses: dict[str, list[str]] = {}
    for name, address in interfaces():
        addresses.setdefault(name, []).append(address)
    for name, known in addresses.items():
        state, speed = _interface_file(name, "operstate"), _interface_file(name, "speed")
        rate = f", {speed} Mbit/s" if speed.isdigit() else ""
        yield Check(f"interface {name}", "ok", f"{', '.join(known)} ({state or 'state unknown'}{rate})")
    if not set(addresses) - {"lo"}:
        yield Check(
            "network",
            "warn",
            "loopback only",
            "add a network interface: ranks on other hosts cannot reach this one",
        )
    for chosen in filter(None, map(str.strip, os.environ.get("TRIGRAM_IFACE", "").split(","))):
        if chosen not in addresses and chosen not in itertools.chain(*addresses.values()):
            advice = f"set it to one of {', '.join(addresses)}, or several with commas, or unset it"
            yield Check(
                "TRIGRAM_IFACE", "fail", f"{chosen}: this host has no such interface or address", advice
            )
        elif _interface_file(chosen, "operstate") == "down":
            advice = f"connect its cable and set it up (ip link set {chosen} up), or leave it out"
            yield Check("TRIGRAM_IFACE", "fail", f"{chosen}: the interface is down", advice)


def far() -> Iterator[Check]:
    """What links between sites need: a congestion control that bears losses, and large buffers."""
    if far_links.is_usable(far_links.BBR):
        yield Check("far links", "ok", "BBR for links whose answers take 2 ms or more")
    else:
        advice = f"as root, if ranks are in different places: {far_links.remedy(far_links.BBR)}"
        found = f"no BBR ({', '.join(far_links.controls())}): each lost packet costs much of the rate"
        yield Check("far links", "warn", found, advice)
    bytes_ = far_links.most_in_flight()
    if bytes_:
        megabits = far_links.STREAMS * bytes_ * 8 / _LONG_TRIP / 1e6
        found = f"{decimal(bytes_)} under way in each: {megabits:.0f} Mbit/s by {far_links.STREAMS} at 100 ms"
        small = megabits < _LONG_RATE
        advice = (
            'as root, for fast links between sites: sysctl -w net.ipv4.tcp_wmem="4096 16384 16777216" '
            'net.ipv4.tcp_rmem="4096 131072 33554432"'
        )
        yield Check("socket buffers", "ok", found, advice if small else "")


def environment() -> Iterator[Check]:
    """The variables that change how trigram runs."""
    chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith("TRIGRAM_")}
    transport = chosen.get("TRIGRAM_TRANSPORT", "auto")
    if transport not in ("auto", "shm", "tcp"):
        yield Check("TRIGRAM_TRANSPORT", "fail", transport, "set it to auto, shm or tcp")
    yield from security(chosen.pop("TRIGRAM_SECRET", None), chosen.get("TRIGRAM_TLS", ""))
    yield Check(
        "TRIGRAM_*", "ok", ", ".join(f"{name}={value}" for name, value in chosen.items()) or "none set"
    )


def security(secret: str | None, tls: str) -> Iterator[Check]:
    """Whether ranks authenticate with a secret, which is never printed, and encrypt between hosts."""
    make = "set TRIGRAM_SECRET to the same value on all ranks; openssl rand -hex 32 prints a good one"
    if secret is None:
        yield Check("job secret", "ok", "none: ranks trust every process that can read the store", make)
    elif not secret:
        yield Check("job secret", "fail", "TRIGRAM_SECRET is empty", f"unset it, or {make}")
    elif len(secret) < _SHORT_SECRET:
        yield Check("job secret", "warn", f"set, but shorter than {_SHORT_SECRET} characters", make)
    else:
        yield Check("job secret", "ok", "set")
    if tls not in ("", "0", "1"):
        yield Check("TLS between hosts", "fail", f"TRIGRAM_TLS={tls}", "set it to 1 or 0")
    elif tls == "1" and secret is None:
        advice = (
            "set TRIGRAM_SECRET too: without it, a process that can read the store can intercept connections"
        )
        yield Check("TLS between hosts", "warn", "on, without a secret", advice)
    else:
        yield Check("TLS between hosts", "ok", "on" if tls == "1" else "off")


def accelerators() -> Iterator[Check]:
    """GPUs, access between them, NCCL, and the plugin for its network."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = ", ".join(torch.cuda.get_device_name(index) for index in range(gpus))
    yield Check("GPUs", "ok", found or "none: training and communication run on the CPU")
    if gpus > 1:
        both = [(a, b) for a in range(gpus) for b in range(gpus) if a != b]
        apart = [f"{a}-{b}" for a, b in both if not torch.cuda.can_device_access_peer(a, b)]
        advice = "data between these GPUs goes through host memory: check the virtual machine or the IOMMU"
        yield Check(
            "peer access",
            "warn" if apart else "ok",
            f"none between {', '.join(apart)}" if apart else "between all",
            advice if apart else "",
        )
    try:
        library = nccl.library()
        yield Check("NCCL", "ok", f"{library.version}, {library.path}")
    except UnsupportedError as reason:
        advice = (
            "install a CUDA build of torch: without NCCL, GPU tensors go through host memory" if gpus else ""
        )
        yield Check("NCCL", "warn" if gpus else "ok", str(reason) if gpus else "none", advice)
    if PLUGIN.exists():
        yield Check("NCCL plugin", "ok", "installed; the commands that enable it are below")
    else:
        yield Check(
            "NCCL plugin",
            "warn",
            "not installed",
            "reinstall trigram from its wheel, which contains the plugin",
        )


def _cpu_quota() -> float | None:
    """The cores that the control group (version 2) allows; None: no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _interface_file(interface: str, name: str) -> str:
    try:
        return (Path("/sys/class/net") / interface / name).read_text().strip()
    except OSError:  # a virtual interface has no speed
        return ""
