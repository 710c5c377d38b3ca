//! Hooks on the parameters of a model: what a backward pass calls for each gradient. Only those enter Python after which
//! there is something to do (`trigram/steps/passes.py`).

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use trigram_core::pipeline::{self, Arrival, Pipeline};
use trigram_engine::sys::serving;

/// How often a gradient after which nothing starts enters Python all the same, where second phases may be due. Not every end
/// of what they follow is noted.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// What else than starts there may be to do in a pass.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Between {
    Nothing,
    /// To make what other ranks wait for.
    Serving,
    /// To tell Python of each gradient.
    Everything,
}

struct State {
    pipeline: Pipeline,
    /// By `id()` of a parameter, its index.
    index: HashMap<usize, usize>,
    /// The call of autograd's engine that the pass under way is in.
    task: Option<i64>,
    between: Between,
    looked: Instant,
    /// How many ends of calls it had seen then.
    noted: u64,
    /// The gradients of units in the order in which they came, if that is to be learned.
    order: Option<Vec<usize>>,
}

impl State {
    fn arrive(&mut self, i: usize) -> Arrival {
        let arrival = self.pipeline.arrive(i);
        if let Some(order) = self.order.as_mut().filter(|_| arrival != Arrival::Elsewhere) {
            order.push(i);
        }
        arrival
    }
}

/// The gradients of one model's backward passes: which are there, and which unit of them is averaged next.
///
/// A parameter is known by its `id()`; `units` has the indices of parameters.
#[pyclass(frozen, name = "Pipeline", module = "trigram._core")]
pub(crate) struct GradientPipeline {
    state: Mutex<State>,
}

impl GradientPipeline {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether Python has nothing to do after the gradient of the parameter with this `id()`, in autograd's call `task`.
    fn is_enough(&self, id: usize, task: i64) -> bool {
        let state = &mut *self.state();
        if state.task != Some(task) || state.between == Between::Everything {
            return false;
        }
        let Some(&i) = state.index.get(&id) else {
            return false;
        };
        let waits = matches!(state.arrive(i), Arrival::Waits | Arrival::Elsewhere);
        if state.between == Between::Serving && waits {
            // Only this model's calls are made here: what other models are to be served with, a wait looks at.
            let noted = serving::noted();
            if noted == state.noted && state.looked.elapsed() < LOOK_INTERVAL {
                return true;
            }
            state.noted = noted;
            state.looked = Instant::now();
            return false;
        }
        waits
    }
}

#[pymethods]
impl GradientPipeline {
    #[new]
    fn new() -> Self {
        let state = State {
            pipeline: Pipeline::default(),
            index: HashMap::new(),
            task: None,
            between: Between::Nothing,
            looked: Instant::now(),
            noted: 0,
            order: None,
        };
        Self { state: Mutex::new(state) }
    }

    /// The parameters, by `id()`, and the units in which they are averaged. No pass is under way.
    fn assign(&self, ids: Vec<usize>, units: Vec<Vec<usize>>) {
        let state = &mut *self.state();
        state.pipeline = Pipeline::new(ids.len(), units);
        state.index = ids.into_iter().enumerate().map(|(i, id)| (id, i)).collect();
        state.task = None;
    }

    /// A pass begins, in autograd's call `task`: hooks that are called there enter Python only if something starts, or may be
    /// made for other ranks (`serving`). None: they enter Python for each gradient.
    #[pyo3(signature = (task=None, serving=false))]
    fn begin(&self, task: Option<i64>, serving: bool) {
        let state = &mut *self.state();
        state.pipeline.begin();
        state.task = task;
        state.between = match (task, serving) {
            (None, _) => Between::Everything,
            (_, true) => Between::Serving,
            (_, false) => Between::Nothing,
        };
        state.looked = Instant::now();
    }

    /// No pass is under way.
    fn end(&self) {
        self.state().task = None;
    }

    /// The gradient of parameter `i` is there. True: the next unit can start; None: its own was started without it.
    fn arrive(&self, i: usize) -> Option<bool> {
        match self.state().arrive(i) {
            Arrival::Late => None,
            arrival => Some(arrival == Arrival::Starts),
        }
    }

    /// The unit that starts next, if all of its gradients are there.
    fn next_full(&self) -> Option<usize> {
        self.state().pipeline.next_full()
    }

    /// The next unit was started.
    fn start(&self) -> Option<usize> {
        self.state().pipeline.start()
    }

    /// How many units were started.
    #[getter]
    fn started(&self) -> usize {
        self.state().pipeline.started()
    }

    /// The places in a unit of the gradients that are not there.
    fn missing(&self, unit: usize) -> Vec<usize> {
        self.state().pipeline.missing(unit)
    }

    /// The parameters whose gradients came since the pass began or this was called, by index.
    fn take(&self) -> Vec<usize> {
        let pipeline = &mut self.state().pipeline;
        let here = pipeline.here().collect();
        pipeline.begin();
        here
    }

    /// From now on the order of gradients is noted, or no more.
    fn learn(&self, learns: bool) {
        self.state().order = learns.then(Vec::new);
    }

    /// The gradients in the order in which they came, perhaps more than once; None: nobody has asked for it.
    #[getter]
    fn order(&self) -> Option<Vec<usize>> {
        self.state().order.clone()
    }
}

/// A hook on the node of autograd's graph that adds the gradient to a parameter.
///
/// `told` is called with the parameter where Python has something to do; `current_task` names autograd's call.
#[pyclass(frozen, module = "trigram._core")]
pub(crate) struct GradientHook {
    pipeline: Py<GradientPipeline>,
    param: Py<PyAny>,
    told: Py<PyAny>,
    current_task: Py<PyAny>,
}

#[pymethods]
impl GradientHook {
    #[new]
    fn new(
        pipeline: Py<GradientPipeline>,
        param: Py<PyAny>,
        told: Py<PyAny>,
        current_task: Py<PyAny>,
    ) -> Self {
        Self { pipeline, param, told, current_task }
    }

    /// `given` has the gradient that was added, or None.
    fn __call__(&self, py: Python<'_>, _inputs: &Bound<'_, PyAny>, given: &Bound<'_, PyAny>) -> PyResult<()> {
        let param = self.param.bind(py);
        let requires_grad = pyo3::intern!(py, "requires_grad");
        if given.get_item(0)?.is_none() || !param.getattr(requires_grad)?.is_truthy()? {
            return Ok(()); // autograd has added nothing
        }
        let task: i64 = self.current_task.call0(py)?.extract(py)?;
        if !self.pipeline.get().is_enough(param.as_ptr() as usize, task) {
            self.told.call1(py, (param,))?;
        }
        Ok(())
    }
}

/// Divides gradients into units, see [`pipeline::assign`].
#[pyfunction]
pub(crate) fn assign_units(gradients: Vec<(usize, usize)>, first: usize, full: usize) -> Vec<Vec<usize>> {
    pipeline::assign(&gradients, first, full)
}
