//! The environment variables.

use std::env;
use std::time::Duration;

use crate::error::{Error, Result};

/// More streams than this help nobody.
pub(crate) const MAX_STREAMS: usize = 16;
const STREAMS: &str = "TRIGRAM_NET_STREAMS";
const CHUNK: &str = "TRIGRAM_NET_CHUNK";
const TIMEOUT: &str = "TRIGRAM_NET_TIMEOUT";
const CHUNKS: (usize, usize) = (4 << 10, 64 << 20);

/// How connections are made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Settings {
    /// Streams per connection.
    pub(crate) streams: usize,
    /// Bytes per chunk.
    pub(crate) chunk: usize,
    /// After so long a silence, a peer is dead.
    pub(crate) timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { streams: 2, chunk: 512 << 10, timeout: Duration::from_secs(20) }
    }
}

impl Settings {
    /// What the environment says; an error that names the variable if it says nonsense.
    pub(crate) fn read() -> Result<Self> {
        Self::from(|name| env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn from(get: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let mut settings = Self::default();
        if let Some(value) = get(STREAMS) {
            let number = value.trim().parse().ok().filter(|n| (1..=MAX_STREAMS).contains(n));
            settings.streams = number.ok_or_else(|| {
                Error::usage(format!(
                    "{STREAMS}={value} is not valid; set it to a number from 1 to {MAX_STREAMS}"
                ))
            })?;
        }
        if let Some(value) = get(CHUNK) {
            let bytes = binary_size(&value).filter(|&bytes| bytes > 0).ok_or_else(|| {
                Error::usage(format!(
                    "{CHUNK}={value} is not valid; set it to a number of bytes such as 512K or 1M"
                ))
            })?;
            settings.chunk = bytes.clamp(CHUNKS.0, CHUNKS.1);
        }
        if let Some(value) = get(TIMEOUT) {
            let seconds = value.trim().parse().ok().filter(|s| (1..=3600).contains(s));
            settings.timeout = seconds.map(Duration::from_secs).ok_or_else(|| {
                Error::usage(format!(
                    "{TIMEOUT}={value} is not valid; set it to a number of seconds from 1 to 3600"
                ))
            })?;
        }
        Ok(settings)
    }
}

/// "65536", "64K", "64 KiB", "1m", "1MB": powers of 1024 in all spellings.
fn binary_size(text: &str) -> Option<usize> {
    let text = text.trim().to_ascii_lowercase();
    let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let shift = match unit.trim() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        _ => return None,
    };
    number.parse::<usize>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str, value: &str) -> Result<Settings> {
        Settings::from(|asked| (asked == name).then(|| value.to_owned()))
    }

    #[test]
    fn values_are_taken_and_clamped() {
        assert_eq!(Settings::from(|_| None).unwrap(), Settings::default());
        assert_eq!(with(STREAMS, "8").unwrap().streams, 8);
        assert_eq!(with(CHUNK, "1M").unwrap().chunk, 1 << 20);
        assert_eq!(with(CHUNK, "64 KiB").unwrap().chunk, 64 << 10);
        assert_eq!(with(CHUNK, "1").unwrap().chunk, 4 << 10);
        assert_eq!(with(CHUNK, "10G").unwrap().chunk, 64 << 20);
        assert_eq!(with(TIMEOUT, "5").unwrap().timeout, Duration::from_secs(5));
    }

    #[test]
    fn nonsense_names_its_variable() {
        for (name, value) in [
            (STREAMS, "0"),
            (STREAMS, "17"),
            (STREAMS, "many"),
            (CHUNK, "0"),
            (CHUNK, "1T"),
            (CHUNK, "99999999999999999999"),
            (CHUNK, "K"),
            (TIMEOUT, "0"),
            (TIMEOUT, "-1"),
        ] {
            let error = with(name, value).unwrap_err();
            assert_eq!(error.code, 5);
            assert!(error.message.contains(name) && error.message.contains(value), "{}", error.message);
        }
    }
}
