"""`trigram.launch`: a function on several ranks, from a script or a notebook."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import trigram
from tests.support import patience
from tests.support.harness import ROOT, run, until
from tests.support.marks import long
from trigram.runtime import launch

pytestmark = pytest.mark.waits


def _sums(scale: float) -> tuple[int, float, str]:
    t = torch.tensor([scale * (trigram.rank() + 1)])
    trigram.all_reduce(t)
    print("rank", trigram.rank(), "of", trigram.world_size())
    return trigram.rank(), float(t), os.environ.get("OF_THE_TEST", "")


def test_results_come_back_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    results = trigram.launch(_sums, 2.0, ranks=2, environment={"OF_THE_TEST": "told"})
    assert results == [(r, 6.0, "told") for r in range(2)]
    assert sorted(capfd.readouterr().out.splitlines()) == [f"[{r}] rank {r} of 2" for r in range(2)]


@pytest.mark.long
def test_what_a_function_encloses_travels_with_it() -> None:
    net = torch.nn.Linear(4, 1)
    start = net.weight.detach().clone()

    def train(steps: int) -> torch.Tensor:
        model = trigram.with_bagua(net)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.full((2, 4), float(trigram.rank()))).sum().backward()
            optimizer.step()
        return net.weight.detach().clone()

    first, second = trigram.launch(train, 3)
    assert torch.equal(first, second) and not torch.equal(first, start)
    assert torch.equal(net.weight, start), "the model of this process is its own"


def _fails(rank: int) -> None:
    if trigram.rank() == rank:
        raise ValueError("of the test")
    trigram.barrier()


def test_the_rank_that_has_failed_is_named() -> None:
    """Not one of those that wait for it and lose it, which also fail."""
    with pytest.raises(trigram.LaunchError, match=r"rank 1 failed") as caught:
        trigram.launch(_fails, 1, ranks=3)
    assert isinstance(caught.value.__cause__, ValueError)
    assert "ValueError: of the test" in str(caught.value) and "in _fails" in str(caught.value)


def _dies(code: int) -> None:
    trigram.init()
    if trigram.rank() == 1 and code < 0:
        os.kill(os.getpid(), -code)
    if trigram.rank() == 1 and code == 5:
        sys.exit(code)
    if trigram.rank() == 1:
        os._exit(code)
    trigram.barrier()


def _sleeps() -> None:
    trigram.init()
    time.sleep(300)


@pytest.mark.parametrize(
    "code, says",
    [
        (7, "exit code 7"),
        long(5, "exit code 5"),
        long(-9, "SIGKILL"),
        long(124, "code 124"),
        long(130, "code 130"),
    ],
)
def test_a_rank_that_dies_is_the_cause(code: int, says: str) -> None:
    """Not the one that waits for it."""
    with pytest.raises(trigram.LaunchError, match=f"launch: rank 1 .*{says}"):
        trigram.launch(_dies, code)


def _ends(how: str) -> Any:
    trigram.init()
    if trigram.rank() == 1 and how == "exit":
        sys.exit(0)
    if trigram.rank() == 1 and how == "at once":
        os._exit(0)
    return "result"


@pytest.mark.long
def test_a_rank_may_end_by_exit() -> None:
    assert trigram.launch(_ends, "exit") == ["result", None]


def test_a_rank_that_has_no_result_is_named() -> None:
    with pytest.raises(trigram.LaunchError, match="rank 1 has ended without a result"):
        trigram.launch(_ends, "at once")


def _fails_with_a_thread() -> None:
    trigram.init()
    if trigram.rank() == 1:
        threading.Thread(target=time.sleep, args=(300,)).start()
        raise ValueError("of the test")
    trigram.barrier()


def test_a_thread_does_not_keep_a_rank_that_has_failed() -> None:
    with pytest.raises(trigram.LaunchError, match="rank 1 failed"):
        trigram.launch(_fails_with_a_thread, timeout=100)


def _says_much() -> None:
    sys.stdout.buffer.write("caf\u00e9 \U0001f600\n".encode() + b"\xff\n")
    print("the end")


@pytest.mark.parametrize("encoding", ["ascii", long("utf-8")])
def test_what_cannot_be_written_here_ends_no_rank(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding=encoding))
    trigram.launch(_says_much)
    assert shown.getvalue().count(b"the end") == 2


class _TwoArguments(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} {two}")


def _returns_an_error() -> Exception:
    return _TwoArguments(1, 2)


@pytest.mark.long
def test_a_result_that_cannot_be_made_again() -> None:
    with pytest.raises(trigram.LaunchError, match="rank 0 has returned cannot be made again here"):
        trigram.launch(_returns_an_error)


@pytest.mark.long
def test_the_time_is_limited() -> None:
    with pytest.raises(trigram.LaunchError, match=r"timeout=6"):
        trigram.launch(_sleeps, timeout=6)


@pytest.mark.parametrize("timeout", ["5", 0, -1.0, float("nan")])
def test_a_limit_that_is_none(timeout: Any) -> None:
    with pytest.raises(trigram.MisuseError, match="is no positive number of seconds"):
        trigram.launch(_sleeps, timeout=timeout)


def test_signals_have_names_or_numbers() -> None:
    assert launch.signal_name(9) == "SIGKILL" and launch.signal_name(40) == "40"


@pytest.mark.long
def test_from_another_thread() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(trigram.launch(_sums, 1.0)))
    thread.start()
    thread.join(120)
    assert [r for r, *_ in found] == [0, 1]


def _returns_a_lock() -> Any:
    return threading.Lock()


@pytest.mark.parametrize(
    "call, says",
    [
        (lambda: trigram.launch(_sums, threading.Lock()), "cannot be sent to another process"),
        (lambda: trigram.launch(_sums, 1.0, ranks=0), "ranks=0"),
        (lambda: trigram.launch(_sums, 1.0, ranks=True), "ranks=True"),
        (lambda: trigram.launch("train"), "pass a function"),
    ],
)
def test_what_cannot_be_launched(call: Any, says: str) -> None:
    with pytest.raises(trigram.MisuseError, match=says):
        call()


@pytest.mark.long
def test_what_cannot_be_sent_back() -> None:
    with pytest.raises(trigram.LaunchError, match="cannot be sent back"):
        trigram.launch(_returns_a_lock)


def _launches(rank: int, world: int) -> str:
    try:
        trigram.launch(_sums, 1.0)
    except trigram.MisuseError as e:
        return str(e)
    return ""


def test_a_rank_launches_nothing() -> None:
    assert all("is a rank already" in said for said in run(2, _launches))


SCRIPT = """
import sys, time
import trigram

def train():
    trigram.init()
    print("waits", flush=True)
    time.sleep(300)

if __name__ == "__main__":
    try:
        trigram.launch(train)
    except KeyboardInterrupt:
        print("interrupted")
        sys.exit(3)
"""


def test_an_interrupt_ends_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    # A shell that starts the tests in the background has them ignore Ctrl-C.
    command = ["env", "--default-signal=INT", sys.executable, str(script)]
    out = (tmp_path / "out").open("w+")
    process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)

    def said() -> str:
        return (tmp_path / "out").read_text()

    try:
        until(lambda: said().count("waits") == 2, 120, "two ranks")
        os.killpg(process.pid, signal.SIGINT)  # as a terminal and Jupyter do
        assert process.wait(60) == 3, said()
        assert "interrupted" in said()
        until(lambda: not _of_group(process.pid), 20, "the end of the ranks")
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _of_group(group: int) -> list[str]:
    listed = subprocess.run(
        ["ps", "-o", "pid=", "-g", str(group)], capture_output=True, text=True, check=False
    )
    return listed.stdout.split()


OF_ITS_OWN = """
import dataclasses, trigram

@dataclasses.dataclass
class Result:
    rank: int

def train():
    return Result(trigram.rank())

print("has", [result.rank for result in trigram.launch(train)])
"""


def test_classes_of_a_script_come_back(tmp_path: Path) -> None:
    """Started elsewhere, where a file has the name of a module of the standard library."""
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "script.py").write_text(OF_ITS_OWN)
    (tmp_path / "numbers.py").write_text("raise RuntimeError('not this one')")
    command = [sys.executable, "there/script.py"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=patience.seconds(120), check=False, cwd=tmp_path
    )
    assert done.returncode == 0 and "has [0, 1]" in done.stdout, done.stdout + done.stderr


def test_a_function_of_a_script_needs_cloudpickle(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.modules['cloudpickle'] = None\n" + SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
        check=False,
    )
    assert done.returncode == 1
    assert "install cloudpickle" in done.stderr and "trigram[notebook]" in done.stderr


def _notebook(*cells: str) -> Any:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    return notebook


def test_in_a_notebook() -> None:
    """In a real kernel: what ranks write appears under the cell, and results and errors come back."""
    notebook = _notebook(
        "import torch, trigram\nscale = 3.0",
        "def train(x):\n"
        "    t = torch.tensor([scale * x])\n"
        "    trigram.all_reduce(t)\n"
        "    print('has', t.item())\n"
        "    return t",
        "trigram.launch(train, 2.0, ranks=2)",
    )
    outputs = notebook.cells[-1].outputs
    shown = "".join(o.get("text", "") for o in outputs)
    assert "[0] has 12.0" in shown and "[1] has 12.0" in shown, outputs
    [result] = [o for o in outputs if o.output_type == "execute_result"]
    assert result.data["text/plain"] == "[tensor([12.]), tensor([12.])]"


@pytest.mark.long
def test_an_error_in_a_notebook() -> None:
    with pytest.raises(CellExecutionError, match=r"rank 1 failed[\s\S]*ZeroDivisionError"):
        _notebook("import trigram", "trigram.launch(lambda: 1 / (1 - trigram.rank()))")


def test_the_tutorial_runs() -> None:
    notebook = nbformat.read(ROOT / "examples" / "start.ipynb", as_version=4)
    NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    shown = "".join(o.get("text", "") for cell in notebook.cells for o in cell.get("outputs", []))
    assert "[1] step 80" in shown, shown
