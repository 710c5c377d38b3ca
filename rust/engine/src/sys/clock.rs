//! A clock that takes a few nanoseconds to read: the processor's time stamp counter where it runs at one rate, otherwise
//! the system's monotonic clock. Its ticks become nanoseconds of the monotonic clock when somebody looks at them.

use std::sync::OnceLock;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A moment on both clocks: ticks and nanoseconds.
type Pair = (u64, u64);

/// Where the ticks come from, and a moment at which both clocks were read.
#[derive(Clone, Copy)]
struct Source {
    has_counter: bool,
    first: Pair,
}

static SOURCE: OnceLock<Source> = OnceLock::new();

/// Nanoseconds of the system's monotonic clock.
fn monotonic() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod counter {
    /// Whether the counter has one rate on all processors, at all times, and the kernel has found nothing wrong with it.
    pub(super) fn is_sound() -> bool {
        let distrusted = || {
            let name =
                std::fs::read_to_string("/sys/devices/system/clocksource/clocksource0/current_clocksource");
            name.is_ok_and(|name| matches!(name.trim(), "hpet" | "acpi_pm" | "jiffies" | "refined-jiffies"))
        };
        std::arch::x86_64::__cpuid(0x8000_0000).eax >= 0x8000_0007
            && std::arch::x86_64::__cpuid(0x8000_0007).edx & 1 << 8 != 0
            && !distrusted()
    }

    pub(super) fn read() -> u64 {
        // SAFETY: every x86_64 processor has this instruction.
        unsafe { std::arch::x86_64::_rdtsc() }
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod counter {
    pub(super) fn is_sound() -> bool {
        true // the architecture demands it
    }

    pub(super) fn read() -> u64 {
        let ticks: u64;
        // SAFETY: Linux lets every process read this register, which changes nothing.
        unsafe { std::arch::asm!("mrs {}, cntvct_el0", out(reg) ticks, options(nomem, nostack)) };
        ticks
    }
}

#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod counter {
    pub(super) fn is_sound() -> bool {
        false
    }

    pub(super) fn read() -> u64 {
        0
    }
}

impl Source {
    fn new() -> Self {
        let mut source = Self { has_counter: counter::is_sound(), first: (0, 0) };
        source.first = source.both();
        source
    }

    fn ticks(&self) -> u64 {
        if self.has_counter { counter::read() } else { monotonic() }
    }

    /// Both clocks at the same moment: of a few tries the one that took least.
    fn both(&self) -> Pair {
        let tries = (0..5).map(|_| {
            let (before, ticks, after) = (monotonic(), self.ticks(), monotonic());
            (after - before, (ticks, before + (after - before) / 2))
        });
        tries.min_by_key(|(took, _)| *took).map_or((0, 0), |(_, pair)| pair)
    }
}

/// The present moment, in ticks.
pub fn ticks() -> u64 {
    SOURCE.get_or_init(Source::new).ticks()
}

/// The time since a moment in ticks.
pub fn since(ticks: u64) -> Duration {
    let scale = Scale::now();
    Duration::from_nanos(scale.length(scale.last.0.saturating_sub(ticks)))
}

/// As many ticks as last this long.
pub(crate) fn in_ticks(length: Duration) -> u64 {
    (length.as_nanos() as f64 / Scale::now().rate) as u64
}

/// What turns ticks into nanoseconds, as of the moment when it was made.
#[derive(Clone, Copy, Debug)]
pub struct Scale {
    last: Pair,
    /// Nanoseconds of a tick.
    rate: f64,
}

impl Scale {
    /// From the first moment that this process has seen to now.
    pub fn now() -> Self {
        let source = SOURCE.get_or_init(Source::new);
        let (mut last, first) = (source.both(), source.first);
        // The shorter the time between the two moments, the less it tells of the rate.
        while source.has_counter && last.1.saturating_sub(first.1) < 100_000 {
            last = source.both();
        }
        let passed = last.0.saturating_sub(first.0);
        let rate =
            if source.has_counter && passed > 0 { (last.1 - first.1) as f64 / passed as f64 } else { 1.0 };
        Self { last, rate }
    }

    /// The nanoseconds of a number of ticks.
    pub fn length(&self, ticks: u64) -> u64 {
        (ticks as f64 * self.rate) as u64
    }

    /// A moment in ticks, in nanoseconds of the monotonic clock.
    pub fn moment(&self, ticks: u64) -> u64 {
        match ticks <= self.last.0 {
            true => self.last.1.saturating_sub(self.length(self.last.0 - ticks)),
            false => self.last.1 + self.length(ticks - self.last.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_moments_of_the_monotonic_clock() {
        let (before, at, after) = (monotonic(), ticks(), monotonic());
        std::thread::sleep(Duration::from_millis(20));
        let moment = Scale::now().moment(at);
        assert!(before - 20_000 < moment && moment < after + 20_000, "{before} {moment} {after}");
        assert!(since(at) >= Duration::from_millis(19));
    }
}
