//! The records of calls, for Python.

use std::sync::{Arc, Mutex, PoisonError};

use pyo3::prelude::*;
use trigram_engine::health::events;

use crate::{Engine, waits};

/// See [`events::Event`]; times in nanoseconds of the monotonic clock.
#[pyclass(module = "trigram._core", frozen, get_all)]
pub(crate) struct Event {
    number: u64,
    group: u64,
    sequence: u64,
    tag: Option<u32>,
    kind: &'static str,
    on_gpu: bool,
    uneven: bool,
    dtype: &'static str,
    nbytes: u64,
    peer: Option<u32>,
    waited: u64,
    failed: bool,
    made: u64,
    started: Option<u64>,
    first_byte: Option<u64>,
    ended: Option<u64>,
}

impl From<events::Event> for Event {
    fn from(e: events::Event) -> Self {
        let events::Event { number, group, sequence, tag, kind, on_gpu, uneven, dtype, nbytes, .. } = e;
        let events::Event { peer, waited, failed, made, started, first_byte, ended, .. } = e;
        Self {
            number,
            group,
            sequence,
            tag,
            kind,
            on_gpu,
            uneven,
            dtype,
            nbytes,
            peer,
            waited,
            failed,
            made,
            started,
            first_byte,
            ended,
        }
    }
}

fn converted(events: Vec<events::Event>) -> Vec<Event> {
    events.into_iter().map(Event::from).collect()
}

/// Reads the calls of an engine that have ended, each once.
#[pyclass(module = "trigram._core", frozen)]
pub(crate) struct EventReader {
    ring: Arc<events::EventRing>,
    reader: Mutex<events::Reader>,
}

#[pymethods]
impl EventReader {
    #[new]
    fn new(engine: &Engine) -> Self {
        Self { ring: engine.0.counters().events.clone(), reader: Mutex::default() }
    }

    /// The calls that have ended since the last read, and how many others were overwritten before.
    fn read(&self, py: Python<'_>) -> (Vec<Event>, u64) {
        let (events, lost) =
            py.detach(|| self.ring.read(&mut self.reader.lock().unwrap_or_else(PoisonError::into_inner)));
        (converted(events), lost)
    }

    /// All calls that are still known, those under way too; or only these.
    #[pyo3(signature = (under_way=false))]
    fn all(&self, py: Python<'_>, under_way: bool) -> Vec<Event> {
        let mut events = py.detach(|| self.ring.all());
        events.retain(|event| !under_way || event.ended.is_none());
        converted(events)
    }

    /// Waits until more than `seen` calls have failed, or `timeout_seconds` have passed: how many have, and of the last
    /// the group, the number in it (none for a message) and the reason.
    #[allow(clippy::type_complexity)] // a tuple, as Python takes it
    fn wait_for_failure(
        &self,
        py: Python<'_>,
        seen: u64,
        timeout_seconds: f64,
    ) -> (u64, Vec<(u64, Option<u64>, String)>) {
        let limit = waits::up_to_an_hour(timeout_seconds);
        let (count, last) = waits::detached(py, || self.ring.wait_for_failure(seen, limit));
        (count, last.into_iter().map(|f| (f.group, f.sequence, f.why)).collect())
    }
}
