//! Runs `trigram-core`'s schedules on real memory and real sockets.
//!
//! # Layout
//!
//! * [`group`] — what callers use: a group of ranks and its calls.
//! * [`engine`] — calls of any thread, on their way to whoever drives the work; `driver` — who that is, and how it
//!   sleeps; [`counters`] — what has been done.
//! * [`progress`] — one round of everything that moves.
//! * [`hub`] — the calls under way; [`plans`] — what each goes by; [`matching`] — what arrives finds who waits for it;
//!   [`failing`] — failures are made known; `pulse` — who is alive; `straggler` — who is slow; [`helping`] — a rank
//!   without data takes part.
//! * [`meter`] — what this rank's link carries; [`balance`] — how all ranks agree on it.
//! * [`job`] — one call under way, and its memory; [`steps`] — what a step does to memory.
//! * [`link`] — frames over a byte stream.
//! * [`transport`] — byte streams: `mem`, `shm`, `tcp`, `tls`, one file each; `faulty` damages one on purpose.
//! * [`host`] — what ranks on one host share: boards, lanes, doorbells, pipes; `sync` — the atomics they are made of.
//! * [`device`] — calls on GPU memory, which NCCL carries out.
//! * [`memory`] — memfd segments and registered memory.
//! * [`rendezvous`] — how ranks find each other; [`unix`] — descriptors inside a host.
//! * [`secret`] — what ranks know and strangers do not; [`contact`] — what two ranks prove to each other;
//!   [`handshake`] — between hosts, over a [`channel`], with TLS in a [`session`]; [`introduce`] — inside a host.
//! * [`members`], [`world`], [`ticket`], [`fork`] — who, where, when, and not in children.
//!
//! Unsafe code is in `memory`, `host`, `sync` (two copies), `transport::shm`, `link`, `job`, `steps`, `group` and
//! `device` (callers' memory), `matching` (one copy), `meter` (two ioctls), `transport::tcp` (one socket option),
//! `transport::faulty` (one mapping) and `fork`.

pub mod address;
pub mod balance;
pub mod channel;
pub mod contact;
pub mod counters;
pub mod device;
mod driver;
pub mod engine;
pub mod failing;
pub mod fork;
pub mod group;
pub mod handshake;
pub mod helping;
pub mod host;
pub mod hub;
pub mod introduce;
pub mod job;
pub mod link;
pub mod matching;
pub mod members;
pub mod memory;
pub mod meter;
pub mod plans;
pub mod progress;
mod pulse;
pub mod rendezvous;
pub mod secret;
pub mod session;
pub mod steps;
mod straggler;
mod sync;
pub mod ticket;
pub mod transport;
pub mod unix;
pub mod world;
