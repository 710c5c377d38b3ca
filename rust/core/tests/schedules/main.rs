//! Every topology, worlds 1 to 17, odd lengths, in the simulator: each Send meets its Recv, nobody
//! waits for ever, the result is right and bit-identical on all ranks, the bytes are the formula's.
#![allow(clippy::unwrap_used, clippy::panic)]

mod among_ranks;
mod between_hosts;
mod chosen;
mod run;
