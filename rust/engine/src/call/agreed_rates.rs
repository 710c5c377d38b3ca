//! How the ranks of a group agree on what each one's link carries.
//!
//! All ranks must cut a call into the same shares, so they must go by the same rates. Calls of a
//! group are numbered alike on all ranks; every [`EPOCH`] of them make an epoch. With its first
//! large AllReduce of an epoch a rank declares to all what its link has carried since the last
//! declaration; with the first one of the next epoch all go by what was declared, for by then each
//! has heard all (that call waits for it). So agreeing costs a small message per epoch, which nobody waits for
//! unless a whole epoch is in flight.
//!
//! A failed call may have been skipped by some ranks and not by others, so what is declared in an
//! epoch with a failed call counts for nothing, and what was declared before: shares are equal until
//! the next declaration. Failures carry the number of their call, so all ranks forget the same.

use std::collections::BTreeMap;
use std::time::Instant;

use trigram_core::planner::Links;
use trigram_core::topology::balance;

/// Calls of an epoch. A change of rates is followed within three.
pub const EPOCH: u64 = 6;

/// Rates are steady when so many exchanges have not changed them: what was measured in the epoch that began with
/// a change is heard two epochs later.
const HELD: u32 = 2;

/// See [`AgreedRates::declare`].
const FADES: f64 = 0.9;

/// Declarations kept at most, so that a peer cannot fill our memory.
const KEPT: usize = 4;

/// The agreement of one group.
#[derive(Debug, Default)]
pub struct AgreedRates {
    /// The number of the call with which rates were last declared.
    declaration: Option<u64>,
    /// The one before, whose rates are in use or about to be.
    previous: Option<u64>,
    /// What was declared, by call, and by world rank.
    declared: BTreeMap<u64, BTreeMap<u32, Option<f64>>>,
    /// What this rank declared last, and when.
    last: Option<f64>,
    /// See [`AgreedRates::since`].
    at: Option<Instant>,
    failed: Option<u64>,
    rates: Vec<f64>,
    /// With helpers, the second epoch is for them alone and the ones around it for the workers, so that each
    /// link is full once and shows what it carries: rates that are not measured, but have these shares.
    trial: Vec<f64>,
    /// What calls went by when it was asked last.
    reported: (Vec<f64>, bool),
    /// For how many exchanges no rate has become worse.
    held: u32,
    /// See [`AgreedRates::version`].
    version: u64,
}

impl AgreedRates {
    /// Whether the call with this number is the first of its epoch that is asked about.
    pub fn is_first(&self, call: u64) -> bool {
        self.declaration.is_none_or(|x| call / EPOCH > x / EPOCH)
    }

    /// This rank declares its rate with a call that [`AgreedRates::is_first`]; returns what to tell.
    ///
    /// Where ranks only help, links are not always full: then what one carried says little of what it can, and
    /// what is known is forgotten slowly.
    pub fn declare(&mut self, call: u64, rank: u32, measured: Option<f64>, aided: bool) -> Option<f64> {
        self.last = match (measured, self.last) {
            (Some(now), Some(last)) if aided => Some(now.max(FADES * last)),
            (now, last) => now.or(last),
        };
        self.at = Some(Instant::now());
        self.previous = self.declaration.replace(call);
        self.receive(call, rank, self.last);
        self.last
    }

    /// When this rank last declared a rate.
    pub fn since(&self) -> Option<Instant> {
        self.at
    }

    /// A rank has declared its rate with this call.
    pub fn receive(&mut self, call: u64, rank: u32, rate: Option<f64>) {
        let rate = rate.filter(|r| r.is_finite() && *r > 0.0);
        self.declared.entry(call).or_default().insert(rank, rate);
        while self.declared.len() > KEPT {
            self.declared.pop_first();
        }
    }

    /// A call with this number has failed somewhere.
    pub fn void(&mut self, call: u64) {
        self.failed = self.failed.max(Some(call));
        self.version += 1;
    }

    /// Brings the rates up to date for the exchange that is due; `None` while one of `ranks`, of which the last
    /// `helpers` have no data, has not been heard, else whether what is known of the links has changed. Calls ask
    /// in the order of their numbers.
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
        let rates = if self.failed.is_some_and(|f| f / EPOCH >= call / EPOCH) {
            self.held = 0;
            Vec::new()
        } else {
            let declared = self.declared.get(&call)?;
            let heard = ranks.iter().map(|r| declared.get(r).copied()).collect::<Option<Vec<_>>>()?;
            balance::agree(&self.rates, &heard)
        };
        // Only now, when it is time for the change: who waits asks again.
        self.previous = None;
        self.trial = trial;
        self.declared = self.declared.split_off(&(call + 1));
        let changed = rates != self.rates;
        let holds = !changed || balance::are_better(&rates, &self.rates);
        self.held = if holds { self.held.saturating_add(1) } else { 0 };
        self.rates = rates;
        Some(self.has_changed())
    }

    /// Whether calls go by something else than when this was asked before.
    fn has_changed(&mut self) -> bool {
        let links = self.links();
        if links.rates == self.reported.0 && links.steady == self.reported.1 {
            return false;
        }
        self.reported = (links.rates.to_vec(), links.steady);
        self.version += 1;
        true
    }

    /// Grows whenever calls go by something else than before: schedules that were made earlier are out of date.
    pub fn version(&self) -> u64 {
        self.version
    }

    /// What each link has been measured to carry; empty while nobody knows.
    pub fn measured(&self) -> &[f64] {
        &self.rates
    }

    /// What is known of the links; nothing as long as rates are not known, or not trusted: some ranks may have
    /// skipped a call that failed, and with it the change that came with the call.
    pub fn links(&self) -> Links<'_> {
        let Some(declaration) = self.declaration else { return Links::default() };
        if self.failed.is_some_and(|f| f / EPOCH >= declaration / EPOCH) {
            return Links::default();
        }
        let rates = if self.trial.is_empty() { &self.rates } else { &self.trial };
        Links { rates, steady: self.held >= HELD }
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
        assert!(b.links().rates.is_empty() && !b.is_first(5));
        assert_eq!(declare(&mut b, 7, [3.0, 3.0, 3.0]), Some(true));
        assert_eq!(b.links().rates, [1.0, 2.0, 3.0]);
    }

    #[test]
    fn whoever_has_not_been_heard_is_waited_for() {
        let mut b = AgreedRates::default();
        b.declare(0, 0, Some(1.0), false);
        assert_eq!(b.settle(&[0, 4], 0), Some(false));
        b.declare(6, 0, Some(1.0), false);
        assert_eq!(b.settle(&[0, 4], 0), None);
        b.receive(0, 4, Some(5.0));
        assert_eq!(b.settle(&[0, 4], 0), Some(true));
        assert_eq!(b.links().rates, [1.0, 5.0]);
    }

    #[test]
    fn a_failure_makes_what_was_declared_before_it_void() {
        let mut b = AgreedRates::default();
        declare(&mut b, 0, [1.0, 2.0, 3.0]);
        b.void(4);
        assert_eq!(declare(&mut b, 6, [1.0, 2.0, 3.0]), Some(false));
        assert!(b.links().rates.is_empty());
        assert_eq!(declare(&mut b, 12, [1.0, 2.0, 3.0]), Some(true));
        assert_eq!(b.links().rates, [1.0, 2.0, 3.0]);
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
        assert_eq!(declaration(6, 8.0, None), [1.0, 1.0, 1e6]);
        assert_eq!(declaration(12, 2.0, Some(5.0)), [1.0, 1.0, 1e-6]);
        // A worker that carried little while the helper did all is not taken for slow.
        assert_eq!(declaration(18, 8.0, Some(5.0)), [7.2, 2.0, 5.0]);
    }

    #[test]
    fn a_change_that_was_waited_for_is_told() {
        let mut b = AgreedRates::default();
        b.declare(0, 0, Some(1.0), true);
        assert_eq!(b.settle(&[0, 1, 2], 1), Some(true));
        b.declare(6, 0, Some(1.0), true);
        assert_eq!(b.settle(&[0, 1, 2], 1), None);
        assert_eq!(b.links().rates, [1.0, 1.0, 1e-6]);
        (1..3).for_each(|rank| b.receive(0, rank, None));
        assert_eq!(b.settle(&[0, 1, 2], 1), Some(true));
        assert_eq!(b.links().rates, [1.0, 1.0, 1e6]);
    }

    #[test]
    fn who_skipped_a_failed_call_goes_by_the_same() {
        let (mut made, mut skipped) = (AgreedRates::default(), AgreedRates::default());
        for b in [&mut made, &mut skipped] {
            declare(b, 0, [1.0, 2.0, 3.0]);
            declare(b, 6, [1.0, 2.0, 3.0]);
            assert_eq!(b.links().rates, [1.0, 2.0, 3.0]);
        }
        declare(&mut made, 12, [1.0, 2.0, 3.0]);
        made.void(12);
        skipped.void(12);
        assert!(made.links().rates.is_empty() && !made.is_first(13));
        declare(&mut skipped, 13, [1.0, 2.0, 3.0]);
        assert!(skipped.links().rates.is_empty());
        for b in [&mut made, &mut skipped] {
            declare(b, 18, [4.0, 5.0, 6.0]);
            assert!(b.links().rates.is_empty());
            declare(b, 24, [4.0, 5.0, 6.0]);
            assert_eq!(b.links().rates, [4.0, 5.0, 6.0]);
        }
    }
}
