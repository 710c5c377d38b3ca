//! Measures this rank's link, and paces connections by it, so that they queue no more than keeps the link busy.

use std::time::Instant;

use trigram_core::planner;
use trigram_core::schedule::Schedule;
use trigram_core::signature::Collective;

use crate::call::agreed_rates;
use crate::call::body::Body;
use crate::link::frames::Rx;
use crate::link::outbox::Outbox;
use crate::link::rate_meter::RateMeter;

/// The meter of this rank's link, and when it last paced the connections.
#[derive(Default)]
pub(crate) struct Pacing {
    meter: RateMeter,
    /// Large calls so far.
    large: u64,
    paced: Option<Instant>,
}

impl Pacing {
    /// See [`RateMeter::sample`].
    pub(crate) fn sample(&mut self, rx: &[Option<Rx>], out: &Outbox) {
        self.meter.sample(rx, out.connections());
    }

    /// See [`RateMeter::rate`].
    pub(crate) fn rate(&self, since: Option<Instant>) -> Option<f64> {
        self.meter.rate(since)
    }

    /// Now and then, before a large AllReduce among several hosts, tells the connections what this rank's link
    /// carries. Not if one connection carries most of the call, such as one to a fast helper: then no flows share the
    /// link, and acknowledgements would wait behind unpaced data.
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
