//! The engine's log lines, on their way to Python's `logging`, and Python's to the same queue.

use std::time::Instant;

use pyo3::prelude::*;
use trigram_engine::runtime::log_sink;

use crate::waits;

/// Lines with their levels as Python's `logging` counts them.
fn levelled(lines: Vec<(log::Level, String)>) -> Vec<(i32, String)> {
    let number = |level| match level {
        log::Level::Error => 40,
        log::Level::Warn => 30,
        log::Level::Info => 20,
        log::Level::Debug | log::Level::Trace => 10,
    };
    lines.into_iter().map(|(level, text)| (number(level), text)).collect()
}

/// Queues a log line beside the engine's; `level` as `logging` counts levels. Returns at once.
#[pyfunction]
pub(crate) fn log_line(level: i32, text: &str) {
    let level = match level {
        40.. => log::Level::Error,
        30.. => log::Level::Warn,
        _ => log::Level::Info,
    };
    log::log!(target: "trigram", level, "{text}");
}

/// The engine's log lines since the last call, the oldest first, each with its level as `logging` counts them. Where
/// there are none, waits up to `timeout_seconds` for one.
#[pyfunction]
pub(crate) fn next_log_lines(py: Python<'_>, timeout_seconds: f64) -> Vec<(i32, String)> {
    let now = Instant::now();
    let limit = waits::up_to_an_hour(timeout_seconds);
    if limit.is_zero() {
        return levelled(log_sink::next(now, || false)); // the queue's lock is held for a moment only
    }
    waits::detached(py, || levelled(log_sink::next(now + limit, waits::is_exiting)))
}
