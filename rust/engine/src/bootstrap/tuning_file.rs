//! The file in which `trigram bench --tune` keeps what it has measured on this machine's network.

use std::env;
use std::path::PathBuf;

use trigram_core::tuning::{self, Tuned};
use trigram_core::{Error, Result};

/// What is known of this machine's network; empty if nothing was measured.
///
/// # Errors
///
/// [`Error::Config`] if the file cannot be read, or a line makes no sense.
pub fn read() -> Result<Vec<Tuned>> {
    let (named, path) = match env::var_os("TRIGRAM_TUNING").filter(|name| !name.is_empty()) {
        Some(name) if name == "off" => return Ok(Vec::new()),
        Some(name) => (true, PathBuf::from(name)),
        None => match usual_path() {
            Some(path) => (false, path),
            None => return Ok(Vec::new()),
        },
    };
    let refused = |why: String| {
        let path = path.display();
        Error::Config(format!(
            "the measurements of this network in {path} cannot be used: {why}; measure anew with trigram bench \
             all_reduce --tune, delete the file, or set TRIGRAM_TUNING=off"
        ))
    };
    match std::fs::read_to_string(&path) {
        Ok(text) => tuning::parse(&text).map_err(|why| refused(why.to_string())),
        // A cache that is not there, or that this user cannot read, is no reason to refuse a job.
        Err(_) if !named => Ok(Vec::new()),
        Err(why) => Err(refused(why.to_string())),
    }
}

/// As python/trigram/cli/tune.py names it.
fn usual_path() -> Option<PathBuf> {
    let cache = env::var_os("XDG_CACHE_HOME").filter(|name| !name.is_empty()).map(PathBuf::from);
    let cache = cache.or_else(|| env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache")));
    cache.map(|cache| cache.join("trigram").join("tuning.txt"))
}
