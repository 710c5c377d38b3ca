"""Runs the tests and measurements that need a GPU, in stages, and writes one page: what passed, and the
figures beside their bars.

    python3 tools/gpu_report.py [--stages kernels,codecs] [--out gpu-report-out] [--rehearse]

The machine needs torch with Triton, a C compiler (for Triton's launchers), and what is in `dist/`: the wheel
of trigram and those of pytest (`make wheel-gpu`). The wheels are unpacked beside the tree, so that neither
pip nor a network is needed. A stage that fails or outlasts its limit does not keep the others from running.
Each writes what it has found as it goes: the page, `report.md`, is written anew after each stage, from all
that the folder holds, also of earlier runs of other stages. `--within` leaves out the stages that no longer
fit in so many seconds. `--together` runs them at the same time, which is shorter where there are processors
enough; their times then mean nothing.

`--rehearse` does all this without a GPU, with small sizes: tensors of the CPU over a stand-in for NCCL and
interpreted kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
UNPACKED = ROOT / ".gpu"
PYTEST = [
    "-m",
    "pytest",
    "-v",
    "-o",
    "addopts=",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:timeout",
    "-m",
    "gpu",
    "--tb=short",
]
ABSENT = ["typer", "rich", "sklearn", "matplotlib", "pytest_timeout"]
"""What a machine with a GPU may lack, and a rehearsal does without."""
ON_GPU = "tests/gpu/test_on_gpu.py"
NCCL, HOST = (f"(trains or learns) and {way}" for way in ("not host", "host"))
FAULTS = "errors or elastic or levels or backend"
VERDICT = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b", re.MULTILINE)
TAIL = 40
"""Lines of the log of a stage that failed, on the page."""


@dataclass(frozen=True)
class Stage:
    """One part of the report: a run of `python`, which fits in ten minutes.

    Attributes:
        name: How it is asked for.
        what: What it shows.
        argv: The arguments of `python`.
        rehearsed: Those in a rehearsal, where sizes are small.
    """

    name: str
    what: str
    argv: list[str]
    rehearsed: list[str]


def _tests(name: str, what: str, path: str, chosen: str, rehearsed: str) -> Stage:
    return Stage(name, what, [*PYTEST, path, "-k", chosen], [*PYTEST, path, "-k", rehearsed])


def _script(name: str, what: str, script: str, small: str) -> Stage:
    return Stage(name, what, [f"benches/{script}"], [f"benches/{script}", *small.split()])


STAGES = [
    Stage(
        "machine",
        "versions; a kernel; a sum",
        ["tools/gpu_report.py", "--probe"],
        ["tools/gpu_report.py", "--probe"],
    ),
    _tests(
        "collectives",
        "collectives, graphs, the plugin, a death",
        ON_GPU,
        "collectives or plugin or killed",
        "killed or (collectives and 2-host)",
    ),
    _tests(
        "kernels",
        "codecs, bit for bit",
        "tests/codecs/test_triton.py",
        "test_bits",
        "places-bf16 or places-int8",
    ),
    _tests("faults", "errors, losses of ranks, two levels", ON_GPU, FAULTS, "errors or elastic or levels"),
    _script("codecs", "codecs beside a copy", "gpu_codecs.py", "--sizes 0.02 --codecs bf16,int8"),
    _script(
        "overlap",
        "with_bagua beside DDP over NCCL",
        "gpu_overlap.py",
        "--width 16 --layers 2 --batch 4 --steps 3 --rounds 2 --waits 3",
    ),
    _tests("training", "algorithms by NCCL as on the CPU, as DDP", ON_GPU, NCCL, "trains_as_ddp"),
    _tests("training-host", "algorithms through the host", ON_GPU, HOST, "bytegrad and host"),
    _script(
        "network",
        "codecs over TCP beside NCCL over TCP",
        "gpu_network.py",
        "--mib 0.02 --codecs int8,sign --rounds 1",
    ),
    _script(
        "plugin",
        "NCCL through the plugin beside its sockets",
        "gpu_plugin.py",
        "--mib 0.02 --streams 1 --rounds 1 --calls 2",
    ),
    _script(
        "elastic",
        "a new communicator after a loss, beside NCCL's shrink",
        "gpu_elastic.py",
        "--width 16 --layers 2 --steps 9 --rounds 1",
    ),
]
NAMES = [stage.name for stage in STAGES]


def unpack() -> None:
    """Unpacks the wheels of `dist/`; without any, trigram is that of the tree."""
    fitting = ("-any.whl", f"_{platform.machine()}.whl")
    shutil.rmtree(UNPACKED, ignore_errors=True)
    for wheel in sorted(w for w in (ROOT / "dist").glob("*.whl") if w.name.endswith(fitting)):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(UNPACKED)


def environment(rehearse: bool, figures: Path) -> dict[str, str]:
    """The environment of a stage."""
    first = [str(ROOT / "python")] if rehearse or not (UNPACKED / "trigram").exists() else [str(UNPACKED)]
    if rehearse:
        first.append(str(without(figures.parent / "absent")))
    paths = [*first, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH", "")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRIGRAM_FIGURES": str(figures)}
    env |= {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "4"}
    if rehearse:
        env |= stand_in(figures.parent) | {
            "TRIGRAM_REHEARSAL": "1",
            "TRITON_INTERPRET": "1",
            "OMP_NUM_THREADS": "1",
        }
    return env


def without(folder: Path) -> Path:
    """A folder of modules that cannot be imported."""
    folder.mkdir(exist_ok=True)
    for name in ABSENT:
        (folder / f"{name}.py").write_text('raise ImportError("this is a rehearsal without it")\n')
    return folder


def stand_in(out: Path) -> dict[str, str]:
    """Compiles the stand-in for NCCL and the driver, once; the variables by which it is found."""
    library, source = out / "libstandin.so", ROOT / "rust/nccl/tests/standin"
    if not library.exists():
        sources = [str(source / name) for name in ("cuda.c", "nccl.c")]
        command = ["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", str(library), *sources, "-lrt"]
        subprocess.run(command, check=True)
    return {"TRIGRAM_NCCL_LIB": str(library), "TRIGRAM_CUDA_LIB": str(library)}


class Running:
    """A stage that runs; it writes its figures and its log as it goes, and `end` how it ended."""

    def __init__(self, stage: Stage, out: Path, limit: float, rehearse: bool) -> None:
        self.name, self.limit, self.began = stage.name, limit, time.monotonic()
        self.log, figures = out / f"{stage.name}.log", out / f"{stage.name}.figures"
        figures.write_text("")
        self.kept = out / f"{stage.name}.json"
        self.result: dict[str, Any] = {"state": "started", "limit": limit, "rehearsal": rehearse}
        self.kept.write_text(json.dumps(self.result))
        argv = stage.rehearsed if rehearse else stage.argv
        with self.log.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, *argv],
                cwd=ROOT,
                env=environment(rehearse, figures),
                stdout=said,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def end(self) -> bool:
        """Waits until the stage has ended, at most for what is left of its limit; whether it passed."""
        try:
            code = self.process.wait(max(0.0, self.limit - (time.monotonic() - self.began)))
            state = "passed" if code == 0 else f"failed (exit code {code})"
            verdicts = {v for _, v in VERDICT.findall(self.log.read_text(errors="replace"))}
            if code == 0 and verdicts == {"SKIPPED"}:
                state = "failed (all tests were skipped)"
        except subprocess.TimeoutExpired:
            state = f"ended after {self.limit:.0f} s"
        finally:
            self.kill()
        seconds = round(time.monotonic() - self.began, 1)
        self.kept.write_text(json.dumps(self.result | {"state": state, "seconds": seconds}))
        print(f"{self.name}: {state}, {seconds} s", flush=True)
        return state == "passed"

    def kill(self) -> None:
        """Kills the stage with all its ranks, whatever ends it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def read_figures(file: Path) -> tuple[list[dict[str, Any]], int]:
    """The figures of a stage, and how many lines are none: a stage that is killed may leave half a line."""
    figures, unread = [], 0
    for line in file.read_text(errors="replace").splitlines():
        try:
            figures.append(json.loads(line))
        except ValueError:
            unread += 1
    return figures, unread


def page(out: Path) -> str:
    """The page, from what the stages have left in the folder."""
    rows, figures, tails = [], [], []
    for stage in STAGES:
        kept = out / f"{stage.name}.json"
        if not kept.exists():
            rows.append(f"| {stage.name} | {stage.what} | not run | | |")
            continue
        result = json.loads(kept.read_text())
        log = (out / f"{stage.name}.log").read_text(errors="replace")
        verdicts = dict(VERDICT.findall(log))
        counts = {v: list(verdicts.values()).count(v) for v in ("PASSED", "FAILED", "ERROR", "SKIPPED")}
        told = ", ".join(f"{n} {v.lower()}" for v, n in counts.items() if n)
        lines, unread = read_figures(out / f"{stage.name}.figures")
        held = [line for line in lines if line["least"] is not None]
        missed = [line for line in held if not line["value"] >= line["least"]]
        if held:
            told = f"{told}; " * bool(told) + f"{len(held) - len(missed)} of {len(held)} bars reached"
        if unread:
            told = f"{told}; " * bool(told) + f"lines of figures left out: {unread}"
        rows.append(
            f"| {stage.name} | {stage.what} | {result['state']} | {result.get('seconds', '')} | {told} |"
        )
        for line in lines:
            value, bar = line["value"], "" if line["least"] is None else f"{line['least']:g}"
            shown = value if isinstance(value, str) else f"{value:.4g}"
            verdict = "" if line["least"] is None else "no" if line in missed else "yes"
            figures.append(f"| {stage.name} | {line['what']} | {shown} {line['unit']} | {bar} | {verdict} |")
        if result["state"] != "passed":
            failed = [name for name, verdict in verdicts.items() if verdict in ("FAILED", "ERROR")]
            tails += ["", f"## {stage.name}: {result['state']}", "", *(f"* `{name}`" for name in failed)]
            tails += ["", "```", *log.splitlines()[-TAIL:], "```"]
    rehearsed = [json.loads(f.read_text()).get("rehearsal") for f in out.glob("*.json")]
    head = [
        "# GPU report",
        "",
        f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC, `tools/gpu_report.py`",
    ]
    if any(rehearsed):
        head += ["", "**A rehearsal without a GPU: the times mean nothing.**"]
    head += ["", "| stage | what | state | seconds | tests and bars |", "|---|---|---|---:|---|", *rows]
    head += ["", "| stage | figure | value | at least | reached |", "|---|---|---|---:|---|", *figures]
    return "\n".join([*head, *tails]) + "\n"


def probe() -> None:
    """The stage `machine`: what is installed, then the least that a kernel and a sum need."""
    sys.path.insert(0, str(ROOT / "benches"))
    import gpu_ranks
    import torch
    from figures import Figures

    import trigram

    figures = Figures()
    figures.add("Python", sys.version.split()[0])
    figures.add("torch", torch.__version__)
    figures.add("torch's CUDA", str(torch.version.cuda))
    figures.add("processors", float(os.cpu_count() or 0))
    for package in ("triton", "numpy", "pytest"):
        try:
            figures.add(package, str(__import__(package).__version__))
        except ImportError:
            figures.add(package, "missing")
    compiler = next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)
    figures.add("a C compiler, which Triton's launchers need", compiler or "missing")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    figures.add("Python.h, which they need too", "there" if header.exists() else f"missing: {header}")
    figures.add("trigram", f"{trigram.__version__} at {Path(trigram.__file__).parent}")
    plugin = Path(trigram.__file__).parent / "libnccl-net-trigram.so"
    figures.add("network plugin", "there" if plugin.exists() else "missing")
    gpu_ranks.needs_gpu()
    figures.add("GPU", torch.cuda.get_device_name())
    figures.add("GPUs", float(torch.cuda.device_count()))
    from trigram import _core
    from trigram.gpu.nccl import library

    nccl = library()
    figures.add("NCCL", f"{nccl.version}: {nccl.path}")
    figures.add("CUDA devices by the driver", str(_core.gpus()))
    smi = shutil.which("nvidia-smi")
    if smi:
        query = [smi, "--query-gpu=driver_version,compute_mode,mig.mode.current", "--format=csv,noheader"]
        figures.add(
            "driver, compute mode, MIG",
            subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip(),
        )
    device = gpu_ranks.device()
    from trigram import codecs
    from trigram.codecs.registry import find_kernel

    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    code = torch.empty(codecs.find("int8").size(1000), dtype=torch.uint8, device=device)
    find_kernel("int8").encode(x.to(device), code)
    same = torch.equal(code.cpu(), codecs.find("int8").encode(x))
    figures.add("int8 of 1000 values: the CPU's bytes", float(same), "1 is yes", 1)
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(gpu_ranks.free_port()),
    }
    os.environ["TRIGRAM_GPU_TRANSPORT"] = "nccl"
    total = torch.ones(1000, device=device)
    trigram.all_reduce(total)
    torch.cuda.synchronize()
    figures.add(
        "all_reduce of one rank over NCCL: the right sum", float(float(total.sum()) == 1000), "1 is yes", 1
    )
    trigram.shutdown()


def main() -> int:
    """Runs the stages; returns 0 if all that ran passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--stages", default=",".join(NAMES), help="with commas or spaces: " + ", ".join(NAMES)
    )
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-report-out")
    parser.add_argument("--limit", type=float, default=540, help="seconds of a stage")
    parser.add_argument("--within", type=float, default=0, help="seconds of all stages; 0: no limit")
    parser.add_argument("--together", action="store_true", help="at the same time; times mean nothing")
    parser.add_argument("--rehearse", action="store_true", help="without a GPU")
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        probe()
        return 0
    asked = re.split(r"[,\s]+", options.stages.strip())
    if unknown := sorted(set(asked) - set(NAMES)):
        parser.error(f"there is no stage {', '.join(unknown)}; there are {', '.join(NAMES)}")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    began, passed = time.monotonic(), True
    if options.rehearse:
        stand_in(options.out)
    else:
        unpack()
    running: list[Running] = []
    try:
        for stage in STAGES:
            if stage.name not in asked:
                continue
            left = options.within - (time.monotonic() - began) if options.within else options.limit
            if left <= 0:
                print(f"{stage.name}: no time is left", flush=True)
                passed = False
                continue
            running.append(Running(stage, options.out, min(options.limit, left), options.rehearse))
            if not options.together:
                passed &= running[0].end()
                running.pop()
                (options.out / "report.md").write_text(page(options.out))
        while running:
            passed &= running[0].end()
            running.pop(0)
            (options.out / "report.md").write_text(page(options.out))
    finally:
        for stage_left in running:
            stage_left.kill()
    print(options.out / "report.md")
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
