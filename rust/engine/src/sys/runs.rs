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

    /// Each place's first address, and the one after its last.
    fn ranges(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        let starts = std::iter::once(0).chain(self.places.iter().map(|place| place.1));
        self.places.iter().zip(starts).map(|((at, end), start)| (at.addr(), at.addr() + (end - start)))
    }

    /// Whether some byte lies in both.
    pub(crate) fn meets(&self, other: &Self) -> bool {
        let mut all: Vec<_> =
            self.ranges().map(|r| (r, true)).chain(other.ranges().map(|r| (r, false))).collect();
        all.sort_unstable();
        // The furthest end so far, of each of the two.
        let mut ends = [0; 2];
        all.into_iter().any(|((start, end), mine)| {
            let meets = start < ends[usize::from(!mine)];
            let last = &mut ends[usize::from(mine)];
            *last = end.max(*last);
            meets
        })
    }

    /// Whether its bytes are those of `other` from byte `at` on.
    pub(crate) fn starts_as(&self, other: &Self, at: usize) -> bool {
        let mine = self.ranges().map(|(start, end)| (start, end - start));
        other.cut(at, self.len()).is_some_and(|cut| mine.eq(cut.into_iter().map(|(at, n)| (at.addr(), n))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_bytes_are_found() {
        let runs = |places: &[(usize, usize)]| Runs::new(places.iter().copied());
        let list = runs(&[(1000, 8), (5000, 16), (2000, 4)]);
        for apart in [&[(1008, 10)][..], &[(992, 8), (5016, 4)], &[(2004, 1), (1999, 1)]] {
            assert!(!list.meets(&runs(apart)) && !runs(apart).meets(&list), "{apart:?}");
        }
        for shared in [&[(1007, 1)][..], &[(900, 101)], &[(1, 1), (4000, 4000)], &[(2003, 100)]] {
            assert!(list.meets(&runs(shared)) && runs(shared).meets(&list), "{shared:?}");
        }
        assert!(list.starts_as(&list, 0) && runs(&[(5000, 16)]).starts_as(&list, 8));
        assert!(!runs(&[(5000, 16)]).starts_as(&list, 0) && !runs(&[(2000, 8)]).starts_as(&list, 24));
    }

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
