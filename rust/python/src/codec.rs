//! Codecs and other loops on tensors that arrive as addresses; `trigram/codecs` has checked what they are.

use half::{bf16, f16};
use pyo3::prelude::*;
use trigram_core::codec::{self, Keep, Target, Values};
use trigram_core::lossless::{self, Then};
use trigram_core::second_moment::{self, Factors};
use trigram_core::{DType, Error};

use crate::errors::Raise;

/// Values fewer than this are coded without letting go of the interpreter lock, which costs more.
const SMALL: usize = 1 << 14;

/// A codec.
#[pyclass(module = "trigram._core", frozen)]
pub(crate) struct Codec(Box<dyn codec::Codec>);

/// A slice where the address of an empty tensor may be null.
///
/// # Safety
///
/// As for `slice::from_raw_parts` where `n` is not 0.
unsafe fn slice<'a, T>(address: usize, n: usize) -> &'a [T] {
    // SAFETY: passed on to the caller.
    if n == 0 { &[] } else { unsafe { std::slice::from_raw_parts(address as *const T, n) } }
}

/// See [`slice`].
///
/// # Safety
///
/// As for `slice::from_raw_parts_mut` where `n` is not 0.
unsafe fn slice_mut<'a, T>(address: usize, n: usize) -> &'a mut [T] {
    // SAFETY: passed on to the caller.
    if n == 0 { &mut [] } else { unsafe { std::slice::from_raw_parts_mut(address as *mut T, n) } }
}

fn unsupported(dtype: u8) -> Error {
    Error::Unsupported(format!("codec: dtype {dtype} is not float32, float16 or bfloat16"))
}

#[pymethods]
impl Codec {
    #[new]
    fn new(py: Python<'_>, name: &str, block: Option<usize>) -> PyResult<Self> {
        Ok(Self(codec::find(name, block).raise(py)?))
    }

    /// Bytes of the code of `n` values.
    fn size(&self, n: usize) -> usize {
        self.0.size(n)
    }

    /// Encodes `n` values at `src` into `len` bytes at `out`. `residual` is an address or 0.
    #[allow(clippy::too_many_arguments)] // one call from one place
    fn encode(
        &self,
        py: Python<'_>,
        src: usize,
        n: usize,
        dtype: u8,
        residual: usize,
        feedback: bool,
        seed: u64,
        out: usize,
        len: usize,
    ) -> PyResult<()> {
        let run = || {
            // SAFETY: `trigram/codecs.py` holds the tensors during the call, has checked that they
            // are contiguous, of these lengths and this dtype, and that they do not overlap.
            let (values, out) = unsafe {
                let values = match DType::from_code(dtype)? {
                    DType::F32 => Values::F32(slice(src, n)),
                    DType::F16 => Values::F16(slice::<f16>(src, n)),
                    DType::BF16 => Values::BF16(slice::<bf16>(src, n)),
                    _ => return Err(unsupported(dtype)),
                };
                (values, slice_mut(out, len))
            };
            let keep = match (residual, feedback) {
                (0, _) => Keep::Nothing,
                // SAFETY: as above; the residual has `n` values of float32.
                (at, true) => Keep::Feedback(unsafe { slice_mut(at, n) }),
                // SAFETY: as above.
                (at, false) => Keep::Remainder(unsafe { slice_mut(at, n) }),
            };
            codec::encode(&*self.0, values, keep, seed, out)
        };
        if n < SMALL { run() } else { py.detach(run) }.raise(py)
    }

    /// Decodes `len` bytes at `code` into `n` values at `out`, or adds them times `weight`.
    #[allow(clippy::too_many_arguments)] // one call from one place
    #[pyo3(signature = (code, len, out, n, dtype, weight, sender))]
    fn decode(
        &self,
        py: Python<'_>,
        code: usize,
        len: usize,
        out: usize,
        n: usize,
        dtype: u8,
        weight: Option<f32>,
        sender: u32,
    ) -> PyResult<()> {
        let run = || {
            // SAFETY: as in `encode`.
            let (code, out) = unsafe {
                let out = match (DType::from_code(dtype)?, weight) {
                    (DType::F32, None) => Target::F32(slice_mut(out, n)),
                    (DType::F32, Some(weight)) => Target::Add(slice_mut(out, n), weight),
                    (DType::F16, None) => Target::F16(slice_mut(out, n)),
                    (DType::BF16, None) => Target::BF16(slice_mut(out, n)),
                    _ => return Err(unsupported(dtype)),
                };
                (slice(code, len), out)
            };
            codec::decode(&*self.0, code, out, sender)
        };
        if n < SMALL { run() } else { py.detach(run) }.raise(py)
    }
}

/// Makes Adam's second moment of `n` float32 values that of the mean gradient, see `trigram_core::second_moment`.
#[pyfunction]
pub(crate) fn adapt_second_moment(
    py: Python<'_>,
    second: usize,
    first: usize,
    gradient: usize,
    n: usize,
    factors: (f32, f32, f32, f32),
) -> PyResult<()> {
    let (first_factor, own, part, least) = factors;
    let factors = Factors { first: first_factor, own, part, least };
    let run = || {
        // SAFETY: `trigram/optimizers/adam_variance.py` holds the tensors during the call, has checked that they are
        // dense, in one order, and of this length and type; an optimizer's moments and gradients do not overlap.
        let (second, first, gradient) =
            unsafe { (slice_mut(second, n), slice(first, n), slice(gradient, n)) };
        second_moment::adapt(second, first, gradient, factors)
    };
    if n < SMALL { run() } else { py.detach(run) }.raise(py)
}

/// The most bytes that the lossless code of `n` float32 values can take.
#[pyfunction]
pub(crate) fn lossless_size(n: usize) -> usize {
    lossless::worst(n)
}

/// Encodes `n` float32 values at `src` into the first of `len` bytes at `out`; returns how many.
#[pyfunction]
pub(crate) fn lossless_encode(
    py: Python<'_>,
    src: usize,
    n: usize,
    out: usize,
    len: usize,
) -> PyResult<usize> {
    // SAFETY: `trigram/codecs/lossless.py` holds the tensors during the call, has checked that they are contiguous, of
    // these lengths and types; a tensor of bytes and one of floats do not overlap.
    let run = || lossless::encode(unsafe { slice(src, n) }, unsafe { slice_mut(out, len) });
    if n < SMALL { run() } else { py.detach(run) }.raise(py)
}

/// Decodes `len` bytes at `code` into `n` float32 values at `out`, or adds them to what is there; sums are divided by
/// `ranks`, if that is not 0.
#[pyfunction]
#[allow(clippy::too_many_arguments)] // one call from one place
pub(crate) fn lossless_decode(
    py: Python<'_>,
    code: usize,
    len: usize,
    out: usize,
    n: usize,
    add: bool,
    ranks: u32,
    sender: u32,
) -> PyResult<()> {
    let then = match (add, ranks) {
        (false, _) => Then::Write,
        (true, 0) => Then::Add,
        (true, ranks) => Then::Mean(ranks),
    };
    // SAFETY: as in `lossless_encode`.
    let run = || lossless::decode(unsafe { slice(code, len) }, unsafe { slice_mut(out, n) }, then, sender);
    if n < SMALL { run() } else { py.detach(run) }.raise(py)
}
