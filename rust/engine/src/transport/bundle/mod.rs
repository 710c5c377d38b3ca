//! Several streams to one peer that carry one stream of bytes: for links on which one stream carries too little, and for
//! hosts with several cables.
//!
//! The bytes are cut into chunks. Each goes to a stream that has room, behind a head with its position, its length and a
//! checksum of both; so each stream carries what it can. What a stream took in part is kept here until it takes the rest, so
//! that the others go on. The receiver passes bytes on in their order, and keeps chunks that come early.
//!
//! A chunk is kept until the peer says that it has arrived. If a stream fails, or nothing arrives by it while the peer speaks
//! by others, what it holds goes by those too. A chunk that comes twice is passed on once.

mod head;
mod inward;
mod outward;
mod receipts;
#[cfg(test)]
mod tests;

use std::sync::{Arc, Mutex};
use std::time::Duration;

pub use head::head;

use self::inward::BundleReceiver;
use self::outward::BundleSender;
use self::receipts::Receipts;
use crate::transport::stream::{Receiver, Sender};

/// Whose streams they are, for what is logged.
#[derive(Clone, Debug, Default)]
pub struct Between {
    /// This rank and the other.
    pub ranks: (u32, u32),
    /// The two addresses of each stream.
    pub addresses: Vec<String>,
    /// They go over different cables.
    pub apart: bool,
}

impl Between {
    /// Says what happens to one of the streams.
    fn tell(&self, number: usize, what: &str) {
        let (me, peer) = self.ranks;
        let addresses = self.addresses.get(number).map_or("unknown addresses", String::as_str);
        log::warn!(
            target: "trigram",
            "rank {me}: connection {} with rank {peer} ({addresses}) {what}; the others with this rank carry all",
            number + 1,
        );
    }

    fn tell_lost(&self, number: usize, why: &str) {
        self.tell(number, &format!("has failed: {why}"));
    }

    fn tell_stalled(&self, number: usize, since: Duration) {
        let seconds = since.as_secs_f64();
        self.tell(
            number,
            &format!("has carried nothing for {seconds:.1} s, although rank {} is alive", self.ranks.1),
        );
    }
}

/// Both directions of several connections to one peer as those of one.
pub fn join(
    streams: Vec<(Box<dyn Sender>, Box<dyn Receiver>)>,
    between: Between,
) -> (Box<dyn Sender>, Box<dyn Receiver>) {
    let (out, inward): (Vec<_>, Vec<_>) = streams.into_iter().unzip();
    let receipts = Arc::new(Mutex::new(Receipts::new(out.len())));
    (
        Box::new(BundleSender::new(out, receipts.clone(), between)),
        Box::new(BundleReceiver::new(inward, receipts)),
    )
}
