//! Where the memory of a torch tensor is, in one call: through the table of functions that torch publishes for other
//! libraries, DLPack's exchange API (torch 2.10 and later; <https://dmlc.github.io/dlpack/latest/c_api.html>).
//!
//! Reading address, length, dtype, layout and device one by one takes longer than a small collective.

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;

use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use trigram_core::DType;

/// The version of the structures below.
const MAJOR: u32 = 1;
const CPU: i32 = 1;

#[repr(C)]
struct ExchangeApi {
    major: u32,
    minor: u32,
    previous: *const c_void,
    /// Functions that are not used here.
    others: [*const c_void; 3],
    borrow: Option<Borrow>,
}

/// Fills in a description that is valid as long as the object; 0, or an exception is set.
type Borrow = unsafe extern "C" fn(*mut c_void, *mut Described) -> c_int;

#[repr(C)]
struct Described {
    data: *mut c_void,
    device: i32,
    device_id: i32,
    dimensions: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// What is asked of torch once.
struct Torch {
    tensor: Py<PyAny>,
    borrow: Borrow,
}

impl Torch {
    fn find(py: Python<'_>) -> PyResult<Option<Self>> {
        let tensor = py.import("torch")?.getattr("Tensor")?;
        let capsule = tensor.getattr("__dlpack_c_exchange_api__")?.cast_into::<PyCapsule>()?;
        let api = capsule.pointer_checked(Some(c"dlpack_exchange_api"))?.cast::<ExchangeApi>();
        // SAFETY: the capsule's name says what it points to; the first two words are the same in all versions.
        let (major, table) = unsafe { (api.as_ref().major, api.as_ref()) };
        let borrow = if major == MAJOR { table.borrow } else { None };
        Ok(borrow.map(|borrow| Self { tensor: tensor.unbind(), borrow }))
    }
}

/// A tensor's memory: dense, contiguous, on the CPU.
pub(crate) struct Dense {
    pub(crate) address: *mut u8,
    pub(crate) len: usize,
    pub(crate) dtype: DType,
}

/// The memory of a plain tensor; `None` for everything else: subclasses, tensors that require gradients, other devices,
/// layouts and dtypes, and if torch has no such table.
pub(crate) fn dense(t: &Bound<'_, PyAny>) -> Option<Dense> {
    static TORCH: OnceLock<Option<Torch>> = OnceLock::new();
    let py = t.py();
    let torch = TORCH.get_or_init(|| Torch::find(py).ok().flatten()).as_ref()?;
    if !t.get_type().is(&torch.tensor)
        || t.getattr(pyo3::intern!(py, "requires_grad")).ok()?.is_truthy().ok()?
    {
        return None;
    }
    let mut d = Described {
        data: null_mut(),
        device: 0,
        device_id: 0,
        dimensions: 0,
        code: 0,
        bits: 0,
        lanes: 0,
        shape: null(),
        strides: null(),
        byte_offset: 0,
    };
    // SAFETY: the object is a tensor, and the interpreter's lock is held.
    if unsafe { (torch.borrow)(t.as_ptr().cast(), &mut d) } != 0 {
        drop(PyErr::take(py)); // no storage, or a type that DLPack does not know
        return None;
    }
    let dtype = match (d.code, d.bits, d.lanes) {
        (0, 8, 1) => DType::I8,
        (0, 16, 1) => DType::I16,
        (0, 32, 1) => DType::I32,
        (0, 64, 1) => DType::I64,
        (1, 8, 1) => DType::U8,
        (2, 16, 1) => DType::F16,
        (2, 32, 1) => DType::F32,
        (2, 64, 1) => DType::F64,
        (4, 16, 1) => DType::BF16,
        (6, 8, 1) => DType::Bool,
        _ => return None,
    };
    let dimensions = usize::try_from(d.dimensions).ok().filter(|_| d.device == CPU && d.byte_offset == 0)?;
    let mut len = 1usize;
    for i in (0..dimensions).rev() {
        // SAFETY: the tensor has that many sizes and strides.
        let (size, stride) = unsafe { (*d.shape.add(i), *d.strides.add(i)) };
        let size = usize::try_from(size).ok()?;
        // Stricter than torch where a size is 1: parts of complex numbers, whose sign may be a flag, are left out.
        if usize::try_from(stride) != Ok(len) {
            return None;
        }
        len *= size;
    }
    if dimensions == 0 && t.call_method0(pyo3::intern!(py, "is_neg")).ok()?.is_truthy().ok()? {
        return None;
    }
    (len > 0).then_some(Dense { address: d.data.cast(), len, dtype })
}
