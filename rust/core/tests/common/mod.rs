//! What tests with hostile input share: random bytes that are the same in every run, and an account of memory.
//!
//! Used by the tests of other crates of the workspace too (`#[path]`).
#![allow(dead_code)] // not every test uses all of it

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// How many inputs a target is given: a few in a test run, `TRIGRAM_FUZZ` of them if that is set.
pub(crate) fn inputs(few: usize) -> usize {
    std::env::var("TRIGRAM_FUZZ").ok().and_then(|n| n.parse().ok()).unwrap_or(few)
}

/// Says how many inputs a target has had, and what became of them: where that was asked for past the test harness,
/// which would show each line of each rank that is given up too.
pub(crate) fn report(target: &str, inputs: usize, began: Instant, what: &str) {
    if std::env::var_os("TRIGRAM_FUZZ").is_some() {
        let took = began.elapsed().as_secs_f64();
        let _ = writeln!(std::io::stdout(), "hostile {target}: {inputs} inputs in {took:.1} s; {what}");
    }
}

/// xoshiro256++.
#[derive(Clone)]
pub(crate) struct Rng([u64; 4]);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        let mut z = seed;
        Self(std::array::from_fn(|_| {
            z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let x = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            x ^ x >> 31
        }))
    }

    pub(crate) fn next(&mut self) -> u64 {
        let s = &mut self.0;
        let out = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// Below `n`, which is not 0.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }

    /// True once in `n` times.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next().to_le_bytes()[..chunk.len()]);
        }
    }

    /// A number where code often goes wrong: small, near a power of two, near the largest, or any.
    pub(crate) fn number(&mut self) -> u64 {
        let small = self.below(4) as u64;
        match self.below(5) {
            0 => small,
            1 => (1u64 << self.below(64)).wrapping_add(small).wrapping_sub(2),
            2 => u64::MAX - small,
            3 => self.next() >> self.below(64),
            _ => self.next(),
        }
    }

    /// Does to bytes what goes wrong with them: some change, some are lost, some come twice.
    pub(crate) fn spoil(&mut self, bytes: &mut Vec<u8>) {
        for _ in 0..=self.below(3) {
            if bytes.is_empty() {
                return;
            }
            let at = self.below(bytes.len());
            match self.below(6) {
                0 => bytes[at] ^= 1 << self.below(8),
                1 => bytes[at] = self.next() as u8,
                2 => bytes.truncate(at),
                3 => {
                    let number = self.number().to_le_bytes();
                    let end = bytes.len().min(at + 8);
                    bytes[at..end].copy_from_slice(&number[..end - at]);
                }
                4 => {
                    let end = bytes.len().min(at + 1 + self.below(40));
                    bytes.extend_from_within(at..end);
                }
                _ => drop(bytes.drain(at..bytes.len().min(at + 1 + self.below(40)))),
            }
        }
    }
}

/// Counts what is allocated. A test binary makes it its `#[global_allocator]`.
pub(crate) struct Account {
    now: AtomicUsize,
    peak: AtomicUsize,
}

impl Account {
    pub(crate) const fn new() -> Self {
        Self { now: AtomicUsize::new(0), peak: AtomicUsize::new(0) }
    }

    /// Begins anew: the bytes that are held now.
    pub(crate) fn begin(&self) -> usize {
        let now = self.now.load(Ordering::Relaxed);
        self.peak.store(now, Ordering::Relaxed);
        now
    }

    /// The most bytes held since [`Account::begin`].
    pub(crate) fn peak(&self) -> usize {
        self.peak.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: usize) {
        let now = self.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }
}

// SAFETY: all work is the system allocator's.
unsafe impl GlobalAlloc for Account {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.add(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        self.now.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Where it cannot grow in place both are held for a moment.
        self.add(size);
        self.now.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}
