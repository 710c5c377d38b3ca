//! `trigram._core`: conversions and error mapping, nothing else.
//!
//! Tensors arrive as addresses and lengths; `trigram/collectives` has checked what they are and
//! keeps them alive. What waits does so by [`waits`].

mod callbacks;
mod codec;
mod device;
mod errors;
mod events;
mod gradients;
mod logs;
mod simulation;
mod tensors;
mod update;
mod waits;

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use errors::Raise;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};
use tensors::Dense;
use trigram_core::planner::Call;
use trigram_core::signature::{Collective, Via};
use trigram_core::{DType, Error, ReduceOp};
use trigram_engine::bootstrap::rendezvous;
use trigram_engine::call::request::{Message, Request, Tensors};
use trigram_engine::health::losses::LossKind;
use trigram_engine::runtime::{engine, group, log_sink};
use trigram_engine::security::secret::Security;
use trigram_engine::sys::completion::Completion;
use trigram_engine::sys::{address, exit, fork, memory};
use waits::{seconds, wait, wait_while};

/// A rank that has not met the others.
#[pyclass(module = "trigram._core")]
struct Rendezvous(Option<rendezvous::Rendezvous>);

#[pymethods]
impl Rendezvous {
    #[new]
    fn new(
        py: Python<'_>,
        rank: u32,
        size: usize,
        iface: Option<&str>,
        toward: Option<&str>,
        transport: &str,
    ) -> PyResult<Self> {
        let transport = match transport {
            "auto" => Ok(rendezvous::Transport::Auto),
            "shm" => Ok(rendezvous::Transport::Shm),
            "tcp" => Ok(rendezvous::Transport::Tcp),
            other => Err(Error::Config(format!(
                "TRIGRAM_TRANSPORT={other:?} is not valid; set it to auto, shm or tcp"
            ))),
        };
        let transport = transport.raise(py)?;
        let security = Security::from_env().raise(py)?;
        let open = || rendezvous::Rendezvous::open(rank, size, iface, toward, transport);
        let open = || Ok(open()?.secured(security));
        Ok(Self(Some(py.detach(open).raise(py)?)))
    }

    fn endpoint_record<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let record = self.0.as_ref().ok_or_else(used).raise(py)?.record().raise(py)?;
        Ok(PyBytes::new(py, &record))
    }

    /// `look`: called while it waits; what it raises, or a reason that it returns, ends the wait.
    #[pyo3(signature = (records, timeout, look=None))]
    fn handshake(
        &mut self,
        py: Python<'_>,
        records: Vec<Vec<u8>>,
        timeout: f64,
        look: Option<Py<PyAny>>,
    ) -> PyResult<bool> {
        let inner = self.0.as_mut().ok_or_else(used).raise(py)?;
        let limit = seconds(Some(timeout)).unwrap_or_default();
        wait_while(py, look.as_ref(), |check_interrupt| inner.handshake(&records, limit, check_interrupt))
    }

    /// `beside`: the engine of the world that this one follows. A rank that is lost there ends the attempt. `look`: as
    /// for `handshake`.
    #[pyo3(signature = (verdicts, timeout, beside=None, look=None))]
    fn connect(
        &mut self,
        py: Python<'_>,
        verdicts: Vec<bool>,
        timeout: f64,
        beside: Option<&Engine>,
        look: Option<Py<PyAny>>,
    ) -> PyResult<Engine> {
        let mut inner = self.0.take().ok_or_else(used).raise(py)?;
        if let Some(engine) = beside {
            inner.inherit(engine.0.world());
        }
        let limit = seconds(Some(timeout)).unwrap_or(Duration::MAX);
        let losses = || beside.map_or(0, |e| e.0.counters().failures().losses().len());
        let before = losses();
        let engine = wait_while(py, look.as_ref(), |check_interrupt| {
            inner.connect(&verdicts, limit, &mut || match losses() == before {
                true => check_interrupt(),
                false => Err(Error::Aborted("another rank was lost while the ranks connected".into())),
            })
        })?;
        engine.callers().set_census(Box::new(waits::are_all_callers));
        Ok(Engine(Arc::new(engine)))
    }
}

fn used() -> Error {
    Error::misuse("this rendezvous has been used already; make a new one")
}

/// Connections to all ranks, and the thread that drives them.
#[pyclass(module = "trigram._core", frozen)]
struct Engine(Arc<engine::Engine>);

#[pymethods]
impl Engine {
    /// The number of each rank's host.
    #[getter]
    fn hosts(&self) -> Vec<usize> {
        self.0.world().host_of.clone()
    }

    /// A group of world ranks, of which the last `helpers` have no data.
    fn group(
        &self,
        py: Python<'_>,
        name: String,
        ranks: Vec<u32>,
        ordinal: u64,
        helpers: u32,
    ) -> PyResult<Group> {
        Ok(Group(group::Group::new(&self.0, name, ranks, ordinal, helpers).raise(py)?))
    }

    /// Registered memory of at least `nbytes` bytes.
    fn allocate(&self, py: Python<'_>, nbytes: usize) -> PyResult<RegisteredMemory> {
        Ok(RegisteredMemory(self.0.world().allocate(nbytes).raise(py)?))
    }

    /// Hands what the engine has noted for the log to the queue that [`logs::next_log_lines`] reads.
    fn write_out_log(&self, py: Python<'_>) {
        py.detach(|| self.0.write_out_log());
    }

    /// Ends everything, when the peers have what this rank has sent; without `patient`, at once. `exiting`: the interpreter
    /// ends too.
    #[pyo3(signature = (exiting, patient=true))]
    fn shutdown(&self, py: Python<'_>, exiting: bool, patient: bool) -> PyResult<()> {
        if exiting {
            waits::set_exiting();
        }
        log_sink::wake();
        callbacks::wake();
        waits::leave(py, |check_interrupt| match patient {
            true => self.0.shutdown(check_interrupt),
            false => {
                // Its only error is that the wait was ended.
                let _ = self.0.shutdown(&mut || Err(Error::Aborted("this rank does not wait".into())));
                Ok(())
            }
        })
    }

    /// Takes a rank for lost, on all ranks, though it may be well.
    fn send_away(&self, py: Python<'_>, rank: u32, why: String) -> PyResult<()> {
        py.detach(|| self.0.send_away(rank, why)).raise(py)
    }

    /// Whether others have taken this rank for lost because who runs the job says so.
    fn am_sent_away(&self) -> bool {
        self.0.counters().failures().am_sent_away()
    }

    /// The ranks lost so far in the order of their losses, those that left last, and how: left, dead, silent, refused or
    /// evicted.
    fn losses(&self) -> Vec<(u32, &'static str)> {
        let failures = self.0.counters().failures();
        let name = |rank, how| match how {
            LossKind::Silent | LossKind::Dead if failures.is_sent_away(rank) => "evicted",
            LossKind::Left => "left",
            LossKind::Dead => "dead",
            LossKind::Silent => "silent",
            LossKind::Refused => "refused",
        };
        failures.losses().into_iter().map(|(rank, how)| (rank, name(rank, how))).collect()
    }

    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counters = self.0.counters();
        let dict = PyDict::new(py);
        dict.set_item("calls", counters.calls.load(Ordering::Relaxed))?;
        dict.set_item("direct_bytes", counters.direct_bytes.load(Ordering::Relaxed))?;
        let background = counters.background.load(Ordering::Relaxed) as f64 * 1e-9;
        dict.set_item("engine_seconds", background)?;
        let sent: Vec<u64> = counters.sent.iter().map(|n| n.load(Ordering::Relaxed)).collect();
        dict.set_item("sent_bytes", sent)?;
        let waited = counters.waited.iter().map(|n| n.load(Ordering::Relaxed) as f64 * 1e-9);
        let silent = counters.silent.iter().map(|n| n.load(Ordering::Relaxed) as f64 * 1e-9);
        dict.set_item("silent_for", silent.collect::<Vec<f64>>())?;
        dict.set_item("waited_for", waited.collect::<Vec<f64>>())?;
        Ok(dict)
    }
}

/// Registered memory, given back when collected.
#[pyclass(module = "trigram._core", frozen)]
struct RegisteredMemory(memory::RegisteredBuffer);

#[pymethods]
impl RegisteredMemory {
    #[getter]
    fn address(&self) -> usize {
        self.0.as_ptr() as usize
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.0.len()
    }
}

/// A group of ranks.
#[pyclass(module = "trigram._core", frozen)]
struct Group(group::Group);

/// What was asked, in the order in which `trigram/collectives` passes it.
type Asked = (u8, u8, usize, u8, u8, u32);
/// Addresses and bytes of input and output.
type Memory = (usize, usize, usize, usize);
/// Addresses and bytes of each tensor of the input and of the output, where they are lists.
type Lists = Option<(Vec<(usize, usize)>, Vec<(usize, usize)>)>;
/// Lengths to and from each peer.
type Splits = Option<(Vec<usize>, Vec<usize>)>;

/// Raises in a forked child of a process that had an engine.
#[pyfunction]
fn check_process(py: Python<'_>) -> PyResult<()> {
    fork::check().raise(py)
}

/// Called in the thread that ends the interpreter: threads in C++ that come back to it wait for the end of the process.
#[pyfunction]
fn keep_threads_out() {
    exit::keep_threads_out();
}

/// Refuses tensors that have a length and no address.
fn has_memory(pieces: impl IntoIterator<Item = (usize, usize)>) -> trigram_core::Result<()> {
    if pieces.into_iter().any(|(address, bytes)| address == 0 && bytes > 0) {
        return Err(Error::misuse(
            "a tensor has no memory of its own, as DTensor and FakeTensor have none; pass the tensor that it holds, such \
             as t.to_local() of a DTensor",
        ));
    }
    Ok(())
}

fn request(
    (what, dtype, len, op, via, root): Asked,
    memory: Memory,
    splits: Splits,
    lists: Lists,
) -> trigram_core::Result<Request> {
    has_memory([(memory.0, memory.1), (memory.2, memory.3)])?;
    has_memory(lists.iter().flat_map(|(given, wanted)| given.iter().chain(wanted)).copied())?;
    let what = match what {
        1 => Collective::AllReduce,
        2 => Collective::Reduce,
        3 => Collective::Broadcast,
        4 => Collective::Barrier,
        5 => Collective::AllGather,
        6 => Collective::ReduceScatter,
        7 => Collective::Gather,
        8 => Collective::Scatter,
        9 => Collective::AllToAll,
        10 => Collective::SendRecv,
        other => return Err(Error::misuse(format!("{other} is not the code of a collective"))),
    };
    let via = Via::ALL.get(via as usize).copied().unwrap_or_default();
    Ok(Request {
        call: Call { what, dtype: DType::from_code(dtype)?, len, root, via, splits },
        op: ReduceOp::from_code(op)?,
        tensors: Tensors {
            input: memory.0 as *const u8,
            input_len: memory.1,
            output: memory.2 as *mut u8,
            output_len: memory.3,
        },
        lists: None,
        message: None,
        declared: None,
        pass: 0,
        update: None,
    }
    .in_lists(lists))
}

/// An all_reduce in place, if the tensor is plain.
fn plain_all_reduce(t: &Bound<'_, PyAny>, op: u8) -> PyResult<Option<Request>> {
    let Some(Dense { address, len, dtype }) = tensors::dense(t) else { return Ok(None) };
    Ok(Some(Request {
        call: group::call(Collective::AllReduce, dtype, len),
        op: ReduceOp::from_code(op).raise(t.py())?,
        tensors: group::in_place(address, len * dtype.size()),
        ..Request::nothing()
    }))
}

impl Group {
    /// The handle of a collective of this group. It does not keep the engine: a collected engine has ended its calls.
    fn work(&self, completion: Arc<Completion>) -> Work {
        let group = Some(self.0.members().id);
        Work { completion, engine: Arc::downgrade(self.0.engine()), group }
    }
}

#[pymethods]
impl Group {
    /// Its identity, the same on all members.
    #[getter]
    fn id(&self) -> u64 {
        self.0.members().id
    }

    /// World ranks, by place.
    #[getter]
    fn ranks(&self) -> Vec<u32> {
        self.0.members().ranks.clone()
    }

    /// This rank's place.
    #[getter]
    fn rank(&self) -> u32 {
        self.0.members().me
    }

    /// Places by host.
    #[getter]
    fn hosts(&self) -> Vec<Vec<u32>> {
        self.0.members().layout.hosts.clone()
    }

    /// A collective, in this thread.
    #[pyo3(signature = (asked, memory, timeout=None, splits=None, lists=None))]
    fn run(
        &self,
        py: Python<'_>,
        asked: Asked,
        memory: Memory,
        timeout: Option<f64>,
        splits: Splits,
        lists: Lists,
    ) -> PyResult<()> {
        let request = request(asked, memory, splits, lists).raise(py)?;
        let limit = seconds(timeout);
        // SAFETY: `trigram/collectives` holds the tensors, whose storage it has measured, until
        // this returns.
        wait(py, |check_interrupt| unsafe { self.0.run(request, limit, check_interrupt) })
    }

    /// An all_reduce of a plain tensor, in this thread; false, and nothing has happened, for any other tensor.
    #[pyo3(signature = (t, op, timeout=None))]
    fn all_reduce(&self, t: &Bound<'_, PyAny>, op: u8, timeout: Option<f64>) -> PyResult<bool> {
        let Some(request) = plain_all_reduce(t, op)? else { return Ok(false) };
        let limit = seconds(timeout);
        // SAFETY: the caller holds the tensor until this returns.
        wait(t.py(), |check_interrupt| unsafe { self.0.run(request, limit, check_interrupt) })?;
        Ok(true)
    }

    /// The same in the background; `None` for any other tensor.
    #[pyo3(signature = (t, op, timeout=None))]
    fn start_all_reduce(&self, t: &Bound<'_, PyAny>, op: u8, timeout: Option<f64>) -> PyResult<Option<Work>> {
        let Some(request) = plain_all_reduce(t, op)? else { return Ok(None) };
        let limit = seconds(timeout);
        // SAFETY: the caller holds the tensor until the work is done.
        let completion = t.py().detach(|| unsafe { self.0.start(request, limit) });
        Ok(Some(self.work(completion.raise(t.py())?)))
    }

    /// A collective in the background.
    #[pyo3(signature = (asked, memory, timeout=None, splits=None, lists=None))]
    fn start(
        &self,
        py: Python<'_>,
        asked: Asked,
        memory: Memory,
        timeout: Option<f64>,
        splits: Splits,
        lists: Lists,
    ) -> PyResult<Work> {
        let request = request(asked, memory, splits, lists).raise(py)?;
        let limit = seconds(timeout);
        // SAFETY: `trigram/collectives` holds the tensors until the work is done.
        let completion = py.detach(|| unsafe { self.0.start(request, limit) });
        Ok(self.work(completion.raise(py)?))
    }

    /// An all_reduce in the background whose means update this rank's part of the weights; all ranks get these.
    #[allow(clippy::too_many_arguments)] // one call from one place
    #[pyo3(signature = (memory, lengths, pieces, rules, fused, timeout=None))]
    fn start_update(
        &self,
        py: Python<'_>,
        memory: Memory,
        lengths: Vec<usize>,
        pieces: Vec<update::Place>,
        rules: Vec<update::Numbers>,
        fused: bool,
        timeout: Option<f64>,
    ) -> PyResult<Work> {
        has_memory([(memory.0, memory.1), (memory.2, memory.3)]).raise(py)?;
        let request = update::request(memory, lengths, pieces, &rules, fused).raise(py)?;
        let limit = seconds(timeout);
        // SAFETY: `trigram/collectives` holds the tensors, also those of the states, until the work is done.
        let completion = py.detach(|| unsafe { self.0.start(request, limit) });
        Ok(self.work(completion.raise(py)?))
    }

    /// An empty call that stands for one on GPU memory.
    #[pyo3(signature = (asked, timeout=None, splits=None))]
    fn check_consistency(
        &self,
        py: Python<'_>,
        asked: Asked,
        timeout: Option<f64>,
        splits: Splits,
    ) -> PyResult<Work> {
        let request = request(asked, (0, 0, 0, 0), splits, None).raise(py)?;
        let limit = seconds(timeout);
        py.detach(|| self.0.consistency_check(request, limit)).map(|c| self.work(c)).raise(py)
    }

    /// A message to or from `peer`, in this thread or in the background; `peer` None: from any. Returns the work, or
    /// the world rank whose message was received. `shorter`: a receive takes a message of fewer bytes, of any dtype, too.
    #[allow(clippy::too_many_arguments)] // one call from one place
    fn message(
        &self,
        py: Python<'_>,
        sends: bool,
        peer: Option<u32>,
        tag: u32,
        dtype: u8,
        len: usize,
        address: usize,
        background: bool,
        shorter: bool,
        timeout: Option<f64>,
    ) -> PyResult<(Option<Work>, Option<u32>)> {
        let peer = peer.unwrap_or(Message::ANY);
        let dtype = DType::from_code(dtype).raise(py)?;
        has_memory([(address, len * dtype.size())]).raise(py)?;
        let memory = group::in_place(address as *mut u8, len * dtype.size());
        let request = Request {
            call: group::call(Collective::SendRecv, dtype, len),
            op: ReduceOp::Sum,
            tensors: memory,
            lists: None,
            message: Some(Message { peer, tag, sends, shorter }),
            declared: None,
            pass: 0,
            update: None,
        };
        let limit = seconds(timeout);
        if background {
            // SAFETY: as in `start`.
            let completion = py.detach(|| unsafe { self.0.start(request, limit) });
            return Ok((Some(Work { group: None, ..self.work(completion.raise(py)?) }), None));
        }
        if sends {
            // SAFETY: as in `run`.
            wait(py, |check_interrupt| unsafe { self.0.run(request, limit, check_interrupt) })?;
            return Ok((None, None));
        }
        // SAFETY: as in `run`.
        let sender = wait(py, |check_interrupt| unsafe { self.0.receive(request, limit, check_interrupt) })?;
        Ok((None, Some(sender)))
    }

    /// Takes part in all calls of the group, in the background, until a member is gone.
    fn help(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.0.help()).raise(py)
    }

    /// Whether it still does.
    fn is_helping(&self) -> bool {
        self.0.is_helping()
    }

    /// What each rank's link carries, in bytes per second; empty while nobody knows.
    fn rates(&self) -> Vec<f64> {
        self.0.members().rates()
    }

    /// The number of the next collective of this group.
    fn next(&self) -> u64 {
        self.0.next()
    }

    /// The backward pass since the last update, from 1, that later collectives of this group belong to; 0: to none.
    fn set_pass(&self, pass: u16) {
        self.0.set_pass(pass);
    }

    /// Aborts the group for good, on all ranks.
    fn abort_all(&self, py: Python<'_>, why: &str) -> PyResult<()> {
        py.detach(|| self.0.abort_all(why)).raise(py)
    }

    /// Gives up the collectives before the `through`-th, on all ranks.
    fn abort(&self, py: Python<'_>, through: u64, why: &str) -> PyResult<()> {
        py.detach(|| self.0.abort(through, why)).raise(py)
    }
}

/// A call under way.
#[pyclass(module = "trigram._core", frozen)]
struct Work {
    completion: Arc<Completion>,
    engine: Weak<engine::Engine>,
    /// The group whose collective it is; `None` for a message.
    group: Option<u64>,
}

#[pymethods]
impl Work {
    /// Whether it has ended; moves it on, if no other thread does.
    fn is_completed(&self, py: Python<'_>) -> bool {
        let completion = &self.completion;
        match self.engine.upgrade() {
            Some(engine) if !completion.is_done() => py.detach(|| engine.test(completion)),
            _ => completion.is_done(),
        }
    }

    /// The world rank whose message a receive takes, once that is known.
    fn sender(&self) -> Option<u32> {
        self.completion.sender()
    }

    /// Has `callback()` run when the call has ended, by the thread that runs [`next_done_callbacks`].
    fn add_done_callback(&self, callback: Py<PyAny>) {
        callbacks::add(self.group, &self.completion, &self.engine, callback);
    }

    /// When it has ended, threads that wait call the function given to [`waits::serve_by`].
    fn serve_when_done(&self) {
        self.completion.serve_when_done();
    }

    /// Waits for the end, and drives the call if no other thread does; false if `timeout` seconds came first.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let deadline = seconds(timeout).and_then(|t| Instant::now().checked_add(t));
        let completion = &self.completion;
        match wait(py, |check_interrupt| match self.engine.upgrade() {
            Some(engine) => engine.wait(completion, deadline, check_interrupt),
            None => completion.wait(deadline, check_interrupt),
        })? {
            Some(outcome) => outcome.raise(py).map(|()| true),
            None => Ok(false),
        }
    }
}

/// Names and addresses of this machine's network interfaces.
#[pyfunction]
fn interfaces() -> Vec<(String, String)> {
    address::interfaces()
}

/// Whether this is a card of that rank, with the seal of this job's secret if there is one.
#[pyfunction]
fn is_endpoint_record(py: Python<'_>, record: &[u8], rank: u32) -> PyResult<bool> {
    Ok(rendezvous::is_record(&Security::from_env().raise(py)?, record, rank))
}

/// The callbacks of calls that have ended. Where there are none, waits up to `timeout_seconds` for one.
#[pyfunction]
fn next_done_callbacks(py: Python<'_>, timeout_seconds: f64) -> Vec<Py<PyAny>> {
    let deadline = Instant::now() + waits::up_to_an_hour(timeout_seconds);
    waits::detached(py, || callbacks::next(deadline, waits::is_exiting))
}

#[pymodule]
fn _core(m: &Bound<'_, PyModule>) -> PyResult<()> {
    log_sink::install();
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    // The codes by which Python asks for calls, from the one place that defines them.
    m.add("COLLECTIVES", Collective::ALL.map(|c| (c.name(), c as u8)).to_vec())?;
    m.add("DTYPES", DType::ALL.map(|d| (d.name(), d as u8)).to_vec())?;
    m.add("OPS", ReduceOp::ALL.map(|o| (o.name(), o as u8)).to_vec())?;
    m.add("VIAS", Via::ALL.map(|v| (v.name(), v as u8)).to_vec())?;
    m.add_class::<Rendezvous>()?;
    m.add_class::<Engine>()?;
    m.add_class::<Group>()?;
    m.add_class::<RegisteredMemory>()?;
    m.add_class::<Work>()?;
    m.add_class::<events::Event>()?;
    m.add_class::<events::EventReader>()?;
    m.add_class::<codec::Codec>()?;
    m.add_class::<gradients::GradientPipeline>()?;
    m.add_class::<gradients::GradientHook>()?;
    m.add_class::<device::Nccl>()?;
    m.add_class::<device::DeviceGroup>()?;
    m.add_class::<device::DeviceCall>()?;
    m.add_function(wrap_pyfunction!(device::gpus, m)?)?;
    m.add_function(wrap_pyfunction!(check_process, m)?)?;
    m.add_function(wrap_pyfunction!(keep_threads_out, m)?)?;
    m.add_function(wrap_pyfunction!(gradients::assign_units, m)?)?;
    m.add_function(wrap_pyfunction!(simulation::simulate_all_reduce, m)?)?;
    m.add_function(wrap_pyfunction!(codec::adapt_second_moment, m)?)?;
    m.add_function(wrap_pyfunction!(codec::lossless_size, m)?)?;
    m.add_function(wrap_pyfunction!(codec::lossless_encode, m)?)?;
    m.add_function(wrap_pyfunction!(codec::lossless_decode, m)?)?;
    m.add_function(wrap_pyfunction!(update::update_alone, m)?)?;
    m.add_function(wrap_pyfunction!(is_endpoint_record, m)?)?;
    m.add_function(wrap_pyfunction!(waits::blocked, m)?)?;
    m.add_function(wrap_pyfunction!(waits::serve_by, m)?)?;
    m.add_function(wrap_pyfunction!(logs::log_line, m)?)?;
    m.add_function(wrap_pyfunction!(logs::next_log_lines, m)?)?;
    m.add_function(wrap_pyfunction!(next_done_callbacks, m)?)?;
    m.add_function(wrap_pyfunction!(interfaces, m)?)
}
