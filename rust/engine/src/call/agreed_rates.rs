//! How the ranks of a group agree on what each rank's link carries.
//!
//! All ranks must cut a call into the same shares, so they must use the same rates. All ranks number the calls of a
//! group alike; every [`EPOCH`] calls make an epoch. With its first large AllReduce of an epoch, a rank declares to
//! all others what its link has carried since its last declaration. From the first large AllReduce of the next epoch
//! on, all ranks use these rates: that call waits until it has received all declarations. So agreeing costs one small
//! message per epoch, and no rank waits for it unless a whole epoch is in flight.
//!
//! Some ranks may have skipped a call that failed. So a failed call voids what was declared in its epoch and before:
//! shares are equal until the next declaration. A failure carries the number of its call, so all ranks void the same
//! declarations.

use std::collections::{BTreeMap, VecDeque};
use std::time::Instant;

use trigram_core::planner::Links;
use trigram_core::topology::balance;

/// Calls of an epoch. Calls follow a change of rates within three epochs.
pub const EPOCH: u64 = 6;

/// Rates are steady once this many declarations have not changed them: what was measured in the epoch of a change is
/// in use two epochs later.
const HELD: u32 = 2;

/// Declarations that [`AgreedRates::measured`] goes by. Calls follow the last one, to answer a change at once. But fast
/// links that wait for a slow one carry little more than that one, and show what they can only now and then.
const REMEMBERED: usize = 6;

/// See [`AgreedRates::declare`].
const FADES: f64 = 0.9;

/// The most declarations kept, so that a peer cannot fill our memory.
const KEPT: usize = 4;

/// The rates of one group.
#[derive(Debug, Default)]
pub struct AgreedRates {
    /// The number of the call with which rates were last declared.
    declaration: Option<u64>,
    /// The declaration before that, whose rates are in use or will be next.
    previous: Option<u64>,
    /// Declared rates, by call and by world rank.
    declared: BTreeMap<u64, BTreeMap<u32, Option<f64>>>,
    /// What this rank declared last.
    last: Option<f64>,
    /// See [`AgreedRates::since`].
    at: Option<Instant>,
    failed: Option<u64>,
    rates: Vec<f64>,
    /// The last [`REMEMBERED`] rates that were declared.
    recent: VecDeque<Vec<f64>>,
    /// With helpers, the second epoch loads the helpers alone, and the epochs around it the workers, so that each
    /// link is busy once and shows what it carries. These are not measured rates; they only produce those shares.
    trial: Vec<f64>,
    /// What calls used when this was last asked.
    reported: (Vec<f64>, bool),
    /// For how many declarations no rate has become worse.
    held: u32,
    /// See [`AgreedRates::version`].
    version: u64,
}

impl AgreedRates {
    /// Whether this call is the first of its epoch that is asked about.
    pub fn is_first(&self, call: u64) -> bool {
        self.declaration.is_none_or(|x| call / EPOCH > x / EPOCH)
    }

    /// This rank declares its rate with a call for which [`AgreedRates::is_first`] holds; returns the rate to send.
    ///
    /// With helpers in the group, links are not always busy, so a low measurement says little about what a link can
    /// carry: the last rate fades slowly.
    pub fn declare(&mut self, call: u64, rank: u32, measured: Option<f64>, aided: bool) -> Option<f64> {
        self.last = match (measured, self.last) {
            (Some(now), Some(last)) if aided => Some(now.max(FADES * last)),
            (now, last) => now.or(last),
        };
        // What is too little for a rate is not lost: the next one counts it too.
        if measured.is_some() {
            self.at = Some(Instant::now());
        }
        self.previous = self.declaration.replace(call);
        self.receive(call, rank, self.last);
        self.last
    }

    /// When this rank last declared what it had measured.
    pub fn since(&self) -> Option<Instant> {
        self.at
    }

    /// Records the rate that a rank declared with this call.
    pub fn receive(&mut self, call: u64, rank: u32, rate: Option<f64>) {
        let rate = rate.filter(|r| r.is_finite() && *r > 0.0);
        self.declared.entry(call).or_default().insert(rank, rate);
        while self.declared.len() > KEPT {
            self.declared.pop_first();
        }
    }

    /// Voids what was declared up to a failed call.
    pub fn void(&mut self, call: u64) {
        self.failed = self.failed.max(Some(call));
        self.version += 1;
    }

    /// Brings the rates up to date for the declaration that is due; `None` while the declaration of one of `ranks` is
    /// missing; otherwise whether what is known of the links has changed. The last `helpers` ranks have no data.
    /// Calls ask in the order of their numbers.
    pub fn settle(&mut self, ranks: &[u32], helpers: usize) -> Option<bool> {
        let trial = match self.declaration.map_or(0, |call| call / EPOCH) {
            epoch @ 0..3 if helpers > 0 => {
                let helper = if epoch == 1 { 1e6 } else { 1e-6 };
                let workers = ranks.len() - helpers;
                (0..ranks.len()).map(|place| if place < workers { 1.0 } else { helper }).collect()
            }
            _ => Vec::new(),
        };
        let Some(call) = self.previous else {
            self.trial = trial;
            return Some(self.has_changed());
        };
        let before = self.measured();
        let rates = if self.failed.is_some_and(|f| f / EPOCH >= call / EPOCH) {
            self.held = 0;
            self.recent.clear();
            Vec::new()
        } else {
            let declared = self.declared.get(&call)?;
            let rates = ranks.iter().map(|r| declared.get(r).copied()).collect::<Option<Vec<_>>>()?;
            if let Some(known) = rates.iter().copied().collect() {
                self.recent.truncate(REMEMBERED - 1);
                self.recent.push_front(known);
            }
            balance::agree(&self.rates, &rates)
        };
        // Only now: a call that had to wait asks again.
        self.previous = None;
        self.trial = trial;
        self.declared = self.declared.split_off(&(call + 1));
        let changed = rates != self.rates;
        let holds = !changed || balance::are_better(&rates, &self.rates);
        self.held = if holds { self.held.saturating_add(1) } else { 0 };
        self.rates = rates;
        Some(self.has_changed() | (before != self.measured()))
    }

    /// Whether calls use other rates than when this was last asked.
    fn has_changed(&mut self) -> bool {
        let links = self.links();
        if links.rates == self.reported.0 && links.steady == self.reported.1 {
            return false;
        }
        self.reported = (links.rates.to_vec(), links.steady);
        self.version += 1;
        true
    }

    /// Grows whenever calls use other rates than before: schedules that were made earlier are out of date.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// The most that each link has been measured to carry of late; empty while nobody knows.
    pub fn measured(&self) -> Vec<f64> {
        let most = |a: Vec<f64>, b: &Vec<f64>| a.iter().zip(b).map(|(a, b)| a.max(*b)).collect();
        let mut recent = self.recent.iter();
        recent.next().map_or_else(Vec::new, |last| recent.fold(last.clone(), most))
    }

    /// What is known of the links. Empty if rates are unknown or void: some ranks may have skipped a failed call, and
    /// with it a change of rates.
    pub fn links(&self) -> Links<'_> {
        let Some(declaration) = self.declaration else { return Links::default() };
        if self.failed.is_some_and(|f| f / EPOCH >= declaration / EPOCH) {
            return Links::default();
        }
        let rates = if self.trial.is_empty() { &self.rates } else { &self.trial };
        Links { rates, steady: self.held >= HELD, far: false }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn declare(b: &mut AgreedRates, call: u64, rates: [f64; 3]) -> Option<bool> {
        assert!(b.is_first(call));
        b.declare(call, 0, Some(rates[0]), false);
        b.receive(call, 1, Some(rates[1]));
        b.receive(call, 2, Some(rates[2]));
        b.settle(&[0, 1, 2], 0)
    }

    #[test]
    fn rates_declared_in_one_epoch_hold_in_the_next() {
        let mut b = AgreedRates::default();
        assert_eq!(declare(&mut b, 2, [1.0, 2.0, 3.0]), Some(false));
        assert!(b.links().rates.is_empty() && !b.is_first(EPOCH - 1));
        assert_eq!(declare(&mut b, EPOCH + 1, [3.0, 3.0, 3.0]), Some(true));
        assert_eq!(b.links().rates, [1.0, 2.0, 3.0]);
    }

    #[test]
    fn what_was_too_little_to_measure_counts_for_the_next_declaration() {
        let mut b = AgreedRates::default();
        assert_eq!((b.declare(0, 0, None, false), b.since()), (None, None));
        assert_eq!(b.declare(EPOCH, 0, Some(2.0), false), Some(2.0));
        let since = b.since();
        assert!(since.is_some());
        assert_eq!((b.declare(2 * EPOCH, 0, None, false), b.since()), (Some(2.0), since));
    }

    #[test]
    fn a_missing_declaration_is_waited_for() {
        let mut b = AgreedRates::default();
        b.declare(0, 0, Some(1.0), false);
        assert_eq!(b.settle(&[0, 4], 0), Some(false));
        b.declare(EPOCH, 0, Some(1.0), false);
        assert_eq!(b.settle(&[0, 4], 0), None);
        b.receive(0, 4, Some(5.0));
        assert_eq!(b.settle(&[0, 4], 0), Some(true));
        assert_eq!(b.links().rates, [1.0, 5.0]);
    }

    #[test]
    fn a_failure_makes_what_was_declared_before_it_void() {
        let mut b = AgreedRates::default();
        declare(&mut b, 0, [1.0, 2.0, 3.0]);
        b.void(EPOCH - 2);
        assert_eq!(declare(&mut b, EPOCH, [1.0, 2.0, 3.0]), Some(false));
        assert!(b.links().rates.is_empty());
        assert_eq!(declare(&mut b, 2 * EPOCH, [1.0, 2.0, 3.0]), Some(true));
        assert_eq!(b.links().rates, [1.0, 2.0, 3.0]);
    }

    #[test]
    fn what_a_link_carried_of_late_is_known_after_it_waited_for_a_slower_one() {
        let mut b = AgreedRates::default();
        for (epoch, fast) in (0..).zip([9.0, 3.0, 4.0, 3.0]) {
            declare(&mut b, epoch * EPOCH, [fast, 12.0 - fast, 2.0]);
        }
        assert_eq!((b.measured(), b.links().rates.to_vec()), (vec![9.0, 9.0, 2.0], vec![4.0, 8.0, 2.0]));
        for epoch in 4..4 + REMEMBERED as u64 {
            declare(&mut b, epoch * EPOCH, [3.0, 4.0, 2.0]);
        }
        assert_eq!(b.measured(), [3.0, 9.0, 2.0]);
        declare(&mut b, (4 + REMEMBERED as u64) * EPOCH, [3.0, 4.0, 2.0]);
        assert_eq!(b.measured(), [3.0, 4.0, 2.0]);
        b.void((4 + REMEMBERED as u64) * EPOCH);
        declare(&mut b, (5 + REMEMBERED as u64) * EPOCH, [3.0, 4.0, 2.0]);
        assert!(b.measured().is_empty());
    }

    #[test]
    fn with_helpers_each_link_is_full_once() {
        let mut b = AgreedRates::default();
        let mut declaration = |call: u64, worker: f64, helper: Option<f64>| {
            b.declare(call, 0, Some(worker), true);
            b.receive(call, 1, Some(worker));
            b.receive(call, 2, helper);
            b.settle(&[0, 1, 2], 1).unwrap();
            b.links().rates.to_vec()
        };
        assert_eq!(declaration(0, 8.0, None), [1.0, 1.0, 1e-6]);
        assert_eq!(declaration(EPOCH, 8.0, None), [1.0, 1.0, 1e6]);
        assert_eq!(declaration(2 * EPOCH, 2.0, Some(5.0)), [1.0, 1.0, 1e-6]);
        // A worker that carried little while the helper did all the work does not count as slow.
        assert_eq!(declaration(3 * EPOCH, 8.0, Some(5.0)), [7.2, 2.0, 5.0]);
    }

    #[test]
    fn a_change_that_was_waited_for_is_reported() {
        let mut b = AgreedRates::default();
        b.declare(0, 0, Some(1.0), true);
        assert_eq!(b.settle(&[0, 1, 2], 1), Some(true));
        b.declare(EPOCH, 0, Some(1.0), true);
        assert_eq!(b.settle(&[0, 1, 2], 1), None);
        assert_eq!(b.links().rates, [1.0, 1.0, 1e-6]);
        (1..3).for_each(|rank| b.receive(0, rank, None));
        assert_eq!(b.settle(&[0, 1, 2], 1), Some(true));
        assert_eq!(b.links().rates, [1.0, 1.0, 1e6]);
    }

    #[test]
    fn a_rank_that_skipped_a_failed_call_uses_the_same_rates() {
        let (mut made, mut skipped) = (AgreedRates::default(), AgreedRates::default());
        for b in [&mut made, &mut skipped] {
            declare(b, 0, [1.0, 2.0, 3.0]);
            declare(b, EPOCH, [1.0, 2.0, 3.0]);
            assert_eq!(b.links().rates, [1.0, 2.0, 3.0]);
        }
        declare(&mut made, 2 * EPOCH, [1.0, 2.0, 3.0]);
        made.void(2 * EPOCH);
        skipped.void(2 * EPOCH);
        assert!(made.links().rates.is_empty() && !made.is_first(2 * EPOCH + 1));
        declare(&mut skipped, 2 * EPOCH + 1, [1.0, 2.0, 3.0]);
        assert!(skipped.links().rates.is_empty());
        for b in [&mut made, &mut skipped] {
            declare(b, 3 * EPOCH, [4.0, 5.0, 6.0]);
            assert!(b.links().rates.is_empty());
            declare(b, 4 * EPOCH, [4.0, 5.0, 6.0]);
            assert_eq!(b.links().rates, [4.0, 5.0, 6.0]);
        }
    }
}
