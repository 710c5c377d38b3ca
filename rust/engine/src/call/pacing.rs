//! What this rank's link carries: measured, and told to the connections now and then so that they queue no more.

use std::time::Instant;

use trigram_core::planner;
use trigram_core::schedule::Schedule;
use trigram_core::signature::Collective;

use crate::call::agreed_rates;
use crate::call::body::Body;
use crate::link::frames::Rx;
use crate::link::outbox::Outbox;
use crate::link::rate_meter::RateMeter;

/// The meter of this rank's link, and when connections were last paced by it.
#[derive(Default)]
pub(crate) struct Pacing {
    meter: RateMeter,
    /// Large calls so far.
    large: u64,
    paced: Option<Instant>,
}

impl Pacing {
    /// Looks at what has come and gone, see [`RateMeter::sample`].
    pub(crate) fn sample(&mut self, rx: &[Option<Rx>], out: &Outbox) {
        self.meter.sample(rx, out.connections());
    }

    /// What the link has carried since then, see [`RateMeter::rate`].
    pub(crate) fn rate(&self, since: Option<Instant>) -> Option<f64> {
        self.meter.rate(since)
    }

    /// Now and then, before a large AllReduce among several hosts, tells the connections what this
    /// rank's link carries, so that they queue no more than keeps it busy. Not where one of them carries most of
    /// it, as to a fast helper: then nobody shares the link, and what is acknowledged waits behind what is not paced.
    pub(crate) fn pace(&mut self, body: &Body, schedule: &Schedule, out: &mut Outbox) {
        let (members, call) = (&body.members, &body.request.call);
        let bytes = call.len * call.dtype.size();
        if call.what != Collective::AllReduce || members.ranks.len() < 3 || bytes < planner::BALANCED_BYTES {
            return;
        }
        if schedule.traffic().iter().any(|t| 4 * t.sent.max(t.received) > 3 * call.len) {
            return;
        }
        self.large += 1;
        if !self.large.is_multiple_of(agreed_rates::EPOCH) {
            return;
        }
        let Some(rate) = self.meter.rate(self.paced.replace(Instant::now())) else { return };
        for peer in schedule.traffic().iter().filter(|t| t.sent > 0) {
            if let Some(tx) = members.ranks.get(peer.peer as usize).and_then(|&rank| out.to(rank)) {
                tx.pace(rate);
            }
        }
    }
}
