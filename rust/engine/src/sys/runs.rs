//! Memory in several places that a call sees as one: lists of tensors.
//!
//! Schedules know nothing of it. A span that lies in one of the places is used where it is. One that reaches over several
//! is sent and received through a copy, and reduced place by place.

/// Stretches of memory, one after another.
#[derive(Clone, Debug, Default)]
pub struct Runs {
    /// By stretch: its first byte, and where it ends as seen by the call.
    places: Vec<(*mut u8, usize)>,
}

// SAFETY: these are addresses only; they are used while the progress lock is held.
unsafe impl Send for Runs {}

impl Runs {
    /// These addresses and bytes, in this order; empty ones are left out.
    pub fn new(stretches: impl IntoIterator<Item = (usize, usize)>) -> Self {
        let mut end = 0usize;
        let place = |(at, len): (usize, usize)| {
            end = end.saturating_add(len);
            (len > 0).then_some((at as *mut u8, end))
        };
        Self { places: stretches.into_iter().filter_map(place).collect() }
    }

    /// Bytes of all.
    pub fn len(&self) -> usize {
        self.places.last().map_or(0, |place| place.1)
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Whether all addresses are multiples of `size`.
    pub fn are_aligned(&self, size: usize) -> bool {
        self.places.iter().all(|place| place.0.addr().is_multiple_of(size))
    }

    /// Where byte `at` is, and how many bytes follow it in the same place; `None` beyond the end.
    pub fn find(&self, at: usize) -> Option<(*mut u8, usize)> {
        let i = self.places.partition_point(|place| place.1 <= at);
        let (base, end) = *self.places.get(i)?;
        let start = if i == 0 { 0 } else { self.places[i - 1].1 };
        Some((base.wrapping_add(at - start), end - at))
    }

    /// The places of `len` bytes from `at` on, in order; `None` if they reach beyond the end.
    pub fn cut(&self, mut at: usize, mut len: usize) -> Option<Vec<(*mut u8, usize)>> {
        let mut cut = Vec::new();
        while len > 0 {
            let (place, have) = self.find(at)?;
            let n = have.min(len);
            cut.push((place, n));
            (at, len) = (at + n, len - n);
        }
        Some(cut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_found_across_places() {
        let runs = Runs::new([(1000, 8), (5000, 0), (2000, 4), (3000, 12)]);
        assert_eq!(runs.len(), 24);
        let find = |at| runs.find(at).map(|(place, have)| (place.addr(), have));
        assert_eq!(find(0), Some((1000, 8)));
        assert_eq!(find(7), Some((1007, 1)));
        assert_eq!(find(8), Some((2000, 4)));
        assert_eq!(find(23), Some((3011, 1)));
        assert_eq!(find(24), None);
        let cut = |at, len| {
            let places = runs.cut(at, len)?;
            Some(places.into_iter().map(|(place, n)| (place.addr(), n)).collect::<Vec<_>>())
        };
        assert_eq!(cut(6, 8).unwrap(), [(1006, 2), (2000, 4), (3000, 2)]);
        assert_eq!(cut(20, 5), None);
        assert_eq!(cut(24, 0).unwrap(), []);
        assert!(runs.are_aligned(8) && !runs.are_aligned(16));
    }
}
