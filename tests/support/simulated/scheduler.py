"""Threads in virtual time, of which one runs at a time."""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

_STUCK_SECONDS = 60.0
"""Of real time, after which a thread that runs counts as blocked outside of the simulation."""


class Killed(BaseException):
    """Ends the threads of a process that has been killed."""


class Task:
    """A thread of a simulated process.

    Attributes:
        name: For messages.
        process: What is killed together.
        steps: How often it has come to a point where another thread may run.
        until: What it waits for; None: it may go on.
        end: When the wait ends otherwise, in virtual seconds; None: never.
        what: What it waits for, in words.
        over: It has ended.
        error: What it has raised.
    """

    def __init__(self, name: str, process: Any, target: Callable[[], object], daemon: bool) -> None:
        self.name, self.process, self.daemon = name, process, daemon
        self.steps = 0
        self.until: Callable[[], bool] | None = None
        self.end: float | None = None
        self.what = "begins"
        self.over = self.timed_out = False
        self.error: BaseException | None = None
        self.go = threading.Semaphore(0)
        self._target = target
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        self.go.acquire()
        try:
            if self.process.alive:
                self._target()
        except Killed:
            pass
        except BaseException as e:
            self.error = e
        finally:
            self.over = True
            Scheduler.present().back.release()

    def may_run(self, now: float) -> bool:
        """Whether it can go on now."""
        if not self.process.alive or self.until is None:
            return True
        return self.until() or (self.end is not None and self.end <= now)


class Scheduler:
    """Runs the threads of a simulation, and has its time.

    Args:
        seed: Of everything that is chosen at random.

    Attributes:
        now: Seconds.
        choices: What chooses.
    """

    _present: Scheduler | None = None

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.choices = random.Random(seed)
        self.tasks: list[Task] = []
        self.back = threading.Semaphore(0)
        self.running: Task | None = None
        self.before_step: Callable[[Task], None] = lambda task: None
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    @staticmethod
    def present() -> Scheduler:
        """That which runs now."""
        assert Scheduler._present is not None
        return Scheduler._present

    def start(self, name: str, process: Any, target: Callable[[], object], daemon: bool = False) -> Task:
        """Adds a thread; the simulation does not wait for a ``daemon``."""
        task = Task(name, process, target, daemon)
        self.tasks.append(task)
        task.thread.start()
        return task

    def at(self, delay: float, what: Callable[[], object]) -> None:
        """Does something after so many seconds."""
        heapq.heappush(self._events, (self.now + delay, next(self._numbers), what))

    # What threads of the simulation call.

    def wait(self, until: Callable[[], bool] | None, what: str, seconds: float | None = None) -> bool:
        """Lets other threads run until something holds; returns whether it does, or the time is over."""
        task = self.running
        assert task is not None and task.thread is threading.current_thread(), (
            f"{what}: not of the simulation"
        )
        if not task.process.alive:
            raise Killed
        task.until, task.what = until, what
        task.end = None if seconds is None else self.now + seconds
        task.steps += 1
        self.before_step(task)
        self.back.release()
        task.go.acquire()
        if not task.process.alive:
            raise Killed
        return until is None or until()

    def pause(self, what: str) -> None:
        """Other threads may run."""
        self.wait(None, what)

    def sleep(self, seconds: float) -> None:
        """Waits so many seconds."""
        self.wait(lambda: False, f"sleeps {seconds:.3g} s", max(seconds, 0.0))

    # The simulation.

    def run(self, longest: float) -> None:
        """Runs until all threads have ended that are no daemons.

        Raises:
            RuntimeError: They have not after ``longest`` virtual seconds.
        """
        Scheduler._present = self
        while any(not task.over and not task.daemon for task in self.tasks):
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            ready = [task for task in self.tasks if not task.over and task.may_run(self.now)]
            if ready:
                self._step(self.choices.choice(ready))
                continue
            times = [task.end for task in self.tasks if not task.over and task.end is not None]
            times += [at for at, *_ in self._events[:1]]
            if not times or min(times) > longest:
                waits = [f"{t.name}: {t.what}" for t in self.tasks if not t.over and not t.daemon]
                raise RuntimeError(f"at {self.now:.1f} s these wait without an end: " + "; ".join(waits))
            self.now = max(self.now, min(times))

    def _step(self, task: Task) -> None:
        self.running = task
        task.go.release()
        if not self.back.acquire(timeout=_STUCK_SECONDS):
            stack = "".join(traceback.format_stack(sys._current_frames()[task.thread.ident or 0]))
            raise RuntimeError(f"{task.name} waits outside of the simulation:\n{stack}")
        self.running = None

    def end(self) -> None:
        """Ends all threads."""
        for task in self.tasks:
            task.process.alive = False
        while left := [task for task in self.tasks if not task.over]:
            self._step(left[0])
        Scheduler._present = None


class _Event:
    """``threading.Event``, of virtual threads."""

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        """Sets it."""
        self._set = True

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._set

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for it."""
        return Scheduler.present().wait(lambda: self._set, "an event", seconds)


class _Lock:
    """``threading.Lock``, of virtual threads: another may run while one holds it."""

    def __init__(self) -> None:
        self._held = False

    def acquire(self, blocking: bool = True) -> bool:
        """Takes it; returns whether it is taken."""
        if self._held and blocking:
            Scheduler.present().wait(lambda: not self._held, "a lock")
        elif self._held:
            return False
        self._held = True
        return True

    def release(self) -> None:
        """Gives it back."""
        self._held = False

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Thread:
    """``threading.Thread``, of the process that makes it."""

    def __init__(self, target: Callable[[], object], name: str, daemon: bool) -> None:
        self._make = target, name

    def start(self) -> None:
        """Starts it."""
        scheduler = Scheduler.present()
        assert scheduler.running is not None
        process = scheduler.running.process
        self.task = scheduler.start(f"{process}, {self._make[1]}", process, self._make[0], daemon=True)

    def join(self, seconds: float | None = None) -> None:
        """Waits for its end."""
        Scheduler.present().wait(lambda: self.task.over, "a thread's end", seconds)


@contextmanager
def virtual_time(modules: list[Any]) -> Iterator[None]:
    """A block in which these modules have the time and the threads of the simulation."""
    clock = SimpleNamespace(
        monotonic=lambda: Scheduler.present().now,
        perf_counter=lambda: Scheduler.present().now,
        monotonic_ns=lambda: int(Scheduler.present().now * 1e9),
        time=lambda: Scheduler.present().now,
        sleep=lambda seconds: Scheduler.present().sleep(seconds),
    )
    threads = SimpleNamespace(
        Event=_Event,
        Thread=_Thread,
        Lock=_Lock,
        current_thread=threading.current_thread,
        main_thread=threading.main_thread,
        get_ident=threading.get_ident,
    )
    before = [(m, name, vars(m)[name]) for m in modules for name in ("time", "threading") if name in vars(m)]
    for module, name, _ in before:
        setattr(module, name, clock if name == "time" else threads)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)
