"""Builds the wheels of a release, for x86_64 and aarch64, and audits the libraries in them.

Both libraries of a wheel are compiled with zig, whose linker binds them to the symbols of the glibc that the
wheel promises, however new that of this machine is. Needs requirements-dist.txt and Rust's targets.

    python tools/make_wheels.py [--out dist] [--target x86_64 --target aarch64]
"""

from __future__ import annotations

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from build_backend import PLUGIN, ROOT, build_plugin, described
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

GLIBC = (2, 28)
MOST_BYTES = 10_000_000
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
LIBRARIES = ("trigram/_core.abi3.so", "trigram/libnccl-net-trigram.so")
OURS = ("trigram", "nccl-rs")
"""What the crates of this repository begin with."""
SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s)\.so\.\d|ld-linux-[\w-]+\.so\.\d")
"""What every Linux with that glibc has."""


def build(machine: str, out: Path) -> Path:
    """Builds the wheel for a machine; returns its path."""
    target = f"{machine}-unknown-linux-gnu"
    glibc = ".".join(map(str, GLIBC))
    build_plugin(["cargo-zigbuild"], ["--target", f"{target}.{glibc}"])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "maturin", "build", "--release", "--locked", "--zig"]
        command += ["--target", target, "--compatibility", f"manylinux_{glibc.replace('.', '_')}"]
        with described():
            subprocess.run([*command, "--out", folder], cwd=ROOT, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, out / wheel.name))


def audit(wheel: Path, machine: str) -> list[str]:
    """What is wrong with a wheel."""
    wrong = []
    if wheel.stat().st_size > MOST_BYTES:
        wrong.append(f"{wheel.stat().st_size} bytes, more than {MOST_BYTES}")
    if not re.search(rf"-cp310-abi3-manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}\.whl$", wheel.name):
        wrong.append("its name promises another Python, glibc or machine")
    with zipfile.ZipFile(wheel) as archive:
        wrong += audit_words(archive)
        shared = {name for name in archive.namelist() if name.endswith(".so")}
        if shared != set(LIBRARIES):
            wrong.append(f"it has the libraries {sorted(shared)}")
        for name in sorted(shared):
            wrong += [f"{name}: {text}" for text in audit_library(archive.read(name), machine)]
    return wrong


def audit_words(archive: zipfile.ZipFile) -> list[str]:
    """What a wheel does not say: its commit, and the licence of each crate that its list of parts names."""
    names = archive.namelist()
    parts = [name for name in names if name.endswith(".cyclonedx.json")]
    missing = [name for name in ("trigram/COMMIT", "trigram/THIRD_PARTY_LICENSES.txt") if name not in names]
    if missing or not parts:
        return [f"it lacks {', '.join(missing) or 'a list of its parts'}"]
    said = archive.read("trigram/THIRD_PARTY_LICENSES.txt").decode()
    found = [c for name in parts for c in json.loads(archive.read(name))["components"]]
    crates = {f"{c['name']} {c['version']}" for c in found if not c["name"].startswith(OURS)}
    unnamed = sorted(crate for crate in crates if crate not in said)
    return [f"no licence is named of {', '.join(unnamed)}"] if unnamed else []


def audit_library(content: bytes, machine: str) -> list[str]:
    """What keeps a library from loading on any machine of this kind with that glibc."""
    elf, wrong = ELFFile(io.BytesIO(content)), []
    if elf["e_machine"] != MACHINES[machine]:
        wrong.append(f"compiled for {elf['e_machine']}")
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            needed = [tag.needed for tag in section.iter_tags("DT_NEEDED")]
            wrong += [f"needs {library}" for library in needed if not SYSTEM.fullmatch(library)]
        if isinstance(section, GNUVerNeedSection):
            for _, versions in section.iter_versions():
                names = [version.name for version in versions]
                glibc = [name for name in names if name.startswith("GLIBC_")]
                newer = [n for n in glibc if tuple(map(int, n[6:].split("."))) > GLIBC]
                wrong += [f"needs {name}" for name in newer]
    return wrong


def main() -> int:
    """Builds and audits; returns 1 if something is wrong with a wheel."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--target", action="append", choices=sorted(MACHINES))
    args = parser.parse_args()
    kept = PLUGIN.read_bytes() if PLUGIN.exists() else None
    status = 0
    try:
        for machine in args.target or MACHINES:
            wheel = build(machine, args.out)
            subprocess.run([sys.executable, "-m", "auditwheel", "show", str(wheel)], check=True)
            wrong = audit(wheel, machine)
            print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB: {'; '.join(wrong) or 'in order'}")
            status |= bool(wrong)
    finally:
        if kept is not None:  # that of this machine, for `pip install -e`
            fresh = PLUGIN.with_suffix(".new")
            fresh.write_bytes(kept)
            fresh.chmod(0o755)
            fresh.rename(PLUGIN)
    return status


if __name__ == "__main__":
    sys.exit(main())
