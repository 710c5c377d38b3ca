//! The library: loaded once, never closed.

use std::ffi::{CStr, c_int};
use std::sync::Arc;

use crate::error::{Error, Result};
use crate::ffi::{Code, SUCCESS, Table};
use crate::search::Search;
use crate::types::{UniqueId, Version};

/// The oldest version that works: the first with non-blocking communicators that can be split.
const LEAST: (Version, &str) = (Version::new(2, 18, 0), "2.18");

/// NCCL, as loaded at run time. Cheap to clone.
#[derive(Clone)]
pub struct Nccl {
    pub(crate) table: Arc<Table>,
    version: Version,
    path: Arc<str>,
}

impl std::fmt::Debug for Nccl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Nccl({} at {})", self.version, self.path)
    }
}

impl Nccl {
    /// Finds and loads it.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`] with all places that were looked in, [`Error::MissingSymbol`],
    /// [`Error::TooOld`] before 2.18.
    pub fn load(search: &Search) -> Result<Self> {
        let (handle, path) = search.nccl()?;
        // The version first: what is missing from an old library is missing because it is old.
        // SAFETY: the type is that of NCCL's header.
        let get_version =
            unsafe { handle.get::<unsafe extern "C" fn(*mut c_int) -> Code>(b"ncclGetVersion\0") };
        let Ok(get_version) = get_version else {
            return Err(Error::MissingSymbol { path, symbol: "ncclGetVersion" });
        };
        let mut code = 0;
        // SAFETY: it writes one integer.
        let returned = unsafe { get_version(&mut code) };
        let version = Version::from_code(code.unsigned_abs());
        if returned != SUCCESS || version < LEAST.0 {
            let (found, least) = (version.to_string(), LEAST.1);
            return Err(Error::TooOld { what: "a communicator", path, found, least });
        }
        let table = Arc::new(Table::read(&handle, &path)?);
        // NCCL has threads of its own: it must never be unloaded.
        std::mem::forget(handle);
        Ok(Self { table, version, path: path.into() })
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Where it was found.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// A new id, on one rank; it goes to the others by other means. Each id leaves a thread and a
    /// listening socket in this process for as long as it lives.
    ///
    /// # Errors
    ///
    /// [`Error::Nccl`], where there is no network interface, say.
    pub fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; UniqueId::BYTES]);
        // SAFETY: it writes as many bytes.
        let code = unsafe { (self.table.get_unique_id)(&mut id) };
        self.check("ncclGetUniqueId", code).map(|()| id)
    }

    /// What says that a function is missing, which came with version `least`.
    pub(crate) fn too_old(&self, what: &'static str, least: &'static str) -> Error {
        Error::TooOld { what, path: self.path().to_owned(), found: self.version().to_string(), least }
    }

    /// An error for a code that is not success.
    pub(crate) fn check(&self, call: &'static str, code: Code) -> Result<()> {
        if code == SUCCESS { Ok(()) } else { Err(self.error(call, code)) }
    }

    /// What a code means.
    pub(crate) fn error(&self, call: &'static str, code: Code) -> Error {
        // SAFETY: NCCL returns a literal for any number.
        let what = unsafe { text((self.table.get_error_string)(code)) };
        // SAFETY: the communicator is ignored; the buffer is the process's, and copied at once.
        let detail = unsafe { text((self.table.get_last_error)(std::ptr::null_mut())) };
        Error::Nccl { call, code, what, detail }
    }
}

/// A C string, or nothing.
///
/// # Safety
///
/// A null pointer, or a string that ends with a zero.
unsafe fn text(at: *const std::ffi::c_char) -> String {
    if at.is_null() {
        return String::new();
    }
    // SAFETY: passed on to the caller.
    unsafe { CStr::from_ptr(at) }.to_string_lossy().trim().to_owned()
}
