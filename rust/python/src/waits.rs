//! Waits of Python's threads: none holds the interpreter lock (invariant PY-2), every wait for a call answers Ctrl-C (PY-3),
//! and none comes back to an interpreter that ends (PY-4).

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use trigram_core::Error;
use trigram_engine::sys::completion::InterruptCheck;
use trigram_engine::sys::{clock, fork, serving};

use crate::errors::Raise;

/// The interpreter is about to end.
static EXITING: AtomicBool = AtomicBool::new(false);
/// Threads that wait here and may come back to the interpreter.
/// One count for each depth of forks: a child has none of its parent's threads.
static WAITING: [AtomicUsize; 8] = [const { AtomicUsize::new(0) }; 8];

thread_local! {
    /// Ticks that this thread has spent in [`wait`].
    static BLOCKED: Cell<u64> = const { Cell::new(0) };
    /// This thread ends the interpreter, so it does not outlive it.
    static ENDS: Cell<bool> = const { Cell::new(false) };
}

fn waiting() -> &'static AtomicUsize {
    &WAITING[fork::depth() % WAITING.len()]
}

/// Whether the interpreter is about to end: whatever waits in [`detached`] ends its wait soon.
pub(crate) fn is_exiting() -> bool {
    EXITING.load(Ordering::Acquire)
}

/// Says that the interpreter is about to end, in the thread that ends it. It stays so: another rank of this process may leave
/// meanwhile.
pub(crate) fn set_exiting() {
    ENDS.set(true);
    EXITING.store(true, Ordering::Release);
}

/// Gives threads that are on their way back to an interpreter that ends up to a second to get there. The caller does not
/// hold the interpreter lock: they need it.
fn let_return() {
    let deadline = Instant::now() + Duration::from_secs(1);
    while is_exiting() && waiting().load(Ordering::Acquire) > 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs what may wait, without the interpreter lock.
///
/// A thread that outlives the interpreter must not come back to it (invariant PY-4): it would be
/// torn down in the middle of our frames. So when the interpreter ends, waiting threads stay here,
/// and the process ends around them. The thread that ends it comes back: a function of the script that
/// runs at exit, after trigram's, may have called.
pub(crate) fn detached<T: Send>(py: Python<'_>, f: impl Send + FnOnce() -> T) -> T {
    waiting().fetch_add(1, Ordering::AcqRel);
    let outcome = py.detach(|| {
        let outcome = f();
        if is_exiting() && !ENDS.get() {
            waiting().fetch_sub(1, Ordering::AcqRel);
            loop {
                std::thread::park();
            }
        }
        outcome
    });
    waiting().fetch_sub(1, Ordering::AcqRel);
    outcome
}

/// Waits for a call by [`detached`]. Ctrl-C ends the wait with its own exception.
pub(crate) fn wait<T: Send>(
    py: Python<'_>,
    f: impl Send + FnOnce(InterruptCheck<'_>) -> trigram_core::Result<T>,
) -> PyResult<T> {
    wait_while(py, None, f)
}

/// As [`wait`]; the function `look`, which is called now and then, ends the wait too: with an exception, or, if it returns a
/// reason, as if the time were over, so that the error says what is missing, and why the wait was not longer.
pub(crate) fn wait_while<T: Send>(
    py: Python<'_>,
    look: Option<&Py<PyAny>>,
    f: impl Send + FnOnce(InterruptCheck<'_>) -> trigram_core::Result<T>,
) -> PyResult<T> {
    let mut signal: Option<PyErr> = None;
    let began = clock::ticks();
    let outcome = detached(py, || {
        f(&mut || {
            if is_exiting() {
                return Err(Error::Aborted(
                    "the call was aborted because the Python interpreter exits".into(),
                ));
            }
            check(&mut signal, look)
        })
    });
    BLOCKED.with(|ticks| ticks.set(ticks.get() + clock::ticks().saturating_sub(began)));
    match signal {
        Some(signal) => Err(signal),
        None => outcome.raise(py),
    }
}

/// Runs what ends the engine, without the interpreter lock: it goes on where the interpreter ends. Ctrl-C ends its wait with
/// its own exception.
pub(crate) fn leave(
    py: Python<'_>,
    f: impl Send + FnOnce(InterruptCheck<'_>) -> trigram_core::Result<()>,
) -> PyResult<()> {
    let mut signal: Option<PyErr> = None;
    let outcome = py.detach(|| {
        let outcome = f(&mut || check(&mut signal, None));
        let_return();
        outcome
    });
    signal.map_or_else(|| outcome.raise(py), Err)
}

/// Makes the calls for which other ranks may wait (`trigram/runtime/serving.py`).
static SERVE: OnceLock<Py<PyAny>> = OnceLock::new();

/// Sets the function that threads call while they wait, if `active`: see [`serving`].
#[pyfunction]
pub(crate) fn serve_by(serve: Py<PyAny>, active: bool) {
    let _ = SERVE.set(serve);
    serving::set_active(active);
}

/// Runs the signal handlers that are due, then `look` and what is due for other ranks; `signal` gets what one of them has
/// raised. [`Error::Timeout`]: `look` returned a reason to wait no longer.
fn check(signal: &mut Option<PyErr>, look: Option<&Py<PyAny>>) -> trigram_core::Result<()> {
    let checked = Python::try_attach(|py| -> PyResult<Option<String>> {
        py.check_signals()?;
        let given_up = look.map_or(Ok(None), |look| look.call0(py)?.extract(py))?;
        if serving::is_active()
            && let Some(serve) = SERVE.get()
        {
            serving::take(); // first: a call that ends meanwhile is looked at again
            serve.call0(py)?;
        }
        Ok(given_up)
    });
    match checked {
        Some(Ok(Some(what))) => Err(Error::Timeout { what, millis: 0, waiting_for: String::new() }),
        Some(Err(e)) => {
            let why = Python::try_attach(|py| reason(py, &e)).unwrap_or_default();
            *signal = Some(e);
            Err(Error::Aborted(why))
        }
        _ => Ok(()),
    }
}

/// What other ranks are told of an exception that has ended a wait here: the text of an error of ours, by which they may
/// know what to do, or the name of what is none, such as `KeyboardInterrupt`.
fn reason(py: Python<'_>, raised: &PyErr) -> String {
    let ours = py
        .import("trigram.errors")
        .and_then(|errors| errors.getattr("TrigramError"))
        .is_ok_and(|class| raised.matches(py, class).unwrap_or(false));
    match ours {
        true => raised.value(py).to_string(),
        false => raised.get_type(py).name().map_or_else(|_| "an exception".into(), |name| name.to_string()),
    }
}

/// Whether no Python thread can make calls but those with these numbers, which have made some
/// (`trigram/runtime/threads.py`).
pub(crate) fn are_all_callers(threads: &[i32]) -> bool {
    let ask = |py: Python<'_>| -> PyResult<bool> {
        py.import("trigram.runtime.threads")?.call_method1("are_all_callers", (threads,))?.extract()
    };
    !is_exiting() && Python::try_attach(ask).is_some_and(|answer| answer.unwrap_or(false))
}

/// How long this thread has waited in calls, and the present moment, both in ticks of the engine's clock.
#[pyfunction]
pub(crate) fn blocked() -> (u64, u64) {
    (BLOCKED.with(Cell::get), clock::ticks())
}

/// A limit in seconds; none for what is no duration.
pub(crate) fn seconds(s: Option<f64>) -> Option<Duration> {
    s.and_then(|s| Duration::try_from_secs_f64(s).ok())
}

/// How long one of Python's own threads waits for work at most: an hour, and no time for what is no duration.
pub(crate) fn up_to_an_hour(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default().min(Duration::from_secs(3600))
}
