//! GPU memory: NCCL, its communicators and their calls. `trigram/device.py` has checked the tensors.

use std::sync::Arc;
use std::time::Instant;

use nccl_rs::{Cuda, Search, UniqueId};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use trigram_core::DType;
use trigram_engine::device::call::DeviceCall as Call;
use trigram_engine::device::failure::from_nccl;
use trigram_engine::device::group::{DeviceGroup as Ranks, PeerMessage};

use crate::errors::Raise;
use crate::waits::{seconds, wait};
use crate::{Asked, Group, Memory, Splits, request};

/// NCCL, loaded.
#[pyclass(module = "trigram._core", frozen)]
pub(crate) struct Nccl(nccl_rs::Nccl);

#[pymethods]
impl Nccl {
    /// Finds and loads it; the wheel is looked for in these `site-packages` directories.
    #[new]
    fn new(py: Python<'_>, site_packages: Vec<String>) -> PyResult<Self> {
        let search = site_packages.into_iter().fold(Search::new(), Search::site_packages);
        py.detach(|| nccl_rs::Nccl::load(&search)).map(Self).map_err(from_nccl).raise(py)
    }

    /// Such as "2.29.7".
    #[getter]
    fn version(&self) -> String {
        self.0.version().to_string()
    }

    /// Where it was found.
    #[getter]
    fn path(&self) -> String {
        self.0.path().to_owned()
    }

    /// Whether the ranks that are left of a communicator can go on with it.
    #[getter]
    fn can_shrink(&self) -> bool {
        self.0.can_shrink()
    }

    /// A new id, 128 bytes.
    fn unique_id<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let id = py.detach(|| self.0.unique_id()).map_err(from_nccl).raise(py)?;
        Ok(PyBytes::new(py, id.as_bytes()))
    }
}

/// How many GPUs the driver finds.
#[pyfunction]
pub(crate) fn gpus(py: Python<'_>) -> PyResult<i32> {
    py.detach(|| Cuda::load()?.devices()).map_err(from_nccl).raise(py)
}

/// A group's ranks, each with a GPU.
#[pyclass(module = "trigram._core", frozen)]
pub(crate) struct DeviceGroup(Ranks);

#[pymethods]
impl DeviceGroup {
    /// Meets the other ranks of `group` by `id`; failures are reported in `alarm`. `revokes`: those who are left after
    /// one will shrink it.
    #[new]
    #[allow(clippy::too_many_arguments)] // one call from one place
    #[pyo3(signature = (group, alarm, nccl, device, id, priority, revokes, timeout=None))]
    fn new(
        py: Python<'_>,
        group: &Group,
        alarm: &Group,
        nccl: &Nccl,
        device: i32,
        id: [u8; UniqueId::BYTES],
        priority: i32,
        revokes: bool,
        timeout: Option<f64>,
    ) -> PyResult<Self> {
        let (id, limit) = (UniqueId::from_bytes(id), seconds(timeout));
        let (group, alarm, nccl) = (&group.0, &alarm.0, &nccl.0);
        wait(py, |check_interrupt| {
            Ranks::join(group, alarm, nccl, device, id, priority, revokes, limit, check_interrupt)
        })
        .map(Self)
    }

    /// Ends what is under way, before `shrink`.
    fn revoke(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let limit = seconds(Some(timeout)).unwrap_or_default();
        py.detach(|| self.0.revoke(limit)).raise(py)
    }

    /// The ranks that are left when `lost` places are gone: those of the new `group`. A rank that cannot aborts the first
    /// call of `attempt`.
    fn shrink(
        &self,
        py: Python<'_>,
        group: &Group,
        alarm: &Group,
        attempt: &Group,
        lost: Vec<u32>,
        timeout: f64,
    ) -> PyResult<Self> {
        let (group, alarm, attempt) = (&group.0, &alarm.0, &attempt.0);
        let limit = seconds(Some(timeout)).unwrap_or_default();
        wait(py, |check_interrupt| self.0.shrink(group, alarm, attempt, &lost, limit, check_interrupt))
            .map(Self)
    }

    /// `CUstream` of its work.
    #[getter]
    fn stream(&self) -> usize {
        self.0.stream()
    }

    /// A collective, after what was given to the stream `caller`.
    #[pyo3(signature = (asked, memory, caller, checked, timeout=None, splits=None))]
    #[allow(clippy::too_many_arguments)] // one call from one place
    fn start(
        &self,
        py: Python<'_>,
        asked: Asked,
        memory: Memory,
        caller: usize,
        checked: bool,
        timeout: Option<f64>,
        splits: Splits,
    ) -> PyResult<DeviceCall> {
        let request = request(asked, memory, splits, None).raise(py)?;
        // SAFETY: `trigram/device.py` holds the tensors until the call is done, and the stream is
        // PyTorch's current one.
        let made = py.detach(|| unsafe { self.0.start(request, seconds(timeout), caller, checked) });
        made.map(|call| DeviceCall(Arc::new(call))).raise(py)
    }

    /// Messages that travel together: whether it is sent, the peer's place, address, values, dtype.
    #[pyo3(signature = (parcels, caller, timeout))]
    fn send_and_receive(
        &self,
        py: Python<'_>,
        parcels: Vec<(bool, u32, usize, usize, u8)>,
        caller: usize,
        timeout: Option<f64>,
    ) -> PyResult<DeviceCall> {
        let parcels: trigram_core::Result<Vec<PeerMessage>> = parcels
            .into_iter()
            .map(|(sends, peer, address, len, dtype)| {
                Ok(PeerMessage { sends, peer, address, len, dtype: DType::from_code(dtype)? })
            })
            .collect();
        let parcels = parcels.raise(py)?;
        // SAFETY: as in `start`.
        let made = py.detach(|| unsafe { self.0.send_recv(&parcels, seconds(timeout), caller) });
        made.map(|call| DeviceCall(Arc::new(call))).raise(py)
    }

    /// Ends it now, on all ranks.
    fn abort(&self, py: Python<'_>, why: &str) {
        py.detach(|| self.0.abort(why));
    }
}

/// A call under way on a GPU.
#[pyclass(module = "trigram._core", frozen)]
pub(crate) struct DeviceCall(Arc<Call>);

#[pymethods]
impl DeviceCall {
    fn is_completed(&self) -> bool {
        // What has failed has ended, and waiting for it says how.
        self.0.is_done().unwrap_or(true)
    }

    /// What is given to the stream `caller` from now on comes after it.
    fn order(&self, py: Python<'_>, caller: usize) -> PyResult<()> {
        // SAFETY: the stream is PyTorch's current one.
        py.detach(|| unsafe { self.0.order(caller) }).raise(py)
    }

    /// Waits for the end; false if `timeout` seconds came first.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let deadline = seconds(timeout).and_then(|t| Instant::now().checked_add(t));
        wait(py, |check_interrupt| self.0.wait(deadline, check_interrupt))
    }
}
