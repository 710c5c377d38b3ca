//! Finding libraries at run time.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use crate::error::{Attempt, Error, Result};

/// Only what the process has loaded already.
const RTLD_NOLOAD: i32 = 0x4;
/// The variable that names NCCL's file.
pub const NCCL_VARIABLE: &str = "TRIGRAM_NCCL_LIB";
/// The variable that names the driver's file.
pub const CUDA_VARIABLE: &str = "TRIGRAM_CUDA_LIB";

/// Where NCCL is looked for, in this order: the file that `TRIGRAM_NCCL_LIB` names (then nowhere
/// else); the copy that the process has loaded, as PyTorch does; the `nvidia-nccl-*` wheel in the
/// directories given and in `$VIRTUAL_ENV`; wherever the system's loader looks.
#[derive(Clone, Debug, Default)]
pub struct Search {
    file: Option<PathBuf>,
    directories: Vec<PathBuf>,
}

impl Search {
    /// Nothing but the places above.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes this file and looks nowhere.
    #[must_use]
    pub fn file(mut self, file: impl Into<PathBuf>) -> Self {
        self.file = Some(file.into());
        self
    }

    /// Looks for the wheel in a `site-packages` directory too.
    #[must_use]
    pub fn site_packages(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directories.push(directory.into());
        self
    }

    /// Opens NCCL; with the place it was found in.
    pub(crate) fn nccl(&self) -> Result<(Handle, String)> {
        const NAME: &str = "libnccl.so.2";
        let advice = "install PyTorch's CUDA build or an nvidia-nccl-cu* wheel, or name the file in \
                      TRIGRAM_NCCL_LIB";
        if let Some(path) = &self.file {
            return file(path, NAME);
        }
        let mut tried = Vec::new();
        if let Some(found) = named(NCCL_VARIABLE, &mut tried) {
            return found.ok_or(Error::NotFound { library: NAME, tried, advice });
        }
        // SAFETY: nothing is loaded that the process does not run already.
        match unsafe { Handle::open(Some(NAME), RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD) } {
            Ok(handle) => return Ok((handle, format!("{NAME}, already in the process"))),
            Err(_) => tried.push(attempt(format!("{NAME} in this process"), "not loaded")),
        }
        for directory in self.directories.iter().cloned().chain(environment()) {
            let file = directory.join("nvidia/nccl/lib").join(NAME);
            if let Some(found) = at(&file, "", &mut tried) {
                return Ok(found);
            }
        }
        for name in [NAME, "libnccl.so"] {
            if let Some(found) = by_name(name, &mut tried) {
                return Ok(found);
            }
        }
        Err(Error::NotFound { library: NAME, tried, advice })
    }
}

/// Opens the driver; with the place it was found in.
pub(crate) fn cuda() -> Result<(Handle, String)> {
    const NAME: &str = "libcuda.so.1";
    let advice = "install NVIDIA's driver, and give containers access to the GPU";
    let mut tried = Vec::new();
    let found = match named(CUDA_VARIABLE, &mut tried) {
        Some(found) => found,
        None => by_name(NAME, &mut tried),
    };
    found.ok_or(Error::NotFound { library: NAME, tried, advice })
}

/// Opens one file, which somebody named.
pub(crate) fn file(file: &Path, library: &'static str) -> Result<(Handle, String)> {
    let mut tried = Vec::new();
    at(file, "", &mut tried).ok_or(Error::NotFound {
        library,
        tried,
        advice: "it was asked for by this name",
    })
}

fn attempt(place: impl Into<String>, reason: impl ToString) -> Attempt {
    Attempt { place: place.into(), reason: reason.to_string() }
}

/// The file that a variable names, if it is set.
fn named(variable: &str, tried: &mut Vec<Attempt>) -> Option<Option<(Handle, String)>> {
    let file: OsString = std::env::var_os(variable).filter(|value| !value.is_empty())?;
    Some(at(Path::new(&file), &format!(" from {variable}"), tried))
}

fn at(file: &Path, why: &str, tried: &mut Vec<Attempt>) -> Option<(Handle, String)> {
    let place = format!("{}{why}", file.display());
    if !file.exists() {
        tried.push(attempt(place, "no such file"));
        return None;
    }
    // SAFETY: a library runs code when it is loaded; the user installed this one, or named it.
    match unsafe { Handle::open(Some(file), RTLD_NOW | RTLD_LOCAL) } {
        Ok(handle) => Some((handle, place)),
        Err(e) => {
            tried.push(attempt(place, e));
            None
        }
    }
}

fn by_name(name: &str, tried: &mut Vec<Attempt>) -> Option<(Handle, String)> {
    // SAFETY: as in `at`.
    match unsafe { Handle::open(Some(name), RTLD_NOW | RTLD_LOCAL) } {
        Ok(handle) => Some((handle, format!("{name}, by the system's loader"))),
        Err(e) => {
            tried.push(attempt(format!("{name} by the system's loader"), e));
            None
        }
    }
}

/// The `site-packages` of an active virtual environment.
fn environment() -> Vec<PathBuf> {
    let Some(root) = std::env::var_os("VIRTUAL_ENV") else { return Vec::new() };
    let Ok(entries) = std::fs::read_dir(Path::new(&root).join("lib")) else { return Vec::new() };
    let mut found: Vec<PathBuf> = entries.flatten().map(|e| e.path().join("site-packages")).collect();
    found.sort();
    found
}
