//! The sizes at which the schedule of an AllReduce changes, as `trigram bench --tune` has measured them.
//!
//! A table is a text: a line for each number of ranks, with the most bytes for which recursive doubling is the fastest,
//! and the least bytes for which a ring is (`-`: it never was). Lines that begin with `#` are comments.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// What was measured among ranks that have a host each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tuned {
    /// How many ranks.
    pub world: u32,
    /// Up to here recursive doubling is the fastest, in bytes.
    pub doubling: u64,
    /// From here on a ring is.
    pub ring: Option<u64>,
}

/// Reads a table.
///
/// # Errors
///
/// [`Error::Config`] names the line.
pub fn parse(text: &str) -> Result<Vec<Tuned>> {
    let lines = (1..).zip(text.lines().map(str::trim));
    let lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    let mut found: Vec<Tuned> = Vec::new();
    for (number, line) in lines {
        let tuned = entry(line).filter(|new| found.iter().all(|old| old.world != new.world));
        found.push(tuned.ok_or_else(|| {
            Error::Config(format!(
                "line {number} is not \"RANKS BYTES BYTES\" or has a number of ranks that was named before: {line:?}"
            ))
        })?);
    }
    Ok(found)
}

fn entry(line: &str) -> Option<Tuned> {
    let mut words = line.split_whitespace();
    let (world, doubling, ring) = (words.next()?, words.next()?, words.next()?);
    let ring = match ring {
        "-" => None,
        bytes => Some(bytes.parse().ok()?),
    };
    let tuned = Tuned { world: world.parse().ok()?, doubling: doubling.parse().ok()?, ring };
    (words.next().is_none() && tuned.world > 1).then_some(tuned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_read_and_wrong_lines_are_named() {
        let text = "# ranks, doubling, ring\n2 131072 -\n\n 8 65536 1048576\n";
        let eight = Tuned { world: 8, doubling: 65_536, ring: Some(1_048_576) };
        assert_eq!(parse(text).unwrap(), [Tuned { world: 2, doubling: 131_072, ring: None }, eight]);
        for wrong in ["2 131072", "2 1 2 3", "1 5 -", "two 5 -", "2 -5 -", "2 5 -\n2 6 -"] {
            let error = parse(&format!("# comment\n{wrong}")).unwrap_err().to_string();
            assert!(error.contains("line 2") || error.contains("line 3"), "{error}");
        }
    }
}
