//! Places in increasing order, coded as Elias and Fano did (1974): about 2 + log2(n/k) bits each, in a size that is
//! known before encoding.

/// The code of `k` places below `n`: their low bits, one place after the other, then their high parts as a bitmap.
#[derive(Clone, Copy)]
pub(super) struct Places {
    n: usize,
    k: usize,
    /// Low bits of each place.
    bits: usize,
    /// Bytes of the low bits.
    low: usize,
    size: usize,
}

impl Places {
    /// The code of `k` places, at least 1 and at most `n`.
    pub(super) fn new(n: usize, k: usize) -> Self {
        let bits = (n / k).ilog2() as usize;
        let low = (k * bits).div_ceil(8);
        let span = k + ((n - 1) >> bits) + 1;
        Self { n, k, bits, low, size: low + span.div_ceil(8) }
    }

    /// Bytes of the code.
    pub(super) fn size(self) -> usize {
        self.size
    }

    /// Writes the `i`-th place into a code that was all zeros.
    #[inline]
    pub(super) fn put(self, code: &mut [u8], i: usize, place: usize) {
        let (low, high) = code.split_at_mut(self.low);
        put(low, i * self.bits, place & ((1 << self.bits) - 1));
        let bit = (place >> self.bits) + i;
        high[bit / 8] |= 1 << (bit % 8);
    }

    /// Writes places into a code that was all zeros, the lowest first.
    pub(super) fn writer(self, code: &mut [u8]) -> Writer<'_> {
        let (low, high) = code.split_at_mut(self.low);
        Writer { bits: self.bits, low, high, held: 0, count: 0, i: 0 }
    }

    /// Whether a code of the right size is one of `k` places.
    ///
    /// # Errors
    ///
    /// It has another number of places, or they are not in order and below `n`.
    pub(super) fn check(self, code: &[u8]) -> Result<(), String> {
        let marked: usize = code[self.low..].iter().map(|b| b.count_ones() as usize).sum();
        if marked != self.k {
            return Err(format!("{marked} of {} values are marked, not {}", self.n, self.k));
        }
        let mut before = None;
        for place in self.read(code) {
            if place >= self.n || before.is_some_and(|before| place <= before) {
                return Err(format!("of {} values that at {place} is sent after {before:?}", self.n));
            }
            before = Some(place);
        }
        Ok(())
    }

    /// The places of a code that [`Places::check`] has accepted.
    #[inline]
    pub(super) fn read(self, code: &[u8]) -> impl Iterator<Item = usize> {
        let (low, high) = code.split_at(self.low);
        // A bit at p is the i-th, so at least i are before it.
        ones(high).enumerate().map(move |(i, p)| (p - i) << self.bits | get(low, i * self.bits, self.bits))
    }
}

/// Writes one place after the other, see [`Places::writer`].
pub(super) struct Writer<'a> {
    bits: usize,
    /// What is left of the low bits' bytes.
    low: &'a mut [u8],
    high: &'a mut [u8],
    /// Low bits that do not fill eight bytes yet, and how many.
    held: u128,
    count: usize,
    i: usize,
}

impl Writer<'_> {
    /// Writes the next place.
    #[inline]
    pub(super) fn put(&mut self, place: usize) {
        self.held |= ((place & ((1 << self.bits) - 1)) as u128) << self.count;
        self.count += self.bits;
        if self.count >= 64 {
            self.flush(8);
        }
        let bit = (place >> self.bits) + self.i;
        self.high[bit / 8] |= 1 << (bit % 8);
        self.i += 1;
    }

    /// Writes what is held still: after the last place.
    pub(super) fn finish(mut self) {
        self.flush(self.count.div_ceil(8));
    }

    fn flush(&mut self, bytes: usize) {
        let (now, later) = std::mem::take(&mut self.low).split_at_mut(bytes);
        now.copy_from_slice(&self.held.to_le_bytes()[..bytes]);
        self.low = later;
        self.held >>= 8 * bytes;
        self.count = self.count.saturating_sub(8 * bytes);
    }
}

/// Where the bits of a bitmap are set.
#[inline]
fn ones(bitmap: &[u8]) -> impl Iterator<Item = usize> {
    bitmap.chunks(8).enumerate().flat_map(|(at, bytes)| {
        let mut word = [0; 8];
        word[..bytes.len()].copy_from_slice(bytes);
        let mut rest = u64::from_le_bytes(word);
        std::iter::from_fn(move || {
            let first = rest.trailing_zeros() as usize;
            (rest != 0).then(|| {
                rest &= rest - 1;
                64 * at + first
            })
        })
    })
}

/// Sets the bits of `value` from bit `at` on; they are zero before.
#[inline]
fn put(bytes: &mut [u8], at: usize, value: usize) {
    let (mut byte, mut rest) = (at / 8, (value as u128) << (at % 8));
    while rest > 0 {
        bytes[byte] |= rest as u8;
        rest >>= 8;
        byte += 1;
    }
}

/// Reads `bits` bits from bit `at` on.
#[inline]
fn get(bytes: &[u8], at: usize, bits: usize) -> usize {
    let mut value = 0u128;
    let last = (at + bits).div_ceil(8);
    for byte in (at / 8..last).rev() {
        value = value << 8 | u128::from(bytes[byte]);
    }
    (value >> (at % 8)) as usize & ((1usize << bits) - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_come_back() {
        for (n, k) in [(1, 1), (2, 1), (64, 64), (65, 1), (1000, 7), (4096, 82), (4097, 1300), (1 << 20, 3)] {
            let format = Places::new(n, k);
            for shift in [0, (n - 1) % (n / k)] {
                let places: Vec<usize> = (0..k).map(|i| i * (n / k) + shift).collect();
                let mut code = vec![0; format.size()];
                places.iter().enumerate().for_each(|(i, &place)| format.put(&mut code, i, place));
                format.check(&code).unwrap();
                assert_eq!(format.read(&code).collect::<Vec<_>>(), places, "{k} of {n}");
                let mut in_turn = vec![0; format.size()];
                let mut writer = format.writer(&mut in_turn);
                places.iter().for_each(|&place| writer.put(place));
                writer.finish();
                assert_eq!(in_turn, code, "{k} of {n}");
            }
        }
    }

    #[test]
    fn other_codes_are_refused() {
        let format = Places::new(100, 5);
        let code = |places: [usize; 5]| {
            let mut code = vec![0; format.size()];
            places.iter().enumerate().for_each(|(i, &place)| format.put(&mut code, i, place));
            format.check(&code)
        };
        code([0, 1, 17, 98, 99]).unwrap();
        for places in [[0, 1, 17, 98, 100], [0, 1, 17, 98, 111], [1, 0, 17, 98, 99], [1, 1, 17, 98, 99]] {
            code(places).unwrap_err();
        }
        for few in [0, 4] {
            let mut code = vec![0; format.size()];
            (0..few).for_each(|i| format.put(&mut code, i, i));
            assert!(format.check(&code).unwrap_err().contains(&format!("{few} of 100")));
        }
    }
}
